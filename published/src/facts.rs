//! What the columns of a row do not say, as data: devices, links, and how a framework's
//! generation executes. The files in `data/` hold every figure with its source; a figure
//! belongs to a device, a class of links or a generation, never to a source or a row.

use crate::Unmodelled;
use crate::row::Row;
use ir::DType;
use ir::software::{AttentionKernel, Software};
use serde::Deserialize;
use std::collections::BTreeMap;

/// All data files.
#[derive(Clone, Debug)]
pub struct Facts {
    devices: Vec<DeviceFact>,
    interconnects: Vec<InterconnectFact>,
    classes: BTreeMap<String, LinkClass>,
    frameworks: Vec<FrameworkFact>,
    generations: BTreeMap<String, Generation>,
}

/// What a `gpu` cell means.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceFact {
    /// How the cell begins.
    pub gpu: String,
    /// Built-in cluster with this device.
    pub cluster: String,
    /// Multiprocessors of the device.
    pub multiprocessors: u32,
    /// Share of the best measured matmul rate that training holds.
    pub sustained_share: f64,
    /// Where this comes from.
    pub source: String,
}

/// What an `interconnect` cell means.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct InterconnectFact {
    text: String,
    host_bytes_per_s: f64,
    class: String,
    source: String,
}

/// A class of links between hosts.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkClass {
    /// Share of the line rate that large collectives reach.
    pub efficiency: f64,
    /// Time of an empty message in seconds.
    pub latency_s: f64,
    /// Message size in bytes at which half of that share is reached.
    pub half_bytes: f64,
    /// Where the figures come from.
    pub source: String,
}

/// The link between hosts of a run.
#[derive(Clone, Copy, Debug)]
pub struct HostLink<'a> {
    /// Bytes per second of one host in one direction.
    pub host_bytes_per_s: f64,
    /// Name of its class.
    pub name: &'a str,
    /// Its class.
    pub class: &'a LinkClass,
    /// Where the rate comes from.
    pub source: &'a str,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FrameworkFact {
    name: String,
    #[serde(default)]
    gpu: Option<String>,
    #[serde(default)]
    source_contains: Option<String>,
    generation: String,
}

/// How pipeline stages divide the layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Split {
    /// Transformer layers in equal parts; the embedding goes to the first stage, the output
    /// layer to the last.
    Layers,
    /// The embedding and the output layer count as a layer each.
    Balanced,
}

/// How a framework's generation executes.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Generation {
    /// Dropout probability in training.
    pub dropout: f64,
    /// Whether the output layer shares the embedding's table.
    pub tied: bool,
    /// ZeRO level where the column is empty.
    pub zero: u8,
    /// Recomputation where the column is empty: none, selective or full.
    pub recompute: String,
    /// Chunks of layers per device where the column is empty.
    #[serde(rename = "virtual")]
    pub virtual_chunks: u64,
    /// How stages divide the layers.
    pub split: Split,
    /// Multiple of the vocabulary on every tensor rank that the framework pads to.
    pub vocab_multiple: u64,
    /// Kernels of attention.
    pub attention: AttentionKernel,
    /// Seconds that the host needs to issue a kernel.
    pub host_s_per_kernel: f64,
    /// Bytes that elementwise operations move, over one kernel for each.
    pub elementwise_traffic: f64,
    /// Whether kernels wait for collectives.
    pub blocking_collectives: bool,
    /// Whether ranks wait for their transfers.
    pub blocking_transfers: bool,
    /// Whether gradients are reduced as soon as they are made.
    pub overlapped_gradients: bool,
    /// Element type in which sums of gradients travel.
    pub gradient_dtype: DType,
    /// Where this is stated.
    pub source: String,
}

