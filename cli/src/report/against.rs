//! One plan beside another: what both predict, and what differs in what they are of and what was
//! decided.
//!
//! Their subject (training and cluster) is compared key by key as documents have it, so that
//! a key is not forgotten when one is added.

use super::parallelism::{AxisReport, assignments};
use super::plan::{StageReport, hfu, stages};
use super::{count, percent, strategies, table};
use crate::failure::{Exit, Failure};
use crate::plan_file::Loaded;
use ir::plan::{Plan, StagePrediction, relative_path};
use ir::{Bytes, OpKind, Pass, Seconds, counted};
use published::software;
use serde::Serialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Keys of clusters that say where figures come from, and so are not compared.
const NOT_FIGURES: [&str; 2] = ["measured", "sources"];
/// The most differences that are listed; `--json` has them all.
const LISTED: usize = 20;

/// Two plans side by side.
#[derive(Clone, Debug, Serialize)]
pub struct Against {
    /// The predictions of both.
    pub predicted: Vec<Quantity>,
    /// The differences between the plans.
    pub differences: Vec<Difference>,
    /// Remarks to read before the figures are compared.
    pub notes: Vec<String>,
}

/// A predicted quantity of both plans.
#[derive(Clone, Debug, Serialize)]
pub struct Quantity {
    /// The name of the quantity.
    pub what: &'static str,
    /// The values of the two plans.
    pub values: [f64; 2],
    /// The unit of the values.
    #[serde(rename = "unit")]
    kind: Kind,
}

/// The unit of a quantity, which says how it is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Seconds,
    Bytes,
    /// Tokens per second.
    #[serde(rename = "per_second")]
    Rate,
    /// A share of one, whose change is shown in points.
    Share,
}

/// Something that is not the same in both plans.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// The name of what differs, or its key in training or cluster.
    pub what: String,
    /// The two plans' values.
    pub values: [String; 2],
}

impl Against {
    /// Compares plan `a` with plan `b`.
    pub fn new(a: &Loaded, b: &Loaded) -> Result<Self, Failure> {
        let (of_a, of_b) = (facts(a)?, facts(b)?);
        let keys = of_a.iter().chain(&of_b).map(|(what, _)| what);
        let mut seen = BTreeSet::new();
        let known = keys.filter(|key| seen.insert(*key));
        let value = |facts: &[(String, String)], key: &str| {
            let found = facts.iter().find(|(what, _)| what == key);
            found.map_or("-".to_string(), |(_, value)| value.clone())
        };
        let differences = known.filter_map(|what| {
            let values = [value(&of_a, what), value(&of_b, what)];
            (values[0] != values[1]).then(|| Difference {
                what: what.clone(),
                values,
            })
        });
        let mut differences: Vec<Difference> = differences.collect();
        let is_same =
            |differences: &[Difference], what: &str| !differences.iter().any(|d| d.what == what);
        let mut notes = Vec::new();
        if a.plan.graph != b.plan.graph {
            let values = graphs(a, b);
            differences.insert(
                0,
                Difference {
                    what: "graph".into(),
                    values,
                },
            );
            if a.plan.name == b.plan.name {
                let trained = ["train.sequence", "train.dropout"];
                let why = match trained.iter().all(|key| is_same(&differences, key)) {
                    true => "they are different models of the same name",
                    false => {
                        "because of sequence or dropout, unless they are different models of the same name"
                    }
                };
                notes.push(format!(
                    "Both plans are of `{}`, and their graphs differ: {why}.",
                    a.plan.name
                ));
            }
        }
        // Where stages or axes differ, all ops do, and are not listed one by one.
        let above = ["graph", "stages", "layers of the stages", "meshes", "axes"];
        if above.iter().all(|what| is_same(&differences, what)) {
            let at = differences.iter().position(|d| d.what.contains('.'));
            let single = ops(a, b);
            differences.splice(
                at.unwrap_or(differences.len())..at.unwrap_or(differences.len()),
                single,
            );
        }
        Ok(Against {
            predicted: predicted(&a.plan, &b.plan),
            differences,
            notes,
        })
    }

