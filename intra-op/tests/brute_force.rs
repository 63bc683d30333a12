//! The intra-op solver, each presolve step and elimination against brute force.

#![allow(clippy::unwrap_used)]

mod problems;

use std::cell::Cell;
use std::sync::Arc;

use intra_op::eliminate::Eliminator;
use intra_op::presolve::{PresolveOptions, Presolved, presolve, presolve_reported};
use intra_op::{
    Cost, Edge, IlpBackend, IntraOpProblem, Node, SolveOptions, SolveStatus, Table, evaluate, solve,
};
use problems::{Random, brute_force, for_each_choice, ladder, random_problem};

fn check_solve(options: &SolveOptions, seed: u64, n_cases: usize) {
    let mut random = Random(seed);
    let (mut n_optimal, mut n_infeasible) = (0, 0);
    for case in 0..n_cases {
        let problem = random_problem(&mut random);
        let expected = brute_force(&problem);
        let found = solve(&problem, options).unwrap();
        match expected {
            Some(least) => {
                n_optimal += 1;
                assert_eq!(
                    found.status,
                    SolveStatus::Optimal,
                    "case {case}: {problem:?}"
                );
                assert_eq!(found.objective, Some(least), "case {case}: {problem:?}");
                assert_eq!(found.lower_bound, least, "case {case}");
                let value = evaluate(&problem, &found.choice.unwrap()).unwrap();
                assert_eq!(
                    (value.objective, value.feasible),
                    (Some(least), true),
                    "case {case}"
                );
            }
            None => {
                n_infeasible += 1;
                let said = matches!(found.status, SolveStatus::Infeasible(_));
                assert!(said, "case {case}: {:?} for {problem:?}", found.status);
            }
        }
    }
    assert!(
        n_optimal > n_cases / 3 && n_infeasible > n_cases / 20,
        "{n_optimal} of {n_cases} have solutions"
    );
}

#[cfg(feature = "highs")]
#[test]
fn solving_equals_brute_force() {
    check_solve(&SolveOptions::default(), 1, 1000);
}

/// The integer program on the whole problem, or on what presolve leaves.
fn integer_program(backend: IlpBackend, presolved: bool) -> SolveOptions {
    let mut options = SolveOptions {
        integer_program_first: true,
        backend,
        ..SolveOptions::default()
    };
    if !presolved {
        options.presolve = only(|_| {});
    }
    options
}

#[cfg(feature = "highs")]
#[test]
fn the_integer_program_equals_brute_force() {
    check_solve(&integer_program(IlpBackend::Highs, false), 2, 1000);
    check_solve(&integer_program(IlpBackend::Highs, true), 3, 1000);
}

#[test]
fn microlp_agrees() {
    check_solve(&integer_program(IlpBackend::Microlp, false), 4, 300);
}

#[cfg(feature = "highs")]
#[test]
fn solving_without_presolve_equals_brute_force() {
    let options = SolveOptions {
        presolve: only(|_| {}),
        ..SolveOptions::default()
    };
    check_solve(&options, 5, 1000);
}

/// No presolve step but what `set` turns on.
fn only(set: impl Fn(&mut PresolveOptions)) -> PresolveOptions {
    let mut options = PresolveOptions::none();
    set(&mut options);
    options
}

fn check_presolve(options: &PresolveOptions, seed: u64) {
    let mut random = Random(seed);
    for case in 0..1000 {
        let problem = random_problem(&mut random);
        let expected = brute_force(&problem);
        let found = match presolve(&problem, options).unwrap() {
            Presolved::Infeasible(_) => None,
            Presolved::Reduced(reduced) => reduced.brute_force().map(|(cost, choice)| {
                let value = evaluate(&problem, &reduced.lift(&choice)).unwrap();
                assert!(
                    value.feasible,
                    "case {case}: the lifted choice fits: {problem:?}"
                );
                assert_eq!(
                    value.objective,
                    Some(u128::from(cost)),
                    "case {case}: {problem:?}"
                );
                u128::from(cost)
            }),
        };
        assert_eq!(found, expected, "case {case}: {problem:?}");
    }
}

#[test]
fn presolve_keeps_an_optimum() {
    check_presolve(&PresolveOptions::default(), 10);
}

