//! Graphs whose layers are known, with their declarations erased; random graphs against the
//! definition of a place.
#![allow(clippy::unwrap_used)] // A test may stop at what it does not expect.

use super::*;
use import::{BuildOptions, ModelConfig, model_graph};
use ir::op::{Binary, Init, InputKind, OpKind, Unary};
use ir::{DType, Pass, ReduceKind, Region, Shape, TensorType, TrainSpec, ValueId};
use std::collections::BTreeSet;

const MAX: usize = 400;

fn gpt2(n_layers: u64) -> Graph {
    let config = format!(
        r#"{{"model_type": "gpt2", "n_layer": {n_layers}, "n_head": 2, "n_embd": 32, "n_positions": 16,
            "vocab_size": 64, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
            "initializer_range": 0.02}}"#
    );
    model(&config, 0.1)
}

fn llama(n_layers: u64, tied: bool) -> Graph {
    let config = format!(
        r#"{{"model_type": "llama", "num_hidden_layers": {n_layers}, "num_attention_heads": 4,
            "num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 48,
            "max_position_embeddings": 16, "vocab_size": 64, "hidden_act": "silu",
            "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "initializer_range": 0.02,
            "tie_word_embeddings": {tied}}}"#
    );
    model(&config, 0.0)
}

fn model(config: &str, dropout: f64) -> Graph {
    let config = ModelConfig::parse("config.json", config.as_bytes()).unwrap();
    let options = BuildOptions {
        sequence: 8,
        dropout,
    };
    model_graph(&config, &options).unwrap()
}

/// The same ops in another order, in one layer, renamed.
fn rewritten(graph: &Graph, order: &[OpId], name: &dyn Fn(&str) -> String) -> Graph {
    let mut out = Graph::new(graph.name.clone());
    let layer = out.add_layer("all");
    let mut moved = vec![None; graph.values().len()];
    for &id in order {
        let op = graph.op(id);
        let mut kind = op.kind.clone();
        if let OpKind::Dropout { key, .. } = &mut kind {
            *key = name(&op.path);
        }
        let place = Place {
            path: name(&op.path),
            pass: op.pass,
            region: op.region,
            layer: Some(layer),
        };
        let results = if op.kind.is_source() {
            let ty = graph.ty(op.outputs[0]).clone();
            vec![out.add_source(kind, ty, place).unwrap()]
        } else {
            let inputs: Vec<ValueId> = op
                .inputs
                .iter()
                .map(|v| moved[v.index()].unwrap())
                .collect();
            out.add(kind, &inputs, place).unwrap()
        };
        for (v, r) in op.outputs.iter().zip(results) {
            moved[v.index()] = Some(r);
        }
    }
    out.outputs = graph
        .outputs
        .iter()
        .map(|v| moved[v.index()].unwrap())
        .collect();
    out
}

fn erased(graph: &Graph) -> Graph {
    let order: Vec<OpId> = graph.iter().map(|(id, _)| id).collect();
    rewritten(graph, &order, &|path| path.to_string())
}

fn cut(graph: &Graph, layering: Layering) -> Graph {
    let made = cluster_layers(graph, layering, MAX).unwrap().graph.unwrap();
    assert_eq!(ir::verify::verify(&made), []);
    assert_eq!(made.ops().len(), graph.ops().len());
    // One activation crosses each cut, into the layer right behind it.
    let marked = ir::boundary::mark_boundaries(&made).unwrap();
    let mut entered = vec![0; made.layers.len()];
    for op in marked
        .ops()
        .iter()
        .filter(|op| op.path.starts_with("boundary."))
    {
        let from = marked
            .op(marked.value(op.inputs[0]).producer)
            .layer
            .unwrap();
        let to = op.layer.unwrap();
        assert_eq!(from.0 + 1, to.0, "{} skips a layer", op.path);
        entered[to.index()] += 1;
    }
    assert_eq!(entered[0], 0);
    assert!(entered[1..].iter().all(|&n| n == 1), "{entered:?}");
    made
}

#[test]
fn erased_models_get_their_layers_back() {
    for graph in [gpt2(2), gpt2(5), llama(2, true), llama(4, false)] {
        assert_eq!(cut(&erased(&graph), Layering::IfNeeded), graph);
        // Asked for, it is what the author declared.
        assert_eq!(cut(&graph, Layering::Auto), graph);
    }
}

