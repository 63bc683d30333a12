//! Image models: a wide ResNet computes the same under every kind of plan, learns, and plans find
//! their splits of samples and channels.
#![allow(clippy::unwrap_used)]

use import::{BuildOptions, ModelConfig, model_graph};
use ir::op::Init;
use ir::program::{InstrKind, TemplateKind};
use ir::training::{TrainingGraph, training_graph};
use ir::{DType, Graph, OpKind, Optimizer, Precision, TensorType, TrainSpec};
use planner::Planned;
use runtime::RuntimeError;
use runtime::execute::{Session, SessionOptions, StateRequest};
use runtime::reference::Reference;
use tests::{cluster, distance, planned, relative};

/// Classes, and so tokens.
const CLASSES: u32 = 12;

/// Two stages of blocks with groups of two channels at first; images of odd sizes.
fn model() -> Graph {
    let config = serde_json::json!({
        "model_type": "wide_resnet", "image_size": 19, "num_channels": 3, "base_channels": 8,
        "width_factor": 2, "depths": [1, 2], "num_classes": CLASSES, "norm_groups": 4,
    });
    let config = ModelConfig::parse("config.json", config.to_string().as_bytes()).unwrap();
    let options = BuildOptions {
        sequence: 1,
        dropout: 0.0,
    };
    model_graph(&config, &options).unwrap()
}

fn spec(precision: Precision) -> TrainSpec {
    TrainSpec {
        global_batch: 8,
        sequence: 1,
        precision,
        optimizer: Optimizer::Sgd {
            momentum: 0.9,
            weight_decay: 0.0,
        },
        clip_norm: Some(1.0),
        ..TrainSpec::default()
    }
}

/// Every token is followed by a function of it, as by a class of its image.
fn batch(step: u32) -> Vec<Vec<u32>> {
    let tokens = (0..8).map(|i| (5 * i + 3 * step) % CLASSES);
    tokens.map(|t| vec![t, (7 * t + 2) % CLASSES]).collect()
}

/// Values as the model declares them, but no gain of zero, which would hide the block before it.
fn initial(
    training: &TrainingGraph,
) -> impl Fn(&str, &[u64]) -> Result<Vec<f32>, RuntimeError> + use<> {
    let states = training.graph.ops().iter().filter_map(|op| match op.kind {
        OpKind::State { init, .. } => Some((op.path.clone(), init)),
        _ => None,
    });
    let inits: std::collections::BTreeMap<String, Init> = states.collect();
    move |path, lens| {
        let init = match inits[path] {
            Init::Zeros if path.contains(".norm_3.weight") && !path.contains("moment") => {
                Init::Normal { std: 0.5 }
            }
            other => other,
        };
        Ok(runtime::init::parameter(7, path, init, lens))
    }
}

fn single(training: &TrainingGraph, train: &TrainSpec, microbatch: u64) -> Reference {
    let initial = initial(training);
    let m = (train.global_batch / microbatch) as u32;
    let start = |path: &str, ty: &TensorType| initial(path, &ty.shape.bind(1));
    Reference::new(training, train, microbatch, m, start).unwrap()
}

fn session(made: &Planned, train: &TrainSpec) -> Session {
    let initial = initial(&made.training);
    let start = |r: StateRequest<'_>| initial(r.path, r.lens);
    Session::new(&made.program, train, SessionOptions::default(), start).unwrap()
}

/// The ranks of a pinned plan and the single device, side by side for some steps.
fn holds(n_devices: u32, pins: &[&str]) -> Planned {
    let (graph, train, name) = (model(), spec(Precision::F32), pins.join(" "));
    let made = planned(&graph, &train, &cluster(n_devices), pins)
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    let kept = training_graph(&graph, &train).unwrap();
    let mut one = single(&kept, &train, made.plan.microbatch);
    let mut many = session(&made, &train);
    for step in 0..5 {
        let a = one.step(&batch(step), 0.05).unwrap();
        let b = many.step(&batch(step), 0.05, false).unwrap();
        let (loss, norm) = (relative(b.loss, a.loss), relative(b.grad_norm, a.grad_norm));
        assert!(
            loss < 2e-5 && norm < 1e-3,
            "{name} step {step}: {a:?} {b:?}"
        );
    }
    many.replicas_agree().unwrap();
    let (mut difference, mut all) = (0.0, 0.0);
    for (path, tensor) in many.params().unwrap() {
        let (d, n) = distance(&tensor.values, &one.states()[&path]);
        (difference, all) = (difference + d, all + n);
    }
    let off = (difference / all).sqrt();
    assert!(off < 1e-4, "{name}: parameters differ by {off}");
    made
}

