//! Stages of layers on one mesh: min-plus products of layer matrices under prices on memory.
//!
//! A stage's cost depends on the sequence of its layers' kinds only, so equal sequences are
//! computed once however many ranges of layers they describe: for a stack of equal layers the
//! products are the powers of one matrix.
//!
//! Large layers are priced only for what costs little more than the least ([`SLACKS`]); the other
//! cells of their matrices are bounds. Where the best path of a sequence has such a cell, its layer
//! is priced further. So the best paths, and what they cost, are those of exact matrices.

use crate::groups::Setting;
use crate::layer_model::{LayerCost, PricedLayer, WeightedLayer, Weights};
use crate::layers::Layers;
use intra_op::eliminate::WORTH_MESSAGES;
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// How much more than the least the choices of a layer cost that are looked at first and next,
/// relatively; all are looked at last. Layers of one stack mostly keep to the layouts at which they
/// cost least, others to what is a tenth above.
const SLACKS: [f64; 3] = [0.01, 0.05, 0.2];

/// The best cost of a layer kind between two boundary layouts.
#[derive(Clone, Copy)]
struct Cell {
    /// Quanta.
    cost: u64,
    /// Which of its ways costs that.
    way: usize,
    /// Whether the cost is that, rather than a bound on it.
    is_exact: bool,
}

/// The cells of a layer kind, by entry and exit layout; `None` where nothing is possible.
type Matrix = Vec<Vec<Option<Cell>>>;

/// One mesh with its layer models, priced under some weights.
pub(crate) struct PricedMesh<'m> {
    /// Per kind, its ways: a layer may keep or recompute its activations.
    ways: Vec<Vec<Way<'m>>>,
    matrices: Vec<Matrix>,
    weights: Weights,
    /// Per kind, how many of the [`SLACKS`] were too small.
    n_widened: Vec<usize>,
    /// Sums from which on choices are ruled out by messages first.
    worth_messages: u64,
    /// Cost of a layer kind between two boundary layouts, once asked for.
    costs: BTreeMap<(usize, usize, usize), LayerCost>,
}

/// A layer kind under one choice of what is recomputed.
struct Way<'m> {
    /// The number of the choice.
    variant: usize,
    layer: &'m WeightedLayer<'m>,
    priced: PricedLayer<'m>,
}

/// The choice for a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LayerChoice {
    /// The number of the choice of what is recomputed.
    pub variant: usize,
    /// The choice of each of its model's groups.
    pub groups: Vec<u32>,
}

/// A sequence of layers with the best boundary layouts.
#[derive(Clone, Debug)]
pub(crate) struct StagePath {
    /// Layout index at each boundary, entry of the first layer to exit of the last.
    pub boundaries: Vec<usize>,
    /// Cost of each layer.
    pub layers: Vec<LayerCost>,
    /// Sum over the layers (transient: maximum).
    pub cost: LayerCost,
    /// The objective under the weights, quanta; tests compare it with other ways to it.
    #[cfg(test)]
    pub objective: u64,
}

/// The sequences of layer kinds that ranges of layers have, each once.
///
/// A sequence is its longest proper prefix and one more layer, so that products grow one
/// matrix at a time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sequences {
    /// Per sequence, the prefix (none for one layer) and the kind of the last layer.
    steps: Vec<(Option<usize>, usize)>,
    /// Every range `start..end` of layers with its sequence.
    pub ranges: Vec<((usize, usize), usize)>,
    /// By kind, the sequence of one layer; none where only some ranges are known.
    pub single: Vec<usize>,
}

impl Sequences {
    pub(crate) fn new(layers: &Layers) -> Self {
        let mut all = Sequences::default();
        let mut known: BTreeMap<(Option<usize>, usize), usize> = BTreeMap::new();
        for start in 0..layers.kind.len() {
            let mut at = None;
            for end in start..layers.kind.len() {
                let step = (at, layers.kind[end]);
                let next = *known.entry(step).or_insert_with(|| {
                    all.steps.push(step);
                    all.steps.len() - 1
                });
                all.ranges.push(((start, end + 1), next));
                at = Some(next);
            }
        }
        let n_kinds = layers.kind.iter().max().map_or(0, |k| k + 1);
        let of_kind = |kind: usize| known.get(&(None, kind)).copied();
        all.single = (0..n_kinds).filter_map(of_kind).collect();
        all
    }

