//! A communicator as one of its members has it, and what goes on when it is polled.

use super::clique::Clique;
use super::room::Gpu;
use super::task::Task;
use super::{
    IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, Id, REMOTE_ERROR, SUCCESS, Status,
    UNHANDLED_CUDA_ERROR, close,
};
use crate::link::{Driver, driver};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

thread_local! {
    /// The last error of this thread, for whoever asks.
    pub(super) static LAST: RefCell<CString> = RefCell::new(CString::default());
}

/// A communicator, as one of its members has it.
#[derive(Debug)]
pub struct Comm {
    pub(super) forming: Option<Forming>,
    /// The identifier by which others join, until all have.
    pub(super) id: Option<Id>,
    pub(super) clique: Option<Arc<Clique>>,
    pub(super) rank: usize,
    pub(super) device: Gpu,
    /// The split that others have to come to, and where the part is then written.
    pub(super) splitting: Option<(u64, *mut *mut Comm, *mut Comm)>,
    pub(super) n_calls: u64,
    pub(super) n_splits: u64,
    /// Messages so far, by peer: sent and received.
    pub(super) n_messages: BTreeMap<usize, [u64; 2]>,
    /// Polls until what was begun is there.
    pub(super) polls: u64,
    /// Work that is then put on streams.
    pub(super) pending: Vec<(usize, Arc<Task>)>,
    pub(super) open: Vec<Arc<Task>>,
    pub(super) is_aborted: Arc<AtomicBool>,
    /// Whether it ends when what is open is over.
    pub(super) is_ending: bool,
    pub(super) error: Option<(Status, String)>,
}

#[derive(Debug)]
pub(super) enum Forming {
    Joined,
    /// By this split of another one, whose member this is of that number.
    Split(Arc<Clique>, u64, usize),
}

/// A number below `n`, from the seed of the emulator.
pub(super) fn drawn(n: u64) -> u64 {
    static STATE: AtomicU64 = AtomicU64::new(0);
    let seed = || {
        let named = std::env::var("MESHWRIGHT_EMULATOR_SEED").ok();
        named.and_then(|s| s.parse::<u64>().ok()).unwrap_or(0)
    };
    let _ = STATE.compare_exchange(0, seed() | 1 << 63, Ordering::SeqCst, Ordering::SeqCst);
    let z = STATE.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::SeqCst);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    ((z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 33) % n
}

pub(super) fn said(status: Status, what: &str) -> Status {
    LAST.set(CString::new(what.replace('\0', " ")).unwrap_or_default());
    status
}

/// An error that a caller of this library has made, which is said aloud.
pub(super) fn wrong(what: &str) -> Status {
    eprintln!("emulated NCCL: {what}");
    said(INVALID_ARGUMENT, what)
}

impl Comm {
    pub(super) fn new(forming: Forming, rank: usize, device: Gpu) -> Self {
        Comm {
            forming: Some(forming),
            id: None,
            clique: None,
            rank,
            device,
            splitting: None,
            n_calls: 0,
            n_splits: 0,
            n_messages: BTreeMap::new(),
            polls: drawn(4),
            pending: Vec::new(),
            open: Vec::new(),
            is_aborted: Arc::default(),
            is_ending: false,
            error: None,
        }
    }

    pub(super) fn fail(&mut self, status: Status, what: String) -> Status {
        said(status, &what);
        self.error.get_or_insert((status, what));
        status
    }

    /// How the communicator is, and what was begun goes on.
    pub(super) fn poll(&mut self) -> Status {
        if let Some((status, what)) = &self.error {
            return said(*status, what);
        }
        match self.goes_on() {
            Ok(status) => status,
            Err((status, what)) => self.fail(status, what),
        }
    }

