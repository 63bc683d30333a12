//! Predicted against measured: step, rates, memory, where the time goes, and the instructions
//! where the gap is.
//!
//! The work of an instruction is compared: predicted, the seconds of an undisturbed
//! rank; measured, those on a processor. What a rank waits, for others or for a processor, is
//! compared apart, so that one rank's slow kernel is not everybody's slow collective.

mod waterfall;

pub use waterfall::{Cause, Part, Waterfall};

use crate::costs::{CostClass, costs, costs_one_by_one};
use crate::simulate::{SimulateOptions, instruction_kind, instruction_name, simulate};
use crate::{SimError, StepWork};
use ir::cluster::Cluster;
use ir::measurement::{InstructionMeasurement, Measurement};
use ir::plan::Prediction;
use ir::program::Program;
use ir::{DType, Flops, InstrId, StageId, TemplateId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The expected times of a program's instructions, and the number of processors.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Expected {
    /// Processors that work at the same time.
    pub processors: f64,
    /// Instructions, stage by stage.
    pub instructions: Vec<ExpectedInstruction>,
    /// By stage: seconds of a step in which a rank waits, for others or for a processor.
    pub waiting_s: Vec<f64>,
}

/// Expected duration of one execution of an instruction.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpectedInstruction {
    /// Stage.
    pub stage: StageId,
    /// Ranks of the stage.
    pub n_ranks: u32,
    /// Template.
    pub template: TemplateId,
    /// Instruction.
    pub instruction: InstrId,
    /// Op path, or what is done to which buffer.
    pub name: String,
    /// Name of the op, or of what else is done.
    pub kind: String,
    /// Its class.
    pub class: CostClass,
    /// Executions in a step, by each rank.
    pub count: u64,
    /// Seconds of work: without waiting, and undisturbed by other ranks.
    pub seconds: f64,
}

impl ExpectedInstruction {
    fn place(&self) -> (u32, u32, u32) {
        (self.stage.0, self.template.0, self.instruction.0)
    }
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
    /// Work in computation.
    pub compute_s: Compared,
    /// Work in collectives.
    pub collective_s: Compared,
    /// Work in stage-to-stage exchanges.
    pub transfer_s: Compared,
    /// Waiting of a rank, for others or for a processor.
    pub waiting_s: Compared,
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

/// An instruction in which ranks waited.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Wait {
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
    /// One execution, predicted, which waits for nobody, and as it was, waiting included; seconds.
    pub seconds: Compared,
    /// Seconds per step in which a rank was on no processor.
    pub waited_s: f64,
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
    /// From the predicted to the measured step time; none where nothing was profiled.
    pub waterfall: Option<Waterfall>,
    /// The instructions with the largest absolute error per step, largest first.
    pub worst: Vec<InstructionComparison>,
    /// The instructions in which ranks waited longest per step, longest first: a link that is slow
    /// or late holds them up at what crosses it.
    pub waits: Vec<Wait>,
}

/// Instructions listed in [`Comparison::worst`] and in [`Comparison::waits`].
const N_WORST: usize = 10;

