//! Streams and events: queues whose heads go on in an order drawn from a seed.

#![allow(unsafe_code)] // copies between addresses that were checked

use crate::block::{self, Extent, Kernel};
use crate::memory::Memory;
use std::collections::{BTreeMap, VecDeque};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// An event: how often it was recorded, and how many of these records are over.
#[derive(Debug, Default)]
pub struct Event {
    recorded: AtomicU64,
    over: AtomicU64,
    /// Nanoseconds on the device's clock of the last one that is over.
    at_ns: AtomicU64,
}

impl Event {
    /// Whether all of its records are over.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst) >= self.recorded.load(Ordering::SeqCst)
    }
    /// Nanoseconds on the device's clock at which it was over.
    pub fn at_ns(&self) -> u64 {
        self.at_ns.load(Ordering::SeqCst)
    }
}

/// Memory of either side.
#[derive(Clone, Copy, Debug)]
pub enum Side {
    /// An address of the device.
    Device(u64),
    /// An address of the host.
    Host(usize),
}

/// Work of another library's.
pub type Run = extern "C" fn(*mut c_void) -> *const c_char;
/// Tells another library that its work is next on its stream, and asks whether it can be done.
pub type Ready = extern "C" fn(*mut c_void) -> c_int;

/// Longest wait for others who may put work on a stream, before another look: those of other
/// processes wake nobody.
const PATIENCE: Duration = Duration::from_millis(1);

/// Connections of the host to a GPU unless `CUDA_DEVICE_MAX_CONNECTIONS` says another number.
const CONNECTIONS: usize = 8;
/// The most that it can say.
const MOST_CONNECTIONS: usize = 32;

/// An item of a stream.
#[derive(Debug)]
pub enum Op {
    /// A launch.
    Launch(Kernel, Extent, Vec<u64>),
    /// A copy of so many bytes.
    Copy(Side, Side, usize),
    /// Work of another library's, which says null or what went wrong, and what it is given.
    Work(Run, usize),
    /// The same of several streams, which holds its stream up until it can be done.
    Meet(Ready, Run, usize),
    /// Bytes of one value.
    Fill(u64, u8, usize),
    /// An event's record of this number.
    Record(Arc<Event>, u64),
    /// Waits for an event's record of this number.
    Wait(Arc<Event>, u64),
}

#[derive(Debug, Default)]
struct Stream {
    /// The GPU that it is of.
    device: usize,
    /// Its connection there, which other streams may have too.
    connection: usize,
    /// The host thread that gave it something last.
    by: Option<ThreadId>,
    /// Work that it was given, numbered over all streams.
    ops: VecDeque<(u64, Op)>,
    /// Whether a host thread does its head's work.
    is_busy: bool,
}

impl Stream {
    fn is_done(&self) -> bool {
        self.ops.is_empty() && !self.is_busy
    }
}

#[derive(Debug, Default)]
struct State {
    memory: Memory,
    streams: BTreeMap<u64, Stream>,
    next_stream: u64,
    next_op: u64,
    random: u64,
    last: Option<u64>,
    /// The first error; it stays.
    error: Option<String>,
}

/// The device: memory and streams of all contexts.
#[derive(Debug)]
pub struct Gpu {
    state: Mutex<State>,
    went_on: Condvar,
    began: Instant,
    connections: usize,
}

impl Gpu {
    /// A device whose streams go on in an order drawn from this seed.
    pub fn new(seed: u64) -> Self {
        let state = State {
            random: seed.wrapping_mul(2).wrapping_add(1),
            streams: BTreeMap::from([(0, Stream::default())]),
            next_stream: 1,
            ..State::default()
        };
        Gpu {
            state: Mutex::new(state),
            went_on: Condvar::new(),
            began: Instant::now(),
            connections: CONNECTIONS,
        }
    }

