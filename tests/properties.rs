//! Random graphs under random plans: what lowering makes is proved by the checker, and ranks
//! that play it compute what a single device does.
//!
//! Graphs, meshes (odd sizes too), pipelines, schedules and the strategy of every op are drawn
//! from a seed. Three notions of equality, by what the draw makes possible:
//! * integer-linear graphs with integer parameters: every sum is exact, so all is equal to
//!   the bit under any plan;
//! * plans that only move data (pipelines, layout changes): equal to the bit on any graph;
//! * everything else: within a tolerance that has room for the order of additions only, or where
//!   the step itself determines fewer digits, within its measured rounding noise.
//!
//! A failure names the seed; `PROPERTY_SEED=n` runs that case alone. `RUN_SLOW_TESTS=1` runs
//! many more cases.
#![allow(clippy::unwrap_used)]

use ir::op::{Binary, Init, OpKind};
use ir::plan::ScheduleKind;
use ir::program::InstrKind;
use ir::testing::{GraphOptions, MAX_SAMPLES, Rng, random_graph, sequence_of};
use ir::training::{Recompute, StateRole, TrainingGraph, training_graph};
use ir::{Graph, Optimizer, Precision, Shape, Task, TensorType, TrainSpec};
use runtime::RuntimeError;
use runtime::execute::{Session, SessionOptions, StateRequest, States};
use runtime::reference::Reference;
use std::time::Duration;
use tests::assert_checked;
use tests::plans::{Random, Recomputed, Setup, Style, bucket_sizes, random_plan};

/// Most ranks of a stage; each is a thread.
const MAX_RANKS: u32 = 14;

/// Runs `case` for each seed: few, or with `RUN_SLOW_TESTS=1` many.
fn cases(first: u64, few: u64, many: u64, case: impl Fn(u64)) {
    if let Ok(seed) = std::env::var("PROPERTY_SEED") {
        return case(seed.parse().expect("PROPERTY_SEED is a number"));
    }
    let slow = std::env::var("RUN_SLOW_TESTS").is_ok_and(|v| v == "1");
    for seed in first..first + if slow { many } else { few } {
        let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| case(seed)));
        assert!(run.is_ok(), "PROPERTY_SEED={seed} fails; see above");
    }
}

/// How close results must be.
#[derive(Clone, Copy, Debug)]
enum Equal {
    /// Loss and states to the bit; integers, so the norm (a sum of large squares) is not.
    Exactly,
    /// Everything to the bit.
    InEveryBit,
    /// Relative to the largest element of each tensor, or to `floor` where that is larger:
    /// gradients of few elements may cancel to a small part of their addends. What is further
    /// off must lie within [`NOISE`] times what rounding is measured to do to this very step.
    Within { tolerance: f64, floor: f64 },
}

/// The difference that f32 sums in another order may have. About one of a thousand graphs cancels
/// more and is held to its noise: seed 20560 is 1.1e-4 off where rounding moves it by 6e-4, seed
/// 70911 up to 7e-4 where rounding moves it by 1e-2.
const SINGLE: Equal = Equal::Within {
    tolerance: 1e-4,
    floor: 1e-3,
};

/// How many times the noise a result may be off. Of 10,000 results of fresh seeds, the ratio was
/// 0.1 in the median, 0.5 in the hundredth largest part and 0.97 at most.
const NOISE: f64 = 2.0;
/// Noisy executions, of which the largest deviation is the noise.
const NOISY: u64 = 8;

/// Something that training leaves: losses, norms, states.
struct Outcome {
    name: String,
    lens: Vec<u64>,
    values: Vec<f32>,
}

impl Outcome {
    fn states(states: States) -> impl Iterator<Item = Outcome> {
        states.into_iter().map(|(path, tensor)| Outcome {
            name: format!("`{path}`"),
            lens: tensor.lens,
            values: tensor.values,
        })
    }

    /// Largest difference of the elements, relative to the largest of `expected` or `floor`.
    fn deviation(&self, expected: &Outcome, floor: f64) -> f64 {
        let values = || self.values.iter().zip(&expected.values);
        let scale = values().fold(floor, |a, (_, e)| a.max(f64::from(e.abs())));
        values().fold(0.0, |worst: f64, (g, e)| {
            let off = (f64::from(*g) - f64::from(*e)).abs() / scale;
            // A figure that is no number is infinitely far off.
            worst.max(if off.is_nan() { f64::INFINITY } else { off })
        })
    }
}

