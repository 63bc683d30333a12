//! Initial values: functions of the seed, the state's path and the element's global index,
//! the same under every layout.

use crate::error::RuntimeError;
use crate::execute::StateRequest;
use crate::rng::{self, Key};
use ir::OpKind;
use ir::op::Init;
use ir::training::TrainingGraph;
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Elements that a thread draws at once.
const PART: usize = 1 << 16;

/// The initial value of the state at `path`, a tensor of lengths `shape`.
pub fn parameter(seed: u64, path: &str, init: Init, shape: &[u64]) -> Vec<f32> {
    let n = shape.iter().product::<u64>() as usize;
    match init {
        Init::Zeros => vec![0.0; n],
        Init::Ones => vec![1.0; n],
        Init::Normal { std } => {
            let mut values = vec![0.0; n];
            let key = Key::init(seed, path);
            let parts = values.par_chunks_mut(PART).enumerate();
            parts.for_each(|(i, part)| {
                rng::fill_normal(key, (i * PART) as u64, part);
                part.iter_mut()
                    .for_each(|v| *v = (f64::from(*v) * std) as f32);
            });
            values
        }
        Init::LogCount => (1..=n).map(|i| (i as f64).ln() as f32).collect(),
        Init::TimeStep { low, high } => {
            let key = Key::init(seed, path);
            let draw = |i| {
                let share = f64::from(rng::uniform(key, i as u64));
                let time = (low.ln() + share * (high.ln() - low.ln())).exp();
                // The inverse of softplus.
                (time + (-(-time).exp_m1()).ln()) as f32
            };
            (0..n).map(draw).collect()
        }
    }
}

/// A provider of the initial values that a training graph declares, for `Session::new`.
pub fn from_graph(
    training: &TrainingGraph,
    seed: u64,
) -> impl Fn(StateRequest<'_>) -> Result<Vec<f32>, RuntimeError> + use<> {
    let mut inits = BTreeMap::new();
    for op in training.graph.ops() {
        if let OpKind::State { init, .. } = op.kind {
            inits.insert(op.path.clone(), init);
        }
    }
    move |request| match inits.get(request.path) {
        Some(&init) => Ok(parameter(seed, request.path, init, request.lens)),
        None => Err(RuntimeError::State {
            path: request.path.into(),
            problem: "is not in the training graph".into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_follow_seed_and_path() {
        let draw = |seed, path| parameter(seed, path, Init::Normal { std: 0.02 }, &[100, 200]);
        let base = draw(7, "h.0.w");
        assert_eq!(base, draw(7, "h.0.w"));
        assert!(base != draw(8, "h.0.w") && base != draw(7, "h.1.w"));
        let mean_square =
            base.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / base.len() as f64;
        // 20,000 samples: the mean square is within 5 * sqrt(2 / 20,000) = 5% of the variance.
        assert!((mean_square / 0.0004 - 1.0).abs() < 0.05, "{mean_square}");
        // Threads draw the numbers that one would.
        let (n, std) = (2 * PART + 5, 0.5);
        let mut alone = vec![0.0; n];
        rng::fill_normal(Key::init(7, "large"), 0, &mut alone);
        let scaled: Vec<f32> = alone.iter().map(|v| (f64::from(*v) * std) as f32).collect();
        assert!(scaled == parameter(7, "large", Init::Normal { std }, &[n as u64]));
        assert_eq!(parameter(7, "b", Init::Zeros, &[3]), [0.0; 3]);
        assert_eq!(parameter(7, "g", Init::Ones, &[]), [1.0]);
        assert_eq!(parameter(7, "a", Init::LogCount, &[2]), [0.0, 2f32.ln()]);
        let steps = Init::TimeStep {
            low: 0.001,
            high: 0.1,
        };
        let times: Vec<f64> = parameter(7, "t", steps, &[100])
            .iter()
            .map(|&v| f64::from(v).exp().ln_1p())
            .collect();
        assert!(times.iter().all(|t| (0.00099..0.1001).contains(t)));
        assert!(times.iter().any(|t| *t < 0.005) && times.iter().any(|t| *t > 0.05));
    }
}
