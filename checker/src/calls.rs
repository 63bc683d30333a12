//! Calls: neighbours of a list that a device may make one of compute what they compute one by one, but
//! for the rounding of values that are then not written.
//!
//! The rules are stated here apart from the lowering's pass that marks calls. A **chain** of a product
//! is a product of matrices and up to two ops, of which each takes what the one before makes: sums, GELU or its
//! gradient, a sum in an f32 accumulator. All on one stream, and the later ones wait for nothing. A
//! value in the middle is seen by the chain alone, unless it is kept for others, as GELU's argument
//! can be. In no slot is a byte written that the call reads: it may read at any time while it
//! writes. But a sum is made element by element and may lie where its operand does.
//!
//! A chain of **elements** begins otherwise (`elements`).
//!
//! Instructions that are **joined** do the same to other tensors, on one stream, wait for nothing but
//! what the first one waits for, and none touches a byte that another one writes.

mod elements;

use crate::memory::extent;
use crate::report::{Report, instr_place};
use crate::side_by_side::each;
use ir::op::{Binary, Unary};
use ir::program::{Call, InstrKind, Instruction, Program, RoleProgram, Space, Template};
use ir::{BufferId, DType, InstrId, OpKind, TemplateId};
use std::collections::BTreeSet;

/// Most instructions of a chain.
const LONGEST: usize = 3;

/// Checks every role.
pub(crate) fn check(program: &Program, report: &mut Report) {
    each(program.roles.len(), report, |i, report| {
        let role = &program.roles[i];
        let touched = touched(role);
        for (t, template) in role.templates.iter().enumerate() {
            let t = TemplateId::new(t);
            let microbatches = microbatches(role, t);
            for (first, n) in calls(template) {
                let call = &template.instructions[first..first + n];
                let of = Of {
                    role,
                    touched: &touched,
                    microbatches: &microbatches,
                    at: (t, first),
                };
                for (k, expected, actual) in problems(&of, call) {
                    let place = instr_place(program, i, t, InstrId::new(first + k));
                    report.add(place, "call", expected, actual);
                }
            }
        }
    });
}

/// A call's surroundings.
struct Of<'a> {
    role: &'a RoleProgram,
    /// By buffer, the instructions that touch it.
    touched: &'a [Vec<(TemplateId, usize)>],
    /// Those that the template is played for.
    microbatches: &'a [Option<u32>],
    /// The first instruction.
    at: (TemplateId, usize),
}

fn touched(role: &RoleProgram) -> Vec<Vec<(TemplateId, usize)>> {
    let mut touched = vec![Vec::new(); role.buffers.len()];
    for (t, template) in role.templates.iter().enumerate() {
        for (j, instr) in template.instructions.iter().enumerate() {
            for b in instr.reads().iter().chain(&instr.writes()) {
                touched[b.index()].push((TemplateId::new(t), j));
            }
        }
    }
    touched
}

/// Microbatches of a template, each once; a copy of all buffers is looked at for each.
fn microbatches(role: &RoleProgram, t: TemplateId) -> Vec<Option<u32>> {
    let of = role.trace.iter().filter(|s| s.template == t);
    let all: BTreeSet<Option<u32>> = of.map(|s| s.microbatch).collect();
    all.into_iter().collect()
}

/// The calls of more than one instruction: the first, and how many.
fn calls(template: &Template) -> Vec<(usize, usize)> {
    let mut calls = Vec::new();
    let mut first = 0;
    for j in 1..=template.instructions.len() {
        let goes_on = template.instructions.get(j).map(|i| i.call);
        if !goes_on.is_some_and(|call| call != Call::Own) {
            let is_alone = j - first == 1 && template.instructions[first].call == Call::Own;
            calls.extend((!is_alone).then_some((first, j - first)));
            first = j;
        }
    }
    calls
}

/// By place in the call: what is expected, and what is there instead.
type Problem = (usize, String, String);

fn problems(of: &Of<'_>, call: &[Instruction]) -> Vec<Problem> {
    let mut found: Vec<Problem> = Vec::new();
    if call[0].call != Call::Own {
        let expected = "a call that begins with an instruction".into();
        return vec![(0, expected, "none before it".into())];
    }
    let is_chain = call
        .iter()
        .skip(1)
        .all(|i| matches!(i.call, Call::Chained { .. }));
    let is_joined = call.iter().skip(1).all(|i| i.call == Call::Joined);
    if !is_chain && !is_joined {
        let expected = "a chain, or instructions that are joined".into();
        return vec![(0, expected, "some of both".into())];
    }
    for (k, instr) in call.iter().enumerate().skip(1) {
        if instr.stream != call[0].stream {
            let expected = format!("{}, as the call's first", call[0].stream);
            found.push((k, expected, instr.stream.to_string()));
        }
        let waits = instr.deps.len() + instr.events.len();
        if waits > 0 {
            let actual = format!("{waits} of its own");
            found.push((k, "no waits but those of the call's first".into(), actual));
        }
    }
    let has_product = matches!(op_of(&call[0]), Some((OpKind::DotGeneral { .. }, ..)));
    match is_chain {
        true if has_product => found.extend(chain(of, call)),
        true => found.extend(elements::problems(of, call)),
        false => found.extend(joined(of, call)),
    }
    found
}

