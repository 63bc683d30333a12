//! The whole way from a problem to a choice with a proof.
//!
//! Presolve; then stages, each on a smaller problem than the one before ([`stage`]). A stage
//! has rounds; in a round one task [proves](prove) (prices and messages, exact elimination, or
//! the integer program once the problem is small enough) and the others [search](seek), all
//! from the same prices and the same choice, on the given threads. After a round what they
//! found is exchanged, the best choice's cost rules out what it can, and presolve runs again.
//! Every result is checked against the original problem before it is returned.
//!
//! The proof: bounds from prices and elimination hold exactly, in integers. `Optimal`
//! and bounds from the integer program hold within the library's floating-point tolerances.
//!
//! Determinism: without a time limit and unless cancelled, choice and bound depend on the
//! problem and the options alone, the number of threads included: tasks get amounts of work
//! and do not look at each other within a round. With a time limit they may depend on the
//! machine. A time limit is kept: presolve looks at it between reductions, and the
//! work after it runs on a thread of its own and is left behind
//! with what is known when it does not end in time.

mod clock;
mod live;
mod prove;
mod seek;
mod stage;

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use super::IntraOpError;
use super::ilp;
use super::presolve::{Infeasibility, PresolveOptions, Presolved, presolve_reported};
use super::problem::{IntraOpProblem, evaluate};
use super::reduced::Reduced;
use clock::Clock;
use live::{Known, Live};
use stage::Solver;

/// The time between two looks of the waiting thread whether it must stop.
const POLL: Duration = Duration::from_millis(20);
/// The time that work may take to end once it was asked to stop.
const PATIENCE: Duration = Duration::from_millis(1500);

/// The integer-programming libraries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IlpBackend {
    /// HiGHS.
    #[cfg(feature = "highs")]
    Highs,
    /// microlp: pure Rust, for small problems.
    Microlp,
    /// No library: bounds and search only.
    None,
}

impl IlpBackend {
    /// Returns the library's name, for reports.
    pub fn name(self) -> &'static str {
        match self {
            #[cfg(feature = "highs")]
            IlpBackend::Highs => "HiGHS",
            IlpBackend::Microlp => "microlp",
            IlpBackend::None => "none",
        }
    }
}

/// The default is HiGHS where the build has it.
impl Default for IlpBackend {
    #[cfg(feature = "highs")]
    fn default() -> Self {
        IlpBackend::Highs
    }
    #[cfg(not(feature = "highs"))]
    fn default() -> Self {
        IlpBackend::Microlp
    }
}

/// The effort of a solve, and where it goes.
#[derive(Clone, Debug)]
pub struct SolveOptions {
    /// The wall-clock limit. A result that was cut short by it may differ between machines.
    pub time_limit: Option<Duration>,
    /// The moment at which the time limit began to count; now, if it is not given.
    pub start: Option<Instant>,
    /// A flag that others set to end the work soon, with what is known by then.
    pub cancel: Option<Arc<AtomicBool>>,
    /// The number of threads: one proves, the others search.
    pub threads: usize,
    /// The seed of everything random.
    pub seed: u64,
    /// The fraction of the bound within which a proved cost is enough; 0 for a full proof.
    pub gap: f64,
    /// The deterministic limit: slices of search per thread, branch-and-bound nodes and simplex
    /// iterations (`ilp::effort`) per integer program.
    pub work_limit: Option<u64>,
    /// The most columns of an integer program that is built.
    pub max_ilp_columns: usize,
    /// Tries the integer program right after presolve, without prices and search, as an independent
    /// way to the same result.
    pub integer_program_first: bool,
    /// The integer-programming library.
    pub backend: IlpBackend,
    /// The presolve steps to take.
    pub presolve: PresolveOptions,
    /// The phases to run.
    pub phases: Phases,
}

/// Selects the phases after presolve; all by default. For measuring what each is worth.
#[derive(Clone, Copy, Debug)]
pub struct Phases {
    /// Prices on memory (messages are always passed).
    pub prices: bool,
    /// Exact elimination at the prices, where the graph allows.
    pub elimination: bool,
    /// Dropping of what the bound rules out.
    pub tighten: bool,
    /// Search for better choices, tree by tree and part by part.
    pub search: bool,
}

impl Default for Phases {
    fn default() -> Self {
        Phases {
            prices: true,
            elimination: true,
            tighten: true,
            search: true,
        }
    }
}

impl Default for SolveOptions {
    fn default() -> Self {
        SolveOptions {
            time_limit: None,
            start: None,
            cancel: None,
            threads: 1,
            seed: 0,
            gap: 0.0,
            work_limit: None,
            // The public instances that are proved have 2,000 to 42,000 columns, proved in
            // up to 20 s.
            max_ilp_columns: 100_000,
            integer_program_first: false,
            backend: IlpBackend::default(),
            presolve: PresolveOptions::default(),
            phases: Phases::default(),
        }
    }
}

