//! Results that take the buffer of an operand that dies where they are made.
//!
//! An op that works element for element ([`may_overwrite`](ir::OpKind::may_overwrite)) needs no
//! second buffer where it is the last to read an operand of its result's type and layout:
//!
//! ```text
//! apart      logits  F[----------]B              in place   logits  F[----------------]B
//!            dlogits             B[----]B                           cross_entropy_grad ^
//! ```
//! Here the operand was kept from one pass to another, in as many copies as microbatches are in
//! flight, and so is the result then: it lies in the copy that its microbatch has. As both were one
//! before and behind that op, this needs no more copies than both needed.
//!
//! The op is the operand's last use in list order and in every other one. In its own template only
//! its own stream reads the operand, so that it waits for nobody; and slots follow each
//! other but for exchanges, whose buffers are left alone.

use crate::draft::{DraftBuffer, Lifetime, RoleDraft, buffers_mut};
use crate::in_place::apply;
use crate::place::SlotCounts;
use crate::turns::touched_by;
use ir::chain::Link;
use ir::program::{BufferClass, InstrKind, Instruction, RoleProgram, Slot, Space, TemplateKind};
use ir::{BufferId, OpKind, StreamId, TemplateId};
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};

/// Merges the buffers of results with those of operands that die where they are made.
pub(crate) fn overwrite_operands(role: &mut RoleDraft) {
    let uses = uses(role);
    let mut order = Order::new(&role.trace);
    // For every buffer the one that it is merged into, which has no other one.
    let mut into: Vec<BufferId> = (0..role.buffers.len()).map(BufferId::new).collect();
    let mut is_taken = vec![false; role.buffers.len()];
    for (t, template) in role.templates.iter().enumerate() {
        for (i, instruction) in template.instructions.iter().enumerate() {
            let at = (TemplateId::new(t), i);
            let InstrKind::Compute {
                kind,
                inputs,
                outputs,
                ..
            } = &instruction.kind
            else {
                continue;
            };
            for &result in outputs.iter().filter(|r| !inputs.contains(r)) {
                let made = &uses[result.index()];
                let begins = made.first == Some(at) && made.may_merge(role, result, &mut order);
                if !begins {
                    continue;
                }
                let dies = |&(o, b): &(usize, &BufferId)| {
                    let used = &uses[b.index()];
                    kind.may_overwrite(o)
                        && used.last == Some(at)
                        && !is_taken[b.index()]
                        && inputs.iter().filter(|other| *other == b).count() == 1
                        && used.readers.iter().all(|s| *s == instruction.stream)
                        && are_alike(&role.buffers[b.index()], &role.buffers[result.index()])
                        && used.may_merge(role, *b, &mut order)
                };
                let dying: Vec<BufferId> = (inputs.iter().enumerate().filter(dies))
                    .map(|(_, b)| *b)
                    .collect();
                // What is kept for others anyway has bytes for the result too.
                let lasts = |b: &BufferId| uses[b.index()].templates.len();
                // What the product before it makes and it goes on with is never in memory then.
                let before = i.checked_sub(1).map(|b| &template.instructions[b]);
                let follows = |b: &&BufferId| {
                    let operand = inputs.iter().position(|other| other == *b);
                    before.is_some_and(|p| follows(p, kind, **b, operand))
                };
                let chained = dying.iter().find(follows);
                let operand = match made.templates.len() {
                    _ if chained.is_some() => chained,
                    1 => dying.iter().rev().max_by_key(|b| lasts(b)),
                    _ => dying.iter().min_by_key(|b| lasts(b)),
                };
                if let Some(&operand) = operand {
                    is_taken[operand.index()] = true;
                    into[result.index()] = operand;
                }
            }
        }
    }
    for b in 0..into.len() {
        while into[into[b].index()] != into[b] {
            into[b] = into[into[b].index()];
        }
    }
    apply(role, &into);
}

/// Whether an op ends a chain that a product begins, whose result is that operand.
fn follows(product: &Instruction, kind: &OpKind, b: BufferId, operand: Option<usize>) -> bool {
    let InstrKind::Compute {
        kind: first,
        outputs,
        ..
    } = &product.kind
    else {
        return false;
    };
    let ends = |operand| Link::Product.then(kind, operand) == Some(Link::End);
    Link::first(first) == Some(Link::Product)
        && outputs.as_slice() == [b]
        && operand.is_some_and(ends)
}

/// Whether one buffer can hold both tensors.
fn are_alike(a: &DraftBuffer, b: &DraftBuffer) -> bool {
    (a.dtype, &a.lens, &a.spec) == (b.dtype, &b.lens, &b.spec)
}

