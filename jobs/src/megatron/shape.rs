//! The model that Megatron-LM's arguments describe, as a configuration of the family that has its
//! blocks: Llama, Qwen2, Qwen3, Mixtral, Qwen3-MoE, Qwen2-MoE, GPT-2, GPT-NeoX or Nemotron.

use super::degrees::{degree, vocab_multiple};
use super::given_count;
use crate::arguments::{Arguments, assumed};
use crate::{Capacity, Given, JobError, MOST_CAPACITY, Model, Note};
use serde_json::{Value, json};

/// The parts of a model, before its family is known.
struct Shape {
    layers: u64,
    hidden: u64,
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
    ffn: u64,
    vocab: u64,
    positions: u64,
    tied: bool,
    bias: bool,
    qkv_bias: bool,
    qk_norm: bool,
    rms: bool,
    gated: bool,
    squared: bool,
    rotary: bool,
    learned: bool,
    theta: f64,
    rotary_share: f64,
    epsilon: f64,
    activation: &'static str,
    /// Tokens that a query looks back over, its own among them.
    window: Option<u64>,
    experts: Option<Experts>,
}

struct Experts {
    count: u64,
    top_k: u64,
    ffn: u64,
    shared: Option<u64>,
    /// Blocks without experts.
    dense: Vec<u64>,
    /// Whether weights are those of a softmax over all experts.
    pre_softmax: bool,
}

/// The model, and what was assumed of it. Where another one is given the arguments need not say it.
pub(super) fn model(args: &Arguments, given: &Given) -> Result<(Model, Vec<Note>), JobError> {
    let mut notes = Vec::new();
    let stated = other(args).map_or_else(|| shape(args, given, &mut notes), |why| Ok(Err(why)))?;
    let mut shape = match stated {
        Ok(shape) => shape,
        Err(why) => return Ok((Model::NotStated(why), notes)),
    };
    if shape.gated && shape.rotary && !shape.bias && !shape.rms {
        shape.rms = true;
        notes.push(assumed(
            "--normalization",
            "RMSNorm",
            "no model here has LayerNorm beside a gated MLP: the other norm reads and writes as much",
        ));
    }
    match config(&shape) {
        Ok(config) => Ok((Model::Config(config), notes)),
        Err(what) => Ok((
            Model::NotStated(format!("none that is read has {what}")),
            notes,
        )),
    }
}

/// The most experts of a layer.
const MOST_EXPERTS: u64 = 1 << 20;

/// The slots of experts; none where no token is dropped, which a negative factor says, too.
pub(super) fn capacity(args: &Arguments) -> Result<Option<Capacity>, JobError> {
    let name = "moe-expert-capacity-factor";
    let padded = args.switch("moe-pad-expert-input-to-capacity");
    match args.number(name)? {
        Some(factor) if factor > 0.0 && factor <= MOST_CAPACITY => {
            Ok(Some(Capacity { factor, padded }))
        }
        Some(factor) if factor >= 0.0 => Err(args.wrong(
            name,
            format!("`--{name}` is {factor}, expected a number above 0, up to {MOST_CAPACITY}"),
            "give experts 1 or a little more, or leave it out: then no token is dropped",
        )),
        _ => Ok(None),
    }
}

/// The experts of a layer; none where it has one alone, as logs write of models without (`[1]`).
pub(super) fn n_experts(args: &Arguments) -> Result<Option<u64>, JobError> {
    let counts = args.list("num-experts")?;
    match counts.as_slice() {
        [one] if one == "1" => Ok(None),
        [one] => match one.parse().ok().filter(|n| (1..=MOST_EXPERTS).contains(n)) {
            Some(n) => Ok(Some(n)),
            None => args.count("num-experts"),
        },
        _ => args.count("num-experts"),
    }
}

/// Parts of the model that no family here has.
fn other(args: &Arguments) -> Option<String> {
    let switches = [
        (
            "multi-latent-attention",
            "latent attention, whose sizes are not read from arguments",
        ),
        ("is-hybrid-model", "a hybrid of attention and state spaces"),
        (
            "hybrid-override-pattern",
            "a hybrid of attention and state spaces",
        ),
        (
            "hybrid-attention-ratio",
            "a hybrid of attention and state spaces",
        ),
        ("mamba-num-heads", "state spaces"),
        ("quick-geglu", "another gated activation"),
    ];
    let found = switches
        .iter()
        .find(|(name, _)| args.has_any(&[name]) && args.switch(name));
    found.map(|(name, what)| format!("`--{name}` asks for {what}"))
}

