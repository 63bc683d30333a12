//! Structure of training graphs: which ops there are, where they stand, and their types.
//! Their numbers are checked by the runtime's reference interpreter.
#![allow(clippy::unwrap_used)]

use ir::op::{Binary, Einsum, Init, InputKind, RopeScaling, Unary};
use ir::sharding::ReduceKind;
use ir::training::{StateRole, TrainingGraph, build, problems};
use ir::{
    DType, Dim, Graph, GraphError, LayerId, Op, OpKind, Optimizer, Origin, Pass, Place, Precision,
    Region, Shape, TensorType, TrainSpec, ValueId,
};

const S: u64 = 8;
const V: u64 = 32;
const H: u64 = 4;

fn spec(precision: Precision) -> TrainSpec {
    TrainSpec {
        global_batch: 16,
        sequence: S,
        precision,
        ..TrainSpec::default()
    }
}

/// Writes forward graphs for tests.
struct Forward {
    g: Graph,
    layer: LayerId,
}

impl Forward {
    fn new() -> Self {
        let mut g = Graph::new("test");
        let layer = g.add_layer("l0");
        Forward { g, layer }
    }
    fn next_layer(&mut self) {
        let name = format!("l{}", self.g.layers.len());
        self.layer = self.g.add_layer(name);
    }
    fn op(&mut self, path: &str, kind: OpKind, inputs: &[ValueId]) -> ValueId {
        self.ops(path, kind, inputs)[0]
    }
    fn ops(&mut self, path: &str, kind: OpKind, inputs: &[ValueId]) -> Vec<ValueId> {
        self.g
            .add(kind, inputs, Place::forward(path, self.layer))
            .unwrap()
    }
    fn dot(&mut self, path: &str, einsum: &str, lhs: ValueId, rhs: ValueId) -> ValueId {
        self.op(
            path,
            OpKind::DotGeneral {
                einsum: Einsum::parse(einsum).unwrap(),
            },
            &[lhs, rhs],
        )
    }
    fn add(&mut self, path: &str, a: ValueId, b: ValueId) -> ValueId {
        self.op(path, OpKind::Binary { f: Binary::Add }, &[a, b])
    }
    fn param(&mut self, path: &str, lens: &[u64]) -> ValueId {
        let place = Place {
            path: path.into(),
            pass: Pass::Update,
            region: Region::StepBegin,
            layer: Some(self.layer),
        };
        let kind = OpKind::State {
            init: Init::Normal { std: 0.02 },
            decay: lens.len() >= 2,
        };
        self.g
            .add_source(kind, TensorType::new(DType::F32, Shape::fixed(lens)), place)
            .unwrap()
    }
    fn input(&mut self, path: &str, kind: InputKind) -> ValueId {
        let ty = TensorType::new(DType::I32, Shape::batched(&[S]));
        self.g
            .add_source(OpKind::Input { kind }, ty, Place::forward(path, self.layer))
            .unwrap()
    }
    /// Embeds tokens with the parameter `wte`: `[B, S, H]`.
    fn embed(&mut self) -> ValueId {
        let tokens = self.input("tokens", InputKind::Tokens);
        let wte = self.param("wte", &[V, H]);
        self.op("embed", OpKind::Embedding, &[wte, tokens])
    }
    /// Summed cross entropy of `[B, S, V]` logits.
    fn cross_entropy(&mut self, logits: ValueId) -> ValueId {
        let labels = self.input("labels", InputKind::Labels);
        let lse = self.op("lse", OpKind::LogSumExp, &[logits]);
        let nll = self.op("nll", OpKind::CrossEntropy, &[logits, lse, labels]);
        self.op(
            "nll_sum",
            OpKind::Reduce {
                kind: ReduceKind::Sum,
                dims: vec![0, 1],
            },
            &[nll],
        )
    }
    /// The graph with the sum of all elements of `x` as its loss.
    fn ending_in_sum(mut self, x: ValueId) -> Graph {
        let dims = (0..self.g.ty(x).shape.rank()).collect();
        let loss = self.op(
            "total",
            OpKind::Reduce {
                kind: ReduceKind::Sum,
                dims,
            },
            &[x],
        );
        self.g.outputs = vec![loss];
        self.g
    }
}

/// Embedding, a layer with Q/K-like fan-out and a residual, tied output embedding:
///
/// ```text
/// l0: x = wte[tokens]     l1: h = x + gelu(x wa) * (x wb) + b     l2: h wte^T -> loss
/// ```
fn tied_mlp() -> Graph {
    let mut f = Forward::new();
    let x = f.embed();
    f.next_layer();
    let wa = f.param("wa", &[H, H]);
    let wb = f.param("wb", &[H, H]);
    let bias = f.param("bias", &[H]);
    let a = f.dot("a", "bsh,hk->bsk", x, wa);
    let b = f.dot("b", "bsh,hk->bsk", x, wb);
    let act = f.op("act", OpKind::Unary { f: Unary::GeluTanh }, &[a]);
    let gated = f.op("gated", OpKind::Binary { f: Binary::Mul }, &[act, b]);
    let h = f.add("residual", x, gated);
    let h = f.add("biased", h, bias);
    f.next_layer();
    let wte = f.g.op(f.g.find("wte").unwrap()).outputs[0];
    let logits = f.dot("head", "bsh,vh->bsv", h, wte);
    let loss = f.cross_entropy(logits);
    f.g.outputs = vec![loss];
    f.g
}

