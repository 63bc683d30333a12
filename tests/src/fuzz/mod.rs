//! Fuzz targets: one function for each kind of file or text that a user hands in.
//!
//! A target does what the command line does with such a file, up to a size that keeps one
//! input in milliseconds, and says how far the input got ([`Depth`]). The property is always
//! the same: an answer, never a panic, an endless loop or memory out of proportion. The
//! functions are shared by the deterministic campaign of `tests/fuzz.rs` ([`campaign`]) and by
//! the coverage-guided targets of the `fuzz` workspace.

pub mod campaign;
mod corpus;
mod mutate;

pub use corpus::{TINY_CONFIG, TINY_INDEX, tiny_forward, tiny_train};
pub use mutate::Shape;

use crate::plans::mlp;
use cost_model::simulate::SimulateOptions;
use import::{BuildOptions, ModelConfig, Weights};
use intra_op::{SolveOptions, read_problem, read_solution, solve};
use ir::cluster::Cluster;
use ir::measurement::Measurement;
use ir::op::{InputKind, OpKind};
use ir::plan::Plan;
use ir::training::training_graph;
use ir::{DType, Dim, Graph, TrainSpec};
use planner::Pins;
use runtime::data::{DataOptions, Dataset, Split};
use runtime::execute::Local;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How far an input got: 0 when its parser refused it, one more for each stage passed.
pub type Depth = usize;

/// A parser under test.
#[derive(Clone, Copy)]
pub struct Target {
    /// Its name.
    pub name: &'static str,
    /// The function to run on an input.
    pub run: fn(&[u8]) -> Depth,
    /// Good inputs to start from; each gets through every stage.
    pub corpus: fn() -> Vec<Vec<u8>>,
    /// Depth of a good input.
    pub full: Depth,
    /// How inputs are built, which decides how they are spoiled.
    pub shape: Shape,
}

/// All targets.
#[rustfmt::skip]
pub const TARGETS: [Target; 22] = [
    Target {
        name: "config",
        run: config,
        corpus: corpus::configs,
        full: 2,
        shape: Shape::Json,
    },
    Target {
        name: "weights",
        run: weights,
        corpus: corpus::weights,
        full: 2,
        shape: Shape::Safetensors,
    },
    Target {
        name: "weights_index",
        run: weights_index,
        corpus: corpus::weight_indices,
        full: 2,
        shape: Shape::Json,
    },
    Target {
        name: "graph",
        run: graph,
        corpus: corpus::graphs,
        full: 3,
        shape: Shape::Text,
    },
    Target {
        name: "graph_to_plan",
        run: graph_to_plan,
        corpus: corpus::small_graphs,
        full: 2,
        shape: Shape::Text,
    },
    Target {
        name: "program",
        run: program,
        corpus: corpus::programs,
        full: 1,
        shape: Shape::Text,
    },
    Target {
        name: "plan",
        run: plan,
        corpus: corpus::plans,
        full: 4,
        shape: Shape::Json,
    },
    Target {
        name: "cluster_toml",
        run: cluster_toml,
        corpus: corpus::clusters_toml,
        full: 3,
        shape: Shape::Text,
    },
    Target {
        name: "cluster_json",
        run: cluster_json,
        corpus: corpus::clusters_json,
        full: 3,
        shape: Shape::Json,
    },
    Target {
        name: "pins",
        run: pins,
        corpus: corpus::pins,
        full: 2,
        shape: Shape::Text,
    },
    Target {
        name: "data_bin",
        run: data_bin,
        corpus: corpus::data_bins,
        full: 2,
        shape: Shape::Binary,
    },
    Target {
        name: "data_text",
        run: data_text,
        corpus: corpus::data_texts,
        full: 2,
        shape: Shape::Binary,
    },
    Target {
        name: "tokenizer",
        run: tokenizer,
        corpus: corpus::tokenizers,
        full: 2,
        shape: Shape::Json,
    },
    Target {
        name: "iopddl",
        run: iopddl,
        corpus: corpus::instances,
        full: 2,
        shape: Shape::Json,
    },
    Target {
        name: "measurement",
        run: measurement,
        corpus: corpus::measurements,
        full: 1,
        shape: Shape::Json,
    },
    Target {
        name: "checkpoint",
        run: checkpoint,
        corpus: corpus::checkpoints,
        full: 1,
        shape: Shape::Safetensors,
    },
    Target {
        name: "manifest",
        run: manifest,
        corpus: corpus::manifests,
        full: 1,
        shape: Shape::Json,
    },
    Target {
        name: "spoken",
        run: spoken,
        corpus: runtime::processes::spoken::examples,
        full: 1,
        shape: Shape::Binary,
    },
    Target {
        name: "dcp_metadata",
        run: dcp_metadata,
        corpus: corpus::dcp_metadata,
        full: 1,
        shape: Shape::Binary,
    },
    Target {
        name: "dcp_chunks",
        run: dcp_chunks,
        corpus: corpus::dcp_chunks,
        full: 1,
        shape: Shape::Binary,
    },
    Target {
        name: "train_spec",
        run: train_spec,
        corpus: corpus::train_files,
        full: 3,
        shape: Shape::Text,
    },
    Target {
        name: "job",
        run: job,
        corpus: corpus::jobs,
        full: 1,
        shape: Shape::Text,
    },
];

