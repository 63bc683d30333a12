//! Plans with random strategies: every op does on every mesh axis something that its rule
//! allows, so that programs have every kind of layout change there is.
#![allow(clippy::unwrap_used)]

use ir::cluster::{CLUSTER_VERSION, Cluster, Device, HalfSize, Level};
use ir::op::{
    Assignment, AxisUse, Binary, Einsum, FactorRole, Init, InputKind, OpStrategy, ShardingRule,
    Unary,
};
use ir::plan::{
    LayerRun, LayerStrategy, PASSES_VERSION, PLAN_VERSION, Plan, Prediction, Proof, ScheduleKind,
    StagePlan, relative_path,
};
use ir::reshard::{Placement, cross_paths, paths};
use ir::training::{Recompute, TrainingGraph, can_recompute, choose, training_graph};
use ir::{
    Axis, Bytes, DType, DeviceMesh, FactorId, Graph, LayerId, LogicalMesh, Op, OpKind, Pass, Place,
    Rank, ReduceKind, Region, Shape, ShardingSpec, StageId, TensorType, TrainSpec, ValueId,
};
use lowering::BucketSizes;
use std::collections::BTreeMap;

/// SplitMix64 (Steele, Lea & Flood 2014): enough randomness for tests, and the same everywhere.
pub struct Random(
    /// The state.
    pub u64,
);

impl Random {
    /// The next 64 bits.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
    /// One of the items; none of none.
    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> Option<&'a T> {
        from.get(self.below(from.len()))
    }
}

/// Sizes of buckets for small tensors: those of real models, which hold everything, or buckets
/// of a tensor or a few.
pub fn bucket_sizes(seed: u64) -> BucketSizes {
    let of = |bytes| BucketSizes {
        microbatch: bytes,
        microbatch_per_rank: 0,
        step: 4 * bytes,
        step_per_rank: 0,
    };
    match seed % 3 {
        0 => BucketSizes::default(),
        1 => of(1),
        _ => of(512),
    }
}

/// Tokens per sample of [`mlp`].
pub const SEQUENCE: u64 = 4;

/// A residual MLP language model; layers `embed`, `h.0`, ..., `head`, whose table is tied.
pub fn mlp(n_blocks: usize) -> Graph {
    mlp_with_head(n_blocks, true)
}

/// The same whose head has a table of its own.
pub fn untied_mlp(n_blocks: usize) -> Graph {
    mlp_with_head(n_blocks, false)
}

fn mlp_with_head(n_blocks: usize, is_tied: bool) -> Graph {
    let mut g = Graph::new("mlp");
    let embed = g.add_layer("embed");
    let table = param(&mut g, embed, "embed.table", &[10, 6]);
    let tokens = input(&mut g, embed, "tokens", InputKind::Tokens);
    let mut x = op(
        &mut g,
        embed,
        "embed.lookup",
        OpKind::Embedding,
        &[table, tokens],
    );
    for i in 0..n_blocks {
        let name = format!("h.{i}");
        let h = g.add_layer(&name);
        let gain = param(&mut g, h, &format!("{name}.gain"), &[6]);
        let up = param(&mut g, h, &format!("{name}.up"), &[6, 16]);
        let bias = param(&mut g, h, &format!("{name}.bias"), &[16]);
        let down = param(&mut g, h, &format!("{name}.down"), &[16, 6]);
        let place = Place::forward(format!("{name}.norm"), h);
        let y = g
            .add(OpKind::RmsNorm { eps: 1e-5 }, &[x, gain], place)
            .unwrap()[0];
        let y = op(
            &mut g,
            h,
            &format!("{name}.fc"),
            dot("bsh,hf->bsf"),
            &[y, up],
        );
        let y = op(
            &mut g,
            h,
            &format!("{name}.shift"),
            OpKind::Binary { f: Binary::Add },
            &[y, bias],
        );
        let y = op(
            &mut g,
            h,
            &format!("{name}.act"),
            OpKind::Unary { f: Unary::Relu },
            &[y],
        );
        let y = op(
            &mut g,
            h,
            &format!("{name}.proj"),
            dot("bsf,fh->bsh"),
            &[y, down],
        );
        x = op(
            &mut g,
            h,
            &format!("{name}.out"),
            OpKind::Binary { f: Binary::Add },
            &[y, x],
        );
    }
    let head = g.add_layer("head");
    let table = match is_tied {
        true => table,
        false => param(&mut g, head, "head.table", &[10, 6]),
    };
    let labels = input(&mut g, head, "labels", InputKind::Labels);
    let logits = op(&mut g, head, "head.logits", dot("bsh,vh->bsv"), &[x, table]);
    let lse = op(&mut g, head, "head.lse", OpKind::LogSumExp, &[logits]);
    let nll = op(
        &mut g,
        head,
        "head.nll",
        OpKind::CrossEntropy,
        &[logits, lse, labels],
    );
    let sum = OpKind::Reduce {
        kind: ReduceKind::Sum,
        dims: vec![0, 1],
    };
    let total = op(&mut g, head, "head.sum", sum, &[nll]);
    g.outputs = vec![total];
    g
}