    fn goes_on(&mut self) -> Result<Status, (Status, String)> {
        let usage = |what: String| (INVALID_USAGE, what);
        let unseen = |what: String| (REMOTE_ERROR, what);
        if let Some(forming) = &self.forming {
            if let Forming::Split(of, number, rank) = forming {
                let Some((clique, place)) = of.part(*rank, *number).map_err(unseen)? else {
                    return Ok(IN_PROGRESS);
                };
                (self.clique, self.rank) = (Some(clique), place);
            }
            let clique = self.clique.as_ref().map(|c| c.is_complete());
            if !clique.transpose().map_err(unseen)?.unwrap_or(false) {
                return Ok(IN_PROGRESS);
            }
            self.forming = None;
            self.id.take().iter().for_each(close);
        }
        let clique = self.clique.clone();
        let clique = clique.ok_or_else(|| usage("a communicator without members".into()))?;
        if let Some(what) = clique.wrong().map_err(unseen)? {
            return Err(usage(what));
        }
        if let Some((number, ..)) = self.splitting
            && !clique.is_split(number).map_err(unseen)?
        {
            return Ok(IN_PROGRESS);
        }
        if self.polls > 0 {
            self.polls -= 1;
            return Ok(IN_PROGRESS);
        }
        if let Some((_, to, part)) = self.splitting.take() {
            // SAFETY: the caller's pointer, which must live until the communicator can be used.
            unsafe { to.write(part) };
        }
        let gone = || (UNHANDLED_CUDA_ERROR, "the driver is gone".to_string());
        let driver = driver().ok_or_else(gone)?;
        for (stream, task) in std::mem::take(&mut self.pending) {
            if put(driver, stream, &task) != 0 {
                let what = "a call on a stream that is none, or of a GPU that has failed";
                return Err((UNHANDLED_CUDA_ERROR, what.into()));
            }
            self.open.push(task);
        }
        self.open.retain(|t| !t.is_over.load(Ordering::SeqCst));
        for task in &self.open {
            if let Some((rank, how)) = clique.missing(task).map_err(unseen)? {
                let what = format!("rank {rank} {how}, and others wait for it");
                return Err((REMOTE_ERROR, what));
            }
        }
        match self.is_ending && !self.open.is_empty() {
            true => Ok(IN_PROGRESS),
            false => Ok(SUCCESS),
        }
    }

    /// The clique, if the communicator can be used.
    pub(super) fn ready(&mut self) -> Result<Arc<Clique>, Status> {
        let is_idle = self.forming.is_none() && self.pending.is_empty() && self.polls == 0;
        match (&self.error, &self.clique) {
            (Some((status, what)), _) => Err(said(*status, what)),
            (None, Some(clique)) if is_idle => Ok(Arc::clone(clique)),
            _ => Err(wrong(
                "a communicator is used before what was begun with it is over",
            )),
        }
    }
}

/// Puts a task on a stream: the bringing of its operands, and its end, which the stream waits for.
/// The first has a count of the task of its own, as the second has.
fn put(driver: Driver, stream: usize, task: &Arc<Task>) -> c_int {
    let given = || Arc::into_raw(Arc::clone(task)).cast_mut().cast();
    match (driver.put)(stream as *mut c_void, arrive, given()) {
        0 => (driver.meet)(stream as *mut c_void, is_ready, run, given()),
        failed => failed,
    }
}

extern "C" fn is_ready(given: *mut c_void) -> c_int {
    // SAFETY: a task that `put` gave; the stream keeps it until `run`.
    c_int::from(unsafe { &*given.cast::<Task>() }.is_ready())
}

extern "C" fn arrive(given: *mut c_void) -> *const c_char {
    does(given, Task::arrive)
}

extern "C" fn run(given: *mut c_void) -> *const c_char {
    does(given, Task::run)
}

fn does(given: *mut c_void, what: fn(&Task, Driver) -> Result<(), String>) -> *const c_char {
    // SAFETY: a task that `put` gave, and this is the end of that count.
    let task = unsafe { Arc::from_raw(given.cast::<Task>()) };
    let Some(driver) = driver() else {
        return c"the driver is gone".as_ptr();
    };
    let done = what(&task, driver);
    (driver.wake)();
    match done.map_err(CString::new) {
        Ok(()) => std::ptr::null(),
        // The device has ended, so there are few of them.
        Err(Ok(what)) => what.into_raw(),
        Err(Err(_)) => c"an emulated collective failed".as_ptr(),
    }
}
