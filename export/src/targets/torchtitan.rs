//! torchtitan: its TOML configuration.
//!
//! Keys are those of `torchtitan/config/job_config.py` at v0.2.2, the last version that reads TOML
//! files; its manager parses what is written (docs/export.md).

use super::{
    Choices, Missing, Target, Written, block_name, degrees, inexpressible, origin, unknown,
};
use crate::model::ModelShape;
use crate::recompute::Recomputed;
use crate::summary::{ContextAttention, Degrees, Stage, Summary};
use crate::{ExportError, File, Read};
use ir::offload::TensorClass;
use ir::plan::ScheduleKind;
use ir::{Optimizer, Precision};
use std::fmt::Write;

const TARGET: Target = Target::TorchTitan;

/// Flavors of torchtitan's models: model, flavor, blocks, width.
const FLAVORS: [(&str, &str, u64, u64); 12] = [
    ("llama3", "8B", 32, 4096),
    ("llama3", "70B", 80, 8192),
    ("llama3", "405B", 126, 16384),
    ("qwen3", "0.6B", 28, 1024),
    ("qwen3", "1.7B", 28, 2048),
    ("qwen3", "4B", 36, 2560),
    ("qwen3", "8B", 36, 4096),
    ("qwen3", "14B", 40, 5120),
    ("qwen3", "32B", 64, 5120),
    ("qwen3", "30B-A3B", 48, 2048),
    ("qwen3", "235B-A22B", 94, 4096),
    ("llama3", "debugmodel", 6, 256),
];

/// Rows of the table of tokens in Llama 3's flavors; Llama 2 has the same widths and fewer.
const LLAMA3_VOCAB: u64 = 128_256;

pub(super) fn write(read: &Read<'_>) -> Result<Written, ExportError> {
    let summary = &read.summary;
    let d = degrees(summary, TARGET)?;
    let model = summary.model.as_ref();
    let model = model.ok_or_else(|| unknown(TARGET, summary.why_no_model))?;
    if model.window.is_some() {
        return Err(unknown(TARGET, WINDOW));
    }
    let mut missing = Missing::default();
    let mut choices = Choices::of(summary);
    missing.add_deviations(summary, &[]);
    if summary.on_cpu {
        missing.add(
            "the devices",
            "ranks on processors",
            "GPUs, which torchtitan needs",
        );
    }
    let (name, flavor) = flavor(model, &mut missing)?;
    let mut w = format!("# {}\n", origin(summary, TARGET));
    w += "# For torchtitan 0.2: ./run_train.sh with CONFIG_FILE, or torchrun -m torchtitan.train\n";
    let _ = writeln!(
        w,
        "# --job.config_file torchtitan.toml, on {} of {} each.",
        ir::counted(summary.hosts.0, "host"),
        ir::counted(summary.hosts.1, "device")
    );
    w += "# Learning rate, steps and data are the run's: [optimizer] lr, [training] steps, dataset.\n";
    let _ = writeln!(
        w,
        "\n[job]\ndescription = \"{} by Meshwright\"",
        summary.name
    );
    let _ = writeln!(w, "\n[model]\nname = \"{name}\"\nflavor = \"{flavor}\"");
    w += &optimizer(summary, &mut missing);
    w += &training(summary, d, &mut missing);
    w += &parallelism(summary, d, model, &mut choices, &mut missing)?;
    w += &checkpoint(summary, &mut choices, &mut missing);
    // Figures of the usual version are of runs whose model is compiled.
    let made_for = read.plan.made_for.as_ref();
    if made_for.is_some_and(|m| m.name == TARGET.name() && !m.version.contains("eager")) {
        w += "\n[compile]\nenable = true\ncomponents = [\"model\", \"loss\"]\n";
    }
    let _ = writeln!(w, "\n[debug]\nseed = {}", summary.seed);
    Ok(Written {
        files: vec![File {
            name: "torchtitan.toml",
            text: w,
        }],
        not_expressed: missing.list(),
        choices,
    })
}

