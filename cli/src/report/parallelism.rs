//! The role of each axis of a stage's mesh for a layer, in the field's terms.
//!
//! Nothing of this is recorded in a plan: it is read off the ops' strategies. An axis that
//! shards the samples of the heavy ops is data parallel, their features tensor parallel, the
//! experts of a mixture expert parallel, the sequence inside attention context parallel (so is
//! its exchange for heads there, Ulysses), the sequence between the matmuls of a tensor-parallel
//! axis sequence parallel. The ZeRO level of an axis (Rajbhandari et al. 2020) says which tensors
//! of a parameter lie split over it although its uses want it whole.

use ir::op::{Assignment, AxisUse, FactorRole};
use ir::plan::{Plan, leaf, relative_path};
use ir::training::{StateRole, TrainingGraph};
use ir::{AxisId, LayerId, Op, OpKind, Origin, Pass, Region, ShardingSpec, ValueId};
use serde::Serialize;
use std::collections::BTreeMap;

/// The role of one axis for one layer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AxisReport {
    /// The name of the axis.
    pub axis: String,
    /// The devices along it.
    pub size: u32,
    /// The kinds of parallelism: `data parallel`, `tensor parallel`, ...; empty when all ranks of
    /// the axis compute the same.
    pub does: Vec<String>,
    /// The ZeRO level of most parameter bytes; `None` where the axis shards the uses of most. Of an axis
    /// that splits samples, the level of the parameters that it does not split: experts, which it may
    /// split too, are not asked.
    pub zero: Option<u8>,
    /// The share of these bytes at that level.
    pub zero_share: f64,
    /// Whether there are parameters that were not asked.
    pub splits_others: bool,
}

/// How a parameter lies over an axis.
#[derive(Clone, Copy, Debug)]
pub struct Level {
    /// The ZeRO level; none where its uses shard it.
    pub zero: Option<u8>,
    /// Its bytes.
    pub bytes: u64,
    /// Its longest dim.
    pub longest: u64,
    /// Whether sums of its gradient over microbatches are in this layer.
    pub has_sums: bool,
}

/// How the parameters of a layer lie over each axis of the stage's mesh. `strategy` is the index of the
/// layer's strategy in the plan.
pub fn levels(
    plan: &Plan,
    training: &TrainingGraph,
    stage: usize,
    strategy: usize,
    layer: LayerId,
) -> Vec<Vec<Level>> {
    let cx = Layer {
        training,
        ops: assignments(plan, training, strategy, layer),
    };
    let axes = plan.stages[stage].mesh.axis_ids();
    axes.map(|axis| cx.zero_levels(axis)).collect()
}

impl AxisReport {
    /// Describes the role in one line.
    pub fn words(&self) -> String {
        let mut does = self.does.join(" and ");
        if does.is_empty() {
            does = "replicated".into();
        }
        let zero = match self.zero {
            Some(level) if level > 0 && self.zero_share > 0.995 => format!(", ZeRO-{level}"),
            Some(level) if level > 0 => format!(
                ", ZeRO-{level} for {:.0}% of the parameter bytes",
                self.zero_share * 100.0
            ),
            _ => String::new(),
        };
        let zero = match self.splits_others && !zero.is_empty() {
            true => {
                let zero = zero.replace("the parameter bytes", "the bytes");
                format!("{zero} for the other parameters")
            }
            false => zero,
        };
        format!("{} ({}): {does}{zero}", self.axis, self.size)
    }
}

/// Finds the roles of the stage's mesh axes for `layer`, whose strategy has this index in the plan.
pub fn axes(
    plan: &Plan,
    training: &TrainingGraph,
    stage: usize,
    strategy: usize,
    layer: LayerId,
) -> Vec<AxisReport> {
    let cx = Layer {
        training,
        ops: assignments(plan, training, strategy, layer),
    };
    let mesh = &plan.stages[stage].mesh;
    mesh.axis_ids()
        .map(|axis| {
            let does = cx.does(axis);
            let mut levels = cx.zero_levels(axis);
            let all = levels.len();
            if does.iter().any(|d| d.starts_with("data parallel")) {
                levels.retain(|l| l.zero.is_some());
            }
            let total: u64 = levels.iter().map(|l| l.bytes).sum();
            let mut by_level: BTreeMap<Option<u8>, u64> = BTreeMap::new();
            levels
                .iter()
                .for_each(|l| *by_level.entry(l.zero).or_default() += l.bytes);
            let most = by_level.iter().max_by_key(|(_, bytes)| **bytes);
            AxisReport {
                axis: mesh.name(axis).to_string(),
                size: mesh.size(axis) as u32,
                splits_others: levels.len() < all,
                does,
                zero: most.and_then(|(level, _)| *level),
                zero_share: most.map_or(0.0, |(_, bytes)| *bytes as f64 / total.max(1) as f64),
            }
        })
        .collect()
}

