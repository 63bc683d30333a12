//! Other processes of this host, which the system shows: when one is gone, or a signal has stopped it,
//! that can be seen, where no connection breaks. Nothing is seen where there is no `/proc`.

use super::rendezvous::Who;
use rustix::io::Errno;
use std::fs::{read_link, read_to_string};
use std::io::{self, ErrorKind};

/// A process of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Neighbour {
    pid: u32,
    /// When it was started, in the system's ticks: another process may come to have its number.
    started: u64,
}

impl Neighbour {
    /// Finds a process of the run; none where it cannot be seen, as on another host, or in another
    /// container that has the same name. There its number may be that of a stranger: who runs the
    /// same binary is none.
    pub fn find(who: &Who) -> Option<Self> {
        let binary = |pid: &str| read_link(format!("/proc/{pid}/exe")).ok();
        let is_own = binary(&who.pid.to_string())? == binary("self")?;
        let seen = seen(who.pid).ok()??;
        let is_here = is_own && who.host == crate::record::host();
        is_here.then_some(Neighbour {
            pid: who.pid,
            started: seen.started,
        })
    }
    /// Whether a signal has stopped it, for all that can be seen.
    pub fn is_stopped(&self) -> bool {
        let seen = seen(self.pid).ok().flatten();
        seen.is_some_and(|seen| seen.started == self.started && seen.is_stopped)
    }
    /// Whether it has ended since, for all that can be seen.
    pub fn is_gone(&self) -> bool {
        let is_it = |seen: Seen| seen.started == self.started;
        seen(self.pid).is_ok_and(|seen| !seen.is_some_and(is_it))
    }
}

/// A process as the system shows it.
struct Seen {
    started: u64,
    is_stopped: bool,
}

/// Looks at a process; none where it has ended, whether or not its parent knows.
///
/// Fails when that cannot be seen, as where this process has too many files open.
fn seen(pid: u32) -> io::Result<Option<Seen>> {
    let stat = match read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        // It ended between the opening of the file and the reading.
        Err(e) if Errno::from_io_error(&e) == Some(Errno::SRCH) => return Ok(None),
        Err(e) => return Err(e),
    };
    let parsed = || {
        // The name in front may have spaces and parentheses of its own.
        let (_, fields) = stat.rsplit_once(')')?;
        let mut fields = fields.split_ascii_whitespace();
        let state = fields.next()?;
        // The 22nd field of the line, of which this is the third.
        let started: u64 = fields.nth(18)?.parse().ok()?;
        let is_over = matches!(state, "Z" | "X" | "x");
        Some((!is_over).then_some(Seen {
            started,
            is_stopped: state == "T",
        }))
    };
    parsed().ok_or_else(|| io::Error::other("the state of a process has another form"))
}

#[cfg(test)]
mod tests {
    use super::{Neighbour, seen};
    use crate::processes::rendezvous::Who;
    use std::process::{Command, Stdio};

    #[test]
    fn a_process_is_there_until_it_ends() {
        let sleep = Command::new("sleep")
            .arg("100")
            .stdout(Stdio::null())
            .spawn();
        let mut sleep = sleep.unwrap();
        let there = seen(sleep.id()).unwrap().expect("it is there");
        let neighbour = Neighbour {
            pid: sleep.id(),
            started: there.started,
        };
        assert!(!neighbour.is_gone() && !neighbour.is_stopped());
        let pid = rustix::process::Pid::from_child(&sleep);
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
        let since = std::time::Instant::now();
        while !neighbour.is_stopped() {
            assert!(since.elapsed().as_secs() < 10);
        }
        assert!(!neighbour.is_gone());
        // Another one that has come to its number is none of the run's.
        let other = Neighbour {
            started: there.started + 1,
            ..neighbour
        };
        assert!(!other.is_stopped() && other.is_gone());
        sleep.kill().unwrap();
        let since = std::time::Instant::now();
        // Its parent, this process, has not asked for it yet.
        while !neighbour.is_gone() {
            assert!(since.elapsed().as_secs() < 10);
        }
        sleep.wait().unwrap();
        assert!(neighbour.is_gone());
    }

    #[test]
    fn only_processes_of_the_run_are_neighbours() {
        let me = Who::me();
        assert!(Neighbour::find(&me).is_some_and(|n| !n.is_gone()));
        let mut elsewhere = me.clone();
        elsewhere.host += "-2";
        assert_eq!(Neighbour::find(&elsewhere), None);
        let mut stranger = Command::new("sleep").arg("100").spawn().unwrap();
        let other = Who {
            pid: stranger.id(),
            ..me
        };
        assert_eq!(Neighbour::find(&other), None);
        stranger.kill().unwrap();
        stranger.wait().unwrap();
    }
}
