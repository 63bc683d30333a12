//! Event files of TensorBoard: records of length, checksum, protocol buffer, checksum.
//!
//! ```text
//! u64 length | u32 masked CRC-32C of it | the event | u32 masked CRC-32C of that
//! ```
//!
//! Each run adds a file to the folder. Its second record says at which step the run begins: readers
//! forget what earlier files have from that step on.
//!
//! Source: TensorFlow's `event.proto`, `summary.proto` and `record_writer.cc`.

use super::{Appender, Row};
use crate::failure::{Exit, Failure};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// The form of event files that readers know.
const VERSION: &str = "brain.Event:2";
/// `SessionLog.START`.
const START: u64 = 1;

/// The content of an event.
enum What<'a> {
    FileVersion(&'a str),
    /// Names and values.
    Summary(&'a [(String, f32)]),
    SessionLog(u64),
}

/// An event file.
pub struct Events {
    file: Appender,
}

impl Events {
    /// Begins one in a folder, for a run whose first step is `step`.
    pub fn open(folder: &Path, step: u64) -> Result<Self, Failure> {
        let seconds = now() as u64;
        let host = runtime::record::host();
        let host = host.replace(|c: char| !c.is_ascii_alphanumeric() && c != '-', "_");
        let id = std::process::id();
        // A run that begins within a second of another one has another process.
        let name = format!("events.out.tfevents.{seconds:010}.{host}.{id}.0");
        let path = folder.join(name);
        let file = Appender::open(&path, 0).map_err(|e| {
            let what = format!("--metrics {}: {e}", path.display());
            Failure::new(Exit::BadInput, what)
        })?;
        let mut events = Events { file };
        events.write(0, &What::FileVersion(VERSION));
        events.write(step, &What::SessionLog(START));
        Ok(events)
    }

    /// Writes a step.
    pub fn step(&mut self, row: &Row) {
        let figures = row.figures().into_iter();
        let values = figures.filter_map(|(name, _, v)| Some((format!("train/{name}"), v? as f32)));
        let values: Vec<(String, f32)> = values.collect();
        self.write(row.step, &What::Summary(&values));
    }

    /// Writes a validation loss.
    pub fn validation(&mut self, step: u64, loss: f64) {
        let values = [("validation/loss".to_string(), loss as f32)];
        self.write(step, &What::Summary(&values));
    }

    /// Ends the file.
    pub fn finish(&mut self) {
        self.file.finish();
    }

    fn write(&mut self, step: u64, what: &What<'_>) {
        self.file.append(&record(&event(now(), step, what)));
    }
}

fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0.0, |t| t.as_secs_f64())
}

/// TensorFlow's `Event` as a protocol buffer: each field has its number and kind, then its value.
fn event(wall_time: f64, step: u64, what: &What<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    fixed(&mut out, 1, DOUBLE, &wall_time.to_le_bytes());
    number(&mut out, 2, step);
    match what {
        What::FileVersion(version) => block(&mut out, 3, version.as_bytes()),
        What::Summary(values) => {
            let mut summary = Vec::new();
            for (tag, value) in *values {
                let mut of = Vec::new();
                block(&mut of, 1, tag.as_bytes());
                fixed(&mut of, 2, FLOAT, &value.to_le_bytes());
                block(&mut summary, 1, &of);
            }
            block(&mut out, 5, &summary);
        }
        What::SessionLog(status) => {
            let mut log = Vec::new();
            number(&mut log, 1, *status);
            block(&mut out, 7, &log);
        }
    }
    out
}

/// Kinds of fields.
const NUMBER: u64 = 0;
const DOUBLE: u64 = 1;
const BLOCK: u64 = 2;
const FLOAT: u64 = 5;

