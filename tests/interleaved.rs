//! Interleaved 1F1B, ZB-H1 and ZB-V: what the plan says, what the simulator predicts of it, and what
//! else than training steps it goes through.
#![allow(clippy::unwrap_used)]

use cost_model::simulate::{SimulateOptions, TimelineDetail, TimelineEvent, simulate};
use cost_model::work::StepWork;
use ir::cluster::Cluster;
use ir::plan::{Plan, ScheduleKind};
use ir::program::{BufferClass, Program, TemplateKind};
use ir::{Graph, Precision, TrainSpec};
use planner::{PlanError, Planned};
use runtime::execute::{Session, SessionOptions};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tests::{Case, assert_checked, cluster, planned};

/// A GPT-2 of 24 equal blocks whose embedding and output layer weigh nothing beside them.
fn deep() -> (Graph, TrainSpec) {
    let text = r#"{"model_type": "gpt2", "n_embd": 2048, "n_head": 16, "n_layer": 24, "n_positions": 1024, "vocab_size": 64, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}"#;
    let config = import::ModelConfig::parse("config.json", text.as_bytes()).unwrap();
    let options = import::BuildOptions {
        sequence: 1024,
        dropout: 0.0,
    };
    let train = TrainSpec {
        global_batch: 64,
        sequence: 1024,
        precision: Precision::Bf16,
        ..TrainSpec::default()
    };
    (import::model_graph(&config, &options).unwrap(), train)
}

/// Devices between which nothing takes time.
fn free_links(n: u32) -> Cluster {
    let mut cluster = cluster(n);
    for level in &mut cluster.levels {
        (level.latency_s, level.bandwidth_bytes_per_s) = (0.0, 1e18);
        (level.efficiency, level.half_bytes) = (1.0, 0.0);
    }
    cluster
}

/// A pipeline of single devices, as many blocks in every stage.
fn pipeline(n_meshes: u32, virtual_stages: u32, microbatches: u64) -> Planned {
    let pin = format!("virtual={virtual_stages}");
    scheduled(&pin, n_meshes, virtual_stages, microbatches)
}

/// The same with a schedule.
fn scheduled(pin: &str, n_meshes: u32, virtual_stages: u32, microbatches: u64) -> Planned {
    let (forward, train) = deep();
    let n_stages = (n_meshes * virtual_stages) as usize;
    let mut split = vec![24 / n_stages; n_stages];
    split[0] += 1;
    split[n_stages - 1] += 1;
    let split: Vec<String> = split.iter().map(usize::to_string).collect();
    let pins = [
        "data=1".to_string(),
        "tensor=1".to_string(),
        format!("pipeline={n_meshes}"),
        pin.to_string(),
        format!("microbatch={}", 64 / microbatches),
        format!("split={}", split.join("/")),
    ];
    let pins: Vec<&str> = pins.iter().map(String::as_str).collect();
    planned(&forward, &train, &free_links(n_meshes), &pins).unwrap()
}

/// Seconds in which the average mesh waits, in forward and backward passes of one microbatch
/// through all of its stages.
fn waiting(made: &Planned) -> f64 {
    let p = &made.plan.predicted;
    let passes = |s: &ir::plan::StagePrediction| s.forward_s.0 + s.backward_s.0;
    let mean = p.stages.iter().map(passes).sum::<f64>() / p.stages.len() as f64;
    p.bubble * p.step_time_s.0 / mean
}

/// Narayanan et al. 2021, section 2.2: the pipeline waits for `(p - 1) / v` passes of a mesh.
#[test]
fn the_bubble_is_as_many_times_smaller_as_a_mesh_has_stages() {
    for (p, m) in [(2u32, 8u64), (4, 8), (4, 16)] {
        for v in [1, 2, 3] {
            let made = pipeline(p, v, m);
            assert_eq!(made.plan.stages.len(), (p * v) as usize);
            assert_eq!(made.program.roles.len(), p as usize);
            let expected = f64::from(p - 1) / f64::from(v);
            let found = waiting(&made);
            println!("p={p} v={v} m={m}: waits for {found:.3}, expected {expected:.3}");
            // The first and the last mesh have a little more to do in every microbatch.
            let uneven = 0.004 * m as f64;
            assert!(
                (found - expected).abs() < uneven + 0.01 * expected,
                "p={p} v={v} m={m}: waits for {found} passes, expected {expected}"
            );
        }
    }
}

