//! Clusters of unequal devices: who is where, what a mesh sees, and what a wrong file is told.

#![allow(clippy::unwrap_used)] // A test may stop at what it does not expect.

use cost_model::collectives::{collective_time, send_time};
use cost_model::presets::load;
use ir::cluster::{Cluster, Degraded, Missing};
use ir::collective::CollectiveKind;
use ir::{Axis, AxisId, DType, DeviceMesh, LogicalMesh, Rank, Reduction};

/// Two hosts of H100, then two of A100.
fn mixed() -> Cluster {
    cost_model::presets::find("dgx-h100:2,dgx-a100-40gb:2")
        .unwrap()
        .unwrap()
}

fn ranks(first: u32, n_devices: u32) -> DeviceMesh {
    DeviceMesh {
        first_rank: Rank(first),
        n_devices,
    }
}

/// Seconds to all-reduce 64 MiB over consecutive ranks.
fn sum(cluster: &Cluster, first: u32, n: u32) -> f64 {
    let axis = Axis {
        name: "x".into(),
        size: n,
    };
    let mesh = LogicalMesh::new(ranks(first, n), vec![axis]).unwrap();
    let kind = CollectiveKind::AllReduce(Reduction::Sum);
    let seen = cluster.seen_by(mesh.devices);
    collective_time(&seen, &mesh, &[AxisId(0)], kind, 64 << 20).0
}

fn degraded(host: u32, device: Option<u32>, level: usize) -> Cluster {
    let mut cluster = mixed();
    let level = cluster.levels[level].name.clone();
    cluster.degraded = vec![Degraded {
        host,
        device,
        level,
        share: 0.25,
    }];
    cluster
}

#[test]
fn ranks_skip_missing_devices() {
    let mut cluster = mixed();
    assert_eq!(cluster.problems(), [""; 0]);
    assert_eq!(cluster.n_devices(), 32);
    let groups = |c: &Cluster| [0, 15, 16, 31].map(|r| c.group_of(Rank(r)));
    assert_eq!(groups(&cluster), [0, 0, 1, 1]);
    cluster.missing = vec![
        Missing { host: 1, device: 7 },
        Missing { host: 0, device: 3 },
        Missing { host: 2, device: 0 },
    ];
    assert_eq!(cluster.problems(), [""; 0]);
    assert_eq!(cluster.n_devices(), 29);
    assert_eq!([13, 14].map(|r| cluster.group_of(Rank(r))), [0, 1]);
    assert_ne!(
        cluster.device_of(Rank(13)).name,
        cluster.device_of(Rank(14)).name
    );
    let hosts: Vec<_> = cluster.hosts().collect();
    let expected = [
        (0, ranks(0, 7)),
        (0, ranks(7, 7)),
        (1, ranks(14, 7)),
        (1, ranks(21, 8)),
    ];
    assert_eq!(hosts, expected);
    assert_eq!(
        cluster.by_group(ranks(10, 10)),
        [(0, ranks(10, 4)), (1, ranks(14, 6))]
    );
    // Of the first host one is gone, so that rank 7 is the second host's.
    assert!(cluster.joins(0, 0, 6) && !cluster.joins(0, 6, 7) && cluster.joins(1, 6, 7));
    // Groups are joined by the outermost level alone.
    assert!(!cluster.joins(0, 13, 14) && cluster.joins(1, 13, 14));
    // A host that is gone whole has no ranks.
    cluster.missing = (0..8).map(|device| Missing { host: 1, device }).collect();
    assert_eq!(
        cluster.hosts().map(|h| h.1.n_devices).collect::<Vec<_>>(),
        [8, 8, 8]
    );
}

