//! A plan in words.

use super::parallelism::{AxisReport, axes};
use super::strategies::layer_range;
use super::{count, percent, table, wrapped};
use crate::document::capitalised;
use crate::software::{not_exported, whose_plan};
use cost_model::utilisation::{peak_dtype, peak_flops_per_s, too_fast};
use cost_model::{Routing, StepWork};
use ir::cluster::Cluster;
use ir::op::{Bounds, InputKind};
use ir::plan::{Plan, Prediction, ScheduleKind, StageProof};
use ir::training::TrainingGraph;
use ir::{
    Bytes, DType, DeviceMesh, Graph, OpKind, Optimizer, Pass, Seconds, Task, TrainSpec, counted,
};
use serde::Serialize;
use std::cmp::Ordering;
use std::fmt::Write;

/// A stage as JSON output has it.
#[derive(Clone, Debug, Serialize)]
pub struct StageReport {
    /// The first and the last rank.
    pub ranks: [u32; 2],
    /// The groups of the cluster that they lie in, where there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<usize>,
    /// The place of the stage among those on these ranks, from 0; not 0 only when interleaved.
    pub chunk: u32,
    /// The axes, major first: name and size.
    pub mesh: Vec<(String, u32)>,
    /// The runs of equal layers.
    pub layers: Vec<RunReport>,
}

/// Layers of a stage that are treated equally.
#[derive(Clone, Debug, Serialize)]
pub struct RunReport {
    /// The names of the layers.
    pub layers: String,
    /// The roles of the axes for them.
    pub axes: Vec<AxisReport>,
    /// The forward ops whose results are recomputed, by their paths in the layer.
    pub recompute: Vec<String>,
    /// The recomputation in words; empty where everything is kept.
    #[serde(skip)]
    pub recompute_words: String,
    /// Where tensors rest, in words; empty where all rest on the device.
    #[serde(skip)]
    pub resting_words: String,
    /// The number of layers.
    #[serde(skip)]
    pub n_layers: usize,
}

/// Describes the stages of a plan.
pub fn stages(plan: &Plan, training: &TrainingGraph) -> Vec<StageReport> {
    let stage = |(i, s): (usize, &ir::plan::StagePlan)| {
        let first = s.mesh.devices.first_rank.0;
        let run = |r: &ir::plan::LayerRun| RunReport {
            layers: layer_range(training, r.first, r.count),
            axes: axes(plan, training, i, r.strategy as usize, r.first),
            recompute: (plan.layer_strategies[r.strategy as usize].recompute.iter())
                .cloned()
                .collect(),
            recompute_words: recomputed(plan, training, r),
            resting_words: resting(&plan.layer_strategies[r.strategy as usize].spaces),
            n_layers: r.count as usize,
        };
        StageReport {
            ranks: [first, first + s.mesh.n_devices().saturating_sub(1)],
            groups: groups(&plan.cluster, s.mesh.devices),
            chunk: plan.chunk_of(ir::StageId::new(i)),
            mesh: s
                .mesh
                .axes
                .iter()
                .map(|a| (a.name.clone(), a.size))
                .collect(),
            layers: s.runs.iter().map(run).collect(),
        }
    };
    plan.stages.iter().enumerate().map(stage).collect()
}

/// Returns the groups that ranks lie in; none where the cluster has no others than its own.
fn groups(cluster: &Cluster, ranks: DeviceMesh) -> Vec<usize> {
    let parts = cluster.by_group(ranks).into_iter();
    let groups = parts.map(|(group, _)| group);
    groups.filter(|_| !cluster.groups.is_empty()).collect()
}

/// Says where groups lie: ` in group 1 (NVIDIA A100)`.
fn in_groups(cluster: &Cluster, groups: &[usize]) -> String {
    let name = |group: &usize| {
        let of = group.checked_sub(1).and_then(|i| cluster.groups.get(i));
        let device = of.map_or(&cluster.device, |g| &g.device);
        format!("group {group} ({})", device.name)
    };
    let names: Vec<String> = groups.iter().map(name).collect();
    match names.is_empty() {
        true => String::new(),
        false => format!(" in {}", names.join(" and ")),
    }
}

/// Reports axes along which all ranks of a stage do the same work in every layer and hold the same
/// parts of every parameter, so that their devices add nothing: stages of which the same is said
/// together.
pub fn repeated_work(stages: &[StageReport]) -> Vec<String> {
    let mut of: Vec<((&str, u32), Vec<usize>)> = Vec::new();
    for (i, stage) in stages.iter().enumerate() {
        for (k, (name, size)) in stage.mesh.iter().enumerate() {
            let adds = |run: &RunReport| {
                let axis = run.axes.get(k);
                axis.is_none_or(|a| !a.does.is_empty() || a.zero != Some(0))
            };
            if *size > 1 && !stage.layers.iter().any(adds) {
                let axis = (name.as_str(), *size);
                match of.iter_mut().find(|(known, _)| *known == axis) {
                    Some((_, stages)) => stages.push(i),
                    None => of.push((axis, vec![i])),
                }
            }
        }
    }
    let said = of.into_iter().map(|((name, size), stages)| {
        let whose = match stages.as_slice() {
            [one] => format!("stage {one}"),
            many => {
                let many: Vec<String> = many.iter().map(usize::to_string).collect();
                format!("stages {}", many.join(", "))
            }
        };
        format!(
            "the {size} ranks along axis {name} of {whose} all do the same work: 1 of {size} of the devices would be at least as fast"
        )
    });
    said.collect()
}

