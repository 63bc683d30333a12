//! Checkpoints as `torch.distributed.checkpoint` writes and loads them.

use super::{is_of, newest, values};
use crate::args::{ConvertArgs, FormArg};
use crate::failure::{Exit, Failure};
use crate::interrupt::Interrupts;
use crate::{model, outputs, plan_file, report};
use ir::counted;
use runtime::RuntimeError;
use runtime::checkpoint::dcp::{self, STEP, Source};
use runtime::checkpoint::{Checkpoint, Origin};
use runtime::files::{self, Unfinished};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;

/// Longest list of tensors that is shown whole.
const SHOWN: usize = 5;

/// Writes the newest checkpoint that is whole.
pub fn export(args: &ConvertArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let folder = &args.output;
    let shown = folder.display();
    let usage = |what: String| {
        let help =
            "name a folder to make: a checkpoint is not put among other files, nor in place of one";
        Err(Failure::new(Exit::Usage, what).help(help))
    };
    if args.force {
        return usage("--force: nothing is replaced by a checkpoint of PyTorch".into());
    }
    match std::fs::read_dir(folder).map(|mut d| d.next().is_some()) {
        Ok(true) => return usage(format!("{shown}: there is something in it")),
        Err(_) if folder.exists() => return usage(format!("{shown}: is no folder")),
        _ => {
            let beside = files::parent(folder);
            interrupts.makes(beside, || outputs::check_folder(beside))?;
        }
    }
    let from = newest(&args.path)?;
    let n_states = match &args.config {
        None => {
            dcp::export(&from, &args.prefix, folder)?;
            from.states().count() as u64
        }
        Some(model) => as_transformers_call_them(args, &from, model)?,
    };
    if args.json {
        return report::print_json(&json!({
            "from": from.path(),
            "step": from.step(),
            "written": folder,
            "tensors": n_states + 1,
        }));
    }
    report::out(&format!(
        "{} after {}: its {} are in {shown}, as torch.distributed.checkpoint loads them, in f32 and under {} names; `{STEP}` has the number of steps.",
        from.path().display(),
        counted(from.step(), "step"),
        match args.config {
            Some(_) => counted(n_states, "weight"),
            None => counted(n_states, "state"),
        },
        match args.config {
            Some(_) => "transformers'",
            None => "their own",
        }
    ))
}

/// Writes the weights of a model as transformers call and lay them. How many there are.
fn as_transformers_call_them(
    args: &ConvertArgs,
    from: &Checkpoint,
    model: &Path,
) -> Result<u64, Failure> {
    let config = model::load_config(model)?;
    is_of(from, &config, model)?;
    let folder = between(&args.output)?;
    let file = folder.path().join("model.safetensors");
    outputs::write_with(&file, |out| {
        Ok(import::export(&file, out, &config, |name: &str| {
            values(from, name)
        })?)
    })?;
    let weights = Checkpoint::of_weights(&file, from.step())?;
    dcp::export(&weights, &args.prefix, &args.output)?;
    Ok(weights.states().count() as u64)
}

/// A folder beside the output, for what is made on the way to it.
fn between(output: &Path) -> Result<Unfinished, Failure> {
    let beside = files::parent(output);
    let made = Unfinished::folder(beside);
    made.map_err(|e| Failure::new(Exit::RunFailed, format!("{}: {e}", beside.display())))
}

/// Writes the weights of a checkpoint of PyTorch, which are called as transformers call them, as
/// transformers load them.
pub fn weights(args: &ConvertArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let shown = args.path.display();
    let Some(model) = args
        .config
        .as_ref()
        .filter(|_| args.to == FormArg::Transformers)
    else {
        let what = format!("{shown} is a checkpoint of PyTorch already");
        return Err(Failure::new(Exit::Usage, what).help("leave --to out"));
    };
    if !args.prefix.is_empty() {
        let what = format!("--prefix {}: names in {shown} are found", args.prefix);
        let help = "leave it out: one prefix before all of transformers' names is recognised";
        return Err(Failure::new(Exit::Usage, what).help(help));
    }
    let config = model::load_config(model)?;
    let source = Source::open(&args.path).map_err(unread_weights)?;
    let params = config.params();
    let wanted: BTreeMap<String, Vec<u64>> = params
        .iter()
        .flat_map(|p| {
            p.hf_names()
                .into_iter()
                .map(|name| (name, p.hf_shape.clone()))
        })
        .collect();
    let [weights, copy] = super::weights_in((args, interrupts), model, &args.path)?;
    let step = source.step().map_err(unread_weights)?.unwrap_or(0);
    let origin = Origin {
        plan_hash: String::new(),
        model: String::new(),
        step,
        seed: 0,
        next_sample: 0,
        global_batch: 0,
        sequence: 0,
        data: None,
        run: None,
    };
    let folder = between(&weights)?;
    let imported = source
        .import(&wanted, origin, folder.path())
        .map_err(unread_weights)?;
    let found = newest(&imported.path)?;
    outputs::write_with(&weights, |out| {
        let failed = |e: std::io::Error| {
            Failure::new(Exit::RunFailed, format!("{}: {e}", weights.display()))
        };
        out.write_all(&header(&wanted)).map_err(failed)?;
        for name in wanted.keys() {
            let values = values(&found, name)?;
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            out.write_all(&bytes).map_err(failed)?;
        }
        Ok(())
    })?;
    let (_, text) = model::config_text(model)?;
    outputs::write_atomic(&copy, text.as_bytes())?;
    if args.json {
        return report::print_json(&json!({
            "from": args.path,
            "step": step,
            "written": [weights, copy],
            "left_out": imported.left_out,
        }));
    }
    report::out(&format!(
        "{shown}: its {} are in {}, as Hugging Face's transformers load them; a run begins with them by --weights {}.",
        counted(wanted.len() as u64, "weight"),
        args.output.display(),
        args.output.display()
    ))?;
    super::say_blocks(&config)?;
    say_left_out(&imported.left_out, "the model has no such weights")
}

