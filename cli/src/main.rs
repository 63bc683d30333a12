//! The meshwright command: files, flags, reports, exit codes. All that it does is in the
//! other crates; here it meets the user.
//!
//! * `args`: the command line.
//! * `files`, `document`, `places`: reading with limits and places, writing whole or not at all.
//! * `model`, `cluster`, `train_spec`, `plan_file`: arguments to values.
//! * `quantity`: amounts with units.
//! * `snippet`: the lines of a file around the place of an error.
//! * `commands`: one module per verb.
//! * `report`: plans, memory and collectives in words and tables.
//!
//! Invariants: a file appears under its name only when it is complete, and not at all when
//! the command fails; a plan is checked before every use; no input makes the command panic.

mod args;
mod cluster;
mod commands;
mod document;
mod failure;
mod files;
mod gaps;
mod interrupt;
mod model;
mod outputs;
mod places;
mod plan_file;
mod quantity;
mod report;
mod snippet;
mod software;
mod train_spec;
mod zero_pin;

use args::{Cli, Verb};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, FromArgMatches};
use failure::{Exit, Failure};
use std::io::{IsTerminal, Write};
use std::num::IntErrorKind;
use std::process::ExitCode;

/// A plan is millions of small vectors and maps: with the system's allocator a third of the time of
/// planning goes into it, with this one a tenth.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    install_panic_message();
    let cli = match command_line()
        .try_get_matches()
        .and_then(|m| Cli::from_arg_matches(&m))
    {
        Ok(cli) => cli,
        Err(mut e) => {
            add_tip(&mut e);
            said_by_parser(&below_zero(number_in_words(e)))
        }
    };
    set_error_style();
    // The hook reports a panic on the way; only the exit code is set here.
    let result = std::panic::catch_unwind(|| dispatch(cli.verb));
    interrupt::wait_for_words();
    match result {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(failure)) => ExitCode::from(tell(failure)),
        Err(panic)
            if panic
                .downcast_ref()
                .is_some_and(|w: &String| lacks_threads(w)) =>
        {
            ExitCode::from(Exit::RunFailed as u8)
        }
        Err(_) => ExitCode::from(Exit::Internal as u8),
    }
}

/// Whether a panic was that of a library to which the system gave no thread: the standard library and
/// rayon know no other end then, and say so in these words alone.
fn lacks_threads(words: &str) -> bool {
    let of_rayon = words.contains("ThreadPoolBuildError") && words.contains("IOError");
    words.contains("failed to spawn thread") || of_rayon
}

/// Prints a failure on standard error, and returns its exit code.
pub(crate) fn tell(failure: failure::Failure) -> u8 {
    let exit = failure.exit();
    if failure.is_told() {
        return exit as u8;
    }
    // It keeps to the width itself, and shows lines of files as they are.
    let report = miette::Report::new(failure.advised().laid_out());
    let _ = writeln!(std::io::stderr().lock(), "{report:?}");
    exit as u8
}

/// Prints sentences on standard error, wrapped. That nobody reads them any more is no failure.
pub(crate) fn say(words: std::fmt::Arguments<'_>) {
    let words = words.to_string();
    let words = report::wrapped_within(report::error_width(), &report::visible(&words));
    let _ = writeln!(std::io::stderr().lock(), "{words}");
}

/// Ends with what the parser of the command line says: help as it is, errors wrapped, and without
/// characters that a terminal would obey.
fn said_by_parser(e: &clap::Error) -> ! {
    if !e.use_stderr() {
        e.exit()
    }
    say(format_args!("{}", e.render()));
    std::process::exit(e.exit_code())
}

/// Builds the command line. A number below zero is a value, which its flag refuses in words of its
/// own; no flag is called `-1`.
fn command_line() -> clap::Command {
    let takes_number = |a: clap::Arg| {
        let takes = a.get_action().takes_values();
        if takes {
            a.allow_negative_numbers(true)
        } else {
            a
        }
    };
    let verbs: Vec<String> = Cli::command()
        .get_subcommands()
        .map(|verb| verb.get_name().to_string())
        .collect();
    verbs.into_iter().fold(Cli::command(), |all, verb| {
        all.mut_subcommand(verb, |verb| verb.mut_args(takes_number))
    })
}

