//! Facts about a cluster by readable names, for `--set`: `link.between=400Gb/s`, `memory=96GiB`.

use crate::failure::{Exit, Failure};
use crate::files;
use crate::quantity::{Amount, Unit};
use ir::cluster::{Cluster, Device, Level};
use ir::{Bytes, DType};

/// A figure of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fact {
    /// Bandwidth of a level of links.
    Bandwidth(Link),
    /// Time of an empty message over a level of links.
    Latency(Link),
    /// Memory of a device.
    Memory,
    /// Bandwidth of a device's memory.
    MemoryBandwidth,
    /// Peak of a device in the type that is computed with; the peaks of all types change alike.
    Peak,
}

/// A level of links.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Link {
    /// The one that joins the devices of a host.
    Inside,
    /// The one that joins hosts.
    Between,
    /// The one of this name.
    Named(String),
}

/// A fact with its new value.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// The fact.
    pub fact: Fact,
    /// Its name, as given.
    pub key: String,
    /// Its new value, as given.
    pub text: String,
    amount: Amount,
}

/// The forms of settings, for messages.
const FORMS: [&str; 7] = [
    "link.inside",
    "link.between",
    "latency.inside",
    "latency.between",
    "memory",
    "memory.bandwidth",
    "peak",
];

impl Fact {
    fn named(key: &str) -> Option<Fact> {
        let link = |name: &str| match name {
            "inside" => Link::Inside,
            "between" => Link::Between,
            name => Link::Named(name.to_string()),
        };
        match key.split_once('.') {
            Some(("link", name)) => Some(Fact::Bandwidth(link(name))),
            Some(("latency", name)) => Some(Fact::Latency(link(name))),
            _ => match key {
                "memory" => Some(Fact::Memory),
                "memory.bandwidth" => Some(Fact::MemoryBandwidth),
                "peak" => Some(Fact::Peak),
                _ => None,
            },
        }
    }

    /// Which figure of a cluster it is, the same for two names of one link: its kind, and the level of
    /// links.
    pub fn of(&self, cluster: &Cluster) -> Result<(u8, usize), Failure> {
        Ok(match self {
            Fact::Bandwidth(link) => (0, level(cluster, link)?),
            Fact::Latency(link) => (1, level(cluster, link)?),
            Fact::Memory => (2, 0),
            Fact::MemoryBandwidth => (3, 0),
            Fact::Peak => (4, 0),
        })
    }

    /// The unit of the fact.
    pub fn unit(&self) -> Unit {
        match self {
            Fact::Bandwidth(_) | Fact::MemoryBandwidth => Unit::BytesPerSecond,
            Fact::Latency(_) => Unit::Seconds,
            Fact::Memory => Unit::Bytes,
            Fact::Peak => Unit::FlopsPerSecond,
        }
    }

    /// The value of the fact; of unequal groups that of the first.
    pub fn value(&self, cluster: &Cluster, dtype: DType) -> Result<f64, Failure> {
        Ok(match self {
            Fact::Bandwidth(link) => cluster.levels[level(cluster, link)?].bandwidth_bytes_per_s,
            Fact::Latency(link) => cluster.levels[level(cluster, link)?].latency_s,
            Fact::Memory => cluster.device.memory_bytes.0 as f64,
            Fact::MemoryBandwidth => cluster.device.memory_bandwidth_bytes_per_s,
            Fact::Peak => {
                let peaks = &cluster.device.peak_flops_per_s;
                let own = peaks.get(&dtype).or_else(|| peaks.values().next());
                own.copied().unwrap_or(1.0)
            }
        })
    }

    /// Sets the fact to `value`; in all groups, in proportion.
    pub fn set(&self, cluster: &mut Cluster, dtype: DType, value: f64) -> Result<(), Failure> {
        let factor = value / self.value(cluster, dtype)?.max(f64::MIN_POSITIVE);
        match self {
            Fact::Bandwidth(link) | Fact::Latency(link) => {
                let i = level(cluster, link)?;
                let is_latency = matches!(self, Fact::Latency(_));
                let of_groups = cluster.groups.iter_mut().map(|g| &mut g.levels);
                let all = std::iter::once(&mut cluster.levels).chain(of_groups);
                all.filter_map(|levels| levels.get_mut(i))
                    .for_each(|l| scale_link(l, is_latency, factor));
            }
            Fact::Memory | Fact::MemoryBandwidth | Fact::Peak => {
                let of_groups = cluster.groups.iter_mut().map(|g| &mut g.device);
                let all = std::iter::once(&mut cluster.device).chain(of_groups);
                all.for_each(|d| self.scale_device(d, factor));
                // Devices that share memory have their share of it.
                if let Some(pool) = cluster.pool.as_mut().filter(|_| *self == Fact::Memory) {
                    pool.memory_bytes = scaled(pool.memory_bytes, factor);
                }
            }
        }
        Ok(())
    }

