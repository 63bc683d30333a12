//! NCCL, opened when it is first asked for: one binary runs everywhere, and says what is missing.
//!
//! The functions are looked up once, by name. Structures and numbers are those of the public
//! interface of NCCL 2.18, which later versions keep: they take a configuration by its size.

#![allow(unsafe_code)] // opens a library and calls what it finds there

use crate::device::cuda::places;
use crate::error::RuntimeError;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::PathBuf;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::AtomicPtr;

/// The first version that can split communicators.
const OLDEST: c_int = 21_800;
/// The first one that lets several ranks use one GPU.
const SHARES_GPUS: c_int = 23_000;

pub(super) const SUCCESS: c_int = 0;
pub(super) const IN_PROGRESS: c_int = 7;
/// The first fields of a configuration.
const MAGIC: c_uint = 0xcafe_beef;
/// A value that is left to the library.
const UNDEFINED: c_int = c_int::MIN;
/// The color of who is in no part of a split.
pub(super) const NO_COLOR: c_int = -1;

/// Bytes of an identifier.
pub(super) const ID: usize = 128;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Id(pub [u8; ID]);

/// `ncclConfig_t`, as of 2.18.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// Settings of communicators that do not block, and share what they can with those they are
    /// split from.
    fn usual() -> Self {
        Config {
            size: size_of::<Config>(),
            magic: MAGIC,
            version: OLDEST as c_uint,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: ptr::null(),
            split_share: 1,
        }
    }
}

/// A communicator's or a stream's pointer.
pub(super) type Pointer = *mut c_void;

macro_rules! functions {
    ($($field:ident: $name:literal, ($($t:ty),*) -> $r:ty;)*) => {
        struct Functions {
            $($field: unsafe extern "C" fn($($t),*) -> $r,)*
        }
        impl Functions {
            /// Fails with the name of a function that the library lacks.
            fn find(library: &libloading::Library) -> Result<Self, &'static str> {
                Ok(Functions {
                    // SAFETY: the types are those of NCCL's header.
                    $($field: *unsafe { library.get($name.as_bytes()) }.map_err(|_| $name)?,)*
                })
            }
        }
    };
}

functions! {
    get_unique_id: "ncclGetUniqueId", (*mut Id) -> c_int;
    init: "ncclCommInitRankConfig", (*mut Pointer, c_int, Id, c_int, *mut Config) -> c_int;
    split: "ncclCommSplit", (Pointer, c_int, c_int, *mut Pointer, *mut Config) -> c_int;
    async_error: "ncclCommGetAsyncError", (Pointer, *mut c_int) -> c_int;
    abort: "ncclCommAbort", (Pointer) -> c_int;
    finalize: "ncclCommFinalize", (Pointer) -> c_int;
    destroy: "ncclCommDestroy", (Pointer) -> c_int;
    all_reduce: "ncclAllReduce", (u64, u64, usize, c_int, c_int, Pointer, Pointer) -> c_int;
    reduce_scatter: "ncclReduceScatter", (u64, u64, usize, c_int, c_int, Pointer, Pointer) -> c_int;
    all_gather: "ncclAllGather", (u64, u64, usize, c_int, Pointer, Pointer) -> c_int;
    send: "ncclSend", (u64, usize, c_int, c_int, Pointer, Pointer) -> c_int;
    receive: "ncclRecv", (u64, usize, c_int, c_int, Pointer, Pointer) -> c_int;
    group_start: "ncclGroupStart", () -> c_int;
    group_end: "ncclGroupEnd", () -> c_int;
    error_string: "ncclGetErrorString", (c_int) -> *const c_char;
    last_error: "ncclGetLastError", (Pointer) -> *const c_char;
}

/// NCCL.
pub(super) struct Library {
    functions: Functions,
    version: c_int,
}

/// A call of a group: elements and their types are NCCL's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Entry {
    AllReduce {
        from: u64,
        to: u64,
        count: usize,
        dtype: c_int,
        by: c_int,
    },
    ReduceScatter {
        from: u64,
        to: u64,
        count: usize,
        dtype: c_int,
        by: c_int,
    },
    AllGather {
        from: u64,
        to: u64,
        count: usize,
        dtype: c_int,
    },
    Send {
        from: u64,
        count: usize,
        dtype: c_int,
        peer: usize,
    },
    Receive {
        to: u64,
        count: usize,
        dtype: c_int,
        peer: usize,
    },
}

fn absent(problem: String) -> RuntimeError {
    RuntimeError::NoDevice {
        problem,
        way_out: "install NCCL, from NVIDIA's packages (libnccl2) or as the Python package \
            nvidia-nccl-cu13; LD_LIBRARY_PATH can name its folder. With --fabric host ranks meet \
            through the host's memory instead"
            .into(),
    }
}

