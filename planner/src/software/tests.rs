#![allow(clippy::unwrap_used)] // A test may stop at what it does not expect.

use super::point::Space;
use super::*;
use frameworks::{Framework, Recomputation, Software, Split};
use ir::Precision;
use ir::collective::CollectiveKind;
use ir::program::InstrKind;
use std::path::Path;

/// A framework that takes what Meshwright's own runtime takes.
fn plain(made_for: &MadeFor, _: &Cluster, _: &TrainSpec) -> Result<Profile, String> {
    let framework = Framework::named(&made_for.name).ok_or("no such software")?;
    Ok(Profile {
        framework,
        software: Software::plain(&made_for.name),
        split: Split::Balanced,
    })
}

/// The same with a host that needs a millisecond for every kernel.
fn slow(made_for: &MadeFor, cluster: &Cluster, train: &TrainSpec) -> Result<Profile, String> {
    let mut profile = plain(made_for, cluster, train)?;
    profile.software.host_s_per_kernel = 1e-3;
    Ok(profile)
}

fn made_for(name: &str) -> MadeFor {
    MadeFor {
        name: name.into(),
        version: "1".into(),
        options: Vec::new(),
    }
}

fn forward(model: &str, sequence: u64) -> Graph {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models");
    let config = import::ModelConfig::load(&models.join(model)).unwrap();
    let build = import::BuildOptions {
        sequence,
        dropout: 0.0,
    };
    import::model_graph(&config, &build).unwrap()
}

fn train(global_batch: u64, sequence: u64) -> TrainSpec {
    TrainSpec {
        global_batch,
        sequence,
        precision: Precision::Bf16,
        ..TrainSpec::default()
    }
}

fn cluster() -> Cluster {
    let mut cluster = cost_model::presets::find("dgx-a100-80gb").unwrap().unwrap();
    // Four devices of a host: few points.
    cluster.devices_per_host = 4;
    cluster.levels.truncate(1);
    cluster.levels[0].devices = 4;
    cluster
}

fn planned(
    name: &str,
    profile: fn(&MadeFor, &Cluster, &TrainSpec) -> Result<Profile, String>,
    pins: &[&str],
) -> Result<Planned, PlanError> {
    let options = PlanOptions {
        pins: Pins::parse(pins).unwrap(),
        made_for: Some(OtherSoftware {
            made_for: made_for(name),
            profile,
        }),
        ..PlanOptions::default()
    };
    crate::plan(
        &forward("tiny-gpt2", 128),
        &train(16, 128),
        &cluster(),
        &options,
    )
}

#[test]
fn a_plan_is_one_that_the_software_has_words_for_at_its_prices() {
    let fast = planned("megatron-core", plain, &[]).unwrap();
    assert_eq!(fast.plan.made_for, Some(made_for("megatron-core")));
    assert!(fast.plan.pins.is_empty() && fast.stats.simulated > 4);
    let slow = planned("megatron-core", slow, &["data=4", "tensor=1"]).unwrap();
    // Hundreds of kernels, each a millisecond.
    assert!(slow.plan.predicted.step_time_s.0 > 0.1 + fast.plan.predicted.step_time_s.0);
    assert_eq!(slow.plan.pins, ["data=4", "tensor=1"]);
    assert_eq!(slow.plan.predicted, slow.simulation.prediction);
    let proof = &slow.plan.proof;
    assert!(proof.lower_bound_s <= proof.objective_s && proof.gap <= 1.0);
    // One strategy for all blocks.
    let blocks = slow.plan.stages.iter().flat_map(|s| &s.runs);
    assert!(blocks.count() <= 3);
}

#[test]
fn what_the_software_has_no_words_for_is_refused() {
    let said = |name: &str, pin: &str| planned(name, plain, &[pin]).unwrap_err().to_string();
    assert!(said("deepspeed", "tensor=2").starts_with("DeepSpeed cannot express tensor=2;"));
    assert!(said("megatron-core", "schedule=zb_v").contains("cannot express schedule="));
    assert!(said("megatron-deepspeed", "context=2").contains("cannot express context=2"));
    let ring = planned("deepspeed", plain, &["context=2", "context_attention=ring"]);
    let ring = ring.unwrap_err().to_string();
    assert!(
        ring.contains("cannot express context_attention=ring"),
        "{ring}"
    );
    assert!(said("horovod", "zero=1").contains("no such software"));
    // Above level 1 it is Megatron-FSDP, which has no pipelines: the pins do not go together, whatever
    // divides the devices.
    let both = planned("megatron-core", plain, &["zero=2", "pipeline=2"]);
    let both = both.unwrap_err().to_string();
    assert!(
        both.contains(
            "cannot express zero=2 with a pipeline (pipeline=2), with which it has the levels 0, 1"
        ),
        "{both}"
    );
    let none = planned("torchtitan", plain, &["zero=1", "pipeline=1"]);
    let none = none.unwrap_err().to_string();
    assert!(
        none.contains(
            "zero=1 without a pipeline (pipeline=1), without which it has the levels 0, 2, 3"
        ),
        "{none}"
    );
    // Which pin it is.
    let odd = planned("megatron-core", plain, &["data=2", "tensor=3"]);
    let odd = odd.unwrap_err().to_string();
    assert!(odd.contains("there is one without tensor=3"), "{odd}");
    // FSDP's mesh is made of data and context ranks.
    let both = planned("torchtitan", plain, &["zero=0", "context=2"]);
    let both = both.unwrap_err().to_string();
    assert!(
        both.contains("cannot express zero=0 with context=2"),
        "{both}"
    );
}

