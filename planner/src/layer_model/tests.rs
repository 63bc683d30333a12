use super::*;
use crate::groups::{Chains, Index};
use crate::pins::{AxisRole, Pins};
use crate::prices::Buckets;
use crate::stage::{PricedMesh, Sequences};
use ir::cluster::Cluster;
use ir::training::{Recompute, TrainingGraph, choose, recompute, training_graph};
use ir::{Axis, DeviceMesh, Graph, LogicalMesh, Precision, Rank, TrainSpec};
use std::slice::from_ref;

/// A preset whose matmuls follow from half sizes, as tests work out by hand.
fn cluster_without_tiles() -> Cluster {
    let mut cluster = cost_model::presets::load("dgx-a100-80gb", 1).unwrap();
    cluster.device.multiprocessors = 0;
    cluster
}

/// The values that a [`Setting`] borrows.
struct Scene {
    training: TrainingGraph,
    train: TrainSpec,
    cluster: Cluster,
    mesh: LogicalMesh,
    roles: Vec<AxisRole>,
    pins: Pins,
    saved: Vec<bool>,
    buckets: Buckets,
    of_parameters: Vec<bool>,
    index: Index,
    layers: Layers,
}

impl Scene {
    fn gpt2(n_layers: u64, hidden: u64, sequence: u64, axes: &[u32]) -> Scene {
        let config = serde_json::json!({
            "model_type": "gpt2", "n_layer": n_layers, "n_head": hidden / 128, "n_embd": hidden,
            "n_positions": sequence, "vocab_size": 4096, "tie_word_embeddings": false,
        });
        let config =
            import::ModelConfig::parse("config.json", config.to_string().as_bytes()).unwrap();
        let forward: Graph = import::model_graph(
            &config,
            &import::BuildOptions {
                sequence,
                dropout: 0.0,
            },
        )
        .unwrap();
        let train = TrainSpec {
            global_batch: 8,
            sequence,
            precision: Precision::Bf16,
            ..TrainSpec::default()
        };
        let training = training_graph(&forward, &train).unwrap();
        let devices = DeviceMesh {
            first_rank: Rank(0),
            n_devices: axes.iter().product(),
        };
        let axes: Vec<Axis> = axes
            .iter()
            .zip(["x", "y"])
            .map(|(&size, name)| Axis {
                name: name.into(),
                size,
            })
            .collect();
        let mesh = LogicalMesh::new(devices, axes).unwrap();
        Scene::made((training, train), cluster_without_tiles(), mesh)
    }

    /// The scene of a training graph on a mesh whose axes are free, without pins.
    fn made(
        (training, train): (TrainingGraph, TrainSpec),
        cluster: Cluster,
        mesh: LogicalMesh,
    ) -> Scene {
        Scene {
            layers: crate::layers::find_layers(&training, &|_| None),
            saved: vec![true; training.graph.values().len()],
            buckets: Buckets::new(&training),
            of_parameters: crate::pins::whole::made_of_parameters(&training.graph),
            index: Index::new(&training),
            roles: vec![AxisRole::Free; mesh.axes.len()],
            mesh,
            cluster,
            pins: Pins::default(),
            training,
            train,
        }
    }

    /// The same with another training graph of the model.
    fn of(&self, training: TrainingGraph) -> Scene {
        let cluster = self.cluster.clone();
        Scene::made((training, self.train.clone()), cluster, self.mesh.clone())
    }

    fn setting(&self, batch: u64) -> Setting<'_> {
        Setting {
            training: &self.training,
            train: &self.train,
            cluster: &self.cluster,
            mesh: &self.mesh,
            roles: &self.roles,
            pins: &self.pins,
            batch,
            saved: &self.saved,
            buckets: &self.buckets,
            of_parameters: &self.of_parameters,
            index: &self.index,
            chains: None,
            gradients_hide: false,
        }
    }
}

/// Plenty of memory, little, and per-step time left out.
fn weights() -> [Weights; 4] {
    let base = Weights::free(4);
    [
        base,
        Weights {
            static_price: 1e-12,
            saved_price: 8e-12,
            ..base
        },
        Weights {
            static_price: 1e-9,
            saved_price: 1e-9,
            ..base
        },
        Weights { step: 0.0, ..base },
    ]
}

