//! Instructions that meet other ranks, and slices, which could have.

use super::RankState;
use crate::arena::{Arena, Bytes};
use crate::communicator::{Arrived, Channel, Contribution, Meeting};
use crate::error::RuntimeError;
use crate::execute::collective::{self, Rows};
use crate::execute::local::Local;
use ir::collective::CollectiveKind;
use ir::program::{CollectiveItem, InstrKind, Instruction, Program, Transfer};
use ir::reshard::{LayoutStep, Placement, Tile, tiles_from, tiles_to};
use ir::{AxisId, BufferId, DType, Rank, TransferId};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// All-reduces of at least this many bytes are done in two phases: every member reduces one
/// part, then the parts are shared. The bits are the same; the work is divided.
const TWO_PHASE_BYTES: usize = 1 << 16;
/// The number of the world's communicator, which is no stream's of any role.
const WORLD: u32 = u32::MAX;

/// A meeting that an instruction waits for.
pub(super) struct Waiting {
    pub meeting: Meeting,
    pub then: Then,
}

/// The action that follows when a meeting is over.
pub(super) enum Then {
    /// Results of a collective from all members' operands.
    Combine,
    /// Results of an all-reduce in two phases from all members' parts.
    Paste,
    /// Blocks that an exchange received go to their places.
    Receive {
        /// Bytes that it sends.
        sent_bytes: usize,
    },
    /// The world's terms are added.
    AddUp,
}

impl RankState {
    /// Begins an instruction if it meets others; its operands are read now.
    pub(super) fn begin_meeting(
        &mut self,
        instruction: &Instruction,
        microbatch: Option<u32>,
    ) -> Result<Option<Waiting>, RuntimeError> {
        let (meeting, then) = match &instruction.kind {
            InstrKind::Collective { axes, items, .. } => {
                let meeting = self.come(instruction.stream.0, axes, items, microbatch)?;
                (meeting, Then::Combine)
            }
            InstrKind::Exchange { sends, recvs } => {
                let (meeting, sent_bytes) = self.send(sends, recvs, microbatch);
                (meeting, Then::Receive { sent_bytes })
            }
            InstrKind::WorldSum { inputs, output } => (
                self.come_to_world(inputs, *output, microbatch)?,
                Then::AddUp,
            ),
            _ => return Ok(None),
        };
        Ok(Some(Waiting { meeting, then }))
    }

    /// Goes on with an instruction whose meeting is over; its results are written now, unless
    /// it meets once more.
    pub(super) fn after_meeting(
        &mut self,
        instruction: &Instruction,
        microbatch: Option<u32>,
        then: Then,
        arrived: Arrived,
    ) -> Result<Option<Waiting>, RuntimeError> {
        let members = match arrived {
            Arrived::Gathered(members) => members,
            Arrived::Exchanged(blocks) => {
                if let (InstrKind::Exchange { recvs, .. }, Then::Receive { sent_bytes }) =
                    (&instruction.kind, then)
                {
                    self.receive(recvs, blocks, sent_bytes, microbatch);
                }
                return Ok(None);
            }
        };
        match (&instruction.kind, then) {
            (InstrKind::Collective { items, .. }, Then::Paste) => {
                self.paste_parts(items, &members, microbatch);
                self.note_scratch(items);
                Ok(None)
            }
            (InstrKind::Collective { kind, axes, items }, _) => {
                let group = self.this().mesh.group(self.rank, axes).unwrap_or_default();
                let me = group.iter().position(|&r| r == self.rank).unwrap_or(0);
                let sizes = items.iter().map(|i| self.range(i.input, microbatch).len());
                let places = places(sizes);
                let n_bytes: usize = places.iter().map(Range::len).sum();
                if let CollectiveKind::AllReduce(reduce) = kind
                    && n_bytes >= TWO_PHASE_BYTES
                    && group.len() > 1
                {
                    let mine = self.reduce_part(*reduce, items, (&members, &places), me);
                    drop(members);
                    let mine = self.spare.lend(mine);
                    let meeting = self.endpoint.come(&group, instruction.stream.0, mine)?;
                    return Ok(Some(Waiting {
                        meeting,
                        then: Then::Paste,
                    }));
                }
                for (item, place) in items.iter().zip(&places) {
                    let range = self.range(item.output, microbatch);
                    let [cut, joined] = item.step.cuts();
                    let operand = self.rows(item.input, cut, members.len());
                    let result = self.rows(item.output, joined, members.len());
                    let output = &self.locals[item.output.index()];
                    let in_pieces = self.this().buffer(item.output).pieces.is_some();
                    let out = self.arena.write(range);
                    let operands: Vec<&[u8]> = members.iter().map(|m| &m[place.clone()]).collect();
                    let kind = (*kind, output.dtype);
                    collective::result(kind, me, (&operands, operand), (out, result))?;
                    if !in_pieces {
                        output.zero_padding(out);
                    }
                }
                self.note_scratch(items);
                Ok(None)
            }
            (InstrKind::WorldSum { output, .. }, _) => {
                let parts: Vec<&[u8]> = members.iter().map(|m| &m[..]).collect();
                let range = self.range(*output, microbatch);
                let out = self.arena.write(range);
                collective::combine(ir::ReduceKind::Sum, DType::F32, &parts, out);
                Ok(None)
            }
            _ => Ok(None),
        }
    }

