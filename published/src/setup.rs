//! The training of a row: the training spec and the pins that describe its plan.

use crate::choices::{self, Choice};
use crate::facts::{Facts, Generation, Split};
use crate::hybrid;
use crate::mixture::{self, Experts};
use crate::model::FURTHER;
use crate::row::{Row, RowError};
use crate::{Unmodelled, model, precision};
use frameworks::AttentionKernel;
use ir::TrainSpec;
use planner::software::table_pin;

/// The training spec of a row.
pub fn train_spec(row: &Row, dropout: f64) -> Result<TrainSpec, Unmodelled> {
    Ok(TrainSpec {
        global_batch: row.required_count("global_batch")?,
        sequence: row.required_count("seq_len")?,
        precision: precision::types(row)?.activations,
        dropout,
        ..TrainSpec::default()
    })
}

/// The pins that describe a row's plan, in the form that `compile --pin` reads, and what had to
/// be assumed for them; `choice` is one of [`choices`].
///
/// Fails where a degree is not stated, or the plan uses what the planner does not know.
pub fn pins(
    row: &Row,
    facts: &Facts,
    choice: &Choice,
) -> Result<(Vec<String>, Vec<String>), Unmodelled> {
    let (_, generation) = facts.generation(row)?;
    let mut assumed = choice.assumed(row)?;
    let degree = |column: &str| -> Result<u64, RowError> { Ok(row.count(column)?.unwrap_or(1)) };
    let expert = degree("ep")?;
    let experts = mixture::experts(row)?;
    if expert > 1 && experts.is_none() {
        let why = "expert parallelism of a model whose experts are not stated";
        return Err(Unmodelled::Feature(why.into()));
    }
    let (tensor, pipeline, context) = (degree("tp")?, degree("pp")?, degree("cp")?);
    let data = choices::data(row)?;
    let per_replica = choice.micro_batch;
    let (zero, is_stated) = zero_stage(row)?.unwrap_or((generation.zero, false));
    if !is_stated {
        assumed.push(format!("zero={zero}"));
    }
    // Parameters stay gathered over a step that they would be gathered in for every microbatch.
    let zero = match generation.zero_in_pipeline {
        Some(most) if pipeline > 1 && zero > most => {
            assumed.retain(|a| !a.starts_with("zero="));
            assumed.push(format!("zero={most}"));
            most
        }
        _ => zero,
    };
    let choices = ["none", "selective", "full"];
    let recompute = row.word("recompute", &choices, "none, selective or full")?;
    let recomputed = match recompute {
        None => facts.recipes.recomputed(row),
        Some(_) => Vec::new(),
    };
    let recompute = recompute.unwrap_or_else(|| {
        let ops: String = recomputed.iter().map(|op| format!("+{op}")).collect();
        assumed.push(format!("recompute={}{ops}", generation.recompute));
        &generation.recompute
    });
    let is_parallel = row.word("sequence_parallel", &["yes", "no"], "yes or no")?;
    if is_parallel.is_none() && tensor > 1 {
        assumed.push("sequence_parallel=no".into());
    }
    let is_parallel = is_parallel == Some("yes");
    let chunks = choice.chunks;
    let mut pins = vec![
        format!("data={data}"),
        format!("tensor={tensor}"),
        format!("pipeline={pipeline}"),
        format!("zero={zero}"),
        format!("microbatch={}", per_replica * data),
        "schedule=1f1b".to_string(),
    ];
    if context > 1 {
        pins.push(format!("context={context}"));
        // Where the chunks are equal.
        let equal = row.required_count("seq_len")?.is_multiple_of(2 * context);
        // Routing looks at all tokens of a sample in their order.
        match generation.balanced_context && experts.is_none() {
            true if equal => pins.push("context_order=zigzag".into()),
            true => assumed.push("context_order=natural".into()),
            false => {}
        }
        // Keys and values come to the queries in every framework that the tables name.
        pins.push("context_attention=gather".into());
    }
    let attention = facts
        .attention(&generation.attention)
        .map_err(Unmodelled::Cluster)?;
    pins.extend(recompute_pins(row, recompute, generation, attention)?);
    pins.extend(recomputed.iter().map(|op| recomputed_op(op)));
    if chunks > 1 && pipeline > 1 {
        pins.push(format!("virtual={chunks}"));
        let of_replica = row.required_count("global_batch")? / data.saturating_mul(per_replica);
        if row.count("vpp")?.is_some() && !of_replica.is_multiple_of(pipeline) {
            return Err(Unmodelled::Plan(format!(
                "vpp {chunks} takes microbatches in groups of pp {pipeline}, and a replica has {of_replica}"
            )));
        }
    }
    if pipeline > 1 {
        let layers = row.required_count("layers")?;
        match facts.recipes.layout(row, layers, pipeline * chunks) {
            Some(layout) => {
                pins.push(split_text(&layout.counts));
                if layout.further > 0 {
                    assumed.push(format!("{FURTHER}={}", layout.further));
                }
            }
            None => {
                // Modules for further tokens are beside the head.
                let further = row.count(FURTHER)?.unwrap_or(0);
                let stages = pipeline * chunks;
                let (pin, even) = split_pin(generation.split, layers, stages, further)?;
                if !even {
                    assumed.push("stages=uneven".into());
                }
                pins.push(pin);
            }
        }
    }
    assumed.extend(uneven(row, tensor, is_parallel)?);
    let among_samples = match expert {
        1 => 1,
        _ => experts_among_samples(expert, tensor, data)?,
    };
    if among_samples > 1 {
        pins.push(format!("expert={among_samples}"));
    }
    if experts.is_some() {
        assumed.push("routing=balanced".to_string());
        let mut own = expert_pins(expert, tensor, among_samples > 1, context > 1);
        // Experts of a hybrid have no gate.
        own.retain(|pin| !hybrid::is_hybrid(row) || !pin.starts_with("spec:h.*.moe.gate="));
        pins.extend(own);
    }
    if tensor > 1 {
        pins.extend(residual_pins(
            row,
            among_samples > 1,
            context > 1,
            is_parallel,
        ));
        let at = (tensor, among_samples > 1, context > 1);
        pins.extend(column_pins(row, experts, at)?);
        let is_plain = among_samples == 1 && context == 1;
        pins.extend(table_pins(row, generation, (zero, data), is_plain)?);
    }
    Ok((pins, assumed))
}

