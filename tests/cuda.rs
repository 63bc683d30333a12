//! The CUDA backend equals CPU ranks: plans of every kind of parallelism, on the emulated GPU.
//!
//! Each test runs again in a process that has the emulator, where streams go on in a random order.
//! Ranks meet through the host's memory or by the emulator's NCCL, with a GPU each or several on one.

use emulator::harness::{is_emulated, is_emulated_with};
use ir::op::{Binary, Init, Scores};
use ir::program::{Call, InstrKind};
use ir::testing::{GraphOptions, random_graph, sequence_of};
use ir::training::StateRole;
use ir::{Graph, OpKind, Optimizer, Precision, TrainSpec};
use runtime::device::Backend;
use runtime::device::cuda::{Matmuls, Multiplier};
use runtime::execute::{Session, SessionOptions, StateRequest};
use runtime::fabric::Meets;
use tests::{Case, cluster, distance, planned, relative};

/// How a step is played: in list order, or with streams as queues in an order of this seed.
type Orders = &'static [Option<u64>];
const LIST: Orders = &[None];
const QUEUES: Orders = &[Some(7)];
const BOTH: Orders = &[None, Some(7)];
/// Steps of each comparison.
const STEPS: usize = 2;

/// Plays a pinned plan on CPU ranks and on GPUs that meet so, in each of these orders.
fn check(case: &Case, n_devices: u32, pins: &[&str], rounding: f64, meets: (Meets, Orders)) {
    let name = format!("{} on {n_devices}: {}", case.forward.name, pins.join(" "));
    let made = planned(&case.forward, &case.train, &cluster(n_devices), pins)
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    runtime::device::cuda::check(&made.program).unwrap_or_else(|e| panic!("{name}: {e}"));
    let on_cpu = case.session(&made.program);
    let (meets, orders) = meets;
    let session = |orders: &Option<u64>| case.session_on_gpus(&made.program, *orders, meets);
    let on_gpus = orders.iter().map(session).collect();
    let played = (&case.batches[..], case.lr);
    agree(&name, played, rounding, on_cpu, (on_gpus, orders));
}

/// Plays batches at a learning rate on CPU ranks and on GPUs in each of these orders.
fn agree(
    name: &str,
    (batches, lr): (&[Vec<Vec<u32>>], f64),
    rounding: f64,
    mut on_cpu: Session,
    (mut on_gpus, orders): (Vec<Session>, Orders),
) {
    for (step, batch) in batches.iter().take(STEPS).enumerate() {
        let expected = on_cpu.step(batch, lr, false);
        let expected = expected.unwrap_or_else(|e| panic!("{name}, CPU: {e}"));
        for (session, order) in on_gpus.iter_mut().zip(orders) {
            let (way, profile) = match order {
                // Measured is each instruction by itself; elsewhere neighbours are joined.
                None => ("in list order", step == 0),
                Some(_) => ("streams as queues", false),
            };
            let got = session.step(batch, lr, profile);
            let got = got.unwrap_or_else(|e| panic!("{name}, GPU: {e}"));
            for (what, a, b) in [
                ("loss", got.loss, expected.loss),
                ("gradient norm", got.grad_norm, expected.grad_norm),
            ] {
                let is_equal = a.is_nan() && b.is_nan() || relative(a, b) < rounding;
                assert!(
                    is_equal,
                    "{name}, {way}, step {step}: {what} {a} against {b}"
                );
            }
        }
    }
    let expected = on_cpu.params().expect("the parameters are gathered");
    for session in &mut on_gpus {
        session
            .replicas_agree()
            .unwrap_or_else(|e| panic!("{name}: {e}"));
        let params = session.params().expect("the parameters are gathered");
        let (mut difference, mut norm) = (0.0, 0.0);
        // The gradients of key biases are zero but for rounding, which AdamW makes as large as
        // others.
        let rounds = |path: &str| path.ends_with(".attn.qkv.bias");
        for (path, tensor) in params.into_iter().filter(|(path, _)| !rounds(path)) {
            let (d, n) = distance(&tensor.values, &expected[&path].values);
            (difference, norm) = (difference + d, norm + n);
        }
        let off = (difference / norm).sqrt();
        assert!(off <= 10.0 * rounding, "{name}: parameters differ by {off}");
    }
}

