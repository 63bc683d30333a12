//! Where the time of a predicted step goes, on the stage that is busiest.
//!
//! All but the bubble are seconds of work, whether or not something else runs meanwhile, so
//! they add up to more than the step where work overlaps.

use cost_model::costs::CostClass;
use cost_model::simulate::Simulation;
use ir::cluster::Cluster;
use ir::collective::CollectiveKind;
use ir::program::{InstrKind, Program, TemplateKind};

/// Seconds of one step by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Breakdown {
    /// Kernels of forward, backward and recomputation, without their launches.
    pub compute_s: f64,
    /// Collectives over the tensor axis.
    pub tensor_s: f64,
    /// Collectives over the context axis: keys, values and their gradients (states that are
    /// sharded over it count with those over the data axis).
    pub context_s: f64,
    /// Sends and receives between stages.
    pub pipeline_s: f64,
    /// Collectives over the data axis: gradients, sharded states and parameters.
    pub data_s: f64,
    /// Tokens on their way between the ranks of an expert axis.
    pub expert_s: f64,
    /// Time without work, mean over the stages.
    pub bubble_s: f64,
    /// Kernels at the beginning and end of the step: updates, casts, norms.
    pub optimizer_s: f64,
    /// Fixed times of the kernels of forward and backward.
    pub launch_s: f64,
    /// Waiting for data.
    pub exposed_input_s: f64,
}

/// The breakdown of a simulated program.
pub fn breakdown(program: &Program, cluster: &Cluster, simulation: &Simulation) -> Breakdown {
    let (prediction, costs) = (&simulation.prediction, &simulation.costs);
    let busy = |s: &ir::plan::StagePrediction| s.compute_s.0 + s.collective_s.0 + s.transfer_s.0;
    let role = (0..prediction.stages.len())
        .max_by(|&a, &b| busy(&prediction.stages[a]).total_cmp(&busy(&prediction.stages[b])))
        .unwrap_or(0);
    let mut sum = Breakdown {
        bubble_s: prediction.bubble * prediction.step_time_s.0,
        ..Breakdown::default()
    };
    let Some(this) = program.roles.get(role) else {
        return sum;
    };
    let mut played = vec![0u64; this.templates.len()];
    for slot in &this.trace {
        played[slot.template.index()] += 1;
    }
    for ((template, costs), &times) in this
        .templates
        .iter()
        .zip(&costs.instructions[role])
        .zip(&played)
    {
        let once = matches!(
            template.kind,
            TemplateKind::StepBegin | TemplateKind::StepEnd
        );
        for (instruction, cost) in template.instructions.iter().zip(costs) {
            let seconds = cost.seconds * times as f64;
            let place = match (&instruction.kind, cost.class) {
                (InstrKind::Load { .. }, _) => &mut sum.exposed_input_s,
                (InstrKind::Collective { axes, kind, .. }, _) => {
                    match axes.first().map(|a| this.mesh.name(*a)) {
                        Some("context") if !once => &mut sum.context_s,
                        Some("tensor") => &mut sum.tensor_s,
                        // Samples are split over it too: sums of gradients are data's.
                        Some("expert") if *kind == CollectiveKind::AllToAll => &mut sum.expert_s,
                        _ => &mut sum.data_s,
                    }
                }
                (_, CostClass::Collective) => &mut sum.data_s,
                (_, CostClass::Transfer) => &mut sum.pipeline_s,
                (_, CostClass::Compute) if once => &mut sum.optimizer_s,
                (_, CostClass::Compute) => {
                    let fixed = cluster.device.launch_s.min(cost.seconds) * times as f64;
                    sum.launch_s += fixed;
                    sum.compute_s -= fixed;
                    &mut sum.compute_s
                }
            };
            *place += seconds;
        }
    }
    sum
}
