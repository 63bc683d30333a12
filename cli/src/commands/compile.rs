//! `compile`: model, training and cluster to a plan that passed the checker.

mod fewer;
mod runners_up;
mod ways_out;

use super::spinner;
use super::watching::Watching;
use crate::args::CompileArgs;
use crate::failure::{Exit, Failure};
use crate::{cluster, document, files, model, outputs, plan_file, report, software, train_spec};
use intra_op::write_problem;
use ir::cluster::Cluster;
use ir::{Graph, TrainSpec, counted};
use planner::recipes::Chosen;
use planner::{Layering, PinError, Pins, PlanError, PlanOptions, Planned, Recipe, Watcher};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use ways_out::Asked;

/// Said when a search is interrupted.
const BEST_SO_FAR: &str = "taking the best plan so far, or the first one found";

pub fn run(args: &CompileArgs) -> Result<(), Failure> {
    let pins = Pins::parse(&args.pins).map_err(pin_failure)?;
    let recipe = args.preset.as_deref().map(recipe).transpose()?;
    let made_for = software::asked(args.made_for.as_deref())?;
    let model = model::load(&args.model)?.with_expert_capacity(args.expert_capacity)?;
    let mut spec = train_spec::train_spec(&args.train, model.max_sequence())?;
    let cluster = cluster::load(&args.cluster, args.hosts, args.ranks)?;
    let forward = model.graph(spec.sequence, spec.dropout, spec.task)?;
    // The ops decide: a graph brings its own, and most families have none.
    let dropout = match spec.task.is_training() {
        true => model::dropout(&forward),
        false => spec.dropout,
    };
    if dropout != spec.dropout && args.train.dropout.is_some() {
        crate::say(format_args!(
            "note: --dropout {} does nothing: the dropout of this model is {dropout}, in its ops",
            spec.dropout
        ));
    }
    spec.dropout = dropout;
    let model_file = model::file(&args.model)?;
    let mut inputs = Vec::from_iter(model_file.as_deref());
    inputs.extend(cluster::file(&args.cluster));
    inputs.extend(args.train.file.as_deref());
    let others = args.runners_up.as_deref().map(runners_up::paths);
    let others = others.transpose()?.unwrap_or_default();
    let mut written = vec![args.output.as_path()];
    written.extend(others.iter().map(PathBuf::as_path));
    outputs::check(&written, &inputs)?;
    let no_peak = report::plan::no_peak(&cluster, spec.precision.compute());
    for words in [cluster::other_units(&cluster), no_peak].iter().flatten() {
        crate::say(format_args!("warning: {words}"));
    }
    let started = Instant::now();
    let bar = spinner("searching for a plan");
    let limit = args.time_limit.map(Duration::from_secs);
    let options = PlanOptions {
        name: model::built_in(&args.model)?,
        pins,
        layering: args.layers.map_or(Layering::default(), |l| l.0),
        tolerance: args.tolerance.0,
        headroom: args.headroom.map(|h| h.0),
        effort: args.effort,
        without_hiding: false,
        one_by_one: false,
        watcher: Watcher::new(Arc::new(Watching::new(&bar, limit, BEST_SO_FAR)?)),
        made_for,
    };
    let planned = search(recipe, &forward, &spec, &cluster, &options);
    let searched = started.elapsed();
    let (planned, preset) = match planned {
        Ok(found) => found,
        Err(e) if recipe.is_some() => {
            bar.finish_and_clear();
            return Err(of_preset(e, &options.pins));
        }
        Err(e) => {
            bar.set_message("looking for what leaves no plan");
            let asked = Asked {
                model: &args.model,
                expert_capacity: args.expert_capacity,
                forward: &forward,
                train: &spec,
                cluster: &cluster,
                options: &options,
            };
            let failure = ways_out::failure(&asked, e, Duration::from_secs(args.ways_out));
            bar.finish_and_clear();
            return Err(failure);
        }
    };
    bar.set_message("proving the plan");
    prove(&planned).inspect_err(|_| bar.finish_and_clear())?;
    let mut planned = planned;
    // A preset, and a plan for other software, is asked for as it is.
    if recipe.is_none() && options.made_for.is_none() {
        bar.set_message("looking whether fewer hosts are faster");
        let note = fewer::note(&planned, &forward, &spec, &cluster, &options);
        planned.stats.notes.extend(note);
    }
    bar.finish_and_clear();
    planned.plan.proof.runners_up = runners_up::write(&others, &planned)?;
    if let Some(folder) = &args.dump_intra_op {
        dump_problems(folder, &planned)?;
    }
    let text = document::to_json(&planned.plan)?;
    outputs::write_atomic(&args.output, text.as_bytes())?;
    if args.json {
        print_json(args, &planned, preset.as_ref(), searched, &text)
    } else {
        print_words(args, &planned, preset.as_ref(), searched)
    }
}