/// How far apart f32 results may be.
const F32: f64 = 1e-5;

macro_rules! on_gpus {
    ($($test:ident: $case:literal, $n:literal, [$($pin:literal),*];)*) => {$(
        #[test]
        fn $test() {
            if is_emulated(stringify!($test)) {
                check(&Case::load($case), $n, &[$($pin),*], F32, (Meets::Host, BOTH));
            }
        }
    )*};
}

on_gpus! {
    gpt2_on_one: "gpt2_small_tied", 1, ["data=1"];
    gpt2_data: "gpt2_small_tied", 2, ["data=2", "tensor=1", "pipeline=1"];
    gpt2_tensor: "gpt2_small_tied", 2, ["data=1", "tensor=2", "pipeline=1"];
    gpt2_pipeline: "gpt2_small_tied", 2, ["data=1", "tensor=1", "pipeline=2", "microbatch=1"];
    gpt2_zero_3: "gpt2_small_tied", 2, ["data=2", "tensor=1", "pipeline=1", "zero=3"];
    gpt2_data_tensor_pipeline: "gpt2_untied_gelu", 8,
        ["data=2", "tensor=2", "pipeline=2", "zero=1"];
    llama_on_one: "llama_tied", 1, ["data=1"];
    llama_tensor_zero_3: "llama_untied_rope", 4, ["data=2", "tensor=2", "pipeline=1", "zero=3"];
    gpt2_context: "gpt2_untied_gelu", 2, ["context=2", "data=1", "pipeline=1"];
    gpt2_context_zigzag: "gpt2_untied_gelu", 2,
        ["context=2", "data=1", "pipeline=1", "context_order=zigzag"];
    gpt2_context_ring: "gpt2_untied_gelu", 2,
        ["context=2", "context_attention=ring", "data=1", "pipeline=1", "context_order=zigzag"];
    llama_context_ulysses: "llama_tied", 2,
        ["context=2", "context_attention=ulysses", "data=1", "pipeline=1"];
    llama_linear_rope: "llama_linear_rope", 2, ["data=2", "tensor=1", "pipeline=1"];
    qwen3_tensor: "qwen3", 2, ["data=1", "tensor=2", "pipeline=1"];
    mixtral_on_one: "mixtral", 1, ["data=1"];
    mixtral_experts: "mixtral", 2,
        ["data=2", "expert=2", "tensor=1", "pipeline=1", "microbatch=4"];
    qwen2_moe_experts_tensor: "qwen2_moe", 4,
        ["data=2", "expert=2", "tensor=2", "pipeline=1", "zero=1", "microbatch=4"];
    mistral_window_tensor: "mistral_window", 2, ["data=1", "tensor=2", "pipeline=1"];
    gemma2_on_one: "gemma2", 1, ["data=1"];
    gemma3_context_ring: "gemma3", 2,
        ["context=2", "context_attention=ring", "data=1", "pipeline=1", "context_order=zigzag"];
    bloom_tensor: "bloom", 2, ["data=1", "tensor=2", "pipeline=1"];
    bloom_context_zigzag: "bloom", 2,
        ["context=2", "data=1", "pipeline=1", "context_order=zigzag"];
    deepseek_v3_tensor: "deepseek_v3", 2, ["data=1", "tensor=2", "pipeline=1"];
    deepseek_v3_further_stages: "deepseek_v3_further", 2, ["data=1", "tensor=1", "pipeline=2", "microbatch=4"];
    gpt_oss_experts: "gpt_oss", 2, ["data=2", "expert=2", "tensor=1", "pipeline=1", "microbatch=4"];
}

