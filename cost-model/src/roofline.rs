//! Roofline of a program: for each kind of instruction how often a rank does it in a step, its
//! arithmetic and its bytes, the least time in which a device could do that, and what is predicted.
//!
//! The **floor** of an instruction is the longer of its products at the peak of the data sheet for
//! their type and its bytes at the memory's bandwidth, each byte moved once; nothing is below it
//! that does the same instruction by instruction. Fusing several removes bytes that one writes and
//! the next reads, and so lowers the floor itself.
//!
//! What follows a product in its call, and what other software does inside of another instruction's
//! kernel or with what is still on the chip, is predicted to take less than its own operands would:
//! no floor of it holds, and it has none; how many there are is counted.
//!
//! Products of attention are those that a causal kernel executes; its gradient makes the scores
//! again. What is predicted has the efficiencies and the launch that the floor lacks.

use crate::SimError;
use crate::compute::{ATTENTION_GRADIENT, peak_of};
use crate::costs::Costs;
use crate::simulate::instruction_kind;
use ir::cluster::Cluster;
use ir::op::{OpKind, Work};
use ir::program::{InstrKind, Program, RoleProgram};
use ir::{BufferId, DType};
use serde::Serialize;
use std::collections::BTreeMap;

/// The work of a rank of one mesh in a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MeshRoofline {
    /// Ranks of the mesh.
    pub n_ranks: u32,
    /// By kind of instruction, those that are predicted to take longest first.
    pub rows: Vec<Row>,
}

/// One kind of instruction, over a step of one rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Row {
    /// Name of the op, or of what else is done.
    pub kind: String,
    /// Executions.
    pub count: u64,
    /// Kernels, products and copies that they put on a stream; none where a backend was not asked, or
    /// lacks the op.
    pub launches: Option<u64>,
    /// Floating-point operations of products.
    pub flops: f64,
    /// Bytes between the device and its memory, each operand and result once; of collectives and
    /// transfers the bytes of their buffers.
    pub bytes: f64,
    /// Seconds at the data sheet's peak and bandwidth; none of collectives and transfers, which
    /// links bound, and of what is fused.
    pub floor_s: Option<f64>,
    /// Executions that are predicted to take less than their own operands would, as they are fused
    /// with others.
    pub fused: u64,
    /// Seconds as predicted, one after the other.
    pub predicted_s: f64,
}

impl MeshRoofline {
    /// All rows together; no floor or launches of those that have none.
    pub fn total(&self) -> Row {
        let mut total = Row {
            kind: "all".into(),
            ..Row::default()
        };
        for row in &self.rows {
            add(&mut total, row);
        }
        total
    }
}

fn add(sum: &mut Row, row: &Row) {
    sum.count += row.count;
    sum.flops += row.flops;
    sum.bytes += row.bytes;
    sum.predicted_s += row.predicted_s;
    sum.fused += row.fused;
    if let Some(n) = row.launches {
        *sum.launches.get_or_insert(0) += n;
    }
    if let Some(s) = row.floor_s {
        *sum.floor_s.get_or_insert(0.0) += s;
    }
}

/// By template and instruction of a role, how many launches one execution is.
pub type Launches = Vec<Vec<Option<u64>>>;

