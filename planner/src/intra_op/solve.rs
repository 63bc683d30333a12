//! The whole way from a problem to a choice with a proof.
//!
//! Presolve; then an integer program if what is left is small. Every result is checked
//! against the original problem before it is returned.
//!
//! Determinism: without a time limit the result depends on the problem and the options
//! alone. With one, it may depend on the machine, and the status says so by not being
//! `Optimal`.

use std::time::{Duration, Instant};

use super::IntraOpError;
use super::ilp::{self, IlpOptions, IlpOutcome};
use super::presolve::{Infeasibility, PresolveOptions, Presolved, presolve};
use super::problem::{IntraOpProblem, evaluate};
use super::reduced::Reduced;

/// Which integer-programming library to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IlpBackend {
    /// HiGHS.
    #[cfg(feature = "highs")]
    Highs,
    /// microlp: pure Rust, for small problems.
    #[cfg(feature = "highs")]
    Microlp,
    /// None: bounds and search only.
    None,
}

impl Default for IlpBackend {
    #[cfg(feature = "highs")]
    fn default() -> Self {
        IlpBackend::Highs
    }
    #[cfg(not(feature = "highs"))]
    fn default() -> Self {
        IlpBackend::None
    }
}

/// What to spend, and on what.
#[derive(Clone, Debug)]
pub struct SolveOptions {
    /// Wall-clock limit. A result that was cut short by it may differ between machines.
    pub time_limit: Option<Duration>,
    /// Threads for searching; reserved, one is used.
    pub threads: usize,
    /// Seed of everything random.
    pub seed: u64,
    /// Stop when the cost is proved within this fraction of the bound; 0 for a full proof.
    pub gap: f64,
    /// Deterministic limit: branch-and-bound nodes per integer program, and rounds of search.
    pub work_limit: Option<u64>,
    /// Integer programs are only built up to this many columns.
    pub max_ilp_columns: usize,
    /// The integer-programming library.
    pub backend: IlpBackend,
    /// Which presolve steps to take.
    pub presolve: PresolveOptions,
}

impl Default for SolveOptions {
    fn default() -> Self {
        SolveOptions {
            time_limit: None,
            threads: 1,
            seed: 0,
            gap: 0.0,
            work_limit: None,
            // Measured on the public instances: below this every model was proved in a minute.
            max_ilp_columns: 100_000,
            backend: IlpBackend::default(),
            presolve: PresolveOptions::default(),
        }
    }
}

/// What is proved about a result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SolveStatus {
    /// No choice is better (within the requested gap).
    Optimal,
    /// A choice that fits; the best may be cheaper, but not below `lower_bound`.
    Feasible {
        /// No choice costs less.
        lower_bound: u128,
        /// `(objective - lower_bound) / objective`.
        gap: f64,
    },
    /// No choice fits.
    Infeasible(Infeasibility),
    /// Stopped before any choice that fits was found.
    Timeout,
}

/// One line of how the result came about.
#[derive(Clone, Debug, PartialEq)]
pub struct TraceEntry {
    /// The phase that ended.
    pub phase: &'static str,
    /// Seconds since the start.
    pub seconds: f64,
    /// The best cost so far.
    pub objective: Option<u128>,
    /// The best bound so far.
    pub lower_bound: Option<u128>,
    /// What the phase did, in words.
    pub note: String,
}

/// A choice with its proof, or why there is none.
#[derive(Clone, Debug)]
pub struct SolveResult {
    /// What is proved.
    pub status: SolveStatus,
    /// One strategy per node.
    pub choice: Option<Vec<u32>>,
    /// Its total cost.
    pub objective: Option<u128>,
    /// No choice costs less.
    pub lower_bound: u128,
    /// `(objective - lower_bound) / objective`; `None` without an objective.
    pub gap: Option<f64>,
    /// Wall-clock time spent.
    pub seconds: f64,
    /// The most bytes in use at any time under the choice.
    pub peak_usage: Option<u128>,
    /// What happened, in order.
    pub trace: Vec<TraceEntry>,
}

/// Solves `problem`.
///
/// # Errors
/// [`IntraOpError::Malformed`] or [`IntraOpError::Magnitude`] when the problem cannot be
/// taken on. Infeasible is an answer, not an error.
pub fn solve(
    problem: &IntraOpProblem,
    options: &SolveOptions,
) -> Result<SolveResult, IntraOpError> {
    let mut run = Run::new(options);
    match presolve(problem, &options.presolve)? {
        Presolved::Infeasible(why) => {
            run.infeasible = Some(why);
            run.note("presolve", None, format!("infeasible: {why:?}"));
        }
        Presolved::Reduced(reduced) => run.solve_reduced(&reduced),
    }
    run.finish(problem)
}

