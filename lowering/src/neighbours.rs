//! Ops right behind those that feed them.
//!
//! A backward pass makes the gradients of a product one after the other: that of the operand, that of
//! the weight, and then what goes on with the first. An op that can be one call with a product
//! ([`ir::chain`]) has to stand next to it:
//!
//! ```text
//! as made     dh = dy W2    dW2 = h dy    += dW2    dx = gelu'(x, dh)
//! as moved    dh = dy W2    dx = gelu'(x, dh)    dW2 = h dy    += dW2
//! ```
//! So where nobody else reads the product, the op moves up to it, past what neither touches what it
//! writes nor writes what it reads. It makes a tensor of the size of the one that it uses up.
//!
//! Functions of elements are gone through together, and so they move too ([`gather`]): up to the last
//! of them that feeds it, or, where its other operand is made in between, that one down to it:
//!
//! ```text
//! as made     g' = silu(g)    u = x U    h = g' u        dg' = dh u    du = dh g'    dx = du U    dg = silu'(g, dg')
//! as moved    u = x U    g' = silu(g)    h = g' u        dg' = dh u    du = dh g'    dg = silu'(g, dg')    dx = du U
//! ```

use crate::draft::RoleDraft;
use ir::chain::{Link, is_of_elements};
use ir::program::{InstrKind, Instruction};
use ir::{BufferId, OpKind};

/// Moves ops of every template of a role next to the products that feed them.
pub(crate) fn bring_together(role: &mut RoleDraft) {
    let n_reads = n_reads(role);
    for template in &mut role.templates {
        let instructions = &mut template.instructions;
        let mut made_at: Vec<(BufferId, usize)> = Vec::new();
        let mut i = 0;
        while i < instructions.len() {
            let from = follower(&instructions[i]).and_then(|value| {
                let &(_, at) = made_at.iter().rev().find(|(b, _)| *b == value)?;
                let is_only = n_reads[value.index()] == 1;
                let may = is_only && at + 1 < i && may_pass(&instructions[at + 1..=i]);
                may.then_some(at)
            });
            if let Some(at) = from {
                instructions[at + 1..=i].rotate_right(1);
                made_at
                    .iter_mut()
                    .filter(|m| m.1 > at)
                    .for_each(|m| m.1 += 1);
            } else if let Some(product) = product(&instructions[i]) {
                made_at.push((product, i));
            }
            i += 1;
        }
    }
}

/// How often each buffer is read by the instructions of all templates.
fn n_reads(role: &RoleDraft) -> Vec<u32> {
    let mut n_reads = vec![0u32; role.buffers.len()];
    for instruction in role.templates.iter().flat_map(|t| &t.instructions) {
        for b in instruction.reads() {
            n_reads[b.index()] += 1;
        }
    }
    n_reads
}

/// Moves functions of elements of every template of a role next to those that feed them. What moves up
/// uses up a tensor of the size of the one that it makes, and what moves down has one operand: neither
/// takes more memory.
pub(crate) fn gather(role: &mut RoleDraft) {
    let n_reads = n_reads(role);
    for template in &mut role.templates {
        let instructions = &mut template.instructions;
        for i in 0..instructions.len() {
            let Some((feeder, value)) = feeder(&instructions[..=i]) else {
                continue;
            };
            // Those behind the feeder that it is gone through with.
            let is_kin = |i: &&Instruction| of_elements(i).is_some();
            let kin = instructions[feeder + 1..i]
                .iter()
                .take_while(is_kin)
                .count();
            let at = feeder + 1 + kin;
            if at == i {
                continue;
            }
            if n_reads[value.index()] == 1 && may_pass(&instructions[at..=i]) {
                instructions[at..=i].rotate_right(1);
            } else if kin == 0 && may_sink(instructions, feeder, i) {
                instructions[feeder..i].rotate_left(1);
            }
        }
    }
}

/// Operands and result of a function of elements.
fn of_elements(instruction: &Instruction) -> Option<(&[BufferId], BufferId)> {
    let (kind, inputs, outputs) = computed(instruction)?;
    is_of_elements(kind).then_some((inputs, *outputs.first()?))
}

/// The last function of elements before the last of some instructions, which is one too, whose value
/// that one takes; and that value.
fn feeder(instructions: &[Instruction]) -> Option<(usize, BufferId)> {
    let (last, before) = instructions.split_last()?;
    let (inputs, _) = of_elements(last)?;
    let made = |i: &Instruction| {
        of_elements(i)
            .map(|(_, y)| y)
            .filter(|y| inputs.contains(y))
    };
    before
        .iter()
        .enumerate()
        .rev()
        .find_map(|(at, i)| Some((at, made(i)?)))
}

/// Whether an instruction may stand right before a later one: it has one operand, nothing between
/// touches what it makes or writes what it reads, and no product before it has it as its epilogue.
fn may_sink(instructions: &[Instruction], from: usize, to: usize) -> bool {
    let moved = &instructions[from];
    let Some((kind, [operand], _)) = computed(moved) else {
        return false;
    };
    let is_fed = from.checked_sub(1).is_some_and(|before| {
        let before = &instructions[before];
        let link = computed(before).and_then(|(kind, ..)| Link::first(kind));
        before.writes().contains(operand) && link.is_some_and(|l| l.then(kind, 0).is_some())
    });
    let writes = moved.writes();
    !is_fed
        && instructions[from + 1..to].iter().all(|other| {
            let mut touched = other.reads().into_iter().chain(other.writes());
            other.stream == moved.stream
                && !touched.any(|b| writes.contains(&b))
                && !other.writes().contains(operand)
        })
}

/// Operator, operands and results of an op.
pub(crate) fn computed(instruction: &Instruction) -> Option<(&OpKind, &[BufferId], &[BufferId])> {
    match &instruction.kind {
        InstrKind::Compute {
            kind,
            inputs,
            outputs,
            ..
        } => Some((kind, inputs, outputs)),
        _ => None,
    }
}

/// The result of a product.
fn product(instruction: &Instruction) -> Option<BufferId> {
    let (kind, _, outputs) = computed(instruction)?;
    let begins = Link::first(kind) == Some(Link::Product);
    outputs.first().copied().filter(|_| begins)
}

/// The operand with which an op goes on that ends a chain and is no sum: sums have several operands
/// that could be products, and stand behind the last of these already.
fn follower(instruction: &Instruction) -> Option<BufferId> {
    let (kind, inputs, _) = computed(instruction)?;
    let ends = |operand: &usize| Link::Product.then(kind, *operand) == Some(Link::End);
    (0..inputs.len()).find(ends).map(|operand| inputs[operand])
}

/// Whether the last of some instructions may stand before the others.
fn may_pass(instructions: &[Instruction]) -> bool {
    let Some((last, others)) = instructions.split_last() else {
        return false;
    };
    let (reads, writes) = (last.reads(), last.writes());
    others.iter().all(|other| {
        let is_kernel = other.stream == last.stream;
        let mut touched = other.reads().into_iter().chain(other.writes());
        is_kernel
            && !touched.any(|b| writes.contains(&b))
            && !other.writes().iter().any(|b| reads.contains(b))
    })
}
