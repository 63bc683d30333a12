//! A plan in the terms that frameworks share: degrees, batch, ZeRO level, recomputation, schedule.
//!
//! The terms are read off what the plan does. What has no such terms is an *obstacle*, where it
//! leaves a degree without a value (axes that mix roles, stages on unlike meshes), and a
//! *deviation* where most of the plan has the value that is stated.

use crate::layout::{Axis, Kind, Run};
use crate::model::{ModelShape, why_unknown};
use crate::names;
use crate::recompute::Recomputed;
use ir::offload::Spaces;
use ir::op::{FactorRole, OpKind, SequenceOrder};
use ir::plan::{Plan, ScheduleKind};
use ir::{Graph, Optimizer, Precision};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// A plan in common terms.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Name of the model.
    pub name: String,
    /// Its family, as `model_type` of a configuration has it.
    pub family: String,
    /// Devices that the plan uses.
    pub devices: u32,
    /// Hosts, and devices of each, as a launcher wants them.
    pub hosts: (u32, u32),
    /// Whether devices are ranks on processors.
    pub on_cpu: bool,
    /// The degrees; none where `obstacles` says why.
    pub degrees: Option<Degrees>,
    /// Why there are no degrees.
    pub obstacles: Vec<String>,
    /// Where the plan is not uniformly what is stated here.
    pub deviations: Vec<Deviation>,
    /// Samples of a step.
    pub global_batch: u64,
    /// Tokens of a sample.
    pub sequence: u64,
    /// Microbatches of a step.
    pub accumulation: u64,
    /// Order of passes.
    #[serde(serialize_with = "schedule_name")]
    pub schedule: ScheduleKind,
    /// The stages in pipeline order; none where a layer is no embedding, block or head.
    pub stages: Option<Vec<Stage>>,
    /// The recomputation of each block.
    pub recompute: Vec<Recomputed>,
    /// Classes of tensors that rest in other memories.
    pub offload: Spaces,
    /// Precision of compute; masters and states are f32.
    pub precision: Precision,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// Largest norm of the gradients.
    pub clip_norm: Option<f64>,
    /// Dropout probability.
    pub dropout: f64,
    /// Seed.
    pub seed: u64,
    /// The shape of the model; none where it is no decoder of blocks.
    pub model: Option<ModelShape>,
    /// The reason where there is none.
    #[serde(skip)]
    pub why_no_model: &'static str,
}

fn schedule_name<S: serde::Serializer>(kind: &ScheduleKind, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(kind.name())
}

/// The degrees of a plan. `data * context * tensor * pipeline` is the number of devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Degrees {
    /// Ranks that split samples.
    pub data: u32,
    /// Data ranks over which states are split at `zero`; the others hold copies.
    pub sharded: u32,
    /// Ranks that split sequences over which states are split too.
    pub context_sharded: u32,
    /// The ZeRO level over them.
    pub zero: u8,
    /// Ranks that split features.
    pub tensor: u32,
    /// Ranks that split sequences.
    pub context: u32,
    /// How these meet in attention; none where there is one.
    pub context_attention: Option<ContextAttention>,
    /// Whether sequences are stored in zigzag order.
    pub zigzag: bool,
    /// Ranks that split experts.
    pub expert: u32,
    /// Ranks that split the features of an expert.
    pub expert_tensor: u32,
    /// Meshes in a row.
    pub pipeline: u32,
    /// Stages on each mesh.
    pub virtual_stages: u32,
    /// Whether norms and residuals are split along the sequence over the tensor ranks.
    pub sequence_parallel: bool,
    /// Samples that a data rank works on at a time.
    pub micro_batch: u64,
}

/// How ranks that split the sequence meet in attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ContextAttention {
    /// Keys and values are gathered.
    Gather,
    /// Keys and values go around.
    Ring,
    /// Tokens are exchanged for heads.
    Ulysses,
}

/// The layers of a stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Stage {
    /// Whether the embedding is among them.
    pub embed: bool,
    /// The first block and the number of blocks.
    pub blocks: (u64, u64),
    /// Whether the head is among them.
    pub head: bool,
}

/// A place where the plan differs from what the summary states of all of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Deviation {
    /// The subject that differs.
    pub subject: Subject,
    /// Where.
    pub place: String,
    /// The plan's own way there.
    pub what: String,
    /// The way that the summary states.
    pub stated: String,
}

