//! Other processes of this host, which the system shows: when one is gone that can be seen, where
//! no connection breaks.

use super::rendezvous::Who;
use super::stopped::runs_this_binary;
use rustix::io::Errno;
use std::fs::read_to_string;
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
        let is_own = runs_this_binary(who.pid)?;
        let started = started(who.pid).ok()?;
        let started = started.filter(|_| is_own && who.host == crate::record::host())?;
        Some(Neighbour {
            pid: who.pid,
            started,
        })
    }
    /// Whether it has ended since, for all that can be seen.
    pub fn is_gone(&self) -> bool {
        started(self.pid).is_ok_and(|started| started != Some(self.started))
    }
}

/// When a process was started; none where it has ended, whether or not its parent knows.
///
/// Fails when that cannot be read, as where this process has too many files open.
fn started(pid: u32) -> io::Result<Option<u64>> {
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
        let is_over = matches!(fields.next()?, "Z" | "X" | "x");
        // The 22nd field of the line, of which this is the third.
        let started: u64 = fields.nth(18)?.parse().ok()?;
        Some((!is_over).then_some(started))
    };
    parsed().ok_or_else(|| io::Error::other("the state of a process has another form"))
}

#[cfg(test)]
mod tests {
    use super::{Neighbour, started};
    use crate::processes::rendezvous::Who;
    use std::process::{Command, Stdio};

    #[test]
    fn a_process_is_there_until_it_ends() {
        let sleep = Command::new("sleep")
            .arg("100")
            .stdout(Stdio::null())
            .spawn();
        let mut sleep = sleep.unwrap();
        let started = started(sleep.id()).unwrap().expect("it is there");
        let neighbour = Neighbour {
            pid: sleep.id(),
            started,
        };
        assert!(!neighbour.is_gone());
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
