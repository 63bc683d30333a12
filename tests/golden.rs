//! Golden files: one small model for each kind of plan, as `golden/NAME.txt` with the plan in a
//! few lines and the whole program in its text form.
//!
//! A change of the planner, of lowering or of the program shows there as a diff that a reviewer
//! reads. `MESHWRIGHT_BLESS=1 ./test.sh -p tests --test golden` writes the files again. Every
//! program is proved by the checker, and its text is parsed back to the equal program.

use ir::plan::Plan;
use ir::{Graph, Precision, Task, TrainSpec};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use tests::plans::{SEQUENCE, mlp, untied_mlp};
use tests::{cluster, planned};

/// Lines around a difference.
const CONTEXT: usize = 3;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden")
}

fn model(config: serde_json::Value, sequence: u64) -> Graph {
    let config = import::ModelConfig::parse("config.json", config.to_string().as_bytes())
        .expect("the config is valid");
    let options = import::BuildOptions {
        sequence,
        dropout: 0.0,
    };
    import::model_graph(&config, &options).expect("the model builds")
}

fn gpt2(tied: bool) -> Graph {
    let config = serde_json::json!({
        "model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 8,
        "vocab_size": 16, "tie_word_embeddings": tied,
    });
    model(config, 8)
}

fn mixtral() -> Graph {
    let config = serde_json::json!({
        "model_type": "mixtral", "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "hidden_size": 8, "intermediate_size": 8,
        "num_local_experts": 2, "num_experts_per_tok": 1, "vocab_size": 16,
        "max_position_embeddings": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": false, "hidden_act": "silu",
    });
    model(config, 8)
}

/// Two further tokens by one module.
fn further() -> Graph {
    let config = serde_json::json!({
        "model_type": "nemotron_h", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8,
        "hybrid_override_pattern": "-", "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 4, "mamba_num_heads": 2, "mamba_head_dim": 4, "ssm_state_size": 2, "n_groups": 1,
        "max_position_embeddings": 8, "num_nextn_predict_layers": 1, "mtp_num_layers": 2,
        "mtp_use_repeated_layer": true, "mtp_hybrid_override_pattern": "*",
    });
    model(config, 8)
}

fn train(forward: &Graph, precision: Precision) -> TrainSpec {
    TrainSpec {
        global_batch: 4,
        sequence: ir::testing::sequence_of(forward).expect("the model has tokens"),
        precision,
        ..TrainSpec::default()
    }
}

/// The plan in a few lines.
fn summary(plan: &Plan) -> String {
    let mut out = format!(
        "{}: {} of {} samples, {} microbatches of {}, {}, {}\n",
        plan.name,
        plan.train.precision.compute().name(),
        plan.train.global_batch,
        plan.n_microbatches,
        plan.microbatch,
        plan.schedule.name(),
        match plan.pins.is_empty() {
            true => "no pins".to_string(),
            false => format!("pins {}", plan.pins.join(" ")),
        },
    );
    for (i, stage) in plan.stages.iter().enumerate() {
        let axes = stage
            .mesh
            .axes
            .iter()
            .map(|a| format!("{} {}", a.name, a.size));
        let _ = write!(
            out,
            "stage{i} from {}: {};",
            stage.mesh.devices.first_rank,
            axes.collect::<Vec<_>>().join(", ")
        );
        for run in &stage.runs {
            let _ = write!(
                out,
                " {}*{} by strategy {}",
                run.first, run.count, run.strategy
            );
        }
        out.push('\n');
    }
    let predicted = &plan.predicted;
    let _ = writeln!(
        out,
        "predicted {:.3e} s per step, bubble {:.3}",
        predicted.step_time_s.0, predicted.bubble
    );
    out
}

/// The first difference, with lines around it.
fn difference(expected: &str, found: &str) -> String {
    let (old, new): (Vec<&str>, Vec<&str>) = (expected.lines().collect(), found.lines().collect());
    let same = old.iter().zip(&new).take_while(|(a, b)| a == b).count();
    let end = old[same..].iter().rev().zip(new[same..].iter().rev());
    let end = end.take_while(|(a, b)| a == b).count();
    let mut out = format!("from line {}\n", same + 1);
    let mut lines = |sign: &str, lines: &[&str]| {
        lines.iter().for_each(|l| out += &format!("{sign}{l}\n"));
    };
    lines(" ", &old[same.saturating_sub(CONTEXT)..same]);
    lines("-", &old[same..old.len() - end]);
    lines("+", &new[same..new.len() - end]);
    lines(" ", &old[old.len() - end..][..CONTEXT.min(end)]);
    out
}

/// Makes the plan and compares it with its file.
fn golden(name: &str, forward: &Graph, train: &TrainSpec, ranks: u32, pins: &[&str]) {
    let made = planned(forward, train, &cluster(ranks), pins).unwrap_or_else(|e| panic!("{e}"));
    let found = summary(&made.plan) + "\n" + &ir::text::program::print(&made.program);
    let file = folder().join(format!("{name}.txt"));
    if std::env::var("MESHWRIGHT_BLESS").is_ok_and(|v| v == "1") {
        return std::fs::write(&file, found).expect("the file can be written");
    }
    let expected = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(
        expected == found,
        "{} differs; if that is meant, run MESHWRIGHT_BLESS=1 ./test.sh -p tests --test golden\n{}",
        file.display(),
        difference(&expected, &found)
    );
}

