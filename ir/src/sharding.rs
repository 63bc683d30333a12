//! Sharding specs: how a tensor lies over the axes of a logical mesh.
//!
//! For each tensor dim a spec lists the axes that shard it, major first; an axis that
//! appears nowhere replicates. A **partial** axis holds addends (or maxima, ...) that a
//! reduction must still combine. An axis is used at most once over all dims and partials.
//!
//! Layout of an uneven dim (Shardy pads the same way): a dim of length `len` with unit `u`
//! has `ceil(len/u)` units. The axes split it one after the other, major first; an axis of
//! size `n` splits an extent of `k` units into `n` blocks of `ceil(k/n)` units, the last ones
//! short or empty. Every rank's buffer has the padded length, so that the ranks of a role
//! are equal; elements past the valid length are padding and hold zero. Because the split is
//! nested, gathering the minor-most axis and cropping gives exactly the layout without it.

use crate::collective::Reduction;
use crate::{AxisId, LogicalMesh};
use serde::{Deserialize, Serialize};
use smallvec::{SmallVec, smallvec};
use std::collections::BTreeMap;

/// Axes of one dim, major first. Specs are copied for every value, use and buffer of a plan, so
/// as many axes as meshes usually have lie in the spec itself.
pub type Axes = SmallVec<[AxisId; 4]>;

/// Shardings of a tensor's dims, in order. Three are those of activations (samples, positions,
/// features); the rare tensors of more dims lie beside.
pub type Dims = SmallVec<[DimSharding; 3]>;

/// How partial values over an axis combine.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum ReduceKind {
    /// Addition.
    Sum,
    /// Maximum.
    Max,
    /// Minimum.
    Min,
    /// `log(exp(a) + exp(b))`: partial log-sum-exps of a split vocabulary. No library has it.
    LogSumExp,
}

/// Sharding of one dim.
#[derive(
    Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(deny_unknown_fields)]
pub struct DimSharding {
    /// Axes that shard the dim, major first; empty when the dim is whole.
    pub axes: Axes,
    /// Shards are multiples of this many elements; 1 when the dim is whole.
    pub unit: u64,
    /// Where shards go around a ring, how many places they have gone: of a dim that one axis of n
    /// ranks shards, rank c has the shard that rank c - turns (mod n) has otherwise.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub turns: u32,
}

fn is_zero(turns: &u32) -> bool {
    *turns == 0
}

impl DimSharding {
    /// A dim that is not sharded.
    pub fn whole() -> Self {
        DimSharding {
            axes: Axes::new(),
            unit: 1,
            turns: 0,
        }
    }
    /// A dim sharded by `axes` in units of `unit`; whole when `axes` is empty.
    pub fn by(axes: impl Into<Axes>, unit: u64) -> Self {
        let axes = axes.into();
        if axes.is_empty() {
            Self::whole()
        } else {
            DimSharding {
                axes,
                unit,
                turns: 0,
            }
        }
    }
    /// True when no axis shards the dim.
    pub fn is_whole(&self) -> bool {
        self.axes.is_empty()
    }
}

/// How a tensor lies over a logical mesh.
#[derive(
    Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(deny_unknown_fields)]
pub struct ShardingSpec {
    /// One entry per tensor dim.
    pub dims: Dims,
    /// Axes over which the values await a reduction.
    pub partial: BTreeMap<AxisId, ReduceKind>,
}

/// The part of a dim that a rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalRange {
    /// First global index held (where `valid` is 0: where the empty shard would start).
    pub start: u64,
    /// Number of real elements held.
    pub valid: u64,
    /// Length of the rank's buffer along the dim; `valid <= padded`.
    pub padded: u64,
}

