//! Known forms of parallelism are found by the search, not coded: Megatron's split of a block
//! on fast links, data parallelism on large batches, ZeRO's stages as memory shrinks. All
//! assertions are about collectives and buffers of the lowered program.

use ir::collective::CollectiveKind;
use ir::op::Work;
use ir::program::{BufferClass, InstrKind, Instruction, Program, RoleProgram, TemplateKind};
use ir::training::StateRole;
use ir::{BufferId, Bytes, DType, Pass, Precision, TrainSpec};
use planner::{PlanError, Planned};
use tests::{cluster, gpt2, planned};

fn train(global_batch: u64, sequence: u64) -> TrainSpec {
    TrainSpec {
        global_batch,
        sequence,
        precision: Precision::Bf16,
        ..TrainSpec::default()
    }
}

/// One buffer's part in one collective.
struct Part<'a> {
    kind: CollectiveKind,
    pass: Pass,
    layer: Option<&'a str>,
    input: &'a ir::program::Buffer,
}

impl Part<'_> {
    fn gathers(&self) -> bool {
        self.kind == CollectiveKind::AllGather
    }
    fn reduces(&self) -> bool {
        matches!(
            self.kind,
            CollectiveKind::AllReduce(_) | CollectiveKind::ReduceScatter(_)
        )
    }
    /// Parameters and what lives for a step; all else is about activations and gradients.
    fn of_parameter(&self) -> bool {
        matches!(
            self.input.class,
            BufferClass::Persistent | BufferClass::Step
        )
    }
    /// Elements of the whole tensor.
    fn elements(&self) -> f64 {
        self.input.lens.iter().product::<u64>() as f64
    }
}

fn instructions(role: &RoleProgram, kind: TemplateKind) -> impl Iterator<Item = &Instruction> {
    role.templates
        .iter()
        .filter(move |t| t.kind == kind)
        .flat_map(|t| &t.instructions)
}

/// Collectives of one kind of template of a plan with one stage, buffer by buffer.
fn parts(made: &Planned, kind: TemplateKind) -> Vec<Part<'_>> {
    let role = only_role(&made.program);
    let mut parts = Vec::new();
    for i in instructions(role, kind) {
        if let InstrKind::Collective { kind, items, .. } = &i.kind {
            let names = &made.training.graph.layers;
            let of_instruction = i.layer.map(|l| names[l.index()].as_str());
            // A bucket of several layers serves none; its buffers are named after theirs.
            let of_buffer = |name: &str| {
                let mut names = names.iter().map(String::as_str);
                names.find(|l| format!(".{name}").contains(&format!(".{l}.")))
            };
            parts.extend(items.iter().map(|item| {
                let input = role.buffer(item.input);
                Part {
                    kind: *kind,
                    pass: i.pass,
                    layer: of_instruction.or_else(|| of_buffer(&input.name)),
                    input,
                }
            }));
        }
    }
    parts
}

/// The same for one layer, as `all_reduce h.0.attn.out`.
fn of_layer(made: &Planned, kind: TemplateKind, layer: &str) -> Vec<String> {
    parts(made, kind)
        .into_iter()
        .filter(|p| p.layer == Some(layer))
        .map(|p| format!("{} {}", p.kind.name(), p.input.name))
        .collect()
}

/// Parameters that collectives of the microbatches move, whatever moves them.
fn moved_parameters(made: &Planned) -> Vec<String> {
    let roles = made.program.roles.iter();
    let of_role = |role: &RoleProgram| -> Vec<String> {
        [TemplateKind::Forward, TemplateKind::Backward]
            .into_iter()
            .flat_map(|kind| instructions(role, kind).collect::<Vec<_>>())
            .filter_map(|i| match &i.kind {
                InstrKind::Collective { items, .. } => Some(items),
                _ => None,
            })
            .flatten()
            .map(|item| role.buffer(item.input))
            .filter(|b| matches!(b.class, BufferClass::Persistent | BufferClass::Step))
            .map(|b| b.name.clone())
            .collect()
    };
    roles.flat_map(of_role).collect()
}

fn only_role(program: &Program) -> &RoleProgram {
    assert_eq!(program.roles.len(), 1, "one stage");
    &program.roles[0]
}

/// Ranks over which the result of an op is split, per dim.
fn split(made: &Planned, path: &str) -> Vec<u64> {
    let role = only_role(&made.program);
    let result = |i: &Instruction| match &i.kind {
        InstrKind::Compute {
            path: p, outputs, ..
        } if p == path => Some(outputs[0]),
        _ => None,
    };
    let id: BufferId = role
        .templates
        .iter()
        .flat_map(|t| &t.instructions)
        .find_map(result)
        .unwrap_or_else(|| panic!("`{path}` is computed"));
    ways(role, id)
}

fn ways(role: &RoleProgram, id: BufferId) -> Vec<u64> {
    role.buffer(id)
        .spec
        .dims
        .iter()
        .map(|d| d.axes.iter().map(|&a| role.mesh.size(a)).product())
        .collect()
}

fn split_of_state(made: &Planned, path: &str) -> Vec<u64> {
    let role = only_role(&made.program);
    ways(
        role,
        role.states
            .iter()
            .find(|s| s.path == path)
            .unwrap_or_else(|| panic!("`{path}` is a state"))
            .buffer,
    )
}

