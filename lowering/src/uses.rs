//! Every use of a value, and the layout changes on the way to it.
//!
//! Edges are deduplicated as lowering deduplicates them: uses of one value in one spec, on one
//! mesh and in one template, share the changed tensor. The first of them in graph
//! order names the edge; the others need no entry of their own in the plan.

use crate::error::LowerError;
use crate::resolve::{Phase, Resolved, resolve};
use ir::plan::{Plan, edge_key, transfer_key, write_key};
use ir::program::TemplateKind;
use ir::reshard::{CrossPath, LayoutStep};
use ir::training::TrainingGraph;
use ir::{DType, LayerId, LogicalMesh, OpId, OpKind, Pass, Region, ShardingSpec, StageId, ValueId};
use std::collections::BTreeMap;

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

/// All layout changes within meshes that the program of a plan needs, in graph order, each
/// once. Values of other meshes arrive as the plan's transfers say; where none is recorded,
/// in the first of [`CrossEdge::wanted`]. The plan's `edges` are not read.
pub fn edges(plan: &Plan, training: &TrainingGraph) -> Result<Vec<Edge>, LowerError> {
    let r = resolve(plan, training)?;
    let uses = Uses::new(&r);
    let mut seen = std::collections::BTreeSet::new();
    let mut edges = Vec::new();
    for u in &uses.all {
        let from = uses.arrival(&r, u)?;
        if from != u.wanted && seen.insert(u.group()) {
            edges.push(u.edge(&r, from));
        }
    }
    Ok(edges)
}

/// All layout changes between meshes, by value in order of first use, then receiving mesh.
/// Neither the plan's `edges` nor its `transfers` are read.
pub fn cross_edges(plan: &Plan, training: &TrainingGraph) -> Result<Vec<CrossEdge>, LowerError> {
    Ok(Uses::new(&resolve(plan, training)?).cross)
}

/// Who uses a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum UseBy {
    /// An operand of an op.
    Operand(OpId, usize),
    /// What a state (its index) keeps.
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

type Group = (StageId, Phase, ValueId, ShardingSpec);

impl Use {
    fn group(&self) -> Group {
        (self.stage, self.phase, self.value, self.wanted.clone())
    }
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

/// All uses of a plan's values, indexed.
pub(crate) struct Uses {
    pub all: Vec<Use>,
    pub cross: Vec<CrossEdge>,
    by: BTreeMap<(UseBy, StageId), usize>,
    first_of: BTreeMap<Group, usize>,
    cross_of: BTreeMap<(ValueId, StageId), usize>,
}

impl Uses {
    pub fn new(r: &Resolved) -> Self {
        let all = all_uses(r);
        let by = all
            .iter()
            .enumerate()
            .map(|(i, u)| ((u.by, u.stage), i))
            .collect();
        let mut uses = Uses {
            by,
            all,
            cross: Vec::new(),
            first_of: BTreeMap::new(),
            cross_of: BTreeMap::new(),
        };
        for (i, u) in uses.all.iter().enumerate() {
            uses.first_of.entry(u.group()).or_insert(i);
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
        self.by.get(&(by, stage)).map(|&i| &self.all[i])
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
        let first = &self.all[self.first_of[&u.group()]];
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

fn all_uses(r: &Resolved) -> Vec<Use> {
    let mut all = Vec::new();
    for (id, op) in r.graph().iter() {
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
    for (i, state) in r.training.states.iter().enumerate() {
        let op = r.producer(state.read);
        for stage in r.stages_of(op) {
            all.push(Use {
                by: UseBy::Write(i),
                value: state.write,
                stage,
                wanted: r.made_spec(state.read).clone(),
                region: Region::StepEnd,
                pass: Pass::Update,
                layer: op.layer,
                phase: Phase::step(TemplateKind::StepEnd),
            });
        }
    }
    all
}
