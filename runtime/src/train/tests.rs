//! Tests of the loop of a run.

use super::*;
use crate::checkpoint::{self, find};
use crate::data::DataOptions;
use crate::execute::naive::lower;
use crate::schedule::Decay;
use ir::testing::{GraphOptions, random_graph, sequence_of};
use ir::training::{LOSS_SCALE, TrainingGraph, UPDATES, training_graph};
use ir::{Axis, DeviceMesh, LogicalMesh, OpKind, Rank};
use safetensors::tensor::TensorView;
use std::path::Path;

fn meshes() -> Vec<LogicalMesh> {
    let mesh = |first, sizes: [u32; 1]| {
        let devices = DeviceMesh {
            first_rank: Rank(first),
            n_devices: sizes.iter().product(),
        };
        LogicalMesh::new(
            devices,
            sizes
                .iter()
                .map(|&size| Axis {
                    name: "x".into(),
                    size,
                })
                .collect(),
        )
        .unwrap()
    };
    vec![mesh(0, [2]), mesh(2, [1])]
}

fn setup() -> (TrainingGraph, TrainSpec, u32) {
    let graph = random_graph(5, &GraphOptions::default());
    let spec = TrainSpec {
        global_batch: 4,
        sequence: sequence_of(&graph).unwrap(),
        ..TrainSpec::default()
    };
    let table = graph
        .ops()
        .iter()
        .find(|op| op.kind == OpKind::Embedding)
        .unwrap()
        .inputs[0];
    let vocab = graph.ty(table).shape.bind(1)[0] as u32;
    (training_graph(&graph, &spec).unwrap(), spec, vocab)
}

#[test]
fn training_learns_and_resumes_where_it_stopped() {
    let (training, spec, vocab) = setup();
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data.bin");
    // A sequence that repeats: there is something to learn.
    let tokens: Vec<u8> = (0..2000u32)
        .flat_map(|i| ((i * i % 7 % vocab) as u16).to_le_bytes())
        .collect();
    std::fs::write(&data, tokens).unwrap();
    let options = DataOptions {
        format: None,
        tokenizer: None,
        vocab,
        validation_fraction: 0.2,
        further: 0,
    };
    let dataset = Arc::new(Dataset::open(&data, &options).unwrap());
    let schedule = LrSchedule::new(0.01, 0.01, 0, 40, Decay::Constant).unwrap();
    let program = lower(&training, &meshes(), 2, 2, 1);
    let save = dir.path().join("state");
    std::fs::create_dir(&save).unwrap();
    let run = |program: &Program, steps, resume: Option<&Path>, save: Option<&Path>| {
        let options = TrainOptions {
            program,
            spec: &spec,
            name: "test",
            plan_hash: "0",
            dataset: &dataset,
            schedule: &schedule,
            steps,
            validate_every: Some(10),
            validation_batches: 2,
            profile_steps: 2,
            resume: resume.map(newest),
            checkpoints: None,
            check_replicas: Some(5),
            stop: None,
            session: SessionOptions::default(),
        };
        let mut n_progress = 0;
        let trained = train(
            &options,
            crate::init::from_graph(&training, spec.seed),
            |_| n_progress += 1,
        );
        let mut trained = trained.unwrap();
        if let Some(folder) = save {
            crate::checkpoint::save(folder, &mut trained.session, "0", "").unwrap();
        }
        let measured = trained.measurement;
        assert_eq!(n_progress, measured.steps.len() + measured.validation.len());
        measured
    };
    let whole = run(&program, 40, None, None);
    assert_eq!(
        whole.steps.iter().map(|s| s.step).collect::<Vec<_>>(),
        (0..40).collect::<Vec<_>>()
    );
    assert_eq!(
        whole.validation.iter().map(|v| v.0).collect::<Vec<_>>(),
        [0, 10, 20, 30, 40]
    );
    assert!(
        whole.validation[4].1 < 0.8 * whole.validation[0].1,
        "{:?}",
        whole.validation
    );
    run(&program, 25, None, Some(&save));
    let rest = run(&program, 15, Some(&save), None);
    for (a, b) in whole.steps[25..].iter().zip(&rest.steps) {
        assert_eq!(
            (a.step, a.loss.to_bits(), a.grad_norm.to_bits()),
            (b.step, b.loss.to_bits(), b.grad_norm.to_bits())
        );
    }
    let other_plan = run(
        &lower(&training, &meshes()[..1], 1, 4, 2),
        1,
        Some(&save),
        None,
    );
    assert!((other_plan.steps[0].loss - rest.steps[0].loss).abs() < 1e-5);
}