    /// The sequences of consecutive stages with these numbers of layers, and no others.
    pub(crate) fn of_split(layers: &Layers, counts: &[usize]) -> Self {
        let mut all = Sequences::default();
        let mut known: BTreeMap<(Option<usize>, usize), usize> = BTreeMap::new();
        let mut start = 0;
        for &count in counts {
            let end = start + count;
            let mut at = None;
            for &kind in &layers.kind[start..end] {
                let step = (at, kind);
                at = Some(*known.entry(step).or_insert_with(|| {
                    all.steps.push(step);
                    all.steps.len() - 1
                }));
            }
            all.ranges
                .extend(at.map(|sequence| ((start, end), sequence)));
            start = end;
        }
        all
    }

    /// Number of sequences.
    pub(crate) fn len(&self) -> usize {
        self.steps.len()
    }

    /// By sequence, the largest of its kinds' figures.
    pub(crate) fn largest(&self, of_kinds: &[f64]) -> Vec<f64> {
        let mut largest: Vec<f64> = Vec::with_capacity(self.len());
        for &(parent, kind) in &self.steps {
            let before = parent.map_or(0.0, |p| largest[p]);
            largest.push(before.max(of_kinds[kind]));
        }
        largest
    }

    /// The sequence with the most layers, the first of several.
    pub(crate) fn longest(&self) -> usize {
        let mut lengths: Vec<usize> = Vec::with_capacity(self.len());
        for (parent, _) in &self.steps {
            lengths.push(parent.map_or(0, |p| lengths[p]) + 1);
        }
        let most = lengths.iter().copied().max();
        lengths.iter().position(|&n| Some(n) == most).unwrap_or(0)
    }
}

/// The best costs of a sequence, from whatever entry layout, to every exit layout.
///
/// Where a stage begins nothing comes before its entry, so of all entry layouts only the best
/// matters: a product is a vector, not a matrix.
struct Product {
    kind: usize,
    parent: Option<usize>,
    /// By exit: cost, the layout before the last layer, and whether the cost is exact.
    cells: Vec<Option<(u64, usize, bool)>>,
}

impl Product {
    /// The layout to which it costs least, the first of several, and the cost.
    fn best(&self) -> Option<(usize, u64)> {
        let cells = self.cells.iter().enumerate();
        let costs = cells.filter_map(|(exit, cell)| cell.map(|(cost, ..)| (cost, exit)));
        costs.min().map(|(cost, exit)| (exit, cost))
    }

    /// The least cost to any layout.
    fn least(&self) -> Option<u64> {
        self.best().map(|(_, cost)| cost)
    }

    /// Whether that is exact.
    fn is_exact(&self) -> bool {
        let best = self.best().and_then(|(exit, _)| self.cells[exit]);
        best.is_none_or(|(.., is_exact)| is_exact)
    }
}

