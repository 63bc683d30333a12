//! Clusters whose devices and links are not all equal: groups of hosts, devices that are missing,
//! links that have lost a part of their bandwidth.
//!
//! Hosts are numbered group by group, the cluster's own first; devices host by host. Ranks are
//! the devices that are there, in this order: what stands behind a missing device moves up.
//!
//! A mesh **sees** a cluster of equal devices ([`Cluster::seen_by`]): its ranks keep step, so each
//! counts as slow and small as the slowest and smallest of them, and each level's links as slow as
//! the slowest. The outermost level joins all devices, whatever their group; at any other level
//! devices of different groups are not joined.
//!
//! Invariant: in a cluster without groups, missing devices and degraded links everything here is
//! what it would be without this file, to the bit.

use super::{Cluster, Device, Level, MAX_DEVICES};
use crate::{Bytes, DType, DeviceMesh, Rank};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeSet;

/// Equal hosts beside others.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// Number of hosts.
    pub n_hosts: u32,
    /// Devices in each host.
    pub devices_per_host: u32,
    /// The device.
    pub device: Device,
    /// Links from the innermost level out, as many as the cluster's own; the last joins all
    /// devices of all groups, between two groups by the slower of theirs.
    pub levels: Vec<Level>,
}

/// A device that is not there.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(deny_unknown_fields)]
pub struct Missing {
    /// Its host, counted over all groups from 0.
    pub host: u32,
    /// Its number in the host, from 0.
    pub device: u32,
}

/// Links that have lost a part of their bandwidth.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Degraded {
    /// The host, counted over all groups from 0.
    pub host: u32,
    /// The device in it whose port it is; those of all its devices where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<u32>,
    /// Name of the level.
    pub level: String,
    /// Share of the bandwidth that is left.
    pub share: f64,
}

/// A group, the cluster's own or a further one, with the numbers of its first host and device.
#[derive(Clone, Copy)]
struct Hosts<'a> {
    group: usize,
    first_host: u32,
    first_slot: u32,
    n_hosts: u32,
    devices_per_host: u32,
    device: &'a Device,
    levels: &'a [Level],
}

impl Hosts<'_> {
    fn n_slots(&self) -> u32 {
        self.n_hosts.saturating_mul(self.devices_per_host)
    }
    fn end(&self) -> u32 {
        self.first_slot.saturating_add(self.n_slots())
    }
    /// Number of a device of these hosts among all of the cluster, missing or not.
    fn slot(&self, host: u32, device: u32) -> Option<u32> {
        let host = host.checked_sub(self.first_host)?;
        (host < self.n_hosts && device < self.devices_per_host)
            .then(|| {
                host.saturating_mul(self.devices_per_host)
                    .saturating_add(device)
            })
            .map(|within| self.first_slot.saturating_add(within))
    }
}

impl Cluster {
    /// Whether all devices and links are equal.
    pub fn is_equal(&self) -> bool {
        self.groups.is_empty() && self.missing.is_empty() && self.degraded.is_empty()
    }

    /// The cluster with the hosts of another behind its own; of that, only hosts, devices and links.
    pub fn beside(mut self, other: Cluster) -> Cluster {
        let of = |key: &String| ["device", "levels"].iter().any(|k| key.starts_with(k));
        let group = self.groups.len();
        let sources = other.sources.into_iter().filter(|(key, _)| of(key));
        let sources = sources.map(|(key, source)| (format!("groups[{group}].{key}"), source));
        self.sources.extend(sources);
        self.name = format!("{}, {}", self.name, other.name);
        self.groups.push(Group {
            n_hosts: other.n_hosts,
            devices_per_host: other.devices_per_host,
            device: other.device,
            levels: other.levels,
        });
        self
    }

    /// Number of devices, without those that are missing.
    pub fn n_devices(&self) -> u32 {
        let missing = self.missing.len() as u32;
        self.n_slots().saturating_sub(missing)
    }

    fn n_slots(&self) -> u32 {
        self.hosts_by_group()
            .map(|h| h.n_slots())
            .fold(0, u32::saturating_add)
    }

