//! Programs of small plans: played by the referee, and read.
#![allow(clippy::unwrap_used)]

mod common;

use common::model::mlp;
use common::plans::{Recipe, Setup, plan};
use common::{referee, show};
use ir::plan::ScheduleKind;
use ir::program::{Buffer, BufferClass, Program, RoleProgram, Template, TemplateKind};
use ir::reshard::{Placement, cross_paths};
use ir::schedule::PassKind;
use ir::{BufferId, LayerId, Precision};
use lowering::{
    BucketSizes, Layouts, LowerError, cross_edges, edges, lower, lower_training, memory_report,
};
use std::collections::{BTreeMap, BTreeSet};

fn lowered(tied: bool, setup: &Setup) -> Program {
    let n_blocks = setup.layers.iter().sum::<u32>() as usize - 2;
    let (plan, training) = plan(&mlp(n_blocks, tied), setup);
    let program = lower_training(&plan, &training).unwrap();
    referee::check(&plan, &training, &program);
    assert_eq!(
        lower(&plan).unwrap(),
        program,
        "lowering the document is lowering its training graph"
    );
    for role in &program.roles {
        let m = memory_report(role);
        assert_eq!(
            m.persistent.0 + m.step.0 + m.activation.0 + m.transient.0,
            role.arena_bytes
        );
        assert_eq!(m.arena.0, role.arena_bytes);
    }
    program
}

