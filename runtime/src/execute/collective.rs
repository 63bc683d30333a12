//! The data movement of layout changes in local buffers: that of `ir::reshard`'s header.
//!
//! Collectives move rows of contiguous pieces, piece `j` for or from member `j`; packing and
//! unpacking cut parts of tensors into pieces and put them together. All of it is in local, padded
//! coordinates. With `L` the padded length of a piece along the dim that changes, piece `j`
//! stands at `j*L`; what lies past an operand's end reads as zero, what lies past a result's end
//! is cropped. Reductions combine the members in group
//! order, pairwise from the left, in f32, and round once.

use super::local::{Local, narrow, widen};
use crate::cpu::layout::copy_region;
use crate::error::RuntimeError;
use ir::collective::CollectiveKind;
use ir::reshard::Pieces;
use ir::{DType, Reduction};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// How pieces stand in a buffer: in `rows`, each with one piece part for every one of `n` members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rows {
    /// Number of rows.
    pub rows: usize,
    /// Pieces.
    pub n: usize,
}

impl Rows {
    /// One piece: all of the buffer.
    pub const ONE: Rows = Rows { rows: 1, n: 1 };

    /// Where the parts of piece `j` of a buffer of `len` bytes stand, in order.
    pub(crate) fn of(self, len: usize, j: usize) -> impl Iterator<Item = Range<usize>> {
        let part = len / (self.rows * self.n).max(1);
        (0..self.rows).map(move |row| {
            let start = (row * self.n + j) * part;
            start..start + part
        })
    }
}

/// Copies piece `i` of one buffer to piece `j` of another, byte after byte.
fn copy_piece(src: &[u8], (from, i): (Rows, usize), dst: &mut [u8], (to, j): (Rows, usize)) {
    let mut targets = to.of(dst.len(), j);
    let mut target = 0..0;
    for mut source in from.of(src.len(), i) {
        while !source.is_empty() {
            while target.is_empty() {
                match targets.next() {
                    Some(next) => target = next,
                    None => return,
                }
            }
            let n = source.len().min(target.len());
            dst[target.start..target.start + n]
                .copy_from_slice(&src[source.start..source.start + n]);
            (source.start, target.start) = (source.start + n, target.start + n);
        }
    }
}

/// Writes one member's result of a collective.
///
/// `members` are the operands in group order, all of the same size, cut into pieces by
/// `operand` where the collective cuts them; `result` is how it puts `out` together. `me` is
/// this member's place among them. Fails where the sizes are not those of the collective.
pub fn result(
    (kind, dtype): (CollectiveKind, DType),
    me: usize,
    (members, operand): (&[&[u8]], Rows),
    (out, result): (&mut [u8], Rows),
) -> Result<(), RuntimeError> {
    let (n, len) = (members.len(), members.first().map_or(0, |m| m.len()));
    let parts = |len: usize, r: Rows| len.is_multiple_of((r.rows * r.n).max(1));
    let fits = members.iter().all(|m| m.len() == len)
        && parts(len, operand)
        && parts(out.len(), result)
        && match kind {
            CollectiveKind::AllReduce(_) => out.len() == len,
            CollectiveKind::ReduceScatter(_) => out.len() * n == len && operand.n == n,
            CollectiveKind::AllGather => out.len() == len * n && result.n == n,
            CollectiveKind::AllToAll => out.len() == len && operand.n == n && result.n == n,
            CollectiveKind::Shift => out.len() == len,
        };
    if !fits {
        return Err(RuntimeError::Program(format!(
            "a {} of {n} operands of {len} bytes with a result of {} bytes",
            kind.name(),
            out.len()
        )));
    }
    match kind {
        CollectiveKind::AllReduce(reduce) => combine(reduce, dtype, members, out),
        CollectiveKind::ReduceScatter(reduce) => {
            let mut done = 0;
            for part in operand.of(len, me) {
                let mine: Vec<&[u8]> = members.iter().map(|m| &m[part.clone()]).collect();
                combine(reduce, dtype, &mine, &mut out[done..done + part.len()]);
                done += part.len();
            }
        }
        CollectiveKind::AllGather => {
            for (j, member) in members.iter().enumerate() {
                copy_piece(member, (Rows::ONE, 0), out, (result, j));
            }
        }
        CollectiveKind::Shift => out.copy_from_slice(members[(me + n - 1) % n.max(1)]),
        CollectiveKind::AllToAll => {
            for (j, member) in members.iter().enumerate() {
                copy_piece(member, (operand, me), out, (result, j));
            }
        }
    }
    Ok(())
}

