//! The cluster as data: devices, links, and where each figure comes from. Physics that turns
//! these into seconds lives in `cost-model`.
//!
//! Every key carries its unit; `sources` says for each key path where the figure comes from.
//! A cluster is `n_hosts` equal hosts of `devices_per_host` equal devices, ranks numbered
//! host-major, joined by levels of links from the innermost out. Further groups of hosts, missing
//! devices and degraded links make it [`unequal`].

use crate::collective::Order;
use crate::program::Space;
use crate::storage::Storage;
use crate::{Bytes, DType, DeviceMesh};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

mod figures;
mod unequal;
pub use unequal::{Degraded, Group, Missing};

/// Version of the cluster format.
pub const CLUSTER_VERSION: u32 = 1;
/// Most devices that a cluster may have.
pub const MAX_DEVICES: u64 = 1 << 20;
/// Largest figure in a cluster; the smallest that may not be zero is its inverse. Whatever is
/// computed from figures in this range is finite.
pub const MAX_FIGURE: f64 = 1e30;
/// A cluster; its own hosts are the first group of [`Cluster::groups`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// Format version, [`CLUSTER_VERSION`].
    pub version: u32,
    /// Name.
    pub name: String,
    /// Number of hosts.
    pub n_hosts: u32,
    /// Devices in each host.
    pub devices_per_host: u32,
    /// The device.
    pub device: Device,
    /// Links from the innermost level out; the last joins all devices.
    pub levels: Vec<Level>,
    /// Further hosts with other devices or links, numbered behind the cluster's own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<Group>,
    /// Devices that are not there, and have no rank.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<Missing>,
    /// Links that have lost a part of their bandwidth.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub degraded: Vec<Degraded>,
    /// Devices that share processors and memory (CPU ranks of one machine).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<Pool>,
    /// Where checkpoints go, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage: Option<Storage>,
    /// Source of each figure, by key path (`device.memory_bytes`).
    pub sources: BTreeMap<String, String>,
    /// Raw points of a calibration, kept with what was fitted to them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub measured: Vec<MeasuredPoint>,
}

/// A device type.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Product name.
    pub name: String,
    /// Dense peak of each element type, FLOP/s (a multiply-add counts two).
    pub peak_flops_per_s: BTreeMap<DType, f64>,
    /// Best measured matmul rate over the peak, per element type: no prediction exceeds it.
    pub matmul_efficiency: BTreeMap<DType, f64>,
    /// Sizes at which a matmul reaches half of that efficiency because of its m, n or k
    /// alone: efficiency is multiplied by `x / (x + half)` for each.
    pub matmul_half_size: HalfSize,
    /// Rate of the products of fused attention over the best matmul rate; above 1 where kernels
    /// hold a better clock than matmuls do, at most 2.
    pub attention_efficiency: f64,
    /// Arithmetic outside matmuls, FLOP/s.
    pub vector_flops_per_s: f64,
    /// Memory of one device in bytes.
    pub memory_bytes: Bytes,
    /// Bytes of it that are not available to a program (driver, communicator, runtime).
    pub memory_reserved_bytes: Bytes,
    /// Share of what a program may use that plans leave free unless they are told otherwise: a
    /// margin for what the figures of memory do not know.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub memory_headroom: f64,
    /// Memory bandwidth in bytes per second.
    pub memory_bandwidth_bytes_per_s: f64,
    /// Share of the memory bandwidth that streaming kernels reach.
    pub memory_efficiency: f64,
    /// Fixed time of one kernel in seconds.
    pub launch_s: f64,
    /// Seconds to convert one element between this type and f32, for devices whose kernels
    /// compute in f32 and convert what is stored otherwise (CPU ranks). Types that are not
    /// here are computed with as they are.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub conversion_s_per_element: BTreeMap<DType, f64>,
    /// Figures of single kernels; absent where the figures above are all there is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernels: Option<Kernels>,
    /// Multiprocessors, over which the tiles of a matmul are spread; 0 where its rate follows
    /// the half sizes alone.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub multiprocessors: u32,
    /// Share of the rate of a matmul in half precision whose rows do not end on 16 bytes, where
    /// tiles are known: libraries fall back to kernels that load element by element.
    #[serde(default = "whole", skip_serializing_if = "is_whole")]
    pub unaligned_matmul_share: f64,
    /// Share of the best measured rate that long training holds: clocks fall under power.
    #[serde(default = "whole", skip_serializing_if = "is_whole")]
    pub sustained_share: f64,
    /// The same of matmuls in single types, whose products take more or less power.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sustained_share_of: BTreeMap<DType, f64>,
    /// Power at which the device is capped, in watts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_limit_w: Option<f64>,
    /// Clock at which the peaks are stated, in hertz.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boost_clock_hz: Option<f64>,
}

