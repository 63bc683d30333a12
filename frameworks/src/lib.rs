//! How other software executes a program that Meshwright would execute in its own way.
//!
//! A framework's behaviour ([`Software`]) makes of a program another one, on the streams and with
//! the waits that the framework has (`streams`), and other seconds of its instructions
//! (`prices`). Both are optional, and the simulator of the cost model plays what comes out; it
//! knows no framework. What a rank's process holds is counted apart ([`memory_use`]).
//!
//! To add a behaviour: a field of [`Software`], and a module that changes the program or the
//! seconds of a template. It is worth its place when leaving it out costs a tenth of a point of
//! the mean error over published runs.
//!
//! * `software`, `held`: what a framework does and holds, as data.
//! * `express`: what a framework can express of a plan.
//! * `streams`: what waits for what.
//! * `ops`, `attention`: single kernels; `casts`, `gathers`: operands in eight and four bits.
//! * `fused`, `accumulated`, `experts`: kernels that are one; tokens on their way.
//! * `host`: kernels that wait until they are issued.
//! * `pieces`, `paired`, `contention`: collectives beside kernels.
//! * `repeat`: what checkpoints run and gather again.
//! * `process`: what a process holds.

mod accumulated;
mod attention;
mod casts;
mod contention;
mod experts;
mod express;
mod fused;
mod gathers;
mod held;
mod host;
mod ops;
mod paired;
mod pieces;
mod prices;
mod process;
mod repeat;
mod software;
mod streams;

pub use express::{
    ContextRanks, Framework, Profile, Recomputation, SequenceParallel, Split, Vocabulary,
};
pub use held::{InFlight, ProcessMemory, Reuse};
pub use process::{MemoryUse, memory_use};
pub use software::{AttentionKernel, Exception, Narrow, Scaling, Software};

use cost_model::SimError;
use cost_model::costs::{Costs, costs};
use cost_model::simulate::{SimulateOptions, Simulation, play};
use ir::cluster::Cluster;
use ir::program::Program;

/// A program as software executes it.
#[derive(Clone, Debug)]
pub struct Executed {
    /// The program on the software's streams.
    pub program: Program,
    /// Seconds of its instructions.
    pub costs: Costs,
}

/// A program as software executes it.
///
/// Fails as the costs of the program do.
pub fn execute(
    program: &Program,
    cluster: &Cluster,
    software: &Software,
) -> Result<Executed, SimError> {
    let program = streams::arranged(program, software);
    let mut costs = costs(&program, cluster)?;
    for (role, costs) in program.roles.iter().zip(&mut costs.instructions) {
        let seen = cluster.seen_by(role.mesh.devices);
        prices::price(&seen, software, role, costs);
    }
    Ok(Executed { program, costs })
}

impl Executed {
    /// Plays a step.
    ///
    /// Fails as the simulation does.
    pub fn simulate(
        &self,
        cluster: &Cluster,
        options: &SimulateOptions,
    ) -> Result<Simulation, SimError> {
        play(&self.program, cluster, self.costs.clone(), options)
    }
}

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