/// No stage computes faster than the best measured matmul rate of its devices.
fn assert_rates(made: &Planned) {
    let mut all = 0.0;
    for (role, predicted) in made.program.roles.iter().zip(&made.plan.predicted.stages) {
        let mut flops = 0.0;
        for slot in &role.trace {
            for i in &role.template(slot.template).instructions {
                if let InstrKind::Compute {
                    kind,
                    inputs,
                    outputs,
                    ..
                } = &i.kind
                {
                    let local = |ids: &[BufferId]| -> Vec<_> {
                        ids.iter()
                            .map(|&b| (role.buffer(b).dtype, role.local_shape(b)))
                            .collect()
                    };
                    let Work {
                        matmul_flops,
                        attention_flops,
                        ..
                    } = kind.work(&local(inputs), &local(outputs));
                    // A causal kernel executes half of the products.
                    flops += matmul_flops + 0.5 * attention_flops;
                }
            }
        }
        let device = &made.plan.cluster.device;
        let best = device.peak_flops_per_s[&DType::Bf16] * device.matmul_efficiency[&DType::Bf16];
        let rate = flops / predicted.compute_s.0;
        assert!(rate <= best, "{rate:.4e} FLOP/s of at most {best:.4e}");
        all += flops;
    }
    assert!(all > 0.0, "matmuls are counted");
}

#[test]
fn megatrons_split_of_a_block_is_found() {
    for (hidden, sequence) in [(2048, 1024), (4096, 2048)] {
        let forward = gpt2(3, hidden, sequence, 32768);
        let made = planned(&forward, &train(1, sequence), &cluster(8), &["pipeline=1"])
            .expect("there is a plan");
        assert_rates(&made);
        // Columns, then rows: heads and features of the first matmul, the same of the second.
        for (param, ways) in [
            ("attn.qkv.weight", vec![1, 1, 8, 1]),
            ("attn.out.weight", vec![8, 1, 1]),
            ("mlp.fc.weight", vec![1, 8]),
            ("mlp.proj.weight", vec![8, 1]),
        ] {
            assert_eq!(
                split_of_state(&made, &format!("h.1.{param}")),
                ways,
                "{param}"
            );
        }
        assert_eq!(split(&made, "h.1.attn.attend"), [1, 1, 8, 1]);
        assert_eq!(split(&made, "h.1.mlp.act"), [1, 1, 8]);
        // After each of the two, one all-reduce, or one reduce-scatter and one all-gather.
        let forward = of_layer(&made, TemplateKind::Forward, "h.1");
        assert_pairs(&forward, ["h.1.attn.out", "h.1.mlp.proj"]);
        let backward = of_layer(&made, TemplateKind::Backward, "h.1");
        assert_pairs(&backward, ["grad.h.1.mlp.fc.lhs", "grad.h.1.attn.qkv.lhs"]);
        for begin_end in [TemplateKind::StepBegin, TemplateKind::StepEnd] {
            // Norms and biases may be sums over a split sequence, which travel in one bucket,
            // and so may the parts of the norm of all gradients.
            let mut of_weights = of_layer(&made, begin_end, "h.1");
            of_weights.retain(|c| {
                !["norm", "bias", "sum_squares"]
                    .iter()
                    .any(|s| c.contains(s))
            });
            assert_eq!(
                of_weights,
                Vec::<String>::new(),
                "no weight of the block, and no gradient of one, is communicated"
            );
        }
    }
}

/// Exactly these are reduced, once each, and what is reduced to pieces is gathered once.
fn assert_pairs(collectives: &[String], reduced: [&str; 2]) {
    let count = |kind: &str| collectives.iter().filter(|c| c.starts_with(kind)).count();
    let whole = count("all_reduce ");
    let pieces = count("reduce_scatter ");
    for value in reduced {
        let n = collectives
            .iter()
            .filter(|c| {
                **c == format!("all_reduce {value}") || **c == format!("reduce_scatter {value}")
            })
            .count();
        assert_eq!(n, 1, "`{value}` is reduced once: {collectives:?}");
    }
    assert_eq!(
        whole + pieces,
        2,
        "nothing else is reduced: {collectives:?}"
    );
    assert!(
        count("all_gather ") <= pieces,
        "pieces are gathered once: {collectives:?}"
    );
    assert_eq!(
        collectives.len(),
        whole + pieces + count("all_gather "),
        "nothing else is communicated: {collectives:?}"
    );
}

/// Queries stay where their tokens are; keys and values are gathered for them and their
/// gradients added up where the tokens are (Llama 3, Grattafiori et al. 2024, section 3.3.2).
#[test]
fn context_parallel_attention_gathers_keys_and_values() {
    let forward = gpt2(3, 1024, 512, 8192);
    let pins = ["pipeline=1 data=2 context=2 tensor=2 zero=0 context_attention=gather"];
    let made = planned(&forward, &train(8, 512), &cluster(8), &pins).expect("there is a plan");
    assert_eq!(split(&made, "h.1.attn.attend"), [2, 2, 2, 1]);
    assert_eq!(split(&made, "h.1.mlp.act"), [2, 2, 2]);
    assert_eq!(split_of_state(&made, "h.1.mlp.fc.weight"), [1, 2]);
    assert_eq!(
        over_context(&made, TemplateKind::Forward),
        ["all_gather h.1.attn.split:1", "all_gather h.1.attn.split:2"]
    );
    let backward = over_context(&made, TemplateKind::Backward);
    let grads = ["grad.h.1.attn.attend.qkv:1", "grad.h.1.attn.attend.qkv:2"];
    for gradient in grads {
        let reduced = format!("reduce_scatter {gradient}");
        assert!(backward.contains(&reduced), "{backward:?}");
    }
    // Keys and values again; beside them gradients of weights are added up, which is no matter
    // of attention.
    let moved = backward
        .iter()
        .filter(|c| !c.starts_with("all_reduce "))
        .count();
    assert_eq!(moved, 4, "{backward:?}");
}