impl ShardingSpec {
    /// Every rank holds the whole tensor of `rank` dims.
    pub fn replicated(rank: usize) -> Self {
        ShardingSpec {
            dims: smallvec![DimSharding::whole(); rank],
            partial: BTreeMap::new(),
        }
    }
    /// True when no dim is sharded and nothing is partial.
    pub fn is_replicated(&self) -> bool {
        self.partial.is_empty() && self.dims.iter().all(DimSharding::is_whole)
    }
    /// True when `axis` neither shards a dim nor is partial.
    pub fn replicates(&self, axis: AxisId) -> bool {
        !self.partial.contains_key(&axis) && self.dims.iter().all(|d| !d.axes.contains(&axis))
    }
    /// The dim that `axis` shards, if any.
    pub fn dim_of(&self, axis: AxisId) -> Option<usize> {
        self.dims.iter().position(|d| d.axes.contains(&axis))
    }
    /// Length of every rank's (padded) buffer along each dim of a tensor of lengths `lens`.
    pub fn local_shape(&self, lens: &[u64], mesh: &LogicalMesh) -> Vec<u64> {
        lens.iter()
            .zip(&self.dims)
            .map(|(&len, d)| padded_len(len, d, mesh))
            .collect()
    }
    /// Elements of every rank's (padded) buffer; saturating.
    pub fn local_elements(&self, lens: &[u64], mesh: &LogicalMesh) -> u64 {
        let padded = lens.iter().zip(&self.dims);
        padded.fold(1u64, |n, (&len, d)| {
            n.saturating_mul(padded_len(len, d, mesh))
        })
    }
    /// The range that the rank at `coords` holds along each dim.
    pub fn local_ranges(
        &self,
        lens: &[u64],
        mesh: &LogicalMesh,
        coords: &[u32],
    ) -> Vec<LocalRange> {
        lens.iter()
            .zip(&self.dims)
            .map(|(&len, d)| local_range(len, d, mesh, coords))
            .collect()
    }
    /// Violations of the invariants against a mesh: unknown axes, an axis used twice, a
    /// zero unit. Empty when well-formed.
    pub fn problems(&self, mesh: &LogicalMesh) -> Vec<String> {
        let mut seen = vec![false; mesh.axes.len()];
        let mut problems = Vec::new();
        for &axis in self
            .dims
            .iter()
            .flat_map(|d| &d.axes)
            .chain(self.partial.keys())
        {
            match seen.get_mut(axis.index()) {
                None => problems.push(format!(
                    "{axis} does not exist in a mesh of {} axes",
                    mesh.axes.len()
                )),
                Some(used) if *used => {
                    problems.push(format!("axis `{}` is used twice", mesh.name(axis)))
                }
                Some(used) => *used = true,
            }
        }
        for (i, d) in self.dims.iter().enumerate() {
            if d.unit == 0 || (d.is_whole() && d.unit != 1) {
                problems.push(format!(
                    "dim {i} has unit {} with {} axes",
                    d.unit,
                    d.axes.len()
                ));
            }
            let places = match d.axes[..] {
                [axis] => mesh.axes.get(axis.index()).map_or(0, |a| a.size),
                _ => 0,
            };
            if d.turns > 0 && d.turns >= places {
                problems.push(format!(
                    "dim {i} has gone {} places around a ring of {places}",
                    d.turns
                ));
            }
        }
        problems
    }
    /// Text form: dims in brackets with the names of their axes, then the partial axes:
    /// `[x, _, y+z] partial(w: sum)`; `x>2` has gone two places around a ring.
    pub fn display(&self, mesh: &LogicalMesh) -> String {
        let name = |a: AxisId| mesh.axes.get(a.index()).map_or("?", |a| a.name.as_str());
        let mut out = String::from("[");
        for (i, d) in self.dims.iter().enumerate() {
            out += if i == 0 { "" } else { ", " };
            out += if d.is_whole() { "_" } else { "" };
            for (k, &axis) in d.axes.iter().enumerate() {
                out += if k == 0 { "" } else { "+" };
                out += name(axis);
            }
            if !d.is_whole() && d.unit != 1 {
                out += &format!("/{}", d.unit);
            }
            if d.turns > 0 {
                out += &format!(">{}", d.turns);
            }
        }
        out += "]";
        for (i, (&axis, kind)) in self.partial.iter().enumerate() {
            out += if i == 0 { " partial(" } else { ", " };
            out += name(axis);
            out += ": ";
            out += reduce_name(*kind);
        }
        out += if self.partial.is_empty() { "" } else { ")" };
        out
    }
}

