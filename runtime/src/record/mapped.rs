//! Words of a file that are written by stores to memory.
//!
//! The system keeps what was stored when the process is killed, however that happens, and brings it
//! to the disk when it likes. Nobody waits for the disk, but where the system is writing this very
//! page back and the file system lets nobody change it meanwhile.
//!
//! A store to a mapped file can fail where a write would return an error: when somebody shortens
//! the file, when the disk of a file system that never writes in place is full, when a server has
//! forgotten the file. The system says so by SIGBUS, which ends the process. No run is to end by
//! its records, so that signal is taken here: the page is replaced by one of memory alone, and the
//! store is made again, to that. Signals of other places are whose they were before.
#![allow(unsafe_code)] // maps memory, and handles the signal of stores to it that fail

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::fs::File;
use std::io;
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, compiler_fence};

/// Files that a process can have mapped at once: many more than a host has ranks. The handler of a
/// signal may not allocate, so there is an end.
const MOST: usize = 4096;

/// The length of what is mapped of each file, in bytes: less than a page, of which there is one.
pub(super) const LEN: usize = 512;

/// Where the pages are; zero where there is none.
static PAGES: [AtomicUsize; MOST] = [const { AtomicUsize::new(0) }; MOST];

/// The system's action for SIGBUS from before.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// The first [`LEN`] bytes of a file.
#[derive(Debug)]
pub(super) struct Mapped {
    /// Its address, which is that of a page.
    at: usize,
    /// Which of [`PAGES`] is its own.
    slot: usize,
}

impl Mapped {
    /// Maps a file of at least [`LEN`] bytes that is open for reading and writing.
    pub fn of(file: &File) -> io::Result<Self> {
        take_signals()?;
        let (protection, shared) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: the system chooses the address, where nothing else is.
        let at = unsafe { mmap(null_mut(), LEN, protection, shared, file, 0) };
        let at = at.map_err(|e| {
            let what = format!("its file system cannot map it into memory: {e}");
            io::Error::other(what)
        })?;
        let at = at.expose_provenance();
        let is_taken = |slot: &AtomicUsize| {
            let taken = slot.compare_exchange(0, at, Ordering::SeqCst, Ordering::SeqCst);
            taken.is_ok()
        };
        match PAGES.iter().position(is_taken) {
            Some(slot) => Ok(Mapped { at, slot }),
            None => {
                unmap(at);
                Err(io::Error::other("this process has too many records"))
            }
        }
    }

    /// Stores words from this one on, in this order as far as a process that is killed goes.
    pub fn store(&self, first: usize, words: &[u64]) {
        assert!(
            (first + words.len()) * 8 <= LEN,
            "the words are in the file"
        );
        for (i, word) in words.iter().enumerate() {
            let to = with_exposed_provenance_mut(self.at + 8 * (first + i));
            // SAFETY: `at` is a page that stays mapped until this is dropped, and the word is in
            // its first bytes, by the assertion above, and aligned. Others of this process see it
            // through this value alone; other processes may change the file, which is why no
            // reference to plain memory is made of it.
            let to = unsafe { AtomicU64::from_ptr(to) };
            to.store(*word, Ordering::Relaxed);
            // The compiler neither moves it behind what follows, nor leaves it out.
            compiler_fence(Ordering::SeqCst);
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // In this order: another thread may map something else there as soon as it is free.
        PAGES[self.slot].store(0, Ordering::SeqCst);
        unmap(self.at);
    }
}

fn unmap(at: usize) {
    // SAFETY: the page is ours, and nobody stores to it any more.
    let _ = unsafe { munmap(with_exposed_provenance_mut(at), LEN) };
}

/// Has stores that fail be found, once in a process.
fn take_signals() -> io::Result<()> {
    static TAKEN: OnceLock<Result<(), i32>> = OnceLock::new();
    let taken = TAKEN.get_or_init(|| {
        // SAFETY: an action is plain data, for which zeros are a value. The handler below calls
        // nothing but the system, and this code's own statics, which are atomic. It runs on the
        // stack of signals that every thread of Rust has.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = on_failure;
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            let mut before: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(libc::SIGBUS, &action, &mut before) != 0 {
                return Err(io::Error::last_os_error()
                    .raw_os_error()
                    .unwrap_or_default());
            }
            let _ = BEFORE.set(before);
            Ok(())
        }
    });
    taken.map_err(io::Error::from_raw_os_error)
}

/// Replaces the page of a store that failed. Of any other one the action from before comes back,
/// and the store, which is made again when this returns, meets that.
extern "C" fn on_failure(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the system gives the handler a valid description of the signal.
    let (address, code) = unsafe { ((*info).si_addr() as usize, (*info).si_code) };
    // A code above zero is of the system itself, and has an address.
    let is_of = |page: usize| code > 0 && page != 0 && (page..page + LEN).contains(&address);
    let mut pages = PAGES.iter().map(|page| page.load(Ordering::SeqCst));
    if let Some(page) = pages.find(|page| is_of(*page)) {
        let at = with_exposed_provenance_mut(page);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED;
        // SAFETY: the page is one of ours, which only stores of words use.
        if unsafe { mmap_anonymous(at, LEN, protection, flags) }.is_ok() {
            return;
        }
    }
    // SAFETY: these calls may be made in a handler, and the action is one that the system gave, or
    // the one that there is without any, for which zeros stand.
    unsafe {
        let none: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGBUS, BEFORE.get().unwrap_or(&none), null_mut());
        // What another process has sent is sent again, as nothing is made again there.
        if code <= 0 {
            libc::raise(libc::SIGBUS);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    /// Maps a file of a page that is shorter than that by now.
    fn shortened() -> Mapped {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[0; LEN]).unwrap();
        let mapped = Mapped::of(&file).unwrap();
        file.set_len(0).unwrap();
        mapped
    }

    /// A store that fails on a page that is not of a record ends the process as it did before there
    /// were any.
    #[test]
    fn other_stores_that_fail_end_the_process() {
        const CHILD: &str = "MESHWRIGHT_TEST_STORE";
        if std::env::var(CHILD).is_ok() {
            shortened().store(0, &[1]);
            let stranger = shortened();
            PAGES[stranger.slot].store(0, Ordering::SeqCst);
            stranger.store(0, &[1]);
            std::process::exit(0);
        }
        let test = "record::mapped::tests::other_stores_that_fail_end_the_process";
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args([test, "--exact", "--nocapture"]).env(CHILD, "1");
        let ended = child.output().unwrap().status;
        assert_eq!(ended.signal(), Some(libc::SIGBUS), "{ended}");
    }

    #[test]
    fn places_of_pages_are_used_again() {
        let mapped = shortened();
        let slot = mapped.slot;
        drop(mapped);
        assert!((0..2 * MOST).all(|_| shortened().slot <= slot + 64));
    }
}
