//! Facts that the columns of a row do not say, as data: devices, links, and how a framework's
//! generation executes. The files in `data/` hold every figure with its source; a figure
//! belongs to a device, a class of links or a generation, never to a source or a row.

use crate::figures::{Figure, Found};
use crate::memory::MemoryFacts;
use crate::quantity::{self, MOST, MOST_OF_A_GENERATION};
use crate::recipes::Recipes;
use crate::row::Row;
use crate::{Unmodelled, cells, figures, names, network};
use cost_model::presets::{self, Catalogue, Parameters};
pub use frameworks::Split;
use frameworks::{AttentionKernel, Scaling, Software};
use ir::DType;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

/// All data files.
#[derive(Clone, Debug)]
pub struct Facts {
    devices: Vec<DeviceFact>,
    interconnects: Vec<Interconnect>,
    frameworks: Vec<FrameworkFact>,
    generations: BTreeMap<String, Generation>,
    /// The memory that processes hold on a device.
    pub memory: MemoryFacts,
    /// Behaviours of single recipes.
    pub recipes: Recipes,
    attention: BTreeMap<String, AttentionFact>,
    /// Fitted figures: of devices and links, which the catalogue has, and of software.
    parameters: Parameters,
    catalogue: Catalogue,
}

/// The device that a `gpu` cell means.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceFact {
    /// How the cell begins.
    pub gpu: String,
    /// Device of the catalogue.
    pub device: String,
    /// Whether its tensor cores are Blackwell's: 8-bit matmuls take operands in any layout, so
    /// that one copy with one scale serves forward and backward, and scales of 32 elements.
    #[serde(default)]
    pub any_layout: bool,
    /// Rate of attention kernels written for Ampere's instructions over the device's best,
    /// where it has newer ones.
    #[serde(default)]
    pub ampere_attention_share: Option<f64>,
    /// Most of them in a host, where the catalogue's systems have fewer.
    #[serde(default)]
    pub largest_host: Option<u32>,
    /// Where this comes from.
    pub source: String,
}

