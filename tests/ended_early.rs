//! Who watches a search sees it come closer, and may end it with a plan that holds.

#![allow(clippy::unwrap_used)] // A test may stop at what it does not expect.

use ir::cluster::Cluster;
use ir::{Precision, TrainSpec};
use planner::recipes::Recipe;
use planner::{PlanOptions, Planned, Progress, Watch, Watcher};
use std::sync::{Arc, Mutex};

/// Ends a search once it was told so many times.
struct Patience {
    left: usize,
    seen: Mutex<Vec<Progress>>,
}

impl Patience {
    fn of(left: usize) -> Arc<Patience> {
        Arc::new(Patience {
            left,
            seen: Mutex::default(),
        })
    }
}

impl Watch for Patience {
    fn see(&self, progress: &Progress) {
        self.seen.lock().unwrap().push(progress.clone());
    }

    fn ends(&self) -> bool {
        self.seen.lock().unwrap().len() >= self.left
    }
}

fn cluster(name: &str) -> Cluster {
    cost_model::presets::find(name).unwrap().unwrap()
}

/// GPT-2 of so many layers.
fn planned(layers: u64, cluster: &Cluster, watcher: Watcher) -> Planned {
    let train = TrainSpec {
        global_batch: 64,
        sequence: 1024,
        precision: Precision::Bf16,
        ..TrainSpec::default()
    };
    let options = PlanOptions {
        watcher,
        ..PlanOptions::default()
    };
    let forward = tests::gpt2(layers, 512, train.sequence, 50257);
    planner::plan(&forward, &train, cluster, &options).unwrap()
}

/// Over equal submeshes, and where they are mixed; on equal devices and on unlike ones.
#[test]
fn a_search_that_is_ended_early_gives_a_plan_and_what_is_proved_so_far() {
    let unlike = "h100-sxm*2+nvlink4+infiniband-ndr*2:1,a100-sxm-40gb*2+nvlink3+infiniband-hdr*2:1";
    for (layers, name) in [(48, "dgx-h100:2"), (12, "dgx-h100:1"), (12, unlike)] {
        let cluster = cluster(name);
        let watch = Patience::of(usize::MAX);
        let full = planned(layers, &cluster, Watcher::new(watch.clone()));
        assert_eq!(
            full.plan,
            planned(layers, &cluster, Watcher::default()).plan
        );
        assert!(!full.plan.proof.stopped);
        let seen = watch.seen.lock().unwrap().clone();
        let (last, proof) = (seen.last().unwrap(), &full.plan.proof);
        // Equal submeshes are searched for a few microbatch sizes at a time.
        assert_eq!(last.done, last.of);
        assert!(seen.len() > 1 || layers == 12, "{name}");
        let least = last.best.as_ref().unwrap().objective_s.0;
        let bound = (1.0 - last.best.as_ref().unwrap().gap) * least;
        assert!(
            (bound - proof.lower_bound_s.0).abs() < 1e-9 * bound,
            "{name}"
        );
        // What is known only grows.
        for pair in seen.windows(2) {
            let [a, b] = [&pair[0], &pair[1]].map(|p| p.best.clone().unwrap());
            assert!(
                b.objective_s.0 <= a.objective_s.0 && b.gap <= a.gap + 1e-9,
                "{name}"
            );
        }
        for left in [0, 1] {
            let watch = Patience::of(left);
            let early = planned(layers, &cluster, Watcher::new(watch.clone()));
            let proof = &early.plan.proof;
            assert!(proof.stopped, "{name}");
            assert!(proof.candidates <= full.plan.proof.candidates);
            // The bound holds for all plans, those that were not looked at among them.
            assert!(proof.lower_bound_s.0 <= least * (1.0 + 1e-9), "{name}");
            assert!((0.0..=1.0).contains(&proof.gap), "{name}: {}", proof.gap);
            tests::assert_checked(&early.plan, &early.training, &early.program);
        }
    }
}

/// A recipe is ended with the best of the points that were planned.
#[test]
fn a_recipe_that_is_ended_early_gives_one_of_its_points() {
    let train = TrainSpec {
        global_batch: 64,
        sequence: 1024,
        precision: Precision::Bf16,
        ..TrainSpec::default()
    };
    let forward = tests::gpt2(12, 768, train.sequence, 50257);
    let cluster = cluster("dgx-h100:1");
    let recipe = Recipe::named("megatron").unwrap();
    let watch = Patience::of(0);
    let options = PlanOptions {
        watcher: Watcher::new(watch.clone()),
        ..PlanOptions::default()
    };
    let early = planner::plan_recipe(&forward, &train, &cluster, recipe, &options).unwrap();
    assert!(early.planned.plan.proof.stopped && early.n_points > 1);
    // The searches of points are not told of.
    assert!(watch.seen.lock().unwrap().is_empty());
}