/// Least cost of a problem that is eliminated as a whole.
fn optimum(sizes: &[usize], node_costs: &[Vec<Cost>], edges: &[Edge]) -> Option<u64> {
    let eliminator = Eliminator::new(sizes, edges, &[], 1 << 28).unwrap();
    eliminator.run(node_costs).table()[0]
        .value()
        .filter(|&v| v < 1 << 60)
}

/// Ruling choices out by messages changes neither the best paths nor what they cost, with two ways
/// of each layer too; and some layers have to be priced further for that.
#[test]
fn messages_change_no_path() {
    let mut n_widened = 0;
    for axes in [[2, 2], [1, 8], [4, 2]] {
        let scene = Scene::gpt2(4, 1024, 512, &axes);
        let none_saved = vec![false; scene.saved.len()];
        let keeps = scene.setting(4);
        let drops = Setting {
            saved: &none_saved,
            ..scene.setting(4)
        };
        let sequences = Sequences::new(&scene.layers);
        let prices = Prices::new(keeps.cluster, keeps.mesh, keeps.buckets);
        let mut facts = MeshFacts::new(prices, keeps.roles);
        let mut models = |s: &Setting<'_>| -> Vec<LayerModel> {
            let kinds = scene.layers.first.iter();
            let made = kinds.map(|&l| LayerModel::new(s, &scene.layers, l, &mut facts));
            made.map(Result::unwrap).collect()
        };
        let (of_keeps, of_drops) = (models(&keeps), models(&drops));
        let settings = [keeps, drops];
        for w in weights() {
            let weighted = [&of_keeps, &of_drops].map(|models| {
                let weighted = models.iter().map(|m| m.weighted(w).unwrap());
                weighted.collect::<Vec<WeightedLayer<'_>>>()
            });
            let variants = weighted.each_ref().map(|w| w.iter().map(Some).collect());
            let mut near = PricedMesh::with_messages_from(&variants, w, 0);
            let mut all = PricedMesh::with_messages_from(&variants, w, u64::MAX);
            assert_eq!(near.objectives(&sequences), all.objectives(&sequences));
            let paths = |mesh: &mut PricedMesh<'_>| {
                let paths = mesh.paths(&settings, &sequences).into_iter();
                let seen = paths.map(|p| p.map(|p| (p.boundaries, p.layers, p.objective)));
                seen.collect::<Vec<_>>()
            };
            assert_eq!(paths(&mut near), paths(&mut all), "{axes:?} {w:?}");
            assert_eq!(all.n_widened(), 0);
            n_widened += near.n_widened();
        }
    }
    assert!(n_widened > 0);
}

/// A model with the groups of parameters that models of other microbatches and of other choices of
/// what is recomputed were made with is the one that would be made without them.
#[test]
fn facts_of_a_mesh_hold_for_every_microbatch_and_variant() {
    for axes in [[2, 2], [1, 8]] {
        let scene = Scene::gpt2(3, 512, 256, &axes);
        let chosen = choose(&scene.training, Recompute::Full, &|_| None);
        let twins = scene.of(recompute(&scene.training, &chosen).unwrap());
        fn fresh<'s>(s: &Setting<'s>) -> MeshFacts<'s> {
            MeshFacts::new(Prices::new(s.cluster, s.mesh, s.buckets), s.roles)
        }
        let mut shared = fresh(&scene.setting(8));
        // Calls join sums of gradients to products, as the first graph has them.
        let first = Chains::new(&scene.training);
        let of_twins = Chains::of_variant(&twins.training, (&scene.training, &first));
        for (scene, chains) in [(&scene, &first), (&twins, &of_twins)] {
            for batch in [8, 4, 1] {
                let s = Setting {
                    chains: Some(chains),
                    ..scene.setting(batch)
                };
                for &layer in &scene.layers.first {
                    let model = |facts: &mut MeshFacts<'_>| {
                        LayerModel::new(&s, &scene.layers, layer, facts).unwrap()
                    };
                    let (own, again) = (model(&mut fresh(&s)), model(&mut shared));
                    assert_eq!(own.n_choices(), again.n_choices());
                    for (a, b) in own.groups.iter().zip(&again.groups) {
                        assert_eq!(a.ops, b.ops);
                        assert_eq!(a.choices.len(), b.choices.len());
                        for (a, b) in a.choices.iter().zip(&b.choices) {
                            let parts = |c: &Choice| {
                                let of =
                                    |p: &crate::groups::Part| (p.strategy.clone(), p.specs.clone());
                                c.ops.iter().map(|p| of(p)).collect::<Vec<_>>()
                            };
                            assert_eq!(parts(a), parts(b));
                            let figures = |c: &Choice| {
                                let bytes = [c.static_bytes, c.saved_bytes, c.recomputed_bytes];
                                (c.time, bytes, c.levels)
                            };
                            assert_eq!(figures(a), figures(b));
                        }
                    }
                    assert_eq!(own.edges(Weights::free(4)), again.edges(Weights::free(4)));
                }
            }
        }
        // Six models of each kind took their parameters' groups from the first.
        let of_first = scene.layers.first.iter();
        let s = scene.setting(8);
        let all = of_first.flat_map(|l| members(&s, &scene.layers.ops[l.index()]));
        let n_parameters = all.filter(|members| members.is_parameter).count();
        assert_eq!(shared.n_parameters(), n_parameters);
    }
}