/// Plays batches at a learning rate on two CPU ranks and on two of GPUs, from states as the graph
/// declares them, but no parameter of zeros.
fn on_two(
    name: &str,
    (forward, train): (&Graph, &TrainSpec),
    pins: &[&str],
    played: (&[Vec<Vec<u32>>], f64),
) {
    let made = planned(forward, train, &cluster(2), pins);
    let made = made.unwrap_or_else(|e| panic!("{name}: {e}"));
    runtime::device::cuda::check(&made.program).unwrap_or_else(|e| panic!("{name}: {e}"));
    let initial = |r: StateRequest<'_>| {
        let graph = &made.training.graph;
        let op = graph.op(graph.find(r.path).expect("the state is there"));
        let OpKind::State { init, .. } = op.kind else {
            panic!("`{}` is no state", r.path);
        };
        let init = match (r.role, init) {
            (StateRole::Parameter, Init::Zeros) => Init::Normal { std: 0.2 },
            _ => init,
        };
        Ok(runtime::init::parameter(7, r.path, init, r.lens))
    };
    let session = |backend, orders| {
        let options = SessionOptions {
            backend,
            orders,
            ..SessionOptions::default()
        };
        Session::new(&made.program, train, options, initial).expect("the ranks start")
    };
    let on_gpus = BOTH.iter().map(|o| session(Backend::Cuda, *o)).collect();
    let on_cpu = session(Backend::Cpu, None);
    agree(name, played, F32, on_cpu, (on_gpus, BOTH));
}

/// Convolutions of several sizes, a pooling and group norms.
#[test]
fn images_on_two() {
    if !is_emulated("images_on_two") {
        return;
    }
    let classes = 12;
    let config = serde_json::json!({
        "model_type": "wide_resnet", "image_size": 19, "num_channels": 3, "base_channels": 8,
        "width_factor": 2, "depths": [1, 1], "num_classes": classes, "norm_groups": 4,
    });
    let config = import::ModelConfig::parse("config.json", config.to_string().as_bytes());
    let options = import::BuildOptions {
        sequence: 1,
        dropout: 0.0,
    };
    let forward = import::model_graph(&config.expect("a config"), &options).expect("it builds");
    let train = TrainSpec {
        global_batch: 4,
        sequence: 1,
        optimizer: Optimizer::Sgd {
            momentum: 0.5,
            weight_decay: 0.0,
        },
        ..TrainSpec::default()
    };
    let token = |step: u32, i: u32| (5 * i + 3 * step) % classes;
    let sample = |t: u32| vec![t, (7 * t + 2) % classes];
    let batch = |step: u32| (0..4).map(|i| sample(token(step, i))).collect();
    let batches: Vec<Vec<Vec<u32>>> = (0..STEPS as u32).map(batch).collect();
    on_two("images", (&forward, &train), &["data=2"], (&batches, 0.05));
}

/// Queries that see blocks of keys, by every way of context ranks.
#[test]
fn blocks_on_two() {
    if !is_emulated("blocks_on_two") {
        return;
    }
    let fixed = serde_json::json!({"mode": "fixed", "block": 2, "attention": "unidirectional",
        "num_local_blocks": 2});
    let case = Case::in_blocks("llama_untied_rope", fixed);
    for pins in [
        &["data=1", "tensor=2", "pipeline=1"][..],
        &[
            "context=2",
            "context_attention=ulysses",
            "data=1",
            "pipeline=1",
        ],
        &[
            "context=2",
            "context_attention=ring",
            "data=1",
            "pipeline=1",
        ],
        &[
            "context=2",
            "context_attention=gather",
            "context_order=zigzag",
            "data=1",
            "pipeline=1",
        ],
    ] {
        check(&case, 2, pins, F32, (Meets::Host, BOTH));
    }
}

