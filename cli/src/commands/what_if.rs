//! `what-if`: the plan beside the one that is best when a fact changes, what this plan would do
//! then, and from which value on another plan is the best.

mod fact;

use super::again::{self, Again};
use super::spinner;
use super::watching::Watching;
use crate::args::WhatIfArgs;
use crate::failure::{Exit, Failure};
use crate::plan_file::{self, Loaded};
use crate::quantity::Unit;
use crate::report::against::Against;
use crate::report::degrees::Degrees;
use crate::report::{self, percent};
use crate::{cluster, model, outputs, software};
use cost_model::presets;
use fact::{Fact, Setting};
use ir::cluster::Cluster;
use ir::plan::Plan;
use ir::{Graph, Seconds, TrainSpec, counted};
use planner::Watcher;
use serde::Serialize;
use serde_json::json;
use std::sync::Arc;

/// The outcome of this plan under the new facts.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "outcome")]
enum Kept {
    /// It fits, and a step is predicted to take this long.
    Fits {
        /// Seconds of a step.
        step_time_s: f64,
    },
    /// It cannot be kept.
    Cannot {
        /// Why.
        reason: String,
    },
}

/// Where the choice changes, between two values that were searched.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Flip {
    /// The name of the fact.
    key: String,
    /// The last value at which the degrees are this plan's.
    keeps_at: f64,
    /// The first value at which they are not.
    changes_at: f64,
    /// The degrees there.
    to: String,
    /// Searches that were made to find it.
    searches: u32,
}

pub fn run(args: &WhatIfArgs) -> Result<(), Failure> {
    if let Some(output) = &args.output {
        let mut inputs = vec![args.plan.as_path()];
        inputs.extend(args.model.as_deref());
        outputs::check(&[output], &inputs)?;
    }
    let settings = args.set.iter().map(|text| Setting::parse(text));
    let settings = settings.collect::<Result<Vec<_>, _>>()?;
    let loaded = plan_file::load(&args.plan)?;
    let mut again = Again::of(&loaded.plan, &[], &args.search)?;
    let changes = change(args, &settings, &loaded.plan, &mut again)?;
    if changes.is_empty() {
        let what = "nothing is changed";
        return Err(Failure::new(Exit::Usage, what).help(
            "say what would be otherwise: --set link.between=400Gb/s, --hosts 15, --global-batch 2x or --sequence 2x",
        ));
    }
    let facts = changes.join(", ");
    let kept = kept(&loaded, &again)?;
    let bar = spinner("searching for the best plan");
    let watching = Arc::new(Watching::new(
        &bar,
        None,
        "taking the best plan so far, or the first one found, and looking for no change of choice",
    )?);
    again.options.watcher = Watcher::new(watching.clone());
    watching.begin(format!("the best plan with {facts}"));
    let other = again.plan();
    bar.finish_and_clear();
    let other = other?.map_err(|e| {
        let failure = Failure::from(e);
        let what = format!("with {facts} there is no plan: {failure}");
        failure.saying(what)
    })?;
    again::write(args.output.as_deref(), &other)?;
    let degrees = [&loaded, &other].map(|l| Degrees::of(&l.plan, &l.training));
    let alone = settings.len() == 1 && changes.len() == 1;
    let looks = alone && args.searches > 0 && !watching.is_over();
    let flip = match settings.first().filter(|_| looks) {
        Some(setting) if degrees[0] != degrees[1] => {
            flip(args, setting, (&loaded, &again), &degrees, &watching)?
        }
        _ => None,
    };
    let tolerance = args.search.tolerance.0;
    let verdict = verdict(&facts, (&loaded, &other), &kept, &degrees, tolerance);
    let against = Against::new(&loaded, &other)?;
    if args.json {
        return report::print_json(&json!({
            "name": loaded.plan.name,
            "for": loaded.plan.made_for,
            "plan_hash": loaded.hash,
            "changes": changes,
            "pins": again.options.pins.describe(),
            "verdict": verdict,
            "this_plan": kept,
            "step_time_s": [loaded.plan.predicted.step_time_s, other.plan.predicted.step_time_s],
            "degrees": degrees,
            "flip": flip,
            "ended_early": watching.is_over(),
            "predicted": against.predicted,
            "differences": against.differences,
            "plan": args.output,
        }));
    }
    report::out(&verdict)?;
    let pins = again.options.pins.describe();
    if !pins.is_empty() {
        report::out(&format!("The plan's pins stay: {}.", pins.join(", ")))?;
    }
    if watching.is_over() {
        report::out(
            "Ended early: the new plan is the best that was found by then, or the value at which the choice changes was looked for no further.",
        )?;
    }
    if let (Some(flip), Some(setting)) = (&flip, settings.first()) {
        report::out(&flip.words(setting.fact.unit()))?;
    }
    report::out("")?;
    report::out(&against.words(["this plan", "the new one"]))?;
    match &args.output {
        Some(path) => report::out(&format!("The new plan is written to {}.", path.display())),
        None => Ok(()),
    }
}

