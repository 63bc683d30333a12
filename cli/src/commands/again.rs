//! Planning again: the model, training and cluster of a plan, changed or under other pins.

use crate::args::SearchArgs;
use crate::failure::{Exit, Failure};
use crate::plan_file::{self, Loaded};
use crate::{document, files, outputs, software};
use checker::Violation;
use ir::cluster::Cluster;
use ir::op::{OpKind, SequenceOrder};
use ir::plan::Plan;
use ir::{Graph, TrainSpec};
use planner::{Pins, PlanError, PlanOptions, Planned};
use std::path::Path;

/// A request to plan again.
pub struct Again {
    /// The model's name.
    pub name: String,
    /// The forward graph.
    pub forward: Graph,
    /// The model.
    pub train: TrainSpec,
    /// The cluster.
    pub cluster: Cluster,
    /// How it is planned.
    pub options: PlanOptions,
}

impl Again {
    /// The request that `plan` answers, with `pins` in place of its own pins of the same keys.
    ///
    /// Fails when pins cannot be read, or contradict each other.
    pub fn of(plan: &Plan, pins: &[String], search: &SearchArgs) -> Result<Again, Failure> {
        let asked = Pins::parse(pins).map_err(super::compile::pin_failure)?;
        let keys: Vec<String> = asked
            .describe()
            .iter()
            .map(|p| key(p).to_string())
            .collect();
        let kept = plan
            .pins
            .iter()
            .filter(|p| !keys.iter().any(|k| k == key(p)));
        let all: Vec<String> = kept.cloned().chain(asked.describe()).collect();
        let mut pins = Pins::parse(&all).map_err(|e| Failure::new(Exit::CheckFailed, e))?;
        let forward = plan_file::forward(plan)?;
        // A graph that is stored in that order cannot be stored so again.
        pins.zigzag &= !is_in_zigzag_order(&forward);
        Ok(Again {
            name: plan.name.clone(),
            forward,
            train: plan.train.clone(),
            cluster: plan.cluster.clone(),
            options: PlanOptions {
                pins,
                tolerance: search.tolerance.0,
                headroom: search.headroom.map(|h| h.0).or(plan.headroom),
                made_for: plan.made_for.as_ref().map(software::other),
                ..PlanOptions::default()
            },
        })
    }

    /// Searches for the best plan, and has it proved.
    pub fn plan(&self) -> Result<Result<Loaded, PlanError>, Failure> {
        let options = PlanOptions {
            name: Some(self.name.clone()),
            ..self.options.clone()
        };
        let planned = planner::plan(&self.forward, &self.train, &self.cluster, &options);
        match planned {
            Ok(planned) => loaded(planned).map(Ok),
            Err(e @ (PlanError::Lower(_) | PlanError::Defect(_))) => Err(e.into()),
            Err(e) => Ok(Err(e)),
        }
    }
}

/// Whether the sequence of a graph is stored in zigzag order.
fn is_in_zigzag_order(graph: &Graph) -> bool {
    let is_zigzag = |op: &ir::Op| match &op.kind {
        OpKind::Attention { order, .. } => matches!(order, SequenceOrder::Zigzag { .. }),
        _ => false,
    };
    graph.ops().iter().any(is_zigzag)
}

/// The key of a pin.
fn key(pin: &str) -> &str {
    pin.split('=').next().unwrap_or(pin).trim()
}

/// A plan that was just made, proved, as if it had been read.
pub fn loaded(planned: Planned) -> Result<Loaded, Failure> {
    super::compile::prove(&planned)?;
    let hash = files::fingerprint(document::to_json(&planned.plan)?.as_bytes());
    Ok(Loaded {
        plan: planned.plan,
        training: planned.training,
        program: planned.program,
        hash,
    })
}

/// Lowers and checks a plan that was found beside another one, or is the plan under other facts:
/// what it is then, or what is wrong with it.
pub fn replayed(plan: Plan) -> Result<Result<Loaded, Vec<Violation>>, Failure> {
    let violations = plan_file::violations(&plan);
    if !violations.is_empty() {
        return Ok(Err(violations));
    }
    let (training, program) = plan_file::lower(&plan)?;
    let violations = checker::check_program(&plan, &training, &program);
    if !violations.is_empty() {
        return Ok(Err(violations));
    }
    let hash = files::fingerprint(document::to_json(&plan)?.as_bytes());
    Ok(Ok(Loaded {
        plan,
        training,
        program,
        hash,
    }))
}

/// Writes a plan where it was asked for.
pub fn write(output: Option<&Path>, loaded: &Loaded) -> Result<(), Failure> {
    match output {
        Some(path) => outputs::write_atomic(path, document::to_json(&loaded.plan)?.as_bytes()),
        None => Ok(()),
    }
}
