//! The training spec: defaults, then the file of `--train`, then flags.

use crate::args::{OptimizerArg, PrecisionArg, TrainArgs};
use crate::document;
use crate::failure::{Exit, Failure};
use crate::files;
use ir::{Optimizer, Precision, Task, TrainFile, TrainSpec};

/// Builds the spec that `args` ask for; `max_sequence` bounds the default sequence.
pub fn train_spec(args: &TrainArgs, max_sequence: Option<u64>) -> Result<TrainSpec, Failure> {
    let default = TrainSpec::default();
    let mut spec = TrainSpec {
        sequence: max_sequence.map_or(default.sequence, |m| m.min(default.sequence)),
        ..default
    };
    if let Some(path) = &args.file {
        let name = path.display().to_string();
        let text = files::read_text(path, "training file", files::SMALL)?;
        let file: TrainFile = document::toml(&name, &text, "training file")?;
        file.apply(&mut spec);
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

/// Refuses flags of the backward pass and the optimizer where neither is there.
fn check_task(task: Task, a: &TrainArgs) -> Result<(), Failure> {
    let given = [
        ("optimizer", a.optimizer.is_some()),
        ("beta1", a.beta1.is_some()),
        ("beta2", a.beta2.is_some()),
        ("eps", a.eps.is_some()),
        ("momentum", a.momentum.is_some()),
        ("weight-decay", a.weight_decay.is_some()),
        ("clip-norm", a.clip_norm.is_some()),
    ];
    match given.into_iter().find(|(_, is_given)| *is_given) {
        Some((flag, _)) if !task.is_training() => {
            let what = format!("--{flag} has no meaning in inference, which updates nothing");
            Err(Failure::new(Exit::Usage, what).help("leave it out, or plan for training"))
        }
        _ => Ok(()),
    }
}

fn apply_flags(spec: &mut TrainSpec, a: &TrainArgs) -> Result<(), Failure> {
    if a.inference {
        spec.task = Task::Inference;
    }
    check_task(spec.task, a)?;
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
        optimizer => *optimizer = optimizer.with_adamw(a.beta1, a.beta2, a.eps, a.weight_decay),
    }
    Ok(())
}

fn set<T>(place: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *place = value;
    }
}
