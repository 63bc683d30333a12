//! Where every op runs and how its values lie there.
//!
//! An op with a layer runs on the mesh of its layer's stage, by the strategy that the layer's
//! run names. A world op (no layer) runs on every mesh, replicated. `Input` and `Constant` have
//! no home: they are made where they are used.
//!
//! From here on a place is a mesh, named by its first stage. Of interleaved stages several
//! share one: a value that one of them makes for another is at hand there, and which of them
//! an op belongs to, its *chunk*, decides only in which template it is played.

use crate::error::LowerError;
use ir::offload::Spaces;
use ir::op::{Assignment, OpStrategy};
use ir::plan::{PASSES_VERSION, PLAN_VERSION, Plan, relative_path};
use ir::program::TemplateKind;
use ir::schedule::{ChunkPass, Schedule};
use ir::training::{State, TrainingGraph};
use ir::{Graph, LayerId, LogicalMesh, Op, OpId, OpKind, Region, ShardingSpec, StageId, ValueId};

/// Compute slots of all stages in one step; a limit so that a damaged plan is an error.
const MAX_SLOTS: u64 = 1 << 24;

/// A plan joined with its training graph.
#[derive(Clone, Copy)]
pub(crate) struct Resolved<'a> {
    pub plan: &'a Plan,
    pub training: &'a TrainingGraph,
    pub schedule: &'a dyn Schedule,
    /// By layer.
    layers: &'a [Home],
    /// By op.
    assignments: &'a [Assignment],
}

/// The places of ops and values that a plan gives its training graph. They follow from the plan's
/// stages and strategies; recorded paths do not matter.
pub(crate) struct Homes {
    schedule: Box<dyn Schedule>,
    layers: Vec<Home>,
    assignments: Vec<Assignment>,
}

/// Where a layer runs.
#[derive(Clone, Copy)]
struct Home {
    /// The first stage of its mesh.
    mesh: StageId,
    /// Which of the mesh's stages has it.
    chunk: u32,
    /// Index of its strategy.
    strategy: u32,
}

/// The phase of a step that one template plays, in microbatches of one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Phase {
    pub kind: TemplateKind,
    /// 0 outside of microbatches.
    pub chunk: u32,
}

impl Phase {
    pub fn step(kind: TemplateKind) -> Self {
        Phase { kind, chunk: 0 }
    }
    /// The pass of a microbatch; `None` in the step phases.
    pub fn pass(self) -> Option<ChunkPass> {
        let of = |pass| ChunkPass {
            pass,
            chunk: self.chunk,
        };
        self.kind.pass().map(of)
    }
}

impl From<ChunkPass> for Phase {
    fn from(of: ChunkPass) -> Self {
        Phase {
            kind: of.pass.into(),
            chunk: of.chunk,
        }
    }
}

pub(crate) fn check_versions(plan: &Plan) -> Result<(), LowerError> {
    for (what, found, expected) in [
        ("format version", plan.version, PLAN_VERSION),
        ("pass version", plan.passes, PASSES_VERSION),
    ] {
        if found != expected {
            return Err(LowerError::Version {
                what,
                found,
                expected,
            });
        }
    }
    Ok(())
}

/// Joins a plan with its training graph, checking that it covers the graph.
pub(crate) fn resolve(plan: &Plan, training: &TrainingGraph) -> Result<Homes, LowerError> {
    let schedule = plan.schedule.schedule();
    check_microbatches(plan, schedule.passes().len())?;
    if let Some(problem) = plan.schedule_problem() {
        return Err(LowerError::Schedule {
            name: schedule.name(),
            problem,
        });
    }
    for (i, stage) in plan.stages.iter().enumerate() {
        if LogicalMesh::new(stage.mesh.devices, stage.mesh.axes.clone()).is_none() {
            return Err(LowerError::Mesh {
                stage: StageId::new(i),
                n_devices: stage.mesh.n_devices(),
            });
        }
    }
    let layers = place_layers(plan, training.graph.layers.len())?;
    let r = Resolved {
        plan,
        training,
        schedule: &*schedule,
        layers: &layers,
        assignments: &[],
    };
    let ops = training.graph.ops().iter();
    let assignments = ops.map(|op| r.assign(op)).collect::<Result<_, _>>()?;
    Ok(Homes {
        schedule,
        layers,
        assignments,
    })
}