/// Adds a tip where clap has no good one: for a missing cluster, and for a flag of another verb.
fn add_tip(e: &mut clap::Error) {
    let given: Vec<String> = match e.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(arg)) => vec![arg.clone()],
        Some(ContextValue::Strings(args)) => args.clone(),
        _ => return,
    };
    let tip = match e.kind() {
        ErrorKind::MissingRequiredArgument if given.iter().any(|a| a.starts_with("--cluster")) => {
            Some(WHICH_CLUSTER.to_string())
        }
        ErrorKind::UnknownArgument => given.first().and_then(|flag| verbs_with(flag)),
        _ => None,
    };
    let Some(tip) = tip else {
        return;
    };
    // It is drawn behind these words.
    let tip = report::wrapped_within(report::error_width(), &format!("  tip: {tip}"));
    let tip = tip.trim_start().trim_start_matches("tip: ").to_string();
    e.insert(
        ContextKind::Suggested,
        ContextValue::StyledStrs(vec![tip.into()]),
    );
}

/// Rewords an error about a number that cannot be read: the parser of whole numbers speaks of
/// digits found in strings.
fn number_in_words(e: clap::Error) -> clap::Error {
    let (Some(ContextValue::String(flag)), Some(ContextValue::String(value))) = (
        e.get(ContextKind::InvalidArg),
        e.get(ContextKind::InvalidValue),
    ) else {
        return e;
    };
    let Some(expected) = std::error::Error::source(&e).and_then(|source| expected(source, value))
    else {
        return e;
    };
    let what = format!(
        "invalid value '{value}' for '{flag}': {expected}\n\nFor more information, try '--help'.\n"
    );
    clap::Error::raw(ErrorKind::ValueValidation, what)
}

/// Rewords an error about an amount below zero (`-3GiB`), which the parser takes for a flag: flags
/// begin with letters.
fn below_zero(e: clap::Error) -> clap::Error {
    let Some(ContextValue::String(flag)) = e.get(ContextKind::InvalidArg) else {
        return e;
    };
    let is_number = |text: &str| {
        let number = text.strip_prefix('-');
        number.is_some_and(|n| n.starts_with(|c: char| c.is_ascii_digit() || c == '.'))
    };
    if e.kind() != ErrorKind::UnknownArgument || !is_number(flag) {
        return e;
    }
    let given = std::env::args().find(|arg| arg.starts_with(flag.as_str()));
    let what = format!(
        "`{}` is below zero, which no amount is; flags begin with letters\n\nFor more information, try '--help'.\n",
        given.as_ref().unwrap_or(flag)
    );
    clap::Error::raw(ErrorKind::ValueValidation, what)
}

