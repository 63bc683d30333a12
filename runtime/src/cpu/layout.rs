//! Moving elements: reductions over dims, broadcast, transpose, slices, stacks, blocks.
//!
//! All tensors are contiguous and row-major; `dims` lists the length of each dim, major first,
//! and is empty for a scalar. Everything but the reductions moves elements unchanged, so those
//! kernels are generic over the element type. Every kernel writes the whole of `out` unless it
//! says otherwise. Shapes that do not fit the slices are the caller's mistake and panic.
//!
//! A tensor seen along one dim is `[outer, length, inner]`, and most kernels here are loops over
//! that view; only transposes and blocks need all dims.

use super::summation;
use super::wide::widest;

/// Sums over the dims in `reduced` (ascending), which disappear: `(x[dims]) -> out`.
///
/// A sum is taken in `f64` and rounded once. Over no elements it is zero.
///
/// # Panics
/// If `reduced` is not ascending or names no dim, or the slices do not have these shapes.
pub fn reduce_sum(x: &[f32], dims: &[usize], reduced: &[usize], out: &mut [f32]) {
    let mut acc = vec![0.0f64; out.len()];
    for_each_run(x, dims, reduced, out.len(), |run, at| {
        widest(
            #[inline(always)]
            || match run {
                Run::Reduced(run) => acc[at] += summation::sum(run),
                Run::Kept(run) => summation::add_to(&mut acc[at..at + run.len()], run),
            },
        );
    });
    summation::round_to(&acc, out);
}

/// Maximum over the dims in `reduced` (ascending), which disappear: `(x[dims]) -> out`.
///
/// Over no elements it is negative infinity; NaN if any element is.
///
/// # Panics
/// As [`reduce_sum`].
pub fn reduce_max(x: &[f32], dims: &[usize], reduced: &[usize], out: &mut [f32]) {
    out.fill(f32::NEG_INFINITY);
    for_each_run(x, dims, reduced, out.len(), |run, at| match run {
        Run::Reduced(run) => out[at] = run.iter().fold(out[at], |a, &b| max(a, b)),
        Run::Kept(run) => {
            for (out, &v) in out[at..].iter_mut().zip(run) {
                *out = max(*out, v);
            }
        }
    });
}

/// `n_copies` copies of `x`, one after the other: new leading dims of that many elements.
///
/// # Panics
/// If `out` does not hold `n_copies * x.len()` elements.
pub fn broadcast_leading<T: Copy>(x: &[T], n_copies: usize, out: &mut [T]) {
    assert_eq!(out.len(), n_copies * x.len(), "result holds all copies");
    if !x.is_empty() {
        out.chunks_exact_mut(x.len())
            .for_each(|copy| copy.copy_from_slice(x));
    }
}

/// Elements `start..start + len` along `dim`: `(x[dims]) -> out`.
///
/// # Panics
/// If the range or the slices do not fit `dims`.
pub fn slice<T: Copy>(
    x: &[T],
    dims: &[usize],
    dim: usize,
    start: usize,
    len: usize,
    out: &mut [T],
) {
    let Along {
        outer,
        length,
        inner,
    } = Along::of(dims, dim);
    assert!(
        start + len <= length,
        "{start}..{} lies within {length}",
        start + len
    );
    assert_eq!(
        x.len(),
        outer * length * inner,
        "operand has shape {dims:?}"
    );
    assert_eq!(out.len(), outer * len * inner, "result holds the slice");
    if out.is_empty() {
        return;
    }
    for (row, out) in x
        .chunks_exact(length * inner)
        .zip(out.chunks_exact_mut(len * inner))
    {
        out.copy_from_slice(&row[start * inner..][..len * inner]);
    }
}

/// Rows of `n` elements in front of rows of `m`: `(x[.., n], y[.., m]) -> out[.., n + m]`, where
/// `x` has as many rows as `y` or fewer, each for as many rows of `y` that follow each other.
///
/// # Panics
/// If the slices do not fit.
pub fn join<T: Copy>(x: &[T], y: &[T], (n, m): (usize, usize), out: &mut [T]) {
    let rows = out.len() / (n + m).max(1);
    assert_eq!(out.len(), rows * (n + m), "result has rows of {n} + {m}");
    assert_eq!(
        y.len(),
        rows * m,
        "operand 1 has a row for each of the result"
    );
    if out.is_empty() {
        return;
    }
    let each = match x.len() / n.max(1) {
        0 => rows,
        of_x => rows / of_x,
    };
    assert_eq!(
        x.len() * each,
        rows * n,
        "operand 0 has a row for as many each"
    );
    for (row, out) in out.chunks_exact_mut(n + m).enumerate() {
        out[..n].copy_from_slice(&x[row / each * n..][..n]);
        out[n..].copy_from_slice(&y[row * m..][..m]);
    }
}