/// Small models with experts of every kind: routers by softmax
/// and by sigmoids with a bias, by groups, gates before the experts and after them, experts with
/// biases and gates within bounds, tokens that are dropped, a shared expert.
#[test]
fn experts_of_every_kind() {
    if !is_emulated("experts_of_every_kind") {
        return;
    }
    type Has = fn(&OpKind) -> bool;
    let wanted: [(&str, &[&str], Has); 3] = [
        ("sigmoids and groups", &["data=2", "expert=2"], |op| {
            let OpKind::Route { scores, groups, .. } = op else {
                return false;
            };
            *scores == Scores::Sigmoid && groups.is_some()
        }),
        ("biases and bounds", &["data=2"], |op| {
            matches!(op, OpKind::ClampedSwiglu { .. })
        }),
        ("a shared expert", &["data=2", "expert=2"], |op| {
            matches!(op, OpKind::ScaleRows)
        }),
    ];
    let options = GraphOptions {
        experts: true,
        n_layers: 1,
        blocks_per_layer: 1,
        ..GraphOptions::default()
    };
    for (what, pins, has) in wanted {
        // With an even number of experts where ranks share them.
        let fits = |forward: &Graph| {
            let is_even = |op: &OpKind| match op {
                OpKind::Dispatch { experts, .. } => pins.len() == 1 || experts % 2 == 0,
                _ => true,
            };
            let mut kinds = forward.ops().iter().map(|op| &op.kind);
            kinds.clone().any(has) && kinds.all(is_even)
        };
        let found = (0..2000).map(|seed| random_graph(seed, &options));
        let forward = found.into_iter().find(fits).expect("a graph with these");
        let train = TrainSpec {
            global_batch: 4,
            sequence: sequence_of(&forward).expect("a sequence"),
            optimizer: Optimizer::Sgd {
                momentum: 0.5,
                weight_decay: 0.0,
            },
            ..TrainSpec::default()
        };
        let token = |i: u64| (i * 7 % 11) as u32 % 3;
        let sample = |i: u64| (0..=train.sequence).map(|k| token(31 * i + k)).collect();
        let batch = |step: u64| (0..4).map(|i| sample(4 * step + i)).collect();
        let batches: Vec<Vec<Vec<u32>>> = (0..STEPS as u64).map(batch).collect();
        on_two(what, (&forward, &train), pins, (&batches, 0.05));
    }
}

/// Instructions that are put on the GPU together give the bits that each gives alone; without
/// cuBLASLt, which makes one call of chains and rounds less.
#[test]
fn joined_launches_change_no_bit() {
    if !is_emulated("joined_launches_change_no_bit") {
        return;
    }
    let name = "gpt2_small_tied";
    let two: &[&str] = &["data=2", "tensor=1", "pipeline=1", "zero=1"];
    let is_slow = std::env::var("RUN_SLOW_TESTS").is_ok_and(|v| v == "1");
    let cases: [(Precision, u32, &[&str]); 2] = [
        (Precision::Bf16, 1, &["data=1"]),
        // Shards of the states, and a loss scale whose updates AdamW counts.
        (Precision::F16, 2, two),
    ];
    for (precision, n, pins) in cases.into_iter().take(1 + usize::from(is_slow)) {
        let mut case = Case::load(name);
        case.train.precision = precision;
        let mut made = planned(&case.forward, &case.train, &cluster(n), pins).expect("a plan");
        // Chains do not round the values in the middle, which profiled steps do.
        let templates = made.program.roles.iter_mut().flat_map(|r| &mut r.templates);
        for instruction in templates.flat_map(|t| &mut t.instructions) {
            if matches!(instruction.call, Call::Chained { .. }) {
                instruction.call = Call::Own;
            }
        }
        let bits = |profile: bool| {
            let options = SessionOptions {
                backend: Backend::Cuda,
                meets: Meets::Host,
                matmuls: Matmuls {
                    by: Multiplier::Plain,
                    tf32: false,
                },
                ..SessionOptions::default()
            };
            let mut session = case.session_with(&made.program, options);
            let mut seen = Vec::new();
            for batch in case.batches.iter().take(STEPS) {
                let step = session.step(batch, case.lr, profile).expect("a step");
                seen.extend([step.loss.to_bits(), step.grad_norm.to_bits()]);
            }
            let params = session.params().expect("the parameters are gathered");
            let values = params.into_values().flat_map(|t| t.values);
            seen.extend(values.map(|v| u64::from(v.to_bits())));
            seen
        };
        assert_eq!(bits(true), bits(false), "{name} {precision:?}: other bits");
        let role = &made.program.roles[0];
        let launches = runtime::device::cuda::launches(role);
        let joined = launches.iter().flatten().filter(|n| **n == Some(0)).count();
        // Cleared, squared and updated at least.
        let params = role.states.iter();
        let params = params.filter(|s| s.role == StateRole::Parameter).count();
        assert!(
            joined > 2 * params,
            "{name}: {joined} of {params} parameters"
        );
    }
}

