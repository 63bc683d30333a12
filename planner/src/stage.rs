//! Stages of layers on one mesh: min-plus products of layer matrices under prices on memory.
//!
//! A stage's cost depends on the sequence of its layers' kinds only, so equal sequences are
//! computed once however many ranges of layers they describe: for a stack of equal layers the
//! products are the powers of one matrix.

use crate::groups::Setting;
use crate::layer_model::{LayerCost, PricedLayer, WeightedLayer, Weights};
use crate::layers::Layers;
use std::collections::BTreeMap;

/// One mesh with its layer models, priced under some weights.
pub(crate) struct PricedMesh<'m> {
    models: &'m [WeightedLayer<'m>],
    priced: Vec<PricedLayer<'m>>,
    /// Cost of a layer kind between two boundary layouts, once asked for.
    costs: BTreeMap<(usize, usize, usize), LayerCost>,
}

/// A sequence of layers with the best boundary layouts.
#[derive(Clone, Debug)]
pub(crate) struct StagePath {
    /// Layout index at each boundary, entry of the first layer to exit of the last.
    pub boundaries: Vec<usize>,
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
}

/// The best costs of a sequence from every entry layout to every exit layout.
struct Product {
    kind: usize,
    parent: Option<usize>,
    /// `[entry][exit]`: cost and the layout before the last layer.
    cells: Vec<Vec<Option<(u64, usize)>>>,
}

impl Product {
    /// The least cost between any two layouts.
    fn least(&self) -> Option<u64> {
        let costs = self.cells.iter().flatten();
        costs.filter_map(|c| c.map(|c| c.0)).min()
    }
}

impl<'m> PricedMesh<'m> {
    pub(crate) fn new(models: &'m [WeightedLayer<'m>], weights: Weights) -> Self {
        PricedMesh {
            models,
            priced: models.iter().map(|m| m.price(weights)).collect(),
            costs: BTreeMap::new(),
        }
    }

    /// Best paths of all sequences; `None` where no strategy exists.
    pub(crate) fn paths(
        &mut self,
        s: &Setting<'_>,
        sequences: &Sequences,
    ) -> Vec<Option<StagePath>> {
        let mut products: Vec<Product> = Vec::with_capacity(sequences.len());
        for &(parent, kind) in &sequences.steps {
            let product = self.extend(&products, parent, kind);
            products.push(product);
        }
        (0..products.len())
            .map(|p| self.best_path(s, &products, p))
            .collect()
    }

    /// The objectives of all sequences, quanta.
    pub(crate) fn objectives(&self, sequences: &Sequences) -> Vec<Option<u64>> {
        let mut products: Vec<Product> = Vec::with_capacity(sequences.len());
        for &(parent, kind) in &sequences.steps {
            let product = self.extend(&products, parent, kind);
            products.push(product);
        }
        products.iter().map(Product::least).collect()
    }

    /// The best path of one sequence of kinds.
    pub(crate) fn path(&mut self, s: &Setting<'_>, kinds: &[usize]) -> Option<StagePath> {
        let products = self.chain(kinds);
        self.best_path(s, &products, products.len().checked_sub(1)?)
    }

    /// The objective of that path, quanta.
    pub(crate) fn objective(&self, kinds: &[usize]) -> Option<u64> {
        self.chain(kinds).last()?.least()
    }

    fn chain(&self, kinds: &[usize]) -> Vec<Product> {
        let mut products: Vec<Product> = Vec::with_capacity(kinds.len());
        for (i, &kind) in kinds.iter().enumerate() {
            let product = self.extend(&products, i.checked_sub(1), kind);
            products.push(product);
        }
        products
    }

    /// The choices of one layer's groups between two boundary layouts.
    pub(crate) fn decode(&self, kind: usize, entry: usize, exit: usize) -> Vec<u32> {
        self.models[kind].decode(&self.priced[kind], entry, exit)
    }

    fn extend(&self, products: &[Product], parent: Option<usize>, kind: usize) -> Product {
        let matrix = &self.priced[kind].matrix;
        let cells = match parent {
            None => matrix
                .iter()
                .map(|row| row.iter().map(|c| c.map(|c| (c, 0))).collect())
                .collect(),
            Some(p) => products[p]
                .cells
                .iter()
                .map(|row| {
                    (0..self.models[kind].model.n_exit())
                        .map(|exit| {
                            row.iter()
                                .zip(matrix)
                                .enumerate()
                                .filter_map(|(mid, (left, right))| {
                                    Some((left.as_ref()?.0 + right[exit]?, mid))
                                })
                                .min()
                        })
                        .collect()
                })
                .collect(),
        };
        Product {
            kind,
            parent,
            cells,
        }
    }

    fn best_path(
        &mut self,
        s: &Setting<'_>,
        products: &[Product],
        last: usize,
    ) -> Option<StagePath> {
        let cells = &products[last].cells;
        let (_objective, entry, exit) = cells
            .iter()
            .enumerate()
            .flat_map(|(i, row)| {
                row.iter()
                    .enumerate()
                    .filter_map(move |(j, c)| c.map(|c| (c.0, i, j)))
            })
            .min()?;
        let mut boundaries = vec![exit];
        let mut kinds = Vec::new();
        let mut at = Some(last);
        while let Some(p) = at {
            kinds.push(products[p].kind);
            at = products[p].parent;
            let exit = boundaries[boundaries.len() - 1];
            boundaries.push(if at.is_some() {
                products[p].cells[entry][exit]?.1
            } else {
                entry
            });
        }
        boundaries.reverse();
        kinds.reverse();
        let mut cost = LayerCost::default();
        for (i, &kind) in kinds.iter().enumerate() {
            let c = self.layer_cost(s, kind, boundaries[i], boundaries[i + 1]);
            cost.time = cost.time.plus(c.time);
            cost.static_bytes = cost.static_bytes.saturating_add(c.static_bytes);
            cost.saved_bytes = cost.saved_bytes.saturating_add(c.saved_bytes);
            cost.transient_bytes = cost.transient_bytes.max(c.transient_bytes);
        }
        Some(StagePath {
            boundaries,
            cost,
            #[cfg(test)]
            objective: _objective,
        })
    }

    fn layer_cost(&mut self, s: &Setting<'_>, kind: usize, entry: usize, exit: usize) -> LayerCost {
        if let Some(&known) = self.costs.get(&(kind, entry, exit)) {
            return known;
        }
        let choice = self.decode(kind, entry, exit);
        let cost = self.models[kind].model.evaluate(s, &choice);
        self.costs.insert((kind, entry, exit), cost);
        cost
    }
}
