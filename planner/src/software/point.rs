//! Points of the space of a framework: one value for each of its knobs, and the pins that describe
//! the plan that they make.

use super::layout::Model;
use crate::recipes::Facts;
use crate::{ContextAttention, Pins, PlanError};
use frameworks::{ContextRanks, Framework, Recomputation, SequenceParallel, Split, Vocabulary};
use ir::cluster::Cluster;
use ir::plan::ScheduleKind;
use ir::{TrainSpec, counted};

/// The most samples that a replica works on at a time, of those that are tried.
const MOST_SAMPLES: u64 = 32;
/// Shortest sequence, in tokens, that is split over context ranks where nothing is pinned.
const LONG_SEQUENCE: u64 = 32 * 1024;
/// Fewest tokens of a sequence that each context rank gets there.
const TOKENS_OF_CONTEXT_RANK: u64 = 4 * 1024;
/// Largest tensor degree that is tried: beyond eight ranks nobody goes.
const MOST_TENSOR: u32 = 8;

/// One value for each knob of a framework.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Point {
    /// Ranks that split samples.
    pub data: u32,
    /// Ranks that split features.
    pub tensor: u32,
    /// Ranks that split sequences.
    pub context: u32,
    /// Ranks that split experts, tensor ranks first.
    pub expert: u32,
    /// Meshes in a row.
    pub pipeline: u32,
    /// Stages on each mesh.
    pub virtual_stages: u32,
    /// The ZeRO level.
    pub zero: u8,
    /// Copies of what that level splits, over as many parts of the data ranks (HSDP).
    pub copies: u32,
    /// Samples that a replica works on at a time.
    pub micro_batch: u64,
    /// Whether norms and residuals are split along the sequence over tensor ranks.
    pub sequence_parallel: bool,
    /// The recomputation of all blocks.
    pub recompute: Recomputation,
    /// Order of passes where a mesh has one stage.
    pub schedule: ScheduleKind,
}

impl Point {
    /// The ranks that split both samples and experts.
    pub fn experts_among_samples(&self) -> u32 {
        match self.expert {
            1 => 1,
            n => (n / self.tensor.max(1)).max(1),
        }
    }

    /// The data ranks over which the ZeRO level splits states.
    pub fn shards(&self) -> u32 {
        self.data / self.copies.max(1)
    }

    /// Whether ranks that hold the same parameters are the data ranks alone.
    pub(super) fn is_plain(&self) -> bool {
        self.context == 1 && self.experts_among_samples() == 1
    }

