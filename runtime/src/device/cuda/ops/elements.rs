//! Chains that go through elements, as one kernel: functions of elements, a sum and its norm, a gradient
//! of a norm's argument and the sum that it enters.

use super::super::args::{CHAIN, Call, LINKS, Link, RESULTS, Span, Step};
use super::elementwise::function;
use super::{Op, Part};
use ir::op::Binary;
use ir::{DType, OpKind};

/// Most operands of a kernel of functions: the kernel's.
const OPERANDS: usize = 5;
/// Most threads of a row of sums: in f32 each has 160 registers of the 65,536 of a multiprocessor.
const MOST_THREADS_OF_A_SUM: u32 = 256;

fn overlap(a: Span, b: Span) -> bool {
    a.at < b.at + b.bytes && b.at < a.at + a.bytes
}

/// The kernel that these ops are, of which none is a product; `kept` says whose result is written though
/// the chain goes on with it. None where there is none for all of them.
pub(in super::super) fn one_kernel(ops: &[Op<'_>], kept: &[bool]) -> Option<Step> {
    let (last, rest) = ops.split_last()?;
    let first = rest.first()?;
    match (first.kind, last.kind) {
        (_, OpKind::RmsNorm { .. } | OpKind::LayerNorm { .. }) => normed(ops, *kept.first()?),
        (OpKind::RmsNormGradInput | OpKind::LayerNormGradInput, _) => {
            let is_kept = *kept.first()?;
            summed(ops).filter(|_| !is_kept)
        }
        _ => functions(ops, kept),
    }
}

fn is_float(part: &Part<'_>) -> bool {
    part.local.dtype != DType::I32
}

fn functions(ops: &[Op<'_>], kept: &[bool]) -> Option<Step> {
    let (local, n) = (ops.first()?.y.first()?.local, ops[0].y[0].elements());
    let mut operands: Vec<Part<'_>> = Vec::new();
    let mut written: Vec<Part<'_>> = Vec::new();
    let mut call = Call::each(CHAIN, "chain", n).n(0, &[n as i64]);
    let mut factors = [0.0; LINKS];
    for (k, op) in ops.iter().enumerate() {
        let [y] = op.y else { return None };
        let (number, factor) = function(op.kind)?;
        let mut arguments = [0; 2];
        for (argument, x) in arguments.iter_mut().zip(op.x) {
            if x.local.ranges != local.ranges || !is_float(x) {
                return None;
            }
            // The last one that stands there.
            let maker = ops[..k].iter().rposition(|o| o.y[0].span == x.span);
            *argument = match maker {
                Some(m) => Link::value(m),
                None => {
                    let known = operands.iter().position(|o| o.span == x.span);
                    known.unwrap_or_else(|| {
                        operands.push(*x);
                        operands.len() - 1
                    })
                }
            };
        }
        if y.local.ranges != local.ranges || !is_float(y) {
            return None;
        }
        let is_written = k + 1 == ops.len() || *kept.get(k)?;
        let result = is_written.then_some(written.len());
        written.extend(is_written.then_some(*y));
        *factors.get_mut(k)? = factor;
        call.types.links[k] = Some(Link {
            function: number,
            has_two: op.x.len() == 2,
            arguments,
            result,
        });
    }
    // An element is read before it is written, but of other elements nobody knows when.
    let is_read = |r: &Part<'_>, w: &Part<'_>| {
        let is_same = r.span == w.span && r.local.dtype == w.local.dtype;
        !is_same && overlap(r.span, w.span)
    };
    let clash = written.iter().enumerate().any(|(i, w)| {
        operands.iter().any(|r| is_read(r, w))
            || written[i + 1..].iter().any(|o| overlap(o.span, w.span))
    });
    if clash || operands.len() > OPERANDS || written.len() > RESULTS {
        return None;
    }
    for (i, x) in operands.iter().enumerate() {
        call = call.x(i, x.typed());
    }
    for (i, y) in written.iter().enumerate() {
        call = call.y(i, y.typed());
    }
    Some(Step::Call(call.f(&factors).by_eights(n, n)))
}

/// Operands and results of a kernel along rows, in its order; none where bytes are both read and
/// written, but by the sum, whose operands each element has to itself.
fn along_rows(op: &Op<'_>, kernel: &'static str, [sum, x, y]: [&[Part<'_>]; 3]) -> Option<Call> {
    let is_own = |r: &Part<'_>, w: &Part<'_>| {
        let is_same = |o: &Part<'_>| o.span == r.span && o.local.dtype == w.local.dtype;
        r.span == w.span && sum.iter().any(is_same)
    };
    let clash = y.iter().enumerate().any(|(i, w)| {
        let mut read = x.iter().filter(|r| !is_own(r, w));
        read.any(|r| overlap(r.span, w.span)) || y[i + 1..].iter().any(|o| overlap(o.span, w.span))
    });
    let whole = Op { x, y, ..*op };
    let call = whole.norm(kernel);
    // By eights alone: elsewhere rows are read several times.
    let can = call.takes_eights() && x.iter().all(is_float);
    (can && !clash).then_some(call)
}

/// The other operand of a sum of two, of which one is this part.
fn other<'a>(op: &Op<'a>, value: &Part<'_>) -> Option<Part<'a>> {
    match (op.kind, op.x) {
        (OpKind::Binary { f: Binary::Add }, [l, r]) => {
            let (x, other) = if l.span == value.span { (l, r) } else { (r, l) };
            let is_alike = x.span == value.span && other.local.ranges == value.local.ranges;
            (is_alike && other.span != value.span).then_some(*other)
        }
        _ => None,
    }
}

/// A sum of two tensors and a norm of it.
fn normed(ops: &[Op<'_>], is_kept: bool) -> Option<Step> {
    let [sum, norm] = ops else { return None };
    let (OpKind::Binary { f: Binary::Add }, [l, r], [s]) = (sum.kind, sum.x, sum.y) else {
        return None;
    };
    let is_alike = l.local.ranges == s.local.ranges && r.local.ranges == s.local.ranges;
    let (of, weights) = norm.x.split_first()?;
    if !is_alike || of.span != s.span {
        return None;
    }
    let x = [&[*l, *r], weights].concat();
    // The sum's type is that of the first result, whether or not it is written.
    let y = match is_kept {
        true => [&[*s], norm.y].concat(),
        false => norm.y.to_vec(),
    };
    let (kernel, eps) = match norm.kind {
        OpKind::RmsNorm { eps } => ("sum_rms_norm", eps),
        OpKind::LayerNorm { eps } => ("sum_layer_norm", eps),
        _ => return None,
    };
    let call = along_rows(norm, kernel, [sum.x, &x, &y])?;
    let mut call = (call.threads <= MOST_THREADS_OF_A_SUM).then_some(call)?;
    if !is_kept {
        // Results begin with the sum.
        let (spans, types) = (call.args.y, call.types.y);
        for (i, (span, name)) in spans.into_iter().zip(types).enumerate().take(y.len()) {
            call = call.y(i + 1, (span, name));
        }
        call = call.y(0, (Span::default(), s.typed().1));
    }
    Some(Step::Call(call.n(3, &[i64::from(is_kept)]).f(&[*eps])))
}

/// The gradient of a norm's argument, and the sum of it and another one.
fn summed(ops: &[Op<'_>]) -> Option<Step> {
    let [gradient, sum] = ops else { return None };
    let ([value], [_]) = (gradient.y, sum.y) else {
        return None;
    };
    let other = other(sum, value)?;
    let x = [gradient.x, &[other]].concat();
    let kernel = match gradient.kind {
        OpKind::RmsNormGradInput => "rms_norm_grad_input_sum",
        _ => "layer_norm_grad_input_sum",
    };
    let call = along_rows(gradient, kernel, [&[other], &x, sum.y])?;
    (call.threads <= MOST_THREADS_OF_A_SUM).then_some(Step::Call(call))
}