/// DeepSpeed splits sequences by `sequence_parallel_size`, which exchanges tokens for heads.
#[test]
fn ranks_that_split_sequences_do_as_the_software_does() {
    let pins = ["data=2", "context=2"];
    let exchanges = |name: &str| {
        let program = planned(name, plain, &pins).unwrap().program;
        let templates = program.roles.iter().flat_map(|r| &r.templates);
        let all = templates.flat_map(|t| &t.instructions);
        let is_one = |k: &InstrKind| matches!(k, InstrKind::Collective { kind, .. } if *kind == CollectiveKind::AllToAll);
        all.filter(|i| is_one(&i.kind)).count()
    };
    assert!(exchanges("deepspeed") > 0);
    assert_eq!(exchanges("megatron-core"), 0);
}

#[test]
fn what_fits_no_process_says_by_how_much() {
    let options = PlanOptions {
        made_for: Some(OtherSoftware {
            made_for: made_for("megatron-core"),
            profile: plain,
        }),
        ..PlanOptions::default()
    };
    let mut small = cluster();
    small.device.memory_bytes = Bytes(small.device.memory_reserved_bytes.0 + (1 << 20));
    let e = crate::plan(
        &forward("tiny-gpt2", 128),
        &train(16, 128),
        &small,
        &options,
    );
    let PlanError::Memory {
        needed, capacity, ..
    } = e.unwrap_err()
    else {
        panic!("not about memory");
    };
    assert!(needed > capacity && capacity > 1 << 20);
}