/// The subject of a deviation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Subject {
    /// Over which dims and ranks a parameter or an activation is split.
    Placement,
    /// The ZeRO level.
    Zero,
    /// Attention over the ranks that split sequences.
    Context,
    /// The order of ranks.
    Ranks,
    /// Where tensors rest.
    Offload,
}

/// The role of an axis for a run of layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// All ranks compute the same, or there is one.
    Idle,
    /// Splits samples.
    Data,
    /// Splits the sequence.
    Context(ContextAttention),
    /// Splits features.
    Tensor,
}

/// The role of an axis, or why it has several.
pub(crate) fn role(axis: &Axis) -> Result<Role, String> {
    if axis.size <= 1 {
        return Ok(Role::Idle);
    }
    // Routers see tokens as the residuals lie.
    let counts = |ops: &&String| !ops.ends_with(".router");
    let of = |role: FactorRole| {
        let ops = axis.dense.get(&role).into_iter().flatten();
        ops.filter(counts).cloned().collect::<Vec<String>>()
    };
    let [batch, feature, sequence] =
        [FactorRole::Batch, FactorRole::Feature, FactorRole::Sequence].map(of);
    let exchanges = axis.attention == Some((FactorRole::Feature, false)) && feature.len() == 1;
    match (batch.is_empty(), feature.is_empty(), sequence.is_empty()) {
        (true, true, true) => Ok(Role::Idle),
        (false, true, true) => Ok(Role::Data),
        (true, false, true) => Ok(Role::Tensor),
        (true, true, false) => Ok(Role::Context(match axis.attention {
            Some((_, true)) => ContextAttention::Ring,
            _ => ContextAttention::Gather,
        })),
        (true, false, false) if exchanges => Ok(Role::Context(ContextAttention::Ulysses)),
        _ => {
            let parts = [
                ("samples", batch),
                ("features", feature),
                ("the sequence", sequence),
            ];
            let parts: Vec<String> = parts
                .into_iter()
                .filter(|(_, ops)| !ops.is_empty())
                .map(|(what, ops)| format!("{what} in {}", ops.join(", ")))
                .collect();
            Err(format!("axis {} splits {}", axis.name, parts.join(" and ")))
        }
    }
}

/// Summarises a plan whose runs are `runs`.
pub(crate) fn summarise(plan: &Plan, forward: &Graph, runs: &[Run]) -> Summary {
    let devices: u32 = plan.meshes().map(|m| m.n_devices()).sum();
    let mut found = Found::default();
    let degrees = degrees(plan, forward, runs, &mut found);
    let blocks = runs.iter().filter(|r| r.kind == Kind::Block);
    let recompute = blocks
        .clone()
        .flat_map(|r| std::iter::repeat_n(r.recomputed.clone(), r.count as usize))
        .collect();
    let spaces: Vec<&Spaces> = blocks.map(|r| &r.spaces).collect();
    let offload = spaces.iter().find(|s| !s.is_empty());
    let offload = offload.map(|s| (*s).clone()).unwrap_or_default();
    if spaces.iter().any(|s| **s != offload) {
        found.deviations.push(Deviation {
            subject: Subject::Offload,
            place: "some blocks".into(),
            what: "their tensors rest elsewhere than those of others".into(),
            stated: "all blocks alike".into(),
        });
    }
    let per_host = plan.cluster.devices_per_host.max(1);
    let hosts = match devices {
        n if n <= per_host => (1, n),
        n => (n.div_ceil(per_host), per_host),
    };
    Summary {
        name: plan.name.clone(),
        family: forward.name.clone(),
        devices,
        hosts,
        on_cpu: plan.cluster.pool.is_some(),
        degrees: degrees.filter(|_| found.obstacles.is_empty()),
        obstacles: found.obstacles,
        deviations: found.deviations,
        global_batch: plan.train.global_batch,
        sequence: plan.train.sequence,
        accumulation: u64::from(plan.n_microbatches),
        schedule: plan.schedule,
        stages: stages(plan, runs),
        recompute,
        offload,
        precision: plan.train.precision,
        optimizer: plan.train.optimizer,
        clip_norm: plan.train.clip_norm,
        dropout: plan.train.dropout,
        seed: plan.train.seed,
        model: ModelShape::of(forward, plan.train.sequence),
        why_no_model: why_unknown(forward),
    }
}

