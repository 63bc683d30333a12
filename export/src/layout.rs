//! Layers as a plan lays them out: what each mesh axis does in them, and how their parameters lie.
//!
//! All of it is read off the strategies of ops; pins and the names of axes are not asked. Layers of
//! a run are equal and treated equally, so the first one stands for all.

use crate::ExportError;
use crate::recompute::{Choices, Recomputed};
use ir::offload::Spaces;
use ir::op::{Assignment, AxisUse, FactorRole};
use ir::plan::{LayerRun, Plan, leaf, relative_path};
use ir::training::{StateRole, TrainingGraph};
use ir::{AxisId, DType, LogicalMesh, Op, OpKind, Origin, Pass, Region, ShardingSpec, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// The place of a layer in a language model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// Looks tokens up in a table.
    Embed,
    /// Attends once, and is no end of the model.
    Block,
    /// Ends in the loss.
    Head,
    /// None of these, or several at once.
    Other,
}

/// Layers of one stage that are treated alike.
pub(crate) struct Run {
    /// The stage.
    pub stage: usize,
    /// The number of layers.
    pub count: u32,
    /// The name of the first layer.
    pub name: String,
    /// The names of all of them.
    pub names: Vec<String>,
    /// The place in the model.
    pub kind: Kind,
    /// The roles of the axes of the stage's mesh.
    pub axes: Vec<Axis>,
    /// The parameters of the first layer.
    pub parameters: Vec<Parameter>,
    /// The results of the first layer's forward ops, in graph order.
    pub activations: Vec<Activation>,
    /// The recomputation.
    pub recomputed: Recomputed,
    /// The memories that tensors rest in.
    pub spaces: Spaces,
}

/// The role of one axis of a mesh in a layer.
#[derive(Clone, Debug)]
pub(crate) struct Axis {
    /// Its name.
    pub name: String,
    /// Its devices.
    pub size: u32,
    /// The roles of what it splits in matmuls, attention, lookups and the loss, with the ops;
    /// experts' matmuls apart.
    pub dense: BTreeMap<FactorRole, Vec<String>>,
    /// The same of the experts' matmuls.
    pub experts: BTreeMap<FactorRole, Vec<String>>,
    /// The role in attention, and whether keys and values go around a ring.
    pub attention: Option<(FactorRole, bool)>,
    /// Norms whose tokens it splits along the sequence, and all norms.
    pub norms: (usize, usize),
}

/// How a parameter of a layer lies.
#[derive(Clone, Debug)]
pub(crate) struct Parameter {
    /// Its path.
    pub path: String,
    /// Its path with the layer's name as `{}`.
    pub relative: String,
    /// Its lengths.
    pub shape: Vec<u64>,
    /// Between steps.
    pub at_rest: ShardingSpec,
    /// Between microbatches.
    pub prepared: ShardingSpec,
    /// As the ops that use it read it; where it is only used in other layers, as `prepared`.
    pub in_use: ShardingSpec,
    /// The ZeRO level over each axis; none where uses are split over it.
    pub zero: Vec<Option<u8>>,
}

impl Parameter {
    /// Bytes of the master copy.
    pub fn bytes(&self) -> u64 {
        let elements = self.shape.iter().fold(1u64, |n, &d| n.saturating_mul(d));
        elements.saturating_mul(DType::F32.bytes())
    }
}

/// How a result of a forward op lies.
#[derive(Clone, Debug)]
pub(crate) struct Activation {
    /// The op's path with the layer's name as `{}`.
    pub relative: String,
    /// Its first result.
    pub spec: ShardingSpec,
}

/// All runs of a plan, in the order of stages.
pub(crate) fn runs(plan: &Plan, training: &TrainingGraph) -> Result<Vec<Run>, ExportError> {
    let choices = Choices::of(plan, training)?;
    let mut runs = Vec::new();
    for (stage, s) in plan.stages.iter().enumerate() {
        for r in &s.runs {
            runs.push(run(plan, training, &choices, (stage, &s.mesh), r)?);
        }
    }
    Ok(runs)
}

