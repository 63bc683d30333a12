//! One kind of layer on one mesh: its groups, the priced edges between them, and its cost as
//! a matrix over the layouts of its two boundaries.
//!
//! The groups of the next layer's boundary take part with their layouts but without cost, so
//! that the layer pays for bringing its result into the layout that the next layer wants and
//! for receiving its gradient in it. Eliminating everything but the two boundaries, under a
//! price on memory, gives the matrix; min-plus products of matrices are stages (`stage`).

use crate::groups::{Choice, Group, Members, Phases, Setting, members, staged};
use crate::layers::Layers;
use crate::pins::{ZeroLevels, whole};
use crate::prices::{Prices, Tensor};
use dominance::{drop_among_equal_faces, drop_by_links};
pub(crate) use facts::MeshFacts;
use facts::{Answer, Question};
use intra_op::eliminate::{Eliminated, Eliminator, TooWide};
use intra_op::problem::{Cost, Edge, Table};
use ir::{LayerId, OpId, OpKind, Origin, Pass, Region, ShardingSpec, ValueId};
use rustc_hash::FxHashMap;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::marker::PhantomData;
use std::sync::Arc;

mod dominance;
mod facts;

/// Cost quantum: seconds per unit of the integer costs that solvers see.
pub(crate) const QUANTUM_S: f64 = 1e-10;
/// Elimination tables beyond this many cells are refused.
const MAX_CELLS: u64 = 64_000_000;
/// Up to so many cells (32 MB) an elimination is kept for decoding; a larger one is made again.
const KEPT_CELLS: u64 = 4_000_000;

/// Seconds as an integer cost.
pub(crate) fn quanta(seconds: f64) -> Cost {
    if seconds.is_finite() {
        Cost::finite((seconds / QUANTUM_S).round().clamp(0.0, 1e17) as u64)
    } else {
        Cost::FORBIDDEN
    }
}

/// A priced layer kind.
pub(crate) struct LayerModel {
    /// Own groups first, then those of the next layer's boundary.
    pub groups: Vec<Group>,
    /// Number of own groups.
    pub n_own: usize,
    /// The group of the own boundary, if the layer has one (the first has none).
    pub entry: Option<usize>,
    /// The group of the next layer's boundary.
    pub exit: Option<usize>,
    n_made: usize,
    sizes: Vec<usize>,
    priced: Vec<PricedLink>,
}

/// Layout changes of all pairs of choices of a link, by what the choices show it of their specs.
struct PricedLink {
    a: usize,
    b: usize,
    /// Per choice of `a` and of `b`, its face.
    faces: (Vec<usize>, Vec<usize>),
    n_faces_b: usize,
    /// `[face of a][face of b]`; `None` where a layout cannot be reached.
    cells: Vec<Option<LinkCell>>,
}

/// A link's layout changes under one pair of faces.
#[derive(Clone, Copy)]
struct LinkCell {
    time: Phases,
    /// The part of it that a program may hide behind computing: it moves parameters and their
    /// gradients in the microbatches, and where the setting says so gradients of activations.
    hideable: Phases,
    /// ZeRO levels that they keep to.
    levels: ZeroLevels,
}

impl PricedLink {
    /// The layout changes under a choice of `a` and one of `b`.
    fn cell(&self, a: usize, b: usize) -> Option<LinkCell> {
        self.cells[self.faces.0[a] * self.n_faces_b + self.faces.1[b]]
    }
}

/// A layer model under fixed weights of time, ready for any price on memory.
pub(crate) struct WeightedLayer<'m> {
    pub model: &'m LayerModel,
    pub eliminator: Cow<'m, Eliminator>,
}

/// All layout changes between two groups.
struct Link {
    a: usize,
    b: usize,
    uses: Vec<Use>,
}

impl Link {
    /// The specs of a choice of group `g` that the other group sees.
    fn face<'c>(&self, g: usize, choice: &'c Choice) -> impl Iterator<Item = &'c ShardingSpec> {
        self.uses.iter().map(move |u| match u.from == g {
            true => u.made(choice),
            false => u.wanted(choice),
        })
    }
}

/// Numbers of specs ([`Prices::number`]). Choices share the parts that hold their specs, so where
/// one lies is looked at before what it says.
struct SpecNumbers<'p, 'a, 's> {
    prices: &'p mut Prices<'a>,
    /// By address.
    known: FxHashMap<*const ShardingSpec, usize>,
    /// Specs that have a number outlive this, so that no other one can have their address.
    of: PhantomData<&'s ShardingSpec>,
}

impl<'p, 'a, 's> SpecNumbers<'p, 'a, 's> {
    fn new(prices: &'p mut Prices<'a>) -> Self {
        SpecNumbers {
            prices,
            known: FxHashMap::default(),
            of: PhantomData,
        }
    }