/// Says what a flag takes where `value` is no number, in place of the standard parsers' errors.
fn expected(source: &(dyn std::error::Error + 'static), value: &str) -> Option<String> {
    if source.is::<std::num::ParseFloatError>() {
        return Some("expected a number, as 0.1 or 1e-8".into());
    }
    if let Some(words) = range_in_words(&source.to_string()) {
        return Some(words);
    }
    let whole = source.downcast_ref::<std::num::ParseIntError>()?;
    let digits = value.strip_prefix('-').unwrap_or(value);
    let is_whole = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    Some(match (whole.kind(), value.parse::<f64>()) {
        (IntErrorKind::PosOverflow, _) => "expected a whole number below 2^64".into(),
        (IntErrorKind::NegOverflow, _) => "expected a whole number that is not negative".into(),
        (_, Ok(_)) if is_whole => "expected a whole number that is not negative".into(),
        (_, Ok(x)) if x.fract() == 0.0 && (0.0..1e15).contains(&x) => {
            format!("expected a whole number in digits alone: {x}")
        }
        _ => "expected a whole number in digits alone, as 64".into(),
    })
}

/// Rewords that a number is in no range of the language's: "1 is not in 2..=64".
fn range_in_words(message: &str) -> Option<String> {
    let (value, range) = message.split_once(" is not in ")?;
    let (least, most) = range.split_once("..")?;
    let is_beyond = |most: &str| match (value.parse::<i128>(), most.parse::<i128>()) {
        (Ok(value), Ok(most)) => value > most,
        _ => false,
    };
    let any = [u32::MAX.to_string(), u64::MAX.to_string()];
    Some(match most.strip_prefix('=') {
        Some(most) if is_beyond(most) || !any.iter().any(|any| any == most) => {
            format!("expected {least} to {most}")
        }
        _ => format!("expected {least} or more"),
    })
}

/// The advice for a missing `--cluster`.
const WHICH_CLUSTER: &str = "name a preset, as in `--cluster dgx-h100` (`meshwright presets` lists them), or measure this machine with `meshwright calibrate` and use `--cluster cluster.toml`";

/// Names the verbs that have a flag; `None` where none has.
fn verbs_with(flag: &str) -> Option<String> {
    let name = flag.strip_prefix("--")?;
    let name = name.split('=').next().unwrap_or(name);
    let command = Cli::command();
    let has = |verb: &&clap::Command| verb.get_arguments().any(|a| a.get_long() == Some(name));
    let verbs: Vec<String> = command
        .get_subcommands()
        .filter(has)
        .map(|verb| format!("`meshwright {}`", verb.get_name()))
        .collect();
    (!verbs.is_empty()).then(|| format!("--{name} is a flag of {}", verbs.join(" and ")))
}

fn dispatch(verb: Verb) -> Result<(), Failure> {
    match verb {
        Verb::Compile(a) => commands::compile::run(&a),
        Verb::Inspect(a) => commands::inspect::run(&a),
        Verb::Explain(a) => commands::explain::run(&a),
        Verb::WhatIf(a) => commands::what_if::run(&a),
        Verb::Sweep(a) => commands::sweep::run(&a),
        Verb::Fits(a) => commands::fits::run(&a),
        Verb::Check(a) => commands::check::run(&a),
        Verb::Lower(a) => commands::lower::run(&a),
        Verb::Export(a) => commands::export::run(&a),
        Verb::Simulate(a) => commands::simulate::run(&a),
        Verb::Run(a) => commands::run::run(&a),
        Verb::Checkpoint { verb } => commands::checkpoint::run(&verb),
        Verb::Doctor(a) => commands::doctor::run(&a),
        Verb::Compare(a) => commands::compare::run(&a),
        Verb::Calibrate(a) => commands::calibrate::run(&a),
        Verb::Predict(a) => commands::predict::run(&a),
        Verb::ImportJob(a) => commands::import_job::run(&a),
        Verb::Solve(a) => commands::solve::run(&a),
        Verb::Schema(a) => commands::schema::run(&a),
        Verb::Presets(a) => commands::presets::run(&a),
        Verb::Models(a) => commands::models::run(&a),
    }
}

/// Makes panics say that they are our mistake. Those of ranks are caught by the runtime, which
/// reports them itself. That the system gives no more threads is nobody's mistake.
fn install_panic_message() {
    std::panic::set_hook(Box::new(|info| {
        let words = info.to_string();
        if lacks_threads(&words) {
            say(format_args!(
                "the system gives this process no more threads: raise the limit of processes (`ulimit -u`, `pids.max` of its control group) or that of memory (`ulimit -v`), or start fewer ranks here\n{words}"
            ));
            return;
        }
        say(format_args!(
            "internal error: {words}\nThis is a defect of meshwright; please report it with the command line."
        ));
    }));
}

/// Has errors drawn as they were laid out: the library would break lines inside of words, too, as
/// paths and flags are.
fn set_error_style() {
    let terminal = std::io::stderr().is_terminal();
    // This fails only when a style is set already, and then that one serves.
    let _ = miette::set_hook(Box::new(move |_| {
        let options = miette::MietteHandlerOpts::new()
            .context_lines(1)
            .wrap_lines(false)
            .break_words(false);
        Box::new(if terminal {
            options.build()
        } else {
            options.color(false).build()
        })
    }));
}
