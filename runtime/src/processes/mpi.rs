//! Processes that an MPI library connects: what they tell each other goes as its messages, over
//! whatever network it finds best.
//!
//! A message of MPI is a run of bytes of the connection, an empty one its end. One thread takes in
//! all that arrives: the library's own ways to wait would keep a processor busy for every process.
//!
//! The library says to nobody that a process is gone. `mpirun` ends all others then, and gives them
//! a moment to do so in order (Open MPI a second from its SIGTERM on), in which a rank may well be
//! in the middle of an instruction. That thread sees within [`LOOK_AROUND`] that a process of this
//! host has ended. One of those that are left says so, whatever its ranks do. Where nobody ends the
//! others, the connection of the one that is gone has ended, and its absence is found as over TCP.

use super::lines::{Connection, Processes};
#[cfg(target_os = "linux")]
use super::neighbours::Neighbour;
use super::rendezvous::{Fingerprint, JoinError, Place, Who};
use mpi::environment::Universe;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, Destination, Equivalence, Source};
use mpi::{Tag, Threading};
use serde::{Deserialize, Serialize};
use std::io::{self, ErrorKind, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The tag of messages that bring processes together.
const HELLO: Tag = 71;
/// The tag of the bytes of connections.
const BYTES: Tag = 72;
/// The tag of words beside the connections.
#[cfg(feature = "testing")]
const WORDS: Tag = 73;
/// Longest message; the library counts in 32 bits.
const LONGEST: usize = 1 << 30;
/// So often is looked at once before a look is worth a pause.
const LOOKS: u32 = 200;
/// The pause.
const PAUSE: Duration = Duration::from_micros(50);
/// So often is looked whether a process of this host has ended.
#[cfg(target_os = "linux")]
const LOOK_AROUND: Duration = Duration::from_millis(20);
/// So many neighbours are looked at so often.
#[cfg(target_os = "linux")]
const FEW: u32 = 8;
/// So long the others leave it to the launcher to end them, once one of them says what happened.
#[cfg(target_os = "linux")]
const LEFT_TO_LAUNCHER: Duration = Duration::from_secs(5);
/// The same while processes come together.
const BETWEEN_LOOKS: Duration = Duration::from_millis(5);
/// How much longer than process 0 waits the others wait for its answer.
const ANSWER: Duration = Duration::from_secs(5);

/// A process of this host that has ended in the middle of a run.
#[derive(Clone, Debug)]
pub struct Departed {
    /// Which one of the run it was.
    pub process: usize,
    /// Its number on its host.
    pub pid: u32,
    /// Its host.
    pub host: String,
}

/// The last words of the first process that is left on a host where another one has ended: all of
/// them are about to be killed.
pub type LastWords = Box<dyn FnOnce(Departed) + Send>;

/// The MPI library of this process, ended when this is dropped, after its [`Processes`].
pub struct Mpi {
    universe: Option<Universe>,
    place: Place,
    /// Whether all have ended what they had to tell each other, so that all can end together.
    has_left: Arc<AtomicBool>,
}

impl Drop for Mpi {
    /// The library's end waits for that of all processes. One that never joined, or that others do
    /// not hear any more, leaves without, by which mpirun sees that it failed, and ends the others.
    fn drop(&mut self) {
        if self.place.of > 1 && !self.has_left.load(Ordering::Relaxed) {
            std::mem::forget(self.universe.take());
        }
    }
}

impl std::fmt::Debug for Mpi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "process {} of {} by MPI",
            self.place.index, self.place.of
        )
    }
}

/// The answer of process 0.
#[derive(Serialize, Deserialize)]
enum Reply {
    Welcome(Vec<Who>),
    Refused(String),
}

