//! Recomputation in the training graph: which twins there are, where they stand and what
//! reads them. That they have the bits of their sources is checked on ranks (`tests/`).
#![allow(clippy::unwrap_used)]

use ir::testing::{GraphOptions, random_graph, sequence_of};
use ir::training::{
    Recompute, TrainingGraph, can_recompute, choose, problems, recompute, training_graph,
};
use ir::{Graph, Op, OpId, OpKind, Origin, Pass, TrainSpec};
use std::collections::BTreeSet;

/// Norm, two matmuls with an activation function between them, and a residual; then dropout,
/// a gate and attention.
const MODEL: &str = r#"graph "test" {
  layers "embed", "mlp", "attn", "head"
  %tok = input {kind: tokens} : i32[B,8] @ tokens F microbatch layer 0
  %emb = state {decay: true, init: {normal: {std: 0.02}}} : f32[64,16] @ embed.weight Update step_begin layer 0
  %x = embedding %emb, %tok : f32[B,8,16] @ embed.out F microbatch layer 0
  %g = state {decay: false, init: ones} : f32[16] @ mlp.gain Update step_begin layer 1
  %w1 = state {decay: true, init: {normal: {std: 0.02}}} : f32[16,32] @ mlp.up.weight Update step_begin layer 1
  %w2 = state {decay: true, init: {normal: {std: 0.02}}} : f32[32,16] @ mlp.down.weight Update step_begin layer 1
  %n, %r = rms_norm {eps: 0.00001} %x, %g : f32[B,8,16], f32[B,8] @ mlp.norm F microbatch layer 1
  %h = dot_general {einsum: "bsh,hf->bsf"} %n, %w1 : f32[B,8,32] @ mlp.up F microbatch layer 1
  %a = unary {f: gelu_tanh} %h : f32[B,8,32] @ mlp.act F microbatch layer 1
  %y = dot_general {einsum: "bsf,fh->bsh"} %a, %w2 : f32[B,8,16] @ mlp.down F microbatch layer 1
  %z = binary {f: add} %x, %y : f32[B,8,16] @ mlp.residual F microbatch layer 1
  %wq = state {decay: true, init: {normal: {std: 0.02}}} : f32[16,2,8] @ attn.q.weight Update step_begin layer 2
  %wo = state {decay: true, init: {normal: {std: 0.02}}} : f32[2,8,16] @ attn.out.weight Update step_begin layer 2
  %q = dot_general {einsum: "bsh,hnd->bsnd"} %z, %wq : f32[B,8,2,8] @ attn.q F microbatch layer 2
  %o, %l = attention {dropout: 0.1, scale: 0.35} %q, %q, %q : f32[B,8,2,8], f32[B,8,2] @ attn.attend F microbatch layer 2
  %p = dot_general {einsum: "bsnd,ndh->bsh"} %o, %wo : f32[B,8,16] @ attn.out F microbatch layer 2
  %d = dropout {key: "attn.drop", p: 0.1} %p : f32[B,8,16] @ attn.drop F microbatch layer 2
  %u = state {decay: true, init: {normal: {std: 0.02}}} : f32[16,64] @ head.weight Update step_begin layer 3
  %labels = input {kind: labels} : i32[B,8] @ labels F microbatch layer 3
  %logits = dot_general {einsum: "bsh,hv->bsv"} %d, %u : f32[B,8,64] @ head.logits F microbatch layer 3
  %lse = log_sum_exp %logits : f32[B,8] @ head.lse F microbatch layer 3
  %nll = cross_entropy %logits, %lse, %labels : f32[B,8] @ head.nll F microbatch layer 3
  %sum = reduce {dims: [0, 1], kind: sum} %nll : f32[] @ head.nll_sum F microbatch layer 3
  return %sum
}
"#;