/// The recipe of that name.
fn recipe(name: &str) -> Result<Recipe, Failure> {
    let names = Recipe::NAMES;
    let near = files::closest(name, names.into_iter());
    let near = near.map(|near| format!("did you mean `{near}`? "));
    Recipe::named(name).ok_or_else(|| {
        let what = format!("there is no preset of pins called `{name}`");
        Failure::new(Exit::Usage, what).help(format!(
            "{}Presets of pins are {}; a preset of a cluster is given with --cluster",
            near.unwrap_or_default(),
            names.join(", ")
        ))
    })
}

/// The point of a recipe that was chosen.
struct Preset {
    name: &'static str,
    pins: Vec<String>,
    n_points: usize,
}

impl Preset {
    fn words(&self) -> String {
        format!(
            "Preset {}: {}, the fastest of {}.",
            self.name,
            self.pins.join(" "),
            counted(self.n_points as u64, "point")
        )
    }
}

/// The plan that the search finds, or that of the best point of the recipe that was asked for.
fn search(
    recipe: Option<Recipe>,
    forward: &Graph,
    spec: &TrainSpec,
    cluster: &Cluster,
    options: &PlanOptions,
) -> Result<(Planned, Option<Preset>), PlanError> {
    let Some(recipe) = recipe else {
        return Ok((planner::plan(forward, spec, cluster, options)?, None));
    };
    let Chosen {
        pins,
        n_points,
        planned,
    } = planner::plan_recipe(forward, spec, cluster, recipe, options)?;
    let preset = Preset {
        name: recipe.name(),
        pins: pins.describe(),
        n_points,
    };
    Ok((planned, Some(preset)))
}

/// A failure to plan any point of a recipe. Its points recompute already, so that is no advice.
fn of_preset(e: PlanError, pins: &Pins) -> Failure {
    let is_memory = matches!(e, PlanError::Memory { .. } | PlanError::Overrun { .. });
    let is_pins = matches!(e, PlanError::Pins(_));
    let failure = Failure::from(e);
    if is_memory {
        return failure.help(
            "use more devices (--hosts), or a preset that splits more, as megatron and zero-3 do; without --preset the search finds the best plan",
        );
    }
    match is_pins && *pins != Pins::default() {
        true => failure.help(
            "pins choose among the points of a preset: change the pin, leave it out, or leave out --preset",
        ),
        false if is_pins => failure.help("try another preset, or leave out --preset"),
        false => failure,
    }
}

/// The pins: key and accepted values of each.
const PINS: [(&str, &str); 17] = [
    ("data", "data=N (ranks that split samples)"),
    (
        "replicas",
        "replicas=N (of those, ranks that hold copies of what zero splits: HSDP)",
    ),
    ("expert", "expert=N (of those, ranks that split experts)"),
    ("context", "context=N (ranks that split the sequence)"),
    ("context_order", "context_order=zigzag|natural"),
    ("context_attention", "context_attention=gather|ulysses|ring"),
    ("tensor", "tensor=N (ranks that split features)"),
    ("pipeline", "pipeline=N (meshes in a row)"),
    (
        "virtual",
        "virtual=N (stages on each of pipeline=P meshes, interleaved; needs pipeline)",
    ),
    (
        "split",
        "split=5/4/5 (layers of every stage, embedding and output layer included)",
    ),
    ("zero", "zero=0..3"),
    (
        "microbatch",
        "microbatch=N (samples over all ranks of a stage)",
    ),
    ("schedule", "schedule=NAME (1f1b, gpipe, ...)"),
    ("recompute", "recompute=none|full|selective"),
    (
        "offload",
        "offload=optimizer+parameters+activations (any of them, in host memory), or offload=search",
    ),
    ("recompute:OP", "'recompute:OP=yes|no'"),
    (
        "spec:TENSOR",
        "'spec:TENSOR=[axes,...]' with _ for a whole dim",
    ),
];

