//! The header of a safetensors file: 8 bytes of its length, little-endian, then JSON
//! `{name: {dtype, shape, data_offsets: [begin, end]}, "__metadata__": {..}}`, then the data.
//!
//! Invariants of what `read` returns, as the format demands: the tensors cover the data
//! without overlap or gap, and each has exactly the bytes that its dtype and shape need; so
//! no later read can leave the file or mix tensors.

use crate::ImportError;
use crate::config::without_position;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry as Slot;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The longest header that the format's own library accepts, in bytes.
const MAX_HEADER: u64 = 100_000_000;

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// The element type, as the format spells it.
    pub(super) dtype: String,
    /// The dims, outermost first.
    pub(super) shape: Vec<u64>,
    /// The first byte in the file.
    pub(super) start: u64,
    /// The length in bytes.
    pub(super) len: u64,
}

/// Reads and checks the header of an open file.
pub(super) fn read(path: &Path, file: &mut File) -> Result<BTreeMap<String, Entry>, ImportError> {
    let io = |source| ImportError::Io {
        path: path.into(),
        source,
    };
    let bad = |problem: String| ImportError::Format {
        file: path.into(),
        problem,
    };
    let size = file.metadata().map_err(io)?.len();
    if size < 8 {
        return Err(bad(format!(
            "{size} bytes; a safetensors file starts with 8 bytes of header length"
        )));
    }
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(io)?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER || length > size - 8 {
        let most = MAX_HEADER.min(size - 8);
        return Err(bad(format!(
            "the header would be {length} bytes; at most {most} fit (truncated, or not a safetensors file)"
        )));
    }
    // Bounded by the file's size, just above.
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header).map_err(io)?;
    let Header(tensors) = serde_json::from_slice(&header).map_err(|e| {
        bad(format!(
            "header, line {} column {}: {}",
            e.line(),
            e.column(),
            without_position(&e)
        ))
    })?;
    check(tensors, 8 + length, size).map_err(bad)
}

/// Checks the tensors' sizes, and that their offsets tile the data.
fn check(
    tensors: BTreeMap<String, Tensor>,
    data: u64,
    size: u64,
) -> Result<BTreeMap<String, Entry>, String> {
    let mut spans = Vec::with_capacity(tensors.len());
    let mut entries = BTreeMap::new();
    for (
        name,
        Tensor {
            dtype,
            shape,
            data_offsets: [begin, end],
        },
    ) in tensors
    {
        let width =
            width(&dtype).ok_or_else(|| format!("tensor `{name}` has unknown dtype `{dtype}`"))?;
        let needed = shape.iter().try_fold(width, |n, &d| n.checked_mul(d));
        let len = end
            .checked_sub(begin)
            .ok_or_else(|| format!("tensor `{name}` has offsets {begin} to {end}"))?;
        if needed != Some(len) {
            let needed = needed.map_or("more than 2^64".into(), |n| n.to_string());
            return Err(format!(
                "tensor `{name}`, {dtype} {shape:?}, needs {needed} bytes but has {len} (offsets {begin} to {end})"
            ));
        }
        if end > size - data {
            let have = size - data;
            return Err(format!(
                "tensor `{name}` ends at byte {end} of the data, which has {have} (truncated file?)"
            ));
        }
        spans.push((begin, end, name.clone()));
        entries.insert(
            name,
            Entry {
                dtype,
                shape,
                start: data + begin,
                len,
            },
        );
    }
    spans.sort();
    let mut covered = 0;
    for (begin, end, name) in spans {
        if begin != covered {
            let what = if begin < covered {
                "overlaps the one before"
            } else {
                "leaves a gap before it"
            };
            return Err(format!(
                "tensor `{name}` starts at byte {begin} of the data, expected {covered}: {what}"
            ));
        }
        covered = end;
    }
    if covered != size - data {
        return Err(format!(
            "the data has {} bytes, the tensors cover {covered}",
            size - data
        ));
    }
    Ok(entries)
}

/// Returns the bytes of one element; `None` for an unknown type.
fn width(dtype: &str) -> Option<u64> {
    match dtype {
        "BOOL" | "U8" | "I8" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" => Some(1),
        "F16" | "BF16" | "U16" | "I16" => Some(2),
        "F32" | "U32" | "I32" => Some(4),
        "F64" | "U64" | "I64" | "C64" => Some(8),
        _ => None,
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The header's tensors; a name that occurs twice is an error.
struct Header(BTreeMap<String, Tensor>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Tensors;
        impl<'de> Visitor<'de> for Tensors {
            type Value = Header;
            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut tensors = BTreeMap::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<BTreeMap<String, String>>()?;
                        continue;
                    }
                    match tensors.entry(name) {
                        Slot::Vacant(slot) => {
                            slot.insert(map.next_value()?);
                        }
                        Slot::Occupied(slot) => {
                            let name = slot.key();
                            return Err(A::Error::custom(format!("tensor `{name}` occurs twice")));
                        }
                    }
                }
                Ok(Header(tensors))
            }
        }
        d.deserialize_map(Tensors)
    }
}