/// Kernels that were measured one by one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Kernels {
    /// Query rows that attention computes at once, with all keys up to the last one that any of
    /// them sees: of `S` rows `(1 + rows / S) / 2` of the scores are computed.
    pub attention_block_rows: u32,
    /// Time of a kernel over what the device's rates say, by [`OpKind::kernel_name`]; 1 for
    /// those that are not here. Of attention it is the factor of what is not matrix products,
    /// whose own is under the name with ` products` behind it.
    ///
    /// [`OpKind::kernel_name`]: crate::OpKind::kernel_name
    pub time_factor: BTreeMap<String, f64>,
}

impl Kernels {
    /// The factor of a name; 1 when it is not there.
    pub fn factor(&self, name: &str) -> f64 {
        self.time_factor.get(name).copied().unwrap_or(1.0)
    }
}

fn is_zero(n: &u32) -> bool {
    *n == 0
}

fn whole() -> f64 {
    1.0
}

fn is_nothing(x: &f64) -> bool {
    *x == 0.0
}

fn is_whole(x: &f64) -> bool {
    *x == 1.0
}

/// Lengths of half efficiency; see [`Device::matmul_half_size`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HalfSize {
    /// Rows of the result.
    pub m: f64,
    /// Columns of the result.
    pub n: f64,
    /// Contracted length.
    pub k: f64,
}

/// One level of links.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Level {
    /// Name: `nvlink`, `infiniband`, `shared-memory`.
    pub name: String,
    /// Consecutive ranks that this level joins; a multiple of the level below.
    pub devices: u32,
    /// Time of an empty message in seconds.
    pub latency_s: f64,
    /// Bandwidth of one port at this level in one direction, bytes per second.
    pub bandwidth_bytes_per_s: f64,
    /// Share of the bandwidth that large collectives reach.
    pub efficiency: f64,
    /// Message size in bytes at which half of that share is reached. Collectives over levels
    /// with protocols do not use it: there the protocols say what small messages cost.
    pub half_bytes: f64,
    /// Consecutive devices that share one port: 2 where eight devices have four network cards.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub devices_per_port: u32,
    /// Bandwidth between two devices where wires join pairs and no switch joins all; absent
    /// where a pair has the whole port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pair_bandwidth_bytes_per_s: Option<f64>,
    /// Share of the bandwidth that a large all-to-all reaches; as `efficiency` where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub all_to_all_efficiency: Option<f64>,
    /// Share of the bandwidth that long messages from one device to another reach; as `efficiency`
    /// where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message_efficiency: Option<f64>,
    /// Reduction inside the switch, where it can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_switch: Option<InSwitch>,
    /// The most that trees over hosts move, on the level inside hosts; absent where ports decide.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tree_channel: Option<TreeChannel>,
    /// Where ranks are threads of one process: what meeting and copying cost. Collectives are
    /// then these, and the ring's and tree's figures describe no way that there is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_memory: Option<SharedMemory>,
    /// Ways to send small, middling and large messages, the one for the largest last; the
    /// fastest counts. Without any, `latency_s` and `half_bytes` describe the one way.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub protocols: Vec<Protocol>,
}

