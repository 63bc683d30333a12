//! `.metadata`: which tensors a checkpoint has, and in which file each of their chunks begins.

use super::archive::lens;
use super::pickle::{At, Class, Node, Pickle, Writer};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Longest name of a tensor or file, bytes.
const LONGEST_NAME: usize = 4096;
const OF_METADATA: &str = "torch.distributed.checkpoint.metadata";

/// The content of a checkpoint.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Metadata {
    pub tensors: BTreeMap<String, Tensor>,
    /// Entries that are Python objects. They are not read.
    pub objects: Vec<String>,
}

/// A tensor in chunks.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Tensor {
    /// The type, as PyTorch names it.
    pub dtype: &'static str,
    /// Global lengths.
    pub lens: Vec<u64>,
    pub chunks: Vec<Chunk>,
}

/// A part of a tensor, and the archive that has it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Chunk {
    pub start: Vec<u64>,
    pub shape: Vec<u64>,
    /// A file beside the metadata.
    pub file: String,
    pub at: u64,
    pub bytes: u64,
}

/// Where an archive lies.
struct Place {
    file: String,
    at: u64,
    bytes: u64,
}

/// Archives by tensor and first index of the chunk.
type Places<'a> = BTreeMap<(&'a str, Vec<u64>), Place>;

impl Metadata {
    /// Fails where a pickle is of something else, its chunks are not in files beside it, or they do
    /// not make whole tensors.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let p = Pickle::read(bytes)?;
        let root = p.root();
        let part = |name: &str| {
            let found = p.field(root, Class::Metadata, name).map(|at| p.dict(at));
            let missing = || format!("no metadata of a checkpoint: it has no `{name}`");
            found.flatten().ok_or_else(missing)
        };
        let mut places = places(&p, part("storage_data")?)?;
        let mut all = Metadata::default();
        for &(name, about) in part("state_dict_metadata")? {
            let name = p.text(name).filter(|n| n.len() <= LONGEST_NAME);
            let name = name.ok_or("a tensor's name is no text, or too long")?;
            if p.made(about, Class::Bytes).is_some() {
                all.objects.push(name.into());
                continue;
            }
            let tensor = tensor(&p, name, about, &mut places);
            let tensor = tensor.map_err(|what| format!("tensor `{name}`: {what}"))?;
            if all.tensors.insert(name.into(), tensor).is_some() {
                return Err(format!("tensor `{name}` is there twice"));
            }
        }
        Ok(all)
    }

    /// The pickle of it.
    pub fn write(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.object(OF_METADATA, "Metadata", |w| {
            w.dict(|w| {
                w.text("state_dict_metadata");
                w.dict(|w| {
                    for (name, tensor) in &self.tensors {
                        w.text(name);
                        write_tensor(w, tensor);
                    }
                });
                // How a flat dictionary is made of the names: by themselves.
                w.text("planner_data");
                w.dict(|w| {
                    for name in self.tensors.keys() {
                        w.text(name);
                        w.tuple(|w| w.text(name));
                    }
                });
                w.text("storage_data");
                w.dict(|w| {
                    for (name, tensor) in &self.tensors {
                        for (i, chunk) in tensor.chunks.iter().enumerate() {
                            write_place(w, (name, i as u64), chunk);
                        }
                    }
                });
                w.text("storage_meta");
                w.none();
                w.text("version");
                w.text("1.0.0");
            });
        });
        w.end()
    }
}

fn places<'a>(p: &'a Pickle, data: &[(At, At)]) -> Result<Places<'a>, String> {
    let mut places = Places::new();
    for &(index, info) in data {
        let bad = || "an entry of its `storage_data` is not what PyTorch writes".to_string();
        let of = |name| p.field(index, Class::Index, name);
        let name = of("fqn").and_then(|at| p.text(at)).ok_or_else(bad)?;
        // Python objects have no first index.
        let Some(start) = of("offset").and_then(|at| lens(p, at)) else {
            continue;
        };
        let of = |name| p.field(info, Class::StorageInfo, name);
        let number = |name| u64::try_from(of(name).and_then(|at| p.int(at))?).ok();
        let descriptors = of("transform_descriptors").map(|at| p.node(at));
        if descriptors.is_some_and(|d| *d != Node::None) {
            return Err(format!(
                "`{name}` was written through an extension (compressed, perhaps), which is not read"
            ));
        }
        let file = of("relative_path")
            .and_then(|at| p.text(at))
            .ok_or_else(bad)?;
        let is_beside = Path::new(file).file_name() == Some(file.as_ref());
        if !is_beside || file.len() > LONGEST_NAME || file.contains('\0') {
            return Err(format!(
                "a chunk of `{name}` would be in {file:?}, which is not the name of a file beside it"
            ));
        }
        let place = Place {
            file: file.into(),
            at: number("offset").ok_or_else(bad)?,
            bytes: number("length").ok_or_else(bad)?,
        };
        if places.insert((name, start), place).is_some() {
            return Err(format!("a chunk of `{name}` is there twice"));
        }
    }
    Ok(places)
}