impl Equal {
    /// Compares what a plan left with what the single device did; `noisy` is what the single
    /// device leaves with rounding noise of a seed.
    fn check(
        self,
        got: &[Outcome],
        expected: &[Outcome],
        noisy: impl Fn(u64) -> Vec<Outcome>,
        what: &str,
    ) {
        let mut noise: Option<Vec<Vec<Outcome>>> = None;
        assert_eq!(got.len(), expected.len(), "{what}");
        for (k, (g, e)) in got.iter().zip(expected).enumerate() {
            assert_eq!((&g.name, &g.lens), (&e.name, &e.lens), "{what}");
            assert_eq!(g.values.len(), e.values.len(), "{what}: {}", g.name);
            let (tolerance, floor) = match self {
                Equal::Within { tolerance, floor } => (tolerance, floor),
                Equal::Exactly if g.name.ends_with("norm") => (1e-5, 0.0),
                Equal::Exactly | Equal::InEveryBit => {
                    let wrong = g
                        .values
                        .iter()
                        .zip(&e.values)
                        .position(|(g, e)| match self {
                            Equal::InEveryBit => g.to_bits() != e.to_bits(),
                            // Zeros of both signs are the same integer.
                            _ => g != e,
                        });
                    if let Some(i) = wrong {
                        panic!(
                            "{what}: {}: element {i} is {}, expected {} {self:?}",
                            g.name, g.values[i], e.values[i]
                        );
                    }
                    continue;
                }
            };
            let off = g.deviation(e, floor);
            if std::env::var("PRINT_NOISE").is_ok() {
                let noisy = noise.get_or_insert_with(|| (0..NOISY).map(&noisy).collect());
                let noise = noisy
                    .iter()
                    .map(|n| n[k].deviation(e, floor))
                    .fold(0.0, f64::max);
                eprintln!(
                    "NOISE {} {off:.3e} {noise:.3e}",
                    &what[..12.min(what.len())]
                );
            }
            if off <= tolerance {
                continue;
            }
            let noisy = noise.get_or_insert_with(|| (0..NOISY).map(&noisy).collect());
            let noise = noisy
                .iter()
                .map(|n| n[k].deviation(e, floor))
                .fold(0.0, f64::max);
            assert!(
                off <= NOISE * noise,
                "{what}: {} is off by {off:.1e} of its largest element, and rounding moves it by \
                 {noise:.1e} only",
                g.name
            );
        }
    }
}

/// A graph with data for it.
struct Problem {
    seed: u64,
    forward: Graph,
    train: TrainSpec,
    microbatch: u64,
    n_microbatches: u32,
    batches: Vec<Vec<Vec<u32>>>,
    integer: bool,
}

fn vocab(graph: &Graph) -> u64 {
    let embedding = graph
        .ops()
        .iter()
        .find(|op| op.kind == OpKind::Embedding)
        .unwrap();
    graph.ty(embedding.inputs[0]).shape.bind(1)[0]
}

const INTEGER: GraphOptions = GraphOptions {
    integer_linear: true,
    dropout: false,
    reduce_max: false,
    experts: false,
    images: false,
    state_spaces: false,
    n_layers: 2,
    equal_layers: false,
    blocks_per_layer: 2,
};
const GENERAL: GraphOptions = GraphOptions {
    integer_linear: false,
    dropout: true,
    ..INTEGER
};

/// General graphs with mixtures of experts, which round by less than what separates choices.
const EXPERTS: GraphOptions = GraphOptions {
    experts: true,
    blocks_per_layer: 3,
    ..GENERAL
};

/// General graphs with convolutions.
const IMAGES: GraphOptions = GraphOptions {
    images: true,
    ..GENERAL
};

