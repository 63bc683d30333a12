//! The table of a model's parameters: path and shape in our layout, name and shape in model
//! files, initial values. Graph and weights both follow it, so they cannot disagree.
//!
//! Our layout puts the input dims of a matrix first and gives heads their own dims, so that
//! a shard never splits a head: GPT-2's fused projection is `[hidden, 3, heads, head_dim]`,
//! Llama's `q` is `[hidden, kv_heads, groups, head_dim]` (without `groups` when that is 1).
//! GPT-2's `Conv1D` weights are stored `[in, out]`, so ours are the same elements in the same
//! order; every `Linear` weight is stored `[out, in]`, so ours is its transpose, reshaped.
//! Experts are stacked, `[experts, hidden, width]`, where files have a tensor for each. Where a file
//! has several of our matrices in one, each of ours is some of its rows; gpt-oss stacks its experts in
//! files too, where gates and ups take turns.
//! Query head `n` of a file is group `n % groups` of KV head `n / groups`.
//!
//! Channels of images are `[groups, channels of a group]`, so that a shard never splits a group of
//! a norm. Files hold them as one dim, convolutions as `[height, width, in, out]` (Flax's layout):
//! the same elements in the same order, under our names.
//!
//! Initial values are those of `_init_weights` in transformers: normal with
//! `initializer_range`, GPT-2's two projections into the residual stream narrower by
//! `sqrt(2 * layers)` (Radford et al. 2019), biases zero, norm gains one. Convolutions are normal with `sqrt(2 / inputs of a window)` (He et
//! al. 2015), and the gains that end a residual block zero (Goyal et al. 2017).

mod decoder;
mod further;
mod hybrid;
mod latent;
mod rows;
mod stacked;

pub use rows::{Rows, Stretch};

use crate::config::{
    ExpertsConfig, Family, Gpt2Config, LlamaConfig, ModelConfig, WideResnetConfig,
};
use ir::op::Init;

/// A parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct Param {
    /// The path of its `State` op, such as `h.0.attn.qkv.weight`.
    pub path: String,
    /// The shape in our layout.
    pub shape: Vec<u64>,
    /// The name in Hugging Face's files, such as `transformer.h.0.attn.c_attn.weight`; with
    /// `pieces`, `*` stands for the index.
    pub hf_name: String,
    /// The shape in Hugging Face's files, one or two dims, three of stacked experts and of a causal convolution, four of a
    /// convolution; with `pieces`, that of each piece.
    pub hf_shape: Vec<u64>,
    /// The rows of the stored tensor that hold the parameter; all, in order, where there is none.
    pub rows: Option<Rows>,
    /// True when the stored matrix is the transpose of ours.
    pub transposed: bool,
    /// The number of tensors that hold the parameter, one for each index of its first dim; `None`
    /// where one tensor holds all of it.
    pub pieces: Option<u64>,
    /// The initial values where no weights are given.
    pub init: Init,
}

impl Param {
    /// Says whether weight decay applies, as it does to what files store with two or more dims.
    pub fn decay(&self) -> bool {
        self.hf_shape.len() >= 2
    }
    /// Returns the names of the tensors that hold the parameter, in the order of its first dim.
    pub fn hf_names(&self) -> Vec<String> {
        match self.pieces {
            None => vec![self.hf_name.clone()],
            Some(n) => (0..n)
                .map(|i| self.hf_name.replacen('*', &i.to_string(), 1))
                .collect(),
        }
    }
    /// Returns the elements of a row of the stored tensor.
    pub(crate) fn row_elements(&self) -> usize {
        match &self.rows {
            Some(rows) => (self.hf_shape.iter().product::<u64>() / rows.stored().max(1)) as usize,
            None => self.hf_shape.iter().skip(1).product::<u64>() as usize,
        }
    }
    /// Returns the number of elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }
}

