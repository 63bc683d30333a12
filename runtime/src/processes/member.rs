//! A process without the coordinator.

use super::lines::{Asked, Inbox};
use super::{Head, Letter};
use crate::error::RuntimeError;
use crate::execute::session::{Cast, SessionOptions};
use crate::fabric::threads::{Carrier, World};
use ir::program::Program;
use ir::{Rank, TrainSpec};
use std::sync::mpsc::channel;

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
    let crew = cast.crew(&world, &shares[me], |rank| {
        let carrier = processes.carrier();
        Box::new(move |answer| {
            let head = Head::Answer { rank, answer };
            carrier.send(0, Letter { head, body: None });
            true
        })
    })?;
    for asked in requests {
        match asked {
            Asked::Rank(rank, request) => crew.tell(rank, *request),
            Asked::Over(None) => return Ok(()),
            Asked::Over(Some(error)) => return Err(RuntimeError::Ended(error)),
        }
    }
    // Whoever waits for others must not wait for good.
    let first = shares[0].first().copied().unwrap_or(Rank(0));
    world.abort(first, "its process is gone");
    Err(processes.gone(0, first))
}
