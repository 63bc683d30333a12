//! Parallel equals single: every degree of data, tensor and pipeline parallelism, every ZeRO
//! level, both schedules, tied and untied embeddings, recomputed activations, and the plan that
//! the search chooses.

use ir::plan::ScheduleKind;
use ir::training::training_graph;
use tests::{Case, cluster, distance, planned, relative};

/// Steps of each comparison.
const STEPS: usize = 10;

/// Runs a pinned plan and the single device side by side.
fn check(case: &Case, n_devices: u32, pins: &[&str], bit_equal: bool) {
    let name = format!("{} on {n_devices}: {}", case.forward.name, pins.join(" "));
    let made = planned(&case.forward, &case.train, &cluster(n_devices), pins)
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    assert_eq!(
        made.plan
            .stages
            .iter()
            .map(|s| s.mesh.n_devices())
            .sum::<u32>(),
        n_devices,
        "{name}"
    );
    // The single device keeps every activation, whatever the plan recomputes.
    let kept = training_graph(&case.forward, &case.train).expect("the training graph builds");
    let mut single = case.single(&kept, made.plan.microbatch);
    let mut session = case.session(&made.program);
    for (step, batch) in case.batches.iter().take(STEPS).enumerate() {
        let one = single.step(batch, case.lr).expect("the single device runs");
        let many = session
            .step(batch, case.lr, false)
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        if bit_equal {
            assert_eq!(
                (many.loss, many.grad_norm),
                (one.loss, one.grad_norm),
                "{name} step {step}"
            );
        }
        assert!(
            relative(many.loss, one.loss) < 1e-5,
            "{name} step {step}: loss {} against {}",
            many.loss,
            one.loss
        );
    }
    session
        .replicas_agree()
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    let (mut difference, mut norm) = (0.0, 0.0);
    for (path, tensor) in session.params().expect("the parameters are gathered") {
        let (d, n) = distance(&tensor.values, &single.states()[&path]);
        if bit_equal {
            assert_eq!(d, 0.0, "{name}: `{path}` is not bit-equal");
        }
        difference += d;
        norm += n;
    }
    assert!(
        difference.sqrt() <= 1e-4 * norm.sqrt(),
        "{name}: parameters differ by {}",
        (difference / norm).sqrt()
    );
}

/// All (data, tensor, pipeline) of a product.
fn degrees(product: u32) -> Vec<(u32, u32, u32)> {
    let divisors = || (1..=product).filter(move |d| product.is_multiple_of(*d));
    divisors()
        .flat_map(|d| divisors().map(move |t| (d, t)))
        .filter(|(d, t)| product.is_multiple_of(d * t))
        .map(|(d, t)| (d, t, product / (d * t)))
        .collect()
}

fn check_all(case: &str, product: u32, schedule: ScheduleKind) {
    let case = Case::load(case);
    let n_layers = case.forward.layers.len() as u32;
    for (d, t, p) in degrees(product) {
        if p > n_layers {
            continue;
        }
        for zero in 0..=3u8 {
            // Without a data axis a ZeRO level does nothing.
            if d == 1 && zero > 0 {
                continue;
            }
            let microbatch = (case.train.global_batch / 4).max(u64::from(d));
            let pins = [
                format!("data={d}"),
                format!("tensor={t}"),
                format!("pipeline={p}"),
                format!("zero={zero}"),
                format!("microbatch={microbatch}"),
                format!("schedule={}", schedule.name()),
            ];
            let pins: Vec<&str> = pins.iter().map(String::as_str).collect();
            check(&case, d * t * p, &pins, d == 1 && t == 1);
        }
    }
}

macro_rules! matrix {
    ($($name:ident: $case:literal, $product:literal, $schedule:ident;)*) => {$(
        #[test]
        fn $name() {
            check_all($case, $product, ScheduleKind::$schedule);
        }
    )*};
}

