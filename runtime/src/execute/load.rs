//! A rank's part of a microbatch's data.

use super::local::Local;
use crate::error::RuntimeError;
use crate::rng::{self, Key};
use ir::op::InputKind;

/// Reads tokens: of which sample of the batch, from which of its tokens on.
pub(crate) type Read<'a> = dyn FnMut(u64, u64, &mut [u32]) -> Result<(), RuntimeError> + 'a;

/// Writes a rank's part of a microbatch's data, as [`load_tokens`] and [`load_images`] say.
pub(crate) fn load(
    kind: InputKind,
    local: &Local,
    first: u64,
    read: &mut Read<'_>,
    out: &mut [u8],
) -> Result<(), RuntimeError> {
    match kind {
        InputKind::Images => load_images(local, first, read, bytemuck::cast_slice_mut(out)),
        InputKind::Tokens
        | InputKind::Labels
        | InputKind::FurtherTokens { .. }
        | InputKind::FurtherLabels { .. } => {
            let out = bytemuck::cast_slice_mut(out);
            load_tokens(kind.shift(), local, first, read, out)
        }
    }
}

/// Writes a rank's part of a microbatch's synthetic images: normal noise, which a sample's first
/// token names. Equal tokens have equal images, whatever the run, so what follows a token can be
/// learnt from its image.
fn load_images(
    local: &Local,
    first: u64,
    read: &mut Read<'_>,
    out: &mut [f32],
) -> Result<(), RuntimeError> {
    out.fill(0.0);
    let Some((rows, of_image)) = local.ranges.split_first() else {
        return Err(RuntimeError::Program("images have no dims".into()));
    };
    let part = Local {
        dtype: local.dtype,
        lens: local.lens[1..].to_vec(),
        ranges: of_image.to_vec(),
    };
    let mut image = vec![0.0; part.lens.iter().product::<u64>() as usize];
    let key = Key::new(0, 0, "images");
    for (r, out) in (0..rows.valid).zip(out.chunks_exact_mut(part.elements().max(1))) {
        let mut token = [0];
        read(first + rows.start + r, 0, &mut token)?;
        rng::fill_normal(key, u64::from(token[0]) * image.len() as u64, &mut image);
        part.cut(&image, out);
    }
    Ok(())
}

/// Writes a rank's part of a microbatch's tokens or labels: `first` is the index in the batch of
/// the microbatch's first sample, `shift` which token of a sample comes first. Label `i` of a
/// sample is its token `i + 1`.
///
/// Asks `read` for what it needs and nothing else: of a sample, from a token on, as many as fit.
fn load_tokens(
    shift: u64,
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
        for (kind, shift) in [
            (InputKind::Tokens, 0),
            (InputKind::Labels, 1),
            (InputKind::FurtherTokens { by: 1 }, 1),
            (InputKind::FurtherLabels { by: 2 }, 3),
        ] {
            let (mut asked, mut out) = (Vec::new(), [7i32; 8]);
            let mut read = |sample, from, out: &mut [u32]| {
                asked.push((sample, from, out.len()));
                let of = |i: usize| (100 * sample + from) as u32 + i as u32;
                (0..out.len()).for_each(|i| out[i] = of(i));
                Ok(())
            };
            load(
                kind,
                &local,
                4,
                &mut read,
                bytemuck::cast_slice_mut(&mut out),
            )
            .unwrap();
            assert_eq!(asked, [(6, 8 + shift, 3)]);
            let first = 608 + shift as i32;
            assert_eq!(out, [first, first + 1, first + 2, 0, 0, 0, 0, 0]);
        }
    }

    /// Samples 0 and 2 have the same token. A rank that has the second channel of all three has
    /// what the rank with all of them has there, and zeros in its padding.
    #[test]
    fn an_image_is_named_by_its_token() {
        let tokens = [vec![5, 1], vec![6, 2], vec![5, 3]];
        let images = |local: &Local| {
            let mut out = vec![7.0f32; local.elements()];
            let bytes = bytemuck::cast_slice_mut(&mut out);
            load(InputKind::Images, local, 0, &mut given(&tokens), bytes).unwrap();
            out
        };
        let whole = Local::whole(DType::F32, &[3, 2, 2, 2]);
        let all = images(&whole);
        assert_eq!(all[..8], all[16..]);
        assert_ne!(all[..8], all[8..16]);
        let mut part = whole.clone();
        part.ranges[0].padded = 4;
        part.ranges[3] = LocalRange {
            start: 1,
            valid: 1,
            padded: 1,
        };
        let mut expected: Vec<f32> = all.iter().copied().skip(1).step_by(2).collect();
        expected.extend([0.0; 4]);
        assert_eq!(images(&part), expected);
    }
}
