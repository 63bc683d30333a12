//! Whether process 0 goes on. The ranks of other processes wait for what it asks of them, and while
//! it asks for nothing no call of theirs is ever overdue. So a thread of it lets them hear from it,
//! as long as the thread that coordinates goes on. Where that one does not, process 0 ends by
//! itself; and where all of it stands still, as one that a signal has stopped, the others hear
//! nothing any more.
//!
//! Time is counted in looks, so that a machine that sleeps, or a run all of whose processes are
//! stopped together, has not stood still meanwhile.

use super::frame::{Head, Letter};
use super::lines::Lines;
use crate::fabric::nccl::LastResort;
use crate::fabric::threads::Carrier;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

/// How often process 0 is heard in the time that it has, and how far these times are apart.
const BEATS: u32 = 4;
const SHORTEST: Duration = Duration::from_millis(20);
const LONGEST: Duration = Duration::from_secs(1);
/// How many times the watchdog's time something may take that is no step, as writing states to a
/// disk: by process 0 alone, or by ranks that it has asked for it.
pub(crate) const ALONE: u32 = 12;

/// The kind of work of the thread that coordinates, by which is known how long it may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Doing {
    /// Something that may take long, as writing to a disk. So it is until something else is said.
    Alone = 0,
    /// Steps, between which there is little to do.
    Steps = 1,
    /// Telling others, who may listen when they like, as where a terminal's output is held.
    Telling = 2,
}

/// The signs of life of the thread that coordinates. Whoever sees that it does something else sees
/// as well that it has gone on: it goes on first, and is looked at the other way round.
#[derive(Debug, Default)]
pub(crate) struct Pulse {
    went_on: AtomicU64,
    /// A [`Doing`].
    doing: AtomicU8,
}

impl Pulse {
    /// Has the other processes hear from this one until the result is dropped. Ends it by the last
    /// resort where the thread that coordinates does not go on for as long as what it does may
    /// take.
    pub fn start(
        to: Arc<Lines>,
        of: usize,
        watchdog: Duration,
        last_resort: Option<LastResort>,
    ) -> Arc<Self> {
        let pulse = Arc::new(Pulse::default());
        let watched = Arc::downgrade(&pulse);
        let beat = (watchdog / BEATS).clamp(SHORTEST, LONGEST);
        std::thread::spawn(move || {
            let (mut seen, mut still) = ((0, 0), Duration::ZERO);
            while let Some(pulse) = watched.upgrade() {
                let now = pulse.look();
                drop(pulse);
                let limit = limit(now.0, watchdog);
                still = match now == seen {
                    true => still + beat,
                    false => Duration::ZERO,
                };
                seen = now;
                if limit.is_some_and(|limit| still > limit) {
                    let seconds = still.as_secs_f64();
                    let reason = format!("process 0 has not gone on for {seconds:.1} s");
                    last_resort.iter().for_each(|end| end(&reason));
                    // Else those that hear nothing more end the run.
                    return;
                }
                (1..of).for_each(|process| {
                    let (head, body) = (Head::Alive, None);
                    to.send(process, Letter { head, body });
                });
                std::thread::sleep(beat);
            }
        });
        pulse
    }
    /// The thread that coordinates goes on.
    pub fn goes_on(&self) {
        self.went_on.fetch_add(1, Ordering::Release);
    }
    /// It does something of this kind until the result is dropped.
    pub fn during(self: &Arc<Self>, doing: Doing) -> During {
        self.goes_on();
        let before = self.doing.swap(doing as u8, Ordering::AcqRel);
        During {
            pulse: Arc::clone(self),
            before,
        }
    }
    /// The kind of its doing, and how often it has gone on.
    fn look(&self) -> (u8, u64) {
        let doing = self.doing.load(Ordering::Acquire);
        (doing, self.went_on.load(Ordering::Acquire))
    }
}

/// How long the thread may stand still that does this.
fn limit(doing: u8, watchdog: Duration) -> Option<Duration> {
    match doing {
        d if d == Doing::Alone as u8 => Some(watchdog.saturating_mul(ALONE)),
        d if d == Doing::Steps as u8 => Some(watchdog),
        _ => None,
    }
}

/// A kind of work that goes on.
pub(crate) struct During {
    pulse: Arc<Pulse>,
    before: u8,
}

impl Drop for During {
    fn drop(&mut self) {
        self.pulse.goes_on();
        self.pulse.doing.store(self.before, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::processes::tests::assembled;
    use std::sync::atomic::AtomicBool;
    use std::time::Instant;

    static HAS_ENDED: AtomicBool = AtomicBool::new(false);

    fn end(reason: &str) {
        assert!(
            reason.starts_with("process 0 has not gone on for "),
            "{reason}"
        );
        HAS_ENDED.store(true, Ordering::Relaxed);
    }

    #[test]
    fn a_coordinator_that_does_not_go_on_ends() {
        let all = assembled(2);
        let watchdog = Duration::from_millis(200);
        let pulse = Pulse::start(all[0].carrier(), 2, watchdog, Some(end));
        {
            // Who is told may listen when they like.
            let _telling = pulse.during(Doing::Telling);
            std::thread::sleep(5 * watchdog);
        }
        assert!(!HAS_ENDED.load(Ordering::Relaxed));
        let _steps = pulse.during(Doing::Steps);
        let since = Instant::now();
        while !HAS_ENDED.load(Ordering::Relaxed) {
            assert!(since.elapsed() < Duration::from_secs(60), "it goes on");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
