//! `checkpoint`: what training states are, whether they are whole, and what they are in other forms.

mod dcp;

use crate::args::{CheckpointVerb, ConvertArgs, FormArg, LookArgs};
use crate::failure::{CHECKPOINTS_ARE, Exit, Failure};
use crate::interrupt::{Early, Interrupts};
use crate::{files, model, outputs, report};
use comfy_table::Table;
use import::ModelConfig;
use ir::{Bytes, DType, Task, counted};
use runtime::RuntimeError;
use runtime::checkpoint::{self, Checkpoint, Summary};
use runtime::execute::Local;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Longest list of states that is shown whole.
const SHOWN_STATES: usize = 12;

pub fn run(verb: &CheckpointVerb) -> Result<(), Failure> {
    match verb {
        CheckpointVerb::Inspect(args) => inspect(args),
        CheckpointVerb::Verify(args) => verify(args),
        CheckpointVerb::Convert(args) => convert(args),
    }
}

/// The checkpoints at a path, newest first, of which there is one.
fn all(path: &Path) -> Result<Vec<PathBuf>, Failure> {
    let none = |what: &str, help: String| {
        let what = format!("{}: {what}", path.display());
        Failure::new(Exit::BadInput, what).help(help)
    };
    if !path.exists() {
        let help = format!("{}; {CHECKPOINTS_ARE}", files::missing_help(path));
        return Err(none("there is no such folder or file", help));
    }
    if checkpoint::dcp::Source::is_at(path) {
        let help = format!(
            "make a training state of it with `meshwright checkpoint convert {} --plan PLAN -o NEW`",
            path.display()
        );
        return Err(none(
            "is a checkpoint of PyTorch, and no training state of Meshwright",
            help,
        ));
    }
    // A shard alone is whole or damaged only by the manifest beside it.
    let above = path.parent().unwrap_or(Path::new("."));
    let is_shard = path.extension().is_some_and(|e| e == "safetensors");
    if is_shard && path.is_file() && checkpoint::is_one(above) {
        let above = match above.as_os_str().is_empty() {
            true => ".".into(),
            false => above.display().to_string(),
        };
        return Err(none(
            "is one shard of a checkpoint, with the parts of states that a rank wrote",
            format!(
                "give the folder of the checkpoint, {above}, by whose manifest its shards are verified"
            ),
        ));
    }
    let all = checkpoint::all(path);
    match all.is_empty() {
        true => Err(none(
            "the folder has no checkpoint",
            CHECKPOINTS_ARE.to_string(),
        )),
        false => Ok(all),
    }
}

fn inspect(args: &LookArgs) -> Result<(), Failure> {
    let mut seen = Vec::new();
    for path in all(&args.path)? {
        let summary = checkpoint::summary(&path);
        // One that a run that goes on has had go meanwhile is not damaged.
        if summary.is_ok() || path.exists() {
            seen.push((path, summary));
        }
    }
    if args.json {
        let all: Vec<Value> = seen.iter().map(|(path, s)| as_json(path, s)).collect();
        return report::print_json(&json!({ "checkpoints": all }));
    }
    let whole = seen.iter().filter(|s| s.1.is_ok()).count();
    report::out(&format!(
        "{}: {}, newest first{}.",
        args.path.display(),
        counted(seen.len() as u64, "checkpoint"),
        match seen.len() - whole {
            0 => String::new(),
            n => format!(", {n} of them damaged"),
        }
    ))?;
    report::out(
        "No shard was read: `meshwright checkpoint verify` compares them with their hashes.",
    )?;
    for (path, summary) in &seen {
        report::out("")?;
        match summary {
            Ok(summary) => words(summary, args.verbose)?,
            Err(e) => report::out(&format!("{}: {e}", path.display()))?,
        }
    }
    Ok(())
}

fn words(of: &Summary, verbose: bool) -> Result<(), Failure> {
    let o = &of.origin;
    let bytes: u64 = of.files.values().sum();
    report::out(&format!("{}", of.path.display()))?;
    report::out(&format!(
        "  after {}; the data go on at sample {} (global batch {}, sequence {}, seed {})",
        counted(o.step, "step"),
        o.next_sample,
        o.global_batch,
        o.sequence,
        o.seed
    ))?;
    report::out(&format!("  plan {}", o.plan_hash))?;
    if let Some(run) = &o.run {
        report::out(&format!("  elastic run {run}"))?;
    }
    if let Some(data) = &o.data {
        report::out(&format!(
            "  data {} ({}), {} tokens of it for training, blake3 {}",
            data.file,
            Bytes(data.bytes),
            data.train_tokens,
            data.blake3.get(..12).unwrap_or(&data.blake3)
        ))?;
    }
    let elements = of
        .states
        .values()
        .map(|(lens, _)| lens.iter().product::<u64>());
    report::out(&format!(
        "  {} of {} elements in {}, {}",
        counted(of.states.len() as u64, "state"),
        report::count(elements.sum::<u64>() as f64).trim_end(),
        counted(of.files.len() as u64, "shard"),
        Bytes(bytes)
    ))?;
    for (name, bytes) in &of.files {
        report::out(&format!("    {name}: {}", Bytes(*bytes)))?;
    }
    let shown = match verbose {
        true => of.states.len(),
        false => SHOWN_STATES,
    };
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::NOTHING);
    for (path, (lens, parts)) in of.states.iter().take(shown) {
        table.add_row([
            format!("    {path}"),
            format!("{lens:?}"),
            counted(*parts as u64, "part"),
        ]);
    }
    report::out(&table.to_string())?;
    match of.states.len().saturating_sub(shown) {
        0 => Ok(()),
        more => report::out(&format!("    and {more} more (--verbose shows all)")),
    }
}