/// Roofline of every mesh of a program that is priced so. `launches` says how many launches the
/// instructions of a role are; what it leaves out has no number.
///
/// Fails where the program and its prices are of different sizes.
pub fn roofline(
    program: &Program,
    cluster: &Cluster,
    costs: &Costs,
    launches: &dyn Fn(&RoleProgram) -> Launches,
) -> Result<Vec<MeshRoofline>, SimError> {
    let roles = program.roles.iter().enumerate();
    roles
        .map(|(r, role)| {
            let cluster = cluster.seen_by(role.mesh.devices);
            let launches = launches(role);
            let mut count = vec![0u64; role.templates.len()];
            for slot in &role.trace {
                if let Some(n) = count.get_mut(slot.template.index()) {
                    *n += 1;
                }
            }
            let mut rows: BTreeMap<&str, Row> = BTreeMap::new();
            for (t, template) in role.templates.iter().enumerate() {
                for (i, instruction) in template.instructions.iter().enumerate() {
                    let cost = costs.instructions.get(r).and_then(|c| c.get(t)?.get(i));
                    let cost = cost.ok_or_else(|| SimError::Malformed {
                        stage: role.stage,
                        template: t,
                        instruction: i,
                        problem: "has no price".into(),
                    })?;
                    let kind = instruction_kind(&instruction.kind);
                    let mut one = once(&cluster, role, &instruction.kind);
                    one.predicted_s = cost.seconds;
                    if one.floor_s.is_some_and(|s| s > cost.seconds * ROUNDING) {
                        (one.floor_s, one.fused) = (None, 1);
                    }
                    one.launches = launches.get(t).and_then(|l| l.get(i).copied().flatten());
                    let row = rows.entry(kind).or_insert_with(|| Row {
                        kind: kind.into(),
                        ..Row::default()
                    });
                    add(row, &times(one, count[t]));
                }
            }
            let mut rows: Vec<Row> = rows.into_values().filter(|r| r.count > 0).collect();
            rows.sort_by(|a, b| {
                let by_time = b.predicted_s.total_cmp(&a.predicted_s);
                by_time.then_with(|| a.kind.cmp(&b.kind))
            });
            Ok(MeshRoofline {
                n_ranks: role.mesh.n_devices(),
                rows,
            })
        })
        .collect()
}

/// A price that is a floor up to the last bits is no lower one.
const ROUNDING: f64 = 1.0 + 1e-9;

fn times(one: Row, n: u64) -> Row {
    let by = n as f64;
    Row {
        count: n,
        launches: one.launches.map(|l| l * n),
        fused: one.fused * n,
        flops: one.flops * by,
        bytes: one.bytes * by,
        floor_s: one.floor_s.map(|s| s * by),
        predicted_s: one.predicted_s * by,
        ..one
    }
}

/// Work and floor of one execution.
fn once(cluster: &Cluster, role: &RoleProgram, kind: &InstrKind) -> Row {
    let bytes = |b: &BufferId| role.buffer(*b).bytes as f64;
    let memory = cluster.device.memory_bandwidth_bytes_per_s;
    let moved = |bytes: f64| Row {
        bytes,
        floor_s: Some(bytes / memory),
        ..Row::default()
    };
    let linked = |bytes: f64| Row {
        bytes,
        ..Row::default()
    };
    match kind {
        InstrKind::Compute { kind, .. } if kind.is_view() || kind.is_source() => moved(0.0),
        InstrKind::Compute {
            kind,
            inputs,
            outputs,
            ..
        } => {
            let local = |ids: &[BufferId]| -> Vec<(DType, Vec<u64>)> {
                let of = |b: &BufferId| {
                    let b = role.buffer(*b);
                    (b.dtype, b.spec.local_shape(&b.lens, &role.mesh))
                };
                ids.iter().map(of).collect()
            };
            let (x, y) = (local(inputs), local(outputs));
            let work = kind.work(&x, &y);
            let dtype = x.iter().chain(&y).map(|t| t.0).find(|t| t.is_float());
            let flops = products(kind, &work);
            let peak = peak_of(cluster, dtype.unwrap_or(DType::F32));
            let arithmetic = if flops > 0.0 { flops / peak } else { 0.0 };
            Row {
                flops,
                bytes: work.bytes as f64,
                floor_s: Some(arithmetic.max(work.bytes as f64 / memory)),
                ..Row::default()
            }
        }
        InstrKind::Slice { output, .. } => moved(2.0 * bytes(output)),
        InstrKind::Copy { output, .. } => match role.crossing(kind) {
            None => moved(2.0 * bytes(output)),
            Some(_) => linked(bytes(output)),
        },
        InstrKind::Load { output, .. } | InstrKind::Fill { output, .. } => moved(bytes(output)),
        InstrKind::WorldSum { output, .. } => linked(bytes(output)),
        InstrKind::Collective { items, .. } => {
            let item = |i: &ir::program::CollectiveItem| bytes(&i.input).max(bytes(&i.output));
            linked(items.iter().map(item).sum())
        }
        InstrKind::Exchange { sends, recvs } => {
            linked(sends.iter().chain(recvs).map(|(_, b)| bytes(b)).sum())
        }
    }
}