macro_rules! goldens {
    ($($name:ident: $forward:expr, $precision:ident, $ranks:literal, $pins:expr;)*) => {
        $(
            #[test]
            fn $name() {
                let forward = $forward;
                let train = train(&forward, Precision::$precision);
                golden(stringify!($name), &forward, &train, $ranks, &$pins);
            }
        )*
        #[test]
        fn every_file_has_a_test() {
            let others = ["inference.txt", "pipeline_pipedream.txt"];
            let mut known = [$(concat!(stringify!($name), ".txt")),*].to_vec();
            known.extend(others);
            known.sort_unstable();
            let files = std::fs::read_dir(folder()).expect("the folder exists");
            let names = files.map(|f| f.expect("a file").file_name().into_string());
            let mut names: Vec<String> = names.map(|n| n.expect("a name")).collect();
            names.sort_unstable();
            assert_eq!(names, known);
        }
    };
}

goldens! {
    single: mlp(1), F32, 1, [];
    equal_layers: mlp(6), F32, 1, ["microbatch=2"];
    data: mlp(1), F32, 2, ["data=2", "zero=0", "pipeline=1"];
    zero_1: mlp(1), F32, 2, ["data=2", "zero=1", "pipeline=1"];
    zero_2: mlp(1), F32, 2, ["data=2", "zero=2", "pipeline=1"];
    zero_3: mlp(1), F32, 2, ["data=2", "zero=3", "pipeline=1"];
    tensor: gpt2(false), F32, 2, ["tensor=2", "data=1", "pipeline=1"];
    sequence: gpt2(false), F32, 2, ["tensor=2", "data=1", "pipeline=1", "spec:h.0.ln_1=[_,tensor,_]", "spec:h.0.ln_2=[_,tensor,_]"];
    pieces: gpt2(false), F32, 2, ["tensor=2", "data=1", "pipeline=1", "microbatch=4", "spec:h.0.mlp.fc=[_,_,tensor]", "spec:h.0.mlp.act=[_,_,_]"];
    context: gpt2(false), F32, 2, ["context=2", "data=1", "pipeline=1"];
    context_ring: gpt2(false), F32, 2, ["context=2", "context_attention=ring", "data=1", "pipeline=1", "context_order=zigzag"];
    context_ring_bf16: gpt2(false), Bf16, 4, ["context=4", "context_attention=ring", "data=1", "pipeline=1"];
    context_ulysses: gpt2(false), F32, 2, ["context=2", "context_attention=ulysses", "data=1", "pipeline=1"];
    context_zigzag: gpt2(false), F32, 2, ["context=2", "data=1", "pipeline=1", "context_order=zigzag"];
    expert: mixtral(), F32, 2, ["expert=2", "data=2", "pipeline=1"];
    pipeline_1f1b: mlp(2), F32, 2, ["pipeline=2", "microbatch=1", "schedule=1f1b"];
    pipeline_gpipe: mlp(2), F32, 2, ["pipeline=2", "microbatch=1", "schedule=gpipe"];
    pipeline_zb_h1: mlp(2), F32, 2, ["pipeline=2", "microbatch=1", "schedule=zb_h1"];
    pipeline_zb_v: mlp(2), F32, 2, ["pipeline=2", "microbatch=1", "schedule=zb_v"];
    pipeline_interleaved: mlp(2), F32, 2, ["pipeline=2", "microbatch=1", "virtual=2"];
    further_tokens: further(), F32, 2, ["pipeline=2", "microbatch=2"];
    tied_embeddings: gpt2(true), F32, 2, ["pipeline=2", "microbatch=2"];
    recomputation: mlp(1), F32, 1, ["recompute=full", "microbatch=2"];
    loss_scaling: mlp(1), F16, 1, ["microbatch=2"];
    bf16: mlp(1), Bf16, 1, ["microbatch=2"];
}

/// Two stages, two microbatches, parameters at rest in bf16: forward passes alone.
#[test]
fn inference() {
    let forward = gpt2(true);
    let train = TrainSpec {
        task: Task::Inference,
        ..train(&forward, Precision::Bf16)
    };
    let pins = ["pipeline=2", "tensor=1", "data=1", "microbatch=2"];
    golden("inference", &forward, &train, 2, &pins);
}

/// Two stages, of which the first keeps two versions of its weights; updates in every backward pass.
#[test]
fn pipeline_pipedream() {
    let forward = untied_mlp(2);
    let train = TrainSpec {
        clip_norm: None,
        ..train(&forward, Precision::F32)
    };
    let pins = ["pipeline=2", "microbatch=1", "schedule=pipedream"];
    golden("pipeline_pipedream", &forward, &train, 2, &pins);
}

#[test]
fn texts_of_sequence_lengths_are_the_models() {
    assert_eq!(ir::testing::sequence_of(&mlp(1)), Some(SEQUENCE));
}
