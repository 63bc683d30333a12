//! Ranks against the reference: random graphs, meshes and strategies.

use super::naive::lower;
use super::{Session, SessionOptions, StateRequest, States, StepResult};
use crate::checkpoint::{Background, Unrescued, saving};
use crate::device::Backend;
use crate::error::RuntimeError;
use crate::execute::Local;
use crate::fabric::Meets;
use crate::fabric::threads::Carrier;
use crate::processes::tests::assembled;
use crate::processes::{Head, Letter};
use crate::reference::Reference;
use ir::op::Init;
use ir::program::{InstrKind, Program, StateBuffer};
use ir::testing::{GraphOptions, Rng, random_graph, sequence_of};
use ir::training::{
    LOSS_SCALE, LOSS_SCALE_UNIT, StateRole, TrainingGraph, UPDATES, training_graph,
};
use ir::{Axis, DeviceMesh, LogicalMesh, OpKind, Optimizer, Precision, Rank, Task, TrainSpec};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::Duration;

const OPTIONS: SessionOptions = SessionOptions {
    watchdog: Duration::from_secs(60),
    threads_per_rank: Some(1),
    orders: None,
    data: None,
    record: None,
    processes: None,
    backend: Backend::Cpu,
    matmuls: crate::device::cuda::Matmuls::USUAL,
    meets: Meets::Host,
    last_resort: None,
    leaves: None,
    run: None,
};

struct Case {
    training: TrainingGraph,
    spec: TrainSpec,
    meshes: Vec<LogicalMesh>,
    microbatch: u64,
    n_microbatches: u32,
    batches: Vec<Vec<Vec<u32>>>,
    integer: bool,
    seed: u64,
}

fn vocab(training: &TrainingGraph) -> u64 {
    let embedding = training
        .graph
        .ops()
        .iter()
        .find(|op| op.kind == OpKind::Embedding)
        .unwrap();
    training.graph.ty(embedding.inputs[0]).shape.bind(1)[0]
}

impl Case {
    fn new(seed: u64, options: &GraphOptions, precision: Precision, optimizer: Optimizer) -> Self {
        let mut rng = Rng::new(seed ^ 0x5eed);
        let graph = random_graph(seed, options);
        let sequence = sequence_of(&graph).unwrap();
        let (microbatch, n_microbatches) = (rng.pick(&[1, 2, 3]), rng.pick(&[1u32, 2]));
        let global_batch = microbatch * u64::from(n_microbatches);
        let dropout = if options.dropout { 0.25 } else { 0.0 };
        let spec = TrainSpec {
            task: Task::Training,
            minibatch: None,
            global_batch,
            sequence,
            precision,
            optimizer,
            dropout,
            seed,
            clip_norm: if options.integer_linear {
                None
            } else {
                Some(1.0)
            },
        };
        let training = training_graph(&graph, &spec).unwrap();
        let mut first = 0;
        let mut mesh = |sizes: &[u32]| {
            let devices = DeviceMesh {
                first_rank: Rank(first),
                n_devices: sizes.iter().product(),
            };
            first += devices.n_devices;
            let axes = sizes
                .iter()
                .enumerate()
                .map(|(i, &size)| Axis {
                    name: format!("a{i}"),
                    size,
                })
                .collect();
            LogicalMesh::new(devices, axes).unwrap()
        };
        let meshes = match rng.below(2) {
            0 => vec![mesh(rng.pick(&[
                &[1][..],
                &[2],
                &[3],
                &[2, 2],
                &[3, 2],
                &[2, 1, 2],
            ]))],
            _ => (0..rng.between(2, 4))
                .map(|_| mesh(rng.pick(&[&[1][..], &[2], &[3], &[2, 2]])))
                .collect(),
        };
        let vocab = vocab(&training);
        let sample = |rng: &mut Rng| (0..=sequence).map(|_| rng.below(vocab) as u32).collect();
        let batches = (0..2)
            .map(|_| (0..global_batch).map(|_| sample(&mut rng)).collect())
            .collect();
        Case {
            training,
            spec,
            meshes,
            microbatch,
            n_microbatches,
            batches,
            integer: options.integer_linear,
            seed,
        }
    }

    fn initial(&self, path: &str, role: StateRole, lens: &[u64]) -> Vec<f32> {
        let op = self
            .training
            .graph
            .op(self.training.graph.find(path).unwrap());
        match (&op.kind, role) {
            // A loss scale of 256: with 65536, values near the largest f16 overflow under some
            // layouts and not under others.
            (_, StateRole::Scalar) if path == "loss_scale" => vec![1.0 / 256.0],
            (OpKind::State { .. }, StateRole::Parameter) if self.integer => {
                let mut rng = Rng::new(crate::rng::path_hash(path));
                (0..lens.iter().product::<u64>())
                    .map(|_| rng.below(3) as f32 - 1.0)
                    .collect()
            }
            (
                OpKind::State {
                    init: Init::Zeros, ..
                },
                StateRole::Parameter,
            ) => crate::init::parameter(1, path, Init::Normal { std: 0.2 }, lens),
            (OpKind::State { init, .. }, _) => crate::init::parameter(1, path, *init, lens),
            other => panic!("{other:?}"),
        }
    }

