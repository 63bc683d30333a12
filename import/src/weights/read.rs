//! Reading one tensor as f32.

use super::files::Stored;
use crate::ImportError;
use crate::input;
use half::{bf16, f16};
use std::io::{Read, Seek, SeekFrom};

/// The bytes that are read at a time; conversion needs no second copy of the tensor.
const CHUNK: usize = 1 << 20;

/// Reads the values of a tensor in stored order; `name` is for messages. The dtype is one that
/// `check_type` lets pass.
pub(super) fn tensor(name: &str, stored: &Stored) -> Result<Vec<f32>, ImportError> {
    let io = |source| ImportError::Io {
        path: stored.file.clone(),
        source,
    };
    let (width, decode): (usize, fn(&[u8]) -> f32) = match stored.entry.dtype.as_str() {
        "F32" => (4, |b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        "F16" => (2, |b| f16::from_le_bytes([b[0], b[1]]).to_f32()),
        "BF16" => (2, |b| bf16::from_le_bytes([b[0], b[1]]).to_f32()),
        dtype => {
            return Err(ImportError::TensorDtype {
                file: stored.file.clone(),
                tensor: name.into(),
                dtype: dtype.into(),
            });
        }
    };
    let mut file = input::open(&stored.file).map_err(io)?;
    file.seek(SeekFrom::Start(stored.entry.start)).map_err(io)?;
    let total = stored.entry.len as usize;
    let mut values = Vec::with_capacity(total / width);
    let mut chunk = vec![0; CHUNK.min(total)];
    let mut left = total;
    while left > 0 {
        let part = &mut chunk[..left.min(CHUNK)];
        file.read_exact(part).map_err(io)?;
        for bytes in part.chunks_exact(width) {
            let value = decode(bytes);
            if !value.is_finite() {
                return Err(ImportError::NotFinite {
                    file: stored.file.clone(),
                    tensor: name.into(),
                    index: unravel(values.len() as u64, &stored.entry.shape),
                    value,
                });
            }
            values.push(value);
        }
        left -= part.len();
    }
    Ok(values)
}

/// Returns the coordinates of the element at `flat` in row-major order.
fn unravel(mut flat: u64, shape: &[u64]) -> Vec<u64> {
    let mut index = vec![0; shape.len()];
    for (i, &n) in index.iter_mut().zip(shape).rev() {
        *i = flat % n;
        flat /= n;
    }
    index
}
