//! Instructions of every role: the training graph is walked phase by phase (`StepBegin`, the
//! passes of a microbatch as the schedule has them, `StepEnd`), each op emitting into the open
//! template of its mesh. With several stages on a mesh the microbatch phases are walked chunk by
//! chunk, in the order in which a microbatch goes through them.
//!
//! * A value stands in one buffer per mesh, its *place*: where it was made, or arrived.
//!   `Layout` only gives its operand's buffer another name.
//! * Changed tensors are shared within a phase of a role (`operands`).
//! * In the step phases an op that needs another mesh's value closes the open templates of
//!   both meshes for an exchange (`exchanges`). In microbatches exchanges are templates of
//!   their own, which `order` places.

mod exchanges;
mod operands;
mod ops;
mod ring;

use crate::draft::{Draft, DraftBuffer, Lifetime, RoleDraft, Serves};
use crate::error::LowerError;
use crate::resolve::{Phase, Resolved};
use crate::uses::{UseBy, Uses};
use exchanges::Crossing;
use ir::program::{InstrKind, Space, TemplateKind, Transfer};
use ir::schedule::{ChunkPass, PassKind};
use ir::{BufferId, Op, OpKind, Pass, ShardingSpec, StageId, ValueId};
use rustc_hash::FxHashMap;

/// Emits all templates but does not order the microbatches.
pub(crate) fn emit(r: &Resolved, uses: &Uses) -> Result<Draft, LowerError> {
    let mut e = Emitter::new(r, uses)?;
    e.clear_accumulators();
    e.walk(Phase::step(TemplateKind::StepBegin))?;
    e.flush_step_begin()?;
    for of in microbatch_passes(r) {
        e.walk(Phase::from(of))?;
        e.write_states()?;
        e.roles.iter_mut().for_each(|role| role.close_pass(of));
    }
    let flows = e.flow_exchanges();
    e.reduce_loss()?;
    e.walk(Phase::step(TemplateKind::StepEnd))?;
    e.write_states()?;
    e.roles
        .iter_mut()
        .for_each(|role| role.close_step(TemplateKind::StepEnd));
    Ok(Draft {
        roles: e.roles,
        transfers: e.transfers,
        flows,
    })
}

/// The passes that a microbatch goes through, in this order.
fn microbatch_passes(r: &Resolved) -> Vec<ChunkPass> {
    let n = r.n_chunks();
    let chunks = |&pass: &PassKind| {
        (0..n).map(move |c| match pass {
            PassKind::Forward => ChunkPass { pass, chunk: c },
            _ => ChunkPass {
                pass,
                chunk: n - 1 - c,
            },
        })
    };
    r.schedule.passes().iter().flat_map(chunks).collect()
}

/// A tensor in a buffer.
#[derive(Clone, Debug)]
struct Located {
    buffer: BufferId,
    /// How the tensor lies now; after an all-reduce in place not the buffer's own spec.
    spec: ShardingSpec,
}

struct Emitter<'r, 'a> {
    r: &'r Resolved<'a>,
    uses: &'r Uses,
    roles: Vec<RoleDraft>,
    transfers: Vec<Transfer>,
    /// Where values stand, by mesh.
    places: FxHashMap<(ValueId, StageId), Located>,
    /// Values that go to other meshes, in the order of `uses.cross`.
    crossings: Vec<Crossing>,
    /// Data and constants made in the present phase.
    sources: Vec<((ValueId, StageId), Located)>,
    phase: Phase,
}

impl<'r, 'a> Emitter<'r, 'a> {
    fn new(r: &'r Resolved<'a>, uses: &'r Uses) -> Result<Self, LowerError> {
        let crossings = uses
            .cross
            .iter()
            .map(|c| Crossing::new(r, c))
            .collect::<Result<_, _>>()?;
        let roles = r
            .stages()
            .map(|s| RoleDraft::new(s, r.mesh(s).clone()))
            .collect();
        Ok(Emitter {
            r,
            uses,
            roles,
            transfers: Vec::new(),
            places: FxHashMap::default(),
            crossings,
            sources: Vec::new(),
            phase: Phase::step(TemplateKind::StepBegin),
        })
    }

