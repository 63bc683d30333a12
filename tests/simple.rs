//! Simple plans win ties: of what takes hardly longer than the fastest plan, the simplest is taken.

use planner::{PlanOptions, Planned};
use tests::{assert_checked, cluster_with_memory, gpt2};

fn plan(memory: u64, tolerance: f64) -> Planned {
    let forward = gpt2(6, 1024, 512, 8192);
    let train = ir::TrainSpec {
        global_batch: 32,
        sequence: 512,
        precision: ir::Precision::Bf16,
        ..ir::TrainSpec::default()
    };
    let options = PlanOptions {
        tolerance,
        ..PlanOptions::default()
    };
    let cluster = cluster_with_memory(4, memory);
    let made = planner::plan(&forward, &train, &cluster, &options)
        .unwrap_or_else(|e| panic!("{memory} bytes, {tolerance}: {e}"));
    assert_checked(&made.plan, &made.training, &made.program);
    made
}

#[test]
fn a_simpler_plan_is_taken_within_the_tolerance_and_says_what_it_cost() {
    let strategies = |made: &Planned| made.plan.layer_strategies.len();
    let step_s = |made: &Planned| made.plan.predicted.step_time_s.0;
    let mut n_simpler = 0;
    for memory in [470 << 20, 490 << 20, 520 << 20, 560 << 20] {
        let fastest = plan(memory, 0.0);
        assert_eq!(fastest.plan.proof.simpler, None);
        let mut last = strategies(&fastest);
        for tolerance in [0.01, 0.1] {
            let made = plan(memory, tolerance);
            let n = strategies(&made);
            assert!(n <= last, "{memory} bytes, {tolerance}: {n} of {last}");
            assert!(step_s(&made) <= (1.0 + tolerance) * step_s(&fastest));
            last = n;
            // More plans are looked at, so the fastest is no slower.
            let best_s = match &made.plan.proof.simpler {
                Some(simpler) => {
                    assert_eq!(simpler.tolerance, tolerance);
                    assert!(simpler.fastest_s.0 < step_s(&made));
                    n_simpler += 1;
                    simpler.fastest_s.0
                }
                None => step_s(&made),
            };
            assert!(best_s <= step_s(&fastest));
        }
    }
    assert!(
        n_simpler > 1,
        "{n_simpler} of 8 plans are simpler than the fastest"
    );
}
