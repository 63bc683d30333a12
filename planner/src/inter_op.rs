//! The inter-op dynamic program: slices the layers into pipeline stages on submeshes.
//!
//! A pure function of the [`StageTable`]. With t_i the forward, backward and sending time of
//! stage i for one microbatch, s_i its time once per step, and m microbatches, it minimises
//!
//! ```text
//!   sum_i t_i + (m - 1) * max_i t_i + max_i s_i
//! ```
//!
//! (Alpa, Zheng et al. 2022, equation 2, with the step term added) such that every stage fits:
//! static + in_flight * saved + transient <= capacity. How many microbatches a stage keeps in
//! flight the schedule says, and how often the largest t counts
//! ([`Latency`](ir::schedule::Latency)).
//!
//! With v > 1 stages on each of p meshes, interleaved, a mesh starts v stages for every
//! microbatch and the pipeline fills with p - 1 of them, so the largest counts
//! (m - p) v + p - 1 times instead of m - 1 times. Here every stage has a submesh of its own; that
//! several share one, and its memory, is `interleave`'s business, which judges plans by what each
//! mesh has to do; the count above only finds cuts.
//!
//! How: for a threshold T, f(T) is the least sum with all t_i below T, found by a dynamic
//! program from the last stage backwards, so that p - i is the number of stages so far. The
//! thresholds are searched by branch and bound: nothing with max t in (low, high) is better
//! than f(high) + (m - 1) * low. Under schedules where the stages before one matter to what it
//! has in flight, all that once for each number of stages.
//!
//! Where devices are not equal a submesh lies at some places only ([`StageTable::at`]): stages take
//! devices in their order, so those behind a stage say where it begins.
//!
//! Invariants: exact for this objective up to the requested gap; ties go to the earlier
//! candidate, in the order of layers, submeshes and entries, so results are deterministic.
//! Labels that fewer stages, less time and a shorter step all dominate are dropped; those
//! that cannot beat the best plan even if the rest were free of transfers and memory too.

pub use exhaustive::{brute_force, cost_of};
use ir::plan::ScheduleKind;
use labels::Problem;
use std::ops::Range;
pub use table::{StageEntry, StageTable};
use thresholds::search_thresholds;
pub use work::least_work;

mod exhaustive;
mod labels;
mod shortfall;
mod table;
mod thresholds;
mod work;

/// Options of the search.
#[derive(Clone, Copy, Debug)]
pub struct InterOpOptions {
    /// Microbatches per step, at least 1.
    pub microbatches: u64,
    /// The schedule; one with several stages on a mesh needs `n_stages`.
    pub schedule: ScheduleKind,
    /// Plans may leave devices unused.
    pub allow_unused: bool,
    /// Exactly this many stages, if given.
    pub n_stages: Option<usize>,
    /// Stop when the plan is within this fraction of the bound; 0 for exact.
    pub relative_gap: f64,
    /// Only what takes less than so many seconds is wanted. Where there is nothing, and this is
    /// finite, nobody looks for the reason: the answer is [`NoPlan::NoTiling`].
    pub cutoff_s: f64,
}

impl InterOpOptions {
    /// Exact, all devices used, any number of stages.
    pub fn new(microbatches: u64, schedule: ScheduleKind) -> Self {
        InterOpOptions {
            microbatches,
            schedule,
            allow_unused: false,
            n_stages: None,
            relative_gap: 0.0,
            cutoff_s: f64::INFINITY,
        }
    }

    /// Microbatches in flight at stage `stage` of `n_stages`; of stages that share a mesh, and have
    /// their copies by turns, when the mesh has most of all.
    pub fn in_flight(&self, stage: usize, n_stages: usize) -> u64 {
        let schedule = self.schedule.schedule();
        schedule.at_peak(stage, n_stages, self.m()).into()
    }

    /// How often the largest t counts beside the sum over all stages.
    pub fn repeats(&self) -> f64 {
        let schedule = self.schedule.schedule();
        let v = schedule.virtual_stages().max(1);
        let n_meshes = self.n_stages.unwrap_or(1) / v as usize;
        let latency = schedule.latency(n_meshes.max(1), self.m());
        latency.busiest * f64::from(v) + latency.slowest
    }

    fn m(&self) -> u32 {
        u32::try_from(self.microbatches).unwrap_or(u32::MAX)
    }

    /// Whether stages before one matter to what it has in flight, of up to `n` stages.
    fn counts_before(&self, n: usize) -> bool {
        (1..n).any(|stage| self.in_flight(stage, n) != self.in_flight(0, n - stage))
    }
}

/// Where one stage ends and the next begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hop {
    /// Submesh shape of the sender.
    pub from: usize,
    /// Its entry's.
    pub boundary_out: u16,
    /// Submesh shape of the receiver.
    pub to: usize,
    /// Its entry's.
    pub boundary_in: u16,
    /// Devices of the receiver and of all stages behind it.
    pub behind: usize,
}