#[test]
fn a_folded_stage_of_gpt2_costs_what_the_unfolded_one_does() {
    for axes in [[1, 2], [2, 2], [1, 8]] {
        let scene = Scene::gpt2(4, 1024, 512, &axes);
        let s = scene.setting(4);
        let layers = &scene.layers;
        assert_eq!(
            layers.kind,
            [0, 1, 1, 1, 1, 2],
            "equal layers are found equal"
        );
        let mut facts = MeshFacts::new(Prices::new(s.cluster, s.mesh, s.buckets), s.roles);
        let models: Vec<LayerModel> = layers
            .first
            .iter()
            .map(|&l| LayerModel::new(&s, layers, l, &mut facts).unwrap())
            .collect();
        // Whole models, layers in the middle, and one that needs its own first layer.
        for range in [0..6, 1..5, 2..6, 0..2] {
            // All layers as one: every group and every edge between them, nothing folded.
            let mut ops = vec![layers.ops[range.clone()].concat()];
            ops.extend(layers.ops.get(range.end).cloned());
            let one = Layers {
                ops,
                kind: vec![0, 1],
                first: vec![LayerId::new(0)],
            };
            let whole = LayerModel::new(&s, &one, LayerId::new(0), &mut facts).unwrap();
            let own: usize = layers.kind[range.clone()]
                .iter()
                .map(|&k| models[k].n_own)
                .sum();
            assert_eq!(whole.n_own, own, "the same groups");
            for w in weights() {
                let weighted: Vec<WeightedLayer<'_>> =
                    models.iter().map(|m| m.weighted(w).unwrap()).collect();
                let path = PricedMesh::new(&weighted, w)
                    .path(from_ref(&s), &layers.kind[range.clone()])
                    .unwrap();
                let costs: Vec<Vec<Cost>> = whole
                    .groups
                    .iter()
                    .map(|g| g.choices.iter().map(|c| w.cost(c)).collect())
                    .collect();
                assert_eq!(
                    Some(path.objective),
                    optimum(&whole.sizes, &costs, &whole.edges(w)),
                    "{axes:?} {range:?} {w:?}"
                );
                // The objective is what the decoded choices cost, up to rounding.
                let cost = path.cost;
                let seconds = w.seconds(cost.time)
                    + w.static_price * cost.static_bytes as f64
                    + w.saved_price * cost.saved_bytes as f64;
                let terms = (whole.sizes.len() + whole.priced.len()) as f64;
                assert!(
                    (seconds / QUANTUM_S - path.objective as f64).abs() <= terms,
                    "{seconds} s against {} quanta",
                    path.objective
                );
            }
        }
    }
}

