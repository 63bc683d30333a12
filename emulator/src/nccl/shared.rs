//! Memory that the members of a communicator share, whether they are in one process or in several:
//! a file without a name, which the system takes back when nobody has it open any more, however
//! they ended.
//!
//! ```text
//!   0          version of the state
//!   4096       the state, when the version is even    ┐ whoever changes it writes the other one and
//!   + 1 MiB    the state, when the version is odd     ┘ then the version: a killed member tears none
//!   + 2 MiB    operands, at places that the state has
//! ```
//!
//! A member opens the file by the number that it has in the process that made it. Only one changes
//! the state at a time, by a lock of the file. Another lock, of a byte of its own, lasts as long as
//! the member: so the others see when its process is gone.

#![allow(unsafe_code)] // calls of the system that the library of Rust has not

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The place of the first state.
const STATES: u64 = 4096;
/// Room for a state: thousands of calls that not all members have come to.
const ROOM: u64 = 1 << 20;
/// The place of the first operand.
pub const OPERANDS: u64 = STATES + 2 * ROOM;
/// The place of the members' marks, behind all bytes.
const MARKS: i64 = 1 << 60;
/// How long somebody else may change the state: a stopped process must not hold others for ever.
const PATIENCE: Duration = Duration::from_secs(5);
/// Rest between two tries to change it.
const REST: Duration = Duration::from_micros(20);

/// The memory as one member has it, and the state in it.
#[derive(Debug)]
pub struct Shared<T> {
    file: File,
    /// The newest version that was read, and its state. Locks of the file are not between the
    /// threads of a member, this one is.
    known: Mutex<(u64, Arc<T>)>,
}

/// Makes the memory with its first state. Others can open it while the file is open.
pub fn make<T: Serialize>(state: &T) -> Result<File, String> {
    // SAFETY: a name that ends with a zero; the descriptor is new.
    let file = unsafe {
        let made = libc::memfd_create(c"emulated-nccl".as_ptr(), libc::MFD_CLOEXEC);
        match made {
            0.. => File::from_raw_fd(made),
            _ => return Err(failed("made")(io::Error::last_os_error())),
        }
    };
    write(&file, 0, state)?;
    Ok(file)
}

fn failed(what: &'static str) -> impl Fn(io::Error) -> String {
    move |e| format!("the memory of a communicator cannot be {what}: {e}")
}

fn write<T: Serialize>(file: &File, version: u64, state: &T) -> Result<(), String> {
    let state = rmp_serde::to_vec(state).map_err(|e| format!("a communicator's state: {e}"))?;
    let length = state.len() as u64;
    if length + 8 > ROOM {
        return Err("a communicator has more calls open than the emulator can keep".into());
    }
    let bytes = [&length.to_le_bytes()[..], &state].concat();
    file.write_all_at(&bytes, STATES + version % 2 * ROOM)
        .and_then(|()| file.write_all_at(&version.to_le_bytes(), 0))
        .map_err(failed("written"))
}

fn number(file: &File, at: u64) -> Result<u64, String> {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, at).map_err(failed("read"))?;
    Ok(u64::from_le_bytes(bytes))
}

fn read<T: DeserializeOwned>(file: &File, version: u64) -> Result<T, String> {
    let at = STATES + version % 2 * ROOM;
    let length = number(file, at)?.min(ROOM) as usize;
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, at + 8)
        .map_err(failed("read"))?;
    rmp_serde::from_slice(&bytes).map_err(|e| format!("a communicator's state: {e}"))
}

/// A lock of the file, as long as it lasts.
struct Held<'a>(&'a File);

impl<'a> Held<'a> {
    fn of(file: &'a File) -> Result<Self, String> {
        let began = Instant::now();
        // SAFETY: a descriptor that is open.
        while unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
            if began.elapsed() > PATIENCE {
                return Err("a member of a communicator holds up all others".into());
            }
            std::thread::sleep(REST);
        }
        Ok(Held(file))
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { libc::flock(self.0.as_raw_fd(), libc::LOCK_UN) };
    }
}

impl<T: Clone + Serialize + DeserializeOwned> Shared<T> {
    /// Opens the memory that a process has under this number.
    pub fn open(process: u32, descriptor: i32) -> Result<Self, String> {
        let path = format!("/proc/{process}/fd/{descriptor}");
        let open = File::options().read(true).write(true).open(path);
        let file = open.map_err(failed("opened"))?;
        let held = Held::of(&file)?;
        let version = number(&file, 0)?;
        let state = read(&file, version)?;
        drop(held);
        let known = Mutex::new((version, Arc::new(state)));
        Ok(Shared { file, known })
    }

    /// The newest state.
    pub fn look(&self) -> Result<Arc<T>, String> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if number(&self.file, 0)? != known.0 {
            let _held = Held::of(&self.file)?;
            let version = number(&self.file, 0)?;
            *known = (version, Arc::new(read(&self.file, version)?));
        }
        Ok(Arc::clone(&known.1))
    }

    /// Changes the state.
    pub fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> Result<R, String> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let _held = Held::of(&self.file)?;
        let version = number(&self.file, 0)?;
        let mut state: T = match version == known.0 {
            true => T::clone(&known.1),
            false => read(&self.file, version)?,
        };
        let done = change(&mut state);
        write(&self.file, version + 1, &state)?;
        *known = (version + 1, Arc::new(state));
        Ok(done)
    }

    /// Shows that this is member `rank`, as long as it has the memory open.
    pub fn mark(&self, rank: usize) -> Result<(), String> {
        match self.locked(libc::F_OFD_SETLK, rank) {
            Ok(_) => Ok(()),
            Err(_) => Err(format!("rank {rank} has joined twice")),
        }
    }

    /// Whether another member shows that it is `rank`.
    pub fn is_marked(&self, rank: usize) -> bool {
        self.locked(libc::F_OFD_GETLK, rank)
            .is_ok_and(|found| found != libc::F_UNLCK as libc::c_short)
    }

    fn locked(&self, what: libc::c_int, rank: usize) -> io::Result<libc::c_short> {
        // SAFETY: numbers, for which zeros are valid.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        lock.l_type = libc::F_WRLCK as libc::c_short;
        lock.l_whence = libc::SEEK_SET as libc::c_short;
        (lock.l_start, lock.l_len) = (MARKS + rank as i64, 1);
        // SAFETY: a descriptor that is open, and a lock that is described whole.
        match unsafe { libc::fcntl(self.file.as_raw_fd(), what, &mut lock) } {
            0 => Ok(lock.l_type),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Puts an operand at its place.
    pub fn put(&self, at: u64, bytes: &[u8]) -> Result<(), String> {
        self.file.write_all_at(bytes, at).map_err(failed("written"))
    }

    /// Bytes of an operand.
    pub fn get(&self, at: u64, bytes: usize) -> Result<Vec<u8>, String> {
        let mut all = vec![0; bytes];
        self.file
            .read_exact_at(&mut all, at)
            .map_err(failed("read"))?;
        Ok(all)
    }
}