/// The sizes; the inner error says what is missing where another model may be given.
fn shape(
    args: &Arguments,
    given: &Given,
    notes: &mut Vec<Note>,
) -> Result<Result<Shape, String>, JobError> {
    let sizes = ["num-layers", "hidden-size", "num-attention-heads"];
    let mut found = [0; 3];
    for (size, name) in found.iter_mut().zip(sizes) {
        match args.count(name)? {
            Some(n) => *size = n,
            None => return Ok(Err(format!("the arguments have no `--{name}`"))),
        }
    }
    let [layers, hidden, heads] = found;
    let gated = args.switch("swiglu");
    let ffn = args.count("ffn-hidden-size")?.unwrap_or(match gated {
        // As `validate_args` computes it.
        true => (hidden.saturating_mul(8) / 3) / 64 * 64,
        false => hidden.saturating_mul(4),
    });
    let head_dim = args.count("kv-channels")?.unwrap_or(hidden / heads);
    let groups = args.count("num-query-groups")?;
    let older = args.count("num-key-value-heads")?;
    let kv_heads = match args.switch("group-query-attention") {
        true => groups.unwrap_or(1),
        false => older.unwrap_or(heads),
    };
    let position = args.text("position-embedding-type")?;
    let rotary = position == Some("rope") || args.switch("use-rotary-position-embeddings");
    let learned = !rotary && matches!(position, None | Some("learned_absolute"));
    let sequence = args.count("seq-length")?;
    let positions = args
        .count("max-position-embeddings")?
        .or(sequence)
        .unwrap_or(1);
    let sequence_positions = sequence.unwrap_or(1).max(positions);
    let vocab = match vocab(args, given, notes)? {
        Some(vocab) => vocab,
        None => return Ok(Err(NO_VOCAB.into())),
    };
    if args.switch("squared-relu") {
        // Nemotron's gains are stored so.
        args.switch("apply-layernorm-1p");
    }
    let activation = match (
        args.switch("no-bias-gelu-fusion"),
        args.switch("openai-gelu"),
    ) {
        (_, true) | (false, false) => "gelu_new",
        (true, false) => "gelu",
    };
    let norm = args.text("normalization")?.unwrap_or("LayerNorm");
    let epsilon = args
        .number("norm-epsilon")?
        .or(args.number("layernorm-epsilon")?);
    Ok(Ok(Shape {
        layers,
        hidden,
        heads,
        kv_heads,
        head_dim,
        ffn,
        vocab,
        positions: sequence_positions,
        tied: !args.switch("untie-embeddings-and-output-weights"),
        bias: !args.switch("disable-bias-linear"),
        qkv_bias: args.switch("add-qkv-bias"),
        qk_norm: args.switch("qk-layernorm"),
        rms: norm.eq_ignore_ascii_case("rmsnorm"),
        gated,
        squared: args.switch("squared-relu"),
        rotary,
        learned,
        theta: args
            .number("rotary-base")?
            .filter(|t| *t > 0.0)
            .unwrap_or(10_000.0),
        rotary_share: args.number("rotary-percent")?.unwrap_or(1.0),
        epsilon: epsilon.filter(|e| *e > 0.0 && *e < 1.0).unwrap_or(1e-5),
        activation,
        window: window(args)?,
        experts: experts(args, layers, ffn, notes)?,
    }))
}

/// The window of attention, in blocks that are read with one: those of Mistral, all of them.
fn window(args: &Arguments) -> Result<Option<u64>, JobError> {
    let others = ["window-attn-skip-freq", "qk-layernorm", "add-qkv-bias"];
    let is_other = others.iter().any(|name| args.is_on(name)) || n_experts(args)?.is_some();
    if is_other || !args.switch("swiglu") || !args.switch("disable-bias-linear") {
        return Ok(None);
    }
    let Some(text) = args.text("window-size")? else {
        return Ok(None);
    };
    // Tokens to the left of a query's own, and to the right; -1 for all.
    let inner = text.trim_matches(['(', ')', ' ']);
    let sides = inner.split_once(',').unwrap_or((inner, "0"));
    let number = |side: &str| side.trim().parse::<i64>();
    match (number(sides.0), number(sides.1)) {
        (Ok(n), Ok(_)) if n < 0 => Ok(None),
        (Ok(n), Ok(..=0)) => Ok(Some(n.unsigned_abs() + 1)),
        _ => Err(args.wrong(
            "window-size",
            format!("`{text}` is no window such as 4095,0"),
            "give the tokens to the left of a query's own, and a zero behind the comma",
        )),
    }
}

const NO_VOCAB: &str = "the vocabulary is the tokenizer's, and the arguments do not say how large it is; --set vocab_size=N says it";

