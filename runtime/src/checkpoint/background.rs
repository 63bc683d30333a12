//! Checkpoints that are written while steps go on.
//!
//! ```text
//!   step 20                     21        22        23
//!   ranks copy their states ──► write the copies, through to the disk
//!                                                   └► manifest, name, old ones go
//! ```
//!
//! A step is held up for the copy alone. The order of writing is that of any checkpoint: it is one
//! when all of it is on the disk, and until then nothing has changed. One is written at a time, so
//! the copies take at most the bytes of one checkpoint, over all ranks together.

use super::retention::make_room;
use super::shard::Shard;
use super::{Origin, Saving, Whole, commit};
use crate::error::RuntimeError;
use crate::execute::Session;
use crate::files::Unfinished;
use std::path::PathBuf;
use std::thread::JoinHandle;

/// A checkpoint on its way, where there is one.
#[derive(Debug, Default)]
pub struct Background(Stage);

#[derive(Debug, Default)]
enum Stage {
    #[default]
    Idle,
    /// The ranks write.
    Writing(Box<Begun>),
    /// All is written but the manifest, after which it gets its name.
    Committing(u64, JoinHandle<Result<PathBuf, RuntimeError>>),
}

/// Everything of a checkpoint but its files.
#[derive(Debug)]
struct Begun {
    folder: PathBuf,
    kept: usize,
    unfinished: Unfinished,
    origin: Origin,
    whole: Whole,
}

/// How a checkpoint ended that was written meanwhile.
#[derive(Debug)]
pub struct Ended {
    /// Optimizer steps done when it was begun.
    pub step: u64,
    /// Its folder, or why there is none. All is as before then.
    pub path: Result<PathBuf, RuntimeError>,
}

impl Background {
    /// Whether a checkpoint is on its way.
    pub fn is_busy(&self) -> bool {
        !matches!(self.0, Stage::Idle)
    }

    /// Begins a checkpoint. None may be on its way.
    ///
    /// Fails when the folder cannot be written to, when states differ that should not, and when the
    /// ranks cannot go on.
    pub fn begin(&mut self, of: &Saving<'_>, session: &mut Session) -> Result<(), RuntimeError> {
        let unfinished = of.unfinished().inspect_err(|e| {
            make_room(of.folder, of.kept, &session.whole(), e);
        })?;
        session.begin_shards(unfinished.path())?;
        let compared = match of.compares {
            true => session.check_replicas(),
            false => Ok(()),
        };
        if let Err(e) = compared {
            // Ranks that can still be asked write to its folder no more when that goes.
            let _ = session.end_shards();
            return Err(e);
        }
        self.0 = Stage::Writing(Box::new(Begun {
            folder: of.folder.to_path_buf(),
            kept: of.kept,
            unfinished,
            origin: Origin::of(session, of.plan, of.model),
            whole: session.whole(),
        }));
        Ok(())
    }

    /// Takes a checkpoint on where that need not wait. Says how it ended, once it has.
    pub fn poll(&mut self, session: &mut Session) -> Option<Ended> {
        match &self.0 {
            Stage::Idle => None,
            Stage::Writing(_) if session.is_writing() => None,
            Stage::Writing(_) => self.written(session),
            Stage::Committing(_, thread) if thread.is_finished() => self.wait(session),
            Stage::Committing(..) => None,
        }
    }

    /// Waits for the checkpoint on its way. Says how it ended; nothing where there was none.
    pub fn wait(&mut self, session: &mut Session) -> Option<Ended> {
        if let Some(ended) = self.written(session) {
            return Some(ended);
        }
        match std::mem::take(&mut self.0) {
            Stage::Committing(step, thread) => {
                let panicked = |_| Err(RuntimeError::Ended("a checkpoint's thread".into()));
                let path = thread.join().unwrap_or_else(panicked);
                Some(Ended { step, path })
            }
            other => {
                self.0 = other;
                None
            }
        }
    }

    /// Goes from writing to committing. Says how it ended where that cannot be.
    fn written(&mut self, session: &mut Session) -> Option<Ended> {
        let begun = match std::mem::take(&mut self.0) {
            Stage::Writing(begun) => begun,
            other => {
                self.0 = other;
                return None;
            }
        };
        let step = begun.origin.step;
        match session.end_shards() {
            Err(e) => {
                let Begun {
                    folder,
                    kept,
                    unfinished,
                    whole,
                    ..
                } = *begun;
                drop(unfinished);
                // The next one is to have room.
                make_room(&folder, kept, &whole, &e);
                Some(Ended { step, path: Err(e) })
            }
            Ok(shards) => {
                let thread = std::thread::spawn(move || begun.commit(shards));
                self.0 = Stage::Committing(step, thread);
                None
            }
        }
    }
}

impl Begun {
    fn commit(self, shards: Vec<Shard>) -> Result<PathBuf, RuntimeError> {
        let Begun {
            folder,
            kept,
            unfinished,
            origin,
            whole,
        } = self;
        let committed = commit(&folder, (kept, &whole), &unfinished, origin, shards);
        if let Err(e) = &committed {
            drop(unfinished);
            make_room(&folder, kept, &whole, e);
        }
        committed
    }
}
