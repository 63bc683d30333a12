//! Neighbours that go through the same elements.
//!
//! What is done element by element takes as long as its tensors take to move, so one kernel of several
//! ops reads and writes less: SwiGLU's forward part three tensors in place of five, its gradient six
//! in place of nine. A sum that a norm follows is one pass over its rows with the norm, and so is a
//! gradient of a norm's argument with the sum that it enters ([`ir::chain`] has which may follow
//! which).
//!
//! One kernel reads each element before it writes there, whatever the op. So a result may take the
//! bytes of what an op of elements reads, if these are all of one buffer's; other bytes are not both
//! read and written. A value is not written where all that read it are in the chain: its buffer is
//! written anew, or is nobody's, before anything else reads it.

use super::meet;
use crate::neighbours::computed;
use ir::chain::{Link, is_of_elements};
use ir::program::{BufferClass, Call, Instruction, RoleProgram};
use ir::{BufferId, OpKind, TemplateId};
use std::collections::BTreeMap;

/// When the buffers of a role are touched.
pub(super) struct Lives<'a> {
    role: &'a RoleProgram,
    /// By buffer, templates and places of the instructions that read or write it, in list order.
    touched: Vec<Vec<(TemplateId, usize)>>,
    /// By buffer and template: says whether nobody reads what the template leaves there.
    known: BTreeMap<(BufferId, TemplateId), bool>,
}

impl<'a> Lives<'a> {
    pub fn of(role: &'a RoleProgram) -> Self {
        let mut touched = vec![Vec::new(); role.buffers.len()];
        for (t, template) in role.templates.iter().enumerate() {
            for (i, instruction) in template.instructions.iter().enumerate() {
                let at = (TemplateId::new(t), i);
                for b in instruction.reads().iter().chain(&instruction.writes()) {
                    let of: &mut Vec<_> = &mut touched[b.index()];
                    if of.last() != Some(&at) {
                        of.push(at);
                    }
                }
            }
        }
        let known = BTreeMap::new();
        Lives {
            role,
            touched,
            known,
        }
    }

    fn reads(&self, (t, i): (TemplateId, usize), b: BufferId) -> bool {
        self.role.template(t).instructions[i].reads().contains(&b)
    }

    /// Whether nobody reads what a buffer holds behind the instruction at a place of a template.
    fn end(&mut self, b: BufferId, (t, at): (TemplateId, usize)) -> bool {
        let touched = &self.touched[b.index()];
        let next = touched.iter().find(|&&(u, i)| u == t && i > at);
        match (next, self.role.buffer(b).class) {
            (Some(&next), _) => !self.reads(next, b),
            (None, BufferClass::Transient) => true,
            (None, BufferClass::PerMicrobatch { .. }) => self.ends(b, t),
            (None, _) => false,
        }
    }

    /// Whether after each slot of a template the copy that it used is written before it is read.
    fn ends(&mut self, b: BufferId, t: TemplateId) -> bool {
        if let Some(&known) = self.known.get(&(b, t)) {
            return known;
        }
        // By template that touches the buffer, whether it reads it first.
        let mut reads_first: BTreeMap<TemplateId, bool> = BTreeMap::new();
        for &at in &self.touched[b.index()] {
            let reads = self.reads(at, b);
            reads_first.entry(at.0).or_insert(reads);
        }
        // The step that follows begins as this one.
        let mut left: BTreeMap<u32, bool> = BTreeMap::new();
        let trace = &self.role.trace;
        let mut ends = true;
        for slot in trace.iter().chain(trace) {
            let Some(reads) = reads_first.get(&slot.template) else {
                continue;
            };
            let copy = self.role.buffer(b).copy_for(slot.microbatch);
            let is_left = left.insert(copy, slot.template == t);
            ends = ends && !(is_left == Some(true) && *reads);
        }
        self.known.insert((b, t), ends);
        ends
    }
}

/// Whether each of these holds as many elements, of the same part of a tensor.
fn are_alike(role: &RoleProgram, mut all: impl Iterator<Item = BufferId>) -> bool {
    let of = |b: BufferId| {
        let b = role.buffer(b);
        (&b.lens, &b.spec, b.dtype.is_float(), b.pieces.is_none())
    };
    let Some(first) = all.next().map(of) else {
        return false;
    };
    first.2 && first.3 && all.all(|b| of(b) == first)
}

