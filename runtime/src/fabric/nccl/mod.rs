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
//! The rank's host never waits in a step ([`Fabric::pass`]) but where the library itself still forms a
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
//! a call is put on its stream when all members have come to it.

mod club;
mod comms;
mod entries;
mod library;
#[cfg(test)]
mod tests;

pub use club::{Club, check, found};
pub use library::SHARED;

use super::threads::{Arrived, Endpoint, Meeting, channel};
use super::{Call, CallKind, Collective, Exchange, Fabric, Order, Places};
use crate::arena::Bytes;
use crate::device::cuda::is_over;
use crate::device::{Cuda, Place};
use crate::error::RuntimeError;
use comms::{Comms, Key};
use cudarc::driver::CudaEvent;
use entries::{Move, Plan, blocks};
use ir::collective::CollectiveKind;
use ir::{Rank, StreamId};
use library::{Entry, ID};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

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
    /// Of every communicator how many calls came to it and how many are on streams.
    counts: BTreeMap<Key, [u64; 2]>,
    /// Messages to and from every rank so far.
    messages: BTreeMap<Rank, [u64; 2]>,
    /// What streams were given, until it is done.
    flying: VecDeque<Flying>,
}

/// A meeting at the table, and what is expected of the notes that come with it: from whom, how many
/// bytes, and the how-manieth message of that rank.
struct Notes {
    meeting: Option<Meeting>,
    expected: Vec<(Rank, u64, u64)>,
    /// What the first member said.
    first: Option<Arc<Bytes>>,
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

/// What a stream was given.
struct Flying {
    event: CudaEvent,
    notes: Notes,
    call: Arc<Call>,
}

impl Notes {
    /// Whether all have come; their notes are then compared.
    fn look(&mut self, table: &Endpoint, what: &str) -> Result<bool, RuntimeError> {
        let Some(meeting) = &mut self.meeting else {
            return Ok(true);
        };
        let Some(arrived) = table.arrived(meeting, None)? else {
            return Ok(false);
        };
        self.meeting = None;
        match arrived {
            Arrived::Gathered(all) => self.first = all.into_iter().next(),
            Arrived::Exchanged(notes) => {
                for (note, &(from, bytes, nth)) in notes.iter().zip(&self.expected) {
                    let [their_bytes, their_nth] = read_note(note);
                    let differs = |theirs, own, brings: String, brought: String| {
                        (theirs != own).then_some(RuntimeError::Mismatch {
                            rank: table.rank,
                            brings: format!("{brings} ({what})"),
                            other: from,
                            brought,
                        })
                    };
                    let wrong = differs(
                        their_nth,
                        nth,
                        format!("the receipt of message {nth} from it"),
                        format!("message {their_nth}"),
                    )
                    .or(differs(
                        their_bytes,
                        bytes,
                        format!("room for {bytes} bytes"),
                        format!("{their_bytes} bytes"),
                    ));
                    if let Some(wrong) = wrong {
                        return Err(wrong);
                    }
                }
            }
        }
        Ok(true)
    }
}

fn note(bytes: u64, nth: u64) -> Bytes {
    let mut note = Bytes::zeroed(16);
    note[..8].copy_from_slice(&bytes.to_le_bytes());
    note[8..].copy_from_slice(&nth.to_le_bytes());
    note
}

fn read_note(note: &[u8]) -> [u64; 2] {
    let number = |at| {
        let bytes = note.get(at..at + 8).and_then(|b| b.try_into().ok());
        bytes.map_or(u64::MAX, u64::from_le_bytes)
    };
    [number(0), number(8)]
}

impl Nccl {
    fn new(club: Arc<Club>, comms: Arc<Comms>, rank: Rank) -> Result<Self, RuntimeError> {
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
        })
    }

    /// Goes on with the communicator of all ranks: whether it is there.
    fn root_is_ready(&mut self) -> Result<bool, RuntimeError> {
        if let Some(meeting) = &mut self.root_forms {
            let Some(Arrived::Gathered(all)) = self.table.arrived(meeting, None)? else {
                return Ok(false);
            };
            let rank = self.table.place_in(&self.root.0)?;
            self.comms
                .join(&self.root, identifier(all.first())?, rank)?;
            self.root_forms = None;
        }
        self.comms.poll(&self.root)
    }

    /// Waits for what `is_there` begins and looks at; all ranks come to it.
    fn until(
        &mut self,
        what: &str,
        mut is_there: impl FnMut(&mut Self) -> Result<bool, RuntimeError>,
    ) -> Result<(), RuntimeError> {
        let began = Instant::now();
        while !is_there(self)? {
            self.table.sound()?;
            if began.elapsed() > self.table.world.timeout {
                let missing = self.root_forms.as_ref().map(|m| self.table.missing(m));
                let all = || self.root.0.iter().filter(|r| **r != self.table.rank);
                return Err(RuntimeError::Watchdog {
                    rank: self.table.rank,
                    what: what.into(),
                    waiting_for: missing.unwrap_or_else(|| all().copied().collect()),
                    seconds: self.table.world.timeout.as_secs(),
                });
            }
            self.table.rests(PATIENCE);
        }
        Ok(())
    }

    /// Begins a collective's meeting, with an identifier where its communicator is not made.
    fn begin_collective(
        &mut self,
        call: &Arc<Call>,
        of: &Collective,
    ) -> Result<(Notes, Option<Key>), RuntimeError> {
        let me = self.table.place_in(&of.group)?;
        let key = (of.group.clone(), of.number);
        let moves = of.group.len() > 1 && of.items.iter().any(|i| i.elements > 0);
        let is_made = self.comms.has(&key) || self.awaited.contains(&key);
        let mut note = Bytes::default();
        if moves && !is_made {
            if me == 0 {
                note = Bytes::copy_of(&self.comms.id()?);
            }
            self.awaited.insert(key.clone());
        }
        // The table's own reductions are of nothing.
        let meeting = self.table.come((call, of), Arc::new(note), true)?;
        let notes = Notes {
            meeting: Some(meeting),
            expected: Vec::new(),
            first: None,
        };
        Ok((notes, moves.then_some(key)))
    }

    /// Begins an exchange's meeting: each block is announced with its bytes and its number between
    /// the two ranks.
    fn begin_exchange(&mut self, of: &Exchange) -> (Notes, Option<Key>) {
        let mut numbers = |rank: Rank, receives: bool| {
            let next = &mut self.messages.entry(rank).or_default()[usize::from(receives)];
            *next += 1;
            *next - 1
        };
        let bytes = |local: &crate::execute::Local, tile: &ir::reshard::Tile| {
            tile.len.iter().product::<u64>() * local.dtype.bytes()
        };
        let mut sends = Vec::new();
        for (i, tile) in blocks(&of.sends) {
            let moved = &of.sends[i];
            let nth = numbers(tile.to, false);
            let note = note(bytes(&moved.local, tile), nth);
            sends.push((channel(moved, tile), note));
        }
        let (mut receives, mut expected) = (Vec::new(), Vec::new());
        for (i, tile) in blocks(&of.receives) {
            let moved = &of.receives[i];
            let nth = numbers(tile.from, true);
            expected.push((tile.from, bytes(&moved.local, tile), nth));
            receives.push(channel(moved, tile));
        }
        let moves = !sends.is_empty() || !receives.is_empty();
        let notes = Notes {
            meeting: Some(self.table.send(sends, receives.into_iter())),
            expected,
            first: None,
        };
        (notes, moves.then(|| self.root.clone()))
    }

    /// Whether a call's communicator is there, and its turn on it.
    fn is_next(&mut self, ticket: &mut Ticket) -> Result<bool, RuntimeError> {
        let Some((key, number)) = &ticket.on else {
            return Ok(true);
        };
        if *key == self.root {
            if !self.root_is_ready()? {
                return Ok(false);
            }
        } else if !self.comms.has(key) {
            // The identifier comes with the notes of its first call.
            let Some(first) = &ticket.notes.first else {
                return Ok(false);
            };
            let rank = self.table.place_in(&key.0)?;
            self.comms.join(key, identifier(Some(first))?, rank)?;
            self.awaited.remove(key);
        }
        let is_turn = self.counts.get(key).is_some_and(|c| c[1] == *number);
        Ok(is_turn && self.comms.poll(key)?)
    }

    /// Goes on with a call as far as that needs no waiting: whether it is on its stream.
    fn advance(&mut self, device: &mut Cuda, ticket: &mut Ticket) -> Result<bool, RuntimeError> {
        let all_came = ticket.notes.look(&self.table, &ticket.call.what)?;
        // Communicators are of the GPU that the thread works on.
        device.enter()?;
        if matches!(ticket.stage, Stage::Begun) {
            if (self.club.shares_gpus && !all_came) || !self.is_next(ticket)? {
                return Ok(false);
            }
            self.launch(device, ticket)?;
        }
        if let Stage::Launched(after) = &mut ticket.stage {
            if let Some((key, _)) = &ticket.on
                && !self.comms.poll(key)?
            {
                return Ok(false);
            }
            for step in std::mem::take(after) {
                make(device, ticket.stream, step, ticket.staging)?;
            }
            if let Some((key, _)) = &ticket.on {
                self.counts.entry(key.clone()).or_default()[1] += 1;
            }
            ticket.stage = Stage::There;
        }
        Ok(true)
    }

    /// Gives a call to the library.
    fn launch(&mut self, device: &mut Cuda, ticket: &mut Ticket) -> Result<(), RuntimeError> {
        let spans = |places: &[Place]| {
            let span = |p: &Place| device.address(*p).map(|at| at..at + p.len as u64);
            places
                .iter()
                .map(span)
                .collect::<Result<Vec<Range<u64>>, _>>()
        };
        let (inputs, outputs) = (
            spans(&ticket.places.inputs)?,
            spans(&ticket.places.outputs)?,
        );
        let at = (&inputs[..], &outputs[..]);
        let plan = match &ticket.call.kind {
            CallKind::Collective(of) => Plan::collective(of, self.table.place_in(&of.group)?, at)?,
            CallKind::Exchange(of) => {
                let everyone = &self.root.0;
                let number = |rank: Rank| {
                    let place = everyone.iter().position(|r| *r == rank);
                    place.ok_or_else(|| RuntimeError::Program(format!("there is no {rank}")))
                };
                Plan::exchange(of, number, at)?
            }
        };
        let stream = ticket.stream;
        if plan.staged > 0 {
            ticket.staging = device.staging(stream, plan.staged)?;
            ticket.staged = plan.staged as u64;
        }
        for step in plan.before {
            make(device, stream, step, ticket.staging)?;
        }
        let address = |(what, spots, count, dtype): (_, [entries::Spot; 2], _, _)| {
            let at = spots.map(|s| s.address(ticket.staging));
            Entry::new((what, at, count, dtype))
        };
        let group: Vec<Entry> = plan.group.into_iter().map(address).collect();
        if let Some((key, _)) = &ticket.on {
            self.comms.launch(key, device.handle(stream)?, &group)?;
        }
        ticket.stage = Stage::Launched(plan.after);
        Ok(())
    }

    /// Notes what a stream was given, which is looked at later.
    fn flies(&mut self, device: &mut Cuda, ticket: Ticket) -> Result<(), RuntimeError> {
        if ticket.on.is_some() || ticket.notes.meeting.is_some() {
            let event = crate::device::Device::record(device, ticket.stream)?;
            let Ticket { notes, call, .. } = ticket;
            self.flying.push_back(Flying { event, notes, call });
        }
        self.sweep().map(|_| ())
    }

    /// Forgets what is done; whether anything was.
    fn sweep(&mut self) -> Result<bool, RuntimeError> {
        let before = self.flying.len();
        while let Some(first) = self.flying.front_mut() {
            if !first.notes.look(&self.table, &first.call.what)? || !is_over(&first.event)? {
                break;
            }
            self.flying.pop_front();
        }
        Ok(self.flying.len() < before)
    }

    /// Of an error of the library's or the GPU's, the reason that the other ranks give, if they do.
    /// Then nothing of this rank's waits on a stream any more.
    fn explained(&mut self, error: RuntimeError) -> RuntimeError {
        let mut error = error;
        if matches!(error, RuntimeError::Device { .. }) {
            let began = Instant::now();
            while began.elapsed() < REASONS {
                let mut notes = self.flying.iter_mut().map(|f| &mut f.notes);
                let said = notes.find_map(|n| n.look(&self.table, "a call").err());
                if let Some(reason) = self.table.sound().err().or(said) {
                    error = reason;
                    break;
                }
                self.table.rests(PATIENCE);
            }
        }
        self.comms.abort();
        error
    }

    /// Waits until the host may go on with a call: until it is on its stream, or, where `comes`,
    /// until all have come to it too.
    fn wait_for(
        &mut self,
        device: &mut Cuda,
        ticket: &mut Ticket,
        comes: bool,
    ) -> Result<(), RuntimeError> {
        let (began, mut looked) = (Instant::now(), Instant::now());
        loop {
            if self.advance(device, ticket)? && !(comes && ticket.notes.meeting.is_some()) {
                return Ok(());
            }
            self.table.sound()?;
            if looked.elapsed() > SOUND {
                self.comms.sound()?;
                looked = Instant::now();
            }
            if began.elapsed() > self.table.world.timeout {
                return Err(Fabric::<Cuda>::overdue(self, ticket));
            }
            let waits_for_ranks = ticket.notes.meeting.is_some();
            self.table
                .rests(if waits_for_ranks { PATIENCE } else { REST });
        }
    }

    fn settles(&mut self) -> Result<(), RuntimeError> {
        let (mut moved, mut looked) = (Instant::now(), Instant::now());
        while !self.flying.is_empty() {
            if self.sweep()? {
                moved = Instant::now();
                continue;
            }
            self.table.sound()?;
            // A later one may say who failed.
            for flying in &mut self.flying {
                flying.notes.look(&self.table, &flying.call.what)?;
            }
            if looked.elapsed() > SOUND {
                self.comms.sound()?;
                looked = Instant::now();
            }
            if moved.elapsed() > self.table.world.timeout {
                return Err(self.stuck());
            }
            self.table.rests(REST);
        }
        Ok(())
    }

    /// The error of a stream that does not go on.
    fn stuck(&self) -> RuntimeError {
        let open = |f: &&Flying| f.notes.meeting.is_some();
        let first = self.flying.iter().find(open).or(self.flying.front());
        let seconds = self.table.world.timeout.as_secs();
        match first {
            Some(Flying {
                notes:
                    Notes {
                        meeting: Some(meeting),
                        ..
                    },
                call,
                ..
            }) => RuntimeError::Watchdog {
                rank: self.table.rank,
                what: call.what.clone(),
                waiting_for: self.table.missing(meeting),
                seconds,
            },
            first => RuntimeError::Device {
                problem: format!(
                    "all ranks have come to {}, and NCCL is not done with it after {seconds} s",
                    first.map_or("their last call", |f| &f.call.what)
                ),
            },
        }
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

/// Comes to the meeting that gives all members a communicator's identifier, which is the first one's.
fn forms(table: &mut Endpoint, comms: &Comms, key: &Key) -> Result<Meeting, RuntimeError> {
    let of = Collective {
        kind: CollectiveKind::AllGather,
        group: key.0.clone(),
        number: key.1,
        items: Vec::new(),
    };
    let call = Arc::new(Call {
        what: "the forming of a communicator".into(),
        kind: CallKind::Collective(of.clone()),
    });
    let note = match table.place_in(&key.0)? {
        0 => Bytes::copy_of(&comms.id()?),
        _ => Bytes::default(),
    };
    table.come((&call, &of), Arc::new(note), true)
}

fn identifier(note: Option<&Arc<Bytes>>) -> Result<[u8; ID], RuntimeError> {
    let bytes = note.and_then(|n| n[..].try_into().ok());
    bytes.ok_or_else(|| RuntimeError::Program("a communicator without an identifier".into()))
}

/// Puts a move on a stream.
fn make(device: &mut Cuda, stream: StreamId, what: Move, staging: u64) -> Result<(), RuntimeError> {
    let both =
        |from: entries::Spot, to: entries::Spot| (from.address(staging), to.address(staging));
    match what {
        Move::Copy { from, to, bytes } => device.copy_bytes(stream, both(from, to), bytes),
        Move::Clear { at, bytes } => device.clear(stream, at.address(staging), bytes),
        Move::Lift { of, from, to } => device.lift(stream, &of, both(from, to)),
        Move::Lay { of, from, to } => device.lay(stream, &of, both(from, to)),
        Move::LogSumExp {
            dtype,
            sizes,
            from,
            to,
        } => device.log_sum_exp(stream, dtype, sizes, both(from, to)),
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
        self.table.sound()?;
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
        let there = self
            .table
            .sound()
            .and_then(|()| self.advance(device, ticket));
        let there = there.map_err(|e| self.explained(e))?;
        if !there || ticket.notes.meeting.is_some() {
            return Ok(None);
        }
        if ticket.on.is_some() {
            let event = crate::device::Device::record(device, ticket.stream)?;
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
        made.map_err(|e| self.explained(e))
    }

    fn settle(&mut self, _: &mut Cuda) -> Result<(), RuntimeError> {
        self.settles().map_err(|e| self.explained(e))
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
    }

    /// What NCCL itself holds is not known.
    fn held_bytes(&self) -> u64 {
        0
    }
}
