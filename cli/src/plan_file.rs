//! Plans as documents: reading, checking before every use, lowering, writing.

use crate::document;
use crate::failure::{Exit, Failure};
use crate::files;
use checker::Violation;
use ir::plan::Plan;
use ir::program::Program;
use ir::training::TrainingGraph;
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
        return Err(rejected(&format!("{name}: the plan"), &violations));
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
    let plan = document::json(&path.display().to_string(), &text, "plan")?;
    Ok((plan, files::fingerprint(text.as_bytes())))
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

/// Violations that are listed in a message.
const LISTED: usize = 20;

/// The failure that `what` breaks rules.
pub fn rejected(what: &str, violations: &[Violation]) -> Failure {
    let mut message = format!(
        "{what} breaks {} rule{}:",
        violations.len(),
        if violations.len() == 1 { "" } else { "s" }
    );
    for v in violations.iter().take(LISTED) {
        message += &format!("\n  {v}");
    }
    if violations.len() > LISTED {
        message += &format!("\n  and {} more", violations.len() - LISTED);
    }
    Failure::new(Exit::CheckFailed, message)
        .help("undo what was edited by hand, or make the plan again with `meshwright compile`")
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
