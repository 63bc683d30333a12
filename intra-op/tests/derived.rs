//! Problems made from others, through the whole solver: what is known about how their optima
//! relate must hold for costs and bounds.
//!
//! An optimum lies between bound and cost, so if the optimum of `b` is at least that of `a`,
//! the bound of `a` is at most the cost of `b`, whether anything was proved or not.

#![allow(clippy::unwrap_used)] // A test may stop where it likes.

mod problems;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use intra_op::{
    Cost, Edge, IntraOpProblem, SolveOptions, SolveResult, SolveStatus, Table, read_problem, solve,
};
use problems::{Random, grid, ladder, random_problem};

/// The cost of a choice that fits, added up without the library's help.
fn cost_of(problem: &IntraOpProblem, choice: &[u32]) -> u128 {
    assert_eq!(choice.len(), problem.nodes.len());
    let value = |cost: Cost| u128::from(cost.value().expect("nothing forbidden is chosen"));
    let mut total = 0;
    let mut change: BTreeMap<u64, i128> = BTreeMap::new();
    for (node, &s) in problem.nodes.iter().zip(choice) {
        total += value(node.costs[s as usize]);
        let [from, to] = node.interval;
        if from < to {
            let usage = i128::from(node.usages[s as usize]);
            *change.entry(from).or_default() += usage;
            *change.entry(to).or_default() -= usage;
        }
    }
    for e in &problem.edges {
        let at = choice[e.a as usize] as usize * e.table.n_cols() + choice[e.b as usize] as usize;
        total += value(e.table.cells()[at]);
    }
    let mut level = 0;
    for (time, by) in change {
        level += by;
        let limit = problem.usage_limit.map_or(i128::MAX, i128::from);
        assert!(level <= limit, "{level} bytes at time {time}");
    }
    total
}

/// Solves, and checks what is said about the result.
fn solved(problem: &IntraOpProblem, options: &SolveOptions) -> SolveResult {
    let result = solve(problem, options).unwrap();
    match (&result.status, &result.choice) {
        (SolveStatus::Optimal | SolveStatus::Feasible { .. }, Some(choice)) => {
            let cost = cost_of(problem, choice);
            assert_eq!(result.objective, Some(cost));
            assert!(result.lower_bound <= cost);
            let proved = result.status == SolveStatus::Optimal;
            assert_eq!(proved, result.lower_bound == cost);
        }
        (SolveStatus::Infeasible(_) | SolveStatus::Timeout, None) => {}
        (status, choice) => panic!("{status:?} with {choice:?}"),
    }
    result
}

fn is_infeasible(result: &SolveResult) -> bool {
    matches!(result.status, SolveStatus::Infeasible(_))
}

fn is_decided(result: &SolveResult) -> bool {
    result.status == SolveStatus::Optimal || is_infeasible(result)
}

/// The optimum of `b` is at least that of `a`; `slack` may be missing.
fn at_least(what: &str, b: &SolveResult, a: &SolveResult, slack: u128) {
    if let Some(cost) = b.objective {
        assert!(!is_infeasible(a), "{what}: only one has a solution");
        let bound = a.lower_bound;
        assert!(cost + slack >= bound, "{what}: {cost} + {slack} < {bound}");
    }
}

fn same(what: &str, a: &SolveResult, b: &SolveResult) {
    at_least(what, a, b, 0);
    at_least(what, b, a, 0);
    if (&a.status, &b.status) == (&SolveStatus::Optimal, &SolveStatus::Optimal) {
        assert_eq!(a.objective, b.objective, "{what}");
    }
}

fn shuffled(n: usize, random: &mut Random) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        order.swap(i, random.below(i as u64 + 1) as usize);
    }
    order
}

fn with_table(e: &Edge, cell: impl Fn(usize, usize) -> Cost) -> Edge {
    let table = Table::from_fn(e.table.n_rows(), e.table.n_cols(), cell);
    Edge {
        table: Arc::new(table),
        ..e.clone()
    }
}

