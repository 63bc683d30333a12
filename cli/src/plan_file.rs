//! Plans as documents: reading, checking before every use, lowering, writing.

use crate::document;
use crate::failure::{Exit, Failure};
use crate::{files, model, zero_pin};
use checker::Violation;
use ir::plan::{PASSES_VERSION, PLAN_VERSION, Plan};
use ir::program::Program;
use ir::training::TrainingGraph;
use ir::{Figure, Graph, counted};
use serde::Deserialize;
use std::fmt::Display;
use std::path::Path;

/// A plan that passed its check, with what was rebuilt from it.
#[derive(Clone)]
pub struct Loaded {
    /// The plan.
    pub plan: Plan,
    /// The plan's training graph.
    pub training: TrainingGraph,
    /// The plan's program.
    pub program: Program,
    /// The fingerprint of the document.
    pub hash: String,
}

/// Reads, checks and lowers the plan at `path`. The program is not checked; see
/// [`check_program`].
///
/// Fails with exit code 3 when the file is no plan, 5 when the plan breaks a rule.
pub fn load(path: &Path) -> Result<Loaded, Failure> {
    let name = path.display().to_string();
    let (plan, hash) = read(path)?;
    let violations = violations(&plan);
    if !violations.is_empty() {
        return Err(refused(&name, &plan, &violations));
    }
    let (training, program) = lower(&plan)?;
    Ok(Loaded {
        plan,
        training,
        program,
        hash,
    })
}

/// Lists what is wrong with a plan: what the checker finds, and where that finds nothing, what the
/// plan states beside what it does.
pub fn violations(plan: &Plan) -> Vec<Violation> {
    let found = checker::check_plan(plan);
    if found.is_empty() {
        contradicted(plan)
    } else {
        found
    }
}

/// Lists statements of a plan that the rest of it contradicts, as somebody edited one of the two:
/// pins, dropout, and the meshes for which something is predicted.
fn contradicted(plan: &Plan) -> Vec<Violation> {
    let mut found = Vec::new();
    let mut add = |place: &str, rule, expected: String, actual: String| {
        found.push(Violation {
            place: place.into(),
            rule,
            expected,
            actual,
        });
    };
    let pins = planner::Pins::parse(&plan.pins).unwrap_or_default();
    // Pins of tensors may say of some what a level does not.
    if let Some(level) = pins.zero.filter(|_| pins.tensors.is_empty())
        && let Ok(graph) = ir::text::parse(&plan.graph)
        && let Ok(training) = plan.training_graph(&graph)
        && let Some(has) = zero_pin::unkept(plan, &training, level)
    {
        let expected = format!("pins that the plan keeps, as zero={has}");
        add("pins", "pins", expected, format!("zero={level}"));
    }
    for (pin, has) in pins.unkept(plan) {
        let expected = format!("pins that the plan keeps, as {has}");
        add("pins", "pins", expected, pin);
    }
    if plan.train.task.is_training()
        && let Ok(graph) = ir::text::parse(&plan.graph)
    {
        let own = model::dropout(&graph);
        if own != plan.train.dropout {
            let expected = format!("{}, which the ops of the graph have", Figure(own));
            let actual = Figure(plan.train.dropout).to_string();
            add("train.dropout", "dropout", expected, actual);
        }
    }
    let (meshes, predicted) = (plan.n_meshes(), plan.predicted.stages.len());
    if meshes != predicted {
        let expected = format!("an entry for each of {}", counted(meshes as u64, "mesh"));
        add(
            "predicted.stages",
            "predicted",
            expected,
            predicted.to_string(),
        );
    }
    found
}

