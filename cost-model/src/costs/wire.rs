//! Time of stage-to-stage transfers, from the blocks that `ir::reshard::tiles_to` gives.
//!
//! A transfer takes as long as its most loaded rank, or as the most loaded port where ranks
//! share one. For meshes of up to [`EXACT_PAIRS`] pairs of ranks all blocks are counted. For
//! larger ones a few receivers (the first, the last, and the first one's neighbour along each
//! axis) stand for all, and what the senders send is taken to be spread evenly over those
//! that `tiles_to` chooses: of each shard a replica for every receiver that wants a part of it,
//! as far as there are replicas.

use crate::SimError;
use crate::collectives::message_rate;
use ir::cluster::Cluster;
use ir::program::{Program, Transfer};
use ir::reshard::{Placement, Tile, tiles_to};
use ir::{LogicalMesh, ShardingSpec, TransferId};
use std::collections::{BTreeMap, HashMap};

/// Time of one transfer, apart in what overlaps and what adds up when several transfers
/// proceed together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Wire {
    /// Latency and start-up, `latency + half_bytes / bandwidth` of the slowest link used.
    pub fixed_s: f64,
    /// Bytes of the most loaded rank over its links.
    pub moving_s: f64,
}

/// Pairs of ranks up to which all blocks are counted.
const EXACT_PAIRS: u64 = 4096;

/// Time of every transfer of a program.
pub fn wires(program: &Program, cluster: &Cluster) -> Result<Vec<Wire>, SimError> {
    let mut known = HashMap::new();
    let mut wires = Vec::with_capacity(program.transfers.len());
    for (i, transfer) in program.transfers.iter().enumerate() {
        let error = |problem: &str| SimError::Transfer {
            transfer: TransferId::new(i),
            buffer: None,
            problem: problem.into(),
        };
        let mesh = |stage: ir::StageId| {
            program
                .roles
                .get(stage.index())
                .map(|r| &r.mesh)
                .ok_or_else(|| error("a side is not a stage"))
        };
        let (from, to) = (mesh(transfer.from)?, mesh(transfer.to)?);
        let fits = |s: &ShardingSpec, m: &LogicalMesh| {
            s.dims.len() == transfer.lens.len() && s.problems(m).is_empty() && s.partial.is_empty()
        };
        if !fits(&transfer.from_spec, from) || !fits(&transfer.to_spec, to) {
            return Err(error("a spec does not fit its mesh or is partial"));
        }
        let wire = *known
            .entry(question(cluster, transfer, from, to))
            .or_insert_with(|| wire(cluster, transfer, from, to));
        wires.push(wire);
    }
    Ok(wires)
}

type Question<'a> = (
    Vec<u32>,
    Vec<u32>,
    &'a ShardingSpec,
    &'a ShardingSpec,
    &'a [u64],
    u64,
    u32,
    i64,
);

/// The key of a wire's time: shapes, and where the meshes stand to the links.
fn question<'a>(
    cluster: &Cluster,
    t: &'a Transfer,
    from: &LogicalMesh,
    to: &LogicalMesh,
) -> Question<'a> {
    let sizes = |m: &LogicalMesh| m.axes.iter().map(|a| a.size).collect();
    let period = cluster
        .levels
        .iter()
        .rev()
        .nth(1)
        .map_or(1, |l| l.devices.max(1));
    let (a, b) = (from.devices.first_rank.0, to.devices.first_rank.0);
    (
        sizes(from),
        sizes(to),
        &t.from_spec,
        &t.to_spec,
        &t.lens,
        t.dtype.bytes(),
        match cluster.is_equal() {
            true => a % period,
            false => a,
        },
        i64::from(b) - i64::from(a),
    )
}

fn wire(cluster: &Cluster, t: &Transfer, from: &LogicalMesh, to: &LogicalMesh) -> Wire {
    let (source, target) = (
        Placement {
            mesh: from,
            spec: &t.from_spec,
        },
        Placement {
            mesh: to,
            spec: &t.to_spec,
        },
    );
    let blocks = |coords: &[u32]| tiles_to(&t.lens, source, target, coords);
    if u64::from(from.n_devices()) * u64::from(to.n_devices()) <= EXACT_PAIRS {
        let tiles: Vec<Tile> = to
            .ranks()
            .filter_map(|r| to.coords(r))
            .flat_map(|c| blocks(&c))
            .collect();
        return worst(cluster, t.dtype.bytes(), &tiles, false);
    }
    let mut worst_received = Wire::default();
    for coords in representatives(to) {
        let received = worst(cluster, t.dtype.bytes(), &blocks(&coords), true);
        worst_received.fixed_s = worst_received.fixed_s.max(received.fixed_s);
        worst_received.moving_s = worst_received.moving_s.max(received.moving_s);
    }
    let replicas = |p: Placement<'_>| -> u64 {
        p.mesh
            .axis_ids()
            .filter(|&a| p.spec.replicates(a))
            .map(|a| p.mesh.size(a))
            .product()
    };
    let shards = u64::from(from.n_devices()) / replicas(source);
    let receivers = replicas(target).max(u64::from(to.n_devices()) / shards);
    let senders = shards * replicas(source).min(receivers);
    let fan_out = f64::from(to.n_devices()) / senders as f64;
    Wire {
        moving_s: worst_received.moving_s * fan_out.max(1.0),
        ..worst_received
    }
}

