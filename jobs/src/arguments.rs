//! Arguments: names with values, from a command line or a log, and what of them was looked at.

use crate::shell::{self, Gap};
use crate::{JobError, MOST, Note, NoteKind, closest, error};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

/// The value of an option in words such as `--nodes=4` or `-N 4`; the last one counts.
pub(crate) fn option(words: &[String], names: &[&str]) -> Option<String> {
    let mut found = None;
    for (i, word) in words.iter().enumerate() {
        for name in names.iter().filter(|n| !n.is_empty()) {
            let rest = word.strip_prefix(name);
            match rest {
                Some("") => found = words.get(i + 1).cloned().or(found),
                Some(rest) if rest.starts_with('=') => found = Some(rest[1..].to_string()),
                // `-N4`
                Some(rest) if name.len() == 2 && !rest.starts_with('-') => {
                    found = Some(rest.to_string());
                }
                _ => {}
            }
        }
    }
    found
}

/// An argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Argument {
    /// Its name as it stands there.
    pub spelled: String,
    /// Its values, which may have gaps.
    pub values: Vec<String>,
    /// Its line.
    pub line: Option<usize>,
}

/// Arguments of a job.
pub(crate) struct Arguments {
    pub file: String,
    /// By names with dashes; what is given twice counts the last time.
    all: BTreeMap<String, Argument>,
    gaps: BTreeMap<String, Gap>,
    /// Gaps that stand where a name could stand.
    open: RefCell<BTreeSet<String>>,
    seen: RefCell<BTreeSet<String>>,
    /// Names that were asked for, whether they are there or not: those that are known.
    asked: RefCell<BTreeSet<String>>,
    /// Whether every argument that the software has is there, with its default.
    pub has_defaults: bool,
}

impl Arguments {
    /// Takes names and values from words.
    pub fn of_words(
        file: &str,
        words: &[String],
        line: &dyn Fn(&str) -> Option<usize>,
        gaps: &BTreeMap<String, Gap>,
    ) -> Arguments {
        let mut all: BTreeMap<String, Argument> = BTreeMap::new();
        let mut open = BTreeSet::new();
        let mut last: Option<String> = None;
        for word in words {
            let is_name = word.starts_with("--") && word.len() > 2;
            match (is_name, &last) {
                (true, _) => {
                    let (name, value) = match word.split_once('=') {
                        Some((name, value)) => (name, Some(value.to_string())),
                        None => (word.as_str(), None),
                    };
                    let key = name[2..].replace('_', "-");
                    let argument = Argument {
                        spelled: name.to_string(),
                        values: value.into_iter().collect(),
                        line: line(name),
                    };
                    all.insert(key.clone(), argument);
                    last = Some(key);
                }
                (false, Some(key)) => {
                    let Some(argument) = all.get_mut(key) else {
                        continue;
                    };
                    match shell::whole_gap(word) {
                        Some(gap) if !argument.values.is_empty() => {
                            open.insert(gap.to_string());
                        }
                        _ => argument.values.push(word.clone()),
                    }
                }
                (false, None) => open.extend(shell::whole_gap(word).map(String::from)),
            }
        }
        Arguments {
            file: file.into(),
            all,
            gaps: gaps.clone(),
            open: RefCell::new(open),
            seen: RefCell::default(),
            asked: RefCell::default(),
            has_defaults: false,
        }
    }

    /// Whether a gap stands where a name could stand.
    pub fn is_open(&self, gap: &str) -> bool {
        self.open.borrow().contains(gap)
    }

    /// Whether a name is there without a value.
    pub fn switch_alone(&self, name: &str) -> bool {
        self.look(name).is_some_and(|a| a.values.is_empty())
    }

    /// Takes names and values as they are.
    pub fn of_values(file: &str, values: Vec<(String, Argument)>, has_defaults: bool) -> Arguments {
        Arguments {
            file: file.into(),
            all: values.into_iter().collect(),
            gaps: BTreeMap::new(),
            open: RefCell::default(),
            seen: RefCell::default(),
            asked: RefCell::default(),
            has_defaults,
        }
    }

    /// The line of an argument.
    pub fn line(&self, name: &str) -> Option<usize> {
        self.all.get(name)?.line
    }

    /// Arguments whose names have dots; a switch has the value `True`.
    pub fn with_dots(&self) -> Vec<(String, Argument)> {
        let dotted = self.all.iter().filter(|(name, _)| name.contains('.'));
        let taken = dotted.map(|(name, a)| {
            let mut argument = a.clone();
            if argument.values.is_empty() {
                argument.values.push("True".into());
            }
            (name.clone(), argument)
        });
        taken.collect()
    }

    /// Whether one of the names is there, which makes none of them looked at.
    pub fn has_any(&self, names: &[&str]) -> bool {
        names.iter().any(|n| self.all.contains_key(*n))
    }

    /// Whether a switch is on, which does not count as looked at.
    pub fn is_on(&self, name: &str) -> bool {
        self.all.get(name).is_some_and(|a| !is_off(&a.values))
    }

