//! Bytes that let streams go on beside each other, where the memory has them.

use ir::collective::CollectiveKind;
use ir::plan::Plan;
use ir::program::{
    BufferClass, CollectiveItem, InstrKind, Instruction, Program, RoleProgram, Stream, Template,
};
use ir::reshard::LayoutStep;
use ir::training::TrainingGraph;
use ir::{BufferId, Bytes};
use lowering::{BucketSizes, Layouts};
use std::collections::BTreeSet;
use tests::{assert_checked, cluster, gpt2, planned};

/// The program on devices with so many bytes, in buckets that hold a tensor or two.
fn lowered(plan: &Plan, training: &TrainingGraph, bytes: u64, headroom: Option<f64>) -> Program {
    let mut plan = plan.clone();
    let device = &mut plan.cluster.device;
    (device.memory_bytes, device.memory_reserved_bytes) = (Bytes(bytes), Bytes(0));
    device.memory_headroom = 0.0;
    plan.headroom = headroom;
    if let Some(pool) = &mut plan.cluster.pool {
        pool.memory_bytes = Bytes(bytes * u64::from(pool.devices));
    }
    let sizes = BucketSizes {
        microbatch: 1 << 20,
        microbatch_per_rank: 1,
        ..BucketSizes::default()
    };
    let layouts = Layouts::new(&plan, training).expect("the plan covers its graph");
    let program = layouts.lower(&plan, training, &sizes);
    program.expect("the plan is complete")
}

fn touched(i: &Instruction) -> BTreeSet<BufferId> {
    i.reads().into_iter().chain(i.writes()).collect()
}

fn is_kernel(role: &RoleProgram, i: &Instruction) -> bool {
    matches!(role.streams[i.stream.index()], Stream::Kernels)
}

/// Waits of kernels for instructions of other streams with which they share no buffer: they wait for
/// the bytes of one.
fn waits_for_bytes(program: &Program) -> usize {
    let of_template = |role: &RoleProgram, t: &Template| {
        let kernels = t.instructions.iter().filter(|i| is_kernel(role, i));
        let waits = kernels.flat_map(|i| i.deps.iter().map(move |d| (i, d)));
        let shared =
            waits.map(|(i, d)| touched(i).is_disjoint(&touched(&t.instructions[d.index()])));
        shared.filter(|is_of_bytes| *is_of_bytes).count()
    };
    let of_role = |role: &RoleProgram| -> usize {
        let templates = role.templates.iter();
        templates.map(|t| of_template(role, t)).sum()
    };
    program.roles.iter().map(of_role).sum()
}

/// Gathers in microbatches behind which a reduction stands in their queue before anything reads
/// what they gather.
fn ahead_of_reductions(program: &Program) -> usize {
    let is_of = |i: &Instruction, of: fn(CollectiveKind) -> bool| match &i.kind {
        InstrKind::Collective { kind, .. } => of(*kind),
        _ => false,
    };
    let is_gather = |kind| kind == CollectiveKind::AllGather;
    let is_reduction = |kind| {
        use CollectiveKind::{AllReduce, ReduceScatter};
        matches!(kind, ReduceScatter(_) | AllReduce(_))
    };
    let of_template = |t: &Template| {
        let gathers = t.instructions.iter().enumerate();
        let gathers = gathers.filter(|(_, i)| is_of(i, is_gather));
        let is_ahead = |(at, gather): &(usize, &Instruction)| {
            let results = gather.writes();
            let mut behind = t.instructions[at + 1..].iter();
            let next = behind.find(|i| {
                let reduces = i.stream == gather.stream && is_of(i, is_reduction);
                reduces || i.reads().iter().any(|b| results.contains(b))
            });
            next.is_some_and(|i| is_of(i, is_reduction))
        };
        gathers.filter(is_ahead).count()
    };
    let of_role = |role: &RoleProgram| {
        let passes = role.templates.iter().filter(|t| t.kind.pass().is_some());
        passes.map(of_template).sum::<usize>()
    };
    program.roles.iter().map(of_role).sum()
}

/// Gathers of parameters that wait for the kernel just before them, though they need nothing of it.
fn held_up(program: &Program) -> usize {
    let of_template = |role: &RoleProgram, t: &Template| {
        let is_held = |(at, i): &(usize, &Instruction)| {
            let InstrKind::Collective { items, .. } = &i.kind else {
                return false;
            };
            let of_dim = |i: &CollectiveItem| matches!(i.step, LayoutStep::AllGather { .. });
            let transient = |b: &BufferId| role.buffer(*b).class == BufferClass::Transient;
            items.iter().all(of_dim)
                && !i.reads().iter().any(transient)
                && i.deps.iter().any(|d| d.index() + 1 == *at)
        };
        t.instructions.iter().enumerate().filter(is_held).count()
    };
    let of_role = |role: &RoleProgram| -> usize {
        let templates = role.templates.iter();
        templates.map(|t| of_template(role, t)).sum()
    };
    program.roles.iter().map(of_role).sum()
}