impl Problem {
    /// A problem of this seed; of integer ones, one whose tokens are a power of two, so that
    /// the division of the loss by their number is exact.
    fn new(seed: u64, options: GraphOptions, precision: Precision) -> Problem {
        let mut rng = Rng::new(seed ^ 0x70_726f_7073);
        let options = GraphOptions {
            n_layers: rng.between(1, 4) as usize,
            equal_layers: rng.one_in(3),
            dropout: options.dropout && rng.one_in(2),
            ..options
        };
        let forward = (0..)
            .map(|k| random_graph(seed.wrapping_mul(1000) + k, &options))
            .find(|g| !options.integer_linear || sequence_of(g).unwrap().is_power_of_two())
            .unwrap();
        let (microbatch, n_microbatches) = match options.integer_linear {
            true => rng.pick(&[(1, 1), (2, 1), (4, 1), (1, 4), (2, 2), (4, 2), (1, 8)]),
            false => rng.pick(&[(1, 1), (3, 1), (2, 2), (3, 2), (1, 5), (5, 1), (2, 3)]),
        };
        let global_batch = microbatch * u64::from(n_microbatches);
        assert!(!options.integer_linear || global_batch <= MAX_SAMPLES);
        let sequence = sequence_of(&forward).unwrap();
        let train = TrainSpec {
            task: Task::Training,
            minibatch: None,
            global_batch,
            sequence,
            precision,
            optimizer: Optimizer::Sgd {
                momentum: if options.integer_linear { 0.0 } else { 0.5 },
                weight_decay: 0.0,
            },
            clip_norm: (!options.integer_linear).then_some(1.0),
            dropout: if options.dropout { 0.25 } else { 0.0 },
            seed,
        };
        let vocab = vocab(&forward);
        let mut sample = || {
            (0..=sequence)
                .map(|_| rng.below(vocab) as u32)
                .collect::<Vec<u32>>()
        };
        let n_steps = if options.integer_linear { 1 } else { 2 };
        let batches = (0..n_steps)
            .map(|_| (0..global_batch).map(|_| sample()).collect())
            .collect();
        Problem {
            seed,
            forward,
            train,
            microbatch,
            n_microbatches,
            batches,
            integer: options.integer_linear,
        }
    }

    /// The same forward passes alone.
    fn of_inference(mut self) -> Problem {
        self.train.task = Task::Inference;
        self.train.dropout = 0.0;
        self
    }

    /// Initial value of a state: integers from -1 to 1, or the declared distribution with
    /// noise where models would start from zeros.
    fn initial(
        &self,
        training: &TrainingGraph,
        path: &str,
        role: StateRole,
        lens: &[u64],
    ) -> Vec<f32> {
        let op = training.graph.op(training.graph.find(path).unwrap());
        let OpKind::State { init, .. } = op.kind else {
            panic!("`{path}` is no state")
        };
        let hash = path.bytes().fold(self.seed, |h, b| {
            h.wrapping_mul(31).wrapping_add(u64::from(b))
        });
        match role {
            // A loss scale of 256, as gradients near the largest f16 overflow under one order of
            // additions and not under another.
            StateRole::Scalar if path == "loss_scale" => vec![1.0 / 256.0],
            StateRole::Parameter if self.integer => {
                let mut rng = Rng::new(hash);
                (0..lens.iter().product::<u64>())
                    .map(|_| rng.below(3) as f32 - 1.0)
                    .collect()
            }
            StateRole::Parameter => {
                let init = if init == Init::Zeros {
                    Init::Normal { std: 0.2 }
                } else {
                    init
                };
                runtime::init::parameter(self.seed, path, init, lens)
            }
            _ => runtime::init::parameter(self.seed, path, init, lens),
        }
    }

    fn role(training: &TrainingGraph, path: &str) -> StateRole {
        training
            .states
            .iter()
            .find(|s| s.path == path)
            .unwrap()
            .role
    }

