//! Every use of a value, and the layout changes on the way to it.
//!
//! Edges are deduplicated as lowering deduplicates them: uses of one value in one spec, on one
//! mesh and in one template, share the changed tensor. The first of them in graph
//! order names the edge; the others need no entry of their own in the plan.

use crate::error::LowerError;
use crate::resolve::{Phase, Resolved};
use ir::plan::{edge_key, transfer_key, write_key};
use ir::reshard::{CrossPath, LayoutStep};
use ir::{DType, LayerId, LogicalMesh, OpId, OpKind, Pass, Region, ShardingSpec, StageId, ValueId};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// A layout change within a mesh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edge {
    /// Absolute key: of an operand, or of what a state keeps.
    pub key: String,
    /// The key in the strategy of `layer`.
    pub relative: String,
    /// Layer of the consumer; `None` for a world op.
    pub layer: Option<LayerId>,
    /// The value.
    pub value: ValueId,
    /// The first stage of the mesh.
    pub stage: StageId,
    /// Spec it has: where it is made, or in which it arrives.
    pub from: ShardingSpec,
    /// Spec that is wanted.
    pub to: ShardingSpec,
    /// Global lengths, batch bound.
    pub lens: Vec<u64>,
    /// Element type.
    pub dtype: DType,
    /// How often the change runs: the consumer's region.
    pub region: Region,
    /// Pass of the consumer.
    pub pass: Pass,
}

/// A layout change from one mesh to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CrossEdge {
    /// Key of the transfer.
    pub key: String,
    /// The value.
    pub value: ValueId,
    /// First stage of the mesh that makes it.
    pub from: StageId,
    /// Spec in which it is made.
    pub from_spec: ShardingSpec,
    /// First stage of the mesh that uses it.
    pub to: StageId,
    /// The specs that its uses there want, first use first, each once.
    pub wanted: Vec<ShardingSpec>,
    /// Global lengths, batch bound.
    pub lens: Vec<u64>,
    /// Element type.
    pub dtype: DType,
    /// How often it moves. Accumulated values move in `StepEnd`.
    pub region: Region,
}

/// Who uses a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum UseBy {
    /// An operand of an op.
    Operand(OpId, usize),
    /// The new value of a state, by its index.
    Write(usize),
}

/// One use of a value on one mesh.
#[derive(Clone, Debug)]
pub(crate) struct Use {
    pub by: UseBy,
    pub value: ValueId,
    pub stage: StageId,
    pub wanted: ShardingSpec,
    pub region: Region,
    pub pass: Pass,
    pub layer: Option<LayerId>,
    phase: Phase,
}

impl Use {
    fn key(&self, r: &Resolved) -> String {
        match self.by {
            UseBy::Operand(op, i) => edge_key(&r.graph().op(op).path, i),
            UseBy::Write(state) => write_key(&r.training.states[state].path),
        }
    }
    fn edge(&self, r: &Resolved, from: ShardingSpec) -> Edge {
        let key = self.key(r);
        Edge {
            relative: r.relative_key(&key, self.layer),
            key,
            layer: self.layer,
            value: self.value,
            stage: self.stage,
            from,
            to: self.wanted.clone(),
            lens: r.lens(self.value),
            dtype: r.graph().ty(self.value).dtype,
            region: self.region,
            pass: self.pass,
        }
    }
    /// The steps recorded for this use itself.
    fn recorded<'a>(&self, r: &Resolved<'a>) -> Option<&'a Vec<LayoutStep>> {
        let key = self.key(r);
        let own = || r.layer_steps(&r.relative_key(&key, self.layer), self.layer);
        r.plan.edges.get(&key).or_else(own)
    }
}

/// All uses of a plan's values, indexed. The plan's `edges` and `transfers` are not read.
pub(crate) struct Uses {
    all: Vec<Use>,
    /// Values that go to other meshes, in order of first use, then receiving mesh.
    pub cross: Vec<CrossEdge>,
    /// By op, where its uses begin in `all`; those of states begin at the last entry.
    starts: Vec<usize>,
    /// By use, the first one that shares its changed tensor.
    first: Vec<usize>,
    cross_of: FxHashMap<(ValueId, StageId), usize>,
}