fn run(
    plan: &Plan,
    training: &TrainingGraph,
    choices: &Choices,
    (stage, mesh): (usize, &LogicalMesh),
    r: &LayerRun,
) -> Result<Run, ExportError> {
    let broken = |what: &str| ExportError::Plan(format!("{} of stage {stage}: {what}", r.first));
    let name = training.graph.layers.get(r.first.index());
    let name = name.ok_or_else(|| broken("no such layer"))?;
    let strategy = plan.layer_strategies.get(r.strategy as usize);
    let strategy = strategy.ok_or_else(|| broken("no such strategy"))?;
    let ops = assigned(plan, training, r, name);
    let layer = Layer { training, ops };
    let names = training.graph.layers.iter();
    let names = names.skip(r.first.index()).take(r.count as usize);
    Ok(Run {
        stage,
        count: r.count,
        name: name.clone(),
        names: names.cloned().collect(),
        kind: layer.kind(),
        axes: mesh.axis_ids().map(|a| layer.axis(a, mesh)).collect(),
        parameters: layer.parameters(mesh, name),
        activations: layer.activations(name),
        recomputed: choices.named(name, &strategy.recompute),
        spaces: strategy.spaces.clone(),
    })
}

/// An op with the specs that its strategy implies.
struct Assigned<'a> {
    op: &'a Op,
    uses: &'a [AxisUse],
    ring: bool,
    roles: Vec<FactorRole>,
    specs: Assignment,
}

/// The ops of a run's first layer that have a strategy, in graph order.
fn assigned<'a>(
    plan: &'a Plan,
    training: &'a TrainingGraph,
    run: &LayerRun,
    name: &str,
) -> Vec<Assigned<'a>> {
    let graph = &training.graph;
    let strategies = &plan.layer_strategies[run.strategy as usize].ops;
    let of_layer = graph.ops().iter().filter(|op| op.layer == Some(run.first));
    let with = |op: &'a Op| {
        let strategy = strategies.get(&relative_path(&op.path, name))?;
        let rule = graph.rule(op);
        let specs = rule.assign(strategy).ok()?;
        Some(Assigned {
            op,
            uses: &strategy.uses,
            ring: strategy.ring,
            roles: rule.factors.iter().map(|f| f.role).collect(),
            specs,
        })
    };
    of_layer.filter_map(with).collect()
}

struct Layer<'a> {
    training: &'a TrainingGraph,
    ops: Vec<Assigned<'a>>,
}

impl Assigned<'_> {
    fn role(&self, axis: AxisId) -> Option<FactorRole> {
        match self.uses.get(axis.index()) {
            Some(AxisUse::Factor(f)) => self.roles.get(f.index()).copied(),
            _ => None,
        }
    }
    fn is_forward(&self) -> bool {
        self.op.pass == Pass::F && self.op.region == Region::Microbatch
    }
    fn is_of_experts(&self) -> bool {
        self.roles.contains(&FactorRole::Expert)
    }
}

