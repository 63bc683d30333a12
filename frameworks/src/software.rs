//! How the software of a run executes a program, as data: which attention kernels it has, what
//! waits for what, and what it casts, fuses and moves.
//!
//! Every figure belongs to a framework's generation or a family of kernels, never to a model.

use crate::held::ProcessMemory;
use ir::DType;
use ir::pattern::matches;
use serde::Deserialize;

/// The behaviour of one generation of a framework.
#[derive(Clone, Debug, PartialEq)]
pub struct Software {
    /// Name of the generation.
    pub name: String,
    /// Kernels of attention.
    pub attention: AttentionKernel,
    /// Seconds that the host needs to issue one kernel. It issues them ahead of the device, which
    /// waits where none is left.
    pub host_s_per_kernel: f64,
    /// Whether the host waits for every kernel before it issues the next
    /// (`CUDA_LAUNCH_BLOCKING=1`).
    pub synchronous_launches: bool,
    /// Bytes that elementwise operations move, over what one kernel for each would: below 1
    /// where a compiler fuses them, above where a framework adds passes of its own.
    pub elementwise_traffic: f64,
    /// Bytes that a norm and its gradients move, over what one kernel for each would: above 1
    /// where a framework writes them as a chain of operations, each a kernel.
    pub norm_traffic: f64,
    /// The same of rotary embeddings; `elementwise_traffic` where it is absent.
    pub rotary_traffic: Option<f64>,
    /// Whether an elementwise operation that one other reads, and nothing else of its pass, is
    /// part of that one's kernel: a bias with the activation or the dropout behind it, and
    /// these with the sum of the residual.
    pub fused_elementwise: bool,
    /// Bytes that the loss moves for each logit, forward and backward together; 0 where the
    /// kernels are as the graph says, reading the logits twice and writing their gradient once.
    pub loss_bytes_per_logit: f64,
    /// Share of the rate of one matmul that the matmuls of several experts together reach: their
    /// tokens are padded, sorted and cast by kernels of their own, expert by expert.
    pub grouped_matmul_share: f64,
    /// Whether the ops between the matmuls of experts are part of their kernels: the activation,
    /// its product, the sum of their operand's gradients, and casts of what these make.
    pub fused_experts: bool,
    /// Whether tokens travel to experts, and back, beside the passes of another microbatch.
    pub overlapped_dispatch: bool,
    /// Whether a token crosses the network once for each host that its experts are in, and is
    /// copied there (DeepEP, HybridEP).
    pub dispatch_once_per_host: bool,
    /// The type that matmuls with parameters run in, where it is not that of the activations.
    pub narrow: Option<Narrow>,
    /// Matmuls that run in another type than `narrow`; of several that name an op the first counts.
    pub exceptions: Vec<Exception>,
    /// Whether operands are cast once, into the copies of all matmuls that read them, and kept:
    /// parameters for a step, activations from the forward to the backward pass.
    pub kept_casts: bool,
    /// Multiprocessors that a collective holds while it runs, and kernels beside it lack, where
    /// the device says how many it has: fewer than these, and at most half of them count.
    pub collective_multiprocessors: u32,
    /// Names of the mesh axes whose collectives kernels wait for, as if both had one stream;
    /// collectives over other axes run beside kernels.
    pub blocking_axes: Vec<String>,
    /// Whether the reduction of a gradient begins when the last microbatch has made it, not
    /// when all are made.
    pub overlapped_gradients: bool,
    /// Whether parameters are gathered ahead of the layer that needs them, beside the reductions
    /// of gradients.
    pub prefetched_parameters: bool,
    /// Whether operands that are gathered for a matmul travel in the type of that matmul.
    pub narrow_gathers: bool,
    /// Names of the mesh axes over whose gathers and scatters a tensor is copied once more,
    /// because its shards do not lie one after the other in memory.
    pub copied_axes: Vec<String>,
    /// Seconds in which the host cuts out and copies the part of one rank in a gather or scatter
    /// over one of `copied_axes`, where these take a list with a tensor for every rank
    /// (`torch.distributed.all_gather`) and each begins when the one before is done: added to every
    /// such collective, once for each rank; 0 where they take one tensor.
    pub host_s_per_part: f64,
    /// Whether a parameter that the backward pass gathers to recompute its layer is released
    /// then, and gathered once more for the gradients.
    pub gathers_again: bool,
    /// Names of the mesh axes over which what is gathered for a matmul, or scattered from one,
    /// moves piece by piece while the matmul computes the others (Wang et al. 2023; "userbuffers"
    /// of Transformer Engine, asynchronous tensor parallelism of PyTorch).
    pub piecewise_axes: Vec<String>,
    /// Names of the mesh axes whose collectives of the backward pass run beside a matmul of the
    /// same op: the sum of an operand's gradient beside the matmul of the weight's gradient, a
    /// gather for that matmul beside the one before it.
    pub paired_axes: Vec<String>,
    /// Whether recomputing a layer runs all of its forward again, also what no gradient needs:
    /// its last matmul and what follows. So does a checkpoint that calls the layer once more.
    pub recomputes_to_the_end: bool,
    /// Whether updated parameters reach the other replicas by a broadcast from each owner, one
    /// after the other, in place of one all-gather.
    pub broadcast_updates: bool,
    /// Element type in which sums of gradients travel, where it is not that of the sums.
    pub gradient_dtype: Option<DType>,
    /// Whether gradients of states with copies (HSDP) meet those of the copies after every microbatch,
    /// each right behind its reduction over the ranks that the states are split over, not once a step.
    pub copies_meet_at_once: bool,
    /// Element type in which gradients are summed over the microbatches of a step, where it is
    /// not that of the program's sums.
    pub sum_dtype: Option<DType>,
    /// Whether the matmul of a parameter's gradient adds to the sum over microbatches as it
    /// writes, where nothing is between the two.
    pub fused_gradient_sums: bool,
    /// The memory of a rank's process; where it is absent, the arena of the program and what
    /// the device reserves (`memory_reserved_bytes`).
    pub memory: Option<ProcessMemory>,
}

