//! The command line.

use clap::{Args, Parser, Subcommand, ValueEnum};
use intra_op::IlpBackend;
use planner::Effort;
use runtime::processes::Place;
use std::path::PathBuf;
use std::sync::LazyLock;

/// The text of `--version`: the build, and the library that solves its integer programs.
static VERSION: LazyLock<String> = LazyLock::new(|| {
    let solver = IlpBackend::default().name();
    format!("{} (integer programs: {solver})", env!("CARGO_PKG_VERSION"))
});

/// Exit codes, shown at the end of every help text.
const EXIT_CODES: &str = "Exit codes: 0 done; 2 usage; 3 bad input; 4 infeasible; 5 check failed;\n\
    6 run failed; 70 internal error; 130 interrupted.";

/// Compiles the training of a model to a parallel plan, proves it, runs it, and compares
/// what was predicted with what was measured.
#[derive(Debug, Parser)]
#[command(name = "meshwright", version = VERSION.as_str(), after_help = format!("Start with:\n  meshwright calibrate -o cluster.toml\n  meshwright compile tiny-gpt2 --cluster cluster.toml --ranks 4 -o plan.json\n  meshwright run plan.json --data examples/data/northanger_abbey_volume_one.txt --steps 20 -o run.json\n  meshwright compare plan.json run.json\n\n{EXIT_CODES}"))]
pub struct Cli {
    /// The verb.
    #[command(subcommand)]
    pub verb: Verb,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Search for the best plan to train a model on a cluster, or to run it forward alone.
    #[command(after_help = format!("Examples:\n  meshwright compile models/gpt2 --cluster cluster.toml --ranks 4 --global-batch 4 --sequence 256\n  meshwright compile models/gpt3-175b --cluster dgx-a100-80gb --hosts 128 --global-batch 1536 --sequence 2048 --precision bf16\n  meshwright compile models/gpt2 --cluster dgx-h100 --pin data=4 --pin tensor=2 --pin zero=1\n  meshwright compile models/gpt2 --cluster dgx-h100 --preset megatron --pin tensor=2\n  meshwright compile llama-3.1-8b --cluster dgx-h100 --hosts 2 --global-batch 256 --sequence 8192 --precision bf16 --for megatron-core\n  meshwright compile model.mw --cluster cluster.toml --pin 'spec:h.*.weight=[_,y]'\n  meshwright compile model.mw --cluster cluster.toml --layers 8 --pin pipeline=4\n\n{EXIT_CODES}"))]
    Compile(Box<CompileArgs>),
    /// Show a plan: stages, what each axis does, collectives, memory.
    #[command(after_help = format!("Examples:\n  meshwright inspect plan.json\n  meshwright inspect plan.json --layers\n  meshwright inspect plan.json --against other.json\n  meshwright inspect plan.json --json\n\n{EXIT_CODES}"))]
    Inspect(InspectArgs),
    /// Say why a plan is as it is: what bounds its step, where the time goes, and what other plans
    /// would cost.
    #[command(after_help = format!("Examples:\n  meshwright explain plan.json\n  meshwright explain plan.json --roofline\n  meshwright explain plan.json --why-not tensor=8\n  meshwright explain plan.json --why-not pipeline=1 --why-not zero=3 -o other.json\n\n{EXIT_CODES}"))]
    Explain(ExplainArgs),
    /// Show the best plan when a fact changes, beside this one: a faster link, more memory, fewer
    /// hosts, a larger batch.
    #[command(name = "what-if", after_help = format!("Examples:\n  meshwright what-if plan.json --set link.between=400Gb/s\n  meshwright what-if plan.json --set memory=96GiB --searches 0\n  meshwright what-if plan.json --hosts 15 --global-batch 2x -o other.json\n  meshwright what-if plan.json --sequence 2x --model models/gpt2\n\n{EXIT_CODES}"))]
    WhatIf(WhatIfArgs),
    /// Plan a model on clusters of several kinds and sizes: speed, memory, and what training to a
    /// number of tokens takes and costs.
    #[command(after_help = format!("Examples:\n  meshwright sweep models/gpt2 --cluster dgx-a100-80gb,dgx-h100 --hosts 1,2,4 --global-batch 512 --precision bf16\n  meshwright sweep models/llama-3.1-8b --cluster dgx-a100-80gb,dgx-h100 --hosts 1,2,4,8 --price dgx-a100-80gb=1.50/device-hour --price dgx-h100=2.50/device-hour --tokens 1T --global-batch 512 --sequence 4096 --precision bf16 --csv sweep.csv --svg sweep.svg\n\n{EXIT_CODES}"))]
    Sweep(Box<SweepArgs>),
    /// Find the smallest number of devices on which a model has a plan.
    #[command(after_help = format!("Examples:\n  meshwright fits models/llama-3.1-70b --device dgx-h100 --global-batch 256 --sequence 4096 --precision bf16\n  meshwright fits models/gpt2-xl --device a100-sxm-80gb*8+nvlink3 --pin recompute=none\n\n{EXIT_CODES}"))]
    Fits(Box<FitsArgs>),
    /// Prove that a plan and the program lowered from it are correct.
    #[command(after_help = format!("Example:\n  meshwright check plan.json\n\n{EXIT_CODES}"))]
    Check(CheckArgs),
    /// Print the program of a plan, whole or as one rank sees it.
    #[command(after_help = format!("Examples:\n  meshwright lower plan.json\n  meshwright lower plan.json --rank 3 -o rank3.txt\n\n{EXIT_CODES}"))]
    Lower(LowerArgs),
    /// Write a plan down for other software: launch flags, config files, placements.
    #[command(after_help = format!("Examples:\n  meshwright export plan.json --to megatron-core -o job\n  meshwright export plan.json --to deepspeed -o ds_config.json\n  meshwright export plan.json --to torchtitan --nearest\n\nWhat the software cannot express is listed, with what was written instead. A plan that it cannot\nexpress at all is refused (exit code 4), and nothing is written.\n\n{EXIT_CODES}"))]
    Export(ExportArgs),
    /// Play a plan on its cluster's description.
    #[command(after_help = format!("Example:\n  meshwright simulate plan.json --trace trace.json    (open the trace at https://ui.perfetto.dev)\n\n{EXIT_CODES}"))]
    Simulate(SimulateArgs),
    /// Train by a plan, on CPU ranks of this machine or of several.
    #[command(after_help = format!("Examples:\n  meshwright run plan.json --data text.txt --steps 100 --lr 3e-4 --warmup 10 -o run.json\n  meshwright run plan.json --data text.txt --tokenizer tokenizer.json --validate-every 50\n  meshwright run plan.json --data train.bin --weights gpt2/model.safetensors --config gpt2/config.json\n  meshwright run plan.json --data text.txt --checkpoint state --steps 100\n  meshwright run plan.json --data text.txt --resume state --steps 100\n  meshwright run plan.json --data text.txt --processes --checkpoint state --checkpoint-every 50\n  meshwright run plan.json --data text.txt --metrics loss.csv --metrics tensorboard/ --prometheus 9400\n  meshwright run plan.json --data text.txt --processes --elastic --checkpoint state --checkpoint-every 50\n\n{EXIT_CODES}"))]
    Run(Box<RunArgs>),
    /// Say why a run hangs or died: which rank the others wait for, in which collective, and what
    /// it was doing.
    #[command(after_help = format!("Examples:\n  meshwright run plan.json --data text.txt --processes\n  meshwright doctor plan.json run.records\n\n{EXIT_CODES}"))]
    Doctor(DoctorArgs),
    /// Look at training states that `run --checkpoint` wrote: what they are, whether they are
    /// whole, and their weights in Hugging Face's form.
    #[command(after_help = format!("Examples:\n  meshwright checkpoint inspect state\n  meshwright checkpoint verify state\n  meshwright checkpoint convert state --config models/gpt2 -o gpt2-trained\n  meshwright checkpoint convert state --config models/gpt2 -o gpt2-trained --force\n\n{EXIT_CODES}"))]
    Checkpoint {
        /// The verb.
        #[command(subcommand)]
        verb: CheckpointVerb,
    },
    /// Show what a plan predicted beside what its run measured.
    #[command(after_help = format!("Example:\n  meshwright compare plan.json run.json\n\n{EXIT_CODES}"))]
    Compare(CompareArgs),
    /// Measure this machine and write a cluster file for its CPU ranks.
    #[command(after_help = format!("Example:\n  meshwright calibrate -o cluster.toml --ranks 4\n\n{EXIT_CODES}"))]
    Calibrate(CalibrateArgs),
    /// Predict published training runs: a table of configurations to step time and memory.
    #[command(after_help = format!("Example:\n  meshwright predict rows.csv -o predicted.csv\n\ndocs/published.md lists the columns; a row that cannot be modelled says why in its `reason`.\nIf no row can be modelled, the reasons are printed, nothing is written, and the exit code is 4.\n\n{EXIT_CODES}"))]
    Predict(PredictArgs),
    /// Read a job of other software: what it should take, where its time goes, and what changing
    /// its flags is worth.
    #[command(name = "import-job", after_help = format!("Examples:\n  meshwright import-job examples/jobs/llama-70b-megatron.sbatch --cluster dgx-h100\n  meshwright import-job examples/jobs/llama-8b-torchtitan.toml --cluster dgx-h100 --hosts 1 --measured 7.3s\n  meshwright import-job examples/jobs/zero3-deepspeed.json --model llama-3.1-8b --sequence 4096 --cluster dgx-h100 --hosts 2 -o job.json\n  meshwright import-job train.sh --set NNODES=8 --cluster dgx-h100 --log train.log --price 2.50 --best best.json\n\nNo script is executed. What is assumed, not modelled or not known of the file is listed.\n\n{EXIT_CODES}"))]
    ImportJob(ImportJobArgs),
    /// Solve an intra-op problem in the form of the IOPDDL benchmark.
    #[command(after_help = format!("Example:\n  meshwright solve instance.json.gz --time-limit 60 -o solution.json\n\nThe last line of the output is a JSON object with status, objective, lower_bound, gap,\nseconds, peak_usage and usage_limit.\n\n{EXIT_CODES}"))]
    Solve(SolveArgs),
    /// Print the JSON Schema of a document.
    #[command(after_help = format!("Example:\n  meshwright schema plan > plan.schema.json\n\n{EXIT_CODES}"))]
    Schema(SchemaArgs),
    /// List the clusters that are built in.
    #[command(after_help = format!("Examples:\n  meshwright presets\n  meshwright presets dgx-h100 > cluster.toml\n\n{EXIT_CODES}"))]
    Presets(PresetsArgs),
    /// List the models that are built in.
    #[command(after_help = format!("Examples:\n  meshwright models\n  meshwright models llama-3.1-8b > config.json\n\n{EXIT_CODES}"))]
    Models(ModelsArgs),
}

