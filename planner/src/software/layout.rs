//! How the tensors of a decoder's blocks lie under other software: as pins, so that nothing of it
//! is left to a search.
//!
//! Matmuls that begin a half of a block are split by columns, those that end it by rows; norms and
//! residuals are whole on every tensor rank, or split along the sequence; experts lie over the
//! tensor ranks first, then over ranks that split samples. That is Megatron-LM's layout, and
//! torchtitan's.

use super::point::Point;
use ir::{Dim, Graph, OpKind};
use std::collections::BTreeMap;

/// The facts that pins of a layout depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    /// Blocks of the decoder, called `h.0`, `h.1`, ...
    pub blocks: u64,
    /// Experts of a mixture, if there is one.
    pub experts: Option<u64>,
    /// A number that a tensor degree has to divide: heads of queries in all attentions.
    pub heads: u64,
    /// Tables of tokens, of the embedding and of the output layer where it has its own, with the
    /// lengths of their dims: tokens first.
    tables: Vec<(String, Vec<u64>)>,
    /// Lengths of the dims of values by their names in a block, of the first block that has it.
    values: BTreeMap<String, Vec<u64>>,
}

impl Model {
    /// Reads a forward graph; none where it is no decoder of blocks between an embedding and an
    /// output layer.
    pub fn of(forward: &Graph) -> Option<Model> {
        let is_block = |name: &&String| block(&format!("{name}.x")).is_some();
        let blocks = forward.layers.iter().filter(is_block).count();
        if blocks == 0 || blocks + 2 != forward.layers.len() {
            return None;
        }
        let mut values: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        let (mut experts, mut heads) = (None::<u64>, 0);
        for op in forward.ops() {
            if let OpKind::Dispatch { experts: n, .. } = op.kind {
                experts = Some(experts.map_or(n, |e| e.min(n)));
            }
            let Some((name, output)) = block(&op.path).zip(op.outputs.first()) else {
                continue;
            };
            let lens = lens(forward, *output);
            values.entry(name.to_string()).or_insert(lens);
            // Operands `[B, S, heads.., width]` of attention, and of a scan over the sequence.
            let has_heads = matches!(
                op.kind,
                OpKind::Attention { .. } | OpKind::StateSpace { .. }
            );
            if let (true, Some(q)) = (has_heads, op.inputs.first()) {
                let dims = self::lens(forward, *q);
                let own: u64 = dims[2.min(dims.len())..dims.len().saturating_sub(1)]
                    .iter()
                    .product();
                heads = common_divisor(heads, own);
            }
        }
        if heads == 0 {
            return None;
        }
        let tables = TABLES.iter().filter_map(|path| {
            let op = forward.ops().iter().find(|op| op.path == *path)?;
            Some((path.to_string(), lens(forward, *op.outputs.first()?)))
        });
        Some(Model {
            tables: tables.collect(),
            blocks: blocks as u64,
            experts,
            heads,
            values,
        })
    }

    /// Whether the blocks have values of this name.
    pub fn has(&self, name: &str) -> bool {
        self.values.contains_key(name)
    }

