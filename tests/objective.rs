//! The search minimises an objective that adds up times; the simulator plays the program. Where
//! devices share nothing the two differ by what is hidden behind kernels, which the objective
//! charges in full, and by 5% at most beyond that.

#![allow(clippy::unwrap_used)] // A test may stop at what it does not expect.

use cost_model::StepWork;
use cost_model::account::account;
use ir::cluster::Cluster;
use ir::{Graph, Precision, TrainSpec};

fn cluster(name: &str) -> Cluster {
    cost_model::presets::find(name).unwrap().unwrap()
}

fn llama(layers: u64, hidden: u64) -> Graph {
    let text = format!(
        r#"{{"model_type": "llama", "hidden_size": {hidden}, "num_hidden_layers": {layers}, "num_attention_heads": {}, "num_key_value_heads": 8, "intermediate_size": {}, "vocab_size": 32000, "max_position_embeddings": 4096, "hidden_act": "silu"}}"#,
        hidden / 128,
        hidden * 3
    );
    let config = import::ModelConfig::parse("config.json", text.as_bytes()).unwrap();
    let options = import::BuildOptions {
        sequence: 4096,
        dropout: 0.0,
    };
    import::model_graph(&config, &options).unwrap()
}

#[test]
fn the_objective_is_the_simulated_step_but_for_what_is_hidden() {
    let (large, small) = (llama(16, 4096), llama(8, 2048));
    let gpipe = &["pipeline=4", "tensor=8", "schedule=gpipe"];
    let cases: &[(&Graph, &str, u64, &[&str])] = &[
        (&large, "dgx-h100:4", 128, gpipe),
        (&large, "dgx-h100:1", 64, &[]),
        (&large, "dgx-h100:1", 64, &["tensor=8"]),
        (&large, "dgx-h100:1", 64, &["data=8", "zero=3"]),
        (&large, "dgx-h100:1", 64, &["data=4", "tensor=2", "zero=1"]),
        (&large, "dgx-h100:4", 128, &["pipeline=4", "tensor=8"]),
        (
            &large,
            "dgx-h100:4",
            128,
            &["pipeline=4", "tensor=8", "virtual=2"],
        ),
        (
            &large,
            "dgx-a100-80gb:2",
            64,
            &["pipeline=2", "data=2", "tensor=4"],
        ),
        (&small, "dgx-a100-40gb:2", 64, &[]),
        (
            &small,
            "dgx-a100-40gb:1",
            64,
            &["recompute=full", "data=8", "zero=2"],
        ),
        (&small, "a100-pcie-40gb:2", 32, &["zero=1"]),
        (&small, "aws-p4d:2", 64, &["pipeline=2", "virtual=4"]),
    ];
    let mut far = vec![];
    for &(forward, name, global_batch, pins) in cases {
        let train = TrainSpec {
            global_batch,
            sequence: 4096,
            precision: Precision::Bf16,
            ..TrainSpec::default()
        };
        let made = tests::planned(forward, &train, &cluster(name), pins).unwrap();
        let work = StepWork::of(&made.training, &train);
        let kinds = vec![0; forward.layers.len()];
        let account = account(&made.program, &made.plan.cluster, work, &kinds).unwrap();
        let hidden = |mesh: &cost_model::account::MeshAccount| {
            mesh.lines.iter().map(|l| l.hidden_s).sum::<f64>()
        };
        let hidden_s = account.meshes.iter().map(hidden).fold(0.0, f64::max);
        let objective_s = made.plan.proof.objective_s.0;
        let step_s = account.step_s;
        let off = [
            step_s / objective_s - 1.0,
            (objective_s - hidden_s) / step_s - 1.0,
        ];
        println!(
            "{name} {pins:?}: step {step_s:.4} s, objective {objective_s:.4} s ({:+.1}%), of which {hidden_s:.4} s hidden",
            100.0 * (objective_s / step_s - 1.0)
        );
        if off.iter().any(|&o| o > 0.05) {
            far.push(format!("{name} {pins:?}: {off:.3?}"));
        }
    }
    assert!(far.is_empty(), "{far:#?}");
}
