//! JAX: a mesh, and a `NamedSharding` for every parameter, for states, for the batch and for the
//! results of forward ops.
//!
//! Specs are the plan's own, in Meshwright's layout of parameters (inputs first, heads in dims of
//! their own), so nothing is lost but what a `PartitionSpec` has no word for: values that await a
//! reduction, shards that go around a ring, dims that do not divide. Each stage has a mesh of its
//! own, so stages may be unlike each other; the order of their passes is left to the code.

use super::python::{layers, string, tuple};
use super::{Choices, Missing, Target, Written, origin};
use crate::layout::{Kind, Run};
use crate::summary::run_name;
use crate::{ExportError, File, Read};
use ir::plan::Plan;
use ir::{AxisId, LogicalMesh, Precision, ShardingSpec};
use std::collections::BTreeMap;
use std::fmt::Write;

const TARGET: Target = Target::Jax;

/// The text behind the data.
const CODE: &str = include_str!("jax_code.py");

pub(super) fn write(read: &Read<'_>) -> Result<Written, ExportError> {
    let (plan, summary) = (read.plan, &read.summary);
    let mut missing = Missing::default();
    let mut w = format!("# {}\n", origin(summary, TARGET));
    w += HEADER;
    meshes(plan, &mut w);
    let _ = writeln!(
        w,
        "GLOBAL_BATCH, SEQUENCE = {}, {}\nMICROBATCH, MICROBATCHES = {}, {}  # samples over a stage's mesh; of a step",
        summary.global_batch, summary.sequence, plan.microbatch, plan.n_microbatches
    );
    let _ = writeln!(w, "COMPUTE_DTYPE = {}", string(dtype(summary.precision)));
    let _ = writeln!(w, "SCHEDULE = {}\n", string(summary.schedule.name()));
    w += "# Runs of equal layers: stage, layers, parameters with shape, spec in use and spec at rest.\n";
    w += "RUNS = [\n";
    for run in &read.runs {
        parameters(plan, run, &mut w, &mut missing);
    }
    w += "]\n\n# Results of forward ops, by the first layer of each of these runs.\nACTIVATIONS = [\n";
    for run in &read.runs {
        activations(plan, run, &mut w);
    }
    w += "]\n\n# What the backward pass of a layer computes again.\nRECOMPUTE = {\n";
    for run in read.runs.iter().filter(|r| r.kind == Kind::Block) {
        for name in &run.names {
            let _ = writeln!(
                w,
                "    {}: {},",
                string(name),
                string(&run.recomputed.words())
            );
        }
    }
    w += "}\n";
    w += &batch(read);
    w += CODE;
    not_expressed(read, &mut missing);
    missing.add_optimizer(
        &read.summary,
        "applies it to these parameters, as optax has it",
    );
    Ok(Written {
        files: vec![File {
            name: "jax_plan.py",
            text: w,
        }],
        not_expressed: missing.list(),
        choices: Choices::of(summary),
    })
}

const HEADER: &str = "\"\"\"Meshes and shardings of a plan.

`parameters()` has every parameter by its path. A step casts what rests (`at_rest`) to
COMPUTE_DTYPE and lays it out for the microbatches (`in_use`), sums up gradients over them, and
updates where parameters rest; moments lie as their parameters do. `constrain(\"h.0.ln_1\", x)`
lays out the result of a forward op.
\"\"\"

import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

";

fn dtype(precision: Precision) -> &'static str {
    match precision {
        Precision::F32 => "float32",
        Precision::Bf16 => "bfloat16",
        Precision::F16 => "float16",
    }
}

/// The meshes of the stages: first device, names and sizes of axes.
fn meshes(plan: &Plan, w: &mut String) {
    *w +=
        "# The mesh of each stage: its first device, and its axes, slow links first.\nSTAGES = [\n";
    for stage in &plan.stages {
        let mesh = &stage.mesh;
        let axes = mesh.axes.iter();
        let axes = axes.map(|a| format!("({}, {})", string(&a.name), a.size));
        let _ = writeln!(
            w,
            "    ({}, {}),",
            mesh.devices.first_rank.0,
            tuple(&axes.collect::<Vec<_>>())
        );
    }
    *w += "]\n\n";
}