/// Expected duration of every instruction of a program.
///
/// Fails as [`simulate`] does.
pub fn expected_instructions(program: &Program, cluster: &Cluster) -> Result<Expected, SimError> {
    let work = StepWork {
        model_flops: Flops(0.0),
        hardware_flops: Flops(0.0),
        hardware_attention_flops: Flops(0.0),
        tokens: 0,
        dtype: DType::F32,
    };
    let step_s = simulate(program, cluster, &SimulateOptions::new(work))?
        .step_time
        .0;
    // A profiled step plays each instruction by itself; the time of a step is that of its calls.
    let one_by_one = costs_one_by_one(program, cluster)?;
    let costs = costs(program, cluster)?;
    let mut expected = Expected {
        processors: processors(program, cluster),
        ..Expected::default()
    };
    for (r, role) in program.roles.iter().enumerate() {
        let mut count = vec![0u64; role.templates.len()];
        for slot in &role.trace {
            count[slot.template.index()] += 1;
        }
        let mut busy_s = 0.0;
        for (t, template) in role.templates.iter().enumerate() {
            for (i, instruction) in template.instructions.iter().enumerate() {
                let cost = one_by_one.instructions[r][t][i];
                busy_s += costs.instructions[r][t][i].seconds * count[t] as f64;
                expected.instructions.push(ExpectedInstruction {
                    stage: role.stage,
                    n_ranks: role.mesh.n_devices(),
                    template: TemplateId::new(t),
                    instruction: InstrId::new(i),
                    name: instruction_name(role, &instruction.kind),
                    kind: instruction_kind(&instruction.kind).to_string(),
                    class: cost.class,
                    count: count[t],
                    seconds: cost.seconds,
                });
            }
        }
        expected.waiting_s.push((step_s - busy_s).max(0.0));
    }
    Ok(expected)
}

/// Processors that the ranks of a program keep busy together.
fn processors(program: &Program, cluster: &Cluster) -> f64 {
    let ranks = program.roles.iter().flat_map(|r| r.mesh.ranks());
    let Some(pool) = &cluster.pool else {
        return ranks.count() as f64;
    };
    let mut in_pool: BTreeMap<u32, f64> = BTreeMap::new();
    for rank in ranks {
        *in_pool.entry(rank.0 / pool.devices.max(1)).or_default() += 1.0;
    }
    in_pool.values().map(|n| n.min(pool.compute_devices)).sum()
}

/// Sets a prediction, with the expected durations of its instructions, against a measurement.
pub fn compare(predicted: &Prediction, expected: &Expected, measured: &Measurement) -> Comparison {
    let n_stages = predicted.stages.len().max(measured.stages.len());
    let stages: Vec<StageComparison> = (0..n_stages)
        .map(|s| stage(predicted, expected, measured, s))
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
        waterfall: waterfall::waterfall(predicted.step_time_s.0, expected, measured),
        worst: worst(expected, measured),
        waits: waits(expected, measured),
    }
}

fn stage(
    predicted: &Prediction,
    expected: &Expected,
    measured: &Measurement,
    s: usize,
) -> StageComparison {
    let p = predicted.stages.get(s).cloned().unwrap_or_default();
    let m = measured.stages.get(s).copied().unwrap_or_default();
    let work = |class: CostClass| work_of(expected, measured, s as u32, class);
    let of = |class: CostClass, wall_s: f64| match work(class) {
        (predicted, Some(busy_s)) => Compared::new(predicted, busy_s),
        (predicted, None) => Compared::new(predicted, wall_s),
    };
    let classes = [
        CostClass::Compute,
        CostClass::Collective,
        CostClass::Transfer,
    ];
    let busy: Option<f64> = classes.map(|c| work(c).1).into_iter().sum();
    let profiled = measured.steps.iter().filter(|s| s.profiled);
    let (seconds, n) = profiled.fold((0.0, 0.0), |(t, n), s| (t + s.seconds, n + 1.0));
    let waited = busy
        .filter(|_| n > 0.0)
        .map_or(0.0, |b| (seconds / n - b).max(0.0));
    StageComparison {
        forward_s: Compared::new(p.forward_s.0, m.forward_s),
        backward_s: Compared::new(p.backward_s.0, m.backward_s),
        step_s: Compared::new(p.step_s.0, m.step_s),
        compute_s: of(CostClass::Compute, m.compute_s),
        collective_s: of(CostClass::Collective, m.collective_s),
        transfer_s: of(CostClass::Transfer, m.transfer_s),
        waiting_s: Compared::new(expected.waiting_s.get(s).copied().unwrap_or(0.0), waited),
        peak_bytes: Compared::new(p.peak_bytes.0 as f64, m.peak_bytes.0 as f64),
    }
}

