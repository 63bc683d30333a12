//! Which scores of an attention there are beside the causal ones, and how large they may be.

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
}

impl Bounds {
    /// Whether every key that is no later than a query has a score, of any size.
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
            let bounds = Bounds { window, cap: None };
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
        let of = |window| Bounds { window, cap: None }.counted_share(1000);
        assert_eq!(
            [of(None), of(Some(4000)), of(Some(1000)), of(Some(250))],
            [1.0, 1.0, 1.0, 0.25]
        );
    }
}
