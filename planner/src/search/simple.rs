//! Plans that are simpler than the fastest one and nearly as fast.
//!
//! The choice that fills the memory best is a patchwork: the first layers of a stage recompute, an
//! integer program shares out what is left tensor by tensor. Often a plan whose layers are all
//! alike takes a fraction of a percent longer, and people can read it and run it with the software
//! that they have. So the best pipelines are also made with their layers alike, and of all plans
//! within a tolerance of the fastest the simplest is taken.

use super::mixes::Rungs;
use super::{Pipeline, scale};
use crate::inter_op::StageChoice;
use ir::Seconds;
use ir::plan::{Plan, Simpler};

/// How alike the layers of a pipeline are made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Likeness {
    /// Each has what the prices of its stage make it, the first ones under the dearer.
    #[default]
    Priced,
    /// Stages under memory pressure are solved whole, so that no two layers need be alike.
    Whole,
    /// All layers of a stage are made under one price on memory, the dearest of the stage.
    Stages,
    /// All layers are made under one price, the dearest of all stages.
    All,
}

impl Likeness {
    /// Words of a summary of alternatives for it.
    pub(super) fn words(self) -> &'static str {
        match self {
            Likeness::Priced => "",
            Likeness::Whole => ", stages solved whole",
            Likeness::Stages => ", layers alike within a stage",
            Likeness::All => ", all layers alike",
        }
    }

    /// A pipeline under memory pressure with its stages solved whole.
    pub(super) fn whole(p: &Pipeline) -> Option<Pipeline> {
        let mut stages = p.choice.stages.iter();
        let is_pressed = stages.any(|s| !Rungs::of_tag(s.tag).1.are_free());
        is_pressed.then(|| Pipeline {
            likeness: Likeness::Whole,
            ..p.clone()
        })
    }

    /// A pipeline with its layers alike, in every way that may make a difference.
    pub(super) fn alike(p: &Pipeline) -> Vec<Pipeline> {
        let rungs = p.choice.stages.iter().map(|s| Rungs::of_tag(s.tag).1);
        let rungs: Vec<Rungs> = rungs.collect();
        let ways: &[Likeness] = match rungs.iter().all(|r| r.are_free()) {
            true => &[],
            false if rungs.windows(2).all(|w| w[0].first == w[1].first) => &[Likeness::Stages],
            false => &[Likeness::Stages, Likeness::All],
        };
        let with = |&likeness: &Likeness| Pipeline {
            likeness,
            ..p.clone()
        };
        ways.iter().map(with).collect()
    }

    /// The prices that the layers of a stage are chosen under.
    pub(super) fn rungs(self, p: &Pipeline, stage: &StageChoice) -> Rungs {
        let own = Rungs::of_tag(stage.tag).1;
        match self {
            Likeness::Priced | Likeness::Whole => own,
            Likeness::Stages => Rungs::one(own.first.into()),
            Likeness::All => {
                let price = |rung: &u16| scale::weights_at(p.m, (*rung).into()).saved_price;
                let all = p.choice.stages.iter();
                let all = all.map(|s| Rungs::of_tag(s.tag).1.first);
                let dearest = all.max_by(|a, b| price(a).total_cmp(&price(b)));
                Rungs::one(dearest.unwrap_or(own.first).into())
            }
        }
    }
}

/// The features that make a plan hard to read and to run, the most important first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Complexity {
    /// The choices that whoever sets it up has to make: distinct layer strategies, most axes of a
    /// stage's mesh that have more than one rank, that there are several stages, and that they are
    /// interleaved.
    choices: usize,
    /// Distinct layer strategies.
    strategies: usize,
    /// Whether its tensors may keep to different ZeRO levels.
    has_no_level: bool,
    stages: usize,
}

impl Complexity {
    pub(super) fn of(plan: &Plan, p: &Pipeline) -> Complexity {
        let axes = |s: &ir::plan::StagePlan| s.mesh.axes.iter().filter(|a| a.size > 1).count();
        let axes = plan.stages.iter().map(axes).max().unwrap_or(0);
        let strategies = plan.layer_strategies.len();
        let is_pipeline = usize::from(plan.stages.len() > 1);
        let is_interleaved = usize::from(p.schedule.virtual_stages() > 1);
        Complexity {
            choices: strategies + axes + is_pipeline + is_interleaved,
            strategies,
            has_no_level: p.assumed.level.is_none(),
            stages: plan.stages.len(),
        }
    }
}

/// The plans that may be taken yet: of two, one is faster and the other simpler.
pub(super) struct Frontier<T> {
    tolerance: f64,
    /// With seconds of a step.
    plans: Vec<(f64, Complexity, T)>,
}

