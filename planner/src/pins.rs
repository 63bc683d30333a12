//! Pins: what the user fixes before the search.
//!
//! A degree pin fixes the logical mesh (`data`, `tensor` axes, before them, where it is pinned,
//! `replica`, and between them `expert`, both a part of the ranks that split samples, and
//! `context`) and restricts which factors an axis may shard; `zero` restricts how parameters and
//! optimizer states lie over axes that do not shard them; a tensor pin fixes one tensor's spec;
//! `recompute` says which activations all layers recompute in the backward pass.

pub(crate) mod check;
pub(crate) mod inference;
mod kept;
pub(crate) mod whole;

use ir::offload::{Spaces, describe_spaces, parse_spaces};
use ir::plan::ScheduleKind;
use ir::training::Recompute;
use ir::{Precision, Task, TrainSpec};
use std::collections::BTreeMap;

/// The decisions that are fixed; everything else is searched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pins {
    /// Data-parallel degree: ranks that split the samples of a microbatch.
    pub data: Option<u32>,
    /// Copies of what a ZeRO level splits (HSDP, Zhao et al. 2023): of the ranks that split
    /// samples, how many hold the same parts. The copies are on the slowest links.
    pub replicas: Option<u32>,
    /// Expert-parallel degree: of the ranks that split samples, how many split the experts.
    pub expert: Option<u32>,
    /// Context-parallel degree: ranks that split the sequence, in attention too.
    pub context: Option<u32>,
    /// Whether the sequence is stored in zigzag order, so that all context ranks have as many
    /// keys to attend to.
    pub zigzag: bool,
    /// How the ranks of the context axis come to the keys and values of other ranks' tokens.
    pub context_attention: Option<ContextAttention>,
    /// Tensor-parallel degree: ranks that split features.
    pub tensor: Option<u32>,
    /// Pipeline degree: number of stages.
    pub pipeline: Option<u32>,
    /// ZeRO level, 0 to 3 (Rajbhandari et al. 2020): what ranks that hold the same parameter keep
    /// of it and its states, and below 3 that its uses find it where it lies.
    pub zero: Option<u8>,
    /// Samples per microbatch over the whole stage mesh.
    pub microbatch: Option<u64>,
    /// Number of layers of every stage, first stage first.
    pub split: Option<Vec<usize>>,
    /// Order of passes, one of [`ScheduleKind::NAMED`]; in a search for inference its own.
    pub schedule: Option<ScheduleKind>,
    /// Stages of every mesh, interleaved where there are several (Narayanan et al. 2021).
    pub virtual_stages: Option<u32>,
    /// Which activations all layers recompute; unless pinned, the search decides for each.
    pub recompute: Option<Recompute>,
    /// Ops for which that is fixed one by one; the last that matches counts.
    pub recompute_ops: Vec<RecomputePin>,
    /// Where classes of tensors rest, of all layers.
    pub offload: Option<Offload>,
    /// Tensors with a fixed spec.
    pub tensors: Vec<TensorPin>,
}

/// The way of attention on an axis whose ranks split the sequence in all other ops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContextAttention {
    /// Queries stay with their tokens; all keys and values are gathered for them (Llama 3,
    /// Grattafiori et al. 2024, section 3.3.2).
    Gather,
    /// An all-to-all brings each rank all tokens of some of the heads, and another one brings the
    /// result back (DeepSpeed-Ulysses, Jacobs et al. 2023).
    Ulysses,
    /// Queries stay with their tokens; keys and values go around the ranks, a shard at a time (ring
    /// attention, Liu et al. 2023).
    Ring,
}

impl ContextAttention {
    /// All of them.
    pub const ALL: [ContextAttention; 3] = [
        ContextAttention::Gather,
        ContextAttention::Ulysses,
        ContextAttention::Ring,
    ];

    /// The value of its pin.
    pub fn name(self) -> &'static str {
        match self {
            ContextAttention::Gather => "gather",
            ContextAttention::Ulysses => "ulysses",
            ContextAttention::Ring => "ring",
        }
    }
}

