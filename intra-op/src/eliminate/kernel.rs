//! The inner loops: rows of costs are added, and the least sum is taken.
//!
//! Costs are integers. Below 2^53 they are held as `f64`, which is as exact and for which every
//! x86-64 processor has vector instructions to take the lesser of two; 64-bit integers have none
//! before AVX-512. Above, they are `u64`.

/// Stands for forbidden among integers; sums of two stay in 64 bits.
pub(super) const INFINITE: u64 = 1 << 61;
/// Sums of integers below this are exact in `f64`.
const EXACT: u64 = 1 << 53;
/// The number of cells that are summed side by side.
const LANES: usize = 8;

/// Runs a function compiled for the widest vectors that the processor has. What it calls is so only
/// where it is inlined.
pub(crate) fn with_widest_vectors<R>(f: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(f)
}

/// A cost as the inner loops hold it.
pub(super) trait Cell: Copy + PartialOrd + 'static {
    /// The cost of what must not be picked; adding to it leaves it as it is.
    const FORBIDDEN: Self;
    const ZERO: Self;
    /// Sums below this are exact; where it is absent all are.
    const EXACT_BELOW: Option<u64>;
    fn new(cost: u64) -> Self;
    /// Returns the cost, at most [`INFINITE`], which is forbidden.
    fn cost(self) -> u64;
    fn plus(self, other: Self) -> Self;
    fn least(self, other: Self) -> Self;
}

impl Cell for u64 {
    const FORBIDDEN: u64 = INFINITE;
    const ZERO: u64 = 0;
    /// Each sum of two is capped at [`INFINITE`].
    const EXACT_BELOW: Option<u64> = None;
    #[inline(always)]
    fn new(cost: u64) -> u64 {
        cost.min(INFINITE)
    }
    #[inline(always)]
    fn cost(self) -> u64 {
        self
    }
    #[inline(always)]
    fn plus(self, other: u64) -> u64 {
        self.wrapping_add(other).min(INFINITE)
    }
    #[inline(always)]
    fn least(self, other: u64) -> u64 {
        self.min(other)
    }
}

impl Cell for f64 {
    const FORBIDDEN: f64 = f64::INFINITY;
    const ZERO: f64 = 0.0;
    const EXACT_BELOW: Option<u64> = Some(EXACT);
    #[inline(always)]
    fn new(cost: u64) -> f64 {
        if cost < INFINITE {
            cost as f64
        } else {
            f64::INFINITY
        }
    }
    #[inline(always)]
    fn cost(self) -> u64 {
        if self < f64::INFINITY {
            self as u64
        } else {
            INFINITE
        }
    }
    #[inline(always)]
    fn plus(self, other: f64) -> f64 {
        self + other
    }
    /// Not `f64::min`, which handles NaN and so is no single instruction.
    #[inline(always)]
    fn least(self, other: f64) -> f64 {
        if other < self { other } else { self }
    }
}

/// Adds a row to the sums.
#[inline(always)]
pub(super) fn add<C: Cell>(sum: &mut [C], row: &[C]) {
    for (x, y) in sum.iter_mut().zip(row) {
        *x = x.plus(*y);
    }
}

/// Sets the sums to those of two rows.
#[inline(always)]
pub(super) fn set_sum<C: Cell>(sum: &mut [C], a: &[C], b: &[C]) {
    for ((x, a), b) in sum.iter_mut().zip(a).zip(b) {
        *x = a.plus(*b);
    }
}

/// Returns the least cell of a row.
#[inline(always)]
pub(super) fn least<C: Cell>(row: &[C]) -> C {
    let (chunks, rest) = row.as_chunks::<LANES>();
    let mut lanes = [C::FORBIDDEN; LANES];
    for x in chunks {
        for l in 0..LANES {
            lanes[l] = lanes[l].least(x[l]);
        }
    }
    ended(lanes, rest.iter().copied())
}

/// Returns the least sum of two rows of one length.
#[inline(always)]
pub(super) fn least_sum<C: Cell>(a: &[C], b: &[C]) -> C {
    let (xs, rest_x) = a.as_chunks::<LANES>();
    let (ys, rest_y) = b.as_chunks::<LANES>();
    let mut lanes = [C::FORBIDDEN; LANES];
    for (x, y) in xs.iter().zip(ys) {
        for l in 0..LANES {
            lanes[l] = lanes[l].least(x[l].plus(y[l]));
        }
    }
    ended(lanes, rest_x.iter().zip(rest_y).map(|(x, y)| x.plus(*y)))
}