#[test]
fn declared_layers_are_kept() {
    let graph = gpt2(2);
    for layering in [Layering::IfNeeded, Layering::Declared] {
        let kept = cluster_layers(&graph, layering, MAX).unwrap();
        assert_eq!((kept.graph, kept.note), (None, None));
    }
    let kept = cluster_layers(&erased(&graph), Layering::Declared, MAX).unwrap();
    assert_eq!(kept.graph, None);
}

/// Sources at the top, positions long before their use, random names.
#[test]
fn neither_the_order_nor_the_names_matter() {
    for graph in [gpt2(3), llama(3, true)] {
        let is_source = |id: &OpId| graph.op(*id).kind.is_source();
        let ids = || graph.iter().map(|(id, _)| id);
        let mut order: Vec<OpId> = ids().filter(is_source).collect();
        order.extend(ids().filter(|id| !is_source(id) && graph.op(*id).path == "embed.positions"));
        let rest: Vec<OpId> = ids().filter(|id| !order.contains(id)).collect();
        order.extend(rest);
        let name = |path: &str| {
            let hash = path
                .bytes()
                .fold(7u64, |h, b| h.wrapping_mul(31).wrapping_add(u64::from(b)));
            format!("v{hash}")
        };
        let made = cut(&rewritten(&graph, &order, &name), Layering::IfNeeded);
        assert_eq!(made.layers.len(), 5);
        let sizes = |g: &Graph| -> Vec<BTreeSet<String>> {
            (0..g.layers.len())
                .map(|l| {
                    let of = g
                        .ops()
                        .iter()
                        .filter(|op| op.layer == Some(LayerId::new(l)));
                    of.map(|op| op.path.clone()).collect()
                })
                .collect()
        };
        let renamed: Vec<BTreeSet<String>> = sizes(&graph)
            .into_iter()
            .map(|l| l.iter().map(|p| name(p)).collect())
            .collect();
        assert_eq!(sizes(&made), renamed);
        // Their kinds are found all the same: the first, the equal blocks, the last.
        let spec = TrainSpec {
            sequence: 8,
            ..TrainSpec::default()
        };
        let training = ir::training::training_graph(&made, &spec).unwrap();
        let layers = crate::layers::find_layers(&training, &|_| None);
        let declared = ir::training::training_graph(&graph, &spec).unwrap();
        let known = crate::layers::find_layers(&declared, &|_| None);
        assert_eq!(layers.kind, known.kind);
    }
}

#[test]
fn a_number_that_is_asked_for() {
    let graph = gpt2(12);
    let sizes = |n: usize| -> Vec<String> { cut(&graph, Layering::Exactly(n)).layers };
    assert_eq!(sizes(1).len(), 1);
    // Whole blocks as long as there are enough of them; equal numbers of blocks where possible.
    assert_eq!(sizes(4).len(), 4);
    let made = cut(&graph, Layering::Exactly(14));
    assert_eq!(made, graph);
    for n in [2, 3, 5, 7, 13, 15, 20, 26] {
        let made = cut(&graph, Layering::Exactly(n));
        assert_eq!(made.layers.len(), n);
        let names: BTreeSet<&String> = made.layers.iter().collect();
        assert_eq!(names.len(), n, "names differ: {:?}", made.layers);
        if n < 14 {
            for i in 0..12 {
                let block = format!("h.{i}.");
                let of = made.ops().iter().filter(|op| op.path.starts_with(&block));
                let layers: BTreeSet<_> = of.map(|op| op.layer).collect();
                assert_eq!(layers.len(), 1, "block {i} is cut in {n} layers");
            }
        }
    }
}

#[test]
fn impossible_numbers_are_errors() {
    let graph = gpt2(2);
    let pieces = pieces(&graph).unwrap().len();
    let most = cut(&graph, Layering::Exactly(pieces));
    assert_eq!(most.layers.len(), pieces);
    for n in [0, pieces + 1] {
        let error = cluster_layers(&graph, Layering::Exactly(n), MAX).unwrap_err();
        assert!(
            matches!(error, ClusterError::Count { asked, most, .. } if asked == n && most == pieces)
        );
    }
    let error = cluster_layers(&graph, Layering::Exactly(401), MAX).unwrap_err();
    assert_eq!(
        error,
        ClusterError::TooMany {
            asked: 401,
            most: 400
        }
    );
}

struct Maker {
    graph: Graph,
}

