//! Paths are labels: a model whose ops are called as training calls its own ops has the same
//! training graph, plan, program and losses as the model with the usual names, up to names.
#![allow(clippy::unwrap_used)]

use ir::op::OpKind;
use ir::plan::{Plan, relative_path};
use ir::program::{InstrKind, Program};
use ir::testing::{GraphOptions, random_graph, sequence_of};
use ir::text::{parse, print};
use ir::training::{
    Recompute, StateRole, TrainingGraph, choose, problems, recompute, training_graph,
};
use ir::verify::verify;
use ir::{Graph, Op, Origin, Place, Precision, TrainSpec};
use std::collections::BTreeMap;
use tests::{Case, cluster, planned};

/// Paths that training would give to ops that it makes for an op called `x` in the layer `l`.
fn made_for(x: &str, l: &str, k: usize) -> String {
    let made = [
        format!("grad.{x}.lhs"),
        format!("recompute.{x}"),
        format!("boundary.{l}.0"),
        format!("grad.{x}.rhs"),
        format!("accumulate.{x}.1"),
        format!("cast.{x}"),
        format!("grad.boundary.{l}.0.x"),
        format!("prepare.{x}"),
        format!("grad.{x}.sum1"),
        format!("moment1.{x}"),
        format!("{x}:1"),
        format!("layout.{x}.0"),
        format!("grad.{x}.x"),
        format!("update.{x}"),
        format!("grad.{x}.weight:1"),
        format!("shared.{l}.{x}"),
        format!("{x}.cast.1"),
        format!("grad_sum.{x}"),
        format!("sum_squares.{x}"),
        format!("grad.recompute.{x}.r1-sum1"),
    ];
    made[k % made.len()].clone()
}

/// Paths of ops that every training graph has.
const OF_ALL: [&str; 10] = [
    "loss",
    "grad.seed",
    "accumulate.loss",
    "global_norm",
    "clip_coefficient",
    "loss_scale",
    "loss_scale.good_steps",
    "loss_scale.value",
    "update_loss_scale",
    "boundary",
];

/// A path for every op: every third a plain one, the others what training makes of those around.
fn hostile(graph: &Graph) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for (i, op) in graph.ops().iter().enumerate() {
        let layer = op.layer.map_or("", |l| graph.layers[l.index()].as_str());
        let plain = |i: usize| format!("x{i}");
        let name = match i % 3 {
            0 => plain(i),
            _ if i / 3 < OF_ALL.len() && i % 3 == 1 => OF_ALL[i / 3].to_string(),
            1 => made_for(&plain(i - 1), layer, i / 3),
            _ => made_for(&plain(i + 1), layer, i / 3),
        };
        // Results of a split are called so, which nothing else may be.
        let several = graph
            .ops()
            .iter()
            .enumerate()
            .filter(|(_, op)| op.outputs.len() > 1);
        let is_result = several
            .into_iter()
            .any(|(k, _)| name == format!("{}:1", plain(k)));
        match is_result || names.contains(&name) {
            true => names.push(format!("y.{name}")),
            false => names.push(name),
        }
    }
    names
}

/// The graph with other paths, and keys that go with them.
fn renamed(graph: &Graph, names: &[String]) -> Graph {
    let mut out = Graph::new(graph.name.clone());
    out.layers = graph.layers.clone();
    for (op, name) in graph.ops().iter().zip(names) {
        let place = Place {
            path: name.clone(),
            pass: op.pass,
            region: op.region,
            layer: op.layer,
        };
        let mut kind = op.kind.clone();
        if let OpKind::Dropout { key, .. } = &mut kind {
            key.clone_from(name);
        }
        if kind.is_source() {
            let ty = graph.ty(op.outputs[0]).clone();
            out.add_source(kind, ty, place).unwrap();
        } else {
            out.add(kind, &op.inputs, place).unwrap();
        }
    }
    out.outputs = graph.outputs.clone();
    assert_eq!(verify(&out), vec![]);
    out
}

