//! How the software of a run executes a program, as data: which attention kernels it has, what
//! a kernel costs its host, and what waits for what. Absent from a cluster it is Meshwright's
//! own: fused attention, every stream free, no host in the way.
//!
//! Every figure belongs to a framework's generation or a family of kernels, never to a model.

mod memory;

use crate::cluster::SHARE;
use crate::mesh::PLANNED_AXES;
use crate::{DType, Figure};
pub use memory::{InFlight, ProcessMemory, Reuse};
use serde::{Deserialize, Serialize};

/// The behaviour of one generation of a framework.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
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
    #[serde(default, skip_serializing_if = "is_false")]
    pub synchronous_launches: bool,
    /// The part of the forward and backward passes that CUDA graphs launch: names in the paths of
    /// ops, as `attn` of `h.0.attn.q`, or `*` for all of both passes, collectives too. The host
    /// issues a run of captured kernels at once, and they follow each other faster.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub captured: Vec<String>,
    /// Bytes that elementwise operations move, over what one kernel for each would: below 1
    /// where a compiler fuses them, above where a framework adds passes of its own.
    pub elementwise_traffic: f64,
    /// Bytes that a norm and its gradients move, over what one kernel for each would: above 1
    /// where a framework writes them as a chain of operations, each a kernel.
    #[serde(default = "whole", skip_serializing_if = "is_whole")]
    pub norm_traffic: f64,
    /// The same of rotary embeddings; `elementwise_traffic` where it is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rotary_traffic: Option<f64>,
    /// Whether an elementwise operation that one other reads, and nothing else of its pass, is
    /// part of that one's kernel: a bias with the activation or the dropout behind it, and
    /// these with the sum of the residual.
    #[serde(default, skip_serializing_if = "is_false")]
    pub fused_elementwise: bool,
    /// Bytes that the loss moves for each logit, forward and backward together; 0 where the
    /// kernels are as the graph says, reading the logits twice and writing their gradient once.
    pub loss_bytes_per_logit: f64,
    /// Share of the rate of a matmul whose rows do not end on 16 bytes, where a device's tiles
    /// are known: libraries fall back to kernels that load element by element.
    #[serde(default = "whole", skip_serializing_if = "is_whole")]
    pub unaligned_matmul_share: f64,
    /// Share of the rate of one matmul that the matmuls of several experts together reach: their
    /// tokens are padded, sorted and cast by kernels of their own, expert by expert.
    #[serde(default = "whole", skip_serializing_if = "is_whole")]
    pub grouped_matmul_share: f64,
    /// Whether the ops between the matmuls of experts are part of their kernels: the activation,
    /// its product, the sum of their operand's gradients, and casts of what these make.
    #[serde(default, skip_serializing_if = "is_false")]
    pub fused_experts: bool,
    /// Whether tokens travel to experts, and back, beside the passes of another microbatch.
    #[serde(default, skip_serializing_if = "is_false")]
    pub overlapped_dispatch: bool,
    /// Whether a token crosses the network once for each host that its experts are in, and is
    /// copied there (DeepEP, HybridEP).
    #[serde(default, skip_serializing_if = "is_false")]
    pub dispatch_once_per_host: bool,
    /// Element type that matmuls with parameters run in, where it is not that of the
    /// activations: operands are cast before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matmul_dtype: Option<DType>,
    /// How those operands are scaled into the narrower type.
    #[serde(default, skip_serializing_if = "Scaling::is_delayed")]
    pub matmul_scaling: Scaling,
    /// Share of the rate of a matmul in that type that the kernel for this scaling reaches.
    #[serde(default = "whole", skip_serializing_if = "is_whole")]
    pub narrow_matmul_share: f64,
    /// Whether operands are cast once, into the copies of all matmuls that read them, and kept:
    /// parameters for a step, activations from the forward to the backward pass.
    #[serde(default, skip_serializing_if = "is_false")]
    pub kept_casts: bool,
    /// Times that such a cast reads its operand beyond what its scaling needs, where the copies
    /// are written by kernels of their own.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub more_cast_reads: u8,
    /// Whether one narrow copy serves all matmuls that read it, along whichever dim they sum;
    /// else a second one is transposed.
    #[serde(default, skip_serializing_if = "is_false")]
    pub single_copies: bool,
    /// Multiprocessors that a collective holds while it runs, and kernels beside it lack, where
    /// the device says how many it has: fewer than these, and at most half of them count.
    #[serde(default, skip_serializing_if = "is_none_held")]
    pub collective_multiprocessors: u32,
    /// Names of the mesh axes whose collectives kernels wait for, as if both had one stream;
    /// collectives over other axes run beside kernels.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocking_axes: Vec<String>,
    /// Whether a rank waits for its transfers before it goes on.
    pub blocking_transfers: bool,
    /// Whether all sends and receives between two passes of a rank are posted together, so that
    /// none waits for the partner of another; else they proceed one after the other.
    #[serde(default, skip_serializing_if = "is_false")]
    pub batched_transfers: bool,
    /// Whether the reduction of a gradient begins when the last microbatch has made it, not
    /// when all are made.
    pub overlapped_gradients: bool,
    /// Whether parameters are gathered ahead of the layer that needs them, beside the reductions
    /// of gradients.
    #[serde(default, skip_serializing_if = "is_false")]
    pub prefetched_parameters: bool,
    /// Whether operands that are gathered for a matmul travel in `matmul_dtype`.
    #[serde(default, skip_serializing_if = "is_false")]
    pub narrow_gathers: bool,
    /// Whether ranks that hold the same part of what a stage sends on each send a share of it,
    /// which the receivers gather.
    #[serde(default, skip_serializing_if = "is_false")]
    pub scattered_transfers: bool,
    /// Names of the mesh axes over whose gathers and scatters a tensor is copied once more,
    /// because its shards do not lie one after the other in memory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copied_axes: Vec<String>,
    /// Seconds in which the host cuts out and copies the part of one rank in a gather or scatter
    /// over one of `copied_axes`, where these take a list with a tensor for every rank
    /// (`torch.distributed.all_gather`) and each begins when the one before is done: added to every
    /// such collective, once for each rank; 0 where they take one tensor.
    #[serde(default, skip_serializing_if = "is_no_time")]
    pub host_s_per_part: f64,
    /// Whether a parameter that the backward pass gathers to recompute its layer is released
    /// then, and gathered once more for the gradients.
    #[serde(default, skip_serializing_if = "is_false")]
    pub gathers_again: bool,
    /// Names of the mesh axes over which what is gathered for a matmul, or scattered from one,
    /// moves piece by piece while the matmul computes the others (Wang et al. 2023; "userbuffers"
    /// of Transformer Engine, asynchronous tensor parallelism of PyTorch).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub piecewise_axes: Vec<String>,
    /// Names of the mesh axes whose collectives of the backward pass run beside a matmul of the
    /// same op: the sum of an operand's gradient beside the matmul of the weight's gradient, a
    /// gather for that matmul beside the one before it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub paired_axes: Vec<String>,
    /// Whether recomputing a layer runs all of its forward again, also what no gradient needs:
    /// its last matmul and what follows. So does a checkpoint that calls the layer once more.
    #[serde(default, skip_serializing_if = "is_false")]
    pub recomputes_to_the_end: bool,
    /// Whether updated parameters reach the other replicas by a broadcast from each owner, one
    /// after the other, in place of one all-gather.
    #[serde(default, skip_serializing_if = "is_false")]
    pub broadcast_updates: bool,
    /// Element type in which sums of gradients travel, where it is not that of the sums.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gradient_dtype: Option<DType>,
    /// Element type in which gradients are summed over the microbatches of a step, where it is
    /// not that of the program's sums.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sum_dtype: Option<DType>,
    /// Whether the matmul of a parameter's gradient adds to the sum over microbatches as it
    /// writes, where nothing is between the two.
    #[serde(default, skip_serializing_if = "is_false")]
    pub fused_gradient_sums: bool,
    /// The memory of a rank's process; where it is absent, the arena of the program and what
    /// the device reserves (`memory_reserved_bytes`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<ProcessMemory>,
}

