//! The connections of a process to the others of its run. For each there is a thread that writes
//! what is to be sent and one that takes in what comes, so that two processes that send each other
//! more than the system buffers do not wait for each other.

use super::frame::{self, Head, Letter, Reason};
use super::neighbours::Neighbour;
use super::processors;
use super::rendezvous::{Place, Who};
use crate::error::RuntimeError;
use crate::execute::message::{Answer, Request};
use crate::fabric::threads::{Carrier, World};
use ir::Rank;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes that are read at once where messages are short.
const READ_AHEAD: usize = 1 << 16;
/// Longest that the end of a run waits for the other processes to take what is still on its way.
const FAREWELL: Duration = Duration::from_secs(5);
/// The same where process 0 is lost: others may not listen either.
const TO_LEAVE: Duration = Duration::from_millis(200);
/// Longest that is waited for word of how a process ended.
const OBITUARY: Duration = Duration::from_millis(300);
/// The ends of others that were killed with a process are heard close to that of it, unless they have
/// much memory to give back first: they are waited for until there was none for so long.
const QUIET: Duration = Duration::from_millis(150);
/// Longest that they are waited for. Those that only miss a process end later.
const NEWS: Duration = Duration::from_secs(1);

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code that holds one of these leaves it half-changed.
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A way between this process and another one: bytes arrive in order or not at all.
pub(super) trait Connection: Send + Sync {
    /// Where bytes arrive. Asked once.
    fn reader(&self) -> io::Result<Box<dyn Read + Send>>;
    /// Where they go. Asked once.
    fn writer(&self) -> io::Result<Box<dyn Write + Send>>;
    /// Nothing more will be written: the other end reads to the end.
    fn finish(&self);
    /// Ends both directions at once.
    fn close(&self);
}

impl Connection for TcpStream {
    fn reader(&self) -> io::Result<Box<dyn Read + Send>> {
        Ok(Box::new(self.try_clone()?))
    }
    fn writer(&self) -> io::Result<Box<dyn Write + Send>> {
        Ok(Box::new(self.try_clone()?))
    }
    fn finish(&self) {
        let _ = self.shutdown(Shutdown::Write);
    }
    fn close(&self) {
        let _ = self.shutdown(Shutdown::Both);
    }
}

/// The ways out of a process.
#[derive(Debug)]
pub(crate) struct Lines {
    /// By process; `None` to itself, and once they are closed.
    to: RwLock<Vec<Option<Sender<Letter>>>>,
}

impl Carrier for Lines {
    fn send(&self, to: usize, letter: Letter) {
        let lines = self.to.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(Some(line)) = lines.get(to) {
            // Whoever is gone is reported by the thread that reads.
            let _ = line.send(letter);
        }
    }
}

impl Lines {
    fn close(&self) {
        let mut lines = self.to.write().unwrap_or_else(PoisonError::into_inner);
        lines.iter_mut().for_each(|line| *line = None);
    }
}

/// Where what comes is taken.
pub(crate) enum Inbox {
    /// The coordinator's end: answers by rank.
    Answers(BTreeMap<Rank, Sender<Answer>>),
    /// The others' end: requests of the coordinator.
    Requests(Sender<Asked>),
}

/// A request of the coordinator to a process.
pub(crate) enum Asked {
    /// Something of a rank.
    Rank(Rank, Box<Request>),
    /// To end; with the run's error where it failed, and whether it was interrupted.
    Over(Option<String>, bool),
    /// Nothing: it goes on.
    Nothing,
}

/// The ranks of a process, once there are any.
struct Attached {
    world: Arc<World>,
    /// By process.
    ranks: Vec<Vec<Rank>>,
    inbox: Mutex<Option<Inbox>>,
}

#[derive(Default)]
struct Desk {
    attached: Mutex<Option<Arc<Attached>>>,
    /// Something is attached, or never will be.
    changed: Condvar,
    closed: Mutex<bool>,
    /// How other processes ended, by those who started them.
    fates: Mutex<BTreeMap<usize, String>>,
    /// Whether anybody notes that.
    is_watched: Mutex<bool>,
    /// The first one that asked for the end of the run, and why.
    to_end: Mutex<Option<(usize, Reason)>>,
    /// Failures of the connections to them.
    breaks: Mutex<BTreeMap<usize, String>>,
    /// Those whose connections have ended; whether the end was heard, as what was sent was taken in
    /// until then.
    over: Mutex<BTreeMap<usize, bool>>,
    /// When something last came from them.
    heard: Mutex<BTreeMap<usize, Instant>>,
    /// Those that said that they end by themselves.
    farewells: Mutex<BTreeSet<usize>>,
    /// Those that were lost shortly after the first one was missed.
    missed: Mutex<Option<Vec<usize>>>,
}

