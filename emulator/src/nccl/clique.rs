//! The members of a communicator, and where they meet: a collective when all have come to it with
//! the same call, a message when sender and receiver have.
//!
//! Work stands in the members' streams ([`Task`]). When it is next on its stream it says so
//! (`there`), and it can be done when all that it meets are there too: their streams are held up at
//! it, so that operands are final and results may be written. Whoever is first then does the work of
//! all. Who waits for a member that is gone waits until its own communicator is aborted.

#![allow(unsafe_code)] // copies between addresses that the driver has checked

use super::types::{Reduction, Type, reduce};
use crate::link::Driver;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The kind of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    AllReduce(Reduction),
    ReduceScatter(Reduction),
    AllGather,
    /// From the member of this number.
    Broadcast(usize),
}

/// A collective call: `count` as the function's parameter has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    pub kind: Kind,
    pub count: usize,
    pub of: Type,
}

impl Call {
    pub fn describe(&self) -> String {
        let Call { count, of, .. } = self;
        let of = of.name();
        match self.kind {
            Kind::AllReduce(by) => format!("ncclAllReduce of {count} {of} by {}", by.name()),
            Kind::ReduceScatter(by) => {
                format!("ncclReduceScatter of {count} {of} by {}", by.name())
            }
            Kind::AllGather => format!("ncclAllGather of {count} {of}"),
            Kind::Broadcast(root) => format!("ncclBroadcast of {count} {of} from {root}"),
        }
    }
    /// Bytes of a member's operand and of its result.
    fn sizes(&self, n: usize) -> [usize; 2] {
        let bytes = self.count * self.of.bytes();
        match self.kind {
            Kind::AllReduce(_) | Kind::Broadcast(_) => [bytes, bytes],
            Kind::ReduceScatter(_) => [n * bytes, bytes],
            Kind::AllGather => [bytes, n * bytes],
        }
    }
}

/// A collective that members come to.
#[derive(Debug)]
pub struct Meeting {
    call: Call,
    number: u64,
    /// By member, addresses of operand and result.
    brought: Mutex<Vec<Option<[u64; 2]>>>,
    there: Vec<AtomicBool>,
    is_done: Mutex<bool>,
}

/// One side of a message: address, elements, type.
type Side = (u64, usize, Type);

/// A message from one member to another: the sender's side and the receiver's.
#[derive(Debug, Default)]
pub struct Message {
    sides: Mutex<[Option<Side>; 2]>,
    there: [AtomicBool; 2],
    is_done: Mutex<bool>,
}

/// A part of a task.
#[derive(Debug)]
pub enum Part {
    /// A collective, of which this is a member.
    Collective(Arc<Meeting>, usize),
    /// A message, and whether this is its receiver.
    Message(Arc<Message>, bool, usize),
}

/// A call that a member of a communicator puts on a stream at once.
#[derive(Debug)]
pub struct Task {
    pub parts: Vec<Part>,
    pub clique: Arc<Clique>,
    /// Set when the member's communicator is aborted: then there is nothing to do.
    pub is_aborted: Arc<AtomicBool>,
    pub is_over: AtomicBool,
}

/// The members of a communicator.
#[derive(Debug)]
pub struct Clique {
    pub n: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// By member, the GPU with which it joined.
    joined: Vec<Option<usize>>,
    /// Members that have left or were aborted.
    gone: BTreeMap<usize, &'static str>,
    meetings: BTreeMap<u64, Arc<Meeting>>,
    messages: BTreeMap<(usize, usize, u64), Arc<Message>>,
    splits: BTreeMap<u64, Arc<Split>>,
    /// The first thing that members do not agree on.
    wrong: Option<String>,
}

/// A split of a communicator: what members asked for, and the communicators by color.
#[derive(Debug)]
pub struct Split {
    /// By member: color, key, GPU.
    asked: Mutex<Vec<Option<(i32, i32, usize)>>>,
    made: Mutex<BTreeMap<i32, Arc<Clique>>>,
}