    fn reference(&self) -> Reference {
        let initial = |path: &str, ty: &ir::TensorType| {
            let role = if path.starts_with("loss_scale") {
                StateRole::Scalar
            } else {
                StateRole::Parameter
            };
            Ok::<_, RuntimeError>(self.initial(path, role, &ty.shape.bind(1)))
        };
        Reference::new(
            &self.training,
            &self.spec,
            self.microbatch,
            self.n_microbatches,
            initial,
        )
        .unwrap()
    }

    fn program(&self, plan: u64) -> Program {
        let (microbatch, n) = (self.microbatch, self.n_microbatches);
        lower(&self.training, &self.meshes, microbatch, n, plan)
    }

    fn session(&self, plan: u64) -> Session {
        let initial = |r: StateRequest<'_>| Ok(self.initial(r.path, r.role, r.lens));
        Session::new(&self.program(plan), &self.spec, OPTIONS, initial).unwrap()
    }

    /// The same as several processes would, each of which is a thread with connections to the
    /// others, and what gives the first one its states. Their ends come with it.
    fn in_processes(
        &self,
        plan: u64,
        begin: impl FnOnce(&Program, SessionOptions) -> Result<Session, RuntimeError>,
    ) -> (Session, Vec<JoinHandle<Result<bool, RuntimeError>>>) {
        let program = self.program(plan);
        let n_ranks: u32 = program.roles.iter().map(|r| r.mesh.n_devices()).sum();
        let mut processes = assembled((n_ranks as usize).min(3))
            .into_iter()
            .map(Arc::new);
        let of = |processes| SessionOptions {
            processes: Some(processes),
            ..OPTIONS
        };
        let first = of(processes.next().unwrap());
        let members = processes.map(|process| {
            let (program, spec, options) = (program.clone(), self.spec.clone(), of(process));
            std::thread::spawn(move || crate::processes::serve(&program, &spec, options))
        });
        let members = members.collect();
        (begin(&program, first).unwrap(), members)
    }

    fn resumed(&self, plan: u64, folder: &Path) -> Session {
        let found = crate::checkpoint::find(folder).unwrap();
        let checkpoint = Arc::new(found.checkpoint);
        Session::resume(&self.program(plan), &self.spec, OPTIONS, &checkpoint).unwrap()
    }

    /// Two steps on ranks and in the reference, within a tolerance.
    fn compare(&self, tolerance: f64) {
        let (got, expected) = (self.on_ranks(), self.in_reference(None));
        assert_eq!(got.len(), expected.len());
        for (got, expected) in got.iter().zip(&expected) {
            assert_eq!(got.0, expected.0);
            let what = format!(
                "seed {}, {} stages: {}",
                self.seed,
                self.meshes.len(),
                got.0
            );
            self.close(&got.1, &expected.1, tolerance, &what);
        }
    }

    /// The same where rounding matters: within the tolerance or within twice what rounding is
    /// measured to do to this very case. Says of how many of its figures that is no more than
    /// [`MOST_NOISE`]; of the others it is not known what is right.
    fn compare_in_noise(&self, tolerance: f64) -> [usize; 2] {
        let expected = self.in_reference(None);
        let noisy: Vec<_> = (0..8).map(|seed| self.in_reference(Some(seed))).collect();
        let off = |a: &[f64], b: &[f64]| {
            let scale = b.iter().fold(1e-3f64, |s, x| s.max(x.abs()));
            let each = a.iter().zip(b).map(|(x, y)| (x - y).abs() / scale);
            each.fold(0.0, f64::max)
        };
        let noise = |k: usize| {
            let each = noisy.iter().map(|n| off(&n[k].1, &expected[k].1));
            each.fold(0.0, f64::max)
        };
        let noise: Vec<f64> = (0..expected.len()).map(noise).collect();
        let got = self.on_ranks();
        for (k, (name, values)) in got.iter().enumerate() {
            let (off, noise) = (off(values, &expected[k].1), noise[k]);
            assert!(
                noise > MOST_NOISE || off <= tolerance.max(2.0 * noise),
                "seed {}: {name} is off by {off:.1e}, rounding moves it by {noise:.1e}",
                self.seed
            );
        }
        let said = noise.iter().filter(|n| **n <= MOST_NOISE).count();
        [said, noise.len()]
    }

    /// Losses, norms and states after two steps on ranks.
    fn on_ranks(&self) -> Vec<(String, Vec<f64>)> {
        let mut session = self.session(self.seed);
        let mut outcomes = Vec::new();
        for (i, batch) in self.batches.iter().enumerate() {
            outcomes.push((
                format!("validation {i}"),
                vec![session.validate(batch).unwrap()],
            ));
            let step = session.step(batch, 0.05, i == 1).unwrap();
            outcomes.push((format!("loss {i}"), vec![step.loss]));
            outcomes.push((format!("norm {i}"), vec![step.grad_norm]));
            let n_timed = if i == 1 { session.n_ranks() } else { 0 };
            assert_eq!(step.timings.len(), n_timed);
        }
        session.replicas_agree().unwrap();
        outcomes.extend(wide(session.export_states().unwrap()));
        outcomes
    }

