//! Whether pins fit the model and the cluster they are for. Parsing knows neither, so this comes
//! first in a search: what no plan can meet is refused with what would fit, before ops are left
//! without a strategy for reasons that nobody could read out of the answer.

use super::{ContextAttention, Pins};
use crate::PlanError;
use ir::cluster::Cluster;
use ir::plan::ScheduleKind;
use ir::training::TrainingGraph;
use ir::{Graph, OpKind, TrainSpec, ValueId, counted};

/// Refuses tensor pins of tensors, dims or axes that are not there, experts that do not divide,
/// data or context axes without a sample, token or head for each rank, and virtual stages of no
/// pipeline, of too few layers or of a schedule without. The [`degrees`] fit.
pub(crate) fn check(
    pins: &Pins,
    training: &TrainingGraph,
    cluster: &Cluster,
    train: &TrainSpec,
) -> Result<(), PlanError> {
    tensor_pins(pins, training)?;
    crate::offload::check(pins, cluster)?;
    experts(pins, training, cluster.n_devices().into())?;
    replicas(pins, cluster.n_devices().into())?;
    virtual_stages(pins, training.graph.layers.len())?;
    samples(pins, train.global_batch)?;
    tokens(pins, train.sequence)?;
    heads(pins, &training.graph)
}

/// Whether pinned virtual stages make a pipeline of the model's layers.
fn virtual_stages(pins: &Pins, n_layers: usize) -> Result<(), PlanError> {
    let err = |problem: String| Err(PlanError::Pins(problem));
    let own = pins.schedule.unwrap_or_default();
    if own.virtual_stages() > 1 {
        return stages_of_schedule(pins, own, n_layers);
    }
    let Some(v) = pins.virtual_stages.filter(|&v| v > 1) else {
        return match (&pins.split, pins.pipeline) {
            (Some(counts), Some(p)) if counts.len() as u64 != u64::from(p) => err(format!(
                "pinned split has {}, pipeline={p} has {p}; give as many numbers",
                counted(counts.len() as u64, "stage")
            )),
            _ => Ok(()),
        };
    };
    let has_interleaved = |s: &ScheduleKind| s.schedule().interleaved(v).is_some();
    if !has_interleaved(&pins.schedule.unwrap_or_default()) {
        let able = ScheduleKind::NAMED.iter().filter(|s| has_interleaved(s));
        let names: Vec<&str> = able.map(|s| s.name()).collect();
        return err(format!(
            "pinned virtual={v} interleaves the passes of {}; pin that schedule with it, or none",
            names.join(" or ")
        ));
    }
    let Some(p) = pins.pipeline.filter(|&p| p > 1) else {
        return err(format!(
            "pinned virtual={v} puts {v} stages on each of several meshes; pin how many, pipeline=2 or more"
        ));
    };
    let n_stages = u64::from(v) * u64::from(p);
    if n_stages > n_layers as u64 {
        return err(format!(
            "pinned virtual={v} x pipeline={p} makes {n_stages} stages, the model has {}; pin virtual={} or less",
            counted(n_layers as u64, "layer"),
            (n_layers as u64 / u64::from(p)).max(1)
        ));
    }
    match &pins.split {
        Some(counts) if counts.len() as u64 != n_stages => err(format!(
            "pinned split has {}, virtual={v} x pipeline={p} makes {n_stages}",
            counted(counts.len() as u64, "stage")
        )),
        _ => Ok(()),
    }
}

/// Whether a schedule that has several stages on every mesh by itself has enough layers.
fn stages_of_schedule(
    pins: &Pins,
    schedule: ScheduleKind,
    n_layers: usize,
) -> Result<(), PlanError> {
    let err = |problem: String| Err(PlanError::Pins(problem));
    let (name, v) = (schedule.name(), schedule.virtual_stages());
    if let Some(pinned) = pins.virtual_stages.filter(|&n| n != v) {
        return err(format!(
            "pinned schedule={name} has {v} stages on every mesh, not virtual={pinned}; leave out one of the two pins"
        ));
    }
    let n_stages = u64::from(v) * u64::from(pins.pipeline.unwrap_or(1));
    if n_stages > n_layers as u64 {
        let most = n_layers as u64 / u64::from(v);
        let way = match most {
            0 => "pin another schedule".to_string(),
            most => format!("pin pipeline={most} or less"),
        };
        return err(format!(
            "pinned schedule={name} with {} makes {n_stages} stages, the model has {}; {way}",
            counted(pins.pipeline.unwrap_or(1), "mesh"),
            counted(n_layers as u64, "layer"),
        ));
    }
    let (split, meshes) = (pins.split.as_ref().map(Vec::len), pins.pipeline);
    match split {
        Some(n) if meshes.is_some() && n as u64 != n_stages => err(format!(
            "pinned split has {}, schedule={name} x pipeline={} makes {n_stages}",
            counted(n as u64, "stage"),
            n_stages / u64::from(v)
        )),
        Some(n) if n % v as usize != 0 => err(format!(
            "pinned split has {}, schedule={name} wants a multiple of {v}",
            counted(n as u64, "stage")
        )),
        _ => Ok(()),
    }
}

