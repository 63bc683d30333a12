//! Kernels that the host launches together, as one CUDA graph.
//!
//! Of a run of captured kernels the host issues one thing, the graph; its kernels follow each
//! other on the device without it, a shorter time apart than kernels of a stream:
//!
//! ```text
//! host    |a|b|c|d|        |graph|
//! device  |a| |b| |c| |d|        |a|b|c|d|
//! ```

use super::{InstrCost, KERNELS};
use ir::program::{InstrKind, Template};
use ir::software::Software;

/// Seconds from a short kernel of a graph to the next. 80 of them take 70 us as a graph, and
/// 260 us launched one by one (CUDA.jl's manual, "Graphs": ten steps of a small ODE).
const KERNEL_IN_GRAPH_S: f64 = 0.9e-6;

/// Takes from `costs` what kernels of graphs start earlier, and from `host_s` what the host does
/// not issue; `launch_s` is the device's fixed time of a kernel, `host_per_launch_s` what the
/// host needs for one launch.
pub(super) fn launch(
    template: &Template,
    software: &Software,
    launch_s: f64,
    costs: &mut [InstrCost],
    host_s: &mut [f64],
) {
    if software.captured.is_empty() || template.kind.pass().is_none() {
        return;
    }
    let saved = (launch_s - KERNEL_IN_GRAPH_S).max(0.0);
    let mut is_in_graph = false;
    for (i, instruction) in template.instructions.iter().enumerate() {
        let captured = match &instruction.kind {
            InstrKind::Compute { path, .. } => software.captures(path),
            // A collective ends a graph of parts of a layer.
            InstrKind::Collective { .. } => software.captures_all(),
            _ => continue,
        };
        // Instructions that the host does not issue (views, kernels that are part of others) has no
        // launch.
        let is_compute = matches!(instruction.kind, InstrKind::Compute { .. });
        let is_kernel = is_compute && host_s[i] > 0.0 && costs[i].queue == KERNELS;
        if captured && is_kernel {
            costs[i].seconds = (costs[i].seconds - saved).max(0.0);
        }
        if host_s[i] > 0.0 {
            host_s[i] = match captured {
                true if is_in_graph => 0.0,
                true => software.host_s_per_kernel,
                false => host_s[i],
            };
            is_in_graph = captured;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::costs::CostClass;
    use crate::testing::{instr, relu};
    use ir::program::TemplateKind;

    /// Device and host microseconds of `attn.a`, `attn.b`, a view of `attn`, `mlp.c` and
    /// `attn.d`, the kernels 10 us each, at 4 us a launch and 3 us of the host.
    fn launched(captured: &[&str], kind: TemplateKind) -> (Vec<f64>, Vec<f64>) {
        let paths = ["attn.a", "attn.b", "attn.view", "grad.h.0.mlp.c", "attn.d"];
        let op = |path: &&str| instr(relu(path, 0, 0), crate::testing::KERNELS, &[]);
        let template = Template {
            kind,
            chunk: 0,
            instructions: paths.iter().map(op).collect(),
        };
        let software = Software {
            captured: captured.iter().map(|s| s.to_string()).collect(),
            host_s_per_kernel: 3e-6,
            ..Software::plain("a framework")
        };
        let mut host_s = [3e-6, 3e-6, 0.0, 3e-6, 3e-6];
        let cost = |&h: &f64| InstrCost {
            seconds: if h > 0.0 { 10e-6 } else { 0.0 },
            class: CostClass::Compute,
            queue: KERNELS,
            unheeded: 0,
        };
        let mut costs: Vec<InstrCost> = host_s.iter().map(cost).collect();
        launch(&template, &software, 4e-6, &mut costs, &mut host_s);
        let us = |s: f64| (s * 1e7).round() / 10.0;
        (
            costs.iter().map(|c| us(c.seconds)).collect(),
            host_s.iter().map(|&s| us(s)).collect(),
        )
    }

    #[test]
    fn a_graph_is_issued_once_and_its_kernels_start_sooner() {
        let (device, host) = launched(&["attn"], TemplateKind::Backward);
        // 4 us become 0.9 us; the graph ends where something else is launched.
        assert_eq!(device, [6.9, 6.9, 0.0, 10.0, 6.9]);
        assert_eq!(host, [3.0, 0.0, 0.0, 3.0, 3.0]);
        let (device, host) = launched(&["*"], TemplateKind::Forward);
        assert_eq!(device, [6.9, 6.9, 0.0, 6.9, 6.9]);
        assert_eq!(host, [3.0, 0.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn ends_of_a_step_and_other_software_launch_kernel_by_kernel() {
        let apart = (
            vec![10.0, 10.0, 0.0, 10.0, 10.0],
            vec![3.0, 3.0, 0.0, 3.0, 3.0],
        );
        assert_eq!(launched(&["*"], TemplateKind::StepEnd), apart);
        assert_eq!(launched(&[], TemplateKind::Forward), apart);
        assert_eq!(launched(&["att"], TemplateKind::Forward), apart);
    }
}