    /// The same in the reference, with noise of a seed.
    fn in_reference(&self, noise: Option<u64>) -> Vec<(String, Vec<f64>)> {
        let mut reference = self.reference();
        if let Some(seed) = noise {
            reference = reference.with_noise(seed);
        }
        let mut outcomes = Vec::new();
        for (i, batch) in self.batches.iter().enumerate() {
            let loss = reference.validate(batch).unwrap();
            outcomes.push((format!("validation {i}"), vec![loss]));
            let step = reference.step(batch, 0.05).unwrap();
            outcomes.push((format!("loss {i}"), vec![step.loss]));
            outcomes.push((format!("norm {i}"), vec![step.grad_norm]));
        }
        outcomes.extend(wide(reference.export_states()));
        outcomes
    }

    #[track_caller]
    fn close(&self, got: &[f64], expected: &[f64], tolerance: f64, what: &str) {
        assert_eq!(got.len(), expected.len(), "{what}");
        let scale = expected.iter().fold(1e-3f64, |a, b| a.max(b.abs()));
        for (i, (g, e)) in got.iter().zip(expected).enumerate() {
            assert!(
                (g - e).abs() <= tolerance * scale,
                "{what}: element {i} is {g}, expected {e} (scale {scale})"
            );
        }
    }
}

/// Names with lengths, and elements, of states.
fn wide(states: States) -> impl Iterator<Item = (String, Vec<f64>)> {
    states.into_iter().map(|(path, tensor)| {
        let values = tensor.values.iter().map(|&v| f64::from(v)).collect();
        (format!("{path} {:?}", tensor.lens), values)
    })
}

/// The most that rounding may change a figure that says anything about half precision.
const MOST_NOISE: f64 = 0.05;

const SGD: Optimizer = Optimizer::Sgd {
    momentum: 0.5,
    weight_decay: 0.0,
};
const ADAM: Optimizer = Optimizer::AdamW {
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-4,
    weight_decay: 0.1,
};
const GENERAL: GraphOptions = GraphOptions {
    integer_linear: false,
    dropout: true,
    reduce_max: false,
    experts: false,
    images: false,
    state_spaces: false,
    n_layers: 2,
    equal_layers: false,
    blocks_per_layer: 2,
};

#[test]
fn any_sharding_computes_what_the_reference_does() {
    for seed in 0..60 {
        Case::new(seed, &GENERAL, Precision::F32, SGD).compare(2e-5);
    }
}

/// Sums of integers are exact in any order. The loss is divided by the number of tokens, a
/// power of two here, and steps are multiples of a power of two.
#[test]
fn integer_graphs_are_computed_exactly() {
    let options = GraphOptions {
        integer_linear: true,
        dropout: false,
        ..GENERAL
    };
    let sgd = Optimizer::Sgd {
        momentum: 0.0,
        weight_decay: 0.0,
    };
    let mut n_cases = 0;
    for seed in 0..200 {
        let case = Case::new(seed, &options, Precision::F32, sgd);
        if !(case.spec.global_batch * case.spec.sequence).is_power_of_two() {
            continue;
        }
        n_cases += 1;
        let (mut reference, mut session) = (case.reference(), case.session(seed));
        let expected = reference.step(&case.batches[0], 1.0).unwrap();
        let got = session.step(&case.batches[0], 1.0, false).unwrap();
        assert_eq!(got.loss.to_bits(), expected.loss.to_bits(), "seed {seed}");
        assert!(
            expected.loss == 0.0 || (expected.loss * 1024.0).fract() == 0.0,
            "seed {seed}: {}",
            expected.loss
        );
        assert_eq!(
            session.export_states().unwrap(),
            reference.export_states(),
            "seed {seed}"
        );
    }
    assert!(n_cases > 40, "{n_cases}");
}

#[test]
fn half_precision_on_ranks_is_near_the_reference() {
    for (precision, tolerance, least) in
        [(Precision::Bf16, 0.01, 0.7), (Precision::F16, 0.002, 0.9)]
    {
        let (mut said, mut all) = (0, 0);
        for seed in 0..40 {
            let of_case = Case::new(seed, &GENERAL, precision, SGD).compare_in_noise(tolerance);
            (said, all) = (said + of_case[0], all + of_case[1]);
        }
        let share = said as f64 / all as f64;
        assert!(share > least, "only {said} of {all} figures say anything");
    }
}