/// The lines about [`repeated_work`] that stand below a prediction, which they put into doubt.
fn repeated_notes(plan: &Plan, training: &TrainingGraph) -> String {
    let notes = repeated_work(&stages(plan, training)).into_iter();
    notes.map(|note| format!("Note: {note}.\n")).collect()
}

/// Describes the plan on one screen: what runs where, and what it is predicted to take.
pub fn brief(plan: &Plan, training: &TrainingGraph) -> String {
    let mut w = described(plan, training);
    let _ = writeln!(w, "\n{}", predicted_line(plan, &plan.predicted));
    w += &repeated_notes(plan, training);
    if let Some(found) = mistake(plan, training, plan.predicted.step_time_s.0, "predicted") {
        let _ = writeln!(w, "{found}");
    }
    let memory = plan.predicted.stages.iter().map(|s| s.peak_bytes.0).max();
    // Ranks that share the memory of a host have none of their own.
    let of = match plan.cluster.pool {
        Some(_) => String::new(),
        None => format!(" of {}", plan.cluster.device.memory_bytes),
    };
    let memory = Bytes(memory.unwrap_or(0));
    let share = plan.headroom.filter(|share| *share > 0.0);
    let free = share.map_or(String::new(), |share| {
        format!(
            "; {} was to stay free beside what is reserved",
            percent(share)
        )
    });
    let _ = writeln!(w, "Memory: at most {memory}{of} on a rank{free}");
    w += proof(plan).lines().next().unwrap_or_default();
    if let Some(words) = simpler(plan) {
        w += "\n";
        w += &words;
    }
    wrapped(&w)
}

/// Says what simplicity cost, where a simpler plan was taken than the fastest.
fn simpler(plan: &Plan) -> Option<String> {
    let simpler = plan.proof.simpler.as_ref()?;
    let own = plan.predicted.step_time_s.0;
    let less = 1.0 - simpler.fastest_s.0 / own;
    let n = plan.layer_strategies.len() as u64;
    let strategies = |n: u64| match n {
        1 => "1 layer strategy".to_string(),
        n => format!("{n} layer strategies"),
    };
    Some(format!(
        "Simplicity: {}. The fastest plan found has {} and takes {}, {} less; --tolerance 0 takes that.",
        strategies(n),
        match simpler.fastest_strategies.cmp(&n) {
            Ordering::Equal => "as many".into(),
            Ordering::Greater => strategies(simpler.fastest_strategies),
            Ordering::Less => format!(
                "{}, but more axes or stages,",
                strategies(simpler.fastest_strategies)
            ),
        },
        simpler.fastest_s,
        percent(less),
    ))
}

/// Describes the whole plan in words.
pub fn words(plan: &Plan, training: &TrainingGraph) -> String {
    let mut w = described(plan, training);
    w.push('\n');
    let figures = predicted(plan, &plan.predicted);
    let (first, rest) = figures.split_once('\n').unwrap_or((&figures, ""));
    let _ = writeln!(w, "{first}");
    w += &repeated_notes(plan, training);
    w += rest;
    if let Some(found) = mistake(plan, training, plan.predicted.step_time_s.0, "predicted") {
        let _ = writeln!(w, "{found}");
    }
    w += &proof(plan);
    if let Some(words) = simpler(plan) {
        w += "\n";
        w += &words;
    }
    w
}

/// Describes what the plan is of: model, devices, stages. Neighbouring stages that do the same are
/// described once.
fn described(plan: &Plan, training: &TrainingGraph) -> String {
    let mut w = heading(plan);
    // That it cannot be launched comes before all that it would do.
    if let Some(words) = not_exported(plan, training) {
        let behind = w.find('\n').map_or(w.len(), |end| end + 1);
        w.insert_str(behind, &format!("{}.\n", capitalised(&words)));
    }
    w += &mixtures(training);
    w += &blocks_seen(plan, training);
    let all = stages(plan, training);
    let parts: Vec<Vec<Part>> = all.iter().map(parts).collect();
    let is_alike = |a: usize, b: usize| {
        let does = |i: usize| parts[i].iter().map(|p| (p.n_layers, &p.does));
        let of = |i: usize| (&all[i].mesh, &all[i].groups);
        of(a) == of(b) && does(a).eq(does(b))
    };
    let mut first = 0;
    while first < all.len() {
        let behind = (first + 1..all.len()).take_while(|&i| is_alike(first, i));
        let last = first + behind.count();
        let _ = writeln!(w, "\n{}", stage_heading(plan, &all, (first, last)));
        let of_last = gathered(&parts[last]);
        for (part, of_last) in gathered(&parts[first]).iter().zip(&of_last) {
            let layers = match first == last {
                true => listed(&part.layers),
                false if part.layers.len() > 1 => format!(
                    "{} and so on, {} in each",
                    listed(&part.layers),
                    counted(part.n_layers as u64, "layer")
                ),
                false => {
                    let ends = [part.layers.first(), of_last.layers.last()];
                    let [from, to] = ends.map(|range| range.copied().unwrap_or_default());
                    let n_layers = counted(part.n_layers as u64, "layer");
                    format!("{}, {n_layers} in each", join_ranges(from, to))
                }
            };
            let _ = writeln!(w, "  {layers}: {}", part.does.join("; "));
        }
        first = last + 1;
    }
    w
}

