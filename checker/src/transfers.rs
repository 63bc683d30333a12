//! Transfers: what each one says it moves, and that its blocks give every receiver its whole
//! shard once.
//!
//! The blocks come from `reshard::tiles_to`, which the runtime uses; the shards they have to
//! cover, and those the senders hold, from `ranges`.

use crate::facts::Facts;
use crate::ranges::held;
use crate::report::Report;
use ir::program::{Program, Transfer};
use ir::reshard::{Placement, Tile, tiles_to};
use ir::{LogicalMesh, ShardingSpec};
use std::collections::BTreeSet;

/// Pairs of ranks that are looked at in one transfer; with more, receivers are sampled.
const MAX_PAIRS: u64 = 1 << 16;

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
    let senders = Placement {
        mesh: from,
        spec: &x.from_spec,
    };
    let receivers = Placement {
        mesh: to,
        spec: &x.to_spec,
    };
    for coords in sample(to, u64::from(from.n_devices())) {
        let tiles = tiles_to(&x.lens, senders, receivers, &coords);
        if let Err(actual) = covers(x, from, to, &coords, &tiles) {
            report.add(
                format!("{place} to {coords:?}"),
                "tiles",
                "blocks that cover the shard once",
                actual,
            );
        }
    }
}

/// Every receiver of a small mesh; of a large one the corners, the middle and ranks at
/// regular distances, as many as the budget allows.
fn sample(mesh: &LogicalMesh, n_senders: u64) -> Vec<Vec<u32>> {
    let n = u64::from(mesh.n_devices());
    let budget = (MAX_PAIRS / n_senders.max(1)).clamp(3, n.max(3));
    let picked: BTreeSet<u64> = match n <= budget {
        true => (0..n).collect(),
        false => (0..budget).map(|k| k * (n - 1) / (budget - 1)).collect(),
    };
    let first = mesh.devices.first_rank.0;
    picked
        .iter()
        .filter_map(|&k| mesh.coords(ir::Rank(first + u32::try_from(k).ok()?)))
        .collect()
}

fn covers(
    x: &Transfer,
    from: &LogicalMesh,
    to: &LogicalMesh,
    coords: &[u32],
    tiles: &[Tile],
) -> Result<(), String> {
    let want: Vec<(u64, u64)> = x
        .lens
        .iter()
        .zip(&x.to_spec.dims)
        .map(|(&n, d)| held(n, d, to, coords))
        .collect();
    let volume = |spans: &[(u64, u64)]| {
        spans.iter().fold(1u128, |v, s| {
            v.saturating_mul(u128::from(s.1.saturating_sub(s.0)))
        })
    };
    let spans: Vec<Vec<(u64, u64)>> = tiles
        .iter()
        .map(|t| {
            t.start
                .iter()
                .zip(&t.len)
                .map(|(&s, &n)| (s, s.saturating_add(n)))
                .collect()
        })
        .collect();
    for (tile, span) in tiles.iter().zip(&spans) {
        if Some(tile.to) != Some(to.rank_at(coords)) || span.len() != want.len() {
            return Err(format!("a block for {} of {} dims", tile.to, span.len()));
        }
        if !span
            .iter()
            .zip(&want)
            .all(|(s, w)| w.0 <= s.0 && s.0 < s.1 && s.1 <= w.1)
        {
            return Err(format!("block {span:?} outside {want:?}"));
        }
        let Some(at) = from.coords(tile.from) else {
            return Err(format!("a block of {}, no sender", tile.from));
        };
        let has = x
            .lens
            .iter()
            .zip(&x.from_spec.dims)
            .map(|(&n, d)| held(n, d, from, &at));
        if !span.iter().zip(has).all(|(s, h)| h.0 <= s.0 && s.1 <= h.1) {
            return Err(format!("block {span:?}, which {} does not hold", tile.from));
        }
    }
    if disjoint(&spans) && spans.iter().map(|s| volume(s)).sum::<u128>() == volume(&want) {
        return Ok(());
    }
    Err(format!("blocks {spans:?} of {want:?}"))
}

/// True when no two blocks meet.
fn disjoint(spans: &[Vec<(u64, u64)>]) -> bool {
    spans.iter().enumerate().all(|(i, a)| {
        spans[..i]
            .iter()
            .all(|b| a.iter().zip(b).any(|(s, t)| s.1 <= t.0 || t.1 <= s.0))
    })
}