/// The layers of each stage; none where a layer is something else than an end or a block, or an end
/// stands where none can.
fn stages(plan: &Plan, runs: &[Run]) -> Option<Vec<Stage>> {
    let mut next = 0;
    let mut all = Vec::new();
    for i in 0..plan.stages.len() {
        let of_stage = || runs.iter().filter(move |r| r.stage == i);
        if of_stage().any(|r| r.kind == Kind::Other) {
            return None;
        }
        let count = |kind| -> u64 {
            let of_kind = of_stage().filter(|r| r.kind == kind);
            of_kind.map(|r| u64::from(r.count)).sum()
        };
        let blocks = count(Kind::Block);
        all.push(Stage {
            embed: count(Kind::Embed) > 0,
            blocks: (next, blocks),
            head: count(Kind::Head) > 0,
        });
        next += blocks;
    }
    Some(all)
}

/// Findings on the way to the degrees.
#[derive(Default)]
struct Found {
    obstacles: Vec<String>,
    deviations: Vec<Deviation>,
}

impl Degrees {
    /// Ranks over which states are split.
    pub fn shards(&self) -> u32 {
        self.sharded * self.context_sharded
    }

    /// Whether states are split over some of the ranks that hold the same parameters, and copied
    /// over others.
    pub fn has_copies(&self) -> bool {
        self.shards() < self.data * self.context
    }
}

impl Found {
    fn obstacle(&mut self, words: String) {
        if !self.obstacles.contains(&words) {
            self.obstacles.push(words);
        }
    }
    fn deviation(&mut self, subject: Subject, place: String, what: String, stated: String) {
        let new = Deviation {
            subject,
            place,
            what,
            stated,
        };
        if !self.deviations.contains(&new) {
            self.deviations.push(new);
        }
    }
}

/// The degrees of one run of layers, with the order of its axes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct OfRun {
    data: u32,
    tensor: u32,
    context: u32,
}

fn degrees(plan: &Plan, forward: &Graph, runs: &[Run], found: &mut Found) -> Option<Degrees> {
    // Of models without blocks all layers count.
    let has_blocks = runs.iter().any(|r| r.kind == Kind::Block);
    let decides = |r: &&Run| !has_blocks || r.kind == Kind::Block;
    let mut of_stage: BTreeMap<usize, (Vec<Role>, String)> = BTreeMap::new();
    for run in runs.iter().filter(decides) {
        let place = format!("{} (stage {})", run_name(run), run.stage);
        let roles: Result<Vec<Role>, String> = run.axes.iter().map(role).collect();
        let roles = match roles {
            Ok(roles) => roles,
            Err(words) => {
                found.obstacle(format!("{place}: {words}"));
                continue;
            }
        };
        for (axis, _) in run
            .axes
            .iter()
            .zip(&roles)
            .filter(|(a, r)| a.size > 1 && **r == Role::Idle)
        {
            found.obstacle(format!(
                "{place}: all {} ranks along axis {} compute the same",
                axis.size, axis.name
            ));
        }
        match of_stage.get(&run.stage) {
            None => {
                of_stage.insert(run.stage, (roles, place));
            }
            Some((first, _)) if alike(first, &roles) => {}
            Some((_, other)) => found.obstacle(format!(
                "{place}: its axes have other roles than in {other}"
            )),
        }
    }
    if !found.obstacles.is_empty() {
        return None;
    }
    let sizes = |stage: usize| -> Vec<u32> {
        let mesh = &plan.stages[stage].mesh;
        mesh.axes.iter().map(|a| a.size).collect()
    };
    let of = |stage: usize, roles: &[Role]| {
        let sizes = sizes(stage);
        let product = |is: fn(&Role) -> bool| -> u32 {
            let those = sizes.iter().zip(roles).filter(|(_, r)| is(r));
            those.map(|(s, _)| *s).product()
        };
        OfRun {
            data: product(|r| *r == Role::Data),
            tensor: product(|r| *r == Role::Tensor),
            context: product(|r| matches!(r, Role::Context(_))),
        }
    };
    let mut stages = of_stage.iter();
    let (&first, (roles, _)) = stages.next()?;
    let degrees = of(first, roles);
    for (&stage, (roles, _)) in stages {
        let other = of(stage, roles);
        if other != degrees {
            found.obstacle(format!(
                "stage {stage}: data {}, context {}, tensor {}, but stage {first} has data {}, context {}, tensor {}",
                other.data, other.context, other.tensor, degrees.data, degrees.context, degrees.tensor
            ));
        }
    }
    let n_first = plan.stages[first].mesh.n_devices();
    for (i, s) in plan.stages.iter().enumerate() {
        if s.mesh.n_devices() != n_first {
            found.obstacle(format!(
                "stage {i} has {} devices, but stage {first} has {n_first}",
                s.mesh.n_devices()
            ));
        }
    }
    if !plan
        .microbatch
        .is_multiple_of(u64::from(degrees.data.max(1)))
    {
        found.obstacle(format!(
            "{} samples of a microbatch are shared unevenly by {} data ranks",
            plan.microbatch, degrees.data
        ));
    }
    if !found.obstacles.is_empty() {
        return None;
    }
    let context = context(runs, has_blocks, found);
    ends(runs, &of_stage, found);
    order(plan, &of_stage, found);
    let (zero, [sharded, context_sharded]) = zero(plan, runs, &of_stage, found);
    tensor_dims(runs, &of_stage, found);
    let (expert, expert_tensor) = experts(runs);
    Some(Degrees {
        data: degrees.data,
        sharded,
        context_sharded,
        zero,
        tensor: degrees.tensor,
        context: degrees.context,
        context_attention: context.filter(|_| degrees.context > 1),
        zigzag: forward.ops().iter().any(|op| match op.kind {
            OpKind::Attention { order, .. } => matches!(order, SequenceOrder::Zigzag { .. }),
            _ => false,
        }),
        expert,
        expert_tensor,
        pipeline: plan.n_meshes() as u32,
        virtual_stages: plan.schedule.virtual_stages(),
        sequence_parallel: sequence_parallel(runs, &of_stage, found),
        micro_batch: plan.microbatch / u64::from(degrees.data.max(1)),
    })
}