/// A type of matmuls that is narrower than that of the activations: operands are cast before.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Narrow {
    /// The element type.
    pub dtype: DType,
    /// How operands are scaled into it.
    pub scaling: Scaling,
    /// Share of the rate of a matmul in that type that the kernel for this scaling reaches.
    pub share: f64,
}

/// Matmuls that run in a type of their own.
#[derive(Clone, Debug, PartialEq)]
pub struct Exception {
    /// Patterns of which one is the path of such an op in the forward graph, with `*` for any
    /// characters; gradients and what is recomputed run as their op does.
    pub ops: Vec<String>,
    /// Their type; that of the activations where there is none.
    pub narrow: Option<Narrow>,
}

impl Narrow {
    /// Returns whether gathers for such a matmul may move its type: one scale for each row of a
    /// matrix does not survive a gather of its pieces (torchao).
    pub fn is_gathered(self) -> bool {
        self.scaling != Scaling::Row
    }
}

impl Exception {
    /// Returns whether an op of the forward graph is one of these.
    pub fn names(&self, op: &str) -> bool {
        self.ops.iter().any(|ops| matches(ops, op))
    }
}

/// How the operands of a matmul are scaled before they are cast to eight or four bits, in the
/// terms of Transformer Engine's recipes. What a cast reads and writes beside the operand and
/// its copy follows from it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scaling {
    /// One scale from the maxima of earlier steps (`DelayedScaling`): a cast is one pass.
    #[default]
    Delayed,
    /// One scale from the operand's own maximum (`Float8CurrentScaling`, torchao's tensorwise):
    /// a pass before the cast reads the operand.
    Tensor,
    /// A scale for each row (torchao's rowwise): its maximum is found as the row is cast.
    Row,
    /// A scale of four bytes for 128 elements (`Float8BlockScaling`).
    Block128,
    /// A scale of one byte for 32 elements (`MXFP8BlockScaling`).
    Block32,
    /// A scale of one byte for 16 elements and one for all (`NVFP4BlockScaling`): a pass before
    /// the cast reads the operand. The Hadamard transform is part of these passes.
    Block16,
}

impl Scaling {
    /// Bytes that a cast moves for each element, beside reading it once and writing its copy;
    /// `source_bytes` is the size of an element of the operand.
    pub fn extra_bytes(self, source_bytes: f64) -> f64 {
        match self {
            Scaling::Delayed | Scaling::Row => 0.0,
            Scaling::Tensor => source_bytes,
            Scaling::Block128 => 4.0 / 128.0,
            Scaling::Block32 => 1.0 / 32.0,
            Scaling::Block16 => source_bytes + 1.0 / 16.0,
        }
    }

    /// Whether a cast is part of the kernel before it (a norm, an activation) and so moves what
    /// elementwise operations do. Two-level scales need an operand's maximum first: their casts
    /// are kernels of their own.
    fn is_fused(self) -> bool {
        self != Scaling::Block16
    }
}

