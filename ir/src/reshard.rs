//! How one sharding spec becomes another: the only definition of it.
//!
//! Within a mesh a layout changes by [`LayoutStep`]s, each one collective or a local slice.
//! [`paths`] enumerates the sensible sequences; the planner prices them and records one,
//! lowering replays it. Between meshes a tensor moves by [`tiles`].
//!
//! Data movement of a step, in local (padded) coordinates, `c` being the rank's coordinate
//! along the axis, `L` the padded length of a piece:
//! * `AllGather` places member `j`'s piece at `j*L` and crops to the result's length;
//! * `Slice` takes `[c*L, (c+1)*L)`, zeros past the operand's end;
//! * `ReduceScatter` reduces, then slices; `AllReduce` reduces in place, or, where no library has
//!   the reduction, gathers the members' values one after the other and combines them in an op;
//! * `AllToAll` slices dim `to` into pieces, sends piece `j` to member `j`, and places what
//!   member `j` sent at `j*L` of dim `from`, cropped.
//!
//! A step that removes an axis from a dim removes the minor-most one, a step that adds one
//! adds it as the minor-most; that is what makes these rules exact for uneven shards.

use crate::collective::{CollectiveKind, Reduction};
use crate::mesh::LogicalMesh;
use crate::sharding::{DimSharding, LocalRange, ReduceKind, ShardingSpec};
use crate::{AxisId, OpKind, Rank};
use serde::{Deserialize, Serialize};

/// One step of a layout change within a mesh.
#[derive(
    Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum LayoutStep {
    /// Combines partial values over one or more axes: by the collective of that name, or, where no
    /// library has the reduction, by a gather and an op behind it ([`LayoutStep::members`]).
    AllReduce {
        /// Partial axes, ascending, all of the same reduction.
        axes: Vec<AxisId>,
    },
    /// Combines partial values over `axis`, which then shards `dim`, by a reduction that libraries
    /// have.
    ReduceScatter {
        /// A partial axis.
        axis: AxisId,
        /// The dim it comes to shard.
        dim: usize,
        /// Unit of the dim's sharding.
        unit: u64,
    },
    /// Gathers `dim` over `axis`, its minor-most.
    AllGather {
        /// The axis.
        axis: AxisId,
        /// The dim.
        dim: usize,
    },
    /// `axis` shards `to` instead of `from`.
    AllToAll {
        /// The axis, minor-most of `from`.
        axis: AxisId,
        /// The dim that is gathered.
        from: usize,
        /// The dim that is split.
        to: usize,
        /// Unit of the sharding of `to`.
        unit: u64,
    },
    /// Every rank hands its shard of `dim` to the next rank of the ring that `axis` is. No way from
    /// one spec to another: ops whose operands go around ask for it.
    Shift {
        /// The axis, the only one of `dim`.
        axis: AxisId,
        /// The dim.
        dim: usize,
        /// Places that shards have gone afterwards: one more, or none where they are home again.
        turns: u32,
    },
    /// Every rank keeps its piece of `dim`; no communication.
    Slice {
        /// An axis that replicates the tensor.
        axis: AxisId,
        /// The dim.
        dim: usize,
        /// Unit of the dim's sharding.
        unit: u64,
    },
}

/// A rank's part of a tensor cut along a dim into pieces of equal length, which stand one after
/// the other, each row-major. Zeros fill the pieces beyond the part's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pieces {
    /// The dim.
    pub dim: usize,
    /// Number of pieces, one for each member of a group.
    pub n: u32,
    /// Elements of a piece along the dim.
    pub len: u64,
}

/// Most rows of pieces that a collective moves as they stand: a library takes a call for each
/// row, and launches the calls of a group together. With more rows, copies cost less.
pub const MOST_ROWS: u64 = 16;

/// The rows in which the pieces along `dim` of a part with these lengths stand, each `n`
/// contiguous pieces after the other.
pub fn rows(part: &[u64], dim: usize) -> u64 {
    part[..dim].iter().fold(1, |n, &len| n.saturating_mul(len))
}