impl Mpi {
    /// Begins to use the library; once in a process.
    ///
    /// Fails when it has been begun before, or cannot be used by several threads.
    pub fn start() -> Result<Self, JoinError> {
        let failed = |what: &str| JoinError::Ended(format!("MPI cannot be used: {what}"));
        let Some((universe, threading)) = mpi::initialize_with_threading(Threading::Multiple)
        else {
            return Err(failed("it has been begun before"));
        };
        if threading != Threading::Multiple {
            return Err(failed("this library serves one thread only"));
        }
        let world = universe.world();
        let place = Place {
            index: world.rank() as usize,
            of: world.size() as usize,
        };
        Ok(Mpi {
            universe: Some(universe),
            place,
            has_left: Arc::default(),
        })
    }
    /// Which process this is, of how many.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Brings all processes together, each of which waits no longer than so from its own start: one
    /// that starts [`ANSWER`] or more before process 0 may give up while that one still waits.
    ///
    /// Fails when one of them is of another run, or does not come: then those that came are told.
    pub fn join(
        &self,
        fingerprint: &Fingerprint,
        patience: Duration,
        last_words: Option<LastWords>,
    ) -> Result<Processes, JoinError> {
        let (world, place) = (SimpleCommunicator::world(), self.place);
        let until = Instant::now() + patience;
        let all = match place.index {
            0 => welcome(&world, place.of, fingerprint, patience)?,
            index => {
                let first = world.process_at_rank(0);
                first.send_with_tag(&told(&(fingerprint, Who::me()))?[..], HELLO);
                // Process 0 waits as long for the others, and answers then.
                let answer = hello(&world, 0, until + ANSWER);
                let answer = answer.ok_or_else(|| JoinError::Unreachable {
                    place,
                    at: String::new(),
                    seconds: (patience + ANSWER).as_secs(),
                    problem: "it does not answer".into(),
                })?;
                match heard(&answer)? {
                    Reply::Welcome(all) => all,
                    Reply::Refused(reason) => return Err(JoinError::Refused { index, reason }),
                }
            }
        };
        let (mut senders, mut connections) = (Vec::new(), Vec::new());
        for process in 0..place.of {
            if process == place.index {
                senders.push(None);
                connections.push(None);
                continue;
            }
            let (arrives, incoming) = channel();
            senders.push(Some(arrives));
            let connection = Link {
                to: process as i32,
                incoming: Mutex::new(Some(incoming)),
            };
            connections.push(Some(Arc::new(connection) as Arc<dyn Connection>));
        }
        let around = Around::new(&all, place.index, last_words);
        let taking_in = std::thread::spawn(move || take_in(senders, around));
        Ok(Processes::new(place, all, connections).with_behind(taking_in, &self.has_left))
    }

    /// The words of these processes, beside their connections, once all have said theirs.
    #[cfg(feature = "testing")]
    pub(super) fn gather(&self, among: &[ir::Rank], me: ir::Rank, word: String) -> Vec<String> {
        const PATIENCE: Duration = Duration::from_secs(60);
        let world = SimpleCommunicator::world();
        let hears = |from: ir::Rank| {
            let until = Instant::now() + PATIENCE;
            let words = heard_of(&world, (from.0 as i32, WORDS), until);
            String::from_utf8(words.expect("it says something")).expect("of letters")
        };
        let says = |to: ir::Rank, word: &str| {
            let to = world.process_at_rank(to.0 as i32);
            to.send_with_tag(word.as_bytes(), WORDS);
        };
        let (first, others) = among.split_first().expect("there is somebody");
        if me != *first {
            says(*first, &word);
            return among.iter().map(|_| hears(*first)).collect();
        }
        let mut all = vec![word];
        all.extend(others.iter().map(|other| hears(*other)));
        for other in others {
            all.iter().for_each(|word| says(*other, word));
        }
        all
    }
}

/// The word of a process by which it joins; none when it does not come in time.
fn hello(world: &SimpleCommunicator, from: i32, until: Instant) -> Option<Vec<u8>> {
    heard_of(world, (from, HELLO), until)
}

/// The next message of a process with a tag; none when it does not come in time.
fn heard_of(
    world: &SimpleCommunicator,
    (from, tag): (i32, Tag),
    until: Instant,
) -> Option<Vec<u8>> {
    loop {
        let from = world.process_at_rank(from);
        if let Some((message, status)) = from.immediate_matched_probe_with_tag(tag) {
            let mut words = vec![0u8; status.count(u8::equivalent_datatype()) as usize];
            message.matched_receive_into(&mut words[..]);
            return Some(words);
        }
        if Instant::now() > until {
            return None;
        }
        std::thread::sleep(BETWEEN_LOOKS);
    }
}