impl Uses {
    pub fn new(r: &Resolved) -> Self {
        let (all, starts) = all_uses(r);
        let mut uses = Uses {
            first: first_uses(&all),
            all,
            cross: Vec::new(),
            starts,
            cross_of: FxHashMap::default(),
        };
        for u in &uses.all {
            let Some(from) = r.home(u.value).filter(|&home| home != u.stage) else {
                continue;
            };
            let at = *uses.cross_of.entry((u.value, u.stage)).or_insert_with(|| {
                uses.cross.push(cross_edge(r, u, from));
                uses.cross.len() - 1
            });
            let wanted = &mut uses.cross[at].wanted;
            if !wanted.contains(&u.wanted) {
                wanted.push(u.wanted.clone());
            }
        }
        uses
    }

    /// A use by what uses it and where.
    pub fn find(&self, by: UseBy, stage: StageId) -> Option<&Use> {
        self.at(by, stage).map(|i| &self.all[i])
    }

    fn at(&self, by: UseBy, stage: StageId) -> Option<usize> {
        let states = self.starts.last().copied().unwrap_or(0);
        let (from, to) = match by {
            UseBy::Operand(op, _) => (self.starts[op.index()], self.starts[op.index() + 1]),
            UseBy::Write(state) => {
                let writes = self.all[states..].partition_point(|u| u.by < UseBy::Write(state));
                (states + writes, self.all.len())
            }
        };
        let mut uses = self.all[from..to].iter().take_while(|u| u.by <= by);
        let found = uses.position(|u| u.by == by && u.stage == stage)?;
        Some(from + found)
    }

    /// All layout changes within meshes, in graph order, each once.
    pub fn edges(&self, r: &Resolved) -> Result<Vec<Edge>, LowerError> {
        let mut edges = Vec::new();
        for (i, u) in self.all.iter().enumerate() {
            // A damaged transfer is an error whichever use it is found at.
            let from = self.arrival(r, u)?;
            if from != u.wanted && self.first[i] == i {
                edges.push(u.edge(r, from));
            }
        }
        Ok(edges)
    }

    /// The spec in which a used value is at hand on the stage before the use's own edge.
    fn arrival(&self, r: &Resolved, u: &Use) -> Result<ShardingSpec, LowerError> {
        let Some(&at) = self.cross_of.get(&(u.value, u.stage)) else {
            return Ok(r.made_spec(u.value).clone());
        };
        let cross = &self.cross[at];
        match r.plan.transfers.get(&cross.key) {
            Some(path) => check_cross(r, cross, path),
            None => Ok(cross.wanted[0].clone()),
        }
    }

    /// The recorded steps of a use whose value is at hand in `from`: its own, or those of the
    /// first use that shares its edge.
    pub fn steps<'a>(
        &self,
        r: &Resolved<'a>,
        u: &Use,
        from: &ShardingSpec,
    ) -> Result<&'a [LayoutStep], LowerError> {
        let at = self.at(u.by, u.stage);
        let first = at.map_or(u, |i| &self.all[self.first[i]]);
        let mesh = r.mesh(u.stage);
        let (from_text, to) = (from.display(mesh), u.wanted.display(mesh));
        let Some(steps) = u.recorded(r).or_else(|| first.recorded(r)) else {
            return Err(LowerError::MissingPath {
                key: first.key(r),
                stage: u.stage,
                from: from_text,
                to,
            });
        };
        match replay(steps, from, mesh) {
            Some(end) if end == u.wanted => Ok(steps),
            _ => Err(LowerError::WrongPath {
                key: u.key(r),
                stage: u.stage,
                from: from_text,
                to,
            }),
        }
    }
}

