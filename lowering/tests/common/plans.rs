//! Plans by simple rules instead of a search, completed as a planner does: cross edges first,
//! then edges, each by the first path there is.

use super::model::{INNER, SEQUENCE};
use ir::cluster::{Cluster, Device, HalfSize};
use ir::op::{AxisUse, FactorRole, OpStrategy, ShardingRule};
use ir::plan::{
    LayerRun, LayerStrategy, PASSES_VERSION, PLAN_VERSION, Plan, Prediction, Proof, ScheduleKind,
    StagePlan, relative_path,
};
use ir::reshard::{Placement, cross_paths, paths};
use ir::training::{TrainingGraph, training_graph};
use ir::{
    Axis, AxisId, Bytes, DeviceMesh, FactorId, Graph, LayerId, LogicalMesh, Op, OpKind, Precision,
    Rank, Region, ShardingSpec, StageId, TrainSpec,
};
use std::collections::BTreeMap;

/// The role of an axis of the stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recipe {
    Replicate,
    Data,
    /// Megatron: the inner dim of the MLP.
    Tensor,
    /// Data parallel with sharded optimizer states.
    Zero1,
    /// And sharded parameters, gathered at every use.
    Zero3,
    /// Data parallel with the parameter sharded at rest and gathered once per step.
    Zero3Step,
}

pub struct Setup {
    /// Axes of every stage's mesh, with their sizes.
    pub axes: Vec<(Recipe, u32)>,
    /// Number of layers of each stage; interleaved ones share their meshes.
    pub layers: Vec<u32>,
    pub n_microbatches: u32,
    pub schedule: ScheduleKind,
    pub precision: Precision,
}

impl Setup {
    pub fn new(recipe: Recipe, ranks: u32, layers: &[u32]) -> Self {
        Setup::grid(&[(recipe, ranks)], layers)
    }
    pub fn grid(axes: &[(Recipe, u32)], layers: &[u32]) -> Self {
        Setup {
            axes: axes.to_vec(),
            layers: layers.to_vec(),
            n_microbatches: 2,
            schedule: ScheduleKind::OneFOneB,
            precision: Precision::F32,
        }
    }
}

const MICROBATCH: u64 = 4;

pub fn plan(forward: &Graph, setup: &Setup) -> (Plan, TrainingGraph) {
    let mut plan = bare(forward, setup);
    let training = training_graph(forward, &plan.train).unwrap();
    strategies(&mut plan, &training, &setup.axes);
    complete(&mut plan, &training);
    (plan, training)
}

