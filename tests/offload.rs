//! Tensors that rest in host memory: plans say it, lowering stages them, and every reader agrees.

use ir::Bytes;
use ir::program::{Program, RoleProgram, Space};
use ir::training::training_graph;
use tests::{Case, assert_checked, cluster, planned};

/// A cluster of `n` CPU ranks whose host lends memory.
fn hosts(n: u32) -> ir::cluster::Cluster {
    let mut hosts = cluster(n);
    if let Some(storage) = &mut hosts.storage {
        storage.host_memory_bytes = Some(Bytes(64 << 20));
        storage.host_file_bytes = Some(Bytes(64 << 20));
    }
    hosts
}

fn bytes_in(role: &RoleProgram, space: Space) -> u64 {
    role.arena(space)
}

/// Plans a case with and without offload, and proves and runs both: the same bits.
fn agrees(name: &str, pins: &[&str], offload: &str, half: bool) -> (Program, Program) {
    let mut case = Case::load(name);
    if half {
        case.train.precision = ir::Precision::Bf16;
    }
    let n = 4;
    let plain = planned(&case.forward, &case.train, &hosts(n), pins).expect("there is a plan");
    let mut kept = plain.plan.clone();
    let spaces = ir::offload::parse_spaces(offload).expect("classes");
    for strategy in &mut kept.layer_strategies {
        strategy.spaces.clone_from(&spaces);
    }
    let training = training_graph(&case.forward, &case.train).expect("it trains");
    let training = match kept.training_graph(&case.forward) {
        Ok(own) => own,
        Err(_) => training,
    };
    let program = lowering::lower_training(&kept, &training).expect("it lowers");
    assert_checked(&kept, &training, &program);
    let mut expected = case.session(&plain.program);
    let mut sessions = vec![case.session(&program)];
    sessions.extend((0..4).map(|seed| case.session_in_orders(&program, seed)));
    for batch in case.batches.iter().take(2) {
        let step = expected.step(batch, case.lr, false).expect("a step runs");
        for session in &mut sessions {
            let again = session.step(batch, case.lr, false).expect("a step runs");
            assert_eq!((again.loss, again.grad_norm), (step.loss, step.grad_norm));
        }
    }
    let params = expected.params().expect("parameters are gathered");
    for session in &mut sessions {
        assert_eq!(session.params().expect("parameters are gathered"), params);
    }
    (plain.program, program)
}

const PLANS: [&[&str]; 5] = [
    &["data=4", "tensor=1", "pipeline=1", "microbatch=4", "zero=0"],
    &["data=2", "tensor=2", "pipeline=1", "microbatch=2", "zero=1"],
    &["data=4", "tensor=1", "pipeline=1", "microbatch=4", "zero=3"],
    &["data=1", "tensor=2", "pipeline=2", "microbatch=1"],
    &[
        "data=2",
        "tensor=1",
        "pipeline=2",
        "microbatch=2",
        "zero=2",
        "recompute=full",
    ],
];

#[test]
fn optimizer_states_in_hosts_give_the_same_bits() {
    for half in [false, true] {
        for pins in PLANS {
            let (plain, moved) = agrees("llama_tied", pins, "optimizer", half);
            for (a, b) in plain.roles.iter().zip(&moved.roles) {
                assert_eq!(bytes_in(a, Space::Host), 0);
                assert!(bytes_in(b, Space::Host) > 0);
            }
        }
    }
}

#[test]
fn every_class_in_hosts_gives_the_same_bits() {
    for half in [false, true] {
        for pins in PLANS {
            for classes in [
                "activations",
                "parameters",
                "optimizer+parameters+activations",
            ] {
                agrees("llama_tied", pins, classes, half);
            }
        }
    }
}

#[test]
fn a_pin_says_where_states_rest() {
    let case = Case::load("llama_tied");
    let pins = [
        "data=4",
        "pipeline=1",
        "microbatch=4",
        "offload=optimizer+activations",
    ];
    let made = planned(&case.forward, &case.train, &hosts(4), &pins).expect("there is a plan");
    let spaces = ir::offload::parse_spaces("optimizer+activations").expect("classes");
    assert!(
        made.plan
            .layer_strategies
            .iter()
            .all(|s| s.spaces == spaces)
    );
    for role in &made.program.roles {
        assert!(role.arena(Space::Host) > 0);
    }
    // Hosts that lend nothing are refused before anything is searched.
    let error = planned(&case.forward, &case.train, &cluster(4), &pins);
    let error = error.expect_err("there is no memory").to_string();
    assert!(error.contains("host_memory_bytes"), "{error}");
}

#[test]
fn what_does_not_fit_on_devices_gets_a_plan_with_hosts() {
    let case = Case::load("llama_tied");
    let pins = [
        "data=1",
        "tensor=1",
        "pipeline=1",
        "microbatch=1",
        "offload=search",
    ];
    let full = planned(&case.forward, &case.train, &hosts(1), &pins).expect("all fits");
    assert!(
        full.plan
            .layer_strategies
            .iter()
            .all(|s| s.spaces.is_empty())
    );
    let mut small = hosts(1);
    let arena = full.program.roles[0].arena_bytes;
    small.device.memory_bytes = Bytes(arena * 85 / 100);
    small.device.memory_reserved_bytes = Bytes(0);
    small.device.memory_headroom = 0.0;
    small.pool = None;
    let made = planned(&case.forward, &case.train, &small, &pins).expect("hosts help");
    assert!(
        made.plan
            .layer_strategies
            .iter()
            .all(|s| !s.spaces.is_empty())
    );
    assert!(made.program.roles[0].arena_bytes <= small.device.memory_bytes.0);
}