    fn look(&self, name: &str) -> Option<&Argument> {
        self.asked.borrow_mut().insert(name.to_string());
        let found = self.all.get(name)?;
        self.seen.borrow_mut().insert(name.to_string());
        Some(found)
    }

    /// An error about an argument.
    pub fn wrong(
        &self,
        name: &str,
        problem: impl Into<String>,
        help: impl Into<String>,
    ) -> JobError {
        let line = self.all.get(name).and_then(|a| a.line);
        error(&self.file, line, problem, help)
    }

    /// An error about something that is not there.
    pub fn missing(&self, what: &str, help: &str) -> JobError {
        error(&self.file, None, what, help)
    }

    /// An argument that nothing has asked for and whose name is like one that is missing, with its
    /// line.
    pub fn misspelt(&self, name: &str) -> Option<String> {
        let seen = self.seen.borrow();
        let others = self.all.keys().filter(|n| !seen.contains(*n));
        let found = self.all.get(closest(name, others.map(String::as_str))?)?;
        let line = found
            .line
            .map_or(String::new(), |n| format!(" in line {n}"));
        Some(format!("`{}`{line}", found.spelled))
    }

    /// Whether a switch is on; one with the value `False` is off.
    pub fn switch(&self, name: &str) -> bool {
        let Some(found) = self.look(name) else {
            return false;
        };
        // A switch has no value, so a variable behind it holds further arguments.
        let gaps = found.values.iter().filter_map(|v| shell::whole_gap(v));
        self.open.borrow_mut().extend(gaps.map(String::from));
        !is_off(&found.values)
    }

    /// Whether a switch is there, with whatever value, and off.
    pub fn is_off(&self, name: &str) -> bool {
        self.look(name).is_some_and(|a| is_off(&a.values))
    }

    /// The text of an argument; none where it is absent or `None`.
    pub fn text(&self, name: &str) -> Result<Option<&str>, JobError> {
        let Some(found) = self.look(name) else {
            return Ok(None);
        };
        match &found.values[..] {
            [] => Err(self.wrong(
                name,
                format!("`{}` has no value", found.spelled),
                "write its value behind it, or leave it out",
            )),
            [value] if value == "None" => Ok(None),
            [value] => self.known(name, value).map(Some),
            [value, more, ..] => {
                self.known(name, value)?;
                Err(self.wrong(
                    name,
                    format!(
                        "`{}` has one value, and `{}` stands behind `{value}`",
                        found.spelled,
                        shell::shown(more)
                    ),
                    "quote the value where it has blanks, or take the word out",
                ))
            }
        }
    }

    /// The words of an argument that takes several.
    pub fn list(&self, name: &str) -> Result<Vec<String>, JobError> {
        let Some(found) = self.look(name) else {
            return Ok(Vec::new());
        };
        let mut all = Vec::new();
        for value in &found.values {
            let value = self.known(name, value)?;
            let words = value.split(|c: char| c.is_whitespace() || "[],'\"".contains(c));
            all.extend(
                words
                    .filter(|w| !w.is_empty() && *w != "None")
                    .map(String::from),
            );
        }
        Ok(all)
    }