/// Which tensors rest in other memories than the device's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Offload {
    /// The fewest that make the plan fit.
    Search,
    /// These classes.
    Spaces(Spaces),
}

/// Forward ops whose results are recomputed, or kept, whatever [`Pins::recompute`] says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecomputePin {
    /// Path of the op, with `*` standing for any characters.
    pub op: String,
    /// Recomputed, or kept.
    pub recompute: bool,
}

impl RecomputePin {
    /// Whether the pin speaks of this op.
    pub fn matches(&self, path: &str) -> bool {
        ir::pattern::matches(&self.op, path)
    }
}

/// A tensor whose spec is fixed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorPin {
    /// Name of the value (an op's path, `:i` behind for results after the first), with `*`
    /// standing for any characters.
    pub value: String,
    /// For each dim the names of its axes, major first.
    pub dims: Vec<Vec<String>>,
}

impl TensorPin {
    /// Whether the pin speaks of this value.
    pub fn matches(&self, value: &str) -> bool {
        ir::pattern::matches(&self.value, value)
    }

    /// The pin as text, as [`Pins::parse`] reads it.
    pub fn describe(&self) -> String {
        let dim = |d: &Vec<String>| match d.is_empty() {
            true => "_".to_string(),
            false => d.join("+"),
        };
        let dims: Vec<String> = self.dims.iter().map(dim).collect();
        format!("spec:{}=[{}]", self.value, dims.join(","))
    }
}

/// The role of one mesh axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AxisRole {
    /// Anything: the search decides.
    Free,
    /// Splits samples only; states by the ZeRO level.
    Data,
    /// Splits samples only; every rank has a copy of the states, whatever the ZeRO level.
    Replica,
    /// Splits the experts where an op has them and samples elsewhere; states by the ZeRO level.
    Expert,
    /// Splits the sequence in all ops that have one, or the heads in attention and next to it;
    /// states by the ZeRO level.
    Context,
    /// Splits features (and the sequence between the matmuls), never samples.
    Tensor,
}

/// A pin that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("pin `{pin}`: {problem}")]
pub struct PinError {
    /// The pin as given.
    pub pin: String,
    /// The problem, and the accepted values.
    pub problem: String,
}

impl Pins {
    /// Reads pins of the forms `data=2`, `replicas=2`, `expert=2`, `context=2`, `context_attention=ulysses`, `tensor=4`, `pipeline=2`,
    /// `zero=1`, `microbatch=8`, `split=5/4/4/5` (layers of every stage), `schedule=gpipe`,
    /// `virtual=2`, `recompute=full`, `recompute:h.*.mlp.act=yes`, `offload=optimizer+activations:file`,
    /// `spec:h.*.attn.qkv.weight=[_,_,tensor,_]`; one argument may hold several, separated by
    /// spaces or, outside brackets, commas. The same key with two values is refused.
    pub fn parse<S: AsRef<str>>(texts: &[S]) -> Result<Pins, PinError> {
        let mut pins = Pins::default();
        let mut given: BTreeMap<String, String> = BTreeMap::new();
        for part in texts.iter().flat_map(|t| split(t.as_ref())) {
            pins.add(&part)?;
            let key = part.split('=').next().unwrap_or_default().to_string();
            if let Some(before) = given.insert(key, part.clone()).filter(|b| *b != part) {
                let problem = format!("contradicts `{before}`; give one of them");
                return Err(PinError { pin: part, problem });
            }
        }
        Ok(pins)
    }