/// Whether the largest microbatch has a sample for every rank of the data axis.
fn samples(pins: &Pins, global_batch: u64) -> Result<(), PlanError> {
    let n = pins.microbatch.unwrap_or(global_batch);
    match pins.data.map(u64::from).filter(|d| *d > n) {
        None => Ok(()),
        Some(data) => Err(PlanError::Pins(format!(
            "pinned data={data} splits the samples of a microbatch, of which there are {n} at most ({}); pin data={n} or less, or {}",
            match pins.microbatch {
                Some(n) => format!("pinned microbatch={n}"),
                None => format!("the global batch is {global_batch}"),
            },
            match pins.microbatch {
                Some(_) => "a larger microbatch",
                None => "train with a larger --global-batch",
            },
        ))),
    }
}

/// Whether the experts can be split by as many of the ranks that split samples.
fn experts(pins: &Pins, training: &TrainingGraph, devices: u64) -> Result<(), PlanError> {
    let Some(expert) = pins.expert.map(u64::from) else {
        return Ok(());
    };
    let counts = training.graph.ops().iter().filter_map(|op| match op.kind {
        OpKind::Dispatch { experts, .. } => Some(experts),
        _ => None,
    });
    let fewest = counts.min().unwrap_or(1);
    if expert > fewest {
        return Err(PlanError::Pins(match fewest {
            1 => format!("pinned expert={expert} splits experts, of which the model has none"),
            n => format!("pinned expert={expert} splits {n} experts; pin expert={n} or less"),
        }));
    }
    let (of, what) = ranks_of_samples(pins, devices);
    if of.is_multiple_of(expert) {
        return Ok(());
    }
    let fits: Vec<u64> = divisors(of).into_iter().filter(|d| *d <= fewest).collect();
    Err(PlanError::Pins(format!(
        "pinned expert={expert} is a part of the ranks that split samples and does not divide {what}; what fits: expert={}",
        listed(&fits)
    )))
}

/// Whether the copies of states divide the ranks that split samples, beside those that split experts.
fn replicas(pins: &Pins, devices: u64) -> Result<(), PlanError> {
    let Some(replicas) = pins.replicas.map(u64::from) else {
        return Ok(());
    };
    let (of, what) = ranks_of_samples(pins, devices);
    let expert = u64::from(pins.expert.unwrap_or(1).max(1));
    if of.is_multiple_of(expert.saturating_mul(replicas)) {
        return Ok(());
    }
    let beside = match expert {
        1 => String::new(),
        n => format!(", with expert={n} beside it"),
    };
    let fits: Vec<u64> = divisors(of / expert);
    Err(PlanError::Pins(format!(
        "pinned replicas={replicas} is a part of the ranks that split samples and does not divide {what}{beside}; what fits: replicas={}",
        listed(&fits)
    )))
}

/// The number of ranks that split samples under the pinned degrees, and in words which they are.
fn ranks_of_samples(pins: &Pins, devices: u64) -> (u64, String) {
    let others = [pins.tensor, pins.context, pins.pipeline];
    let others: u64 = others.into_iter().flatten().map(u64::from).product();
    let of = pins.data.map_or(devices / others.max(1), u64::from);
    let words = match pins.data {
        Some(data) => format!("the {data} ranks of the pinned data={data}"),
        None => format!("the {of} ranks that the other pins leave of {devices} devices"),
    };
    (of, words)
}