/// Arguments of `compile`.
#[derive(Debug, Args)]
pub struct CompileArgs {
    /// A model that is built in (see `meshwright models`), a Hugging Face config.json or its
    /// folder, or a graph in Meshwright's text form.
    pub model: PathBuf,
    /// A preset or a composition of devices and links (see `meshwright presets`), several with
    /// numbers of hosts (dgx-h100:2,dgx-a100-40gb:1), or a cluster file (.toml, .json); `cpu`
    /// means the cluster.toml that `calibrate` wrote here.
    #[arg(long)]
    pub cluster: String,
    /// Where to write the plan.
    #[arg(short, long, default_value = "plan.json")]
    pub output: PathBuf,
    /// Number of hosts, in place of the cluster's own.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub hosts: Option<u32>,
    /// Number of CPU ranks, for a cluster whose ranks share the processors of one machine.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub ranks: Option<u32>,
    /// Fix a choice before the search: data=N, replicas=N (HSDP), expert=N, context=N,
    /// context_order=zigzag|natural, context_attention=gather|ulysses|ring, tensor=N, pipeline=N,
    /// zero=0..3, microbatch=N, split=5/4/4/5, schedule=NAME (1f1b, gpipe, ...), virtual=N
    /// (interleaved 1F1B, N stages on each mesh; needs pipeline=P; virtual=1 forbids interleaving),
    /// recompute=none|full|selective, recompute:OP=yes|no, spec:TENSOR=[axes,...]; may be
    /// repeated.
    #[arg(long = "pin", value_name = "KEY=VALUE")]
    pub pins: Vec<String>,
    /// Plan every point of a recipe and take the fastest: ddp, zero-1, zero-2, zero-3 (or fsdp),
    /// hsdp, megatron, deepspeed-3d or alpa. Pins choose among the points and fix what they leave
    /// open.
    #[arg(long, value_name = "NAME")]
    pub preset: Option<String>,
    /// Plan for other software, in what it can express, at its prices and within what its processes
    /// hold: megatron-core, megatron-deepspeed, torchtitan, fsdp2, deepspeed, nemo, jax, with a
    /// version where it matters (megatron-core@2024) and what a run switches on
    /// (torchtitan+async-tp+fp8; wide=OPS and mxfp8=OPS give some ops another type)
    /// [default: Meshwright's own runtime].
    #[arg(long = "for", value_name = "SOFTWARE", conflicts_with = "preset")]
    pub made_for: Option<String>,
    /// Capacity factor, for models with mixtures of experts: an expert has this many times the
    /// slots that the tokens need which it gets on average, and drops those that find none. The
    /// number of experts, divided by the experts of a token, drops none [default: 1.25].
    #[arg(long, value_name = "FACTOR")]
    pub expert_capacity: Option<f64>,
    /// The layers that stages are made of: those that the model declares (declared), or groups of
    /// ops found by clustering, in a number that suits the graph (auto) or exactly N [default:
    /// declared; auto where the model declares none or one].
    #[arg(long, value_name = "declared|auto|N")]
    pub layers: Option<LayersArg>,
    /// How much longer a step may take than that of the fastest plan, for a simpler one: of the
    /// plans found within it the one with the fewest layer strategies, axes and stages is taken. 0
    /// takes the fastest.
    #[arg(long, value_name = "PERCENT", default_value = "1%")]
    pub tolerance: Share,
    /// Share of each device's memory that stays free, of what is left beside the bytes that the
    /// device's file reserves [default: memory_headroom of the cluster's
    /// devices, 2% for the presets of GPUs].
    #[arg(long, value_name = "PERCENT")]
    pub headroom: Option<Share>,
    /// Write the intra-op problems of the plan's stages to this folder, in the form that `solve`
    /// reads: those that were solved as integer programs, because memory was short.
    #[arg(long, value_name = "DIR")]
    pub dump_intra_op: Option<PathBuf>,
    /// Write the best other plans that were simulated to this folder, each complete and of other
    /// degrees; the plan lists them, and `explain` shows them.
    #[arg(long, value_name = "DIR")]
    pub runners_up: Option<PathBuf>,
    /// How many times as much to look at: prices on memory, pipelines that are simulated. More may
    /// find a faster plan and prove a smaller gap, in the same space.
    #[arg(long, value_name = "TIMES", default_value = "1", value_parser = effort)]
    pub effort: Effort,
    /// Seconds that the search has: then the best plan that it has found is taken, or the first one
    /// that it finds, with the bound that is proved by then. Ctrl-C does the same at once.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(0..=604800))]
    pub time_limit: Option<u64>,
    /// Where there is no plan: seconds in which changes are tried, to find the constraints that
    /// leave none and what would give one. A search that has begun is finished; 0 tries nothing.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(0..=86400))]
    pub ways_out: u64,
    /// The training spec.
    #[command(flatten)]
    pub train: TrainArgs,
    /// Print every detail.
    #[arg(short, long, conflicts_with = "json")]
    pub verbose: bool,
    /// Print JSON instead of words.
    #[arg(long)]
    pub json: bool,
}

