//! Microbatch sizes to try: what divides the global batch, or what the pins say.

use super::Search;
use crate::PlanError;
use crate::pins::check::listed;
use ir::counted;

/// Largest microbatch that is tried unless one is pinned.
pub(super) const MAX_MICROBATCH: u64 = 1 << 16;
/// Most microbatches of a step: a program has a slot for each.
const MAX_MICROBATCHES: u64 = 1 << 16;

impl Search<'_> {
    /// Microbatch sizes to try.
    pub(super) fn batches(&self) -> Result<Vec<u64>, PlanError> {
        let b = self.train.global_batch;
        let all = self.dividing_batches()?;
        let schedule = self.pins.schedule_kind().schedule();
        let (v, p) = (schedule.virtual_stages(), self.pins.pipeline.unwrap_or(1));
        let group = u64::from(schedule.group(p as usize).max(1));
        let fits = |size: &u64| (b / size).is_multiple_of(group);
        if all.iter().any(fits) {
            return Ok(all.into_iter().filter(fits).collect());
        }
        let fitting: Vec<u64> = (1..=b.min(MAX_MICROBATCH))
            .filter(|d| b.is_multiple_of(*d) && fits(d))
            .collect();
        let way = match fitting.is_empty() {
            true => format!("train with a --global-batch that is a multiple of {group}"),
            false => format!("what fits: microbatch={}", listed(&fitting)),
        };
        Err(PlanError::Pins(format!(
            "pinned virtual={v} x pipeline={p} wants a multiple of {group} microbatches of the global batch {b}; {way}"
        )))
    }

    fn dividing_batches(&self) -> Result<Vec<u64>, PlanError> {
        let b = self.train.global_batch;
        if let Some(pinned) = self.pins.microbatch {
            if !b.is_multiple_of(pinned) {
                let fitting: Vec<u64> = (1..=b.min(MAX_MICROBATCH))
                    .filter(|d| b.is_multiple_of(*d) && b / d <= MAX_MICROBATCHES)
                    .collect();
                return Err(PlanError::Pins(format!(
                    "pinned microbatch={pinned} does not divide the global batch {b}; what does: {}",
                    listed(&fitting)
                )));
            }
            if b / pinned > MAX_MICROBATCHES {
                return Err(PlanError::Pins(format!(
                    "pinned microbatch={pinned} makes {} of the global batch {b}; at most {MAX_MICROBATCHES} are possible",
                    counted(b / pinned, "microbatch"),
                )));
            }
            return Ok(vec![pinned]);
        }
        let divisors: Vec<u64> = (1..=b.min(MAX_MICROBATCH))
            .filter(|d| b.is_multiple_of(*d) && b / d <= MAX_MICROBATCHES)
            .collect();
        Ok(divisors)
    }
}