impl ModelConfig {
    /// Lists all parameters, in the order of the graph.
    pub fn params(&self) -> Vec<Param> {
        match self {
            ModelConfig::Gpt2(c) => gpt2(c),
            ModelConfig::Llama(c) => llama(c),
            ModelConfig::Decoder(c) => decoder::decoder(c),
            ModelConfig::Latent(c) => latent::latent(c),
            ModelConfig::Hybrid(c) => hybrid::hybrid(c),
            ModelConfig::WideResnet(c) => wide_resnet(c),
        }
    }
    /// Counts the parameters; a tied embedding counts once.
    pub fn n_parameters(&self) -> u64 {
        self.params().iter().map(Param::elements).sum()
    }
}

fn gpt2(c: &Gpt2Config) -> Vec<Param> {
    let (h, heads, d) = (c.hidden, c.heads, c.hidden / c.heads);
    let normal = Init::Normal { std: c.init_std };
    let narrow = Init::Normal {
        std: c.init_std / ((2 * c.layers) as f64).sqrt(),
    };
    let mut t = Table {
        prefix: "transformer.",
        params: Vec::new(),
    };
    t.add(
        "embed.wte.weight",
        &[c.vocab, h],
        "wte.weight",
        &[c.vocab, h],
        normal,
    );
    t.add(
        "embed.wpe.weight",
        &[c.positions, h],
        "wpe.weight",
        &[c.positions, h],
        normal,
    );
    for i in 0..c.layers {
        let mut add = |ours: &str, shape: &[u64], theirs: &str, hf_shape: &[u64], init| {
            t.add(
                &format!("h.{i}.{ours}"),
                shape,
                &format!("h.{i}.{theirs}"),
                hf_shape,
                init,
            );
        };
        add("ln_1.weight", &[h], "ln_1.weight", &[h], Init::Ones);
        add("ln_1.bias", &[h], "ln_1.bias", &[h], Init::Zeros);
        add(
            "attn.qkv.weight",
            &[h, 3, heads, d],
            "attn.c_attn.weight",
            &[h, 3 * h],
            normal,
        );
        add(
            "attn.qkv.bias",
            &[3, heads, d],
            "attn.c_attn.bias",
            &[3 * h],
            Init::Zeros,
        );
        add(
            "attn.out.weight",
            &[heads, d, h],
            "attn.c_proj.weight",
            &[h, h],
            narrow,
        );
        add("attn.out.bias", &[h], "attn.c_proj.bias", &[h], Init::Zeros);
        add("ln_2.weight", &[h], "ln_2.weight", &[h], Init::Ones);
        add("ln_2.bias", &[h], "ln_2.bias", &[h], Init::Zeros);
        add(
            "mlp.fc.weight",
            &[h, c.inner],
            "mlp.c_fc.weight",
            &[h, c.inner],
            normal,
        );
        add(
            "mlp.fc.bias",
            &[c.inner],
            "mlp.c_fc.bias",
            &[c.inner],
            Init::Zeros,
        );
        add(
            "mlp.proj.weight",
            &[c.inner, h],
            "mlp.c_proj.weight",
            &[c.inner, h],
            narrow,
        );
        add("mlp.proj.bias", &[h], "mlp.c_proj.bias", &[h], Init::Zeros);
    }
    t.add("head.ln_f.weight", &[h], "ln_f.weight", &[h], Init::Ones);
    t.add("head.ln_f.bias", &[h], "ln_f.bias", &[h], Init::Zeros);
    if !c.tied {
        t.add_head(&[c.vocab, h], normal);
    }
    t.params
}

