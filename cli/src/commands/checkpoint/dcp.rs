//! Checkpoints as `torch.distributed.checkpoint` writes and loads them.

use super::newest;
use crate::args::ConvertArgs;
use crate::failure::{Exit, Failure};
use crate::{outputs, plan_file, report};
use ir::counted;
use runtime::RuntimeError;
use runtime::checkpoint::Origin;
use runtime::checkpoint::dcp::{self, STEP, Source};
use runtime::files;
use serde_json::json;
use std::collections::BTreeMap;

/// Longest list of tensors that is shown whole.
const SHOWN: usize = 5;

/// Writes the newest checkpoint that is whole.
pub fn export(args: &ConvertArgs) -> Result<(), Failure> {
    let folder = &args.output;
    let shown = folder.display();
    let usage = |what: String| {
        let help =
            "name a folder to make: a checkpoint is not put among other files, nor in place of one";
        Err(Failure::new(Exit::Usage, what).help(help))
    };
    if let Some(config) = &args.config {
        return usage(format!(
            "--config {}: PyTorch's form has the states under their own names, whatever the model",
            config.display()
        ));
    }
    if args.force {
        return usage("--force: nothing is replaced by a checkpoint of PyTorch".into());
    }
    match std::fs::read_dir(folder).map(|mut d| d.next().is_some()) {
        Ok(true) => return usage(format!("{shown}: there is something in it")),
        Err(_) if folder.exists() => return usage(format!("{shown}: is no folder")),
        _ => outputs::check_folder(files::parent(folder))?,
    }
    let from = newest(&args.path)?;
    dcp::export(&from, folder)?;
    let n_states = from.states().count() as u64;
    if args.json {
        return report::print_json(&json!({
            "from": from.path(),
            "step": from.step(),
            "written": folder,
            "tensors": n_states + 1,
        }));
    }
    report::out(&format!(
        "{} after {}: its {} are in {shown}, as torch.distributed.checkpoint loads them, in f32 and under their own names; `{STEP}` has the number of steps.",
        from.path().display(),
        counted(from.step(), "step"),
        counted(n_states, "state")
    ))
}

/// The failure of a checkpoint of PyTorch that cannot be taken.
fn unread(e: RuntimeError) -> Failure {
    Failure::from(e).help("it has to be as torch.distributed.checkpoint.save writes it: all states in f32, under the names and with the lengths that `meshwright checkpoint inspect --verbose` lists")
}

/// Makes a checkpoint of one that PyTorch wrote.
pub fn import(args: &ConvertArgs) -> Result<(), Failure> {
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
    outputs::check_folder(&args.output)?;
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
    };
    let is_new = !args.output.exists();
    let imported = source.import(&wanted, origin, &args.output);
    let imported = imported.map_err(|e| {
        // A command that fails leaves nothing; what is in the folder keeps it.
        if is_new {
            let _ = std::fs::remove_dir(&args.output);
        }
        unread(e)
    })?;
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
    let left = &imported.left_out;
    if left.is_empty() {
        return Ok(());
    }
    let first: Vec<&str> = left.iter().take(SHOWN).map(String::as_str).collect();
    let more = match left.len() > SHOWN {
        true => format!(" and {} more", left.len() - SHOWN),
        false => String::new(),
    };
    report::out(&format!(
        "Left out, as the plan has no such states: {}{more}.",
        first.join(", ")
    ))
}
