//! How a command fails: an exit code, what is wrong, the place, and the way out.

use crate::report;
use crate::snippet::Snippet;
use miette::{LabeledSpan, SourceCode};
use std::fmt;

/// Exit codes of the command; documented in `--help` and in `docs/cli.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Flags or arguments that make no sense.
    Usage = 2,
    /// A file that cannot be read, or does not hold what it should.
    BadInput = 3,
    /// No plan or choice satisfies the constraints.
    Infeasible = 4,
    /// A plan or its program breaks a rule.
    CheckFailed = 5,
    /// A run stopped before its end.
    RunFailed = 6,
    /// A defect of Meshwright.
    Internal = 70,
    /// Somebody asked to stop before the end: 128 and the signal's number.
    Interrupted = 130,
}

impl Exit {
    fn name(self) -> &'static str {
        match self {
            Exit::Usage => "usage",
            Exit::BadInput => "bad input",
            Exit::Infeasible => "infeasible",
            Exit::CheckFailed => "check failed",
            Exit::RunFailed => "run failed",
            Exit::Internal => "internal error",
            Exit::Interrupted => "interrupted",
        }
    }
}

/// The failure of a command. Boxed, as it is rare and large.
#[derive(Debug)]
pub struct Failure(Box<Parts>);

#[derive(Debug)]
struct Parts {
    exit: Exit,
    /// The word for it in place of its exit code's.
    name: Option<&'static str>,
    /// The process of a run whose failure it is, where others say why they end, too.
    process: Option<usize>,
    /// Whether it was printed already.
    is_told: bool,
    message: String,
    help: Option<String>,
    source: Option<Snippet>,
    label: Option<LabeledSpan>,
}

/// Columns before the lines of a message, and of advice.
const MARK: usize = 4;
const HELP: usize = 8;
/// The system's words for a process that has as many files open as it may.
const TOO_MANY_FILES: &str = "Too many open files (";

impl Failure {
    /// Makes a failure with a message, which names the file where there is one.
    pub fn new(exit: Exit, message: impl fmt::Display) -> Self {
        Failure(Box::new(Parts {
            exit,
            name: None,
            process: None,
            is_told: false,
            message: message.to_string(),
            help: None,
            source: None,
            label: None,
        }))
    }
    /// Replaces the message.
    pub fn saying(mut self, message: impl fmt::Display) -> Self {
        self.0.message = message.to_string();
        self
    }
    /// Replaces the exit code.
    pub fn exiting(mut self, exit: Exit) -> Self {
        self.0.exit = exit;
        self.0.name = None;
        self
    }
    /// Replaces the word that stands before the exit code, where others end with it as well.
    pub fn called(mut self, name: &'static str) -> Self {
        self.0.name = Some(name);
        self
    }
    /// Names the process of a run whose failure this is.
    pub fn of_process(mut self, index: usize) -> Self {
        self.0.process = Some(index);
        self
    }
    /// Prints it now, before what is left to do may keep this process from it. What is returned has
    /// its exit code alone.
    pub fn tell(self) -> Self {
        let mut told = Failure::new(self.exit(), "");
        told.0.is_told = true;
        crate::interrupt::wait_for_words();
        crate::tell(self);
        told
    }
    /// Whether it was printed.
    pub fn is_told(&self) -> bool {
        self.0.is_told
    }
    /// Adds advice on the way out.
    pub fn help(mut self, help: impl Into<String>) -> Self {
        self.0.help = Some(help.into());
        self
    }
    /// Shows `len` bytes of `text` from byte `start`, with `label` under them.
    pub fn place(
        mut self,
        file: &str,
        text: &str,
        start: usize,
        len: usize,
        label: impl Into<String>,
    ) -> Self {
        let end = start.saturating_add(len);
        let snippet = Snippet::of(file, text, start..end, report::error_width());
        let span = snippet.span();
        self.0.label = Some(LabeledSpan::new(Some(label.into()), span.start, span.len()));
        self.0.source = Some(snippet);
        self
    }
    /// Adds what helps where the system gave this process no further file: whatever it was for.
    pub fn advised(mut self) -> Self {
        if self.0.message.contains(TOO_MANY_FILES) {
            let limit = "raise the limit of open files (ulimit -Hn, ulimit -n)";
            self.0.help = Some(match self.0.help.take() {
                Some(help) => format!("{limit}; {help}"),
                None => limit.into(),
            });
        }
        self
    }
    /// Breaks message and advice into lines that fit with what is drawn before them, in a file or a
    /// pipe too, as people read those. No word is broken, so that a path stays in one piece.
    pub fn laid_out(mut self) -> Self {
        let within = |drawn: usize, text: &str| {
            let width = report::error_width().saturating_sub(drawn);
            report::wrapped_within(width, &report::visible(text))
        };
        self.0.message = within(MARK, &self.0.message);
        self.0.help = self.0.help.take().map(|help| within(HELP, &help));
        self
    }
    /// Returns the exit code.
    pub fn exit(&self) -> Exit {
        self.0.exit
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl std::error::Error for Failure {}

impl miette::Diagnostic for Failure {
    fn code<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        let of = self.0.process.map(|n| format!("process {n}: "));
        Some(Box::new(format!(
            "{}{} (exit code {})",
            of.unwrap_or_default(),
            self.0.name.unwrap_or(self.0.exit.name()),
            self.0.exit as u8
        )))
    }
    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        self.0
            .help
            .as_ref()
            .map(|h| Box::new(h) as Box<dyn fmt::Display>)
    }
    fn source_code(&self) -> Option<&dyn SourceCode> {
        self.0.source.as_ref().map(|s| s as &dyn SourceCode)
    }
    fn labels(&self) -> Option<Box<dyn Iterator<Item = LabeledSpan> + '_>> {
        self.0
            .label
            .clone()
            .map(|l| Box::new(std::iter::once(l)) as Box<dyn Iterator<Item = LabeledSpan>>)
    }
}