    /// Writes two tables; `names` are those of the plans.
    pub fn words(&self, names: [&str; 2]) -> String {
        let figures = self.predicted.iter().map(Quantity::cells).collect();
        let header = ["predicted", names[0], names[1], "change"];
        let mut w = table(&header, figures, 1);
        let read = "(compute, collectives, transfers, begin and end: per step, averaged over the meshes; peak memory: of the rank that needs most)";
        w += &format!("\n{}\n", super::wrapped(read));
        for note in &self.notes {
            w += &format!("\n{note}\n");
        }
        if self.differences.is_empty() {
            return w
                + "\nThe plans are of the same model, training and cluster, and decide the same.";
        }
        let shown = self.differences.iter().take(LISTED);
        let rows = shown.map(|d| vec![d.what.clone(), d.values[0].clone(), d.values[1].clone()]);
        w += "\n";
        w += &table(&["what differs", names[0], names[1]], rows.collect(), 3);
        let left = self.differences.len().saturating_sub(LISTED);
        if left > 0 {
            w += &format!(
                "\nand {} more; --json has them all",
                counted(left as u64, "key")
            );
        }
        w
    }
}

impl Quantity {
    fn cells(&self) -> Vec<String> {
        let show = |x: f64| match self.kind {
            Kind::Seconds => Seconds(x).to_string(),
            Kind::Bytes => Bytes(x as u64).to_string(),
            Kind::Rate => count(x),
            Kind::Share => percent(x),
        };
        let [a, b] = self.values;
        let change = match self.kind {
            _ if a == b => "same".to_string(),
            Kind::Share => format!("{:+.1} points", 100.0 * (b - a)),
            _ if a > 0.0 => match b / a - 1.0 {
                more if more < 10.0 => format!("{:+.1}%", 100.0 * more),
                _ => format!("x {:.3e}", b / a),
            },
            _ => "-".to_string(),
        };
        vec![self.what.to_string(), show(a), show(b), change]
    }
}

fn predicted(a: &Plan, b: &Plan) -> Vec<Quantity> {
    let (p, q) = (&a.predicted, &b.predicted);
    let of = |what, kind, get: &dyn Fn(&Plan) -> f64| Quantity {
        what,
        kind,
        values: without_noise([get(a), get(b)]),
    };
    let mean = |get: fn(&StagePrediction) -> Seconds| {
        move |plan: &Plan| {
            let stages = &plan.predicted.stages;
            stages.iter().map(|s| get(s).0).sum::<f64>() / stages.len().max(1) as f64
        }
    };
    let peak = |plan: &Plan| {
        let peaks = plan.predicted.stages.iter().map(|s| s.peak_bytes.0);
        peaks.max().unwrap_or(0) as f64
    };
    let rate = match super::plan::unit(a) {
        super::plan::IMAGES => "images/s",
        _ => "tokens/s",
    };
    let mut figures = vec![
        of("step time", Kind::Seconds, &|p| p.predicted.step_time_s.0),
        of(rate, Kind::Rate, &|p| p.predicted.tokens_per_s),
        of("MFU", Kind::Share, &|p| p.predicted.mfu),
    ];
    if !hfu(p.mfu, p.hfu).is_empty() || !hfu(q.mfu, q.hfu).is_empty() {
        figures.push(of("HFU", Kind::Share, &|p| p.predicted.hfu));
    }
    figures.extend([
        of("bubble", Kind::Share, &|p| p.predicted.bubble),
        of("compute", Kind::Seconds, &mean(|s| s.compute_s)),
        of("collectives", Kind::Seconds, &mean(|s| s.collective_s)),
        of("transfers", Kind::Seconds, &mean(|s| s.transfer_s)),
        of("begin and end", Kind::Seconds, &mean(|s| s.step_s)),
        of("peak memory", Kind::Bytes, &peak),
    ]);
    figures
}

/// Sums of equal numbers in another order differ by less, and no prediction is so small.
const NOISE: f64 = 1e-12;

