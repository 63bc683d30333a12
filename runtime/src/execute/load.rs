//! A rank's part of a microbatch's data.

use super::local::Local;
use crate::error::RuntimeError;
use ir::op::InputKind;

/// Reads tokens: of which sample of the batch, from which of its tokens on.
pub(crate) type Read<'a> = dyn FnMut(u64, u64, &mut [u32]) -> Result<(), RuntimeError> + 'a;

/// Writes a rank's part of a microbatch's tokens or labels: `first` is the index in the batch of
/// the microbatch's first sample. Label `i` of a sample is its token `i + 1`.
///
/// Asks `read` for what it needs and nothing else: of a sample, from a token on, as many as fit.
pub(crate) fn load_tokens(
    kind: InputKind,
    local: &Local,
    first: u64,
    read: &mut Read<'_>,
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
    let mut tokens = vec![0; columns.valid as usize];
    for r in 0..n_rows {
        read(first + rows.start + r, columns.start + shift, &mut tokens)?;
        let row = &mut out[(r * columns.padded) as usize..][..tokens.len()];
        for (out, &token) in row.iter_mut().zip(&tokens) {
            *out = i32::try_from(token)
                .map_err(|_| RuntimeError::Batch(format!("token {token} exceeds 2^31 - 1")))?;
        }
    }
    Ok(())
}

/// Reads the tokens of a batch that is in memory.
pub(crate) fn given(
    samples: &[Vec<u32>],
) -> impl FnMut(u64, u64, &mut [u32]) -> Result<(), RuntimeError> + '_ {
    move |sample, from, out| {
        let tokens = samples.get(sample as usize);
        let tokens = tokens.and_then(|s| s.get(from as usize..from as usize + out.len()));
        let tokens = tokens.ok_or_else(|| {
            let to = from + out.len() as u64;
            RuntimeError::Batch(format!("sample {sample} has no tokens {from}..{to}"))
        })?;
        out.copy_from_slice(tokens);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::{DType, LocalRange};

    /// Samples 6 and 7, of which the second is padding, and tokens 8 to 10: a data rank's rows
    /// and a context rank's columns, and no token beside them.
    #[test]
    fn a_rank_asks_for_its_own_part_alone() {
        let range = |start, valid, padded| LocalRange {
            start,
            valid,
            padded,
        };
        let local = Local {
            dtype: DType::I32,
            lens: vec![3, 11],
            ranges: vec![range(2, 1, 2), range(8, 3, 4)],
        };
        for (kind, shift) in [(InputKind::Tokens, 0), (InputKind::Labels, 1)] {
            let (mut asked, mut out) = (Vec::new(), [7; 8]);
            let mut read = |sample, from, out: &mut [u32]| {
                asked.push((sample, from, out.len()));
                let of = |i: usize| (100 * sample + from) as u32 + i as u32;
                (0..out.len()).for_each(|i| out[i] = of(i));
                Ok(())
            };
            load_tokens(kind, &local, 4, &mut read, &mut out).unwrap();
            assert_eq!(asked, [(6, 8 + shift, 3)]);
            let first = 608 + shift as i32;
            assert_eq!(out, [first, first + 1, first + 2, 0, 0, 0, 0, 0]);
        }
    }
}
