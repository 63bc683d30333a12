//! Einsums as products of matrices: dims sorted into batch, rows, columns and inner ones.
//!
//! cuBLASLt takes what is a product of matrices with strides, or a few of them ([`products`]); a
//! kernel of our own takes the rest, and everything where the library is not there.

use super::super::args::{
    Call, Epilogue, MATMUL, Matrix, NUMBERS, Product, Shape, Step, THREADS, type_name,
};
use super::{Op, Part, Steps};
use ir::op::Einsum;

/// Rows and columns of a block's tile.
const TILE: usize = 64;
/// Most products that one op is made of: a launch each.
const MOST_PRODUCTS: usize = 64;
/// Most blocks along y and z.
const MOST: usize = 65535;

/// Extent of a dim, and its strides in the tensors that have it.
type Dim<const N: usize> = (usize, [usize; N]);

/// Dims that follow each other in all their tensors are one.
fn merged<const N: usize>(dims: Vec<Dim<N>>) -> Vec<Dim<N>> {
    let mut out: Vec<Dim<N>> = Vec::new();
    for (extent, strides) in dims.into_iter().filter(|d| d.0 != 1) {
        match out.last_mut() {
            Some((outer, last)) if (0..N).all(|i| last[i] == extent * strides[i]) => {
                (*outer, *last) = (*outer * extent, strides);
            }
            _ => out.push((extent, strides)),
        }
    }
    out
}

fn count<const N: usize>(dims: &[Dim<N>]) -> usize {
    dims.iter().map(|d| d.0).product()
}

fn numbers<const N: usize>(dims: &[Dim<N>]) -> Vec<i64> {
    let dim = |(extent, strides): &Dim<N>| {
        let strides = strides.iter().map(|s| *s as i64);
        std::iter::once(*extent as i64)
            .chain(strides)
            .collect::<Vec<_>>()
    };
    dims.iter().flat_map(dim).collect()
}

/// Strides by label.
fn stride(part: &Part<'_>, labels: &[u8], label: u8) -> Option<(usize, usize)> {
    let dims = part.dims();
    let d = labels.iter().position(|l| *l == label)?;
    Some((dims[d], dims[d + 1..].iter().product()))
}

