//! Matrix product on strided views, the one door to `matrixmultiply`.
//!
//! An element of the product is a chain of multiply-adds over `k` in ascending order, cut into
//! blocks of fixed length whose sums are added in order. Which kernel runs depends on the
//! processor alone, so the bits of an element depend on its row of A and its column of B, and not
//! on `m`, `n` or any stride (`element_bits_do_not_depend_on_m_n_or_layout` checks it). That holds
//! because the product is never scaled: with a factor other than 1, elements at the edge of a tile
//! would be rounded once more than the others. Scale before or after.
//!
//! The same chain gives a second guarantee: trailing terms with a zero factor (and a finite
//! other) leave an element as it is, so `k` may be cut to the last nonzero term.

/// A matrix read in place: element (i, j) is `data[i * row + j * col]`.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The elements, from (0, 0) on.
    pub data: &'a [f32],
    /// Elements from one row to the next.
    pub row: usize,
    /// Elements from one column to the next.
    pub col: usize,
}

/// The treatment of the output's former content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// C = A B; C need not be initialised with anything in particular.
    Overwrite,
    /// C = C + A B.
    Add,
}

/// C = A B or C + A B, with A `[m, k]`, B `[k, n]` and C `[m, n]`.
///
/// Row i of C is `c[i * c_row..][..n]`; elements between the rows are left alone. With `k == 0`
/// the product is zero.
///
/// # Panics
/// When a view does not cover its matrix, or rows of C overlap.
pub fn gemm(
    (m, k, n): (usize, usize, usize),
    a: View<'_>,
    b: View<'_>,
    store: Store,
    c: &mut [f32],
    c_row: usize,
) {
    if m == 0 || n == 0 {
        return;
    }
    assert!(covers(a, m, k), "A does not cover [{m}, {k}]");
    assert!(covers(b, k, n), "B does not cover [{k}, {n}]");
    assert!(m == 1 || c_row >= n, "rows of C overlap");
    let c_view = View {
        data: c,
        row: c_row,
        col: 1,
    };
    assert!(covers(c_view, m, n), "C does not cover [{m}, {n}]");
    let beta = match store {
        Store::Overwrite => 0.0,
        Store::Add => 1.0,
    };
    let stride = |s: usize| isize::try_from(s).expect("a stride inside a slice fits isize");
    // SAFETY: `covers` has shown that every element sgemm reads from A and B, and reads or writes
    // in C, lies in its slice; the elements of C are distinct (unit columns, `c_row >= n`), and C
    // is borrowed mutably, so it overlaps neither A nor B.
    #[allow(unsafe_code)]
    unsafe {
        matrixmultiply::sgemm(
            m,
            k,
            n,
            1.0,
            a.data.as_ptr(),
            stride(a.row),
            stride(a.col),
            b.data.as_ptr(),
            stride(b.row),
            stride(b.col),
            beta,
            c.as_mut_ptr(),
            stride(c_row),
            1,
        );
    }
}

