//! One point of a table of plans: the best plan of a model on one cluster, in a few figures.

use super::again;
use crate::args::{SearchArgs, TrainArgs};
use crate::failure::Failure;
use crate::report::degrees::Degrees;
use crate::{model, software, train_spec};
use ir::cluster::Cluster;
use ir::{Bytes, Graph, TrainSpec};
use planner::{Pins, PlanError, PlanOptions};
use serde::Serialize;
use std::path::Path;

/// The request that is planned on every cluster.
pub struct Wanted {
    /// The forward graph.
    pub forward: Graph,
    /// The model.
    pub train: TrainSpec,
    /// How it is planned.
    pub options: PlanOptions,
}

/// The figures of a plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Point {
    /// Predicted seconds of a step.
    pub step_time_s: f64,
    /// Tokens per second over the whole cluster.
    pub tokens_per_s: f64,
    /// Model FLOPs utilisation.
    pub mfu: f64,
    /// Bytes of the fullest rank.
    pub peak_bytes: Bytes,
    /// Degrees of the plan.
    pub degrees: Degrees,
}

impl Wanted {
    /// Says for whose runtime the figures are.
    pub fn whose(&self) -> String {
        let other = self.options.made_for.as_ref();
        software::whose(
            other.map(|o| &o.made_for),
            &self.forward,
            self.train.sequence,
        )
    }

    /// Builds what the arguments ask for.
    pub fn of(
        model: &Path,
        expert_capacity: Option<f64>,
        train: &TrainArgs,
        pins: &[String],
        search: &SearchArgs,
        made_for: Option<&str>,
    ) -> Result<Wanted, Failure> {
        let made_for = software::asked(made_for)?;
        let pins = Pins::parse(pins).map_err(super::compile::pin_failure)?;
        let model = model::load(model)?.with_expert_capacity(expert_capacity)?;
        let train = train_spec::train_spec(train, model.max_sequence())?;
        Ok(Wanted {
            forward: model.graph(train.sequence, train.dropout, train.task)?,
            options: PlanOptions {
                pins,
                tolerance: search.tolerance.0,
                headroom: search.headroom.map(|h| h.0),
                made_for,
                ..PlanOptions::default()
            },
            train,
        })
    }

    /// Plans on a cluster. What is asked for wrongly anywhere is a failure; that there is no plan
    /// on this cluster is an answer.
    pub fn on(&self, cluster: &Cluster) -> Result<Result<Point, PlanError>, Failure> {
        let planned = planner::plan(&self.forward, &self.train, cluster, &self.options);
        let planned = match planned {
            Ok(planned) => planned,
            Err(e @ (PlanError::Lower(_) | PlanError::Defect(_) | PlanError::Input(_))) => {
                return Err(e.into());
            }
            Err(e) => return Ok(Err(e)),
        };
        let loaded = again::loaded(planned)?;
        let predicted = &loaded.plan.predicted;
        let peaks = predicted.stages.iter().map(|s| s.peak_bytes.0);
        Ok(Ok(Point {
            step_time_s: predicted.step_time_s.0,
            tokens_per_s: predicted.tokens_per_s,
            mfu: predicted.mfu,
            peak_bytes: Bytes(peaks.max().unwrap_or(0)),
            degrees: Degrees::of(&loaded.plan, &loaded.training),
        }))
    }
}
