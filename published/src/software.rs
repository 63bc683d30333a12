//! Software by name and version: what a plan is made for, and what a row of a table ran on, in one
//! form. `compile --for` and `predict` ask here for how it executes, so they say the same of the
//! same run.

use crate::facts::{DeviceFact, Facts};
use crate::row::Row;
use crate::{Unmodelled, cluster, exceptions, names, precision};
use frameworks::{
    AttentionKernel, Exception, Framework, Narrow, Profile, Scaling, Software, Split,
};
use ir::cluster::Cluster;
use ir::plan::MadeFor;
use ir::{DType, Precision, TrainSpec};
use serde::Deserialize;
use std::sync::LazyLock;

/// A version of some software.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Version {
    /// Name of the software.
    pub name: String,
    /// The version.
    pub version: String,
    /// The generation that says how it executes; none where no published run says so.
    #[serde(default)]
    pub generation: Option<String>,
    /// Date, as year and month, by which the process of its generation is chosen.
    #[serde(default)]
    pub since: Option<String>,
    /// Type in which sums of gradients travel unless an option says otherwise; that of the
    /// generation's runs where there is none.
    #[serde(default)]
    pub gradients: Option<DType>,
    /// The runs that its figures rest on.
    pub rests_on: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct VersionFile {
    software: Vec<Version>,
}

/// All versions, that which a name alone means before the others of the name.
static VERSIONS: LazyLock<Vec<Version>> = LazyLock::new(|| {
    let file: VersionFile = toml::from_str(include_str!("../data/software.toml"))
        .expect("the built-in data files are tested");
    file.software
});

/// The facts that come with Meshwright.
static FACTS: LazyLock<Facts> = LazyLock::new(Facts::built_in);

/// All versions, that which a name alone means before the others of the name.
pub fn versions() -> &'static [Version] {
    &VERSIONS
}

/// Behaviours that a run may switch on beside its version's, with what they are.
pub const OPTIONS: [(&str, &str); 19] = [
    (
        "async-tp",
        "gathers and scatters of tensor ranks beside their matmuls",
    ),
    (
        "overlapped-dispatch",
        "tokens travel to experts beside another microbatch",
    ),
    (
        "dispatch-once-per-host",
        "a token crosses the network once for each host",
    ),
    (
        "fused-experts",
        "activations are part of the matmuls of experts",
    ),
    (
        "grads-bf16",
        "gradients are summed over microbatches in bf16, and travel in it",
    ),
    (
        "grads-sent-bf16",
        "gradients are summed over microbatches as usual, and travel in bf16",
    ),
    (
        "synchronous-launches",
        "the host waits for every kernel (CUDA_LAUNCH_BLOCKING=1)",
    ),
    ("registered-buffers", "collectives have registered buffers"),
    (
        "no-tensor-overlap",
        "kernels wait for collectives of tensor ranks, but for those beside a weight's gradient",
    ),
    (
        "no-gradient-overlap",
        "gradients are reduced when all of them are made",
    ),
    (
        "no-parameter-overlap",
        "parameters are gathered when they are needed, not ahead",
    ),
    ("grads-f32", "gradients travel in f32"),
    ("fp8", "matmuls in eight bits, scaled as the version does"),
    (
        "fp8-cs",
        "the same with one scale for a tensor, of its own maximum",
    ),
    (
        "fp8-ds",
        "the same with one scale for a tensor, of earlier steps",
    ),
    ("fp8-row", "the same with a scale for each row"),
    ("fp8-sc", "the same with a scale for 128 elements"),
    ("mxfp8", "the same with a scale for 32 elements"),
    ("nvfp4", "matmuls in four bits"),
];

/// An option that names a kernel of attention begins so.
const ATTENTION: &str = "attention=";

