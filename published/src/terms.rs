//! The terms of the model of execution, and how a machine is without each: what a term is worth is
//! what predictions lose without it, the other figures unchanged.

use crate::cluster::Machine;
use frameworks::{AttentionKernel, Software};

/// A term with what leaves it out.
pub type Term = (&'static str, fn(&mut Machine));

/// Changes the software of a machine.
fn software(machine: &mut Machine, change: impl Fn(&mut Software)) {
    change(&mut machine.software);
}

/// All terms.
pub const TERMS: [Term; 33] = [
    ("tiles and waves", |c| c.cluster.device.multiprocessors = 0),
    ("rows that end unaligned", |c| {
        c.cluster.device.unaligned_matmul_share = 1.0
    }),
    ("sustained clocks", |c| {
        c.cluster.device.sustained_share = 1.0;
        c.cluster.device.sustained_share_of.clear();
    }),
    ("links in training", |c| {
        for level in &mut c.cluster.levels {
            level.efficiency = level.message_efficiency.unwrap_or(level.efficiency);
        }
    }),
    ("unfused or slower attention", |c| {
        software(c, |s| {
            s.attention = AttentionKernel::Fused {
                rate: 1.0,
                backward_share: 1.0,
            }
        })
    }),
    ("slower attention backward", |c| {
        software(c, |s| {
            if let AttentionKernel::Fused { backward_share, .. } = &mut s.attention {
                *backward_share = 1.0;
            }
        })
    }),
    ("elementwise traffic", |c| {
        software(c, |s| {
            (s.elementwise_traffic, s.norm_traffic, s.rotary_traffic) = (1.0, 1.0, None)
        })
    }),
    ("traffic of norms and rotary", |c| {
        software(c, |s| (s.norm_traffic, s.rotary_traffic) = (1.0, None))
    }),
    ("loss traffic", |c| {
        software(c, |s| s.loss_bytes_per_logit = 0.0)
    }),
    ("host", |c| software(c, |s| s.host_s_per_kernel = 0.0)),
    ("synchronous launches", |c| {
        software(c, |s| s.synchronous_launches = false)
    }),
    ("grouped matmuls", |c| {
        software(c, |s| s.grouped_matmul_share = 1.0)
    }),
    ("fused experts", |c| {
        software(c, |s| s.fused_experts = false)
    }),
    ("overlapped dispatch", |c| {
        software(c, |s| s.overlapped_dispatch = false)
    }),
    ("dispatch once per host", |c| {
        software(c, |s| s.dispatch_once_per_host = false)
    }),
    ("blocking collectives", |c| {
        software(c, |s| s.blocking_axes.clear())
    }),
    ("early reduction of gradients", |c| {
        software(c, |s| s.overlapped_gradients = false)
    }),
    ("type of gradients in reductions", |c| {
        software(c, |s| s.gradient_dtype = None)
    }),
    ("prefetch of parameters", |c| {
        software(c, |s| s.prefetched_parameters = false)
    }),
    ("narrow gathers", |c| {
        software(c, |s| s.narrow_gathers = false)
    }),
    ("casts that are kept", |c| {
        software(c, |s| s.kept_casts = false)
    }),
    ("rates of narrow scales", |c| {
        software(c, |s| {
            let exceptions = s.exceptions.iter_mut().filter_map(|e| e.narrow.as_mut());
            for narrow in s.narrow.iter_mut().chain(exceptions) {
                narrow.share = 1.0;
            }
        })
    }),
    ("copies around collectives", |c| {
        software(c, |s| {
            s.copied_axes.clear();
            s.host_s_per_part = 0.0;
        })
    }),
    ("copies rank by rank", |c| {
        software(c, |s| s.host_s_per_part = 0.0)
    }),
    ("gathers for the gradients again", |c| {
        software(c, |s| s.gathers_again = false)
    }),
    ("collectives in pieces", |c| {
        software(c, |s| s.piecewise_axes.clear())
    }),
    ("updates by broadcast", |c| {
        software(c, |s| s.broadcast_updates = false)
    }),
    ("collectives beside matmuls of their op", |c| {
        software(c, |s| s.paired_axes.clear())
    }),
    ("recomputation to the end", |c| {
        software(c, |s| s.recomputes_to_the_end = false)
    }),
    ("sums in half precision", |c| {
        software(c, |s| s.sum_dtype = None)
    }),
    ("fused elementwise kernels", |c| {
        software(c, |s| s.fused_elementwise = false)
    }),
    ("sums in matmuls", |c| {
        software(c, |s| s.fused_gradient_sums = false)
    }),
    ("multiprocessors of collectives", |c| {
        software(c, |s| s.collective_multiprocessors = 0)
    }),
];
