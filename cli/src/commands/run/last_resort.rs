//! The end of a process of which a thread will never come back: from the GPU's driver, or, in
//! process 0, the one that coordinates.

use crate::failure::Exit;
use crate::interrupt::say_last as say;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Says why and ends, at once, so that the keeper of an elastic run takes it for lost.
pub fn end_kept(reason: &str) {
    say(format!(
        "error: {reason}: nothing is left but to kill this process"
    ));
    let own = rustix::process::getpid();
    let _ = rustix::process::kill_process(own, rustix::process::Signal::KILL);
    std::process::abort()
}

/// Says why and ends, at once.
///
/// An end in order would not come: it waits for the thread, and what the driver does at the end of its
/// process may wait for it, too. So the process becomes another one, which ends. With it go its
/// connections, by which the others learn of it.
pub fn end(reason: &str) {
    let code = Exit::RunFailed as i32;
    say(format!(
        "error: {reason}: nothing is left but to end this process, with exit code {code}"
    ));
    let failed = Command::new("/bin/sh")
        .args(["-c", &format!("exit {code}")])
        .exec();
    say(format!("warning: /bin/sh: {failed}"));
    std::process::abort()
}
