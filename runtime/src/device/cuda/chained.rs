//! Chains as calls of the library, or of one kernel.

use super::Cuda;
use super::args::{Product, Step};
use super::ops::{self, Op, Part};
use crate::device::{Chain, Work};
use crate::error::RuntimeError;
use ir::{OpKind, StreamId};

/// Whether a chain begins with a product of matrices.
pub(super) fn has_product(ops: &[Op<'_>]) -> bool {
    matches!(ops.first(), Some(op) if matches!(op.kind, OpKind::DotGeneral { .. }))
}

/// The first few ops that are products by the library, as many as can be, and these products; the
/// next fewer ones after that. All that can be tried, best first.
pub(super) fn ways<'a>(
    ops: &'a [Op<'a>],
    kept: &'a [bool],
) -> impl Iterator<Item = (usize, Vec<Product>)> + 'a {
    let all = (2..=ops.len()).rev();
    all.filter_map(|n| Some((n, ops::fused(&ops[..n], kept)?)))
}

/// These steps, and those that make the padding of what the ops write zeros.
pub(super) fn with_pads(mut steps: Vec<Step>, of: &[Op<'_>], kept: &[bool]) -> Vec<Step> {
    for (i, op) in of.iter().enumerate() {
        let is_written = i + 1 == of.len() || kept.get(i) == Some(&true);
        let written = op.y.iter().filter(|_| is_written);
        steps.extend(written.filter_map(|y| ops::pad(*y)));
    }
    steps
}

impl Cuda {
    /// Puts the first works of a chain on a stream as one, and says how many these are: 0 where there
    /// is nothing for them. Unless these are all, nothing is cleared.
    pub(super) fn launch_fused(
        &mut self,
        stream: StreamId,
        chain: &Chain<'_>,
    ) -> Result<usize, RuntimeError> {
        let mut parts: Vec<[Vec<Part<'_>>; 2]> = Vec::with_capacity(chain.works.len());
        for work in chain.works {
            let Work::Compute {
                inputs, outputs, ..
            } = work
            else {
                return Ok(0);
            };
            parts.push([self.parts(inputs)?, self.parts(outputs)?]);
        }
        let mut all = Vec::with_capacity(parts.len());
        for (work, [x, y]) in chain.works.iter().zip(&parts) {
            let Work::Compute {
                path, op, context, ..
            } = *work
            else {
                return Ok(0);
            };
            let op = Op {
                kind: op,
                path,
                x,
                y,
                context,
                scratch: 0,
                has_library: self.products.is_some(),
                shared: self.gpu.shared,
            };
            op.check()?;
            all.push(op);
        }
        if !has_product(&all) {
            let Some(kernel) = ops::one_kernel(&all, chain.kept) else {
                return Ok(0);
            };
            self.run(stream, &with_pads(vec![kernel], &all, chain.kept))?;
            return Ok(all.len());
        }
        for (n, mut products) in ways(&all, chain.kept) {
            if chain.is_cleared && n == all.len() {
                products.iter_mut().for_each(|p| p.c = None);
            }
            let steps: Vec<Step> = products.into_iter().map(Step::Product).collect();
            if !self.can_multiply(stream, &steps)? {
                continue;
            }
            self.run(stream, &with_pads(steps, &all[..n], chain.kept))?;
            return Ok(n);
        }
        Ok(0)
    }
}
