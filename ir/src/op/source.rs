//! Ops without operands: data, states and constants.

use super::InputKind;
use super::family::*;

/// How far on an input may be; published models predict up to 4 tokens.
pub const MOST_FURTHER: u32 = 64;

pub(super) static FAMILY: Family = Family {
    infer,
    rule,
    work: |_| Work::default(),
    gradient: no_gradient,
    groups: singly,
};

fn infer(cx: &Operands<'_>) -> Result<Vec<TensorType>, OpError> {
    match cx.kind {
        OpKind::Input {
            kind: InputKind::Images,
        } => {
            let t = cx
                .declared
                .ok_or_else(|| cx.err("needs a declared type".into()))?;
            let d = &t.shape.0;
            let fixed = d.iter().skip(1).all(|d| matches!(d, Dim::Fixed(1..)));
            cx.ensure(
                t.dtype == DType::F32 && d.len() == 4 && d[0] == Dim::Batch && fixed,
                || format!("type is {t}, expected f32[B, height, width, channels]"),
            )?;
            one(t.clone())
        }
        OpKind::Input { kind } => {
            if let InputKind::FurtherTokens { by } | InputKind::FurtherLabels { by } = kind {
                cx.ensure((1..=MOST_FURTHER).contains(by), || {
                    format!("is {by} positions further on, expected 1 to {MOST_FURTHER}")
                })?;
            }
            let t = cx
                .declared
                .ok_or_else(|| cx.err("needs a declared type".into()))?;
            cx.ensure(
                t.dtype == DType::I32 && t.shape.rank() == 2 && t.shape.0[0] == Dim::Batch,
                || format!("type is {t}, expected i32[B, sequence]"),
            )?;
            one(t.clone())
        }
        OpKind::State { .. } => {
            let t = cx
                .declared
                .ok_or_else(|| cx.err("needs a declared type".into()))?;
            cx.ensure(t.dtype.is_float() && !t.shape.has_batch(), || {
                format!("type is {t}, expected floats without a batch dim")
            })?;
            one(t.clone())
        }
        OpKind::Constant { value } => {
            cx.ensure(value.is_finite(), || format!("value {value} is not finite"))?;
            one(TensorType::new(DType::F32, Shape::default()))
        }
        _ => cx.stranger(),
    }
}

fn rule(b: &mut Builder, _: &OpKind, _: &[TensorType], y: &[TensorType]) {
    let f = b.free(&dims(&y[0]));
    b.result(&f);
}
