//! A cluster file made better by runs: the work that instructions were measured to take, in the
//! plan's own shapes and with its caches.
//!
//! A run determines the figures of what its instructions do, by kind, element type and level:
//!
//! * of a kernel outside matrix products, its time factor, over the rates that the calibration
//!   found for all of them; the run's points replace the calibration's of that kernel;
//! * of matmuls in f32, their rate and half sizes, and of collectives, what the level's shared
//!   memory takes: fitted over all shapes, so to the calibration's points and the run's.
//!
//! Every other figure stays as it is: a run in f32 says nothing about bf16, and instructions of
//! several parts nothing about launches or the memory's rate. A figure that the fit drives to the
//! end of its range is not what the run measured either; it stays and is named. Where the end is
//! one that machines do have (nothing lost along a dim), it is taken, and named too.
//!
//! An attention's two factors cannot be told apart by points of one shape: what the points leave
//! open stays as it was ([`Known`]).

use super::figures::figures;
use super::kernels::{Known, MAX_FACTOR, attention, in_range, vector_factors};
use super::links::{self, shared_memory};
use super::matmul::matmul;
use super::{Change, FitError, busy_time, changes, check, named};
use crate::compute::kernels::products_of;
use ir::DType;
use ir::cluster::{Cluster, MeasuredPoint};
use std::collections::BTreeMap;

/// A cluster that runs made better.
#[derive(Clone, Debug)]
pub struct Refinement {
    /// The new cluster.
    pub cluster: Cluster,
    /// Figures that changed, in the order of their keys.
    pub changes: Vec<Change>,
    /// Figures that stayed, and why.
    pub kept: Vec<Kept>,
    /// Fitted figures that lie at an end of their range all the same.
    pub at_end: Vec<AtEnd>,
}

/// A fitted figure at an end of its range.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct AtEnd {
    /// Key path in the cluster file.
    pub key: String,
    /// Which end, and what it means, in words.
    pub what: String,
}

/// A figure that a refinement left as it was.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Kept {
    /// Key path in the cluster file.
    pub key: String,
    /// Why, in words.
    pub why: String,
    /// Whether the runs measured it, and what they gave was refused.
    pub refused: bool,
}

/// The cluster with the figures changed that the points of runs determine (see the module).
///
/// Fails when the cluster has no points, a point is malformed, or the figures make no sense
/// together.
pub fn refine(cluster: &Cluster, runs: &[MeasuredPoint]) -> Result<Refinement, FitError> {
    if cluster.measured.is_empty() {
        return Err(FitError::Missing {
            what: "anything".into(),
        });
    }
    check(runs)?;
    let by_kernel = |what: &str| what.starts_with("vector ") || what.starts_with("attention");
    let replaced = |p: &&MeasuredPoint| by_kernel(&p.what) && runs.iter().any(|r| r.what == p.what);
    let old_points = cluster.measured.iter().filter(|p| !replaced(p));
    let points: Vec<MeasuredPoint> = old_points.chain(runs).cloned().collect();
    check(&points)?;
    let mut work = Work {
        runs,
        new: cluster.clone(),
        fitted: BTreeMap::new(),
        refused: BTreeMap::new(),
        at_end: Vec::new(),
    };
    work.matmuls(&points)?;
    work.kernels();
    work.links(&points)?;
    let Work {
        mut new,
        fitted,
        refused,
        at_end,
        ..
    } = work;
    let changes = changes(cluster, &new);
    for (key, how) in &fitted {
        new.sources.insert(key.clone(), how.clone());
    }
    new.measured = points;
    let problems = new.problems();
    if !problems.is_empty() {
        return Err(FitError::Cluster { problems });
    }
    let kept = figures(cluster)
        .into_keys()
        .chain(refused.keys().cloned())
        .filter(|key| !fitted.contains_key(key))
        .collect::<std::collections::BTreeSet<String>>();
    let kept = kept.into_iter().map(|key| match refused.get(&key) {
        Some(why) => Kept {
            why: why.clone(),
            refused: true,
            key,
        },
        None => Kept {
            why: "the runs' instructions do not measure it".into(),
            refused: false,
            key,
        },
    });
    Ok(Refinement {
        kept: kept.collect(),
        cluster: new,
        changes,
        at_end,
    })
}

/// A refinement in progress.
struct Work<'a> {
    runs: &'a [MeasuredPoint],
    new: Cluster,
    /// Figures that were fitted: what they rest on.
    fitted: BTreeMap<String, String>,
    /// Figures whose fit was refused: why.
    refused: BTreeMap<String, String>,
    /// Figures that were fitted and lie at an end of their range.
    at_end: Vec<AtEnd>,
}

