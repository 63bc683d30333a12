//! Neighbours that are one call, and some that are not.

use super::*;
use ir::op::{Binary, Einsum, Unary};
use ir::program::{
    Buffer, BufferClass, Event, InstrKind, Instruction, Template, TemplateKind, Turns,
};
use ir::{DType, DeviceMesh, InstrId, LogicalMesh, OpKind, Pass, Rank};
use ir::{ShardingSpec, StageId, StreamId};
use std::collections::BTreeMap;

/// A role with scalars at these offsets.
fn role(offsets: &[u64]) -> RoleProgram {
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

fn instruction(kind: InstrKind) -> Instruction {
    Instruction {
        kind,
        stream: StreamId::new(0),
        deps: Vec::new(),
        events: Vec::new(),
        pass: Pass::F,
        layer: None,
        call: Call::Own,
    }
}

fn fill(b: u32) -> Instruction {
    instruction(InstrKind::Fill {
        value: 0.0,
        output: BufferId(b),
    })
}

fn op(kind: OpKind, x: u32, y: u32) -> Instruction {
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

/// Bytes from buffer to buffer, of which each has 4.
const APART: u64 = 256;
/// Buffers: the first of them live for a step, the others in their template.
const BUFFERS: u32 = 24;
const LASTING: u32 = 12;

fn many(kind: OpKind, inputs: &[u32], output: u32) -> Instruction {
    instruction(InstrKind::Compute {
        path: "a".into(),
        kind,
        inputs: inputs.iter().map(|b| BufferId(*b)).collect(),
        outputs: vec![BufferId(output)],
    })
}

fn dot(l: u32, r: u32, y: u32) -> Instruction {
    let einsum = Einsum::parse("ij,jk->ik").expect("an einsum");
    many(OpKind::DotGeneral { einsum }, &[l, r], y)
}

fn add(l: u32, r: u32, y: u32) -> Instruction {
    many(OpKind::Binary { f: Binary::Add }, &[l, r], y)
}

fn gelu(x: u32, y: u32) -> Instruction {
    let f = Unary::GeluTanh;
    op(OpKind::Unary { f }, x, y)
}

fn gelu_grad(before: u32, dy: u32, y: u32) -> Instruction {
    let f = Binary::GeluTanhGrad;
    many(OpKind::Binary { f }, &[before, dy], y)
}

fn accumulate(x: u32, y: u32) -> Instruction {
    op(OpKind::Accumulate { dtype: DType::F32 }, x, y)
}

/// The number of instructions of the chain that begins with each: 1 of one that is alone, 0 of one that
/// belongs to an earlier one; and whether its result is written though the next one takes it.
#[derive(Debug, PartialEq)]
struct Chained {
    counts: Vec<usize>,
    kept: Vec<bool>,
}

/// How often each begins one of the calls that `is_later` says the later ones of.
fn counted(calls: &[Call], is_later: fn(Call) -> bool) -> Vec<usize> {
    let mut counts = vec![1; calls.len()];
    let mut first = 0;
    for (i, &call) in calls.iter().enumerate() {
        if is_later(call) {
            counts[first] += 1;
            counts[i] = 0;
        } else {
            first = i;
        }
    }
    counts
}

/// The calls of the first template of a role.
fn marked(mut role: RoleProgram) -> Vec<Call> {
    mark(&mut role);
    let first = role.templates[0].instructions.iter();
    first.map(|i| i.call).collect()
}

fn template(instructions: &[Instruction]) -> Template {
    Template {
        kind: TemplateKind::Forward,
        chunk: 0,
        instructions: instructions.to_vec(),
    }
}

/// The chains of a template with these instructions, of a role that plays one with these others too;
/// buffers lie apart, but for those that are moved to another one's place.
fn chains_of(all: &[Instruction], others: &[Instruction], moved: &[(u32, u32)]) -> Chained {
    let offset = |b: u32| {
        let place = moved.iter().find(|m| m.0 == b).map_or(b, |m| m.1);
        u64::from(place) * APART
    };
    let mut role = role(&(0..BUFFERS).map(offset).collect::<Vec<_>>());
    for buffer in &mut role.buffers[LASTING as usize..] {
        buffer.class = BufferClass::Transient;
    }
    role.templates = vec![template(all), template(others)];
    let calls = marked(role);
    let mut kept = vec![true; all.len()];
    for (i, call) in calls.iter().enumerate() {
        if let Call::Chained { is_kept } = *call {
            kept[i - 1] = is_kept;
        }
    }
    let is_later = |call| matches!(call, Call::Chained { .. });
    Chained {
        counts: counted(&calls, is_later),
        kept,
    }
}

fn counts(all: &[Instruction]) -> Vec<usize> {
    chains_of(all, &[], &[]).counts
}

/// How instructions are joined in a role.
fn joined_in(mut role: RoleProgram, instructions: &[Instruction]) -> Vec<usize> {
    role.templates = vec![template(instructions)];
    counted(&marked(role), |call| call == Call::Joined)
}

/// How the instructions are joined in a role whose buffers do not meet but for the last, which is
/// where buffer 0 is.
fn joined(instructions: &[Instruction]) -> Vec<usize> {
    let mut offsets: Vec<u64> = (0..32).map(|i| 256 * i).collect();
    offsets.push(0);
    joined_in(role(&offsets), instructions)
}

#[test]
fn what_follows_a_product_is_a_chain() {
    let made = |all: &[Instruction]| {
        let made = chains_of(all, &[], &[]);
        (made.counts, made.kept)
    };
    let sum = [dot(0, 1, 12), accumulate(12, 2)];
    assert_eq!(made(&sum), (vec![2, 0], vec![false, true]));
    let biased = [dot(0, 1, 12), add(12, 2, 13), gelu(13, 14)];
    assert_eq!(made(&biased), (vec![3, 0, 0], vec![false, false, true]));
    // A value that lives on is kept, and so is one that a second instruction reads.
    let kept = [dot(0, 1, 12), add(12, 2, 3), gelu(3, 14)];
    assert_eq!(made(&kept), (vec![3, 0, 0], vec![false, true, true]));
    let mut again = biased.to_vec();
    again.push(gelu_grad(13, 14, 15));
    let expected = (vec![3, 0, 0, 1], vec![false, true, true, true]);
    assert_eq!(made(&again), expected);
    // A bias and a residual, on either side; GELU's gradient.
    let residual = [dot(0, 1, 12), add(12, 2, 13), add(3, 13, 4)];
    assert_eq!(counts(&residual), [3, 0, 0]);
    assert_eq!(counts(&[dot(0, 1, 12), gelu_grad(2, 12, 3)]), [2, 0]);
    // Sums that lie over the product, which nobody else sees then, though the sum lives on.
    let over = [dot(0, 1, 12), add(12, 2, 12), add(3, 12, 13)];
    assert_eq!(made(&over), (vec![3, 0, 0], vec![false, false, true]));
    let lasting = [dot(0, 1, 11), add(11, 2, 11), gelu(11, 12)];
    assert_eq!(made(&lasting), (vec![3, 0, 0], vec![false, true, true]));
    let mut read_later = over.to_vec();
    read_later.push(op(OpKind::SumSquares, 12, 14));
    assert_eq!(counts(&read_later), [2, 0, 1, 1]);
    // One after the other, each with its own.
    let two = [
        dot(0, 1, 12),
        accumulate(12, 2),
        dot(0, 3, 13),
        add(13, 4, 5),
    ];
    assert_eq!(counts(&two), [2, 0, 2, 0]);
    // Three ops are the most, and nothing follows a sum in an accumulator.
    let long = [
        dot(0, 1, 12),
        add(12, 2, 13),
        add(13, 3, 14),
        add(14, 4, 15),
    ];
    assert_eq!(counts(&long), [3, 0, 0, 1]);
    let end = [dot(0, 1, 12), accumulate(12, 2), gelu(2, 13)];
    assert_eq!(counts(&end), [2, 0, 1]);
}

#[test]
fn what_others_could_tell_is_no_chain() {
    let pair = || vec![dot(0, 1, 12), accumulate(12, 2)];
    assert_eq!(counts(&pair()), [2, 0]);
    // The value in the middle is read elsewhere, in this template or another one, or written twice.
    let mut again = pair();
    again.push(gelu(12, 13));
    assert_eq!(counts(&again), [1, 1, 1]);
    assert_eq!(chains_of(&pair(), &[gelu(12, 13)], &[]).counts, [1, 1]);
    assert_eq!(chains_of(&pair(), &[gelu(0, 12)], &[]).counts, [1, 1]);
    // It lives on.
    assert_eq!(counts(&[dot(0, 1, 11), accumulate(11, 2)]), [1, 1]);
    // It is twice an operand, is another operand than one can be, or none.
    assert_eq!(counts(&[dot(0, 1, 12), add(12, 12, 13)]), [1, 1]);
    assert_eq!(counts(&[dot(0, 1, 12), gelu_grad(12, 2, 13)]), [1, 1]);
    assert_eq!(counts(&[dot(0, 1, 12), add(2, 3, 13)]), [1, 1]);
    // Sums in other types are rounded to them.
    let rounded = OpKind::Accumulate { dtype: DType::Bf16 };
    assert_eq!(counts(&[dot(0, 1, 12), op(rounded, 12, 2)]), [1, 1]);
    // A member waits, for its slot or an earlier one, or is on another stream.
    let mut waits = pair();
    waits[1].deps = vec![InstrId::new(0)];
    assert_eq!(counts(&waits), [1, 1]);
    let mut waits = pair();
    waits[1].events = vec![Event::Drained(StreamId::new(1))];
    assert_eq!(counts(&waits), [1, 1]);
    let mut other = pair();
    other[1].stream = StreamId::new(1);
    assert_eq!(counts(&other), [1, 1]);
    let mut first = pair();
    first[0].events = vec![Event::Drained(StreamId::new(1))];
    assert_eq!(counts(&first), [2, 0]);
    // Something stands between, or is not played.
    let mut parted = pair();
    parted.insert(1, gelu(3, 4));
    assert_eq!(counts(&parted), [1, 1, 1]);
}

#[test]
fn nothing_is_written_where_it_is_read() {
    let chain = [dot(0, 1, 12), add(12, 2, 13), gelu(13, 14)];
    let counts = |all: &[Instruction], moved| chains_of(all, &[], &[moved]).counts;
    for (what, moved, expected) in [
        ("apart", (14, 14), [3, 0, 0]),
        ("the result lies on a factor", (14, 1), [2, 0, 1]),
        ("the result lies on the bias", (14, 2), [2, 0, 1]),
        ("a sum lies on a factor", (13, 0), [1, 2, 0]),
        (
            "the value in the middle, which is not written",
            (12, 0),
            [3, 0, 0],
        ),
    ] {
        assert_eq!(counts(&chain, moved), expected, "{what}");
    }
    // A value that is kept is written.
    let kept = [dot(0, 1, 12), add(12, 2, 3), gelu(3, 14)];
    assert_eq!(counts(&kept, (14, 3)), [2, 0, 1]);
    // A sum may lie where its other operand does, but not on that of an earlier one.
    assert_eq!(counts(&[dot(0, 1, 12), add(2, 12, 2)], (13, 13)), [2, 0]);
    let residual = [dot(0, 1, 12), add(12, 2, 13), add(3, 13, 14)];
    // Two buffers at one place are not told from two that overlap.
    assert_eq!(counts(&residual, (14, 3)), [2, 0, 1]);
    let over = [dot(0, 1, 12), add(12, 2, 13), add(3, 13, 3)];
    assert_eq!(counts(&over, (14, 14)), [3, 0, 0]);
    assert_eq!(counts(&residual, (14, 2)), [2, 0, 1]);
    assert_eq!(
        counts(&[dot(0, 1, 12), gelu_grad(2, 12, 13)], (13, 2)),
        [1, 1]
    );
}

#[test]
fn neighbours_of_one_kind_are_joined() {
    let all: Vec<_> = (0..5)
        .map(fill)
        .chain((0..4).map(|i| square(i, 8 + i)))
        .collect();
    assert_eq!(joined(&all), [5, 0, 0, 0, 0, 4, 0, 0, 0]);
    // One value may be read by all.
    let all: Vec<_> = (0..4).map(|i| square(0, 8 + i)).collect();
    assert_eq!(joined(&all), [4, 0, 0, 0]);
    // Three are too few, and so are three on each side of something else.
    assert_eq!(joined(&[fill(0), fill(1), fill(2)]), [1, 1, 1]);
    let mut parted: Vec<_> = (0..6).map(fill).collect();
    parted.insert(3, op(OpKind::Layout, 9, 10));
    assert_eq!(joined(&parted), [1; 7]);
}

#[test]
fn what_is_ordered_is_not_joined() {
    let four = || (0..4).map(|i| square(i, 8 + i)).collect::<Vec<_>>();
    let with = |last: Instruction| {
        let mut all = four();
        all.push(last);
        joined(&all)
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
    assert_eq!(joined_in(role, &all), [4, 0, 0, 0, 1]);
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
    assert_eq!(joined(&all), [4, 0, 0, 0]);
    // Those of chains are left alone.
    let all: Vec<_> = (0..6).map(|i| accumulate(i, 8 + i)).collect();
    assert_eq!(joined(&all), [6, 0, 0, 0, 0, 0]);
    let mut all: Vec<_> = vec![dot(20, 21, 22), accumulate(22, 23)];
    all.extend((0..4).map(|i| accumulate(i, 8 + i)));
    let role = self::role(&(0..32).map(|i| 256 * i).collect::<Vec<_>>());
    let mut of_chains = role.clone();
    of_chains.buffers[22].class = BufferClass::Transient;
    assert_eq!(joined_in(of_chains, &all), [1, 1, 4, 0, 0, 0]);
    assert_eq!(joined_in(role, &all), [1, 5, 0, 0, 0, 0]);
}

#[test]
fn copies_by_turns_are_never_the_same_bytes() {
    let chain = |turns: Option<u32>| {
        let mut role = role(
            &(0..BUFFERS)
                .map(|b| u64::from(b) * APART)
                .collect::<Vec<_>>(),
        );
        role.buffers[12].class = BufferClass::Transient;
        // The bias and the sum have their copies by turns, or two copies each over each other.
        for b in [2, 13] {
            let buffer = &mut role.buffers[b];
            buffer.class = BufferClass::PerMicrobatch { slots: 2 };
            buffer.offset = 2 * APART;
            buffer.turns = turns.map(|row| Turns {
                row,
                copies: vec![0, 1].into(),
            });
        }
        role.templates = vec![template(&[dot(0, 1, 12), gelu_grad(2, 12, 13)])];
        marked(role)[1]
    };
    assert_eq!(chain(None), Call::Own);
    assert_eq!(chain(Some(0)), Call::Chained { is_kept: false });
}

#[test]
fn calls_can_be_forgotten() {
    let mut role = role(&[0, 256, 512, 768]);
    role.buffers[2].class = BufferClass::Transient;
    role.templates = vec![template(&[dot(0, 1, 2), accumulate(2, 3)])];
    let before = role.clone();
    mark(&mut role);
    assert!(before != role);
    forget(&mut role);
    assert!(before == role);
}

fn mul(l: u32, r: u32, y: u32) -> Instruction {
    many(OpKind::Binary { f: Binary::Mul }, &[l, r], y)
}

fn silu(x: u32, y: u32) -> Instruction {
    op(OpKind::Unary { f: Unary::Silu }, x, y)
}

fn silu_grad(x: u32, dy: u32, y: u32) -> Instruction {
    let f = Binary::SiluGrad;
    many(OpKind::Binary { f }, &[x, dy], y)
}

fn rms_norm(x: u32, gamma: u32, [y, rstd]: [u32; 2]) -> Instruction {
    let mut made = many(OpKind::RmsNorm { eps: 1e-5 }, &[x, gamma], y);
    if let InstrKind::Compute { outputs, .. } = &mut made.kind {
        outputs.push(BufferId(rstd));
    }
    made
}

fn rms_norm_gradient(dy: u32, dx: u32) -> Instruction {
    many(OpKind::RmsNormGradInput, &[dy, 1, 2, 3], dx)
}

#[test]
fn functions_of_elements_are_gone_through_together() {
    let made = |all: &[Instruction]| {
        let made = chains_of(all, &[], &[]);
        (made.counts, made.kept)
    };
    let (no, yes) = (false, true);
    let forward = [silu(0, 12), mul(12, 1, 13)];
    assert_eq!(made(&forward), (vec![2, 0], vec![no, yes]));
    // One that another instruction reads, or that lives on.
    let mut read = forward.to_vec();
    read.push(op(OpKind::SumSquares, 12, 14));
    assert_eq!(made(&read), (vec![2, 0, 1], vec![yes; 3]));
    let lasting = [silu(0, 11), mul(11, 1, 13)];
    assert_eq!(made(&lasting), (vec![2, 0], vec![yes; 2]));
    // Values further back, and operands in common.
    let gradient = [mul(0, 1, 12), mul(0, 2, 13), silu_grad(3, 12, 14)];
    let expected = (vec![3, 0, 0], vec![no, yes, yes]);
    assert_eq!(made(&gradient), expected);
    // Four are the most, and what has nothing in common stays apart.
    let long: Vec<_> = (0..5).map(|i| silu(12 + i, 13 + i)).collect();
    assert_eq!(counts(&long), [4, 0, 0, 0, 1]);
    assert_eq!(counts(&[silu(0, 12), silu(1, 13)]), [1, 1]);
    // A norm of a sum, and a gradient of a norm's argument that a sum uses up.
    let norm = [add(0, 1, 11), rms_norm(11, 2, [12, 13])];
    assert_eq!(made(&norm), (vec![2, 0], vec![yes; 2]));
    assert_eq!(counts(&[mul(0, 1, 11), rms_norm(11, 2, [12, 13])]), [1, 1]);
    assert_eq!(counts(&[add(0, 1, 11), rms_norm(2, 11, [12, 13])]), [1, 1]);
    // The norm of an operand of the sum is none of the sum, and neither has it in two places.
    assert_eq!(counts(&[add(0, 1, 11), rms_norm(0, 2, [12, 13])]), [1, 1]);
    assert_eq!(counts(&[add(0, 1, 11), rms_norm(11, 11, [12, 13])]), [1, 1]);
    let gradient = [rms_norm_gradient(0, 12), add(4, 12, 4)];
    assert_eq!(made(&gradient), (vec![2, 0], vec![no, yes]));
    assert_eq!(counts(&[rms_norm_gradient(0, 11), add(4, 11, 4)]), [1, 1]);
    assert_eq!(counts(&[rms_norm_gradient(0, 12), add(12, 12, 13)]), [1, 1]);
    // One that waits.
    let mut waits = forward.to_vec();
    waits[1].events = vec![Event::Drained(StreamId::new(1))];
    assert_eq!(counts(&waits), [1, 1]);
}

#[test]
fn elements_are_read_before_they_are_written() {
    let counts = |all: &[Instruction], moved| chains_of(all, &[], &[moved]).counts;
    // In the very buffer of an operand, not on its bytes by another name, and never on a weight's.
    let forward = [silu(0, 12), mul(12, 1, 1)];
    assert_eq!(counts(&forward, (12, 12)), [2, 0]);
    let forward = [silu(0, 12), mul(12, 1, 13)];
    assert_eq!(counts(&forward, (13, 1)), [1, 1]);
    // What is not written may lie anywhere.
    assert_eq!(counts(&forward, (12, 1)), [2, 0]);
    let norm = [add(0, 1, 0), rms_norm(0, 2, [12, 13])];
    assert_eq!(counts(&norm, (12, 12)), [2, 0]);
    assert_eq!(counts(&norm, (12, 2)), [1, 1]);
    assert_eq!(counts(&norm, (13, 1)), [1, 1]);
    let gradient = [rms_norm_gradient(0, 12), add(4, 12, 13)];
    assert_eq!(counts(&gradient, (13, 0)), [1, 1]);
}

/// A gradient lies where a saved activation did, in a buffer that lives on; it is not written where the
/// next to touch the copy writes it.
#[test]
fn what_is_written_before_it_is_read_is_not_kept() {
    let kept = |first_of_forward: Instruction| {
        let mut role = role(
            &(0..BUFFERS)
                .map(|b| u64::from(b) * APART)
                .collect::<Vec<_>>(),
        );
        for buffer in &mut role.buffers[..4] {
            buffer.class = BufferClass::PerMicrobatch { slots: 1 };
        }
        let backward = [mul(0, 1, 1), mul(0, 2, 2), silu_grad(3, 1, 3)];
        role.templates = vec![template(&[first_of_forward]), template(&backward)];
        let slot = |template: usize, m: u32| ir::program::Slot {
            template: TemplateId::new(template),
            microbatch: Some(m),
        };
        role.trace = (0..2).flat_map(|m| [slot(0, m), slot(1, m)]).collect();
        mark(&mut role);
        let calls = role.templates[1].instructions.iter().map(|i| i.call);
        calls.collect::<Vec<_>>()
    };
    let chained = |is_kept| Call::Chained { is_kept };
    assert_eq!(
        kept(dot(5, 6, 1)),
        [Call::Own, chained(false), chained(true)]
    );
    assert_eq!(kept(silu(1, 5)), [Call::Own, chained(true), chained(true)]);
}
