//! Interleaved 1F1B: every mesh has several stages, and its passes alternate between them
//! (Narayanan et al. 2021, section 2.2, figure 4).
//!
//! Stage `c p + i` of `p v` is chunk `c` of mesh `i` of `p`. Forwards go in rounds: `p`
//! microbatches through chunk 0, the same through chunk 1, and so on; backwards in the same
//! rounds from the last chunk to the first. After its warmup a mesh alternates forward and
//! backward. The pipeline fills with passes that are `v` times shorter, so that of `m`
//! microbatches it waits for `(p - 1) / v` instead of `p - 1`.
//!
//! ```text
//! mesh 0  0F0 0F1 1F0 1F1 0F2 1B0 0F3 1B1 1F2 0B0 1F3 0B1 1B2 1B3 0B2 0B3      warmup 4
//! mesh 1   .. 0F0 0F1 1F0 1B0 1F1 1B1 0F2 0B0 0F3 0B1 1F2 1B2 1F3 1B3 0B2 0B3  warmup 2
//! ```

use super::{ComputeSlot, SlotPass, slot};
use ir::plan::ScheduleKind;

pub(super) fn schedule(
    kind: ScheduleKind,
    mesh: usize,
    n_meshes: usize,
    m: u32,
) -> Vec<ComputeSlot> {
    let v = kind.virtual_stages().max(1);
    // With one chunk the rounds do not matter, and any number of microbatches will do.
    let group = if v == 1 { 1 } else { n_meshes as u64 };
    let total = u64::from(v) * u64::from(m);
    let warmup = kind.warmup(mesh, n_meshes, m);
    let nth = |k: u64, pass| {
        let round = group * u64::from(v);
        let nth_chunk = (k % round / group) as u32;
        let chunk = match pass {
            SlotPass::Forward => nth_chunk,
            SlotPass::Backward => v - 1 - nth_chunk,
        };
        slot(pass, chunk, (k / round * group + k % group) as u32)
    };
    let forward = |k| nth(k, SlotPass::Forward);
    let backward = |k| nth(k, SlotPass::Backward);
    let steady = (warmup..total).flat_map(|k| [forward(k), backward(k - warmup)]);
    (0..warmup)
        .map(forward)
        .chain(steady)
        .chain((total - warmup..total).map(backward))
        .collect()
}