/// Inverse of [`slice()`], default values (zeros) elsewhere: `out` has `len` elements along `dim`,
/// of which `x[dims]` fills those from `start` on.
///
/// # Panics
/// If `x` reaches beyond `len` or the slices do not fit.
pub fn pad<T: Copy + Default>(
    x: &[T],
    dims: &[usize],
    dim: usize,
    start: usize,
    len: usize,
    out: &mut [T],
) {
    let Along {
        outer,
        length,
        inner,
    } = Along::of(dims, dim);
    assert!(
        start + length <= len,
        "{start}..{} lies within {len}",
        start + length
    );
    assert_eq!(
        x.len(),
        outer * length * inner,
        "operand has shape {dims:?}"
    );
    assert_eq!(
        out.len(),
        outer * len * inner,
        "result holds the padded tensor"
    );
    out.fill(T::default());
    if x.is_empty() {
        return;
    }
    for (row, out) in x
        .chunks_exact(length * inner)
        .zip(out.chunks_exact_mut(len * inner))
    {
        out[start * inner..][..length * inner].copy_from_slice(row);
    }
}

/// Takes `dim` apart: `outs[i]` is element `i` of `x[dims]` along `dim`, without that dim.
///
/// # Panics
/// If there are not as many results as elements along `dim`, or the slices do not fit.
pub fn unstack<T: Copy>(x: &[T], dims: &[usize], dim: usize, outs: &mut [&mut [T]]) {
    assert_eq!(outs.len(), dims[dim], "one result per element of the dim");
    for (i, out) in outs.iter_mut().enumerate() {
        slice(x, dims, dim, i, 1, out);
    }
}

/// Inverse of [`unstack`]: `xs`, each of shape `item_dims`, along a new dim `dim` of `out`.
///
/// # Panics
/// If the slices do not fit.
pub fn stack<T: Copy>(xs: &[&[T]], item_dims: &[usize], dim: usize, out: &mut [T]) {
    let outer: usize = item_dims[..dim].iter().product();
    let inner: usize = item_dims[dim..].iter().product();
    assert_eq!(
        out.len(),
        outer * xs.len() * inner,
        "result holds all items"
    );
    assert!(
        xs.iter().all(|x| x.len() == outer * inner),
        "items have shape {item_dims:?}"
    );
    if inner == 0 {
        return;
    }
    for (at, out) in out.chunks_exact_mut(inner).enumerate() {
        let (row, item) = (at / xs.len(), at % xs.len());
        out.copy_from_slice(&xs[item][row * inner..][..inner]);
    }
}

/// Permutes dims: dim `i` of `out` is dim `perm[i]` of `x[dims]`.
///
/// # Panics
/// If `perm` is no permutation of the dims or the slices do not fit.
pub fn transpose<T: Copy>(x: &[T], dims: &[usize], perm: &[usize], out: &mut [T]) {
    let mut seen = perm.to_vec();
    seen.sort_unstable();
    assert!(
        seen.into_iter().eq(0..dims.len()),
        "{perm:?} permutes the dims of {dims:?}"
    );
    let n: usize = dims.iter().product();
    assert_eq!(
        (x.len(), out.len()),
        (n, n),
        "operand and result have {dims:?} elements"
    );
    if n == 0 {
        return;
    }
    let axes = permuted_axes(dims, perm);
    let Some((last, leading)) = axes.split_last() else {
        out.copy_from_slice(x);
        return;
    };
    // The axis along which x is contiguous: the last one, or the one to tile the last with.
    match leading.iter().rposition(|axis| axis.from == 1) {
        None => for_each_offset(leading, |from, to| {
            out[to..][..last.length].copy_from_slice(&x[from..][..last.length]);
        }),
        Some(i) => {
            let (row, others) = (leading[i], [&leading[..i], &leading[i + 1..]].concat());
            for_each_offset(&others, |from, to| {
                tile(&x[from..], &mut out[to..], row, *last)
            });
        }
    }
}

/// Copies the block of `extent` elements per dim at `src_start` of `src[src_dims]` to
/// `dst_start` of `dst[dst_dims]`; the rest of `dst` keeps its values.
///
/// # Panics
/// If the numbers of dims differ, or the block reaches beyond either tensor.
pub fn copy_region<T: Copy>(
    src: &[T],
    src_dims: &[usize],
    src_start: &[usize],
    dst: &mut [T],
    dst_dims: &[usize],
    dst_start: &[usize],
    extent: &[usize],
) {
    assert_eq!(
        src.len(),
        src_dims.iter().product::<usize>(),
        "source has shape {src_dims:?}"
    );
    assert_eq!(
        dst.len(),
        dst_dims.iter().product::<usize>(),
        "target has shape {dst_dims:?}"
    );
    for_each_block_run(
        [src_dims, src_start],
        [dst_dims, dst_start],
        extent,
        |from, to, run| dst[to..][..run].copy_from_slice(&src[from..][..run]),
    );
}