    fn add(&mut self, pin: &str) -> Result<(), PinError> {
        let err = |problem: String| PinError {
            pin: pin.to_string(),
            problem,
        };
        let Some((key, value)) = pin.split_once('=') else {
            return Err(err("expected key=value".into()));
        };
        let degree = || match value.parse::<u32>() {
            Ok(n) if n >= 1 => Ok(n),
            _ => Err(err(format!("`{value}` is not a degree of 1 or more"))),
        };
        match key {
            "data" => self.data = Some(degree()?),
            "replicas" => self.replicas = Some(degree()?),
            "expert" => self.expert = Some(degree()?),
            "context" => self.context = Some(degree()?),
            "context_order" => match value {
                "zigzag" => self.zigzag = true,
                "natural" => self.zigzag = false,
                _ => {
                    return Err(err(format!(
                        "`{value}` is not an order of the sequence; zigzag and natural are"
                    )));
                }
            },
            "context_attention" => {
                let named = ContextAttention::ALL
                    .into_iter()
                    .find(|a| a.name() == value);
                self.context_attention = Some(named.ok_or_else(|| {
                    let names = ContextAttention::ALL.map(ContextAttention::name);
                    err(format!(
                        "`{value}` is no way of attention over context ranks; {} are",
                        names.join(", ")
                    ))
                })?);
            }
            "tensor" => self.tensor = Some(degree()?),
            "pipeline" => self.pipeline = Some(degree()?),
            "virtual" => self.virtual_stages = Some(degree()?),
            "zero" => match value.parse::<u8>() {
                Ok(level) if level <= 3 => self.zero = Some(level),
                _ => return Err(err(format!("`{value}` is not a ZeRO level, 0 to 3"))),
            },
            "microbatch" => match value.parse::<u64>() {
                Ok(n) if n >= 1 => self.microbatch = Some(n),
                _ => return Err(err(format!("`{value}` is not a number of samples"))),
            },
            "split" => {
                let counts: Result<Vec<usize>, _> = value.split('/').map(str::parse).collect();
                match counts {
                    Ok(counts) if counts.iter().all(|&n| n >= 1) => self.split = Some(counts),
                    _ => {
                        return Err(err(format!(
                            "`{value}` is not the layers of every stage, such as 5/4/4/5"
                        )));
                    }
                }
            }
            "schedule" => {
                let named = ScheduleKind::named(value);
                self.schedule = Some(named.ok_or_else(|| {
                    let names = ScheduleKind::NAMED.iter().map(|s| s.name());
                    err(format!(
                        "`{value}` is not a schedule; {} are, and virtual=N interleaves N stages on each mesh",
                        names.collect::<Vec<_>>().join(", ")
                    ))
                })?);
            }
            "recompute" => {
                let all = [Recompute::None, Recompute::Full, Recompute::Selective];
                let named = all.into_iter().find(|r| r.name() == value);
                self.recompute = Some(named.ok_or_else(|| {
                    err(format!(
                        "`{value}` is no choice of what is recomputed; none, full and selective are"
                    ))
                })?);
            }
            "offload" => {
                self.offload = Some(match value {
                    "search" => Offload::Search,
                    _ => Offload::Spaces(parse_spaces(value).map_err(err)?),
                });
            }
            _ => match key.split_once(':') {
                Some(("spec", name)) => self.tensors.push(tensor_pin(name, value).map_err(err)?),
                Some(("recompute", op)) => self.recompute_ops.push(RecomputePin {
                    op: op.to_string(),
                    recompute: match value {
                        "yes" => true,
                        "no" => false,
                        _ => return Err(err(format!("`{value}` is neither yes nor no"))),
                    },
                }),
                _ => {
                    return Err(err(format!(
                        "unknown key `{key}`; data, replicas, expert, context, context_order, context_attention, tensor, pipeline, zero, microbatch, split, schedule, virtual, recompute, recompute:OP, offload and spec:TENSOR are known"
                    )));
                }
            },
        }
        Ok(())
    }

