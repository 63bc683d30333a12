//! NCCL's functions, as `libnccl.so` exports them: communicators that do not block, of ranks of one
//! process or of several of this machine, collectives, messages and groups of them.
//!
//! Communicators are an adversary too. One that is being formed or split, and a group of calls,
//! take some polls of `ncclCommGetAsyncError` until they are there: who puts work on a stream
//! before that has it in the wrong order. Sums begin with another member in every call and
//! communicator and round after each. Members who come with another call, count or type are told,
//! all of them, who did; so are those who wait for a member that has left or whose process is gone.
//! Several ranks of a communicator may use one GPU if `NCCL_MULTI_RANK_GPU_ENABLE` is 1.

#![allow(unsafe_code)] // pointers of the caller's, who promises what the documentation asks for
#![allow(missing_docs, non_snake_case, clippy::missing_safety_doc)] // NCCL's own
#![allow(clippy::too_many_arguments)]

mod clique;
mod comm;
mod room;
mod shared;
mod task;
mod types;

pub use comm::Comm;

use crate::link::driver;
use clique::{Clique, lock, open_room};
use comm::{Forming, LAST, drawn, said, wrong};
use room::{Call, Gpu, Kind};
use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::UNIX_EPOCH;
use task::{Part, Task};
use types::{Reduction, Type};

/// How a call went, an `ncclResult_t`.
pub type Status = c_int;

const SUCCESS: Status = 0;
const UNHANDLED_CUDA_ERROR: Status = 1;
const INVALID_ARGUMENT: Status = 4;
const INVALID_USAGE: Status = 5;
const REMOTE_ERROR: Status = 6;
const IN_PROGRESS: Status = 7;

/// The version that the emulator is like: the first one that lets ranks share a GPU.
const VERSION: c_int = 23000;
/// The first fields of a configuration.
const MAGIC: c_uint = 0xcafe_beef;
/// The color of a member that is in no part of a split.
const NO_COLOR: c_int = -1;
/// A value of a configuration that nobody gave.
const UNDEFINED: c_int = c_int::MIN;
/// The first bytes of a communicator's identifier.
const PREFIX: &str = "emulated ";

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Id {
    bytes: [u8; 128],
}

/// The beginning of `ncclConfig_t` in all versions.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
}

/// The memory of communicators that this process made identifiers for, which not all members have
/// joined.
static GATHERING: Mutex<Vec<([u8; 128], File)>> = Mutex::new(Vec::new());

/// A part of a group: which communicator's, on which stream.
type Grouped = (*mut Comm, usize, Part);

thread_local! {
    /// Groups that this thread has begun and not ended, and their calls.
    static GROUP: RefCell<(usize, Vec<Grouped>)> = const { RefCell::new((0, Vec::new())) };
}

/// # Safety
/// `to` is null or can be written.
unsafe fn give<T>(to: *mut T, value: T) -> Status {
    if to.is_null() {
        return wrong("a null pointer for a result");
    }
    // SAFETY: the caller's promise.
    unsafe { to.write(value) };
    SUCCESS
}

