//! Weights: safetensors files to parameters in our layout, one tensor at a time, and back.
//!
//! [`Weights::open`] reads headers only, and checks that the files hold exactly the model's
//! tensors; [`Weights::param`] reads one tensor. Names are accepted with the model's prefix
//! (`transformer.`, `model.`) or without, as transformers saves with and without the head. Buffers
//! that old files carry (GPT-2's `attn.bias` masks, Llama's `rotary_emb.inv_freq`) are ignored, and
//! so are layers that predict further tokens, where the configuration has none. A tied model's
//! `lm_head.weight` is accepted if it equals the embedding.

mod export;
mod files;
mod header;
mod read;

pub use export::{export, export_order};

use crate::config::{Plain, Version};
use crate::{ImportError, ModelConfig, Param};
use files::Stored;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The name of the output table in model files.
pub(crate) const HEAD_NAME: &str = "lm_head.weight";

/// A tensor of Hugging Face's files: name, shape, values in row-major order.
pub type HfTensor = (String, Vec<usize>, Vec<f32>);

/// The weights of a model, in files.
#[derive(Debug)]
pub struct Weights {
    /// Each parameter with the tensors that hold it, in order.
    params: BTreeMap<String, (Param, Vec<(String, Stored)>)>,
}

impl Weights {
    /// Opens a `.safetensors` file, a `model.safetensors.index.json`, or a folder with one.
    ///
    /// Fails when a file cannot be read or breaks its format, and when tensors are missing,
    /// unexpected, or of another shape or dtype than the config says. Values are checked
    /// when they are read.
    pub fn open(path: impl AsRef<Path>, config: &ModelConfig) -> Result<Self, ImportError> {
        let path = path.as_ref();
        let mut stored = strip_prefixes(path, config, files::open(path)?)?;
        check_plain(&stored)?;
        let (mut params, mut missing) = (BTreeMap::new(), Vec::new());
        let mut is_whole_without_modules = true;
        // A tensor may hold several parameters.
        let mut used = BTreeSet::new();
        for param in config.params() {
            let mut tensors = Vec::new();
            for wanted in param.hf_names() {
                let key = bare(config, &wanted);
                match stored.get(key) {
                    Some((name, found)) => {
                        check_type(&param, name, found)?;
                        tensors.push((name.clone(), found.clone()));
                        used.insert(key.to_string());
                    }
                    None if missing.contains(&wanted) => {}
                    None => {
                        is_whole_without_modules &= param.path.starts_with("h.mtp.");
                        missing.push(wanted);
                    }
                }
            }
            params.insert(param.path.clone(), (param, tensors));
        }
        stored.retain(|key, _| !used.contains(key));
        if !missing.is_empty() {
            let (file, tensors) = (path.into(), missing);
            return Err(match is_whole_without_modules {
                true => ImportError::MissingModules { file, tensors },
                false => ImportError::MissingTensors { file, tensors },
            });
        }
        let weights = Weights { params };
        if config.tied()
            && let Some((name, head)) = stored.remove(HEAD_NAME)
        {
            weights.check_tied(&name, &head)?;
        }
        let unexpected: Vec<String> = stored
            .into_iter()
            .filter(|(bare, _)| !is_buffer(config, bare))
            .map(|(_, (name, _))| name)
            .collect();
        if !unexpected.is_empty() {
            return Err(ImportError::UnexpectedTensors {
                file: path.into(),
                tensors: unexpected,
            });
        }
        Ok(weights)
    }

    /// Returns the file that [`Weights::open`] would open first; fails when there is nothing at
    /// `path` that can be weights. Needs no configuration.
    pub fn locate(path: impl AsRef<Path>) -> Result<PathBuf, ImportError> {
        files::locate(path.as_ref())
    }

    /// Reads the values of a parameter, row-major in our layout.
    ///
    /// Opens the file anew. Fails on unknown paths, read errors, NaN and infinities.
    pub fn param(&self, path: &str) -> Result<Vec<f32>, ImportError> {
        let (param, tensors) = self
            .params
            .get(path)
            .ok_or_else(|| ImportError::NoSuchParam { path: path.into() })?;
        let mut all = Vec::new();
        for (name, stored) in tensors {
            let mut values = read::tensor(name, stored)?;
            if let Some(rows) = &param.rows {
                values = rows.take(&values, param.row_elements());
            }
            let ours = match param.transposed {
                true => transpose(&values, param.row_elements()),
                false => values,
            };
            if tensors.len() == 1 {
                return Ok(ours);
            }
            all.extend(ours);
        }
        Ok(all)
    }

