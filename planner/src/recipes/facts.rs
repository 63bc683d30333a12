//! The facts about a model and a cluster that the grids of recipes depend on.

use ir::cluster::Cluster;
use ir::{Dim, Graph, OpKind, TrainSpec};

/// The facts that a grid depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Devices of the cluster.
    pub n_devices: u32,
    /// Devices that the fastest links join: those of a host, or of an NVLink domain beyond it.
    pub neighbours: u32,
    /// Layers of the model, embedding and output layer included.
    pub n_layers: usize,
    /// A number that a tensor degree has to divide: the heads that all attentions have in common,
    /// 0 for a model without attention.
    pub heads: u64,
    /// Experts of the smallest mixture of experts, if there is one.
    pub n_experts: Option<u64>,
    /// Samples of a step.
    pub global_batch: u64,
    /// Tokens of a sample.
    pub sequence: u64,
}

impl Facts {
    /// Reads the facts from a forward graph with its layers, what is trained, and the cluster.
    pub fn of(forward: &Graph, train: &TrainSpec, cluster: &Cluster) -> Facts {
        let (mut heads, mut n_experts) = (0, None::<u64>);
        for op in forward.ops() {
            match op.kind {
                OpKind::Attention { .. } => {
                    let own = op.inputs.first().map_or(0, |q| n_heads(forward, *q));
                    heads = common_divisor(heads, own);
                }
                OpKind::Dispatch { experts, .. } => {
                    n_experts = Some(n_experts.map_or(experts, |n| n.min(experts)));
                }
                _ => {}
            }
        }
        let joined = cluster.levels.first().map_or(1, |level| level.devices);
        Facts {
            n_devices: cluster.n_devices(),
            neighbours: joined.max(cluster.devices_per_host),
            n_layers: forward.layers.len(),
            heads,
            n_experts,
            global_batch: train.global_batch,
            sequence: train.sequence,
        }
    }
}

/// Heads of the queries `[batch, sequence, heads.., size]`.
fn n_heads(graph: &Graph, queries: ir::ValueId) -> u64 {
    let dims = &graph.ty(queries).shape.0;
    let heads = dims.get(2..dims.len().saturating_sub(1)).unwrap_or(&[]);
    let length = |dim: &Dim| match dim {
        Dim::Fixed(n) => *n,
        _ => 1,
    };
    heads.iter().map(length).product()
}

fn common_divisor(a: u64, b: u64) -> u64 {
    match b {
        0 => a,
        _ => common_divisor(b, a % b),
    }
}