impl Layer<'_> {
    fn forward(&self) -> impl Iterator<Item = &Assigned<'_>> {
        self.ops.iter().filter(|a| a.is_forward())
    }

    fn kind(&self) -> Kind {
        let has = |is: fn(&OpKind) -> bool| self.forward().any(|a| is(&a.op.kind));
        let looks_up = has(|k| matches!(k, OpKind::Embedding));
        let ends = has(|k| matches!(k, OpKind::CrossEntropy));
        let n_attentions = self.forward();
        let n_attentions = n_attentions
            .filter(|a| matches!(a.op.kind, OpKind::Attention { .. }))
            .count();
        match (looks_up, n_attentions, ends) {
            (true, 0, false) => Kind::Embed,
            (false, 1, false) => Kind::Block,
            (false, 0, true) => Kind::Head,
            _ => Kind::Other,
        }
    }

    fn axis(&self, axis: AxisId, mesh: &LogicalMesh) -> Axis {
        let (mut dense, mut experts) = (BTreeMap::new(), BTreeMap::new());
        for a in self.forward().filter(|a| is_heavy(&a.op.kind)) {
            let Some(role) = a.role(axis) else { continue };
            let to: &mut BTreeMap<FactorRole, Vec<String>> = match a.is_of_experts() {
                true => &mut experts,
                false => &mut dense,
            };
            to.entry(role)
                .or_default()
                .push(leaf(&a.op.path).to_string());
        }
        let attends = |a: &&Assigned<'_>| matches!(a.op.kind, OpKind::Attention { .. });
        let attention = self.forward().find(attends);
        let norms: Vec<&Assigned<'_>> = self.forward().filter(|a| is_norm(&a.op.kind)).collect();
        let of_tokens = norms
            .iter()
            .filter(|a| a.specs.results.first().is_some_and(|s| s.dims.len() == 3));
        let split = of_tokens
            .clone()
            .filter(|a| a.role(axis) == Some(FactorRole::Sequence));
        Axis {
            name: mesh.name(axis).to_string(),
            size: mesh.size(axis) as u32,
            dense,
            experts,
            attention: attention.and_then(|a| Some((a.role(axis)?, a.ring))),
            norms: (split.count(), of_tokens.count()),
        }
    }

    fn activations(&self, name: &str) -> Vec<Activation> {
        let of = |a: &Assigned<'_>| {
            let spec = a.specs.results.first()?.clone();
            Some(Activation {
                relative: relative_path(&a.op.path, name),
                spec,
            })
        };
        let own = |a: &&Assigned<'_>| a.op.origin == Origin::Forward;
        self.forward().filter(own).filter_map(of).collect()
    }

    fn parameters(&self, mesh: &LogicalMesh, name: &str) -> Vec<Parameter> {
        let graph = &self.training.graph;
        let first = |a: &Assigned<'_>| a.op.outputs.first().copied();
        let making: BTreeMap<Option<ValueId>, &Assigned<'_>> =
            self.ops.iter().map(|a| (first(a), a)).collect();
        // Of several ops with one origin the last is taken: among a parameter's copies it is the
        // one that the uses read.
        let by_origin: BTreeMap<Origin, &Assigned<'_>> =
            self.ops.iter().map(|a| (a.op.origin, a)).collect();
        let spec_of = |v: ValueId| making.get(&Some(v)).and_then(|a| a.specs.results.first());
        let states = || self.training.states.iter();
        let mut parameters = Vec::new();
        for state in states().filter(|s| s.role == StateRole::Parameter) {
            let Some(at_rest) = spec_of(state.read) else {
                continue;
            };
            let of = graph.value(state.read).producer;
            let prepared = by_origin.get(&Origin::Prepared { of });
            let value = prepared.and_then(|a| first(a)).unwrap_or(state.read);
            let prepared = spec_of(value).unwrap_or(at_rest);
            let uses: Vec<(&Assigned<'_>, usize)> = self
                .forward()
                .flat_map(|a| {
                    let inputs = a.op.inputs.iter().enumerate();
                    inputs
                        .filter(|(_, v)| **v == value)
                        .map(move |(k, _)| (a, k))
                })
                .collect();
            let in_use = uses.first().and_then(|(a, k)| a.specs.operands.get(*k));
            let sums: Vec<&ShardingSpec> = uses
                .iter()
                .filter_map(|(a, k)| {
                    let of = graph.value(first(a)?).producer;
                    let operand = *k as u32;
                    let sum = by_origin.get(&Origin::Accumulator { of, operand })?;
                    sum.specs.results.first()
                })
                .collect();
            let moments = states()
                .filter(|s| s.role == StateRole::Moment1 && s.param == state.param)
                .filter_map(|s| spec_of(s.read));
            let moments: Vec<&ShardingSpec> = moments.collect();
            let level = |axis: AxisId| {
                let splits = |s: &ShardingSpec| s.dim_of(axis).is_some();
                let used = uses.iter().filter_map(|(a, k)| a.specs.operands.get(*k));
                match () {
                    () if used.clone().any(splits) => None,
                    () if splits(prepared) => Some(3),
                    () if sums.iter().any(|s| splits(s)) => Some(2),
                    () if moments.iter().any(|s| splits(s)) || splits(at_rest) => Some(1),
                    () => Some(0),
                }
            };
            parameters.push(Parameter {
                path: state.path.clone(),
                relative: relative_path(&state.path, name),
                shape: graph.ty(state.read).shape.bind(1),
                at_rest: at_rest.clone(),
                prepared: prepared.clone(),
                in_use: in_use.unwrap_or(prepared).clone(),
                zero: mesh.axis_ids().map(level).collect(),
            });
        }
        parameters
    }
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

fn is_norm(kind: &OpKind) -> bool {
    matches!(kind, OpKind::LayerNorm { .. } | OpKind::RmsNorm { .. })
}

/// The names of a set of ops without the layer's name.
pub(crate) fn short(ops: &BTreeSet<String>) -> Vec<String> {
    ops.iter().map(|op| op.replace("{}.", "")).collect()
}