/// Names that frameworks have for pins, and the pins' own names.
const OTHER_NAMES: [(&str, &str); 12] = [
    ("dp", "data"),
    ("dp_replicate", "replicas"),
    ("replicate", "replicas"),
    ("replica", "replicas"),
    ("ep", "expert"),
    ("cp", "context"),
    ("tp", "tensor"),
    ("pp", "pipeline"),
    ("vpp", "virtual"),
    ("vp", "virtual"),
    ("mbs", "microbatch"),
    ("micro_batch", "microbatch"),
];

/// Makes the failure of a pin that cannot be read.
pub fn pin_failure(e: PinError) -> Failure {
    let help = pin_help(&e.pin);
    Failure::new(Exit::Usage, e).help(help)
}

/// Advises on a pin that cannot be read: the values that its key takes, or the key that was meant
/// and all keys.
fn pin_help(pin: &str) -> String {
    let key = pin.split('=').next().unwrap_or_default().trim();
    let family = key.split(':').next().unwrap_or_default();
    let has_family = |k: &str| k.split_once(':').is_some_and(|(f, _)| f == family);
    let of_key = |(k, _): &&(&str, &str)| match key.contains(':') {
        true => has_family(k),
        false => *k == key,
    };
    if let Some((_, form)) = PINS.iter().find(of_key) {
        return format!("give it as {form}, or leave it out: the search finds what is not pinned");
    }
    let forms: Vec<&str> = PINS.iter().map(|(_, form)| *form).collect();
    let all = format!("pins are {}", forms.join(", "));
    let other = OTHER_NAMES.iter().find(|(name, _)| *name == key);
    let near = other
        .map(|(_, k)| *k)
        .or_else(|| files::closest(key, PINS.iter().map(|(k, _)| *k)));
    match near {
        Some(near) => format!("did you mean `{near}`? {}", document::capitalised(&all)),
        None => all,
    }
}

/// Writes the solved intra-op problems, one file each, in the order of the stages, and says how
/// many there were: on standard error, because the result may be JSON.
fn dump_problems(folder: &Path, planned: &Planned) -> Result<(), Failure> {
    let (n, shown) = (planned.stats.problems.len(), folder.display());
    if n == 0 {
        crate::say(format_args!(
            "No intra-op problem was written to {shown}: no stage of this plan is under memory pressure, so elimination decided all of them."
        ));
        return Ok(());
    }
    std::fs::create_dir_all(folder).map_err(|e| {
        let what = format!("cannot make the folder {}: {e}", folder.display());
        Failure::new(Exit::BadInput, what)
    })?;
    for (i, problem) in planned.stats.problems.iter().enumerate() {
        let mut bytes = Vec::new();
        write_problem(problem, &mut bytes)
            .map_err(|e| Failure::new(Exit::Internal, format!("intra-op problem {i}: {e}")))?;
        outputs::write_atomic(&folder.join(format!("problem-{i}.json")), &bytes)?;
    }
    crate::say(format_args!(
        "Wrote {} to {shown}.",
        counted(n as u64, "intra-op problem")
    ));
    Ok(())
}

