//! Memory of processes beside that of programs.
//!
//! A plan fits when its program's arena does: that is what the search bounds and the checker
//! proves. What other software's process holds for the same program is an estimate (its
//! allocator, its buffers), so a process that is predicted to hold more than its device has is
//! said, not refused.

use cost_model::memory::memory_use;
use ir::Bytes;
use ir::plan::Plan;
use ir::program::Program;

/// That ranks' processes are predicted to hold more than their devices have, where the cluster
/// says what a process holds (`software.memory`).
pub fn beyond_device(plan: &Plan, program: &Program) -> Option<String> {
    let cluster = &plan.cluster;
    cluster.software.as_ref().filter(|s| s.memory.is_some())?;
    let uses = program.roles.iter().enumerate();
    let uses = uses.map(|(i, role)| (i, memory_use(program, role, cluster).total()));
    let (mesh, most) = uses.max_by_key(|(_, bytes)| bytes.0)?;
    let has = cluster.device.memory_bytes;
    (most.0 > has.0).then(|| {
        let virtual_stages = plan.schedule.virtual_stages();
        format!(
            "the program fits, but by the cluster's `software.memory` a rank's process of stage {} holds {most}, {} more than a {} has; more sharding, recompute=full or a smaller microbatch (--pin) take less",
            super::plan::stages_of_mesh(mesh, program.roles.len(), virtual_stages),
            Bytes(most.0 - has.0),
            cluster.device.name
        )
    })
}