fn as_json(path: &Path, of: &Result<Summary, RuntimeError>) -> Value {
    let of = match of {
        Ok(of) => of,
        Err(e) => return json!({ "path": path, "problem": e.to_string() }),
    };
    let states = of.states.iter();
    let states = states.map(|(name, (lens, parts))| {
        let facts = json!({ "shape": lens, "parts": parts });
        (name.clone(), facts)
    });
    json!({
        "path": path,
        "step": of.origin.step,
        "plan_hash": of.origin.plan_hash,
        "next_sample": of.origin.next_sample,
        "seed": of.origin.seed,
        "global_batch": of.origin.global_batch,
        "sequence": of.origin.sequence,
        "data": of.origin.data,
        "run": of.origin.run,
        "bytes": of.files.values().sum::<u64>(),
        "shards": of.files,
        "states": states.collect::<serde_json::Map<String, Value>>(),
    })
}

fn verify(args: &LookArgs) -> Result<(), Failure> {
    all(&args.path)?;
    let seen = checkpoint::verify_all(&args.path);
    let bad = seen.iter().filter(|s| s.1.is_err()).count();
    let failed = || {
        let what = format!(
            "{}: {bad} of {} damaged",
            args.path.display(),
            counted(seen.len() as u64, "checkpoint")
        );
        let whole = seen.iter().find(|s| s.1.is_ok());
        let help = match whole {
            Some((path, _)) => format!(
                "a run goes on from {}, the newest that is whole",
                path.display()
            ),
            None => "none is whole: take a copy from elsewhere, or begin anew".into(),
        };
        Failure::new(Exit::CheckFailed, what).help(help)
    };
    if args.json {
        let said = |(path, verified): &(_, Result<Checkpoint, Vec<RuntimeError>>)| {
            let problems = verified.as_ref().err();
            let problems = problems.map(|p| p.iter().map(ToString::to_string).collect::<Vec<_>>());
            json!({
                "path": path,
                "step": verified.as_ref().ok().map(Checkpoint::step),
                "has_hashes": verified.as_ref().ok().map(|c| c.origin().is_some()),
                "problems": problems.unwrap_or_default(),
            })
        };
        let all: Vec<Value> = seen.iter().map(said).collect();
        report::print_json(&json!({ "damaged": bad, "checkpoints": all }))?;
    } else {
        for (path, verified) in &seen {
            let shown = path.display();
            match verified {
                Ok(c) if c.origin().is_none() => report::out(&format!(
                    "{shown}: step {}, of an earlier build: it has no hashes, so damage cannot be seen",
                    c.step()
                ))?,
                Ok(c) => report::out(&format!("{shown}: whole, step {}", c.step()))?,
                Err(problems) => {
                    report::out(&format!("{shown}: damaged"))?;
                    for p in problems {
                        report::out(&format!("  {p}"))?;
                    }
                }
            }
        }
    }
    match bad {
        0 => Ok(()),
        _ => Err(failed()),
    }
}

fn convert(args: &ConvertArgs) -> Result<(), Failure> {
    let early = Early {
        words: "interrupted before all was written",
        is_kept: false,
    };
    let interrupts = &Interrupts::watch(Some(early))?;
    // The folders that it makes go where nothing comes into them.
    let _clearing = interrupts.clear_at_end();
    if checkpoint::dcp::Source::is_at(&args.path) {
        return match args.config {
            None => dcp::import(args, interrupts),
            Some(_) => dcp::weights(args, interrupts),
        };
    }
    if let Some(plan) = &args.plan {
        let what = format!(
            "--plan {}: {} is no checkpoint of PyTorch, which has a file `.metadata`",
            plan.display(),
            args.path.display()
        );
        let help = "leave --plan out to write a checkpoint of Meshwright in another form";
        return Err(Failure::new(Exit::Usage, what).help(help));
    }
    all(&args.path)?;
    if args.to == FormArg::Transformers && !args.prefix.is_empty() {
        let what = format!(
            "--prefix {}: transformers' names are as they are",
            args.prefix
        );
        let help = "leave it out, or write PyTorch's form with --to dcp";
        return Err(Failure::new(Exit::Usage, what).help(help));
    }
    match args.to {
        FormArg::Dcp => dcp::export(args, interrupts),
        FormArg::Transformers => weights(args, interrupts),
    }
}