fn options<'a>(
    program: &'a Program,
    spec: &'a TrainSpec,
    dataset: &'a Arc<Dataset>,
    schedule: &'a LrSchedule,
    steps: u64,
) -> TrainOptions<'a> {
    TrainOptions {
        program,
        spec,
        name: "test",
        plan_hash: "0",
        dataset,
        schedule,
        steps,
        validate_every: None,
        validation_batches: 0,
        profile_steps: 0,
        resume: None,
        checkpoints: None,
        check_replicas: None,
        stop: None,
        session: SessionOptions::default(),
    }
}

/// Tokens, and no validation.
fn data(folder: &Path, vocab: u32, tokens: impl Iterator<Item = u32>) -> Arc<Dataset> {
    split_data(folder, vocab, tokens, 0.0)
}

/// Tokens, half of which are for validation.
fn half_for_validation(folder: &Path, vocab: u32) -> Arc<Dataset> {
    split_data(folder, vocab, (0..2000).map(|i| i * i % 7 % vocab), 0.5)
}

fn split_data(
    folder: &Path,
    vocab: u32,
    tokens: impl Iterator<Item = u32>,
    validation_fraction: f64,
) -> Arc<Dataset> {
    let path = folder.join("data.bin");
    let bytes: Vec<u8> = tokens.flat_map(|t| (t as u16).to_le_bytes()).collect();
    std::fs::write(&path, bytes).unwrap();
    let options = DataOptions {
        format: None,
        tokenizer: None,
        vocab,
        validation_fraction,
        further: 0,
    };
    Arc::new(Dataset::open(&path, &options).unwrap())
}

/// The newest checkpoint of a folder, or a file.
fn newest(path: &Path) -> Arc<Checkpoint> {
    Arc::new(find(path).unwrap().checkpoint)
}

/// A token that occurs once and whose row of the table is beyond f16: the step that meets it
/// is skipped, and the run goes on. So it does from a checkpoint, and from one that does not
/// count updates.
#[test]
fn one_overflow_of_the_forward_pass_does_not_fail_a_run() {
    // A graph whose table is used for nothing else, as a row of logits is in every step.
    let reads_alone = |g: &ir::Graph| {
        let table = g.ops().iter().find(|op| op.kind == OpKind::Embedding);
        let table = table.unwrap().inputs[0];
        g.ops()
            .iter()
            .filter(|op| op.inputs.contains(&table))
            .count()
            == 1
    };
    let graphs = (0..).map(|seed| random_graph(seed, &GraphOptions::default()));
    let graph = graphs.into_iter().find(reads_alone).unwrap();
    let spec = TrainSpec {
        global_batch: 4,
        sequence: sequence_of(&graph).unwrap(),
        precision: ir::Precision::F16,
        ..TrainSpec::default()
    };
    let training = training_graph(&graph, &spec).unwrap();
    let lookup = graph.ops().iter().find(|op| op.kind == OpKind::Embedding);
    let table = lookup.unwrap().inputs[0];
    let lens = graph.ty(table).shape.bind(1);
    let (table, rows, width) = (graph.value_name(table), lens[0] as u32, lens[1] as usize);

    let dir = tempfile::tempdir().unwrap();
    let (steps, meets) = (6, 37);
    let n_tokens = steps * spec.global_batch * spec.sequence + 1;
    let token = |i| match i == meets {
        true => rows - 1,
        false => (i * i % u64::from(rows - 1)) as u32,
    };
    let dataset = data(dir.path(), rows, (0..n_tokens).map(token));
    let schedule = LrSchedule::new(0.01, 0.01, 0, 40, Decay::Constant).unwrap();
    let program = lower(&training, &meshes(), 2, 2, 1);
    let run = |steps, resume: Option<&Path>, save: Option<&Path>| {
        let options = TrainOptions {
            resume: resume.map(newest),
            ..options(&program, &spec, &dataset, &schedule, steps)
        };
        let drawn = crate::init::from_graph(&training, spec.seed);
        let initial = |r: StateRequest<'_>| {
            let mut values = drawn(r)?;
            if r.path == table {
                values[(rows as usize - 1) * width..].fill(1e6);
            }
            Ok(values)
        };
        let mut trained = train(&options, initial, |_| ()).unwrap();
        if let Some(folder) = save {
            crate::checkpoint::save(folder, &mut trained.session, "0", "").unwrap();
        }
        let states = trained.session.export_states().unwrap();
        (trained.measurement.steps, states)
    };
    let state = |name: &str| dir.path().join(name);
    let (whole, states) = run(steps, None, None);
    let overflowed: Vec<u64> = whole
        .iter()
        .filter(|s| !s.loss.is_finite() && !s.grad_norm.is_finite())
        .map(|s| s.step)
        .collect();
    assert_eq!(overflowed.len(), 1, "{whole:?}");
    let good = whole
        .iter()
        .filter(|s| s.loss.is_finite() && s.grad_norm.is_finite());
    assert_eq!(good.count() as u64, steps - 1);
    assert_eq!(states[UPDATES].values, [(steps - 1) as f32]);
    assert_eq!(states[LOSS_SCALE].values, [0.5]);

    let half = overflowed[0] + 1;
    assert!(half < steps, "the last step of all");
    std::fs::create_dir(state("half")).unwrap();
    let (_, mut states) = run(half, None, Some(&state("half")));
    let (rest, _) = run(steps - half, Some(&state("half")), None);
    let bits = |s: &StepMeasurement| (s.step, s.loss.to_bits(), s.grad_norm.to_bits());
    let expected = whole[half as usize..].iter().map(bits);
    assert_eq!(
        rest.iter().map(bits).collect::<Vec<_>>(),
        expected.collect::<Vec<_>>()
    );

    // The one file of a build that counted every step as an update.
    states.remove(UPDATES).unwrap();
    let old = state("old.safetensors");
    let tensors = states.iter().map(|(path, t)| {
        let lens = t.lens.iter().map(|&n| n as usize).collect();
        let bytes = bytemuck::cast_slice(&t.values);
        let view = TensorView::new(safetensors::Dtype::F32, lens, bytes);
        (path, view.unwrap())
    });
    let metadata = [("step".to_string(), half.to_string())].into();
    safetensors::serialize_to_file(tensors, Some(metadata), &old).unwrap();
    let (_, states) = run(1, Some(&old), None);
    assert_eq!(states[UPDATES].values, [(half + 1) as f32]);
}

