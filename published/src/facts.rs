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
    interconnects: Vec<Interconnect>,
    frameworks: Vec<FrameworkFact>,
    generations: BTreeMap<String, Generation>,
}

/// What a `gpu` cell means.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceFact {
    /// How the cell begins.
    pub gpu: String,
    /// Device of the catalogue.
    pub device: String,
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
pub struct Interconnect {
    /// Part of the cell.
    pub text: String,
    /// Link of the catalogue inside a host or domain.
    pub inside: String,
    /// Link of the catalogue between hosts.
    pub between: String,
    /// Network cards of a host.
    pub cards: u32,
    /// Devices that the inner link joins where it reaches beyond a host.
    #[serde(default)]
    pub domain_devices: Option<u32>,
    /// Where this comes from.
    pub source: String,
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
    /// Bytes that the loss moves for each logit.
    pub loss_bytes_per_logit: f64,
    /// Axes whose collectives kernels wait for.
    pub blocking_axes: Vec<String>,
    /// Ops of a layer that are recomputed where the column says `selective`, beside those that
    /// cost next to nothing.
    #[serde(default)]
    pub selective: Vec<String>,
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
            loss_bytes_per_logit: self.loss_bytes_per_logit,
            matmul_dtype: None,
            blocking_axes: self.blocking_axes.clone(),
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
    interconnect: Vec<Interconnect>,
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
            frameworks: software.framework,
            generations: software.generation,
        })
    }

    /// Terms of the model of execution that [`Facts::without`] can leave out.
    pub const TERMS: [&str; 8] = [
        "tiles and waves",
        "sustained clocks",
        "unfused or slower attention",
        "elementwise traffic",
        "loss traffic",
        "host",
        "blocking collectives and transfers",
        "early reduction of gradients",
    ];

    /// The same without one of [`Facts::TERMS`]: what the term is worth is what predictions
    /// lose without it.
    pub fn without(mut self, term: &str) -> Facts {
        for device in &mut self.devices {
            match term {
                "tiles and waves" => device.multiprocessors = 0,
                "sustained clocks" => device.sustained_share = 1.0,
                _ => {}
            }
        }
        for g in self.generations.values_mut() {
            match term {
                "unfused or slower attention" => {
                    g.attention = AttentionKernel::Fused { rate: 1.0 };
                }
                "elementwise traffic" => g.elementwise_traffic = 1.0,
                "loss traffic" => g.loss_bytes_per_logit = 0.0,
                "host" => g.host_s_per_kernel = 0.0,
                "blocking collectives and transfers" => {
                    g.blocking_axes.clear();
                    g.blocking_transfers = false;
                }
                "early reduction of gradients" => g.overlapped_gradients = false,
                _ => {}
            }
        }
        self
    }

    /// The device of a row.
    pub fn device(&self, row: &Row) -> Result<&DeviceFact, Unmodelled> {
        let gpu = row.required("gpu")?;
        self.devices
            .iter()
            .find(|d| gpu.starts_with(&d.gpu))
            .ok_or_else(|| Unmodelled::Feature(format!("the device {gpu}")))
    }

    /// The links of a row.
    pub fn interconnect(&self, row: &Row) -> Result<&Interconnect, Unmodelled> {
        let text = row.required("interconnect")?;
        self.interconnects
            .iter()
            .find(|i| text.contains(&i.text))
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
        let catalogue = cost_model::presets::catalogue().unwrap();
        for device in &facts.devices {
            assert!(
                catalogue.devices().any(|d| d == device.device),
                "{}",
                device.device
            );
            assert!((0.5..=1.0).contains(&device.sustained_share) && !device.source.is_empty());
        }
        for i in &facts.interconnects {
            let known = |name: &str| catalogue.links().any(|l| l == name);
            assert!(known(&i.inside) && known(&i.between), "{}", i.text);
            assert!(!i.source.is_empty());
        }
        for (name, generation) in &facts.generations {
            assert!(["none", "selective", "full"].contains(&generation.recompute.as_str()));
            assert!(generation.zero <= 3 && !generation.source.is_empty());
            assert_eq!(generation.software(name).problems(), Vec::<String>::new());
        }
    }

    #[test]
    fn what_is_referred_to_has_to_be_there() {
        let frameworks = "generation = {}\n[[framework]]\nname = 'x'\ngeneration = 'y'\n";
        let error = Facts::parse("device = []", "interconnect = []", frameworks).unwrap_err();
        assert_eq!(error, "`x`: no generation `y`");
    }
}
