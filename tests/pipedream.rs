//! PipeDream's asynchronous updates: ranks train as a sequential simulation of their staleness
//! does, keep as many versions of the weights as the paper says, and no spoiled version is proved.
//!
//! The simulation is the reference interpreter on one device, microbatch after microbatch, in which
//! a layer's weights lack the latest updates of the step: as many as backward passes of its stage
//! come later than the forward pass. That number is counted here, from where the stage stands
//! ([`lags`]), and not asked of the schedule.

use ir::Precision;
use ir::plan::{Plan, ScheduleKind};
use ir::program::{BufferClass, InstrKind, RoleProgram, TemplateKind};
use ir::training::training_graph;
use ir::{BufferId, OpKind, TrainSpec};
use planner::Planned;
use tests::plans::{SEQUENCE, mlp, untied_mlp};
use tests::{Case, cluster, distance, planned, relative};

/// Steps of each comparison.
const STEPS: usize = 4;

/// Microbatches of a step.
const MICROBATCHES: u64 = 4;

/// A case that can be trained without a norm of all gradients.
fn case(name: &str, n_layers: u32, precision: Precision) -> Case {
    let mut case = match n_layers {
        0 => Case::load(name),
        n => Case::with_layers(name, n),
    };
    case.train.clip_norm = None;
    case.train.precision = precision;
    case
}

fn pins(case: &Case, others: &[&str]) -> Vec<String> {
    let own = [
        "schedule=pipedream".to_string(),
        format!("microbatch={}", case.train.global_batch / MICROBATCHES),
    ];
    let others = others.iter().map(|pin| pin.to_string());
    own.into_iter().chain(others).collect()
}

/// By layer, how many updates of its stage are missing in its weights: stage `i` of `p` begins
/// `p - 1 - i` microbatches before the first gradients come back to it, and then alternates.
fn lags(plan: &Plan) -> Vec<u32> {
    let p = plan.stages.len() as u32;
    let of_stage = |(i, stage): (usize, &ir::plan::StagePlan)| {
        let n_layers: u32 = stage.runs.iter().map(|run| run.count).sum();
        std::iter::repeat_n(p - 1 - i as u32, n_layers as usize)
    };
    plan.stages.iter().enumerate().flat_map(of_stage).collect()
}

/// Trains by a pinned plan and by the simulation of its staleness; losses and parameters of both
/// are compared, bit by bit where nothing is summed in another order.
fn check(case: &Case, n_devices: u32, others: &[&str], is_equal: bool) -> Plan {
    let pins = pins(case, others);
    let pins: Vec<&str> = pins.iter().map(String::as_str).collect();
    let name = format!("{} on {n_devices}: {}", case.forward.name, pins.join(" "));
    let made = planned(&case.forward, &case.train, &cluster(n_devices), &pins)
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    assert_eq!(made.plan.schedule, ScheduleKind::PipeDream, "{name}");
    let kept = training_graph(&case.forward, &made.plan.train).expect("the training graph builds");
    assert_eq!(
        ir::training::problems(&kept),
        Vec::<String>::new(),
        "{name}"
    );
    let single = case.single(&kept, made.plan.microbatch);
    let mut stale = single.clone().with_lags(lags(&made.plan));
    let mut fresh = single;
    let mut session = case.session(&made.program);
    let mut in_order = case.session_in_orders(&made.program, 1);
    let tolerance = match case.train.precision {
        Precision::F32 => 1e-5,
        _ => 1e-2,
    };
    let mut is_stale = false;
    for (step, batch) in case.batches.iter().take(STEPS).enumerate() {
        let one = stale.step(batch, case.lr).expect("the simulation runs");
        let newest = fresh.step(batch, case.lr).expect("the single device runs");
        let many = session
            .step(batch, case.lr, false)
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        let again = in_order.step(batch, case.lr, false).expect("streams run");
        assert_eq!(again.loss, many.loss, "{name} step {step}, other orders");
        if is_equal {
            assert_eq!(many.loss, one.loss, "{name} step {step}");
        }
        assert!(
            relative(many.loss, one.loss) < tolerance,
            "{name} step {step}: loss {} against {}",
            many.loss,
            one.loss
        );
        is_stale |= relative(newest.loss, one.loss) > 10.0 * tolerance;
    }
    // What is compared is not what a pipeline without staleness would do.
    let has_lags = made.plan.stages.len() > 1 && case.train.precision == Precision::F32;
    assert_eq!(is_stale, has_lags, "{name}");
    session
        .replicas_agree()
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    let (mut difference, mut norm) = (0.0, 0.0);
    for (path, tensor) in session.params().expect("the parameters are gathered") {
        let (d, n) = distance(&tensor.values, &stale.states()[&path]);
        // The gradients of key biases are zero but for rounding.
        if !path.ends_with(".attn.qkv.bias") {
            (difference, norm) = (difference + d, norm + n);
        }
        assert!(!is_equal || d == 0.0, "{name}: `{path}` is not bit-equal");
    }
    let off = (difference / norm).sqrt();
    assert!(
        off <= 10.0 * tolerance,
        "{name}: parameters differ by {off}"
    );
    made.plan
}