    /// Plays the program and the reference, and compares all that they leave.
    fn compare(
        &self,
        training: &TrainingGraph,
        program: &ir::program::Program,
        microbatch: u64,
        equal: Equal,
        what: &str,
    ) {
        let name = format!(
            "{what}, {} stages, microbatches {} x {microbatch}",
            program.roles.len(),
            self.train.global_batch / microbatch
        );
        let initial = |path: &str, lens: &[u64]| {
            Ok::<_, RuntimeError>(self.initial(training, path, Problem::role(training, path), lens))
        };
        let m = (self.train.global_batch / microbatch) as u32;
        let single = Reference::new(
            training,
            &self.train,
            microbatch,
            m,
            |p: &str, t: &TensorType| initial(p, &t.shape.bind(1)),
        )
        .unwrap();
        let lr = if self.integer { 1.0 } else { 0.05 };
        let leaves = |mut single: Reference| {
            let mut outcomes = vec![];
            for (i, batch) in self.batches.iter().enumerate() {
                let step = single.step(batch, lr).unwrap();
                outcomes.extend(self.scalars(&name, i, step.loss, step.grad_norm));
            }
            outcomes.extend(Outcome::states(single.export_states()));
            outcomes
        };
        let options = SessionOptions {
            watchdog: Duration::from_secs(60),
            threads_per_rank: Some(1),
            orders: None,
            ..SessionOptions::default()
        };
        let mut session = Session::new(program, &self.train, options, |r: StateRequest<'_>| {
            initial(r.path, r.lens)
        })
        .unwrap();
        let mut got = vec![];
        for (i, batch) in self.batches.iter().enumerate() {
            let step = session.step(batch, lr, false).unwrap();
            got.extend(self.scalars(&name, i, step.loss, step.grad_norm));
        }
        session
            .replicas_agree()
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        got.extend(Outcome::states(session.export_states().unwrap()));
        let noisy = |seed| leaves(single.clone().with_noise(seed));
        equal.check(&got, &leaves(single.clone()), noisy, &name);
    }

    /// Loss and norm of a step, which must be numbers; inference has no norm.
    fn scalars(&self, what: &str, step: usize, loss: f64, norm: f64) -> Vec<Outcome> {
        let mut named = vec![(loss, "loss")];
        match self.train.task {
            Task::Training => named.push((norm, "norm")),
            Task::Inference => assert!(norm.is_nan(), "{what}: norm {norm} in step {step}"),
        }
        let of = |(value, name): (f64, &str)| {
            assert!(value.is_finite(), "{what}: {name} {value} in step {step}");
            Outcome {
                name: format!("step {step}: {name}"),
                lens: vec![],
                values: vec![value as f32],
            }
        };
        named.into_iter().map(of).collect()
    }

    /// Now and then meshes, and stages on each, that layers and microbatches allow.
    fn interleaving(&self, rng: &mut Rng) -> Option<(u32, u32)> {
        let fits = |&(p, v): &(u32, u32)| {
            p * v <= self.forward.layers.len() as u32 && self.n_microbatches.is_multiple_of(p)
        };
        let all: Vec<(u32, u32)> = [(2, 2), (1, 2), (1, 3)].into_iter().filter(fits).collect();
        let first = all.first().copied()?;
        rng.one_in(3).then_some(match rng.one_in(2) {
            true => first,
            false => rng.pick(&all),
        })
    }

    fn setup(&self, style: Style) -> Setup {
        let mut rng = Rng::new(self.seed ^ 0x706c_616e);
        let n_layers = self.forward.layers.len() as u64;
        let mut schedule = rng.pick(ScheduleKind::PLAIN);
        let mut n_stages = rng.between(1, n_layers.min(3));
        if let Some((n_meshes, v)) = self.interleaving(&mut rng) {
            schedule = match v == 2 && rng.one_in(2) {
                true => ScheduleKind::ZbV,
                false => ScheduleKind::Interleaved { virtual_stages: v },
            };
            n_stages = u64::from(n_meshes * v);
        }
        let mut cuts: Vec<u64> = (1..n_layers).collect();
        rng.shuffle(&mut cuts);
        cuts.truncate(n_stages as usize - 1);
        cuts.extend([0, n_layers]);
        cuts.sort_unstable();
        let same = rng.one_in(2).then(|| axes(&mut rng));
        let stages = cuts
            .windows(2)
            .map(|w| {
                (
                    (w[1] - w[0]) as u32,
                    same.clone().unwrap_or_else(|| axes(&mut rng)),
                )
            })
            .collect();
        let recompute = rng.pick(&[
            Recomputed::Named(Recompute::None),
            Recomputed::Named(Recompute::Full),
            Recomputed::Named(Recompute::Selective),
            Recomputed::Random,
        ]);
        let (schedule, recompute) = match self.train.task {
            Task::Training => (schedule, recompute),
            Task::Inference => (ScheduleKind::Forward, Recomputed::Named(Recompute::None)),
        };
        Setup {
            stages,
            microbatch: self.microbatch,
            n_microbatches: self.n_microbatches,
            schedule,
            train: self.train.clone(),
            style,
            recompute,
        }
    }

    /// The property itself.
    fn holds(&self, style: Style, equal: Equal) {
        let setup = self.setup(style);
        let (plan, training) = random_plan(&self.forward, &setup, &mut Random(self.seed));
        let sizes = bucket_sizes(self.seed);
        let program = lowering::lower_in_buckets(&plan, &training, &sizes).unwrap();
        assert_checked(&plan, &training, &program);
        let what = format!(
            "seed {}, {style:?}, {:?} {:?}, recomputed: {:?}",
            self.seed, setup.stages, setup.schedule, setup.recompute
        );
        // The single device keeps everything, whatever the plan recomputes.
        let kept = training_graph(&self.forward, &plan.train).unwrap();
        self.compare(&kept, &program, self.microbatch, equal, &what);
    }
}

