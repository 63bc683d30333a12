//! Prices by hand, of made-up links and of the catalogue's.

use super::*;
use ir::cluster::{InSwitch, Protocol, TreeChannel};
use ir::mesh::{Axis, DeviceMesh};
use ir::{DType, Rank, Reduction};

const GB: f64 = 1e9;
const SUM: CollectiveKind = CollectiveKind::AllReduce(Reduction::Sum);
const SCATTER: CollectiveKind = CollectiveKind::ReduceScatter(Reduction::Sum);

/// Hosts of 8 with 100 GB/s and 1 us inside, 10 GB/s and 10 us between, half sizes zero.
fn cluster(n_hosts: u32) -> Cluster {
    let mut c = crate::presets::load("dgx-a100-80gb", n_hosts).unwrap();
    for (level, latency, bandwidth) in [(0, 1e-6, 100.0 * GB), (1, 10e-6, 10.0 * GB)] {
        c.levels[level] = Level {
            name: c.levels[level].name.clone(),
            devices: c.levels[level].devices,
            latency_s: latency,
            bandwidth_bytes_per_s: bandwidth,
            ..Level::default()
        };
    }
    c
}

fn mesh(first: u32, sizes: &[u32]) -> LogicalMesh {
    let axes: Vec<Axis> = sizes
        .iter()
        .enumerate()
        .map(|(i, &size)| Axis {
            name: format!("a{i}"),
            size,
        })
        .collect();
    LogicalMesh::new(
        DeviceMesh {
            first_rank: Rank(first),
            n_devices: sizes.iter().product(),
        },
        axes,
    )
    .unwrap()
}

fn time(c: &Cluster, m: &LogicalMesh, axes: &[u32], kind: CollectiveKind, bytes: u64) -> f64 {
    let axes: Vec<AxisId> = axes.iter().map(|&a| AxisId(a)).collect();
    collective_time(c, m, &axes, kind, bytes).0
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-12 * b.abs()
}

#[test]
fn reducing_in_f32_converts_and_moving_does_not() {
    let mut c = cluster(1);
    c.device.conversion_s_per_element.insert(DType::Bf16, 1e-9);
    let m = mesh(0, &[8]);
    let group = Group::new(&c, &m, &[AxisId(0)]);
    let time = |kind, dtype| group.conversions(&c, kind, dtype, 16_000).0;
    // 8000 elements: a rank reduces 1000 of them, from 8 pieces into 1.
    assert!(close(time(SUM, DType::Bf16), 9.0 * 1000.0 * 1e-9));
    assert!(close(time(SCATTER, DType::Bf16), 9.0 * 1000.0 * 1e-9));
    assert_eq!(time(CollectiveKind::AllGather, DType::Bf16), 0.0);
    assert_eq!(time(SUM, DType::F32), 0.0);
    let alone = Group::new(&c, &m, &[]);
    assert_eq!(alone.conversions(&c, SUM, DType::Bf16, 16_000).0, 0.0);
}

#[test]
fn a_ring_of_eight_inside_a_host() {
    let (c, m) = (cluster(1), mesh(0, &[8]));
    let s = 800_000_000;
    // Every rank sends 2 * 7/8 of 800 MB at 100 GB/s in 14 steps of 1 us.
    assert!(close(
        time(&c, &m, &[0], SUM, s),
        14.0 * 1e-6 + 2.0 * 7.0 / 8.0 * 0.8 * GB / (100.0 * GB)
    ));
    let half = 7.0 * 1e-6 + 7.0 / 8.0 * 0.8 * GB / (100.0 * GB);
    assert!(close(time(&c, &m, &[0], SCATTER, s), half));
    assert!(close(
        time(&c, &m, &[0], CollectiveKind::AllGather, s),
        half
    ));
    // Seven peers get an eighth each.
    assert!(close(time(&c, &m, &[0], CollectiveKind::AllToAll, s), half));
    assert_eq!(time(&c, &mesh(0, &[1]), &[0], SUM, s), 0.0);
}

