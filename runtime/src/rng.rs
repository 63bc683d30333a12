//! Counter-based randomness: the value at an element is a function of its name.
//!
//! There is no generator state. A value is named by `(seed, step, op path, element)`, where
//! `element` is the element's flat index in the *whole* tensor, its batch coordinate being the
//! sample's index in the global batch. So:
//!
//! - every layout, number of microbatches and recomputation sees the same values;
//! - any run of elements can be filled on its own, in any order, on any rank;
//! - a bulk fill equals the single-element functions bit for bit.
//!
//! The generator is Philox4x32-10 (Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as
//! easy as 1, 2, 3", SC'11), a bijection of a 128-bit counter under a 64-bit key. A name has
//! 256 bits, so it takes two applications:
//!
//! ```text
//!   (k, t)   = philox(key = seed, counter = (step, path))        64 bits each, once per tensor
//!   word 0-3 = philox(key = k,    counter = (block, t ^ kind))   once per block of elements
//! ```
//!
//! Element `i` of a uniform stream is word `i % 4` of block `i / 4`. Elements `2b` and `2b + 1`
//! of a normal stream are the two results of Box-Muller on block `b`. `kind` keeps the two
//! streams of one name apart.
//!
//! Two 64-bit values are written in a counter low word first. Element indices wrap at 2^64.

/// The training step under which parameters are initialised; no real step reaches it.
pub const INIT_STEP: u64 = u64::MAX;

/// 2^-24: a `f32` holds 24 bits of a uniform number.
const ULP_F32: f32 = 1.0 / (1 << 24) as f32;
/// 2^-53: a `f64` holds 53 bits of a uniform number.
const ULP_F64: f64 = 1.0 / (1u64 << 53) as f64;

/// The kind of value drawn from a stream; mixed into the counter, so that the two streams differ.
#[derive(Clone, Copy)]
#[repr(u64)]
enum Kind {
    Uniform = 0,
    Normal = 1,
}

/// The name of a random tensor, all but the element.
///
/// `path` is [`path_hash`] of the path of the op or parameter that the numbers are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// The run's seed.
    pub seed: u64,
    /// The training step, counted from 0, or [`INIT_STEP`].
    pub step: u64,
    /// Hash of the path of the *source* op: recomputed and sliced copies keep it.
    pub path: u64,
}

impl Key {
    /// The key of the op at `path` in training step `step`.
    pub fn new(seed: u64, step: u64, path: &str) -> Self {
        let path = path_hash(path);
        Key { seed, step, path }
    }

    /// The key of the initial value of the parameter at `path`.
    pub fn init(seed: u64, path: &str) -> Self {
        Key::new(seed, INIT_STEP, path)
    }

    fn stream(self, kind: Kind) -> Stream {
        let [step_lo, step_hi] = words(self.step);
        let [path_lo, path_hi] = words(self.path);
        let derived = philox4x32_10([step_lo, step_hi, path_lo, path_hi], words(self.seed));
        let [kind_lo, kind_hi] = words(kind as u64);
        Stream {
            key: [derived[0], derived[1]],
            tweak: [derived[2] ^ kind_lo, derived[3] ^ kind_hi],
        }
    }
}

/// Hash of an op's path: 64-bit FNV-1a of its UTF-8 bytes (Fowler, Noll & Vo).
///
/// It never changes: another hash would be another initialisation of every model.
pub fn path_hash(path: &str) -> u64 {
    const OFFSET_BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0000_0100_0000_01b3;
    path.bytes().fold(OFFSET_BASIS, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(PRIME)
    })
}

/// The uniform number in `[0, 1)` of one element: a multiple of 2^-24.
pub fn uniform(key: Key, element: u64) -> f32 {
    let mut value = [0.0];
    fill_uniform(key, element, &mut value);
    value[0]
}

/// The standard normal number of one element.
///
/// Box-Muller in `f64`, rounded once to `f32`; always finite, at most 8.6 in magnitude.
/// A device whose `ln`, `sin` or `cos` differs in the last bits of `f64` may round
/// differently about once in 10^8 values.
pub fn normal(key: Key, element: u64) -> f32 {
    let mut value = [0.0];
    fill_normal(key, element, &mut value);
    value[0]
}

/// Fills `out` with the [`uniform`] numbers of elements `start`, `start + 1`, ...
pub fn fill_uniform(key: Key, start: u64, out: &mut [f32]) {
    let stream = key.stream(Kind::Uniform);
    fill(start, out, |block| {
        stream.block(block).map(|word| (word >> 8) as f32 * ULP_F32)
    });
}

/// Fills `out` with the [`normal`] numbers of elements `start`, `start + 1`, ...
pub fn fill_normal(key: Key, start: u64, out: &mut [f32]) {
    let stream = key.stream(Kind::Normal);
    fill(start, out, |block| box_muller(stream.block(block)));
}