/// The target of a name.
pub fn target(name: &str) -> Target {
    TARGETS
        .into_iter()
        .find(|t| t.name == name)
        .expect("a target of this name")
}

/// Ops above which a parsed graph is not used further.
const MAX_OPS: usize = 400;

/// A model's `config.json`, and the graph it stands for.
pub fn config(data: &[u8]) -> Depth {
    let Ok(config) = ModelConfig::parse("config.json", data) else {
        return 0;
    };
    if config.n_layers() > 64 {
        return 1;
    }
    let _ = config.n_parameters();
    let options = BuildOptions {
        sequence: config.max_sequence().min(64),
        dropout: 0.1,
    };
    let Ok(graph) = import::model_graph(&config, &options) else {
        return 1;
    };
    assert_eq!(
        ir::verify::verify(&graph),
        vec![],
        "an imported graph breaks rules"
    );
    2
}

/// Runs `f` on a folder that is gone afterwards, with `data` under a name.
fn with_file<T>(name: &str, data: &[u8], f: impl FnOnce(PathBuf) -> T) -> T {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join(name);
    std::fs::write(&path, data).expect("a temporary file");
    f(path)
}

fn all_params(weights: &Weights) -> Depth {
    let paths: Vec<String> = weights.paths().map(String::from).collect();
    match paths.iter().all(|p| weights.param(p).is_ok()) {
        true => 2,
        false => 1,
    }
}

fn tiny_config() -> ModelConfig {
    ModelConfig::parse("config.json", TINY_CONFIG.as_bytes()).expect("the tiny config is valid")
}

/// A safetensors file of a tiny model's weights.
pub fn weights(data: &[u8]) -> Depth {
    with_file("model.safetensors", data, |path| {
        Weights::open(path, &tiny_config()).map_or(0, |w| all_params(&w))
    })
}

/// The index of a sharded safetensors file, whose one shard is good.
pub fn weights_index(data: &[u8]) -> Depth {
    with_file(TINY_INDEX, data, |path| {
        std::fs::write(
            path.with_file_name(corpus::TINY_SHARD),
            corpus::tiny_weights(),
        )
        .expect("a temporary file");
        Weights::open(path, &tiny_config()).map_or(0, |w| all_params(&w))
    })
}

fn sequence_of(graph: &Graph) -> Option<u64> {
    let tokens = |k: &OpKind| {
        matches!(
            k,
            OpKind::Input {
                kind: InputKind::Tokens
            }
        )
    };
    let op = graph.ops().iter().find(|op| tokens(&op.kind))?;
    match graph.ty(op.outputs[0]).shape.0.get(1) {
        Some(Dim::Fixed(n)) => Some(*n),
        _ => None,
    }
}

/// A graph in text form: read, printed, verified, differentiated.
pub fn graph(data: &[u8]) -> Depth {
    let Ok(text) = std::str::from_utf8(data) else {
        return 0;
    };
    let Ok(graph) = ir::text::parse(text) else {
        return 0;
    };
    if graph.ops().len() > MAX_OPS {
        return 1;
    }
    let printed = ir::text::print(&graph);
    let again = ir::text::parse(&printed).expect("a printed graph can be read");
    assert_eq!(ir::text::print(&again), printed, "printing is not stable");
    if !ir::verify::verify(&graph).is_empty() {
        return 1;
    }
    let train = TrainSpec {
        sequence: sequence_of(&graph).unwrap_or(1),
        ..tiny_train()
    };
    training_graph(&graph, &train).map_or(2, |_| 3)
}