/// A step that an overflow skips changes nothing but the loss scale, and AdamW's next update is
/// its first one.
#[test]
fn a_skipped_step_is_no_update() {
    let options = GraphOptions {
        dropout: false,
        ..GENERAL
    };
    for seed in 0..6 {
        let case = Case::new(seed, &options, Precision::F16, ADAM);
        let (mut session, mut reference) = (case.session(seed), case.reference());
        let start = session.export_states().unwrap();
        let scaled = |by: f32| {
            let mut states = start.clone();
            states.get_mut(LOSS_SCALE).unwrap().values = vec![by];
            states
        };
        let batch = &case.batches[0];
        session.import_states(&scaled(1e12)).unwrap();
        let skipped = session.step(batch, 0.01, false).unwrap();
        assert!(skipped.loss.is_finite() && !skipped.grad_norm.is_finite());
        skipped.check(0, &TrainSpec::default()).unwrap();
        assert_eq!(session.export_states().unwrap(), scaled(0.5e12));
        assert!(reference.set_state(LOSS_SCALE, vec![1e12]));
        reference.step(batch, 0.01).unwrap();
        assert_eq!(reference.export_states(), scaled(0.5e12));

        session.import_states(&start).unwrap();
        session.step(batch, 0.01, false).unwrap();
        let mut first = case.session(seed);
        first.step(batch, 0.01, false).unwrap();
        let updated = first.export_states().unwrap();
        assert_eq!(updated[UPDATES].values, [1.0]);
        assert_eq!(session.export_states().unwrap(), updated, "seed {seed}");
        assert!(reference.set_state(LOSS_SCALE, start[LOSS_SCALE].values.clone()));
        reference.step(batch, 0.01).unwrap();
        let mut first = case.reference();
        first.step(batch, 0.01).unwrap();
        assert_eq!(reference.export_states(), first.export_states());
    }
}

/// The loss scale falls to one and no further, where another overflow ends the run.
#[test]
fn a_loss_scale_that_cannot_fall_ends_the_run() {
    let case = Case::new(1, &GENERAL, Precision::F16, ADAM);
    let mut session = case.session(1);
    let mut states = session.export_states().unwrap();
    states.get_mut(LOSS_SCALE).unwrap().values = vec![3.0 / LOSS_SCALE_UNIT as f32];
    // Values outside the range of f16 overflow under any scale.
    for (path, tensor) in &mut states {
        if case.training.graph.find(path).is_some() && !path.starts_with(LOSS_SCALE) {
            tensor.values.iter_mut().for_each(|x| *x += 1e6);
        }
    }
    session.import_states(&states).unwrap();
    for (step, scale) in [3.0, 1.5].into_iter().enumerate() {
        let skipped = session.step(&case.batches[0], 0.01, false).unwrap();
        assert_eq!(skipped.loss_scale, Some(scale));
        skipped.check(step as u64, &TrainSpec::default()).unwrap();
    }
    let last = session.step(&case.batches[0], 0.01, false).unwrap();
    let said = last
        .check(2, &TrainSpec::default())
        .unwrap_err()
        .to_string();
    assert!(said.starts_with("the loss of step 2 is "), "{said}");
    assert!(
        said.ends_with(" at a loss scale of 1: training diverged"),
        "{said}"
    );
    states.get_mut(LOSS_SCALE).unwrap().values = vec![1.0 / LOSS_SCALE_UNIT as f32];
    assert_eq!(session.export_states().unwrap(), states);
}

/// A figure that is no number ends a run, but in a step that updated nothing and a smaller loss
/// scale may help.
#[test]
fn only_skipped_steps_may_overflow() {
    let check = |loss: f64, grad_norm: f64, loss_scale: Option<f64>| {
        let step = StepResult {
            loss,
            grad_norm,
            loss_scale,
            seconds: 1.0,
            spent: vec![],
            timings: vec![],
            peak_bytes: vec![],
        };
        step.check(7, &TrainSpec::default())
            .map_or_else(|e| e.to_string(), |()| "goes on".into())
    };
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    // Where stages update by themselves nobody knows a norm.
    let asynchronous = TrainSpec {
        minibatch: Some(1),
        ..TrainSpec::default()
    };
    let step = |loss| StepResult {
        loss,
        grad_norm: nan,
        loss_scale: None,
        seconds: 1.0,
        spent: vec![],
        timings: vec![],
        peak_bytes: vec![],
    };
    assert!(step(1.0).check(7, &asynchronous).is_ok());
    assert!(step(nan).check(7, &asynchronous).is_err());
    for scale in [None, Some(1.0), Some(2.0)] {
        assert_eq!(check(1.0, 2.0, scale), "goes on");
    }
    for (loss, norm) in [(1.0, inf), (nan, nan), (inf, nan), (1.0, nan)] {
        assert_eq!(check(loss, norm, Some(2.0)), "goes on");
    }
    assert_eq!(
        check(nan, nan, None),
        "the loss of step 7 is NaN: training diverged"
    );
    assert_eq!(
        check(1.0, inf, None),
        "the gradient norm of step 7 is inf: training diverged"
    );
    assert_eq!(
        check(1.0, nan, Some(1.0)),
        "the gradient norm of step 7 is NaN at a loss scale of 1: training diverged"
    );
    // The step was made.
    assert_eq!(
        check(inf, 1.0, Some(1024.0)),
        "the loss of step 7 is inf at a loss scale of 1024: training diverged"
    );
}