impl Maker {
    fn new() -> Self {
        let mut graph = Graph::new("made");
        graph.add_layer("all");
        Maker { graph }
    }
    fn op(&mut self, kind: OpKind, inputs: &[ValueId]) -> ValueId {
        let path = format!("op{}", self.graph.ops().len());
        let place = Place::forward(path, LayerId::new(0));
        self.graph.add1(kind, inputs, place).unwrap()
    }
    fn add(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.op(OpKind::Binary { f: Binary::Add }, &[a, b])
    }
    fn tanh(&mut self, x: ValueId) -> ValueId {
        self.op(OpKind::Unary { f: Unary::Tanh }, &[x])
    }
    fn param(&mut self, shape: &[u64]) -> ValueId {
        let place = Place {
            path: format!("param{}", self.graph.ops().len()),
            pass: Pass::Update,
            region: Region::StepBegin,
            layer: Some(LayerId::new(0)),
        };
        let kind = OpKind::State {
            init: Init::Ones,
            decay: true,
        };
        let ty = TensorType::new(DType::F32, Shape::fixed(shape));
        self.graph.add_source(kind, ty, place).unwrap()
    }
    /// Rows of a table for the tokens.
    fn embedding(&mut self) -> ValueId {
        let kind = OpKind::Input {
            kind: InputKind::Tokens,
        };
        let ty = TensorType::new(DType::I32, Shape::batched(&[8]));
        let place = Place::forward("tokens", LayerId::new(0));
        let tokens = self.graph.add_source(kind, ty, place).unwrap();
        let table = self.param(&[16, 4]);
        self.op(OpKind::Embedding, &[table, tokens])
    }
    fn finish(mut self, x: ValueId) -> Graph {
        let kind = OpKind::Reduce {
            kind: ReduceKind::Sum,
            dims: vec![0, 1, 2],
        };
        let sum = self.op(kind, &[x]);
        self.graph.outputs = vec![sum];
        self.graph
    }
}

/// Everything is used by everything behind it.
#[test]
fn a_dense_graph_stays_one_layer() {
    let mut m = Maker::new();
    let mut all = vec![m.embedding(), m.param(&[8, 4])];
    all.swap(0, 1);
    all.remove(0);
    for _ in 0..6 {
        let mut x = m.tanh(*all.last().unwrap());
        for &y in &all {
            x = m.add(x, y);
        }
        all.push(x);
    }
    let mut sum = all[0];
    for &y in &all[1..] {
        sum = m.add(sum, y);
    }
    let graph = m.finish(sum);
    // The embedding and the sum before the loss are crossed alone: no layers worth having.
    let kept = cluster_layers(&graph, Layering::IfNeeded, MAX).unwrap();
    assert_eq!(kept.graph, None);
    assert!(kept.note.unwrap().contains("not cut"));
}

/// A plain chain in which nothing repeats is cut evenly.
#[test]
fn a_chain_without_repetition() {
    let mut m = Maker::new();
    let mut x = m.embedding();
    for i in 0..64 {
        // No two factors are equal.
        let f = Unary::Scale {
            by: 1.0 + f64::from(i),
        };
        x = m.op(OpKind::Unary { f }, &[x]);
    }
    let made = cut(&m.finish(x), Layering::IfNeeded);
    assert_eq!(made.layers.len(), UNREPEATED);
}

/// More blocks than layers: several together, all but the last equal.
#[test]
fn many_blocks_share_layers() {
    let mut m = Maker::new();
    let mut x = m.embedding();
    for _ in 0..1001 {
        let y = m.tanh(x);
        x = m.add(y, x);
    }
    let made = cut(&m.finish(x), Layering::IfNeeded);
    let ops = |l: usize| {
        let of = made
            .ops()
            .iter()
            .filter(|op| op.layer == Some(LayerId::new(l)));
        of.count()
    };
    // 1001 blocks, 6 at a time.
    assert_eq!(made.layers.len(), 1 + 167 + 1);
    assert!((1..167).all(|l| ops(l) == 12), "{}", ops(1));
}

/// Deeper than any stack, wider than the dynamic program takes.
#[test]
fn a_long_chain_is_cut_in_no_time() {
    let mut m = Maker::new();
    let mut x = m.embedding();
    for i in 0..60_000 {
        let f = Unary::Scale {
            by: 1.0 + f64::from(i),
        };
        x = m.op(OpKind::Unary { f }, &[x]);
    }
    let graph = m.finish(x);
    assert_eq!(cut(&graph, Layering::Auto).layers.len(), UNREPEATED);
    assert_eq!(cut(&graph, Layering::Exactly(400)).layers.len(), 400);
}

