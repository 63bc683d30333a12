//! Properties of every cluster: time never falls with size, an all-reduce never takes less
//! than a reduce-scatter or all-gather of the same tensor, and every price is finite.

use super::*;
use ir::cluster::{InSwitch, Protocol, TreeChannel};
use ir::mesh::{Axis, DeviceMesh};
use ir::{Rank, Reduction};

/// A linear congruential generator (Knuth's MMIX constants).
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) % n
    }
    /// Between `low` and `high`, evenly in the logarithm.
    fn between(&mut self, low: f64, high: f64) -> f64 {
        low * (high / low).powf(self.below(1 << 20) as f64 / (1u64 << 20) as f64)
    }
}

fn level(r: &mut Random, devices: u32, with_protocols: bool) -> Level {
    let way = |r: &mut Random, name: &str| Protocol {
        name: name.into(),
        start_s: r.between(1e-9, 1e-3),
        ring_step_s: r.between(1e-9, 1e-3),
        tree_step_s: r.between(1e-9, 1e-3),
        ring_share: r.between(1e-2, 1.0),
        tree_share: r.between(1e-2, 1.0),
        max_bandwidth_bytes_per_s: (r.below(2) == 0).then(|| r.between(1e6, 1e12)),
    };
    let protocols = match with_protocols {
        true => vec![way(r, "a"), way(r, "b"), way(r, "c")],
        false => vec![],
    };
    Level {
        name: format!("l{devices}"),
        devices,
        latency_s: r.between(1e-9, 1e-3),
        bandwidth_bytes_per_s: r.between(1e6, 1e13),
        efficiency: r.between(0.1, 1.0),
        half_bytes: r.between(1.0, 1e8),
        devices_per_port: 1 << r.below(4),
        pair_bandwidth_bytes_per_s: (r.below(3) == 0).then(|| r.between(1e6, 1e12)),
        all_to_all_efficiency: (r.below(2) == 0).then(|| r.between(0.1, 1.0)),
        message_efficiency: (r.below(2) == 0).then(|| r.between(0.1, 1.0)),
        in_switch: (with_protocols && r.below(2) == 0).then(|| InSwitch {
            latency_s: r.between(1e-9, 1e-3),
            efficiency: r.between(0.1, 1.0),
        }),
        tree_channel: (with_protocols && r.below(2) == 0).then(|| TreeChannel {
            two_hosts_bytes_per_s: r.between(1e6, 1e12),
            more_hosts_bytes_per_s: r.between(1e6, 1e12),
        }),
        shared_memory: None,
        protocols,
    }
}

/// A cluster of 64 in one to three levels, and a mesh of two or three axes on it.
fn scene(r: &mut Random) -> (Cluster, LogicalMesh) {
    let mut c = crate::presets::load("dgx-h100", 8).unwrap();
    let protocols = r.below(4) > 0;
    c.levels = match r.below(3) {
        0 => vec![64],
        1 => vec![8, 64],
        _ => vec![4, 16, 64],
    }
    .into_iter()
    .map(|n| level(r, n, protocols))
    .collect();
    for level in c.levels.iter_mut().skip(1) {
        level.tree_channel = None;
    }
    assert_eq!(c.problems(), Vec::<String>::new());
    let sizes = [[2, 8, 4], [4, 4, 2], [1, 3, 8], [8, 8, 1], [1, 1, 2]][r.below(5) as usize];
    let n: u32 = sizes.iter().product();
    let axis = |(i, &size): (usize, &u32)| Axis {
        name: format!("a{i}"),
        size,
    };
    let devices = DeviceMesh {
        first_rank: Rank(r.below(u64::from(64 - n) + 1) as u32),
        n_devices: n,
    };
    let axes = sizes.iter().enumerate().map(axis).collect();
    (c, LogicalMesh::new(devices, axes).unwrap())
}

#[test]
fn time_grows_with_size_and_an_all_reduce_takes_longest() {
    let kinds = [
        CollectiveKind::AllReduce(Reduction::Sum),
        CollectiveKind::ReduceScatter(Reduction::Sum),
        CollectiveKind::AllGather,
        CollectiveKind::AllToAll,
    ];
    let mut r = Random(7);
    for round in 0..2000 {
        let (c, m) = scene(&mut r);
        let axes: Vec<AxisId> = [0, 1, 2]
            .into_iter()
            .filter(|_| r.below(2) == 0)
            .map(AxisId)
            .collect();
        let group = Group::new(&c, &m, &axes);
        let mut sizes: Vec<u64> = (0..12).map(|_| r.between(1.0, 1e12) as u64).collect();
        sizes.extend([0, 1, 1 << 20, (1 << 20) + 1, u64::MAX]);
        sizes.sort_unstable();
        for kind in kinds {
            let times: Vec<f64> = sizes.iter().map(|&s| group.time(kind, s).0).collect();
            assert!(
                times.iter().all(|t| t.is_finite() && *t >= 0.0),
                "round {round}: {times:?}"
            );
            assert!(
                times.windows(2).all(|w| w[0] <= w[1]),
                "round {round} {kind:?}: {times:?}"
            );
            for (&s, &t) in sizes
                .iter()
                .zip(&times)
                .filter(|_| kind != CollectiveKind::AllToAll)
            {
                assert!(t <= group.time(kinds[0], s).0, "round {round} {kind:?} {s}");
            }
        }
        let sends: Vec<f64> = sizes.iter().map(|&s| send_time(&c, 0, 9, s).0).collect();
        assert!(
            sends.windows(2).all(|w| w[0] <= w[1]),
            "round {round}: {sends:?}"
        );
    }
}

#[test]
fn every_preset_prices_every_size() {
    for name in crate::presets::names() {
        let c = crate::presets::load(name, 1).unwrap();
        let n = c.devices_per_host;
        let devices = DeviceMesh {
            first_rank: Rank(0),
            n_devices: n,
        };
        let axis = Axis {
            name: "all".into(),
            size: n,
        };
        let m = LogicalMesh::new(devices, vec![axis]).unwrap();
        let group = Group::new(&c, &m, &[AxisId(0)]);
        for kind in [
            CollectiveKind::AllReduce(Reduction::Sum),
            CollectiveKind::AllGather,
            CollectiveKind::AllToAll,
        ] {
            let times: Vec<f64> = (0..40).map(|e| group.time(kind, 1 << e).0).collect();
            assert!(
                times.windows(2).all(|w| w[0] <= w[1] && w[0] > 0.0),
                "{name} {kind:?}"
            );
        }
    }
}