/// An op with its strategy, and the specs that follow from it.
pub struct Assigned<'a> {
    /// The op.
    pub op: &'a Op,
    /// For each axis, its use in the op.
    pub uses: Vec<AxisUse>,
    /// Whether keys and values go around a ring.
    pub ring: bool,
    /// The roles of the op's factors.
    pub roles: Vec<FactorRole>,
    /// The specs of operands and results.
    pub specs: Assignment,
}

/// Lists the ops of a layer that have a strategy, in graph order.
pub fn assignments<'a>(
    plan: &Plan,
    training: &'a TrainingGraph,
    strategy: usize,
    layer: LayerId,
) -> Vec<Assigned<'a>> {
    let graph = &training.graph;
    let name = graph.layers.get(layer.index()).map_or("", String::as_str);
    let strategies = &plan.layer_strategies[strategy].ops;
    let of_layer = graph.ops().iter().filter(|op| op.layer == Some(layer));
    of_layer
        .filter_map(|op| {
            let strategy = strategies.get(&relative_path(&op.path, name))?;
            let rule = graph.rule(op);
            let specs = rule.assign(strategy).ok()?;
            Some(Assigned {
                op,
                uses: strategy.uses.clone(),
                ring: strategy.ring,
                roles: rule.factors.iter().map(|f| f.role).collect(),
                specs,
            })
        })
        .collect()
}

struct Layer<'a> {
    training: &'a TrainingGraph,
    ops: Vec<Assigned<'a>>,
}

