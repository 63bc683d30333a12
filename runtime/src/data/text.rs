//! Plain text: reading UTF-8 in pieces, and tokenising it.
//!
//! Tokenising needs a hundred bytes and more per token while it lasts, so the text goes
//! through the tokenizer in pieces of about a megabyte. A piece ends between a letter or digit
//! and a line end: GPT-2's, Llama 3's and related splitting patterns never join across such a
//! place, so for them the tokens equal those of the whole text. A tokenizer that works across
//! lines, or adds a mark before a text's first word, may differ at these few places.
//!
//! No special tokens are added at the ends of pieces or of the text; those written out in the
//! text, such as `<|endoftext|>`, become their ids.

use super::DataError;
use crate::files::open_input;
use std::fs::File;
use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use tokenizers::{ModelWrapper, Tokenizer};

/// Bytes in a piece of text; a piece is longer where no line ends after a letter or digit.
const PIECE_BYTES: usize = 1 << 20;
/// A piece longer than this is cut at any character.
const MAX_PIECE_BYTES: usize = 8 << 20;
/// The largest text that is tokenised on the fly: about 4 GB of tokens in memory.
pub(super) const MAX_TOKENIZED_BYTES: u64 = 4 << 30;

/// Fails with the place of the first byte that is not UTF-8.
pub(super) fn check_utf8(file: &mut File, path: &Path) -> Result<(), DataError> {
    for_each_piece(file, path, PIECE_BYTES, |_, _| Ok(()))
}

/// The tokens of the text in `file`, from its current position on.
pub(super) fn tokenize(
    file: &mut File,
    path: &Path,
    tokenizer: &Tokenizer,
) -> Result<Vec<u32>, DataError> {
    let mut tokens = Vec::new();
    for_each_piece(file, path, PIECE_BYTES, |position, text| {
        tokens.extend(
            encode(tokenizer, text).map_err(|reason| DataError::Tokenize {
                path: path.to_owned(),
                position,
                reason,
            })?,
        );
        Ok(())
    })?;
    Ok(tokens)
}

/// The tokenizer in the Hugging Face `tokenizer.json` at `path`.
///
/// Truncation and padding are switched off; they are for single inputs. So is BPE dropout,
/// which makes tokens random.
pub(super) fn load_tokenizer(path: &Path) -> Result<Tokenizer, DataError> {
    let read = || {
        let mut json = Vec::new();
        open_input(path)?.read_to_end(&mut json)?;
        Ok(json)
    };
    let json: Vec<u8> = read().map_err(DataError::io(path, "read"))?;
    parse_tokenizer(&json).map_err(|reason| DataError::BadTokenizer {
        path: path.to_owned(),
        reason,
    })
}

pub(super) fn parse_tokenizer(json: &[u8]) -> Result<Tokenizer, String> {
    guarded(|| {
        let mut tokenizer = Tokenizer::from_bytes(json)?;
        tokenizer.with_truncation(None)?;
        tokenizer.with_padding(None);
        if let ModelWrapper::BPE(bpe) = tokenizer.get_model()
            && bpe.dropout.is_some()
        {
            let mut bpe = bpe.clone();
            bpe.dropout = None;
            tokenizer.with_model(bpe);
        }
        Ok(tokenizer)
    })
}

fn encode(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, String> {
    guarded(|| Ok(tokenizer.encode_fast(text, false)?.get_ids().to_vec()))
}

/// Runs a call into the tokenizer library, which panics on some broken files instead of
/// failing (a `Precompiled` normalizer that cannot be decoded is one).
fn guarded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(payload) => Err(match payload.downcast::<String>() {
            Ok(message) => *message,
            Err(_) => "it contradicts itself".to_owned(),
        }),
    }
}

/// Calls `each(offset, piece)` for consecutive pieces of the text in `file`.
fn for_each_piece(
    file: &mut impl Read,
    path: &Path,
    piece_bytes: usize,
    mut each: impl FnMut(u64, &str) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let mut pending = Vec::new();
    let mut offset = 0;
    loop {
        let n_read = file
            .by_ref()
            .take(piece_bytes as u64)
            .read_to_end(&mut pending)
            .map_err(DataError::io(path, "read"))?;
        let at_end = n_read < piece_bytes;
        let text = valid_prefix(&pending, at_end).map_err(|valid_up_to| DataError::NotUtf8 {
            path: path.to_owned(),
            position: offset + valid_up_to as u64,
        })?;
        let cut = if at_end || pending.len() >= MAX_PIECE_BYTES {
            text.len()
        } else {
            last_boundary(text).unwrap_or(0)
        };
        if cut > 0 {
            each(offset, &text[..cut])?;
            offset += cut as u64;
            pending.drain(..cut);
        }
        if at_end {
            return Ok(());
        }
    }
}

