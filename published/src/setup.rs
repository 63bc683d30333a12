//! What a row trained and how: the training spec and the pins that describe its plan.

use crate::Unmodelled;
use crate::facts::{Facts, Generation, Split};
use crate::row::{Row, RowError};
use ir::software::AttentionKernel;
use ir::{Precision, TrainSpec};

/// The training spec of a row.
pub fn train_spec(row: &Row, dropout: f64) -> Result<TrainSpec, Unmodelled> {
    let precision = match row.required("precision")? {
        "fp16" => Precision::F16,
        // Matmuls in eight bits, activations in sixteen.
        text if ["bf16", "fp8", "mxfp8"].iter().any(|p| text.starts_with(p)) => Precision::Bf16,
        "fp32" => Precision::F32,
        other => return Err(Unmodelled::Feature(format!("the precision {other}"))),
    };
    Ok(TrainSpec {
        global_batch: row.required_count("global_batch")?,
        sequence: row.required_count("seq_len")?,
        precision,
        dropout,
        ..TrainSpec::default()
    })
}

/// The pins that describe a row's plan, in the form that `compile --pin` reads, and what had to
/// be assumed for them.
///
/// Fails where a degree is not stated, or the plan uses what the planner does not know.
pub fn pins(row: &Row, facts: &Facts) -> Result<(Vec<String>, Vec<String>), Unmodelled> {
    let (_, generation) = facts.generation(row)?;
    let mut assumed = Vec::new();
    let degree = |column: &str| -> Result<u64, RowError> { Ok(row.count(column)?.unwrap_or(1)) };
    for (column, what) in [("cp", "context parallelism"), ("ep", "expert parallelism")] {
        if degree(column)? > 1 {
            return Err(Unmodelled::Feature(what.into()));
        }
    }
    let (tensor, pipeline) = (degree("tp")?, degree("pp")?);
    let total = row.required_count("gpus_total")?;
    let data = match row.count("dp")? {
        Some(n) => n,
        None => total / (tensor * pipeline).max(1),
    };
    if data * tensor * pipeline != total {
        return Err(Unmodelled::Feature(format!(
            "dp {data} x tp {tensor} x pp {pipeline} on {total} GPUs"
        )));
    }
    let per_replica = match row.count("micro_batch")? {
        Some(n) => n,
        None => {
            assumed.push("micro_batch=1".to_string());
            1
        }
    };
    let zero = match row.text("zero_stage") {
        // Sharded inside a small group only: what crosses the hosts is a plain all-reduce.
        Some(text) if text.contains("within") || text.contains("group of") => 0,
        Some(text) => text
            .chars()
            .next()
            .and_then(|c| c.to_digit(10))
            .map_or(generation.zero, |z| z as u8),
        None => {
            assumed.push(format!("zero={}", generation.zero));
            generation.zero
        }
    };
    let recompute = match row.text("recompute") {
        Some(text) => ["none", "selective", "full"]
            .into_iter()
            .find(|kind| text.starts_with(kind))
            .unwrap_or(&generation.recompute),
        None => {
            assumed.push(format!("recompute={}", generation.recompute));
            &generation.recompute
        }
    };
    let chunks = match row.count("vpp")? {
        Some(n) => n,
        None => generation.virtual_chunks,
    };
    let mut pins = vec![
        format!("data={data}"),
        format!("tensor={tensor}"),
        format!("pipeline={pipeline}"),
        format!("zero={zero}"),
        format!("microbatch={}", per_replica * data),
        "schedule=1f1b".to_string(),
    ];
    pins.extend(recompute_pins(row, recompute, generation)?);
    if chunks > 1 && pipeline > 1 {
        pins.push(format!("virtual={chunks}"));
    }
    if pipeline > 1 {
        let layers = row.required_count("layers")?;
        pins.push(split_pin(generation.split, layers, pipeline * chunks)?);
    }
    if tensor > 1 {
        pins.extend(residual_pins(row));
    }
    Ok((pins, assumed))
}

/// Pins of what is recomputed: `none`, `full` (of the first layers only where the cell says
/// `full, block N`), or `selective` with what the framework's generation means by it.
fn recompute_pins(
    row: &Row,
    recompute: &str,
    generation: &Generation,
) -> Result<Vec<String>, Unmodelled> {
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
        return Ok((0..n).map(|i| format!("recompute:h.{i}.*=yes")).collect());
    }
    Ok(match recompute {
        "none" => Vec::new(),
        "selective" => {
            let ops = generation.selective.iter();
            let pins = ops.map(|op| format!("recompute:h.*.{op}=yes"));
            // Unfused attention keeps norms and activations: only the scores are made again.
            match generation.attention {
                AttentionKernel::Unfused { .. } => pins.collect(),
                AttentionKernel::Fused { .. } => std::iter::once("recompute=selective".to_string())
                    .chain(pins)
                    .collect(),
            }
        }
        _ => vec![format!("recompute={recompute}")],
    })
}