/// A kind without its random key, which is a path.
fn unnamed(kind: &OpKind) -> OpKind {
    let mut kind = kind.clone();
    if let OpKind::Dropout { key, .. }
    | OpKind::Attention { key, .. }
    | OpKind::AttentionGrad { key, .. } = &mut kind
    {
        key.clear();
    }
    kind
}

/// Asserts that two training graphs are one but for names, and that the second is sound.
fn same_training(a: &TrainingGraph, b: &TrainingGraph) {
    assert_eq!(problems(b), Vec::<String>::new());
    assert_eq!(verify(&b.graph), vec![]);
    assert_eq!(parse(&print(&b.graph)).unwrap(), b.graph);
    let without_names = |op: &Op| Op {
        kind: unnamed(&op.kind),
        path: String::new(),
        ..op.clone()
    };
    assert_eq!(a.graph.ops().len(), b.graph.ops().len());
    for (x, y) in a.graph.ops().iter().zip(b.graph.ops()) {
        assert_eq!(
            without_names(x),
            without_names(y),
            "{} is {}",
            x.path,
            y.path
        );
    }
    let states = |t: &TrainingGraph| -> Vec<_> {
        let states = t.states.iter();
        states.map(|s| (s.role, s.read, s.write)).collect()
    };
    assert_eq!(states(a), states(b));
    assert_eq!((a.loss, a.grad_norm), (b.loss, b.grad_norm));
}

/// The ops of a training graph that are the model's keep their paths, and nothing else is the
/// model's.
fn the_models_ops_are_forward(forward: &Graph, t: &TrainingGraph) {
    let of_model = |op: &&Op| forward.find(&op.path).is_some();
    let (ours, made): (Vec<&Op>, Vec<&Op>) = t.graph.ops().iter().partition(of_model);
    assert_eq!(ours.len(), forward.ops().len());
    for op in ours {
        assert_eq!(op.origin, Origin::Forward, "{}", op.path);
    }
    for op in made {
        assert_ne!(op.origin, Origin::Forward, "{}", op.path);
    }
}

#[test]
fn training_graphs_do_not_depend_on_names() {
    let mut collisions = 0;
    for seed in 0..300 {
        let options = GraphOptions {
            dropout: seed % 2 == 0,
            experts: seed % 5 == 0,
            integer_linear: seed % 7 == 0,
            ..GraphOptions::default()
        };
        let forward = random_graph(seed, &options);
        let other = renamed(&forward, &hostile(&forward));
        let train = TrainSpec {
            sequence: sequence_of(&forward).unwrap(),
            precision: [Precision::F32, Precision::Bf16, Precision::F16][seed as usize % 3],
            ..TrainSpec::default()
        };
        let trained = |graph: &Graph| {
            let kept = training_graph(graph, &train).unwrap();
            let chosen = choose(&kept, Recompute::Full, &|_| None);
            recompute(&kept, &chosen).unwrap()
        };
        let (a, b) = (trained(&forward), trained(&other));
        same_training(&a, &b);
        the_models_ops_are_forward(&forward, &a);
        the_models_ops_are_forward(&other, &b);
        collisions += b
            .graph
            .ops()
            .iter()
            .filter(|op| op.path.ends_with("-2"))
            .count();
    }
    // The names were hostile indeed.
    assert!(collisions > 1000, "{collisions}");
}

/// A program without names.
fn without_labels(program: &Program) -> Program {
    let mut p = program.clone();
    for role in &mut p.roles {
        role.buffers.iter_mut().for_each(|b| b.name.clear());
        for s in &mut role.states {
            s.path.clear();
            s.param.clear();
        }
        for i in role.templates.iter_mut().flat_map(|t| &mut t.instructions) {
            if let InstrKind::Compute { path, kind, .. } = &mut i.kind {
                path.clear();
                *kind = unnamed(kind);
            }
        }
    }
    p.transfers.iter_mut().for_each(|t| t.value.clear());
    p
}