/// The tensors that an op goes through element by element: all of a function's, a norm's argument and
/// value, and of its gradient what is made.
fn elements<'a>(kind: &OpKind, inputs: &'a [BufferId], outputs: &'a [BufferId]) -> Vec<BufferId> {
    let operands = match is_of_elements(kind) {
        true => inputs,
        false => inputs.get(..1).unwrap_or_default(),
    };
    operands.iter().chain(outputs.first()).copied().collect()
}

/// Whether the values of these instructions, which are one call, are written though the call goes on;
/// none where they cannot be one call.
fn kept(
    lives: &mut Lives<'_>,
    (t, first): (TemplateId, usize),
    chain: &[Instruction],
) -> Option<Vec<bool>> {
    let role = lives.role;
    let all: Vec<_> = chain.iter().map(computed).collect::<Option<_>>()?;
    let mut link = Link::first(all[0].0).filter(|link| *link != Link::Product)?;
    let of_elements = all.iter().flat_map(|(k, x, y)| elements(k, x, y));
    if !are_alike(role, of_elements) {
        return None;
    }
    let mut read: Vec<(BufferId, bool)> = Vec::new();
    // By instruction, whether a later one takes its value.
    let mut is_taken = vec![false; all.len()];
    for (k, &(kind, inputs, outputs)) in all.iter().enumerate() {
        let mut goes_on = None;
        // Functions of elements go on with anything that the chain has; a norm, and a sum with its
        // gradient, with the value right before them, in one place.
        let is_free = link.is_of_elements() && is_of_elements(kind);
        let mut n_next = 0;
        for (operand, b) in inputs.iter().enumerate() {
            let maker = all[..k].iter().rposition(|(.., y)| y.contains(b));
            let is_known = read.iter().any(|r| r.0 == *b);
            let is_next = maker.is_some_and(|m| m + 1 == k);
            match maker {
                Some(m) => is_taken[m] = true,
                None => read.push((*b, is_of_elements(kind))),
            }
            n_next += u32::from(is_next);
            if is_next || is_free && (maker.is_some() || is_known) {
                goes_on = goes_on.or(link.then(kind, operand));
            }
        }
        if k > 0 && !is_free && n_next != 1 {
            return None;
        }
        if k > 0 {
            link = goes_on.filter(|_| link.has_room(k))?;
        }
        let is_last = k + 1 == all.len();
        if outputs.len() != 1 && !is_last {
            return None;
        }
    }
    let mut kept = vec![true; all.len()];
    let mut link = Link::first(all[0].0)?;
    for k in 0..all.len() - 1 {
        let b = all[k].2[0];
        let is_made_anew = all[k + 1..].iter().any(|(.., y)| y.contains(&b));
        let is_dead = is_made_anew || lives.end(b, (t, first + all.len() - 1));
        kept[k] = !(is_taken[k] && is_dead);
        if is_made_anew && !is_taken[k] || kept[k] && !link.may_be_kept(all[k + 1].0) {
            return None;
        }
        link = link.then(all[k + 1].0, 0).unwrap_or(Link::Elements);
    }
    let written = all.iter().zip(&kept).filter(|(_, kept)| **kept);
    let written: Vec<BufferId> = written.flat_map(|((.., y), _)| y.iter().copied()).collect();
    let clash = written.iter().enumerate().any(|(i, &w)| {
        let others = written[i + 1..].iter().any(|o| meet(role, w, *o));
        others || (read.iter()).any(|&(r, by_element)| !(by_element && r == w) && meet(role, r, w))
    });
    (!clash).then_some(kept)
}

/// Marks the chains of a template that no product begins, of the instructions that have no call yet.
pub(super) fn chain(lives: &mut Lives<'_>, t: TemplateId, calls: &mut [Call]) {
    let role = lives.role;
    let instructions = &role.template(t).instructions;
    let mut first = 0;
    while first < instructions.len() {
        let mut end = first + 1;
        let mut values: Vec<bool> = Vec::new();
        while end < instructions.len() && calls[first] == Call::Own && calls[end] == Call::Own {
            let next = &instructions[end];
            let is_free = next.deps.is_empty() && next.events.is_empty();
            if !is_free || next.stream != instructions[first].stream {
                break;
            }
            let Some(kept) = kept(lives, (t, first), &instructions[first..=end]) else {
                break;
            };
            values = kept;
            end += 1;
        }
        for (call, is_kept) in calls[first + 1..end].iter_mut().zip(values) {
            *call = Call::Chained { is_kept };
        }
        first = end;
    }
}