/// Reads `NAME`, `NAME@VERSION` or `NAME@VERSION+OPTION+OPTION`.
///
/// The error says what is not known, and what is.
pub fn parse(text: &str) -> Result<MadeFor, String> {
    let mut parts = text.trim().split('+');
    let first = parts.next().unwrap_or_default();
    let (name, version) = match first.split_once('@') {
        Some((name, version)) => (name, Some(version)),
        None => (first, None),
    };
    let of_name: Vec<&Version> = VERSIONS.iter().filter(|v| v.name == name).collect();
    let Some(usual) = of_name.first() else {
        return Err(unknown_name(name));
    };
    let found = match version {
        None => usual,
        Some(version) => of_name
            .iter()
            .find(|v| v.version == version)
            .ok_or_else(|| {
                let all: Vec<&str> = of_name.iter().map(|v| v.version.as_str()).collect();
                format!(
                    "there is no version `{version}` of {name}; known are {}",
                    all.join(", ")
                )
            })?,
    };
    let options: Vec<String> = parts.map(str::to_string).collect();
    for option in &options {
        check_option(option)?;
    }
    Ok(MadeFor {
        name: found.name.clone(),
        version: found.version.clone(),
        options,
    })
}

/// Names that others have for software.
const OTHER_NAMES: [(&str, &str); 10] = [
    ("megatron", "megatron-core"),
    ("megatron-lm", "megatron-core"),
    ("mcore", "megatron-core"),
    ("megatron-bridge", "nemo"),
    ("fsdp", "fsdp2"),
    ("pytorch", "fsdp2"),
    ("dtensor", "fsdp2"),
    ("titan", "torchtitan"),
    ("maxtext", "jax"),
    ("zero", "deepspeed"),
];

fn unknown_name(name: &str) -> String {
    let known: Vec<&str> = Framework::ALL.iter().map(|f| f.name()).collect();
    let other = OTHER_NAMES.iter().find(|(n, _)| *n == name.to_lowercase());
    let near = match other {
        Some((_, known)) => Some(*known),
        None => names::closest(name, known.iter().copied()),
    };
    format!(
        "no software called `{name}` is known{}; plans are made for {}",
        names::meant(near),
        known.join(", ")
    )
}

fn check_option(option: &str) -> Result<(), String> {
    if let Some(name) = option.strip_prefix(ATTENTION) {
        return FACTS.attention(name).map(|_| ());
    }
    if exceptions::read(option)?.is_some() {
        return Ok(());
    }
    match OPTIONS.iter().any(|(name, _)| *name == option) {
        true => Ok(()),
        false => {
            let all: Vec<&str> = OPTIONS.iter().map(|(name, _)| *name).collect();
            let near = names::closest(option, all.iter().copied());
            Err(format!(
                "no software has the option `{option}`{}; known are {}, {ATTENTION}KERNEL, and wide=OPS, mxfp8=OPS and the like for ops whose matmuls run in another type",
                names::meant(near),
                all.join(", ")
            ))
        }
    }
}

/// The version that something is made for; none where it is not known.
pub fn version(made_for: &MadeFor) -> Option<&'static Version> {
    let is_it = |v: &&Version| v.name == made_for.name && v.version == made_for.version;
    VERSIONS.iter().find(is_it)
}

/// Names software in sentences: `Megatron-Core (2025)`; Meshwright's own runtime where there is none.
pub fn title(made_for: Option<&MadeFor>) -> String {
    let Some(made_for) = made_for else {
        return "Meshwright's own runtime".into();
    };
    let framework = Framework::named(&made_for.name);
    let name = framework.map_or(made_for.name.as_str(), |f| f.title());
    let options = made_for.options.iter().map(|o| format!(", {o}"));
    format!(
        "{name} ({}{})",
        made_for.version,
        options.collect::<String>()
    )
}

/// How the software executes what is trained on a cluster, by the facts that come with Meshwright.
///
/// The error says what is not known, or does not go together.
pub fn profile(
    made_for: &MadeFor,
    cluster: &Cluster,
    train: &TrainSpec,
) -> Result<Profile, String> {
    let title = title(Some(made_for));
    if cluster.pool.is_some() {
        return Err(format!(
            "{title} runs on GPUs, and {} has ranks on processors; name a cluster of GPUs, or plan for Meshwright's own runtime",
            cluster.name
        ));
    }
    if !cluster.is_equal() {
        return Err(format!(
            "plans for {title} are for devices of one kind, and {} has several; plan for Meshwright's own runtime",
            cluster.name
        ));
    }
    let device = FACTS.device_called(&cluster.device.name);
    let profile = FACTS.profile(made_for, device, train.precision)?;
    let has_rate = |dtype: &DType| cluster.device.peak_flops_per_s.contains_key(dtype);
    let without = profile.software.narrow_types().find(|d| !has_rate(d));
    match without {
        Some(dtype) => Err(format!(
            "{title} would compute in {}, for which {} states no rate",
            dtype.name(),
            cluster.device.name
        )),
        _ => Ok(profile),
    }
}

