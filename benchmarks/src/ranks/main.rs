//! Predicted and measured step time of twelve plans on CPU ranks of this machine.
//!
//! `ranks [OUT.md] [--rounds N]`
//!
//! Three models under four layouts each, on two, four and eight ranks. A round calibrates for
//! every number of ranks and then runs a few steps of every plan, so that both see the machine
//! in the same states; the plans' layouts are fixed by pins. After the last round the clusters
//! are fitted to the points of all rounds, and the predictions of the plans' programs on them
//! are set against the median steps. Steps during which other programs took processors are run
//! again, or left out and counted.

mod busy;
mod report;
mod scene;

use cost_model::compare::{Waterfall, compare, expected_instructions};
use cost_model::fit::{Machine, fit};
use cost_model::{SimulateOptions, StepWork, simulate};
use ir::cluster::{Cluster, MeasuredPoint};
use ir::{Bytes, TrainSpec};
use planner::Planned;
use runtime::calibrate::{CalibrateOptions, measure};
use runtime::execute::{Session, SessionOptions};
use runtime::measure::Recorder;
use scene::Case;
use std::collections::BTreeMap;

/// The default number of rounds.
const ROUNDS: usize = 5;
/// The steps of a plan in a round: not counted, counted, and timed by instruction.
const STEPS: (usize, usize, usize) = (2, 5, 2);
/// The approximate seconds of a calibration.
const CALIBRATION_S: f64 = 3.0;
/// The share of the processors that other programs may take while steps are timed.
const FOREIGN: f64 = 0.04;
/// The times that disturbed steps are tried again.
const TRIES: usize = 3;
/// The memory that the clusters are said to have; the plans here need little.
const MEMORY_BYTES: u64 = 8 << 30;

/// A plan with its measurements.
struct Measured {
    case: Case,
    planned: Planned,
    recorder: Recorder,
    seconds: Vec<f64>,
    disturbed: usize,
}

/// One line of the result.
pub struct Line {
    /// The model and the layout.
    pub name: String,
    /// The number of ranks.
    pub n_ranks: u32,
    /// The predicted seconds of a step.
    pub predicted_s: f64,
    /// The measured seconds, ascending.
    pub measured_s: Vec<f64>,
    /// The number of steps left out.
    pub disturbed: usize,
    /// The causes of the difference.
    pub waterfall: Option<Waterfall>,
}

fn main() {
    if let Err(message) = run(std::env::args().skip(1).collect()) {
        eprintln!("{message}");
        std::process::exit(1);
    }
}

fn run(args: Vec<String>) -> Result<(), String> {
    let (mut out, mut rounds) = (None, ROUNDS);
    let mut args = args.into_iter();
    while let Some(arg) = args.next() {
        if arg == "--rounds" {
            let n = args.next().and_then(|n| n.parse().ok());
            rounds = n.filter(|n| *n > 0).ok_or("--rounds needs a number")?;
        } else {
            out = Some(arg);
        }
    }
    let mut points: BTreeMap<u32, Vec<MeasuredPoint>> = BTreeMap::new();
    let mut all: Vec<Measured> = Vec::new();
    for round in 0..rounds {
        for n_ranks in scene::RANKS {
            eprintln!("round {round}: calibrating {n_ranks} ranks");
            let options = CalibrateOptions {
                n_ranks,
                quick: round > 0,
                seconds: CALIBRATION_S,
            };
            let measured = measure(options, &mut |_| ()).map_err(|e| e.to_string())?;
            points.entry(n_ranks).or_default().extend(measured);
        }
        if round == 0 {
            all = plans(&clusters(&points)?)?;
        }
        for m in &mut all {
            eprintln!("round {round}: {}", m.case.name());
            steps(m)?;
        }
    }
    let clusters = clusters(&points)?;
    let lines = all
        .into_iter()
        .map(|m| line(m, &clusters))
        .collect::<Result<Vec<_>, _>>()?;
    let text = report::report(&lines, &clusters, rounds);
    println!("{text}");
    if let Some(path) = out {
        std::fs::write(&path, text).map_err(|e| format!("{path}: {e}"))?;
    }
    Ok(())
}

