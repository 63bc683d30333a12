//! Waiting for the host: kernels are issued one after the other, ahead of the device.
//!
//! A kernel starts when the one before it has ended and when it has been issued. So a few short
//! kernels among long ones cost their own time only, and a template of short kernels takes what
//! the host takes for all of them:
//!
//! ```text
//! host    |a|b|c|d|                 each as long as the host needs to issue it
//! device    |a      |b|c|d|         a is long: b, c, d are there when it ends
//! ```
//!
//! The host begins with the template: ranks that send and receive wait for it between templates
//! (Megatron-LM synchronises the device after every transfer), and at its end the device is
//! rarely far behind where kernels are short.

use crate::streams::KERNELS;
use cost_model::costs::InstrCost;
use ir::program::Template;

/// Adds to every instruction of a template on the stream of kernels what it waits for the host.
/// `host_s` is the time in which each instruction is issued; a `synchronous` host issues one only
/// when the one before has ended.
pub(super) fn wait(
    template: &Template,
    costs: &mut [InstrCost],
    host_s: &[f64],
    synchronous: bool,
) {
    let (mut issued, mut end) = (0.0f64, 0.0f64);
    for ((instruction, cost), host) in template.instructions.iter().zip(costs).zip(host_s) {
        issued += host;
        if synchronous {
            issued = issued.max(end + host);
        }
        if instruction.stream == KERNELS && (*host > 0.0 || cost.seconds > 0.0) {
            let start = end.max(issued);
            let duration = start - end + cost.seconds;
            end = start + cost.seconds;
            cost.seconds = duration;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{instr, relu};
    use cost_model::costs::CostClass;
    use ir::program::TemplateKind;

    fn waited(device: &[f64], host: f64, synchronous: bool) -> Vec<f64> {
        let cost = |&seconds: &f64| InstrCost {
            seconds,
            class: CostClass::Compute,
        };
        let mut costs: Vec<InstrCost> = device.iter().map(cost).collect();
        let kernel = |_: &f64| instr(relu("y", 0, 1), KERNELS, &[]);
        let template = Template {
            kind: TemplateKind::Forward,
            chunk: 0,
            instructions: device.iter().map(kernel).collect(),
        };
        wait(
            &template,
            &mut costs,
            &vec![host; device.len()],
            synchronous,
        );
        costs.iter().map(|c| c.seconds).collect()
    }

    #[test]
    fn short_kernels_wait_for_the_host_unless_a_long_one_runs_before() {
        // Issued at 2, 4, 6: each waits.
        assert_eq!(waited(&[1.0, 1.0, 1.0], 2.0, false), [3.0, 2.0, 2.0]);
        // The first ends at 12; by then the others are there.
        assert_eq!(waited(&[10.0, 1.0, 1.0], 2.0, false), [12.0, 1.0, 1.0]);
        assert_eq!(waited(&[1.0, 5.0], 0.0, false), [1.0, 5.0]);
        // Nobody is ahead of anybody.
        assert_eq!(waited(&[10.0, 1.0, 1.0], 2.0, true), [12.0, 3.0, 3.0]);
    }
}
