//! Behaviours of single recipes of a framework's releases: facts with sources, in
//! `data/recipes.toml`. They are what a column would say if the table had it; no figure is
//! fitted here.

use crate::exceptions;
use crate::layout::{self, Layout};
use crate::row::Row;
use ir::DType;
use serde::Deserialize;

/// A recipe of some releases, and what it does beyond what its framework's generation does.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Recipe {
    framework: String,
    /// Parts of the model's cell; any model where there are none.
    #[serde(default)]
    model: Texts,
    /// How the GPU's cell begins; any GPU where there are none.
    #[serde(default)]
    gpu: Texts,
    /// The precision's cell, in small letters; any where there are none.
    #[serde(default)]
    precision: Texts,
    /// Releases, as the source's cell has them, or the model's.
    releases: Vec<String>,
    #[serde(default)]
    overlapped_dispatch: bool,
    #[serde(default)]
    dispatch_once_per_host: bool,
    /// Whether the work between the matmuls of experts is part of them.
    #[serde(default)]
    fused_experts: bool,
    /// Type in which gradients are summed over microbatches.
    #[serde(default)]
    sum_dtype: Option<DType>,
    /// Ops of a layer that are recomputed where the column is empty.
    #[serde(default)]
    recompute: Vec<String>,
    /// Matmuls that run in another type than the precision's, as options of the software name them.
    #[serde(default)]
    matmuls: Vec<String>,
    /// The first and the last blocks of the model, so many each, whose matmuls run in the activations'
    /// type.
    #[serde(default)]
    wide_ends: Option<[u64; 2]>,
    /// Layers of pipelines, in Megatron-Core's notation, each for as many stages as it has.
    #[serde(default)]
    layouts: Vec<String>,
    /// Its attention kernel, where that is not the generation's.
    #[serde(default)]
    attention: Option<String>,
    /// Whether collectives have registered buffers.
    #[serde(default)]
    registered_buffers: bool,
    source: String,
}

/// Multiprocessors that a collective with registered buffers holds: "6 SMs or fewer", the sums
/// in the switches (NVIDIA, "Enabling Fast Inference and Resilient Training with NCCL 2.27"); that
/// gathers hold no more is an assumption.
pub(crate) const REGISTERED: u32 = 6;

/// A text or a list of texts, of which one has to fit.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Texts {
    One(String),
    Any(Vec<String>),
}

impl Default for Texts {
    fn default() -> Texts {
        Texts::Any(Vec::new())
    }
}

impl Texts {
    fn all(&self) -> &[String] {
        match self {
            Texts::One(text) => std::slice::from_ref(text),
            Texts::Any(texts) => texts,
        }
    }

    /// Whether one of the texts fits, or there are none.
    fn fit(&self, fits: impl Fn(&str) -> bool) -> bool {
        let all = self.all();
        all.is_empty() || all.iter().any(|text| fits(text))
    }
}

/// All recipes.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipes {
    recipe: Vec<Recipe>,
}

impl Recipes {
    /// The file that comes with Meshwright.
    pub fn built_in() -> Recipes {
        Recipes::parse(include_str!("../data/recipes.toml"))
            .expect("the built-in data files are tested")
    }

    fn parse(text: &str) -> Result<Recipes, String> {
        let all: Recipes = toml::from_str(text).map_err(|e| e.to_string())?;
        for r in &all.recipe {
            r.check()?;
        }
        Ok(all)
    }

