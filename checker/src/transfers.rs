//! Transfers: what each one says it moves, and that its blocks give every receiver its whole
//! shard once.
//!
//! The blocks come from `reshard::tiles_to`, which the runtime uses; the shards they have to
//! cover, and those the senders hold, from `ranges`.
//!
//! **Every receiver.** Where ranks are few, each receiver's blocks are looked at. Where they are
//! many, one receiver of each class is: `tiles_to` makes blocks of the receiver's ranges by `ir`,
//! of the replica that `source_replica` names, and of the receiver's rank, and of nothing else
//! of its coordinates; the rank it only writes into the blocks. What is wanted of them depends on
//! the receiver's ranges by `ranges`. So the receivers that agree in both ranges and in the
//! replica have the same blocks and want the same, and one of them stands for all.

use crate::facts::Facts;
use crate::ranges::held;
use crate::report::Report;
use ir::program::{Program, Transfer};
use ir::reshard::{Placement, Tile, source_replica, tiles_to};
use ir::{LogicalMesh, ShardingSpec};
use std::collections::BTreeSet;

/// Where a transfer has no more pairs of ranks than this, every receiver is looked at.
const FEW_PAIRS: u64 = 1 << 16;

pub(crate) fn check(facts: &Facts<'_>, program: &Program, report: &mut Report) {
    let mut proved: BTreeSet<(Vec<u64>, ShardingSpec, ShardingSpec, usize, usize)> =
        BTreeSet::new();
    for (k, x) in program.transfers.iter().enumerate() {
        let place = format!("transfer {k} ({})", x.value);
        match facts.find(&x.value) {
            None => report.add(
                place.clone(),
                "transfer",
                "a value of the training graph",
                x.value.clone(),
            ),
            Some(v) => {
                let ty = facts.graph.ty(v);
                let lens = facts.lens(ty);
                if ty.dtype != x.dtype || lens != x.lens {
                    report.add(
                        place.clone(),
                        "transfer",
                        format!("{}{lens:?}", ty.dtype.name()),
                        format!("{}{:?}", x.dtype.name(), x.lens),
                    );
                }
            }
        }
        // Equal layers have equal transfers; one proof serves all of them.
        let key = (
            x.lens.clone(),
            x.from_spec.clone(),
            x.to_spec.clone(),
            x.from.index(),
            x.to.index(),
        );
        if proved.insert(key) {
            tiles(program, x, &place, report);
        }
    }
}

fn tiles(program: &Program, x: &Transfer, place: &str, report: &mut Report) {
    let (from, to) = (
        &program.roles[x.from.index()].mesh,
        &program.roles[x.to.index()].mesh,
    );
    let (senders, receivers) = (placed(from, &x.from_spec), placed(to, &x.to_spec));
    let blocks = |coords: &[u32]| tiles_to(&x.lens, senders, receivers, coords);
    let few = u64::from(from.n_devices()) * u64::from(to.n_devices()) <= FEW_PAIRS;
    for (coords, actual) in wrong(x, from, to, few, blocks) {
        report.add(
            format!("{place} to {coords:?}"),
            "tiles",
            "blocks that cover the shard once",
            actual,
        );
    }
}

fn placed<'a>(mesh: &'a LogicalMesh, spec: &'a ShardingSpec) -> Placement<'a> {
    Placement { mesh, spec }
}

/// Finds the receivers whose blocks are wrong, and what is wrong with them. Where ranks are not
/// `few`, it looks at one receiver of each class.
fn wrong(
    x: &Transfer,
    from: &LogicalMesh,
    to: &LogicalMesh,
    few: bool,
    blocks: impl Fn(&[u32]) -> Vec<Tile>,
) -> Vec<(Vec<u32>, String)> {
    let (senders, receivers) = (placed(from, &x.from_spec), placed(to, &x.to_spec));
    let (mut proved, mut found) = (BTreeSet::new(), Vec::new());
    for coords in to.ranks().filter_map(|rank| to.coords(rank)) {
        let want = ranges(x, &x.to_spec, to, &coords);
        if !few {
            let theirs = x.to_spec.local_ranges(&x.lens, to, &coords);
            let theirs: Vec<_> = theirs.iter().map(|r| (r.start, r.valid)).collect();
            let replica = source_replica(senders, receivers, &coords);
            if !proved.insert((want.clone(), theirs, replica)) {
                continue;
            }
        }
        if let Err(actual) = covers(x, from, to, &coords, &want, &blocks(&coords)) {
            found.push((coords, actual));
        }
    }
    found
}

