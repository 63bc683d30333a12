//! The referee answers whatever it is given: absurd numbers anywhere in a plan or program
//! make violations, never a panic or a long wait.

use super::plans::Random;
use super::{Case, case, interleaved_case, list, v_case};
use ir::program::{BufferClass, InstrKind, Program};
use ir::reshard::LayoutStep;
use ir::{AxisId, BufferId, InstrId, StageId, TemplateId, TransferId};

const ABSURD: [u64; 9] = [
    0,
    1,
    2,
    7,
    255,
    u32::MAX as u64 - 1,
    u32::MAX as u64,
    u64::MAX / 2 + 1,
    u64::MAX,
];

fn absurd(r: &mut Random) -> u64 {
    ABSURD[r.below(ABSURD.len())]
}

fn small(r: &mut Random) -> u32 {
    absurd(r) as u32
}

fn spoil(p: &mut Program, r: &mut Random) {
    let n_roles = p.roles.len();
    let at = r.below(n_roles);
    if p.roles.get(at).is_none_or(|role| role.trace.is_empty()) {
        return;
    }
    match r.below(14) {
        0 => p.n_microbatches = small(r),
        1 => p.microbatch = absurd(r),
        2 => drop(p.roles.pop()),
        3 if !p.transfers.is_empty() => {
            let x = r.below(p.transfers.len());
            let t = &mut p.transfers[x];
            match r.below(5) {
                0 => t.from = StageId(small(r)),
                1 => t.lens.push(absurd(r)),
                2 => t.lens.iter_mut().for_each(|n| *n = absurd(r)),
                3 => t
                    .to_spec
                    .dims
                    .iter_mut()
                    .for_each(|d| d.axes.push(AxisId(small(r)))),
                _ => t.from_spec.dims.iter_mut().for_each(|d| d.unit = absurd(r)),
            }
        }
        4 => p.roles[at].arena_bytes = absurd(r),
        5 => p.roles[at]
            .mesh
            .axes
            .iter_mut()
            .for_each(|a| a.size = small(r)),
        6 => p.roles[at].mesh.devices.n_devices = small(r),
        7 => p.roles[at].loss = Some(BufferId(small(r))),
        8 => {
            let k = r.below(p.roles[at].trace.len());
            let slot = &mut p.roles[at].trace[k];
            match r.below(2) {
                0 => slot.template = TemplateId(small(r)),
                _ => slot.microbatch = Some(small(r)),
            }
        }
        9 => p.roles[at]
            .templates
            .iter_mut()
            .for_each(|t| t.instructions.truncate(r.below(5))),
        10 => p.roles[at].trace.clear(),
        11 => {
            let t = r.below(p.roles[at].templates.len());
            let n = p.roles[at].templates[t].instructions.len();
            if n > 0 {
                let j = r.below(n);
                let instr = &mut p.roles[at].templates[t].instructions[j];
                instr.deps.push(InstrId(small(r)));
                spoil_kind(&mut instr.kind, r);
            }
        }
        _ => {
            let b = r.below(p.roles[at].buffers.len());
            let b = &mut p.roles[at].buffers[b];
            match r.below(7) {
                0 => b.offset = absurd(r),
                1 => b.bytes = absurd(r),
                2 => b.lens.iter_mut().for_each(|n| *n = absurd(r)),
                3 => b.lens.push(absurd(r)),
                4 => b.class = BufferClass::PerMicrobatch { slots: small(r) },
                5 => b.spec.dims.iter_mut().for_each(|d| d.unit = absurd(r)),
                _ => drop(b.spec.partial.insert(AxisId(small(r)), ir::ReduceKind::Max)),
            }
        }
    }
}

fn spoil_kind(kind: &mut InstrKind, r: &mut Random) {
    let b = BufferId(small(r));
    match kind {
        InstrKind::Compute {
            inputs,
            outputs,
            path,
            ..
        } => match r.below(5) {
            0 => inputs.clear(),
            1 => outputs.clear(),
            2 => inputs.push(b),
            3 => outputs.push(inputs.first().copied().unwrap_or(b)),
            _ => path.clear(),
        },
        InstrKind::Collective { axes, items, .. } => match r.below(4) {
            0 => axes.push(AxisId(small(r))),
            1 => items.clear(),
            2 => {
                items[0].step = LayoutStep::AllGather {
                    axis: AxisId(small(r)),
                    dim: absurd(r) as usize,
                }
            }
            _ => items[0].step = LayoutStep::AllReduce { axes: vec![] },
        },
        InstrKind::Slice { step, output, .. } => match r.below(2) {
            0 => {
                *step = LayoutStep::Slice {
                    axis: AxisId(0),
                    dim: absurd(r) as usize,
                    unit: absurd(r),
                }
            }
            _ => *output = b,
        },
        InstrKind::Exchange { sends, recvs } => match r.below(3) {
            0 => sends.push((TransferId(small(r)), b)),
            1 => sends.append(recvs),
            _ => recvs.clear(),
        },
        InstrKind::WorldSum { inputs, .. } => inputs.iter_mut().for_each(|i| i.0 = small(r)),
        InstrKind::Load { output, .. } | InstrKind::Copy { output, .. } => *output = b,
        InstrKind::Fill { value, .. } => *value = f64::NAN,
    }
}