/// Seconds to move one microbatch's activations and their gradients from a stage to the next,
/// charged to the sender. `None` where the two cannot follow each other.
pub type Transfer<'a> = &'a dyn Fn(Hop) -> Option<f64>;

/// One stage of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct StageChoice {
    /// Its layers.
    pub layers: Range<usize>,
    /// Its submesh shape.
    pub submesh: usize,
    /// Index into `table.get(layers, submesh)`.
    pub entry: usize,
    /// The entry's tag.
    pub tag: u64,
    /// Microbatches in flight.
    pub in_flight: u64,
    /// Sending time to the next stage; 0 for the last.
    pub transfer_s: f64,
    /// t_i: forward, backward and sending.
    pub time_s: f64,
    /// Bytes per device, beside transient ones, that it may take of a mesh that it shares.
    pub share_bytes: Option<u64>,
}

/// The parts of the objective.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PipelineCost {
    /// sum_i t_i
    pub sum_s: f64,
    /// max_i t_i
    pub max_s: f64,
    /// max_i s_i
    pub step_s: f64,
    /// sum + (m - 1) * max + step; see the module header for interleaved stages.
    pub total_s: f64,
}

/// The best plan.
#[derive(Clone, Debug, PartialEq)]
pub struct PipelineChoice {
    /// First stage first.
    pub stages: Vec<StageChoice>,
    /// Its cost.
    pub cost: PipelineCost,
    /// No plan costs less than this for the additive objective; equals the cost when exact.
    pub lower_bound_s: f64,
    /// Thresholds that were tried.
    pub n_thresholds: usize,
}

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq)]
pub enum NoPlan {
    /// Even without regard to memory, no sequence of stages covers layers and devices.
    NoTiling,
    /// The plan that comes nearest to fitting still lacks memory in this stage.
    Memory {
        /// Stages of that plan.
        n_stages: usize,
        /// The stage's layers.
        layers: Range<usize>,
        /// The stage's submesh shape.
        submesh: usize,
        /// Its microbatches in flight.
        in_flight: u64,
        /// Bytes per device that it needs.
        needed_bytes: u128,
        /// Bytes per device that there are.
        capacity_bytes: u64,
    },
}

impl NoPlan {
    /// Bytes that a device of the nearest plan lacks.
    fn missing_bytes(&self) -> u128 {
        match self {
            NoPlan::NoTiling => u128::MAX,
            NoPlan::Memory {
                needed_bytes,
                capacity_bytes,
                ..
            } => needed_bytes.saturating_sub(u128::from(*capacity_bytes)),
        }
    }
}

/// Finds the best plan for `table`.
///
/// # Errors
/// [`NoPlan`] with the nearest reason.
///
/// # Panics
/// If there are no microbatches.
pub fn plan(
    table: &StageTable,
    transfer: Transfer<'_>,
    options: &InterOpOptions,
) -> Result<PipelineChoice, NoPlan> {
    assert!(
        options.microbatches > 0,
        "a step has at least one microbatch"
    );
    let most = table.n_layers.min(table.n_devices);
    if options.n_stages.is_none() && options.counts_before(most) {
        return best_of_counts(table, transfer, options, most);
    }
    let problem = Problem::new(table, transfer, *options);
    search_thresholds(&problem).ok_or_else(|| match options.cutoff_s.is_finite() {
        true => NoPlan::NoTiling,
        false => problem.why_not(),
    })
}

/// The best plan of up to `most` stages, each number by itself; the fewer of equals.
fn best_of_counts(
    table: &StageTable,
    transfer: Transfer<'_>,
    options: &InterOpOptions,
    most: usize,
) -> Result<PipelineChoice, NoPlan> {
    let mut best: Result<PipelineChoice, NoPlan> = Err(NoPlan::NoTiling);
    let (mut lower_bound_s, mut n_thresholds) = (f64::INFINITY, 0);
    for n in 1..=most {
        let options = InterOpOptions {
            n_stages: Some(n),
            ..*options
        };
        match (plan(table, transfer, &options), &best) {
            (Ok(new), known) => {
                lower_bound_s = lower_bound_s.min(new.lower_bound_s);
                n_thresholds += new.n_thresholds;
                let known = known.as_ref().map_or(f64::INFINITY, |b| b.cost.total_s);
                if new.cost.total_s < known {
                    best = Ok(new);
                }
            }
            (Err(new), Err(known)) if new.missing_bytes() < known.missing_bytes() => {
                best = Err(new);
            }
            _ => {}
        }
    }
    best.map(|b| PipelineChoice {
        lower_bound_s,
        n_thresholds,
        ..b
    })
}
