//! Products and the neighbours that they feed.
//!
//! Products of matrices are followed by what is done to their results element by element: a bias, a
//! residual, GELU or its gradient, the sum in an accumulator. A library that multiplies does that
//! before it writes, and the value in the middle is never in memory. So such neighbours on one
//! stream are a *chain* where nobody can tell the difference but by the rounding of that value: the
//! later ones wait for nothing, nobody else reads what is not written, and no byte is written that
//! is read.

use super::meet;
use ir::chain::Link;
use ir::program::{BufferClass, Call, InstrKind, Instruction, RoleProgram};
use ir::{BufferId, OpKind};

/// How often the buffers of a role are read and written, by all instructions of its templates.
pub(super) struct Uses(Vec<[u32; 2]>);

impl Uses {
    pub fn of(role: &RoleProgram) -> Self {
        let mut uses = vec![[0; 2]; role.buffers.len()];
        for instruction in role.templates.iter().flat_map(|t| &t.instructions) {
            let both = [instruction.reads(), instruction.writes()];
            for (which, buffers) in both.iter().enumerate() {
                buffers.iter().for_each(|b| uses[b.index()][which] += 1);
            }
        }
        Uses(uses)
    }
    /// Whether so many reads and writes are all that a buffer has that does not live on.
    fn are(&self, role: &RoleProgram, b: BufferId, uses: [u32; 2]) -> bool {
        role.buffer(b).class == BufferClass::Transient && self.0[b.index()] == uses
    }
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

/// A chain while it is made.
struct Chain<'a> {
    role: &'a RoleProgram,
    uses: &'a Uses,
    /// Its instructions.
    of: Vec<&'a Instruction>,
    link: Link,
    /// The result of the last one.
    value: BufferId,
    /// The operands that come from elsewhere.
    reads: Vec<BufferId>,
    /// The values in the middle that are written.
    kept: Vec<BufferId>,
}

impl<'a> Chain<'a> {
    fn new(role: &'a RoleProgram, uses: &'a Uses, first: &'a Instruction) -> Option<Self> {
        let (kind, factors, product) = parts(first)?;
        let begins = Link::first(kind).filter(|link| *link == Link::Product);
        begins.map(|link| Chain {
            role,
            uses,
            of: vec![first],
            link,
            value: product,
            reads: factors.to_vec(),
            kept: Vec::new(),
        })
    }

    /// Takes in the next instruction and says whether the value before it is written; none where it
    /// does not belong to the chain.
    fn take(&mut self, next: &'a Instruction) -> Option<bool> {
        let value = self.value;
        let is_free = next.deps.is_empty() && next.events.is_empty();
        let has_room = self.link.has_room(self.of.len());
        if !is_free || !has_room || next.stream != self.of[0].stream {
            return None;
        }
        let (kind, inputs, output) = parts(next)?;
        let mut places = (0..inputs.len()).filter(|&i| inputs[i] == value);
        let (Some(operand), None) = (places.next(), places.next()) else {
            return None;
        };
        let to = self.link.then(kind, operand)?;
        // The next one may write its result over the value. Else the chain's own uses of its buffer
        // have to be all.
        let reads_it = |i: &&&Instruction| i.reads().contains(&value);
        let writes_it = |i: &&&Instruction| i.writes().contains(&value);
        let n_reads = self.of[1..].iter().filter(reads_it).count() as u32 + 1;
        let n_writes = self.of.iter().filter(writes_it).count() as u32;
        let is_kept = output != value && !self.uses.are(self.role, value, [n_reads, n_writes]);
        if is_kept && !self.link.may_be_kept(kind) {
            return None;
        }
        let others: Vec<BufferId> = inputs.iter().copied().filter(|b| *b != value).collect();
        let mut writes = self.kept.clone();
        writes.extend(is_kept.then_some(value));
        let meet = |a: BufferId, b: BufferId| meet(self.role, a, b);
        let spoils = |w: BufferId| {
            // A sum may lie where its other operand does: each element is read before it is written.
            let is_in_place = |r: BufferId| to == Link::Sum && r == w && w == output;
            let mut others = others.iter().filter(|r| !is_in_place(**r));
            self.reads.iter().any(|r| meet(*r, w)) || others.any(|r| meet(*r, w))
        };
        let clash = writes.iter().any(|w| meet(*w, output))
            || writes.iter().chain([&output]).any(|w| spoils(*w));
        if clash {
            return None;
        }
        self.reads.extend(others);
        (self.kept, self.link, self.value) = (writes, to, output);
        self.of.push(next);
        Some(is_kept)
    }
}

/// The calls of a template's instructions, as far as these are chains that a product begins.
pub(super) fn chained(role: &RoleProgram, uses: &Uses, instructions: &[Instruction]) -> Vec<Call> {
    let mut calls = vec![Call::Own; instructions.len()];
    let mut chain: Option<Chain<'_>> = None;
    for (instruction, call) in instructions.iter().zip(&mut calls) {
        match chain.as_mut().and_then(|chain| chain.take(instruction)) {
            Some(is_kept) => *call = Call::Chained { is_kept },
            None => chain = Chain::new(role, uses, instruction),
        }
    }
    calls
}