fn trained(forward: &Graph) -> TrainingGraph {
    let spec = TrainSpec {
        sequence: sequence_of(forward).unwrap(),
        ..TrainSpec::default()
    };
    training_graph(forward, &spec).unwrap()
}

fn model() -> TrainingGraph {
    trained(&ir::text::parse(MODEL).unwrap())
}

fn apply(kept: &TrainingGraph, chosen: &BTreeSet<OpId>) -> TrainingGraph {
    let made = recompute(kept, chosen).unwrap();
    assert_eq!(problems(&made), Vec::<String>::new());
    let broken = ir::verify::verify(&made.graph);
    assert!(broken.is_empty(), "{broken:?}");
    made
}

fn named(kept: &TrainingGraph, policy: Recompute) -> TrainingGraph {
    apply(kept, &choose(kept, policy, &|_| None))
}

/// `twin before first reader`.
fn twins(t: &TrainingGraph) -> Vec<String> {
    let graph = &t.graph;
    let ops: Vec<&Op> = graph.ops().iter().collect();
    let twin = |i: &usize| ops[*i].pass == Pass::Recompute;
    (0..ops.len())
        .filter(twin)
        .map(|i| {
            let next = (i..ops.len()).find(|j| !twin(j)).unwrap();
            format!("{} before {}", ops[i].path, ops[next].path)
        })
        .collect()
}

/// Names of the operands of an op.
fn operands(t: &TrainingGraph, path: &str) -> Vec<String> {
    let op = t.graph.op(t.graph.find(path).unwrap());
    op.inputs.iter().map(|&v| t.graph.value_name(v)).collect()
}

/// Names of the activations that reach a later pass.
fn saved(t: &TrainingGraph) -> Vec<String> {
    let graph = &t.graph;
    let mut names = BTreeSet::new();
    for op in graph.ops().iter().filter(|op| op.pass != Pass::F) {
        for &v in &op.inputs {
            let from = graph.op(graph.value(v).producer);
            if from.pass == Pass::F
                && !from.kind.is_source()
                && !matches!(from.kind, OpKind::Accumulate { .. })
            {
                names.insert(graph.value_name(v));
            }
        }
    }
    names.into_iter().collect()
}

#[test]
fn full_keeps_the_inputs_of_layers_alone() {
    let kept = model();
    let made = named(&kept, Recompute::Full);
    assert_eq!(
        twins(&made),
        [
            "recompute.attn.q before grad.attn.out.rhs",
            "recompute.attn.attend before grad.attn.out.rhs",
            "recompute.mlp.norm before grad.mlp.down.rhs",
            "recompute.mlp.up before grad.mlp.down.rhs",
            "recompute.mlp.act before grad.mlp.down.rhs",
        ]
    );
    // The layer of the loss keeps what it has; nothing of `embed` is needed.
    assert_eq!(
        saved(&made),
        [
            "boundary.attn.0",
            "boundary.head.0",
            "boundary.mlp.0",
            "head.logits",
            "head.lse"
        ]
    );
    assert_eq!(
        operands(&made, "recompute.mlp.norm"),
        ["boundary.mlp.0", "prepare.mlp.gain"]
    );
    assert_eq!(operands(&made, "recompute.mlp.act"), ["recompute.mlp.up"]);
    assert_eq!(operands(&made, "grad.mlp.act.x")[0], "recompute.mlp.up");
    // Dropout and attention draw what their sources drew.
    let attention = |path: &str| made.graph.find(path).unwrap();
    let (of, twin) = (attention("attn.attend"), attention("recompute.attn.attend"));
    let (source, twin) = (made.graph.op(of), made.graph.op(twin));
    assert_eq!(
        (twin.origin, &twin.kind),
        (Origin::Twin { of }, &source.kind)
    );
    assert!(matches!(&twin.kind, OpKind::Attention { key, .. } if key == "attn.attend"));
    // Everything else is as it was.
    let others = |t: &TrainingGraph| -> Vec<String> {
        let ops = t.graph.ops().iter();
        ops.filter(|op| op.pass != Pass::Recompute)
            .map(|op| op.path.clone())
            .collect()
    };
    assert_eq!(others(&made), others(&kept));
    let names = |t: &TrainingGraph| -> Vec<String> {
        let states = t.states.iter().flat_map(|s| [s.read, s.write]);
        states.map(|v| t.graph.value_name(v)).collect()
    };
    assert_eq!(names(&made), names(&kept));
}