fn trained(forward: &Graph, spec: &TrainSpec) -> TrainingGraph {
    let t = build(forward, spec).unwrap();
    assert_eq!(problems(&t), Vec::<String>::new());
    t
}

fn op<'a>(t: &'a TrainingGraph, path: &str) -> &'a Op {
    t.graph.op(t
        .graph
        .find(path)
        .unwrap_or_else(|| panic!("no op `{path}` among {:#?}", paths(t, ""))))
}

fn paths(t: &TrainingGraph, prefix: &str) -> Vec<String> {
    t.graph
        .ops()
        .iter()
        .map(|op| op.path.clone())
        .filter(|p| p.starts_with(prefix))
        .collect()
}

fn operands(t: &TrainingGraph, path: &str) -> Vec<String> {
    op(t, path)
        .inputs
        .iter()
        .map(|&v| t.graph.value_name(v))
        .collect()
}

fn types(t: &TrainingGraph, path: &str) -> Vec<String> {
    t.graph
        .result_types(op(t, path))
        .iter()
        .map(|ty| ty.to_string())
        .collect()
}

#[test]
fn order_of_the_whole_step() {
    let t = trained(&tied_mlp(), &spec(Precision::F32));
    let expected = "
        wte prepare.wte wa prepare.wa wb prepare.wb bias prepare.bias
        moment1.wte moment2.wte moment1.wa moment2.wa moment1.wb moment2.wb moment1.bias moment2.bias
        tokens embed layout.a.0 a b act gated residual biased head labels lse nll nll_sum loss accumulate.loss
        grad.seed grad.loss.x grad.nll_sum.x grad.nll.logits
        layout.grad.head.lhs.0 grad.head.lhs grad.head.rhs accumulate.head.1
        grad.biased.rhs accumulate.biased.1
        grad.gated.lhs grad.gated.rhs grad.act.x
        layout.grad.b.lhs.0 grad.b.lhs grad.embed.sum1 layout.grad.b.rhs.0 grad.b.rhs accumulate.b.1
        layout.grad.a.lhs.0 grad.a.lhs grad.embed.sum2 grad.a.rhs accumulate.a.1
        grad.embed.weight accumulate.embed.0
        grad_sum.wte sum_squares.wte sum_squares.wa sum_squares.wb sum_squares.bias
        global_norm loss_scale.one clip_coefficient update.wte update.wa update.wb update.bias
    ";
    assert_eq!(
        paths(&t, ""),
        expected.split_whitespace().collect::<Vec<_>>()
    );
}

#[test]
fn uses_of_a_layer_have_one_accumulator() {
    let mut f = Forward::new();
    let x = f.embed();
    f.next_layer();
    let w = f.param("w", &[H, H]);
    let first = f.dot("first", "bsh,hk->bsk", x, w);
    let second = f.dot("second", "bsh,hk->bsk", first, w);
    // Nothing reads it, so that its use of the weight has no gradient.
    f.dot("dead", "bsh,hk->bsk", second, w);
    let third = f.dot("third", "bsh,hk->bsk", second, w);
    f.next_layer();
    let elsewhere = f.dot("elsewhere", "bsh,hk->bsk", third, w);
    let t = trained(&f.ending_in_sum(elsewhere), &spec(Precision::F32));
    let accumulators = [
        "accumulate.loss",
        "accumulate.elsewhere.1",
        "accumulate.embed.0",
        "accumulate.first.1",
    ];
    assert_eq!(paths(&t, "accumulate."), accumulators);
    let of_second = ["grad.third.rhs", "grad.second.rhs"];
    assert_eq!(operands(&t, "grad_uses.second.1"), of_second);
    let of_first = ["grad_uses.second.1", "grad.first.rhs"];
    assert_eq!(operands(&t, "grad_uses.first.1"), of_first);
    assert_eq!(operands(&t, "accumulate.first.1"), ["grad_uses.first.1"]);
    let of_layers = ["accumulate.first.1", "accumulate.elsewhere.1"];
    assert_eq!(operands(&t, "grad_sum.w"), of_layers);
}

#[test]
fn tied_parameter_has_one_accumulator_per_use() {
    let t = trained(&tied_mlp(), &spec(Precision::F32));
    let mut accumulators = paths(&t, "accumulate.");
    accumulators.sort();
    assert_eq!(
        accumulators,
        [
            "accumulate.a.1",
            "accumulate.b.1",
            "accumulate.biased.1",
            "accumulate.embed.0",
            "accumulate.head.1",
            "accumulate.loss"
        ]
    );
    assert_eq!(op(&t, "accumulate.embed.0").layer, Some(LayerId(0)));
    assert_eq!(op(&t, "accumulate.head.1").layer, Some(LayerId(2)));
    // Use order, in the layer that owns the parameter.
    assert_eq!(
        operands(&t, "grad_sum.wte"),
        ["accumulate.embed.0", "accumulate.head.1"]
    );
    assert_eq!(op(&t, "grad_sum.wte").layer, Some(LayerId(0)));
    // Its norm counts once, and parameters stand in graph order.
    assert_eq!(
        operands(&t, "global_norm"),
        [
            "sum_squares.wte",
            "sum_squares.wa",
            "sum_squares.wb",
            "sum_squares.bias"
        ]
    );
    assert_eq!(
        operands(&t, "update.wte"),
        [
            "wte",
            "grad_sum.wte",
            "moment1.wte",
            "moment2.wte",
            "clip_coefficient"
        ]
    );
    assert_eq!(
        operands(&t, "update.wa"),
        [
            "wa",
            "accumulate.a.1",
            "moment1.wa",
            "moment2.wa",
            "clip_coefficient"
        ]
    );
}