#[test]
fn a_small_all_reduce_takes_the_tree() {
    let (c, m) = (cluster(1), mesh(0, &[8]));
    // 2 log2(8) steps instead of 14.
    assert!(close(
        time(&c, &m, &[0], SUM, 8),
        6.0 * 1e-6 + 2.0 * 8.0 / (100.0 * GB)
    ));
}

#[test]
fn two_hosts_reduce_inside_first() {
    let (c, m) = (cluster(2), mesh(0, &[2, 8]));
    let s = 800_000_000;
    let inside = 7.0 * 1e-6 + 7.0 / 8.0 * 0.8 * GB / (100.0 * GB);
    // Each rank all-reduces its eighth, 100 MB, with one partner at 10 GB/s.
    let between = 2.0 * (10e-6 + 0.5 * 0.1 * GB / (10.0 * GB));
    assert!(close(
        time(&c, &m, &[0, 1], SUM, s),
        inside + between + inside
    ));
    assert!(close(
        time(&c, &m, &[1, 0], SUM, s),
        inside + between + inside
    ));
    assert!(close(
        time(&c, &m, &[0, 1], CollectiveKind::AllGather, s),
        inside + between / 2.0
    ));
    // Across hosts alone: every rank has its own link, and the whole message to move.
    assert!(close(
        time(&c, &m, &[0], SUM, s),
        2.0 * (10e-6 + 0.5 * 0.8 * GB / (10.0 * GB))
    ));
    // All-to-all of 16: 7/16 stay inside, 8/16 go out.
    let out = 7.0 * 1e-6
        + 0.8 * GB * 7.0 / 16.0 / (100.0 * GB)
        + 8.0 * 10e-6
        + 0.8 * GB * 0.5 / (10.0 * GB);
    assert!(close(
        time(&c, &m, &[0, 1], CollectiveKind::AllToAll, s),
        out
    ));
}

#[test]
fn where_the_mesh_lies_decides_the_links() {
    let c = cluster(2);
    // Four ranks around the border of the hosts: two on either side.
    let straddling = time(&c, &mesh(6, &[4]), &[0], SUM, 1 << 20);
    assert!(straddling > time(&c, &mesh(0, &[4]), &[0], SUM, 1 << 20));
    // Axis 0 of [2, 4] in one host has stride 4: still inside.
    assert!(close(
        time(&c, &mesh(0, &[2, 4]), &[0], SUM, 1 << 20),
        time(&c, &mesh(0, &[2]), &[0], SUM, 1 << 20)
    ));
}

#[test]
fn half_sizes_halve_the_bandwidth() {
    let mut c = cluster(1);
    c.levels[0].half_bytes = 1e6;
    let m = mesh(0, &[2]);
    // Half of 1 MB is sent, at half of 100 GB/s.
    assert!(close(
        time(&c, &m, &[0], CollectiveKind::AllGather, 1_000_000),
        1e-6 + 0.5e6 / (50.0 * GB)
    ));
    assert!(close(
        send_time(&c, 0, 1, 1_000_000).0,
        1e-6 + 1e6 / (50.0 * GB)
    ));
    assert_eq!(send_time(&c, 1, 1, 1_000_000).0, 0.0);
}

#[test]
fn more_bytes_take_longer_and_an_all_reduce_takes_longest() {
    for name in ["dgx-a100-80gb", "dgx-h100"] {
        let c = crate::presets::load(name, 8).unwrap();
        for (sizes, axes) in [
            (vec![8], vec![0]),
            (vec![2, 8], vec![0, 1]),
            (vec![8, 8], vec![0]),
            (vec![8, 8], vec![0, 1]),
            (vec![8, 2, 4], vec![0, 2]),
        ] {
            let m = mesh(0, &sizes);
            for kind in [
                SUM,
                SCATTER,
                CollectiveKind::AllGather,
                CollectiveKind::AllToAll,
            ] {
                let times: Vec<f64> = (0..36).map(|e| time(&c, &m, &axes, kind, 1 << e)).collect();
                assert!(
                    times.windows(2).all(|w| w[0] <= w[1]),
                    "{name} {sizes:?} {axes:?} {kind:?}"
                );
                for (e, &t) in times
                    .iter()
                    .enumerate()
                    .filter(|_| kind != CollectiveKind::AllToAll)
                {
                    assert!(t <= time(&c, &m, &axes, SUM, 1 << e));
                }
            }
        }
    }
}