/// The space of a framework for Llama-3.1 8B on two hosts of four.
fn space_of(framework: Framework, pins: &Pins, check: impl FnOnce(&Space<'_>)) {
    let graph = forward("llama-3.1-8b", 4096);
    let model = Model::of(&graph).unwrap();
    let mut cluster = cluster();
    cluster.n_hosts = 4;
    let facts = Facts {
        n_devices: 16,
        neighbours: 8,
        ..Facts::of(&graph, &train(64, 4096), &cluster)
    };
    let own = (framework, Split::Balanced);
    check(&Space::new(own, &model, &facts, pins).unwrap());
}

#[test]
fn copies_go_with_the_levels_that_have_them() {
    let copies = |framework, pins: &[&str]| {
        let mut found = Vec::new();
        space_of(framework, &Pins::parse(pins).unwrap(), |space| {
            let shapes = space.shapes();
            let plain = shapes.iter().filter(|p| p.data == 16 && p.tensor == 1);
            let at = |zero| plain.clone().next().map(|p| super::Point { zero, ..*p });
            found = [1, 3].map(|z| at(z).map(|p| space.copies(&p))).to_vec();
        });
        found
    };
    // Two hosts of eight devices have a copy each at most.
    let (one, both) = (Some(vec![1]), Some(vec![1, 2]));
    assert_eq!(
        copies(Framework::TorchTitan, &[]),
        [both.clone(), both.clone()]
    );
    assert_eq!(copies(Framework::MegatronCore, &[]), [both.clone(), both]);
    assert_eq!(copies(Framework::DeepSpeed, &[]), [one.clone(), one]);
    // What is pinned is no less bound to them.
    assert_eq!(
        copies(Framework::MegatronCore, &["replicas=4"]),
        [Some(vec![4]), Some(vec![4])]
    );
    let graph = forward("llama-3.1-8b", 4096);
    let model = Model::of(&graph).unwrap();
    let facts = Facts::of(&graph, &train(64, 4096), &cluster());
    let own = (Framework::MegatronCore, Split::Balanced);
    let pins = Pins::parse(&["replicas=2", "zero=0"]).unwrap();
    let refused = Space::new(own, &model, &facts, &pins)
        .unwrap_err()
        .to_string();
    assert!(refused.contains("replicas=2 with zero=0"), "{refused}");
}

#[test]
fn points_multiply_to_the_devices_and_keep_to_the_pins() {
    space_of(Framework::MegatronCore, &Pins::default(), |space| {
        let shapes = space.shapes();
        for p in &shapes {
            assert_eq!(p.data * p.tensor * p.pipeline * p.context, 16);
            // Every knob has its first value, which is one that there is.
            assert!(space.zeros(p).contains(&p.zero) && p.zero <= 1);
            assert_eq!((p.micro_batch, p.virtual_stages), (1, 1));
            assert_eq!(p.sequence_parallel, p.tensor > 1);
        }
        assert!(shapes.iter().any(|p| p.tensor == 8 && p.pipeline == 2));
        assert!(space.n_points() > 20 * shapes.len() as u64);
    });
    let pins = Pins::parse(&["tensor=2", "zero=1", "microbatch=16"]).unwrap();
    space_of(Framework::MegatronCore, &pins, |space| {
        let shapes = space.shapes();
        assert!(!shapes.is_empty());
        for p in &shapes {
            assert_eq!((p.tensor, p.zero), (2, 1));
            assert_eq!(p.micro_batch * u64::from(p.data), 16);
        }
    });
    space_of(Framework::Fsdp2, &Pins::default(), |space| {
        assert!(
            space
                .shapes()
                .iter()
                .all(|p| p.pipeline == 1 && !p.sequence_parallel)
        );
    });
}

/// Tensor ranks split experts, and plain FSDP2 leaves these in one piece.
#[test]
fn experts_are_whole_where_the_software_does_not_split_them() {
    let graph = forward("mixtral-8x7b", 1024);
    let model = Model::of(&graph).unwrap();
    let facts = Facts {
        n_devices: 16,
        neighbours: 8,
        ..Facts::of(&graph, &train(64, 1024), &cluster())
    };
    let of = |framework: Framework, pins: &[&str]| {
        let pins = Pins::parse(pins).unwrap();
        let space = Space::new((framework, Split::Balanced), &model, &facts, &pins);
        space.map(|s| s.shapes().iter().map(|p| p.tensor).max())
    };
    assert_eq!(of(Framework::Fsdp2, &[]).unwrap(), Some(1));
    assert_eq!(of(Framework::MegatronCore, &[]).unwrap(), Some(8));
    let pinned = of(Framework::Fsdp2, &["tensor=2"]).unwrap_err().to_string();
    assert!(
        pinned.contains("cannot express tensor=2 with experts, which it does not split"),
        "{pinned}"
    );
}

#[test]
fn neighbours_are_a_step_away_and_possible() {
    space_of(Framework::MegatronCore, &Pins::default(), |space| {
        let point = space
            .shapes()
            .into_iter()
            .find(|p| p.pipeline == 4 && p.tensor == 2);
        let near = space.neighbours(&point.unwrap());
        let some = |is: fn(&Point) -> bool| near.iter().any(is);
        assert!(some(|p| p.micro_batch == 2) && !some(|p| p.micro_batch == 4));
        assert!(some(|p| p.zero == 0) && some(|p| !p.sequence_parallel));
        assert!(some(|p| p.virtual_stages == 2) && !some(|p| p.virtual_stages > 2));
        assert!(
            near.iter()
                .all(|p| (p.data, p.tensor, p.pipeline) == (2, 2, 4))
        );
    });
}

#[test]
fn the_layout_of_blocks_is_megatrons() {
    let graph = forward("llama-3.1-8b", 4096);
    let model = Model::of(&graph).unwrap();
    assert_eq!(
        (model.blocks, model.heads, model.norms().len()),
        (32, 32, 2)
    );
    let point = Point {
        data: 4,
        tensor: 2,
        context: 1,
        expert: 1,
        pipeline: 2,
        virtual_stages: 2,
        zero: 1,
        copies: 1,
        micro_batch: 1,
        sequence_parallel: true,
        recompute: Recomputation::Norms,
        schedule: ir::plan::ScheduleKind::OneFOneB,
    };
    assert_eq!(
        point
            .pins(&model, Split::Layers, (ContextRanks::Tokens, false))
            .join(" "),
        "data=4 tensor=2 pipeline=2 zero=1 microbatch=4 schedule=1f1b \
         recompute:h.*.norm_1=yes recompute:h.*.norm_2=yes recompute=none virtual=2 \
         split=9/8/8/9 spec:h.*.norm_1=[data,tensor,_] spec:h.*.norm_2=[data,tensor,_] \
         spec:h.*.residual_1=[data,tensor,_] spec:h.*.residual_2=[data,tensor,_] \
         spec:boundary.h.*.0=[data,tensor,_] spec:grad.boundary.h.*.0.x=[data,tensor,_] \
         spec:h.*.attn.q=[data,_,tensor,_,_] spec:h.*.attn.k=[data,_,tensor,_] \
         spec:h.*.attn.v=[data,_,tensor,_] spec:h.*.mlp.gate=[data,_,tensor] \
         spec:h.*.mlp.up=[data,_,tensor] \
         spec:prepare.embed.wte.weight=[tensor,_] spec:prepare.head.lm_head.weight=[tensor,_]"
    );
    assert_eq!(
        point.words(),
        "data 4, tensor 2, pipeline 2, 2 stages on each mesh, ZeRO-1, micro-batch 1, sequence parallel, norms recomputed"
    );
    // Images are no decoder.
    let images = forward("wide-resnet-250m", 1);
    assert!(Model::of(&images).is_none());
}
