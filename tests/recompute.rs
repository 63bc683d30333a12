//! The effect of recomputation on memory, time and FLOPs, and on nothing else; parity
//! with the single device is in `parallel.rs` and `properties.rs`.

use ir::plan::Plan;
use ir::program::{BufferClass, InstrKind, Program, TemplateKind};
use ir::{Bytes, OpKind, Pass};
use planner::{PlanError, PlanOptions, Planned};
use std::collections::BTreeSet;
use tests::{Case, cluster, cluster_with_memory, planned};

/// A plan with four microbatches in flight everywhere.
fn made(case: &Case, n_devices: u32, pins: &[&str]) -> Planned {
    let microbatch = format!("microbatch={}", case.train.global_batch / 4);
    let pins = [&["schedule=gpipe", microbatch.as_str()], pins].concat();
    planned(&case.forward, &case.train, &cluster(n_devices), &pins)
        .unwrap_or_else(|e| panic!("{pins:?}: {e}"))
}

/// The buffers that a layer keeps per microbatch: names of its buffers without the layer's, and
/// bytes.
fn kept(program: &Program, layer: &str) -> (BTreeSet<String>, u64) {
    let mut names = BTreeSet::new();
    let mut bytes = 0;
    for b in program.roles.iter().flat_map(|r| &r.buffers) {
        if let (BufferClass::PerMicrobatch { slots: 4 }, Some(name)) =
            (b.class, b.name.strip_prefix(layer))
        {
            names.insert(name.to_string());
            bytes += b.bytes;
        }
    }
    (names, bytes)
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(ToString::to_string).collect()
}

#[test]
fn a_gpt2_layer_keeps_what_the_documents_say() {
    let case = Case::load("gpt2_small_tied");
    // By name, each result in a buffer of its own.
    let apart = |pin: &str| lowering::without_pieces(&made(&case, 1, &[pin]).program);
    let layer = |pin: &str| kept(&apart(pin).expect("it fits"), "h.0.");
    // The layer's input is the embedding's result; its own `residual_2` is the next one's input.
    let full = set(&["residual_2"]);
    let matmuls = set(&[
        "attn.split",
        "attn.split:1",
        "attn.split:2",
        "attn.attend",
        "attn.attend:1",
        "residual_1",
        "mlp.fc.add_bias",
    ]);
    let cheap = set(&[
        "ln_1", "ln_1:1", "ln_1:2", "ln_2", "ln_2:1", "ln_2:2", "mlp.act",
    ]);
    let selective: BTreeSet<String> = full.union(&matmuls).cloned().collect();
    let none: BTreeSet<String> = selective.union(&cheap).cloned().collect();
    let (names, all) = layer("recompute=none");
    assert_eq!(names, none);
    let (names, some) = layer("recompute=selective");
    assert_eq!(names, selective);
    let (names, least) = layer("recompute=full");
    assert_eq!(names, full);
    // Hidden tensors of [tokens, h] in f32, and statistics per token or head.
    let hidden = least;
    assert_eq!((all / hidden, some / hidden), (16, 10));
    let attend = layer("recompute=selective recompute:*.attn.attend=yes");
    assert_eq!(
        attend.0,
        selective
            .iter()
            .filter(|n| !n.starts_with("attn.attend"))
            .cloned()
            .collect()
    );
}

#[test]
fn memory_falls_time_and_hardware_flops_rise() {
    for (name, pins) in [
        ("gpt2_small_tied", vec!["pipeline=2", "data=1", "tensor=1"]),
        (
            "gpt2_untied_gelu",
            vec!["pipeline=1", "data=2", "tensor=1", "zero=3"],
        ),
        (
            "llama_untied_rope",
            vec!["pipeline=2", "data=1", "tensor=2"],
        ),
    ] {
        let case = Case::load(name);
        let n = if pins.contains(&"tensor=2") { 4 } else { 2 };
        let of = |recompute: &str| {
            let pins: Vec<&str> = pins.iter().copied().chain([recompute]).collect();
            let m = made(&case, n, &pins);
            let p = m.plan.predicted.clone();
            let activations: Bytes = p.stages.iter().map(|s| s.activation_bytes).sum();
            let peak = p.stages.iter().map(|s| s.peak_bytes.0).max();
            (activations, peak, p)
        };
        let (none, selective, full) = (
            of("recompute=none"),
            of("recompute=selective"),
            of("recompute=full"),
        );
        assert!(none.0 > selective.0 && selective.0 > full.0, "{name}");
        assert!(none.1 > selective.1 && selective.1 > full.1, "{name}");
        assert!(none.2.step_time_s.0 < selective.2.step_time_s.0, "{name}");
        assert!(selective.2.step_time_s.0 < full.2.step_time_s.0, "{name}");
        // Model FLOPs are the same; hardware FLOPs count the matmuls that run again.
        let flops = |p: &ir::plan::Prediction| (p.mfu * p.step_time_s.0, p.hfu / p.mfu);
        let ((a, one), (b, same), (c, more)) =
            (flops(&none.2), flops(&selective.2), flops(&full.2));
        assert!(
            (a / b - 1.0).abs() < 1e-9 && (a / c - 1.0).abs() < 1e-9,
            "{name}"
        );
        assert_eq!((one, same), (1.0, 1.0), "{name}");
        assert!(more > 1.05 && more < 4.0 / 3.0, "{name}: {more}");
    }
}

