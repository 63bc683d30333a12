//! A worker: the ranks of one process, each a thread that lives, with its device, from step to
//! step and does what the coordinator asks. Those of another process are a link to it.

use super::local::narrow;
use super::message::{Answer, Reply, Request};
use super::rank::{RankOptions, RankState};
use super::script::Scripts;
use crate::arena::{Bytes, View};
use crate::checkpoint::{Shard, write_shard};
use crate::device::Device;
use crate::error::RuntimeError;
use crate::fabric::Fabric;
use crate::fabric::threads::Carrier;
use crate::processes::{Head, Letter, Processes};
use ir::program::{Program, StateBuffer};
use ir::{DType, Rank};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{JoinHandle, ScopedJoinHandle};
use std::time::Duration;

/// The coordinator's way to a worker, wherever that is.
pub(crate) trait Link: Send {
    /// Asks a rank of the worker. One that is gone says so by its answer.
    fn tell(&mut self, rank: Rank, request: Request);
    /// Waits no longer than so for the answer to the oldest request that has none yet.
    fn hear(&mut self, rank: Rank, patience: Duration) -> Option<Answer>;
    /// The error of a rank that is not waited for any longer, where that is possible.
    fn silent(&self, rank: Rank) -> Option<RuntimeError>;
    /// Whether a signal has stopped its process, for all that can be seen.
    fn is_stopped(&self) -> bool {
        false
    }
    /// The run has failed: ranks elsewhere are told when it ends.
    fn fail(&mut self, _: &str) {}
    /// The run ends before its last step: ranks elsewhere are told when it does.
    fn is_interrupted(&mut self) {}
}

/// Takes a rank's answers; false once nobody wants them.
pub(crate) type Answers = Box<dyn Fn(Answer) -> bool + Send>;

/// The ranks of this process.
pub(crate) struct Crew {
    threads: BTreeMap<Rank, Thread>,
}

struct Thread {
    /// `None` once the crew is being dropped.
    requests: Option<Sender<Request>>,
    thread: Option<JoinHandle<()>>,
}

impl Crew {
    /// Starts the ranks of which `open` gives device and fabric, given their roles; `answers` says
    /// where each one's answers go.
    ///
    /// Fails when a device does not open, when the program is not consistent, or when a rehearsal
    /// does: see [`Scripts::new`], [`RankState::new`], [`RankState::rehearse`].
    pub fn start<D: Device + 'static, F: Fabric<D> + 'static>(
        program: &Arc<Program>,
        ranks: &[(Rank, usize)],
        options: &RankOptions,
        mut open: impl FnMut(Rank, usize) -> Result<(D, F), RuntimeError>,
        mut answers: impl FnMut(Rank) -> Answers,
    ) -> Result<Self, RuntimeError> {
        let mut scripts: BTreeMap<usize, Scripts> = BTreeMap::new();
        let mut states = Vec::with_capacity(ranks.len());
        for &(rank, role) in ranks {
            let scripts = match scripts.get(&role) {
                Some(known) => known.clone(),
                None => {
                    let made = Scripts::new(program, role)?;
                    scripts.insert(role, made.clone());
                    made
                }
            };
            let (program, parts) = (Arc::clone(program), open(rank, role)?);
            let state = RankState::new(program, role, scripts, parts, options.clone())?;
            states.push(state);
        }
        let without = |s: &RankState<D, F>| s.unrecorded().is_some().then(|| s.rank());
        let without: Vec<Rank> = states.iter().filter_map(without).collect();
        if let Some(first) = states.iter().find_map(RankState::unrecorded)
            && let Some(of) = &options.record
        {
            (of.without)(&without, first);
        }
        std::thread::scope(|scope| {
            let begin = |s| scope.spawn(|| RankState::rehearse(s));
            let all: Vec<_> = states.iter_mut().map(begin).collect();
            let panicked = |_| Err(RuntimeError::Ended("a rehearsal".into()));
            let join = |thread: ScopedJoinHandle<'_, _>| thread.join().unwrap_or_else(panicked);
            // All of them end before the first error is looked at.
            let ended: Vec<Result<(), RuntimeError>> = all.into_iter().map(join).collect();
            ended.into_iter().collect::<Result<(), _>>()
        })?;
        let thread = |state: RankState<D, F>| {
            let rank = state.rank();
            (rank, start(state, answers(rank)))
        };
        let threads = states.into_iter().map(thread).collect();
        Ok(Crew { threads })
    }
    /// Asks a rank.
    pub fn tell(&self, rank: Rank, request: Request) {
        let requests = self.threads.get(&rank).and_then(|t| t.requests.as_ref());
        if let Some(requests) = requests {
            let _ = requests.send(request);
        }
    }
}