/// Every node's strategies in another order.
fn strategies_permuted(problem: &IntraOpProblem, random: &mut Random) -> IntraOpProblem {
    let mut other = problem.clone();
    let orders: Vec<Vec<usize>> = problem
        .nodes
        .iter()
        .map(|n| shuffled(n.costs.len(), random))
        .collect();
    for (node, order) in other.nodes.iter_mut().zip(&orders) {
        node.costs = order.iter().map(|&s| node.costs[s]).collect();
        node.usages = order.iter().map(|&s| node.usages[s]).collect();
    }
    for e in &mut other.edges {
        let (rows, cols) = (&orders[e.a as usize], &orders[e.b as usize]);
        *e = with_table(e, |i, j| e.table.get(rows[i], cols[j]));
    }
    other
}

/// Nodes and edges in another order, half of the edges the other way round.
fn nodes_permuted(problem: &IntraOpProblem, random: &mut Random) -> IntraOpProblem {
    let mut other = problem.clone();
    let order = shuffled(problem.nodes.len(), random);
    let mut place = vec![0u32; order.len()];
    for (to, &from) in order.iter().enumerate() {
        place[from] = to as u32;
    }
    other.nodes = order.iter().map(|&v| problem.nodes[v].clone()).collect();
    let edges = shuffled(problem.edges.len(), random);
    other.edges = edges.iter().map(|&e| problem.edges[e].clone()).collect();
    for e in &mut other.edges {
        (e.a, e.b) = (place[e.a as usize], place[e.b as usize]);
        if random.below(2) == 0 {
            *e = Edge {
                a: e.b,
                b: e.a,
                table: Arc::new(e.table.transposed()),
            };
        }
    }
    other
}

/// Edges of two or more units apiece become two parallel ones; a node that nothing depends on
/// joins; every strategy of node 0 is there twice.
fn said_otherwise(problem: &IntraOpProblem, random: &mut Random) -> IntraOpProblem {
    let mut other = problem.clone();
    let share = 2 + random.below(3);
    let part = |cost: Cost, keep: bool| match (cost.value(), keep) {
        (None, _) => Cost::FORBIDDEN,
        (Some(cost), true) => Cost::finite(cost / share),
        (Some(cost), false) => Cost::finite(cost - cost / share),
    };
    let halves = |e: &Edge| [true, false].map(|k| with_table(e, |i, j| part(e.table.get(i, j), k)));
    other.edges = problem.edges.iter().flat_map(halves).collect();
    let mut alone = other.nodes[0].clone();
    (alone.costs, alone.usages) = (vec![Cost::ZERO, Cost::finite(3)], vec![0, 0]);
    let n = other.nodes[0].costs.len();
    other.nodes[0].costs.extend_from_within(..);
    other.nodes[0].usages.extend_from_within(..);
    for e in &mut other.edges {
        let rows = if e.a == 0 { 2 * n } else { e.table.n_rows() };
        let cols = if e.b == 0 { 2 * n } else { e.table.n_cols() };
        let (a, b) = (e.table.n_rows(), e.table.n_cols());
        // The costs of a loop off its diagonal are never paid.
        let table = Table::from_fn(rows, cols, |i, j| e.table.get(i % a, j % b));
        e.table = Arc::new(table);
    }
    other.nodes.push(alone);
    other
}

/// Every finite cost grows by up to `most`; by how much the optimum may.
fn jittered(problem: &IntraOpProblem, most: u64, random: &mut Random) -> (IntraOpProblem, u128) {
    let mut other = problem.clone();
    let mut more = |cost: Cost| match cost.value() {
        Some(value) => Cost::finite(value + random.below(most + 1)),
        None => cost,
    };
    for node in &mut other.nodes {
        node.costs.iter_mut().for_each(|cost| *cost = more(*cost));
    }
    for e in &mut other.edges {
        let cells: Vec<Cost> = e.table.cells().iter().map(|&c| more(c)).collect();
        let (rows, cols) = (e.table.n_rows(), e.table.n_cols());
        e.table = Arc::new(Table::new(rows, cols, cells).unwrap());
    }
    let n_terms = (problem.nodes.len() + problem.edges.len()) as u128;
    (other, n_terms * u128::from(most))
}

