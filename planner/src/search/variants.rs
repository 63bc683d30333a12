//! Choices of what is recomputed: the training graphs that the search chooses among, layer by layer.
//!
//! Where the pins leave it open, every layer may keep its activations or recompute them by either
//! of the two named choices ([`Recompute`]). Each choice makes a training graph of its own, in
//! which a layer has its twins; the layers of a plan need not agree, because a layer's boundary is
//! the same under all of them.

use super::request::{recomputed, saved_values};
use crate::PlanError;
use crate::groups::{Chains, Index};
use crate::layers::{Layers, find_layers};
use crate::pins::Pins;
use crate::pins::whole::made_of_parameters;
use crate::prices::Buckets;
use ir::training::{Recompute, TrainingGraph, recompute};
use ir::{LayerId, OpId};
use std::collections::{BTreeMap, BTreeSet};

/// A training graph and what is asked of it again and again.
pub(super) struct Variant {
    pub(super) training: TrainingGraph,
    /// Whether it recomputes nothing at all.
    pub(super) keeps_all: bool,
    /// Its layers, by kinds that all variants have in common.
    pub(super) layers: Layers,
    /// Per kind, whether it recomputes other ops than the first variant.
    pub(super) differs: Vec<bool>,
    pub(super) saved: Vec<bool>,
    pub(super) buckets: Buckets,
    pub(super) of_parameters: Vec<bool>,
    pub(super) index: Index,
    pub(super) chains: Chains,
}

/// The variants of a training graph in which nothing is recomputed yet, that which recomputes least
/// first.
pub(super) fn variants(kept: TrainingGraph, pins: &Pins) -> Result<Vec<Variant>, PlanError> {
    let policies = match pins.recompute {
        Some(policy) => vec![policy],
        None => vec![Recompute::None, Recompute::Selective, Recompute::Full],
    };
    let mut all: Vec<BTreeSet<OpId>> = Vec::new();
    for policy in policies {
        let chosen = recomputed(&kept, pins, policy)?;
        if !all.contains(&chosen) {
            all.push(chosen);
        }
    }
    let graph = &kept.graph;
    let n_layers = graph.layers.len();
    let by_layer = |chosen: &BTreeSet<OpId>| {
        let mut of_layer: Vec<Vec<OpId>> = vec![Vec::new(); n_layers];
        for &id in chosen {
            if let Some(layer) = graph.op(id).layer {
                of_layer[layer.index()].push(id);
            }
        }
        of_layer
    };
    let ops: Vec<Vec<Vec<OpId>>> = all.iter().map(by_layer).collect();
    let mut trainings = Vec::with_capacity(all.len());
    for chosen in &all {
        trainings.push(match chosen.is_empty() {
            true => kept.clone(),
            false => recompute(&kept, chosen).map_err(|e| PlanError::Input(e.to_string()))?,
        });
    }
    let first_chains = Chains::new(&trainings[0]);
    let of_first = (&trainings[0], &first_chains);
    let chains: Vec<Chains> = trainings
        .iter()
        .map(|training| Chains::of_variant(training, of_first))
        .collect();
    let layers: Vec<Layers> = trainings.iter().map(|t| layers_of(t, pins)).collect();
    let (kind, first) = common(&layers);
    let chosen = all.iter().zip(&ops);
    let variants = trainings.into_iter().zip(chains).zip(layers).zip(chosen);
    let variants = variants.map(|(((training, chains), layers), (chosen, own))| {
        let differs = first.iter().map(|l| own[l.index()] != ops[0][l.index()]);
        Variant {
            keeps_all: chosen.is_empty(),
            differs: differs.collect(),
            saved: saved_values(&training),
            buckets: Buckets::new(&training),
            of_parameters: made_of_parameters(&training.graph),
            index: Index::new(&training),
            chains,
            layers: Layers {
                ops: layers.ops,
                kind: kind.clone(),
                first: first.clone(),
            },
            training,
        }
    });
    Ok(variants.collect())
}

fn layers_of(training: &TrainingGraph, pins: &Pins) -> Layers {
    let pin = |v| match pins.tensors.is_empty() {
        true => None,
        false => pins.tensor(&training.graph.value_name(v)),
    };
    find_layers(training, &pin)
}

/// Kinds by layer, and the first layer of each: layers are of one kind if they are under every
/// variant.
fn common(variants: &[Layers]) -> (Vec<usize>, Vec<LayerId>) {
    let n_layers = variants.first().map_or(0, |l| l.kind.len());
    let mut known: BTreeMap<Vec<usize>, usize> = BTreeMap::new();
    let mut first = Vec::new();
    let kinds = (0..n_layers).map(|layer| {
        let kind: Vec<usize> = variants.iter().map(|l| l.kind[layer]).collect();
        *known.entry(kind).or_insert_with(|| {
            first.push(LayerId::new(layer));
            first.len() - 1
        })
    });
    (kinds.collect(), first)
}
