//! Fields that a cluster file leaves out: all that are missing are named at once, and those that
//! nobody knows of a machine without measuring it are guessed, and named.
//!
//! The schema of clusters says which fields there have to be, so that there is no second list.

use ir::cluster::Cluster;
use schemars::schema_for;
use serde_json::{Map, Value, json};

/// The fields that a document leaves out.
#[derive(Debug, Default, PartialEq)]
pub struct Gaps {
    /// The fields that have to be given, by the table that lacks them; the document's own stand
    /// first, under no name.
    pub missing: Vec<(String, Vec<String>)>,
    /// The fields that were filled with guesses.
    pub guessed: Vec<String>,
}

impl Gaps {
    /// Names the missing fields, table by table.
    pub fn words(&self) -> String {
        let tables = self.missing.iter().map(|(table, fields)| {
            let fields: Vec<String> = fields.iter().map(|f| format!("`{f}`")).collect();
            match table.is_empty() {
                true => fields.join(", "),
                false => format!("`{table}`: {}", fields.join(", ")),
            }
        });
        tables.collect::<Vec<_>>().join("\n  ")
    }
}

/// Fills what can be guessed into `document`, and lists all that is missing.
pub fn fill(document: &mut Value) -> Gaps {
    let mut gaps = Gaps::default();
    guess(document, &mut gaps);
    let schema = schema_for!(Cluster);
    let schema = schema.as_value();
    look(schema, schema, document, "", &mut gaps);
    gaps
}

/// The path of a key of the table at `path`.
fn under(path: &str, key: &str) -> String {
    match path.is_empty() {
        true => key.to_string(),
        false => format!("{path}.{key}"),
    }
}

/// Lists the fields that `value` has to have by `schema` and has not, in it and below.
fn look(root: &Value, schema: &Value, value: &Value, path: &str, gaps: &mut Gaps) {
    let reference = schema.get("$ref").and_then(Value::as_str);
    if let Some(pointer) = reference.and_then(|r| r.strip_prefix('#')) {
        if let Some(schema) = root.pointer(pointer) {
            look(root, schema, value, path, gaps);
        }
        return;
    }
    // Of a value that may be left out, the one that it has where it is there.
    if let Some(any) = schema.get("anyOf").and_then(Value::as_array) {
        if let Some(schema) = any.iter().find(|s| s.get("$ref").is_some()) {
            look(root, schema, value, path, gaps);
        }
        return;
    }
    match value {
        Value::Object(fields) => {
            let required = schema.get("required").and_then(Value::as_array);
            let required = required.into_iter().flatten().filter_map(Value::as_str);
            let missing = required.filter(|key| !fields.contains_key(*key));
            let missing: Vec<String> = missing.map(String::from).collect();
            if !missing.is_empty() {
                gaps.missing.push((path.to_string(), missing));
            }
            for (key, value) in fields {
                let property = schema.get("properties").and_then(|p| p.get(key));
                if let Some(schema) = property {
                    look(root, schema, value, &under(path, key), gaps);
                }
            }
        }
        Value::Array(elements) => {
            if let Some(schema) = schema.get("items") {
                for (i, element) in elements.iter().enumerate() {
                    look(root, schema, element, &format!("{path}[{i}]"), gaps);
                }
            }
        }
        _ => {}
    }
}

/// The source of a figure that was guessed.
const A_GUESS: &str = "a guess: the cluster file does not say it";

/// Fills the fields that no user knows, of the cluster's own hosts and of those of further groups.
fn guess(document: &mut Value, gaps: &mut Gaps) {
    let Value::Object(cluster) = document else {
        return;
    };
    let mut keys = Vec::new();
    guess_group(cluster, "", gaps, &mut keys);
    if let Some(Value::Array(groups)) = cluster.get_mut("groups") {
        for (i, group) in groups.iter_mut().enumerate() {
            if let Value::Object(group) = group {
                guess_group(group, &format!("groups[{i}]"), gaps, &mut keys);
            }
        }
    }
    let has_sources = cluster.contains_key("sources");
    let sources = cluster.entry("sources").or_insert_with(|| json!({}));
    if let Value::Object(sources) = sources {
        for key in keys {
            sources.entry(key).or_insert_with(|| A_GUESS.into());
        }
    }
    if !has_sources {
        gaps.guessed.push("sources".into());
    }
}

