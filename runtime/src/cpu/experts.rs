//! Mixture-of-experts layers: choosing experts, tokens to their slots and back.
//!
//! Slots are numbered `expert * capacity + place`; a dropped choice has the number
//! `-(expert + 1)`, so that its expert is known to the gradient of the gates. A shard holds the
//! slots of experts `first .. first + experts` and leaves out what belongs to others, so the
//! sums of all shards are the unsharded results.
//!
//! Buffers are `[samples, tokens, width]` and `[experts, samples, capacity, width]` in their
//! padded lengths; samples and tokens past the valid ones are padding and are not read.

use super::special::exp;
use ir::op::{ExpertGroups, Scores};

/// Lengths of the tensors between which tokens move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slots {
    /// First expert of the shard.
    pub first: usize,
    /// Experts of the shard, padding left out.
    pub experts: usize,
    /// Slots of an expert for one sample.
    pub capacity: usize,
    /// Samples, padding included.
    pub samples: usize,
    /// Samples, padding left out.
    pub valid_samples: usize,
    /// Tokens of a sample, padding included.
    pub tokens: usize,
    /// Tokens of a sample, padding left out.
    pub valid_tokens: usize,
    /// Choices of a token.
    pub choices: usize,
    /// Elements of a token.
    pub width: usize,
}

impl Slots {
    /// Calls `f(choice, token, slot)` for each choice that is taken by an expert of the shard:
    /// indices of the choice in `[samples, tokens, choices]`, of the first element of the token
    /// and of the slot. In order of the choices.
    fn each(&self, slots: &[i32], mut f: impl FnMut(usize, usize, usize)) {
        for sample in 0..self.valid_samples {
            for token in 0..self.valid_tokens {
                let row = sample * self.tokens + token;
                let first = row * self.choices;
                for (i, &slot) in slots[first..][..self.choices].iter().enumerate() {
                    if let Some(slot) = self.local(slot, sample) {
                        f(first + i, row * self.width, slot);
                    }
                }
            }
        }
    }

    /// Where the shard has the elements of a slot of a sample, if it has.
    fn local(&self, slot: i32, sample: usize) -> Option<usize> {
        let slot = usize::try_from(slot).ok()?;
        let (expert, place) = (slot / self.capacity, slot % self.capacity);
        let expert = expert
            .checked_sub(self.first)
            .filter(|e| *e < self.experts)?;
        Some(((expert * self.samples + sample) * self.capacity + place) * self.width)
    }
}

/// How tokens choose.
#[derive(Clone, Copy, Debug)]
pub struct Choice<'a> {
    /// The function by which logits become scores.
    pub scores: Scores,
    /// Whether gates are divided by their sum.
    pub normalize: bool,
    /// The groups that a token chooses first.
    pub groups: Option<ExpertGroups>,
    /// Summands of the scores for the choice, one for each expert.
    pub bias: Option<&'a [f32]>,
}

/// Added to the sum that gates are divided by, as DeepSeek-V3's code does.
const SMALLEST_SUM: f64 = 1e-20;

impl Choice<'_> {
    /// The figures by which experts are chosen.
    fn keys(&self, logits: &[f32]) -> Vec<f64> {
        // A softmax keeps the order of the logits, and of groups by their best.
        let by_logits = self.bias.is_none() && self.groups.is_none_or(|g| g.best == 1);
        let scores: Vec<f64> = match self.scores {
            Scores::Softmax if by_logits => return logits.iter().map(|&l| f64::from(l)).collect(),
            Scores::Softmax => {
                let largest = largest(logits);
                let sum: f64 = logits.iter().map(|&l| weight(l, largest)).sum();
                logits.iter().map(|&l| weight(l, largest) / sum).collect()
            }
            Scores::Sigmoid => logits.iter().map(|&l| sigmoid(l)).collect(),
        };
        match self.bias {
            None => scores,
            Some(bias) => {
                let both = scores.iter().zip(bias);
                both.map(|(s, &b)| s + f64::from(b)).collect()
            }
        }
    }

    /// All experts that may be chosen, the best first.
    fn order(&self, logits: &[f32]) -> Vec<usize> {
        let keys = self.keys(logits);
        let best_first =
            |keys: &[f64], a: usize, b: usize| keys[b].total_cmp(&keys[a]).then(a.cmp(&b));
        let mut order: Vec<usize> = (0..keys.len()).collect();
        order.sort_unstable_by(|&a, &b| best_first(&keys, a, b));
        let Some(ExpertGroups { count, kept, best }) = self.groups else {
            return order;
        };
        let (count, each) = (count as usize, keys.len() / count as usize);
        let (mut sums, mut taken) = (vec![0.0; count], vec![0; count]);
        for &e in &order {
            let group = e / each;
            if taken[group] < best {
                (sums[group], taken[group]) = (sums[group] + keys[e], taken[group] + 1);
            }
        }
        let mut groups: Vec<usize> = (0..count).collect();
        groups.sort_unstable_by(|&a, &b| best_first(&sums, a, b));
        let kept = &groups[..(kept as usize).min(count)];
        order.retain(|e| kept.contains(&(e / each)));
        order
    }
}