    /// A value without gaps.
    fn known<'a>(&self, name: &str, value: &'a str) -> Result<&'a str, JobError> {
        let Some(gap) = shell::gap(value) else {
            return Ok(value);
        };
        let spelled = self.all.get(name).map_or(name, |a| a.spelled.as_str());
        Err(self.gap_error(name, gap, &format!("the value of `{spelled}`")))
    }

    fn gap_error(&self, name: &str, gap: &str, what: &str) -> JobError {
        let line = self.all.get(name).and_then(|a| a.line);
        gap_error(&self.file, line, gap, self.gaps.get(gap), what)
    }

    /// A number that sizes something.
    pub fn count(&self, name: &str) -> Result<Option<u64>, JobError> {
        let Some(text) = self.text(name)? else {
            return Ok(None);
        };
        let number = text.replace('_', "").parse::<u64>().ok();
        match number.filter(|n| (1..=MOST).contains(n)) {
            Some(n) => Ok(Some(n)),
            None => Err(self.wrong(
                name,
                format!(
                    "`{}` is `{text}`, expected a whole number from 1 to {MOST}",
                    self.spelled(name)
                ),
                "correct it in the file",
            )),
        }
    }

    /// A number of ranks; 1 where it is absent.
    pub fn degree(&self, name: &str) -> Result<u32, JobError> {
        match self.count(name)? {
            None => Ok(1),
            Some(n) => u32::try_from(n).map_err(|_| {
                self.wrong(
                    name,
                    format!("`{}` is {n}, more ranks than there are", self.spelled(name)),
                    "correct it in the file",
                )
            }),
        }
    }

    /// A number with a fraction.
    pub fn number(&self, name: &str) -> Result<Option<f64>, JobError> {
        let Some(text) = self.text(name)? else {
            return Ok(None);
        };
        match text.parse::<f64>().ok().filter(|x| x.is_finite()) {
            Some(x) => Ok(Some(x)),
            None => Err(self.wrong(
                name,
                format!("`{}` is `{text}`, expected a number", self.spelled(name)),
                "correct it in the file",
            )),
        }
    }

    /// A name as it stands there.
    pub fn spelled(&self, name: &str) -> String {
        match self.all.get(name) {
            Some(a) => a.spelled.clone(),
            None => format!("--{name}"),
        }
    }

    /// The arguments that were looked at, by the names there, with values.
    pub fn settings(&self) -> BTreeMap<String, String> {
        let seen = self.seen.borrow();
        let all = self.all.iter().filter(|(name, _)| seen.contains(*name));
        let is_said = |a: &&Argument| !self.has_defaults || !is_nothing(&a.values);
        all.map(|(_, a)| a)
            .filter(is_said)
            .map(|a| (a.spelled.clone(), shell::shown(&a.values.join(" "))))
            .collect()
    }

    /// Notes on all that was not looked at: `effects` are names (a star at the end for any ending)
    /// whose effect is not modelled, with what it is, and `neutral` names without any.
    pub fn rest(&self, not_modelled: &[(&str, &str)], neutral: &[&str]) -> Vec<Note> {
        let seen = self.seen.borrow();
        let mut notes = Vec::new();
        for gap in self.open.borrow().iter() {
            let why = match self.gaps.get(gap) {
                Some(Gap::Beyond(why)) => why.clone(),
                _ => "nothing sets it".to_string(),
            };
            notes.push(Note {
                kind: NoteKind::Unknown,
                name: format!("${{{gap}}}"),
                value: None,
                line: None,
                words: format!("arguments in it are not known: {why}; --set {gap}='..' gives them"),
            });
        }
        for (name, argument) in self.all.iter().filter(|(n, _)| !seen.contains(*n)) {
            let note = |kind, words: &str| Note {
                kind,
                name: argument.spelled.clone(),
                value: Some(shell::shown(&argument.values.join(" "))).filter(|v| !v.is_empty()),
                line: argument.line,
                words: words.into(),
            };
            let is = |pattern: &str| match pattern.strip_suffix('*') {
                Some(start) => name.starts_with(start),
                None => name == pattern,
            };
            // A log states what is off, too.
            let off = self.has_defaults && is_nothing(&argument.values);
            if let Some((_, words)) = not_modelled.iter().find(|(n, _)| is(n)) {
                if !off {
                    notes.push(note(NoteKind::NotModelled, words));
                }
            } else if neutral.iter().any(|n| is(n)) {
                if !off {
                    notes.push(note(
                        NoteKind::NoEffect,
                        "it changes neither time nor memory of a step",
                    ));
                }
            } else if !off {
                let asked = self.asked.borrow();
                let listed = not_modelled.iter().map(|(n, _)| *n);
                let listed = listed.chain(neutral.iter().copied());
                let known = asked.iter().map(String::as_str).chain(listed);
                let whole = known.filter(|n| !n.ends_with('*'));
                let meant = closest(name, whole).map(|n| like(n, &argument.spelled));
                notes.push(note(NoteKind::Unknown, &unknown(meant.as_deref())));
            }
        }
        notes
    }
}

/// Says that a name is not known, and which may have been meant.
pub(crate) fn unknown(meant: Option<&str>) -> String {
    match meant {
        None => UNKNOWN.to_string(),
        Some(meant) => format!("did you mean `{meant}`? {UNKNOWN}"),
    }
}

/// Said of names that are not known.
pub(crate) const UNKNOWN: &str = "it is not known here, and was not looked at";

/// A name in the spelling of another: with its dashes at the front, and its underscores if it has some.
fn like(name: &str, spelled: &str) -> String {
    let dashes = if spelled.starts_with("--") { "--" } else { "" };
    let name = match spelled.trim_start_matches('-').contains('_') || dashes.is_empty() {
        true => name.replace('-', "_"),
        false => name.to_string(),
    };
    format!("{dashes}{name}")
}

/// An error about a value that is not known.
pub(crate) fn gap_error(
    file: &str,
    line: Option<usize>,
    gap: &str,
    why: Option<&Gap>,
    what: &str,
) -> JobError {
    let problem = match why {
        Some(Gap::Beyond(why)) => format!("{what} needs `${{{gap}}}`: {why}"),
        _ => format!("{what} needs the variable `{gap}`, which nothing sets"),
    };
    let is_name = gap.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    let help = match is_name && !gap.starts_with(|c: char| c.is_ascii_digit()) {
        true => format!("give it as --set {gap}=VALUE"),
        false => "write the value in its place, in a copy of the file".to_string(),
    };
    error(file, line, problem, help)
}

fn is_off(values: &[String]) -> bool {
    is_nothing(values) || matches!(values, [v] if matches!(v.as_str(), "false" | "no"))
}

/// Whether a value says that something is not asked for.
fn is_nothing(values: &[String]) -> bool {
    match values {
        [] => false,
        [v] => matches!(v.as_str(), "False" | "None" | "0" | "0.0" | "[]" | ""),
        _ => false,
    }
}

/// A note on what was taken where nothing is said.
pub(crate) fn assumed(name: &str, value: impl ToString, words: &str) -> Note {
    Note {
        kind: NoteKind::Assumed,
        name: name.into(),
        value: Some(value.to_string()),
        line: None,
        words: words.into(),
    }
}
