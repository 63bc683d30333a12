//! The degrees of a plan: how many ranks split samples, features, sequence and experts, how many
//! meshes stand in a row, and what is recomputed. They are read off the strategies, in the words of
//! pins, so that plans can be told apart and asked for.

use super::account::kinds;
use super::parallelism::AxisReport;
use super::plan::{RunReport, StageReport, stages};
use ir::LayerId;
use ir::plan::Plan;
use ir::training::TrainingGraph;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;

/// The degrees of a plan. Where stages differ, the least and the most.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Degrees {
    /// Ranks that split samples, experts' among them.
    pub data: Span,
    /// Ranks among these that split experts.
    pub expert: Span,
    /// Ranks that split the sequence in attention.
    pub context: Span,
    /// Ranks that split features.
    pub tensor: Span,
    /// Ranks that split samples in some ops and features in others, and so are counted as both.
    #[serde(skip)]
    pub both: Span,
    /// Ranks that all do the same work, which no pin asks for.
    pub repeated: Span,
    /// Meshes in a row.
    pub pipeline: u32,
    /// Stages on each mesh.
    pub r#virtual: u32,
    /// The ZeRO level of most parameters, over the ranks that split samples, or of these over the
    /// axis that splits states most.
    pub zero: Span,
    /// Copies of what that level splits, over the other axes that split samples (HSDP).
    pub replicas: Span,
    /// The recomputation: `none`, `full`, `selective`, or `in part`, where layers differ.
    pub recompute: &'static str,
    /// Samples that a mesh works on at a time.
    pub microbatch: u64,
}

/// Recomputation where layers differ.
const PARTS: &str = "in part";

/// The least and the most of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Span(pub u32, pub u32);

impl Span {
    fn of(numbers: impl Iterator<Item = u32>) -> Span {
        let all = numbers.fold(None, |all, n| match all {
            None => Some(Span(n, n)),
            Some(Span(least, most)) => Some(Span(n.min(least), n.max(most))),
        });
        all.unwrap_or(Span(1, 1))
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Span(least, most) if least == most => write!(f, "{least}"),
            Span(least, most) => write!(f, "{least} to {most}"),
        }
    }
}

impl Degrees {
    /// Reads the degrees off a plan.
    pub fn of(plan: &Plan, training: &TrainingGraph) -> Degrees {
        let stages = stages(plan, training);
        let typical = typical(plan, training, &stages);
        let along = |what: &'static str| Span::of(typical.iter().map(|run| ranks(run, what)));
        let states = typical.iter().map(|run| states(run));
        let (zero, replicas): (Vec<u32>, Vec<u32>) = states.unzip();
        Degrees {
            data: along("data parallel"),
            expert: along("expert parallel"),
            context: along("context parallel"),
            tensor: along("tensor parallel"),
            both: Span::of(typical.iter().map(|run| both(run))),
            repeated: Span::of(typical.iter().map(|run| repeated(run))),
            pipeline: plan.n_meshes() as u32,
            r#virtual: plan.schedule.virtual_stages(),
            zero: Span::of(zero.into_iter()),
            replicas: Span::of(replicas.into_iter()),
            recompute: recompute(&typical),
            microbatch: plan.microbatch,
        }
    }

    /// The header of a table of degrees.
    pub const HEADER: [&'static str; 9] = [
        "data",
        "tensor",
        "context",
        "expert",
        "pipeline",
        "virtual",
        "ZeRO",
        "recompute",
        "microbatch",
    ];

    /// The cells of a row under [`Degrees::HEADER`]. `7(x3)` are seven ranks that split samples,
    /// three times over.
    pub fn cells(&self) -> Vec<String> {
        vec![
            match self.repeated {
                Span(1, 1) => self.data.to_string(),
                n => format!("{}(x{n})", self.data),
            },
            self.tensor.to_string(),
            self.context.to_string(),
            self.expert.to_string(),
            self.pipeline.to_string(),
            self.r#virtual.to_string(),
            match self.replicas {
                Span(1, 1) => self.zero.to_string(),
                n => format!("{}, {n} copies", self.zero),
            },
            self.recompute.to_string(),
            self.microbatch.to_string(),
        ]
    }
}

