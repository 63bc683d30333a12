//! From the ranks' times to an `ir::measurement::Measurement`.
//!
//! Ranks time instructions in profiled steps only, each into its own table; here the tables
//! are added up after the step. Times include waiting: for a collective, the time until the
//! last member came. What ranks did on a processor meanwhile stands beside it: ranks that share
//! processors are taken off them in the middle of an instruction.

use crate::execute::{RankTimings, StepResult, Timing, what};
use crate::processes::Processes;
use crate::stragglers::Spent;
use ir::measurement::{
    InstructionMeasurement, MEASUREMENT_VERSION, Measurement, RankMeasurement, StageMeasurement,
    StepMeasurement,
};
use ir::program::{Program, Stream, TemplateKind};
use ir::{Bytes, Rank, Seconds, TrainSpec, counted};

/// Name of what this crate executes on, in measurements.
pub const BACKEND: &str = "cpu-threads";
/// The same of GPUs.
pub const CUDA_BACKEND: &str = "cuda";
/// And of the emulated GPU, whose times mean nothing.
pub const EMULATED_BACKEND: &str = "cuda-emulated";
/// The name by which the emulated GPU is known.
pub const EMULATED_GPU: &str = "Emulated GPU";

/// First steps that the median step time leaves out: caches, page faults, thread start.
const WARM_UP_STEPS: usize = 1;

/// Collects the steps of a run.
#[derive(Clone, Debug)]
pub struct Recorder {
    measurement: Measurement,
    /// Per stage.
    profiles: Vec<Profile>,
    peak_bytes: Vec<u64>,
    /// Sums over steps, by rank in the order of roles, and the number of these steps.
    spent: (Vec<Spent>, u32),
    tokens_per_step: f64,
}

/// A sum of timings.
#[derive(Clone, Copy, Debug, Default)]
struct Total {
    wall_s: f64,
    busy_s: f64,
    n: u64,
}

impl Total {
    fn add(&mut self, t: &Timing) {
        self.wall_s += t.wall_s;
        self.busy_s += t.busy_s;
        self.n += u64::from(t.n);
    }
    fn mean(&self, of: fn(&Self) -> f64) -> f64 {
        if self.n == 0 {
            0.0
        } else {
            of(self) / self.n as f64
        }
    }
}

/// Sums over profiled steps and the ranks of a stage.
#[derive(Clone, Debug, Default)]
struct Profile {
    n_ranks: u32,
    n_steps: u32,
    instructions: Vec<Vec<Total>>,
    templates: Vec<Total>,
}

impl Recorder {
    /// Says that the run is one of GPUs.
    pub fn on_gpus(&mut self, name: &str, n_gpus: usize) {
        let m = &mut self.measurement;
        m.backend = match name == EMULATED_GPU {
            true => EMULATED_BACKEND.into(),
            false => CUDA_BACKEND.into(),
        };
        let ranks = ir::counted(m.n_ranks, "rank");
        m.executed_on = format!("{ranks} on {n_gpus} x {name}");
    }

    /// A record of a run of `program`; `name` and `plan_hash` say of which plan.
    pub fn new(program: &Program, spec: &TrainSpec, name: &str, plan_hash: &str) -> Self {
        let n_ranks: u32 = program.roles.iter().map(|r| r.mesh.n_devices()).sum();
        let n_processors = std::thread::available_parallelism().map_or(1, |n| n.get());
        let measurement = Measurement {
            version: MEASUREMENT_VERSION,
            name: name.into(),
            backend: BACKEND.into(),
            executed_on: format!(
                "{n_ranks} thread{} on {n_processors} CPU processor{}",
                if n_ranks == 1 { "" } else { "s" },
                if n_processors == 1 { "" } else { "s" },
            ),
            plan_hash: plan_hash.into(),
            n_ranks,
            ..Measurement::default()
        };
        let profile = |r: &ir::program::RoleProgram| Profile {
            n_ranks: r.mesh.n_devices(),
            n_steps: 0,
            instructions: r
                .templates
                .iter()
                .map(|t| vec![Total::default(); t.instructions.len()])
                .collect(),
            templates: vec![Total::default(); r.templates.len()],
        };
        Recorder {
            measurement,
            profiles: program.roles.iter().map(profile).collect(),
            peak_bytes: vec![0; program.roles.len()],
            spent: (vec![Spent::default(); n_ranks as usize], 0),
            tokens_per_step: spec.global_batch as f64 * spec.sequence as f64,
        }
    }