/// # Safety
/// `config` is null or a configuration.
unsafe fn check(config: *const Config) -> Result<(), Status> {
    // SAFETY: the caller's promise; every version begins so.
    let Some(config) = (unsafe { config.as_ref() }) else {
        return Err(wrong("a communicator without a configuration"));
    };
    if config.magic != MAGIC || config.size < size_of::<Config>() || config.version < 21400 {
        return Err(wrong("a configuration that was not initialised"));
    }
    match config.blocking {
        0 => Ok(()),
        UNDEFINED | 1 => Err(wrong("the emulator has no communicators that block")),
        other => Err(wrong(&format!("a configuration with blocking {other}"))),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> Status {
    // SAFETY: the caller's pointer.
    unsafe { give(version, VERSION) }
}

/// Where members find a communicator's memory: a process, its descriptor, and the memory's name.
type Found = (u32, i32, u64);

impl Id {
    fn new((process, descriptor, name): Found) -> Self {
        let text = format!("{PREFIX}{process} {descriptor} {name}");
        let mut bytes = [0; 128];
        bytes[..text.len()].copy_from_slice(text.as_bytes());
        Id { bytes }
    }
    fn found(&self) -> Option<Found> {
        let text = std::str::from_utf8(&self.bytes).ok()?;
        let text = text.trim_end_matches('\0').strip_prefix(PREFIX)?;
        let mut words = text.split(' ');
        let mut next = || words.next();
        Some((
            next()?.parse().ok()?,
            next()?.parse().ok()?,
            next()?.parse().ok()?,
        ))
    }
}

/// All members have joined: nobody looks for the memory any more.
fn close(id: &Id) {
    lock(&GATHERING).retain(|made| made.0 != id.bytes);
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut Id) -> Status {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    // Processes' numbers come again, their names do not.
    let now = UNIX_EPOCH.elapsed().map_or(0, |now| now.as_nanos() as u64);
    let name = now.wrapping_add(NEXT.fetch_add(1, Ordering::SeqCst));
    let file = match open_room(name) {
        Ok(file) => file,
        Err(what) => return wrong(&what),
    };
    let made = Id::new((std::process::id(), file.as_raw_fd(), name));
    lock(&GATHERING).push((made.bytes, file));
    // SAFETY: the caller's pointer.
    unsafe { give(id, made) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    to: *mut *mut Comm,
    n: c_int,
    id: Id,
    rank: c_int,
    config: *const Config,
) -> Status {
    // SAFETY: the caller's configuration.
    if let Err(status) = unsafe { check(config) } {
        return status;
    }
    let (Ok(n), Ok(rank)) = (usize::try_from(n), usize::try_from(rank)) else {
        return wrong("a negative rank or number of ranks");
    };
    if rank >= n {
        return wrong(&format!("rank {rank} of {n}"));
    }
    let Some(found) = id.found() else {
        return wrong("an identifier that no emulated NCCL has made");
    };
    let Some(driver) = driver() else {
        return said(UNHANDLED_CUDA_ERROR, "there is no emulated driver");
    };
    let device = Gpu::new((driver.device)() as usize);
    let clique = match Clique::join(found, (rank, n), device) {
        Ok(clique) => clique,
        Err(what) => return wrong(&what),
    };
    let comm = Comm {
        id: Some(id),
        clique: Some(clique),
        ..Comm::new(Forming::Joined, rank, device)
    };
    // SAFETY: the caller's pointer.
    match unsafe { give(to, Box::into_raw(Box::new(comm))) } {
        SUCCESS => IN_PROGRESS,
        status => status,
    }
}

/// # Safety
/// `comm` is null or a communicator that this thread alone uses now.
unsafe fn of<'a>(comm: *mut Comm) -> Result<&'a mut Comm, Status> {
    // SAFETY: the caller's promise.
    unsafe { comm.as_mut() }.ok_or_else(|| wrong("a communicator that is null"))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommSplit(
    parent: *mut Comm,
    color: c_int,
    key: c_int,
    to: *mut *mut Comm,
    config: *const Config,
) -> Status {
    let split = || {
        // SAFETY: the caller's configuration and communicator.
        let parent = unsafe {
            check(config)?;
            of(parent)?
        };
        let clique = parent.ready()?;
        if to.is_null() {
            return Err(wrong("a null pointer for a result"));
        }
        let asked = (color, key, parent.device);
        let at = (parent.rank, parent.n_splits);
        clique.split(at, asked).map_err(|what| wrong(&what))?;
        parent.n_splits += 1;
        parent.polls = drawn(3);
        let forming = Forming::Split(clique, at.1, parent.rank);
        let comm = Comm::new(forming, parent.rank, parent.device);
        let made = match color {
            NO_COLOR => std::ptr::null_mut(),
            _ => Box::into_raw(Box::new(comm)),
        };
        // As NCCL does it, the part is written when it has been made.
        parent.splitting = Some((at.1, to, made));
        Ok(IN_PROGRESS)
    };
    split().unwrap_or_else(|status| status)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(comm: *mut Comm, error: *mut Status) -> Status {
    // SAFETY: the caller's communicator and pointer.
    match unsafe { of(comm) } {
        Ok(comm) => unsafe { give(error, comm.poll()) },
        Err(status) => status,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(comm: *mut Comm) -> Status {
    // SAFETY: the caller's communicator, which is not used again.
    unsafe { end(comm, "was aborted", true) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommFinalize(comm: *mut Comm) -> Status {
    // SAFETY: the caller's communicator.
    match unsafe { of(comm) } {
        // What is open goes on; polls say when it is over.
        Ok(comm) => {
            comm.is_ending = true;
            comm.poll()
        }
        Err(status) => status,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDestroy(comm: *mut Comm) -> Status {
    // SAFETY: the caller's communicator, which is not used again.
    unsafe { end(comm, "has left", false) }
}

/// # Safety
/// As [`of`], and nobody uses the communicator any more.
unsafe fn end(comm: *mut Comm, how: &'static str, aborts: bool) -> Status {
    if comm.is_null() {
        return wrong("a communicator that is null");
    }
    // SAFETY: made by this library, and the caller gives it back.
    let comm = unsafe { Box::from_raw(comm) };
    if aborts {
        comm.is_aborted.store(true, Ordering::SeqCst);
    }
    if let Some(clique) = &comm.clique {
        clique.leave(comm.rank, how);
    }
    if let Some(driver) = driver() {
        (driver.wake)();
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> Status {
    GROUP.with_borrow_mut(|group| group.0 += 1);
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> Status {
    let ended = GROUP.with_borrow_mut(|group| {
        group.0 = group.0.checked_sub(1)?;
        Some(match group.0 {
            0 => std::mem::take(&mut group.1),
            _ => Vec::new(),
        })
    });
    match ended {
        Some(parts) => launch(parts),
        None => wrong("a group ends that has not begun"),
    }
}

/// Puts the calls of a group on their streams, those of one communicator and stream together.
fn launch(parts: Vec<Grouped>) -> Status {
    let mut tasks: Vec<(*mut Comm, usize, Vec<Part>)> = Vec::new();
    for (comm, stream, part) in parts {
        match tasks.iter_mut().find(|t| t.0 == comm && t.1 == stream) {
            Some(task) => task.2.push(part),
            None => tasks.push((comm, stream, vec![part])),
        }
    }
    let mut comms: Vec<*mut Comm> = Vec::new();
    for (at, stream, parts) in tasks {
        // SAFETY: a communicator of this thread's, which has called with it.
        let Ok(comm) = (unsafe { of(at) }) else {
            return INVALID_ARGUMENT;
        };
        let Some(clique) = comm.clique.clone() else {
            return INVALID_USAGE;
        };
        let task = Task {
            parts,
            clique,
            rank: comm.rank,
            is_aborted: Arc::clone(&comm.is_aborted),
            is_over: AtomicBool::new(false),
            due: OnceLock::new(),
        };
        comm.pending.push((stream, Arc::new(task)));
        if !comms.contains(&at) {
            comm.polls = drawn(3);
            comms.push(at);
        }
    }
    let mut status = SUCCESS;
    for comm in comms {
        // SAFETY: as above.
        match unsafe { of(comm) }.map(Comm::poll) {
            Ok(SUCCESS) => {}
            Ok(other) | Err(other) => status = other,
        }
    }
    status
}

/// Adds a part to the group of this thread, which is one call's where none has begun.
fn call(
    comm: *mut Comm,
    stream: *mut c_void,
    part: impl FnOnce(&mut Comm) -> Result<Part, Status>,
) -> Status {
    // SAFETY: the caller's communicator.
    let part = match unsafe { of(comm) }.and_then(part) {
        Ok(part) => part,
        Err(status) => return status,
    };
    let part = (comm, stream as usize, part);
    let alone = GROUP.with_borrow_mut(|group| match group.0 {
        0 => Some(part),
        _ => {
            group.1.push(part);
            None
        }
    });
    alone.map_or(SUCCESS, |part| launch(vec![part]))
}

fn collective(
    comm: *mut Comm,
    stream: *mut c_void,
    (kind, count, dtype): (Option<Kind>, usize, c_int),
    addresses: [u64; 2],
) -> Status {
    let (Some(kind), Some(of)) = (kind, Type::of(dtype)) else {
        return wrong("a type, reduction or root that is not known to the emulator");
    };
    call(comm, stream, |comm| {
        let clique = comm.ready()?;
        if matches!(kind, Kind::Broadcast(root) if root >= clique.n) {
            return Err(wrong("a broadcast from a rank that there is not"));
        }
        let at = (comm.rank, comm.n_calls);
        comm.n_calls += 1;
        let call = Call { kind, count, of };
        let part = clique.come(at, call, addresses);
        part.map_err(|what| comm.fail(INVALID_USAGE, what))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclAllReduce(
    from: u64,
    to: u64,
    count: usize,
    dtype: c_int,
    by: c_int,
    comm: *mut Comm,
    stream: *mut c_void,
) -> Status {
    let kind = Reduction::of(by).map(Kind::AllReduce);
    collective(comm, stream, (kind, count, dtype), [from, to])
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclReduceScatter(
    from: u64,
    to: u64,
    count: usize,
    dtype: c_int,
    by: c_int,
    comm: *mut Comm,
    stream: *mut c_void,
) -> Status {
    let kind = Reduction::of(by).map(Kind::ReduceScatter);
    collective(comm, stream, (kind, count, dtype), [from, to])
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclAllGather(
    from: u64,
    to: u64,
    count: usize,
    dtype: c_int,
    comm: *mut Comm,
    stream: *mut c_void,
) -> Status {
    let kind = Some(Kind::AllGather);
    collective(comm, stream, (kind, count, dtype), [from, to])
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclBroadcast(
    from: u64,
    to: u64,
    count: usize,
    dtype: c_int,
    root: c_int,
    comm: *mut Comm,
    stream: *mut c_void,
) -> Status {
    let kind = usize::try_from(root).ok().map(Kind::Broadcast);
    collective(comm, stream, (kind, count, dtype), [from, to])
}

fn message(
    comm: *mut Comm,
    stream: *mut c_void,
    (at, count, dtype): (u64, usize, c_int),
    peer: c_int,
    receives: bool,
) -> Status {
    let (Some(of), Ok(peer)) = (Type::of(dtype), usize::try_from(peer)) else {
        return wrong("a type or peer that is not known to the emulator");
    };
    call(comm, stream, |comm| {
        let clique = comm.ready()?;
        if peer >= clique.n {
            return Err(wrong(&format!("peer {peer} of {} ranks", clique.n)));
        }
        let numbers = comm.n_messages.entry(peer).or_default();
        let number = numbers[usize::from(receives)];
        numbers[usize::from(receives)] += 1;
        let (from, to) = match receives {
            true => (peer, comm.rank),
            false => (comm.rank, peer),
        };
        let part = clique.post((from, to, number), receives, (at, count, of));
        part.map_err(|what| comm.fail(INVALID_USAGE, what))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclSend(
    from: u64,
    count: usize,
    dtype: c_int,
    peer: c_int,
    comm: *mut Comm,
    stream: *mut c_void,
) -> Status {
    message(comm, stream, (from, count, dtype), peer, false)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclRecv(
    to: u64,
    count: usize,
    dtype: c_int,
    peer: c_int,
    comm: *mut Comm,
    stream: *mut c_void,
) -> Status {
    message(comm, stream, (to, count, dtype), peer, true)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(status: Status) -> *const c_char {
    let words: &CStr = match status {
        SUCCESS => c"no error",
        UNHANDLED_CUDA_ERROR => c"unhandled cuda error",
        INVALID_ARGUMENT => c"invalid argument",
        INVALID_USAGE => c"invalid usage",
        REMOTE_ERROR => c"remote process exited or there was a network error",
        IN_PROGRESS => c"NCCL operation in progress",
        _ => c"unknown result code",
    };
    words.as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_: *mut Comm) -> *const c_char {
    LAST.with_borrow(|last| last.as_ptr())
}
