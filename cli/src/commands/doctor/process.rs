//! The state of the processes that records name, where they are of this host.

use runtime::record::{self, Seen};

pub(super) const ELSEWHERE: &str = "on another host";
pub(super) const GONE: &str = "gone";
pub(super) const STOPPED: &str = "stopped by a signal";
pub(super) const DEAD: &str = "dead";

/// The fate of a rank's process.
pub(super) struct Process {
    pub pid: u32,
    pub host: String,
    pub state: &'static str,
    /// Whether it can do nothing any more, or not until somebody lets it.
    pub is_still: bool,
}

impl Process {
    /// Looks, where it is a process of this host.
    pub fn of(seen: &Seen) -> Self {
        let here = record::host();
        let status = format!("/proc/{}/status", seen.pid);
        let state = match std::fs::read_to_string(status) {
            _ if here != seen.host => ELSEWHERE,
            Err(_) => GONE,
            Ok(status) => match status.lines().find_map(|l| l.strip_prefix("State:")) {
                Some(state) => state_word(state.trim()),
                None => "there",
            },
        };
        Process {
            pid: seen.pid,
            host: seen.host.clone(),
            state,
            is_still: [GONE, STOPPED, DEAD].contains(&state),
        }
    }
    pub fn words(&self) -> String {
        format!(
            "process {} on {}, which is {}",
            self.pid, self.host, self.state
        )
    }
}

fn state_word(state: &str) -> &'static str {
    match state.as_bytes().first() {
        Some(b'T' | b't') => STOPPED,
        Some(b'Z' | b'X') => DEAD,
        Some(b'D') => "waiting for a disk or the like",
        Some(b'R') => "running",
        _ => "there",
    }
}
