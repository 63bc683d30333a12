//! Predicted against measured: step, rates, memory, and the instructions where the gap is.

use crate::costs::{CostClass, costs};
use crate::simulate::{SimulateOptions, expected_seconds, instruction_name, simulate};
use crate::{SimError, StepWork};
use ir::cluster::Cluster;
use ir::measurement::Measurement;
use ir::plan::Prediction;
use ir::program::Program;
use ir::{DType, Flops, InstrId, StageId, TemplateId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Expected duration of one execution of an instruction.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpectedInstruction {
    /// Stage.
    pub stage: StageId,
    /// Template.
    pub template: TemplateId,
    /// Instruction.
    pub instruction: InstrId,
    /// Op path, or what is done to which buffer.
    pub name: String,
    /// What it counts as.
    pub class: CostClass,
    /// Seconds, without waiting for other stages; where ranks share processors, with what they
    /// lose by it ([`expected_seconds`]).
    pub seconds: f64,
}

/// A quantity, predicted and measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Compared {
    /// Predicted.
    pub predicted: f64,
    /// Measured.
    pub measured: f64,
    /// Predicted over measured; `None` when nothing was measured.
    pub ratio: Option<f64>,
}

impl Compared {
    fn new(predicted: f64, measured: f64) -> Self {
        Compared {
            predicted,
            measured,
            ratio: (measured > 0.0).then(|| predicted / measured),
        }
    }
}

/// One stage, in seconds per step and bytes per rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StageComparison {
    /// Forward of one microbatch.
    pub forward_s: Compared,
    /// Backward of one microbatch.
    pub backward_s: Compared,
    /// Begin and end of the step.
    pub step_s: Compared,
    /// Computation. The measured time, as those below, was taken on a rank that may have had
    /// to wait.
    pub compute_s: Compared,
    /// Collectives.
    pub collective_s: Compared,
    /// Stage-to-stage exchanges.
    pub transfer_s: Compared,
    /// Peak memory.
    pub peak_bytes: Compared,
}

/// One instruction, in seconds per execution.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InstructionComparison {
    /// Stage.
    pub stage: u32,
    /// Template.
    pub template: u32,
    /// Instruction.
    pub instruction: u32,
    /// Op path or collective.
    pub what: String,
    /// Executions per step.
    pub count: u32,
    /// One execution.
    pub seconds: Compared,
    /// Seconds per step by which the prediction is too long.
    pub error_s: f64,
}

/// A plan's prediction against a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// Step time, seconds.
    pub step_time_s: Compared,
    /// Tokens per second.
    pub tokens_per_s: Compared,
    /// Model FLOPs utilisation; the measured one is the predicted one scaled by the step times.
    pub mfu: Compared,
    /// Hardware FLOPs utilisation, likewise: above `mfu` where the plan recomputes.
    pub hfu: Compared,
    /// Peak memory of the stage that needs most, bytes.
    pub peak_bytes: Compared,
    /// By stage.
    pub stages: Vec<StageComparison>,
    /// Sums over stages, seconds per step; memory is the largest.
    pub total: StageComparison,
    /// The instructions with the largest absolute error per step, largest first.
    pub worst: Vec<InstructionComparison>,
}

/// Instructions listed in [`Comparison::worst`].
const N_WORST: usize = 10;

/// Expected duration of every instruction of a program.
///
/// Fails as [`simulate`] does.
pub fn expected_instructions(
    program: &Program,
    cluster: &Cluster,
) -> Result<Vec<ExpectedInstruction>, SimError> {
    let work = StepWork {
        model_flops: Flops(0.0),
        hardware_flops: Flops(0.0),
        tokens: 0,
        dtype: DType::F32,
    };
    let slowdown = simulate(program, cluster, &SimulateOptions::new(work))?.slowdown;
    let costs = costs(program, cluster)?;
    let mut all = Vec::new();
    for (r, role) in program.roles.iter().enumerate() {
        for (t, template) in role.templates.iter().enumerate() {
            let template_costs = &costs.instructions[r][t];
            let seconds = expected_seconds(template_costs, slowdown[r][t]);
            for (i, instruction) in template.instructions.iter().enumerate() {
                all.push(ExpectedInstruction {
                    stage: role.stage,
                    template: TemplateId::new(t),
                    instruction: InstrId::new(i),
                    name: instruction_name(role, &instruction.kind),
                    class: template_costs[i].class,
                    seconds: seconds[i],
                });
            }
        }
    }
    Ok(all)
}

/// Sets a prediction, with the expected durations of its instructions, against a measurement.
pub fn compare(
    predicted: &Prediction,
    expected: &[ExpectedInstruction],
    measured: &Measurement,
) -> Comparison {
    let n_stages = predicted.stages.len().max(measured.stages.len());
    let stages: Vec<StageComparison> = (0..n_stages)
        .map(|s| stage(predicted, measured, s))
        .collect();
    let step_time_s = Compared::new(predicted.step_time_s.0, measured.step_time_s.0);
    let scaled = |rate: f64| {
        let measured = step_time_s.ratio.map_or(0.0, |r| rate * r);
        Compared::new(rate, measured)
    };
    let total = total(&stages);
    Comparison {
        step_time_s,
        tokens_per_s: Compared::new(predicted.tokens_per_s, measured.tokens_per_s),
        mfu: scaled(predicted.mfu),
        hfu: scaled(predicted.hfu),
        peak_bytes: total.peak_bytes,
        total,
        stages,
        worst: worst(expected, measured),
    }
}

