//! How the software of a run executes a program, as data: which attention kernels it has, what
//! a kernel costs its host, and what waits for what. Absent from a cluster it is Meshwright's
//! own: fused attention, every stream free, no host in the way.
//!
//! Every figure belongs to a framework's generation or a family of kernels, never to a model.

use crate::DType;
use serde::{Deserialize, Serialize};

/// What a framework's generation does when it executes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Software {
    /// Name of the generation.
    pub name: String,
    /// Kernels of attention.
    pub attention: AttentionKernel,
    /// Seconds that the host needs to issue one kernel. A kernel that is shorter makes the
    /// device wait.
    pub host_s_per_kernel: f64,
    /// Bytes that elementwise operations move, over what one kernel for each would: below 1
    /// where a compiler fuses them, above where a framework adds passes of its own.
    pub elementwise_traffic: f64,
    /// Bytes that the loss moves for each logit, forward and backward together; 0 where the
    /// kernels are as the graph says, reading the logits twice and writing their gradient once.
    pub loss_bytes_per_logit: f64,
    /// Element type that matmuls with parameters run in, where it is not that of the
    /// activations: operands are cast before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matmul_dtype: Option<DType>,
    /// Names of the mesh axes whose collectives kernels wait for, as if both had one stream;
    /// collectives over other axes run beside kernels.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocking_axes: Vec<String>,
    /// Whether a rank waits for its transfers before it goes on.
    pub blocking_transfers: bool,
    /// Whether the reduction of a gradient begins when the last microbatch has made it, not
    /// when all are made.
    pub overlapped_gradients: bool,
    /// Element type in which sums of gradients travel, where it is not that of the sums.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gradient_dtype: Option<DType>,
}

/// Kernels of attention.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum AttentionKernel {
    /// Scores stay on the chip (Dao et al. 2022).
    Fused {
        /// Rate over the best fused kernel of the device.
        rate: f64,
    },
    /// Two batched matmuls with the scores in memory between them.
    Unfused {
        /// Passes over the scores beside those of the matmuls in the forward direction: each
        /// reads or writes every score once.
        forward_passes: f64,
        /// The same in the backward direction.
        backward_passes: f64,
    },
}

impl Software {
    /// What is wrong with the figures; empty when they make sense.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let mut check = |ok: bool, key: &str, x: f64| {
            if !ok {
                problems.push(format!("software.{key} is {x}"));
            }
        };
        let amount = |x: f64| (0.0..=1e3).contains(&x);
        check(
            amount(self.host_s_per_kernel),
            "host_s_per_kernel",
            self.host_s_per_kernel,
        );
        check(
            amount(self.elementwise_traffic),
            "elementwise_traffic",
            self.elementwise_traffic,
        );
        check(
            amount(self.loss_bytes_per_logit),
            "loss_bytes_per_logit",
            self.loss_bytes_per_logit,
        );
        match self.attention {
            AttentionKernel::Fused { rate } => {
                check((1e-3..=10.0).contains(&rate), "attention.fused.rate", rate);
            }
            AttentionKernel::Unfused {
                forward_passes: f,
                backward_passes: b,
            } => {
                check(amount(f), "attention.unfused.forward_passes", f);
                check(amount(b), "attention.unfused.backward_passes", b);
            }
        }
        problems
    }
}
