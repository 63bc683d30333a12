//! Models of this repository, for the tests here.

use ir::{Graph, Precision, TrainSpec};
use std::path::Path;

/// The forward graph of a model by the name of its folder, without dropout.
pub fn model(name: &str, sequence: u64) -> Graph {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models");
    let config = import::ModelConfig::load(&models.join(name)).unwrap();
    let options = import::BuildOptions {
        sequence,
        dropout: 0.0,
    };
    import::model_graph(&config, &options).unwrap()
}

/// Training with so many samples a step, of so many tokens.
#[allow(dead_code)] // Not every test trains.
pub fn train(global_batch: u64, sequence: u64, precision: Precision) -> TrainSpec {
    TrainSpec {
        global_batch,
        sequence,
        precision,
        ..TrainSpec::default()
    }
}
