//! The limits of an integer program, by counting what a backend is asked and what it takes.

use std::cell::{Cell, RefCell};

use super::super::problem::{Cost, Table};
use super::super::reduced::{MemoryTerm, ReducedNode};
use super::*;

thread_local! {
    /// The limits of every call, with the rows of its model.
    static CALLS: RefCell<Vec<(usize, Limits)>> = const { RefCell::new(Vec::new()) };
    /// The iterations that a fake relaxation takes.
    static TAKES: Cell<u64> = const { Cell::new(0) };
}

/// Makes a ring of `n` nodes with odd parity costs, whose relaxation is fractional. Half of what it
/// would use fits.
fn ring(n: u32) -> Reduced {
    let node = |v: u32| ReducedNode {
        costs: vec![Cost::finite(1), Cost::finite(u64::from(v % 7))],
        memory: vec![MemoryTerm {
            from: 0,
            to: 1,
            usage: vec![0, 1],
        }],
    };
    let table = Arc::new(Table::from_fn(2, 2, |i, j| {
        Cost::finite(if i == j { 10 } else { 0 })
    }));
    Reduced {
        nodes: (0..n).map(node).collect(),
        edges: (0..n)
            .map(|v| Edge {
                a: v,
                b: (v + 1) % n,
                table: Arc::clone(&table),
            })
            .collect(),
        limits: vec![u64::from(n) / 3],
        times: vec![0],
        ..Reduced::default()
    }
}

/// Answers relaxations with nothing in use at a cost of [`TAKES`] iterations, and integer
/// programs not at all.
fn fake(model: Model, _: Option<Vec<f64>>, limits: Limits, _: &dyn Fn() -> bool) -> Answer {
    CALLS.with_borrow_mut(|calls| calls.push((model.rows.len(), limits)));
    let iterations = TAKES.get();
    if !limits.relax || limits.iterations.is_some_and(|most| iterations > most) {
        return Answer::Stopped {
            columns: None,
            bound: None,
        };
    }
    Answer::Optimal {
        columns: vec![0.0; model.costs.len()],
        bound: 3.0,
        iterations,
    }
}

fn asked(effort: Option<Effort>, takes: u64) -> (IlpOutcome, Vec<(usize, Limits)>) {
    TAKES.set(takes);
    CALLS.with_borrow_mut(Vec::clear);
    let options = IlpOptions {
        nodes: Some(7),
        effort,
        relative_gap: 0.0,
        seed: 0,
        backend: fake,
        stop: &|| false,
        on_bound: &|_| {},
    };
    let outcome = solve_ilp(&ring(9), None, &[], &options, &|| None);
    (outcome, CALLS.take())
}

#[test]
fn the_relaxation_is_asked_first_and_decides_whether_the_rest_follows() {
    let effort = Effort::of_work(1);
    let (cheap, calls) = asked(Some(effort), 10);
    let [(n_rows, relaxation), (_, program)] = calls[..] else {
        panic!("{calls:?}");
    };
    assert!(relaxation.relax && !program.relax);
    assert_eq!(relaxation.iterations, Some(effort.iterations(n_rows)));
    assert_eq!(program.nodes, Some(7));
    assert!(!cheap.exhausted);

    // Within the limit itself, but the root would be too dear.
    let (dear, calls) = asked(Some(effort), effort.iterations(n_rows) / 2);
    assert_eq!(calls.len(), 1);
    assert!(dear.exhausted && !dear.proved);
    assert!(dear.bound.is_some(), "the relaxation's bound is kept");

    let (over, calls) = asked(Some(effort), effort.iterations(n_rows) + 1);
    assert_eq!(calls.len(), 1);
    assert!(over.exhausted && over.bound.is_none());

    // Without an effort nothing is held back.
    let (free, calls) = asked(None, u64::MAX);
    assert_eq!(calls.len(), 2);
    assert!(!free.exhausted);
    assert!(calls.iter().all(|(_, limits)| limits.iterations.is_none()));
}

#[test]
fn efforts_grow_with_the_work_limit_and_are_used_up() {
    let (one, ten) = (Effort::of_work(1), Effort::of_work(10));
    assert_eq!(10 * one.iterations(100), ten.iterations(100));
    let mut left = one;
    let n = left.iterations(100);
    assert_eq!(left.spend(n, 100), 100 * n);
    assert!(left.iterations(100) == 0 && !left.afford_root(1) && left.afford_root(0));
    assert!(Effort::of_work(u64::MAX).iterations(0) > 0);
}

/// HiGHS keeps to the iterations that it is given, and says how many it took.
#[cfg(feature = "highs")]
#[test]
fn iterations_of_highs_are_counted_and_limited() {
    let reduced = ring(41);
    let mut program = Program::new(&reduced);
    program.add_memory_row(0);
    let relaxed = |most| {
        let limits = Limits {
            time: None,
            nodes: None,
            iterations: most,
            absolute_gap: 0.0,
            seed: 0,
            relax: true,
        };
        highs(program.model.clone(), None, limits, &|| false)
    };
    let Answer::Optimal { iterations, .. } = relaxed(None) else {
        panic!("a small program is solved");
    };
    assert!(iterations > 10);
    assert!(matches!(relaxed(Some(2)), Answer::Stopped { .. }));
    let Answer::Optimal {
        iterations: again, ..
    } = relaxed(Some(iterations + 1))
    else {
        panic!("one more than it took is enough");
    };
    assert_eq!(again, iterations);
}
