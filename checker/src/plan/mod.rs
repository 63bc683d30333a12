//! Checks that a plan is one: every key, index and path in it fits the graph that it embeds.

mod paths;
mod recompute;

use crate::report::{Report, Violation};
use ir::plan::{PASSES_VERSION, PLAN_VERSION, Plan};
use ir::training::TrainingGraph;
use ir::{Figure, Graph, LogicalMesh};
use std::collections::BTreeSet;

/// Lists everything that is wrong with a plan; when the list is empty the plan can be lowered.
///
/// Checks versions, figures, batch sizes, the graph, that stages cover layers and meshes the
/// cluster without overlap (interleaved stages share theirs as their schedule says), that
/// recomputed ops repeat their sources, that every op has a strategy its rule allows, and that
/// every recorded layout change leads from the spec before it to the spec after it. Never panics.
pub fn check_plan(plan: &Plan) -> Vec<Violation> {
    let mut report = Report::default();
    versions(plan, &mut report);
    figures(plan, &mut report);
    batch(plan, &mut report);
    let meshes = meshes(plan, &mut report);
    if meshes
        && plan.train.problems().is_empty()
        && let Some(training) = training(plan, &mut report)
        && let Some(layers) = layers(plan, &training.graph, &mut report)
    {
        recompute::check(plan, &training, &layers, &mut report);
        paths::check(plan, &training, layers, &mut report);
    }
    report.finish()
}

fn versions(plan: &Plan, report: &mut Report) {
    for (key, found, expected) in [
        ("version", plan.version, PLAN_VERSION),
        ("passes", plan.passes, PASSES_VERSION),
    ] {
        if found != expected {
            report.add(key, "version", expected.to_string(), found.to_string());
        }
    }
}

/// The largest figure that may be predicted, so that sums and products of figures stay finite.
/// Every cluster whose figures are in range leads to less.
const MOST: f64 = 1e100;

fn figures(plan: &Plan, report: &mut Report) {
    for p in plan.cluster.problems() {
        report.add("cluster", "cluster", "figures in range", p);
    }
    for p in plan.train.problems() {
        report.add("train", "train", "figures in range", p);
    }
    if let Some(share) = plan.headroom.filter(|h| !(0.0..1.0).contains(h)) {
        let found = Figure(share).to_string();
        report.add("headroom", "a share", "0 to below 1", found);
    }
    let p = &plan.predicted;
    let mut numbers = vec![
        ("predicted.step_time_s".to_string(), p.step_time_s.0),
        ("predicted.tokens_per_s".into(), p.tokens_per_s),
        ("predicted.mfu".into(), p.mfu),
        ("predicted.hfu".into(), p.hfu),
        ("predicted.bubble".into(), p.bubble),
    ];
    for (key, figures) in proofs(plan) {
        let names = ["objective_s", "lower_bound_s", "gap"];
        let named = names.iter().zip(figures);
        numbers.extend(named.map(|(name, x)| (format!("{key}.{name}"), x)));
    }
    if let Some(least) = plan.proof.least_objective_s {
        numbers.push(("proof.least_objective_s".into(), least.0));
    }
    if let Some(simpler) = &plan.proof.simpler {
        numbers.push(("proof.simpler.tolerance".into(), simpler.tolerance));
        numbers.push(("proof.simpler.fastest_s".into(), simpler.fastest_s.0));
    }
    for (i, s) in p.stages.iter().enumerate() {
        for (key, x) in [
            ("forward_s", s.forward_s),
            ("backward_s", s.backward_s),
            ("step_s", s.step_s),
            ("compute_s", s.compute_s),
            ("collective_s", s.collective_s),
            ("transfer_s", s.transfer_s),
        ] {
            numbers.push((format!("predicted.stages[{i}].{key}"), x.0));
        }
    }
    let mut are_numbers = true;
    for (key, x) in numbers {
        if !(0.0..=MOST).contains(&x) {
            report.add(
                key,
                "finite",
                format!("0 to {MOST:e}"),
                Figure(x).to_string(),
            );
            are_numbers = false;
        }
    }
    if are_numbers {
        agreement(plan, report);
    }
}

/// Figures that differ by a smaller share agree: a plan may have been rewritten with five digits.
const ROUNDING: f64 = 1e-4;

/// Reports a figure that is larger than another one, called `what`, allows.
fn at_most(report: &mut Report, key: String, x: f64, bound: f64, what: &str) {
    if x > bound * (1.0 + ROUNDING) {
        let expected = format!("{} at most, {what}", Figure(bound));
        report.add(key, "agreement", expected, Figure(x).to_string());
    }
}

/// Reports a figure that differs from the one, called `what`, that follows from others.
fn equals(report: &mut Report, key: String, x: f64, expected: f64, what: &str) {
    if (x - expected).abs() > ROUNDING * expected.abs().max(ROUNDING) {
        let expected = format!("{}, {what}", Figure(expected));
        report.add(key, "agreement", expected, Figure(x).to_string());
    }
}

