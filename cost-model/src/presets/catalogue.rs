//! The catalogue of hardware: devices, links and the systems made of them, embedded from
//! `clusters/`, and how a cluster is composed of one device and two links.
//!
//! Invariants: a composed cluster names a source for every figure; every figure of a link that
//! was fitted to collectives alone stands in [`Fitted`], and every one of a device or a link that
//! was fitted to training steps in `clusters/training.toml`, so that a fit changes nothing else.

use super::parameters::{self, Parameters};
use super::storage::StorageFile;
use ir::DType;
use ir::cluster::{CLUSTER_VERSION, Cluster, Device, InSwitch, Level, Protocol, TreeChannel};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// File name without its ending, and content.
macro_rules! devices {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_str!(concat!("../../../clusters/devices/", $name, ".toml")))),*]
    };
}
const DEVICES: [(&str, &str); 22] = devices![
    "a100-pcie-40gb",
    "a100-pcie-80gb",
    "a100-sxm-40gb",
    "a100-sxm-80gb",
    "b200-sxm",
    "b300-sxm",
    "gb200",
    "gb300",
    "gh200-144gb",
    "gh200-96gb",
    "h100-pcie",
    "h100-sxm",
    "h100-sxm-96gb-500w",
    "h200-sxm",
    "l4",
    "l40s",
    "rtx-4090",
    "rtx-a6000",
    "v100-pcie-16gb",
    "v100-pcie-32gb",
    "v100-sxm2-16gb",
    "v100-sxm2-32gb",
];
const LINKS: &str = include_str!("../../../clusters/links.toml");
const SYSTEMS: &str = include_str!("../../../clusters/systems.toml");
const TRAINING: &str = include_str!("../../../clusters/training.toml");
/// Where the shares of training come from, before the rows that each rests on.
const TRAINING_SOURCE: &str = "fitted to measured training steps (clusters/training.toml)";

/// Devices, links and systems.
#[derive(Clone, Debug)]
pub struct Catalogue {
    /// Figures fitted to measurements of links.
    pub fitted: Fitted,
    devices: BTreeMap<&'static str, Entry>,
    training: Parameters,
    protocols: BTreeMap<String, Ways>,
    links: BTreeMap<String, Link>,
    systems: Vec<System>,
    storage: StorageFile,
}

/// A file of `clusters/devices/`, with what training holds of its rates.
#[derive(Clone, Debug)]
struct Entry {
    device: Device,
    sources: BTreeMap<String, String>,
    /// A device of the same chip whose clocks in training are known; this one's follow from the
    /// power limits of both.
    clocks_of: Option<String>,
}

/// Every fitted figure of the communication model, by the names that links use.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fitted {
    /// Fixed time of a collective on top of NCCL's, seconds.
    pub collective_start_s: f64,
    /// Steps of the protocol for large messages inside a host, times NCCL's.
    pub simple_step_factor: f64,
    /// An empty all-reduce in the switch, seconds.
    pub in_switch_latency_s: f64,
    /// Where these come from.
    pub source: String,
    /// Share of the port that long rings reach, by kind of link.
    pub efficiency: BTreeMap<String, f64>,
    /// Share of the port that operands reach which the switch adds up.
    pub in_switch_efficiency: BTreeMap<String, f64>,
    /// Steps over a network, times NCCL's.
    pub network_step_factor: BTreeMap<String, f64>,
    /// Share of the port that a large all-to-all reaches.
    pub all_to_all_efficiency: Sourced,
}

/// Figures with one source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sourced {
    /// Where they come from.
    pub source: String,
    /// The figures.
    #[serde(flatten)]
    pub figures: BTreeMap<String, f64>,
}

