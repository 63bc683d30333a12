//! A session: the coordinator of a run. It knows the ranks by what they answer: it asks them to
//! play, gives out initial states, and gathers loss, measurements and states by messages.

mod in_order;
mod promised;
mod replicas;
mod rescue;
#[cfg(test)]
mod start_tests;

pub use in_order::InOrder;

use super::local::{Local, is_computed, narrow, widen};
use super::message::{Play, Played, Reply, Request, Samples};
use super::rank::{RankOptions, RankTimings};
use super::worker::{Answers, Crew, Link, Remote, Worker};
use crate::arena::Bytes;
use crate::checkpoint::{Checkpoint, Leaving, Shard, Whole, shares};
use crate::clock::Patience;
use crate::clock::Standstill;
use crate::data::{Batch, Batches};
use crate::device::{Backend, Cpu, Cuda, cuda};
use crate::error::RuntimeError;
use crate::fabric::Meets;
use crate::fabric::nccl::{Club, LastResort, Nccl};
use crate::fabric::threads::{Endpoint, World};
use crate::processes::{ALONE, Inbox, Processes, Pulse};
use crate::record::Recording;
use crate::stragglers::Spent;
use ir::program::{ARENA_ALIGN, Event, Program, Space, StateBuffer};
use ir::training::{LOSS_SCALE, LOWEST_LOSS_SCALE, StateRole, UPDATES};
use ir::{BufferId, Rank, TrainSpec};
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// How long one rank is waited for before the others are looked after.
const ATTENTION: Duration = Duration::from_millis(50);
/// How long ranks of other processes have to answer when the run has failed.
const LAST_WORDS: Duration = Duration::from_secs(3);
/// The same where others have waited in vain for ranks of all processes that have not answered, and
/// so given them their time already.
const LAST_WORDS_OF_MISSED: Duration = Duration::from_secs(1);
/// Bytes of states that are on their way to ranks, or from them, before answers are waited for. To
/// wait for each by itself took a far host a round trip for each part of each state, and a bound
/// there must be, as a model may be larger than this process' memory.
const ON_THE_WAY: usize = 32 << 20;

/// How a session runs.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// Longest that a rank waits for another one.
    pub watchdog: Duration,
    /// Threads per rank for large kernels; `None`: the machine's, shared evenly.
    pub threads_per_rank: Option<usize>,
    /// Plays training steps with every stream a queue of its own, in orders drawn from this
    /// seed: any that the program's waits allow. For tests; `None`: in list order.
    pub orders: Option<u64>,
    /// The source of samples of [`Session::train`] and [`Session::validation_loss`].
    pub data: Option<Arc<Batches>>,
    /// Where every rank writes what it is doing.
    pub record: Option<Recording>,
    /// The processes that have the ranks, this one the first of them; `None`: this one has all.
    pub processes: Option<Arc<Processes>>,
    /// The devices that ranks compute with.
    pub backend: Backend,
    /// How GPUs multiply matrices.
    pub matmuls: cuda::Matmuls,
    /// How ranks on GPUs meet; those of the CPU meet in the host's memory.
    pub meets: Meets,
    /// Ends the process where ranks meet by NCCL and the host of one never comes back from the
    /// GPU's driver; `None`: somebody else has to.
    pub last_resort: Option<LastResort>,
    /// Where the ranks of a process that does not coordinate leave their states when process 0 is
    /// lost.
    pub leaves: Option<Leaving>,
    /// The name of the run of which this is a part, for its checkpoints.
    pub run: Option<String>,
}

impl Default for SessionOptions {
    /// Five minutes, even share.
    fn default() -> Self {
        SessionOptions {
            watchdog: Duration::from_secs(300),
            threads_per_rank: None,
            orders: None,
            data: None,
            record: None,
            processes: None,
            backend: Backend::Cpu,
            matmuls: cuda::Matmuls::default(),
            meets: Meets::Host,
            last_resort: None,
            leaves: None,
            run: None,
        }
    }
}

/// A program and the ranks that play it, before any has begun.
pub(crate) struct Cast {
    pub program: Arc<Program>,
    /// With their roles, in whose order they are.
    pub ranks: Vec<(Rank, usize)>,
    options: SessionOptions,
    seed: u64,
    /// Ranks of this host that compute at the same time.
    at_once: usize,
    /// The places of this process' ranks among those of its host, by which they have its GPUs.
    places: BTreeMap<Rank, usize>,
}