/// Hears who the others are, and tells them all.
fn welcome(
    world: &SimpleCommunicator,
    of: usize,
    fingerprint: &Fingerprint,
    patience: Duration,
) -> Result<Vec<Who>, JoinError> {
    let until = Instant::now() + patience;
    let (mut all, mut error) = (vec![Who::me()], None);
    let mut missing = Vec::new();
    for index in 1..of {
        let Some(words) = hello(world, index as i32, until) else {
            missing.push(index);
            continue;
        };
        let (theirs, who): (Fingerprint, Who) = heard(&words)?;
        all.push(who);
        if let Some((what, [ours, theirs])) = fingerprint.difference(&theirs) {
            error.get_or_insert(JoinError::Differs {
                what,
                index,
                theirs,
                ours,
            });
        }
    }
    if !missing.is_empty() {
        error.get_or_insert(JoinError::Missing {
            missing: missing.clone(),
            of,
            seconds: patience.as_secs(),
        });
    }
    let reply = match &error {
        None => Reply::Welcome(all.clone()),
        Some(e) => Reply::Refused(e.to_string()),
    };
    let reply = told(&reply)?;
    for index in (1..of).filter(|i| !missing.contains(i)) {
        let to = world.process_at_rank(index as i32);
        to.send_with_tag(&reply[..], HELLO);
    }
    error.map_or(Ok(all), Err)
}

fn told(word: &impl Serialize) -> Result<Vec<u8>, JoinError> {
    rmp_serde::to_vec_named(word).map_err(|e| JoinError::Ended(e.to_string()))
}

fn heard<T: for<'a> Deserialize<'a>>(words: &[u8]) -> Result<T, JoinError> {
    let what = |e| JoinError::Ended(format!("a process speaks another language: {e}"));
    rmp_serde::from_slice(words).map_err(what)
}

/// The processes of this host, looked at now and then.
#[cfg(target_os = "linux")]
struct Around {
    me: usize,
    /// By process.
    all: Vec<Option<(Neighbour, Departed)>>,
    /// Those that were seen to have ended; what they sent before may still arrive.
    ended: Vec<(usize, Departed)>,
    looked: Instant,
    last_words: Option<LastWords>,
}

#[cfg(target_os = "linux")]
impl Around {
    fn new(all: &[Who], me: usize, last_words: Option<LastWords>) -> Self {
        let others = all.iter().enumerate();
        let find = |(process, who): (usize, &Who)| {
            let departed = Departed {
                process,
                pid: who.pid,
                host: who.host.clone(),
            };
            let neighbour = Neighbour::find(who).filter(|_| process != me)?;
            Some((neighbour, departed))
        };
        Around {
            me,
            all: others.map(find).collect(),
            ended: Vec::new(),
            looked: Instant::now(),
            last_words,
        }
    }
    /// How often is looked: the more processes there are, the less often by each, as the looks of
    /// all go with the square of their number.
    fn period(&self) -> Duration {
        let n = self.all.iter().flatten().count() as u32;
        LOOK_AROUND * n.div_ceil(FEW).max(1)
    }
    /// Whether this process is the first one that is left: it speaks of the end of another one.
    fn speaks(&self) -> bool {
        let first = self.all.iter().position(Option::is_some);
        first.is_none_or(|p| p > self.me)
    }
    /// Looks, when nothing has arrived, and it is time. Returns those that had ended by the look
    /// before: nothing will arrive of them any more. One that has said so before it ended is not
    /// among them. All others of the host have seen it by then, so that one of them speaks and no
    /// other one takes that one's end for the first.
    fn look<T>(&mut self, open: &[Option<T>]) -> Vec<usize> {
        if self.looked.elapsed() < self.period() {
            return Vec::new();
        }
        let is_open = |process: usize| open.get(process).is_some_and(Option::is_some);
        let mut gone = std::mem::take(&mut self.ended);
        gone.retain(|(process, _)| is_open(*process));
        let first = gone.first();
        if let Some(((_, departed), last_words)) =
            first.and_then(|first| Some((first, self.last_words.take()?)))
        {
            match self.speaks() {
                true => last_words(departed.clone()),
                false => std::thread::sleep(LEFT_TO_LAUNCHER),
            }
        }
        for (process, place) in self.all.iter_mut().enumerate() {
            let has_ended = |(neighbour, _): &mut (Neighbour, Departed)| neighbour.is_gone();
            let departed = place.take_if(has_ended);
            if let Some((_, departed)) = departed.filter(|_| is_open(process)) {
                self.ended.push((process, departed));
            }
        }
        self.looked = Instant::now();
        gone.into_iter().map(|(process, _)| process).collect()
    }
}