#[test]
fn every_recipe_plays_on_every_pipeline() {
    use Recipe::*;
    for recipe in [Replicate, Data, Tensor, Zero1, Zero3, Zero3Step] {
        for layers in [&[4][..], &[2, 2], &[1, 2, 1], &[1, 1, 1, 1]] {
            for tied in [false, true] {
                for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
                    for &schedule in ScheduleKind::PLAIN {
                        for n_microbatches in [1, 2, 5] {
                            let base = Setup::new(recipe, 2, layers);
                            lowered(
                                tied,
                                &Setup {
                                    precision,
                                    schedule,
                                    n_microbatches,
                                    ..base
                                },
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn long_pipelines_play_without_deadlock() {
    for &schedule in ScheduleKind::PLAIN {
        for p in [1usize, 2, 3, 5, 8] {
            for m in [1, 2, 3, 7, 16] {
                let mut layers = vec![1; p];
                layers[0] += if p == 1 { 9 } else { 10 - p as u32 };
                let base = Setup::new(Recipe::Replicate, 1, &layers);
                lowered(
                    true,
                    &Setup {
                        schedule,
                        n_microbatches: m,
                        ..base
                    },
                );
            }
        }
    }
}

/// Two and three meshes with two or three stages each, and both on one.
#[test]
fn every_recipe_plays_interleaved() {
    use Recipe::*;
    let pipelines = [
        (&[1, 1, 2, 1][..], 2),
        (&[2, 3], 2),
        (&[1, 1, 1, 1, 1, 1], 3),
        (&[1, 1, 1, 1, 1, 1], 2),
    ];
    for recipe in [Replicate, Data, Tensor, Zero1, Zero3, Zero3Step] {
        for (layers, virtual_stages) in pipelines {
            for (tied, precision) in [(false, Precision::F32), (true, Precision::Bf16)] {
                let n_meshes = layers.len() as u32 / virtual_stages;
                let ring = ScheduleKind::Interleaved { virtual_stages };
                let v = (virtual_stages == 2).then_some(ScheduleKind::ZbV);
                let cases = [n_meshes, 4 * n_meshes].map(|m| (ring, m));
                let of_v = [1, n_meshes, 4 * n_meshes + 1].map(|m| v.map(|v| (v, m)));
                for (schedule, n_microbatches) in
                    cases.into_iter().chain(of_v.into_iter().flatten())
                {
                    let setup = Setup {
                        precision,
                        n_microbatches,
                        schedule,
                        ..Setup::new(recipe, 2, layers)
                    };
                    let program = lowered(tied, &setup);
                    assert_eq!(program.roles.len(), n_meshes as usize);
                    for role in &program.roles {
                        assert_eq!(role.n_chunks(), virtual_stages);
                    }
                }
            }
        }
    }
}

/// Values that forward saves in both chunks of a mesh have as many copies as the schedule promises
/// of both at once, and have them by turns.
#[test]
fn interleaved_stages_hold_what_their_schedule_says() {
    let schedule = ScheduleKind::Interleaved { virtual_stages: 2 };
    let layers = [2, 1, 1, 1, 1, 2];
    let setup = Setup {
        schedule,
        n_microbatches: 9,
        ..Setup::new(Recipe::Data, 2, &layers)
    };
    let program = lowered(false, &setup);
    let mut seen = 0;
    for (i, role) in program.roles.iter().enumerate() {
        for b in role.buffers.iter().filter(|b| b.name.ends_with(".fc")) {
            // Layers are embed, h.0 (stage 0), then a block on every stage.
            let block: usize = b.name[2..b.name.len() - 3].parse().unwrap();
            assert_eq!(block % 3, i);
            let of_stage = |stage| schedule.schedule().at_peak(stage, layers.len(), 9);
            let slots = of_stage(i) + of_stage(i + 3);
            assert_eq!(b.class, BufferClass::PerMicrobatch { slots }, "{}", b.name);
            let row = b.turns.as_ref().expect("copies by turns").row;
            let in_row = |b: &&Buffer| b.turns.as_ref().is_some_and(|t| t.row == row);
            let row: Vec<&Buffer> = role.buffers.iter().filter(in_row).collect();
            assert_eq!(row.len(), 2);
            assert_eq!(row[0].offset, row[1].offset);
            seen += 1;
        }
    }
    assert_eq!(seen, 6);
}

/// In no slot of a trace do two microbatches, of one stage or of two, have the same copy.
#[test]
fn copies_by_turns_are_free_when_they_are_taken() {
    for (schedule, layers, m) in [
        (
            ScheduleKind::Interleaved { virtual_stages: 2 },
            vec![2, 1, 1, 2],
            8,
        ),
        (
            ScheduleKind::Interleaved { virtual_stages: 3 },
            vec![2, 1, 1, 1, 1, 2],
            4,
        ),
        (ScheduleKind::ZbV, vec![2, 1, 1, 1, 1, 2], 7),
    ] {
        let setup = Setup {
            schedule,
            n_microbatches: m,
            ..Setup::new(Recipe::Data, 2, &layers)
        };
        let program = lowered(false, &setup);
        for role in &program.roles {
            // By row and copy, the lives on it: buffer and microbatch, first and last slot.
            type Lives = BTreeMap<(usize, u32), (usize, usize)>;
            let mut lives: BTreeMap<(u32, u32), Lives> = BTreeMap::new();
            for (at, slot) in role.trace.iter().enumerate() {
                let Some(m) = slot.microbatch else { continue };
                let all = role.template(slot.template).instructions.iter();
                for b in all.flat_map(|i| i.reads().into_iter().chain(i.writes())) {
                    let buffer = role.buffer(b);
                    let Some(turns) = &buffer.turns else { continue };
                    let copy = (turns.row, buffer.copy_for(Some(m)));
                    let life = lives.entry(copy).or_default();
                    life.entry((b.index(), m)).or_insert((at, at)).1 = at;
                }
            }
            assert!(lives.values().any(|l| l.len() > 1), "copies are used again");
            for (copy, lives) in lives {
                let mut slots: Vec<(usize, usize)> = lives.into_values().collect();
                slots.sort_unstable();
                let free = slots.windows(2).all(|w| w[0].1 < w[1].0);
                assert!(free, "{schedule:?} copy {copy:?}: {slots:?}");
            }
        }
    }
}

/// Where stages of a mesh keep unlike numbers of buffers of a size, they have no more copies of that
/// size than are in use at once.
#[test]
fn uneven_stages_have_as_many_copies_as_are_in_use() {
    let schedule = ScheduleKind::Interleaved { virtual_stages: 3 };
    let mut shared_unevenly = 0;
    for layers in [[4, 1, 1, 2, 1, 1], [2, 1, 3, 1, 1, 2], [2, 1, 1, 1, 3, 3]] {
        let setup = Setup {
            schedule,
            n_microbatches: 8,
            ..Setup::new(Recipe::Data, 2, &layers)
        };
        let program = lowered(false, &setup);
        for role in &program.roles {
            // By size of those in rows: by buffer and microbatch, first and last slot.
            type Lives = BTreeMap<(usize, u32), (usize, usize)>;
            let mut lives: BTreeMap<u64, Lives> = BTreeMap::new();
            for (at, slot) in role.trace.iter().enumerate() {
                let Some(m) = slot.microbatch else { continue };
                let all = role.template(slot.template).instructions.iter();
                for b in all.flat_map(|i| i.reads().into_iter().chain(i.writes())) {
                    let buffer = role.buffer(b);
                    if buffer.turns.is_some() {
                        let of_size = lives.entry(buffer.stride()).or_default();
                        of_size.entry((b.index(), m)).or_insert((at, at)).1 = at;
                    }
                }
            }
            for (stride, lives) in lives {
                let in_use = |at: usize| lives.values().filter(|l| l.0 <= at && at <= l.1).count();
                let most = (0..role.trace.len()).map(in_use).max().unwrap_or(0);
                let rows = role
                    .rows()
                    .filter(|b| b.stride() == stride && b.turns.is_some());
                let copies: u32 = rows.map(|b| b.slots()).sum();
                assert_eq!(copies as usize, most, "{layers:?}: {stride} bytes");
                let of_size = role.buffers.iter().filter(|b| b.stride() == stride);
                let mut members: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
                for b in of_size {
                    if let Some(turns) = &b.turns {
                        members.entry(turns.row).or_default().push(b.slots());
                    }
                }
                shared_unevenly += usize::from(members.values().any(|m| m.len() > 2));
            }
        }
    }
    assert!(
        shared_unevenly > 0,
        "some rows have several buffers of a stage"
    );
}

/// A plan with one virtual stage a mesh has no interleaving, and says so.
#[test]
fn microbatches_that_do_not_fill_the_rounds_are_refused() {
    let setup = Setup {
        schedule: ScheduleKind::Interleaved { virtual_stages: 2 },
        n_microbatches: 3,
        ..Setup::new(Recipe::Data, 2, &[1, 1, 1, 1])
    };
    let good = Setup {
        n_microbatches: 4,
        schedule: setup.schedule,
        ..Setup::new(Recipe::Data, 2, &[1, 1, 1, 1])
    };
    let (mut plan, training) = plan(&mlp(2, false), &good);
    plan.train.global_batch = plan.train.global_batch / 4 * 3;
    plan.n_microbatches = setup.n_microbatches;
    assert_eq!(
        lower_training(&plan, &training).unwrap_err().to_string(),
        "the schedule is interleaved_1f1b: 3 microbatches on 2 meshes: interleaved stages need a multiple of 2"
    );
}

/// A value that one pass makes and another is the last to use has as many copies as the schedule
/// says that microbatches are between them: `m` for GPipe, `min(m, p - i)` for 1F1B.
#[test]
fn saved_values_have_as_many_copies_as_microbatches_in_flight() {
    // Of weights that are updated in between there are copies too, which `tests/pipedream.rs` counts.
    let kinds = ScheduleKind::NAMED.iter().copied();
    for kind in kinds.filter(|kind| !kind.schedule().is_asynchronous()) {
        let schedule = kind.schedule();
        let layers = match schedule.virtual_stages() {
            1 => &[2, 1, 1, 1, 1][..],
            _ => &[2, 1, 1, 1, 1, 1],
        };
        for m in [1, 2, 3, 8] {
            let program = lowered(
                false,
                &Setup {
                    schedule: kind,
                    n_microbatches: m,
                    ..Setup::new(Recipe::Data, 2, layers)
                },
            );
            // Of stages that share a mesh each with its own.
            let program = lowering::without_pieces(&program).expect("the arena is small");
            let mut seen = BTreeSet::new();
            for (i, role) in program.roles.iter().enumerate() {
                for (b, buffer) in role.buffers.iter().enumerate() {
                    let (BufferClass::PerMicrobatch { slots }, Some((chunk, from, to))) =
                        (buffer.class, between(role, BufferId::new(b)))
                    else {
                        continue;
                    };
                    let stage = program.stage_of(i, chunk).index();
                    let expected = schedule.in_flight(from, to, stage, layers.len(), m);
                    let name = &buffer.name;
                    assert_eq!(slots, expected, "{kind:?} m={m} stage {i} {name}");
                    seen.insert((from, to));
                }
            }
            let n = schedule.passes().len();
            assert_eq!(seen.len(), n * (n - 1) / 2, "{kind:?}: {seen:?}");
        }
    }
}

/// The one chunk that touches a buffer, and its first and last pass that do; `None` of a buffer that
/// exchanges or other chunks touch too.
fn between(role: &RoleProgram, b: BufferId) -> Option<(u32, PassKind, PassKind)> {
    let touches = |t: &&Template| {
        let mut all = t.instructions.iter();
        all.any(|i| i.reads().contains(&b) || i.writes().contains(&b))
    };
    let passes = role.templates.iter().filter(touches);
    let passes = passes.map(|t| Some((t.chunk, t.kind.pass()?)));
    let passes: BTreeSet<(u32, PassKind)> = passes.collect::<Option<_>>()?;
    let ((chunk, first), (last_chunk, last)) = (*passes.first()?, *passes.last()?);
    (chunk == last_chunk).then_some((chunk, first, last))
}

#[test]
fn grids_of_two_axes_play() {
    use Recipe::*;
    let grids = [
        [(Data, 2), (Tensor, 2)],
        [(Zero1, 2), (Tensor, 4)],
        [(Zero3, 3), (Tensor, 2)],
        [(Zero3, 2), (Data, 2)],
        [(Data, 3), (Data, 2)],
        [(Zero3Step, 2), (Tensor, 2)],
    ];
    for grid in grids {
        for layers in [&[4][..], &[2, 2]] {
            for tied in [false, true] {
                lowered(tied, &Setup::grid(&grid, layers));
            }
        }
    }
}

fn templates(program: &Program, stage: usize, kind: TemplateKind) -> String {
    show::templates(&program.roles[stage], kind)
}

#[test]
fn one_rank_computes_and_nothing_else() {
    let program = lowered(false, &Setup::new(Recipe::Replicate, 1, &[3]));
    assert_eq!(
        templates(&program, 0, TemplateKind::Forward),
        "load tokens
embed.lookup(embed.table tokens)
h.0.fc(embed.lookup h.0.up)
h.0.act(h.0.fc)
h.0.proj(h.0.act h.0.down)
h.0.out(h.0.proj embed.lookup) -> h.0.proj
head.logits(h.0.proj head.weight)
head.lse(head.logits)
load labels
head.nll(head.logits head.lse labels)
head.sum(head.nll)
loss(head.sum) -> head.sum
accumulate.loss(head.sum)"
    );
    assert_eq!(show::trace(&program.roles[0]), "begin F0 B0 F1 B1 end");
}

/// Megatron: one all-reduce in the forward of a block and one in its backward, in place.
#[test]
fn tensor_parallel_reduces_once_per_block_and_pass() {
    let program = lowered(false, &Setup::new(Recipe::Tensor, 2, &[3]));
    let collectives = |kind| {
        templates(&program, 0, kind)
            .lines()
            .filter(|l| l.contains("all_"))
            .map(String::from)
            .collect::<Vec<_>>()
    };
    assert_eq!(collectives(TemplateKind::Forward), ["all_reduce h.0.proj"]);
    assert_eq!(
        collectives(TemplateKind::Backward),
        ["all_reduce grad.h.0.fc.lhs"]
    );
    assert_eq!(
        collectives(TemplateKind::StepEnd),
        ["all_reduce sum_squares.h.0.up, sum_squares.h.0.down"]
    );
}

/// Gradients are reduced in place, all in one collective, after the microbatches.
#[test]
fn data_parallel_reduces_gradients_once_per_step() {
    let program = lowered(false, &Setup::new(Recipe::Data, 2, &[3]));
    assert!(!templates(&program, 0, TemplateKind::Backward).contains("reduce"));
    assert_eq!(
        templates(&program, 0, TemplateKind::StepEnd).lines().take(6).collect::<Vec<_>>().join("\n"),
        "fill 1 loss_scale.one
all_reduce accumulate.loss, accumulate.embed.lookup.0, accumulate.h.0.fc.1, accumulate.h.0.proj.1, accumulate.head.logits.1
sum_squares.embed.table(accumulate.embed.lookup.0)
sum_squares.h.0.up(accumulate.h.0.fc.1)
sum_squares.h.0.down(accumulate.h.0.proj.1)
sum_squares.head.weight(accumulate.head.logits.1)"
    );
}

/// A buffer that an all-reduce in place made superfluous takes no memory.
#[test]
fn merged_buffers_disappear() {
    let program = lowered(false, &Setup::new(Recipe::Data, 2, &[3]));
    let role = &program.roles[0];
    let losses: Vec<&str> = role
        .buffers
        .iter()
        .map(|b| b.name.as_str())
        .filter(|n| n.starts_with("accumulate.loss"))
        .collect();
    assert_eq!(losses, ["accumulate.loss"]);
    assert_eq!(role.buffer(role.loss.unwrap()).class, BufferClass::Step);
}

/// ZeRO-1: the gradient is scattered, a slice of the parameter updated and gathered.
#[test]
fn sharded_moments_make_zero_1() {
    let program = lowered(false, &Setup::new(Recipe::Zero1, 2, &[3]));
    assert_eq!(
        templates(&program, 0, TemplateKind::StepEnd).lines().filter(|l| l.contains("h.0.up") && !l.contains("sum")).collect::<Vec<_>>().join("\n"),
        "slice h.0.up -> h.0.up@[x,_]
update.h.0.up(h.0.up@[x,_] accumulate.h.0.fc.1@[x,_] moment1.h.0.up moment2.h.0.up clip_coefficient) -> h.0.up@[x,_] moment1.h.0.up moment2.h.0.up
all_gather embed.table@[x,_] -> embed.table, h.0.up@[x,_] -> h.0.up, h.0.down@[x,_] -> h.0.down, head.weight@[x,_] -> head.weight"
    );
    let bytes = |name: &str| {
        program.roles[0]
            .buffers
            .iter()
            .find(|b| b.name == name)
            .unwrap()
            .bytes
    };
    // Parameter 6 x 16 f32 on every rank, moments halved.
    assert_eq!(
        (bytes("h.0.up"), bytes("moment1.h.0.up")),
        (6 * 16 * 4, 6 * 16 * 4 / 2)
    );
}

/// ZeRO-3: the parameter is gathered at its uses, twice per microbatch, or once per step.
#[test]
fn sharded_parameters_make_zero_3() {
    let program = lowered(false, &Setup::new(Recipe::Zero3, 2, &[3]));
    for pass in [TemplateKind::Forward, TemplateKind::Backward] {
        // All of these fit one bucket.
        let text = templates(&program, 0, pass);
        let gathers: Vec<&str> = text
            .lines()
            .filter(|l| l.starts_with("all_gather"))
            .collect();
        assert_eq!(gathers.len(), 1, "{pass:?}: {gathers:?}");
        let times = gathers[0].matches("h.0.up -> prepare.h.0.up@[_,_]").count();
        assert_eq!(times, 1, "{pass:?}: {gathers:?}");
    }
    let per_step = lowered(false, &Setup::new(Recipe::Zero3Step, 2, &[3]));
    assert!(!templates(&per_step, 0, TemplateKind::Forward).contains("gather"));
    assert_eq!(
        templates(&per_step, 0, TemplateKind::StepBegin)
            .lines()
            .last()
            .unwrap(),
        "all_gather embed.table -> embed.table@[_,_], h.0.up -> h.0.up@[_,_], h.0.down -> h.0.down@[_,_], head.weight -> head.weight@[_,_]"
    );
}

/// The table goes to the last stage before the microbatches, its gradient comes back after
/// them; the receiver sums both uses in a fixed order.
#[test]
fn a_tied_table_travels_once_per_step() {
    let program = lowered(true, &Setup::new(Recipe::Replicate, 1, &[2, 1]));
    assert_eq!(
        show::trace(&program.roles[0]),
        "begin send- F0 send-F0 F1 send-F1 recv-B0 B0 recv-B1 B1 recv- end"
    );
    assert_eq!(
        show::trace(&program.roles[1]),
        "begin recv- recv-F0 F0 recv-F1 B0 send-B0 F1 B1 send-B1 send- end"
    );
    assert_eq!(
        templates(&program, 1, TemplateKind::Exchange),
        "exchange send() recv(prepare.embed.table@[_,_])
exchange send() recv(h.0.out@[_,_,_])
exchange send(grad.head.logits.lhs) recv()
exchange send(accumulate.head.logits.1) recv()"
    );
    let end = templates(&program, 0, TemplateKind::StepEnd);
    assert_eq!(
        end.lines().next().unwrap(),
        "grad_sum.embed.table(accumulate.embed.lookup.0 accumulate.head.logits.1@[_,_])"
    );
    assert!(program.roles[1].states.is_empty(), "only the owner updates");
}

/// A path that scatters before sending and gathers after receiving.
#[test]
fn transfers_replay_the_steps_around_them() {
    let forward = mlp(1, false);
    let (mut plan, training) = plan(&forward, &Setup::new(Recipe::Tensor, 2, &[2, 1]));
    let cross = cross_edges(&plan, &training).unwrap();
    let c = cross.iter().find(|c| c.key == "h.0.out@1").unwrap();
    let (from, to) = (&plan.stages[0].mesh, &plan.stages[1].mesh);
    let all = cross_paths(
        &c.lens,
        Placement {
            mesh: from,
            spec: &c.from_spec,
        },
        Placement {
            mesh: to,
            spec: &c.wanted[0],
        },
    );
    let path = all.into_iter().find(|p| !p.after.is_empty()).unwrap();
    plan.transfers.insert(c.key.clone(), path);
    let program = lower_training(&plan, &training).unwrap();
    referee::check(&plan, &training, &program);
    assert_eq!(
        templates(&program, 1, TemplateKind::Forward)
            .lines()
            .next()
            .unwrap(),
        "all_gather h.0.out@[x,_,_] -> h.0.out@[_,_,_]"
    );
}

#[test]
fn what_a_plan_lacks_is_named() {
    let forward = mlp(1, false);
    let (good, training) = plan(&forward, &Setup::new(Recipe::Tensor, 2, &[2, 1]));
    let error = |change: &dyn Fn(&mut ir::plan::Plan)| {
        let mut plan = good.clone();
        change(&mut plan);
        lower_training(&plan, &training).unwrap_err().to_string()
    };
    assert_eq!(
        error(&|p| p.transfers.clear()),
        "transfer `h.0.out@1` has no recorded path"
    );
    assert_eq!(
        error(&|p| p.layer_strategies[1].edges.clear()),
        "edge `h.0.out#0` on stage0 has no recorded path from [_, _, _] partial(x: sum) to [_, _, _]"
    );
    assert_eq!(
        error(&|p| {
            p.edges.insert("h.0.out#0".into(), vec![]);
        }),
        "edge `h.0.out#0` on stage0: its recorded path does not lead from [_, _, _] partial(x: sum) to [_, _, _]"
    );
    assert_eq!(
        error(&|p| {
            p.layer_strategies[1].ops.remove("{}.fc");
        }),
        "layer strategy 1 has none for op `{}.fc` of layer1"
    );
    assert_eq!(
        error(&|p| p.layer_strategies[1]
            .ops
            .get_mut("{}.fc")
            .unwrap()
            .uses
            .clear()),
        "the strategy of op `h.0.fc` has 0 axes, its mesh 1"
    );
    assert_eq!(
        error(&|p| p.stages[1].runs[0].first = LayerId(1)),
        "stage1: a run starts at layer1, expected layer2"
    );
    assert_eq!(
        error(&|p| p.stages[1].runs.clear()),
        "stage1: the stages hold 2 of 3 layers"
    );
    assert_eq!(
        error(&|p| p.n_microbatches = 3),
        "3 microbatches of 4 samples do not make a step: the global batch is 8"
    );
    assert_eq!(
        error(&|p| p.stages[0].mesh.devices.n_devices = 3),
        "the mesh of stage0 has 3 devices, its axes do not multiply to that"
    );
    let mut old = good.clone();
    old.version = 99;
    assert_eq!(
        lower(&old).unwrap_err().to_string(),
        "the plan has format version 99, this build reads 1"
    );
    old = good.clone();
    old.graph = "graph".into();
    assert!(matches!(lower(&old), Err(LowerError::Graph(_))));
}

/// The edges to be priced are those that lowering looks up: without any one it fails.
#[test]
fn every_enumerated_edge_is_needed() {
    for setup in [
        Setup::new(Recipe::Zero3, 2, &[2, 1]),
        Setup::grid(&[(Recipe::Zero1, 2), (Recipe::Tensor, 2)], &[2, 1]),
    ] {
        let (good, training) = plan(&mlp(1, true), &setup);
        for e in edges(&good, &training).unwrap() {
            let mut plan = good.clone();
            plan.layer_strategies[e.layer.unwrap().index()]
                .edges
                .remove(&e.relative)
                .unwrap();
            assert!(
                matches!(lower_training(&plan, &training), Err(LowerError::MissingPath { key, .. }) if key == e.key)
            );
        }
        for c in cross_edges(&good, &training).unwrap() {
            let mut plan = good.clone();
            plan.transfers.remove(&c.key).unwrap();
            assert_eq!(
                lower_training(&plan, &training),
                Err(LowerError::MissingTransfer { key: c.key })
            );
        }
    }
}

#[test]
fn layouts_are_of_one_plan() {
    let setup = Setup::new(Recipe::Data, 2, &[2, 2]);
    let (plan, training) = plan(&mlp(2, false), &setup);
    let layouts = Layouts::new(&plan, &training).unwrap();
    let sizes = BucketSizes::default();
    let program = layouts.lower(&plan, &training, &sizes).unwrap();
    assert_eq!(program, lower(&plan).unwrap());
    // Paths and what is written about a plan may change.
    let mut recorded = plan.clone();
    recorded.name = "another".into();
    recorded.transfers.clear();
    for strategy in &mut recorded.layer_strategies {
        strategy.edges.clear();
    }
    assert!(layouts.edges(&recorded, &training).is_ok());
    let error = |change: &dyn Fn(&mut ir::plan::Plan)| {
        let mut other = plan.clone();
        change(&mut other);
        let edges = layouts.edges(&other, &training).unwrap_err();
        assert_eq!(layouts.lower(&other, &training, &sizes), Err(edges.clone()));
        edges.to_string()
    };
    let said = "these layouts were made of a plan with other ";
    let stages = error(&|p| p.stages.truncate(1));
    assert_eq!(stages, format!("{said}stages"));
    assert_eq!(
        error(&|p| p.n_microbatches += 1),
        format!("{said}microbatches")
    );
    assert_eq!(
        error(&|p| p.layer_strategies[0].ops.clear()),
        format!("{said}strategies")
    );
    let (_, larger) = common::plans::plan(&mlp(3, false), &Setup::new(Recipe::Data, 2, &[2, 3]));
    let edges = layouts.edges(&plan, &larger).unwrap_err();
    assert_eq!(edges, LowerError::OtherLayouts { what: "ops" });
}
