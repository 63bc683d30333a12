//! Pipelines that were simulated say something about those that were not yet: the bytes that these
//! will lack, and how long their steps will take at least.
//!
//! Both are rules of thumb. A pipeline that lacks bytes is found out when it is placed, and one
//! that is not simulated because of its share could have been faster than all others of its kind.

use super::Pipeline;
use std::collections::BTreeMap;

/// The bytes that pipelines of a kind overran the memory by when they were first made. What the
/// model of memory leaves out is much the same for all of a kind. So where all so far overran it
/// the others would too, and would have to be made and lowered twice. Those that are simulated
/// first, which are the best by the objective, are made without.
#[derive(Default)]
pub(super) struct Shortfalls {
    /// By whether traffic is assumed to hide and whether stages share meshes, ascending.
    of_kind: BTreeMap<(bool, bool), Vec<u64>>,
}

impl Shortfalls {
    /// From fewer nothing follows.
    const FEW: usize = 2;

    fn kind(p: &Pipeline) -> (bool, bool) {
        (p.assumed.hides(), p.schedule.virtual_stages() > 1)
    }

    pub(super) fn add(&mut self, p: &Pipeline, over: u64) {
        let of_kind = self.of_kind.entry(Self::kind(p)).or_default();
        let at = of_kind.partition_point(|o| *o < over);
        of_kind.insert(at, over);
    }

    /// The median of the bytes that pipelines of the kind overran by, the lower one of two; none
    /// where one fit.
    pub(super) fn of(&self, p: &Pipeline) -> Option<u64> {
        let of_kind = self.of_kind.get(&Self::kind(p))?;
        let all_overran = of_kind.len() >= Self::FEW && *of_kind.first()? > 0;
        all_overran.then(|| of_kind[(of_kind.len() - 1) / 2])
    }
}

/// The least part of the objective that the simulated step of a pipeline of a kind was. The
/// objective adds up what overlaps, of pipelines of a kind much the same.
#[derive(Default)]
pub(super) struct Shares {
    /// By whether stages share meshes: how many, and the least part.
    of_kind: BTreeMap<bool, (usize, f64)>,
}

impl Shares {
    /// From fewer nothing follows.
    const FEW: usize = 3;
    /// How much less it may be of others, relatively.
    const LESS: f64 = 0.02;

    pub(super) fn add(&mut self, p: &Pipeline, step_s: f64) {
        let part = step_s / p.choice.cost.total_s.max(f64::MIN_POSITIVE);
        let of_kind = self.of_kind.entry(p.schedule.virtual_stages() > 1);
        let (n, least) = of_kind.or_insert((0, f64::INFINITY));
        (*n, *least) = (*n + 1, part.min(*least));
    }

    /// Seconds that a step of a pipeline hardly takes less than; 0 where nothing is known.
    pub(super) fn least_s(&self, p: &Pipeline) -> f64 {
        let of_kind = self.of_kind.get(&(p.schedule.virtual_stages() > 1));
        let known = of_kind.filter(|(n, _)| *n >= Self::FEW);
        known.map_or(0.0, |(_, least)| {
            (1.0 - Self::LESS) * least * p.choice.cost.total_s
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inter_op::{PipelineChoice, PipelineCost};
    use crate::layer_model::Assumed;
    use crate::search::simple::Likeness;
    use ir::plan::ScheduleKind;

    fn pipeline(virtual_stages: u32, total_s: f64, hidden: f64) -> Pipeline {
        let schedule = match virtual_stages {
            1 => ScheduleKind::OneFOneB,
            virtual_stages => ScheduleKind::Interleaved { virtual_stages },
        };
        Pipeline {
            batch: 1,
            m: 8,
            schedule,
            choice: PipelineChoice {
                stages: Vec::new(),
                cost: PipelineCost {
                    sum_s: 0.0,
                    max_s: 0.0,
                    step_s: 0.0,
                    total_s,
                },
                lower_bound_s: 0.0,
                n_thresholds: 0,
            },
            assumed: Assumed {
                hidden,
                ..Assumed::default()
            },
            likeness: Likeness::default(),
        }
    }

    #[test]
    fn the_median_is_lacked_where_all_of_a_kind_overran() {
        let (plain, ring, hiding) = (
            pipeline(1, 1.0, 0.0),
            pipeline(2, 1.0, 0.0),
            pipeline(1, 1.0, 0.5),
        );
        let mut shortfalls = Shortfalls::default();
        for over in [7, 3] {
            assert_eq!(shortfalls.of(&ring), None);
            shortfalls.add(&ring, over);
        }
        assert_eq!(shortfalls.of(&ring), Some(3));
        shortfalls.add(&ring, 9);
        assert_eq!(shortfalls.of(&ring), Some(7));
        // Other kinds are others.
        assert_eq!(shortfalls.of(&plain), None);
        shortfalls.add(&hiding, 5);
        shortfalls.add(&hiding, 5);
        assert_eq!(
            (shortfalls.of(&plain), shortfalls.of(&hiding)),
            (None, Some(5))
        );
        // One that fits says that others may.
        shortfalls.add(&ring, 0);
        assert_eq!(shortfalls.of(&ring), None);
    }

    #[test]
    fn steps_are_foreseen_from_three_of_a_kind() {
        let mut shares = Shares::default();
        for step_s in [9.0, 9.5, 9.8] {
            assert_eq!(shares.least_s(&pipeline(4, 20.0, 0.0)), 0.0);
            shares.add(&pipeline(4, 10.0, 0.0), step_s);
        }
        let least_s = shares.least_s(&pipeline(2, 20.0, 0.0));
        assert!((least_s - 0.98 * 0.9 * 20.0).abs() < 1e-9, "{least_s}");
        assert_eq!(shares.least_s(&pipeline(1, 20.0, 0.0)), 0.0);
    }
}