/// Removes what rounding leaves: a value near 0 becomes 0, and equal sums become equal.
fn without_noise(values: [f64; 2]) -> [f64; 2] {
    let [a, b] = values.map(|x| if x.abs() < NOISE { 0.0 } else { x });
    match (b - a).abs() <= NOISE * a.abs() {
        true => [a, a],
        false => [a, b],
    }
}

/// Describes the size of both models, and what tells them apart where they are of one size.
fn graphs(a: &Loaded, b: &Loaded) -> [String; 2] {
    let size = |loaded: &Loaded| {
        let Ok(graph) = ir::text::parse(&loaded.plan.graph) else {
            return "no graph".to_string();
        };
        let states = graph
            .ops()
            .iter()
            .filter(|op| matches!(op.kind, OpKind::State { .. }));
        let bytes = states
            .flat_map(|op| &op.outputs)
            .map(|&v| graph.value(v).ty.bytes(1));
        format!(
            "{}, {}, parameters of {}",
            counted(graph.layers.len() as u64, "layer"),
            counted(graph.ops().len() as u64, "op"),
            Bytes(bytes.fold(0, u64::saturating_add))
        )
    };
    let sizes = [size(a), size(b)];
    if sizes[0] != sizes[1] {
        return sizes;
    }
    let [size, _] = sizes;
    // The first line of the text that differs.
    let lines = |loaded: &Loaded| -> Vec<String> {
        let lines = loaded.plan.graph.lines();
        lines.map(|l| l.trim().to_string()).collect()
    };
    let (of_a, of_b) = (lines(a), lines(b));
    let first = of_a.iter().zip(&of_b).find(|(x, y)| x != y);
    match first {
        Some((x, y)) => [x, y].map(|line| format!("{size}; {}", shortened(line))),
        None => [size.clone(), format!("{size}; not the same text")],
    }
}

/// The characters of a graph's line that are shown.
const LINE_SHOWN: usize = 60;

fn shortened(line: &str) -> String {
    match line.char_indices().nth(LINE_SHOWN) {
        Some((end, _)) => format!("{}..", &line[..end]),
        None => line.to_string(),
    }
}

/// The most ops that a difference names.
const OPS_NAMED: usize = 3;

/// Lists the differences in single ops of plans that are alike in all else: roles of axes, and if
/// these are equal, layout changes on the way to them.
fn ops(a: &Loaded, b: &Loaded) -> Vec<Difference> {
    let of = |loaded: &Loaded| {
        let Loaded { plan, training, .. } = loaded;
        let mut ops: BTreeMap<(usize, (bool, String)), String> = BTreeMap::new();
        for stage in &plan.stages {
            for run in &stage.runs {
                let first = run.first.index();
                let name = training.graph.layers.get(first).map_or("", String::as_str);
                for op in assignments(plan, training, run.strategy as usize, run.first) {
                    let said = format!(
                        "{} {}",
                        strategies::uses(&op, &stage.mesh),
                        op.specs
                            .results
                            .iter()
                            .map(|r| r.display(&stage.mesh))
                            .collect::<Vec<_>>()
                            .join(" ")
                    );
                    // Ops of the forward pass come first, because the rest follows from them.
                    let path = relative_path(&op.op.path, name).replace("{}.", "");
                    let path = (op.op.pass != Pass::F, path);
                    for layer in first..first + run.count as usize {
                        ops.insert((layer, path.clone()), said.clone());
                    }
                }
            }
        }
        ops
    };
    let (of_a, of_b) = (of(a), of(b));
    let nothing = "-".to_string();
    // For each op, what it is in the first layer where it differs, and in how many layers it does.
    let mut different: BTreeMap<&(bool, String), (u64, [&String; 2])> = BTreeMap::new();
    let keys: BTreeSet<&(usize, (bool, String))> = of_a.keys().chain(of_b.keys()).collect();
    for key in keys {
        let values = [&of_a, &of_b].map(|ops| ops.get(key).unwrap_or(&nothing));
        if values[0] != values[1] {
            different.entry(&key.1).or_insert((0, values)).0 += 1;
        }
    }
    if different.is_empty() {
        return layout_changes(&a.plan, &b.plan).into_iter().collect();
    }
    let left = different.len().saturating_sub(OPS_NAMED);
    let lines = |side: usize| {
        let shown = different.iter().take(OPS_NAMED);
        let mut lines: Vec<String> = shown
            .map(|((_, op), (n, said))| format!("{op} ({}): {}", counted(*n, "layer"), said[side]))
            .collect();
        if left > 0 {
            lines.push(format!("and {} more", counted(left as u64, "op")));
        }
        lines.join("\n")
    };
    vec![Difference {
        what: "single ops".into(),
        values: [lines(0), lines(1)],
    }]
}