#[test]
fn a_run_goes_on_under_another_plan() {
    for seed in 100..106 {
        let case = Case::new(seed, &GENERAL, Precision::F32, ADAM);
        let mut first = case.session(1);
        first.step(&case.batches[0], 0.01, false).unwrap();
        let states: States = first.export_states().unwrap();
        let dir = tempfile::tempdir().unwrap();
        crate::checkpoint::save(dir.path(), &mut first, "", "").unwrap();
        let mut second = case.resumed(2, dir.path());
        assert_eq!(second.step_number(), first.step_number());
        assert_eq!(second.export_states().unwrap(), states);
        second.replicas_agree().unwrap();
        let (a, b) = (
            first.step(&case.batches[1], 0.01, false).unwrap(),
            second.step(&case.batches[1], 0.01, false).unwrap(),
        );
        case.close(
            &[a.loss, a.grad_norm],
            &[b.loss, b.grad_norm],
            1e-5,
            "the step after",
        );
    }
}

#[test]
fn the_same_run_gives_the_same_bits() {
    let case = Case::new(3, &GENERAL, Precision::F32, SGD);
    let run = || {
        let mut s = case.session(5);
        s.step(&case.batches[0], 0.1, false).unwrap();
        s.export_states().unwrap()
    };
    assert_eq!(run(), run());
}

#[test]
fn bad_batches_are_refused() {
    let case = Case::new(0, &GENERAL, Precision::F32, SGD);
    let mut session = case.session(1);
    let mut short = case.batches[0].clone();
    short.pop();
    assert!(matches!(
        session.step(&short, 0.1, false),
        Err(RuntimeError::Batch(_))
    ));
    session.step(&case.batches[0], 0.1, false).unwrap();
}

/// A case with at least three ranks, lowered, with one rank's stage changed by `spoil`.
fn spoiled(spoil: impl Fn(&mut Program), watchdog: Duration) -> RuntimeError {
    let case = (0..)
        .map(|seed| Case::new(seed, &GENERAL, Precision::F32, SGD))
        .find(|c| c.meshes.len() > 1 && c.meshes[1].n_devices() > 1)
        .unwrap();
    let mut program = lower(
        &case.training,
        &case.meshes,
        case.microbatch,
        case.n_microbatches,
        1,
    );
    spoil(&mut program);
    let options = SessionOptions {
        watchdog,
        threads_per_rank: Some(1),
        orders: None,
        data: None,
        record: None,
        processes: None,
        backend: Backend::Cpu,
        matmuls: crate::device::cuda::Matmuls::USUAL,
        meets: Meets::Host,
        last_resort: None,
        leaves: None,
        run: None,
    };
    let mut session = Session::new(&program, &case.spec, options, |r: StateRequest<'_>| {
        Ok(case.initial(r.path, r.role, r.lens))
    })
    .unwrap();
    let error = session.step(&case.batches[0], 0.1, false).unwrap_err();
    assert!(matches!(
        session.step(&case.batches[0], 0.1, false),
        Err(RuntimeError::Ended(_))
    ));
    assert!(matches!(session.params(), Err(RuntimeError::Ended(_))));
    error
}

#[test]
fn a_failing_instruction_is_named_and_nobody_hangs() {
    let started = std::time::Instant::now();
    // An op without an operand fails on all ranks of stage 1; the others wait for them.
    let error = spoiled(
        |program| {
            let forward = &mut program.roles[1].templates[4].instructions;
            let unary = forward.iter_mut().find_map(|i| match &mut i.kind {
                InstrKind::Compute { inputs, path, .. } => Some((inputs, path)),
                _ => None,
            });
            let (inputs, path) = unary.unwrap();
            inputs.clear();
            *path = "the.spoiled.op".into();
        },
        Duration::from_secs(100),
    );
    assert!(started.elapsed() < Duration::from_secs(50));
    let text = error.to_string();
    assert!(
        text.contains("the.spoiled.op") && text.contains("stage1") && text.contains("Forward"),
        "{text}"
    );
}

#[test]
fn a_panicking_rank_does_not_leave_others_waiting() {
    // A transpose of a matrix as if it had no dims.
    let error = spoiled(
        |program| {
            let forward = program.roles[1].templates[4].instructions.iter_mut();
            let mut kinds = forward.filter_map(|i| {
                if let InstrKind::Compute { kind, inputs, .. } = &mut i.kind {
                    Some((kind, inputs.len()))
                } else {
                    None
                }
            });
            let (kind, _) = kinds.find(|(_, n)| *n == 1).unwrap();
            *kind = OpKind::Transpose { perm: vec![] };
        },
        Duration::from_secs(100),
    );
    assert!(
        matches!(&error, RuntimeError::Panic { message, .. } if message.contains("permutes")),
        "{error}"
    );
}

#[test]
fn a_missing_send_is_found_by_the_watchdog() {
    let error = spoiled(
        |program| program.roles[0].trace.retain(|s| s.template.index() != 5),
        Duration::from_millis(300),
    );
    assert!(error.to_string().contains("waited"), "{error}");
}

