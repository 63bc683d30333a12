//! The work of a call, as it stands in a member's stream: first it brings the operands
//! ([`Task::arrive`]), and holds the stream up until all that it meets have brought theirs; then
//! each member makes its own result ([`Task::run`]).

#![allow(unsafe_code)] // copies between addresses that the driver has checked

use super::clique::Clique;
use super::room::{Call, Kind, State};
use super::types::{Type, reduce};
use crate::link::Driver;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// A part of a task.
#[derive(Clone, Debug)]
pub enum Part {
    /// A collective: its number, the call, addresses of operand and result.
    Collective(u64, Call, [u64; 2]),
    /// A message: sender, receiver and number, whether this is its receiver, address, elements,
    /// type.
    Message((usize, usize, u64), bool, (u64, usize, Type)),
}

/// A call that a member of a communicator puts on a stream at once.
#[derive(Debug)]
pub struct Task {
    pub parts: Vec<Part>,
    pub clique: Arc<Clique>,
    /// The member.
    pub rank: usize,
    /// Set when the member's communicator is aborted: then there is nothing to do.
    pub is_aborted: Arc<AtomicBool>,
    pub is_over: AtomicBool,
    /// When what comes from other hosts is there, once it is known.
    pub due: OnceLock<Option<Instant>>,
}

/// The network between hosts.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Network {
    /// How late all is that goes over it.
    late: Duration,
    /// Bits that it takes in a second; infinite where it takes no time.
    bits_per_s: f64,
}

/// Seconds that nobody waits for.
const A_YEAR: f64 = 3e7;

impl Network {
    /// As `$MESHWRIGHT_EMULATOR_LINK` says, such as `late=20000us rate=8Mbit`: at once where it is
    /// empty, or says nothing of one of them.
    fn named(words: &str) -> Result<Self, String> {
        let mut network = Network {
            late: Duration::ZERO,
            bits_per_s: f64::INFINITY,
        };
        for word in words.split_whitespace() {
            let late = word
                .strip_prefix("late=")
                .and_then(|w| w.strip_suffix("us"));
            let rate = word
                .strip_prefix("rate=")
                .and_then(|w| w.strip_suffix("Mbit"));
            match (late.map(str::parse), rate.map(str::parse::<f64>)) {
                (Some(Ok(us)), _) => network.late = Duration::from_micros(us),
                (_, Some(Ok(mbit))) if mbit > 0.0 => network.bits_per_s = 1e6 * mbit,
                _ => {
                    return Err(format!(
                        "MESHWRIGHT_EMULATOR_LINK says `{word}`, not `late=20000us` or `rate=8Mbit`"
                    ));
                }
            }
        }
        Ok(network)
    }
    fn here() -> Result<Self, String> {
        static HERE: OnceLock<Result<Network, String>> = OnceLock::new();
        let words = || std::env::var("MESHWRIGHT_EMULATOR_LINK").unwrap_or_default();
        HERE.get_or_init(|| Network::named(&words())).clone()
    }
    fn takes(&self, bytes: usize) -> Duration {
        let seconds = 8.0 * bytes as f64 / self.bits_per_s;
        self.late + Duration::try_from_secs_f64(seconds.min(A_YEAR)).unwrap_or_default()
    }
}

impl Task {
    fn is_aborted(&self) -> bool {
        self.is_aborted.load(Ordering::SeqCst)
    }

    /// The stream has come to it: brings the operands, which nothing changes any more.
    pub fn arrive(&self, driver: Driver) -> Result<(), String> {
        if self.is_aborted() {
            return Ok(());
        }
        Network::here()?;
        let room = &self.clique.room;
        for part in &self.parts {
            match part {
                Part::Collective(number, call, [from, _]) => {
                    let bytes = call.sizes(self.clique.n)[0];
                    let operand = read(driver, *from, bytes, || call.describe())?;
                    let find = |s: &State| s.meetings.get(number).and_then(|m| m.places[self.rank]);
                    if let Some(place) = self.clique.look(find)? {
                        room.put(place, &operand)?;
                    }
                }
                Part::Message(at, false, (from, count, of)) => {
                    let what = || describe(*count, *of);
                    let sent = read(driver, *from, count * of.bytes(), what)?;
                    let find = |s: &State| s.messages.get(at).map(|m| m.place);
                    if let Some(place) = self.clique.look(find)? {
                        room.put(place, &sent)?;
                    }
                }
                Part::Message(_, true, _) => {}
            }
        }
        self.clique.change(|state| {
            for part in &self.parts {
                match part {
                    Part::Collective(number, ..) => {
                        let meeting = state.meetings.get_mut(number);
                        meeting.into_iter().for_each(|m| m.there[self.rank] = true);
                    }
                    Part::Message(at, receives, _) => {
                        let message = state.messages.get_mut(at);
                        let side = usize::from(*receives);
                        message.into_iter().for_each(|m| m.there[side] = true);
                    }
                }
            }
        })
    }

    /// Whether all that it meets are there; where that cannot be known any more, it is to fail.
    pub fn is_ready(&self) -> bool {
        let all_there = |state: &State| {
            self.parts.iter().all(|part| match part {
                Part::Collective(number, ..) => {
                    let meeting = state.meetings.get(number);
                    meeting.is_none_or(|m| m.there.iter().all(|t| *t))
                }
                // One that is not there any more was received.
                Part::Message(at, ..) => {
                    let message = state.messages.get(at);
                    message.is_none_or(|m| m.there == [true; 2])
                }
            })
        };
        self.is_aborted()
            || self
                .clique
                .look(all_there)
                .map_or(true, |there| there && self.has_come())
    }