#[test]
fn fan_out_is_added_in_the_consumers_layer() {
    let t = trained(&tied_mlp(), &spec(Precision::F32));
    // x is used by a, b and the residual: three uses, two additions, last use first.
    assert_eq!(
        operands(&t, "grad.embed.sum1"),
        ["grad.head.lhs", "grad.b.lhs"]
    );
    assert_eq!(
        operands(&t, "grad.embed.sum2"),
        ["grad.embed.sum1", "grad.a.lhs"]
    );
    assert_eq!(op(&t, "grad.embed.sum2").layer, Some(LayerId(1)));
    assert_eq!(
        operands(&t, "grad.embed.weight"),
        ["tokens", "grad.embed.sum2"]
    );
    assert_eq!(op(&t, "grad.embed.weight").layer, Some(LayerId(0)));
}

#[test]
fn passes_and_einsums_of_gradients() {
    let t = trained(&tied_mlp(), &spec(Precision::F32));
    let einsum = |path: &str| match &op(&t, path).kind {
        OpKind::DotGeneral { einsum } => einsum.to_string(),
        other => panic!("{other:?}"),
    };
    assert_eq!(
        (einsum("grad.head.lhs"), einsum("grad.head.rhs")),
        ("bsv,vh->bsh".into(), "bsh,bsv->vh".into())
    );
    assert_eq!(
        (types(&t, "grad.head.lhs"), types(&t, "grad.head.rhs")),
        (vec!["f32[B,8,4]".into()], vec!["f32[32,4]".into()])
    );
    let pass = |p: &str| op(&t, p).pass;
    assert_eq!(
        [
            "grad.seed",
            "grad.nll.logits",
            "grad.head.lhs",
            "grad.embed.sum1"
        ]
        .map(pass),
        [Pass::BI; 4]
    );
    assert_eq!(
        [
            "grad.head.rhs",
            "grad.biased.rhs",
            "grad.embed.weight",
            "accumulate.a.1"
        ]
        .map(pass),
        [Pass::BW; 4]
    );
}

#[test]
fn matmuls_share_layouts() {
    let t = trained(&tied_mlp(), &spec(Precision::F32));
    assert_eq!(
        (operands(&t, "a")[0].as_str(), operands(&t, "b")[0].as_str()),
        ("layout.a.0", "layout.a.0")
    );
    assert_eq!(operands(&t, "residual")[0], "embed");
    assert_eq!(operands(&t, "layout.a.0"), ["embed"]);
    assert_eq!(
        (op(&t, "layout.a.0").pass, op(&t, "layout.a.0").layer),
        (Pass::F, Some(LayerId(1)))
    );
    // The gradient for input and weight share dy; both weight gradients share x again.
    assert_eq!(operands(&t, "grad.a.lhs")[0], "layout.grad.a.lhs.0");
    assert_eq!(
        operands(&t, "grad.a.rhs"),
        ["layout.grad.b.rhs.0", "layout.grad.a.lhs.0"]
    );
    assert_eq!(
        operands(&t, "grad.b.rhs"),
        ["layout.grad.b.rhs.0", "layout.grad.b.lhs.0"]
    );
    assert_eq!(
        (
            op(&t, "layout.grad.a.lhs.0").pass,
            op(&t, "layout.grad.b.rhs.0").pass
        ),
        (Pass::BI, Pass::BW)
    );
    let mut layouts = paths(&t, "layout.");
    layouts.sort();
    assert_eq!(
        layouts,
        [
            "layout.a.0",
            "layout.grad.a.lhs.0",
            "layout.grad.b.lhs.0",
            "layout.grad.b.rhs.0",
            "layout.grad.head.lhs.0"
        ]
    );
}

#[test]
fn bf16_computes_in_bf16_and_accumulates_in_f32() {
    let t = trained(&tied_mlp(), &spec(Precision::Bf16));
    assert_eq!(op(&t, "cast.wa").kind, OpKind::Cast { dtype: DType::Bf16 });
    let dtypes = |paths: &[&str]| -> Vec<String> {
        paths
            .iter()
            .flat_map(|p| types(&t, p))
            .map(|ty| ty.split('[').next().unwrap().into())
            .collect()
    };
    let bf16 = [
        "cast.wa",
        "embed",
        "a",
        "act",
        "biased",
        "head",
        "grad.nll.logits",
        "grad.head.lhs",
        "grad.head.rhs",
        "grad.embed.weight",
        "grad.embed.sum1",
    ];
    assert_eq!(dtypes(&bf16), ["bf16"; 11]);
    let f32s = [
        "wa",
        "moment1.wa",
        "lse",
        "nll",
        "loss",
        "grad.nll_sum.x",
        "accumulate.a.1",
        "accumulate.loss",
        "grad_sum.wte",
        "global_norm",
    ];
    assert_eq!(dtypes(&f32s), ["f32"; 10]);
    assert_eq!(types(&t, "update.wa"), ["f32[4,4]"; 3]);
}