/// The network that an `interconnect` cell means.
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
    /// Hosts of a job from which on it runs with synchronous launches there, since it hangs else.
    #[serde(default)]
    pub synchronous_from_hosts: Option<u32>,
    /// Where this comes from.
    pub source: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FrameworkFact {
    name: String,
    #[serde(default)]
    gpu: Option<String>,
    /// Fewest GPUs of a run that it is about.
    #[serde(default)]
    gpus_at_least: Option<u64>,
    /// The first date, as year and month, of what it is about.
    #[serde(default)]
    from: Option<String>,
    generation: String,
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
    /// The most that is sharded under a pipeline, as a ZeRO level, where that is less than the
    /// column says.
    #[serde(default)]
    pub zero_in_pipeline: Option<u8>,
    /// Recomputation where the column is empty: none, selective or full.
    pub recompute: String,
    /// Type of activations where the column is empty.
    #[serde(default)]
    pub precision: Option<String>,
    /// Whether its matmuls of f32 operands run in TF32.
    #[serde(default)]
    pub tf32: bool,
    /// Chunks of layers per device where the column is empty.
    #[serde(rename = "virtual")]
    pub virtual_chunks: u64,
    /// Whether its published tables leave chunks out, so that an empty column says nothing.
    #[serde(default)]
    pub open_virtual: bool,
    /// How stages divide the layers.
    pub split: Split,
    /// Multiple of the vocabulary on every tensor rank that the framework pads to.
    pub vocab_multiple: u64,
    /// Its attention kernel.
    pub attention: String,
    /// Bytes that the loss moves for each logit.
    pub loss_bytes_per_logit: f64,
    /// Bytes that a norm and its gradients move over one kernel for each; 1 where absent.
    #[serde(default)]
    pub norm_traffic: Option<f64>,
    /// The same of rotary embeddings; elementwise traffic where absent.
    #[serde(default)]
    pub rotary_traffic: Option<f64>,
    /// Multiprocessors that a collective of the library holds.
    #[serde(default = "channels")]
    pub collective_multiprocessors: u32,
    /// Axes whose collectives kernels wait for.
    pub blocking_axes: Vec<String>,
    /// Ops of a layer that are recomputed where the column says `selective`, beside those that
    /// cost next to nothing.
    #[serde(default)]
    pub selective: Vec<String>,
    /// Whether context ranks hold an early and a late part of the sequence each.
    #[serde(default)]
    pub balanced_context: bool,
    /// Whether gradients are reduced as soon as they are made.
    pub overlapped_gradients: bool,
    /// Whether parameters are gathered ahead of the layer that needs them.
    #[serde(default)]
    pub prefetched_parameters: bool,
    /// Whether tensors that are gathered for matmuls travel in their type.
    #[serde(default)]
    pub narrow_gathers: bool,
    /// How `fp8` is scaled where the cell names no recipe.
    #[serde(default)]
    pub fp8_scaling: Scaling,
    /// Rate of its matmul with a scale for each row over that with one for all.
    #[serde(default)]
    pub rowwise_share: Option<f64>,
    /// Whether operands are cast once and kept.
    #[serde(default)]
    pub kept_casts: bool,
    /// Types of matmuls whose tensor gathers do not move piece by piece.
    #[serde(default)]
    pub whole_gathers_of: Vec<DType>,
    /// Axes over whose gathers and scatters a tensor is copied once more.
    #[serde(default)]
    pub copied_axes: Vec<String>,
    /// Seconds in which the host copies the part of one rank there, where it does so rank by rank.
    #[serde(default)]
    pub host_s_per_part: f64,
    /// Whether parameters are gathered for recomputation and once more for the gradients.
    #[serde(default)]
    pub gathers_again: bool,
    /// Axes over which gathers and scatters move piece by piece beside their matmul.
    #[serde(default)]
    pub piecewise_axes: Vec<String>,
    /// Whether chains of elementwise operations are one kernel each.
    #[serde(default)]
    pub fused_elementwise: bool,
    /// Axes whose collectives of the backward pass run beside a matmul of their own op.
    #[serde(default)]
    pub paired_axes: Vec<String>,
    /// Whether recomputing a layer runs all of its forward again.
    #[serde(default)]
    pub recomputes_to_the_end: bool,
    /// Whether gradients of f16 activations are summed in f16 over the microbatches of a step.
    #[serde(default)]
    pub sums_in_f16: bool,
    /// Whether the matmul of a parameter's gradient adds to the sum over microbatches.
    #[serde(default)]
    pub fused_gradient_sums: bool,
    /// Whether updated parameters are broadcast by each owner.
    #[serde(default)]
    pub broadcast_updates: bool,
    /// Element type in which sums of gradients travel.
    pub gradient_dtype: DType,
    /// Whether gradients of states with copies meet those of the copies after every microbatch.
    #[serde(default)]
    pub copies_meet_at_once: bool,
    /// Where this is stated.
    pub source: String,
}

/// The multiprocessors that NCCL holds for a large collective where nothing else is said: "16 SMs
/// or more" (NVIDIA,
/// "Enabling Fast Inference and Resilient Training with NCCL 2.27", 2025), an assumption for the
/// releases before.
fn channels() -> u32 {
    CHANNELS
}

/// See [`channels`].
pub(crate) const CHANNELS: u32 = 16;

