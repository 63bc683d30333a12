//! Memory: errors by stratum and what makes the peaks, and the points of `memory.csv` that say
//! enough to be run through the same predictions.

use crate::report::{percent, push};
use benchmarks::score::{COUNTED_ROWS, Scored, mean, median, memory_over_strata, strata};
use published::csv::{self, Table};
use published::{Facts, Predicted, Row, predict, row};
use std::collections::BTreeMap;

/// A part of the name of the stratum that is shown apart.
const APART: &str = "BLOOM";

/// Writes the tables of memory over the rows of both tiers.
pub fn text(scored: &[Scored<'_>]) -> String {
    let mut out = String::from("\n## Peak memory\n\n");
    push(&mut out, "In what each framework reports: what nvidia-smi shows, context included, or what PyTorch's allocator reserved. Shares are of the predicted peak, mean over the rows.\n".into());
    push(&mut out, "| stratum | tier | rows | MAPE | median error | parameters | gradients | optimizer | activations | temporaries | slack | context |".into());
    push(&mut out, format!("|---|---{}|", "|---:".repeat(10)));
    let mut groups: BTreeMap<(char, &str), Vec<&Scored<'_>>> = BTreeMap::new();
    for s in scored.iter().filter(|s| s.memory_gb.is_some()) {
        let group = groups.entry((s.tier, s.stratum.as_str()));
        group.or_default().push(s);
    }
    for ((tier, stratum), rows) in &groups {
        let errors: Vec<f64> = rows.iter().filter_map(|s| error(s)).collect();
        let cells: Vec<String> = shares(rows).into_iter().map(|x| percent(Some(x))).collect();
        push(
            &mut out,
            format!(
                "| {stratum} | {tier} | {} | {} | {:+.1}% | {} |",
                rows.len(),
                percent(absolute(&errors)),
                100.0 * median(&errors).unwrap_or(0.0),
                cells.join(" | ")
            ),
        );
    }
    let over = |keep: &dyn Fn(&Scored<'_>) -> bool| {
        let kept = scored.iter().filter(|s| s.tier == 'A' && keep(s));
        let errors: Vec<f64> = kept.filter_map(error).collect();
        format!("{} ({} rows)", percent(absolute(&errors)), errors.len())
    };
    let tier_a: Vec<Scored<'_>> = scored.iter().filter(|s| s.tier == 'A').cloned().collect();
    let strata = strata(&tier_a);
    let all: Vec<f64> = strata.iter().filter_map(|s| Some(s.memory?.1)).collect();
    push(
        &mut out,
        format!(
            "\nTier A: mean over strata with the memory of {COUNTED_ROWS} rows or more {}, over all {}; {APART} {}, the rest {}.",
            percent(memory_over_strata(&strata)),
            percent(mean(&all)),
            over(&|s| s.stratum.contains(APART)),
            over(&|s| !s.stratum.contains(APART))
        ),
    );
    out
}

fn error(s: &Scored<'_>) -> Option<f64> {
    s.memory_gb
        .map(|(measured, predicted)| predicted / measured - 1.0)
}

fn absolute(errors: &[f64]) -> Option<f64> {
    mean(&errors.iter().map(|e| e.abs()).collect::<Vec<_>>())
}

/// Returns the mean shares of the peak, in the order of the table's columns.
fn shares(rows: &[&Scored<'_>]) -> [f64; 7] {
    let mut sums = [0.0; 7];
    for m in rows.iter().map(|s| s.memory) {
        for (sum, part) in sums.iter_mut().zip(m.parts()) {
            *sum += part.0 as f64 / (m.total().0.max(1) as f64 * rows.len() as f64);
        }
    }
    sums
}

/// A point of `memory.csv` that says what ran.
struct Point {
    config: String,
    quantity: String,
    measured_gb: f64,
    cells: BTreeMap<&'static str, String>,
}

/// Writes the table of the points of `memory.csv` (its text), predicted like any row.
pub fn points(text: &str, facts: &Facts) -> Result<String, String> {
    let table = csv::parse(text).map_err(|e| e.to_string())?;
    let all = row::rows(&table);
    let points: Vec<Point> = all.iter().filter_map(point).collect();
    let rows = row::rows(&as_rows(&points));
    let outcomes = predict(&rows, facts);
    let mut out = String::from("\n## Points of memory.csv\n\n");
    push(
        &mut out,
        format!(
            "{} of {} points say what ran; the others are relative to another point, or results of a formula.\n",
            points.len(),
            all.len()
        ),
    );
    push(
        &mut out,
        "| run | what | measured | predicted | error |\n|---|---|---:|---:|---:|".into(),
    );
    let mut errors: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for (point, outcome) in points.iter().zip(&outcomes) {
        let (config, quantity) = (&point.config, &point.quantity);
        let line = match outcome {
            Ok(p) => {
                let gb = quantity_of(point, p);
                let error = gb / point.measured_gb - 1.0;
                errors.entry(family(point)).or_default().push(error);
                let measured = point.measured_gb;
                format!("{measured:.1} GB | {gb:.1} GB | {:+.1}% |", 100.0 * error)
            }
            Err(e) => format!("{:.1} GB | {e} | |", point.measured_gb),
        };
        push(&mut out, format!("| {config} | {quantity} | {line}"));
    }
    push(&mut out, String::new());
    for (family, errors) in errors {
        let (n, mape) = (errors.len(), percent(absolute(&errors)));
        let bias = 100.0 * median(&errors).unwrap_or(0.0);
        push(
            &mut out,
            format!("{family}: {mape} over {n} points, median {bias:+.1}%."),
        );
    }
    Ok(out)
}

fn family(point: &Point) -> &'static str {
    if point.cells["framework"] == "InternEvo" {
        "InternEvo"
    } else {
        "Korthikanti, figure 1"
    }
}

/// Returns the quantity of a prediction that a point measures, in gigabytes.
fn quantity_of(point: &Point, p: &Predicted) -> f64 {
    let m = &p.memory;
    let bytes = match point.quantity.as_str() {
        "GPU memory" => return p.reported_memory_gb,
        q if q.starts_with("params") => m.parameters + m.gradients + m.optimizer,
        _ => m.activations,
    };
    bytes.0 as f64 / 1e9
}

/// Makes the point of a record that has a size in bytes and says what ran.
fn point(record: &Row) -> Option<Point> {
    let config = record.text("config")?;
    let quantity = record.text("quantity")?;
    let unit = match record.text("unit")? {
        "GB" => 1.0,
        "GiB" => 1.073_741_824,
        _ => return None,
    };
    let cells = if config.starts_with("InternLM") {
        intern(config)?
    } else if record.text("source")?.contains("Fig.1") {
        korthikanti(config, quantity)?
    } else {
        return None;
    };
    Some(Point {
        config: config.into(),
        quantity: quantity.into(),
        measured_gb: unit * record.measured("value")?,
        cells,
    })
}

/// Reads `InternLM-7B 3 GPUs tp1 pp3 fsdp=F zero1=-1 checkpoint=True micro_bsz 1 micro_num 4 bf16`;
/// the models' sizes are those of the InternLM repository's configs.
fn intern(config: &str) -> Option<BTreeMap<&'static str, String>> {
    let words: Vec<&str> = config.split(' ').collect();
    let after = |prefix: &str| {
        words
            .iter()
            .find_map(|w| w.strip_prefix(prefix)?.parse::<u64>().ok())
    };
    let number = |at: &str, offset: i64| {
        let i = words.iter().position(|w| *w == at)? as i64 + offset;
        words.get(usize::try_from(i).ok()?)?.parse::<u64>().ok()
    };
    let gpus = number("GPUs", -1)?;
    let (tensor, pipeline) = (after("tp")?, after("pp")?);
    let (micro, count) = (number("micro_bsz", 1)?, number("micro_num", 1)?);
    let data = gpus / (tensor * pipeline).max(1);
    let sizes = match *words.first()? {
        "InternLM-7B" => ["32", "4096", "32", "10944"],
        "InternLM-20B" => ["60", "5120", "40", "13824"],
        _ => return None,
    };
    let zero = if words.contains(&"fsdp=T") { "3" } else { "1" };
    let mut cells = model(sizes, "103168", "swiglu");
    cells.extend([
        ("framework", "InternEvo".to_string()),
        ("date", "2024".into()),
        (
            "interconnect",
            "NVLink3+NVSwitch; 4x100Gb RoCE per node".into(),
        ),
        ("precision", "bf16".into()),
        ("recompute", "full".into()),
        ("zero_stage", zero.into()),
        ("sequence_parallel", "no".into()),
    ]);
    cells.extend(parallel([
        gpus,
        tensor,
        pipeline,
        1,
        data,
        micro,
        micro * count * data,
    ]));
    Some(cells)
}

