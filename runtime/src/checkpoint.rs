//! Checkpoints: the training state as one safetensors file, full tensors by path.
//!
//! Nothing in it depends on the plan, so a run can go on under any other. The number of steps
//! done is in the file's metadata as `step`.

use crate::error::RuntimeError;
use crate::execute::{StateTensor, States};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::collections::HashMap;
use std::path::Path;

/// Writes `states` after `step` steps to a file, replacing it when all is written.
pub fn save(path: &Path, states: &States, step: u64) -> Result<(), RuntimeError> {
    let error = |problem: String| RuntimeError::Checkpoint {
        path: path.to_owned(),
        problem,
    };
    let mut views = Vec::with_capacity(states.len());
    for (name, tensor) in states {
        let shape = tensor.lens.iter().map(|&n| n as usize).collect();
        let view = TensorView::new(Dtype::F32, shape, bytemuck::cast_slice(&tensor.values));
        views.push((
            name.as_str(),
            view.map_err(|e| error(format!("state `{name}`: {e}")))?,
        ));
    }
    let metadata = HashMap::from([
        ("step".to_string(), step.to_string()),
        ("format".to_string(), "meshwright-states-1".to_string()),
    ]);
    let unfinished = path.with_extension("unfinished");
    safetensors::serialize_to_file(views, Some(metadata), &unfinished)
        .map_err(|e| error(e.to_string()))?;
    std::fs::rename(&unfinished, path).map_err(|e| error(e.to_string()))
}

/// Reads states and the number of steps done.
pub fn load(path: &Path) -> Result<(States, u64), RuntimeError> {
    let error = |problem: String| RuntimeError::Checkpoint {
        path: path.to_owned(),
        problem,
    };
    let bytes = std::fs::read(path).map_err(|e| error(format!("cannot read: {e}")))?;
    let not_safetensors =
        |e: safetensors::SafeTensorError| error(format!("no checkpoint, or a damaged one: {e}"));
    let (_, header) = SafeTensors::read_metadata(&bytes).map_err(not_safetensors)?;
    let step = header
        .metadata()
        .as_ref()
        .and_then(|m| m.get("step"))
        .and_then(|s| s.parse().ok());
    let step = step.ok_or_else(|| {
        error("its metadata have no `step`: not a checkpoint of a training state".into())
    })?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(not_safetensors)?;
    let mut states = States::new();
    for (name, view) in tensors.iter() {
        if view.dtype() != Dtype::F32 {
            return Err(error(format!(
                "state `{name}` is {:?}, expected f32",
                view.dtype()
            )));
        }
        // The file's bytes need not be aligned.
        let values = view
            .data()
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect();
        states.insert(
            name.to_string(),
            StateTensor {
                lens: view.shape().iter().map(|&n| n as u64).collect(),
                values,
            },
        );
    }
    Ok((states, step))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_come_back_as_they_were() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.safetensors");
        let tensor = |lens: &[u64], values: &[f32]| StateTensor {
            lens: lens.to_vec(),
            values: values.to_vec(),
        };
        let states = States::from([
            (
                "h.0.w".into(),
                tensor(&[2, 2], &[1.0, -0.0, f32::MIN_POSITIVE, 3e38]),
            ),
            ("loss_scale".into(), tensor(&[], &[0.5])),
        ]);
        save(&path, &states, 17).unwrap();
        assert_eq!(load(&path).unwrap(), (states, 17));
        std::fs::write(&path, b"nonsense").unwrap();
        assert!(
            load(&path)
                .unwrap_err()
                .to_string()
                .contains("state.safetensors")
        );
        assert!(load(&dir.path().join("missing")).is_err());
    }
}