/// Fits the clusters that explain all points, by number of ranks.
fn clusters(points: &BTreeMap<u32, Vec<MeasuredPoint>>) -> Result<BTreeMap<u32, Cluster>, String> {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get()) as u32;
    let cluster = |(&n_ranks, points): (&u32, &Vec<MeasuredPoint>)| {
        let machine = Machine {
            cores,
            memory_bytes: Bytes(MEMORY_BYTES),
            n_ranks,
            attention_block_rows: runtime::cpu::attention::BLOCK as u32,
        };
        let fitted = fit(points, &machine).map_err(|e| e.to_string())?;
        Ok((n_ranks, fitted))
    };
    points.iter().map(cluster).collect()
}

fn plans(clusters: &BTreeMap<u32, Cluster>) -> Result<Vec<Measured>, String> {
    let planned = scene::cases()?.into_iter().map(|case| {
        let planned = case.plan(&clusters[&case.n_ranks])?;
        let recorder = Recorder::new(&planned.program, &planned.plan.train, &case.name(), "");
        Ok(Measured {
            case,
            planned,
            recorder,
            seconds: Vec::new(),
            disturbed: 0,
        })
    });
    planned.collect()
}

/// Runs some steps of a plan from its initial state.
fn steps(m: &mut Measured) -> Result<(), String> {
    let (program, spec) = (&m.planned.program, &m.planned.plan.train);
    let initial = runtime::init::from_graph(&m.planned.training, spec.seed);
    let failed = |e: runtime::RuntimeError| format!("{}: {e}", m.case.name());
    let mut session =
        Session::new(program, spec, SessionOptions::default(), initial).map_err(failed)?;
    let batch = batch(spec, m.case.vocab);
    for _ in 0..STEPS.0 {
        session.step(&batch, 1e-3, false).map_err(failed)?;
    }
    for _ in 0..TRIES {
        let before = busy::Busy::now();
        let mut seconds = Vec::with_capacity(STEPS.1);
        for _ in 0..STEPS.1 {
            seconds.push(session.step(&batch, 1e-3, false).map_err(failed)?.seconds);
        }
        if busy::Busy::now().foreign_since(&before) <= FOREIGN {
            m.seconds.extend(seconds);
            break;
        }
        m.disturbed += STEPS.1;
    }
    for step in 0..STEPS.2 {
        let result = session.step(&batch, 1e-3, true).map_err(failed)?;
        m.recorder.step(program, step as u64, 1e-3, &result);
    }
    Ok(())
}

/// A global batch of tokens that look random and are always the same.
fn batch(spec: &TrainSpec, vocab: u64) -> Vec<Vec<u32>> {
    let token = |i: u64| (i.wrapping_mul(6_364_136_223_846_793_005) >> 33) % vocab;
    (0..spec.global_batch)
        .map(|b| {
            let at = b * (spec.sequence + 1);
            (0..=spec.sequence).map(|i| token(at + i) as u32).collect()
        })
        .collect()
}

fn line(m: Measured, clusters: &BTreeMap<u32, Cluster>) -> Result<Line, String> {
    let cluster = &clusters[&m.case.n_ranks];
    let (program, plan) = (&m.planned.program, &m.planned.plan);
    let options = SimulateOptions::new(StepWork::of(&m.planned.training, &plan.train));
    let played = simulate(program, cluster, &options).map_err(|e| e.to_string())?;
    let expected = expected_instructions(program, cluster).map_err(|e| e.to_string())?;
    let mut measured_s = m.seconds;
    measured_s.sort_by(f64::total_cmp);
    let mut measurement = m.recorder.finish(program);
    measurement.step_time_s = ir::Seconds(report::median(&measured_s));
    let compared = compare(&played.prediction, &expected, &measurement);
    Ok(Line {
        name: m.case.name(),
        n_ranks: m.case.n_ranks,
        predicted_s: played.step_time.0,
        measured_s,
        disturbed: m.disturbed,
        waterfall: compared.waterfall,
    })
}