/// Reads figure 1 of Korthikanti et al.: the configurations of their table 3.
fn korthikanti(config: &str, quantity: &str) -> Option<BTreeMap<&'static str, String>> {
    let (sizes, [gpus, tensor, pipeline, chunks, micro, batch]) = match config.split(' ').next()? {
        "GPT-22B" => (["48", "6144", "64", "24576"], [8, 8, 1, 1, 4, 4]),
        "GPT-175B" => (["96", "12288", "96", "49152"], [64, 8, 8, 3, 1, 64]),
        "GPT-530B" => (["105", "20480", "128", "81920"], [280, 8, 35, 3, 1, 280]),
        "GPT-1T" => (["128", "25600", "160", "102400"], [512, 8, 64, 1, 1, 512]),
        _ => return None,
    };
    let selective = quantity.contains("selective");
    let mut cells = model(sizes, "51200", "gelu");
    cells.extend([
        ("framework", "Megatron-LM".to_string()),
        ("date", "2022-05".into()),
        (
            "interconnect",
            "NVLink3+NVSwitch; 8x HDR IB 200Gb/s (Selene)".into(),
        ),
        ("precision", "fp16".into()),
        (
            "recompute",
            if selective { "selective" } else { "none" }.into(),
        ),
        ("zero_stage", "0".into()),
        (
            "sequence_parallel",
            if selective { "yes" } else { "no" }.into(),
        ),
    ]);
    cells.extend(parallel([gpus, tensor, pipeline, chunks, 1, micro, batch]));
    Some(cells)
}