type Roles = BTreeMap<usize, (Vec<Role>, String)>;

/// Whether axes have the same roles, however attention meets.
fn alike(a: &[Role], b: &[Role]) -> bool {
    let same =
        |(a, b): (&Role, &Role)| a == b || matches!((a, b), (Role::Context(_), Role::Context(_)));
    a.len() == b.len() && a.iter().zip(b).all(same)
}

/// How attention meets in most blocks.
fn context(runs: &[Run], has_blocks: bool, found: &mut Found) -> Option<ContextAttention> {
    let mut first = None;
    for run in runs.iter().filter(|r| !has_blocks || r.kind == Kind::Block) {
        for axis in &run.axes {
            let Ok(Role::Context(how)) = role(axis) else {
                continue;
            };
            let stated = *first.get_or_insert(how);
            if stated != how {
                let words = |h: ContextAttention| format!("{h:?}").to_lowercase();
                found.deviation(
                    Subject::Context,
                    run_name(run),
                    format!("context ranks meet in attention by {}", words(how)),
                    words(stated),
                );
            }
        }
    }
    first
}

/// Embedding and head that use axes otherwise than the blocks of their stage.
fn ends(runs: &[Run], of_stage: &Roles, found: &mut Found) {
    for run in runs
        .iter()
        .filter(|r| matches!(r.kind, Kind::Embed | Kind::Head))
    {
        let Some((roles, _)) = of_stage.get(&run.stage) else {
            continue;
        };
        for (axis, expected) in run.axes.iter().zip(roles) {
            let fits = |own: &Role| match (expected, own) {
                (_, Role::Idle) => axis.size == 1 || *expected == Role::Tensor,
                (a, b) => alike(&[*a], &[*b]),
            };
            match role(axis) {
                Ok(own) if fits(&own) => {}
                Ok(own) => found.deviation(
                    Subject::Placement,
                    run_name(run),
                    format!("axis {} {}", axis.name, does(own)),
                    format!("as in the blocks, where it {}", does(*expected)),
                ),
                Err(words) => found.deviation(
                    Subject::Placement,
                    run_name(run),
                    words,
                    format!(
                        "as in the blocks, where axis {} {}",
                        axis.name,
                        does(*expected)
                    ),
                ),
            }
        }
    }
}

