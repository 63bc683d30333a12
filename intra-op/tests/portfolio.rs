//! The solver as a whole: threads, limits and interruption.

#![allow(clippy::unwrap_used)] // A test may stop where it likes.

mod problems;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use intra_op::{IlpBackend, IntraOpProblem, SolveOptions, SolveStatus, evaluate, solve};
use problems::grid;

fn is_valid(problem: &IntraOpProblem, result: &intra_op::SolveResult) {
    let value = evaluate(problem, result.choice.as_ref().unwrap()).unwrap();
    assert!(value.feasible);
    assert_eq!(value.objective, result.objective);
    assert!(result.lower_bound <= result.objective.unwrap());
    let times = result.trace.windows(2);
    for pair in times.filter(|p| p[0].objective.is_some()) {
        assert!(pair[0].seconds <= pair[1].seconds, "{:?}", result.trace);
        assert!(pair[0].objective >= pair[1].objective, "costs fall");
        assert!(pair[0].lower_bound <= pair[1].lower_bound, "bounds rise");
    }
}

#[test]
fn threads_with_a_work_limit_give_one_result() {
    let problem = grid(5, 1);
    for threads in [1, 3] {
        let options = SolveOptions {
            work_limit: Some(2),
            max_ilp_columns: 100,
            threads,
            seed: 7,
            ..SolveOptions::default()
        };
        let first = solve(&problem, &options).unwrap();
        is_valid(&problem, &first);
        // Other work at the same time changes who is first, and must not change the result.
        let stop = AtomicBool::new(false);
        let second = std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            let second = solve(&problem, &options).unwrap();
            stop.store(true, Ordering::Relaxed);
            second
        });
        assert_eq!(first.choice, second.choice, "{threads} threads");
        assert_eq!(first.lower_bound, second.lower_bound, "{threads} threads");
        assert_eq!(first.status, second.status, "{threads} threads");
    }
}

#[test]
fn threads_reach_the_optimum_that_one_thread_proves() {
    let problem = grid(5, 2);
    let one = solve(&problem, &SolveOptions::default()).unwrap();
    assert_eq!(one.status, SolveStatus::Optimal, "{:?}", one.trace);
    for threads in [2, 4] {
        let options = SolveOptions {
            threads,
            time_limit: Some(Duration::from_secs(120)),
            ..SolveOptions::default()
        };
        let found = solve(&problem, &options).unwrap();
        assert_eq!(found.status, SolveStatus::Optimal, "{:?}", found.trace);
        assert_eq!(found.objective, one.objective);
    }
}

#[test]
fn a_time_limit_holds() {
    let problem = grid(40, 3);
    for (threads, seconds) in [(1, 1.0), (2, 2.0)] {
        let limit = Duration::from_secs_f64(seconds);
        let options = SolveOptions {
            time_limit: Some(limit),
            threads,
            ..SolveOptions::default()
        };
        let begun = Instant::now();
        let result = solve(&problem, &options).unwrap();
        // Presolve and the final check are not interrupted, and machines are busy.
        assert!(begun.elapsed() < limit + Duration::from_secs(1));
        assert!(matches!(
            result.status,
            SolveStatus::Feasible { .. } | SolveStatus::Timeout
        ));
        if result.choice.is_some() {
            is_valid(&problem, &result);
        }
    }
    // The limit counts from when the caller says: here it is over before it begins.
    let options = SolveOptions {
        time_limit: Some(Duration::from_millis(50)),
        start: Instant::now().checked_sub(Duration::from_secs(1)),
        ..SolveOptions::default()
    };
    let result = solve(&problem, &options).unwrap();
    assert!(matches!(
        result.status,
        SolveStatus::Feasible { .. } | SolveStatus::Timeout
    ));
}

#[test]
fn a_request_to_stop_gives_what_is_known() {
    let problem = grid(40, 4);
    let cancel = Arc::new(AtomicBool::new(false));
    let options = SolveOptions {
        cancel: Some(Arc::clone(&cancel)),
        threads: 2,
        ..SolveOptions::default()
    };
    let stopper = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(3));
        cancel.store(true, Ordering::Relaxed);
        Instant::now()
    });
    let result = solve(&problem, &options).unwrap();
    let asked = stopper.join().unwrap();
    assert!(asked.elapsed() < Duration::from_secs(3));
    assert!(matches!(result.status, SolveStatus::Feasible { .. }));
    is_valid(&problem, &result);
}

