//! Jobs of other software, as their users have them: a launch script or command line of Megatron-LM,
//! one of its logs, a DeepSpeed JSON, a torchtitan TOML, a Slurm script with one of these in it.
//!
//! [`read`] says what such a file asks for ([`Job`]), in common terms and in the file's own words, and
//! what it made of everything else in the file ([`Note`]): what was assumed, what changes time or
//! memory and is not modelled, what does neither, and what is not known. Nothing is dropped without a
//! word. Nothing is executed: of a shell script the words are understood, not the commands.
//!
//! This crate plans and prices nothing.
//!
//! * `shell`: a script as commands with their variables; `arithmetic`: what `$((..))` is.
//! * `launch`: which command starts the training, and on how many devices.
//! * `arguments`: names with values, whatever file they are from.
//! * `megatron`, `deepspeed`, `torchtitan`: what those mean to the software.
//! * `variables`: what a user sets beside the file; `likeness`: names that may have been meant.
//! * `measured`: step times and memory of logs and profiler traces.

mod arguments;
mod arithmetic;
mod deepspeed;
mod launch;
mod likeness;
pub mod measured;
mod megatron;
mod shell;
mod torchtitan;
mod variables;

pub use launch::World;
pub use likeness::closest;
pub use measured::Measured;
pub use variables::Variables;

use frameworks::{Framework, Recomputation};
use ir::plan::ScheduleKind;
use ir::program::Space;
use ir::{Optimizer, Precision};
use serde::Serialize;
use std::collections::BTreeMap;

/// A training job: its model, degrees and settings.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Job {
    /// The software, by its name.
    #[serde(serialize_with = "framework_name")]
    pub framework: Framework,
    /// Its version, where the job says that it is not the usual one.
    pub version: Option<String>,
    /// Options that the job switches on there, as `compile --for` has it behind a plus sign.
    pub options: Vec<String>,
    /// Options that are usual beside them today, and assumed: those that the version's own runs had
    /// not yet.
    pub usual: Vec<String>,
    /// The model.
    pub model: Model,
    /// A number of which the rows of the table of tokens are padded to a multiple.
    pub vocab_multiple: u64,
    /// Hosts and devices that the file states.
    pub world: World,
    /// Tokens of a sample; none where the file does not say.
    pub sequence: Option<u64>,
    /// Samples of a step; none where it is one microbatch of every data rank.
    pub global_batch: Option<u64>,
    /// Microbatches of a step, where they are stated in place of the samples.
    pub accumulation: Option<u64>,
    /// Samples that a data rank works on at a time.
    pub micro_batch: u64,
    /// Ranks that split features.
    pub tensor: u32,
    /// Ranks that split sequences.
    pub context: u32,
    /// Ranks that split experts.
    pub expert: u32,
    /// Slots of an expert over the tokens that it gets on average, where the job gives experts so many;
    /// none where no token is dropped.
    pub capacity: Option<Capacity>,
    /// Meshes in a row.
    pub pipeline: u32,
    /// Stages on each mesh.
    pub virtual_stages: u32,
    /// Order of passes.
    #[serde(serialize_with = "schedule_name")]
    pub schedule: ScheduleKind,
    /// Layers of the stages, embedding and head among them; the software's own division where there
    /// are none.
    pub split: Split,
    /// Ranks that split samples, where the file states them.
    pub data: Option<u32>,
    /// The ZeRO level.
    pub zero: u8,
    /// Copies of what that level splits, over as many parts of the data ranks.
    pub copies: u32,
    /// Whether norms and residuals are split along the sequence over tensor ranks.
    pub sequence_parallel: bool,
    /// The recomputation of blocks.
    pub recompute: Recompute,
    /// Tensors that rest in other memories than the device's.
    pub offload: Offload,
    /// Precision of compute.
    pub precision: Precision,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// Largest norm of the gradients.
    pub clip_norm: Option<f64>,
    /// Dropout probability.
    pub dropout: f64,
}

