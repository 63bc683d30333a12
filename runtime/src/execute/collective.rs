//! The data movement of layout changes in local buffers: that of `ir::reshard`'s header.
//!
//! Everything is in local, padded coordinates. With `L` the padded length of a piece along
//! the dim that changes, piece `j` stands at `j*L`; what lies past an operand's end reads as
//! zero, what lies past a result's end is cropped. Reductions combine the members in group
//! order, pairwise from the left, in f32, and round once.

use super::local::{Local, narrow, widen};
use crate::cpu::layout::copy_region;
use ir::collective::CollectiveKind;
use ir::reshard::LayoutStep;
use ir::{DType, ReduceKind};
use std::ops::Range;

/// Writes one member's result of a collective step.
///
/// `members` are the operands in group order, all of shape `input.dims()`; `me` is this
/// member's place among them. Padding of the result is zeroed.
///
/// # Panics
/// If the buffers do not have their shapes, which lowering guarantees.
pub fn result(
    kind: CollectiveKind,
    step: &LayoutStep,
    me: usize,
    input: &Local,
    members: &[&[u8]],
    output: &Local,
    out: &mut [u8],
) {
    let (from, to) = (input.dims(), output.dims());
    match (kind, step) {
        (CollectiveKind::AllReduce(reduce), _) => combine(reduce, output.dtype, members, out),
        (CollectiveKind::ReduceScatter(reduce), LayoutStep::ReduceScatter { dim, .. }) => {
            if output.dtype == DType::F32 && (me + 1) * to[*dim] <= from[*dim] {
                let runs = Runs::new(&from, *dim, me, to[*dim]);
                runs.combine(reduce, members, bytemuck::cast_slice_mut(out));
            } else {
                let pieces: Vec<Vec<u64>> = members
                    .iter()
                    .map(|m| cut_piece(output.dtype, m, &from, *dim, me, to[*dim]))
                    .collect();
                let pieces: Vec<&[u8]> = pieces
                    .iter()
                    .map(|p| &bytemuck::cast_slice(p)[..out.len()])
                    .collect();
                combine(reduce, output.dtype, &pieces, out);
            }
        }
        (CollectiveKind::AllGather, LayoutStep::AllGather { dim, .. }) => {
            if members.len() * from[*dim] < to[*dim] {
                out.fill(0);
            }
            for (j, member) in members.iter().enumerate() {
                place_piece(output.dtype, member, &from, *dim, j, out, &to);
            }
        }
        (
            CollectiveKind::AllToAll,
            LayoutStep::AllToAll {
                from: gathered,
                to: split,
                ..
            },
        ) => {
            out.fill(0);
            let mut piece_dims = from.clone();
            piece_dims[*split] = to[*split];
            let n = piece_dims.iter().product::<usize>() * output.dtype.bytes() as usize;
            for (j, member) in members.iter().enumerate() {
                let piece = cut_piece(output.dtype, member, &from, *split, me, to[*split]);
                place_piece(
                    output.dtype,
                    &bytemuck::cast_slice(&piece)[..n],
                    &piece_dims,
                    *gathered,
                    j,
                    out,
                    &to,
                );
            }
        }
        (kind, step) => panic!("a {} cannot do {step:?}", kind.name()),
    }
    output.zero_padding(out);
}

/// Writes the result of a `Slice` step along `dim` for the rank at `coordinate` of its axis.
///
/// # Panics
/// As [`result`].
pub fn slice(
    dim: usize,
    coordinate: usize,
    input: &Local,
    operand: &[u8],
    output: &Local,
    out: &mut [u8],
) {
    let to = output.dims();
    let piece = cut_piece(
        output.dtype,
        operand,
        &input.dims(),
        dim,
        coordinate,
        to[dim],
    );
    out.copy_from_slice(&bytemuck::cast_slice(&piece)[..out.len()]);
    output.zero_padding(out);
}

/// Combines equal-sized buffers in order, in f32, rounding once.
///
/// # Panics
/// If there are no members, or their sizes differ.
pub fn combine(kind: ReduceKind, dtype: DType, members: &[&[u8]], out: &mut [u8]) {
    if dtype == DType::F32 {
        let members: Vec<&[f32]> = members.iter().map(|m| bytemuck::cast_slice(m)).collect();
        return combine_f32(kind, &members, bytemuck::cast_slice_mut(out));
    }
    let mut total = widen(dtype, members[0]).into_owned();
    for member in &members[1..] {
        add(kind, &mut total, &widen(dtype, member));
    }
    narrow(dtype, &total, out);
}