    /// Names of the norms of a block.
    pub fn norms(&self) -> Vec<&'static str> {
        let names = ["ln_1", "ln_2", "norm_1", "norm_2", "norm"].into_iter();
        names.filter(|n| self.has(n)).collect()
    }

    /// The pins of the layout at a point.
    pub fn pins(&self, point: &Point) -> Vec<String> {
        let mut pins = self.experts_at(point);
        if point.tensor > 1 {
            pins.extend(self.residuals(point));
            pins.extend(self.columns(point));
            pins.extend(self.tables(point));
        }
        pins
    }

    /// Where the experts' matmuls have the experts, on the tensor ranks too where there are several;
    /// and without these, that tokens travel by all-to-alls, which a search may find dearer than
    /// to gather them.
    fn experts_at(&self, point: &Point) -> Vec<String> {
        if self.experts.is_none() || point.expert == 1 {
            return Vec::new();
        }
        let tokens = if point.context > 1 { "context" } else { "_" };
        let experts = match (point.tensor, point.experts_among_samples() > 1) {
            (1, _) if point.context > 1 => return Vec::new(),
            (1, _) => {
                let samples = point.samples();
                return vec![
                    format!("spec:h.*.moe.dispatch=[_,{samples},_,_]"),
                    format!("spec:h.*.moe.combine=[{samples},_,_]"),
                ];
            }
            (_, true) => "tensor+expert",
            (_, false) => "tensor",
        };
        let samples = point.samples_beside_experts();
        let of = |op| format!("spec:h.*.moe.{op}=[{experts},{samples},{tokens},_]");
        let ops = ["gate", "up", "down"].into_iter();
        ops.filter(|op| self.has(&format!("moe.{op}")))
            .map(of)
            .collect()
    }

    /// Values between the matmuls of a block: whole on every tensor rank, or with sequence
    /// parallelism split along the sequence, inside what the context axis splits off.
    fn residuals(&self, point: &Point) -> Vec<String> {
        let sequence = match (point.context > 1, point.sequence_parallel) {
            (false, false) => "_",
            (false, true) => "tensor",
            (true, false) => "context",
            (true, true) => "context+tensor",
        };
        // What a row-parallel matmul leaves is summed before its bias is added.
        let names = [
            "ln_1",
            "ln_2",
            "norm_1",
            "norm_2",
            "norm",
            "residual",
            "attn.out.add_bias",
            "mlp.proj.add_bias",
            "residual_1",
            "residual_2",
        ];
        let names = names.into_iter().filter(|n| self.has(n));
        let names = names.map(|n| format!("h.*.{n}"));
        // What crosses from layer to layer lies as the residuals do, whatever a link costs.
        let crossing = ["boundary.h.*.0", "grad.boundary.h.*.0.x"].map(String::from);
        names
            .chain(crossing)
            .map(|v| format!("spec:{v}=[{},{sequence},_]", point.samples()))
            .collect()
    }

    /// Tables of tokens are split by tokens, as they are used.
    fn tables(&self, point: &Point) -> Vec<String> {
        let tables = self.tables.iter();
        let data = u64::from(point.shards());
        tables
            .filter_map(|(path, lens)| table_pin(path, (point.zero, data), lens, point.is_plain()))
            .collect()
    }

    /// The matmuls that begin a gated block's two halves are split by columns, so that a tensor
    /// rank has some of the heads and of the hidden values. Left open, a search may prefer to split
    /// what they sum over.
    fn columns(&self, point: &Point) -> Vec<String> {
        let sequence = if point.context > 1 { "context" } else { "_" };
        let first = format!("{},{sequence},tensor", point.samples());
        let names = [
            "attn.q",
            "attn.k",
            "attn.v",
            "attn.q_up",
            "attn.k_up",
            "attn.v_up",
            "mlp.gate",
            "mlp.up",
            "mamba.x",
            "mamba.z",
            "mamba.b",
            "mamba.c",
            "mamba.dt",
            "moe.shared.gate",
            "moe.shared.up",
        ];
        let parts = ["", ".add_bias"];
        let mut pins = Vec::new();
        // Fewer heads of keys than ranks are copied, which is no splitting of a dim.
        let splits = |lens: &[u64]| {
            let n = lens.get(2);
            n.is_some_and(|n| n.is_multiple_of(u64::from(point.tensor)))
        };
        for (name, part) in names.iter().flat_map(|n| parts.map(|p| (n, p))) {
            let Some(lens) = self.values.get(&format!("{name}{part}")) else {
                continue;
            };
            if splits(lens) {
                let rest = ",_".repeat(lens.len().saturating_sub(3));
                pins.push(format!("spec:h.*.{name}{part}=[{first}{rest}]"));
            }
        }
        pins
    }
}

/// Parameters that are tables of tokens.
const TABLES: [&str; 2] = ["embed.wte.weight", "head.lm_head.weight"];

/// The pin of a table that is split by tokens over tensor ranks where it is used, at a ZeRO level
/// over so many data ranks; `lens` are its dims. At level 3 it is split over these along the width,
/// if they divide that and are the only ones (`is_plain`); else it is left open.
pub fn table_pin(
    path: &str,
    (zero, data): (u8, u64),
    lens: &[u64],
    is_plain: bool,
) -> Option<String> {
    let divides = lens.get(1).is_some_and(|n| n.is_multiple_of(data.max(1)));
    match zero {
        0..=2 => Some(format!("spec:prepare.{path}=[tensor,_]")),
        _ if is_plain && divides => Some(format!("spec:prepare.{path}=[tensor,data]")),
        _ => None,
    }
}

/// The name behind `h.N.`.
fn block(path: &str) -> Option<&str> {
    let (number, name) = path.strip_prefix("h.")?.split_once('.')?;
    number.bytes().all(|b| b.is_ascii_digit()).then_some(name)
}

/// Lengths of the dims of a value; samples count as 1.
fn lens(graph: &Graph, value: ir::ValueId) -> Vec<u64> {
    let dims = graph.ty(value).shape.0.iter();
    dims.map(|d| match d {
        Dim::Fixed(n) => *n,
        _ => 1,
    })
    .collect()
}

fn common_divisor(a: u64, b: u64) -> u64 {
    match b {
        0 => a,
        _ => common_divisor(b, a % b),
    }
}
