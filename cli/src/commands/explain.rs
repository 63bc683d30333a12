//! `explain`: why a plan is as it is. What bounds its step, where the time goes, what it was
//! preferred to, and what another choice would cost.

use super::again::{self, Again};
use super::spinner;
use crate::args::ExplainArgs;
use crate::failure::Failure;
use crate::outputs;
use crate::plan_file::{self, Loaded};
use crate::report::account::{Accounted, TermDifference, differences};
use crate::report::degrees::Degrees;
use crate::report::roofline::Rooflines;
use crate::report::{self, percent, table, wrapped};
use crate::software::whose_plan;
use ir::plan::Plan;
use ir::{Bytes, Seconds};
use planner::PlanError;
use serde_json::json;
use std::path::Path;

pub fn run(args: &ExplainArgs) -> Result<(), Failure> {
    if let Some(output) = &args.output {
        outputs::check(&[output], &[&args.plan])?;
    }
    let loaded = plan_file::load(&args.plan)?;
    if args.roofline {
        return roofline(args, &loaded);
    }
    let accounted = Accounted::of(&loaded)?;
    match args.why_not.is_empty() {
        true => explain(args, &loaded, &accounted),
        false => why_not(args, &loaded, &accounted),
    }
}

/// Says what the step's instructions are, kind by kind, and what they take at least.
fn roofline(args: &ExplainArgs, loaded: &Loaded) -> Result<(), Failure> {
    let of = Rooflines::of(loaded)?;
    if args.json {
        return report::print_json(&json!({
            "name": loaded.plan.name,
            "plan_hash": loaded.hash,
            "step_time_s": loaded.plan.predicted.step_time_s,
            "roofline": of,
        }));
    }
    report::out(&of.verdict(&loaded.plan))?;
    report::out(&of.tables(&loaded.plan))?;
    report::out(&of.reading(&loaded.plan))
}

fn explain(args: &ExplainArgs, loaded: &Loaded, accounted: &Accounted) -> Result<(), Failure> {
    let plan = &loaded.plan;
    let degrees = Degrees::of(plan, &loaded.training);
    if args.json {
        return report::print_json(&json!({
            "name": plan.name,
            "plan_hash": loaded.hash,
            "verdict": accounted.verdict(),
            "step_time_s": accounted.account.step_s,
            "degrees": degrees,
            "account": accounted,
            "runners_up": plan.proof.runners_up,
        }));
    }
    report::out(&accounted.verdict())?;
    if let Some(words) = accounted.pace(plan) {
        report::out(&words)?;
    }
    report::out(&accounted.memory())?;
    report::out(&format!("Degrees: {degrees}"))?;
    report::out("\nWhere the step's time goes")?;
    report::out(&accounted.step())?;
    report::out("\nThe same by mesh and kind of layer, without what is hidden")?;
    report::out(&accounted.meshes(plan))?;
    report::out("\nWhat communication costs, in one step")?;
    report::out(&accounted.communication(plan))?;
    report::out(&runners_up(&args.plan, plan, &degrees))
}

/// Lists the plans that were found beside this one and saved.
fn runners_up(path: &Path, plan: &Plan, degrees: &Degrees) -> String {
    let saved = &plan.proof.runners_up;
    if saved.is_empty() {
        return wrapped(&format!(
            "\nNo runners-up were saved with this plan: compile it with --runners-up FOLDER. What another choice would cost, \
             `meshwright explain {} --why-not PIN` shows.",
            path.display()
        ));
    }
    let own_s = plan.predicted.step_time_s.0;
    let row = |what: String, seconds: f64, file: String| {
        let more = percent(seconds / own_s.max(f64::MIN_POSITIVE) - 1.0);
        vec![
            Seconds(seconds).to_string(),
            format!("+{more}").replace("+-", "-"),
            what,
            file,
        ]
    };
    let mut rows = vec![row(degrees.to_string(), own_s, "this plan".into())];
    rows.extend(
        saved
            .iter()
            .map(|r| row(r.what.clone(), r.step_time_s.0, r.file.clone())),
    );
    let mut w = String::from("\nThis plan and its runners-up, which are complete plans\n");
    w += &table(&["step", "more", "degrees", "file"], rows, 4);
    if saved.iter().any(|r| r.step_time_s.0 < own_s) {
        w += "\n";
        w += &wrapped(
            "A runner-up that is faster was passed over for a simpler plan (--tolerance 0 takes the fastest).",
        );
    }
    w
}

/// The most differences that the verdict names.
const NAMED: usize = 3;
/// Differences of less than this share of the step are not worth a word.
const SMALL: f64 = 5e-4;

fn why_not(args: &ExplainArgs, loaded: &Loaded, accounted: &Accounted) -> Result<(), Failure> {
    let again = Again::of(&loaded.plan, &args.why_not, &args.search)?;
    let bar = spinner("searching for a plan under these pins");
    let other = again.plan();
    bar.finish_and_clear();
    let pins = args.why_not.join(" ");
    let other = match other? {
        Ok(other) => other,
        Err(e) => return no_plan(args, &pins, &loaded.plan, &e),
    };
    let of_other = Accounted::of(&other)?;
    again::write(args.output.as_deref(), &other)?;
    let terms = differences(accounted, &of_other);
    let degrees = [loaded, &other].map(|l| Degrees::of(&l.plan, &l.training));
    let verdict = format!(
        "{}{}{}",
        whose_plan(&loaded.plan),
        already(args, &degrees),
        verdict(&pins, [accounted, &of_other], &terms, &degrees)
    );
    if args.json {
        return report::print_json(&json!({
            "name": loaded.plan.name,
            "plan_hash": loaded.hash,
            "pins": again.options.pins.describe(),
            "feasible": true,
            "verdict": verdict,
            "step_time_s": [accounted.account.step_s, of_other.account.step_s],
            "terms": terms,
            "memory": [accounted.memory, of_other.memory],
            "degrees": degrees,
            "plan": args.output,
        }));
    }
    report::out(&verdict)?;
    report::out("\nThe step of the average rank, term by term")?;
    report::out(&term_table([accounted, &of_other], &terms, &pins))?;
    report::out("\nWhat the plans decide")?;
    let mut header = vec!["plan"];
    header.extend(Degrees::HEADER);
    let row = |name: &str, degrees: &Degrees| {
        let mut cells = vec![name.to_string()];
        cells.extend(degrees.cells());
        cells
    };
    let rows = vec![row("this", &degrees[0]), row("other", &degrees[1])];
    report::out(&table(&header, rows, 1))?;
    match &args.output {
        Some(path) => report::out(&format!("The other plan is written to {}.", path.display())),
        None => report::out("With -o FILE the other plan is written, to be inspected or run."),
    }
}

