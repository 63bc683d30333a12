//! Ranks against the reference: random graphs, meshes and strategies.

use super::naive::lower;
use super::{Session, SessionOptions, StateRequest, States};
use crate::error::RuntimeError;
use crate::reference::Reference;
use ir::op::Init;
use ir::program::{InstrKind, Program};
use ir::testing::{GraphOptions, Rng, random_graph, sequence_of};
use ir::training::{StateRole, TrainingGraph, training_graph};
use ir::{Axis, DeviceMesh, LogicalMesh, OpKind, Optimizer, Precision, Rank, TrainSpec};
use std::time::Duration;

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

    fn session(&self, plan: u64) -> Session {
        let program = lower(
            &self.training,
            &self.meshes,
            self.microbatch,
            self.n_microbatches,
            plan,
        );
        let options = SessionOptions {
            watchdog: Duration::from_secs(60),
            threads_per_rank: Some(1),
            orders: None,
        };
        Session::new(&program, &self.spec, options, |r: StateRequest<'_>| {
            Ok(self.initial(r.path, r.role, r.lens))
        })
        .unwrap()
    }

    /// Two steps on ranks and in the reference.
    fn compare(&self, tolerance: f64) {
        let (mut reference, mut session) = (self.reference(), self.session(self.seed));
        for (i, batch) in self.batches.iter().enumerate() {
            let name = format!(
                "seed {}, step {i}, {} stages, {} ranks",
                self.seed,
                self.meshes.len(),
                session.n_ranks()
            );
            self.close(
                &[session.validate(batch).unwrap()],
                &[reference.validate(batch).unwrap()],
                tolerance,
                &format!("{name}: validation loss"),
            );
            let expected = reference.step(batch, 0.05).unwrap();
            let got = session.step(batch, 0.05, i == 1).unwrap();
            self.close(
                &[got.loss],
                &[expected.loss],
                tolerance,
                &format!("{name}: loss"),
            );
            self.close(
                &[got.grad_norm],
                &[expected.grad_norm],
                tolerance,
                &format!("{name}: norm"),
            );
            assert_eq!(
                got.timings.len(),
                if i == 1 { session.n_ranks() } else { 0 }
            );
        }
        session.replicas_agree().unwrap();
        let (got, expected) = (session.export_states().unwrap(), reference.export_states());
        assert_eq!(
            got.keys().collect::<Vec<_>>(),
            expected.keys().collect::<Vec<_>>()
        );
        for (path, tensor) in &expected {
            assert_eq!(got[path].lens, tensor.lens);
            let wide = |v: &[f32]| v.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
            self.close(
                &wide(&got[path].values),
                &wide(&tensor.values),
                tolerance,
                &format!("seed {}: state {path}", self.seed),
            );
        }
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

const SGD: Optimizer = Optimizer::Sgd {
    momentum: 0.5,
    weight_decay: 0.0,
};
const GENERAL: GraphOptions = GraphOptions {
    integer_linear: false,
    dropout: true,
    reduce_max: false,
    experts: false,
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
    for seed in 0..12 {
        Case::new(seed, &GENERAL, Precision::Bf16, SGD).compare(0.15);
        Case::new(seed, &GENERAL, Precision::F16, SGD).compare(0.03);
    }
}

#[test]
fn a_run_goes_on_under_another_plan() {
    let adam = Optimizer::AdamW {
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-4,
        weight_decay: 0.1,
    };
    for seed in 100..106 {
        let case = Case::new(seed, &GENERAL, Precision::F32, adam);
        let mut first = case.session(1);
        first.step(&case.batches[0], 0.01, false).unwrap();
        let states: States = first.export_states().unwrap();
        let mut second = case.session(2);
        second.import_states(&states).unwrap();
        second.set_step_number(first.step_number());
        assert_eq!(second.export_states().unwrap(), states);
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
