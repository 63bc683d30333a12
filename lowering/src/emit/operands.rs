//! Operands in the specs that ops want: sources made at their use, layout changes replayed.

use super::{Emitter, Located, serves};
use crate::draft::{DraftBuffer, Lifetime, Serves};
use crate::error::LowerError;
use crate::uses::UseBy;
use ir::collective::CollectiveKind;
use ir::program::{CollectiveItem, InstrKind, Space};
use ir::reshard::{LayoutStep, paths};
use ir::{BufferId, Contract, DType, Op, OpId, OpKind, ShardingSpec, StageId, ValueId};

impl<'a> Emitter<'_, 'a> {
    /// Operand `i` of an op, in the spec that the op wants.
    pub(super) fn operand(
        &mut self,
        id: OpId,
        op: &Op,
        i: usize,
        stage: StageId,
    ) -> Result<Located, LowerError> {
        let v = op.inputs[i];
        if self.r.is_made_at_use(v) {
            return self.source(v, op, self.r.wanted_spec(id, i), stage);
        }
        let from = self.at_hand(v, stage)?;
        let Some(steps) = self.steps(id, i, stage, &from)? else {
            return Ok(from);
        };
        Ok(self.change(stage, v, from, steps, serves(op)))
    }

    /// An operand that its op overwrites: a state's own buffer, or a private changed copy.
    pub(super) fn owned_operand(
        &mut self,
        id: OpId,
        op: &Op,
        i: usize,
        stage: StageId,
    ) -> Result<Located, LowerError> {
        let from = self.at_hand(op.inputs[i], stage)?;
        let Some(steps) = self.steps(id, i, stage, &from)? else {
            return Ok(from);
        };
        Ok(self.change_fresh(stage, op.inputs[i], from, steps, serves(op)))
    }

    /// A value in one replicated buffer, by the first path there is.
    pub(super) fn replicated(
        &mut self,
        v: ValueId,
        stage: StageId,
        serves: Serves,
    ) -> Result<BufferId, LowerError> {
        let from = self.at_hand(v, stage)?;
        let to = ShardingSpec::replicated(from.spec.dims.len());
        let steps = paths(&from.spec, &to)
            .into_iter()
            .next()
            .unwrap_or_default();
        Ok(self.change(stage, v, from, &steps, serves).buffer)
    }

    /// The steps from where an operand stands to where it is wanted; `None` when it is there.
    fn steps(
        &self,
        id: OpId,
        i: usize,
        stage: StageId,
        from: &Located,
    ) -> Result<Option<&'a [LayoutStep]>, LowerError> {
        match self.uses.find(UseBy::Operand(id, i), stage) {
            Some(u) if u.wanted != from.spec => self.uses.steps(self.r, u, &from.spec).map(Some),
            _ => Ok(None),
        }
    }

    /// Data or a constant, made in the wanted spec once per phase.
    fn source(
        &mut self,
        v: ValueId,
        op: &Op,
        wanted: &ShardingSpec,
        stage: StageId,
    ) -> Result<Located, LowerError> {
        let made = self
            .sources
            .iter()
            .find(|s| s.0 == (v, stage) && s.1.spec == *wanted);
        if let Some((_, located)) = made {
            return Ok(located.clone());
        }
        if !wanted.partial.is_empty() {
            // Every rank would add the whole.
            return Err(LowerError::PartialSource {
                path: op.path.clone(),
                value: self.r.graph().value_name(v),
            });
        }
        let output = self.buffer(stage, v, wanted, Lifetime::ByUse);
        let kind = match self.r.producer(v).kind {
            OpKind::Input { kind } => InstrKind::Load { kind, output },
            OpKind::Constant { value } => InstrKind::Fill { value, output },
            _ => return self.at_hand(v, stage),
        };
        self.role(stage).push(kind, serves(op));
        let located = Located {
            buffer: output,
            spec: wanted.clone(),
        };
        self.sources.push(((v, stage), located.clone()));
        Ok(located)
    }

    /// Replays steps; equal changes of one buffer are made once per phase of the role.
    pub(super) fn change(
        &mut self,
        stage: StageId,
        v: ValueId,
        from: Located,
        steps: &[LayoutStep],
        serves: Serves,
    ) -> Located {
        steps.iter().fold(from, |at, step| {
            let spec = after(step, &at.spec);
            let key = (at.buffer, step.clone());
            if let Some(&buffer) = self.role(stage).changed.get(&key) {
                return Located { buffer, spec };
            }
            let buffer = self.buffer(stage, v, &spec, Lifetime::ByUse);
            self.role(stage).changed.insert(key, buffer);
            self.step((stage, v), &at, step, buffer, serves);
            Located { buffer, spec }
        })
    }

    /// Replays steps into buffers that nothing else reads.
    fn change_fresh(
        &mut self,
        stage: StageId,
        v: ValueId,
        from: Located,
        steps: &[LayoutStep],
        serves: Serves,
    ) -> Located {
        steps.iter().fold(from, |at, step| {
            let spec = after(step, &at.spec);
            let buffer = self.buffer(stage, v, &spec, Lifetime::ByUse);
            self.step((stage, v), &at, step, buffer, serves);
            Located { buffer, spec }
        })
    }

    /// Replays steps, the last one into `output`.
    pub(super) fn change_into(
        &mut self,
        stage: StageId,
        v: ValueId,
        from: Located,
        steps: &[LayoutStep],
        serves: Serves,
        output: BufferId,
    ) {
        if let Some((last, before)) = steps.split_last() {
            let at = self.change_fresh(stage, v, from, before, serves);
            self.step((stage, v), &at, last, output, serves);
        }
    }

    fn step(
        &mut self,
        (stage, v): (StageId, ValueId),
        from: &Located,
        step: &LayoutStep,
        output: BufferId,
        serves: Serves,
    ) {
        let members = self.members((stage, v), from, step);
        let kind = match step.collective(&from.spec) {
            Some(kind) => {
                let item = CollectiveItem {
                    step: step.clone(),
                    input: from.buffer,
                    output: members.as_ref().map_or(output, |m| m.0),
                };
                let dtype = self.r.graph().ty(v).dtype;
                InstrKind::Collective {
                    kind,
                    axes: step.axes(),
                    contract: self.contract(kind, dtype),
                    items: vec![item],
                }
            }
            None => InstrKind::Slice {
                step: step.clone(),
                input: from.buffer,
                output,
            },
        };
        self.role(stage).push(kind, serves);
        if let Some((members, op)) = members {
            let combine = InstrKind::Compute {
                path: self.r.producer(v).path.clone(),
                kind: op,
                inputs: vec![members],
                outputs: vec![output],
            };
            self.role(stage).push(combine, serves);
        }
    }

    /// The contract of a collective: that of the devices that the plan is for.
    pub(super) fn contract(&self, kind: CollectiveKind, operand: DType) -> Contract {
        Contract::new(kind, operand, self.r.plan.cluster.order_of_sums())
    }

    /// A buffer for the values of all members, and the op that combines them, where no library has
    /// the reduction that a step is.
    fn members(
        &mut self,
        (stage, v): (StageId, ValueId),
        from: &Located,
        step: &LayoutStep,
    ) -> Option<(BufferId, OpKind)> {
        let r = self.r;
        let members = step.members(&from.spec, &r.lens(v), r.mesh(stage))?;
        let op = members.op();
        let buffer = self.role(stage).add_buffer(DraftBuffer {
            name: format!("{}.members", r.graph().value_name(v)),
            dtype: r.graph().ty(v).dtype,
            lens: members.lens,
            spec: members.spec,
            pieces: None,
            lifetime: Lifetime::ByUse,
            value: None,
            space: Space::Device,
        });
        Some((buffer, op))
    }
}

fn after(step: &LayoutStep, before: &ShardingSpec) -> ShardingSpec {
    step.apply(before)
        .expect("paths are replayed when they are looked up")
}