/// Has the plan and its program checked. A plan that is rejected here is our mistake.
pub fn prove(planned: &Planned) -> Result<(), Failure> {
    let mut violations = plan_file::violations(&planned.plan);
    if violations.is_empty() {
        violations = checker::check_program(&planned.plan, &planned.training, &planned.program);
    }
    if violations.is_empty() {
        return Ok(());
    }
    let message = format!(
        "the checker rejects the plan that was found ({}); nothing was written:{}",
        counted(violations.len() as u64, "violation"),
        plan_file::listed(&violations)
    );
    Err(Failure::new(Exit::Internal, message)
        .help("this is a defect of meshwright; please report it with the command line"))
}

/// Collects remarks on a plan that is correct all the same, but for repeated work: the words of a
/// plan say that below its prediction.
fn notes(planned: &Planned) -> Vec<String> {
    let plan = &planned.plan;
    let mut notes = planned.stats.notes.clone();
    let is_of_gpus = cost_model::compute::makes_calls(&plan.cluster);
    if plan.made_for.is_none() && is_of_gpus {
        let refused = runtime::device::cuda::check(&planned.program).err();
        notes.extend(refused.map(|e| format!("`run --backend cuda` refuses this plan: {e}")));
    }
    notes
}

fn print_words(
    args: &CompileArgs,
    planned: &Planned,
    preset: Option<&Preset>,
    searched: Duration,
) -> Result<(), Failure> {
    let words = match args.verbose {
        true => report::plan::words(&planned.plan, &planned.training),
        false => report::plan::brief(&planned.plan, &planned.training),
    };
    report::out(&words)?;
    let s = &planned.stats;
    report::out(&format!(
        "\nSearched in {:.1} s: {} of layers, {} priced, {} simulated.",
        searched.as_secs_f64(),
        counted(s.n_layer_kinds as u64, "kind"),
        counted(s.candidates, "candidate"),
        counted(s.simulated, "plan")
    ))?;
    if let Some(preset) = preset {
        report::out(&preset.words())?;
    }
    for note in notes(planned) {
        report::out(&format!("Note: {note}."))?;
    }
    let mut alternatives = s.alternatives.clone();
    alternatives.sort_by(|a, b| a.1.0.total_cmp(&b.1.0));
    for (what, seconds) in alternatives.iter().take(if args.verbose { 5 } else { 3 }) {
        report::out(&format!("  {seconds}  {what}"))?;
    }
    if let Some(folder) = &args.runners_up {
        report::out(&runners_up::words(folder, &planned.plan))?;
    }
    report::out(&format!(
        "The checker accepts the plan and its program. Written to {path}.\nmeshwright inspect {path} shows times, memory, communication and the proof.",
        path = args.output.display()
    ))
}

fn print_json(
    args: &CompileArgs,
    planned: &Planned,
    preset: Option<&Preset>,
    searched: Duration,
    text: &str,
) -> Result<(), Failure> {
    let plan = &planned.plan;
    let not_exported = software::not_exported(plan, &planned.training);
    let repeated = report::plan::repeated_work(&report::plan::stages(plan, &planned.training));
    let preset = preset.map(|p| json!({ "name": p.name, "pins": p.pins, "points": p.n_points }));
    report::print_json(&json!({
        "plan": args.output,
        "plan_hash": files::fingerprint(text.as_bytes()),
        "name": plan.name,
        "for": plan.made_for,
        "devices": report::plan::used_devices(plan),
        "schedule": plan.schedule.name(),
        "microbatch": plan.microbatch,
        "n_microbatches": plan.n_microbatches,
        "pins": plan.pins,
        "preset": preset,
        "stages": report::plan::stages(plan, &planned.training),
        "predicted": plan.predicted,
        "proof": plan.proof,
        "search": {
            "seconds": searched.as_secs_f64(),
            "layer_kinds": planned.stats.n_layer_kinds,
            "candidates": planned.stats.candidates,
            "simulated": planned.stats.simulated,
            "notes": notes(planned).into_iter().chain(repeated).chain(not_exported).collect::<Vec<_>>(),
            "runners_up": plan.proof.runners_up,
            "alternatives": planned.stats.alternatives.iter().map(|(what, s)| json!({ "what": what, "step_time_s": s })).collect::<Vec<_>>(),
        },
    }))
}
