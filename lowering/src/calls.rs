//! Which instructions a device may make one call of ([`Call`]).
//!
//! Three kinds of neighbours: [`chains`] that a product of matrices begins, [`elements`] that are gone
//! through once for several ops, and those that are [`joined`], as they do the same to many tensors. This is the last pass: it reads the bytes and
//! the waits that the program has by then, and changes neither. A mark holds for every slot that plays
//! the template, so bytes are those of all copies of a buffer.

mod chains;
mod elements;
mod joined;

use ir::program::{Call, Program, RoleProgram, Space, Template};
use ir::{BufferId, TemplateId};
use std::ops::Range;

/// Marks the calls of a role, which has its places and waits.
pub(crate) fn mark(role: &mut RoleProgram) {
    forget(role);
    let uses = chains::Uses::of(role);
    let mut lives = elements::Lives::of(role);
    let of_template = |(t, template): (usize, &Template)| {
        let mut calls = chains::chained(role, &uses, &template.instructions);
        elements::chain(&mut lives, TemplateId::new(t), &mut calls);
        joined::join(role, &template.instructions, &mut calls);
        calls
    };
    let all: Vec<Vec<Call>> = role.templates.iter().enumerate().map(of_template).collect();
    for (template, calls) in role.templates.iter_mut().zip(all) {
        for (instruction, call) in template.instructions.iter_mut().zip(calls) {
            instruction.call = call;
        }
    }
}

/// Gives every instruction of a role a call of its own.
pub(crate) fn forget(role: &mut RoleProgram) {
    let all = role.templates.iter_mut().flat_map(|t| &mut t.instructions);
    all.for_each(|i| i.call = Call::Own);
}

/// The program with a call for each instruction: what is priced or measured one by one, as by other
/// software.
pub fn without_calls(mut program: Program) -> Program {
    program.roles.iter_mut().for_each(forget);
    program
}

/// Bytes of a buffer, and of all its copies.
type Bytes = (Space, Range<u64>);

fn bytes(role: &RoleProgram, b: BufferId) -> Bytes {
    let b = role.buffer(b);
    let end = b.offset + u64::from(b.slots().saturating_sub(1)) * b.stride() + b.bytes;
    (b.space, b.offset..end)
}

/// Whether two buffers may lie on the same bytes in a slot. Those of a row have different copies.
fn meet(role: &RoleProgram, a: BufferId, b: BufferId) -> bool {
    let row = |b: BufferId| role.buffer(b).turns.as_ref().map(|t| t.row);
    let are_apart = a != b && row(a).is_some() && row(a) == row(b);
    let (x, y) = (bytes(role, a), bytes(role, b));
    !are_apart && x.0 == y.0 && x.1.start < y.1.end && y.1.start < x.1.end
}

#[cfg(test)]
mod tests;
