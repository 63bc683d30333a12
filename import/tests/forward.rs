//! Graph and weights together give PyTorch's loss: a direct interpreter in f64 of the forward
//! ops, op by op from their definitions, on the reference cases.

#![allow(clippy::unwrap_used)]

use import::{BuildOptions, ModelConfig, Weights, model_graph};
use ir::Graph;
use ir::op::{Binary, Einsum, InputKind, OpKind, RopeScaling, Unary};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

#[derive(Clone)]
struct Tensor {
    shape: Vec<usize>,
    data: Vec<f64>,
}

impl Tensor {
    fn new(shape: &[usize], f: impl FnMut(usize) -> f64) -> Self {
        Tensor {
            shape: shape.into(),
            data: (0..shape.iter().product()).map(f).collect(),
        }
    }
    fn last(&self) -> usize {
        *self.shape.last().unwrap()
    }
    fn rows(&self) -> std::slice::Chunks<'_, f64> {
        self.data.chunks(self.last())
    }
    fn per_row(&self, f: impl FnMut(&[f64]) -> f64) -> Tensor {
        Tensor {
            shape: self.shape[..self.shape.len() - 1].into(),
            data: self.rows().map(f).collect(),
        }
    }
}

fn einsum(e: &Einsum, a: &Tensor, b: &Tensor) -> Tensor {
    let mut size = BTreeMap::new();
    for (labels, t) in [(&e.lhs, a), (&e.rhs, b)] {
        size.extend(labels.iter().copied().zip(t.shape.iter().copied()));
    }
    let summed: Vec<u8> = size
        .keys()
        .copied()
        .filter(|l| !e.out.contains(l))
        .collect();
    let shape: Vec<usize> = e.out.iter().map(|l| size[l]).collect();
    let n_summed: usize = summed.iter().map(|l| size[l]).product();
    let at = |labels: &[u8], t: &Tensor, value: &BTreeMap<u8, usize>| {
        t.data[labels
            .iter()
            .zip(&t.shape)
            .fold(0, |i, (l, n)| i * n + value[l])]
    };
    let unravel = |labels: &[u8], mut i: usize, value: &mut BTreeMap<u8, usize>| {
        for l in labels.iter().rev() {
            value.insert(*l, i % size[l]);
            i /= size[l];
        }
    };
    let mut value = BTreeMap::new();
    Tensor::new(&shape, |i| {
        unravel(&e.out, i, &mut value);
        (0..n_summed)
            .map(|j| {
                unravel(&summed, j, &mut value);
                at(&e.lhs, a, &value) * at(&e.rhs, b, &value)
            })
            .sum()
    })
}

/// Abramowitz & Stegun 7.1.5: the series of the error function.
fn erf(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= -x * x / n as f64;
        sum += term / (2 * n + 1) as f64;
    }
    sum * 2.0 / std::f64::consts::PI.sqrt()
}