impl Pieces {
    /// The cut of a part with these lengths, or `None` where a library moves it as it stands:
    /// the pieces fill the dim, and there are few [rows](MOST_ROWS) of them.
    pub fn of(part: &[u64], dim: usize, n: u32, len: u64) -> Option<Pieces> {
        let few = rows(part, dim) <= MOST_ROWS;
        let exact = len.checked_mul(u64::from(n)) == Some(part[dim]);
        let as_it_stands = few && exact || part.contains(&0);
        (!as_it_stands).then_some(Pieces { dim, n, len })
    }
    /// Lengths of all pieces together: `[n, ...]`, with the piece's length for the dim.
    pub fn shape(&self, part: &[u64]) -> Vec<u64> {
        let mut shape = part.to_vec();
        shape[self.dim] = self.len;
        shape.insert(0, u64::from(self.n));
        shape
    }
}

/// Partial values of a group's members, which every member has gathered along a new first dim, in
/// group order: the operand of the op that combines them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Members {
    /// How they combine.
    pub kind: ReduceKind,
    /// Lengths of all of them together.
    pub lens: Vec<u64>,
    /// Their spec.
    pub spec: ShardingSpec,
}

impl Members {
    /// The op that combines them.
    pub fn op(&self) -> OpKind {
        OpKind::Reduce {
            kind: self.kind,
            dims: vec![0],
        }
    }
}

impl LayoutStep {
    /// The dims along which its collective cuts the operand, and puts the result together.
    pub fn cuts(&self) -> [Option<usize>; 2] {
        match *self {
            LayoutStep::AllReduce { .. } | LayoutStep::Slice { .. } | LayoutStep::Shift { .. } => {
                [None, None]
            }
            LayoutStep::ReduceScatter { dim, .. } => [Some(dim), None],
            LayoutStep::AllGather { dim, .. } => [None, Some(dim)],
            LayoutStep::AllToAll { from, to, .. } => [Some(to), Some(from)],
        }
    }
    /// The pieces that its collective needs of operand and result, for a group of `n` and parts
    /// with these lengths before and after; `None` where it moves them as they stand.
    pub fn pieces(&self, n: u32, before: &[u64], after: &[u64]) -> [Option<Pieces>; 2] {
        let [cut, joined] = self.cuts();
        [
            cut.and_then(|dim| Pieces::of(before, dim, n, after[dim])),
            joined.and_then(|dim| Pieces::of(after, dim, n, before[dim])),
        ]
    }
    /// Axes of the step's group.
    pub fn axes(&self) -> Vec<AxisId> {
        match self {
            LayoutStep::AllReduce { axes } => axes.clone(),
            LayoutStep::ReduceScatter { axis, .. }
            | LayoutStep::AllGather { axis, .. }
            | LayoutStep::AllToAll { axis, .. }
            | LayoutStep::Shift { axis, .. }
            | LayoutStep::Slice { axis, .. } => vec![*axis],
        }
    }
    /// The collective, with the reduction that `before` says; `None` for a slice.
    pub fn collective(&self, before: &ShardingSpec) -> Option<CollectiveKind> {
        let kind = |a: Option<&AxisId>| {
            let kind = a.and_then(|a| before.partial.get(a));
            kind.map_or(Some(Reduction::Sum), |k| k.of_libraries())
        };
        match self {
            LayoutStep::AllReduce { axes } => Some(match kind(axes.first()) {
                Some(reduction) => CollectiveKind::AllReduce(reduction),
                None => CollectiveKind::AllGather,
            }),
            LayoutStep::ReduceScatter { axis, .. } => {
                kind(Some(axis)).map(CollectiveKind::ReduceScatter)
            }
            LayoutStep::AllGather { .. } => Some(CollectiveKind::AllGather),
            LayoutStep::AllToAll { .. } => Some(CollectiveKind::AllToAll),
            LayoutStep::Shift { .. } => Some(CollectiveKind::Shift),
            LayoutStep::Slice { .. } => None,
        }
    }
    /// The members' values that it gathers, of a tensor of lengths `lens`, where it is a reduction
    /// that no library has and applies to `before`.
    pub fn members(
        &self,
        before: &ShardingSpec,
        lens: &[u64],
        mesh: &LogicalMesh,
    ) -> Option<Members> {
        let LayoutStep::AllReduce { axes } = self else {
            return None;
        };
        let kind = *before.partial.get(axes.first()?)?;
        let mut spec = match kind.of_libraries() {
            None => self.apply(before)?,
            Some(_) => return None,
        };
        spec.dims.insert(0, DimSharding::whole());
        let n = axes.iter().map(|&a| mesh.size(a)).product();
        let lens = [&[n], lens].concat();
        Some(Members { kind, lens, spec })
    }
    /// The spec after the step, or `None` when the step does not apply to `before`.
    pub fn apply(&self, before: &ShardingSpec) -> Option<ShardingSpec> {
        let mut s = before.clone();
        match self {
            LayoutStep::AllReduce { axes } => {
                let first = before.partial.get(axes.first()?)?;
                for a in axes {
                    (before.partial.get(a) == Some(first)).then_some(())?;
                    s.partial.remove(a)?;
                }
            }
            LayoutStep::ReduceScatter { axis, dim, unit } => {
                s.partial.remove(axis)?.of_libraries()?;
                push_axis(&mut s, *axis, *dim, *unit)?;
            }
            LayoutStep::AllGather { axis, dim } => pop_axis(&mut s, *axis, *dim)?,
            LayoutStep::AllToAll {
                axis,
                from,
                to,
                unit,
            } => {
                (from != to).then_some(())?;
                pop_axis(&mut s, *axis, *from)?;
                push_axis(&mut s, *axis, *to, *unit)?;
            }
            LayoutStep::Shift { axis, dim, turns } => {
                let d = s.dims.get_mut(*dim)?;
                let is_next = *turns == d.turns.checked_add(1)? || (*turns == 0 && d.turns > 0);
                (d.axes[..] == [*axis] && is_next).then_some(())?;
                d.turns = *turns;
            }
            LayoutStep::Slice { axis, dim, unit } => {
                before.replicates(*axis).then_some(())?;
                push_axis(&mut s, *axis, *dim, *unit)?;
            }
        }
        Some(s)
    }
}