/// Tokens are exchanged for heads before queries, keys and values are taken apart, and back behind
/// attention (Jacobs et al. 2023); so are their gradients, and what comes out of attention once
/// more, for the gradient of the matmul behind it.
#[test]
fn context_parallel_attention_exchanges_heads() {
    let forward = gpt2(3, 1024, 512, 8192);
    let pins = ["pipeline=1 data=2 context=2 tensor=2 zero=0 context_attention=ulysses"];
    let made = planned(&forward, &train(8, 512), &cluster(8), &pins).expect("there is a plan");
    assert_eq!(split(&made, "h.1.attn.attend"), [2, 1, 4, 1]);
    assert_eq!(split(&made, "h.1.mlp.act"), [2, 2, 2]);
    assert_eq!(
        over_context(&made, TemplateKind::Forward),
        [
            "all_to_all h.1.attn.attend",
            "all_to_all h.1.attn.qkv.add_bias.pieces"
        ]
    );
    let backward = over_context(&made, TemplateKind::Backward);
    let moved: Vec<&String> = backward
        .iter()
        .filter(|c| !c.starts_with("all_reduce "))
        .collect();
    assert_eq!(moved.len(), 3, "{moved:?}");
    assert!(
        moved.iter().all(|c| c.starts_with("all_to_all ")),
        "{moved:?}"
    );
}

/// Keys and values go around the ranks while the parts of attention compute (Liu et al. 2023), and
/// never is more of them on a rank than two shards; their gradients follow them home.
#[test]
fn context_parallel_attention_goes_around_a_ring() {
    let forward = gpt2(3, 1024, 512, 8192);
    let pins = ["pipeline=1 data=1 context=4 tensor=2 zero=0 context_attention=ring"];
    let made = planned(&forward, &train(8, 512), &cluster(8), &pins).expect("there is a plan");
    assert_eq!(split(&made, "h.1.attn.attend"), [1, 4, 2, 1]);
    let forward = over_context(&made, TemplateKind::Forward);
    let shifts = |moved: &[String], of: &str| {
        let is_shift = |c: &&String| c.starts_with("shift ") && c.contains(of);
        moved.iter().filter(is_shift).count()
    };
    assert_eq!(forward.len(), 3 * 2, "{forward:?}");
    assert_eq!(shifts(&forward, "h.1.attn.split:"), 3 * 2, "{forward:?}");
    let backward = over_context(&made, TemplateKind::Backward);
    assert_eq!(shifts(&backward, "h.1.attn.split:"), 3 * 2, "{backward:?}");
    assert_eq!(
        shifts(&backward, "grad.h.1.attn.attend.qkv:"),
        4 * 2,
        "{backward:?}"
    );
    let role = only_role(&made.program);
    let whole = role
        .buffers
        .iter()
        .filter(|b| b.name.starts_with("h.1.attn.split:"));
    for b in whole {
        let tokens = b.spec.local_shape(&b.lens, &role.mesh)[1];
        assert_eq!(tokens, 512 / 4, "{}", b.name);
    }
    // A kernel waits for the shift before its own, and the next shift runs beside it.
    for template in role
        .templates
        .iter()
        .filter(|t| t.kind == TemplateKind::Forward)
    {
        let is_part = |i: &&ir::program::Instruction| matches!(&i.kind, InstrKind::Compute { kind, .. } if !kind.keys().are_all());
        let parts: Vec<_> = template.instructions.iter().filter(is_part).collect();
        assert_eq!(parts.len(), 3 * 4);
    }
}

/// The transfers over the context axis in the second block, by name.
fn over_context(made: &Planned, kind: TemplateKind) -> Vec<String> {
    let role = only_role(&made.program);
    let mut names = Vec::new();
    for i in instructions(role, kind) {
        if let InstrKind::Collective {
            kind, axes, items, ..
        } = &i.kind
            && axes.iter().any(|&a| role.mesh.name(a) == "context")
            && i.layer.is_some_and(|l| l.index() == 2)
        {
            let name = |b: BufferId| role.buffer(b).name.as_str();
            let items = items.iter();
            names.extend(items.map(|it| format!("{} {}", kind.name(), name(it.input))));
        }
    }
    names.sort();
    names
}

#[test]
fn the_search_is_no_slower_than_megatrons_pins() {
    let forward = gpt2(2, 2048, 1024, 32768);
    let step = |pins: &[&str]| {
        planned(&forward, &train(1, 1024), &cluster(8), pins)
            .expect("there is a plan")
            .simulation
            .step_time
            .0
    };
    let (free, megatron) = (
        step(&["pipeline=1"]),
        step(&["pipeline=1", "data=1", "tensor=8"]),
    );
    assert!(free <= megatron * 1.001, "{free} against {megatron}");
}

/// The collectives of ZeRO in the microbatches hide behind kernels, which the additive
/// objective does not know: a pinned level was predicted up to 7% faster than the free plan.
#[test]
fn the_search_is_no_slower_than_a_pinned_zero_level() {
    let mut n_levels = 0;
    for (preset, hosts, batch) in [("dgx-h100", 1, 32), ("dgx-h100", 2, 64)] {
        let forward = gpt2(2, 1024, 512, 8192);
        let cluster = cost_model::presets::load(preset, hosts).expect("the preset loads");
        let plan = |pins: &[&str]| {
            planned(&forward, &train(batch, 512), &cluster, pins).expect("there is a plan")
        };
        let step = |made: &Planned| made.simulation.step_time.0;
        let free = plan(&[]);
        for level in ["zero=0", "zero=1", "zero=2", "zero=3"] {
            let pinned = plan(&[level]);
            if level != "zero=3" {
                assert_eq!(moved_parameters(&pinned), Vec::<String>::new(), "{level}");
            }
            assert!(
                step(&free) <= step(&pinned),
                "{preset} x {hosts}: {} free, {} with {level}",
                step(&free),
                step(&pinned)
            );
            // A level is for the simulator to choose: the bound is that of the free search.
            let proof = &free.plan.proof;
            assert!(proof.lower_bound_s.0 <= pinned.plan.proof.objective_s.0);
        }
        let chosen = free.stats.alternatives.iter();
        let mut chosen = chosen.filter(|(_, seconds)| seconds.0 == step(&free));
        let is_assumed = |what: &str| what.contains("ZeRO level") || what.contains("on their way");
        n_levels += u32::from(chosen.all(|(what, _)| is_assumed(what)));
        assert_eq!(plan(&[]).plan, free.plan);
    }
    assert!(n_levels > 0, "neither a level nor hiding made a difference");
}

