//! Whether a signal has stopped another process of this host: it answers to nothing, and its connections
//! stay.

use super::rendezvous::Who;
use std::fs::{read_link, read_to_string};

/// Whether a signal has stopped a process of the run, for all that can be seen: nothing of one on
/// another host.
pub(super) fn is_stopped(who: &Who) -> bool {
    let is_here = who.host == crate::record::host();
    is_here && runs_this_binary(who.pid) == Some(true) && has_stopped(who.pid)
}

/// Whether a process runs the binary of this one, where that can be seen.
pub(super) fn runs_this_binary(pid: u32) -> Option<bool> {
    let binary = |pid: &str| read_link(format!("/proc/{pid}/exe")).ok();
    Some(binary(&pid.to_string())? == binary("self")?)
}

fn has_stopped(pid: u32) -> bool {
    let stat = read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the name, which is in brackets and may have any.
    let state = stat.rsplit_once(") ");
    state.is_some_and(|(_, rest)| rest.starts_with('T'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_stopped_process_is_seen_to_be() {
        let mut sleep = Command::new("sleep").arg("100").spawn().unwrap();
        assert!(!has_stopped(sleep.id()));
        let pid = rustix::process::Pid::from_child(&sleep);
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
        let since = std::time::Instant::now();
        while !has_stopped(sleep.id()) {
            assert!(since.elapsed().as_secs() < 10);
        }
        // It is no process of the run.
        let stranger = Who {
            pid: sleep.id(),
            ..Who::me()
        };
        assert!(!is_stopped(&stranger) && !is_stopped(&Who::me()));
        sleep.kill().unwrap();
        sleep.wait().unwrap();
        assert!(!has_stopped(sleep.id()));
    }
}