/// Reads the plan at `path` and its fingerprint, without checking the plan.
pub fn read(path: &Path) -> Result<(Plan, String), Failure> {
    let text = files::read_text(path, "plan", files::LARGE)?;
    let name = path.display().to_string();
    let plan = document::json(&name, &text, "plan").map_err(|failure| {
        // A key that is missing or unknown to this version may well be one that the other version
        // writes.
        let versions = serde_json::from_str::<Versions>(&text).ok();
        match versions.and_then(Versions::of_another) {
            Some(words) => Failure::new(Exit::BadInput, format!("{failure}\n{words}")).help(AGAIN),
            None => failure,
        }
    })?;
    // Another version may have other pins; the check will report which version made the plan.
    if Versions::of(&plan).of_another().is_none() {
        planner::Pins::parse(&plan.pins).map_err(|e| {
            Failure::new(Exit::CheckFailed, format!("{name}: pins: {e}")).help(UNDO)
        })?;
    }
    if let Some(made_for) = &plan.made_for {
        published::software::parse(&made_for.to_string())
            .map_err(|e| Failure::new(Exit::CheckFailed, format!("{name}: for: {e}")).help(UNDO))?;
    }
    Ok((plan, files::fingerprint(text.as_bytes())))
}

/// The advice for a plan of another version.
const AGAIN: &str = "make the plan again with this version's `meshwright compile`; the model, the cluster and the pins are as they were";

/// The version of Meshwright that made a plan, as the plan states it.
#[derive(Clone, Copy, Deserialize)]
struct Versions {
    version: u32,
    passes: u32,
}

impl Versions {
    fn of(plan: &Plan) -> Versions {
        Versions {
            version: plan.version,
            passes: plan.passes,
        }
    }

    /// Says that another version of Meshwright made the plan; `None` where this one did.
    fn of_another(self) -> Option<String> {
        let Versions { version, passes } = self;
        let other = (version, passes) != (PLAN_VERSION, PASSES_VERSION);
        other.then(|| format!(
            "the plan was made by another version of Meshwright: its version is {version} and its passes {passes}, this build has {PLAN_VERSION} and {PASSES_VERSION}"
        ))
    }
}

fn broken_graph(e: impl Display) -> Failure {
    Failure::new(Exit::CheckFailed, format!("the plan's graph: {e}"))
}

/// Parses a plan's forward graph.
pub fn forward(plan: &Plan) -> Result<Graph, Failure> {
    ir::text::parse(&plan.graph).map_err(broken_graph)
}

/// Rebuilds a checked plan's training graph and program.
pub fn lower(plan: &Plan) -> Result<(TrainingGraph, Program), Failure> {
    let training = plan.training_graph(&forward(plan)?).map_err(broken_graph)?;
    let program = lowering::lower_training(plan, &training)?;
    Ok((training, program))
}

/// Proves the program, or says what is wrong with it.
pub fn check_program(loaded: &Loaded) -> Result<(), Failure> {
    let violations = checker::check_program(&loaded.plan, &loaded.training, &loaded.program);
    if violations.is_empty() {
        Ok(())
    } else {
        Err(rejected("the program of the plan", &violations))
    }
}

/// The advice for a plan that was edited.
const UNDO: &str = "undo what was edited by hand, or make the plan again with `meshwright compile`";

/// The most violations that a message lists.
const LISTED: usize = 20;

/// Makes the failure of a plan that breaks rules, or that another version with other rules made.
pub fn refused(name: &str, plan: &Plan, violations: &[Violation]) -> Failure {
    match Versions::of(plan).of_another() {
        Some(words) => Failure::new(Exit::CheckFailed, format!("{name}: {words}")).help(AGAIN),
        None => rejected(&format!("{name}: the plan"), violations),
    }
}

/// Makes the failure of a thing, called `what`, that breaks rules.
pub fn rejected(what: &str, violations: &[Violation]) -> Failure {
    let rules = counted(violations.len() as u64, "rule");
    let message = format!("{what} breaks {rules}:{}", listed(violations));
    Failure::new(Exit::CheckFailed, message).help(UNDO)
}

/// Lists violations, a line each, and how many more there are.
pub fn listed(violations: &[Violation]) -> String {
    let shown = violations.iter().take(LISTED);
    let shown: String = shown.map(|v| format!("\n  {v}")).collect();
    match violations.len().saturating_sub(LISTED) {
        0 => shown,
        more => format!("{shown}\n  and {more} more"),
    }
}