#[test]
fn ranks_train_as_the_simulation_of_their_staleness() {
    for (name, n_layers) in [("gpt2_untied_gelu", 0), ("llama_untied_rope", 4)] {
        let case = case(name, n_layers, Precision::F32);
        for p in [1, 2, 4] {
            let pipeline = format!("pipeline={p}");
            check(&case, p, &[&pipeline, "data=1", "tensor=1"], true);
            for zero in 0..=3 {
                let zero = format!("zero={zero}");
                check(
                    &case,
                    2 * p,
                    &[&pipeline, "data=2", "tensor=1", &zero],
                    false,
                );
            }
        }
    }
}

/// Lower precision rounds the gradients of each use before the update; recomputed activations are
/// made of the version that the forward pass used.
#[test]
fn versions_serve_other_precisions_and_recomputation() {
    let half = case("llama_untied_rope", 4, Precision::Bf16);
    let zero = |n: u8| format!("zero={n}");
    for n in 0..=3 {
        let others = ["pipeline=2", "data=2", "tensor=1", &zero(n)];
        check(&half, 4, &others, false);
    }
    let full = case("gpt2_untied_gelu", 0, Precision::F32);
    for recompute in ["recompute=full", "recompute=selective"] {
        let others = ["pipeline=2", "data=1", "tensor=1", recompute];
        check(&full, 2, &others, true);
    }
    check(&full, 4, &["pipeline=2", "data=1", "tensor=2"], false);
}

fn train(minibatches: u64) -> TrainSpec {
    TrainSpec {
        global_batch: minibatches,
        sequence: SEQUENCE,
        clip_norm: None,
        ..TrainSpec::default()
    }
}

/// Four stages of one block each and microbatches of a sample.
fn small(minibatches: u64) -> Planned {
    let pins = ["schedule=pipedream", "microbatch=1", "pipeline=4"];
    planned(&untied_mlp(4), &train(minibatches), &cluster(4), &pins).expect("a plan")
}

/// Narayanan et al. 2019, section 3.3: stage `i` of `p` keeps `p - i` versions, here of what its
/// backward pass reads, beside the weights that are updated.
#[test]
fn every_stage_keeps_a_version_for_each_microbatch_in_flight() {
    for (m, expected) in [(8, [4, 3, 2, 1]), (2, [2, 2, 2, 1])] {
        let made = small(m);
        for (role, expected) in made.program.roles.iter().zip(expected) {
            let kept = role
                .buffers
                .iter()
                .filter(|b| b.name.starts_with("prepare."));
            let slots = kept.filter_map(|b| match b.class {
                BufferClass::PerMicrobatch { slots } => Some(slots),
                _ => None,
            });
            let slots: Vec<u32> = slots.collect();
            assert!(
                !slots.is_empty() && slots.iter().all(|&n| n == expected),
                "{slots:?}"
            );
        }
        let moments = made.program.roles.iter().flat_map(|role| &role.states);
        let twice = moments
            .map(|s| &s.path)
            .collect::<std::collections::BTreeSet<_>>();
        let states: usize = made.program.roles.iter().map(|r| r.states.len()).sum();
        assert_eq!(twice.len(), states, "every state stands once");
    }
}

/// The versions that the backward pass of a role reads, with the states that they are copied from.
fn versions(role: &RoleProgram) -> Vec<(BufferId, BufferId)> {
    let forward = role
        .templates
        .iter()
        .filter(|t| t.kind == TemplateKind::Forward);
    let copies = forward
        .flat_map(|t| &t.instructions)
        .filter_map(|i| match i.kind {
            InstrKind::Copy { input, output } => Some((input, output)),
            _ => None,
        });
    let lasts = |b: BufferId| role.buffer(b).class != BufferClass::Transient;
    copies.filter(|(_, version)| lasts(*version)).collect()
}

/// Spoils the program of the second stage; the checker has to name the rule.
fn refused(what: &str, rule: &str, spoil: impl Fn(&mut RoleProgram)) {
    let made = small(6);
    let mut program = made.program.clone();
    spoil(&mut program.roles[1]);
    assert!(program != made.program, "{what}: nothing is spoiled");
    let found = checker::check_program(&made.plan, &made.training, &program);
    let rules: Vec<String> = found.iter().map(ToString::to_string).collect();
    assert!(
        found.iter().any(|v| v.rule == rule),
        "{what}: no {rule} in {rules:#?}"
    );
}

fn backward(role: &mut RoleProgram) -> &mut Vec<ir::program::Instruction> {
    let mut all = role.templates.iter_mut();
    let backward = all.find(|t| t.kind == TemplateKind::Backward);
    &mut backward.expect("a backward pass").instructions
}

fn is_update(kind: &InstrKind) -> bool {
    matches!(
        kind,
        InstrKind::Compute {
            kind: OpKind::AdamW { .. },
            ..
        }
    )
}