    fn hosts_by_group(&self) -> impl Iterator<Item = Hosts<'_>> {
        let own = (
            self.n_hosts,
            self.devices_per_host,
            &self.device,
            &self.levels,
        );
        let further = self.groups.iter();
        let further = further.map(|g| (g.n_hosts, g.devices_per_host, &g.device, &g.levels));
        let all = std::iter::once(own).chain(further).enumerate();
        all.scan(
            (0u32, 0u32),
            |first, (group, (n_hosts, devices_per_host, device, levels))| {
                let hosts = Hosts {
                    group,
                    first_host: first.0,
                    first_slot: first.1,
                    n_hosts,
                    devices_per_host,
                    device,
                    levels,
                };
                *first = (first.0.saturating_add(n_hosts), hosts.end());
                Some(hosts)
            },
        )
    }

    /// Numbers of the missing devices, ascending.
    fn missing_slots(&self) -> BTreeSet<u32> {
        let slots = self
            .missing
            .iter()
            .filter_map(|m| self.hosts_by_group().find_map(|h| h.slot(m.host, m.device)));
        slots.collect()
    }

    /// Number of the device of a rank among all, the missing ones counted.
    fn slot(&self, rank: u32) -> u32 {
        let missing = match self.missing.is_empty() {
            true => BTreeSet::new(),
            false => self.missing_slots(),
        };
        missing.into_iter().fold(rank, |slot, m| match m <= slot {
            true => slot.saturating_add(1),
            false => slot,
        })
    }

    /// The hosts that a device is among; the last group's for a number beyond all.
    fn hosts_of(&self, slot: u32) -> Hosts<'_> {
        let mut last = None;
        for hosts in self.hosts_by_group() {
            if slot < hosts.end() {
                return hosts;
            }
            last = Some(hosts);
        }
        last.expect("a cluster has hosts of its own")
    }

    /// The group that a rank lies in: 0 is the cluster's own, `i + 1` is `groups[i]`.
    pub fn group_of(&self, rank: Rank) -> usize {
        self.hosts_of(self.slot(rank.0)).group
    }

    /// The device of a rank.
    pub fn device_of(&self, rank: Rank) -> &Device {
        self.hosts_of(self.slot(rank.0)).device
    }

    /// The links where a rank lies, from the innermost level out.
    pub fn levels_at(&self, rank: Rank) -> &[Level] {
        self.hosts_of(self.slot(rank.0)).levels
    }

    /// Devices that a host has where a rank lies, the missing ones counted.
    pub fn devices_per_host_at(&self, rank: Rank) -> u32 {
        self.hosts_of(self.slot(rank.0)).devices_per_host
    }

    /// Most devices that a host has where a mesh lies, the missing ones counted.
    pub fn devices_per_host_of(&self, mesh: DeviceMesh) -> u32 {
        if self.is_equal() {
            return self.devices_per_host;
        }
        let parts = self.by_group(mesh).into_iter();
        let own = parts.map(|(_, part)| self.devices_per_host_at(part.first_rank));
        own.max().unwrap_or(self.devices_per_host)
    }

    /// The ranks of each host that has any, with its group.
    pub fn hosts(&self) -> impl Iterator<Item = (usize, DeviceMesh)> {
        let missing = self.missing_slots();
        let hosts = self.hosts_by_group().flat_map(|h| {
            (h.first_slot..h.end())
                .step_by(h.devices_per_host.max(1) as usize)
                .map(move |first| (h.group, first, h.devices_per_host))
        });
        hosts.filter_map(move |(group, first, n)| {
            let here = missing.range(first..first.saturating_add(n)).count() as u32;
            let before = missing.range(..first).count() as u32;
            let mesh = DeviceMesh {
                first_rank: Rank(first - before),
                n_devices: n - here,
            };
            (here < n).then_some((group, mesh))
        })
    }

    /// The parts of a mesh that lie in one group each.
    pub fn by_group(&self, mesh: DeviceMesh) -> Vec<(usize, DeviceMesh)> {
        let (mut at, end) = (
            mesh.first_rank.0,
            mesh.first_rank.0.saturating_add(mesh.n_devices),
        );
        let missing = self.missing_slots();
        let mut parts = Vec::new();
        for hosts in self.hosts_by_group() {
            // The last group takes ranks that are beyond all.
            let last = hosts.group == self.groups.len();
            let gone = missing.range(..hosts.end()).count() as u32;
            let until = if last {
                end
            } else {
                end.min(hosts.end().saturating_sub(gone))
            };
            if at < until {
                let mesh = DeviceMesh {
                    first_rank: Rank(at),
                    n_devices: until - at,
                };
                parts.push((hosts.group, mesh));
                at = until;
            }
        }
        parts
    }

    /// Whether level `level` joins two ranks.
    pub fn joins(&self, level: usize, a: u32, b: u32) -> bool {
        let block = |slot: u32, devices: u32| slot / devices.max(1);
        if self.is_equal() {
            let devices = self.levels[level].devices;
            return block(a, devices) == block(b, devices);
        }
        let (a, b) = (self.slot(a), self.slot(b));
        let (of_a, of_b) = (self.hosts_of(a), self.hosts_of(b));
        let Some(own) = of_a.levels.get(level) else {
            return false;
        };
        let of = |slot: u32| block(slot - of_a.first_slot, own.devices);
        level + 1 == self.levels.len() || of_a.group == of_b.group && of(a) == of(b)
    }

    /// Number of the port that a rank shares with its neighbours, `users` at each.
    pub fn port(&self, rank: u32, users: u32) -> u32 {
        self.slot(rank) / users.max(1)
    }

    /// The innermost level that joins both ranks: between groups the slower of theirs, where links
    /// are degraded with what is left of its bandwidth.
    pub fn level_between(&self, a: u32, b: u32) -> Option<Cow<'_, Level>> {
        let level = (0..self.levels.len()).find(|&i| self.joins(i, a, b))?;
        if self.is_equal() {
            return Some(Cow::Borrowed(&self.levels[level]));
        }
        let [a, b] = [a, b].map(|rank| self.level_seen(level, self.slot(rank), 1));
        let (a, b) = (a?, b?);
        Some(if rate(&b) < rate(&a) { b } else { a })
    }

    /// A level of the group of device `first`, with what is left of it for this and the next
    /// devices, `n` in all.
    fn level_seen(&self, level: usize, first: u32, n: u32) -> Option<Cow<'_, Level>> {
        let hosts = self.hosts_of(first);
        let own = hosts.levels.get(level)?;
        let ends = first..first.saturating_add(n);
        let here = self.degraded.iter().filter(|d| {
            let device = |device| {
                hosts
                    .slot(d.host, device)
                    .is_some_and(|s| ends.contains(&s))
            };
            d.level == own.name
                && match d.device {
                    Some(one) => device(one),
                    None => (0..hosts.devices_per_host).any(device),
                }
        });
        Some(match here.map(|d| d.share).reduce(f64::min) {
            None => Cow::Borrowed(own),
            Some(share) => {
                let mut left = own.clone();
                left.bandwidth_bytes_per_s *= share;
                left.pair_bandwidth_bytes_per_s = own.pair_bandwidth_bytes_per_s.map(|b| b * share);
                for p in &mut left.protocols {
                    p.max_bandwidth_bytes_per_s = p.max_bandwidth_bytes_per_s.map(|b| b * share);
                }
                Cow::Owned(left)
            }
        })
    }

    /// The cluster as a mesh sees it: every device the slowest and smallest of the mesh, every
    /// level's links the slowest that it has there. Ranks stay where they are.
    pub fn seen_by(&self, mesh: DeviceMesh) -> Cow<'_, Cluster> {
        if self.is_equal() {
            return Cow::Borrowed(self);
        }
        let parts = self.by_group(mesh);
        let first = |part: &(usize, DeviceMesh)| self.slot(part.1.first_rank.0);
        let slots = |part: &(usize, DeviceMesh)| {
            let last = part.1.first_rank.0 + part.1.n_devices - 1;
            (first(part), self.slot(last) + 1 - first(part))
        };
        let devices = parts.iter().map(|p| self.device_of(p.1.first_rank).clone());
        let device = devices
            .reduce(slowest)
            .unwrap_or_else(|| self.device.clone());
        let levels = (0..self.levels.len()).map(|i| {
            let seen = parts.iter().map(slots);
            let seen = seen.filter_map(|(first, n)| self.level_seen(i, first, n));
            let slowest = seen.reduce(|a, b| if rate(&b) < rate(&a) { b } else { a });
            slowest.map_or_else(|| self.levels[i].clone(), Cow::into_owned)
        });
        let levels: Vec<Level> = levels.collect();
        let of = |own: &[Level]| {
            let joined = own.iter().zip(&levels);
            let level = joined.map(|(own, seen)| Level {
                devices: own.devices,
                ..seen.clone()
            });
            level.collect()
        };
        let groups = self.groups.iter().map(|g| Group {
            device: device.clone(),
            levels: of(&g.levels),
            ..g.clone()
        });
        Cow::Owned(Cluster {
            groups: groups.collect(),
            levels: of(&self.levels),
            device,
            degraded: Vec::new(),
            ..self.clone()
        })
    }

    /// Lists the problems of groups, missing devices and degraded links.
    pub(super) fn unequal_problems(&self) -> Vec<String> {
        let mut p = Vec::new();
        if self.is_equal() {
            return p;
        }
        if self.pool.is_some() {
            p.push("pool stands beside groups, missing or degraded: devices that share processors are those of one whole host".into());
        }
        let n = |h: Hosts<'_>| u64::from(h.n_hosts) * u64::from(h.devices_per_host);
        let n = self.hosts_by_group().map(n).fold(0, u64::saturating_add);
        if n > MAX_DEVICES {
            p.push(format!(
                "groups have {n} devices with the cluster's own, expected at most {MAX_DEVICES}"
            ));
        }
        let equal = Cluster {
            pool: None,
            groups: Vec::new(),
            missing: Vec::new(),
            degraded: Vec::new(),
            ..self.clone()
        };
        for (i, group) in self.groups.iter().enumerate() {
            let alone = Cluster {
                n_hosts: group.n_hosts,
                devices_per_host: group.devices_per_host,
                device: group.device.clone(),
                levels: group.levels.clone(),
                ..equal.clone()
            };
            // The rest is said of the cluster as a whole.
            let keys = ["n_hosts", "device", "levels"];
            let own = alone.own_problems().into_iter();
            let own = own.filter(|text| keys.iter().any(|key| text.starts_with(key)));
            p.extend(own.map(|text| format!("groups[{i}].{text}")));
            if group.levels.len() != self.levels.len() {
                p.push(format!(
                    "groups[{i}].levels has {} levels, expected {}, as many as the cluster's own",
                    group.levels.len(),
                    self.levels.len()
                ));
            }
            let both = [&group.levels, &self.levels].map(|l| l.iter().flat_map(|l| &l.protocols));
            let [here, own] = both.map(|p| p.map(|p| p.name.as_str()).collect::<BTreeSet<_>>());
            if here != own {
                p.push(format!(
                    "groups[{i}].levels have protocols {here:?}, expected the cluster's own, {own:?}"
                ));
            }
        }
        let hosts = |host: u32| {
            self.hosts_by_group()
                .find(|h| host < h.first_host.saturating_add(h.n_hosts))
        };
        let place = |key: String, host: u32, device: u32, p: &mut Vec<String>| match hosts(host) {
            None => {
                let n: u64 = self.hosts_by_group().map(|h| u64::from(h.n_hosts)).sum();
                p.push(format!(
                    "{key}.host is {host}, expected a host of the {n}, from 0"
                ));
            }
            Some(h) if device >= h.devices_per_host => p.push(format!(
                "{key}.device is {device}, expected a device of the {} of host {host}, from 0",
                h.devices_per_host
            )),
            Some(_) => {}
        };
        for (i, m) in self.missing.iter().enumerate() {
            place(format!("missing[{i}]"), m.host, m.device, &mut p);
            if self.missing[..i].contains(m) {
                p.push(format!(
                    "missing[{i}] is there twice: device {} of host {}",
                    m.device, m.host
                ));
            }
        }
        if p.is_empty() && self.n_devices() == 0 {
            p.push("missing leaves no device".into());
        }
        for (i, d) in self.degraded.iter().enumerate() {
            place(
                format!("degraded[{i}]"),
                d.host,
                d.device.unwrap_or(0),
                &mut p,
            );
            let levels = hosts(d.host).map_or(&[][..], |h| h.levels);
            if !levels.is_empty() && !levels.iter().any(|l| l.name == d.level) {
                let names: Vec<&str> = levels.iter().map(|l| l.name.as_str()).collect();
                p.push(format!(
                    "degraded[{i}].level is `{}`, expected a level of host {}: {}",
                    d.level,
                    d.host,
                    names.join(", ")
                ));
            }
        }
        p
    }
}