/// Buffers whose values are not written by the calls of a template, by the last instruction of each
/// call: what stands there is something else.
pub(crate) fn hidden(template: &Template) -> Vec<(usize, BufferId)> {
    let mut hidden = Vec::new();
    for (first, n) in calls(template) {
        let call = &template.instructions[first..first + n];
        for (k, pair) in call.windows(2).enumerate() {
            if pair[1].call != (Call::Chained { is_kept: false }) {
                continue;
            }
            let writes = pair[0].writes();
            let is_hidden = |b: &&BufferId| !call[k + 1..].iter().any(|i| i.writes().contains(b));
            hidden.extend(writes.iter().filter(is_hidden).map(|b| (first + n - 1, *b)));
        }
    }
    hidden
}

/// Op, operands and result of an instruction that has one.
fn op_of(instr: &Instruction) -> Option<(&OpKind, &[BufferId], BufferId)> {
    match &instr.kind {
        InstrKind::Compute {
            kind,
            inputs,
            outputs,
            ..
        } if outputs.len() == 1 => Some((kind, inputs, outputs[0])),
        _ => None,
    }
}

/// The chain up to an op: what has been done since the product.
#[derive(Clone, Copy, PartialEq)]
enum Done {
    Product,
    Sums,
    All,
}

/// The state of the chain once an op follows that takes the value as that operand.
fn follows(done: Done, kind: &OpKind, operand: usize) -> Option<Done> {
    match (done, kind) {
        (Done::All, _) => None,
        (_, OpKind::Binary { f: Binary::Add }) => Some(Done::Sums),
        (
            _,
            OpKind::Unary {
                f: Unary::GeluTanh, ..
            },
        ) => Some(Done::All),
        (
            Done::Product,
            OpKind::Binary {
                f: Binary::GeluTanhGrad,
            },
        ) if operand == 1 => Some(Done::All),
        (Done::Product, OpKind::Accumulate { dtype: DType::F32 }) => Some(Done::All),
        _ => None,
    }
}

fn chain(of: &Of<'_>, call: &[Instruction]) -> Vec<Problem> {
    let mut found = Vec::new();
    if call.len() > LONGEST {
        let expected = format!("{LONGEST} instructions of a chain at most");
        found.push((LONGEST, expected, call.len().to_string()));
    }
    let Some((OpKind::DotGeneral { .. }, factors, mut value)) = op_of(&call[0]) else {
        let actual = "another instruction".into();
        return vec![(0, "a product where a chain begins".into(), actual)];
    };
    let mut done = Done::Product;
    let mut reads: Vec<BufferId> = factors.to_vec();
    // What is written before the end.
    let mut kept: Vec<BufferId> = Vec::new();
    for (k, instr) in call.iter().enumerate().skip(1) {
        let named = |b: BufferId| format!("buffer {} ({})", b.0, of.role.buffer(b).name);
        let taken = op_of(instr).and_then(|(kind, inputs, output)| {
            let mut places = inputs.iter().enumerate().filter(|(_, b)| **b == value);
            let operand = places.next().map(|(i, _)| i)?;
            let done = follows(done, kind, operand).filter(|_| places.next().is_none())?;
            Some((kind, inputs, output, done))
        });
        let Some((kind, inputs, output, now)) = taken else {
            let expected = format!("an op that goes on with {} alone", named(value));
            found.push((k, expected, "another one".into()));
            return found;
        };
        let Call::Chained { is_kept } = instr.call else {
            return found;
        };
        if is_kept {
            kept.push(value);
            if done == Done::All || !matches!(kind, OpKind::Unary { .. }) {
                let expected = "a value that is kept for others as GELU's argument alone".into();
                found.push((k, expected, named(value)));
            }
        } else if output != value {
            let (t, first) = of.at;
            let is_own = |&(u, j): &(TemplateId, usize)| u == t && (first..=first + k).contains(&j);
            let touched = &of.touched[value.index()];
            let lives_on = of.role.buffer(value).class != ir::program::BufferClass::Transient;
            if lives_on || !touched.iter().all(is_own) {
                let expected = format!("nobody else to see {}", named(value));
                found.push((k, expected, "that others do, or it lives on".into()));
            }
        }
        // A device may also stop here. A sum may lie where its operand does.
        let is_in_place = |b: &&BufferId| now == Done::Sums && **b == output;
        let others: Vec<BufferId> = inputs.iter().copied().filter(|b| *b != value).collect();
        let mut read = reads.clone();
        read.extend(others.iter().filter(|b| !is_in_place(b)));
        let written: Vec<BufferId> = kept.iter().copied().chain([output]).collect();
        for (w, r) in overlaps(of, &written, &read) {
            let expected = format!("bytes of {} that the call does not use", named(w));
            found.push((k, expected, format!("those of {}", named(r))));
        }
        reads.extend(others);
        (value, done) = (output, now);
    }
    found
}