struct Run<'a> {
    options: &'a SolveOptions,
    start: Instant,
    /// Cost and choice of the reduced problem.
    best: Option<(u64, Vec<u32>)>,
    bound: u64,
    proved: bool,
    infeasible: Option<Infeasibility>,
    lifted: Option<Vec<u32>>,
    trace: Vec<TraceEntry>,
}

impl<'a> Run<'a> {
    fn new(options: &'a SolveOptions) -> Self {
        Run {
            options,
            start: Instant::now(),
            best: None,
            bound: 0,
            proved: false,
            infeasible: None,
            lifted: None,
            trace: Vec::new(),
        }
    }

    fn time_left(&self) -> Option<Duration> {
        let limit = self.options.time_limit?;
        Some(limit.saturating_sub(self.start.elapsed()))
    }

    fn note(&mut self, phase: &'static str, bound: Option<u64>, note: String) {
        self.bound = self.bound.max(bound.unwrap_or(0));
        self.trace.push(TraceEntry {
            phase,
            seconds: self.start.elapsed().as_secs_f64(),
            objective: self.best.as_ref().map(|(cost, _)| u128::from(*cost)),
            lower_bound: (self.bound > 0).then_some(u128::from(self.bound)),
            note,
        });
    }

    fn solve_reduced(&mut self, reduced: &Reduced) {
        let (nodes, edges) = (reduced.nodes.len(), reduced.edges.len());
        let (cells, times) = (reduced.n_cells(), reduced.times.len());
        let left = format!("{nodes} nodes, {edges} edges, {cells} cells, {times} times left");
        self.note("presolve", Some(reduced.offset), left);
        if nodes == 0 {
            self.best = Some((reduced.offset, Vec::new()));
            self.proved = true;
        } else {
            self.integer_program(reduced, &[]);
        }
        if let Some((_, choice)) = &self.best {
            self.lifted = Some(reduced.lift(choice));
        }
    }

    fn integer_program(&mut self, reduced: &Reduced, times: &[usize]) {
        let Some(backend) = backend(self.options.backend) else {
            return;
        };
        let columns = ilp::n_columns(reduced);
        if columns > self.options.max_ilp_columns {
            self.note("ilp", None, format!("skipped: {columns} columns"));
            return;
        }
        let options = IlpOptions {
            nodes: self.options.work_limit,
            relative_gap: self.options.gap,
            seed: self.options.seed,
            backend,
        };
        let time_left = || self.time_left();
        let outcome = ilp::solve_ilp(reduced, self.best.as_ref(), times, &options, &time_left);
        let IlpOutcome { choice, bound, proved, n_rows } = outcome;
        self.best = choice;
        self.proved = proved;
        if proved && self.best.is_none() {
            self.infeasible = Some(Infeasibility::Searched);
        }
        self.note("ilp", bound, format!("{columns} columns, {n_rows} memory rows"));
    }

    fn finish(mut self, problem: &IntraOpProblem) -> Result<SolveResult, IntraOpError> {
        let mut result = SolveResult {
            status: SolveStatus::Timeout,
            choice: None,
            objective: None,
            lower_bound: u128::from(self.bound),
            gap: None,
            seconds: self.start.elapsed().as_secs_f64(),
            peak_usage: None,
            trace: std::mem::take(&mut self.trace),
        };
        if let Some(why) = self.infeasible {
            result.status = SolveStatus::Infeasible(why);
            return Ok(result);
        }
        let Some(choice) = self.lifted else {
            return Ok(result);
        };
        let value = evaluate(problem, &choice)?;
        assert!(value.feasible, "a choice that fits the reduced problem fits the original");
        let objective = value.objective.expect("a feasible choice has a cost");
        if self.proved && self.options.gap == 0.0 {
            result.lower_bound = objective;
        }
        result.lower_bound = result.lower_bound.min(objective);
        let lower_bound = result.lower_bound;
        let gap = if objective == lower_bound {
            0.0
        } else {
            (objective - lower_bound) as f64 / objective as f64
        };
        result.status = if self.proved || gap <= self.options.gap {
            SolveStatus::Optimal
        } else {
            SolveStatus::Feasible { lower_bound, gap }
        };
        result.gap = Some(gap);
        result.objective = Some(objective);
        result.peak_usage = Some(value.peak_usage);
        result.choice = Some(choice);
        Ok(result)
    }
}

