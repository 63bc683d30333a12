//! Bytes of a role by lifetime, from its buffers as they lie in the arena.

use ir::cluster::Cluster;
use ir::program::{Buffer, BufferClass, InstrKind, RoleProgram, Space};
use ir::{BufferId, Bytes, DType};

/// Bytes of device memory on every rank of a role.
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
/// ([`Buffer::stride`]), copies that several buffers take by turns once.
pub fn memory_of(role: &RoleProgram) -> RoleMemory {
    let mut memory = RoleMemory {
        arena: Bytes(role.arena_bytes),
        ..RoleMemory::default()
    };
    let mut transient = Vec::new();
    for buffer in role.rows().filter(|b| b.space == Space::Device) {
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

/// The memory of every rank of a role at its peak: the arena, what the device reserves and, where
/// ranks are threads, the copies that the runtime makes.
pub fn peak_bytes(role: &RoleProgram, cluster: &Cluster) -> Bytes {
    let scratch = match cluster.pool.is_some() {
        true => scratch_bytes(role),
        false => Bytes(0),
    };
    let seen = cluster.seen_by(role.mesh.devices);
    Bytes(role.arena_bytes) + scratch + seen.device.memory_reserved_bytes
}

/// The most bytes that one instruction copies outside the arena on the CPU: both sides of a
/// message, f32 forms of half-precision operands and results, operands that results are written over.
pub fn scratch_bytes(role: &RoleProgram) -> Bytes {
    let instructions = role.templates.iter().flat_map(|t| &t.instructions);
    Bytes(
        instructions
            .map(|i| instruction_scratch(role, &i.kind))
            .max()
            .unwrap_or(0),
    )
}

fn instruction_scratch(role: &RoleProgram, kind: &InstrKind) -> u64 {
    let bytes = |ids: &mut dyn Iterator<Item = BufferId>| -> u64 {
        ids.filter_map(|b| role.buffers.get(b.index()))
            .map(|b| b.bytes)
            .fold(0, u64::saturating_add)
    };
    match kind {
        InstrKind::Collective { items, .. } => {
            2u64.saturating_mul(bytes(&mut items.iter().map(|i| i.input)))
        }
        InstrKind::Slice { input, .. } => 2u64.saturating_mul(bytes(&mut std::iter::once(*input))),
        InstrKind::Exchange { sends, recvs } => bytes(&mut sends.iter().chain(recvs).map(|s| s.1)),
        InstrKind::Compute {
            kind,
            inputs,
            outputs,
            ..
        } => {
            let is_half = |b: &BufferId| {
                role.buffers
                    .get(b.index())
                    .is_some_and(|b| matches!(b.dtype, DType::Bf16 | DType::F16))
            };
            // An operand that the result is written over, unless its place is where the kernel finds it.
            let is_copied = |b: &BufferId| kind.in_place().is_empty() && inputs.contains(b);
            let copied = bytes(&mut outputs.iter().copied().filter(is_copied));
            let widened = bytes(&mut inputs.iter().chain(outputs).copied().filter(is_half));
            2u64.saturating_mul(widened).saturating_add(copied)
        }
        InstrKind::WorldSum { .. }
        | InstrKind::Load { .. }
        | InstrKind::Fill { .. }
        | InstrKind::Copy { .. } => 0,
    }
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
        let at = |class, offset, elements: u64| Buffer {
            offset,
            bytes: 4 * elements,
            ..buffer("b", class, &[elements])
        };
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
        assert_eq!(
            m.persistent + m.step + m.activation + m.transient,
            Bytes(3584 - 256)
        );
    }
    #[test]
    fn cpu_ranks_copy_messages_and_widen_halves() {
        let program = crate::testing::pipeline(&[10], &[10], 1, 100, 1);
        let mut r = program.roles[0].clone();
        r.arena_bytes = 10_000;
        // Relu over its operand, seven numbers of f32, copies that; on bf16 there is an f32 form of
        // operand and result, too.
        assert_eq!(scratch_bytes(&r), 28);
        (r.buffers[5].dtype, r.buffers[5].bytes) = (DType::Bf16, 200);
        assert_eq!(scratch_bytes(&r), 200 + 2 * (200 + 200));
        let mut c = crate::testing::cluster(1);
        assert_eq!(peak_bytes(&r, &c), 10_000 + 1000);
        c.pool = Some(ir::cluster::Pool {
            devices: 1,
            compute_devices: 1.0,
            memory_bytes: Bytes(1),
        });
        assert_eq!(peak_bytes(&r, &c), 10_000 + 1000 + 1000);
        // Its device is that of the group that it lies in.
        let mut last = crate::testing::cluster(1);
        last.device.memory_reserved_bytes = Bytes(3000);
        let c = crate::testing::cluster(1).beside(last);
        r.mesh.devices.first_rank.0 = 1;
        assert_eq!(peak_bytes(&r, &c), 10_000 + 3000);
        // A pipeline of two: the exchange of 400 B in one direction at a time.
        let two = crate::testing::pipeline(&[10, 10], &[10, 10], 1, 100, 1);
        assert_eq!(scratch_bytes(&two.roles[0]), 400);
    }
}
