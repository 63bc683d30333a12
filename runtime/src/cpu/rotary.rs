//! Rotary position embedding (Su et al. 2021), in the rotate-half convention.
//!
//! Element i of a head is paired with element i + D/2, and the pair is turned by the angle
//! `position * inv_freq[i]`. As in transformers, frequencies, angles and their sines are `f32`:
//! models are trained with these roundings.

/// How a model stretches the frequencies beyond its pretraining length.
///
/// Source: transformers `modeling_rope_utils`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Frequencies as they are ("default").
    None,
    /// All frequencies divided by `factor`.
    Linear {
        /// Divisor of the frequencies.
        factor: f64,
    },
    /// Llama 3.1: short wavelengths kept, long ones divided by `factor`, between them a blend.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original_max_position / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_position / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Sequence length of pretraining, in tokens.
        original_max_position: f64,
    },
    /// YaRN (Peng et al. 2023): frequencies of many turns kept, those of few divided by `factor`,
    /// between them a blend, pair by pair.
    Yarn {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Turns within the pretraining length above which a frequency is kept.
        beta_fast: f64,
        /// Turns below which it is divided.
        beta_slow: f64,
        /// Sequence length of pretraining, in tokens.
        original_max_position: f64,
        /// Whether the blend begins and ends at whole pairs.
        truncate: bool,
        /// Factor of sines and cosines.
        magnitude: f64,
    },
}

impl RopeScaling {
    /// The factor of sines and cosines.
    pub fn magnitude(self) -> f32 {
        match self {
            RopeScaling::Yarn { magnitude, .. } => magnitude as f32,
            _ => 1.0,
        }
    }
}

/// Frequencies `theta^(-2i / dim)` for i in 0..dim/2, scaled, in radians per position.
///
/// `dim` is the head dim. Computed in `f64` and rounded once.
///
/// # Panics
/// When `dim` is odd.
pub fn inv_freq(theta: f64, dim: usize, scaling: RopeScaling) -> Vec<f32> {
    assert!(
        dim.is_multiple_of(2),
        "rotary needs an even head dim, not {dim}"
    );
    let plain = (0..dim / 2).map(|i| theta.powf(-((2 * i) as f64) / dim as f64));
    let all = plain.enumerate();
    all.map(|(pair, freq)| scale(freq, (pair, dim, theta), scaling) as f32)
        .collect()
}

/// One frequency after `scaling`, that of pair `pair` of a head of `dim` elements.
fn scale(freq: f64, (pair, dim, theta): (usize, usize, f64), scaling: RopeScaling) -> f64 {
    match scaling {
        RopeScaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            original_max_position,
            truncate,
            ..
        } => {
            // The pair, not a whole number, that turns so many times.
            let pair_of = |turns: f64| {
                let angle = original_max_position / (turns * 2.0 * std::f64::consts::PI);
                dim as f64 * angle.ln() / (2.0 * theta.ln())
            };
            let (mut first, mut last) = (pair_of(beta_fast), pair_of(beta_slow));
            if truncate {
                (first, last) = (first.floor(), last.ceil());
            }
            (first, last) = (first.max(0.0), last.min(dim as f64 - 1.0));
            if first == last {
                last += 0.001;
            }
            let divided = ((pair as f64 - first) / (last - first)).clamp(0.0, 1.0);
            freq / factor * divided + freq * (1.0 - divided)
        }
        RopeScaling::None => freq,
        RopeScaling::Linear { factor } => freq / factor,
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position,
        } => {
            let wavelength = 2.0 * std::f64::consts::PI / freq;
            if wavelength < original_max_position / high_freq_factor {
                return freq;
            }
            if wavelength > original_max_position / low_freq_factor {
                return freq / factor;
            }
            let turns = original_max_position / wavelength;
            let kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
            (1.0 - kept) * freq / factor + kept * freq
        }
    }
}

