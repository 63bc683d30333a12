//! Chains as products by the library: what follows a product is its addend or its epilogue.

use super::super::args::{Epilogue, Product, Span, Step};
use super::{Op, Part};
use ir::OpKind;
use ir::op::{Binary, Unary};

/// The matrix beside D begins columns at multiples of so many elements.
const BESIDE: i64 = 8;
/// Bytes that its address is a multiple of.
const BESIDE_ALIGNED: u64 = 16;

fn overlap(a: Span, b: Span) -> bool {
    a.at < b.at + b.bytes && b.at < a.at + a.bytes
}

/// Addend, bias and matrix beside D of a product.
#[derive(Default)]
struct Around<'a> {
    addend: Option<Part<'a>>,
    bias: Option<Part<'a>>,
    beside: Option<Part<'a>>,
    epilogue: Epilogue,
}

/// The products that these ops are, of which the first multiplies and each later one takes what the
/// one before makes; `kept` says whose result is written though the next one takes it. None where
/// the library has nothing like it.
pub(in super::super) fn fused(ops: &[Op<'_>], kept: &[bool]) -> Option<Vec<Product>> {
    let (first, rest) = ops.split_first()?;
    let OpKind::DotGeneral { einsum } = first.kind else {
        return None;
    };
    let y = *rest.last()?.y.first()?;
    let is_alike = |part: &Part<'_>| part.local.ranges == y.local.ranges;
    let mut around = Around::default();
    for (i, op) in rest.iter().enumerate() {
        let [value] = ops[i].y else { return None };
        let is_kept = *kept.get(i)?;
        let is_end = i + 1 == rest.len();
        if !is_alike(value) || op.y.len() != 1 {
            return None;
        }
        around.take(op, (value, is_kept), is_end)?;
    }
    let Around {
        addend,
        bias,
        beside,
        epilogue,
    } = around;
    // The same elements in every matrix, of one type; accumulators have their own.
    let beside_d = beside.iter().chain(&addend);
    if !beside_d
        .clone()
        .all(|p| is_alike(p) && p.local.dtype == y.local.dtype)
    {
        return None;
    }
    // What is written lies apart from what is read, but for the addend.
    let is_written = matches!(epilogue, Epilogue::Gelu { .. });
    let is_addend = |p: &Part<'_>| addend.is_some_and(|a| a.span == p.span && p.span == y.span);
    let around_d = bias.iter().chain(beside_d);
    if around_d
        .filter(|p| !is_addend(p))
        .any(|p| overlap(p.span, y.span))
    {
        return None;
    }
    let clash = |p: &Part<'_>| {
        let mut reads = first.x.iter().chain(&bias).chain(&addend);
        is_written && reads.any(|r| overlap(r.span, p.span))
    };
    if beside.as_ref().is_some_and(clash) {
        return None;
    }
    let product = Op { y: &[y], ..*first };
    if !product.has_library || !product.copied().is_empty() {
        return None;
    }
    let steps = product.matmul(einsum).ok()?;
    let n_steps = steps.len();
    let made = steps.into_iter().map(|step| {
        let Step::Product(mut product) = step else {
            return None;
        };
        product.c = addend.map(|c| c.span.at + (product.d - y.span.at));
        if epilogue == Epilogue::Nothing {
            return Some(product);
        }
        // A bias runs along D's rows, and all of D is one matrix without gaps.
        let shape = &mut product.shape;
        let is_whole = n_steps == 1 && shape.batch == 1 && shape.d.ld as u64 == shape.rows;
        let has_bias =
            |b: &Part<'_>| b.elements() as u64 == shape.rows && b.local.dtype == y.local.dtype;
        let can = is_whole && !shape.d.is_transposed && bias.as_ref().is_none_or(has_bias);
        let at = beside.map_or(0, |b| b.span.at);
        let is_aligned = shape.d.ld % BESIDE == 0 && at % BESIDE_ALIGNED == 0;
        if !can || epilogue.has_beside() && !is_aligned {
            return None;
        }
        shape.epilogue = epilogue;
        product.bias = bias.map_or(0, |b| b.span.at);
        product.beside = at;
        Some(product)
    });
    made.collect()
}

impl<'a> Around<'a> {
    /// Takes in an op that has `value` as an operand. None where it does not fit here.
    fn take(
        &mut self,
        op: &Op<'a>,
        (value, is_kept): (&Part<'a>, bool),
        is_end: bool,
    ) -> Option<()> {
        let y = op.y.first()?;
        let is_plain = self.epilogue == Epilogue::Nothing && self.addend.is_none();
        let is_value = |x: &Part<'_>| x.span == value.span;
        let is_same_type = value.local.dtype == y.local.dtype;
        match (op.kind, op.x) {
            (OpKind::Accumulate { .. }, [x]) if is_plain && is_end && !is_kept && is_value(x) => {
                self.addend = Some(*y);
            }
            (OpKind::Binary { f: Binary::Add }, [l, r]) if is_same_type && !is_kept => {
                let (x, other) = if is_value(l) { (l, r) } else { (r, l) };
                if !is_value(x) || is_value(other) {
                    return None;
                }
                match other.elements() == y.elements() {
                    true if self.addend.is_none() => self.addend = Some(*other),
                    false if is_plain && is_value(l) => {
                        (self.bias, self.epilogue) = (Some(*other), Epilogue::Bias);
                    }
                    _ => return None,
                }
            }
            (OpKind::Unary { f: Unary::GeluTanh }, [x]) if is_end && is_same_type => {
                if !is_value(x) || self.addend.is_some() {
                    return None;
                }
                let has_bias = self.bias.is_some();
                self.epilogue = Epilogue::Gelu { has_bias, is_kept };
                self.beside = is_kept.then_some(*value);
            }
            (
                OpKind::Binary {
                    f: Binary::GeluTanhGrad,
                },
                [before, x],
            ) if is_plain && is_end && is_same_type && !is_kept => {
                if !is_value(x) || is_value(before) {
                    return None;
                }
                (self.beside, self.epilogue) = (Some(*before), Epilogue::GeluGrad);
            }
            _ => return None,
        }
        Some(())
    }
}