fn unary(f: Unary, x: f64) -> f64 {
    match f {
        Unary::GeluErf if x.abs() > 5.0 => x.max(0.0),
        Unary::GeluErf => 0.5 * x * (1.0 + erf(x / 2f64.sqrt())),
        Unary::GeluTanh => {
            0.5 * x
                * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
        Unary::Silu => x / (1.0 + (-x).exp()),
        other => panic!("{other:?}"),
    }
}

fn norm(x: &Tensor, gain: &Tensor, bias: Option<&Tensor>, eps: f64) -> Tensor {
    let h = x.last() as f64;
    let mut data = Vec::new();
    for row in x.rows() {
        let mean = if bias.is_some() {
            row.iter().sum::<f64>() / h
        } else {
            0.0
        };
        let var = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / h;
        data.extend(row.iter().enumerate().map(|(i, v)| {
            (v - mean) / (var + eps).sqrt() * gain.data[i] + bias.map_or(0.0, |b| b.data[i])
        }));
    }
    Tensor {
        shape: x.shape.clone(),
        data,
    }
}

fn frequency(theta: f64, scaling: RopeScaling, i: usize, d: usize) -> f64 {
    let f = theta.powf(-2.0 * i as f64 / d as f64);
    match scaling {
        RopeScaling::None => f,
        RopeScaling::Linear { factor } => f / factor,
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position,
        } => {
            let (old, wavelength) = (original_max_position as f64, 2.0 * std::f64::consts::PI / f);
            if wavelength > old / low_freq_factor {
                f / factor
            } else if wavelength < old / high_freq_factor {
                f
            } else {
                let smooth =
                    (old / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                (1.0 - smooth) * f / factor + smooth * f
            }
        }
        other => panic!("{other:?}"),
    }
}

fn rotary(x: &Tensor, theta: f64, scaling: RopeScaling) -> Tensor {
    let d = x.last();
    let per_position: usize = x.shape[2..].iter().product();
    Tensor::new(&x.shape, |i| {
        let (position, c) = (i / per_position % x.shape[1], i % d);
        let angle = position as f64 * frequency(theta, scaling, c % (d / 2), d);
        let other = if c < d / 2 {
            -x.data[i + d / 2]
        } else {
            x.data[i - d / 2]
        };
        x.data[i] * angle.cos() + other * angle.sin()
    })
}

fn attention(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64) -> Tensor {
    let &[_, s, kv, d] = &k.shape[..] else {
        panic!()
    };
    let heads: usize = q.shape[2..q.shape.len() - 1].iter().product();
    let mut out = vec![0.0; q.data.len()];
    for (row, o) in out.chunks_mut(d).enumerate() {
        let (b, t, n) = (row / heads / s, row / heads % s, row % heads);
        let source = |u: usize| ((b * s + u) * kv + n / (heads / kv)) * d;
        let score = |u: usize| -> f64 {
            (0..d)
                .map(|c| q.data[row * d + c] * k.data[source(u) + c])
                .sum::<f64>()
                * scale
        };
        let weights: Vec<f64> = (0..=t).map(|u| score(u).exp()).collect();
        let total: f64 = weights.iter().sum();
        for (u, w) in weights.iter().enumerate() {
            (0..d).for_each(|c| o[c] += w / total * v.data[source(u) + c]);
        }
    }
    Tensor {
        shape: q.shape.clone(),
        data: out,
    }
}

fn run(g: &Graph, weights: &Weights, tokens: &Tensor, labels: &Tensor) -> f64 {
    let mut values: Vec<Option<Tensor>> = vec![None; g.values().len()];
    for op in g.ops() {
        let x: Vec<Tensor> = op
            .inputs
            .iter()
            .map(|v| values[v.index()].clone().unwrap())
            .collect();
        let x: Vec<&Tensor> = x.iter().collect();
        let shape = g
            .ty(op.outputs[0])
            .shape
            .bind(tokens.shape[0] as u64)
            .iter()
            .map(|&n| n as usize)
            .collect::<Vec<_>>();
        let y = match &op.kind {
            OpKind::Input {
                kind: InputKind::Tokens,
            } => tokens.clone(),
            OpKind::Input {
                kind: InputKind::Labels,
            } => labels.clone(),
            OpKind::State { .. } => {
                let data = weights.param(&op.path).unwrap();
                assert_eq!(data.len(), shape.iter().product::<usize>());
                Tensor {
                    shape,
                    data: data.into_iter().map(f64::from).collect(),
                }
            }
            OpKind::Unary { f } => Tensor::new(&shape, |i| unary(*f, x[0].data[i])),
            OpKind::Binary { f } => Tensor::new(&shape, |i| {
                let (a, b) = (x[0].data[i], x[1].data[i % x[1].data.len()]);
                if *f == Binary::Mul { a * b } else { a + b }
            }),
            OpKind::Slice {
                dim: 0, start: 0, ..
            } => Tensor::new(&shape, |i| x[0].data[i]),
            OpKind::Unstack { dim } => {
                let inner: usize = x[0].shape[dim + 1..].iter().product();
                let n = x[0].shape[*dim];
                for (which, v) in op.outputs.iter().enumerate().skip(1) {
                    let part = Tensor::new(&shape, |i| {
                        x[0].data[(i / inner * n + which) * inner + i % inner]
                    });
                    values[v.index()] = Some(part);
                }
                Tensor::new(&shape, |i| x[0].data[i / inner * n * inner + i % inner])
            }
            OpKind::DotGeneral { einsum: e } => einsum(e, x[0], x[1]),
            OpKind::Embedding => {
                let h = x[0].last();
                Tensor::new(&shape, |i| x[0].data[x[1].data[i / h] as usize * h + i % h])
            }
            OpKind::LayerNorm { eps } => norm(x[0], x[1], Some(x[2]), *eps),
            OpKind::RmsNorm { eps } => norm(x[0], x[1], None, *eps),
            OpKind::Rotary {
                theta,
                scaling,
                inverse: false,
                part: None,
                ..
            } => rotary(x[0], *theta, *scaling),
            OpKind::Attention { scale, .. } => attention(x[0], x[1], x[2], *scale),
            OpKind::LogSumExp => x[0].per_row(|row| row.iter().map(|v| v.exp()).sum::<f64>().ln()),
            OpKind::CrossEntropy => Tensor::new(&shape, |i| {
                x[1].data[i] - x[0].data[i * x[0].last() + x[2].data[i] as usize]
            }),
            OpKind::Reduce { .. } => Tensor {
                shape,
                data: vec![x[0].data.iter().sum()],
            },
            other => panic!("{} is not in a forward graph", other.name()),
        };
        values[op.outputs[0].index()] = Some(y);
    }
    values[g.outputs[0].index()].as_ref().unwrap().data[0]
}

fn loss(folder: &Path, config_file: &str, weights: &Path) -> f64 {
    let config = ModelConfig::load(&folder.join(config_file)).unwrap();
    let weights = Weights::open(weights, &config).unwrap();
    let g = model_graph(
        &config,
        &BuildOptions {
            sequence: 16,
            dropout: 0.0,
        },
    )
    .unwrap();
    let batches: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder.join("batches.json")).unwrap()).unwrap();
    let column = |from: usize| {
        let rows = batches["tokens"][0].as_array().unwrap();
        let ids = rows.iter().flat_map(|r| {
            r.as_array().unwrap()[from..from + 16]
                .iter()
                .map(|t| t.as_f64().unwrap())
        });
        Tensor {
            shape: vec![rows.len(), 16],
            data: ids.collect(),
        }
    };
    run(&g, &weights, &column(0), &column(1)) / 128.0
}