/// The reason why a model with a window is refused.
pub(super) const WINDOW: &str =
    "the model's attention looks back over a window, which that of torchtitan's models does not";

/// The model that torchtitan has of a family, if it has one.
pub(super) fn model_of(family: &str) -> Option<&'static str> {
    match family {
        "llama" | "mistral" => Some("llama3"),
        "qwen3" | "qwen3_moe" => Some("qwen3"),
        _ => None,
    }
}

/// The model and the flavor of a shape.
fn flavor(m: &ModelShape, missing: &mut Missing) -> Result<(&'static str, String), ExportError> {
    let model = model_of(&m.family).ok_or_else(|| {
        let reason = format!(
            "it has no model of the family {}; of those that Meshwright reads it has llama, mistral (as llama3) and qwen3",
            m.family
        );
        unknown(TARGET, reason)
    })?;
    let has_experts = m.experts.is_some();
    let is_it = |(of, flavor, layers, hidden): &&(&str, &str, u64, u64)| {
        let experts = flavor.contains("-A");
        let vocab = model != "llama3" || m.vocab == LLAMA3_VOCAB;
        *of == model
            && (*layers, *hidden) == (m.layers, m.hidden)
            && experts == has_experts
            && vocab
            && m.family != "mistral"
    };
    if let Some((_, flavor, _, _)) = FLAVORS.iter().find(is_it) {
        return Ok((model, flavor.to_string()));
    }
    let own = "meshwright";
    let ffn = m.ffn.unwrap_or(0);
    missing.add(
        "the model",
        format!(
            "{} blocks of width {}, {} heads ({} of keys), MLP {ffn}, vocabulary {}",
            m.layers, m.hidden, m.heads, m.kv_heads, m.vocab
        ),
        format!("flavor \"{own}\", which must be added to torchtitan's {model} flavors"),
    );
    Ok((model, own.into()))
}

fn optimizer(s: &Summary, missing: &mut Missing) -> String {
    let mut w = "\n[optimizer]\n".to_string();
    match s.optimizer {
        Optimizer::AdamW {
            beta1,
            beta2,
            eps,
            weight_decay,
        } => {
            let _ = writeln!(
                w,
                "name = \"AdamW\"\nbeta1 = {}\nbeta2 = {}\neps = {}\nweight_decay = {}",
                float(beta1),
                float(beta2),
                float(eps),
                float(weight_decay)
            );
            if weight_decay > 0.0 {
                missing.add(
                    "weight decay",
                    "of matrices",
                    "of all parameters, norm gains and biases too",
                );
            }
        }
        Optimizer::Sgd { momentum, .. } => {
            missing.add(
                "the optimizer",
                format!("SGD with momentum {momentum}"),
                "AdamW: torchtitan has Adam and AdamW",
            );
            w += "name = \"AdamW\"\n";
        }
    }
    w
}

/// A number as TOML reads one with a fraction.
fn float(x: f64) -> String {
    format!("{x:?}")
}

fn training(s: &Summary, d: &Degrees, missing: &mut Missing) -> String {
    // A pipeline takes all microbatches of a data rank at once.
    let local = match d.pipeline {
        1 => d.micro_batch,
        _ => d.micro_batch * s.accumulation,
    };
    let precision = match s.precision {
        Precision::F32 => "float32",
        Precision::Bf16 => "bfloat16",
        Precision::F16 => {
            missing.add(
                "precision",
                "f16 with loss scaling",
                "bf16 without: torchtitan has f32 and bf16",
            );
            "bfloat16"
        }
    };
    let mut w = format!(
        "\n[training]\nlocal_batch_size = {local}\nglobal_batch_size = {}\nseq_len = {}\n",
        s.global_batch, s.sequence
    );
    // No norm reaches it.
    let norm = s.clip_norm.unwrap_or(1e30);
    let _ = writeln!(w, "max_norm = {}", float(norm));
    let _ = writeln!(
        w,
        "dtype = \"float32\"\nmixed_precision_param = \"{precision}\""
    );
    let host = ir::program::Space::Host;
    let offloaded = |class: &TensorClass| s.offload.get(class) == Some(&host);
    if TensorClass::ALL[..2].iter().all(offloaded) {
        w += "enable_cpu_offload = true\n";
    } else {
        for (class, space) in &s.offload {
            missing.add(
                class.words(),
                format!("rest in another memory ({})", space.name()),
                "rest on the device, which takes more of its memory",
            );
        }
    }
    if s.dropout > 0.0 {
        missing.add(
            "dropout",
            format!("{}", s.dropout),
            "none: torchtitan's models have no dropout",
        );
    }
    w
}

