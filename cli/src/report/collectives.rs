//! The communication of a program in one step: collectives and transfers by stage, with bytes.

use ir::program::{InstrKind, Program, RoleProgram, TemplateKind};
use ir::{Bytes, LogicalMesh};
use serde::Serialize;
use std::collections::BTreeMap;

/// Communication of one kind in one stage.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Traffic {
    /// The stage; where stages are interleaved, the first one of the mesh.
    pub stage: usize,
    /// All stages of the mesh, in words.
    #[serde(skip)]
    stages: String,
    /// The kind: `all_reduce`, ..., `send`, `receive`, `world_sum`.
    pub kind: String,
    /// The names of the axes of its groups; for transfers the other stage.
    pub over: String,
    /// The ranks of a group.
    pub ranks: u64,
    /// The part of the step.
    pub part: String,
    /// The number of executions per step.
    pub count: u64,
    /// The bytes per step and rank, as `ir::collective` counts them.
    pub bytes: Bytes,
}

type Key = (usize, &'static str, String, u64, &'static str);

/// Lists all communication of a program, by stage, kind and axes.
pub fn traffic(program: &Program) -> Vec<Traffic> {
    let mut sums: BTreeMap<Key, (u64, u64)> = BTreeMap::new();
    for (stage, role) in program.roles.iter().enumerate() {
        let plays = plays(role);
        for (template, &n) in role.templates.iter().zip(&plays) {
            let part = part_name(template.kind);
            for instruction in &template.instructions {
                for (kind, over, ranks, bytes) in communicates(program, role, &instruction.kind) {
                    let sum = sums.entry((stage, kind, over, ranks, part)).or_default();
                    sum.0 += n;
                    sum.1 = sum.1.saturating_add(bytes.saturating_mul(n));
                }
            }
        }
    }
    let stages = |stage: usize| {
        let chunks = 0..program.roles[stage].n_chunks();
        let stages = chunks.map(|c| program.stage_of(stage, c).index().to_string());
        stages.collect::<Vec<_>>().join("+")
    };
    let row = |((stage, kind, over, ranks, part), (count, bytes)): (Key, (u64, u64))| Traffic {
        stage,
        stages: stages(stage),
        kind: kind.into(),
        over,
        ranks,
        part: part.into(),
        count,
        bytes: Bytes(bytes),
    };
    sums.into_iter().map(row).collect()
}

/// Counts how often each template is played in a step.
fn plays(role: &RoleProgram) -> Vec<u64> {
    let mut plays = vec![0; role.templates.len()];
    role.trace
        .iter()
        .for_each(|slot| plays[slot.template.index()] += 1);
    plays
}

fn communicates(
    program: &Program,
    role: &RoleProgram,
    kind: &InstrKind,
) -> Vec<(&'static str, String, u64, u64)> {
    let bytes = |b: &ir::BufferId| role.buffer(*b).bytes;
    match kind {
        InstrKind::Collective {
            kind, axes, items, ..
        } => {
            let total = items
                .iter()
                .map(|i| bytes(&i.input).max(bytes(&i.output)))
                .fold(0, u64::saturating_add);
            vec![(
                kind.name(),
                axis_names(&role.mesh, axes),
                axes.iter().map(|a| role.mesh.size(*a)).product(),
                total,
            )]
        }
        InstrKind::Exchange { sends, recvs } => {
            let to = |t: &ir::TransferId| format!("to stage {}", program.transfers[t.index()].to.0);
            let from =
                |t: &ir::TransferId| format!("from stage {}", program.transfers[t.index()].from.0);
            let sends = sends.iter().map(|(t, b)| ("send", to(t), 2, bytes(b)));
            sends
                .chain(recvs.iter().map(|(t, b)| ("receive", from(t), 2, bytes(b))))
                .collect()
        }
        InstrKind::WorldSum { output, .. } => {
            let ranks = program
                .roles
                .iter()
                .map(|r| u64::from(r.mesh.n_devices()))
                .sum();
            vec![("world_sum", "all ranks".into(), ranks, bytes(output))]
        }
        _ => Vec::new(),
    }
}

fn axis_names(mesh: &LogicalMesh, axes: &[ir::AxisId]) -> String {
    axes.iter()
        .map(|a| mesh.name(*a))
        .collect::<Vec<_>>()
        .join("+")
}

fn part_name(kind: TemplateKind) -> &'static str {
    match kind {
        TemplateKind::StepBegin => "step begin",
        TemplateKind::Forward => "forward",
        TemplateKind::Recompute => "recompute",
        TemplateKind::InputGradient => "input gradient",
        TemplateKind::WeightGradient => "weight gradient",
        TemplateKind::Backward => "backward",
        TemplateKind::Exchange => "between stages",
        TemplateKind::StepEnd => "step end",
    }
}

/// Writes the traffic as a table.
pub fn table(rows: &[Traffic]) -> String {
    let line = |t: &Traffic| {
        vec![
            t.stages.clone(),
            t.kind.clone(),
            t.over.clone(),
            t.part.clone(),
            t.ranks.to_string(),
            t.count.to_string(),
            t.bytes.to_string(),
        ]
    };
    super::table(
        &[
            "stage",
            "what",
            "over",
            "in",
            "ranks",
            "per step",
            "bytes per step and rank",
        ],
        rows.iter().map(line).collect(),
        4,
    )
}
