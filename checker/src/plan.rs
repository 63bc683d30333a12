//! Is the plan a plan? Every key, index and path in it against the graph it embeds.

use crate::report::{Report, Violation};
use ir::op::Assignment;
use ir::plan::{LayerStrategy, PASSES_VERSION, PLAN_VERSION, Plan, edge_key, relative_path, transfer_key, write_key};
use ir::reshard::{LayoutStep, apply_all};
use ir::training::{TrainingGraph, training_graph};
use ir::program::TemplateKind;
use ir::{Graph, LayerId, LogicalMesh, Op, OpKind, Pass, Region, ShardingSpec, StageId, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// Everything that is wrong with a plan; empty when it can be lowered.
///
/// Checks versions, figures, batch sizes, the graph, that stages cover layers and meshes the
/// cluster without overlap, that every op has a strategy its rule allows, and that every
/// recorded layout change leads from the spec before it to the spec after it. Never panics.
pub fn check_plan(plan: &Plan) -> Vec<Violation> {
    let mut report = Report::default();
    versions(plan, &mut report);
    figures(plan, &mut report);
    batch(plan, &mut report);
    let meshes = meshes(plan, &mut report);
    let n_problems = plan.train.problems().len();
    if let (true, 0, Some(training)) = (meshes, n_problems, training(plan, &mut report))
        && let Some(layers) = layers(plan, &training.graph, &mut report)
    {
        let cx = Cx { plan, training: &training, graph: &training.graph, layers };
        let specs = cx.strategies(&mut report);
        cx.edges(&specs, &mut report);
    }
    report.finish()
}

fn versions(plan: &Plan, report: &mut Report) {
    for (key, found, expected) in [("version", plan.version, PLAN_VERSION), ("passes", plan.passes, PASSES_VERSION)] {
        if found != expected {
            report.add(key, "version", expected.to_string(), found.to_string());
        }
    }
}

fn figures(plan: &Plan, report: &mut Report) {
    for p in plan.cluster.problems() {
        report.add("cluster", "cluster", "figures in range", p);
    }
    for p in plan.train.problems() {
        report.add("train", "train", "figures in range", p);
    }
    let p = &plan.predicted;
    let mut numbers = vec![
        ("predicted.step_time_s".to_string(), p.step_time_s.0),
        ("predicted.tokens_per_s".into(), p.tokens_per_s),
        ("predicted.mfu".into(), p.mfu),
        ("predicted.bubble".into(), p.bubble),
        ("proof.objective_s".into(), plan.proof.objective_s.0),
        ("proof.lower_bound_s".into(), plan.proof.lower_bound_s.0),
        ("proof.gap".into(), plan.proof.gap),
    ];
    for (i, s) in p.stages.iter().enumerate() {
        for (key, x) in [
            ("forward_s", s.forward_s),
            ("backward_s", s.backward_s),
            ("step_s", s.step_s),
            ("compute_s", s.compute_s),
            ("collective_s", s.collective_s),
            ("transfer_s", s.transfer_s),
        ] {
            numbers.push((format!("predicted.stages[{i}].{key}"), x.0));
        }
    }
    for (key, x) in numbers {
        if !x.is_finite() || x < 0.0 {
            report.add(key, "finite", "a number from 0", x.to_string());
        }
    }
}

fn batch(plan: &Plan, report: &mut Report) {
    let product = plan.microbatch.checked_mul(u64::from(plan.n_microbatches));
    if plan.microbatch == 0 || plan.n_microbatches == 0 || product != Some(plan.train.global_batch) {
        report.add(
            "microbatch",
            "batch",
            format!("microbatch x n_microbatches = {}", plan.train.global_batch),
            format!("{} x {}", plan.microbatch, plan.n_microbatches),
        );
    }
}

/// What is wrong with one mesh in a cluster of `n_devices`.
pub(crate) fn mesh_problem(mesh: &LogicalMesh, n_devices: u32) -> Option<(String, String)> {
    if LogicalMesh::new(mesh.devices, mesh.axes.clone()).is_none() {
        let sizes: Vec<u32> = mesh.axes.iter().map(|a| a.size).collect();
        return Some((format!("axes that multiply to {}", mesh.devices.n_devices), format!("{sizes:?}")));
    }
    let names: BTreeSet<&str> = mesh.axes.iter().map(|a| a.name.as_str()).collect();
    if names.len() != mesh.axes.len() {
        return Some(("axes of different names".into(), format!("{:?}", mesh.axes)));
    }
    let end = mesh.devices.first_rank.0.checked_add(mesh.devices.n_devices);
    if end.is_none_or(|end| end > n_devices) {
        let d = mesh.devices;
        return Some((format!("devices of a cluster of {n_devices}"), format!("{} from {}", d.n_devices, d.first_rank)));
    }
    None
}

fn meshes(plan: &Plan, report: &mut Report) -> bool {
    let mut good = true;
    if plan.stages.is_empty() {
        report.add("stages", "stages", "at least one stage", "none");
        good = false;
    }
    let mut runs = Vec::new();
    for (i, stage) in plan.stages.iter().enumerate() {
        match mesh_problem(&stage.mesh, plan.cluster.n_devices()) {
            Some((expected, actual)) => {
                report.add(format!("stages[{i}].mesh"), "mesh", expected, actual);
                good = false;
            }
            None => runs.push((stage.mesh.devices.first_rank.0, stage.mesh.devices.n_devices, i)),
        }
    }
    runs.sort_unstable();
    for w in runs.windows(2) {
        if w[0].0.saturating_add(w[0].1) > w[1].0 {
            report.add(format!("stages[{}].mesh", w[1].2), "mesh", "devices of its own", format!("devices of stage {} too", w[0].2));
            good = false;
        }
    }
    good
}

fn training(plan: &Plan, report: &mut Report) -> Option<TrainingGraph> {
    let forward = match ir::text::parse(&plan.graph) {
        Ok(graph) => graph,
        Err(e) => {
            report.add("graph", "graph", "the text of a graph", format!("line {}: {}", e.line, e.message));
            return None;
        }
    };
    let broken = ir::verify::verify(&forward);
    for v in &broken {
        report.add(format!("graph {}", v.path), "graph", format!("{}: {}", v.rule, v.expected), v.actual.clone());
    }
    if !broken.is_empty() {
        return None;
    }
    match training_graph(&forward, &plan.train) {
        Ok(t) => Some(t),
        Err(e) => {
            report.add("graph", "graph", "a graph that can be trained", e.to_string());
            None
        }
    }
}

/// Where a layer is.
#[derive(Clone, Copy)]
struct Home {
    stage: usize,
    strategy: usize,
}

fn layers(plan: &Plan, graph: &Graph, report: &mut Report) -> Option<Vec<Home>> {
    let n = graph.layers.len();
    let mut homes = Vec::with_capacity(n);
    for (i, stage) in plan.stages.iter().enumerate() {
        if stage.runs.is_empty() {
            report.add(format!("stages[{i}]"), "layers", "at least one layer", "none");
        }
        for (j, run) in stage.runs.iter().enumerate() {
            let place = format!("stages[{i}].runs[{j}]");
            let left = n - homes.len();
            if run.first.index() != homes.len() || run.count == 0 || run.count as usize > left {
                report.add(place, "layers", format!("1 to {left} layers from {}", homes.len()), format!("{} from {}", run.count, run.first.0));
                return None;
            }
            let strategy = run.strategy as usize;
            if strategy >= plan.layer_strategies.len() {
                report.add(place, "layers", format!("one of {} strategies", plan.layer_strategies.len()), run.strategy.to_string());
                return None;
            }
            homes.extend(std::iter::repeat_n(Home { stage: i, strategy }, run.count as usize));
        }
    }
    if homes.len() != n {
        report.add("stages", "layers", format!("{n} layers"), homes.len().to_string());
        return None;
    }
    Some(homes)
}

struct Cx<'a> {
    plan: &'a Plan,
    training: &'a TrainingGraph,
    graph: &'a Graph,
    layers: Vec<Home>,
}

