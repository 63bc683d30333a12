//! The documents and the shape of the repository.
//!
//! A link in a document leads somewhere; a command line in a document, or in a help text, is
//! one that the command accepts, and the files of the repository that it names are there; a
//! graph in a document is one, and a `software` section gives the steps that stand beside it;
//! crates depend on each other as `ARCHITECTURE.md` says; every crate and module says what it
//! is; nothing speaks of the machine that it was written on.

#[allow(dead_code)]
#[path = "../cli/src/args.rs"]
mod args;

use clap::{CommandFactory, Parser};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Which of our crates a crate may use: the table of the design.
const MAY_USE: [(&str, &[&str]); 16] = [
    ("emulator", &[]),
    ("ir", &[]),
    ("intra-op", &[]),
    ("import", &["ir"]),
    ("cost-model", &["ir"]),
    ("lowering", &["ir"]),
    ("checker", &["ir"]),
    ("runtime", &["ir"]),
    (
        "planner",
        &["ir", "cost-model", "intra-op", "lowering", "frameworks"],
    ),
    ("frameworks", &["ir", "cost-model"]),
    ("export", &["ir", "frameworks"]),
    ("jobs", &["ir", "frameworks"]),
    (
        "published",
        &[
            "ir",
            "import",
            "cost-model",
            "lowering",
            "planner",
            "frameworks",
        ],
    ),
    (
        "cli",
        &[
            "ir",
            "import",
            "cost-model",
            "intra-op",
            "lowering",
            "checker",
            "runtime",
            "planner",
            "published",
            "export",
            "jobs",
            "frameworks",
        ],
    ),
    (
        "tests",
        &[
            "ir",
            "import",
            "cost-model",
            "intra-op",
            "jobs",
            "lowering",
            "checker",
            "runtime",
            "emulator",
            "planner",
        ],
    ),
    (
        "benchmarks",
        &[
            "ir",
            "import",
            "cost-model",
            "intra-op",
            "lowering",
            "checker",
            "runtime",
            "planner",
            "frameworks",
            "published",
        ],
    ),
];

/// Folders that building and running make, which are not of the repository.
const NOT_OURS: [&str; 6] = [
    "target",
    ".git",
    ".venv",
    "quickstart-out",
    "node_modules",
    "__pycache__",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the package lies in the repository")
        .to_path_buf()
}

/// All files below `dir` whose name ends in one of `endings`, in order.
fn files(dir: &Path, endings: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display())) {
        let entry = entry.expect("an entry of a folder");
        let (path, name) = (
            entry.path(),
            entry.file_name().to_string_lossy().into_owned(),
        );
        let kind = entry.file_type().expect("a file has a type");
        if kind.is_dir() && !NOT_OURS.contains(&name.as_str()) {
            found.extend(files(&path, endings));
        } else if kind.is_file() && endings.iter().any(|e| name.ends_with(e)) {
            found.push(path);
        }
    }
    found.sort();
    found
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn shown(path: &Path) -> String {
    path.strip_prefix(root())
        .unwrap_or(path)
        .display()
        .to_string()
}

fn nothing_wrong(problems: &[String]) {
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
}

/// Lines of a document outside and inside of fenced blocks: (line number, line, fenced).
fn lines(text: &str) -> impl Iterator<Item = (usize, &str, bool)> {
    let mut fenced = false;
    text.lines().enumerate().filter_map(move |(i, line)| {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            return None;
        }
        Some((i + 1, line, fenced))
    })
}

/// A heading's anchor, as GitHub makes it.
fn anchor(heading: &str) -> String {
    let kept = heading
        .trim()
        .chars()
        .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| {
        if c == ' ' {
            '-'
        } else {
            c.to_ascii_lowercase()
        }
    })
    .collect()
}

fn anchors(document: &Path) -> BTreeSet<String> {
    let text = read(document);
    let headings = lines(&text).filter(|(_, line, fenced)| !fenced && line.starts_with('#'));
    headings
        .map(|(_, line, _)| anchor(line.trim_start_matches('#')))
        .collect()
}

/// Targets of `[text](target)` in a line.
fn links(line: &str) -> Vec<&str> {
    line.split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')').map(|(target, _)| target))
        .collect()
}

