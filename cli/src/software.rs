//! Other software that plans are made for: its names on the command line, and its prices.

use crate::failure::{Exit, Failure};
use cost_model::SimError;
use cost_model::costs::Costs;
use cost_model::simulate::{SimulateOptions, Simulation, simulate};
use frameworks::{MemoryUse, Profile, Software};
use ir::Graph;
use ir::cluster::Cluster;
use ir::plan::{MadeFor, Plan};
use ir::program::Program;
use ir::training::TrainingGraph;
use planner::OtherSoftware;
use published::software;
use std::borrow::Cow;

/// Reads what `--for` names; `self` is Meshwright's own runtime, and so is nothing.
pub fn asked(text: Option<&str>) -> Result<Option<OtherSoftware>, Failure> {
    match text {
        None | Some("self") => Ok(None),
        Some(text) => {
            let made_for = software::parse(text).map_err(|e| {
                let what = format!("--for {text}: {e}");
                Failure::new(Exit::Usage, what).help(
                    "give it as NAME, NAME@VERSION or NAME@VERSION+OPTION; without --for a plan is for Meshwright's own runtime",
                )
            })?;
            Ok(Some(other(&made_for)))
        }
    }
}

/// The software that a plan is made for, to plan for it again.
pub fn other(made_for: &MadeFor) -> OtherSoftware {
    OtherSoftware {
        made_for: made_for.clone(),
        profile: software::profile,
    }
}

/// Says for whose runtime figures are, to begin a report with; and where that software has no such model,
/// that it has none, as nothing can be launched there then.
pub fn whose(made_for: Option<&MadeFor>, forward: &Graph, sequence: u64) -> String {
    let target = made_for.and_then(|made_for| export::Target::named(&made_for.name));
    let lacks = target.and_then(|target| target.lacks(forward, sequence));
    let lacks = lacks.map_or(String::new(), |what| format!(", which has {what}"));
    format!("For {}{lacks}: ", software::title(made_for))
}

/// The same of a plan's figures.
pub fn whose_plan(plan: &Plan) -> String {
    let made_for = plan.made_for.as_ref();
    match ir::text::parse(&plan.graph) {
        Ok(forward) if made_for.is_some() => whose(made_for, &forward, plan.train.sequence),
        _ => format!("For {}: ", software::title(made_for)),
    }
}

/// Says that figures are for Meshwright's own runtime.
pub fn whose_own() -> String {
    format!("For {}: ", software::title(None))
}

/// Says that the software that a plan is made for has no words for it, why, and what has; none where
/// the software has, or is none that plans are exported to.
pub fn not_exported(plan: &Plan, training: &TrainingGraph) -> Option<String> {
    let target = export::Target::named(&plan.made_for.as_ref()?.name)?;
    let e = export::export(plan, training, target).err()?;
    let words = e.to_string();
    let words: Vec<&str> = words.split_whitespace().collect();
    let others = written_by(plan, training, target);
    let others = others.map_or(String::new(), |others| format!("; {others}"));
    Some(format!(
        "export will not write this plan: {}{others}",
        words.join(" ")
    ))
}

/// Says for which other software a plan can be written down; none where for none.
pub fn written_by(plan: &Plan, training: &TrainingGraph, but: export::Target) -> Option<String> {
    let names = export::others(plan, training, but).into_iter();
    let names: Vec<&str> = names.map(|t| t.name()).collect();
    let (last, rest) = names.split_last()?;
    let all = match rest.is_empty() {
        true => last.to_string(),
        false => format!("{} or {last}", rest.join(", ")),
    };
    Some(format!("`export --to` {all} writes this plan"))
}

/// How the software that a plan is made for executes it on a cluster; none of Meshwright's own runtime.
pub fn profile(plan: &Plan, cluster: &Cluster) -> Result<Option<Profile>, Failure> {
    let Some(made_for) = &plan.made_for else {
        return Ok(None);
    };
    let found = software::profile(made_for, cluster, &plan.train);
    found.map(Some).map_err(|e| {
        Failure::new(Exit::CheckFailed, format!("the plan's `for`: {e}"))
            .help("make the plan again with this version's `meshwright compile`")
    })
}

/// Plays a step of a plan's program on a cluster as the software executes it that the plan is made
/// for; with what its processes hold, where it is not Meshwright's own runtime.
pub fn played(
    plan: &Plan,
    program: &Program,
    cluster: &Cluster,
    options: &SimulateOptions,
) -> Result<(Simulation, Vec<MemoryUse>), Failure> {
    match profile(plan, cluster)? {
        None => Ok((simulate(program, cluster, options)?, Vec::new())),
        Some(profile) => {
            let priced = planner::software::priced(program, cluster, &profile.software, options)?;
            Ok((priced.simulation, priced.memory))
        }
    }
}

/// A program on the streams of the software that runs it, and what its instructions cost.
pub struct Arranged<'a> {
    /// The program.
    pub program: Cow<'a, Program>,
    /// How it is arranged and priced, and from what; none of Meshwright's own runtime.
    by: Option<(Software, Program)>,
}

impl<'a> Arranged<'a> {
    /// The program of a plan as its software arranges it.
    pub fn of(plan: &Plan, program: &'a Program) -> Result<Arranged<'a>, Failure> {
        let Some(profile) = profile(plan, &plan.cluster)? else {
            let program = Cow::Borrowed(program);
            return Ok(Arranged { program, by: None });
        };
        let whole = lowering::without_pieces(program)?;
        let executed = frameworks::execute(&whole, &plan.cluster, &profile.software)?;
        Ok(Arranged {
            program: Cow::Owned(executed.program),
            by: Some((profile.software, whole)),
        })
    }

    /// The seconds of its instructions on a cluster of the same shape.
    pub fn costs(&self, cluster: &Cluster) -> Result<Costs, SimError> {
        match &self.by {
            None => cost_model::costs::costs(&self.program, cluster),
            Some((software, whole)) => {
                frameworks::execute(whole, cluster, software).map(|e| e.costs)
            }
        }
    }
}