fn model(sizes: [&str; 4], vocab: &str, mlp: &str) -> BTreeMap<&'static str, String> {
    let [layers, hidden, heads, inner] = sizes.map(String::from);
    BTreeMap::from([
        ("gpu", "A100-80GB-SXM4".to_string()),
        ("layers", layers),
        ("hidden", hidden),
        ("kv_heads", heads.clone()),
        ("heads", heads),
        ("ffn_hidden", inner),
        ("vocab", vocab.into()),
        ("seq_len", "2048".into()),
        ("mlp_type", mlp.into()),
    ])
}

fn parallel([gpus, tp, pp, vpp, dp, micro, batch]: [u64; 7]) -> [(&'static str, String); 8] {
    [
        ("gpus_total", gpus.to_string()),
        ("gpus_per_node", gpus.min(8).to_string()),
        ("tp", tp.to_string()),
        ("pp", pp.to_string()),
        ("vpp", vpp.to_string()),
        ("dp", dp.to_string()),
        ("micro_batch", micro.to_string()),
        ("global_batch", batch.to_string()),
    ]
}

fn as_rows(points: &[Point]) -> Table {
    let header: Vec<&str> = points
        .first()
        .map(|p| p.cells.keys().copied().collect())
        .unwrap_or_default();
    Table {
        records: points
            .iter()
            .map(|p| {
                header
                    .iter()
                    .map(|c| p.cells.get(c).cloned().unwrap_or_default())
                    .collect()
            })
            .collect(),
        header: header.into_iter().map(String::from).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POINTS: &str = "source,config,quantity,value,unit
doc,InternLM-7B 4 GPUs tp1 pp4 fsdp=F zero1=-1 checkpoint=True micro_bsz 1 micro_num 4 bf16,GPU memory,69,GB
x Fig.1 y,\"GPT-22B Korthikanti Table 3 config, first pipeline stage\",params+optimizer,45.5625,GiB
x Fig.7 y,GPT-22B,activation memory relative to TP baseline,66.84,%
";

    #[test]
    fn points_become_rows_with_the_columns_of_runs() {
        let records = row::rows(&csv::parse(POINTS).unwrap());
        let points: Vec<Point> = records.iter().filter_map(point).collect();
        assert_eq!(points.len(), 2);
        let rows = row::rows(&as_rows(&points));
        let cell = |i: usize, column: &str| rows[i].text(column).unwrap().to_string();
        assert_eq!(
            (cell(0, "pp"), cell(0, "dp"), cell(0, "global_batch")),
            ("4".into(), "1".into(), "4".into())
        );
        assert_eq!(
            (cell(0, "gpus_per_node"), cell(0, "recompute")),
            ("4".into(), "full".into())
        );
        assert_eq!(
            (cell(1, "micro_batch"), cell(1, "sequence_parallel")),
            ("4".into(), "no".into())
        );
        assert!((points[1].measured_gb - 45.5625 * 1.073741824).abs() < 1e-9);
    }
}