impl Op<'_> {
    pub(super) fn matmul(&self, einsum: &Einsum) -> Steps {
        self.floats(&[0, 1])?;
        let (l, r, y) = (self.x[0], self.x[1], self.y[0]);
        let of_l = |label| stride(&l, &einsum.lhs, label);
        let of_r = |label| stride(&r, &einsum.rhs, label);
        let of_y = |label| stride(&y, &einsum.out, label);
        let (mut batch, mut rows, mut cols) = (Vec::new(), Vec::new(), Vec::new());
        for &label in &einsum.out {
            let Some((extent, in_y)) = of_y(label) else {
                continue;
            };
            let same = |found: Option<(usize, usize)>| found.is_none_or(|f| f.0 == extent);
            if !same(of_l(label)) || !same(of_r(label)) {
                return Err(self.error(format!("extents of label {} differ", label as char)));
            }
            match (of_l(label), of_r(label)) {
                (Some(a), Some(b)) => batch.push((extent, [a.1, b.1, in_y])),
                (Some(a), None) => rows.push((extent, [a.1, in_y])),
                (None, Some(b)) => cols.push((extent, [b.1, in_y])),
                (None, None) => return Err(self.error("a label of the result is in no operand")),
            }
        }
        let mut inner = Vec::new();
        for &label in einsum.lhs.iter().filter(|l| !einsum.out.contains(l)) {
            match (of_l(label), of_r(label)) {
                (Some(a), Some(b)) if a.0 == b.0 => inner.push((a.0, [a.1, b.1])),
                _ => {
                    let what = format!("extents of label {} differ", label as char);
                    return Err(self.error(what));
                }
            }
        }
        let (batch, rows, cols, inner) = (merged(batch), merged(rows), merged(cols), merged(inner));
        if self.has_library {
            let dims = (&batch[..], &rows[..], &cols[..], &inner[..]);
            if let Some(found) = products((&l, &r, &y), dims) {
                return Ok(found.into_iter().map(Step::Product).collect());
            }
        }
        let [n_batch, n_rows, n_cols] = [count(&batch), count(&rows), count(&cols)];
        let head = [n_batch, n_rows, n_cols, count(&inner)].map(|n| n as i64);
        let groups = [batch.len(), rows.len(), cols.len(), inner.len()].map(|n| n as i64);
        // Which way an operand is read: along the dim whose elements follow each other.
        let is_near = |operand: usize| {
            let strides = inner.last().map(|d| d.1);
            i64::from(strides.is_some_and(|s| s[operand] == 1))
        };
        let mut dims = numbers(&batch);
        dims.extend(numbers(&rows));
        dims.extend(numbers(&cols));
        dims.extend(numbers(&inner));
        let grid = [n_cols.div_ceil(TILE), n_rows.div_ceil(TILE), n_batch];
        if grid[1] > MOST || grid[2] > MOST || 10 + dims.len() > NUMBERS {
            return Err(self.error(format!("no kernel for {n_rows} rows in {n_batch} batches")));
        }
        let mut call = Call::blocks(MATMUL, "matmul", 1, THREADS)
            .x(0, l.typed())
            .x(1, r.typed())
            .y(0, y.typed())
            .n(0, &head)
            .n(4, &groups)
            .n(8, &[is_near(0), is_near(1)])
            .n(10, &dims);
        call.grid = grid.map(|n| u32::try_from(n).unwrap_or(u32::MAX));
        Ok(vec![Step::Call(call)])
    }
}

/// The matrix with these strides of rows and columns, one of which follows element by element; a
/// dim of one element has no stride.
fn matrix(
    part: &Part<'_>,
    (rows, across): (u64, Option<usize>),
    (cols, along): (u64, Option<usize>),
) -> Option<Matrix> {
    let (is_transposed, ld) = match (across, along) {
        (None | Some(1), along) => (false, along.unwrap_or(1).max(rows as usize)),
        (Some(across), None | Some(1)) => (true, across.max(cols as usize)),
        _ => return None,
    };
    Some(Matrix {
        type_name: type_name(part.local.dtype),
        is_transposed,
        ld: i64::try_from(ld).ok()?,
        stride: 0,
    })
}

/// Dims of batch, rows, columns and inner ones, merged.
type Sorted<'a> = (&'a [Dim<3>], &'a [Dim<2>], &'a [Dim<2>], &'a [Dim<2>]);