/// The newest checkpoint that is whole, with a word on those that are not.
fn newest(path: &Path) -> Result<Checkpoint, Failure> {
    let found = checkpoint::find(path)?;
    for damaged in &found.passed_over {
        crate::say(format_args!("warning: passed over {damaged}"));
    }
    Ok(found.checkpoint)
}

/// Writes the weights as transformers load them.
fn weights(args: &ConvertArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let Some(model) = &args.config else {
        let what = "the names and layout of the weights depend on the model, which is not given";
        let help = "give --config with the config.json that the plan was compiled from, or --to dcp for PyTorch's form, which needs none";
        return Err(Failure::new(Exit::Usage, what).help(help));
    };
    let (config, from) = (model::load_config(model)?, newest(&args.path)?);
    is_of(&from, &config, model)?;
    let [weights, copy] = weights_in((args, interrupts), model, from.path())?;
    let supply = |name: &str| values(&from, name);
    outputs::write_with(&weights, |out| {
        Ok(import::export(&weights, out, &config, supply)?)
    })?;
    let (_, text) = model::config_text(model)?;
    outputs::write_atomic(&copy, text.as_bytes())?;
    if args.json {
        return report::print_json(&json!({
            "from": from.path(),
            "step": from.step(),
            "written": [weights, copy],
        }));
    }
    report::out(&format!(
        "{} after {}: the weights are in {}, as Hugging Face's transformers load them.",
        from.path().display(),
        counted(from.step(), "step"),
        args.output.display()
    ))?;
    say_blocks(&config)?;
    report::out("Optimizer states are not in that form; they stay in the checkpoint.")
}

/// Says that transformers has no attention in blocks, where the model has it.
fn say_blocks(config: &ModelConfig) -> Result<(), Failure> {
    match config.sparse() {
        None => Ok(()),
        Some(blocks) => report::out(&format!(
            "A query sees {blocks}. transformers has no such attention: there it sees all tokens."
        )),
    }
}

/// Fails where a checkpoint is of another model.
fn is_of(from: &Checkpoint, config: &ModelConfig, model: &Path) -> Result<(), Failure> {
    if let Some(origin) = from.origin() {
        let graph = ir::text::parse(&origin.model).map_err(|e| {
            let what = format!("{}: its model: {e}", from.path().display());
            Failure::new(Exit::BadInput, what)
        })?;
        let difference = config.difference(&graph, origin.sequence, Task::Training)?;
        if let Some(d) = difference {
            let what = format!(
                "{}: {d} is {} here, {} in the checkpoint",
                model.display(),
                d.first,
                d.second
            );
            let help = "give the config.json that the plan was compiled from";
            return Err(Failure::new(Exit::BadInput, what).help(help));
        }
    }
    Ok(())
}

/// The files that get the weights and the configuration. Fails where there is one already that may
/// not go.
fn weights_in(
    (args, interrupts): (&ConvertArgs, &Interrupts),
    model: &Path,
    from: &Path,
) -> Result<[PathBuf; 2], Failure> {
    let folder = &args.output;
    interrupts.makes(folder, || outputs::check_folder(folder))?;
    let (weights, copy) = (folder.join("model.safetensors"), folder.join("config.json"));
    let config_file = model::file(model)?;
    let mut inputs = vec![from];
    inputs.extend(config_file.as_deref());
    outputs::check_regular(&[&weights, &copy], &inputs)?;
    let there = [&weights, &copy].into_iter().find(|file| file.exists());
    match there.filter(|_| !args.force) {
        Some(file) => Err(outputs::kept(file)),
        None => Ok([weights, copy]),
    }
}

/// The full values of a parameter.
fn values(from: &Checkpoint, name: &str) -> Result<Vec<f32>, RuntimeError> {
    let lens = from.lens(name).ok_or_else(|| RuntimeError::State {
        path: name.into(),
        problem: "the checkpoint has none".into(),
    })?;
    let part = Local::whole(DType::F32, lens);
    let mut bytes = runtime::arena::Bytes::zeroed(part.bytes());
    from.read(name, &part, &mut bytes)?;
    let values = bytes.f32s();
    match values.iter().find(|v| !v.is_finite()) {
        None => Ok(values.to_vec()),
        Some(&value) => Err(RuntimeError::NotFinite {
            path: name.into(),
            value,
        }),
    }
}