/// A graph in text form, planned for two devices.
pub fn graph_to_plan(data: &[u8]) -> Depth {
    let Ok(text) = std::str::from_utf8(data) else {
        return 0;
    };
    let Ok(graph) = ir::text::parse(text) else {
        return 0;
    };
    if graph.ops().len() > MAX_OPS / 4 || !ir::verify::verify(&graph).is_empty() {
        return 0;
    }
    let train = TrainSpec {
        sequence: sequence_of(&graph).unwrap_or(1),
        ..tiny_train()
    };
    match planner::plan(&graph, &train, &crate::cluster(2), &Default::default()) {
        Ok(made) => {
            crate::assert_checked(&made.plan, &made.training, &made.program);
            2
        }
        Err(planner::PlanError::Lower(defect) | planner::PlanError::Defect(defect)) => {
            panic!("{defect}")
        }
        Err(_) => 1,
    }
}

/// A program in text form: read, printed, and read again.
pub fn program(data: &[u8]) -> Depth {
    let Ok(text) = std::str::from_utf8(data) else {
        return 0;
    };
    let Ok(program) = ir::text::program::parse(text) else {
        return 0;
    };
    let printed = ir::text::program::print(&program);
    let again = ir::text::program::parse(&printed).unwrap_or_else(|e| panic!("{e}\n{printed}"));
    assert!(again == program, "read as another program:\n{printed}");
    let first = program.roles.first().map(|r| r.mesh.devices.first_rank);
    if let Some(rank) = first.filter(|_| program.roles[0].mesh.n_devices() <= 64) {
        let _ = ir::text::program::print_rank(&program, rank);
    }
    1
}

/// A plan: read, checked, lowered, and its program checked.
pub fn plan(data: &[u8]) -> Depth {
    let Ok(plan) = serde_json::from_slice::<Plan>(data) else {
        return 0;
    };
    if !checker::check_plan(&plan).is_empty() {
        return 1;
    }
    let n_ranks: u64 = plan
        .stages
        .iter()
        .map(|s| u64::from(s.mesh.n_devices()))
        .sum();
    if plan.n_microbatches > 256 || n_ranks > 64 {
        return 1;
    }
    let forward = ir::text::parse(&plan.graph).expect("the checker read it");
    let training = plan.training_graph(&forward).expect("the checker built it");
    let Ok(program) = lowering::lower_training(&plan, &training) else {
        return 2;
    };
    if !checker::check_program(&plan, &training, &program).is_empty() {
        return 3;
    }
    let work = cost_model::StepWork::of(&training, &plan.train);
    let _ = cost_model::simulate::simulate(&program, &plan.cluster, &SimulateOptions::new(work));
    4
}

fn cluster(cluster: &Cluster) -> Depth {
    let _ = cost_model::presets::with_hosts(cluster.clone(), 3);
    let _ = cost_model::presets::with_ranks(cluster.clone(), 3);
    if !cluster.problems().is_empty() {
        return 1;
    }
    if cluster.n_devices() > 4 {
        return 2;
    }
    match planner::plan(&tiny_forward(), &tiny_train(), cluster, &Default::default()) {
        Ok(made) => crate::assert_checked(&made.plan, &made.training, &made.program),
        Err(planner::PlanError::Lower(defect) | planner::PlanError::Defect(defect)) => {
            panic!("{defect}")
        }
        Err(_) => {}
    }
    3
}

/// A cluster as TOML, and a plan for it.
pub fn cluster_toml(data: &[u8]) -> Depth {
    let Ok(text) = std::str::from_utf8(data) else {
        return 0;
    };
    cost_model::presets::parse(text).map_or(0, |c| cluster(&c))
}

/// A cluster as JSON, and a plan for it.
pub fn cluster_json(data: &[u8]) -> Depth {
    serde_json::from_slice::<Cluster>(data).map_or(0, |c| cluster(&c))
}