/// Small numbers from a seed (splitmix64, Steele et al. 2014).
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
    fn phases(&mut self) -> Phases {
        let mut t = || self.below(50) as f64 * 1e-9;
        Phases {
            forward: t(),
            backward: t(),
            step: t(),
        }
    }
    fn group(&mut self, n_choices: usize, boundary: bool) -> Group {
        let choices = (0..n_choices)
            .map(|_| Choice {
                ops: vec![],
                time: self.phases(),
                static_bytes: self.below(9),
                saved_bytes: self.below(9),
                recomputed_bytes: 0,
                levels: ZeroLevels::ALL,
            })
            .collect();
        Group {
            ops: vec![],
            choices,
            boundary,
        }
    }
    /// A layer with up to three groups beside its boundaries of `n_layouts` each.
    fn layer(&mut self, entry: bool, exit: bool, n_layouts: usize) -> LayerModel {
        let mut groups = Vec::new();
        for _ in 0..1 + self.below(2) {
            let n_choices = 1 + self.below(3) as usize;
            groups.push(self.group(n_choices, false));
        }
        let entry = entry.then(|| self.below(groups.len() as u64 + 1) as usize);
        if let Some(at) = entry {
            groups.insert(at, self.group(n_layouts, true));
        }
        let n_own = groups.len();
        if exit {
            let free = Choice {
                ops: vec![],
                time: Phases::default(),
                static_bytes: 0,
                saved_bytes: 0,
                recomputed_bytes: 0,
                levels: ZeroLevels::ALL,
            };
            groups.push(Group {
                ops: vec![],
                choices: vec![free; n_layouts],
                boundary: true,
            });
        }
        let sizes: Vec<usize> = groups.iter().map(|g| g.choices.len()).collect();
        let mut priced = Vec::new();
        for b in 0..groups.len() {
            for a in 0..b {
                if self.below(4) > 0 {
                    let cells = (0..sizes[a] * sizes[b])
                        .map(|_| {
                            (self.below(8) > 0).then(|| LinkCell {
                                time: self.phases(),
                                hideable: Phases::default(),
                                levels: ZeroLevels::ALL,
                            })
                        })
                        .collect();
                    priced.push(PricedLink {
                        a,
                        b,
                        faces: ((0..sizes[a]).collect(), (0..sizes[b]).collect()),
                        n_faces_b: sizes[b],
                        cells,
                    });
                }
            }
        }
        LayerModel {
            groups,
            n_own,
            entry,
            exit: exit.then_some(n_own),
            n_made: sizes.iter().sum(),
            sizes,
            priced,
        }
    }
}

/// A sequence of layers as one problem: the exit of a layer is the entry of the next.
fn unfold(
    models: &[LayerModel],
    kinds: &[usize],
    w: Weights,
) -> (Vec<usize>, Vec<Vec<Cost>>, Vec<Edge>) {
    let own = |&k: &usize| models[k].n_own;
    let first: Vec<usize> = (0..=kinds.len())
        .map(|i| kinds[..i].iter().map(own).sum())
        .collect();
    let (mut sizes, mut costs, mut edges) = (Vec::new(), Vec::new(), Vec::new());
    for (i, &k) in kinds.iter().enumerate() {
        let m = &models[k];
        let last = i + 1 == kinds.len();
        for g in m
            .groups
            .iter()
            .take(if last { m.groups.len() } else { m.n_own })
        {
            sizes.push(g.choices.len());
            costs.push(g.choices.iter().map(|c| w.cost(c)).collect());
        }
        let at = |g: u32| match (g as usize) < m.n_own {
            true => (first[i] + g as usize) as u32,
            false if last => first[i + 1] as u32,
            false => (first[i + 1] + models[kinds[i + 1]].entry.unwrap()) as u32,
        };
        edges.extend(m.edges(w).into_iter().map(|e| Edge {
            a: at(e.a),
            b: at(e.b),
            table: e.table,
        }));
    }
    (sizes, costs, edges)
}

