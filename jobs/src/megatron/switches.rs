//! Behaviour that arguments switch: what blocks recompute, number formats, kernels, overlap.

use super::Beside;
use crate::arguments::Arguments;
use crate::{JobError, Note, NoteKind, Recompute};
use frameworks::Recomputation;
use ir::Precision;

/// Names of modules that Megatron recomputes, and the ops that they are.
const MODULES: [(&str, &[&str]); 5] = [
    ("core_attn", &["attn.attend"]),
    ("layernorm", &["ln_1", "ln_2", "norm_1", "norm_2"]),
    ("moe_act", &["moe.act", "moe.mul"]),
    ("mlp", &["mlp.*"]),
    ("moe", &["moe.*"]),
];

pub(super) fn recompute(
    args: &Arguments,
    beside: &Beside,
    notes: &mut Vec<Note>,
) -> Result<Recompute, JobError> {
    let old = args.switch("checkpoint-activations");
    let selective = args.switch("recompute-activations");
    let granularity = args.text("recompute-granularity")?.map(String::from);
    let method = args.text("recompute-method")?.map(String::from);
    let number = args.count("recompute-num-layers")?;
    let modules = args.list("recompute-modules")?;
    if beside.deepspeed && args.switch("deepspeed-activation-checkpointing") || old {
        return Ok(Recompute::All(Recomputation::Full));
    }
    match granularity.as_deref() {
        None if selective => Ok(Recompute::All(Recomputation::Attention)),
        None => Ok(Recompute::All(Recomputation::None)),
        Some("full") => {
            match method.as_deref() {
                Some("block") => Ok(Recompute::First(number.unwrap_or(1))),
                _ => {
                    if let Some(n) = number.filter(|n| *n > 1) {
                        notes.push(Note {
                        kind: NoteKind::NotModelled,
                        name: args.spelled("recompute-num-layers"),
                        value: Some(n.to_string()),
                        line: None,
                        words: "blocks are recomputed so many at a time: less is kept than predicted".into(),
                    });
                    }
                    Ok(Recompute::All(Recomputation::Full))
                }
            }
        }
        Some("selective") => {
            let modules = match modules.is_empty() {
                true => vec!["core_attn".to_string()],
                false => modules,
            };
            let mut ops = Vec::new();
            for module in &modules {
                match MODULES.iter().find(|(name, _)| name == module) {
                    Some((_, own)) => ops.extend(own.iter().map(|o| o.to_string())),
                    None => notes.push(Note {
                        kind: NoteKind::NotModelled,
                        name: args.spelled("recompute-modules"),
                        value: Some(module.clone()),
                        line: None,
                        words: "what this module recomputes is not modelled: less memory and more time than predicted".into(),
                    }),
                }
            }
            Ok(match &modules[..] {
                [one] if one == "core_attn" => Recompute::All(Recomputation::Attention),
                [one] if one == "layernorm" => Recompute::All(Recomputation::Norms),
                _ if ops.is_empty() => Recompute::All(Recomputation::None),
                _ => Recompute::Ops(ops),
            })
        }
        Some(other) => Err(args.wrong(
            "recompute-granularity",
            format!("`{other}` is no granularity"),
            "Megatron-LM knows full and selective",
        )),
    }
}

/// The behaviours that the job switches on, by the names of options.
pub(super) fn options(
    args: &Arguments,
    beside: &Beside,
    notes: &mut Vec<Note>,
) -> Result<Vec<String>, JobError> {
    let mut options = Vec::new();
    let fp8 = match args.text("fp8-format")? {
        None => args.text("fp8")?,
        some => some,
    };
    if fp8.is_some_and(|f| f != "False") {
        let recipe = args.text("fp8-recipe")?.unwrap_or("delayed");
        options.push(match recipe {
            "delayed" => "fp8-ds",
            "tensorwise" => "fp8-cs",
            "blockwise" => "fp8-sc",
            "mxfp8" => "mxfp8",
            other => {
                return Err(args.wrong(
                    "fp8-recipe",
                    format!("`{other}` is no recipe that is modelled"),
                    "modelled are delayed, tensorwise, blockwise and mxfp8",
                ));
            }
        });
    } else {
        args.text("fp8-recipe")?;
    }
    let fp4 = args.text("fp4-format")?.or(args.text("fp4")?);
    if fp4.is_some_and(|f| f != "False") {
        options.push("nvfp4");
    }
    args.text("fp4-recipe")?;
    if args.switch("overlap-moe-expert-parallel-comm") {
        options.push("overlapped-dispatch");
    }
    let flex = args
        .text("moe-flex-dispatcher-backend")?
        .is_some_and(|b| b.ends_with("ep"));
    let is_flex = args.text("moe-token-dispatcher-type")? == Some("flex");
    if args.switch("moe-enable-deepep") || flex && is_flex {
        options.push("dispatch-once-per-host");
    }
    let mut options: Vec<String> = options.into_iter().map(String::from).collect();
    let backend = args.text("attention-backend")?.unwrap_or("auto");
    match backend.trim_start_matches("AttnBackend.") {
        "auto" | "fused" => {}
        "flash" => options.push("attention=flash-2".into()),
        "unfused" | "local" if !beside.deepspeed => options.push("attention=unfused".into()),
        other => notes.push(Note {
            kind: NoteKind::NotModelled,
            name: args.spelled("attention-backend"),
            value: Some(other.into()),
            line: None,
            words: "figures are of the version's usual attention kernel".into(),
        }),
    }
    Ok(options)
}

