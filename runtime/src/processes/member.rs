//! A process without the coordinator.

use super::Letter;
use super::lines::{Asked, Inbox};
use super::pulse::ALONE;
use crate::checkpoint::{Checkpoint, Leaving, Origin, Whole};
use crate::error::RuntimeError;
use crate::execute::message::{Reply, Request};
use crate::execute::session::{Cast, SessionOptions};
use crate::execute::worker::Crew;
use crate::fabric::threads::{Carrier, World};
use ir::program::Program;
use ir::{Rank, TrainSpec};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often is looked whether process 0 has said something, as it does [at times](super::pulse).
const LOOK: Duration = Duration::from_millis(500);
/// How long process 0 has to end a run of which a rank has failed.
const LAST_REQUEST: Duration = Duration::from_secs(15);
/// How long a rank has to say at which step it is when process 0 is lost.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// How long no more room may be seen while another process has a checkpoint go: one large file is
/// removed in a second or two.
const TO_CLEAR: Duration = Duration::from_secs(3);
/// How long is waited before states are written once more.
const AGAIN: Duration = Duration::from_millis(200);

/// The way of the ranks' answers when process 0 is lost.
type Here = Arc<Mutex<Option<Sender<(Rank, Reply)>>>>;

/// Does what process 0 asks of this process' ranks until that one has no more requests. Program,
/// spec and options are those of the session there. Returns whether the run was interrupted.
///
/// Fails as [`Session::new`](crate::execute::Session::new) does, where the options name no
/// processes, and when process 0 is gone, or ends a run that failed. What fails on a rank is an
/// answer to process 0.
pub fn serve(
    program: &Program,
    spec: &TrainSpec,
    options: SessionOptions,
) -> Result<bool, RuntimeError> {
    let (watchdog, leaves) = (options.watchdog, options.leaves.clone());
    let data = options.data.clone();
    let Some(processes) = options.processes.clone() else {
        let problem = "a process that serves must be one of several";
        return Err(RuntimeError::Program(problem.into()));
    };
    let cast = Cast::new(program, spec, options)?;
    let (shares, me) = (cast.shares(&processes), processes.place().index);
    let world = World::among(&shares, me, watchdog, processes.carrier());
    let (asked, requests) = channel();
    processes.attach(&world, shares.clone(), Inbox::Requests(asked));
    // When a rank failed; later, when one was last asked or last answered.
    let failed: Arc<Mutex<Option<Instant>>> = Arc::default();
    // How many answers process 0 waits for.
    let owed: Arc<AtomicUsize> = Arc::default();
    let here: Here = Arc::default();
    let crew = cast.crew(&world, &shares[me], |rank| {
        let (carrier, failed) = (processes.carrier(), Arc::clone(&failed));
        let (here, owed) = (Arc::clone(&here), Arc::clone(&owed));
        Box::new(move |answer| {
            if let Some(to) = &*here.lock().unwrap_or_else(PoisonError::into_inner) {
                if let Ok(reply) = answer {
                    let _ = to.send((rank, reply));
                }
                return true;
            }
            let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
            if answer.is_err() || failed.is_some() {
                *failed = Some(Instant::now());
            }
            drop(failed);
            owed.fetch_sub(1, Ordering::AcqRel);
            carrier.send(0, Letter::answer(rank, answer));
            true
        })
    })?;
    let first = shares[0].first().copied().unwrap_or(Rank(0));
    let mut loaded: Option<Arc<Checkpoint>> = None;
    // Where process 0 has ended, or stands still, what the ranks of this process have in memory
    // stays.
    let leave_states = || {
        let Some(leaves) = &leaves else {
            return;
        };
        let (to, answers) = channel();
        *here.lock().unwrap_or_else(PoisonError::into_inner) = Some(to);
        let seen = data.as_ref().and_then(|d| d.dataset().seen());
        let origin = |step| {
            let of = (&*leaves.plan_hash, &*leaves.model);
            Origin::of_member(step, spec, seen, of)
        };
        let patience = watchdog.max(LAST_WORDS);
        // One that a signal has stopped leaves nothing either.
        let over = processes.over().into_iter().chain(processes.lost_here());
        let over: BTreeSet<usize> = over.collect();
        let over = over.into_iter().filter(|p| ![0, me].contains(p));
        let lost = over
            .map(|p| &shares[p])
            .filter(|ranks| !leaves.has_some_of(ranks));
        let lost: Vec<Rank> = lost.chain([&shares[0]]).flatten().copied().collect();
        leave(
            leaves,
            program,
            (&lost, &shares[me]),
            (&crew, &answers),
            (&origin, patience),
        );
    };
    // Looks since process 0 was heard; none before it has begun to let the others hear from it.
    let mut looks: Option<u32> = None;
    loop {
        let heard = requests.recv_timeout(LOOK);
        if heard.is_ok() {
            looks = looks.map(|_| 0);
        }
        match heard {
            Ok(Asked::Nothing) => looks = Some(0),
            Ok(Asked::Rank(rank, request)) => {
                let mut request = *request;
                // The ranks share one, so that each of its files is verified once.
                if let Request::Load(checkpoint) = &mut request {
                    match &loaded {
                        Some(known) if known.path() == checkpoint.path() => {
                            *checkpoint = Arc::clone(known);
                        }
                        _ => loaded = Some(Arc::clone(checkpoint)),
                    }
                }
                // Process 0 may have what is left written down.
                if let Some(since) = &mut *failed.lock().unwrap_or_else(PoisonError::into_inner) {
                    *since = Instant::now();
                }
                owed.fetch_add(1, Ordering::AcqRel);
                crew.tell(rank, request);
            }
            Ok(Asked::Over(None, is_interrupted)) => return Ok(is_interrupted),
            Ok(Asked::Over(Some(error), _)) => return Err(RuntimeError::EndedByFirst(error)),
            // Process 0 ends a run once a rank has failed.
            Err(RecvTimeoutError::Timeout) => {
                let failed = *failed.lock().unwrap_or_else(PoisonError::into_inner);
                // It waits for ranks that write or hash much, too.
                let longest = match owed.load(Ordering::Acquire) {
                    0 => LAST_REQUEST,
                    _ => LAST_REQUEST.max(watchdog.saturating_mul(ALONE)),
                };
                if failed.is_some_and(|f| f.elapsed() > longest) {
                    world.abort(first, "its process does not answer");
                    processes.miss();
                    processes.take_leave();
                    return Err(processes.silent(0, first));
                }
                looks = looks.map(|n| n + 1);
                if looks.is_some_and(|n| LOOK * (n - 1) > watchdog) {
                    world.abort(first, "its process stands still");
                    processes.miss();
                    leave_states();
                    processes.take_leave();
                    return Err(processes.silent(0, first));
                }
            }
            // Whoever waits for others must not wait for good.
            Err(RecvTimeoutError::Disconnected) => {
                world.abort(first, "its process is gone");
                let gone = processes.gone(0, first);
                leave_states();
                processes.take_leave();
                return Err(gone);
            }
        }
    }
}

