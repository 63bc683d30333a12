//! How much an integer program may take without a clock.
//!
//! Two limits of HiGHS do not depend on the machine: iterations of a linear program, and nodes
//! of the tree. Its root node has none: cuts, heuristics with programs of their own. But what
//! the root takes goes with what its linear relaxation takes. So the relaxation is solved
//! first, under a limit on iterations, and the integer program is only begun if what is left
//! is [`ROOT`] times that.
//!
//! The unit is one row in one iteration of the simplex method, as an iteration's cost grows
//! with the rows.

/// The row-iterations that one unit of a work limit allows: about a quarter of a second (on grids,
/// relaxations of 1,200 to 4,400 rows went through 20 to 60 million row-iterations per second of
/// one core of the 2-core x86 machine).
const PER_WORK: u64 = 10_000_000;
/// An integer program with few nodes takes this many times what its relaxation took, or less. On
/// grids of 25 and 64 nodes, where cuts help little, it was 230 and 215 times the seconds; on
/// stages of plans, where the relaxation is nearly integral, 2 to 60 times.
const ROOT: u64 = 300;

/// An amount of row-iterations that is left to spend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Effort(u64);

impl Effort {
    /// Returns the effort that a work limit allows one integer program.
    pub fn of_work(limit: u64) -> Effort {
        Effort(limit.saturating_mul(PER_WORK))
    }

    /// Returns the iterations that a linear program of this many rows may take.
    pub fn iterations(self, n_rows: usize) -> u64 {
        self.0 / (n_rows as u64).max(1)
    }

    /// Subtracts the effort of a linear program, and returns it.
    pub fn spend(&mut self, iterations: u64, n_rows: usize) -> u64 {
        let spent = iterations.saturating_mul(n_rows as u64);
        self.0 = self.0.saturating_sub(spent);
        spent
    }

    /// Subtracts the effort that an integer program takes whose relaxation took `relaxation`. When
    /// less is left, subtracts nothing and returns false.
    pub fn afford_root(&mut self, relaxation: u64) -> bool {
        let root = relaxation.saturating_mul(ROOT);
        let left = self.0.checked_sub(root);
        self.0 = left.unwrap_or(self.0);
        left.is_some()
    }
}
