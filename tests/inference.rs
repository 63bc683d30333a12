//! Plans for inference: forward passes alone, with the losses of the single device.

use ir::program::{Program, Space, TemplateKind};
use ir::training::{StateRole, training_graph};
use ir::{Bytes, Precision, Task};
use planner::PlanError;
use runtime::execute::{Session, SessionOptions};
use tests::{Case, cluster, cluster_with_memory, planned, relative};

/// A case whose plans are for inference.
fn inference(name: &str, precision: Precision) -> Case {
    let mut case = Case::load(name);
    case.train.task = Task::Inference;
    case.train.precision = precision;
    case
}

/// Every program of these has a kind of parallelism of its own.
const PLANS: [(u32, &[&str]); 7] = [
    (1, &["data=1", "tensor=1", "pipeline=1"]),
    (2, &["data=2", "tensor=1", "pipeline=1", "zero=0"]),
    (4, &["data=4", "tensor=1", "pipeline=1", "zero=3"]),
    (4, &["data=2", "tensor=2", "pipeline=1", "microbatch=2"]),
    (2, &["data=1", "tensor=1", "pipeline=2", "microbatch=1"]),
    (4, &["data=2", "pipeline=2", "microbatch=2", "zero=3"]),
    (4, &["data=1", "tensor=2", "pipeline=2", "microbatch=1"]),
];

/// The losses of a plan's ranks, in list order and in random orders of their streams, beside those
/// of one device, which computes them by the training graph.
fn check(case: &Case, n_devices: u32, pins: &[&str]) {
    let name = format!("{} on {n_devices}: {}", case.forward.name, pins.join(" "));
    let made = planned(&case.forward, &case.train, &cluster(n_devices), pins)
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    let trained = ir::TrainSpec {
        task: Task::Training,
        ..case.train.clone()
    };
    let training = training_graph(&case.forward, &trained).expect("the training graph builds");
    let by_training = case.single(&training, made.plan.microbatch);
    let mut single = case.single(&made.training, made.plan.microbatch);
    let mut session = case.session(&made.program);
    let mut in_orders = case.session_in_orders(&made.program, 7);
    let params = session.params().expect("the parameters are gathered");
    for batch in case.batches.iter().take(3) {
        let expected = by_training.validate(batch).expect("the single device runs");
        let one = single.step(batch, 0.0).expect("the single device runs");
        assert_eq!(one.loss, expected, "{name}: the reference of inference");
        let many = session.step(batch, 0.0, false).expect("the ranks run");
        let again = in_orders.step(batch, 0.0, false).expect("the ranks run");
        assert!(many.grad_norm.is_nan(), "{name}: a gradient norm");
        assert_eq!(many.loss, again.loss, "{name}: streams as queues");
        // Sums of halves differ by their order; f32's by its last digits.
        let tolerance = match case.train.precision {
            Precision::F32 => 1e-5,
            _ => 5e-3,
        };
        match n_devices {
            1 => assert_eq!(many.loss, expected, "{name}"),
            _ => assert!(
                relative(many.loss, expected) < tolerance,
                "{name}: {} against {expected}",
                many.loss
            ),
        }
    }
    let after = session.params().expect("the parameters are gathered");
    assert_eq!(params, after, "{name}: nothing changes");
    session.replicas_agree().expect("replicas are equal");
}

#[test]
fn losses_are_those_of_the_single_device() {
    for name in [
        "gpt2_small_tied",
        "llama_untied_rope",
        "mixtral",
        "deepseek_v3",
    ] {
        let case = inference(name, Precision::F32);
        PLANS.iter().for_each(|(n, pins)| check(&case, *n, pins));
        check(&case, 4, &[]);
    }
}

#[test]
fn halves_rest_as_they_are_computed_with() {
    for precision in [Precision::Bf16, Precision::F16] {
        let case = inference("gpt2_small_tied", precision);
        PLANS.iter().for_each(|(n, pins)| check(&case, *n, pins));
    }
}

/// Templates of a program that belong to microbatches, but for exchanges.
fn passes(program: &Program) -> Vec<TemplateKind> {
    let templates = program.roles.iter().flat_map(|r| &r.templates);
    let kinds = templates.map(|t| t.kind).filter(|k| k.pass().is_some());
    kinds.collect()
}

/// A rank has the parameters in the precision that they are computed in, once, and no more: no
/// moments, no gradients, no activation beyond its microbatch. Matmuls do 2 FLOPs per parameter
/// and token where training does 6.
#[test]
fn nothing_of_training_is_left() {
    let case = inference("llama_untied_rope", Precision::Bf16);
    let trained = ir::TrainSpec {
        task: Task::Training,
        ..case.train.clone()
    };
    let pins = ["data=1", "tensor=1", "pipeline=1", "microbatch=2"];
    let made = planned(&case.forward, &case.train, &cluster(1), &pins).expect("a plan");
    let with = planned(&case.forward, &trained, &cluster(1), &pins).expect("a plan");
    assert_eq!(passes(&made.program), [TemplateKind::Forward]);
    assert_eq!(made.plan.schedule.name(), "forward");
    assert!(made.plan.predicted.checkpoint.is_none());
    let states = &made.training.states;
    assert!(states.iter().all(|s| s.role == StateRole::Parameter));
    let n_elements: u64 = states
        .iter()
        .map(|s| {
            made.training
                .graph
                .ty(s.read)
                .shape
                .bind(1)
                .iter()
                .product::<u64>()
        })
        .sum();
    let stage = &made.plan.predicted.stages[0];
    // Buffers are aligned.
    let slack = 256 * states.len() as u64;
    let persistent = stage.persistent_bytes.0;
    assert!((2 * n_elements..2 * n_elements + slack).contains(&persistent));
    assert_eq!(stage.activation_bytes.0, 0);
    let arena = |p: &Program| p.roles[0].arena_bytes;
    assert!(arena(&made.program) < arena(&with.program) / 4);
    let flops = |t, train: &ir::TrainSpec| cost_model::StepWork::of(t, train).model_flops.0;
    let (forward, all) = (
        flops(&made.training, &case.train),
        flops(&with.training, &trained),
    );
    assert_eq!(3.0 * forward, all);
    let predicted = &made.plan.predicted;
    assert!(predicted.step_time_s < with.plan.predicted.step_time_s);
    assert_eq!(predicted.mfu, predicted.hfu);
}

