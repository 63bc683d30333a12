//! The referee against lowering: it proves what lowering makes, and nothing that is spoiled.
//!
//! Programs of random plans are proved. Then every class of mutation is applied at random
//! places; a spoiled program must be refused, unless an independent judge (`oracle`) finds
//! that it still computes the same without races. What the referee refuses although the
//! judge sees no difference is counted too: it may be strict, not lax.
#![allow(clippy::unwrap_used)]

#[path = "mutations/calls.rs"]
mod calls;
#[path = "mutations/fuzz.rs"]
mod fuzz;
#[path = "mutations/mutate.rs"]
mod mutate;
#[path = "mutations/oracle.rs"]
mod oracle;

use ir::collective::CollectiveKind;
use ir::plan::{Plan, ScheduleKind};
use ir::program::{CollectiveItem, InstrKind, Instruction, Program};
use ir::training::Recompute;
use ir::training::TrainingGraph;
use ir::{Graph, InstrId, Precision, TrainSpec};
use mutate::CLASSES;
use tests::plans;
use tests::plans::{
    Random, Recomputed, SEQUENCE, Setup, Style, bucket_sizes, mlp, random_plan, untied_mlp,
};

struct Case {
    plan: Plan,
    training: TrainingGraph,
    program: Program,
}

fn case(random: &mut Random) -> Case {
    let layers = [&[3][..], &[1, 2], &[2, 1], &[1, 1, 1]][random.below(4)].to_vec();
    case_of(random, 1, &layers, None)
}

/// Two or three stages on every mesh, as many microbatches as interleaving wants.
fn interleaved_case(random: &mut Random) -> Case {
    let (layers, virtual_stages) = [
        (&[1, 1, 1, 2][..], 2),
        (&[1, 2], 2),
        (&[1, 1, 1, 1, 1, 1], 3),
    ][random.below(3)];
    let schedule = ScheduleKind::Interleaved { virtual_stages };
    let n_blocks = layers.iter().sum::<u32>() as usize - 2;
    case_of(random, n_blocks, layers, Some(schedule))
}

/// Two stages on each of two or three meshes, there and back.
fn v_case(random: &mut Random) -> Case {
    let layers = [&[1, 1, 1, 2][..], &[1, 1, 1, 1, 1, 1]][random.below(2)];
    let n_blocks = layers.iter().sum::<u32>() as usize - 2;
    case_of(random, n_blocks, layers, Some(ScheduleKind::ZbV))
}

/// Stages that update by themselves, under random strategies.
fn stale_case(random: &mut Random) -> Case {
    let axes = [&[1][..], &[2], &[2, 2], &[3, 2]][random.below(4)].to_vec();
    let layers = [&[1, 2][..], &[1, 1, 1]][random.below(2)];
    let microbatch = [1, 3, 4][random.below(3)];
    let setup = Setup {
        stages: layers.iter().map(|&n| (n, axes.clone())).collect(),
        microbatch,
        n_microbatches: [1, 2, 3, 5][random.below(4)],
        schedule: ScheduleKind::PipeDream,
        train: TrainSpec {
            sequence: SEQUENCE,
            precision: [Precision::F32, Precision::Bf16][random.below(2)],
            minibatch: Some(microbatch),
            clip_norm: None,
            ..TrainSpec::default()
        },
        recompute: [Recomputed::Named(Recompute::None), Recomputed::Random][random.below(2)],
        ..Setup::default()
    };
    let made = random_plan(&untied_mlp(1), &setup, random);
    lowered(made, random)
}

/// A plan's program, in buckets of some sizes.
fn lowered((plan, training): (Plan, TrainingGraph), random: &mut Random) -> Case {
    let sizes = bucket_sizes(random.next());
    let program = lowering::lower_in_buckets(&plan, &training, &sizes).unwrap();
    Case {
        plan,
        training,
        program,
    }
}