fn tensor<'a>(
    p: &'a Pickle,
    name: &'a str,
    about: At,
    places: &mut Places<'a>,
) -> Result<Tensor, String> {
    let of = |field| p.field(about, Class::Tensor, field);
    let bad = || "it is not described as PyTorch does".to_string();
    let lens_of = |at: Option<At>| at.and_then(|at| lens(p, at)).ok_or_else(bad);
    let all = lens_of(of("size"))?;
    let dtype = of("properties").and_then(|at| p.made(at, Class::Properties));
    let dtype = dtype.and_then(|(_, state)| p.tuple(state?)?.first().copied());
    let Some(Node::Class(Class::Type(dtype))) = dtype.map(|at| p.node(at)) else {
        return Err(bad());
    };
    let Some(Node::List(listed)) = of("chunks").map(|at| p.node(at)) else {
        return Err(bad());
    };
    let mut chunks = Vec::new();
    for &chunk in listed {
        let of = |field| lens_of(p.field(chunk, Class::Chunk, field));
        let (start, shape) = (of("offsets")?, of("sizes")?);
        let ends = start.iter().zip(&shape).map(|(a, n)| a.checked_add(*n));
        let fits = ends
            .zip(&all)
            .all(|(end, len)| end.is_some_and(|e| e <= *len));
        if [start.len(), shape.len()] != [all.len(); 2] || !fits {
            return Err(format!("{shape:?} at {start:?} is no part of {all:?}"));
        }
        // Taken out, so that no archive is of two chunks, and a list that is named again and again
        // ends at its second reading.
        let place = places.remove(&(name, start.clone()));
        let place = place.ok_or_else(|| format!("no file has its chunk at {start:?}"))?;
        let Place { file, at, bytes } = place;
        chunks.push(Chunk {
            start,
            shape,
            file,
            at,
            bytes,
        });
    }
    check_cover(&all, &chunks)?;
    Ok(Tensor {
        dtype,
        lens: all,
        chunks,
    })
}

/// Fails unless the chunks, which are inside, have each element once.
fn check_cover(all: &[u64], chunks: &[Chunk]) -> Result<(), String> {
    let product = |n: &[u64]| n.iter().try_fold(1u64, |all, n| all.checked_mul(*n));
    let whole = product(all).ok_or("it has more elements than can be counted")?;
    let parts = chunks
        .iter()
        .try_fold(0u64, |sum, c| sum.checked_add(product(&c.shape)?));
    if parts != Some(whole) {
        return Err(format!("its chunks do not make {all:?}"));
    }
    // As many elements as there are, and inside: they are all of it unless two overlap. Each is
    // compared with those that begin before it ends in the first dim.
    let mut sorted: Vec<&Chunk> = chunks.iter().filter(|c| !c.shape.contains(&0)).collect();
    sorted.sort_by_key(|c| &c.start);
    let span = |c: &Chunk, d: usize| (c.start[d], c.start[d] + c.shape[d]);
    for (i, a) in sorted.iter().enumerate() {
        let later = sorted[i + 1..].iter();
        let near = later.take_while(|b| all.is_empty() || b.start[0] < span(a, 0).1);
        for (n, b) in near.enumerate() {
            if n >= MOST_NEIGHBOURS {
                return Err(format!(
                    "more than {MOST_NEIGHBOURS} chunks lie beside the one at {:?}",
                    a.start
                ));
            }
            let meet = |d| span(a, d).0 < span(b, d).1 && span(b, d).0 < span(a, d).1;
            if (0..all.len()).all(meet) {
                return Err(format!(
                    "its chunks at {:?} and {:?} overlap",
                    a.start, b.start
                ));
            }
        }
    }
    Ok(())
}

