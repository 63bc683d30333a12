//! The training loop of a run.

use crate::data::{Dataset, Order, Split};
use crate::error::RuntimeError;
use crate::execute::{Session, SessionOptions, StateRequest};
use crate::measure::Recorder;
use crate::schedule::LrSchedule;
use ir::TrainSpec;
use ir::measurement::{Measurement, StepMeasurement};
use ir::program::Program;
use std::path::PathBuf;

/// What to run, and on what.
#[derive(Clone, Debug)]
pub struct TrainOptions<'a> {
    /// The lowered plan.
    pub program: &'a Program,
    /// What is trained.
    pub spec: &'a TrainSpec,
    /// Name of the model, for the measurement.
    pub name: &'a str,
    /// Fingerprint of the plan document, for the measurement.
    pub plan_hash: &'a str,
    /// The data.
    pub dataset: &'a Dataset,
    /// Learning rate by step.
    pub schedule: &'a LrSchedule,
    /// Training steps to do in this run.
    pub steps: u64,
    /// Validate before the first step, after every so many and after the last; never when
    /// `None`.
    pub validate_every: Option<u64>,
    /// Batches in a validation, at least 1; the loss is their mean.
    pub validation_batches: u64,
    /// How many steps, the last ones, are profiled.
    pub profile_steps: u64,
    /// Checkpoint to start from.
    pub resume: Option<PathBuf>,
    /// Where to write the final state.
    pub save: Option<PathBuf>,
    /// Watchdog and threads.
    pub session: SessionOptions,
}

/// What `train` reports while it runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Progress {
    /// A training step is done.
    Step(StepMeasurement),
    /// A validation loss after so many training steps.
    Validation {
        /// Steps done.
        step: u64,
        /// The loss.
        loss: f64,
    },
}

/// Trains as the options say; `initial` gives initial values when nothing is resumed (see
/// [`Session::new`]).
///
/// What step `n` sees depends on the data file, the spec's seed and `n` alone, so a resumed
/// run goes on as if it had never stopped.
pub fn train(options: &TrainOptions<'_>, initial: impl FnMut(StateRequest<'_>) -> Result<Vec<f32>, RuntimeError>, mut on_progress: impl FnMut(Progress)) -> Result<Measurement, RuntimeError> {
    let data = Batches::new(options)?;
    let mut session = match &options.resume {
        None => Session::new(options.program, options.spec, options.session, initial)?,
        Some(path) => {
            let (states, step) = crate::checkpoint::load(path)?;
            let stored = |r: StateRequest<'_>| match states.get(r.path) {
                Some(tensor) if tensor.lens == r.lens => Ok(tensor.values.clone()),
                Some(tensor) => Err(RuntimeError::State { path: r.path.into(), problem: format!("is {:?} in the checkpoint, expected {:?}", tensor.lens, r.lens) }),
                None => Err(RuntimeError::State { path: r.path.into(), problem: "is not in the checkpoint".into() }),
            };
            let mut session = Session::new(options.program, options.spec, options.session, stored)?;
            session.set_step_number(step);
            session
        }
    };
    let mut recorder = Recorder::new(options.program, options.spec, options.name, options.plan_hash);
    let validate = |session: &mut Session, recorder: &mut Recorder, on_progress: &mut dyn FnMut(Progress)| -> Result<(), RuntimeError> {
        let (step, loss) = (session.step_number(), data.validation_loss(session)?);
        recorder.validation(step, loss);
        on_progress(Progress::Validation { step, loss });
        Ok(())
    };
    if options.validate_every.is_some() {
        validate(&mut session, &mut recorder, &mut on_progress)?;
    }
    for i in 0..options.steps {
        let step = session.step_number();
        let lr = options.schedule.lr_at(step);
        let profile = options.steps - i <= options.profile_steps;
        let result = session.step(&data.train(step)?, lr, profile)?;
        let measured = recorder.step(options.program, step, lr, &result);
        on_progress(Progress::Step(measured));
        let due = options.validate_every.is_some_and(|n| n > 0 && (i + 1) % n == 0 || i + 1 == options.steps);
        if due {
            validate(&mut session, &mut recorder, &mut on_progress)?;
        }
    }
    if let Some(path) = &options.save {
        let states = session.export_states()?;
        crate::checkpoint::save(path, &states, session.step_number())?;
    }
    Ok(recorder.finish(options.program))
}

/// The batches of a run.
struct Batches<'a> {
    dataset: &'a Dataset,
    sequence: usize,
    global_batch: u64,
    order: Order,
    /// Windows for validation and how many batches of them; without validation, none.
    validation: Option<(u64, u64)>,
}

impl<'a> Batches<'a> {
    fn new(options: &TrainOptions<'a>) -> Result<Self, RuntimeError> {
        let (dataset, spec) = (options.dataset, options.spec);
        let sequence = spec.sequence as usize;
        let order = Order::new(dataset.n_windows(Split::Train, sequence)?, spec.global_batch, spec.seed)?;
        let validation = match options.validate_every {
            None => None,
            Some(_) => Some((dataset.n_windows(Split::Validation, sequence)?, options.validation_batches.max(1))),
        };
        Ok(Batches { dataset, sequence, global_batch: spec.global_batch, order, validation })
    }

    /// The global batch of a training step.
    fn train(&self, step: u64) -> Result<Vec<Vec<u32>>, RuntimeError> {
        let sample = |position| self.dataset.sample(Split::Train, self.order.window(step, position), self.sequence);
        Ok((0..self.global_batch).map(sample).collect::<Result<_, _>>()?)
    }

    /// The mean loss over the first windows of the validation split, from the start again
    /// where there are too few.
    fn validation_loss(&self, session: &mut Session) -> Result<f64, RuntimeError> {
        let Some((n_windows, n_batches)) = self.validation else { return Ok(f64::NAN) };
        let mut total = 0.0;
        for b in 0..n_batches {
            let sample = |position| self.dataset.sample(Split::Validation, (b * self.global_batch + position) % n_windows, self.sequence);
            let batch: Vec<Vec<u32>> = (0..self.global_batch).map(sample).collect::<Result<_, _>>()?;
            total += session.validate(&batch)?;
        }
        Ok(total / n_batches as f64)
    }
}
