//! Schedules: in which order the ranks of a mesh compute their passes, and what follows from it.
//!
//! Everything that is known of a schedule stands in its own file: its name, how many stages it
//! puts on a mesh, what its slots are for, their order, how many microbatches are in flight, when
//! values travel between meshes, and how its latency follows from the times of stages. The
//! planner, lowering, the checker and the reports ask a [`Schedule`] and know none by name. A
//! schedule orders work; it neither executes it nor knows of communication.
//!
//! A mesh has one stage, or several whose passes are interleaved: its *chunks*. With `p` meshes
//! stage `i` is chunk `i / p` of the mesh that the schedule's [`Route`] says.
//!
//! Invariants of every schedule: each pass of each microbatch and chunk stands once, the passes of
//! a microbatch in the order of [`Schedule::passes`], microbatches ascending per pass and chunk.

mod forward;
mod gpipe;
mod interleaved;
mod one_f_one_b;
mod pipedream;
mod route;
#[cfg(test)]
mod tests;
mod zb_h1;
mod zb_v;

pub use route::Route;

use crate::{Pass, Task};
use serde::{Deserialize, Serialize};

/// Order of forward and backward passes in a stage.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ScheduleKind {
    /// All forwards, then all backwards (Huang et al. 2019).
    #[serde(rename = "gpipe")]
    GPipe,
    /// One forward, one backward (PipeDream-Flush, Narayanan et al. 2021).
    #[default]
    #[serde(rename = "1f1b")]
    OneFOneB,
    /// 1F1B with several stages on every mesh, whose passes alternate (Narayanan et al. 2021,
    /// section 2.2). Stage `i` of a plan on `p` meshes runs on mesh `i mod p`; the microbatches
    /// go in groups of `p`, so their number is a multiple of `p`.
    #[serde(rename = "interleaved_1f1b")]
    Interleaved {
        /// Stages of every mesh, 2 or more.
        virtual_stages: u32,
    },
    /// 1F1B in which weight gradients are played apart from input gradients, where a stage would
    /// wait (Qi et al. 2023).
    ZbH1,
    /// Two stages on every mesh, placed as a V, with weight gradients apart (Qi et al. 2024).
    /// Stages `i` and `2 p - 1 - i` of a plan on `p` meshes run on mesh `i`.
    ZbV,
    /// 1F1B whose stages update their weights after every microbatch's backward pass, and keep the
    /// versions that microbatches in flight began with (Narayanan et al. 2019).
    #[serde(rename = "pipedream")]
    PipeDream,
    /// Forwards alone, for inference. It is that of every such plan, and of no other, so it is
    /// not asked for by name.
    Forward,
}

impl ScheduleKind {
    /// The schedules of training that have no parameters, so that a name is enough to ask for one.
    pub const NAMED: &[ScheduleKind] = &[
        ScheduleKind::GPipe,
        ScheduleKind::OneFOneB,
        ScheduleKind::ZbH1,
        ScheduleKind::ZbV,
        ScheduleKind::PipeDream,
    ];

    /// Those of them that have one stage on every mesh and update weights once a step.
    pub const PLAIN: &[ScheduleKind] = &[
        ScheduleKind::GPipe,
        ScheduleKind::OneFOneB,
        ScheduleKind::ZbH1,
    ];

    /// The schedule itself.
    pub fn schedule(self) -> Box<dyn Schedule> {
        match self {
            ScheduleKind::GPipe => Box::new(gpipe::GPipe),
            ScheduleKind::OneFOneB => Box::new(one_f_one_b::OneFOneB),
            ScheduleKind::Interleaved { virtual_stages } => {
                Box::new(interleaved::Interleaved { virtual_stages })
            }
            ScheduleKind::ZbH1 => Box::new(zb_h1::ZbH1),
            ScheduleKind::ZbV => Box::new(zb_v::ZbV),
            ScheduleKind::PipeDream => Box::new(pipedream::PipeDream),
            ScheduleKind::Forward => Box::new(forward::Forward),
        }
    }

    /// The one of [`ScheduleKind::NAMED`] with this name.
    pub fn named(name: &str) -> Option<ScheduleKind> {
        let mut all = Self::NAMED.iter().copied();
        all.find(|kind| kind.name() == name)
    }

    /// [`Schedule::name`].
    pub fn name(self) -> &'static str {
        self.schedule().name()
    }

    /// [`Schedule::virtual_stages`].
    pub fn virtual_stages(self) -> u32 {
        self.schedule().virtual_stages()
    }

    /// [`Schedule::route`].
    pub fn route(self) -> Route {
        self.schedule().route()
    }
}

