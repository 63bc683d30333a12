//! Measures the machine: what `cost_model::fit` makes a cluster file from.
//!
//! The probes are instructions of a hand-made program that a [`Session`] plays with
//! instruction timing, so that what is measured is what ranks do, overhead included. One
//! session has a single rank and measures kernels and copies; another one has all ranks and
//! measures how matmuls slow each other down, and collectives. Before each probe its operands are
//! filled with one half, so that they are as warm as a producer leaves them.
//!
//! Points are medians, except `matmul f32 together`: it shows how many processors there are,
//! not how busy they are with other programs, so the fastest repetition counts. What the points
//! are called, and their sizes:
//!
//! | what                    | size                                           |
//! |-------------------------|------------------------------------------------|
//! | `matmul <dtype>`        | m, n, k                                        |
//! | `matmul f32 together`   | m, n, k, ranks at work                         |
//! | `attention f32`         | attention FLOPs (full), vector FLOPs, bytes    |
//! | `vector <op>`           | vector FLOPs, bytes                            |
//! | `convert <dtype>`       | vector FLOPs, bytes, elements converted        |
//! | `copy`                  | bytes                                          |
//! | `launch`                |                                                |
//! | `all_reduce` ...        | bytes, ranks of the group, ranks at work       |

mod probes;

use crate::error::RuntimeError;
use crate::execute::{Session, SessionOptions};
use ir::TrainSpec;
use ir::cluster::MeasuredPoint;
use probes::{Place, Probe, ProgramOfProbes};
use std::time::Instant;

/// What to measure and for how long.
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
/// Share of the time for the session with one rank.
const SINGLE_SHARE: f64 = 0.6;

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
    progress("kernels on one rank");
    let mut single = ProgramOfProbes::new(1, 1);
    single.kernels(options.quick);
    single.together();
    let mut points = play(single, threads, options.seconds * SINGLE_SHARE)?;
    if options.n_ranks > 1 {
        progress(&format!(
            "matmuls and collectives on {} ranks",
            options.n_ranks
        ));
        let mut all = ProgramOfProbes::new(options.n_ranks, options.n_ranks);
        all.together();
        all.collectives(options.quick);
        let pairs = options.n_ranks > 2 && options.n_ranks.is_multiple_of(2);
        let share = if pairs { 0.5 } else { 1.0 } * (1.0 - SINGLE_SHARE);
        points.extend(play(all, threads, options.seconds * share)?);
        if pairs {
            progress("collectives of pairs");
            let mut all = ProgramOfProbes::new(options.n_ranks, 2);
            all.collectives(options.quick);
            points.extend(play(all, threads, options.seconds * share)?);
        }
    }
    Ok(points)
}

/// Plays the probes until `seconds` are over; medians over the plays of means over ranks.
fn play(
    probes: ProgramOfProbes,
    threads: usize,
    seconds: f64,
) -> Result<Vec<MeasuredPoint>, RuntimeError> {
    let (program, probes) = probes.finish();
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
            times.push(match probe.place {
                Place::Instruction(i) => {
                    played
                        .timings
                        .iter()
                        .map(|t| t.instructions[0][i].0)
                        .sum::<f64>()
                        / played.timings.len().max(1) as f64
                }
                Place::Template { divisor } => {
                    played
                        .timings
                        .iter()
                        .map(|t| t.templates[1].0)
                        .fold(0.0, f64::max)
                        / f64::from(divisor)
                }
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
    let median_s = match probe.place {
        Place::Instruction(_) => median(times.clone()),
        Place::Template { .. } => times.iter().copied().fold(f64::INFINITY, f64::min),
    };
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
    fn the_fastest_time_together_counts() {
        let place = Place::Template { divisor: 2 };
        let p = point(
            Probe {
                what: "x".into(),
                size: vec![],
                place,
            },
            vec![3.0, 2.0, 7.0],
        );
        assert_eq!((p.median_s, p.spread_s), (2.0, 1.0));
    }

    #[test]
    fn medians_and_spreads() {
        let p = point(
            Probe {
                what: "x".into(),
                size: vec![],
                place: Place::Instruction(0),
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
            assert_eq!(count("attention f32"), 2);
            assert_eq!((count("matmul bf16"), count("convert bf16")), (6, 5));
            assert_eq!(count("launch"), 8);
            let together = points.iter().filter(|p| p.what == "matmul f32 together");
            let at_work: Vec<u64> = together.map(|p| p.size[3]).collect();
            assert_eq!(
                at_work,
                if n_ranks > 1 {
                    vec![1, u64::from(n_ranks)]
                } else {
                    vec![1]
                }
            );
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