/// A parameter that is split over an axis on which no degree is pinned, and gathered wherever it
/// is used, is ZeRO-3: `zero=1` was given such plans.
#[test]
fn below_zero_3_no_microbatch_moves_parameters() {
    let forward = gpt2(2, 1024, 512, 8192);
    let plan = |pins: &[&str]| {
        planned(&forward, &train(256, 512), &cluster(8), pins).expect("there is a plan")
    };
    for stages in ["pipeline=1", "pipeline=2"] {
        for level in ["zero=0", "zero=1", "zero=2"] {
            let made = plan(&[stages, level, "microbatch=64"]);
            assert_eq!(
                moved_parameters(&made),
                Vec::<String>::new(),
                "{stages} {level}"
            );
            assert_rates(&made);
        }
        // Where features are split, an op computes with its part as it lies.
        let made = plan(&[stages, "zero=0", "tensor=4"]);
        assert_eq!(moved_parameters(&made), Vec::<String>::new(), "{stages}");
    }
    assert!(!moved_parameters(&plan(&["pipeline=1", "zero=3"])).is_empty());
    // A pinned layout may leave no way.
    let pins = [
        "pipeline=1",
        "microbatch=64",
        "spec:prepare.h.0.ln_1.weight=[y]",
    ];
    assert!(planned(&forward, &train(256, 512), &cluster(8), &pins).is_ok());
    let pins = [&pins[..], &["zero=1"]].concat();
    let refused = planned(&forward, &train(256, 512), &cluster(8), &pins);
    let said = refused
        .expect_err("it would have to be gathered")
        .to_string();
    let named = "the pin zero=1 forbids to gather `prepare.h.0.ln_1.weight` for op `h.0.ln_1";
    assert!(said.contains(named), "{said}");
}

#[test]
fn large_batches_split_over_samples() {
    let forward = gpt2(2, 1024, 512, 8192);
    for (pins, n_microbatches) in [
        (&["pipeline=1"][..], None),
        // Free, it may reduce in every microbatch, where that hides behind kernels.
        (&["pipeline=1", "microbatch=64", "zero=1"][..], Some(4)),
    ] {
        let made = planned(&forward, &train(256, 512), &cluster(8), pins).expect("there is a plan");
        assert_rates(&made);
        if let Some(m) = n_microbatches {
            assert_eq!(made.plan.n_microbatches, m);
        }
        for layer in ["h.0", "h.1"] {
            for path in [
                "attn.qkv",
                "attn.attend",
                "attn.out",
                "mlp.fc",
                "mlp.act",
                "mlp.proj",
            ] {
                assert_eq!(
                    split(&made, &format!("{layer}.{path}"))[0],
                    8,
                    "{layer}.{path}"
                );
            }
            // Samples need nothing of each other; parameters may be split and gathered, where no
            // ZeRO level below 3 is pinned.
            let forward = of_layer(&made, TemplateKind::Forward, layer);
            let gathers = |c: &String| c.starts_with(&format!("all_gather cast.{layer}."));
            let may_gather = n_microbatches.is_none();
            let expected = |c: &String| may_gather && gathers(c);
            assert!(forward.iter().all(expected), "{forward:?}");
        }
        let in_block = |p: &&Part| {
            let gathers_parameter = p.gathers() && p.of_parameter();
            p.layer.is_some_and(|l| l.starts_with("h.")) && !gathers_parameter
        };
        let backward = parts(&made, TemplateKind::Backward);
        let end = parts(&made, TemplateKind::StepEnd);
        if made.plan.n_microbatches == 1 {
            // One microbatch: reducing its gradients is reducing the step's.
            assert!(
                backward
                    .iter()
                    .filter(in_block)
                    .all(|p| p.pass == Pass::BW && p.reduces())
            );
        } else {
            assert_eq!(
                backward.iter().filter(in_block).count(),
                0,
                "gradients are reduced once per step"
            );
        }
        let reduced: Vec<&Part> = backward
            .iter()
            .chain(&end)
            .filter(|p| p.reduces())
            .collect();
        for weight in ["attn.qkv", "attn.out", "mlp.fc", "mlp.proj"] {
            for layer in ["h.0", "h.1"] {
                let names = [
                    format!("grad.{layer}.{weight}.rhs"),
                    format!("accumulate.{layer}.{weight}.1"),
                ];
                let n = reduced
                    .iter()
                    .filter(|p| names.contains(&p.input.name))
                    .count();
                assert_eq!(n, 1, "the gradient of {layer}.{weight} is reduced once");
            }
        }
        let launches = instructions(only_role(&made.program), TemplateKind::StepEnd)
            .filter(|i| matches!(i.kind, InstrKind::Collective { .. }))
            .count();
        // A reduction over two axes may take two steps; vectors, matrices and norms differ.
        assert!(
            launches <= 6,
            "{launches} collectives at the end of the step: coalesced"
        );
    }
}