/// The content of a microbatch's slot: one pass of the training graph, or several together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PassKind {
    /// Forward.
    Forward,
    /// Recomputation for the gradients.
    Recompute,
    /// Gradients for inputs.
    InputGradient,
    /// Gradients for weights.
    WeightGradient,
    /// Gradients for inputs and weights together.
    Backward,
}

impl PassKind {
    /// All of them.
    pub const ALL: [PassKind; 5] = [
        PassKind::Forward,
        PassKind::Recompute,
        PassKind::InputGradient,
        PassKind::WeightGradient,
        PassKind::Backward,
    ];

    /// Whether ops of `pass` may be played in such a slot. What is recomputed is played before
    /// the first gradients unless it has a slot of its own.
    fn plays(self, pass: Pass) -> bool {
        match self {
            PassKind::Forward => pass == Pass::F,
            PassKind::Recompute => pass == Pass::Recompute,
            PassKind::InputGradient => matches!(pass, Pass::Recompute | Pass::BI),
            PassKind::WeightGradient => pass == Pass::BW,
            PassKind::Backward => pass != Pass::F,
        }
    }

    /// How long it takes about, in forwards: a matmul has one of them forward, one for its
    /// input's and one for its weight's gradient.
    pub fn forwards(self) -> u64 {
        match self {
            PassKind::Backward => 2,
            _ => 1,
        }
    }

    /// A letter for drawings.
    pub fn letter(self) -> char {
        match self {
            PassKind::Forward => 'F',
            PassKind::Recompute => 'R',
            PassKind::InputGradient => 'I',
            PassKind::WeightGradient => 'W',
            PassKind::Backward => 'B',
        }
    }
}

/// A pass of one of a mesh's stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkPass {
    /// The pass.
    pub pass: PassKind,
    /// Which of the mesh's stages, from 0.
    pub chunk: u32,
}

/// One pass of one stage for one microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Slot {
    /// The pass and the stage.
    pub of: ChunkPass,
    /// The microbatch.
    pub microbatch: u32,
}

impl Slot {
    fn new(pass: PassKind, chunk: u32, microbatch: u32) -> Slot {
        Slot {
            of: ChunkPass { pass, chunk },
            microbatch,
        }
    }
}

/// When an exchange between meshes takes place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Travel {
    /// When its values are made and both sides are between slots.
    BetweenSlots,
    /// When its values are made; the receiver's slot goes on meanwhile.
    AtOnce,
}

/// How long a step takes, as the planner's objective has it. With t_k the time of stage k for one
/// microbatch, passes and sending, and s_k its time once per step:
///
/// ```text
///   sum_k t_k + busiest * max over meshes of (sum of t_k over its stages)
///             + slowest * max_k t_k + max over meshes of (sum of s_k over its stages)
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latency {
    /// How often all stages of the busiest mesh count beside the sum.
    pub busiest: f64,
    /// How often the slowest stage does.
    pub slowest: f64,
}

impl Latency {
    /// Seconds of a step: of all stages together, the busiest mesh, the slowest stage and the
    /// work once per step of the mesh with the most of it.
    pub fn total_s(&self, sum_s: f64, busiest_s: f64, max_s: f64, step_s: f64) -> f64 {
        sum_s + self.busiest * busiest_s + self.slowest * max_s + step_s
    }
}

/// A schedule of passes. `n_meshes` counts meshes, `n_stages` stages of all meshes, `m`
/// microbatches per step; each is at least 1.
pub trait Schedule: Send + Sync {
    /// Name in plans, pins and reports.
    fn name(&self) -> &'static str;

    /// Stages that share a mesh.
    fn virtual_stages(&self) -> u32 {
        1
    }

    /// The meshes that stages follow each other on, where several share one.
    fn route(&self) -> Route {
        Route::Ring
    }

    /// Whether the gradients of every microbatch make an update of their own, while others are in
    /// flight: other mathematics than those of all other schedules, so it is never searched for.
    fn is_asynchronous(&self) -> bool {
        false
    }

