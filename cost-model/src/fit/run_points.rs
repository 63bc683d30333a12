//! The times of single instructions in a run, as points of a calibration.

use super::median;
use ir::cluster::MeasuredPoint;
use ir::collective::CollectiveKind;
use ir::measurement::Measurement;
use ir::program::{InstrKind, Instruction, Program, RoleProgram};
use ir::{BufferId, DType, OpKind};
use std::collections::BTreeMap;

/// The points of a run about kernels and collectives: those of equal size together. Instructions
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
        InstrKind::Collective {
            kind, axes, items, ..
        } => {
            let operands: Vec<BufferId> = items.iter().map(|i| i.input).collect();
            let is_known = !matches!(kind, CollectiveKind::AllToAll | CollectiveKind::Shift);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::pipeline;
    use ir::measurement::InstructionMeasurement;

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