impl ReduceKind {
    /// The reduction that libraries have of it; none of log-sum-exps.
    pub fn of_libraries(self) -> Option<Reduction> {
        match self {
            ReduceKind::Sum => Some(Reduction::Sum),
            ReduceKind::Max => Some(Reduction::Max),
            ReduceKind::Min => Some(Reduction::Min),
            ReduceKind::LogSumExp => None,
        }
    }
}

/// The name of a reduction in text forms.
pub fn reduce_name(kind: ReduceKind) -> &'static str {
    kind.of_libraries().map_or("log_sum_exp", Reduction::name)
}

fn padded_len(len: u64, dim: &DimSharding, mesh: &LogicalMesh) -> u64 {
    if dim.is_whole() {
        return len;
    }
    let units = len.div_ceil(dim.unit.max(1));
    dim.axes
        .iter()
        .fold(units, |k, &a| k.div_ceil(mesh.size(a).max(1)))
        .saturating_mul(dim.unit)
}

/// The part of a dim of length `len` that the rank at `coords` holds; see the module header.
pub fn local_range(len: u64, dim: &DimSharding, mesh: &LogicalMesh, coords: &[u32]) -> LocalRange {
    if let (turns @ 1.., [axis]) = (dim.turns, &dim.axes[..]) {
        let (n, mut origin) = (mesh.size(*axis).max(1), coords.to_vec());
        let at = u64::from(origin[axis.index()]) + n - u64::from(turns) % n;
        origin[axis.index()] = (at % n) as u32;
        let still = DimSharding {
            turns: 0,
            ..dim.clone()
        };
        return local_range(len, &still, mesh, &origin);
    }
    if dim.is_whole() {
        return LocalRange {
            start: 0,
            valid: len,
            padded: len,
        };
    }
    let unit = dim.unit.max(1);
    let mut block = len.div_ceil(unit);
    let mut start = 0u64;
    for &axis in &dim.axes {
        block = block.div_ceil(mesh.size(axis).max(1));
        start += u64::from(coords[axis.index()]) * block;
        // A nested block may be cut short by its parent's end; `extent` below accounts for it.
    }
    let extent = valid_units(len.div_ceil(unit), dim, mesh, coords);
    let start = start.saturating_mul(unit);
    let valid = (extent * unit).min(len.saturating_sub(start));
    LocalRange {
        start,
        valid,
        padded: block * unit,
    }
}

fn valid_units(units: u64, dim: &DimSharding, mesh: &LogicalMesh, coords: &[u32]) -> u64 {
    let (mut block, mut extent) = (units, units);
    for &axis in &dim.axes {
        block = block.div_ceil(mesh.size(axis).max(1));
        extent = extent
            .saturating_sub(u64::from(coords[axis.index()]) * block)
            .min(block);
    }
    extent
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Specs with more dims and axes than lie in them are written and read like all others.
    #[test]
    fn large_specs_survive_json() {
        let axes = |ids: std::ops::Range<u32>| ids.map(AxisId).collect::<Axes>();
        let spec = ShardingSpec {
            dims: [axes(0..6), axes(6..6), axes(6..7), axes(7..7), axes(7..12)]
                .map(|axes| DimSharding::by(axes, 2))
                .into_iter()
                .collect(),
            partial: [(AxisId(12), ReduceKind::Max)].into(),
        };
        let text = serde_json::to_string(&spec).expect("specs are written");
        assert!(
            text.starts_with(r#"{"dims":[{"axes":[0,1,2,3,4,5],"unit":2},{"axes":[],"unit":1}"#),
            "{text}"
        );
        let read: ShardingSpec = serde_json::from_str(&text).expect("specs are read");
        assert_eq!(read, spec);
    }
}