    /// The pins as text, one each, in a fixed order.
    pub fn describe(&self) -> Vec<String> {
        let mut out = Vec::new();
        let mut degree = |name: &str, d: Option<u64>| out.extend(d.map(|d| format!("{name}={d}")));
        degree("data", self.data.map(u64::from));
        degree("replicas", self.replicas.map(u64::from));
        degree("expert", self.expert.map(u64::from));
        degree("context", self.context.map(u64::from));
        degree("tensor", self.tensor.map(u64::from));
        degree("pipeline", self.pipeline.map(u64::from));
        degree("zero", self.zero.map(u64::from));
        degree("microbatch", self.microbatch);
        if self.zigzag {
            out.push("context_order=zigzag".into());
        }
        out.extend(
            self.context_attention
                .map(|a| format!("context_attention={}", a.name())),
        );
        out.extend(self.split.as_ref().map(|counts| {
            let counts: Vec<String> = counts.iter().map(usize::to_string).collect();
            format!("split={}", counts.join("/"))
        }));
        out.extend(self.schedule.map(|s| format!("schedule={}", s.name())));
        out.extend(self.virtual_stages.map(|v| format!("virtual={v}")));
        out.extend(self.recompute.map(|r| format!("recompute={}", r.name())));
        for pin in &self.recompute_ops {
            let word = if pin.recompute { "yes" } else { "no" };
            out.push(format!("recompute:{}={word}", pin.op));
        }
        out.extend(self.offload.as_ref().map(|o| match o {
            Offload::Search => "offload=search".to_string(),
            Offload::Spaces(spaces) => format!("offload={}", describe_spaces(spaces)),
        }));
        out.extend(self.tensors.iter().map(TensorPin::describe));
        out
    }

    /// The order of passes that is planned for.
    pub fn schedule_kind(&self) -> ScheduleKind {
        let plain = self.schedule.unwrap_or_default();
        let several = self.virtual_stages.filter(|&v| v > 1);
        let interleaved = several.and_then(|v| plain.schedule().interleaved(v));
        interleaved.unwrap_or(plain)
    }

    /// Names of the axes of every stage's mesh, major first.
    pub fn axis_names(&self) -> Vec<&'static str> {
        if !self.fixes_mesh() {
            return vec!["x", "y"];
        }
        let mut names: Vec<&str> = self.replicas.map(|_| "replica").into_iter().collect();
        names.push("data");
        names.extend(self.expert.map(|_| "expert"));
        names.extend(self.context.map(|_| "context"));
        names.push("tensor");
        names
    }

    /// True when the degrees of parallelism inside a stage are fixed.
    pub fn fixes_mesh(&self) -> bool {
        let degrees = [
            self.data,
            self.replicas,
            self.expert,
            self.context,
            self.tensor,
        ];
        degrees.iter().any(Option::is_some)
    }

    /// Whether the results of the op at `path` are recomputed, where that is fixed.
    pub fn recomputes(&self, path: &str) -> Option<bool> {
        let pin = self.recompute_ops.iter().rfind(|p| p.matches(path));
        pin.map(|p| p.recompute)
    }

    /// Where the tensors of all layers rest.
    pub fn spaces(&self) -> Spaces {
        match &self.offload {
            Some(Offload::Spaces(spaces)) => spaces.clone(),
            Some(Offload::Search) | None => Spaces::new(),
        }
    }

    /// The spec pinned for a value, if any.
    pub fn tensor(&self, value: &str) -> Option<&TensorPin> {
        self.tensors.iter().find(|t| t.matches(value))
    }
}

/// How the uses of a parameter bring its gradient.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GradientUses {
    /// They cut the parameter along the sequence, as those of a table of positions do.
    pub(crate) is_cut: bool,
    /// They cast it, so that its gradient is rounded once it is summed.
    pub(crate) is_rounded: bool,
}

/// ZeRO placements that a level allows on an axis that does not shard the parameter.
pub(crate) fn zero_variants(
    level: Option<u8>,
    role: AxisRole,
    uses: GradientUses,
    train: &TrainSpec,
) -> Vec<ZeroVariant> {
    use ZeroVariant::*;
    let level = match role {
        AxisRole::Replica => Some(0),
        _ => level,
    };
    // Without gradients and moments a parameter alone can be split.
    if train.task == Task::Inference {
        return match (role, level) {
            (AxisRole::Tensor, _) | (_, Some(0..=2)) => vec![Whole],
            (_, Some(_)) => vec![Parameter],
            (_, None) => vec![Whole, Parameter],
        };
    }
    if role == AxisRole::Tensor {
        return vec![Whole, WholeDeferred];
    }
    let mixed = train.precision != Precision::F32;
    // A table of positions is cut along the sequence by its use, so its gradient is never a sum
    // over a context axis, and that of one that is cast is whole before it is rounded: ZeRO-1 cannot
    // leave them partial.
    let is_whole = uses.is_cut && role == AxisRole::Context || uses.is_rounded;
    match level {
        None => vec![
            Whole,
            WholeDeferred,
            OptimizerDeferred,
            Optimizer,
            Gradient,
            Parameter,
            MasterDeferred,
            Master,
        ],
        Some(0) => vec![Whole, WholeDeferred],
        Some(1) if mixed && is_whole => vec![MasterDeferred, Master],
        Some(1) if is_whole => vec![OptimizerDeferred, Gradient],
        Some(1) if mixed => vec![MasterDeferred],
        Some(1) => vec![OptimizerDeferred],
        Some(2) if mixed => vec![Master],
        Some(2) => vec![Gradient],
        Some(_) => vec![Parameter],
    }
}