/// GPT-2 as it is published, one microbatch: its gradients travel together, in buckets like those
/// of PyTorch's DistributedDataParallel, and begin to while others are still made.
#[test]
fn gradients_are_reduced_in_a_handful_of_buckets() {
    let config = include_bytes!("../models/gpt2/config.json");
    let config =
        import::ModelConfig::parse("config.json", &config[..]).expect("the config is valid");
    let options = import::BuildOptions {
        sequence: 1024,
        dropout: 0.0,
    };
    let forward = import::model_graph(&config, &options).expect("the model builds");
    let pins = [
        "pipeline=1",
        "data=8",
        "tensor=1",
        "zero=0",
        "microbatch=64",
    ];
    let made = planned(&forward, &train(64, 1024), &cluster(8), &pins).expect("there is a plan");
    assert_rates(&made);
    let role = only_role(&made.program);
    let backward: Vec<&Instruction> = instructions(role, TemplateKind::Backward).collect();
    let bytes = |b: &BufferId| role.buffer(*b).bytes;
    let mut reduced: Vec<BufferId> = Vec::new();
    let mut buckets: Vec<usize> = Vec::new();
    for (at, i) in backward.iter().enumerate() {
        if !matches!(i.kind, InstrKind::Collective { .. }) {
            continue;
        }
        buckets.push(at);
        let members = i.reads();
        // A bucket is full at 25 MiB: without the member that filled it, it was not.
        let all: u64 = members.iter().map(bytes).sum();
        let last = members.last().map_or(0, bytes);
        assert!(
            all - last < 25 << 20,
            "{all} bytes of {} gradients",
            members.len()
        );
        reduced.extend(members);
    }
    let n_reduced = reduced.len();
    reduced.sort_unstable();
    reduced.dedup();
    assert_eq!(reduced.len(), n_reduced, "every gradient is reduced once");
    let n_parameters = made.training.states.iter();
    let n_parameters = n_parameters
        .filter(|s| s.role == StateRole::Parameter)
        .count();
    // The table's two uses have a gradient each.
    assert!(
        n_reduced + 2 >= n_parameters,
        "{n_reduced} of {n_parameters}"
    );
    assert!(buckets.len() <= 14, "{} reductions", buckets.len());
    // The first half of them is sent before the last third of the pass.
    let middle = buckets[buckets.len() / 2];
    assert!(middle < backward.len() * 2 / 3, "{buckets:?}");
    // And kernels run between a bucket and the use of what it reduced.
    for &at in &buckets[..buckets.len() / 2] {
        let results = backward[at].writes();
        let used = |i: &&Instruction| i.reads().iter().any(|b| results.contains(b));
        let wait = backward[at + 1..].iter().position(used);
        assert!(wait.is_some_and(|n| n >= 10), "{wait:?} after {at}");
    }
}

/// Shares, by elements, of what ZeRO splits.
#[derive(Debug)]
struct Zero {
    /// Moments that are split.
    states: f64,
    /// Gradients reduced to pieces in every microbatch.
    gradients: f64,
    /// Parameters gathered in every forward, and in every backward.
    parameters: (f64, f64),
    /// Gradients reduced to pieces at the end of the step.
    reduced_at_end: f64,
    /// Parameters gathered once per step.
    gathered_once: f64,
}

fn zero(made: &Planned) -> Zero {
    let role = only_role(&made.program);
    let elements = |id: BufferId| role.buffer(id).lens.iter().product::<u64>() as f64;
    let moments = || role.states.iter().filter(|s| s.role == StateRole::Moment1);
    let total: f64 = moments().map(|s| elements(s.buffer)).sum();
    let share = |kind: TemplateKind, wanted: &dyn Fn(&Part) -> bool| {
        parts(made, kind)
            .iter()
            .filter(|p| wanted(p))
            .map(Part::elements)
            .sum::<f64>()
            / total
    };
    let scattered = |p: &Part| matches!(p.kind, CollectiveKind::ReduceScatter(_));
    let gathered = |p: &Part| p.gathers() && p.of_parameter();
    Zero {
        states: moments()
            .filter(|s| !role.buffer(s.buffer).spec.is_replicated())
            .map(|s| elements(s.buffer))
            .sum::<f64>()
            / total,
        gradients: share(TemplateKind::Backward, &|p| {
            scattered(p) && p.pass == Pass::BW
        }),
        parameters: (
            share(TemplateKind::Forward, &gathered),
            share(TemplateKind::Backward, &gathered),
        ),
        reduced_at_end: share(TemplateKind::StepEnd, &scattered),
        gathered_once: share(TemplateKind::StepBegin, &|p| p.gathers()),
    }
}

