//! Where values come from that are no numbers.
//!
//! A norm of the gradient that is no number would make all parameters none. All ranks have the same
//! norm, so each gives the step up where it has computed it, before any state is written: they stop
//! at the same step, with the states of before. The step can then be played again, with a look at
//! everything that is written: the first tensor with such a value is where they come from. The same
//! is done where the update was made, as of a loss that is no number with a norm that is one; the
//! states are those after it then.
//!
//! The host of a device that works later does not wait for the norm. There the update itself keeps all
//! states where the norm is no number, as its coefficient is none then, and the host finds at the end
//! of the step that it was given up.
//!
//! Attention over parts of the keys has `-inf` for "none so far", so that alone is no sign.

use super::{RankState, Step, place, what};
use crate::device::Device;
use crate::error::RuntimeError;
use crate::execute::local::{is_computed, widen};
use crate::fabric::Fabric;
use ir::collective::CollectiveKind;
use ir::program::{InstrKind, Instruction, Program, RoleProgram};
use ir::{BufferId, OpKind, Rank, StreamId, TemplateId};
use serde::{Deserialize, Serialize};

/// The first value of a rank in a step that is no number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Found {
    /// Whether it was received, or made together with others.
    pub from_others: bool,
    /// Instructions that were played before.
    pub after: usize,
    /// The tensor, the value, and what wrote it.
    pub what: String,
}

/// The instruction that computes the norm of the gradient, in a program whose ranks write no state
/// before it.
pub(super) fn norm(program: &Program, role: usize) -> Option<(TemplateId, usize)> {
    let places: Option<Vec<_>> = program.roles.iter().map(norm_of).collect();
    places?.get(role).copied()
}

fn norm_of(role: &RoleProgram) -> Option<(TemplateId, usize)> {
    let norm = role.grad_norm?;
    let writes = |wanted: &dyn Fn(&BufferId) -> bool| {
        let templates = role.templates.iter().enumerate();
        let all = templates.flat_map(|(t, template)| {
            let instructions = template.instructions.iter().enumerate();
            instructions.map(move |(i, instruction)| ((t, i), instruction.writes()))
        });
        let of = all.filter(|(_, writes)| writes.iter().any(wanted));
        of.map(|(at, _)| at).collect::<Vec<_>>()
    };
    let at = *writes(&|b| *b == norm).last()?;
    let is_state = |b: &BufferId| role.states.iter().any(|s| s.buffer == *b);
    let is_after = |&(t, i): &(usize, usize)| t == at.0 && i > at.1;
    let templates = role.trace.iter().filter(|s| s.template.index() == at.0);
    let fits = writes(&is_state).iter().all(is_after) && templates.count() == 1;
    fits.then_some((TemplateId(at.0 as u32), at.1))
}

/// Whether a norm that is no number leaves all states of a program as they were, though its updates
/// are played: they come after the norm and take a coefficient that is made of it.
pub(super) fn keeps_states(program: &Program) -> bool {
    program.roles.iter().all(|role| {
        norm_of(role).is_some() && {
            let templates = role.templates.iter().flat_map(|t| &t.instructions);
            templates.clone().all(|i| is_kept_by(role, i))
        }
    })
}

/// Whether an instruction writes no state, or what it writes there is as it was when the gradient's
/// coefficient is no number.
fn is_kept_by(role: &RoleProgram, instruction: &Instruction) -> bool {
    let is_state = |b: &BufferId| role.states.iter().any(|s| s.buffer == *b);
    let no_state = !instruction.writes().iter().any(is_state);
    match &instruction.kind {
        InstrKind::Compute { kind, inputs, .. } => match kind {
            // In place, though perhaps in a copy of the state.
            OpKind::AdamW { .. } => is_coefficient(role, inputs.get(4)),
            OpKind::Sgd { .. } => is_coefficient(role, inputs.get(3)),
            // What a parameter is rounded or gathered from was kept.
            OpKind::Cast { .. } => true,
            _ => no_state,
        },
        InstrKind::Collective { kind, .. } => no_state || *kind == CollectiveKind::AllGather,
        InstrKind::Slice { .. } | InstrKind::Copy { .. } => true,
        _ => no_state,
    }
}