/// Names stages that do the same, the first to the last of them, with their ranks and their mesh.
fn stage_heading(plan: &Plan, all: &[StageReport], (first, last): (usize, usize)) -> String {
    let stage = &all[first];
    let [from, to] = stage.ranks;
    let v = plan.schedule.virtual_stages();
    let each = match to - from {
        0 => "1 rank each".into(),
        n => format!("{} ranks each", n + 1),
    };
    let ranks = match (first == last, v) {
        (true, _) if from == to => format!("Stage {first}: rank {from}"),
        (true, _) => format!("Stage {first}: ranks {from} to {to}"),
        (false, 1) => {
            let [_, end] = all[last].ranks;
            format!("Stages {first} to {last}: ranks {from} to {end}, {each}")
        }
        (false, _) => format!("Stages {first} to {last}: {each}"),
    };
    let axes = stage.mesh.iter().filter(|(_, size)| *size > 1);
    let axes: Vec<String> = axes.map(|(name, size)| format!("{name} {size}")).collect();
    let mesh = match axes.is_empty() {
        true => String::new(),
        false => format!(", mesh {}", axes.join(" x ")),
    };
    let shared = match (first == last, v) {
        (true, 2..) => {
            let mesh = plan.mesh_of(ir::StageId::new(first)).index();
            let stages = stages_of_mesh(mesh, plan.n_meshes(), plan.schedule);
            format!(", shared by stages {stages}")
        }
        _ => String::new(),
    };
    let groups = in_groups(&plan.cluster, &stage.groups);
    format!("{ranks}{groups}{mesh}{shared}")
}

/// Neighbouring layers of a stage that do the same in words.
struct Part {
    layers: String,
    n_layers: usize,
    does: Vec<String>,
}

/// The parts of a stage: runs that do the same in words differ only in details of single ops.
fn parts(stage: &StageReport) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    for run in &stage.layers {
        let axes = run.axes.iter().filter(|a| a.size > 1);
        let mut does: Vec<String> = axes.map(AxisReport::words).collect();
        if does.is_empty() {
            does.push("no parallelism inside the stage".into());
        }
        let words = [&run.recompute_words, &run.resting_words];
        does.extend(words.into_iter().filter(|w| !w.is_empty()).cloned());
        match parts.last_mut() {
            Some(part) if part.does == does => {
                part.layers = join_ranges(&part.layers, &run.layers);
                part.n_layers += run.n_layers;
            }
            _ => parts.push(Part {
                layers: run.layers.clone(),
                n_layers: run.n_layers,
                does,
            }),
        }
    }
    parts
}

/// All parts of a stage that do the same in words, neighbours or not: layers of unlike kinds often
/// take turns.
struct Gathered<'a> {
    /// The names of each part's layers, in their order.
    layers: Vec<&'a str>,
    n_layers: usize,
    does: &'a [String],
}

/// Gathers the parts of a stage that do the same, in the order of each one's first layer.
fn gathered(parts: &[Part]) -> Vec<Gathered<'_>> {
    let mut all: Vec<Gathered<'_>> = Vec::new();
    for part in parts {
        match all.iter_mut().find(|known| known.does == part.does) {
            Some(known) => {
                known.layers.push(&part.layers);
                known.n_layers += part.n_layers;
            }
            None => all.push(Gathered {
                layers: vec![&part.layers],
                n_layers: part.n_layers,
                does: &part.does,
            }),
        }
    }
    all
}

/// Lists names of layers, of which those that differ from the one before in a number alone are
/// given as this number: `h.0, 2, 4 to 6, head`.
fn listed(layers: &[&str]) -> String {
    let stem = |name: &str| name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    let mut w = String::new();
    let mut before = "";
    for layer in layers {
        let (first, last) = layer.split_once(" to ").unwrap_or((layer, layer));
        let at = stem(first);
        let is_numbered = at < first.len() && last.len() > at && first[..at] == last[..stem(last)];
        w += if w.is_empty() { "" } else { ", " };
        match is_numbered && before == &first[..at] {
            true if first == last => w += &first[at..],
            true => w += &format!("{} to {}", &first[at..], &last[at..]),
            false => w += layer,
        }
        before = if is_numbered { &first[..at] } else { "" };
    }
    w
}

/// Describes the recomputation of a run of layers: everything when only its boundary is kept for
/// the backward pass, else the ops by name.
fn recomputed(plan: &Plan, training: &TrainingGraph, run: &ir::plan::LayerRun) -> String {
    let listed = &plan.layer_strategies[run.strategy as usize].recompute;
    if listed.is_empty() {
        return String::new();
    }
    let graph = &training.graph;
    let here = |op: &&ir::Op| op.layer == Some(run.first) && op.region == ir::Region::Microbatch;
    let later = graph
        .ops()
        .iter()
        .filter(here)
        .filter(|op| op.pass != Pass::F);
    let kept = later.flat_map(|op| &op.inputs).any(|&v| {
        let from = graph.op(graph.value(v).producer);
        here(&from) && ir::training::can_recompute(from)
    });
    if !kept {
        return "everything but the layer's input recomputed (full)".into();
    }
    let names: Vec<String> = listed.iter().map(|p| p.replace("{}.", "")).collect();
    format!("recomputed: {}", names.join(", "))
}

