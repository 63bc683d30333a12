//! Ranks on GPUs that meet by NCCL: what they do together is put on their streams, and the GPUs wait
//! for each other.
//!
//! ```text
//!   rank 0  host   come ─ launch ─ go on ...                 settle
//!           GPU           kernels ─────[ all-reduce ]─ kernels
//!   rank 1  host        come ─ launch ─ go on ...            settle
//!           GPU      kernels ──────────[ all-reduce ]─ kernels
//! ```
//!
//! NCCL itself does not say who brought another call, or who is missing. So the ranks also meet in a
//! [`World`](super::threads::World) of [`super::threads`], without bytes: each notes there what it has
//! come to, and waits for nobody. From that table come the names in all errors, the order of messages
//! is checked against it, and through it identifiers of communicators go to other processes.
//!
//! The rank's host waits in a step ([`Fabric::pass`]) only where the library itself still forms a
//! communicator. At the step's end [`Fabric::settle`] waits for the streams by looking: at the table
//! for ranks that failed, left or brought something else, at the communicators for errors, at the
//! clock. Communicators do not block, and a run that has failed aborts them from a thread of its own
//! ([`club`]), so that no wait for the GPU is for ever.
//!
//! Communicators of a program are made before its first step: that of all ranks, which exchanges use,
//! and by splitting it one for each group of a stream's collectives. Ranks without a program make
//! them when they first meet: the first member's identifier comes with its note.
//!
//! Where several ranks have one GPU, NCCL's kernels may hold up what other ranks wait for on it. Then
//! a call is put on its stream when all its members have come to it, and each rank has played its
//! program alone before ([`Fabric::holds_up_others`]).

mod club;
mod comms;
mod entries;
mod launch;
mod library;
mod notes;
#[cfg(test)]
mod tests;
mod waits;

use club::Pulse;
pub use club::{Club, LastResort, SHARING, check, found, sharing};

use super::threads::{Endpoint, Meeting};
use super::{Call, CallKind, Fabric, Order, Places};
use crate::device::{Cuda, Device};
use crate::error::RuntimeError;
use comms::{Comms, Key};
use cudarc::driver::CudaEvent;
use entries::Move;
pub(crate) use entries::staged;
use ir::{Rank, StreamId};
use launch::forms;
use notes::Notes;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// The number of the communicator of all ranks, for exchanges.
const TRANSFERS: u32 = u32::MAX - 2;
/// Rest between looks at what NCCL or the GPU does.
const REST: Duration = Duration::from_micros(50);
/// Rest between looks at who has come, unless somebody has.
const PATIENCE: Duration = Duration::from_millis(1);
/// Time between looks at communicators' errors.
const SOUND: Duration = Duration::from_millis(5);
/// How long others have to say why NCCL failed.
const REASONS: Duration = Duration::from_millis(500);

/// A rank's place among ranks that meet by NCCL.
pub struct Nccl {
    club: Arc<Club>,
    comms: Arc<Comms>,
    /// Where ranks say what they have come to.
    table: Endpoint,
    /// The communicator of all ranks, and the meeting that gives its identifier.
    root: Key,
    root_forms: Option<Meeting>,
    is_prepared: bool,
    /// Communicators whose identifier is on its way.
    awaited: BTreeSet<Key>,
    /// The calls that came to every communicator, and those of them that are on streams.
    counts: BTreeMap<Key, [u64; 2]>,
    /// Messages to and from every rank so far.
    messages: BTreeMap<Rank, [u64; 2]>,
    /// Work that streams were given, until it is done.
    flying: VecDeque<Flying>,
    pulse: Arc<Pulse>,
}

/// How far a call is.
enum Stage {
    /// Not on its stream.
    Begun,
    /// With the library; then these moves follow.
    Launched(Vec<Move>),
    /// On its stream.
    There,
}

/// A call that has begun.
pub struct Ticket {
    call: Arc<Call>,
    stream: StreamId,
    places: Places,
    notes: Notes,
    /// Its communicator and number there; none where nothing moves between GPUs.
    on: Option<(Key, u64)>,
    stage: Stage,
    staged: u64,
    staging: u64,
}

/// Work that a stream was given.
struct Flying {
    event: CudaEvent,
    notes: Notes,
    call: Arc<Call>,
}

impl Nccl {
    fn new(
        club: Arc<Club>,
        comms: Arc<Comms>,
        pulse: Arc<Pulse>,
        rank: Rank,
    ) -> Result<Self, RuntimeError> {
        let mut table = club.world.endpoint(rank);
        let root = (club.everyone.clone(), TRANSFERS);
        let root_forms = match root.0.len() {
            0 | 1 => None,
            _ => Some(forms(&mut table, &comms, &root)?),
        };
        Ok(Nccl {
            club,
            comms,
            table,
            root,
            root_forms,
            is_prepared: false,
            awaited: BTreeSet::new(),
            counts: BTreeMap::new(),
            messages: BTreeMap::new(),
            flying: VecDeque::new(),
            pulse,
        })
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        match self.flying.is_empty() && !self.club.world.has_failed() {
            true => self.comms.close(),
            false => self.comms.abort(),
        }
    }
}

impl Fabric<Cuda> for Nccl {
    type Ticket = Ticket;

    fn rank(&self) -> Rank {
        self.table.rank
    }

    fn order(&self) -> Order {
        Order::Library
    }

