//! Generates instances of a given size: layers of tied and untied nodes, as compilers dump them.
//!
//! A chain of blocks; in a block every node is joined to the one before it and some to an
//! earlier one, by one of a few tables; memory is live for a while, or from a block to its
//! mirror image (saved for backward).

use clap::Args;
use intra_op::{Cost, Edge, IntraOpProblem, Node, Table, write_problem};
use ir::testing::Rng;
use std::fs::File;
use std::io::BufWriter;
use std::path::PathBuf;
use std::sync::Arc;

#[derive(Args)]
pub struct GenerateArgs {
    /// Where to write the instance.
    output: PathBuf,
    /// Number of nodes.
    #[arg(long, default_value_t = 100_000)]
    nodes: usize,
    /// Approximate number of cells of all edge tables together.
    #[arg(long, default_value_t = 10_000_000)]
    cells: usize,
    /// Seed of the random numbers.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Number of different tables; 0 for one per edge.
    #[arg(long, default_value_t = 0)]
    tables: usize,
}

/// Writes the instance.
pub fn run(args: &GenerateArgs) -> Result<(), String> {
    let problem = problem(args);
    let file = File::create(&args.output).map_err(|e| format!("{}: {e}", args.output.display()))?;
    write_problem(&problem, BufWriter::new(file))
        .map_err(|e| format!("{}: {e}", args.output.display()))
}

fn problem(args: &GenerateArgs) -> IntraOpProblem {
    let mut random = Rng::new(args.seed);
    let n = args.nodes.max(2);
    // Every node has an edge to the one before it, and every fourth node another one.
    let n_edges = n + n / 4;
    let size = ((args.cells as f64 / n_edges as f64).sqrt().round() as usize).max(1);
    let nodes: Vec<Node> = (0..n).map(|v| node(&mut random, v, n, size)).collect();
    let n_tables = if args.tables == 0 {
        n_edges
    } else {
        args.tables
    };
    let shared: Vec<Arc<Table>> = (0..n_tables.min(n_edges))
        .map(|_| table(&mut random, size))
        .collect();
    let mut edges = Vec::with_capacity(n_edges);
    for v in 1..n {
        let mut join = |a: usize| {
            let table = &shared[edges.len() % shared.len()];
            edges.push(Edge {
                a: a as u32,
                b: v as u32,
                table: Arc::clone(table),
            });
        };
        join(v - 1);
        if v.is_multiple_of(4) {
            join(v - 1 - random.below((v as u64).min(40)) as usize);
        }
    }
    // The least peak is that of the smallest strategies; a tenth more is the limit.
    let least = least_peak(&nodes);
    IntraOpProblem {
        name: format!("generated {n} nodes, seed {}", args.seed),
        nodes,
        edges,
        usage_limit: Some(least + least / 10),
    }
}

fn node(random: &mut Rng, v: usize, n: usize, size: usize) -> Node {
    let bytes = 1 << (8 + random.below(12));
    // Strategies that use less memory cost more.
    let usages: Vec<u64> = (0..size as u64)
        .map(|s| bytes * (s + 1) / size as u64 + random.below(64))
        .collect();
    let mut cost = |s: u64| {
        let saved = bytes * (size as u64 - s) / size as u64;
        Cost::finite(saved / 4 + random.below(saved / 2 + 10))
    };
    let costs = (0..size as u64).map(&mut cost).collect();
    let (v, n) = (v as u64, n as u64);
    let interval = match random.below(8) {
        0 => [v, 2 * n - v],
        1 => [v, v],
        _ => [v, v + 1 + random.below(30)],
    };
    Node {
        costs,
        usages,
        interval,
    }
}

fn table(random: &mut Rng, size: usize) -> Arc<Table> {
    // All ties join equal strategies, so that they agree around every circle.
    let tied = random.below(4) == 0;
    let mut cells = Vec::with_capacity(size * size);
    for i in 0..size {
        for j in 0..size {
            cells.push(match (tied, i == j) {
                (true, false) => Cost::FORBIDDEN,
                (_, true) => Cost::ZERO,
                _ => Cost::finite(random.below(100_000)),
            });
        }
    }
    Arc::new(Table::new(size, size, cells).expect("one cell was made per pair"))
}

fn least_peak(nodes: &[Node]) -> u64 {
    let mut changes: Vec<(u64, bool, u64)> = Vec::new();
    for node in nodes.iter().filter(|n| n.interval[0] < n.interval[1]) {
        let least = node.usages.iter().copied().min().unwrap_or(0);
        changes.push((node.interval[0], true, least));
        changes.push((node.interval[1], false, least));
    }
    changes.sort_unstable();
    let (mut level, mut peak) = (0u64, 0);
    for (_, starts, bytes) in changes {
        level = if starts { level + bytes } else { level - bytes };
        peak = peak.max(level);
    }
    peak
}

#[cfg(test)]
mod tests {
    use super::{GenerateArgs, problem};
    use intra_op::{SolveOptions, SolveStatus, solve};

    #[test]
    fn what_is_generated_has_the_size_and_can_be_solved() {
        let args = GenerateArgs {
            output: "unused".into(),
            nodes: 40,
            cells: 800,
            seed: 3,
            tables: 5,
        };
        let problem = problem(&args);
        assert_eq!(problem.nodes.len(), 40);
        let cells: usize = problem.edges.iter().map(|e| e.table.cells().len()).sum();
        assert!((400..1200).contains(&cells), "{cells}");
        let result = solve(&problem, &SolveOptions::default()).expect("a valid problem");
        assert!(!matches!(result.status, SolveStatus::Timeout), "{result:?}");
    }
}
