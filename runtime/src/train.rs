//! The loop of a run: steps of training, or of inference.

use crate::checkpoint::{self, Background, Checkpoint, Ended, Rescued, Unrescued};
use crate::data::{Batches, DataError, Dataset};
use crate::device::{Backend, cuda};
use crate::error::RuntimeError;
use crate::execute::{Session, SessionOptions, StateRequest};
use crate::measure::Recorder;
use crate::processes::Doing;
use crate::schedule::LrSchedule;
use crate::stragglers::{Finding, Stragglers};
use ir::measurement::{Measurement, StepMeasurement};
use ir::program::Program;
use ir::{Task, TrainSpec};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// The plan to run, and the data to run it on.
#[derive(Clone, Debug)]
pub struct TrainOptions<'a> {
    /// The lowered plan.
    pub program: &'a Program,
    /// The training spec.
    pub spec: &'a TrainSpec,
    /// Name of the model, for the measurement.
    pub name: &'a str,
    /// Fingerprint of the plan document, for the measurement.
    pub plan_hash: &'a str,
    /// The data.
    pub dataset: &'a Arc<Dataset>,
    /// Learning rate by step.
    pub schedule: &'a LrSchedule,
    /// Training steps to do in this run.
    pub steps: u64,
    /// Validate before the first step, after every so many and after the last; never when `None`.
    /// Steps are counted from the first of all runs.
    pub validate_every: Option<u64>,
    /// Batches in a validation, at least 1; the loss is their mean.
    pub validation_batches: u64,
    /// How many steps, the last ones, are profiled.
    pub profile_steps: u64,
    /// Checkpoint to start from.
    pub resume: Option<Arc<Checkpoint>>,
    /// Checkpoints to write on the way.
    pub checkpoints: Option<Periodic<'a>>,
    /// Compare the states of ranks that keep the same ones after every so many steps, after the last
    /// one, and before each checkpoint: none holds what a comparison would find.
    pub check_replicas: Option<u64>,
    /// Once true, no further step begins: the run ends as if it had been asked for the steps
    /// done by then.
    pub stop: Option<&'a AtomicBool>,
    /// Watchdog and threads.
    pub session: SessionOptions,
}

/// Checkpoints that a run writes on its way; none after its last step, which is its caller's.
#[derive(Clone, Copy, Debug)]
pub struct Periodic<'a> {
    /// The folder that has them.
    pub folder: &'a Path,
    /// Steps from one to the next, counted from the first of all runs.
    pub every: u64,
    /// How many stay, the newest ones.
    pub kept: usize,
    /// The text of the plan's forward graph.
    pub model: &'a str,
    /// Whether steps wait until a checkpoint is written, in place of going on beside it.
    pub waits: bool,
    /// Whether the ranks that are left when others are lost write one of what they have in memory.
    pub rescues: bool,
}

/// The reports of `train` while it runs.
#[derive(Debug)]
pub enum Progress {
    /// A step is done.
    Step {
        /// Its measurement.
        measured: StepMeasurement,
        /// Most bytes that a rank had so far.
        peak_bytes: u64,
        /// Whether loss scaling skipped its update.
        skipped: bool,
    },
    /// A validation loss after so many training steps.
    Validation {
        /// Steps done.
        step: u64,
        /// The loss.
        loss: f64,
    },
    /// A checkpoint after so many training steps is there.
    Checkpoint {
        /// Steps done.
        step: u64,
        /// Its folder.
        path: PathBuf,
    },
    /// Something holds the ranks up, or does so no more.
    Straggler {
        /// Steps done.
        step: u64,
        /// How.
        finding: Finding,
    },
    /// A checkpoint that was due had to wait for the one before it.
    Held {
        /// Steps done.
        step: u64,
        /// How long.
        seconds: f64,
    },
    /// Ranks are lost, and the run has failed: a checkpoint of what the others have in memory, or why
    /// there is none.
    Rescued(Result<Rescued, Unrescued>),
    /// A checkpoint could not be written; the run goes on, and the earlier ones are as they were.
    NoCheckpoint {
        /// Steps done.
        step: u64,
        /// Why.
        problem: String,
    },
}

/// Seconds up to which a checkpoint that waits for another one is not worth saying.
const HELD_S: f64 = 0.05;

/// A run that ended.
pub struct Trained {
    /// The measurement.
    pub measurement: Measurement,
    /// The ranks with the final states.
    pub session: Session,
}