fn dot(einsum: &str) -> OpKind {
    OpKind::DotGeneral {
        einsum: Einsum::parse(einsum).unwrap(),
    }
}

fn op(g: &mut Graph, layer: LayerId, path: &str, kind: OpKind, inputs: &[ValueId]) -> ValueId {
    g.add1(kind, inputs, Place::forward(path, layer)).unwrap()
}

fn param(g: &mut Graph, layer: LayerId, path: &str, lens: &[u64]) -> ValueId {
    let place = Place {
        path: path.into(),
        pass: Pass::Update,
        region: Region::StepBegin,
        layer: Some(layer),
    };
    let kind = OpKind::State {
        init: Init::Normal { std: 0.02 },
        decay: true,
    };
    g.add_source(kind, TensorType::new(DType::F32, Shape::fixed(lens)), place)
        .unwrap()
}

fn input(g: &mut Graph, layer: LayerId, path: &str, kind: InputKind) -> ValueId {
    let ty = TensorType::new(DType::I32, Shape::batched(&[SEQUENCE]));
    g.add_source(OpKind::Input { kind }, ty, Place::forward(path, layer))
        .unwrap()
}

/// The parts of a plan that are not random.
#[derive(Clone, Debug, PartialEq)]
pub struct Setup {
    /// Number of layers and sizes of the mesh axes of each stage; of interleaved stages the
    /// first of a mesh says its axes.
    pub stages: Vec<(u32, Vec<u32>)>,
    /// Samples per microbatch.
    pub microbatch: u64,
    /// Microbatches per step.
    pub n_microbatches: u32,
    /// Order of passes.
    pub schedule: ScheduleKind,
    /// The training spec; the global batch follows from the microbatches.
    pub train: TrainSpec,
    /// The source of strategies.
    pub style: Style,
    /// The recomputation.
    pub recompute: Recomputed,
}

/// The recomputation of a random plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recomputed {
    /// A named choice.
    Named(Recompute),
    /// Any op that may be, with one chance in two.
    Random,
}

impl Default for Setup {
    fn default() -> Self {
        Setup {
            stages: vec![],
            microbatch: 1,
            n_microbatches: 1,
            schedule: ScheduleKind::OneFOneB,
            train: TrainSpec::default(),
            style: Style::Any,
            recompute: Recomputed::Named(Recompute::None),
        }
    }
}

/// The source of strategies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Whatever the rules allow.
    Any,
    /// Mostly ZeRO: samples are split wherever there are any, and where there are none (states,
    /// updates, accumulated gradients) the first dim.
    Zero,
    /// Nothing that changes the order of additions: arithmetic is replicated, and ops that only
    /// move data or work element by element split any dim.
    Moves,
}

/// A plan for `forward` and its training graph. Every layer has a strategy of its own.
pub fn random_plan(forward: &Graph, setup: &Setup, random: &mut Random) -> (Plan, TrainingGraph) {
    let mut plan = bare(forward, setup);
    recomputed(&mut plan, forward, setup.recompute, random);
    let training = plan.training_graph(forward).unwrap();
    strategies(&mut plan, &training, setup.style, random);
    for c in lowering::cross_edges(&plan, &training).unwrap() {
        let (from, to) = (
            &plan.stages[c.from.index()].mesh,
            &plan.stages[c.to.index()].mesh,
        );
        let all = cross_paths(
            &c.lens,
            Placement {
                mesh: from,
                spec: &c.from_spec,
            },
            Placement {
                mesh: to,
                spec: &c.wanted[0],
            },
        );
        let path = random
            .pick(&all)
            .unwrap_or_else(|| panic!("{} has no way", c.key))
            .clone();
        plan.transfers.insert(c.key, path);
    }
    for e in lowering::edges(&plan, &training).unwrap() {
        let all = paths(&e.from, &e.to);
        let path = random
            .pick(&all)
            .unwrap_or_else(|| panic!("{} has no path", e.key))
            .clone();
        match e.layer {
            Some(layer) => drop(
                plan.layer_strategies[layer.index()]
                    .edges
                    .insert(e.relative, path),
            ),
            None => drop(plan.edges.insert(e.key, path)),
        }
    }
    (plan, training)
}