/// Pins, one to a line, and a plan that keeps them.
pub fn pins(data: &[u8]) -> Depth {
    let Ok(text) = std::str::from_utf8(data) else {
        return 0;
    };
    let lines: Vec<&str> = text.lines().collect();
    let Ok(pins) = Pins::parse(&lines) else {
        return 0;
    };
    let described = pins.describe();
    assert_eq!(
        Pins::parse(&described).as_ref(),
        Ok(&pins),
        "{described:?} are not the pins"
    );
    let options = planner::PlanOptions {
        pins,
        ..Default::default()
    };
    match planner::plan(&mlp(2), &tiny_train(), &crate::cluster(4), &options) {
        Ok(made) => {
            crate::assert_checked(&made.plan, &made.training, &made.program);
            2
        }
        Err(planner::PlanError::Lower(defect) | planner::PlanError::Defect(defect)) => {
            panic!("{defect}")
        }
        Err(_) => 1,
    }
}

fn data(path: PathBuf, tokenizer: Option<PathBuf>) -> Depth {
    let options = DataOptions {
        format: None,
        tokenizer,
        vocab: 256,
        validation_fraction: 0.2,
        further: 0,
    };
    let Ok(dataset) = Dataset::open(&path, &options) else {
        return 0;
    };
    let mut depth = 1 + usize::from(dataset.check().is_ok());
    for split in [Split::Train, Split::Validation] {
        for sequence in [1, 3, 1000] {
            let Ok(n) = dataset.n_windows(split, sequence) else {
                depth = depth.min(2);
                continue;
            };
            for window in [0, n - 1, n] {
                let Ok(tokens) = dataset.sample(split, window, sequence) else {
                    continue;
                };
                assert!(
                    tokens.len() == sequence + 1 && tokens.iter().all(|t| *t < 256),
                    "{tokens:?}"
                );
            }
        }
    }
    depth
}

/// A file of tokens.
pub fn data_bin(bytes: &[u8]) -> Depth {
    with_file("data.bin", bytes, |path| data(path, None))
}

/// A text, whose bytes are tokens.
pub fn data_text(bytes: &[u8]) -> Depth {
    with_file("data.txt", bytes, |path| data(path, None))
}

/// A `tokenizer.json`, applied to a text.
pub fn tokenizer(bytes: &[u8]) -> Depth {
    with_file("tokenizer.json", bytes, |path| {
        let text = path.with_file_name("data.txt");
        std::fs::write(&text, corpus::TEXT).expect("a temporary file");
        data(text, Some(path))
    })
}

/// An intra-op problem in the benchmark's form, and a short search; or a solution of one.
pub fn iopddl(data: &[u8]) -> Depth {
    let _ = read_solution(data);
    let Ok(problem) = read_problem(data) else {
        return 0;
    };
    if problem.nodes.len() > 100 {
        return 1;
    }
    let options = SolveOptions {
        time_limit: Some(Duration::from_millis(50)),
        threads: 1,
        ..SolveOptions::default()
    };
    solve(&problem, &options).map_or(1, |_| 2)
}

/// The record of a run.
pub fn measurement(data: &[u8]) -> Depth {
    let Ok(m) = serde_json::from_slice::<Measurement>(data) else {
        return 0;
    };
    let text = serde_json::to_string(&m).expect("a measurement can be written");
    serde_json::from_str::<Measurement>(&text).expect("what is written can be read");
    let _ = cost_model::compare::compare(&Default::default(), &Default::default(), &m);
    1
}

/// All states of what `--resume` would go on from.
fn states(path: &Path) -> Depth {
    let Ok(found) = runtime::checkpoint::find(path) else {
        return 0;
    };
    let read = |(name, lens): (&str, &[u64])| {
        let whole = Local::whole(DType::F32, lens);
        let mut bytes = vec![0; whole.bytes()];
        found.checkpoint.read(name, &whole, &mut bytes).is_ok()
    };
    usize::from(found.checkpoint.states().all(read))
}

/// A training state in one file, as earlier builds wrote them.
pub fn checkpoint(data: &[u8]) -> Depth {
    with_file("state.safetensors", data, |path| states(&path))
}

