//! The errors of data, with the place and the evidence.

use super::Split;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// Why data cannot be used. Every variant about a file names it.
#[derive(Debug, Error)]
pub enum DataError {
    /// The operating system refused; a missing file is the usual case.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The action that was tried, as in "cannot open".
        action: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// A directory, pipe or device.
    #[error("{}: not a regular file", path.display())]
    NotAFile {
        /// The file.
        path: PathBuf,
    },
    /// There is nothing in it.
    #[error("{}: empty", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// The file ends inside a token or the header.
    #[error("{}: truncated: {len} bytes, which end inside {inside}", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Its length in bytes.
        len: u64,
        /// The incomplete part.
        inside: &'static str,
    },
    /// A field of the header is not what the format or the file's length says.
    #[error("{}: header: {field} is {found}, expected {expected}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// Which field.
        field: &'static str,
        /// Its value.
        found: i64,
        /// The expected value.
        expected: String,
    },
    /// A token that the model has no embedding for.
    #[error("{}: token {token} at position {position} is not below the vocabulary size {vocab}", path.display())]
    TokenOutOfVocab {
        /// The file.
        path: PathBuf,
        /// Index of the token, counted from 0 at the start of the file's tokens.
        position: u64,
        /// Its value.
        token: u32,
        /// The model's vocabulary size.
        vocab: u32,
    },
    /// A split has fewer tokens than one window.
    #[error("{}: the {split} split has {tokens} tokens; one window of sequence length {seq} needs {seq} + {behind}", path.display())]
    TooShort {
        /// The file.
        path: PathBuf,
        /// Which part of it.
        split: Split,
        /// Tokens in that part.
        tokens: u64,
        /// Sequence length asked for.
        seq: usize,
        /// Tokens behind the inputs of a window: the last target, and further ones.
        behind: u64,
    },
    /// There is no such window.
    #[error("{}: window {index} asked for; the {split} split has {windows}", path.display())]
    NoSuchWindow {
        /// The file.
        path: PathBuf,
        /// Which part of it.
        split: Split,
        /// Index asked for.
        index: u64,
        /// Windows there are.
        windows: u64,
    },
    /// The text is not UTF-8.
    #[error("{}: not UTF-8 at byte {position}", path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// Offset of the first byte that is wrong.
        position: u64,
    },
    /// The `tokenizer.json` cannot be used.
    #[error("{}: not a usable tokenizer: {reason}", path.display())]
    BadTokenizer {
        /// The `tokenizer.json`.
        path: PathBuf,
        /// The tokenizer library's reason.
        reason: String,
    },
    /// The tokenizer failed on a piece of the text.
    #[error("{}: the tokenizer failed in the text from byte {position} on: {reason}", path.display())]
    Tokenize {
        /// The text.
        path: PathBuf,
        /// Offset of the piece's first byte.
        position: u64,
        /// The tokenizer library's reason.
        reason: String,
    },
    /// Text through a tokenizer is held in memory as tokens, so there is a limit.
    #[error("{}: {len} bytes of text, above the limit of {limit} for text tokenised on the fly; tokenise it to a .bin file first", path.display())]
    TextTooLarge {
        /// The text.
        path: PathBuf,
        /// Its length in bytes.
        len: u64,
        /// The largest length allowed.
        limit: u64,
    },
    /// A tokenizer was given for a file that holds tokens already.
    #[error("{}: holds tokens, not text; the tokenizer {} has no use", path.display(), tokenizer.display())]
    TokenizerUnused {
        /// The data.
        path: PathBuf,
        /// The tokenizer.
        tokenizer: PathBuf,
    },
    /// The validation fraction is not a fraction that leaves something to train on.
    #[error("validation fraction {}: it must be at least 0 and below 1", ir::Figure(*.0))]
    BadFraction(f64),
    /// A count that must not be zero is.
    #[error("{0} is 0")]
    Zero(&'static str),
    /// The words of another process about its data.
    #[error("{0}")]
    Elsewhere(String),
}

impl DataError {
    /// For `map_err` after file operations: "cannot `action`".
    pub(super) fn io<'a>(
        path: &'a std::path::Path,
        action: &'static str,
    ) -> impl FnOnce(io::Error) -> DataError + 'a {
        move |source| DataError::Io {
            path: path.to_owned(),
            action,
            source,
        }
    }
}