/// Returns the least sum of three rows of one length.
#[inline(always)]
pub(super) fn least_sum_of_three<C: Cell>(a: &[C], b: &[C], c: &[C]) -> C {
    let (xs, rest_x) = a.as_chunks::<LANES>();
    let (ys, rest_y) = b.as_chunks::<LANES>();
    let (zs, rest_z) = c.as_chunks::<LANES>();
    let mut lanes = [C::FORBIDDEN; LANES];
    for ((x, y), z) in xs.iter().zip(ys).zip(zs) {
        for l in 0..LANES {
            lanes[l] = lanes[l].least(x[l].plus(y[l]).plus(z[l]));
        }
    }
    let rest = rest_x.iter().zip(rest_y).zip(rest_z);
    ended(lanes, rest.map(|((x, y), z)| x.plus(*y).plus(*z)))
}

/// The number of cells that whole vectors for so many take.
pub(super) fn padded(n: usize) -> usize {
    n.next_multiple_of(LANES)
}

/// Adds to `out`, for each of `n` columns of a table, the least sum of a cell and the cost of its
/// row. Rows are [`padded`]. Sums run along rows, so that no vector is added up across.
#[inline(always)]
pub(super) fn least_sums<C: Cell>(costs: &[C], table: &[C], n: usize, out: &mut Vec<C>) {
    let (cells, _) = table.as_chunks::<LANES>();
    let width = padded(n) / LANES;
    let mut at = 0;
    while at < width {
        let columns = n - at * LANES;
        at += match width - at {
            1 => block::<C, 1>(costs, cells, (width, at), columns, out),
            2 => block::<C, 2>(costs, cells, (width, at), columns, out),
            3 => block::<C, 3>(costs, cells, (width, at), columns, out),
            _ => block::<C, 4>(costs, cells, (width, at), columns, out),
        };
    }
}

/// The next `P` vectors of [`least_sums`], which has so many columns left; returns `P`.
#[inline(always)]
fn block<C: Cell, const P: usize>(
    costs: &[C],
    cells: &[[C; LANES]],
    (width, at): (usize, usize),
    columns: usize,
    out: &mut Vec<C>,
) -> usize {
    let mut sums = [[C::FORBIDDEN; LANES]; P];
    for (cost, row) in costs.iter().zip(cells.chunks_exact(width)) {
        let Some((row, _)) = row[at..].split_first_chunk::<P>() else {
            break;
        };
        for p in 0..P {
            for l in 0..LANES {
                sums[p][l] = sums[p][l].least(cost.plus(row[p][l]));
            }
        }
    }
    let sums = sums.as_flattened();
    // The length of a whole block is known to the compiler.
    match columns >= sums.len() {
        true => out.extend_from_slice(sums),
        false => out.extend_from_slice(&sums[..columns]),
    }
    P
}

#[inline(always)]
fn ended<C: Cell>(lanes: [C; LANES], rest: impl Iterator<Item = C>) -> C {
    let half = |i: usize| lanes[i].least(lanes[i + LANES / 2]);
    let quarter = |i: usize| half(i).least(half(i + LANES / 4));
    rest.fold(quarter(0).least(quarter(1)), C::least)
}

/// Returns the largest cost of a table that is not forbidden.
#[inline(always)]
pub(super) fn largest<C: Cell>(table: &[C]) -> u64 {
    let allowed = |c: C| if c < C::FORBIDDEN { c } else { C::ZERO };
    let most = |a: C, b: C| if a < b { b } else { a };
    let (chunks, rest) = table.as_chunks::<LANES>();
    let mut lanes = [C::ZERO; LANES];
    for x in chunks {
        for l in 0..LANES {
            lanes[l] = most(lanes[l], allowed(x[l]));
        }
    }
    let all = lanes.into_iter().chain(rest.iter().map(|c| allowed(*c)));
    all.fold(C::ZERO, most).cost()
}