fn reference(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/reference")
        .join(case)
}

#[test]
fn first_losses_are_pytorchs() {
    for (case, configs) in [
        ("gpt2_small_tied", &["config.json"][..]),
        ("gpt2_untied_gelu", &["config.json"]),
        ("llama_tied", &["config.json", "config.v4.json"]),
        ("llama_untied_rope", &["config.json", "config.v4.json"]),
        ("llama_linear_rope", &["config.json", "config.v4.json"]),
    ] {
        let folder = reference(case);
        let expected: serde_json::Value =
            serde_json::from_slice(&std::fs::read(folder.join("reference.json")).unwrap()).unwrap();
        let expected = expected["f64_losses"][0].as_f64().unwrap();
        for config in configs {
            let found = loss(&folder, config, &folder);
            // Both sides are f64 of the same f32 weights; sums differ in order only.
            assert!(
                (found - expected).abs() < 1e-9,
                "{case}/{config}: {found}, PyTorch {expected}"
            );
        }
    }
}

#[test]
fn sharded_weights_give_the_same_loss() {
    let folder = reference("llama_tied");
    let whole = loss(&folder, "config.json", &folder.join("model.safetensors"));
    assert_eq!(whole, loss(&folder, "config.json", &folder.join("sharded")));
    assert_eq!(
        whole,
        loss(
            &folder,
            "config.json",
            &folder.join("sharded/model.safetensors.index.json")
        )
    );
}