    fn scale_device(&self, device: &mut Device, factor: f64) {
        match self {
            Fact::Memory => device.memory_bytes = scaled(device.memory_bytes, factor),
            Fact::MemoryBandwidth => device.memory_bandwidth_bytes_per_s *= factor,
            _ => device
                .peak_flops_per_s
                .values_mut()
                .for_each(|x| *x *= factor),
        }
    }
}

fn scaled(bytes: Bytes, factor: f64) -> Bytes {
    Bytes((bytes.0 as f64 * factor).round() as u64)
}

/// A link that is faster in all that bandwidth says, or later in all that latency says.
fn scale_link(level: &mut Level, is_latency: bool, factor: f64) {
    if is_latency {
        level.latency_s *= factor;
        for p in &mut level.protocols {
            p.ring_step_s *= factor;
            p.tree_step_s *= factor;
        }
        return;
    }
    level.bandwidth_bytes_per_s *= factor;
    for rate in level.pair_bandwidth_bytes_per_s.iter_mut() {
        *rate *= factor;
    }
    if let Some(shared) = &mut level.shared_memory {
        shared.copy_bytes_per_s *= factor;
        shared.reduce_bytes_per_s *= factor;
    }
}

/// The index of a level of links.
fn level(cluster: &Cluster, link: &Link) -> Result<usize, Failure> {
    let levels = &cluster.levels;
    let host = cluster.devices_per_host;
    // A level that joins no more devices than the one inside of it joins none: the link between hosts
    // where there is one host.
    let joins = |i: usize| i == 0 || levels[i].devices > levels[i - 1].devices;
    let found = match link {
        Link::Inside => {
            let inside = |i: &usize| levels[*i].devices <= host && host > 1 && joins(*i);
            (0..levels.len()).rev().find(inside)
        }
        Link::Between => levels
            .iter()
            .rposition(|l| l.devices > host && cluster.n_hosts > 1),
        Link::Named(name) => levels.iter().position(|l| l.name == *name),
    };
    found.ok_or_else(|| {
        let what = match link {
            Link::Inside => "the cluster has no link inside hosts".to_string(),
            Link::Between => "the cluster has no link between hosts".to_string(),
            Link::Named(name) => format!("the cluster has no link called `{name}`"),
        };
        let names: Vec<String> = levels.iter().map(|l| format!("link.{}", l.name)).collect();
        Failure::new(Exit::Usage, what).help(format!("its links are {}", names.join(" and ")))
    })
}

impl Setting {
    /// Reads `KEY=VALUE`.
    pub fn parse(text: &str) -> Result<Setting, Failure> {
        let usage = |what: String, help: String| Failure::new(Exit::Usage, what).help(help);
        let all = format!(
            "settings are {}, and link.NAME for a link of that name",
            FORMS.join(", ")
        );
        let Some((key, value)) = text.split_once('=') else {
            return Err(usage(format!("--set {text}: expected KEY=VALUE"), all));
        };
        let (key, value) = (key.trim(), value.trim());
        let Some(fact) = Fact::named(key) else {
            let near = files::closest(key, FORMS.into_iter());
            let near = near.map_or(String::new(), |n| format!("did you mean `{n}`? "));
            let what = format!("--set {text}: there is no setting `{key}`");
            return Err(usage(what, format!("{near}{all}")));
        };
        let amount = fact.unit().parse(&format!("--set {key}"), value)?;
        Ok(Setting {
            fact,
            key: key.to_string(),
            text: value.to_string(),
            amount,
        })
    }

    /// The value of the fact in a cluster, and the new one.
    pub fn values(&self, cluster: &Cluster, dtype: DType) -> Result<[f64; 2], Failure> {
        let old = self.fact.value(cluster, dtype)?;
        Ok([old, self.amount.of(old)])
    }
}