/// The range that the rank at `coords` holds along each dim.
fn ranges(x: &Transfer, spec: &ShardingSpec, mesh: &LogicalMesh, coords: &[u32]) -> Spans {
    let dims = x.lens.iter().zip(&spec.dims);
    dims.map(|(&n, d)| held(n, d, mesh, coords)).collect()
}

/// Start and end along each dim.
type Spans = Vec<(u64, u64)>;

fn covers(
    x: &Transfer,
    from: &LogicalMesh,
    to: &LogicalMesh,
    coords: &[u32],
    want: &Spans,
    tiles: &[Tile],
) -> Result<(), String> {
    let mut cells: BTreeSet<Spans> = BTreeSet::new();
    for tile in tiles {
        let sides = tile.start.iter().zip(&tile.len);
        let span: Spans = sides.map(|(&s, &n)| (s, s.saturating_add(n))).collect();
        if tile.to != to.rank_at(coords) || span.len() != want.len() {
            return Err(format!("a block for {} of {} dims", tile.to, span.len()));
        }
        let Some(at) = from.coords(tile.from) else {
            return Err(format!("a block of {}, no sender", tile.from));
        };
        let has = ranges(x, &x.from_spec, from, &at);
        if !span.iter().zip(has).all(|(s, h)| h.0 <= s.0 && s.1 <= h.1) {
            return Err(format!("block {span:?}, which {} does not hold", tile.from));
        }
        if !cells.insert(span) {
            return Err(format!("block {:?} twice", tile.start));
        }
    }
    if want.iter().any(|w| w.0 >= w.1) {
        return match cells.is_empty() {
            true => Ok(()),
            false => Err(format!("blocks of {want:?}, which is empty")),
        };
    }
    // Blocks are cells of a grid: along each dim their sides follow each other from one end of
    // the shard to the other, and there are as many cells as the sides have combinations.
    let mut n_cells = 1usize;
    for (dim, &(start, end)) in want.iter().enumerate() {
        let sides: BTreeSet<(u64, u64)> = cells.iter().map(|c| c[dim]).collect();
        let next = |at: u64, s: &(u64, u64)| (s.0 == at && at < s.1).then_some(s.1);
        if sides.iter().try_fold(start, next) != Some(end) {
            return Err(format!("sides {sides:?} of {:?}", (start, end)));
        }
        n_cells = n_cells.saturating_mul(sides.len());
    }
    match cells.len() == n_cells {
        true => Ok(()),
        false => Err(format!("{} blocks of {n_cells} for {want:?}", cells.len())),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use ir::{Axis, AxisId, DType, DeviceMesh, DimSharding, Rank, StageId};

    fn mesh(first: u32, sizes: &[u32]) -> LogicalMesh {
        let axis = |(i, &size): (usize, &u32)| Axis {
            name: format!("a{i}"),
            size,
        };
        let devices = DeviceMesh {
            first_rank: Rank(first),
            n_devices: sizes.iter().product(),
        };
        LogicalMesh::new(devices, sizes.iter().enumerate().map(axis).collect()).unwrap()
    }

    /// Dims by their axes and unit.
    fn spec(dims: &[(&[usize], u64)]) -> ShardingSpec {
        let dim = |&(axes, unit): &(&[usize], u64)| {
            DimSharding::by(
                axes.iter().map(|&a| AxisId::new(a)).collect::<Vec<_>>(),
                unit,
            )
        };
        ShardingSpec {
            dims: dims.iter().map(dim).collect(),
            partial: Default::default(),
        }
    }

    fn transfer(lens: &[u64], from_spec: ShardingSpec, to_spec: ShardingSpec) -> Transfer {
        Transfer {
            value: "x".into(),
            lens: lens.to_vec(),
            dtype: DType::F32,
            from: StageId(0),
            to: StageId(1),
            from_spec,
            to_spec,
        }
    }

    fn right(x: &Transfer, from: &LogicalMesh, to: &LogicalMesh, coords: &[u32]) -> Vec<Tile> {
        let (senders, receivers) = (placed(from, &x.from_spec), placed(to, &x.to_spec));
        tiles_to(&x.lens, senders, receivers, coords)
    }

    /// The possible mistakes in the blocks of a shard: a length, a start, a sender, a missing
    /// block, one twice.
    const MISTAKES: [fn(&mut Vec<Tile>, &LogicalMesh); 5] = [
        |tiles, _| tiles[0].len[0] += 1,
        |tiles, _| tiles[0].start[0] += 1,
        |tiles, from| {
            let first = from.devices.first_rank.0;
            let next = (tiles[0].from.0 - first + 1) % from.n_devices();
            tiles[0].from = Rank(first + next);
        },
        |tiles, _| drop(tiles.pop()),
        |tiles, _| tiles.push(tiles[0].clone()),
    ];

    fn small() -> Vec<(Transfer, LogicalMesh, LogicalMesh)> {
        let (a, b) = (mesh(0, &[2, 3]), mesh(6, &[3, 2, 2]));
        let none: &[usize] = &[];
        let froms = [
            spec(&[(&[0], 1), (&[1], 2)]),
            spec(&[(none, 1), (&[1, 0], 1)]),
            spec(&[(&[0], 3), (none, 1)]),
        ];
        let tos = [
            spec(&[(&[0], 1), (&[1], 1)]),
            spec(&[(none, 1), (&[2], 2)]),
            spec(&[(&[2, 0], 2), (none, 1)]),
            spec(&[(none, 1), (none, 1)]),
        ];
        let mut all = Vec::new();
        for lens in [[6, 12], [7, 5], [1, 11]] {
            for from in &froms {
                for to in &tos {
                    let x = transfer(&lens, from.clone(), to.clone());
                    all.push((x, a.clone(), b.clone()));
                }
            }
        }
        all
    }

    #[test]
    fn right_blocks_are_proved() {
        for (x, from, to) in small() {
            for few in [true, false] {
                let found = wrong(&x, &from, &to, few, |c| right(&x, &from, &to, c));
                assert_eq!(found, [], "{x:?}");
            }
        }
    }

    /// A mistake in the blocks of any receiver is found where all are looked at; one that the
    /// blocks' origin can make (a function of ranges and replica) is found by classes too, at a
    /// receiver where it is.
    #[test]
    fn a_wrong_block_of_any_receiver_is_found() {
        let (mut n, mut n_members) = (0, 0);
        for (x, from, to) in small() {
            let (senders, receivers) = (placed(&from, &x.from_spec), placed(&to, &x.to_spec));
            let class = |c: &[u32]| {
                let want = ranges(&x, &x.to_spec, &to, c);
                (want, source_replica(senders, receivers, c))
            };
            for victim in to.ranks().map(|r| to.coords(r).unwrap()) {
                for mistake in MISTAKES {
                    let spoil = |hit: bool, c: &[u32]| {
                        let mut tiles = right(&x, &from, &to, c);
                        if hit && !tiles.is_empty() {
                            mistake(&mut tiles, &from);
                        }
                        tiles
                    };
                    // Another sender may hold the block as well.
                    let harmless = {
                        let tiles = spoil(true, &victim);
                        let want = ranges(&x, &x.to_spec, &to, &victim);
                        covers(&x, &from, &to, &victim, &want, &tiles).is_ok()
                    };
                    let expected: Vec<_> =
                        (!harmless).then(|| victim.clone()).into_iter().collect();
                    let found = wrong(&x, &from, &to, true, |c| spoil(c == victim, c));
                    let at: Vec<_> = found.into_iter().map(|f| f.0).collect();
                    assert_eq!(at, expected, "{x:?}");

                    let alike = |c: &[u32]| class(c) == class(&victim);
                    let all = wrong(&x, &from, &to, true, |c| spoil(alike(c), c));
                    let by_class = wrong(&x, &from, &to, false, |c| spoil(alike(c), c));
                    assert_eq!(by_class.len(), usize::from(!all.is_empty()), "{x:?}");
                    assert!(by_class.iter().all(|f| all.contains(f)), "{x:?}");
                    (n, n_members) = (n + by_class.len(), n_members + all.len());
                }
            }
        }
        assert!(
            n > 1000 && n_members > 2 * n,
            "{n} mistakes, {n_members} receivers"
        );
    }

    /// Among many ranks too, wherever the receiver stands: ranks at regular distances, which
    /// were looked at once, are no proof.
    #[test]
    fn a_wrong_block_among_many_ranks_is_found() {
        let (from, to) = (mesh(0, &[512]), mesh(512, &[64, 8]));
        let x = transfer(
            &[512, 96],
            spec(&[(&[0], 1), (&[], 1)]),
            spec(&[(&[0], 1), (&[1], 1)]),
        );
        for victim in [[0, 0], [0, 1], [17, 3], [31, 6], [63, 6], [63, 7]] {
            let blocks = |c: &[u32]| {
                let mut tiles = right(&x, &from, &to, c);
                if c == victim {
                    tiles[5].len[1] -= 1;
                }
                tiles
            };
            let found = wrong(&x, &from, &to, false, blocks);
            assert_eq!(found.len(), 1);
            assert_eq!(found[0].0, victim);
        }
    }
}