fn largest(logits: &[f32]) -> f32 {
    logits.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

fn sigmoid(logit: f32) -> f64 {
    1.0 / (1.0 + exp(-f64::from(logit)))
}

/// Chooses experts: `(logits[samples, tokens, experts]) -> (gates[samples, tokens, top_k],
/// slots[samples, tokens, top_k])`; `top_k` is the length of a row of the results.
///
/// Choices are the largest scores in descending order, of equal ones the lower index first. Gates
/// are the scores at the choices or, with `normalize`, these over their sum. Places are
/// given out within a sample, first choices before second ones, in order of the tokens.
///
/// # Panics
/// If the slices do not have these shapes or there are fewer experts than choices.
pub fn route(
    logits: &[f32],
    (tokens, experts, top_k): (usize, usize, usize),
    capacity: usize,
    choice: Choice<'_>,
    gates: &mut [f32],
    slots: &mut [i32],
) {
    assert!(top_k <= experts, "{top_k} choices of {experts} experts");
    let rows = logits.len() / experts.max(1);
    assert_eq!(gates.len(), rows * top_k, "gates");
    assert_eq!(slots.len(), rows * top_k, "slots");
    for (row, logits) in logits.chunks_exact(experts).enumerate() {
        let order = choice.order(logits);
        let chosen = &order[..top_k];
        let largest = largest(logits);
        let score = |e: usize| match choice.scores {
            Scores::Softmax => weight(logits[e], largest),
            Scores::Sigmoid => sigmoid(logits[e]),
        };
        let of_chosen = || chosen.iter().map(|&e| score(e)).sum();
        let sum: f64 = match (choice.scores, choice.normalize) {
            (Scores::Softmax, true) => of_chosen(),
            (Scores::Softmax, false) => (0..experts).map(score).sum(),
            (Scores::Sigmoid, true) => of_chosen() + SMALLEST_SUM,
            (Scores::Sigmoid, false) => 1.0,
        };
        let at = row * top_k;
        for (i, &expert) in chosen.iter().enumerate() {
            gates[at + i] = (score(expert) / sum) as f32;
            slots[at + i] = expert as i32;
        }
    }
    let mut taken = vec![0; experts];
    for sample in slots.chunks_exact_mut((tokens * top_k).max(1)) {
        taken.fill(0);
        for choice in 0..top_k {
            for slot in sample.iter_mut().skip(choice).step_by(top_k) {
                let expert = *slot as usize;
                *slot = match taken[expert] < capacity {
                    true => (expert * capacity + taken[expert]) as i32,
                    false => -(expert as i32 + 1),
                };
                taken[expert] += 1;
            }
        }
    }
}

fn weight(logit: f32, largest: f32) -> f64 {
    exp(f64::from(logit) - f64::from(largest))
}

/// Gradient of the gates of [`route`] for the logits: `(logits[rows, experts], slots[rows,
/// top_k], dgates[rows, top_k]) -> dlogits[rows, experts]`.
///
/// With gates `g` at the choices, `dl = p * (dg - sum(g * dg))`, where `p` is the softmax and
/// `dg` is zero for an expert that is not chosen. Of sigmoids `s`, `dl = s (1 - s) dg` at the
/// choices and, with `normalize`, `dl = g (1 - s) (dg - sum(g * dg))`.
///
/// # Panics
/// If the slices do not have these shapes.
pub fn route_grad(
    logits: &[f32],
    slots: &[i32],
    dgates: &[f32],
    (experts, top_k): (usize, usize),
    capacity: usize,
    (scores, normalize): (Scores, bool),
    dlogits: &mut [f32],
) {
    assert_eq!(slots.len(), dgates.len(), "one gradient per choice");
    assert_eq!(dlogits.len(), logits.len(), "one gradient per logit");
    let expert_of = |slot: i32| match usize::try_from(slot) {
        Ok(slot) => slot / capacity,
        Err(_) => (-(slot + 1)) as usize,
    };
    let choices = slots.chunks_exact(top_k).zip(dgates.chunks_exact(top_k));
    let rows = logits
        .chunks_exact(experts)
        .zip(dlogits.chunks_exact_mut(experts));
    for ((slots, dgates), (logits, dlogits)) in choices.zip(rows) {
        let chosen: Vec<usize> = slots.iter().map(|&s| expert_of(s)).collect();
        if scores == Scores::Sigmoid {
            sigmoid_grad(logits, &chosen, dgates, normalize, dlogits);
            continue;
        }
        let largest = largest(logits);
        let sum: f64 = match normalize {
            true => chosen.iter().map(|&e| weight(logits[e], largest)).sum(),
            false => logits.iter().map(|&l| weight(l, largest)).sum(),
        };
        let p = |e: usize| weight(logits[e], largest) / sum;
        let mean: f64 = chosen
            .iter()
            .zip(dgates)
            .map(|(&e, &d)| p(e) * f64::from(d))
            .sum();
        match normalize {
            true => dlogits.fill(0.0),
            false => (0..experts).for_each(|e| dlogits[e] = (-p(e) * mean) as f32),
        }
        for (&e, &d) in chosen.iter().zip(dgates) {
            dlogits[e] = (p(e) * (f64::from(d) - mean)) as f32;
        }
    }
}

/// The gradient of one token's gates where scores are sigmoids.
fn sigmoid_grad(
    logits: &[f32],
    chosen: &[usize],
    dgates: &[f32],
    normalize: bool,
    dlogits: &mut [f32],
) {
    let s: Vec<f64> = chosen.iter().map(|&e| sigmoid(logits[e])).collect();
    let (sum, mean) = match normalize {
        false => (1.0, 0.0),
        true => {
            let sum = s.iter().sum::<f64>() + SMALLEST_SUM;
            let all = s.iter().zip(dgates);
            (sum, all.map(|(s, &d)| s / sum * f64::from(d)).sum())
        }
    };
    dlogits.fill(0.0);
    for ((&e, s), &d) in chosen.iter().zip(&s).zip(dgates) {
        dlogits[e] = (s / sum * (1.0 - s) * (f64::from(d) - mean)) as f32;
    }
}

/// Tokens to their slots, each times its gate where there are gates; zeros in empty slots:
/// `(x[samples, tokens, width], slots, gates) -> out[experts, samples, capacity, width]`.
///
/// # Panics
/// If the slices do not have the lengths of `s`.
pub fn dispatch(x: &[f32], slots: &[i32], gates: Option<&[f32]>, s: Slots, out: &mut [f32]) {
    out.fill(0.0);
    s.each(slots, |choice, token, slot| {
        let (from, to) = (&x[token..][..s.width], &mut out[slot..][..s.width]);
        match gates.map(|g| g[choice]) {
            None => to.copy_from_slice(from),
            Some(gate) => to.iter_mut().zip(from).for_each(|(y, x)| *y = gate * x),
        }
    });
}

/// Sums of the slots of each token, each times its gate where there are gates:
/// `(y[experts, samples, capacity, width], slots, gates) -> out[samples, tokens, width]`.
///
/// Sums are taken in `f64`, in the order of the choices, and rounded once.
///
/// # Panics
/// If the slices do not have the lengths of `s`.
pub fn combine(y: &[f32], slots: &[i32], gates: Option<&[f32]>, s: Slots, out: &mut [f32]) {
    let mut sums = vec![0.0; out.len()];
    s.each(slots, |choice, token, slot| {
        let gate = gates.map_or(1.0, |g| f64::from(g[choice]));
        let terms = sums[token..][..s.width].iter_mut().zip(&y[slot..]);
        terms.for_each(|(sum, y)| *sum += gate * f64::from(*y));
    });
    out.iter_mut()
        .zip(sums)
        .for_each(|(out, sum)| *out = sum as f32);
}

/// Products of tokens and their slots: `(y[experts, samples, capacity, width], x[samples,
/// tokens, width], slots) -> out[samples, tokens, choices]`; zero for choices that the shard
/// does not hold.
///
/// # Panics
/// If the slices do not have the lengths of `s`.
pub fn gate_grad(y: &[f32], x: &[f32], slots: &[i32], s: Slots, out: &mut [f32]) {
    out.fill(0.0);
    s.each(slots, |choice, token, slot| {
        let (y, x) = (&y[slot..][..s.width], &x[token..][..s.width]);
        out[choice] = super::summation::dot(y, x) as f32;
    });
}

/// A bias for each expert on all its rows: `(y[experts, rows, width], bias[experts, width]) -> out`.
///
/// # Panics
/// If `out` is not as long as `y`, or `y` not a multiple of `bias`.
pub fn add_bias(y: &[f32], bias: &[f32], out: &mut [f32], width: usize) {
    assert_eq!(y.len(), out.len(), "operand and result have one length");
    if y.is_empty() {
        return;
    }
    let of_expert = y.len() / (bias.len() / width);
    assert_eq!(
        of_expert * (bias.len() / width),
        y.len(),
        "experts have one length"
    );
    let experts = y
        .chunks_exact(of_expert)
        .zip(out.chunks_exact_mut(of_expert));
    for ((y, out), bias) in experts.zip(bias.chunks_exact(width)) {
        for (y, out) in y.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            let terms = out.iter_mut().zip(y.iter().zip(bias));
            terms.for_each(|(out, (y, b))| *out = y + b);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, random};
    use super::*;

    const TOKENS: usize = 6;
    const EXPERTS: usize = 4;
    const TOP_K: usize = 2;
    const WIDTH: usize = 3;
    const SAMPLES: usize = 2;

    fn softmax(normalize: bool) -> Choice<'static> {
        Choice {
            scores: Scores::Softmax,
            normalize,
            groups: None,
            bias: None,
        }
    }

    fn chosen(logits: &[f32], capacity: usize, choice: Choice<'_>) -> (Vec<f32>, Vec<i32>) {
        let n = logits.len() / EXPERTS * TOP_K;
        let (mut gates, mut slots) = (vec![f32::NAN; n], vec![i32::MAX; n]);
        let sizes = (TOKENS, EXPERTS, TOP_K);
        route(logits, sizes, capacity, choice, &mut gates, &mut slots);
        (gates, slots)
    }

    fn routed(logits: &[f32], capacity: usize, normalize: bool) -> (Vec<f32>, Vec<i32>) {
        chosen(logits, capacity, softmax(normalize))
    }

    fn lengths(capacity: usize, first: usize, experts: usize) -> Slots {
        Slots {
            first,
            experts,
            capacity,
            samples: SAMPLES,
            valid_samples: SAMPLES,
            tokens: TOKENS,
            valid_tokens: TOKENS,
            choices: TOP_K,
            width: WIDTH,
        }
    }

    #[test]
    fn places_go_to_first_choices_in_order_of_the_tokens() {
        // Rows of logits by hand: choices (1, 0), (1, 2), (0, 1), (1, 3), (3, 0), (2, 1).
        #[rustfmt::skip]
        let logits = [
            2.0, 3.0, 1.0, 0.0,
            0.0, 3.0, 1.0, 0.5,
            3.0, 2.0, 1.0, 0.0,
            0.0, 3.0, 1.0, 2.0,
            2.0, 0.0, 1.0, 3.0,
            0.0, 2.0, 3.0, 1.0,
        ];
        let (_, slots) = routed(&logits, 2, true);
        // Expert 1 is the first choice of tokens 0, 1 and 3: the third is dropped, and so are the
        // second choices of tokens 2 and 5. Expert 0 is the first choice of token 2, then the
        // second of tokens 0 and 4.
        let expected = [2, 1, 3, 5, 0, -2, -2, 7, 6, -1, 4, -2];
        assert_eq!(slots, expected);
        let (_, slots) = routed(&logits, TOKENS, true);
        assert!(
            slots.iter().all(|s| *s >= 0),
            "as many places as tokens drop none"
        );
    }

    #[test]
    fn equal_logits_go_to_the_lower_index_and_gates_are_softmaxes() {
        let (gates, slots) = routed(&[0.5; TOKENS * EXPERTS], TOKENS, true);
        assert_eq!((slots[0], slots[1], slots[2]), (0, TOKENS as i32, 1));
        assert!(gates.iter().all(|g| *g == 0.5));
        let logits = random(3, SAMPLES * TOKENS * EXPERTS);
        for normalize in [true, false] {
            let (gates, slots) = routed(&logits, TOKENS, normalize);
            for (row, logits) in logits.chunks_exact(EXPERTS).enumerate() {
                let p: Vec<f64> = logits.iter().map(|l| f64::from(*l).exp()).collect();
                let at = row * TOP_K..(row + 1) * TOP_K;
                let chosen: Vec<f64> = slots[at.clone()]
                    .iter()
                    .map(|s| p[*s as usize / TOKENS])
                    .collect();
                let sum: f64 = if normalize {
                    chosen.iter().sum()
                } else {
                    p.iter().sum()
                };
                let expected: Vec<f64> = chosen.iter().map(|p| p / sum).collect();
                assert_close(&gates[at], &expected, 1e-6, "gates");
                let left = p
                    .iter()
                    .filter(|p| !chosen.contains(p))
                    .fold(0.0, |a, b| f64::max(a, *b));
                assert!(chosen[0] >= chosen[1] && chosen[1] >= left);
            }
        }
    }

    /// Experts 0 and 1 are one group, 2 and 3 the other. Scores decide gates, scores and bias who is
    /// chosen.
    #[test]
    fn groups_are_chosen_first_and_a_bias_decides_no_gate() {
        let s = |l: f64| 1.0 / (1.0 + (-l).exp());
        let logits = [1.5, -2.0, 1.0, 0.9].repeat(TOKENS);
        let bias = [0.0, 0.0, -0.5, 0.0];
        let of = |best, choice: Choice<'static>| Choice {
            groups: Some(ExpertGroups {
                count: 2,
                kept: 1,
                best,
            }),
            ..choice
        };
        let experts = |choice: Choice<'_>| -> (Vec<i32>, Vec<f32>) {
            let (gates, slots) = chosen(&logits, TOKENS, choice);
            let of = slots[..TOP_K].iter().map(|s| s / TOKENS as i32);
            (of.collect(), gates[..TOP_K].to_vec())
        };
        let sigmoid = Choice {
            scores: Scores::Sigmoid,
            ..softmax(false)
        };
        // By its best expert the first group wins, by its two best the second.
        let first = experts(of(1, sigmoid));
        assert_eq!(first.0, [0, 1]);
        assert_close(&first.1, &[s(1.5), s(-2.0)], 1e-6, "gates");
        assert_eq!(experts(of(2, sigmoid)).0, [2, 3]);
        // Of a softmax, too; its gates are shares of all experts.
        let of_softmax = experts(of(1, softmax(false)));
        assert_eq!(of_softmax.0, [0, 1]);
        let sum: f64 = [1.5, -2.0, 1.0, 0.9].map(f64::exp).iter().sum();
        let expected = [1.5f64.exp() / sum, (-2.0f64).exp() / sum];
        assert_close(&of_softmax.1, &expected, 1e-6, "gates");
        // The bias puts expert 3 before expert 2, whose score is larger.
        let biased = Choice {
            bias: Some(&bias),
            ..sigmoid
        };
        assert_eq!(experts(biased).0, [0, 3]);
        let shares = experts(Choice {
            normalize: true,
            ..biased
        });
        let (a, b) = (s(1.5), s(0.9));
        assert_close(&shares.1, &[a / (a + b), b / (a + b)], 1e-6, "gates");
    }

    #[test]
    fn the_gradient_of_the_gates_is_their_slope() {
        let (logits, d) = (random(5, TOKENS * EXPERTS), random(6, TOKENS * TOP_K));
        for (scores, normalize) in [
            (Scores::Softmax, true),
            (Scores::Softmax, false),
            (Scores::Sigmoid, true),
            (Scores::Sigmoid, false),
        ] {
            let routed = |logits: &[f32], capacity, normalize| {
                let choice = Choice {
                    scores,
                    ..softmax(normalize)
                };
                chosen(logits, capacity, choice)
            };
            let value = |logits: &[f32]| -> f64 {
                let (gates, _) = routed(logits, 2, normalize);
                gates
                    .iter()
                    .zip(&d)
                    .map(|(g, d)| f64::from(*g) * f64::from(*d))
                    .sum()
            };
            let (_, slots) = routed(&logits, 2, normalize);
            assert!(slots.iter().any(|s| *s < 0), "some choice is dropped");
            let mut grad = vec![f32::NAN; logits.len()];
            route_grad(
                &logits,
                &slots,
                &d,
                (EXPERTS, TOP_K),
                2,
                (scores, normalize),
                &mut grad,
            );
            for i in 0..logits.len() {
                let (mut up, mut down) = (logits.clone(), logits.clone());
                (up[i], down[i]) = (up[i] + 1e-3, down[i] - 1e-3);
                let slope = (value(&up) - value(&down)) / 2e-3;
                assert!(
                    (f64::from(grad[i]) - slope).abs() < 2e-4,
                    "{i}: {} {slope}",
                    grad[i]
                );
            }
        }
    }

    #[test]
    fn combine_and_dispatch_are_transposes_and_shards_add_up() {
        let capacity = 2;
        let (gates, slots) = routed(&random(1, SAMPLES * TOKENS * EXPERTS), capacity, true);
        let x = random(2, SAMPLES * TOKENS * WIDTH);
        let y = random(3, EXPERTS * SAMPLES * capacity * WIDTH);
        let all = lengths(capacity, 0, EXPERTS);
        for gates in [None, Some(&gates[..])] {
            let (mut dx, mut cy) = (vec![f32::NAN; y.len()], vec![f32::NAN; x.len()]);
            dispatch(&x, &slots, gates, all, &mut dx);
            combine(&y, &slots, gates, all, &mut cy);
            let dot = super::super::summation::dot;
            assert!((dot(&dx, &y) - dot(&x, &cy)).abs() < 1e-5);
            // Each kept choice has a slot of its own.
            let mut kept: Vec<(usize, i32)> = slots
                .iter()
                .enumerate()
                .filter(|(_, s)| **s >= 0)
                .map(|(i, s)| (i / (TOKENS * TOP_K), *s))
                .collect();
            let n = kept.len();
            kept.sort_unstable();
            kept.dedup();
            assert_eq!(kept.len(), n);
            let mut sum = vec![0.0f64; x.len()];
            let part = SAMPLES * capacity * WIDTH;
            for first in 0..EXPERTS {
                let s = lengths(capacity, first, 1);
                let (mut d, mut c) = (vec![f32::NAN; part], vec![f32::NAN; x.len()]);
                dispatch(&x, &slots, gates, s, &mut d);
                assert_eq!(d, &dx[first * part..][..part]);
                combine(&y[first * part..][..part], &slots, gates, s, &mut c);
                sum.iter_mut().zip(c).for_each(|(s, c)| *s += f64::from(c));
            }
            assert_close(&cy, &sum, 1e-6, "sum of the shards");
        }
        // <gate_grad(y, x), gates> = <y, dispatch(x, gates)>.
        let (mut g, mut dx) = (vec![f32::NAN; gates.len()], vec![f32::NAN; y.len()]);
        gate_grad(&y, &x, &slots, all, &mut g);
        dispatch(&x, &slots, Some(&gates), all, &mut dx);
        let dot = super::super::summation::dot;
        assert!((dot(&g, &gates) - dot(&y, &dx)).abs() < 1e-5);
        assert!(slots.iter().zip(&g).all(|(s, g)| *s >= 0 || *g == 0.0));
    }

    #[test]
    fn padding_is_neither_read_nor_written() {
        let capacity = 2;
        let s = Slots {
            valid_samples: 1,
            valid_tokens: 4,
            ..lengths(capacity, 0, EXPERTS)
        };
        // Padded choices are zero, which is a slot; padded tokens are poisoned here.
        let mut slots = vec![0; SAMPLES * TOKENS * TOP_K];
        let mut x = vec![f32::NAN; SAMPLES * TOKENS * WIDTH];
        x[..4 * WIDTH].fill(1.0);
        for token in 0..4 {
            slots[token * TOP_K] = token as i32;
            slots[token * TOP_K + 1] = -1;
        }
        let mut out = vec![f32::NAN; EXPERTS * SAMPLES * capacity * WIDTH];
        dispatch(&x, &slots, None, s, &mut out);
        assert_eq!(out.iter().filter(|v| **v == 1.0).count(), 4 * WIDTH);
        assert!(out.iter().all(|v| v.is_finite()));
        let mut back = vec![f32::NAN; x.len()];
        combine(&out, &slots, None, s, &mut back);
        assert!(back[..4 * WIDTH].iter().all(|v| *v == 1.0));
        assert!(back[4 * WIDTH..].iter().all(|v| *v == 0.0));
    }

    #[test]
    fn every_row_of_an_expert_gets_its_bias() {
        // Three experts of four rows.
        let (y, bias) = (random(71, 3 * 4 * WIDTH), random(72, 3 * WIDTH));
        let naive: Vec<f64> = (0..y.len())
            .map(|i| {
                let of = i / (4 * WIDTH) * WIDTH + i % WIDTH;
                f64::from(y[i]) + f64::from(bias[of])
            })
            .collect();
        let mut out = vec![f32::NAN; y.len()];
        add_bias(&y, &bias, &mut out, WIDTH);
        assert_close(&out, &naive, 6e-8, "rows");
        add_bias(&[], &bias, &mut [], WIDTH);
    }
}
