//! Gradients that are summed in one layer for a parameter of another one, as those of a table that
//! embedding and head have in common.
//!
//! Layers are modelled one by one, so what such a sum costs on its way to the parameter's layer is
//! not known in full: that layer may want it in any layout. But whatever that is, addends that
//! ranks hold have to be added up. The least that this can cost is charged where the sum is made,
//! so that the objective stays a bound; without it a head could be split over slow links for nothing.

use crate::groups::{Group, Setting};
use crate::prices::Prices;
use ir::sharding::DimSharding;
use ir::{Region, ShardingSpec, ValueId};

/// Adds to each choice of a group the least time that its sums for other layers take to be whole.
pub(super) fn price_sums(s: &Setting<'_>, prices: &mut Prices<'_>, group: &mut Group) {
    let graph = &s.training.graph;
    let sums = group.ops.iter().enumerate().filter_map(|(k, &id)| {
        let sum = *graph.op(id).outputs.first()?;
        s.index.is_taken_elsewhere(sum).then_some((k, sum))
    });
    let sums: Vec<(usize, ValueId)> = sums.collect();
    for choice in &mut group.choices {
        for &(k, sum) in &sums {
            let Some(made) = choice.ops[k].specs.results.first() else {
                continue;
            };
            let ty = graph.ty(sum);
            let lens = ty.shape.bind(s.batch);
            let buckets = s.buckets.of(sum, Region::StepEnd);
            let whole = whole(made).into_iter();
            let least = whole
                .filter_map(|to| prices.price(made, &to, &lens, ty.dtype, buckets))
                .min_by(f64::total_cmp);
            choice.elsewhere_s += least.unwrap_or(0.0);
        }
    }
}

/// The layouts in which nothing is to be added any more, and all else is as it was: on every rank,
/// or scattered over a dim; none where nothing is to be added.
fn whole(made: &ShardingSpec) -> Vec<ShardingSpec> {
    if made.partial.is_empty() {
        return Vec::new();
    }
    let axes = made.partial.keys().copied();
    let mut added = made.clone();
    added.partial.clear();
    let scattered = (0..added.dims.len()).filter(|&d| added.dims[d].turns == 0);
    let scattered = scattered.map(|d| {
        let mut to = added.clone();
        let own = &added.dims[d];
        let all: Vec<_> = own.axes.iter().copied().chain(axes.clone()).collect();
        to.dims[d] = DimSharding::by(all, own.unit);
        to
    });
    let mut all: Vec<ShardingSpec> = scattered.collect();
    all.push(added);
    all
}
