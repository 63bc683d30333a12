//! Recipes: the parallel trainings that practitioners know by name, as grids of pins.
//!
//! A recipe is a list of points, and a point is a set of [`Pins`]. What a recipe leaves open, the
//! search decides at each point: the microbatch size above all, and between the matmuls whether
//! tensor ranks split the sequence too. [`plan_recipe`] plans the points and keeps the fastest.
//!
//! The free search knows nothing of recipes. They are there for users who want what they know, and
//! for a benchmark that asks whether a recipe ever beats the search.

pub(crate) mod bounds;
mod choose;
mod facts;

pub use choose::{Chosen, Outcome, PointsPlanned, plan_points, plan_recipe, points};
pub use facts::Facts;

use crate::Pins;
use ir::plan::ScheduleKind;
use ir::training::Recompute;

/// Kinds of recomputation that a grid has, cheap before dear.
const RECOMPUTE: [Recompute; 3] = [Recompute::None, Recompute::Selective, Recompute::Full];
/// Largest tensor-parallel degree of a recipe: beyond eight ranks practitioners do not go.
const MAX_TENSOR: u32 = 8;
/// Shortest sequence, in tokens, that a recipe splits over context ranks.
const LONG_SEQUENCE: u64 = 32 * 1024;
/// Fewest tokens of a sequence that a recipe gives to each context rank.
const TOKENS_OF_CONTEXT_RANK: u64 = 4 * 1024;

/// A way of training in parallel that has a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Recipe {
    /// Data parallelism with whole copies of all states (PyTorch's DistributedDataParallel).
    Ddp,
    /// Data parallelism at ZeRO level 1, 2 or 3 (Rajbhandari et al. 2020).
    Zero(ZeroLevel),
    /// Hybrid sharding (PyTorch's HSDP, Zhao et al. 2023): parameters and states split inside a host
    /// or NVLink domain, or over a few of them, with copies over the rest.
    Hsdp,
    /// Tensor, context, expert, pipeline and data parallelism of Megatron-LM (Narayanan et al.
    /// 2021; Korthikanti et al. 2022), interleaved or not, at ZeRO level 0 or 1.
    Megatron,
    /// Tensor, pipeline and data parallelism of DeepSpeed: ZeRO-1 with a pipeline of 1F1B, any
    /// level without one.
    DeepSpeed3d,
    /// The space of Alpa (Zheng et al. 2022): any meshes and stages, ZeRO up to level 2, 1F1B or
    /// GPipe with one stage on each mesh.
    Alpa,
}

/// A ZeRO level that splits something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ZeroLevel {
    /// The optimizer's states.
    One,
    /// The gradients too.
    Two,
    /// The parameters too; PyTorch calls it FSDP.
    Three,
}

impl Recipe {
    /// All recipes.
    pub const ALL: [Recipe; 8] = [
        Recipe::Ddp,
        Recipe::Zero(ZeroLevel::One),
        Recipe::Zero(ZeroLevel::Two),
        Recipe::Zero(ZeroLevel::Three),
        Recipe::Hsdp,
        Recipe::Megatron,
        Recipe::DeepSpeed3d,
        Recipe::Alpa,
    ];

    /// The names that [`Recipe::named`] knows, in the order of [`Recipe::ALL`]; `fsdp` is another
    /// name of `zero-3`.
    pub const NAMES: [&'static str; 9] = [
        "ddp",
        "zero-1",
        "zero-2",
        "zero-3",
        "fsdp",
        "hsdp",
        "megatron",
        "deepspeed-3d",
        "alpa",
    ];

