//! A backend's work on a thread of its own.
//!
//! A library cannot be interrupted inside of a linear program, and HiGHS has been seen to overrun
//! its own time limit. So the caller waits a little longer than that and then leaves the thread
//! behind, which ends when the library does, or when it sees that nobody waits any more.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::Answer;

/// The time between two questions of the caller whether to give up.
const POLL: Duration = Duration::from_millis(20);
/// The time beyond its own limit that a library may run before it is left behind.
const GRACE: Duration = Duration::from_millis(1500);

const STOPPED: Answer = Answer::Stopped {
    columns: None,
    bound: None,
};

/// Returns the answer of `solve`, unless `stop` or the time limit comes first. `solve` is given a
/// flag that is set when it is left behind, and answers `None` when the library refuses the model.
pub(super) fn aside(
    name: &str,
    time: Option<Duration>,
    stop: &dyn Fn() -> bool,
    solve: impl FnOnce(&AtomicBool) -> Option<Answer> + Send + 'static,
) -> Answer {
    let (send, receive) = mpsc::channel();
    let left = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&left);
    let work = move || {
        // The receiver may have given up; then nobody is interested.
        let _ = send.send(solve(&flag).unwrap_or(STOPPED));
    };
    let thread = std::thread::Builder::new().name(name.into()).spawn(work);
    if thread.is_err() {
        return STOPPED;
    }
    let begun = Instant::now();
    let overran = || time.is_some_and(|time| begun.elapsed() > time + GRACE);
    loop {
        match receive.recv_timeout(POLL) {
            Ok(answer) => return answer,
            Err(mpsc::RecvTimeoutError::Timeout) if !stop() && !overran() => {}
            Err(_) => {
                left.store(true, Ordering::Relaxed);
                return STOPPED;
            }
        }
    }
}