/// The accepted values of `--weights`.
pub const WEIGHTS_ARE: &str = "weights are a .safetensors file, an index model.safetensors.index.json, or a folder with model.safetensors or that index";
/// The accepted values of `--resume`.
pub const CHECKPOINTS_ARE: &str = "checkpoints are in the folder that `meshwright run --checkpoint FOLDER` wrote to; `meshwright checkpoint verify FOLDER` says which of them are whole";
/// The advice for a checkpoint of another model or optimizer.
const OTHER_CHECKPOINT: &str = "a checkpoint goes on under any plan of the same model and optimizer, whatever its parallelism: compile from the model that it was trained with, or leave --resume out to begin anew";
/// The advice for a run that diverged.
pub const DIVERGED: &str = "lower --lr, add --warmup, or clip gradients";
const DATA_ARE: &str = "data is a .bin file of tokens (nanoGPT, llm.c) or UTF-8 text; text is read as bytes, or through --tokenizer";
const DEFECT: &str = "if `meshwright check` accepts the plan this is a defect of meshwright; please report it with the command line";

/// Adds advice where there is some.
fn with(failure: Failure, help: Option<&str>) -> Failure {
    match help {
        Some(help) => failure.help(help),
        None => failure,
    }
}

impl From<import::ImportError> for Failure {
    fn from(e: import::ImportError) -> Self {
        use import::ImportError::*;
        if let Supply { source, .. } = &e
            && let Some(runtime::RuntimeError::NotFinite { .. }) = source.downcast_ref()
        {
            return Failure::new(Exit::RunFailed, &e).help(DIVERGED);
        }
        let help = match &e {
            Io { .. } => Some("check the path, its permissions and the free space"),
            Format { .. } => Some(WEIGHTS_ARE),
            MissingTensors { .. } | UnexpectedTensors { .. } | TensorShape { .. } => Some(
                "the weights are of another model than the configuration: name theirs with --config, and compile the plan from it",
            ),
            MissingModules { .. } => Some(
                "set num_nextn_predict_layers to 0 in the config.json and compile the plan from it, which trains the model without them, or use weights that have them",
            ),
            TensorDtype { .. } => Some("store the weights in f32, f16 or bf16"),
            NotFinite { .. } => Some(
                "the weights are damaged, or their training diverged: use others, or leave --weights out to begin anew",
            ),
            NoSuchParam { .. } | ParamLength { .. } | Supply { .. } => {
                Some("--config must be the config.json that the plan was compiled from")
            }
            Json { .. } => {
                Some("the file was cut off or edited; get it again from where the model is from")
            }
            _ => None,
        };
        with(Failure::new(Exit::BadInput, &e), help)
    }
}

/// The advice for less memory that applies to every model and pin.
const LESS_MEMORY: &str =
    "use more devices (--hosts), a smaller --global-batch or microbatch, or remove pins";

impl From<planner::PlanError> for Failure {
    fn from(e: planner::PlanError) -> Self {
        use planner::PlanError::*;
        let (exit, help) = match &e {
            Input(_) => (Exit::BadInput, None),
            Pins(_) => (
                Exit::Usage,
                Some("change the pin or leave it out; the search finds what is not pinned"),
            ),
            Layers(planner::ClusterError::Rebuild(_)) => (
                Exit::Internal,
                Some("this is a defect of the planner; please report it with the command line"),
            ),
            Layers(_) => (
                Exit::Usage,
                Some("give --layers a number in that range, or `auto`, or leave it out"),
            ),
            Strategies(_) | NoTiling { .. } => (
                Exit::Infeasible,
                Some("loosen or remove pins, or change --global-batch"),
            ),
            Memory { .. } | Overrun { .. } => (Exit::Infeasible, Some(LESS_MEMORY)),
            Lower(_) | Defect(_) => (
                Exit::Internal,
                Some("this is a defect of the planner; please report it with the command line"),
            ),
        };
        with(Failure::new(exit, &e), help)
    }
}