fn case_of(
    random: &mut Random,
    n_blocks: usize,
    layers: &[u32],
    interleaved: Option<ScheduleKind>,
) -> Case {
    let axes = [&[1][..], &[2], &[4], &[2, 2], &[3, 2], &[2, 2, 2]][random.below(6)].to_vec();
    let setup = Setup {
        stages: layers.iter().map(|&n| (n, axes.clone())).collect(),
        microbatch: [1, 3, 4][random.below(3)],
        n_microbatches: match interleaved {
            None => [1, 2, 3, 5][random.below(4)],
            Some(_) => [2, 4][random.below(2)],
        },
        schedule: interleaved
            .unwrap_or_else(|| ScheduleKind::PLAIN[random.below(ScheduleKind::PLAIN.len())]),
        train: TrainSpec {
            sequence: SEQUENCE,
            precision: [Precision::F32, Precision::Bf16, Precision::F16][random.below(3)],
            ..TrainSpec::default()
        },
        recompute: [
            Recomputed::Named(Recompute::None),
            Recomputed::Named(Recompute::Full),
            Recomputed::Random,
        ][random.below(3)],
        ..Setup::default()
    };
    let (plan, training) = random_plan(&mlp(n_blocks), &setup, random);
    let sizes = bucket_sizes(setup.microbatch + u64::from(setup.n_microbatches));
    let program = lowering::lower_in_buckets(&plan, &training, &sizes).unwrap();
    Case {
        plan,
        training,
        program,
    }
}

fn list(found: &[checker::Violation]) -> String {
    found
        .iter()
        .take(10)
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join("\n")
}

#[test]
fn lowered_programs_are_proved() {
    let mut random = Random(1);
    for round in 0..100 {
        let c = match round % 4 {
            0 => interleaved_case(&mut random),
            1 => stale_case(&mut random),
            _ => case(&mut random),
        };
        let found = checker::check_plan(&c.plan);
        assert!(found.is_empty(), "round {round}, plan: {}", list(&found));
        let found = checker::check_program(&c.plan, &c.training, &c.program);
        assert!(found.is_empty(), "round {round}, program: {}", list(&found));
        oracle::fingerprint(&c.program)
            .unwrap_or_else(|e| panic!("round {round}: the judge says {e}"));
    }
}

/// Every op of the real models under random strategies: attention, rotary embeddings,
/// dropout, tied tables.
#[test]
fn lowered_models_are_proved() {
    let gpt2 = include_bytes!("../models/tiny-gpt2/config.json");
    let llama = include_bytes!("../models/tiny-llama/config.json");
    let mut random = Random(5);
    for (text, dropout) in [(&gpt2[..], 0.1), (&llama[..], 0.0)] {
        let config = import::ModelConfig::parse("config.json", text).unwrap();
        let options = import::BuildOptions {
            sequence: 16,
            dropout,
        };
        let forward = import::model_graph(&config, &options).unwrap();
        for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
            let layers = [2, forward.layers.len() as u32 - 3, 1];
            let setup = Setup {
                stages: layers.map(|n| (n, vec![2, 3])).to_vec(),
                microbatch: 4,
                n_microbatches: 6,
                train: TrainSpec {
                    sequence: 16,
                    precision,
                    ..TrainSpec::default()
                },
                ..Setup::default()
            };
            let (plan, training) = random_plan(&forward, &setup, &mut random);
            assert_eq!(list(&checker::check_plan(&plan)), "");
            let program = lowering::lower(&plan).unwrap();
            assert_eq!(
                list(&checker::check_program(&plan, &training, &program)),
                ""
            );
            oracle::fingerprint(&program).unwrap();
        }
    }
}

/// Real models under random strategies: their layers over one or more stages.
fn model_case(random: &mut Random, forward: &Graph, style: Style) -> Case {
    let n = forward.layers.len() as u32;
    let layers = [vec![n], vec![1, n - 1], vec![2, n - 3, 1]][random.below(3)].clone();
    let axes = [&[2][..], &[2, 2], &[3]][random.below(3)].to_vec();
    let sequence = ir::testing::sequence_of(forward).unwrap();
    let setup = Setup {
        stages: layers.iter().map(|&n| (n, axes.clone())).collect(),
        microbatch: [2, 3][random.below(2)],
        n_microbatches: [1, 2, 3][random.below(3)],
        schedule: [ScheduleKind::GPipe, ScheduleKind::OneFOneB][random.below(2)],
        train: TrainSpec {
            sequence,
            precision: [Precision::F32, Precision::Bf16, Precision::F16][random.below(3)],
            ..TrainSpec::default()
        },
        recompute: Recomputed::Named(
            [Recompute::None, Recompute::Full, Recompute::Selective][random.below(3)],
        ),
        style,
    };
    let made = random_plan(forward, &setup, random);
    lowered(made, random)
}

