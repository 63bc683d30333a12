//! A cluster file made better by runs: the work that instructions were measured to take, in the
//! plan's own shapes and with its caches, as points of a calibration beside the old ones.

use super::{FitError, Machine, fit, median};
use ir::cluster::{Cluster, MeasuredPoint};
use ir::collective::CollectiveKind;
use ir::measurement::Measurement;
use ir::program::{InstrKind, Instruction, Program, RoleProgram};
use ir::{BufferId, DType, OpKind};
use std::collections::BTreeMap;

/// A figure of a cluster file that a refinement changed.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Change {
    /// Key path in the file.
    pub key: String,
    /// Its value before; none where it was not there.
    pub old: Option<f64>,
    /// Its value now; none where it is gone.
    pub new: Option<f64>,
    /// Unit: `s`, `B/s`, `FLOP/s`; empty for shares and counts.
    pub unit: &'static str,
}

/// The cluster fitted to its own points and those of runs. For kernels that the runs measured
/// with their own shapes, these replace the calibration's; matmuls and collectives, whose
/// figures are fitted over all shapes, keep both.
///
/// Fails when the cluster has no points, or as [`fit`].
pub fn refine(cluster: &Cluster, runs: &[MeasuredPoint]) -> Result<Cluster, FitError> {
    let Some(pool) = cluster.pool.filter(|_| !cluster.measured.is_empty()) else {
        return Err(FitError::Missing {
            what: "any kind".into(),
        });
    };
    let kept = |p: &&MeasuredPoint| {
        let by_kernel = p.what.starts_with("vector ") || p.what.starts_with("attention");
        !(by_kernel && runs.iter().any(|r| r.what == p.what))
    };
    let points: Vec<MeasuredPoint> = cluster
        .measured
        .iter()
        .filter(kept)
        .chain(runs)
        .cloned()
        .collect();
    let kernels = cluster.device.kernels.as_ref();
    let machine = Machine {
        cores: pool.compute_devices.ceil().max(1.0) as u32,
        memory_bytes: pool.memory_bytes,
        n_ranks: pool.devices,
        attention_block_rows: kernels.map_or(0, |k| k.attention_block_rows),
    };
    let mut refined = fit(&points, &machine)?;
    refined.name.clone_from(&cluster.name);
    Ok(refined)
}

/// What a run says about kernels and collectives: points of equal size together. Instructions
/// whose processor time was not measured, and those in 16-bit types, say nothing.
pub fn points_of_run(program: &Program, measured: &Measurement) -> Vec<MeasuredPoint> {
    let mut by_size: BTreeMap<(String, Vec<u64>), (Vec<f64>, u32)> = BTreeMap::new();
    for m in &measured.instructions {
        let found = program.roles.get(m.stage as usize).and_then(|role| {
            let template = role.templates.get(m.template as usize)?;
            Some((role, template.instructions.get(m.instruction as usize)?))
        });
        let (Some((role, instruction)), Some(busy_s)) = (found, m.busy_s) else {
            continue;
        };
        let Some((what, size, parts)) = probe(role, instruction) else {
            continue;
        };
        if busy_s > 0.0 && m.count > 0 && !size.contains(&0) {
            let (times, n) = by_size.entry((what, size)).or_default();
            times.push(busy_s / parts);
            *n = n.saturating_add(m.count);
        }
    }
    let point = |((what, size), (times, n)): ((String, Vec<u64>), (Vec<f64>, u32))| {
        let median_s = median(times.clone())?;
        let spread_s = median(times.iter().map(|t| (t - median_s).abs()).collect())?;
        Some(MeasuredPoint {
            what,
            size,
            median_s,
            spread_s,
            n,
        })
    };
    by_size.into_iter().filter_map(point).collect()
}