/// Tries everything.
fn brute_force(sizes: &[usize], costs: &[Vec<Cost>], edges: &[Edge]) -> Option<u64> {
    let mut choice = vec![0usize; sizes.len()];
    let mut best: Option<u64> = None;
    loop {
        let nodes = choice.iter().zip(costs).map(|(&c, costs)| costs[c]);
        let pairs = edges
            .iter()
            .map(|e| e.table.get(choice[e.a as usize], choice[e.b as usize]));
        let sum = nodes
            .chain(pairs)
            .try_fold(0u64, |sum, c| Some(sum + c.value()?));
        best = [best, sum].into_iter().flatten().min();
        let Some(digit) = (0..sizes.len()).find(|&i| choice[i] + 1 < sizes[i]) else {
            return best;
        };
        choice[digit] += 1;
        choice[..digit].fill(0);
    }
}

#[test]
fn folded_random_stages_cost_what_unfolded_ones_do() {
    let scene = Scene::gpt2(1, 128, 8, &[1, 2]);
    let s = scene.setting(1);
    let (mut tried, mut infeasible) = (0, 0);
    for seed in 0..400 {
        let mut random = Random(seed);
        let n_layouts = 1 + random.below(3) as usize;
        let models = [
            random.layer(false, true, n_layouts),
            random.layer(true, true, n_layouts),
            random.layer(true, true, n_layouts),
            random.layer(true, false, n_layouts),
        ];
        let inner = |random: &mut Random| 1 + random.below(2) as usize;
        let kinds = vec![
            0,
            inner(&mut random),
            inner(&mut random),
            inner(&mut random),
            3,
        ];
        let n = kinds.len();
        let sequences = Sequences::new(&Layers {
            ops: vec![],
            kind: kinds.clone(),
            first: vec![],
        });
        for w in weights().map(|w| Weights {
            static_price: w.static_price * 100.0,
            saved_price: w.saved_price * 100.0,
            ..w
        }) {
            let weighted: Vec<WeightedLayer<'_>> =
                models.iter().map(|m| m.weighted(w).unwrap()).collect();
            let paths = PricedMesh::new(&weighted, w).paths(from_ref(&s), &sequences);
            assert_eq!(sequences.ranges.len(), n * (n + 1) / 2);
            for &((start, end), path) in &sequences.ranges {
                let (sizes, costs, edges) = unfold(&models, &kinds[start..end], w);
                let found = paths[path].as_ref().map(|p| p.objective);
                assert_eq!(
                    found,
                    optimum(&sizes, &costs, &edges),
                    "seed {seed} {start}..{end}"
                );
                if sizes.iter().product::<usize>() <= 5000 {
                    assert_eq!(
                        found,
                        brute_force(&sizes, &costs, &edges),
                        "seed {seed} {start}..{end}"
                    );
                    tried += 1;
                }
                infeasible += usize::from(found.is_none());
            }
        }
    }
    assert!(
        tried > 10_000 && infeasible > 100,
        "{tried} tried, {infeasible} without a strategy"
    );
}

/// Spec of the first result of each group of a Megatron block, by the path of its first op;
/// everything else is whole.
const MEGATRON: [(&str, &str); 15] = [
    ("h.0.attn.qkv", "[_, _, _, y, _]"),
    ("h.0.attn.qkv.add_bias", "[_, _, _, y, _]"),
    ("h.0.attn.split", "[_, _, y, _]"),
    ("h.0.attn.attend", "[_, _, y, _]"),
    ("h.0.attn.out", "[_, _, _] partial(y: sum)"),
    ("h.0.mlp.fc", "[_, _, y]"),
    ("h.0.mlp.fc.add_bias", "[_, _, y]"),
    ("h.0.mlp.act", "[_, _, y]"),
    ("h.0.mlp.proj", "[_, _, _] partial(y: sum)"),
    ("h.0.attn.qkv.weight", "[_, _, y, _]"),
    ("h.0.attn.qkv.bias", "[_, y, _]"),
    ("h.0.attn.out.weight", "[y, _, _]"),
    ("h.0.mlp.fc.weight", "[_, y]"),
    ("h.0.mlp.fc.bias", "[y]"),
    ("h.0.mlp.proj.weight", "[y, _]"),
];

