//! Chains that go through elements: functions of elements, of tensors of one shape; a sum and a norm of
//! it; the gradient of a norm's argument and a sum with it.
//!
//! One kernel of such ops reads an element of all its tensors before it writes there. So what is
//! written lies on no byte that is read, but that it may have the very buffer of what a function of
//! elements reads. A value that is not written is taken within the chain, and whoever reads its buffer
//! behind the chain finds nothing there (`walk`): that nobody does is proved with what all buffers
//! hold.

use super::{Of, Problem, overlaps};
use ir::op::Binary;
use ir::program::{Call, InstrKind, Instruction};
use ir::{BufferId, OpKind};

/// Most functions of elements of a chain.
const LONGEST: usize = 4;

/// The kinds of a chain's instructions.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Sort {
    /// It goes through all elements of its operands.
    Function,
    /// It needs a whole row.
    Norm,
    Gradient,
}

fn sort(kind: &OpKind) -> Option<Sort> {
    match kind {
        OpKind::Unary { .. } | OpKind::Binary { .. } => Some(Sort::Function),
        OpKind::RmsNorm { .. } | OpKind::LayerNorm { .. } => Some(Sort::Norm),
        OpKind::RmsNormGradInput | OpKind::LayerNormGradInput => Some(Sort::Gradient),
        _ => None,
    }
}

/// An instruction of a chain.
struct Link<'a> {
    kind: &'a OpKind,
    sort: Sort,
    inputs: &'a [BufferId],
    outputs: &'a [BufferId],
}

fn link(instr: &Instruction) -> Option<Link<'_>> {
    match &instr.kind {
        InstrKind::Compute {
            kind,
            inputs,
            outputs,
            ..
        } if kind.arity().contains(&inputs.len()) && kind.n_results() == Some(outputs.len()) => {
            Some(Link {
                kind,
                sort: sort(kind)?,
                inputs,
                outputs,
            })
        }
        _ => None,
    }
}

/// Where an operand of an instruction comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
enum From {
    /// The call's instruction of that place.
    Link(usize),
    Outside,
}

