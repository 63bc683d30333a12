//! The training spec: everything that changes the mathematics of a step, and nothing else.
//!
//! A step trains, or only computes the loss ([`Task`]). What speaks of gradients or of the
//! optimizer has no meaning for the latter.

mod file;

use crate::{DType, Figure};
pub use file::TrainFile;
use serde::{Deserialize, Serialize};

/// The task of a step.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Task {
    /// Computes the loss and its gradients, and updates the parameters.
    #[default]
    Training,
    /// Computes the loss: forward passes alone, which change nothing.
    Inference,
}

impl Task {
    /// Whether it is training, which documents need not say.
    pub fn is_training(&self) -> bool {
        *self == Task::Training
    }
    /// Name in documents and sentences.
    pub fn name(self) -> &'static str {
        match self {
            Task::Training => "training",
            Task::Inference => "inference",
        }
    }
}

/// Precision policy. In training, parameters at rest and optimizer states are f32 in every policy;
/// in inference, parameters rest as they are computed with.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Everything f32.
    #[default]
    F32,
    /// Compute and activations bf16; master weights, accumulated gradients, states f32.
    Bf16,
    /// Compute and activations f16, in training with dynamic loss scaling; the rest f32.
    F16,
}

impl Precision {
    /// Element type of activations and of the parameters' compute copies.
    pub fn compute(self) -> DType {
        match self {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::Bf16,
            Precision::F16 => DType::F16,
        }
    }
}

/// The optimizer and its hyper-parameters; the learning rate belongs to the run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Optimizer {
    /// AdamW, Loshchilov & Hutter 2019.
    AdamW {
        /// Decay of the first moment.
        beta1: f64,
        /// Decay of the second moment.
        beta2: f64,
        /// Added to the root of the second moment.
        eps: f64,
        /// Decoupled decay of parameters with two or more dims (as stored in model files);
        /// vectors (biases, norm gains) are not decayed.
        weight_decay: f64,
    },
    /// Stochastic gradient descent with momentum.
    Sgd {
        /// Momentum.
        momentum: f64,
        /// L2 penalty of parameters with two or more dims.
        weight_decay: f64,
    },
}

impl Default for Optimizer {
    fn default() -> Self {
        Optimizer::AdamW {
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
        }
    }
}

/// The mathematics of a training. Defaults: global batch 8, precision f32, AdamW (0.9, 0.95, 1e-8,
/// 0.1), clipping at 1.0, dropout 0, seed 1337.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TrainSpec {
    /// Training, where nothing is said.
    #[serde(default, skip_serializing_if = "Task::is_training")]
    pub task: Task,
    /// Samples (sequences) per optimizer step over the whole cluster.
    pub global_batch: u64,
    /// Samples whose gradients make an update of their own, where a step has several: a part of
    /// `global_batch`, which is the microbatch of an asynchronous schedule (PipeDream). The pin of
    /// such a schedule sets it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minibatch: Option<u64>,
    /// Tokens per sample.
    pub sequence: u64,
    /// Precision policy.
    pub precision: Precision,
    /// Optimizer.
    pub optimizer: Optimizer,
    /// Largest global gradient norm; none clips nothing.
    pub clip_norm: Option<f64>,
    /// Dropout probability, used wherever the model has dropout; 0 removes the ops.
    pub dropout: f64,
    /// Seed of initial weights, dropout and the order of data.
    pub seed: u64,
}

impl Default for TrainSpec {
    fn default() -> Self {
        TrainSpec {
            task: Task::Training,
            global_batch: 8,
            minibatch: None,
            sequence: 1024,
            precision: Precision::F32,
            optimizer: Optimizer::default(),
            clip_norm: Some(1.0),
            dropout: 0.0,
            seed: 1337,
        }
    }
}

/// The numbers that a figure may be, and their words in messages.
type Numbers = (fn(f64) -> bool, &'static str);

const SHARES: Numbers = (|x| (0.0..1.0).contains(&x), "[0, 1)");
const POSITIVE: Numbers = (|x| x.is_finite() && x > 0.0, "a positive number");
const FROM_ZERO: Numbers = (|x| x.is_finite() && x >= 0.0, "0 or more");

impl TrainSpec {
    /// Updates of the parameters in a step.
    pub fn updates_per_step(&self) -> u64 {
        self.minibatch.map_or(1, |n| self.global_batch / n.max(1))
    }

    /// Element type in which parameters rest between steps.
    pub fn parameters_at_rest(&self) -> DType {
        match self.task {
            Task::Training => DType::F32,
            Task::Inference => self.precision.compute(),
        }
    }

    /// Lists the values out of range, field by field; empty when the spec can be trained.
    pub fn problems(&self) -> Vec<String> {
        let sizes = [
            ("global_batch", self.global_batch),
            ("sequence", self.sequence),
        ];
        let sizes = sizes
            .into_iter()
            .filter(|(_, n)| !(1..=1 << 32).contains(n));
        let sizes = sizes.map(|(key, n)| format!("{key} is {n}, expected 1 to 2^32"));
        let mut figures = vec![("dropout", self.dropout, SHARES)];
        figures.extend(self.clip_norm.map(|norm| ("clip_norm", norm, POSITIVE)));
        let decay = match self.optimizer {
            Optimizer::AdamW {
                beta1,
                beta2,
                eps,
                weight_decay,
            } => {
                figures.push(("beta1", beta1, SHARES));
                figures.push(("beta2", beta2, SHARES));
                figures.push(("eps", eps, POSITIVE));
                weight_decay
            }
            Optimizer::Sgd {
                momentum,
                weight_decay,
            } => {
                figures.push(("momentum", momentum, SHARES));
                weight_decay
            }
        };
        figures.push(("weight_decay", decay, FROM_ZERO));
        let figures = figures.into_iter().filter(|(_, x, (has, _))| !has(*x));
        let words = |(key, x, (_, all)): (&str, f64, Numbers)| {
            format!("{key} is {}, expected {all}", Figure(x))
        };
        let drops = (!self.task.is_training() && self.dropout > 0.0).then(|| {
            format!(
                "dropout is {}, expected 0 in inference",
                Figure(self.dropout)
            )
        });
        sizes
            .chain(figures.map(words))
            .chain(drops)
            .chain(self.asynchronous_problems())
            .collect()
    }

    /// Why the step cannot have several updates: what one of them would need of all stages at
    /// once, while each updates when it has gradients.
    fn asynchronous_problems(&self) -> Vec<String> {
        let Some(minibatch) = self.minibatch else {
            return Vec::new();
        };
        let mut problems = Vec::new();
        if minibatch == 0 || !self.global_batch.is_multiple_of(minibatch) {
            problems.push(format!(
                "a minibatch of {minibatch} samples does not divide the global batch of {}",
                self.global_batch
            ));
        }
        if !self.task.is_training() {
            problems.push("a minibatch is given for inference, which has no updates".into());
        }
        if let Some(norm) = self.clip_norm {
            problems.push(format!(
                "clip_norm is {}, but stages that update by themselves never know the norm of all gradients; train with --clip-norm none",
                Figure(norm)
            ));
        }
        if self.precision == Precision::F16 {
            problems.push(
                "precision is f16, whose loss scale needs all stages to skip the same updates, but stages update by themselves; train with --precision bf16 or f32".into(),
            );
        }
        problems
    }
}