/// One to three axes of up to seven ranks, few ranks in all.
fn axes(rng: &mut Rng) -> Vec<u32> {
    loop {
        let n = rng.pick(&[1, 1, 2, 2, 3]);
        let sizes: Vec<u32> = (0..n)
            .map(|_| rng.pick(&[1, 2, 2, 3, 3, 5, 6, 7]))
            .collect();
        if sizes.iter().product::<u32>() <= MAX_RANKS {
            return sizes;
        }
    }
}

#[test]
fn integer_graphs_are_computed_exactly_under_any_plan() {
    cases(0, 40, 210, |seed| {
        Problem::new(seed, INTEGER, Precision::F32).holds(Style::Any, Equal::Exactly)
    });
}

#[test]
fn integer_graphs_are_computed_exactly_under_zero() {
    cases(10_000, 30, 140, |seed| {
        Problem::new(seed, INTEGER, Precision::F32).holds(Style::Zero, Equal::Exactly)
    });
}

#[test]
fn general_graphs_are_computed_under_any_plan() {
    cases(20_000, 40, 170, |seed| {
        Problem::new(seed, GENERAL, Precision::F32).holds(Style::Any, SINGLE)
    });
}

#[test]
fn general_graphs_are_computed_under_zero() {
    cases(30_000, 20, 140, |seed| {
        Problem::new(seed, GENERAL, Precision::F32).holds(Style::Zero, SINGLE)
    });
}

#[test]
fn mixtures_of_experts_are_computed_under_any_plan() {
    cases(70_000, 40, 80, |seed| {
        Problem::new(seed, EXPERTS, Precision::F32).holds(Style::Any, SINGLE)
    });
    cases(80_000, 20, 40, |seed| {
        Problem::new(seed, EXPERTS, Precision::F32).holds(Style::Zero, SINGLE)
    });
    cases(90_000, 20, 40, |seed| {
        Problem::new(seed, EXPERTS, Precision::F32).holds(Style::Moves, Equal::InEveryBit)
    });
}

/// Forward passes alone, as inference has them; halves rest as they are computed with.
#[test]
fn inference_is_computed_under_any_plan() {
    let general = GraphOptions {
        dropout: false,
        ..EXPERTS
    };
    let near = Equal::Within {
        tolerance: 0.01,
        floor: 0.5,
    };
    cases(100_000, 20, 80, |seed| {
        let problem = |options, precision| Problem::new(seed, options, precision).of_inference();
        problem(INTEGER, Precision::F32).holds(Style::Any, Equal::Exactly);
        problem(general, Precision::F32).holds(Style::Any, SINGLE);
        problem(general, Precision::F32).holds(Style::Moves, Equal::InEveryBit);
        problem(general, Precision::Bf16).holds(Style::Zero, near);
    });
}

#[test]
fn convolutions_are_computed_under_any_plan() {
    cases(100_000, 40, 80, |seed| {
        Problem::new(seed, IMAGES, Precision::F32).holds(Style::Any, SINGLE)
    });
    cases(110_000, 20, 40, |seed| {
        Problem::new(seed, IMAGES, Precision::F32).holds(Style::Zero, SINGLE)
    });
    cases(120_000, 20, 40, |seed| {
        Problem::new(seed, IMAGES, Precision::F32).holds(Style::Moves, Equal::InEveryBit)
    });
}

#[test]
fn state_spaces_are_computed_under_any_plan() {
    let options = GraphOptions {
        state_spaces: true,
        ..GENERAL
    };
    cases(130_000, 20, 40, |seed| {
        Problem::new(seed, options, Precision::F32).holds(Style::Any, SINGLE)
    });
    cases(140_000, 10, 20, |seed| {
        Problem::new(seed, options, Precision::F32).holds(Style::Zero, SINGLE)
    });
    cases(150_000, 10, 20, |seed| {
        Problem::new(seed, options, Precision::F32).holds(Style::Moves, Equal::InEveryBit)
    });
}

