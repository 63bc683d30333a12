//! Recomputation of layers, told from the named choices.

use crate::ExportError;
use ir::plan::{Plan, relative_path};
use ir::training::{Recompute, TrainingGraph, choose, training_graph};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// The recomputation of a layer in its backward pass.
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

    /// Describes it by what the ops do, without their names: `attention, norms and 2 matmuls`.
    pub fn in_words(&self) -> String {
        let Recomputed::Ops(ops) = self else {
            return self.words();
        };
        let mut counts = [0u64; KINDS.len() + 1];
        for op in ops {
            let name = op.replace("{}.", "");
            let is = |(_, names): &&(&str, &[&str])| names.iter().any(|n| is_named(&name, n));
            let kind = KINDS.iter().position(|k| is(&k)).unwrap_or(KINDS.len());
            counts[kind] += 1;
        }
        let named = KINDS.iter().zip(counts).filter(|(_, n)| *n > 0);
        let mut words: Vec<String> = named
            .map(|((what, _), n)| match *what {
                "matmul" => ir::counted(n, "matmul"),
                what => what.to_string(),
            })
            .collect();
        if counts[KINDS.len()] > 0 {
            words.push(match words.is_empty() {
                true => "cheap ops".into(),
                false => "other cheap ops".into(),
            });
        }
        match words.split_last() {
            Some((last, [])) => last.clone(),
            Some((last, all)) => format!("{} and {last}", all.join(", ")),
            None => "none".into(),
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

/// Kinds of a block's ops, with their names or, before a star, how these begin; all others are
/// cheap.
const KINDS: [(&str, &[&str]); 4] = [
    ("attention", &["attn.attend"]),
    ("norms", &["ln_*", "norm_*", "attn.q_norm*", "attn.k_norm*"]),
    (
        "activation functions",
        &[
            "mlp.act",
            "mlp.mul",
            "mlp.gelu",
            "moe.act",
            "moe.mul",
            "moe.shared.act",
            "moe.shared.mul",
        ],
    ),
    (
        "matmul",
        &[
            "attn.q",
            "attn.k",
            "attn.v",
            "attn.qkv",
            "attn.out",
            "attn.kv",
            "attn.q_a",
            "attn.q_b",
            "attn.kv_a",
            "attn.kv_b",
            "mlp.gate",
            "mlp.up",
            "mlp.down",
            "mlp.gate_up",
            "mlp.fc",
            "mlp.proj",
            "moe.gate",
            "moe.up",
            "moe.down",
            "moe.router",
            "moe.shared.gate",
            "moe.shared.up",
            "moe.shared.down",
        ],
    ),
];

fn is_named(name: &str, pattern: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(start) => name.starts_with(start),
        None => name == pattern,
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
