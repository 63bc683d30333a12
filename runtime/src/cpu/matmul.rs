//! Einsum of two tensors (`dot_general`), on top of [`gemm`](super::gemm).
//!
//! Labels say what a dim does: in both inputs and the output it is **batch**, in one input and the
//! output **free**, in both inputs only **contracting**. With the dims sorted into these groups the
//! product is one matrix product per batch index:
//!
//! ```text
//!   bsh , hcnd -> bscnd        rows  = bs   (free, left)      one stride in lhs and out
//!                              cols  = cnd  (free, right)     one stride in rhs and out
//!                              inner = h    (contracting)     one stride in lhs and rhs
//! ```
//!
//! A group whose dims lie one after the other in memory has a single stride, and the operand is
//! read in place, transposed or not; otherwise the operand is first copied in `[batch, rows, cols]`
//! order. An output that is not in `[batch, rows, cols]` order is made in it and permuted.
//!
//! Contracting dims are summed in the order in which `lhs` has them, a function of the labels alone,
//! so an element's bits do not depend on the free and batch extents, nor on `threads`.

use std::borrow::Cow;
use std::ops::Range;

use super::gemm::{Store, View, gemm};

/// Below this many multiply-adds a thread costs more than it saves (about 20 µs to start one).
pub(super) const WORK_PER_THREAD: usize = 1 << 20;

/// Rows given to a thread are a multiple of this, the largest tile of the product kernels.
pub(super) const ROW_QUANTUM: usize = 16;

/// A tensor with a label (any byte, distinct in the tensor) for each dim.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a> {
    /// Row-major elements.
    pub data: &'a [f32],
    /// Extent of each dim.
    pub dims: &'a [usize],
    /// Label of each dim.
    pub labels: &'a [u8],
}

/// `out[out_labels] = sum over contracting labels of lhs[..] * rhs[..]`, overwriting `out`.
///
/// `out` has the extents of `out_labels` in that order. An empty sum is zero. Up to `threads`
/// threads share the rows; 0 counts as 1.
///
/// # Panics
/// When labels are repeated, extents of a label differ, a label is in only one of the three, or a
/// slice does not have the elements of its shape.
pub fn dot_general(
    lhs: Operand<'_>,
    rhs: Operand<'_>,
    out_labels: &[u8],
    out: &mut [f32],
    threads: usize,
) {
    let (lhs, rhs) = (Labelled::new(lhs), Labelled::new(rhs));
    check_labels(&lhs, &rhs, out_labels);
    let extent = |label: u8| lhs.find(label).or(rhs.find(label)).map_or(1, |d| d.extent);
    let elements: usize = out_labels.iter().map(|&label| extent(label)).product();
    assert_eq!(out.len(), elements, "elements of the output");
    let out_labels: Vec<u8> = out_labels
        .iter()
        .copied()
        .filter(|&label| extent(label) != 1)
        .collect();

    let in_out = |in_lhs: bool, in_rhs: bool| -> Vec<u8> {
        let wanted = |label: &u8| (lhs.has(*label), rhs.has(*label)) == (in_lhs, in_rhs);
        out_labels.iter().copied().filter(wanted).collect()
    };
    let groups = Groups {
        batch: in_out(true, true),
        rows: in_out(true, false),
        cols: in_out(false, true),
        inner: lhs
            .labels()
            .filter(|label| !out_labels.contains(label))
            .collect(),
    };
    if elements == 0 {
        return;
    }
    let in_order =
        |first: &[u8], second: &[u8]| [&groups.batch, first, second].concat() == out_labels;
    if in_order(&groups.rows, &groups.cols) {
        groups.multiply(&lhs, &rhs, out, threads);
    } else if in_order(&groups.cols, &groups.rows) {
        groups.transposed().multiply(&rhs, &lhs, out, threads);
    } else {
        let mut made = vec![0.0; elements];
        groups.multiply(&lhs, &rhs, &mut made, threads);
        let labels = [&groups.batch[..], &groups.rows, &groups.cols].concat();
        let dims: Vec<usize> = labels.iter().map(|&label| extent(label)).collect();
        let perm: Vec<usize> = out_labels
            .iter()
            .map(|label| position(&labels, *label))
            .collect();
        permute(&made, &dims, &perm, out);
    }
}

/// Copies `src`, of shape `dims`, so that dim i of `out` is dim `perm[i]` of `src`.
///
/// # Panics
/// When `perm` is not a permutation of the dims or a slice does not have the elements of `dims`.
pub fn permute(src: &[f32], dims: &[usize], perm: &[usize], out: &mut [f32]) {
    let mut sorted = perm.to_vec();
    sorted.sort_unstable();
    assert!(
        sorted.into_iter().eq(0..dims.len()),
        "{perm:?} does not permute {dims:?}"
    );
    assert_eq!(
        src.len(),
        dims.iter().product::<usize>(),
        "elements of the source"
    );
    assert_eq!(src.len(), out.len(), "elements of the output");
    let strides = row_major(dims);
    let walk: Vec<Dim> = perm
        .iter()
        .map(|&d| Dim {
            label: 0,
            extent: dims[d],
            stride: strides[d],
        })
        .collect();
    if !src.is_empty() {
        gather(src, &walk, out);
    }
}

