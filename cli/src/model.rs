//! The MODEL argument: the name of a model that is built in, a Hugging Face `config.json` or its
//! folder, or a graph in text form.

use crate::document::{capitalised, line_column};
use crate::failure::{Exit, Failure};
use crate::files;
use import::{BuildOptions, ImportError, MODEL_TYPES, ModelConfig, builtin, model_graph};
use ir::op::{InputKind, OpKind};
use ir::{Dim, Graph, Task, counted};
use std::path::{Path, PathBuf};

/// A model whose sequence and dropout are not known yet.
pub enum Model {
    /// A published architecture.
    Config(Box<ModelConfig>),
    /// A graph that says everything itself.
    Graph(Box<Graph>),
}

/// The model types of configurations but for `without`, as a list in a sentence.
fn model_types(without: &[&str]) -> String {
    let types = MODEL_TYPES.iter().filter(|t| !without.contains(t));
    let types: Vec<&str> = types.copied().collect();
    match types.split_last() {
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
        None => String::new(),
    }
}

/// The accepted values of MODEL.
pub fn models_are() -> String {
    format!(
        "a model is one that is built in (`meshwright models` lists them), a Hugging Face config.json ({}), one of a wide_resnet, or its folder, or a graph in Meshwright's text form (docs/ir.md)",
        model_types(&["wide_resnet"])
    )
}

/// Where a model is.
enum Source {
    /// In a file.
    File(PathBuf),
    /// In this binary: the name, and the text of its `config.json`.
    BuiltIn(&'static str, &'static str),
}

/// Finds the model that `path` means: what is there, or else what is built in under that name.
fn source(path: &Path) -> Result<Source, Failure> {
    if path.exists() {
        return config_path(path).map(Source::File);
    }
    if let Some((name, text)) = builtin::find(&path.to_string_lossy()) {
        return Ok(Source::BuiltIn(name, text));
    }
    let last = path.file_name().map(|n| n.to_string_lossy().into_owned());
    let near = last.and_then(|last| files::closest(&last, builtin::names()));
    let Some(near) = near else {
        // Who reads it says that it is not there, and which file might have been meant.
        return Ok(Source::File(path.to_path_buf()));
    };
    let what = format!("there is no model {}", path.display());
    Err(Failure::new(Exit::BadInput, what).help(format!(
        "did you mean `{near}`, which is built in? {}",
        capitalised(&models_are())
    )))
}

/// The file that a model is read from; none where it is built in.
pub fn file(path: &Path) -> Result<Option<PathBuf>, Failure> {
    Ok(match source(path)? {
        Source::File(file) => Some(file),
        Source::BuiltIn(..) => None,
    })
}

/// The name of a model that is built in, as users know it; none of one that is read from a file.
pub fn built_in(path: &Path) -> Result<Option<String>, Failure> {
    Ok(match source(path)? {
        Source::File(_) => None,
        Source::BuiltIn(name, _) => Some(name.to_string()),
    })
}

/// Reads a model that is built in, a folder with a `config.json`, such a file, or a graph text.
pub fn load(path: &Path) -> Result<Model, Failure> {
    let file = match source(path)? {
        Source::File(file) => file,
        Source::BuiltIn(name, text) => {
            return Ok(Model::Config(Box::new(parse_config(name, text)?)));
        }
    };
    let text = files::read_text(&file, "model", files::LARGE)?;
    let name = file.display().to_string();
    if text.trim_start().starts_with(['{', '[', '"'])
        || file.extension().is_some_and(|e| e == "json")
    {
        return Ok(Model::Config(Box::new(parse_config(&name, &text)?)));
    }
    let graph = ir::text::parse(&text).map_err(|e| {
        let failure = Failure::new(
            Exit::BadInput,
            format!("{name}:{}:{}: {}", e.line, e.column, e.message),
        )
        .place(&name, &text, e.start, e.len, "here");
        failure.help(e.help.unwrap_or_else(models_are))
    })?;
    let broken = ir::verify::verify(&graph);
    if broken.is_empty() {
        return Ok(Model::Graph(Box::new(graph)));
    }
    let list: Vec<String> = broken
        .iter()
        .take(20)
        .map(|v| {
            format!(
                "  {}: {}: expected {}, found {}",
                v.path,
                v.rule.name(),
                v.expected,
                v.actual
            )
        })
        .collect();
    Err(Failure::new(
        Exit::BadInput,
        format!(
            "{name}: the graph breaks {}:\n{}",
            counted(broken.len() as u64, "rule"),
            list.join("\n")
        ),
    )
    .help("each line names the op or value; docs/ir.md has the rules of graphs"))
}

/// Reads the configuration of a model that is built in, or that at `path`, a file or its folder.
pub fn load_config(path: &Path) -> Result<ModelConfig, Failure> {
    let (name, text) = config_text(path)?;
    parse_config(&name, &text)
}

/// The name and the text of that configuration.
pub fn config_text(path: &Path) -> Result<(String, String), Failure> {
    match source(path)? {
        Source::File(file) => {
            let text = files::read_text(&file, "model configuration", files::SMALL)?;
            Ok((file.display().to_string(), text))
        }
        Source::BuiltIn(name, text) => Ok((name.to_string(), text.to_string())),
    }
}

/// The most models that are named where a folder has none itself.
const MODELS_NAMED: usize = 8;

