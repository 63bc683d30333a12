//! Transfers between meshes: who sends what.

#![allow(clippy::unwrap_used)] // A test may stop where it likes.

use ir::mesh::{Axis, DeviceMesh};
use ir::reshard::{Placement, cross_paths, tiles_from, tiles_to};
use ir::sharding::{DimSharding, ShardingSpec};
use ir::{AxisId, LogicalMesh, Rank};
use std::collections::BTreeMap;

/// A mesh of `data` x `tensor` ranks from `first` on.
fn mesh(first: u32, data: u32, tensor: u32) -> LogicalMesh {
    let axis = |name: &str, size| Axis {
        name: name.into(),
        size,
    };
    let devices = DeviceMesh {
        first_rank: Rank(first),
        n_devices: data * tensor,
    };
    LogicalMesh::new(devices, vec![axis("data", data), axis("tensor", tensor)]).unwrap()
}

/// A spec whose dims are split over the axes given.
fn spec(dims: &[&[u32]]) -> ShardingSpec {
    let dim = |axes: &&[u32]| DimSharding {
        axes: axes.iter().map(|&a| AxisId::new(a as usize)).collect(),
        unit: 1,
    };
    ShardingSpec {
        dims: dims.iter().map(dim).collect(),
        partial: BTreeMap::new(),
    }
}

/// Elements that every sender sends.
fn sent(lens: &[u64], from: Placement<'_>, to: Placement<'_>) -> Vec<u64> {
    let elements = |rank| {
        let tiles = tiles_from(lens, from, to, rank);
        tiles.iter().map(|t| t.len.iter().product::<u64>()).sum()
    };
    from.mesh.ranks().map(elements).collect()
}

#[test]
fn pieces_of_what_all_hold_come_from_different_senders() {
    let (a, b) = (mesh(0, 2, 4), mesh(8, 2, 4));
    let lens = [2, 8, 16];
    let whole = spec(&[&[0], &[], &[]]);
    for pieces in [spec(&[&[0], &[1], &[]]), spec(&[&[0], &[], &[1]])] {
        let from = Placement {
            mesh: &a,
            spec: &whole,
        };
        let to = Placement {
            mesh: &b,
            spec: &pieces,
        };
        assert_eq!(sent(&lens, from, to), vec![32; 8]);
    }
    // Equal layouts pair up.
    let from = Placement {
        mesh: &a,
        spec: &whole,
    };
    let to = Placement {
        mesh: &b,
        spec: &whole,
    };
    for rank in b.ranks() {
        let tiles = tiles_to(&lens, from, to, &b.coords(rank).unwrap());
        assert_eq!(tiles.len(), 1);
        assert_eq!(tiles[0].from.0 + 8, rank.0);
    }
    // From a smaller mesh: four pieces, two senders that hold everything.
    let (small, all) = (mesh(0, 1, 2), mesh(2, 1, 4));
    let (held, pieces) = (spec(&[&[], &[], &[]]), spec(&[&[], &[1], &[]]));
    let from = Placement {
        mesh: &small,
        spec: &held,
    };
    let to = Placement {
        mesh: &all,
        spec: &pieces,
    };
    assert_eq!(sent(&lens, from, to), vec![128, 128]);
}

#[test]
fn scattering_takes_the_dim_that_makes_the_pieces_smaller() {
    // The first dim has a sample for each rank of the data axis: it cannot be split further.
    let (a, b) = (mesh(0, 16, 8), mesh(128, 16, 8));
    let whole = spec(&[&[0], &[], &[]]);
    let from = Placement {
        mesh: &a,
        spec: &whole,
    };
    let to = Placement {
        mesh: &b,
        spec: &whole,
    };
    let lens = [16, 2048, 64];
    let smallest = cross_paths(&lens, from, to)
        .iter()
        .map(|p| p.target_spec.local_elements(&lens, &b))
        .min();
    assert_eq!(smallest, Some(2048 * 64 / 8));
}