/// Divides `x` by `y`; the ratio to nothing is 0.
fn ratio(x: f64, y: f64) -> f64 {
    if y > 0.0 { x / y } else { 0.0 }
}

/// Checks that the predicted figures, and those of the proofs, agree with each other.
fn agreement(plan: &Plan, report: &mut Report) {
    let p = &plan.predicted;
    let key = |of: &str| format!("predicted.{of}");
    at_most(report, key("bubble"), p.bubble, 1.0, "a share of the step");
    at_most(report, key("mfu"), p.mfu, p.hfu, "predicted.hfu");
    let tokens = plan.train.global_batch as f64 * plan.train.sequence as f64;
    let per_s = ratio(tokens, p.step_time_s.0);
    let what = "the batch's tokens over predicted.step_time_s";
    equals(report, key("tokens_per_s"), p.tokens_per_s, per_s, what);
    for (i, s) in p.stages.iter().enumerate() {
        let (lives, peak) = (s.persistent_bytes.0 as f64, s.peak_bytes.0 as f64);
        let key = key(&format!("stages[{i}].persistent_bytes"));
        at_most(report, key, lives, peak, "peak_bytes of the stage");
    }
    for (key, [objective, bound, gap]) in proofs(plan) {
        let of = |what: &str| format!("{key}.{what}");
        at_most(report, of("lower_bound_s"), bound, objective, "objective_s");
        let open = ratio(objective - bound, objective).max(0.0);
        let what = "(objective_s - lower_bound_s) / objective_s";
        equals(report, of("gap"), gap, open, what);
    }
    if let Some(least) = plan.proof.least_objective_s.map(|s| s.0) {
        let (key, of) = ("proof.least_objective_s", plan.proof.lower_bound_s.0);
        at_most(report, "proof.lower_bound_s".into(), of, least, key);
        let own = plan.proof.objective_s.0;
        at_most(report, key.into(), least, own, "objective_s");
    }
    simplicity(plan, report);
}

/// Checks what is said of the fastest plan in whose place a simpler one stands.
fn simplicity(plan: &Plan, report: &mut Report) {
    let Some(simpler) = &plan.proof.simpler else {
        return;
    };
    let (own, key) = (plan.predicted.step_time_s.0, "proof.simpler");
    let fastest = simpler.fastest_s.0;
    let of = |what: &str| format!("{key}.{what}");
    at_most(
        report,
        of("fastest_s"),
        fastest,
        own,
        "predicted.step_time_s",
    );
    at_most(
        report,
        of("tolerance"),
        simpler.tolerance,
        1.0,
        "a share of the step",
    );
    let limit = (1.0 + simpler.tolerance) * fastest;
    let what = "fastest_s and the tolerance of it";
    at_most(report, "predicted.step_time_s".into(), own, limit, what);
}

/// Lists objective, lower bound and gap of each proof, with its key.
fn proofs(plan: &Plan) -> Vec<(String, [f64; 3])> {
    let p = &plan.proof;
    let all = [p.objective_s.0, p.lower_bound_s.0, p.gap];
    let mut found = vec![("proof".to_string(), all)];
    let stages = p.stages.iter().enumerate();
    found.extend(stages.map(|(i, s)| {
        let of_stage = [s.objective_s.0, s.lower_bound_s.0, s.gap];
        (format!("proof.stages[{i}]"), of_stage)
    }));
    found
}

fn batch(plan: &Plan, report: &mut Report) {
    let product = plan.microbatch.checked_mul(u64::from(plan.n_microbatches));
    if plan.microbatch == 0 || plan.n_microbatches == 0 || product != Some(plan.train.global_batch)
    {
        report.add(
            "microbatch",
            "batch",
            format!("microbatch x n_microbatches = {}", plan.train.global_batch),
            format!("{} x {}", plan.microbatch, plan.n_microbatches),
        );
    }
}

