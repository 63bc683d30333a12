//! Plans for unequal clusters: stages lie where they suit, and count what the place makes them cost.

#![allow(clippy::unwrap_used)] // A test may stop at what it does not expect.

mod common;

use cost_model::{SimulateOptions, StepWork, simulate};
use ir::cluster::{Cluster, Degraded, Missing};
use ir::{Bytes, Precision, Rank, TrainSpec};
use planner::{Pins, PlanError, PlanOptions, Planned};

const FAST: &str = "h100-sxm*2+nvlink4+infiniband-ndr*2";
const SLOW: &str = "a100-sxm-40gb*2+nvlink3+infiniband-hdr*2";

fn cluster(name: &str) -> Cluster {
    let found = cost_model::presets::find(name).unwrap().unwrap();
    assert_eq!(found.problems(), [""; 0]);
    found
}

/// GPT-2 small in bf16.
fn planned(cluster: &Cluster, global_batch: u64, pins: &[&str]) -> Result<Planned, PlanError> {
    planned_of("gpt2", cluster, global_batch, pins)
}

fn planned_of(
    model: &str,
    cluster: &Cluster,
    global_batch: u64,
    pins: &[&str],
) -> Result<Planned, PlanError> {
    let train = TrainSpec {
        global_batch,
        sequence: 512,
        precision: Precision::Bf16,
        ..TrainSpec::default()
    };
    let forward = common::model(model, train.sequence);
    let options = PlanOptions {
        pins: Pins::parse(pins).unwrap(),
        headroom: Some(0.0),
        ..PlanOptions::default()
    };
    planner::plan(&forward, &train, cluster, &options)
}

/// By stage: first rank, ranks, layers.
fn stages(planned: &Planned) -> Vec<(u32, u32, u32)> {
    let of = |s: &ir::plan::StagePlan| {
        let layers = s.runs.iter().map(|r| r.count).sum();
        (s.mesh.devices.first_rank.0, s.mesh.n_devices(), layers)
    };
    planned.plan.stages.iter().map(of).collect()
}

#[test]
fn the_slower_group_gets_fewer_layers() {
    let (mixed, slow) = (
        cluster(&format!("{FAST}:1,{SLOW}:1")),
        cluster(&format!("{SLOW}:2")),
    );
    let pins = ["pipeline=2", "microbatch=4"];
    let found = planned(&mixed, 32, &pins).unwrap();
    let [(0, 2, fast), (2, 2, less)] = stages(&found)[..] else {
        panic!("a stage on each group: {:?}", stages(&found));
    };
    // More than of equal devices.
    let even = planned(&slow, 32, &pins).unwrap();
    let [(_, _, first), (_, _, second)] = stages(&even)[..] else {
        panic!("two stages: {:?}", stages(&even));
    };
    assert!(
        fast > first && less < second,
        "{fast} layers on H100s, {first} on A100s"
    );
    assert!(found.plan.predicted.step_time_s < even.plan.predicted.step_time_s);
    // With all of it free too.
    let (found, even) = (
        planned(&mixed, 32, &[]).unwrap(),
        planned(&slow, 32, &[]).unwrap(),
    );
    assert!(found.plan.predicted.step_time_s <= even.plan.predicted.step_time_s);
    let proof = &found.plan.proof;
    assert!(proof.lower_bound_s <= proof.objective_s);
    assert!(
        proof.space.contains("(parts of a host, "),
        "{}",
        proof.space
    );
}

#[test]
fn groups_of_equal_hosts_plan_as_one() {
    let pins = ["schedule=1f1b"];
    let one = planned(&cluster(&format!("{FAST}:2")), 16, &pins).unwrap();
    let two = planned(&cluster(&format!("{FAST}:1,{FAST}:1")), 16, &pins).unwrap();
    assert_eq!(two.plan.predicted, one.plan.predicted);
    assert_eq!(two.plan.stages, one.plan.stages);
    assert_eq!(two.plan.layer_strategies, one.plan.layer_strategies);
}

#[test]
fn a_plan_in_one_group_costs_what_it_costs_in_that_group_alone() {
    let alone = cluster(&format!("{FAST}:2"));
    let found = planned(&alone, 16, &["pipeline=2", "microbatch=4"]).unwrap();
    let played = |cluster: &Cluster, program: &ir::program::Program| {
        let work = StepWork::of(&found.training, &found.plan.train);
        let options = SimulateOptions::new(work);
        simulate(program, cluster, &options).unwrap().prediction
    };
    let first = cluster(&format!("{FAST}:2,{SLOW}:1"));
    assert_eq!(played(&first, &found.program), found.plan.predicted);
    // The same ranks behind the two of another group; utilisation is relative to all.
    let last = cluster(&format!("{SLOW}:1,{FAST}:2"));
    let mut program = found.program.clone();
    for role in &mut program.roles {
        role.mesh.devices.first_rank.0 += 2;
    }
    let moved = played(&last, &program);
    assert_eq!(moved.step_time_s, found.plan.predicted.step_time_s);
    assert_eq!(moved.stages, found.plan.predicted.stages);
}