/// Calls `f(offset in one tensor, offset in the other, length)` for every run of elements of a
/// block that are neighbours in both tensors, in ascending order. Each is given by its dims and
/// where the block of `extent` elements per dim starts.
///
/// # Panics
/// If the numbers of dims differ, or the block reaches beyond either tensor.
pub fn for_each_block_run(
    [src_dims, src_start]: [&[usize]; 2],
    [dst_dims, dst_start]: [&[usize]; 2],
    extent: &[usize],
    mut f: impl FnMut(usize, usize, usize),
) {
    let rank = extent.len();
    let ranks = [src_dims, src_start, dst_dims, dst_start].map(<[usize]>::len);
    assert_eq!(ranks, [rank; 4], "shapes, starts and extent have one rank");
    let within = |start: &[usize], dims: &[usize]| {
        start
            .iter()
            .zip(extent)
            .zip(dims)
            .all(|((start, extent), length)| start + extent <= *length)
    };
    assert!(
        within(src_start, src_dims),
        "{extent:?} at {src_start:?} lies in {src_dims:?}"
    );
    assert!(
        within(dst_start, dst_dims),
        "{extent:?} at {dst_start:?} lies in {dst_dims:?}"
    );
    if extent.contains(&0) {
        return;
    }
    let (src_strides, dst_strides) = (strides(src_dims), strides(dst_dims));
    let dot = |a: &[usize], b: &[usize]| a.iter().zip(b).map(|(a, b)| a * b).sum::<usize>();
    let (src_first, dst_first) = (dot(src_start, &src_strides), dot(dst_start, &dst_strides));
    // Trailing dims that are whole in both tensors, and the one before them, form one run.
    let whole = |d: &usize| extent[*d] == src_dims[*d] && extent[*d] == dst_dims[*d];
    let n_whole = (0..rank).rev().take_while(whole).count();
    let outer = rank.saturating_sub(n_whole + 1);
    let run: usize = extent[outer..].iter().product();
    let axes: Vec<Axis> = (0..outer)
        .map(|d| Axis {
            length: extent[d],
            from: src_strides[d],
            to: dst_strides[d],
        })
        .collect();
    for_each_offset(&axes, |from, to| f(src_first + from, dst_first + to, run));
}

/// Sets every element of `x[dims]` whose index along some dim `d` is `valid[d]` or more to the
/// default value (zero).
///
/// # Panics
/// If the numbers of dims differ, `valid` exceeds `dims`, or `x` does not have that shape.
pub fn zero_outside<T: Copy + Default>(x: &mut [T], dims: &[usize], valid: &[usize]) {
    assert_eq!(dims.len(), valid.len(), "one valid length per dim");
    assert_eq!(
        x.len(),
        dims.iter().product::<usize>(),
        "tensor has shape {dims:?}"
    );
    for (dim, &valid) in valid.iter().enumerate() {
        let Along { length, inner, .. } = Along::of(dims, dim);
        assert!(
            valid <= length,
            "{valid} valid elements of {length} along dim {dim}"
        );
        if valid == length || x.is_empty() {
            continue;
        }
        for row in x.chunks_exact_mut(length * inner) {
            row[valid * inner..].fill(T::default());
        }
    }
}

/// A tensor seen along one dim: `[outer, length, inner]`.
struct Along {
    outer: usize,
    length: usize,
    inner: usize,
}

impl Along {
    fn of(dims: &[usize], dim: usize) -> Self {
        let outer = dims[..dim].iter().product();
        let inner = dims[dim + 1..].iter().product();
        Along {
            outer,
            length: dims[dim],
            inner,
        }
    }
}

/// A loop over `length` elements which are `from` apart in the source and `to` in the target.
#[derive(Clone, Copy)]
struct Axis {
    length: usize,
    from: usize,
    to: usize,
}

/// Row-major strides of a tensor.
fn strides(dims: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; dims.len()];
    for d in (1..dims.len()).rev() {
        strides[d - 1] = strides[d] * dims[d];
    }
    strides
}