/// The manifest of a checkpoint whose one file is good; with the hash that it has to have, so that
/// all else is looked at too.
pub fn manifest(data: &[u8]) -> Depth {
    let stamped = runtime::checkpoint::restamped(data);
    with_file("manifest.json", &stamped.unwrap_or(data.to_vec()), |path| {
        let file = &corpus::checkpoints()[0];
        std::fs::write(path.with_file_name(corpus::RANK_FILE), file).expect("a temporary file");
        states(&path)
    })
}

/// Bytes that a process is told by another one.
pub fn spoken(data: &[u8]) -> Depth {
    runtime::processes::spoken::understood(data)
}

/// The metadata of a distributed checkpoint of PyTorch, a pickle.
pub fn dcp_metadata(data: &[u8]) -> Depth {
    usize::from(runtime::checkpoint::dcp::understands(data))
}

/// The file of the chunks of one, whose metadata are good.
pub fn dcp_chunks(data: &[u8]) -> Depth {
    use runtime::checkpoint::{Origin, dcp};
    with_file("__0_0.distcp", data, |path| {
        let folder = path.parent().expect("a folder");
        let metadata = &corpus::dcp_metadata()[0];
        std::fs::write(folder.join(dcp::METADATA), metadata).expect("a temporary file");
        let source = dcp::Source::open(folder).expect("good metadata");
        let Ok(Some(step)) = source.step() else {
            return 0;
        };
        let origin = Origin {
            plan_hash: String::new(),
            model: String::new(),
            step,
            seed: 1,
            next_sample: 0,
            global_batch: 1,
            sequence: 1,
            data: None,
            run: None,
        };
        let wanted = corpus::dcp_states();
        usize::from(source.import(&wanted, origin, folder).is_ok())
    })
}

/// A training file: applied to the defaults, judged, and a tiny model planned by it.
pub fn train_spec(data: &[u8]) -> Depth {
    let Ok(text) = std::str::from_utf8(data) else {
        return 0;
    };
    let Ok(file) = toml::from_str::<ir::TrainFile>(text) else {
        return 0;
    };
    let mut spec = TrainSpec::default();
    file.apply(&mut spec);
    let mut again = spec.clone();
    file.apply(&mut again);
    if !spec.problems().is_empty() {
        return 1;
    }
    assert_eq!(spec, again, "a file applied twice is another file");
    let written = serde_json::to_string(&spec).expect("a spec can be written");
    let read: TrainSpec = serde_json::from_str(&written).expect("what is written can be read");
    assert_eq!(read, spec, "a plan would hold another spec: {written}");
    // The model's tokens have one length, and few samples keep a plan in milliseconds.
    let train = TrainSpec {
        global_batch: spec.global_batch.min(4),
        sequence: tiny_train().sequence,
        ..spec
    };
    match planner::plan(
        &tiny_forward(),
        &train,
        &crate::cluster(2),
        &Default::default(),
    ) {
        Ok(made) => {
            crate::assert_checked(&made.plan, &made.training, &made.program);
            3
        }
        Err(planner::PlanError::Lower(defect) | planner::PlanError::Defect(defect)) => {
            panic!("{defect}")
        }
        Err(_) => 2,
    }
}

/// A job of other software in any of its forms: a script, a log, a DeepSpeed JSON, a torchtitan TOML.
/// Files that it names are the good DeepSpeed file.
pub fn job(data: &[u8]) -> Depth {
    let Ok(text) = std::str::from_utf8(data) else {
        return 0;
    };
    let variables = [("NNODES", "8"), ("gradient_checkpointing", "true")];
    let given = jobs::Given {
        variables: variables
            .map(|(k, v)| (k.to_string(), v.to_string()))
            .into_iter()
            .collect(),
        ..Default::default()
    };
    let _ = jobs::measured::of_log(text);
    let open = |_: &str| Ok(corpus::DEEPSPEED.to_string());
    match jobs::read("job", text, &given, &open) {
        Err(e) => {
            let lines = text.lines().count() + 1;
            assert!(
                e.line
                    .is_none_or(|l| (1..=lines).contains(&l) || e.file != "job"),
                "{e:?}"
            );
            0
        }
        Ok(reading) => {
            let job = &reading.job;
            assert!(
                job.micro_batch > 0 && job.tensor > 0 && job.pipeline > 0,
                "{job:?}"
            );
            1
        }
    }
}