fn framework_name<S: serde::Serializer>(f: &Framework, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(f.name())
}

fn schedule_name<S: serde::Serializer>(kind: &ScheduleKind, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(kind.name())
}

/// The model of a job.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Model {
    /// Its sizes, as a Hugging Face `config.json`.
    Config(serde_json::Value),
    /// One that is built in, by its name.
    BuiltIn(String),
    /// One of the Hugging Face hub or a folder, and the argument that names it.
    Named {
        /// Its name: `meta-llama/Llama-3.1-8B`.
        name: String,
        /// The argument.
        argument: String,
    },
    /// The file does not say, for this reason.
    NotStated(String),
}

/// The memories of what rests elsewhere than on the device; none of what does not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Offload {
    /// Optimizer states, with the parameters that they update.
    pub optimizer: Option<Space>,
    /// Gradients, summed over microbatches.
    pub gradients: Option<Space>,
    /// Parameters as kernels read them, between their uses.
    pub parameters: Option<Space>,
}

/// The slots of experts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Capacity {
    /// Slots of an expert over the tokens that it gets on average: above 0, at most
    /// [`MOST_CAPACITY`].
    pub factor: f64,
    /// Whether slots without a token are computed, too.
    pub padded: bool,
}

/// The largest factor of a capacity.
pub const MOST_CAPACITY: f64 = 4096.0;

impl Capacity {
    /// The factor of the slots that are computed where tokens spread evenly over the experts: without
    /// padding, no more than there are tokens.
    pub fn computed(&self) -> f64 {
        match self.padded {
            true => self.factor,
            false => self.factor.min(1.0),
        }
    }
}

/// How stages divide the layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// As the software does by itself.
    Own,
    /// Transformer layers in equal parts.
    Layers,
    /// Embedding and head count as a layer each.
    Balanced,
    /// Layers of each stage, embedding and head included.
    Counts(Vec<u64>),
}

/// The recomputation of blocks.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// All blocks the same, which has a name.
    #[serde(serialize_with = "recomputation_name")]
    All(Recomputation),
    /// Ops of every block, by their names there.
    Ops(Vec<String>),
    /// Norms, activation functions and other cheap ops, and these ops of every block.
    CheapAnd(Vec<String>),
    /// So many blocks of each stage in full, the first ones; the others nothing.
    First(u64),
    /// All of every n-th block.
    Every(u64),
}

fn recomputation_name<S: serde::Serializer>(r: &Recomputation, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(match r {
        Recomputation::None => "none",
        Recomputation::Norms => "norms",
        Recomputation::Attention => "attention",
        Recomputation::Cheap => "cheap",
        Recomputation::EverySecond => "every_second",
        Recomputation::Full => "full",
    })
}

/// A remark on something in a file, beside what the job says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Note {
    /// The kind.
    pub kind: NoteKind,
    /// Its name there.
    pub name: String,
    /// Its value there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// The line, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<usize>,
    /// The consequence.
    pub words: String,
}

impl Note {
    /// The name, in backquotes, that may have been meant by one that is not known.
    pub fn meant(&self) -> Option<&str> {
        let (_, behind) = self.words.split_once("did you mean ")?;
        behind.split('?').next()
    }
}

/// Kinds of notes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NoteKind {
    /// The file does not say, and this was taken.
    Assumed,
    /// It changes time or memory, and no figure counts it.
    NotModelled,
    /// It is not known, so nothing is known of its effect.
    Unknown,
    /// It is known to change neither time nor memory of a step.
    NoEffect,
}

/// The contents of a file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Reading {
    /// The kind of file, in words.
    pub form: String,
    /// Files that were read, the first of them that which was named.
    pub files: Vec<String>,
    /// The job.
    pub job: Job,
    /// The job in the software's own words: names with values.
    pub settings: BTreeMap<String, String>,
    /// Notes on the rest.
    pub notes: Vec<Note>,
    /// Measurements that stand in the file itself.
    pub measured: Option<Measured>,
}

