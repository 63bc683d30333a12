//! The strategy of every op of every distinct layer.

use super::parallelism::{Assigned, assignments};
use ir::op::{AxisUse, FactorRole};
use ir::plan::{Plan, relative_path};
use ir::training::TrainingGraph;
use ir::{LayerId, LogicalMesh};
use serde::Serialize;

/// The strategy of one op.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OpReport {
    /// The stage and the layers, in words.
    pub layers: String,
    /// The op's path, with the layer's name as `{}`.
    pub op: String,
    /// The pass.
    pub pass: String,
    /// The use of each axis in the op.
    pub uses: String,
    /// The specs of its results.
    pub results: String,
}

/// Lists the ops of the first layer of every run of layers.
pub fn strategies(plan: &Plan, training: &TrainingGraph) -> Vec<OpReport> {
    let mut rows = Vec::new();
    for (stage, s) in plan.stages.iter().enumerate() {
        for run in &s.runs {
            let name = training
                .graph
                .layers
                .get(run.first.index())
                .map_or("", String::as_str);
            let layers = format!(
                "stage {stage}: {}",
                layer_range(training, run.first, run.count)
            );
            for a in assignments(plan, training, run.strategy as usize, run.first) {
                rows.push(OpReport {
                    layers: layers.clone(),
                    op: relative_path(&a.op.path, name),
                    pass: format!("{:?}", a.op.pass),
                    uses: uses(&a, &s.mesh),
                    results: a
                        .specs
                        .results
                        .iter()
                        .map(|r| r.display(&s.mesh))
                        .collect::<Vec<_>>()
                        .join(" "),
                });
            }
        }
    }
    rows
}

/// Names a run of layers: `h.0`, or `h.0 to h.11`.
pub fn layer_range(training: &TrainingGraph, first: LayerId, count: u32) -> String {
    let name = |i: usize| {
        training
            .graph
            .layers
            .get(i)
            .cloned()
            .unwrap_or_else(|| i.to_string())
    };
    let start = name(first.index());
    if count <= 1 {
        start
    } else {
        format!("{start} to {}", name(first.index() + count as usize - 1))
    }
}

/// Describes the use of each axis in an op.
pub fn uses(a: &Assigned<'_>, mesh: &LogicalMesh) -> String {
    let one = |(i, u): (usize, &AxisUse)| {
        let axis = mesh.axes.get(i).map_or("?", |x| x.name.as_str());
        match u {
            AxisUse::Replicate => format!("{axis}: -"),
            AxisUse::Partial(_) => format!("{axis}: partial"),
            AxisUse::Factor(f) => match a.roles.get(f.index()) {
                Some(FactorRole::Batch) => format!("{axis}: batch"),
                Some(FactorRole::Sequence) => format!("{axis}: sequence"),
                Some(FactorRole::Expert) => format!("{axis}: expert"),
                _ => format!("{axis}: feature {f}"),
            },
        }
    };
    a.uses
        .iter()
        .enumerate()
        .map(one)
        .collect::<Vec<_>>()
        .join(", ")
}

/// Writes the strategies as a table.
pub fn table(rows: &[OpReport]) -> String {
    let line = |r: &OpReport| {
        vec![
            r.layers.clone(),
            r.op.clone(),
            r.pass.clone(),
            r.uses.clone(),
            r.results.clone(),
        ]
    };
    super::table(
        &["layers", "op", "pass", "axes", "results"],
        rows.iter().map(line).collect(),
        5,
    )
}