/// Every part of every state is written once, and ranks that hold the same part share the work.
#[test]
fn ranks_share_the_writing_of_states() {
    let mut shared = 0;
    for seed in 100..200 {
        let case = Case::new(seed, &GENERAL, Precision::F32, SGD);
        let program = case.program(seed);
        let shares = crate::checkpoint::shares(&program);
        let mut written = std::collections::BTreeMap::<String, usize>::new();
        for role in &program.roles {
            let mut most = (usize::MAX, 0);
            for rank in role.mesh.ranks() {
                let mut elements = 0;
                for state in shares.get(&rank).into_iter().flatten() {
                    let b = role.buffer(state.buffer);
                    let part = Local::of_rank(b.dtype, &b.lens, &b.spec, &role.mesh, rank);
                    let n = part.unwrap().valid().iter().product::<usize>();
                    *written.entry(state.path.clone()).or_default() += n;
                    elements += n;
                }
                most = (most.0.min(elements), most.1.max(elements));
            }
            let whole = |s: &&StateBuffer| role.buffer(s.buffer).spec.is_replicated();
            let largest = role.states.iter().map(|s| {
                let lens = &role.buffer(s.buffer).lens;
                lens.iter().product::<u64>() as usize
            });
            // Where every rank holds everything, shares differ by no more than a state.
            if role.mesh.n_devices() > 1 && role.states.iter().all(|s| whole(&s)) {
                shared += 1;
                assert!(most.1 - most.0 <= largest.max().unwrap_or(0));
            }
        }
        for role in &program.roles {
            for state in &role.states {
                let lens = &role.buffer(state.buffer).lens;
                let all = lens.iter().product::<u64>() as usize;
                assert_eq!(written[&state.path], all, "seed {seed}: {}", state.path);
            }
        }
    }
    assert!(shared > 0);
}

/// A rank that cannot write its file fails the checkpoint, and nothing else.
#[test]
fn a_session_goes_on_after_a_checkpoint_that_failed() {
    let case = Case::new(3, &GENERAL, Precision::F32, SGD);
    let mut session = case.session(5);
    let dir = tempfile::tempdir().unwrap();
    // No folder can be where a file is.
    let file = tempfile::NamedTempFile::new().unwrap();
    let missing = file.path().join("missing");
    assert!(crate::checkpoint::save(&missing, &mut session, "", "").is_err());
    session.write_shards(&missing).unwrap_err();
    session.step(&case.batches[0], 0.1, false).unwrap();
    crate::checkpoint::save(dir.path(), &mut session, "", "").unwrap();
    // A step so long that what it leaves is no number.
    session.step(&case.batches[1], 1e300, false).unwrap();
    let error = crate::checkpoint::save(dir.path(), &mut session, "", "").unwrap_err();
    assert!(matches!(error, RuntimeError::NotFinite { .. }), "{error}");
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!(case.resumed(5, dir.path()).step_number(), 1);
}

/// A run does not depend on which process has which rank: losses, norms, timings, states
/// and checkpoints come by messages, and so do errors.
#[test]
fn workers_are_told_and_tell_by_messages() {
    let mut n_shared = 0;
    for seed in 0..6 {
        let precision = [Precision::F32, Precision::F16][seed as usize % 2];
        let case = Case::new(seed, &GraphOptions::default(), precision, SGD);
        let initial = |r: StateRequest<'_>| Ok(case.initial(r.path, r.role, r.lens));
        let mut here = case.session(seed);
        let (mut there, members) =
            case.in_processes(seed, |p, o| Session::new(p, &case.spec, o, initial));
        n_shared += usize::from(here.n_ranks() > 1);
        for (i, batch) in case.batches.iter().enumerate() {
            let [a, b] = [&mut here, &mut there].map(|s| s.step(batch, 0.05, i == 1).unwrap());
            assert_eq!((a.loss as f32, a.loss_scale), (b.loss as f32, b.loss_scale));
            assert!((a.grad_norm - b.grad_norm).abs() <= 1e-12 * a.grad_norm.abs());
            assert_eq!(a.timings.len(), b.timings.len());
            assert_eq!(a.peak_bytes.len(), b.peak_bytes.len());
            assert!(b.seconds > 0.0);
        }
        there.replicas_agree().unwrap();
        let states = here.export_states().unwrap();
        assert_eq!(states, there.export_states().unwrap());
        // Written by workers, read by workers under another plan.
        let dir = tempfile::tempdir().unwrap();
        crate::checkpoint::save(dir.path(), &mut there, "", "").unwrap();
        let checkpoint = Arc::new(crate::checkpoint::find(dir.path()).unwrap().checkpoint);
        let (mut again, more) = case.in_processes(seed + 1, |p, o| {
            Session::resume(p, &case.spec, o, &checkpoint)
        });
        assert_eq!(states, again.export_states().unwrap());
        drop(again);
        more.into_iter()
            .for_each(|m| assert!(!m.join().unwrap().unwrap()));
        // A token that the model does not have fails the run of all, with the rank that read it.
        let mut bad = case.batches[0].clone();
        bad.iter_mut().for_each(|s| s.fill(u32::MAX));
        let error = there.step(&bad, 0.05, false).unwrap_err();
        assert!(!error.is_consequence(), "{error}");
        assert!(matches!(there.export_states(), Err(RuntimeError::Ended(_))));
        drop(there);
        for member in members {
            let told = member.join().unwrap().unwrap_err();
            assert!(
                matches!(&told, RuntimeError::EndedByFirst(e) if *e == error.to_string()),
                "{told}"
            );
        }
    }
    assert!(n_shared >= 3, "most cases have one rank");
}

