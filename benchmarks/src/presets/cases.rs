//! The trainings that the benchmark plans: one row each, and no code besides.
//!
//! They go from one device to 16,384, from V100 to GB300, over NVLink, PCIe, InfiniBand and
//! Ethernet, from sequences of 1,024 tokens to a million, and from models that fit many times over
//! to those that barely do.

use std::borrow::Cow;

/// A training to plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// The folder in `models/`.
    pub model: Cow<'static, str>,
    /// A preset of `clusters/`, or a composition of devices and links.
    pub cluster: Cow<'static, str>,
    /// Hosts of it.
    pub hosts: u32,
    /// Samples of a step.
    pub global_batch: u64,
    /// Tokens of a sample; a model with fewer positions gets as many.
    pub sequence: u64,
}

impl Case {
    /// The case in words, which `--case` looks into.
    pub fn name(&self) -> String {
        format!(
            "{} {}:{} b{} s{}",
            self.model, self.cluster, self.hosts, self.global_batch, self.sequence
        )
    }

    /// The case of such a name: `llama-2-7b dgx-a100-40gb:4 b128 s4096`.
    pub fn named(name: &str) -> Result<Case, String> {
        let parse = || {
            let mut words = name.split_whitespace();
            let model = words.next()?;
            let (cluster, hosts) = words.next()?.rsplit_once(':')?;
            let global_batch = words.next()?.strip_prefix('b')?.parse().ok()?;
            let sequence = words.next()?.strip_prefix('s')?.parse().ok()?;
            words.next().is_none().then_some(Case {
                model: model.to_owned().into(),
                cluster: cluster.to_owned().into(),
                hosts: hosts.parse().ok()?,
                global_batch,
                sequence,
            })
        };
        parse().ok_or_else(|| {
            let form = "llama-2-7b dgx-a100-40gb:4 b128 s4096";
            format!("`{name}` is no case; write it like `{form}`")
        })
    }
}

/// One row of [`CASES`].
const fn case(
    model: &'static str,
    cluster: &'static str,
    hosts: u32,
    global_batch: u64,
    sequence: u64,
) -> Case {
    Case {
        model: Cow::Borrowed(model),
        cluster: Cow::Borrowed(cluster),
        hosts,
        global_batch,
        sequence,
    }
}

const ONE_A100: &str = "a100-sxm-80gb*1+nvlink3+infiniband-hdr*1";
const ONE_H100: &str = "h100-sxm*1+nvlink4+infiniband-ndr*1";

/// All cases: model, cluster, hosts, global batch, sequence.
pub const CASES: &[Case] = &[
    // GPT, from 350 million parameters to a trillion.
    case("gpt2-medium", ONE_A100, 1, 32, 1024),
    case("gpt2-medium", "v100-pcie-16gb", 1, 64, 1024),
    case("gpt2-medium", "dgx-1-v100-16gb", 2, 256, 1024),
    case("gpt2-xl", "v100-pcie-32gb", 1, 64, 1024),
    case("gpt2-xl", "dgx-h100", 1, 256, 1024),
    case("gpt2-xl", "aws-p3", 8, 512, 1024),
    case("gpt2-xl", "a100-pcie-40gb", 2, 128, 1024),
    case("gpt3-6.7b", "v100-pcie-32gb", 4, 128, 2048),
    case("gpt3-6.7b", "dgx-1-v100-32gb", 8, 512, 2048),
    case("gpt3-6.7b", "dgx-a100-40gb", 2, 128, 2048),
    case("gpt3-6.7b", "dgx-b200", 1, 256, 2048),
    case("megatron-18b", "dgx-2", 8, 512, 2048),
    case("megatron-18b", "aws-p4d", 8, 512, 2048),
    case("megatron-18b", "dgx-a100-80gb", 32, 1024, 2048),
    case("gpt3-175b", "dgx-h100", 16, 512, 2048),
    case("gpt3-175b", "dgx-a100-80gb", 128, 1536, 2048),
    case("gpt3-175b", "dgx-a100-80gb", 1536, 6144, 2048),
    case("megatron-530b", "dgx-a100-80gb", 280, 1920, 2048),
    case("megatron-1t", "dgx-a100-80gb", 384, 3072, 2048),
    case("megatron-1t", "gb300-nvl72", 144, 1152, 2048),
    // Llama, from 1 billion to 405 billion.
    case("llama-3.2-1b", ONE_H100, 1, 16, 8192),
    case("llama-3.2-1b", "h100-pcie", 1, 64, 4096),
    case("llama-2-7b", "a100-pcie-80gb", 1, 64, 4096),
    case("llama-2-7b", "aws-p4d", 4, 256, 4096),
    case("llama-3.1-8b", "dgx-h100", 1, 64, 8192),
    case("llama-3.1-8b", "dgx-h100", 2, 128, 8192),
    case("llama-3.1-8b", "dgx-h100", 16, 512, 8192),
    case("llama-3.1-70b", "dgx-h100", 4, 128, 4096),
    case("llama-3.1-70b", "dgx-h100", 8, 256, 8192),
    case("llama-3.1-70b", "dgx-h100", 64, 1024, 8192),
    case("llama-3.1-70b", "aws-p5", 16, 256, 4096),
    case("llama-3.1-70b", "dgx-b200", 32, 512, 8192),
    case("llama-3.1-70b", "gb300-nvl72", 18, 288, 8192),
    case("llama-3.1-405b", "dgx-h100", 64, 256, 8192),
    case("llama-3.1-405b", "dgx-h100", 2048, 2048, 8192),
    case("llama-3.1-405b", "dgx-b200", 128, 1024, 8192),
    case("llama-3.1-405b", "gb300-nvl72", 288, 1152, 8192),
    // Long sequences.
    case("llama-3.1-8b", "dgx-h100", 1, 8, 131_072),
    case("llama-3.1-8b", "dgx-h200", 4, 8, 262_144),
    case("llama-3.1-8b", "dgx-h100", 8, 4, 1_048_576),
    case("llama-3.1-70b", "dgx-h100", 32, 32, 131_072),
    case("llama-3.1-405b", "dgx-h100", 128, 32, 131_072),
    // Mixtures of experts, from 30 billion parameters to a trillion.
    case("mixtral-8x7b", "dgx-h100", 2, 128, 4096),
    case("mixtral-8x7b", "dgx-a100-80gb", 8, 512, 4096),
    case("mixtral-8x22b", "dgx-h100", 16, 512, 4096),
    case("qwen3-30b-a3b", "dgx-h100", 4, 256, 4096),
    case("qwen3-235b-a22b", "dgx-h100", 32, 1024, 4096),
    case("moe-1t", "dgx-h100", 256, 4096, 4096),
    case("moe-1t", "gb300-nvl72", 144, 2304, 4096),
];