    /// The passes of its slots, in the order in which a microbatch goes through them on a stage.
    /// Every pass of the graph that is scheduled belongs to one of them.
    fn passes(&self) -> &'static [PassKind] {
        &[PassKind::Forward, PassKind::Backward]
    }

    /// The number of microbatches is a multiple of this.
    fn group(&self, _n_meshes: usize) -> u32 {
        1
    }

    /// Why there cannot be so many stages or microbatches.
    fn problem(&self, _n_stages: usize, _m: u32) -> Option<String> {
        None
    }

    /// The slots of mesh `mesh`, from 0; of counts that are no [problem](Schedule::problem).
    fn slots(&self, mesh: usize, n_meshes: usize, m: u32) -> Vec<Slot>;

    /// Most microbatches of stage `stage` at once whose slot `from` has begun and whose slot
    /// `to`, a later one of [`Schedule::passes`], has not ended: so many copies there are of a
    /// value that the one makes and the other is the last to use. Stages before this one do not
    /// make it fewer, where a mesh has one stage.
    fn in_flight(&self, from: PassKind, to: PassKind, stage: usize, n_stages: usize, m: u32)
    -> u32;

    /// Microbatches that stage `stage` has in flight, from the forward pass until nothing is left
    /// to do, while its mesh has the most of all of its stages together. Stages of a mesh have
    /// their most at different times, so these are fewer than [`Schedule::in_flight`] says of each;
    /// where they hold as many bytes a microbatch, this is what a mesh needs memory for.
    fn at_peak(&self, stage: usize, n_stages: usize, m: u32) -> u32 {
        let passes = self.passes();
        let last = *passes.last().unwrap_or(&PassKind::Backward);
        self.in_flight(PassKind::Forward, last, stage, n_stages, m)
    }

    /// Microbatches that the stages of mesh `mesh` have in flight, by chunk, at the moments of a
    /// step that decide on its memory: whatever bytes each stage holds for a microbatch, together
    /// they hold the most at one of these moments. The first is [`Schedule::at_peak`].
    fn moments(&self, mesh: usize, n_meshes: usize, m: u32) -> Vec<Vec<u32>> {
        let n_stages = n_meshes * self.virtual_stages() as usize;
        let stages = self.route().stages_of(mesh, n_meshes, n_stages);
        vec![stages.map(|s| self.at_peak(s, n_stages, m)).collect()]
    }

    /// When values travel.
    fn travel(&self) -> Travel {
        Travel::BetweenSlots
    }

    /// The terms of its latency, of equal meshes where several stages share one.
    fn latency(&self, n_meshes: usize, m: u32) -> Latency;

    /// The schedule that has `virtual_stages` stages on every mesh in place of one.
    fn interleaved(&self, _virtual_stages: u32) -> Option<ScheduleKind> {
        None
    }
}

/// Counts without those that others are nowhere less than; of equal ones the first.
fn undominated(counts: impl Iterator<Item = Vec<u32>>) -> Vec<Vec<u32>> {
    let mut kept: Vec<Vec<u32>> = Vec::new();
    let covers = |a: &[u32], b: &[u32]| a.iter().zip(b).all(|(a, b)| a >= b);
    for new in counts {
        if !kept.iter().any(|old| covers(old, &new)) {
            kept.retain(|old| !covers(&new, old));
            kept.push(new);
        }
    }
    kept
}

impl dyn Schedule + '_ {
    /// The task of its plans: training, if it has slots for gradients.
    pub fn task(&self) -> Task {
        match self.passes().iter().any(|kind| kind.plays(Pass::BI)) {
            true => Task::Training,
            false => Task::Inference,
        }
    }

    /// The slot in which ops of a pass of the training graph are played in microbatches.
    pub fn slot_of(&self, pass: Pass) -> PassKind {
        let all = self.passes();
        let own = all.iter().find(|kind| kind.plays(pass));
        *own.or(all.last()).unwrap_or(&PassKind::Backward)
    }

    /// How many stages' times a mesh waits while the pipeline fills and drains, where all stages
    /// take as long.
    pub fn waits(&self, n_meshes: usize, m: u32) -> f64 {
        let v = f64::from(self.virtual_stages());
        let latency = self.latency(n_meshes, m);
        latency.total_s(n_meshes as f64 * v, v, 1.0, 0.0) - v * f64::from(m)
    }

    /// Most microbatches whose activations stage `stage` holds at once: from their forward until
    /// nothing is left to do for them there.
    pub fn activations(&self, stage: usize, n_stages: usize, m: u32) -> u32 {
        let last = *self.passes().last().unwrap_or(&PassKind::Backward);
        self.in_flight(PassKind::Forward, last, stage, n_stages, m)
    }
}