#[test]
fn a_mesh_in_one_group_costs_what_it_costs_alone() {
    let (cluster, fast, slow) = (
        mixed(),
        load("dgx-h100", 2).unwrap(),
        load("dgx-a100-40gb", 2).unwrap(),
    );
    for (first, n) in [(0, 2), (4, 4), (0, 8), (0, 16)] {
        assert_eq!(sum(&cluster, first, n), sum(&fast, first, n));
        assert_eq!(sum(&cluster, 16 + first, n), sum(&slow, first, n));
    }
    assert_eq!(cluster.seen_by(ranks(0, 16)).device, fast.device);
    assert_eq!(cluster.seen_by(ranks(16, 16)).device, slow.device);
    // Beside hosts of one device too, which have no links inside.
    let ones = "h100-sxm*1+nvlink4+infiniband-ndr:2,dgx-a100-40gb:2";
    let ones = cost_model::presets::find(ones).unwrap().unwrap();
    for (first, n) in [(0, 8), (0, 16)] {
        assert_eq!(sum(&ones, 2 + first, n), sum(&slow, first, n));
    }
    assert_eq!(
        send_time(&cluster, 16, 17, 1 << 20),
        send_time(&slow, 0, 1, 1 << 20)
    );
    assert_eq!(
        send_time(&cluster, 3, 12, 1 << 20),
        send_time(&fast, 3, 12, 1 << 20)
    );
}

#[test]
fn a_mesh_across_groups_is_as_slow_and_small_as_its_slowest() {
    let (cluster, slow) = (mixed(), load("dgx-a100-40gb", 2).unwrap());
    let seen = cluster.seen_by(ranks(8, 16));
    assert_eq!(seen.device, slow.device);
    assert_eq!(seen.usable_bytes(), slow.usable_bytes());
    // One host of each: the rings inside and between are those of A100s.
    assert_eq!(sum(&cluster, 8, 16), sum(&slow, 0, 16));
    assert_eq!(
        send_time(&cluster, 8, 16, 1 << 20),
        send_time(&slow, 0, 8, 1 << 20)
    );
    // It sees the same once more.
    assert_eq!(*seen.seen_by(ranks(8, 16)), *seen);
    // A device that is fast at one thing and slow at another is slow at both beside another.
    let mut odd = mixed();
    odd.groups[0].device.vector_flops_per_s = 1e18;
    odd.groups[0].device.launch_s = 1.0;
    let (seen, fast) = (odd.seen_by(ranks(0, 32)), &odd.device);
    assert_eq!(seen.device.vector_flops_per_s, fast.vector_flops_per_s);
    assert_eq!(seen.device.launch_s, 1.0);
    let peak = |n| cost_model::utilisation::peak_flops_per_s(&odd, DType::Bf16, n).unwrap();
    let of = |d: &ir::cluster::Device| d.peak_flops_per_s[&DType::Bf16];
    assert_eq!(peak(20), 16.0 * of(fast) + 4.0 * of(&odd.groups[0].device));
}

#[test]
fn a_degraded_link_slows_what_uses_it_and_nothing_else() {
    let whole = mixed();
    let network = degraded(1, None, 1);
    assert_eq!(network.problems(), [""; 0]);
    for (first, n) in [(0, 8), (8, 8), (16, 16)] {
        assert_eq!(sum(&network, first, n), sum(&whole, first, n));
    }
    assert!(sum(&network, 0, 16) > 2.0 * sum(&whole, 0, 16));
    let send = |c: &Cluster, a, b| send_time(c, a, b, 64 << 20).0;
    assert!(send(&network, 0, 8) > 3.0 * send(&whole, 0, 8));
    assert_eq!(send(&network, 8, 9), send(&whole, 8, 9));
    assert_eq!(send(&network, 0, 16), send(&whole, 0, 16));
    // One device's port inside the first host.
    let port = degraded(0, Some(2), 0);
    assert!(send(&port, 1, 2) > 3.0 * send(&whole, 1, 2));
    assert_eq!(send(&port, 1, 3), send(&whole, 1, 3));
    assert!(sum(&port, 0, 8) > 2.0 * sum(&whole, 0, 8));
    assert_eq!(sum(&port, 4, 4), sum(&whole, 4, 4));
}

