//! The software that plans are exported to, a file each.

mod accelerate;
mod deepspeed;
mod fsdp2;
mod jax;
mod megatron;
mod python;
mod torchtitan;

use crate::model::ModelShape;
use crate::names;
use crate::recompute::Recomputed;
use crate::summary::{Degrees, Subject, Summary};
use crate::{ExportError, File, NotExpressed, Read};
use frameworks::{Framework, Vocabulary};
use ir::plan::ScheduleKind;
use ir::{Graph, Optimizer};
use serde::Serialize;

/// Software that a plan can be exported to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Target {
    /// Megatron-LM on Megatron-Core.
    MegatronCore,
    /// DeepSpeed.
    #[serde(rename = "deepspeed")]
    DeepSpeed,
    /// torchtitan.
    #[serde(rename = "torchtitan")]
    TorchTitan,
    /// PyTorch's `fully_shard` and DTensor.
    Fsdp2,
    /// Hugging Face's accelerate.
    Accelerate,
    /// JAX.
    Jax,
}

impl Target {
    /// All of them.
    pub const ALL: [Target; 6] = [
        Target::MegatronCore,
        Target::DeepSpeed,
        Target::TorchTitan,
        Target::Fsdp2,
        Target::Accelerate,
        Target::Jax,
    ];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Target::MegatronCore => "megatron-core",
            Target::DeepSpeed => "deepspeed",
            Target::TorchTitan => "torchtitan",
            Target::Fsdp2 => "fsdp2",
            Target::Accelerate => "accelerate",
            Target::Jax => "jax",
        }
    }

    /// Name in sentences.
    pub fn title(self) -> &'static str {
        match self {
            Target::MegatronCore => "Megatron-Core",
            Target::DeepSpeed => "DeepSpeed",
            Target::TorchTitan => "torchtitan",
            Target::Fsdp2 => "PyTorch FSDP2",
            Target::Accelerate => "accelerate",
            Target::Jax => "JAX",
        }
    }

    /// The target of a name.
    pub fn named(name: &str) -> Option<Target> {
        Target::ALL.into_iter().find(|t| t.name() == name)
    }

    /// Names what it has not, where it has no model like this one, whose forward graph is given: `no model of
    /// the family gpt2`, `no flags for this model`. Those that train what a script brings have all.
    pub fn lacks(self, forward: &Graph, sequence: u64) -> Option<String> {
        let shape = || ModelShape::of(forward, sequence);
        match self {
            Target::TorchTitan if torchtitan::model_of(&forward.name).is_none() => {
                Some(format!("no model of the family {}", forward.name))
            }
            Target::TorchTitan => {
                let has = shape().is_some_and(|m| m.window.is_none());
                (!has).then(|| "no model like this one".into())
            }
            Target::MegatronCore => {
                let has = shape().is_some_and(|m| megatron::mlp(&m).is_ok());
                (!has).then(|| "no flags for this model".into())
            }
            Target::Fsdp2 if names::block_class(&forward.name).is_none() => {
                Some(format!("no names of the family {}", forward.name))
            }
            Target::DeepSpeed | Target::Fsdp2 | Target::Accelerate | Target::Jax => None,
        }
    }

    /// The framework that it belongs to, whose vocabulary says what can be expressed.
    pub fn framework(self) -> Framework {
        match self {
            Target::MegatronCore => Framework::MegatronCore,
            // accelerate drives DeepSpeed or PyTorch, by the plan.
            Target::DeepSpeed | Target::Accelerate => Framework::DeepSpeed,
            Target::TorchTitan => Framework::TorchTitan,
            Target::Fsdp2 => Framework::Fsdp2,
            Target::Jax => Framework::Jax,
        }
    }

    pub(crate) fn write(self, read: &Read<'_>) -> Result<Written, ExportError> {
        match self {
            Target::MegatronCore => megatron::write(read),
            Target::DeepSpeed => deepspeed::write(read),
            Target::TorchTitan => torchtitan::write(read),
            Target::Fsdp2 => fsdp2::write(read),
            Target::Accelerate => accelerate::write(read),
            Target::Jax => jax::write(read),
        }
    }
}

