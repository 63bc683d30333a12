//! The report of the referee: every violation with its place, what was expected and what is there.

use ir::program::{InstrKind, Program};
use ir::{InstrId, TemplateId};
use std::collections::BTreeSet;

/// A broken rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
#[error("{place}: {rule}: expected {expected}, found {actual}")]
pub struct Violation {
    /// The place: a key of the plan, or role, template, instruction and op path.
    pub place: String,
    /// Name of the rule.
    pub rule: &'static str,
    /// The value that the rule asks for here.
    pub expected: String,
    /// The value that is there.
    pub actual: String,
}

/// The most violations that are collected; a program with more of them needs no longer list.
const MAX_VIOLATIONS: usize = 1000;

/// Collects violations, each once.
#[derive(Default)]
pub(crate) struct Report {
    found: Vec<Violation>,
    seen: BTreeSet<Violation>,
}

impl Report {
    pub(crate) fn add(
        &mut self,
        place: impl Into<String>,
        rule: &'static str,
        expected: impl Into<String>,
        actual: impl Into<String>,
    ) {
        let violation = Violation {
            place: place.into(),
            rule,
            expected: expected.into(),
            actual: actual.into(),
        };
        if self.found.len() < MAX_VIOLATIONS && self.seen.insert(violation.clone()) {
            self.found.push(violation);
        }
    }
    /// Adds what another report has.
    pub(crate) fn append(&mut self, other: Report) {
        for v in other.found {
            self.add(v.place, v.rule, v.expected, v.actual);
        }
    }
    pub(crate) fn is_empty(&self) -> bool {
        self.found.is_empty()
    }
    pub(crate) fn finish(self) -> Vec<Violation> {
        self.found
    }
}

/// Names a role: `stage 1`.
pub(crate) fn role_place(role: usize) -> String {
    format!("stage {role}")
}

/// Names a buffer: `stage 1 buffer 4 (h.0.out)`.
pub(crate) fn buffer_place(program: &Program, role: usize, buffer: usize) -> String {
    let name = program
        .roles
        .get(role)
        .and_then(|r| r.buffers.get(buffer))
        .map_or("?", |b| b.name.as_str());
    format!("stage {role} buffer {buffer} ({name})")
}

/// Names an instruction: `stage 1 template 2 (forward) instruction 14 (h.0.attn.qkv)`.
pub(crate) fn instr_place(
    program: &Program,
    role: usize,
    template: TemplateId,
    instr: InstrId,
) -> String {
    let Some(t) = program
        .roles
        .get(role)
        .and_then(|r| r.templates.get(template.index()))
    else {
        return format!("stage {role} template {}", template.0);
    };
    let what = t
        .instructions
        .get(instr.index())
        .map_or("?", |i| instr_name(&i.kind));
    format!(
        "stage {role} template {} ({}) instruction {} ({what})",
        template.0,
        t.kind.name(),
        instr.0
    )
}

/// Names a slot: `stage 1 slot 7 (backward of microbatch 3)`.
pub(crate) fn slot_place(program: &Program, role: usize, slot: usize) -> String {
    let Some((r, s)) = program
        .roles
        .get(role)
        .and_then(|r| r.trace.get(slot).map(|s| (r, s)))
    else {
        return format!("stage {role} slot {slot}");
    };
    let name = r
        .templates
        .get(s.template.index())
        .map_or("?", |t| t.kind.name());
    match s.microbatch {
        Some(m) => format!("stage {role} slot {slot} ({name} of microbatch {m})"),
        None => format!("stage {role} slot {slot} ({name})"),
    }
}

fn instr_name(kind: &InstrKind) -> &str {
    match kind {
        InstrKind::Compute { path, .. } => path,
        InstrKind::Collective { kind, .. } => kind.name(),
        InstrKind::Slice { .. } => "slice",
        InstrKind::Exchange { .. } => "exchange",
        InstrKind::WorldSum { .. } => "world_sum",
        InstrKind::Load { .. } => "load",
        InstrKind::Fill { .. } => "fill",
        InstrKind::Copy { .. } => "copy",
    }
}