    fn of(&mut self, spec: &'s ShardingSpec) -> usize {
        let prices = &mut *self.prices;
        let known = self.known.entry(std::ptr::from_ref(spec));
        *known.or_insert_with(|| prices.number(spec))
    }
}

/// One use of a value of another group.
#[derive(Clone, Copy)]
struct Use {
    /// (position of the op in its group, result) of the producer, in group `from`.
    from: usize,
    producer: (usize, usize),
    /// (position of the op in its group, operand) of the consumer, in group `to`; for a
    /// state's next value: the position of the state's op and `None`.
    to: usize,
    consumer: (usize, Option<usize>),
    /// Consumer's op: region and pass decide how often it is paid.
    op: OpId,
    value: ValueId,
}

/// The cost of a layer under a price on memory, for each pair of boundary layouts.
pub(crate) struct PricedLayer<'m> {
    /// `[entry][exit]`, quanta; a side without boundary has one row or column.
    pub matrix: Vec<Vec<Option<u64>>>,
    /// From this cost on the matrix is a bound; `None` where all of it is exact.
    pub exact_below: Option<u64>,
    node_costs: Vec<Vec<Cost>>,
    /// The elimination that it was read off, unless that is large.
    found: Option<Eliminated<'m>>,
}

/// Weights that turn times and bytes into one number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Weights {
    /// Times that the time of a microbatch counts.
    pub m: f64,
    /// 1 to count per-step time, 0 to leave it out.
    pub step: f64,
    /// Seconds per byte that lives for the step.
    pub static_price: f64,
    /// Seconds per byte that is saved per microbatch.
    pub saved_price: f64,
    pub assumed: Assumed,
}

/// An assumption under which strategies are chosen. The objective and what is proved assume
/// nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Assumed {
    /// The ZeRO level that choices have to keep to; any, where there is none.
    pub level: Option<u8>,
    /// The share of what moves in the microbatches that hides behind computing. Only the simulator
    /// knows how much does; the objective charges all.
    pub hidden: f64,
    /// Whether that share is of the traffic of activations' gradients too, not only of parameters
    /// and their gradients: it runs while the gradients of weights are computed.
    pub gradients: bool,
    /// How many times more than there are microbatches the time of one counts: a pipeline of equal
    /// stages fills and drains once.
    pub fill: u32,
}

/// The largest share of the traffic that is assumed to hide. It is no more than a way to find plans
/// that are then simulated: less than all, so that of two the one that moves less is taken.
pub(crate) const MOST_HIDDEN: f64 = 0.95;
/// The share where the traffic of activations' gradients counts too. By the simulator, of tensor
/// parallelism over 8 H100s in one host half of the all-reduces of the backward pass hides, and of
/// all-gathers and reduce-scatters between its matmuls 54 and 65%; more is assumed, as what was
/// chosen without is simulated already.
pub(crate) const GRADIENTS_HIDDEN: f64 = 0.8;

impl Assumed {
    /// A cost as it counts where `hideable` of its time may hide.
    fn seen(self, time: Phases, hideable: Phases) -> Phases {
        match self.hides() {
            true => time.plus(hideable.times(-self.hidden)),
            false => time,
        }
    }

    /// Whether anything of it is assumed to hide.
    pub(crate) fn hides(self) -> bool {
        self.hidden > 0.0
    }

    /// The cost of layers as it counts.
    pub(crate) fn seen_cost(self, cost: &LayerCost) -> LayerCost {
        LayerCost {
            time: self.seen(cost.time, cost.hideable),
            ..*cost
        }
    }
}

impl Weights {
    /// All of the time of `m` microbatches, memory for nothing.
    pub(crate) fn free(m: u32) -> Weights {
        Weights {
            m: f64::from(m),
            step: 1.0,
            static_price: 0.0,
            saved_price: 0.0,
            assumed: Assumed::default(),
        }
    }

    /// These weights under an assumption.
    pub(crate) fn assuming(self, assumed: Assumed) -> Weights {
        Weights {
            m: self.m + f64::from(assumed.fill),
            assumed,
            ..self
        }
    }

    fn seconds(&self, t: Phases) -> f64 {
        self.m * (t.forward + t.backward) + self.step * t.step
    }
    /// The time of layers as it counts.
    pub(crate) fn seconds_of_layers(&self, cost: &LayerCost) -> f64 {
        self.seconds(self.assumed.seen_cost(cost).time)
    }
    fn seconds_of(&self, cell: &LinkCell) -> f64 {
        self.seconds(self.assumed.seen(cell.time, cell.hideable))
    }