fn push_axis(s: &mut ShardingSpec, axis: AxisId, dim: usize, unit: u64) -> Option<()> {
    let d = s.dims.get_mut(dim)?;
    (unit > 0 && d.turns == 0 && (d.is_whole() || d.unit == unit)).then_some(())?;
    d.axes.push(axis);
    d.unit = unit;
    Some(())
}

fn pop_axis(s: &mut ShardingSpec, axis: AxisId, dim: usize) -> Option<()> {
    let d = s.dims.get_mut(dim)?;
    (d.axes.last() == Some(&axis) && d.turns == 0).then_some(())?;
    d.axes.pop();
    if d.axes.is_empty() {
        *d = DimSharding::whole();
    }
    Some(())
}

/// Replays a path; `None` when some step does not apply.
pub fn apply_all(steps: &[LayoutStep], from: &ShardingSpec) -> Option<ShardingSpec> {
    steps
        .iter()
        .try_fold(from.clone(), |s, step| step.apply(&s))
}

/// Longest path that is enumerated; enough for three axes that all change twice.
const MAX_STEPS: usize = 6;
/// Enumeration stops at this many paths; shorter ones come first.
const MAX_PATHS: usize = 64;

/// The sequences of steps that turn `from` into `to`, shortest first, then in a fixed order.
///
/// Every step makes progress: it reduces a partial axis that `to` does not have, removes an
/// axis that stands where `to` does not want it, or adds one where `to` wants it next. So
/// the enumeration is finite and holds no useless detours. Empty exactly when no sequence
/// exists (`to` is partial where `from` is not, or the number of dims differs); a single
/// empty path when the specs are equal.
pub fn paths(from: &ShardingSpec, to: &ShardingSpec) -> Vec<Vec<LayoutStep>> {
    if from.dims.len() != to.dims.len()
        || to
            .partial
            .iter()
            .any(|(a, k)| from.partial.get(a) != Some(k))
    {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut frontier = vec![(from.clone(), Vec::new())];
    for _ in 0..=MAX_STEPS {
        let mut next = Vec::new();
        for (spec, path) in frontier {
            if spec == *to {
                found.push(path);
                if found.len() == MAX_PATHS {
                    return found;
                }
                continue;
            }
            for step in useful_steps(&spec, to) {
                if let Some(after) = step.apply(&spec) {
                    let mut longer: Vec<LayoutStep> = path.clone();
                    longer.push(step);
                    next.push((after, longer));
                }
            }
        }
        frontier = next;
    }
    found
}

fn useful_steps(s: &ShardingSpec, to: &ShardingSpec) -> Vec<LayoutStep> {
    let mut steps = Vec::new();
    // The dim where `to` wants `axis` next, if the dim's present axes lead up to it.
    let wanted = |axis: AxisId| -> Option<(usize, u64)> {
        let dim = to.dim_of(axis)?;
        let (have, want) = (&s.dims[dim], &to.dims[dim]);
        let fits = have.is_whole() || have.unit == want.unit;
        let next = want.axes.get(have.axes.len()) == Some(&axis);
        (fits && next && want.axes.starts_with(&have.axes)).then_some((dim, want.unit))
    };
    let reducible: Vec<AxisId> = s
        .partial
        .keys()
        .filter(|a| !to.partial.contains_key(a))
        .copied()
        .collect();
    for &axis in &reducible {
        if let Some((dim, unit)) = wanted(axis) {
            steps.push(LayoutStep::ReduceScatter { axis, dim, unit });
        }
    }
    // All-reduce: every subset that is homogeneous matters little; offer each axis alone and
    // the largest homogeneous set.
    for &axis in &reducible {
        steps.push(LayoutStep::AllReduce { axes: vec![axis] });
    }
    for &first in &reducible {
        let same: Vec<AxisId> = reducible
            .iter()
            .filter(|a| s.partial[a] == s.partial[&first])
            .copied()
            .collect();
        if same.len() > 1 && same[0] == first {
            steps.push(LayoutStep::AllReduce { axes: same });
        }
    }
    for (dim, have) in s.dims.iter().enumerate() {
        let want = &to.dims[dim];
        let leads =
            want.axes.starts_with(&have.axes) && (have.is_whole() || have.unit == want.unit);
        if let (Some(&axis), false) = (have.axes.last(), leads) {
            if let Some((to_dim, unit)) = wanted(axis).filter(|(d, _)| *d != dim) {
                steps.push(LayoutStep::AllToAll {
                    axis,
                    from: dim,
                    to: to_dim,
                    unit,
                });
            }
            steps.push(LayoutStep::AllGather { axis, dim });
        }
    }
    for (dim, want) in to.dims.iter().enumerate() {
        if let Some(&axis) = want.axes.get(s.dims[dim].axes.len())
            && s.replicates(axis)
            && wanted(axis).is_some()
        {
            steps.push(LayoutStep::Slice {
                axis,
                dim,
                unit: want.unit,
            });
        }
    }
    steps
}

/// A spec on a mesh.
#[derive(Clone, Copy, Debug)]
pub struct Placement<'a> {
    /// The mesh.
    pub mesh: &'a LogicalMesh,
    /// The spec; a transfer needs one without partial axes.
    pub spec: &'a ShardingSpec,
}

