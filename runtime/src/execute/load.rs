//! A rank's part of a microbatch's data.

use super::local::Local;
use crate::error::RuntimeError;
use ir::op::InputKind;

/// Writes a rank's part of a microbatch's tokens or labels: `first` is the index in `batch`
/// of the microbatch's first sample. Label `i` of a sample is its token `i + 1`.
pub(crate) fn load_tokens(
    kind: InputKind,
    local: &Local,
    first: u64,
    batch: &[Vec<u32>],
    out: &mut [i32],
) -> Result<(), RuntimeError> {
    let [rows, columns] = local.ranges[..] else {
        return Err(RuntimeError::Program(format!(
            "data are loaded into {:?}, expected [batch, sequence]",
            local.lens
        )));
    };
    out.fill(0);
    let shift = match kind {
        InputKind::Tokens => 0,
        InputKind::Labels => 1,
    };
    let n_rows = if columns.valid == 0 { 0 } else { rows.valid };
    for r in 0..n_rows {
        let sample = first + rows.start + r;
        let from = (columns.start + shift) as usize;
        let tokens = batch
            .get(sample as usize)
            .and_then(|s| s.get(from..from + columns.valid as usize));
        let tokens = tokens.ok_or_else(|| {
            RuntimeError::Batch(format!(
                "sample {sample} has no tokens {from}..{}",
                from + columns.valid as usize
            ))
        })?;
        let row = &mut out[(r * columns.padded) as usize..][..tokens.len()];
        for (out, &token) in row.iter_mut().zip(tokens) {
            *out = i32::try_from(token)
                .map_err(|_| RuntimeError::Batch(format!("token {token} exceeds 2^31 - 1")))?;
        }
    }
    Ok(())
}