/// Products with what follows them are one call, in steps of several microbatches, and give what CPU
/// ranks give one by one.
#[test]
fn chains_are_one_call() {
    if !is_emulated("chains_are_one_call") {
        return;
    }
    let pins: &[&str] = &["data=1", "microbatch=1"];
    let add = OpKind::Binary { f: Binary::Add };
    for (name, precision, rounding) in [
        ("gpt2_small_tied", Precision::F32, F32),
        ("gpt2_small_tied", Precision::Bf16, 1e-2),
        ("llama_tied", Precision::Bf16, 1e-2),
    ] {
        let mut case = Case::load(name);
        case.train.precision = precision;
        check(&case, 1, pins, rounding, (Meets::Host, LIST));
        let made = planned(&case.forward, &case.train, &cluster(1), pins).expect("a plan");
        assert!(made.program.n_microbatches > 1, "{name}: one microbatch");
        let role = &made.program.roles[0];
        let launches = runtime::device::cuda::launches(role);
        let mut seen = std::collections::BTreeMap::<&str, [usize; 2]>::new();
        for (template, launches) in role.templates.iter().zip(&launches) {
            for (pair, n) in template
                .instructions
                .windows(2)
                .zip(launches.iter().skip(1))
            {
                let kinds = pair.iter().map(|i| match &i.kind {
                    InstrKind::Compute { kind, .. } if *kind == add => "add",
                    InstrKind::Compute { kind, .. } => kind.name(),
                    _ => "",
                });
                if let ["dot_general", then] = kinds.collect::<Vec<_>>()[..] {
                    let [all, fused] = seen.entry(then).or_default();
                    (*all, *fused) = (*all + 1, *fused + usize::from(*n == Some(0)));
                }
            }
        }
        // Of elements: a norm's gradient and a sum, and SwiGLU and its gradient in each layer.
        let of_elements = role
            .templates
            .iter()
            .zip(&launches)
            .flat_map(|(template, launches)| {
                let all = template.instructions.iter().zip(launches);
                all.filter(|(i, _)| {
                    let is_chained = matches!(i.call, Call::Chained { .. });
                    let is_function = |k: &OpKind| *k != add && ir::chain::is_of_elements(k);
                    let is_tanh = |k: &OpKind| format!("{k:?}").contains("GeluTanh");
                    is_chained
                        && matches!(&i.kind, InstrKind::Compute { kind, .. }
                    if is_function(kind) && !is_tanh(kind))
                })
            });
        let of_elements: Vec<_> = of_elements.map(|(_, n)| *n).collect();
        let n_layers = made.training.graph.layers.len() - 2;
        let expected = if name.starts_with("llama") {
            3 * n_layers
        } else {
            0
        };
        assert_eq!(of_elements, vec![Some(0); expected], "{name}");
        // Every weight's gradient is added up where it is made, and every bias added.
        let [sums, summed] = seen["accumulate"];
        assert!(sums > 5 && sums == summed, "{name}: {seen:?}");
        let [adds, added] = seen["add"];
        assert!(adds > 1 && adds == added, "{name}: {seen:?}");
    }
}

