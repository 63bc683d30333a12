//! Calls of what is played.

use super::*;
use ir::op::{Einsum, Unary};
use ir::program::{Buffer, BufferClass, InstrKind, RoleProgram, Space};
use ir::{BufferId, DType, DeviceMesh, LogicalMesh, OpKind, Pass, Rank};
use ir::{ShardingSpec, StageId, StreamId};
use std::collections::BTreeMap;

/// A role with scalars at these offsets.
pub(in crate::execute) fn role(offsets: &[u64]) -> RoleProgram {
    let devices = DeviceMesh {
        first_rank: Rank(0),
        n_devices: 1,
    };
    let buffer = |&offset: &u64| Buffer {
        name: "x".into(),
        dtype: DType::F32,
        lens: Vec::new(),
        spec: ShardingSpec::replicated(0),
        pieces: None,
        class: BufferClass::Step,
        turns: None,
        space: Space::Device,
        offset,
        bytes: 4,
    };
    RoleProgram {
        stage: StageId::new(0),
        mesh: LogicalMesh::new(devices, Vec::new()).expect("a mesh of one"),
        streams: Vec::new(),
        buffers: offsets.iter().map(buffer).collect(),
        templates: Vec::new(),
        trace: Vec::new(),
        arena_bytes: 1 << 20,
        other_arenas: BTreeMap::new(),
        states: Vec::new(),
        loss: None,
        grad_norm: None,
    }
}

pub(in crate::execute) fn instruction(kind: InstrKind, call: Call) -> Instruction {
    Instruction {
        kind,
        stream: StreamId::new(0),
        deps: Vec::new(),
        events: Vec::new(),
        pass: Pass::F,
        layer: None,
        call,
    }
}

fn many(kind: OpKind, inputs: &[u32], output: u32, call: Call) -> Instruction {
    let kind = InstrKind::Compute {
        path: "a".into(),
        kind,
        inputs: inputs.iter().map(|b| BufferId(*b)).collect(),
        outputs: vec![BufferId(output)],
    };
    instruction(kind, call)
}

pub(in crate::execute) fn op(kind: OpKind, x: u32, y: u32) -> Instruction {
    many(kind, &[x], y, Call::Own)
}

pub(in crate::execute) fn dot(l: u32, r: u32, y: u32) -> Instruction {
    let einsum = Einsum::parse("ij,jk->ik").expect("an einsum");
    many(OpKind::DotGeneral { einsum }, &[l, r], y, Call::Own)
}

pub(in crate::execute) fn gelu(x: u32, y: u32) -> Instruction {
    op(OpKind::Unary { f: Unary::GeluTanh }, x, y)
}

pub(in crate::execute) fn accumulate(x: u32, y: u32, call: Call) -> Instruction {
    many(OpKind::Accumulate { dtype: DType::F32 }, &[x], y, call)
}

/// A chain of three, whose first value is kept, and four that are joined.
fn template() -> Vec<Instruction> {
    let chained = |is_kept| Call::Chained { is_kept };
    let mut all = vec![dot(0, 1, 2), gelu(2, 3), gelu(3, 4)];
    (all[1].call, all[2].call) = (chained(true), chained(false));
    let output = BufferId(5);
    let fill = |call| instruction(InstrKind::Fill { value: 0.0, output }, call);
    all.push(fill(Call::Own));
    all.extend((0..3).map(|_| fill(Call::Joined)));
    all
}

#[test]
fn neighbours_of_one_call_are_played_together() {
    let made = Calls::of_all(&template());
    assert_eq!(made.n_chained, [3, 0, 0, 1, 1, 1, 1]);
    assert_eq!(made.is_kept, [true, false, true, true, true, true, true]);
    assert_eq!(made.n_joined, [1, 1, 1, 4, 0, 0, 0]);
}

#[test]
fn what_is_not_played_is_no_neighbour() {
    let of = |played: &[usize]| {
        let made = Calls::of(&template(), played);
        (made.n_chained, made.is_kept, made.n_joined)
    };
    // The end of a chain may be left out, and what is left of one is none.
    let two = (vec![2, 0], vec![true, true], vec![1, 1]);
    assert_eq!(of(&[0, 1]), two);
    let apart = (vec![1, 1], vec![true, true], vec![1, 1]);
    assert_eq!(of(&[0, 2]), apart);
    let end = (vec![1, 1, 1, 1], vec![true; 4], vec![1, 3, 0, 0]);
    assert_eq!(of(&[2, 4, 5, 6]), end);
    // Some that are joined without the first of them.
    assert_eq!(of(&[3, 6]).2, [2, 0]);
    assert_eq!(of(&[1, 3, 5]).2, [1, 2, 0]);
}