/// `keys` are those of the sources, which name levels.
fn guess_group(
    group: &mut Map<String, Value>,
    path: &str,
    gaps: &mut Gaps,
    keys: &mut Vec<String>,
) {
    let per_host = group.get("devices_per_host").and_then(Value::as_u64);
    if let Some(Value::Object(device)) = group.get_mut("device") {
        let path = under(path, "device");
        if !device.contains_key("matmul_half_size") {
            // Half an output tile of 128 is lost along m and n, a pipeline fill along k: as the
            // presets assume of devices that were not measured.
            let half = json!({ "m": 64.0, "n": 64.0, "k": 128.0 });
            device.insert("matmul_half_size".into(), half);
            gaps.guessed.push(under(&path, "matmul_half_size"));
            keys.push(under(&path, "matmul_half_size"));
        }
        if !device.contains_key("matmul_efficiency")
            && let Some(Value::Object(peaks)) = device.get("peak_flops_per_s")
        {
            // Measured devices reach 90% of a peak without tensor cores and 62% to 87% of one with
            // them.
            let of = |dtype: &String| match dtype.as_str() {
                "f32" => json!(0.9),
                _ => json!(0.75),
            };
            let all: Map<String, Value> = peaks.keys().map(|t| (t.clone(), of(t))).collect();
            device.insert("matmul_efficiency".into(), Value::Object(all));
            gaps.guessed.push(under(&path, "matmul_efficiency"));
            keys.push(under(&path, "matmul_efficiency"));
        }
    }
    if let Some(Value::Array(levels)) = group.get_mut("levels") {
        for (i, level) in levels.iter_mut().enumerate() {
            let Value::Object(level) = level else {
                continue;
            };
            if level.contains_key("half_bytes") {
                continue;
            }
            // Of the presets' NVLinks it is 4 to 8 MiB, of their networks 2 MiB.
            let reach = level.get("devices").and_then(Value::as_u64);
            let half = match reach > per_host {
                true => 2_097_152.0,
                false => 4_194_304.0,
            };
            level.insert("half_bytes".into(), json!(half));
            if let Some(name) = level.get("name").and_then(Value::as_str) {
                keys.push(under(path, &format!("levels.{name}.half_bytes")));
            }
            let level = under(path, &format!("levels[{i}]"));
            gaps.guessed.push(under(&level, "half_bytes"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_is_missing_is_named_by_its_table() {
        let mut document = json!({
            "name": "x",
            "n_hosts": 1,
            "devices_per_host": 8,
            "device": { "name": "y", "peak_flops_per_s": { "f32": 1e13, "bf16": 1e14 } },
            "levels": [{ "name": "pcie", "devices": 8, "protocols": [{ "name": "LL" }] }],
            "pool": {},
        });
        let gaps = fill(&mut document);
        let tables: Vec<&str> = gaps.missing.iter().map(|(t, _)| t.as_str()).collect();
        assert_eq!(
            tables,
            ["", "device", "levels[0]", "levels[0].protocols[0]", "pool"]
        );
        assert_eq!(gaps.missing[0].1, ["version"]);
        assert!(gaps.words().contains("`levels[0]`: `latency_s`, `bandw"));
        let guessed = [
            "device.matmul_half_size",
            "device.matmul_efficiency",
            "levels[0].half_bytes",
            "sources",
        ];
        assert_eq!(gaps.guessed, guessed);
        assert_eq!(document["device"]["matmul_efficiency"]["bf16"], 0.75);
        assert_eq!(document["sources"]["levels.pcie.half_bytes"], A_GUESS);
    }

    #[test]
    fn nothing_is_missing_of_what_is_whole() {
        let cluster = cost_model::presets::load("dgx-h100", 2).unwrap();
        let mut document = serde_json::to_value(&cluster).unwrap();
        let before = document.clone();
        assert_eq!(fill(&mut document), Gaps::default());
        assert_eq!(document, before);
    }
}
