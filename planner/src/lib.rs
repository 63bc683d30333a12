//! The search: from a forward graph, a training spec and a cluster to a plan.
//!
//! ```text
//! Graph ─► layers ─► groups ─► layer_model ─► stage ─► inter_op ─► assemble ─► Plan
//!          equal      choices   matrix per     min-plus  DP over     paths,
//!          layers     per op    layer kind     products  stages      simulation
//! ```
//!
//! * `cluster_layers`: cuts a graph that declares no layers into some.
//! * `layers`: layers are compared and solved once per kind.
//! * `groups`: what is decided together, and the choices that sharding rules and pins allow.
//! * `layer_model`: a layer as an intra-op problem; eliminated to a matrix over the layouts
//!   of its boundaries, under a price on memory.
//! * `stage`: sequences of layers as min-plus products.
//! * `refine`: a stage under memory pressure as one integer program with memory rows.
//! * `inter_op`: the DP over stages; a pure function of the stage table.
//! * `interleave`: stages that share a mesh, and its memory.
//! * `search`: the loops over microbatch sizes and submeshes; re-ranking by simulation.
//! * `offload`: which tensors rest in host memory where nothing fits without.
//! * `progress`: who follows a search, and may end it early.
//! * `software`: plans for other software, in what it can express and at its prices.
//! * `recipes`: named grids of pins, and the best point of one.

mod assemble;
mod cluster_layers;
mod groups;
pub mod inter_op;
mod interleave;
mod layer_model;
pub mod layers;
mod offload;
pub mod pins;
mod prices;
mod progress;
pub mod recipes;
mod refine;
mod search;
pub mod software;
mod stage;

pub use cluster_layers::{ClusterError, Layered, Layering};
use cost_model::simulate::Simulation;
use ir::cluster::Cluster;
use ir::plan::Plan;
use ir::program::Program;
use ir::training::TrainingGraph;
use ir::{Bytes, Graph, Seconds, TrainSpec, counted};
pub use offload::plan_or_offload;
pub use pins::{ContextAttention, Offload, PinError, Pins};
pub use progress::{BestSoFar, Progress, Watch, Watcher};
pub use recipes::{Recipe, plan_recipe};
pub use software::OtherSoftware;

/// Options of the search beside model, training and cluster.
#[derive(Clone, Debug, Default)]
pub struct PlanOptions {
    /// The model's name in plans; that of the graph, which is its family, where there is none.
    pub name: Option<String>,
    /// Decisions that are fixed.
    pub pins: Pins,
    /// Where layers come from.
    pub layering: Layering,
    /// How much longer a step may take than that of the fastest plan, relatively, for a plan that
    /// is simpler: of all that are found within it the one with the fewest distinct layer
    /// strategies is taken. Zero takes the fastest.
    pub tolerance: f64,
    /// Share of each device's usable memory that stays free; that of the cluster's devices if none
    /// is given.
    pub headroom: Option<f64>,
    /// How many times as much is looked at as by default.
    pub effort: Effort,
    /// Whether plans are left out that are chosen for what a program hides of its parameters' traffic
    /// behind computing: other software need not.
    pub without_hiding: bool,
    /// Whether each instruction is priced by itself, as other software is priced with calls of its own:
    /// the program of the plan marks none that are one call.
    pub one_by_one: bool,
    /// Who follows the search, and may end it early.
    pub watcher: Watcher,
    /// Other software to plan for; Meshwright's own runtime where there is none.
    pub made_for: Option<OtherSoftware>,
}

/// How many times as many pipelines are simulated, and prices on memory looked at, as by default:
/// for a plan that may be faster, and a bound that may be closer. The space is the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Effort(u8);

impl Effort {
    /// The most that can be asked for.
    pub const MOST: u8 = 8;

    /// `times` as much as by default, from 1 to [`Self::MOST`].
    pub fn new(times: u8) -> Option<Effort> {
        (1..=Self::MOST).contains(&times).then_some(Effort(times))
    }

    /// So many times of what is looked at by default.
    pub(crate) fn times(self, n: usize) -> usize {
        n * usize::from(self.0)
    }

    /// Whether it is more than the default.
    pub(crate) fn is_more(self) -> bool {
        self.0 > 1
    }
}

impl Default for Effort {
    fn default() -> Self {
        Effort(1)
    }
}

/// A plan with what was made on the way.
#[derive(Clone, Debug)]
pub struct Planned {
    /// The plan.
    pub plan: Plan,
    /// Its training graph.
    pub training: TrainingGraph,
    /// Its program.
    pub program: Program,
    /// The simulation that predicts it.
    pub simulation: Simulation,
    /// How the search went.
    pub stats: PlanStats,
}

