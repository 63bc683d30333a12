//! Writing safetensors with Hugging Face's names and layout, in f32, one tensor at a time.
//!
//! Tensors stand in the order of their names and the header is padded with spaces to 8
//! bytes, as the format's own library writes them, so equal weights give equal files. Of a
//! parameter in several tensors the values are kept until the last of them is written.

use super::{check_length, put_stored};
use crate::{ImportError, ModelConfig, Param};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufWriter, Write};
use std::path::Path;

/// Writes a model's weights to `out`, which is called `path` in messages; `supply` gives the
/// values of each parameter, by path, in our layout, and is asked once for each.
///
/// Fails when `out` cannot be written, when `supply` fails, and when the number of values is not
/// what the parameter's shape needs.
pub fn export<E>(
    path: impl AsRef<Path>,
    out: &mut (impl Write + ?Sized),
    config: &ModelConfig,
    mut supply: impl FnMut(&str) -> Result<Vec<f32>, E>,
) -> Result<(), ImportError>
where
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let io = |source| ImportError::Io {
        path: path.as_ref().into(),
        source,
    };
    let params = config.params();
    let tensors = tensors_of(&params);
    let mut out = BufWriter::with_capacity(1 << 20, out);
    out.write_all(&header(&tensors)).map_err(io)?;
    // Values of parameters that are partly written, and the tensors that are left.
    let mut open: BTreeMap<&str, (Vec<f32>, u64)> = BTreeMap::new();
    for parts in tensors.values() {
        let mut stored: Vec<f32> = Vec::new();
        for &(param, piece) in parts {
            let path = param.path.as_str();
            let (values, left) = match open.remove(path) {
                Some(found) => found,
                None => {
                    let values = supply(path).map_err(|e| ImportError::Supply {
                        path: path.into(),
                        source: e.into(),
                    })?;
                    check_length(param, &values)?;
                    (values, param.pieces.unwrap_or(1))
                }
            };
            put_stored(param, piece, &values, &mut stored);
            if left > 1 {
                open.insert(path, (values, left - 1));
            }
        }
        for value in stored {
            out.write_all(&value.to_le_bytes()).map_err(io)?;
        }
    }
    out.flush().map_err(io)
}

/// The order in which [`export`] asks for the parameters of a model, by path.
pub fn export_order(config: &ModelConfig) -> Vec<String> {
    let params = config.params();
    let tensors = tensors_of(&params);
    let mut seen = BTreeSet::new();
    let paths = tensors.values().flatten().map(|(param, _)| &param.path);
    paths.filter(|path| seen.insert(*path)).cloned().collect()
}

/// The tensors of the file by name: the parameters that each holds, and which of a parameter's
/// tensors it is.
type Tensors<'a> = BTreeMap<String, Vec<(&'a Param, usize)>>;

fn tensors_of(params: &[Param]) -> Tensors<'_> {
    let mut tensors = Tensors::new();
    for param in params {
        for (piece, name) in param.hf_names().into_iter().enumerate() {
            tensors.entry(name).or_default().push((param, piece));
        }
    }
    tensors
}

/// Encodes the length and the JSON of the header.
fn header(tensors: &Tensors<'_>) -> Vec<u8> {
    let mut text = String::from(r#"{"__metadata__":{"format":"pt"}"#);
    let mut offset = 0;
    for (name, parts) in tensors {
        let shape = parts.first().map_or(&[][..], |(param, _)| &param.hf_shape);
        let end = offset + 4 * shape.iter().product::<u64>();
        text += &format!(
            r#",{}:{{"dtype":"F32","shape":{},"data_offsets":[{offset},{end}]}}"#,
            json!(name),
            json!(shape)
        );
        offset = end;
    }
    text.push('}');
    while text.len() % 8 != 0 {
        text.push(' ');
    }
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}
