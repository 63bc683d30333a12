//! From a chosen pipeline to a plan document: strategies by layer, then the layout changes
//! that the program will need, each by its cheapest path.

use crate::layer_model::LayerModel;
use crate::layers::Layers;
use crate::prices::{Buckets, Prices};
use cost_model::collectives;
use ir::cluster::Cluster;
use ir::offload::Spaces;
use ir::plan::{LayerRun, LayerStrategy, Plan, StagePlan, relative_path};
use ir::reshard::{self, CrossPath, LayoutStep, Placement};
use ir::training::TrainingGraph;
use ir::{LayerId, LogicalMesh, Origin, ShardingSpec};
use lowering::{CrossEdge, Layouts, LowerError};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

/// The absolute key of an edge and its path.
type KeyedPath = (String, Vec<LayoutStep>);

/// One stage with everything decided but the paths.
pub(crate) struct ChosenStage<'a> {
    pub layers: Range<usize>,
    pub mesh: LogicalMesh,
    pub choices: Vec<ChosenLayer<'a>>,
}

/// A layer with what was chosen for it.
pub(crate) struct ChosenLayer<'a> {
    /// The training graph that it is a layer of, and the layers of that.
    pub training: &'a TrainingGraph,
    pub layers: &'a Layers,
    /// The model of its kind.
    pub model: &'a LayerModel,
    /// The choice of each of the model's groups.
    pub groups: &'a [u32],
}

/// Adds a stage to a plan: runs of layers that share a strategy, their tensors resting in `spaces`.
pub(crate) fn add_stage(plan: &mut Plan, stage: &ChosenStage<'_>, spaces: &Spaces) {
    let mut runs: Vec<LayerRun> = Vec::new();
    for (layer, chosen) in stage.layers.clone().zip(&stage.choices) {
        let mut strategy = layer_strategy(layer, chosen);
        strategy.spaces.clone_from(spaces);
        let index = plan
            .layer_strategies
            .iter()
            .position(|x| *x == strategy)
            .unwrap_or_else(|| {
                plan.layer_strategies.push(strategy);
                plan.layer_strategies.len() - 1
            }) as u32;
        match runs.last_mut() {
            Some(run) if run.strategy == index => run.count += 1,
            _ => runs.push(LayerRun {
                first: LayerId::new(layer),
                count: 1,
                strategy: index,
            }),
        }
    }
    plan.stages.push(StagePlan {
        mesh: stage.mesh.clone(),
        runs,
    });
}

/// The strategy of `layer`.
fn layer_strategy(layer: usize, chosen: &ChosenLayer<'_>) -> LayerStrategy {
    let (model, layers) = (chosen.model, chosen.layers);
    let graph = &chosen.training.graph;
    let name = &graph.layers[layer];
    let mut strategy = LayerStrategy::default();
    for (group, &c) in model.groups.iter().zip(chosen.groups).take(model.n_own) {
        for (&id, part) in group.ops.iter().zip(&group.choices[c as usize].ops) {
            let own = layers
                .counterpart(id, layer)
                .expect("the groups of a model are of the first layer of its kind");
            strategy.ops.insert(
                relative_path(&graph.op(own).path, name),
                part.strategy.clone(),
            );
        }
    }
    let sources = layers.ops[layer].iter().filter_map(|&id| {
        let origin = graph.op(id).origin;
        origin.of().filter(|&of| origin == Origin::Twin { of })
    });
    strategy.recompute = sources
        .map(|id| relative_path(&graph.op(id).path, name))
        .collect();
    strategy
}