fn check_microbatches(plan: &Plan, n_passes: usize) -> Result<(), LowerError> {
    let (n, size, batch) = (
        plan.n_microbatches,
        plan.microbatch,
        plan.train.global_batch,
    );
    let slots = u64::from(n).saturating_mul((n_passes * plan.stages.len()) as u64);
    let problem = match size.checked_mul(u64::from(n)) {
        _ if n == 0 || size == 0 => "both must be at least 1".to_string(),
        _ if slots > MAX_SLOTS => {
            format!("they make {slots} slots, at most {MAX_SLOTS} are lowered")
        }
        Some(total) if total == batch => return Ok(()),
        _ => format!("the global batch is {batch}"),
    };
    Err(LowerError::Microbatches {
        n_microbatches: n,
        microbatch: size,
        problem,
    })
}

fn place_layers(plan: &Plan, n_layers: usize) -> Result<Vec<Home>, LowerError> {
    let mut layers = Vec::with_capacity(n_layers);
    let mut last = StageId::new(0);
    for (i, stage) in plan.stages.iter().enumerate() {
        last = StageId::new(i);
        for run in &stage.runs {
            let fail = |problem| {
                Err(LowerError::Layers {
                    stage: last,
                    problem,
                })
            };
            if run.first.index() != layers.len() {
                return fail(format!(
                    "a run starts at {}, expected {}",
                    run.first,
                    LayerId::new(layers.len())
                ));
            }
            if run.strategy as usize >= plan.layer_strategies.len() {
                return fail(format!(
                    "layer strategy {} does not exist; there are {}",
                    run.strategy,
                    plan.layer_strategies.len()
                ));
            }
            if run.count as usize > n_layers - layers.len() {
                return fail(format!(
                    "a run of {} from {} exceeds the {n_layers} layers",
                    run.count, run.first
                ));
            }
            let home = Home {
                mesh: plan.mesh_of(last),
                chunk: plan.chunk_of(last),
                strategy: run.strategy,
            };
            layers.extend((0..run.count).map(|_| home));
        }
    }
    match layers.len() == n_layers && !plan.stages.is_empty() {
        true => Ok(layers),
        false => Err(LowerError::Layers {
            stage: last,
            problem: format!("the stages hold {} of {n_layers} layers", layers.len()),
        }),
    }
}

impl Homes {
    /// The plan and the graph that this is of, joined; the plan may record other paths by now.
    pub fn of<'a>(&'a self, plan: &'a Plan, training: &'a TrainingGraph) -> Resolved<'a> {
        Resolved {
            plan,
            training,
            schedule: &*self.schedule,
            layers: &self.layers,
            assignments: &self.assignments,
        }
    }
}