fn stage(predicted: &Prediction, measured: &Measurement, s: usize) -> StageComparison {
    let p = predicted.stages.get(s).cloned().unwrap_or_default();
    let m = measured.stages.get(s).copied().unwrap_or_default();
    StageComparison {
        forward_s: Compared::new(p.forward_s.0, m.forward_s),
        backward_s: Compared::new(p.backward_s.0, m.backward_s),
        step_s: Compared::new(p.step_s.0, m.step_s),
        compute_s: Compared::new(p.compute_s.0, m.compute_s),
        collective_s: Compared::new(p.collective_s.0, m.collective_s),
        transfer_s: Compared::new(p.transfer_s.0, m.transfer_s),
        peak_bytes: Compared::new(p.peak_bytes.0 as f64, m.peak_bytes.0 as f64),
    }
}

fn total(stages: &[StageComparison]) -> StageComparison {
    let over = |of: fn(&StageComparison) -> Compared, fold: fn(f64, f64) -> f64| {
        let both = stages.iter().map(of).fold((0.0, 0.0), |(p, m), c| {
            (fold(p, c.predicted), fold(m, c.measured))
        });
        Compared::new(both.0, both.1)
    };
    let sum = |a: f64, b: f64| a + b;
    StageComparison {
        forward_s: over(|s| s.forward_s, sum),
        backward_s: over(|s| s.backward_s, sum),
        step_s: over(|s| s.step_s, sum),
        compute_s: over(|s| s.compute_s, sum),
        collective_s: over(|s| s.collective_s, sum),
        transfer_s: over(|s| s.transfer_s, sum),
        peak_bytes: over(|s| s.peak_bytes, f64::max),
    }
}

fn worst(expected: &[ExpectedInstruction], measured: &Measurement) -> Vec<InstructionComparison> {
    let by_place: BTreeMap<(u32, u32, u32), f64> = expected
        .iter()
        .map(|e| ((e.stage.0, e.template.0, e.instruction.0), e.seconds))
        .collect();
    let mut all: Vec<InstructionComparison> = measured
        .instructions
        .iter()
        .filter_map(|m| {
            let predicted = *by_place.get(&(m.stage, m.template, m.instruction))?;
            Some(InstructionComparison {
                stage: m.stage,
                template: m.template,
                instruction: m.instruction,
                what: m.what.clone(),
                count: m.count,
                seconds: Compared::new(predicted, m.mean_s),
                error_s: (predicted - m.mean_s) * f64::from(m.count),
            })
        })
        .collect();
    // Stable, so instructions of equal error stay in program order.
    all.sort_by(|a, b| b.error_s.abs().total_cmp(&a.error_s.abs()));
    all.truncate(N_WORST);
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{cluster, pipeline};
    use ir::measurement::{InstructionMeasurement, StageMeasurement};
    use ir::plan::StagePrediction;
    use ir::{Bytes, Seconds};

    #[test]
    fn gaps_are_found_where_they_are() {
        let program = pipeline(&[3000, 3000], &[6000, 6000], 4, 1, 1);
        let expected = expected_instructions(&program, &cluster(2)).unwrap();
        let n: usize = program
            .roles
            .iter()
            .flat_map(|r| &r.templates)
            .map(|t| t.instructions.len())
            .sum();
        assert_eq!(expected.len(), n);
        // The forward template's second kernel: two thirds of 3000 ns.
        assert_eq!(
            (expected[2].name.as_str(), expected[2].seconds),
            ("main", 2e-6)
        );
        let mut measurement = Measurement {
            step_time_s: Seconds(2.0),
            tokens_per_s: 50.0,
            ..Measurement::default()
        };
        measurement.stages = vec![
            StageMeasurement {
                compute_s: 1.0,
                peak_bytes: Bytes(100),
                ..Default::default()
            };
            2
        ];
        measurement.instructions = expected
            .iter()
            .enumerate()
            .map(|(i, e)| InstructionMeasurement {
                stage: e.stage.0,
                template: e.template.0,
                instruction: e.instruction.0,
                what: e.name.clone(),
                count: 4,
                mean_s: e.seconds + if i == 2 { 5e-6 } else { 1e-9 * i as f64 },
            })
            .collect();
        let stage = StagePrediction {
            compute_s: Seconds(1.5),
            peak_bytes: Bytes(80),
            ..Default::default()
        };
        let prediction = Prediction {
            step_time_s: Seconds(1.0),
            tokens_per_s: 100.0,
            mfu: 0.4,
            hfu: 0.5,
            stages: vec![stage.clone(), stage],
            ..Default::default()
        };
        let c = compare(&prediction, &expected, &measurement);
        assert_eq!(c.step_time_s.ratio, Some(0.5));
        // Half the speed is half the utilisation.
        assert_eq!((c.mfu.measured, c.tokens_per_s.ratio), (0.2, Some(2.0)));
        assert_eq!((c.hfu.predicted, c.hfu.measured), (0.5, 0.25));
        assert_eq!(
            c.total.compute_s,
            Compared {
                predicted: 3.0,
                measured: 2.0,
                ratio: Some(1.5)
            }
        );
        assert_eq!(c.peak_bytes.ratio, Some(0.8));
        assert_eq!(c.stages[0].collective_s.ratio, None);
        assert_eq!(c.worst.len(), 10);
        assert_eq!((c.worst[0].template, c.worst[0].instruction), (0, 2));
        assert!((c.worst[0].error_s + 4.0 * 5e-6).abs() < 1e-15);
        assert!(
            c.worst
                .windows(2)
                .all(|w| w[0].error_s.abs() >= w[1].error_s.abs())
        );
    }
}