impl From<lowering::LowerError> for Failure {
    fn from(e: lowering::LowerError) -> Self {
        Failure::new(
            Exit::CheckFailed,
            format!("the plan cannot be lowered: {e}"),
        )
        .help("make the plan again with `meshwright compile`")
    }
}

impl From<cost_model::SimError> for Failure {
    fn from(e: cost_model::SimError) -> Self {
        let what = format!("the plan's program cannot be played: {e}");
        Failure::new(Exit::CheckFailed, what)
    }
}

impl From<runtime::RuntimeError> for Failure {
    fn from(e: runtime::RuntimeError) -> Self {
        use runtime::RuntimeError::*;
        let exit = match &e {
            Data(_)
            | Checkpoint { .. }
            | NoneWhole { .. }
            | Record { .. }
            | OtherCheckpoint { .. }
            | OtherModel { .. }
            | State { .. }
            | Batch(_) => Exit::BadInput,
            _ => Exit::RunFailed,
        };
        if let Data(e) = &e {
            return with_data_help(Failure::new(exit, e), e);
        }
        let help = match &e {
            Data(_) => None,
            e if e.is_watchdog() => Some(
                "on a busy machine give ranks longer with --time-out SECONDS; where one hangs, a run with --processes or --record DIR and then `meshwright doctor PLAN DIR` say which, and where",
            ),
            Checkpoint { .. } | NoneWhole { .. } => Some(CHECKPOINTS_ARE),
            Record { .. } => Some(
                "records are in the folder that `meshwright run --record` named; those of any other run that failed or was killed are beside its output, as run.records for run.json",
            ),
            OtherCheckpoint { .. } | OtherModel { .. } => Some(OTHER_CHECKPOINT),
            NotFinite { .. } => Some(DIVERGED),
            State { .. } => Some(
                "the weights do not fit the plan's model: compile the plan from their config.json",
            ),
            Watchdog { .. } => None,
            e if e.is_consequence() => {
                Some("the rank that failed first says why, in the messages of its process")
            }
            Kernel { .. }
            | Instruction { .. }
            | Mismatch { .. }
            | Contract { .. }
            | Panic { .. }
            | Program(_) => Some(DEFECT),
            Batch(_) => Some(DATA_ARE),
            Diverged { .. } => Some(
                "lower --lr, add --warmup, or clip gradients; earlier checkpoints are unchanged",
            ),
            Taken { .. } => {
                Some("give each run a folder of its own, and leave it until its run ends")
            }
            // Whoever knows the run says how it goes on.
            Replicas { .. } => None,
            Gone { .. } => Some("its own message, where it wrote one, is above"),
            NoDevice { way_out, .. } => return Failure::new(exit, &e).help(way_out.clone()),
            Device { .. } | Aborted { .. } | Ended(_) | EndedByFirst(_) => None,
        };
        with(Failure::new(exit, &e), help)
    }
}

/// Adds advice to an error about data; for a missing file, the name of a similar one.
fn with_data_help(failure: Failure, e: &runtime::data::DataError) -> Failure {
    match e {
        runtime::data::DataError::Io { path, source, .. }
            if source.kind() == std::io::ErrorKind::NotFound =>
        {
            failure.help(crate::files::missing_help(path))
        }
        _ => with(failure, data_help(e)),
    }
}

/// Returns the advice for an error about data, other than a missing file.
fn data_help(e: &runtime::data::DataError) -> Option<&'static str> {
    use runtime::data::DataError::*;
    match e {
        Io { .. } => Some("check the path and its permissions"),
        NotAFile { .. } | Empty { .. } => Some(DATA_ARE),
        Truncated { .. } | Header { .. } => Some(
            "the file was cut off, or is of another form: write it again with the tool it is from; text needs another ending than .bin",
        ),
        TokenOutOfVocab { .. } => Some(
            "the tokens are of another vocabulary than the plan's model: give text the model's own --tokenizer tokenizer.json, tokenise a .bin file with that, or compile a model with a larger vocab_size",
        ),
        TooShort { .. } => Some(
            "use a longer file or another --validation-fraction, or compile with a smaller --sequence",
        ),
        NotUtf8 { .. } => Some("convert the text to UTF-8; a file of tokens needs the ending .bin"),
        BadTokenizer { .. } | Tokenize { .. } => Some(
            "--tokenizer takes the tokenizer.json of Hugging Face's tokenizers, which lies beside a model's config.json",
        ),
        TokenizerUnused { .. } => Some("leave --tokenizer out"),
        BadFraction(_) => Some("set --validation-fraction"),
        NoSuchWindow { .. } | TextTooLarge { .. } | Zero(_) | Elsewhere(_) => None,
    }
}

impl From<runtime::data::DataError> for Failure {
    fn from(e: runtime::data::DataError) -> Self {
        let exit = match &e {
            runtime::data::DataError::BadFraction(_) => Exit::Usage,
            _ => Exit::BadInput,
        };
        with_data_help(Failure::new(exit, &e), &e)
    }
}