/// Reports that plans with the same ops differ in the layout changes between them.
fn layout_changes(a: &Plan, b: &Plan) -> Option<Difference> {
    if (&a.layer_strategies, &a.edges, &a.transfers)
        == (&b.layer_strategies, &b.edges, &b.transfers)
    {
        return None;
    }
    let count = |plan: &Plan| {
        let of_layers = plan.layer_strategies.iter().map(|s| s.edges.len());
        let n = of_layers.sum::<usize>() + plan.edges.len() + plan.transfers.len();
        counted(n as u64, "layout change")
    };
    Some(Difference {
        what: "layout changes between ops".into(),
        values: [count(a), format!("{}, different ones", count(b))],
    })
}

/// Lists what a plan is of and what it decides, in a fixed order.
fn facts(loaded: &Loaded) -> Result<Vec<(String, String)>, Failure> {
    let plan = &loaded.plan;
    let stages = stages(plan, &loaded.training);
    let layers = plan.stages.iter().map(|s| {
        let counts = s.runs.iter().map(|r| u64::from(r.count));
        counts.sum::<u64>().to_string()
    });
    let decided = [
        ("model", plan.name.clone()),
        ("made for", software::title(plan.made_for.as_ref())),
        ("pins", pins(plan)),
        ("stages", plan.stages.len().to_string()),
        ("layers of the stages", layers.collect::<Vec<_>>().join("/")),
        ("schedule", plan.schedule.name().to_string()),
        (
            "stages of a mesh",
            plan.schedule.virtual_stages().to_string(),
        ),
        (
            "microbatches",
            format!(
                "{} x {}",
                plan.n_microbatches,
                counted(plan.microbatch, "sample")
            ),
        ),
        ("meshes", by_stage(&stages, mesh)),
        ("axes", by_stage(&stages, does)),
        ("recomputed", by_stage(&stages, recomputed)),
    ];
    let mut facts: Vec<(String, String)> = Vec::new();
    facts.extend(decided.map(|(what, value)| (what.to_string(), value)));
    let mut keys = BTreeMap::new();
    flatten("train", &json(&plan.train)?, &mut keys);
    flatten("cluster", &json(&plan.cluster)?, &mut keys);
    facts.extend(keys);
    Ok(facts)
}

fn pins(plan: &Plan) -> String {
    match plan.pins.is_empty() {
        true => "none".into(),
        false => plan.pins.join(", "),
    }
}

fn json(value: &impl Serialize) -> Result<Value, Failure> {
    let failed = |e| Failure::new(Exit::Internal, format!("cannot write JSON: {e}"));
    serde_json::to_value(value).map_err(failed)
}

/// Collects the scalars of a document by their paths.
fn flatten(path: &str, value: &Value, into: &mut BTreeMap<String, String>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                if !NOT_FIGURES.contains(&key.as_str()) {
                    flatten(&format!("{path}.{key}"), value, into);
                }
            }
        }
        Value::Array(list) => {
            for (i, value) in list.iter().enumerate() {
                flatten(&format!("{path}[{i}]"), value, into);
            }
        }
        Value::String(text) => {
            into.insert(path.to_string(), text.clone());
        }
        other => {
            into.insert(path.to_string(), other.to_string());
        }
    }
}

