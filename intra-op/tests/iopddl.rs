//! The file form: what is read, what is written, and what is refused where.

#![allow(clippy::unwrap_used)] // A test may stop at what it does not expect.

use std::io::Write;

use intra_op::{
    Cost, SolveOptions, evaluate, read_problem, read_solution, solve, write_problem, write_solution,
};

/// The example of the benchmark's own repository (google/iopddl).
const EXAMPLE: &str = r#"{"problem": {"name": "example",
  "nodes": {
    "intervals": [[30, 70], [40, 70], [50, 120], [110, 140], [110, 150]],
    "costs": [[15], [55, 65], [25, 45, 35], [85, 75], [95]],
    "usages": [[10], [25, 25], [15, 20, 15], [10, 10], [15]]},
  "edges": {
    "nodes": [[0, 1], [0, 2], [1, 3], [2, 4], [3, 4]],
    "costs": [[30, 40], [50, 10, 40], [90, 10, 20, 80], [60, 20, 30], [70, 60]]},
  "usage_limit": 50}}"#;

#[test]
fn the_example_costs_what_its_authors_say() {
    let problem = read_problem(EXAMPLE.as_bytes()).unwrap();
    let value = evaluate(&problem, &[0, 0, 2, 1, 0]).unwrap();
    // Nodes, then edges; iopddl_test.cc has 15+55+35+75+95 + 30+40+10+30+60.
    let nodes = 15 + 55 + 35 + 75 + 95;
    let edges = 30 + 40 + 10 + 30 + 60;
    assert_eq!(value.objective, Some(nodes + edges));
    assert_eq!(
        (value.peak_usage, value.peak_time),
        (10 + 25 + 15, Some(50))
    );
    assert!(value.feasible);
    let best = solve(&problem, &SolveOptions::default()).unwrap();
    assert_eq!(best.objective, Some(nodes + edges));
    assert_eq!(best.choice, Some(vec![0, 0, 2, 1, 0]));
}

/// As the contest's checker counts: a node is live at `lo <= t < hi`, so never if `hi <= lo`.
#[test]
fn an_interval_that_ends_before_it_starts_uses_nothing() {
    let text = EXAMPLE.replacen("[40, 70]", "[70, 40]", 1);
    let mut problem = read_problem(text.as_bytes()).unwrap();
    // Without node 1's 25 bytes at time 50 the peak is at 110: nodes 2, 3 and 4.
    let value = evaluate(&problem, &[0, 0, 2, 1, 0]).unwrap();
    let peak = 15 + 10 + 15;
    assert_eq!((value.peak_usage, value.peak_time), (peak, Some(110)));
    let cost = 15 + 55 + 35 + 75 + 95 + 30 + 40 + 10 + 30 + 60;
    assert_eq!(value.objective, Some(cost));
    // The solver counts the same: so many bytes are enough for that choice.
    problem.usage_limit = Some(peak as u64);
    let best = solve(&problem, &SolveOptions::default()).unwrap();
    assert_eq!((best.objective, best.peak_usage), (Some(cost), Some(peak)));
}

#[test]
fn what_is_written_reads_back_the_same() {
    let mut problem = read_problem(EXAMPLE.as_bytes()).unwrap();
    problem.nodes[1].costs[0] = Cost::FORBIDDEN;
    problem.name = "quotes \" and \n".into();
    let mut text = Vec::new();
    write_problem(&problem, &mut text).unwrap();
    assert_eq!(read_problem(text.as_slice()).unwrap(), problem);
    problem.usage_limit = None;
    let mut zipped = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    write_problem(&problem, &mut zipped).unwrap();
    zipped.flush().unwrap();
    let zipped = zipped.finish().unwrap();
    assert_eq!(read_problem(zipped.as_slice()).unwrap(), problem);
    problem.nodes[0].costs[0] = Cost::finite(1_000_000_000_000_000_000);
    assert!(write_problem(&problem, Vec::new()).is_err());
}

#[test]
fn solutions_read_back_the_same() {
    let mut text = Vec::new();
    write_solution(&[3, 0, 17], &mut text).unwrap();
    assert_eq!(text, b"[3,0,17]\n");
    assert_eq!(read_solution(text.as_slice()).unwrap(), [3, 0, 17]);
    assert!(read_solution("[-1]".as_bytes()).is_err());
}