    /// The label of an instruction when others wait for it.
    pub(super) fn label(&self, instruction: &Instruction) -> String {
        let names = |list: &[(TransferId, BufferId)]| {
            list.iter()
                .map(|(t, _)| self.program.transfers[t.index()].value.clone())
                .collect::<Vec<_>>()
                .join(", ")
        };
        match &instruction.kind {
            InstrKind::Collective { kind, axes, .. } => {
                format!("{} over {}", kind.name(), axis_names(axes))
            }
            InstrKind::Exchange { sends, recvs } => format!(
                "an exchange that sends [{}] and receives [{}]",
                names(sends),
                names(recvs)
            ),
            _ => "a sum over the world".into(),
        }
    }

    /// Brings the operands of a collective to its group.
    fn come(
        &mut self,
        number: u32,
        axes: &[AxisId],
        items: &[CollectiveItem],
        microbatch: Option<u32>,
    ) -> Result<Meeting, RuntimeError> {
        let group = self.this().mesh.group(self.rank, axes).unwrap_or_default();
        let sources: Vec<Range<usize>> = items
            .iter()
            .map(|i| self.range(i.input, microbatch))
            .collect();
        // Members' parts of a tensor are equally large, so one layout holds for all.
        let places = places(sources.iter().map(Range::len));
        let mut mine = self.spare.take(places.last().map_or(0, |p| p.end));
        for (source, place) in sources.iter().zip(&places) {
            mine[place.clone()].copy_from_slice(self.arena.read(source.clone()));
        }
        let mine = self.spare.lend(mine);
        self.endpoint.come(&group, number, mine)
    }

    /// How the pieces along `dim` of a buffer stand, for a group of `n`.
    fn rows(&self, b: BufferId, dim: Option<usize>, n: usize) -> Rows {
        match (dim, self.this().buffer(b).pieces) {
            (None, _) => Rows::ONE,
            (Some(_), Some(_)) => Rows { rows: 1, n },
            (Some(dim), None) => Rows {
                rows: self.local(b).dims()[..dim].iter().product(),
                n,
            },
        }
    }

    /// Notes what a collective took beside the arena.
    fn note_scratch(&mut self, items: &[CollectiveItem]) {
        let bytes = |i: &CollectiveItem| self.this().buffer(i.input).bytes as usize;
        let n_bytes: usize = items.iter().map(bytes).sum();
        let scratch = self.spare.bytes().max(2 * n_bytes) as u64;
        self.peak_scratch = self.peak_scratch.max(scratch);
    }