#[test]
fn f32_prepares_with_a_layout() {
    let t = trained(&tied_mlp(), &spec(Precision::F32));
    assert_eq!(op(&t, "prepare.wa").kind, OpKind::Layout);
    assert_eq!(
        operands(&t, "clip_coefficient"),
        ["global_norm", "loss_scale.one"]
    );
    assert_eq!(op(&t, "loss_scale.one").layer, None);
    assert_eq!(
        op(&t, "loss").kind,
        OpKind::Unary {
            f: Unary::Scale { by: 1.0 / 128.0 }
        }
    );
    assert_eq!(op(&t, "accumulate.loss").layer, Some(LayerId(2)));
    assert_eq!(t.graph.value_name(t.loss), "accumulate.loss");
    assert_eq!(
        t.grad_norm.map(|v| t.graph.value_name(v)).as_deref(),
        Some("global_norm")
    );
}

#[test]
fn f16_scales_the_loss() {
    let t = trained(&tied_mlp(), &spec(Precision::F16));
    assert_eq!(operands(&t, "grad.loss.x"), ["loss_scale.value"]);
    assert_eq!(
        op(&t, "loss_scale.value").kind,
        OpKind::Unary {
            f: Unary::Scale { by: 65536.0 }
        }
    );
    assert_eq!(
        operands(&t, "clip_coefficient"),
        ["global_norm", "loss_scale.value"]
    );
    assert_eq!(
        operands(&t, "update_loss_scale"),
        [
            "loss_scale.value",
            "loss_scale.good_steps",
            "loss_scale.updates",
            "global_norm"
        ]
    );
    assert_eq!(
        operands(&t, "update.wa")[4..],
        ["clip_coefficient", "loss_scale.updates"]
    );
    // Without loss scaling every step is an update.
    let bf16 = trained(&tied_mlp(), &spec(Precision::Bf16));
    assert_eq!(operands(&bf16, "update.wa")[4..], ["clip_coefficient"]);
    let scalars: Vec<(String, String)> = t
        .states
        .iter()
        .filter(|s| s.role == StateRole::Scalar)
        .map(|s| (s.path.clone(), t.graph.value_name(s.write)))
        .collect();
    let expected = [
        ("loss_scale", "loss_scale.next"),
        ("loss_scale.good_steps", "update_loss_scale:1"),
        ("loss_scale.updates", "update_loss_scale:2"),
    ];
    assert_eq!(
        scalars,
        expected.map(|(a, b)| (a.to_string(), b.to_string()))
    );
    assert!(
        [
            "loss_scale",
            "loss_scale.value",
            "loss_scale.updates",
            "update_loss_scale",
            "loss_scale.next"
        ]
        .iter()
        .all(|p| op(&t, p).layer.is_none())
    );
    assert_eq!(types(&t, "grad.nll.logits"), ["f16[B,8,32]"]);
}

#[test]
fn states_are_listed_in_order_with_their_next_values() {
    let t = trained(&tied_mlp(), &spec(Precision::F32));
    let listed: Vec<String> = t
        .states
        .iter()
        .map(|s| {
            format!(
                "{} {:?} {} {}",
                s.path,
                s.role,
                s.param,
                t.graph.value_name(s.write)
            )
        })
        .collect();
    assert_eq!(listed.len(), 12);
    assert_eq!(listed[0], "wte Parameter wte update.wte");
    assert_eq!(listed[3], "bias Parameter bias update.bias");
    assert_eq!(listed[4], "moment1.wte Moment1 wte update.wte:1");
    assert_eq!(listed[5], "moment2.wte Moment2 wte update.wte:2");
    let decays = |p: &str| matches!(op(&t, p).kind, OpKind::AdamW { weight_decay, .. } if weight_decay > 0.0);
    assert_eq!((decays("update.wa"), decays("update.bias")), (true, false));
}

#[test]
fn sgd_has_one_moment() {
    let sgd = TrainSpec {
        optimizer: Optimizer::Sgd {
            momentum: 0.9,
            weight_decay: 0.01,
        },
        clip_norm: None,
        ..spec(Precision::F32)
    };
    let t = trained(&tied_mlp(), &sgd);
    assert_eq!(
        operands(&t, "update.wb"),
        ["wb", "accumulate.b.1", "moment1.wb", "clip_coefficient"]
    );
    assert_eq!(
        op(&t, "update.wb").kind,
        OpKind::Sgd {
            momentum: 0.9,
            weight_decay: 0.01
        }
    );
    assert_eq!(
        op(&t, "clip_coefficient").kind,
        OpKind::ClipCoefficient { max_norm: None }
    );
    assert_eq!(t.states.len(), 8);
}

