//! Measures the machine: what `cost_model::fit` makes a cluster file from.
//!
//! The probes are instructions of a hand-made program that a [`Session`] plays with
//! instruction timing, so that what is measured is what ranks do, overhead included. Kernels and
//! copies are measured on as many ranks as there are processors, so that these share caches and
//! memory as in training; collectives on all ranks; transfers between two. Before each probe its
//! operands are filled with one half, so that they are as warm as a producer leaves them.
//!
//! Points are medians over repetitions of means over ranks, of a rank's time on a processor: what
//! other ranks and other programs take is not in them. Collectives and transfers of no more ranks
//! than there are processors are measured on the clock, with the time to wake up. What the points
//! are called, and their sizes:
//!
//! | what                    | size                                           |
//! |-------------------------|------------------------------------------------|
//! | `matmul <dtype>`        | m, n, k                                        |
//! | `attention f32`         | attention FLOPs (full), vector FLOPs, bytes,   |
//! | `attention_grad f32`    | query rows, key rows, elements per head        |
//! | `vector <kernel>`       | vector FLOPs, bytes                            |
//! | `convert <dtype>`       | vector FLOPs, bytes, elements converted        |
//! | `copy`                  | bytes                                          |
//! | `launch`                |                                                |
//! | `all_reduce` ...        | bytes, ranks of the group, ranks at work       |
//! | `send`                  | bytes                                          |
//! | `to host`               | bytes that each of the working ranks copies    |
//! | `write`                 | bytes to a file in the current folder          |

mod host;
mod probes;
mod transfers;

use crate::error::RuntimeError;
use crate::execute::{RankTimings, Session, SessionOptions};
use ir::TrainSpec;
use ir::cluster::MeasuredPoint;
use ir::program::Program;
use probes::{Place, Probe, ProgramOfProbes};
use std::time::Instant;
use transfers::transfers;

/// The measurements to make, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct CalibrateOptions {
    /// Ranks that will share the machine.
    pub n_ranks: u32,
    /// Fewer and smaller probes.
    pub quick: bool,
    /// Seconds that measuring may take, about.
    pub seconds: f64,
}

impl Default for CalibrateOptions {
    /// Four ranks, all probes, 20 seconds.
    fn default() -> Self {
        CalibrateOptions {
            n_ranks: 4,
            quick: false,
            seconds: 20.0,
        }
    }
}

/// Fewest and most repetitions of a probe.
const REPETITIONS: (u32, u32) = (3, 31);
/// Share of the time for kernels.
const KERNELS_SHARE: f64 = 0.6;

/// The clock that is read for an instruction.
#[derive(Clone, Copy, PartialEq)]
enum Clock {
    /// Time on the clock.
    Wall,
    /// Time on a processor.
    Processor,
}