#[test]
fn a_block_costs_the_sum_of_its_kernels_and_two_all_reduces() {
    let (b, seq, h) = (2.0, 1024.0, 2048.0);
    let scene = Scene::gpt2(1, 2048, 1024, &[1, 8]);
    let s = scene.setting(2);
    let mut facts = MeshFacts::new(Prices::new(s.cluster, s.mesh, s.buckets), s.roles);
    let model = LayerModel::new(&s, &scene.layers, LayerId::new(1), &mut facts).unwrap();
    let graph = &scene.training.graph;
    let choice: Vec<u32> = model
        .groups
        .iter()
        .map(|g| {
            let head = graph.op(g.ops[0]);
            let whole = format!(
                "[{}]",
                vec!["_"; graph.ty(head.outputs[0]).shape.bind(2).len()].join(", ")
            );
            let wanted = MEGATRON
                .iter()
                .find(|(path, _)| *path == head.path)
                .map_or(whole, |(_, spec)| spec.to_string());
            let found = g
                .choices
                .iter()
                .position(|c| c.ops[0].specs.results[0].display(&scene.mesh) == wanted);
            found.unwrap_or_else(|| panic!("`{}` can be {wanted}", head.path)) as u32
        })
        .collect();
    let cost = model.evaluate(&s, &choice);

    // The preset's figures: bf16 peak times best efficiency, memory bandwidth times share.
    let (bandwidth, vector, launch) = (2.039e12 * 0.88, 19.5e12, 4e-6);
    let rate = 312e12 * 0.869 * s.cluster.device.sustained_share;
    let kernel = |flops: f64, elements: f64, f32s: f64| {
        launch + f64::max(flops / vector, (2.0 * elements + 4.0 * f32s) / bandwidth)
    };
    let matmul = |m: f64, n: f64, k: f64| {
        let reached = rate * (m / (m + 64.0)) * (n / (n + 64.0)) * (k / (k + 128.0));
        launch
            + f64::max(
                2.0 * m * n * k / reached,
                2.0 * (m * k + k * n + m * n) / bandwidth,
            )
    };
    let t = b * seq;
    let x = t * h;
    // A ring of 8: 2 x 7 steps; a tree: a chain of 8 up and down. The link's protocols differ in
    // start, steps, and what they leave of its bandwidth; the fastest way counts.
    let size = 2.0 * x;
    let link = &s.cluster.levels[0];
    let bandwidth_of = |share: f64, p: &ir::cluster::Protocol| {
        let largest = p.max_bandwidth_bytes_per_s.unwrap_or(f64::INFINITY);
        (300e9 * link.efficiency * share).min(largest)
    };
    let all_reduce = link
        .protocols
        .iter()
        .flat_map(|p| {
            [
                p.start_s
                    + 14.0 * p.ring_step_s
                    + 2.0 * 7.0 / 8.0 * size / bandwidth_of(p.ring_share, p),
                p.start_s + 14.0 * p.tree_step_s + 2.0 * size / bandwidth_of(p.tree_share, p),
            ]
        })
        .reduce(f64::min)
        .expect("the link has protocols");
    let norm = kernel(8.0 * x, 2.0 * x + 2.0 * h, 2.0 * t);
    let bias_whole = kernel(x, 2.0 * x + h, 0.0);
    let residual = kernel(x, 3.0 * x, 0.0);
    // An eighth of three times the width, of 16 heads, and of four times the width.
    let (qkv, heads, ffn) = (3.0 * h / 8.0, 2.0, 4.0 * h / 8.0);
    let scores = b * heads * seq * seq;
    let attend = launch
        + f64::max(
            0.5 * (4.0 * scores / vector + 2.0 * 2.0 * scores * 128.0 / (rate * 0.8)),
            (2.0 * 4.0 * t * heads * 128.0 + 4.0 * t * heads) / bandwidth,
        );
    let attention = norm
        + matmul(t, qkv, h)
        + kernel(t * qkv, 2.0 * t * qkv + qkv, 0.0)
        + kernel(t * qkv / 3.0, 2.0 * t * qkv, 0.0)
        + attend
        + matmul(t, h, h / 8.0)
        + all_reduce
        + bias_whole
        + residual;
    let mlp = norm
        + matmul(t, ffn, h)
        + kernel(t * ffn, 2.0 * t * ffn + ffn, 0.0)
        + kernel(40.0 * t * ffn, 2.0 * t * ffn, 0.0)
        + matmul(t, h, ffn)
        + all_reduce
        + bias_whole
        + residual;
    let expected = attention + mlp;
    assert!(
        (cost.time.forward / expected - 1.0).abs() < 1e-9,
        "{} s against {expected} s",
        cost.time.forward
    );
    // Two more all-reduces backward; matmuls twice; nothing is communicated once per step.
    let matmuls = matmul(t, qkv, h) + matmul(t, h, h / 8.0) + matmul(t, ffn, h) + matmul(t, h, ffn);
    assert!(
        cost.time.backward > 2.0 * (all_reduce + 0.9 * matmuls)
            && cost.time.backward < 3.0 * expected
    );
    // f32 master, two moments, bf16 copy, f32 gradient of an eighth of the weights.
    let weights = 12.0 * h * h / 8.0;
    let bytes = cost.static_bytes as f64;
    assert!(
        bytes > 18.0 * weights && bytes < 18.0 * weights + 18.0 * 16.0 * h,
        "{bytes} bytes"
    );
}