/// Writes what is recomputed into the strategies of a plan's layers.
fn recomputed(plan: &mut Plan, forward: &Graph, recompute: Recomputed, random: &mut Random) {
    let training = training_graph(forward, &plan.train).unwrap();
    let graph = &training.graph;
    let ids = match recompute {
        Recomputed::Named(policy) => choose(&training, policy, &|_| None),
        Recomputed::Random => {
            let may = graph.iter().filter(|(_, op)| can_recompute(op));
            may.map(|(id, _)| id)
                .filter(|_| random.below(2) == 0)
                .collect()
        }
    };
    for op in ids.into_iter().map(|id| graph.op(id)) {
        let layer = op.layer.unwrap().index();
        let relative = relative_path(&op.path, &graph.layers[layer]);
        plan.layer_strategies[layer].recompute.insert(relative);
    }
}

fn bare(forward: &Graph, setup: &Setup) -> Plan {
    let n_meshes = setup.stages.len() / setup.schedule.virtual_stages() as usize;
    let mut first_rank = 0;
    let meshes = setup.stages[..n_meshes].iter().map(|(_, sizes)| {
        let n_devices = sizes.iter().product();
        let devices = DeviceMesh {
            first_rank: Rank(first_rank),
            n_devices,
        };
        first_rank += n_devices;
        let axis = |(k, &size)| Axis {
            name: format!("a{k}"),
            size,
        };
        let axes = sizes.iter().enumerate().map(axis).collect();
        LogicalMesh::new(devices, axes).unwrap()
    });
    let meshes: Vec<LogicalMesh> = meshes.collect();
    let mut first = 0;
    let stages = setup.stages.iter().enumerate().map(|(i, (count, _))| {
        let runs = (first..first + count)
            .map(|l| LayerRun {
                first: LayerId(l),
                count: 1,
                strategy: l,
            })
            .collect();
        first += count;
        StagePlan {
            mesh: meshes[setup.schedule.route().mesh_of(i, n_meshes)].clone(),
            runs,
        }
    });
    Plan {
        version: PLAN_VERSION,
        passes: PASSES_VERSION,
        name: forward.name.clone(),
        graph: ir::text::print(forward),
        train: TrainSpec {
            global_batch: setup.microbatch * u64::from(setup.n_microbatches),
            ..setup.train.clone()
        },
        cluster: cluster(first_rank),
        microbatch: setup.microbatch,
        n_microbatches: setup.n_microbatches,
        schedule: setup.schedule,
        stages: stages.collect(),
        layer_strategies: vec![LayerStrategy::default(); forward.layers.len()],
        transfers: BTreeMap::new(),
        edges: BTreeMap::new(),
        pins: vec![],
        headroom: None,
        made_for: None,
        predicted: Prediction::default(),
        proof: Proof::default(),
    }
}

fn cluster(n: u32) -> Cluster {
    let device = Device {
        name: "made up".into(),
        peak_flops_per_s: BTreeMap::from([(DType::F32, 1e12)]),
        matmul_efficiency: BTreeMap::from([(DType::F32, 0.5)]),
        matmul_half_size: HalfSize {
            m: 1.0,
            n: 1.0,
            k: 1.0,
        },
        attention_efficiency: 0.5,
        vector_flops_per_s: 1e11,
        memory_bytes: Bytes(1 << 40),
        memory_reserved_bytes: Bytes(0),
        memory_headroom: 0.0,
        memory_bandwidth_bytes_per_s: 1e11,
        memory_efficiency: 0.8,
        launch_s: 1e-6,
        conversion_s_per_element: BTreeMap::new(),
        kernels: None,
        multiprocessors: 0,
        unaligned_matmul_share: 1.0,
        sustained_share: 1.0,
        sustained_share_of: Default::default(),
        power_limit_w: None,
        boost_clock_hz: None,
    };
    let level = Level {
        name: "links".into(),
        devices: n,
        latency_s: 1e-6,
        bandwidth_bytes_per_s: 1e10,
        efficiency: 0.8,
        half_bytes: 1e4,
        ..Level::default()
    };
    Cluster {
        version: CLUSTER_VERSION,
        name: "made up".into(),
        n_hosts: 1,
        devices_per_host: n,
        device,
        levels: vec![level],
        groups: Vec::new(),
        missing: Vec::new(),
        degraded: Vec::new(),
        pool: None,
        storage: None,
        sources: BTreeMap::new(),
        measured: vec![],
    }
}