/// The classes of tensors that rest elsewhere, by memory.
fn resting(spaces: &ir::offload::Spaces) -> String {
    let parts = spaces.iter().map(|(class, space)| {
        let memory = match space {
            ir::program::Space::Device => "on the device",
            ir::program::Space::Host => "in host memory",
            ir::program::Space::File => "in files",
        };
        format!("{} {memory}", class.words())
    });
    parts.collect::<Vec<_>>().join(", ")
}

fn join_ranges(a: &str, b: &str) -> String {
    let first = a.split(" to ").next().unwrap_or(a);
    let last = b.rsplit(" to ").next().unwrap_or(b);
    format!("{first} to {last}")
}

fn heading(plan: &Plan) -> String {
    let (t, c) = (&plan.train, &plan.cluster);
    let (task, optimizer) = match (t.task, t.optimizer) {
        (Task::Training, Optimizer::AdamW { .. }) => ("Training", ", AdamW"),
        (Task::Training, Optimizer::Sgd { .. }) => ("Training", ", SGD"),
        (Task::Inference, _) => ("Inference", ", forward passes alone"),
    };
    let used = used_devices(plan);
    let groups = c.groups.iter().map(|g| g.device.name.as_str());
    let devices: Vec<&str> = std::iter::once(c.device.name.as_str())
        .chain(groups)
        .collect();
    let mut w = format!(
        "{}{} on {used} of the {} of {} ({})\n",
        whose_plan(plan),
        plan.name,
        counted(c.n_devices(), "device"),
        c.name,
        devices.join(", ")
    );
    if let Some(words) = network(c) {
        let _ = writeln!(w, "Network: {words}");
    }
    let _ = writeln!(
        w,
        "{task}: global batch {}, {}, {}{optimizer}",
        t.global_batch,
        match unit(plan) {
            IMAGES => "an image each".to_string(),
            _ => format!("sequence {}", t.sequence),
        },
        t.precision.compute().name()
    );
    let _ = writeln!(
        w,
        "Pipeline: {}{}, schedule {}, {} of {}",
        counted(plan.stages.len() as u64, "stage"),
        match plan.schedule.virtual_stages() {
            1 => String::new(),
            v => format!(", {v} on each of {} meshes", plan.n_meshes()),
        },
        plan.schedule.name(),
        counted(plan.n_microbatches, "microbatch"),
        counted(plan.microbatch, "sample"),
    );
    w += &interleaving(plan);
    w += &asynchronous(plan);
    if !plan.pins.is_empty() {
        let _ = writeln!(w, "Pinned: {}", plan.pins.join(", "));
    }
    w
}

/// The cards by which a host reaches others: `ethernet, 1 x 25 Gb/s card a host for 8 devices`.
/// Nothing where there is one host, hosts are unlike each other, or the cluster is of CPU ranks.
fn network(c: &Cluster) -> Option<String> {
    let is_of_equal_hosts = c.pool.is_none() && c.is_equal() && c.degraded.is_empty();
    let between = c.levels.last().filter(|_| c.levels.len() > 1)?;
    if c.n_hosts < 2 || !is_of_equal_hosts || between.devices_per_port == 0 {
        return None;
    }
    let cards = c.devices_per_host.div_ceil(between.devices_per_port);
    Some(format!(
        "{}, {cards} x {} Gb/s {} a host for {}",
        between.name,
        between.bandwidth_bytes_per_s * 8.0 / 1e9,
        match cards {
            1 => "card",
            _ => "cards",
        },
        counted(c.devices_per_host, "device")
    ))
}

/// Says how many tokens the experts of a mixture take; empty for a model without.
fn mixtures(training: &TrainingGraph) -> String {
    let lines = Routing::all(&training.graph).into_iter().map(|r| {
        let chosen = format!("Experts: {} of {} for each token", r.top_k, r.experts);
        let slots = counted(r.capacity, "slot");
        let beyond = match r.capacity < r.tokens {
            true => "; tokens that find theirs full are dropped (--expert-capacity)",
            false => "; no token is dropped",
        };
        let factor = (100.0 * r.factor()).round() / 100.0;
        format!("{chosen}, {slots} in each for a sample, {factor} times what balanced routers fill{beyond}\n")
    });
    lines.collect()
}

