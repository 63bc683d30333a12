//! Ops right behind the product that feeds them.
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

use crate::draft::RoleDraft;
use ir::chain::Link;
use ir::program::{InstrKind, Instruction};
use ir::{BufferId, OpKind};

/// Moves ops of every template of a role next to the products that feed them.
pub(crate) fn bring_together(role: &mut RoleDraft) {
    let mut n_reads = vec![0u32; role.buffers.len()];
    for instruction in role.templates.iter().flat_map(|t| &t.instructions) {
        for b in instruction.reads() {
            n_reads[b.index()] += 1;
        }
    }
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

fn computed(instruction: &Instruction) -> Option<(&OpKind, &[BufferId], &[BufferId])> {
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
    Link::first(kind).and(outputs.first().copied())
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