pub fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Clique {
    pub fn new(n: usize) -> Arc<Self> {
        let state = State {
            joined: vec![None; n],
            ..State::default()
        };
        Arc::new(Clique {
            n,
            state: Mutex::new(state),
        })
    }
    /// A member joins with its GPU.
    pub fn join(&self, rank: usize, device: usize) -> Result<(), String> {
        let mut state = lock(&self.state);
        if state.joined[rank].replace(device).is_some() {
            return Err(format!("rank {rank} has joined twice"));
        }
        let shares_one = |state: &State| {
            let mut devices: Vec<usize> = state.joined.iter().filter_map(|d| *d).collect();
            devices.sort_unstable();
            devices.windows(2).any(|pair| pair[0] == pair[1])
        };
        let may = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|v| v == "1");
        if !may && shares_one(&state) {
            let what = "several ranks use the same GPU, and NCCL_MULTI_RANK_GPU_ENABLE is not 1";
            state.wrong.get_or_insert(what.into());
        }
        Ok(())
    }
    pub fn is_complete(&self) -> bool {
        lock(&self.state).joined.iter().all(Option::is_some)
    }
    pub fn wrong(&self) -> Option<String> {
        lock(&self.state).wrong.clone()
    }
    fn is_wrong(&self, state: &mut State, what: String) -> String {
        eprintln!("emulated NCCL: {what}");
        state.wrong.get_or_insert(what).clone()
    }
    pub fn leave(&self, rank: usize, how: &'static str) {
        lock(&self.state).gone.entry(rank).or_insert(how);
    }

    /// Member `rank` comes to its call of this number.
    pub fn come(
        &self,
        (rank, number): (usize, u64),
        call: Call,
        addresses: [u64; 2],
    ) -> Result<Part, String> {
        let mut state = lock(&self.state);
        let n = self.n;
        let meeting = state.meetings.entry(number).or_insert_with(|| {
            Arc::new(Meeting {
                call,
                number,
                brought: Mutex::new(vec![None; n]),
                there: (0..n).map(|_| AtomicBool::new(false)).collect(),
                is_done: Mutex::new(false),
            })
        });
        let meeting = Arc::clone(meeting);
        if meeting.call != call {
            let others = lock(&meeting.brought);
            let others: Vec<String> = (0..n)
                .filter(|i| others[*i].is_some())
                .map(|i| i.to_string())
                .collect();
            let what = format!(
                "rank {rank} of {n} comes to call {number} with {}, others ({}) with {}",
                call.describe(),
                others.join(", "),
                meeting.call.describe()
            );
            return Err(self.is_wrong(&mut state, what));
        }
        let all_came = {
            let mut brought = lock(&meeting.brought);
            brought[rank] = Some(addresses);
            brought.iter().all(Option::is_some)
        };
        if all_came {
            state.meetings.remove(&number);
        }
        Ok(Part::Collective(meeting, rank))
    }

    /// One side of message `number` from one member to another.
    pub fn post(
        &self,
        (from, to, number): (usize, usize, u64),
        receives: bool,
        side: Side,
    ) -> Result<Part, String> {
        let mut state = lock(&self.state);
        let message = Arc::clone(state.messages.entry((from, to, number)).or_default());
        let mut sides = lock(&message.sides);
        sides[usize::from(receives)] = Some(side);
        if let [Some(sent), Some(received)] = *sides {
            state.messages.remove(&(from, to, number));
            if (sent.1, sent.2) != (received.1, received.2) {
                let what = format!(
                    "message {number}: rank {from} sends {} {}, rank {to} receives {} {}",
                    sent.1,
                    sent.2.name(),
                    received.1,
                    received.2.name()
                );
                return Err(self.is_wrong(&mut state, what));
            }
        }
        drop(sides);
        let other = if receives { from } else { to };
        Ok(Part::Message(message, receives, other))
    }

    /// Member `rank` asks for split `number`.
    pub fn split(
        &self,
        (rank, number): (usize, u64),
        asked: (i32, i32, usize),
    ) -> Result<Arc<Split>, String> {
        let mut state = lock(&self.state);
        let split = state.splits.entry(number).or_insert_with(|| {
            Arc::new(Split {
                asked: Mutex::new(vec![None; self.n]),
                made: Mutex::default(),
            })
        });
        let split = Arc::clone(split);
        let is_full = {
            let mut all = lock(&split.asked);
            all[rank] = Some(asked);
            all.iter().all(Option::is_some)
        };
        if is_full {
            state.splits.remove(&number);
        }
        Ok(split)
    }

    /// The member that has gone among those that a task waits for.
    pub fn missing(&self, task: &Task) -> Option<(usize, &'static str)> {
        let gone = lock(&self.state).gone.clone();
        gone.into_iter().find(|(rank, _)| task.waits_for(*rank))
    }
}

impl Split {
    pub fn is_complete(&self) -> bool {
        lock(&self.asked).iter().all(Option::is_some)
    }
    /// The communicator of a member's color, and its number there; none before all have asked.
    pub fn of(&self, rank: usize) -> Option<(Arc<Clique>, usize)> {
        let asked: Option<Vec<_>> = lock(&self.asked).iter().copied().collect();
        let asked = asked?;
        let color = asked[rank].0;
        let mut members: Vec<(i32, usize)> = asked
            .iter()
            .enumerate()
            .filter(|(_, a)| a.0 == color)
            .map(|(r, a)| (a.1, r))
            .collect();
        members.sort_unstable();
        let mut made = lock(&self.made);
        let clique = made.entry(color).or_insert_with(|| {
            let clique = Clique::new(members.len());
            for (place, (_, member)) in members.iter().enumerate() {
                // Each joins once, so this cannot fail.
                let _ = clique.join(place, asked[*member].2);
            }
            clique
        });
        let place = members.iter().position(|m| m.1 == rank)?;
        Some((Arc::clone(clique), place))
    }
}