/// Elsewhere it cannot be seen.
#[cfg(not(target_os = "linux"))]
struct Around;

#[cfg(not(target_os = "linux"))]
impl Around {
    fn new(_: &[Who], _: usize, _: Option<LastWords>) -> Self {
        Around
    }
    fn look<T>(&mut self, _: &[Option<T>]) -> Vec<usize> {
        Vec::new()
    }
}

/// Takes in what arrives from all processes until each has finished, or has ended without.
fn take_in(mut to: Vec<Option<Sender<Vec<u8>>>>, mut around: Around) {
    let world = SimpleCommunicator::world();
    let mut looks = 0;
    while to.iter().any(Option::is_some) {
        let found = world.any_process().immediate_matched_probe_with_tag(BYTES);
        let Some((message, status)) = found else {
            looks += 1;
            for process in around.look(&to) {
                to[process] = None;
            }
            match looks > LOOKS {
                true => std::thread::sleep(PAUSE),
                false => std::thread::yield_now(),
            }
            continue;
        };
        looks = 0;
        let mut bytes = vec![0u8; status.count(u8::equivalent_datatype()) as usize];
        message.matched_receive_into(&mut bytes[..]);
        let Some(reader) = to.get_mut(status.source_rank() as usize) else {
            continue;
        };
        match bytes.is_empty() {
            true => *reader = None,
            // One who reads no more has ended.
            false => drop(reader.as_ref().map(|r| r.send(bytes))),
        }
    }
}

struct Link {
    to: i32,
    incoming: Mutex<Option<Receiver<Vec<u8>>>>,
}

impl Connection for Link {
    fn reader(&self) -> io::Result<Box<dyn Read + Send>> {
        let mut incoming = self.incoming.lock().unwrap_or_else(PoisonError::into_inner);
        match incoming.take() {
            Some(incoming) => Ok(Box::new(Arrivals {
                incoming,
                bytes: Vec::new(),
                read: 0,
            })),
            None => Err(ErrorKind::NotConnected.into()),
        }
    }
    fn writer(&self) -> io::Result<Box<dyn Write + Send>> {
        Ok(Box::new(Departures { to: self.to }))
    }
    fn finish(&self) {
        let world = SimpleCommunicator::world();
        let nothing: &[u8] = &[];
        world.process_at_rank(self.to).send_with_tag(nothing, BYTES);
    }
    /// The library ends all processes when one is gone.
    fn close(&self) {}
}

struct Arrivals {
    incoming: Receiver<Vec<u8>>,
    bytes: Vec<u8>,
    read: usize,
}

impl Read for Arrivals {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.read == self.bytes.len() {
            match self.incoming.recv() {
                Ok(bytes) => (self.bytes, self.read) = (bytes, 0),
                Err(_) => return Ok(0),
            }
        }
        let n = out.len().min(self.bytes.len() - self.read);
        out[..n].copy_from_slice(&self.bytes[self.read..self.read + n]);
        self.read += n;
        Ok(n)
    }
}

struct Departures {
    to: i32,
}

impl Write for Departures {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = bytes.len().min(LONGEST);
        if n > 0 {
            let world = SimpleCommunicator::world();
            world
                .process_at_rank(self.to)
                .send_with_tag(&bytes[..n], BYTES);
        }
        Ok(n)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