/// A random graph: chains, branches that join again, side branches of parameters.
fn random_graph(seed: u64) -> Graph {
    let mut state = seed;
    let mut below = |n: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n
    };
    let mut m = Maker::new();
    let mut values = vec![m.embedding()];
    for _ in 0..2 + below(9) {
        let x = values[values.len() - 1];
        let y = match below(6) {
            0 | 1 => m.tanh(x),
            2 => {
                let side = m.param(&[8, 4]);
                let side = m.tanh(side);
                m.add(x, side)
            }
            3 => {
                let a = m.tanh(x);
                let a = m.tanh(a);
                m.add(a, x)
            }
            4 => {
                let old = values[below(values.len())];
                m.add(x, old)
            }
            _ => {
                let p = m.param(&[4]);
                m.add(x, p)
            }
        };
        values.push(y);
    }
    let last = values[values.len() - 1];
    m.finish(last)
}

/// The ops that a value needs, its own among them, sources left out.
fn ancestors(graph: &Graph, v: ValueId) -> BTreeSet<OpId> {
    let mut found = BTreeSet::new();
    let mut open = vec![graph.value(v).producer];
    while let Some(id) = open.pop() {
        if !graph.op(id).kind.is_source() && found.insert(id) {
            open.extend(graph.op(id).inputs.iter().map(|&v| graph.value(v).producer));
        }
    }
    found
}

/// The values that leave a set of ops for others that the loss needs.
fn leaving(graph: &Graph, before: &BTreeSet<OpId>, live: &BTreeSet<OpId>) -> BTreeSet<ValueId> {
    let behind = live.iter().filter(|id| !before.contains(id));
    behind
        .flat_map(|&id| &graph.op(id).inputs)
        .copied()
        .filter(|&v| before.contains(&graph.value(v).producer))
        .collect()
}

/// The ops on the path to `id` with the most FLOPs, of equal ones that of the first operand:
/// its length and the path.
fn longest_path(graph: &Graph, flops: &[u64], id: OpId) -> (u64, BTreeSet<OpId>) {
    let mut best = (0, BTreeSet::new());
    for &v in &graph.op(id).inputs {
        let producer = graph.value(v).producer;
        if !graph.op(producer).kind.is_source() {
            let path = longest_path(graph, flops, producer);
            if path.0 > best.0 {
                best = path;
            }
        }
    }
    best.1.insert(id);
    (best.0 + flops[id.index()] + 1, best.1)
}

/// Places are exactly the values of the critical path that alone leave what they need; and the
/// graphs can be cut at them in any number.
#[test]
fn places_of_random_graphs_by_definition() {
    let mut n_places = 0;
    for seed in 0..400 {
        let graph = random_graph(seed);
        let loss = graph.outputs[0];
        let live = ancestors(&graph, loss);
        let pieces = pieces(&graph).unwrap();
        let found: BTreeSet<ValueId> = pieces.iter().filter_map(|p| p.crossing).collect();
        let flops = places::flops(&graph);
        let (_, path) = longest_path(&graph, &flops, graph.value(loss).producer);
        let expected: BTreeSet<ValueId> = path
            .iter()
            .flat_map(|&id| graph.op(id).outputs.clone())
            .filter(|&v| v != loss)
            .filter(|&v| leaving(&graph, &ancestors(&graph, v), &live) == BTreeSet::from([v]))
            .collect();
        assert_eq!(found, expected, "seed {seed}:\n{graph}");
        n_places += found.len();
        for n in 1..=pieces.len() {
            cut(&graph, Layering::Exactly(n));
        }
    }
    assert!(n_places > 1000);
}

/// The graph of a few ops in docs/inter_op.md: what is skipped over is not cut.
#[test]
fn a_skip_connection_is_not_cut() {
    let mut m = Maker::new();
    let x = m.embedding();
    let a = m.tanh(x);
    let b = m.tanh(a);
    let c = m.add(b, x);
    let d = m.tanh(c);
    let graph = m.finish(d);
    let crossing: Vec<ValueId> = pieces(&graph)
        .unwrap()
        .iter()
        .filter_map(|p| p.crossing)
        .collect();
    assert_eq!(crossing, [x, c, d]);
}