/// How many layers predict further tokens, by the layout of the stages that a row's recipe names.
pub fn further(row: &Row, facts: &Facts, choice: &Choice) -> Result<u64, RowError> {
    let (stages, layers) = (row.count("pp")?.unwrap_or(1), row.count("layers")?);
    let layers = layers.filter(|_| stages > 1);
    let layout = layers.and_then(|n| facts.recipes.layout(row, n, stages * choice.chunks));
    Ok(layout.map_or(0, |l| l.further))
}

/// How many of the ranks that split samples split the experts. An expert is not split itself,
/// as in Megatron-Core's benchmarks (`expert_tensor_parallel_size` 1): experts lie over the
/// tensor ranks first, then over ranks that split samples.
fn experts_among_samples(expert: u64, tensor: u64, data: u64) -> Result<u64, Unmodelled> {
    let among = expert / tensor;
    match expert.is_multiple_of(tensor) && data.is_multiple_of(among) {
        true => Ok(among),
        false => Err(Unmodelled::Feature(format!(
            "ep {expert} over tp {tensor} and dp {data}"
        ))),
    }
}

/// Where the experts' matmuls have the experts, on the tensor ranks too where there are several;
/// and without these, that tokens travel by all-to-alls, which the search may find dearer than
/// to gather them.
fn expert_pins(expert: u64, tensor: u64, is_among_samples: bool, has_context: bool) -> Vec<String> {
    let tokens = if has_context { "context" } else { "_" };
    let experts = match (expert, tensor, is_among_samples) {
        (1, _, _) => return Vec::new(),
        (_, 1, _) if has_context => return Vec::new(),
        (_, 1, _) => {
            return vec![
                "spec:h.*.moe.dispatch=[_,data+expert,_,_]".to_string(),
                "spec:h.*.moe.combine=[data+expert,_,_]".to_string(),
            ];
        }
        (_, _, true) => "tensor+expert",
        (_, _, false) => "tensor",
    };
    let of = |op| format!("spec:h.*.moe.{op}=[{experts},data,{tokens},_]");
    ["gate", "up", "down"].map(of).to_vec()
}