fn one() -> u32 {
    1
}

fn is_one(x: &u32) -> bool {
    *x == 1
}

impl Default for Level {
    /// A perfect link of one device: no latency, one byte per second, each device its port.
    fn default() -> Self {
        Level {
            name: String::new(),
            devices: 1,
            latency_s: 0.0,
            bandwidth_bytes_per_s: 1.0,
            efficiency: 1.0,
            half_bytes: 0.0,
            devices_per_port: 1,
            pair_bandwidth_bytes_per_s: None,
            all_to_all_efficiency: None,
            message_efficiency: None,
            in_switch: None,
            tree_channel: None,
            shared_memory: None,
            protocols: Vec::new(),
        }
    }
}

/// Bytes per second that one channel (one multiprocessor) of a tree over hosts sums and passes on
/// at most. A group has a channel for each card it uses, two where a card is faster than 25 GB/s.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TreeChannel {
    /// Over two hosts.
    pub two_hosts_bytes_per_s: f64,
    /// Over more.
    pub more_hosts_bytes_per_s: f64,
}

/// Reduction in a switch (NVLink SHARP, InfiniBand SHARP): each rank sends its operand once
/// and receives the sum once.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct InSwitch {
    /// Time of an empty all-reduce at this level in seconds.
    pub latency_s: f64,
    /// Share of the port's bandwidth that large all-reduces reach.
    pub efficiency: f64,
}

/// Collectives of ranks that are threads: every member copies its operand to where all can read
/// it, meets the others, and makes its result from what they brought.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SharedMemory {
    /// Seconds of a rank to meet the others once.
    pub meeting_s: f64,
    /// Bytes per second that a rank copies.
    pub copy_bytes_per_s: f64,
    /// Bytes of operands per second that a rank reduces.
    pub reduce_bytes_per_s: f64,
}

/// One way of sending through a level: what a step costs and what it leaves of the bandwidth.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Protocol {
    /// Name: `LL`, `LL128`, `Simple`.
    pub name: String,
    /// Fixed time of a collective in seconds; the outermost level's counts.
    pub start_s: f64,
    /// Time of one step of a ring across this level in seconds.
    pub ring_step_s: f64,
    /// Time of one step of a tree across this level in seconds.
    pub tree_step_s: f64,
    /// Share of `bandwidth_bytes_per_s * efficiency` that rings reach.
    pub ring_share: f64,
    /// Share of the same that trees reach.
    pub tree_share: f64,
    /// Largest rate of a rank's ring or tree, bytes per second; absent where the port decides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_bandwidth_bytes_per_s: Option<f64>,
}

/// Devices that share processors and memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Pool {
    /// Consecutive ranks in one pool; divides `devices_per_host`.
    pub devices: u32,
    /// Compute of the pool in devices: with 2, two of its devices run at full speed together.
    pub compute_devices: f64,
    /// Memory that the pool's devices share, in bytes.
    pub memory_bytes: Bytes,
}

/// One measured point of a calibration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MeasuredPoint {
    /// The measured thing: `matmul f32`, `copy`, `all_reduce`, ...
    pub what: String,
    /// Sizes: m, n, k of a matmul; bytes; ranks.
    pub size: Vec<u64>,
    /// Median seconds.
    pub median_s: f64,
    /// Median absolute deviation in seconds.
    pub spread_s: f64,
    /// Repetitions.
    pub n: u32,
}