    /// Whether choices that keep to `levels` are allowed.
    fn allows(&self, levels: ZeroLevels) -> bool {
        self.assumed.level.is_none_or(|level| levels.has(level))
    }
    pub(crate) fn cost(&self, c: &Choice) -> Cost {
        if !self.allows(c.levels) {
            return Cost::FORBIDDEN;
        }
        quanta(
            self.seconds(c.time)
                + self.static_price * c.static_bytes as f64
                + self.saved_price * c.saved_bytes as f64,
        )
    }
}

/// The layer cannot be modelled.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum ModelError {
    /// An op is left without a strategy.
    #[error("op `{0}` has no strategy that the pins allow")]
    NoChoice(String),
    /// A pinned ZeRO level leaves no way from a parameter to an op that uses it.
    #[error(
        "the pin zero={level} forbids to gather `{value}` for op `{op}`, and its layout is pinned so that it would have to be"
    )]
    Moved {
        level: u8,
        value: String,
        op: String,
    },
    /// The layer's groups are too entangled to eliminate.
    #[error(transparent)]
    TooWide(#[from] TooWide),
}

impl LayerModel {
    /// The model of the kind of `layer` (an instance of it, with its successor).
    pub(crate) fn new(
        s: &Setting<'_>,
        layers: &Layers,
        layer: LayerId,
        known: &mut MeshFacts<'_>,
    ) -> Result<Self, ModelError> {
        let graph = &s.training.graph;
        let mut members = members(s, &layers.ops[layer.index()]);
        let n_own = members.len();
        let entry = members.iter().position(|m| m.are_boundary(graph));
        if let Some(next) = layers.ops.get(layer.index() + 1) {
            let entering = next.iter().copied();
            let entering = entering.filter(|&id| ir::boundary::is_boundary(graph, graph.op(id)));
            let entering = crate::groups::members(s, &entering.collect::<Vec<_>>());
            members.extend(entering.into_iter().filter(|m| m.are_boundary(graph)));
        }
        let exit = (members.len() > n_own).then_some(n_own);
        let links = find_links(s, &members);
        let is_level_pinned = s.pins.zero.is_some();
        let mut n_made = 0;
        let mut groups = Vec::with_capacity(members.len());
        for (i, members) in members.into_iter().enumerate() {
            let (group, n) = match members.is_parameter {
                true => parameter(s, known, &links, i, members)?,
                false => made(s, &mut known.prices, &links, (i, i < n_own), members)?,
            };
            n_made += n;
            groups.push(group);
        }
        let prices = &mut known.prices;
        let between = links.iter().filter(|l| l.a != l.b);
        let mut priced = between
            .map(|l| {
                let priced = price_between(s, prices, l, &groups);
                match s
                    .pins
                    .zero
                    .filter(|_| priced.cells.iter().all(Option::is_none))
                {
                    Some(level) => Err(moved(s, l, level).unwrap_or_else(|| {
                        ModelError::NoChoice(graph.op(groups[l.b].ops[0]).path.clone())
                    })),
                    None => Ok(priced),
                }
            })
            .collect::<Result<Vec<_>, ModelError>>()?;
        drop_by_links(&mut groups, &mut priced, is_level_pinned);
        let sizes = groups.iter().map(|g| g.choices.len()).collect();
        Ok(LayerModel {
            groups,
            n_own,
            entry,
            exit,
            n_made,
            sizes,
            priced,
        })
    }

    /// Number of choices of all groups: those that its axes make, and those that are of use.
    pub(crate) fn n_choices(&self) -> [usize; 2] {
        [self.n_made, self.sizes.iter().sum()]
    }

    /// Number of costs that are summed to the cost of a choice.
    pub(crate) fn n_terms(&self) -> usize {
        self.groups.len() + self.priced.len()
    }