/// Bytes per second of a level for each device at a port.
fn rate(level: &Level) -> f64 {
    level.bandwidth_bytes_per_s * level.efficiency / f64::from(level.devices_per_port.max(1))
}

/// A device that does nothing faster, and has no more memory, than either. Matrix products are
/// those of the one that is slower at the fastest type that both have.
fn slowest(a: Device, b: Device) -> Device {
    let matmul = |d: &Device, t: &DType| {
        let sustained = d.sustained_share_of.get(t).unwrap_or(&d.sustained_share);
        Some(d.peak_flops_per_s.get(t)? * d.matmul_efficiency.get(t)? * sustained)
    };
    let both = a
        .peak_flops_per_s
        .keys()
        .filter_map(|t| Some((matmul(&a, t)?, matmul(&b, t)?)));
    let fastest = both.fold((0.0f64, 0.0f64), |x, y| (x.0.max(y.0), x.1.max(y.1)));
    let (slow, other) = if fastest.1 < fastest.0 {
        (b, a)
    } else {
        (a, b)
    };
    let moved = |d: &Device| d.memory_bandwidth_bytes_per_s * d.memory_efficiency;
    let free = |d: &Device| d.memory_bytes.0.saturating_sub(d.memory_reserved_bytes.0);
    let memory = if moved(&other) < moved(&slow) {
        &other
    } else {
        &slow
    };
    let reserved = slow.memory_reserved_bytes;
    Device {
        vector_flops_per_s: slow.vector_flops_per_s.min(other.vector_flops_per_s),
        memory_bandwidth_bytes_per_s: memory.memory_bandwidth_bytes_per_s,
        memory_efficiency: memory.memory_efficiency,
        memory_bytes: Bytes(free(&slow).min(free(&other)).saturating_add(reserved.0)),
        launch_s: slow.launch_s.max(other.launch_s),
        ..slow
    }
}
