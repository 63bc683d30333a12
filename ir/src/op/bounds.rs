//! Which scores of an attention there are beside the causal ones, how large they may be, and what is
//! taken off them with the distance.

use serde::{Deserialize, Serialize};

/// Bounds of the scores of an attention; none by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Bounds {
    /// The tokens that a query looks back over, its own among them; all where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<u64>,
    /// A score `s`, scaled, becomes `cap * tanh(s / cap)` (Gemma 2, Gemma team 2024).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cap: Option<f64>,
    /// Whether a score is lower the further its key stands before the query, by the slope of the head
    /// for each token ([`alibi_slope`]; ALiBi, Press et al. 2022). Taken off behind scale and cap.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub alibi: bool,
}

/// The slope of a head of `heads`, both counted over the whole model, not over a shard: with a power
/// of two `n` of them, `2^(-8 (head + 1) / n)`. Of another number of heads the first `n` have the
/// slopes of the largest power of two below, and those behind them every other slope of `2 n` heads,
/// from the first on (Press et al. 2022; BLOOM).
pub fn alibi_slope(head: u64, heads: u64) -> f64 {
    // The largest power of two that is no larger.
    let n = 1u64 << heads.max(1).ilog2();
    let exponent = match head < n {
        true => 8.0 * (head + 1) as f64 / n as f64,
        false => 4.0 * (2 * (head - n) + 1) as f64 / n as f64,
    };
    (-exponent).exp2()
}

impl Bounds {
    /// Whether every key that is no later than a query has a score, of any size, wherever it stands.
    pub fn are_none(&self) -> bool {
        *self == Bounds::default()
    }

    /// The keys that a query's window has, of so many: what MFU counts, which leaves the causal mask
    /// out of account.
    pub(super) fn counted_share(&self, keys: u64) -> f64 {
        let seen = self.window.map_or(keys, |w| w.min(keys));
        match keys {
            0 => 1.0,
            _ => seen as f64 / keys as f64,
        }
    }

    /// Scores of the last `queries` tokens of `keys`, over all pairs of one of each.
    pub(super) fn share(&self, queries: u64, keys: u64) -> f64 {
        let (s, t) = (queries.min(keys) as f64, keys as f64);
        if keys == 0 {
            return 0.0;
        }
        // The token at p sees min(p, w) keys, p from t - s to t.
        let w = self.window.map_or(t, |w| (w as f64).min(t));
        let first = t - s;
        let grows = (w - first).clamp(0.0, s);
        let seen = match w > first {
            true => grows * (first + w) / 2.0 + (s - grows) * w,
            false => s * w,
        };
        if s > 0.0 { seen / (s * t) } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_scores_is_what_queries_see() {
        let share = |window, queries: u64, keys: u64| {
            let bounds = Bounds {
                window,
                ..Bounds::default()
            };
            // By the sum over the queries, for which many tokens make up.
            let w = window.unwrap_or(keys);
            let seen = (keys - queries..keys).map(|p| (p + 1).min(w));
            let exact = seen.sum::<u64>() as f64 / (queries * keys) as f64;
            let found = bounds.share(queries, keys);
            assert!((found - exact).abs() < 2e-3, "{found} {exact}");
            found
        };
        assert_eq!(share(None, 1000, 1000), 0.5);
        assert_eq!(share(None, 250, 1000), 0.875);
        assert_eq!(share(Some(4000), 1000, 1000), 0.5);
        assert_eq!(share(Some(500), 1000, 1000), 0.375);
        assert_eq!(share(Some(500), 250, 1000), 0.5);
        share(Some(900), 250, 1000);
        assert_eq!(Bounds::default().share(0, 0), 0.0);
    }

    #[test]
    fn the_counted_share_is_that_of_the_window() {
        let of = |window| {
            let bounds = Bounds {
                window,
                ..Bounds::default()
            };
            bounds.counted_share(1000)
        };
        assert_eq!(
            [of(None), of(Some(4000)), of(Some(1000)), of(Some(250))],
            [1.0, 1.0, 1.0, 0.25]
        );
    }

    #[test]
    fn slopes_of_other_heads_stand_between_those_of_a_power_of_two() {
        let of = |heads: u64| (0..heads).map(move |h| alibi_slope(h, heads));
        let powers = |exponents: &[f64]| exponents.iter().map(|e| (-e).exp2()).collect::<Vec<_>>();
        assert_eq!(
            of(8).collect::<Vec<_>>(),
            powers(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
        );
        assert_eq!(of(2).collect::<Vec<_>>(), powers(&[4.0, 8.0]));
        // Those of four heads, then the first and the third of eight.
        assert_eq!(
            of(6).collect::<Vec<_>>(),
            powers(&[2.0, 4.0, 6.0, 8.0, 1.0, 3.0])
        );
        // BLOOM's 112 heads: 64, then 48 of 128.
        let last: f64 = 8.0 * 95.0 / 128.0;
        assert_eq!(alibi_slope(111, 112), (-last).exp2());
        assert_eq!(alibi_slope(0, 1), (-8f64).exp2());
        assert_eq!(alibi_slope(3, 0), alibi_slope(3, 1));
    }
}