    /// This member's part of a two-phase all-reduce: its chunk of every item.
    fn reduce_part(
        &mut self,
        reduce: ir::ReduceKind,
        items: &[CollectiveItem],
        (members, inputs): (&[Contribution], &[Range<usize>]),
        me: usize,
    ) -> Bytes {
        let chunks = self.chunks(items, me, members.len());
        let outputs = places(chunks.iter().map(Range::len));
        let mut mine = self.spare.take(outputs.last().map_or(0, |p| p.end));
        for (i, item) in items.iter().enumerate() {
            let from = inputs[i].start + chunks[i].start..inputs[i].start + chunks[i].end;
            let parts: Vec<&[u8]> = members.iter().map(|m| &m[from.clone()]).collect();
            let dtype = self.local(item.input).dtype;
            collective::combine(reduce, dtype, &parts, &mut mine[outputs[i].clone()]);
        }
        mine
    }

    /// Puts the members' parts of a two-phase all-reduce where they belong.
    fn paste_parts(
        &mut self,
        items: &[CollectiveItem],
        parts: &[Contribution],
        microbatch: Option<u32>,
    ) {
        for (member, part) in parts.iter().enumerate() {
            let chunks = self.chunks(items, member, parts.len());
            let places = places(chunks.iter().map(Range::len));
            for ((item, chunk), place) in items.iter().zip(chunks).zip(places) {
                let out = self.range(item.output, microbatch);
                let out = &mut self.arena.write(out)[chunk];
                out.copy_from_slice(&part[place]);
            }
        }
        for item in items {
            let range = self.range(item.output, microbatch);
            self.locals[item.output.index()].zero_padding(self.arena.write(range));
        }
    }

    /// The bytes of every item that a member reduces.
    fn chunks(&self, items: &[CollectiveItem], member: usize, n: usize) -> Vec<Range<usize>> {
        let of = |item: &CollectiveItem| {
            let local = self.local(item.input);
            let size = local.dtype.bytes() as usize;
            let chunk = collective::chunk(local.elements(), member, n);
            chunk.start * size..chunk.end * size
        };
        items.iter().map(of).collect()
    }

    pub(super) fn slice(
        &mut self,
        step: &LayoutStep,
        input: BufferId,
        output: BufferId,
        microbatch: Option<u32>,
    ) -> Result<(), RuntimeError> {
        let LayoutStep::Slice { axis, dim, .. } = step else {
            return Err(RuntimeError::Program(format!("{step:?} is not a slice")));
        };
        let ranges = [input, output].map(|b| self.range(b, microbatch));
        let coordinate = self.coords[axis.index()] as usize;
        let (from, to) = (&self.locals[input.index()], &self.locals[output.index()]);
        let (operand, out) = both(&mut self.arena, ranges)?;
        collective::slice(*dim, coordinate, from, operand, to, out);
        Ok(())
    }

    /// Copies a buffer to another, into pieces or from them where one is in pieces.
    pub(super) fn copy(
        &mut self,
        input: BufferId,
        output: BufferId,
        microbatch: Option<u32>,
    ) -> Result<(), RuntimeError> {
        let pieces = [input, output].map(|b| self.this().buffer(b).pieces);
        let ranges = [input, output].map(|b| self.range(b, microbatch));
        let lens = [&ranges[0], &ranges[1]].map(Range::len);
        if pieces[0] == pieces[1] {
            if lens[0] != lens[1] {
                return Err(RuntimeError::Program(format!(
                    "a copy of {} bytes to {}",
                    lens[0], lens[1]
                )));
            }
            let [from, to] = ranges;
            self.arena.copy(from, to.start);
            return Ok(());
        }
        let (from, to) = (&self.locals[input.index()], &self.locals[output.index()]);
        let (data, out) = both(&mut self.arena, ranges)?;
        match pieces {
            [None, Some(pieces)] => collective::pack(from, data, pieces, out),
            [Some(pieces), None] => collective::unpack(data, pieces, to, out),
            _ => {
                let problem = "a copy from pieces to other pieces";
                return Err(RuntimeError::Program(problem.into()));
            }
        }
        Ok(())
    }