/// Whether a sequence has a token for every rank of the context axis.
fn tokens(pins: &Pins, sequence: u64) -> Result<(), PlanError> {
    match pins.context.map(u64::from).filter(|c| *c > sequence) {
        None => Ok(()),
        Some(context) => Err(PlanError::Pins(format!(
            "pinned context={context} splits a sequence of {}; pin context={sequence} or less, or train with a longer --sequence",
            counted(sequence, "token")
        ))),
    }
}

/// Whether a pinned way of attention has context ranks to be about, and each of them a head where
/// heads are what it splits: one of keys and values with its queries or, of fewer such heads than
/// ranks, one of the queries that share them.
fn heads(pins: &Pins, graph: &Graph) -> Result<(), PlanError> {
    let Some(way) = pins.context_attention else {
        return Ok(());
    };
    let err = |problem: String| Err(PlanError::Pins(problem));
    let Some(context) = pins.context.map(u64::from) else {
        return err(format!(
            "pinned context_attention={} is about the ranks of a context axis; pin context=N too",
            way.name()
        ));
    };
    if way != ContextAttention::Ulysses {
        return Ok(());
    }
    let counts = graph.ops().iter().filter_map(|op| match op.kind {
        OpKind::Attention { .. } => {
            let q = &graph.ty(op.inputs[0]).shape.0;
            let heads = &q[2..q.len() - 1];
            Some(heads.iter().map(|h| h.bind(1)).collect::<Vec<u64>>())
        }
        _ => None,
    });
    let most = |heads: &Vec<u64>| heads.iter().copied().max().unwrap_or(1);
    let Some(heads) = counts.min_by_key(most) else {
        return err("pinned context_attention=ulysses splits the heads of attention, and the model has no attention; leave it out".into());
    };
    let (each, all) = (most(&heads), heads.iter().product::<u64>());
    let what = match heads[..] {
        [kv, groups] => format!(
            "{} of keys and values, each for {} of queries,",
            counted(kv, "head"),
            counted(groups, "head")
        ),
        _ => counted(all, "head"),
    };
    if context > each {
        return err(format!(
            "pinned context_attention=ulysses splits {what} over the context={context} ranks; pin context={each} or less, or context_attention=gather"
        ));
    }
    let tensor = pins.tensor.map_or(1, u64::from);
    if context.saturating_mul(tensor) > all {
        return err(format!(
            "pinned context_attention=ulysses splits {what} over the ranks of context={context} x tensor={tensor}, some of which would have none; pin degrees whose product is {all} or less, or context_attention=gather"
        ));
    }
    Ok(())
}

/// Whether every tensor pin speaks of a tensor there is, as many dims as it has, and axes that
/// meshes have.
fn tensor_pins(pins: &Pins, training: &TrainingGraph) -> Result<(), PlanError> {
    let names: Vec<String> = (0..training.graph.values().len())
        .map(|v| training.graph.value_name(ValueId::new(v)))
        .collect();
    let err = |problem: String| Err(PlanError::Pins(problem));
    let axes = pins.axis_names();
    for pin in &pins.tensors {
        let shown = pin.describe();
        let Some(first) = names.iter().position(|n| pin.matches(n)) else {
            return err(format!(
                "pin {shown}: no tensor of the model is called `{}`; `inspect --layers` on a plan of it lists their names, `*` stands for any characters",
                pin.value
            ));
        };
        let rank = |v: usize| training.graph.ty(ValueId::new(v)).shape.0.len();
        let fits = |v: usize| pin.matches(&names[v]) && rank(v) == pin.dims.len();
        if !(0..names.len()).any(fits) {
            return err(format!(
                "pin {shown} has {}, `{}` has {}; write one entry for each, `_` for a dim that stays whole",
                counted(pin.dims.len() as u64, "dim"),
                names[first],
                rank(first)
            ));
        }
        let mut seen = Vec::new();
        for axis in pin.dims.iter().flatten() {
            if !axes.contains(&axis.as_str()) {
                let other = match pins.fixes_mesh() {
                    true if axis == "expert" => "a pin expert=N adds it",
                    true if axis == "replica" => "a pin replicas=N adds it",
                    true if pins.context.is_none() && axis == "context" => {
                        "a pin context=N adds it"
                    }
                    true => "x and y are there only without the pins data=, context= and tensor=",
                    false => "with a pin data=N or tensor=N they would be data and tensor",
                };
                return err(format!(
                    "pin {shown}: the mesh has no axis `{axis}`; its axes are {} ({other})",
                    axes.join(" and ")
                ));
            }
            if seen.contains(&axis) {
                return err(format!(
                    "pin {shown} splits by the axis `{axis}` twice; a tensor can be split by it once"
                ));
            }
            seen.push(axis);
        }
    }
    Ok(())
}