/// How the instructions of a role use a buffer. Templates are in the order in which a microbatch goes
/// through them, so the first use is the first in list order.
#[derive(Clone, Default)]
struct Uses {
    /// Ascending.
    templates: SmallVec<[TemplateId; 4]>,
    first: Option<(TemplateId, usize)>,
    last: Option<(TemplateId, usize)>,
    /// Streams of the instructions of the last template that only read it.
    readers: SmallVec<[StreamId; 2]>,
    /// Whether all templates are passes, or there is a single one that is no exchange.
    is_of_passes: bool,
}

impl Uses {
    /// Whether the buffer lives from its first use to its last one, in each microbatch alike.
    fn may_merge(&self, role: &RoleDraft, b: BufferId, order: &mut Order<'_>) -> bool {
        let buffer = &role.buffers[b.index()];
        buffer.lifetime == Lifetime::ByUse
            && buffer.space == Space::Device
            && buffer.pieces.is_none()
            && self.is_of_passes
            && (self.templates.windows(2)).all(|pair| order.follow(pair[0], pair[1]))
    }
}

fn uses(role: &RoleDraft) -> Vec<Uses> {
    let mut uses = vec![Uses::default(); role.buffers.len()];
    for (t, template) in role.templates.iter().enumerate() {
        let t = TemplateId::new(t);
        for (i, instruction) in template.instructions.iter().enumerate() {
            let (reads, writes) = (instruction.reads(), instruction.writes());
            for b in reads.iter().chain(&writes) {
                let used = &mut uses[b.index()];
                used.first.get_or_insert((t, i));
                used.last = Some((t, i));
                if used.templates.last() != Some(&t) {
                    used.templates.push(t);
                    used.readers.clear();
                }
                if !writes.contains(b) && !used.readers.contains(&instruction.stream) {
                    used.readers.push(instruction.stream);
                }
            }
        }
    }
    for used in &mut uses {
        let is_pass = |t: &TemplateId| role.templates[t.index()].kind.pass().is_some();
        let kind = |t: &TemplateId| role.templates[t.index()].kind;
        used.is_of_passes = match used.templates.as_slice() {
            [only] => kind(only) != TemplateKind::Exchange,
            several => several.iter().all(is_pass),
        };
    }
    uses
}

/// Which templates follow each other in every microbatch.
struct Order<'a> {
    trace: &'a [Slot],
    known: BTreeMap<(TemplateId, TemplateId), bool>,
}

impl<'a> Order<'a> {
    fn new(trace: &'a [Slot]) -> Self {
        Order {
            trace,
            known: BTreeMap::new(),
        }
    }

    /// Whether each microbatch plays one template and then the other.
    fn follow(&mut self, first: TemplateId, second: TemplateId) -> bool {
        let trace = self.trace;
        *self.known.entry((first, second)).or_insert_with(|| {
            let slots = |of: TemplateId| -> BTreeMap<Option<u32>, usize> {
                let of = trace.iter().enumerate().filter(|(_, s)| s.template == of);
                of.map(|(at, s)| (s.microbatch, at)).collect()
            };
            let (first, second) = (slots(first), slots(second));
            first.len() == second.len()
                && first
                    .iter()
                    .all(|(m, at)| second.get(m).is_some_and(|s| at < s))
        })
    }
}

/// Gives every result of a role a buffer of its own again. Places are to be found anew.
pub(crate) fn write_apart(role: &mut RoleProgram) {
    let n_merged = role.buffers.len();
    // By buffer, the one that holds now what it holds in the program as it was.
    let mut now: Vec<BufferId> = (0..n_merged).map(BufferId::new).collect();
    let mut parted: BTreeSet<BufferId> = BTreeSet::new();
    for instruction in role.templates.iter_mut().flat_map(|t| &mut t.instructions) {
        if let InstrKind::Compute {
            path,
            kind,
            inputs,
            outputs,
        } = &mut instruction.kind
            && kind.in_place().is_empty()
        {
            let over = outputs.iter().copied().filter(|b| inputs.contains(b));
            let over: SmallVec<[BufferId; 2]> = over.collect();
            inputs.iter_mut().for_each(|b| *b = now[b.index()]);
            for b in over {
                let mut own = role.buffers[b.index()].clone();
                own.name.clone_from(path);
                role.buffers.push(own);
                parted.insert(now[b.index()]);
                now[b.index()] = BufferId::new(role.buffers.len() - 1);
                parted.insert(now[b.index()]);
            }
            outputs.iter_mut().for_each(|b| *b = now[b.index()]);
        } else {
            buffers_mut(&mut instruction.kind, &mut |b| *b = now[b.index()]);
        }
    }
    let touched = touched_by(role);
    let mut counts = SlotCounts::new(&role.trace);
    for b in parted {
        role.buffers[b.index()].class = match touched[b.index()].as_slice() {
            [_] => BufferClass::Transient,
            several => BufferClass::PerMicrobatch {
                slots: counts.count(several),
            },
        };
    }
}