/// 21805 as `2.18.5`.
fn words(version: c_int) -> String {
    format!(
        "{}.{}.{}",
        version / 10_000,
        version / 100 % 100,
        version % 100
    )
}

/// The library, opened once. Fails where it is not found, is too old, or lacks a function.
pub(super) fn open() -> Result<&'static Library, RuntimeError> {
    static OPEN: OnceLock<Result<Library, String>> = OnceLock::new();
    match OPEN.get_or_init(|| find(&candidates())) {
        Ok(library) => Ok(library),
        Err(problem) => Err(absent(problem.clone())),
    }
}

/// Where it may be: in folders that somebody named, where else the system's loader looks, and where
/// CUDA and Python packages bring it. An emulated one has the name without a version.
fn candidates() -> Vec<PathBuf> {
    let mut all = places::named_files_of("nccl");
    all.extend(["libnccl.so", "libnccl.so.2"].map(PathBuf::from));
    all.extend(places::files_of("nccl"));
    all
}

/// The first of these files that is a library of the version that is needed, else what is wrong with
/// the first that there is.
fn find(files: &[PathBuf]) -> Result<Library, String> {
    let mut problem = None;
    for file in files {
        // SAFETY: opening a library of the system's runs no code but its own.
        let Ok(library) = (unsafe { libloading::Library::new(file) }) else {
            continue;
        };
        match examine(&library) {
            Ok(found) => {
                // It stays open as long as the process.
                std::mem::forget(library);
                return Ok(found);
            }
            Err(what) => {
                problem.get_or_insert(format!("{}: {what}", file.display()));
            }
        }
    }
    Err(problem.unwrap_or_else(|| {
        "NCCL is not found: there is no libnccl.so.2 where the system looks for libraries, beside \
         CUDA, or in Python's packages"
            .into()
    }))
}

fn examine(library: &libloading::Library) -> Result<Library, String> {
    let mut version = 0;
    // SAFETY: the type is that of NCCL's header.
    let get: Result<libloading::Symbol<'_, unsafe extern "C" fn(*mut c_int) -> c_int>, _> =
        unsafe { library.get(b"ncclGetVersion") };
    // SAFETY: the pointer is to a number.
    let known = get.is_ok_and(|get| unsafe { get(&mut version) } == SUCCESS);
    match known {
        false => Err("it is no NCCL, or one that does not tell its version".into()),
        true if version < OLDEST => Err(format!(
            "NCCL {} is too old: {} or later is needed",
            words(version),
            words(OLDEST)
        )),
        true => match Functions::find(library) {
            Ok(functions) => Ok(Library { functions, version }),
            Err(lacks) => Err(format!("NCCL {} lacks {lacks}", words(version))),
        },
    }
}

impl Library {
    /// Its version, as `2.30.0`.
    pub fn version(&self) -> String {
        words(self.version)
    }
    /// Whether it can have several ranks on one GPU.
    pub fn can_share_gpus(&self) -> bool {
        self.version >= SHARES_GPUS
    }

    /// Puts a status into words, with the library's last words.
    pub fn failed(&self, what: &str, status: c_int) -> RuntimeError {
        let text = |at: *const c_char| match at.is_null() {
            true => String::new(),
            // SAFETY: a text of the library's, which ends with a zero.
            false => unsafe { CStr::from_ptr(at) }
                .to_string_lossy()
                .trim()
                .to_string(),
        };
        // SAFETY: the library takes any status, and no communicator for its last words.
        let (name, last) = unsafe {
            let name = text((self.functions.error_string)(status));
            (name, text((self.functions.last_error)(ptr::null_mut())))
        };
        let last = match last.is_empty() {
            true => String::new(),
            false => format!(" ({last})"),
        };
        RuntimeError::Device {
            problem: format!("{what}: NCCL says {name}{last}"),
        }
    }

    /// Fails unless a call is done or goes on.
    fn check(&self, what: &str, status: c_int) -> Result<(), RuntimeError> {
        match status {
            SUCCESS | IN_PROGRESS => Ok(()),
            other => Err(self.failed(what, other)),
        }
    }

    /// An identifier that nobody has.
    pub fn id(&self) -> Result<Id, RuntimeError> {
        let mut id = Id([0; ID]);
        // SAFETY: the pointer is to an identifier.
        let status = unsafe { (self.functions.get_unique_id)(&mut id) };
        self.check("the identifier of a communicator", status)?;
        Ok(id)
    }

    /// Begins to join the communicator of an identifier as member `rank` of `n`.
    ///
    /// The library writes the communicator to `slot` now or later, until it is there: the slot must
    /// live that long.
    pub fn join(
        &self,
        slot: &AtomicPtr<c_void>,
        id: Id,
        rank: usize,
        n: usize,
    ) -> Result<(), RuntimeError> {
        let mut config = Config::usual();
        let (rank, n) = (rank as c_int, n as c_int);
        // SAFETY: the slot lives, by the caller's promise; the configuration is copied.
        let status = unsafe { (self.functions.init)(slot.as_ptr(), n, id, rank, &mut config) };
        self.check("joining a communicator", status)
    }