impl Generation {
    /// What the cost model is told of it.
    pub fn software(&self, name: &str) -> Software {
        Software {
            name: name.into(),
            attention: self.attention,
            host_s_per_kernel: self.host_s_per_kernel,
            elementwise_traffic: self.elementwise_traffic,
            blocking_collectives: self.blocking_collectives,
            blocking_transfers: self.blocking_transfers,
            overlapped_gradients: self.overlapped_gradients,
            gradient_dtype: Some(self.gradient_dtype),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DeviceFile {
    device: Vec<DeviceFact>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct InterconnectFile {
    class: BTreeMap<String, LinkClass>,
    interconnect: Vec<InterconnectFact>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FrameworkFile {
    generation: BTreeMap<String, Generation>,
    framework: Vec<FrameworkFact>,
}

impl Facts {
    /// The files that come with Meshwright.
    pub fn built_in() -> Facts {
        Self::parse(
            include_str!("../data/devices.toml"),
            include_str!("../data/interconnects.toml"),
            include_str!("../data/frameworks.toml"),
        )
        .expect("the built-in data files are tested")
    }

    /// Reads the three files; the error is the parser's, or names what is referred to and
    /// missing.
    pub fn parse(devices: &str, interconnects: &str, frameworks: &str) -> Result<Facts, String> {
        let devices: DeviceFile = toml::from_str(devices).map_err(|e| e.to_string())?;
        let links: InterconnectFile = toml::from_str(interconnects).map_err(|e| e.to_string())?;
        let software: FrameworkFile = toml::from_str(frameworks).map_err(|e| e.to_string())?;
        for link in &links.interconnect {
            if !links.class.contains_key(&link.class) {
                return Err(format!("`{}`: no class `{}`", link.text, link.class));
            }
        }
        for framework in &software.framework {
            if !software.generation.contains_key(&framework.generation) {
                return Err(format!(
                    "`{}`: no generation `{}`",
                    framework.name, framework.generation
                ));
            }
        }
        Ok(Facts {
            devices: devices.device,
            interconnects: links.interconnect,
            classes: links.class,
            frameworks: software.framework,
            generations: software.generation,
        })
    }

    /// The device of a row.
    pub fn device(&self, row: &Row) -> Result<&DeviceFact, Unmodelled> {
        let gpu = row.required("gpu")?;
        self.devices
            .iter()
            .find(|d| gpu.starts_with(&d.gpu))
            .ok_or_else(|| Unmodelled::Feature(format!("the device {gpu}")))
    }

    /// The link between the hosts of a row.
    pub fn host_link(&self, row: &Row) -> Result<HostLink<'_>, Unmodelled> {
        let text = row.required("interconnect")?;
        self.interconnects
            .iter()
            .find(|i| text.contains(&i.text))
            .map(|i| HostLink {
                host_bytes_per_s: i.host_bytes_per_s,
                name: &i.class,
                class: &self.classes[&i.class],
                source: &i.source,
            })
            .ok_or_else(|| Unmodelled::Feature(format!("the interconnect `{text}`")))
    }

    /// The generation of a row's framework, with its name.
    pub fn generation(&self, row: &Row) -> Result<(&str, &Generation), Unmodelled> {
        let name = row.required("framework")?;
        let (gpu, source) = (row.text("gpu"), row.text("source"));
        let matches = |f: &&FrameworkFact| {
            let begins = |prefix: &String| gpu.is_some_and(|g| g.starts_with(prefix));
            let contains = |part: &String| source.is_some_and(|s| s.contains(part));
            f.name == name
                && f.gpu.as_ref().is_none_or(begins)
                && f.source_contains.as_ref().is_none_or(contains)
        };
        let fact = self
            .frameworks
            .iter()
            .find(matches)
            .ok_or_else(|| Unmodelled::Feature(format!("the framework `{name}`")))?;
        Ok((&fact.generation, &self.generations[&fact.generation]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_files_are_whole() {
        let facts = Facts::built_in();
        for device in &facts.devices {
            assert!(
                cost_model::presets::text(&device.cluster).is_some(),
                "{}",
                device.cluster
            );
        }
        for class in facts.classes.values() {
            assert!((0.0..=1.0).contains(&class.efficiency) && !class.source.is_empty());
        }
        for generation in facts.generations.values() {
            assert!(["none", "selective", "full"].contains(&generation.recompute.as_str()));
            assert!(generation.zero <= 3 && !generation.source.is_empty());
        }
    }

    #[test]
    fn what_is_referred_to_has_to_be_there() {
        let links = "class = {}\n[[interconnect]]\ntext = 'x'\nhost_bytes_per_s = 1.0\nclass = 'y'\nsource = 's'\n";
        let error =
            Facts::parse("device = []", links, "generation = {}\nframework = []").unwrap_err();
        assert_eq!(error, "`x`: no class `y`");
    }
}
