//! The communicators of a rank: which there are, and how they end.
//!
//! They are behind a lock, as a run that has failed ends them from another thread: the rank's own may
//! be waiting for a stream that they hold up.
//!
//! NCCL writes the pointer of a communicator that does not block when it has made it, so each has a
//! slot that stays where it is.

use super::library::{Entry, ID, Id, Library, Pointer};
use crate::error::RuntimeError;
use ir::Rank;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Which communicator: its members in order, and a number that tells it from others of them.
pub(super) type Key = (Vec<Rank>, u32);

/// How long the ends of communicators may take before they are aborted.
const LAST: Duration = Duration::from_secs(5);
/// Rest between two looks.
const REST: Duration = Duration::from_micros(200);

/// Where NCCL writes a communicator.
type Slot = Box<AtomicPtr<c_void>>;

/// A communicator, and whether what was begun with it is there.
#[derive(Default)]
struct Comm {
    slot: Slot,
    is_ready: bool,
}

#[derive(Default)]
struct Table {
    open: BTreeMap<Key, Comm>,
    /// Slots of splits in which the rank has no part.
    others: Vec<Slot>,
    is_aborted: bool,
}

impl Comm {
    /// The communicator, once NCCL has written it.
    fn at(&self) -> Option<Pointer> {
        let at = self.slot.load(Ordering::SeqCst);
        (!at.is_null()).then_some(at)
    }
}

/// A rank's communicators.
pub(super) struct Comms {
    library: &'static Library,
    table: Mutex<Table>,
}

impl Comms {
    pub fn new(library: &'static Library) -> Self {
        Comms {
            library,
            table: Mutex::default(),
        }
    }

    /// The table, unless the communicators were aborted.
    fn table(&self) -> Result<MutexGuard<'_, Table>, RuntimeError> {
        let table = self.lock();
        match table.is_aborted {
            true => Err(RuntimeError::Device {
                problem: "NCCL's communicators were aborted, as the run has failed".into(),
            }),
            false => Ok(table),
        }
    }
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn missing(key: &Key) -> RuntimeError {
        RuntimeError::Program(format!("there is no communicator {} of {:?}", key.1, key.0))
    }

    pub fn has(&self, key: &Key) -> bool {
        self.lock().open.contains_key(key)
    }
    pub fn id(&self) -> Result<[u8; ID], RuntimeError> {
        self.library.id().map(|id| id.0)
    }

    /// Begins to join a communicator as member `rank`, on this thread's GPU.
    pub fn join(&self, key: &Key, id: [u8; ID], rank: usize) -> Result<(), RuntimeError> {
        let mut table = self.table()?;
        let comm = Comm::default();
        let joined = self.library.join(&comm.slot, Id(id), rank, key.0.len());
        // It is kept also if that fails, as NCCL may know its place.
        table.open.insert(key.clone(), comm);
        joined
    }

    /// Begins to split a communicator, all of whose members come to this, into others; the rank is
    /// in the one of this color, at this place, if it is in any.
    pub fn split(&self, parent: &Key, part: Option<(Key, i32, usize)>) -> Result<(), RuntimeError> {
        let mut table = self.table()?;
        let of = table.open.get_mut(parent);
        let of = of.ok_or_else(|| Self::missing(parent))?;
        of.is_ready = false;
        let at = of.at().ok_or_else(|| Self::missing(parent))?;
        let slot = Slot::default();
        let (color, place) = match &part {
            Some((_, color, place)) => (*color, *place),
            None => (super::library::NO_COLOR, 0),
        };
        let split = self.library.split(at, &slot, color, place);
        let is_ready = false;
        match part {
            Some((key, ..)) => drop(table.open.insert(key, Comm { slot, is_ready })),
            None => table.others.push(slot),
        }
        split
    }

    /// Says whether work that was begun with a communicator is done. Fails when something is wrong
    /// with it.
    pub fn poll(&self, key: &Key) -> Result<bool, RuntimeError> {
        let mut table = self.table()?;
        let comm = table.open.get_mut(key).ok_or_else(|| Self::missing(key))?;
        if let Some(at) = comm.at().filter(|_| !comm.is_ready) {
            comm.is_ready = self.library.poll(at)?;
        }
        Ok(comm.is_ready)
    }
    /// Fails when something is wrong with one of them.
    pub fn sound(&self) -> Result<(), RuntimeError> {
        let table = self.table()?;
        let mut all = table.open.values().filter_map(Comm::at);
        all.try_for_each(|at| self.library.poll(at).map(|_| ()))
    }

    /// Begins to put calls on a stream; [`Comms::poll`] says when they are there.
    pub fn launch(
        &self,
        key: &Key,
        stream: Pointer,
        entries: &[Entry],
    ) -> Result<(), RuntimeError> {
        let mut table = self.table()?;
        let comm = table.open.get_mut(key).ok_or_else(|| Self::missing(key))?;
        let at = comm.at().ok_or_else(|| Self::missing(key))?;
        comm.is_ready = false;
        self.library.launch(at, stream, entries)
    }

    /// Ends all of them at once, and with them what they have on streams.
    pub fn abort(&self) {
        let mut table = self.lock();
        table.is_aborted = true;
        for comm in std::mem::take(&mut table.open).into_values() {
            if let Some(at) = comm.at() {
                self.library.abort(at);
            }
            // What was being made may still be written.
            std::mem::forget(comm);
        }
        std::mem::take(&mut table.others)
            .into_iter()
            .for_each(std::mem::forget);
    }

    /// Ends all of them when what they have on streams is done.
    pub fn close(&self) {
        let mut table = self.lock();
        let began = Instant::now();
        for comm in std::mem::take(&mut table.open).into_values() {
            let Some(at) = comm.at() else {
                std::mem::forget(comm);
                continue;
            };
            let mut ended = self.library.finalize(at);
            let mut is_over = false;
            while ended.is_ok() && !is_over && began.elapsed() < LAST {
                match self.library.poll(at) {
                    Ok(true) => is_over = true,
                    Ok(false) => std::thread::sleep(REST),
                    Err(e) => ended = Err(e),
                }
            }
            match is_over {
                true => self.library.destroy(at),
                false => self.library.abort(at),
            }
        }
    }
}