/// Turns every head of `x`, of shape `dims` = `[B, S, heads.., D]`, into `out` of the same shape.
///
/// Row s of the sequence is at position `positions[s]`; `inv_freq` has an entry for each pair of
/// elements that turns, D/2 where all of a head does. Those behind them stay as they are.
/// Turned elements are multiplied by `magnitude`. `inverse` turns the other way, which gives the
/// gradient with respect to `x`, and the inverse where the magnitude is 1.
///
/// # Panics
/// When the shapes do not fit.
pub fn rotate(
    x: &[f32],
    dims: &[usize],
    positions: &[usize],
    (inv_freq, magnitude): (&[f32], f32),
    inverse: bool,
    out: &mut [f32],
) {
    let &[batch, seq, ref heads @ .., dim] = dims else {
        panic!("rotary needs dims [B, S, heads.., D], not {dims:?}");
    };
    let heads: usize = heads.iter().product();
    let half = inv_freq.len();
    assert!(
        2 * half <= dim,
        "{half} frequencies for a head dim of {dim}"
    );
    assert_eq!(
        x.len(),
        batch * seq * heads * dim,
        "elements of x against {dims:?}"
    );
    assert_eq!(x.len(), out.len(), "elements of the output");
    if x.is_empty() {
        return;
    }
    assert_eq!(positions.len(), seq, "a position for every row");
    let mut turns = angles(positions, inv_freq, inverse);
    if magnitude != 1.0 {
        turns
            .iter_mut()
            .for_each(|(cos, sin)| (*cos, *sin) = (*cos * magnitude, *sin * magnitude));
    }
    let rows = x
        .chunks_exact(heads * dim)
        .zip(out.chunks_exact_mut(heads * dim));
    for ((x_row, out_row), s) in rows.zip((0..seq).cycle()) {
        let turn = &turns[s * half..][..half];
        for (x, out) in x_row.chunks_exact(dim).zip(out_row.chunks_exact_mut(dim)) {
            turn_head(x, turn, out);
            out[2 * half..].copy_from_slice(&x[2 * half..]);
        }
    }
}

/// (cos, sin) of the angles, `[positions, D/2]`; negative angles when `inverse`.
fn angles(positions: &[usize], inv_freq: &[f32], inverse: bool) -> Vec<(f32, f32)> {
    let sign = if inverse { -1.0 } else { 1.0 };
    let positions = positions.iter().map(|&position| position as f32);
    let angle = positions.flat_map(|position| inv_freq.iter().map(move |freq| position * freq));
    angle
        .map(|angle| (angle.cos(), sign * angle.sin()))
        .collect()
}