#[test]
fn with_room_kernels_wait_for_results_alone() {
    let forward = gpt2(4, 256, 16, 512);
    let train = ir::TrainSpec {
        global_batch: 8,
        sequence: 16,
        ..ir::TrainSpec::default()
    };
    let mut n_short = 0;
    for pins in [
        &["data=4", "zero=3", "microbatch=4"][..],
        &["data=4", "zero=2", "microbatch=8"],
        &["data=2", "tensor=2", "zero=3", "microbatch=4"],
    ] {
        let made = planned(&forward, &train, &cluster(4), pins).expect("a plan");
        let at = |bytes, headroom| lowered(&made.plan, &made.training, bytes, headroom);
        let (close, roomy) = (at(1, None), at(1 << 30, None));
        let (least, most) = (close.roles[0].arena_bytes, roomy.roles[0].arena_bytes);
        let held = [&close, &roomy].map(held_up);
        assert!(waits_for_bytes(&close) > 0, "{pins:?}");
        assert_eq!(waits_for_bytes(&roomy), 0, "{pins:?}");
        // The first gather of each pass has none before it.
        assert!(held[1] <= 2, "{pins:?}: {held:?}");
        let is_bound_by_gathers = pins.starts_with(&["data=4", "zero=3"]);
        assert!(held[0] > 2 || !is_bound_by_gathers, "{pins:?}: {held:?}");
        assert!(least <= most, "{pins:?}: {least} to {most}");
        let ahead = [&close, &roomy].map(ahead_of_reductions);
        let is_split = pins.contains(&"zero=3");
        assert_eq!(ahead[1] > ahead[0], is_split, "{pins:?}: {ahead:?}");
        // Up to the last byte that is not to stay free.
        assert_eq!(at(most, None), roomy, "{pins:?}");
        assert_eq!(at(2 * most, Some(0.5)), roomy, "{pins:?}");
        assert_eq!(lowering::arena_with_room(&close.roles[0]), most, "{pins:?}");
        assert_eq!(lowering::arena_with_room(&roomy.roles[0]), most, "{pins:?}");
        if least < most {
            let short = at(most - 1, None);
            assert!(short.roles[0].arena_bytes < most, "{pins:?}");
            n_short += 1;
        }
        let mut plan = made.plan.clone();
        let device = &mut plan.cluster.device;
        (device.memory_bytes, device.memory_reserved_bytes) = (Bytes(1 << 30), Bytes(0));
        assert_checked(&plan, &made.training, &roomy);
    }
    assert!(n_short > 0, "room takes no bytes in any plan");
}

/// Copies to other memories have no room: what is staged for them gives its bytes to the next.
#[test]
fn what_rests_in_hosts_leaves_the_device() {
    let forward = gpt2(8, 256, 16, 512);
    let train = ir::TrainSpec {
        global_batch: 8,
        sequence: 16,
        ..ir::TrainSpec::default()
    };
    let mut hosts = cluster(2);
    if let Some(storage) = &mut hosts.storage {
        storage.host_memory_bytes = Some(Bytes(1 << 30));
    }
    let arena = |pins: &[&str]| {
        let pins = [
            &["data=2", "zero=1", "microbatch=8", "recompute=none"],
            pins,
        ]
        .concat();
        let made = planned(&forward, &train, &hosts, &pins).expect("a plan");
        let bytes = lowered(&made.plan, &made.training, 1 << 30, None).roles[0].arena_bytes;
        (bytes, made)
    };
    let (all, made) = arena(&[]);
    let states = made.program.roles[0].states.iter();
    let moments = states.filter(|s| {
        made.program.roles[0]
            .buffer(s.buffer)
            .name
            .contains("moment")
    });
    let moments: u64 = moments
        .map(|s| made.program.roles[0].buffer(s.buffer).bytes)
        .sum();
    let (without, _) = arena(&["offload=optimizer"]);
    assert!(
        all - without > moments * 3 / 4,
        "{all}, {without}, {moments}"
    );
    let (neither, _) = arena(&["offload=optimizer+activations"]);
    assert!(neither < without, "{without}, {neither}");
}