fn does(role: Role) -> &'static str {
    match role {
        Role::Idle => "splits nothing",
        Role::Data => "splits samples",
        Role::Context(_) => "splits the sequence",
        Role::Tensor => "splits features",
    }
}

/// Frameworks put tensor ranks next to each other, then context, then data ranks.
fn order(plan: &Plan, of_stage: &Roles, found: &mut Found) {
    let rank = |r: &Role| match r {
        Role::Idle => None,
        Role::Data => Some(0),
        Role::Context(_) => Some(1),
        Role::Tensor => Some(2),
    };
    for (&stage, (roles, _)) in of_stage {
        let mesh = &plan.stages[stage].mesh;
        let order: Vec<u8> = roles.iter().filter_map(rank).collect();
        if !order.is_sorted() {
            let axes = mesh.axes.iter().zip(roles).filter(|(a, _)| a.size > 1);
            let axes: Vec<String> = axes
                .map(|(a, r)| format!("{} ({})", a.name, does(*r)))
                .collect();
            found.deviation(
                Subject::Ranks,
                format!("stage {stage}"),
                format!(
                    "neighbouring ranks lie along the last of the axes {}",
                    axes.join(", ")
                ),
                "neighbouring ranks split features, then the sequence, then samples".into(),
            );
        }
    }
}

/// The ZeRO level of most parameter bytes, and over how many data and context ranks: both kinds hold
/// the same parameters. Experts that lie over data ranks are split over fewer, so they are asked only
/// where a model has nothing else.
fn zero(plan: &Plan, runs: &[Run], of_stage: &Roles, found: &mut Found) -> (u8, [u32; 2]) {
    // Bytes by level and numbers of ranks.
    let (mut shared, mut experts): (Levels, Levels) = (Levels::new(), Levels::new());
    for run in runs {
        let Some((roles, _)) = of_stage.get(&run.stage) else {
            continue;
        };
        let mesh = &plan.stages[run.stage].mesh;
        for parameter in &run.parameters {
            let levels = parameter.zero.iter().zip(roles).zip(&mesh.axes);
            let is_copied = |role: &Role| matches!(role, Role::Data | Role::Context(_));
            let all: Vec<(Option<u8>, Role, u32)> = levels
                .filter(|((_, role), _)| is_copied(role))
                .map(|((level, role), axis)| (*level, *role, axis.size))
                .collect();
            let known = all
                .iter()
                .filter_map(|(level, role, n)| Some((((*level)?), *role, *n)));
            let known: Vec<(u8, Role, u32)> = known.collect();
            let Some(level) = known.iter().map(|k| k.0).max() else {
                continue;
            };
            let split = || known.iter().filter(|k| k.0 > 0);
            let of = |is_data: bool| -> u32 {
                let those = split().filter(|k| (k.1 == Role::Data) == is_data);
                those.map(|k| k.2).product()
            };
            let over = [of(true), of(false)];
            let to = match known.len() == all.len() {
                true => &mut shared,
                false => &mut experts,
            };
            let total = parameter.bytes().saturating_mul(u64::from(run.count));
            let of_level = to.entry((level, over)).or_default();
            *of_level = of_level.saturating_add(total);
        }
    }
    let bytes = if shared.is_empty() { &experts } else { &shared };
    let Some((&(level, over), &most)) = bytes.iter().max_by_key(|(_, bytes)| **bytes) else {
        return (0, [1, 1]);
    };
    let at = |levels: &Levels| -> u64 {
        let those = levels.iter().filter(|(k, _)| k.0 == level);
        those.map(|(_, b)| b).sum()
    };
    let total: u64 = shared.values().chain(experts.values()).sum();
    let share = (at(&shared) + at(&experts)) as f64 / total.max(1) as f64;
    if share < MOST {
        let rest = shared.keys().chain(experts.keys()).filter(|k| k.0 != level);
        let rest: BTreeSet<String> = rest.map(|k| k.0.to_string()).collect();
        found.deviation(
            Subject::Zero,
            format!("{:.1}% of the parameter bytes", (1.0 - share) * 100.0),
            format!(
                "ZeRO level {}",
                rest.into_iter().collect::<Vec<_>>().join(" and ")
            ),
            format!("ZeRO level {level}"),
        );
    }
    if level > 0 && (most as f64) < MOST * at(bytes) as f64 {
        found.deviation(
            Subject::Zero,
            "some parameters".into(),
            format!(
                "their states are split over another number of ranks than {}",
                ranks_words(over)
            ),
            format!("all split over {}", ranks_words(over)),
        );
    }
    (level, over)
}