/// Chunks with which one is compared, of which more are refused: a bound on the work for a hostile
/// file. Real ones have as many as there are ranks.
const MOST_NEIGHBOURS: usize = 1 << 14;

fn write_tensor(w: &mut Writer, tensor: &Tensor) {
    let size = |w: &mut Writer, lens: &[u64]| {
        w.class("torch", "Size");
        w.call(|w| w.ints(lens));
    };
    w.object(OF_METADATA, "TensorStorageMetadata", |w| {
        w.dict(|w| {
            w.text("properties");
            w.object(OF_METADATA, "TensorProperties", |w| {
                w.tuple(|w| {
                    w.class("torch", tensor.dtype);
                    w.class("torch.serialization", "_get_layout");
                    w.call(|w| w.text("torch.strided"));
                    w.no();
                    w.class(OF_METADATA, "_MEM_FORMAT_ENCODING");
                    w.call(|w| w.int(0));
                    w.no();
                });
            });
            w.text("size");
            size(w, &tensor.lens);
            w.text("chunks");
            w.list(|w| {
                for chunk in &tensor.chunks {
                    w.object(OF_METADATA, "ChunkStorageMetadata", |w| {
                        w.dict(|w| {
                            w.text("offsets");
                            size(w, &chunk.start);
                            w.text("sizes");
                            size(w, &chunk.shape);
                        });
                    });
                }
            });
        });
    });
}

fn write_place(w: &mut Writer, (name, index): (&str, u64), chunk: &Chunk) {
    w.object(OF_METADATA, "MetadataIndex", |w| {
        w.dict(|w| {
            w.text("fqn");
            w.text(name);
            w.text("index");
            w.int(index);
            w.text("offset");
            w.class("torch", "Size");
            w.call(|w| w.ints(&chunk.start));
        });
    });
    let module = "torch.distributed.checkpoint.filesystem";
    w.object(module, "_StorageInfo", |w| {
        w.dict(|w| {
            w.text("relative_path");
            w.text(&chunk.file);
            w.text("offset");
            w.int(chunk.at);
            w.text("length");
            w.int(chunk.bytes);
        });
    });
}

/// Names of a list, the first few and how many more.
pub(super) fn listed(names: &BTreeSet<&str>) -> String {
    let first: Vec<String> = names.iter().take(5).map(|n| format!("`{n}`")).collect();
    match names.len().saturating_sub(first.len()) {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_chunks() -> Metadata {
        let chunk = |start: [u64; 2], file: &str, at| Chunk {
            start: start.into(),
            shape: vec![2, 3],
            file: file.into(),
            at,
            bytes: 700,
        };
        let tensor = Tensor {
            dtype: "float32",
            lens: vec![4, 3],
            chunks: vec![
                chunk([0, 0], "__0_0.distcp", 0),
                chunk([2, 0], "__1_0.distcp", 1 << 40),
            ],
        };
        Metadata {
            tensors: [("h.0.attn.qkv.weight".into(), tensor)].into(),
            objects: Vec::new(),
        }
    }

    #[test]
    fn metadata_are_read_as_they_were_written() {
        let all = two_chunks();
        assert_eq!(Metadata::parse(&all.write()).unwrap(), all);
    }

    #[test]
    fn chunks_that_are_no_whole_are_refused() {
        let refuse = |change: &dyn Fn(&mut Tensor), words: &str| {
            let mut all = two_chunks();
            all.tensors.values_mut().for_each(change);
            let said = Metadata::parse(&all.write()).unwrap_err();
            assert!(said.contains(words), "{said}");
        };
        refuse(&|t| drop(t.chunks.pop()), "do not make [4, 3]");
        refuse(&|t| t.chunks[1].start[0] = 1, "overlap");
        refuse(&|t| t.chunks[1].start[0] = 3, "no part of [4, 3]");
        refuse(&|t| t.chunks[1].start[0] = u64::MAX, "no part of [4, 3]");
        refuse(&|t| t.chunks[1].start[0] = 0, "twice");
        refuse(&|t| t.chunks[0].file = "../secret".into(), "beside it");
        refuse(&|t| t.chunks[0].file = "/etc/passwd".into(), "beside it");
    }

    #[test]
    fn a_cut_off_file_is_told() {
        let whole = two_chunks().write();
        for n in 0..whole.len() {
            assert!(Metadata::parse(&whole[..n]).is_err(), "{n} bytes");
        }
    }
}