/// The ZeRO level that a cell begins with, and whether it is what the cell says; none where it is
/// not stated.
fn zero_stage(row: &Row) -> Result<Option<(u8, bool)>, RowError> {
    let Some(text) = row.text("zero_stage") else {
        return Ok(None);
    };
    let mut chars = text.chars();
    let level = chars
        .next()
        .and_then(|c| c.to_digit(10))
        .filter(|&d| d <= 3);
    match (level, chars.next()) {
        // Sharded inside a small group only: what crosses the hosts is a plain all-reduce.
        (Some(level), _) if text.contains("within") || text.contains("group of") => {
            Ok(Some((0, level == 0)))
        }
        (Some(level), None | Some(' ' | '-')) => Ok(Some((level as u8, true))),
        _ => Err(RowError::Malformed {
            column: "zero_stage".into(),
            value: text.into(),
            expected: "0 to 3",
        }),
    }
}

/// Pins of what is recomputed: `none`, `full` (of the first layers only where the cell says
/// `full, block N`), `selective layer` (every second layer, as torchtitan's option is by default:
/// `selective_ac_option` 2), or `selective` with what the framework's generation means by it.
fn recompute_pins(
    row: &Row,
    recompute: &str,
    generation: &Generation,
    attention: AttentionKernel,
) -> Result<Vec<String>, Unmodelled> {
    let none = || "recompute=none".to_string();
    let text = row.text("recompute").unwrap_or("");
    if let Some(rest) = text.strip_prefix("full, block ") {
        let number = rest.split(' ').next().unwrap_or("");
        let layers = row.required_count("layers")?;
        let n = number.parse().ok().filter(|n: &u64| *n <= layers);
        let n = n.ok_or_else(|| RowError::Malformed {
            column: "recompute".into(),
            value: text.into(),
            expected: "full, block N layers, of those that there are",
        })?;
        let first = (0..n).map(|i| format!("recompute:h.{i}.*=yes"));
        return Ok(first.chain([none()]).collect());
    }
    let option = text.strip_prefix("selective layer");
    if option.is_some_and(|rest| !rest.starts_with(char::is_alphanumeric)) {
        let layers = row.required_count("layers")?;
        let second = (1..layers).step_by(2);
        let second = second.map(|i| format!("recompute:h.{i}.*=yes"));
        return Ok(second.chain([none()]).collect());
    }
    Ok(match recompute {
        "none" => vec![none()],
        "selective" => {
            let ops = generation.selective.iter();
            let pins = ops.map(|op| recomputed_op(op));
            // Unfused attention keeps norms and activations: only the scores are made again.
            match attention {
                AttentionKernel::Unfused { .. } => pins.chain([none()]).collect(),
                AttentionKernel::Fused { .. } => std::iter::once("recompute=selective".to_string())
                    .chain(pins)
                    .collect(),
            }
        }
        _ => vec![format!("recompute={recompute}")],
    })
}

/// The pin that recomputes an op of every layer.
fn recomputed_op(op: &str) -> String {
    format!("recompute:h.*.{op}=yes")
}

/// Lists dims that tensor ranks do not share evenly: frameworks refuse or copy it.
fn uneven(row: &Row, tensor: u64, is_parallel: bool) -> Result<Vec<String>, RowError> {
    let sequence = match is_parallel {
        true => row.count("seq_len")?,
        false => None,
    };
    let counts = [
        ("heads", model::heads(row).ok()),
        ("kv_heads", row.count("kv_heads")?),
        ("seq_len", sequence),
    ];
    let mut found = Vec::new();
    for (column, n) in counts {
        if n.is_some_and(|n| !n.is_multiple_of(tensor)) {
            found.push(format!("{column}=uneven"));
        }
    }
    Ok(found)
}

/// How many layers every stage has, embedding and output layer included; whether stages have
/// equally many, with or without these two.
/// The last one has those for further tokens as well.
fn split_pin(
    split: Split,
    layers: u64,
    stages: u64,
    further: u64,
) -> Result<(String, bool), Unmodelled> {
    let mut counts = split
        .counts(layers, stages)
        .ok_or_else(|| Unmodelled::Feature(format!("{stages} stages of {layers} layers")))?;
    if let Some(last) = counts.last_mut() {
        *last += further;
    }
    Ok((split_text(&counts), split.is_even(layers, stages)))
}

/// The pin of so many layers in each stage.
fn split_text(counts: &[u64]) -> String {
    let text: Vec<String> = counts.iter().map(u64::to_string).collect();
    format!("split={}", text.join("/"))
}

