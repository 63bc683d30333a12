//! A cluster file from a calibration of one machine.
//!
//! Every figure is fitted to the points that `runtime::calibrate` names (its header says what
//! their sizes mean); nothing is looked up. Where a figure is a rate over operations of several
//! kinds, totals are divided: the sum of the work by the sum of the times, so that what takes
//! long counts most. Half sizes and link figures minimise the squared logarithmic error, by
//! pattern search from a fixed start within bounds: the same points give the same cluster.
//!
//! The peak is the best matmul rate that was measured: the machine has shown no better, and
//! efficiency and MFU are relative to it. Kernels compute in f32, so the 16-bit types have the
//! f32 peak; what converting their elements costs is a figure of its own, the time that points
//! in such a type take beyond what the same work takes in f32.

use crate::collectives::collective_time;
use crate::compute::work_time;
use ir::cluster::{CLUSTER_VERSION, Cluster, Device, HalfSize, Level, MeasuredPoint, Pool};
use ir::collective::CollectiveKind;
use ir::mesh::{Axis, DeviceMesh};
use ir::op::Work;
use ir::{AxisId, Bytes, DType, LogicalMesh, Rank, ReduceKind};
use std::collections::BTreeMap;

/// What is known of the machine without measuring.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// Processors.
    pub cores: u32,
    /// Memory that all ranks together may use.
    pub memory_bytes: Bytes,
    /// Ranks that the calibration was made for.
    pub n_ranks: u32,
}

/// Why points do not make a cluster.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum FitError {
    /// A kind of points is missing.
    #[error("the calibration has no usable points of `{what}`")]
    Missing {
        /// What the points are called.
        what: String,
    },
    /// A point has too few sizes, or a time that is not positive.
    #[error("calibration point {index}, `{what}`: {problem}")]
    Point {
        /// Its place in the list.
        index: usize,
        /// What it is called.
        what: String,
        /// What is wrong.
        problem: String,
    },
    /// The fitted figures do not make sense together.
    #[error("the fitted cluster has problems: {}", problems.join("; "))]
    Cluster {
        /// `Cluster::problems`.
        problems: Vec<String>,
    },
}

/// Bytes of a rank beyond its arena and the copies that `memory::scratch_bytes` counts.
const RESERVED_BYTES: u64 = 1 << 20;
/// Vector work of fewer FLOPs per byte than this is taken to be limited by memory.
const MEMORY_BOUND_FLOPS_PER_BYTE: f64 = 0.25;
/// Types that kernels convert to f32 and back.
const HALVES: [DType; 2] = [DType::Bf16, DType::F16];
/// No half size is larger; sizes that are measured are not much larger.
const MAX_HALF_SIZE: f64 = 4096.0;

