//! Changes in a job's own words, from one plan of its software to another: the
//! difference of what `export` writes for both.

use crate::report::software::knobs;
use export::{Export, Target};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;

use super::request::Priced;

/// Something to change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    /// Its name in the software.
    pub name: String,
    /// Its value in the job; none where it is absent.
    pub old: Option<String>,
    /// Its new value; none where it is to be taken out.
    pub new: Option<String>,
}

/// The way from one plan to another.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Changes {
    /// Flags, or keys of a file.
    pub flags: Vec<Change>,
    /// The parts of the new plan that flags do not say.
    pub not_in_flags: Vec<String>,
}

/// Flags that say the same in another way, and are in the way of the first.
const ALIASES: [(&str, &[&str]); 5] = [
    (
        "--num-virtual-stages-per-pipeline-rank",
        &["--num-layers-per-virtual-pipeline-stage"],
    ),
    (
        "--pipeline-model-parallel-layout",
        &[
            "--num-layers-per-virtual-pipeline-stage",
            "--account-for-embedding-in-pipeline-split",
            "--account-for-loss-in-pipeline-split",
            "--decoder-first-pipeline-num-layers",
            "--decoder-last-pipeline-num-layers",
        ],
    ),
    (
        "--pipeline-model-parallel-size",
        &["--num-layers-per-virtual-pipeline-stage"],
    ),
    (
        "--recompute-granularity",
        &["--recompute-activations", "--checkpoint-activations"],
    ),
    (
        "train_micro_batch_size_per_gpu",
        &["per_device_train_batch_size"],
    ),
];

/// Settings that keep states elsewhere than on the device. The search looks at plans that do not, so
/// they have to go.
const OFFLOADS: [&str; 7] = [
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
    "zero_optimization.cpu_offload",
    "zero_optimization.cpu_offload_params",
    "--optimizer-cpu-offload",
    "--optimizer-offload-fraction",
    "training.enable_cpu_offload",
];

/// Finds what changes from `old` to `new`; `settings` are what the job's files say.
pub fn changes(settings: &BTreeMap<String, String>, old: &Priced, new: &Priced) -> Changes {
    let framework = old.loaded.plan.made_for.as_ref().map(|m| m.name.clone());
    let target = framework.as_deref().and_then(Target::named);
    let exported = target.and_then(|t| Some((exported(old, t)?, exported(new, t)?)));
    let Some((old_export, new_export)) = exported else {
        return Changes {
            flags: by_knobs(old, new),
            not_in_flags: Vec::new(),
        };
    };
    let values = [&old_export, &new_export].map(values);
    let mut flags = Vec::new();
    let names = values[0].keys().chain(values[1].keys());
    let mut names: Vec<&String> = names.collect();
    names.sort_unstable();
    names.dedup();
    for name in names {
        let (before, after) = (values[0].get(name), values[1].get(name));
        if before == after {
            continue;
        }
        let own = said(settings, name);
        // What the job says in other words, or leaves to a default, is not there to be taken out.
        if own.as_ref() == after {
            continue;
        }
        flags.push(Change {
            name: name.clone(),
            old: own,
            new: after.cloned(),
        });
    }
    let differs = |name: &&String| values[0].get(*name) != values[1].get(*name);
    let names = values[0].keys().chain(values[1].keys());
    let changed: Vec<String> = names.filter(differs).cloned().collect();
    for (name, others) in ALIASES {
        if !changed.iter().any(|c| c == name) {
            continue;
        }
        for other in others {
            let is_new = !flags.iter().any(|f| f.name == *other);
            if let Some(value) = said(settings, other).filter(|_| is_new) {
                flags.push(Change {
                    name: other.to_string(),
                    old: Some(value),
                    new: None,
                });
            }
        }
    }
    let is_new = |c: &Change| !flags.iter().any(|f| f.name == c.name);
    let offloads = OFFLOADS.iter().filter_map(|name| taken_out(settings, name));
    let offloads: Vec<Change> = offloads.filter(is_new).collect();
    flags.extend(offloads);
    flags.extend(recomputation(settings, &flags, old, new));
    let of_old = |what: &export::NotExpressed| old_export.not_expressed.contains(what);
    let more = new_export.not_expressed.iter().filter(|n| !of_old(n));
    Changes {
        flags,
        not_in_flags: more.map(|n| format!("{}: {}", n.place, n.what)).collect(),
    }
}

