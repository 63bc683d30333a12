//! `inspect`: a plan in words and tables.

use crate::args::InspectArgs;
use crate::failure::{Exit, Failure};
use crate::plan_file::{self, Loaded};
use crate::report::against::Against;
use crate::report::{self, collectives, software, strategies};
use cost_model::{SimulateOptions, StepWork};
use frameworks::MemoryUse;
use serde_json::json;

pub fn run(args: &InspectArgs) -> Result<(), Failure> {
    let loaded = plan_file::load(&args.plan)?;
    if let Some(other) = &args.against {
        let against = Against::new(&loaded, &plan_file::load(other)?)?;
        let names = [&args.plan, other].map(|path| path.display().to_string());
        if args.json {
            let value = json!({ "plans": names, "predicted": against.predicted, "differences": against.differences, "notes": against.notes });
            return report::print_json(&value);
        }
        return report::out(&against.words([&names[0], &names[1]]));
    }
    if args.json {
        print_json(args, &loaded)
    } else {
        print_words(args, &loaded)
    }
}

fn print_words(args: &InspectArgs, loaded: &Loaded) -> Result<(), Failure> {
    let Loaded {
        plan,
        training,
        program,
        ..
    } = loaded;
    report::out(&report::plan::words(plan, training))?;
    if let Some(made_for) = &plan.made_for {
        let summary = export::summary(plan, training);
        let summary = summary.map_err(|e| Failure::new(Exit::Internal, e))?;
        let title = published::software::title(Some(made_for));
        match software::knobs(plan, &summary) {
            Some(knobs) => {
                report::out(&format!("\nIn the words of {title}"))?;
                report::out(&software::knob_table(&knobs))?;
            }
            None => {
                let why = summary.obstacles.join("; ");
                report::out(&format!("\n{title} has no words for it: {why}."))?;
            }
        }
        report::out("\nWhat its processes hold")?;
        report::out(&software::memory_table(&memory(loaded)?))?;
    }
    report::out("\nCommunication in one step")?;
    report::out(&collectives::table(&collectives::traffic(program)))?;
    if args.layers {
        report::out("\nStrategies of ops, for the first of each run of equal layers")?;
        report::out(&strategies::table(&strategies::strategies(plan, training)))?;
    }
    Ok(())
}

/// The memory of a process of each mesh under the software that the plan is made for, equal meshes
/// once.
fn memory(loaded: &Loaded) -> Result<Vec<(String, MemoryUse)>, Failure> {
    let Loaded {
        plan,
        training,
        program,
        ..
    } = loaded;
    let options = SimulateOptions::new(StepWork::of(training, &plan.train));
    let (_, memory) = crate::software::played(plan, program, &plan.cluster, &options)?;
    let name = |mesh: usize| report::plan::stages_of_mesh(mesh, plan.n_meshes(), plan.schedule);
    let mut rows: Vec<(String, MemoryUse)> = Vec::new();
    for (mesh, held) in memory.into_iter().enumerate() {
        match rows.last_mut() {
            Some((names, last)) if *last == held => {
                let first = names.split(" to ").next().unwrap_or_default().to_string();
                *names = format!("{first} to {}", name(mesh));
            }
            _ => rows.push((name(mesh), held)),
        }
    }
    Ok(rows)
}

fn print_json(args: &InspectArgs, loaded: &Loaded) -> Result<(), Failure> {
    let Loaded {
        plan,
        training,
        program,
        hash,
    } = loaded;
    let memory: Vec<_> = program
        .roles
        .iter()
        .map(|r| {
            let m = lowering::memory_report(r);
            json!({ "persistent_bytes": m.persistent, "step_bytes": m.step, "activation_bytes": m.activation, "transient_bytes": m.transient, "arena_bytes": m.arena })
        })
        .collect();
    let mut value = json!({
        "name": plan.name,
        "plan_hash": hash,
        "train": plan.train,
        "cluster": plan.cluster.name,
        "devices": report::plan::used_devices(plan),
        "schedule": plan.schedule.name(),
        "microbatch": plan.microbatch,
        "n_microbatches": plan.n_microbatches,
        "pins": plan.pins,
        "stages": report::plan::stages(plan, training),
        "communication": collectives::traffic(program),
        "memory": memory,
        "predicted": plan.predicted,
        "mfu_convention": report::plan::mfu_convention(&plan.cluster, &plan.train, report::plan::used_devices(plan)),
        "proof": plan.proof,
    });
    if plan.made_for.is_some() {
        let summary = export::summary(plan, training);
        let summary = summary.map_err(|e| Failure::new(Exit::Internal, e))?;
        value["for"] = json!(plan.made_for);
        value["knobs"] = json!(software::knobs(plan, &summary));
    }
    if args.layers {
        value["ops"] = json!(strategies::strategies(plan, training));
    }
    report::print_json(&value)
}