/// A case whose three ranks are on one mesh.
fn of_three_ranks(seed: u64) -> Case {
    let mut case = Case::new(seed, &GENERAL, Precision::F32, ADAM);
    let devices = DeviceMesh {
        first_rank: Rank(0),
        n_devices: 3,
    };
    let axis = Axis {
        name: "a".into(),
        size: 3,
    };
    case.meshes = vec![LogicalMesh::new(devices, vec![axis]).unwrap()];
    case
}

/// A parameter that all ranks of a program of one role keep whole.
fn kept_by_all(program: &Program) -> Option<&StateBuffer> {
    let role = &program.roles[0];
    let is_kept = |s: &&StateBuffer| {
        s.role == StateRole::Parameter && role.buffer(s.buffer).spec.is_replicated()
    };
    role.states.iter().find(is_kept)
}

/// A case of three ranks that all keep some parameter whole.
fn replicated() -> (Case, Program) {
    let mut cases = (0..).map(|seed| {
        let case = of_three_ranks(seed);
        let program = case.program(seed);
        (case, program)
    });
    cases.find(|(_, p)| kept_by_all(p).is_some()).unwrap()
}

/// A session of replicated states after a step, with its program.
fn stepped() -> (Session, Program) {
    let (case, program) = replicated();
    let initial = |r: StateRequest<'_>| Ok(case.initial(r.path, r.role, r.lens));
    let mut session = Session::new(&program, &case.spec, OPTIONS, initial).unwrap();
    session.step(&case.batches[0], 0.1, false).unwrap();
    (session, program)
}

#[test]
fn a_turned_bit_of_a_replica_is_found() {
    let (mut session, program) = stepped();
    session.check_replicas().unwrap();
    let state = kept_by_all(&program).unwrap();
    session.turn_bit(Rank(1), state, 3).unwrap();
    let expected = format!(
        "after 1 step, state `{}` of rank1 is not that of rank0, rank2, which keep the same part of it",
        state.path
    );
    // One group sums for all ranks, so a library promises them the same too.
    for order in ir::Order::ALL {
        session.promise(order);
        let error = session.check_replicas().unwrap_err().to_string();
        assert_eq!(error, expected);
    }
}

/// The ranks that are left after a loss have all states in memory, and not all the same ones: no
/// checkpoint is made of them where they are compared.
#[test]
fn turned_bits_are_not_rescued() {
    let (mut session, program) = stepped();
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let rescue = |session: &mut Session, compares| {
        let made = saving(folder, compares).rescue(session);
        (made, crate::checkpoint::numbered(folder).len())
    };
    let (made, there) = rescue(&mut session, true);
    assert_eq!((made.unwrap().step, there), (1, 1));
    let state = kept_by_all(&program).unwrap();
    session.turn_bit(Rank(1), state, 3).unwrap();
    let (made, there) = rescue(&mut session, true);
    let Err(Unrescued::Differing(RuntimeError::Replicas { step, odd, .. })) = made else {
        panic!("{made:?}");
    };
    assert_eq!((step, odd, there), (1, vec![Rank(1)], 1));
    // Nobody asked.
    let (made, there) = rescue(&mut session, false);
    assert_eq!((made.unwrap().step, there), (1, 2));
}

/// A bit that turns before states are written, or copied, is in no checkpoint: ranks compare what they
/// have after that, and the checkpoint gets its name last.
#[test]
fn turned_bits_are_not_saved() {
    let (mut session, program) = stepped();
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    let of = saving(folder, true);
    let mut background = Background::default();
    let n_there = || std::fs::read_dir(folder).unwrap().count();
    of.save(&mut session).unwrap();
    background.begin(&of, &mut session).unwrap();
    background.wait(&mut session).unwrap().path.unwrap();
    assert_eq!(n_there(), 2);
    let state = kept_by_all(&program).unwrap();
    session.turn_bit(Rank(1), state, 3).unwrap();
    let is_found = |e: RuntimeError| matches!(&e, RuntimeError::Replicas { step: 1, odd, .. } if *odd == [Rank(1)]);
    assert!(is_found(of.save(&mut session).unwrap_err()));
    assert!(is_found(background.begin(&of, &mut session).unwrap_err()));
    assert!(!background.is_busy());
    assert_eq!(n_there(), 2);
    // The session can still go on.
    session.turn_bit(Rank(1), state, 3).unwrap();
    of.save(&mut session).unwrap();
}