#[test]
fn each_presolve_step_keeps_an_optimum() {
    check_presolve(&only(|_| {}), 20);
    check_presolve(&only(|o| o.propagate = true), 21);
    check_presolve(&only(|o| o.minima = true), 22);
    check_presolve(&only(|o| o.ties = true), 23);
    check_presolve(&only(|o| o.fold = true), 24);
    check_presolve(&only(|o| o.dominance = true), 25);
    check_presolve(&only(|o| o.times = true), 26);
    check_presolve(&only(|o| o.follow = true), 29);
    check_presolve(&only(|o| (o.minima, o.follow) = (true, true)), 30);
    check_presolve(&only(|o| (o.propagate, o.ties) = (true, true)), 27);
    check_presolve(
        &only(|o| (o.minima, o.dominance, o.fold) = (true, true, true)),
        28,
    );
}

/// Wherever presolve is stopped, what it leaves has the same optimum.
#[test]
fn a_stop_inside_presolve_loses_nothing() {
    let mut random = Random(31);
    let (mut n_stopped, mut n_smaller) = (0, 0);
    for case in 0..300 {
        let problem = random_problem(&mut random);
        let expected = brute_force(&problem);
        let (mut after, mut whole) = (0, false);
        while !whole {
            let n_asked = Cell::new(0);
            let stop = || n_asked.replace(n_asked.get() + 1) >= after;
            let (presolved, effects) =
                presolve_reported(&problem, &PresolveOptions::default(), &stop).unwrap();
            whole = n_asked.get() <= after;
            n_stopped += usize::from(!whole);
            n_smaller += usize::from(!whole && effects.iter().any(|e| e.strategies > 0));
            let found = match presolved {
                Presolved::Infeasible(_) => None,
                Presolved::Reduced(reduced) => reduced.brute_force().map(|(cost, choice)| {
                    let value = evaluate(&problem, &reduced.lift(&choice)).unwrap();
                    assert!(value.feasible, "case {case} after {after}: {problem:?}");
                    assert_eq!(value.objective, Some(u128::from(cost)), "case {case}");
                    u128::from(cost)
                }),
            };
            assert_eq!(found, expected, "case {case} after {after}: {problem:?}");
            after += 1;
        }
    }
    assert!(
        n_stopped > 2000 && n_smaller > 500,
        "{n_stopped}, {n_smaller}"
    );
}

#[test]
fn elimination_equals_brute_force_for_every_kept_choice() {
    let mut random = Random(30);
    for case in 0..1000 {
        let problem = random_problem(&mut random);
        let n = problem.nodes.len();
        let costs: Vec<Vec<Cost>> = problem.nodes.iter().map(|n| n.costs.clone()).collect();
        let sizes: Vec<usize> = costs.iter().map(Vec::len).collect();
        let mut keep: Vec<u32> = (0..n as u32).filter(|_| random.below(3) == 0).collect();
        if random.below(2) == 0 {
            keep.reverse();
        }
        let eliminator = Eliminator::new(&sizes, &problem.edges, &keep, 1 << 20).unwrap();
        let found = eliminator.run(&costs);
        let kept_sizes: Vec<usize> = keep.iter().map(|&v| sizes[v as usize]).collect();
        let mut cell = 0;
        for_each_choice(&kept_sizes, |kept| {
            let mut least = Cost::FORBIDDEN;
            for_each_choice(&sizes, |choice| {
                if keep
                    .iter()
                    .zip(kept)
                    .all(|(&v, &s)| choice[v as usize] == s)
                {
                    least = least.min(cost_of(&problem, choice));
                }
            });
            assert_eq!(
                found.cost(kept),
                least,
                "case {case}: {problem:?} keeping {keep:?}"
            );
            assert_eq!(found.table()[cell], least, "case {case}");
            cell += 1;
            if !least.is_forbidden() {
                let choice = found.decode(kept);
                assert_eq!(
                    cost_of(&problem, &choice),
                    least,
                    "case {case}: the choice costs that"
                );
                assert!(
                    keep.iter()
                        .zip(kept)
                        .all(|(&v, &s)| choice[v as usize] == s),
                    "case {case}"
                );
            }
        });
        assert_eq!(cell, found.table().len());
    }
}