/// Hosts of 8: 100 GB/s inside, one card of 10 GB/s for each device, and two protocols, the
/// quick one at half the bandwidth and at most 20 GB/s between hosts.
fn with_protocols(n_hosts: u32) -> Cluster {
    let mut c = cluster(n_hosts);
    for (level, scale) in [(0, 1.0), (1, 10.0)] {
        let way = |name: &str, step: f64, share: f64| Protocol {
            name: name.into(),
            start_s: 20.0 * step,
            ring_step_s: step * scale,
            tree_step_s: 2.0 * step * scale,
            ring_share: share,
            tree_share: 0.9 * share,
            max_bandwidth_bytes_per_s: (share < 1.0 && level == 1).then_some(20.0 * GB),
        };
        c.levels[level].protocols = vec![way("quick", 1e-6, 0.5), way("long", 3e-6, 1.0)];
    }
    c
}

#[test]
fn protocols_take_the_faster_of_quick_and_long() {
    let (c, m) = (with_protocols(1), mesh(0, &[8]));
    // 14 steps of 1 us after a start of 20 us, at half of 100 GB/s; the tree's chain takes
    // 14 steps of 2 us.
    assert!(close(
        time(&c, &m, &[0], SUM, 1000),
        20e-6 + 14.0 * 1e-6 + 1.75 * 1000.0 / (50.0 * GB)
    ));
    let s = 8_000_000_000;
    assert!(close(
        time(&c, &m, &[0], SUM, s),
        60e-6 + 14.0 * 3e-6 + 1.75 * 8.0 * GB / (100.0 * GB)
    ));
    assert!(close(
        time(&c, &m, &[0], SCATTER, s),
        60e-6 + 7.0 * 3e-6 + 0.875 * 8.0 * GB / (100.0 * GB)
    ));
}

#[test]
fn messages_may_reach_more_of_a_link_than_rings() {
    let mut c = with_protocols(2);
    let m = mesh(0, &[2, 8]);
    c.levels[1].efficiency = 0.2;
    let (send, ring) = (
        send_time(&c, 0, 8, 1_000_000_000),
        time(&c, &m, &[0], SUM, 1 << 30),
    );
    c.levels[1].message_efficiency = Some(0.8);
    let latency = c.levels[1].latency_s;
    let faster = send_time(&c, 0, 8, 1_000_000_000);
    assert!(close((send.0 - latency) / (faster.0 - latency), 4.0));
    assert_eq!(time(&c, &m, &[0], SUM, 1 << 30), ring);
}

#[test]
fn a_tree_over_hosts_moves_what_its_channels_can() {
    let (mut c, m) = (with_protocols(2), mesh(0, &[2, 8]));
    c.levels[0].bandwidth_bytes_per_s = 1000.0 * GB;
    let s = 8_000_000_000;
    let fixed = 60e-6 + 2.0 * (7.0 * 6e-6 + 60e-6);
    // Each of two hosts sends once over 8 cards of 10 GB/s, at 0.9.
    let free = fixed + 8.0 / (0.9 * 80.0);
    assert!(close(time(&c, &m, &[0, 1], SUM, s), free));
    let channel = |rate: f64| {
        Some(TreeChannel {
            two_hosts_bytes_per_s: rate,
            more_hosts_bytes_per_s: 0.5 * rate,
        })
    };
    c.levels[0].tree_channel = channel(16.0 * GB);
    // Eight channels of 16 GB/s, each byte up and down.
    let limited = fixed + 2.0 * 8.0 / 128.0;
    assert!(close(time(&c, &m, &[0, 1], SUM, s), limited));
    // Slower than the ring, 30/16 of the bytes at 80 GB/s and 28 + 2 steps, which counts then.
    c.levels[0].tree_channel = channel(10.0 * GB);
    let ring = 60e-6 + 28.0 * 3e-6 + 2.0 * 30e-6 + 30.0 / 16.0 * 8.0 / 80.0;
    assert!(close(time(&c, &m, &[0, 1], SUM, s), ring));
    // Two hosts on each of two leaves are four, of eight channels each.
    let (mut far, of_four) = (with_protocols(4), mesh(0, &[4, 8]));
    far.levels[0].bandwidth_bytes_per_s = 1000.0 * GB;
    let spine = far.levels[1].clone();
    far.levels[1].devices = 16;
    far.levels.push(spine);
    far.levels[0].tree_channel = channel(2.0 * GB);
    let group = Group::new(&far, &of_four, &[AxisId(0), AxisId(1)]);
    let candidates = group.candidates(SUM);
    let trees = candidates.iter().filter(|c| c.algorithm == Algorithm::Tree);
    assert!(trees.clone().count() == 2);
    assert!(
        trees
            .into_iter()
            .all(|t| close(t.s_per_byte, 2.0 / (8.0 * GB)))
    );
    // A group with one member in a host has its port.
    c.levels[0].tree_channel = channel(GB);
    let alone = time(&c, &m, &[0], SUM, s);
    c.levels[0].tree_channel = None;
    assert_eq!(alone, time(&c, &m, &[0], SUM, s));
}

