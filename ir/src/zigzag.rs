//! A model whose sequences are stored in [zigzag order](SequenceOrder), so that a context axis
//! gives all its ranks the same work.
//!
//! The rewritten graph computes the same loss: tokens and labels are put in the other order at
//! the entrance, tables of positions before they are added, and the ops that ask where a token
//! stands (attention, rotary embeddings, masks of dropout) are told. Every other op treats all positions alike,
//! or the graph is refused. Nothing is moved back: the loss is a sum over the tokens.

use crate::graph::Place;
use crate::op::{OpKind, SequenceOrder};
use crate::{Dim, Graph, GraphError, Op, TensorType, ValueId};

/// Why a graph has no zigzag order.
#[derive(Debug, thiserror::Error)]
pub enum ZigzagError {
    /// The sequence of an input is not a multiple of the chunks.
    #[error("a sequence of {len} tokens does not divide into {chunks} equal chunks")]
    Chunks {
        /// Tokens of the sequence.
        len: u64,
        /// Chunks to cut it into.
        chunks: u64,
    },
    /// An op mixes positions in a way of its own.
    #[error("`{path}` ({op}) does not treat all tokens of a sequence alike")]
    Mixes {
        /// Path of the op.
        path: String,
        /// Its kind.
        op: &'static str,
    },
    /// The rewritten graph is not well-formed.
    #[error(transparent)]
    Graph(#[from] GraphError),
}

/// A copy of the forward graph with sequences stored for `ranks` context ranks. Paths stay;
/// reordered values are made by ops `<path>.zigzag.*`.
///
/// Fails where a sequence does not divide into `2 * ranks` chunks, or an op works along it that
/// is not known to treat positions alike (attention written out as matmuls, slices).
pub fn zigzag(forward: &Graph, ranks: u64) -> Result<Graph, ZigzagError> {
    let mut pass = Pass {
        order: SequenceOrder::Zigzag { ranks },
        out: Graph::new(forward.name.clone()),
        map: Vec::with_capacity(forward.values().len()),
    };
    pass.out.layers = forward.layers.clone();
    for op in forward.ops() {
        pass.add(forward, op)?;
    }
    pass.out.outputs = forward
        .outputs
        .iter()
        .map(|v| pass.map[v.index()])
        .collect();
    Ok(pass.out)
}

struct Pass {
    order: SequenceOrder,
    out: Graph,
    /// The new value of every old one.
    map: Vec<ValueId>,
}

impl Pass {
    fn add(&mut self, forward: &Graph, op: &Op) -> Result<(), ZigzagError> {
        let place = place(op);
        let mut inputs: Vec<ValueId> = op.inputs.iter().map(|v| self.map[v.index()]).collect();
        let operands: Vec<&TensorType> = op.inputs.iter().map(|&v| forward.ty(v)).collect();
        if op.kind.is_source() {
            let ty = forward.ty(op.outputs[0]).clone();
            let v = self.out.add_source(op.kind.clone(), ty.clone(), place)?;
            let reordered = match &op.kind {
                OpKind::Input { .. } => self.reorder(v, &ty, 1, op)?,
                _ => v,
            };
            self.map.push(reordered);
            return Ok(());
        }
        let mut kind = op.kind.clone();
        match &mut kind {
            OpKind::Attention { order, .. }
            | OpKind::Rotary { order, .. }
            | OpKind::Dropout { order, .. } => *order = self.order,
            OpKind::Binary { .. } if is_table(&operands) => {
                inputs[1] = self.reorder(inputs[1], operands[1], 0, op)?;
            }
            _ if treats_alike(&op.kind, &operands) => {}
            _ => {
                return Err(ZigzagError::Mixes {
                    path: op.path.clone(),
                    op: op.kind.name(),
                });
            }
        }
        self.map.extend(self.out.add(kind, &inputs, place)?);
        Ok(())
    }