#[test]
fn ten_to_the_eighteen_and_more_is_forbidden() {
    for (text, forbidden) in [
        ("999999999999999999", false),
        ("1000000000000000000", true),
        ("18446744073709551615", true),
        ("100000000000000000000000000000", true),
    ] {
        let problem =
            read_problem(EXAMPLE.replace("[[15],", &format!("[[{text}],")).as_bytes()).unwrap();
        assert_eq!(
            problem.nodes[0].costs[0].is_forbidden(),
            forbidden,
            "{text}"
        );
    }
}

#[test]
fn malformed_files_are_refused_with_the_place() {
    let refused = |from: &str, to: &str| {
        assert!(EXAMPLE.contains(from), "{from}");
        let text = EXAMPLE.replacen(from, to, 1);
        read_problem(text.as_bytes()).expect_err(to).to_string()
    };
    let says = |from: &str, to: &str, place: &str, what: &str| {
        let why = refused(from, to);
        assert!(why.contains(place) && why.contains(what), "{to}: {why}");
    };
    says(
        "[55, 65]",
        "[55, 65, 1]",
        "problem.nodes.costs[1]",
        "has 3 entries but usages[1] has 2",
    );
    says(
        "[55, 65]",
        "[]",
        "problem.nodes.costs[1]",
        "has no strategies",
    );
    says("[55, 65]", "[55, -65]", "problem.nodes.costs[1][1]", "-65");
    says("[55, 65]", "[55, 6.5]", "problem.nodes.costs[1][1]", "6.5");
    says(
        "[55, 65]",
        "[55, 1e18]",
        "problem.nodes.costs[1][1]",
        "floating point",
    );
    says(
        "[55, 65]",
        "[55, null]",
        "problem.nodes.costs[1][1]",
        "null",
    );
    says(
        "[55, 65]",
        "[55, \"65\"]",
        "problem.nodes.costs[1][1]",
        "string",
    );
    says("[55, 65]", "55", "problem.nodes.costs[1]", "integer `55`");
    says("[55, 65]", "[NaN]", "expected", "line 4");
    says("[55, 65]", "[1e999]", "number out of range", "line 4");
    says(
        "[25, 25]",
        "[25, 99999999999999999999]",
        "problem.nodes.usages[1][1]",
        "non-negative 64-bit",
    );
    says(
        "[25, 25]",
        "[25, null]",
        "problem.nodes.usages[1][1]",
        "null",
    );
    says(
        "[40, 70]",
        "[40, 70, 80]",
        "problem.nodes.intervals[1]",
        "has 3 entries but must have 2",
    );
    says(
        "[40, 70]",
        "[-40, 70]",
        "problem.nodes.intervals[1][0]",
        "-40",
    );
    says(
        "[40, 70], ",
        "",
        "problem.nodes.costs",
        "has 5 entries but intervals has 4",
    );
    says(
        "[1, 3]",
        "[1, 5]",
        "problem.edges.nodes[2]",
        "names node 5 but there are 5 nodes",
    );
    says(
        "[1, 3]",
        "[1, 18446744073709551615]",
        "problem.edges.nodes[2]",
        "there are 5 nodes",
    );
    says(
        "[1, 3]",
        "[1, 3, 4]",
        "problem.edges.nodes[2]",
        "must have 2",
    );
    let cells = "has 3 entries but nodes 1 and 3 have 2 x 2 strategies";
    says(
        "[90, 10, 20, 80]",
        "[90, 10, 20]",
        "problem.edges.costs[2]",
        cells,
    );
    says(
        ", [70, 60]",
        "",
        "problem.edges.costs",
        "has 4 entries but edges.nodes has 5",
    );
    says(
        "\"usage_limit\": 50",
        "\"usage_limit\": -50",
        "problem.usage_limit",
        "-50",
    );
    says(
        "\"usage_limit\": 50",
        "\"name\": \"again\"",
        "problem.name",
        "given twice",
    );
    says(
        "\"usages\"",
        "\"used\"",
        "problem.nodes.usages",
        "is missing",
    );
    says(
        "\"problem\"",
        "\"problems\"",
        "problem.nodes.intervals",
        "is missing",
    );
    says(
        "{\"problem\"",
        "[1] {\"problem\"",
        "expected an object",
        "line 1",
    );
    says("50}}", "50}} x", "trailing", "line");
    says("50}}", "50}", "EOF", "line");
}

#[test]
fn broken_gzip_is_refused() {
    assert!(read_problem([0x1f, 0x8b, 8, 0, 0, 0].as_slice()).is_err());
    assert!(read_problem([].as_slice()).is_err());
    assert!(read_problem([0xff; 100].as_slice()).is_err());
}
