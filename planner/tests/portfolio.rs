//! The solver as a whole: threads, limits and interruption.

#![allow(clippy::unwrap_used)] // A test may stop where it likes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use planner::intra_op::{
    Cost, Edge, IlpBackend, IntraOpProblem, Node, SolveOptions, SolveStatus, Table, evaluate, solve,
};

/// SplitMix64 (Steele, Lea & Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// A grid of `n x n` nodes under memory pressure: too wide to eliminate, hard to prove.
fn grid(n: u32, seed: u64) -> IntraOpProblem {
    let mut random = Random(seed);
    let n_strategies = 5;
    let mut nodes = Vec::new();
    for v in 0..u64::from(n * n) {
        let usages: Vec<u64> = (0..n_strategies).map(|_| random.below(100)).collect();
        let cost = |u: &u64| Cost::finite(1000 - 8 * u);
        nodes.push(Node {
            costs: usages.iter().map(cost).collect(),
            usages,
            interval: [v / 3, v / 3 + 1 + random.below(u64::from(2 * n))],
        });
    }
    let mut edges = Vec::new();
    let mut join = |a: u32, b: u32| {
        let cells: Vec<Cost> = (0..n_strategies * n_strategies)
            .map(|_| match random.below(6) {
                0 => Cost::FORBIDDEN,
                _ => Cost::finite(random.below(1000)),
            })
            .collect();
        let k = n_strategies as usize;
        let table = Arc::new(Table::new(k, k, cells).unwrap());
        edges.push(Edge { a, b, table });
    };
    for i in 0..n {
        for j in 0..n {
            if j + 1 < n {
                join(i * n + j, i * n + j + 1);
            }
            if i + 1 < n {
                join(i * n + j, (i + 1) * n + j);
            }
        }
    }
    let mut problem = IntraOpProblem {
        name: "grid".into(),
        nodes,
        edges,
        usage_limit: None,
    };
    let options = SolveOptions {
        work_limit: Some(1),
        backend: IlpBackend::None,
        ..SolveOptions::default()
    };
    let free = solve(&problem, &options).unwrap();
    problem.usage_limit = free.peak_usage.map(|peak| (peak * 8 / 10) as u64);
    problem
}

fn is_valid(problem: &IntraOpProblem, result: &planner::intra_op::SolveResult) {
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
