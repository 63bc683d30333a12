//! Bytes of a role by lifetime, from its buffers as they lie in the arena.

use ir::Bytes;
use ir::cluster::Cluster;
use ir::program::{Buffer, BufferClass, RoleProgram};

/// Bytes on every rank of a role.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoleMemory {
    /// Parameters and optimizer states.
    pub persistent: Bytes,
    /// Prepared parameters, accumulators.
    pub step: Bytes,
    /// Saved activations and boundary tensors, all copies.
    pub activation: Bytes,
    /// Bytes that transient buffers occupy; where they share bytes, those count once.
    pub transient: Bytes,
    /// The arena.
    pub arena: Bytes,
}

/// Memory of a role by class. Every copy of a buffer counts with the distance to the next one
/// ([`Buffer::stride`]).
pub fn memory_of(role: &RoleProgram) -> RoleMemory {
    let mut memory = RoleMemory { arena: Bytes(role.arena_bytes), ..RoleMemory::default() };
    let mut transient = Vec::new();
    for buffer in &role.buffers {
        let all = Bytes(buffer.stride().saturating_mul(u64::from(buffer.slots())));
        match buffer.class {
            BufferClass::Persistent => memory.persistent += all,
            BufferClass::Step => memory.step += all,
            BufferClass::PerMicrobatch { .. } => memory.activation += all,
            BufferClass::Transient => transient.push(extent(buffer)),
        }
    }
    memory.transient = Bytes(union_length(transient));
    memory
}

/// Peak bytes on every rank: the arena and what the cluster reserves.
pub fn peak_bytes(role: &RoleProgram, cluster: &Cluster) -> Bytes {
    Bytes(role.arena_bytes.saturating_add(cluster.device.memory_reserved_bytes.0))
}

fn extent(buffer: &Buffer) -> (u64, u64) {
    (buffer.offset, buffer.offset.saturating_add(buffer.stride()))
}

/// Length of a union of intervals.
fn union_length(mut intervals: Vec<(u64, u64)>) -> u64 {
    intervals.sort_unstable();
    let (mut total, mut reached) = (0, 0);
    for (start, end) in intervals {
        let start = start.max(reached);
        if end > start {
            total += end - start;
            reached = end;
        }
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{buffer, role};

    #[test]
    fn classes_add_up_and_shared_bytes_count_once() {
        let at = |class, offset, elements: u64| Buffer { offset, bytes: 4 * elements, ..buffer("b", class, &[elements]) };
        let mut r = role(0, 0, 1);
        r.buffers = vec![
            at(BufferClass::Persistent, 0, 100),
            at(BufferClass::Step, 512, 64),
            at(BufferClass::PerMicrobatch { slots: 3 }, 768, 65),
            at(BufferClass::Transient, 2304, 128),
            at(BufferClass::Transient, 2560, 128),
            at(BufferClass::Transient, 3328, 1),
        ];
        r.arena_bytes = 3584;
        let m = memory_of(&r);
        // 400 B is 2 x 256 B.
        assert_eq!(m.persistent, 512);
        assert_eq!(m.step, 256);
        // 260 B is 512 B, three copies.
        assert_eq!(m.activation, 3 * 512);
        // 2304..2816 and 2560..3072 share 256 B; 3328..3584.
        assert_eq!(m.transient, 768 + 256);
        assert_eq!(m.arena, 3584);
        // Everything but the hole 3072..3328.
        assert_eq!(m.persistent + m.step + m.activation + m.transient, Bytes(3584 - 256));
    }
}