/// ZeRO levels that a choice keeps to: those that, pinned, would leave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ZeroLevels(u8);

impl ZeroLevels {
    /// All levels: nothing is restricted.
    pub(crate) const ALL: ZeroLevels = ZeroLevels(0b1111);
    /// The level that moves parameters in the microbatches: ZeRO-3.
    pub(crate) const MOVING: ZeroLevels = ZeroLevels(0b1000);

    /// The levels that leave a variant on an axis of this role.
    pub(crate) fn of(
        variant: ZeroVariant,
        role: AxisRole,
        uses: GradientUses,
        train: &TrainSpec,
    ) -> ZeroLevels {
        let leaves = |level: &u8| zero_variants(Some(*level), role, uses, train).contains(&variant);
        ZeroLevels((0..=3).filter(leaves).fold(0, |bits, z| bits | 1 << z))
    }

    /// Levels of both.
    pub(crate) fn and(self, other: ZeroLevels) -> ZeroLevels {
        ZeroLevels(self.0 & other.0)
    }

    /// Levels of either.
    pub(crate) fn or(self, other: ZeroLevels) -> ZeroLevels {
        ZeroLevels(self.0 | other.0)
    }

    /// Whether a level, 0 to 3, is among them.
    pub(crate) fn has(self, level: u8) -> bool {
        level <= 3 && self.0 >> level & 1 == 1
    }
}

/// How a parameter's tensors lie over an axis that does not shard the parameter in compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ZeroVariant {
    /// All replicated; gradients are reduced in every microbatch (or never partial).
    Whole,
    /// All replicated; gradients accumulate partial, all-reduced once per step.
    WholeDeferred,
    /// Moments split; gradients whole in the loop.
    Optimizer,
    /// ZeRO-1: moments split; gradients accumulate partial, reduce-scattered once per step.
    OptimizerDeferred,
    /// ZeRO-2: moments and accumulated gradients split, reduce-scattered per microbatch.
    Gradient,
    /// ZeRO-3: parameters split too, gathered at their uses.
    Parameter,
    /// Master copy, gradients and moments split; gathered once per step in compute precision.
    Master,
    /// The same with gradients that accumulate partial.
    MasterDeferred,
}

fn split(text: &str) -> Vec<String> {
    let (mut parts, mut depth, mut part) = (Vec::new(), 0i32, String::new());
    for c in text.chars() {
        match c {
            '[' => depth += 1,
            ']' => depth -= 1,
            _ => {}
        }
        if depth <= 0 && (c == ',' || c.is_whitespace()) {
            parts.push(std::mem::take(&mut part));
        } else if !c.is_whitespace() {
            part.push(c);
        }
    }
    parts.push(part);
    parts.retain(|p| !p.is_empty());
    parts
}

fn tensor_pin(name: &str, value: &str) -> Result<TensorPin, String> {
    let inner = value
        .strip_prefix('[')
        .and_then(|v| v.strip_suffix(']'))
        .ok_or_else(|| format!("`{value}` is not a spec such as [_,tensor]"))?;
    let dims = inner
        .split(',')
        .filter(|d| !d.is_empty())
        .map(|d| {
            if d == "_" {
                Vec::new()
            } else {
                d.split('+').map(str::to_string).collect()
            }
        })
        .collect();
    Ok(TensorPin {
        value: name.to_string(),
        dims,
    })
}
