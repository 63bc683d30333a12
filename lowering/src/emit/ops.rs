//! One op of the training graph on one mesh.

use super::{Emitter, Located, serves};
use crate::draft::{DraftBuffer, Lifetime};
use crate::error::LowerError;
use ir::program::{InstrKind, Space, StateBuffer};
use ir::{BufferId, DType, Op, OpId, OpKind, Origin, Region, ShardingSpec, StageId};

impl Emitter<'_, '_> {
    pub(super) fn op(&mut self, id: OpId, op: &Op, stage: StageId) -> Result<(), LowerError> {
        match op.kind {
            // Made at their uses.
            OpKind::Input { .. } | OpKind::Constant { .. } => return Ok(()),
            OpKind::State { .. } => self.state(op, stage),
            OpKind::Layout => self.layout(id, op, stage)?,
            OpKind::Accumulate { .. } => self.accumulate(id, op, stage)?,
            OpKind::GlobalNorm => self.global_norm(op, stage)?,
            OpKind::AdamW { .. } | OpKind::Sgd { .. } => self.update(id, op, stage)?,
            OpKind::Attention { .. } if self.goes_around(id) => self.ring(id, op, stage)?,
            OpKind::AttentionGrad { .. } if self.goes_around(id) => {
                self.ring_grad(id, op, stage)?
            }
            _ => {
                let inputs = self.operands(id, op, stage)?;
                let outputs = op
                    .outputs
                    .iter()
                    .map(|&v| self.result(op, v, stage))
                    .collect();
                self.compute(op, stage, inputs, outputs);
            }
        }
        if self.phase.pass().is_some() {
            for &v in &op.outputs {
                self.send_from(v, stage);
            }
        }
        Ok(())
    }

    pub(super) fn operands(
        &mut self,
        id: OpId,
        op: &Op,
        stage: StageId,
    ) -> Result<Vec<BufferId>, LowerError> {
        (0..op.inputs.len())
            .map(|i| Ok(self.operand(id, op, i, stage)?.buffer))
            .collect()
    }

    /// A new place for a result.
    pub(super) fn result(&mut self, op: &Op, v: ir::ValueId, stage: StageId) -> BufferId {
        let lifetime = if Some(v) == self.r.training.grad_norm {
            Lifetime::Kept
        } else {
            Lifetime::ByUse
        };
        debug_assert!(op.outputs.contains(&v));
        let spec = self.r.made_spec(v).clone();
        let buffer = self.buffer(stage, v, &spec, lifetime);
        self.places.insert((v, stage), Located { buffer, spec });
        buffer
    }

    fn compute(&mut self, op: &Op, stage: StageId, inputs: Vec<BufferId>, outputs: Vec<BufferId>) {
        let kind = InstrKind::Compute {
            path: op.path.clone(),
            kind: op.kind.clone(),
            inputs,
            outputs,
        };
        self.role(stage).push(kind, serves(op));
    }

    /// A persistent buffer; what it belongs to is in the training graph's list.
    fn state(&mut self, op: &Op, stage: StageId) {
        let v = op.outputs[0];
        let spec = self.r.made_spec(v).clone();
        let buffer = self.buffer(stage, v, &spec, Lifetime::Persistent);
        self.places.insert((v, stage), Located { buffer, spec });
        if let Some(s) = self.r.training.states.iter().find(|s| s.read == v) {
            let entry = StateBuffer {
                path: s.path.clone(),
                param: s.param.clone(),
                role: s.role,
                buffer,
            };
            self.role(stage).states.push(entry);
        }
    }

    /// A view. Its strategy gives operand and result one spec, so only its edge does work. But a
    /// microbatch's version of a state is a copy: the state goes on while others read the version.
    fn layout(&mut self, id: OpId, op: &Op, stage: StageId) -> Result<(), LowerError> {
        let operand = self.operand(id, op, 0, stage)?;
        debug_assert_eq!(operand.spec, *self.r.made_spec(op.outputs[0]));
        let input = operand.buffer;
        let is_version =
            op.region == Region::Microbatch && matches!(op.origin, Origin::Prepared { .. });
        if is_version && self.role(stage).buffers[input.index()].lifetime == Lifetime::Persistent {
            let output = self.result(op, op.outputs[0], stage);
            let copy = InstrKind::Copy { input, output };
            self.role(stage).push(copy, serves(op));
            return Ok(());
        }
        self.places.insert((op.outputs[0], stage), operand);
        Ok(())
    }

    /// Adds to the buffer that `StepBegin` cleared.
    fn accumulate(&mut self, id: OpId, op: &Op, stage: StageId) -> Result<(), LowerError> {
        let inputs = self.operands(id, op, stage)?;
        let acc = self.places[&(op.outputs[0], stage)].buffer;
        self.compute(op, stage, inputs, vec![acc]);
        Ok(())
    }

    /// Every role contributes the squares it has made; every role gets the norm.
    fn global_norm(&mut self, op: &Op, stage: StageId) -> Result<(), LowerError> {
        let r = self.r;
        let mut inputs = Vec::new();
        for (i, &v) in op.inputs.iter().enumerate() {
            if r.home(v).unwrap_or(StageId::new(0)) == stage {
                let i = u32::try_from(i).expect("an op has fewer than 2^32 operands");
                inputs.push((i, self.replicated(v, stage, serves(op))?));
            }
        }
        let output = self.role(stage).add_buffer(DraftBuffer {
            name: format!("{}.terms", op.path),
            dtype: DType::F32,
            lens: vec![op.inputs.len() as u64],
            spec: ShardingSpec::replicated(1),
            pieces: None,
            lifetime: Lifetime::ByUse,
            value: None,
            space: Space::Device,
        });
        self.role(stage)
            .push(InstrKind::WorldSum { inputs, output }, serves(op));
        let norm = self.result(op, op.outputs[0], stage);
        if Some(op.outputs[0]) == r.training.grad_norm {
            self.role(stage).grad_norm = Some(norm);
        }
        self.compute(op, stage, vec![output], vec![norm]);
        Ok(())
    }

    /// Writes parameter and moments in place: `(p, g, moments.., scalars..) -> (p', moments'..)`.
    fn update(&mut self, id: OpId, op: &Op, stage: StageId) -> Result<(), LowerError> {
        let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
        for i in 0..op.inputs.len() {
            if i == 1 || i > op.outputs.len() {
                inputs.push(self.operand(id, op, i, stage)?.buffer);
                continue;
            }
            let owned = self.owned_operand(id, op, i, stage)?;
            self.places
                .insert((op.outputs[outputs.len()], stage), owned.clone());
            inputs.push(owned.buffer);
            outputs.push(owned.buffer);
        }
        self.compute(op, stage, inputs, outputs);
        Ok(())
    }
}