/// The ranks of the coordinator's own process.
pub(crate) struct Worker {
    crew: Crew,
    answers: BTreeMap<Rank, Receiver<Answer>>,
}

impl Worker {
    /// Ranks, and where their answers arrive.
    pub fn new(crew: Crew, answers: BTreeMap<Rank, Receiver<Answer>>) -> Self {
        Worker { crew, answers }
    }
}

impl Link for Worker {
    fn tell(&mut self, rank: Rank, request: Request) {
        self.crew.tell(rank, request);
    }
    fn hear(&mut self, rank: Rank, patience: Duration) -> Option<Answer> {
        match self.answers.get(&rank)?.recv_timeout(patience) {
            Ok(answer) => Some(answer),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Err(RuntimeError::Panic {
                rank,
                message: "its thread is gone".into(),
            })),
        }
    }
    /// A thread cannot be left behind.
    fn silent(&self, _: Rank) -> Option<RuntimeError> {
        None
    }
}

/// The ranks of another process.
pub(crate) struct Remote {
    processes: Arc<Processes>,
    process: usize,
    failed: Option<String>,
    is_interrupted: bool,
    answers: BTreeMap<Rank, Receiver<Answer>>,
}

impl Remote {
    /// The ranks of a process, with where their answers arrive.
    pub fn new(
        processes: Arc<Processes>,
        process: usize,
        answers: BTreeMap<Rank, Receiver<Answer>>,
    ) -> Self {
        Remote {
            processes,
            process,
            failed: None,
            is_interrupted: false,
            answers,
        }
    }
    fn send(&self, letter: Letter) {
        self.processes.carrier().send(self.process, letter);
    }
}

impl Link for Remote {
    fn tell(&mut self, rank: Rank, request: Request) {
        self.send(Letter::request(rank, request));
    }
    fn hear(&mut self, rank: Rank, patience: Duration) -> Option<Answer> {
        match self.answers.get(&rank)?.recv_timeout(patience) {
            Ok(answer) => Some(answer),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                Some(Err(self.processes.gone(self.process, rank)))
            }
        }
    }
    fn fail(&mut self, error: &str) {
        self.failed = Some(error.into());
    }
    fn is_interrupted(&mut self) {
        self.is_interrupted = true;
    }
    fn silent(&self, rank: Rank) -> Option<RuntimeError> {
        Some(self.processes.silent(self.process, rank))
    }
    fn is_stopped(&self) -> bool {
        self.processes.is_stopped(self.process)
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        let head = Head::Over {
            failed: self.failed.take(),
            is_interrupted: self.is_interrupted,
        };
        self.send(Letter { head, body: None });
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        for thread in self.threads.values_mut() {
            thread.requests = None;
        }
        for thread in self.threads.values_mut() {
            if let Some(thread) = thread.thread.take() {
                // Panics were caught inside and reported as answers.
                let _ = thread.join();
            }
        }
    }
}

fn start<D: Device + 'static, F: Fabric<D> + 'static>(
    mut state: RankState<D, F>,
    answers: Answers,
) -> Thread {
    let (requests, inbox) = channel();
    let thread = std::thread::spawn(move || {
        let mut snapshot = Snapshot::default();
        for request in inbox {
            // After a panic the state is never used again: the run has ended.
            let answer = catch_unwind(AssertUnwindSafe(|| {
                obey(&mut state, &mut snapshot, request)
            }))
            .unwrap_or_else(|panic| {
                let message = panic
                    .downcast_ref::<String>()
                    .cloned()
                    .or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string()));
                Err(RuntimeError::Panic {
                    rank: state.rank(),
                    message: message.unwrap_or_default(),
                })
            });
            if let Err(error) = &answer
                && !error.is_consequence()
            {
                state.abort(&error.to_string());
            }
            if !answers(answer) {
                return;
            }
        }
    });
    Thread {
        requests: Some(requests),
        thread: Some(thread),
    }
}

/// Copies of a rank's states that are being written, if there are any.
#[derive(Default)]
struct Snapshot(Option<JoinHandle<Result<Shard, RuntimeError>>>);

