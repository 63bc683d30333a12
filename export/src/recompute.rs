//! What layers recompute, told from the named choices.

use crate::ExportError;
use ir::plan::{Plan, relative_path};
use ir::training::{Recompute, TrainingGraph, choose, training_graph};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// What a layer recomputes in its backward pass.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Recomputed {
    /// Nothing.
    None,
    /// Norms, activation functions and other cheap ops; results of matmuls and attention are kept.
    Selective,
    /// Everything but its input.
    Full,
    /// These ops, which are none of the named choices; paths with the layer's name as `{}`.
    Ops(BTreeSet<String>),
}

impl Recomputed {
    /// Describes it in words.
    pub fn words(&self) -> String {
        match self {
            Recomputed::None => "none".into(),
            Recomputed::Selective => "selective".into(),
            Recomputed::Full => "full".into(),
            Recomputed::Ops(ops) => crate::layout::short(ops).join(", "),
        }
    }

    /// Whether ops with one of these names (ends of paths) are recomputed; everything is in
    /// `Full`.
    pub(crate) fn has(&self, ends: &[&str]) -> bool {
        match self {
            Recomputed::None | Recomputed::Selective => false,
            Recomputed::Full => true,
            Recomputed::Ops(ops) => ops.iter().any(|op| ends.iter().any(|e| op.ends_with(e))),
        }
    }
}

/// The ops that the named choices recompute, by layer.
pub(crate) struct Choices {
    selective: BTreeMap<String, BTreeSet<String>>,
    full: BTreeMap<String, BTreeSet<String>>,
}

impl Choices {
    /// The choices for the model of a plan.
    pub fn of(plan: &Plan, training: &TrainingGraph) -> Result<Choices, ExportError> {
        let recomputes = plan
            .layer_strategies
            .iter()
            .any(|s| !s.recompute.is_empty());
        if !recomputes {
            return Ok(Choices {
                selective: BTreeMap::new(),
                full: BTreeMap::new(),
            });
        }
        let forward = ir::text::parse(&plan.graph).map_err(ExportError::plan)?;
        let kept = training_graph(&forward, &plan.train).map_err(ExportError::plan)?;
        let by_layer = |choice: Recompute| {
            let mut all: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
            for id in choose(&kept, choice, &|_| None) {
                let op = kept.graph.op(id);
                let layer = op.layer.and_then(|l| training.graph.layers.get(l.index()));
                let Some(name) = layer else { continue };
                let of_layer = all.entry(name.clone()).or_default();
                of_layer.insert(relative_path(&op.path, name));
            }
            all
        };
        Ok(Choices {
            selective: by_layer(Recompute::Selective),
            full: by_layer(Recompute::Full),
        })
    }

    /// The choice that recomputes these ops of a layer.
    pub fn named(&self, layer: &str, ops: &BTreeSet<String>) -> Recomputed {
        match ops {
            ops if ops.is_empty() => Recomputed::None,
            ops if self.full.get(layer) == Some(ops) => Recomputed::Full,
            ops if self.selective.get(layer) == Some(ops) => Recomputed::Selective,
            ops => Recomputed::Ops(ops.clone()),
        }
    }
}