/// Unpinned, as many layers recompute as make the plan fit: the less memory, the more of them, and
/// the slower, but never slower than if all did.
#[test]
fn the_search_recomputes_no_more_than_it_must() {
    let forward = tests::gpt2(8, 256, 256, 1024);
    let train = ir::TrainSpec {
        global_batch: 16,
        sequence: 256,
        precision: ir::Precision::Bf16,
        ..ir::TrainSpec::default()
    };
    let plan = |bytes: u64, pins: &[&str]| {
        let pins = [&["microbatch=16", "data=1", "tensor=1", "pipeline=1"], pins].concat();
        planned(&forward, &train, &cluster_with_memory(1, bytes), &pins)
    };
    let of = |pin: &str| {
        let made = plan(1 << 40, &[pin]).expect("there is room for all");
        (
            made.program.roles[0].arena_bytes,
            made.plan.predicted.step_time_s.0,
        )
    };
    let (none, full) = (of("recompute=none"), of("recompute=full"));
    assert!(full.0 < none.0 && full.1 > none.1);
    let recomputing = |made: &Planned| -> u32 {
        let runs = made.plan.stages.iter().flat_map(|s| &s.runs);
        let lists = |k: u32| &made.plan.layer_strategies[k as usize].recompute;
        runs.filter(|r| !lists(r.strategy).is_empty())
            .map(|r| r.count)
            .sum()
    };
    let mut last = (none.1, 0);
    let (mut differ, steps) = (0, 8);
    for step in 0..steps {
        let bytes = none.0 - (none.0 - full.0) * step / steps;
        let made = plan(bytes, &[]).expect("there is a plan where all recompute");
        assert!(made.program.roles[0].arena_bytes <= bytes);
        let (step_s, n) = (made.plan.predicted.step_time_s.0, recomputing(&made));
        assert!(
            step_s <= full.1,
            "{bytes} bytes: slower than all recomputed"
        );
        assert!(
            step_s >= last.0 && n >= last.1,
            "{bytes} bytes: {n}, {last:?}"
        );
        last = (step_s, n);
        let mut lists: Vec<_> = made
            .plan
            .layer_strategies
            .iter()
            .map(|s| &s.recompute)
            .collect();
        lists.sort_unstable();
        lists.dedup();
        differ += usize::from(lists.len() > 2 || n > 0 && n < 8);
    }
    assert!(last.1 > 0 && differ > 2, "{last:?}, {differ} plans mix");
}

/// The planner knows what recomputation saves: it plans where nothing fits without.
#[test]
fn what_does_not_fit_fits_when_it_is_recomputed() {
    let case = Case::load("gpt2_small_tied");
    let microbatch = format!("microbatch={}", case.train.global_batch / 4);
    let plan = |recompute: &str, bytes: u64| {
        let pins = ["schedule=gpipe", microbatch.as_str(), recompute];
        let pins = planner::Pins::parse(&pins).expect("the pins are well-formed");
        let cluster = cluster_with_memory(1, bytes);
        planner::plan(
            &case.forward,
            &case.train,
            &cluster,
            &PlanOptions {
                pins,
                ..PlanOptions::default()
            },
        )
    };
    let needs = |recompute: &str| {
        let made = plan(recompute, 1 << 40).expect("there is room for all");
        made.program.roles[0].arena_bytes
    };
    let (none, full) = (needs("recompute=none"), needs("recompute=full"));
    let between = full + (none - full) * 3 / 4;
    assert!(plan("recompute=full", between).is_ok());
    let error = plan("recompute=none", between).expect_err("there is too little memory");
    assert!(
        matches!(error, PlanError::Memory { .. } | PlanError::Overrun { .. }),
        "{error}"
    );
}