#[test]
fn memory_pressure_splits_states_then_gradients_then_parameters() {
    let forward = gpt2(2, 1024, 256, 8192);
    let train = train(64, 256);
    // Links that are slow to start, so that with plenty of memory nothing is worth splitting.
    let with_memory = |bytes: u64| {
        let mut c = cluster(8);
        c.levels[0].latency_s = 200e-6;
        for p in &mut c.levels[0].protocols {
            p.start_s = 1.2e-3;
        }
        (c.device.memory_bytes, c.device.memory_reserved_bytes) = (Bytes(bytes), Bytes(0));
        c.device.memory_headroom = 0.0;
        c
    };
    let fixed = [
        "pipeline=1",
        "data=8",
        "tensor=1",
        "microbatch=8",
        "recompute=none",
    ];
    let plan = |bytes: u64, more: &[&str]| {
        planned(
            &forward,
            &train,
            &with_memory(bytes),
            &[&fixed[..], more].concat(),
        )
    };
    let plenty = 80 << 30;
    // The memory of each level, by the pins.
    let footprint: Vec<u64> = (0..4)
        .map(|level| {
            let made = plan(plenty, &[&format!("zero={level}")]).expect("there is memory");
            let z = zero(&made);
            let expected = [level >= 1, level >= 2, level >= 3];
            let found = [
                z.states > 0.999,
                z.gradients > 0.999,
                z.parameters.0 > 0.999 && z.parameters.1 > 0.7,
            ];
            assert_eq!(found, expected, "zero={level}: {z:?}");
            assert_eq!(z.reduced_at_end > 0.999, level == 1, "zero={level}: {z:?}");
            assert_eq!(
                z.gathered_once > 0.999,
                level == 1 || level == 2,
                "zero={level}: {z:?}"
            );
            lowering::memory_report(&made.program.roles[0]).arena.0
        })
        .collect();
    assert!(footprint.windows(2).all(|w| w[1] < w[0]), "{footprint:?}");
    let between = |a: usize, b: usize| (footprint[a] + footprint[b]) / 2;
    let chosen = |bytes: u64| {
        let made = plan(bytes, &[]).unwrap_or_else(|e| panic!("{bytes} bytes: {e}"));
        assert!(made.program.roles[0].arena_bytes <= bytes);
        assert_rates(&made);
        zero(&made)
    };
    let z = chosen(plenty);
    assert!(
        z.states == 0.0 && z.gradients == 0.0 && z.parameters == (0.0, 0.0),
        "plenty of memory: {z:?}"
    );
    let z = chosen(between(0, 1));
    assert!(
        z.states > 0.5 && z.reduced_at_end > 0.5 && z.gathered_once > 0.5,
        "states are split: {z:?}"
    );
    assert!(
        z.gradients == 0.0 && z.parameters == (0.0, 0.0),
        "and nothing else: {z:?}"
    );
    let z = chosen(between(1, 2));
    assert!(
        z.states > 0.9 && z.gradients > 0.4,
        "gradients are split too: {z:?}"
    );
    assert!(
        z.parameters.0 < 0.5 && z.parameters.1 < 0.5,
        "parameters mostly not: {z:?}"
    );
    let z = chosen(footprint[3] + (footprint[2] - footprint[3]) / 4);
    assert!(
        z.states > 0.9 && z.gradients > 0.5 && z.parameters.0 > 0.25 && z.parameters.1 > 0.25,
        "parameters are split too: {z:?}"
    );
    match plan(footprint[3] / 2, &[]) {
        Err(
            e @ PlanError::Memory {
                needed, capacity, ..
            },
        ) => {
            assert_eq!(capacity, footprint[3] / 2);
            assert!(
                needed > capacity && needed < footprint[3] + footprint[3] / 10,
                "the nearest plan needs {needed}"
            );
            assert!(
                e.to_string()
                    .contains(&format!("{} more", Bytes(needed - capacity))),
                "{e}"
            );
        }
        other => panic!(
            "expected too little memory, found {:?}",
            other.map(|m| m.simulation.step_time)
        ),
    }
}

#[test]
fn tensor_pins_hold() {
    let forward = gpt2(2, 512, 256, 4096);
    let made = |pins: &[&str]| planned(&forward, &train(8, 256), &cluster(8), pins);
    let degrees = ["pipeline=1", "data=2", "tensor=4"];
    for (pin, path, ways) in [
        (
            "spec:h.*.attn.qkv.weight=[_,_,tensor,_]",
            "attn.qkv.weight",
            vec![1, 1, 4, 1],
        ),
        (
            "spec:h.*.attn.qkv.weight=[tensor,_,_,_]",
            "attn.qkv.weight",
            vec![4, 1, 1, 1],
        ),
        ("spec:h.*.mlp.fc.weight=[_,_]", "mlp.fc.weight", vec![1, 1]),
        (
            "spec:h.*.mlp.fc.weight=[data,tensor]",
            "mlp.fc.weight",
            vec![2, 4],
        ),
    ] {
        let plan = made(&[&degrees[..], &[pin]].concat()).unwrap_or_else(|e| panic!("{pin}: {e}"));
        for layer in ["h.0", "h.1"] {
            assert_eq!(
                split_of_state(&plan, &format!("{layer}.{path}")),
                ways,
                "{pin}"
            );
        }
    }
    // Only the layer that is named.
    let plan = made(&[&degrees[..], &["spec:h.1.mlp.act=[data,tensor,_]"]].concat())
        .expect("the pin can be met");
    assert_eq!(split(&plan, "h.1.mlp.act"), [2, 4, 1]);
    assert_ne!(split(&plan, "h.0.mlp.act"), [2, 4, 1]);
}

#[test]
fn pins_that_cannot_be_met_are_errors() {
    let forward = gpt2(1, 512, 256, 4096);
    let degrees = ["pipeline=1", "data=2", "tensor=4"];
    let mut wrong = Vec::new();
    for (pin, says) in [
        // More dims than the tensor has.
        ("spec:h.0.mlp.fc.bias=[_,_]", "h.0.mlp.fc.bias"),
        // A data axis splits samples, not positions.
        ("spec:h.0.mlp.act=[_,data,_]", "h.0.mlp.act"),
        // No such axis.
        ("spec:h.0.mlp.fc.weight=[_,diagonal]", "h.0.mlp.fc.weight"),
        // No such tensor.
        ("spec:h.7.mlp.fc.weight=[_,tensor]", "h.7.mlp.fc.weight"),
    ] {
        match planned(
            &forward,
            &train(8, 256),
            &cluster(8),
            &[&degrees[..], &[pin]].concat(),
        ) {
            Err(e) if e.to_string().contains(says) => {}
            Err(e) => wrong.push(format!("{pin}: {e}")),
            Ok(_) => wrong.push(format!("{pin} is ignored")),
        }
    }
    assert_eq!(wrong, Vec::<String>::new());
}