/// The header of a safetensors file of f32 tensors, which follow in the order of their names.
fn header(tensors: &BTreeMap<String, Vec<u64>>) -> Vec<u8> {
    let mut entries = serde_json::Map::new();
    entries.insert("__metadata__".into(), json!({ "format": "pt" }));
    let mut at = 0;
    for (name, shape) in tensors {
        let end = at + 4 * shape.iter().product::<u64>();
        let entry = json!({ "dtype": "F32", "shape": shape, "data_offsets": [at, end] });
        entries.insert(name.clone(), entry);
        at = end;
    }
    let mut text = serde_json::Value::Object(entries).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    [&(text.len() as u64).to_le_bytes()[..], &text].concat()
}

/// Says which tensors of another checkpoint were not taken, and why.
fn say_left_out(left: &[String], why: &str) -> Result<(), Failure> {
    if left.is_empty() {
        return Ok(());
    }
    let first: Vec<&str> = left.iter().take(SHOWN).map(String::as_str).collect();
    let more = match left.len() > SHOWN {
        true => format!(" and {} more", left.len() - SHOWN),
        false => String::new(),
    };
    report::out(&format!("Left out, as {why}: {}{more}.", first.join(", ")))
}

/// The failure of a checkpoint of PyTorch that cannot be taken.
fn unread(e: RuntimeError) -> Failure {
    Failure::from(e).help("it has to be as torch.distributed.checkpoint.save writes it: all states in f32, under the names and with the lengths that `meshwright checkpoint inspect --verbose` lists")
}

/// The same where its weights are wanted, which have other names.
fn unread_weights(e: RuntimeError) -> Failure {
    Failure::from(e).help("with --config all tensors have to be in f32 and to have transformers' names, perhaps behind one prefix; where they have Meshwright's own, give --plan PLAN in place of --config")
}

/// Makes a checkpoint of one that PyTorch wrote.
pub fn import(args: &ConvertArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let shown = args.path.display();
    let Some(plan) = &args.plan else {
        let what = format!("{shown} is a checkpoint of PyTorch, and does not say of which plan");
        let help = "give --plan with the plan to go on under: the tensors are read that are called as its states";
        return Err(Failure::new(Exit::Usage, what).help(help));
    };
    let loaded = plan_file::load(plan)?;
    let spec = &loaded.plan.train;
    if !spec.task.is_training() {
        let what = format!("{}: is a plan of inference", plan.display());
        let help = "give a plan of training, which has all states";
        return Err(Failure::new(Exit::Usage, what).help(help));
    }
    let source = Source::open(&args.path).map_err(unread)?;
    let step = match (args.step, source.step().map_err(unread)?) {
        (Some(given), Some(own)) if given != own => {
            let what = format!("--step {given}: by `{STEP}` of {shown} it is {own}");
            let help = format!("leave --step out, or take `{STEP}` out of the checkpoint");
            return Err(Failure::new(Exit::Usage, what).help(help));
        }
        (Some(step), _) | (None, Some(step)) => step,
        (None, None) => {
            let what = format!("{shown}: no tensor `{STEP}` says how many steps are done");
            return Err(Failure::new(Exit::Usage, what).help("say it with --step N"));
        }
    };
    let roles = loaded.program.roles.iter();
    let states = roles.flat_map(|r| r.states.iter().map(move |s| (s, r.buffer(s.buffer))));
    let wanted: BTreeMap<String, Vec<u64>> = states
        .map(|(s, b)| (s.path.clone(), b.lens.clone()))
        .collect();
    interrupts.makes(&args.output, || outputs::check_folder(&args.output))?;
    let origin = Origin {
        plan_hash: loaded.hash.clone(),
        model: loaded.plan.graph.clone(),
        step,
        seed: spec.seed,
        next_sample: step.saturating_mul(spec.global_batch),
        global_batch: spec.global_batch,
        sequence: spec.sequence,
        // Nobody knows what PyTorch trained on.
        data: None,
        run: None,
    };
    let imported = source.import(&wanted, origin, &args.output);
    let imported = imported.map_err(unread)?;
    if args.json {
        return report::print_json(&json!({
            "from": args.path,
            "step": step,
            "written": imported.path,
            "left_out": imported.left_out,
        }));
    }
    report::out(&format!(
        "{shown} after {}: its {} are in {}. Next: meshwright run {} --data FILE --resume {}",
        counted(step, "step"),
        counted(wanted.len() as u64, "state"),
        imported.path.display(),
        plan.display(),
        args.output.display()
    ))?;
    say_left_out(&imported.left_out, "the plan has no such states")
}
