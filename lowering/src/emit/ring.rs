//! Attention whose keys and values go around a ring of ranks (Liu et al. 2023): the chain of
//! instructions that `ir::op::Keys` describes.
//!
//! ```text
//! collectives   k, v >1      k, v >2      k, v >3
//! kernels       part 0       part 1       part 2       part 3
//! ```
//!
//! The next shard travels while a part computes, so a rank holds two of each. In the backward pass
//! the sums of the gradients of keys and values travel with it, while the part computes what will
//! be added to them.

use super::{Emitter, serves};
use crate::draft::{DraftBuffer, Lifetime};
use crate::error::LowerError;
use ir::collective::CollectiveKind;
use ir::op::{Binary, Keys};
use ir::program::{CollectiveItem, InstrKind, Space};
use ir::reshard::LayoutStep;
use ir::{AxisId, BufferId, DType, Op, OpId, OpKind, ShardingSpec, StageId, ValueId};

/// The dim of keys and values that goes around.
const DIM: usize = 1;
/// Operands of an attention, and of its gradient: keys and values.
const SHARDS: [usize; 2] = [1, 2];

/// The ring of one op on its mesh.
#[derive(Clone, Copy)]
struct Ring {
    stage: StageId,
    axis: AxisId,
    ranks: u32,
}

impl Ring {
    /// The keys of a part.
    fn keys(self, step: u32) -> Keys {
        let ranks = self.ranks;
        Keys::Ring { step, ranks }
    }
    fn is_last(self, step: u32) -> bool {
        step + 1 == self.ranks
    }
}

impl Emitter<'_, '_> {
    /// Whether keys and values of an attention are sharded as its queries are.
    pub(super) fn goes_around(&self, id: OpId) -> bool {
        !self.r.wanted_spec(id, SHARDS[0]).dims[DIM].is_whole()
    }

    /// The ring of an op that goes around one; fails where that has one rank.
    fn ring_of(&self, id: OpId, op: &Op, stage: StageId) -> Result<Ring, LowerError> {
        let axis = self.r.wanted_spec(id, SHARDS[0]).dims[DIM].axes[0];
        let ranks = self.r.mesh(stage).axes[axis.index()].size;
        match ranks {
            0 | 1 => Err(LowerError::Ring {
                path: op.path.clone(),
                stage,
            }),
            _ => Ok(Ring { stage, axis, ranks }),
        }
    }

    pub(super) fn ring(&mut self, id: OpId, op: &Op, stage: StageId) -> Result<(), LowerError> {
        let mut inputs = self.operands(id, op, stage)?;
        let ring = self.ring_of(id, op, stage)?;
        let mut sums = Vec::new();
        for step in 0..ring.ranks {
            let next = self.next_shards(ring, op, step, &inputs);
            let results = (op.outputs.iter()).map(|&v| self.sum(ring, op, v, step));
            let outputs: Vec<BufferId> = results.collect();
            let operands = [&inputs[..], &sums].concat();
            self.part(ring, op, step, operands, outputs.clone());
            sums = outputs;
            put(&mut inputs, next);
        }
        Ok(())
    }

    pub(super) fn ring_grad(
        &mut self,
        id: OpId,
        op: &Op,
        stage: StageId,
    ) -> Result<(), LowerError> {
        let mut inputs = self.operands(id, op, stage)?;
        let ring = self.ring_of(id, op, stage)?;
        let [q, shards @ ..] = &op.outputs[..] else {
            return Ok(());
        };
        let (mut dq, mut sums) = (Vec::new(), Vec::new());
        for step in 0..ring.ranks {
            let next = self.next_shards(ring, op, step, &inputs);
            let arrived = match step {
                0 => Vec::new(),
                _ => self.shifted(ring, op, step, shards, &sums),
            };
            let mut outputs = vec![self.sum(ring, op, *q, step)];
            let addends: Vec<BufferId> = shards
                .iter()
                .map(|&v| self.passing(ring, v, step, "addend", DType::F32))
                .collect();
            outputs.extend(&addends);
            let operands = [&inputs[..], &dq].concat();
            dq = vec![outputs[0]];
            self.part(ring, op, step, operands, outputs);
            sums = match step {
                0 => addends,
                _ => self.added(ring, op, step, shards, (&arrived, &addends)),
            };
            put(&mut inputs, next);
        }
        let home: Vec<BufferId> = shards.iter().map(|&v| self.result(op, v, stage)).collect();
        self.shift(ring, op, 0, &sums, &home);
        Ok(())
    }

    /// One instruction of the chain.
    fn part(
        &mut self,
        ring: Ring,
        op: &Op,
        step: u32,
        inputs: Vec<BufferId>,
        outputs: Vec<BufferId>,
    ) {
        let kind = InstrKind::Compute {
            path: op.path.clone(),
            kind: op.kind.with_keys(ring.keys(step)),
            inputs,
            outputs,
        };
        self.role(ring.stage).push(kind, serves(op));
    }

