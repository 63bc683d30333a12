//! Strategies and the paths between them: every op has a strategy that its rule allows, and
//! every recorded layout change leads from the spec before it to the spec after it.
//!
//! A value's way into an operand is empty where the specs are equal. Between meshes it is a
//! transfer, then whatever is recorded for the operand. Data and constants are made in the
//! spec that is wanted, so nothing leads there.

use super::Home;
use crate::report::Report;
use ir::op::Assignment;
use ir::plan::{LayerStrategy, Plan, edge_key, relative_path, transfer_key, write_key};
use ir::program::TemplateKind;
use ir::reshard::{LayoutStep, apply_all};
use ir::schedule::Schedule;
use ir::training::TrainingGraph;
use ir::{Graph, LayerId, LogicalMesh, Op, OpKind, Pass, Region, ShardingSpec, StageId, ValueId};
use std::collections::{BTreeMap, BTreeSet};

pub(super) fn check(plan: &Plan, training: &TrainingGraph, layers: Vec<Home>, report: &mut Report) {
    let cx = Cx {
        plan,
        schedule: plan.schedule.schedule(),
        training,
        graph: &training.graph,
        layers,
    };
    let specs = cx.strategies(report);
    cx.edges(&specs, report);
}

struct Cx<'a> {
    plan: &'a Plan,
    schedule: Box<dyn Schedule>,
    training: &'a TrainingGraph,
    graph: &'a Graph,
    layers: Vec<Home>,
}

/// For each op, the specs that its strategy gives; `None` for world ops and for a wrong strategy.
type Specs = Vec<Option<Assignment>>;