/// Bytes of parameters by ZeRO level and by the numbers of data and context ranks that they are split
/// over.
type Levels = BTreeMap<(u8, [u32; 2]), u64>;

/// Data and context ranks in words: `8`, or `4 data x 2 context`.
fn ranks_words([data, context]: [u32; 2]) -> String {
    match context {
        1 => data.to_string(),
        _ => format!("{data} data x {context} context"),
    }
}

/// The share of parameter bytes from which on a level is that of all.
const MOST: f64 = 0.995;

/// Parameters that tensor axes split otherwise than frameworks do.
fn tensor_dims(runs: &[Run], of_stage: &Roles, found: &mut Found) {
    for run in runs {
        let Some((roles, _)) = of_stage.get(&run.stage) else {
            continue;
        };
        for parameter in &run.parameters {
            let Some(expected) = names::tensor_dim(parameter) else {
                continue;
            };
            for (k, axis) in run.axes.iter().enumerate() {
                if roles.get(k) != Some(&Role::Tensor) {
                    continue;
                }
                let dim = parameter.in_use.dim_of(ir::AxisId::new(k));
                let holds_experts = axis.experts.contains_key(&FactorRole::Expert);
                let is_expert = parameter.shape.len() == 3 && parameter.path.contains(".moe.");
                let expected = match holds_experts && is_expert {
                    true => Some(0),
                    false => expected,
                };
                if dim == expected {
                    continue;
                }
                let words = |dim: Option<usize>| match dim {
                    None => "whole on every tensor rank".to_string(),
                    Some(d) => format!("split over the tensor ranks along dim {d}"),
                };
                let place = match run.count {
                    1 => parameter.path.clone(),
                    _ => format!(
                        "{} of {}",
                        parameter.relative.replace("{}.", ""),
                        run_name(run)
                    ),
                };
                found.deviation(Subject::Placement, place, words(dim), words(expected));
            }
        }
    }
}

/// Whether norms and residuals of the blocks are split along the sequence over tensor ranks.
fn sequence_parallel(runs: &[Run], of_stage: &Roles, found: &mut Found) -> bool {
    let (mut split, mut all) = (0usize, 0usize);
    for run in runs.iter().filter(|r| r.kind == Kind::Block) {
        let Some((roles, _)) = of_stage.get(&run.stage) else {
            continue;
        };
        for (axis, role) in run.axes.iter().zip(roles) {
            if *role == Role::Tensor {
                split += axis.norms.0 * run.count as usize;
                all += axis.norms.1 * run.count as usize;
            }
        }
    }
    let is_parallel = 2 * split > all;
    if split > 0 && split < all {
        found.deviation(
            Subject::Placement,
            format!(
                "{} of {all} norms",
                if is_parallel { all - split } else { split }
            ),
            match is_parallel {
                true => "whole on every tensor rank".into(),
                false => "split along the sequence over the tensor ranks".into(),
            },
            match is_parallel {
                true => "sequence parallelism in all".into(),
                false => "no sequence parallelism".into(),
            },
        );
    }
    is_parallel
}

/// Ranks that split experts, and ranks that split the features of one.
fn experts(runs: &[Run]) -> (u32, u32) {
    let blocks = runs.iter().filter(|r| r.kind == Kind::Block);
    let with = blocks.map(|r| {
        let over = |role: FactorRole| -> u32 {
            let axes = r.axes.iter().filter(|a| a.experts.contains_key(&role));
            axes.map(|a| a.size).product()
        };
        (over(FactorRole::Expert), over(FactorRole::Feature))
    });
    with.max().unwrap_or((1, 1))
}

/// Names a run of layers: `h.0`, or `h.0 to h.11`.
pub(crate) fn run_name(run: &Run) -> String {
    match run.count {
        1 => run.name.clone(),
        n => {
            let last = run.name.rsplit_once('.').and_then(|(scope, number)| {
                let number: u64 = number.parse().ok()?;
                Some(format!("{scope}.{}", number + u64::from(n) - 1))
            });
            match last {
                Some(last) => format!("{} to {last}", run.name),
                None => format!("{} and the {} behind it", run.name, n - 1),
            }
        }
    }
}