    fn begin(
        &mut self,
        device: &mut Cuda,
        stream: StreamId,
        call: &Arc<Call>,
        places: Places,
    ) -> Result<Ticket, RuntimeError> {
        self.table.sound().map_err(|e| self.explained(e))?;
        self.pulse.beats();
        let (notes, key) = match &call.kind {
            CallKind::Collective(of) => self.begin_collective(call, of)?,
            CallKind::Exchange(of) => self.begin_exchange(of),
        };
        let on = key.map(|key| {
            let counts = self.counts.entry(key.clone()).or_default();
            counts[0] += 1;
            (key, counts[0] - 1)
        });
        let mut ticket = Ticket {
            call: Arc::clone(call),
            stream,
            places,
            notes,
            on,
            stage: Stage::Begun,
            staged: 0,
            staging: 0,
        };
        let begun = self.advance(device, &mut ticket);
        begun.map_err(|e| self.explained(e))?;
        Ok(ticket)
    }

    fn poll(
        &mut self,
        device: &mut Cuda,
        ticket: &mut Ticket,
    ) -> Result<Option<u64>, RuntimeError> {
        self.pulse.beats();
        let there = self
            .table
            .sound()
            .and_then(|()| self.advance(device, ticket));
        let there = there.map_err(|e| self.explained(e))?;
        if !there || ticket.notes.meeting.is_some() {
            return Ok(None);
        }
        if ticket.on.is_some() {
            let event = Device::record(device, ticket.stream)?;
            let notes = Notes {
                meeting: None,
                expected: Vec::new(),
                first: None,
            };
            let call = Arc::clone(&ticket.call);
            self.flying.push_back(Flying { event, notes, call });
        }
        Ok(Some(ticket.staged))
    }

    fn wait(&mut self, device: &mut Cuda, mut ticket: Ticket) -> Result<u64, RuntimeError> {
        let done = self.wait_for(device, &mut ticket, true);
        let staged = ticket.staged;
        let done = done.and_then(|()| self.flies(device, ticket));
        done.map_err(|e| self.explained(e)).map(|()| staged)
    }

    fn pass(&mut self, device: &mut Cuda, mut ticket: Ticket) -> Result<u64, RuntimeError> {
        let comes = self.club.shares_gpus;
        let done = self.wait_for(device, &mut ticket, comes);
        let staged = ticket.staged;
        let done = done.and_then(|()| self.flies(device, ticket));
        done.map_err(|e| self.explained(e)).map(|()| staged)
    }

    fn holds_up_others(&self) -> bool {
        self.club.shares_gpus && self.root.0.len() > 1
    }

    fn rehearse(
        &mut self,
        device: &mut Cuda,
        stream: StreamId,
        call: &Call,
        places: &Places,
    ) -> Result<(), RuntimeError> {
        self.moves_alone(device, stream, (call, places))
    }

    fn prepare(&mut self, device: &mut Cuda) -> Result<(), RuntimeError> {
        if std::mem::replace(&mut self.is_prepared, true) || self.root.0.len() < 2 {
            return Ok(());
        }
        device.enter()?;
        let what = "the forming of NCCL's communicators";
        let mut made = self.until(what, Self::root_is_ready);
        for family in self.club.families.clone() {
            let me = self.table.rank;
            let mut groups = family.groups.iter().enumerate();
            let part = groups.find_map(|(color, group)| {
                let place = group.iter().position(|r| *r == me)?;
                Some(((group.clone(), family.number), color as i32, place))
            });
            let key = part.as_ref().map(|p| p.0.clone());
            made = made
                .and_then(|()| self.comms.split(&self.root, part))
                .and_then(|()| self.until(what, Self::root_is_ready))
                .and_then(|()| match key {
                    Some(key) => self.until(what, |of| of.comms.poll(&key)),
                    None => Ok(()),
                });
        }
        // Nobody begins a step while others still form one.
        let everyone = self.root.0.clone();
        let made = made.and_then(|()| self.barrier(device, &everyone));
        made.map_err(|e| self.explained(e))
    }

    fn settle(&mut self, _: &mut Cuda) -> Result<(), RuntimeError> {
        self.settles().map_err(|e| self.explained(e))
    }

    fn host_works(&self) {
        self.pulse.beats();
    }

    fn host_rests(&self) {
        self.pulse.rests();
    }

    fn rest(&self, patience: Duration) {
        self.table.rests(patience.min(PATIENCE));
    }

    fn overdue(&self, ticket: &Ticket) -> RuntimeError {
        let missing = ticket.notes.meeting.as_ref();
        let missing = missing.map_or_else(Vec::new, |m| self.table.missing(m));
        let seconds = self.table.world.timeout.as_secs();
        match missing.is_empty() {
            false => RuntimeError::Watchdog {
                rank: self.table.rank,
                what: ticket.call.what.clone(),
                waiting_for: missing,
                seconds,
            },
            true => RuntimeError::Device {
                problem: format!(
                    "all ranks have come to {}, and NCCL has not begun it after {seconds} s",
                    ticket.call.what
                ),
            },
        }
    }

    fn timeout(&self) -> Duration {
        self.table.world.timeout
    }

    fn abort(&self, reason: &str) {
        self.table.world.abort(self.table.rank, reason);
        self.comms.abort();
        self.pulse.rests();
    }

    /// Memory that NCCL itself holds is not known.
    fn held_bytes(&self) -> u64 {
        0
    }
}