    /// The same with so many connections for the streams of each GPU, as the variable says that the
    /// driver reads.
    pub fn with_connections(self, said: Option<&str>) -> Self {
        let n = said.and_then(|n| n.parse().ok());
        Gpu {
            connections: n.map_or(CONNECTIONS, |n: usize| n.clamp(1, MOST_CONNECTIONS)),
            ..self
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Works on the memory.
    pub fn memory<R>(&self, work: impl FnOnce(&mut Memory) -> R) -> R {
        work(&mut self.lock().memory)
    }

    /// Opens a stream of a GPU.
    pub fn open(&self, device: usize) -> u64 {
        let mut state = self.lock();
        let id = state.next_stream;
        state.next_stream += 1;
        let stream = Stream {
            device,
            connection: id as usize % self.connections,
            ..Stream::default()
        };
        state.streams.insert(id, stream);
        id
    }

    /// Closes a stream, after its work; false where there is none.
    pub fn close(&self, stream: u64) -> bool {
        let _ = self.finish(stream);
        self.lock().streams.remove(&stream).is_some()
    }

    /// Puts an op on a stream; false where there is none.
    pub fn put(&self, stream: u64, op: Op) -> bool {
        let mut state = self.lock();
        let number = state.next_op;
        state.next_op += 1;
        match state.streams.get_mut(&stream) {
            Some(stream) => {
                stream.by = Some(std::thread::current().id());
                stream.ops.push_back((number, op));
                // Somebody may wait for what it meets.
                self.went_on.notify_all();
                true
            }
            None => false,
        }
    }

    /// Records an event on a stream.
    pub fn record(&self, stream: u64, event: &Arc<Event>) -> bool {
        let number = event.recorded.fetch_add(1, Ordering::SeqCst) + 1;
        self.put(stream, Op::Record(Arc::clone(event), number))
    }

    /// Holds a stream back until the event's last record so far is over.
    pub fn wait(&self, stream: u64, event: &Arc<Event>) -> bool {
        let number = event.recorded.load(Ordering::SeqCst);
        self.put(stream, Op::Wait(Arc::clone(event), number))
    }

    /// Does work of all streams until one of them has none left.
    pub fn finish(&self, stream: u64) -> Result<(), String> {
        self.go_on(|state| state.streams.get(&stream).is_none_or(Stream::is_done))
    }

    /// Does work of all streams until those of a GPU have none left.
    pub fn finish_device(&self, device: usize) -> Result<(), String> {
        let of = |s: &&Stream| s.device == device;
        self.go_on(|state| state.streams.values().filter(of).all(Stream::is_done))
    }

    /// Somebody who looks whether work is over lets one piece of it be done.
    pub fn look(&self) -> Result<(), String> {
        let state = self.lock();
        match &state.error {
            Some(error) => Err(error.clone()),
            None => {
                drop(self.turn(state));
                Ok(())
            }
        }
    }

    /// Whether a GPU is busy with work of another host thread's that waits for others. This thread may
    /// be one of them, so it may not have the GPU load, allocate or free anything.
    pub fn is_held_up(&self, device: usize) -> bool {
        let state = self.lock();
        let waits = |s: &Stream| match s.ops.front() {
            Some((_, Op::Meet(ready, _, given))) => ready(*given as *mut c_void) == 0,
            _ => false,
        };
        let firsts = firsts(&state);
        let me = Some(std::thread::current().id());
        let theirs = |s: &&Stream| s.device == device && s.by != me;
        let mut of = state.streams.values().filter(theirs);
        state.error.is_none() && of.any(|s| !is_behind(s, &firsts) && waits(s))
    }

    /// Has those who wait for streams that meet look again.
    pub fn wake(&self) {
        self.went_on.notify_all();
    }

    /// Does work of all streams until the event is over.
    pub fn finish_event(&self, event: &Event) -> Result<(), String> {
        self.go_on(|_| event.is_over())
    }

    /// The error that ended the device.
    pub fn error(&self) -> Option<String> {
        self.lock().error.clone()
    }

    /// Ends the device with an error.
    pub fn fail(&self, what: String) {
        eprintln!("emulated GPU: {what}");
        self.lock().error.get_or_insert(what);
        self.went_on.notify_all();
    }

    fn go_on(&self, is_done: impl Fn(&State) -> bool) -> Result<(), String> {
        let mut state = self.lock();
        loop {
            if let Some(error) = &state.error {
                return Err(error.clone());
            }
            if is_done(&state) {
                return Ok(());
            }
            let (went_on, after) = self.turn(state);
            state = after;
            if went_on {
                continue;
            }
            let meets = |s: &Stream| matches!(s.ops.front(), Some((_, Op::Meet(..))));
            if state.streams.values().any(|s| s.is_busy || meets(s)) {
                let woken = self.went_on.wait_timeout(state, PATIENCE);
                state = woken.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            drop(state);
            let what = "every stream waits for an event that nothing will record";
            self.fail(what.into());
            return Err(what.into());
        }
    }

    /// Does the work at the head of a stream, if that of one can be done.
    fn turn<'a>(&'a self, mut state: MutexGuard<'a, State>) -> (bool, MutexGuard<'a, State>) {
        let Some(id) = pick(&mut state) else {
            return (false, state);
        };
        let Some((_, op)) = state.streams.get_mut(&id).and_then(|s| {
            s.is_busy = true;
            s.ops.pop_front()
        }) else {
            return (false, state);
        };
        drop(state);
        let done = self.execute(&op);
        state = self.lock();
        if let Some(stream) = state.streams.get_mut(&id) {
            stream.is_busy = false;
        }
        if let Err(what) = done {
            drop(state);
            self.fail(what);
            state = self.lock();
        }
        self.went_on.notify_all();
        (true, state)
    }

    fn execute(&self, op: &Op) -> Result<(), String> {
        match op {
            Op::Launch(kernel, extent, parameter) => {
                let is_memory = |at, bytes| self.lock().memory.resolve(at, bytes).is_some();
                block::launch(kernel, *extent, parameter, &is_memory)
            }
            Op::Copy(to, from, bytes) => {
                let (to, from) = (self.address(*to, *bytes)?, self.address(*from, *bytes)?);
                let apart = (to as usize).abs_diff(from as usize);
                if apart < *bytes {
                    return Err(format!(
                        "a copy of {bytes} bytes to {apart} bytes from them"
                    ));
                }
                // SAFETY: both sides have the bytes, and they do not overlap. That addresses of
                // the host live until the copy is done is the caller's promise, as with CUDA.
                unsafe { std::ptr::copy_nonoverlapping(from, to, *bytes) };
                Ok(())
            }
            Op::Work(run, given) | Op::Meet(_, run, given) => {
                let wrong = run(*given as *mut c_void);
                if wrong.is_null() {
                    return Ok(());
                }
                // SAFETY: a text that ends with a zero, which stays.
                let words = unsafe { CStr::from_ptr(wrong) };
                Err(words.to_string_lossy().into_owned())
            }
            Op::Fill(at, value, bytes) => {
                let to = self.address(Side::Device(*at), *bytes)?;
                // SAFETY: the block has the bytes.
                unsafe { std::ptr::write_bytes(to, *value, *bytes) };
                Ok(())
            }
            Op::Record(event, number) => {
                let now = self.began.elapsed().as_nanos() as u64;
                event.at_ns.store(now, Ordering::SeqCst);
                event.over.fetch_max(*number, Ordering::SeqCst);
                Ok(())
            }
            Op::Wait(..) => Ok(()),
        }
    }

    fn address(&self, side: Side, bytes: usize) -> Result<*mut u8, String> {
        match side {
            Side::Host(at) => Ok(at as *mut u8),
            Side::Device(at) => {
                let found = self.lock().memory.resolve(at, bytes as u64);
                found.ok_or_else(|| {
                    format!("a copy or fill of {bytes} bytes at {at:#x}, which are not allocated")
                })
            }
        }
    }
}

/// The first thing on each connection of each GPU that has not begun. The GPU takes what comes through
/// a connection in order, whichever stream it is of: what waits for an event holds up what follows,
/// also of other streams. Work that has begun, such as a collective that waits for others, does not.
fn firsts(state: &State) -> BTreeMap<(usize, usize), u64> {
    let mut firsts = BTreeMap::new();
    for stream in state.streams.values() {
        // A head that meets has begun, if nothing is before it; what follows it has not.
        let first = match stream.ops.front() {
            Some((_, Op::Meet(..))) => stream.ops.get(1),
            head => head,
        };
        if let Some((number, _)) = first {
            let known = firsts
                .entry((stream.device, stream.connection))
                .or_insert(*number);
            *known = (*known).min(*number);
        }
    }
    firsts
}

/// Whether something else is to begin before a stream's head.
fn is_behind(stream: &Stream, firsts: &BTreeMap<(usize, usize), u64>) -> bool {
    let first = firsts.get(&(stream.device, stream.connection));
    let head = stream.ops.front();
    head.zip(first)
        .is_some_and(|((number, _), first)| first < number)
}

/// A stream whose head can go on: as often as not the last one again, so that one may be far ahead
/// of the others, else any.
fn pick(state: &mut State) -> Option<u64> {
    let firsts = firsts(state);
    let can = |s: &Stream| {
        if s.is_busy || is_behind(s, &firsts) {
            return false;
        }
        let is_over = |op: &Op| match op {
            Op::Wait(event, number) => event.over.load(Ordering::SeqCst) >= *number,
            Op::Meet(ready, _, given) => ready(*given as *mut c_void) != 0,
            _ => true,
        };
        s.ops.front().is_some_and(|(_, op)| is_over(op))
    };
    let all = state.streams.iter().filter(|(_, s)| can(s));
    let all: Vec<u64> = all.map(|(id, _)| *id).collect();
    if all.is_empty() {
        return None;
    }
    // Marsaglia's xorshift.
    state.random ^= state.random << 13;
    state.random ^= state.random >> 7;
    state.random ^= state.random << 17;
    let drawn = state.random >> 33;
    let again = state
        .last
        .filter(|id| drawn.is_multiple_of(2) && all.contains(id));
    state.last = Some(again.unwrap_or(all[(drawn / 2) as usize % all.len()]));
    state.last
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fill of one stream and a copy of another one: without a wait some seed gives the copy
    /// what was there before; with one none does.
    #[test]
    fn a_missing_wait_is_a_wrong_result() {
        let copied = |seed, waits: bool| {
            let gpu = Gpu::new(seed);
            let (first, second) = (gpu.open(0), gpu.open(0));
            let at = gpu.memory(|m| m.allocate(8)).expect("there is memory");
            let mut host = [0u8; 8];
            let event = Arc::default();
            assert!(gpu.put(first, Op::Fill(at, 7, 8)) && gpu.record(first, &event));
            if waits {
                gpu.wait(second, &event);
            }
            let to = Side::Host(host.as_mut_ptr() as usize);
            assert!(gpu.put(second, Op::Copy(to, Side::Device(at), 8)));
            gpu.finish(second).expect("it is done");
            std::hint::black_box(&host);
            host[0]
        };
        assert!((0..20).all(|seed| copied(seed, true) == 7));
        assert!((0..20).any(|seed| copied(seed, false) == 0xff));
    }

    /// A stream that waits holds up what comes after it through the same connection, of any stream.
    #[test]
    fn streams_share_connections() {
        let is_done = |connections| {
            let gpu = Gpu::new(1).with_connections(Some(connections));
            let (first, second) = (gpu.open(0), gpu.open(0));
            let at = gpu.memory(|m| m.allocate(8)).expect("there is memory");
            let event = Arc::new(Event::default());
            event.recorded.store(1, Ordering::SeqCst);
            gpu.wait(first, &event);
            assert!(gpu.put(second, Op::Fill(at, 7, 8)));
            gpu.finish(second).is_ok()
        };
        assert!(is_done("2"));
        assert!(!is_done("1"));
    }

    /// Work that waits for others holds up whoever else asks the GPU for something, not the thread
    /// whose work it is.
    #[test]
    fn others_are_held_up_by_what_waits() {
        extern "C" fn never(_: *mut c_void) -> c_int {
            0
        }
        extern "C" fn nothing(_: *mut c_void) -> *const c_char {
            std::ptr::null()
        }
        let gpu = Gpu::new(1);
        let stream = gpu.open(0);
        let asked = |device| {
            let is_held_up = || gpu.is_held_up(device);
            std::thread::scope(|s| s.spawn(is_held_up).join().expect("it says"))
        };
        assert!(!asked(0));
        assert!(gpu.put(stream, Op::Meet(never, nothing, 0)));
        assert!(asked(0) && !asked(1) && !gpu.is_held_up(0));
    }

    #[test]
    fn streams_that_wait_for_nothing_are_told() {
        let gpu = Gpu::new(1);
        let stream = gpu.open(0);
        let event = Arc::new(Event::default());
        event.recorded.store(1, Ordering::SeqCst);
        gpu.wait(stream, &event);
        assert!(
            gpu.finish(stream)
                .is_err_and(|e| e.contains("waits for an event"))
        );
        assert!(gpu.error().is_some());
    }
}
