//! The pins of plans for inference: those that speak of the backward pass or of the optimizer are
//! refused, and what the search would try of these is fixed, as there is nothing to choose.

use super::{Offload, Pins};
use crate::PlanError;
use ir::offload::TensorClass;
use ir::plan::ScheduleKind;
use ir::training::Recompute;

/// The pins that the search goes by where inference is asked for with `asked`.
pub(crate) fn pins(asked: &Pins) -> Result<Pins, PlanError> {
    if let Some((pin, why)) = refused(asked) {
        return Err(PlanError::Pins(format!(
            "pinned {pin} makes no sense for inference: {why}; leave it out"
        )));
    }
    Ok(Pins {
        schedule: Some(ScheduleKind::Forward),
        recompute: Some(Recompute::None),
        ..asked.clone()
    })
}

/// The first pin that means nothing, and the reason.
fn refused(pins: &Pins) -> Option<(String, &'static str)> {
    let schedule = pins.schedule.map(|s| {
        let why = "there are forward passes alone, and their order is that of the microbatches";
        (format!("schedule={}", s.name()), why)
    });
    let interleaved = pins.virtual_stages.filter(|&v| v > 1).map(|v| {
        let why = "interleaved stages have a schedule of training alone";
        (format!("virtual={v}"), why)
    });
    let recompute = pins.recompute.map(|r| format!("recompute={}", r.name()));
    let recompute = recompute.or_else(|| {
        let pin = pins.recompute_ops.first()?;
        Some(format!("recompute:{}", pin.op))
    });
    let recompute = recompute.map(|pin| {
        let why = "no activation is kept for a backward pass, so there is none to recompute";
        (pin, why)
    });
    let zero = pins.zero.filter(|z| matches!(z, 1 | 2)).map(|z| {
        let why =
            "there are neither optimizer states nor gradients to split (zero=3 splits parameters)";
        (format!("zero={z}"), why)
    });
    schedule
        .or(interleaved)
        .or(recompute)
        .or(zero)
        .or_else(|| offload(pins))
}

/// The pin that lets a class of tensors rest elsewhere which inference does not have.
fn offload(pins: &Pins) -> Option<(String, &'static str)> {
    let Some(Offload::Spaces(spaces)) = &pins.offload else {
        return None;
    };
    let mut classes = spaces.keys();
    let absent = classes.find(|c| **c != TensorClass::Parameters)?;
    let why = "of the tensors that may rest elsewhere there are parameters alone";
    Some((format!("offload={}", absent.name()), why))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(pin: &str) -> String {
        let asked = Pins::parse(&[pin]).expect("it can be read");
        match pins(&asked) {
            Ok(_) => "goes".into(),
            Err(e) => e.to_string(),
        }
    }

    #[test]
    fn what_speaks_of_gradients_is_refused_by_name() {
        for pin in [
            "schedule=1f1b",
            "schedule=zb_h1",
            "virtual=2",
            "recompute=full",
            "recompute=none",
            "recompute:h.*.mlp.act=yes",
            "zero=1",
            "zero=2",
            "offload=optimizer",
            "offload=parameters+activations",
        ] {
            let name = pin.split('=').next().unwrap_or_default();
            let words = said(pin);
            assert!(
                words.starts_with(&format!("pinned {name}")) && words.ends_with("; leave it out"),
                "{pin}: {words}"
            );
        }
    }

    #[test]
    fn what_speaks_of_parameters_and_samples_goes() {
        for pin in [
            "data=2",
            "tensor=2",
            "context=2",
            "pipeline=2",
            "split=1/2",
            "virtual=1",
            "zero=0",
            "zero=3",
            "microbatch=4",
            "offload=parameters",
            "offload=search",
            "spec:wte=[_,tensor]",
        ] {
            assert_eq!(said(pin), "goes", "{pin}");
        }
    }
}
