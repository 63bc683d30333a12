//! Values that a user sets beside a file, and which of them something used.

use crate::{Note, NoteKind, closest};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

/// Variables with their values. One that nothing asks for is told ([`Variables::unused`]), since a slip
/// in its name would change nothing else.
#[derive(Clone, Debug, Default)]
pub struct Variables {
    values: BTreeMap<String, String>,
    /// Names that were asked for, whether they are there or not.
    asked: RefCell<BTreeSet<String>>,
}

impl FromIterator<(String, String)> for Variables {
    fn from_iter<T: IntoIterator<Item = (String, String)>>(values: T) -> Variables {
        Variables {
            values: values.into_iter().collect(),
            asked: RefCell::default(),
        }
    }
}

impl Variables {
    /// The value of a name, which counts as asked for.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.asked.borrow_mut().insert(name.to_string());
        self.values.get(name).map(String::as_str)
    }

    /// Notes on those that nothing asked for.
    pub(crate) fn unused(&self) -> Vec<Note> {
        let asked = self.asked.borrow();
        let unused = self
            .values
            .iter()
            .filter(|(name, _)| !asked.contains(*name));
        let note = |(name, value): (&String, &String)| {
            let near = closest(name, asked.iter().map(String::as_str));
            let meant = near.map_or(String::new(), |near| format!("; did you mean `{near}`?"));
            Note {
                kind: NoteKind::Unknown,
                name: format!("--set {name}"),
                value: Some(value.clone()),
                line: None,
                words: format!("nothing in the job uses it{meant}"),
            }
        };
        unused.map(note).collect()
    }
}