/// The calibration's name and size of what an instruction does, and how many such it is.
fn probe(role: &RoleProgram, instruction: &Instruction) -> Option<(String, Vec<u64>, f64)> {
    let local = |b: &BufferId| {
        let b = role.buffer(*b);
        (b.dtype, b.spec.local_shape(&b.lens, &role.mesh))
    };
    let f32s = |ids: &[BufferId]| {
        let whole = |b: &BufferId| matches!(role.buffer(*b).dtype, DType::F32 | DType::I32);
        ids.iter().all(whole)
    };
    match &instruction.kind {
        InstrKind::Compute {
            kind,
            inputs,
            outputs,
            ..
        } if f32s(inputs) && f32s(outputs) && !kind.is_view() && !kind.is_source() => {
            let (x, y): (Vec<_>, Vec<_>) = (
                inputs.iter().map(local).collect(),
                outputs.iter().map(local).collect(),
            );
            Some(kernel(kind, &x, &y))
        }
        InstrKind::Collective { kind, axes, items } => {
            let operands: Vec<BufferId> = items.iter().map(|i| i.input).collect();
            let is_known = !matches!(kind, CollectiveKind::AllToAll);
            let bytes = |b: BufferId| role.buffer(b).bytes;
            let total = items
                .iter()
                .map(|i| bytes(i.input).max(bytes(i.output)))
                .fold(0, u64::saturating_add);
            let group: u64 = axes.iter().map(|&a| role.mesh.size(a)).product();
            let size = vec![total, group, u64::from(role.mesh.n_devices())];
            (is_known && f32s(&operands)).then(|| (kind.name().to_string(), size, 1.0))
        }
        _ => None,
    }
}

fn kernel(
    kind: &OpKind,
    x: &[(DType, Vec<u64>)],
    y: &[(DType, Vec<u64>)],
) -> (String, Vec<u64>, f64) {
    let work = kind.work(x, y);
    let vector = work.vector_flops as u64;
    match work.matmul {
        Some(s) if work.attention_flops > 0.0 => {
            let size = vec![
                work.attention_flops as u64,
                vector,
                work.bytes,
                s.m,
                s.n,
                s.k,
            ];
            (format!("{} f32", kind.name()), size, 1.0)
        }
        Some(s) => {
            let size = vec![s.m, s.n, s.k];
            ("matmul f32".into(), size, (s.batch as f64).max(1.0))
        }
        None => {
            let what = format!("vector {}", kind.kernel_name());
            (what, vec![vector.max(1), work.bytes], 1.0)
        }
    }
}

/// The figures in which two cluster files differ, in the order of their keys.
pub fn changes(old: &Cluster, new: &Cluster) -> Vec<Change> {
    let (old, new) = (figures(old), figures(new));
    let keys: std::collections::BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    keys.into_iter()
        .filter_map(|key| {
            let (a, b) = (old.get(key), new.get(key));
            (a.map(|x| x.0) != b.map(|x| x.0)).then(|| Change {
                key: key.clone(),
                old: a.map(|x| x.0),
                new: b.map(|x| x.0),
                unit: a.or(b).map_or("", |x| x.1),
            })
        })
        .collect()
}