impl Degrees {
    /// Whether the plan has what these pins ask for; false where one of them is no degree.
    pub fn keep(&self, pins: &[String]) -> bool {
        let is = |span: Span, value: &str| value.parse().is_ok_and(|n| span == Span(n, n));
        let mut pins = pins.iter().flat_map(|p| p.split_whitespace());
        pins.all(|pin| match pin.split_once('=') {
            Some(("data", n)) => is(self.data, n),
            Some(("tensor", n)) => is(self.tensor, n),
            Some(("context", n)) => is(self.context, n),
            Some(("expert", n)) => is(self.expert, n),
            Some(("replicas", n)) => is(self.replicas, n),
            Some(("zero", n)) => is(self.zero, n),
            Some(("pipeline", n)) => is(Span(self.pipeline, self.pipeline), n),
            Some(("virtual", n)) => is(Span(self.r#virtual, self.r#virtual), n),
            Some(("microbatch", n)) => n.parse() == Ok(self.microbatch),
            Some(("recompute", how)) => how == self.recompute,
            _ => false,
        })
    }

    /// Where another plan's degrees differ: `ZeRO (0 in place of 2)`. Empty where all are the same.
    pub fn differences(&self, other: &Degrees) -> Vec<String> {
        let cells = self.cells().into_iter().zip(other.cells());
        let all = Degrees::HEADER.into_iter().zip(cells);
        let differ = all.filter(|(_, (own, others))| own != others);
        differ
            .map(|(name, (own, others))| format!("{name} ({others} in place of {own})"))
            .collect()
    }
}

impl fmt::Display for Degrees {
    /// `data=8 tensor=4 pipeline=2 zero=1 recompute=none microbatch=16`; degrees of one that few
    /// plans have are left out. `data=3 tensor=3 (the same 3 in turn)` are three ranks, which split
    /// samples in some ops and features in others. Ranks that repeat work stand in words at the
    /// end: as a pin, `replicas` would be a part of `data`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "data={} tensor={}", self.data, self.tensor)?;
        if self.both != Span(1, 1) {
            write!(f, " (the same {} in turn)", self.both)?;
        }
        for (name, degree) in [
            ("replicas", self.replicas),
            ("context", self.context),
            ("expert", self.expert),
        ] {
            if degree != Span(1, 1) {
                write!(f, " {name}={degree}")?;
            }
        }
        write!(f, " pipeline={}", self.pipeline)?;
        if self.r#virtual > 1 {
            write!(f, " virtual={}", self.r#virtual)?;
        }
        write!(f, " zero={}", self.zero)?;
        match self.recompute {
            // No pin says that.
            PARTS => write!(f, " (recomputing in part)")?,
            one => write!(f, " recompute={one}")?,
        }
        write!(f, " microbatch={}", self.microbatch)?;
        match self.repeated {
            Span(1, 1) => Ok(()),
            n => write!(f, " ({n} ranks repeat each part of the work)"),
        }
    }
}

/// The runs that stand for their stages: of the layers that the model has most of, those that are
/// treated alike most often in the stage. Embedding and output layer split otherwise, and are asked
/// only where a model has nothing else.
fn typical<'a>(
    plan: &Plan,
    training: &TrainingGraph,
    stages: &'a [StageReport],
) -> Vec<&'a RunReport> {
    let (_, kinds) = kinds(training);
    let mut counts: BTreeMap<usize, usize> = BTreeMap::new();
    kinds
        .iter()
        .for_each(|k| *counts.entry(*k).or_default() += 1);
    let most = counts.into_iter().rev().max_by_key(|(_, n)| *n);
    let is_of_most = |layer: LayerId| kinds.get(layer.index()).copied() == most.map(|(k, _)| k);
    let stages = plan.stages.iter().zip(stages);
    let runs = stages.filter_map(|(stage, report)| {
        let runs = stage.runs.iter().zip(&report.layers).rev();
        let runs = runs.filter(|(run, _)| is_of_most(run.first));
        runs.max_by_key(|(run, _)| run.count)
            .map(|(_, report)| report)
    });
    runs.collect()
}

/// Says whether an axis does something, alone or in some ops.
fn does(all: &[String], what: &str) -> bool {
    let is = |d: &String| {
        d == what
            || d.strip_prefix(what)
                .is_some_and(|d| d.starts_with(" in ") || d.starts_with(" ("))
    };
    all.iter().any(is)
}

/// Counts the ranks along the axes that do something.
fn ranks(run: &RunReport, what: &str) -> u32 {
    let axes = run.axes.iter().filter(|a| does(&a.does, what));
    axes.map(|a| a.size).product()
}