/// Changes the facts that are planned for; what was changed, from old to new.
fn change(
    args: &WhatIfArgs,
    settings: &[Setting],
    plan: &Plan,
    again: &mut Again,
) -> Result<Vec<String>, Failure> {
    let mut changes = Vec::new();
    let dtype = plan.train.precision.compute();
    // Links between hosts may be there only when there are several.
    if let Some(text) = &args.hosts {
        let old = again.cluster.n_hosts;
        let new = whole("--hosts", text, old.into())?;
        unchanged(
            "--hosts",
            text,
            new == u64::from(old),
            &counted(old, "host"),
        )?;
        let hosts = u32::try_from(new).unwrap_or(u32::MAX);
        let name = again.cluster.name.clone();
        let changed = presets::with_hosts(again.cluster.clone(), hosts);
        again.cluster = changed.map_err(|p| {
            Failure::new(
                Exit::Usage,
                format!("--hosts {text}: cluster `{name}`: {p}"),
            )
            .help("give a number of hosts that the cluster can have")
        })?;
        changes.push(format!("{} in place of {old}", counted(new, "host")));
    }
    let mut facts = Vec::new();
    for setting in settings {
        let (flag, unit) = (format!("--set {}", setting.key), setting.fact.unit());
        let fact = setting.fact.of(&again.cluster)?;
        if let Some((_, first)) = facts.iter().find(|(known, _)| *known == fact) {
            let what = format!(
                "{flag}={} and --set {first} change the same fact",
                setting.text
            );
            return Err(Failure::new(Exit::Usage, what).help("give each fact one new value"));
        }
        facts.push((fact, format!("{}={}", setting.key, setting.text)));
        let [old, new] = setting.values(&again.cluster, dtype)?;
        let is_old = (new - old).abs() <= 1e-9 * old.abs();
        unchanged(&flag, &setting.text, is_old, &unit.show(old))?;
        setting.fact.set(&mut again.cluster, dtype, new)?;
        let reserved = again.cluster.device.memory_reserved_bytes;
        if setting.fact == Fact::Memory && again.cluster.device.memory_bytes <= reserved {
            let what = format!(
                "{flag}={}: a device reserves {reserved} of its memory, so {} leave nothing for a plan",
                setting.text,
                unit.show(new)
            );
            return Err(Failure::new(Exit::Usage, what).help("give --set memory more"));
        }
        changes.push(format!(
            "{} {} in place of {}",
            setting.key,
            unit.show(new),
            unit.show(old)
        ));
    }
    checked(&again.cluster)?;
    if let Some(text) = &args.global_batch {
        let old = again.train.global_batch;
        again.train.global_batch = whole("--global-batch", text, old)?;
        let is_old = again.train.global_batch == old;
        unchanged("--global-batch", text, is_old, &counted(old, "sample"))?;
        changes.push(format!(
            "a global batch of {} in place of {old}",
            again.train.global_batch
        ));
    }
    if let Some(text) = &args.sequence {
        let old = again.train.sequence;
        again.train.sequence = whole("--sequence", text, old)?;
        let is_old = again.train.sequence == old;
        unchanged("--sequence", text, is_old, &counted(old, "token"))?;
        changes.push(format!(
            "sequences of {} tokens in place of {old}",
            again.train.sequence
        ));
        again.forward = graph_of(args, &again.train)?;
    }
    if let Some(problem) = again.train.problems().first() {
        return Err(Failure::new(Exit::Usage, problem));
    }
    Ok(changes)
}

/// Refuses a value that stands already: the answer to it would be the plan that there is.
fn unchanged(flag: &str, text: &str, is_old: bool, old: &str) -> Result<(), Failure> {
    match is_old {
        false => Ok(()),
        true => {
            let sign = if flag.starts_with("--set") { '=' } else { ' ' };
            let what = format!("{flag}{sign}{text} changes nothing: the plan is for {old}");
            Err(Failure::new(Exit::Usage, what).help("give another value, or leave it out"))
        }
    }
}