/// A model by its configuration.
fn model(text: &[u8]) -> Graph {
    let config = import::ModelConfig::parse("config.json", text).unwrap();
    let options = import::BuildOptions {
        sequence: 8,
        dropout: 0.1,
    };
    import::model_graph(&config, &options).unwrap()
}

fn transformers() -> Vec<Case> {
    let mut random = Random(21);
    let gpt2 = model(include_bytes!("../models/tiny-gpt2/config.json"));
    let llama = model(include_bytes!("../models/tiny-llama/config.json"));
    let of = |k: usize| [&gpt2, &llama][k % 2];
    (0..8)
        .map(|k| model_case(&mut random, of(k), Style::Any))
        .collect()
}

fn mixtures_of_experts() -> Vec<Case> {
    let mut random = Random(22);
    let mixtral = model(include_bytes!("reference/mixtral/config.json"));
    let style = |k: usize| [Style::Any, Style::Zero][k % 2];
    (0..6)
        .map(|k| model_case(&mut random, &mixtral, style(k)))
        .collect()
}

/// The plans of pins, every schedule among them.
fn pipelines_with_zero_3() -> Vec<Case> {
    let pins = [
        "pipeline=2 data=2 zero=3 microbatch=4",
        "pipeline=2 data=2 zero=3 microbatch=2 schedule=gpipe",
        "pipeline=2 data=2 zero=3 microbatch=2 virtual=2 recompute=full",
        "pipeline=2 data=2 tensor=2 zero=3 microbatch=4",
    ];
    let cases = pins.into_iter().enumerate().map(|(k, pins)| {
        let mut case = tests::Case::load(["llama_untied_rope", "gpt2_small_tied"][k % 2]);
        case.train.precision = [Precision::Bf16, Precision::F16][k / 2];
        let n = if pins.contains("tensor=2") { 8 } else { 4 };
        let made = tests::planned(&case.forward, &case.train, &tests::cluster(n), &[pins]).unwrap();
        Case {
            plan: made.plan,
            training: made.training,
            program: made.program,
        }
    });
    cases.collect()
}

fn small_programs() -> Vec<Case> {
    let mut random = Random(2);
    let of = |k: usize| match k % 4 {
        3 => interleaved_case(&mut random),
        _ => case(&mut random),
    };
    (0..24).map(of).collect()
}

