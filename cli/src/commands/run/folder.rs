//! The folder of a run's records: which one it is, and that no two runs that go on have the same.
//!
//! Process 0 holds a lock in it, which goes with the process. A run whose folder is another one's
//! takes the next: nobody asked for its records, and who has the other ones may need them. The
//! file that is locked says whose it is, by which the other processes of a run find the folder
//! that their process 0 has taken.

use super::lock::{self, Tried};
use crate::args::RunArgs;
use crate::failure::{Exit, Failure};
use crate::interrupt::{Interrupts, Made};
use crate::outputs;
use runtime::files::open_regular;
use runtime::processes::Processes;
use runtime::record;
use std::fs::{File, TryLockError};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The file by which a run has a folder of records.
const HOLDER: &str = "holder";
/// Folders that are tried: more runs at a time do not share the name of an output.
const MOST: usize = 16;
/// How long one waits for a folder that nobody asked for: others look for a moment whether it is
/// held. Where it is asked for, the process that has it may be about to end.
const TO_BE_LOOKED_AT: Duration = Duration::from_secs(1);
const TO_END: Duration = Duration::from_secs(3);
const LOOK: Duration = Duration::from_millis(20);

/// The folders that a run may keep its records in where nobody named one, the first choice first.
fn choices(output: &Path) -> Vec<PathBuf> {
    let ends = (0..MOST).map(|n| match n {
        0 => "records".to_string(),
        n => format!("{n}.records"),
    });
    let all = ends.map(|end| output.with_extension(end));
    all.filter(|folder| folder != output).collect()
}

/// The arguments of a run, with the folder of its records where nobody named one. That of process 0
/// is no other run's that goes on.
pub fn by_default(mut args: RunArgs, is_first: bool) -> RunArgs {
    // Beside a device there is no place for a folder.
    let is_special = args.output.exists() && !args.output.is_file();
    if args.record.is_some() || is_special {
        return args;
    }
    let mut all = choices(&args.output).into_iter();
    args.record = match is_first {
        true => {
            // One that has just been killed, and is begun again, has it for a moment still.
            let until = Instant::now() + TO_END;
            let first = all.next().filter(|folder| {
                while is_held(folder) && Instant::now() < until {
                    std::thread::sleep(LOOK);
                }
                !is_held(folder)
            });
            first.or_else(|| all.find(|folder| !is_held(folder)))
        }
        false => all.next(),
    };
    args.records_by_default = args.record.is_some();
    args
}