#[test]
fn every_link_between_documents_leads_somewhere() {
    let mut problems = Vec::new();
    let mut n_links = 0;
    for document in files(&root(), &[".md"]) {
        let text = read(&document);
        for (number, line, fenced) in lines(&text) {
            let ours = links(line)
                .into_iter()
                .filter(|t| !fenced && !t.starts_with("http"));
            for target in ours {
                n_links += 1;
                let (file, heading) = target
                    .split_once('#')
                    .map_or((target, None), |(f, h)| (f, Some(h)));
                let to = match file {
                    "" => document.clone(),
                    _ => document
                        .parent()
                        .expect("a file lies in a folder")
                        .join(file),
                };
                let there = to.exists() && heading.is_none_or(|h| anchors(&to).contains(h));
                if !there {
                    problems.push(format!(
                        "{}:{number}: `{target}` leads nowhere",
                        shown(&document)
                    ));
                }
            }
        }
    }
    nothing_wrong(&problems);
    assert!(
        n_links >= 20,
        "only {n_links} links were found: the documents or this test are broken"
    );
}

/// The command lines of a text: lines that begin with `meshwright` or `$ meshwright`, and code
/// in backticks that begins so and has more than a verb.
fn command_lines(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line, fenced) in lines(text) {
        if fenced {
            let line = line.trim().trim_start_matches("$ ");
            if line.starts_with("meshwright ") {
                found.push((number, line.to_string()));
            }
            continue;
        }
        let code = line.split('`').skip(1).step_by(2);
        found.extend(
            code.filter(|c| c.starts_with("meshwright "))
                .map(|c| (number, c.to_string())),
        );
    }
    found
}

/// A command line as words: quotes are removed, what follows `#` or a wide gap is a remark,
/// what follows `>` is the shell's.
fn words(line: &str) -> Vec<String> {
    let line = line.split(" #").next().unwrap_or(line);
    let line = line.split("    ").next().unwrap_or(line);
    let line = line.split(" > ").next().unwrap_or(line);
    let (mut words, mut word, mut quoted, mut any) = (Vec::new(), String::new(), false, false);
    for c in line.chars() {
        match c {
            '\'' => (quoted, any) = (!quoted, true),
            c if c.is_whitespace() && !quoted => {
                if any {
                    words.push(std::mem::take(&mut word));
                }
                any = false;
            }
            c => {
                word.push(c);
                any = true;
            }
        }
    }
    if any {
        words.push(word);
    }
    words
}

/// The problem of a command line that a reader may type.
fn problem(line: &str) -> Option<String> {
    let words = words(line);
    // `meshwright compile` alone is the name of a verb, and VERB in capitals a placeholder.
    let placeholder = words.iter().any(|w| w == "VERB" || w == "...");
    let verb_alone = words.len() == 2 && args::Cli::command().find_subcommand(&words[1]).is_some();
    if placeholder || verb_alone {
        return None;
    }
    let help = words.iter().any(|w| w == "--help" || w == "--version");
    match args::Cli::try_parse_from(&words) {
        Err(e) if !help => {
            return Some(e.to_string().lines().next().unwrap_or_default().to_string());
        }
        _ => {}
    }
    let pins: Vec<&String> = words
        .windows(2)
        .filter(|w| w[0] == "--pin")
        .map(|w| &w[1])
        .collect();
    if let Err(e) = planner::Pins::parse(&pins) {
        return Some(e.to_string());
    }
    let ours = |w: &&String| {
        ["models/", "examples/", "clusters/"]
            .iter()
            .any(|d| w.starts_with(d))
    };
    let missing = words.iter().filter(ours).find(|w| !root().join(w).exists());
    let cluster = words
        .windows(2)
        .find(|w| w[0] == "--cluster")
        .map(|w| w[1].as_str());
    let known = |c: &str| {
        c == "cpu"
            || c.contains('.')
            || c == c.to_uppercase()
            || cost_model::presets::find(c).is_ok_and(|found| found.is_some())
    };
    missing.map(|m| format!("`{m}` is not there")).or_else(|| {
        cluster
            .filter(|c| !known(c))
            .map(|c| format!("no cluster `{c}`"))
    })
}