/// How the operands of a matmul are scaled before they are cast to eight or four bits, in the
/// terms of Transformer Engine's recipes. What a cast reads and writes beside the operand and
/// its copy follows from it.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
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

    fn is_delayed(&self) -> bool {
        *self == Scaling::Delayed
    }
}

fn is_false(x: &bool) -> bool {
    !x
}

fn is_zero(x: &u8) -> bool {
    *x == 0
}

fn is_no_time(x: &f64) -> bool {
    *x == 0.0
}

fn is_none_held(x: &u32) -> bool {
    *x == 0
}

fn whole() -> f64 {
    1.0
}

fn is_whole(x: &f64) -> bool {
    *x == 1.0
}

/// The range of a figure that is no share, for messages.
const AMOUNT: &str = "expected 0 to 1000";

/// Names of ops that graphs launch, at most: an op's path is held against each.
const MOST_CAPTURED: usize = 64;

/// Kernels of attention.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum AttentionKernel {
    /// Scores stay on the chip (Dao et al. 2022).
    Fused {
        /// Rate of the forward direction over the best fused kernel of the device.
        rate: f64,
        /// Rate of the backward direction over the forward one's.
        #[serde(default = "whole", skip_serializing_if = "is_whole")]
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
    /// Whether a cast to the type of matmuls is part of the kernel before it and moves what
    /// elementwise operations do. Where casts are kept (Transformer Engine) only delayed scaling
    /// knows the scale before the values, so only its norms write the narrow type themselves;
    /// a compiler fuses what is not scaled at two levels.
    pub fn fuses_casts(&self) -> bool {
        match self.kept_casts {
            true => self.matmul_scaling == Scaling::Delayed,
            false => self.matmul_scaling.is_fused(),
        }
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
            captured: Vec::new(),
            elementwise_traffic: 1.0,
            norm_traffic: 1.0,
            rotary_traffic: None,
            fused_elementwise: false,
            loss_bytes_per_logit: 0.0,
            unaligned_matmul_share: 1.0,
            grouped_matmul_share: 1.0,
            fused_experts: false,
            overlapped_dispatch: false,
            dispatch_once_per_host: false,
            matmul_dtype: None,
            matmul_scaling: Scaling::default(),
            narrow_matmul_share: 1.0,
            kept_casts: false,
            more_cast_reads: 0,
            single_copies: false,
            collective_multiprocessors: 0,
            blocking_axes: Vec::new(),
            blocking_transfers: false,
            batched_transfers: false,
            overlapped_gradients: false,
            prefetched_parameters: false,
            narrow_gathers: false,
            scattered_transfers: false,
            copied_axes: Vec::new(),
            host_s_per_part: 0.0,
            gathers_again: false,
            piecewise_axes: Vec::new(),
            paired_axes: Vec::new(),
            recomputes_to_the_end: false,
            broadcast_updates: false,
            gradient_dtype: None,
            sum_dtype: None,
            fused_gradient_sums: false,
            memory: None,
        }
    }

    /// Whether graphs launch the op of this path.
    pub fn captures(&self, path: &str) -> bool {
        let is_named = |part: &str| self.captured.iter().any(|c| c == part);
        self.captures_all() || path.split('.').any(is_named)
    }

    /// Names that graphs are said to launch and no op of these paths has, in their order.
    pub fn captured_nowhere<'p>(&self, paths: impl Iterator<Item = &'p str>) -> Vec<&str> {
        let mut nowhere: Vec<&str> = self.captured.iter().map(String::as_str).collect();
        nowhere.retain(|name| *name != "*");
        for path in paths {
            nowhere.retain(|name| !path.split('.').any(|part| part == *name));
        }
        nowhere
    }

    /// Whether one graph launches all of a pass.
    pub fn captures_all(&self) -> bool {
        self.captured.iter().any(|c| c == "*")
    }

    /// Lists the problems of the figures; empty when they make sense.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if self.name.trim().is_empty() {
            problems.push("software.name is empty; name the framework that is predicted".into());
        }
        let mut check = |ok: bool, key: &str, x: f64, expected: &str| {
            if !ok {
                problems.push(format!("software.{key} is {x}, {expected}", x = Figure(x)));
            }
        };
        let amount = |x: f64| (0.0..=1e3).contains(&x);
        for (key, x) in [
            ("elementwise_traffic", self.elementwise_traffic),
            ("norm_traffic", self.norm_traffic),
            ("rotary_traffic", self.rotary_traffic.unwrap_or(1.0)),
            ("loss_bytes_per_logit", self.loss_bytes_per_logit),
        ] {
            check(amount(x), key, x, AMOUNT);
        }
        for (key, seconds) in [
            ("host_s_per_kernel", self.host_s_per_kernel),
            ("host_s_per_part", self.host_s_per_part),
        ] {
            let expected = "expected 0 to 0.1 (seconds)";
            check((0.0..=0.1).contains(&seconds), key, seconds, expected);
        }
        for (key, share) in [
            ("unaligned_matmul_share", self.unaligned_matmul_share),
            ("grouped_matmul_share", self.grouped_matmul_share),
            ("narrow_matmul_share", self.narrow_matmul_share),
        ] {
            check(share > 0.0 && share <= 1.0, key, share, SHARE);
        }
        check(
            self.more_cast_reads <= 8,
            "more_cast_reads",
            f64::from(self.more_cast_reads),
            "expected 0 to 8",
        );
        match self.attention {
            AttentionKernel::Fused {
                rate,
                backward_share: back,
            } => {
                let sane = 1e-3..=2.0;
                let expected = "expected 0.001 to 2";
                check(sane.contains(&rate), "attention.fused.rate", rate, expected);
                let key = "attention.fused.backward_share";
                check(sane.contains(&back), key, back, expected);
            }
            AttentionKernel::Unfused {
                forward_passes: f,
                backward_passes: b,
            } => {
                check(amount(f), "attention.unfused.forward_passes", f, AMOUNT);
                check(amount(b), "attention.unfused.backward_passes", b, AMOUNT);
            }
        }
        let axes = [
            ("blocking_axes", &self.blocking_axes),
            ("copied_axes", &self.copied_axes),
            ("piecewise_axes", &self.piecewise_axes),
            ("paired_axes", &self.paired_axes),
        ];
        for (key, names) in axes {
            for (i, name) in names.iter().enumerate() {
                if !PLANNED_AXES.contains(&name.as_str()) {
                    problems.push(format!(
                        "software.{key}[{i}] is `{name}`, expected one of the axes that plans have: {}",
                        PLANNED_AXES.join(", ")
                    ));
                } else if names[..i].contains(name) {
                    problems.push(format!("software.{key}[{i}] names `{name}` again"));
                }
            }
        }
        for (i, name) in self.captured.iter().enumerate() {
            let letter = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
            if name != "*" && (name.is_empty() || !name.chars().all(letter)) {
                problems.push(format!(
                    "software.captured[{i}] is `{name}`, expected `*` or one name between the dots of a path, as `attn`"
                ));
            }
        }
        if self.captured.len() > MOST_CAPTURED {
            problems.push(format!(
                "software.captured has {} names, more than {MOST_CAPTURED}",
                self.captured.len()
            ));
        }
        let summed = [DType::F32, DType::Bf16, DType::F16];
        if let Some(t) = self.gradient_dtype.filter(|t| !summed.contains(t)) {
            problems.push(format!(
                "software.gradient_dtype is {}, expected f32, bf16 or f16: sums of gradients travel in no other",
                t.name()
            ));
        }
        if self.matmul_dtype == Some(DType::I32) {
            problems.push("software.matmul_dtype is i32, expected a type of floats".into());
        }
        problems.extend(self.memory.iter().flat_map(ProcessMemory::problems));
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn software() -> Software {
        Software {
            blocking_axes: vec!["data".into(), "tensor".into()],
            piecewise_axes: vec!["x".into()],
            gradient_dtype: Some(DType::Bf16),
            memory: Some(ProcessMemory {
                context_bytes: crate::Bytes(0),
                communicator_bytes: crate::Bytes(0),
                gradient_bytes: 4.0,
                pass_gradient_bytes: 0.0,
                sharded_copies: false,
                largest_gradient_bytes: 0.0,
                update_bytes: 0.0,
                bucket_bytes: crate::Bytes(0),
                logit_bytes: 0.0,
                score_bytes: 0.0,
                mask_bytes: 0.0,
                in_flight: InFlight::Buffered { per_stage: 2 },
                keeps_transfers: false,
                reuse: Reuse::Blocks,
                slack: 0.0,
            }),
            ..Software::plain("a framework")
        }
    }

    /// The one problem of a software that `change` spoils.
    fn problem(change: impl Fn(&mut Software)) -> String {
        let mut s = software();
        assert_eq!(s.problems(), Vec::<String>::new());
        change(&mut s);
        let problems = s.problems();
        assert_eq!(problems.len(), 1, "{problems:?}");
        problems[0].clone()
    }

    #[test]
    fn names_and_types_that_nothing_has_are_refused() {
        let said = problem(|s| s.copied_axes = vec!["data".into(), "tensr".into()]);
        assert!(
            said.starts_with("software.copied_axes[1] is `tensr`"),
            "{said}"
        );
        assert!(
            said.ends_with("x, y, data, expert, context, tensor"),
            "{said}"
        );
        let said = problem(|s| s.blocking_axes.push("data".into()));
        assert_eq!(said, "software.blocking_axes[2] names `data` again");
        for dtype in [DType::I32, DType::F4e2m1, DType::F8e4m3] {
            let said = problem(|s| s.gradient_dtype = Some(dtype));
            assert!(said.starts_with("software.gradient_dtype is "), "{said}");
        }
        let said = problem(|s| s.more_cast_reads = 9);
        assert_eq!(said, "software.more_cast_reads is 9, expected 0 to 8");
        // A share of nothing would be a rate of nothing: the message does not say 0 is one.
        let said = problem(|s| s.grouped_matmul_share = 0.0);
        assert_eq!(
            said,
            "software.grouped_matmul_share is 0, expected more than 0, at most 1"
        );
        for name in ["", "h.*.attn"] {
            let said = problem(|s| s.captured = vec!["mlp".into(), name.into()]);
            assert!(
                said.starts_with(&format!("software.captured[1] is `{name}`, expected")),
                "{said}"
            );
        }
        let said = problem(|s| s.matmul_dtype = Some(DType::I32));
        assert!(said.starts_with("software.matmul_dtype is i32"), "{said}");
    }

    #[test]
    fn names_that_capture_nothing_are_found() {
        let mut s = software();
        s.captured = ["attn", "atn", "*", "q"].map(String::from).to_vec();
        let paths = ["h.0.attn.q", "h.0.mlp.up"];
        assert_eq!(s.captured_nowhere(paths.into_iter()), ["atn"]);
        assert_eq!(s.captured_nowhere([].into_iter()), ["attn", "atn", "q"]);
    }

    #[test]
    fn buffers_without_end_are_refused() {
        let with = |in_flight| problem(|s| s.memory.as_mut().unwrap().in_flight = in_flight);
        let said = with(InFlight::More {
            microbatches: u32::MAX,
        });
        assert_eq!(
            said,
            "software.memory.in_flight.more.microbatches is 4294967295, expected 0 to 1024"
        );
        let said = with(InFlight::Buffered { per_stage: 1025 });
        assert!(
            said.contains("in_flight.buffered.per_stage is 1025"),
            "{said}"
        );
    }
}
