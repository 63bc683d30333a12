//! Splits and windows over the tokens of one file.
//!
//! ```text
//!   tokens   [ 0 ........................... | ........... n )
//!              train                           validation = last floor(n * fraction) tokens
//!   window i of a split, sequence length s:  tokens  i*s ..= i*s + s   of the split
//! ```
//!
//! A window has `s + 1` tokens: inputs are the first `s`, targets the last `s`. Where a model
//! predicts further tokens (multi-token prediction), it has `s + 1 + f`, those that follow. Inputs
//! of different windows do not overlap, and no window crosses the line between the splits. A split
//! of `n` tokens has `(n - 1 - f) / s` windows; up to `s - 1` tokens at its end are not used.

use super::error::DataError;
use super::format::DataFormat;
use super::seen::Seen;
use super::source::TokenSource;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// How to read a data file.
#[derive(Clone, Debug, PartialEq)]
pub struct DataOptions {
    /// The format; `None`: `.bin` is llm.c's if its magic number is there, else nanoGPT's;
    /// any other file is text.
    pub format: Option<DataFormat>,
    /// A Hugging Face `tokenizer.json` for text; `None`: each byte is a token, ids 0 to 255.
    pub tokenizer: Option<PathBuf>,
    /// The model's vocabulary size; tokens must be below it.
    pub vocab: u32,
    /// The last this-much of the tokens is for validation; in `[0, 1)`.
    pub validation_fraction: f64,
    /// The tokens that a window has behind its last target.
    pub further: u64,
}

/// A part of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// The first part, trained on.
    Train,
    /// The last part, never trained on.
    Validation,
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Split::Train => "train",
            Split::Validation => "validation",
        })
    }
}

/// The tokens of a file, in two splits. Shared by reference between threads.
#[derive(Debug)]
pub struct Dataset {
    source: TokenSource,
    n_train: u64,
    tokenizer: Option<PathBuf>,
    further: u64,
    seen: OnceLock<Option<Seen>>,
}

impl Dataset {
    /// Opens the file at `path`.
    ///
    /// Text is read through once here: to check that it is UTF-8, or to tokenise it. Token
    /// files are not; their tokens are checked against the vocabulary as they are read, or by
    /// [`Dataset::check`].
    pub fn open(path: &Path, options: &DataOptions) -> Result<Self, DataError> {
        let fraction = options.validation_fraction;
        if !(0.0..1.0).contains(&fraction) {
            return Err(DataError::BadFraction(fraction));
        }
        if options.vocab == 0 {
            return Err(DataError::Zero("the vocabulary size"));
        }
        let tokenizer = options.tokenizer.as_deref();
        let source = TokenSource::open(path, options.format, tokenizer, options.vocab)?;
        let n_validation = (source.n_tokens as f64 * fraction).floor() as u64;
        let n_train = source.n_tokens.saturating_sub(n_validation);
        Ok(Dataset {
            source,
            n_train,
            tokenizer: options.tokenizer.clone(),
            further: options.further,
            seen: OnceLock::new(),
        })
    }

    /// Tokens in `split`.
    pub fn n_tokens(&self, split: Split) -> u64 {
        match split {
            Split::Train => self.n_train,
            Split::Validation => self.source.n_tokens - self.n_train,
        }
    }

    /// Windows of sequence length `seq` in `split`, at least 1.
    ///
    /// Fails if `seq` is 0 or the split has fewer tokens than a window.
    pub fn n_windows(&self, split: Split, seq: usize) -> Result<u64, DataError> {
        if seq == 0 {
            return Err(DataError::Zero("the sequence length"));
        }
        let tokens = self.n_tokens(split);
        let behind = self.further.saturating_add(1);
        match tokens.saturating_sub(behind) / seq as u64 {
            0 => Err(DataError::TooShort {
                path: self.source.path.clone(),
                split,
                tokens,
                seq,
                behind,
            }),
            windows => Ok(windows),
        }
    }

    /// The tokens of window `index` of `split`: inputs `[..seq]`, targets `[1..=seq]`, and the
    /// further ones.
    ///
    /// Fails as [`Dataset::read`] does.
    pub fn sample(&self, split: Split, index: u64, seq: usize) -> Result<Vec<u32>, DataError> {
        self.n_windows(split, seq)?;
        // There is such a window, in memory or a file.
        let mut tokens = vec![0; seq + 1 + self.further as usize];
        self.read(split, index, seq, 0, &mut tokens)?;
        Ok(tokens)
    }

    /// Reads tokens of a window, from its token `from` on.
    ///
    /// Fails if there is no such window or it has too few tokens, the file cannot be read, or a
    /// token is not below the vocabulary size.
    pub fn read(
        &self,
        split: Split,
        index: u64,
        seq: usize,
        from: u64,
        out: &mut [u32],
    ) -> Result<(), DataError> {
        let windows = self.n_windows(split, seq)?;
        let end = from.checked_add(out.len() as u64);
        if index >= windows || end.is_none_or(|end| end > seq as u64 + 1 + self.further) {
            let path = self.source.path.clone();
            return Err(DataError::NoSuchWindow {
                path,
                split,
                index,
                windows,
            });
        }
        // Below the number of tokens, as index < windows; and so is the length of a window.
        let start = self.start(split) + index * seq as u64;
        self.source.read(start + from, out)
    }

    /// Reads every token once, in constant memory, to find any that is out of vocabulary.
    pub fn check(&self) -> Result<(), DataError> {
        const TOKENS: usize = 1 << 16;
        let mut buffer = vec![0; TOKENS];
        let mut position = 0;
        while position < self.source.n_tokens {
            let n = (self.source.n_tokens - position).min(TOKENS as u64) as usize;
            self.source.read(position, &mut buffer[..n])?;
            position += n as u64;
        }
        Ok(())
    }

    /// The part that a checkpoint keeps of what the data are; none where a file cannot be read any more. The files are
    /// looked at once, long ones in parts.
    pub fn seen(&self) -> Option<&Seen> {
        let look = || Seen::of(&self.source.path, self.tokenizer.as_deref(), self.n_train).ok();
        self.seen.get_or_init(look).as_ref()
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.source.path
    }

    fn start(&self, split: Split) -> u64 {
        match split {
            Split::Train => 0,
            Split::Validation => self.n_train,
        }
    }
}