fn source(links: &[Link<'_>], k: usize, b: BufferId) -> From {
    let maker = links[..k].iter().rposition(|l| l.outputs.contains(&b));
    maker.map_or(From::Outside, From::Link)
}

/// Lists what is wrong with a chain that no product begins.
pub(super) fn problems(of: &Of<'_>, call: &[Instruction]) -> Vec<Problem> {
    let links: Vec<Option<Link<'_>>> = call.iter().map(link).collect();
    if let Some(k) = links.iter().position(Option::is_none) {
        let expected = "a product where a chain begins, or functions of elements and norms".into();
        return vec![(k, expected, "another instruction".into())];
    }
    let links: Vec<Link<'_>> = links.into_iter().flatten().collect();
    let mut found = form(&links);
    found.extend(shapes(of, &links));
    if found.is_empty() {
        found.extend(bytes(of, call, &links));
    }
    found
}

/// Which ops may follow which.
fn form(links: &[Link<'_>]) -> Vec<Problem> {
    let sorts: Vec<Sort> = links.iter().map(|l| l.sort).collect();
    let is_sum = |l: &Link<'_>| *l.kind == OpKind::Binary { f: Binary::Add };
    let wrong = |k: usize, expected: &str| {
        let actual = format!("{sorts:?}");
        vec![(k, expected.to_string(), actual)]
    };
    match sorts.as_slice() {
        [Sort::Function, Sort::Norm] if is_sum(&links[0]) => {
            let is_of_sum = source(links, 1, links[1].inputs[0]) == From::Link(0)
                && !links[1].inputs[1..].contains(&links[1].inputs[0]);
            match is_of_sum {
                true => Vec::new(),
                false => wrong(1, "a norm of the sum before it"),
            }
        }
        [Sort::Gradient, Sort::Function] if is_sum(&links[1]) => {
            let own = links[1].inputs.iter();
            let n = own
                .filter(|b| source(links, 1, **b) == From::Link(0))
                .count();
            match n {
                1 => Vec::new(),
                _ => wrong(1, "a sum of the gradient before it and another one"),
            }
        }
        all if all.iter().all(|s| *s == Sort::Function) && all.len() <= LONGEST => {
            let mut found = Vec::new();
            for k in 1..links.len() {
                let is_read = |b: &BufferId| links[..k].iter().any(|l| l.inputs.contains(b));
                let goes_on = |b: &&BufferId| source(links, k, **b) != From::Outside || is_read(b);
                if !links[k].inputs.iter().any(|b| goes_on(&b)) {
                    found.extend(wrong(
                        k,
                        "a value or an operand of the chain among its operands",
                    ));
                }
            }
            found
        }
        _ => wrong(
            links.len() - 1,
            "up to four functions of elements; a sum and its norm; a norm's gradient and a sum",
        ),
    }
}

/// Lists what is gone through element by element and has another shape or layout.
fn shapes(of: &Of<'_>, links: &[Link<'_>]) -> Vec<Problem> {
    let shape = |b: BufferId| {
        let b = of.role.buffer(b);
        (&b.lens, &b.spec)
    };
    let value = shape(links[0].outputs[0]);
    let mut found = Vec::new();
    for (k, link) in links.iter().enumerate() {
        let operands = match link.sort {
            Sort::Function => link.inputs,
            Sort::Norm | Sort::Gradient => &link.inputs[..1],
        };
        for &b in operands.iter().chain(&link.outputs[..1]) {
            let buffer = of.role.buffer(b);
            if shape(b) != value || !buffer.dtype.is_float() || buffer.pieces.is_some() {
                let expected = "floats of the shape and layout of the chain's first value".into();
                found.push((k, expected, format!("buffer {} ({})", b.0, buffer.name)));
            }
        }
    }
    found
}

/// Lists what is written where something is read, and what is neither written nor used up.
fn bytes(of: &Of<'_>, call: &[Instruction], links: &[Link<'_>]) -> Vec<Problem> {
    let named = |b: BufferId| format!("buffer {} ({})", b.0, of.role.buffer(b).name);
    let mut found = Vec::new();
    let last = links.len() - 1;
    let mut written: Vec<BufferId> = Vec::new();
    for (k, link) in links.iter().enumerate() {
        let is_kept = k == last || call[k + 1].call == (Call::Chained { is_kept: true });
        if is_kept {
            written.extend(link.outputs);
            if k < last && link.sort == Sort::Gradient {
                let expected = "a gradient that the sum behind it uses up".into();
                found.push((k + 1, expected, "one that is written".into()));
            }
            let is_lost = links[k + 1..]
                .iter()
                .any(|l| l.outputs.contains(&link.outputs[0]));
            if is_lost {
                let expected = "a value that is written to stay".into();
                found.push((
                    k + 1,
                    expected,
                    format!("another one in {}", named(link.outputs[0])),
                ));
            }
            continue;
        }
        let takes = |j: usize| {
            links[j]
                .inputs
                .iter()
                .any(|b| source(links, j, *b) == From::Link(k))
        };
        if !(k + 1..links.len()).any(takes) {
            let expected = format!("{} to be taken in the chain", named(link.outputs[0]));
            found.push((k + 1, expected, "that it is not written".into()));
        }
    }
    for (i, &w) in written.iter().enumerate() {
        let mut clashes: Vec<BufferId> = Vec::new();
        for (k, link) in links.iter().enumerate() {
            for &r in link.inputs {
                let is_own = link.sort == Sort::Function && r == w;
                if source(links, k, r) == From::Outside && !is_own {
                    clashes.push(r);
                }
            }
        }
        clashes.extend(&written[i + 1..]);
        if let Some((_, r)) = overlaps(of, &[w], &clashes).first() {
            let expected = format!("bytes of {} that the call does not use", named(w));
            found.push((last, expected, format!("those of {}", named(*r))));
        }
    }
    found
}