/// Elements that are combined at a time: what is added up stays in the first cache.
const COMBINED_AT_ONCE: usize = 2048;

/// [`combine`] where nothing is converted, and so nothing allocated.
fn combine_f32(kind: ReduceKind, members: &[&[f32]], out: &mut [f32]) {
    for (i, total) in out.chunks_mut(COMBINED_AT_ONCE).enumerate() {
        let at = i * COMBINED_AT_ONCE..i * COMBINED_AT_ONCE + total.len();
        total.copy_from_slice(&members[0][at.clone()]);
        for member in &members[1..] {
            add(kind, total, &member[at.clone()]);
        }
    }
}

fn add(kind: ReduceKind, total: &mut [f32], member: &[f32]) {
    assert_eq!(total.len(), member.len(), "members bring equal buffers");
    for (a, &b) in total.iter_mut().zip(member) {
        *a = combined(kind, *a, b);
    }
}

/// A piece of a row-major tensor along one dim: runs of consecutive elements.
struct Runs {
    /// Number of runs.
    n: usize,
    /// Elements of a run.
    len: usize,
    /// Elements from the start of one run to that of the next.
    stride: usize,
    /// First element.
    start: usize,
}

impl Runs {
    /// Piece `index` of `len` elements along `dim`, which must not reach beyond the tensor.
    fn new(dims: &[usize], dim: usize, index: usize, len: usize) -> Self {
        let inner: usize = dims[dim + 1..].iter().product();
        Runs {
            n: dims[..dim].iter().product(),
            len: len * inner,
            stride: dims[dim] * inner,
            start: index * len * inner,
        }
    }

    /// Combines the members' pieces in order.
    fn combine(&self, kind: ReduceKind, members: &[&[u8]], out: &mut [f32]) {
        if self.len == 0 {
            return;
        }
        let members: Vec<&[f32]> = members.iter().map(|m| bytemuck::cast_slice(m)).collect();
        for (i, out) in out.chunks_exact_mut(self.len).take(self.n).enumerate() {
            let at = self.start + i * self.stride;
            let runs: Vec<&[f32]> = members.iter().map(|m| &m[at..at + self.len]).collect();
            combine_f32(kind, &runs, out);
        }
    }
}

fn combined(kind: ReduceKind, a: f32, b: f32) -> f32 {
    match kind {
        ReduceKind::Sum => a + b,
        // A comparison with NaN is false: NaN must win, as in the kernels.
        ReduceKind::Max => {
            if a >= b || a.is_nan() {
                a
            } else {
                b
            }
        }
        ReduceKind::Min => {
            if a <= b || a.is_nan() {
                a
            } else {
                b
            }
        }
        ReduceKind::LogSumExp => {
            let (high, low) = if a >= b { (a, b) } else { (b, a) };
            if low == f32::NEG_INFINITY {
                high
            } else {
                high + (low - high).exp().ln_1p()
            }
        }
    }
}

/// The elements that member `index` of `n` reduces in a two-phase all-reduce of `elements`:
/// equal runs of a multiple of four elements (so 8-aligned), the last ones shorter.
pub fn chunk(elements: usize, index: usize, n: usize) -> Range<usize> {
    let len = elements.div_ceil(n).next_multiple_of(4);
    (index * len).min(elements)..((index + 1) * len).min(elements)
}

/// Piece `index` of `len` elements along `dim`, zeros past the operand's end, 8-aligned.
fn cut_piece(
    dtype: DType,
    src: &[u8],
    dims: &[usize],
    dim: usize,
    index: usize,
    len: usize,
) -> Vec<u64> {
    let mut to = dims.to_vec();
    to[dim] = len;
    let n_bytes = to.iter().product::<usize>() * dtype.bytes() as usize;
    let mut out = vec![0u64; n_bytes.div_ceil(8)];
    let start = (index * len).min(dims[dim]);
    let mut extent = to.clone();
    extent[dim] = len.min(dims[dim] - start);
    let mut src_start = vec![0; dims.len()];
    src_start[dim] = start;
    let zeros = vec![0; dims.len()];
    let bytes = &mut bytemuck::cast_slice_mut(&mut out)[..n_bytes];
    copy_block(
        dtype,
        (src, dims, &src_start),
        (bytes, &to, &zeros),
        &extent,
    );
    out
}