/// Says what queries see where attention leaves blocks of keys out, and what that changes; empty for a
/// model whose attention does not.
fn blocks_seen(plan: &Plan, training: &TrainingGraph) -> String {
    let mut lines: Vec<String> = Vec::new();
    let mut said: Vec<Bounds> = Vec::new();
    let sequence = plan.train.sequence;
    let forward = training.graph.ops().iter().filter(|op| op.pass == Pass::F);
    for bounds in forward.filter_map(|op| op.kind.bounds()) {
        let Some(blocks) = bounds.blocks.filter(|_| !said.contains(&bounds)) else {
            continue;
        };
        said.push(bounds);
        let share = 100.0 * bounds.computed_share(1, sequence, sequence);
        let line = format!(
            "Attention: a query sees {blocks}; {share:.1}% of the scores of causal attention, so losses differ from those of full attention\n"
        );
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    lines.concat()
}

/// Describes in one line what interleaving saves; empty where a mesh has one stage.
fn interleaving(plan: &Plan) -> String {
    let (v, m) = (plan.schedule.virtual_stages(), plan.n_microbatches.max(1));
    if v < 2 {
        return String::new();
    }
    let of = |kind: ScheduleKind| kind.schedule().waits(plan.n_meshes(), m);
    let (fill, plain) = (of(plan.schedule), of(ScheduleKind::default()));
    let waits = |fill: f64, passes: f64| percent(fill / (passes + fill));
    let (v, m) = (f64::from(v), f64::from(m));
    let rounded = (100.0 * fill).round() / 100.0;
    format!(
        "Interleaved: while the pipeline fills and drains, a mesh of equal stages waits for {rounded} / ({v} x {m} + {rounded}) = {} of the step; with one stage on each mesh, for {plain} / ({m} + {plain}) = {}. For that, about {v} times as much is sent\n",
        waits(fill, v * m),
        waits(plain, m)
    )
}

/// Describes in one line what an asynchronous schedule does to training and to memory; empty for
/// all others.
fn asynchronous(plan: &Plan) -> String {
    let schedule = plan.schedule.schedule();
    if !schedule.is_asynchronous() {
        return String::new();
    }
    let (n, m) = (plan.stages.len(), plan.n_microbatches);
    let versions = |stage: usize| u64::from(schedule.activations(stage, n, m));
    let (most, least) = (versions(0), versions(n.saturating_sub(1)));
    let age = match most.saturating_sub(1) {
        0 => "the newest weights".to_string(),
        1 => "weights up to 1 update old".to_string(),
        age => format!("weights up to {age} updates old"),
    };
    format!(
        "Asynchronous: every microbatch makes an update, {} a step, from {age}, which trains otherwise than all other schedules. Stage 0 keeps {} of its weights, the last stage {least}; they count as activations\n",
        plan.train.updates_per_step(),
        counted(most, "version"),
    )
}

/// The unit that models of images count in: a sample has one position.
pub const IMAGES: &str = "images";

/// The unit that a plan's rates are counted in.
pub fn unit(plan: &Plan) -> &'static str {
    match plan.graph.contains("input {kind: images}") {
        true => IMAGES,
        false => "tokens",
    }
}

/// The same of a forward graph.
pub fn unit_of(forward: &Graph) -> &'static str {
    let images = OpKind::Input {
        kind: InputKind::Images,
    };
    match forward.ops().iter().any(|op| op.kind == images) {
        true => IMAGES,
        false => "tokens",
    }
}

fn predicted_line(plan: &Plan, p: &Prediction) -> String {
    format!(
        "Predicted: {} per step, {} {}/s, MFU {}{}, bubble {}",
        p.step_time_s,
        count(p.tokens_per_s).trim_end(),
        unit(plan),
        percent(p.mfu),
        hfu(p.mfu, p.hfu),
        percent(p.bubble)
    )
}

/// Step time, rates and memory as predicted.
pub fn predicted(plan: &Plan, p: &Prediction) -> String {
    let mut w = predicted_line(plan, p);
    w.push('\n');
    let _ = writeln!(
        w,
        "  {}",
        mfu_convention(&plan.cluster, &plan.train, used_devices(plan))
    );
    w += &stage_table(p, plan.schedule);
    w.push('\n');
    w += &checkpoint(p);
    w
}

/// Describes in one line the time that a checkpoint takes.
fn checkpoint(p: &Prediction) -> String {
    let Some(c) = p.checkpoint else {
        return String::new();
    };
    match (c.copy_s, c.write_s) {
        (Some(copy), Some(write)) => format!(
            "Checkpoint: {}, for which steps wait {copy} and hosts then write {write}\n",
            c.bytes
        ),
        _ => format!(
            "Checkpoint: {}; the cluster does not say how fast it is kept (storage)\n",
            c.bytes
        ),
    }
}

/// Shows HFU behind MFU, where recomputation makes it differ after both are rounded.
pub fn hfu(mfu: f64, hfu: f64) -> String {
    if percent(hfu) != percent(mfu) {
        format!(" (HFU {})", percent(hfu))
    } else {
        String::new()
    }
}

/// Counts the devices that the plan uses.
pub fn used_devices(plan: &Plan) -> u32 {
    plan.meshes().map(|m| m.n_devices()).sum()
}

/// Names the stages on one of `n_meshes` meshes by their numbers: `1`, or interleaved `1+5`.
pub fn stages_of_mesh(mesh: usize, n_meshes: usize, schedule: ScheduleKind) -> String {
    let n_stages = n_meshes * schedule.virtual_stages() as usize;
    let stages = schedule.route().stages_of(mesh, n_meshes, n_stages);
    let names: Vec<String> = stages.map(|stage| stage.to_string()).collect();
    names.join("+")
}

/// The most stages of a mesh that tables name one by one.
pub const STAGES_NAMED: u32 = 3;

/// Names a mesh in a table: by the stages on it, or by the first one and their number.
pub fn mesh_name(mesh: usize, n_meshes: usize, schedule: ScheduleKind) -> String {
    match schedule.virtual_stages() {
        v if v > STAGES_NAMED => format!("{mesh}+..({v})"),
        _ => stages_of_mesh(mesh, n_meshes, schedule),
    }
}