fn llama(c: &LlamaConfig) -> Vec<Param> {
    let (h, kv, d, inner) = (c.hidden, c.kv_heads, c.head_dim, c.intermediate);
    let normal = Init::Normal { std: c.init_std };
    let query: &[u64] = match c.heads / kv {
        1 => &[kv, d],
        groups => &[kv, groups, d],
    };
    let mut t = Table {
        prefix: "model.",
        params: Vec::new(),
    };
    t.add(
        "embed.wte.weight",
        &[c.vocab, h],
        "embed_tokens.weight",
        &[c.vocab, h],
        normal,
    );
    for i in 0..c.layers {
        let at =
            |ours: &str, theirs: &str| (format!("h.{i}.{ours}"), format!("layers.{i}.{theirs}"));
        t.gain(at("norm_1", "input_layernorm"), h);
        // In one matrix, queries come first, then keys, then values.
        let (of_q, of_kv) = (c.heads * d, kv * d);
        for (ours, theirs, outs, start) in [
            ("attn.q", "self_attn.q_proj", query, 0),
            ("attn.k", "self_attn.k_proj", &[kv, d][..], of_q),
            ("attn.v", "self_attn.v_proj", &[kv, d][..], of_q + of_kv),
        ] {
            match c.family.is_fused() {
                false => t.linear(at(ours, theirs), &[h], outs, c.qkv_bias, normal),
                true => {
                    let n = outs.iter().product();
                    let rows = Rows::run(1, of_q + 2 * of_kv, (start, n));
                    let names = at(ours, "self_attn.qkv_proj");
                    t.linear_of(names, &[h], outs, c.qkv_bias, (&rows, normal));
                }
            }
        }
        t.linear(
            at("attn.out", "self_attn.o_proj"),
            query,
            &[h],
            c.out_bias,
            normal,
        );
        if c.family.has_sinks() {
            let heads = &query[..query.len() - 1];
            let (ours, theirs) = at("attn.sinks", "self_attn.sinks");
            t.add(&ours, heads, &theirs, &[c.heads], normal);
        }
        if c.qk_norm {
            t.gain(at("attn.q_norm", "self_attn.q_norm"), d);
            t.gain(at("attn.k_norm", "self_attn.k_norm"), d);
        }
        match c.family.has_post_norms() {
            false => t.gain(at("norm_2", "post_attention_layernorm"), h),
            true => {
                t.gain(at("post_1", "post_attention_layernorm"), h);
                t.gain(at("norm_2", "pre_feedforward_layernorm"), h);
                t.gain(at("post_2", "post_feedforward_layernorm"), h);
            }
        }
        if let Some(e) = c.experts.as_ref().filter(|e| e.are_in(i)) {
            if c.family == Family::GptOss {
                stacked::experts(&mut t, (h, normal), e, i);
                continue;
            }
            let names = match c.family {
                Family::Mixtral => MIXTRAL,
                _ => QWEN,
            };
            let scopes = (&*format!("h.{i}"), &*format!("layers.{i}"));
            experts(&mut t, (h, normal), &names, e, scopes);
            continue;
        }
        for (ours, theirs, start) in [
            ("mlp.gate", "mlp.gate_proj", 0),
            ("mlp.up", "mlp.up_proj", inner),
        ] {
            match c.family.is_fused() {
                false => t.linear(at(ours, theirs), &[h], &[inner], c.mlp_bias, normal),
                true => {
                    let rows = Rows::run(1, 2 * inner, (start, inner));
                    let names = at(ours, "mlp.gate_up_proj");
                    t.linear_of(names, &[h], &[inner], c.mlp_bias, (&rows, normal));
                }
            }
        }
        t.linear(
            at("mlp.down", "mlp.down_proj"),
            &[inner],
            &[h],
            c.mlp_bias,
            normal,
        );
    }
    t.gain(("head.norm".into(), "norm".into()), h);
    if c.family.has_centred_gains() {
        let ones = t.params.iter_mut().filter(|p| p.init == Init::Ones);
        ones.for_each(|p| p.init = Init::Zeros);
    }
    if !c.tied {
        t.add_head(&[c.vocab, h], normal);
    }
    t.params
}