#[test]
fn every_command_in_the_documents_is_accepted() {
    let mut problems = Vec::new();
    let mut n_commands = 0;
    for document in files(&root(), &[".md"]) {
        for (number, line) in command_lines(&read(&document)) {
            n_commands += 1;
            problems.extend(
                problem(&line).map(|p| format!("{}:{number}: `{line}`: {p}", shown(&document))),
            );
        }
    }
    nothing_wrong(&problems);
    assert!(
        n_commands >= 10,
        "only {n_commands} command lines were found: the documents or this test are broken"
    );
}

#[test]
fn every_example_in_a_help_text_is_accepted() {
    let command = args::Cli::command();
    let mut problems = Vec::new();
    for verb in std::iter::once(&command).chain(command.get_subcommands()) {
        let help = verb
            .get_after_help()
            .map(ToString::to_string)
            .unwrap_or_default();
        let examples: Vec<&str> = help
            .lines()
            .map(str::trim)
            .filter(|l| l.starts_with("meshwright "))
            .collect();
        if examples.is_empty() {
            problems.push(format!("`{}` has no example in its help", verb.get_name()));
        }
        problems.extend(examples.iter().filter_map(|e| {
            problem(e).map(|p| format!("help of {}: `{e}`: {p}", verb.get_name()))
        }));
    }
    nothing_wrong(&problems);
}

#[test]
fn a_wrong_command_would_be_found() {
    for wrong in [
        "meshwright compile models/gpt2",
        "meshwright compile models/no-such-model --cluster cpu",
        "meshwright compile models/gpt2 --cluster dgx-z9",
        "meshwright compile models/gpt2 --cluster cpu --pin speed=9",
        "meshwright frobnicate plan.json",
        "meshwright run plan.json --data text.txt --no-such-flag",
    ] {
        assert!(problem(wrong).is_some(), "{wrong}");
    }
    assert_eq!(
        words("meshwright x 'spec:a b=[_,y]' # remark"),
        ["meshwright", "x", "spec:a b=[_,y]"]
    );
    assert_eq!(anchor(" What is not there yet"), "what-is-not-there-yet");
}

#[test]
fn the_readme_names_every_verb_and_the_cli_page_every_exit_code() {
    let readme = read(&root().join("README.md"));
    let command = args::Cli::command();
    let verbs: Vec<&str> = command.get_subcommands().map(|c| c.get_name()).collect();
    let missing = |verb: &&&str| {
        !readme.contains(&format!("`{verb}")) && !readme.contains(&format!("meshwright {verb}"))
    };
    assert_eq!(
        verbs.iter().filter(missing).collect::<Vec<_>>(),
        Vec::<&&str>::new(),
        "verbs that the README does not name"
    );
    let page = read(&root().join("docs/cli.md"));
    let help = command
        .get_after_help()
        .map(ToString::to_string)
        .unwrap_or_default();
    let (_, codes) = help
        .rsplit_once("Exit codes: ")
        .expect("the help lists the exit codes");
    for code in codes.split(';').filter_map(|c| c.split_whitespace().next()) {
        assert!(
            page.contains(&format!("| {code} |")),
            "docs/cli.md does not explain exit code {code}"
        );
    }
}

#[test]
fn graphs_in_the_documents_are_graphs() {
    let mut n_graphs = 0;
    for document in files(&root().join("docs"), &[".md"]) {
        let text = read(&document);
        for block in text
            .split("```text\n")
            .skip(1)
            .filter_map(|b| b.split("```").next())
            .filter(|b| b.starts_with("graph "))
        {
            n_graphs += 1;
            let graph =
                ir::text::parse(block).unwrap_or_else(|e| panic!("{}: {e}", shown(&document)));
            assert_eq!(ir::verify::verify(&graph), vec![], "{}", shown(&document));
            let train = ir::TrainSpec {
                sequence: 8,
                ..ir::TrainSpec::default()
            };
            ir::training::training_graph(&graph, &train)
                .unwrap_or_else(|e| panic!("{}: {e}", shown(&document)));
        }
    }
    assert!(n_graphs >= 1, "docs/ir.md shows a graph");
}

