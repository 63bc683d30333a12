//! A process without the coordinator.

use super::Letter;
use super::lines::{Asked, Inbox};
use crate::checkpoint::Checkpoint;
use crate::error::RuntimeError;
use crate::execute::message::Request;
use crate::execute::session::{Cast, SessionOptions};
use crate::fabric::threads::{Carrier, World};
use ir::program::Program;
use ir::{Rank, TrainSpec};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often is looked whether process 0 should have said something.
const LOOK: Duration = Duration::from_millis(500);
/// How long process 0 has to end a run of which a rank has failed.
const LAST_REQUEST: Duration = Duration::from_secs(15);

/// Does what process 0 asks of this process' ranks until that one has no more requests. Program,
/// spec and options are those of the session there.
///
/// Fails as [`Session::new`](crate::execute::Session::new) does, where the options name no
/// processes, and when process 0 is gone, or ends a run that failed. What fails on a rank is an
/// answer to process 0.
pub fn serve(
    program: &Program,
    spec: &TrainSpec,
    options: SessionOptions,
) -> Result<(), RuntimeError> {
    let watchdog = options.watchdog;
    let Some(processes) = options.processes.clone() else {
        let problem = "a process that serves must be one of several";
        return Err(RuntimeError::Program(problem.into()));
    };
    let cast = Cast::new(program, spec, options)?;
    let (shares, me) = (cast.shares(&processes), processes.place().index);
    let world = World::among(&shares, me, watchdog, processes.carrier());
    let (asked, requests) = channel();
    processes.attach(&world, shares.clone(), Inbox::Requests(asked));
    let failed: Arc<Mutex<Option<Instant>>> = Arc::default();
    let crew = cast.crew(&world, &shares[me], |rank| {
        let (carrier, failed) = (processes.carrier(), Arc::clone(&failed));
        Box::new(move |answer| {
            if answer.is_err() {
                let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                failed.get_or_insert_with(Instant::now);
            }
            carrier.send(0, Letter::answer(rank, answer));
            true
        })
    })?;
    let first = shares[0].first().copied().unwrap_or(Rank(0));
    let mut loaded: Option<Arc<Checkpoint>> = None;
    loop {
        match requests.recv_timeout(LOOK) {
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
                crew.tell(rank, request);
            }
            Ok(Asked::Over(None)) => return Ok(()),
            Ok(Asked::Over(Some(error))) => return Err(RuntimeError::EndedByFirst(error)),
            // Process 0 ends a run once a rank has failed.
            Err(RecvTimeoutError::Timeout) => {
                let failed = *failed.lock().unwrap_or_else(PoisonError::into_inner);
                if failed.is_some_and(|f| f.elapsed() > LAST_REQUEST) {
                    world.abort(first, "its process does not answer");
                    return Err(processes.silent(0, first));
                }
            }
            // Whoever waits for others must not wait for good.
            Err(RecvTimeoutError::Disconnected) => {
                world.abort(first, "its process is gone");
                return Err(processes.gone(0, first));
            }
        }
    }
}