impl<T> Frontier<T> {
    pub(super) fn new(tolerance: f64) -> Frontier<T> {
        Frontier {
            tolerance,
            plans: Vec::new(),
        }
    }

    /// Drops plans.
    pub(super) fn drop_any(&mut self, is_dropped: impl Fn(&T) -> bool) {
        self.plans.retain(|(_, _, plan)| !is_dropped(plan));
    }

    /// Whether a plan whose step takes so long may be taken, as far as is known.
    pub(super) fn is_near(&self, step_s: f64) -> bool {
        step_s <= (1.0 + self.tolerance) * self.fastest_s()
    }

    /// Adds a plan, and drops those that lose to it; whether it is faster than all before. Of equal
    /// ones the first stays.
    pub(super) fn add(&mut self, step_s: f64, complexity: Complexity, plan: T) -> bool {
        let is_fastest = step_s < self.fastest_s();
        let loses = |(s, c, _): &(f64, Complexity, T)| *s <= step_s && *c <= complexity;
        if !self.is_near(step_s) || self.plans.iter().any(loses) {
            return false;
        }
        let wins = |(s, c, _): &(f64, Complexity, T)| step_s <= *s && complexity <= *c;
        self.plans.retain(|plan| !wins(plan));
        self.plans.push((step_s, complexity, plan));
        let limit = (1.0 + self.tolerance) * self.fastest_s();
        self.plans.retain(|(s, ..)| *s <= limit);
        is_fastest
    }

    /// The simplest plan, of equally simple ones the fastest, and what that cost if it is not the
    /// fastest.
    pub(super) fn simplest(self) -> Option<(T, Option<Simpler>)> {
        let (tolerance, fastest_s) = (self.tolerance, self.fastest_s());
        let fastest = self.plans.iter().find(|(s, ..)| *s == fastest_s)?.1;
        let plans = self.plans.into_iter();
        let (step_s, _, plan) = plans.min_by(|a, b| a.1.cmp(&b.1).then(a.0.total_cmp(&b.0)))?;
        let simpler = Simpler {
            tolerance,
            fastest_s: Seconds(fastest_s),
            fastest_strategies: fastest.strategies as u64,
        };
        Some((plan, Some(simpler).filter(|_| step_s > fastest_s)))
    }

    /// The seconds of the fastest plan; infinite before there is one.
    pub(super) fn fastest_s(&self) -> f64 {
        let all = self.plans.iter().map(|(s, ..)| *s);
        all.fold(f64::INFINITY, f64::min)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::testing::Rng;

    fn complexity(strategies: usize) -> Complexity {
        Complexity {
            choices: strategies + 1,
            strategies,
            has_no_level: false,
            stages: 1,
        }
    }

    /// Against the definition, for plans in any order.
    #[test]
    fn the_simplest_within_the_tolerance_is_taken() {
        let mut rng = Rng::new(3);
        let mut below = |n: u64| rng.below(n);
        let (mut gave_up, mut kept) = (0, 0);
        for _ in 0..500 {
            let tolerance = [0.0, 0.01, 0.05][below(3) as usize];
            let n = 1 + below(8) as usize;
            let plans: Vec<(f64, usize)> = (0..n)
                .map(|_| (1.0 + below(80) as f64 / 1000.0, 1 + below(6) as usize))
                .collect();
            let mut frontier = Frontier::new(tolerance);
            for (i, &(s, strategies)) in plans.iter().enumerate() {
                let fastest = plans[..i].iter().all(|p| s < p.0);
                assert_eq!(frontier.add(s, complexity(strategies), i), fastest);
            }
            let (chosen, simpler) = frontier.simplest().expect("there are plans");
            let fastest = plans.iter().map(|p| p.0).fold(f64::INFINITY, f64::min);
            let near = plans.iter().filter(|p| p.0 <= (1.0 + tolerance) * fastest);
            let best = near.min_by(|a, b| a.1.cmp(&b.1).then(a.0.total_cmp(&b.0)));
            assert_eq!(Some(&plans[chosen]), best);
            match simpler {
                Some(simpler) => {
                    assert_eq!(simpler.fastest_s.0, fastest);
                    assert!(simpler.fastest_strategies > plans[chosen].1 as u64);
                    gave_up += 1;
                }
                None => {
                    assert_eq!(plans[chosen].0, fastest);
                    kept += 1;
                }
            }
        }
        assert!(gave_up > 50 && kept > 50, "{gave_up} {kept}");
    }
}