fn vocab(args: &Arguments, given: &Given, notes: &mut Vec<Note>) -> Result<Option<u64>, JobError> {
    if let Some(n) = args.count("padded-vocab-size")? {
        return Ok(Some(n));
    }
    if let Some(n) = given_count(given, &["vocab_size", "vocab-size", "VOCAB_SIZE"])? {
        return Ok(Some(n));
    }
    if let Some(n) = args.count("vocab-size")? {
        return of_tokenizer(args, given, n, notes).map(Some);
    }
    if given.has_model {
        return Ok(None);
    }
    let kind = args
        .text("tokenizer-type")
        .ok()
        .flatten()
        .unwrap_or_default();
    let model = args
        .text("tokenizer-model")
        .ok()
        .flatten()
        .unwrap_or_default()
        .to_lowercase();
    let known = [
        ("gpt2bpe", 50_257),
        ("llama-3", 128_256),
        ("llama3", 128_256),
        ("llama-2", 32_000),
        ("llama2", 32_000),
        ("mixtral", 32_000),
        ("mistral-7b", 32_000),
        ("qwen", 151_936),
    ];
    let is = |name: &str| kind.to_lowercase().contains(name) || model.contains(name);
    let Some((name, n)) = known.iter().find(|(name, _)| is(name)) else {
        return Ok(None);
    };
    notes.push(assumed(
        "--vocab-size",
        n,
        &format!("the arguments do not say it, and the tokenizer is called `{name}`; --set vocab_size=N says another"),
    ));
    Ok(Some(*n))
}

/// The tokens of a tokenizer that is told to have `n`. Megatron's NullTokenizer had one more for the end
/// of documents, until commit c9dfe34 of April 2026 (core_v0.18) counted that among the `n`; the one for
/// images and text has it still.
fn of_tokenizer(
    args: &Arguments,
    given: &Given,
    n: u64,
    notes: &mut Vec<Note>,
) -> Result<u64, JobError> {
    let adds = match args.text("tokenizer-type")? {
        Some("NullMultimodalTokenizer") => true,
        Some("NullTokenizer") => given.is_older,
        _ => return Ok(n),
    };
    if adds {
        return Ok(n + 1);
    }
    let tensor = degree(args, &["tensor-model-parallel-size", "model-parallel-size"])?;
    let multiple = vocab_multiple(args, tensor)?;
    let padded = |n: u64| n.checked_next_multiple_of(multiple).unwrap_or(n);
    if padded(n) != padded(n + 1) {
        notes.push(assumed(
            "--vocab-size",
            n,
            &format!(
                "as many as NullTokenizer has since Megatron-Core 0.18; before, it had one more, and the table {} rows: --set vocab_size={} says so",
                padded(n + 1),
                n + 1
            ),
        ));
    }
    Ok(n)
}

fn experts(
    args: &Arguments,
    layers: u64,
    ffn: u64,
    notes: &mut Vec<Note>,
) -> Result<Option<Experts>, JobError> {
    let count = n_experts(args)?;
    let top_k = args.count("moe-router-topk")?.unwrap_or(2);
    let inner = args.count("moe-ffn-hidden-size")?.unwrap_or(ffn);
    let shared = args.count("moe-shared-expert-intermediate-size")?;
    let has_capacity = capacity(args)?.is_some();
    let frequency = args.text("moe-layer-freq")?.map(String::from);
    let Some(count) = count else {
        return Ok(None);
    };
    if !has_capacity {
        notes.push(assumed(
            "--moe-expert-capacity-factor",
            1.0,
            "tokens are taken to spread evenly over the experts, as a balanced router has them",
        ));
    }
    let bad = |text: &str| {
        args.wrong(
            "moe-layer-freq",
            format!("`{text}` is neither a number nor a list such as [0,1,1]"),
            "write out the list, one number for each layer",
        )
    };
    let dense = match frequency.as_deref() {
        None => Vec::new(),
        Some(text) => match text.parse::<u64>() {
            Ok(n @ 1..) => (0..layers).filter(|i| i % n != 0).take(100_000).collect(),
            _ => {
                let inner = text
                    .trim()
                    .strip_prefix('[')
                    .and_then(|t| t.strip_suffix(']'));
                let list = inner.ok_or_else(|| bad(text))?.split(',');
                let flags: Option<Vec<bool>> = list
                    .map(|w| match w.trim() {
                        "0" => Some(false),
                        "1" => Some(true),
                        _ => None,
                    })
                    .collect();
                let flags = flags
                    .filter(|f| f.len() as u64 == layers)
                    .ok_or_else(|| bad(text))?;
                (0..layers)
                    .zip(flags)
                    .filter(|(_, has)| !has)
                    .map(|(i, _)| i)
                    .collect()
            }
        },
    };
    Ok(Some(Experts {
        count,
        top_k,
        ffn: inner,
        shared,
        dense,
        pre_softmax: args.switch("moe-router-pre-softmax"),
    }))
}