/// Explains how MFU is counted, with the peak and its source.
pub fn mfu_convention(cluster: &Cluster, train: &TrainSpec, devices: u32) -> String {
    let dtype = train.precision.compute();
    let ranks = DeviceMesh {
        first_rank: ir::Rank(0),
        n_devices: devices,
    };
    let (mut types, mut sources, mut instead) = (Vec::new(), Vec::new(), String::new());
    for (group, part) in cluster.by_group(ranks) {
        let seen = cluster.seen_by(part);
        let Some(of) = peak_dtype(&seen, dtype) else {
            return format!("MFU: the cluster has no {} peak", dtype.name());
        };
        let group = group.checked_sub(1).map(|i| format!("groups[{i}]."));
        let key = format!(
            "{}device.peak_flops_per_s.{}",
            group.unwrap_or_default(),
            of.name()
        );
        // The source is that of the key, or of the nearest table around it.
        let mut prefixes =
            std::iter::once(key.len()).chain(key.rmatch_indices('.').map(|(i, _)| i));
        let source = prefixes.find_map(|end| cluster.sources.get(&key[..end]));
        sources.push(source.map_or("source not given", String::as_str));
        types.push(of.name());
        if of != dtype {
            instead = format!("; {} has no {} peak", seen.device.name, dtype.name());
        }
    }
    types.dedup();
    sources.dedup();
    let counted_passes = match train.task {
        Task::Training => {
            "forward and backward (attention over all keys, or those that its window or blocks have, the filled slots of experts, no recomputation; HFU with that and with empty slots)"
        }
        Task::Inference => {
            "the forward pass (attention over all keys, or those that its window or blocks have)"
        }
    };
    format!(
        "MFU: FLOPs of matmuls, attention and state spaces of {counted_passes} over {}FLOP/s {} peak of {} ({}){instead}",
        count(peak_flops_per_s(cluster, dtype, devices).unwrap_or(0.0)),
        types.join(" and "),
        counted(devices, "device"),
        sources.join("; ")
    )
}

/// Reports a step time that is too short, because the devices' best matmuls are slower.
pub fn mistake(plan: &Plan, training: &TrainingGraph, step_s: f64, what: &str) -> Option<String> {
    let work = StepWork::of(training, &plan.train);
    too_fast(&plan.cluster, &work, used_devices(plan), step_s).map(|found| found.words(what))
}

/// Warns that matmuls of the compute type are planned at another type's rate, where they are.
pub fn no_peak(cluster: &Cluster, dtype: DType) -> Option<String> {
    let all = DeviceMesh {
        first_rank: ir::Rank(0),
        n_devices: cluster.n_devices(),
    };
    let groups = cluster.by_group(all).into_iter();
    let mut seen = groups.map(|(_, ranks)| cluster.seen_by(ranks));
    seen.find_map(|of_group| no_peak_in(&of_group, dtype))
}

fn no_peak_in(cluster: &Cluster, dtype: DType) -> Option<String> {
    let of = peak_dtype(cluster, dtype).filter(|of| *of != dtype)?;
    let there: Vec<&str> = cluster
        .device
        .peak_flops_per_s
        .keys()
        .map(|t| t.name())
        .collect();
    Some(format!(
        "{} has no {} rate; matmuls are planned at its slowest, that of {}, and MFU is relative to that peak. It has {}: see --precision",
        cluster.device.name,
        dtype.name(),
        of.name(),
        there.join(", ")
    ))
}