    /// `v` with its dim `dim` in the stored order: cut into chunks, which are put together
    /// again in another order.
    fn reorder(
        &mut self,
        v: ValueId,
        ty: &TensorType,
        dim: usize,
        op: &Op,
    ) -> Result<ValueId, ZigzagError> {
        let Some(&Dim::Fixed(len)) = ty.shape.0.get(dim) else {
            return Ok(v);
        };
        // Before the chunks are listed: nobody could hold a list of any number of them.
        if !self.order.fits(len) {
            return Err(ZigzagError::Chunks {
                len,
                chunks: self.order.n_chunks(),
            });
        }
        let chunks = self.order.chunks();
        let n = chunks.len() as u64;
        let whole = ty.shape.0.clone();
        let mut cut = whole.clone();
        cut.splice(dim..=dim, [Dim::Fixed(n), Dim::Fixed(len / n)]);
        let at = |what: &str| Place {
            path: format!("{}.zigzag.{what}", op.path),
            pass: crate::Pass::F,
            region: crate::Region::Microbatch,
            layer: op.layer,
        };
        let out = &mut self.out;
        let cut = out.add(OpKind::Reshape { shape: cut }, &[v], at("cut"))?;
        let parts = out.add(OpKind::Unstack { dim }, &cut, at("chunks"))?;
        let stored: Vec<ValueId> = chunks.iter().map(|&c| parts[c as usize]).collect();
        let stacked = out.add(OpKind::Stack { dim }, &stored, at("stored"))?;
        let joined = out.add(OpKind::Reshape { shape: whole }, &stacked, at("joined"))?;
        Ok(joined[0])
    }
}

fn place(op: &Op) -> Place {
    Place {
        path: op.path.clone(),
        pass: op.pass,
        region: op.region,
        layer: op.layer,
    }
}

fn has_batch(ty: &TensorType) -> bool {
    ty.shape.0.first() == Some(&Dim::Batch)
}

/// A second operand without samples that has an entry for every position: a table of positions.
fn is_table(operands: &[&TensorType]) -> bool {
    matches!(operands, [x, table] if has_batch(x) && !has_batch(table)
        && table.shape.0.len() + 1 == x.shape.0.len())
}

/// Whether an op leaves the sequence (dim 1 of what has samples) as it is and does to every
/// position the same.
fn treats_alike(kind: &OpKind, operands: &[&TensorType]) -> bool {
    let batched = operands.iter().filter(|t| has_batch(t)).count();
    if batched == 0 {
        // A table of positions for every sample is no longer found where it is added.
        let per_sample = |leading: &[Dim]| leading == [Dim::Batch];
        let table = operands.iter().any(|t| !t.shape.0.is_empty());
        return !(table && matches!(kind, OpKind::Broadcast { leading } if per_sample(leading)));
    }
    match kind {
        OpKind::Layout
        | OpKind::Cast { .. }
        | OpKind::Unary { .. }
        | OpKind::Embedding
        | OpKind::LayerNorm { .. }
        | OpKind::RmsNorm { .. }
        | OpKind::LogSumExp
        | OpKind::CrossEntropy => true,
        // One vector for all positions, or two activations.
        OpKind::Binary { .. } => {
            batched == 2 || operands[1].shape.0.len() + 2 <= operands[0].shape.0.len()
        }
        // Rows are positions, or parts of them.
        OpKind::ScaleRows => batched == 2 && operands[1].shape.0.len() > 1,
        OpKind::Join => batched == 2 && operands[0].shape.0.len() > 2,
        OpKind::Reduce { dims, .. } => {
            dims.contains(&0) == dims.contains(&1) && operands[0].shape.0.len() > 1
        }
        OpKind::Reshape { shape } => shape.get(..2) == operands[0].shape.0.get(..2),
        OpKind::Transpose { perm } => perm.get(..2) == Some(&[0, 1]),
        OpKind::Slice { dim, .. }
        | OpKind::Pad { dim, .. }
        | OpKind::Unstack { dim }
        | OpKind::Stack { dim } => *dim > 1,
        OpKind::DotGeneral { einsum } => {
            let of = match has_batch(operands[0]) {
                true => &einsum.lhs,
                false => &einsum.rhs,
            };
            batched == 1 && of.len() > 1 && einsum.out.get(..2) == of.get(..2)
        }
        _ => false,
    }
}