/// Floating-point operations of the products that a good kernel executes.
fn products(kind: &OpKind, work: &Work) -> f64 {
    let again = match kind {
        OpKind::AttentionGrad { .. } => ATTENTION_GRADIENT,
        _ => 1.0,
    };
    work.matmul_flops + work.recomputed_flops + work.causal_share * again * work.attention_flops
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::costs::costs;
    use crate::testing::{cluster, pipeline};

    #[test]
    fn causal_products_count_as_they_are_executed() {
        let work = Work {
            matmul_flops: 8.0,
            attention_flops: 16.0,
            causal_share: 0.5,
            ..Work::default()
        };
        assert_eq!(products(&OpKind::Layout, &work), 8.0 + 16.0 / 2.0);
        let grad = OpKind::AttentionGrad {
            scale: 1.0,
            dropout: 0.0,
            key: String::new(),
            order: Default::default(),
            keys: Default::default(),
            bounds: Default::default(),
        };
        // Five products in place of four: the scores once more.
        assert_eq!(products(&grad, &work), 8.0 + 16.0 / 2.0 * 5.0 / 4.0);
    }

    #[test]
    fn rows_add_up_to_what_is_predicted_and_no_floor_is_above_it() {
        let program = pipeline(&[3000, 5000], &[6000, 7000], 4, 1000, 1);
        let cluster = cluster(2);
        let costs = costs(&program, &cluster).unwrap();
        let meshes = roofline(&program, &cluster, &costs, &|role| {
            let of = |i: &ir::program::Instruction| {
                matches!(i.kind, InstrKind::Compute { .. }).then_some(2)
            };
            let templates = role.templates.iter();
            templates
                .map(|t| t.instructions.iter().map(of).collect())
                .collect()
        });
        let meshes = meshes.unwrap();
        assert_eq!(meshes.len(), 2);
        for (r, mesh) in meshes.iter().enumerate() {
            let role = &program.roles[r];
            let slots = role.trace.iter().map(|slot| slot.template.index());
            let all = slots.flat_map(|t| &costs.instructions[r][t]);
            let sum: f64 = all.map(|c| c.seconds).sum();
            let total = mesh.total();
            assert!((total.predicted_s - sum).abs() < 1e-12 * sum, "{mesh:?}");
            for row in &mesh.rows {
                let floor_s = row.floor_s.unwrap_or(0.0);
                assert!(floor_s <= row.predicted_s, "{row:?}");
                let is_op = row.launches.is_some();
                assert_eq!(row.launches, is_op.then_some(2 * row.count), "{row:?}");
            }
            assert!(total.count > 0 && total.flops == 0.0);
        }
        // What is priced below its own operands is done inside of something else.
        let mut fused = costs.clone();
        let of_first = fused.instructions[0].iter_mut().flatten();
        of_first.for_each(|c| c.seconds = 0.0);
        let first = roofline(&program, &cluster, &fused, &|_| Vec::new()).unwrap();
        let total = first[0].total();
        assert!(
            total.floor_s.is_none_or(|s| s == 0.0) && total.fused > 0,
            "{total:?}"
        );
        assert_eq!(meshes.iter().map(|m| m.total().fused).sum::<u64>(), 0);
        let short = Costs {
            instructions: Vec::new(),
            ..costs
        };
        assert!(roofline(&program, &cluster, &short, &|_| Vec::new()).is_err());
    }
}