fn backend(which: IlpBackend) -> Option<ilp::Backend> {
    match which {
        #[cfg(feature = "highs")]
        IlpBackend::Highs => Some(super::highs_backend::run),
        #[cfg(feature = "highs")]
        IlpBackend::Microlp => Some(super::microlp_backend::run),
        IlpBackend::None => None,
    }
}

pub fn debug_dual(problem: &IntraOpProblem, iters: usize, ub: f64) {
    let Presolved::Reduced(r) = presolve(problem, &PresolveOptions::default()).unwrap() else { return };
    let mut d = super::dual::Dual::new(&r);
    let start = Instant::now();
    let mut best = 0u64;
    let mut best_prices = d.prices();
    let ev = |k: &str, x: f64| std::env::var(k).ok().and_then(|s| s.parse().ok()).unwrap_or(x);
    let (mut alpha, up, down, patience, passes, avg) = (ev("ALPHA", 0.02), ev("UP", 1.1), ev("DOWN", 0.7), ev("PAT", 3.0) as usize, ev("PASSES", 2.0) as usize, ev("AVG", 0.3));
    let mut since = 0;
    for _ in 0..ev("PRE", 50.0) as usize { d.pass_messages(); }
    // uniform
    let total: f64 = r.limits.iter().map(|&l| l as f64).sum();
    let base = ub / total;
    let mut bestl = (0u64, 0.0);
    for k in 0..24 { let l = base * 2f64.powi(k - 10); d.set_prices(&vec![l; r.limits.len()]); for _ in 0..3 { d.pass_messages(); } let (b, _) = d.bound(); println!("uniform 2^{} {b}", k - 10); if b > bestl.0 { bestl = (b, l); } else if (b as f64) < 0.9 * bestl.0 as f64 { break; } }
    d.set_prices(&vec![bestl.1; r.limits.len()]);
    for it in 0..iters {
        for _ in 0..passes { d.pass_messages(); }
        let (b, picks) = d.bound();
        if b > best { best = b; best_prices = d.prices(); alpha *= up; since = 0; } else { since += 1; }
        if since > patience { since = 0; alpha *= down; d.set_prices(&best_prices); continue; }
        if it % (iters / 10) == 0 { println!("it {it} {:.2}s bound {b} best {best} alpha {alpha:.5} prices>0 {}", start.elapsed().as_secs_f64(), d.prices().iter().filter(|p| **p > 0.0).count()); }
        if ev("EG", 1.0) > 0.0 { d.step_eg(&picks, alpha, avg); } else { d.step_prices(&picks, alpha * (ub - b as f64).max(1.0), avg); }
    }
    println!("best {best} alpha {alpha}");
    d.set_prices(&best_prices);
    for _ in 0..3 { d.pass_messages(); }
    let order: Vec<u32> = (0..r.nodes.len() as u32).collect();
    let mut got: Option<(u64, Vec<u32>)> = None;
    for w in [0.8, 1.0, 1.1, 1.3, 1.7, 2.5, 5.0] {
        let c = super::dive::dive(&r, &d, w, &order);
        println!("{:.2}s dive {w} {:?}", start.elapsed().as_secs_f64(), c.as_ref().and_then(|c| r.cost(c)));
        if let Some(c) = c && let Some(k) = r.cost(&c) && got.as_ref().is_none_or(|(b, _)| k < *b) { assert!(r.fits(&c)); got = Some((k, c)); }
    }
    let Some((k, c)) = got else { return };
    let mut s = super::improve::Search::new(&r, &d, c, 1);
    let mut cost = k as i64;
    let t0 = Instant::now();
    let mut n = 0u64;
    let mut next = 1.0;
    let lim = ev("LIM", 20.0);
    let mut scaled = (k as i64 - r.offset as i64) << d.shift;
    while t0.elapsed().as_secs_f64() < lim {
        let size = [3, 10, 30, 100][(n % 4) as usize];
        scaled -= s.step(size);
        n += 1;
        if t0.elapsed().as_secs_f64() > next { next *= 1.5; println!("  {:.1}s {n} moves cost {}", t0.elapsed().as_secs_f64(), (scaled >> d.shift) + r.offset as i64); }
    }
    cost = r.cost(&s.choice).unwrap() as i64;
    println!("final {cost} fits {} moves {n}", r.fits(&s.choice));
}