/// A family of attention kernels.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionFact {
    /// Passes over the scores outside of the products, forward and backward; absent where the
    /// scores stay on the chip.
    #[serde(default)]
    pub passes: Option<[f64; 2]>,
    /// Rates forward and backward over the family's, where the scores stay on the chip.
    #[serde(default)]
    pub rates: Option<[f64; 2]>,
    /// Whether it is written for Ampere's instructions, whatever the device has.
    #[serde(default)]
    pub ampere: bool,
    /// Where this is stated.
    pub source: String,
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
    attention: BTreeMap<String, AttentionFact>,
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
            include_str!("../data/parameters.toml"),
        )
        .expect("the built-in data files are tested")
    }

    /// Reads the four files; the error is the parser's, or names what is referred to and
    /// missing.
    pub fn parse(
        devices: &str,
        interconnects: &str,
        frameworks: &str,
        parameters: &str,
    ) -> Result<Facts, String> {
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
        let catalogue = presets::catalogue().map_err(|e| e.to_string())?;
        let own = Parameters::parse(parameters, &quantity::ALL)?;
        let facts = Facts {
            devices: devices.device,
            interconnects: links.interconnect,
            frameworks: software.framework,
            generations: software.generation,
            memory: MemoryFacts::built_in(),
            recipes: Recipes::built_in(),
            attention: software.attention,
            parameters: catalogue.training().and(&own)?,
            catalogue: catalogue.clone(),
        };
        for (name, kernel) in &facts.attention {
            if kernel.source.is_empty() {
                return Err(format!("attention `{name}` has no source"));
            }
        }
        for name in facts.generations.keys() {
            facts.software(name)?;
        }
        for device in &facts.devices {
            facts.catalogue.device(&device.device)?;
            if let Some(x) = device.ampere_attention_share
                && !(x > 0.0 && x <= 1.0)
            {
                return Err(format!(
                    "`{}`: ampere_attention_share is {x}, expected more than 0, at most 1",
                    device.gpu
                ));
            }
        }
        for name in facts.recipes.attentions() {
            facts.attention(name)?;
        }
        let n = facts.figures().len();
        if n > MOST {
            return Err(format!("{n} fitted or chosen figures, more than {MOST}"));
        }
        for name in facts.generations.keys() {
            let fitted = facts.parameters.list().iter().filter(|p| p.is_fitted());
            let n = fitted.filter(|p| p.of.contains(name)).count();
            if n > MOST_OF_A_GENERATION {
                return Err(format!("generation `{name}`: {n} parameters"));
            }
        }
        Ok(facts)
    }

    /// Devices, links and systems, with the fitted figures of these facts.
    pub fn catalogue(&self) -> &Catalogue {
        &self.catalogue
    }

    /// The fitted figures.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// The same with other fitted figures; `parameters` has to be of the same things.
    pub fn with_parameters(mut self, parameters: Parameters) -> Facts {
        let catalogue = self.catalogue.with_training(&parameters);
        self.catalogue = catalogue.expect("the same devices had shares before");
        self.parameters = parameters;
        self
    }

    /// Rate of a matmul with a scale for each block over one with a scale for all, on a device.
    pub fn block_scaled_share(&self, device: &DeviceFact) -> f64 {
        self.parameters
            .value(quantity::BLOCK_SCALED_SHARE, &device.gpu)
            .unwrap_or(1.0)
    }

    /// Every figure that predictions of published runs rest on and that is fitted to measurements or
    /// chosen by hand: of devices, links and software, of collectives alone, and of memory.
    pub fn figures(&self) -> Vec<Figure> {
        let own = self.parameters.list().iter().map(Figure::of_parameter);
        let devices = self.devices.iter().map(|d| d.device.as_str()).collect();
        let hardware = figures::of_catalogue(&self.catalogue, &devices);
        let channels = Figure {
            name: "multiprocessors of a collective".into(),
            of: vec!["all generations".into()],
            unit: "multiprocessors".into(),
            values: vec![f64::from(channels())],
            bounds: None,
            found: Found::Hand,
            support: "\"16 SMs or more\" of NCCL 2.27, assumed of all releases".into(),
        };
        own.chain(hardware)
            .chain([channels])
            .chain(self.memory.figures())
            .collect()
    }

    /// The figures of a generation for the cost model. The error names what is missing.
    pub fn software(&self, name: &str) -> Result<Software, String> {
        let generation = self
            .generations
            .get(name)
            .ok_or_else(|| format!("no generation `{name}`"))?;
        let of = |quantity| self.parameters.required(quantity, name);
        Ok(Software {
            name: name.into(),
            attention: self.attention(&generation.attention)?,
            host_s_per_kernel: of(quantity::HOST_PER_KERNEL)?,
            elementwise_traffic: self
                .parameters
                .value(quantity::ELEMENTWISE_TRAFFIC, name)
                .unwrap_or(1.0),
            norm_traffic: generation.norm_traffic.unwrap_or(1.0),
            rotary_traffic: generation.rotary_traffic,
            loss_bytes_per_logit: generation.loss_bytes_per_logit,
            grouped_matmul_share: self
                .parameters
                .value(quantity::GROUPED_SHARE, name)
                .unwrap_or(1.0),
            fused_experts: false,
            overlapped_dispatch: false,
            dispatch_once_per_host: false,
            narrow: None,
            exceptions: Vec::new(),
            blocking_axes: generation.blocking_axes.clone(),
            overlapped_gradients: generation.overlapped_gradients,
            prefetched_parameters: generation.prefetched_parameters,
            narrow_gathers: generation.narrow_gathers,
            kept_casts: generation.kept_casts,
            copied_axes: generation.copied_axes.clone(),
            host_s_per_part: generation.host_s_per_part,
            gathers_again: generation.gathers_again,
            piecewise_axes: generation.piecewise_axes.clone(),
            broadcast_updates: generation.broadcast_updates,
            synchronous_launches: false,
            fused_elementwise: generation.fused_elementwise,
            paired_axes: generation.paired_axes.clone(),
            recomputes_to_the_end: generation.recomputes_to_the_end,
            sum_dtype: None,
            collective_multiprocessors: generation.collective_multiprocessors,
            fused_gradient_sums: generation.fused_gradient_sums,
            gradient_dtype: Some(generation.gradient_dtype),
            copies_meet_at_once: generation.copies_meet_at_once,
            memory: None,
        })
    }

    /// An attention kernel. The error names what is missing.
    pub fn attention(&self, name: &str) -> Result<AttentionKernel, String> {
        let fact = self
            .attention
            .get(name)
            .ok_or_else(|| format!("no attention `{name}`"))?;
        let of = |quantity| self.parameters.value(quantity, name).unwrap_or(1.0);
        Ok(match fact.passes {
            None => {
                let [forward, backward] = fact.rates.unwrap_or([1.0, 1.0]);
                AttentionKernel::Fused {
                    rate: forward * of(quantity::ATTENTION_RATE),
                    backward_share: backward / forward,
                }
            }
            Some([forward, backward]) => {
                let factor = of(quantity::ATTENTION_PASSES);
                AttentionKernel::Unfused {
                    forward_passes: factor * forward,
                    backward_passes: factor * backward,
                }
            }
        })
    }

    /// Whether an attention kernel is written for Ampere's instructions, whatever the device has.
    pub(crate) fn is_of_ampere(&self, name: &str) -> bool {
        self.attention.get(name).is_some_and(|fact| fact.ampere)
    }

    /// The generation of a name. The error names what is missing.
    pub(crate) fn generation_called(&self, name: &str) -> Result<&Generation, String> {
        let found = self.generations.get(name);
        found.ok_or_else(|| format!("no generation `{name}`"))
    }

    /// Names of all generations.
    pub fn generation_names(&self) -> impl Iterator<Item = &str> {
        self.generations.keys().map(String::as_str)
    }

    /// The device of the catalogue's name in full, if runs on it were published.
    pub(crate) fn device_called(&self, name: &str) -> Option<&DeviceFact> {
        let is_it = |d: &&DeviceFact| {
            let device = self.catalogue.device(&d.device);
            device.is_ok_and(|d| d.name == name)
        };
        self.devices.iter().find(is_it)
    }

    /// Whether a generation of this name is described.
    pub fn has_generation(&self, name: &str) -> bool {
        self.generations.contains_key(name)
    }

    /// The device of a row: the first entry that its cell begins with, or, where a word of the
    /// cell speaks against that one, the only entry of the same chip that nothing speaks against.
    pub fn device(&self, row: &Row) -> Result<&DeviceFact, Unmodelled> {
        let gpu = row.required("gpu")?;
        let catalogue = self.catalogue();
        let against = |d: &DeviceFact| {
            let device = catalogue.device(&d.device).map_err(Unmodelled::Cluster)?;
            Ok::<_, Unmodelled>(cells::against(gpu, &d.device, device))
        };
        let named = self
            .devices
            .iter()
            .find(|d| cells::begins_with(gpu, &d.gpu));
        let contradiction = named.map(against).transpose()?.flatten();
        if let (Some(found), None) = (named, &contradiction) {
            return Ok(found);
        }
        let chip = |name: &str| name.split(['-', ' ', '_']).next().unwrap_or("").to_string();
        let of_chip = self.devices.iter().filter(|d| chip(&d.gpu) == chip(gpu));
        let of_chip: Vec<&DeviceFact> = of_chip.collect();
        let mut others = Vec::new();
        for d in &of_chip {
            if against(d)?.is_none() {
                others.push(*d);
            }
        }
        if let [only] = others[..] {
            return Ok(only);
        }
        let contradiction = match (contradiction, of_chip.first()) {
            (None, Some(d)) => against(d)?,
            (found, _) => found,
        };
        let names = |list: Vec<&str>| list.join(", ");
        Err(Unmodelled::Feature(match contradiction {
            Some(words) => {
                let start = format!("{}-", chip(gpu).to_lowercase());
                let planned = catalogue.devices().filter(|d| d.starts_with(&start));
                format!(
                    "the device `{gpu}`: it says {words}; boards of {} with runs to rest on are {}, and `meshwright compile` plans for {}",
                    chip(gpu),
                    names(of_chip.iter().map(|d| d.gpu.as_str()).collect()),
                    names(planned.collect())
                )
            }
            None => {
                let all = || self.devices.iter().map(|d| d.gpu.as_str());
                let is_shortest = |gpu: &&str| !all().any(|g| g != *gpu && gpu.starts_with(g));
                format!(
                    "the device `{gpu}`; known are names that begin with {}",
                    names(all().filter(is_shortest).collect())
                )
            }
        }))
    }

    /// The links of a row.
    pub fn interconnect(&self, row: &Row) -> Result<&Interconnect, Unmodelled> {
        let text = row.required("interconnect")?;
        let cell = network::normal(text);
        let mut known = self.interconnects.iter();
        let found = known.find(|i| cell.contains(&network::normal(&i.text)));
        let found = found
            .ok_or_else(|| {
                let short = |i: &&Interconnect| !i.text.contains([' ', ';']);
                let known = self.interconnects.iter().filter(short);
                let known: Vec<&str> = known.map(|i| i.text.as_str()).collect();
                Unmodelled::Feature(format!(
                    "the interconnect `{text}`; known are texts with {}, or another one of published/data/interconnects.toml",
                    known.join(", ")
                ))
            })?;
        network::inside(text, found)?;
        Ok(found)
    }

    /// The generation of a row's framework, with its name.
    pub fn generation(&self, row: &Row) -> Result<(&str, &Generation), Unmodelled> {
        let name = row.required("framework")?;
        let (gpu, date) = (row.text("gpu"), row.text("date"));
        // The entry's name too: boards may be written in more than one order.
        let board = self.device(row).ok().map(|d| d.gpu.as_str());
        let gpus = row.count("gpus_total")?.unwrap_or(0);
        let matches = |f: &&FrameworkFact| {
            let begins = |prefix: &String| {
                let names = [gpu, board];
                names.iter().flatten().any(|g| g.starts_with(prefix))
            };
            // Dates begin with the year and the month, so they are ordered as text.
            let after = |from: &String| date.is_some_and(|d| d >= from.as_str());
            f.name == name
                && f.from.as_ref().is_none_or(after)
                && f.gpu.as_ref().is_none_or(begins)
                && f.gpus_at_least.is_none_or(|n| gpus >= n)
        };
        let fact = self.frameworks.iter().find(matches).ok_or_else(|| {
            let known: BTreeSet<&str> = self.frameworks.iter().map(|f| f.name.as_str()).collect();
            let mut known: Vec<&str> = known.into_iter().collect();
            let near = names::closest(name, known.iter().copied());
            // The nearest first.
            known.sort_by_key(|k| Some(*k) != near);
            Unmodelled::Feature(format!(
                "the framework `{name}`{}; known are {}",
                names::meant(near),
                known.join(", ")
            ))
        })?;
        Ok((&fact.generation, &self.generations[&fact.generation]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cost_model::presets::parameters;

    #[test]
    fn built_in_files_are_whole() {
        let facts = Facts::built_in();
        let catalogue = cost_model::presets::catalogue().unwrap();
        for device in &facts.devices {
            let known = catalogue.device(&device.device).unwrap();
            // What is predicted of a run rests on what training holds.
            assert!(known.sustained_share < 1.0 || !known.sustained_share_of.is_empty());
            assert!(known.multiprocessors > 0 && !device.source.is_empty());
        }
        let is_link = |name: &str| catalogue.links().any(|l| l == name);
        for i in &facts.interconnects {
            assert!(is_link(&i.inside) && is_link(&i.between), "{}", i.text);
            assert!(!i.source.is_empty());
        }
        for (name, generation) in &facts.generations {
            assert!(["none", "selective", "full"].contains(&generation.recompute.as_str()));
            if let Some(precision) = &generation.precision {
                assert!(["fp32", "fp16", "bf16"].contains(&precision.as_str()));
            }
            assert!(generation.zero <= 3 && !generation.source.is_empty());
            let software = facts.software(name).unwrap();
            let share = software.grouped_matmul_share;
            assert!(share > 0.0 && share <= 1.0, "{name}");
            let axes = [
                &software.blocking_axes,
                &software.copied_axes,
                &software.piecewise_axes,
                &software.paired_axes,
            ];
            for axis in axes.into_iter().flatten() {
                let pinned = ["data", "expert", "context", "tensor"];
                assert!(pinned.contains(&axis.as_str()), "{name}: {axis}");
            }
        }
    }

    #[test]
    fn every_parameter_is_of_something_that_there_is() {
        let facts = Facts::built_in();
        let catalogue = cost_model::presets::catalogue().unwrap();
        for p in facts.parameters.list() {
            assert!(!p.unit.is_empty() && !p.meaning.is_empty() && !p.of.is_empty());
            for name in &p.of {
                let known = match p.quantity.as_str() {
                    quantity::BLOCK_SCALED_SHARE => facts.devices.iter().any(|d| d.gpu == *name),
                    quantity::ELEMENTWISE_TRAFFIC
                    | quantity::HOST_PER_KERNEL
                    | quantity::GROUPED_SHARE => facts.generations.contains_key(name),
                    quantity::ATTENTION_RATE | quantity::ATTENTION_PASSES => {
                        facts.attention.contains_key(name)
                    }
                    parameters::LINK_SHARE => catalogue.links().any(|l| l == name),
                    _ => catalogue.devices().any(|d| d == name),
                };
                assert!(known, "`{}`: there is no {name}", p.name);
            }
        }
    }

    #[test]
    fn what_is_known_is_said_of_cells_that_are_not() {
        let facts = Facts::built_in();
        let text = "gpu,interconnect,framework\nP100,PCIe,Caffe\n";
        let row = crate::row::rows(&crate::csv::parse(text).unwrap()).remove(0);
        let said = facts.device(&row).unwrap_err().to_string();
        assert!(
            said.starts_with(
                "not supported: the device `P100`; known are names that begin with V100, A100, H100"
            ),
            "{said}"
        );
        // What begins with a shorter name need not be listed.
        assert!(!said.contains("V100-32GB"), "{said}");
        let said = facts.interconnect(&row).unwrap_err().to_string();
        assert!(said.contains("`PCIe`; known are texts with"), "{said}");
        assert!(said.contains(", NVLink4, "), "{said}");
        let said = facts.generation(&row).unwrap_err().to_string();
        assert!(said.contains("`Caffe`; known are "), "{said}");
        assert!(said.contains(", Megatron-LM, "), "{said}");
    }

    #[test]
    fn boards_are_told_apart_by_all_words_of_a_cell() {
        let facts = Facts::built_in();
        let of = |gpu: &str| {
            let text = format!("gpu\n{gpu}\n");
            let row = crate::row::rows(&crate::csv::parse(&text).unwrap()).remove(0);
            facts
                .device(&row)
                .map(|d| d.gpu.clone())
                .map_err(|e| e.to_string())
        };
        for (cell, gpu) in [
            ("A100", "A100"),
            ("A100-SXM4-80GB", "A100"),
            ("A100-SXM4-40GB", "A100-40GB"),
            ("A100 (40 GB)", "A100-40GB"),
            ("V100-SXM2-32GB", "V100-32GB"),
            ("H100-SXM5-80GB", "H100-80GB"),
            ("H100-96GB-HBM2e-500W (Grand Teton)", "H100-96GB-HBM2e"),
            ("H200-141GB-SXM", "H200"),
            ("B200-180GB", "B200"),
            ("GB300-288GB", "GB300"),
        ] {
            assert_eq!(of(cell).as_deref(), Ok(gpu), "{cell}");
        }
        let said = of("A100-PCIE-80GB").unwrap_err();
        assert!(
            said.contains("it says PCIe, and a100-sxm-80gb is no PCIe card")
                && said.contains("a100-pcie-80gb"),
            "{said}"
        );
        for cell in [
            "V100-PCIe-16GB",
            "H100-80GB PCIe",
            "H100-80GB NVL",
            "A100-64GB",
            "GH200-144GB",
            "A100-40GB MIG 1g.5gb",
            "A1000",
            "A100X",
        ] {
            assert!(of(cell).is_err(), "{cell}");
        }
    }

    #[test]
    fn names_that_may_have_been_meant_come_first() {
        let facts = Facts::built_in();
        let of = |name: &str| {
            let text = format!("framework\n{name}\n");
            let row = crate::row::rows(&crate::csv::parse(&text).unwrap()).remove(0);
            facts.generation(&row).unwrap_err().to_string()
        };
        for (name, near) in [
            ("torchtitan", "torchtitan FSDP2"),
            ("megatron lm", "Megatron-LM"),
            ("DeepSpeed", "DeepSpeed ZeRO-3"),
        ] {
            let said = of(name);
            let start = format!(
                "not supported: the framework `{name}` (did you mean `{near}`?); known are {near}, "
            );
            assert!(said.starts_with(&start), "{said}");
            assert_eq!(said.matches(", ").count(), 18, "{said}");
        }
        assert!(of("Caffe").contains("`Caffe`; known are DeepSpeed"));
    }

    #[test]
    fn what_is_referred_to_has_to_be_there() {
        let frameworks =
            "generation = {}\nattention = {}\n[[framework]]\nname = 'x'\ngeneration = 'y'\n";
        let parse = |devices: &str, frameworks: &str| {
            Facts::parse(devices, "interconnect = []", frameworks, "parameter = []").unwrap_err()
        };
        assert_eq!(parse("device = []", frameworks), "`x`: no generation `y`");
        let device = "[[device]]\ngpu = 'Z'\ndevice = 'z'\nsource = ''\n";
        let none = "generation = {}\nattention = {}\nframework = []\n";
        let said = parse(device, none);
        assert!(
            said.starts_with("there is no device `z`; devices are "),
            "{said}"
        );
    }
}
