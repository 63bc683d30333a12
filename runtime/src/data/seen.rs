//! The data of a run, as a checkpoint keeps them: to tell that a run goes on with others.

use crate::files::open_regular;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

/// A file up to this many bytes is hashed whole.
const WHOLE: u64 = 16 << 20;
/// So many parts of a longer one are, evenly spread, the first and the last among them.
const PARTS: u64 = 64;
/// Bytes of each.
const PART: u64 = 64 << 10;

/// The data of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seen {
    /// Name of the file, without its folder.
    pub file: String,
    /// Its bytes.
    pub bytes: u64,
    /// Hash of them; of a long file, of its length and of parts.
    pub blake3: String,
    /// Hash of the tokenizer's file; none of files of tokens, and where bytes are tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<String>,
    /// Tokens that are trained on: those that are not kept for validation.
    pub train_tokens: u64,
}

impl Seen {
    /// Looks at the files at `path` and `tokenizer`.
    ///
    /// Fails where they cannot be read.
    pub(super) fn of(path: &Path, tokenizer: Option<&Path>, train_tokens: u64) -> io::Result<Seen> {
        let (bytes, blake3) = fingerprint(path)?;
        let tokenizer = tokenizer.map(fingerprint).transpose()?;
        let name = path.file_name().unwrap_or(path.as_os_str());
        Ok(Seen {
            file: name.to_string_lossy().into_owned(),
            bytes,
            blake3,
            tokenizer: tokenizer.map(|(_, blake3)| blake3),
            train_tokens,
        })
    }

    /// Says in what `self` differs from `other`, which a run goes on with: the words end "it was
    /// trained ..". None where the samples are the same.
    pub fn difference(&self, other: &Seen) -> Option<&'static str> {
        match other {
            o if (o.bytes, &o.blake3) != (self.bytes, &self.blake3) => Some("on other data"),
            o if o.tokenizer != self.tokenizer => Some("with another tokenizer"),
            o if o.train_tokens != self.train_tokens => {
                Some("with another share of the data kept for validation")
            }
            _ => None,
        }
    }
}

/// Length and hash of a file.
fn fingerprint(path: &Path) -> io::Result<(u64, String)> {
    let mut file = open_regular(path)?;
    let bytes = file.metadata()?.len();
    let mut hasher = blake3::Hasher::new();
    if bytes <= WHOLE {
        hasher.update_reader(file)?;
        return Ok((bytes, hasher.finalize().to_string()));
    }
    hasher.update(&bytes.to_le_bytes());
    let last = bytes - PART;
    for i in 0..PARTS {
        let at = (u128::from(last) * u128::from(i) / u128::from(PARTS - 1)) as u64;
        file.seek(SeekFrom::Start(at))?;
        let mut part = Vec::with_capacity(PART as usize);
        (&mut file).take(PART).read_to_end(&mut part)?;
        hasher.update(&part);
    }
    Ok((bytes, hasher.finalize().to_string()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test may stop at what it does not expect.

    use super::*;

    #[test]
    fn other_data_are_told_from_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| {
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        let (a, b) = (write("a.txt", b"one two"), write("b.txt", b"one two"));
        let (c, tokenizer) = (write("c.txt", b"one six"), write("t.json", b"{}"));
        let seen = |path: &Path, tokenizer: Option<&Path>, n| Seen::of(path, tokenizer, n).unwrap();
        let first = seen(&a, None, 6);
        assert_eq!((first.file.as_str(), first.bytes), ("a.txt", 7));
        // A file that was moved is the same.
        assert_eq!(first.difference(&seen(&b, None, 6)), None);
        assert_eq!(first.difference(&seen(&c, None, 6)), Some("on other data"));
        let other = seen(&a, Some(&tokenizer), 6);
        assert_eq!(first.difference(&other), Some("with another tokenizer"));
        assert!(
            first
                .difference(&seen(&a, None, 5))
                .unwrap()
                .contains("validation")
        );
        assert!(Seen::of(&folder.path().join("none"), None, 1).is_err());
    }

    #[test]
    fn long_files_differ_by_length_and_by_parts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("long.bin");
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(WHOLE + 5).unwrap();
        let first = fingerprint(&path).unwrap();
        file.set_len(WHOLE + 6).unwrap();
        let longer = fingerprint(&path).unwrap();
        assert_ne!(first, longer);
        std::io::Write::write_all(&mut &file, b"x").unwrap();
        assert_ne!(fingerprint(&path).unwrap(), longer);
    }
}