impl Cast {
    /// Fails when the program does not fit `spec` or is inconsistent, or there are more processes
    /// than ranks.
    pub fn new(
        program: &Program,
        spec: &TrainSpec,
        options: SessionOptions,
    ) -> Result<Self, RuntimeError> {
        check(program, spec)?;
        let roles = program.roles.iter().enumerate();
        let ranks: Vec<(Rank, usize)> = roles
            .flat_map(|(role, this)| this.mesh.ranks().map(move |rank| (rank, role)))
            .collect();
        let mut at_once = ranks.len();
        let mut own: Vec<Rank> = ranks.iter().map(|r| r.0).collect();
        own.sort_unstable();
        let mut before = 0;
        if let Some(processes) = &options.processes {
            let of = processes.place().of;
            if of > ranks.len() {
                return Err(RuntimeError::Program(format!(
                    "{of} processes for {} ranks: each process must have a rank",
                    ranks.len()
                )));
            }
            at_once = (ranks.len() * processes.on_this_host()).div_ceil(of);
            let mut shares = processes.share(&own);
            before = processes.ranks_before(&shares);
            own = shares.swap_remove(processes.place().index);
        }
        let places = own.into_iter().zip(before..).collect();
        // Lowering states the sums of the devices that the plan is for; these ranks may meet
        // otherwise.
        let mut program = program.clone();
        program.restate(options.meets.order());
        Ok(Cast {
            program: Arc::new(program),
            ranks,
            seed: spec.seed,
            options,
            at_once,
            places,
        })
    }
    /// Ranks by process.
    pub fn shares(&self, processes: &Processes) -> Vec<Vec<Rank>> {
        let ranks: Vec<Rank> = self.ranks.iter().map(|r| r.0).collect();
        processes.share(&ranks)
    }
    /// Those of these ranks, with their roles.
    fn roles_of(&self, share: &[Rank]) -> Vec<(Rank, usize)> {
        let here = |r: &&(Rank, usize)| share.contains(&r.0);
        self.ranks.iter().filter(here).copied().collect()
    }
    /// Threads for large kernels of a rank.
    fn threads(&self) -> usize {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads = self.options.threads_per_rank;
        threads.unwrap_or(cores / self.at_once.max(1)).max(1)
    }
    fn rank_options(&self) -> RankOptions {
        let is_cpu = matches!(self.options.backend, Backend::Cpu);
        RankOptions {
            seed: self.seed,
            threads: self.threads(),
            orders: self.options.orders,
            data: self.options.data.clone(),
            record: self.options.record.clone(),
            epoch: Instant::now(),
            standstill: is_cpu.then(Standstill::begin),
        }
    }
    /// Bytes of a role's arenas, of the device and of the host.
    fn arenas(&self, role: usize) -> (usize, usize) {
        let arena = |space| self.program.roles[role].arena(space);
        let bytes = |space| arena(space).next_multiple_of(ARENA_ALIGN) as usize;
        (bytes(Space::Device), bytes(Space::Host))
    }
    fn on_cpu(&self, world: &Arc<World>, (rank, role): (Rank, usize)) -> (Cpu, Endpoint) {
        let (device, host) = self.arenas(role);
        (Cpu::new(device, host, self.threads()), world.endpoint(rank))
    }
    /// The ranks of a host go round its GPUs, several on one where there are fewer: whichever they
    /// are of all ranks, as a launcher may deal processes out to hosts one by one.
    fn on_gpu(&self, n_gpus: usize, (rank, role): (Rank, usize)) -> Result<Cuda, RuntimeError> {
        let (device, host) = self.arenas(role);
        let place = self.places.get(&rank).copied().unwrap_or_default();
        let ordinal = place % n_gpus.max(1);
        let gpu = Cuda::with(ordinal, device, host, self.options.matmuls)?;
        gpu.prepare(&self.program.roles[role]);
        Ok(gpu)
    }
    fn by_host(
        &self,
        world: &Arc<World>,
        n_gpus: usize,
        at: (Rank, usize),
    ) -> Result<(Cuda, Endpoint), RuntimeError> {
        Ok((self.on_gpu(n_gpus, at)?, world.endpoint(at.0)))
    }
    fn by_nccl(
        &self,
        club: &Arc<Club>,
        n_gpus: usize,
        at: (Rank, usize),
    ) -> Result<(Cuda, Nccl), RuntimeError> {
        Ok((self.on_gpu(n_gpus, at)?, club.member(at.0)?))
    }
    /// The number of GPUs, on which the program can be run.
    fn gpus(&self) -> Result<usize, RuntimeError> {
        cuda::check(&self.program)?;
        cuda::count()
    }
    /// Starts a worker's ranks.
    pub fn worker(&self, world: &Arc<World>, share: &[Rank]) -> Result<Worker, RuntimeError> {
        let mut receivers = BTreeMap::new();
        let crew = self.crew(world, share, |rank| {
            let (outbox, inbox) = channel();
            receivers.insert(rank, inbox);
            Box::new(move |answer| outbox.send(answer).is_ok())
        })?;
        Ok(Worker::new(crew, receivers))
    }
    /// The same, whose answers go elsewhere.
    pub fn crew(
        &self,
        world: &Arc<World>,
        share: &[Rank],
        answers: impl FnMut(Rank) -> Answers,
    ) -> Result<Crew, RuntimeError> {
        let (ranks, options) = (self.roles_of(share), self.rank_options());
        match self.options.backend {
            Backend::Cpu => {
                let open = |rank, role| Ok(self.on_cpu(world, (rank, role)));
                Crew::start(&self.program, &ranks, &options, open, answers)
            }
            Backend::Cuda => {
                let n_gpus = self.gpus()?;
                match self.options.meets {
                    Meets::Host => {
                        let open = |rank, role| self.by_host(world, n_gpus, (rank, role));
                        Crew::start(&self.program, &ranks, &options, open, answers)
                    }
                    Meets::Nccl => {
                        let shares = self.at_once > n_gpus;
                        let club = Club::new(world, Some(&self.program), shares)?;
                        self.options
                            .last_resort
                            .iter()
                            .for_each(|f| club.ends_by(*f));
                        let open = |rank, role| self.by_nccl(&club, n_gpus, (rank, role));
                        Crew::start(&self.program, &ranks, &options, open, answers)
                    }
                }
            }
        }
    }
}

/// The results of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepResult {
    /// Mean loss over the tokens of the batch, before the update.
    pub loss: f64,
    /// Norm of the gradient before clipping, loss scale taken out; no number in inference, and
    /// where stages update by themselves.
    pub grad_norm: f64,
    /// The loss scale of the step, with f16.
    pub loss_scale: Option<f64>,
    /// Wall time from the first rank's start to the last rank's end.
    pub seconds: f64,
    /// Per rank, what of it was work and what waiting.
    pub spent: Vec<Spent>,
    /// Per rank, when profiled.
    pub timings: Vec<RankTimings>,
    /// Peak bytes per rank so far: arena and the largest scratch space of an instruction.
    pub peak_bytes: Vec<u64>,
}

