//! The reach of other software over plans: which degrees it has, at which ZeRO levels, under
//! which schedules, with what recomputed.
//!
//! This is the one list of it. Plans that are made for a framework are searched in it (the
//! planner's `software`), and what is written down for one is held against it (the crate `export`).

use crate::Software;
use ir::plan::ScheduleKind;

/// Software that trains in parallel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Framework {
    /// Megatron-LM on Megatron-Core.
    MegatronCore,
    /// Megatron-DeepSpeed, as of BLOOM.
    MegatronDeepSpeed,
    /// torchtitan.
    TorchTitan,
    /// PyTorch's `fully_shard` and DTensor.
    Fsdp2,
    /// DeepSpeed's ZeRO.
    DeepSpeed,
    /// NeMo and Megatron-Bridge, which drive Megatron-Core.
    Nemo,
    /// JAX: one program over one mesh.
    Jax,
    /// PyTorch's `FullyShardedDataParallel`.
    Fsdp1,
    /// InternEvo.
    InternEvo,
    /// OneFlow.
    OneFlow,
    /// The software that Meta trained Llama 3 with, which was not published as software.
    Llama3,
}

/// The attention of ranks that split sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContextRanks {
    /// They share causal attention evenly (zigzag order), and gather keys and values or pass them
    /// around.
    Tokens,
    /// They exchange tokens for heads and back (DeepSpeed-Ulysses), in the order of the tokens.
    Heads,
}

/// The layout of norms and residuals over tensor ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceParallel {
    /// They are whole on every tensor rank.
    Never,
    /// They are whole, or split along the sequence.
    Optional,
    /// They are split along the sequence.
    Always,
}

/// The recomputation of all blocks of a model, as an option of a framework.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Recomputation {
    /// Nothing.
    None,
    /// Both norms.
    Norms,
    /// Attention without its projections.
    Attention,
    /// Norms, activation functions and other cheap ops.
    Cheap,
    /// All of every second block.
    EverySecond,
    /// All of every block.
    Full,
}

/// How a pipeline's stages divide the layers where nothing else is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Split {
    /// Transformer layers in equal parts; the embedding goes to the first stage, the output layer
    /// to the last.
    Layers,
    /// The embedding and the output layer count as a layer each, where that is even.
    Balanced,
}

impl Split {
    /// How many layers each of `stages` has of `blocks`, an embedding and an output layer; none
    /// where there are more stages than layers. Uneven parts are as even as goes, the larger first.
    pub fn counts(self, blocks: u64, stages: u64) -> Option<Vec<u64>> {
        let all = blocks.checked_add(2)?;
        if stages == 0 || stages > all {
            return None;
        }
        let even = match self {
            Split::Layers => true,
            // Nobody counts the embedding where that makes the parts uneven.
            Split::Balanced => !all.is_multiple_of(stages),
        };
        let parts = 0..stages;
        Some(match blocks.is_multiple_of(stages) && even {
            true => parts
                .map(|s| blocks / stages + u64::from(s == 0) + u64::from(s + 1 == stages))
                .collect(),
            false => parts
                .map(|s| all / stages + u64::from(s < all % stages))
                .collect(),
        })
    }

    /// Whether the parts of `blocks` are equal, with or without embedding and output layer.
    pub fn is_even(self, blocks: u64, stages: u64) -> bool {
        let balanced = self == Split::Balanced && (blocks + 2).is_multiple_of(stages.max(1));
        blocks.is_multiple_of(stages.max(1)) || balanced
    }
}

/// The vocabulary of a framework.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vocabulary {
    /// Whether ranks split features.
    pub tensor: bool,
    /// How ranks that split sequences compute attention; none where there are no such ranks.
    pub context: Option<ContextRanks>,
    /// Whether ranks split experts.
    pub expert: bool,
    /// Whether there are pipelines.
    pub pipeline: bool,
    /// Whether their stages are interleaved.
    pub interleaved: bool,
    /// Schedules of pipelines with one stage on each mesh, besides the interleaved one.
    pub schedules: &'static [ScheduleKind],
    /// ZeRO levels without a pipeline.
    pub zero: &'static [u8],
    /// ZeRO levels under a pipeline.
    pub zero_in_pipeline: &'static [u8],
    /// ZeRO levels at which states may be split over a part of the data ranks, with copies over the
    /// rest (HSDP).
    pub copies: &'static [u8],
    /// Whether states are always split over ranks that split sequences: FSDP's mesh is made of the
    /// data and the context ranks, so there is no level 0 beside the latter.
    pub splits_states_over_context: bool,
    /// The layout of norms and residuals over tensor ranks.
    pub sequence_parallel: SequenceParallel,
    /// The choices of recomputation of all blocks, that which recomputes least first.
    pub recompute: &'static [Recomputation],
}