/// Solves `problem` and what can be made of it, and compares. How many of the eight were
/// decided: proved, or shown to have no solution.
fn check_family(
    name: &str,
    problem: &IntraOpProblem,
    options: &SolveOptions,
    random: &mut Random,
) -> usize {
    let original = solved(problem, options);
    let mut n_decided = usize::from(is_decided(&original));
    let mut solved = |what: &str, other: &IntraOpProblem| {
        let result = solved(other, options);
        n_decided += usize::from(is_decided(&result));
        (format!("{name}, {what}"), result)
    };
    for (what, other) in [
        ("strategies permuted", strategies_permuted(problem, random)),
        ("nodes permuted", nodes_permuted(problem, random)),
        ("said otherwise", said_otherwise(problem, random)),
    ] {
        let (what, result) = solved(what, &other);
        same(&what, &original, &result);
    }
    if let Some(limit) = problem.usage_limit {
        let mut other = problem.clone();
        other.usage_limit = Some(limit + limit / 8 + 1);
        let (what, looser) = solved("a looser limit", &other);
        at_least(&what, &original, &looser, 0);
        other.usage_limit = Some(limit - limit.div_ceil(8));
        let (what, tighter) = solved("a tighter limit", &other);
        at_least(&what, &tighter, &original, 0);
        at_least(&what, &tighter, &looser, 0);
    }
    let largest = problem.nodes.iter().flat_map(|n| &n.costs);
    let largest = largest.filter_map(|c| c.value()).max().unwrap_or(0);
    for most in [1, largest / 20 + 1] {
        let (other, slack) = jittered(problem, most, random);
        let (what, result) = solved("jittered costs", &other);
        at_least(&what, &result, &original, 0);
        at_least(&what, &original, &result, slack);
    }
    n_decided
}

#[test]
fn derived_problems_relate_as_they_must() {
    let mut random = Random(50);
    for case in 0..150 {
        let problem = random_problem(&mut random);
        let name = format!("random {case}");
        let n = check_family(&name, &problem, &SolveOptions::default(), &mut random);
        let of = if problem.usage_limit.is_some() { 8 } else { 6 };
        assert_eq!(n, of, "{name}: all are decided");
    }
}

#[cfg(feature = "highs")]
#[test]
fn derived_problems_relate_where_enumeration_does_not_reach() {
    let mut random = Random(51);
    for seed in 0..2 {
        let problem = ladder(12, seed);
        let name = format!("ladder {seed}");
        let n = check_family(&name, &problem, &SolveOptions::default(), &mut random);
        assert_eq!(n, 8, "{name}: all are decided");
    }
}

#[test]
fn derived_problems_relate_where_little_is_proved() {
    let limited = |threads| SolveOptions {
        work_limit: Some(1),
        threads,
        ..SolveOptions::default()
    };
    let mut random = Random(52);
    for threads in [1, 2] {
        let problem = grid(7, threads);
        let options = limited(threads as usize);
        check_family(&format!("grid {threads}"), &problem, &options, &mut random);
    }
}

fn read(path: &std::path::Path) -> IntraOpProblem {
    let file = std::fs::File::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    read_problem(file).unwrap()
}

#[test]
fn what_derives_from_the_example_relates_as_it_must() {
    let example = "../examples/intra_op/two_matmuls.json";
    let problem = read(&PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(example));
    let mut random = Random(53);
    let n = check_family("example", &problem, &SolveOptions::default(), &mut random);
    assert_eq!(n, 8);
}

/// Where the public instances are at hand, two of them.
#[test]
fn what_derives_from_public_instances_relates_as_it_must() {
    let Some(data) = std::env::var_os("MESHWRIGHT_DATA") else {
        return println!("skipped: MESHWRIGHT_DATA is not set");
    };
    let options = SolveOptions {
        work_limit: Some(2),
        ..SolveOptions::default()
    };
    let mut random = Random(54);
    for instance in ["G", "A"] {
        let file = format!("iopddl/asplos-2025-iopddl-{instance}.json.gz");
        let problem = read(&PathBuf::from(&data).join(file));
        check_family(instance, &problem, &options, &mut random);
    }
}