/// Reads how many times as much a search looks at.
fn effort(text: &str) -> Result<Effort, String> {
    let times = text.parse().ok().and_then(Effort::new);
    times.ok_or_else(|| format!("it is a whole number from 1 to {}", Effort::MOST))
}

/// Reads a number of processes; 0 stands for one for each rank.
fn processes(text: &str) -> Result<usize, String> {
    match (text, text.parse()) {
        ("each", _) => Ok(0),
        (_, Ok(n)) if n > 0 => Ok(n),
        _ => Err("expected a whole number from 1; without one each rank has a process".into()),
    }
}

/// Which process `I/N` is.
fn place(text: &str) -> Result<Place, String> {
    let number = |text: &str| text.parse::<usize>().ok();
    let both = text.split_once('/');
    let both = both.and_then(|(i, n)| Some((number(i)?, number(n)?)));
    match both {
        Some((index, of)) if 0 < index && index < of => Ok(Place { index, of }),
        _ => Err("expected a process of how many, as 1/4".into()),
    }
}

/// A share below the whole, given as `1%` or `0.01`.
#[derive(Clone, Copy, Debug)]
pub struct Share(pub f64);

impl std::str::FromStr for Share {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        const RANGE: &str = "expected a share from 0% to below 100%, as 5% or 0.05";
        let (number, percent) = match text.trim().strip_suffix('%') {
            Some(percent) => (percent.trim_end(), true),
            None => (text.trim(), false),
        };
        let number = number.parse::<f64>().ok().filter(|n| !n.is_nan());
        let Some(number) = number else {
            return Err(format!("it is no share; {RANGE}"));
        };
        let share = if percent { number / 100.0 } else { number };
        match (share, percent) {
            (s, _) if (0.0..1.0).contains(&s) => Ok(Share(s)),
            (s, _) if s < 0.0 => Err(format!("it is below zero; {RANGE}")),
            // Most who write a number from 1 mean percent.
            (s, false) if s < 100.0 => Err(format!(
                "without `%` it is {} percent; {RANGE} (for {number} percent {number}%)",
                s * 100.0
            )),
            _ => Err(format!("it is the whole or more; {RANGE}")),
        }
    }
}

/// Where layers come from.
#[derive(Clone, Copy, Debug)]
pub struct LayersArg(pub planner::Layering);