    /// The model with the weights of time (`m`, `step`) fixed.
    pub(crate) fn weighted(&self, weights: Weights) -> Result<WeightedLayer<'_>, ModelError> {
        let keep: Vec<u32> = self
            .entry
            .into_iter()
            .chain(self.exit)
            .map(|g| g as u32)
            .collect();
        let eliminator = Eliminator::new(&self.sizes, &self.edges(weights), &keep, MAX_CELLS)?;
        Ok(WeightedLayer {
            model: self,
            eliminator: Cow::Owned(eliminator),
        })
    }

    /// The cost of a choice of all groups in quanta, that of the exit's layout left out where
    /// `exit_is_free`; `None` where it is forbidden.
    pub(crate) fn cost(
        &self,
        weights: Weights,
        choice: &[u32],
        exit_is_free: bool,
    ) -> Option<u128> {
        let chosen = self.groups.iter().zip(choice).enumerate();
        let nodes = chosen
            .filter(|(g, _)| !(exit_is_free && self.exit == Some(*g)))
            .map(|(_, (group, &c))| weights.cost(group.choices.get(c as usize)?).value());
        let edges = self.priced.iter().map(|p| {
            let (a, b) = (choice[p.a] as usize, choice[p.b] as usize);
            let cell = p.cell(a, b).filter(|cell| weights.allows(cell.levels))?;
            quanta(weights.seconds_of(&cell)).value()
        });
        nodes
            .chain(edges)
            .try_fold(0, |sum, cost| Some(sum + u128::from(cost?)))
    }

    /// The edges of the intra-op problem under some weights of time.
    pub(crate) fn edges(&self, weights: Weights) -> Vec<Edge> {
        self.priced
            .iter()
            .map(|p| {
                let cost = |cell: &LinkCell| match weights.allows(cell.levels) {
                    true => quanta(weights.seconds_of(cell)),
                    false => Cost::FORBIDDEN,
                };
                let costs: Vec<Cost> = p
                    .cells
                    .iter()
                    .map(|cell| cell.as_ref().map_or(Cost::FORBIDDEN, cost))
                    .collect();
                let cell = |i: usize, j: usize| costs[p.faces.0[i] * p.n_faces_b + p.faces.1[j]];
                let table = Table::from_fn(self.sizes[p.a], self.sizes[p.b], cell);
                Edge {
                    a: p.a as u32,
                    b: p.b as u32,
                    table: Arc::new(table),
                }
            })
            .collect()
    }

    /// Number of layouts of the entry boundary, at least 1.
    pub(crate) fn n_entry(&self) -> usize {
        self.entry.map_or(1, |g| self.groups[g].choices.len())
    }
    /// Number of layouts of the exit boundary, at least 1.
    pub(crate) fn n_exit(&self) -> usize {
        self.exit.map_or(1, |g| self.groups[g].choices.len())
    }

    /// Bytes for a moment that no choice of its groups needs less than ([`LayerCost`]).
    pub(crate) fn least_transient_bytes(&self, s: &Setting<'_>) -> u64 {
        let of_choice = |group: &Group, c: &Choice| {
            let regions = [Region::StepEnd, Region::Microbatch];
            regions
                .map(|region| transient(s, group, c, region))
                .into_iter()
                .max()
        };
        let own = self.groups.iter().take(self.n_own);
        let least = own.map(|g| g.choices.iter().filter_map(|c| of_choice(g, c)).min());
        least.flatten().max().unwrap_or(0)
    }

    /// Times and bytes of a decoded choice.
    pub(crate) fn evaluate(&self, s: &Setting<'_>, choice: &[u32]) -> LayerCost {
        let mut cost = LayerCost::default();
        // Recomputed values live in the backward pass, beside its ops alone.
        let (mut in_step, mut in_microbatch, mut recomputed) = (0, 0, 0u64);
        let (mut staged_step, mut staged_microbatch) = (0, 0u64);
        for (i, (group, &c)) in self.groups.iter().zip(choice).enumerate() {
            let c = &group.choices[c as usize];
            cost.time = cost.time.plus(c.time);
            if i >= self.n_own {
                continue;
            }
            cost.static_bytes = cost.static_bytes.saturating_add(c.static_bytes);
            cost.saved_bytes = cost.saved_bytes.saturating_add(c.saved_bytes);
            in_step = transient(s, group, c, Region::StepEnd).max(in_step);
            in_microbatch = transient(s, group, c, Region::Microbatch).max(in_microbatch);
            recomputed = recomputed.saturating_add(c.recomputed_bytes);
            let staged = staged(s, group, c);
            staged_step = staged.step.max(staged_step);
            staged_microbatch = staged.microbatch.saturating_add(staged_microbatch);
        }
        // Tensors of two units are staged at a time.
        in_step = staged_step.saturating_mul(2).saturating_add(in_step);
        in_microbatch = staged_microbatch
            .saturating_mul(2)
            .saturating_add(in_microbatch);
        cost.transient_bytes = in_step.max(in_microbatch.saturating_add(recomputed));
        for p in &self.priced {
            let (a, b) = (choice[p.a] as usize, choice[p.b] as usize);
            let forbidden = Phases {
                forward: f64::INFINITY,
                ..Phases::default()
            };
            let cell = p.cell(a, b);
            cost.time = cost.time.plus(cell.map_or(forbidden, |cell| cell.time));
            cost.hideable = cost
                .hideable
                .plus(cell.map_or(Phases::default(), |cell| cell.hideable));
        }
        cost
    }
}