    /// The options of its software that the row's recipe switches on.
    pub fn options(&self, row: &Row) -> Vec<&'static str> {
        let own: Vec<&Recipe> = self.recipe.iter().filter(|r| r.is_of(row)).collect();
        let any = |is: fn(&Recipe) -> bool| own.iter().any(|r| is(r));
        let switches = [
            (any(|r| r.overlapped_dispatch), "overlapped-dispatch"),
            (any(|r| r.dispatch_once_per_host), "dispatch-once-per-host"),
            (any(|r| r.fused_experts), "fused-experts"),
            (any(|r| r.sum_dtype == Some(DType::Bf16)), "grads-bf16"),
            (any(|r| r.registered_buffers), "registered-buffers"),
        ];
        let on = switches.into_iter().filter(|(on, _)| *on);
        on.map(|(_, option)| option).collect()
    }

    /// Ops of a layer that the row's recipe recomputes, beside what its column says.
    pub fn recomputed(&self, row: &Row) -> Vec<&str> {
        let of = self.recipe.iter().filter(|r| r.is_of(row));
        of.flat_map(|r| &r.recompute).map(String::as_str).collect()
    }

    /// The options by which some matmuls of the row's recipe run in another type than the others, of a
    /// model with so many blocks.
    pub fn exceptions(&self, row: &Row, blocks: u64) -> Vec<String> {
        let own: Vec<&Recipe> = self.recipe.iter().filter(|r| r.is_of(row)).collect();
        let mut all = Vec::new();
        for [first, last] in own.iter().filter_map(|r| r.wide_ends) {
            let ranges = [(0, first), (blocks.saturating_sub(last), blocks)];
            let some = ranges.into_iter().filter(|(from, to)| from < to);
            all.extend(some.map(|(from, to)| format!("wide=h.[{from}-{}].*", to - 1)));
        }
        all.extend(own.iter().flat_map(|r| r.matmuls.clone()));
        all
    }

    /// The layers of each of `stages` that the row's recipe has, of `blocks` in all; none where it
    /// has no such layout.
    pub fn layout(&self, row: &Row, blocks: u64, stages: u64) -> Option<Layout> {
        let of = self.recipe.iter().filter(|r| r.is_of(row));
        let all = of.flat_map(|r| &r.layouts).filter_map(|l| layout::parse(l));
        let whole = |l: &Layout| l.counts.iter().sum::<u64>() == blocks + l.further + 2;
        let mut fitting = all.filter(|l| l.counts.len() as u64 == stages && whole(l));
        fitting.next()
    }

    /// The attention kernel that the row's recipe names.
    pub fn attention(&self, row: &Row) -> Option<&str> {
        let mut of = self.recipe.iter().filter(|r| r.is_of(row));
        of.find_map(|r| r.attention.as_deref())
    }

    /// All attention kernels that are named.
    pub fn attentions(&self) -> impl Iterator<Item = &str> {
        self.recipe.iter().filter_map(|r| r.attention.as_deref())
    }
}

impl Recipe {
    /// Says which text is missing, or would never fit.
    fn check(&self) -> Result<(), String> {
        let of = || match self.model.all() {
            [] => "of any model".to_string(),
            models => format!("of `{}`", models.join("`, `")),
        };
        if self.source.is_empty() {
            return Err(format!("a recipe {} has no source", of()));
        }
        let lists = [
            ("model", &self.model),
            ("gpu", &self.gpu),
            ("precision", &self.precision),
        ];
        for (key, texts) in lists {
            if texts.all().iter().any(String::is_empty) {
                let why = "leave the key out where it is of any";
                return Err(format!("a recipe {}: a `{key}` is empty; {why}", of()));
            }
        }
        if self.releases.is_empty() || self.releases.iter().any(String::is_empty) {
            return Err(format!(
                "a recipe {} names no release, or an empty one",
                of()
            ));
        }
        if let Some(wrong) = self.layouts.iter().find(|l| layout::parse(l).is_none()) {
            return Err(format!("a recipe {}: `{wrong}` is no layout", of()));
        }
        for option in &self.matmuls {
            if exceptions::read(option)?.is_none() {
                return Err(format!("a recipe {}: `{option}` names no matmuls", of()));
            }
        }
        let upper = |p: &&String| p.chars().any(char::is_uppercase);
        match self.precision.all().iter().find(upper) {
            Some(p) => Err(format!("a recipe {}: `{p}` has capitals", of())),
            None => Ok(()),
        }
    }