/// The step at which a norm is no number changes no state, and playing it again finds where that
/// came from: the op that meets a parameter that is too large.
#[test]
fn the_first_tensor_that_is_no_number_is_named() {
    let case = Case::new(1, &GENERAL, Precision::F32, ADAM);
    let mut session = case.session(1);
    let mut states = session.export_states().unwrap();
    for (path, tensor) in &mut states {
        if case.training.graph.find(path).is_some() && tensor.lens.len() > 1 {
            tensor
                .values
                .iter_mut()
                .for_each(|x| *x = x.signum() * 3e38);
        }
    }
    session.import_states(&states).unwrap();
    let step = session.step(&case.batches[0], 0.01, false).unwrap();
    assert!(!step.grad_norm.is_finite(), "{step:?}");
    assert_eq!(
        session.export_states().unwrap(),
        states,
        "states were written"
    );
    let first = session.first_spoiled().unwrap().unwrap();
    assert!(first.contains("written by Forward"), "{first}");
    assert!(first.contains("of microbatch 0"), "{first}");
    // And where a state is none already.
    let (path, tensor) = states.iter_mut().next_back().unwrap();
    tensor.values[0] = f32::NAN;
    let path = path.clone();
    session.import_states(&states).unwrap();
    session.step(&case.batches[0], 0.01, false).unwrap();
    let first = session.first_spoiled().unwrap().unwrap();
    assert!(
        first.starts_with(&format!("state `{path}` of rank")),
        "{first}"
    );
}

/// A parameter that is no number on one rank alone, which has a process of its own: the step at
/// which the others hear of it changes a state of nobody, that tensor and that rank are named, and
/// all end.
#[test]
fn a_state_that_is_no_number_on_one_rank_stops_all_at_the_same_step() {
    let mut n_stopped = 0;
    for seed in 0..8 {
        let case = of_three_ranks(seed);
        let Some(state) = kept_by_all(&case.program(seed)).cloned() else {
            continue;
        };
        let initial = |r: StateRequest<'_>| Ok(case.initial(r.path, r.role, r.lens));
        let (mut session, members) =
            case.in_processes(seed, |p, o| Session::new(p, &case.spec, o, initial));
        let bits = |session: &mut Session| {
            let mut states = session.export_states().unwrap();
            states.remove(&state.path);
            let bits = |t: super::session::StateTensor| t.values.into_iter().map(f32::to_bits);
            let all = states
                .into_iter()
                .map(|(path, t)| (path, bits(t).collect()));
            all.collect::<Vec<(String, Vec<u32>)>>()
        };
        let good = session.step(&case.batches[0], 0.01, false).unwrap();
        good.check(0, &case.spec).unwrap();
        let before = bits(&mut session);
        session.spoil(Rank(1), &state).unwrap();
        let step = session.step(&case.batches[1], 0.01, false).unwrap();
        let error = step.check(1, &case.spec).err();
        // Where the rank computes nothing of it, as of a batch that is too small to share, nobody
        // has heard of it yet.
        let first = session.first_spoiled().unwrap();
        let (Some(error), Some(first)) = (error, first) else {
            drop(session);
            members
                .into_iter()
                .for_each(|m| assert!(!m.join().unwrap().unwrap()));
            continue;
        };
        n_stopped += 1;
        assert!(error.to_string().contains(" of step 1 is "), "{error}");
        let named = format!("state `{}` of rank1 has ", state.path);
        assert!(first.starts_with(&named), "seed {seed}: {first}");
        assert!(
            before == bits(&mut session),
            "seed {seed}: states were written"
        );
        // Not on any rank: the others still have the same, and differ from the spoiled one alone.
        let odd = session.check_replicas().unwrap_err().to_string();
        let only = format!(
            "state `{}` of rank1 is not that of rank0, rank2",
            state.path
        );
        assert!(odd.contains(&only), "seed {seed}: {odd}");
        session.fail(&error.to_string());
        drop(session);
        for member in members {
            let told = member.join().unwrap().unwrap_err();
            assert!(
                matches!(&told, RuntimeError::EndedByFirst(e) if *e == error.to_string()),
                "{told}"
            );
        }
    }
    assert!(n_stopped > 1, "only {n_stopped} of 8 cases heard of it");
}

/// A process 0 all of whose threads stand still between two steps, when no rank waits for one of
/// it: the others hear nothing more, and end.
#[test]
fn a_process_0_that_stands_still_is_noticed() {
    let case = of_three_ranks(0);
    let program = case.program(0);
    let n_ranks: u32 = program.roles.iter().map(|r| r.mesh.n_devices()).sum();
    let mut processes = assembled(n_ranks as usize).into_iter().map(Arc::new);
    let first = processes.next().unwrap();
    let members = processes.map(|process| {
        let options = SessionOptions {
            processes: Some(process),
            watchdog: Duration::from_millis(500),
            ..OPTIONS
        };
        let (program, spec) = (program.clone(), case.spec.clone());
        let (tell, told) = channel();
        std::thread::spawn(move || {
            let _ = tell.send(crate::processes::serve(&program, &spec, options));
        });
        told
    });
    let members: Vec<_> = members.collect();
    assert!(!members.is_empty());
    for to in 1..=members.len() {
        let (head, body) = (Head::Alive, None);
        first.carrier().send(to, Letter { head, body });
    }
    for member in members {
        let told = member.recv_timeout(Duration::from_secs(60));
        let told = told.expect("nobody notices").unwrap_err();
        let is_named = matches!(
            told,
            RuntimeError::Gone {
                process: 0,
                is_silent: true,
                ..
            }
        );
        assert!(is_named, "{told}");
    }
}