/// A model that does not fit whole is split by the search without any pin, as parameters alone.
#[test]
fn parameters_are_split_where_they_do_not_fit() {
    let case = inference("gpt2_small_tied", Precision::F32);
    let whole = planned(&case.forward, &case.train, &cluster(1), &[]).expect("a plan");
    let room = whole.plan.predicted.stages[0].persistent_bytes.0 * 4 / 5;
    let small = cluster_with_memory(4, room);
    let made = planned(&case.forward, &case.train, &small, &[]).expect("a plan");
    assert!(made.program.roles.iter().all(|r| r.arena_bytes <= room));
    let one = cluster_with_memory(1, room);
    let error = planned(&case.forward, &case.train, &one, &[]).expect_err("no room");
    assert!(matches!(
        error,
        PlanError::Memory { .. } | PlanError::Overrun { .. }
    ));
}

/// Parameters may rest in host memory; each pass copies them in, and no bit changes.
#[test]
fn parameters_rest_in_hosts() {
    let mut hosts = cluster(4);
    if let Some(storage) = &mut hosts.storage {
        storage.host_memory_bytes = Some(Bytes(64 << 20));
    }
    for precision in [Precision::F32, Precision::Bf16] {
        let case = inference("llama_tied", precision);
        let pins = ["data=4", "tensor=1", "pipeline=1", "microbatch=4", "zero=0"];
        let plain = planned(&case.forward, &case.train, &hosts, &pins).expect("a plan");
        let moved = [&pins[..], &["offload=parameters"]].concat();
        let moved = planned(&case.forward, &case.train, &hosts, &moved).expect("a plan");
        for (a, b) in plain.program.roles.iter().zip(&moved.program.roles) {
            assert_eq!(a.arena(Space::Host), 0);
            assert!(b.arena(Space::Host) > 0 && b.arena_bytes < a.arena_bytes);
        }
        let (mut whole, mut staged) = (case.session(&plain.program), case.session(&moved.program));
        for batch in case.batches.iter().take(2) {
            let loss = |s: &mut Session| s.step(batch, 0.0, false).expect("the ranks run").loss;
            assert_eq!(loss(&mut whole), loss(&mut staged));
        }
    }
}

/// A schedule is of training or of inference; the checker and lowering hold plans to it.
#[test]
fn a_schedule_of_the_other_task_is_refused() {
    let case = inference("gpt2_small_tied", Precision::F32);
    let made = planned(&case.forward, &case.train, &cluster(1), &[]).expect("a plan");
    let mut plan = made.plan.clone();
    plan.schedule = ir::plan::ScheduleKind::OneFOneB;
    let said = "1f1b is a schedule of training, the plan is one of inference";
    let found = checker::check_plan(&plan);
    assert!(
        found.iter().any(|v| v.to_string().contains(said)),
        "{found:?}"
    );
    let error = lowering::lower_training(&plan, &made.training).expect_err("no program");
    assert!(error.to_string().contains(said), "{error}");
    let mut plan = made.plan;
    plan.train.task = Task::Training;
    let found = checker::check_plan(&plan);
    let said = "forward is a schedule of inference, the plan is one of training";
    assert!(
        found.iter().any(|v| v.to_string().contains(said)),
        "{found:?}"
    );
}

/// Weights that training left in f32, with moments beside them, are what inference in halves begins
/// with.
#[test]
fn a_checkpoint_of_training_loads_for_inference() {
    let mut case = Case::load("gpt2_small_tied");
    let pins = ["data=2", "tensor=1", "pipeline=1", "zero=2"];
    let trained = planned(&case.forward, &case.train, &cluster(2), &pins).expect("a plan");
    let mut session = case.session(&trained.program);
    for batch in &case.batches {
        session.step(batch, case.lr, false).expect("a step runs");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let text = &trained.plan.graph;
    runtime::checkpoint::save(folder.path(), &mut session, "0", text).expect("it is saved");
    let found = runtime::checkpoint::find(folder.path()).expect("it is found");
    let checkpoint = std::sync::Arc::new(found.checkpoint);
    let batch = &case.batches[0];
    let expected = session.validate(batch).expect("it validates");
    case.train.task = Task::Inference;
    for (precision, tolerance) in [(Precision::F32, 1e-6), (Precision::Bf16, 5e-3)] {
        case.train.precision = precision;
        let pins = ["data=1", "tensor=2", "pipeline=2", "microbatch=1"];
        let made = planned(&case.forward, &case.train, &cluster(4), &pins).expect("a plan");
        let options = SessionOptions::default();
        let ranks = Session::resume(&made.program, &case.train, options, &checkpoint);
        let mut ranks = ranks.expect("the checkpoint has the parameters");
        let loss = ranks.step(batch, 0.0, false).expect("a step runs").loss;
        assert!(
            relative(loss, expected) < tolerance,
            "{precision:?}: {loss} against {expected}"
        );
    }
}