/// Whether the pinned degrees together can make the cluster's devices; if not, says which
/// values of each would, with the others as they are. Comes before the model is rewritten for
/// the pins, which takes as much room as they have ranks.
pub(crate) fn degrees(n: u64, pins: &Pins) -> Result<(), PlanError> {
    let all = [
        ("data", pins.data),
        ("context", pins.context),
        ("tensor", pins.tensor),
        ("pipeline", pins.pipeline),
    ];
    let pinned: Vec<(&str, u64)> = all
        .into_iter()
        .filter_map(|(name, d)| Some((name, u64::from(d?))))
        .collect();
    let product = |of: &[(&str, u64)]| of.iter().fold(1u64, |p, (_, d)| p.saturating_mul(*d));
    // Where these three are fixed nothing is left to make up for what is missing.
    let is_whole = pins.data.is_some() && pins.tensor.is_some() && pins.pipeline.is_some();
    let fits = |p: u64| match is_whole {
        true => p == n,
        false => n.is_multiple_of(p),
    };
    let made = product(&pinned);
    if fits(made) {
        return Ok(());
    }
    let words: Vec<String> = pinned.iter().map(|(k, d)| format!("{k}={d}")).collect();
    let would_fit = (0..pinned.len()).filter_map(|i| {
        let mut others = pinned.clone();
        let (name, _) = others.remove(i);
        let rest = product(&others);
        let values: Vec<u64> = (1..=n)
            .filter(|v| n.is_multiple_of(*v) && fits(rest.saturating_mul(*v)))
            .collect();
        (!values.is_empty()).then(|| format!("{name}={}", listed(&values)))
    });
    let would_fit: Vec<String> = would_fit.collect();
    let relation = match is_whole {
        true => "is not",
        false => "does not divide",
    };
    let single = pinned.len() == 1;
    let what = match single {
        true => format!("pinned {}", words.join("")),
        false => format!("pinned {}, together {made} devices,", words.join(" x ")),
    };
    let way = match would_fit.is_empty() {
        true if is_whole => format!("pin degrees whose product is {n}"),
        true => format!(
            "degrees that fit have a product out of {}",
            listed(&divisors(n))
        ),
        false if single => format!("what fits: {}", would_fit.join("")),
        false => format!("what fits beside the other pins: {}", would_fit.join("; ")),
    };
    Err(PlanError::Pins(format!(
        "{what} {relation} the {n} devices of the cluster; {way}"
    )))
}

fn divisors(n: u64) -> Vec<u64> {
    (1..=n).filter(|d| n.is_multiple_of(*d)).collect()
}