impl<'m> PricedMesh<'m> {
    /// Layer kinds of which each has one way.
    pub(crate) fn new(models: &'m [WeightedLayer<'m>], weights: Weights) -> Self {
        Self::of_variants(&[models.iter().map(Some).collect()], weights)
    }

    /// By number of the choice of what is recomputed, the layer kinds; none where a kind is what
    /// it is under the first.
    pub(crate) fn of_variants(
        variants: &[Vec<Option<&'m WeightedLayer<'m>>>],
        weights: Weights,
    ) -> Self {
        Self::with_messages_from(variants, weights, WORTH_MESSAGES)
    }

    /// The same where choices are ruled out first from so many sums on.
    pub(crate) fn with_messages_from(
        variants: &[Vec<Option<&'m WeightedLayer<'m>>>],
        weights: Weights,
        worth_messages: u64,
    ) -> Self {
        let n_kinds = variants.first().map_or(0, Vec::len);
        // In parallel: a few of them take nearly all of the time.
        let known = (0..n_kinds).flat_map(|kind| {
            let of_kind = variants.iter().enumerate();
            of_kind.filter_map(move |(variant, kinds)| Some((kind, variant, kinds[kind]?)))
        });
        let known: Vec<(usize, usize, &WeightedLayer<'m>)> = known.collect();
        let priced = known.into_par_iter().map(|(kind, variant, layer)| {
            let near = SLACKS.first().map(|slack| (*slack, worth_messages));
            let priced = layer.price(weights, near);
            let way = Way {
                variant,
                layer,
                priced,
            };
            (kind, way)
        });
        let mut ways: Vec<Vec<Way<'m>>> = (0..n_kinds).map(|_| Vec::new()).collect();
        for (kind, way) in priced.collect::<Vec<_>>() {
            ways[kind].push(way);
        }
        PricedMesh {
            matrices: ways.iter().map(|ways| least_of(ways)).collect(),
            weights,
            n_widened: vec![0; n_kinds],
            worth_messages,
            ways,
            costs: BTreeMap::new(),
        }
    }

    /// Best paths of all sequences; `None` where no strategy exists. `settings` are those of the
    /// choices of what is recomputed.
    pub(crate) fn paths(
        &mut self,
        settings: &[Setting<'_>],
        sequences: &Sequences,
    ) -> Vec<Option<StagePath>> {
        let products = self.products(&sequences.steps);
        (0..products.len())
            .map(|p| self.best_path(settings, &products, p))
            .collect()
    }

    /// The objectives of all sequences, quanta.
    pub(crate) fn objectives(&mut self, sequences: &Sequences) -> Vec<Option<u64>> {
        self.products(&sequences.steps)
            .iter()
            .map(Product::least)
            .collect()
    }

    /// The best path of one sequence of kinds.
    pub(crate) fn path(&mut self, settings: &[Setting<'_>], kinds: &[usize]) -> Option<StagePath> {
        let products = self.products(&chain(kinds));
        self.best_path(settings, &products, products.len().checked_sub(1)?)
    }

    /// The objective of that path, quanta.
    pub(crate) fn objective(&mut self, kinds: &[usize]) -> Option<u64> {
        self.products(&chain(kinds)).last()?.least()
    }

    /// How often a kind was priced further.
    #[cfg(test)]
    pub(crate) fn n_widened(&self) -> usize {
        self.n_widened.iter().sum()
    }

    /// Products of the sequences with these steps, whose best paths are exact.
    fn products(&mut self, steps: &[(Option<usize>, usize)]) -> Vec<Product> {
        loop {
            let mut products: Vec<Product> = Vec::with_capacity(steps.len());
            for &(parent, kind) in steps {
                let product = self.extend(&products, parent, kind);
                products.push(product);
            }
            let unsure = (0..products.len()).filter(|&p| !products[p].is_exact());
            let kinds: BTreeSet<usize> = unsure.flat_map(|p| self.unsure(&products, p)).collect();
            if kinds.is_empty() {
                return products;
            }
            kinds.into_iter().for_each(|kind| self.widen(kind));
        }
    }

    /// The kinds of the layers of a sequence's best path whose costs are not exact.
    fn unsure(&self, products: &[Product], last: usize) -> BTreeSet<usize> {
        let mut kinds = BTreeSet::new();
        let mut at = products[last].best().map(|(exit, _)| (last, exit));
        while let Some((p, exit)) = at {
            let product = &products[p];
            let Some((_, entry, _)) = product.cells[exit] else {
                break;
            };
            let cell = self.matrices[product.kind][entry][exit];
            if cell.is_some_and(|cell| !cell.is_exact) {
                kinds.insert(product.kind);
            }
            at = product.parent.map(|parent| (parent, entry));
        }
        kinds
    }

    /// Prices a kind for choices that cost more, or all.
    fn widen(&mut self, kind: usize) {
        self.n_widened[kind] += 1;
        let slack = SLACKS.get(self.n_widened[kind]);
        let near = slack.map(|slack| (*slack, self.worth_messages));
        let weights = self.weights;
        self.ways[kind].par_iter_mut().for_each(|way| {
            if way.priced.exact_below.is_some() {
                way.priced = way.layer.price(weights, near);
            }
        });
        self.matrices[kind] = least_of(&self.ways[kind]);
    }

    /// The best choices for one layer between two boundary layouts of a best path; `None` where
    /// nothing is possible.
    pub(crate) fn decode(&self, kind: usize, entry: usize, exit: usize) -> Option<LayerChoice> {
        let cell = self.matrices[kind][entry][exit].filter(|cell| cell.is_exact)?;
        let way = &self.ways[kind][cell.way];
        Some(LayerChoice {
            variant: way.variant,
            groups: way.layer.decode(&way.priced, entry, exit),
        })
    }

    fn extend(&self, products: &[Product], parent: Option<usize>, kind: usize) -> Product {
        let matrix = &self.matrices[kind];
        let n_exit = matrix.first().map_or(0, Vec::len);
        let mut cells: Vec<Option<(u64, usize, bool)>> = vec![None; n_exit];
        for (before, row) in matrix.iter().enumerate() {
            let sum = match parent {
                None => Some((0, true)),
                Some(p) => products[p].cells[before].map(|(cost, _, is_exact)| (cost, is_exact)),
            };
            let Some((sum, is_exact)) = sum else { continue };
            for (cell, last) in cells.iter_mut().zip(row) {
                let Some(last) = last else { continue };
                let cost = sum + last.cost;
                // The earlier layout of equal ones.
                if cell.is_none_or(|(least, ..)| cost < least) {
                    *cell = Some((cost, before, is_exact && last.is_exact));
                }
            }
        }
        Product {
            kind,
            parent,
            cells,
        }
    }

    fn best_path(
        &mut self,
        settings: &[Setting<'_>],
        products: &[Product],
        last: usize,
    ) -> Option<StagePath> {
        let (exit, _objective) = products[last].best()?;
        let mut boundaries = vec![exit];
        let mut kinds = Vec::new();
        let mut at = Some(last);
        while let Some(p) = at {
            kinds.push(products[p].kind);
            at = products[p].parent;
            let exit = boundaries[boundaries.len() - 1];
            boundaries.push(products[p].cells[exit]?.1);
        }
        boundaries.reverse();
        kinds.reverse();
        let of_layer = |(i, &kind): (usize, &usize)| {
            self.layer_cost(settings, kind, boundaries[i], boundaries[i + 1])
        };
        let layers: Option<Vec<LayerCost>> = kinds.iter().enumerate().map(of_layer).collect();
        let layers = layers?;
        Some(StagePath {
            boundaries,
            cost: layers.iter().fold(LayerCost::default(), LayerCost::then),
            layers,
            #[cfg(test)]
            objective: _objective,
        })
    }

    fn layer_cost(
        &mut self,
        settings: &[Setting<'_>],
        kind: usize,
        entry: usize,
        exit: usize,
    ) -> Option<LayerCost> {
        if let Some(&known) = self.costs.get(&(kind, entry, exit)) {
            return Some(known);
        }
        let cell = self.matrices[kind][entry][exit]?;
        let way = &self.ways[kind][cell.way];
        let choice = way.layer.decode(&way.priced, entry, exit);
        let cost = way.layer.model.evaluate(&settings[way.variant], &choice);
        self.costs.insert((kind, entry, exit), cost);
        Some(cost)
    }
}

/// The steps of one sequence of kinds.
fn chain(kinds: &[usize]) -> Vec<(Option<usize>, usize)> {
    let steps = kinds.iter().enumerate();
    steps.map(|(i, &kind)| (i.checked_sub(1), kind)).collect()
}

/// The least of the ways of a layer kind between every pair of layouts; of equal ones the first.
fn least_of(ways: &[Way<'_>]) -> Matrix {
    let cell = |way: usize, cost: &Option<u64>| {
        let exact_below = ways[way].priced.exact_below;
        cost.map(|cost| Cell {
            cost,
            way,
            is_exact: exact_below.is_none_or(|below| cost < below),
        })
    };
    let Some((first, others)) = ways.split_first() else {
        return Matrix::new();
    };
    let rows = first.priced.matrix.iter();
    let mut least: Matrix = rows
        .map(|row| row.iter().map(|cost| cell(0, cost)).collect())
        .collect();
    for (i, way) in others.iter().enumerate() {
        let new = way.priced.matrix.iter().flatten();
        for (known, new) in least.iter_mut().flatten().zip(new) {
            if let Some(new) = cell(i + 1, new)
                && known.is_none_or(|known| new.cost < known.cost)
            {
                *known = Some(new);
            }
        }
    }
    least
}