    /// Returns the paths of all parameters, ascending.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.params.keys().map(String::as_str)
    }

    /// Checks that a stored head of a tied model equals the embedding, bit for bit.
    fn check_tied(&self, name: &str, head: &Stored) -> Result<(), ImportError> {
        let (table, tensors) = &self.params["embed.wte.weight"];
        let (table_name, table_stored) = &tensors[0];
        check_type(table, name, head)?;
        let (a, b) = (
            read::tensor(name, head)?,
            read::tensor(table_name, table_stored)?,
        );
        if a == b {
            return Ok(());
        }
        Err(ImportError::Format {
            file: head.file.clone(),
            problem: format!(
                "`{name}` differs from `{table_name}`, but the config ties them (`tie_word_embeddings`)"
            ),
        })
    }
}

/// Returns the names of the tensors that hold a parameter in Hugging Face's files.
///
/// Fails when the model has no such parameter.
pub fn map_param_to_hf(config: &ModelConfig, path: &str) -> Result<Vec<String>, ImportError> {
    Ok(find(config, path)?.hf_names())
}

/// Converts a parameter (or its gradient, or moment) to Hugging Face's tensors. Of a tensor that
/// holds other parameters too, their rows are zero: the tensor is the sum of what its parameters
/// give.
///
/// Fails when the model has no such parameter, or `values` has another length.
pub fn to_hf(
    config: &ModelConfig,
    path: &str,
    values: &[f32],
) -> Result<Vec<HfTensor>, ImportError> {
    let param = find(config, path)?;
    check_length(&param, values)?;
    let shape: Vec<usize> = param.hf_shape.iter().map(|&n| n as usize).collect();
    let names = param.hf_names().into_iter().enumerate();
    Ok(names
        .map(|(i, name)| {
            let mut stored = Vec::new();
            put_stored(&param, i, values, &mut stored);
            (name, shape.clone(), stored)
        })
        .collect())
}

fn find(config: &ModelConfig, path: &str) -> Result<Param, ImportError> {
    config
        .params()
        .into_iter()
        .find(|p| p.path == path)
        .ok_or_else(|| ImportError::NoSuchParam { path: path.into() })
}

fn check_length(param: &Param, values: &[f32]) -> Result<(), ImportError> {
    if values.len() as u64 != param.elements() {
        return Err(ImportError::ParamLength {
            path: param.path.clone(),
            shape: param.shape.clone(),
            found: values.len(),
            expected: param.elements(),
        });
    }
    Ok(())
}

/// Writes the values of one of a parameter's tensors to their places in the order of the file;
/// `stored` is the tensor, which grows to its length.
fn put_stored(param: &Param, piece: usize, values: &[f32], stored: &mut Vec<f32>) {
    let n = match param.pieces {
        Some(pieces) => values.len() / pieces.max(1) as usize,
        None => values.len(),
    };
    let (values, width) = (&values[piece * n..(piece + 1) * n], param.row_elements());
    let rows = match param.transposed {
        true => transpose(values, n / width.max(1)),
        false => values.to_vec(),
    };
    match &param.rows {
        None => *stored = rows,
        Some(places) => {
            stored.resize(param.hf_shape.iter().product::<u64>() as usize, 0.0);
            places.put(&rows, width, stored);
        }
    }
}

/// Transposes a row-major matrix of `cols` columns, tile by tile for the cache's sake.
fn transpose(from: &[f32], cols: usize) -> Vec<f32> {
    const TILE: usize = 32;
    let rows = from.len() / cols;
    let mut to = vec![0.0; from.len()];
    for r0 in (0..rows).step_by(TILE) {
        for c0 in (0..cols).step_by(TILE) {
            for r in r0..(r0 + TILE).min(rows) {
                for c in c0..(c0 + TILE).min(cols) {
                    to[c * rows + r] = from[r * cols + c];
                }
            }
        }
    }
    to
}

/// Returns a tensor's name without the model's prefix.
fn bare<'a>(config: &ModelConfig, name: &'a str) -> &'a str {
    let prefix = match config {
        ModelConfig::Gpt2(_) => "transformer.",
        ModelConfig::Llama(_) => "model.",
        ModelConfig::Decoder(c) => match c.family {
            Plain::Opt => "model.decoder.",
            Plain::GptNeox => "gpt_neox.",
            Plain::Nemotron => "model.",
            Plain::Bloom => "transformer.",
        },
        ModelConfig::Latent(_) => "model.",
        // transformers has other names in memory than in files.
        ModelConfig::Hybrid(_) if name.starts_with("backbone.") => "backbone.",
        ModelConfig::Hybrid(_) => "model.",
        ModelConfig::WideResnet(_) => "",
    };
    name.strip_prefix(prefix).unwrap_or(name)
}