fn parallelism(
    s: &Summary,
    d: &Degrees,
    model: &ModelShape,
    choices: &mut Choices,
    missing: &mut Missing,
) -> Result<String, ExportError> {
    // Stages of a pipeline gather their parameters once a step and reduce gradients at its end
    // (`torch.distributed.pipelining`), which is level 1.
    let vocabulary = TARGET.framework().vocabulary();
    choices.zero = vocabulary.nearest_zero(d.zero, d.pipeline, d.context);
    // FSDP's mesh is made of the ranks of data_parallel_shard_degree and the context ranks.
    let shard = match (d.zero, choices.zero) {
        (0, 0) => 1,
        (0, _) => d.data,
        _ => d.sharded,
    };
    let reshard = match choices.zero {
        0 => "default",
        3 => "always",
        _ => "never",
    };
    super::split_over_context(d, missing);
    match choices.zero {
        level if d.zero == 0 && level > 0 => missing.add(
            "parameters, gradients and states",
            "whole on every data and context rank (ZeRO level 0)",
            format!("split over them (level {level}), as FSDP always splits over context ranks"),
        ),
        level if level < d.zero => missing.add(
            "parameters and gradients",
            format!("ZeRO level {}", d.zero),
            format!("gathered once a step, and gradients whole until its end (level {level}): more memory, less traffic"),
        ),
        level if level > d.zero => missing.add(
            "gradients",
            format!("whole on every data rank (ZeRO level {})", d.zero),
            format!("reduced and split after every microbatch (level {level}): less memory, more traffic"),
        ),
        _ => {}
    }
    if choices.zero == 2 && s.accumulation > 1 {
        missing.add(
            "parameters",
            "gathered once a step",
            "gathered again for each microbatch, and released behind its backward pass",
        );
    }
    let mut w = format!(
        "\n[parallelism]\ndata_parallel_replicate_degree = {}\ndata_parallel_shard_degree = {shard}\nfsdp_reshard_after_forward = \"{reshard}\"\ntensor_parallel_degree = {}\ncontext_parallel_degree = {}\npipeline_parallel_degree = {}\n",
        d.data / shard,
        d.tensor,
        d.context,
        d.pipeline
    );
    if d.tensor > 1 && !d.sequence_parallel {
        missing.add(
            "norms and residuals",
            "whole on every tensor rank",
            "split along the sequence, as torchtitan always does over tensor ranks",
        );
    }
    if d.context > 1 {
        context(d, &mut w, missing);
    }
    if model.experts.is_some() {
        // It has experts over tensor ranks only together with ranks that split samples.
        let _ = writeln!(
            w,
            "expert_parallel_degree = {}\nexpert_tensor_parallel_degree = {}",
            d.expert, d.expert_tensor
        );
        missing.add(
            "tokens that find no slot at their expert",
            "pass by",
            "none: torchtitan's experts take all of their tokens",
        );
    }
    if d.pipeline > 1 {
        pipeline(s, d, model, choices, &mut w, missing)?;
    }
    Ok(w)
}