/// Per op, the specs of its strategy; `None` for world ops and where the strategy is wrong.
type Specs = Vec<Option<Assignment>>;

impl Cx<'_> {
    fn home(&self, op: &Op) -> Option<(Home, LayerId)> {
        let layer = op.layer?;
        Some((*self.layers.get(layer.index())?, layer))
    }
    fn layer_name(&self, layer: LayerId) -> &str {
        self.graph.layers.get(layer.index()).map_or("", String::as_str)
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
            for key in self.strategy(*home).ops.keys().filter(|k| !used.contains(*k)) {
                let place = format!("layer_strategies[{}].ops.{key}", home.strategy);
                report.add(place, "strategy", format!("an op of layer {}", self.layer_name(LayerId::new(i))), "none of that path");
            }
        }
        specs
    }

    fn assignment(&self, op: &Op, home: Home, key: &str, report: &mut Report) -> Option<Assignment> {
        let place = || format!("layer_strategies[{}].ops.{key} ({})", home.strategy, op.path);
        let Some(strategy) = self.strategy(home).ops.get(key) else {
            if !made_at_use(op) {
                report.add(place(), "strategy", "a strategy", "none");
            }
            return None;
        };
        let n = self.mesh(home.stage).axes.len();
        if strategy.uses.len() != n {
            report.add(place(), "strategy", format!("{n} axes"), strategy.uses.len().to_string());
            return None;
        }
        match self.graph.rule(op).assign(strategy) {
            Ok(a) => Some(a),
            Err(e) => {
                report.add(place(), "strategy", "a strategy that the op's rule allows", e.to_string());
                None
            }
        }
    }

    fn edges(&self, specs: &Specs, report: &mut Report) {
        let mut known = Known::default();
        for (id, op) in self.graph.iter() {
            for (k, &v) in op.inputs.iter().enumerate() {
                let key = edge_key(&op.path, k);
                // What comes together in a world sum, or is made where it is used, has no way.
                if matches!(op.kind, OpKind::GlobalNorm) || made_at_use(self.graph.op(self.graph.value(v).producer)) {
                    let wanted = specs[id.index()].as_ref().and_then(|a| a.operands.get(k));
                    if let Some(spec) = wanted.filter(|s| !s.partial.is_empty()) {
                        report.add(key.clone(), "edge", "nothing partial, as sources are made", format!("{:?}", spec.partial));
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
            let to = specs[self.graph.value(s.read).producer.index()].as_ref().and_then(|a| a.results.first().cloned());
            self.edge(s.write, reader, write_key(&s.path), to, specs, &mut known, report);
        }
        self.unknown(&known, report);
    }

    /// The spec of a value where it is made.
    fn made(&self, v: ValueId, specs: &Specs) -> Option<ShardingSpec> {
        let value = self.graph.value(v);
        match self.graph.op(value.producer).layer {
            None => Some(ShardingSpec::replicated(value.ty.shape.rank())),
            Some(_) => specs[value.producer.index()].as_ref()?.results.get(value.result as usize).cloned(),
        }
    }

    /// One way of a value into an operand, or into what a state keeps.
    #[allow(clippy::too_many_arguments)]
    fn edge(&self, v: ValueId, consumer: &Op, key: String, to: Option<ShardingSpec>, specs: &Specs, known: &mut Known, report: &mut Report) {
        let producer = self.graph.op(self.graph.value(v).producer);
        let here = self.home(consumer);
        let recorded = self.plan.edges.get(&key).or_else(|| {
            let (home, layer) = here?;
            self.strategy(home).edges.get(&relative_path(&key, self.layer_name(layer)))
        });
        self.note(consumer, key.clone(), known);
        let (Some(from), Some(to)) = (self.made(v, specs), to) else { return };
        let source = self.home(producer).map(|(h, _)| h.stage);
        let (stage, from) = match (source, here.map(|(h, _)| h.stage)) {
            (Some(s), Some(t)) if s != t => {
                let Some(arrived) = self.transfer(v, s, t, &from, known, report) else { return };
                // What a layer does with a value of its own stage says nothing about one
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
        // Uses of one value in one spec, stage and kind of template share the changed tensor;
        // the first may speak for all.
        let group = (stage, template_of(consumer), v, to.clone());
        let steps = match (recorded, known.groups.get(&group)) {
            (Some(own), _) => own.clone(),
            (None, Some(first)) if from != to => first.clone(),
            (None, _) => Vec::new(),
        };
        self.leads(&key, &steps, stage, &from, &to, report);
        known.groups.entry(group).or_insert(steps);
    }

    fn note(&self, consumer: &Op, key: String, known: &mut Known) {
        if let Some((_, layer)) = self.home(consumer) {
            known.relative.entry(layer).or_default().insert(relative_path(&key, self.layer_name(layer)));
        }
        known.absolute.insert(key);
    }

    fn transfer(&self, v: ValueId, from_stage: usize, to_stage: usize, from: &ShardingSpec, known: &mut Known, report: &mut Report) -> Option<ShardingSpec> {
        let key = transfer_key(&self.graph.value_name(v), StageId::new(to_stage));
        let place = format!("transfers.{key}");
        let first = known.transfers.insert(key.clone());
        let Some(path) = self.plan.transfers.get(&key) else {
            if first {
                report.add(place, "transfer", "a layout change between the stages", "none");
            }
            return None;
        };
        let rank = self.graph.ty(v).shape.rank();
        for (spec, stage) in [(&path.source_spec, from_stage), (&path.target_spec, to_stage)] {
            let mut problems = spec.problems(self.mesh(stage));
            if spec.dims.len() != rank || !spec.partial.is_empty() {
                problems.push(format!("{} dims, {} partial axes", spec.dims.len(), spec.partial.len()));
            }
            for p in problems {
                report.add(place.clone(), "transfer", format!("a spec of {rank} dims, nothing partial"), p);
                return None;
            }
        }
        self.leads(&format!("{place}.before"), &path.before, from_stage, from, &path.source_spec, report);
        let arrived = self.replay(&path.after, to_stage, &path.target_spec);
        if arrived.is_none() {
            report.add(format!("{place}.after"), "edge", "steps that apply", format!("{:?}", path.after));
        }
        arrived
    }

    fn replay(&self, steps: &[LayoutStep], stage: usize, from: &ShardingSpec) -> Option<ShardingSpec> {
        let n = self.mesh(stage).axes.len();
        let exist = steps.iter().flat_map(LayoutStep::axes).all(|a| a.index() < n);
        exist.then(|| apply_all(steps, from)).flatten()
    }

    fn leads(&self, place: &str, steps: &[LayoutStep], stage: usize, from: &ShardingSpec, to: &ShardingSpec, report: &mut Report) {
        let mesh = self.mesh(stage);
        let reached = self.replay(steps, stage, from);
        if reached.as_ref() != Some(to) {
            let expected = format!("steps from {} to {}", from.display(mesh), to.display(mesh));
            let actual = reached.map_or(format!("{steps:?}, which do not apply"), |r| format!("{steps:?}, which lead to {}", r.display(mesh)));
            report.add(place, "edge", expected, actual);
        }
    }

    fn unknown(&self, known: &Known, report: &mut Report) {
        for key in self.plan.edges.keys().filter(|k| !known.absolute.contains(*k)) {
            report.add(format!("edges.{key}"), "edge", "an operand of an op", "none of that name");
        }
        for key in self.plan.transfers.keys().filter(|k| !known.transfers.contains(*k)) {
            report.add(format!("transfers.{key}"), "transfer", "a value that moves to that stage", "none");
        }
        let empty = BTreeSet::new();
        for (i, home) in self.layers.iter().enumerate() {
            let layer = LayerId::new(i);
            let here = known.relative.get(&layer).unwrap_or(&empty);
            for key in self.strategy(*home).edges.keys().filter(|k| !here.contains(*k)) {
                let place = format!("layer_strategies[{}].edges.{key}", home.strategy);
                report.add(place, "edge", format!("an operand of an op of layer {}", self.layer_name(layer)), "none of that name");
            }
        }
    }
}

/// True for data and constants, which every template makes in the spec that it wants.
fn made_at_use(op: &Op) -> bool {
    matches!(op.kind, OpKind::Input { .. } | OpKind::Constant { .. })
}

/// The kind of template that an op runs in.
fn template_of(op: &Op) -> TemplateKind {
    match (op.region, op.pass) {
        (Region::StepBegin, _) if matches!(op.kind, OpKind::State { .. }) => TemplateKind::StepEnd,
        (Region::StepBegin, _) => TemplateKind::StepBegin,
        (Region::StepEnd, _) => TemplateKind::StepEnd,
        (Region::Microbatch, Pass::F) => TemplateKind::Forward,
        (Region::Microbatch, _) => TemplateKind::Backward,
    }
}

/// Uses that share a changed tensor: stage, template, value, spec.
type Group = (usize, TemplateKind, ValueId, ShardingSpec);

/// Keys that mean something, and the steps of the first use of each group.
#[derive(Default)]
struct Known {
    groups: BTreeMap<Group, Vec<LayoutStep>>,
    absolute: BTreeSet<String>,
    relative: BTreeMap<LayerId, BTreeSet<String>>,
    transfers: BTreeSet<String>,
}