impl std::str::FromStr for LayersArg {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        Ok(LayersArg(match text {
            "declared" => planner::Layering::Declared,
            "auto" => planner::Layering::Auto,
            _ => match text.parse() {
                Ok(n) if n > 0 => planner::Layering::Exactly(n),
                _ => return Err("accepted: declared, auto, or a number from 1".into()),
            },
        }))
    }
}

/// The training spec: a file, flags, or both; flags win.
#[derive(Debug, Default, Args)]
pub struct TrainArgs {
    /// TOML file with any of the keys task, global_batch, sequence, precision, dropout, seed,
    /// clip_norm (a number or "none"), and a table [optimizer.adam_w] or [optimizer.sgd].
    #[arg(long = "train", value_name = "TRAIN.TOML")]
    pub file: Option<PathBuf>,
    /// Plan for inference: forward passes alone, which give the loss of each batch. There are no
    /// gradients and no optimizer, and parameters rest in the precision that they are computed in.
    #[arg(long)]
    pub inference: bool,
    /// Samples per step over the whole cluster [default: 8].
    #[arg(long)]
    pub global_batch: Option<u64>,
    /// Tokens per sample [default: 1024, or the model's positions if fewer].
    #[arg(long, visible_alias = "seq")]
    pub sequence: Option<u64>,
    /// Precision of compute and activations [default: f32].
    #[arg(long)]
    pub precision: Option<PrecisionArg>,
    /// Optimizer [default: adamw].
    #[arg(long)]
    pub optimizer: Option<OptimizerArg>,
    /// AdamW: decay of the first moment [default: 0.9].
    #[arg(long)]
    pub beta1: Option<f64>,
    /// AdamW: decay of the second moment [default: 0.95].
    #[arg(long)]
    pub beta2: Option<f64>,
    /// AdamW: added to the root of the second moment [default: 1e-8].
    #[arg(long)]
    pub eps: Option<f64>,
    /// SGD: momentum [default: 0].
    #[arg(long)]
    pub momentum: Option<f64>,
    /// Weight decay of matrices [default: 0.1 for AdamW, 0 for SGD].
    #[arg(long)]
    pub weight_decay: Option<f64>,
    /// Largest gradient norm, or `none` [default: 1].
    #[arg(long, value_name = "NORM|none")]
    pub clip_norm: Option<String>,
    /// Dropout probability [default: 0].
    #[arg(long)]
    pub dropout: Option<f64>,
    /// Seed of initial weights, dropout and the order of data [default: 1337].
    #[arg(long)]
    pub seed: Option<u64>,
}

/// Precisions.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum PrecisionArg {
    /// Everything f32.
    F32,
    /// Compute in bf16, f32 master weights.
    Bf16,
    /// Compute in f16 with loss scaling, f32 master weights.
    F16,
}

/// Optimizers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OptimizerArg {
    /// AdamW.
    Adamw,
    /// SGD with momentum.
    Sgd,
}

/// Arguments of `inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// The plan.
    pub plan: PathBuf,
    /// Show the strategy of every op too.
    #[arg(long)]
    pub layers: bool,
    /// Compare it with another plan instead: what both predict, and what differs.
    #[arg(long, value_name = "OTHER.JSON", conflicts_with = "layers")]
    pub against: Option<PathBuf>,
    /// Print JSON instead of words.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// The plan.
    pub plan: PathBuf,
    /// Plan again under this pin, and show what it costs: tensor=8, pipeline=1, zero=3, or any
    /// other pin of `compile`; may be repeated. It replaces the plan's own pin of that key; the
    /// plan's other pins stay.
    #[arg(long = "why-not", value_name = "KEY=VALUE")]
    pub why_not: Vec<String>,
    /// Where to write the plan that was made under these pins.
    #[arg(short, long, requires = "why_not")]
    pub output: Option<PathBuf>,
    /// Show the step by kind of instruction instead: how many there are, their launches, FLOPs and
    /// bytes, the least time at the device's peak and bandwidth, and the predicted time.
    #[arg(long, conflicts_with = "why_not")]
    pub roofline: bool,
    /// How plans are searched for.
    #[command(flatten)]
    pub search: SearchArgs,
    /// Print JSON instead of words.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `what-if`.
#[derive(Debug, Args)]
pub struct WhatIfArgs {
    /// The plan.
    pub plan: PathBuf,
    /// Change a fact about the cluster: link.inside, link.between or link.NAME (bandwidth, as
    /// 400Gb/s or 50GB/s), latency.inside, latency.between, memory (96GiB), memory.bandwidth, peak
    /// (989TFLOP/s); 2x doubles what there is. May be repeated.
    #[arg(long, value_name = "FACT=VALUE")]
    pub set: Vec<String>,
    /// Number of hosts, or a multiple of it (2x).
    #[arg(long, value_name = "N|Nx")]
    pub hosts: Option<String>,
    /// Samples per optimizer step, or a multiple of them (2x).
    #[arg(long, value_name = "N|Nx")]
    pub global_batch: Option<String>,
    /// Tokens per sample, or a multiple of them (2x); needs --model.
    #[arg(long, visible_alias = "seq", value_name = "N|Nx")]
    pub sequence: Option<String>,
    /// The model that the plan was compiled from, to be built for another length of sequences.
    #[arg(long)]
    pub model: Option<PathBuf>,
    /// Searches for the value at which the choice changes, where one --set changes it; 0 makes
    /// none.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(0..=40))]
    pub searches: u32,
    /// Where to write the new plan.
    #[arg(short, long)]
    pub output: Option<PathBuf>,
    /// How plans are searched for.
    #[command(flatten)]
    pub search: SearchArgs,
    /// Print JSON instead of words.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `sweep`.
#[derive(Debug, Args)]
pub struct SweepArgs {
    /// The model, as for `compile`.
    pub model: PathBuf,
    /// Clusters, as for `compile`, separated by commas; one of unequal groups is given as a file.
    #[arg(
        long = "cluster",
        value_delimiter = ',',
        required = true,
        value_name = "CLUSTER,.."
    )]
    pub clusters: Vec<String>,
    /// Numbers of hosts of every cluster [default: the clusters' own].
    #[arg(long, value_delimiter = ',', value_name = "N,..", conflicts_with = "ranks", value_parser = clap::value_parser!(u32).range(1..))]
    pub hosts: Vec<u32>,
    /// Numbers of CPU ranks, for a cluster whose ranks share the processors of one machine.
    #[arg(long, value_delimiter = ',', value_name = "N,..", value_parser = clap::value_parser!(u32).range(1..))]
    pub ranks: Vec<u32>,
    /// The price of one device of a cluster for an hour, in any currency; may be repeated.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "CLUSTER=PRICE/device-hour",
        requires = "tokens"
    )]
    pub price: Vec<String>,
    /// Tokens to train on, for time and cost: 300B, 1T, 1.5e13.
    #[arg(long, value_name = "N")]
    pub tokens: Option<String>,
    /// Fix a choice before each search, as in `compile`; may be repeated.
    #[arg(long = "pin", value_name = "KEY=VALUE")]
    pub pins: Vec<String>,
    /// Plan for other software, as in `compile` [default: Meshwright's own runtime].
    #[arg(long = "for", value_name = "SOFTWARE")]
    pub made_for: Option<String>,
    /// Capacity factor of mixtures of experts, as in `compile`.
    #[arg(long, value_name = "FACTOR")]
    pub expert_capacity: Option<f64>,
    /// Write the table as comma-separated values.
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Draw tokens per second, and cost where prices are known, over devices.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// How plans are searched for.
    #[command(flatten)]
    pub search: SearchArgs,
    /// The training spec.
    #[command(flatten)]
    pub train: TrainArgs,
    /// Print JSON instead of words.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `fits`.