#[test]
fn a_context_of_any_size_is_refused_without_room_for_it() {
    let forward = gpt2(1, 128, 32, 256);
    for ranks in ["3", "2147483647", "4294967295"] {
        let pins = [format!("context={ranks}"), "context_order=zigzag".into()];
        let pins: Vec<&str> = pins.iter().map(String::as_str).collect();
        let e = planned(&forward, &train(8, 32), &cluster(8), &pins).expect_err("no such cluster");
        assert!(e.to_string().contains(&format!("context={ranks}")), "{e}");
        let ranks = ranks.parse().expect("a number");
        assert!(matches!(
            ir::zigzag::zigzag(&forward, ranks),
            Err(ir::zigzag::ZigzagError::Chunks { len: 32, chunks }) if chunks == 2 * ranks
        ));
    }
}

#[test]
fn lengths_that_nobody_could_hold_are_refused() {
    let text = |rows: &str| {
        format!(
            r#"graph "g" {{
  layers "embed", "head"
  %0 = input {{kind: tokens}} : i32[B,4] @ embed.tokens F microbatch layer 0
  %1 = state {{decay: true, init: zeros}} : f32[{rows},3] @ embed.table Update step_begin layer 0
  %2 = embedding %1, %0 : f32[B,4,3] @ embed.gather F microbatch layer 0
  %3 = state {{decay: true, init: zeros}} : f32[6,3] @ head.weight Update step_begin layer 1
  %4 = dot_general {{einsum: "bsh,vh->bsv"}} %2, %3 : f32[B,4,6] @ head.logits F microbatch layer 1
  %5 = input {{kind: labels}} : i32[B,4] @ head.labels F microbatch layer 1
  %6 = log_sum_exp %4 : f32[B,4] @ head.lse F microbatch layer 1
  %7 = cross_entropy %4, %6, %5 : f32[B,4] @ head.loss F microbatch layer 1
  %8 = reduce {{dims: [0, 1], kind: sum}} %7 : f32[] @ head.sum F microbatch layer 1
  return %8
}}
"#
        )
    };
    let plan = |rows: &str| {
        let forward = ir::text::parse(&text(rows)).expect("the text is a graph");
        planned(&forward, &train(2, 4), &cluster(2), &[])
    };
    plan("6").expect("six rows can be held");
    for rows in ["0", "9223372036854775807"] {
        let e = plan(rows).expect_err("nobody can").to_string();
        assert!(e.contains("embed.table") && e.contains(rows), "{e}");
    }
}

#[test]
fn a_zero_pin_without_a_data_axis_does_nothing() {
    let forward = gpt2(1, 512, 256, 4096);
    let made = |pins: &[&str]| {
        planned(&forward, &train(8, 256), &cluster(8), pins).expect("there is a plan")
    };
    let degrees = ["pipeline=1", "data=1", "tensor=8", "microbatch=8"];
    let plain = made(&degrees);
    for zero in ["zero=1", "zero=3"] {
        assert_eq!(
            made(&[&degrees[..], &[zero]].concat()).program,
            plain.program,
            "{zero}"
        );
    }
}

#[test]
fn copies_are_summed_over_the_parts_that_a_zero_level_leaves() {
    let forward = gpt2(2, 512, 256, 4096);
    let pins = ["pipeline=1", "data=8", "replicas=2", "tensor=1", "zero=3"];
    let made = planned(&forward, &train(8, 256), &cluster(8), &pins).expect("there is a plan");
    let role = only_role(&made.program);
    let whole = |b: BufferId| {
        let b = role.buffer(b);
        b.lens.iter().product::<u64>() * b.dtype.bytes()
    };
    // Moments lie over four of the eight data ranks.
    let moments = role.states.iter().filter(|s| s.role == StateRole::Moment1);
    for state in moments {
        let b = role.buffer(state.buffer);
        let parts = whole(state.buffer) as f64 / b.bytes as f64;
        assert!((3.9..=4.0).contains(&parts), "{}: {parts}", b.name);
    }
    // So gradients are reduced to parts over these, and the parts over the two copies.
    let mut over: [u64; 2] = [0, 0];
    for i in role.templates.iter().flat_map(|t| &t.instructions) {
        let InstrKind::Collective {
            kind, axes, items, ..
        } = &i.kind
        else {
            continue;
        };
        let names: Vec<&str> = axes.iter().map(|a| role.mesh.name(*a)).collect();
        let bytes = items.iter().map(|item| role.buffer(item.input).bytes);
        match (kind, &names[..]) {
            (CollectiveKind::ReduceScatter(_), ["data"]) => over[0] += bytes.sum::<u64>(),
            (CollectiveKind::AllReduce(_), ["replica"]) => over[1] += bytes.sum::<u64>(),
            (CollectiveKind::AllGather, names) => assert_eq!(names, ["data"]),
            _ => {}
        }
    }
    assert!(over[1] > 0 && over[0] >= 4 * over[1], "{over:?}");
}