/// Gradient ops (name and result types) of one op kind applied to `x: [B, S, H]` that
/// depends on a parameter.
fn gradient_of(make: impl Fn(&mut Forward, ValueId) -> ValueId) -> Vec<String> {
    let forward = {
        let mut f = Forward::new();
        let x = f.embed();
        let y = make(&mut f, x);
        f.ending_in_sum(y)
    };
    for precision in [Precision::Bf16, Precision::F16] {
        trained(&forward, &spec(precision));
    }
    let t = trained(&forward, &spec(Precision::F32));
    let of_test = |op: &&Op| op.path.starts_with("grad.t") && !op.path.starts_with("grad.total");
    let describe = |op: &Op| {
        format!(
            "{} {} {:?} {}",
            op.path,
            op.kind.name(),
            op.pass,
            t.graph.ty(op.outputs[0])
        )
    };
    t.graph.ops().iter().filter(of_test).map(describe).collect()
}

#[test]
fn gradients_of_elementwise_functions() {
    for (f, expected) in [
        (Unary::Neg, vec!["x unary"]),
        (Unary::Scale { by: 3.0 }, vec!["x unary"]),
        (Unary::GeluErf, vec!["x binary"]),
        (Unary::GeluTanh, vec!["x binary"]),
        (Unary::Silu, vec!["x binary"]),
        (Unary::Relu, vec!["x binary"]),
        (Unary::Exp, vec!["x binary"]),
        (
            Unary::Tanh,
            vec!["x_square unary", "x_mul binary", "x binary"],
        ),
        (Unary::Square, vec!["x_twice unary", "x binary"]),
        (
            Unary::Sigmoid,
            vec!["x_mul binary", "x_square binary", "x binary"],
        ),
    ] {
        let got = gradient_of(|g, x| g.op("t", OpKind::Unary { f }, &[x]));
        let expected: Vec<String> = expected
            .iter()
            .map(|e| format!("grad.t.{e} BI f32[B,8,4]"))
            .collect();
        assert_eq!(got, expected, "{f:?}");
    }
}

#[test]
fn gradients_of_binary_ops_reduce_broadcast_operands() {
    let with = |f: Binary, lens: &'static [u64]| {
        gradient_of(move |g, x| {
            let w = g.param("w", lens);
            g.op("t", OpKind::Binary { f }, &[x, w])
        })
    };
    assert_eq!(with(Binary::Add, &[H]), ["grad.t.rhs reduce BW f32[4]"]);
    assert_eq!(
        with(Binary::Add, &[S, H]),
        ["grad.t.rhs reduce BW f32[8,4]"]
    );
    assert_eq!(
        with(Binary::Sub, &[H]),
        [
            "grad.t.rhs_neg unary BW f32[B,8,4]",
            "grad.t.rhs reduce BW f32[4]"
        ]
    );
    assert_eq!(
        with(Binary::Mul, &[H]),
        [
            "grad.t.lhs binary BI f32[B,8,4]",
            "grad.t.rhs_mul binary BW f32[B,8,4]",
            "grad.t.rhs reduce BW f32[4]"
        ]
    );
    assert_eq!(
        with(Binary::Mul, &[]),
        [
            "grad.t.lhs binary BI f32[B,8,4]",
            "grad.t.rhs_mul binary BW f32[B,8,4]",
            "grad.t.rhs reduce BW f32[]"
        ]
    );
    // The same value twice: both uses count.
    let square = gradient_of(|g, x| g.op("t", OpKind::Binary { f: Binary::Mul }, &[x, x]));
    assert_eq!(
        square,
        [
            "grad.t.lhs binary BI f32[B,8,4]",
            "grad.t.rhs binary BI f32[B,8,4]"
        ]
    );
}

#[test]
fn gradients_of_shape_ops() {
    let one = |kind: OpKind| gradient_of(move |g, x| g.op("t", kind.clone(), &[x]));
    assert_eq!(one(OpKind::Layout), ["grad.t.x layout BI f32[B,8,4]"]);
    assert_eq!(
        one(OpKind::Cast { dtype: DType::Bf16 }),
        ["grad.t.x cast BI f32[B,8,4]"]
    );
    assert_eq!(
        one(OpKind::Broadcast {
            leading: vec![Dim::Fixed(3)]
        }),
        ["grad.t.x reduce BI f32[B,8,4]"]
    );
    assert_eq!(
        one(OpKind::Reshape {
            shape: Shape::batched(&[S, 2, 2]).0
        }),
        ["grad.t.x reshape BI f32[B,8,4]"]
    );
    assert_eq!(
        one(OpKind::Transpose {
            perm: vec![0, 2, 1]
        }),
        ["grad.t.x transpose BI f32[B,8,4]"]
    );
    assert_eq!(
        one(OpKind::Transpose {
            perm: vec![2, 0, 1]
        }),
        ["grad.t.x transpose BI f32[B,8,4]"]
    );
    assert_eq!(
        one(OpKind::Slice {
            dim: 1,
            start: 2,
            len: 3
        }),
        ["grad.t.x pad BI f32[B,8,4]"]
    );
    assert_eq!(
        one(OpKind::Pad {
            dim: 2,
            start: 1,
            len: 9
        }),
        ["grad.t.x slice BI f32[B,8,4]"]
    );
    let sum = |dims: &[usize]| {
        one(OpKind::Reduce {
            kind: ReduceKind::Sum,
            dims: dims.to_vec(),
        })
    };
    assert_eq!(sum(&[0, 1]), ["grad.t.x broadcast BI f32[B,8,4]"]);
    assert_eq!(
        sum(&[1]),
        [
            "grad.t.x_broadcast broadcast BI f32[8,B,4]",
            "grad.t.x transpose BI f32[B,8,4]"
        ]
    );
    assert_eq!(
        sum(&[0, 2]),
        [
            "grad.t.x_broadcast broadcast BI f32[B,4,8]",
            "grad.t.x transpose BI f32[B,8,4]"
        ]
    );
}

