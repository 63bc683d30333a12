//! Layer clustering end to end: models whose layer declarations are erased train as the
//! unclustered graph does, and are planned as well as the declared ones.

use ir::training::training_graph;
use ir::{Graph, TensorType};
use planner::{Layering, Pins, PlanOptions, Planned};
use runtime::RuntimeError;
use runtime::execute::{Session, SessionOptions};
use runtime::reference::Reference;
use std::collections::BTreeMap;
use tests::{Case, assert_checked, cluster, distance, relative};

/// Steps of each comparison.
const STEPS: usize = 5;
const CASES: [&str; 4] = [
    "gpt2_small_tied",
    "gpt2_untied_gelu",
    "llama_tied",
    "llama_untied_rope",
];

/// The graph as a text that declares no layers, read again: one layer.
fn erased(graph: &Graph) -> Graph {
    edited(graph, &|line| match line.rsplit_once(" layer ") {
        Some((op, _)) => op.to_string(),
        None => line.to_string(),
    })
}

/// The same with paths that have no scope: `h.0.attn.qkv` is `h_0_attn_qkv`.
fn flat(graph: &Graph) -> Graph {
    edited(&erased(graph), &|line| {
        let line = line.rsplit_once(" layer ").map_or(line, |(op, _)| op);
        match line.split_once(" @ ") {
            Some((op, place)) => format!("{op} @ {}", place.replace('.', "_")),
            None => line.to_string(),
        }
    })
}

fn edited(graph: &Graph, edit: &dyn Fn(&str) -> String) -> Graph {
    let text = ir::text::print(graph);
    let lines = text.lines().filter(|l| !l.starts_with("  layers "));
    let text: Vec<String> = lines.map(edit).collect();
    let made = ir::text::parse(&text.join("\n")).expect("the edited text is a graph");
    assert_eq!(made.layers, ["all"]);
    made
}

fn plan(forward: &Graph, case: &Case, n: u32, pins: &[&str], layering: Layering) -> Planned {
    let options = PlanOptions {
        pins: Pins::parse(pins).expect("the pins are well-formed"),
        layering,
        ..PlanOptions::default()
    };
    let made = planner::plan(forward, &case.train, &cluster(n), &options)
        .unwrap_or_else(|e| panic!("{} {pins:?} {layering:?}: {e}", forward.name));
    assert_checked(&made.plan, &made.training, &made.program);
    made
}

/// Trains by the plan and by the unclustered graph, `forward` as it is, on a single device.
fn train_alike(forward: &Graph, made: &Planned, case: &Case, bit_equal: bool) {
    let weights = import::Weights::open(&case.folder, &case.config).expect("the weights open");
    let params: BTreeMap<String, String> = case
        .config
        .params()
        .into_iter()
        .flat_map(|p| {
            [
                (p.path.replace('.', "_"), p.path.clone()),
                (p.path.clone(), p.path),
            ]
        })
        .collect();
    let initial = |path: &str, elements: usize| match params.get(path) {
        Some(param) => weights.param(param),
        None => Ok(vec![0.0; elements]),
    };
    let whole = training_graph(forward, &case.train).expect("the graph can be trained");
    let elements = |ty: &TensorType| ty.shape.bind(1).iter().product::<u64>() as usize;
    let plan = &made.plan;
    let mut single = Reference::new(
        &whole,
        &case.train,
        plan.microbatch,
        plan.n_microbatches,
        |path: &str, ty: &TensorType| {
            Ok::<_, RuntimeError>(initial(path, elements(ty)).expect("a weight"))
        },
    )
    .expect("the reference starts");
    let mut session = Session::new(
        &made.program,
        &case.train,
        SessionOptions::default(),
        |request| {
            Ok(
                initial(request.path, request.lens.iter().product::<u64>() as usize)
                    .expect("a weight"),
            )
        },
    )
    .expect("the ranks start");
    let name = format!("{} in {} stages", forward.name, plan.stages.len());
    for (step, batch) in case.batches.iter().take(STEPS).enumerate() {
        let one = single.step(batch, case.lr).expect("the single device runs");
        let many = session.step(batch, case.lr, false).expect("the ranks run");
        if bit_equal {
            assert_eq!(many.loss, one.loss, "{name} step {step}");
        }
        let off = relative(many.loss, one.loss);
        assert!(off < 1e-5, "{name} step {step}: loss off by {off}");
    }
    let (mut difference, mut norm) = (0.0, 0.0);
    for (path, tensor) in session.params().expect("the parameters are gathered") {
        let (d, n) = distance(&tensor.values, &single.states()[&path]);
        difference += d;
        norm += n;
    }
    // Where samples are split, sums have another order; AdamW's first steps enlarge that. As
    // in `parallel`.
    let allowed = if bit_equal { 0.0 } else { 1e-4 };
    let off = (difference / norm).sqrt();
    assert!(
        norm > 0.0 && off <= allowed,
        "{name}: parameters off by {off}"
    );
}