#[test]
fn the_memory_of_each_group_is_kept() {
    let mut mixed = cluster(&format!("{FAST}:1,{SLOW}:1"));
    let pins = ["data=2", "tensor=1", "pipeline=2", "microbatch=2", "zero=0"];
    let free = planned(&mixed, 32, &pins).unwrap();
    let peak = |p: &Planned, i: usize| p.plan.predicted.stages[i].peak_bytes;
    // Less than what it would take, and enough for the head.
    let device = &mut mixed.groups[0].device;
    let taken = peak(&free, 1).0 - device.memory_reserved_bytes.0;
    device.memory_bytes = Bytes(device.memory_reserved_bytes.0 + taken * 5 / 6);
    let small = planned(&mixed, 32, &pins).unwrap();
    assert!(peak(&small, 1) <= mixed.device_of(Rank(2)).memory_bytes);
    assert!(peak(&small, 0) > mixed.device_of(Rank(2)).memory_bytes);
    assert!(
        stages(&small)[1].2 < stages(&free)[1].2,
        "{:?}",
        stages(&small)
    );
    // The same in the first place is more than the first group's.
    std::mem::swap(
        &mut mixed.device.memory_bytes,
        &mut mixed.groups[0].device.memory_bytes,
    );
    mixed.device.memory_bytes = Bytes(mixed.device.memory_reserved_bytes.0 + (64 << 20));
    assert!(
        matches!(planned(&mixed, 32, &pins), Err(PlanError::Memory { capacity, .. }) if capacity == 64 << 20)
    );
}

#[test]
fn heavy_collectives_avoid_degraded_links() {
    // Gradients of 7 billion parameters against the activations of a few thousand tokens.
    let mut cluster = cluster(&format!("{FAST}:2"));
    let plan =
        |cluster: &Cluster, pins: &[&str]| planned_of("llama-2-7b", cluster, 8, pins).unwrap();
    let step = |p: &Planned| p.plan.predicted.step_time_s;
    let whole = plan(&cluster, &[]);
    cluster.degraded = vec![Degraded {
        host: 1,
        device: None,
        level: cluster.levels[1].name.clone(),
        share: 0.02,
    }];
    let around = plan(&cluster, &[]);
    // Each stage keeps to its host; what is left of the link carries activations.
    let of = stages(&around);
    assert!(
        of.len() > 1 && of.iter().all(|s| s.0 / 2 == (s.0 + s.1 - 1) / 2),
        "{of:?}"
    );
    let through = plan(&cluster, &["pipeline=1"]);
    assert!(step(&whole) < step(&around) && step(&around) < step(&through));
}

#[test]
fn a_missing_device_has_no_rank() {
    let mut cluster = cluster(&format!("{FAST}:2"));
    let whole = planned(&cluster, 24, &["pipeline=2"]).unwrap();
    cluster.missing = vec![Missing { host: 0, device: 1 }];
    let found = planned(&cluster, 24, &[]).unwrap();
    assert_eq!(stages(&found).iter().map(|s| s.1).sum::<u32>(), 3);
    // The host with one device, and that with two, which has the output layer, too.
    let found = planned(&cluster, 24, &["pipeline=2"]).unwrap();
    let [(0, 1, less), (1, 2, _)] = stages(&found)[..] else {
        panic!("a stage on each host: {:?}", stages(&found));
    };
    let more = stages(&whole)[0].2;
    assert!(less < more, "{less} layers on one device, {more} on two");
}

/// Stages that share meshes count as on the slowest devices, and fit the smallest.
#[test]
fn interleaved_stages_lie_across_groups() {
    let mixed = cluster(&format!("{FAST}:1,{SLOW}:1"));
    let pins = ["pipeline=2", "virtual=2", "microbatch=4"];
    let found = planned(&mixed, 32, &pins).unwrap();
    assert_eq!(found.plan.stages.len(), 4);
    let slow = planned(&cluster(&format!("{SLOW}:2")), 32, &pins).unwrap();
    assert!(found.plan.predicted.step_time_s <= slow.plan.predicted.step_time_s);
}
