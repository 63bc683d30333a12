//! A shell script as the commands that it holds, with variables put in. Nothing is executed.
//!
//! Understood are continued lines, quotes, comments, here-documents, assignments
//! (`A=1`, `A+=..`, `export`, `A=(..)`), `$A`, `${A}`, `${A:-..}`, `${A[@]}` and `$((..))`. What only a
//! shell could know (the output of a command, what is set under a condition) becomes a *gap* in the
//! words where it is used, with the reason; who needs the word says so, who does not need it goes on.
//! Words are split by the crate `shlex`.
//!
//! * `statements`: the text as statements; `expand`: variables put into their words.

mod expand;
mod statements;

use crate::Variables;
use expand::joined;
use statements::{Statement, sbatch, statements};
use std::collections::BTreeMap;

/// A command of a script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Command {
    /// Its first line, from 1.
    pub line: usize,
    /// Its words, which may have gaps.
    pub words: Vec<String>,
}

/// A script.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Script {
    /// Its commands but for assignments.
    pub commands: Vec<Command>,
    /// Options of `#SBATCH` lines: the line and the words behind it.
    pub sbatch: Vec<(usize, Vec<String>)>,
    /// Why gaps are there, by the name that they have.
    pub gaps: BTreeMap<String, Gap>,
}

/// Why the value of a variable is not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Gap {
    /// Nothing sets it.
    Unset,
    /// It is more than what is understood.
    Beyond(String),
}

/// A fault of a script, and its line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wrong {
    pub line: usize,
    pub problem: String,
}

/// A gap stands between these characters of a private area, with its name.
const OPEN: char = '\u{e0f0}';
const CLOSE: char = '\u{e0f1}';
/// Characters of a script that are not read: those of gaps and lists, and returns at ends of lines.
const LEFT_OUT: [char; 5] = [OPEN, CLOSE, '\u{e0f2}', WORDS, '\r'];
/// Stands before the words of a list.
const WORDS: char = '\u{e0f3}';

/// Commands of a script that end it, or are taken to succeed, so that what follows `&&` is done.
const SUCCEED: [&str; 8] = [
    "cd", "export", "source", ".", "mkdir", "module", "set", "echo",
];

/// The name of the first gap in a word.
pub(crate) fn gap(word: &str) -> Option<&str> {
    let start = word.find(OPEN)? + OPEN.len_utf8();
    let end = word[start..].find(CLOSE)?;
    Some(&word[start..start + end])
}

/// The name of the gap that a word is, where it is nothing else.
pub(crate) fn whole_gap(word: &str) -> Option<&str> {
    let name = gap(word)?;
    let both = OPEN.len_utf8() + CLOSE.len_utf8();
    (name.len() + both == word.len()).then_some(name)
}

/// A word as a reader sees it: gaps as variables.
pub(crate) fn shown(word: &str) -> String {
    word.replace(OPEN, "${").replace(CLOSE, "}")
}

/// Reads a script; `given` are variables that the user sets, which count before the script's own.
pub(crate) fn script(text: &str, given: &Variables) -> Result<Script, Wrong> {
    let clean: String = text.chars().filter(|c| !LEFT_OUT.contains(c)).collect();
    let mut state = State {
        given,
        variables: BTreeMap::new(),
        script: Script::default(),
        size: 0,
    };
    for line in sbatch(&clean) {
        let (at, words) = line?;
        state.slurm(&words);
        state.script.sbatch.push((at, words));
    }
    let mut depth = 0usize;
    // How many `case`s are open.
    let mut cases = 0usize;
    let mut tests = false;
    let mut ended: Option<usize> = None;
    for statement in statements(&clean)? {
        let Statement {
            line,
            text,
            after_or,
            after_and,
        } = statement;
        let mut text = text.trim();
        if !after_and && !after_or {
            tests = false;
        }
        let mut rest = true;
        while rest {
            rest = false;
            let first = text.split_whitespace().next().unwrap_or_default();
            match first {
                "if" | "while" | "until" | "for" | "case" | "select" => {
                    depth += 1;
                    cases += usize::from(first == "case");
                    // Its condition is no command of the job.
                    text = "";
                }
                "fi" | "done" | "esac" | "}" => {
                    depth = depth.saturating_sub(1);
                    cases = cases.saturating_sub(usize::from(first == "esac"));
                    text = "";
                }
                "elif" => text = "",
                "then" | "else" | "do" | "{" | "!" | "time" | "exec" | "eval" => {
                    if first == "{" {
                        depth += 1;
                    }
                    text = text[first.len()..].trim_start();
                    rest = true;
                }
                name if name == "function" || name.ends_with("()") && !name.contains('=') => {
                    if text.trim_end().ends_with('{') {
                        depth += 1;
                    }
                    text = "";
                }
                // The pattern of an arm; what stands behind it is done under a condition.
                _ if cases > 0 => {
                    if let Some((pattern, behind)) = text.split_once(')')
                        && !pattern.contains(['(', '=', '"', '$'])
                    {
                        text = behind.trim_start();
                        rest = true;
                    }
                }
                _ => {}
            }
        }
        if text.is_empty() {
            continue;
        }
        let conditional = depth > 0 || after_or || (after_and && tests);
        // What is done after `&&` is certain only behind what always succeeds.
        let first = text.split_whitespace().next().unwrap_or_default();
        tests |= assignment(text).is_none() && !SUCCEED.contains(&first);
        if state.statement(line, text, conditional)? {
            state.check_begin(ended)?;
            ended = Some(line);
        }
    }
    Ok(state.script)
}

