//! How a command fails: an exit code, what is wrong, the place, and the way out.

use miette::{LabeledSpan, NamedSource, SourceCode};
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
        }
    }
}

/// Why a command failed. Boxed, as it is rare and large.
#[derive(Debug)]
pub struct Failure(Box<Parts>);

#[derive(Debug)]
struct Parts {
    exit: Exit,
    message: String,
    help: Option<String>,
    source: Option<NamedSource<String>>,
    label: Option<LabeledSpan>,
}

/// Lines longer than this are not shown as the place of an error; a plan's graph is one line.
const LONGEST_LINE_SHOWN: usize = 300;

impl Failure {
    /// A failure with a message, which names the file where there is one.
    pub fn new(exit: Exit, message: impl fmt::Display) -> Self {
        Failure(Box::new(Parts {
            exit,
            message: message.to_string(),
            help: None,
            source: None,
            label: None,
        }))
    }
    /// Adds the way out.
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
        let start = floor_char(text, start.min(text.len()));
        let line_start = text[..start].rfind('\n').map_or(0, |i| i + 1);
        let line_end = text[start..].find('\n').map_or(text.len(), |i| start + i);
        if line_end - line_start <= LONGEST_LINE_SHOWN {
            let end = floor_char(text, start.saturating_add(len).min(line_end)).max(start);
            self.0.source = Some(NamedSource::new(file, text.to_string()));
            self.0.label = Some(LabeledSpan::new(Some(label.into()), start, end - start));
        }
        self
    }
    /// The exit code.
    pub fn exit(&self) -> Exit {
        self.0.exit
    }
}

fn floor_char(text: &str, mut at: usize) -> usize {
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl std::error::Error for Failure {}

impl miette::Diagnostic for Failure {
    fn code<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        Some(Box::new(format!(
            "{} (exit code {})",
            self.0.exit.name(),
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

impl From<import::ImportError> for Failure {
    fn from(e: import::ImportError) -> Self {
        Failure::new(Exit::BadInput, e)
    }
}

impl From<planner::PlanError> for Failure {
    fn from(e: planner::PlanError) -> Self {
        use planner::PlanError::*;
        let (exit, help) = match &e {
            Input(_) => (Exit::BadInput, None),
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
            Memory { .. } | Overrun { .. } => (
                Exit::Infeasible,
                Some(
                    "use more devices (--hosts), a smaller --global-batch or microbatch, --precision bf16, or remove pins",
                ),
            ),
            Lower(_) => (
                Exit::Internal,
                Some("this is a defect of the planner; please report it with the command line"),
            ),
        };
        let failure = Failure::new(exit, &e);
        if let Some(help) = help {
            failure.help(help)
        } else {
            failure
        }
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

impl From<runtime::RuntimeError> for Failure {
    fn from(e: runtime::RuntimeError) -> Self {
        use runtime::RuntimeError::*;
        let exit = match &e {
            Data(_) | Checkpoint { .. } | State { .. } | Batch(_) => Exit::BadInput,
            _ => Exit::RunFailed,
        };
        Failure::new(exit, &e)
    }
}

impl From<runtime::data::DataError> for Failure {
    fn from(e: runtime::data::DataError) -> Self {
        Failure::new(Exit::BadInput, e)
    }
}