impl Cx<'_> {
    fn home(&self, op: &Op) -> Option<(Home, LayerId)> {
        let layer = op.layer?;
        Some((*self.layers.get(layer.index())?, layer))
    }
    fn layer_name(&self, layer: LayerId) -> &str {
        self.graph
            .layers
            .get(layer.index())
            .map_or("", String::as_str)
    }
    fn strategy(&self, home: Home) -> &LayerStrategy {
        &self.plan.layer_strategies[home.strategy]
    }
    fn mesh(&self, stage: usize) -> &LogicalMesh {
        &self.plan.stages[stage].mesh
    }

    fn strategies(&self, report: &mut Report) -> Specs {
        let mut used: BTreeMap<LayerId, BTreeSet<String>> = BTreeMap::new();
        let mut specs = Vec::with_capacity(self.graph.ops().len());
        for op in self.graph.ops() {
            let Some((home, layer)) = self.home(op) else {
                specs.push(None);
                continue;
            };
            let key = relative_path(&op.path, self.layer_name(layer));
            specs.push(self.assignment(op, home, &key, report));
            used.entry(layer).or_default().insert(key);
        }
        for (i, home) in self.layers.iter().enumerate() {
            let empty = BTreeSet::new();
            let used = used.get(&LayerId::new(i)).unwrap_or(&empty);
            for key in self
                .strategy(*home)
                .ops
                .keys()
                .filter(|k| !used.contains(*k))
            {
                let place = format!("layer_strategies[{}].ops.{key}", home.strategy);
                report.add(
                    place,
                    "strategy",
                    format!("an op of layer {}", self.layer_name(LayerId::new(i))),
                    "none of that path",
                );
            }
        }
        specs
    }

    fn assignment(
        &self,
        op: &Op,
        home: Home,
        key: &str,
        report: &mut Report,
    ) -> Option<Assignment> {
        let place = || {
            format!(
                "layer_strategies[{}].ops.{key} ({})",
                home.strategy, op.path
            )
        };
        let Some(strategy) = self.strategy(home).ops.get(key) else {
            if !made_at_use(op) {
                report.add(place(), "strategy", "a strategy", "none");
            }
            return None;
        };
        let n = self.mesh(home.stage).axes.len();
        if strategy.uses.len() != n {
            report.add(
                place(),
                "strategy",
                format!("{n} axes"),
                strategy.uses.len().to_string(),
            );
            return None;
        }
        match self.graph.rule(op).assign(strategy) {
            Ok(a) => Some(a),
            Err(e) => {
                report.add(
                    place(),
                    "strategy",
                    "a strategy that the op's rule allows",
                    e.to_string(),
                );
                None
            }
        }
    }

    fn edges(&self, specs: &Specs, report: &mut Report) {
        let mut known = Known::default();
        for (id, op) in self.graph.iter() {
            for (k, &v) in op.inputs.iter().enumerate() {
                let key = edge_key(&op.path, k);
                // Values that come together in a world sum, or are made where they are used, have
                // no path.
                if matches!(op.kind, OpKind::GlobalNorm)
                    || made_at_use(self.graph.op(self.graph.value(v).producer))
                {
                    let wanted = specs[id.index()].as_ref().and_then(|a| a.operands.get(k));
                    if let Some(spec) = wanted.filter(|s| !s.partial.is_empty()) {
                        report.add(
                            key.clone(),
                            "edge",
                            "nothing partial, as sources are made",
                            format!("{:?}", spec.partial),
                        );
                    }
                    self.note(op, key, &mut known);
                    continue;
                }
                let to = match (op.layer, &specs[id.index()]) {
                    (None, _) => Some(ShardingSpec::replicated(self.graph.ty(v).shape.rank())),
                    (Some(_), a) => a.as_ref().and_then(|a| a.operands.get(k).cloned()),
                };
                self.edge(v, op, key, to, specs, &mut known, report);
            }
        }
        for s in &self.training.states {
            let reader = self.graph.op(self.graph.value(s.read).producer);
            let to = specs[self.graph.value(s.read).producer.index()]
                .as_ref()
                .and_then(|a| a.results.first().cloned());
            self.edge(
                s.write,
                reader,
                write_key(&s.path),
                to,
                specs,
                &mut known,
                report,
            );
        }
        self.unknown(&known, report);
    }

    /// Returns the spec in which a value is made.
    fn made(&self, v: ValueId, specs: &Specs) -> Option<ShardingSpec> {
        let value = self.graph.value(v);
        match self.graph.op(value.producer).layer {
            None => Some(ShardingSpec::replicated(value.ty.shape.rank())),
            Some(_) => specs[value.producer.index()]
                .as_ref()?
                .results
                .get(value.result as usize)
                .cloned(),
        }
    }

    /// Checks one value's way into an operand, or into the place where a state is kept.
    #[allow(clippy::too_many_arguments)]
    fn edge(
        &self,
        v: ValueId,
        consumer: &Op,
        key: String,
        to: Option<ShardingSpec>,
        specs: &Specs,
        known: &mut Known,
        report: &mut Report,
    ) {
        let producer = self.graph.op(self.graph.value(v).producer);
        let here = self.home(consumer);
        let recorded = self.plan.edges.get(&key).or_else(|| {
            let (home, layer) = here?;
            self.strategy(home)
                .edges
                .get(&relative_path(&key, self.layer_name(layer)))
        });
        self.note(consumer, key.clone(), known);
        let (Some(from), Some(to)) = (self.made(v, specs), to) else {
            return;
        };
        let mesh = |stage: usize| self.plan.mesh_of(StageId::new(stage)).index();
        let source = self.home(producer).map(|(h, _)| mesh(h.stage));
        let (stage, from) = match (source, here.map(|(h, _)| mesh(h.stage))) {
            (Some(s), Some(t)) if s != t => {
                let Some(arrived) = self.transfer(v, s, t, &from, known, report) else {
                    return;
                };
                // The layer's use of a value of its own stage says nothing about one
                // that arrives as wanted.
                if arrived == to {
                    return;
                }
                (t, arrived)
            }
            (_, Some(t)) => (t, from),
            // World ops want everything replicated; how it gets there need not be recorded.
            (Some(s), None) if recorded.is_some() => (s, from),
            (_, None) => return,
        };
        // Uses of one value in one spec, stage and kind of template share the changed tensor, so
        // the first of them may record the change for all.
        let template = self.template_of(consumer);
        let chunk = template.pass().map_or(0, |_| {
            here.map_or(0, |(h, _)| self.plan.chunk_of(StageId::new(h.stage)))
        });
        let group = (stage, (template, chunk), v, to.clone());
        let steps = match (recorded, known.groups.get(&group)) {
            (Some(own), _) => own.clone(),
            (None, Some(first)) if from != to => first.clone(),
            (None, _) => Vec::new(),
        };
        self.leads(&key, &steps, stage, &from, &to, report);
        known.groups.entry(group).or_insert(steps);
    }

    /// Returns the kind of template that an op runs in; of a state, that which writes it.
    fn template_of(&self, op: &Op) -> TemplateKind {
        match op.region {
            Region::StepBegin if matches!(op.kind, OpKind::State { .. }) => {
                match self.training.is_asynchronous() {
                    true => self.schedule.slot_of(Pass::Update).into(),
                    false => TemplateKind::StepEnd,
                }
            }
            Region::StepBegin => TemplateKind::StepBegin,
            Region::StepEnd => TemplateKind::StepEnd,
            Region::Microbatch => self.schedule.slot_of(op.pass).into(),
        }
    }

    fn note(&self, consumer: &Op, key: String, known: &mut Known) {
        if let Some((_, layer)) = self.home(consumer) {
            known
                .relative
                .entry(layer)
                .or_default()
                .insert(relative_path(&key, self.layer_name(layer)));
        }
        known.absolute.insert(key);
    }

    fn transfer(
        &self,
        v: ValueId,
        from_stage: usize,
        to_stage: usize,
        from: &ShardingSpec,
        known: &mut Known,
        report: &mut Report,
    ) -> Option<ShardingSpec> {
        let key = transfer_key(&self.graph.value_name(v), StageId::new(to_stage));
        let place = format!("transfers.{key}");
        let first = known.transfers.insert(key.clone());
        let Some(path) = self.plan.transfers.get(&key) else {
            if first {
                report.add(
                    place,
                    "transfer",
                    "a layout change between the meshes",
                    "none",
                );
            }
            return None;
        };
        let rank = self.graph.ty(v).shape.rank();
        for (spec, stage) in [
            (&path.source_spec, from_stage),
            (&path.target_spec, to_stage),
        ] {
            let mut problems = spec.problems(self.mesh(stage));
            if spec.dims.len() != rank || !spec.partial.is_empty() {
                problems.push(format!(
                    "{} dims, {} partial axes",
                    spec.dims.len(),
                    spec.partial.len()
                ));
            }
            if let Some(p) = problems.into_iter().next() {
                let expected = format!("a spec of {rank} dims, nothing partial");
                report.add(place.clone(), "transfer", expected, p);
                return None;
            }
        }
        self.leads(
            &format!("{place}.before"),
            &path.before,
            from_stage,
            from,
            &path.source_spec,
            report,
        );
        let arrived = self.replay(&path.after, to_stage, &path.target_spec);
        if arrived.is_none() {
            report.add(
                format!("{place}.after"),
                "edge",
                "steps that apply",
                format!("{:?}", path.after),
            );
        }
        arrived
    }

    fn replay(
        &self,
        steps: &[LayoutStep],
        stage: usize,
        from: &ShardingSpec,
    ) -> Option<ShardingSpec> {
        let n = self.mesh(stage).axes.len();
        let exist = steps
            .iter()
            .flat_map(LayoutStep::axes)
            .all(|a| a.index() < n);
        exist.then(|| apply_all(steps, from)).flatten()
    }

    fn leads(
        &self,
        place: &str,
        steps: &[LayoutStep],
        stage: usize,
        from: &ShardingSpec,
        to: &ShardingSpec,
        report: &mut Report,
    ) {
        let mesh = self.mesh(stage);
        let reached = self.replay(steps, stage, from);
        if reached.as_ref() != Some(to) {
            let expected = format!("steps from {} to {}", from.display(mesh), to.display(mesh));
            let actual = reached.map_or(format!("{steps:?}, which do not apply"), |r| {
                format!("{steps:?}, which lead to {}", r.display(mesh))
            });
            report.add(place, "edge", expected, actual);
        }
    }

    fn unknown(&self, known: &Known, report: &mut Report) {
        for key in self
            .plan
            .edges
            .keys()
            .filter(|k| !known.absolute.contains(*k))
        {
            report.add(
                format!("edges.{key}"),
                "edge",
                "an operand of an op",
                "none of that name",
            );
        }
        for key in self
            .plan
            .transfers
            .keys()
            .filter(|k| !known.transfers.contains(*k))
        {
            report.add(
                format!("transfers.{key}"),
                "transfer",
                "a value that moves to the mesh of that stage",
                "none",
            );
        }
        let empty = BTreeSet::new();
        for (i, home) in self.layers.iter().enumerate() {
            let layer = LayerId::new(i);
            let here = known.relative.get(&layer).unwrap_or(&empty);
            for key in self
                .strategy(*home)
                .edges
                .keys()
                .filter(|k| !here.contains(*k))
            {
                let place = format!("layer_strategies[{}].edges.{key}", home.strategy);
                report.add(
                    place,
                    "edge",
                    format!("an operand of an op of layer {}", self.layer_name(layer)),
                    "none of that name",
                );
            }
        }
    }
}

/// Says whether an op is data or a constant, which every template makes in the spec that it wants.
fn made_at_use(op: &Op) -> bool {
    matches!(op.kind, OpKind::Input { .. } | OpKind::Constant { .. })
}

/// The uses that share a changed tensor: mesh, template (its kind, and which of the mesh's stages
/// it plays), value, spec.
type Group = (usize, (TemplateKind, u32), ValueId, ShardingSpec);

/// The keys that have a meaning, and the steps of the first use of each group.
#[derive(Default)]
struct Known {
    groups: BTreeMap<Group, Vec<LayoutStep>>,
    absolute: BTreeSet<String>,
    relative: BTreeMap<LayerId, BTreeSet<String>>,
    transfers: BTreeSet<String>,
}
