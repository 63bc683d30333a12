//! Tokens on their way to experts and back, where software does not just wait for them.

use super::{CostClass, InstrCost};
use ir::collective::CollectiveKind;
use ir::op::OpKind;
use ir::program::{InstrKind, Instruction, RoleProgram, Template, TemplateKind};

/// Experts of a token in a role's layers; none where it has no routers.
pub(super) fn copies(role: &RoleProgram) -> Option<u64> {
    let instructions = role.templates.iter().flat_map(|t| &t.instructions);
    let of = |i: &Instruction| match &i.kind {
        InstrKind::Compute {
            kind: OpKind::Route { top_k, .. },
            ..
        } => Some(*top_k),
        _ => None,
    };
    instructions.filter_map(of).max()
}

/// Takes from the all-to-alls of one pass what hides behind the pass of another microbatch in
/// the other direction, which is as long as its own kernels at least. `plays` counts the passes
/// in a step: the first has nothing to hide behind.
pub(super) fn overlap(
    role: &RoleProgram,
    template: &Template,
    plays: usize,
    costs: &mut [InstrCost],
) {
    let passes = [TemplateKind::Forward, TemplateKind::Backward];
    if !passes.contains(&template.kind) || plays < 2 {
        return;
    }
    let is_dispatch = |i: &Instruction| match &i.kind {
        InstrKind::Collective {
            kind: CollectiveKind::AllToAll,
            axes,
            ..
        } => axes.iter().all(|a| role.mesh.name(*a) != "context"),
        _ => false,
    };
    let (mut moving, mut kernels) = (0.0, 0.0);
    for (instruction, cost) in template.instructions.iter().zip(costs.iter()) {
        if is_dispatch(instruction) {
            moving += cost.seconds;
        } else if cost.class == CostClass::Compute {
            kernels += cost.seconds;
        }
    }
    if moving <= 0.0 {
        return;
    }
    let hidden = (kernels / moving).min(1.0) * (1.0 - 1.0 / plays as f64);
    for (instruction, cost) in template.instructions.iter().zip(costs) {
        if is_dispatch(instruction) {
            cost.seconds *= 1.0 - hidden;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{instr, relu, role};
    use ir::AxisId;
    use ir::program::Stream;

    #[test]
    fn what_moves_hides_behind_as_much_that_computes() {
        let role = role(0, 0, 2);
        let all_to_all = InstrKind::Collective {
            kind: CollectiveKind::AllToAll,
            axes: vec![AxisId(0)],
            items: Vec::new(),
        };
        let template = Template {
            kind: TemplateKind::Forward,
            chunk: 0,
            instructions: vec![
                instr(all_to_all, Stream::Collective, &[]),
                instr(relu("relu", 0, 0), Stream::Compute, &[]),
            ],
        };
        let left = |moving: f64, kernels: f64, plays: usize| {
            let cost = |seconds, class| InstrCost {
                seconds,
                class,
                queue: 0,
                ahead: false,
            };
            let mut costs = [
                cost(moving, CostClass::Collective),
                cost(kernels, CostClass::Compute),
            ];
            overlap(&role, &template, plays, &mut costs);
            assert_eq!(costs[1].seconds, kernels);
            costs[0].seconds
        };
        // Four passes: the first is alone.
        assert_eq!(left(2.0, 5.0, 4), 0.5);
        // Half of it has something to hide behind.
        assert_eq!(left(2.0, 1.0, 4), 2.0 - 2.0 * 0.5 * 0.75);
        assert_eq!(left(2.0, 5.0, 1), 2.0);
        assert_eq!(copies(&role), None);
    }
}
