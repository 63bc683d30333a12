//! More pins hardly ever give a better plan: what somebody knows about a model and a cluster, said
//! as pins, is hardly ever an advantage over the search.
//!
//! Chains of pins are drawn from a seed, each with one pin more than the one before, for small
//! models on machines of many kinds: ample and tight memory, fast and slow links. A plan with fewer
//! pins should take no longer by the simulator, for its space holds the other. One pair in a hundred
//! may differ by more than 1%, none by more than 5%.
//! `RUN_SLOW_TESTS=1` runs more cases.
#![allow(clippy::unwrap_used)]

use ir::cluster::Cluster;
use ir::testing::Rng;
use ir::{Graph, Precision, TrainSpec};
use planner::{Pins, PlanOptions, Planned};
use tests::gpt2;

/// How much longer a step with fewer pins may take.
const SLACK: f64 = 0.01;
/// The most that it is longer in the one of a hundred pairs that is beyond that. These have steps of
/// milliseconds, most of which is traffic: what a program hides is known for what is simulated alone.
const WORST: f64 = 1.05;

struct Case {
    forward: Graph,
    train: TrainSpec,
    cluster: Cluster,
}

impl Case {
    fn draw(rng: &mut Rng) -> Case {
        let layers = rng.between(2, 6);
        let width = 512 * rng.between(1, 4);
        let sequence = 256 << rng.below(3);
        let hosts = [
            ("dgx-h100", 1),
            ("v100-pcie-16gb", 1),
            ("a100-pcie-40gb", 1),
            ("dgx-1-v100-16gb", 2),
        ];
        let (name, hosts) = hosts[rng.below(4) as usize];
        let mut cluster = cost_model::presets::load(name, hosts).unwrap();
        // From what all of the model fits in to where it is split.
        let bytes = cluster.device.memory_bytes.0 >> (2 * rng.below(3));
        cluster.device.memory_bytes.0 = bytes;
        let has_bf16 = cluster
            .device
            .peak_flops_per_s
            .contains_key(&ir::DType::Bf16);
        Case {
            forward: gpt2(layers, width, sequence, 8192),
            train: TrainSpec {
                global_batch: 8 << rng.below(4),
                sequence,
                precision: match has_bf16 {
                    true => Precision::Bf16,
                    false => Precision::F16,
                },
                ..TrainSpec::default()
            },
            cluster,
        }
    }

    fn plan(&self, pins: &[String]) -> Option<Planned> {
        let options = PlanOptions {
            pins: Pins::parse(pins).unwrap(),
            tolerance: 0.0,
            ..PlanOptions::default()
        };
        planner::plan(&self.forward, &self.train, &self.cluster, &options).ok()
    }
}

/// Pins in a drawn order: degrees that multiply to the number of devices, and what is beside them.
fn draw_pins(rng: &mut Rng, n_devices: u64) -> Vec<String> {
    let tensor = 1 << rng.below(3);
    let pipeline = 1 << rng.below(2);
    let data = n_devices / tensor / pipeline;
    let recompute = ["none", "selective", "full"][rng.below(3) as usize];
    let mut pins = vec![
        format!("pipeline={pipeline}"),
        format!("tensor={tensor}"),
        format!("data={data}"),
        format!("zero={}", rng.below(4)),
        format!("recompute={recompute}"),
        format!("microbatch={}", data << rng.below(2)),
    ];
    for i in (1..pins.len()).rev() {
        pins.swap(i, rng.below(i as u64 + 1) as usize);
    }
    pins
}

#[test]
fn more_pins_hardly_ever_give_a_better_plan() {
    let slow = std::env::var("RUN_SLOW_TESTS").is_ok_and(|v| v == "1");
    let n_models = if slow { 20 } else { 12 };
    let (mut compared, mut slower, mut worst) = (0, 0, 1.0f64);
    for seed in 0..n_models {
        let mut is_slower = false;
        let mut rng = Rng::new(seed);
        let case = Case::draw(&mut rng);
        let pins = draw_pins(&mut rng, case.cluster.n_devices().into());
        let chain = (0..=pins.len()).map(|n| &pins[..n]);
        let plans = chain.filter_map(|pins| Some((pins, case.plan(pins)?)));
        let plans: Vec<(&[String], Planned)> = plans.collect();
        for (i, (fewer, free)) in plans.iter().enumerate() {
            for (more, pinned) in &plans[i + 1..] {
                let (free_s, pinned_s) =
                    (free.simulation.step_time.0, pinned.simulation.step_time.0);
                if free_s > pinned_s * (1.0 + SLACK) {
                    eprintln!("seed {seed}: {fewer:?} {free_s} s, {more:?} {pinned_s} s");
                    is_slower = true;
                }
                worst = worst.max(free_s / pinned_s);
                compared += 1;
            }
        }
        slower += i32::from(is_slower);
    }
    assert!(compared > 100, "{compared}");
    assert!(worst <= WORST, "{worst}");
    // Of one model several pairs differ in the same way.
    assert!(
        10 * slower <= n_models as i32,
        "{slower} of {n_models} models"
    );
}
