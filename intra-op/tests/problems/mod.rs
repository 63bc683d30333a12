//! Problems for tests, and the least cost by enumeration.

#![allow(dead_code)] // Each test uses a part.

use std::sync::Arc;

use intra_op::{
    Cost, Edge, IlpBackend, IntraOpProblem, Node, SolveOptions, Table, evaluate, solve,
};

/// SplitMix64 (Steele, Lea & Flood 2014).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

pub fn random_cost(random: &mut Random, forbidden_of_ten: u64, most: u64) -> Cost {
    if random.below(10) < forbidden_of_ten {
        Cost::FORBIDDEN
    } else {
        Cost::finite(random.below(most))
    }
}

/// Ties, parallel edges, loops, empty intervals, forbidden entries, and limits from generous
/// to impossible.
pub fn random_problem(random: &mut Random) -> IntraOpProblem {
    let n = 1 + random.below(7);
    let most = [2, 5, 100, 1_000_000_000][random.below(4) as usize];
    let forbidden = random.below(4);
    let nodes: Vec<Node> = (0..n)
        .map(|_| {
            let k = 1 + random.below(4);
            let from = random.below(8);
            Node {
                costs: (0..k)
                    .map(|_| random_cost(random, forbidden / 2, most))
                    .collect(),
                usages: (0..k).map(|_| random.below(30)).collect(),
                interval: [from, from + random.below(6)],
            }
        })
        .collect();
    let n_edges = random.below(2 * n + 1);
    let edges = (0..n_edges).map(|_| {
        let (a, b) = (random.below(n) as u32, random.below(n) as u32);
        let (rows, cols) = (nodes[a as usize].costs.len(), nodes[b as usize].costs.len());
        let tie = random.below(4) == 0;
        let shift = random.below(4) as usize;
        let cells: Vec<Cost> = (0..rows * cols)
            .map(|cell| match tie {
                true if (cell / cols + shift) % cols != cell % cols => Cost::FORBIDDEN,
                _ => random_cost(random, forbidden, most),
            })
            .collect();
        let table = Arc::new(Table::new(rows, cols, cells).unwrap());
        Edge { a, b, table }
    });
    let edges = edges.collect();
    let usage_limit = (random.below(5) > 0).then(|| random.below(25 * n));
    IntraOpProblem {
        name: "random".into(),
        nodes,
        edges,
        usage_limit,
    }
}

pub fn for_each_choice(sizes: &[usize], mut visit: impl FnMut(&[u32])) {
    let mut choice = vec![0u32; sizes.len()];
    loop {
        visit(&choice);
        let Some(v) = (0..sizes.len()).rfind(|&v| (choice[v] as usize) + 1 < sizes[v]) else {
            return;
        };
        choice[v] += 1;
        choice[v + 1..].fill(0);
    }
}

pub fn brute_force(problem: &IntraOpProblem) -> Option<u128> {
    let sizes: Vec<usize> = problem.nodes.iter().map(|n| n.costs.len()).collect();
    let mut best = None;
    for_each_choice(&sizes, |choice| {
        let value = evaluate(problem, choice).unwrap();
        if value.feasible && best.is_none_or(|b| value.objective < Some(b)) {
            best = value.objective;
        }
    });
    best
}

/// A ladder of `n` rungs with long-lived and short-lived memory, too wide to enumerate.
pub fn ladder(n: u32, seed: u64) -> IntraOpProblem {
    let mut random = Random(seed);
    let node = |random: &mut Random, v: u64| {
        let long = random.below(4) == 0;
        let sizes: Vec<u64> = (0..4).map(|_| random.below(100)).collect();
        Node {
            costs: sizes
                .iter()
                .map(|s| Cost::finite(110 - s + random.below(10)))
                .collect(),
            usages: sizes,
            interval: [v, if long { 100 } else { v + 2 }],
        }
    };
    let nodes: Vec<Node> = (0..2 * n)
        .map(|v| node(&mut random, u64::from(v / 2)))
        .collect();
    let mut table = || {
        let cell = |random: &mut Random| random_cost(random, 2, 60);
        let cells: Vec<Cost> = (0..16).map(|_| cell(&mut random)).collect();
        Arc::new(Table::new(4, 4, cells).unwrap())
    };
    let mut edges = Vec::new();
    for i in 0..n {
        edges.push(Edge {
            a: 2 * i,
            b: 2 * i + 1,
            table: table(),
        });
        if i + 1 < n {
            edges.push(Edge {
                a: 2 * i,
                b: 2 * i + 2,
                table: table(),
            });
            edges.push(Edge {
                a: 2 * i + 1,
                b: 2 * i + 3,
                table: table(),
            });
        }
    }
    IntraOpProblem {
        name: "ladder".into(),
        nodes,
        edges,
        usage_limit: Some(30 * u64::from(n)),
    }
}

/// A grid of `n x n` nodes under memory pressure: too wide to eliminate, hard to prove.
pub fn grid(n: u32, seed: u64) -> IntraOpProblem {
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
