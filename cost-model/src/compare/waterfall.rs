//! From the predicted step time to the measured one, cause by cause.
//!
//! A step of `T` seconds on `P` processors is `T * P` processor seconds, of which each rank of
//! each stage works some in each kind of instruction; in the rest a processor has nothing to
//! do, because ranks wait for each other. Divided by `P`, all parts are seconds of the step:
//!
//! ```text
//!   T = sum over stages and causes of (work of the stage's ranks) / P  +  idle
//! ```
//!
//! holds for the prediction and for the profiled steps, so the differences part by part add up
//! to the difference of the step times. Steps that are timed instruction by instruction take
//! longer than others; that is a part of its own. Where streams overlap, the work of a step may
//! exceed its time, and idle is negative: it is waiting less overlap.

use super::{Expected, ExpectedInstruction};
use crate::costs::CostClass;
use ir::measurement::{InstructionMeasurement, Measurement};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Why a step takes the time that it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Kernels and local copies.
    Compute,
    /// Work of collectives.
    Collectives,
    /// Work of stage-to-stage exchanges.
    Transfers,
    /// Processors without work: ranks wait for each other, in the pipeline's bubble too; less
    /// what streams overlap.
    Waiting,
    /// Time by which profiled steps were shorter than the others (longer, where it is negative).
    Profiling,
}

impl Cause {
    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Cause::Compute => "compute",
            Cause::Collectives => "collectives",
            Cause::Transfers => "transfers",
            Cause::Waiting => "waiting",
            Cause::Profiling => "other steps than the profiled",
        }
    }
}

impl From<CostClass> for Cause {
    fn from(class: CostClass) -> Self {
        match class {
            CostClass::Compute => Cause::Compute,
            CostClass::Collective => Cause::Collectives,
            CostClass::Transfer => Cause::Transfers,
        }
    }
}

/// A part of the step time, in seconds of the step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// Cause.
    pub cause: Cause,
    /// Stage; none where it is of all.
    pub stage: Option<u32>,
    /// Kind of instruction (an op's name, `all_reduce`, `exchange`); none where it is of all.
    pub kind: Option<String>,
    /// Predicted.
    pub predicted_s: f64,
    /// Measured.
    pub measured_s: f64,
    /// Measured less predicted.
    pub difference_s: f64,
}

/// The parts of a step, predicted and measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Waterfall {
    /// Processors that work at the same time: what the pool computes, or all ranks.
    pub processors: f64,
    /// Predicted step time in seconds.
    pub predicted_s: f64,
    /// Measured step time in seconds.
    pub measured_s: f64,
    /// Parts by cause and stage; their differences add up to that of the step times.
    pub parts: Vec<Part>,
    /// The same by cause and kind of instruction, largest difference first within a cause.
    pub kinds: Vec<Part>,
}

/// Relates `step_time_s`, predicted, to what was measured. `None` where nothing was profiled.
pub(super) fn waterfall(
    step_time_s: f64,
    expected: &Expected,
    measured: &Measurement,
) -> Option<Waterfall> {
    let profiled: Vec<f64> = measured
        .steps
        .iter()
        .filter(|s| s.profiled)
        .map(|s| s.seconds)
        .collect();
    if measured.instructions.is_empty() || expected.processors <= 0.0 {
        return None;
    }
    let measured_s = measured.step_time_s.0;
    let profiled_s = match profiled.len() {
        0 => measured_s,
        n => profiled.iter().sum::<f64>() / n as f64,
    };
    let mut work = Work::new(expected);
    for m in &measured.instructions {
        work.add_measured(m);
    }
    let mut parts = work.parts(|e| (Some(e.stage.0), None));
    let mut kinds = work.parts(|e| (None, Some(e.kind.clone())));
    kinds.sort_by(|a, b| {
        let size = |p: &Part| p.difference_s.abs();
        (a.cause.cmp(&b.cause)).then(size(b).total_cmp(&size(a)))
    });
    let total = |of: fn(&Part) -> f64| parts.iter().map(of).sum::<f64>();
    let waiting = part(
        Cause::Waiting,
        (step_time_s - total(|p| p.predicted_s)) + 0.0,
        (profiled_s - total(|p| p.measured_s)) + 0.0,
    );
    let profiling = part(Cause::Profiling, 0.0, measured_s - profiled_s);
    for list in [&mut parts, &mut kinds] {
        list.extend([waiting.clone(), profiling.clone()]);
    }
    Some(Waterfall {
        processors: expected.processors,
        predicted_s: step_time_s,
        measured_s,
        parts,
        kinds,
    })
}

fn part(cause: Cause, predicted_s: f64, measured_s: f64) -> Part {
    Part {
        cause,
        stage: None,
        kind: None,
        predicted_s,
        measured_s,
        difference_s: measured_s - predicted_s,
    }
}

/// Seconds of a rank's work by instruction, predicted and measured, per step.
struct Work<'a> {
    expected: &'a Expected,
    by_place: BTreeMap<(u32, u32, u32), usize>,
    measured: Vec<f64>,
}

impl<'a> Work<'a> {
    fn new(expected: &'a Expected) -> Self {
        let places = expected.instructions.iter().map(ExpectedInstruction::place);
        Work {
            expected,
            by_place: places.zip(0..).collect(),
            measured: vec![0.0; expected.instructions.len()],
        }
    }

    fn add_measured(&mut self, m: &InstructionMeasurement) {
        let place = (m.stage, m.template, m.instruction);
        if let Some(&i) = self.by_place.get(&place) {
            self.measured[i] += m.busy_s.unwrap_or(m.mean_s) * f64::from(m.count);
        }
    }

    /// Sums over what has the same cause and the same key.
    fn parts(
        &self,
        key: impl Fn(&ExpectedInstruction) -> (Option<u32>, Option<String>),
    ) -> Vec<Part> {
        type Key = (Cause, Option<u32>, Option<String>);
        let mut sums: BTreeMap<Key, (f64, f64)> = BTreeMap::new();
        for (e, measured) in self.expected.instructions.iter().zip(&self.measured) {
            let (stage, kind) = key(e);
            let share = f64::from(e.n_ranks) / self.expected.processors;
            let sum = sums.entry((e.class.into(), stage, kind)).or_default();
            sum.0 += share * e.seconds * e.count as f64;
            sum.1 += share * measured;
        }
        sums.into_iter()
            .filter(|(_, (p, m))| *p != 0.0 || *m != 0.0)
            .map(|((cause, stage, kind), (p, m))| Part {
                stage,
                kind,
                ..part(cause, p, m)
            })
            .collect()
    }
}