/// Who has said something within this time is there: a process that is given up was asked before, as
/// all others were, whether it is.
const OF_LATE: Duration = Duration::from_secs(5);

/// The ends of connections over which nothing comes any more: of the process behind they say
/// nothing.
const UNHEARD: [ErrorKind; 4] = [
    ErrorKind::TimedOut,
    ErrorKind::HostUnreachable,
    ErrorKind::NetworkUnreachable,
    ErrorKind::NetworkDown,
];

impl Desk {
    /// Waits for the ranks; none when the run has ended before there were any.
    fn attached(&self) -> Option<Arc<Attached>> {
        let mut attached = lock(&self.attached);
        loop {
            if let Some(attached) = &*attached {
                return Some(Arc::clone(attached));
            }
            if *lock(&self.closed) {
                return None;
            }
            attached = self
                .changed
                .wait_timeout(attached, Duration::from_millis(100))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

/// This process, and its connections to the other ones of its run.
pub struct Processes {
    place: Place,
    all: Vec<Who>,
    /// The others of these on this host, as far as they can be seen.
    neighbours: Vec<(usize, Neighbour)>,
    /// Which one of those on its host this is, where a launcher says so.
    local: Option<usize>,
    lines: Arc<Lines>,
    desk: Arc<Desk>,
    writers: Mutex<Vec<JoinHandle<()>>>,
    connections: Vec<Arc<dyn Connection>>,
    /// Work behind the connections, which ends when both sides have finished.
    behind: Mutex<Vec<JoinHandle<()>>>,
    /// Whether it ended with everybody, once it has.
    has_left: Arc<AtomicBool>,
}

impl std::fmt::Debug for Processes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Place { index, of } = self.place;
        write!(f, "process {index} of {of}")
    }
}

impl Processes {
    /// With a connection to each other process.
    pub(super) fn new(
        place: Place,
        all: Vec<Who>,
        connections: Vec<Option<Arc<dyn Connection>>>,
    ) -> Self {
        let desk = Arc::new(Desk::default());
        let (mut to, mut writers, mut kept) = (Vec::new(), Vec::new(), Vec::new());
        for (process, connection) in connections.into_iter().enumerate() {
            let Some(connection) = connection else {
                to.push(None);
                continue;
            };
            let (line, letters) = channel();
            let ends = connection
                .writer()
                .and_then(|w| Ok((w, connection.reader()?)));
            let mut reader: Box<dyn Read + Send> = Box::new(io::empty());
            match ends {
                Ok((writer, found)) => {
                    reader = found;
                    let own = Arc::clone(&connection);
                    writers.push(std::thread::spawn(move || write(&*own, writer, &letters)));
                }
                // No descriptor is left: as if the connection had broken.
                Err(e) => {
                    lock(&desk.breaks).insert(process, format!("its connection failed: {e}"));
                }
            }
            kept.push(connection);
            let desk = Arc::clone(&desk);
            std::thread::spawn(move || read(&desk, process, reader));
            to.push(Some(line));
        }
        let others = all.iter().enumerate().filter(|(i, _)| *i != place.index);
        let neighbours = others.filter_map(|(i, who)| Some((i, Neighbour::find(who)?)));
        Processes {
            place,
            neighbours: neighbours.collect(),
            all,
            local: None,
            lines: Arc::new(Lines {
                to: RwLock::new(to),
            }),
            desk,
            writers: Mutex::new(writers),
            connections: kept,
            behind: Mutex::default(),
            has_left: Arc::default(),
        }
    }
    /// With the number that this process has among those on its host, where a launcher says so.
    pub fn with_local(mut self, local: Option<usize>) -> Self {
        self.local = local;
        self
    }
    /// Has the end of these processes wait for this thread, too.
    #[cfg(feature = "mpi")]
    pub(super) fn with_behind(mut self, thread: JoinHandle<()>, left: &Arc<AtomicBool>) -> Self {
        lock(&self.behind).push(thread);
        self.has_left = Arc::clone(left);
        self
    }