#[test]
fn absurd_programs_are_answered() {
    let mut random = Random(3);
    for _ in 0..12 {
        let Case {
            plan,
            training,
            program,
        } = case(&mut random);
        for _ in 0..80 {
            let mut spoiled = program.clone();
            (0..=random.below(2)).for_each(|_| spoil(&mut spoiled, &mut random));
            let _ = checker::check_program(&plan, &training, &spoiled);
        }
        let other = case(&mut random);
        if other.program != program {
            let found = checker::check_program(&plan, &training, &other.program);
            assert!(!found.is_empty(), "a program of another plan is proved");
        }
    }
}

/// The mistakes in how stages are interleaved, each alone.
#[test]
fn stages_that_cannot_be_interleaved_are_refused() {
    let mut random = Random(6);
    for k in 0..8 {
        let Case { plan, .. } = match k % 2 {
            0 => interleaved_case(&mut random),
            _ => v_case(&mut random),
        };
        let p = plan.n_meshes();
        for way in 0..4 {
            let mut spoiled = plan.clone();
            let expected = match way {
                0 => {
                    spoiled.schedule = ir::plan::ScheduleKind::OneFOneB;
                    "devices of its own"
                }
                1 => {
                    spoiled.schedule = interleaved(1);
                    "interleaving needs 2 or more"
                }
                2 => {
                    spoiled.stages[p].mesh.axes[0].name = "other".into();
                    let with = plan.schedule.route().mesh_of(p, p);
                    &format!("on another mesh than stage {with}")
                }
                _ if plan.schedule.schedule().group(p) == 1 => continue,
                _ => {
                    spoiled.microbatch *= u64::from(spoiled.n_microbatches);
                    spoiled.n_microbatches = 1;
                    "interleaved stages need a multiple of 2"
                }
            };
            let found = list(&checker::check_plan(&spoiled));
            assert!(found.contains(expected), "way {way}: {found}");
            if way > 0 {
                let error = lowering::lower(&spoiled).unwrap_err().to_string();
                assert!(error.contains(expected), "way {way}: {error}");
            }
        }
    }
}

#[test]
fn absurd_plans_are_refused() {
    let mut random = Random(4);
    for round in 0..12 {
        let Case { plan, .. } = case(&mut random);
        for way in 0..28 {
            let mut p = plan.clone();
            match way {
                0 => p.version = 0,
                1 => p.passes = 99,
                2 => p.microbatch = 0,
                3 => (p.microbatch, p.n_microbatches) = (u64::MAX, u32::MAX),
                4 => p.graph.truncate(p.graph.len() / 2),
                5 => p.stages.clear(),
                6 => p.stages[0].runs.clear(),
                7 => p.stages[0].runs[0].count = u32::MAX,
                8 => p.stages[0].runs[0].first = ir::LayerId(1),
                9 => p.stages[0].runs[0].strategy = 77,
                10 => p.stages[0].mesh.axes[0].size = u32::MAX,
                11 => p.stages[0].mesh.devices.first_rank = ir::Rank(u32::MAX),
                12 => drop(p.layer_strategies[0].ops.pop_first()),
                13 => drop(
                    p.layer_strategies[0]
                        .ops
                        .insert("grad.{}.nothing".into(), ir::op::OpStrategy::replicate(1)),
                ),
                14 => p.layer_strategies[0]
                    .ops
                    .values_mut()
                    .for_each(|s| s.uses.push(ir::op::AxisUse::Replicate)),
                15 => p.layer_strategies[0]
                    .ops
                    .values_mut()
                    .for_each(|s| s.uses[0] = ir::op::AxisUse::Factor(ir::FactorId(u32::MAX))),
                16 => p.layer_strategies[0]
                    .ops
                    .values_mut()
                    .for_each(|s| s.uses[0] = ir::op::AxisUse::Partial(u32::MAX)),
                17 => drop(p.edges.insert("nothing#0".into(), vec![])),
                18 => drop(p.edges.insert(
                    "head.lse#0".into(),
                    vec![
                        LayoutStep::Slice {
                            axis: AxisId(9),
                            dim: 0,
                            unit: 1,
                        },
                        LayoutStep::AllGather {
                            axis: AxisId(9),
                            dim: 0,
                        },
                    ],
                )),
                19 => drop(p.transfers.insert("nothing@1".into(), absurd_path())),
                20 => p.predicted.mfu = f64::NAN,
                21 => p.cluster.device.memory_bandwidth_bytes_per_s = f64::INFINITY,
                22 => p.train.dropout = f64::NAN,
                23 => drop(p.layer_strategies[0].recompute.insert("{}.nothing".into())),
                24 => p.schedule = interleaved(0),
                25 => p.schedule = interleaved(u32::MAX),
                26 => {
                    // Two stages on one mesh must be interleaved, on two they cannot be.
                    p.schedule = interleaved(2);
                    p.stages.push(p.stages[0].clone());
                }
                _ => p.train.sequence = u64::MAX,
            }
            let found = checker::check_plan(&p);
            assert!(
                !found.is_empty(),
                "round {round}: absurdity {way} is accepted"
            );
        }
        assert_eq!(list(&checker::check_plan(&plan)), "");
    }
}

fn interleaved(virtual_stages: u32) -> ir::plan::ScheduleKind {
    ir::plan::ScheduleKind::Interleaved { virtual_stages }
}

fn absurd_path() -> ir::reshard::CrossPath {
    let spec = ir::ShardingSpec::replicated(1);
    ir::reshard::CrossPath {
        before: vec![],
        source_spec: spec.clone(),
        target_spec: spec,
        after: vec![],
    }
}