/// Without loss scaling nothing can be hoped for.
#[test]
fn what_is_no_number_stops_the_run() {
    let (training, spec, vocab) = setup();
    let dir = tempfile::tempdir().unwrap();
    let dataset = data(dir.path(), vocab, (0..2000).map(|i| i * i % 7 % vocab));
    let program = lower(&training, &meshes(), 2, 2, 1);
    let state = dir.path().join("state");
    std::fs::create_dir(&state).unwrap();
    let run = |lr: f64, steps, resume| {
        let schedule = LrSchedule::new(lr, lr, 0, 40, Decay::Constant).unwrap();
        let options = TrainOptions {
            resume,
            ..options(&program, &spec, &dataset, &schedule, steps)
        };
        let mut n_done = 0;
        let initial = crate::init::from_graph(&training, spec.seed);
        let result = train(&options, initial, |_| n_done += 1);
        (n_done, result)
    };
    let (_, trained) = run(0.01, 2, None);
    let mut session = trained.unwrap().session;
    crate::checkpoint::save(&state, &mut session, "0", "").unwrap();
    let (n_done, result) = run(1e30, 9, Some(newest(&state)));
    let Err(RuntimeError::Diverged { step, value, .. }) = result else {
        panic!("the run went on")
    };
    // Every step before was whole.
    assert_eq!(step, 2 + n_done);
    assert!(n_done < 3 && !value.is_finite());
}