/// Cuts a part into pieces, which stand one after the other in `out`.
///
/// # Panics
/// If the buffers do not have their shapes, which lowering guarantees.
pub fn pack(part: &Local, data: &[u8], pieces: Pieces, out: &mut [u8]) {
    let (dims, len) = (part.dims(), pieces.len as usize);
    let one = (out.len() / pieces.n.max(1) as usize).max(1);
    for (j, out) in out.chunks_exact_mut(one).enumerate() {
        cut_piece(part.dtype, (data, &dims), pieces.dim, j, len, out);
    }
}

/// Puts a part together from pieces that stand one after the other. What lies past the part's
/// end is cropped, padding is zeroed.
///
/// # Panics
/// As [`pack`].
pub fn unpack(data: &[u8], pieces: Pieces, part: &Local, out: &mut [u8]) {
    let dims = part.dims();
    let mut piece = dims.clone();
    piece[pieces.dim] = pieces.len as usize;
    let one = (data.len() / pieces.n.max(1) as usize).max(1);
    for (j, data) in data.chunks_exact(one).enumerate() {
        place_piece(part.dtype, data, &piece, pieces.dim, j, out, &dims);
    }
    part.zero_padding(out);
}

/// Writes the result of a `Slice` step along `dim` for the rank at `coordinate` of its axis.
///
/// # Panics
/// As [`pack`].
pub fn slice(
    dim: usize,
    coordinate: usize,
    input: &Local,
    operand: &[u8],
    output: &Local,
    out: &mut [u8],
) {
    let len = output.dims()[dim];
    cut_piece(
        output.dtype,
        (operand, &input.dims()),
        dim,
        coordinate,
        len,
        out,
    );
    output.zero_padding(out);
}

/// Combines equal-sized buffers in order, in f32, rounding once.
///
/// # Panics
/// If there are no members, or their sizes differ.
pub fn combine(kind: Reduction, dtype: DType, members: &[&[u8]], out: &mut [u8]) {
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
fn combine_f32(kind: Reduction, members: &[&[f32]], out: &mut [f32]) {
    for (i, total) in out.chunks_mut(COMBINED_AT_ONCE).enumerate() {
        let at = i * COMBINED_AT_ONCE..i * COMBINED_AT_ONCE + total.len();
        total.copy_from_slice(&members[0][at.clone()]);
        for member in &members[1..] {
            add(kind, total, &member[at.clone()]);
        }
    }
}

fn add(kind: Reduction, total: &mut [f32], member: &[f32]) {
    assert_eq!(total.len(), member.len(), "members bring equal buffers");
    for (a, &b) in total.iter_mut().zip(member) {
        *a = combined(kind, *a, b);
    }
}

fn combined(kind: Reduction, a: f32, b: f32) -> f32 {
    match kind {
        Reduction::Sum => a + b,
        // A comparison with NaN is false: NaN must win, as in the kernels.
        Reduction::Max => {
            if a >= b || a.is_nan() {
                a
            } else {
                b
            }
        }
        Reduction::Min => {
            if a <= b || a.is_nan() {
                a
            } else {
                b
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

/// Copies piece `index` of `len` elements along `dim` to `out`, zeros past the operand's end.
fn cut_piece(
    dtype: DType,
    (src, dims): (&[u8], &[usize]),
    dim: usize,
    index: usize,
    len: usize,
    out: &mut [u8],
) {
    let mut to = dims.to_vec();
    to[dim] = len;
    let start = (index * len).min(dims[dim]);
    let mut extent = to.clone();
    extent[dim] = len.min(dims[dim] - start);
    if extent[dim] < len {
        out.fill(0);
    }
    let mut src_start = vec![0; dims.len()];
    src_start[dim] = start;
    let zeros = vec![0; dims.len()];
    copy_block(dtype, (src, dims, &src_start), (out, &to, &zeros), &extent);
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
        assert_eq!(run(Reduction::Sum), [2.0, 2e8]);
        assert_eq!(run(Reduction::Max), [3.0, 2e8]);
        assert_eq!(run(Reduction::Min), [-2.0, 1.0]);
        assert!(combined(Reduction::Max, 1.0, f32::NAN).is_nan());
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
            Reduction::Sum,
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
