//! The memory that a rank takes of its GPU beside its arena, counted from its program without a
//! GPU.
//!
//! A stream has scratch memory, which grows to the next power of two and keeps what became too
//! small, and a workspace of the library if it computes. How much an instruction asks for is said
//! by the functions that a run asks, given where the program has its operands.

use super::args::Span;
use super::launches::op;
use super::ops::{self, Part};
use super::products::WORKSPACE;
use super::{aligned, joined};
use crate::error::RuntimeError;
use crate::execute::{Local, rank_calls};
use crate::fabric::nccl;
use ir::program::{InstrKind, Instruction, Program, RoleProgram, Space};
use ir::{BufferId, Rank, StreamId};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Ranks of a role whose exchanges are looked at, spread evenly over all of them: buffers are as
/// large on each rank, and thousands of ranks would take minutes.
const MOST_RANKS: usize = 64;

/// Most bytes of the GPU's memory that a rank of a role takes beside its arena: workspaces and
/// scratch of its streams, copies of operands that overlap results, tables of what is joined, and
/// what is staged where ranks meet by NCCL. Memory of the driver and of NCCL itself is not in it.
///
/// Fails where a run would: a transfer has no end, or the loss cannot be had without training.
pub fn beside_arena(program: &Program, role: &RoleProgram) -> Result<u64, RuntimeError> {
    let all = || {
        let templates = role.templates.iter().enumerate();
        templates.flat_map(|(t, of)| of.instructions.iter().enumerate().map(move |i| (t, i)))
    };
    let mut streams = Streams::default();
    // Barriers are on the first stream, and so are writes between steps.
    streams.asks(StreamId(0), 0);
    let first = locals(role, role.mesh.devices.first_rank)?;
    for (_, (_, instruction)) in all() {
        for m in microbatches(program, role, instruction) {
            streams.asks(instruction.stream, alone(role, (instruction, m), &first));
        }
        if matches!(instruction.kind, InstrKind::Compute { .. }) {
            streams.compute.insert(instruction.stream);
        }
    }
    let apart = (role.mesh.n_devices() as usize).div_ceil(MOST_RANKS).max(1);
    for rank in role.mesh.ranks().step_by(apart) {
        let calls = rank_calls(program, role, rank, &locals(role, rank)?)?;
        for (t, (i, instruction)) in all() {
            let Some(call) = &calls[t][i] else { continue };
            for m in microbatches(program, role, instruction) {
                let [inputs, outputs] = sides(instruction).map(|ids| ranges(role, &ids, m));
                let staged = nccl::staged(call, rank, (&inputs, &outputs));
                streams.asks(instruction.stream, staged);
            }
        }
    }
    Ok(streams.bytes() + joined::kept_bytes(role)?)
}

/// The streams of a rank, and what they are asked for.
#[derive(Default)]
struct Streams {
    /// The sizes that scratch memory may have one after the other.
    sizes: BTreeMap<StreamId, BTreeSet<usize>>,
    compute: BTreeSet<StreamId>,
}

impl Streams {
    fn asks(&mut self, stream: StreamId, bytes: usize) {
        let sizes = self.sizes.entry(stream).or_default();
        sizes.insert(ops::SCRATCH);
        sizes.insert(bytes.next_power_of_two().max(ops::SCRATCH));
    }
    fn bytes(&self) -> u64 {
        let scratch: usize = self.sizes.values().flatten().sum();
        (scratch + self.compute.len() * WORKSPACE) as u64
    }
}

/// A rank's part of every buffer of its role.
fn locals(role: &RoleProgram, rank: Rank) -> Result<Vec<Local>, RuntimeError> {
    let parts = role.buffers.iter().map(|b| {
        let part = Local::of_rank(b.dtype, &b.lens, &b.spec, &role.mesh, rank);
        part.ok_or_else(|| RuntimeError::Program(format!("{rank} has no part of `{}`", b.name)))
    });
    parts.collect()
}

/// The buffers that an instruction reads and writes as a call or a kernel of its own.
fn sides(of: &Instruction) -> [Vec<BufferId>; 2] {
    match &of.kind {
        InstrKind::Compute {
            inputs, outputs, ..
        } => [inputs.clone(), outputs.clone()],
        // The entries were copied to their places in the sum.
        InstrKind::WorldSum { output, .. } => [vec![*output], vec![*output]],
        _ => [of.reads().to_vec(), of.writes().to_vec()],
    }
}

/// The microbatches to look at: all where copies of buffers lie by turns over those of others, else
/// the first, as all others are like it.
fn microbatches(program: &Program, role: &RoleProgram, of: &Instruction) -> Range<u32> {
    let [reads, writes] = sides(of);
    let changes = |x: &BufferId, y: &BufferId| {
        let [a, b] = [x, y].map(|id| role.buffer(*id));
        let [end_a, end_b] = [a, b].map(|b| b.offset + u64::from(b.slots()) * b.stride());
        let overlap = a.space == b.space && a.offset < end_b && b.offset < end_a;
        x != y && overlap && a.slots().max(b.slots()) > 1
    };
    let turns = reads.iter().any(|x| writes.iter().any(|y| changes(x, y)));
    0..if turns { program.n_microbatches } else { 1 }
}

/// Where buffers lie in the arena for a microbatch.
fn ranges(role: &RoleProgram, ids: &[BufferId], m: u32) -> Vec<Range<u64>> {
    let range = |id: &BufferId| {
        let b = role.buffer(*id);
        let at = b.offset_for(Some(m));
        at..at + b.bytes
    };
    ids.iter().map(range).collect()
}

/// Bytes of scratch memory that an instruction asks for on its own GPU.
fn alone(role: &RoleProgram, (of, m): (&Instruction, u32), locals: &[Local]) -> usize {
    let parts = |ids: &[BufferId]| -> Vec<Part<'_>> {
        let spans = ranges(role, ids, m).into_iter();
        let parts = ids.iter().zip(spans).map(|(id, at)| Part {
            local: &locals[id.index()],
            span: Span {
                at: at.start,
                bytes: at.end - at.start,
            },
        });
        parts.collect()
    };
    match &of.kind {
        InstrKind::Compute {
            path,
            kind,
            inputs,
            outputs,
        } if !kind.is_source() => {
            let (x, y) = (parts(inputs), parts(outputs));
            let op = op((path, kind), &x, &y);
            // A run does not come to one without kernels.
            let Ok(()) = op.check() else { return 0 };
            let copied = op.copied().into_iter().filter(|(_, in_place)| !in_place);
            let copied = copied.map(|(i, _)| aligned(x[i].span.bytes));
            op.scratch_bytes() + copied.sum::<usize>()
        }
        InstrKind::Copy { input, output } => {
            let [from, to] = [input, output].map(|id| role.buffer(*id));
            let [x, y] = [from, to].map(|b| b.offset_for(Some(m)));
            let within = [from, to].iter().all(|b| b.space == Space::Device);
            let overlaps = within && x != y && x.abs_diff(y) < from.bytes;
            if overlaps { from.bytes as usize } else { 0 }
        }
        _ => 0,
    }
}