/// Kernels of attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AttentionKernel {
    /// Scores stay on the chip (Dao et al. 2022).
    Fused {
        /// Rate of the forward direction over the best fused kernel of the device.
        rate: f64,
        /// Rate of the backward direction over the forward one's.
        backward_share: f64,
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
    /// Whether a cast with this scaling is part of the kernel before it and moves what
    /// elementwise operations do. Where casts are kept (Transformer Engine) only delayed scaling
    /// knows the scale before the values, so only its norms write the narrow type themselves;
    /// a compiler fuses what is not scaled at two levels.
    pub fn fuses_casts(&self, scaling: Scaling) -> bool {
        match self.kept_casts {
            true => scaling == Scaling::Delayed,
            false => scaling.is_fused(),
        }
    }

    /// The type that a matmul with a parameter runs in, by the path of its op in the program, where it
    /// is narrower than the activations'.
    pub fn narrow_of(&self, path: &str) -> Option<Narrow> {
        let op = forward_op(path);
        let own = self.exceptions.iter().find(|e| e.names(op));
        own.map_or(self.narrow, |e| e.narrow)
    }

    /// All types that matmuls run in beside that of the activations.
    pub fn narrow_types(&self) -> impl Iterator<Item = DType> {
        let exceptions = self.exceptions.iter().filter_map(|e| e.narrow);
        self.narrow.into_iter().chain(exceptions).map(|n| n.dtype)
    }

    /// Software of which the device's figures say all: nothing waits, nothing is cast.
    pub fn plain(name: &str) -> Software {
        Software {
            name: name.into(),
            attention: AttentionKernel::Fused {
                rate: 1.0,
                backward_share: 1.0,
            },
            host_s_per_kernel: 0.0,
            synchronous_launches: false,
            elementwise_traffic: 1.0,
            norm_traffic: 1.0,
            rotary_traffic: None,
            fused_elementwise: false,
            loss_bytes_per_logit: 0.0,
            grouped_matmul_share: 1.0,
            fused_experts: false,
            overlapped_dispatch: false,
            dispatch_once_per_host: false,
            narrow: None,
            exceptions: Vec::new(),
            kept_casts: false,
            collective_multiprocessors: 0,
            blocking_axes: Vec::new(),
            overlapped_gradients: false,
            prefetched_parameters: false,
            narrow_gathers: false,
            copied_axes: Vec::new(),
            host_s_per_part: 0.0,
            gathers_again: false,
            piecewise_axes: Vec::new(),
            paired_axes: Vec::new(),
            recomputes_to_the_end: false,
            broadcast_updates: false,
            gradient_dtype: None,
            copies_meet_at_once: false,
            sum_dtype: None,
            fused_gradient_sums: false,
            memory: None,
        }
    }
}

/// The path of the forward op that a program's op is, computes a gradient of or makes again: the names
/// that the training graph gives these begin with `grad.` and `recompute.`, and a gradient's ends with the
/// operand that it is of.
fn forward_op(path: &str) -> &str {
    let path = path.strip_prefix("recompute.").unwrap_or(path);
    let gradient = path.strip_prefix("grad.").and_then(|p| p.rsplit_once('.'));
    gradient.map_or(path, |(op, _)| op)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_exception_that_names_an_op_says_its_type() {
        let narrow = |dtype, scaling| Narrow {
            dtype,
            scaling,
            share: 1.0,
        };
        let four = narrow(DType::F4e2m1, Scaling::Block16);
        let eight = narrow(DType::F8e4m3, Scaling::Block32);
        let exception = |ops: &str, narrow| Exception {
            ops: vec![ops.into()],
            narrow,
        };
        let software = Software {
            narrow: Some(four),
            exceptions: vec![
                exception("h.0.*", None),
                exception("h.*.mamba.out", Some(eight)),
            ],
            ..Software::plain("a framework")
        };
        for (path, expected) in [
            ("h.1.mamba.x", Some(four)),
            ("h.1.mamba.out", Some(eight)),
            ("grad.h.1.mamba.out.lhs", Some(eight)),
            ("grad.h.1.mamba.out.rhs", Some(eight)),
            ("recompute.h.1.mamba.out", Some(eight)),
            ("h.0.mamba.out", None),
            ("grad.h.0.mamba.x.rhs", None),
        ] {
            assert_eq!(software.narrow_of(path), expected, "{path}");
        }
        let types: Vec<DType> = software.narrow_types().collect();
        assert_eq!(types, [DType::F4e2m1, DType::F8e4m3]);
        assert_eq!(Software::plain("another").narrow_of("h.1.mamba.x"), None);
    }
}