impl Task {
    /// The stream has come to it: whether all that it meets are there.
    pub fn is_ready(&self) -> bool {
        if self.is_aborted.load(Ordering::SeqCst) {
            return true;
        }
        for part in &self.parts {
            match part {
                Part::Collective(meeting, rank) => &meeting.there[*rank],
                Part::Message(message, receives, _) => &message.there[usize::from(*receives)],
            }
            .store(true, Ordering::SeqCst);
        }
        let is_there = |flags: &[AtomicBool]| flags.iter().all(|t| t.load(Ordering::SeqCst));
        self.parts.iter().all(|part| match part {
            Part::Collective(meeting, _) => is_there(&meeting.there),
            Part::Message(message, ..) => is_there(&message.there),
        })
    }

    fn waits_for(&self, member: usize) -> bool {
        !self.is_over.load(Ordering::SeqCst)
            && self.parts.iter().any(|part| match part {
                Part::Collective(meeting, _) => lock(&meeting.brought)[member].is_none(),
                Part::Message(message, receives, other) => {
                    *other == member && lock(&message.sides)[usize::from(!receives)].is_none()
                }
            })
    }

    /// Does what has not been done by others.
    pub fn run(&self, driver: Driver) -> Result<(), String> {
        let aborted = || self.is_aborted.load(Ordering::SeqCst);
        let done = self.parts.iter().try_for_each(|part| match part {
            _ if aborted() => Ok(()),
            Part::Collective(meeting, _) => meeting.hold(driver),
            Part::Message(message, ..) => message.deliver(driver),
        });
        self.is_over.store(true, Ordering::SeqCst);
        match done {
            // Memory of a member that is gone.
            Err(_) if aborted() || !lock(&self.clique.state).gone.is_empty() => Ok(()),
            done => done,
        }
    }
}

impl Meeting {
    fn hold(&self, driver: Driver) -> Result<(), String> {
        let mut is_done = lock(&self.is_done);
        if *is_done {
            return Ok(());
        }
        let members: Vec<[u64; 2]> = lock(&self.brought).iter().filter_map(|b| *b).collect();
        let (n, call) = (members.len(), &self.call);
        let [from, to] = call.sizes(n);
        let what = call.describe();
        let operands: Vec<Vec<u8>> = members
            .iter()
            .map(|m| read(driver, m[0], from, &what))
            .collect::<Result<_, _>>()?;
        // Not the members' order, and another one each time, but all have the same.
        let first = self.number as usize + 1;
        let all = match call.kind {
            Kind::AllReduce(by) | Kind::ReduceScatter(by) => reduce(by, call.of, &operands, first),
            Kind::AllGather => operands.concat(),
            Kind::Broadcast(root) => operands[root].clone(),
        };
        for (i, member) in members.iter().enumerate() {
            let result = match call.kind {
                Kind::ReduceScatter(_) => &all[i * to..(i + 1) * to],
                _ => &all[..],
            };
            write(driver, member[1], result, &what)?;
        }
        *is_done = true;
        Ok(())
    }
}

impl Message {
    fn deliver(&self, driver: Driver) -> Result<(), String> {
        let mut is_done = lock(&self.is_done);
        if *is_done {
            return Ok(());
        }
        let sides = *lock(&self.sides);
        if let [Some((from, count, of)), Some((to, ..))] = sides {
            let what = format!("a message of {count} {}", of.name());
            let bytes = read(driver, from, count * of.bytes(), &what)?;
            write(driver, to, &bytes, &what)?;
        }
        *is_done = true;
        Ok(())
    }
}

fn host(driver: Driver, at: u64, bytes: usize, what: &str) -> Result<*mut u8, String> {
    let found = (driver.address)(at, bytes);
    match found.is_null() {
        true => Err(format!(
            "{what}: {bytes} bytes at {at:#x} are not allocated"
        )),
        false => Ok(found),
    }
}

fn read(driver: Driver, at: u64, bytes: usize, what: &str) -> Result<Vec<u8>, String> {
    if bytes == 0 {
        return Ok(Vec::new());
    }
    let from = host(driver, at, bytes, what)?;
    // SAFETY: the block has the bytes, and the streams that write there are held up.
    Ok(unsafe { std::slice::from_raw_parts(from, bytes) }.to_vec())
}

fn write(driver: Driver, at: u64, bytes: &[u8], what: &str) -> Result<(), String> {
    if bytes.is_empty() {
        return Ok(());
    }
    let to = host(driver, at, bytes.len(), what)?;
    // SAFETY: as in `read`.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    Ok(())
}
