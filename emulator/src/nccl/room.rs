//! The state of a communicator, as plain data that its members share: who has joined, what they
//! have come to, where operands lie.

use super::shared::OPERANDS;
use super::task::Part;
use super::types::{Reduction, Type};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The kind of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    AllReduce(Reduction),
    ReduceScatter(Reduction),
    AllGather,
    /// From the member of this number.
    Broadcast(usize),
}

/// A collective call: `count` as the function's parameter has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
    pub fn sizes(&self, n: usize) -> [usize; 2] {
        let bytes = self.count * self.of.bytes();
        match self.kind {
            Kind::AllReduce(_) | Kind::Broadcast(_) => [bytes, bytes],
            Kind::ReduceScatter(_) => [n * bytes, bytes],
            Kind::AllGather => [bytes, n * bytes],
        }
    }
}

/// A GPU: the host of its process, by the number of its network, and its place there. Network
/// namespaces of one machine are hosts to tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Gpu {
    host: u64,
    nth: usize,
}

impl Gpu {
    /// The GPU of this host at a place.
    pub fn new(nth: usize) -> Self {
        use std::os::unix::fs::MetadataExt;
        let host = std::fs::metadata("/proc/self/ns/net").map_or(0, |network| network.ino());
        Gpu { host, nth }
    }
    /// Whether it is one of another host's.
    pub fn is_apart(&self, other: &Gpu) -> bool {
        self.host != other.host
    }
}

/// The state of a communicator of all ranks and of those that are split from it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Room {
    /// Tells it from the memory of another process that has the number of one that is gone.
    pub name: u64,
    /// The communicator of all, once somebody has joined it, and those split from it.
    pub cliques: Vec<State>,
    /// Places of operands, in order, and their bytes.
    pub places: Vec<(u64, u64)>,
}

/// The state of one communicator.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct State {
    /// By member, its number in the communicator of all.
    pub roots: Vec<usize>,
    /// By member, the GPU with which it joined.
    pub joined: Vec<Option<Gpu>>,
    /// Members that have left or were aborted.
    pub gone: BTreeMap<usize, String>,
    pub meetings: BTreeMap<u64, Meeting>,
    /// By sender, receiver and number between the two.
    pub messages: BTreeMap<(usize, usize, u64), Message>,
    pub splits: BTreeMap<u64, Split>,
    /// The first thing that members do not agree on.
    pub wrong: Option<String>,
}

/// A collective that members come to, until all have their results.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Meeting {
    pub call: Call,
    /// By member, the place of its operand, once it has come.
    pub places: Vec<Option<u64>>,
    /// Members whose operand is at its place.
    pub there: Vec<bool>,
    /// Members that have their result.
    pub done: Vec<bool>,
}

/// A message from one member to another, until it is received.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Message {
    /// The sender's elements and their type, and the receiver's.
    pub sides: [Option<(usize, Type)>; 2],
    pub there: [bool; 2],
    /// The place of what is sent.
    pub place: u64,
}

/// A split of a communicator: by member what it asked for (color, key, GPU), and the communicators
/// that were made when all had, by color.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Split {
    pub asked: Vec<Option<(i32, i32, Gpu)>>,
    pub made: BTreeMap<i32, usize>,
}

impl Room {
    /// Finds a place for an operand, in the first gap.
    pub fn place(&mut self, bytes: usize) -> u64 {
        let bytes = bytes.max(1) as u64;
        let (mut at, mut nth) = (OPERANDS, 0);
        while let Some(&(start, taken)) = self.places.get(nth)
            && at + bytes > start
        {
            at = start + taken;
            nth += 1;
        }
        self.places.insert(nth, (at, bytes));
        at
    }
    pub fn give_back(&mut self, at: u64) {
        self.places.retain(|p| p.0 != at);
    }
}

impl State {
    pub fn new(roots: Vec<usize>) -> Self {
        let n = roots.len();
        State {
            roots,
            joined: vec![None; n],
            gone: BTreeMap::new(),
            meetings: BTreeMap::new(),
            messages: BTreeMap::new(),
            splits: BTreeMap::new(),
            wrong: None,
        }
    }
    pub fn join(&mut self, rank: usize, device: Gpu) {
        self.joined[rank] = Some(device);
        let mut devices: Vec<Gpu> = self.joined.iter().filter_map(|d| *d).collect();
        devices.sort_unstable();
        let shares_one = devices.windows(2).any(|pair| pair[0] == pair[1]);
        let may = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|v| v == "1");
        if shares_one && !may {
            let what = "several ranks use the same GPU, and NCCL_MULTI_RANK_GPU_ENABLE is not 1";
            self.wrong.get_or_insert(what.into());
        }
    }
    pub fn is_wrong(&mut self, what: String) -> String {
        eprintln!("emulated NCCL: {what}");
        self.wrong.get_or_insert(what).clone()
    }
}

impl State {
    /// Bytes of a call's parts that have members on several hosts, by the larger side of each part;
    /// none where all are on one.
    pub fn crossing(&self, parts: &[Part]) -> Option<usize> {
        let are_apart = |members: &[usize]| {
            let mut gpus = members.iter().filter_map(|m| self.joined[*m]);
            let first = gpus.next();
            first.is_some_and(|first| gpus.any(|gpu| gpu.is_apart(&first)))
        };
        let all: Vec<usize> = (0..self.joined.len()).collect();
        let crossing = parts.iter().filter_map(|part| match part {
            Part::Collective(_, call, _) => {
                let [from, to] = call.sizes(all.len());
                are_apart(&all).then_some(from.max(to))
            }
            Part::Message(at, _, (_, count, of)) => {
                are_apart(&[at.0, at.1]).then_some(count * of.bytes())
            }
        });
        crossing.reduce(|a, b| a + b)
    }
    /// Whether a task waits for a member to come, or to be there with its operand.
    pub fn waits(&self, parts: &[Part], member: usize, to_be_there: bool) -> bool {
        parts.iter().any(|part| match part {
            Part::Collective(number, ..) => {
                self.meetings
                    .get(number)
                    .is_some_and(|m| match to_be_there {
                        true => !m.there[member],
                        false => m.places[member].is_none(),
                    })
            }
            Part::Message(at, receives, _) => {
                let (other, side) = match receives {
                    true => (at.0, 0),
                    false => (at.1, 1),
                };
                let is_missing = |m: &Message| match to_be_there {
                    true => !m.there[side],
                    false => m.sides[side].is_none(),
                };
                other == member && self.messages.get(at).is_some_and(is_missing)
            }
        })
    }
}
