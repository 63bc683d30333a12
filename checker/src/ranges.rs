//! Computes which part of a dim a rank holds, apart from `ir::sharding`, so that an error there
//! does not prove itself.
//!
//! A dim is a run of units. Axis by axis the run is cut into equal blocks, the coordinate
//! chooses one; the real end of the run travels along and cuts the last blocks short.

use ir::{DimSharding, LogicalMesh, ShardingSpec};

/// The longest dim and the largest unit, so that the product of two stays in 64 bits.
pub(crate) const MAX_LEN: u64 = 1 << 40;

/// Returns the elements `start..end` of a dim that the rank at `coords` really holds; it holds none
/// where `start >= end`.
pub(crate) fn held(len: u64, dim: &DimSharding, mesh: &LogicalMesh, coords: &[u32]) -> (u64, u64) {
    if dim.axes.is_empty() {
        return (0, len);
    }
    let unit = dim.unit.max(1);
    let n_units = len / unit + u64::from(!len.is_multiple_of(unit));
    let (mut first, mut block, mut end) = (0u64, n_units, n_units);
    for axis in &dim.axes {
        let n = mesh
            .axes
            .get(axis.index())
            .map_or(1, |a| u64::from(a.size))
            .max(1);
        let at = coords.get(axis.index()).map_or(0, |&c| u64::from(c));
        // A shard that has gone around comes from as many places before.
        let at = (at + n - u64::from(dim.turns) % n) % n;
        block = block / n + u64::from(!block.is_multiple_of(n));
        first = first.saturating_add(at.saturating_mul(block));
        end = end.min(first.saturating_add(block));
    }
    (
        first.saturating_mul(unit),
        end.saturating_mul(unit).min(len),
    )
}

/// Returns the length of every rank's buffer along a dim.
pub(crate) fn padded(len: u64, dim: &DimSharding, mesh: &LogicalMesh) -> u64 {
    if dim.axes.is_empty() {
        return len;
    }
    let unit = dim.unit.max(1);
    let units = dim.axes.iter().fold(len.div_ceil(unit), |k, axis| {
        k.div_ceil(
            mesh.axes
                .get(axis.index())
                .map_or(1, |a| u64::from(a.size))
                .max(1),
        )
    });
    units.saturating_mul(unit)
}

/// Returns the number of elements in every rank's buffer; `None` when it overflows.
pub(crate) fn local_elements(lens: &[u64], spec: &ShardingSpec, mesh: &LogicalMesh) -> Option<u64> {
    lens.iter()
        .zip(&spec.dims)
        .try_fold(1u64, |n, (&len, dim)| n.checked_mul(padded(len, dim, mesh)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use ir::sharding::local_range;
    use ir::{Axis, AxisId, DeviceMesh, Rank};

    #[test]
    fn ranges_agree_with_the_ir_on_all_small_dims() {
        let axes = vec![
            Axis {
                name: "x".into(),
                size: 3,
            },
            Axis {
                name: "y".into(),
                size: 4,
            },
        ];
        let mesh = LogicalMesh::new(
            DeviceMesh {
                first_rank: Rank(0),
                n_devices: 12,
            },
            axes,
        )
        .unwrap();
        let (x, y) = (AxisId(0), AxisId(1));
        for axes in [vec![], vec![x], vec![y], vec![x, y], vec![y, x]] {
            for len in 1..40 {
                let most_turns = match axes[..] {
                    [axis] => mesh.size(axis) as u32,
                    _ => 1,
                };
                for (unit, turns) in (1..6).flat_map(|u| (0..most_turns).map(move |t| (u, t))) {
                    let mut dim = DimSharding::by(axes.clone(), unit);
                    dim.turns = turns;
                    let mut covered = vec![0; len as usize];
                    for rank in mesh.ranks() {
                        let coords = mesh.coords(rank).unwrap();
                        let (start, end) = held(len, &dim, &mesh, &coords);
                        let theirs = local_range(len, &dim, &mesh, &coords);
                        assert_eq!(
                            end.saturating_sub(start),
                            theirs.valid,
                            "{dim:?} of {len} at {coords:?}"
                        );
                        assert_eq!(padded(len, &dim, &mesh), theirs.padded);
                        if theirs.valid > 0 {
                            assert_eq!(start, theirs.start);
                        }
                        (start..end).for_each(|i| covered[i as usize] += 1);
                    }
                    let replicas: usize = mesh
                        .axis_ids()
                        .filter(|a| !axes.contains(a))
                        .map(|a| mesh.size(a) as usize)
                        .product();
                    assert!(
                        covered.iter().all(|&n| n == replicas),
                        "{dim:?} of {len}: {covered:?}"
                    );
                }
            }
        }
    }
}