#[test]
fn gradients_of_unstack_and_stack() {
    let unstack = OpKind::Unstack { dim: 2 };
    let parts = gradient_of(|g, x| {
        let parts = g.ops("t", unstack.clone(), &[x]);
        let used_twice = g.add("u", parts[1], parts[1]);
        g.add("w", used_twice, parts[3])
    });
    let expected = [
        "grad.t.r1-sum1 binary BI f32[B,8]",
        "grad.t.zero0 unary BI f32[B,8]",
        "grad.t.zero2 unary BI f32[B,8]",
        "grad.t.x stack BI f32[B,8,4]",
    ];
    assert_eq!(parts, expected);
    assert_eq!(
        gradient_of(|g, x| g.op("t", OpKind::Stack { dim: 1 }, &[x, x])),
        ["grad.t.x unstack BI f32[B,8,4]"]
    );
}

#[test]
fn gradients_of_normalisations() {
    let layer_norm = gradient_of(|g, x| {
        let (gamma, beta) = (g.param("gamma", &[H]), g.param("beta", &[H]));
        g.op("t", OpKind::LayerNorm { eps: 1e-5 }, &[x, gamma, beta])
    });
    assert_eq!(
        layer_norm,
        [
            "grad.t.x layer_norm_grad_input BI f32[B,8,4]",
            "grad.t.weight layer_norm_grad_weight BW f32[4]"
        ]
    );
    let rms_norm = gradient_of(|g, x| {
        let gamma = g.param("gamma", &[H]);
        g.op("t", OpKind::RmsNorm { eps: 1e-5 }, &[x, gamma])
    });
    assert_eq!(
        rms_norm,
        [
            "grad.t.x rms_norm_grad_input BI f32[B,8,4]",
            "grad.t.weight rms_norm_grad_weight BW f32[4]"
        ]
    );
}

#[test]
fn gradients_of_attention_rotary_and_dropout() {
    let attention = gradient_of(|g, x| {
        let w = g.param("w", &[H, 2, 3, 4]);
        let q = g.dot("q", "bsh,hkgd->bskgd", x, w);
        let wk = g.param("wk", &[H, 2, 4]);
        let k = g.dot("k", "bsh,hkd->bskd", x, wk);
        let rotary = OpKind::Rotary {
            theta: 1e4,
            scaling: RopeScaling::None,
            inverse: false,
            part: Some(2),
            order: Default::default(),
        };
        let q = g.op("t.rotary", rotary, &[q]);
        let o = g.op(
            "t.attention",
            OpKind::Attention {
                scale: 0.5,
                dropout: 0.1,
                key: String::new(),
                order: Default::default(),
                keys: Default::default(),
                bounds: Default::default(),
            },
            &[q, k, k],
        );
        g.op(
            "t.dropout",
            OpKind::Dropout {
                p: 0.1,
                key: "t.dropout".into(),
                order: Default::default(),
            },
            &[o],
        )
    });
    let expected = [
        "grad.t.dropout.x dropout BI f32[B,8,2,3,4]",
        "grad.t.attention.qkv attention_grad BI f32[B,8,2,3,4]",
        "grad.t.rotary.x rotary BI f32[B,8,2,3,4]",
    ];
    assert_eq!(attention, expected);
}