fn context(d: &Degrees, w: &mut String, missing: &mut Missing) {
    let rotate = match d.context_attention {
        Some(ContextAttention::Ring) => "alltoall",
        Some(ContextAttention::Ulysses) => {
            missing.add(
                "attention over context ranks",
                "tokens are exchanged for heads (Ulysses)",
                "keys and values are gathered",
            );
            "allgather"
        }
        _ => "allgather",
    };
    let _ = writeln!(w, "context_parallel_rotate_method = \"{rotate}\"");
    if !d.zigzag {
        missing.add(
            "the order of sequences over context ranks",
            "natural",
            "zigzag (headtail): TOML has no word for none",
        );
    }
}

fn pipeline(
    s: &Summary,
    d: &Degrees,
    model: &ModelShape,
    choices: &mut Choices,
    w: &mut String,
    missing: &mut Missing,
) -> Result<(), ExportError> {
    let Some(stages) = &s.stages else {
        let reason = "its stages have layers that are no embedding, block or head";
        return Err(inexpressible(TARGET, reason));
    };
    let has = choices.nearest_schedule(s, &TARGET.framework().vocabulary());
    let schedule = match s.schedule {
        other if !has => {
            missing.add("the schedule", other.name(), "1f1b");
            "1F1B"
        }
        ScheduleKind::GPipe => "GPipe",
        ScheduleKind::Interleaved { .. } => "Interleaved1F1B",
        ScheduleKind::ZbV => "ZBVZeroBubble",
        _ => "1F1B",
    };
    if model.tied {
        missing.add(
            "the table of tokens",
            "one for the embedding and the head",
            "one for each: torchtitan does not tie them across stages",
        );
    }
    let _ = writeln!(
        w,
        "pipeline_parallel_schedule = \"{schedule}\"\npipeline_parallel_microbatch_size = {}\nmodule_fqns_per_model_part = [",
        d.micro_batch
    );
    for stage in stages {
        let names = modules(stage).into_iter().map(|n| format!("\"{n}\""));
        let _ = writeln!(w, "  [{}],", names.collect::<Vec<_>>().join(", "));
    }
    *w += "]\n";
    Ok(())
}

/// The modules of a stage by torchtitan's names.
fn modules(stage: &Stage) -> Vec<String> {
    let (first, n) = stage.blocks;
    let embed = stage.embed.then(|| "tok_embeddings".to_string());
    let blocks = (first..first + n).map(|i| format!("layers.{i}"));
    let head = ["norm".to_string(), "output".to_string()];
    let head = head.into_iter().filter(|_| stage.head);
    embed.into_iter().chain(blocks).chain(head).collect()
}

fn checkpoint(s: &Summary, choices: &mut Choices, missing: &mut Missing) -> String {
    let mode = |mode: &str| format!("\n[activation_checkpoint]\nmode = \"{mode}\"\n");
    match choices.uniform().cloned() {
        Some(Recomputed::None) => mode("none"),
        Some(Recomputed::Full) => mode("full"),
        Some(Recomputed::Selective) => {
            missing.add(
                "recomputation of blocks",
                "norms, activation functions and other cheap ops; all matmuls are kept",
                "selective \"op\", which recomputes every second matmul too",
            );
            mode("selective") + "selective_ac_option = \"op\"\n"
        }
        _ => {
            if let Some(n) = every(&choices.recompute) {
                return mode("selective") + &format!("selective_ac_option = \"{n}\"\n");
            }
            for (first, n, what) in super::recompute_runs(&s.recompute) {
                missing.add(
                    format!("recomputation of {}", block_name(first, n)),
                    what.words(),
                    "full: torchtitan treats all blocks alike, and this takes the least memory",
                );
            }
            choices.recompute.fill(Recomputed::Full);
            mode("full")
        }
    }
}

/// The number `n`, where every n-th block recomputes everything and the others nothing.
fn every(blocks: &[Recomputed]) -> Option<usize> {
    let n = 1 + blocks.iter().position(|r| *r == Recomputed::Full)?;
    let expected = |i: usize| match (i + 1).is_multiple_of(n) {
        true => Recomputed::Full,
        false => Recomputed::None,
    };
    let fits = blocks.iter().enumerate().all(|(i, r)| *r == expected(i));
    (n > 1 && fits).then_some(n)
}