/// The products of matrices that an einsum is: one, one for each matrix of a batch, or a few of
/// these. None where the library has no such product: elements of several types, several inner
/// dims, no dim of an operand whose elements follow each other, or nothing to add up.
fn products(
    (l, r, y): (&Part<'_>, &Part<'_>, &Part<'_>),
    (batch, rows, cols, inner): Sorted<'_>,
) -> Option<Vec<Product>> {
    let has_types = l.local.dtype == r.local.dtype
        && (y.local.dtype == l.local.dtype || y.local.dtype == ir::DType::F32);
    let is_nothing = |part: &Part<'_>| part.elements() == 0;
    if !has_types || inner.len() > 1 || is_nothing(l) || is_nothing(r) {
        return None;
    }
    // Which of several dims of rows and columns are the matrices': those whose elements follow
    // each other, else the longest. The others make a batch.
    let choose = |dims: &[Dim<2>]| {
        let rank = |d: &Dim<2>| (d.1.contains(&1), d.0);
        (0..dims.len()).max_by_key(|&i| rank(&dims[i]))
    };
    let (row, col) = (choose(rows), choose(cols));
    let others = |dims: &[Dim<2>], chosen: Option<usize>, is_left: bool| {
        let rest = dims.iter().enumerate().filter(|(i, _)| Some(*i) != chosen);
        let with = |(extent, [in_x, in_y]): Dim<2>| match is_left {
            true => (extent, [in_x, 0, in_y]),
            false => (extent, [0, in_x, in_y]),
        };
        rest.map(|(_, d)| with(*d)).collect::<Vec<Dim<3>>>()
    };
    let mut outer: Vec<Dim<3>> = batch.to_vec();
    outer.extend(others(rows, row, true));
    outer.extend(others(cols, col, false));
    // The longest is the library's batch; the rest are calls.
    let longest = (0..outer.len()).max_by_key(|&i| outer[i].0);
    let (n_batch, strides) = longest.map_or((1, [0; 3]), |i| outer.remove(i));
    if count(&outer) > MOST_PRODUCTS {
        return None;
    }
    let dim = |dims: &[Dim<2>], i: Option<usize>, operand: usize| match i {
        Some(i) => (dims[i].0 as u64, Some(dims[i].1[operand])),
        None => (1, None),
    };
    let k = |operand| dim(inner, inner.first().map(|_| 0), operand);
    // The result is stored by columns; seen by rows it is the transposed one.
    let by_columns = matrix(y, dim(rows, row, 1), dim(cols, col, 1))?;
    let is_swapped = by_columns.is_transposed;
    let (a, b, d) = match is_swapped {
        false => (
            matrix(l, dim(rows, row, 0), k(0))?,
            matrix(r, k(1), dim(cols, col, 0))?,
            by_columns,
        ),
        true => (
            matrix(r, dim(cols, col, 0), k(1))?,
            matrix(l, k(0), dim(rows, row, 0))?,
            matrix(y, dim(cols, col, 1), dim(rows, row, 1))?,
        ),
    };
    let (n_rows, n_cols) = (dim(rows, row, 0).0, dim(cols, col, 0).0);
    let order = |[in_l, in_r, in_y]: [usize; 3]| match is_swapped {
        false => [in_l, in_r, in_y],
        true => [in_r, in_l, in_y],
    };
    let steps = order(strides).map(|s| s as i64);
    let shape = Shape {
        rows: if is_swapped { n_cols } else { n_rows },
        cols: if is_swapped { n_rows } else { n_cols },
        inner: k(0).0,
        batch: n_batch as u64,
        a: Matrix {
            stride: steps[0],
            ..a
        },
        b: Matrix {
            stride: steps[1],
            ..b
        },
        d: Matrix {
            stride: steps[2],
            ..d
        },
        epilogue: Epilogue::Nothing,
    };
    let (first, second) = if is_swapped { (r, l) } else { (l, r) };
    let address = |part: &Part<'_>, element: usize| {
        part.span.at + (element * part.local.dtype.bytes() as usize) as u64
    };
    let mut all = Vec::new();
    for mut i in 0..count(&outer) {
        let mut at = [0; 3];
        for (extent, strides) in outer.iter().rev() {
            for (at, stride) in at.iter_mut().zip(order(*strides)) {
                *at += i % extent * stride;
            }
            i /= extent;
        }
        all.push(Product {
            shape,
            a: address(first, at[0]),
            b: address(second, at[1]),
            d: address(y, at[2]),
            c: None,
            bias: 0,
            beside: 0,
        });
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dims_that_follow_each_other_are_one() {
        // [b, s, h] times [h, f]: rows b and s have one stride in both tensors.
        assert_eq!(
            merged(vec![(2, [12, 20]), (3, [4, 4])]),
            [(2, [12, 20]), (3, [4, 4])]
        );
        assert_eq!(merged(vec![(2, [12, 15]), (3, [4, 5])]), [(6, [4, 5])]);
        assert_eq!(merged(vec![(1, [7, 9]), (3, [4, 5])]), [(3, [4, 5])]);
    }
}
