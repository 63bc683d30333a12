//! Plans for other software: what a plan does in common terms, and the launch flags, config files
//! and placements by which Megatron-LM, DeepSpeed, torchtitan, PyTorch's FSDP2, accelerate and JAX
//! do the same.
//!
//! [`summary()`] reads the terms off the plan's strategies, never off its pins. [`export`] writes
//! them down for a [`Target`]. What a target cannot express is listed with what was written in its
//! place ([`NotExpressed`]); where nothing near the plan can be written it is an error, so no file
//! says what the plan does not do.
//!
//! * `layout`: what each mesh axis does in each layer, and how parameters lie; `recompute`: which
//!   named choice a layer's recomputation is; `model`: the shape of the model.
//! * `summary`: these as degrees; `names`: parameters in other models.
//! * `targets`: a file for each.

mod layout;
mod model;
mod names;
mod recompute;
mod summary;
mod targets;

pub use model::{Activation, Experts, ModelShape, Norm, Rotary};
pub use recompute::Recomputed;
pub use summary::{ContextAttention, Degrees, Deviation, Stage, Subject, Summary};
pub use targets::Target;

use ir::plan::{Plan, ScheduleKind};
use ir::training::TrainingGraph;
use layout::Run;
use serde::Serialize;

/// A plan for a target.
#[derive(Clone, Debug, Serialize)]
pub struct Export {
    /// The target.
    pub target: Target,
    /// The plan in common terms.
    pub summary: Summary,
    /// The files to write.
    #[serde(skip)]
    pub files: Vec<File>,
    /// The list of what the target does otherwise than the plan.
    pub not_expressed: Vec<NotExpressed>,
    /// The pins under which `compile` makes the plan that the files describe; none where there are
    /// no degrees.
    pub pins: Option<Vec<String>>,
}

/// A file to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// Its name.
    pub name: &'static str,
    /// Its text.
    pub text: String,
}

/// Something of a plan that a target cannot express.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NotExpressed {
    /// The plan's own way.
    pub what: String,
    /// Where.
    #[serde(rename = "where")]
    pub place: String,
    /// The way that was written instead.
    pub instead: String,
}

/// Why a plan has no export.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExportError {
    /// The plan does not fit together.
    #[error("the plan is not whole: {0}")]
    Plan(String),
    /// The plan runs forward alone.
    #[error("the plan is one of inference, and {} is told how to train", .0.title())]
    Inference(Target),
    /// The plan updates weights after every microbatch.
    #[error(
        "the plan updates weights after every microbatch (PipeDream), so it trains otherwise than {} does",
        .0.title()
    )]
    Asynchronous(Target),
    /// The target has no model like the plan's, whatever the plan does with it.
    #[error("{} cannot express the plan's model: {reason}", .target.title())]
    Model {
        /// The target.
        target: Target,
        /// Why.
        reason: String,
    },
    /// The target has no words for what the plan does.
    #[error("{} cannot express the plan:{}", .target.title(), listed(.reasons))]
    Inexpressible {
        /// The target.
        target: Target,
        /// Why.
        reasons: Vec<String>,
    },
}

/// The most reasons that a message lists.
const LISTED: usize = 10;

fn listed(reasons: &[String]) -> String {
    let shown = reasons.iter().take(LISTED);
    let shown: String = shown.map(|r| format!("\n  {r}")).collect();
    match reasons.len().saturating_sub(LISTED) {
        0 => shown,
        more => format!("{shown}\n  and {more} more"),
    }
}

impl ExportError {
    fn plan(error: impl std::fmt::Display) -> ExportError {
        ExportError::Plan(error.to_string())
    }
}

/// A plan with what is read off it.
pub(crate) struct Read<'a> {
    pub plan: &'a Plan,
    pub runs: Vec<Run>,
    pub summary: Summary,
}

/// Summarises a plan. `training` is its training graph.
///
/// Fails where the plan does not fit together, which a checked plan does.
pub fn summary(plan: &Plan, training: &TrainingGraph) -> Result<Summary, ExportError> {
    Ok(read(plan, training)?.summary)
}

/// The targets for which a plan can be written down, of those but one.
pub fn others(plan: &Plan, training: &TrainingGraph, but: Target) -> Vec<Target> {
    let others = Target::ALL.into_iter().filter(|t| *t != but);
    others
        .filter(|t| export(plan, training, *t).is_ok())
        .collect()
}

fn read<'a>(plan: &'a Plan, training: &TrainingGraph) -> Result<Read<'a>, ExportError> {
    let forward = ir::text::parse(&plan.graph).map_err(ExportError::plan)?;
    let runs = layout::runs(plan, training)?;
    let summary = summary::summarise(plan, &forward, &runs);
    Ok(Read {
        plan,
        runs,
        summary,
    })
}

/// Writes a plan down for a target. `training` is its training graph.
///
/// Fails where the plan does not train once a step, or the target cannot express it at all.
pub fn export(
    plan: &Plan,
    training: &TrainingGraph,
    target: Target,
) -> Result<Export, ExportError> {
    if !plan.train.task.is_training() {
        return Err(ExportError::Inference(target));
    }
    if plan.schedule == ScheduleKind::PipeDream {
        return Err(ExportError::Asynchronous(target));
    }
    let read = read(plan, training)?;
    let forward = ir::text::parse(&plan.graph).map_err(ExportError::plan)?;
    if read.summary.degrees.is_none() {
        // A model that is not known there has no export whatever the plan: that is said first.
        if let Some(reason) = target.lacks(&forward, plan.train.sequence) {
            let reason = format!("it has {reason}");
            return Err(ExportError::Model { target, reason });
        }
    }
    let mut written = target.write(&read)?;
    for blocks in model::seen_blocks(&forward) {
        written.not_expressed.push(NotExpressed {
            place: "attention".into(),
            what: format!("a query sees {blocks}"),
            instead: "nothing: the pattern is the model's own, which its code has to have".into(),
        });
    }
    let pins = read.summary.degrees.as_ref();
    let pins = pins.map(|d| written.choices.pins(&read.summary, d));
    Ok(Export {
        target,
        files: written.files,
        not_expressed: written.not_expressed,
        pins,
        summary: read.summary,
    })
}