impl Layer<'_> {
    fn does(&self, axis: AxisId) -> Vec<String> {
        let forward = self
            .ops
            .iter()
            .filter(|a| a.op.pass == Pass::F && a.op.region == Region::Microbatch);
        let (mut heavy, mut light): (Vec<_>, Vec<_>) = forward.partition(|a| is_heavy(&a.op.kind));
        if heavy.is_empty() {
            heavy = std::mem::take(&mut light);
        }
        let role_of = |a: &Assigned<'_>| match a.uses.get(axis.index()) {
            Some(AxisUse::Factor(f)) => a.roles.get(f.index()).copied(),
            _ => None,
        };
        let with = |role| {
            heavy
                .iter()
                .filter(|a| role_of(a) == Some(role))
                .map(|a| leaf(&a.op.path).to_string())
                .collect::<Vec<_>>()
        };
        let (batch, expert, feature, sequence) = (
            with(FactorRole::Batch),
            with(FactorRole::Expert),
            with(FactorRole::Feature),
            with(FactorRole::Sequence),
        );
        if exchanges_heads(&heavy, role_of) {
            return vec!["context parallel (Ulysses)".into()];
        }
        let several = [&batch, &expert, &feature, &sequence]
            .iter()
            .filter(|n| !n.is_empty())
            .count()
            > 1;
        let name = |what: &str, ops: &[String]| {
            if several {
                format!("{what} in {}", ops.join(", "))
            } else {
                what.to_string()
            }
        };
        let mut does = Vec::new();
        if !batch.is_empty() {
            does.push(name("data parallel", &batch));
        }
        if !expert.is_empty() {
            does.push(name("expert parallel", &expert));
        }
        if !feature.is_empty() {
            does.push(name("tensor parallel", &feature));
        }
        let attends = heavy.iter().find(|a| {
            matches!(a.op.kind, OpKind::Attention { .. })
                && role_of(a) == Some(FactorRole::Sequence)
        });
        if let Some(attention) = attends {
            does.push(match attention.ring {
                true => "context parallel (ring)".into(),
                false => "context parallel".into(),
            });
        } else if !sequence.is_empty() {
            does.push(name("split along the sequence", &sequence));
        }
        let is_state_space = |a: &&&Assigned<'_>| matches!(a.op.kind, OpKind::StateSpace { .. });
        let mut scans = light.iter().filter(is_state_space);
        if !sequence.is_empty() && scans.any(|a| role_of(a).is_none()) {
            does.push("state spaces whole on each rank".into());
        }
        if !feature.is_empty()
            && light
                .iter()
                .any(|a| role_of(a) == Some(FactorRole::Sequence))
        {
            does.push("sequence parallel between the matmuls".into());
        }
        does
    }

    /// How every parameter lies over `axis`.
    fn zero_levels(&self, axis: AxisId) -> Vec<Level> {
        let graph = &self.training.graph;
        let first = |a: &Assigned<'_>| a.op.outputs.first().copied();
        let making: BTreeMap<Option<ValueId>, &Assigned<'_>> =
            self.ops.iter().map(|a| (first(a), a)).collect();
        // Of several ops with one origin, the last is taken: among a parameter's copies it is the
        // one that the uses read.
        let by_origin: BTreeMap<Origin, &Assigned<'_>> =
            self.ops.iter().map(|a| (a.op.origin, a)).collect();
        let spec_of = |v| making.get(&Some(v)).and_then(|a| a.specs.results.first());
        let splits = |spec: Option<&ShardingSpec>| spec.is_some_and(|s| s.dim_of(axis).is_some());
        let states = || self.training.states.iter();
        let parameters = states()
            .filter(|s| s.role == StateRole::Parameter && making.contains_key(&Some(s.read)));
        let mut levels = Vec::new();
        for state in parameters {
            let of = graph.value(state.read).producer;
            let prepared = by_origin.get(&Origin::Prepared { of });
            let value = prepared.and_then(|a| first(a)).unwrap_or(state.read);
            let uses = || {
                self.ops
                    .iter()
                    .filter(|a| a.op.pass == Pass::F && a.op.region == Region::Microbatch)
                    .flat_map(|a| {
                        a.op.inputs
                            .iter()
                            .enumerate()
                            .filter(|(_, v)| **v == value)
                            .map(move |(k, _)| (a, k))
                    })
            };
            let sums = || {
                uses().filter_map(|(a, k)| {
                    let of = first(a).map(|v| graph.value(v).producer)?;
                    let operand = k as u32;
                    by_origin.get(&Origin::Accumulator { of, operand })
                })
            };
            let accumulated = sums().any(|a| splits(a.specs.results.first()));
            let mut moments =
                states().filter(|s| s.role == StateRole::Moment1 && s.param == state.param);
            let level = match () {
                () if uses().any(|(a, k)| splits(a.specs.operands.get(k))) => None,
                () if splits(spec_of(value)) => Some(3),
                () if accumulated => Some(2),
                () if moments.any(|s| splits(spec_of(s.read))) || splits(spec_of(state.read)) => {
                    Some(1)
                }
                () => Some(0),
            };
            let ty = graph.ty(state.read);
            levels.push(Level {
                zero: level,
                bytes: ty.bytes(1),
                longest: ty.shape.bind(1).into_iter().max().unwrap_or(1),
                has_sums: sums().next().is_some(),
            });
        }
        levels
    }
}

/// Whether the sequence is split but in attention, for which tokens are exchanged for heads.
fn exchanges_heads(
    heavy: &[&Assigned<'_>],
    role_of: impl Fn(&Assigned<'_>) -> Option<FactorRole>,
) -> bool {
    let (attention, others): (Vec<_>, Vec<_>) = heavy
        .iter()
        .partition(|a| matches!(a.op.kind, OpKind::Attention { .. }));
    let all = |ops: &[&&Assigned<'_>], role| {
        !ops.is_empty() && ops.iter().all(|a| role_of(a) == Some(role))
    };
    all(&attention, FactorRole::Feature) && all(&others, FactorRole::Sequence)
}

fn is_heavy(kind: &OpKind) -> bool {
    matches!(
        kind,
        OpKind::DotGeneral { .. }
            | OpKind::Conv2d { .. }
            | OpKind::Attention { .. }
            | OpKind::Embedding
            | OpKind::CrossEntropy
    )
}
