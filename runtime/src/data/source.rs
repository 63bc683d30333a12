//! The tokens of one file as a list that can be read anywhere.

use super::error::DataError;
use super::format::{self, DataFormat, LLM_C_HEADER_BYTES, Layout, Width};
use super::text;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The tokens of a file. Reading takes `&self`, so the ranks of a process share one.
#[derive(Debug)]
pub(super) struct TokenSource {
    pub path: PathBuf,
    pub n_tokens: u64,
    /// Tokens are below this.
    vocab: u32,
    store: Store,
}

#[derive(Debug)]
enum Store {
    File {
        file: File,
        offset: u64,
        width: Width,
    },
    Memory(Vec<u32>),
}

impl TokenSource {
    /// Opens the file at `path`; text is checked or tokenised from start to end, `.bin` files
    /// are only measured.
    pub fn open(
        path: &Path,
        format: Option<DataFormat>,
        tokenizer: Option<&Path>,
        vocab: u32,
    ) -> Result<Self, DataError> {
        // A pipe would be waited for where it is opened.
        let metadata = std::fs::metadata(path).map_err(DataError::io(path, "open"))?;
        if !metadata.is_file() {
            return Err(DataError::NotAFile {
                path: path.to_owned(),
            });
        }
        let mut file = File::open(path).map_err(DataError::io(path, "open"))?;
        let metadata = file.metadata().map_err(DataError::io(path, "measure"))?;
        let len = metadata.len();
        let head = read_head(&mut file, path)?;
        let format = format.unwrap_or_else(|| format::detect(path, &head));
        let Layout {
            offset,
            width,
            n_tokens,
        } = format::layout(format, path, &head, len)?;

        let (store, n_tokens) = match (format, tokenizer) {
            (DataFormat::Text, Some(tokenizer)) => {
                let tokens = tokens_of_text(&mut file, path, len, tokenizer)?;
                let n_tokens = tokens.len() as u64;
                (Store::Memory(tokens), n_tokens)
            }
            (DataFormat::Text, None) => {
                text::check_utf8(&mut file, path)?;
                (
                    Store::File {
                        file,
                        offset,
                        width,
                    },
                    n_tokens,
                )
            }
            (_, Some(tokenizer)) => {
                return Err(DataError::TokenizerUnused {
                    path: path.to_owned(),
                    tokenizer: tokenizer.to_owned(),
                });
            }
            (_, None) => (
                Store::File {
                    file,
                    offset,
                    width,
                },
                n_tokens,
            ),
        };
        Ok(TokenSource {
            path: path.to_owned(),
            n_tokens,
            vocab,
            store,
        })
    }

    /// Reads the tokens `start .. start + out.len()`, which the caller knows to exist.
    ///
    /// Fails if the file cannot be read (it may have shrunk since) or a token is not below
    /// the vocabulary size.
    pub fn read(&self, start: u64, out: &mut [u32]) -> Result<(), DataError> {
        match &self.store {
            Store::Memory(tokens) => {
                let start = start as usize;
                out.copy_from_slice(&tokens[start..start + out.len()]);
            }
            Store::File {
                file,
                offset,
                width,
            } => {
                let mut bytes = vec![0; out.len() * width.bytes()];
                let at = offset + start * width.bytes() as u64;
                file.read_exact_at(&mut bytes, at)
                    .map_err(DataError::io(&self.path, "read"))?;
                decode(*width, &bytes, out);
            }
        }
        match out.iter().position(|&token| token >= self.vocab) {
            None => Ok(()),
            Some(index) => Err(DataError::TokenOutOfVocab {
                path: self.path.clone(),
                position: start + index as u64,
                token: out[index],
                vocab: self.vocab,
            }),
        }
    }
}

/// The start of `file`, as much as a header takes; leaves `file` at its start.
fn read_head(file: &mut File, path: &Path) -> Result<Vec<u8>, DataError> {
    let mut head = Vec::new();
    file.take(LLM_C_HEADER_BYTES as u64)
        .read_to_end(&mut head)
        .map_err(DataError::io(path, "read"))?;
    file.rewind().map_err(DataError::io(path, "rewind"))?;
    Ok(head)
}

fn tokens_of_text(
    file: &mut File,
    path: &Path,
    len: u64,
    tokenizer: &Path,
) -> Result<Vec<u32>, DataError> {
    let limit = text::MAX_TOKENIZED_BYTES;
    if len > limit {
        return Err(DataError::TextTooLarge {
            path: path.to_owned(),
            len,
            limit,
        });
    }
    let tokenizer = text::load_tokenizer(tokenizer)?;
    text::tokenize(file, path, &tokenizer)
}

/// Little-endian tokens; `bytes` holds exactly `out.len()` of them.
fn decode(width: Width, bytes: &[u8], out: &mut [u32]) {
    match width {
        Width::One => {
            for (token, byte) in out.iter_mut().zip(bytes) {
                *token = u32::from(*byte);
            }
        }
        Width::Two => {
            let (pairs, _) = bytes.as_chunks();
            for (token, pair) in out.iter_mut().zip(pairs) {
                *token = u32::from(u16::from_le_bytes(*pair));
            }
        }
        Width::Four => {
            let (quads, _) = bytes.as_chunks();
            for (token, quad) in out.iter_mut().zip(quads) {
                *token = u32::from_le_bytes(*quad);
            }
        }
    }
}
