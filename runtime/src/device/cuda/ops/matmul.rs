//! Einsums as products of matrices: dims sorted into batch, rows, columns and inner ones.

use super::super::args::{Call, MATMUL, NUMBERS, Step, THREADS};
use super::{Op, Part, Steps};
use ir::op::Einsum;

/// Rows and columns of a block's tile.
const TILE: usize = 64;
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
