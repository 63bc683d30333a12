//! A plan in common terms is what the plan does, whatever its pins: degrees make the devices, batches
//! the global batch, and what has no such terms says why.

mod support;

use export::{ContextAttention, ExportError, Recomputed, Target};
use ir::plan::{Plan, ScheduleKind};
use ir::{Axis, Optimizer, Task};
use proptest::prelude::*;
use support::*;

/// Degrees times each other are the devices, and batches the global batch.
fn assert_holds(plan: &Plan, d: &export::Degrees, devices: u32) {
    assert_eq!(d.data * d.context * d.tensor * d.pipeline, devices, "{d:?}");
    assert!(d.data.is_multiple_of(d.sharded), "{d:?}");
    assert!(d.context.is_multiple_of(d.context_sharded), "{d:?}");
    let batch = d.micro_batch * u64::from(plan.n_microbatches) * u64::from(d.data);
    assert_eq!(batch, plan.train.global_batch, "{d:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    /// The degrees that are read off are those that were pinned, and make the devices.
    #[test]
    fn degrees_multiply_to_the_devices(split in prop::collection::vec(0usize..4, 3), zero in 0u8..4) {
        let mut degrees = [1u32; 4];
        split.iter().for_each(|&k| degrees[k] *= 2);
        let [data, context, tensor, pipeline] = degrees;
        let pins = [
            format!("data={data}"), format!("context={context}"), format!("tensor={tensor}"),
            format!("pipeline={pipeline}"), format!("zero={zero}"),
        ];
        let pins: Vec<&str> = pins.iter().map(String::as_str).collect();
        let forward = if zero % 2 == 0 { llama() } else { gpt2() };
        // Two heads of keys are not split four ways, so there may be no plan.
        let Ok(planned) = try_plan(&forward, &train(), &pins) else { return Ok(()) };
        let summary = export::summary(&planned.plan, &planned.training).expect("a summary");
        prop_assert_eq!(summary.devices, DEVICES);
        let d = summary.degrees.as_ref();
        let d = d.ok_or_else(|| TestCaseError::fail(summary.obstacles.join("; ")))?;
        assert_holds(&planned.plan, d, DEVICES);
        prop_assert_eq!([d.data, d.context, d.tensor, d.pipeline], degrees);
        // Context ranks hold the same parameters as data ranks do.
        if data * context > 1 {
            prop_assert_eq!(d.zero, zero);
            prop_assert_eq!(d.shards(), if zero == 0 { 1 } else { data * context });
        }
    }
}

fn summary(forward: &ir::Graph, pins: &[&str]) -> (export::Summary, Plan) {
    let planned = plan(forward, &train(), pins);
    let summary = export::summary(&planned.plan, &planned.training).expect("a summary");
    if let Some(d) = &summary.degrees {
        assert_holds(&planned.plan, d, summary.devices);
    }
    (summary, planned.plan)
}

#[test]
fn stages_have_their_blocks() {
    let pins = [
        "data=2",
        "tensor=1",
        "pipeline=4",
        "microbatch=4",
        "schedule=1f1b",
    ];
    let (s, plan) = summary(&llama(), &pins);
    let d = s.degrees.expect("degrees");
    assert_eq!((d.pipeline, d.virtual_stages, d.micro_batch), (4, 1, 2));
    assert_eq!(s.accumulation, 8);
    let stages = s.stages.expect("stages");
    assert_eq!(stages.len(), plan.stages.len());
    assert_eq!(stages.iter().map(|s| s.blocks.1).sum::<u64>(), 4);
    assert!(stages[0].embed && !stages[1].embed && stages[3].head);
}

#[test]
fn interleaved_stages_share_meshes() {
    let (s, plan) = summary(
        &gpt2(),
        &["data=4", "pipeline=2", "virtual=2", "microbatch=4"],
    );
    let d = s.degrees.expect("degrees");
    assert_eq!((d.data, d.pipeline, d.virtual_stages), (4, 2, 2));
    assert_eq!(s.stages.expect("stages").len(), 4);
    assert_eq!(
        plan.schedule,
        ScheduleKind::Interleaved { virtual_stages: 2 }
    );
}

#[test]
fn experts_lie_over_data_ranks() {
    let pins = ["data=8", "expert=4", "tensor=1", "pipeline=1", "zero=1"];
    let (s, _) = summary(&mixtral(), &pins);
    let d = s.degrees.expect("degrees");
    assert_eq!((d.data, d.expert, d.expert_tensor), (8, 4, 1));
    assert_eq!((d.zero, d.sharded), (1, 8), "of what is no expert");
    let model = s.model.expect("a model");
    let experts = model.experts.expect("experts");
    assert_eq!((experts.count, experts.top_k, experts.ffn), (4, 2, 32));
    assert_eq!(experts.in_layer, [true, true]);
}

#[test]
fn context_ranks_meet_as_pinned() {
    let how = [
        ("gather", ContextAttention::Gather),
        ("ring", ContextAttention::Ring),
        ("ulysses", ContextAttention::Ulysses),
    ];
    for (name, expected) in how {
        let attention = format!("context_attention={name}");
        let pins = ["data=4", "context=2", "tensor=1", "pipeline=1", &attention];
        let (s, _) = summary(&llama(), &pins);
        let d = s.degrees.expect("degrees");
        assert_eq!((d.context, d.context_attention), (2, Some(expected)));
    }
}

#[test]
fn recomputation_is_told_by_its_name() {
    let named = [
        ("recompute=none", Recomputed::None),
        ("recompute=selective", Recomputed::Selective),
        ("recompute=full", Recomputed::Full),
        (
            "recompute:h.*.attn.attend=yes",
            Recomputed::Ops(["{}.attn.attend".to_string()].into()),
        ),
    ];
    for (pin, expected) in named {
        let none = if pin.contains(':') {
            "recompute=none"
        } else {
            pin
        };
        let pins = ["data=8", "tensor=1", "pipeline=1", pin, none];
        let pins = if pin == none { &pins[..4] } else { &pins[..] };
        let (s, _) = summary(&llama(), pins);
        assert_eq!(s.recompute, vec![expected; 4], "{pin}");
    }
}

#[test]
fn the_model_has_its_shape() {
    let (s, _) = summary(&llama(), &["data=8", "tensor=1", "pipeline=1"]);
    let m = s.model.expect("a model");
    assert_eq!((m.layers, m.hidden, m.vocab, m.ffn), (4, 32, 256, Some(64)));
    assert_eq!((m.heads, m.kv_heads, m.head_dim), (4, 2, 8));
    assert!(m.gated && !m.tied && !m.bias && m.rotary.is_some() && m.positions.is_none());
    let (s, _) = summary(&gpt2(), &["data=8", "tensor=1", "pipeline=1"]);
    let m = s.model.expect("a model");
    assert_eq!(
        (m.layers, m.heads, m.kv_heads, m.positions),
        (4, 4, 4, Some(64))
    );
    assert!(m.bias && !m.gated && m.rotary.is_none());
}

/// Splits features in attention and samples in the MLP along one axis.
const MIXED: [&str; 4] = [
    "pipeline=1",
    "zero=0",
    "spec:h.*.attn.q=[x,_,y,_,_]",
    "spec:h.*.mlp.gate=[x+y,_,_]",
];

#[test]
fn axes_that_mix_roles_have_no_degrees() {
    let planned = plan(&llama(), &train(), &MIXED);
    for target in Target::ALL {
        let result = export(&planned, target);
        // Its specs are the plan's own.
        if target == Target::Jax {
            let made = result.expect("jax");
            assert!(made.pins.is_none() && made.summary.degrees.is_none());
            continue;
        }
        let Err(ExportError::Inexpressible { reasons, .. }) = result else {
            panic!("{target:?} expresses it");
        };
        let words = reasons.join("\n");
        assert!(words.contains("splits samples in mlp"), "{words}");
        assert!(words.contains("and features in attn"), "{words}");
    }
}

#[test]
fn stages_on_unlike_meshes_have_no_degrees() {
    let pins = ["data=2", "tensor=2", "pipeline=2", "microbatch=4"];
    let mut planned = plan(&llama(), &train(), &pins);
    // No checker sees it: it is the summary that is asked.
    planned.plan.stages[1].mesh.axes = ["data", "tensor"]
        .into_iter()
        .zip([1, 4])
        .map(|(name, size)| Axis {
            name: name.into(),
            size,
        })
        .collect();
    for target in [Target::MegatronCore, Target::DeepSpeed, Target::TorchTitan] {
        let e = export(&planned, target).expect_err("unlike stages");
        assert!(e.to_string().contains("stage 1: data 1"), "{e}");
    }
}

#[test]
fn what_does_not_train_once_a_step_is_refused() {
    let inference = ir::TrainSpec {
        task: Task::Inference,
        ..train()
    };
    let planned = plan(&llama(), &inference, &["pipeline=1"]);
    let asynchronous = ir::TrainSpec {
        clip_norm: None,
        ..train()
    };
    let pins = ["pipeline=2", "microbatch=4", "schedule=pipedream"];
    let pipedream = plan(&llama(), &asynchronous, &pins);
    for target in Target::ALL {
        let e = export(&planned, target).expect_err("inference");
        assert_eq!(e, ExportError::Inference(target));
        let e = export(&pipedream, target).expect_err("asynchronous");
        assert_eq!(e, ExportError::Asynchronous(target));
    }
}

#[test]
fn the_training_is_the_plans() {
    let spec = ir::TrainSpec {
        optimizer: Optimizer::Sgd {
            momentum: 0.5,
            weight_decay: 0.0,
        },
        clip_norm: None,
        ..train()
    };
    let planned = plan(&llama(), &spec, &["data=8", "tensor=1", "pipeline=1"]);
    let made = exported(&planned, Target::MegatronCore);
    assert_eq!(argument(&made, "optimizer").as_deref(), Some("sgd"));
    assert_eq!(argument(&made, "sgd-momentum").as_deref(), Some("0.5"));
    assert_eq!(argument(&made, "clip-grad").as_deref(), Some("0"));
}