    /// Sends the blocks of an exchange, and says what it expects.
    fn send(
        &mut self,
        sends: &[(TransferId, BufferId)],
        recvs: &[(TransferId, BufferId)],
        microbatch: Option<u32>,
    ) -> (Meeting, usize) {
        let mut outgoing = Vec::new();
        for &(transfer, buffer) in sends {
            let local = &self.locals[buffer.index()];
            let data = self.arena.read(self.range(buffer, microbatch));
            for tile in self.outgoing.get(&transfer).into_iter().flatten() {
                let len: Vec<usize> = tile.len.iter().map(|&n| n as usize).collect();
                let n_bytes = len.iter().product::<usize>() * local.dtype.bytes() as usize;
                let mut block = self.spare.take(n_bytes);
                collective::copy_block(
                    local.dtype,
                    (data, &local.dims(), &within(tile, local)),
                    (&mut block, &len, &vec![0; len.len()]),
                    &len,
                );
                outgoing.push((
                    Channel {
                        transfer: transfer.0,
                        from: self.rank,
                        to: tile.to,
                    },
                    block,
                ));
            }
        }
        let channel = |(t, tile): (TransferId, &Tile)| Channel {
            transfer: t.0,
            from: tile.from,
            to: self.rank,
        };
        let expected = self.expected(recvs);
        let channels: Vec<Channel> = expected.map(|(t, _, tile)| channel((t, tile))).collect();
        let n_bytes: usize = outgoing.iter().map(|o| o.1.len()).sum();
        (self.endpoint.send(outgoing, &channels), n_bytes)
    }

    /// The blocks that an exchange receives, with where they go.
    fn expected<'a>(
        &'a self,
        recvs: &'a [(TransferId, BufferId)],
    ) -> impl Iterator<Item = (TransferId, BufferId, &'a Tile)> {
        recvs.iter().flat_map(|&(t, b)| {
            let tiles = self.incoming.get(&t).into_iter().flatten();
            tiles.map(move |tile| (t, b, tile))
        })
    }

    /// Puts what an exchange received in its place.
    fn receive(
        &mut self,
        recvs: &[(TransferId, BufferId)],
        arrived: Vec<Bytes>,
        sent_bytes: usize,
        microbatch: Option<u32>,
    ) {
        for (_, buffer) in recvs {
            let range = self.range(*buffer, microbatch);
            self.arena.write(range).fill(0);
        }
        let expected: Vec<(BufferId, Tile)> = self
            .expected(recvs)
            .map(|(_, b, tile)| (b, tile.clone()))
            .collect();
        for ((buffer, tile), block) in expected.iter().zip(&arrived) {
            let range = self.range(*buffer, microbatch);
            let local = &self.locals[buffer.index()];
            let len: Vec<usize> = tile.len.iter().map(|&n| n as usize).collect();
            let out = self.arena.write(range);
            collective::copy_block(
                local.dtype,
                (block, &len, &vec![0; len.len()]),
                (out, &local.dims(), &within(tile, local)),
                &len,
            );
        }
        let n_arrived: usize = arrived.iter().map(|b| b.len()).sum();
        arrived.into_iter().for_each(|block| self.spare.give(block));
        let scratch = self.spare.bytes().max(sent_bytes + n_arrived) as u64;
        self.peak_scratch = self.peak_scratch.max(scratch);
    }

    /// Brings a rank's terms to the sum over the world.
    fn come_to_world(
        &mut self,
        inputs: &[(u32, BufferId)],
        output: BufferId,
        microbatch: Option<u32>,
    ) -> Result<Meeting, RuntimeError> {
        let n = self.local(output).elements();
        let mut mine = vec![0.0f32; n];
        if self.coords.iter().all(|&c| c == 0) {
            for &(entry, buffer) in inputs {
                let value = self.arena.read(self.range(buffer, microbatch));
                let slot = mine.get_mut(entry as usize).ok_or_else(|| {
                    RuntimeError::Program(format!("entry {entry} of a world sum of {n}"))
                })?;
                *slot = bytemuck::cast_slice(value).first().copied().unwrap_or(0.0);
            }
        }
        let mine = Arc::new(Bytes::of_f32(&mine));
        self.endpoint.come(&self.world, WORLD, mine)
    }
}

