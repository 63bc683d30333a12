//! Two clocks: wall time, and the processor time of a thread.
//!
//! Ranks that share processors are taken off them in the middle of an instruction, and waiting
//! ranks let others run. Wall time therefore says how long something took on this machine with
//! everything else that went on; processor time says how much work it was.

use std::time::{Duration, Instant};

/// A moment of the calling thread.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    wall: Instant,
    processor: Option<Duration>,
}

/// The time between two moments of a thread, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Elapsed {
    /// On the clock.
    pub wall_s: f64,
    /// On a processor; where the system does not say, as on the clock.
    pub busy_s: f64,
}

impl Moment {
    /// Now.
    pub fn now() -> Self {
        Moment {
            wall: Instant::now(),
            processor: processor_time(),
        }
    }
    /// The time since, on the same thread.
    pub fn elapsed(&self) -> Elapsed {
        self.until(&Moment::now())
    }
    /// The time that passed until a later moment of the same thread.
    pub fn until(&self, later: &Moment) -> Elapsed {
        let wall_s = later
            .wall
            .saturating_duration_since(self.wall)
            .as_secs_f64();
        let busy = self.processor.zip(later.processor);
        Elapsed {
            wall_s,
            busy_s: busy.map_or(wall_s, |(from, to)| to.saturating_sub(from).as_secs_f64()),
        }
    }
}

#[cfg(unix)]
fn processor_time() -> Option<Duration> {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    t.try_into().ok()
}

#[cfg(not(unix))]
fn processor_time() -> Option<Duration> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn sleeping_is_no_work() {
        let began = Moment::now();
        std::thread::sleep(Duration::from_millis(60));
        let slept = began.elapsed();
        assert!(slept.wall_s >= 0.06 && slept.busy_s < 0.03, "{slept:?}");
        let began = Moment::now();
        let mut n = 0u64;
        while began.elapsed().busy_s < 0.02 {
            n = std::hint::black_box(n + 1);
        }
        assert!(began.elapsed().wall_s >= 0.02, "{n}");
    }
}