    /// Says in which processes the ranks are.
    pub fn executed_in(&mut self, processes: &Processes) {
        self.measurement.executed_on = format!(
            "{} in {} on {} of {}",
            counted(self.measurement.n_ranks, "rank"),
            counted(processes.place().of as u64, "process"),
            counted(processes.n_hosts() as u64, "host"),
            counted(processes.n_processors() as u64, "CPU processor"),
        );
    }

    /// Adds a step.
    pub fn step(
        &mut self,
        program: &Program,
        step: u64,
        lr: f64,
        result: &StepResult,
    ) -> StepMeasurement {
        let profiled = !result.timings.is_empty();
        let measured = StepMeasurement {
            step,
            loss: result.loss,
            grad_norm: result.grad_norm,
            lr,
            seconds: result.seconds,
            profiled,
        };
        if !profiled && self.measurement.steps.len() >= WARM_UP_STEPS {
            let (sums, n) = &mut self.spent;
            for (sum, spent) in sums.iter_mut().zip(&result.spent) {
                sum.work_s += spent.work_s;
                sum.wait_s += spent.wait_s;
            }
            *n += 1;
        }
        self.measurement.steps.push(measured);
        let mut at = 0;
        for (stage, role) in program.roles.iter().enumerate() {
            let n = role.mesh.n_devices() as usize;
            let peaks = result.peak_bytes.get(at..at + n).unwrap_or_default();
            self.peak_bytes[stage] = peaks.iter().copied().fold(self.peak_bytes[stage], u64::max);
            if profiled {
                self.profiles[stage].n_steps += 1;
                result
                    .timings
                    .get(at..at + n)
                    .unwrap_or_default()
                    .iter()
                    .for_each(|t| self.profiles[stage].add(t));
            }
            at += n;
        }
        measured
    }

    /// Adds a validation loss after `step` training steps.
    pub fn validation(&mut self, step: u64, loss: f64) {
        self.measurement.validation.push((step, loss));
    }

    /// The measurement.
    pub fn finish(mut self, program: &Program) -> Measurement {
        for (stage, (role, profile)) in program.roles.iter().zip(&self.profiles).enumerate() {
            self.measurement
                .stages
                .push(profile.stage(role, self.peak_bytes[stage]));
            if profile.n_steps > 0 {
                self.measurement
                    .instructions
                    .extend(profile.instructions(role, stage as u32));
            }
        }
        // The host does not see where a GPU waits.
        if self.measurement.backend == BACKEND {
            let roles = program.roles.iter().map(|r| r.mesh.ranks().collect());
            self.measurement.ranks = ranks(roles, &self.spent);
        }
        self.measurement.step_time_s = Seconds(median_step(&self.measurement.steps));
        let seconds = self.measurement.step_time_s.0;
        self.measurement.tokens_per_s = if seconds > 0.0 {
            self.tokens_per_step / seconds
        } else {
            0.0
        };
        self.measurement
    }
}

impl Profile {
    fn add(&mut self, timings: &RankTimings) {
        let pairs = self
            .instructions
            .iter_mut()
            .flatten()
            .zip(timings.instructions.iter().flatten());
        pairs
            .chain(self.templates.iter_mut().zip(&timings.templates))
            .for_each(|(total, t)| total.add(t));
    }

    fn stage(&self, role: &ir::program::RoleProgram, peak_bytes: u64) -> StageMeasurement {
        let per_step = f64::from(self.n_steps * self.n_ranks).max(1.0);
        let on_streams = |wanted: fn(&Stream) -> bool| {
            let timed = role
                .templates
                .iter()
                .zip(&self.instructions)
                .flat_map(|(t, times)| t.instructions.iter().zip(times));
            timed
                .filter(|(i, _)| wanted(role.stream(i.stream)))
                .map(|(_, t)| t.wall_s)
                .sum::<f64>()
                / per_step
        };
        let of_kind = |wanted: &[TemplateKind]| {
            let timed = role
                .templates
                .iter()
                .zip(&self.templates)
                .filter(|(t, _)| wanted.contains(&t.kind));
            timed.fold((0.0, 0u64), |(seconds, n), (_, t)| {
                (seconds + t.wall_s, n + t.n)
            })
        };
        // A pass of a microbatch goes through every chunk of the role, a template each; what goes
        // backward may have several.
        let mean = |of: fn(TemplateKind) -> bool| -> f64 {
            let timed = role.templates.iter().zip(&self.templates);
            timed
                .filter(|(t, total)| of(t.kind) && total.n > 0)
                .map(|(_, total)| total.wall_s / total.n as f64)
                .sum()
        };
        StageMeasurement {
            compute_s: on_streams(|s| *s == Stream::Kernels),
            collective_s: on_streams(|s| matches!(s, Stream::Communicator { .. } | Stream::World)),
            transfer_s: on_streams(|s| *s == Stream::Transfers),
            forward_s: mean(|k| k == TemplateKind::Forward),
            backward_s: mean(TemplateKind::is_backward),
            step_s: of_kind(&[TemplateKind::StepBegin, TemplateKind::StepEnd]).0 / per_step,
            peak_bytes: Bytes(peak_bytes),
        }
    }