/// Values between the matmuls of a layer: whole on every tensor rank, or with sequence
/// parallelism split along the sequence, inside what the context axis splits off.
fn residual_pins(
    row: &Row,
    has_experts: bool,
    has_context: bool,
    is_parallel: bool,
) -> Vec<String> {
    let sequence = match (has_context, is_parallel) {
        (false, false) => "_",
        (false, true) => "tensor",
        (true, false) => "context",
        (true, true) => "context+tensor",
    };
    // Experts are split by a part of the ranks that split samples.
    let samples = if has_experts { "data+expert" } else { "data" };
    let values: &[&str] = if row.text("mlp_type") == Some("gelu") {
        // What a row-parallel matmul leaves is summed before its bias is added.
        &[
            "h.*.ln_1",
            "h.*.ln_2",
            "h.*.attn.out.add_bias",
            "h.*.mlp.proj.add_bias",
            "h.*.residual_1",
            "h.*.residual_2",
        ]
    } else if hybrid::is_hybrid(row) {
        &["h.*.norm", "h.*.residual"]
    } else {
        &[
            "h.*.norm_1",
            "h.*.norm_2",
            "h.*.residual_1",
            "h.*.residual_2",
        ]
    };
    // What crosses from layer to layer lies as the residuals do, whatever a link costs.
    let crossing = ["boundary.h.*.0", "grad.boundary.h.*.0.x"];
    values
        .iter()
        .chain(&crossing)
        .map(|v| format!("spec:{v}=[{samples},{sequence},_]"))
        .collect()
}

/// The matmuls that begin a gated layer's two halves are split by columns, so that a tensor rank
/// has some of the heads and of the hidden values: Megatron-LM's layout, and torchtitan's. Left
/// open, a search may prefer to split what they sum over.
///
/// `at` says over how many tensor ranks, and whether experts and context have an axis.
fn column_pins(
    row: &Row,
    experts: Option<Experts>,
    (tensor, has_experts, has_context): (u64, bool, bool),
) -> Result<Vec<String>, RowError> {
    let kv_heads = match row.count("kv_heads")? {
        Some(n) => Some(n),
        None => row.count("heads")?,
    };
    if row.text("mlp_type") == Some("gelu") {
        return Ok(Vec::new());
    }
    let samples = if has_experts { "data+expert" } else { "data" };
    if hybrid::is_hybrid(row) {
        return Ok(hybrid::column_pins(samples));
    }
    let sequence = if has_context { "context" } else { "_" };
    let mut pins = Vec::new();
    if experts.is_some_and(|e| e.latent) {
        return latent_columns(row, tensor, &format!("{samples},{sequence},tensor"));
    }
    // Fewer heads than ranks are copied, which is no splitting of a dim.
    if kv_heads.is_some_and(|n| n.is_multiple_of(tensor)) {
        let dims = format!("{samples},{sequence},tensor");
        // Queries that share keys have a dim of their own.
        let group = if row.count("heads")? == kv_heads {
            ""
        } else {
            ",_"
        };
        pins.push(format!("spec:h.*.attn.q=[{dims}{group},_]"));
        pins.extend(["k", "v"].map(|op| format!("spec:h.*.attn.{op}=[{dims},_]")));
    }
    if row.text("mlp_type") == Some("swiglu") {
        let of = |op| format!("spec:h.*.mlp.{op}=[{samples},{sequence},tensor]");
        pins.extend(["gate", "up"].map(of));
    }
    Ok(pins)
}

/// The same of a layer with latent attention: `first` are the dims of samples, sequence and columns.
/// How its compressions lie is left to the search, which has no matmul with a whole weight on every
/// tensor rank, as Megatron-Core's `linear_q_down_proj` is.
fn latent_columns(row: &Row, tensor: u64, first: &str) -> Result<Vec<String>, RowError> {
    let mut pins = Vec::new();
    if model::heads(row)?.is_multiple_of(tensor) {
        let q = match row.count("q_lora_rank")? {
            Some(_) => "q_up",
            None => "q",
        };
        let heads = [q, "k_up", "v_up"];
        pins.extend(heads.map(|op| format!("spec:h.*.attn.{op}=[{first},_]")));
    }
    let dense = mixture::dense_layers(row)? > 0;
    let mlps = [dense.then_some("mlp"), Some("moe.shared")];
    for mlp in mlps.into_iter().flatten() {
        pins.extend(["gate", "up"].map(|op| format!("spec:h.*.{mlp}.{op}=[{first}]")));
    }
    Ok(pins)
}