    fn is_of(&self, row: &Row) -> bool {
        let cell = |column| row.text(column).unwrap_or("");
        let is_release = |r: &String| {
            cell("source").contains(&format!("({r} ")) || cell("model").contains(&format!("({r})"))
        };
        let precision = cell("precision").to_lowercase();
        cell("framework") == self.framework
            && self.model.fit(|text| cell("model").contains(text))
            && self.gpu.fit(|text| cell("gpu").starts_with(text))
            && self.precision.fit(|text| precision == text)
            && self.releases.iter().any(is_release)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recipe_is_of_one_model_on_one_device_in_some_releases() {
        let of = |source: &str, model: &str, gpu: &str, precision: &str| {
            let header = "framework,source,model,gpu,precision";
            let cells = format!("Megatron-Bridge/Megatron-Core,{source},{model},{gpu},{precision}");
            let table = crate::csv::parse(&format!("{header}\n{cells}\n")).unwrap();
            let options = Recipes::built_in().options(&crate::row::rows(&table)[0]);
            ["overlapped-dispatch", "dispatch-once-per-host"].map(|o| options.contains(&o))
        };
        let summary = |release: &str| format!("summary ({release} NeMo Container)");
        let qwen = |release: &str| of(&summary(release), "Qwen3_30B_a3B", "H100-80GB", "fp8");
        assert_eq!(qwen("25.11"), [true, false]);
        assert_eq!(qwen("26.02"), [true, true]);
        assert_eq!(qwen("26.04.01"), [false, true]);
        assert_eq!(qwen("27.01"), [false, false]);
        let table = "framework,source\nMegatron-Bridge/Megatron-Core,x (26.06 y)\n";
        let row = &crate::row::rows(&crate::csv::parse(table).unwrap())[0];
        assert_eq!(Recipes::built_in().options(row), ["grads-bf16"]);
        let oss = |gpu, precision| of(&summary("26.06"), "GPT OSS 120B", gpu, precision)[0];
        assert!(oss("GB300", "MXFP8") && !oss("GB300", "bf16") && !oss("B300", "mxfp8"));
    }

    #[test]
    fn a_recipe_keeps_some_matmuls_wide() {
        let of = |model: &str, precision: &str| {
            let header = "framework,source,model,gpu,precision";
            let cells =
                format!("Megatron-Bridge/Megatron-Core,x (26.06 y),{model},GB300,{precision}");
            let table = crate::csv::parse(&format!("{header}\n{cells}\n")).unwrap();
            Recipes::built_in().exceptions(&crate::row::rows(&table)[0], 88)
        };
        assert_eq!(
            of("Nemotron_3_Super", "nvfp4"),
            [
                "wide=h.[0-0].*",
                "wide=h.[74-87].*",
                "wide=h.mtp.*",
                "wide=h.*.attn.*",
                "wide=h.*.moe.latent_*",
                "mxfp8=h.*.mamba.out",
            ]
        );
        assert!(of("Nemotron_3_Nano", "nvfp4").is_empty());
        assert!(of("Nemotron_3_Super", "bf16").is_empty());
        let toml = "[[recipe]]\nframework='a'\nreleases=['1']\nsource='s'\nmatmuls=['mxfp8']";
        assert_eq!(
            Recipes::parse(toml).unwrap_err(),
            "a recipe of any model: `mxfp8` names no matmuls"
        );
    }

    #[test]
    fn keys_are_texts_or_lists_and_precisions_are_whole() {
        let parse = |keys: &str| {
            Recipes::parse(&format!(
                "[[recipe]]\nframework='a'\nreleases=['1']\nfused_experts=true\n{keys}\n"
            ))
        };
        let reads = |keys: &str, cells: &str| {
            let header = "framework,source,model,gpu,precision";
            let table = crate::csv::parse(&format!("{header}\na,x (1 y),{cells}\n")).unwrap();
            let recipes = parse(&format!("source='s'\n{keys}")).unwrap();
            recipes.options(&crate::row::rows(&table)[0]).len()
        };
        assert_eq!(reads("", "m,g,bf16"), 1);
        assert_eq!(reads("precision='fp8'", "m,g,FP8"), 1);
        assert_eq!(reads("precision='fp8'", "m,g,fp8-mx"), 0);
        assert_eq!(reads("precision=['bf16','fp8-mx']", "m,g,fp8-mx"), 1);
        assert_eq!(reads("model=['p','q']\ngpu='B'", "a q,B200,"), 1);
        assert_eq!(reads("model=['p','q']\ngpu=['A','GB']", "a q,B200,"), 0);
        let error = |keys: &str| parse(keys).unwrap_err();
        assert_eq!(
            error("model='b'\nsource=''"),
            "a recipe of `b` has no source"
        );
        assert_eq!(error("source=''"), "a recipe of any model has no source");
        assert_eq!(
            error("model=['b','c']\ngpu=['']\nsource='s'"),
            "a recipe of `b`, `c`: a `gpu` is empty; leave the key out where it is of any"
        );
        let upper = error("precision='FP8'\nsource='s'");
        assert_eq!(upper, "a recipe of any model: `FP8` has capitals");
        let layout = error("layouts=['Et|x']\nsource='s'");
        assert_eq!(layout, "a recipe of any model: `Et|x` is no layout");
    }
}