impl Work<'_> {
    fn measures(&self, what: &str) -> bool {
        named(self.runs, what).next().is_some()
    }

    fn fit(&mut self, keys: &[&str], what: &str) {
        let n = self.runs.iter().filter(|p| p.what == what).count();
        let how = format!("compare --recalibrate: {n} points of `{what}` from runs");
        self.fitted
            .extend(keys.iter().map(|k| (k.to_string(), how.clone())));
    }

    fn refuse(&mut self, key: &str, why: impl Into<String>) {
        self.refused.insert(key.to_string(), why.into());
    }

    /// Rate and half sizes of matmuls in f32.
    fn matmuls(&mut self, points: &[MeasuredPoint]) -> Result<(), FitError> {
        const WHAT: &str = "matmul f32";
        const KEYS: [&str; 5] = [
            "device.peak_flops_per_s.f32",
            "device.matmul_efficiency.f32",
            "device.matmul_half_size.m",
            "device.matmul_half_size.n",
            "device.matmul_half_size.k",
        ];
        if !self.measures(WHAT) {
            return Ok(());
        }
        let launch_s = self.new.device.launch_s;
        let found = matmul(points, &|p| busy_time(p, launch_s))?;
        let ends = found.at_bound();
        if !ends.is_empty() {
            let why = format!(
                "the runs' matmuls and the calibration's have no figures in common: the fit drives {} that it looks for",
                ends.join(" and ")
            );
            KEYS.iter().for_each(|key| self.refuse(key, why.clone()));
            return Ok(());
        }
        let natural = found.at_natural_end();
        self.at_end
            .extend(natural.into_iter().map(|(key, what)| AtEnd {
                key: format!("device.{key}"),
                what: what.into(),
            }));
        let d = &mut self.new.device;
        d.peak_flops_per_s.insert(DType::F32, found.best);
        d.matmul_efficiency
            .insert(DType::F32, found.rate / found.best);
        d.matmul_half_size = found.half;
        self.fit(&KEYS, WHAT);
        Ok(())
    }

    /// Factors of the kernels that the runs have.
    fn kernels(&mut self) {
        let launch_s = self.new.device.launch_s;
        let busy = |p: &MeasuredPoint| busy_time(p, launch_s);
        let mut found: Vec<(String, f64, String)> = vector_factors(self.runs, &self.new, &busy)
            .into_iter()
            .map(|(name, x)| (name.clone(), x, format!("vector {name}")))
            .collect();
        let block = self.new.device.kernels.as_ref();
        let block = block.map_or(0, |k| k.attention_block_rows);
        for name in ["attention", "attention_grad"] {
            let what = format!("{name} f32");
            let efficiency = self.new.device.attention_efficiency;
            let of = |name: &str| {
                let kernels = self.new.device.kernels.as_ref();
                kernels.map_or(1.0, |k| k.factor(name))
            };
            let points: Vec<&MeasuredPoint> = named(self.runs, &what).collect();
            let old = (of(products_of(name)) / efficiency, of(name));
            let known = Known::before(old, &points);
            let fitted = attention(self.runs, &self.new, block, name, &busy, &known);
            if let Some((products, vector)) = fitted {
                found.push((name.into(), vector, what.clone()));
                found.push((products_of(name).into(), products * efficiency, what));
            }
        }
        for (name, factor, what) in found {
            let key = format!("device.kernels.time_factor.{name}");
            // The range of attention's factors is that of the fit, before the efficiency.
            let searched = match name.ends_with(" products") {
                true => factor / self.new.device.attention_efficiency,
                false => factor,
            };
            if in_range(searched) {
                let kernels = self.new.device.kernels.get_or_insert_default();
                kernels.time_factor.insert(name, factor);
                self.fit(&[&key], &what);
            } else {
                let why = format!(
                    "the runs' points of `{what}` take {} what the device's rates give; factors lie between 1/{MAX_FACTOR} and {MAX_FACTOR}",
                    match searched > 1.0 {
                        true => format!("{MAX_FACTOR} times or more"),
                        false => format!("1/{MAX_FACTOR} or less of"),
                    }
                );
                self.refuse(&key, why);
            }
        }
    }

    /// Refines the times of collectives of ranks that share a memory.
    fn links(&mut self, points: &[MeasuredPoint]) -> Result<(), FitError> {
        let Some(level) = self.new.levels.first() else {
            return Ok(());
        };
        let n = u64::from(self.new.devices_per_host);
        let used = |name: &str| named(self.runs, name).any(|p| (2..=n).contains(&p.size[1]));
        let [all_reduce, reduce_scatter, all_gather] = links::KINDS.map(|k| used(k.name()));
        let Some(old) = level.shared_memory else {
            return Ok(());
        };
        if !all_reduce && !reduce_scatter && !all_gather {
            return Ok(());
        }
        let reduces = all_reduce || reduce_scatter;
        let known = (!reduces).then_some(old.reduce_bytes_per_s);
        let found = shared_memory(points, &self.new, known)?;
        let name = level.name.clone();
        let keys: Vec<String> = ["meeting_s", "copy_bytes_per_s", "reduce_bytes_per_s"]
            [..if reduces { 3 } else { 2 }]
            .iter()
            .map(|k| format!("levels.{name}.shared_memory.{k}"))
            .collect();
        let ends = links::at_bound(&found, known);
        if !ends.is_empty() {
            let why = format!(
                "the runs' collectives and the calibration's have no figures in common: the fit drives {} to the end of its range",
                ends.join(" and ")
            );
            keys.iter().for_each(|k| self.refuse(k, why.clone()));
            return Ok(());
        }
        self.new.levels[0].shared_memory = Some(found);
        let what = links::KINDS.map(|k| k.name());
        let what = what.into_iter().find(|w| used(w)).unwrap_or_default();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        self.fit(&keys, what);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::fit;
    use super::super::tests::{machine, points};
    use super::*;

    fn point(what: &str, size: &[u64], median_s: f64) -> MeasuredPoint {
        MeasuredPoint {
            what: what.into(),
            size: size.to_vec(),
            median_s,
            spread_s: 0.0,
            n: 3,
        }
    }

    fn keys(r: &Refinement) -> Vec<&str> {
        r.changes.iter().map(|c| c.key.as_str()).collect()
    }

    fn kept<'a>(r: &'a Refinement, key: &str) -> &'a Kept {
        r.kept.iter().find(|k| k.key == key).unwrap()
    }

    /// A run in which one kernel takes four times as long as the calibration said.
    #[test]
    fn a_run_changes_what_it_measured() {
        let old = fit(&points(4), &machine(4)).unwrap();
        let seconds = old.device.launch_s + 6.0 * 1e6 / old.device.vector_flops_per_s;
        let slow = point("vector slow", &[1_000_000, 800_000], seconds);
        let new = refine(&old, &[slow]).unwrap();
        assert_eq!(keys(&new), ["device.kernels.time_factor.slow"]);
        let factor = new.cluster.device.kernels.as_ref().unwrap().factor("slow");
        assert!((factor / 6.0 - 1.0).abs() < 1e-9, "{factor}");
        assert!(!new.kept.iter().any(|k| k.refused));
        assert!(!kept(&new, "device.kernels.time_factor.fast").refused);
        assert_eq!(changes(&old, &old), []);
        assert!(refine(&crate::testing::cluster(2), &[]).is_err());
    }

    /// Matmuls in f32 at half the rate: what is known of bf16, of links and of the machine stays.
    #[test]
    fn a_run_in_f32_says_nothing_about_bf16() {
        let mut old = fit(&points(4), &machine(4)).unwrap();
        // Figures that a user set stay, too.
        old.device.boost_clock_hz = Some(3e9);
        old.pool.as_mut().unwrap().compute_devices = 1.5;
        let slower = |p: &MeasuredPoint| point(&p.what, &p.size, 2.0 * p.median_s);
        let runs: Vec<_> = named(&points(4), "matmul f32").map(slower).collect();
        let new = refine(&old, &runs).unwrap();
        assert!(
            keys(&new)
                .iter()
                .all(|k| k.ends_with(".f32") || k.contains("half_size")),
            "{:?}",
            keys(&new)
        );
        assert!(keys(&new).contains(&"device.matmul_efficiency.f32"));
        let efficiency = |c: &Cluster| c.device.matmul_efficiency[&DType::F32];
        assert!(efficiency(&new.cluster) < 0.9 * efficiency(&old));
        for key in [
            "device.peak_flops_per_s.bf16",
            "device.matmul_efficiency.bf16",
            "device.conversion_s_per_element.bf16",
            "device.launch_s",
            "pool.compute_devices",
        ] {
            assert!(!kept(&new, key).refused, "{key}");
        }
        assert_eq!(new.cluster.device.boost_clock_hz, Some(3e9));
        assert_eq!(new.cluster.levels, old.levels);
    }

    /// Runs of gathers alone determine how fast blocks are copied, not how fast they are added.
    #[test]
    fn gathers_say_nothing_about_reductions() {
        let old = fit(&points(4), &machine(4)).unwrap();
        let slower = |p: &MeasuredPoint| point(&p.what, &p.size, 3.0 * p.median_s);
        let runs: Vec<_> = named(&points(4), "all_gather").map(slower).collect();
        let new = refine(&old, &runs).unwrap();
        let of_level = "levels.shared-memory.shared_memory";
        assert!(
            keys(&new).iter().all(|k| k.starts_with(of_level)),
            "{:?}",
            keys(&new)
        );
        assert!(!keys(&new).is_empty());
        assert!(!kept(&new, &format!("{of_level}.reduce_bytes_per_s")).refused);
    }

    /// One point of attention says how long products and the rest take together: they change
    /// together, by about as much as the point is off, and not at all where it is not.
    #[test]
    fn one_point_of_attention_changes_little() {
        let mut old = fit(&points(4), &machine(4)).unwrap();
        let name = "attention";
        let keys = [name, products_of(name)];
        let kernels = old.device.kernels.get_or_insert_default();
        kernels.time_factor.insert(name.into(), 1.3);
        kernels.time_factor.insert(products_of(name).into(), 0.9);
        let size = [4_000_000, 1_000_000, 400_000, 64, 64, 32];
        let seconds = |c: &Cluster| {
            let d = &c.device;
            let k = d.kernels.as_ref().unwrap();
            let shape = ir::op::MatmulShape {
                batch: 1,
                m: 64,
                n: 64,
                k: 32,
            };
            let executed = crate::compute::kernels::executed_share(k.attention_block_rows, 64);
            let rate = crate::compute::matmul_rate(c, DType::F32, shape) * d.attention_efficiency;
            let products = executed * size[0] as f64 / rate * k.factor(products_of(name));
            d.launch_s + products + size[1] as f64 / d.vector_flops_per_s * k.factor(name)
        };
        let factors = |c: &Cluster| keys.map(|n| c.device.kernels.as_ref().unwrap().factor(n));
        let refined = |times: f64| {
            let s = old.device.launch_s + times * (seconds(&old) - old.device.launch_s);
            refine(&old, &[point("attention f32", &size, s)])
                .unwrap()
                .cluster
        };
        for (x, y) in factors(&refined(1.0)).iter().zip(factors(&old)) {
            assert!((x / y - 1.0).abs() < 1e-4, "{x} {y}");
        }
        // A point that is 1.5 times off: both move, neither by more than it takes, and the time is
        // met.
        let new = refined(1.5);
        for (x, y) in factors(&new).iter().zip(factors(&old)) {
            assert!(x / y > 1.0 && x / y < 2.0, "{x} {y}");
        }
        let met = (seconds(&new) - new.device.launch_s) / (seconds(&old) - old.device.launch_s);
        assert!((met / 1.5 - 1.0).abs() < 0.02, "{met}");
        // Points that scatter move them less.
        let mut loose = point("attention f32", &size, seconds(&old) * 1.5);
        loose.spread_s = loose.median_s;
        let loose = refine(&old, &[loose]).unwrap().cluster;
        assert!(factors(&loose)[1] < factors(&new)[1]);
    }

    /// Matmuls that seem to lose nothing along a dim are taken at their word, which is said.
    #[test]
    fn figures_at_the_end_of_their_range_are_named() {
        // Flop/s at which the least matmul takes longer than what is trusted beside a launch.
        const SLOW: f64 = 1e8;
        let old = fit(&points(4), &machine(4)).unwrap();
        let constant = |p: &MeasuredPoint| {
            let flops: f64 = p.size.iter().fold(2.0, |f, x| f * *x as f64);
            point(&p.what, &p.size, old.device.launch_s + flops / SLOW)
        };
        let runs: Vec<_> = named(&points(4), "matmul f32").map(constant).collect();
        let mut bare = old.clone();
        bare.measured.retain(|p| p.what != "matmul f32");
        let new = refine(&bare, &runs).unwrap();
        let ends: Vec<&str> = new.at_end.iter().map(|e| e.key.as_str()).collect();
        assert_eq!(
            ends,
            [
                "device.matmul_efficiency.f32",
                "device.matmul_half_size.m",
                "device.matmul_half_size.n",
                "device.matmul_half_size.k"
            ]
        );
        // A rate that grows with m without an end is no figure of a machine.
        let growing = |p: &MeasuredPoint| {
            let flops: f64 = p.size.iter().fold(2.0, |f, x| f * *x as f64);
            point(&p.what, &p.size, flops / (1e8 * p.size[0] as f64))
        };
        let runs: Vec<_> = named(&points(4), "matmul f32").map(growing).collect();
        bare.device.launch_s = 0.0;
        let new = refine(&bare, &runs).unwrap();
        let kept = kept(&new, "device.matmul_half_size.m");
        assert!(
            kept.refused && kept.why.contains("`m` to the largest"),
            "{kept:?}"
        );
    }

    #[test]
    fn a_factor_at_its_bound_is_refused() {
        let old = fit(&points(4), &machine(4)).unwrap();
        let absurd = point("vector slow", &[1_000_000, 800_000], 10.0);
        let new = refine(&old, &[absurd]).unwrap();
        assert_eq!(keys(&new), Vec::<&str>::new());
        let kept = kept(&new, "device.kernels.time_factor.slow");
        assert!(
            kept.refused && kept.why.contains("100 times or more"),
            "{kept:?}"
        );
    }
}