/// Fitted figures by key path, with their units.
fn figures(c: &Cluster) -> BTreeMap<String, (f64, &'static str)> {
    let mut all = BTreeMap::new();
    let mut add = |key: String, value: f64, unit| {
        all.insert(key, (value, unit));
    };
    let d = &c.device;
    for (t, x) in &d.peak_flops_per_s {
        add(
            format!("device.peak_flops_per_s.{}", t.name()),
            *x,
            "FLOP/s",
        );
    }
    for (t, x) in &d.matmul_efficiency {
        add(format!("device.matmul_efficiency.{}", t.name()), *x, "");
    }
    for (t, x) in &d.conversion_s_per_element {
        add(
            format!("device.conversion_s_per_element.{}", t.name()),
            *x,
            "s",
        );
    }
    for (name, x) in d.kernels.iter().flat_map(|k| &k.time_factor) {
        add(format!("device.kernels.time_factor.{name}"), *x, "");
    }
    for (key, x, unit) in [
        ("matmul_half_size.m", d.matmul_half_size.m, ""),
        ("matmul_half_size.n", d.matmul_half_size.n, ""),
        ("matmul_half_size.k", d.matmul_half_size.k, ""),
        ("attention_efficiency", d.attention_efficiency, ""),
        ("vector_flops_per_s", d.vector_flops_per_s, "FLOP/s"),
        (
            "memory_bandwidth_bytes_per_s",
            d.memory_bandwidth_bytes_per_s,
            "B/s",
        ),
        ("memory_efficiency", d.memory_efficiency, ""),
        ("launch_s", d.launch_s, "s"),
    ] {
        add(format!("device.{key}"), x, unit);
    }
    for l in &c.levels {
        let key = |name: &str| format!("levels.{}.{name}", l.name);
        add(key("latency_s"), l.latency_s, "s");
        add(key("bandwidth_bytes_per_s"), l.bandwidth_bytes_per_s, "B/s");
        if let Some(s) = &l.shared_memory {
            let key = |name: &str| key(&format!("shared_memory.{name}"));
            add(key("meeting_s"), s.meeting_s, "s");
            add(key("copy_bytes_per_s"), s.copy_bytes_per_s, "B/s");
            add(key("reduce_bytes_per_s"), s.reduce_bytes_per_s, "B/s");
        }
    }
    if let Some(pool) = &c.pool {
        add("pool.compute_devices".into(), pool.compute_devices, "");
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::tests::{machine, points};
    use super::*;
    use crate::testing::pipeline;
    use ir::measurement::InstructionMeasurement;

    /// A run in which one kernel takes four times as long as the calibration said.
    #[test]
    fn a_run_changes_what_it_measured() {
        let old = fit(&points(4), &machine(4)).unwrap();
        let slow = MeasuredPoint {
            what: "vector slow".into(),
            size: vec![1_000_000, 800_000],
            median_s: old.device.launch_s + 6.0 * 1e6 / old.device.vector_flops_per_s,
            spread_s: 0.0,
            n: 3,
        };
        let new = refine(&old, &[slow]).unwrap();
        let factor = |c: &Cluster| c.device.kernels.as_ref().unwrap().factor("slow");
        // The mean rate of all kernels falls with it: 1.2e7 FLOPs in 5 + 0.25 + 3 ms.
        assert!(factor(&new) > 2.0 * factor(&old), "{}", factor(&new));
        let found = changes(&old, &new);
        let keys: Vec<&str> = found.iter().map(|c| c.key.as_str()).collect();
        assert!(
            keys.contains(&"device.kernels.time_factor.slow"),
            "{keys:?}"
        );
        assert!(!keys.iter().any(|k| k.starts_with("levels")), "{keys:?}");
        assert_eq!(changes(&old, &old), []);
        assert!(refine(&crate::testing::cluster(2), &[]).is_err());
    }

    #[test]
    fn instructions_become_points() {
        let program = pipeline(&[3000, 3000], &[6000, 6000], 4, 1, 1);
        let roles = program.roles.iter().enumerate();
        let instructions = roles
            .flat_map(|(s, r)| {
                let templates = r.templates.iter().enumerate();
                templates.flat_map(move |(t, template)| {
                    (0..template.instructions.len()).map(move |i| InstructionMeasurement {
                        stage: s as u32,
                        template: t as u32,
                        instruction: i as u32,
                        count: 4,
                        mean_s: 1.0,
                        busy_s: Some(1e-3 * (s + 1) as f64),
                        ..Default::default()
                    })
                })
            })
            .collect();
        let mut measured = Measurement {
            instructions,
            ..Measurement::default()
        };
        let found = points_of_run(&program, &measured);
        // Relus of 1000, 2000 and 4000 elements on both stages; exchanges say nothing.
        assert!(found.iter().all(|p| p.what == "vector relu"), "{found:?}");
        assert!(
            found
                .iter()
                .any(|p| p.size == [1000, 8000] && (1e-3..=2e-3).contains(&p.median_s)),
            "{found:?}"
        );
        measured
            .instructions
            .iter_mut()
            .for_each(|i| i.busy_s = None);
        assert!(points_of_run(&program, &measured).is_empty());
    }
}
