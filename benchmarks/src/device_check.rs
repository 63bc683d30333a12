//! `device_check`: tries the kernels of the CUDA backend on the GPU that is there. A line of JSON
//! for each result beside the CPU's, then one for the time of each op of a training step of GPT-2
//! 124M, of attention as larger steps have it, and of mixtures of experts. It fails where a result is
//! off.

use clap::{Parser, ValueEnum};
use runtime::device::cuda;
use serde_json::json;
use std::process::ExitCode;
use std::time::{Duration, Instant};

#[derive(Parser)]
#[command(about = "Tries the CUDA backend's kernels on a GPU.")]
struct Args {
    /// Seconds after which no more ops are timed.
    #[arg(long, default_value_t = 100)]
    seconds: u64,
    /// Try the results alone, or the times alone; both where it is not said.
    #[arg(long, value_enum)]
    only: Option<Only>,
    /// Time small ops only.
    #[arg(long)]
    quick: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Only {
    Results,
    Times,
}

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<bool, runtime::RuntimeError> {
    let all_pass = args.only == Some(Only::Times) || results()?;
    if args.only != Some(Only::Results) {
        times(args)?;
    }
    Ok(all_pass)
}

fn results() -> Result<bool, runtime::RuntimeError> {
    let mut all_pass = true;
    cuda::compare(|c| {
        let error = c.error.as_ref().ok().filter(|e| e.is_finite());
        let passes = error.is_some_and(|e| *e <= c.limit);
        all_pass &= passes;
        let said = json!({
            "op": c.op,
            "dtype": c.dtype.name(),
            "multiplier": format!("{:?}", c.by).to_lowercase(),
            "error_by_norm": error,
            "limit": c.limit,
            "passes": passes,
        });
        print(said, c.error.as_ref().err());
    })?;
    Ok(all_pass)
}

fn times(args: &Args) -> Result<(), runtime::RuntimeError> {
    let until = Instant::now() + Duration::from_secs(args.seconds);
    // GPT-2 124M with 8 samples of 1024 tokens.
    let sizes = if args.quick {
        (1, 16, 2)
    } else {
        (8, 1024, 10)
    };
    cuda::time(
        sizes,
        || Instant::now() > until,
        |t| {
            let mut ordered = t.times_s.clone();
            ordered.sort_by(f64::total_cmp);
            let mut said = json!({
                "op": t.op,
                "multiplier": format!("{:?}", t.by).to_lowercase(),
                "bytes": t.bytes,
                "flops": t.flops,
            });
            if let Some(median) = ordered.get(ordered.len() / 2) {
                said["median_s"] = json!(median);
                said["times_s"] = json!(t.times_s);
            }
            print(said, t.error.as_ref());
        },
    )
}

fn print(mut said: serde_json::Value, error: Option<&String>) {
    if let Some(error) = error {
        said["error"] = json!(error);
    }
    println!("{said}");
}