/// Whether a process that is there has a folder of records.
fn is_held(folder: &Path) -> bool {
    let file = open_regular(&folder.join(HOLDER));
    file.is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

/// The words of the file by which a process holds a folder.
fn held_by(pid: u32, host: &str) -> String {
    format!("process {pid} on {host}\n")
}

/// Takes a folder of records for this process, until the run ends; false where another one has it
/// for longer than so.
fn take(folder: &Path, interrupts: &Interrupts, longest: Duration) -> Result<bool, Failure> {
    let path = folder.join(HOLDER);
    let failed = |e: std::io::Error| {
        let what = format!("{}: {e}", path.display());
        Failure::new(Exit::BadInput, what)
    };
    let until = Instant::now() + longest;
    loop {
        // Again, as who had it may have removed it.
        interrupts.makes(folder, || outputs::check_folder(folder))?;
        match interrupts.making(|made| lock::tried(&path, made)) {
            Ok(Tried::Held | Tried::WithoutLocks(_)) => break,
            Ok(Tried::Taken) if Instant::now() >= until => return Ok(false),
            Err(e) if e.kind() != std::io::ErrorKind::NotFound || Instant::now() >= until => {
                return Err(failed(e));
            }
            Ok(Tried::Taken) | Err(_) => std::thread::sleep(LOOK),
        }
    }
    let words = held_by(std::process::id(), &record::host());
    // Whoever undoes what was made waits for this, and finds no file that it does not know.
    let written = interrupts.making(|_| std::fs::write(&path, words));
    written.map_err(failed)?;
    Ok(true)
}

/// Takes the folder that was asked for, and removes the records of an earlier run there. Fails where
/// another run that goes on has it.
pub fn take_asked(args: &RunArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let Some(folder) = args.record.as_ref().filter(|_| !args.records_by_default) else {
        return Ok(());
    };
    match take(folder, interrupts, TO_END)? {
        true => Ok(record::clear(folder)?),
        false => {
            let shown = folder.display();
            let what =
                format!("--record {shown}: another run that goes on keeps its records there");
            Err(Failure::new(Exit::Usage, what).help("give each run a folder of its own"))
        }
    }
}

/// The folder that nobody asked for; what is in it goes with [`Unasked::end`]. One that is empty
/// goes whatever happens, as when the processes did not come together.
pub struct Unasked(PathBuf);

impl Unasked {
    /// Takes it for process 0, without what an earlier run left there. Says so where it is another
    /// one than runs of this output have, and why not where it cannot be made or written to: then
    /// the run goes on without.
    pub fn begin(args: &mut RunArgs, interrupts: &Interrupts) -> Option<Self> {
        let chosen = args.record.clone().filter(|_| args.records_by_default)?;
        let others = choices(&args.output).into_iter();
        let others = others.filter(|folder| *folder != chosen);
        let all: Vec<PathBuf> = std::iter::once(chosen.clone()).chain(others).collect();
        let taken = || {
            for folder in all {
                if take(&folder, interrupts, TO_BE_LOOKED_AT)? {
                    record::make_way(&folder)?;
                    interrupts.making(|_| record::can_begin(&folder))?;
                    return Ok::<_, Failure>(folder);
                }
            }
            let what = "all folders beside the output that they may be in are of runs that go on";
            Err(Failure::new(Exit::Usage, what))
        };
        match taken() {
            Ok(folder) => {
                let first = choices(&args.output).into_iter().next();
                if let Some(first) = first.filter(|first| *first != folder) {
                    crate::say(format_args!(
                        "note: {} is of another run that goes on, so the records of this one are in {}. Both write {}: the one that ends last replaces it.",
                        first.display(),
                        folder.display(),
                        args.output.display()
                    ));
                }
                // Behind what it holds there.
                interrupts.making(|made| made.insert(0, Made::Folder(folder.clone())));
                args.record = Some(folder.clone());
                Some(Unasked(folder))
            }
            Err(failure) => {
                crate::say(format_args!(
                    "warning: no records of ranks, by which `meshwright doctor` says where a run hangs: {failure}"
                ));
                args.record = None;
                None
            }
        }
    }
    /// Makes it for another process, where process 0 has not, as on a host that shares no folder
    /// with it. That is to be before the processes have come together: no rank of the run writes by
    /// then. One that is held has been made way in, or is another run's.
    pub fn begin_elsewhere(args: &RunArgs, interrupts: &Interrupts) -> Option<Self> {
        let folder = args.record.clone().filter(|_| args.records_by_default)?;
        // Nobody takes it meanwhile.
        let looked_at = open_regular(&folder.join(HOLDER)).ok();
        let is_held = |file: &File| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock));
        if looked_at.as_ref().is_some_and(is_held) {
            return None;
        }
        let is_made = interrupts.makes(&folder, || std::fs::create_dir(&folder).is_ok());
        // What cannot be taken out of the way stays.
        let _ = record::make_way(&folder);
        is_made.then(|| Unasked(folder))
    }
    /// Removes it with all that the run wrote there: it has ended in order. What process 0 holds
    /// there goes with it.
    pub fn end(self) {
        record::remove(&self.0);
    }
}

impl Drop for Unasked {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// The folder of records of a process with a number above 0, once all have met, where nobody named
/// one: the one that process 0 has taken, where that is to be seen from here, and else this host's
/// own, unless another run has that.
pub fn of_first(args: &RunArgs, processes: &Processes) -> Option<PathBuf> {
    let own = args.record.clone();
    if !args.records_by_default {
        return own;
    }
    let (pid, host) = processes.first()?;
    let words = held_by(pid, host);
    let is_of_first = |folder: &PathBuf| {
        let mut found = String::new();
        let file = open_regular(&folder.join(HOLDER));
        let read = file.and_then(|file| file.take(1 << 12).read_to_string(&mut found));
        read.is_ok() && found == words
    };
    let all = own.clone().into_iter().chain(choices(&args.output));
    let found = all.into_iter().find(is_of_first);
    found.or(own.filter(|folder| !is_held(folder)))
}

/// Removes the records that nobody asked for, of a run that is done.
pub fn forget(args: &RunArgs) {
    let folder = args.record.as_ref().filter(|_| args.records_by_default);
    if let Some(folder) = folder.filter(|folder| !is_held(folder)) {
        let _ = std::fs::remove_file(folder.join(HOLDER));
        record::remove(folder);
    }
}