/// Writes the table of times and memory of each mesh, with the names of its stages.
pub fn stage_table(p: &Prediction, schedule: ScheduleKind) -> String {
    // An empty sum may be a negative zero.
    let time = |s: Seconds| Seconds(s.0 + 0.0).to_string();
    let bytes = |b: Bytes| b.to_string();
    // What the peak has beside the program's arena.
    let beside = |s: &ir::plan::StagePrediction| {
        let parts = [
            s.persistent_bytes,
            s.step_bytes,
            s.activation_bytes,
            s.transient_bytes,
        ];
        let arena = parts.iter().fold(0u64, |sum, b| sum.saturating_add(b.0));
        match s.peak_bytes.0.checked_sub(arena) {
            Some(more) => bytes(Bytes(more)),
            None => format!("-{}", Bytes(arena - s.peak_bytes.0)),
        }
    };
    let row = |(i, s): (usize, &ir::plan::StagePrediction)| {
        vec![
            mesh_name(i, p.stages.len(), schedule),
            time(s.forward_s),
            time(s.backward_s),
            time(s.step_s),
            time(s.compute_s),
            time(s.collective_s),
            time(s.transfer_s),
            bytes(s.persistent_bytes),
            bytes(s.step_bytes),
            bytes(s.activation_bytes),
            bytes(s.transient_bytes),
            beside(s),
            bytes(s.peak_bytes),
        ]
    };
    let mut header = vec![
        "stage",
        "forward\na microbatch",
        "backward\na microbatch",
        "begin+end\na step",
        "compute\na step",
        "collectives\na step",
        "transfers\na step",
        "states\na rank",
        "for the step\na rank",
        "activations\na rank",
        "transient\na rank",
        "other\na rank",
        "peak\na rank",
    ];
    let mut rows: Vec<Vec<String>> = p.stages.iter().enumerate().map(row).collect();
    let what_lives = match schedule.schedule().task() {
        Task::Training => {
            "states: parameters and optimizer states; for the step: prepared parameters and gradients; activations: those saved for the backward pass"
        }
        Task::Inference => {
            let backward = 2;
            header.remove(backward);
            rows.iter_mut().for_each(|row| drop(row.remove(backward)));
            "states: parameters; for the step: prepared parameters and the loss; activations: those that go from stage to stage"
        }
    };
    let note = format!(
        "(compute, collectives, transfers: the time that a rank spends in each; where ranks share processors, the time in collectives includes waiting there)
({what_lives}; transient: the rest of the program's arena; other: what the device reserves and the process holds outside the arena; peak: the sum)"
    );
    let shared = match schedule.virtual_stages() {
        1 => String::new(),
        v => {
            let all = stages_of_mesh(0, p.stages.len(), schedule);
            let named = match v > STAGES_NAMED {
                true => format!(
                    "{} is short for {all}: these",
                    mesh_name(0, p.stages.len(), schedule)
                ),
                false => all,
            };
            format!("\n({named} are stages of one mesh; the figures are of all of them together)")
        }
    };
    // Times, then bytes, under the stage.
    let n_times = header.len() - N_MEMORY;
    let of_memory = |row: &[String]| [&row[..1], &row[n_times..]].concat();
    let bytes: Vec<Vec<String>> = rows.iter().map(|row| of_memory(row)).collect();
    let of_bytes = [&header[..1], &header[n_times..]].concat();
    rows.iter_mut().for_each(|row| row.truncate(n_times));
    format!(
        "{}\n{}\n{}",
        table(&header[..n_times], rows, 1),
        table(&of_bytes, bytes, 1),
        wrapped(&format!("{note}{shared}"))
    )
}

/// Columns of the stages' table that are bytes.
const N_MEMORY: usize = 6;

/// Explains the gaps, and how the simulated step differs from the plan's objective, a line each.
fn gap(plan: &Plan) -> String {
    let p = &plan.proof;
    let than_which = match p.least_objective_s {
        Some(_) => "better than the least one found",
        None => "better",
    };
    let least = p.least_objective_s.unwrap_or(p.objective_s).0;
    let share = (least - p.lower_bound_s.0) / least.max(f64::MIN_POSITIVE);
    let share = match share > 5e-4 {
        false => "0.05%".to_string(),
        true => percent(share),
    };
    let of_gap = format!(
        "by the objective no pipeline of that space is {than_which} by more than {share}; the step itself is not bounded by it"
    );
    let (simulated, objective) = (plan.predicted.step_time_s.0, p.objective_s.0);
    let off = (simulated - objective) / objective.max(f64::MIN_POSITIVE);
    let than = match off {
        o if o.abs() < 5e-4 => "as long as the objective".to_string(),
        o if o > 0.0 => format!(
            "{} more than the objective, which adds up the times of stages: ranks also wait for each other, and for hardware that they share",
            percent(o)
        ),
        o => format!(
            "{} less than the objective, which adds up the times of stages: some of that work overlaps, or is launched by CUDA graphs, which the objective does not know",
            percent(-o)
        ),
    };
    format!(
        "\n  gap: {of_gap}\n  simulated: {}, {than}",
        plan.predicted.step_time_s
    )
}

/// Returns the first and the last of each run of neighbouring stages that are proved equally.
fn equal_runs(stages: &[StageProof]) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for (i, stage) in stages.iter().enumerate() {
        match runs.last_mut() {
            Some((first, last)) if stages[*first] == *stage => *last = i,
            _ => runs.push((i, i)),
        }
    }
    runs
}

/// The first line of a proof: the least objective that was found, its bound and their gap, and
/// beside it the plan's own objective where that is another one's.
fn least_found(plan: &Plan) -> String {
    let p = &plan.proof;
    let own = p.objective_s;
    let least = p.least_objective_s.unwrap_or(own);
    let gap = (least.0 - p.lower_bound_s.0) / least.0.max(f64::MIN_POSITIVE);
    let mut w = format!(
        "Proof: objective {least} (stages' times added up), lower bound of the objective {}, gap {} over {}",
        p.lower_bound_s,
        percent(gap.max(0.0)),
        counted(p.candidates, "candidate"),
    );
    if p.stopped {
        w += ", ended early";
    }
    if p.least_objective_s.is_some() {
        w += &format!(
            "; the plan that is taken has {own}, gap {}, and is faster by simulation, or simpler and hardly slower",
            percent(p.gap)
        );
    }
    w
}

/// Says that the step is predicted below the bound of the objective, where it is: the bound proves
/// nothing about the step.
fn predicted_below(plan: &Plan) -> &'static str {
    match plan.predicted.step_time_s.0 < plan.proof.lower_bound_s.0 {
        true => "; the predicted step is below the bound, as the objective knows no overlap",
        false => "",
    }
}

fn proof(plan: &Plan) -> String {
    let p = &plan.proof;
    let state = if p.stopped { ", ended early" } else { "" };
    let space = if p.space.is_empty() {
        "not stated"
    } else {
        &p.space
    };
    if plan.made_for.is_some() {
        return format!(
            "Bound: the FLOPs of the step take the devices {} at their best rate, {} of the step; {} {} planned{state}\n  space: {space}",
            p.lower_bound_s,
            percent(1.0 - p.gap),
            counted(p.candidates, "point"),
            if p.candidates == 1 { "was" } else { "were" },
        );
    }
    let (first, below) = (least_found(plan), predicted_below(plan));
    let mut w = format!("{first}{below}\n  space: {space}");
    if plan.cluster.pool.is_some() {
        w += "\n  objective: the sum of the stages' times or, if that is longer, the time that the shared processors need for the work of all ranks";
    }
    w += &gap(plan);
    for (first, last) in equal_runs(&p.stages) {
        let s = &p.stages[first];
        let (stages, each) = match first == last {
            true => (format!("stage {first}"), ""),
            false => (format!("stages {first} to {last}"), " each"),
        };
        let _ = write!(
            w,
            "\n  {stages}: {}, objective {} of a step{each}, lower bound of that {}, gap {}",
            s.method,
            s.objective_s,
            s.lower_bound_s,
            percent(s.gap)
        );
    }
    let methods = METHODS.iter().filter(|(method, _)| {
        let mut of_stages = p.stages.iter();
        of_stages.any(|s| s.method == *method || s.method.starts_with(&format!("{method} at ")))
    });
    for (method, what) in methods {
        let _ = write!(w, "\n  ({method}: {what})");
    }
    w
}