#[test]
fn a_backward_pass_that_reads_newer_weights_is_refused() {
    refused("the state in place of its version", "operand", |role| {
        let versions = versions(role);
        for i in backward(role) {
            if let InstrKind::Compute { inputs, .. } = &mut i.kind {
                for b in inputs {
                    if let Some((state, _)) = versions.iter().find(|v| v.1 == *b) {
                        *b = *state;
                    }
                }
            }
        }
    });
}

#[test]
fn too_few_versions_are_refused() {
    refused("one version less", "operand", |role| {
        for (_, version) in versions(role) {
            let b = &mut role.buffers[version.index()];
            if let BufferClass::PerMicrobatch { slots } = &mut b.class {
                *slots -= 1;
            }
        }
    });
}

#[test]
fn an_update_of_old_weights_is_refused() {
    refused("the version in place of the state", "in_place", |role| {
        let versions = versions(role);
        let updates = backward(role).iter_mut().filter(|i| is_update(&i.kind));
        for i in updates {
            if let InstrKind::Compute { inputs, .. } = &mut i.kind
                && let Some((_, version)) = versions.iter().find(|v| v.0 == inputs[0])
            {
                inputs[0] = *version;
            }
        }
    });
}

#[test]
fn versions_that_nobody_takes_are_refused() {
    refused("no copies", "operand", |role| {
        for template in &mut role.templates {
            for i in &mut template.instructions {
                if let InstrKind::Copy { output, .. } = i.kind {
                    i.kind = InstrKind::Fill { value: 0.0, output };
                }
            }
        }
    });
}

#[test]
fn updates_that_are_left_out_are_refused() {
    refused("no updates", "update", |role| {
        for i in backward(role).iter_mut().filter(|i| is_update(&i.kind)) {
            if let InstrKind::Compute { outputs, .. } = &i.kind {
                i.kind = InstrKind::Fill {
                    value: 0.0,
                    output: outputs[0],
                };
            }
        }
    });
}

/// Plans are refused that would need something of all stages at once, or would leave open what is
/// learned.
#[test]
fn what_does_not_go_with_it_is_refused_by_name() {
    let clipped = TrainSpec {
        clip_norm: Some(1.0),
        ..train(4)
    };
    let f16 = TrainSpec {
        precision: Precision::F16,
        ..train(4)
    };
    let own = ["schedule=pipedream", "microbatch=1", "pipeline=2"];
    let with = |pin| [&own[..], &[pin]].concat();
    let untied = untied_mlp(2);
    for (forward, train, pins, expected) in [
        (
            &untied,
            train(4),
            vec!["schedule=pipedream"],
            "pin it too, microbatch=N",
        ),
        (
            &untied,
            clipped,
            own.to_vec(),
            "train with --clip-norm none",
        ),
        (
            &untied,
            f16,
            own.to_vec(),
            "train with --precision bf16 or f32",
        ),
        (
            &mlp(2),
            train(4),
            own.to_vec(),
            "parameter `embed.table` is used by `head.logits`",
        ),
        (
            &untied,
            train(4),
            with("virtual=2"),
            "pinned virtual=2 interleaves the passes of 1f1b",
        ),
        (
            &untied,
            train(4),
            with("offload=optimizer"),
            "leave out the pin offload",
        ),
        (
            &untied,
            train(4),
            vec!["schedule=pipedream", "microbatch=3"],
            "a minibatch of 3 samples does not divide the global batch of 4",
        ),
    ] {
        let name = pins.join(" ");
        let said = planned(forward, &train, &cluster(2), &pins).map(|made| made.plan.schedule);
        let said = said.expect_err(&name).to_string();
        assert!(said.contains(expected), "{name}: {said}");
    }
}

/// Updates belong to the schedule: a plan that says otherwise of one of them is none.
#[test]
fn a_plan_updates_when_its_schedule_does() {
    let made = small(4).plan;
    let synchronous = Plan {
        schedule: ScheduleKind::OneFOneB,
        ..made.clone()
    };
    let mut once = made.clone();
    once.train.minibatch = None;
    let mut pairs = made;
    pairs.train.minibatch = Some(2);
    for (plan, expected) in [
        (
            synchronous,
            "1f1b updates weights once a step, the plan is to update them after every 1 samples",
        ),
        (
            once,
            "pipedream updates weights after every microbatch of 1, the plan is to update them after every step",
        ),
        (pairs, "after every 2 samples"),
    ] {
        let said: Vec<String> = checker::check_plan(&plan)
            .iter()
            .map(ToString::to_string)
            .collect();
        assert!(said.iter().any(|s| s.contains(expected)), "{said:#?}");
    }
}

/// It fills and drains once a step, as 1F1B, but has no step to end: with as many microbatches the
/// bubble is as small. No search takes it unasked.
#[test]
fn it_waits_as_1f1b_does_and_is_never_searched() {
    let few = small(4).plan.predicted.bubble;
    let many = small(32).plan.predicted.bubble;
    assert!(
        many < 0.75 * few,
        "bubble {many} with 32 microbatches, {few} with 4"
    );
    let free = planned(&untied_mlp(4), &train(8), &cluster(4), &[]).expect("a plan");
    assert!(free.plan.schedule != ScheduleKind::PipeDream);
    assert_eq!(free.plan.train.minibatch, None);
}