/// The value of a variable: words put in one after the other, or why it is not known.
#[derive(Clone, Debug)]
enum Value {
    Text(String),
    /// An array, its words quoted.
    Words(String),
    Gap(Gap),
}

struct State<'a> {
    given: &'a Variables,
    variables: BTreeMap<String, Value>,
    script: Script,
    size: usize,
}

impl State<'_> {
    /// Sets the variables that Slurm sets from what was asked for.
    fn slurm(&mut self, words: &[String]) {
        let mut set = |name: &str, value: &str| {
            self.variables
                .insert(name.into(), Value::Text(value.trim().to_string()));
        };
        let option = |names: [&str; 2]| crate::arguments::option(words, &names);
        if let Some(n) = option(["--nodes", "-N"]) {
            set("SLURM_NNODES", &n);
            set("SLURM_JOB_NUM_NODES", &n);
        }
        if let Some(n) = option(["--ntasks", "-n"]) {
            set("SLURM_NTASKS", &n);
            set("SLURM_NPROCS", &n);
        }
        if let Some(n) = option(["--ntasks-per-node", ""]) {
            set("SLURM_NTASKS_PER_NODE", &n);
        }
        if let Some(n) = option(["--gpus-per-node", ""]).or(option(["--gres", ""])) {
            let n = crate::launch::gpus(&n);
            set("SLURM_GPUS_ON_NODE", &n);
            set("SLURM_GPUS_PER_NODE", &n);
        }
        if let Some(n) = option(["--cpus-per-task", "-c"]) {
            set("SLURM_CPUS_PER_TASK", &n);
        }
    }

    /// Refuses arguments that stand where a command begins, unless the script is nothing but arguments;
    /// `before` is the line of the command before.
    fn check_begin(&self, before: Option<usize>) -> Result<(), Wrong> {
        let is_list = |c: &Command| c.words.first().is_some_and(|w| w.starts_with("--"));
        let Some((last, others)) = self.script.commands.split_last() else {
            return Ok(());
        };
        if !is_list(last) || others.iter().all(is_list) {
            return Ok(());
        }
        let before = before.unwrap_or(last.line);
        Err(Wrong {
            line: last.line,
            problem: format!(
                "`{}` stands where a command begins: the command of line {before} ends before it, so the shell would not pass it on; is a backslash missing at the end of the line before?",
                last.words.first().map_or(String::new(), |w| shown(w))
            ),
        })
    }

    /// Takes up a statement; whether it is a command.
    fn statement(&mut self, line: usize, text: &str, conditional: bool) -> Result<bool, Wrong> {
        let mut text = text;
        let first = text.split_whitespace().next().unwrap_or_default();
        if ["export", "declare", "local", "readonly", "typeset"].contains(&first) {
            text = text[first.len()..].trim_start();
            while text.starts_with('-') {
                let end = text.find(char::is_whitespace).unwrap_or(text.len());
                text = text[end..].trim_start();
            }
            if assignment(text).is_none() {
                return Ok(false);
            }
        }
        if let Some((name, adds, value)) = assignment(text) {
            if let Some(inner) = value.strip_prefix('(') {
                let inner = inner.trim_end().strip_suffix(')').ok_or_else(|| Wrong {
                    line,
                    problem: format!("the list of `{name}` is not closed"),
                })?;
                let words = self.words(line, inner)?;
                let new = joined(&words);
                let old = match (adds, self.variables.get(name)) {
                    (true, Some(Value::Words(old) | Value::Text(old))) => old.clone() + " ",
                    // What is not known stays so, whatever is added.
                    (true, Some(Value::Gap(_))) => return Ok(false),
                    _ => String::new(),
                };
                self.set(line, name, Value::Words(old + &new), conditional);
                return Ok(false);
            }
            let words = self.words(line, text)?;
            let assigns = |w: &&String| assignment(w).is_some();
            let n = words.iter().take_while(assigns).count();
            // Assignments before a command are that command's environment.
            for word in &words[..n] {
                let Some((name, adds, value)) = assignment(word) else {
                    continue;
                };
                let old = match (adds, self.variables.get(name)) {
                    (true, Some(Value::Text(old))) => old.clone(),
                    (true, Some(Value::Gap(_))) => continue,
                    _ => String::new(),
                };
                self.set(line, name, Value::Text(old + value), conditional);
            }
            if n == words.len() {
                return Ok(false);
            }
        }
        let words = self.words(line, text)?;
        if words.is_empty() {
            return Ok(false);
        }
        self.script.commands.push(Command { line, words });
        Ok(true)
    }

    fn set(&mut self, line: usize, name: &str, value: Value, conditional: bool) {
        let value = match conditional {
            false => value,
            true => Value::Gap(Gap::Beyond(format!(
                "line {line} sets it under a condition, which only the shell can decide"
            ))),
        };
        self.variables.insert(name.to_string(), value);
    }
}

