//! Neighbours that are chains, and some that are none.

use super::*;
use crate::execute::joined::tests::{instruction, op, role};
use ir::op::Einsum;
use ir::program::{Event, Template, TemplateKind};
use ir::{InstrId, StreamId};

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

pub(in crate::execute) fn dot(l: u32, r: u32, y: u32) -> Instruction {
    let einsum = Einsum::parse("ij,jk->ik").expect("an einsum");
    many(OpKind::DotGeneral { einsum }, &[l, r], y)
}

fn add(l: u32, r: u32, y: u32) -> Instruction {
    many(OpKind::Binary { f: Binary::Add }, &[l, r], y)
}

pub(in crate::execute) fn gelu(x: u32, y: u32) -> Instruction {
    let f = Unary::GeluTanh;
    op(OpKind::Unary { f }, x, y)
}

fn gelu_grad(before: u32, dy: u32, y: u32) -> Instruction {
    let f = Binary::GeluTanhGrad;
    many(OpKind::Binary { f }, &[before, dy], y)
}

pub(in crate::execute) fn accumulate(x: u32, y: u32) -> Instruction {
    op(OpKind::Accumulate { dtype: DType::F32 }, x, y)
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
    let template = |instructions: &[Instruction]| Template {
        kind: TemplateKind::Forward,
        chunk: 0,
        instructions: instructions.to_vec(),
    };
    role.templates = vec![template(all), template(others)];
    let every: Vec<usize> = (0..all.len()).collect();
    chained(&role, &Uses::of(&role), all, &every, None)
}

fn counts(all: &[Instruction]) -> Vec<usize> {
    chains_of(all, &[], &[]).counts
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
    read_later.push(gelu(12, 14));
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
        ("a sum lies on a factor", (13, 0), [1, 1, 1]),
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
    assert_eq!(counts(&[dot(0, 1, 12), add(2, 12, 13)], (13, 2)), [2, 0]);
    let residual = [dot(0, 1, 12), add(12, 2, 13), add(3, 13, 14)];
    assert_eq!(counts(&residual, (14, 3)), [3, 0, 0]);
    assert_eq!(counts(&residual, (14, 2)), [2, 0, 1]);
    assert_eq!(
        counts(&[dot(0, 1, 12), gelu_grad(2, 12, 13)], (13, 2)),
        [1, 1]
    );
}