impl Facts {
    /// How software executes on a device; of a device that no run was published of, what belongs to
    /// devices is left out. `activations` is their precision.
    ///
    /// The error says what is not known.
    pub fn profile(
        &self,
        made_for: &MadeFor,
        device: Option<&DeviceFact>,
        activations: Precision,
    ) -> Result<Profile, String> {
        let unknown = || match parse(&made_for.to_string()) {
            Err(e) => e,
            Ok(_) => format!("{made_for} is not known"),
        };
        let version = version(made_for).ok_or_else(unknown)?;
        let framework = Framework::named(&version.name).ok_or_else(unknown)?;
        let Some(name) = &version.generation else {
            let mut software = of_xla(self)?;
            for option in &made_for.options {
                self.switch_on(option, &mut software, None, device)?;
            }
            return Ok(Profile {
                framework,
                software,
                split: Split::Layers,
            });
        };
        let generation = self.generation_called(name)?;
        let mut software = self.software(name)?;
        software.attention = self.attention_on(&generation.attention, device)?;
        software.memory = self.memory.process_of(
            name,
            activations.compute().name(),
            version.since.as_deref(),
            device.map(|d| d.gpu.as_str()),
        );
        if let Some(dtype) = version.gradients {
            software.gradient_dtype = Some(dtype);
        }
        // The script that is exported for FSDP2 waits for the last microbatch.
        software.copies_meet_at_once &= framework != Framework::Fsdp2;
        if generation.sums_in_f16 && activations.compute() == DType::F16 {
            software.sum_dtype = Some(DType::F16);
        }
        for option in &made_for.options {
            self.switch_on(option, &mut software, Some(generation), device)?;
        }
        Ok(Profile {
            framework,
            software,
            split: generation.split,
        })
    }

    /// Changes `software` to what an option does.
    fn switch_on(
        &self,
        option: &str,
        software: &mut Software,
        generation: Option<&crate::facts::Generation>,
        device: Option<&DeviceFact>,
    ) -> Result<(), String> {
        check_option(option)?;
        if let Some(name) = option.strip_prefix(ATTENTION) {
            software.attention = self.attention_on(name, device)?;
            return Ok(());
        }
        if let Some(excepted) = exceptions::read(option)? {
            let narrow = excepted
                .narrow
                .map(|narrow| self.narrow(narrow, generation, device));
            let ops = excepted.ops;
            software.exceptions.push(Exception { ops, narrow });
            return Ok(());
        }
        match option {
            "async-tp" => {
                software.blocking_axes.clear();
                software.piecewise_axes = vec!["tensor".into()];
            }
            "overlapped-dispatch" => software.overlapped_dispatch = true,
            "dispatch-once-per-host" => software.dispatch_once_per_host = true,
            "fused-experts" => software.fused_experts = true,
            "synchronous-launches" => software.synchronous_launches = true,
            "grads-bf16" => {
                software.sum_dtype = Some(DType::Bf16);
                software.gradient_dtype = Some(DType::Bf16);
            }
            "grads-sent-bf16" => software.gradient_dtype = Some(DType::Bf16),
            "no-tensor-overlap" => {
                // As Megatron-LM did before 2024, and does without --tp-comm-overlap.
                software.piecewise_axes.retain(|axis| axis != "tensor");
                software.blocking_axes = vec!["tensor".into()];
                software.paired_axes = vec!["tensor".into()];
            }
            "no-gradient-overlap" => software.overlapped_gradients = false,
            "no-parameter-overlap" => software.prefetched_parameters = false,
            "grads-f32" => software.gradient_dtype = None,
            "registered-buffers" => {
                software.collective_multiprocessors = crate::recipes::REGISTERED;
            }
            narrow => {
                let narrow = self.narrow(narrow, generation, device);
                if generation.is_some_and(|g| g.whole_gathers_of.contains(&narrow.dtype)) {
                    software.piecewise_axes.retain(|axis| axis != "tensor");
                }
                software.narrow_gathers &= narrow.is_gathered();
                software.narrow = Some(narrow);
            }
        }
        Ok(())
    }