/// Numbers in words: `1, 2 or 4`; of many the first and the last.
pub(crate) fn listed(numbers: &[u64]) -> String {
    const SHOWN: usize = 8;
    match numbers {
        [] => "none".into(),
        [one] => one.to_string(),
        [most @ .., last] => {
            let mut words: Vec<String> = most.iter().take(SHOWN).map(u64::to_string).collect();
            if most.len() > SHOWN {
                words.push("...".into());
            }
            format!("{} or {last}", words.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(n: u64, pins: &[&str]) -> String {
        let pins = Pins::parse(pins).unwrap();
        degrees(n, &pins).map_or_else(|e| e.to_string(), |()| "fits".into())
    }

    #[test]
    fn degrees_that_do_not_fit_are_told_what_does() {
        assert_eq!(refusal(8, &["data=2", "tensor=2"]), "fits");
        assert_eq!(refusal(8, &["data=2,tensor=2,pipeline=2"]), "fits");
        assert_eq!(refusal(6, &[]), "fits");
        assert_eq!(
            refusal(4, &["data=3"]),
            "pinned data=3 does not divide the 4 devices of the cluster; what fits: data=1, 2 or 4"
        );
        assert_eq!(
            refusal(4, &["data=3,tensor=2"]),
            "pinned data=3 x tensor=2, together 6 devices, does not divide the 4 devices of the cluster; what fits beside the other pins: data=1 or 2"
        );
        assert_eq!(
            refusal(8, &["data=2,tensor=2,pipeline=1"]),
            "pinned data=2 x tensor=2 x pipeline=1, together 4 devices, is not the 8 devices of the cluster; what fits beside the other pins: data=4; tensor=4; pipeline=2"
        );
        assert_eq!(
            refusal(4, &["data=3,tensor=5"]),
            "pinned data=3 x tensor=5, together 15 devices, does not divide the 4 devices of the cluster; degrees that fit have a product out of 1, 2 or 4"
        );
        let huge = refusal(
            4,
            &["data=4294967295,tensor=4294967295,pipeline=4294967295"],
        );
        assert!(
            huge.ends_with("is not the 4 devices of the cluster; pin degrees whose product is 4"),
            "{huge}"
        );
    }

    #[test]
    fn a_v_needs_two_layers_for_each_mesh() {
        let check = |pins: &[&str]| {
            let pins = Pins::parse(pins).expect("pins");
            virtual_stages(&pins, 10).map_err(|e| e.to_string())
        };
        for fits in ["pipeline=5", "pipeline=1", "virtual=2", "split=3/3/2/2"] {
            assert_eq!(check(&["schedule=zb_v", fits]), Ok(()), "{fits}");
        }
        for (pins, said) in [
            (
                "pipeline=6",
                "pinned schedule=zb_v with 6 meshes makes 12 stages, the model has 10 layers; pin pipeline=5 or less",
            ),
            (
                "virtual=3",
                "pinned schedule=zb_v has 2 stages on every mesh, not virtual=3; leave out one of the two pins",
            ),
            (
                "pipeline=2,split=5/5",
                "pinned split has 2 stages, schedule=zb_v x pipeline=2 makes 4",
            ),
            (
                "split=4/3/3",
                "pinned split has 3 stages, schedule=zb_v wants a multiple of 2",
            ),
        ] {
            let found = check(&["schedule=zb_v", pins]).expect_err("a refusal");
            assert!(found.contains(said), "{found}");
        }
    }

    #[test]
    fn virtual_stages_need_a_pipeline_with_layers() {
        let refusal = |pins: &[&str]| {
            let pins = Pins::parse(pins).unwrap();
            virtual_stages(&pins, 10).map_err(|e| e.to_string())
        };
        assert_eq!(refusal(&["virtual=1"]), Ok(()));
        assert_eq!(refusal(&["virtual=2,pipeline=5"]), Ok(()));
        assert_eq!(refusal(&["virtual=2,pipeline=2,split=1/2/3/4"]), Ok(()));
        for (pins, expected) in [
            (
                &["virtual=2"][..],
                "pinned virtual=2 puts 2 stages on each of several meshes; pin how many, pipeline=2 or more",
            ),
            (
                &["virtual=2,pipeline=1"],
                "pinned virtual=2 puts 2 stages on each of several meshes; pin how many, pipeline=2 or more",
            ),
            (
                &["virtual=3,pipeline=4"],
                "pinned virtual=3 x pipeline=4 makes 12 stages, the model has 10 layers; pin virtual=2 or less",
            ),
            (
                &["virtual=2,pipeline=2,schedule=gpipe"],
                "pinned virtual=2 interleaves the passes of 1f1b; pin that schedule with it, or none",
            ),
            (
                &["virtual=2,pipeline=2,split=5/5"],
                "pinned split has 2 stages, virtual=2 x pipeline=2 makes 4",
            ),
        ] {
            assert_eq!(refusal(pins), Err(expected.to_string()));
        }
    }

    #[test]
    fn a_data_axis_needs_samples() {
        let refusal =
            |pins: &[&str]| samples(&Pins::parse(pins).unwrap(), 8).map_err(|e| e.to_string());
        assert_eq!(refusal(&["data=8"]), Ok(()));
        assert_eq!(refusal(&["data=4", "microbatch=4"]), Ok(()));
        assert!(
            refusal(&["data=16"])
                .unwrap_err()
                .contains("the global batch is 8); pin data=8 or less")
        );
        assert!(
            refusal(&["data=4", "microbatch=2"])
                .unwrap_err()
                .contains("pinned microbatch=2); pin data=2")
        );
    }

    #[test]
    fn long_lists_are_cut() {
        assert_eq!(
            listed(&(1..=20).collect::<Vec<_>>()),
            "1, 2, 3, 4, 5, 6, 7, 8, ... or 20"
        );
    }
}