#[test]
fn recomputation_runs_in_the_backward_pass_and_repeats_what_ran_forward() {
    let case = Case::load("llama_untied_rope");
    let made = made(&case, 4, &["pipeline=2", "tensor=2", "recompute=full"]);
    let mut twins = 0;
    for role in &made.program.roles {
        for template in &role.templates {
            for i in template
                .instructions
                .iter()
                .filter(|i| i.pass == Pass::Recompute)
            {
                assert_eq!(template.kind, TemplateKind::Backward);
                twins += usize::from(matches!(
                    &i.kind,
                    InstrKind::Compute {
                        kind: OpKind::Attention { .. },
                        ..
                    }
                ));
            }
        }
    }
    // Attention runs again once in every block.
    let blocks = case
        .forward
        .layers
        .iter()
        .filter(|l| l.starts_with("h."))
        .count();
    assert_eq!(twins, blocks);
}

#[test]
fn pins_that_do_nothing_or_match_nothing_say_so() {
    let case = Case::load("gpt2_small_tied");
    let plan = |pins: &[&str]| planned(&case.forward, &case.train, &cluster(1), pins);
    let error = plan(&["recompute:h.*.attn.nothing=yes"]).expect_err("no op has that name");
    assert!(error.to_string().contains("matches no op"), "{error}");
    let made = plan(&["recompute=full", "recompute:*=no"]).expect("everything is kept");
    assert!(made.stats.notes.iter().any(|n| n.contains("recompute")));
    let made = plan(&["recompute=full"]).expect("a plan");
    assert!(made.stats.notes.iter().all(|n| !n.contains("recompute")));
    assert!(made.plan.pins.contains(&"recompute=full".to_string()));
}

/// A plan that was edited by hand is refused with the op's name.
#[test]
fn a_damaged_list_is_refused() {
    let case = Case::load("gpt2_small_tied");
    let plan = made(&case, 1, &["recompute=selective"]).plan;
    let with = |change: &dyn Fn(&mut BTreeSet<String>) -> bool| -> String {
        let mut plan: Plan = plan.clone();
        plan.layer_strategies
            .iter_mut()
            .filter(|s| !s.recompute.is_empty())
            .for_each(|s| assert!(change(&mut s.recompute)));
        let found: Vec<String> = checker::check_plan(&plan)
            .iter()
            .map(ToString::to_string)
            .collect();
        found.join("\n")
    };
    let mut lowered = plan.clone();
    let list = &mut lowered.layer_strategies[1].recompute;
    list.insert("{}.attn.nothing".into());
    let error = lowering::lower(&lowered).expect_err("no op has that name");
    assert!(error.to_string().contains("h.0.attn.nothing"), "{error}");
    let unknown = with(&|list| list.insert("{}.attn.nothing".into()));
    assert!(unknown.contains("h.0.attn.nothing"), "{unknown}");
    let boundary = with(&|list| list.insert("boundary.{}.0".into()));
    assert!(boundary.contains("boundary.h.0.0"), "{boundary}");
    // The twin is there no more, its strategy is; what it made is kept.
    let fewer = with(&|list| list.remove("{}.mlp.act"));
    assert!(fewer.contains("recompute.{}.mlp.act"), "{fewer}");
    // A twin that has no strategy.
    let more = with(&|list| list.insert("{}.attn.attend".into()));
    assert!(more.contains("recompute.{}.attn.attend"), "{more}");
}

/// Pins of a layer's ops name what feeds its experts and leaves them too: of the layer only the
/// next one's input is kept.
#[test]
fn experts_are_recomputed_with_the_rest_of_their_layer() {
    let case = Case::load("mixtral");
    let of = |pin: &str| kept(&made(&case, 1, &[pin]).program, "");
    let tokens = |names: &BTreeSet<String>| {
        let of_layer = |n: &&String| n.contains("h.0.moe.");
        names.iter().filter(of_layer).count()
    };
    let (names, all) = of("recompute=none");
    assert!(tokens(&names) > 4, "{names:?}");
    let (names, some) = of("recompute:h.0.*=yes");
    assert_eq!(tokens(&names), 0, "{names:?}");
    assert!(some < all);
}