#[derive(Debug, Args)]
pub struct FitsArgs {
    /// The model, as for `compile`.
    pub model: PathBuf,
    /// The cluster whose devices are counted: a preset, a composition of devices and links, or a
    /// file. Its number of hosts does not matter.
    #[arg(long, value_name = "CLUSTER")]
    pub device: String,
    /// The largest number of devices that is tried.
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    pub most_devices: u32,
    /// How many larger sizes are planned too, each twice the one before.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(0..=10))]
    pub next: u32,
    /// Fix a choice before each search, as in `compile`; may be repeated.
    #[arg(long = "pin", value_name = "KEY=VALUE")]
    pub pins: Vec<String>,
    /// Plan for other software, as in `compile` [default: Meshwright's own runtime].
    #[arg(long = "for", value_name = "SOFTWARE")]
    pub made_for: Option<String>,
    /// Capacity factor of mixtures of experts, as in `compile`.
    #[arg(long, value_name = "FACTOR")]
    pub expert_capacity: Option<f64>,
    /// How plans are searched for.
    #[command(flatten)]
    pub search: SearchArgs,
    /// The training spec.
    #[command(flatten)]
    pub train: TrainArgs,
    /// Print JSON instead of words.
    #[arg(long)]
    pub json: bool,
}

/// How verbs that plan again choose among plans, as `compile` does.
#[derive(Clone, Copy, Debug, Args)]
pub struct SearchArgs {
    /// How much longer a step may take than that of the fastest plan, for a simpler one, as in
    /// `compile`.
    #[arg(long, value_name = "PERCENT", default_value = "1%")]
    pub tolerance: Share,
    /// Share of each device's memory that stays free, as in `compile` [default: that of the plan,
    /// or memory_headroom of the cluster's devices]
    #[arg(long, value_name = "PERCENT")]
    pub headroom: Option<Share>,
}

/// Arguments of `check`.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// The plan.
    pub plan: PathBuf,
    /// Print JSON instead of words.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `lower`.
#[derive(Debug, Args)]
pub struct LowerArgs {
    /// The plan.
    pub plan: PathBuf,
    /// Print only what this rank does, with its shapes, the global indices that it holds, and the
    /// ranks that it exchanges data with.
    #[arg(long)]
    pub rank: Option<u32>,
    /// Where to write the program [default: standard output].
    #[arg(short, long)]
    pub output: Option<PathBuf>,
}

/// Arguments of `export`.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// The plan.
    pub plan: PathBuf,
    /// The software: megatron-core, deepspeed, torchtitan, fsdp2, accelerate or jax.
    #[arg(long, value_name = "SOFTWARE")]
    pub to: String,
    /// The folder to write into, which is made, or where there is one file its name [default: a
    /// folder export-SOFTWARE here].
    #[arg(short, long, value_name = "DIR|FILE")]
    pub output: Option<PathBuf>,
    /// Plan again with what the software can express, and say what that plan is predicted to take.
    #[arg(long)]
    pub nearest: bool,
    /// How that plan is searched for.
    #[command(flatten)]
    pub search: SearchArgs,
    /// Print JSON instead of words.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `simulate`.
#[derive(Debug, Args)]
pub struct SimulateArgs {
    /// The plan.
    pub plan: PathBuf,
    /// Write a trace in Chrome's format, for Perfetto.
    #[arg(long)]
    pub trace: Option<PathBuf>,
    /// Print JSON instead of words.
    #[arg(long)]
    pub json: bool,
}

/// Shapes of the learning rate after warmup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DecayArg {
    /// Half a cosine wave down to --min-lr.
    Cosine,
    /// A straight line down to --min-lr.
    Linear,
    /// No decay.
    Constant,
}

/// The devices that ranks compute with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendArg {
    /// The processors of this machine.
    Cpu,
    /// Its NVIDIA GPUs; ranks go round them.
    Cuda,
}

/// Who multiplies matrices on GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum MatmulsArg {
    /// cuBLASLt with the algorithm that it proposes; plain kernels where it is not found.
    #[default]
    Library,
    /// cuBLASLt with the fastest of its proposals, timed in the first step; last bits can differ
    /// from run to run.
    Tuned,
    /// Kernels of our own, which are slow and need no library.
    Plain,
}

/// How ranks on GPUs meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FabricArg {
    /// By NCCL, which must be installed (2.18 or later). Several ranks on one GPU need 2.30, and
    /// variables in the environment that the run names.
    Nccl,
    /// Through the host's memory: slower, the same bits in every run, and no library.
    Host,
}

