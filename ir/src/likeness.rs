//! Whether two forward graphs are one model: the same parameters, put through the same
//! mathematics.
//!
//! Ops are matched by path, and their kinds, attributes and the shapes of states compared. Left out
//! is what one model is trained with in several ways: the length of the sequence and the order that
//! it is stored in, dropout, the slots of experts, how much the losses of further tokens count,
//! layouts, initial values.

use crate::{Graph, Op, OpKind, Task};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Attributes that one model has several values of.
const FREE: [&str; 9] = [
    "dropout", "order", "capacity", "len", "leading", "shape", "key", "init", "decay",
];

/// The first place where two models differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Path of the op.
    pub op: String,
    /// The attribute that differs: as the text form spells it, `shape` of a state, or `op` where
    /// the ops are of two kinds or one model has none.
    pub attribute: String,
    /// Its value in the first model.
    pub first: String,
    /// Its value in the second one.
    pub second: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of `{}`", self.attribute, self.op)
    }
}

/// Where the paths of what a model has for further tokens begin.
const FURTHER: [&str; 2] = ["h.mtp.", "head.mtp."];
/// The op whose factor says how much the losses of further tokens count.
const FURTHER_SCALE: &str = "head.mtp.scale";

/// Where two models differ; none where they are one model. For inference by the second one the
/// first may have modules for further tokens besides.
pub fn difference(first: &Graph, second: &Graph, task: Task) -> Option<Difference> {
    let leaves_out = task == Task::Inference && first.further() > 0 && second.further() == 0;
    let is_further = |op: &Op| FURTHER.iter().any(|scope| op.path.starts_with(scope));
    let counts = |op: &&Op| counts(op) && !(leaves_out && is_further(op));
    let both = [first, second].map(|g| {
        let ops = g.ops().iter().filter(counts);
        ops.map(|op| (op.path.as_str(), facts(g, op)))
            .collect::<BTreeMap<_, _>>()
    });
    // In the order of the first model, then what only the second one has.
    let ops = first.ops().iter().chain(second.ops());
    ops.filter(counts).find_map(|op| {
        let none = Facts::from([("op".to_string(), "none".to_string())]);
        let [a, b] = [&both[0], &both[1]].map(|f| f.get(op.path.as_str()).unwrap_or(&none));
        // Other attributes of another kind of op say nothing.
        let attributes: BTreeSet<&String> = match a["op"] == b["op"] {
            true => a.keys().chain(b.keys()).collect(),
            false => a.keys().filter(|k| *k == "op").collect(),
        };
        let value = |f: &Facts, key: &String| f.get(key).cloned().unwrap_or("none".into());
        let differs = attributes
            .into_iter()
            .find(|key| a.get(*key) != b.get(*key))?;
        Some(Difference {
            op: op.path.clone(),
            attribute: differs.clone(),
            first: value(a, differs),
            second: value(b, differs),
        })
    })
}

/// Attributes of an op in words, by name; its kind as `op`.
type Facts = BTreeMap<String, String>;

fn counts(op: &Op) -> bool {
    let is_free = matches!(
        op.kind,
        OpKind::Layout | OpKind::Dropout { .. } | OpKind::Input { .. } | OpKind::Slice { .. }
    );
    // `zigzag` stores sequences in another order by ops of such paths.
    !is_free && !op.path.contains(".zigzag.")
}

fn facts(graph: &Graph, op: &Op) -> Facts {
    let words = |v: &Value| v.as_str().map_or_else(|| v.to_string(), String::from);
    let mut facts = Facts::from([("op".to_string(), op.kind.name().to_string())]);
    if let Ok(Value::Object(kind)) = serde_json::to_value(&op.kind) {
        let fields = kind.values().filter_map(Value::as_object).flatten();
        let is_free = |key: &str| FREE.contains(&key) || op.path == FURTHER_SCALE;
        let fixed = fields.filter(|(key, _)| !is_free(key));
        facts.extend(fixed.map(|(key, value)| (key.clone(), words(value))));
    }
    if matches!(op.kind, OpKind::State { .. }) {
        facts.insert("shape".into(), graph.ty(op.outputs[0]).shape.to_string());
    }
    facts
}
