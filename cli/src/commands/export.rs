//! `export`: a plan for other software, as files that it reads.

use super::again::Again;
use super::spinner;
use crate::args::ExportArgs;
use crate::failure::{Exit, Failure};
use crate::plan_file::{self, Loaded};
use crate::{files, outputs, report, software};
use export::{Export, ExportError, Target};
use ir::Seconds;
use serde::Serialize;
use serde_json::json;
use std::path::{Path, PathBuf};

pub fn run(args: &ExportArgs) -> Result<(), Failure> {
    let target = target(&args.to)?;
    let as_file = as_file(args.output.as_deref());
    if let Some(path) = as_file {
        outputs::check(&[path], &[&args.plan])?;
    }
    let loaded = plan_file::load(&args.plan)?;
    let exported = export::export(&loaded.plan, &loaded.training, target);
    let exported = exported.map_err(|e| refused(args, &loaded, e))?;
    let paths = match (as_file, &exported.files[..]) {
        (Some(path), [_]) => vec![path.to_path_buf()],
        (Some(path), more) => {
            let names: Vec<&str> = more.iter().map(|f| f.name).collect();
            let what = format!(
                "{}: is a file, but {} takes {}",
                path.display(),
                target.title(),
                names.join(" and ")
            );
            return Err(Failure::new(Exit::Usage, what).help("name a folder that is not there yet"));
        }
        (None, all) => {
            let folder = folder(args.output.as_deref(), target);
            outputs::check_folder(&folder)?;
            all.iter().map(|f| folder.join(f.name)).collect()
        }
    };
    let named: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
    outputs::check(&named, &[&args.plan])?;
    let nearest = match args.nearest {
        true => Some(nearest(args, &loaded, &exported)?),
        false => None,
    };
    for (path, file) in paths.iter().zip(&exported.files) {
        outputs::write_atomic(path, file.text.as_bytes())?;
    }
    match args.json {
        true => print_json(args, &loaded, &exported, &paths, nearest.as_ref()),
        false => print_words(&loaded, &exported, &paths, nearest.as_ref()),
    }
}

/// The target of a name.
fn target(name: &str) -> Result<Target, Failure> {
    Target::named(name).ok_or_else(|| {
        let names: Vec<&str> = Target::ALL.iter().map(|t| t.name()).collect();
        let all = format!("plans are exported to {}", names.join(", "));
        let other = OTHER_NAMES.iter().find(|(n, _)| *n == name.to_lowercase());
        let near = other.map(|(_, n)| *n);
        let near = near.or_else(|| files::closest(name, names.iter().copied()));
        let help = match near {
            Some(near) => format!("did you mean `{near}`? All: {}", names.join(", ")),
            None => all,
        };
        Failure::new(Exit::Usage, format!("--to {name}: no such software")).help(help)
    })
}

/// Names that the targets have too.
const OTHER_NAMES: [(&str, &str); 7] = [
    ("megatron", "megatron-core"),
    ("megatron-lm", "megatron-core"),
    ("mcore", "megatron-core"),
    ("fsdp", "fsdp2"),
    ("pytorch", "fsdp2"),
    ("dtensor", "fsdp2"),
    ("titan", "torchtitan"),
];

/// Whether `import-job` reads what is written for a target.
fn is_job(target: Target) -> bool {
    matches!(
        target,
        Target::MegatronCore | Target::DeepSpeed | Target::TorchTitan
    )
}

/// The output as a file, where its name is not that of a folder. Digits behind a dot are a number, as
/// in `job-qwen2.5-7b`, and no ending of a file.
fn as_file(output: Option<&Path>) -> Option<&Path> {
    let is_ending = |e: &std::ffi::OsStr| e.as_encoded_bytes().iter().all(u8::is_ascii_alphabetic);
    output.filter(|path| {
        let ends_as_folder = path.as_os_str().as_encoded_bytes().ends_with(b"/");
        let is_named_as_file = || path.extension().is_some_and(is_ending);
        !ends_as_folder && !path.is_dir() && (path.exists() || is_named_as_file())
    })
}

/// The folder to write into.
fn folder(output: Option<&Path>, target: Target) -> PathBuf {
    match output {
        Some(path) => path.to_path_buf(),
        None => PathBuf::from(format!("export-{}", target.name())),
    }
}

/// The failure of a plan that a target cannot express.
fn refused(args: &ExportArgs, loaded: &Loaded, e: ExportError) -> Failure {
    let others = |target| {
        let words = software::written_by(&loaded.plan, &loaded.training, target);
        words.map_or(String::new(), |words| format!("; {words}"))
    };
    let (exit, help) = match &e {
        ExportError::Plan(_) => (Exit::CheckFailed, AGAIN.to_string()),
        ExportError::Inference(_) => (
            Exit::Infeasible,
            "compile without --inference, or run the plan with `meshwright run`".into(),
        ),
        ExportError::Asynchronous(_) => (
            Exit::Infeasible,
            "compile with `--pin schedule=1f1b` instead".into(),
        ),
        ExportError::Model { target, .. } => (
            Exit::Infeasible,
            format!(
                "no pin helps, as it is the model that is not known there{}; nothing was written",
                others(*target)
            ),
        ),
        ExportError::Inexpressible { target, .. } => (
            Exit::Infeasible,
            format!(
                "compile with `--for {}`, or with pins that give all layers and stages the same degrees (data, tensor, pipeline){}; nothing was written",
                target.framework().name(),
                others(*target)
            ),
        ),
    };
    Failure::new(exit, format!("{}: {e}", args.plan.display())).help(help)
}

