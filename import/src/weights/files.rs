//! Which tensors are where: one safetensors file, or the shards that an index lists.

use super::header::{self, Entry};
use crate::ImportError;
use crate::config::without_position;
use crate::input;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Component, Path, PathBuf};

/// The longest index that is read, in bytes; a million tensors fit.
const MAX_INDEX: u64 = 256 << 20;
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// A tensor and the file that holds it.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    pub(super) file: PathBuf,
    pub(super) entry: Entry,
}

/// Returns the file that stands for the weights at `path`: the path itself, or of a folder the
/// single file or else the index, as transformers looks for them.
pub(super) fn locate(path: &Path) -> Result<PathBuf, ImportError> {
    let bad = |problem: String| ImportError::Format {
        file: path.into(),
        problem,
    };
    if path.is_dir() {
        return [SINGLE, INDEX]
            .map(|name| path.join(name))
            .into_iter()
            .find(|p| p.is_file())
            .ok_or_else(|| bad(format!("the folder has neither {SINGLE} nor {INDEX}")));
    }
    match path.extension().and_then(|e| e.to_str()) {
        Some("safetensors" | "json") => {
            std::fs::metadata(path).map_err(|source| ImportError::Io {
                path: path.into(),
                source,
            })?;
            Ok(path.into())
        }
        _ if !path.exists() => Err(bad("there is no such file or folder".into())),
        _ => Err(bad(
            "is neither a .safetensors file nor an index (.json) of such files".into(),
        )),
    }
}

/// Reads where all tensors under `path` are: in a `.safetensors` file, behind an index, or in a
/// folder with either.
pub(super) fn open(path: &Path) -> Result<BTreeMap<String, Stored>, ImportError> {
    let path = &locate(path)?;
    match path.extension().and_then(|e| e.to_str()) {
        Some("safetensors") => {
            let entries = read_file(path)?;
            Ok(entries
                .into_iter()
                .map(|(name, entry)| {
                    (
                        name,
                        Stored {
                            file: path.into(),
                            entry,
                        },
                    )
                })
                .collect())
        }
        // A located path is one or the other.
        _ => open_index(path),
    }
}

fn read_file(path: &Path) -> Result<BTreeMap<String, Entry>, ImportError> {
    let mut file = input::open(path).map_err(|source| ImportError::Io {
        path: path.into(),
        source,
    })?;
    header::read(path, &mut file)
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

fn open_index(path: &Path) -> Result<BTreeMap<String, Stored>, ImportError> {
    let bad = |problem: String| ImportError::Format {
        file: path.into(),
        problem,
    };
    let Index { weight_map } = read_index(path)?;
    let folder = path.parent().unwrap_or(Path::new(""));
    let mut tensors: BTreeMap<String, Stored> = BTreeMap::new();
    for shard in weight_map.values().collect::<BTreeSet<_>>() {
        // Shards lie beside the index; nothing else may be opened on a file's word.
        let plain = matches!(
            Path::new(shard).components().collect::<Vec<_>>()[..],
            [Component::Normal(_)]
        );
        if !plain || !shard.ends_with(".safetensors") {
            return Err(bad(format!(
                "shard {shard:?} is not the name of a .safetensors file in the same folder"
            )));
        }
        let file = folder.join(shard);
        for (name, entry) in read_file(&file)? {
            match weight_map.get(&name) {
                Some(owner) if owner == shard => {
                    tensors.insert(
                        name,
                        Stored {
                            file: file.clone(),
                            entry,
                        },
                    );
                }
                Some(owner) => {
                    return Err(bad(format!(
                        "tensor `{name}` is in {shard}, the index says {owner}"
                    )));
                }
                None => {
                    return Err(bad(format!(
                        "tensor `{name}` is in {shard} but not in the index"
                    )));
                }
            }
        }
    }
    match weight_map
        .iter()
        .find(|(name, _)| !tensors.contains_key(*name))
    {
        Some((name, shard)) => Err(bad(format!(
            "tensor `{name}` is not in {shard}, where the index says it is"
        ))),
        None => Ok(tensors),
    }
}

fn read_index(path: &Path) -> Result<Index, ImportError> {
    let io = |source| ImportError::Io {
        path: path.into(),
        source,
    };
    let mut bytes = Vec::new();
    input::open(path)
        .map_err(io)?
        .take(MAX_INDEX)
        .read_to_end(&mut bytes)
        .map_err(io)?;
    serde_json::from_slice(&bytes).map_err(|e| ImportError::Json {
        file: path.display().to_string(),
        line: e.line(),
        column: e.column(),
        problem: without_position(&e),
    })
}