/// Calls `f` with the source and target offsets of every index of `axes`, the last fastest.
fn for_each_offset(axes: &[Axis], mut f: impl FnMut(usize, usize)) {
    let mut index = vec![0; axes.len()];
    let (mut from, mut to) = (0, 0);
    loop {
        f(from, to);
        // Odometer: advance the last axis that has not reached its end, rewind those after it.
        let Some(turn) = (0..axes.len())
            .rev()
            .find(|&a| index[a] + 1 < axes[a].length)
        else {
            return;
        };
        for (axis, index) in axes.iter().zip(&mut index).skip(turn + 1) {
            from -= *index * axis.from;
            to -= *index * axis.to;
            *index = 0;
        }
        index[turn] += 1;
        from += axes[turn].from;
        to += axes[turn].to;
    }
}

/// The loops of a transpose in the result's order, without dims of length one, dims that stay
/// neighbours merged into one.
fn permuted_axes(dims: &[usize], perm: &[usize]) -> Vec<Axis> {
    let from = strides(dims);
    let out_dims: Vec<usize> = perm.iter().map(|&d| dims[d]).collect();
    let mut axes: Vec<Axis> = Vec::new();
    for (&dim, to) in perm.iter().zip(strides(&out_dims)) {
        let axis = Axis {
            length: dims[dim],
            from: from[dim],
            to,
        };
        match axes.last_mut() {
            _ if axis.length == 1 => {}
            Some(last) if last.from == axis.length * axis.from => {
                *last = Axis {
                    length: last.length * axis.length,
                    ..axis
                };
            }
            _ => axes.push(axis),
        }
    }
    axes
}

/// Transposes the matrix of two axes: `row` is contiguous in `x`, `column` in `out`.
///
/// Square blocks keep both sides' cache lines in use until they are done with.
fn tile<T: Copy>(x: &[T], out: &mut [T], row: Axis, column: Axis) {
    const BLOCK: usize = 16;
    for r0 in (0..row.length).step_by(BLOCK) {
        for c0 in (0..column.length).step_by(BLOCK) {
            let c1 = column.length.min(c0 + BLOCK);
            for r in r0..row.length.min(r0 + BLOCK) {
                let line = &mut out[r * row.to..][c0..c1];
                for (c, out) in (c0..c1).zip(line) {
                    *out = x[r + c * column.from];
                }
            }
        }
    }
}

/// Contiguous elements of a reduction's operand.
enum Run<'a> {
    /// All go to one element of the result.
    Reduced(&'a [f32]),
    /// They go to as many neighbouring elements of the result.
    Kept(&'a [f32]),
}

/// Calls `f` for the operand's runs in order, with the place in the result where each goes.
fn for_each_run(
    x: &[f32],
    dims: &[usize],
    reduced: &[usize],
    out_len: usize,
    mut f: impl FnMut(Run, usize),
) {
    assert!(reduced.is_sorted_by(|a, b| a < b), "{reduced:?} ascends");
    assert!(
        reduced.iter().all(|&d| d < dims.len()),
        "{reduced:?} are dims of {dims:?}"
    );
    assert_eq!(
        x.len(),
        dims.iter().product::<usize>(),
        "operand has shape {dims:?}"
    );
    let kept = |d: &usize| !reduced.contains(d);
    let out_dims: Vec<usize> = (0..dims.len()).filter(kept).map(|d| dims[d]).collect();
    assert_eq!(
        out_len,
        out_dims.iter().product::<usize>(),
        "result has shape {out_dims:?}"
    );
    if x.is_empty() {
        return;
    }
    // The trailing dims that are all reduced or all kept form the runs.
    let last_kept = dims.len().checked_sub(1).is_some_and(|d| kept(&d));
    let n_run = (0..dims.len())
        .rev()
        .take_while(|d| kept(d) == last_kept)
        .count();
    let outer = dims.len() - n_run;
    let run: usize = dims[outer..].iter().product();
    let (from, mut to) = (strides(dims), strides(&out_dims).into_iter());
    let to_strides: Vec<usize> = (0..dims.len())
        .map(|d| if kept(&d) { to.next().unwrap_or(0) } else { 0 })
        .collect();
    let axes: Vec<Axis> = (0..outer)
        .map(|d| Axis {
            length: dims[d],
            from: from[d],
            to: to_strides[d],
        })
        .collect();
    for_each_offset(&axes, |from, to| {
        let elements = &x[from..][..run];
        f(
            if last_kept {
                Run::Kept(elements)
            } else {
                Run::Reduced(elements)
            },
            to,
        );
    });
}

/// Maximum that keeps NaN, which `f32::max` drops.
fn max(a: f32, b: f32) -> f32 {
    if b > a || b.is_nan() { b } else { a }
}

#[cfg(test)]
#[path = "layout_tests.rs"]
mod tests;
