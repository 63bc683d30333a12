//! How tokens lie in a file: recognising the format and reading the header.
//!
//! - **nanoGPT**: little-endian `u16` tokens from the first byte to the last.
//! - **llm.c**: 256 little-endian `i32` words of header, then the tokens. Word 0 is a magic
//!   number, word 1 the version, word 2 the number of tokens, the rest is not used.
//!   Magic 20240520, version 1: GPT-2 tokens, `u16`. Magic 20240801, version 7: Llama 3
//!   tokens, `u32`. (llm.c, `dev/data/data_common.py`.)
//! - **text**: UTF-8; as bytes, each byte is a token.
//!
//! A nanoGPT file cannot be taken for llm.c's: it would have to begin with the token 55432 or
//! 55713, above GPT-2's 50257, followed by 308.

use super::DataError;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Bytes in llm.c's header.
pub(super) const LLM_C_HEADER_BYTES: usize = 256 * 4;

/// A kind of data file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DataFormat {
    /// nanoGPT's `.bin`: `u16` tokens, no header.
    #[serde(rename = "nanogpt")]
    NanoGpt,
    /// llm.c's `.bin`: header, then `u16` (GPT-2) or `u32` (Llama 3) tokens.
    #[serde(rename = "llm.c")]
    LlmC,
    /// UTF-8 text: bytes, or ids of a tokenizer where one is given.
    Text,
}

/// Where the tokens are in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub offset: u64,
    pub width: Width,
    pub n_tokens: u64,
}

/// Bytes per token; little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    One,
    Two,
    Four,
}

impl Width {
    pub fn bytes(self) -> usize {
        match self {
            Width::One => 1,
            Width::Two => 2,
            Width::Four => 4,
        }
    }
}

/// The two variants of llm.c's header.
struct LlmC {
    magic: i32,
    version: i32,
    width: Width,
}

const LLM_C: [LlmC; 2] = [
    LlmC {
        magic: 20_240_520,
        version: 1,
        width: Width::Two,
    },
    LlmC {
        magic: 20_240_801,
        version: 7,
        width: Width::Four,
    },
];

/// The format of the file called `path` that begins with `head`.
///
/// Files called `.bin` hold tokens, llm.c's if the magic number says so; all others are text.
pub(super) fn detect(path: &Path, head: &[u8]) -> DataFormat {
    if !path
        .extension()
        .is_some_and(|e| e.eq_ignore_ascii_case("bin"))
    {
        DataFormat::Text
    } else if LLM_C.iter().any(|kind| word(head, 0) == Some(kind.magic)) {
        DataFormat::LlmC
    } else {
        DataFormat::NanoGpt
    }
}

/// Where the tokens are in the file at `path`, of `len` bytes, beginning with `head`.
///
/// `head` is the whole file or at least [`LLM_C_HEADER_BYTES`] of it.
pub(super) fn layout(
    format: DataFormat,
    path: &Path,
    head: &[u8],
    len: u64,
) -> Result<Layout, DataError> {
    if len == 0 {
        return Err(DataError::Empty {
            path: path.to_owned(),
        });
    }
    match format {
        DataFormat::Text => Ok(Layout {
            offset: 0,
            width: Width::One,
            n_tokens: len,
        }),
        DataFormat::NanoGpt if !len.is_multiple_of(2) => Err(DataError::Truncated {
            path: path.to_owned(),
            len,
            inside: "a token of 2 bytes",
        }),
        DataFormat::NanoGpt => Ok(Layout {
            offset: 0,
            width: Width::Two,
            n_tokens: len / 2,
        }),
        DataFormat::LlmC => llm_c_layout(path, head, len),
    }
}

fn llm_c_layout(path: &Path, head: &[u8], len: u64) -> Result<Layout, DataError> {
    let field = |index| {
        word(head, index).ok_or_else(|| DataError::Truncated {
            path: path.to_owned(),
            len,
            inside: "the header of 1024 bytes",
        })
    };
    let mismatch = |field, found: i32, expected: String| DataError::Header {
        path: path.to_owned(),
        field,
        found: i64::from(found),
        expected,
    };
    // All of the header must be there, although only three words of it are used.
    field(LLM_C_HEADER_BYTES / 4 - 1)?;

    let magic = field(0)?;
    let kind = LLM_C
        .iter()
        .find(|kind| kind.magic == magic)
        .ok_or_else(|| {
            mismatch(
                "the magic number",
                magic,
                format!("{} or {}", LLM_C[0].magic, LLM_C[1].magic),
            )
        })?;
    let version = field(1)?;
    if version != kind.version {
        return Err(mismatch("the version", version, kind.version.to_string()));
    }

    // The header is there, so this is not negative.
    let body = len.saturating_sub(LLM_C_HEADER_BYTES as u64);
    let (width, inside) = match kind.width {
        Width::Four => (4, "a token of 4 bytes"),
        _ => (2, "a token of 2 bytes"),
    };
    if !body.is_multiple_of(width) {
        return Err(DataError::Truncated {
            path: path.to_owned(),
            len,
            inside,
        });
    }
    let (found, n_tokens) = (field(2)?, body / width);
    if u64::try_from(found) != Ok(n_tokens) {
        return Err(mismatch(
            "the token count",
            found,
            format!("{n_tokens} from the file's length"),
        ));
    }
    if n_tokens == 0 {
        return Err(DataError::Empty {
            path: path.to_owned(),
        });
    }
    Ok(Layout {
        offset: LLM_C_HEADER_BYTES as u64,
        width: kind.width,
        n_tokens,
    })
}

/// The `index`-th little-endian word of `head`, if `head` reaches that far.
fn word(head: &[u8], index: usize) -> Option<i32> {
    let bytes = head.get(index * 4..index * 4 + 4)?;
    Some(i32::from_le_bytes(bytes.try_into().ok()?))
}