    /// The type of matmuls that an option names, on a device.
    fn narrow(
        &self,
        option: &str,
        generation: Option<&crate::facts::Generation>,
        device: Option<&DeviceFact>,
    ) -> Narrow {
        let own = generation.map_or(Scaling::default(), |g| g.fp8_scaling);
        let (dtype, scaling) = narrow_type(option, own);
        let share = match scaling {
            Scaling::Row => generation.and_then(|g| g.rowwise_share),
            Scaling::Block32 => device.map(|d| self.block_scaled_share(d)),
            _ => None,
        };
        Narrow {
            dtype,
            scaling,
            share: share.unwrap_or(1.0),
        }
    }

    /// An attention kernel on a device. The error names what is missing.
    fn attention_on(
        &self,
        name: &str,
        device: Option<&DeviceFact>,
    ) -> Result<AttentionKernel, String> {
        let mut kernel = self.attention(name)?;
        let share = device.and_then(|d| d.ampere_attention_share);
        if let (AttentionKernel::Fused { rate, .. }, Some(share)) = (&mut kernel, share)
            && self.is_of_ampere(name)
        {
            *rate *= share;
        }
        Ok(kernel)
    }
}

/// Whether an option names a type of matmuls.
pub(crate) fn is_narrow(option: &str) -> bool {
    let all = [
        "fp8", "fp8-cs", "fp8-ds", "fp8-row", "fp8-sc", "mxfp8", "nvfp4",
    ];
    all.contains(&option)
}

/// The type of an option for matmuls, and how its operands are scaled; `own` is what the version
/// calls fp8.
fn narrow_type(option: &str, own: Scaling) -> (DType, Scaling) {
    match option {
        "fp8-cs" => (DType::F8e4m3, Scaling::Tensor),
        "fp8-ds" => (DType::F8e4m3, Scaling::Delayed),
        "fp8-row" => (DType::F8e4m3, Scaling::Row),
        "fp8-sc" => (DType::F8e4m3, Scaling::Block128),
        "mxfp8" => (DType::F8e4m3, Scaling::Block32),
        "nvfp4" => (DType::F4e2m1, Scaling::Block16),
        _ => (DType::F8e4m3, own),
    }
}

/// The option for a type of matmuls and its scaling.
fn option_of(dtype: DType, scaling: Scaling) -> &'static str {
    match (dtype, scaling) {
        (DType::F4e2m1, _) => "nvfp4",
        (_, Scaling::Tensor) => "fp8-cs",
        (_, Scaling::Delayed | Scaling::Block16) => "fp8-ds",
        (_, Scaling::Row) => "fp8-row",
        (_, Scaling::Block128) => "fp8-sc",
        (_, Scaling::Block32) => "mxfp8",
    }
}

/// JAX compiles a step as one program (XLA): elementwise chains are one kernel each, collectives run
/// beside kernels (the latency-hiding scheduler, on for GPUs since 2023), and the host issues the
/// step at once. Attention is cuDNN's (`jax.nn.dot_product_attention`). No published run says how far
/// that is from what it takes.
fn of_xla(facts: &Facts) -> Result<Software, String> {
    Ok(Software {
        attention: facts.attention("cudnn")?,
        fused_elementwise: true,
        overlapped_gradients: true,
        prefetched_parameters: true,
        collective_multiprocessors: crate::facts::CHANNELS,
        ..Software::plain("xla")
    })
}

/// The library by which a row's `notes` say that a token crosses the network once for each host, if any:
/// by its whole name, without a word before it that says that it was not in use.
fn moves_once(row: &Row) -> Option<&'static str> {
    let notes = row.text("notes").unwrap_or("").to_lowercase();
    let words: Vec<&str> = notes
        .split(|c: char| !c.is_alphanumeric())
        .filter(|w| !w.is_empty())
        .collect();
    let libraries = ["deepep", "hybridep"];
    words.iter().enumerate().find_map(|(i, word)| {
        let library = libraries.into_iter().find(|l| l == word)?;
        let mut before = words[..i].iter().rev();
        let before = before.find(|w| !["use", "using", "used", "of", "the"].contains(*w));
        let denies = |w: &&str| ["no", "not", "non", "without", "off"].contains(w);
        (!before.is_some_and(denies)).then_some(library)
    })
}