/// Measures the machine; `progress` is told what comes next.
///
/// Fails when `n_ranks` is zero, or a session fails.
pub fn measure(
    options: CalibrateOptions,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<MeasuredPoint>, RuntimeError> {
    if options.n_ranks == 0 {
        return Err(RuntimeError::Program(
            "calibration needs at least one rank".into(),
        ));
    }
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    // As a session with all ranks shares them.
    let threads = (cores / options.n_ranks as usize).max(1);
    let n_working = options.n_ranks.min(cores as u32).max(1);
    progress(&format!("kernels on {n_working} ranks"));
    let mut kernels = ProgramOfProbes::new(n_working, 1);
    kernels.kernels(options.quick);
    let mut points = play(
        kernels,
        Clock::Processor,
        threads,
        options.seconds * KERNELS_SHARE,
    )?;
    progress("copies to host memory and storage");
    let folder = std::env::current_dir().unwrap_or_else(|_| std::env::temp_dir());
    points.extend(host::host(n_working, options.quick, &folder));
    if options.n_ranks > 1 {
        let clock = match options.n_ranks as usize > cores {
            true => Clock::Processor,
            false => Clock::Wall,
        };
        progress(&format!("collectives on {} ranks", options.n_ranks));
        let mut all = ProgramOfProbes::new(options.n_ranks, options.n_ranks);
        all.collectives(options.quick);
        let pairs = options.n_ranks > 2 && options.n_ranks.is_multiple_of(2);
        let share = if pairs { 0.5 } else { 1.0 } * (1.0 - KERNELS_SHARE);
        points.extend(play(all, clock, threads, options.seconds * share)?);
        let clock_of_two = if cores > 1 {
            Clock::Wall
        } else {
            Clock::Processor
        };
        let sends = transfers(options.quick);
        points.extend(play_probes(
            sends,
            clock_of_two,
            threads,
            0.1 * options.seconds,
        )?);
        if pairs {
            progress("collectives of pairs");
            let mut all = ProgramOfProbes::new(options.n_ranks, 2);
            all.collectives(options.quick);
            points.extend(play(all, clock, threads, options.seconds * share)?);
        }
    }
    Ok(points)
}

/// Plays the probes until `seconds` are over; medians over the plays of means over ranks.
fn play(
    probes: ProgramOfProbes,
    clock: Clock,
    threads: usize,
    seconds: f64,
) -> Result<Vec<MeasuredPoint>, RuntimeError> {
    play_probes(probes.finish(), clock, threads, seconds)
}

fn play_probes(
    (program, probes): (Program, Vec<Probe>),
    clock: Clock,
    threads: usize,
    seconds: f64,
) -> Result<Vec<MeasuredPoint>, RuntimeError> {
    let spec = TrainSpec {
        global_batch: 1,
        sequence: 1,
        ..TrainSpec::default()
    };
    let options = SessionOptions {
        threads_per_rank: Some(threads),
        ..SessionOptions::default()
    };
    let mut session = Session::new(&program, &spec, options, |_| Ok(Vec::new()))?;
    let batch = vec![vec![0, 0]];
    // Page faults and cold caches stay in the first play.
    session.step(&batch, 1e-3, true)?;
    let started = Instant::now();
    let mut times: Vec<Vec<f64>> = vec![Vec::new(); probes.len()];
    for n in 0..REPETITIONS.1 {
        if n >= REPETITIONS.0 && started.elapsed().as_secs_f64() > seconds {
            break;
        }
        let played = session.step(&batch, 1e-3, true)?;
        for (probe, times) in probes.iter().zip(&mut times) {
            times.push({
                let Place {
                    template,
                    instruction,
                } = probe.place;
                let seconds = |t: &RankTimings| {
                    let timing = t.instructions[template][instruction];
                    match clock {
                        Clock::Wall => timing.wall_s,
                        Clock::Processor => timing.busy_s,
                    }
                };
                played.timings.iter().map(seconds).sum::<f64>() / played.timings.len().max(1) as f64
            });
        }
    }
    Ok(probes
        .into_iter()
        .zip(times)
        .map(|(probe, times)| point(probe, times))
        .collect())
}

fn point(probe: Probe, times: Vec<f64>) -> MeasuredPoint {
    let n = times.len() as u32;
    let median_s = median(times.clone());
    let spread_s = median(times.into_iter().map(|t| (t - median_s).abs()).collect());
    MeasuredPoint {
        what: probe.what,
        size: probe.size,
        median_s,
        spread_s,
        n,
    }
}

/// The median; 0 of nothing. Of an even number the mean of the middle two.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[n / 2],
        n => 0.5 * (values[n / 2 - 1] + values[n / 2]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_spreads() {
        let p = point(
            Probe {
                what: "x".into(),
                size: vec![],
                place: Place {
                    template: 0,
                    instruction: 0,
                },
            },
            vec![5.0, 1.0, 2.0, 100.0],
        );
        // Sorted 1 2 5 100; deviations from 3.5 are 2.5 1.5 1.5 96.5.
        assert_eq!((p.median_s, p.spread_s, p.n), (3.5, 2.0, 4));
    }

    #[test]
    fn a_quick_calibration_measures_everything() {
        for n_ranks in [1, 2, 4] {
            let mut told = 0;
            let points = measure(
                CalibrateOptions {
                    n_ranks,
                    quick: true,
                    seconds: 0.1,
                },
                &mut |_| told += 1,
            )
            .unwrap();
            assert!(told > 0);
            assert!(
                points
                    .iter()
                    .all(|p| p.median_s > 0.0 && p.spread_s >= 0.0 && p.n >= REPETITIONS.0),
                "{points:?}"
            );
            let count = |what: &str| points.iter().filter(|p| p.what == what).count();
            assert_eq!(count("matmul f32"), 18);
            assert_eq!(
                (count("attention f32"), count("attention_grad f32")),
                (3, 3)
            );
            assert_eq!(count("send"), if n_ranks > 1 { 2 } else { 0 });
            assert_eq!((count("matmul bf16"), count("convert bf16")), (6, 5));
            assert_eq!(count("launch"), 8);
            // Two sizes over all ranks, and over pairs where those are fewer.
            let groups = [0, 1, 2][(n_ranks as usize).ilog2() as usize];
            assert_eq!(count("all_reduce"), 2 * groups);
            assert_eq!(count("reduce_scatter"), 2 * groups);
        }
        assert!(
            measure(
                CalibrateOptions {
                    n_ranks: 0,
                    ..CalibrateOptions::default()
                },
                &mut |_| ()
            )
            .is_err()
        );
    }
}
