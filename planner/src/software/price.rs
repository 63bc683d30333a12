//! The price of a plan under other software: its program played as the software executes it, and
//! what its processes hold.

use crate::{PlanError, Planned};
use cost_model::simulate::{SimulateOptions, Simulation};
use cost_model::work::StepWork;
use frameworks::{Executed, MemoryUse, Software, memory_use};
use ir::cluster::Cluster;
use ir::program::Program;

/// A step under other software.
#[derive(Clone, Debug)]
pub struct Priced {
    /// The program on the software's streams, with its seconds.
    pub executed: Executed,
    /// The step as it was played. Peaks of memory are those of the processes.
    pub simulation: Simulation,
    /// The memory of a rank of each mesh, in the order of the program's roles.
    pub memory: Vec<MemoryUse>,
}

impl Priced {
    /// The memory of the fullest rank.
    pub fn fullest(&self) -> MemoryUse {
        let fullest = self.memory.iter().max_by_key(|m| m.total().0);
        fullest.copied().unwrap_or_default()
    }
}

/// Plays a program as software executes it. Frameworks lay tensors out so that collectives move them
/// as they stand, so they copy no pieces.
///
/// # Errors
/// When the program cannot be laid out so, or does not fit the cluster.
pub fn priced(
    program: &Program,
    cluster: &Cluster,
    software: &Software,
    options: &SimulateOptions,
) -> Result<Priced, PlanError> {
    let lower = |e: &dyn std::fmt::Display| PlanError::Lower(e.to_string());
    let program = lowering::without_pieces(program).map_err(|e| lower(&e))?;
    let executed = frameworks::execute(&program, cluster, software).map_err(|e| lower(&e))?;
    let played = executed.simulate(cluster, options);
    let mut simulation = played.map_err(|e| lower(&e))?;
    let roles = program.roles.iter();
    let memory = roles.map(|role| memory_use(&program, role, cluster, software.memory.as_ref()));
    let memory: Vec<MemoryUse> = memory.collect();
    for (stage, memory) in simulation.prediction.stages.iter_mut().zip(&memory) {
        stage.peak_bytes = memory.total();
    }
    Ok(Priced {
        executed,
        simulation,
        memory,
    })
}

/// The price of a plan that was just made.
///
/// # Errors
/// As [`priced`] does.
pub fn price(
    planned: &Planned,
    cluster: &Cluster,
    software: &Software,
) -> Result<Priced, PlanError> {
    let work = StepWork::of(&planned.training, &planned.plan.train);
    let options = SimulateOptions::new(work);
    priced(&planned.program, cluster, software, &options)
}