/// The configuration of the family that has such blocks.
fn config(s: &Shape) -> Result<Value, String> {
    let rotary = |mut base: Value| {
        base["rope_theta"] = json!(s.theta);
        base
    };
    let sizes = json!({
        "hidden_size": s.hidden, "intermediate_size": s.ffn, "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads, "vocab_size": s.vocab,
        "max_position_embeddings": s.positions, "tie_word_embeddings": s.tied,
    });
    let with = |mut base: Value, more: Value| {
        if let (Some(base), Some(more)) = (base.as_object_mut(), more.as_object()) {
            base.extend(more.clone());
        }
        base
    };
    let llama = |kind: &str| {
        let own = json!({
            "model_type": kind, "num_key_value_heads": s.kv_heads, "rms_norm_eps": s.epsilon,
        });
        rotary(with(sizes.clone(), own))
    };
    let head_dim = json!({ "head_dim": s.head_dim });
    let is_narrow = s.head_dim.checked_mul(s.heads) != Some(s.hidden);
    if s.rms && s.gated && s.rotary && !s.bias {
        if s.rotary_share < 1.0 {
            return Err("a part of each head turns, in a block of Llama's kind".into());
        }
        return match &s.experts {
            Some(e) => mixture(s, e, &llama),
            None if s.qk_norm => Ok(with(llama("qwen3"), head_dim)),
            None if s.qkv_bias && is_narrow => {
                Err("biases of queries, keys and values on heads of another width".into())
            }
            None if s.qkv_bias => Ok(llama("qwen2")),
            None => Ok(match s.window {
                None => with(llama("llama"), head_dim),
                window => {
                    let own = json!({ "sliding_window": window });
                    with(with(llama("mistral"), head_dim), own)
                }
            }),
        };
    }
    if s.window.is_some() {
        return Err("attention within a window, in blocks that are not Mistral's".into());
    }
    if s.experts.is_some() {
        return Err("experts without gates, biases or root-mean-square norms".into());
    }
    if s.gated || s.rms {
        return Err(format!(
            "a block with {}, {} and {}",
            if s.rms { "RMSNorm" } else { "LayerNorm" },
            if s.gated {
                "a gated MLP"
            } else {
                "a plain MLP"
            },
            if s.bias { "biases" } else { "no biases" }
        ));
    }
    if s.squared && s.rotary && !s.bias {
        let own = json!({
            "model_type": "nemotron", "num_key_value_heads": s.kv_heads, "hidden_act": "relu2",
            "norm_eps": s.epsilon, "partial_rotary_factor": s.rotary_share,
            "attention_bias": false, "mlp_bias": false,
        });
        return Ok(with(rotary(with(sizes, own)), head_dim));
    }
    let plain_heads = s.kv_heads == s.heads && !is_narrow && s.bias && !s.squared;
    if s.rotary && plain_heads {
        let own = json!({
            "model_type": "gpt_neox", "hidden_act": s.activation, "layer_norm_eps": s.epsilon,
            "rotary_pct": s.rotary_share, "rotary_emb_base": s.theta,
            "use_parallel_residual": false,
        });
        return Ok(with(sizes, own));
    }
    if s.learned && plain_heads {
        return Ok(json!({
            "model_type": "gpt2", "n_layer": s.layers, "n_head": s.heads, "n_embd": s.hidden,
            "n_positions": s.positions, "vocab_size": s.vocab, "n_inner": s.ffn,
            "activation_function": s.activation, "layer_norm_epsilon": s.epsilon,
            "tie_word_embeddings": s.tied,
        }));
    }
    Err("a plain MLP with grouped or narrower heads, without biases, or with positions of another kind".into())
}

fn mixture(s: &Shape, e: &Experts, llama: &dyn Fn(&str) -> Value) -> Result<Value, String> {
    let mut config = match (s.qk_norm, e.shared, e.dense.is_empty()) {
        (false, None, true) if !s.qkv_bias => {
            let mut config = llama("mixtral");
            config["intermediate_size"] = json!(e.ffn);
            config["num_local_experts"] = json!(e.count);
            config["num_experts_per_tok"] = json!(e.top_k);
            return Ok(config);
        }
        (true, None, _) => {
            let mut config = llama("qwen3_moe");
            config["head_dim"] = json!(s.head_dim);
            config
        }
        (false, Some(shared), _) if s.qkv_bias => {
            let mut config = llama("qwen2_moe");
            config["shared_expert_intermediate_size"] = json!(shared);
            config
        }
        _ => return Err(
            "experts beside shared ones or dense layers, in blocks of a family that is not read"
                .into(),
        ),
    };
    config["num_experts"] = json!(e.count);
    config["num_experts_per_tok"] = json!(e.top_k);
    config["moe_intermediate_size"] = json!(e.ffn);
    config["norm_topk_prob"] = json!(!e.pre_softmax);
    if !e.dense.is_empty() {
        config["mlp_only_layers"] = json!(e.dense);
    }
    Ok(config)
}