/// Why a job cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}{}: {problem}", .line.map(|l| format!(":{l}")).unwrap_or_default())]
pub struct JobError {
    /// The file.
    pub file: String,
    /// The line, from 1.
    pub line: Option<usize>,
    /// The problem.
    pub problem: String,
    /// The way out.
    pub help: String,
}

/// Settings that a user gives beside the file.
#[derive(Clone, Debug, Default)]
pub struct Given {
    /// Values of variables, and of what a file leaves open.
    pub variables: Variables,
    /// Tokens of a sample.
    pub sequence: Option<u64>,
    /// Whether the model is given.
    pub has_model: bool,
    /// Whether the software is known to be older than Megatron-Core 0.18, whose NullTokenizer counts
    /// one token more than it is told.
    pub is_older: bool,
}

/// Opens another file that a job names: its text, or why it cannot be read.
pub type Open<'a> = &'a dyn Fn(&str) -> Result<String, String>;

/// Reads a job from the text of the file called `file`.
///
/// # Errors
/// Where the file is none of the known forms, or says something that cannot be read or does not go
/// together: with the line and the way out.
pub fn read(file: &str, text: &str, given: &Given, open: Open<'_>) -> Result<Reading, JobError> {
    if text.trim().is_empty() {
        return Err(error(
            file,
            None,
            "the file is empty, so there is no job in it",
            JOBS_ARE,
        ));
    }
    if is_document(file) {
        let what = "it is a document, and no job";
        return Err(error(file, None, what, JOBS_ARE));
    }
    let mut reading = match form(file, text) {
        Form::DeepSpeed => deepspeed::read(file, text, given, &deepspeed::Beside::default()),
        Form::TorchTitan => torchtitan::read(file, text, given, &torchtitan::Beside::default()),
        Form::MegatronLog => megatron::log(file, text, given),
        Form::Script => launch::read(file, text, given, open),
    }?;
    reading.files.insert(0, file.to_string());
    reading.files.dedup();
    reading.notes.extend(given.variables.unused());
    reading.notes.sort_by_key(|n| n.kind);
    Ok(reading)
}

/// The accepted files.
pub const JOBS_ARE: &str = "a job is a script with torchrun, srun, deepspeed or python and a training script, an argument list or a log of Megatron-LM, a DeepSpeed JSON or a torchtitan TOML";

/// Whether a file is one to be read by people, by its ending.
fn is_document(file: &str) -> bool {
    let name = file.to_lowercase();
    let endings = [".md", ".rst", ".html", ".htm", ".tex", ".pdf", ".docx"];
    endings.iter().any(|ending| name.ends_with(ending))
}

/// Forms of files.
enum Form {
    DeepSpeed,
    TorchTitan,
    MegatronLog,
    Script,
}

/// The form of a file: by its ending, and by what it holds.
fn form(file: &str, text: &str) -> Form {
    let ends = |ending: &str| file.to_lowercase().ends_with(ending);
    let first = text.trim_start();
    let is_table = |l: &str| l.trim() == "[parallelism]" || l.trim() == "[training]";
    if ends(".json") || first.starts_with('{') {
        Form::DeepSpeed
    } else if ends(".toml") || text.lines().any(is_table) {
        Form::TorchTitan
    } else if measured::is_megatron_log(text) {
        Form::MegatronLog
    } else {
        Form::Script
    }
}

/// A value for a number that sizes something, none of which is above this.
pub(crate) const MOST: u64 = 1 << 40;

/// An error at a line of a file.
pub(crate) fn error(
    file: &str,
    line: Option<usize>,
    problem: impl Into<String>,
    help: impl Into<String>,
) -> JobError {
    JobError {
        file: file.into(),
        line,
        problem: problem.into(),
        help: help.into(),
    }
}
