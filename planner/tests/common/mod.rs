//! Models of this repository, for the tests here.

use ir::Graph;
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