#[test]
fn crates_depend_on_each_other_as_designed() {
    let manifest = |dir: &str| {
        read(&root().join(dir).join("Cargo.toml"))
            .parse::<toml::Table>()
            .expect("a manifest is TOML")
    };
    let workspace: toml::Table = read(&root().join("Cargo.toml"))
        .parse()
        .expect("a manifest is TOML");
    let members = workspace["workspace"]["members"]
        .as_array()
        .expect("the workspace has members");
    let members: BTreeSet<&str> = members.iter().filter_map(|m| m.as_str()).collect();
    assert_eq!(
        members,
        MAY_USE.iter().map(|m| m.0).collect(),
        "a new crate needs a line in MAY_USE and in ARCHITECTURE.md"
    );
    let mut problems = Vec::new();
    for (name, allowed) in MAY_USE {
        let manifest = manifest(name);
        // Tests of a crate may use more; those of the referee may not, so that it stays apart.
        let tables: &[&str] = if name == "checker" {
            &["dependencies", "build-dependencies", "dev-dependencies"]
        } else {
            &["dependencies", "build-dependencies"]
        };
        for table in tables {
            let uses = manifest
                .get(*table)
                .and_then(|t| t.as_table())
                .into_iter()
                .flat_map(|t| t.keys());
            let wrong =
                uses.filter(|u| members.contains(u.as_str()) && !allowed.contains(&u.as_str()));
            problems.extend(
                wrong.map(|u| {
                    format!("{name}: [{table}] has `{u}`, which the design does not allow")
                }),
            );
        }
    }
    nothing_wrong(&problems);
}

#[test]
fn every_module_says_what_it_is() {
    let mut problems = Vec::new();
    for (name, _) in MAY_USE {
        for file in files(&root().join(name), &[".rs"]) {
            let of_tests = file
                .file_name()
                .is_some_and(|n| n.to_string_lossy().ends_with("tests.rs"));
            if !of_tests && !read(&file).starts_with("//!") {
                problems.push(format!("{} has no header", shown(&file)));
            }
        }
    }
    nothing_wrong(&problems);
}

/// A comment of an item begins with a noun or a verb, not with a question that the rest answers.
#[test]
fn comments_of_items_say_what_they_are() {
    let is_doc = |line: &str| {
        ["///", "//!"]
            .iter()
            .any(|m| line.trim_start().starts_with(m))
    };
    let mut problems = Vec::new();
    for file in files(&root(), &[".rs"]) {
        let text = read(&file);
        let lines: Vec<&str> = text.lines().collect();
        for (i, line) in lines.iter().enumerate() {
            let begins = is_doc(line) && !i.checked_sub(1).is_some_and(|i| is_doc(lines[i]));
            let words = line.trim_start().get(3..).unwrap_or("").trim_start();
            let asks = ["What ", "Of ", "Whether what "];
            if begins && asks.iter().any(|asks| words.starts_with(asks)) {
                problems.push(format!("{}:{}: {words}", shown(&file), i + 1));
            }
        }
    }
    nothing_wrong(&problems);
}

#[test]
fn nothing_speaks_of_the_machine_it_was_written_on() {
    // Put together here, so that this file does not contain them.
    let forbidden = [
        ["/ro", "ot/"].concat(),
        ["/wo", "rk/"].concat(),
        ["/ho", "me/"].concat(),
    ];
    let hosts = [
        "github.com",
        "www.w3.org",
        "ui.perfetto.dev",
        "json-schema.org",
        "rustup.rs",
        "www.apache.org",
        "www.w3.org",
        "arxiv.org",
        "nexte.st",
    ];
    let mut problems = Vec::new();
    for file in files(
        &root(),
        &[
            ".rs",
            ".md",
            ".toml",
            ".sh",
            ".py",
            "run",
            "LICENSE",
            "Cargo.lock",
        ],
    ) {
        for (i, line) in read(&file).lines().enumerate() {
            let place = || format!("{}:{}", shown(&file), i + 1);
            problems.extend(
                forbidden
                    .iter()
                    .filter(|f| line.contains(f.as_str()))
                    .map(|f| format!("{}: `{f}`", place())),
            );
            for url in line.split("://").skip(1) {
                let host: String = url
                    .chars()
                    .take_while(|c| c.is_alphanumeric() || matches!(c, '.' | '-'))
                    .collect();
                if !host.is_empty() && !hosts.contains(&host.trim_end_matches('.')) {
                    problems.push(format!(
                        "{}: host `{host}` is not on the list of this test",
                        place()
                    ));
                }
            }
        }
    }
    nothing_wrong(&problems);
}