impl WeightedLayer<'_> {
    /// The matrix under some weights; the weights of time must be those of `weighted`. With a slack
    /// it need only be exact up to so much above the least, relatively, where all of it would take
    /// so many sums or more ([`Eliminator::run_near`]).
    pub(crate) fn price(&self, weights: Weights, near: Option<(f64, u64)>) -> PricedLayer<'_> {
        let groups = &self.model.groups;
        let node_costs: Vec<Vec<Cost>> = groups
            .iter()
            .map(|g| g.choices.iter().map(|c| weights.cost(c)).collect())
            .collect();
        let found = match near {
            Some((slack, worth)) => self.eliminator.run_near(&node_costs, slack, worth),
            None => self.eliminator.run(&node_costs),
        };
        let (rows, cols) = (self.model.n_entry(), self.model.n_exit());
        let table = found.table();
        let matrix = (0..rows)
            .map(|i| {
                (0..cols)
                    .map(|j| table[i * cols + j].value().filter(|&v| v < 1 << 60))
                    .collect()
            })
            .collect();
        let exact_below = found.exact_below();
        let is_small = found.kept_cells() <= KEPT_CELLS;
        PricedLayer {
            matrix,
            exact_below,
            found: is_small.then_some(found),
            node_costs,
        }
    }

    /// The best choices of all groups for given boundary layouts.
    pub(crate) fn decode(&self, priced: &PricedLayer<'_>, entry: usize, exit: usize) -> Vec<u32> {
        let kept: Vec<u32> = self
            .model
            .entry
            .map(|_| entry as u32)
            .into_iter()
            .chain(self.model.exit.map(|_| exit as u32))
            .collect();
        match &priced.found {
            Some(found) => found.decode(&kept),
            // The same choices are exact whatever else was looked at.
            None => self.eliminator.run(&priced.node_costs).decode(&kept),
        }
    }
}

/// Times and bytes of a layer under one choice.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct LayerCost {
    pub time: Phases,
    /// The part of it that a program may hide behind computing ([`Assumed`]).
    pub hideable: Phases,
    pub static_bytes: u64,
    pub saved_bytes: u64,
    /// Bytes that an op needs for a moment, and those that the layer's backward recomputes.
    pub transient_bytes: u64,
}

impl LayerCost {
    /// The cost of this and of a layer behind it.
    pub(crate) fn then(self, next: &LayerCost) -> LayerCost {
        LayerCost {
            time: self.time.plus(next.time),
            hideable: self.hideable.plus(next.hideable),
            static_bytes: self.static_bytes.saturating_add(next.static_bytes),
            saved_bytes: self.saved_bytes.saturating_add(next.saved_bytes),
            transient_bytes: self.transient_bytes.max(next.transient_bytes),
        }
    }
}

/// The group of a parameter at `index` with the choices that are of use, and how many there were;
/// those of one that was made before are the same.
fn parameter(
    s: &Setting<'_>,
    known: &mut MeshFacts<'_>,
    links: &[Link],
    index: usize,
    members: Members,
) -> Result<(Group, usize), ModelError> {
    let ops = members.ops.clone();
    let first = &s.training.graph.op(ops[0]).path;
    let question = Question::of(s, links, index, &ops);
    let answer = match known.parameter(first, &question) {
        Some(answer) => answer,
        None => {
            let (group, n_made) = made(s, &mut known.prices, links, (index, true), members)?;
            let choices = group.choices;
            let answer = Arc::new(Answer { choices, n_made });
            known.keep(first, question, Arc::clone(&answer));
            answer
        }
    };
    let group = Group {
        ops,
        choices: answer.choices.clone(),
        boundary: false,
    };
    Ok((group, answer.n_made))
}

/// The group at `index` with the choices that are of use, and how many there were. One that is not
/// the layer's own has layouts but no costs.
fn made(
    s: &Setting<'_>,
    prices: &mut Prices<'_>,
    links: &[Link],
    (index, is_own): (usize, bool),
    members: Members,
) -> Result<(Group, usize), ModelError> {
    let mut group = members.group(s);
    let none = |group: &Group| {
        let op = s.training.graph.op(group.ops[0]);
        group
            .choices
            .is_empty()
            .then(|| ModelError::NoChoice(op.path.clone()))
    };
    if let Some(e) = none(&group) {
        return Err(e);
    }
    if !is_own {
        for c in &mut group.choices {
            (c.time, c.static_bytes) = (Phases::default(), 0);
            (c.saved_bytes, c.recomputed_bytes) = (0, 0);
        }
    }
    price_inside(s, prices, links, index, &mut group);
    if let Some(e) = none(&group) {
        return Err(e);
    }
    let n_made = group.choices.len();
    if !group.boundary {
        drop_among_equal_faces(&mut group, index, links, s.pins.zero.is_some(), prices);
    }
    Ok((group, n_made))
}