/// The proof of a result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SolveStatus {
    /// The choice is proved best.
    Optimal,
    /// A choice that fits; the best may be cheaper, but not below `lower_bound`. A solve that was
    /// stopped within the requested gap ends here too.
    Feasible {
        /// A bound: no choice costs less.
        lower_bound: u128,
        /// The gap: `(objective - lower_bound) / objective`.
        gap: f64,
    },
    /// No choice fits.
    Infeasible(Infeasibility),
    /// The solve was stopped before any choice that fits was found.
    Timeout,
}

/// One line of the history of a solve.
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
    /// A note on the phase, in words.
    pub note: String,
}

/// A choice with its proof, or the reason why there is none.
#[derive(Clone, Debug)]
pub struct SolveResult {
    /// The proof.
    pub status: SolveStatus,
    /// One strategy for each node.
    pub choice: Option<Vec<u32>>,
    /// Its total cost.
    pub objective: Option<u128>,
    /// A bound: no choice costs less.
    pub lower_bound: u128,
    /// The gap: `(objective - lower_bound) / objective`; `None` without an objective.
    pub gap: Option<f64>,
    /// The wall-clock time since the start.
    pub seconds: f64,
    /// The most bytes in use at any time under the choice.
    pub peak_usage: Option<u128>,
    /// The events, in order.
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
    let clock = Clock::new(options.start, options.time_limit, options.cancel.clone());
    let live = Arc::new(Live::new(clock.start));
    let (presolved, effects) = presolve_reported(problem, &options.presolve, &|| clock.over())?;
    for e in effects {
        let (nodes, strategies, cells) = (e.nodes, e.strategies, e.cells);
        let note = format!("{nodes} nodes, {strategies} strategies, {cells} cells less");
        live.note(e.name, note);
    }
    match presolved {
        Presolved::Infeasible(why) => {
            live.known().infeasible = Some(why);
            live.note("presolve", format!("infeasible: {why:?}"));
        }
        Presolved::Reduced(reduced) => {
            live.raise(reduced.offset);
            live.note("presolve", reduced.describe());
            work(reduced, options, &clock, &live);
        }
    }
    let known = std::mem::take(&mut *live.known());
    finish(problem, &clock, known)
}

/// Solves the reduced problem, on a thread that can be left behind if somebody may want to stop.
fn work(reduced: Reduced, options: &SolveOptions, clock: &Clock, live: &Arc<Live>) {
    let solver = Solver {
        options: options.clone(),
        clock: clock.clone(),
        live: Arc::clone(live),
    };
    if !clock.may_stop_early() {
        return solver.run(reduced);
    }
    let (send, receive) = mpsc::channel::<()>();
    let thread = std::thread::Builder::new()
        .name("solve".into())
        .spawn(move || {
            solver.run(reduced);
            // The receiver is gone if the work was left behind.
            let _ = send.send(());
        });
    let Ok(thread) = thread else {
        return live.note("stopped", "the system gives no thread".into());
    };
    let mut asked: Option<Instant> = None;
    while let Err(mpsc::RecvTimeoutError::Timeout) = receive.recv_timeout(POLL) {
        if clock.cancelled() {
            asked.get_or_insert_with(Instant::now);
        }
        if clock.past() || asked.is_some_and(|at| at.elapsed() > PATIENCE) {
            return live.note("stopped", "work that did not end in time was left".into());
        }
    }
    // The thread has ended or is about to; its panic becomes ours.
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

fn finish(
    problem: &IntraOpProblem,
    clock: &Clock,
    known: Known,
) -> Result<SolveResult, IntraOpError> {
    let mut result = SolveResult {
        status: SolveStatus::Timeout,
        choice: None,
        objective: None,
        lower_bound: u128::from(known.bound),
        gap: None,
        seconds: 0.0,
        peak_usage: None,
        trace: known.trace,
    };
    if let Some(why) = known.infeasible {
        result.status = SolveStatus::Infeasible(why);
    } else if let Some((_, choice)) = known.best {
        let value = evaluate(problem, &choice)?;
        assert!(
            value.feasible,
            "a choice that fits the reduced problem fits the original"
        );
        let objective = value.objective.expect("a feasible choice has a cost");
        if known.proved {
            result.lower_bound = objective;
        }
        result.lower_bound = result.lower_bound.min(objective);
        let lower_bound = result.lower_bound;
        let gap = if objective == lower_bound {
            0.0
        } else {
            (objective - lower_bound) as f64 / objective as f64
        };
        result.status = if objective == lower_bound {
            SolveStatus::Optimal
        } else {
            SolveStatus::Feasible { lower_bound, gap }
        };
        result.gap = Some(gap);
        result.objective = Some(objective);
        result.peak_usage = Some(value.peak_usage);
        result.choice = Some(choice);
    }
    result.seconds = clock.start.elapsed().as_secs_f64();
    Ok(result)
}

/// Returns the function behind a library; `None` for none.
fn backend(which: IlpBackend) -> Option<ilp::Backend> {
    match which {
        #[cfg(feature = "highs")]
        IlpBackend::Highs => Some(ilp::highs),
        IlpBackend::Microlp => Some(ilp::microlp),
        IlpBackend::None => None,
    }
}