/// The ways in which a stage's choice is proved, with their explanations.
const METHODS: [(&str, &str); 4] = [
    (
        "elimination",
        "strategies are decided op by op, each for all choices of the op's neighbours; exact, as memory has no price",
    ),
    (
        "priced elimination",
        "the same with a price on memory that makes the stage fit; no choice that fits has an objective below its lower bound",
    ),
    (
        "integer program",
        "all ops of the stage at once within its memory, by branch and bound",
    ),
    (
        "assumed costs",
        "chosen as if traffic that may hide cost less, or what fills the pipeline more; objective and lower bound assume neither",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hfu_is_said_where_it_is_printed_otherwise() {
        // A difference by rounding alone makes no second figure.
        assert_eq!(hfu(0.4, 0.4 + 1e-16), "");
        assert_eq!(hfu(0.4, 0.5), " (HFU 50.0%)");
    }

    #[test]
    fn layers_that_take_turns_are_two_lines() {
        let part = |layers: &str, n_layers, does: &str| Part {
            layers: layers.into(),
            n_layers,
            does: vec![does.into()],
        };
        let parts = [
            part("embed", 1, "a"),
            part("h.0", 1, "b"),
            part("h.1", 1, "a"),
            part("h.2 to h.3", 2, "b"),
            part("h.4 to h.5", 2, "a"),
            part("h.6", 1, "b"),
            part("head", 1, "a"),
        ];
        let lines = gathered(&parts).into_iter().map(|all| {
            let layers = listed(&all.layers);
            format!("{layers}, {}: {}", all.n_layers, all.does.concat())
        });
        let lines: Vec<String> = lines.collect();
        let expected = ["embed, h.1, 4 to 5, head, 5: a", "h.0, 2 to 3, 6, 4: b"];
        assert_eq!(lines, expected);
        assert_eq!(
            listed(&["3", "é.1 to é.2", "é.4", "h.4"]),
            "3, é.1 to é.2, 4, h.4"
        );
    }

    #[test]
    fn neighbours_that_are_proved_equally_are_one_line() {
        let stage = |objective_s: f64| StageProof {
            objective_s: Seconds(objective_s),
            ..StageProof::default()
        };
        let stages = [1.0, 2.0, 2.0, 2.0, 1.0, 1.0].map(stage);
        assert_eq!(equal_runs(&stages), [(0, 0), (1, 3), (4, 5)]);
        assert_eq!(equal_runs(&[]), []);
    }

    #[test]
    fn the_cards_of_a_host_are_said_where_there_are_several_hosts() {
        let said = |name: &str, hosts| network(&cost_model::presets::load(name, hosts).unwrap());
        assert_eq!(said("dgx-h100", 1), None);
        assert_eq!(
            said("dgx-h100", 2).unwrap(),
            "infiniband, 8 x 400 Gb/s cards a host for 8 devices"
        );
        let cards = "h100-pcie*7+pcie5+ethernet-25";
        assert_eq!(
            said(cards, 2).unwrap(),
            "ethernet, 1 x 25 Gb/s card a host for 7 devices"
        );
        assert_eq!(
            said(&format!("{cards}*7"), 2).unwrap(),
            "ethernet, 7 x 25 Gb/s cards a host for 7 devices"
        );
    }

    #[test]
    fn ranks_that_repeat_each_others_work_are_named() {
        let axis = |name: &str, does: &[&str], zero| AxisReport {
            axis: name.into(),
            size: 4,
            does: does.iter().map(|d| d.to_string()).collect(),
            zero,
            zero_share: 1.0,
            splits_others: false,
        };
        let stage = |axes: Vec<AxisReport>| StageReport {
            ranks: [0, 3],
            groups: Vec::new(),
            chunk: 0,
            mesh: vec![("x".into(), 4)],
            layers: vec![RunReport {
                layers: "h.0".into(),
                axes,
                recompute: Vec::new(),
                recompute_words: String::new(),
                resting_words: String::new(),
                n_layers: 1,
            }],
        };
        let said = |a| repeated_work(&[stage(vec![a])]);
        let repeated = said(axis("x", &[], Some(0)));
        assert_eq!(repeated.len(), 1);
        assert!(repeated[0].contains("axis x of stage 0"), "{repeated:?}");
        let ends = "1 of 4 of the devices would be at least as fast";
        assert!(repeated[0].ends_with(ends), "{repeated:?}");
        assert!(said(axis("x", &["data parallel"], Some(0))).is_empty());
        // Its ranks hold parts of the optimizer's states.
        assert!(said(axis("x", &[], Some(1))).is_empty());
    }
}