#[test]
fn wrong_files_are_told_where() {
    let said = |change: &dyn Fn(&mut Cluster)| {
        let mut cluster = mixed();
        change(&mut cluster);
        cluster.problems().join("; ")
    };
    for (change, expected) in [
        (
            &|c: &mut Cluster| c.groups[0].device.memory_efficiency = 2.0,
            "groups[0].device.memory_efficiency is 2, expected more than 0, at most 1",
        ),
        (
            &|c| c.groups[0].levels[0].latency_s = -1.0,
            "groups[0].levels[0].latency_s is -1, expected 0 to 1e30",
        ),
        (
            &|c| c.groups[0].n_hosts = 0,
            "groups[0].n_hosts x devices_per_host is 0, expected 1 to 1048576",
        ),
        (
            &|c| c.missing = vec![Missing { host: 4, device: 0 }],
            "missing[0].host is 4, expected a host of the 4, from 0",
        ),
        (
            &|c| c.missing = vec![Missing { host: 3, device: 8 }],
            "missing[0].device is 8, expected a device of the 8 of host 3, from 0",
        ),
        (
            &|c| c.missing = vec![Missing { host: 3, device: 1 }; 2],
            "missing[1] is there twice: device 1 of host 3",
        ),
        (
            &|c| *c = degraded(1, Some(9), 0),
            "degraded[0].device is 9, expected a device of the 8 of host 1, from 0",
        ),
    ] as [(&dyn Fn(&mut Cluster), &str); 7]
    {
        assert_eq!(said(change), expected);
    }
    let level = said(&|c| {
        *c = degraded(1, None, 0);
        c.degraded[0].level = "telephone".into();
        c.degraded[0].share = 0.0;
    });
    assert!(
        level.contains("degraded[0].share is 0, expected more than 0, at most 1"),
        "{level}"
    );
    assert!(
        level.contains("degraded[0].level is `telephone`, expected a level of host 1: "),
        "{level}"
    );
    let levels = said(&|c| c.groups[0].levels.truncate(1));
    assert!(
        levels.contains("groups[0].levels has 1 levels, expected 2"),
        "{levels}"
    );
    let gone = said(&|c| {
        let all = (0..4).flat_map(|host| (0..8).map(move |device| Missing { host, device }));
        c.missing = all.collect();
    });
    assert_eq!(gone, "missing leaves no device");
    let ranks = load("cpu-default", 1).unwrap();
    let shared = ranks.beside(load("dgx-h100", 1).unwrap()).problems();
    let shared = shared.join("; ");
    assert!(shared.contains("pool stands beside groups"), "{shared}");
    // Devices that nothing joins, and more than there may be.
    let apart = said(&|c| {
        c.levels.clear();
        c.groups[0].levels.clear();
        (c.n_hosts, c.devices_per_host) = (1, 1);
        (c.groups[0].n_hosts, c.groups[0].devices_per_host) = (1, 1);
    });
    assert_eq!(apart, "levels is empty");
    let many = said(&|c| {
        let group = &mut c.groups[0];
        (group.n_hosts, group.levels[1].devices) = (1 << 16, 1 << 19);
        c.groups.push(c.groups[0].clone());
    });
    assert_eq!(
        many,
        "groups have 1048592 devices with the cluster's own, expected at most 1048576"
    );
    let error = cost_model::presets::find("h100-sxm*8+nvlink4,dgx-a100-40gb").unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("no link joins `h100-sxm*8+nvlink4` to other hosts"),
        "{error}"
    );
    // Hosts of unequal clusters are not to be counted by one number.
    let error = cost_model::presets::with_hosts(mixed(), 3).unwrap_err();
    assert_eq!(error, "its hosts are not all equal");
}

#[test]
fn a_cluster_file_keeps_its_groups() {
    let mut cluster = degraded(3, Some(1), 1);
    let level = cluster.groups[0].levels[1].name.clone();
    cluster.degraded[0].level = level;
    cluster.missing = vec![Missing { host: 0, device: 5 }];
    assert_eq!(cluster.problems(), [""; 0]);
    let text = cost_model::presets::print(&cluster).unwrap();
    assert_eq!(cost_model::presets::parse(&text).unwrap(), cluster);
    assert!(text.contains("[[groups]]") && text.contains("\"groups[0].device.memory_bytes\""));
    // Equal clusters say nothing of groups.
    let equal = cost_model::presets::print(&load("dgx-h100", 2).unwrap()).unwrap();
    assert!(!equal.contains("groups") && !equal.contains("missing") && !equal.contains("degraded"));
}