/// Counts the ranks along the axes that split samples in some ops and features in others.
fn both(run: &RunReport) -> u32 {
    let does_both = |all: &[String]| does(all, "data parallel") && does(all, "tensor parallel");
    let axes = run.axes.iter().filter(|a| does_both(&a.does));
    axes.map(|a| a.size).product()
}

/// Counts the ranks along the axes that split no work.
fn repeated(run: &RunReport) -> u32 {
    let axes = run.axes.iter().filter(|a| a.does.is_empty());
    axes.map(|a| a.size).product()
}

/// The ZeRO level over the axes that split samples, the sequence of each or no work, and over how
/// many ranks of those that split samples there are copies of what it splits.
fn states(run: &RunReport) -> (u32, u32) {
    let level = |a: &AxisReport| u32::from(a.zero.unwrap_or(0));
    let axes = run.axes.iter().filter(|a| a.size > 1);
    let splits_samples = |a: &AxisReport| does(&a.does, "data parallel");
    let splits_sequence = |a: &AxisReport| does(&a.does, "context parallel");
    let resting = axes
        .clone()
        .filter(|a| splits_samples(a) || splits_sequence(a) || a.does.is_empty());
    let zero = resting.map(level).max().unwrap_or(0);
    let whole = axes.filter(|a| splits_samples(a) && zero > 0 && level(a) == 0);
    (zero, whole.map(|a| a.size).product())
}

/// Names what the layers recompute, by the runs that stand for their stages.
fn recompute(typical: &[&RunReport]) -> &'static str {
    let mut words: Vec<&str> = typical.iter().map(|r| r.recompute_words.as_str()).collect();
    words.sort_unstable();
    words.dedup();
    match words[..] {
        [] | [""] => "none",
        [one] if one.ends_with("(full)") => "full",
        [_] => "selective",
        _ => PARTS,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axis(size: u32, does: &str, zero: u8) -> AxisReport {
        AxisReport {
            axis: "x".into(),
            size,
            does: Vec::from_iter((!does.is_empty()).then(|| does.to_string())),
            zero: Some(zero),
            zero_share: 1.0,
            splits_others: false,
        }
    }

    fn run(axes: Vec<AxisReport>) -> RunReport {
        RunReport {
            layers: "h.0".into(),
            axes,
            recompute: Vec::new(),
            recompute_words: String::new(),
            resting_words: String::new(),
            n_layers: 1,
        }
    }

    #[test]
    fn ranks_that_repeat_work_are_no_replicas() {
        let own = run(vec![axis(7, "data parallel", 2), axis(3, "", 0)]);
        assert_eq!(states(&own), (2, 1));
        assert_eq!(repeated(&own), 3);
        let hsdp = run(vec![
            axis(8, "data parallel", 3),
            axis(2, "data parallel", 0),
        ]);
        assert_eq!(states(&hsdp), (3, 2));
        assert_eq!(repeated(&hsdp), 1);
        // Pins alone stand before the brackets.
        let degrees = Degrees {
            data: Span(7, 7),
            expert: Span(1, 1),
            context: Span(1, 1),
            tensor: Span(1, 1),
            both: Span(1, 1),
            repeated: Span(3, 3),
            pipeline: 2,
            r#virtual: 1,
            zero: Span(2, 2),
            replicas: Span(1, 1),
            recompute: "none",
            microbatch: 7,
        };
        let words = degrees.to_string();
        assert_eq!(
            words,
            "data=7 tensor=1 pipeline=2 zero=2 recompute=none microbatch=7 (3 ranks repeat each part of the work)"
        );
        assert_eq!(degrees.cells()[0], "7(x3)");
        let asked = |pins: &str| degrees.keep(&[pins.to_string()]);
        assert!(asked("data=7 tensor=1 zero=2 recompute=none microbatch=7"));
        assert!(!asked("data=7 tensor=2"));
        assert!(!asked("schedule=1f1b"));
        let other = Degrees {
            zero: Span(0, 0),
            microbatch: 14,
            ..degrees.clone()
        };
        assert_eq!(
            degrees.differences(&other),
            ["ZeRO (0 in place of 2)", "microbatch (14 in place of 7)"]
        );
        let (pins, _) = words.split_once(" (").unwrap();
        assert!(planner::Pins::parse(&Vec::from_iter(pins.split(' ').map(String::from))).is_ok());
    }
}