/// A grid of 196 nodes whose integer program would run for minutes at its root.
#[cfg(feature = "highs")]
#[test]
fn a_work_limit_holds_back_integer_programs_that_it_cannot_pay() {
    let problem = grid(14, 1);
    let solved = |problem: &IntraOpProblem, work_limit| {
        let options = SolveOptions {
            work_limit: Some(work_limit),
            ..SolveOptions::default()
        };
        let result = solve(problem, &options).unwrap();
        is_valid(problem, &result);
        let notes: Vec<String> = result
            .trace
            .iter()
            .filter(|t| t.phase == "ilp")
            .map(|t| t.note.clone())
            .collect();
        (result, notes)
    };
    for work_limit in [1, 3] {
        let (first, notes) = solved(&problem, work_limit);
        let (second, again) = solved(&problem, work_limit);
        assert_eq!(notes, again);
        assert_eq!(first.choice, second.choice);
        assert_eq!(first.lower_bound, second.lower_bound);
        let held_back = |n: &String| n.starts_with("stopped by the work limit");
        assert!(
            !notes.is_empty() && notes.iter().all(held_back),
            "{notes:?}"
        );
    }
    // One that it can pay is solved to the end.
    let (small, notes) = solved(&grid(4, 6), 20);
    assert_eq!(small.status, SolveStatus::Optimal, "{notes:?}");
}

/// How many fresh starts and parts a search made, and how many helped, from its notes.
fn starts(result: &intra_op::SolveResult) -> (u64, u64) {
    let of_note = |note: &str| {
        let words: Vec<&str> = note.split(' ').collect();
        let number = |i: usize| words[i].parse::<u64>().unwrap();
        (number(4), number(2))
    };
    let searches = result.trace.iter().filter(|t| t.phase == "search");
    searches.fold((0, 0), |(made, helped), t| {
        let (more, better) = of_note(&t.note);
        (made + more, helped + better)
    })
}

#[test]
fn fresh_starts_help_and_repeat() {
    let (mut n_made, mut n_helped) = (0, 0);
    for seed in 0..4 {
        let problem = grid(9, 10 + seed);
        let options = |work_limit| SolveOptions {
            work_limit: Some(work_limit),
            backend: IlpBackend::None,
            seed,
            ..SolveOptions::default()
        };
        let found = solve(&problem, &options(12)).unwrap();
        is_valid(&problem, &found);
        let (made, helped) = starts(&found);
        assert!(helped <= made);
        (n_made, n_helped) = (n_made + made, n_helped + helped);
        let again = solve(&problem, &options(12)).unwrap();
        assert_eq!(
            (found.choice, starts(&again)),
            (again.choice, (made, helped))
        );
        // The choice of a start is taken over only where it pays.
        let before = solve(&problem, &options(1)).unwrap();
        assert!(found.objective <= before.objective);
    }
    assert!(n_made > 8 && n_helped > 0, "{n_helped} of {n_made} helped");
}

#[test]
fn a_request_to_stop_before_the_beginning_gives_a_valid_answer() {
    let problem = grid(6, 5);
    let options = |cancelled| SolveOptions {
        cancel: Some(Arc::new(AtomicBool::new(cancelled))),
        work_limit: Some(5),
        ..SolveOptions::default()
    };
    let stopped = solve(&problem, &options(true)).unwrap();
    let whole = solve(&problem, &options(false)).unwrap();
    assert!(stopped.lower_bound <= whole.objective.unwrap());
    match stopped.choice {
        Some(_) => is_valid(&problem, &stopped),
        None => assert_eq!(stopped.status, SolveStatus::Timeout),
    }
}

#[test]
fn within_the_gap_is_not_called_optimal() {
    let problem = grid(5, 2);
    let best = solve(&problem, &SolveOptions::default()).unwrap();
    assert_eq!(best.status, SolveStatus::Optimal);
    let mut n_open = 0;
    for gap in [0.5, 0.1, 0.01] {
        let options = SolveOptions {
            gap,
            ..SolveOptions::default()
        };
        let found = solve(&problem, &options).unwrap();
        is_valid(&problem, &found);
        assert!(found.gap.unwrap() <= gap);
        assert!(found.lower_bound <= best.objective.unwrap());
        assert!(found.objective >= best.objective);
        let closed = Some(found.lower_bound) == found.objective;
        assert_eq!(found.status == SolveStatus::Optimal, closed);
        n_open += usize::from(!closed);
    }
    assert!(n_open > 0, "a gap of one half is reached before a proof");
}