/// A setting, or the group of settings below it, that is to go; none where it is not there, or it or the
/// device that it names is off.
fn taken_out(settings: &BTreeMap<String, String>, name: &str) -> Option<Change> {
    let plain = |n: &str| n.trim_start_matches('-').replace('_', "-");
    let name_of = |n: &str| plain(n).strip_prefix(&plain(name)).map(str::to_string);
    let own = settings.iter().filter_map(|(n, v)| Some((name_of(n)?, v)));
    let own = own.filter(|(rest, _)| rest.is_empty() || rest.starts_with('.'));
    let own: BTreeMap<String, &String> = own.collect();
    let deciding = own.get("").or_else(|| own.get(".device"))?;
    let is_zero = deciding.parse::<f64>().is_ok_and(|v| v == 0.0);
    if is_zero || ["false", "none", "null"].contains(&deciding.to_lowercase().as_str()) {
        return None;
    }
    let old = match deciding.is_empty() {
        true => "yes".into(),
        false => deciding.to_string(),
    };
    Some(Change {
        name: name.to_string(),
        old: Some(old),
        new: None,
    })
}

/// The change of what is recomputed, where no flag among those that change says it: DeepSpeed's file
/// leaves it to the model's code.
fn recomputation(
    settings: &BTreeMap<String, String>,
    flags: &[Change],
    old: &Priced,
    new: &Priced,
) -> Option<Change> {
    let is_said = |c: &Change| c.name.contains("recompute") || c.name.contains("checkpoint");
    let change = by_knobs(old, new).into_iter();
    let mut change = change.filter(|c| c.name.starts_with("recomputation"));
    let change = change.next().filter(|_| !flags.iter().any(is_said))?;
    let name = "--gradient_checkpointing";
    Some(match said(settings, name) {
        Some(value) => Change {
            name: name.into(),
            old: Some(value),
            new: change.new,
        },
        None => change,
    })
}

/// The value that the job's files have for a name, in whatever spelling.
fn said(settings: &BTreeMap<String, String>, name: &str) -> Option<String> {
    let plain = |n: &str| n.trim_start_matches('-').replace('_', "-");
    let found = settings.iter().find(|(n, _)| plain(n) == plain(name));
    found.map(|(_, v)| {
        if v.is_empty() {
            "yes".to_string()
        } else {
            v.clone()
        }
    })
}

fn exported(priced: &Priced, target: Target) -> Option<Export> {
    export::export(&priced.loaded.plan, &priced.loaded.training, target).ok()
}

/// Names and values of an export's file that has them as a map.
fn values(export: &Export) -> BTreeMap<String, String> {
    let file = export.files.iter().find(|f| !f.name.ends_with(".sh"));
    let Some(file) = file else {
        return BTreeMap::new();
    };
    let mut all = BTreeMap::new();
    if file.name.ends_with(".json") {
        let value: Value = serde_json::from_str(&file.text).unwrap_or_default();
        flatten("", &value, &mut all);
    } else if file.name.ends_with(".toml") {
        let table = file.text.parse::<toml::Table>().ok();
        let value = table.and_then(|t| serde_json::to_value(t).ok());
        flatten("", &value.unwrap_or_default(), &mut all);
        all.retain(|name, _| !name.starts_with("job."));
    } else {
        let flags = file
            .text
            .lines()
            .filter_map(|l| l.trim().strip_prefix("--"));
        for (name, value) in flags.filter_map(|l| l.split_once(": ")) {
            let value = value.trim_matches('"');
            let value = if value == "true" { "yes" } else { value };
            all.insert(format!("--{name}"), value.to_string());
        }
    }
    all
}

fn flatten(path: &str, value: &Value, out: &mut BTreeMap<String, String>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                let path = match path {
                    "" => key.clone(),
                    path => format!("{path}.{key}"),
                };
                flatten(&path, value, out);
            }
        }
        Value::Array(items) => {
            let one = |v: &Value| v.to_string().replace('"', "");
            let all: Vec<String> = items.iter().map(one).collect();
            out.insert(path.to_string(), all.join(" | "));
        }
        Value::String(s) => {
            out.insert(path.to_string(), s.clone());
        }
        other => {
            out.insert(path.to_string(), other.to_string());
        }
    }
}

/// The knobs that differ, for software that nothing is exported to.
fn by_knobs(old: &Priced, new: &Priced) -> Vec<Change> {
    let of = |p: &Priced| {
        let summary = export::summary(&p.loaded.plan, &p.loaded.training).ok()?;
        knobs(&p.loaded.plan, &summary)
    };
    let (Some(old), Some(new)) = (of(old), of(new)) else {
        return Vec::new();
    };
    let value = |all: &[crate::report::software::Knob], what: &str| {
        all.iter().find(|k| k.what == what).map(|k| k.value.clone())
    };
    let names = old.iter().chain(&new).map(|k| (k.what, k.name));
    let mut names: Vec<(&str, &str)> = names.collect();
    names.sort_unstable();
    names.dedup_by_key(|n| n.0);
    let changed = names.into_iter().map(|(what, name)| Change {
        name: match name {
            "" => what.to_string(),
            name => format!("{what} ({name})"),
        },
        old: value(&old, what),
        new: value(&new, what),
    });
    changed.filter(|c| c.old != c.new).collect()
}