matrix! {
    gpt2_tied_2_1f1b: "gpt2_small_tied", 2, OneFOneB;
    gpt2_tied_2_gpipe: "gpt2_small_tied", 2, GPipe;
    gpt2_tied_4_1f1b: "gpt2_small_tied", 4, OneFOneB;
    gpt2_tied_4_gpipe: "gpt2_small_tied", 4, GPipe;
    gpt2_tied_8_1f1b: "gpt2_small_tied", 8, OneFOneB;
    gpt2_tied_8_gpipe: "gpt2_small_tied", 8, GPipe;
    gpt2_untied_2_1f1b: "gpt2_untied_gelu", 2, OneFOneB;
    gpt2_untied_2_gpipe: "gpt2_untied_gelu", 2, GPipe;
    gpt2_untied_4_1f1b: "gpt2_untied_gelu", 4, OneFOneB;
    gpt2_untied_4_gpipe: "gpt2_untied_gelu", 4, GPipe;
    gpt2_untied_8_1f1b: "gpt2_untied_gelu", 8, OneFOneB;
    gpt2_untied_8_gpipe: "gpt2_untied_gelu", 8, GPipe;
    llama_tied_4_1f1b: "llama_tied", 4, OneFOneB;
    llama_tied_8_1f1b: "llama_tied", 8, OneFOneB;
    llama_untied_4_1f1b: "llama_untied_rope", 4, OneFOneB;
    llama_untied_8_gpipe: "llama_untied_rope", 8, GPipe;
}

/// Recomputation in every combination with data, tensor and pipeline parallelism and ZeRO; to
/// the bit where the kept activations would be equal to the bit.
fn check_recompute(case: &str, product: u32) {
    let case = Case::load(case);
    for (d, t, p) in degrees(product) {
        if p > case.forward.layers.len() as u32 {
            continue;
        }
        let levels: &[u8] = if d == 1 { &[0] } else { &[0, 2, 3] };
        for zero in levels {
            for recompute in ["full", "selective"] {
                let microbatch = (case.train.global_batch / 4).max(u64::from(d));
                let pins = [
                    format!("data={d}"),
                    format!("tensor={t}"),
                    format!("pipeline={p}"),
                    format!("zero={zero}"),
                    format!("microbatch={microbatch}"),
                    format!("recompute={recompute}"),
                ];
                let pins: Vec<&str> = pins.iter().map(String::as_str).collect();
                check(&case, d * t * p, &pins, d == 1 && t == 1);
            }
        }
    }
}

#[test]
fn recomputed_activations_of_gpt2() {
    for product in [1, 2, 4] {
        check_recompute("gpt2_small_tied", product);
    }
}

#[test]
fn recomputed_activations_of_llama() {
    for product in [1, 8] {
        check_recompute("llama_untied_rope", product);
    }
}

/// Recomputed dropout, attention's too, draws the mask that the forward pass drew.
#[test]
fn recomputed_dropout_draws_the_same_mask() {
    let mut case = Case::load("gpt2_small_tied");
    case.train.dropout = 0.25;
    let options = import::BuildOptions {
        sequence: case.train.sequence,
        dropout: case.train.dropout,
    };
    case.forward = import::model_graph(&case.config, &options).expect("the model builds");
    for pins in [
        &["recompute=full"][..],
        &[
            "recompute=selective",
            "recompute:*.attn.attend=yes",
            "recompute:*dropout=yes",
        ],
    ] {
        check(&case, 1, pins, true);
        check(&case, 2, &[&["data=1", "tensor=2"], pins].concat(), false);
    }
}

/// Some layers recompute and others do not, as Megatron-LM's block method; and single ops.
#[test]
fn layers_recompute_differently() {
    let case = Case::load("gpt2_small_tied");
    for pins in [
        &[
            "pipeline=2",
            "data=1",
            "tensor=1",
            "recompute=full",
            "recompute:h.1.*=no",
        ][..],
        &[
            "pipeline=1",
            "data=1",
            "tensor=1",
            "recompute:*.attn.attend=yes",
        ],
    ] {
        check(
            &case,
            if pins.contains(&"pipeline=2") { 2 } else { 1 },
            pins,
            true,
        );
    }
    let microbatch = format!("microbatch={}", case.train.global_batch / 4);
    let pins = [
        "data=2",
        "tensor=2",
        "zero=0",
        microbatch.as_str(),
        "recompute=selective",
        "recompute:h.0.*=yes",
    ];
    check(&case, 4, &pins, false);
}

#[test]
fn the_plan_that_the_search_chooses() {
    for name in ["gpt2_small_tied", "llama_untied_rope"] {
        let case = Case::load(name);
        for n in [1, 2, 3, 4, 8] {
            check(&case, n, &[], false);
        }
    }
}