/// Bytes of a copy of a buffer; none of one whose copies do not end inside of what can be addressed,
/// which is a problem of its own.
fn copy(role: &RoleProgram, b: BufferId, microbatch: Option<u32>) -> Option<(Space, u64, u64)> {
    let b = role.buffer(b);
    extent(b)?;
    let start = b.offset_for(microbatch);
    Some((b.space, start, start.saturating_add(b.bytes)))
}

/// The buffers that are written, each with one that is written or read on the same bytes in some slot.
fn overlaps(of: &Of<'_>, writes: &[BufferId], reads: &[BufferId]) -> Vec<(BufferId, BufferId)> {
    let mut pairs: Vec<(BufferId, BufferId)> = Vec::new();
    for (i, &w) in writes.iter().enumerate() {
        let others = reads.iter().chain(&writes[i + 1..]);
        pairs.extend(others.map(|&r| (w, r)));
    }
    let meet = |&(a, b): &(BufferId, BufferId)| {
        of.microbatches.iter().any(|&m| {
            let both = copy(of.role, a, m).zip(copy(of.role, b, m));
            both.is_some_and(|(a, b)| a.0 == b.0 && a.1 < b.2 && b.1 < a.2)
        })
    };
    pairs.retain(meet);
    pairs
}

/// The kinds of which many may be joined.
fn sort(instr: &Instruction) -> Option<&'static str> {
    match &instr.kind {
        InstrKind::Fill { .. } => Some("fill"),
        InstrKind::Compute { kind, .. } => matches!(
            kind.name(),
            "cast" | "accumulate" | "sum_squares" | "adam_w" | "sgd"
        )
        .then_some(kind.name()),
        _ => None,
    }
}

fn joined(of: &Of<'_>, call: &[Instruction]) -> Vec<Problem> {
    let mut found = Vec::new();
    let first = sort(&call[0]);
    for (k, instr) in call.iter().enumerate() {
        if sort(instr).is_none() || sort(instr) != first {
            let expected = format!("`{}`, as the first that is joined", first.unwrap_or("fill"));
            found.push((k, expected, "another kind".into()));
        }
    }
    let uses: Vec<(usize, BufferId, bool)> = call
        .iter()
        .enumerate()
        .flat_map(|(k, instr)| {
            let reads = instr.reads().into_iter().map(move |b| (k, b, false));
            reads.chain(instr.writes().into_iter().map(move |b| (k, b, true)))
        })
        .collect();
    let mut clashes: BTreeSet<(usize, usize)> = BTreeSet::new();
    for &m in of.microbatches {
        let mut spans: Vec<_> = uses
            .iter()
            .filter_map(|&(k, b, written)| Some((copy(of.role, b, m)?, k, written)))
            .collect();
        spans.sort_unstable();
        // Those that reach beyond where the next one begins.
        let mut open: Vec<((Space, u64, u64), usize, bool)> = Vec::new();
        for (span, k, written) in spans {
            open.retain(|(o, ..)| o.0 == span.0 && o.2 > span.1);
            let clash = open.iter().filter(|(_, l, w)| *l != k && (*w || written));
            clashes.extend(clash.map(|(_, l, _)| (k.max(*l), k.min(*l))));
            open.push((span, k, written));
        }
        // The bytes of one slot are those of all where no buffer has copies.
        if uses.iter().all(|(_, b, _)| of.role.buffer(*b).slots() == 1) {
            break;
        }
    }
    found.extend(clashes.into_iter().map(|(k, l)| {
        let expected = "bytes that nobody writes who is joined with it".into();
        (k, expected, format!("some of the {l}th before"))
    }));
    found
}