/// Tables of tokens are split by tokens over tensor ranks, the embedding's and the output layer's,
/// where it has its own: Megatron-LM's layout, and torchtitan's.
fn table_pins(
    row: &Row,
    generation: &Generation,
    (zero, data): (u8, u64),
    is_plain: bool,
) -> Result<Vec<String>, RowError> {
    let hidden = row.count("hidden")?.unwrap_or(0);
    let own = row.text("mlp_type") != Some("gelu") || !generation.tied;
    let tables = ["embed.wte.weight", "head.lm_head.weight"];
    let tables = tables.into_iter().take(if own { 2 } else { 1 });
    let lens = [0, hidden];
    let pins = tables.filter_map(|t| table_pin(t, (zero, data), &lens, is_plain));
    Ok(pins.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "gpu,gpus_total,framework,source,layers,tp,pp,vpp,dp,micro_batch,sequence_parallel,zero_stage,recompute,mlp_type,precision,global_batch,seq_len,ep";

    fn row(cells: &str) -> Row {
        // Cells that are left out at the end are empty.
        let commas = |text: &str| text.matches(',').count();
        let empty = ",".repeat(commas(HEADER) - commas(cells));
        let table = crate::csv::parse(&format!("{HEADER}\n{cells}{empty}\n")).unwrap();
        crate::row::rows(&table).remove(0)
    }

    fn pins_of(cells: &str) -> Result<String, Unmodelled> {
        let (row, facts) = (row(cells), Facts::built_in());
        let first = choices::choices(&row, &facts)?;
        pins(&row, &facts, &first[0])
            .map(|(pins, assumed)| format!("{} | {}", pins.join(" "), assumed.join(" ")))
    }

    #[test]
    fn a_row_becomes_the_pins_of_its_plan() {
        let text = pins_of("A100,128,Megatron-LM,,36,4,1,1,32,16,no,0,full,gelu,fp16,512,2048");
        assert_eq!(
            text.unwrap(),
            "data=32 tensor=4 pipeline=1 zero=0 microbatch=512 schedule=1f1b recompute=full \
             spec:h.*.ln_1=[data,_,_] spec:h.*.ln_2=[data,_,_] \
             spec:h.*.attn.out.add_bias=[data,_,_] spec:h.*.mlp.proj.add_bias=[data,_,_] \
             spec:h.*.residual_1=[data,_,_] spec:h.*.residual_2=[data,_,_] \
             spec:boundary.h.*.0=[data,_,_] spec:grad.boundary.h.*.0.x=[data,_,_] \
             spec:prepare.embed.wte.weight=[tensor,_] | "
        );
        // Selective recomputation where attention is unfused: the scores.
        let text = pins_of("A100,8,Megatron-LM,,24,1,8,1,1,1,no,0,selective,gelu,fp16,64,2048");
        assert_eq!(
            text.unwrap(),
            "data=1 tensor=1 pipeline=8 zero=0 microbatch=1 schedule=1f1b \
             recompute:h.*.attn.attend=yes recompute=none split=4/3/3/3/3/3/3/4 | "
        );
    }

    #[test]
    fn context_ranks_split_the_sequence_outside_of_tensor_ranks() {
        let header = "seq_len,gpu,gpus_total,framework,layers,tp,pp,cp,dp,micro_batch,sequence_parallel,zero_stage,recompute,mlp_type,global_batch";
        let cells = "8192,H100,64,NeMo 1.x/Megatron-Core,80,4,4,2,,1,yes,1,none,swiglu,64";
        let table = crate::csv::parse(&format!("{header}\n{cells}\n")).unwrap();
        let (row, facts) = (&crate::row::rows(&table)[0], Facts::built_in());
        let first = choices::choices(row, &facts).unwrap();
        let (pins, _) = pins(row, &facts, &first[0]).unwrap();
        let text = pins.join(" ");
        assert!(text.starts_with("data=2 tensor=4 pipeline=4 zero=1 microbatch=2"));
        assert!(text.contains(" context=2 context_order=zigzag "), "{text}");
        assert!(text.contains("spec:h.*.residual_2=[data,context+tensor,_]"));
        assert!(text.ends_with(
            "spec:grad.boundary.h.*.0.x=[data,context+tensor,_] \
             spec:h.*.mlp.gate=[data,context,tensor] spec:h.*.mlp.up=[data,context,tensor] \
             spec:prepare.embed.wte.weight=[tensor,_] spec:prepare.head.lm_head.weight=[tensor,_]"
        ));
    }

    #[test]
    fn tensor_ranks_have_some_of_the_heads() {
        let pins = |cells: &str, tensor| {
            let table = crate::csv::parse(&format!("heads,kv_heads,mlp_type\n{cells}\n")).unwrap();
            let row = &crate::row::rows(&table)[0];
            let experts = mixture::experts(row).unwrap();
            let at = (tensor, true, false);
            column_pins(row, experts, at).unwrap().join(" ")
        };
        let heads = "spec:h.*.attn.q=[data+expert,_,tensor,_,_] \
                     spec:h.*.attn.k=[data+expert,_,tensor,_] spec:h.*.attn.v=[data+expert,_,tensor,_]";
        assert_eq!(pins("32,4,moe128top8", 2), heads);
        let ungrouped = heads.replacen(",_,_]", ",_]", 1);
        assert_eq!(pins("32,,moe128top8", 8), ungrouped);
        assert_eq!(pins("32,32,moe128top8", 8), ungrouped);
        assert_eq!(pins("32,4,moe128top8", 8), "");
        assert_eq!(pins("32,4,gelu", 2), "");
        // Heads are made of latent vectors; the shared expert is split like a dense MLP.
        assert_eq!(
            pins("32,,moe8top2+1shared MLA", 2),
            "spec:h.*.attn.q=[data+expert,_,tensor,_] \
             spec:h.*.attn.k_up=[data+expert,_,tensor,_] \
             spec:h.*.attn.v_up=[data+expert,_,tensor,_] \
             spec:h.*.moe.shared.gate=[data+expert,_,tensor] \
             spec:h.*.moe.shared.up=[data+expert,_,tensor]"
        );
    }

    #[test]
    fn a_recipe_says_what_is_recomputed_where_the_column_does_not() {
        let of = |recompute: &str| {
            pins_of(&format!(
                "B200,8,Megatron-Bridge/Megatron-Core,summary (26.02 NeMo),36,1,1,1,8,4,no,1,{recompute},moe128top4,bf16,64,4096"
            ))
        };
        // No model: nothing is known of it.
        assert!(!of("").unwrap().contains("recompute:"));
        let header = format!("{HEADER},model");
        let cells = "B200,8,Megatron-Bridge/Megatron-Core,summary (26.02 NeMo),36,1,1,1,8,4,no,1,,moe128top4,bf16,64,4096,1,GPT OSS 120B";
        let table = crate::csv::parse(&format!("{header}\n{cells}\n")).unwrap();
        let (row, facts) = (&crate::row::rows(&table)[0], Facts::built_in());
        let first = choices::choices(row, &facts).unwrap();
        let (pins, assumed) = pins(row, &facts, &first[0]).unwrap();
        let text = pins.join(" ");
        assert!(text.contains("recompute:h.*.norm_1=yes recompute:h.*.norm_2=yes"));
        assert!(text.contains("recompute:h.*.moe.act=yes recompute:h.*.moe.mul=yes"));
        assert!(assumed.contains(&"recompute=none+norm_1+norm_2+moe.act+moe.mul".to_string()));
    }

    #[test]
    fn a_recipe_says_which_layers_a_stage_has() {
        let of = |layers: u64, model: &str| {
            let header = format!("{HEADER},heads,model");
            let cells = format!(
                "GB200,256,Megatron-Bridge/Megatron-Core,x (26.02 y),{layers},1,4,4,64,1,no,1,none,moe256top8+1shared MLA,mxfp8,4096,4096,64,128,{model}"
            );
            let table = crate::csv::parse(&format!("{header}\n{cells}\n")).unwrap();
            let (row, facts) = (&crate::row::rows(&table)[0], Facts::built_in());
            let first = choices::choices(row, &facts).unwrap();
            let (pins, assumed) = pins(row, &facts, &first[0]).unwrap();
            let split = pins.into_iter().find(|p| p.starts_with("split=")).unwrap();
            (split, assumed.join(" "))
        };
        let own = format!("split=5{}/2", "/4".repeat(14));
        // The layer that predicts a further token is beside the head.
        let further = format!("split=5{}/3", "/4".repeat(14));
        let assumed = "further_tokens=1 routing=balanced".into();
        assert_eq!(of(61, "DeepSeekV3"), (further, assumed));
        assert_eq!(of(61, "Kimi_K2"), (own, "routing=balanced".into()));
        // The layout is of 61 layers.
        let (split, assumed) = of(48, "DeepSeekV3");
        assert!(split.starts_with("split=4/3/"), "{split}");
        assert_eq!(assumed, "routing=balanced");
    }

    #[test]
    fn no_source_chooses_what_a_run_is_planned_as() {
        let of = |source: &str| {
            pins_of(&format!(
                "A100,8,Megatron-DeepSpeed,{source},24,1,8,1,1,1,no,0,full,gelu,fp16,64,2048"
            ))
            .unwrap()
        };
        for source in ["vTrain ground truth (single-node)", "BigScience BLOOM"] {
            assert_eq!(of(source), of(""), "{source}");
        }
        assert!(of("vTrain ground truth (single-node)").contains(" recompute=full "));
    }

    #[test]
    fn what_ranks_and_stages_do_not_share_evenly_is_said() {
        // Three virtual stages of 32 layers on four meshes.
        let of = |vpp: u64| {
            let cells =
                format!("A100,8,Megatron-LM,,32,2,4,{vpp},1,1,yes,0,none,gelu,fp16,64,2047");
            pins_of(&cells).unwrap()
        };
        assert!(of(2).ends_with("| seq_len=uneven"), "{}", of(2));
        assert!(
            of(3).ends_with("| stages=uneven seq_len=uneven"),
            "{}",
            of(3)
        );
        let table = crate::csv::parse("heads,kv_heads,seq_len\n6,2,2048\n").unwrap();
        let rows = crate::row::rows(&table);
        assert_eq!(
            uneven(&rows[0], 4, true).unwrap(),
            ["heads=uneven", "kv_heads=uneven"]
        );
    }

    #[test]
    fn experts_lie_over_tensor_ranks_first() {
        let text =
            pins_of("A100,64,Megatron-LM,,4,1,1,1,64,1,no,1,none,moe128top8,bf16,64,2048,16");
        assert_eq!(
            text.unwrap(),
            "data=64 tensor=1 pipeline=1 zero=1 microbatch=64 schedule=1f1b recompute=none expert=16 \
             spec:h.*.moe.dispatch=[_,data+expert,_,_] spec:h.*.moe.combine=[data+expert,_,_] \
             | routing=balanced"
        );
        let text =
            pins_of("A100,64,Megatron-LM,,4,2,1,1,32,1,yes,1,none,moe128top8,bf16,64,2048,8");
        assert_eq!(
            text.unwrap(),
            "data=32 tensor=2 pipeline=1 zero=1 microbatch=32 schedule=1f1b recompute=none expert=4 \
             spec:h.*.moe.gate=[tensor+expert,data,_,_] spec:h.*.moe.up=[tensor+expert,data,_,_] \
             spec:h.*.moe.down=[tensor+expert,data,_,_] \
             spec:h.*.norm_1=[data+expert,tensor,_] spec:h.*.norm_2=[data+expert,tensor,_] \
             spec:h.*.residual_1=[data+expert,tensor,_] spec:h.*.residual_2=[data+expert,tensor,_] \
             spec:boundary.h.*.0=[data+expert,tensor,_] \
             spec:grad.boundary.h.*.0.x=[data+expert,tensor,_] \
             spec:prepare.embed.wte.weight=[tensor,_] \
             spec:prepare.head.lm_head.weight=[tensor,_] | routing=balanced"
        );
        let error = |cells: &str| pins_of(cells).unwrap_err().to_string();
        let text = error("A100,8,Megatron-LM,,4,1,1,1,8,1,no,1,none,moe128top8,bf16,64,2048,16");
        assert_eq!(text, "not supported: ep 16 over tp 1 and dp 8");
        let text = error("A100,8,Megatron-LM,,4,1,1,1,8,1,no,1,none,swiglu,bf16,64,2048,8");
        assert!(text.contains("experts are not stated"), "{text}");
    }

    #[test]
    fn what_is_not_stated_is_assumed_and_listed() {
        let text = pins_of("A100,2,Megatron-DeepSpeed,vTrain,20,1,2,1,1,,no,,,gelu,fp16,4,1024");
        assert_eq!(
            text.unwrap(),
            "data=1 tensor=1 pipeline=2 zero=0 microbatch=1 schedule=1f1b recompute=full \
             split=11/11 | micro_batch=1 zero=0 recompute=full"
        );
    }

    #[test]
    fn a_cell_that_makes_no_sense_is_named() {
        let base = "A100,8,Megatron-LM,,24,2,1,VPP,4,1,SP,ZERO,RC,gelu,fp16,64,2048";
        let of = |vpp: &str, sp: &str, zero: &str, rc: &str| {
            let cells = base.replace("VPP", vpp).replace("SP", sp);
            let cells = cells.replace("ZERO", zero).replace("RC", rc);
            pins_of(&cells).map_err(|e| e.to_string())
        };
        let error = |vpp, sp, zero, rc| of(vpp, sp, zero, rc).unwrap_err();
        assert_eq!(
            error("4", "no", "0", "full"),
            "`vpp` is `4`, expected 1 where `pp` is 1"
        );
        assert_eq!(
            error("1", "maybe", "0", "full"),
            "`sequence_parallel` is `maybe`, expected yes or no"
        );
        assert_eq!(
            error("1", "no", "-1", "full"),
            "`zero_stage` is `-1`, expected 0 to 3"
        );
        assert_eq!(
            error("1", "no", "12", "full"),
            "`zero_stage` is `12`, expected 0 to 3"
        );
        assert_eq!(
            error("1", "no", "0", "foo"),
            "`recompute` is `foo`, expected none, selective or full"
        );
        let second = of("1", "yes", "2", "selective layer").unwrap();
        assert!(
            second.contains(" recompute:h.1.*=yes recompute:h.3.*=yes ")
                && !second.contains("recompute:h.2."),
            "{second}"
        );
        let norms = of("1", "yes", "2", "selective layernorm").unwrap();
        assert!(!norms.contains("recompute:h.1.*=yes"), "{norms}");
        let said = of("1", "yes (assumed)", "2-like FSDP", "selective(norm)").unwrap();
        assert!(
            said.contains(" zero=2 ") && said.contains("[data,tensor,_]"),
            "{said}"
        );
        let said = of("", "", "1 (group of 4)", "none").unwrap();
        assert!(
            said.contains(" zero=0 ") && said.ends_with("| zero=0 sequence_parallel=no"),
            "{said}"
        );
        let said = of("1", "no", "3 within host", "none").unwrap();
        assert!(said.ends_with("| zero=0"), "{said}");
        let said = of("1", "no", "0 (within a host)", "none").unwrap();
        assert!(said.ends_with("| "), "{said}");
    }

    #[test]
    fn what_is_not_supported_is_said() {
        let error = pins_of("A100,8,Unheard-of,,24,1,1,1,8,1,no,0,none,gelu,fp16,64,2048");
        let said = error.unwrap_err().to_string();
        assert!(
            said.starts_with("not supported: the framework `Unheard-of`; known are "),
            "{said}"
        );
        let error = pins_of("A100,8,Megatron-LM,,24,2,1,1,8,1,no,0,none,gelu,fp16,64,2048");
        assert_eq!(
            error.unwrap_err().to_string(),
            "plan: dp 8 x tp 2 x pp 1 is 16 GPUs, and `gpus_total` is 8"
        );
        let error = pins_of("A100,7,Megatron-LM,,24,2,1,1,,1,no,0,none,gelu,fp16,64,2048");
        assert_eq!(
            error.unwrap_err().to_string(),
            "plan: tp 2 x pp 1 does not divide the 7 GPUs of `gpus_total`"
        );
    }

    #[test]
    fn interleaving_takes_whole_groups_of_microbatches() {
        let of = |samples: u64| {
            pins_of(&format!(
                "A100,4,Megatron-LM,,8,1,4,2,1,1,no,0,none,gelu,fp16,{samples},2048"
            ))
        };
        assert!(of(8).unwrap().contains(" virtual=2 "));
        assert_eq!(
            of(6).unwrap_err().to_string(),
            "plan: vpp 2 takes microbatches in groups of pp 4, and a replica has 6"
        );
    }

    #[test]
    fn stages_divide_layers_as_the_framework_does() {
        let split = |how, layers, stages| split_pin(how, layers, stages, 0).unwrap().0;
        let is_even = |how, layers, stages| split_pin(how, layers, stages, 0).unwrap().1;
        assert!(is_even(Split::Balanced, 126, 64) && !is_even(Split::Layers, 126, 64));
        assert!(is_even(Split::Layers, 32, 4) && !is_even(Split::Balanced, 32, 12));
        assert_eq!(split(Split::Layers, 8, 4), "split=3/2/2/3");
        assert_eq!(
            split(Split::Balanced, 106, 12),
            format!("split=9{}", "/9".repeat(11))
        );
        assert_eq!(split(Split::Balanced, 72, 6), "split=13/12/12/12/12/13");
        assert_eq!(split(Split::Layers, 7, 2), "split=5/4");
        assert!(split_pin(Split::Balanced, 2, 5, 0).is_err());
    }
}