fn varint(out: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

fn fixed(out: &mut Vec<u8>, field: u64, kind: u64, bytes: &[u8]) {
    varint(out, field << 3 | kind);
    out.extend_from_slice(bytes);
}

fn number(out: &mut Vec<u8>, field: u64, n: u64) {
    varint(out, field << 3 | NUMBER);
    varint(out, n);
}

fn block(out: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    varint(out, field << 3 | BLOCK);
    varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// A record of these bytes.
fn record(event: &[u8]) -> Vec<u8> {
    let length = (event.len() as u64).to_le_bytes();
    let check = |bytes: &[u8]| masked(crc32c::crc32c(bytes)).to_le_bytes();
    [&length[..], &check(&length), event, &check(event)].concat()
}

/// A checksum as it is stored, so that one of data with checksums in them is no weaker.
fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The events of a file, whose checksums have to be right.
    fn read(mut bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut events = Vec::new();
        while !bytes.is_empty() {
            let (length, rest) = bytes.split_at(8);
            let n = u64::from_le_bytes(length.try_into().unwrap()) as usize;
            let word = |at: usize| u32::from_le_bytes(rest[at..at + 4].try_into().unwrap());
            assert_eq!(word(0), masked(crc32c::crc32c(length)));
            let event = &rest[4..4 + n];
            assert_eq!(word(4 + n), masked(crc32c::crc32c(event)));
            events.push(event.to_vec());
            bytes = &rest[8 + n..];
        }
        events
    }

    /// The checksum of RFC 3720, and events byte by byte as TensorFlow's own messages have them.
    #[test]
    fn records_are_those_of_tensorflow() {
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
        let one = event(1.0, 0, &What::FileVersion(VERSION));
        assert_eq!(one, b"\x09\0\0\0\0\0\0\xf0\x3f\x10\0\x1a\x0dbrain.Event:2");
        let values = [("a".to_string(), 2.0)];
        let two = event(1.0, 300, &What::Summary(&values));
        let summary = b"\x2a\x0a\x0a\x08\x0a\x01a\x15\0\0\0\x40";
        assert_eq!(
            two,
            [&b"\x09\0\0\0\0\0\0\xf0\x3f\x10\xac\x02"[..], summary].concat()
        );
        let begins = event(1.0, 7, &What::SessionLog(START));
        assert_eq!(begins, b"\x09\0\0\0\0\0\0\xf0\x3f\x10\x07\x3a\x02\x08\x01");
    }

    #[test]
    fn files_have_the_figures_of_every_step() {
        let dir = tempfile::tempdir().unwrap();
        let mut events = Events::open(dir.path(), 7).unwrap();
        let row = Row {
            step: 7,
            loss: Some(2.5),
            grad_norm: None,
            lr: 0.5,
            tokens_per_s: Some(8.0),
            step_time_s: 0.25,
            mfu: None,
            peak_bytes: 1024,
            skipped_steps: 3,
        };
        events.step(&row);
        events.validation(8, 2.0);
        events.finish();
        let file = std::fs::read_dir(dir.path()).unwrap().next().unwrap();
        let all = read(&std::fs::read(file.unwrap().path()).unwrap());
        // Behind the time.
        let all: Vec<&[u8]> = all.iter().map(|e| &e[9..]).collect();
        let expected = |step: u64, what: &What<'_>| event(0.0, step, what)[9..].to_vec();
        let named = |(name, value): (&str, f32)| (name.to_string(), value);
        let figures = [
            ("train/loss", 2.5),
            ("train/lr", 0.5),
            ("train/tokens_per_s", 8.0),
            ("train/step_time_s", 0.25),
            ("train/peak_bytes", 1024.0),
            ("train/skipped_steps", 3.0),
        ];
        assert_eq!(
            all,
            [
                expected(0, &What::FileVersion(VERSION)),
                expected(7, &What::SessionLog(START)),
                expected(7, &What::Summary(&figures.map(named))),
                expected(8, &What::Summary(&[named(("validation/loss", 2.0))])),
            ]
        );
    }
}