/// The batches of a run: the same in all its processes.
///
/// Fails as [`Batches::new`] does.
pub fn batches(
    dataset: &Arc<Dataset>,
    spec: &TrainSpec,
    validates: bool,
) -> Result<Batches, DataError> {
    let shape = (spec.sequence as usize, spec.global_batch);
    Batches::new(Arc::clone(dataset), shape, spec.seed, validates)
}

/// Trains, or computes losses, as the options say; `initial` gives initial values when nothing is
/// resumed (see [`Session::new`]).
///
/// The samples of step `n` depend on the data file, the spec's seed and `n` alone, so a resumed
/// run goes on as if it had never stopped. Ends with an error, and writes nothing, where a loss
/// or a gradient norm is no number; steps that f16's loss scaling skips are no reason.
pub fn train(
    options: &TrainOptions<'_>,
    initial: impl FnMut(StateRequest<'_>) -> Result<Vec<f32>, RuntimeError>,
    mut on_progress: impl FnMut(Progress),
) -> Result<Trained, RuntimeError> {
    let (program, spec) = (options.program, options.spec);
    let data = batches(options.dataset, spec, options.validate_every.is_some())?;
    let session = SessionOptions {
        data: Some(Arc::new(data)),
        ..options.session.clone()
    };
    // Declared before the session, so that an error ends the ranks that write for it first.
    let mut background = Background::default();
    let mut session = match &options.resume {
        None => Session::new(program, spec, session, initial)?,
        Some(checkpoint) => Session::resume(program, spec, session, checkpoint)?,
    };
    let mut recorder = Recorder::new(
        options.program,
        options.spec,
        options.name,
        options.plan_hash,
    );
    if let Some(processes) = &options.session.processes {
        recorder.executed_in(processes);
    }
    if options.session.backend == Backend::Cuda {
        let n_gpus = cuda::count()?.min(session.n_ranks());
        recorder.on_gpus(&cuda::name()?, n_gpus);
    }
    let made = steps(
        options,
        (&mut session, &mut background),
        &mut recorder,
        &mut on_progress,
    );
    // A checkpoint that is on its way is one, if it can be, whatever ended the steps. It is of an
    // earlier step than what is written now, so it comes first.
    let ended = background.wait(&mut session);
    let settled = settle(ended, &session, &mut on_progress);
    let periodic = options.checkpoints.filter(|p| p.rescues);
    if let (Err(RuntimeError::Gone { .. }), Some(p)) = (&made, periodic) {
        let of = (options.plan_hash, p.model);
        let compares = options.check_replicas.is_some();
        let rescued = checkpoint::rescue(p.kept, p.folder, (&mut session, compares), of);
        on_progress(Progress::Rescued(rescued));
    }
    made.and(settled)?;
    Ok(Trained {
        measurement: recorder.finish(options.program),
        session,
    })
}

/// Makes the steps, with what is due on the way.
///
/// Fails as [`train`] does; a checkpoint may be on its way then, as at the end.
fn steps(
    options: &TrainOptions<'_>,
    (session, background): (&mut Session, &mut Background),
    recorder: &mut Recorder,
    on_progress: &mut dyn FnMut(Progress),
) -> Result<(), RuntimeError> {
    let spec = options.spec;
    let pulse = session.pulse();
    let during = |doing| pulse.as_ref().map(|pulse| pulse.during(doing));
    let _steps = during(Doing::Steps);
    let on_progress = &mut |progress: Progress| {
        let _telling = during(Doing::Telling);
        on_progress(progress);
    };
    // The host does not see where a GPU waits.
    let is_cpu = options.session.backend == Backend::Cpu;
    let mut stragglers = is_cpu.then(|| Stragglers::new(session.roles()));
    let stopped = || options.stop.is_some_and(|s| s.load(Ordering::Relaxed));
    let validate = |(session, background): (&mut Session, &mut Background),
                    recorder: &mut Recorder,
                    on_progress: &mut dyn FnMut(Progress)|
     -> Result<(), RuntimeError> {
        let (step, n) = (session.step_number(), options.validation_batches.max(1));
        let mut sum = 0.0;
        for i in 0..n {
            // It may take longer than many steps.
            if stopped() {
                return Ok(());
            }
            let loss = session.validation_loss(i)?;
            if !loss.is_finite() {
                let e = RuntimeError::Diverged {
                    step,
                    figure: "validation loss".into(),
                    value: loss,
                    loss_scale: None,
                    first: session.first_spoiled().unwrap_or(None),
                };
                return Err(end_for(e, (session, background), on_progress));
            }
            sum += loss;
        }
        let loss = sum / n as f64;
        recorder.validation(step, loss);
        on_progress(Progress::Validation { step, loss });
        Ok(())
    };
    if options.validate_every.is_some() && !stopped() {
        validate((session, background), recorder, on_progress)?;
    }
    // All ranks begin with the same states.
    let mut compared = session.step_number();
    let mut compare = |(session, background): (&mut Session, &mut Background),
                       on_progress: &mut dyn FnMut(Progress)|
     -> Result<(), RuntimeError> {
        let step = session.step_number();
        if compared == step {
            return Ok(());
        }
        compared = step;
        let done = session.check_replicas();
        done.map_err(|e| end_for(e, (session, background), on_progress))
    };
    for i in 0..options.steps {
        if stopped() {
            break;
        }
        let step = session.step_number();
        let lr = match spec.task {
            Task::Training => options.schedule.lr_at(step),
            Task::Inference => 0.0,
        };
        let profile = options.steps - i <= options.profile_steps;
        let result = session.train(lr, profile)?;
        if let Err(mut e) = result.check(step, spec) {
            if let RuntimeError::Diverged { first, .. } = &mut e {
                *first = session.first_spoiled().unwrap_or(None);
            }
            return Err(end_for(e, (session, background), on_progress));
        }
        let done = session.step_number();
        let is_due = |n: u64| n > 0 && done.is_multiple_of(n);
        if options.check_replicas.is_some_and(is_due) {
            compare((session, background), on_progress)?;
        }
        let measured = recorder.step(options.program, step, lr, &result);
        on_progress(Progress::Step {
            measured,
            peak_bytes: result.peak_bytes.iter().copied().max().unwrap_or(0),
            skipped: result.loss_scale.is_some() && !result.grad_norm.is_finite(),
        });
        for finding in stragglers.iter_mut().flat_map(|s| s.step(&result.spent)) {
            let step = session.step_number();
            on_progress(Progress::Straggler { step, finding });
        }
        let due = options
            .validate_every
            .is_some_and(|n| is_due(n) || i + 1 == options.steps);
        if due && !stopped() {
            validate((session, background), recorder, on_progress)?;
        }
        let is_last = i + 1 == options.steps || stopped();
        let _alone = during(Doing::Alone);
        let ended = background.poll(session);
        settle(ended, session, on_progress)?;
        let periodic = options.checkpoints.filter(|p| !is_last && is_due(p.every));
        if let Some(periodic) = periodic {
            if options.check_replicas.is_some() {
                compare((session, background), on_progress)?;
            }
            save(
                periodic,
                (session, background),
                options.plan_hash,
                on_progress,
            )?;
        }
    }
    match options.check_replicas {
        Some(_) => compare((session, background), on_progress),
        None => Ok(()),
    }
}

/// Ends the ranks for what was found in their results, which they are told. A checkpoint that is on
/// its way is of an earlier step, which was good, and is waited for before: after that they write
/// nothing more.
fn end_for(
    why: RuntimeError,
    (session, background): (&mut Session, &mut Background),
    on_progress: &mut dyn FnMut(Progress),
) -> RuntimeError {
    let pulse = session.pulse();
    let _alone = pulse.as_ref().map(|pulse| pulse.during(Doing::Alone));
    let ended = background.wait(session);
    // Where the ranks cannot go on either, what was found first is why.
    let _ = settle(ended, session, on_progress);
    session.fail(&why.to_string());
    why
}

/// Writes a checkpoint that is due, or begins to.
///
/// Fails only when the ranks cannot go on.
fn save(
    periodic: Periodic<'_>,
    (session, background): (&mut Session, &mut Background),
    plan: &str,
    on_progress: &mut dyn FnMut(Progress),
) -> Result<(), RuntimeError> {
    let Periodic {
        folder,
        kept,
        model,
        waits,
        ..
    } = periodic;
    let step = session.step_number();
    if background.is_busy() {
        let since = Instant::now();
        settle(background.wait(session), session, on_progress)?;
        let seconds = since.elapsed().as_secs_f64();
        if seconds > HELD_S {
            on_progress(Progress::Held { step, seconds });
        }
    }
    let path = match waits {
        true => checkpoint::save_keeping(kept, folder, session, plan, model),
        false => match background.begin(kept, folder, session, (plan, model)) {
            Ok(()) => return Ok(()),
            Err(e) => Err(e),
        },
    };
    settle(Some(Ended { step, path }), session, on_progress)
}

/// Says how a checkpoint ended.
///
/// Fails only when the ranks cannot go on.
fn settle(
    ended: Option<Ended>,
    session: &Session,
    on_progress: &mut dyn FnMut(Progress),
) -> Result<(), RuntimeError> {
    let Some(Ended { step, path }) = ended else {
        return Ok(());
    };
    match path {
        Ok(path) => on_progress(Progress::Checkpoint { step, path }),
        Err(e) if session.has_ended() => return Err(e),
        Err(e) => on_progress(Progress::NoCheckpoint {
            step,
            problem: e.to_string(),
        }),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::find;
    use crate::data::DataOptions;
    use crate::execute::naive::lower;
    use crate::schedule::Decay;
    use ir::testing::{GraphOptions, random_graph, sequence_of};
    use ir::training::{LOSS_SCALE, TrainingGraph, UPDATES, training_graph};
    use ir::{Axis, DeviceMesh, LogicalMesh, OpKind, Rank};
    use safetensors::tensor::TensorView;
    use std::path::Path;

    fn meshes() -> Vec<LogicalMesh> {
        let mesh = |first, sizes: [u32; 1]| {
            let devices = DeviceMesh {
                first_rank: Rank(first),
                n_devices: sizes.iter().product(),
            };
            LogicalMesh::new(
                devices,
                sizes
                    .iter()
                    .map(|&size| Axis {
                        name: "x".into(),
                        size,
                    })
                    .collect(),
            )
            .unwrap()
        };
        vec![mesh(0, [2]), mesh(2, [1])]
    }

    fn setup() -> (TrainingGraph, TrainSpec, u32) {
        let graph = random_graph(5, &GraphOptions::default());
        let spec = TrainSpec {
            global_batch: 4,
            sequence: sequence_of(&graph).unwrap(),
            ..TrainSpec::default()
        };
        let table = graph
            .ops()
            .iter()
            .find(|op| op.kind == OpKind::Embedding)
            .unwrap()
            .inputs[0];
        let vocab = graph.ty(table).shape.bind(1)[0] as u32;
        (training_graph(&graph, &spec).unwrap(), spec, vocab)
    }

    #[test]
    fn training_learns_and_resumes_where_it_stopped() {
        let (training, spec, vocab) = setup();
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data.bin");
        // A sequence that repeats: there is something to learn.
        let tokens: Vec<u8> = (0..2000u32)
            .flat_map(|i| ((i * i % 7 % vocab) as u16).to_le_bytes())
            .collect();
        std::fs::write(&data, tokens).unwrap();
        let options = DataOptions {
            format: None,
            tokenizer: None,
            vocab,
            validation_fraction: 0.2,
            further: 0,
        };
        let dataset = Arc::new(Dataset::open(&data, &options).unwrap());
        let schedule = LrSchedule::new(0.01, 0.01, 0, 40, Decay::Constant).unwrap();
        let program = lower(&training, &meshes(), 2, 2, 1);
        let save = dir.path().join("state");
        std::fs::create_dir(&save).unwrap();
        let run = |program: &Program, steps, resume: Option<&Path>, save: Option<&Path>| {
            let options = TrainOptions {
                program,
                spec: &spec,
                name: "test",
                plan_hash: "0",
                dataset: &dataset,
                schedule: &schedule,
                steps,
                validate_every: Some(10),
                validation_batches: 2,
                profile_steps: 2,
                resume: resume.map(newest),
                checkpoints: None,
                check_replicas: Some(5),
                stop: None,
                session: SessionOptions::default(),
            };
            let mut n_progress = 0;
            let trained = train(
                &options,
                crate::init::from_graph(&training, spec.seed),
                |_| n_progress += 1,
            );
            let mut trained = trained.unwrap();
            if let Some(folder) = save {
                crate::checkpoint::save(folder, &mut trained.session, "0", "").unwrap();
            }
            let measured = trained.measurement;
            assert_eq!(n_progress, measured.steps.len() + measured.validation.len());
            measured
        };
        let whole = run(&program, 40, None, None);
        assert_eq!(
            whole.steps.iter().map(|s| s.step).collect::<Vec<_>>(),
            (0..40).collect::<Vec<_>>()
        );
        assert_eq!(
            whole.validation.iter().map(|v| v.0).collect::<Vec<_>>(),
            [0, 10, 20, 30, 40]
        );
        assert!(
            whole.validation[4].1 < 0.8 * whole.validation[0].1,
            "{:?}",
            whole.validation
        );
        run(&program, 25, None, Some(&save));
        let rest = run(&program, 15, Some(&save), None);
        for (a, b) in whole.steps[25..].iter().zip(&rest.steps) {
            assert_eq!(
                (a.step, a.loss.to_bits(), a.grad_norm.to_bits()),
                (b.step, b.loss.to_bits(), b.grad_norm.to_bits())
            );
        }
        let other_plan = run(
            &lower(&training, &meshes()[..1], 1, 4, 2),
            1,
            Some(&save),
            None,
        );
        assert!((other_plan.steps[0].loss - rest.steps[0].loss).abs() < 1e-5);
    }

    fn options<'a>(
        program: &'a Program,
        spec: &'a TrainSpec,
        dataset: &'a Arc<Dataset>,
        schedule: &'a LrSchedule,
        steps: u64,
    ) -> TrainOptions<'a> {
        TrainOptions {
            program,
            spec,
            name: "test",
            plan_hash: "0",
            dataset,
            schedule,
            steps,
            validate_every: None,
            validation_batches: 0,
            profile_steps: 0,
            resume: None,
            checkpoints: None,
            check_replicas: None,
            stop: None,
            session: SessionOptions::default(),
        }
    }

    /// Tokens, and no validation.
    fn data(folder: &Path, vocab: u32, tokens: impl Iterator<Item = u32>) -> Arc<Dataset> {
        split_data(folder, vocab, tokens, 0.0)
    }

    /// Tokens, half of which are for validation.
    fn half_for_validation(folder: &Path, vocab: u32) -> Arc<Dataset> {
        split_data(folder, vocab, (0..2000).map(|i| i * i % 7 % vocab), 0.5)
    }

    fn split_data(
        folder: &Path,
        vocab: u32,
        tokens: impl Iterator<Item = u32>,
        validation_fraction: f64,
    ) -> Arc<Dataset> {
        let path = folder.join("data.bin");
        let bytes: Vec<u8> = tokens.flat_map(|t| (t as u16).to_le_bytes()).collect();
        std::fs::write(&path, bytes).unwrap();
        let options = DataOptions {
            format: None,
            tokenizer: None,
            vocab,
            validation_fraction,
            further: 0,
        };
        Arc::new(Dataset::open(&path, &options).unwrap())
    }

    /// The newest checkpoint of a folder, or a file.
    fn newest(path: &Path) -> Arc<Checkpoint> {
        Arc::new(find(path).unwrap().checkpoint)
    }

    /// A token that occurs once and whose row of the table is beyond f16: the step that meets it
    /// is skipped, and the run goes on. So it does from a checkpoint, and from one that does not
    /// count updates.
    #[test]
    fn one_overflow_of_the_forward_pass_does_not_fail_a_run() {
        // A graph whose table is used for nothing else, as a row of logits is in every step.
        let reads_alone = |g: &ir::Graph| {
            let table = g.ops().iter().find(|op| op.kind == OpKind::Embedding);
            let table = table.unwrap().inputs[0];
            g.ops()
                .iter()
                .filter(|op| op.inputs.contains(&table))
                .count()
                == 1
        };
        let graphs = (0..).map(|seed| random_graph(seed, &GraphOptions::default()));
        let graph = graphs.into_iter().find(reads_alone).unwrap();
        let spec = TrainSpec {
            global_batch: 4,
            sequence: sequence_of(&graph).unwrap(),
            precision: ir::Precision::F16,
            ..TrainSpec::default()
        };
        let training = training_graph(&graph, &spec).unwrap();
        let lookup = graph.ops().iter().find(|op| op.kind == OpKind::Embedding);
        let table = lookup.unwrap().inputs[0];
        let lens = graph.ty(table).shape.bind(1);
        let (table, rows, width) = (graph.value_name(table), lens[0] as u32, lens[1] as usize);

        let dir = tempfile::tempdir().unwrap();
        let (steps, meets) = (6, 37);
        let n_tokens = steps * spec.global_batch * spec.sequence + 1;
        let token = |i| match i == meets {
            true => rows - 1,
            false => (i * i % u64::from(rows - 1)) as u32,
        };
        let dataset = data(dir.path(), rows, (0..n_tokens).map(token));
        let schedule = LrSchedule::new(0.01, 0.01, 0, 40, Decay::Constant).unwrap();
        let program = lower(&training, &meshes(), 2, 2, 1);
        let run = |steps, resume: Option<&Path>, save: Option<&Path>| {
            let options = TrainOptions {
                resume: resume.map(newest),
                ..options(&program, &spec, &dataset, &schedule, steps)
            };
            let drawn = crate::init::from_graph(&training, spec.seed);
            let initial = |r: StateRequest<'_>| {
                let mut values = drawn(r)?;
                if r.path == table {
                    values[(rows as usize - 1) * width..].fill(1e6);
                }
                Ok(values)
            };
            let mut trained = train(&options, initial, |_| ()).unwrap();
            if let Some(folder) = save {
                crate::checkpoint::save(folder, &mut trained.session, "0", "").unwrap();
            }
            let states = trained.session.export_states().unwrap();
            (trained.measurement.steps, states)
        };
        let state = |name: &str| dir.path().join(name);
        let (whole, states) = run(steps, None, None);
        let overflowed: Vec<u64> = whole
            .iter()
            .filter(|s| !s.loss.is_finite() && !s.grad_norm.is_finite())
            .map(|s| s.step)
            .collect();
        assert_eq!(overflowed.len(), 1, "{whole:?}");
        let good = whole
            .iter()
            .filter(|s| s.loss.is_finite() && s.grad_norm.is_finite());
        assert_eq!(good.count() as u64, steps - 1);
        assert_eq!(states[UPDATES].values, [(steps - 1) as f32]);
        assert_eq!(states[LOSS_SCALE].values, [0.5]);

        let half = overflowed[0] + 1;
        assert!(half < steps, "the last step of all");
        std::fs::create_dir(state("half")).unwrap();
        let (_, mut states) = run(half, None, Some(&state("half")));
        let (rest, _) = run(steps - half, Some(&state("half")), None);
        let bits = |s: &StepMeasurement| (s.step, s.loss.to_bits(), s.grad_norm.to_bits());
        let expected = whole[half as usize..].iter().map(bits);
        assert_eq!(
            rest.iter().map(bits).collect::<Vec<_>>(),
            expected.collect::<Vec<_>>()
        );

        // The one file of a build that counted every step as an update.
        states.remove(UPDATES).unwrap();
        let old = state("old.safetensors");
        let tensors = states.iter().map(|(path, t)| {
            let lens = t.lens.iter().map(|&n| n as usize).collect();
            let bytes = bytemuck::cast_slice(&t.values);
            let view = TensorView::new(safetensors::Dtype::F32, lens, bytes);
            (path, view.unwrap())
        });
        let metadata = [("step".to_string(), half.to_string())].into();
        safetensors::serialize_to_file(tensors, Some(metadata), &old).unwrap();
        let (_, states) = run(1, Some(&old), None);
        assert_eq!(states[UPDATES].values, [(half + 1) as f32]);
    }

    /// Without loss scaling nothing can be hoped for.
    #[test]
    fn what_is_no_number_stops_the_run() {
        let (training, spec, vocab) = setup();
        let dir = tempfile::tempdir().unwrap();
        let dataset = data(dir.path(), vocab, (0..2000).map(|i| i * i % 7 % vocab));
        let program = lower(&training, &meshes(), 2, 2, 1);
        let state = dir.path().join("state");
        std::fs::create_dir(&state).unwrap();
        let run = |lr: f64, steps, resume| {
            let schedule = LrSchedule::new(lr, lr, 0, 40, Decay::Constant).unwrap();
            let options = TrainOptions {
                resume,
                ..options(&program, &spec, &dataset, &schedule, steps)
            };
            let mut n_done = 0;
            let initial = crate::init::from_graph(&training, spec.seed);
            let result = train(&options, initial, |_| n_done += 1);
            (n_done, result)
        };
        let (_, trained) = run(0.01, 2, None);
        let mut session = trained.unwrap().session;
        crate::checkpoint::save(&state, &mut session, "0", "").unwrap();
        let (n_done, result) = run(1e30, 9, Some(newest(&state)));
        let Err(RuntimeError::Diverged { step, value, .. }) = result else {
            panic!("the run went on")
        };
        // Every step before was whole.
        assert_eq!(step, 2 + n_done);
        assert!(n_done < 3 && !value.is_finite());
    }

    /// A validation may take longer than many steps: an interrupt does not wait for its end.
    #[test]
    fn a_run_that_is_to_stop_ends_within_a_validation() {
        let (training, spec, vocab) = setup();
        let dir = tempfile::tempdir().unwrap();
        let dataset = half_for_validation(dir.path(), vocab);
        let schedule = LrSchedule::new(0.01, 0.0, 0, 8, Decay::Constant).unwrap();
        let program = lower(&training, &meshes(), 2, 2, 1);
        let stop = AtomicBool::new(false);
        let mut options = options(&program, &spec, &dataset, &schedule, 8);
        options.validate_every = Some(3);
        options.validation_batches = 3;
        options.stop = Some(&stop);
        let run = |options: &TrainOptions<'_>, ends: &dyn Fn(&Progress) -> bool| {
            let (mut told, initial) = (Vec::new(), crate::init::from_graph(&training, 1));
            let trained = train(options, initial, |progress| {
                if ends(&progress) {
                    options.stop.unwrap().store(true, Ordering::Relaxed);
                }
                told.push(match progress {
                    Progress::Step { measured, .. } => ("step", measured.step),
                    Progress::Validation { step, .. } => ("validation", step),
                    other => panic!("{other:?}"),
                });
            });
            trained.unwrap();
            told
        };
        let all = run(&options, &|_| false);
        let validations = |all: &[(&str, u64)]| -> Vec<u64> {
            let found = all.iter().filter(|(what, _)| *what == "validation");
            found.map(|(_, step)| *step).collect()
        };
        assert_eq!(validations(&all), [0, 3, 6, 8]);
        // More batches than anybody waits for.
        options.validation_batches = u64::MAX;
        let told = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(std::time::Duration::from_millis(100));
                stop.store(true, Ordering::Relaxed);
            });
            run(&options, &|_| false)
        });
        assert_eq!(told, []);
    }

    /// Steps are counted from the first of all runs, so that one that is interrupted or loses ranks
    /// validates at the same steps as one that is not.
    #[test]
    fn a_run_that_goes_on_validates_at_the_same_steps() {
        let (training, spec, vocab) = setup();
        let dir = tempfile::tempdir().unwrap();
        let dataset = half_for_validation(dir.path(), vocab);
        let schedule = LrSchedule::new(0.01, 0.0, 0, 8, Decay::Constant).unwrap();
        let program = lower(&training, &meshes(), 2, 2, 1);
        let state = dir.path().join("state");
        std::fs::create_dir(&state).unwrap();
        let run = |steps: u64, resume: Option<&Path>| -> Vec<u64> {
            let mut options = options(&program, &spec, &dataset, &schedule, steps);
            options.validate_every = Some(4);
            options.validation_batches = 1;
            options.resume = resume.map(newest);
            let mut trained =
                train(&options, crate::init::from_graph(&training, 1), |_| ()).unwrap();
            checkpoint::save(&state, &mut trained.session, "0", "").unwrap();
            let validations = trained.measurement.validation.iter();
            validations.map(|(step, _)| *step).collect()
        };
        assert_eq!(run(6, None), [0, 4, 6]);
        assert_eq!(run(7, Some(&state)), [6, 8, 12, 13]);
    }

    /// The end of a session for a reason, with a checkpoint on its way to a folder, and what was
    /// told.
    fn ends(
        folder: &Path,
        breaks: impl FnOnce(&mut Session),
        why: RuntimeError,
    ) -> (RuntimeError, Vec<Progress>, Session) {
        let (training, spec, vocab) = setup();
        let dir = tempfile::tempdir().unwrap();
        let dataset = data(dir.path(), vocab, (0..2000).map(|i| i * i % 7 % vocab));
        let program = lower(&training, &meshes(), 2, 2, 1);
        let options = SessionOptions {
            data: Some(Arc::new(batches(&dataset, &spec, false).unwrap())),
            ..SessionOptions::default()
        };
        let initial = crate::init::from_graph(&training, spec.seed);
        let mut session = Session::new(&program, &spec, options, initial).unwrap();
        session.train(0.01, false).unwrap();
        let mut background = Background::default();
        let of = ("0", "");
        background
            .begin(checkpoint::KEPT, folder, &mut session, of)
            .unwrap();
        breaks(&mut session);
        let mut told = Vec::new();
        let ended = end_for(why, (&mut session, &mut background), &mut |p| told.push(p));
        assert!(!background.is_busy());
        (ended, told, session)
    }

    fn diverged() -> RuntimeError {
        RuntimeError::Diverged {
            step: 1,
            figure: "validation loss".into(),
            value: f64::NAN,
            loss_scale: None,
            first: None,
        }
    }

    /// It is of an earlier step, which was good.
    #[test]
    fn a_checkpoint_on_its_way_outlives_the_end_of_a_run() {
        let differ = RuntimeError::Replicas {
            step: 1,
            path: "w".into(),
            odd: vec![Rank(1)],
            others: vec![Rank(0)],
            is_known: false,
        };
        for why in [diverged(), differ] {
            let dir = tempfile::tempdir().unwrap();
            let words = why.to_string();
            let (ended, told, mut session) = ends(dir.path(), |_| (), why);
            assert_eq!(ended.to_string(), words);
            let [Progress::Checkpoint { step: 1, path }] = &told[..] else {
                panic!("{told:?}");
            };
            assert_eq!(path, &dir.path().join("0001-step-1"));
            assert_eq!(checkpoint::verify(path).unwrap().step(), 1);
            // The ranks know why, and play no more.
            let error = session.train(0.01, false).unwrap_err().to_string();
            assert!(error.contains(&words), "{error}");
        }
    }

    /// One that cannot be made is said, and changes neither the reason nor what was there before.
    /// Where the ranks have ended already nothing is said of it.
    #[test]
    fn a_checkpoint_that_fails_changes_no_end() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("state");
        let names = || -> Vec<_> {
            let all = std::fs::read_dir(&folder).into_iter().flatten();
            all.map(|e| e.unwrap().file_name()).collect()
        };
        // Its folder goes while the ranks write to it.
        let goes = |_: &mut Session| {
            let is_empty = |f: &Path| std::fs::read_dir(f).unwrap().next().is_none();
            let unfinished = folder.join(names().pop().unwrap());
            while is_empty(&unfinished) {
                std::thread::yield_now();
            }
            while unfinished.exists() {
                let _ = std::fs::remove_dir_all(&unfinished);
            }
        };
        let (ended, told, session) = ends(&folder, goes, diverged());
        assert!(matches!(ended, RuntimeError::Diverged { .. }), "{ended}");
        let [Progress::NoCheckpoint { step: 1, .. }] = &told[..] else {
            panic!("{told:?}");
        };
        assert!(session.has_ended() && names().is_empty());
        let fails = |session: &mut Session| session.fail("a rank is lost");
        let (ended, told, _) = ends(&folder, fails, diverged());
        assert!(matches!(ended, RuntimeError::Diverged { .. }), "{ended}");
        assert!(told.is_empty() && names().is_empty(), "{told:?}");
    }

    #[test]
    fn a_measurement_accounts_for_the_step() {
        let (training, spec, vocab) = setup();
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data.bin");
        std::fs::write(&data, vec![0u8; 2000]).unwrap();
        let dataset = Dataset::open(
            &data,
            &DataOptions {
                format: None,
                tokenizer: None,
                vocab,
                validation_fraction: 0.0,
                further: 0,
            },
        )
        .unwrap();
        let dataset = Arc::new(dataset);
        let schedule = LrSchedule::new(0.01, 0.01, 0, 40, Decay::Constant).unwrap();
        let program = lower(&training, &meshes(), 2, 2, 1);
        let options = TrainOptions {
            program: &program,
            spec: &spec,
            name: "test",
            plan_hash: "f00d",
            dataset: &dataset,
            schedule: &schedule,
            steps: 5,
            validate_every: None,
            validation_batches: 0,
            profile_steps: 2,
            resume: None,
            checkpoints: None,
            check_replicas: None,
            stop: None,
            session: SessionOptions::default(),
        };
        let m = train(
            &options,
            crate::init::from_graph(&training, spec.seed),
            |_| (),
        )
        .unwrap()
        .measurement;
        assert_eq!(
            (m.n_ranks, m.stages.len(), m.plan_hash.as_str()),
            (3, 2, "f00d")
        );
        assert_eq!(
            m.steps.iter().map(|s| s.profiled).collect::<Vec<_>>(),
            [false, false, false, true, true]
        );
        let slowest = m.steps.iter().map(|s| s.seconds).fold(0.0, f64::max);
        for (stage, role) in m.stages.iter().zip(&program.roles) {
            assert!(
                stage.compute_s > 0.0
                    && stage.transfer_s > 0.0
                    && stage.forward_s > 0.0
                    && stage.backward_s > 0.0
                    && stage.step_s > 0.0
            );
            assert!(
                stage.compute_s + stage.collective_s + stage.transfer_s <= slowest,
                "{stage:?}, {slowest} s"
            );
            assert!(stage.peak_bytes.0 > role.arena_bytes);
        }
        let n: usize = program
            .roles
            .iter()
            .flat_map(|r| &r.templates)
            .map(|t| t.instructions.len())
            .sum();
        assert_eq!(m.instructions.len(), n);
        let forward = m.instructions.iter().find(|i| i.template == 4).unwrap();
        assert_eq!(forward.count, program.n_microbatches);
        assert!(
            m.step_time_s.0 > 0.0
                && (m.tokens_per_s * m.step_time_s.0 - (spec.global_batch * spec.sequence) as f64)
                    .abs()
                    < 1e-6
        );
    }
}