/// Arguments of `run`.
#[derive(Clone, Debug, Args)]
pub struct RunArgs {
    /// The plan.
    pub plan: PathBuf,
    /// The devices that ranks compute with.
    #[arg(long, value_enum, default_value_t = BackendArg::Cpu)]
    pub backend: BackendArg,
    /// Who multiplies matrices; with --backend cuda [default: library].
    #[arg(long, value_enum)]
    pub matmuls: Option<MatmulsArg>,
    /// Round factors of f32 matmuls to TF32, which is faster and has 10 bits of mantissa; with
    /// --backend cuda.
    #[arg(long)]
    pub tf32: bool,
    /// Execute a plan for other GPUs than this host has, which is refused otherwise; with --backend
    /// cuda.
    #[arg(long)]
    pub on_other_gpus: bool,
    /// How ranks on GPUs meet; with --backend cuda [default: nccl where it is found and every rank
    /// has a GPU, else host].
    #[arg(long, value_enum)]
    pub fabric: Option<FabricArg>,
    /// Training data: tokens of nanoGPT or llm.c (.bin), or text. A run that goes on from a
    /// checkpoint may have other data than that was trained on: it says so, and goes on at the same
    /// sample number.
    #[arg(long)]
    pub data: PathBuf,
    /// A Hugging Face tokenizer.json for text; without it each byte is a token.
    #[arg(long)]
    pub tokenizer: Option<PathBuf>,
    /// Number of steps, of training or of inference as the plan is for.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    pub steps: u64,
    /// Peak learning rate [default: 0.0003].
    #[arg(long)]
    pub lr: Option<f64>,
    /// Number of steps over which the learning rate rises linearly to its peak.
    #[arg(long, default_value_t = 0)]
    pub warmup: u64,
    /// Shape of the learning rate after warmup.
    #[arg(long, value_enum, default_value_t = DecayArg::Constant)]
    pub schedule: DecayArg,
    /// Learning rate at the end of the decay.
    #[arg(long, default_value_t = 0.0)]
    pub min_lr: f64,
    /// Step at which the decay ends, counted from the first of all runs [default: the last
    /// step of this run].
    #[arg(long)]
    pub total_steps: Option<u64>,
    /// Initial weights: a safetensors file, its index, or their folder; without it weights
    /// are drawn from the plan's seed.
    #[arg(long)]
    pub weights: Option<PathBuf>,
    /// The model's config.json, which says how weights are stored [default: beside --weights].
    #[arg(long)]
    pub config: Option<PathBuf>,
    /// Validate before the first step, after every N steps, and after the last. Steps of earlier
    /// runs that this one goes on from count.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub validate_every: Option<u64>,
    /// Share of the data, at its end, that is kept for validation.
    #[arg(long, default_value_t = 0.1)]
    pub validation_fraction: f64,
    /// Number of batches in a validation.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..))]
    pub validation_batches: u64,
    /// Write the trained weights in Hugging Face's form; needs --config. A file that is there
    /// already is replaced with --force alone.
    #[arg(long)]
    pub save: Option<PathBuf>,
    /// Replace the file of --save where it is there already.
    #[arg(long, requires = "save")]
    pub force: bool,
    /// Write the training state at the end of the run to this folder.
    #[arg(long)]
    pub checkpoint: Option<PathBuf>,
    /// Write the training state after every N steps, too, counted from the first of all runs; needs
    /// --checkpoint.
    #[arg(long, value_name = "N", requires = "checkpoint", value_parser = clap::value_parser!(u64).range(1..))]
    pub checkpoint_every: Option<u64>,
    /// How many training states stay in the folder of --checkpoint, the newest ones.
    #[arg(long, value_name = "N", requires = "checkpoint", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..))]
    pub checkpoints_kept: u16,
    /// Whether steps go on while --checkpoint-every writes, which takes memory for a copy of the
    /// training state, or wait.
    #[arg(long, value_enum, default_value_t = CheckpointMode::Background, requires = "checkpoint")]
    pub checkpoint_mode: CheckpointMode,
    /// Go on from the training state in this folder.
    #[arg(long, conflicts_with = "weights")]
    pub resume: Option<PathBuf>,
    /// Number of steps, the last ones, whose instructions are timed one by one.
    #[arg(long, default_value_t = 2)]
    pub profile: u64,
    /// Seconds that a rank waits for another one before the run fails. Until all processes have met
    /// they wait for 20 seconds at least.
    #[arg(long = "time-out", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    pub time_out: u64,
    /// Write the figures of every step while the run goes on: to a file ending in .jsonl (JSON
    /// lines) or .csv, or to a folder for TensorBoard; may be repeated. A run that goes on from a
    /// checkpoint goes on in the same file, without a step twice.
    #[arg(long, value_name = "FILE|DIR")]
    pub metrics: Vec<PathBuf>,
    /// Answer Prometheus at this port of the loopback, with the figures of the newest step; 0 takes
    /// a free port and says which.
    #[arg(long, value_name = "PORT")]
    pub prometheus: Option<u16>,
    /// Where standard error is no terminal: at least so many seconds from one line about a step to
    /// the next, instead of a line for every step.
    #[arg(long, value_name = "SECONDS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(0..=86400))]
    pub log_every: u64,
    /// Compare the states of ranks that keep the same ones, by hashes, after every N steps, before
    /// each checkpoint and at the end: a bit that a memory or a processor turned ends the run, and
    /// names the rank. Where ranks meet by NCCL, those are compared that had the same sums. What is
    /// saved as process 0 is lost, or of one rank that is left, is not compared.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub check_replicas: Option<u64>,
    /// Have every rank keep what it is doing in a file in this folder, for `meshwright doctor`.
    /// Unasked they do so in a folder beside the output, which goes when the run ends in order
    /// [default: run.records for run.json].
    #[arg(long, value_name = "DIR")]
    pub record: Option<PathBuf>,
    /// Nobody asked for that folder.
    #[arg(skip)]
    pub records_by_default: bool,
    /// Have ranks in processes that this one starts on its host: one each, or so many in all.
    /// Without it ranks are threads, unless torchrun, srun or mpirun started several processes.
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = "each", value_parser = processes)]
    pub processes: Option<usize>,
    /// When processes die or hang: plan again for the ranks that are left, and go on from the
    /// states that these have in memory, or else from the newest checkpoint. Under a launcher, and
    /// after the death of all, the same command given again goes on with the processes that there
    /// are then. Needs --checkpoint-every.
    #[arg(long, requires = "checkpoint_every")]
    pub elastic: bool,
    /// How a run that goes on so knows what has changed.
    #[arg(long, hide = true, value_name = "FILE")]
    pub continued: Option<PathBuf>,
    /// How often that was.
    #[arg(skip)]
    pub losses: u32,
    /// When the last loss was, in milliseconds since 1970, while no step has been made since.
    #[arg(skip)]
    pub lost_at_ms: Option<u64>,
    /// The name of the run that goes on so.
    #[arg(skip)]
    pub run: Option<String>,
    /// The process that keeps this one, by its number in the system.
    #[arg(long, hide = true, value_name = "PID")]
    pub kept: Option<u32>,
    /// The number of processes that were lost, this one's forerunner among them; the keeper gives it.
    #[arg(long, hide = true, value_name = "N", default_value_t = 0)]
    pub after_loss: usize,
    /// Run in this process alone, whatever a launcher's variables say.
    #[arg(long, conflicts_with = "processes")]
    pub alone: bool,
    /// Under mpirun, talk through the MPI library; for builds with the feature `mpi`.
    #[arg(long, conflicts_with_all = ["processes", "alone", "rendezvous", "bind", "token_file"])]
    pub mpi: bool,
    /// Where process 0 of a run of several hosts can be reached [default: MASTER_ADDR and
    /// MASTER_PORT].
    #[arg(long, value_name = "HOST:PORT", conflicts_with_all = ["processes", "alone"])]
    pub rendezvous: Option<String>,
    /// Address of this host at which process 0 listens for other hosts.
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["processes", "alone"])]
    pub bind: Option<std::net::IpAddr>,
    /// File with the secret of a run of several hosts, 64 hexadecimal digits that only you can
    /// read.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["processes", "alone"])]
    pub token_file: Option<PathBuf>,
    /// How processes that a run starts know which they are.
    #[arg(long, hide = true, value_parser = place)]
    pub as_process: Option<Place>,
    /// Where to write what was measured.
    #[arg(short, long, default_value = "run.json")]
    pub output: PathBuf,
    /// Print JSON instead of words.
    #[arg(long)]
    pub json: bool,
}