/// Says that the plan has these degrees itself, and where the one that was found under the pins
/// differs all the same; nothing where it has others.
fn already(args: &ExplainArgs, [own, other]: &[Degrees; 2]) -> String {
    if !own.keep(&args.why_not) {
        return String::new();
    }
    let differ = own.differences(other);
    let how = match differ.is_empty() {
        true => "differs in no degree, but may in single ops (inspect --against shows them)".into(),
        false => format!("differs in {}", differ.join(", ")),
    };
    format!("the plan already has these degrees. The plan that the search finds under them {how}. ")
}

/// Says what the pins cost, and why.
fn verdict(
    pins: &str,
    [a, b]: [&Accounted; 2],
    terms: &[TermDifference],
    degrees: &[Degrees; 2],
) -> String {
    let (own, other) = (a.account.step_s, b.account.step_s);
    let change = other / own.max(f64::MIN_POSITIVE) - 1.0;
    let large = terms.iter().filter(|t| t.more_s().abs() > SMALL * own);
    let mut large: Vec<&TermDifference> = large.take(NAMED).collect();
    // Those that go the way of the verdict come first.
    large.sort_by_key(|t| (t.more_s() < 0.0) != (other < own));
    let named = large.into_iter().map(|t| {
        let sign = if t.more_s() < 0.0 { "-" } else { "+" };
        format!("{sign}{} {}", Seconds(t.more_s().abs()), t.what)
    });
    let named: Vec<String> = named.collect();
    let why = match named.is_empty() {
        true => ".".to_string(),
        false => format!(": {}.", named.join(", ")),
    };
    let more = b.memory.peak_bytes.0 as i128 - a.memory.peak_bytes.0 as i128;
    let memory = match more {
        0 => "The fullest rank needs as much memory.".to_string(),
        more if more > 0 => format!("The fullest rank needs {} more memory.", Bytes(more as u64)),
        more => format!(
            "The fullest rank needs {} less memory.",
            Bytes(more.unsigned_abs() as u64)
        ),
    };
    let same = degrees[0] == degrees[1];
    match change {
        _ if same && change.abs() < SMALL => {
            format!("With {pins} the plan is the same.")
        }
        c if c >= 0.0 => format!(
            "With {pins} the step takes {}, {} longer{why} {memory}",
            Seconds(other),
            percent(c)
        ),
        c => format!(
            "With {pins} the step takes {}, {} less{why} {memory} This plan was made under other pins, was preferred as simpler, or the search did not find the other one.",
            Seconds(other),
            percent(-c)
        ),
    }
}

fn term_table([a, b]: [&Accounted; 2], terms: &[TermDifference], pins: &str) -> String {
    let cells = |what: &str, [x, y]: [f64; 2]| {
        let sign = if y < x { "-" } else { "+" };
        let more = format!("{sign}{}", Seconds((y - x).abs()));
        vec![
            what.to_string(),
            Seconds(x).to_string(),
            Seconds(y).to_string(),
            more,
        ]
    };
    let mut rows: Vec<Vec<String>> = terms.iter().map(|t| cells(&t.what, t.seconds)).collect();
    rows.push(cells("step", [a.account.step_s, b.account.step_s]));
    let (x, y) = (a.memory.peak_bytes, b.memory.peak_bytes);
    let sign = if y.0 < x.0 { "-" } else { "+" };
    let more = format!("{sign}{}", Bytes(y.0.abs_diff(x.0)));
    rows.push(vec![
        "peak memory".into(),
        x.to_string(),
        y.to_string(),
        more,
    ]);
    table(
        &["", "this plan", &format!("with {pins}"), "difference"],
        rows,
        1,
    )
}

/// Answers why there is no plan under the pins.
fn no_plan(args: &ExplainArgs, pins: &str, plan: &Plan, e: &PlanError) -> Result<(), Failure> {
    let name = |pin: &str| {
        pin.split_once('=')
            .map_or(pin, |(name, _)| name)
            .to_string()
    };
    let replaced: Vec<String> = args.why_not.iter().map(|pin| name(pin)).collect();
    let stays = |pin: &&String| !replaced.contains(&name(pin));
    let stay: Vec<&str> = plan.pins.iter().filter(stays).map(String::as_str).collect();
    let own = match stay.is_empty() {
        true => String::new(),
        false => format!(" The plan's other pins stay: {}.", stay.join(", ")),
    };
    let verdict = format!(
        "{}There is no plan with {pins}: {e}.{own}",
        whose_plan(plan)
    );
    if args.json {
        return report::print_json(&json!({
            "name": plan.name,
            "pins": args.why_not,
            "feasible": false,
            "verdict": verdict,
            "reason": e.to_string(),
        }));
    }
    report::out(&verdict)
}
