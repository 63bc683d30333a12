//! The meshwright command: files, flags, reports, exit codes. All that it does is in the
//! other crates; here it meets the user.
//!
//! * `args`: the command line.
//! * `files`, `document`: reading with limits and places, writing whole or not at all.
//! * `model`, `cluster`, `train_spec`, `plan_file`: arguments to values.
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
mod model;
mod plan_file;
mod report;
mod train_spec;

use args::{Cli, Verb};
use clap::Parser;
use failure::{Exit, Failure};
use std::io::IsTerminal;
use std::process::ExitCode;

fn main() -> ExitCode {
    install_panic_message();
    let cli = Cli::parse();
    set_error_style();
    // A panic on the way is reported by the hook; its exit code is ours.
    let result = std::panic::catch_unwind(|| dispatch(cli.verb));
    match result {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(failure)) => {
            let exit = failure.exit();
            eprintln!("{:?}", miette::Report::new(failure));
            ExitCode::from(exit as u8)
        }
        Err(_) => ExitCode::from(Exit::Internal as u8),
    }
}

fn dispatch(verb: Verb) -> Result<(), Failure> {
    match verb {
        Verb::Compile(a) => commands::compile::run(&a),
        Verb::Inspect(a) => commands::inspect::run(&a),
        Verb::Check(a) => commands::check::run(&a),
        Verb::Simulate(a) => commands::simulate::run(&a),
        Verb::Run(a) => commands::run::run(&a),
        Verb::Compare(a) => commands::compare::run(&a),
        Verb::Calibrate(a) => commands::calibrate::run(&a),
        Verb::Predict(a) => commands::predict::run(&a),
        Verb::Solve(a) => commands::solve::run(&a),
        Verb::Schema(a) => commands::schema::run(&a),
        Verb::Presets(a) => commands::presets::run(&a),
    }
}

/// Panics say that they are our mistake. Those of ranks are caught by the runtime, which
/// reports them itself.
fn install_panic_message() {
    std::panic::set_hook(Box::new(|info| {
        eprintln!(
            "internal error: {info}\nThis is a defect of meshwright; please report it with the command line."
        );
    }));
}

/// Lines are wrapped for people only, so that what programs read stays in one piece.
fn set_error_style() {
    let terminal = std::io::stderr().is_terminal();
    // Fails only when a style is set already, and then that one serves.
    let _ = miette::set_hook(Box::new(move |_| {
        let options = miette::MietteHandlerOpts::new().context_lines(1);
        Box::new(if terminal {
            options.build()
        } else {
            options
                .wrap_lines(false)
                .break_words(false)
                .color(false)
                .build()
        })
    }));
}
