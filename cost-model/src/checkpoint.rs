//! The time of a checkpoint of the training state.
//!
//! Every state is kept once: ranks that hold the same part share the work of keeping it. Steps
//! wait while devices copy their share to the memory of their hosts; hosts then write while the
//! next steps run, so that checkpoints cannot follow each other faster than that.
//!
//! ```text
//! copy_s  = max over devices of bytes / device_to_host
//! write_s = max(max over hosts of bytes / host_write, all bytes / total_write)
//! ```
//!
//! With `write_s` for the cost and a mean time between failures, the interval that loses least
//! is `sqrt(2 copy_s MTBF)` (Young 1974), not below `write_s`.

use ir::cluster::Cluster;
use ir::plan::CheckpointPrediction;
use ir::program::{Program, RoleProgram};
use ir::{Bytes, DeviceMesh, Seconds};
use std::collections::BTreeSet;

/// The checkpoint of a program's states. Without figures of storage only its bytes are known.
pub fn checkpoint(program: &Program, cluster: &Cluster) -> CheckpointPrediction {
    let mut seen = BTreeSet::new();
    let kept: Vec<u64> = program.roles.iter().map(|r| kept(r, &mut seen)).collect();
    let all = kept.iter().fold(0u64, |sum, b| sum.saturating_add(*b));
    let of_a_device = |role: usize| {
        let devices = program.roles[role].mesh.n_devices().max(1);
        kept[role] as f64 / f64::from(devices)
    };
    let roles = 0..program.roles.len();
    let seconds = cluster.storage.map(|storage| {
        let most = roles.clone().map(of_a_device).fold(0.0, f64::max);
        let ends = |d: DeviceMesh| {
            let first = d.first_rank.0;
            (first, first.saturating_add(d.n_devices))
        };
        let of_host = |(_, host): (usize, DeviceMesh)| {
            let here = roles.clone().map(|role| {
                let (a, b) = (ends(host), ends(program.roles[role].mesh.devices));
                let both = b.1.min(a.1).saturating_sub(b.0.max(a.0));
                of_a_device(role) * f64::from(both)
            });
            here.sum::<f64>()
        };
        let fullest = cluster.hosts().map(of_host).fold(0.0, f64::max);
        let together = storage
            .total_write_bytes_per_s
            .map_or(0.0, |rate| all as f64 / rate);
        (
            Seconds(most / storage.device_to_host_bytes_per_s),
            Seconds((fullest / storage.host_write_bytes_per_s).max(together)),
        )
    });
    CheckpointPrediction {
        bytes: Bytes(all),
        copy_s: seconds.map(|s| s.0),
        write_s: seconds.map(|s| s.1),
    }
}

/// Bytes of the role's states that no role before it keeps.
fn kept<'a>(role: &'a RoleProgram, seen: &mut BTreeSet<&'a str>) -> u64 {
    let states = role.states.iter().filter(|s| seen.insert(s.path.as_str()));
    states.fold(0, |sum, s| {
        let b = role.buffer(s.buffer);
        let elements = b.lens.iter().fold(1u64, |n, l| n.saturating_mul(*l));
        sum.saturating_add(elements.saturating_mul(b.dtype.bytes()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{buffer, cluster, pipeline};
    use ir::BufferId;
    use ir::program::{BufferClass, StateBuffer};
    use ir::storage::Storage;
    use ir::training::StateRole;

    /// Three stages of two devices. The first holds 1000 and 500 elements of f32, the last 500 of
    /// its own and the first's 500 again.
    fn program() -> Program {
        let mut program = pipeline(&[10; 3], &[10; 3], 4, 64, 2);
        for (role, path, n) in [
            (0, "w", 1000),
            (0, "tied", 500),
            (2, "head", 500),
            (2, "tied", 500),
        ] {
            let r = &mut program.roles[role];
            r.states.push(StateBuffer {
                path: path.into(),
                param: path.into(),
                role: StateRole::Parameter,
                buffer: BufferId::new(r.buffers.len()),
            });
            r.buffers.push(buffer(path, BufferClass::Persistent, &[n]));
        }
        program
    }

    #[test]
    fn every_state_is_kept_once_and_the_fullest_decides() {
        let program = program();
        let mut c = cluster(6);
        (c.n_hosts, c.devices_per_host) = (3, 2);
        let without = checkpoint(&program, &c);
        assert_eq!((without.bytes, without.copy_s), (Bytes(8000), None));
        c.storage = Some(Storage {
            device_to_host_bytes_per_s: 100.0,
            host_write_bytes_per_s: 10.0,
            total_write_bytes_per_s: None,
            host_memory_bytes: None,
            host_file_bytes: None,
        });
        // 6000 B on the first stage: 3000 on a device, 6000 on a host.
        let own = checkpoint(&program, &c);
        assert_eq!(own.copy_s, Some(Seconds(30.0)));
        assert_eq!(own.write_s, Some(Seconds(600.0)));
        if let Some(storage) = &mut c.storage {
            storage.total_write_bytes_per_s = Some(8.0);
        }
        assert_eq!(checkpoint(&program, &c).write_s, Some(Seconds(1000.0)));
    }
}