/// The spec in which a value arrives by a recorded transfer; an error when the path does not
/// start at the value's spec, sends partial values, or leaves either mesh.
pub(crate) fn check_cross(
    r: &Resolved,
    cross: &CrossEdge,
    path: &CrossPath,
) -> Result<ShardingSpec, LowerError> {
    let (from, to) = (r.mesh(cross.from), r.mesh(cross.to));
    let sends = replay(&path.before, &cross.from_spec, from);
    let lands = &path.target_spec;
    let fits = lands.dims.len() == cross.lens.len()
        && lands.partial.is_empty()
        && lands.problems(to).is_empty();
    let arrives = replay(&path.after, lands, to).filter(|_| fits);
    match (sends, arrives) {
        (Some(sends), Some(arrives)) if sends == path.source_spec && sends.partial.is_empty() => {
            Ok(arrives)
        }
        _ => Err(LowerError::WrongPath {
            key: cross.key.clone(),
            stage: cross.to,
            from: cross.from_spec.display(from),
            to: path.source_spec.display(from),
        }),
    }
}

/// The spec at the end of a path whose every step applies and stays within the mesh.
fn replay(steps: &[LayoutStep], from: &ShardingSpec, mesh: &LogicalMesh) -> Option<ShardingSpec> {
    steps.iter().try_fold(from.clone(), |s, step| {
        step.apply(&s).filter(|s| s.problems(mesh).is_empty())
    })
}

fn cross_edge(r: &Resolved, u: &Use, from: StageId) -> CrossEdge {
    CrossEdge {
        key: transfer_key(&r.graph().value_name(u.value), u.stage),
        value: u.value,
        from,
        from_spec: r.made_spec(u.value).clone(),
        to: u.stage,
        wanted: Vec::new(),
        lens: r.lens(u.value),
        dtype: r.graph().ty(u.value).dtype,
        region: r.complete_in(u.value),
    }
}

/// By use, the first one of the same value in the same spec, on its mesh and in its template.
fn first_uses(all: &[Use]) -> Vec<usize> {
    // A value is seldom wanted in more than two specs.
    type Firsts = SmallVec<[usize; 2]>;
    let mut known: FxHashMap<(StageId, Phase, ValueId), Firsts> = FxHashMap::default();
    let first = |(i, u): (usize, &Use)| {
        let firsts = known.entry((u.stage, u.phase, u.value)).or_default();
        let equal = firsts.iter().find(|&&f| all[f].wanted == u.wanted);
        equal.copied().unwrap_or_else(|| {
            firsts.push(i);
            i
        })
    };
    all.iter().enumerate().map(first).collect()
}

/// All uses in order, and where those of each op begin.
fn all_uses(r: &Resolved) -> (Vec<Use>, Vec<usize>) {
    let mut all = Vec::new();
    let mut starts = Vec::with_capacity(r.graph().ops().len() + 1);
    for (id, op) in r.graph().iter() {
        starts.push(all.len());
        // The norm's operands come together in a world sum, which needs no transfers.
        if matches!(op.kind, OpKind::GlobalNorm) {
            continue;
        }
        for (i, &value) in op
            .inputs
            .iter()
            .enumerate()
            .filter(|(_, v)| !r.is_made_at_use(**v))
        {
            for stage in r.stages_of(op) {
                all.push(Use {
                    by: UseBy::Operand(id, i),
                    value,
                    stage,
                    wanted: r.wanted_spec(id, i).clone(),
                    region: op.region,
                    pass: op.pass,
                    layer: op.layer,
                    phase: r.phase(op),
                });
            }
        }
    }
    starts.push(all.len());
    for (i, state) in r.training.states.iter().enumerate() {
        let op = r.producer(state.read);
        let phase = r.writes_in(state);
        for stage in r.stages_of(op) {
            all.push(Use {
                by: UseBy::Write(i),
                value: state.write,
                stage,
                wanted: r.made_spec(state.read).clone(),
                region: phase.pass().map_or(Region::StepEnd, |_| Region::Microbatch),
                pass: Pass::Update,
                layer: op.layer,
                phase,
            });
        }
    }
    (all, starts)
}