/// The plan with its names told by those of another graph: equal for plans that are the same.
fn plan_without_names(plan: &Plan, training: &TrainingGraph) -> (Plan, Vec<String>) {
    let graph = &training.graph;
    let mut strategies = Vec::new();
    for run in plan.stages.iter().flat_map(|s| &s.runs) {
        let strategy = &plan.layer_strategies[run.strategy as usize];
        for layer in run.first.index()..run.first.index() + run.count as usize {
            let name = &graph.layers[layer];
            let of_layer = |op: &&Op| op.layer.is_some_and(|l| l.index() == layer);
            for op in graph.ops().iter().filter(of_layer) {
                let key = relative_path(&op.path, name);
                let is_recomputed = strategy.recompute.contains(&key);
                strategies.push(format!("{:?} {is_recomputed}", strategy.ops.get(&key)));
            }
        }
    }
    let mut plan = plan.clone();
    plan.graph.clear();
    plan.layer_strategies.clear();
    plan.transfers.clear();
    plan.edges.clear();
    for run in plan.stages.iter_mut().flat_map(|s| &mut s.runs) {
        run.strategy = 0;
    }
    let mut joined = plan.clone();
    for stage in &mut joined.stages {
        // Layers share a strategy where their names correspond.
        stage.runs.dedup_by(|b, a| {
            a.count += b.count;
            true
        });
    }
    (joined, strategies)
}

fn trains_alike(case: &Case, precision: Precision, pins: &[&str]) {
    let train = TrainSpec {
        precision,
        ..case.train.clone()
    };
    let names = hostile(&case.forward);
    let other = renamed(&case.forward, &names);
    let made = |forward: &Graph| planned(forward, &train, &cluster(4), pins).unwrap();
    let (a, b) = (made(&case.forward), made(&other));
    same_training(&a.training, &b.training);
    assert_eq!(
        plan_without_names(&a.plan, &a.training),
        plan_without_names(&b.plan, &b.training),
        "{pins:?}"
    );
    let (one, two) = (without_labels(&a.program), without_labels(&b.program));
    assert!(one == two, "{pins:?}: the programs differ");

    let usual: BTreeMap<&str, &str> = case
        .forward
        .ops()
        .iter()
        .zip(&names)
        .map(|(op, name)| (name.as_str(), op.path.as_str()))
        .collect();
    let session = |program: &Program, usual: &dyn Fn(&str) -> String| {
        let mut initial = case.initial();
        let start = |r: runtime::execute::StateRequest<'_>| match r.role {
            StateRole::Scalar => Ok(vec![f32::from(u8::from(r.path == "loss_scale"))]),
            _ => initial(&usual(r.path), r.lens.iter().product::<u64>() as usize),
        };
        runtime::execute::Session::new(program, &train, Default::default(), start).unwrap()
    };
    let mut by_a = session(&a.program, &|path| path.to_string());
    let mut by_b = session(&b.program, &|path| {
        usual.get(path).map_or(String::new(), |p| p.to_string())
    });
    for batch in case.batches.iter().take(3) {
        let one = by_a.step(batch, case.lr, false).unwrap();
        let two = by_b.step(batch, case.lr, false).unwrap();
        assert_eq!((one.loss, one.grad_norm), (two.loss, two.grad_norm));
    }
}

#[test]
fn plans_and_losses_do_not_depend_on_names() {
    let gpt2 = Case::load("gpt2_small_tied");
    trains_alike(&gpt2, Precision::F32, &[]);
    trains_alike(&gpt2, Precision::F32, &["data=2", "tensor=2", "zero=3"]);
    let pins = ["pipeline=2", "data=2", "recompute=full", "microbatch=2"];
    trains_alike(&gpt2, Precision::Bf16, &pins);
    let moe = Case::load("mixtral");
    let pins = ["data=4", "expert=2", "recompute=selective", "zero=1"];
    trains_alike(&moe, Precision::F32, &pins);
}