#[test]
fn what_fits_costs_no_less_than_the_bound_at_prices() {
    use crate::refine::{bound_at, lagrangian, stage_problem};
    use intra_op::{SolveOptions, solve};
    let scene = Scene::gpt2(2, 256, 64, &[1, 4]);
    let s = scene.setting(4);
    let (layers, [base, ..]) = (&scene.layers, weights());
    let mut facts = MeshFacts::new(Prices::new(s.cluster, s.mesh, s.buckets), s.roles);
    let models: Vec<LayerModel> = layers
        .first
        .iter()
        .map(|&l| LayerModel::new(&s, layers, l, &mut facts).unwrap())
        .collect();
    let weighted: Vec<WeightedLayer<'_>> =
        models.iter().map(|m| m.weighted(base).unwrap()).collect();
    let (kinds, in_flight) = (&layers.kind[..], 2);
    let bytes = |price: f64| {
        let priced = Weights {
            static_price: price,
            saved_price: price * in_flight as f64,
            ..base
        };
        let cost = PricedMesh::new(&weighted, priced)
            .path(from_ref(&s), kinds)
            .unwrap()
            .cost;
        cost.static_bytes + in_flight * cost.saved_bytes
    };
    let (most, least) = (bytes(0.0), bytes(1e-7));
    assert!(most > least + least / 4, "{most} and {least} bytes");
    let mut last = 0;
    for percent in [100, 80, 60, 40, 20, 5] {
        let budget = least + (most - least) / 100 * percent + 100;
        let of_layers: Vec<&LayerModel> = kinds.iter().map(|&k| &models[k]).collect();
        let (problem, _) = stage_problem("stage", &of_layers, base, in_flight, budget);
        let options = SolveOptions {
            work_limit: Some(50),
            ..SolveOptions::default()
        };
        let solved = solve(&problem, &options).unwrap();
        let objective = solved.objective.unwrap();
        let ways = [weighted.iter().map(Some).collect()];
        // From a price that says little, or from none.
        let bounds = [0.0, 1e-12, 1e-8].map(|price| {
            let from = (
                price,
                bound_at(&ways, kinds, base, in_flight, budget, price),
            );
            lagrangian(&ways, kinds, base, (in_flight, budget), from, &|_| false)
        });
        let (bound, weakest) = (bounds[0], bounds.into_iter().min().unwrap());
        assert!(
            1000 * weakest >= 995 * bound,
            "{percent}%: {bounds:?} by where the search began"
        );
        assert!(bound <= objective, "{percent}%: {bound} above {objective}");
        assert!(
            10 * bound >= 9 * objective,
            "{percent}%: {bound} far below {objective}"
        );
        assert!(bound >= last, "less memory costs no less");
        last = bound;
        if percent == 100 {
            let terms: usize = kinds.iter().map(|&k| models[k].n_terms()).sum();
            assert!(
                objective - bound <= terms as u128,
                "memory does not bind: {bound}, {objective}"
            );
        }
    }
}