/// Turns the pairs of one head for which there are angles.
fn turn_head(x: &[f32], turn: &[(f32, f32)], out: &mut [f32]) {
    let (x_a, x_b) = x.split_at(turn.len());
    let (out_a, out_b) = out.split_at_mut(turn.len());
    for (i, &(cos, sin)) in turn.iter().enumerate() {
        out_a[i] = x_a[i] * cos - x_b[i] * sin;
        out_b[i] = x_b[i] * cos + x_a[i] * sin;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{assert_close, bits, elements, random, reference, tensor};
    use serde_json::Value;

    /// Rows that follow each other from a position on.
    fn rotate(
        x: &[f32],
        dims: &[usize],
        offset: usize,
        inv_freq: &[f32],
        inverse: bool,
        out: &mut [f32],
    ) {
        let positions: Vec<usize> = (offset..offset + dims[1]).collect();
        super::rotate(x, dims, &positions, (inv_freq, 1.0), inverse, out);
    }

    fn scaling(rope: &Value) -> RopeScaling {
        let number = |key: &str| rope[key].as_f64().unwrap();
        match rope["rope_type"].as_str().unwrap() {
            "default" => RopeScaling::None,
            "linear" => RopeScaling::Linear {
                factor: number("factor"),
            },
            "llama3" => RopeScaling::Llama3 {
                factor: number("factor"),
                low_freq_factor: number("low_freq_factor"),
                high_freq_factor: number("high_freq_factor"),
                original_max_position: number("original_max_position_embeddings"),
            },
            other => panic!("unknown rope type {other}"),
        }
    }

    #[test]
    fn equals_the_reference() {
        for entry in reference("rotary") {
            let name = entry["name"].as_str().unwrap();
            let rope = &entry["attrs"]["rope"];
            let (dims, _) = tensor(&entry["inputs"]["x"]);
            let x = elements(&entry["inputs"]["x"]);
            let freq = inv_freq(rope["rope_theta"].as_f64().unwrap(), dims[3], scaling(rope));
            let (_, expected) = tensor(&entry["outputs"]["inv_freq"]);
            for (&f, e) in freq.iter().zip(&expected) {
                assert!(
                    (f64::from(f) / e - 1.0).abs() < 1e-6,
                    "{name}: {f} against {e}"
                );
            }
            let mut y = vec![0.0; x.len()];
            rotate(&x, &dims, 0, &freq, false, &mut y);
            assert_close(&y, &tensor(&entry["outputs"]["y"]).1, 2e-6, name);
            let mut dx = vec![0.0; x.len()];
            rotate(
                &elements(&entry["upstream"]["y"]),
                &dims,
                0,
                &freq,
                true,
                &mut dx,
            );
            assert_close(&dx, &tensor(&entry["grads"]["x"]).1, 2e-6, name);
        }
    }

    #[test]
    fn shards_of_batch_sequence_and_heads_equal_the_whole() {
        let (batch, seq, kv, groups, dim) = (3, 7, 2, 3, 10);
        let dims = [batch, seq, kv, groups, dim];
        let x = random(1, dims.iter().product());
        let freq = inv_freq(10_000.0, dim, RopeScaling::None);
        let mut whole = vec![0.0; x.len()];
        rotate(&x, &dims, 5, &freq, false, &mut whole);
        let width = kv * groups * dim;
        for b in 0..batch {
            for s in 0..seq {
                let at = (b * seq + s) * width;
                for head in 0..kv * groups {
                    let at = at + head * dim;
                    let mut one = vec![0.0; dim];
                    rotate(&x[at..][..dim], &[1, 1, dim], 5 + s, &freq, false, &mut one);
                    assert_eq!(bits(&one), bits(&whole[at..][..dim]));
                }
            }
        }
    }

    /// The first four of a head of ten elements turn as a head of four does, the others stay.
    #[test]
    fn a_part_of_a_head_turns_as_a_smaller_head() {
        let (seq, dim, part) = (5, 10, 4);
        let x = random(2, seq * dim);
        let freq = inv_freq(10_000.0, part, RopeScaling::None);
        let mut y = vec![0.0; x.len()];
        rotate(&x, &[1, seq, 1, dim], 3, &freq, false, &mut y);
        for s in 0..seq {
            let (own, turned) = (&x[s * dim..][..dim], &y[s * dim..][..dim]);
            let mut alone = vec![0.0; part];
            rotate(&own[..part], &[1, 1, part], 3 + s, &freq, false, &mut alone);
            assert_eq!(bits(&turned[..part]), bits(&alone));
            assert_eq!(bits(&turned[part..]), bits(&own[part..]));
        }
        let mut back = vec![0.0; x.len()];
        rotate(&y, &[1, seq, 1, dim], 3, &freq, true, &mut back);
        let expected: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
        assert_close(&back, &expected, 1e-6, "inverse");
    }

    #[test]
    fn the_inverse_undoes_the_turn_at_large_positions() {
        let dims = [1, 9, 2, 16];
        let x = random(4, dims.iter().product());
        let freq = inv_freq(500_000.0, 16, RopeScaling::Linear { factor: 4.0 });
        let (mut y, mut back) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        rotate(&x, &dims, 8000, &freq, false, &mut y);
        rotate(&y, &dims, 8000, &freq, true, &mut back);
        let moved = x
            .iter()
            .zip(&y)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        assert!(moved > 0.5);
        let expected: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
        assert_close(&back, &expected, 1e-6, "inverse");
    }

    /// DeepSeek-V2's frequencies: of 32 pairs the first ten are kept, from pair 23 on they are
    /// divided, and the ramp between them goes by equal steps.
    #[test]
    fn yarn_keeps_the_fast_pairs_and_divides_the_slow_ones() {
        let yarn = |truncate| RopeScaling::Yarn {
            factor: 40.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_max_position: 4096.0,
            truncate,
            magnitude: 1.0,
        };
        let plain = inv_freq(1e4, 64, RopeScaling::None);
        let of = |truncate| -> Vec<f64> {
            let scaled = inv_freq(1e4, 64, yarn(truncate));
            let pairs = plain.iter().zip(&scaled);
            // 1 where kept, 0 where divided.
            let kept = pairs.map(|(p, s)| (f64::from(s / p) - 1.0 / 40.0) / (1.0 - 1.0 / 40.0));
            kept.collect()
        };
        let kept = of(true);
        // 64 ln(4096 / 64 pi) / (2 ln 1e4) = 10.47, and with one turn 22.51.
        for (pair, kept) in kept.iter().enumerate() {
            let expected = 1.0 - ((pair as f64 - 10.0) / 13.0).clamp(0.0, 1.0);
            assert!((kept - expected).abs() < 1e-5, "{pair}: {kept} {expected}");
        }
        let (first, last) = (10.471_8, 22.513_4);
        let exact = 1.0 - (15.0 - first) / (last - first);
        assert!((of(false)[15] - exact).abs() < 1e-4, "{}", of(false)[15]);
    }

    /// A magnitude multiplies what turns and nothing else, in both directions.
    #[test]
    fn a_magnitude_multiplies_what_turns() {
        let (x, freq) = (random(6, 20), inv_freq(1e4, 4, RopeScaling::None));
        for inverse in [false, true] {
            let (mut plain, mut more) = (vec![0.0; 20], vec![0.0; 20]);
            let (dims, positions) = ([1, 2, 10], [3, 4]);
            super::rotate(&x, &dims, &positions, (&freq, 1.0), inverse, &mut plain);
            super::rotate(&x, &dims, &positions, (&freq, 1.5), inverse, &mut more);
            for (i, (p, m)) in plain.iter().zip(&more).enumerate() {
                let expected = if i % 10 < 4 { 1.5 * p } else { *p };
                assert!((m - expected).abs() < 1e-6, "{i}: {m} {expected}");
            }
        }
    }

    #[test]
    fn empty_shapes() {
        rotate(&[], &[0, 4, 2, 8], 0, &[1.0; 4], false, &mut []);
        rotate(&[], &[2, 0, 2, 8], 0, &[1.0; 4], false, &mut []);
    }
}