#[test]
fn a_pinned_split_gives_every_stage_its_layers() {
    // Six layers: the embedding, four blocks, the output layer.
    let forward = gpt2(4, 512, 256, 4096);
    let made = |pins: &[&str]| planned(&forward, &train(16, 256), &cluster(8), pins);
    let plan = made(&["pipeline=2", "split=2/4"])
        .expect("there is a plan")
        .plan;
    let layers = |stage: &ir::plan::StagePlan| stage.runs.iter().map(|run| run.count).sum();
    let counts: Vec<u32> = plan.stages.iter().map(layers).collect();
    assert_eq!(counts, [2, 4]);
    assert!(plan.pins.contains(&"split=2/4".to_string()));
    let error = made(&["pipeline=2", "split=3/4"]).expect_err("seven layers of six");
    assert_eq!(
        error.to_string(),
        "pinned split has 7 layers; the model has 6, embedding and output layer included"
    );
}

/// File that [`prints_a_plan`] writes to.
const OUT: &str = "MESHWRIGHT_TEST_PLAN";

fn some_plan() -> String {
    let forward = gpt2(2, 512, 256, 4096);
    let made = planned(&forward, &train(16, 256), &cluster(8), &[]).expect("there is a plan");
    assert_rates(&made);
    serde_json::to_string(&made.plan).expect("plans serialise")
}

#[test]
#[ignore = "a part of `plans_are_equal_to_the_byte`, run by it in processes of its own"]
fn prints_a_plan() {
    let path = std::env::var(OUT).expect("the file to write is named");
    std::fs::write(path, some_plan()).expect("the plan is written");
}

#[test]
fn plans_are_equal_to_the_byte() {
    let plan = some_plan();
    assert_eq!(some_plan(), plan);
    let folder = tempfile::tempdir().expect("a folder");
    for threads in ["1", "3"] {
        let path = folder.path().join(threads);
        let run = std::process::Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", "prints_a_plan", "--ignored"])
            .env("RAYON_NUM_THREADS", threads)
            .env(OUT, &path)
            .output()
            .expect("the process runs");
        assert!(
            run.status.success(),
            "{}",
            String::from_utf8_lossy(&run.stdout)
        );
        assert!(
            std::fs::read_to_string(&path).expect("a plan") == plan,
            "with {threads} threads the plan differs"
        );
    }
}

/// Where experts' gradients weigh more than tokens, the search splits the experts and sends the
/// tokens, with samples split outside: expert parallelism, which nobody asked it for.
#[test]
fn the_search_splits_experts() {
    let config = serde_json::json!({
        "model_type": "mixtral", "hidden_size": 1024, "intermediate_size": 4096,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8,
        "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 1024,
        "max_position_embeddings": 256,
    });
    let config = import::ModelConfig::parse("config.json", config.to_string().as_bytes())
        .expect("the config is valid");
    let options = import::BuildOptions {
        sequence: 256,
        dropout: 0.0,
    };
    let forward = import::model_graph(&config, &options).expect("the model builds");
    let made =
        planned(&forward, &train(64, 256), &cluster(8), &["pipeline=1"]).expect("there is a plan");
    let weights = split_of_state(&made, "h.0.moe.up.weight");
    assert!(weights[0] > 1, "experts are split: {weights:?}");
    // Tokens travel to the experts of each layer and back, and so do their gradients; what the
    // forward pass moved is kept, not moved again.
    for pass in [TemplateKind::Forward, TemplateKind::Backward] {
        let moved = parts(&made, pass);
        let moved = moved.iter().filter(|p| p.kind == CollectiveKind::AllToAll);
        assert_eq!(moved.count(), 2 * 2, "in {pass:?}");
    }
    let tokens = split(&made, "h.0.attn.out");
    assert!(tokens[0] > 1, "samples are split outside: {tokens:?}");
}

/// One long sample and few heads: only the sequence is left to split, and its causal attention is
/// shared evenly in zigzag order. Nothing is pinned, and the plan says so.
#[test]
fn a_long_sequence_gets_context_ranks_in_zigzag_order() {
    let (sequence, batch) = (65_536, 2);
    let forward = gpt2(3, 256, sequence, 1024);
    let made = planned(&forward, &train(batch, sequence), &cluster(8), &[]).expect("a plan");
    let axis = |name: &str| {
        let mut axes = made.plan.stages[0].mesh.axes.iter();
        axes.find(|a| a.name == name).map_or(1, |a| a.size)
    };
    assert!(axis("context") >= 2, "{:?}", made.plan.stages[0].mesh);
    assert!(made.plan.graph.contains("zigzag"), "{}", made.plan.graph);
    assert!(made.plan.pins.is_empty(), "{:?}", made.plan.pins);
    assert!(
        made.plan
            .proof
            .space
            .contains("zigzag order for 2, 4, 8 context ranks")
    );
    // The same by pins.
    let n = format!("context={}", axis("context"));
    let pins = [n.as_str(), "context_order=zigzag"];
    let pinned = planned(&forward, &train(batch, sequence), &cluster(8), &pins).expect("a plan");
    let step_s = |p: &Planned| p.plan.predicted.step_time_s.0;
    assert_eq!(step_s(&pinned), step_s(&made));
    let natural = [&n, "context_order=natural"];
    let natural = planned(&forward, &train(batch, sequence), &cluster(8), &natural);
    assert!(step_s(&made) < 0.8 * step_s(&natural.expect("a plan")));
}

/// The checker takes whatever lowering marks as one call, of every family, over tensor ranks.
#[test]
fn plans_of_every_family_are_checked_over_tensor_ranks() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("reference");
    let mut n_checked = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if !path.join("config.json").is_file() {
            continue;
        }
        let case = tests::Case::load(path.file_name().unwrap().to_str().unwrap());
        let pins = ["data=1", "tensor=2", "pipeline=1"];
        // Plans are checked as they are made; heads of some families do not divide.
        let made = planned(&case.forward, &case.train, &cluster(2), &pins);
        n_checked += u32::from(made.is_ok());
    }
    assert!(n_checked >= 20, "{n_checked}");
}