    /// Which process this is.
    pub fn place(&self) -> Place {
        self.place
    }
    /// The system's number of process 0, and its host.
    pub fn first(&self) -> Option<(u32, &str)> {
        let first = self.all.first()?;
        Some((first.pid, &first.host))
    }
    /// How many processes of the run are on this host.
    pub fn on_this_host(&self) -> usize {
        let here = &self.all[self.place.index].host;
        self.all.iter().filter(|w| w.host == *here).count()
    }
    /// Whether another process is on this host.
    pub fn is_here(&self, process: usize) -> bool {
        let here = &self.all[self.place.index].host;
        self.all.get(process).is_some_and(|who| who.host == *here)
    }
    /// The other processes on this host that a signal has stopped: their numbers, and the system's.
    pub fn stopped_here(&self) -> Vec<(usize, u32)> {
        let stopped = self.neighbours.iter().filter(|(_, n)| n.is_stopped());
        let number = |(process, _): &(usize, Neighbour)| (*process, self.all[*process].pid);
        stopped.map(number).collect()
    }
    /// Whether a signal has stopped another process, where it is on this host.
    pub(crate) fn is_stopped(&self, process: usize) -> bool {
        let mut all = self.neighbours.iter();
        all.any(|(index, n)| *index == process && n.is_stopped())
    }
    /// The other processes on this host that have ended, or that a signal has stopped.
    pub(crate) fn lost_here(&self) -> impl Iterator<Item = usize> {
        let lost = self.neighbours.iter();
        let lost = lost.filter(|(_, n)| n.is_stopped() || n.is_gone());
        lost.map(|(process, _)| *process)
    }
    /// Number of hosts.
    pub fn n_hosts(&self) -> usize {
        let hosts: BTreeSet<&str> = self.all.iter().map(|w| w.host.as_str()).collect();
        hosts.len()
    }
    /// Processors of this host that its processes of the run may use, together.
    pub fn n_processors(&self) -> usize {
        let here = &self.all[self.place.index].host;
        let here = self.all.iter().filter(|w| w.host == *here);
        processors::of_all(here.map(|w| w.pid))
    }
    /// Says that it will be noted how processes end.
    pub fn are_watched(&self) {
        *lock(&self.desk.is_watched) = true;
    }
    /// Notes how a process ended, for the error of those who miss it.
    pub fn ended(&self, process: usize, how: impl Into<String>) {
        lock(&self.desk.fates).insert(process, how.into());
    }
    /// The processes whose connections have ended.
    pub(crate) fn over(&self) -> Vec<usize> {
        lock(&self.desk.over).keys().copied().collect()
    }
    /// Whether the end of the process with this number on this host was heard.
    pub fn has_heard_end(&self, pid: u32, host: &str) -> bool {
        let is_it =
            |&process: &usize| self.all[process].pid == pid && self.all[process].host == host;
        let over = lock(&self.desk.over);
        let mut heard = over.iter().filter(|(_, is_heard)| **is_heard);
        heard.any(|(process, _)| is_it(process))
    }
    /// Whether any other process than the one with this number on this host was heard of late, and
    /// has not ended.
    pub fn hears_another(&self, pid: u32, host: &str) -> bool {
        let over = lock(&self.desk.over);
        let is_another = |&process: &usize| {
            let who = &self.all[process];
            !over.contains_key(&process) && (who.pid != pid || who.host != host)
        };
        let heard = lock(&self.desk.heard);
        let mut of_late = heard.iter().filter(|(_, at)| at.elapsed() < OF_LATE);
        of_late.any(|(process, _)| is_another(process))
    }
    /// Waits until the connection to a process has ended, but no longer than this.
    pub fn await_end(&self, process: usize, longest: Duration) {
        let until = Instant::now() + longest;
        while !lock(&self.desk.over).contains_key(&process) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    /// The way to ask for the end of the run, which may outlive these.
    pub fn ending(&self) -> Ending {
        Ending {
            lines: Arc::clone(&self.lines),
            desk: Arc::clone(&self.desk),
        }
    }
    /// Which ranks of a plan each process has: consecutive ones, as evenly as can be.
    pub(crate) fn share(&self, ranks: &[Rank]) -> Vec<Vec<Rank>> {
        let (mut sorted, of) = (ranks.to_vec(), self.place.of);
        sorted.sort_unstable();
        let bound = |process: usize| process * sorted.len() / of;
        (0..of)
            .map(|p| sorted[bound(p)..bound(p + 1)].to_vec())
            .collect()
    }
    /// How many ranks the processes before this one on its host have, given those of each process.
    /// The launcher's number says that where all have as many. Else they are those with a smaller
    /// number of which the host has the same name, wherever the launcher has placed them.
    pub(crate) fn ranks_before(&self, shares: &[Vec<Rank>]) -> usize {
        let me = self.place.index;
        let own = shares.get(me).map_or(0, Vec::len);
        match self.local {
            Some(local) if shares.iter().all(|s| s.len() == own) => local.saturating_mul(own),
            _ => {
                let before = self.all.iter().zip(shares).take(me);
                let here = before.filter(|(who, _)| who.host == self.all[me].host);
                here.map(|(_, share)| share.len()).sum()
            }
        }
    }
    /// Closes all connections at once, as the death of a process does.
    #[cfg(test)]
    pub(crate) fn break_off(&self) {
        self.connections.iter().for_each(|c| c.close());
    }
    pub(crate) fn carrier(&self) -> Arc<Lines> {
        Arc::clone(&self.lines)
    }
    /// From now on what comes is given to these ranks.
    pub(crate) fn attach(&self, world: &Arc<World>, ranks: Vec<Vec<Rank>>, inbox: Inbox) {
        let attached = Attached {
            world: Arc::clone(world),
            ranks,
            inbox: Mutex::new(Some(inbox)),
        };
        *lock(&self.desk.attached) = Some(Arc::new(attached));
        self.desk.changed.notify_all();
    }
    /// The error of one who waits for a rank of a process that is gone. Waits a moment, to learn how
    /// that one ended, and in process 0 who else has ended with it.
    pub(crate) fn gone(&self, process: usize, rank: Rank) -> RuntimeError {
        // Whoever started it learns how it ended a little later than its connection does.
        let is_watched = *lock(&self.desk.is_watched);
        let until = Instant::now() + if is_watched { OBITUARY } else { Duration::ZERO };
        while !lock(&self.desk.fates).contains_key(&process) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
        self.miss();
        self.lost((process, rank), self.fate(process), false)
    }
    /// Notes who is lost, the first time that somebody is missed: those whose ends are heard then and
    /// who did not say that they end by themselves, as those do that miss others.
    pub(crate) fn miss(&self) {
        // Process 0 hears the ends of all ranks that it asked one after the other.
        if lock(&self.desk.missed).is_none() {
            self.await_ends();
            let mut over = self.over();
            let farewells = lock(&self.desk.farewells);
            over.retain(|process| !farewells.contains(process));
            lock(&self.desk.missed).get_or_insert(over);
        }
    }
    /// Tells the others that this process ends by itself, as it has lost process 0, and nothing more
    /// after that.
    pub(crate) fn take_leave(&self) {
        self.bid_farewell();
        self.write_out(TO_LEAVE);
    }
    fn bid_farewell(&self) {
        for to in (0..self.place.of).filter(|p| *p != self.place.index) {
            let (head, body) = (Head::Farewell, None);
            self.lines.send(to, Letter { head, body });
        }
    }
    /// Writes what is still to be sent, and nothing after it. One who does not listen any more holds
    /// nobody up for longer than this. Says whether all was written.
    fn write_out(&self, longest: Duration) -> bool {
        self.lines.close();
        let until = Instant::now() + longest;
        let mut writers = lock(&self.writers);
        wait_for(&writers, until);
        writers.retain(|w| !w.is_finished());
        writers.is_empty()
    }
    /// Waits until the ends of processes that ended together are heard.
    fn await_ends(&self) {
        let until = Instant::now() + NEWS;
        let (mut heard, mut since) = (self.over().len(), Instant::now());
        while since.elapsed() < QUIET && Instant::now() < until {
            std::thread::sleep(QUIET / 15);
            let now = self.over().len();
            if now > heard {
                (heard, since) = (now, Instant::now());
            }
        }
    }
    /// How a process ended that is gone, as far as is known.
    fn fate(&self, process: usize) -> String {
        let told = lock(&self.desk.fates).get(&process).cloned();
        let how = told.or_else(|| lock(&self.desk.breaks).get(&process).cloned());
        how.unwrap_or_else(|| "its connection ended".into())
    }
    /// The processes that were lost when the first one was missed, and how they ended.
    pub fn missed(&self) -> BTreeMap<usize, String> {
        let missed = lock(&self.desk.missed).clone().unwrap_or_default();
        missed.into_iter().map(|p| (p, self.fate(p))).collect()
    }
    /// The ranks of a process, once there are any.
    pub fn ranks_of(&self, process: usize) -> Vec<Rank> {
        let attached = lock(&self.desk.attached).clone();
        let ranks = attached.and_then(|a| a.ranks.get(process).cloned());
        ranks.unwrap_or_default()
    }
    /// The error of a rank of a process that is there and does not answer.
    pub(crate) fn silent(&self, process: usize, rank: Rank) -> RuntimeError {
        self.lost((process, rank), crate::record::SILENT.into(), true)
    }
    fn lost(&self, (process, rank): (usize, Rank), how: String, is_silent: bool) -> RuntimeError {
        let who = self.all.get(process).cloned();
        RuntimeError::Gone {
            rank,
            process,
            pid: who.as_ref().map_or(0, |w| w.pid),
            host: who.map_or_else(String::new, |w| w.host),
            how,
            is_silent,
        }
    }
}

/// The way on which the processes of a run ask process 0 to end it.
pub struct Ending {
    lines: Arc<Lines>,
    desk: Arc<Desk>,
}

impl Ending {
    /// Asks process 0 to end the run in order.
    pub fn ask(&self, reason: Reason) {
        let (head, body) = (Head::ToEnd(reason), None);
        self.lines.send(0, Letter { head, body });
    }
    /// The first process that asked, and why.
    pub fn asked(&self) -> Option<(usize, Reason)> {
        *lock(&self.desk.to_end)
    }
}

impl Drop for Processes {
    /// Closes the desk; what was sent before is still written.
    fn drop(&mut self) {
        *lock(&self.desk.closed) = true;
        self.desk.changed.notify_all();
        self.bid_farewell();
        let until = Instant::now() + FAREWELL;
        let are_written = self.write_out(FAREWELL);
        self.connections.iter().for_each(|c| c.close());
        let behind = lock(&self.behind);
        wait_for(&behind, until);
        let has_left = are_written && behind.iter().all(JoinHandle::is_finished);
        self.has_left.store(has_left, Ordering::Relaxed);
    }
}

/// Waits until threads have ended, but no longer than this.
fn wait_for(threads: &[JoinHandle<()>], until: Instant) {
    while threads.iter().any(|t| !t.is_finished()) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Writes what is to be sent until there is no more.
fn write(to: &dyn Connection, mut writer: Box<dyn Write + Send>, letters: &Receiver<Letter>) {
    for letter in letters {
        if frame::write(&mut writer, &letter).is_err() {
            // The reader finds the same, and says so.
            to.close();
            return;
        }
    }
    to.finish();
}

/// Takes in what comes from a process until it is gone.
fn read(desk: &Desk, process: usize, stream: Box<dyn Read + Send>) {
    let Some(attached) = desk.attached() else {
        return;
    };
    let mut from = BufReader::with_capacity(READ_AHEAD, stream);
    let (how, is_heard) = loop {
        let letter = frame::read(&mut from);
        if let Ok(Some(_)) = &letter {
            lock(&desk.heard).insert(process, Instant::now());
        }
        match letter {
            Ok(Some((Head::ToEnd(reason), _))) => {
                lock(&desk.to_end).get_or_insert((process, reason));
            }
            Ok(Some((Head::Farewell, _))) => {
                lock(&desk.farewells).insert(process);
            }
            Ok(Some((head, block))) => take(&attached, head, block),
            Ok(None) => break (None, true),
            Err(e) => {
                let is_heard = !UNHEARD.contains(&e.kind());
                break (Some(format!("its connection broke: {e}")), is_heard);
            }
        }
    };
    lock(&desk.over).insert(process, is_heard);
    if let Some(how) = how {
        lock(&desk.breaks).entry(process).or_insert(how);
    }
    let ranks = attached.ranks.get(process).map_or(&[][..], |r| r);
    attached.world.gone(ranks);
    let mut inbox = lock(&attached.inbox);
    match &mut *inbox {
        Some(Inbox::Answers(answers)) => ranks.iter().for_each(|r| drop(answers.remove(r))),
        Some(Inbox::Requests(_)) if process == 0 => *inbox = None,
        _ => {}
    }
}

fn take(attached: &Attached, head: Head, block: crate::arena::Bytes) {
    let inbox = lock(&attached.inbox);
    // One who hears no more has gone on without the answer.
    match (head, &*inbox) {
        (Head::Request { rank, request, .. }, Some(Inbox::Requests(asked))) => {
            let _ = asked.send(Asked::Rank(rank, Box::new(request)));
        }
        (
            Head::Over {
                failed,
                is_interrupted,
            },
            Some(Inbox::Requests(asked)),
        ) => {
            let _ = asked.send(Asked::Over(failed, is_interrupted));
        }
        (Head::Alive, Some(Inbox::Requests(asked))) => {
            let _ = asked.send(Asked::Nothing);
        }
        (Head::Answer { rank, answer, .. }, Some(Inbox::Answers(answers))) => {
            if let Some(to) = answers.get(&rank) {
                let _ = to.send(answer);
            }
        }
        (head, _) => {
            drop(inbox);
            attached.world.receive(head, block);
        }
    }
}