impl StepResult {
    /// An error where a run cannot go on: a figure that the step computes is no number. Not so in a
    /// step that updated nothing, if a smaller loss scale may keep the next ones from overflowing.
    pub(crate) fn check(&self, step: u64, spec: &TrainSpec) -> Result<(), RuntimeError> {
        let may_fall = self.loss_scale.is_some_and(|s| s > LOWEST_LOSS_SCALE);
        if may_fall && !self.grad_norm.is_finite() {
            return Ok(());
        }
        let has_norm = spec.task.is_training() && spec.minibatch.is_none();
        let norm = has_norm.then_some(("gradient norm", self.grad_norm));
        let mut figures = std::iter::once(("loss", self.loss)).chain(norm);
        match figures.find(|(_, value)| !value.is_finite()) {
            None => Ok(()),
            Some((figure, value)) => Err(RuntimeError::Diverged {
                step,
                figure: figure.into(),
                value,
                loss_scale: self.loss_scale,
                first: None,
            }),
        }
    }
}

/// A full tensor of the training state.
#[derive(Clone, Debug, PartialEq)]
pub struct StateTensor {
    /// Global lengths.
    pub lens: Vec<u64>,
    /// Row-major elements.
    pub values: Vec<f32>,
}

/// States by path: parameters, moments, scalars.
pub type States = BTreeMap<String, StateTensor>;

/// The request to the provider of initial values.
#[derive(Clone, Copy, Debug)]
pub struct StateRequest<'a> {
    /// Path of the `State` op.
    pub path: &'a str,
    /// Parameter, moment or scalar.
    pub role: StateRole,
    /// Global lengths.
    pub lens: &'a [u64],
}

/// A rank, and the worker that has it.
#[derive(Clone, Copy, Debug)]
struct Member {
    rank: Rank,
    role: usize,
    worker: usize,
}

/// A program in execution.
pub struct Session {
    program: Arc<Program>,
    spec: TrainSpec,
    workers: Vec<Box<dyn Link>>,
    /// In the order of the roles.
    ranks: Vec<Member>,
    step: u64,
    /// The run's own batches, if it has some.
    data: Option<Arc<Batches>>,
    /// Whether copies of states were being written in the last step.
    is_writing: bool,
    /// The last step or validation, and whether the states are still those that it was played with.
    last: Option<(Play, bool)>,
    /// Longest that an answer is waited for when others are there.
    watchdog: Duration,
    /// Where there are other processes, the sign to them that this one goes on.
    pulse: Option<Arc<Pulse>>,
    /// The first error; after it the ranks are out of step and nothing more can be run.
    ended: Option<String>,
    /// Ranks of processes that are gone, or do not answer.
    lost: BTreeSet<Rank>,
    /// The name of the run of which it is a part.
    run: Option<String>,
    whole: Whole,
}