    fn instructions(
        &self,
        role: &ir::program::RoleProgram,
        stage: u32,
    ) -> Vec<InstructionMeasurement> {
        let mut all = Vec::new();
        for (t, (template, times)) in role.templates.iter().zip(&self.instructions).enumerate() {
            for (i, (instruction, total)) in template.instructions.iter().zip(times).enumerate() {
                all.push(InstructionMeasurement {
                    stage,
                    template: t as u32,
                    instruction: i as u32,
                    what: what(role, instruction),
                    count: (total.n / u64::from((self.n_steps * self.n_ranks).max(1))) as u32,
                    mean_s: total.mean(|t| t.wall_s),
                    busy_s: Some(total.mean(|t| t.busy_s)),
                });
            }
        }
        all
    }
}

/// Measures ranks by the mean of `n` steps, each beside those of its role.
fn ranks(
    roles: impl Iterator<Item = Vec<Rank>>,
    (sums, n): &(Vec<Spent>, u32),
) -> Vec<RankMeasurement> {
    if *n == 0 {
        return Vec::new();
    }
    let mut all = Vec::new();
    let mut sums = sums.iter();
    for role in roles {
        let of_role: Vec<(Rank, &Spent)> = role.into_iter().zip(&mut sums).collect();
        let works = of_role.iter().map(|(_, s)| s.work_s);
        let fastest_s = works.fold(f64::INFINITY, f64::min);
        let has_peers = of_role.len() > 1;
        all.extend(of_role.iter().map(|(rank, s)| RankMeasurement {
            rank: rank.0,
            work_s: s.work_s / f64::from(*n),
            wait_s: s.wait_s / f64::from(*n),
            score: (has_peers && s.work_s > 0.0).then(|| fastest_s / s.work_s),
        }));
    }
    all.sort_by_key(|m| m.rank);
    all
}

/// Median time of the steps that are neither warm-up nor profiled; of all steps when none is
/// left; zero without steps.
fn median_step(steps: &[StepMeasurement]) -> f64 {
    let plain = |s: &&StepMeasurement| !s.profiled;
    let mut times: Vec<f64> = steps
        .iter()
        .skip(WARM_UP_STEPS)
        .filter(plain)
        .map(|s| s.seconds)
        .collect();
    if times.is_empty() {
        times = steps.iter().map(|s| s.seconds).collect();
    }
    times.sort_by(f64::total_cmp);
    match times.len() {
        0 => 0.0,
        n if n % 2 == 1 => times[n / 2],
        n => (times[n / 2 - 1] + times[n / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_is_twice_as_slow_has_half_the_score() {
        let spent = |work_s| Spent {
            work_s,
            wait_s: 8.0 - work_s,
            ..Spent::default()
        };
        // Ranks 0 and 2 do the same, in two steps; rank 1 does something else.
        let roles = || [vec![Rank(0), Rank(2)], vec![Rank(1)]].into_iter();
        let sums = vec![spent(3.0), spent(6.0), spent(2.0)];
        let found = ranks(roles(), &(sums.clone(), 2));
        let figures = found.iter().map(|m| (m.rank, m.work_s, m.wait_s, m.score));
        let figures: Vec<_> = figures.collect();
        assert_eq!(
            figures,
            [
                (0, 1.5, 2.5, Some(1.0)),
                (1, 1.0, 3.0, None),
                (2, 3.0, 1.0, Some(0.5))
            ]
        );
        assert_eq!(ranks(roles(), &(sums, 0)), []);
    }

    #[test]
    fn the_median_leaves_out_warm_up_and_profiling() {
        let step = |seconds, profiled| StepMeasurement {
            seconds,
            profiled,
            ..StepMeasurement::default()
        };
        assert_eq!(median_step(&[]), 0.0);
        assert_eq!(median_step(&[step(9.0, false)]), 9.0);
        let steps = [
            step(9.0, false),
            step(1.0, false),
            step(3.0, false),
            step(8.0, true),
        ];
        assert_eq!(median_step(&steps), (1.0 + 3.0) / 2.0);
        assert_eq!(median_step(&steps[..2]), 1.0);
    }
}