/// Bytes of what the first mesh keeps in microbatches, apart from what meshes exchange, of buffers
/// that such kinds of templates touch.
fn kept(made: &Planned, of: fn(&BTreeSet<TemplateKind>) -> bool) -> u64 {
    let role = &made.program.roles[0];
    let mut rows = BTreeSet::new();
    let buffers = role.buffers.iter().enumerate().filter(|(i, b)| {
        let id = ir::BufferId::new(*i);
        let uses = |t: &&ir::program::Template| {
            let mut all = t.instructions.iter();
            all.any(|i| i.reads().contains(&id) || i.writes().contains(&id))
        };
        let templates = role.templates.iter().filter(uses);
        let kinds: BTreeSet<_> = templates.map(|t| t.kind).collect();
        matches!(b.class, BufferClass::PerMicrobatch { .. })
            && !kinds.contains(&TemplateKind::Exchange)
            && of(&kinds)
    });
    // Copies that two stages have by turns count once.
    let first = buffers.filter(|(_, b)| rows.insert(b.offset));
    first.map(|(_, b)| u64::from(b.slots()) * b.stride()).sum()
}

fn from_forward(kinds: &BTreeSet<TemplateKind>) -> bool {
    kinds.contains(&TemplateKind::Forward)
}

/// Qi et al. 2023, table 2: ZB-H1 waits for `p - 1` times forward and input gradient less weight
/// gradient, where 1F1B waits for their sum; what is kept from forward to input gradient takes as
/// much memory, and the first stage keeps nothing else more than once.
#[test]
fn weight_gradients_are_played_where_stages_would_wait() {
    for (p, m) in [(2u32, 8u64), (4, 8), (4, 16)] {
        let [plain, apart] = ["1f1b", "zb_h1"].map(|s| {
            let made = scheduled(&format!("schedule={s}"), p, 1, m);
            assert_eq!(made.plan.schedule.name(), s);
            made
        });
        let role = apart.program.roles.get(1).unwrap();
        let work = StepWork::of(&apart.training, &apart.plan.train);
        let options = SimulateOptions {
            timeline: TimelineDetail::Templates,
            ..SimulateOptions::new(work)
        };
        let played = simulate(&apart.program, &apart.plan.cluster, &options).unwrap();
        let events = played.timeline.unwrap();
        let seconds = |kind: TemplateKind| {
            let of = |e: &&TimelineEvent| {
                e.stage == role.stage && role.templates[e.template as usize].kind == kind
            };
            let all: Vec<f64> = events.iter().filter(of).map(|e| e.duration_s).collect();
            assert_eq!(all.len(), m as usize);
            all.iter().copied().fold(f64::INFINITY, f64::min)
        };
        let forward = seconds(TemplateKind::Forward);
        let input = seconds(TemplateKind::InputGradient);
        let weight = seconds(TemplateKind::WeightGradient);
        let fill = f64::from(p - 1);
        let passes = forward + input + weight;
        for (made, expected) in [
            (&plain, fill),
            (&apart, fill * (forward + input - weight) / passes),
        ] {
            let found = waiting(made);
            println!("p={p} m={m}: waits for {found:.3}, expected {expected:.3}");
            // The first and the last mesh have a little more to do in every microbatch.
            assert!((found - expected).abs() < 0.004 * m as f64 + 0.02 * expected);
        }
        assert!(apart.plan.predicted.step_time_s.0 < plain.plan.predicted.step_time_s.0);

        assert_eq!(kept(&apart, from_forward), kept(&plain, from_forward));
        let gradients = kept(&apart, |kinds| !kinds.contains(&TemplateKind::Forward));
        assert!(gradients > 0);
        let all = |made: &Planned| made.plan.predicted.stages[0].activation_bytes.0;
        assert!(all(&apart) <= all(&plain) + gradients);
    }
}

