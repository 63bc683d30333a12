//! The series: one size changes, all others stay.

use cost_model::presets;
use import::{BuildOptions, ModelConfig, model_graph};
use ir::cluster::Cluster;
use ir::op::OpKind;
use ir::tensor::Dim;
use ir::{Graph, Place, Precision, Shape, TrainSpec, ValueId};
use serde_json::Value;
use std::path::Path;

/// The size that changes along a series.
#[derive(Clone, Copy, PartialEq)]
enum Changes {
    /// Layers, all of one kind.
    Layers,
    /// Hosts.
    Hosts,
    /// Hosts, and the global batch with them.
    HostsAndBatch,
    /// Kinds of layers, by the width of their feed-forward network; as many layers at each point.
    Kinds,
}

/// A series of points.
pub struct Series {
    /// Its name.
    pub name: &'static str,
    /// The values of what changes.
    pub sizes: &'static [u64],
    /// Where it is drawn: the name of the axis that it shares with others.
    pub axis: &'static str,
    changes: Changes,
    model: &'static str,
    hosts: u32,
    global_batch: u64,
    sequence: u64,
}

/// The cluster of all series, of eight devices a host.
const CLUSTER: &str = "dgx-h100";

/// All series.
pub const SERIES: [Series; 5] = [
    Series {
        name: "layers of llama-3.1-8b, 64 devices",
        sizes: &[8, 16, 32, 64, 128, 256],
        axis: "layers",
        changes: Changes::Layers,
        model: "llama-3.1-8b",
        hosts: 8,
        global_batch: 512,
        sequence: 8192,
    },
    Series {
        name: "layers of gpt3-175b, 1,024 devices",
        sizes: &[12, 24, 48, 96, 192],
        axis: "layers",
        changes: Changes::Layers,
        model: "gpt3-175b",
        hosts: 128,
        global_batch: 1536,
        sequence: 2048,
    },
    Series {
        name: "llama-3.1-8b, 16 samples a device",
        sizes: &[8, 32, 128, 512, 2048],
        axis: "devices",
        changes: Changes::HostsAndBatch,
        model: "llama-3.1-8b",
        hosts: 1,
        global_batch: 128,
        sequence: 8192,
    },
    Series {
        name: "gpt3-175b, batch of 6,144",
        sizes: &[128, 512, 2048, 8192],
        axis: "devices",
        changes: Changes::Hosts,
        model: "gpt3-175b",
        hosts: 1,
        global_batch: 6144,
        sequence: 2048,
    },
    Series {
        name: "kinds among 32 layers of llama-3.1-8b, 64 devices",
        sizes: &[1, 2, 4, 8, 16, 32],
        axis: "distinct ops",
        changes: Changes::Kinds,
        model: "llama-3.1-8b",
        hosts: 8,
        global_batch: 512,
        sequence: 8192,
    },
];

/// The inputs of a search.
pub struct Point {
    pub forward: Graph,
    pub train: TrainSpec,
    pub cluster: Cluster,
}

impl Series {
    /// Whether it is drawn over distinct ops, which are what changes with its sizes.
    pub fn counts_ops(&self) -> bool {
        self.changes == Changes::Kinds
    }
    /// The point of a size.
    ///
    /// Fails when the model cannot be read.
    pub fn point(&self, size: u64, models: &Path) -> Result<Point, String> {
        let path = models.join(self.model).join("config.json");
        let said = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
        let text = std::fs::read_to_string(&path).map_err(|e| said(&e))?;
        let mut config: Value = serde_json::from_str(&text).map_err(|e| said(&e))?;
        if self.changes == Changes::Layers {
            let field = match config.get("n_layer") {
                Some(_) => "n_layer",
                None => "num_hidden_layers",
            };
            config[field] = size.into();
        }
        let inner = config["intermediate_size"].as_u64().unwrap_or(0);
        let config =
            ModelConfig::parse(self.model, config.to_string().as_bytes()).map_err(|e| said(&e))?;
        let options = BuildOptions {
            sequence: self.sequence,
            dropout: 0.0,
        };
        let mut forward = model_graph(&config, &options).map_err(|e| said(&e))?;
        if self.changes == Changes::Kinds {
            forward = of_kinds(&forward, inner, size).map_err(|e| said(&e))?;
        }
        let (hosts, batch) = match self.changes {
            Changes::Layers | Changes::Kinds => (self.hosts, self.global_batch),
            Changes::Hosts => (hosts(size)?, self.global_batch),
            Changes::HostsAndBatch => (hosts(size)?, self.global_batch * size / 8),
        };
        Ok(Point {
            forward,
            train: TrainSpec {
                global_batch: batch,
                sequence: self.sequence,
                precision: Precision::Bf16,
                ..TrainSpec::default()
            },
            cluster: presets::load(CLUSTER, hosts).map_err(|e| said(&e))?,
        })
    }
}

/// Hosts of so many devices.
fn hosts(devices: u64) -> Result<u32, String> {
    u32::try_from(devices / 8).map_err(|_| format!("{devices} devices are too many"))
}

/// The same model, with feed-forward networks of so many widths in turn: the one that it has, and
/// others that are less by multiples of 64.
fn of_kinds(model: &Graph, inner: u64, kinds: u64) -> Result<Graph, String> {
    let mut graph = Graph::new(&model.name);
    graph.layers.clone_from(&model.layers);
    let mut values: Vec<Option<ValueId>> = vec![None; model.values().len()];
    for (_, op) in model.iter() {
        let less = op
            .layer
            .map_or(0, |layer| 64 * (layer.index() as u64 % kinds));
        let place = Place {
            path: op.path.clone(),
            pass: op.pass,
            region: op.region,
            layer: op.layer,
        };
        let inputs = op.inputs.iter().map(|v| values[v.index()]);
        let inputs: Option<Vec<ValueId>> = inputs.collect();
        let inputs = inputs.ok_or("an operand stands behind its op")?;
        let results = match op.kind {
            OpKind::State { .. } | OpKind::Input { .. } => {
                let mut ty = model.ty(op.outputs[0]).clone();
                let narrowed = ty.shape.0.iter().map(|&dim| match dim {
                    Dim::Fixed(n) if n == inner => Dim::Fixed(n - less),
                    dim => dim,
                });
                ty.shape = Shape(narrowed.collect());
                let source = graph.add_source(op.kind.clone(), ty, place);
                vec![source.map_err(|e| e.to_string())?]
            }
            _ => graph
                .add(op.kind.clone(), &inputs, place)
                .map_err(|e| e.to_string())?,
        };
        for (old, new) in op.outputs.iter().zip(results) {
            values[old.index()] = Some(new);
        }
    }
    let outputs = model.outputs.iter().map(|v| values[v.index()]);
    let outputs: Option<Vec<ValueId>> = outputs.collect();
    graph.outputs = outputs.ok_or("an output has no op")?;
    Ok(graph)
}
