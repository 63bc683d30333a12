//! What is trained: defaults, then the file of `--train`, then flags.

use crate::args::{OptimizerArg, PrecisionArg, TrainArgs};
use crate::document;
use crate::failure::{Exit, Failure};
use crate::files;
use ir::{Optimizer, Precision, TrainSpec};
use serde::Deserialize;
use serde::de::{Deserializer, Error, Visitor};
use std::fmt;

/// The file: any subset of the keys.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct TrainFile {
    global_batch: Option<u64>,
    sequence: Option<u64>,
    precision: Option<Precision>,
    optimizer: Option<OptimizerFile>,
    clip_norm: Option<Clip>,
    dropout: Option<f64>,
    seed: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum OptimizerFile {
    AdamW(AdamWFile),
    Sgd(SgdFile),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct AdamWFile {
    beta1: Option<f64>,
    beta2: Option<f64>,
    eps: Option<f64>,
    weight_decay: Option<f64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SgdFile {
    momentum: Option<f64>,
    weight_decay: Option<f64>,
}

/// A norm, or `"none"`.
#[derive(Clone, Copy, Debug)]
struct Clip(Option<f64>);

impl<'de> Deserialize<'de> for Clip {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct ClipVisitor;
        impl Visitor<'_> for ClipVisitor {
            type Value = Clip;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a positive number or \"none\"")
            }
            fn visit_f64<E: Error>(self, x: f64) -> Result<Clip, E> {
                Ok(Clip(Some(x)))
            }
            fn visit_i64<E: Error>(self, x: i64) -> Result<Clip, E> {
                Ok(Clip(Some(x as f64)))
            }
            fn visit_u64<E: Error>(self, x: u64) -> Result<Clip, E> {
                Ok(Clip(Some(x as f64)))
            }
            fn visit_str<E: Error>(self, x: &str) -> Result<Clip, E> {
                if x == "none" {
                    Ok(Clip(None))
                } else {
                    Err(E::invalid_value(serde::de::Unexpected::Str(x), &self))
                }
            }
        }
        d.deserialize_any(ClipVisitor)
    }
}

/// The spec that `args` ask for; `max_sequence` bounds the default sequence.
pub fn train_spec(args: &TrainArgs, max_sequence: Option<u64>) -> Result<TrainSpec, Failure> {
    let default = TrainSpec::default();
    let mut spec = TrainSpec {
        sequence: max_sequence.map_or(default.sequence, |m| m.min(default.sequence)),
        ..default
    };
    if let Some(path) = &args.file {
        let name = path.display().to_string();
        let text = files::read_text(path, "training file", files::SMALL)?;
        apply_file(&mut spec, document::toml(&name, &text, "training file")?);
        if let Some(p) = spec.problems().first() {
            let failure = Failure::new(Exit::BadInput, format!("{name}: {p}"));
            let key = p.split(' ').next().unwrap_or_default();
            return Err(match document::find_key(&text, key) {
                Some((at, len)) => failure.place(&name, &text, at, len, "this key"),
                None => failure,
            });
        }
    }
    apply_flags(&mut spec, args)?;
    match spec.problems().first() {
        Some(p) => {
            let key = p.split(' ').next().unwrap_or_default().replace('_', "-");
            Err(Failure::new(Exit::Usage, p).help(format!("set --{key}")))
        }
        None => Ok(spec),
    }
}

fn apply_file(spec: &mut TrainSpec, f: TrainFile) {
    set(&mut spec.global_batch, f.global_batch);
    set(&mut spec.sequence, f.sequence);
    set(&mut spec.precision, f.precision);
    set(&mut spec.dropout, f.dropout);
    set(&mut spec.seed, f.seed);
    set(&mut spec.clip_norm, f.clip_norm.map(|c| c.0));
    match f.optimizer {
        Some(OptimizerFile::AdamW(a)) => {
            spec.optimizer = adamw(
                a.beta1,
                a.beta2,
                a.eps,
                a.weight_decay,
                Optimizer::default(),
            )
        }
        Some(OptimizerFile::Sgd(s)) => {
            spec.optimizer = Optimizer::Sgd {
                momentum: s.momentum.unwrap_or(0.0),
                weight_decay: s.weight_decay.unwrap_or(0.0),
            }
        }
        None => {}
    }
}

fn apply_flags(spec: &mut TrainSpec, a: &TrainArgs) -> Result<(), Failure> {
    set(&mut spec.global_batch, a.global_batch);
    set(&mut spec.sequence, a.sequence);
    set(&mut spec.dropout, a.dropout);
    set(&mut spec.seed, a.seed);
    let precision = |p| match p {
        PrecisionArg::F32 => Precision::F32,
        PrecisionArg::Bf16 => Precision::Bf16,
        PrecisionArg::F16 => Precision::F16,
    };
    set(&mut spec.precision, a.precision.map(precision));
    if let Some(text) = &a.clip_norm {
        spec.clip_norm = match text.as_str() {
            "none" => None,
            number => Some(number.parse().map_err(|_| {
                Failure::new(
                    Exit::Usage,
                    format!("--clip-norm is `{number}`, expected a number or none"),
                )
            })?),
        };
    }
    match a.optimizer {
        Some(OptimizerArg::Sgd) if !matches!(spec.optimizer, Optimizer::Sgd { .. }) => {
            spec.optimizer = Optimizer::Sgd {
                momentum: 0.0,
                weight_decay: 0.0,
            }
        }
        Some(OptimizerArg::Adamw) if !matches!(spec.optimizer, Optimizer::AdamW { .. }) => {
            spec.optimizer = Optimizer::default()
        }
        _ => {}
    }
    let unused = |flag: &str, with: &str| {
        Err(
            Failure::new(Exit::Usage, format!("--{flag} has no meaning with {with}"))
                .help("see --optimizer"),
        )
    };
    match &mut spec.optimizer {
        Optimizer::AdamW { .. } if a.momentum.is_some() => return unused("momentum", "AdamW"),
        Optimizer::Sgd { .. } if a.beta1.is_some() => return unused("beta1", "SGD"),
        Optimizer::Sgd { .. } if a.beta2.is_some() => return unused("beta2", "SGD"),
        Optimizer::Sgd { .. } if a.eps.is_some() => return unused("eps", "SGD"),
        Optimizer::Sgd {
            momentum,
            weight_decay,
        } => {
            set(momentum, a.momentum);
            set(weight_decay, a.weight_decay);
        }
        optimizer => *optimizer = adamw(a.beta1, a.beta2, a.eps, a.weight_decay, *optimizer),
    }
    Ok(())
}

fn adamw(
    b1: Option<f64>,
    b2: Option<f64>,
    e: Option<f64>,
    decay: Option<f64>,
    mut base: Optimizer,
) -> Optimizer {
    if let Optimizer::AdamW {
        beta1,
        beta2,
        eps,
        weight_decay,
    } = &mut base
    {
        set(beta1, b1);
        set(beta2, b2);
        set(eps, e);
        set(weight_decay, decay);
    }
    base
}

fn set<T>(place: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *place = value;
    }
}