/// Qi et al. 2023, section 6: where the three passes take about as long, a mesh of ZB-V waits for a
/// sixth of what it does in 1F1B. The objective counts that: it is the simulated step within 5%.
/// Activations take what they do in 1F1B.
#[test]
fn a_v_of_stages_hardly_waits() {
    for (p, m) in [(2u32, 8u64), (4, 8), (4, 16)] {
        let plain = scheduled("schedule=1f1b", p, 1, m);
        let made = scheduled("schedule=zb_v", p, 2, m);
        assert_eq!(made.plan.schedule, ScheduleKind::ZbV);
        let ranks = made.plan.stages.iter().map(|s| s.mesh.devices.first_rank.0);
        let there = (0..p).chain((0..p).rev());
        assert_eq!(ranks.collect::<Vec<_>>(), there.collect::<Vec<_>>());
        let (found, most) = (waiting(&made), waiting(&plain));
        let step = made.plan.predicted.step_time_s.0;
        let objective = made.plan.proof.objective_s.0;
        println!("p={p} m={m}: waits for {found:.3} of {most:.3}; {objective} against {step}");
        // The first mesh has the embedding and the output layer, a little more in every microbatch.
        assert!(found < 0.25 * most + 0.006 * m as f64, "{found} of {most}");
        assert!((objective / step - 1.0).abs() < 0.05, "{objective} {step}");
        assert!(made.plan.proof.lower_bound_s.0 <= objective);
        // What 1F1B holds for p microbatches, ZB-V holds for 2 p of half a stage.
        let forward = |made: &Planned| kept(made, from_forward) as f64;
        let share = forward(&made) / forward(&plain);
        println!("p={p} m={m}: keeps {share:.3}, expected 1");
        assert!((share - 1.0).abs() < 0.03, "{share}");
    }
}

/// Without a number of meshes every one is tried: the answer is as fast as the fastest of those, but
/// for what the objective does not see, and its bound holds for all.
#[test]
fn the_search_finds_how_many_meshes_a_v_has() {
    let (forward, train) = deep();
    let plan = |pins: &[&str]| {
        let pins = [&["schedule=zb_v", "microbatch=4"][..], pins].concat();
        planned(&forward, &train, &free_links(4), &pins).unwrap()
    };
    let step = |made: &Planned| made.simulation.step_time.0;
    let free = plan(&[]);
    assert_eq!(free.plan.stages.len(), 2 * free.program.roles.len());
    for p in [1, 2, 4] {
        let pinned = plan(&[&format!("pipeline={p}")]);
        assert_eq!(pinned.program.roles.len(), p);
        println!("p={p}: {} against {}", step(&free), step(&pinned));
        assert!(step(&free) <= step(&pinned) * 1.02, "{p}");
        let (bound, objective) = (&free.plan.proof, &pinned.plan.proof);
        assert!(bound.lower_bound_s.0 <= objective.objective_s.0 * (1.0 + 1e-9));
    }
}

/// One stage a mesh is plain 1F1B: the same plan but for the pin, the same program.
#[test]
fn one_virtual_stage_is_1f1b() {
    let case = Case::load("gpt2_small_tied");
    let plan = |pins: &[&str]| planned(&case.forward, &case.train, &cluster(2), pins).unwrap();
    let pins = ["data=1", "tensor=1", "pipeline=2", "microbatch=2"];
    let plain = plan(&pins);
    let one = plan(&[&pins[..], &["virtual=1"]].concat());
    assert_eq!(one.plan.schedule, ScheduleKind::OneFOneB);
    assert_eq!(one.program, plain.program);
    let pins = plain.plan.pins.clone();
    assert_eq!(Plan { pins, ..one.plan }, plain.plan);
}