/// Spoils each of the cases in every way, and asserts that the referee refuses each spoiled
/// program, or the judge finds that it computes the same: then its kind must be one of
/// `HARMLESS`. At least `share` of them are refused.
fn spoil(cases: &[Case], seed: u64, tries: usize, share: f64) {
    let mut random = Random(seed);
    let (mut missed, mut unknown) = (Vec::new(), Vec::new());
    let (mut n_applied, mut n_caught) = (0, 0);
    println!(
        "{:<28} {:>7} {:>7} {:>7} {:>7} {:>8}",
        "mutation", "applied", "caught", "benign", "missed", "share"
    );
    let originals: Vec<u64> = cases
        .iter()
        .map(|c| oracle::fingerprint(&c.program).unwrap())
        .collect();
    for (name, mutation) in CLASSES {
        let (mut applied, mut caught, mut benign, mut lost) = (0, 0, 0, 0);
        for (k, (c, original)) in cases.iter().zip(&originals).enumerate() {
            for _ in 0..tries {
                let mut spoiled = c.program.clone();
                if !mutation(&mut spoiled, &mut random) || spoiled == c.program {
                    continue;
                }
                applied += 1;
                if !checker::check_program(&c.plan, &c.training, &spoiled).is_empty() {
                    caught += 1;
                    continue;
                }
                let changed = || difference(&c.program, &spoiled);
                match oracle::fingerprint(&spoiled) {
                    Ok(print) if print == *original => {
                        benign += 1;
                        if HARMLESS.iter().all(|(kind, _)| kind != name) {
                            unknown.push(format!("{name} in program {k}\n{}", changed()));
                        }
                    }
                    other => {
                        lost += 1;
                        missed.push(format!("{name} in program {k}: {other:?}\n{}", changed()));
                    }
                }
            }
        }
        println!(
            "{name:<28} {applied:>7} {caught:>7} {benign:>7} {lost:>7} {:>7.1}%",
            100.0 * f64::from(caught) / f64::from((caught + lost).max(1))
        );
        assert!(applied == 0 || caught > 0, "`{name}` was never caught");
        (n_applied, n_caught) = (n_applied + applied, n_caught + caught);
    }
    let first = |all: &[String]| all[..all.len().min(10)].join("\n");
    let n = missed.len();
    assert!(n == 0, "{n} mutations were missed:\n{}", first(&missed));
    let n = unknown.len();
    assert!(
        n == 0,
        "{n} mutations of other kinds change nothing:\n{}",
        first(&unknown)
    );
    let caught = f64::from(n_caught) / f64::from(n_applied);
    println!("{n_caught} of {n_applied} caught, {:.2}%", 100.0 * caught);
    assert!(caught >= share, "only {caught} of all mutations are caught");
}

/// Kinds of mutations of which some change nothing that is computed, and why.
const HARMLESS: &[(&str, &str)] = &[
    (
        "wrong result buffer",
        "the other buffer has the same bytes, or nobody reads the result",
    ),
    (
        "drop instruction",
        "what it makes, padding or a sum of one, is there already",
    ),
    (
        "duplicate instruction",
        "most do the same when they are done again",
    ),
    ("swap instructions", "neither needs the other"),
    (
        "wrong collective item",
        "both items bring the same value, from two layouts of it",
    ),
    (
        "wrong operand buffer",
        "the other buffer holds the same value",
    ),
    ("drop event", "another wait comes later"),
    ("wrong event", "another wait comes later"),
    ("wrong stream", "the waits are enough on any stream"),
    ("shift offset", "the bytes beside are free"),
    (
        "wrong buffer class",
        "one copy is enough where microbatches do not overlap",
    ),
    (
        "duplicate slot",
        "what begins or ends a step does the same when it is done again",
    ),
    ("swap slots", "neither needs the other"),
    (
        "wrong transfer value",
        "a layout op gives its operand another name",
    ),
    ("wrong chunk", "a pass without ops may be any stage's"),
    (
        "wrong microbatch",
        "a pass without ops may be any microbatch's",
    ),
];

#[test]
fn every_mutation_that_matters_is_caught() {
    spoil(&small_programs(), 3, 8, 0.93);
}

#[test]
fn every_mutation_of_a_v_of_stages_that_matters_is_caught() {
    let mut random = Random(7);
    let cases: Vec<Case> = (0..8).map(|_| v_case(&mut random)).collect();
    spoil(&cases, 7, 8, 0.9);
}

#[test]
fn every_mutation_of_a_transformer_that_matters_is_caught() {
    spoil(&transformers(), 4, 6, 0.91);
}

#[test]
fn every_mutation_of_a_mixture_of_experts_that_matters_is_caught() {
    spoil(&mixtures_of_experts(), 5, 6, 0.92);
}

#[test]
fn every_mutation_of_a_pipeline_with_zero_3_that_matters_is_caught() {
    spoil(&pipelines_with_zero_3(), 6, 8, 0.94);
}

/// A bucket in a program: role, template, instruction.
type At = (usize, usize, usize);