    /// Whether all that other hosts have sent is here, where all have.
    fn has_come(&self) -> bool {
        let due = self.due.get_or_init(|| {
            let bytes = self.clique.look(|s| s.crossing(&self.parts)).ok()??;
            Instant::now().checked_add(Network::here().ok()?.takes(bytes))
        });
        due.is_none_or(|due| Instant::now() >= due)
    }

    /// Makes this member's results.
    pub fn run(&self, driver: Driver) -> Result<(), String> {
        let done = self.parts.iter().try_for_each(|part| match part {
            _ if self.is_aborted() => Ok(()),
            Part::Collective(number, call, [_, to]) => self.hold(driver, *number, call, *to),
            Part::Message(at, true, (to, count, of)) => self.receive(driver, *at, *to, *count, *of),
            Part::Message(_, false, _) => Ok(()),
        });
        self.is_over.store(true, Ordering::SeqCst);
        match done {
            // Memory of a member that ends.
            Err(_) if self.is_aborted() => Ok(()),
            done => done,
        }
    }

    fn hold(&self, driver: Driver, number: u64, call: &Call, to: u64) -> Result<(), String> {
        let (clique, n) = (&self.clique, self.clique.n);
        let find = |s: &State| s.meetings.get(&number).map(|m| m.places.clone());
        let places: Option<Vec<u64>> = clique.look(find)?.and_then(|p| p.into_iter().collect());
        let places = places.ok_or("a collective that nobody has come to")?;
        let [from, result] = call.sizes(n);
        // Of a scattered sum a member needs its piece alone.
        let (first, bytes) = match call.kind {
            Kind::ReduceScatter(_) => (self.rank * result, result),
            _ => (0, from),
        };
        let operand = |member: usize| clique.room.get(places[member] + first as u64, bytes);
        let result = match call.kind {
            Kind::Broadcast(root) => operand(root)?,
            kind => {
                let operands: Vec<Vec<u8>> = (0..n).map(operand).collect::<Result<_, _>>()?;
                match kind {
                    // Not the members' order, and another one each time and in each communicator,
                    // but all members have the same.
                    Kind::AllReduce(by) | Kind::ReduceScatter(by) => {
                        let first = number as usize + clique.number + 1;
                        reduce(by, call.of, &operands, first)
                    }
                    _ => operands.concat(),
                }
            }
        };
        write(driver, to, &result, || call.describe())?;
        clique.room.change(|room| {
            let meetings = &mut room.cliques[clique.number].meetings;
            let Some(meeting) = meetings.get_mut(&number) else {
                return;
            };
            meeting.done[self.rank] = true;
            if meeting.done.iter().all(|d| *d) {
                meetings.remove(&number);
                places.iter().for_each(|at| room.give_back(*at));
            }
        })
    }

    fn receive(
        &self,
        driver: Driver,
        at: (usize, usize, u64),
        to: u64,
        count: usize,
        of: Type,
    ) -> Result<(), String> {
        let (clique, what) = (&self.clique, || describe(count, of));
        let place = clique.look(|s| s.messages.get(&at).map(|m| m.place))?;
        let place = place.ok_or("a message that nobody has sent")?;
        let sent = clique.room.get(place, count * of.bytes())?;
        write(driver, to, &sent, what)?;
        clique.room.change(|room| {
            room.cliques[clique.number].messages.remove(&at);
            room.give_back(place);
        })
    }
}

fn describe(count: usize, of: Type) -> String {
    format!("a message of {count} {}", of.name())
}

fn host(
    driver: Driver,
    at: u64,
    bytes: usize,
    what: impl Fn() -> String,
) -> Result<*mut u8, String> {
    let found = (driver.address)(at, bytes);
    match found.is_null() {
        true => Err(format!(
            "{}: {bytes} bytes at {at:#x} are not allocated",
            what()
        )),
        false => Ok(found),
    }
}

fn read(
    driver: Driver,
    at: u64,
    bytes: usize,
    what: impl Fn() -> String,
) -> Result<Vec<u8>, String> {
    if bytes == 0 {
        return Ok(Vec::new());
    }
    let from = host(driver, at, bytes, what)?;
    // SAFETY: the block has the bytes, and the stream that reads them is held up.
    Ok(unsafe { std::slice::from_raw_parts(from, bytes) }.to_vec())
}

fn write(driver: Driver, at: u64, bytes: &[u8], what: impl Fn() -> String) -> Result<(), String> {
    if bytes.is_empty() {
        return Ok(());
    }
    let to = host(driver, at, bytes.len(), what)?;
    // SAFETY: as in `read`.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_is_late_and_narrow_as_its_words_say() {
        let takes = |words: &str, bytes| Network::named(words).map(|n| n.takes(bytes));
        assert_eq!(takes("", 1 << 30), Ok(Duration::ZERO));
        assert_eq!(takes("late=20000us", 5), Ok(Duration::from_millis(20)));
        let both = takes("rate=8Mbit late=1000us", 2_000_000);
        assert_eq!(both, Ok(Duration::from_millis(2001)));
        for wrong in ["late=20ms", "rate=0Mbit", "rate=-1Mbit", "slow", "late=us"] {
            assert!(takes(wrong, 1).is_err_and(|e| e.contains(wrong)), "{wrong}");
        }
    }
}