/// A plan that was written and read again is the same and lowers to the same program.
#[test]
fn the_document_says_all() {
    let case = Case::load("gpt2_small_tied");
    let pins = ["data=1", "tensor=2", "pipeline=2", "virtual=2"];
    let made = planned(&case.forward, &case.train, &cluster(4), &pins).unwrap();
    let text = serde_json::to_string(&made.plan).unwrap();
    assert!(text.contains(r#""schedule":{"interleaved_1f1b":{"virtual_stages":2}}"#));
    let read: Plan = serde_json::from_str(&text).unwrap();
    assert_eq!(lowering::lower(&read).unwrap(), made.program);
    // Stages 0 and 2 share a mesh, 1 and 3 the other.
    let ranks: Vec<u32> = read
        .stages
        .iter()
        .map(|s| s.mesh.devices.first_rank.0)
        .collect();
    assert_eq!(ranks, [0, 2, 0, 2]);
    assert_eq!(read.predicted.stages.len(), 2);
    assert_eq!(read.proof.stages.len(), 4);
}

/// Validation plays what goes forward, around the ring of meshes too, whatever the slots of what
/// goes backward; states load under any other plan.
#[test]
fn validation_and_checkpoints() {
    let case = Case::load("gpt2_small_tied");
    let plan = |pins: &[&str]| planned(&case.forward, &case.train, &cluster(2), pins).unwrap();
    let pins = ["data=1", "tensor=1", "pipeline=2", "microbatch=2"];
    let (plain, interleaved) = (plan(&pins), plan(&[&pins[..], &["virtual=2"]].concat()));
    let apart = plan(&[&pins[..], &["schedule=zb_h1"]].concat());
    let mut one = case.session(&plain.program);
    let mut many = case.session(&interleaved.program);
    let mut zero = case.session(&apart.program);
    let v = plan(&[&pins[..], &["schedule=zb_v"]].concat());
    let mut v = case.session(&v.program);
    for batch in &case.batches[..3] {
        let all = [&mut one, &mut many, &mut zero, &mut v];
        let losses = all.map(|s| s.validate(batch).unwrap());
        assert_eq!(losses, [losses[0]; 4]);
        let all = [&mut one, &mut many, &mut zero, &mut v];
        let losses = all.map(|s| s.step(batch, case.lr, false).unwrap().loss);
        assert_eq!(losses, [losses[0]; 4]);
    }
    let folder = tempfile::tempdir().unwrap();
    let moved = |from: &mut Session, to: &Program| {
        runtime::checkpoint::save(folder.path(), from, "", "").unwrap();
        let found = runtime::checkpoint::find(folder.path()).unwrap();
        let checkpoint = Arc::new(found.checkpoint);
        Session::resume(to, &case.train, SessionOptions::default(), &checkpoint).unwrap()
    };
    let mut fresh = moved(&mut many, &plain.program);
    let mut back = moved(&mut one, &interleaved.program);
    assert_eq!(back.export_states().unwrap(), one.export_states().unwrap());
    let batch = &case.batches[3];
    let loss = one.validate(batch).unwrap();
    assert_eq!(fresh.validate(batch).unwrap(), loss);
    assert_eq!(back.validate(batch).unwrap(), loss);
}

/// Stages that share a mesh share its memory: with little of it the entries that fit together
/// are taken, with too little the answer names the stages of the mesh.
#[test]
fn memory_is_shared_by_the_stages_of_a_mesh() {
    let (forward, train) = deep();
    let pins = ["data=2", "pipeline=2", "virtual=2", "microbatch=8"];
    let plan = |bytes: u64| {
        let cluster = tests::cluster_with_memory(4, bytes);
        planned(&forward, &train, &cluster, &pins)
    };
    let roomy = plan(80 << 30).unwrap();
    let peak = |made: &Planned| {
        made.program
            .roles
            .iter()
            .map(|r| r.arena_bytes)
            .max()
            .unwrap()
    };
    let less = peak(&roomy) / 16 * 15;
    let tight = plan(less).unwrap();
    assert!(peak(&tight) <= less);
    match plan(1 << 30) {
        Err(PlanError::Memory { n_stages, .. }) => assert_eq!(n_stages, 4),
        other => panic!("{:?}", other.map(|p| p.plan.predicted)),
    }
}

/// Stages that cannot be interleaved are refused with numbers that would fit.
#[test]
fn refusals_say_what_would_fit() {
    let case = Case::load("gpt2_small_tied");
    let refusal = |pins: &[&str]| {
        let found = planned(&case.forward, &case.train, &cluster(2), pins);
        found.map(|_| ()).unwrap_err().to_string()
    };
    assert_eq!(
        refusal(&["pipeline=2", "virtual=2", "microbatch=8"]),
        "pinned virtual=2 x pipeline=2 wants a multiple of 2 microbatches of the global batch 8; what fits: microbatch=1, 2 or 4"
    );
    assert_eq!(
        refusal(&["pipeline=2", "virtual=3"]),
        "pinned virtual=3 x pipeline=2 makes 6 stages, the model has 4 layers; pin virtual=2 or less"
    );
}

/// Without a pin of schedule or stages the search interleaves where that is faster; what it finds
/// is no slower than any pinned pipeline, its bound holds for those too, and it finds it again.
fn interleaves(n_devices: u32, degrees: &[&str], counts: &[u32]) {
    let (forward, train) = deep();
    let plan = |pins: &[&str]| {
        let pins = [degrees, pins].concat();
        planned(&forward, &train, &free_links(n_devices), &pins).unwrap()
    };
    let step = |made: &Planned| made.simulation.step_time.0;
    let free = plan(&[]);
    let ScheduleKind::Interleaved { virtual_stages } = free.plan.schedule else {
        panic!(
            "{:?} on {n_devices}: {:?}",
            free.plan.schedule, free.stats.alternatives
        );
    };
    assert!(virtual_stages > 1);
    assert_eq!(
        free.plan.stages.len(),
        free.program.roles.len() * virtual_stages as usize
    );
    let proof = &free.plan.proof;
    assert!(
        proof
            .space
            .contains("interleaved stages on each of several equal meshes")
    );
    // Sending is free and the blocks are equal, so a pipeline costs hardly more than the bound.
    assert!(proof.gap < 0.1, "{proof:?}");
    let gap = 1.0 - proof.lower_bound_s.0 / proof.objective_s.0;
    assert!((proof.gap - gap).abs() < 1e-12, "{proof:?}");
    let plain = plan(&["schedule=1f1b"]);
    assert_eq!(plain.plan.schedule, ScheduleKind::OneFOneB);
    assert!(!plain.plan.proof.space.contains("interleaved"));
    assert!(
        step(&free) < 0.98 * step(&plain),
        "{} against {} on {n_devices}",
        step(&free),
        step(&plain)
    );
    let n_meshes = format!("pipeline={}", free.program.roles.len());
    for v in counts {
        let made = plan(&[&n_meshes, &format!("virtual={v}")]);
        println!("v={v}: {} against {}", step(&made), step(&free));
        assert!(step(&free) <= step(&made), "v={v} on {n_devices}");
        assert!(
            proof.lower_bound_s.0 <= made.plan.proof.objective_s.0,
            "v={v} on {n_devices}: {} bounds {}",
            proof.lower_bound_s.0,
            made.plan.proof.objective_s.0
        );
    }
    assert_eq!(plan(&[]).plan, free.plan);
}

#[test]
fn the_search_interleaves_on_few_devices() {
    interleaves(4, &["data=1", "tensor=1"], &[2, 3, 4, 5, 6]);
}

#[test]
fn the_search_interleaves_on_equal_submeshes() {
    interleaves(32, &["data=4", "tensor=1"], &[2, 3]);
}

/// Whoever fixes the order of passes, the stages of a mesh or the number of stages gets that.
#[test]
fn pins_keep_the_search_from_interleaving() {
    let (forward, train) = deep();
    for pin in ["virtual=1", "schedule=gpipe", "pipeline=4"] {
        let pins = ["data=1", "tensor=1", pin];
        let made = planned(&forward, &train, &free_links(4), &pins).unwrap();
        assert_eq!(made.plan.schedule.virtual_stages(), 1, "{pin}");
        assert_eq!(made.plan.stages.len(), made.program.roles.len(), "{pin}");
    }
}

/// Each microbatch of a row is given another copy: the checker refuses the program where another
/// microbatch is using that copy meanwhile, and no other. Copies that change their numbers are as
/// good as before.
#[test]
fn a_copy_in_use_is_taken_by_nobody_else() {
    let text = r#"{"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 6, "n_positions": 8, "vocab_size": 32, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}"#;
    let config = import::ModelConfig::parse("config.json", text.as_bytes()).unwrap();
    let options = import::BuildOptions {
        sequence: 8,
        dropout: 0.0,
    };
    let forward = import::model_graph(&config, &options).unwrap();
    let train = TrainSpec {
        global_batch: 8,
        sequence: 8,
        ..TrainSpec::default()
    };
    for schedule in ["virtual=2", "schedule=zb_v"] {
        let pins = ["pipeline=2", schedule, "microbatch=1"];
        let made = planned(&forward, &train, &cluster(2), &pins).unwrap();
        let (mut free, mut taken) = (0, 0);
        for (i, role) in made.program.roles.iter().enumerate() {
            let lives = lives(role);
            for (b, m) in lives.keys().copied() {
                let buffer = &role.buffers[b];
                let turns = buffer.turns.as_ref().unwrap();
                // One row shows what all do.
                if turns.row > 0 {
                    continue;
                }
                for copy in (0..buffer.slots()).filter(|c| *c != turns.copies[m as usize]) {
                    let mut program = made.program.clone();
                    let turns = program.roles[i].buffers[b].turns.as_mut().unwrap();
                    let mut copies = turns.copies.to_vec();
                    copies[m as usize] = copy;
                    turns.copies = copies.into();
                    let own = lives[&(b, m)];
                    let met = lives.iter().any(|(&(other, k), life)| {
                        let there = &role.buffers[other];
                        let same_row = there.turns.as_ref().map(|t| t.row) == Some(turns.row);
                        let here = same_row && (other, k) != (b, m);
                        let on_it = here && there.copy_for(Some(k)) == copy;
                        on_it && life.0 <= own.1 && own.0 <= life.1
                    });
                    let refused = checker::check_program(&made.plan, &made.training, &program);
                    assert_eq!(
                        !refused.is_empty(),
                        met,
                        "{schedule}: {} of {m} in {copy}: {refused:?}",
                        buffer.name
                    );
                    *(if met { &mut taken } else { &mut free }) += 1;
                }
            }
        }
        println!("{schedule}: {free} free, {taken} taken");
        assert!(taken > 10, "{schedule}: {taken} taken");
        let mut program = made.program.clone();
        for b in program.roles.iter_mut().flat_map(|r| &mut r.buffers) {
            let slots = b.slots();
            if let Some(turns) = &mut b.turns {
                turns.copies = turns.copies.iter().map(|c| (c + 1) % slots).collect();
            }
        }
        assert_ne!(program, made.program);
        assert_checked(&made.plan, &made.training, &program);
    }
}

/// A template that uses a buffer of another stage which has the same copy for a microbatch is
/// refused, whatever it does with it.
#[test]
fn buffers_of_a_template_have_copies_of_their_own() {
    let made = scheduled("virtual=2", 2, 2, 8);
    let mut program = made.program.clone();
    let role = &mut program.roles[0];
    let in_rows = |b: &ir::BufferId| role.buffers[b.index()].turns.is_some();
    let used = |kind: TemplateKind, chunk: u32| {
        let of = |t: &&ir::program::Template| t.kind == kind && t.chunk == chunk;
        let template = role.templates.iter().find(of).unwrap();
        let writes = template.instructions.iter().flat_map(|i| i.writes());
        writes.filter(in_rows).collect::<Vec<_>>()
    };
    let row = |b: ir::BufferId| role.buffers[b.index()].turns.as_ref().unwrap().row;
    let [own, others] = [0, 1].map(|chunk| used(TemplateKind::Forward, chunk));
    let pairs = own
        .iter()
        .flat_map(|a| others.iter().map(move |b| (*a, *b)));
    let mut pairs = pairs.into_iter();
    let (one, other) = pairs.find(|(a, b)| row(*a) == row(*b)).unwrap();
    let copies = role.buffers[one.index()].turns.clone();
    role.buffers[other.index()].turns = copies;
    let forward = |t: &&mut ir::program::Template| t.kind == TemplateKind::Forward && t.chunk == 0;
    let template = role.templates.iter_mut().find(forward).unwrap();
    let first = template.instructions[0].clone();
    let fill = ir::program::InstrKind::Fill {
        value: 0.0,
        output: other,
    };
    template.instructions.push(ir::program::Instruction {
        kind: fill,
        stream: ir::StreamId::new(0),
        deps: vec![],
        events: vec![],
        ..first
    });
    let refused = checker::check_program(&made.plan, &made.training, &program);
    let refused: Vec<String> = refused.iter().map(ToString::to_string).collect();
    assert!(
        refused
            .iter()
            .any(|r| r.contains("turns: expected a copy of its own for each buffer of row")),
        "{refused:#?}"
    );
}

/// By buffer that has its copies by turns, and microbatch: the first and last slot that touch it.
fn lives(role: &ir::program::RoleProgram) -> BTreeMap<(usize, u32), (usize, usize)> {
    let mut lives: BTreeMap<(usize, u32), (usize, usize)> = BTreeMap::new();
    for (at, slot) in role.trace.iter().enumerate() {
        let Some(m) = slot.microbatch else { continue };
        let all = role.template(slot.template).instructions.iter();
        let used = all.flat_map(|i| i.reads().into_iter().chain(i.writes()));
        for b in used.filter(|b| role.buffer(*b).turns.is_some()) {
            lives.entry((b.index(), m)).or_insert((at, at)).1 = at;
        }
    }
    lives
}