/// A validation may take longer than many steps: an interrupt does not wait for its end.
#[test]
fn a_run_that_is_to_stop_ends_within_a_validation() {
    let (training, spec, vocab) = setup();
    let dir = tempfile::tempdir().unwrap();
    let dataset = half_for_validation(dir.path(), vocab);
    let schedule = LrSchedule::new(0.01, 0.0, 0, 8, Decay::Constant).unwrap();
    let program = lower(&training, &meshes(), 2, 2, 1);
    let stop = AtomicBool::new(false);
    let mut options = options(&program, &spec, &dataset, &schedule, 8);
    options.validate_every = Some(3);
    options.validation_batches = 3;
    options.stop = Some(&stop);
    let has_begun = AtomicBool::new(false);
    let run = |options: &TrainOptions<'_>| {
        let initial = crate::init::from_graph(&training, 1);
        let first = |request: StateRequest<'_>| {
            has_begun.store(true, Ordering::Relaxed);
            initial(request)
        };
        let mut told = Vec::new();
        let trained = train(options, first, |progress| {
            told.push(match progress {
                Progress::Step { measured, .. } => ("step", measured.step),
                Progress::Validation { step, .. } => ("validation", step),
                other => panic!("{other:?}"),
            });
        });
        (told, trained.unwrap().measurement.validation.len())
    };
    let (told, n_validations) = run(&options);
    let validations = told.iter().filter(|(what, _)| *what == "validation");
    let validations: Vec<u64> = validations.map(|(_, step)| *step).collect();
    assert_eq!((&validations[..], n_validations), (&[0, 3, 6, 8][..], 4));
    // More batches than anybody waits for.
    options.validation_batches = u64::MAX;
    has_begun.store(false, Ordering::Relaxed);
    let ended = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !has_begun.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            std::thread::sleep(std::time::Duration::from_millis(300));
            stop.store(true, Ordering::Relaxed);
        });
        run(&options)
    });
    assert_eq!(ended, (Vec::new(), 0));
}

/// Steps are counted from the first of all runs: one that is interrupted or loses ranks validates at
/// the steps of one that is not, and at those where a part of it begins and ends.
#[test]
fn a_run_that_goes_on_validates_at_the_same_steps() {
    let (training, spec, vocab) = setup();
    let dir = tempfile::tempdir().unwrap();
    let dataset = half_for_validation(dir.path(), vocab);
    let schedule = LrSchedule::new(0.01, 0.0, 0, 8, Decay::Constant).unwrap();
    let program = lower(&training, &meshes(), 2, 2, 1);
    let state = dir.path().join("state");
    std::fs::create_dir(&state).unwrap();
    let run = |steps: u64, resume: Option<&Path>| -> Vec<u64> {
        let mut options = options(&program, &spec, &dataset, &schedule, steps);
        options.validate_every = Some(4);
        options.validation_batches = 1;
        options.resume = resume.map(newest);
        let mut trained = train(&options, crate::init::from_graph(&training, 1), |_| ()).unwrap();
        checkpoint::save(&state, &mut trained.session, "0", "").unwrap();
        let validations = trained.measurement.validation.iter();
        validations.map(|(step, _)| *step).collect()
    };
    assert_eq!(run(6, None), [0, 4, 6]);
    assert_eq!(run(7, Some(&state)), [6, 8, 12, 13]);
}

/// The end of a session for a reason, with a checkpoint on its way to a folder, and what was
/// told.
fn ends(
    folder: &Path,
    breaks: impl FnOnce(&mut Session),
    why: RuntimeError,
) -> (RuntimeError, Vec<Progress>, Session) {
    let (training, spec, vocab) = setup();
    let dir = tempfile::tempdir().unwrap();
    let dataset = data(dir.path(), vocab, (0..2000).map(|i| i * i % 7 % vocab));
    let program = lower(&training, &meshes(), 2, 2, 1);
    let options = SessionOptions {
        data: Some(Arc::new(batches(&dataset, &spec, false).unwrap())),
        ..SessionOptions::default()
    };
    let initial = crate::init::from_graph(&training, spec.seed);
    let mut session = Session::new(&program, &spec, options, initial).unwrap();
    session.train(0.01, false).unwrap();
    let mut background = Background::default();
    let of = checkpoint::saving(folder, false);
    background.begin(&of, &mut session).unwrap();
    breaks(&mut session);
    let mut told = Vec::new();
    let ended = end_for(why, (&mut session, &mut background), &mut |p| told.push(p));
    assert!(!background.is_busy());
    (ended, told, session)
}

fn diverged() -> RuntimeError {
    RuntimeError::Diverged {
        step: 1,
        figure: "validation loss".into(),
        value: f64::NAN,
        loss_scale: None,
        first: None,
    }
}

/// It is of an earlier step, which was good.
#[test]
fn a_checkpoint_on_its_way_outlives_the_end_of_a_run() {
    let differ = RuntimeError::Replicas {
        step: 1,
        path: "w".into(),
        odd: vec![Rank(1)],
        others: vec![Rank(0)],
        is_known: false,
    };
    for why in [diverged(), differ] {
        let dir = tempfile::tempdir().unwrap();
        let words = why.to_string();
        let (ended, told, mut session) = ends(dir.path(), |_| (), why);
        assert_eq!(ended.to_string(), words);
        let [Progress::Checkpoint { step: 1, path }] = &told[..] else {
            panic!("{told:?}");
        };
        assert_eq!(path, &dir.path().join("0001-step-1"));
        assert_eq!(checkpoint::verify(path).unwrap().step(), 1);
        // The ranks know why, and play no more.
        let error = session.train(0.01, false).unwrap_err().to_string();
        assert!(error.contains(&words), "{error}");
    }
}