/// Puts `piece` at `index` times its length along `dim`, cropping what exceeds `out`.
fn place_piece(
    dtype: DType,
    piece: &[u8],
    dims: &[usize],
    dim: usize,
    index: usize,
    out: &mut [u8],
    out_dims: &[usize],
) {
    let start = (index * dims[dim]).min(out_dims[dim]);
    let mut extent = dims.to_vec();
    extent[dim] = dims[dim].min(out_dims[dim] - start);
    let mut out_start = vec![0; dims.len()];
    out_start[dim] = start;
    let zeros = vec![0; dims.len()];
    copy_block(
        dtype,
        (piece, dims, &zeros),
        (out, out_dims, &out_start),
        &extent,
    );
}

/// [`copy_region`] on elements of any type: `(bytes, dims, start)` of both sides.
pub fn copy_block(
    dtype: DType,
    src: (&[u8], &[usize], &[usize]),
    dst: (&mut [u8], &[usize], &[usize]),
    extent: &[usize],
) {
    match dtype.bytes() {
        4 => copy_region::<u32>(
            bytemuck::cast_slice(src.0),
            src.1,
            src.2,
            bytemuck::cast_slice_mut(dst.0),
            dst.1,
            dst.2,
            extent,
        ),
        2 => copy_region::<u16>(
            bytemuck::cast_slice(src.0),
            src.1,
            src.2,
            bytemuck::cast_slice_mut(dst.0),
            dst.1,
            dst.2,
            extent,
        ),
        _ => copy_region::<u8>(src.0, src.1, src.2, dst.0, dst.1, dst.2, extent),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reductions_go_from_the_left_in_f32() {
        let members: Vec<Vec<f32>> = vec![vec![1.0, 2e8], vec![3.0, 1.0], vec![-2.0, 1.0]];
        let run = |kind| {
            let members: Vec<&[u8]> = members.iter().map(|m| bytemuck::cast_slice(m)).collect();
            let mut out = [0.0f32; 2];
            combine(
                kind,
                DType::F32,
                &members,
                bytemuck::cast_slice_mut(&mut out),
            );
            out
        };
        assert_eq!(run(ReduceKind::Sum), [2.0, 2e8]);
        assert_eq!(run(ReduceKind::Max), [3.0, 2e8]);
        assert_eq!(run(ReduceKind::Min), [-2.0, 1.0]);
        let expected = (1f64.exp() + 3f64.exp() + (-2f64).exp()).ln();
        assert!((f64::from(run(ReduceKind::LogSumExp)[0]) - expected).abs() < 1e-6);
    }

    #[test]
    fn a_log_sum_exp_of_nothing_is_minus_infinity() {
        assert_eq!(
            combined(ReduceKind::LogSumExp, f32::NEG_INFINITY, f32::NEG_INFINITY),
            f32::NEG_INFINITY
        );
        assert_eq!(combined(ReduceKind::LogSumExp, f32::NEG_INFINITY, 2.0), 2.0);
        assert!(combined(ReduceKind::LogSumExp, f32::NAN, 2.0).is_nan());
        assert!(combined(ReduceKind::LogSumExp, 2.0, f32::NAN).is_nan());
        assert!(combined(ReduceKind::Max, 1.0, f32::NAN).is_nan());
    }

    #[test]
    fn halves_are_rounded_once() {
        // 256 + 1 rounds to 256 in bf16; 256 + 1 + 1 = 258 is a bf16 number.
        let member = |v: f32| half::bf16::from_f32(v).to_bits().to_le_bytes();
        let members = [member(256.0), member(1.0), member(1.0)];
        let refs: Vec<&[u8]> = members.iter().map(|m| &m[..]).collect();
        // The byte arrays may lie anywhere; words are aligned.
        let words: Vec<Vec<u64>> = refs
            .iter()
            .map(|m| vec![u64::from(u16::from_le_bytes([m[0], m[1]]))])
            .collect();
        let aligned: Vec<&[u8]> = words
            .iter()
            .map(|w| &bytemuck::cast_slice(w)[..2])
            .collect();
        let mut out = [0u64];
        combine(
            ReduceKind::Sum,
            DType::Bf16,
            &aligned,
            &mut bytemuck::cast_slice_mut(&mut out)[..2],
        );
        assert_eq!(half::bf16::from_bits(out[0] as u16).to_f32(), 258.0);
    }

    #[test]
    fn chunks_cover_everything_once() {
        for elements in [0, 1, 5, 16, 17, 1000] {
            for n in 1..6 {
                let chunks: Vec<usize> = (0..n).flat_map(|i| chunk(elements, i, n)).collect();
                assert_eq!(chunks, (0..elements).collect::<Vec<_>>());
            }
        }
    }
}