/// Bytes to read and bytes to write, which do not overlap.
fn both(
    arena: &mut Arena,
    [from, to]: [Range<usize>; 2],
) -> Result<(&[u8], &mut [u8]), RuntimeError> {
    let mut borrowed = arena
        .borrow(&[from], &[to])
        .map_err(RuntimeError::Program)?;
    let read = borrowed.reads.pop().unwrap_or_default();
    Ok((read, borrowed.writes.pop().unwrap_or_default()))
}

/// Where blocks of these lengths lie one after the other, each aligned to 8.
fn places(lens: impl Iterator<Item = usize>) -> Vec<Range<usize>> {
    let mut at: usize = 0;
    lens.map(|len| {
        let start = at.next_multiple_of(8);
        at = start + len;
        start..at
    })
    .collect()
}

pub(super) type Tiles = BTreeMap<TransferId, Vec<Tile>>;

/// The blocks that `rank` sends and receives, per transfer.
pub(super) fn tiles(
    program: &Program,
    role: usize,
    rank: Rank,
    coords: &[u32],
) -> Result<(Tiles, Tiles), RuntimeError> {
    let stage = program.roles[role].stage;
    let (mut outgoing, mut incoming) = (Tiles::new(), Tiles::new());
    for (i, t) in program.transfers.iter().enumerate() {
        let (from, to) = (source(program, t)?, target(program, t)?);
        if t.from == stage {
            outgoing.insert(TransferId::new(i), tiles_from(&t.lens, from, to, rank));
        }
        if t.to == stage {
            incoming.insert(TransferId::new(i), tiles_to(&t.lens, from, to, coords));
        }
    }
    Ok((outgoing, incoming))
}

fn source<'a>(program: &'a Program, t: &'a Transfer) -> Result<Placement<'a>, RuntimeError> {
    let role = program.roles.iter().find(|r| r.stage == t.from);
    let mesh = role.map(|r| &r.mesh).ok_or_else(|| {
        RuntimeError::Program(format!(
            "transfer `{}` comes from {}, which has no role",
            t.value, t.from
        ))
    })?;
    Ok(Placement {
        mesh,
        spec: &t.from_spec,
    })
}

fn target<'a>(program: &'a Program, t: &'a Transfer) -> Result<Placement<'a>, RuntimeError> {
    let role = program.roles.iter().find(|r| r.stage == t.to);
    let mesh = role.map(|r| &r.mesh).ok_or_else(|| {
        RuntimeError::Program(format!(
            "transfer `{}` goes to {}, which has no role",
            t.value, t.to
        ))
    })?;
    Ok(Placement {
        mesh,
        spec: &t.to_spec,
    })
}

/// Where a tile starts in a rank's buffer.
fn within(tile: &Tile, local: &Local) -> Vec<usize> {
    tile.start
        .iter()
        .zip(&local.ranges)
        .map(|(&start, r)| (start - r.start) as usize)
        .collect()
}

fn axis_names(axes: &[AxisId]) -> String {
    axes.iter()
        .map(AxisId::to_string)
        .collect::<Vec<_>>()
        .join("+")
}