#[test]
fn random_keys_and_rotation_of_the_backward_pass() {
    let mut f = Forward::new();
    let x = f.embed();
    let w = f.param("w", &[H, 2, 4]);
    let k = f.dot("k", "bsh,hkd->bskd", x, w);
    let q = f.op(
        "rotary",
        OpKind::Rotary {
            theta: 1e4,
            scaling: RopeScaling::None,
            inverse: false,
            part: Some(2),
            order: Default::default(),
        },
        &[k],
    );
    let o = f.op(
        "attn",
        OpKind::Attention {
            scale: 0.5,
            dropout: 0.1,
            key: String::new(),
            order: Default::default(),
            keys: Default::default(),
            bounds: Default::default(),
        },
        &[q, k, k],
    );
    let o = f.op(
        "drop",
        OpKind::Dropout {
            p: 0.1,
            key: "drop".into(),
            order: Default::default(),
        },
        &[o],
    );
    let t = trained(&f.ending_in_sum(o), &spec(Precision::F32));
    assert_eq!(op(&t, "grad.drop.x").kind, op(&t, "drop").kind);
    assert_eq!(
        op(&t, "grad.attn.qkv").kind,
        OpKind::AttentionGrad {
            scale: 0.5,
            dropout: 0.1,
            key: "attn".into(),
            order: Default::default(),
            keys: Default::default(),
            bounds: Default::default(),
        }
    );
    assert_eq!(
        operands(&t, "grad.attn.qkv"),
        ["rotary", "k", "k", "attn", "attn:1", "grad.drop.x"]
    );
    assert!(matches!(
        op(&t, "grad.rotary.x").kind,
        OpKind::Rotary {
            inverse: true,
            part: Some(2),
            ..
        }
    ));
    // k is used as key, as value and through the rotation.
    assert_eq!(
        operands(&t, "grad.k.sum1"),
        ["grad.attn.qkv:1", "grad.attn.qkv:2"]
    );
    assert_eq!(
        operands(&t, "grad.k.sum2"),
        ["grad.k.sum1", "grad.rotary.x"]
    );
}

#[test]
fn weights_that_are_computed_have_weight_gradients() {
    let mut f = Forward::new();
    let x = f.embed();
    let w = f.param("w", &[3, H]);
    let turned = f.op("turned", OpKind::Transpose { perm: vec![1, 0] }, &[w]);
    let y = f.dot("y", "bsh,hk->bsk", x, turned);
    let t = trained(&f.ending_in_sum(y), &spec(Precision::Bf16));
    assert_eq!(
        (op(&t, "grad.y.rhs").pass, op(&t, "grad.turned.x").pass),
        (Pass::BW, Pass::BW)
    );
    assert_eq!(operands(&t, "accumulate.turned.0"), ["grad.turned.x"]);
    // A loss that came out in bf16 is summed up in f32.
    assert_eq!(
        (types(&t, "loss.cast"), types(&t, "loss")),
        (vec!["f32[]".to_string()], vec!["f32[]".to_string()])
    );
}

#[test]
fn constants_take_the_compute_dtype_and_statistics_stay_f32() {
    let mut f = Forward::new();
    let x = f.embed();
    let half = f.op("half", OpKind::Constant { value: 0.5 }, &[]);
    let y = f.op("y", OpKind::Binary { f: Binary::Mul }, &[x, half]);
    let lse = f.op("lse", OpKind::LogSumExp, &[y]);
    let column = f.op(
        "column",
        OpKind::Reduce {
            kind: ReduceKind::Sum,
            dims: vec![2],
        },
        &[y],
    );
    // The statistics are f32, so the sum is; `lse` is a dead end for gradients only.
    let _ = f.add("mixed", lse, column);
    let t = trained(&f.ending_in_sum(column), &spec(Precision::Bf16));
    assert_eq!(
        (types(&t, "y.cast.1"), types(&t, "y")),
        (vec!["bf16[]".to_string()], vec!["bf16[B,8,4]".to_string()])
    );
    assert_eq!(
        (operands(&t, "mixed"), types(&t, "mixed")),
        (
            vec!["lse".to_string(), "mixed.cast.1".to_string()],
            vec!["f32[B,8]".to_string()]
        )
    );
}