/// A spec as `PartitionSpec` has it, with the dims whose shards would not be equal.
fn spec(spec: &ShardingSpec, lens: Option<&[u64]>, mesh: &LogicalMesh) -> (String, Vec<usize>) {
    let mut uneven = Vec::new();
    let name = |a: &AxisId| string(mesh.name(*a));
    let mut dims: Vec<String> = Vec::new();
    for (i, d) in spec.dims.iter().enumerate() {
        let ranks: u64 = d.axes.iter().map(|a| mesh.size(*a)).product();
        let len = lens.and_then(|l| l.get(i)).copied();
        if len.is_some_and(|len| !len.is_multiple_of(ranks.saturating_mul(d.unit).max(1))) {
            uneven.push(i);
            dims.push("None".into());
            continue;
        }
        let axes: Vec<AxisId> = d
            .axes
            .iter()
            .copied()
            .filter(|a| mesh.size(*a) > 1)
            .collect();
        dims.push(match &axes[..] {
            [] => "None".into(),
            [one] => name(one),
            more => tuple(&more.iter().map(name).collect::<Vec<_>>()),
        });
    }
    while dims.last().is_some_and(|d| d == "None") {
        dims.pop();
    }
    (format!("P({})", dims.join(", ")), uneven)
}

fn parameters(plan: &Plan, run: &Run, w: &mut String, missing: &mut Missing) {
    let mesh = &plan.stages[run.stage].mesh;
    let _ = writeln!(w, "    ({}, {}, {{", run.stage, layers(&run.names));
    for p in &run.parameters {
        let shape: Vec<String> = p.shape.iter().map(u64::to_string).collect();
        let (in_use, uneven) = spec(&p.prepared, Some(&p.shape), mesh);
        let (at_rest, also) = spec(&p.at_rest, Some(&p.shape), mesh);
        for dim in uneven.into_iter().chain(also) {
            missing.add(
                format!("{} ({})", p.relative.replace("{}.", ""), run_name(run)),
                format!("dim {dim} of length {} is split unevenly", p.shape[dim]),
                "whole on every rank: JAX splits evenly",
            );
        }
        let _ = writeln!(
            w,
            "        {}: ({}, {in_use}, {at_rest}),",
            string(&p.relative),
            tuple(&shape)
        );
    }
    *w += "    }),\n";
}

fn activations(plan: &Plan, run: &Run, w: &mut String) {
    let mesh = &plan.stages[run.stage].mesh;
    let _ = writeln!(w, "    ({}, {{", layers(&run.names));
    for a in &run.activations {
        let (text, _) = spec(&a.spec, None, mesh);
        let _ = writeln!(w, "        {}: {text},", string(&a.relative));
    }
    *w += "    }),\n";
}

/// The spec of a microbatch's tokens and labels.
fn batch(read: &Read<'_>) -> String {
    let of = |path: &str| {
        let run = read.runs.iter().find_map(|r| {
            let a = r.activations.iter().find(|a| a.relative == path)?;
            Some((r, a))
        });
        run.map_or(("0".to_string(), "P()".to_string()), |(r, a)| {
            let mesh = &read.plan.stages[r.stage].mesh;
            (r.stage.to_string(), spec(&a.spec, None, mesh).0)
        })
    };
    let mut w = "\n# Tokens and labels of a microbatch: stage, spec.\nBATCH = {\n".to_string();
    for path in ["tokens", "labels"] {
        let (stage, spec) = of(path);
        let _ = writeln!(w, "    {}: ({stage}, {spec}),", string(path));
    }
    w + "}\n"
}

fn not_expressed(read: &Read<'_>, missing: &mut Missing) {
    let summary = &read.summary;
    if read.plan.stages.len() > 1 {
        missing.add(
            "the pipeline",
            format!(
                "{} stages in the order {}",
                read.plan.stages.len(),
                summary.schedule.name()
            ),
            "a mesh for each stage and the name of the schedule; the code orders the passes",
        );
    }
    let mut what: BTreeMap<&str, usize> = BTreeMap::new();
    for run in &read.runs {
        for a in &run.activations {
            if !a.spec.partial.is_empty() {
                *what.entry("awaits a reduction").or_default() += run.count as usize;
            }
            if a.spec.dims.iter().any(|d| d.turns > 0) {
                *what.entry("goes around a ring").or_default() += run.count as usize;
            }
        }
    }
    for (words, n) in what {
        missing.add(
            format!("{} of forward ops", ir::counted(n as u64, "result")),
            words,
            "whole along that axis in its spec; the compiler decides when it is reduced or moved",
        );
    }
    let rings = read
        .runs
        .iter()
        .any(|r| r.axes.iter().any(|a| a.attention.is_some_and(|a| a.1)));
    if rings {
        missing.add(
            "attention over context ranks",
            "keys and values go around a ring",
            "what the compiler makes of the specs: it gathers keys and values",
        );
    }
    if summary
        .recompute
        .iter()
        .any(|r| *r != crate::Recomputed::None)
    {
        missing.add(
            "recomputation",
            "of the ops under RECOMPUTE",
            "their names; the code wraps its blocks in jax.checkpoint with such a policy",
        );
    }
    for (class, space) in &summary.offload {
        missing.add(
            class.words(),
            format!("rest in another memory ({})", space.name()),
            "specs without a memory kind: NamedSharding takes memory_kind=\"pinned_host\"",
        );
    }
}