/// A framework in a version, with what a run of it switches on.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// The framework.
    pub framework: Framework,
    /// How it executes.
    pub software: Software,
    /// How its pipelines divide the layers.
    pub split: Split,
}

const MEGATRON: Vocabulary = Vocabulary {
    tensor: true,
    context: Some(ContextRanks::Tokens),
    expert: true,
    pipeline: true,
    interleaved: true,
    schedules: &[ScheduleKind::OneFOneB],
    // Above 1 it is Megatron-FSDP, which has no pipeline.
    zero: &[0, 1, 2, 3],
    zero_in_pipeline: &[0, 1],
    // Instances of the distributed optimizer; those of Megatron-FSDP are its outer data ranks.
    copies: &[1, 2, 3],
    splits_states_over_context: false,
    sequence_parallel: SequenceParallel::Optional,
    recompute: &[
        Recomputation::None,
        Recomputation::Norms,
        Recomputation::Attention,
        Recomputation::Full,
    ],
};

const TORCHTITAN: Vocabulary = Vocabulary {
    // Level 1 is level 2 without a pipeline: gradients are reduced after every microbatch.
    zero: &[0, 2, 3],
    copies: &[1, 2, 3],
    splits_states_over_context: true,
    schedules: &[
        ScheduleKind::OneFOneB,
        ScheduleKind::GPipe,
        ScheduleKind::ZbV,
    ],
    sequence_parallel: SequenceParallel::Always,
    recompute: &[
        Recomputation::None,
        Recomputation::EverySecond,
        Recomputation::Full,
    ],
    ..MEGATRON
};

/// Ranks that split samples, and nothing else.
const DATA: Vocabulary = Vocabulary {
    tensor: false,
    context: None,
    expert: false,
    pipeline: false,
    interleaved: false,
    schedules: &[ScheduleKind::OneFOneB],
    zero: &[0, 1, 2, 3],
    zero_in_pipeline: &[0, 1],
    copies: &[],
    splits_states_over_context: false,
    sequence_parallel: SequenceParallel::Never,
    recompute: &[Recomputation::None, Recomputation::Full],
};

impl Framework {
    /// All of them: those that people ask for by name first, then those of published runs alone.
    pub const ALL: [Framework; 11] = [
        Framework::MegatronCore,
        Framework::MegatronDeepSpeed,
        Framework::TorchTitan,
        Framework::Fsdp2,
        Framework::DeepSpeed,
        Framework::Nemo,
        Framework::Jax,
        Framework::Fsdp1,
        Framework::InternEvo,
        Framework::OneFlow,
        Framework::Llama3,
    ];

    /// Name on the command line and in documents.
    pub fn name(self) -> &'static str {
        match self {
            Framework::MegatronCore => "megatron-core",
            Framework::MegatronDeepSpeed => "megatron-deepspeed",
            Framework::TorchTitan => "torchtitan",
            Framework::Fsdp2 => "fsdp2",
            Framework::DeepSpeed => "deepspeed",
            Framework::Nemo => "nemo",
            Framework::Jax => "jax",
            Framework::Fsdp1 => "fsdp1",
            Framework::InternEvo => "internevo",
            Framework::OneFlow => "oneflow",
            Framework::Llama3 => "llama-3",
        }
    }

    /// Name in sentences.
    pub fn title(self) -> &'static str {
        match self {
            Framework::MegatronCore => "Megatron-Core",
            Framework::MegatronDeepSpeed => "Megatron-DeepSpeed",
            Framework::TorchTitan => "torchtitan",
            Framework::Fsdp2 => "PyTorch FSDP2",
            Framework::DeepSpeed => "DeepSpeed",
            Framework::Nemo => "NeMo",
            Framework::Jax => "JAX",
            Framework::Fsdp1 => "PyTorch FSDP1",
            Framework::InternEvo => "InternEvo",
            Framework::OneFlow => "OneFlow",
            Framework::Llama3 => "the software of Llama 3",
        }
    }

    /// The framework of a name.
    pub fn named(name: &str) -> Option<Framework> {
        Framework::ALL.into_iter().find(|f| f.name() == name)
    }

    /// Its vocabulary.
    pub fn vocabulary(self) -> Vocabulary {
        match self {
            Framework::MegatronCore | Framework::Nemo => MEGATRON,
            Framework::MegatronDeepSpeed => Vocabulary {
                tensor: true,
                pipeline: true,
                ..DATA
            },
            Framework::TorchTitan => TORCHTITAN,
            // Pipelines of `torch.distributed.pipelining` are the script's own code.
            Framework::Fsdp2 => Vocabulary {
                tensor: true,
                interleaved: true,
                schedules: TORCHTITAN.schedules,
                copies: &[1, 2, 3],
                sequence_parallel: SequenceParallel::Never,
                ..DATA
            },
            // `sequence_parallel_size`, as the export writes it.
            Framework::DeepSpeed => Vocabulary {
                context: Some(ContextRanks::Heads),
                ..DATA
            },
            Framework::Fsdp1 => DATA,
            Framework::Jax => Vocabulary {
                tensor: true,
                context: Some(ContextRanks::Tokens),
                expert: true,
                sequence_parallel: SequenceParallel::Optional,
                recompute: &[
                    Recomputation::None,
                    Recomputation::Cheap,
                    Recomputation::Full,
                ],
                ..DATA
            },
            Framework::InternEvo => Vocabulary {
                tensor: true,
                pipeline: true,
                interleaved: true,
                sequence_parallel: SequenceParallel::Optional,
                ..DATA
            },
            Framework::OneFlow => Vocabulary {
                tensor: true,
                pipeline: true,
                ..DATA
            },
            Framework::Llama3 => Vocabulary {
                zero: &[0, 1, 2, 3],
                schedules: &[ScheduleKind::OneFOneB],
                copies: &[],
                ..TORCHTITAN
            },
        }
    }
}