impl Session {
    /// Starts the ranks and gives every state its initial value. `initial` is asked once for
    /// each state path, in ascending order, and gives the full tensor; each rank keeps its
    /// part.
    ///
    /// Fails when the program does not fit `spec` or is inconsistent, or `initial` fails or
    /// gives another number of elements.
    pub fn new(
        program: &Program,
        spec: &TrainSpec,
        options: SessionOptions,
        initial: impl FnMut(StateRequest<'_>) -> Result<Vec<f32>, RuntimeError>,
    ) -> Result<Self, RuntimeError> {
        let mut session = Self::start(program, spec, options)?;
        session.initialise(initial)?;
        Ok(session)
    }

    /// Gives every state the value that `initial` has for it.
    pub(crate) fn initialise(
        &mut self,
        mut initial: impl FnMut(StateRequest<'_>) -> Result<Vec<f32>, RuntimeError>,
    ) -> Result<(), RuntimeError> {
        let mut parts = Parts::default();
        for (path, places) in self.state_places() {
            let (role, state) = &places[0];
            let buffer = self.program.roles[*role].buffer(state.buffer);
            let values = initial(StateRequest {
                path: &path,
                role: state.role,
                lens: &buffer.lens,
            })?;
            // They are zeros already, as are most of an optimizer's states.
            let is_zero = values.par_iter().all(|v| v.to_bits() == 0);
            let expected: u64 = buffer.lens.iter().product();
            if !(is_zero && values.len() as u64 == expected) {
                self.set_state(&path, &places, values, &mut parts)?;
            }
        }
        self.write_parts(&mut parts)
    }

    /// Starts the ranks and goes on from a checkpoint, of which each rank reads its part.
    ///
    /// Fails as [`Session::new`] does, and when the checkpoint has not the states of the program,
    /// or has others; inference leaves those of the optimizer alone.
    pub fn resume(
        program: &Program,
        spec: &TrainSpec,
        options: SessionOptions,
        checkpoint: &Arc<Checkpoint>,
    ) -> Result<Self, RuntimeError> {
        let mut session = Self::start(program, spec, options)?;
        session.load(checkpoint)?;
        Ok(session)
    }

    /// Goes on from a checkpoint.
    pub(crate) fn load(&mut self, checkpoint: &Arc<Checkpoint>) -> Result<(), RuntimeError> {
        // Its files were read when it was opened.
        self.whole.add(checkpoint.path());
        let places = self.state_places();
        let other = |problem: String| RuntimeError::OtherCheckpoint {
            path: checkpoint.path().to_path_buf(),
            problem,
        };
        for (path, places) in &places {
            let (role, state) = &places[0];
            let lens = &self.program.roles[*role].buffer(state.buffer).lens;
            match checkpoint.lens(path) {
                Some(stored) if stored == lens => {}
                Some(stored) => {
                    return Err(other(format!(
                        "state `{path}` is {stored:?}, the plan's is {lens:?}"
                    )));
                }
                None if path == UPDATES => {}
                None => return Err(other(format!("it has no state `{path}`"))),
            }
        }
        // Loss scaling has states of its own; what was trained with it may go on without. Inference
        // wants of what was trained the parameters alone.
        let trains = self.spec.task.is_training();
        let is_extra =
            |path: &&str| trains && !places.contains_key(*path) && !path.starts_with(LOSS_SCALE);
        if let Some(extra) = checkpoint.states().map(|s| s.0).find(is_extra) {
            return Err(other(format!("the plan has no state `{extra}`")));
        }
        let all = self.ranks.clone();
        self.ask(&all, |_| Request::Load(Arc::clone(checkpoint)))?;
        checkpoint.let_go();
        self.step = checkpoint.step();
        // Written by a build that counted every step as an update.
        if let (Some(places), None) = (places.get(UPDATES), checkpoint.lens(UPDATES)) {
            let mut parts = Parts::default();
            self.set_state(UPDATES, places, vec![checkpoint.step() as f32], &mut parts)?;
            self.write_parts(&mut parts)?;
        }
        Ok(())
    }

    /// The ranks, with states of zeros.
    fn start(
        program: &Program,
        spec: &TrainSpec,
        options: SessionOptions,
    ) -> Result<Self, RuntimeError> {
        let watchdog = options.watchdog;
        let processes = options.processes.clone();
        let data = options.data.clone();
        let run = options.run.clone();
        let pulse = processes.as_ref().map(|p| {
            let of = p.place().of;
            Pulse::start(p.carrier(), of, watchdog, options.last_resort)
        });
        let cast = Cast::new(program, spec, options)?;
        let (shares, workers) = match processes {
            None => {
                let all: Vec<Rank> = cast.ranks.iter().map(|r| r.0).collect();
                let world = World::new(all.len() as u32, watchdog);
                let worker = cast.worker(&world, &all)?;
                (vec![all], vec![Box::new(worker) as Box<dyn Link>])
            }
            Some(processes) => {
                let shares = cast.shares(&processes);
                let workers = workers(&cast, &processes, &shares, watchdog)?;
                (shares, workers)
            }
        };
        let worker_of = |rank: Rank| shares.iter().position(|s| s.contains(&rank));
        let member = |&(rank, role): &(Rank, usize)| Member {
            rank,
            role,
            worker: worker_of(rank).unwrap_or(0),
        };
        let ranks = cast.ranks.iter().map(member).collect();
        Ok(Session {
            program: cast.program,
            spec: spec.clone(),
            workers,
            ranks,
            step: 0,
            data,
            is_writing: false,
            last: None,
            watchdog,
            pulse,
            ended: None,
            lost: BTreeSet::new(),
            run,
            whole: Whole::default(),
        })
    }

    /// The ranks and their roles, in the order of what a step says of each.
    pub fn roles(&self) -> impl Iterator<Item = (Rank, usize)> {
        self.ranks.iter().map(|m| (m.rank, m.role))
    }
    /// Number of ranks.
    pub fn n_ranks(&self) -> usize {
        self.ranks.len()
    }
    /// The program.
    pub fn program(&self) -> &Program {
        &self.program
    }
    /// The training spec.
    pub fn spec(&self) -> &TrainSpec {
        &self.spec
    }
    /// The run's own batches, if it has some.
    pub fn data(&self) -> Option<&Batches> {
        self.data.as_deref()
    }
    /// The name of the run of which it is a part, if that has one.
    pub fn run(&self) -> Option<&str> {
        self.run.as_deref()
    }
    /// The checkpoints that are known to be whole.
    pub(crate) fn whole(&self) -> Whole {
        self.whole.clone()
    }
    /// The sign to other processes that this one goes on, where there are others.
    pub(crate) fn pulse(&self) -> Option<Arc<Pulse>> {
        self.pulse.clone()
    }
    /// Has the other processes know that the run ends before its last step.
    pub fn is_interrupted(&mut self) {
        self.workers.iter_mut().for_each(|w| w.is_interrupted());
    }
    /// Ends the run with an error.
    pub fn fail(&mut self, error: &str) {
        self.ended.get_or_insert_with(|| error.into());
        self.workers.iter_mut().for_each(|w| w.fail(error));
    }
    /// Whether it ended with an error, after which the ranks play nothing more.
    pub fn has_ended(&self) -> bool {
        self.ended.is_some()
    }
    /// Training steps done; the next one's number.
    pub fn step_number(&self) -> u64 {
        self.step
    }
    /// Sets the number of the next step.
    pub fn set_step_number(&mut self, step: u64) {
        self.step = step;
    }

    /// Runs one step, of training or of inference as the plan is for, on the run's own data.
    pub fn train(&mut self, lr: f64, profile: bool) -> Result<StepResult, RuntimeError> {
        let samples = Samples::Of(Batch::Train { step: self.step });
        let result = self.play(samples, lr, true, profile)?;
        self.step += 1;
        Ok(result)
    }

    /// The same on a global batch: `sequence + 1` tokens per sample, and those further ones that
    /// the program loads ([`Program::further`]).
    pub fn step(
        &mut self,
        batch: &[Vec<u32>],
        lr: f64,
        profile: bool,
    ) -> Result<StepResult, RuntimeError> {
        let result = self.play(self.given(batch)?, lr, true, profile)?;
        self.step += 1;
        Ok(result)
    }

    /// The loss of a batch of the run's validation data with the present parameters, without
    /// dropout. Nothing changes.
    pub fn validation_loss(&mut self, index: u64) -> Result<f64, RuntimeError> {
        let samples = Samples::Of(Batch::Validation { index });
        Ok(self.play(samples, 0.0, false, false)?.loss)
    }

    /// The same of a global batch.
    pub fn validate(&mut self, batch: &[Vec<u32>]) -> Result<f64, RuntimeError> {
        Ok(self.play(self.given(batch)?, 0.0, false, false)?.loss)
    }

    fn given(&self, batch: &[Vec<u32>]) -> Result<Samples, RuntimeError> {
        check_batch(batch, &self.spec, self.program.further())?;
        Ok(Samples::Given(Arc::new(batch.to_vec())))
    }

    fn play(
        &mut self,
        samples: Samples,
        lr: f64,
        training: bool,
        profile: bool,
    ) -> Result<StepResult, RuntimeError> {
        let play = Play {
            samples,
            step: self.step,
            lr,
            training,
            profile,
            looks: false,
        };
        let mut played = self.played(&play)?;
        self.is_writing = played.iter().any(|p| p.is_writing);
        let loss = played
            .iter()
            .find_map(|p| p.loss)
            .ok_or_else(|| RuntimeError::Program("no stage has the loss".into()))?;
        // All ranks have the same norm. Where a bit has turned in one of them, its is what counts.
        let norms = || played.iter().filter_map(|p| p.grad_norm);
        let spoilt = norms().find(|norm| !norm.is_finite());
        let grad_norm = spoilt.or_else(|| norms().next()).unwrap_or(f64::NAN);
        let loss_scale = played.iter().find_map(|p| p.loss_scale);
        // Loss scaling leaves out the update of a step whose norm is no number.
        let is_skipped = loss_scale.is_some() && spoilt.is_some();
        let is_given_up = played.iter().all(|p| p.given_up);
        let states_stay = !training || is_given_up || is_skipped;
        self.last = Some((play, states_stay));
        // Ranks of one worker have one clock.
        let seconds = |worker: usize| {
            let ranks = self.ranks.iter().zip(&played);
            let of = ranks.filter(|(m, _)| m.worker == worker).map(|(_, p)| p);
            let span = of.fold((f64::INFINITY, 0.0f64), |(began, ended), p| {
                (began.min(p.began_s), ended.max(p.ended_s))
            });
            span.1 - span.0
        };
        let seconds = (0..self.workers.len()).map(seconds).fold(0.0, f64::max);
        Ok(StepResult {
            loss: f64::from(loss),
            grad_norm,
            loss_scale,
            seconds,
            spent: played.iter().map(|p| p.spent).collect(),
            peak_bytes: played.iter().map(|p| p.peak_bytes).collect(),
            timings: played.iter_mut().filter_map(|p| p.timings.take()).collect(),
        })
    }

    /// Has all ranks play.
    fn played(&mut self, play: &Play) -> Result<Vec<Played>, RuntimeError> {
        let all = self.ranks.clone();
        let replies = self.ask(&all, |_| Request::Play(play.clone()))?;
        let played = replies.into_iter().filter_map(|r| match r {
            Reply::Played(p) => Some(*p),
            _ => None,
        });
        Ok(played.collect())
    }

    /// The first tensor of the last step or validation that is no number. The ranks play it again
    /// for that, and the run is over then: where the step has updated states, they are those after
    /// it, which is said. Of several ranks it is the one that made such a value itself, soonest in
    /// its program.
    pub(crate) fn first_spoiled(&mut self) -> Result<Option<String>, RuntimeError> {
        let Some((play, states_stay)) = self.last.take() else {
            return Ok(None);
        };
        let again = Play {
            looks: true,
            profile: false,
            ..play
        };
        let played = self.played(&again)?;
        let found = played.into_iter().filter_map(|p| p.found);
        let first = found.min_by_key(|f| (f.from_others, f.after));
        Ok(first.map(|f| match states_stay {
            true => f.what,
            false => format!("{}, in the step played again after its update", f.what),
        }))
    }

    /// The parameters as full tensors by path.
    pub fn params(&mut self) -> Result<States, RuntimeError> {
        self.states_where(|role| role == StateRole::Parameter)
    }
    /// All states as full tensors by path: whatever the plan, the same training state.
    pub fn export_states(&mut self) -> Result<States, RuntimeError> {
        self.states_where(|_| true)
    }
    /// One state as a full tensor; none if there is no state of this path.
    pub fn state(&mut self, path: &str) -> Result<Option<StateTensor>, RuntimeError> {
        match self.state_places().get(path) {
            Some(places) => self.gather_state(places).map(Some),
            None => Ok(None),
        }
    }
    /// Has every rank write [its share](shares) of the states to a file in `folder`.
    ///
    /// Fails when a rank cannot; the session can still go on.
    pub(crate) fn write_shards(&mut self, folder: &Path) -> Result<Vec<Shard>, RuntimeError> {
        self.ask_writers(|share| Request::Save(folder.to_path_buf(), share))
    }
    /// The same from copies while steps go on; [`Session::end_shards`] waits for the files.
    pub(crate) fn begin_shards(&mut self, folder: &Path) -> Result<(), RuntimeError> {
        self.ask_writers(|share| Request::Snapshot(folder.to_path_buf(), share))?;
        self.is_writing = true;
        Ok(())
    }
    /// Whether ranks were still writing copies of their states in the last step.
    pub(crate) fn is_writing(&self) -> bool {
        self.is_writing
    }
    /// Waits for the files of [`Session::begin_shards`]. Fails when a rank cannot write its own;
    /// the session can still go on.
    pub(crate) fn end_shards(&mut self) -> Result<Vec<Shard>, RuntimeError> {
        self.is_writing = false;
        self.ask_writers(|_| Request::Written)
    }
    /// Asks the ranks that have a share of the states to write, of which they are told.
    fn ask_writers(
        &mut self,
        request: impl Fn(Vec<StateBuffer>) -> Request,
    ) -> Result<Vec<Shard>, RuntimeError> {
        let shares = shares(&self.program);
        let of = |m: &Member| shares.get(&m.rank).cloned().unwrap_or_default();
        let has_some = |m: &Member| shares.get(&m.rank).is_some_and(|s| !s.is_empty());
        let writers: Vec<Member> = self.ranks.iter().copied().filter(has_some).collect();
        let replies = self.ask(&writers, |m| request(of(m)))?;
        let shards = replies.into_iter().filter_map(|reply| match reply {
            Reply::Shard(shard) => Some(shard),
            _ => None,
        });
        shards.collect()
    }
    /// Replaces the states, each of which `states` must have, in full.
    #[cfg(test)]
    pub fn import_states(&mut self, states: &States) -> Result<(), RuntimeError> {
        let mut parts = Parts::default();
        for (path, places) in self.state_places() {
            self.set_state(&path, &places, states[&path].values.clone(), &mut parts)?;
        }
        self.write_parts(&mut parts)
    }
    /// Whether all ranks that hold the same part of a state hold the same bits; the error
    /// names the first state and rank that differ. Where a library orders sums this is
    /// [`Session::check_replicas`], as no more is promised.
    pub fn replicas_agree(&mut self) -> Result<(), RuntimeError> {
        if promised::by_library(&self.program) {
            return self.check_replicas();
        }
        for (path, places) in self.state_places() {
            let full = self.gather_state(&places)?;
            for (role, state) in &places {
                for (local, rank, part) in self.parts(*role, state)? {
                    let mut expected = vec![0.0f32; local.elements()];
                    local.cut(&full.values, &mut expected);
                    let same = expected
                        .iter()
                        .zip(&*widen(local.dtype, &part))
                        .all(|(a, b)| a.to_bits() == b.to_bits());
                    if !same {
                        return Err(RuntimeError::State {
                            path,
                            problem: format!("{rank} differs from other ranks with the same part"),
                        });
                    }
                }
            }
        }
        Ok(())
    }

    fn states_where(&mut self, wanted: impl Fn(StateRole) -> bool) -> Result<States, RuntimeError> {
        let mut states = States::new();
        for (path, places) in self.state_places() {
            if wanted(places[0].1.role) {
                let full = self.gather_state(&places)?;
                states.insert(path, full);
            }
        }
        Ok(states)
    }

    /// Where each state lies: (role, state) by path.
    fn state_places(&self) -> BTreeMap<String, Vec<(usize, StateBuffer)>> {
        let mut places: BTreeMap<String, Vec<(usize, StateBuffer)>> = BTreeMap::new();
        for (role, this) in self.program.roles.iter().enumerate() {
            for state in &this.states {
                places
                    .entry(state.path.clone())
                    .or_default()
                    .push((role, state.clone()));
            }
        }
        places
    }

    /// Gives a state its value, by parts that may still have to be written: see
    /// [`Session::write_parts`].
    fn set_state(
        &mut self,
        path: &str,
        places: &[(usize, StateBuffer)],
        values: Vec<f32>,
        parts: &mut Parts,
    ) -> Result<(), RuntimeError> {
        let program = Arc::clone(&self.program);
        for (role, state) in places {
            let this = &program.roles[*role];
            let buffer = this.buffer(state.buffer);
            let expected: u64 = buffer.lens.iter().product();
            if values.len() as u64 != expected
                || !(buffer.dtype.is_float() && is_computed(buffer.dtype))
            {
                let problem = format!(
                    "{} elements for {} {:?}",
                    values.len(),
                    buffer.dtype.name(),
                    buffer.lens
                );
                return Err(RuntimeError::State {
                    path: path.into(),
                    problem,
                });
            }
            for member in self.ranks_of(*role) {
                let part = Local::of_rank(
                    buffer.dtype,
                    &buffer.lens,
                    &buffer.spec,
                    &this.mesh,
                    member.rank,
                );
                let Some(part) = part else { continue };
                let mut own = vec![0.0; part.elements()];
                part.cut(&values, &mut own);
                let mut bytes = Bytes::zeroed(part.bytes());
                narrow(buffer.dtype, &own, &mut bytes);
                if !parts.all.is_empty() && parts.bytes + bytes.len() > ON_THE_WAY {
                    self.write_parts(parts)?;
                }
                parts.bytes += bytes.len();
                parts.all.push((member, state.buffer, bytes));
            }
        }
        Ok(())
    }

    /// Has ranks take their parts of states, all at the same time.
    fn write_parts(&mut self, parts: &mut Parts) -> Result<(), RuntimeError> {
        let all = std::mem::take(parts).all.into_iter();
        let asked = all.map(|(m, buffer, bytes)| (m, Request::Write(buffer, bytes)));
        self.ask_each(asked.collect()).map(|_| ())
    }

    /// The full tensor.
    fn gather_state(
        &mut self,
        places: &[(usize, StateBuffer)],
    ) -> Result<StateTensor, RuntimeError> {
        let full = self.gather_states(&[&places[0]])?;
        let none = || RuntimeError::Program("nothing was gathered".into());
        full.into_iter().next().ok_or_else(none)
    }

    /// Full tensors, of which all parts are asked for at the same time, each of the first rank that
    /// has it.
    fn gather_states(
        &mut self,
        wanted: &[&(usize, StateBuffer)],
    ) -> Result<Vec<StateTensor>, RuntimeError> {
        let program = Arc::clone(&self.program);
        let (mut requests, mut locals) = (Vec::new(), Vec::new());
        for (i, (role, state)) in wanted.iter().enumerate() {
            let this = &program.roles[*role];
            let b = this.buffer(state.buffer);
            let mut seen = BTreeSet::new();
            for member in self.ranks_of(*role) {
                let local = Local::of_rank(b.dtype, &b.lens, &b.spec, &this.mesh, member.rank);
                let Some(local) = local.filter(|l| seen.insert((l.start(), l.valid()))) else {
                    continue;
                };
                requests.push((member, Request::Read(state.buffer)));
                locals.push((i, local));
            }
        }
        let replies = self.ask_each(requests)?;
        let empty = |(role, state): &&(usize, StateBuffer)| {
            let lens = program.roles[*role].buffer(state.buffer).lens.clone();
            let values = vec![0.0f32; lens.iter().product::<u64>() as usize];
            StateTensor { lens, values }
        };
        let mut full: Vec<StateTensor> = wanted.iter().map(empty).collect();
        for (reply, (i, local)) in replies.into_iter().zip(locals) {
            if let Reply::Part(bytes) = reply {
                local.paste(&widen(local.dtype, &bytes), &mut full[i].values);
            }
        }
        Ok(full)
    }

    fn parts(
        &mut self,
        role: usize,
        state: &StateBuffer,
    ) -> Result<Vec<(Local, Rank, Bytes)>, RuntimeError> {
        let ranks = self.ranks_of(role);
        let replies = self.ask(&ranks, |_| Request::Read(state.buffer))?;
        let this = &self.program.roles[role];
        let b = this.buffer(state.buffer);
        let mut parts = Vec::with_capacity(replies.len());
        for (reply, Member { rank, .. }) in replies.into_iter().zip(ranks) {
            if let (Reply::Part(bytes), Some(local)) = (
                reply,
                Local::of_rank(b.dtype, &b.lens, &b.spec, &this.mesh, rank),
            ) {
                parts.push((local, rank, bytes));
            }
        }
        Ok(parts)
    }

    fn ranks_of(&self, role: usize) -> Vec<Member> {
        let of = |m: &&Member| m.role == role;
        self.ranks.iter().filter(of).copied().collect()
    }

    /// Asks some ranks as [`Session::ask_each`] does, each once.
    fn ask(
        &mut self,
        ranks: &[Member],
        request: impl Fn(&Member) -> Request,
    ) -> Result<Vec<Reply>, RuntimeError> {
        self.ask_each(ranks.iter().map(|m| (*m, request(m))).collect())
    }

    /// Asks ranks, of which each may be asked more than once, and waits for all their answers,
    /// which are in the order of the requests. Once one has failed, those of other processes are
    /// not waited for long, as they may hang, and otherwise no longer than ranks wait for each
    /// other, or much longer where each does something alone that may take long, unless a signal has
    /// stopped its process. When several fail, the error is of one that explains the others.
    fn ask_each(&mut self, requests: Vec<(Member, Request)>) -> Result<Vec<Reply>, RuntimeError> {
        if let Some(reason) = &self.ended {
            return Err(RuntimeError::Ended(reason.clone()));
        }
        let mut plays = false;
        let mut ranks = Vec::with_capacity(requests.len());
        for (m, wanted) in requests {
            plays |= matches!(wanted, Request::Play(_));
            self.workers[m.worker].tell(m.rank, wanted);
            ranks.push(m);
        }
        let mut replies: Vec<Option<Reply>> = ranks.iter().map(|_| None).collect();
        let (mut errors, mut silent, mut failed) = (Vec::<RuntimeError>::new(), Vec::new(), None);
        // In a step the ranks meet, at its end too, so that their answers come together. What else
        // they are asked each does alone, and may take long.
        let (is_step, longest) = match plays {
            true => (true, self.watchdog),
            false => (false, self.watchdog.saturating_mul(ALONE)),
        };
        let mut patience = (!is_step).then(|| Patience::of(longest));
        let (mut still, mut looked) = (BTreeMap::<usize, Patience>::new(), None::<Instant>);
        let mut lost = Vec::new();
        let mut open: Vec<usize> = (0..ranks.len()).collect();
        while !open.is_empty() {
            // This process' own ranks cannot be left behind: one that does not come back after a
            // failure keeps it from going on.
            let is_over =
                |since: Option<Instant>, limit| since.is_some_and(|s| s.elapsed() > limit);
            if !is_over(failed, LAST_WORDS) {
                self.pulse.iter().for_each(|pulse| pulse.goes_on());
            }
            // Of a process that stands still all ranks are missed with the one for which others
            // waited.
            let missed = |i: &usize| {
                let mut of_process = ranks.iter().filter(|m| m.worker == ranks[*i].worker);
                of_process.any(|m| errors.iter().any(|e| e.misses(m.rank)))
            };
            let last_words = match open.iter().all(missed) {
                true => LAST_WORDS_OF_MISSED,
                false => LAST_WORDS,
            };
            // One that a signal has stopped does nothing that may take long.
            if !is_step && looked.is_none_or(|at| at.elapsed() >= Patience::LOOK) {
                looked = Some(Instant::now());
                let mut stopped: BTreeSet<usize> = open.iter().map(|i| ranks[*i].worker).collect();
                stopped.retain(|worker| self.workers[*worker].is_stopped());
                still.retain(|worker, _| stopped.contains(worker));
                for worker in stopped {
                    let watchdog = self.watchdog;
                    still
                        .entry(worker)
                        .or_insert_with(|| Patience::of(watchdog));
                }
            }
            let is_left =
                |(_, of_stopped): &mut (&usize, &mut Patience)| of_stopped.left().is_zero();
            let given_up = still
                .iter_mut()
                .filter_map(|mut of| is_left(&mut of).then_some(*of.0));
            let mut given_up: BTreeSet<usize> = given_up.collect();
            // It may just have gone on.
            given_up.retain(|worker| self.workers[*worker].is_stopped());
            // Whoever is first is waited for, the others are looked after.
            let mut attention = ATTENTION;
            // What a rank answers next is for the first of its requests that is open.
            let mut unheard = BTreeSet::new();
            open.retain(|&i| {
                let m = &ranks[i];
                let worker = &mut self.workers[m.worker];
                let answer = match unheard.contains(&m.rank) {
                    true => None,
                    false => worker.hear(m.rank, std::mem::take(&mut attention)),
                };
                if answer.is_none() {
                    unheard.insert(m.rank);
                }
                if answer.is_none()
                    && (is_over(failed, last_words)
                        || given_up.contains(&m.worker)
                        || patience.as_mut().is_some_and(|p| p.left().is_zero()))
                    && let Some(error) = worker.silent(m.rank)
                {
                    silent.push(error);
                    lost.push(m.rank);
                    return false;
                }
                if answer.is_some() {
                    patience = Some(Patience::of(longest));
                }
                match answer {
                    None => return true,
                    Some(Ok(reply)) => replies[i] = Some(reply),
                    Some(Err(error)) => {
                        // What it says of another one it has from that one's connection.
                        if matches!(&error, RuntimeError::Gone { rank, .. } if *rank == m.rank) {
                            lost.push(m.rank);
                        }
                        errors.push(error);
                    }
                }
                false
            });
            if !errors.is_empty() {
                failed.get_or_insert_with(Instant::now);
            }
        }
        // One that had answered when its process was killed is missed by those to whom it had not
        // yet sent all.
        if !errors.is_empty() && silent.is_empty() && errors.iter().all(|e| e.is_consequence()) {
            let until = Instant::now() + LAST_WORDS;
            let causes: BTreeSet<Rank> = errors.iter().filter_map(|e| e.cause()).collect();
            let causes: Vec<Member> = (self.ranks.iter())
                .filter(|m| causes.contains(&m.rank))
                .copied()
                .collect();
            for m in causes {
                let left = until.saturating_duration_since(Instant::now());
                if let Some(Err(error)) = self.workers[m.worker].hear(m.rank, left) {
                    lost.push(m.rank);
                    errors.push(error);
                }
            }
        }
        self.lost.extend(lost);
        if errors.is_empty() && silent.is_empty() {
            return Ok(replies.into_iter().flatten().collect());
        }
        // Whose process is gone explains what the others report, and so does what failed by itself.
        // One that is silent explains that others waited in vain.
        errors.append(&mut silent);
        errors.sort_by_key(|e| match e {
            RuntimeError::Gone {
                is_silent: false, ..
            } => 0,
            e if e.is_consequence() => 4,
            e if e.is_watchdog() => 3,
            RuntimeError::Gone { .. } => 2,
            _ => 1,
        });
        let error = errors.swap_remove(0);
        self.fail(&error.to_string());
        Err(error)
    }
}

/// Parts of states that ranks are yet to be given.
#[derive(Default)]
struct Parts {
    all: Vec<(Member, BufferId, Bytes)>,
    bytes: usize,
}

/// This process' ranks, and ways to those of the others.
fn workers(
    cast: &Cast,
    processes: &Arc<Processes>,
    shares: &[Vec<Rank>],
    watchdog: Duration,
) -> Result<Vec<Box<dyn Link>>, RuntimeError> {
    let world = World::among(shares, 0, watchdog, processes.carrier());
    let mut senders = BTreeMap::new();
    let mut remotes = Vec::new();
    for (process, share) in shares.iter().enumerate().skip(1) {
        let mut answers = BTreeMap::new();
        for &rank in share {
            let (sender, receiver) = channel();
            senders.insert(rank, sender);
            answers.insert(rank, receiver);
        }
        remotes.push(Remote::new(Arc::clone(processes), process, answers));
    }
    processes.attach(&world, shares.to_vec(), Inbox::Answers(senders));
    let worker = cast.worker(&world, &shares[0])?;
    let mut workers: Vec<Box<dyn Link>> = vec![Box::new(worker)];
    workers.extend(remotes.into_iter().map(|r| Box::new(r) as Box<dyn Link>));
    Ok(workers)
}

/// The batch has the spec's shape, with `further` tokens behind the last label of a sample.
pub(crate) fn check_batch(
    batch: &[Vec<u32>],
    spec: &TrainSpec,
    further: u64,
) -> Result<(), RuntimeError> {
    if batch.len() as u64 != spec.global_batch {
        return Err(RuntimeError::Batch(format!(
            "{} samples, expected {}",
            batch.len(),
            spec.global_batch
        )));
    }
    let behind = 1 + further;
    let wanted = spec.sequence.saturating_add(behind);
    match batch.iter().find(|s| s.len() as u64 != wanted) {
        Some(s) => Err(RuntimeError::Batch(format!(
            "a sample of {} tokens, expected {} + {behind}",
            s.len(),
            spec.sequence
        ))),
        None => Ok(()),
    }
}

fn check(program: &Program, spec: &TrainSpec) -> Result<(), RuntimeError> {
    let samples = program
        .microbatch
        .checked_mul(u64::from(program.n_microbatches));
    if samples != Some(spec.global_batch) {
        let message = format!(
            "{} microbatches of {} do not make the global batch of {}",
            program.n_microbatches, program.microbatch, spec.global_batch
        );
        return Err(RuntimeError::Program(message));
    }
    let mut ranks: Vec<Rank> = program.roles.iter().flat_map(|r| r.mesh.ranks()).collect();
    let n = ranks.len();
    ranks.sort_unstable();
    ranks.dedup();
    if ranks.len() != n || n == 0 {
        return Err(RuntimeError::Program(format!(
            "{n} ranks, {} of them distinct",
            ranks.len()
        )));
    }
    let ids_hold = program.roles.iter().all(|r| {
        let n_buffers = r.buffers.len();
        let in_range = |b: &BufferId| b.index() < n_buffers;
        let waits_hold = r.templates.iter().all(|t| {
            t.instructions.iter().enumerate().all(|(i, instruction)| {
                let known = |e: &Event| match e {
                    Event::Drained(stream) => stream.index() < r.streams.len(),
                    Event::Done {
                        template,
                        instruction,
                        ..
                    } => (r.templates.get(template.index()))
                        .is_some_and(|t| instruction.index() < t.instructions.len()),
                };
                instruction.stream.index() < r.streams.len()
                    && instruction.deps.iter().all(|d| d.index() < i)
                    && instruction.events.iter().all(known)
            })
        });
        let instructions = r.templates.iter().flat_map(|t| &t.instructions);
        let buffers = instructions
            .flat_map(|i| i.reads().into_iter().chain(i.writes()))
            .chain(r.states.iter().map(|s| s.buffer))
            .chain(r.loss)
            .chain(r.grad_norm);
        r.trace
            .iter()
            .all(|s| s.template.index() < r.templates.len())
            && waits_hold
            && buffers.into_iter().all(|b| in_range(&b))
    });
    match ids_hold {
        true => Ok(()),
        false => Err(RuntimeError::Program(
            "a trace or instruction names a template, buffer, stream or instruction that does not exist"
                .into(),
        )),
    }
}
