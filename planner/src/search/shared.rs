//! Ranks that share processors (`pool` of a cluster): their work has to go through them.
//!
//! The additive objective of `inter_op` gives every rank a processor of its own. Where C
//! processors serve more ranks they do at most C seconds of work in a second, in whatever order,
//! and a rank's work is its collectives and transfers as much as its kernels. So another time
//! that a step takes at least is
//!
//! ```text
//!   sum over stages of ranks * (m * (forward + backward + sending) + once a step) / C
//! ```
//!
//! and the objective of a plan there is the larger of the two, its lower bound the larger of
//! theirs: every pipeline of the space costs at least either.

use super::{Pipeline, Search};
use crate::groups::Phases;
use crate::inter_op::{StageTable, least_work};

impl Search<'_> {
    /// Processors that ranks share, of all pools together.
    fn shared_processors(&self) -> Option<f64> {
        let pool = self.cluster.pool.as_ref()?;
        let pools = f64::from(self.cluster.n_devices()) / f64::from(pool.devices.max(1));
        Some(pool.compute_devices * pools)
    }

    /// Seconds of a step that the processors need for the work of a pipeline whose stages take
    /// these times; 0 where every rank has its own.
    pub(super) fn work_s(&self, p: &Pipeline, times: &[Phases], ranks: &[u32]) -> f64 {
        let Some(processors) = self.shared_processors() else {
            return 0.0;
        };
        let stages = p.choice.stages.iter().zip(times).zip(ranks);
        let work = stages.map(|((stage, t), &n)| {
            let microbatch = t.forward + t.backward + stage.transfer_s;
            f64::from(n) * (f64::from(p.m) * microbatch + t.step)
        });
        work.sum::<f64>() / processors
    }

    /// Seconds that no step of `m` microbatches is shorter than whose stages are in the table of
    /// what none can beat, on submeshes in units of `unit` devices; 0 where every rank has a
    /// processor of its own.
    pub(super) fn least_work_s(&self, relaxed: &StageTable, unit: u32, m: u32) -> f64 {
        let processors = self.shared_processors();
        let work = processors.and_then(|n| Some(least_work(relaxed)? / n));
        work.map_or(0.0, |s| s * f64::from(unit) * f64::from(m))
    }

    /// The same for stages on submeshes of `n` devices that take `sum_s` together.
    pub(super) fn least_ring_work_s(&self, n: u32, sum_s: f64, m: u32) -> f64 {
        let work = f64::from(n) * sum_s * f64::from(m);
        self.shared_processors().map_or(0.0, |n| work / n)
    }
}