/// Says what is wrong with a mesh in a cluster of `n_devices`.
pub(crate) fn mesh_problem(mesh: &LogicalMesh, n_devices: u32) -> Option<(String, String)> {
    if LogicalMesh::new(mesh.devices, mesh.axes.clone()).is_none() {
        let sizes: Vec<u32> = mesh.axes.iter().map(|a| a.size).collect();
        return Some((
            format!("axes that multiply to {}", mesh.devices.n_devices),
            format!("{sizes:?}"),
        ));
    }
    // Specs name axes, with these signs between them.
    let is_name = |name: &str| {
        let plain = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.');
        !name.is_empty() && name != "_" && name.chars().all(plain)
    };
    if let Some(axis) = mesh.axes.iter().find(|a| !is_name(&a.name)) {
        let expected = "axes with names of letters, digits, `_`, `-` and `.`";
        return Some((expected.into(), format!("{:?}", axis.name)));
    }
    let names: BTreeSet<&str> = mesh.axes.iter().map(|a| a.name.as_str()).collect();
    if names.len() != mesh.axes.len() {
        let names: Vec<&str> = mesh.axes.iter().map(|a| a.name.as_str()).collect();
        return Some(("axes of different names".into(), names.join(", ")));
    }
    let end = mesh
        .devices
        .first_rank
        .0
        .checked_add(mesh.devices.n_devices);
    if end.is_none_or(|end| end > n_devices) {
        let d = mesh.devices;
        return Some((
            format!("devices of a cluster of {n_devices}"),
            format!("{} from {}", d.n_devices, d.first_rank),
        ));
    }
    None
}

fn meshes(plan: &Plan, report: &mut Report) -> bool {
    let mut good = true;
    if plan.stages.is_empty() {
        report.add("stages", "stages", "at least one stage", "none");
        good = false;
    }
    if let Some(problem) = plan.schedule_problem() {
        let expected = "stages and microbatches that the schedule can order";
        report.add("schedule", "schedule", expected, problem);
        return false;
    }
    let n_meshes = plan.n_meshes();
    let mut runs = Vec::new();
    for (i, stage) in plan.stages.iter().enumerate() {
        match mesh_problem(&stage.mesh, plan.cluster.n_devices()) {
            Some((expected, actual)) => {
                report.add(format!("stages[{i}].mesh"), "mesh", expected, actual);
                good = false;
            }
            // Interleaved: the other stages of a mesh lie where its first one does.
            None if i >= n_meshes => {}
            None => runs.push((
                stage.mesh.devices.first_rank.0,
                stage.mesh.devices.n_devices,
                i,
            )),
        }
    }
    runs.sort_unstable();
    for w in runs.windows(2) {
        if w[0].0.saturating_add(w[0].1) > w[1].0 {
            report.add(
                format!("stages[{}].mesh", w[1].2),
                "mesh",
                "devices of its own",
                format!("devices of stage {} too", w[0].2),
            );
            good = false;
        }
    }
    good
}

fn training(plan: &Plan, report: &mut Report) -> Option<TrainingGraph> {
    let forward = match ir::text::parse(&plan.graph) {
        Ok(graph) => graph,
        Err(e) => {
            report.add(
                "graph",
                "graph",
                "the text of a graph",
                format!("line {}: {}", e.line, e.message),
            );
            return None;
        }
    };
    let broken = ir::verify::verify(&forward);
    for v in &broken {
        report.add(
            format!("graph {}", v.path),
            "graph",
            format!("{}: {}", v.rule, v.expected),
            v.actual.clone(),
        );
    }
    if !broken.is_empty() {
        return None;
    }
    match plan.training_graph(&forward) {
        Ok(t) => Some(t),
        Err(e) => {
            report.add(
                "graph",
                "graph",
                "a graph that can be trained",
                e.to_string(),
            );
            None
        }
    }
}

/// The stage of a layer, and the strategy that it has there.
#[derive(Clone, Copy)]
struct Home {
    stage: usize,
    strategy: usize,
}

fn layers(plan: &Plan, graph: &Graph, report: &mut Report) -> Option<Vec<Home>> {
    let n = graph.layers.len();
    let mut homes = Vec::with_capacity(n);
    for (i, stage) in plan.stages.iter().enumerate() {
        if stage.runs.is_empty() {
            report.add(
                format!("stages[{i}]"),
                "layers",
                "at least one layer",
                "none",
            );
        }
        for (j, run) in stage.runs.iter().enumerate() {
            let place = format!("stages[{i}].runs[{j}]");
            let left = n - homes.len();
            if run.first.index() != homes.len() || run.count == 0 || run.count as usize > left {
                report.add(
                    place,
                    "layers",
                    format!("1 to {left} layers from {}", homes.len()),
                    format!("{} from {}", run.count, run.first.0),
                );
                return None;
            }
            let strategy = run.strategy as usize;
            if strategy >= plan.layer_strategies.len() {
                report.add(
                    place,
                    "layers",
                    match plan.layer_strategies.len() {
                        0 => "a plan with layer_strategies, which has none".to_string(),
                        n => format!("a strategy from 0 to {} (layer_strategies has {n})", n - 1),
                    },
                    format!("strategy {}", run.strategy),
                );
                return None;
            }
            homes.extend(std::iter::repeat_n(
                Home { stage: i, strategy },
                run.count as usize,
            ));
        }
    }
    if homes.len() != n {
        report.add(
            "stages",
            "layers",
            format!("{n} layers"),
            homes.len().to_string(),
        );
        return None;
    }
    Some(homes)
}