/// Stages and no strategies.
fn bare(forward: &Graph, setup: &Setup) -> Plan {
    let mut first = 0;
    let n_ranks: u32 = setup.axes.iter().map(|a| a.1).product();
    let axes: Vec<Axis> = "xyz"
        .chars()
        .zip(&setup.axes)
        .map(|(name, a)| Axis {
            name: name.into(),
            size: a.1,
        })
        .collect();
    let n_meshes = setup.layers.len() / setup.schedule.virtual_stages() as usize;
    let stages = setup.layers.iter().enumerate().map(|(i, &count)| {
        let devices = DeviceMesh {
            first_rank: Rank(setup.schedule.route().mesh_of(i, n_meshes) as u32 * n_ranks),
            n_devices: n_ranks,
        };
        let mesh = LogicalMesh::new(devices, axes.clone()).unwrap();
        let runs = (first..first + count)
            .map(|l| LayerRun {
                first: LayerId(l),
                count: 1,
                strategy: l,
            })
            .collect();
        first += count;
        StagePlan { mesh, runs }
    });
    Plan {
        version: PLAN_VERSION,
        passes: PASSES_VERSION,
        name: forward.name.clone(),
        graph: ir::text::print(forward),
        train: TrainSpec {
            global_batch: MICROBATCH * u64::from(setup.n_microbatches),
            sequence: SEQUENCE,
            precision: setup.precision,
            ..TrainSpec::default()
        },
        cluster: cluster(n_ranks * n_meshes as u32),
        microbatch: MICROBATCH,
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

/// A cluster of devices with a byte of memory, which is all that lowering reads of it: buffers lie as
/// close as they can.
fn cluster(n: u32) -> Cluster {
    let device = Device {
        name: "none".into(),
        peak_flops_per_s: BTreeMap::new(),
        matmul_efficiency: BTreeMap::new(),
        matmul_half_size: HalfSize {
            m: 0.0,
            n: 0.0,
            k: 0.0,
        },
        attention_efficiency: 1.0,
        vector_flops_per_s: 1.0,
        memory_bytes: Bytes(1),
        memory_reserved_bytes: Bytes(0),
        memory_headroom: 0.0,
        memory_bandwidth_bytes_per_s: 1.0,
        memory_efficiency: 1.0,
        launch_s: 0.0,
        conversion_s_per_element: BTreeMap::new(),
        kernels: None,
        multiprocessors: 0,
        unaligned_matmul_share: 1.0,
        sustained_share: 1.0,
        sustained_share_of: Default::default(),
        power_limit_w: None,
        boost_clock_hz: None,
    };
    Cluster {
        version: 1,
        name: "none".into(),
        n_hosts: n,
        devices_per_host: 1,
        device,
        levels: vec![],
        groups: Vec::new(),
        missing: Vec::new(),
        degraded: Vec::new(),
        pool: None,
        storage: None,
        sources: BTreeMap::new(),
        measured: vec![],
    }
}

fn strategies(plan: &mut Plan, training: &TrainingGraph, axes: &[(Recipe, u32)]) {
    let graph = &training.graph;
    let mut made: Vec<Option<ShardingSpec>> = vec![None; graph.values().len()];
    for op in graph.ops() {
        let rule = graph.rule(op);
        let Some(layer) = op.layer else { continue };
        let uses = axes.iter().enumerate().map(|(a, &(recipe, _))| {
            let is_partial = |s: &ShardingSpec| s.partial.contains_key(&AxisId::new(a));
            let partial: Vec<bool> = op
                .inputs
                .iter()
                .map(|v| made[v.index()].as_ref().is_some_and(is_partial))
                .collect();
            axis_use(op, &rule, &partial, recipe)
        });
        let strategy = OpStrategy {
            uses: uses.collect(),
            reverse: false,
            ring: false,
        };
        for (v, spec) in op
            .outputs
            .iter()
            .zip(rule.assign(&strategy).unwrap().results)
        {
            made[v.index()] = Some(spec);
        }
        let relative = relative_path(&op.path, &graph.layers[layer.index()]);
        plan.layer_strategies[layer.index()]
            .ops
            .insert(relative, strategy);
    }
}

fn axis_use(op: &Op, rule: &ShardingRule, partial: &[bool], recipe: Recipe) -> AxisUse {
    let is_state = matches!(op.kind, OpKind::State { .. });
    let is_moment = is_state && op.path.starts_with("moment");
    let shards = match (recipe, op.region) {
        (Recipe::Replicate | Recipe::Data | Recipe::Tensor, _) => false,
        (Recipe::Zero1, Region::StepBegin) => is_moment,
        (Recipe::Zero3, Region::StepBegin) => !op.path.starts_with("shared."),
        (Recipe::Zero3Step, Region::StepBegin) => is_state,
        (_, region) => region == Region::StepEnd && !rule.factors.is_empty(),
    };
    if shards {
        return AxisUse::Factor(FactorId(0));
    }
    if recipe == Recipe::Tensor {
        let inner =
            (0..rule.factors.len()).find(|&f| rule.factors[f].size == ir::Dim::Fixed(INNER));
        return inner.map_or(AxisUse::Replicate, |f| AxisUse::Factor(FactorId::new(f)));
    }
    if recipe == Recipe::Replicate || op.region != Region::Microbatch {
        return AxisUse::Replicate;
    }
    if let Some(f) = (0..rule.factors.len()).find(|&f| rule.factors[f].role == FactorRole::Batch) {
        return AxisUse::Factor(FactorId::new(f));
    }
    // Partial sums pass through linear ops until they are accumulated.
    let set = rule
        .linear
        .iter()
        .position(|set| set.iter().all(|&i| partial[i]));
    set.map_or(AxisUse::Replicate, |s| AxisUse::Partial(s as u32))
}

fn complete(plan: &mut Plan, training: &TrainingGraph) {
    for c in lowering::cross_edges(plan, training).unwrap() {
        let mesh = |s: StageId| plan.stages[s.index()].mesh.clone();
        let (from, to) = (mesh(c.from), mesh(c.to));
        let all = cross_paths(
            &c.lens,
            Placement {
                mesh: &from,
                spec: &c.from_spec,
            },
            Placement {
                mesh: &to,
                spec: &c.wanted[0],
            },
        );
        plan.transfers
            .insert(c.key, all.into_iter().next().unwrap());
    }
    for e in lowering::edges(plan, training).unwrap() {
        let path = paths(&e.from, &e.to)
            .into_iter()
            .next()
            .unwrap_or_else(|| panic!("{} has no path", e.key));
        plan.layer_strategies[e.layer.unwrap().index()]
            .edges
            .insert(e.relative, path);
    }
}