/// How many layers every stage has, embedding and output layer included.
fn split_pin(split: Split, layers: u64, stages: u64) -> Result<String, Unmodelled> {
    let all = layers + 2;
    if stages > all {
        let why = format!("{stages} stages of {layers} layers");
        return Err(Unmodelled::Feature(why));
    }
    let counts: Vec<u64> = match split {
        _ if layers.is_multiple_of(stages) && split == Split::Layers => (0..stages)
            .map(|s| layers / stages + u64::from(s == 0) + u64::from(s + 1 == stages))
            .collect(),
        // As evenly as goes, the larger parts first.
        _ => (0..stages)
            .map(|s| all / stages + u64::from(s < all % stages))
            .collect(),
    };
    let text: Vec<String> = counts.iter().map(u64::to_string).collect();
    Ok(format!("split={}", text.join("/")))
}

/// Values between the matmuls of a layer: whole on every tensor rank, or with sequence
/// parallelism split along the sequence.
fn residual_pins(row: &Row) -> Vec<String> {
    let sequence = if row.text("sequence_parallel") == Some("yes") {
        "tensor"
    } else {
        "_"
    };
    let values: &[&str] = if row.text("mlp_type") == Some("gelu") {
        &["h.*.ln_1", "h.*.ln_2", "h.*.residual_1", "h.*.residual_2"]
    } else {
        &[
            "h.*.norm_1",
            "h.*.norm_2",
            "h.*.residual_1",
            "h.*.residual_2",
        ]
    };
    values
        .iter()
        .map(|v| format!("spec:{v}=[data,{sequence},_]"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "gpu,gpus_total,framework,source,layers,tp,pp,vpp,dp,micro_batch,sequence_parallel,zero_stage,recompute,mlp_type,precision,global_batch,seq_len";

    fn row(cells: &str) -> Row {
        let table = crate::csv::parse(&format!("{HEADER}\n{cells}\n")).unwrap();
        crate::row::rows(&table).remove(0)
    }

    fn pins_of(cells: &str) -> Result<String, Unmodelled> {
        pins(&row(cells), &Facts::built_in())
            .map(|(pins, assumed)| format!("{} | {}", pins.join(" "), assumed.join(" ")))
    }

    #[test]
    fn a_row_becomes_the_pins_of_its_plan() {
        let text = pins_of("A100,128,Megatron-LM,,36,4,1,1,32,16,no,0,full,gelu,fp16,512,2048");
        assert_eq!(
            text.unwrap(),
            "data=32 tensor=4 pipeline=1 zero=0 microbatch=512 schedule=1f1b recompute=full \
             spec:h.*.ln_1=[data,_,_] spec:h.*.ln_2=[data,_,_] \
             spec:h.*.residual_1=[data,_,_] spec:h.*.residual_2=[data,_,_] | "
        );
        // Selective recomputation where attention is unfused: the scores.
        let text = pins_of("A100,8,Megatron-LM,,24,1,8,1,1,1,no,0,selective,gelu,fp16,64,2048");
        assert_eq!(
            text.unwrap(),
            "data=1 tensor=1 pipeline=8 zero=0 microbatch=1 schedule=1f1b \
             recompute:h.*.attn.attend=yes split=4/3/3/3/3/3/3/4 | "
        );
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
    fn what_is_not_supported_is_said() {
        let error = pins_of("A100,8,Unheard-of,,24,1,1,1,8,1,no,0,none,gelu,fp16,64,2048");
        assert_eq!(
            error.unwrap_err().to_string(),
            "not supported: the framework `Unheard-of`"
        );
        let error = pins_of("A100,8,Megatron-LM,,24,2,1,1,8,1,no,0,none,gelu,fp16,64,2048");
        assert_eq!(
            error.unwrap_err().to_string(),
            "not supported: dp 8 x tp 2 x pp 1 on 8 GPUs"
        );
    }

    #[test]
    fn stages_divide_layers_as_the_framework_does() {
        let split = |how, layers, stages| split_pin(how, layers, stages).unwrap();
        assert_eq!(split(Split::Layers, 8, 4), "split=3/2/2/3");
        assert_eq!(
            split(Split::Balanced, 106, 12),
            format!("split=9{}", "/9".repeat(11))
        );
        assert_eq!(split(Split::Layers, 7, 2), "split=5/4");
        assert!(split_pin(Split::Balanced, 2, 5).is_err());
    }
}
