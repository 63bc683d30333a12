//! Instructions that are joined, and some that are not.

use super::*;
use ir::program::{Buffer, BufferClass, Event, Instruction};
use ir::{DType, DeviceMesh, InstrId, LogicalMesh, Pass, Rank, ShardingSpec, StageId, StreamId};

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

pub(in crate::execute) fn instruction(kind: InstrKind) -> Instruction {
    Instruction {
        kind,
        stream: StreamId::new(0),
        deps: Vec::new(),
        events: Vec::new(),
        pass: Pass::F,
        layer: None,
    }
}

fn fill(b: u32) -> Instruction {
    instruction(InstrKind::Fill {
        value: 0.0,
        output: BufferId(b),
    })
}

pub(in crate::execute) fn op(kind: OpKind, x: u32, y: u32) -> Instruction {
    instruction(InstrKind::Compute {
        path: "a".into(),
        kind,
        inputs: vec![BufferId(x)],
        outputs: vec![BufferId(y)],
    })
}

fn square(x: u32, y: u32) -> Instruction {
    op(OpKind::SumSquares, x, y)
}

/// How the instructions are joined in a role whose buffers do not meet but for the last, which is
/// where buffer 0 is.
fn counts(instructions: &[Instruction]) -> Vec<usize> {
    let mut offsets: Vec<u64> = (0..32).map(|i| 256 * i).collect();
    offsets.push(0);
    let every: Vec<usize> = (0..instructions.len()).collect();
    joined(
        &role(&offsets),
        instructions,
        &every,
        None,
        &Chained::default(),
    )
}

#[test]
fn neighbours_of_one_kind_are_joined() {
    let all: Vec<_> = (0..5)
        .map(fill)
        .chain((0..4).map(|i| square(i, 8 + i)))
        .collect();
    assert_eq!(counts(&all), [5, 0, 0, 0, 0, 4, 0, 0, 0]);
    // One value may be read by all.
    let all: Vec<_> = (0..4).map(|i| square(0, 8 + i)).collect();
    assert_eq!(counts(&all), [4, 0, 0, 0]);
    // Three are too few, and so are three on each side of something else.
    assert_eq!(counts(&[fill(0), fill(1), fill(2)]), [1, 1, 1]);
    let mut parted: Vec<_> = (0..6).map(fill).collect();
    parted.insert(3, op(OpKind::Layout, 9, 10));
    assert_eq!(counts(&parted), [1; 7]);
}

#[test]
fn what_is_ordered_is_not_joined() {
    let four = || (0..4).map(|i| square(i, 8 + i)).collect::<Vec<_>>();
    let with = |last: Instruction| {
        let mut all = four();
        all.push(last);
        counts(&all)
    };
    assert_eq!(with(square(4, 12)), [5, 0, 0, 0, 0]);
    for (what, last) in [
        ("it reads what one before writes", square(9, 12)),
        ("it writes what one before reads", square(4, 0)),
        ("it writes what one before writes", square(4, 11)),
        ("it writes the bytes of another's operand", square(4, 32)),
    ] {
        assert_eq!(with(last), [4, 0, 0, 0, 1], "{what}");
    }
    // Bytes within those of a longer read, behind a shorter one.
    let mut role = role(&[0, 64, 1024, 1280, 1536, 1792, 2048, 80]);
    role.buffers[0].bytes = 256;
    let all = [
        square(0, 2),
        square(1, 3),
        square(6, 4),
        square(6, 5),
        square(6, 7),
    ];
    assert_eq!(
        joined(&role, &all, &[0, 1, 2, 3, 4], None, &Chained::default()),
        [4, 0, 0, 0, 1]
    );
    // Another stream, something that is waited for, and a slot's first wait.
    let mut other = square(4, 12);
    other.stream = StreamId::new(1);
    assert_eq!(with(other), [4, 0, 0, 0, 1]);
    let mut waits = square(4, 12);
    waits.deps = vec![InstrId::new(0)];
    assert_eq!(with(waits), [4, 0, 0, 0, 1]);
    let mut waits = square(4, 12);
    waits.events = vec![Event::Drained(StreamId::new(1))];
    assert_eq!(with(waits), [4, 0, 0, 0, 1]);
    let mut all = four();
    all[0].events = vec![Event::Drained(StreamId::new(1))];
    assert_eq!(counts(&all), [4, 0, 0, 0]);
    // What is not played is no neighbour.
    let all: Vec<_> = (0..6).map(fill).collect();
    let role = self::role(&(0..8).map(|i| 256 * i).collect::<Vec<_>>());
    assert_eq!(
        joined(&role, &all, &[0, 1, 3, 5], None, &Chained::default()),
        [4, 0, 0, 0]
    );
}