/// The characters of `bytes`; unless `at_end`, the last may be incomplete and is left out.
/// Fails with the place of the first wrong byte.
fn valid_prefix(bytes: &[u8], at_end: bool) -> Result<&str, usize> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Ok(text),
        Err(error) => {
            let valid_up_to = error.valid_up_to();
            let incomplete = error.error_len().is_none() && !at_end;
            match std::str::from_utf8(&bytes[..valid_up_to]) {
                Ok(text) if incomplete => Ok(text),
                _ => Err(valid_up_to),
            }
        }
    }
}

/// The last place between a letter or digit and a line end.
fn last_boundary(text: &str) -> Option<usize> {
    text.rmatch_indices(['\n', '\r'])
        .map(|(index, _)| index)
        .find(|&index| text[..index].ends_with(char::is_alphanumeric))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pieces(mut bytes: &[u8], piece_bytes: usize) -> Result<Vec<(u64, String)>, DataError> {
        let mut pieces = Vec::new();
        for_each_piece(
            &mut bytes,
            Path::new("text"),
            piece_bytes,
            |offset, piece| {
                pieces.push((offset, piece.to_owned()));
                Ok(())
            },
        )?;
        Ok(pieces)
    }

    #[test]
    fn pieces_end_between_a_letter_and_a_line_end() {
        let text = "one.\ntwo\n\nthree four\nfive!\n";
        let got = pieces(text.as_bytes(), 12).unwrap();
        let expected = [(0, "one.\ntwo"), (8, "\n\nthree four"), (20, "\nfive!\n")];
        assert_eq!(
            got,
            expected.map(|(offset, piece)| (offset, piece.to_owned()))
        );
    }

    #[test]
    fn text_without_lines_is_cut_all_the_same() {
        let text = "\u{e9}".repeat(MAX_PIECE_BYTES);
        let got = pieces(text.as_bytes(), PIECE_BYTES + 1).unwrap();
        assert!(got.len() > 1);
        assert!(
            got.iter()
                .all(|(_, piece)| piece.len() <= MAX_PIECE_BYTES + PIECE_BYTES)
        );
        assert_eq!(
            got.iter()
                .map(|(_, piece)| piece.as_str())
                .collect::<String>(),
            text
        );
    }

    /// The example text gives the same tokens in one piece and in many.
    #[test]
    fn pieces_do_not_change_the_tokens() {
        let json = include_bytes!("../../../examples/data/tokenizer.json");
        let text = include_str!("../../../examples/data/northanger_abbey_volume_one.txt");
        let tokenizer = parse_tokenizer(json).unwrap();
        let whole = encode(&tokenizer, text).unwrap();
        for piece_bytes in [100, 1000, 10_000] {
            let pieces = pieces(text.as_bytes(), piece_bytes).unwrap();
            assert!(pieces.len() > text.len() / piece_bytes / 2);
            let parts = pieces
                .iter()
                .flat_map(|(_, piece)| encode(&tokenizer, piece).unwrap());
            assert_eq!(parts.collect::<Vec<u32>>(), whole);
        }
    }

    proptest! {
        #[test]
        fn pieces_make_up_the_text_or_name_the_wrong_byte(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..200),
            text in "(\\PC|\n){0,60}",
            piece_bytes in 1usize..40,
        ) {
            bytes.splice(0..0, text.bytes());
            match (pieces(&bytes, piece_bytes), std::str::from_utf8(&bytes)) {
                (Ok(pieces), Ok(text)) => {
                    let mut joined = String::new();
                    for (offset, piece) in pieces {
                        prop_assert_eq!(offset as usize, joined.len());
                        joined.push_str(&piece);
                    }
                    prop_assert_eq!(joined, text);
                }
                (Err(DataError::NotUtf8 { position, .. }), Err(error)) => {
                    prop_assert_eq!(position as usize, error.valid_up_to());
                }
                (got, expected) => prop_assert!(false, "{:?} for {:?}", got, expected),
            }
        }
    }
}