/// Bytes that an op of the group in a region needs beside what is counted as saved or static:
/// its largest set of operands and results.
fn transient(s: &Setting<'_>, group: &Group, c: &Choice, region: Region) -> u64 {
    let graph = &s.training.graph;
    group
        .ops
        .iter()
        .zip(&c.ops)
        .filter(|(id, _)| graph.op(**id).region == region)
        .map(|(&id, part)| {
            let (op, a) = (graph.op(id), &part.specs);
            let results = op
                .outputs
                .iter()
                .zip(&a.results)
                .map(|(&v, spec)| crate::groups::local_bytes(s, v, spec));
            let operands = op
                .inputs
                .iter()
                .zip(&a.operands)
                .map(|(&v, spec)| crate::groups::local_bytes(s, v, spec));
            results
                .chain(operands)
                .fold(part.passing_bytes, u64::saturating_add)
        })
        .max()
        .unwrap_or(0)
}

/// The error of a link that a pinned level leaves no way over: its first parameter.
fn moved(s: &Setting<'_>, link: &Link, level: u8) -> Option<ModelError> {
    let graph = &s.training.graph;
    let parameter = link
        .uses
        .iter()
        .find(|u| s.of_parameters[u.value.index()])?;
    Some(ModelError::Moved {
        level,
        value: graph.value_name(parameter.value),
        op: graph.op(parameter.op).path.clone(),
    })
}

fn find_links(s: &Setting<'_>, groups: &[Members]) -> Vec<Link> {
    let graph = &s.training.graph;
    let mut home: BTreeMap<OpId, (usize, usize)> = BTreeMap::new();
    for (g, group) in groups.iter().enumerate() {
        for (k, &id) in group.ops.iter().enumerate() {
            home.insert(id, (g, k));
        }
    }
    let mut links: BTreeMap<(usize, usize), Vec<Use>> = BTreeMap::new();
    for (&id, &(g, k)) in &home {
        let op = graph.op(id);
        for (operand, &value) in op.inputs.iter().enumerate() {
            let producer = graph.value(value).producer;
            // Data and constants are made wherever and however they are wanted.
            if matches!(
                graph.op(producer).kind,
                OpKind::Input { .. } | OpKind::Constant { .. }
            ) {
                continue;
            }
            if let Some(&(from, p)) = home.get(&producer) {
                let result = graph.value(value).result as usize;
                let u = Use {
                    from,
                    producer: (p, result),
                    to: g,
                    consumer: (k, Some(operand)),
                    op: id,
                    value,
                };
                links.entry((from.min(g), from.max(g))).or_default().push(u);
            }
        }
    }
    // The states that are read here, in their order.
    let read = home.keys().flat_map(|id| &graph.op(*id).outputs);
    let places: BTreeSet<usize> = read.filter_map(|&v| s.index.place(v)).collect();
    for state in places.into_iter().map(|i| &s.training.states[i]) {
        let writer = graph.value(state.write);
        let reader = graph.value(state.read).producer;
        if let (Some(&(from, p)), Some(&(to, k))) = (home.get(&writer.producer), home.get(&reader))
        {
            let u = Use {
                from,
                producer: (p, writer.result as usize),
                to,
                consumer: (k, None),
                op: writer.producer,
                value: state.write,
            };
            links
                .entry((from.min(to), from.max(to)))
                .or_default()
                .push(u);
        }
    }
    links
        .into_iter()
        .map(|((a, b), uses)| Link { a, b, uses })
        .collect()
}

impl Use {
    /// The spec in which a choice of the producer's group makes the value.
    fn made<'c>(&self, from: &'c Choice) -> &'c ShardingSpec {
        &from.ops[self.producer.0].specs.results[self.producer.1]
    }

    /// The spec in which a choice of the consumer's group wants it.
    fn wanted<'c>(&self, to: &'c Choice) -> &'c ShardingSpec {
        let specs = &to.ops[self.consumer.0].specs;
        match self.consumer.1 {
            Some(operand) => &specs.operands[operand],
            None => &specs.results[0],
        }
    }
}

/// The cost of a layout change.
#[derive(Clone, Copy)]
struct Change {
    /// Seconds and levels, as [`price_use`] says.
    price: Option<f64>,
    levels: ZeroLevels,
    /// Seconds of it that kernels wait for, whatever hides.
    shown_s: f64,
}

/// The layout changes of a use between all pairs of faces, specs by number.
struct Changes<'u> {
    of: &'u Use,
    /// By face of the producer's group: the spec that it makes.
    from: Dense,
    /// By face of the consumer's group: the spec that it wants.
    to: Dense,
    tensor: Tensor,
    /// By both specs' places, what changing them costs.
    known: Vec<Option<Change>>,
}

/// Numbers, and for each its place among the distinct ones.
struct Dense {
    numbers: Vec<usize>,
    places: Vec<usize>,
    n_distinct: usize,
}

impl Dense {
    fn of(numbers: Vec<usize>) -> Dense {
        let mut known: FxHashMap<usize, usize> = FxHashMap::default();
        let place = |n: &usize| {
            let next = known.len();
            *known.entry(*n).or_insert(next)
        };
        Dense {
            places: numbers.iter().map(place).collect(),
            n_distinct: known.len(),
            numbers,
        }
    }
}

