//! Other processes of this host, which the system shows: when one is gone that can be seen, where
//! no connection breaks.

use super::rendezvous::Who;
use std::fs::{read_link, read_to_string};

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
        let started = started(who.pid).filter(|_| is_own && who.host == crate::record::host())?;
        Some(Neighbour {
            pid: who.pid,
            started,
        })
    }
    /// Whether it has ended since.
    pub fn is_gone(&self) -> bool {
        started(self.pid) != Some(self.started)
    }
}

/// When a process was started; none where it has ended, whether or not its parent knows.
fn started(pid: u32) -> Option<u64> {
    let stat = read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in front may have spaces and parentheses of its own.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace();
    let is_over = matches!(fields.next()?, "Z" | "X" | "x");
    // The 22nd field of the line, of which this is the third.
    let started = fields.nth(18)?.parse().ok()?;
    (!is_over).then_some(started)
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
        let started = started(sleep.id()).expect("it is there");
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