fn cost_of(problem: &IntraOpProblem, choice: &[u32]) -> Cost {
    let nodes = problem
        .nodes
        .iter()
        .zip(choice)
        .map(|(n, &s)| n.costs[s as usize]);
    let edges = problem.edges.iter().map(|e| {
        let (i, j) = (choice[e.a as usize], choice[e.b as usize]);
        e.table.get(i as usize, j as usize)
    });
    nodes.chain(edges).fold(Cost::ZERO, Cost::plus)
}

#[test]
fn elimination_says_when_it_would_be_too_wide() {
    let sizes = vec![10; 8];
    let table = Arc::new(Table::from_fn(10, 10, |i, j| Cost::finite((i * j) as u64)));
    let pairs = (0..8u32).flat_map(|a| (a + 1..8).map(move |b| (a, b)));
    let edges: Vec<Edge> = pairs
        .map(|(a, b)| Edge {
            a,
            b,
            table: Arc::clone(&table),
        })
        .collect();
    let why = Eliminator::new(&sizes, &edges, &[], 1000).unwrap_err();
    // A clique of eight: the first message alone is over the seven others.
    assert_eq!((why.cells, why.max_cells), (1 + 10_000_000, 1000));
}

#[test]
fn a_chain_is_priced_as_the_sum_written_out() {
    let table = |cells: [u64; 4]| {
        let cells: Vec<Cost> = cells.into_iter().map(Cost::finite).collect();
        Arc::new(Table::new(2, 2, cells).unwrap())
    };
    let node = |costs: [u64; 2], usages: [u64; 2], interval: [u64; 2]| Node {
        costs: costs.into_iter().map(Cost::finite).collect(),
        usages: usages.to_vec(),
        interval,
    };
    let mut problem = IntraOpProblem {
        name: "chain".into(),
        nodes: vec![
            node([1, 10], [8, 2], [0, 2]),
            node([20, 5], [3, 3], [1, 3]),
            node([7, 7], [9, 1], [2, 4]),
        ],
        edges: vec![
            Edge {
                a: 0,
                b: 1,
                table: table([0, 100, 2, 3]),
            },
            Edge {
                a: 1,
                b: 2,
                table: table([4, 6, 1, 50]),
            },
        ],
        usage_limit: None,
    };
    let options = SolveOptions {
        backend: IlpBackend::default(),
        ..SolveOptions::default()
    };
    let free = solve(&problem, &options).unwrap();
    // Strategies 1, 1, 0: nodes 10 + 5 + 7, edges 3 + 1. Levels: 2, 2 + 3, 3 + 9, 9.
    assert_eq!(free.choice, Some(vec![1, 1, 0]));
    assert_eq!(free.objective, Some(10 + 5 + 7 + 3 + 1));
    assert_eq!(free.peak_usage, Some(3 + 9));
    // With 11 bytes node 2 must take its small strategy: with 0, 0 before it, because 1, 0
    // costs 10 + 20 + 7 + 2 + 6 and 1, 1 costs 10 + 5 + 7 + 3 + 50. Levels: 8, 8 + 3, 3 + 1, 1.
    problem.usage_limit = Some(11);
    let tight = solve(&problem, &options).unwrap();
    assert_eq!(tight.choice, Some(vec![0, 0, 1]));
    assert_eq!(tight.objective, Some(1 + 20 + 7 + 6));
    assert_eq!(tight.status, SolveStatus::Optimal);
    // With 3 bytes nothing fits: at time 1 nodes 0 and 1 use at least 2 + 3.
    problem.usage_limit = Some(3);
    let none = solve(&problem, &options).unwrap();
    let SolveStatus::Infeasible(intra_op::presolve::Infeasibility::Memory {
        time: 1,
        by_bytes: 2,
    }) = none.status
    else {
        panic!("{:?}", none.status);
    };
    // A usage far above the limit counts in full: 100 + 3 at time 1.
    problem.nodes[0].usages = vec![100; problem.nodes[0].costs.len()];
    let least = problem.nodes[1].usages.iter().min().unwrap();
    let none = solve(&problem, &options).unwrap();
    let SolveStatus::Infeasible(intra_op::presolve::Infeasibility::Memory { time: 1, by_bytes }) =
        none.status
    else {
        panic!("{:?}", none.status);
    };
    assert_eq!(by_bytes, 100 + least - 3);
}

