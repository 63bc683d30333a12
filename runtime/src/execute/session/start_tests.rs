//! How often the coordinator waits for another process while a run starts.

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

/// Each part of each state took one by itself, so that a start with 200 ms of delay took 20 s.
#[test]
fn initial_states_take_one_round_trip() {
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
    let (trips, requests) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
    let workers = std::mem::take(&mut session.workers).into_iter();
    let counted = workers.map(|worker| {
        Box::new(Counted {
            worker,
            is_asked: false,
            trips: Arc::clone(&trips),
            requests: Arc::clone(&requests),
        }) as Box<dyn Link>
    });
    session.workers = counted.collect();
    let initial = crate::init::from_graph(&training, spec.seed);
    session.initialise(initial).unwrap();
    assert_eq!(trips.load(Ordering::Relaxed), 1);
    assert!(requests.load(Ordering::Relaxed) > 10, "too few to tell");
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
