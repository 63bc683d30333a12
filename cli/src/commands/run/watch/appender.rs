//! A file that grows while others read it. What is appended is there whole or not at all, also
//! where the disk fails in between.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Most bytes that wait for a disk that fails: some thousand steps.
const LONGEST_WAIT: usize = 1 << 20;

/// The file.
pub struct Appender {
    path: PathBuf,
    file: File,
    /// Bytes that are there whole; `None` for what is no plain file.
    len: Option<u64>,
    waiting: Vec<u8>,
    is_failing: bool,
    has_lost: bool,
}

impl Appender {
    /// A file to append to, of which the first `len` bytes stay. Pipes and devices, which have no
    /// length, are written to as they are.
    pub fn open(path: &Path, len: u64) -> io::Result<Self> {
        let mut options = File::options();
        let is_special = std::fs::metadata(path).is_ok_and(|m| !m.is_file());
        let file = match is_special {
            true => options.write(true).open(path)?,
            false => options.append(true).create(true).open(path)?,
        };
        if !is_special {
            file.set_len(len)?;
        }
        Ok(Appender {
            path: path.to_path_buf(),
            file,
            len: (!is_special).then_some(len),
            waiting: Vec::new(),
            is_failing: false,
            has_lost: false,
        })
    }

    /// Appends, or keeps what cannot be until the next time. Says so when that begins and ends.
    pub fn append(&mut self, bytes: &[u8]) {
        if self.waiting.len() + bytes.len() > LONGEST_WAIT {
            self.has_lost = true;
            return;
        }
        self.waiting.extend_from_slice(bytes);
        self.try_all();
    }

    fn try_all(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let shown = self.path.display();
        match self.file.write_all(&self.waiting) {
            Ok(()) => {
                let written = self.waiting.len() as u64;
                self.len = self.len.map(|len| len + written);
                self.waiting.clear();
                if std::mem::take(&mut self.is_failing) {
                    let lost = match std::mem::take(&mut self.has_lost) {
                        true => "; some of them are lost",
                        false => "",
                    };
                    crate::say(format_args!(
                        "metrics can be written to {shown} again{lost}"
                    ));
                }
            }
            Err(e) => {
                // What a torn write left goes, so that the next one begins on a line of its own.
                if let Some(len) = self.len {
                    let _ = self.file.set_len(len);
                }
                if !std::mem::replace(&mut self.is_failing, true) {
                    crate::say(format_args!(
                        "warning: metrics cannot be written to {shown}, the run goes on: {e}"
                    ));
                }
            }
        }
    }

    /// Tries once more, and writes all through to the disk.
    pub fn finish(&mut self) {
        self.try_all();
        let shown = self.path.display();
        if self.is_failing {
            crate::say(format_args!(
                "warning: {shown} lacks the metrics of the last steps"
            ));
        } else if self.len.is_some()
            && let Err(e) = self.file.sync_all()
        {
            crate::say(format_args!("warning: {shown} may not be on the disk: {e}"));
        }
    }
}