impl Vocabulary {
    /// ZeRO levels that go with so many stages' meshes in a row, and so many ranks that split
    /// sequences.
    pub fn zero_levels(&self, pipeline: u32, context: u32) -> &'static [u8] {
        let levels = match pipeline {
            0 | 1 => self.zero,
            _ => self.zero_in_pipeline,
        };
        match levels {
            [0, above @ ..] if context > 1 && self.splits_states_over_context => above,
            all => all,
        }
    }

    /// The level that comes nearest to one: the next that splits as much at least, else the one that
    /// splits most.
    pub fn nearest_zero(&self, level: u8, pipeline: u32, context: u32) -> u8 {
        let levels = self.zero_levels(pipeline, context);
        let next = levels.iter().find(|l| **l >= level);
        next.or(levels.last()).copied().unwrap_or(0)
    }

    /// Whether a pipeline is run in this order of passes.
    pub fn has_schedule(&self, kind: ScheduleKind) -> bool {
        match kind {
            ScheduleKind::Interleaved { .. } => self.interleaved,
            other => self.schedules.contains(&other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_again() {
        for f in Framework::ALL {
            assert_eq!(Framework::named(f.name()), Some(f));
        }
        assert_eq!(Framework::named("horovod"), None);
    }

    #[test]
    fn a_level_that_there_is_not_is_rounded_up_where_it_can_be() {
        let titan = Framework::TorchTitan.vocabulary();
        let nearest =
            |pipeline, context| [0, 1, 2, 3].map(|z| titan.nearest_zero(z, pipeline, context));
        assert_eq!(nearest(1, 1), [0, 2, 2, 3]);
        // FSDP's mesh has the context ranks, so nothing is whole on each of them.
        assert_eq!(nearest(1, 2), [2, 2, 2, 3]);
        assert_eq!(nearest(4, 2), [1, 1, 1, 1]);
        let megatron = Framework::MegatronCore.vocabulary();
        assert_eq!(
            [0, 1, 2, 3].map(|z| megatron.nearest_zero(z, 4, 2)),
            [0, 1, 1, 1]
        );
    }

    #[test]
    fn schedules_are_those_of_the_list() {
        let of = |f: Framework, kind| f.vocabulary().has_schedule(kind);
        let interleaved = ScheduleKind::Interleaved { virtual_stages: 2 };
        assert!(of(Framework::MegatronCore, interleaved));
        assert!(!of(Framework::MegatronDeepSpeed, interleaved));
        assert!(of(Framework::TorchTitan, ScheduleKind::ZbV));
        assert!(!of(Framework::MegatronCore, ScheduleKind::ZbV));
    }

    #[test]
    fn stages_divide_layers_as_the_framework_does() {
        let of = |split: Split, blocks, stages| split.counts(blocks, stages);
        assert_eq!(of(Split::Layers, 8, 4), Some(vec![3, 2, 2, 3]));
        assert_eq!(
            of(Split::Balanced, 72, 6),
            Some(vec![13, 12, 12, 12, 12, 13])
        );
        assert_eq!(of(Split::Balanced, 106, 12), Some(vec![9; 12]));
        assert_eq!(of(Split::Layers, 7, 2), Some(vec![5, 4]));
        assert_eq!(of(Split::Balanced, 2, 5), None);
        assert!(Split::Balanced.is_even(126, 64) && !Split::Layers.is_even(126, 64));
    }
}
