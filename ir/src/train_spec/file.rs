//! The training file: any subset of a [`TrainSpec`]'s keys, as users write it (TOML).
//!
//! Reading and applying are apart, so that what the file says and what it means for a spec can
//! each be tested; ranges are judged by [`TrainSpec::problems`] afterwards, when flags have
//! had their say too.

use super::{Optimizer, Precision, Task, TrainSpec};
use serde::Deserialize;
use serde::de::{Deserializer, Error, Visitor};
use std::fmt;

/// A training file; keys that are not there leave the spec as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainFile {
    task: Option<Task>,
    global_batch: Option<u64>,
    sequence: Option<u64>,
    precision: Option<Precision>,
    optimizer: Option<OptimizerFile>,
    clip_norm: Option<Clip>,
    dropout: Option<f64>,
    seed: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum OptimizerFile {
    AdamW(AdamWFile),
    Sgd(SgdFile),
}

#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct AdamWFile {
    beta1: Option<f64>,
    beta2: Option<f64>,
    eps: Option<f64>,
    weight_decay: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct SgdFile {
    momentum: Option<f64>,
    weight_decay: Option<f64>,
}

/// A norm, or `"none"`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Clip(Option<f64>);

impl TrainFile {
    /// Changes what the file speaks of. An optimizer is named as a whole: keys that its table
    /// leaves out have their defaults, not the spec's values.
    pub fn apply(self, spec: &mut TrainSpec) {
        set(&mut spec.task, self.task);
        set(&mut spec.global_batch, self.global_batch);
        set(&mut spec.sequence, self.sequence);
        set(&mut spec.precision, self.precision);
        set(&mut spec.dropout, self.dropout);
        set(&mut spec.seed, self.seed);
        set(&mut spec.clip_norm, self.clip_norm.map(|c| c.0));
        match self.optimizer {
            Some(OptimizerFile::AdamW(a)) => {
                spec.optimizer =
                    Optimizer::default().with_adamw(a.beta1, a.beta2, a.eps, a.weight_decay)
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
}

impl Optimizer {
    /// With other figures where some are given; what is not AdamW stays as it is.
    pub fn with_adamw(
        mut self,
        b1: Option<f64>,
        b2: Option<f64>,
        e: Option<f64>,
        decay: Option<f64>,
    ) -> Self {
        if let Optimizer::AdamW {
            beta1,
            beta2,
            eps,
            weight_decay,
        } = &mut self
        {
            set(beta1, b1);
            set(beta2, b2);
            set(eps, e);
            set(weight_decay, decay);
        }
        self
    }
}

fn set<T>(place: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *place = value;
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    fn applied(json: &str) -> TrainSpec {
        let file: TrainFile = serde_json::from_str(json).unwrap();
        let mut spec = TrainSpec {
            optimizer: Optimizer::Sgd {
                momentum: 0.5,
                weight_decay: 0.25,
            },
            ..TrainSpec::default()
        };
        file.apply(&mut spec);
        spec
    }

    #[test]
    fn a_file_changes_what_it_speaks_of() {
        let spec = applied(r#"{ "global_batch": 3, "clip_norm": "none", "precision": "bf16" }"#);
        assert_eq!(
            (spec.global_batch, spec.clip_norm, spec.precision),
            (3, None, Precision::Bf16)
        );
        assert!(matches!(spec.optimizer, Optimizer::Sgd { momentum, .. } if momentum == 0.5));
        let spec = applied(r#"{ "clip_norm": 2, "optimizer": { "adam_w": { "beta1": 0.5 } } }"#);
        assert_eq!(spec.clip_norm, Some(2.0));
        let expected = Optimizer::default().with_adamw(Some(0.5), None, None, None);
        assert_eq!(spec.optimizer, expected);
        let spec = applied(r#"{ "optimizer": { "sgd": {} } }"#);
        assert!(matches!(spec.optimizer, Optimizer::Sgd { momentum, .. } if momentum == 0.0));
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        for (json, said) in [
            (r#"{ "clip_norm": "some" }"#, "a positive number or"),
            (r#"{ "batch": 3 }"#, "unknown field `batch`"),
            (r#"{ "global_batch": -3 }"#, "-3"),
            (r#"{ "optimizer": { "adamw": {} } }"#, "adam_w"),
        ] {
            let error = serde_json::from_str::<TrainFile>(json).unwrap_err();
            assert!(error.to_string().contains(said), "{error}");
        }
    }
}