#[test]
fn moving_data_changes_no_bit() {
    cases(40_000, 30, 170, |seed| {
        Problem::new(seed, GENERAL, Precision::F32).holds(Style::Moves, Equal::InEveryBit)
    });
}

#[test]
fn half_precision_is_near_under_any_plan() {
    cases(50_000, 8, 40, |seed| {
        // Gradients have a norm of at most one. Deep graphs multiply what rounding did to the
        // first ops, so most cases are held to their own noise. The worst known is seed 50122,
        // whose second gradient norm is 24% off under a right plan: rounding moves it by 40%, and a
        // single unit in the last place of one op alone (the cast of a parameter, a product, an
        // attention) by 20 to 43%, whichever of two dozen ops it is. It is the graph, not a place
        // in the plan.
        let near = Equal::Within {
            tolerance: 0.01,
            floor: 0.5,
        };
        Problem::new(seed, GENERAL, Precision::Bf16).holds(Style::Any, near);
        Problem::new(seed, GENERAL, Precision::F16).holds(Style::Zero, near);
    });
}

/// Plans that the search chooses, with and without room in memory.
#[test]
fn chosen_plans_compute_what_the_reference_does() {
    cases(60_000, 12, 40, |seed| {
        let mut rng = Rng::new(seed);
        let integer = rng.one_in(2);
        let (options, equal) = match (integer, seed % 3) {
            (true, _) => (INTEGER, Equal::Exactly),
            (false, 0) => (EXPERTS, SINGLE),
            (false, _) => (GENERAL, SINGLE),
        };
        let problem = Problem::new(seed, options, Precision::F32);
        let n = rng.pick(&[1, 2, 3, 4, 6, 8]);
        let cluster = match rng.below(2) {
            0 => tests::cluster(n),
            // From a little more than the parameters of one device up.
            _ => tests::cluster_with_memory(
                n,
                rng.between(1, 64) * 512 * parameters(&problem.forward).div_ceil(64).max(4),
            ),
        };
        let what = format!(
            "seed {seed} on {n} devices of {}",
            cluster.device.memory_bytes
        );
        match planner::plan(
            &problem.forward,
            &problem.train,
            &cluster,
            &Default::default(),
        ) {
            Ok(made) => {
                assert_checked(&made.plan, &made.training, &made.program);
                assert_eq!(
                    lowering::lower(&made.plan).unwrap(),
                    made.program,
                    "{what}: the plan does not say all"
                );
                problem.compare(
                    &made.training,
                    &made.program,
                    made.plan.microbatch,
                    equal,
                    &what,
                );
            }
            Err(planner::PlanError::Memory { .. } | planner::PlanError::Overrun { .. }) => {}
            Err(e) => panic!("{what}: {e}"),
        }
    });
}

fn parameters(graph: &Graph) -> u64 {
    let states = graph
        .ops()
        .iter()
        .filter(|op| matches!(op.kind, OpKind::State { .. }));
    states.map(|op| numel(&graph.ty(op.outputs[0]).shape)).sum()
}

fn numel(shape: &Shape) -> u64 {
    shape.bind(1).iter().product()
}

/// The comparison notices one wrong operation among all of a step.
#[test]
fn a_wrong_program_does_not_pass() {
    for seed in 0..5 {
        let problem = Problem::new(seed, INTEGER, Precision::F32);
        let (plan, training) = random_plan(
            &problem.forward,
            &problem.setup(Style::Any),
            &mut Random(seed),
        );
        let mut program = lowering::lower(&plan).unwrap();
        let add = OpKind::Binary { f: Binary::Add };
        let instructions = program.roles.iter_mut().flat_map(|r| &mut r.templates);
        let spoiled = instructions
            .flat_map(|t| &mut t.instructions)
            .find_map(|i| match &mut i.kind {
                InstrKind::Compute { kind, .. } if *kind == add => Some(kind),
                _ => None,
            });
        let Some(kind) = spoiled else { continue };
        *kind = OpKind::Binary { f: Binary::Sub };
        let compare = || {
            problem.compare(
                &training,
                &program,
                problem.microbatch,
                Equal::Exactly,
                "spoiled",
            )
        };
        let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(compare));
        assert!(run.is_err(), "seed {seed}: nobody sees the wrong sign");
        return;
    }
    panic!("no program has an addition");
}