/// Whether every element of a `[rows, cols]` matrix lies in the view, and every stride fits
/// `isize`. An overflow in the index panics (the profile keeps overflow checks on).
fn covers(view: View<'_>, rows: usize, cols: usize) -> bool {
    let fits = |s: usize| isize::try_from(s).is_ok();
    let last = || {
        let row = (rows - 1).checked_mul(view.row)?;
        row.checked_add((cols - 1).checked_mul(view.col)?)
    };
    let inside = rows == 0 || cols == 0 || last().is_some_and(|last| last < view.data.len());
    inside && fits(view.row) && fits(view.col)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{bits, random};

    fn whole(m: usize, k: usize, n: usize, a: &[f32], b: &[f32]) -> Vec<f32> {
        let mut c = vec![f32::NAN; m * n];
        let (a, b) = (
            View {
                data: a,
                row: k,
                col: 1,
            },
            View {
                data: b,
                row: n,
                col: 1,
            },
        );
        gemm((m, k, n), a, b, Store::Overwrite, &mut c, n);
        c
    }

    /// The shapes cross the tile (8 or 16), row block (64), k block (256) and column block (1024).
    const SHAPES: [(usize, usize, usize); 9] = [
        (1, 1, 1),
        (3, 5, 7),
        (16, 16, 16),
        (17, 33, 15),
        (31, 300, 47),
        (65, 257, 33),
        (70, 513, 20),
        (129, 64, 65),
        (5, 40, 1100),
    ];

    #[test]
    fn element_bits_do_not_depend_on_m_n_or_layout() {
        for (seed, &(m, k, n)) in SHAPES.iter().enumerate() {
            let a = random(seed as u64, m * k);
            let b = random(100 + seed as u64, k * n);
            let all = whole(m, k, n, &a, &b);
            // One row at a time.
            for i in 0..m {
                let row = whole(1, k, n, &a[i * k..][..k], &b);
                assert_eq!(
                    bits(&row),
                    bits(&all[i * n..][..n]),
                    "row {i} of {m}x{k}x{n}"
                );
            }
            // One column at a time, read with a stride.
            for j in 0..n {
                let mut column = vec![0.0; m];
                let (a, b) = (
                    View {
                        data: &a,
                        row: k,
                        col: 1,
                    },
                    View {
                        data: &b[j..],
                        row: n,
                        col: n,
                    },
                );
                gemm((m, k, 1), a, b, Store::Overwrite, &mut column, 1);
                let expected: Vec<f32> = (0..m).map(|i| all[i * n + j]).collect();
                assert_eq!(bits(&column), bits(&expected), "column {j} of {m}x{k}x{n}");
            }
            // Slices that do not start on a tile, and padded rows of C.
            for (i0, i1) in [(m / 3, m), (0, m - m / 4), (m / 2, m / 2 + 1)] {
                let (rows, c_row) = (i1 - i0, n + 3);
                let mut c = vec![9.0; rows * c_row];
                let (a, b) = (
                    View {
                        data: &a[i0 * k..],
                        row: k,
                        col: 1,
                    },
                    View {
                        data: &b,
                        row: n,
                        col: 1,
                    },
                );
                gemm((rows, k, n), a, b, Store::Overwrite, &mut c, c_row);
                for r in 0..rows {
                    assert_eq!(bits(&c[r * c_row..][..n]), bits(&all[(i0 + r) * n..][..n]));
                    assert_eq!(c[r * c_row + n..][..3], [9.0; 3]);
                }
            }
            // Operands transposed in memory, and the product of the transposes.
            let a_t: Vec<f32> = (0..k * m).map(|x| a[(x % m) * k + x / m]).collect();
            let b_t: Vec<f32> = (0..k * n).map(|x| b[(x % k) * n + x / k]).collect();
            let (va, vb) = (
                View {
                    data: &a_t,
                    row: 1,
                    col: m,
                },
                View {
                    data: &b_t,
                    row: 1,
                    col: k,
                },
            );
            let mut c = vec![0.0; m * n];
            gemm((m, k, n), va, vb, Store::Overwrite, &mut c, n);
            assert_eq!(bits(&c), bits(&all), "{m}x{k}x{n} transposed");
            let swapped = whole(n, k, m, &b_t, &a_t);
            let back: Vec<f32> = (0..m * n).map(|x| swapped[(x % n) * m + x / n]).collect();
            assert_eq!(bits(&back), bits(&all), "{m}x{k}x{n} swapped");
        }
    }

    #[test]
    fn adding_gives_the_same_bits_inside_and_at_the_edge_of_a_tile() {
        for (seed, &(m, k, n)) in SHAPES.iter().enumerate() {
            let (a, b) = (random(seed as u64, m * k), random(7 + seed as u64, k * n));
            let start = random(9, m * n);
            let (va, vb) = (
                View {
                    data: &a,
                    row: k,
                    col: 1,
                },
                View {
                    data: &b,
                    row: n,
                    col: 1,
                },
            );
            let mut all = start.clone();
            gemm((m, k, n), va, vb, Store::Add, &mut all, n);
            for i in 0..m {
                let mut row = start[i * n..][..n].to_vec();
                let va = View {
                    data: &a[i * k..],
                    row: k,
                    col: 1,
                };
                gemm((1, k, n), va, vb, Store::Add, &mut row, n);
                assert_eq!(bits(&row), bits(&all[i * n..][..n]));
            }
        }
    }

    #[test]
    fn trailing_zero_factors_change_nothing() {
        let (m, n) = (19, 21);
        for (k, padded) in [(5, 64), (100, 256), (255, 257), (256, 700), (300, 512)] {
            let b = random(3, padded * n);
            let mut a = random(2, m * padded);
            a.chunks_mut(padded).for_each(|row| row[k..].fill(0.0));
            let full = whole(m, padded, n, &a, &b);
            let mut cut = vec![0.0; m * n];
            let (a, b) = (
                View {
                    data: &a,
                    row: padded,
                    col: 1,
                },
                View {
                    data: &b,
                    row: n,
                    col: 1,
                },
            );
            gemm((m, k, n), a, b, Store::Overwrite, &mut cut, n);
            assert_eq!(bits(&cut), bits(&full));
        }
    }

    #[test]
    fn empty_extents() {
        let empty = View {
            data: &[],
            row: 0,
            col: 0,
        };
        let mut c = [5.0; 4];
        gemm((2, 0, 2), empty, empty, Store::Add, &mut c, 2);
        assert_eq!(c, [5.0; 4]);
        gemm((2, 0, 2), empty, empty, Store::Overwrite, &mut c, 2);
        assert_eq!(c, [0.0; 4]);
        gemm(
            (0, 3, 2),
            empty,
            View {
                data: &[1.0; 6],
                row: 2,
                col: 1,
            },
            Store::Overwrite,
            &mut [],
            2,
        );
    }

    #[test]
    #[should_panic(expected = "B does not cover")]
    fn a_view_too_short_panics() {
        let mut c = [0.0; 4];
        let (a, b) = (
            View {
                data: &[1.0; 4],
                row: 2,
                col: 1,
            },
            View {
                data: &[1.0; 3],
                row: 2,
                col: 1,
            },
        );
        gemm((2, 2, 2), a, b, Store::Overwrite, &mut c, 2);
    }
}
