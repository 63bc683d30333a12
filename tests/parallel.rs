//! Parallel equals single: every degree of data, tensor and pipeline parallelism, every ZeRO
//! level, all schedules, tied and untied embeddings, recomputed activations, and the plan that
//! the search chooses.

use ir::cluster::Cluster;
use ir::collective::CollectiveKind;
use ir::plan::{Plan, ScheduleKind};
use ir::program::{InstrKind, Program};
use ir::training::training_graph;
use runtime::execute::Session;
use serde_json::json;
use tests::{Case, cluster, distance, planned, relative};

/// Steps of each comparison.
const STEPS: usize = 10;

/// Runs a pinned plan and the single device side by side.
fn check(case: &Case, n_devices: u32, pins: &[&str], bit_equal: bool) {
    check_on(case, &cluster(n_devices), pins, bit_equal);
}

/// Runs a plan for some cluster and the single device side by side, and returns the plan.
fn check_on(case: &Case, cluster: &Cluster, pins: &[&str], bit_equal: bool) -> Plan {
    let n_devices = cluster.n_devices();
    let name = format!("{} on {n_devices}: {}", case.forward.name, pins.join(" "));
    let made = planned(&case.forward, &case.train, cluster, pins)
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    assert_eq!(
        made.plan.meshes().map(|m| m.n_devices()).sum::<u32>(),
        n_devices,
        "{name}"
    );
    // The single device keeps every activation, whatever the plan recomputes.
    let kept = training_graph(&case.forward, &case.train).expect("the training graph builds");
    let mut single = case.single(&kept, made.plan.microbatch);
    let mut session = case.session(&made.program);
    let mut in_orders = orders(case, &made.program);
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
        for ordered in &mut in_orders {
            let again = ordered
                .step(batch, case.lr, false)
                .unwrap_or_else(|e| panic!("{name}, streams as queues: {e}"));
            assert_eq!(
                (again.loss, again.grad_norm),
                (many.loss, many.grad_norm),
                "{name} step {step}, streams as queues"
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
    let params = session.params().expect("the parameters are gathered");
    for ordered in &mut in_orders {
        let again = ordered.params().expect("the parameters are gathered");
        assert!(
            again == params,
            "{name}: other parameters, streams as queues"
        );
    }
    // The gradients of key biases are zero but for rounding, which AdamW makes as large as others.
    // Parts of a ring round in another way.
    let rounds = |path: &str| name.contains("=ring") && path.ends_with(".attn.qkv.bias");
    let (mut difference, mut norm) = (0.0, 0.0);
    for (path, tensor) in params.into_iter().filter(|(path, _)| !rounds(path)) {
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
    made.plan
}

/// Sessions whose every step plays the streams in another random order: with the steps of a
/// comparison twenty orders of each plan where slow tests run, else ten.
fn orders(case: &Case, program: &Program) -> Vec<Session> {
    let slow = std::env::var_os("RUN_SLOW_TESTS").is_some();
    let seeds = 0..if slow { 2 } else { 1 };
    seeds
        .map(|seed| case.session_in_orders(program, seed))
        .collect()
}

/// The content and the time of a bucket are nobody's business but the clock's.
#[test]
fn buckets_change_no_bit() {
    let case = Case::load("gpt2_small_tied");
    for zero in 0..=3 {
        let (zero, batch) = (
            format!("zero={zero}"),
            format!("microbatch={}", case.train.global_batch),
        );
        let pins = ["data=4", "tensor=1", "pipeline=1", &zero, &batch];
        let made = planned(&case.forward, &case.train, &cluster(4), &pins)
            .unwrap_or_else(|e| panic!("{zero}: {e}"));
        let programs = [0, 1, 2].map(|seed| {
            let sizes = tests::plans::bucket_sizes(seed);
            lowering::lower_in_buckets(&made.plan, &made.training, &sizes)
                .unwrap_or_else(|e| panic!("{zero}: {e}"))
        });
        assert_eq!(programs[0], made.program, "{zero}");
        assert_ne!(programs[1], made.program, "{zero}: buckets of one tensor");
        let results = programs.map(|program| {
            tests::assert_checked(&made.plan, &made.training, &program);
            let mut session = case.session(&program);
            let step = |batch: &Vec<Vec<u32>>| {
                let done = session.step(batch, case.lr, false);
                done.unwrap_or_else(|e| panic!("{zero}: {e}")).loss
            };
            let losses: Vec<f64> = case.batches.iter().take(3).map(step).collect();
            let params = session.params().expect("the parameters are gathered");
            let bits: Vec<Vec<u32>> = params
                .values()
                .map(|t| t.values.iter().map(|x| x.to_bits()).collect())
                .collect();
            (losses, bits)
        });
        assert!(results[0] == results[1], "{zero}: buckets of one tensor");
        assert!(results[0] == results[2], "{zero}: small buckets");
    }
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

/// Two of the four ZeRO levels, others for the next number: what has many combinations takes turns.
fn two_levels(turn: usize) -> &'static [u8] {
    [&[0, 3], &[1, 2]][turn % 2]
}

/// A number that differs between the schedules of a model's larger products, so that together they have
/// every level with all degrees.
fn takes_turns(schedule: ScheduleKind) -> usize {
    usize::from(matches!(schedule, ScheduleKind::GPipe))
}

fn check_all(name: &str, product: u32, schedule: ScheduleKind) {
    let case = Case::load(name);
    let n_layers = case.forward.layers.len() as u32;
    for (turn, (d, t, p)) in degrees(product).into_iter().enumerate() {
        // A stage has a layer at least.
        let n_stages = p * schedule.virtual_stages();
        let deep = (n_stages > n_layers).then(|| Case::with_layers(name, n_stages));
        let case = deep.as_ref().unwrap_or(&case);
        // Without a data axis a ZeRO level does nothing. Every level with all degrees is for the smaller
        // products.
        let levels: &[u8] = match (d, product) {
            (1, _) => &[0],
            (_, 8..) => two_levels(turn + takes_turns(schedule)),
            _ => &[0, 1, 2, 3],
        };
        for zero in levels {
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
            check(case, d * t * p, &pins, d == 1 && t == 1);
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
    gpt2_untied_2_1f1b: "gpt2_untied_gelu", 2, OneFOneB;
    gpt2_untied_2_gpipe: "gpt2_untied_gelu", 2, GPipe;
    gpt2_untied_4_1f1b: "gpt2_untied_gelu", 4, OneFOneB;
    gpt2_untied_4_gpipe: "gpt2_untied_gelu", 4, GPipe;
    gpt2_untied_8_gpipe: "gpt2_untied_gelu", 8, GPipe;
    llama_tied_4_1f1b: "llama_tied", 4, OneFOneB;
    llama_tied_8_1f1b: "llama_tied", 8, OneFOneB;
    llama_untied_4_1f1b: "llama_untied_rope", 4, OneFOneB;
    llama_untied_8_gpipe: "llama_untied_rope", 8, GPipe;
    gpt2_tied_4_zb_h1: "gpt2_small_tied", 4, ZbH1;
    gpt2_untied_8_zb_h1: "gpt2_untied_gelu", 8, ZbH1;
    llama_untied_4_zb_h1: "llama_untied_rope", 4, ZbH1;
    gpt2_tied_4_zb_v: "gpt2_small_tied", 4, ZbV;
    gpt2_untied_8_zb_v: "gpt2_untied_gelu", 8, ZbV;
    llama_untied_4_zb_v: "llama_untied_rope", 4, ZbV;
}

/// Context parallelism beside data, tensor and pipeline parallelism, with ZeRO levels that take turns
/// and with recomputation; a sequence that the ranks split unevenly too.
fn check_context(case: &str, order: &str, degrees: &[(u32, u32, u32, u32)]) {
    let case = Case::load(case);
    for (turn, &(d, c, t, p)) in degrees.iter().enumerate() {
        for zero in two_levels(turn + (c + t) as usize) {
            let microbatch = (case.train.global_batch / 4).max(u64::from(d));
            let recompute = ["none", "full"][usize::from(*zero % 2)];
            let pins = [
                format!("data={d}"),
                format!("context={c}"),
                format!("context_order={order}"),
                format!("tensor={t}"),
                format!("pipeline={p}"),
                format!("zero={zero}"),
                format!("microbatch={microbatch}"),
                format!("recompute={recompute}"),
            ];
            let pins: Vec<&str> = pins.iter().map(String::as_str).collect();
            check(&case, d * c * t * p, &pins, false);
        }
    }
}

#[test]
fn context_parallel_gpt2() {
    let all = [
        (1, 2, 1, 1),
        (1, 3, 1, 1),
        (2, 2, 1, 1),
        (1, 2, 2, 1),
        (2, 2, 2, 1),
    ];
    check_context("gpt2_small_tied", "natural", &all);
    check_context("gpt2_untied_gelu", "natural", &[(1, 4, 1, 1), (1, 2, 1, 2)]);
}

#[test]
fn context_parallel_llama() {
    check_context(
        "llama_untied_rope",
        "natural",
        &[(1, 4, 1, 1), (2, 2, 2, 1), (1, 2, 2, 2)],
    );
}

/// A table of positions longer than the sequence: its gradient waits for the step's end too.
#[test]
fn zero_levels_of_a_longer_table_of_positions() {
    let mut case = Case::load("gpt2_small_tied");
    case.train.sequence /= 2;
    let options = import::BuildOptions {
        sequence: case.train.sequence,
        dropout: 0.0,
    };
    case.forward = import::model_graph(&case.config, &options).expect("the model builds");
    for sample in case.batches.iter_mut().flatten() {
        sample.truncate(case.train.sequence as usize + 1);
    }
    for pins in [
        ["data=2", "zero=1"],
        ["data=2", "zero=2"],
        ["context=2", "zero=1"],
    ] {
        check(&case, 2, &pins, false);
    }
}

/// States that are split over a part of the data ranks, with copies over the rest (HSDP), at every
/// level, beside tensor and context ranks and a pipeline.
#[test]
fn copies_of_what_a_zero_level_splits() {
    let case = Case::load("llama_untied_rope");
    for (ranks, pins) in [
        (
            4,
            "data=4 replicas=2 tensor=1 pipeline=1 zero=1 microbatch=4",
        ),
        (
            4,
            "data=4 replicas=2 tensor=1 pipeline=1 zero=2 microbatch=4",
        ),
        (
            4,
            "data=4 replicas=2 tensor=1 pipeline=1 zero=3 microbatch=4 recompute=full",
        ),
        (
            2,
            "data=2 replicas=2 tensor=1 pipeline=1 zero=3 microbatch=2",
        ),
        (
            8,
            "data=4 replicas=2 tensor=2 pipeline=1 zero=3 microbatch=4",
        ),
        (
            8,
            "data=4 replicas=2 context=2 tensor=1 pipeline=1 zero=2 microbatch=4",
        ),
        (
            8,
            "data=4 replicas=2 tensor=1 pipeline=2 zero=3 microbatch=4",
        ),
    ] {
        let pins: Vec<&str> = pins.split(' ').collect();
        check(&case, ranks, &pins, false);
    }
}

/// Attention by heads (Ulysses) beside data, tensor and pipeline parallelism, in both orders of
/// the sequence: as many heads as ranks, more, and heads that the ranks share unevenly.
#[test]
fn context_parallel_by_heads() {
    for (name, order, degrees) in [
        (
            "gpt2_small_tied",
            "natural",
            &[(1, 2, 1, 1), (1, 3, 1, 1), (2, 2, 2, 1), (1, 2, 1, 2)][..],
        ),
        ("gpt2_small_tied", "zigzag", &[(1, 4, 1, 1)]),
        (
            "llama_untied_rope",
            "natural",
            &[(2, 2, 1, 1), (1, 2, 2, 1)],
        ),
        ("llama_untied_rope", "zigzag", &[(1, 2, 2, 2)]),
    ] {
        check_context(name, &format!("{order} context_attention=ulysses"), degrees);
    }
}

/// Heads of queries that share keys and values are split where these have too few heads of their
/// own: queries are exchanged, keys and values gathered.
#[test]
fn context_parallel_by_heads_of_queries() {
    let case = Case::load("llama_untied_rope");
    for (n, pins) in [
        (
            2,
            "data=1 context=2 tensor=1 spec:h.*.attn.attend=[_,_,_,context,_]",
        ),
        (
            4,
            "data=1 context=2 context_order=zigzag tensor=2 spec:h.*.attn.attend=[_,_,tensor,context,_]",
        ),
    ] {
        check(&case, n, &[pins, "context_attention=ulysses"], false);
    }
}

/// Keys and values that go around the ranks, beside data, tensor and pipeline parallelism, every ZeRO
/// level and recomputation; sequences that the ranks share unevenly too.
#[test]
fn context_parallel_around_a_ring() {
    for (name, order, degrees) in [
        (
            "gpt2_small_tied",
            "natural",
            &[(1, 2, 1, 1), (1, 3, 1, 1), (2, 2, 2, 1), (1, 2, 1, 2)][..],
        ),
        ("gpt2_small_tied", "zigzag", &[(1, 4, 1, 1)]),
        (
            "llama_untied_rope",
            "natural",
            &[(1, 4, 1, 1), (1, 2, 2, 1)],
        ),
        ("llama_untied_rope", "zigzag", &[(2, 2, 1, 1), (1, 4, 1, 2)]),
    ] {
        check_context(name, &format!("{order} context_attention=ring"), degrees);
    }
}

#[test]
fn heads_for_too_many_context_ranks_are_refused() {
    for (name, pins, said) in [
        (
            "gpt2_small_tied",
            "context=8",
            "splits 4 heads over the context=8 ranks; pin context=4 or less",
        ),
        (
            "llama_tied",
            "context=4",
            "splits 2 heads of keys and values, each for 2 heads of queries, over the context=4 ranks; \
             pin context=2 or less, or context_attention=gather",
        ),
        (
            "gpt2_small_tied",
            "context=2 tensor=4",
            "over the ranks of context=2 x tensor=4, some of which would have none; pin degrees whose \
             product is 4 or less",
        ),
        (
            "gpt2_small_tied",
            "tensor=2",
            "context_attention=ulysses is about the ranks of a context axis; pin context=N too",
        ),
    ] {
        let case = Case::load(name);
        let pins = [pins, "data=1", "context_attention=ulysses"];
        let e = planned(&case.forward, &case.train, &cluster(8), &pins).expect_err("no plan");
        assert!(e.to_string().contains(said), "{e}");
    }
}

/// In zigzag order the ranks train the same model: the single device knows nothing of it.
#[test]
fn context_parallel_in_zigzag_order() {
    check_context("gpt2_small_tied", "zigzag", &[(1, 2, 1, 1), (2, 4, 1, 1)]);
    check_context("llama_untied_rope", "zigzag", &[(1, 2, 2, 1), (1, 4, 1, 2)]);
}

/// With dropout too: elements are named by position, whatever the order that sequences are
/// stored in, and in recomputation.
#[test]
fn dropout_in_zigzag_order_draws_the_masks_of_the_natural_order() {
    let mut case = Case::load("gpt2_small_tied");
    case.train.dropout = 0.2;
    let options = import::BuildOptions {
        sequence: case.train.sequence,
        dropout: case.train.dropout,
    };
    case.forward = import::model_graph(&case.config, &options).expect("the model builds");
    for (n, pins) in [
        (2, "data=1 context=2 context_order=natural"),
        (2, "data=1 context=2 context_order=zigzag"),
        (4, "data=1 context=4 context_order=zigzag recompute=full"),
        (
            4,
            "data=2 context=2 context_order=zigzag zero=3 recompute:*dropout=yes",
        ),
        (
            4,
            "data=1 context=2 context_order=zigzag tensor=2 pipeline=1",
        ),
        (2, "data=1 context=2 context_attention=ulysses"),
        (2, "data=1 context=2 context_attention=ring"),
        (
            4,
            "data=1 context=4 context_order=zigzag context_attention=ring recompute=full",
        ),
        (
            4,
            "data=1 context=4 context_order=zigzag context_attention=ulysses recompute=full",
        ),
        (
            4,
            "data=1 context=2 context_order=zigzag context_attention=ulysses tensor=2 pipeline=1",
        ),
        (
            4,
            "data=1 context=2 context_order=zigzag pipeline=2 microbatch=2",
        ),
    ] {
        check(&case, n, &[pins], false);
    }
}

/// Sequence parallelism inside what the context axis splits off.
#[test]
fn context_and_sequence_parallel() {
    let case = Case::load("llama_tied");
    let pins = [
        "data=1",
        "context=2",
        "tensor=2",
        "zero=1",
        "spec:h.*.norm_1=[data,context+tensor,_]",
        "spec:h.*.residual_1=[data,context+tensor,_]",
    ];
    check(&case, 4, &pins, false);
}

/// Recomputation in every combination with data, tensor and pipeline parallelism and ZeRO; to
/// the bit where the kept activations would be equal to the bit.
fn check_recompute(case: &str, product: u32) {
    let case = Case::load(case);
    for (turn, (d, t, p)) in degrees(product).into_iter().enumerate() {
        if p > case.forward.layers.len() as u32 {
            continue;
        }
        let levels: &[u8] = match (d, product) {
            (1, _) => &[0],
            (_, 8..) => two_levels(turn),
            _ => &[0, 2, 3],
        };
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

/// Interleaved 1F1B with data and tensor parallelism, ZeRO and recomputation, on models with
/// four and five layers, tied and not; to the bit where stages are single ranks.
#[test]
fn interleaved_stages() {
    for name in ["gpt2_small_tied", "gpt2_untied_gelu", "llama_untied_rope"] {
        let case = Case::load(name);
        for (d, t) in [(1, 1), (2, 1), (1, 2), (2, 2)] {
            let levels: &[u8] = if d == 1 { &[0] } else { &[0, 1, 2, 3] };
            for zero in levels {
                let recompute =
                    ["none", "full", "selective"][(d + t + u32::from(*zero)) as usize % 3];
                // One after the other for what has many combinations.
                let both: &[u64] = match (d, (t + u32::from(*zero)) % 2) {
                    (1, _) => &[2, 4],
                    (_, 0) => &[2],
                    _ => &[4],
                };
                for microbatches in both {
                    let pins = [
                        format!("data={d}"),
                        format!("tensor={t}"),
                        "pipeline=2".to_string(),
                        "virtual=2".to_string(),
                        format!("zero={zero}"),
                        format!("microbatch={}", case.train.global_batch / microbatches),
                        format!("recompute={recompute}"),
                    ];
                    let pins: Vec<&str> = pins.iter().map(String::as_str).collect();
                    check(&case, 2 * d * t, &pins, d == 1 && t == 1);
                }
            }
        }
    }
}

/// ZB-H1 and ZB-V with recomputation: what is recomputed is made before input gradients and kept for
/// weight gradients.
#[test]
fn recomputed_for_input_and_weight_gradients() {
    for name in ["gpt2_small_tied", "llama_untied_rope"] {
        let case = Case::load(name);
        for (d, zero) in [(1, 0), (2, 1), (2, 3)] {
            for recompute in ["full", "selective"] {
                for schedule in ["zb_h1", "zb_v"] {
                    let pins = [
                        format!("data={d}"),
                        "tensor=1".to_string(),
                        "pipeline=2".to_string(),
                        format!("zero={zero}"),
                        format!("microbatch={}", case.train.global_batch / 4),
                        format!("schedule={schedule}"),
                        format!("recompute={recompute}"),
                    ];
                    let pins: Vec<&str> = pins.iter().map(String::as_str).collect();
                    check(&case, 2 * d, &pins, d == 1);
                }
            }
        }
    }
}

/// Eight meshes with two stages each, and four with two, on models deep enough: as many
/// microbatches as interleaving wants, and more.
#[test]
fn interleaved_stages_of_long_pipelines() {
    for (name, p, microbatch) in [
        ("gpt2_small_tied", 8, 1),
        ("llama_untied_rope", 4, 2),
        ("gpt2_untied_gelu", 4, 1),
    ] {
        let case = Case::with_layers(name, 2 * p);
        let pins = [
            "data=1".to_string(),
            "tensor=1".to_string(),
            format!("pipeline={p}"),
            "virtual=2".to_string(),
            format!("microbatch={microbatch}"),
        ];
        let pins: Vec<&str> = pins.iter().map(String::as_str).collect();
        let plan = check_on(&case, &cluster(p), &pins, true);
        assert_eq!(plan.stages.len(), 2 * p as usize);
    }
}

/// Where sending takes no time and computing much, the search interleaves a pipeline by itself,
/// and what it makes trains like the single device.
#[test]
fn interleaved_stages_that_the_search_chooses() {
    for name in ["gpt2_small_tied", "llama_untied_rope"] {
        let case = Case::load(name);
        let mut free_links = cluster(2);
        for level in &mut free_links.levels {
            (level.latency_s, level.bandwidth_bytes_per_s) = (0.0, 1e18);
        }
        let rates = free_links.device.peak_flops_per_s.values_mut();
        rates.for_each(|rate| *rate *= 1e-5);
        // Without tiles, of which each of these matmuls would fill a part of one.
        free_links.device.multiprocessors = 0;
        let plan = check_on(&case, &free_links, &["data=1", "tensor=1"], true);
        assert_eq!(
            plan.schedule,
            ScheduleKind::Interleaved { virtual_stages: 2 },
            "{name}"
        );
        let pins = ["data=1", "tensor=1", "schedule=1f1b"];
        let plain = check_on(&case, &free_links, &pins, true);
        assert!(plan.predicted.step_time_s.0 < plain.predicted.step_time_s.0);
    }
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

/// Experts split by all the ranks that split samples or by a part of them, with tensor and
/// pipeline parallelism, every ZeRO level and recomputation; with slots for all tokens and with
/// few.
#[test]
fn experts_are_split_over_ranks() {
    for (turn, name) in ["mixtral", "qwen3_moe", "qwen2_moe"]
        .into_iter()
        .enumerate()
    {
        let mut case = Case::load(name);
        let all = [
            "data=2 expert=2 tensor=1 pipeline=1 zero=0",
            "data=4 expert=4 tensor=1 pipeline=1 zero=1 microbatch=4",
            "data=4 expert=2 tensor=1 pipeline=1 zero=2 microbatch=4",
            "data=4 expert=2 tensor=1 pipeline=1 zero=3 microbatch=8",
            "data=4 replicas=2 expert=2 tensor=1 pipeline=1 zero=3 microbatch=8",
            "data=4 expert=1 tensor=1 pipeline=1 zero=0 microbatch=8",
            "data=2 expert=2 tensor=2 pipeline=1 zero=1 microbatch=4",
            "data=2 expert=2 tensor=2 pipeline=1 zero=3 microbatch=2",
            "data=2 expert=2 tensor=1 pipeline=2 zero=0 microbatch=2",
            "data=2 expert=2 tensor=1 pipeline=1 zero=1 microbatch=4 recompute=full",
            "data=2 expert=1 tensor=2 pipeline=1 zero=0 microbatch=4 recompute=selective",
            "data=1 expert=1 tensor=4 pipeline=1 zero=0 microbatch=2",
            // Experts over all ranks, the tensor axis among them.
            "data=2 expert=2 tensor=2 pipeline=1 zero=1 microbatch=4 \
             spec:h.*.moe.gate.weight=[expert+tensor,_,_] spec:h.*.moe.down.weight=[expert+tensor,_,_]",
            "data=2 expert=2 tensor=2 pipeline=1 zero=1 microbatch=4 \
             spec:h.*.moe.gate=[tensor+expert,data,_,_] spec:h.*.moe.down=[tensor+expert,data,_,_]",
        ];
        // The first model has all, of which the others have a half each.
        let has = |i: &usize| turn == 0 || i % 2 == turn % 2;
        for pins in (0..all.len()).filter(has).map(|i| all[i]) {
            let n = pins.split(' ').filter_map(|p| p.split_once('='));
            let n = n.filter(|(key, _)| ["data", "tensor", "pipeline"].contains(key));
            let n = n
                .map(|(_, n)| n.parse::<u32>().expect("a degree"))
                .product();
            check(&case, n, &[pins], false);
        }
        let few = case.config.clone().with_expert_capacity(1.0);
        case.config = few.expect("the model has experts");
        let options = import::BuildOptions {
            sequence: case.train.sequence,
            dropout: 0.0,
        };
        case.forward = import::model_graph(&case.config, &options).expect("the model builds");
        let pins = "data=4 expert=2 tensor=1 pipeline=1 zero=1 microbatch=4";
        check(&case, 4, &[pins], false);
        for n in [1, 2, 4] {
            check(&case, n, &[], false);
        }
    }
}

/// Latent attention: heads over ranks of a tensor axis, whose latents are whole; sequences over ranks of
/// a context axis in every way; with experts in groups, and pipelines.
#[test]
fn latent_attention_is_split_by_heads_and_by_tokens() {
    for name in ["deepseek_v2_groups", "deepseek_v3"] {
        let case = Case::load(name);
        for (n, pins) in [
            (2, "data=1 tensor=2 pipeline=1 zero=0 microbatch=4"),
            (4, "data=1 tensor=4 pipeline=1 zero=0 microbatch=8"),
            (4, "data=2 expert=2 tensor=2 pipeline=1 zero=1 microbatch=4"),
            (
                4,
                "data=4 expert=4 tensor=1 pipeline=1 zero=3 microbatch=8 recompute=full",
            ),
            (4, "data=2 expert=2 tensor=1 pipeline=2 zero=0 microbatch=2"),
            (
                2,
                "data=1 context=2 context_attention=ring tensor=1 pipeline=1 microbatch=4",
            ),
            (
                2,
                "data=1 context=2 context_attention=ulysses tensor=1 pipeline=1 microbatch=4",
            ),
            (
                2,
                "data=1 context=2 context_attention=gather tensor=1 pipeline=1 microbatch=4",
            ),
        ] {
            check(&case, n, &[pins], false);
        }
        check(&case, 4, &[], false);
    }
}

/// Windows shorter than the sequence, in some layers or all: heads over ranks, and tokens over ranks in
/// every way, by position and in zigzag order.
#[test]
fn windows_are_those_of_the_single_device() {
    for name in ["gemma2", "gemma3", "phi3"] {
        let case = Case::load(name);
        for (n, pins) in [
            (2, "data=1 tensor=2 pipeline=1 zero=0 microbatch=4"),
            (4, "data=2 tensor=1 pipeline=2 zero=1 microbatch=2"),
            (
                4,
                "data=1 context=4 context_attention=ring tensor=1 pipeline=1 microbatch=4",
            ),
            (
                2,
                "data=1 context=2 context_attention=ring context_order=zigzag tensor=1 pipeline=1 microbatch=4",
            ),
            (
                2,
                "data=1 context=2 context_attention=gather tensor=1 pipeline=1 microbatch=4",
            ),
        ] {
            check(&case, n, &[pins], false);
        }
        check(&case, 4, &[], false);
    }
}

/// Queries that see blocks of keys, under a window and a cap too: heads over ranks, and tokens over
/// ranks in every way, by position and in zigzag order.
#[test]
fn blocks_are_those_of_the_single_device() {
    let longformer = json!({"mode": "bslongformer", "block": 2, "attention": "unidirectional",
        "num_sliding_window_blocks": 3});
    let fixed = json!({"mode": "fixed", "block": 2, "attention": "unidirectional",
        "num_local_blocks": 2});
    let one_token = json!({"mode": "bigbird", "block": 1, "attention": "unidirectional",
        "num_sliding_window_blocks": 5, "num_global_blocks": 2});
    for (name, pattern) in [
        ("gpt2_small_tied", longformer),
        ("llama_untied_rope", fixed),
        ("gemma2", one_token),
    ] {
        let case = Case::in_blocks(name, pattern);
        let attends = case.forward.ops().iter().filter_map(|op| op.kind.bounds());
        assert!(attends.map(|b| b.blocks).all(|b| b.is_some()), "{name}");
        for (n, pins) in [
            (2, "data=1 tensor=2 pipeline=1 zero=0 microbatch=4"),
            (4, "data=2 tensor=1 pipeline=2 zero=1 microbatch=2"),
            (
                4,
                "data=2 tensor=2 pipeline=1 zero=3 microbatch=4 recompute=full",
            ),
            (
                4,
                "data=1 context=4 context_attention=ring tensor=1 pipeline=1 microbatch=4",
            ),
            (
                2,
                "data=1 context=2 context_attention=ring context_order=zigzag tensor=1 pipeline=1 microbatch=4",
            ),
            (
                2,
                "data=1 context=2 context_attention=ulysses tensor=1 pipeline=1 microbatch=4",
            ),
            (
                2,
                "data=1 context=2 context_attention=gather context_order=zigzag tensor=1 pipeline=1 microbatch=4",
            ),
        ] {
            check(&case, n, &[pins], false);
        }
        check(&case, 4, &[], false);
        // And it is no other name for seeing all.
        let loss = |case: &Case| {
            let made = planned(&case.forward, &case.train, &cluster(1), &[]).expect("a plan");
            let step = case
                .session(&made.program)
                .step(&case.batches[0], case.lr, false);
            step.expect("a step").loss
        };
        let (some, all) = (loss(&case), loss(&Case::load(name)));
        assert!(relative(some, all) > 1e-5, "{name}: {some} and {all}");
    }
}

/// Scores that fall with the distance, by the slopes of six heads: heads over ranks, evenly and not,
/// and tokens over ranks in every way, by position and in zigzag order.
#[test]
fn slopes_are_those_of_the_single_device() {
    let case = Case::load("bloom");
    for (n, pins) in [
        (2, "data=1 tensor=2 pipeline=1 zero=0 microbatch=4"),
        (4, "data=1 tensor=4 pipeline=1 zero=0 microbatch=8"),
        (
            6,
            "data=2 tensor=3 pipeline=1 zero=3 microbatch=4 recompute=full",
        ),
        (4, "data=2 tensor=1 pipeline=2 zero=1 microbatch=2"),
        (
            4,
            "data=1 context=4 context_attention=ring tensor=1 pipeline=1 microbatch=4",
        ),
        (
            4,
            "data=1 context=2 context_attention=ring context_order=zigzag tensor=2 pipeline=1 microbatch=4",
        ),
        (
            3,
            "data=1 context=3 context_attention=ulysses tensor=1 pipeline=1 microbatch=4",
        ),
        (
            2,
            "data=1 context=2 context_attention=gather context_order=zigzag tensor=1 pipeline=1 microbatch=4",
        ),
    ] {
        check(&case, n, &[pins], false);
    }
    check(&case, 4, &[], false);
}

/// Sinks, each in the row of its head once, whatever ranks split: heads, tokens in every way, samples,
/// experts with biases, stages.
#[test]
fn sinks_are_those_of_the_single_device() {
    let case = Case::load("gpt_oss");
    for (n, pins) in [
        (2, "data=1 expert=1 tensor=2 pipeline=1 zero=0 microbatch=4"),
        (4, "data=1 expert=1 tensor=4 pipeline=1 zero=0 microbatch=8"),
        (4, "data=2 expert=2 tensor=2 pipeline=1 zero=1 microbatch=4"),
        (
            4,
            "data=4 expert=4 tensor=1 pipeline=1 zero=3 microbatch=8 recompute=full",
        ),
        (4, "data=2 expert=2 tensor=1 pipeline=2 zero=0 microbatch=2"),
        (
            2,
            "data=1 context=2 context_attention=ring tensor=1 pipeline=1 microbatch=4 recompute=selective",
        ),
        (
            2,
            "data=1 context=2 context_attention=ulysses tensor=1 pipeline=1 microbatch=4",
        ),
        (
            2,
            "data=1 context=2 context_attention=gather tensor=1 pipeline=1 microbatch=4",
        ),
    ] {
        check(&case, n, &[pins], false);
    }
    check(&case, 4, &[], false);
    // In half precision what sinks leave has the type of the layer, not that of their f32 shares.
    let mut half = case.train.clone();
    half.precision = ir::Precision::Bf16;
    let training = ir::training::training_graph(&case.forward, &half).expect("it builds");
    let graph = &training.graph;
    for path in ["h.0.attn.sink", "h.0.attn.out", "h.0.moe.gate.add_bias"] {
        let op = graph.op(graph.find(path).expect("the op is there"));
        assert_eq!(graph.ty(op.outputs[0]).dtype, ir::DType::Bf16, "{path}");
    }
    // There they are cast, so that their gradients are rounded, and whole before: no level leaves them
    // without a plan.
    for level in 0..=3 {
        let pins = format!("data=2 zero={level}");
        let made = planned(&case.forward, &half, &cluster(2), &[&pins]);
        made.unwrap_or_else(|e| panic!("{pins}: {e}"));
    }
}

/// State spaces: groups of heads over ranks, and the heads of a group; with experts, one of them for all
/// tokens, in pipelines and with sharded parameters.
#[test]
fn state_spaces_are_those_of_the_single_device() {
    let whole = "data=1 tensor=4 pipeline=1 zero=0 microbatch=8";
    let sharded = "data=2 tensor=2 pipeline=1 zero=3 microbatch=4 recompute=selective";
    let gathered = "data=1 context=2 context_attention=gather tensor=1 pipeline=1 microbatch=4";
    let experts = "data=2 expert=2 tensor=2 pipeline=1 zero=1 microbatch=4";
    for (name, n, pins) in [
        ("mamba2", 4, whole),
        (
            "mamba2",
            4,
            "data=2 tensor=1 pipeline=2 zero=1 microbatch=2",
        ),
        ("nemotron_h", 4, sharded),
        ("nemotron_h", 2, gathered),
        ("nemotron_h_latent", 4, experts),
        (
            "nemotron_h_latent",
            4,
            "data=4 tensor=1 pipeline=1 zero=3 microbatch=8 recompute=full",
        ),
    ] {
        check(&Case::load(name), n, &[pins], false);
    }
    check(&Case::load("nemotron_h"), 4, &[], false);
}

/// Modules that predict further tokens: what they read beside the stage before, the embedding of
/// another stage and the head's input, in every kind of plan; one module in several turns; with the
/// head tied to the embedding, so that a table has three users.
#[test]
fn further_tokens_are_those_of_the_single_device() {
    let sharded = "data=2 tensor=2 pipeline=1 zero=3 microbatch=4 recompute=selective";
    let experts = "data=4 expert=4 tensor=1 pipeline=1 zero=1 microbatch=8 recompute=full";
    let stages = "data=1 tensor=1 pipeline=4 schedule=1f1b zero=0 microbatch=2";
    for (name, n, pins) in [
        ("deepseek_v3_further", 4, sharded),
        ("deepseek_v3_further", 4, experts),
        ("deepseek_v3_further", 4, stages),
        (
            "deepseek_v3_further",
            2,
            "data=1 tensor=1 pipeline=2 schedule=zb_h1 zero=0 microbatch=2",
        ),
        (
            "deepseek_v3_further",
            2,
            "data=1 context=2 context_attention=ring tensor=1 pipeline=1 microbatch=4",
        ),
        (
            "nemotron_h_further",
            4,
            "data=2 tensor=1 pipeline=2 virtual=2 zero=1 microbatch=2",
        ),
        (
            "nemotron_h_further",
            4,
            "data=1 tensor=4 pipeline=1 zero=0 microbatch=8",
        ),
    ] {
        check(&Case::load(name), n, &[pins], false);
    }
    check(&Case::load("deepseek_v3_further"), 4, &[], false);
    let tied = Case::tied("deepseek_v3_further");
    check(
        &tied,
        4,
        &["data=2 tensor=1 pipeline=2 zero=2 microbatch=2"],
        false,
    );
    check(
        &tied,
        2,
        &["data=1 tensor=2 pipeline=1 zero=0 microbatch=4"],
        false,
    );
}

/// Tokens go to their experts and back by all-to-alls, and a rank keeps its experts alone.
#[test]
fn tokens_travel_to_their_experts() {
    let case = Case::load("mixtral");
    let pins = ["data=4 expert=2 tensor=1 pipeline=1 zero=0 microbatch=4"];
    let made = planned(&case.forward, &case.train, &cluster(4), &pins).expect("there is a plan");
    let role = &made.program.roles[0];
    let mut moved = std::collections::BTreeSet::new();
    for i in role.templates.iter().flat_map(|t| &t.instructions) {
        if let InstrKind::Collective {
            kind: CollectiveKind::AllToAll,
            axes,
            items,
            ..
        } = &i.kind
        {
            assert_eq!(role.mesh.name(axes[0]), "expert");
            moved.extend(items.iter().map(|x| role.buffer(x.input).name.clone()));
        }
    }
    for path in ["h.0.moe.dispatch", "h.0.moe.down", "grad.h.0.moe.combine.x"] {
        let found = moved.iter().any(|name| name.contains(path));
        assert!(found, "no all-to-all of `{path}` among {moved:?}");
    }
    let state = |path: &str| {
        let buffer = role.buffers.iter().find(|b| b.name == path);
        let buffer = buffer.unwrap_or_else(|| panic!("no buffer `{path}`"));
        buffer.spec.local_shape(&buffer.lens, &role.mesh)
    };
    assert_eq!(state("h.0.moe.up.weight"), [2, 32, 24]);
    assert_eq!(state("h.0.attn.k.weight"), [32, 2, 8]);
}

#[test]
fn expert_pins_that_do_not_fit_are_refused() {
    let case = Case::load("mixtral");
    let refused = |case: &Case, pins: &str| {
        let made = planned(&case.forward, &case.train, &cluster(8), &[pins]);
        made.expect_err("no plan").to_string()
    };
    let text = refused(&case, "data=8 expert=8");
    assert!(
        text.contains("pinned expert=8 splits 4 experts; pin expert=4 or less"),
        "{text}"
    );
    let text = refused(&case, "data=8 expert=3");
    assert!(
        text.contains(
            "does not divide the 8 ranks of the pinned data=8; what fits: expert=1, 2 or 4"
        ),
        "{text}"
    );
    let text = refused(&case, "data=8 spec:h.*.moe.up.weight=[expert,_,_]");
    assert!(text.contains("a pin expert=N adds it"), "{text}");
    let text = refused(&Case::load("llama_tied"), "data=8 expert=2");
    assert!(
        text.contains("splits experts, of which the model has none"),
        "{text}"
    );
}
