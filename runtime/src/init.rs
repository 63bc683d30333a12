//! Initial values: functions of the seed, the state's path and the element's global index,
//! the same under every layout.

use crate::error::RuntimeError;
use crate::execute::StateRequest;
use crate::rng::{self, Key};
use ir::OpKind;
use ir::op::Init;
use ir::training::TrainingGraph;
use std::collections::BTreeMap;

/// The initial value of the state at `path`, a tensor of lengths `shape`.
pub fn parameter(seed: u64, path: &str, init: Init, shape: &[u64]) -> Vec<f32> {
    let n = shape.iter().product::<u64>() as usize;
    match init {
        Init::Zeros => vec![0.0; n],
        Init::Ones => vec![1.0; n],
        Init::Normal { std } => {
            let mut values = vec![0.0; n];
            rng::fill_normal(Key::init(seed, path), 0, &mut values);
            values
                .iter_mut()
                .for_each(|v| *v = (f64::from(*v) * std) as f32);
            values
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
        assert_eq!(parameter(7, "b", Init::Zeros, &[3]), [0.0; 3]);
        assert_eq!(parameter(7, "g", Init::Ones, &[]), [1.0]);
    }
}