/// The cluster that explains the points best.
///
/// Fails when points are malformed, or there are none of matmuls in f32, of vector work, of
/// copies, or, with several ranks, of collectives.
pub fn fit(points: &[MeasuredPoint], machine: &Machine) -> Result<Cluster, FitError> {
    check(points)?;
    let n_ranks = machine.n_ranks.max(1);
    let launch_s = median(named(points, "launch").map(|p| p.median_s).collect()).unwrap_or(0.0);
    let busy = |p: &MeasuredPoint| (p.median_s - launch_s).max(0.1 * p.median_s);
    let (bandwidth, memory_efficiency) = memory(points, &busy)?;
    let (flops, seconds) = vectors(points)
        .filter(|p| !memory_bound(p))
        .fold((0.0, 0.0), |(f, s), p| (f + p.size[0] as f64, s + busy(p)));
    let vector_rate = positive(flops / seconds).ok_or_else(|| missing("vector ..."))?;
    let matmul = matmul(points, &busy)?;
    let mut cluster = Cluster {
        version: CLUSTER_VERSION,
        name: format!("this machine, {n_ranks} ranks"),
        n_hosts: 1,
        devices_per_host: n_ranks,
        device: Device {
            name: "CPU rank".into(),
            peak_flops_per_s: BTreeMap::new(),
            matmul_efficiency: BTreeMap::new(),
            matmul_half_size: matmul.half,
            attention_efficiency: 1.0,
            vector_flops_per_s: vector_rate,
            memory_bytes: machine.memory_bytes,
            memory_reserved_bytes: Bytes(RESERVED_BYTES),
            memory_bandwidth_bytes_per_s: bandwidth,
            memory_efficiency,
            launch_s,
            conversion_s_per_element: BTreeMap::new(),
            multiprocessors: 0,
            sustained_share: 1.0,
            power_limit_w: None,
            boost_clock_hz: None,
        },
        levels: Vec::new(),
        pool: Some(Pool {
            devices: n_ranks,
            compute_devices: compute_devices(points, machine),
            memory_bytes: machine.memory_bytes,
        }),
        software: None,
        sources: BTreeMap::new(),
        measured: points.to_vec(),
    };
    for dtype in HALVES {
        if let Some(seconds) = conversion(points, dtype, &cluster) {
            cluster
                .device
                .conversion_s_per_element
                .insert(dtype, seconds);
        }
    }
    let conversions = cluster.device.conversion_s_per_element.clone();
    for (dtype, efficiency) in efficiencies(points, &matmul, &conversions, &busy) {
        cluster.device.peak_flops_per_s.insert(dtype, matmul.best);
        cluster.device.matmul_efficiency.insert(dtype, efficiency);
    }
    cluster.device.attention_efficiency = attention(points, &matmul, vector_rate, &busy);
    if n_ranks > 1 {
        cluster.levels.push(Level {
            name: "shared-memory".into(),
            devices: n_ranks,
            latency_s: 1e-5,
            bandwidth_bytes_per_s: bandwidth,
            efficiency: 1.0,
            half_bytes: 0.0,
            ..Level::default()
        });
        links(points, &mut cluster)?;
    }
    cluster.sources = sources(points, n_ranks);
    let problems = cluster.problems();
    if problems.is_empty() {
        Ok(cluster)
    } else {
        Err(FitError::Cluster { problems })
    }
}

fn check(points: &[MeasuredPoint]) -> Result<(), FitError> {
    for (index, p) in points.iter().enumerate() {
        let needed = match p.what.split(' ').next().unwrap_or_default() {
            "matmul" if p.what.ends_with("together") => 4,
            "matmul" | "attention" | "all_reduce" | "all_gather" | "reduce_scatter" => 3,
            "convert" => 3,
            "vector" => 2,
            "copy" => 1,
            _ => 0,
        };
        let error = |problem: String| {
            Err(FitError::Point {
                index,
                what: p.what.clone(),
                problem,
            })
        };
        if p.size.len() < needed || p.size.contains(&0) {
            return error(format!(
                "size {:?}, expected {needed} positive numbers",
                p.size
            ));
        }
        if positive(p.median_s).is_none() {
            return error(format!("{} s, expected a positive number", p.median_s));
        }
    }
    Ok(())
}

fn named<'a>(
    points: &'a [MeasuredPoint],
    what: &'a str,
) -> impl Iterator<Item = &'a MeasuredPoint> {
    points.iter().filter(move |p| p.what == what)
}

fn vectors(points: &[MeasuredPoint]) -> impl Iterator<Item = &MeasuredPoint> {
    points.iter().filter(|p| p.what.starts_with("vector "))
}

fn memory_bound(p: &MeasuredPoint) -> bool {
    (p.size[0] as f64) < MEMORY_BOUND_FLOPS_PER_BYTE * p.size[1] as f64
}

fn missing(what: &str) -> FitError {
    FitError::Missing { what: what.into() }
}