/// Has this process' ranks write their share of the states, where those that are left without the
/// lost ones have all of them. Where that fails it is tried again while the disk gets more room, as
/// another one of them may be having the checkpoints go that were in the way. What is not whole is
/// found by who goes on.
fn leave(
    leaves: &Leaving,
    program: &Program,
    (lost, mine): (&[Rank], &[Rank]),
    (crew, answers): (&Crew, &Receiver<(Rank, Reply)>),
    (origin, patience): (&dyn Fn(u64) -> Origin, Duration),
) {
    let Some(shares) = Leaving::shares(program, lost) else {
        return;
    };
    let writers: BTreeSet<Rank> = shares.keys().copied().collect();
    let ranks: Vec<Rank> = mine
        .iter()
        .copied()
        .filter(|r| writers.contains(r))
        .collect();
    for &rank in &ranks {
        crew.tell(rank, Request::Stands);
    }
    // Each is at a step of its own where the loss came between their updates.
    let mut steps = BTreeMap::new();
    let until = Instant::now() + LAST_WORDS;
    while steps.len() < ranks.len() {
        match answers.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok((rank, Reply::Stands(Some(step)))) => drop(steps.insert(rank, step)),
            Ok((_, Reply::Stands(None))) | Err(_) => return,
            Ok(_) => {}
        }
    }
    let try_all = |ranks: &[Rank]| -> Option<Unleft> {
        if let Err(why) = leaves.make_place() {
            let (failed, silent) = (ranks.to_vec(), Vec::new());
            return Some(Unleft {
                failed,
                silent,
                why,
            });
        }
        for rank in ranks {
            let states = shares.get(rank).cloned().unwrap_or_default();
            crew.tell(*rank, Request::Save(leaves.place(), states));
        }
        let until = Instant::now() + patience;
        let (mut silent, mut failed, mut first) = (ranks.to_vec(), Vec::new(), None);
        while !silent.is_empty() {
            let heard = answers.recv_timeout(until.saturating_duration_since(Instant::now()));
            let Ok((rank, reply)) = heard else {
                break;
            };
            let Reply::Shard(shard) = reply else {
                continue;
            };
            silent.retain(|r| *r != rank);
            let step = steps.get(&rank).copied().unwrap_or(0);
            let note = |shard| leaves.note(origin(step), writers.clone(), (rank, shard));
            if let Err(e) = shard.and_then(note) {
                leaves.take_back(rank);
                failed.push(rank);
                first.get_or_insert(e);
            }
        }
        let is_late = !silent.is_empty();
        let why = first.or_else(|| is_late.then(|| late(leaves, patience)))?;
        Some(Unleft {
            failed,
            silent,
            why,
        })
    };
    let until = Instant::now() + patience;
    // Verified once: to read a checkpoint takes long.
    let whole = Whole::default();
    let (mut ranks, mut most, mut seen) = (ranks, 0, Instant::now());
    while let Some(unleft) = try_all(&ranks) {
        let (room, now) = (leaves.room(), Instant::now());
        if room > most {
            (most, seen) = (room, now);
        }
        let may_help = unleft.silent.is_empty() && unleft.why.is_of_files();
        if !may_help || now > until || now - seen > TO_CLEAR {
            leaves.give_up(&[unleft.failed, unleft.silent].concat(), &unleft.why);
            return;
        }
        leaves.make_room(&whole, &unleft.why);
        std::thread::sleep(AGAIN);
        ranks = unleft.failed;
    }
}

/// Ranks that have left nothing.
struct Unleft {
    /// Those that could not.
    failed: Vec<Rank>,
    /// Those that have not said whether they could.
    silent: Vec<Rank>,
    /// The first reason.
    why: RuntimeError,
}

/// The error of ranks that take too long.
fn late(leaves: &Leaving, patience: Duration) -> RuntimeError {
    RuntimeError::Checkpoint {
        path: leaves.place(),
        problem: format!("not written within {} s", patience.as_secs()),
    }
}