/// Where tensor ranks there are, how their tensors lie is said in the file itself or in the model's
/// code; without any, a layer that is split over ranks all the same is not as in the plan.
pub(crate) fn placed_elsewhere(d: &Degrees) -> &'static [Subject] {
    match d.tensor {
        1 => &[],
        _ => &[Subject::Placement],
    }
}

/// Lists copies of states on context ranks, where a target always splits them over these too.
pub(crate) fn split_over_context(d: &Degrees, missing: &mut Missing) {
    if d.zero > 0 && d.context_sharded < d.context {
        missing.add(
            "states",
            format!(
                "split over {}, with copies on context ranks",
                ir::counted(d.sharded, "data rank")
            ),
            format!("split over all {} context ranks too", d.context),
        );
    }
}

/// The outcome of writing for a target.
pub(crate) struct Written {
    pub files: Vec<File>,
    pub not_expressed: Vec<NotExpressed>,
    pub choices: Choices,
}

/// The choices that the files make, which may differ from the plan's.
#[derive(Clone, Debug)]
pub(crate) struct Choices {
    pub zero: u8,
    pub schedule: ScheduleKind,
    /// The recomputation of each block.
    pub recompute: Vec<Recomputed>,
    /// Whether stages are as the plan has them; otherwise they are even.
    pub keeps_stages: bool,
}

impl Choices {
    /// The plan's.
    pub fn of(summary: &Summary) -> Choices {
        Choices {
            zero: summary.degrees.as_ref().map_or(0, |d| d.zero),
            schedule: summary.schedule,
            recompute: summary.recompute.clone(),
            keeps_stages: true,
        }
    }

    /// Takes 1F1B where a vocabulary has not the plan's schedule; whether it has.
    pub fn nearest_schedule(&mut self, summary: &Summary, v: &Vocabulary) -> bool {
        let has = v.has_schedule(summary.schedule);
        if !has {
            self.schedule = ScheduleKind::OneFOneB;
        }
        has
    }

    /// The one recomputation of all blocks.
    pub fn uniform(&self) -> Option<&Recomputed> {
        let first = self.recompute.first()?;
        self.recompute.iter().all(|r| r == first).then_some(first)
    }

    /// The pins that ask `compile` for these choices.
    pub fn pins(&self, summary: &Summary, d: &Degrees) -> Vec<String> {
        let mut pins = vec![
            format!("data={}", d.data),
            format!("tensor={}", d.tensor),
            format!("pipeline={}", d.pipeline),
            format!("zero={}", self.zero),
            format!("microbatch={}", d.micro_batch * u64::from(d.data)),
        ];
        if d.expert > 1 && u64::from(d.data).is_multiple_of(u64::from(d.expert)) {
            pins.push(format!("expert={}", d.expert));
        }
        if self.zero > 0 && d.sharded < d.data {
            pins.push(format!("replicas={}", d.data / d.sharded.max(1)));
        }
        if d.context > 1 {
            pins.push(format!("context={}", d.context));
        }
        match self.schedule {
            ScheduleKind::Interleaved { virtual_stages } => {
                pins.push(format!("virtual={virtual_stages}"));
            }
            kind => pins.push(format!("schedule={}", kind.name())),
        }
        let counts = summary.stages.as_ref().filter(|_| self.keeps_stages);
        if let Some(stages) = counts.filter(|s| s.len() > 1) {
            let counts = stages.iter().map(|s| {
                let n = s.blocks.1 + u64::from(s.embed) + u64::from(s.head);
                n.to_string()
            });
            pins.push(format!("split={}", counts.collect::<Vec<_>>().join("/")));
        }
        pins.extend(self.recompute_pins());
        if !summary.offload.is_empty() {
            let spaces = ir::offload::describe_spaces(&summary.offload);
            pins.push(format!("offload={spaces}"));
        }
        pins
    }
}