/// One application of Philox4x32 with ten rounds.
pub fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    const MULTIPLIER: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
    // The golden ratio and sqrt(3) - 1 as binary fractions: the paper's Weyl constants.
    const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
    const ROUNDS: usize = 10;

    for round in 0..ROUNDS {
        if round > 0 {
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        let [lo0, hi0] = words(u64::from(MULTIPLIER[0]) * u64::from(counter[0]));
        let [lo1, hi1] = words(u64::from(MULTIPLIER[1]) * u64::from(counter[2]));
        counter = [
            hi1 ^ counter[1] ^ key[0],
            lo1,
            hi0 ^ counter[3] ^ key[1],
            lo0,
        ];
    }
    counter
}

/// A key with the per-tensor work done.
struct Stream {
    key: [u32; 2],
    tweak: [u32; 2],
}

impl Stream {
    fn block(&self, block: u64) -> [u32; 4] {
        let [lo, hi] = words(block);
        philox4x32_10([lo, hi, self.tweak[0], self.tweak[1]], self.key)
    }
}

/// Fills `out` with elements `start..`, where `block(b)` makes elements `b * N .. (b + 1) * N`.
fn fill<const N: usize>(start: u64, out: &mut [f32], block: impl Fn(u64) -> [f32; N]) {
    let per_block = N as u64;
    // N divides 2^64, so the block index of a wrapped element is right as well.
    let skip = (start % per_block) as usize;
    let head = out.len().min((N - skip) % N);
    let (first, rest) = out.split_at_mut(head);
    let mut index = start / per_block;
    if head > 0 {
        first.copy_from_slice(&block(index)[skip..skip + head]);
        index = next_block(index, per_block);
    }
    for chunk in rest.chunks_mut(N) {
        chunk.copy_from_slice(&block(index)[..chunk.len()]);
        index = next_block(index, per_block);
    }
}

fn next_block(index: u64, per_block: u64) -> u64 {
    index.wrapping_add(1) % (u64::MAX / per_block + 1)
}

/// Two standard normal numbers from 128 random bits (Box & Muller 1958).
fn box_muller(words: [u32; 4]) -> [f32; 2] {
    let unit = |lo: u32, hi: u32| ((u64::from(hi) << 32 | u64::from(lo)) >> 11) as f64 * ULP_F64;
    // 1 - u is in (0, 1], so the logarithm is finite.
    let radius = (-2.0 * (1.0 - unit(words[0], words[1])).ln()).sqrt();
    let angle = std::f64::consts::TAU * unit(words[2], words[3]);
    let (sin, cos) = angle.sin_cos();
    [(radius * cos) as f32, (radius * sin) as f32]
}