    /// The axes that split samples outside of experts' matmuls.
    pub(super) fn samples(&self) -> &'static str {
        match (self.copies > 1, self.experts_among_samples() > 1) {
            (false, false) => "data",
            (false, true) => "data+expert",
            (true, false) => "replica+data",
            (true, true) => "replica+data+expert",
        }
    }

    /// The axes that split samples where another one splits experts.
    pub(super) fn samples_beside_experts(&self) -> &'static str {
        match self.copies {
            0 | 1 => "data",
            _ => "replica+data",
        }
    }

    /// The point in a few words.
    pub fn words(&self) -> String {
        let degrees = [
            ("data", self.data),
            ("tensor", self.tensor),
            ("context", self.context),
            ("expert", self.expert),
            ("pipeline", self.pipeline),
        ];
        let some = degrees.iter().filter(|(name, n)| *n > 1 || *name == "data");
        let mut words: Vec<String> = some.map(|(name, n)| format!("{name} {n}")).collect();
        if self.schedule.virtual_stages() > 1 {
            words.push(self.schedule.name().to_string());
        }
        if self.virtual_stages > 1 {
            words.push(format!("{} stages on each mesh", self.virtual_stages));
        }
        words.push(match self.copies {
            0 | 1 => format!("ZeRO-{}", self.zero),
            n => format!("ZeRO-{} over {}, with {n} copies", self.zero, self.shards()),
        });
        words.push(format!("micro-batch {}", self.micro_batch));
        if self.sequence_parallel {
            words.push("sequence parallel".into());
        }
        match self.recompute {
            Recomputation::None => {}
            Recomputation::Norms => words.push("norms recomputed".into()),
            Recomputation::Attention => words.push("attention recomputed".into()),
            Recomputation::Cheap => words.push("cheap ops recomputed".into()),
            Recomputation::EverySecond => words.push("every second block recomputed".into()),
            Recomputation::Full => words.push("all blocks recomputed".into()),
        }
        words.join(", ")
    }

    /// The pins that describe the plan of this point, in which ranks that split sequences do as
    /// `ranks` says; `zigzag` says whether sequences are still to be stored in that order.
    pub fn pins(
        &self,
        model: &Model,
        split: Split,
        (ranks, zigzag): (ContextRanks, bool),
    ) -> Vec<String> {
        let mut pins = vec![
            format!("data={}", self.data),
            format!("tensor={}", self.tensor),
            format!("pipeline={}", self.pipeline),
            format!("zero={}", self.zero),
            format!("microbatch={}", self.micro_batch * u64::from(self.data)),
            format!("schedule={}", self.schedule.name()),
        ];
        if self.copies > 1 {
            pins.push(format!("replicas={}", self.copies));
        }
        if self.context > 1 {
            pins.push(format!("context={}", self.context));
            // Routing looks at all tokens of a sample in their order, and so does attention of whole
            // sequences.
            if zigzag && model.experts.is_none() && ranks == ContextRanks::Tokens {
                pins.push("context_order=zigzag".into());
            }
            pins.push(match ranks {
                ContextRanks::Tokens => "context_attention=gather".into(),
                ContextRanks::Heads => "context_attention=ulysses".into(),
            });
        }
        pins.extend(recompute_pins(self.recompute, model));
        let several = self.virtual_stages > 1 && self.pipeline > 1;
        if several {
            pins.push(format!("virtual={}", self.virtual_stages));
        }
        let chunks = if several { self.virtual_stages } else { 1 };
        // A schedule of two stages on each mesh by itself divides the layers as the search does.
        if self.pipeline > 1 && self.schedule.virtual_stages() == 1 {
            let stages = u64::from(self.pipeline) * u64::from(chunks);
            let counts = split.counts(model.blocks, stages).unwrap_or_default();
            let counts: Vec<String> = counts.iter().map(u64::to_string).collect();
            pins.push(format!("split={}", counts.join("/")));
        }
        if model.experts.is_some() && self.experts_among_samples() > 1 {
            pins.push(format!("expert={}", self.experts_among_samples()));
        }
        pins.extend(model.pins(self));
        pins
    }
}

/// The pins of what all blocks recompute.
fn recompute_pins(what: Recomputation, model: &Model) -> Vec<String> {
    let none = "recompute=none".to_string();
    let of_ops = |ops: Vec<&str>| {
        let pins = ops.into_iter().map(|op| format!("recompute:h.*.{op}=yes"));
        pins.chain([none.clone()]).collect()
    };
    match what {
        Recomputation::None => vec![none],
        Recomputation::Norms => of_ops(model.norms()),
        Recomputation::Attention => of_ops(vec!["attn.attend"]),
        Recomputation::Cheap => vec!["recompute=selective".into()],
        Recomputation::EverySecond => {
            let second = (1..model.blocks).step_by(2);
            let pins = second.map(|i| format!("recompute:h.{i}.*=yes"));
            pins.chain([none]).collect()
        }
        Recomputation::Full => vec!["recompute=full".into()],
    }
}

/// The points of a framework for a model on a cluster, under a user's pins.
#[derive(Clone, Debug)]
pub(super) struct Space<'a> {
    pub framework: Framework,
    pub vocabulary: Vocabulary,
    pub split: Split,
    pub model: &'a Model,
    pub facts: &'a Facts,
    pub pins: &'a Pins,
}

