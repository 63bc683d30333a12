//! Writing safetensors with Hugging Face's names and layout, in f32, one tensor at a time.
//!
//! Tensors stand in the order of their names and the header is padded with spaces to 8
//! bytes, as the format's own library writes them, so equal weights give equal files. Of a
//! parameter in several tensors the values are kept until the last of them is written.

use super::{check_length, stored_order};
use crate::{ImportError, ModelConfig, Param};
use serde_json::json;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Writes a model's weights to `path`; `supply` gives the values of each parameter, by path,
/// in our layout, and is asked once for each. The file appears under its name when complete.
///
/// Fails when the file cannot be written, when `supply` does, and when the number of values
/// is not what the parameter's shape needs.
pub fn export<E>(
    path: impl AsRef<Path>,
    config: &ModelConfig,
    mut supply: impl FnMut(&str) -> Result<Vec<f32>, E>,
) -> Result<(), ImportError>
where
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let path = path.as_ref();
    let params = config.params();
    let mut tensors: Vec<Tensor<'_>> = params.iter().flat_map(tensors_of).collect();
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let partial = partial_path(path);
    let write = |supply: &mut dyn FnMut(&Param) -> Result<Vec<f32>, ImportError>| -> Result<(), ImportError> {
        let io = |source| ImportError::Io { path: partial.clone(), source };
        let mut out = BufWriter::with_capacity(1 << 20, File::create(&partial).map_err(io)?);
        out.write_all(&header(&tensors)).map_err(io)?;
        // Values of parameters that are partly written, and the tensors that are left.
        let mut open: BTreeMap<&str, (Vec<f32>, u64)> = BTreeMap::new();
        for tensor in &tensors {
            let (param, path) = (tensor.param, tensor.param.path.as_str());
            let (values, left) = match open.remove(path) {
                Some(found) => found,
                None => {
                    let values = supply(param)?;
                    check_length(param, &values)?;
                    (values, param.pieces.unwrap_or(1))
                }
            };
            for value in stored_order(param, tensor.piece, &values) {
                out.write_all(&value.to_le_bytes()).map_err(io)?;
            }
            if left > 1 {
                open.insert(path, (values, left - 1));
            }
        }
        let file = out.into_inner().map_err(|e| io(e.into_error()))?;
        file.sync_all().map_err(io)?;
        std::fs::rename(&partial, path).map_err(|source| ImportError::Io { path: path.into(), source })
    };
    let result = write(&mut |p| {
        supply(&p.path).map_err(|e| ImportError::Supply {
            path: p.path.clone(),
            source: e.into(),
        })
    });
    if result.is_err() {
        // The first error is the one to report; a leftover that cannot be removed is harmless.
        let _ = std::fs::remove_file(&partial);
    }
    result
}

fn partial_path(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".partial");
    path.with_file_name(name)
}

/// One tensor of the file.
struct Tensor<'a> {
    name: String,
    param: &'a Param,
    /// Which of the parameter's tensors it is.
    piece: usize,
}

fn tensors_of(param: &Param) -> Vec<Tensor<'_>> {
    let names = param.hf_names().into_iter().enumerate();
    names
        .map(|(piece, name)| Tensor { name, param, piece })
        .collect()
}

/// Length and JSON of the header.
fn header(tensors: &[Tensor<'_>]) -> Vec<u8> {
    let mut text = String::from(r#"{"__metadata__":{"format":"pt"}"#);
    let mut offset = 0;
    for t in tensors {
        let end = offset + 4 * t.param.hf_shape.iter().product::<u64>();
        text += &format!(
            r#",{}:{{"dtype":"F32","shape":{},"data_offsets":[{offset},{end}]}}"#,
            json!(t.name),
            json!(t.param.hf_shape)
        );
        offset = end;
    }
    text.push('}');
    while text.len() % 8 != 0 {
        text.push(' ');
    }
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}