fn is_coefficient(role: &RoleProgram, buffer: Option<&BufferId>) -> bool {
    let is_clip = |i: &&Instruction| {
        matches!(
            i.kind,
            InstrKind::Compute {
                kind: OpKind::ClipCoefficient { .. },
                ..
            }
        )
    };
    let mut all = role.templates.iter().flat_map(|t| &t.instructions);
    buffer.is_some_and(|b| all.any(|i| is_clip(&i) && i.writes().contains(b)))
}

impl<D: Device, F: Fabric<D>> RankState<D, F> {
    /// Whether the norm of the gradient was just computed and is no number. With loss scaling the
    /// update takes care of that itself.
    pub(super) fn gives_up(
        &mut self,
        role: &RoleProgram,
        step: &Step,
    ) -> Result<bool, RuntimeError> {
        let is_here = self.norm == Some((step.template, step.instruction));
        let Some(norm) = role.grad_norm.filter(|_| is_here) else {
            return Ok(false);
        };
        // Reading waits for the stream, which may wait for ranks that do not come: the fabric knows
        // how long that may take.
        self.fabric.settle(&mut self.device)?;
        let bytes = self.device.read(step.stream, place(role, norm, None))?;
        let norm = bytes.first_chunk().map(|&b| f32::from_le_bytes(b));
        Ok(norm.is_some_and(|n| !n.is_finite()))
    }

    /// Looks at the states.
    pub(super) fn look_at_states(&self) -> Result<Option<Found>, RuntimeError> {
        let role = self.this();
        for s in &role.states {
            if let Some(value) = self.spoiled(role, s.buffer, (None, super::FIRST))? {
                let what = format!("state `{}` of {} has {value}", s.path, self.rank());
                return Ok(Some(Found {
                    from_others: false,
                    after: 0,
                    what,
                }));
            }
        }
        Ok(None)
    }

    /// Looks at what an instruction wrote, once it has.
    pub(super) fn look(
        &mut self,
        role: &RoleProgram,
        step: &Step,
        after: usize,
    ) -> Result<Option<Found>, RuntimeError> {
        let template = role.template(step.template);
        let instruction = &template.instructions[step.instruction];
        // Nothing comes of what memory is filled with.
        if matches!(instruction.kind, InstrKind::Fill { .. }) {
            return Ok(None);
        }
        // As with the norm, the fabric knows how long the stream may wait.
        self.fabric.settle(&mut self.device)?;
        for b in instruction.writes() {
            let at = (step.microbatch, step.stream);
            let Some(value) = self.spoiled(role, b, at)? else {
                continue;
            };
            let rank: Rank = self.rank();
            let of = step.microbatch.map(|m| format!(" of microbatch {m}"));
            return Ok(Some(Found {
                from_others: matches!(
                    instruction.kind,
                    InstrKind::Collective { .. }
                        | InstrKind::Exchange { .. }
                        | InstrKind::WorldSum { .. }
                ),
                after,
                what: format!(
                    "`{}` of {rank} ({}) has {value}, written by {:?} template {}, instruction {}{}, {}",
                    role.buffer(b).name,
                    role.stage,
                    template.kind,
                    step.template.0,
                    step.instruction,
                    of.unwrap_or_default(),
                    what(role, instruction)
                ),
            }));
        }
        Ok(None)
    }

    /// The first value of a buffer that is no number, after all that a stream has been given.
    fn spoiled(
        &self,
        role: &RoleProgram,
        buffer: BufferId,
        (microbatch, stream): (Option<u32>, StreamId),
    ) -> Result<Option<f32>, RuntimeError> {
        let dtype = role.buffer(buffer).dtype;
        if !dtype.is_float() || !is_computed(dtype) {
            return Ok(None);
        }
        let at = place(role, buffer, microbatch);
        let bytes = self.device.read(stream, at)?;
        let values = widen(dtype, &bytes);
        let is_none = |v: &&f32| v.is_nan() || **v == f32::INFINITY;
        Ok(values.iter().find(is_none).copied())
    }
}