    /// Sends the keys and values of a part on, for the next one; none behind the last.
    fn next_shards(
        &mut self,
        ring: Ring,
        op: &Op,
        step: u32,
        inputs: &[BufferId],
    ) -> Option<Vec<BufferId>> {
        if ring.is_last(step) {
            return None;
        }
        let now = SHARDS.map(|i| inputs[i]);
        let next = SHARDS.map(|i| {
            let v = op.inputs[i];
            let spec = self.turned(ring, now[i - SHARDS[0]], step + 1);
            self.buffer(ring.stage, v, &spec, Lifetime::ByUse)
        });
        self.shift(ring, op, step + 1, &now, &next);
        Some(next.to_vec())
    }

    /// The spec of a buffer whose shard has gone so many places.
    fn turned(&mut self, ring: Ring, b: BufferId, turns: u32) -> ShardingSpec {
        let mut spec = self.role(ring.stage).buffers[b.index()].spec.clone();
        spec.dims[DIM].turns = turns;
        spec
    }

    /// Sums that the part before left, one place on.
    fn shifted(
        &mut self,
        ring: Ring,
        op: &Op,
        step: u32,
        values: &[ValueId],
        sums: &[BufferId],
    ) -> Vec<BufferId> {
        let arrived: Vec<BufferId> = values
            .iter()
            .map(|&v| self.passing(ring, v, step, "arrived", DType::F32))
            .collect();
        self.shift(ring, op, step, sums, &arrived);
        arrived
    }

    /// Adds what a part gave to the sums that arrived; the last sum has the values' own type.
    fn added(
        &mut self,
        ring: Ring,
        op: &Op,
        step: u32,
        values: &[ValueId],
        (arrived, addends): (&[BufferId], &[BufferId]),
    ) -> Vec<BufferId> {
        let mut sums = Vec::with_capacity(values.len());
        for (&v, (&a, &b)) in values.iter().zip(arrived.iter().zip(addends)) {
            let dtype = match ring.is_last(step) {
                true => self.r.graph().ty(v).dtype,
                false => DType::F32,
            };
            let sum = self.passing(ring, v, step, "sum", dtype);
            let kind = InstrKind::Compute {
                path: op.path.clone(),
                kind: OpKind::Binary { f: Binary::Add },
                inputs: vec![a, b],
                outputs: vec![sum],
            };
            self.role(ring.stage).push(kind, serves(op));
            sums.push(sum);
        }
        sums
    }

    fn shift(&mut self, ring: Ring, op: &Op, turns: u32, from: &[BufferId], to: &[BufferId]) {
        let (axis, dim) = (ring.axis, DIM);
        let step = LayoutStep::Shift { axis, dim, turns };
        let item = |(&input, &output): (&BufferId, &BufferId)| CollectiveItem {
            step: step.clone(),
            input,
            output,
        };
        // Keys and values, or their gradients, have one type.
        let dtype = self.role(ring.stage).buffers[from[0].index()].dtype;
        let kind = InstrKind::Collective {
            kind: CollectiveKind::Shift,
            axes: vec![axis],
            contract: self.contract(CollectiveKind::Shift, dtype),
            items: from.iter().zip(to).map(item).collect(),
        };
        self.role(ring.stage).push(kind, serves(op));
    }

    /// Where a part leaves a result that stays with the queries: its place, if it is the last.
    fn sum(&mut self, ring: Ring, op: &Op, v: ValueId, step: u32) -> BufferId {
        match ring.is_last(step) {
            true => self.result(op, v, ring.stage),
            false => self.unfinished(ring, v, self.r.made_spec(v).clone(), "sum", DType::F32),
        }
    }

    /// A buffer for something that goes around with a shard of keys.
    fn passing(
        &mut self,
        ring: Ring,
        v: ValueId,
        turns: u32,
        what: &str,
        dtype: DType,
    ) -> BufferId {
        let mut spec = self.r.made_spec(v).clone();
        spec.dims[DIM].turns = turns;
        self.unfinished(ring, v, spec, what, dtype)
    }

    /// A buffer for a part of a value.
    fn unfinished(
        &mut self,
        ring: Ring,
        v: ValueId,
        spec: ShardingSpec,
        what: &str,
        dtype: DType,
    ) -> BufferId {
        let (name, lens) = (self.r.graph().value_name(v), self.r.lens(v));
        self.role(ring.stage).add_buffer(DraftBuffer {
            name: format!("{name}.{what}"),
            dtype,
            lens,
            spec,
            pieces: None,
            lifetime: Lifetime::ByUse,
            value: None,
            space: Space::Device,
        })
    }
}

/// Puts the next keys and values in the place of those before.
fn put(inputs: &mut [BufferId], next: Option<Vec<BufferId>>) {
    for (i, b) in SHARDS.into_iter().zip(next.into_iter().flatten()) {
        inputs[i] = b;
    }
}
