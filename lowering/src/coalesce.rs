//! Collectives that can share a launch.
//!
//! In the step phases, where all is about many parameters at once, instructions are
//! list-scheduled: whatever is ready and no collective runs first, then all ready collectives
//! that do the same over the same axes become one. In microbatches the order of the graph
//! stays, because it bounds the memory: neighbours merge, and what parameters and their
//! gradients need moves in [`buckets`].

mod buckets;

use crate::bucket::BucketSizes;
use crate::draft::{DraftBuffer, RoleDraft};
use buckets::Places;
use ir::collective::CollectiveKind;
use ir::program::{InstrKind, Instruction, TemplateKind};
use ir::{AxisId, BufferId, DType, LogicalMesh, Region};
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

pub(crate) fn coalesce(role: &mut RoleDraft, sizes: &BucketSizes) {
    let places = Places::new(role);
    for template in &mut role.templates {
        let buffers = Buffers {
            all: &role.buffers,
            mesh: &role.mesh,
            sizes,
        };
        let instructions = std::mem::take(&mut template.instructions);
        template.instructions = match template.kind {
            TemplateKind::StepBegin | TemplateKind::StepEnd => {
                list_schedule(instructions, buffers, Some(Region::StepBegin))
            }
            TemplateKind::Exchange => instructions,
            _ => buckets::fill(instructions, buffers, &places),
        };
    }
}

#[derive(Clone, Copy)]
struct Buffers<'a> {
    all: &'a [DraftBuffer],
    mesh: &'a LogicalMesh,
    sizes: &'a BucketSizes,
}

/// The attributes that collectives must share to become one.
#[derive(Clone, PartialEq, Eq)]
struct Sort {
    kind: CollectiveKind,
    axes: Vec<AxisId>,
    dtype: DType,
}

impl Buffers<'_> {
    fn sort(&self, i: &Instruction) -> Option<Sort> {
        match &i.kind {
            InstrKind::Collective {
                kind, axes, items, ..
            } => {
                let dtype = self.all[items.first()?.input.index()].dtype;
                Some(Sort {
                    kind: *kind,
                    axes: axes.clone(),
                    dtype,
                })
            }
            _ => None,
        }
    }
    /// Operand bytes on one rank.
    fn bytes(&self, i: &Instruction) -> u64 {
        self.sum(&i.reads())
    }
    /// Bytes at which a bucket of microbatches over these axes is full.
    fn full(&self, axes: &[AxisId]) -> u64 {
        self.full_in(Region::Microbatch, axes)
    }
    /// The same in a region.
    fn full_in(&self, region: Region, axes: &[AxisId]) -> u64 {
        let n_ranks = axes.iter().map(|a| self.mesh.size(*a));
        self.sizes
            .full(region, n_ranks.fold(1, u64::saturating_mul))
    }
    /// The larger of operand and result bytes on one rank.
    fn message(&self, i: &Instruction) -> u64 {
        self.sum(&i.reads()).max(self.sum(&i.writes()))
    }
    fn sum(&self, buffers: &[BufferId]) -> u64 {
        let bytes = |b: &BufferId| {
            let b = &self.all[b.index()];
            b.spec
                .local_elements(&b.lens, self.mesh)
                .saturating_mul(b.dtype.bytes())
        };
        buffers
            .iter()
            .fold(0, |sum, b| sum.saturating_add(bytes(b)))
    }
}

fn can_merge(a: &Instruction, b: &Instruction, buffers: Buffers) -> bool {
    if buffers.sort(a).is_none_or(|s| Some(s) != buffers.sort(b)) {
        return false;
    }
    let (a_reads, a_writes) = (a.reads(), a.writes());
    let (b_reads, b_writes) = (b.reads(), b.writes());
    let waits = b_reads.iter().any(|x| a_writes.contains(x))
        || (b_writes.iter()).any(|x| a_reads.contains(x) || a_writes.contains(x));
    !waits && buffers.bytes(a).saturating_add(buffers.bytes(b)) <= buffers.sizes.step
}

/// Makes one collective of two; it serves a layer only if both serve it.
fn append(into: &mut Instruction, other: Instruction) {
    if let (InstrKind::Collective { items, .. }, InstrKind::Collective { items: more, .. }) =
        (&mut into.kind, other.kind)
    {
        items.extend(more);
        into.layer = into.layer.filter(|l| Some(*l) == other.layer);
    }
}

/// Collectives merge until a bucket of the region is full, by the larger of operands and results;
/// all that are ready where there is none.
fn list_schedule(
    instructions: Vec<Instruction>,
    buffers: Buffers,
    region: Option<Region>,
) -> Vec<Instruction> {
    let successors = successors(&instructions);
    let mut waits = vec![0usize; instructions.len()];
    successors.iter().flatten().for_each(|&s| waits[s] += 1);
    let is_collective = |i: &Instruction| {
        matches!(
            i.kind,
            InstrKind::Collective { .. } | InstrKind::WorldSum { .. }
        )
    };
    let mut ready: BTreeSet<(bool, usize)> = BTreeSet::new();
    for (i, instruction) in instructions
        .iter()
        .enumerate()
        .filter(|(i, _)| waits[*i] == 0)
    {
        ready.insert((is_collective(instruction), i));
    }
    let mut pending: Vec<Option<Instruction>> = instructions.into_iter().map(Some).collect();
    let mut out = Vec::with_capacity(pending.len());
    // The smallest entry: by graph order a non-collective if one is ready, else a collective.
    while let Some((_, first)) = ready.pop_first() {
        let Some(mut instruction) = pending[first].take() else {
            continue;
        };
        let mut played = vec![first];
        if let Some(sort) = buffers.sort(&instruction) {
            let limit = region.map_or(u64::MAX, |r| buffers.full_in(r, &sort.axes));
            let mut bytes = buffers.message(&instruction);
            for &(_, i) in &ready {
                let Some(other) = pending[i].take_if(|other| {
                    let sum = bytes.saturating_add(buffers.message(other));
                    buffers.sort(other).as_ref() == Some(&sort) && sum <= limit
                }) else {
                    continue;
                };
                bytes = bytes.saturating_add(buffers.message(&other));
                append(&mut instruction, other);
                played.push(i);
            }
        }
        out.push(instruction);
        for i in played {
            ready.remove(&(true, i));
            for &s in &successors[i] {
                waits[s] -= 1;
                if waits[s] == 0 {
                    let collective = pending[s].as_ref().is_some_and(is_collective);
                    ready.insert((collective, s));
                }
            }
        }
    }
    out
}