/// The time of the most loaded rank or shared port to send or receive all its blocks; one rank's
/// blocks that stand for all load a port as often as it has users.
fn worst(cluster: &Cluster, element_bytes: u64, tiles: &[Tile], stands_for_all: bool) -> Wire {
    // By direction, devices of the port (one: the rank itself), and the port's number.
    let mut loads: BTreeMap<(bool, u32, u32), f64> = BTreeMap::new();
    let mut fixed_s = 0.0f64;
    for tile in tiles {
        let Some(level) = cluster
            .level_between(tile.from.0, tile.to.0)
            .filter(|_| tile.from != tile.to)
        else {
            continue;
        };
        let rate = message_rate(&level);
        let bytes = tile
            .len
            .iter()
            .fold(element_bytes, |a, &b| a.saturating_mul(b));
        fixed_s = fixed_s.max(level.latency_s + level.half_bytes / rate);
        for (sends, rank) in [(true, tile.from.0), (false, tile.to.0)] {
            *loads.entry((sends, 1, rank)).or_default() += bytes as f64 / rate;
            let users = level.devices_per_port.max(1);
            if users > 1 {
                let port = (sends, users, cluster.port(rank, users));
                let times = if stands_for_all {
                    f64::from(users)
                } else {
                    1.0
                };
                *loads.entry(port).or_default() += times * bytes as f64 / rate;
            }
        }
    }
    Wire {
        fixed_s,
        moving_s: loads.values().copied().fold(0.0, f64::max),
    }
}

/// The first rank, its neighbour along each axis, and the last rank.
fn representatives(mesh: &LogicalMesh) -> Vec<Vec<u32>> {
    let first = vec![0; mesh.axes.len()];
    let mut all = vec![first.clone()];
    for (i, axis) in mesh.axes.iter().enumerate().filter(|(_, a)| a.size > 1) {
        let mut next = first.clone();
        next[i] = 1.min(axis.size - 1);
        all.push(next);
    }
    all.push(mesh.axes.iter().map(|a| a.size - 1).collect());
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::mesh::{Axis, DeviceMesh};
    use ir::sharding::DimSharding;
    use ir::{AxisId, DType, Rank, StageId};

    fn mesh(first: u32) -> LogicalMesh {
        let axis = |name: &str, size| Axis {
            name: name.into(),
            size,
        };
        let devices = DeviceMesh {
            first_rank: Rank(first),
            n_devices: 128,
        };
        LogicalMesh::new(devices, vec![axis("data", 16), axis("tensor", 8)]).unwrap()
    }

    /// 16 samples over data; the other dim whole or over tensor.
    fn spec(second: &[u32]) -> ShardingSpec {
        let dim = |axes: &[u32]| DimSharding {
            axes: axes.iter().map(|&a| AxisId(a)).collect(),
            unit: 1,
            turns: 0,
        };
        ShardingSpec {
            dims: [dim(&[0]), dim(second)].into_iter().collect(),
            partial: Default::default(),
        }
    }

    #[test]
    fn a_few_receivers_stand_for_all() {
        let mut cluster = crate::testing::cluster(256);
        cluster.levels[0].devices_per_port = 2;
        let (from, to) = (mesh(0), mesh(128));
        for (a, b) in [(&[][..], &[][..]), (&[], &[1]), (&[1], &[]), (&[1], &[1])] {
            let transfer = Transfer {
                value: "x".into(),
                from: StageId(0),
                to: StageId(1),
                lens: vec![16, 8000],
                dtype: DType::F32,
                from_spec: spec(a),
                to_spec: spec(b),
            };
            let few = wire(&cluster, &transfer, &from, &to);
            let place = |mesh, spec| Placement { mesh, spec };
            let (source, target) = (
                place(&from, &transfer.from_spec),
                place(&to, &transfer.to_spec),
            );
            let tiles = to.ranks().filter_map(|r| to.coords(r));
            let tiles: Vec<Tile> = tiles
                .flat_map(|c| tiles_to(&transfer.lens, source, target, &c))
                .collect();
            let all = worst(&cluster, 4, &tiles, false);
            assert!(
                (few.moving_s - all.moving_s).abs() < 1e-12,
                "{a:?} to {b:?}: {} is not {}",
                few.moving_s,
                all.moving_s
            );
        }
    }
}