fn pinned(case: &Case, data: u32, pipeline: u32) -> Vec<String> {
    let microbatch = (case.train.global_batch / 4).max(u64::from(data));
    vec![
        format!("data={data}"),
        "tensor=1".into(),
        format!("pipeline={pipeline}"),
        format!("microbatch={microbatch}"),
    ]
}

fn refs(pins: &[String]) -> Vec<&str> {
    pins.iter().map(String::as_str).collect()
}

#[test]
fn erased_models_are_pipelined_and_train_alike() {
    for name in CASES {
        let case = Case::load(name);
        let forward = erased(&case.forward);
        for (data, pipeline) in [(1, 2), (1, 4), (2, 2)] {
            let pins = pinned(&case, data, pipeline);
            let made = plan(
                &forward,
                &case,
                data * pipeline,
                &refs(&pins),
                Layering::IfNeeded,
            );
            assert_eq!(made.plan.stages.len(), pipeline as usize);
            train_alike(&forward, &made, &case, data == 1);
        }
    }
}

/// Cuts inside blocks, and layers of several blocks with other names.
#[test]
fn other_numbers_of_layers_train_alike() {
    for (name, n) in [
        ("gpt2_small_tied", 6),
        ("llama_untied_rope", 8),
        ("llama_tied", 3),
    ] {
        let case = Case::load(name);
        for pipeline in [2, 3] {
            let pins = pinned(&case, 1, pipeline);
            let made = plan(
                &case.forward,
                &case,
                pipeline,
                &refs(&pins),
                Layering::Exactly(n),
            );
            assert_eq!(made.training.graph.layers.len(), n);
            train_alike(&erased(&case.forward), &made, &case, true);
        }
    }
}

#[test]
fn erased_models_have_the_plan_of_the_declared_ones() {
    for name in CASES {
        let case = Case::load(name);
        for n in [1, 4] {
            let declared = plan(&case.forward, &case, n, &[], Layering::Declared);
            let found = plan(&erased(&case.forward), &case, n, &[], Layering::IfNeeded);
            assert_eq!(found.plan, declared.plan, "{name} on {n}");
            assert!(found.stats.notes.iter().any(|n| n.starts_with("layers: ")));
        }
    }
}

/// Names that say nothing: blocks are found equal all the same, each has a strategy of its own
/// in the plan, and the plan is as good and trains alike.
#[test]
fn names_do_not_matter() {
    for name in ["gpt2_untied_gelu", "llama_untied_rope"] {
        let case = Case::load(name);
        let forward = flat(&case.forward);
        let declared = plan(&case.forward, &case, 4, &[], Layering::Declared);
        let found = plan(&forward, &case, 4, &[], Layering::IfNeeded);
        assert_eq!(found.stats.n_layer_kinds, 3);
        assert_eq!(found.stats.n_layer_kinds, declared.stats.n_layer_kinds);
        assert_eq!(found.plan.predicted, declared.plan.predicted);
        assert_eq!(found.plan.proof, declared.plan.proof);
        let pins = pinned(&case, 2, 2);
        let made = plan(&forward, &case, 4, &refs(&pins), Layering::IfNeeded);
        assert_eq!(made.plan.stages.len(), 2);
        train_alike(&forward, &made, &case, false);
    }
}