/// How a search went.
#[derive(Clone, Debug, Default)]
pub struct PlanStats {
    /// Kinds of layers found.
    pub n_layer_kinds: usize,
    /// Shapes of submeshes times microbatch sizes that were priced.
    pub candidates: u64,
    /// Pipelines that were lowered and simulated.
    pub simulated: u64,
    /// Choices of the decision groups of all layers that were modelled: those that the axes make,
    /// and those of them that are of use.
    pub choices: [u64; 2],
    /// Remarks on the request for the user, in sentences.
    pub notes: Vec<String>,
    /// The intra-op problems of the plan's stages that were solved as integer programs.
    pub problems: Vec<intra_op::problem::IntraOpProblem>,
    /// Simulated alternatives, in words, with their predicted step times.
    pub alternatives: Vec<(String, Seconds)>,
    /// The plans that were simulated and fit, the chosen one among them, in the order in which
    /// they were made. They are complete, each with its prediction.
    pub simulated_plans: Vec<Plan>,
}

/// Why there is no plan.
#[derive(Clone, Debug, thiserror::Error)]
pub enum PlanError {
    /// The input cannot be planned for.
    #[error("{0}")]
    Input(String),
    /// Pins that do not fit the model or the cluster, or each other; says what would.
    #[error("{0}")]
    Pins(String),
    /// The graph cannot be cut into the layers that were asked for.
    #[error(transparent)]
    Layers(#[from] ClusterError),
    /// No strategy is left for an op, or a layer cannot be modelled.
    #[error("no strategy: {0}")]
    Strategies(String),
    /// The devices cannot be tiled by stages.
    #[error("no pipeline tiles {} with {} under the pins", counted(*devices, "device"), counted(*layers as u64, "layer"))]
    NoTiling {
        /// Devices of the cluster.
        devices: u32,
        /// Layers of the model.
        layers: usize,
    },
    /// Everything needs more memory than there is.
    #[error(
        "out of memory: the nearest plan has {}; its stage of layers {layers} on {} needs {} on each with {} in flight, {} more than the {} there are",
        counted(*n_stages as u64, "stage"), counted(*devices, "device"), Bytes(*needed), counted(*in_flight, "microbatch"), Bytes(needed.saturating_sub(*capacity)), Bytes(*capacity)
    )]
    Memory {
        /// Stages of the nearest plan.
        n_stages: usize,
        /// Layers of the stage that does not fit.
        layers: String,
        /// Devices of that stage.
        devices: u32,
        /// Microbatches in flight there.
        in_flight: u64,
        /// Bytes per device that it needs.
        needed: u64,
        /// Bytes per device that there are.
        capacity: u64,
    },
    /// Plans fit by the model but their placed buffers do not.
    #[error("out of memory: placed buffers exceed the budget even with {} reserved for them", Bytes(*bytes))]
    Overrun {
        /// Bytes that were reserved.
        bytes: u64,
    },
    /// A plan could not be lowered or simulated: a defect of the planner.
    #[error("the chosen plan cannot be lowered: {0}")]
    Lower(String),
    /// The choice is not among the priced ones: a defect of the planner.
    #[error("the search contradicts itself: {0}")]
    Defect(String),
}

/// Plans the training of `forward` (as made by `import`) on `cluster`. Its layers are those
/// that it declares, or those that `options` asks for.
///
/// Deterministic: the same input gives the same plan to the byte, unless a watcher ends the search
/// early: then it is the best of what was searched, and its proof says so.
pub fn plan(
    forward: &Graph,
    train: &TrainSpec,
    cluster: &Cluster,
    options: &PlanOptions,
) -> Result<Planned, PlanError> {
    let mut planned = match (&options.made_for, &options.pins.offload) {
        (Some(other), _) => software::plan(forward, train, cluster, options, other),
        (None, Some(Offload::Search)) => plan_or_offload(forward, train, cluster, options),
        (None, _) => search::plan(forward, train, cluster, options),
    }?;
    if let Some(name) = &options.name {
        let others = planned.stats.simulated_plans.iter_mut();
        for plan in others.chain([&mut planned.plan]) {
            plan.name.clone_from(name);
        }
    }
    Ok(planned)
}

/// Gives `forward` the layers that [`plan`] would slice it into.
///
/// # Errors
/// When a number of layers is asked for that the graph does not allow.
pub fn layered(forward: &Graph, layering: Layering) -> Result<Layered, ClusterError> {
    cluster_layers::cluster_layers(forward, layering, search::MAX_LAYERS)
}