/// For each instruction the later ones that must stay behind it: they read what it writes,
/// or write what it reads or writes.
fn successors(instructions: &[Instruction]) -> Vec<Vec<usize>> {
    let mut successors = vec![Vec::new(); instructions.len()];
    let mut writer: FxHashMap<BufferId, usize> = FxHashMap::default();
    let mut readers: FxHashMap<BufferId, Vec<usize>> = FxHashMap::default();
    for (i, instruction) in instructions.iter().enumerate() {
        for b in instruction.reads() {
            if let Some(&w) = writer.get(&b) {
                successors[w].push(i);
            }
            readers.entry(b).or_default().push(i);
        }
        for b in instruction.writes() {
            let before = readers
                .remove(&b)
                .unwrap_or_default()
                .into_iter()
                .chain(writer.insert(b, i));
            for p in before.filter(|&p| p != i) {
                successors[p].push(i);
            }
        }
    }
    // Ascending as they came; those that wait for two buffers stand twice, side by side.
    successors.iter_mut().for_each(Vec::dedup);
    successors
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::Lifetime;
    use ir::program::CollectiveItem;
    use ir::reshard::LayoutStep;
    use ir::{Axis, DeviceMesh, Pass, Rank, Reduction, ShardingSpec, StreamId};

    fn mesh() -> LogicalMesh {
        let devices = DeviceMesh {
            first_rank: Rank(0),
            n_devices: 2,
        };
        LogicalMesh::new(
            devices,
            vec![Axis {
                name: "x".into(),
                size: 2,
            }],
        )
        .expect("2 = 2")
    }

    fn buffers(n: usize, elements: u64) -> Vec<DraftBuffer> {
        let one = |i| DraftBuffer {
            name: format!("b{i}"),
            dtype: DType::F32,
            lens: vec![elements],
            spec: ShardingSpec::replicated(1),
            pieces: None,
            lifetime: Lifetime::ByUse,
            value: None,
            space: ir::program::Space::Device,
        };
        (0..n).map(one).collect()
    }

    fn instruction(kind: InstrKind) -> Instruction {
        Instruction {
            kind,
            stream: StreamId(0),
            deps: vec![],
            events: vec![],
            pass: Pass::F,
            layer: None,
            call: ir::program::Call::Own,
        }
    }

    fn reduce(b: u32) -> Instruction {
        let step = LayoutStep::AllReduce {
            axes: vec![AxisId::new(0)],
        };
        let item = CollectiveItem {
            step,
            input: BufferId(b),
            output: BufferId(b),
        };
        instruction(InstrKind::Collective {
            contract: ir::Contract::new(
                CollectiveKind::AllReduce(Reduction::Sum),
                ir::DType::F32,
                ir::Order::Fixed,
            ),
            kind: CollectiveKind::AllReduce(Reduction::Sum),
            axes: vec![AxisId::new(0)],
            items: vec![item],
        })
    }

    fn copy(input: u32, output: u32) -> Instruction {
        instruction(InstrKind::Copy {
            input: BufferId(input),
            output: BufferId(output),
        })
    }

    fn show(instructions: &[Instruction]) -> String {
        let one = |i: &Instruction| match &i.kind {
            InstrKind::Collective { items, .. } => format!(
                "reduce{:?}",
                items.iter().map(|i| i.input.0).collect::<Vec<_>>()
            ),
            InstrKind::Copy { input, output } => format!("copy[{}->{}]", input.0, output.0),
            other => panic!("{other:?} is not made here"),
        };
        instructions.iter().map(one).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn step_phases_gather_what_is_ready() {
        let all = buffers(6, 8);
        let mesh = mesh();
        let b = Buffers {
            all: &all,
            mesh: &mesh,
            sizes: &BucketSizes::default(),
        };
        let out = list_schedule(
            vec![
                reduce(0),
                copy(0, 3),
                reduce(1),
                copy(1, 4),
                copy(2, 5),
                reduce(4),
            ],
            b,
            Some(Region::StepBegin),
        );
        assert_eq!(
            show(&out),
            "copy[2->5] reduce[0, 1] copy[0->3] copy[1->4] reduce[4]"
        );
    }

    #[test]
    fn buckets_are_bounded() {
        // 2^25 f32 are 128 MiB: two fit a bucket.
        let all = buffers(3, 1 << 25);
        let mesh = mesh();
        let out = list_schedule(
            (0..3).map(reduce).collect(),
            Buffers {
                all: &all,
                mesh: &mesh,
                sizes: &BucketSizes::default(),
            },
            Some(Region::StepBegin),
        );
        assert_eq!(show(&out), "reduce[0, 1] reduce[2]");
    }
}