fn refused(forward: &Graph) -> String {
    match build(forward, &spec(Precision::F32)) {
        Err(GraphError::Differentiate(why)) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_cannot_be_differentiated_is_named() {
    let with = |make: &dyn Fn(&mut Forward, ValueId) -> ValueId| {
        let mut f = Forward::new();
        let x = f.embed();
        let y = make(&mut f, x);
        refused(&f.ending_in_sum(y))
    };
    let max = with(&|f, x| {
        f.op(
            "top",
            OpKind::Reduce {
                kind: ReduceKind::Max,
                dims: vec![2],
            },
            &[x],
        )
    });
    assert!(max.contains("`top` (reduce)"), "{max}");
    let lse = with(&|f, x| f.op("lse", OpKind::LogSumExp, &[x]));
    assert!(lse.contains("`lse` (log_sum_exp)"), "{lse}");
    let statistic = with(&|f, x| {
        let gamma = f.param("gamma", &[H]);
        f.ops("norm", OpKind::RmsNorm { eps: 1e-5 }, &[x, gamma])[1]
    });
    assert!(
        statistic.contains("`norm`") && statistic.contains("statistics"),
        "{statistic}"
    );
    let other_lse = with(&|f, x| {
        let labels = f.input("labels", InputKind::Labels);
        let y = f.op("y", OpKind::Unary { f: Unary::Exp }, &[x]);
        let lse = f.op("lse", OpKind::LogSumExp, &[y]);
        f.op("nll", OpKind::CrossEntropy, &[x, lse, labels])
    });
    assert!(other_lse.contains("`nll`"), "{other_lse}");
    let unused = with(&|f, x| {
        f.param("spare", &[3]);
        x
    });
    assert!(unused.contains("`spare`"), "{unused}");
}

#[test]
fn wrong_losses_and_inputs_are_named() {
    let mut g = tied_mlp();
    g.outputs = vec![g.op(g.find("nll").unwrap()).outputs[0]];
    assert!(refused(&g).contains("expected a scalar"));
    g.outputs = vec![];
    assert!(refused(&g).contains("0 outputs"));
    let longer = TrainSpec {
        sequence: 2 * S,
        ..spec(Precision::F32)
    };
    let Err(GraphError::Differentiate(why)) = build(&tied_mlp(), &longer) else {
        panic!("accepted")
    };
    assert!(why.contains("tokens") && why.contains("16"), "{why}");
}

#[test]
fn names_of_the_models_ops_stay_and_others_give_way() {
    let mut taken = Forward::new();
    let x = taken.embed();
    let y = taken.op("loss", OpKind::Layout, &[x]);
    let z = taken.op("loss-2", OpKind::Layout, &[y]);
    let t = trained(&taken.ending_in_sum(z), &spec(Precision::F32));
    let named = |path: &str| (&op(&t, path).kind, op(&t, path).origin);
    assert_eq!(named("loss"), (&OpKind::Layout, Origin::Forward));
    assert_eq!(named("loss-2"), (&OpKind::Layout, Origin::Forward));
    assert_eq!(named("loss-3").1, Origin::Loss);
    assert_eq!(operands(&t, "accumulate.loss"), ["loss-3"]);
}

#[test]
fn values_have_names_of_their_own() {
    let split = OpKind::Unstack { dim: 1 };
    let both = |first: &str, second: &str| {
        let mut g = Forward::new();
        let x = g.embed();
        let place = |path: &str| Place::forward(path, LayerId(0));
        g.g.add(split.clone(), &[x], place(first)).unwrap();
        g.g.add(split.clone(), &[x], place(second)).map(|_| ())
    };
    for (first, second) in [("x", "x:1"), ("x:1", "x"), ("x", "x:7")] {
        let said = both(first, second).unwrap_err().to_string();
        let expected =
            format!("op path `{second}` and another op's would give two results one name");
        assert_eq!(said, expected);
    }
    for (first, second) in [("x", "x:0"), ("x", "x:8"), ("x:a", "x"), ("x:1", "x:1:0")] {
        both(first, second).unwrap();
    }
}

#[test]
fn problems_are_found() {
    let good = trained(&tied_mlp(), &spec(Precision::F32));
    let mut t = good.clone();
    t.states[0].write = t.states[0].read;
    assert!(
        problems(&t)
            .iter()
            .any(|p| p.contains("in StepBegin, expected StepEnd"))
    );
    let mut t = good.clone();
    t.states.remove(2);
    assert!(
        problems(&t)
            .iter()
            .any(|p| p.contains("`wb` is not listed"))
    );
    let mut t = good.clone();
    t.grad_norm = Some(t.loss);
    assert_eq!(problems(&t).len(), 1);
    // A microbatch value read at the end of the step, in a region out of order.
    let mut t = good;
    let logits = t.graph.op(t.graph.find("head").unwrap()).outputs[0];
    let end = |path: &str, region| Place {
        path: path.into(),
        pass: Pass::Update,
        region,
        layer: Some(LayerId(0)),
    };
    t.graph
        .add(OpKind::SumSquares, &[logits], end("late", Region::StepEnd))
        .unwrap();
    t.graph
        .add(
            OpKind::SumSquares,
            &[logits],
            end("later", Region::StepBegin),
        )
        .unwrap();
    let found = problems(&t);
    assert!(
        found
            .iter()
            .any(|p| p.contains("`late` reads `head`: only accumulated values")),
        "{found:?}"
    );
    assert!(
        found
            .iter()
            .any(|p| p.contains("`later` of StepBegin stands behind")),
        "{found:?}"
    );
}

/// Inference is the forward part of the training graph: the same ops under the same paths, parameters
/// that no step writes and that rest in the type they are computed in.
#[test]
fn inference_is_the_forward_pass() {
    for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
        let train = spec(precision);
        let inference = TrainSpec {
            task: ir::Task::Inference,
            ..train.clone()
        };
        let (t, i) = (
            trained(&tied_mlp(), &train),
            trained(&tied_mlp(), &inference),
        );
        assert_eq!(problems(&i), [""; 0], "{precision:?}");
        let forward = |t: &TrainingGraph| -> Vec<(String, OpKind)> {
            let ops = t.graph.ops().iter().filter(|op| op.pass == Pass::F);
            ops.map(|op| (op.path.clone(), op.kind.clone())).collect()
        };
        assert_eq!(forward(&t), forward(&i));
        let is_update = |op: &&ir::Op| op.region == Region::StepEnd;
        assert_eq!(i.graph.ops().iter().filter(is_update).count(), 0);
        assert_eq!((i.grad_norm, i.graph.outputs.len()), (None, 1));
        for s in &i.states {
            assert_eq!((s.read, s.role), (s.write, StateRole::Parameter));
            assert_eq!(i.graph.ty(s.read).dtype, precision.compute());
        }
    }
}

#[test]
fn dropout_is_of_training_alone() {
    let spec = TrainSpec {
        task: ir::Task::Inference,
        dropout: 0.1,
        ..TrainSpec::default()
    };
    assert_eq!(spec.problems(), ["dropout is 0.1, expected 0 in inference"]);
}