/// Elements that a rank holds of all convolutions' operands `i` in the forward pass.
fn held(made: &Planned, i: usize) -> u64 {
    let mut n = 0;
    for role in &made.program.roles {
        let templates = role
            .templates
            .iter()
            .filter(|t| t.kind == TemplateKind::Forward);
        for instruction in templates.flat_map(|t| &t.instructions) {
            if let InstrKind::Compute {
                kind: OpKind::Conv2d { .. },
                inputs,
                ..
            } = &instruction.kind
            {
                n += role.local_shape(inputs[i]).iter().product::<u64>();
            }
        }
    }
    n
}

#[test]
fn samples_and_channels_are_split_without_a_change_of_the_loss() {
    let whole = holds(1, &["microbatch=8"]);
    let data = holds(2, &["data=2", "microbatch=8"]);
    assert_eq!(2 * held(&data, 0), held(&whole, 0));
    assert_eq!(held(&data, 1), held(&whole, 1));
    // Every convolution splits input or output channels, the first one its outputs.
    let tensor = holds(2, &["tensor=2", "microbatch=8"]);
    assert_eq!(2 * held(&tensor, 1), held(&whole, 1));
    holds(3, &["data=3", "zero=3"]);
    holds(4, &["data=2", "tensor=2", "zero=1"]);
    holds(4, &["pipeline=2", "data=2", "microbatch=4"]);
    holds(4, &["pipeline=2", "tensor=2", "microbatch=2"]);
    holds(2, &["data=2", "recompute=full"]);
    holds(4, &[]);
}

/// A batch norm would make another model of every number of microbatches.
#[test]
fn microbatches_change_no_loss() {
    let (graph, train) = (model(), spec(Precision::F32));
    let training = training_graph(&graph, &train).unwrap();
    let run = |microbatch| {
        let mut one = single(&training, &train, microbatch);
        let step = |s| one.step(&batch(s), 0.05).unwrap().loss;
        (0..5).map(step).collect::<Vec<f64>>()
    };
    let whole = run(8);
    for microbatch in [1, 2, 4] {
        for (a, b) in run(microbatch).iter().zip(&whole) {
            assert!(relative(*a, *b) < 2e-5, "microbatch {microbatch}: {a} {b}");
        }
    }
}

/// The token that follows is learnt from an image alone, in f32 and in bf16.
#[test]
fn labels_of_images_are_learnt() {
    for precision in [Precision::F32, Precision::Bf16] {
        let (graph, train) = (model(), spec(precision));
        let training = training_graph(&graph, &train).unwrap();
        let mut one = single(&training, &train, 8);
        let mut losses = (0..60).map(|s| one.step(&batch(s), 0.02).unwrap().loss);
        let first = losses.next().unwrap();
        let last = losses.last().unwrap();
        assert!(
            first > 1.5 && last < 0.3,
            "{precision:?}: {first} to {last}"
        );
    }
}

/// Below f32 nothing but the loss and statistics is computed in f32.
#[test]
fn images_are_cast_to_the_compute_type() {
    let training = training_graph(&model(), &spec(Precision::Bf16)).unwrap();
    let graph = &training.graph;
    let convs = graph
        .ops()
        .iter()
        .filter(|op| op.kind.name().starts_with("conv2d"));
    let mut n = 0;
    for op in convs {
        n += 1;
        assert_eq!(graph.ty(op.outputs[0]).dtype, DType::Bf16, "{}", op.path);
    }
    // One in front, three in each block, and two projections, each with two gradients but the
    // image's.
    assert_eq!(n, 3 * (1 + 3 * 3 + 2) - 1);
}
