//! The process that keeps an elastic run: process 0 is a child of it, and where that is killed, another
//! one goes on with the processes that are left.

use super::among::Setting;
use super::journal::Journal;
use crate::args::RunArgs;
use crate::failure::{Exit, Failure};
use rustix::process::{Pid, Signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const LOOK: Duration = Duration::from_millis(20);

/// Keeps the run where it is an elastic one that starts its processes, which does not come back but
/// with a failure. Process 0 itself sees to it that it ends with its keeper.
pub fn keep(args: &RunArgs, setting: &Setting) -> Result<(), Failure> {
    if let Some(keeper) = args.kept {
        return end_with(keeper);
    }
    let folder = match (setting, &args.checkpoint) {
        (Setting::Starts(_), Some(folder)) if args.elastic => folder,
        _ => return Ok(()),
    };
    let asked = [
        (SIGINT, Signal::INT),
        (SIGTERM, Signal::TERM),
        (SIGHUP, Signal::HUP),
        (SIGUSR1, Signal::USR1),
    ];
    let mut signals = Vec::new();
    for (number, signal) in asked {
        let flag = Arc::new(AtomicBool::new(false));
        let registered = signal_hook::flag::register(number, Arc::clone(&flag));
        registered.map_err(|e| failed("waits for no interrupt", &e))?;
        signals.push((flag, signal));
    }
    let mut is_after_loss = false;
    loop {
        let mut child = start(is_after_loss)?;
        let (how, was_asked) = wait(&mut child, &signals)?;
        if let Some(code) = how.code() {
            std::process::exit(code);
        }
        let lost = lost(how);
        if was_asked {
            return Err(Failure::new(Exit::Interrupted, lost));
        }
        goes_on(folder, &lost)?;
        crate::say(format_args!("lost: {lost}"));
        is_after_loss = true;
    }
}

fn lost(how: ExitStatus) -> String {
    let signal = how.signal().map_or("?".into(), |s| s.to_string());
    format!("process 0 was killed by signal {signal}")
}

fn failed(what: &str, e: &dyn std::fmt::Display) -> Failure {
    Failure::new(
        Exit::RunFailed,
        format!("the keeper of the run {what}: {e}"),
    )
    .help("leave --elastic out, and --resume when a process is lost")
}

/// Fails where nothing is left that could go on.
fn goes_on(folder: &Path, lost: &str) -> Result<(), Failure> {
    let why = match Journal::read(folder)? {
        Some(journal) if journal.now.processes > 1 => return Ok(()),
        Some(_) => "no other process is left",
        None => "the run had not begun",
    };
    let what = format!("{lost}, and {why}");
    let help = "the same command goes on from the newest checkpoint, where there is one";
    Err(Failure::new(Exit::RunFailed, what).help(help))
}

/// Starts process 0 with this one's arguments. It is in a group of its own, so that what a terminal
/// sends to all comes to it once, from here.
fn start(is_after_loss: bool) -> Result<Child, Failure> {
    let program = std::env::current_exe().map_err(|e| failed("does not find itself", &e))?;
    let given = std::env::args_os();
    let child = Command::new(program)
        // After the verb: what follows `--` are no flags.
        .args(given.skip(1).take(1))
        .arg(format!("--kept={}", std::process::id()))
        .args(is_after_loss.then_some("--after-loss"))
        .args(std::env::args_os().skip(2))
        .process_group(0)
        .spawn();
    child.map_err(|e| failed("cannot start it", &e))
}

/// Waits for process 0 to end, and hands on what this one is asked. Says whether it was to end.
fn wait(
    child: &mut Child,
    signals: &[(Arc<AtomicBool>, Signal)],
) -> Result<(ExitStatus, bool), Failure> {
    let mut was_asked = false;
    loop {
        if let Some(how) = child
            .try_wait()
            .map_err(|e| failed("lost sight of it", &e))?
        {
            return Ok((how, was_asked));
        }
        for (flag, signal) in signals {
            if flag.swap(false, Ordering::Relaxed) {
                was_asked = true;
                // One that has just ended is seen next.
                let _ = rustix::process::kill_process(Pid::from_child(child), *signal);
            }
        }
        std::thread::sleep(LOOK);
    }
}

/// Has this process be killed when its keeper is.
fn end_with(keeper: u32) -> Result<(), Failure> {
    let set = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    set.map_err(|e| failed("cannot be watched", &e))?;
    // It may have ended before it was asked for.
    let parent = rustix::process::getppid().map(|p| p.as_raw_nonzero().get().cast_unsigned());
    match parent == Some(keeper) {
        true => Ok(()),
        false => Err(Failure::new(
            Exit::RunFailed,
            "the keeper of the run has ended",
        )),
    }
}