#[test]
fn a_ring_over_hosts_turns_at_the_pace_of_all_cards() {
    let (c, m) = (with_protocols(4), mesh(0, &[4, 8]));
    let s = 8_000_000_000;
    // 32 ranks: of 62 steps 6 cross hosts at ten times the price; eight cards of 10 GB/s are
    // slower than 100 GB/s inside.
    assert!(close(
        time(&c, &m, &[0, 1], SUM, s),
        60e-6 + 56.0 * 3e-6 + 6.0 * 30e-6 + 62.0 / 32.0 * 8.0 * GB / (80.0 * GB)
    ));
    // Small: two trees over four hosts, a chain of eight inside; at most 20 GB/s up and down.
    assert!(close(
        time(&c, &m, &[0, 1], SUM, 100),
        20e-6 + 14.0 * 2e-6 + 4.0 * 20e-6 + 2.0 * 100.0 / (20.0 * GB)
    ));
    // All-to-all: 24 of 32 peers lie across.
    assert!(close(
        time(&c, &m, &[0, 1], CollectiveKind::AllToAll, s),
        60e-6 + 7.0 * 3e-6 + 24.0 * 30e-6 + 0.75 * 8.0 * GB / (10.0 * GB)
    ));
}

#[test]
fn a_switch_that_adds_up_moves_the_operand_once() {
    let (mut c, m) = (with_protocols(1), mesh(0, &[8]));
    let s = 8_000_000_000;
    c.levels[0].in_switch = Some(InSwitch {
        latency_s: 100e-6,
        efficiency: 0.75,
    });
    assert!(close(
        time(&c, &m, &[0], SUM, s),
        100e-6 + 9.0 / 8.0 * 8.0 * GB / (75.0 * GB)
    ));
    // Scattering stays on the ring.
    assert!(close(
        time(&c, &m, &[0], SCATTER, s),
        60e-6 + 7.0 * 3e-6 + 0.875 * 8.0 * GB / (100.0 * GB)
    ));
    // Two: the ring moves less.
    assert!(time(&c, &mesh(0, &[2]), &[0], SUM, s) < 1.5 * 8.0 / 75.0);
}

#[test]
fn devices_that_share_a_card_share_its_bandwidth() {
    let (mut shared, m) = (with_protocols(2), mesh(0, &[2, 8]));
    let alone = shared.clone();
    shared.levels[1].devices_per_port = 4;
    let s = 8_000_000_000;
    let slope = |c: &Cluster, m: &LogicalMesh, axes: &[u32]| {
        let at = |bytes| time(c, m, axes, SUM, bytes);
        (at(2 * s) - at(s)) / (8.0 * GB)
    };
    // Groups across hosts, one for each device: four at a time through a card.
    assert!(close(
        slope(&shared, &m, &[0]),
        4.0 * slope(&alone, &m, &[0])
    ));
    // One device in each host has its card to itself.
    let thin = mesh(7, &[2]);
    assert!(close(slope(&alone, &thin, &[0]), 1.0 / (10.0 * GB)));
    assert!(close(slope(&shared, &thin, &[0]), 2.0 / (10.0 * GB)));
}