#[test]
fn evaluation_refuses_what_does_not_belong() {
    let problem = random_problem(&mut Random(5));
    let n = problem.nodes.len();
    assert!(evaluate(&problem, &vec![0; n + 1]).is_err());
    let why = evaluate(&problem, &vec![9; n]).unwrap_err().to_string();
    assert_eq!(
        why,
        format!(
            "the choice picks strategy 9 for node 0, which has {}",
            problem.nodes[0].costs.len()
        )
    );
}

#[test]
fn sums_that_could_overflow_are_refused_and_evaluated() {
    let node = || Node {
        costs: vec![Cost::finite(u64::MAX - 1)],
        usages: vec![u64::MAX],
        interval: [0, u64::MAX],
    };
    let problem = IntraOpProblem {
        nodes: vec![node(), node(), node()],
        usage_limit: Some(u64::MAX),
        ..IntraOpProblem::default()
    };
    let value = evaluate(&problem, &[0, 0, 0]).unwrap();
    assert_eq!(value.objective, Some(3 * u128::from(u64::MAX - 1)));
    assert_eq!(value.peak_usage, 3 * u128::from(u64::MAX));
    assert!(!value.feasible);
    assert!(solve(&problem, &SolveOptions::default()).is_err());
}

#[test]
fn bounds_and_choices_without_an_integer_program_hold() {
    let options = SolveOptions {
        backend: IlpBackend::None,
        work_limit: Some(1),
        ..SolveOptions::default()
    };
    let mut random = Random(40);
    let mut n_found = 0;
    for case in 0..300 {
        let problem = random_problem(&mut random);
        let expected = brute_force(&problem);
        let found = solve(&problem, &options).unwrap();
        match (expected, found.objective) {
            (Some(least), Some(objective)) => {
                n_found += 1;
                assert!(
                    found.lower_bound <= least && least <= objective,
                    "case {case}: {problem:?}"
                );
                let value = evaluate(&problem, &found.choice.unwrap()).unwrap();
                assert_eq!(
                    (value.objective, value.feasible),
                    (Some(objective), true),
                    "case {case}"
                );
                let proved = found.status == SolveStatus::Optimal;
                assert!(!proved || objective == least, "case {case}: {problem:?}");
            }
            (Some(least), None) => {
                assert!(found.lower_bound <= least, "case {case}");
                assert_eq!(
                    found.status,
                    SolveStatus::Timeout,
                    "case {case}: {problem:?}"
                );
            }
            (None, objective) => assert_eq!(objective, None, "case {case}: {problem:?}"),
        }
    }
    assert!(n_found > 150, "{n_found} of 300 found a choice");
}

#[cfg(feature = "highs")]
#[test]
fn two_ways_to_the_optimum_agree_on_ladders() {
    for seed in 0..4 {
        let problem = ladder(12, seed);
        let found = solve(&problem, &SolveOptions::default()).unwrap();
        assert_eq!(
            found.status,
            SolveStatus::Optimal,
            "ladder {seed}: {:?}",
            found.trace
        );
        let again = solve(&problem, &integer_program(IlpBackend::Highs, true)).unwrap();
        assert_eq!(again.status, SolveStatus::Optimal, "ladder {seed}");
        assert_eq!(again.objective, found.objective, "ladder {seed}");
        let bounded = SolveOptions {
            backend: IlpBackend::None,
            work_limit: Some(1),
            ..SolveOptions::default()
        };
        let bounded = solve(&problem, &bounded).unwrap();
        assert!(
            Some(bounded.lower_bound) <= found.objective,
            "ladder {seed}"
        );
        assert!(bounded.objective >= found.objective, "ladder {seed}");
        assert!(
            bounded.gap.unwrap() < 0.1,
            "ladder {seed}: {:?}",
            bounded.trace
        );
    }
}

#[test]
fn the_same_input_gives_the_same_choice() {
    let problem = ladder(30, 9);
    let options = SolveOptions {
        work_limit: Some(2),
        ..SolveOptions::default()
    };
    let first = solve(&problem, &options).unwrap();
    let second = solve(&problem, &options).unwrap();
    assert_eq!(first.choice, second.choice);
    assert_eq!(first.lower_bound, second.lower_bound);
    assert!(first.choice.is_some());
}