/// The names of experts in files.
struct ExpertNames {
    /// Their scope in a layer.
    block: &'static str,
    /// Gate, up and down.
    parts: [&'static str; 3],
    /// The scope of the expert that every token goes to.
    shared: &'static str,
}

const MIXTRAL: ExpertNames = ExpertNames {
    block: "block_sparse_moe",
    parts: ["w1", "w3", "w2"],
    shared: "shared_expert",
};
const QWEN: ExpertNames = ExpertNames {
    block: "mlp",
    parts: ["gate_proj", "up_proj", "down_proj"],
    shared: "shared_expert",
};
const DEEPSEEK: ExpertNames = ExpertNames {
    shared: "shared_experts",
    ..QWEN
};

/// Adds the router and the experts of a layer, of a model as wide as `h`; `(layer, stored)` is
/// where it is here and in files.
fn experts(
    t: &mut Table,
    (h, normal): (u64, Init),
    names: &ExpertNames,
    e: &ExpertsConfig,
    (layer, stored): (&str, &str),
) {
    let (inner, block, [gate, up, down]) = (e.intermediate, names.block, names.parts);
    let router = (
        format!("{layer}.moe.router"),
        format!("{stored}.{block}.gate"),
    );
    t.linear(router, &[h], &[e.count], false, normal);
    if e.choice_bias {
        let ours = format!("{layer}.moe.choice.bias");
        let theirs = format!("{stored}.{block}.gate.e_score_correction_bias");
        t.add(&ours, &[e.count], &theirs, &[e.count], Init::Zeros);
    }
    for (ours, theirs, n_in, n_out) in [
        ("gate", gate, h, inner),
        ("up", up, h, inner),
        ("down", down, inner, h),
    ] {
        t.add(
            &format!("{layer}.moe.{ours}.weight"),
            &[e.count, n_in, n_out],
            &format!("{stored}.{block}.experts.*.{theirs}.weight"),
            &[n_out, n_in],
            normal,
        );
        if let Some(last) = t.params.last_mut() {
            (last.transposed, last.pieces) = (true, Some(e.count));
        }
    }
    let Some(inner) = e.shared else { return };
    let (ours, theirs) = (
        format!("{layer}.moe.shared"),
        format!("{stored}.{block}.{}", names.shared),
    );
    for (name, file, n_in, n_out) in [
        ("gate", gate, h, inner),
        ("up", up, h, inner),
        ("down", down, inner, h),
    ] {
        let names = (format!("{ours}.{name}"), format!("{theirs}.{file}"));
        t.linear(names, &[n_in], &[n_out], false, normal);
    }
    if !e.shared_gate {
        return;
    }
    // One number for a token: a matrix of one row in files.
    let names = (format!("{ours}.router"), format!("{theirs}_gate"));
    t.linear(names, &[h], &[], false, normal);
}

fn wide_resnet(c: &WideResnetConfig) -> Vec<Param> {
    let mut t = Table {
        prefix: "",
        params: Vec::new(),
    };
    t.conv(c, "embed.conv", 7, (&[c.image_channels], c.base));
    t.group_norm(c, "embed.norm", c.base, Init::Ones);
    for (i, block) in c.blocks().into_iter().enumerate() {
        let mut conv = |name: &str, kernel, from, to, gain| {
            t.conv(
                c,
                &format!("h.{i}.conv_{name}"),
                kernel,
                (&c.grouped(from), to),
            );
            t.group_norm(c, &format!("h.{i}.norm_{name}"), to, gain);
        };
        conv("1", 1, block.input, block.narrow, Init::Ones);
        conv("2", 3, block.narrow, block.wide, Init::Ones);
        conv("3", 1, block.wide, block.output, Init::Zeros);
        if block.projects() {
            conv("proj", 1, block.input, block.output, Init::Ones);
        }
    }
    let ([groups, width], features) = (c.grouped(c.features()), c.features());
    let weight = [groups, width, c.classes];
    let std = (1.0 / features as f64).sqrt();
    let name = "head.fc.weight";
    t.add(
        name,
        &weight,
        name,
        &[features, c.classes],
        Init::Normal { std },
    );
    let (name, classes) = ("head.fc.bias", [c.classes]);
    t.add(name, &classes, name, &classes, Init::Zeros);
    t.params
}

/// The table under construction.
struct Table {
    prefix: &'static str,
    params: Vec<Param>,
}

impl Table {
    fn add(&mut self, path: &str, shape: &[u64], name: &str, hf_shape: &[u64], init: Init) {
        self.params.push(Param {
            path: path.into(),
            shape: shape.into(),
            hf_name: format!("{}{name}", self.prefix),
            hf_shape: hf_shape.into(),
            rows: None,
            transposed: false,
            pieces: None,
            init,
        });
    }
    /// Adds the gain of an RMS norm; `(ours, theirs)` are its names without `.weight`.
    fn gain(&mut self, (ours, theirs): (String, String), h: u64) {
        self.add(
            &format!("{ours}.weight"),
            &[h],
            &format!("{theirs}.weight"),
            &[h],
            Init::Ones,
        );
    }
    /// Adds gain and bias of a layer norm; `(ours, theirs)` are its names without the leaf.
    fn layer_norm(&mut self, (ours, theirs): (String, String), h: u64) {
        for (leaf, init) in [("weight", Init::Ones), ("bias", Init::Zeros)] {
            let (ours, theirs) = (format!("{ours}.{leaf}"), format!("{theirs}.{leaf}"));
            self.add(&ours, &[h], &theirs, &[h], init);
        }
    }
    /// Adds a `Linear` from dims `ins` to dims `outs`, stored `[out, in]`.
    fn linear(
        &mut self,
        (ours, theirs): (String, String),
        ins: &[u64],
        outs: &[u64],
        bias: bool,
        init: Init,
    ) {
        let (n_in, n_out) = (ins.iter().product(), outs.iter().product());
        self.add(
            &format!("{ours}.weight"),
            &[ins, outs].concat(),
            &format!("{theirs}.weight"),
            &[n_out, n_in],
            init,
        );
        if let Some(weight) = self.params.last_mut() {
            weight.transposed = true;
        }
        if bias {
            self.add(
                &format!("{ours}.bias"),
                outs,
                &format!("{theirs}.bias"),
                &[n_out],
                Init::Zeros,
            );
        }
    }
    /// Adds a `Linear` whose weight and bias are some rows of stored ones.
    fn linear_of(
        &mut self,
        names: (String, String),
        ins: &[u64],
        outs: &[u64],
        bias: bool,
        (rows, init): (&Rows, Init),
    ) {
        let n = self.params.len();
        self.linear(names, ins, outs, bias, init);
        for param in &mut self.params[n..] {
            param.hf_shape[0] = rows.stored();
            param.rows = Some(rows.clone());
        }
    }
    /// Adds a square convolution from input channels in these dims to `to` channels.
    fn conv(&mut self, c: &WideResnetConfig, name: &str, kernel: u64, (from, to): (&[u64], u64)) {
        let name = format!("{name}.weight");
        let inputs: u64 = from.iter().product();
        let shape = [&[kernel, kernel][..], from, &c.grouped(to)].concat();
        let std = (2.0 / (kernel * kernel * inputs) as f64).sqrt();
        let stored = [kernel, kernel, inputs, to];
        self.add(&name, &shape, &name, &stored, Init::Normal { std });
    }
    /// Adds gain and bias of a group norm.
    fn group_norm(&mut self, c: &WideResnetConfig, name: &str, channels: u64, gain: Init) {
        for (leaf, init) in [("weight", gain), ("bias", Init::Zeros)] {
            let name = format!("{name}.{leaf}");
            self.add(&name, &c.grouped(channels), &name, &[channels], init);
        }
    }
    /// Adds a square `Linear` without biases whose inputs are number `part` of the `parts` that one
    /// matrix in files has side by side.
    fn linear_beside(
        &mut self,
        (ours, theirs): (String, String),
        h: u64,
        (part, parts): (u64, u64),
        init: Init,
    ) {
        self.linear((ours, theirs), &[h], &[h], false, init);
        if let Some(weight) = self.params.last_mut() {
            weight.hf_shape = vec![h, parts * h];
            // A row of the file is a row of each part, one behind the other.
            weight.rows = Some(Rows::run(h, parts, (part, 1)));
        }
    }
    /// Adds the output table, which files keep outside the model's prefix.
    fn add_head(&mut self, shape: &[u64], init: Init) {
        self.add("head.lm_head.weight", shape, "", shape, init);
        if let Some(last) = self.params.last_mut() {
            last.hf_name = crate::weights::HEAD_NAME.into();
        }
    }
}
