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

mod figures;
mod kernels;
mod links;
mod matmul;
mod minimise;
mod refine;
mod run_points;
mod sources;

pub use figures::{Change, changes};
pub use refine::{AtEnd, Kept, Refinement, refine};
pub use run_points::points_of_run;

use crate::compute::work_time;
use ir::cluster::{CLUSTER_VERSION, Cluster, Device, Level, MeasuredPoint, Pool};
use ir::op::Work;
use ir::storage::Storage;
use ir::{Bytes, DType};
use kernels::kernels;
use links::links;
use matmul::{Matmul, matmul};
use minimise::minimise;
use sources::sources;
use std::collections::BTreeMap;

/// The facts of the machine that need no measuring.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// Processors.
    pub cores: u32,
    /// Memory that all ranks together may use.
    pub memory_bytes: Bytes,
    /// Ranks that the calibration was made for.
    pub n_ranks: u32,
    /// Query rows that the attention kernels compute at once.
    pub attention_block_rows: u32,
}

/// Why points do not make a cluster.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum FitError {
    /// A kind of points is missing.
    #[error("the calibration has no usable points of `{what}`")]
    Missing {
        /// The name of the points.
        what: String,
    },
    /// A point has too few sizes, or a time that is not positive.
    #[error("calibration point {index}, `{what}`: {problem}")]
    Point {
        /// Its place in the list.
        index: usize,
        /// Its name.
        what: String,
        /// The problem.
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
    let busy = |p: &MeasuredPoint| busy_time(p, launch_s);
    let (bandwidth, memory_efficiency) = memory(points, &busy)?;
    let (flops, seconds) = vectors(points)
        .filter(|p| !memory_bound(p))
        .fold((0.0, 0.0), |(f, s), p| (f + p.size[0] as f64, s + busy(p)));
    let vector_rate = positive(flops / seconds).ok_or_else(|| missing("vector ..."))?;
    let matmul = matmul(points, &busy)?;
    let mut cluster = Cluster {
        version: CLUSTER_VERSION,
        name: crate::presets::calibrated_name(n_ranks),
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
            memory_headroom: 0.0,
            memory_bandwidth_bytes_per_s: bandwidth,
            memory_efficiency,
            launch_s,
            conversion_s_per_element: BTreeMap::new(),
            kernels: None,
            multiprocessors: 0,
            unaligned_matmul_share: 1.0,
            sustained_share: 1.0,
            sustained_share_of: Default::default(),
            power_limit_w: None,
            boost_clock_hz: None,
        },
        levels: Vec::new(),
        groups: Vec::new(),
        missing: Vec::new(),
        degraded: Vec::new(),
        pool: Some(Pool {
            devices: n_ranks,
            // Points are processor time, measured while all processors were at work: what they
            // slow each other down is in it.
            compute_devices: f64::from(machine.cores.clamp(1, n_ranks)),
            memory_bytes: machine.memory_bytes,
        }),
        storage: storage(points),
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
    let block = machine.attention_block_rows;
    let (efficiency, kernels) = kernels(points, &cluster, block, &busy);
    cluster.device.attention_efficiency = efficiency;
    cluster.device.kernels = Some(kernels);
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
            "attention" | "attention_grad" => 6,
            "matmul" | "all_reduce" | "all_gather" | "reduce_scatter" | "convert" => 3,
            "vector" => 2,
            "copy" | "send" | "to" | "write" => 1,
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

/// How fast ranks copy to the host and the host writes: the rates of the largest points, where
/// both were measured.
fn storage(points: &[MeasuredPoint]) -> Option<Storage> {
    let rate = |what: &str| {
        let largest = named(points, what).max_by_key(|p| p.size[0])?;
        positive(largest.size[0] as f64 / largest.median_s)
    };
    Some(Storage {
        device_to_host_bytes_per_s: rate("to host")?,
        host_write_bytes_per_s: rate("write")?,
        total_write_bytes_per_s: None,
        host_memory_bytes: None,
        host_file_bytes: None,
    })
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

/// Seconds of a point beyond the launch; a tenth of it at least, as launches vary.
fn busy_time(p: &MeasuredPoint, launch_s: f64) -> f64 {
    (p.median_s - launch_s).max(0.1 * p.median_s)
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

#[cfg(test)]
mod tests;