/// One block that moves from a rank of one mesh to a rank of another: `start..start+len`
/// along each dim, in global coordinates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Sender.
    pub from: Rank,
    /// Receiver.
    pub to: Rank,
    /// First global index along each dim.
    pub start: Vec<u64>,
    /// Length along each dim, at least 1.
    pub len: Vec<u64>,
}

/// The blocks that the rank at `to_coords` receives so that it holds its shard of a tensor
/// of lengths `lens`; together they cover its valid range exactly once. Senders ascend.
///
/// Where sender and receiver are the same rank the block is a local copy. Time in proportion to
/// the blocks, not to the senders.
pub fn tiles_to(
    lens: &[u64],
    from: Placement<'_>,
    to: Placement<'_>,
    to_coords: &[u32],
) -> Vec<Tile> {
    let want = to.spec.local_ranges(lens, to.mesh, to_coords);
    let replica = source_replica(from, to, to_coords);
    tiles_of(lens, from, &want, replica, to.mesh.rank_at(to_coords))
}

/// Which of the senders that hold the same shard the receiver at `to_coords` takes its blocks
/// from: the receiver of replica `r` of `R` and of shard `s` takes replica `(r + s R) mod k` of
/// `k`. Equal layouts on equal meshes pair up, and a tensor that all senders hold comes to
/// receivers of different pieces from different senders.
pub fn source_replica(from: Placement<'_>, to: Placement<'_>, to_coords: &[u32]) -> u64 {
    let replica = index_over(to, to_coords, |a| to.spec.replicates(a));
    let shard = index_over(to, to_coords, |a| !to.spec.replicates(a));
    (replica + shard * n_replicas(to)) % n_replicas(from)
}