impl Choices {
    /// The pins of what is recomputed; none where blocks differ otherwise than by all or nothing.
    fn recompute_pins(&self) -> Vec<String> {
        let none = "recompute=none".to_string();
        match self.uniform() {
            Some(Recomputed::None) => vec![none],
            Some(Recomputed::Selective) => vec!["recompute=selective".into()],
            Some(Recomputed::Full) => vec!["recompute=full".into()],
            Some(Recomputed::Ops(ops)) => {
                let pin = |op: &String| format!("recompute:{}=yes", op.replace("{}", "h.*"));
                ops.iter().map(pin).chain([none]).collect()
            }
            None => {
                let blocks = || self.recompute.iter().enumerate();
                let by_block =
                    |(_, r): (usize, &Recomputed)| matches!(r, Recomputed::None | Recomputed::Full);
                if !blocks().all(by_block) {
                    return Vec::new();
                }
                let full = blocks().filter(|(_, r)| **r == Recomputed::Full);
                let pins = full.map(|(i, _)| format!("recompute:h.{i}.*=yes"));
                pins.chain([none]).collect()
            }
        }
    }
}

/// The list of what is not expressed, as it is found.
#[derive(Default)]
pub(crate) struct Missing(Vec<NotExpressed>);

impl Missing {
    pub fn add(
        &mut self,
        place: impl Into<String>,
        what: impl Into<String>,
        instead: impl Into<String>,
    ) {
        let new = NotExpressed {
            what: what.into(),
            place: place.into(),
            instead: instead.into(),
        };
        if !self.0.contains(&new) {
            self.0.push(new);
        }
    }

    /// Adds the deviations of the plan from its summary, but those about `but`.
    pub fn add_deviations(&mut self, summary: &Summary, but: &[Subject]) {
        let those = summary.deviations.iter();
        for d in those.filter(|d| !but.contains(&d.subject)) {
            self.add(&d.place, &d.what, &d.stated);
        }
    }

    /// Adds that the script, not the file, makes the optimizer, and which one; `to` says what it does
    /// with it.
    pub fn add_optimizer(&mut self, summary: &Summary, to: &str) {
        let decay = |weight_decay: f64| match weight_decay {
            0.0 => "no weight decay".to_string(),
            w => format!("weight decay {w} of parameters with two or more dims"),
        };
        let what = match summary.optimizer {
            Optimizer::AdamW {
                beta1,
                beta2,
                eps,
                weight_decay,
            } => format!(
                "AdamW with betas {beta1} and {beta2}, eps {eps:e}, {}",
                decay(weight_decay)
            ),
            Optimizer::Sgd {
                momentum,
                weight_decay,
            } => format!("SGD with momentum {momentum}, {}", decay(weight_decay)),
        };
        let instead = format!("nothing: the script makes it, with its learning rate, and {to}");
        self.add("the optimizer", what, instead);
    }

    /// All of it. What is said alike of equal layers that do not follow each other is said once.
    pub fn list(self) -> Vec<NotExpressed> {
        let mut folded: Vec<(NotExpressed, Vec<String>)> = Vec::new();
        for n in self.0 {
            let (name, layers) = match n.place.split_once(" of ") {
                Some((name, layers)) => (name.to_string(), vec![layers.to_string()]),
                None => (n.place.clone(), Vec::new()),
            };
            let one = NotExpressed { place: name, ..n };
            match folded.iter_mut().find(|(f, l)| *f == one && !l.is_empty()) {
                Some((_, all)) if !layers.is_empty() => all.extend(layers),
                _ => folded.push((one, layers)),
            }
        }
        let joined = |(one, layers): (NotExpressed, Vec<String>)| match layers.is_empty() {
            true => one,
            false => NotExpressed {
                place: format!("{} of {}", one.place, layers.join(", ")),
                ..one
            },
        };
        folded.into_iter().map(joined).collect()
    }
}

/// The degrees, or the failure that says why there are none.
pub(crate) fn degrees(summary: &Summary, target: Target) -> Result<&Degrees, ExportError> {
    let none = || ExportError::Inexpressible {
        target,
        reasons: match summary.obstacles.is_empty() {
            true => vec!["no layer has degrees".into()],
            false => summary.obstacles.clone(),
        },
    };
    summary.degrees.as_ref().ok_or_else(none)
}

/// The failure of a plan that a target cannot express for one reason.
pub(crate) fn inexpressible(target: Target, reason: impl Into<String>) -> ExportError {
    ExportError::Inexpressible {
        target,
        reasons: vec![reason.into()],
    }
}