impl Snapshot {
    /// Copies the states, and has the copies written to a file in a folder.
    fn begin<D: Device, F: Fabric<D>>(
        &mut self,
        folder: PathBuf,
        states: &[StateBuffer],
        of: &RankState<D, F>,
    ) -> Result<(), RuntimeError> {
        self.end();
        let rank = of.rank();
        let part = |s: &StateBuffer| (s.path.clone(), of.part(s.buffer).clone());
        let parts: Vec<_> = states.iter().map(part).collect();
        let copy = |s: &StateBuffer| of.read_watched(s.buffer).map(|part| Bytes::copy_of(&part));
        let copies = states.iter().map(copy).collect::<Result<Vec<_>, _>>()?;
        self.0 = Some(std::thread::spawn(move || {
            // Each copy goes when it is written.
            let copies: Vec<_> = copies.into_iter().map(Cell::new).collect();
            let take = |i: usize| Ok(View::Copied(copies[i].take()));
            write_shard(&folder, rank, &parts, &take)
        }));
        Ok(())
    }
    fn is_writing(&self) -> bool {
        self.0.as_ref().is_some_and(|thread| !thread.is_finished())
    }
    /// Waits for it.
    fn end(&mut self) -> Option<Result<Shard, RuntimeError>> {
        let panicked = |_| Err(RuntimeError::Ended("the writing of its states".into()));
        let thread = self.0.take()?;
        Some(thread.join().unwrap_or_else(panicked))
    }
}

impl Drop for Snapshot {
    /// Nothing is written any more when the rank is gone.
    fn drop(&mut self) {
        self.end();
    }
}

fn obey<D: Device, F: Fabric<D>>(
    state: &mut RankState<D, F>,
    snapshot: &mut Snapshot,
    request: Request,
) -> Answer {
    match request {
        Request::Play(play) => {
            let mut played = state.play_watched(&play)?;
            played.is_writing = snapshot.is_writing();
            Ok(Reply::Played(Box::new(played)))
        }
        Request::Snapshot(folder, states) => {
            snapshot.begin(folder, &states, state)?;
            Ok(Reply::Done)
        }
        Request::Written => {
            let none = || Err(RuntimeError::Ended("nothing was being written".into()));
            Ok(Reply::Shard(snapshot.end().unwrap_or_else(none)))
        }
        Request::Read(buffer) => Ok(Reply::Part(Bytes::copy_of(&state.read_watched(buffer)?))),
        Request::Write(buffer, part) => {
            state.write(buffer, |local, bytes| match bytes.len() == part.len() {
                true => {
                    bytes.copy_from_slice(&part);
                    Ok(())
                }
                false => Err(RuntimeError::State {
                    path: format!("buffer {}", buffer.0),
                    problem: format!("{} bytes for {:?}", part.len(), local.dims()),
                }),
            })?;
            Ok(Reply::Done)
        }
        Request::Save(folder, states) => {
            let part = |s: &StateBuffer| (s.path.clone(), state.part(s.buffer).clone());
            let parts: Vec<_> = states.iter().map(part).collect();
            let read = |i: usize| state.read_watched(states[i].buffer);
            let shard = write_shard(&folder, state.rank(), &parts, &read);
            Ok(Reply::Shard(shard))
        }
        Request::Hash => {
            let states = state.states().into_iter();
            let hash = |bytes: View<'_>| blake3::hash(&bytes).to_string();
            let hashes = states.map(|s| state.read_watched(s.buffer).map(hash));
            Ok(Reply::Hashes(hashes.collect::<Result<_, _>>()?))
        }
        // A device that works later may have begun what the rank thinks done.
        Request::Stands => Ok(Reply::Stands(
            state.stands().filter(|_| state.is_synchronous()),
        )),
        Request::Load(checkpoint) => {
            let stored = |s: &StateBuffer| checkpoint.lens(&s.path).is_some();
            let mut states: Vec<StateBuffer> = state.states().into_iter().filter(stored).collect();
            states.sort_by_key(|s| checkpoint.first_byte(&s.path, state.part(s.buffer)));
            let mut reader = checkpoint.reader();
            for s in states {
                state.write(s.buffer, |local, bytes| {
                    if local.dtype == DType::F32 {
                        return reader.read(&s.path, local, bytes);
                    }
                    // Parameters of inference rest as they are computed with.
                    let mut values = Bytes::zeroed(4 * local.elements());
                    reader.read(&s.path, local, &mut values)?;
                    narrow(local.dtype, values.f32s(), bytes);
                    Ok(())
                })?;
            }
            reader.finish()?;
            Ok(Reply::Done)
        }
    }
}