const AGAIN: &str = "make the plan again with `meshwright compile`";

/// The plan that the files describe, by its pins, under Meshwright's own runtime.
#[derive(Debug, Serialize)]
struct Nearest {
    /// Its pins.
    pins: Vec<String>,
    /// Its predicted step; none where there is no such plan.
    step_time_s: Option<Seconds>,
    /// Why there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

fn nearest(args: &ExportArgs, loaded: &Loaded, exported: &Export) -> Result<Nearest, Failure> {
    let Some(pins) = exported.pins.clone() else {
        return Ok(Nearest {
            pins: Vec::new(),
            step_time_s: None,
            problem: Some("the plan has no degrees, so no pins ask for it".into()),
        });
    };
    let bar = spinner("planning again");
    // Pins of single tensors and ops are the plan's, not the target's.
    let mut plan = loaded.plan.clone();
    plan.pins.retain(|p| p.starts_with("context_order"));
    let planned = Again::of(&plan, &pins, &args.search)?.plan()?;
    bar.finish_and_clear();
    Ok(match planned {
        Ok(found) => Nearest {
            pins,
            step_time_s: Some(found.plan.predicted.step_time_s),
            problem: None,
        },
        Err(e) => Nearest {
            pins,
            step_time_s: None,
            problem: Some(e.to_string()),
        },
    })
}

fn print_json(
    args: &ExportArgs,
    loaded: &Loaded,
    exported: &Export,
    paths: &[PathBuf],
    nearest: Option<&Nearest>,
) -> Result<(), Failure> {
    report::print_json(&json!({
        "plan": args.plan,
        "plan_hash": loaded.hash,
        "to": exported.target.name(),
        "files": paths,
        "summary": exported.summary,
        "not_expressed": exported.not_expressed,
        "pins": exported.pins,
        "step_time_s": loaded.plan.predicted.step_time_s,
        "nearest": nearest,
    }))
}

fn print_words(
    loaded: &Loaded,
    exported: &Export,
    paths: &[PathBuf],
    nearest: Option<&Nearest>,
) -> Result<(), Failure> {
    let summary = &exported.summary;
    let title = exported.target.title();
    let devices = ir::counted(summary.devices, "device");
    let mut w = format!("{} for {title} on {devices}\n", summary.name);
    if let Some(d) = &summary.degrees {
        w += &format!(
            "Degrees: data {} x context {} x tensor {} x pipeline {} = {}; ZeRO-{}{}\n",
            d.data,
            d.context,
            d.tensor,
            d.pipeline,
            summary.devices,
            d.zero,
            match (
                d.zero > 0 && d.context > 1,
                d.zero > 0 && d.sharded < d.data
            ) {
                (true, _) => format!(" over {} (data x context)", ir::counted(d.shards(), "rank")),
                (_, true) => format!(
                    " over {}, with {} copies of the states",
                    ir::counted(d.sharded, "data rank"),
                    d.data / d.sharded.max(1)
                ),
                (false, false) => String::new(),
            }
        );
        w += &format!(
            "Batch: micro-batch {} x {} x data {} = global batch {}\n",
            d.micro_batch,
            ir::counted(summary.accumulation, "accumulation step"),
            d.data,
            summary.global_batch
        );
    }
    match exported.not_expressed.is_empty() {
        true => w += &format!("\n{title} expresses all of the plan.\n"),
        false => {
            w += &format!("\n{title} does otherwise than the plan:\n");
            for n in &exported.not_expressed {
                w += &format!("  {}: {}; instead: {}\n", n.place, n.what, n.instead);
            }
        }
    }
    let own = loaded.plan.predicted.step_time_s;
    let title = published::software::title(loaded.plan.made_for.as_ref());
    w += &format!("\nPredicted for {title}: {own} per step\n");
    let is_own = loaded.plan.made_for.is_none();
    let first = paths.first().filter(|_| is_own && is_job(exported.target));
    if let Some(path) = first {
        w += &format!(
            "As {} executes it, `meshwright import-job {} --cluster CLUSTER{}`\n  \
             predicts it, where CLUSTER is the plan's ({}).\n",
            exported.target.title(),
            path.display(),
            match exported.target {
                // Its job has no model.
                Target::DeepSpeed => " --model MODEL",
                _ => "",
            },
            loaded.plan.cluster.name
        );
    }
    if let Some(n) = nearest {
        w += &match (&n.step_time_s, &n.problem) {
            (Some(step), _) => format!(
                "Nearest plan, for the same: {step} per step, {:+.1}% ({})\n",
                (step.0 / own.0 - 1.0) * 100.0,
                n.pins.join(" ")
            ),
            (None, Some(problem)) => format!("Nearest plan: none: {problem}\n"),
            (None, None) => String::new(),
        };
    }
    let names: Vec<String> = paths.iter().map(|p| p.display().to_string()).collect();
    w += &format!("Written: {}", names.join(", "));
    report::out(w.trim_end())
}