/// A cluster that can be planned for.
fn checked(cluster: &Cluster) -> Result<(), Failure> {
    match cluster.problems().first() {
        Some(problem) => Err(Failure::new(
            Exit::Usage,
            format!("the changed cluster makes no sense: {problem}"),
        )
        .help("give --set another value")),
        None => {
            for words in cluster::other_units(cluster).iter() {
                crate::say(format_args!("warning: {words}"));
            }
            Ok(())
        }
    }
}

/// The model with another length of its sequences, which a plan's graph cannot change.
fn graph_of(args: &WhatIfArgs, train: &TrainSpec) -> Result<Graph, Failure> {
    let Some(path) = &args.model else {
        let what = "--sequence needs the model: a plan holds its graph for one length of sequences";
        return Err(Failure::new(Exit::Usage, what)
            .help("name what the plan was compiled from, as --model models/gpt2"));
    };
    model::load(path)?.graph(train.sequence, train.dropout, train.task)
}

/// A whole number, or a multiple of the old one.
fn whole(flag: &str, text: &str, old: u64) -> Result<u64, Failure> {
    let value = Unit::Count.parse(flag, text)?.of(old as f64);
    match value >= 1.0 && value.fract() == 0.0 && value < 1e15 {
        true => Ok(value as u64),
        false => Err(Failure::new(
            Exit::Usage,
            format!("{flag} {text}: {} is no whole number", ir::Figure(value)),
        )
        .help("give a whole number, or a multiple such as 2x that makes one")),
    }
}

/// Plays this plan under the new facts.
fn kept(loaded: &Loaded, again: &Again) -> Result<Kept, Failure> {
    let cannot = |reason: String| Ok(Kept::Cannot { reason });
    let old = &loaded.plan;
    if again.train.sequence != old.train.sequence {
        return cannot("it is for another length of sequences".into());
    }
    let used = report::plan::used_devices(old);
    let there_are = again.cluster.n_devices();
    if used > there_are {
        return cannot(format!(
            "it needs {}, and there are {there_are}",
            counted(used, "device")
        ));
    }
    let batch = again.train.global_batch;
    if !batch.is_multiple_of(old.microbatch.max(1)) {
        return cannot(format!(
            "its microbatches of {} do not divide a global batch of {batch}",
            counted(old.microbatch, "sample")
        ));
    }
    let moved = Plan {
        cluster: again.cluster.clone(),
        train: again.train.clone(),
        n_microbatches: u32::try_from(batch / old.microbatch.max(1)).unwrap_or(u32::MAX),
        ..old.clone()
    };
    if let Some(problem) = moved.schedule_problem() {
        return cannot(problem);
    }
    let (training, program) = plan_file::lower(&moved)?;
    let work = cost_model::StepWork::of(&training, &moved.train);
    let options = cost_model::SimulateOptions::new(work);
    let (played, _) = software::played(&moved, &program, &again.cluster, &options)?;
    let mut moved = Plan {
        predicted: played.prediction,
        ..moved
    };
    // What a simpler plan cost was said of the old facts.
    moved.proof.simpler = None;
    match again::replayed(moved)? {
        Ok(_) => Ok(Kept::Fits {
            step_time_s: played.step_time.0,
        }),
        Err(violations) => {
            let first = violations.first().map(ToString::to_string);
            cannot(first.unwrap_or_default())
        }
    }
}