#[test]
fn selective_recomputes_what_is_cheap_and_adds_nothing_to_what_is_kept() {
    let kept = model();
    let made = named(&kept, Recompute::Selective);
    assert_eq!(
        twins(&made),
        [
            "recompute.mlp.act before grad.mlp.down.rhs",
            "recompute.mlp.norm before grad.mlp.up.rhs",
        ]
    );
    let (before, after) = (saved(&kept), saved(&made));
    assert!(after.iter().all(|name| before.contains(name)), "{after:?}");
    let gone: Vec<&String> = before.iter().filter(|n| !after.contains(n)).collect();
    assert_eq!(gone, ["mlp.act", "mlp.norm", "mlp.norm:1"]);
}

#[test]
fn single_ops_can_be_fixed() {
    let kept = model();
    let fixed = |op: &Op| match op.path.as_str() {
        "attn.attend" => Some(true),
        "mlp.act" => Some(false),
        _ => None,
    };
    let made = apply(&kept, &choose(&kept, Recompute::Selective, &fixed));
    assert_eq!(
        twins(&made),
        [
            "recompute.attn.attend before grad.attn.out.rhs",
            "recompute.mlp.norm before grad.mlp.up.rhs",
        ]
    );
    assert_eq!(named(&kept, Recompute::None), kept);
}

#[test]
fn what_is_no_activation_of_a_layer_is_refused() {
    let kept = model();
    for path in [
        "tokens",
        "boundary.mlp.0",
        "accumulate.loss",
        "grad.mlp.act.x",
        "prepare.mlp.gain",
    ] {
        let id = kept.graph.find(path).unwrap();
        let error = recompute(&kept, &BTreeSet::from([id])).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "op `{path}` cannot be recomputed: it is no op of the forward pass between two layer boundaries"
            )
        );
    }
}

#[test]
fn random_choices_on_random_graphs_keep_the_invariants() {
    let options = GraphOptions {
        integer_linear: false,
        dropout: true,
        reduce_max: false,
        experts: true,
        images: false,
        state_spaces: false,
        n_layers: 3,
        equal_layers: false,
        blocks_per_layer: 2,
    };
    let mut n_twins = 0;
    for seed in 0..60u64 {
        let kept = trained(&random_graph(seed, &options));
        for policy in [Recompute::Full, Recompute::Selective] {
            n_twins += twins(&named(&kept, policy)).len();
        }
        let mut random = ir::testing::Rng::new(seed);
        let may = kept.graph.iter().filter(|(_, op)| can_recompute(op));
        let chosen: BTreeSet<OpId> = may.map(|(id, _)| id).filter(|_| random.one_in(2)).collect();
        let made = apply(&kept, &chosen);
        // No gradient of its layer reads what is not kept.
        for op in made.graph.ops().iter().filter(|op| op.pass != Pass::F) {
            for &v in &op.inputs {
                let from = made.graph.op(made.graph.value(v).producer);
                let dropped = kept
                    .graph
                    .find(&from.path)
                    .is_some_and(|id| chosen.contains(&id));
                assert!(
                    !dropped || from.layer != op.layer,
                    "`{}` reads `{}`",
                    op.path,
                    from.path
                );
            }
        }
        // The text form knows twins.
        let text = ir::text::print(&made.graph);
        assert_eq!(ir::text::parse(&text).unwrap(), made.graph);
    }
    assert!(n_twins > 500, "{n_twins}");
}