/// The name, whether it adds, and the value of an assignment.
fn assignment(text: &str) -> Option<(&str, bool, &str)> {
    let end = text.find('=')?;
    let (name, value) = (&text[..end], &text[end + 1..]);
    let (name, adds) = match name.strip_suffix('+') {
        Some(name) => (name, true),
        None => (name, false),
    };
    let mut chars = name.chars();
    let first = chars.next()?;
    let is_name = (first.is_ascii_alphabetic() || first == '_')
        && chars.all(|c| c.is_ascii_alphanumeric() || c == '_');
    is_name.then_some((name, adds, value))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test may stop at what it does not expect.

    use super::*;

    fn words(text: &str) -> Vec<Vec<String>> {
        let script = script(text, &Variables::default()).unwrap();
        script.commands.into_iter().map(|c| c.words).collect()
    }

    fn one(text: &str) -> String {
        words(text).pop().unwrap().join("|")
    }

    #[test]
    fn lines_quotes_and_comments_are_the_shells() {
        assert_eq!(one("run --a 1 \\\n  --b 'x y' # c\n"), "run|--a|1|--b|x y");
        assert_eq!(one("run \"a;b\" & \n"), "run|a;b");
        assert_eq!(words("a 1; b 2 && c 3 | d").len(), 4);
        assert_eq!(one("cat > f <<EOF\nrun --x\nEOF\nlast 1"), "last|1");
        assert_eq!(one("run a#b"), "run|a#b");
        assert_eq!(one("run --a \\\r\n  1\r\n"), "run|--a|1");
    }

    #[test]
    fn variables_are_put_in() {
        assert_eq!(one("A=3\nB=\"x y\"\nrun $A ${B} \"$B\""), "run|3|x|y|x y");
        assert_eq!(one("A=2\nN=$(($A * 4 + A))\nrun ${N}"), "run|10");
        assert_eq!(one("run ${A:-5} ${B:-\"q r\"} '$A'"), "run|5|q r|$A");
        assert_eq!(
            one("X=(--a 1\n --b 'c d' # no\n)\nX+=(--e)\nrun \"${X[@]}\" z"),
            "run|--a|1|--b|c d|--e|z"
        );
        assert_eq!(one("X=()\nrun \"${X[@]}\" \"$@\" z"), "run|z");
        assert_eq!(
            one("A=\"--x 1\"\nA+=\" --y 2\"\nexport A\nrun $A"),
            "run|--x|1|--y|2"
        );
        assert_eq!(one("A='1 2'\nB=$A\nrun \"$B\" --c=$A"), "run|1 2|--c=1|2");
    }

    #[test]
    fn what_only_a_shell_knows_is_a_gap_with_its_reason() {
        let text = "H=$(hostname -s)\nif [ $1 = a ]; then\n  T=4\nfi\n[ -n \"$Q\" ] && P=2\nrun $H --t $T --p $P --u $U\n";
        let script = script(text, &Variables::default()).unwrap();
        let words = &script.commands.last().unwrap().words;
        assert_eq!(gap(&words[1]), Some("$(hostname_-s)"));
        assert_eq!(script.gaps["U"], Gap::Unset);
        assert!(
            matches!(&script.gaps["T"], Gap::Beyond(w) if w.starts_with("line 3 sets it under"))
        );
        assert!(matches!(&script.gaps["P"], Gap::Beyond(_)));
        assert_eq!(shown(&words[3]), "${T}");
        let given = Variables::from_iter([("T".to_string(), "8".to_string())]);
        let script = super::script(text, &given).unwrap();
        assert_eq!(script.commands.last().unwrap().words[3], "8");
        let given = Variables::from_iter([("X".to_string(), "--a 1".to_string())]);
        let list = "X=()\nif true; then\nX+=(--b)\nfi\nrun \"${X[@]}\"\n";
        let script = super::script(list, &given).unwrap();
        assert_eq!(script.commands[0].words, ["run", "--a", "1"]);
    }

    #[test]
    fn slips_at_the_end_of_lines_are_found() {
        let wrong = |text: &str| script(text, &Variables::default()).unwrap_err();
        let blank = wrong("run --a 1 \\ \n  --b 2\n");
        assert_eq!(blank.line, 1);
        let missing = wrong("run --a 1 \\\n  --b 2\n  --c 3\n");
        assert_eq!(missing.line, 3);
        assert!(missing.problem.contains("is a backslash missing"));
        assert_eq!(wrong("a\nrun 'x\n").line, 2);
    }
}