/// The blocks of `want` that senders of one replica hold: nothing else of a receiver matters.
fn tiles_of(
    lens: &[u64],
    from: Placement<'_>,
    want: &[LocalRange],
    replica: u64,
    receiver: Rank,
) -> Vec<Tile> {
    if want.iter().any(|r| r.valid == 0) {
        return Vec::new();
    }
    // One block so far, from the sender with coordinate 0 along all axes that split a dim.
    let mut coords = vec![0; from.mesh.axes.len()];
    let mut rest = replica;
    for axis in from.mesh.axis_ids().collect::<Vec<_>>().into_iter().rev() {
        if from.spec.replicates(axis) {
            coords[axis.index()] = (rest % from.mesh.size(axis)) as u32;
            rest /= from.mesh.size(axis);
        }
    }
    let mut blocks = vec![(coords, Vec::new(), Vec::new())];
    for ((&len, dim), want) in lens.iter().zip(&from.spec.dims).zip(want) {
        let shards = shards_within(len, dim, from.mesh, want);
        let cut = |(coords, starts, lens): &(Vec<u32>, Vec<u64>, Vec<u64>)| {
            let one = |(at, start, len): &(Vec<u32>, u64, u64)| {
                let mut coords = coords.clone();
                for (axis, &c) in dim.axes.iter().zip(at) {
                    coords[axis.index()] = c;
                }
                let with = |all: &[u64], new: &u64| [all, &[*new]].concat();
                (coords, with(starts, start), with(lens, len))
            };
            shards.iter().map(one).collect::<Vec<_>>()
        };
        blocks = blocks.iter().flat_map(cut).collect();
    }
    let tile = |(coords, start, len): (Vec<u32>, _, _)| Tile {
        from: from.mesh.rank_at(&coords),
        to: receiver,
        start,
        len,
    };
    let mut tiles: Vec<Tile> = blocks.into_iter().map(tile).collect();
    tiles.sort_unstable_by_key(|t| t.from);
    tiles
}

/// The shards of a dim that meet `want`: their coordinates along the dim's axes, and the start
/// and length of what they have in common.
fn shards_within(
    len: u64,
    dim: &DimSharding,
    mesh: &LogicalMesh,
    want: &LocalRange,
) -> Vec<(Vec<u32>, u64, u64)> {
    let (unit, end) = (dim.unit.max(1), want.start + want.valid);
    let mut block = len.div_ceil(unit);
    // Coordinates so far, first unit and units, as in `sharding::local_range`.
    let mut shards = vec![(Vec::new(), 0, block)];
    for &axis in &dim.axes {
        let n = mesh.size(axis).max(1);
        block = block.div_ceil(n);
        let split = |(at, first, extent): (Vec<u32>, u64, u64)| {
            let place = |element: u64| (element / unit).saturating_sub(first) / block;
            let last = place(end - 1).min(n - 1).min((extent - 1) / block);
            (place(want.start)..=last).map(move |c| {
                let at = [&at[..], &[c as u32]].concat();
                (at, first + c * block, (extent - c * block).min(block))
            })
        };
        shards = shards.into_iter().flat_map(split).collect();
    }
    let common = |(at, first, extent): (Vec<u32>, u64, u64)| {
        let start = (first * unit).max(want.start);
        let end = ((first + extent) * unit).min(len).min(end);
        (start < end).then(|| (at, start, end - start))
    };
    shards.into_iter().filter_map(common).collect()
}

