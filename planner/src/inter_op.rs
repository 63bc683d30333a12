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
//! static + in_flight * saved + transient <= capacity, where stage i of p keeps m microbatches
//! in flight under GPipe and min(m, p - i) under 1F1B.
//!
//! With v > 1 stages on each of p meshes, interleaved, a mesh starts v stages for every
//! microbatch and the pipeline fills with p - 1 of them, so the largest counts
//! (m - p) v + p - 1 times instead of m - 1 times; in flight is what the schedule says. Here
//! every stage has a submesh of its own; that several share one, and its memory, is
//! `interleave`'s business, which judges plans by what each mesh has to do; the count above only
//! finds cuts.
//!
//! How: for a threshold T, f(T) is the least sum with all t_i below T, found by a dynamic
//! program from the last stage backwards, so that p - i is the number of stages so far. The
//! thresholds are searched by branch and bound: nothing with max t in (low, high) is better
//! than f(high) + (m - 1) * low.
//!
//! Invariants: exact for this objective up to the requested gap; ties go to the earlier
//! candidate, in the order of layers, submeshes and entries, so results are deterministic.
//! Labels that fewer stages, less time and a shorter step all dominate are dropped; those
//! that cannot beat the best plan even if the rest were free of transfers and memory too.

pub use exhaustive::{brute_force, cost_of};
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

/// Which schedule runs the pipeline: it decides how many microbatches are in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScheduleKind {
    /// All forward, then all backward: m in flight everywhere.
    GPipe,
    /// One forward, one backward: min(m, p - i) in flight at stage i of p.
    OneFOneB,
    /// 1F1B with several stages on every mesh. The number of stages has to be fixed.
    Interleaved {
        /// Meshes; the number of microbatches is a multiple of it.
        n_meshes: usize,
        /// Stages of each.
        virtual_stages: u32,
    },
}

impl ScheduleKind {
    /// Microbatches in flight at a stage that `after` stages follow.
    pub fn in_flight(self, microbatches: u64, after: usize) -> u64 {
        match self {
            ScheduleKind::GPipe => microbatches,
            ScheduleKind::OneFOneB => microbatches.min(after as u64 + 1),
            ScheduleKind::Interleaved {
                n_meshes,
                virtual_stages,
            } => {
                let n_stages = n_meshes * virtual_stages as usize;
                let stage = n_stages.saturating_sub(after + 1);
                let kind = ir::plan::ScheduleKind::Interleaved { virtual_stages };
                let m = u32::try_from(microbatches).unwrap_or(u32::MAX);
                u64::from(kind.in_flight(stage, n_stages, m))
            }
        }
    }

    /// How often the largest t counts beside the sum over all stages.
    pub fn repeats(self, microbatches: u64) -> f64 {
        match self {
            ScheduleKind::GPipe | ScheduleKind::OneFOneB => microbatches.saturating_sub(1) as f64,
            ScheduleKind::Interleaved {
                n_meshes,
                virtual_stages,
            } => {
                let p = n_meshes.max(1) as u64;
                let rounds = microbatches.saturating_sub(p) as f64;
                rounds * f64::from(virtual_stages) + (p - 1) as f64
            }
        }
    }
}

/// What to search for.
#[derive(Clone, Copy, Debug)]
pub struct InterOpOptions {
    /// Microbatches per step, at least 1.
    pub microbatches: u64,
    /// The schedule.
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
}

/// Seconds to move one microbatch's activations and their gradients from a stage to the next,
/// charged to the sender: (submesh, boundary_out, next submesh, next boundary_in). `None` where
/// the two cannot follow each other.
pub type Transfer<'a> = &'a dyn Fn(usize, u16, usize, u16) -> Option<f64>;

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
    /// What it costs.
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
    let problem = Problem::new(table, transfer, *options);
    search_thresholds(&problem).ok_or_else(|| match options.cutoff_s.is_finite() {
        true => NoPlan::NoTiling,
        false => problem.why_not(),
    })
}