/// The low and the high half of `value`.
fn words(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const N: usize = 1 << 18;

    fn key() -> Key {
        Key::new(1234, 7, "layer0/attention/dropout")
    }

    #[test]
    fn philox_gives_the_known_answers_of_random123() {
        let cases = [
            (
                [0; 4],
                [0; 2],
                [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8],
            ),
            (
                [u32::MAX; 4],
                [u32::MAX; 2],
                [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
            ),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, expected) in cases {
            assert_eq!(philox4x32_10(counter, key), expected);
        }
    }

    #[test]
    fn path_hash_gives_the_known_answers_of_fnv1a() {
        assert_eq!(path_hash(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(path_hash("a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(path_hash("foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn a_stream_is_two_applications_of_philox() {
        let key = Key {
            seed: 0x1_0000_0002,
            step: 0x3_0000_0004,
            path: 0x5_0000_0006,
        };
        let derived = philox4x32_10([4, 3, 6, 5], [2, 1]);
        let block = philox4x32_10([9, 0, derived[2], derived[3]], [derived[0], derived[1]]);
        for (lane, word) in block.into_iter().enumerate() {
            let expected = f64::from(word >> 8) / f64::from(1 << 24);
            assert_eq!(f64::from(uniform(key, 36 + lane as u64)), expected);
        }
    }

    #[test]
    fn uniform_numbers_are_uniform() {
        let mut values = vec![0.0; N];
        fill_uniform(key(), 0, &mut values);
        assert!(values.iter().all(|v| (0.0..1.0).contains(v)));

        let (mean, variance) = moments(&values);
        // Five standard errors: sd of the mean is sqrt(1/12/N), of the variance sqrt(1/180/N).
        assert!((mean - 0.5).abs() < 5.0 * (1.0 / 12.0 / N as f64).sqrt());
        assert!((variance - 1.0 / 12.0).abs() < 5.0 * (1.0 / 180.0 / N as f64).sqrt());

        const BINS: usize = 256;
        let mut counts = [0.0; BINS];
        for value in &values {
            counts[(value * BINS as f32) as usize] += 1.0;
        }
        assert_chi_square(&counts, &[N as f64 / BINS as f64; BINS]);
    }

    #[test]
    fn neighbouring_elements_steps_and_paths_are_uncorrelated() {
        let draw = |key: Key, start| {
            let mut values = vec![0.0; N];
            fill_uniform(key, start, &mut values);
            values
        };
        let base = draw(key(), 0);
        let others = [
            draw(key(), 1),
            draw(Key { step: 8, ..key() }, 0),
            draw(
                Key {
                    seed: 1235,
                    ..key()
                },
                0,
            ),
            draw(
                Key {
                    path: key().path ^ 1,
                    ..key()
                },
                0,
            ),
        ];
        for other in others {
            let correlation = base
                .iter()
                .zip(&other)
                .map(|(a, b)| f64::from(a - 0.5) * f64::from(b - 0.5) * 12.0)
                .sum::<f64>()
                / N as f64;
            assert!(correlation.abs() < 5.0 / (N as f64).sqrt(), "{correlation}");
        }
    }

    #[test]
    fn normal_numbers_are_normal() {
        let mut values = vec![0.0; N];
        fill_normal(key(), 0, &mut values);
        let (mean, variance) = moments(&values);
        assert!(mean.abs() < 5.0 / (N as f64).sqrt());
        assert!((variance - 1.0).abs() < 5.0 * (2.0 / N as f64).sqrt());
        let kurtosis = values.iter().map(|v| f64::from(*v).powi(4)).sum::<f64>() / N as f64;
        // The fourth power of a standard normal has mean 3 and variance 105 - 9.
        assert!((kurtosis - 3.0).abs() < 5.0 * (96.0 / N as f64).sqrt());

        // Probability of the intervals cut at -2, -1, 0, 1, 2, from tables of the normal law.
        let probabilities = [
            0.022_750_1,
            0.135_905_1,
            0.341_344_7,
            0.341_344_7,
            0.135_905_1,
            0.022_750_1,
        ];
        let mut counts = [0.0; 6];
        for value in &values {
            counts[(value.floor() + 3.0).clamp(0.0, 5.0) as usize] += 1.0;
        }
        assert_chi_square(&counts, &probabilities.map(|p| p * N as f64));

        // The two numbers of a Box-Muller pair are independent.
        let pairs = values
            .chunks_exact(2)
            .map(|p| f64::from(p[0]) * f64::from(p[1]));
        let correlation = pairs.sum::<f64>() / (N / 2) as f64;
        assert!(correlation.abs() < 5.0 / ((N / 2) as f64).sqrt());
    }

    #[test]
    fn extreme_words_give_finite_normals() {
        for words in [[0; 4], [u32::MAX; 4], [u32::MAX, u32::MAX, 0, 0]] {
            assert!(
                box_muller(words)
                    .iter()
                    .all(|v| v.is_finite() && v.abs() <= 8.6)
            );
        }
    }

    #[test]
    fn indices_wrap() {
        let mut uniforms = [0.0; 9];
        fill_uniform(key(), u64::MAX - 4, &mut uniforms);
        let mut normals = [0.0; 9];
        fill_normal(key(), u64::MAX - 4, &mut normals);
        for offset in 0..9 {
            let element = (u64::MAX - 4).wrapping_add(offset);
            assert_eq!(uniforms[offset as usize], uniform(key(), element));
            assert_eq!(normals[offset as usize], normal(key(), element));
        }
    }

    proptest! {
        /// However a tensor is cut into shards, every element keeps its value.
        #[test]
        fn values_do_not_depend_on_the_layout(
            seed: u64, step: u64, path: u64, start: u64, len in 0usize..50, cut in 0usize..50,
        ) {
            let key = Key { seed, step, path };
            let cut = cut.min(len);
            for (fill, single) in [
                (fill_uniform as fn(Key, u64, &mut [f32]), uniform as fn(Key, u64) -> f32),
                (fill_normal, normal),
            ] {
                let mut whole = vec![0.0; len];
                fill(key, start, &mut whole);
                let mut parts = vec![0.0; len];
                let (left, right) = parts.split_at_mut(cut);
                fill(key, start, left);
                fill(key, start.wrapping_add(cut as u64), right);
                prop_assert_eq!(&whole, &parts);
                for (offset, value) in whole.iter().enumerate() {
                    prop_assert_eq!(*value, single(key, start.wrapping_add(offset as u64)));
                }
            }
        }
    }

    fn moments(values: &[f32]) -> (f64, f64) {
        let n = values.len() as f64;
        let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
        let variance = values
            .iter()
            .map(|v| (f64::from(*v) - mean).powi(2))
            .sum::<f64>()
            / n;
        (mean, variance)
    }

    /// Pearson's statistic within five standard deviations of its mean, `sd = sqrt(2 df)`.
    fn assert_chi_square(counts: &[f64], expected: &[f64]) {
        let df = (counts.len() - 1) as f64;
        let statistic: f64 = counts
            .iter()
            .zip(expected)
            .map(|(count, e)| (count - e).powi(2) / e)
            .sum();
        assert!(
            (statistic - df).abs() < 5.0 * (2.0 * df).sqrt(),
            "{statistic} for {df}"
        );
    }
}