fn positive(x: f64) -> Option<f64> {
    (x.is_finite() && x > 0.0).then_some(x)
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

fn geometric_mean(values: &[f64]) -> Option<f64> {
    let n = values.len() as f64;
    positive((values.iter().map(|v| v.ln()).sum::<f64>() / n).exp())
}

/// The best rate of copies and memory-bound kernels, and their mean share of it. Operands of
/// all sizes count: those that caches hold and those that they do not.
fn memory(
    points: &[MeasuredPoint],
    busy: &dyn Fn(&MeasuredPoint) -> f64,
) -> Result<(f64, f64), FitError> {
    let copies = named(points, "copy").map(|p| 2.0 * p.size[0] as f64 / busy(p));
    let kernels = vectors(points)
        .filter(|p| memory_bound(p))
        .map(|p| p.size[1] as f64 / busy(p));
    let rates: Vec<f64> = copies.chain(kernels).collect();
    let best = rates.iter().copied().fold(0.0, f64::max);
    let mean = geometric_mean(&rates).ok_or_else(|| missing("copy"))?;
    Ok((best, (mean / best).min(1.0)))
}

struct Matmul {
    /// The best rate measured.
    best: f64,
    /// The rate that very large matmuls would reach; not above `best`.
    rate: f64,
    half: HalfSize,
}

impl Matmul {
    fn time(&self, p: &MeasuredPoint) -> f64 {
        let share = |x: u64, half: f64| x as f64 / (x as f64 + half);
        flops(p)
            / (self.rate
                * share(p.size[0], self.half.m)
                * share(p.size[1], self.half.n)
                * share(p.size[2], self.half.k))
    }
}

fn flops(p: &MeasuredPoint) -> f64 {
    p.size[..3].iter().fold(2.0, |f, &x| f * x as f64)
}

fn matmul(
    points: &[MeasuredPoint],
    busy: &dyn Fn(&MeasuredPoint) -> f64,
) -> Result<Matmul, FitError> {
    let measured: Vec<(&MeasuredPoint, f64)> =
        named(points, "matmul f32").map(|p| (p, busy(p))).collect();
    let best = measured
        .iter()
        .map(|(p, t)| flops(p) / t)
        .fold(0.0, f64::max);
    positive(best).ok_or_else(|| missing("matmul f32"))?;
    let of = |x: &[f64]| Matmul {
        best,
        rate: best * x[0].exp(),
        half: HalfSize {
            m: x[1].exp_m1(),
            n: x[2].exp_m1(),
            k: x[3].exp_m1(),
        },
    };
    let error = |x: &[f64]| {
        let model = of(x);
        measured
            .iter()
            .map(|(p, t)| (model.time(p) / t).ln().powi(2))
            .sum()
    };
    let largest = MAX_HALF_SIZE.ln_1p();
    let bounds = [
        (0.25f64.ln(), 0.0),
        (0.0, largest),
        (0.0, largest),
        (0.0, largest),
    ];
    Ok(of(&minimise(
        vec![0.9f64.ln(), 2.0, 2.0, 2.0],
        &bounds,
        &error,
    )))
}

/// Seconds per element converted: what kernels in a 16-bit type take beyond the time of their
/// work in f32 (bytes as stored), in total, over the elements that they convert.
fn conversion(points: &[MeasuredPoint], dtype: DType, cluster: &Cluster) -> Option<f64> {
    let what = format!("convert {}", dtype.name());
    let (seconds, elements) = named(points, &what).fold((0.0, 0.0), |(s, n), p| {
        let work = Work {
            vector_flops: p.size[0] as f64,
            bytes: p.size[1],
            ..Work::default()
        };
        let modelled = work_time(cluster, DType::F32, &work).0;
        (s + p.median_s - modelled, n + p.size[2] as f64)
    });
    (elements > 0.0).then(|| (seconds / elements).max(0.0))
}

/// Share of the best rate per element type; types that were not measured have none.
///
/// A 16-bit type is compared with f32 at the same sizes, where there are any, without the time
/// of its conversions: both have the same forms of matmul, and these differ much.
fn efficiencies(
    points: &[MeasuredPoint],
    matmul: &Matmul,
    conversions: &BTreeMap<DType, f64>,
    busy: &dyn Fn(&MeasuredPoint) -> f64,
) -> Vec<(DType, f64)> {
    let mut all = vec![(DType::F32, matmul.rate / matmul.best)];
    for dtype in HALVES {
        let what = format!("matmul {}", dtype.name());
        let per_element = conversions.get(&dtype).copied().unwrap_or(0.0);
        let in_f32 = |p: &MeasuredPoint| {
            let same: Vec<f64> = named(points, "matmul f32")
                .filter(|q| q.size == p.size)
                .map(busy)
                .collect();
            geometric_mean(&same).unwrap_or_else(|| matmul.time(p))
        };
        let ratios: Vec<f64> = named(points, &what)
            .map(|p| {
                let [m, n, k] = [p.size[0] as f64, p.size[1] as f64, p.size[2] as f64];
                let converted = per_element * (m * k + k * n + m * n);
                // A rough count, as of attention: a tenth of the time is left at least.
                in_f32(p) / (busy(p) - converted).max(0.1 * busy(p))
            })
            .collect();
        if let Some(ratio) = geometric_mean(&ratios) {
            all.push((dtype, (ratio * matmul.rate / matmul.best).min(1.0)));
        }
    }
    all
}

/// What is left of the time of attention after its vector work, over what its products would
/// take as a matmul; half of the scores are computed.
fn attention(
    points: &[MeasuredPoint],
    matmul: &Matmul,
    vector_rate: f64,
    busy: &dyn Fn(&MeasuredPoint) -> f64,
) -> f64 {
    let totals = named(points, "attention f32").fold((0.0, 0.0, 0.0), |(f, t, all), p| {
        let vector = p.size[1] as f64 / vector_rate;
        (
            f + 0.5 * p.size[0] as f64,
            t + busy(p) - vector,
            all + busy(p),
        )
    });
    // The vector work is a rough count: at least a tenth of the time is left to the products.
    let seconds = totals.1.max(0.1 * totals.2);
    positive(totals.0 / matmul.rate / seconds).map_or(1.0, |e| e.clamp(0.01, 1.0))
}

/// How many ranks' worth of work gets done when all work at the same time.
fn compute_devices(points: &[MeasuredPoint], machine: &Machine) -> f64 {
    let times = |ranks: u64| -> Vec<f64> {
        named(points, "matmul f32 together")
            .filter(|p| p.size[3] == ranks)
            .map(|p| p.median_s)
            .collect()
    };
    let n = machine.n_ranks.max(1);
    let guess = f64::from(machine.cores.clamp(1, n));
    match (
        geometric_mean(&times(1)),
        geometric_mean(&times(u64::from(n))),
    ) {
        (Some(alone), Some(together)) => (f64::from(n) * alone / together).clamp(0.5, f64::from(n)),
        _ => guess,
    }
}

/// Latency and bandwidth of the only level, from collectives. Ranks that share processors
/// were slowed down while they were measured; the simulator slows them down again, so that
/// factor is taken out.
fn links(points: &[MeasuredPoint], cluster: &mut Cluster) -> Result<(), FitError> {
    let kinds = [
        CollectiveKind::AllReduce(ReduceKind::Sum),
        CollectiveKind::ReduceScatter(ReduceKind::Sum),
        CollectiveKind::AllGather,
    ];
    let compute = cluster.pool.map_or(f64::INFINITY, |p| p.compute_devices);
    let fits = |p: &&MeasuredPoint| (2..=u64::from(cluster.devices_per_host)).contains(&p.size[1]);
    let measured: Vec<(CollectiveKind, LogicalMesh, u64, f64)> = kinds
        .iter()
        .flat_map(|&kind| {
            named(points, kind.name()).filter(fits).map(move |p| {
                (
                    kind,
                    group(p.size[1] as u32),
                    p.size[0],
                    p.median_s / (p.size[2] as f64 / compute).max(1.0),
                )
            })
        })
        .collect();
    if measured.is_empty() {
        return Err(missing("all_reduce"));
    }
    let with = |cluster: &mut Cluster, x: &[f64]| {
        (
            cluster.levels[0].latency_s,
            cluster.levels[0].bandwidth_bytes_per_s,
        ) = (x[0].exp(), x[1].exp())
    };
    let scratch = std::cell::RefCell::new(cluster.clone());
    let error = |x: &[f64]| {
        let mut candidate = scratch.borrow_mut();
        with(&mut candidate, x);
        measured
            .iter()
            .map(|(kind, mesh, bytes, t)| {
                (collective_time(&candidate, mesh, &[AxisId(0)], *kind, *bytes).0 / t)
                    .ln()
                    .powi(2)
            })
            .sum()
    };
    let bounds = [(1e-8f64.ln(), 1e-2f64.ln()), (1e6f64.ln(), 1e13f64.ln())];
    let best = minimise(vec![1e-5f64.ln(), 1e9f64.ln()], &bounds, &error);
    with(cluster, &best);
    Ok(())
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

/// Pattern search (Hooke & Jeeves 1961): steps along each coordinate, then along the last
/// gain; the step halves when nothing gains. Stays within `bounds`.
fn minimise(start: Vec<f64>, bounds: &[(f64, f64)], f: &dyn Fn(&[f64]) -> f64) -> Vec<f64> {
    const SMALLEST_STEP: f64 = 1e-7;
    const MAX_ROUNDS: usize = 10_000;
    let clamp = |x: &mut [f64]| {
        x.iter_mut()
            .zip(bounds)
            .for_each(|(x, b)| *x = x.clamp(b.0, b.1))
    };
    let explore = |from: &[f64], step: f64| {
        let (mut at, mut value) = (from.to_vec(), f(from));
        for i in 0..at.len() {
            for by in [step, -step] {
                let mut next = at.clone();
                next[i] += by;
                clamp(&mut next);
                let there = f(&next);
                if there < value {
                    (at, value) = (next, there);
                    break;
                }
            }
        }
        (at, value)
    };
    let (mut best, mut step) = (start, 1.0);
    clamp(&mut best);
    let mut value = f(&best);
    for _ in 0..MAX_ROUNDS {
        let (at, there) = explore(&best, step);
        if there < value {
            let mut beyond: Vec<f64> = at.iter().zip(&best).map(|(a, b)| 2.0 * a - b).collect();
            clamp(&mut beyond);
            let (further, further_value) = explore(&beyond, step);
            (best, value) = if further_value < there {
                (further, further_value)
            } else {
                (at, there)
            };
        } else if step > SMALLEST_STEP {
            step *= 0.5;
        } else {
            break;
        }
    }
    best
}

fn sources(points: &[MeasuredPoint], n_ranks: u32) -> BTreeMap<String, String> {
    let mut sources = BTreeMap::new();
    let mut add = |key: &str, what: &str, how: &str| {
        // A name, or the first word of several.
        let named = |p: &&MeasuredPoint| {
            p.what == what || p.what.split_once(' ').is_some_and(|(w, _)| w == what)
        };
        let used: Vec<&MeasuredPoint> = points.iter().filter(named).collect();
        let n = used.iter().map(|p| p.n).min().unwrap_or(0);
        sources.insert(
            key.to_string(),
            format!(
                "calibrate: {how} {} points of `{what}`, each the median of {n} or more",
                used.len()
            ),
        );
    };
    add("device.peak_flops_per_s", "matmul f32", "best rate of");
    add("device.matmul_efficiency", "matmul f32", "fitted to");
    for dtype in HALVES.map(DType::name) {
        let matmuls = format!("matmul {dtype}");
        if points.iter().any(|p| p.what == matmuls) {
            let how = format!("kernels compute {dtype} in f32, so as f32: best rate of");
            add(
                &format!("device.peak_flops_per_s.{dtype}"),
                "matmul f32",
                &how,
            );
            let how = "f32's, times the mean ratio to f32 at the same sizes, conversions apart, of";
            add(&format!("device.matmul_efficiency.{dtype}"), &matmuls, how);
        }
        let converts = format!("convert {dtype}");
        if points.iter().any(|p| p.what == converts) {
            let key = format!("device.conversion_s_per_element.{dtype}");
            let how = "time beyond that of the same work in f32 over elements converted, of";
            add(&key, &converts, how);
        }
    }
    add("device.matmul_half_size", "matmul f32", "fitted to");
    add(
        "device.attention_efficiency",
        "attention",
        "total work over total time of",
    );
    add(
        "device.vector_flops_per_s",
        "vector",
        "total work over total time of those of at least 1/4 FLOP per byte among",
    );
    add(
        "device.memory_bandwidth_bytes_per_s",
        "copy",
        "best rate of",
    );
    add(
        "device.memory_efficiency",
        "copy",
        "mean share of the best rate over memory-bound kernels and",
    );
    add("device.launch_s", "launch", "median of");
    add(
        "pool.compute_devices",
        "matmul f32 together",
        "time alone over time together of",
    );
    if n_ranks > 1 {
        add(
            "levels.shared-memory.latency_s",
            "all_reduce",
            "fitted to reduce_scatter, all_gather and",
        );
        add(
            "levels.shared-memory.bandwidth_bytes_per_s",
            "all_reduce",
            "fitted to reduce_scatter, all_gather and",
        );
        sources.insert(
            "levels.shared-memory".into(),
            "one machine: efficiency is part of the bandwidth, start-up part of the latency".into(),
        );
    }
    sources.insert(
        "devices_per_host".into(),
        "chosen: ranks that were calibrated".into(),
    );
    sources.insert("pool".into(), "all ranks share one machine".into());
    sources.insert(
        "device.memory_bytes".into(),
        "memory that the ranks may use together; each gets its share of the pool".into(),
    );
    sources.insert(
        "device.memory_reserved_bytes".into(),
        "assumption: stacks and bookkeeping of a rank, 1 MiB".into(),
    );
    sources
}

#[cfg(test)]
mod tests;