    /// Begins to split a communicator, whose members all call this. The part is written to `slot` as
    /// by [`Library::join`].
    pub fn split(
        &self,
        parent: Pointer,
        slot: &AtomicPtr<c_void>,
        color: c_int,
        key: usize,
    ) -> Result<(), RuntimeError> {
        let mut config = Config::usual();
        let (key, at) = (key as c_int, slot.as_ptr());
        // SAFETY: as in `join`, and the parent is open.
        let status = unsafe { (self.functions.split)(parent, color, key, at, &mut config) };
        self.check("splitting a communicator", status)
    }

    /// Says whether work that was begun with an open communicator is done.
    pub fn poll(&self, comm: Pointer) -> Result<bool, RuntimeError> {
        let mut state = SUCCESS;
        // SAFETY: the communicator is open, the pointer to a number.
        let status = unsafe { (self.functions.async_error)(comm, &mut state) };
        self.check("a communicator", status)?;
        self.check("a communicator", state)?;
        Ok(state == SUCCESS)
    }

    /// Puts calls on a stream of this thread's GPU, as one. They are there when the communicator is
    /// polled with success.
    pub fn launch(
        &self,
        comm: Pointer,
        stream: Pointer,
        entries: &[Entry],
    ) -> Result<(), RuntimeError> {
        let f = &self.functions;
        // SAFETY: the communicator is open and its last calls are on their streams; addresses are of
        // this rank's memory and have the elements, which is the caller's promise.
        unsafe {
            self.check("a group of calls", (f.group_start)())?;
            let mut begun = Ok(());
            for entry in entries {
                let status = match *entry {
                    Entry::AllReduce {
                        from,
                        to,
                        count,
                        dtype,
                        by,
                    } => (f.all_reduce)(from, to, count, dtype, by, comm, stream),
                    Entry::ReduceScatter {
                        from,
                        to,
                        count,
                        dtype,
                        by,
                    } => (f.reduce_scatter)(from, to, count, dtype, by, comm, stream),
                    Entry::AllGather {
                        from,
                        to,
                        count,
                        dtype,
                    } => (f.all_gather)(from, to, count, dtype, comm, stream),
                    Entry::Send {
                        from,
                        count,
                        dtype,
                        peer,
                    } => (f.send)(from, count, dtype, peer as c_int, comm, stream),
                    Entry::Receive {
                        to,
                        count,
                        dtype,
                        peer,
                    } => (f.receive)(to, count, dtype, peer as c_int, comm, stream),
                };
                begun = self.check("a call", status);
                if begun.is_err() {
                    break;
                }
            }
            let ended = self.check("a group of calls", (f.group_end)());
            begun.and(ended)
        }
    }

    /// Ends a communicator whatever its members do; what it has on streams ends.
    pub fn abort(&self, comm: Pointer) {
        // SAFETY: the communicator is open, and not used again.
        let _ = unsafe { (self.functions.abort)(comm) };
    }

    /// Begins to end a communicator; polls say when that is done.
    pub fn finalize(&self, comm: Pointer) -> Result<(), RuntimeError> {
        // SAFETY: the communicator is open.
        let status = unsafe { (self.functions.finalize)(comm) };
        self.check("the end of a communicator", status)
    }

    /// Gives back a communicator that has ended.
    pub fn destroy(&self, comm: Pointer) {
        // SAFETY: the communicator is open and has ended, and is not used again.
        let _ = unsafe { (self.functions.destroy)(comm) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_nccl_is_told() {
        let none = find(&[PathBuf::from("/nowhere/libnccl.so.2")]).map(|_| ());
        assert!(none.is_err_and(|e| e.contains("NCCL is not found")));
        // A library that every process has.
        let other = find(&[PathBuf::from("libc.so.6")]).map(|_| ());
        assert!(other.is_err_and(|e| e.contains("it is no NCCL")));
        assert_eq!(
            (words(21_805), words(23_203)),
            ("2.18.5".into(), "2.32.3".into())
        );
    }

    /// With NVIDIA's library, which a Python package has (`nvidia-nccl-cu13`), and no GPU; skipped
    /// without it.
    #[test]
    fn nvidia_s_library_has_all_functions() {
        let files = places::files_of("nccl");
        match find(&files) {
            Ok(library) => assert!(library.version >= OLDEST),
            // Only where there is none to look at.
            Err(what) => {
                assert!(what.contains("NCCL is not found"), "{what}");
                eprintln!("skipped: {what}");
            }
        }
    }
}
