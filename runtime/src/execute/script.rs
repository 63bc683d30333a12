//! The slots that a rank plays: the whole trace, or the part that a validation loss needs.
//!
//! Validation plays `StepBegin`, the forward templates, and the exchanges between them that
//! serve the forward pass; then, of the instructions after the microbatches, those
//! that the loss depends on. The filter depends on the program alone, so all ranks agree on
//! it, and nothing that it plays writes a persistent buffer.

use crate::error::RuntimeError;
use ir::program::{BufferClass, InstrKind, Program, RoleProgram, TemplateKind};
use ir::{BufferId, Pass, TemplateId};
use std::collections::BTreeSet;
use std::sync::Arc;

/// A slot and the instructions of its template that are played.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ScriptSlot {
    pub template: TemplateId,
    pub microbatch: Option<u32>,
    pub instructions: Vec<usize>,
}

/// The two scripts of a role.
#[derive(Clone, Debug)]
pub(crate) struct Scripts {
    training: Arc<Vec<ScriptSlot>>,
    validation: Arc<Vec<ScriptSlot>>,
}

impl Scripts {
    /// Fails when the loss needs more than the role's own instructions after the microbatches.
    pub fn new(program: &Program, role: usize) -> Result<Self, RuntimeError> {
        let role = &program.roles[role];
        let all = |t: TemplateId| (0..role.template(t).instructions.len()).collect();
        let training = role
            .trace
            .iter()
            .map(|s| ScriptSlot {
                template: s.template,
                microbatch: s.microbatch,
                instructions: all(s.template),
            })
            .collect();
        Ok(Scripts {
            training: Arc::new(training),
            validation: Arc::new(validation(role)?),
        })
    }
    /// One training step.
    pub fn training(&self) -> Arc<Vec<ScriptSlot>> {
        Arc::clone(&self.training)
    }
    /// The loss alone.
    pub fn validation(&self) -> Arc<Vec<ScriptSlot>> {
        Arc::clone(&self.validation)
    }
}

fn validation(role: &RoleProgram) -> Result<Vec<ScriptSlot>, RuntimeError> {
    let kind = |i: usize| role.template(role.trace[i].template).kind;
    let is_microbatch = |i: usize| role.trace[i].microbatch.is_some();
    let first = (0..role.trace.len())
        .find(|&i| is_microbatch(i))
        .unwrap_or(role.trace.len());
    let last = (0..role.trace.len())
        .rev()
        .find(|&i| is_microbatch(i))
        .map_or(first, |i| i + 1);
    let mut slots = Vec::new();
    for (i, s) in role.trace.iter().enumerate().take(last) {
        let template = role.template(s.template);
        let forward = || template.instructions.iter().all(|i| i.pass == Pass::F);
        let played = match kind(i) {
            TemplateKind::StepBegin | TemplateKind::Forward => true,
            TemplateKind::Exchange => i < first || forward(),
            _ => false,
        };
        if played {
            slots.push(ScriptSlot {
                template: s.template,
                microbatch: s.microbatch,
                instructions: (0..template.instructions.len()).collect(),
            });
        }
    }
    let mut tail = Vec::new();
    let mut needed: BTreeSet<BufferId> = role.loss.into_iter().collect();
    for s in role.trace[last..].iter().rev() {
        let template = role.template(s.template);
        let mut instructions = Vec::new();
        for (i, instruction) in template.instructions.iter().enumerate().rev() {
            if !instruction.writes().iter().any(|b| needed.contains(b)) {
                continue;
            }
            let foreign = matches!(
                instruction.kind,
                InstrKind::Exchange { .. } | InstrKind::WorldSum { .. }
            );
            let persistent = instruction
                .writes()
                .iter()
                .any(|&b| role.buffer(b).class == BufferClass::Persistent);
            if foreign || persistent {
                return Err(RuntimeError::Program(format!(
                    "the loss of {} depends on instruction {i} of template {}, which validation cannot play",
                    role.stage, s.template.0
                )));
            }
            needed.extend(instruction.reads());
            instructions.push(i);
        }
        instructions.reverse();
        if !instructions.is_empty() {
            tail.push(ScriptSlot {
                template: s.template,
                microbatch: s.microbatch,
                instructions,
            });
        }
    }
    slots.extend(tail.into_iter().rev());
    Ok(slots)
}