/// One that cannot be made is said, and changes neither the reason nor what was there before.
/// Where the ranks have ended already nothing is said of it.
#[test]
fn a_checkpoint_that_fails_changes_no_end() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("state");
    let names = || -> Vec<_> {
        let all = std::fs::read_dir(&folder).into_iter().flatten();
        all.map(|e| e.unwrap().file_name()).collect()
    };
    // Its folder goes while the ranks write to it.
    let goes = |_: &mut Session| {
        let is_empty = |f: &Path| std::fs::read_dir(f).unwrap().next().is_none();
        let unfinished = folder.join(names().pop().unwrap());
        while is_empty(&unfinished) {
            std::thread::yield_now();
        }
        while unfinished.exists() {
            let _ = std::fs::remove_dir_all(&unfinished);
        }
    };
    let (ended, told, session) = ends(&folder, goes, diverged());
    assert!(matches!(ended, RuntimeError::Diverged { .. }), "{ended}");
    let [Progress::NoCheckpoint { step: 1, .. }] = &told[..] else {
        panic!("{told:?}");
    };
    assert!(session.has_ended() && names().is_empty());
    let fails = |session: &mut Session| session.fail("a rank is lost");
    let (ended, told, _) = ends(&folder, fails, diverged());
    assert!(matches!(ended, RuntimeError::Diverged { .. }), "{ended}");
    assert!(told.is_empty() && names().is_empty(), "{told:?}");
}

#[test]
fn a_measurement_accounts_for_the_step() {
    let (training, spec, vocab) = setup();
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data.bin");
    std::fs::write(&data, vec![0u8; 2000]).unwrap();
    let dataset = Dataset::open(
        &data,
        &DataOptions {
            format: None,
            tokenizer: None,
            vocab,
            validation_fraction: 0.0,
            further: 0,
        },
    )
    .unwrap();
    let dataset = Arc::new(dataset);
    let schedule = LrSchedule::new(0.01, 0.01, 0, 40, Decay::Constant).unwrap();
    let program = lower(&training, &meshes(), 2, 2, 1);
    let options = TrainOptions {
        program: &program,
        spec: &spec,
        name: "test",
        plan_hash: "f00d",
        dataset: &dataset,
        schedule: &schedule,
        steps: 5,
        validate_every: None,
        validation_batches: 0,
        profile_steps: 2,
        resume: None,
        checkpoints: None,
        check_replicas: None,
        stop: None,
        session: SessionOptions::default(),
    };
    let m = train(
        &options,
        crate::init::from_graph(&training, spec.seed),
        |_| (),
    )
    .unwrap()
    .measurement;
    assert_eq!(
        (m.n_ranks, m.stages.len(), m.plan_hash.as_str()),
        (3, 2, "f00d")
    );
    assert_eq!(
        m.steps.iter().map(|s| s.profiled).collect::<Vec<_>>(),
        [false, false, false, true, true]
    );
    let slowest = m.steps.iter().map(|s| s.seconds).fold(0.0, f64::max);
    for (stage, role) in m.stages.iter().zip(&program.roles) {
        assert!(
            stage.compute_s > 0.0
                && stage.transfer_s > 0.0
                && stage.forward_s > 0.0
                && stage.backward_s > 0.0
                && stage.step_s > 0.0
        );
        assert!(
            stage.compute_s + stage.collective_s + stage.transfer_s <= slowest,
            "{stage:?}, {slowest} s"
        );
        assert!(stage.peak_bytes.0 > role.arena_bytes);
    }
    let n: usize = program
        .roles
        .iter()
        .flat_map(|r| &r.templates)
        .map(|t| t.instructions.len())
        .sum();
    assert_eq!(m.instructions.len(), n);
    let forward = m.instructions.iter().find(|i| i.template == 4).unwrap();
    assert_eq!(forward.count, program.n_microbatches);
    assert!(
        m.step_time_s.0 > 0.0
            && (m.tokens_per_s * m.step_time_s.0 - (spec.global_batch * spec.sequence) as f64)
                .abs()
                < 1e-6
    );
}