#[test]
fn wires_between_pairs_bound_small_groups() {
    let mut c = with_protocols(1);
    c.levels[0].pair_bandwidth_bytes_per_s = Some(20.0 * GB);
    let rate = |n: u32| {
        let at = |bytes| time(&c, &mesh(0, &[n]), &[0], CollectiveKind::AllGather, bytes);
        let s = 8_000_000_000;
        (f64::from(n) - 1.0) / f64::from(n) * 8.0 * GB / (at(2 * s) - at(s))
    };
    assert!((rate(2) / (20.0 * GB) - 1.0).abs() < 1e-9);
    assert!((rate(4) / (60.0 * GB) - 1.0).abs() < 1e-9);
    assert!((rate(8) / (100.0 * GB) - 1.0).abs() < 1e-9);
    assert!(close(
        send_time(&c, 0, 1, 1_000_000).0,
        1e-6 + 1e6 / (20.0 * GB)
    ));
}

#[test]
fn a_broadcast_passes_all_bytes_once() {
    let (c, m) = (with_protocols(1), mesh(0, &[8]));
    let group = Group::new(&c, &m, &[AxisId(0)]);
    assert!(close(
        group.broadcast_time(8_000_000_000).0,
        60e-6 + 7.0 * 3e-6 + 8.0 * GB / (100.0 * GB)
    ));
    let plain = cluster(1);
    let group = Group::new(&plain, &m, &[AxisId(0)]);
    assert!(close(group.broadcast_time(8_000_000_000).0, 7e-6 + 0.08));
    let one = mesh(0, &[1]);
    assert_eq!(Group::new(&c, &one, &[AxisId(0)]).broadcast_time(8).0, 0.0);
}

#[test]
fn the_worked_example_of_the_documents() {
    let c = crate::presets::load("dgx-a100-80gb", 2).unwrap();
    let s = 2048 * 12288 * 2;
    let (one, two) = (mesh(0, &[8]), mesh(0, &[2, 8]));
    let ms = |m: &LogicalMesh, axes: &[u32], kind, bytes| 1e3 * time(&c, m, axes, kind, bytes);
    let near = |found: f64, written: f64| {
        assert!((found - written).abs() < 6e-4, "{found}, written {written}");
    };
    near(ms(&one, &[0], CollectiveKind::AllGather, s), 0.265);
    near(ms(&one, &[0], SUM, s), 0.486);
    near(ms(&one, &[0], CollectiveKind::AllToAll, s), 0.282);
    near(ms(&two, &[0, 1], SCATTER, s), 0.359);
    near(ms(&two, &[0, 1], SUM, s), 0.647);
    near(ms(&two, &[0, 1], CollectiveKind::AllToAll, s), 1.628);
    near(ms(&one, &[0], SUM, 4096), 0.045);
    near(ms(&two, &[0], SUM, s), 2.287);
    near(1e3 * send_time(&c, 0, 1, s).0, 0.248);
    near(1e3 * send_time(&c, 0, 8, s).0, 2.275);
}

#[test]
fn tokens_cross_to_a_host_once() {
    let c = crate::presets::load("dgx-h100", 2).unwrap();
    let (one, two) = (mesh(0, &[8]), mesh(0, &[2, 8]));
    let bytes = 134_217_728;
    let group = Group::new(&c, &two, &[AxisId(0), AxisId(1)]);
    let plain = group.time(CollectiveKind::AllToAll, bytes).0;
    // Four of eight copies cross to the other host, or the token crosses once. The starts
    // are the same.
    let once = group.dispatch_time(bytes, 8).0;
    assert!(plain / once > 3.1 && plain / once < 4.0, "{}", plain / once);
    // A token of one copy gains nothing, and inside a host there is nothing to gain.
    let of_one = group.dispatch_time(bytes, 1).0;
    assert!((of_one / plain - 1.0).abs() < 1e-9);
    let inside = Group::new(&c, &one, &[AxisId(0)]);
    assert_eq!(
        inside.dispatch_time(bytes, 8),
        inside.time(CollectiveKind::AllToAll, bytes)
    );
}
