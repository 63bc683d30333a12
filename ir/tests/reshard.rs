//! Transfers between meshes: who sends what.

#![allow(clippy::unwrap_used)] // A test may stop where it likes.

use ir::mesh::{Axis, DeviceMesh};
use ir::reshard::{
    LayoutStep, Pieces, Placement, Tile, cross_paths, source_replica, tiles_from, tiles_to,
};
use ir::sharding::{DimSharding, ShardingSpec};
use ir::testing::Rng;
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
        turns: 0,
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

/// The blocks are those that the definition names: what each sender of the replica holds of what
/// the receiver wants.
#[test]
fn blocks_are_what_sender_and_receiver_have_in_common() {
    let mut rng = Rng::new(7);
    let mut n_blocks = 0;
    for _ in 0..3000 {
        let meshes: Vec<LogicalMesh> = [0, 100]
            .map(|first| {
                let sizes: Vec<u32> = (0..rng.between(0, 3))
                    .map(|_| rng.pick(&[1, 2, 3, 4]))
                    .collect();
                let axis = |(i, &size): (usize, &u32)| Axis {
                    name: format!("a{i}"),
                    size,
                };
                let devices = DeviceMesh {
                    first_rank: Rank(first),
                    n_devices: sizes.iter().product(),
                };
                LogicalMesh::new(devices, sizes.iter().enumerate().map(axis).collect()).unwrap()
            })
            .into();
        let lens: Vec<u64> = (0..rng.between(0, 3)).map(|_| rng.between(1, 30)).collect();
        let mut random_spec = |mesh: &LogicalMesh| {
            let mut dims: Vec<Vec<AxisId>> = vec![vec![]; lens.len()];
            let mut axes: Vec<AxisId> = mesh.axis_ids().collect();
            rng.shuffle(&mut axes);
            for axis in axes {
                if !lens.is_empty() && !rng.one_in(3) {
                    dims[rng.below(lens.len() as u64) as usize].push(axis);
                }
            }
            ShardingSpec {
                dims: dims
                    .into_iter()
                    .map(|axes| DimSharding::by(axes, rng.between(1, 4)))
                    .collect(),
                partial: BTreeMap::new(),
            }
        };
        let (a, b) = (random_spec(&meshes[0]), random_spec(&meshes[1]));
        let from = Placement {
            mesh: &meshes[0],
            spec: &a,
        };
        let to = Placement {
            mesh: &meshes[1],
            spec: &b,
        };
        for rank in to.mesh.ranks() {
            let coords = to.mesh.coords(rank).unwrap();
            let want = b.local_ranges(&lens, to.mesh, &coords);
            let replica = source_replica(from, to, &coords);
            let mut n_same = BTreeMap::new();
            let mut expected = Vec::new();
            for sender in from.mesh.ranks() {
                let have = a.local_ranges(&lens, from.mesh, &from.mesh.coords(sender).unwrap());
                // Replicas of a shard are numbered in mesh order.
                let shard: Vec<u32> = from
                    .mesh
                    .axis_ids()
                    .filter(|&x| !a.replicates(x))
                    .map(|x| from.mesh.coords(sender).unwrap()[x.index()])
                    .collect();
                let n = n_same.entry(shard).or_insert(0u64);
                *n += 1;
                let common: Option<Vec<(u64, u64)>> = want
                    .iter()
                    .zip(&have)
                    .map(|(w, h)| {
                        let start = w.start.max(h.start);
                        let end = (w.start + w.valid).min(h.start + h.valid);
                        (start < end).then(|| (start, end - start))
                    })
                    .collect();
                if let Some((start, len)) = common
                    .filter(|_| *n - 1 == replica)
                    .map(|c| c.into_iter().unzip())
                {
                    expected.push(Tile {
                        from: sender,
                        to: rank,
                        start,
                        len,
                    });
                }
            }
            n_blocks += expected.len();
            assert_eq!(
                tiles_to(&lens, from, to, &coords),
                expected,
                "{lens:?} {from:?} {to:?}"
            );
        }
    }
    assert!(n_blocks > 10_000, "{n_blocks}");
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

#[test]
fn collectives_move_few_rows_that_pieces_fill_as_they_stand() {
    // Sixteen rows of four pieces of 2, and a row too many, and a piece that is not full.
    assert_eq!(Pieces::of(&[4, 4, 8], 2, 4, 2), None);
    let many = Pieces {
        dim: 2,
        n: 4,
        len: 2,
    };
    assert_eq!(Pieces::of(&[17, 1, 8], 2, 4, 2), Some(many));
    assert_eq!(Pieces::of(&[1, 1, 7], 2, 4, 2), Some(many));
    assert_eq!(many.shape(&[17, 1, 8]), [4, 17, 1, 2]);
    // The operand of a reduce-scatter is cut, the result of an all-gather put together.
    let axis = AxisId(0);
    let step = LayoutStep::AllGather { axis, dim: 2 };
    let parts = ([17, 1, 2], [17, 1, 8]);
    assert_eq!(step.pieces(4, &parts.0, &parts.1), [None, Some(many)]);
    let (dim, unit) = (2, 1);
    let step = LayoutStep::ReduceScatter { axis, dim, unit };
    assert_eq!(step.pieces(4, &parts.1, &parts.0), [Some(many), None]);
}