/// The failure of a model that a target has not.
pub(crate) fn unknown(target: Target, reason: impl Into<String>) -> ExportError {
    ExportError::Model {
        target,
        reason: reason.into(),
    }
}

/// A first line for every file: what it is of, and that it was made.
pub(crate) fn origin(summary: &Summary, target: Target) -> String {
    let d = summary.degrees.as_ref();
    let degrees = d.map_or("degrees that differ by layer".to_string(), degree_words);
    format!(
        "{} for {}, by `meshwright export`: {} on {}.",
        summary.name,
        target.title(),
        degrees,
        ir::counted(summary.devices, "device")
    )
}

/// The degrees in words: `data 4, tensor 2, pipeline 2`.
pub(crate) fn degree_words(d: &Degrees) -> String {
    let copies = match d.zero {
        0 => 1,
        _ => d.data / d.sharded.max(1),
    };
    let all = [
        ("data", d.data),
        ("replicas", copies),
        ("context", d.context),
        ("tensor", d.tensor),
        ("pipeline", d.pipeline),
        ("expert", d.expert),
    ];
    let some = all.iter().filter(|(name, n)| *n > 1 || *name == "data");
    let some: Vec<String> = some.map(|(name, n)| format!("{name} {n}")).collect();
    some.join(", ")
}

/// Neighbouring blocks that recompute alike: first, count, what.
pub(crate) fn recompute_runs(blocks: &[Recomputed]) -> Vec<(usize, usize, &Recomputed)> {
    let mut runs: Vec<(usize, usize, &Recomputed)> = Vec::new();
    for (i, what) in blocks.iter().enumerate() {
        match runs.last_mut() {
            Some((_, n, last)) if *last == what => *n += 1,
            _ => runs.push((i, 1, what)),
        }
    }
    runs
}

/// Names blocks: `block 3`, or `blocks 0 to 11`.
pub(crate) fn block_name(first: usize, count: usize) -> String {
    match count {
        1 => format!("block {first}"),
        n => format!("blocks {first} to {}", first + n - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Degrees of which states are split over 4 data ranks and so many context ranks.
    fn degrees(zero: u8, context_sharded: u32) -> Degrees {
        Degrees {
            data: 4,
            sharded: 4,
            context_sharded,
            zero,
            tensor: 1,
            context: 2,
            context_attention: None,
            zigzag: true,
            expert: 1,
            expert_tensor: 1,
            pipeline: 1,
            virtual_stages: 1,
            sequence_parallel: false,
            micro_batch: 1,
        }
    }

    #[test]
    fn what_is_said_of_equal_layers_is_said_once() {
        let mut missing = Missing::default();
        for layers in ["h.0 to h.4", "h.6 to h.10", "h.12"] {
            for name in ["attn.q.weight", "attn.k.weight"] {
                missing.add(format!("{name} of {layers}"), "split", "whole");
            }
        }
        missing.add("attn.q.weight of h.5", "split otherwise", "whole");
        missing.add("experts", "split", "whole");
        let places: Vec<String> = missing.list().into_iter().map(|n| n.place).collect();
        assert_eq!(
            places,
            [
                "attn.q.weight of h.0 to h.4, h.6 to h.10, h.12",
                "attn.k.weight of h.0 to h.4, h.6 to h.10, h.12",
                "attn.q.weight of h.5",
                "experts"
            ]
        );
    }

    #[test]
    fn copies_on_context_ranks_are_listed() {
        let listed = |d: &Degrees| {
            let mut missing = Missing::default();
            split_over_context(d, &mut missing);
            missing.list()
        };
        let copies = listed(&degrees(1, 1));
        assert_eq!(
            copies[0].what,
            "split over 4 data ranks, with copies on context ranks"
        );
        assert_eq!(copies[0].instead, "split over all 2 context ranks too");
        assert!(listed(&degrees(1, 2)).is_empty() && listed(&degrees(0, 1)).is_empty());
        assert!(degrees(1, 1).has_copies() && !degrees(1, 2).has_copies());
    }
}