/// The phase in which a use brings its value: within one it is brought once.
fn phase(s: &Setting<'_>, u: &Use) -> (Region, bool) {
    let op = s.training.graph.op(u.op);
    (
        op.region,
        op.region == Region::Microbatch && op.pass == ir::Pass::F,
    )
}

/// Whether a use brings a parameter to an op of the microbatches that computes with it. A version
/// of asynchronous updates is brought together once, for all uses, as ZeRO below level 3 does once
/// a step.
fn is_gathered(s: &Setting<'_>, u: &Use) -> bool {
    let op = s.training.graph.op(u.op);
    let is_used = op.region == Region::Microbatch
        && op.pass != Pass::Update
        && !matches!(op.origin, Origin::Prepared { .. });
    is_used && s.of_parameters[u.value.index()]
}

/// Whether it does, or brings a gradient to its sum in the microbatches.
fn moves_parameter(s: &Setting<'_>, u: &Use) -> bool {
    let op = s.training.graph.op(u.op);
    let sums = op.region == Region::Microbatch && matches!(op.kind, OpKind::Accumulate { .. });
    sums || is_gathered(s, u)
}

/// Whether it moves what is not made of parameters in the backward pass.
fn moves_gradient(s: &Setting<'_>, u: &Use) -> bool {
    let op = s.training.graph.op(u.op);
    op.region == Region::Microbatch && !matches!(op.pass, Pass::F | Pass::Update)
}

/// The price of a layout change, none where there is no way or a pin of the ZeRO level allows
/// none, and the levels that it keeps to. `numbers` are those of the specs.
fn price_use(
    s: &Setting<'_>,
    prices: &mut Prices<'_>,
    u: &Use,
    (from, to): (&ShardingSpec, &ShardingSpec),
    numbers: (usize, usize),
    tensor: &Tensor,
) -> (Option<f64>, ZeroLevels) {
    let levels = match is_gathered(s, u) {
        true => whole::levels(s.mesh, s.roles, from, to),
        false => ZeroLevels::ALL,
    };
    let price = match s.pins.zero.is_none_or(|level| levels.has(level)) {
        true => prices.price_of((from, to), numbers, tensor),
        false => None,
    };
    (price, levels)
}

/// The tensor that a use brings.
fn tensor_of(s: &Setting<'_>, prices: &mut Prices<'_>, u: &Use) -> Tensor {
    let graph = &s.training.graph;
    let ty = graph.ty(u.value);
    let buckets = s.buckets.of(u.value, graph.op(u.op).region);
    prices.tensor(ty.shape.bind(s.batch), ty.dtype, buckets)
}

/// Seconds that the use's op takes more where its operand is laid out anew, as it is no part of the
/// call that makes it then.
fn apart_s(u: &Use, to: &Choice) -> f64 {
    let apart = to.ops[u.consumer.0].apart;
    let own = apart.filter(|(operand, _)| u.consumer.1 == Some(*operand));
    own.map_or(0.0, |(_, seconds)| seconds)
}

/// The distinct layout changes of some uses with their prices: a value that several ops of
/// one phase want in one spec is brought there once, as lowering does.
fn unique_uses<'u>(
    s: &Setting<'_>,
    prices: &mut Prices<'_>,
    uses: &'u [Use],
    choice: &dyn Fn(usize) -> &'u Choice,
) -> Vec<(&'u Use, Option<f64>, ZeroLevels)> {
    let mut seen = BTreeSet::new();
    let mut out = Vec::new();
    for u in uses {
        let (from, to) = (u.made(choice(u.from)), u.wanted(choice(u.to)));
        if from != to && seen.insert((u.value, phase(s, u), to)) {
            let tensor = tensor_of(s, prices, u);
            let numbers = (prices.number(from), prices.number(to));
            let (price, levels) = price_use(s, prices, u, (from, to), numbers, &tensor);
            let price = price.map(|p| p + apart_s(u, choice(u.to)));
            out.push((u, price, levels));
        }
    }
    out
}

/// Adds the price of layout changes inside a group to its choices; impossible ones are dropped.
fn price_inside(
    s: &Setting<'_>,
    prices: &mut Prices<'_>,
    links: &[Link],
    index: usize,
    group: &mut Group,
) {
    let Some(link) = links.iter().find(|l| l.a == index && l.b == index) else {
        return;
    };
    group.choices.retain_mut(|choice| {
        let (mut time, mut levels, mut possible) = (choice.time, choice.levels, true);
        for (u, price, kept) in unique_uses(s, prices, &link.uses, &|_| &*choice) {
            levels = levels.and(kept);
            match price {
                Some(p) => time.add(s.training.graph.op(u.op), p),
                None => possible = false,
            }
        }
        (choice.time, choice.levels) = (time, levels);
        possible
    });
}