/// Seconds per step of a rank's work of a class: predicted, and measured on a processor, where
/// that is known of all instructions.
fn work_of(
    expected: &Expected,
    measured: &Measurement,
    stage: u32,
    class: CostClass,
) -> (f64, Option<f64>) {
    let of_class: BTreeMap<(u32, u32, u32), f64> = expected
        .instructions
        .iter()
        .filter(|e| e.stage.0 == stage && e.class == class)
        .map(|e| (e.place(), e.seconds * e.count as f64))
        .collect();
    let busy = measured
        .instructions
        .iter()
        .filter(|m| of_class.contains_key(&(m.stage, m.template, m.instruction)))
        .map(|m| Some(m.busy_s? * f64::from(m.count)))
        .sum();
    let profiled = !measured.instructions.is_empty();
    (
        of_class.values().sum::<f64>() + 0.0,
        if profiled { busy } else { None },
    )
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
        waiting_s: over(|s| s.waiting_s, sum),
        peak_bytes: over(|s| s.peak_bytes, f64::max),
    }
}

fn worst(expected: &Expected, measured: &Measurement) -> Vec<InstructionComparison> {
    let by_place: BTreeMap<(u32, u32, u32), f64> = expected
        .instructions
        .iter()
        .map(|e| (e.place(), e.seconds))
        .collect();
    let mut all: Vec<InstructionComparison> = measured
        .instructions
        .iter()
        .filter_map(|m| {
            let predicted = *by_place.get(&(m.stage, m.template, m.instruction))?;
            let measured = m.busy_s.unwrap_or(m.mean_s);
            Some(InstructionComparison {
                stage: m.stage,
                template: m.template,
                instruction: m.instruction,
                what: m.what.clone(),
                count: m.count,
                seconds: Compared::new(predicted, measured),
                error_s: (predicted - measured) * f64::from(m.count),
            })
        })
        .collect();
    // Stable, so instructions of equal error stay in program order.
    all.sort_by(|a, b| b.error_s.abs().total_cmp(&a.error_s.abs()));
    all.truncate(N_WORST);
    all
}

