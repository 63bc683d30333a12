//! Dependencies between the streams of a template.
//!
//! An instruction waits for the last write of what it reads, and for the last write of and
//! the reads since from what it writes; buffers count as one where their bytes overlap.
//! Stream order already orders instructions of one stream. A vector clock (per instruction,
//! the last instruction of every stream that is known to be complete when it starts) leaves
//! out what follows from other dependencies.

use ir::program::{Buffer, BufferClass, Instruction, Stream};
use ir::{BufferId, InstrId};
use std::collections::BTreeMap;

const N_STREAMS: usize = 3;

fn index(stream: Stream) -> usize {
    match stream {
        Stream::Compute => 0,
        Stream::Collective => 1,
        Stream::Transfer => 2,
    }
}

/// By stream, one past the position of an instruction; 0 for none.
type Clock = [usize; N_STREAMS];

fn join(a: &mut Clock, b: &Clock) {
    a.iter_mut().zip(b).for_each(|(a, b)| *a = (*a).max(*b));
}

/// What a buffer's next access may have to wait for.
#[derive(Clone, Copy, Default)]
struct Access {
    written: Clock,
    read: Clock,
}

/// Fills in the dependencies of a template's instructions.
pub(crate) fn set_dependencies(instructions: &mut [Instruction], buffers: &[Buffer]) {
    let mut accesses: BTreeMap<BufferId, Access> = BTreeMap::new();
    let mut clocks: Vec<Clock> = Vec::with_capacity(instructions.len());
    let mut stream_clock = [[0; N_STREAMS]; N_STREAMS];
    for (i, instruction) in instructions.iter_mut().enumerate() {
        let (reads, writes) = (instruction.reads(), instruction.writes());
        let mut wait = Clock::default();
        for b in reads.iter().chain(&writes) {
            if !accesses.contains_key(b) {
                reused_bytes(*b, buffers, &accesses, &mut wait);
            }
        }
        for b in &reads {
            join(&mut wait, &accesses.entry(*b).or_default().written);
        }
        for b in &writes {
            let access = accesses.entry(*b).or_default();
            join(&mut wait, &access.written);
            join(&mut wait, &access.read);
        }
        let own = index(instruction.stream);
        let mut known = stream_clock[own];
        // Later instructions first: they may imply the earlier ones.
        let mut candidates: Vec<usize> = (0..N_STREAMS).filter(|&s| s != own).collect();
        candidates.sort_by_key(|&s| std::cmp::Reverse(wait[s]));
        instruction.deps.clear();
        for s in candidates {
            if wait[s] > known[s] {
                instruction.deps.push(InstrId::new(wait[s] - 1));
                join(&mut known, &clocks[wait[s] - 1]);
            }
        }
        instruction.deps.sort_unstable();
        known[own] = i + 1;
        clocks.push(known);
        stream_clock[own] = known;
        let mut at = Clock::default();
        at[own] = i + 1;
        for b in &reads {
            join(&mut accesses.entry(*b).or_default().read, &at);
        }
        for b in &writes {
            *accesses.entry(*b).or_default() = Access {
                written: at,
                read: Clock::default(),
            };
        }
    }
}

/// A transient buffer's first access waits for all accesses of those whose bytes it takes.
fn reused_bytes(
    b: BufferId,
    buffers: &[Buffer],
    accesses: &BTreeMap<BufferId, Access>,
    wait: &mut Clock,
) {
    let own = &buffers[b.index()];
    if own.class != BufferClass::Transient {
        return;
    }
    for (other, access) in accesses {
        let other = &buffers[other.index()];
        let overlaps =
            own.offset < other.offset + other.stride() && other.offset < own.offset + own.stride();
        if other.class == BufferClass::Transient && overlaps {
            join(wait, &access.written);
            join(wait, &access.read);
        }
    }
}