/// The steps while a checkpoint is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CheckpointMode {
    /// They go on.
    Background,
    /// They wait.
    Wait,
}

/// Arguments of `compare`.
#[derive(Debug, Args)]
pub struct CompareArgs {
    /// The plan.
    pub plan: PathBuf,
    /// Measurement of its run. More runs of the plan count for --recalibrate only.
    #[arg(required = true, num_args = 1..)]
    pub run: Vec<PathBuf>,
    /// Fit the figures of the plan's cluster to the runs, write the new cluster to this file, and
    /// say which figures change and whether another plan becomes the best.
    #[arg(long, value_name = "CLUSTER")]
    pub recalibrate: Option<PathBuf>,
    /// Print every detail.
    #[arg(short, long, conflicts_with = "json")]
    pub verbose: bool,
    /// Print JSON instead of words.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `calibrate`.
#[derive(Debug, Args)]
pub struct CalibrateArgs {
    /// Where to write the cluster.
    #[arg(short, long, default_value = "cluster.toml")]
    pub output: PathBuf,
    /// Number of ranks with which collectives are measured.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=64))]
    pub ranks: u32,
    /// Measure fewer sizes, with fewer repetitions.
    #[arg(long)]
    pub quick: bool,
    /// Print every detail.
    #[arg(short, long, conflicts_with = "json")]
    pub verbose: bool,
    /// Print JSON instead of words.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `predict`.
#[derive(Debug, Args)]
pub struct PredictArgs {
    /// Table of training runs: comma-separated values with a header, one run per row.
    pub rows: PathBuf,
    /// Where to write the predictions.
    #[arg(short, long, default_value = "predicted.csv")]
    pub output: PathBuf,
}

/// Arguments of `import-job`.
#[derive(Debug, Args)]
pub struct ImportJobArgs {
    /// The job: a script or an argument list with Megatron-LM's arguments, a log of Megatron-LM, a
    /// DeepSpeed JSON, a torchtitan TOML, or a Slurm script that starts one of these.
    pub job: PathBuf,
    /// The cluster that it runs on, as for `compile`.
    #[arg(long)]
    pub cluster: String,
    /// Number of hosts, in place of the job's own.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub hosts: Option<u32>,
    /// The model, as for `compile`, where the job does not say it.
    #[arg(long)]
    pub model: Option<PathBuf>,
    /// Tokens per sample, where the job does not say them, or in their place.
    #[arg(long, visible_alias = "seq", value_parser = clap::value_parser!(u64).range(1..))]
    pub sequence: Option<u64>,
    /// The value of a variable of the script's environment, or of something that a file leaves
    /// open; may be repeated.
    #[arg(long, value_name = "NAME=VALUE")]
    pub set: Vec<String>,
    /// The software and its version, in place of what the job shows: megatron-core@2024, nemo.
    #[arg(long = "for", value_name = "SOFTWARE")]
    pub made_for: Option<String>,
    /// The measured time of a step.
    #[arg(long, value_name = "TIME", conflicts_with_all = ["log", "trace"])]
    pub measured: Option<String>,
    /// A log of a run of the job, of Megatron-LM, torchtitan or DeepSpeed.
    #[arg(long, value_name = "FILE", conflicts_with = "trace")]
    pub log: Option<PathBuf>,
    /// A trace of a run of the job by PyTorch's profiler, with marked steps.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// The price of one device for an hour, in any currency.
    #[arg(long, value_name = "PRICE")]
    pub price: Option<String>,
    /// Only predict the job; search for nothing better.
    #[arg(long, conflicts_with = "best")]
    pub no_search: bool,
    /// Where to write the job's own plan, for `inspect`, `explain`, `what-if` and `export`.
    #[arg(short, long)]
    pub output: Option<PathBuf>,
    /// Where to write the plan that the search finds.
    #[arg(long, value_name = "FILE")]
    pub best: Option<PathBuf>,
    /// List all that was found in the file.
    #[arg(short, long, conflicts_with = "json")]
    pub verbose: bool,
    /// Print JSON instead of words.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `solve`.
#[derive(Debug, Args)]
pub struct SolveArgs {
    /// The problem, JSON or gzipped JSON.
    pub instance: PathBuf,
    /// Wall-clock limit in seconds, reading included. The result is what is known by then; so it
    /// is after Ctrl-C.
    #[arg(long)]
    pub time_limit: Option<f64>,
    /// Limit on the amount of work, for results that do not depend on the machine: slices of search
    /// per thread, branch-and-bound nodes and simplex iterations per integer program. The same
    /// seed, threads and limit give the same solution.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub work_limit: Option<u64>,
    /// Number of threads: one proves, the others search.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: u16,
    /// Seed of everything random.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Stop when the bound is within this fraction of the cost; 0 asks for a full proof. A solution
    /// that is not proved best has the status `feasible`, and its gap.
    #[arg(long, default_value_t = 0.0)]
    pub gap: f64,
    /// Where to write the solution: a JSON list with one strategy index per node.
    #[arg(short, long)]
    pub output: Option<PathBuf>,
}

/// Documents with a schema.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Document {
    /// A plan, which `compile` writes.
    Plan,
    /// A measurement, which `run` writes.
    Run,
    /// A cluster, which `calibrate` writes and `compile --cluster` reads.
    Cluster,
}

/// Arguments of `doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// The plan that was run.
    pub plan: PathBuf,
    /// The folder of the run's records: that of `run --record`, or the one beside its output, as
    /// run.records.
    pub folder: PathBuf,
    /// Print JSON instead of words.
    #[arg(long)]
    pub json: bool,
}

/// The verbs of `checkpoint`.
#[derive(Debug, Subcommand)]
pub enum CheckpointVerb {
    /// Show step, plan, place in the data, states and shards, by the manifests alone.
    #[command(after_help = format!("Examples:\n  meshwright checkpoint inspect state\n  meshwright checkpoint inspect state/0002-step-120 --verbose\n\n{EXIT_CODES}"))]
    Inspect(LookArgs),
    /// Compare every shard with its hash, and name what is damaged (exit code 5).
    #[command(after_help = format!("Example:\n  meshwright checkpoint verify state\n\n{EXIT_CODES}"))]
    Verify(LookArgs),
    /// Write the newest that is whole in another form: its weights as a folder that transformers
    /// loads, or all of it as a distributed checkpoint of PyTorch; or make a checkpoint of one of
    /// those.
    #[command(after_help = format!("Examples:\n  meshwright checkpoint convert state --config models/gpt2 -o gpt2-trained\n  meshwright checkpoint convert state --to dcp -o for-pytorch\n  meshwright checkpoint convert from-pytorch --plan plan.json -o state\n\n{EXIT_CODES}"))]
    Convert(ConvertArgs),
}

/// Arguments of `checkpoint inspect` and `checkpoint verify`.
#[derive(Debug, Args)]
pub struct LookArgs {
    /// The folder of `run --checkpoint`, or one of the checkpoints in it.
    pub path: PathBuf,
    /// List all states.
    #[arg(short, long, conflicts_with = "json")]
    pub verbose: bool,
    /// Print JSON instead of words.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `checkpoint convert`.
#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// The folder of `run --checkpoint`, or one of the checkpoints in it; or a folder that
    /// torch.distributed.checkpoint wrote.
    pub path: PathBuf,
    /// The form to write: weights for transformers, or all states for
    /// torch.distributed.checkpoint.
    #[arg(long, value_name = "FORM", default_value = "transformers")]
    pub to: FormArg,
    /// The model that was trained, for names of transformers: its config.json or the folder of
    /// that, or the name of one that is built in.
    #[arg(long, value_name = "MODEL")]
    pub config: Option<PathBuf>,
    /// Begin the names of tensors so, for torch.distributed.checkpoint: `model.`.
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        hide_default_value = true
    )]
    pub prefix: String,
    /// The plan to go on under, of PyTorch's checkpoint: its states are the tensors that are read.
    #[arg(long, value_name = "PLAN", conflicts_with_all = ["config", "to", "force", "prefix"])]
    pub plan: Option<PathBuf>,
    /// The steps done, of PyTorch's checkpoint, where its tensor `meshwright.step` does not say it.
    #[arg(long, value_name = "N", requires = "plan")]
    pub step: Option<u64>,
    /// The folder that gets model.safetensors and config.json; a folder to make for
    /// torch.distributed.checkpoint; or that of checkpoints, which gets another one.
    #[arg(short, long, value_name = "DIR")]
    pub output: PathBuf,
    /// Replace model.safetensors and config.json where they are there already. Other verbs replace
    /// what they wrote before; weights may be all that is left of a training.
    #[arg(long)]
    pub force: bool,
    /// Print JSON instead of words.
    #[arg(long)]
    pub json: bool,
}

/// The forms that a checkpoint can be written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FormArg {
    /// model.safetensors and config.json, as Hugging Face's transformers load them.
    Transformers,
    /// A folder as torch.distributed.checkpoint writes it.
    Dcp,
}

/// Arguments of `schema`.
#[derive(Debug, Args)]
pub struct SchemaArgs {
    /// The document.
    #[arg(default_value = "plan")]
    pub document: Document,
}

/// Arguments of `models`.
#[derive(Debug, Args)]
pub struct ModelsArgs {
    /// A model to print as a config.json, from which to start one's own.
    pub name: Option<String>,
    /// Print JSON instead of words.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `presets`.
#[derive(Debug, Args)]
pub struct PresetsArgs {
    /// A preset or composition to print as a cluster file, from which to start one's own.
    pub name: Option<String>,
    /// Print JSON instead of words.
    #[arg(long)]
    pub json: bool,
}
