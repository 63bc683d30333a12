//! Which neighbours of a slot feed each other so that a device may make one call of them.
//!
//! Products of matrices are followed by what is done to their results element by element: a bias, a
//! residual, GELU or its gradient, the sum in an accumulator. A library that multiplies does that
//! before it writes, and the value in the middle is never in memory. So such neighbours on one
//! stream are a *chain* where nobody can tell the difference but by the rounding of that value: the
//! later ones wait for nothing, nobody else reads what is not written, and no byte is written that
//! is read. The program, its proof and its text stay as they are.

use ir::op::{Binary, Unary};
use ir::program::{BufferClass, InstrKind, Instruction, RoleProgram, Space};
use ir::{BufferId, DType, OpKind};
use std::ops::Range;

/// How often the buffers of a role are read and written, by all instructions of its templates.
pub(crate) struct Uses(Vec<[u32; 2]>);

impl Uses {
    pub fn of(role: &RoleProgram) -> Self {
        let mut uses = vec![[0; 2]; role.buffers.len()];
        for instruction in role.templates.iter().flat_map(|t| &t.instructions) {
            let both = [instruction.reads(), instruction.writes()];
            for (which, buffers) in both.iter().enumerate() {
                for b in buffers {
                    if let Some(uses) = uses.get_mut(b.index()) {
                        uses[which] += 1;
                    }
                }
            }
        }
        Uses(uses)
    }
    /// Whether so many reads and writes are all that a buffer has that does not live on.
    fn are(&self, role: &RoleProgram, b: BufferId, uses: [usize; 2]) -> bool {
        let is_transient = role.buffer(b).class == BufferClass::Transient;
        let all = self.0.get(b.index()).map(|both| both.map(|n| n as usize));
        is_transient && all == Some(uses)
    }
}

/// The place of an op in a chain.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Link {
    Product,
    Sum,
    End,
}

impl Link {
    /// The place of an op that has the value of this one as that operand.
    fn then(self, kind: &OpKind, operand: usize) -> Option<Link> {
        let binary = |f| OpKind::Binary { f };
        match self {
            Link::Product | Link::Sum if *kind == binary(Binary::Add) => Some(Link::Sum),
            Link::Product | Link::Sum if is_gelu(kind) => Some(Link::End),
            Link::Product if *kind == binary(Binary::GeluTanhGrad) && operand == 1 => {
                Some(Link::End)
            }
            Link::Product if matches!(kind, OpKind::Accumulate { dtype: DType::F32 }) => {
                Some(Link::End)
            }
            _ => None,
        }
    }
}

fn is_gelu(kind: &OpKind) -> bool {
    *kind == OpKind::Unary { f: Unary::GeluTanh }
}

/// Operator, operands and result of an op that has one.
fn parts(instruction: &Instruction) -> Option<(&OpKind, &[BufferId], BufferId)> {
    match &instruction.kind {
        InstrKind::Compute {
            kind,
            inputs,
            outputs,
            ..
        } => match outputs.as_slice() {
            [output] => Some((kind, inputs, *output)),
            _ => None,
        },
        _ => None,
    }
}

/// Most ops of a chain.
const MOST: usize = 3;

/// The chains of a slot.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Chained {
    /// The number of instructions of the chain that begins with each of those that the slot plays: 1
    /// of one that is alone, 0 of one that belongs to an earlier one. A device may make one call of
    /// the first few of them, too.
    pub counts: Vec<usize>,
    /// Whether its result is written though the next one of its chain takes it.
    pub kept: Vec<bool>,
}

impl Chained {
    /// Whether it is one of a chain.
    pub fn has(&self, k: usize) -> bool {
        self.counts.get(k).is_some_and(|n| *n != 1)
    }
}

type Bytes = (Space, Range<u64>);

fn overlap(a: &Bytes, b: &Bytes) -> bool {
    a.0 == b.0 && a.1.start < b.1.end && b.1.start < a.1.end
}

/// The chains of the instructions that a slot plays, which are given by place in its template.
pub(crate) fn chained(
    role: &RoleProgram,
    uses: &Uses,
    instructions: &[Instruction],
    played: &[usize],
    microbatch: Option<u32>,
) -> Chained {
    let bytes = |b: BufferId| {
        let b = role.buffer(b);
        let start = b.offset_for(microbatch);
        (b.space, start..start + b.bytes)
    };
    let mut made = Chained {
        counts: vec![1; played.len()],
        kept: vec![true; played.len()],
    };
    let mut first = 0;
    while first < played.len() {
        let of = |k: usize| &instructions[played[k]];
        let mut end = first + 1;
        if let Some((OpKind::DotGeneral { .. }, factors, product)) = parts(of(first)) {
            let mut reads: Vec<Bytes> = factors.iter().map(|b| bytes(*b)).collect();
            let mut kept: Vec<Bytes> = Vec::new();
            let (mut link, mut value) = (Link::Product, product);
            while end < played.len() && end - first < MOST {
                let next = of(end);
                let is_free = next.deps.is_empty() && next.events.is_empty();
                let Some((kind, inputs, output)) = parts(next) else {
                    break;
                };
                let mut places = (0..inputs.len()).filter(|&i| inputs[i] == value);
                let (Some(operand), None) = (places.next(), places.next()) else {
                    break;
                };
                let Some(to) = link.then(kind, operand) else {
                    break;
                };
                if !is_free || next.stream != of(first).stream {
                    break;
                }
                // The next one may write its result over the value. Else the chain's own uses of its
                // buffer have to be all.
                let own = |k: usize| parts(of(k));
                let reads_it = |k: &usize| own(*k).is_some_and(|(_, x, _)| x.contains(&value));
                let writes_it = |k: &usize| own(*k).is_some_and(|(_, _, y)| y == value);
                let n_reads = (first + 1..=end).filter(reads_it).count();
                let n_writes = (first..end).filter(writes_it).count();
                let is_kept = output != value && !uses.are(role, value, [n_reads, n_writes]);
                if is_kept && !is_gelu(kind) {
                    break;
                }
                let written = bytes(output);
                let others = inputs.iter().filter(|b| **b != value).map(|b| bytes(*b));
                let others: Vec<Bytes> = others.collect();
                let mut writes = kept.clone();
                writes.extend(is_kept.then(|| bytes(value)));
                let meets = |w: &Bytes| {
                    // A sum may lie where its other operand does: each element is read before it
                    // is written.
                    let is_in_place = |r: &&Bytes| to == Link::Sum && *r == w && *w == written;
                    let mut before = reads.iter();
                    let mut others = others.iter().filter(|r| !is_in_place(r));
                    before.any(|r| overlap(r, w)) || others.any(|r| overlap(r, w))
                };
                let clash = writes.iter().any(|w| overlap(w, &written))
                    || writes.iter().chain([&written]).any(meets);
                if clash {
                    break;
                }
                made.kept[end - 1] = is_kept;
                (reads, kept) = ([reads, others].concat(), writes);
                (link, value) = (to, output);
                end += 1;
                if link == Link::End {
                    break;
                }
            }
            made.counts[first] = end - first;
            made.counts[first + 1..end].fill(0);
        }
        first = end;
    }
    made
}

#[cfg(test)]
pub(super) mod tests;