/// Says which plan is best under the new facts, beside this one.
fn verdict(
    facts: &str,
    (loaded, other): (&Loaded, &Loaded),
    kept: &Kept,
    degrees: &[Degrees; 2],
    tolerance: f64,
) -> String {
    let tokens = |l: &Loaded| l.plan.predicted.tokens_per_s;
    let step_s = |l: &Loaded| l.plan.predicted.step_time_s.0;
    let unit = report::plan::unit(&loaded.plan);
    let (best, faster) = (step_s(other), tokens(other) / tokens(loaded) - 1.0);
    let rate = match faster {
        f if f.abs() < SAME => format!("as many {unit} per second"),
        f if f > 0.0 => format!("{} more {unit} per second", percent(f)),
        f => format!("{} fewer {unit} per second", percent(-f)),
    };
    let choice = match degrees[0] == degrees[1] {
        true => "It has the same degrees as this one".to_string(),
        false => format!(
            "It is another one: {}, where this one has {}",
            degrees[1], degrees[0]
        ),
    };
    let whose = software::whose_plan(&loaded.plan);
    let own = match kept {
        Kept::Fits { step_time_s } if *step_time_s < best * (1.0 - SAME) => {
            return format!(
                "{whose}With {facts} this plan, kept as it is, takes {} a step. The search chooses one that takes {}, {rate}: {}. {choice}.",
                Seconds(*step_time_s),
                Seconds(best),
                passed_over(best / step_time_s - 1.0, tolerance)
            );
        }
        Kept::Fits { step_time_s } => {
            let loses = step_time_s / best.max(f64::MIN_POSITIVE) - 1.0;
            let than = match loses {
                l if l > 1.0 => format!("{:.1} times as long as the best", 1.0 + l),
                l if l > SAME => format!("{} more than the best", percent(l)),
                _ if degrees[0] == degrees[1] => "as the best".to_string(),
                _ => "as the best: a tie".to_string(),
            };
            format!(
                "Kept as it is, this plan would take {}, {than}.",
                Seconds(*step_time_s)
            )
        }
        Kept::Cannot { reason } => format!("This plan cannot be kept: {reason}."),
    };
    format!(
        "{whose}With {facts} the best plan takes {} a step, {rate}. {choice}. {own}",
        Seconds(best)
    )
}

/// Relative difference below which steps take as long as each other.
const SAME: f64 = 5e-4;

/// Why a search takes a plan that is slower than this one by a share.
fn passed_over(slower: f64, tolerance: f64) -> String {
    match slower <= tolerance {
        true => format!(
            "{} slower is a tie within --tolerance {}, in which the simpler plan wins",
            percent(slower),
            percent(tolerance)
        ),
        false => format!(
            "it is {} slower, and the search did not find this one",
            percent(slower)
        ),
    }
}

/// Searches for the value of one fact at which the degrees stop being this plan's, halving the
/// ratio of the values on both sides each time.
fn flip(
    args: &WhatIfArgs,
    setting: &Setting,
    (loaded, again): (&Loaded, &Again),
    degrees: &[Degrees; 2],
    watching: &Watching,
) -> Result<Option<Flip>, Failure> {
    let dtype = loaded.plan.train.precision.compute();
    let [mut keeps, mut changes] = setting.values(&loaded.plan.cluster, dtype)?;
    if keeps <= 0.0 {
        return Ok(None);
    }
    let bar = watching.again("searching for the value at which the choice changes");
    let mut to = degrees[1].to_string();
    let at = |value: f64| -> Result<Option<Degrees>, Failure> {
        let mut cluster = loaded.plan.cluster.clone();
        setting.fact.set(&mut cluster, dtype, value)?;
        let between = Again {
            name: again.name.clone(),
            forward: again.forward.clone(),
            train: again.train.clone(),
            cluster,
            options: again.options.clone(),
        };
        let planned = between.plan()?.ok();
        Ok(planned.map(|l| Degrees::of(&l.plan, &l.training)))
    };
    let mut searches = 0;
    for i in 0..args.searches {
        let middle = (keeps * changes).sqrt();
        watching.begin(format!(
            "search {} of {} for the value at which the choice changes",
            i + 1,
            args.searches
        ));
        let found = at(middle)?;
        // A search that was ended early says nothing of the choice.
        if watching.is_over() {
            break;
        }
        searches += 1;
        match found {
            Some(found) if found == degrees[0] => keeps = middle,
            found => {
                changes = middle;
                to = found.map_or("no plan".into(), |d| d.to_string());
            }
        }
    }
    bar.finish_and_clear();
    Ok(Some(Flip {
        key: setting.key.clone(),
        keeps_at: keeps,
        changes_at: changes,
        to,
        searches,
    }))
}

impl Flip {
    fn words(&self, unit: Unit) -> String {
        format!(
            "The choice changes between {} {}, which keeps this plan's degrees, and {}, where it is {} (found by {}; further changes were not looked for).",
            self.key,
            unit.show(self.keeps_at),
            unit.show(self.changes_at),
            self.to,
            counted(self.searches, "search")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slower_plan_that_is_chosen_is_no_better_one() {
        let tie = passed_over(0.002, 0.01);
        assert_eq!(
            tie,
            "0.2% slower is a tie within --tolerance 1.0%, in which the simpler plan wins"
        );
        assert!(passed_over(0.02, 0.01).ends_with("did not find this one"));
    }
}