/// The types of bf16 activations' gradients, as an option, where they are not summed and sent in
/// f32. Plain data parallelism has `--grad-reduce-in-bf16` for both, and patterns of parameters that
/// are summed in f32 all the same; Megatron-FSDP has a flag for each, and sums in the parameters' type
/// where it is not asked.
pub(super) fn gradients(
    args: &Arguments,
    precision: Precision,
    notes: &mut Vec<Note>,
) -> Result<Option<&'static str>, JobError> {
    const IN_BF16: &str = "grad-reduce-in-bf16";
    const SUMMED: &str = "megatron-fsdp-main-grads-dtype";
    const IN_F32: &str = "accumulate-allreduce-grads-in-fp32";
    let off = args.is_off(IN_F32);
    let narrow = args.switch(IN_BF16) || off;
    args.switch(IN_F32);
    let patterns = args.list("ddp-param-name-patterns-for-fp32-local-accumulation")?;
    let dtype = |text: Option<&str>, usual: bool| match text {
        None | Some("auto" | "None") => usual,
        Some(text) => text.ends_with("bf16") || text.ends_with("bfloat16"),
    };
    let [summed_narrow, sent_narrow] = match args.switch("use-megatron-fsdp") {
        true => {
            let summed = dtype(args.text(SUMMED)?, true);
            [
                summed,
                dtype(args.text("megatron-fsdp-grad-comm-dtype")?, summed),
            ]
        }
        false => [narrow && !patterns.iter().any(|p| p == "all"), narrow],
    };
    if precision != Precision::Bf16 {
        return Ok(None);
    }
    if summed_narrow {
        let name = match (args.switch("use-megatron-fsdp"), args.switch(IN_BF16)) {
            (true, _) => SUMMED,
            (false, true) => IN_BF16,
            (false, false) => IN_F32,
        };
        notes.push(Note {
            kind: NoteKind::NotModelled,
            name: args.spelled(name),
            value: None,
            line: args.line(name),
            words: "gradients are summed over microbatches in bf16, which the time counts and the memory does not: the device holds less than predicted".into(),
        });
    }
    Ok(match (summed_narrow, sent_narrow) {
        (true, _) => Some("grads-bf16"),
        (false, true) => Some("grads-sent-bf16"),
        (false, false) => None,
    })
}

/// The behaviours of Megatron-Core's runs that the job leaves out, as options: overlaps that flags
/// ask for.
pub(super) fn left_out(
    args: &Arguments,
    beside: &Beside,
    [tensor, zero, data]: [u32; 3],
) -> Vec<String> {
    let asked = [
        "tp-comm-overlap",
        "overlap-grad-reduce",
        "overlap-param-gather",
    ];
    let [overlaps_tensor, overlaps_grads, overlaps_params] = asked.map(|name| args.switch(name));
    if beside.deepspeed {
        return Vec::new();
    }
    let all = [
        (tensor > 1 && !overlaps_tensor, "no-tensor-overlap"),
        (data > 1 && !overlaps_grads, "no-gradient-overlap"),
        (
            data > 1 && zero > 0 && !overlaps_params,
            "no-parameter-overlap",
        ),
    ];
    let some = all.into_iter().filter(|(is, _)| *is);
    some.map(|(_, option)| option.to_string()).collect()
}