    fn role(&mut self, stage: StageId) -> &mut RoleDraft {
        &mut self.roles[stage.index()]
    }

    /// A new buffer for a value, or for a changed copy of it.
    fn buffer(
        &mut self,
        stage: StageId,
        v: ValueId,
        spec: &ShardingSpec,
        lifetime: Lifetime,
    ) -> BufferId {
        let (r, mut name) = (self.r, self.r.graph().value_name(v));
        if r.home(v).is_some_and(|home| home != stage) || *spec != *r.made_spec(v) {
            name = format!("{name}@{}", spec.display(r.mesh(stage)).replace(", ", ","));
        }
        let (lens, dtype) = (r.lens(v), r.graph().ty(v).dtype);
        self.role(stage).add_buffer(DraftBuffer {
            name,
            dtype,
            lens,
            spec: spec.clone(),
            pieces: None,
            lifetime,
            value: Some(v),
            space: Space::Device,
        })
    }

    /// Every accumulator is zero when the step begins.
    fn clear_accumulators(&mut self) {
        let r = self.r;
        for op in r
            .graph()
            .ops()
            .iter()
            .filter(|op| matches!(op.kind, OpKind::Accumulate { .. }))
        {
            for stage in r.stages_of(op) {
                let v = op.outputs[0];
                let spec = r.made_spec(v).clone();
                let output = self.buffer(stage, v, &spec, Lifetime::Accumulator);
                self.role(stage)
                    .push(InstrKind::Fill { value: 0.0, output }, serves(op));
                self.places.insert(
                    (v, stage),
                    Located {
                        buffer: output,
                        spec,
                    },
                );
            }
        }
    }

    /// Starts a phase: nothing made in another one is shared.
    fn begin(&mut self, phase: Phase) {
        if phase != self.phase {
            self.roles.iter_mut().for_each(|role| role.changed.clear());
            self.sources.clear();
            self.phase = phase;
        }
    }

    /// Emits the ops of a phase on all meshes, in graph order.
    fn walk(&mut self, phase: Phase) -> Result<(), LowerError> {
        self.begin(phase);
        let r = self.r;
        for (id, op) in r.graph().iter().filter(|(_, op)| r.phase(op) == phase) {
            for stage in r.stages_of(op) {
                self.op(id, op, stage)?;
            }
        }
        Ok(())
    }

    /// The step's loss, replicated; it stays after the step.
    fn reduce_loss(&mut self) -> Result<(), LowerError> {
        let r = self.r;
        let op = r.producer(r.training.loss);
        self.begin(Phase::step(TemplateKind::StepEnd));
        for stage in r.stages_of(op) {
            let loss = self.replicated(
                r.training.loss,
                stage,
                Serves {
                    pass: Pass::Update,
                    layer: op.layer,
                },
            )?;
            let role = self.role(stage);
            if role.buffers[loss.index()].lifetime == Lifetime::ByUse {
                role.buffers[loss.index()].lifetime = Lifetime::Kept;
            }
            role.loss = Some(loss);
        }
        Ok(())
    }

    /// Brings the next value of every state that the present phase writes into its buffer, after
    /// all reads of the old one.
    fn write_states(&mut self) -> Result<(), LowerError> {
        let (r, phase) = (self.r, self.phase);
        let states = r.training.states.iter().enumerate();
        for (i, state) in states.filter(|(_, state)| r.writes_in(state) == phase) {
            let op = r.producer(state.read);
            for stage in r.stages_of(op) {
                let from = self.at_hand(state.write, stage)?;
                let output = self.places[&(state.read, stage)].buffer;
                let Some(u) = self.uses.find(UseBy::Write(i), stage) else {
                    continue;
                };
                let serves = Serves {
                    pass: u.pass,
                    layer: u.layer,
                };
                if from.spec != u.wanted {
                    let steps = self.uses.steps(r, u, &from.spec)?;
                    self.change_into(stage, state.write, from, steps, serves, output);
                } else if from.buffer != output {
                    self.role(stage).push(
                        InstrKind::Copy {
                            input: from.buffer,
                            output,
                        },
                        serves,
                    );
                }
            }
        }
        Ok(())
    }
}

fn serves(op: &Op) -> Serves {
    Serves {
        pass: op.pass,
        layer: op.layer,
    }
}