impl Cluster {
    /// The order in which ranks on its devices add up: CPU ranks meet through their hosts' memory,
    /// GPUs by a library.
    pub fn order_of_sums(&self) -> Order {
        match self.pool {
            Some(_) => Order::Fixed,
            None => Order::Library,
        }
    }
    /// Bytes that a program may use on every rank, as all or a mesh see them.
    pub fn usable_bytes(&self) -> u64 {
        let own = self
            .device
            .memory_bytes
            .0
            .saturating_sub(self.device.memory_reserved_bytes.0);
        match &self.pool {
            Some(pool) => own.min(pool.memory_bytes.0 / u64::from(pool.devices.max(1))),
            None => own,
        }
    }
    /// Bytes that plans use of those: a share of them stays free, that of the device's file unless
    /// another is given.
    pub fn planned_bytes(&self, headroom: Option<f64>) -> u64 {
        let free = headroom.unwrap_or(self.device.memory_headroom);
        (self.usable_bytes() as f64 * (1.0 - free.clamp(0.0, 1.0))) as u64
    }
    /// Bytes that a rank of a mesh may use in a memory space: in others than the device's its share of what
    /// `storage` says that hosts have, nothing where it does not.
    pub fn usable_bytes_of(&self, mesh: DeviceMesh, space: Space) -> u64 {
        let of_host = match (space, &self.storage) {
            (Space::Device, _) => return self.seen_by(mesh).usable_bytes(),
            (_, None) => None,
            (Space::Host, Some(s)) => s.host_memory_bytes,
            (Space::File, Some(s)) => s.host_file_bytes,
        };
        let ranks = u64::from(self.devices_per_host_of(mesh).max(1));
        of_host.map_or(0, |bytes| bytes.0 / ranks)
    }
    /// Bytes per second that a rank of a mesh copies from one memory space to another while all ranks of its
    /// host do; `None` where `storage` is not known, or both are the same.
    pub fn copy_bytes_per_s(&self, mesh: DeviceMesh, from: Space, to: Space) -> Option<f64> {
        let s = self.storage.as_ref()?;
        let ranks = f64::from(self.devices_per_host_of(mesh).max(1));
        let to_file = s.host_write_bytes_per_s / ranks;
        let total = s.total_write_bytes_per_s.unwrap_or(f64::INFINITY);
        let to_file = to_file.min(total / f64::from(self.n_devices().max(1)));
        match (from.min(to), from.max(to)) {
            (a, b) if a == b => None,
            (Space::Device, Space::Host) => Some(s.device_to_host_bytes_per_s),
            // By way of the host's memory, both at once.
            (Space::Device, _) => Some(s.device_to_host_bytes_per_s.min(to_file)),
            _ => Some(to_file),
        }
    }
    /// Peak FLOP/s of `n` devices, counting each pool once; `None` for a type without a peak.
    pub fn peak_flops_per_s(&self, dtype: DType, n: u32) -> Option<f64> {
        let one = *self.device.peak_flops_per_s.get(&dtype)?;
        Some(match &self.pool {
            Some(p) => {
                let whole = n / p.devices.max(1);
                let rest = f64::from(n % p.devices.max(1));
                one * (f64::from(whole) * p.compute_devices.min(f64::from(p.devices))
                    + rest.min(p.compute_devices))
            }
            None => one * f64::from(n),
        })
    }
    /// Lists the problems of the figures, key by key; empty when the cluster can be planned for.
    pub fn problems(&self) -> Vec<String> {
        let mut p = self.own_problems();
        p.extend(self.unequal_problems());
        p
    }
    /// The same without regard to groups, missing devices and degraded links.
    fn own_problems(&self) -> Vec<String> {
        let mut p = Vec::new();
        let mut check = |ok: bool, text: String| {
            if !ok {
                p.push(text);
            }
        };
        check(
            self.version == CLUSTER_VERSION,
            format!(
                "version is {}, this build reads {CLUSTER_VERSION}",
                self.version
            ),
        );
        check(
            !self.name.trim().is_empty(),
            "name is empty; give the cluster one, plans and reports say it".into(),
        );
        let devices = u64::from(self.n_hosts) * u64::from(self.devices_per_host);
        check(
            (1..=MAX_DEVICES).contains(&devices),
            format!("n_hosts x devices_per_host is {devices}, expected 1 to {MAX_DEVICES}"),
        );
        let d = &self.device;
        check(
            !d.name.trim().is_empty(),
            "device.name is empty; give the device one, plans and reports say it".into(),
        );
        check(
            !d.peak_flops_per_s.is_empty(),
            "device.peak_flops_per_s is empty".into(),
        );
        for t in d.peak_flops_per_s.keys() {
            check(
                d.matmul_efficiency.contains_key(t),
                format!("device.matmul_efficiency.{} is missing", t.name()),
            );
        }
        for t in d.sustained_share_of.keys() {
            check(
                d.peak_flops_per_s.contains_key(t),
                format!(
                    "device.sustained_share_of.{} is a share of no rate: device.peak_flops_per_s has {}",
                    t.name(),
                    types(&d.peak_flops_per_s)
                ),
            );
        }
        check(
            d.memory_bytes.0 > d.memory_reserved_bytes.0,
            format!(
                "device.memory_bytes {} ({}) does not exceed memory_reserved_bytes {} ({})",
                d.memory_bytes.0,
                d.memory_bytes,
                d.memory_reserved_bytes.0,
                d.memory_reserved_bytes
            ),
        );
        check(
            !self.levels.is_empty() || devices == 1 && self.groups.is_empty(),
            "levels is empty".into(),
        );
        let mut below = 1;
        for (i, l) in self.levels.iter().enumerate() {
            check(
                l.devices > 0 && l.devices.is_multiple_of(below),
                format!(
                    "levels[{i}].devices is {}, expected a multiple of {below}",
                    l.devices
                ),
            );
            let (joined, host) = (l.devices.max(1), self.devices_per_host.max(1));
            check(
                u64::from(joined) >= devices
                    || joined.is_multiple_of(host)
                    || host.is_multiple_of(joined),
                format!(
                    "levels[{i}].devices is {joined}, which cuts through hosts of {host}: expected a multiple of devices_per_host, or a divisor of it"
                ),
            );
            below = l.devices.max(1);
            check(
                i == 0 || l.tree_channel.is_none(),
                format!("levels[{i}].tree_channel belongs to levels[0], inside hosts"),
            );
            check(
                l.in_switch.is_none() || !l.protocols.is_empty(),
                format!("levels[{i}].in_switch stands without protocols, which it needs"),
            );
        }
        let named = self.levels.iter().filter(|l| !l.protocols.is_empty());
        check(
            [0, self.levels.len()].contains(&named.clone().count()),
            "levels have protocols only in part, expected protocols in all levels or in none"
                .into(),
        );
        if let Some((first, rest)) = named.collect::<Vec<_>>().split_first() {
            check(
                first.protocols.iter().any(|p| {
                    let has = |l: &&&Level| l.protocols.iter().any(|q| q.name == p.name);
                    rest.iter().filter(has).count() == rest.len()
                }),
                "levels have no protocol in common".into(),
            );
        }
        if let Some(l) = self.levels.last() {
            check(
                u64::from(l.devices) >= devices,
                format!("the last level joins {} devices of {devices}", l.devices),
            );
        }
        if let Some(pool) = &self.pool {
            check(
                pool.devices > 0 && self.devices_per_host.is_multiple_of(pool.devices.max(1)),
                format!(
                    "pool.devices is {}, expected a divisor of devices_per_host",
                    pool.devices
                ),
            );
            check(pool.memory_bytes.0 > 0, "pool.memory_bytes is 0".into());
        }
        p.extend(figures::problems(self));
        p
    }
}

/// Types that a device has a rate for, in words.
fn types(rates: &BTreeMap<DType, f64>) -> String {
    let names: Vec<&str> = rates.keys().map(|t| t.name()).collect();
    names.join(", ")
}
