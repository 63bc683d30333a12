//! Clocks: wall time, the processor time of a thread, its time in line for a processor, and the
//! time in which its process stood still.
//!
//! Ranks that share processors are taken off them in the middle of an instruction, and waiting
//! ranks let others run. Wall time therefore says how long something took on this machine with
//! everything else that went on; processor time says how much work it was.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
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

/// Time that somebody has to wait, as it sees it pass. Of a pause in which it did not look, as when
/// its process was stopped or the machine slept, no more counts than [`Patience::PAUSE`]: whoever
/// is waited for may have slept as well.
#[derive(Debug)]
pub(crate) struct Patience {
    left: Duration,
    looked: Instant,
}

impl Patience {
    /// How often it is to be looked at.
    pub const LOOK: Duration = Duration::from_millis(250);
    /// Most that counts from one look to the next: a busy machine may keep a thread waiting, too.
    const PAUSE: Duration = Duration::from_secs(1);

    /// So much, from now on.
    pub fn of(time: Duration) -> Self {
        Patience {
            left: time,
            looked: Instant::now(),
        }
    }
    /// The time that is left.
    pub fn left(&mut self) -> Duration {
        let now = Instant::now();
        self.passes(now.saturating_duration_since(self.looked));
        self.looked = now;
        self.left
    }
    fn passes(&mut self, time: Duration) {
        self.left = self.left.saturating_sub(time.min(Self::PAUSE));
    }
}

/// The time that a thread could have run and had no processor, as Linux counts it.
#[derive(Debug)]
pub struct InLine(Option<File>);

impl InLine {
    /// The one of the calling thread.
    pub fn of_this_thread() -> Self {
        InLine(File::open("/proc/thread-self/schedstat").ok())
    }
    /// Seconds since the thread began; zero where the system does not say.
    pub fn seconds(&self) -> f64 {
        let mut text = [0; 64];
        let read = self.0.as_ref().map(|file| read_from_start(file, &mut text));
        let n = read.and_then(Result::ok).unwrap_or(0);
        let text = std::str::from_utf8(&text[..n]).unwrap_or_default();
        // Nanoseconds on a processor, nanoseconds in line for one, turns.
        let in_line = text.split_whitespace().nth(1);
        in_line.and_then(|t| t.parse::<f64>().ok()).unwrap_or(0.0) / 1e9
    }
}

/// The time in which a process stood still: a signal had stopped it, its control group had used up
/// its share of a processor. A thread of it sleeps for a moment again and
/// again until the last copy is dropped, and counts by how much it wakes too late.
#[derive(Clone, Debug)]
pub(crate) struct Standstill(Arc<AtomicU64>);

impl Standstill {
    /// How long the thread sleeps.
    const TICK: Duration = Duration::from_millis(2);
    /// How late it may wake for other reasons.
    const LATE: Duration = Duration::from_millis(1);

    /// Counts for this process, from now on. Where it may have no further thread, it never stands
    /// still.
    pub fn begin() -> Self {
        let late = Arc::new(AtomicU64::new(0));
        let counted = Arc::downgrade(&late);
        let ticks = move || {
            while let Some(late) = counted.upgrade() {
                let began = Instant::now();
                std::thread::sleep(Self::TICK);
                let by = began.elapsed().saturating_sub(Self::TICK);
                if by > Self::LATE {
                    late.fetch_add(by.as_micros() as u64, Ordering::Relaxed);
                }
            }
        };
        let thread = std::thread::Builder::new().name("standstill".into());
        // Without it nobody looks: the process never stands still.
        thread.spawn(ticks).ok();
        Standstill(late)
    }
    /// Seconds since then.
    pub fn seconds(&self) -> f64 {
        Duration::from_micros(self.0.load(Ordering::Relaxed)).as_secs_f64()
    }
}

#[cfg(unix)]
fn read_from_start(file: &File, to: &mut [u8]) -> std::io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, to, 0)
}

#[cfg(not(unix))]
fn read_from_start(_: &File, _: &mut [u8]) -> std::io::Result<usize> {
    Ok(0)
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

    /// Two processes that sleep for an hour have not waited for each other for an hour.
    #[test]
    fn time_in_which_nobody_looked_is_not_waited() {
        let mut patience = Patience::of(Duration::from_secs(5));
        patience.passes(Duration::from_secs(3600));
        assert_eq!(patience.left.as_secs(), 4);
        (0..16).for_each(|_| patience.passes(Patience::LOOK));
        assert!(patience.left().is_zero());
    }

    /// A shell stops this process for a fifth of a second.
    #[cfg(unix)]
    #[test]
    fn a_process_that_a_signal_stops_stands_still() {
        let still = Standstill::begin();
        std::thread::sleep(Duration::from_millis(50));
        let before = still.seconds();
        let id = std::process::id();
        let script = format!("trap 'kill -CONT {id}' EXIT; kill -STOP {id}; sleep 0.2");
        let done = std::process::Command::new("sh")
            .args(["-c", &script])
            .status();
        assert!(done.is_ok_and(|d| d.success()));
        // It is counted when the thread wakes.
        std::thread::sleep(Duration::from_millis(50));
        let stood = still.seconds() - before;
        assert!(stood > 0.18, "{stood}");
    }

    /// More threads than processors, all at work: some of them are in line.
    #[cfg(target_os = "linux")]
    #[test]
    fn threads_that_share_processors_stand_in_line() {
        let n = 2 * std::thread::available_parallelism().map_or(1, usize::from) + 1;
        let at_work = || {
            let (line, began) = (InLine::of_this_thread(), Moment::now());
            let before = line.seconds();
            while began.elapsed().wall_s < 0.1 {
                std::hint::black_box(());
            }
            line.seconds() - before
        };
        let in_line: f64 = std::thread::scope(|s| {
            let all: Vec<_> = (0..n).map(|_| s.spawn(at_work)).collect();
            all.into_iter().filter_map(|t| t.join().ok()).sum()
        });
        // A system that keeps no count says zero.
        let counts = std::path::Path::new("/proc/thread-self/schedstat").exists();
        assert!(in_line > 0.05 || !counts, "{in_line}");
    }
}