/// In graph order, for each op a strategy whose operands can be reached from what was made.
fn strategies(plan: &mut Plan, training: &TrainingGraph, style: Style, random: &mut Random) {
    let graph = &training.graph;
    // By layer the first stage of its mesh.
    let stages = plan.stages.iter().enumerate();
    let stage_of: Vec<usize> = stages
        .flat_map(|(i, s)| {
            let mesh = plan.mesh_of(StageId::new(i)).index();
            let n: u32 = s.runs.iter().map(|r| r.count).sum();
            (0..n).map(move |_| mesh)
        })
        .collect();
    let mut made: Vec<Option<ShardingSpec>> = vec![None; graph.values().len()];
    for op in graph.ops() {
        if matches!(op.kind, OpKind::Input { .. } | OpKind::Constant { .. }) {
            continue;
        }
        let Some(layer) = op.layer else {
            op.outputs.iter().for_each(|v| {
                made[v.index()] = Some(ShardingSpec::replicated(graph.ty(*v).shape.rank()))
            });
            continue;
        };
        let stage = stage_of[layer.index()];
        let (strategy, a) = strategy(
            op,
            graph,
            &plan.stages[stage].mesh,
            style,
            random,
            &|v, wanted| {
                let producer = graph.op(graph.value(v).producer);
                let Some(from) = &made[v.index()] else {
                    return wanted.partial.is_empty();
                };
                match producer.layer {
                    Some(l) if stage_of[l.index()] != stage => wanted.partial.is_empty(),
                    _ => from == wanted || !paths(from, wanted).is_empty(),
                }
            },
        );
        op.outputs
            .iter()
            .zip(a.results)
            .for_each(|(v, spec)| made[v.index()] = Some(spec));
        let relative = relative_path(&op.path, &graph.layers[layer.index()]);
        plan.layer_strategies[layer.index()]
            .ops
            .insert(relative, strategy);
    }
}

fn strategy(
    op: &Op,
    graph: &Graph,
    mesh: &LogicalMesh,
    style: Style,
    random: &mut Random,
    reachable: &dyn Fn(ValueId, &ShardingSpec) -> bool,
) -> (OpStrategy, Assignment) {
    let (rule, n_axes) = (graph.rule(op), mesh.axes.len());
    let mut options: Vec<AxisUse> = rule.shardable().map(AxisUse::Factor).collect();
    let usual = zero_use(&rule);
    if style != Style::Moves {
        options.extend((0..rule.linear.len()).map(|i| AxisUse::Partial(i as u32)));
    } else if !moves(&op.kind) {
        options.clear();
    }
    options.push(AxisUse::Replicate);
    for _ in 0..50 {
        let uses: Vec<AxisUse> = (0..n_axes)
            .map(|_| match style {
                Style::Zero if random.below(8) > 0 => usual,
                _ => *random.pick(&options).unwrap(),
            })
            .collect();
        let goes_around = |(queries, _): (FactorId, FactorId)| {
            let mut axes = mesh.axis_ids().zip(&uses);
            axes.any(|(a, u)| *u == AxisUse::Factor(queries) && mesh.size(a) > 1)
        };
        let ring = rule.ring.is_some_and(goes_around) && random.below(2) == 0;
        let strategy = OpStrategy {
            uses,
            reverse: random.below(4) == 0,
            ring,
        };
        let Ok(a) = rule.assign(&strategy) else {
            continue;
        };
        if op
            .inputs
            .iter()
            .zip(&a.operands)
            .all(|(&v, wanted)| reachable(v, wanted))
        {
            return (strategy, a);
        }
    }
    let strategy = OpStrategy::replicate(n_axes);
    let a = rule.assign(&strategy).unwrap();
    (strategy, a)
}

/// The use of an axis by ZeRO: samples where there are any, the first dim otherwise.
fn zero_use(rule: &ShardingRule) -> AxisUse {
    let role = |f: &FactorId| rule.factors[f.index()].role;
    let samples = rule.shardable().find(|f| role(f) == FactorRole::Batch);
    let factor = samples.or_else(|| rule.shardable().next());
    factor.map_or(AxisUse::Replicate, AxisUse::Factor)
}

/// True for ops that give each element of a result the same bits however they are split.
fn moves(kind: &OpKind) -> bool {
    matches!(
        kind,
        OpKind::State { .. }
            | OpKind::Layout
            | OpKind::Cast { .. }
            | OpKind::Binary { .. }
            | OpKind::Broadcast { .. }
            | OpKind::Reshape { .. }
            | OpKind::Transpose { .. }
            | OpKind::Slice { .. }
            | OpKind::Pad { .. }
            | OpKind::Stack { .. }
            | OpKind::Unstack { .. }
            | OpKind::Join
            | OpKind::Dropout { .. }
            | OpKind::Accumulate { .. }
            | OpKind::AdamW { .. }
            | OpKind::Sgd { .. }
    )
}
