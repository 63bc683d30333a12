//! The composition of a role's arena.

use ir::Bytes;
use ir::program::{BufferClass, RoleProgram, Space};

/// Bytes of a role's arena in device memory on every rank, by class, alignment included. The first four sum
/// to `arena`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RoleMemory {
    /// Parameters and optimizer states.
    pub persistent: Bytes,
    /// Prepared parameters, accumulators, and what else lives for a step.
    pub step: Bytes,
    /// Saved activations and boundary tensors, all copies.
    pub activation: Bytes,
    /// The region that the transient buffers of all templates share.
    pub transient: Bytes,
    /// The whole arena.
    pub arena: Bytes,
}

/// Adds up a role's buffers; copies that several take by turns count once.
pub fn memory_report(role: &RoleProgram) -> RoleMemory {
    let mut m = RoleMemory {
        arena: Bytes(role.arena_bytes),
        ..RoleMemory::default()
    };
    for b in role.rows().filter(|b| b.space == Space::Device) {
        let bytes = b.stride() * u64::from(b.slots());
        match b.class {
            BufferClass::Persistent => m.persistent.0 += bytes,
            BufferClass::Step => m.step.0 += bytes,
            BufferClass::PerMicrobatch { .. } => m.activation.0 += bytes,
            BufferClass::Transient => {}
        }
    }
    m.transient.0 = m.arena.0 - m.persistent.0 - m.step.0 - m.activation.0;
    m
}
