//! The loop of a run: steps of training, or of inference.

use crate::checkpoint::{Background, Checkpoint, Ended, Guard, Rescued, Saving, Unrescued};
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
    /// one, and with each checkpoint: none holds what a comparison would find.
    pub check_replicas: Option<u64>,
    /// Once true, no further step begins, and no batch of a validation: the run ends as if it had been
    /// asked for the steps done by then, but for a last validation.
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
    /// Who says whether the folder may be written to; nobody where it is nobody else's.
    pub guard: Option<Guard<'a>>,
}

impl<'a> Periodic<'a> {
    /// How one of them is saved.
    fn saving(&self, options: &TrainOptions<'a>) -> Saving<'a> {
        Saving {
            folder: self.folder,
            kept: self.kept,
            plan: options.plan_hash,
            model: self.model,
            compares: options.check_replicas.is_some(),
            guard: self.guard,
        }
    }
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
    let mut made = made.and(settle(ended, &session, &mut on_progress));
    let compares = options.check_replicas.is_some();
    if made.is_ok() && compares {
        made = compare((&mut session, &mut background), &mut on_progress);
    }
    let periodic = options.checkpoints.filter(|p| p.rescues);
    if let (Err(RuntimeError::Gone { .. }), Some(p)) = (&made, periodic) {
        let rescued = p.saving(options).rescue(&mut session);
        on_progress(Progress::Rescued(rescued));
    }
    made?;
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
        // What is written is compared with that, as much may happen until then.
        let is_saved = options.checkpoints.is_some_and(|p| is_due(p.every));
        let is_compared = options.check_replicas.is_some_and(is_due);
        if is_compared && !is_saved && i + 1 < options.steps {
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
            save(options, periodic, (session, background), on_progress)?;
        }
    }
    Ok(())
}

/// Compares the states of ranks that keep the same ones, and ends them where they differ.
fn compare(
    (session, background): (&mut Session, &mut Background),
    on_progress: &mut dyn FnMut(Progress),
) -> Result<(), RuntimeError> {
    let compared = session.check_replicas();
    compared.map_err(|e| end_for(e, (session, background), on_progress))
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
/// Fails only when the ranks cannot go on, or have states that differ and should not.
fn save(
    options: &TrainOptions<'_>,
    periodic: Periodic<'_>,
    (session, background): (&mut Session, &mut Background),
    on_progress: &mut dyn FnMut(Progress),
) -> Result<(), RuntimeError> {
    let of = periodic.saving(options);
    let step = session.step_number();
    if background.is_busy() {
        let since = Instant::now();
        settle(background.wait(session), session, on_progress)?;
        let seconds = since.elapsed().as_secs_f64();
        if seconds > HELD_S {
            on_progress(Progress::Held { step, seconds });
        }
    }
    let path = match periodic.waits {
        true => of.save(session),
        false => match background.begin(&of, session) {
            Ok(()) => return Ok(()),
            Err(e) => Err(e),
        },
    };
    match &path {
        Err(RuntimeError::Replicas { .. }) => {
            return path
                .map(|_| ())
                .map_err(|e| end_for(e, (session, background), on_progress));
        }
        // It may not have come to that.
        Err(_) if of.compares && !session.has_ended() => {
            compare((session, background), on_progress)?
        }
        _ => {}
    }
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
mod tests;
