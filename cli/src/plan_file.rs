//! Plans as documents: reading, checking before every use, lowering, writing.

use crate::document;
use crate::failure::{Exit, Failure};
use crate::files;
use checker::Violation;
use ir::counted;
use ir::plan::{PASSES_VERSION, PLAN_VERSION, Plan};
use ir::program::Program;
use ir::training::TrainingGraph;
use serde::Deserialize;
use std::path::Path;

/// A plan that passed its check, with what is rebuilt from it.
pub struct Loaded {
    /// The plan.
    pub plan: Plan,
    /// Its training graph.
    pub training: TrainingGraph,
    /// Its program.
    pub program: Program,
    /// Fingerprint of the document.
    pub hash: String,
}

/// Reads, checks and lowers the plan at `path`. The program is not checked; see
/// [`check_program`].
///
/// Fails with exit code 3 when the file is no plan, 5 when the plan breaks a rule.
pub fn load(path: &Path) -> Result<Loaded, Failure> {
    let name = path.display().to_string();
    let (plan, hash) = read(path)?;
    let violations = checker::check_plan(&plan);
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

/// The plan at `path` and its fingerprint, not yet checked.
pub fn read(path: &Path) -> Result<(Plan, String), Failure> {
    let text = files::read_text(path, "plan", files::LARGE)?;
    let name = path.display().to_string();
    let plan = document::json(&name, &text, "plan").map_err(|failure| {
        // A key that is missing or unknown to this version may well be one that the other one
        // writes.
        let versions = serde_json::from_str::<Versions>(&text).ok();
        match versions.and_then(Versions::of_another) {
            Some(words) => Failure::new(Exit::BadInput, format!("{failure}\n{words}")).help(AGAIN),
            None => failure,
        }
    })?;
    // Another version may have other pins; that it made the plan is said where it is checked.
    if Versions::of(&plan).of_another().is_none() {
        planner::Pins::parse(&plan.pins).map_err(|e| {
            Failure::new(Exit::CheckFailed, format!("{name}: pins: {e}")).help(UNDO)
        })?;
    }
    Ok((plan, files::fingerprint(text.as_bytes())))
}

/// The way out of a plan of another version.
const AGAIN: &str = "make the plan again with this version's `meshwright compile`; the model, the cluster and the pins are as they were";

/// The version that made a plan, as the plan says.
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

    /// That another version of Meshwright made the plan, where one did.
    fn of_another(self) -> Option<String> {
        let Versions { version, passes } = self;
        let other = (version, passes) != (PLAN_VERSION, PASSES_VERSION);
        other.then(|| format!(
            "the plan was made by another version of Meshwright: its version is {version} and its passes {passes}, this build has {PLAN_VERSION} and {PASSES_VERSION}"
        ))
    }
}

/// Rebuilds a checked plan's training graph and program.
pub fn lower(plan: &Plan) -> Result<(TrainingGraph, Program), Failure> {
    let broken = |e: String| Failure::new(Exit::CheckFailed, format!("the plan's graph: {e}"));
    let forward = ir::text::parse(&plan.graph).map_err(|e| broken(e.to_string()))?;
    let training = plan
        .training_graph(&forward)
        .map_err(|e| broken(e.to_string()))?;
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

/// The way out of a plan that was edited.
const UNDO: &str = "undo what was edited by hand, or make the plan again with `meshwright compile`";

/// Violations that are listed in a message.
const LISTED: usize = 20;

/// The failure that a plan breaks rules, or was made by another version, whose rules were
/// others.
pub fn refused(name: &str, plan: &Plan, violations: &[Violation]) -> Failure {
    match Versions::of(plan).of_another() {
        Some(words) => Failure::new(Exit::CheckFailed, format!("{name}: {words}")).help(AGAIN),
        None => rejected(&format!("{name}: the plan"), violations),
    }
}

/// The failure that `what` breaks rules.
pub fn rejected(what: &str, violations: &[Violation]) -> Failure {
    let mut message = format!(
        "{what} breaks {}:",
        counted(violations.len() as u64, "rule")
    );
    for v in violations.iter().take(LISTED) {
        message += &format!("\n  {v}");
    }
    if violations.len() > LISTED {
        message += &format!("\n  and {} more", violations.len() - LISTED);
    }
    Failure::new(Exit::CheckFailed, message).help(UNDO)
}

/// The plan as a document.
pub fn to_text(plan: &Plan) -> Result<String, Failure> {
    let text = serde_json::to_string_pretty(plan).map_err(|e| {
        Failure::new(
            Exit::Internal,
            format!("the plan cannot be written as JSON: {e}"),
        )
    })?;
    Ok(text + "\n")
}
