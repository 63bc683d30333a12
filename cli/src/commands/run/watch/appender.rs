//! A file that grows while others read it. What is appended is there whole or not at all, also
//! where the disk fails in between.

use rustix::fs::OFlags;
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Most bytes that wait for a disk that fails: some thousand steps.
const LONGEST_WAIT: usize = 1 << 20;
/// Longest that the reader of a pipe is waited for at the end, and how often it is looked at.
const TO_READ: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(10);

/// The file.
pub struct Appender {
    path: PathBuf,
    file: File,
    /// Bytes that are there whole; `None` for what is no plain file.
    len: Option<u64>,
    waiting: Vec<u8>,
    is_failing: bool,
    /// Whether it is because whoever reads a pipe stands still.
    is_unread: bool,
    has_lost: bool,
}

impl Appender {
    /// A file to append to, of which the first `len` bytes stay. Pipes and devices, which have no
    /// length, are written to as they are, and never waited for: a reader that stands still would
    /// hold the run up.
    ///
    /// Fails for a pipe that nobody has open for reading.
    pub fn open(path: &Path, len: u64) -> io::Result<Self> {
        let mut options = File::options();
        let is_special = std::fs::metadata(path).is_ok_and(|m| !m.is_file());
        let file = match is_special {
            true => {
                let at_once = OFlags::NONBLOCK.bits().cast_signed();
                let opened = options.write(true).custom_flags(at_once).open(path);
                let is_pipe = std::fs::metadata(path).is_ok_and(|m| m.file_type().is_fifo());
                let nobody = Some(rustix::io::Errno::NXIO.raw_os_error());
                opened.map_err(|e| match is_pipe && e.raw_os_error() == nobody {
                    true => io::Error::other("it is a pipe from which nobody reads"),
                    false => e,
                })?
            }
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
            is_unread: false,
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
        let written = match self.len {
            Some(_) => self.file.write_all(&self.waiting),
            None => write_some(&mut self.file, &mut self.waiting),
        };
        match written {
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
                self.is_unread = e.kind() == ErrorKind::WouldBlock;
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
        let until = Instant::now() + TO_READ;
        self.try_all();
        // A reader may be slower than the run.
        while self.is_failing && self.is_unread && Instant::now() < until {
            std::thread::sleep(LOOK);
            self.try_all();
        }
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

/// Writes to a pipe what it takes now; what it has taken waits no longer.
fn write_some(pipe: &mut File, waiting: &mut Vec<u8>) -> io::Result<()> {
    while !waiting.is_empty() {
        match pipe.write(waiting) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(n) => drop(waiting.drain(..n)),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                return Err(io::Error::new(e.kind(), "whoever reads it stands still"));
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