/// The choices that keep to a ZeRO level are those that are left where it is pinned.
#[test]
fn levels_leave_what_pins_leave() {
    use AxisRole::{Context, Data, Free, Tensor};
    let (mut n_left, mut n_gone) = (0, 0);
    for (axes, roles) in [
        ([1, 8], [Free, Free]),
        ([2, 4], [Free, Free]),
        ([4, 2], [Data, Tensor]),
        ([4, 2], [Data, Context]),
    ] {
        let mut scene = Scene::gpt2(2, 1024, 512, &axes);
        scene.roles = roles.to_vec();
        let of_layer = |scene: &Scene, level: Option<u8>| -> Vec<Group> {
            let pins = Pins {
                zero: level,
                ..Pins::default()
            };
            let setting = Setting {
                pins: &pins,
                ..scene.setting(8)
            };
            let all = scene.layers.ops.iter();
            let all = all.flat_map(|ops| members(&setting, ops));
            all.map(|members| members.group(&setting)).collect()
        };
        let free = of_layer(&scene, None);
        for level in 0..=3 {
            let pinned = of_layer(&scene, Some(level));
            let ops = |groups: &[Group]| groups.iter().map(|g| g.ops.clone()).collect::<Vec<_>>();
            assert_eq!(ops(&free), ops(&pinned));
            let strategies =
                |c: &Choice| c.ops.iter().map(|p| p.strategy.clone()).collect::<Vec<_>>();
            for (free, pinned) in free.iter().zip(&pinned) {
                for c in &free.choices {
                    let mut left = pinned.choices.iter();
                    let left = left.any(|p| strategies(p) == strategies(c));
                    assert_eq!(
                        c.levels.has(level),
                        left,
                        "{axes:?} {roles:?} {level} {c:?}"
                    );
                    (n_left, n_gone) = (n_left + u32::from(left), n_gone + u32::from(!left));
                }
            }
        }
    }
    assert!(n_left > 100 && n_gone > 100, "{n_left} left, {n_gone} gone");
}

/// So do the layout changes between them: a layer costs at a level what it costs where that is
/// pinned. On axes that parameters may split, levels below 3 then cost more than no level.
#[test]
fn layers_cost_at_a_level_what_they_cost_where_it_is_pinned() {
    use AxisRole::{Context, Data, Free, Tensor};
    // Optima that a level below 3 makes dearer.
    let mut n_moved = 0;
    for (axes, roles) in [
        ([1, 8], [Free, Free]),
        ([2, 4], [Free, Free]),
        ([4, 2], [Data, Tensor]),
        ([4, 2], [Data, Context]),
    ] {
        let mut scene = Scene::gpt2(2, 256, 512, &axes);
        scene.roles = roles.to_vec();
        // Memory has a price, so that parameters are split where they may be.
        let base = weights()[2];
        let optima = |scene: &Scene, pin: Option<u8>, level: Option<u8>| -> Vec<Option<u64>> {
            let pins = Pins {
                zero: pin,
                ..Pins::default()
            };
            let s = Setting {
                pins: &pins,
                ..scene.setting(8)
            };
            let mut facts = MeshFacts::new(Prices::new(s.cluster, s.mesh, s.buckets), s.roles);
            let assumed = Assumed {
                level,
                ..base.assumed
            };
            let weights = Weights { assumed, ..base };
            let kinds = scene.layers.first.iter();
            kinds
                .map(|&l| {
                    let model = LayerModel::new(&s, &scene.layers, l, &mut facts).unwrap();
                    let weighted = model.weighted(weights).unwrap();
                    PricedMesh::new(&[weighted], weights).objective(&[0])
                })
                .collect()
        };
        let free = optima(&scene, None, None);
        for level in 0..=3 {
            let at_level = optima(&scene, None, Some(level));
            assert_eq!(
                at_level,
                optima(&scene, Some(level), None),
                "{axes:?} {roles:?} {level}"
            );
            for (free, at_level) in free.iter().zip(&at_level) {
                let (free, at_level) = (free.unwrap(), at_level.unwrap());
                assert!(free <= at_level, "{axes:?} {roles:?} {level}");
                n_moved += u32::from(level < 3 && free < at_level);
            }
        }
    }
    assert!(n_moved > 0);
}