/// Half precision rounds at other places than the CPU's kernels only where a sum is split.
#[test]
fn bf16_on_two() {
    if is_emulated("bf16_on_two") {
        let mut case = Case::load("gpt2_small_tied");
        case.train.precision = Precision::Bf16;
        check(
            &case,
            2,
            &["data=1", "tensor=2", "pipeline=1"],
            1e-2,
            (Meets::Host, BOTH),
        );
    }
}

/// Ranks that meet by NCCL, with so many GPUs.
fn by_nccl(test: &str, n_gpus: &str, case: &str, n: u32, pins: &[&str], orders: Orders) {
    let [enabled, connected, connections] = runtime::fabric::nccl::SHARING;
    let gpus = ("MESHWRIGHT_EMULATOR_GPUS", n_gpus);
    let variables = [gpus, enabled, connected, connections];
    if is_emulated_with(test, &variables) {
        check(&Case::load(case), n, pins, F32, (Meets::Nccl, orders));
    }
}

macro_rules! by_nccl {
    ($($test:ident: $orders:ident, $case:literal, $n:literal on $gpus:literal,
        [$($pin:literal),*];)*) => {$(
        #[test]
        fn $test() {
            by_nccl(stringify!($test), $gpus, $case, $n, &[$($pin),*], $orders);
        }
    )*};
}

by_nccl! {
    nccl_data: LIST, "gpt2_small_tied", 4 on "4", ["data=4", "tensor=1", "pipeline=1"];
    nccl_tensor: BOTH, "gpt2_untied_gelu", 4 on "4", ["data=2", "tensor=2", "pipeline=1"];
    nccl_pipeline: LIST, "gpt2_untied_gelu", 4 on "4",
        ["data=2", "tensor=1", "pipeline=2", "microbatch=2"];
    nccl_zero_3: LIST, "llama_untied_rope", 4 on "4", ["data=4", "tensor=1", "pipeline=1", "zero=3"];
    nccl_context: LIST, "gpt2_untied_gelu", 4 on "4",
        ["context=2", "data=2", "pipeline=1", "context_order=zigzag"];
    nccl_context_ring: QUEUES, "gpt2_untied_gelu", 2 on "2",
        ["context=2", "context_attention=ring", "data=1", "pipeline=1"];
    nccl_context_ulysses: LIST, "llama_tied", 2 on "2",
        ["context=2", "context_attention=ulysses", "data=1", "pipeline=1"];
    nccl_experts: BOTH, "mixtral", 4 on "4",
        ["data=4", "expert=2", "tensor=1", "pipeline=1", "zero=2", "microbatch=4"];
    nccl_experts_with_a_shared_one: LIST, "qwen2_moe", 2 on "2",
        ["data=2", "expert=2", "tensor=1", "pipeline=1", "microbatch=4"];
    nccl_on_one_gpu: QUEUES, "gpt2_untied_gelu", 4 on "1",
        ["data=1", "tensor=2", "pipeline=2", "microbatch=1"];
}

/// Gains are summed by two groups of three ranks each, in orders of their own: what these come to
/// is compared within the groups alone, by their contract.
#[test]
fn nccl_groups_sum_in_orders_of_their_own() {
    by_nccl(
        "nccl_groups_sum_in_orders_of_their_own",
        "6",
        "gpt2_untied_gelu",
        6,
        &["data=3", "tensor=2", "pipeline=1"],
        LIST,
    );
}