    /// The recipe's first name.
    pub fn name(self) -> &'static str {
        match self {
            Recipe::Ddp => "ddp",
            Recipe::Zero(ZeroLevel::One) => "zero-1",
            Recipe::Zero(ZeroLevel::Two) => "zero-2",
            Recipe::Zero(ZeroLevel::Three) => "zero-3",
            Recipe::Hsdp => "hsdp",
            Recipe::Megatron => "megatron",
            Recipe::DeepSpeed3d => "deepspeed-3d",
            Recipe::Alpa => "alpa",
        }
    }

    /// The recipe of that name, if there is one.
    pub fn named(name: &str) -> Option<Recipe> {
        match name {
            "fsdp" => Some(Recipe::Zero(ZeroLevel::Three)),
            _ => Recipe::ALL.into_iter().find(|r| r.name() == name),
        }
    }

    /// The points of the recipe for a model and a cluster, each once, in a fixed order. Some may
    /// not fit the model, the batch or the memory: that is found when they are planned. A sequence
    /// shorter than 32,768 tokens is split by no recipe, unless `context` is pinned.
    pub fn grid(self, facts: &Facts, context: Option<u32>) -> Vec<Pins> {
        match self {
            Recipe::Ddp => data_parallel(facts, 0),
            Recipe::Zero(ZeroLevel::One) => data_parallel(facts, 1),
            Recipe::Zero(ZeroLevel::Two) => data_parallel(facts, 2),
            Recipe::Zero(ZeroLevel::Three) => data_parallel(facts, 3),
            Recipe::Hsdp => hybrid(facts),
            Recipe::Megatron => megatron(facts, context),
            Recipe::DeepSpeed3d => deepspeed(facts),
            Recipe::Alpa => alpa(facts),
        }
    }
}

/// All devices split samples, at one ZeRO level.
fn data_parallel(facts: &Facts, zero: u8) -> Vec<Pins> {
    let shape = Shape {
        data: facts.n_devices,
        tensor: 1,
        pipeline: 1,
        context: 1,
    };
    let mut points = Vec::new();
    for expert in experts(facts, &shape) {
        for recompute in RECOMPUTE {
            points.push(Pins {
                recompute: Some(recompute),
                ..shape.pins(expert, zero)
            });
        }
    }
    points
}

/// ZeRO-2 and ZeRO-3 over whole hosts or domains: a copy in each of them, or fewer by powers of two,
/// the fewest copies first. Where all devices are neighbours there is one copy, as in FSDP.
fn hybrid(facts: &Facts) -> Vec<Pins> {
    let n = facts.n_devices;
    let domains = n / facts.neighbours.clamp(1, n.max(1));
    let is_whole = |copies: &u32| *copies > 1 && domains.is_multiple_of(*copies);
    let mut some: Vec<u32> = powers(domains.into())
        .chain([domains])
        .filter(is_whole)
        .collect();
    some.dedup();
    let some = if some.is_empty() { vec![1] } else { some };
    let mut points = Vec::new();
    for copies in some {
        for zero in [2, 3] {
            for point in data_parallel(facts, zero) {
                let among = point.expert.unwrap_or(1).max(1);
                if n.is_multiple_of(copies.saturating_mul(among)) {
                    points.push(Pins {
                        replicas: Some(copies),
                        ..point
                    });
                }
            }
        }
    }
    points
}

fn megatron(facts: &Facts, context: Option<u32>) -> Vec<Pins> {
    let mut points = Vec::new();
    for shape in shapes(facts, &contexts(facts, context)) {
        for expert in experts(facts, &shape) {
            for zero in zero_levels(&shape, &[0, 1]) {
                for virtual_stages in chunks(facts, shape.pipeline) {
                    for recompute in RECOMPUTE {
                        points.push(Pins {
                            zigzag: shape.context > 1,
                            virtual_stages: (shape.pipeline > 1).then_some(virtual_stages),
                            recompute: Some(recompute),
                            ..shape.pins(expert, zero)
                        });
                    }
                }
            }
        }
    }
    points
}

fn deepspeed(facts: &Facts) -> Vec<Pins> {
    let mut points = Vec::new();
    for shape in shapes(facts, &[1]) {
        let levels: &[u8] = match shape.pipeline {
            1 => &[1, 2, 3],
            _ => &[1],
        };
        for expert in experts(facts, &shape) {
            for zero in zero_levels(&shape, levels) {
                for recompute in RECOMPUTE {
                    points.push(Pins {
                        virtual_stages: (shape.pipeline > 1).then_some(1),
                        recompute: Some(recompute),
                        ..shape.pins(expert, zero)
                    });
                }
            }
        }
    }
    points
}