impl<'a> Space<'a> {
    /// The space, if the pins say nothing that the framework has no words for.
    pub fn new(
        (framework, split): (Framework, Split),
        model: &'a Model,
        facts: &'a Facts,
        pins: &'a Pins,
    ) -> Result<Space<'a>, PlanError> {
        let space = Space {
            framework,
            vocabulary: framework.vocabulary(),
            split,
            model,
            facts,
            pins,
        };
        match space.inexpressible() {
            Some(what) => Err(PlanError::Pins(format!(
                "{} cannot express {what}; leave the pin out, or plan for other software",
                framework.title()
            ))),
            None => Ok(space),
        }
    }

    /// A pin that the framework has no words for.
    fn inexpressible(&self) -> Option<String> {
        let (v, pins) = (&self.vocabulary, self.pins);
        let degrees = [
            ("replicas", pins.replicas, !v.copies.is_empty()),
            ("tensor", pins.tensor, v.tensor),
            ("context", pins.context, v.context.is_some()),
            ("expert", pins.expert, v.expert),
            ("pipeline", pins.pipeline, v.pipeline),
            ("virtual", pins.virtual_stages, v.interleaved),
        ];
        let degree = degrees.iter().find_map(|(name, degree, has)| {
            let n = degree.filter(|n| *n > 1 && !has)?;
            Some(format!("{name}={n}"))
        });
        let schedule = pins.schedule.filter(|s| !v.has_schedule(*s));
        let schedule = schedule.map(|s| format!("schedule={}", s.name()));
        let is_known = |z: &u8| v.zero.contains(z) || v.zero_in_pipeline.contains(z);
        let zero = pins.zero.filter(|z| !is_known(z));
        let context = pins.context.filter(|n| *n > 1);
        let whole = context.filter(|_| pins.zero == Some(0) && v.splits_states_over_context);
        let is_of_heads = v.context == Some(ContextRanks::Heads);
        let attention = pins
            .context_attention
            .filter(|a| is_of_heads && context.is_some() && *a != ContextAttention::Ulysses);
        let order = is_of_heads && context.is_some() && pins.zigzag;
        let offload = pins.offload.is_some();
        let experts = pins.tensor.filter(|n| *n > 1 && !self.splits_features());
        let levels = |pipeline| v.zero_levels(pipeline, 1);
        let pipeline = pins.pipeline.map(|n| n.max(1));
        let copies = pins.replicas.filter(|n| *n > 1).zip(pins.zero);
        let copies = copies.filter(|(_, z)| !v.copies.contains(z));
        let zero_there = pins.zero.zip(pipeline);
        let zero_there = zero_there.filter(|(z, n)| !levels(*n).contains(z));
        degree
            .or(experts
                .map(|n| format!("tensor={n} with experts, which it does not split over ranks")))
            .or(schedule)
            .or(zero.map(|z| format!("zero={z}")))
            .or(copies.map(|(n, z)| format!("replicas={n} with zero={z}")))
            .or(zero_there.map(|(z, n)| {
                let all: Vec<String> = levels(n).iter().map(u8::to_string).collect();
                let with = if n > 1 { "with" } else { "without" };
                format!(
                    "zero={z} {with} a pipeline (pipeline={n}), {with} which it has the levels {}",
                    all.join(", ")
                )
            }))
            .or(whole.map(|n| {
                format!("zero=0 with context={n}, over whose ranks it always splits states")
            }))
            .or(attention.map(|a| format!("context_attention={}", a.name())))
            .or(order.then(|| {
                "context_order=zigzag, whose ranks have whole sequences of some heads".into()
            }))
            .or(offload.then(|| "offload, of which no process of it was modelled".into()))
    }

    /// Whether ranks may split features. Those that do split experts, too, whole ones for each rank,
    /// so a model with experts has no such ranks where the software leaves experts in one piece.
    fn splits_features(&self) -> bool {
        let v = &self.vocabulary;
        v.tensor && (v.expert || self.model.experts.is_none())
    }

    /// Every combination of degrees, with the first values of all other knobs.
    pub fn shapes(&self) -> Vec<Point> {
        let (v, pins, n) = (&self.vocabulary, self.pins, self.facts.n_devices);
        let tensors = self.degree(pins.tensor, self.splits_features(), |t| {
            t <= MOST_TENSOR
                && self.facts.neighbours.is_multiple_of(t)
                && self.model.heads.is_multiple_of(u64::from(t))
        });
        let most_context = match self.facts.sequence {
            short if short < LONG_SEQUENCE => 1,
            long => long / TOKENS_OF_CONTEXT_RANK,
        };
        let contexts = self.degree(pins.context, v.context.is_some(), |c| {
            let has_heads =
                v.context != Some(ContextRanks::Heads) || self.model.heads.is_multiple_of(c.into());
            c.is_power_of_two() && u64::from(c) <= most_context && has_heads
        });
        let mut shapes = Vec::new();
        for &tensor in &tensors {
            for &context in &contexts {
                let inside = tensor.saturating_mul(context);
                if !n.is_multiple_of(inside) {
                    continue;
                }
                let rest = n / inside;
                let pipelines = self.degree(pins.pipeline, v.pipeline, |p| {
                    rest.is_multiple_of(p) && u64::from(p) <= self.model.blocks
                });
                for pipeline in pipelines.into_iter().filter(|p| rest.is_multiple_of(*p)) {
                    let data = rest / pipeline;
                    let agrees = pins.data.is_none_or(|d| d == data);
                    let whole = self.facts.global_batch.is_multiple_of(u64::from(data));
                    if agrees && whole {
                        shapes.extend(self.with_experts(Point {
                            data,
                            tensor,
                            context,
                            expert: 1,
                            pipeline,
                            virtual_stages: 1,
                            zero: 0,
                            copies: 1,
                            micro_batch: 1,
                            sequence_parallel: false,
                            recompute: Recomputation::None,
                            schedule: ScheduleKind::OneFOneB,
                        }));
                    }
                }
            }
        }
        let valid = shapes.into_iter().filter_map(|p| self.first(p));
        valid.collect()
    }

    /// The pinned degree, or those up to the devices that are of use; 1 alone where the framework
    /// has no such ranks.
    fn degree(&self, pinned: Option<u32>, has: bool, is_of_use: impl Fn(u32) -> bool) -> Vec<u32> {
        match pinned {
            Some(n) => vec![n.max(1)],
            None if !has => vec![1],
            None => (1..=self.facts.n_devices)
                .filter(|n| *n == 1 || is_of_use(*n))
                .collect(),
        }
    }

    /// The shape with every number of ranks that split experts: none, or the tensor ranks and then
    /// some of those that split samples.
    fn with_experts(&self, shape: Point) -> Vec<Point> {
        let Some(experts) = self.model.experts.filter(|_| self.vocabulary.expert) else {
            return vec![shape];
        };
        let among = (0..31).map(|k| 1u32 << k).take_while(|a| *a <= shape.data);
        let fits = |a: &u32| {
            let ranks = u64::from(*a) * u64::from(shape.tensor);
            shape.data.is_multiple_of(*a) && experts.is_multiple_of(ranks)
        };
        let some = among.filter(fits).filter(|a| match self.pins.expert {
            Some(pinned) => *a == pinned,
            None => true,
        });
        let mut all: Vec<Point> = some
            .map(|a| Point {
                expert: a * shape.tensor,
                ..shape
            })
            .collect();
        if all.is_empty() && self.pins.expert.is_none_or(|n| n == 1) {
            all.push(shape);
        }
        all
    }

    /// The first value of every knob but the degrees: the smallest microbatch, states split once a
    /// step where they can be, nothing recomputed. None where a knob has none.
    fn first(&self, shape: Point) -> Option<Point> {
        let zeros = self.zeros(&shape);
        let copies = |z: &u8| !self.copies(&Point { zero: *z, ..shape }).is_empty();
        let zeros: Vec<u8> = zeros.into_iter().filter(copies).collect();
        let zero = zeros.iter().find(|z| **z > 0).or(zeros.first())?;
        let mut point = Point {
            zero: *zero,
            copies: *self
                .copies(&Point {
                    zero: *zero,
                    ..shape
                })
                .first()?,
            recompute: *self.recomputations().first()?,
            sequence_parallel: *self.sequence_parallel(&shape).last()?,
            schedule: *self.schedules(&shape).first()?,
            micro_batch: *self.micro_batches(&shape).first()?,
            ..shape
        };
        point.virtual_stages = *self.chunks(&point).first()?;
        Some(point)
    }

    /// ZeRO levels at a point, that which splits least first.
    pub fn zeros(&self, point: &Point) -> Vec<u8> {
        let levels = self.vocabulary.zero_levels(point.pipeline, point.context);
        let levels = levels.iter().copied();
        if let Some(zero) = self.pins.zero {
            // A pinned level that does not go with a pipeline leaves the pipelines out.
            return levels.filter(|z| *z == zero).collect();
        }
        let some = if point.data * point.context > 1 {
            usize::MAX
        } else {
            1
        };
        levels.take(some).collect()
    }

    /// Copies of states over the data ranks, the fewest first: one, or so many that each lies inside
    /// a host, or over a power of two of them.
    pub fn copies(&self, point: &Point) -> Vec<u32> {
        let among = point.experts_among_samples();
        let fits = |n: u32| point.data.is_multiple_of(n.saturating_mul(among));
        match self.pins.replicas {
            Some(0 | 1) => vec![1],
            Some(n) if fits(n) && self.vocabulary.copies.contains(&point.zero) => vec![n],
            Some(_) => Vec::new(),
            None if !self.vocabulary.copies.contains(&point.zero) => vec![1],
            None => {
                // States lie over the context ranks too.
                let own = point.tensor.saturating_mul(point.context).max(1);
                let whole = |n: &u32| {
                    let lie_over = point.data / n * own;
                    *n == 1 || fits(*n) && lie_over >= self.facts.neighbours
                };
                let powers = (0..31).map(|k| 1u32 << k);
                powers
                    .take_while(|n| *n <= point.data)
                    .filter(whole)
                    .collect()
            }
        }
    }

    /// Samples of a microbatch on a replica.
    pub fn micro_batches(&self, point: &Point) -> Vec<u64> {
        let data = u64::from(point.data);
        let samples = self.facts.global_batch / data;
        if let Some(all) = self.pins.microbatch {
            let own = all / data;
            let fits = all.is_multiple_of(data) && own > 0 && samples.is_multiple_of(own);
            return if fits { vec![own] } else { Vec::new() };
        }
        let sizes = (0..31)
            .map(|k| 1u64 << k)
            .take_while(|m| *m <= MOST_SAMPLES);
        sizes.filter(|m| samples.is_multiple_of(*m)).collect()
    }

    /// Stages on each mesh.
    pub fn chunks(&self, point: &Point) -> Vec<u32> {
        let own = point.schedule.virtual_stages();
        let can = self.vocabulary.interleaved && point.pipeline > 1 && own == 1;
        let microbatches =
            self.facts.global_batch / (u64::from(point.data) * point.micro_batch).max(1);
        let meshes = u64::from(point.pipeline);
        let fits = |v: u32| {
            let stages = meshes * u64::from(v);
            v == 1
                || can
                    && microbatches.is_multiple_of(meshes)
                    && self.split.is_even(self.model.blocks, stages)
                    && stages <= self.model.blocks + 2
        };
        match self.pins.virtual_stages {
            Some(v) if v == 1 || can && point.schedule == ScheduleKind::OneFOneB => {
                let whole = v == 1 || microbatches.is_multiple_of(meshes);
                if whole { vec![v.max(1)] } else { Vec::new() }
            }
            Some(_) => Vec::new(),
            None => {
                let most = (self.model.blocks / meshes).max(1);
                let most = u32::try_from(most).unwrap_or(u32::MAX);
                (1..=most.min(64)).filter(|v| fits(*v)).collect()
            }
        }
    }

    /// Orders of passes with one stage on each mesh.
    pub fn schedules(&self, point: &Point) -> Vec<ScheduleKind> {
        match self.pins.schedule {
            Some(schedule) => vec![schedule],
            None if point.pipeline == 1 => vec![ScheduleKind::OneFOneB],
            None => self.vocabulary.schedules.to_vec(),
        }
    }

    /// The choices of recomputation of all blocks. A pinned one is not listed: pins say it.
    pub fn recomputations(&self) -> Vec<Recomputation> {
        let named = self.pins.recompute.is_some() || !self.pins.recompute_ops.is_empty();
        match named {
            true => vec![Recomputation::None],
            false => self.vocabulary.recompute.to_vec(),
        }
    }

    /// Whether norms and residuals are split along the sequence, `false` first.
    pub fn sequence_parallel(&self, point: &Point) -> Vec<bool> {
        let whole = u64::from(point.tensor) * u64::from(point.context);
        let can = self.facts.sequence.is_multiple_of(whole);
        match self.vocabulary.sequence_parallel {
            _ if point.tensor == 1 => vec![false],
            // Tokens go to experts of other tensor ranks from where they lie.
            SequenceParallel::Optional if self.model.experts.is_some() && can => vec![true],
            SequenceParallel::Optional if can => vec![false, true],
            SequenceParallel::Always => vec![true],
            SequenceParallel::Optional | SequenceParallel::Never => vec![false],
        }
    }

    /// The points that differ in one knob by one step; what is recomputed is that of this one.
    pub fn neighbours(&self, point: &Point) -> Vec<Point> {
        let sizes = around(&self.micro_batches(point), &point.micro_batch);
        let sizes = sizes.into_iter().map(|micro_batch| Point {
            micro_batch,
            ..*point
        });
        let chunks = around(&self.chunks(point), &point.virtual_stages);
        let chunks = chunks.into_iter().map(|virtual_stages| Point {
            virtual_stages,
            ..*point
        });
        let zeros = self.zeros(point).into_iter();
        let zeros = zeros.filter_map(|zero| {
            let all = self.copies(&Point { zero, ..*point });
            let own = all.iter().find(|n| **n == point.copies).or(all.first());
            own.map(|&copies| Point {
                zero,
                copies,
                ..*point
            })
        });
        let copies = around(&self.copies(point), &point.copies);
        let copies = copies.into_iter().map(|copies| Point { copies, ..*point });
        let split = self.sequence_parallel(point).into_iter();
        let split = split.map(|sequence_parallel| Point {
            sequence_parallel,
            ..*point
        });
        let orders = self.schedules(point).into_iter().map(|schedule| Point {
            schedule,
            virtual_stages: 1,
            ..*point
        });
        let all = sizes.chain(chunks).chain(zeros).chain(copies);
        let all = all.chain(split).chain(orders);
        // What a step in one knob makes of the others has to be possible still.
        let is_possible = |p: &Point| p != point && self.chunks(p).contains(&p.virtual_stages);
        let mut all: Vec<Point> = all.filter(is_possible).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// How many points there are in all: what a search that plans each would look at.
    pub fn n_points(&self) -> u64 {
        let of = |shape: &Point| -> u64 {
            let mut n = 0;
            for schedule in self.schedules(shape) {
                for micro_batch in self.micro_batches(shape) {
                    let point = Point {
                        schedule,
                        micro_batch,
                        ..*shape
                    };
                    n += self.chunks(&point).len() as u64;
                }
            }
            let states = self.zeros(shape).into_iter();
            let states = states.map(|zero| self.copies(&Point { zero, ..*shape }).len() as u64);
            n * states.sum::<u64>()
                * self.recomputations().len() as u64
                * self.sequence_parallel(shape).len() as u64
        };
        self.shapes().iter().map(of).sum()
    }

    /// The failure of a space without a point: with the pins of which each leaves none, where there
    /// are such.
    pub fn none(&self, train: &TrainSpec, cluster: &Cluster) -> PlanError {
        let asked = format!(
            "{} has no plan for {} and a global batch of {}",
            self.framework.title(),
            counted(cluster.n_devices(), "device"),
            train.global_batch,
        );
        if *self.pins == Pins::default() {
            return PlanError::Pins(format!("{asked}: no degrees divide them"));
        }
        let pins = self.pins.describe().join(", ");
        let culprits = self.culprits();
        let why = match culprits.as_slice() {
            [] => "no degrees divide them, with fewer of these pins neither".to_string(),
            [one] => format!("there is one without {one}"),
            [rest @ .., last] => {
                format!(
                    "there is one without {} or without {last}",
                    rest.join(", without ")
                )
            }
        };
        PlanError::Pins(format!("{asked} under the pins {pins}: {why}"))
    }

    /// The pins without any one of which there are points.
    fn culprits(&self) -> Vec<String> {
        type Free = fn(&mut Pins);
        const KNOBS: [(&str, Free); 9] = [
            ("data", |p| p.data = None),
            ("replicas", |p| p.replicas = None),
            ("tensor", |p| p.tensor = None),
            ("context", |p| p.context = None),
            ("expert", |p| p.expert = None),
            ("pipeline", |p| p.pipeline = None),
            ("virtual", |p| p.virtual_stages = None),
            ("zero", |p| p.zero = None),
            ("microbatch", |p| p.microbatch = None),
        ];
        let described = self.pins.describe();
        let culprit = |(key, free): &(&str, Free)| {
            let named = described
                .iter()
                .find(|d| d.split('=').next() == Some(key))?;
            let mut pins = self.pins.clone();
            free(&mut pins);
            let space = Space {
                pins: &pins,
                ..self.clone()
            };
            (!space.shapes().is_empty()).then(|| named.clone())
        };
        KNOBS.iter().filter_map(culprit).collect()
    }
}

/// A value of a list with those beside it.
fn around<T: Copy + PartialEq>(all: &[T], value: &T) -> Vec<T> {
    let own = all.iter().position(|v| v == value).unwrap_or(0);
    let first = own.saturating_sub(1);
    all.iter()
        .copied()
        .skip(first)
        .take(own + 2 - first)
        .collect()
}
