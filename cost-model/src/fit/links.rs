//! The times of collectives and transfers of ranks that are threads.
//!
//! Their points are a rank's own work: ranks that share processors were slowed down while they
//! were measured, and the simulator slows them down again.

use super::{FitError, minimise, missing, named};
use crate::collectives::collective_time;
use ir::cluster::{Cluster, MeasuredPoint, SharedMemory};
use ir::collective::CollectiveKind;
use ir::mesh::{Axis, DeviceMesh};
use ir::{AxisId, LogicalMesh, Rank, Reduction};

/// Sets the figures of the only level, from collectives, and from transfers where there are any.
pub(super) fn links(points: &[MeasuredPoint], cluster: &mut Cluster) -> Result<(), FitError> {
    let shared = shared_memory(points, cluster, None)?;
    let sends: Vec<&MeasuredPoint> = named(points, "send").collect();
    let (latency_s, bandwidth) = match sends.is_empty() {
        // A transfer is copied in by one rank and out by another.
        true => (shared.meeting_s, shared.copy_bytes_per_s),
        false => {
            let error = |x: &[f64]| {
                let seconds = |p: &MeasuredPoint| x[0].exp() + p.size[0] as f64 / x[1].exp();
                sends
                    .iter()
                    .map(|p| (seconds(p) / p.median_s).ln().powi(2))
                    .sum()
            };
            let start = vec![1e-5f64.ln(), 1e9f64.ln()];
            let best = minimise(start, &[TIMES, RATES], &error);
            (best[0].exp(), best[1].exp())
        }
    };
    let level = &mut cluster.levels[0];
    level.latency_s = latency_s;
    level.bandwidth_bytes_per_s = bandwidth;
    level.shared_memory = Some(shared);
    Ok(())
}

/// Logarithms of the shortest and longest time that is looked for.
const TIMES: (f64, f64) = (-18.5, -4.6);
/// Logarithms of the lowest and highest rate, bytes per second.
const RATES: (f64, f64) = (13.8, 30.0);

/// Collectives that have points; all but the last one reduce.
pub(super) const KINDS: [CollectiveKind; 3] = [
    CollectiveKind::AllReduce(Reduction::Sum),
    CollectiveKind::ReduceScatter(Reduction::Sum),
    CollectiveKind::AllGather,
];

/// Figures of a shared memory that lie at an end of what is looked for, by name; a rate of
/// reducing that is `known` was not looked for.
pub(super) fn at_bound(s: &SharedMemory, known: Option<f64>) -> Vec<&'static str> {
    let figures = [
        ("meeting_s", s.meeting_s, TIMES),
        ("copy_bytes_per_s", s.copy_bytes_per_s, RATES),
        ("reduce_bytes_per_s", s.reduce_bytes_per_s, RATES),
    ];
    // The search may end short of its bounds, where little is gained on the way there.
    const NEAR: f64 = 0.01;
    let ends = |x: f64, (low, high): (f64, f64)| {
        let x = x.ln();
        x < low + NEAR || x > high - NEAR
    };
    let fitted = &figures[..if known.is_some() { 2 } else { 3 }];
    let found = fitted.iter().filter(|(_, x, b)| ends(*x, *b));
    found.map(|(name, ..)| *name).collect()
}

/// The times of collectives, fitted to points of groups that the cluster has. A rate of reducing
/// that is `known` is not fitted.
pub(super) fn shared_memory(
    points: &[MeasuredPoint],
    cluster: &Cluster,
    known: Option<f64>,
) -> Result<SharedMemory, FitError> {
    let fits = |p: &&MeasuredPoint| (2..=u64::from(cluster.devices_per_host)).contains(&p.size[1]);
    let measured: Vec<(CollectiveKind, LogicalMesh, u64, f64)> = KINDS
        .iter()
        .flat_map(|&kind| {
            let of_kind = named(points, kind.name()).filter(fits);
            of_kind.map(move |p| (kind, group(p.size[1] as u32), p.size[0], p.median_s))
        })
        .collect();
    if measured.is_empty() {
        return Err(missing("all_reduce"));
    }
    let figures = |x: &[f64]| SharedMemory {
        meeting_s: x[0].exp(),
        copy_bytes_per_s: x[1].exp(),
        reduce_bytes_per_s: x[2].exp(),
    };
    let scratch = std::cell::RefCell::new(cluster.clone());
    let error = |x: &[f64]| {
        let mut candidate = scratch.borrow_mut();
        candidate.levels[0].shared_memory = Some(figures(x));
        measured
            .iter()
            .map(|(kind, mesh, bytes, t)| {
                (collective_time(&candidate, mesh, &[AxisId(0)], *kind, *bytes).0 / t)
                    .ln()
                    .powi(2)
            })
            .sum()
    };
    let (reduce, rates) = match known.map(f64::ln) {
        Some(x) => (x, (x, x)),
        None => (1e9f64.ln(), RATES),
    };
    let start = vec![1e-5f64.ln(), 1e9f64.ln(), reduce];
    Ok(figures(&minimise(start, &[TIMES, RATES, rates], &error)))
}

/// The first `n` ranks as one axis.
fn group(n: u32) -> LogicalMesh {
    LogicalMesh {
        devices: DeviceMesh {
            first_rank: Rank(0),
            n_devices: n,
        },
        axes: vec![Axis {
            name: "group".into(),
            size: n,
        }],
    }
}