impl<'a> Resolved<'a> {
    pub fn graph(&self) -> &'a Graph {
        &self.training.graph
    }
    /// The first stage of every mesh.
    pub fn stages(&self) -> impl Iterator<Item = StageId> + use<> {
        (0..self.plan.n_meshes()).map(StageId::new)
    }
    /// Stages of every mesh.
    pub fn n_chunks(&self) -> u32 {
        self.schedule.virtual_stages()
    }
    pub fn mesh(&self, stage: StageId) -> &'a LogicalMesh {
        &self.plan.stages[stage.index()].mesh
    }
    /// The mesh of a layer's op; `None` for a world op.
    pub fn stage(&self, op: &Op) -> Option<StageId> {
        op.layer.map(|l| self.layers[l.index()].mesh)
    }
    /// The meshes that run an op.
    pub fn stages_of(&self, op: &Op) -> impl Iterator<Item = StageId> + use<> {
        let of = match self.stage(op) {
            Some(stage) => stage.index()..stage.index() + 1,
            None => 0..self.plan.n_meshes(),
        };
        of.map(StageId::new)
    }
    pub fn producer(&self, v: ValueId) -> &'a Op {
        self.graph().op(self.graph().value(v).producer)
    }
    /// The mesh that makes a value; `None` for world values, which all meshes make.
    pub fn home(&self, v: ValueId) -> Option<StageId> {
        self.stage(self.producer(v))
    }
    /// True for values that are made anew in every template that uses them.
    pub fn is_made_at_use(&self, v: ValueId) -> bool {
        matches!(
            self.producer(v).kind,
            OpKind::Input { .. } | OpKind::Constant { .. }
        )
    }
    /// Spec of a value where it is made.
    pub fn made_spec(&self, v: ValueId) -> &ShardingSpec {
        let value = self.graph().value(v);
        &self.assignments[value.producer.index()].results[value.result as usize]
    }
    /// Spec that an op wants for an operand.
    pub fn wanted_spec(&self, op: OpId, operand: usize) -> &ShardingSpec {
        &self.assignments[op.index()].operands[operand]
    }
    /// Lengths of a value, the batch bound.
    pub fn lens(&self, v: ValueId) -> Vec<u64> {
        self.graph().ty(v).shape.bind(self.plan.microbatch)
    }
    /// The template that an op belongs to.
    pub fn phase(&self, op: &Op) -> Phase {
        let kind = match op.region {
            Region::StepBegin => return Phase::step(TemplateKind::StepBegin),
            Region::StepEnd => return Phase::step(TemplateKind::StepEnd),
            Region::Microbatch => self.schedule.slot_of(op.pass).into(),
        };
        // The ops of a microbatch have layers.
        let chunk = op.layer.map_or(0, |l| self.layers[l.index()].chunk);
        Phase { kind, chunk }
    }
    /// The template that brings a state's next value into its buffer: that of its update where every
    /// microbatch makes one, else `StepEnd`.
    pub fn writes_in(&self, state: &State) -> Phase {
        let writer = self.producer(state.write);
        match writer.region {
            Region::Microbatch => self.phase(writer),
            Region::StepBegin | Region::StepEnd => Phase::step(TemplateKind::StepEnd),
        }
    }
    /// When a value is complete: accumulated ones at the end of the step.
    pub fn complete_in(&self, v: ValueId) -> Region {
        let op = self.producer(v);
        if matches!(op.kind, OpKind::Accumulate { .. }) {
            Region::StepEnd
        } else {
            op.region
        }
    }
    /// The key of an edge in the strategy of `layer`; the absolute key for world ops.
    pub fn relative_key(&self, key: &str, layer: Option<LayerId>) -> String {
        layer.map_or_else(
            || key.to_string(),
            |l| relative_path(key, &self.graph().layers[l.index()]),
        )
    }
    /// Where the tensors of a layer rest.
    pub fn spaces(&self, layer: LayerId) -> &'a Spaces {
        let strategy = self.layers[layer.index()].strategy;
        &self.plan.layer_strategies[strategy as usize].spaces
    }
    /// The steps recorded in the strategy of `layer` under a relative key.
    pub fn layer_steps(
        &self,
        relative: &str,
        layer: Option<LayerId>,
    ) -> Option<&'a Vec<ir::reshard::LayoutStep>> {
        let strategy = self.layers[layer?.index()].strategy;
        self.plan.layer_strategies[strategy as usize]
            .edges
            .get(relative)
    }

    fn assign(&self, op: &Op) -> Result<Assignment, LowerError> {
        if let Some(layer) = op.layer.filter(|l| l.index() >= self.layers.len()) {
            let problem = format!("op `{}` is of {layer}, which does not exist", op.path);
            return Err(LowerError::Layers {
                stage: StageId::new(0),
                problem,
            });
        }
        let replicated = OpStrategy::replicate(0);
        let strategy = match op.layer {
            Some(layer) if !matches!(op.kind, OpKind::Input { .. } | OpKind::Constant { .. }) => {
                self.strategy(op, layer)?
            }
            _ => &replicated,
        };
        let named = |source| LowerError::Strategy {
            path: op.path.clone(),
            source,
        };
        self.graph().rule(op).assign(strategy).map_err(named)
    }

    fn strategy(&self, op: &Op, layer: LayerId) -> Result<&'a OpStrategy, LowerError> {
        let Home {
            mesh,
            strategy: index,
            ..
        } = self.layers[layer.index()];
        let relative = self.relative_key(&op.path, Some(layer));
        let Some(strategy) = self.plan.layer_strategies[index as usize]
            .ops
            .get(&relative)
        else {
            return Err(LowerError::MissingStrategy {
                strategy: index,
                relative,
                layer,
            });
        };
        let expected = self.mesh(mesh).axes.len();
        if strategy.uses.len() != expected {
            return Err(LowerError::StrategyAxes {
                path: op.path.clone(),
                found: strategy.uses.len(),
                expected,
            });
        }
        Ok(strategy)
    }
}