/// Buckets of gradients in backwards: reductions of several buffers.
fn buckets(program: &Program) -> Vec<At> {
    let mut found = Vec::new();
    for (r, role) in program.roles.iter().enumerate() {
        for (t, template) in role.templates.iter().enumerate() {
            let backward = template.kind.is_backward();
            for (i, instruction) in template.instructions.iter().enumerate() {
                let InstrKind::Collective { kind, items, .. } = &instruction.kind else {
                    continue;
                };
                let reduces = matches!(
                    kind,
                    CollectiveKind::AllReduce(_) | CollectiveKind::ReduceScatter(_)
                );
                if backward && reduces && items.len() > 1 {
                    found.push((r, t, i));
                }
            }
        }
    }
    found
}

/// The faults of a bucket: to leave a member out, mix up where members go, or travel before its
/// last member is made. (That ranks disagree about its members cannot be said: the ranks of a
/// group execute one list.)
#[test]
fn spoiled_buckets_are_refused() {
    let mut random = Random(11);
    let (mut n_buckets, mut n_early) = (0, 0);
    for _ in 0..40 {
        let c = case(&mut random);
        let refuses = |what: &str, spoil: &dyn Fn(&mut Vec<Instruction>, usize), at: At| {
            let mut program = c.program.clone();
            spoil(&mut program.roles[at.0].templates[at.1].instructions, at.2);
            let found = checker::check_program(&c.plan, &c.training, &program);
            assert!(!found.is_empty(), "{what} at {at:?} is not refused");
        };
        for at in buckets(&c.program) {
            n_buckets += 1;
            let members = |kind: &mut InstrKind| match kind {
                InstrKind::Collective { items, .. } => std::mem::take(items),
                _ => Vec::new(),
            };
            let put = |kind: &mut InstrKind, new: Vec<CollectiveItem>| {
                if let InstrKind::Collective { items, .. } = kind {
                    *items = new;
                }
            };
            let miss = |list: &mut Vec<Instruction>, i: usize| {
                let mut items = members(&mut list[i].kind);
                items.pop();
                put(&mut list[i].kind, items);
            };
            refuses("a bucket without its last member", &miss, at);
            let swap = |list: &mut Vec<Instruction>, i: usize| {
                let mut items = members(&mut list[i].kind);
                let (a, b) = (items[0].output, items[1].output);
                (items[0].output, items[1].output) = (b, a);
                put(&mut list[i].kind, items);
            };
            refuses("results of two members, swapped", &swap, at);
            // The same list with the bucket one place before its last member is made; it waits
            // for what it waited for, where that is before it.
            let list = &c.program.roles[at.0].templates[at.1].instructions;
            let reads = list[at.2].reads();
            // Sums over one axis and over another are the same in either order.
            let made = |j: &Instruction| {
                let computes = !matches!(j.kind, InstrKind::Collective { .. });
                computes && j.writes().iter().any(|b| reads.contains(b))
            };
            let Some(last) = list[..at.2].iter().rposition(made) else {
                // All of it was kept from the forward pass.
                continue;
            };
            n_early += 1;
            let early = |list: &mut Vec<Instruction>, i: usize| {
                let mut bucket = list.remove(i);
                bucket.deps.retain(|d| d.index() < last);
                list.insert(last, bucket);
                for later in &mut list[last + 1..] {
                    for d in &mut later.deps {
                        *d = match d.index() {
                            j if j == i => InstrId::new(last),
                            j if (last..i).contains(&j) => InstrId::new(j + 1),
                            j => InstrId::new(j),
                        };
                    }
                }
            };
            refuses("a bucket before its last member", &early, at);
        }
    }
    assert!(n_early >= 10, "{n_early} of {n_buckets} buckets");
}

/// Lines of the debug form that differ, for a missed mutation.
fn difference(a: &Program, b: &Program) -> String {
    let (a, b) = (format!("{a:#?}"), format!("{b:#?}"));
    let (a, b): (Vec<&str>, Vec<&str>) = (a.lines().collect(), b.lines().collect());
    let first = a.iter().zip(&b).position(|(x, y)| x != y).unwrap_or(0);
    let end = (first + 12).min(a.len().min(b.len()));
    let from = first.saturating_sub(12);
    format!(
        "was {}\nis {}",
        a[from..end].join("\n"),
        b[from..end].join("\n")
    )
}