/// The blocks that `sender` sends, receivers in mesh order.
pub fn tiles_from(lens: &[u64], from: Placement<'_>, to: Placement<'_>, sender: Rank) -> Vec<Tile> {
    to.mesh
        .ranks()
        .filter_map(|r| to.mesh.coords(r))
        .flat_map(|coords| tiles_to(lens, from, to, &coords))
        .filter(|t| t.from == sender)
        .collect()
}

fn index_over(p: Placement<'_>, coords: &[u32], counts: impl Fn(AxisId) -> bool) -> u64 {
    p.mesh
        .axis_ids()
        .filter(|&a| counts(a))
        .fold(0, |i, a| i * p.mesh.size(a) + u64::from(coords[a.index()]))
}

fn n_replicas(p: Placement<'_>) -> u64 {
    p.mesh
        .axis_ids()
        .filter(|&a| p.spec.replicates(a))
        .map(|a| p.mesh.size(a))
        .product()
}

/// A layout change between two meshes: steps on the source mesh, a transfer from
/// `source_spec` to `target_spec`, steps on the target mesh.
#[derive(
    Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(deny_unknown_fields)]
pub struct CrossPath {
    /// Steps on the source mesh; they leave nothing partial.
    pub before: Vec<LayoutStep>,
    /// Spec in which the source sends.
    pub source_spec: ShardingSpec,
    /// Spec in which the target receives.
    pub target_spec: ShardingSpec,
    /// Steps on the target mesh.
    pub after: Vec<LayoutStep>,
}

/// Ways to bring a tensor of lengths `lens` from a spec on one mesh to a spec on another.
///
/// Partial axes are reduced before sending, or scattered over a dim. The target receives its
/// spec directly, or split further over an axis that replicates it and gathered there: the
/// scatter-gather of Narayanan et al. 2021, section 4.1, which sends each element across the
/// slow links once.
pub fn cross_paths(lens: &[u64], from: Placement<'_>, to: Placement<'_>) -> Vec<CrossPath> {
    let mut sources = Vec::new();
    let mut reduced = from.spec.clone();
    reduced.partial.clear();
    for before in paths(from.spec, &reduced) {
        sources.push((before, reduced.clone()));
    }
    if let [axis] = from.spec.partial.keys().copied().collect::<Vec<_>>()[..] {
        for (dim, &len) in lens.iter().enumerate() {
            let unit = if from.spec.dims[dim].is_whole() {
                1
            } else {
                from.spec.dims[dim].unit
            };
            let step = LayoutStep::ReduceScatter { axis, dim, unit };
            if let Some(spec) = step
                .apply(from.spec)
                .filter(|_| len >= from.mesh.size(axis))
            {
                sources.push((vec![step], spec));
                break;
            }
        }
    }
    let mut targets = vec![(to.spec.clone(), Vec::new())];
    for axis in to
        .mesh
        .axis_ids()
        .filter(|&a| to.spec.replicates(a) && to.mesh.size(a) > 1)
    {
        // Over the dim that leaves the smallest pieces, the first of them.
        let mut smallest = to.spec.local_elements(lens, to.mesh);
        let mut best = None;
        for dim in 0..lens.len() {
            let unit = if to.spec.dims[dim].is_whole() {
                1
            } else {
                to.spec.dims[dim].unit
            };
            let slice = LayoutStep::Slice { axis, dim, unit };
            let Some(spec) = slice.apply(to.spec) else {
                continue;
            };
            let elements = spec.local_elements(lens, to.mesh);
            if elements < smallest {
                smallest = elements;
                best = Some((spec, vec![LayoutStep::AllGather { axis, dim }]));
            }
        }
        targets.extend(best);
    }
    let mut all = Vec::new();
    for (before, source_spec) in &sources {
        for (target_spec, after) in &targets {
            all.push(CrossPath {
                before: before.clone(),
                source_spec: source_spec.clone(),
                target_spec: target_spec.clone(),
                after: after.clone(),
            });
        }
    }
    all
}