/// The bound by which a run is refused holds of what ranks say they took, and of the GPUs' memory.
#[test]
fn memory_beside_arenas_has_a_bound() {
    let test = "memory_beside_arenas_has_a_bound";
    if !is_emulated_with(test, &[("MESHWRIGHT_EMULATOR_GPUS", "4")]) {
        return;
    }
    // The emulator counts the memory of its GPUs together.
    let free = || runtime::device::cuda::free_memory(0).expect("it is asked");
    let cases: [(&str, u32, &[&str]); 5] = [
        ("gpt2_small_tied", 1, &["data=1"]),
        (
            "llama_untied_rope",
            4,
            &["data=4", "tensor=1", "pipeline=1", "zero=3"],
        ),
        (
            "gpt2_untied_gelu",
            4,
            &["data=1", "tensor=2", "pipeline=2", "microbatch=1"],
        ),
        (
            "gpt2_untied_gelu",
            2,
            &[
                "context=2",
                "context_attention=ring",
                "data=1",
                "pipeline=1",
            ],
        ),
        (
            "mixtral",
            2,
            &[
                "data=2",
                "expert=2",
                "tensor=1",
                "pipeline=1",
                "microbatch=4",
            ],
        ),
    ];
    for (name, n, pins) in cases {
        let case = Case::load(name);
        let made = planned(&case.forward, &case.train, &cluster(n), pins).expect("it plans");
        let program = &made.program;
        let bound = |role| runtime::device::cuda::beside_arena(program, role).expect("it is known");
        let bounds = program.roles.iter().flat_map(|role| {
            let most = role.arena_bytes + bound(role);
            role.mesh.ranks().map(move |rank| (rank.0 as usize, most))
        });
        let bounds: Vec<(usize, u64)> = bounds.collect();
        let all: u64 = bounds.iter().map(|b| b.1).sum();
        let before = free();
        let mut session = case.session_on_gpus(program, Some(7), Meets::Nccl);
        for (step, batch) in case.batches.iter().take(STEPS).enumerate() {
            let got = session
                .step(batch, case.lr, step == 0)
                .expect("it is played");
            for &(rank, most) in &bounds {
                let peak = got.peak_bytes[rank];
                assert!(peak <= most, "{name}, rank {rank}: {peak} of {most} bytes");
            }
            let taken = before - free();
            assert!(taken <= all, "{name}: {taken} of {all} bytes were taken");
        }
    }
}

/// The ranks of a stage fail in the middle of a step: the error is theirs, and the others stop.
#[test]
fn nccl_names_the_rank_that_failed() {
    let test = "nccl_names_the_rank_that_failed";
    if !is_emulated_with(test, &[("MESHWRIGHT_EMULATOR_GPUS", "4")]) {
        return;
    }
    let case = Case::load("gpt2_untied_gelu");
    let pins = ["data=2", "tensor=1", "pipeline=2", "microbatch=2"];
    let made = planned(&case.forward, &case.train, &cluster(4), &pins).expect("it plans");
    let mut program = made.program;
    let role = &mut program.roles[1];
    let all = role.templates.iter_mut().flat_map(|t| &mut t.instructions);
    let sum = all.into_iter().find_map(|i| match &mut i.kind {
        InstrKind::WorldSum { inputs, .. } => inputs.first_mut(),
        _ => None,
    });
    sum.expect("the norm is a sum of stages").0 = 99;
    let mut session = case.session_on_gpus(&program, None, Meets::Nccl);
    let failed = session.step(&case.batches[0], case.lr, false);
    let error = failed.expect_err("a stage fails").to_string();
    assert!(error.starts_with("rank2 "), "{error}");
    assert!(error.contains("entry 99 of a world sum"), "{error}");
    assert!(session.step(&case.batches[0], case.lr, false).is_err());
}

/// Heads may be too wide for the kernels: said of the program, before a run.
#[test]
fn what_has_no_kernels_is_refused_before_a_run() {
    let config = serde_json::json!({
        "model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 264, "n_positions": 8,
        "vocab_size": 16,
    });
    let config = import::ModelConfig::parse("config.json", config.to_string().as_bytes());
    let options = import::BuildOptions {
        sequence: 8,
        dropout: 0.0,
    };
    let forward = import::model_graph(&config.expect("a config"), &options).expect("it builds");
    let train = TrainSpec {
        global_batch: 1,
        sequence: 8,
        ..TrainSpec::default()
    };
    let made = planned(&forward, &train, &cluster(1), &[]).expect("there is a plan");
    let error = runtime::device::cuda::check(&made.program).expect_err("264 elements");
    let said = error.to_string();
    assert!(
        said.contains("h.0.attn.attend") && said.contains("at most 256"),
        "{said}"
    );
}