/// Fills `out` with the elements of `src` that `walk` visits, last dim fastest. No extent is 0.
fn gather(src: &[f32], walk: &[Dim], out: &mut [f32]) {
    match walk {
        [] => out[0] = src[0],
        [last] if last.stride == 1 => out.copy_from_slice(&src[..last.extent]),
        [last] => {
            for (out, x) in out.iter_mut().zip(src.iter().step_by(last.stride)) {
                *out = *x;
            }
        }
        [first, rest @ ..] => {
            let part = out.len() / first.extent;
            for (i, out) in out.chunks_exact_mut(part).enumerate() {
                gather(&src[i * first.stride..], rest, out);
            }
        }
    }
}

/// Panics unless labels are distinct, of one extent each, and in two of the three tensors.
fn check_labels(lhs: &Labelled<'_>, rhs: &Labelled<'_>, out_labels: &[u8]) {
    for (i, &label) in out_labels.iter().enumerate() {
        assert!(
            !out_labels[..i].contains(&label),
            "label {:?} twice",
            char::from(label)
        );
        assert!(
            lhs.has(label) || rhs.has(label),
            "label {:?} is in no input",
            char::from(label)
        );
    }
    for &label in lhs.ones.iter().chain(lhs.dims.iter().map(|d| &d.label)) {
        let (l, r) = (lhs.find(label), rhs.find(label));
        assert!(
            out_labels.contains(&label) || r.is_some(),
            "label {:?} is in one tensor",
            char::from(label)
        );
        let same = r.is_none_or(|r| l.is_some_and(|l| l.extent == r.extent));
        assert!(same, "extents of label {:?} differ", char::from(label));
    }
    for &label in rhs.ones.iter().chain(rhs.dims.iter().map(|d| &d.label)) {
        assert!(
            out_labels.contains(&label) || lhs.has(label),
            "label {:?} is in one tensor",
            char::from(label)
        );
    }
}

/// One dim of a tensor in memory.
#[derive(Clone, Copy, Debug)]
struct Dim {
    label: u8,
    extent: usize,
    stride: usize,
}

/// An operand without its dims of extent 1, which neither move the data nor take part in a sum.
struct Labelled<'a> {
    data: &'a [f32],
    dims: Vec<Dim>,
    /// Labels of the dims left out.
    ones: Vec<u8>,
}

impl<'a> Labelled<'a> {
    fn new(operand: Operand<'a>) -> Self {
        let Operand { data, dims, labels } = operand;
        assert_eq!(
            dims.len(),
            labels.len(),
            "dims {dims:?} against {} labels",
            labels.len()
        );
        assert_eq!(
            data.len(),
            dims.iter().product::<usize>(),
            "elements against {dims:?}"
        );
        let strides = row_major(dims);
        let all = labels.iter().zip(dims).zip(strides);
        let all = all.map(|((&label, &extent), stride)| Dim {
            label,
            extent,
            stride,
        });
        let (ones, dims): (Vec<Dim>, Vec<Dim>) = all.partition(|d| d.extent == 1);
        for (i, label) in labels.iter().enumerate() {
            assert!(
                !labels[..i].contains(label),
                "label {:?} twice",
                char::from(*label)
            );
        }
        Labelled {
            data,
            dims,
            ones: ones.iter().map(|d| d.label).collect(),
        }
    }

    /// Labels of extent other than 1, in memory order.
    fn labels(&self) -> impl Iterator<Item = u8> + '_ {
        self.dims.iter().map(|d| d.label)
    }

    /// The dim called `label`, also of extent 1.
    fn find(&self, label: u8) -> Option<Dim> {
        let one = || {
            self.ones.contains(&label).then_some(Dim {
                label,
                extent: 1,
                stride: 1,
            })
        };
        self.dims
            .iter()
            .copied()
            .find(|d| d.label == label)
            .or_else(one)
    }

    fn has(&self, label: u8) -> bool {
        self.find(label).is_some()
    }

    fn dims_of(&self, labels: &[u8]) -> Vec<Dim> {
        labels
            .iter()
            .filter_map(|&label| self.find(label))
            .collect()
    }

    /// The operand as one matrix per batch index, copied only if a group has no single stride.
    fn matrices(&self, batch: &[u8], rows: &[u8], cols: &[u8]) -> Matrices<'a> {
        let batch = self.dims_of(batch);
        let (rows, cols) = (self.dims_of(rows), self.dims_of(cols));
        if let (Some(row), Some(col)) = (single_stride(&rows), single_stride(&cols)) {
            return Matrices {
                data: Cow::Borrowed(self.data),
                batch,
                row,
                col,
            };
        }
        let walk = [&batch[..], &rows, &cols].concat();
        let mut copy = vec![0.0; self.data.len()];
        if !copy.is_empty() {
            gather(self.data, &walk, &mut copy);
        }
        let row = volume(&cols);
        let strides = row_major(&batch.iter().map(|d| d.extent).collect::<Vec<_>>());
        let matrix = volume(&rows) * row;
        let packed = batch.iter().zip(strides).map(|(d, s)| Dim {
            stride: s * matrix,
            ..*d
        });
        Matrices {
            data: Cow::Owned(copy),
            batch: packed.collect(),
            row,
            col: 1,
        }
    }
}