/// Returns the file that `path` means: itself, or the `config.json` of a folder. A folder without
/// one is refused, with the names of models in it if there are any.
fn config_path(path: &Path) -> Result<PathBuf, Failure> {
    if !path.is_dir() {
        return Ok(path.to_path_buf());
    }
    let config = path.join("config.json");
    if config.exists() {
        return Ok(config);
    }
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    let models = entries
        .map(|e| e.path())
        .filter(|p| p.join("config.json").is_file());
    let mut models: Vec<String> = models.map(|p| p.display().to_string()).collect();
    models.sort();
    models.truncate(MODELS_NAMED);
    let what = format!("{}: the folder has no config.json", path.display());
    Err(
        Failure::new(Exit::BadInput, what).help(match models.is_empty() {
            true => models_are(),
            false => format!("it has folders of models: {}", models.join(", ")),
        }),
    )
}

/// Reads the text of a `config.json`; `name` is what errors call it.
pub fn parse_config(name: &str, text: &str) -> Result<ModelConfig, Failure> {
    ModelConfig::parse(name, text.as_bytes()).map_err(|e| {
        let at = match &e {
            ImportError::Json { line, column, .. }
            | ImportError::Field { line, column, .. }
            | ImportError::UnknownField { line, column, .. } => Some((*line, *column)),
            _ => None,
        };
        let help = match &e {
            ImportError::Json { .. } => format!(
                "a model is a Hugging Face config.json of model_type {}; examples are in models/",
                model_types(&[])
            ),
            ImportError::UnknownField { .. } => {
                "remove the field if it does not change the mathematics of training".into()
            }
            _ => "examples are in models/".into(),
        };
        let failure = Failure::from(e).help(help);
        match at {
            Some((line, column)) => {
                failure.place(name, text, byte_of(text, line, column), 1, "here")
            }
            None => failure,
        }
    })
}

/// Returns the byte at a line and column, both from 1.
fn byte_of(text: &str, line: usize, column: usize) -> usize {
    let start: usize = text
        .split_inclusive('\n')
        .take(line.saturating_sub(1))
        .map(str::len)
        .sum();
    debug_assert!(line_column(text, start).0 <= line.max(1));
    start + column.saturating_sub(1)
}

impl Model {
    /// Returns the longest sequence that makes sense, in tokens.
    pub fn max_sequence(&self) -> Option<u64> {
        match self {
            Model::Config(c) => Some(c.max_sequence()),
            Model::Graph(g) => sequence_of(g),
        }
    }

    /// Sets another capacity factor of the experts, where one is asked for.
    pub fn with_expert_capacity(self, factor: Option<f64>) -> Result<Self, Failure> {
        let Some(factor) = factor else {
            return Ok(self);
        };
        match self {
            Model::Config(c) => {
                let made = c.with_expert_capacity(factor);
                // The flag is at fault, not the model's file.
                made.map(|c| Model::Config(Box::new(c))).map_err(|e| {
                    Failure::new(Exit::Usage, format!("--{e}"))
                        .help("leave --expert-capacity out, or give experts 1 or a little more")
                })
            }
            Model::Graph(_) => Err(Failure::new(
                Exit::Usage,
                "--expert-capacity is for models of a configuration; a graph's slots are in its ops",
            )
            .help("leave --expert-capacity out")),
        }
    }

    /// Builds the forward graph of samples of so many tokens, in which `task` needs no part of the
    /// model that only training has.
    pub fn graph(self, sequence: u64, dropout: f64, task: Task) -> Result<Graph, Failure> {
        match self {
            Model::Config(c) => {
                let c = match task {
                    Task::Training => *c,
                    Task::Inference => c.without_further_tokens(),
                };
                model_graph(&c, &BuildOptions { sequence, dropout }).map_err(option_failure)
            }
            Model::Graph(g) => match sequence_of(&g) {
                Some(n) if n != sequence => Err(Failure::new(
                    Exit::Usage,
                    format!("--sequence is {sequence}, but the graph's tokens are [B,{n}]"),
                )
                .help(format!("leave --sequence out or set it to {n}"))),
                _ => Ok(*g),
            },
        }
    }
}

/// The dropout probability of a graph, the largest where its ops have several; 0 where none has
/// one.
pub fn dropout(graph: &Graph) -> f64 {
    let of_op = |kind: &OpKind| match kind {
        OpKind::Dropout { p, .. } => Some(*p),
        OpKind::Attention { dropout, .. } => Some(*dropout),
        _ => None,
    };
    let all = graph.ops().iter().filter_map(|op| of_op(&op.kind));
    all.fold(0.0, f64::max)
}

/// Makes a failure that names the flag which sets the option.
fn option_failure(e: ImportError) -> Failure {
    match &e {
        ImportError::Option { option, .. } => {
            let help = format!("set --{option} to another value, or leave it out");
            Failure::from(e).help(help)
        }
        _ => e.into(),
    }
}

/// Returns the second dim of the tokens input, or of the labels where a model has no tokens.
fn sequence_of(graph: &Graph) -> Option<u64> {
    let input = |wanted| {
        let is = move |op: &&ir::Op| op.kind == OpKind::Input { kind: wanted };
        graph.ops().iter().find(is)
    };
    let tokens = input(InputKind::Tokens).or_else(|| input(InputKind::Labels))?;
    match graph.ty(*tokens.outputs.first()?).shape.0.get(1)? {
        Dim::Fixed(n) => Some(*n),
        Dim::Batch => None,
    }
}