/// Everything is used by everything behind it: one layer, no pipeline, a plan all the same.
#[test]
fn a_dense_graph_is_planned_as_one_layer() {
    let mut text = String::from(
        r#"graph "dense" {
  %tok = input {kind: tokens} : i32[B,8] @ tokens F microbatch
  %table = state {decay: true, init: {normal: {std: 0.02}}} : f32[96,16] @ table Update step_begin
  %x0 = embedding %table, %tok : f32[B,8,16] @ embed F microbatch
"#,
    );
    for i in 1..6 {
        text += &format!(
            "  %w{i} = state {{decay: true, init: {{normal: {{std: 0.02}}}}}} : f32[16,16] @ w{i} Update step_begin\n  %y{i} = dot_general {{einsum: \"bsh,hf->bsf\"}} %x{}, %w{i} : f32[B,8,16] @ y{i} F microbatch\n",
            i - 1
        );
        let mut last = format!("y{i}");
        for j in 0..i {
            text += &format!(
                "  %s{i}_{j} = binary {{f: add}} %{last}, %x{j} : f32[B,8,16] @ s{i}_{j} F microbatch\n"
            );
            last = format!("s{i}_{j}");
        }
        text += &format!("  %x{i} = unary {{f: tanh}} %{last} : f32[B,8,16] @ x{i} F microbatch\n");
    }
    text += r#"  %all0 = binary {f: add} %x5, %x0 : f32[B,8,16] @ all0 F microbatch
  %all1 = binary {f: add} %all0, %x1 : f32[B,8,16] @ all1 F microbatch
  %all2 = binary {f: add} %all1, %x2 : f32[B,8,16] @ all2 F microbatch
  %all3 = binary {f: add} %all2, %x3 : f32[B,8,16] @ all3 F microbatch
  %all4 = binary {f: add} %all3, %x4 : f32[B,8,16] @ all4 F microbatch
  %labels = input {kind: labels} : i32[B,8] @ labels F microbatch
  %wide = state {decay: true, init: {normal: {std: 0.02}}} : f32[16,96] @ wide Update step_begin
  %logits0 = dot_general {einsum: "bsh,hv->bsv"} %all4, %wide : f32[B,8,96] @ logits0 F microbatch
  %logits1 = dot_general {einsum: "bsh,hv->bsv"} %x0, %wide : f32[B,8,96] @ logits1 F microbatch
  %logits = binary {f: add} %logits0, %logits1 : f32[B,8,96] @ logits F microbatch
  %lse = log_sum_exp %logits : f32[B,8] @ lse F microbatch
  %nll = cross_entropy %logits, %lse, %labels : f32[B,8] @ nll F microbatch
  %sum = reduce {dims: [0, 1], kind: sum} %nll : f32[] @ sum F microbatch
  return %sum
}
"#;
    let forward = ir::text::parse(&text).unwrap_or_else(|e| panic!("{e}"));
    let train = ir::TrainSpec {
        sequence: 8,
        global_batch: 4,
        ..ir::TrainSpec::default()
    };
    let made = planner::plan(&forward, &train, &cluster(2), &PlanOptions::default())
        .unwrap_or_else(|e| panic!("{e}"));
    assert_checked(&made.plan, &made.training, &made.program);
    assert_eq!(
        (made.training.graph.layers.len(), made.plan.stages.len()),
        (1, 1)
    );
    assert!(
        made.stats.notes[0].contains("not cut"),
        "{:?}",
        made.stats.notes
    );
    // Cut all the same when asked: behind the embedding, and between ops of the loss.
    let options = PlanOptions {
        pins: Pins::parse(&["pipeline=2"]).expect("a pin"),
        layering: Layering::Exactly(3),
        ..PlanOptions::default()
    };
    let made =
        planner::plan(&forward, &train, &cluster(2), &options).unwrap_or_else(|e| panic!("{e}"));
    assert_checked(&made.plan, &made.training, &made.program);
    let error = planner::plan(
        &forward,
        &train,
        &cluster(2),
        &PlanOptions {
            layering: Layering::Exactly(9),
            ..PlanOptions::default()
        },
    )
    .expect_err("there are not so many places");
    assert!(
        error.to_string().contains("9 layers were asked for"),
        "{error}"
    );
}