fn waits(expected: &Expected, measured: &Measurement) -> Vec<Wait> {
    let by_place: BTreeMap<(u32, u32, u32), f64> = expected
        .instructions
        .iter()
        .map(|e| (e.place(), e.seconds))
        .collect();
    let wait = |m: &InstructionMeasurement| {
        let predicted = *by_place.get(&(m.stage, m.template, m.instruction))?;
        let waited_s = (m.mean_s - m.busy_s?) * f64::from(m.count);
        (waited_s > 0.0).then(|| Wait {
            stage: m.stage,
            template: m.template,
            instruction: m.instruction,
            what: m.what.clone(),
            count: m.count,
            seconds: Compared::new(predicted, m.mean_s),
            waited_s,
        })
    };
    let mut all: Vec<Wait> = measured.instructions.iter().filter_map(wait).collect();
    all.sort_by(|a, b| b.waited_s.total_cmp(&a.waited_s));
    all.truncate(N_WORST);
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{cluster, pipeline};
    use ir::measurement::StageMeasurement;
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
        assert_eq!(expected.instructions.len(), n);
        // The forward template's second kernel: two thirds of 3000 ns.
        assert_eq!(
            (
                expected.instructions[2].name.as_str(),
                expected.instructions[2].seconds
            ),
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
            .instructions
            .iter()
            .enumerate()
            .map(|(i, e)| InstructionMeasurement {
                stage: e.stage.0,
                template: e.template.0,
                instruction: e.instruction.0,
                what: e.name.clone(),
                count: 4,
                mean_s: 1.0,
                busy_s: Some(e.seconds + if i == 2 { 5e-6 } else { 1e-9 * i as f64 }),
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
        // Two stages, four microbatches, 3 and 6 us each at least; measured 4 times 5 us more,
        // and some nanoseconds.
        let compute = c.total.compute_s;
        assert!(compute.predicted >= 72e-6, "{compute:?}");
        assert!(compute.measured >= 92e-6, "{compute:?}");
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
        // All take a second, four times a step, and are nearly never on a processor.
        assert_eq!(c.waits.len(), 10);
        assert!((c.waits[0].waited_s - 4.0).abs() < 1e-4);
        measurement.instructions[3].mean_s = 2.0;
        let c = compare(&prediction, &expected, &measurement);
        let late = &measurement.instructions[3];
        assert_eq!(
            (c.waits[0].template, c.waits[0].instruction),
            (late.template, late.instruction)
        );
    }

    /// The contributions of stages, causes and kinds add up to the whole.
    #[test]
    fn the_parts_add_up_to_the_difference() {
        let program = pipeline(&[3000, 5000], &[6000, 7000], 4, 1000, 2);
        let expected = expected_instructions(&program, &cluster(4)).unwrap();
        let instructions = expected.instructions.iter().enumerate();
        let measured = Measurement {
            step_time_s: Seconds(1.3e-4),
            steps: [(2e-4, false), (1.3e-4, false), (1.7e-4, true)]
                .map(|(seconds, profiled)| ir::measurement::StepMeasurement {
                    seconds,
                    profiled,
                    ..Default::default()
                })
                .to_vec(),
            instructions: instructions
                .map(|(i, e)| InstructionMeasurement {
                    stage: e.stage.0,
                    template: e.template.0,
                    instruction: e.instruction.0,
                    count: e.count as u32,
                    mean_s: 1.0,
                    busy_s: Some(1.2 * e.seconds + 1e-8 * i as f64),
                    ..Default::default()
                })
                .collect(),
            ..Measurement::default()
        };
        let prediction = Prediction {
            step_time_s: Seconds(1e-4),
            ..Default::default()
        };
        let w = compare(&prediction, &expected, &measured)
            .waterfall
            .unwrap();
        assert_eq!(w.processors, 4.0);
        for parts in [&w.parts, &w.kinds] {
            let sum = |of: fn(&Part) -> f64| parts.iter().map(of).sum::<f64>();
            assert!((sum(|p| p.difference_s) - 3e-5).abs() < 1e-12, "{parts:?}");
            assert!((sum(|p| p.predicted_s) - 1e-4).abs() < 1e-12);
            assert!((sum(|p| p.measured_s) - 1.3e-4).abs() < 1e-12);
        }
        let of = |cause, stage| {
            let found = w
                .parts
                .iter()
                .find(|p| p.cause == cause && p.stage == stage);
            found.unwrap().clone()
        };
        // Two of four processors, four microbatches of at least 3 + 6 and 5 + 7 us.
        let compute = |s| of(Cause::Compute, Some(s)).predicted_s;
        assert!(compute(0) >= 0.5 * 36e-6 && compute(0) < compute(1));
        assert!(compute(1) >= 0.5 * 48e-6);
        assert!(of(Cause::Transfers, Some(0)).difference_s > 0.0);
        assert!((of(Cause::Profiling, None).difference_s + 4e-5).abs() < 1e-12);
        let unprofiled = Measurement {
            instructions: vec![],
            ..measured
        };
        assert_eq!(compare(&prediction, &expected, &unprofiled).waterfall, None);
    }

    /// Ranks that share processors count them once.
    #[test]
    fn shared_processors_count_once() {
        let program = pipeline(&[3000, 3000], &[6000, 6000], 4, 1, 2);
        let mut shared = cluster(4);
        shared.pool = Some(ir::cluster::Pool {
            devices: 4,
            compute_devices: 1.5,
            memory_bytes: Bytes(4_000_000),
        });
        assert_eq!(processors(&program, &cluster(4)), 4.0);
        assert_eq!(processors(&program, &shared), 1.5);
        let expected = expected_instructions(&program, &shared).unwrap();
        // 36 us of work a rank, in a step that four ranks on 1.5 processors lengthen.
        assert!(
            expected.waiting_s.iter().all(|&w| w > 36e-6),
            "{expected:?}"
        );
    }
}