/// Describes each stage, with neighbouring stages of one description in one line.
fn by_stage(stages: &[StageReport], of: fn(&StageReport) -> String) -> String {
    let mut runs: Vec<(usize, usize, String)> = Vec::new();
    for (i, stage) in stages.iter().enumerate() {
        let said = of(stage);
        match runs.last_mut() {
            Some((_, last, same)) if *same == said => *last = i,
            _ => runs.push((i, i, said)),
        }
    }
    if let [(_, _, all)] = &runs[..] {
        return all.clone();
    }
    let line = |(first, last, said): (usize, usize, String)| match first == last {
        true => format!("{first}: {said}"),
        false => format!("{first} to {last}: {said}"),
    };
    let lines: Vec<String> = runs.into_iter().map(line).collect();
    lines.join("\n")
}

fn mesh(stage: &StageReport) -> String {
    let axes = stage.mesh.iter().filter(|(_, size)| *size > 1);
    let axes: Vec<String> = axes.map(|(name, size)| format!("{name} {size}")).collect();
    match axes.is_empty() {
        true => "one device".into(),
        false => axes.join(" x "),
    }
}

/// Describes the roles of the axes in most of the stage's layers.
fn does(stage: &StageReport) -> String {
    let mut known: Vec<(String, usize)> = Vec::new();
    for run in &stage.layers {
        let axes = run.axes.iter().filter(|a| a.size > 1);
        let said: Vec<String> = axes.map(AxisReport::words).collect();
        let said = match said.is_empty() {
            true => "no parallelism inside the stage".to_string(),
            false => said.join("; "),
        };
        match known.iter_mut().find(|(same, _)| *same == said) {
            Some((_, n)) => *n += run.n_layers,
            None => known.push((said, run.n_layers)),
        }
    }
    // Of descriptions that are equally frequent, the first one is taken.
    let most = known.iter().rev().max_by_key(|(_, n)| *n);
    most.map_or(String::new(), |(said, _)| said.clone())
}

fn recomputed(stage: &StageReport) -> String {
    let mut said: Vec<(&str, u64)> = Vec::new();
    for run in &stage.layers {
        let (words, n) = (run.recompute_words.as_str(), run.n_layers as u64);
        match said.iter_mut().find(|(known, _)| *known == words) {
            Some((_, known)) => *known += n,
            None => said.push((words, n)),
        }
    }
    // Embedding and output layer have nothing to recompute: kinds are counted, not contrasted.
    said.retain(|(words, _)| !words.is_empty());
    let said = said
        .iter()
        .map(|(words, n)| format!("{words} in {}", counted(*n, "layer")));
    let said: Vec<String> = said.collect();
    match said.is_empty() {
        true => "nothing".into(),
        false => said.join("; "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_compared_key_by_key() {
        let mut keys = BTreeMap::new();
        let document = serde_json::json!({
            "name": "a", "levels": [{ "latency_s": 1e-6 }], "sources": { "name": "here" },
        });
        flatten("cluster", &document, &mut keys);
        let keys: Vec<(&str, &str)> = keys.iter().map(|(k, v)| (&k[..], &v[..])).collect();
        assert_eq!(
            keys,
            [
                ("cluster.levels[0].latency_s", "1e-6"),
                ("cluster.name", "a")
            ]
        );
    }

    #[test]
    fn rounding_is_no_difference() {
        for zero in [-0.0, 1e-19, -1e-19] {
            let [a, b] = without_noise([zero, 0.5]);
            assert!(a == 0.0 && a.is_sign_positive() && b == 0.5);
        }
        assert_eq!(without_noise([0.3, 0.1 + 0.2]), [0.3, 0.3]);
        assert_eq!(without_noise([1.0, 1.0 + 1e-9]), [1.0, 1.0 + 1e-9]);
    }

    #[test]
    fn changes_are_relative_and_those_of_shares_in_points() {
        let change = |kind, values| {
            let what = "x";
            Quantity { what, values, kind }.cells().remove(3)
        };
        assert_eq!(change(Kind::Seconds, [2.0, 1.5]), "-25.0%");
        assert_eq!(change(Kind::Seconds, [2.0, 2.0]), "same");
        assert_eq!(change(Kind::Seconds, [0.0, 2.0]), "-");
        assert_eq!(change(Kind::Seconds, [1e-9, 2.0]), "x 2.000e9");
        assert_eq!(change(Kind::Share, [0.4, 0.45]), "+5.0 points");
    }
}