fn price_between(
    s: &Setting<'_>,
    prices: &mut Prices<'_>,
    link: &Link,
    groups: &[Group],
) -> PricedLink {
    // Choices that show this link the same specs cost the same: price each pair of faces once.
    let mut specs = SpecNumbers::new(prices);
    let mut faces = |g: usize| -> (Vec<usize>, Vec<usize>) {
        let mut known: FxHashMap<Vec<usize>, usize> = FxHashMap::default();
        let mut first = Vec::new();
        let ids = groups[g].choices.iter().enumerate().map(|(c, choice)| {
            let face = link.face(g, choice).map(|spec| specs.of(spec)).collect();
            *known.entry(face).or_insert_with(|| {
                first.push(c);
                first.len() - 1
            })
        });
        let ids = ids.collect();
        (ids, first)
    };
    let ((ids_a, first_a), (ids_b, first_b)) = (faces(link.a), faces(link.b));
    // Specs by number: a face has few that are distinct, and each change is priced once.
    let mut changes: Vec<Changes<'_>> = Vec::with_capacity(link.uses.len());
    for u in &link.uses {
        let firsts = |g: usize| match g == link.a {
            true => &first_a,
            false => &first_b,
        };
        let choices = |g: usize| firsts(g).iter().map(move |&c| &groups[g].choices[c]);
        let from: Vec<usize> = choices(u.from).map(|c| specs.of(u.made(c))).collect();
        let to: Vec<usize> = choices(u.to).map(|c| specs.of(u.wanted(c))).collect();
        let (from, to) = (Dense::of(from), Dense::of(to));
        changes.push(Changes {
            of: u,
            tensor: tensor_of(s, specs.prices, u),
            known: vec![None; from.n_distinct * to.n_distinct],
            from,
            to,
        });
    }
    let kept = |u: &Use| (u.value, phase(s, u));
    // By use, those before it that bring the same value for the same phase.
    let before: Vec<Vec<usize>> = (0..changes.len())
        .map(|i| {
            let earlier = 0..i;
            let same = |j: &usize| kept(changes[*j].of) == kept(changes[i].of);
            earlier.filter(same).collect()
        })
        .collect();
    let mut cells = Vec::with_capacity(first_a.len() * first_b.len());
    for (a, &ca) in first_a.iter().enumerate() {
        for (b, &cb) in first_b.iter().enumerate() {
            let side = |g: usize| if g == link.a { a } else { b };
            let choice = |g: usize| match g == link.a {
                true => &groups[g].choices[ca],
                false => &groups[g].choices[cb],
            };
            let wanted = |c: &Changes<'_>| c.to.numbers[side(c.of.to)];
            let mut cell = Some(LinkCell {
                time: Phases::default(),
                hideable: Phases::default(),
                levels: ZeroLevels::ALL,
            });
            for i in 0..changes.len() {
                let change = &changes[i];
                let (u, to) = (change.of, wanted(change));
                let from = change.from.numbers[side(u.from)];
                let is_brought = |j: &usize| wanted(&changes[*j]) == to;
                if from == to || before[i].iter().any(is_brought) {
                    continue;
                }
                let place = change.from.places[side(u.from)] * change.to.n_distinct
                    + change.to.places[side(u.to)];
                let Changes { tensor, known, .. } = &mut changes[i];
                let Change {
                    price,
                    shown_s,
                    levels,
                } = *known[place].get_or_insert_with(|| {
                    let specs = (u.made(choice(u.from)), u.wanted(choice(u.to)));
                    let (price, levels) = price_use(s, prices, u, specs, (from, to), tensor);
                    let apart_s = apart_s(u, choice(u.to));
                    let price = price.map(|p| p + apart_s);
                    let shown_s = match price.is_some() && is_gathered(s, u) {
                        true => prices.second_gather_s(specs, (from, to), tensor),
                        false => 0.0,
                    } + apart_s;
                    Change {
                        price,
                        shown_s,
                        levels,
                    }
                });
                cell = cell.zip(price).map(|(mut cell, p)| {
                    cell.time.add(s.training.graph.op(u.op), p);
                    if moves_parameter(s, u) || s.gradients_hide && moves_gradient(s, u) {
                        let hideable_s = (p - shown_s).max(0.0);
                        cell.hideable.add(s.training.graph.op(u.op), hideable_s);
                    }
                    cell.levels = cell.levels.and(levels);
                    cell
                });
            }
            cells.push(cell);
        }
    }
    PricedLink {
        a: link.a,
        b: link.b,
        faces: (ids_a, ids_b),
        n_faces_b: first_b.len(),
        cells,
    }
}

#[cfg(test)]
mod tests;
