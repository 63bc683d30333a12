//! All-reduces that overwrite their operand.
//!
//! When a partial tensor is read by nothing but one all-reduce, its result takes the
//! operand's buffer: a gradient is not held twice. Not so when the reduction would run more
//! often than the tensor is made (it would add up again), or when its result belongs into a
//! state's buffer.

use crate::draft::{Lifetime, RoleDraft, buffers_mut};
use ir::BufferId;
use ir::collective::CollectiveKind;
use ir::program::{BufferIds, InstrKind, TemplateKind};

pub(crate) fn merge_all_reduces(role: &mut RoleDraft) {
    let facts = facts(role);
    // For every buffer the one that it is merged into, by construction an earlier one.
    let mut into: Vec<BufferId> = (0..role.buffers.len()).map(BufferId::new).collect();
    for template in &role.templates {
        for instruction in &template.instructions {
            let InstrKind::Collective {
                kind: CollectiveKind::AllReduce(_),
                items,
                ..
            } = &instruction.kind
            else {
                continue;
            };
            for item in items {
                let (from, to) = (
                    &role.buffers[item.input.index()],
                    &role.buffers[item.output.index()],
                );
                let fact = &facts[item.input.index()];
                let as_often = match from.lifetime {
                    Lifetime::Accumulator => template.kind == TemplateKind::StepEnd,
                    Lifetime::ByUse => fact.n_writes == 1 && fact.phase == phase(template.kind),
                    Lifetime::Kept | Lifetime::Persistent => false,
                };
                if as_often && fact.n_readers == 1 && to.lifetime != Lifetime::Persistent {
                    into[item.output.index()] = into[item.input.index()];
                }
            }
        }
    }
    apply(role, &into);
}

/// How a buffer is used.
#[derive(Clone, Default)]
struct Facts {
    n_readers: usize,
    n_writes: usize,
    /// Where it was last written.
    phase: Option<Phase>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Begin,
    Microbatch,
    End,
}

fn phase(kind: TemplateKind) -> Option<Phase> {
    match kind {
        TemplateKind::StepBegin => Some(Phase::Begin),
        TemplateKind::StepEnd => Some(Phase::End),
        _ => kind.pass().map(|_| Phase::Microbatch),
    }
}

fn facts(role: &RoleDraft) -> Vec<Facts> {
    let mut facts = vec![Facts::default(); role.buffers.len()];
    for template in &role.templates {
        for instruction in &template.instructions {
            let mut reads = match &instruction.kind {
                // An accumulation's reading of its own buffer is part of making it.
                InstrKind::Compute { inputs, .. } => BufferIds::from_slice(inputs),
                _ => instruction.reads(),
            };
            reads.sort_unstable();
            reads.dedup();
            for b in reads {
                facts[b.index()].n_readers += 1;
            }
            for b in instruction.writes() {
                facts[b.index()].n_writes += 1;
                facts[b.index()].phase = phase(template.kind);
            }
        }
    }
    facts
}

/// Gives every instruction the buffers that those it names are merged into.
pub(crate) fn apply(role: &mut RoleDraft, into: &[BufferId]) {
    for (i, &target) in into.iter().enumerate().filter(|(i, t)| t.index() != *i) {
        // The merged buffer is used no more; what was to be kept is now in the other.
        let lifetime = std::mem::replace(&mut role.buffers[i].lifetime, Lifetime::ByUse);
        if role.buffers[target.index()].lifetime == Lifetime::ByUse {
            role.buffers[target.index()].lifetime = lifetime;
        }
    }
    for instruction in role.templates.iter_mut().flat_map(|t| &mut t.instructions) {
        buffers_mut(&mut instruction.kind, &mut |b| *b = into[b.index()]);
    }
    for b in role.loss.iter_mut().chain(&mut role.grad_norm) {
        *b = into[b.index()];
    }
}
