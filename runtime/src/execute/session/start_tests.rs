//! How often the coordinator waits for another process while a run starts, and for its weights.

use super::*;
use crate::execute::message::Answer;
use crate::execute::naive::lower;
use ir::testing::{GraphOptions, random_graph, sequence_of};
use ir::training::training_graph;
use ir::{Axis, DeviceMesh, LogicalMesh};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A worker that counts how often it is asked for an answer after it was asked for something new:
/// over a link each of these is a round trip.
struct Counted {
    worker: Box<dyn Link>,
    is_asked: bool,
    trips: Arc<AtomicUsize>,
    requests: Arc<AtomicUsize>,
}

impl Link for Counted {
    fn tell(&mut self, rank: Rank, request: Request) {
        self.is_asked = true;
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.worker.tell(rank, request);
    }
    fn hear(&mut self, rank: Rank, patience: Duration) -> Option<Answer> {
        if std::mem::take(&mut self.is_asked) {
            self.trips.fetch_add(1, Ordering::Relaxed);
        }
        self.worker.hear(rank, patience)
    }
    fn silent(&self, rank: Rank) -> Option<RuntimeError> {
        self.worker.silent(rank)
    }
}

/// How often a session waits, and asks.
#[derive(Default)]
struct Counts {
    trips: Arc<AtomicUsize>,
    requests: Arc<AtomicUsize>,
}

impl Counts {
    /// Waits and requests since the last time that was asked for.
    fn take(&self) -> (usize, usize) {
        let take = |count: &AtomicUsize| count.swap(0, Ordering::Relaxed);
        (take(&self.trips), take(&self.requests))
    }
}

/// A session on two ranks, with what it was made of.
fn counted() -> (Session, Counts, ir::training::TrainingGraph, TrainSpec) {
    let graph = random_graph(5, &GraphOptions::default());
    let spec = TrainSpec {
        global_batch: 4,
        sequence: sequence_of(&graph).unwrap(),
        ..TrainSpec::default()
    };
    let training = training_graph(&graph, &spec).unwrap();
    let axis = Axis {
        name: "x".into(),
        size: 2,
    };
    let devices = DeviceMesh {
        first_rank: Rank(0),
        n_devices: 2,
    };
    let mesh = LogicalMesh::new(devices, vec![axis]).unwrap();
    let program = lower(&training, &[mesh], 2, 2, 1);
    let mut session = Session::start(&program, &spec, SessionOptions::default()).unwrap();
    let counts = Counts::default();
    let workers = std::mem::take(&mut session.workers).into_iter();
    let counted = workers.map(|worker| {
        Box::new(Counted {
            worker,
            is_asked: false,
            trips: Arc::clone(&counts.trips),
            requests: Arc::clone(&counts.requests),
        }) as Box<dyn Link>
    });
    session.workers = counted.collect();
    (session, counts, training, spec)
}

/// A process that never answers, as a signal has stopped it for some of the first looks.
struct Stopped {
    worker: Box<dyn Link>,
    /// Looks for which it is stopped.
    looks: usize,
    looked: AtomicUsize,
    /// Whether it answers once it goes on.
    answers: bool,
}

impl Link for Stopped {
    fn tell(&mut self, rank: Rank, request: Request) {
        self.worker.tell(rank, request);
    }
    fn hear(&mut self, rank: Rank, patience: Duration) -> Option<Answer> {
        match self.answers && self.looked.load(Ordering::Relaxed) >= self.looks {
            true => self.worker.hear(rank, patience),
            false => {
                std::thread::sleep(patience);
                None
            }
        }
    }
    fn silent(&self, rank: Rank) -> Option<RuntimeError> {
        Some(RuntimeError::Gone {
            rank,
            process: 1,
            pid: 1,
            host: "here".into(),
            how: "it does not answer".into(),
            is_silent: true,
        })
    }
    fn is_stopped(&self) -> bool {
        self.looked.fetch_add(1, Ordering::Relaxed) < self.looks
    }
}

/// Ranks have long for what each does alone; one whose process a signal has stopped does nothing, and
/// has no longer than in a step. One that goes on in time is waited for.
#[test]
fn stopped_processes_are_not_waited_for_long() {
    let asked = |looks: usize, answers: bool| {
        let (mut session, ..) = counted();
        session.watchdog = Duration::from_secs(1);
        let workers = std::mem::take(&mut session.workers).into_iter();
        let stopped = workers.map(|worker| {
            let looked = AtomicUsize::new(0);
            Box::new(Stopped {
                worker,
                looks,
                looked,
                answers,
            }) as Box<dyn Link>
        });
        session.workers = stopped.collect();
        let began = Instant::now();
        (session.check_replicas(), began.elapsed())
    };
    let (checked, took) = asked(usize::MAX, false);
    assert!(
        matches!(checked, Err(RuntimeError::Gone { .. })),
        "{checked:?}"
    );
    let longest = Duration::from_secs(1) * ALONE;
    assert!(took >= Duration::from_secs(1) && took < longest, "{took:?}");
    let (checked, took) = asked(2, true);
    assert!(checked.is_ok(), "{checked:?} after {took:?}");
}

/// Each part of each state took one by itself, so that a start with 200 ms of delay took 20 s.
#[test]
fn initial_states_take_one_round_trip() {
    let (mut session, counts, training, spec) = counted();
    let initial = crate::init::from_graph(&training, spec.seed);
    session.initialise(initial).unwrap();
    let (trips, requests) = counts.take();
    assert_eq!(trips, 1);
    assert!(requests > 10, "too few to tell");
    // Every rank has what it was given, whichever request that came by.
    session.replicas_agree().unwrap();
    let drawn = crate::init::from_graph(&training, spec.seed);
    for (path, state) in session.export_states().unwrap() {
        let places = session.state_places();
        let (role, place) = &places[&path][0];
        let request = StateRequest {
            path: &path,
            role: place.role,
            lens: &session.program.roles[*role].buffer(place.buffer).lens,
        };
        assert_eq!(state.values, drawn(request).unwrap(), "{path}");
    }
}

/// Each took one by itself, of every rank that has it.
#[test]
fn weights_that_are_saved_take_one_round_trip() {
    let (mut session, counts, training, spec) = counted();
    let initial = crate::init::from_graph(&training, spec.seed);
    session.initialise(initial).unwrap();
    let all = session.params().unwrap();
    // Each part once, of whichever rank.
    let n_parts: usize = (session.state_places().into_values())
        .filter(|places| places[0].1.role == StateRole::Parameter)
        .map(|places| {
            let (role, state) = &places[0];
            let parts = session.parts(*role, state).unwrap().into_iter();
            let parts = parts.map(|(local, ..)| (local.start(), local.valid()));
            parts.collect::<BTreeSet<_>>().len()
        })
        .sum();
    counts.take();
    let order: Vec<String> = all.keys().rev().cloned().collect();
    let mut states = session.in_order(order.clone());
    for path in &order {
        assert_eq!(states.state(path).unwrap().as_ref(), Some(&all[path]));
    }
    let (trips, requests) = counts.take();
    assert!(requests > 5, "too few to tell");
    assert_eq!((trips, requests), (1, n_parts));
    // Out of order, twice, and one that there is not.
    let mut states = session.in_order(order.clone());
    for path in [&order[1], &order[0], &order[1]] {
        assert_eq!(states.state(path).unwrap().as_ref(), Some(&all[path]));
    }
    assert_eq!(states.state("none").unwrap(), None);
}