/// Meshes and stages stay open. Alpa recomputes layers as a whole or not at all.
fn alpa(facts: &Facts) -> Vec<Pins> {
    let (levels, schedules): (&[u8], &[ScheduleKind]) = match facts.n_devices {
        0 | 1 => (&[0], &[ScheduleKind::OneFOneB]),
        _ => (&[0, 1, 2], &[ScheduleKind::OneFOneB, ScheduleKind::GPipe]),
    };
    let mut points = Vec::new();
    for &schedule in schedules {
        for &zero in levels {
            for recompute in [Recompute::None, Recompute::Full] {
                points.push(Pins {
                    zero: Some(zero),
                    schedule: Some(schedule),
                    recompute: Some(recompute),
                    ..Pins::default()
                });
            }
        }
    }
    points
}

/// Degrees that together make the devices of the cluster.
struct Shape {
    data: u32,
    tensor: u32,
    pipeline: u32,
    context: u32,
}

impl Shape {
    fn pins(&self, expert: Option<u32>, zero: u8) -> Pins {
        Pins {
            data: Some(self.data),
            tensor: Some(self.tensor),
            pipeline: Some(self.pipeline),
            context: (self.context > 1).then_some(self.context),
            expert,
            zero: Some(zero),
            ..Pins::default()
        }
    }
}

/// Every tensor degree inside a host that divides the heads, beside every number of stages that the
/// layers make; samples are split by the rest of the devices, of which no rank may be left without.
fn shapes(facts: &Facts, contexts: &[u32]) -> Vec<Shape> {
    let n = facts.n_devices;
    let tensor = (1..=MAX_TENSOR).filter(|t| {
        facts.neighbours.is_multiple_of(*t) && facts.heads.is_multiple_of(u64::from(*t))
    });
    let mut shapes = Vec::new();
    for tensor in tensor {
        for &context in contexts {
            let inside = tensor.saturating_mul(context).max(1);
            if !n.is_multiple_of(inside) {
                continue;
            }
            let most = (n / inside).min(facts.n_layers as u32);
            for pipeline in (1..=most).filter(|p| (n / inside).is_multiple_of(*p)) {
                let data = n / inside / pipeline;
                if u64::from(data) <= facts.global_batch {
                    shapes.push(Shape {
                        data,
                        tensor,
                        pipeline,
                        context,
                    });
                }
            }
        }
    }
    shapes
}

/// Context degrees: one, and powers of two for long sequences; or what is pinned.
fn contexts(facts: &Facts, pinned: Option<u32>) -> Vec<u32> {
    if let Some(context) = pinned {
        return vec![context.max(1)];
    }
    let most = match facts.sequence {
        short if short < LONG_SEQUENCE => 1,
        long => (long / TOKENS_OF_CONTEXT_RANK).min(facts.n_devices.into()),
    };
    powers(most).collect()
}

/// Expert degrees: what divides both the experts and the ranks that split samples, powers of two
/// alone; none for a model without experts.
fn experts(facts: &Facts, shape: &Shape) -> Vec<Option<u32>> {
    let Some(experts) = facts.n_experts else {
        return vec![None];
    };
    powers(experts.min(shape.data.into()))
        .filter(|e| experts.is_multiple_of(u64::from(*e)) && shape.data.is_multiple_of(*e))
        .map(Some)
        .collect()
}

/// The first of the levels alone where no ranks hold the same parameters, else all.
fn zero_levels(shape: &Shape, levels: &[u8]) -> Vec<u8> {
    let ranks = shape.data.saturating_mul(shape.context);
    let some = if ranks > 1 { levels.len() } else { 1 };
    levels.iter().copied().take(some).collect()
}

/// Stages on each mesh: powers of two, and the finest even cut of the layers, with or without
/// the first and the last, which embed and predict.
fn chunks(facts: &Facts, pipeline: u32) -> Vec<u32> {
    if pipeline <= 1 {
        return vec![1];
    }
    let layers = facts.n_layers as u32;
    let finest = [layers, layers.saturating_sub(2)];
    let finest = finest.into_iter().filter(|n| n.is_multiple_of(pipeline));
    let mut all: Vec<u32> = powers(u64::from(layers / pipeline))
        .chain(finest.map(|n| n / pipeline))
        .filter(|v| *v >= 1)
        .collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// The powers of two up to a number, from 1 on.
fn powers(most: u64) -> impl Iterator<Item = u32> {
    (0..31)
        .map(|k| 1u32 << k)
        .take_while(move |p| u64::from(*p) <= most.max(1))
}

#[cfg(test)]
mod tests;
