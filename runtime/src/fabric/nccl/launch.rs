//! How calls get on their streams: when their communicator is there and their turn has come.

use super::comms::{Comms, Key};
use super::entries::{Move, Plan, Spot};
use super::library::{Entry, ID};
use super::{Nccl, PATIENCE, Stage, Ticket};
use crate::arena::Bytes;
use crate::device::{Cuda, Place};
use crate::error::RuntimeError;
use crate::fabric::threads::{Arrived, Endpoint, Meeting};
use crate::fabric::{Call, CallKind, Collective, Places};
use ir::collective::{CollectiveKind, Contract, Order};
use ir::{DType, Rank, StreamId};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

impl Nccl {
    /// Goes on with the communicator of all ranks: whether it is there.
    pub(super) fn root_is_ready(&mut self) -> Result<bool, RuntimeError> {
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
    pub(super) fn until(
        &mut self,
        what: &str,
        mut is_there: impl FnMut(&mut Self) -> Result<bool, RuntimeError>,
    ) -> Result<(), RuntimeError> {
        let began = Instant::now();
        while !is_there(self)? {
            self.pulse.beats();
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

    /// Whether a call's communicator is there, and its turn on it.
    pub(super) fn is_next(&mut self, ticket: &mut Ticket) -> Result<bool, RuntimeError> {
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
    pub(super) fn advance(
        &mut self,
        device: &mut Cuda,
        ticket: &mut Ticket,
    ) -> Result<bool, RuntimeError> {
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

    /// The parts of a call: moves on this GPU, and the library's calls.
    fn plan(&self, device: &Cuda, call: &Call, places: &Places) -> Result<Plan, RuntimeError> {
        let spans = |places: &[Place]| {
            let span = |p: &Place| device.address(*p).map(|at| at..at + p.len as u64);
            places
                .iter()
                .map(span)
                .collect::<Result<Vec<Range<u64>>, _>>()
        };
        let (inputs, outputs) = (spans(&places.inputs)?, spans(&places.outputs)?);
        let at = (&inputs[..], &outputs[..]);
        match &call.kind {
            CallKind::Collective(of) => Plan::collective(of, self.table.place_in(&of.group)?, at),
            CallKind::Exchange(of) => {
                let everyone = &self.root.0;
                let number = |rank: Rank| {
                    let place = everyone.iter().position(|r| *r == rank);
                    place.ok_or_else(|| RuntimeError::Program(format!("there is no {rank}")))
                };
                Plan::exchange(of, number, at)
            }
        }
    }

    /// The moves of a call, without what the library would do between them.
    pub(super) fn moves_alone(
        &self,
        device: &mut Cuda,
        stream: StreamId,
        (call, places): (&Call, &Places),
    ) -> Result<(), RuntimeError> {
        let plan = self.plan(device, call, places)?;
        let staging = match plan.staged {
            0 => 0,
            bytes => device.staging(stream, bytes)?,
        };
        let mut moves = plan.before.into_iter().chain(plan.after);
        moves.try_for_each(|step| make(device, stream, step, staging))
    }

    /// Gives a call to the library.
    pub(super) fn launch(
        &mut self,
        device: &mut Cuda,
        ticket: &mut Ticket,
    ) -> Result<(), RuntimeError> {
        let plan = self.plan(device, &ticket.call, &ticket.places)?;
        let stream = ticket.stream;
        if plan.staged > 0 {
            ticket.staging = device.staging(stream, plan.staged)?;
            ticket.staged = plan.staged as u64;
        }
        for step in plan.before {
            make(device, stream, step, ticket.staging)?;
        }
        let address = |(what, spots, count, dtype): (_, [Spot; 2], _, _)| {
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
}

/// Comes to the meeting that gives all members a communicator's identifier, which is the first one's.
pub(super) fn forms(
    table: &mut Endpoint,
    comms: &Comms,
    key: &Key,
) -> Result<Meeting, RuntimeError> {
    let of = Collective {
        kind: CollectiveKind::AllGather,
        contract: Contract::new(CollectiveKind::AllGather, DType::F32, Order::Library),
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
    let both = |from: Spot, to: Spot| (from.address(staging), to.address(staging));
    match what {
        Move::Copy { from, to, bytes } => device.copy_bytes(stream, both(from, to), bytes),
        Move::Clear { at, bytes } => device.clear(stream, at.address(staging), bytes),
        Move::Lift { of, from, to } => device.lift(stream, &of, both(from, to)),
        Move::Lay { of, from, to } => device.lay(stream, &of, both(from, to)),
    }
}