/// Records the cheapest path of every layout change that the plan's program needs; `layouts`
/// are the plan's.
pub(crate) fn record_paths(
    plan: &mut Plan,
    layouts: &Layouts,
    training: &TrainingGraph,
    buckets: &Buckets,
) -> Result<(), LowerError> {
    let cluster = plan.cluster.clone();
    for edge in layouts.cross_edges() {
        if let Some(path) = best_cross(&cluster, plan, edge, buckets) {
            plan.transfers.insert(edge.key.clone(), path);
        }
    }
    // A path belongs to a layer strategy when every layer with that strategy takes it; paths
    // that only some take (from another kind of layer, from another stage) stand apart.
    let mut of_layer: BTreeMap<LayerId, u32> = BTreeMap::new();
    for run in plan.stages.iter().flat_map(|s| &s.runs) {
        of_layer.extend((run.first.0..run.first.0 + run.count).map(|l| (LayerId(l), run.strategy)));
    }
    let mut n_layers: BTreeMap<u32, usize> = BTreeMap::new();
    of_layer
        .values()
        .for_each(|k| *n_layers.entry(*k).or_default() += 1);
    let mut shared: BTreeMap<(u32, String), Vec<KeyedPath>> = BTreeMap::new();
    let meshes: Vec<LogicalMesh> = plan.stages.iter().map(|s| s.mesh.clone()).collect();
    let seen = meshes.iter().map(|mesh| cluster.seen_by(mesh.devices));
    let seen: Vec<Cow<'_, Cluster>> = seen.collect();
    // Stages on one mesh share what its layout changes cost.
    let first_on = |mesh| meshes.iter().position(|other| other == mesh);
    let owner: Vec<usize> = meshes.iter().filter_map(first_on).collect();
    let prices = meshes.iter().zip(&seen);
    let prices = prices.map(|(mesh, seen)| Prices::new(seen, mesh, buckets));
    let mut prices: Vec<Prices<'_>> = prices.collect();
    for edge in layouts.edges(plan, training)? {
        let best = prices[owner[edge.stage.index()]].best_path(
            &edge.from,
            &edge.to,
            &edge.lens,
            edge.dtype,
            buckets.of(edge.value, edge.region),
        );
        let Some((steps, _)) = best else {
            continue;
        };
        match edge.layer.and_then(|l| of_layer.get(&l)) {
            Some(&k) => shared
                .entry((k, edge.relative))
                .or_default()
                .push((edge.key, steps)),
            None => {
                plan.edges.insert(edge.key, steps);
            }
        }
    }
    for ((k, relative), paths) in shared {
        let agree = paths.windows(2).all(|w| w[0].1 == w[1].1) && paths.len() == n_layers[&k];
        match (plan.layer_strategies.get_mut(k as usize), paths.first()) {
            (Some(strategy), Some((_, steps))) if agree => {
                strategy.edges.insert(relative, steps.clone());
            }
            _ => plan.edges.extend(paths),
        }
    }
    Ok(())
}

fn best_cross(
    cluster: &Cluster,
    plan: &Plan,
    edge: &CrossEdge,
    buckets: &Buckets,
) -> Option<CrossPath> {
    let (from_mesh, to_mesh) = (
        &plan.stages[edge.from.index()].mesh,
        &plan.stages[edge.to.index()].mesh,
    );
    let mut targets = edge.wanted.clone();
    let sizes = |m: &LogicalMesh| m.axes.iter().map(|a| a.size).collect::<Vec<_>>();
    if sizes(from_mesh) == sizes(to_mesh) {
        let same = ShardingSpec {
            partial: BTreeMap::new(),
            ..edge.from_spec.clone()
        };
        if !targets.contains(&same) {
            targets.push(same);
        }
    }
    let seen = [from_mesh, to_mesh].map(|mesh| cluster.seen_by(mesh.devices));
    let mut prices = (
        Prices::new(&seen[0], from_mesh, buckets),
        Prices::new(&seen[1], to_mesh, buckets),
    );
    let mut best: Option<(CrossPath, f64)> = None;
    for target in &targets {
        let from = Placement {
            mesh: from_mesh,
            spec: &edge.from_spec,
        };
        let to = Placement {
            mesh: to_mesh,
            spec: target,
        };
        for path in reshard::cross_paths(&edge.lens, from, to) {
            let seconds = cross_time(cluster, &mut prices, edge, target, &path);
            if best.as_ref().is_none_or(|(_, b)| seconds < *b) {
                best = Some((path, seconds));
            }
        }
    }
    best.map(|(path, _)| path)
}

/// Seconds of a transfer: reducing, sending one shard, gathering, and what its uses then need.
/// A tensor that moves between meshes travels alone.
fn cross_time(
    cluster: &Cluster,
    (here, there): &mut (Prices<'_>, Prices<'_>),
    edge: &CrossEdge,
    target: &ShardingSpec,
    path: &CrossPath,
) -> f64 {
    let (lens, dtype) = (&edge.lens, edge.dtype);
    let (from, to) = (here.mesh(), there.mesh());
    let bytes = path
        .target_spec
        .local_elements(lens, to)
        .saturating_mul(dtype.bytes());
    let sent = path
        .source_spec
        .local_elements(lens, from)
        .saturating_mul(dtype.bytes());
    let send = collectives::send_time(
        cluster,
        from.devices.first_rank.0,
        to.devices.first_rank.0,
        bytes.max(sent.min(bytes.saturating_mul(2))),
    )
    .0;
    let price = |w: &ShardingSpec| there.price(target, w, lens, dtype, None);
    let uses: f64 = edge
        .wanted
        .iter()
        .map(price)
        .map(|seconds| seconds.unwrap_or(f64::INFINITY))
        .sum();
    here.path_time(&edge.from_spec, &path.before, lens, dtype, None)
        + send
        + there.path_time(&path.target_spec, &path.after, lens, dtype, None)
        + uses
}
