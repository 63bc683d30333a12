//! How the processes that a launcher started learn with what process 0 of an elastic run goes on: from a
//! file in the folder of checkpoints, which is there until all have met.

use super::among::{LEAST_TO_JOIN, Setting};
use super::elastic::{self, Continued};
use super::{journal, launcher, lock};
use crate::args::RunArgs;
use crate::failure::{Exit, Failure};
use crate::{document, outputs, plan_file};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Least that a process waits for process 0, which may have to plan first, and has the folder of
/// checkpoints meanwhile.
const LEAST_TO_BE_TOLD: Duration = Duration::from_secs(600);
/// The parts of the file's name, and the characters of the hash between them.
const BEFORE: &str = "elastic-";
const BEHIND: &str = ".json";
const HASH: usize = 16;
/// How often it looks.
const LOOK: Duration = Duration::from_millis(100);
/// Most that counts from one look to the next.
const PAUSE: Duration = Duration::from_secs(1);
/// After so long it says that it waits.
const TO_SAY: Duration = Duration::from_secs(10);

/// Says to the processes of a launcher with what process 0 goes on, until it is dropped.
pub struct Told(PathBuf);

impl Drop for Told {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The file by which the processes of this run of a launcher are told.
fn file(args: &RunArgs, setting: &Setting) -> Option<PathBuf> {
    let Setting::Launched(launched) = setting else {
        return None;
    };
    let folder = args.checkpoint.as_deref().filter(|_| args.elastic)?;
    let hash =
        blake3::hash(format!("{} of {}", launched.key, launched.place.of).as_bytes()).to_hex();
    Some(folder.join(format!("{BEFORE}{}{BEHIND}", &hash[..HASH])))
}

/// Removes what an earlier process 0 of the folder's runs may have left: this one has the folder, so
/// nobody else tells anything there.
pub fn forget(args: &RunArgs) {
    let Some(folder) = args.checkpoint.as_deref().filter(|_| args.elastic) else {
        return;
    };
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let hash = name
            .to_str()
            .and_then(|n| n.strip_prefix(BEFORE)?.strip_suffix(BEHIND));
        let is_hash = |h: &str| h.len() == HASH && h.bytes().all(|b| b.is_ascii_hexdigit());
        if hash.is_some_and(is_hash) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Tells the other processes of a launcher what process 0 was told, or found in the journal.
pub fn tell(args: &RunArgs, setting: &Setting) -> Result<Option<Told>, Failure> {
    let Some(path) = file(args, setting) else {
        return Ok(None);
    };
    let told = Continued {
        plan: args.plan.clone(),
        steps: args.steps,
        total_steps: args.total_steps,
        resume: args.resume.clone(),
        processes: args.processes.unwrap_or(1),
        losses: args.losses,
        lost_at_ms: args.lost_at_ms,
        run: args.run.clone(),
        records: elastic::unasked(args),
    };
    outputs::write_atomic(&path, document::to_json(&told)?.as_bytes())?;
    Ok(Some(Told(path)))
}

/// The arguments of a process with a number above 0: those that process 0 of an elastic run tells it,
/// once it does, and its own of any other run. Nothing where the run is done already.
pub fn told(args: &RunArgs, setting: &Setting) -> Result<Option<RunArgs>, Failure> {
    let Some(path) = file(args, setting) else {
        return Ok(Some(args.clone()));
    };
    let loaded = plan_file::load(&args.plan)?;
    let patience = Duration::from_secs(args.time_out);
    // Time as it is seen to pass: all may have been stopped for a while.
    let (mut waited, mut since_sign, mut looked) = (Duration::ZERO, Duration::ZERO, Instant::now());
    let mut sign = None;
    let mut is_said = false;
    loop {
        let passed = looked.elapsed().min(PAUSE);
        (waited, since_sign, looked) = (waited + passed, since_sign + passed, Instant::now());
        // Process 0 gives signs of life until it has said so.
        let signs = args.checkpoint.as_deref().and_then(lock::sign_of_life);
        if signs != sign {
            (since_sign, sign) = (Duration::ZERO, signs);
        }
        let may_come =
            waited < patience.max(LEAST_TO_BE_TOLD) && since_sign < patience.max(LEAST_TO_JOIN);
        if waited > TO_SAY && !is_said {
            is_said = true;
            crate::say(format_args!(
                "note: process {} waits for process 0, which says by the file {} with what it goes on",
                setting.index(),
                path.display()
            ));
        }
        // Gone between two looks, it is of a process 0 before this one.
        match std::fs::read(&path) {
            Ok(_) => break,
            Err(_) if journal::is_done(args, &loaded)? => return Ok(None),
            Err(_) if may_come => std::thread::sleep(LOOK),
            Err(_) => {
                let what = format!(
                    "process 0 did not say what it goes on with, by the file {}",
                    path.display()
                );
                launcher::put_down_stopped(args.time_out);
                let help = "see its messages, if it was refused; the folder of --checkpoint must be one that all hosts have";
                return Err(Failure::new(Exit::RunFailed, what).help(help));
            }
        }
    }
    let mut args = args.clone();
    args.continued = Some(path);
    elastic::continued(&args).map(Some)
}
