//! The end of a process of which a thread will never come back: from the GPU's driver, or, in
//! process 0, the one that coordinates. Also of one that is about to be killed by its launcher, as
//! another one was.

use crate::failure::Exit;
use crate::interrupt::say_last as say;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Says why and ends, at once, so that the keeper of an elastic run takes it for lost.
pub fn end_kept(reason: &str) {
    say(format!(
        "error: {reason}: nothing is left but to kill this process"
    ));
    let own = rustix::process::getpid();
    let _ = rustix::process::kill_process(own, rustix::process::Signal::KILL);
    std::process::abort()
}

/// Says why and ends, at once.
///
/// An end in order would not come: it waits for the thread, and what the driver does at the end of
/// its process may wait for it, too. So the process becomes another one, which ends. With it go its
/// connections, by which the others learn of it.
pub fn end(reason: &str) {
    let code = Exit::RunFailed as i32;
    say(format!(
        "error: {reason}: nothing is left but to end this process, with exit code {code}"
    ));
    let failed = Command::new("/bin/sh")
        .args(["-c", &format!("exit {code}")])
        .exec();
    say(format!("warning: /bin/sh: {failed}"));
    std::process::abort()
}

/// How a process is lost that is no more there, in words.
#[cfg(feature = "mpi")]
const ENDED: &str = "its process has ended";

/// The loss of a rank, as process 0 has found it.
#[cfg(feature = "mpi")]
fn as_found(error: runtime::RuntimeError, fate: runtime::record::Fate) -> runtime::RuntimeError {
    use runtime::RuntimeError::Gone;
    use runtime::record::{Fate, SILENT};
    match (error, fate) {
        (
            Gone {
                rank,
                process,
                pid,
                host,
                ..
            },
            Fate::Lost(how),
        ) => Gone {
            is_silent: how == SILENT,
            rank,
            process,
            pid,
            host,
            how,
        },
        (error, _) => error,
    }
}

/// The words of a process that MPI's launcher is about to kill, as another one of its host has
/// ended: it says whose ranks these were and where, writes that down for `doctor`, and ends.
#[cfg(feature = "mpi")]
pub fn words(
    args: &crate::args::RunArgs,
    loaded: &crate::plan_file::Loaded,
    runtime::processes::Place { index: me, of }: runtime::processes::Place,
) -> runtime::processes::LastWords {
    use super::elastic::SoFar;
    use runtime::RuntimeError;
    use runtime::processes::Departed;
    use runtime::record::Verdict;
    let so_far = SoFar::begin_elsewhere(args);
    let (args, loaded) = (args.clone(), loaded.clone());
    // As processes share them.
    let roles = loaded.program.roles.iter();
    let mut ranks: Vec<ir::Rank> = roles.flat_map(|r| r.mesh.ranks()).collect();
    ranks.sort_unstable();
    Box::new(move |departed| {
        let Departed { process, pid, host } = departed;
        let rank = ranks.get(process * ranks.len() / of.max(1));
        let rank = rank.copied().unwrap_or(ir::Rank(0));
        let error = RuntimeError::Gone {
            rank,
            process,
            pid,
            host,
            how: ENDED.into(),
            is_silent: false,
        };
        // One that hung was given up by process 0, which has written that down and killed it.
        let known = args.record.as_deref().and_then(Verdict::read);
        let known = known.and_then(|v| v.found.get(&rank).cloned());
        let (error, words) = match known {
            Some(fate) => {
                let error = as_found(error, fate);
                let words = super::records::told(&args, &loaded, (&error, None));
                (error, words)
            }
            None => {
                // Little time may be left: that it is lost is said and written down before all else.
                crate::say(format_args!("lost: {error}"));
                let place = (args.record.as_deref(), &*loaded.hash);
                super::records::lost(place, rank, &error);
                let words = super::records::explained(&args, &loaded, (&error, None));
                (error, words)
            }
        };
        let failure = super::records::failure(&args, (error, words), so_far.as_ref());
        let code = crate::tell(match me {
            0 => failure,
            index => failure.of_process(index),
        });
        runtime::files::remove_unfinished();
        // The others see that one has ended before they see that this one has.
        std::thread::sleep(std::time::Duration::from_millis(100));
        std::process::exit(code.into())
    })
}