/// Indexes tensors by their bare names, keeping the names that the file uses.
fn strip_prefixes(
    path: &Path,
    config: &ModelConfig,
    stored: BTreeMap<String, Stored>,
) -> Result<BTreeMap<String, (String, Stored)>, ImportError> {
    let mut by_bare: BTreeMap<String, (String, Stored)> = BTreeMap::new();
    for (name, tensor) in stored {
        let key = bare(config, &name).to_string();
        if let Some((other, _)) = by_bare.get(&key) {
            let problem = format!("`{other}` and `{name}` are the same tensor of the model");
            return Err(ImportError::Format {
                file: PathBuf::from(path),
                problem,
            });
        }
        by_bare.insert(key, (name, tensor));
    }
    Ok(by_bare)
}

/// Checks that experts are not quantized: published gpt-oss has blocks of four-bit numbers (MXFP4)
/// with a scale each for every such matrix.
fn check_plain(stored: &BTreeMap<String, (String, Stored)>) -> Result<(), ImportError> {
    let is_block = |key: &&String| key.contains(".experts.") && key.ends_with("_proj_blocks");
    let Some((name, found)) = stored.keys().find(is_block).map(|key| &stored[key]) else {
        return Ok(());
    };
    Err(ImportError::Format {
        file: found.file.clone(),
        problem: format!(
            "`{name}` is quantized (MXFP4), and weights are read in f32, f16 or bf16; transformers writes \
             them in bf16: load the model with `quantization_config=Mxfp4Config(dequantize=True)` and \
             call its `save_pretrained`"
        ),
    })
}

fn check_type(param: &Param, name: &str, stored: &Stored) -> Result<(), ImportError> {
    let (file, tensor) = (stored.file.clone(), name.to_string());
    if stored.entry.shape != param.hf_shape {
        let (found, expected) = (stored.entry.shape.clone(), param.hf_shape.clone());
        return Err(ImportError::TensorShape {
            file,
            tensor,
            found,
            expected,
        });
    }
    if !matches!(stored.entry.dtype.as_str(), "F32" | "F16" | "BF16") {
        return Err(ImportError::TensorDtype {
            file,
            tensor,
            dtype: stored.entry.dtype.clone(),
        });
    }
    Ok(())
}

/// Recognises constants that old versions of transformers saved with the weights.
fn is_buffer(config: &ModelConfig, bare: &str) -> bool {
    let layered = |scope: &str, leaves: &[&str]| {
        bare.strip_prefix(scope)
            .and_then(|rest| rest.split_once('.'))
            .is_some_and(|(layer, leaf)| {
                layer.parse::<u64>().is_ok_and(|l| l < config.n_layers()) && leaves.contains(&leaf)
            })
    };
    match config {
        ModelConfig::Gpt2(_) => layered("h.", &["attn.bias", "attn.masked_bias"]),
        ModelConfig::Llama(_) => {
            layered("layers.", &["self_attn.rotary_emb.inv_freq"]) || bare == "rotary_emb.inv_freq"
        }
        ModelConfig::Decoder(_) => layered(
            "layers.",
            &[
                "attention.bias",
                "attention.masked_bias",
                "attention.rotary_emb.inv_freq",
                "self_attn.rotary_emb.inv_freq",
            ],
        ),
        // What stands behind the last layer predicts further tokens; where it is read, all but its
        // copies of the embedding and the head.
        ModelConfig::Latent(c) => {
            let layer = bare.strip_prefix("layers.").and_then(|r| r.split_once('.'));
            let behind =
                |(number, _): &(&str, &str)| number.parse().is_ok_and(|n: u64| n >= c.layers);
            let is_copy = |leaf| ["embed_tokens.weight", "shared_head.head.weight"].contains(&leaf);
            let is_read = c.further.is_some();
            c.version == Version::V3
                && layer
                    .filter(behind)
                    .is_some_and(|(_, leaf)| !is_read || is_copy(leaf))
                || layered("layers.", &["self_attn.rotary_emb.inv_freq"])
        }
        // What predicts further tokens.
        ModelConfig::Hybrid(c) => c.further.is_none() && bare.starts_with("mtp."),
        ModelConfig::WideResnet(_) => false,
    }
}