/// One matrix per batch index.
struct Matrices<'a> {
    data: Cow<'a, [f32]>,
    batch: Vec<Dim>,
    row: usize,
    col: usize,
}

impl Matrices<'_> {
    /// The matrix at a flat batch index, from row `first_row` on.
    fn view(&self, batch_idx: usize, first_row: usize) -> View<'_> {
        let mut rest = batch_idx;
        let mut at = first_row * self.row;
        for dim in self.batch.iter().rev() {
            at += rest % dim.extent * dim.stride;
            rest /= dim.extent;
        }
        View {
            data: &self.data[at..],
            row: self.row,
            col: self.col,
        }
    }
}

/// The labels of extent other than 1 by what they do; all in output order, but `inner` in the
/// order of the left operand as the caller named it.
#[derive(Clone)]
struct Groups {
    batch: Vec<u8>,
    rows: Vec<u8>,
    cols: Vec<u8>,
    inner: Vec<u8>,
}

impl Groups {
    /// The groups of the transposed product.
    fn transposed(&self) -> Self {
        Groups {
            rows: self.cols.clone(),
            cols: self.rows.clone(),
            ..self.clone()
        }
    }

    /// `out[batch, rows, cols]`, the rows of all matrices shared among threads.
    fn multiply(&self, lhs: &Labelled<'_>, rhs: &Labelled<'_>, out: &mut [f32], threads: usize) {
        let a = lhs.matrices(&self.batch, &self.rows, &self.inner);
        let b = rhs.matrices(&self.batch, &self.inner, &self.cols);
        let size = (
            volume(&lhs.dims_of(&self.rows)),
            volume(&lhs.dims_of(&self.inner)),
            volume(&rhs.dims_of(&self.cols)),
        );
        let (_, k, n) = size;
        if k == 0 {
            return out.fill(0.0);
        }
        let total = out.len() / n;
        let useful = (total * k * n / WORK_PER_THREAD).max(1);
        let share = total
            .div_ceil(threads.clamp(1, useful))
            .next_multiple_of(ROW_QUANTUM);
        if share >= total {
            return multiply_rows(size, &a, &b, 0..total, out);
        }
        std::thread::scope(|scope| {
            for (i, part) in out.chunks_mut(share * n).enumerate() {
                let (a, b) = (&a, &b);
                let rows = i * share..i * share + part.len() / n;
                scope.spawn(move || multiply_rows(size, a, b, rows, part));
            }
        });
    }
}

/// The given rows of all matrices, one after the other; row r is row `r % m` of matrix `r / m`.
fn multiply_rows(
    (m, k, n): (usize, usize, usize),
    a: &Matrices<'_>,
    b: &Matrices<'_>,
    rows: Range<usize>,
    out: &mut [f32],
) {
    let mut row = rows.start;
    while row < rows.end {
        let (batch_idx, first) = (row / m, row % m);
        let count = (m - first).min(rows.end - row);
        let part = &mut out[(row - rows.start) * n..][..count * n];
        gemm(
            (count, k, n),
            a.view(batch_idx, first),
            b.view(batch_idx, 0),
            Store::Overwrite,
            part,
            n,
        );
        row += count;
    }
}

/// The stride between neighbours when `dims` are walked as one dim, if they lie one after the
/// other. A group without dims has one element, and any stride will do.
fn single_stride(dims: &[Dim]) -> Option<usize> {
    let nested = dims
        .windows(2)
        .all(|w| w[0].stride == w[1].stride * w[1].extent);
    nested.then(|| dims.last().map_or(1, |d| d.stride))
}

fn volume(dims: &[Dim]) -> usize {
    dims.iter().map(|d| d.extent).product()
}

/// Row-major strides of a shape.
fn row_major(dims: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; dims.len()];
    for i in (1..dims.len()).rev() {
        strides[i - 1] = strides[i] * dims[i];
    }
    strides
}

/// Where `label` is among `labels`.
fn position(labels: &[u8], label: u8) -> usize {
    labels
        .iter()
        .position(|&l| l == label)
        .expect("the groups hold every output label")
}

#[cfg(test)]
#[path = "matmul_tests.rs"]
mod tests;
