//! Attention and its gradient, of all keys or of a shard that has gone around a ring.

use super::super::args::{ATTENTION, Call, Step};
use super::{Op, Steps, chunks};
use crate::error::RuntimeError;
use ir::OpKind;

/// Warps of a block, each with a row.
const WARPS: usize = 4;
/// Longest head.
const MOST_DIM: usize = 256;

impl Op<'_> {
    /// A call with a warp per row.
    fn each_warp(&self, kernel: &'static str, rows: usize) -> Result<Call, RuntimeError> {
        let (OpKind::Attention {
            scale,
            dropout,
            key,
            order,
            keys,
        }
        | OpKind::AttentionGrad {
            scale,
            dropout,
            key,
            order,
            keys,
        }) = self.kind
        else {
            return Err(self.error("is no attention"));
        };
        self.floats(&(0..self.x.len()).collect::<Vec<_>>())?;
        let (q, k) = (self.x[0].local, self.x[1].local);
        let (ql, kl) = (&q.ranges, &k.ranges);
        let dim = self.x[0].width();
        if !matches!(ql.len(), 4 | 5) || kl.len() != 4 || dim > MOST_DIM {
            return Err(self.error(format!(
                "queries of {:?} and keys of {:?}: heads have at most {MOST_DIM} elements",
                q.dims(),
                k.dims()
            )));
        }
        let grouped = ql.len() == 5;
        let groups = if grouped { ql[3].padded } else { 1 };
        let [chunk, ranks] = chunks(*order, q.lens[1]);
        let sizes = [
            ql[0].padded,
            ql[1].padded,
            kl[2].padded,
            groups,
            dim as u64,
            kl[1].padded,
            ql[1].valid,
            kl[1].valid,
            ql[1].start,
            kl[1].start,
        ];
        let has_mask = self.context.training && *dropout > 0.0;
        let mask = [
            u64::from(has_mask),
            self.context.first_sample + ql[0].start,
            ql[2].start,
            if grouped { ql[3].start } else { 0 },
            q.lens[1],
            q.lens[2],
            if grouped { q.lens[3] } else { 1 },
            k.lens[1],
        ];
        // A model's op that nothing trains has no key.
        let path = if key.is_empty() { self.path } else { key };
        let mut call = Call::blocks(ATTENTION, kernel, rows.div_ceil(WARPS), 32 * WARPS as u32)
            .n(0, &sizes.map(|n| n as i64))
            .n(10, &[chunk, ranks, i64::from(keys.continues())])
            .n(13, &mask.map(|n| n as i64))
            .n(21, &self.key(path))
            .f(&[*scale, *dropout, 1.0 / (1.0 - *dropout)]);
        for (i, x) in self.x.iter().enumerate() {
            call = call.x(i, x.typed());
        }
        for (i, y) in self.y.iter().enumerate() {
            call = call.y(i, y.typed());
        }
        Ok(call)
    }

    pub(super) fn attention(&self) -> Steps {
        let rows = self.y[1].elements();
        Ok(vec![Step::Call(self.each_warp("attention", rows)?)])
    }

    pub(super) fn attention_grad(&self) -> Steps {
        let keys = self.x[1].elements() / self.x[0].width().max(1);
        Ok(vec![
            Step::Call(self.each_warp("attention_grad_q", self.x[4].elements())?),
            Step::Call(self.each_warp("attention_grad_kv", keys)?),
        ])
    }
}