/// Facts of a library's protocols over one kind of link.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Ways {
    source: String,
    ways: Vec<Protocol>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Link {
    name: String,
    protocols: String,
    port_bytes_per_s: f64,
    source: String,
    efficiency: String,
    all_to_all: String,
    #[serde(default)]
    network_step: Option<String>,
    latency_s: f64,
    half_bytes: f64,
    message_source: String,
    ll_max_bytes_per_s: Option<f64>,
    #[serde(default)]
    ll_source: String,
    pair_bytes_per_s: Option<f64>,
    #[serde(default)]
    pair_source: String,
    tree_channel: Option<TreeChannel>,
    #[serde(default)]
    tree_channel_source: String,
    in_switch: Option<String>,
    in_switch_latency_s: Option<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LinksFile {
    fitted: Fitted,
    protocols: BTreeMap<String, Ways>,
    links: BTreeMap<String, Link>,
}

/// Hosts of one device, the link inside and the link between them.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct System {
    /// Name of the preset.
    pub preset: String,
    /// Its common name.
    pub name: String,
    /// Hosts unless asked for otherwise.
    pub n_hosts: u32,
    /// Name of the device.
    pub device: String,
    /// Devices in a host.
    pub devices_per_host: u32,
    /// Link between the devices of a host, or of a domain.
    pub inside: String,
    /// Devices that the inner link joins where it reaches beyond a host.
    #[serde(default)]
    pub domain_devices: Option<u32>,
    /// Link between hosts; none where there is only one.
    #[serde(default)]
    pub between: Option<String>,
    /// Network cards in a host.
    pub cards: u32,
    /// Where this comes from.
    pub source: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SystemsFile {
    systems: Vec<System>,
}

impl Catalogue {
    /// The embedded catalogue; the error names the file and what the parser says.
    pub fn read() -> Result<Catalogue, String> {
        let at = |file: &'static str| move |e: toml::de::Error| format!("clusters/{file}: {e}");
        let links: LinksFile = toml::from_str(LINKS).map_err(at("links.toml"))?;
        let systems: SystemsFile = toml::from_str(SYSTEMS).map_err(at("systems.toml"))?;
        let mut devices = BTreeMap::new();
        for (name, text) in DEVICES {
            let mut table: toml::Table = toml::from_str(text).map_err(at(name))?;
            let sources = table
                .remove("sources")
                .ok_or_else(|| format!("clusters/devices/{name}.toml: there are no sources"))?;
            let clocks_of = table.remove("clocks_of");
            let entry = Entry {
                clocks_of: clocks_of
                    .map(toml::Value::try_into)
                    .transpose()
                    .map_err(at(name))?,
                device: table.try_into().map_err(at(name))?,
                sources: sources.try_into().map_err(at(name))?,
            };
            devices.insert(name, entry);
        }
        let training = Parameters::parse(TRAINING, &parameters::OF_HARDWARE)
            .map_err(|e| format!("clusters/training.toml: {e}"))?;
        let catalogue = Catalogue {
            fitted: links.fitted,
            devices,
            training: training.clone(),
            protocols: links.protocols,
            links: links.links,
            systems: systems.systems,
            storage: StorageFile::read()?,
        };
        catalogue.with_training(&training)
    }

    /// Returns the figures of what training holds of the best rates of devices and links.
    pub fn training(&self) -> &Parameters {
        &self.training
    }

    /// The same with other shares of devices and links, of which `training` may hold more; the
    /// error names a device that is referred to and missing.
    pub fn with_training(mut self, training: &Parameters) -> Result<Catalogue, String> {
        for (name, entry) in &mut self.devices {
            let of =
                |quantity| training.value(quantity, entry.clocks_of.as_deref().unwrap_or(name));
            let narrow = [
                (DType::F8e4m3, parameters::SUSTAINED_SHARE_OF_8_BITS),
                (DType::F4e2m1, parameters::SUSTAINED_SHARE_OF_4_BITS),
            ];
            entry.device.sustained_share = of(parameters::SUSTAINED_SHARE).unwrap_or(1.0);
            entry.device.sustained_share_of = narrow
                .into_iter()
                .filter_map(|(dtype, quantity)| Some((dtype, of(quantity)?)))
                .collect();
        }
        let all = self.devices.clone();
        for (name, entry) in &mut self.devices {
            let mut source = TRAINING_SOURCE.to_string();
            if let Some(reference) = &entry.clocks_of {
                let known = all.get(reference.as_str());
                let known =
                    known.ok_or_else(|| format!("{name}: clocks_of no device {reference}"))?;
                limited_by_power(&mut entry.device, &known.device);
                source = format!("{source}, as {reference} by the cube root of the power limits");
            }
            for (key, is_stated) in [
                ("sustained_share", entry.device.sustained_share != 1.0),
                (
                    "sustained_share_of",
                    !entry.device.sustained_share_of.is_empty(),
                ),
            ] {
                match is_stated {
                    true => entry.sources.insert(key.into(), source.clone()),
                    false => entry.sources.remove(key),
                };
            }
        }
        self.training = training.clone();
        Ok(self)
    }

    /// The systems, in the file's order.
    pub fn systems(&self) -> &[System] {
        &self.systems
    }

    /// Names of the devices.
    pub fn devices(&self) -> impl Iterator<Item = &str> {
        self.devices.keys().copied()
    }

    /// The device of this name; the error lists those that there are.
    pub fn device(&self, name: &str) -> Result<&Device, String> {
        Ok(&self.entry(name)?.device)
    }

    fn entry(&self, name: &str) -> Result<&Entry, String> {
        self.devices.get(name).ok_or_else(|| {
            let known: Vec<&str> = self.devices().collect();
            format!(
                "there is no device `{name}`; devices are {}",
                known.join(", ")
            )
        })
    }

    /// Names of the links.
    pub fn links(&self) -> impl Iterator<Item = &str> {
        self.links.keys().map(String::as_str)
    }

    /// The system that `DEVICE*COUNT+INSIDE+BETWEEN*CARDS` means, such as
    /// `h100-sxm*8+nvlink4+roce-400*4`; the error says what is wrong with it.
    pub fn system(&self, text: &str) -> Result<System, String> {
        super::compose::system(self, text)
    }

    /// The NVLinks that systems give the device, in words, where `link` is an NVLink of another
    /// generation; nothing where the device can have it.
    pub fn foreign_nvlink(&self, device: &str, link: &str) -> Option<String> {
        super::compose::foreign_nvlink(self, device, link)
    }

    /// Whether a system of the device joins several hosts by its inner link.
    pub fn has_domain(&self, device: &str) -> bool {
        let mut own = self.systems.iter().filter(|s| s.device == device);
        own.any(|s| s.domain_devices.is_some_and(|n| n > s.devices_per_host))
    }

    /// Whether the link is a network, which joins hosts.
    pub(super) fn is_network(&self, link: &str) -> bool {
        let link = self.links.get(link);
        link.is_some_and(|l| l.network_step.is_some())
    }

    /// Whether the link is a network over sockets: of such a host has one card, unless it is said
    /// to have more.
    pub(super) fn is_over_sockets(&self, link: &str) -> bool {
        let link = self.links.get(link);
        link.is_some_and(|l| l.network_step.as_deref() == Some("tcp"))
    }

    /// The cluster of a system; the error names what the catalogue does not have.
    pub fn cluster(&self, system: &System) -> Result<Cluster, String> {
        let entry = self.entry(&system.device)?;
        let mut sources: BTreeMap<String, String> = entry
            .sources
            .iter()
            .map(|(k, v)| (format!("device.{k}"), v.clone()))
            .collect();
        sources.insert("devices_per_host".into(), system.source.clone());
        let domain = system.domain_devices.unwrap_or(system.devices_per_host);
        let inside = self.level(&system.inside, domain, (1, 1), &system.source, &mut sources)?;
        let mut levels = vec![inside];
        if let Some(between) = &system.between {
            let hosts = system.n_hosts.saturating_mul(system.devices_per_host);
            let ports = (system.cards, system.devices_per_host);
            let all = hosts.max(domain);
            levels.push(self.level(between, all, ports, &system.source, &mut sources)?);
        }
        Ok(Cluster {
            version: CLUSTER_VERSION,
            name: system.name.clone(),
            n_hosts: system.n_hosts,
            devices_per_host: system.devices_per_host,
            device: entry.device.clone(),
            levels,
            groups: Vec::new(),
            missing: Vec::new(),
            degraded: Vec::new(),
            pool: None,
            storage: self.storage.of(&system.device, &mut sources),
            sources,
            measured: Vec::new(),
        })
    }

    /// A level of `ports` for so many `users`, and the sources of its figures.
    fn level(
        &self,
        link: &str,
        devices: u32,
        (ports, users): (u32, u32),
        system_source: &str,
        sources: &mut BTreeMap<String, String>,
    ) -> Result<Level, String> {
        let missing = |what: &str, name: &str| format!("link `{link}`: no {what} `{name}`");
        let l = self.links.get(link).ok_or_else(|| {
            let known: Vec<&str> = self.links().collect();
            format!("there is no link `{link}`; links are {}", known.join(", "))
        })?;
        let f = &self.fitted;
        let figure = |table: &BTreeMap<String, f64>, what: &str, name: &str| {
            table.get(name).copied().ok_or_else(|| missing(what, name))
        };
        let ways = self
            .protocols
            .get(&l.protocols)
            .ok_or_else(|| missing("protocols", &l.protocols))?;
        let network = match &l.network_step {
            Some(kind) => Some(figure(&f.network_step_factor, "network step", kind)?),
            None => None,
        };
        let in_switch = match &l.in_switch {
            Some(kind) => Some(InSwitch {
                latency_s: l.in_switch_latency_s.unwrap_or(f.in_switch_latency_s),
                efficiency: figure(&f.in_switch_efficiency, "in-switch efficiency", kind)?,
            }),
            None => None,
        };
        let alone = figure(&f.efficiency, "efficiency", &l.efficiency)?;
        let share = self.training.value(parameters::LINK_SHARE, link);
        let level = Level {
            name: l.name.clone(),
            devices,
            latency_s: l.latency_s,
            bandwidth_bytes_per_s: l.port_bytes_per_s * f64::from((ports / users).max(1)),
            efficiency: (alone * share.unwrap_or(1.0)).min(1.0),
            half_bytes: l.half_bytes,
            devices_per_port: users.div_ceil(ports.max(1)),
            pair_bandwidth_bytes_per_s: l.pair_bytes_per_s,
            all_to_all_efficiency: Some(figure(
                &f.all_to_all_efficiency.figures,
                "all-to-all efficiency",
                &l.all_to_all,
            )?),
            // An assumption: what collectives lose in training, waiting for the slowest rank and
            // for each other, single messages do not.
            message_efficiency: share.map(|_| alone),
            in_switch,
            tree_channel: l.tree_channel,
            shared_memory: None,
            protocols: ways.ways.iter().map(|w| fitted(f, l, network, w)).collect(),
        };
        let mut say = |key: &str, source: String| {
            sources.insert(format!("levels.{}.{key}", l.name), source);
        };
        say("devices", system_source.into());
        say("bandwidth_bytes_per_s", l.source.clone());
        say("devices_per_port", system_source.into());
        for key in ["latency_s", "half_bytes"] {
            say(key, l.message_source.clone());
        }
        match share {
            Some(share) => {
                let source = format!("{}, times {share} in training: {TRAINING_SOURCE}", f.source);
                say("efficiency", source);
                say("message_efficiency", f.source.clone());
            }
            None => say("efficiency", f.source.clone()),
        }
        say(
            "all_to_all_efficiency",
            f.all_to_all_efficiency.source.clone(),
        );
        let largest = match l.ll_source.as_str() {
            "" => String::new(),
            source => format!("; {source}"),
        };
        say(
            "protocols",
            format!("{}{largest}; starts and steps {}", ways.source, f.source),
        );
        if level.pair_bandwidth_bytes_per_s.is_some() {
            say("pair_bandwidth_bytes_per_s", l.pair_source.clone());
        }
        if level.tree_channel.is_some() {
            say("tree_channel", l.tree_channel_source.clone());
        }
        if level.in_switch.is_some() {
            say("in_switch", f.source.clone());
        }
        if level.devices_per_port == 1 {
            sources.remove(&format!("levels.{}.devices_per_port", l.name));
        }
        Ok(level)
    }
}

/// Turns shares that hold for `reference`, a device of the same chip with another limit of its
/// power, into those of `device`.
///
/// Where power limits clocks, dynamic power is `C V^2 f` (Weste & Harris, CMOS VLSI Design,
/// chapter 5) with a voltage in proportion to the clock (an assumption), so rates go as the cube
/// root of the limit. No share is above 1, and a type whose best
/// rate either does not have keeps its share.
fn limited_by_power(device: &mut Device, reference: &Device) {
    let (Some(limit), Some(of)) = (device.power_limit_w, reference.power_limit_w) else {
        return;
    };
    let clocks = (limit / of).cbrt();
    let best = |d: &Device, t: DType| {
        let of_peak = d.matmul_efficiency.get(&t)?;
        Some(d.peak_flops_per_s.get(&t)? * of_peak)
    };
    let types: Vec<DType> = device.peak_flops_per_s.keys().copied().collect();
    for t in types {
        if let (Some(own), Some(theirs)) = (best(device, t), best(reference, t)) {
            let shares = &mut device.sustained_share_of;
            let share = shares.get(&t).copied().unwrap_or(device.sustained_share);
            shares.insert(t, (share * clocks * theirs / own).min(1.0));
        }
    }
}

/// A library's protocol with what was fitted on top.
fn fitted(f: &Fitted, link: &Link, network: Option<f64>, way: &Protocol) -> Protocol {
    let factor = match network {
        Some(factor) => factor,
        None if way.name == "Simple" => f.simple_step_factor,
        None => 1.0,
    };
    Protocol {
        name: way.name.clone(),
        start_s: way.start_s + f.collective_start_s,
        ring_step_s: way.ring_step_s * factor,
        tree_step_s: way.tree_step_s * factor,
        max_bandwidth_bytes_per_s: link.ll_max_bytes_per_s.filter(|_| way.name == "LL"),
        ring_share: way.ring_share,
        tree_share: way.tree_share,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_follow_the_cube_root_of_power() {
        let catalogue = Catalogue::read().unwrap();
        let of = |name: &str| catalogue.device(name).unwrap().clone();
        let (mut small, large) = (of("h100-sxm-96gb-500w"), of("h100-sxm"));
        (small.sustained_share, small.power_limit_w) = (0.5, Some(700.0 / 8.0));
        small.sustained_share_of = [(DType::F8e4m3, 0.8)].into();
        limited_by_power(&mut small, &large);
        // An eighth of the power is half of the clock: of the rates, not of the shares, whose
        // best rates are 671.5 and 794.2 TFLOP/s.
        let rate = |t| small.peak_flops_per_s[&t] * small.matmul_efficiency[&t];
        let theirs = |t| large.peak_flops_per_s[&t] * large.matmul_efficiency[&t];
        for (t, share) in [(DType::Bf16, 0.5), (DType::F8e4m3, 0.8)] {
            let sustained = rate(t) * small.sustained_share_of[&t];
            assert!((sustained / theirs(t) - share / 2.0).abs() < 1e-12);
        }
        // More power than the best rate was measured with gives no more than that rate.
        let mut wide = of("h100-sxm");
        wide.power_limit_w = Some(1e6);
        limited_by_power(&mut wide, &large);
        assert_eq!(wide.sustained_share_of[&DType::Bf16], 1.0);
    }
}