/// The part of what a plan is made for that was read from the words of a row's `notes`.
pub(crate) fn assumed(row: &Row) -> Option<String> {
    moves_once(row).map(|library| format!("dispatch={library}"))
}

/// The software that a row ran on, in the form that plans are made for it.
///
/// Fails where its framework, device or precision is not known.
pub fn of_row(row: &Row, facts: &Facts) -> Result<MadeFor, Unmodelled> {
    let (name, generation) = facts.generation(row)?;
    let device = facts.device(row)?;
    // Dates begin with the year and the month, so they are ordered as text.
    let date = row.text("date").unwrap_or("");
    let begun = |v: &&Version| v.since.as_deref().is_none_or(|since| since <= date);
    let own = || {
        VERSIONS
            .iter()
            .filter(|v| v.generation.as_deref() == Some(name))
    };
    // Of those that had begun the latest; where none had, the first there was.
    let latest = own().filter(begun).rev().max_by_key(|v| v.since.clone());
    let version = latest.or_else(|| own().min_by_key(|v| v.since.clone()));
    let version = version.ok_or_else(|| {
        Unmodelled::Feature(format!("the generation `{name}`, which no software is of"))
    })?;
    let mut options = Vec::new();
    if let Some((dtype, scaling)) = precision::types(row)?.matmul {
        let scaling = scaling.unwrap_or(generation.fp8_scaling);
        let scaling = cluster::scaling_of(row, device, scaling)?;
        options.push(option_of(dtype, scaling).to_string());
        let blocks = row.count("layers")?.unwrap_or(0);
        options.extend(facts.recipes.exceptions(row, blocks));
    }
    if let Some(kernel) = facts.recipes.attention(row) {
        options.push(format!("{ATTENTION}{kernel}"));
    }
    options.extend(facts.recipes.options(row).into_iter().map(String::from));
    // The column does not have it: torchtitan's notes say which runs overlap them.
    let notes = row.text("notes").unwrap_or("").to_lowercase();
    if notes.contains("async tp") || notes.contains("asynctp") {
        options.push("async-tp".into());
    }
    // Nor which library moves tokens to experts.
    let once = "dispatch-once-per-host";
    if moves_once(row).is_some() && !options.iter().any(|o| o == once) {
        options.push(once.into());
    }
    // What its generation's runs do, and the software does not unless it is asked to.
    let usual = version.gradients.unwrap_or(generation.gradient_dtype);
    let summed = options.iter().any(|o| o == "grads-bf16");
    if usual != generation.gradient_dtype && generation.gradient_dtype == DType::Bf16 && !summed {
        options.push("grads-sent-bf16".into());
    }
    if cluster::has_synchronous_launches(row, facts)? {
        options.push("synchronous-launches".into());
    }
    Ok(MadeFor {
        name: version.name.clone(),
        version: version.version.clone(),
        options,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_generation_is_software_and_every_name_has_a_version() {
        for v in versions() {
            assert!(Framework::named(&v.name).is_some(), "{}", v.name);
            let made_for = parse(&format!("{}@{}", v.name, v.version)).unwrap();
            let profile = FACTS.profile(&made_for, None, Precision::Bf16);
            assert_eq!(profile.unwrap().framework.name(), v.name);
            assert!(!v.rests_on.is_empty());
        }
        for f in Framework::ALL {
            assert!(
                versions().iter().any(|v| v.name == f.name()),
                "{}",
                f.name()
            );
        }
        for name in FACTS.generation_names() {
            let has = |v: &Version| v.generation.as_deref() == Some(name);
            assert!(versions().iter().any(has), "no software is of {name}");
        }
    }

    #[test]
    fn a_name_alone_means_its_first_version() {
        let made_for = parse("megatron-core").unwrap();
        assert_eq!(made_for.to_string(), "megatron-core@2025");
        assert_eq!(title(Some(&made_for)), "Megatron-Core (2025)");
        let made_for = parse("torchtitan@2024+async-tp+fp8-row").unwrap();
        assert_eq!(made_for.options, ["async-tp", "fp8-row"]);
        assert_eq!(title(None), "Meshwright's own runtime");
    }

    #[test]
    fn what_is_not_known_is_told_with_what_is() {
        let said = |text: &str| parse(text).unwrap_err();
        assert!(said("megatron").contains("did you mean `megatron-core`?"));
        assert!(said("horovod").contains("plans are made for megatron-core, "));
        assert_eq!(
            said("megatron-core@3"),
            "there is no version `3` of megatron-core; known are 2025, 2024, 2022, 2021"
        );
        assert!(said("fsdp2+asynctp").contains("did you mean `async-tp`?"));
        assert!(said("nemo+nvfp4+wide=").contains("name them by their paths"));
        assert!(said("nemo+nvfp4+wider=h.*").contains("wide=OPS"));
        assert!(said("nemo+attention=magic").contains("no attention `magic`"));
    }

    #[test]
    fn notes_name_what_moves_tokens_to_experts() {
        let of = |notes: &str| {
            let header = "framework,gpu,gpus_total,gpus_per_node,interconnect,precision,notes";
            let cells = "Megatron-Core,H100-80GB,8,8,NVLink4+NVSwitch,bf16";
            let text = format!("{header}\n{cells},{notes}\n");
            let row = crate::row::rows(&crate::csv::parse(&text).unwrap()).remove(0);
            of_row(&row, &FACTS).unwrap().options
        };
        let once = ["dispatch-once-per-host", "grads-sent-bf16"];
        assert_eq!(of("force-balanced; dispatcher DeepEP"), once);
        assert_eq!(of("HybridEP; DeepEP"), once);
        assert_eq!(of("no drops; DeepEP-v2"), once);
        for without in [
            "dispatcher A2A",
            "without DeepEP",
            "Not using DeepEP",
            "no HybridEP",
            "DeepEPs",
        ] {
            assert_eq!(of(without), once[1..], "{without}");
        }
    }

    #[test]
    fn options_change_how_it_executes() {
        let of = |text: &str| {
            let made_for = parse(text).unwrap();
            FACTS
                .profile(&made_for, None, Precision::Bf16)
                .unwrap()
                .software
        };
        let (plain, narrow) = (of("torchtitan"), of("torchtitan+fp8-row"));
        assert_eq!(
            (plain.narrow, narrow.narrow.map(|n| n.dtype)),
            (None, Some(DType::F8e4m3))
        );
        assert!(plain.narrow_gathers && !narrow.narrow_gathers);
        assert_eq!(plain.blocking_axes, ["tensor"]);
        assert!(of("torchtitan+async-tp").blocking_axes.is_empty());
        let summed = of("nemo+grads-bf16");
        let both = (summed.sum_dtype, summed.gradient_dtype);
        assert_eq!(both, (Some(DType::Bf16), Some(DType::Bf16)));
        let (usual, bare) = (
            of("megatron-core"),
            of(
                "megatron-core+no-tensor-overlap+no-gradient-overlap+no-parameter-overlap+grads-f32",
            ),
        );
        assert!(usual.overlapped_gradients && usual.prefetched_parameters);
        assert!(!bare.overlapped_gradients && !bare.prefetched_parameters);
        assert_eq!(
            (usual.blocking_axes.len(), bare.blocking_axes.len()),
            (0, 1)
        );
        assert_eq!(bare.piecewise_axes, ["context"]);
        // Megatron-LM sums and sends gradients in f32 unless it is asked not to.
        assert_eq!(
            (usual.gradient_dtype, bare.gradient_dtype),
            (Some(DType::F32), None)
        );
        let recipe = of("nemo+nvfp4+wide=h.[8-9].*+mxfp8=h.*.mamba.out");
        let of_op = |op: &str| recipe.narrow_of(op).map(|n| (n.dtype, n.scaling));
        assert_eq!(of_op("h.7.moe.up"), Some((DType::F4e2m1, Scaling::Block16)));
        assert_eq!(
            of_op("h.7.mamba.out"),
            Some((DType::F8e4m3, Scaling::Block32))
        );
        assert_eq!(of_op("grad.h.9.mamba.out.lhs"), None);
        let sent = of("megatron-core@2024+grads-sent-bf16");
        let both = (sent.sum_dtype, sent.gradient_dtype);
        assert_eq!(both, (None, Some(DType::Bf16)));
    }
}
