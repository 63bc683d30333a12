//! Functions of elements and of where they stand.

use super::super::args::{Call, ELEMENTWISE, ROTARY, Span, Step, TABLE};
use super::{Op, Steps, chunks};
use crate::cpu::rotary;
use crate::execute::rope_scaling;
use ir::op::{Binary, Unary};
use ir::{DType, OpKind};

/// The kernels' number of a function, and its factor.
fn unary(f: Unary) -> (i64, f64) {
    match f {
        Unary::Neg => (0, 0.0),
        Unary::Scale { by } => (1, by),
        Unary::GeluErf => (2, 0.0),
        Unary::GeluTanh => (3, 0.0),
        Unary::Silu => (4, 0.0),
        Unary::Relu => (5, 0.0),
        Unary::Exp => (6, 0.0),
        Unary::Tanh => (7, 0.0),
        Unary::Square => (8, 0.0),
        Unary::Sigmoid => (9, 0.0),
    }
}

/// The kernels' number of the function that changes nothing.
const SAME: i64 = 10;

/// Heads that a thread turns by the same angles: the kernel's.
const HEADS: usize = 4;

fn binary(f: Binary) -> i64 {
    match f {
        Binary::Add => 0,
        Binary::Sub => 1,
        Binary::Mul => 2,
        Binary::GeluErfGrad => 3,
        Binary::GeluTanhGrad => 4,
        Binary::SiluGrad => 5,
        Binary::ReluGrad => 6,
    }
}

/// The kernels' number of a function that is given whole tensors, and its factor.
pub(super) fn function(kind: &OpKind) -> Option<(i64, f64)> {
    match kind {
        OpKind::Unary { f } => Some(unary(*f)),
        OpKind::Binary { f } => Some((binary(*f), 0.0)),
        _ => None,
    }
}

impl Op<'_> {
    /// Bytes of scratch memory for a cosine and a sine of each pair of a position.
    pub(super) fn elements_scratch(&self) -> usize {
        let OpKind::Rotary { part, .. } = self.kind else {
            return 0;
        };
        let x = self.x[0];
        let turned = part.map_or(x.width(), |n| n as usize);
        x.dims().get(1).map_or(0, |rows| rows * turned / 2 * 8)
    }

    pub(super) fn elements_alone(&self) -> Steps {
        let (x, y) = (self.x[0], self.y[0]);
        let n = y.elements();
        let is_moved = matches!(self.kind, OpKind::Cast { .. } | OpKind::Dropout { .. });
        if is_moved && x.local.dtype == DType::I32 && y.local.dtype == DType::I32 {
            return self.moves();
        }
        self.floats(&(0..self.x.len()).collect::<Vec<_>>())?;
        let each = |kernel| {
            let call = Call::each(ELEMENTWISE, kernel, n);
            call.x(0, x.typed()).y(0, y.typed()).n(0, &[n as i64])
        };
        if x.elements() != n {
            return Err(self.error("operand and result have different numbers of elements"));
        }
        let call = match self.kind {
            OpKind::Unary { f } => {
                let (number, factor) = unary(*f);
                each("unary").n(1, &[number]).f(&[factor]).by_eights(n, n)
            }
            OpKind::Binary { f } => {
                let b = self.x[1];
                let n_b = b.elements();
                if n > 0 && (n_b == 0 || n % n_b != 0) {
                    return Err(self.error(format!("{n_b} elements repeat to {n}")));
                }
                let call = each("binary").x(1, b.typed());
                let call = call.n(1, &[binary(*f), n_b as i64]);
                call.by_eights(n_b, n)
            }
            OpKind::ScaleRows => {
                let width = n / self.x[1].elements().max(1);
                let call = each("scale_rows").x(1, self.x[1].typed());
                call.n(1, &[width as i64]).by_eights(width, n)
            }
            OpKind::Accumulate { .. } => each("accumulate").by_eights(n, n),
            OpKind::Dropout { p, key, order } if self.context.training && *p > 0.0 => {
                let local = x.local;
                let len = local.lens.get(1).copied().unwrap_or(1);
                let [chunk, ranks] = chunks(*order, len);
                let mut dims = Vec::new();
                let mut stride = 1;
                for (d, r) in local.ranges.iter().enumerate().rev() {
                    let first = if d == 0 { self.context.first_sample } else { 0 };
                    dims.push([r.padded as i64, (first + r.start) as i64, stride as i64]);
                    stride *= local.lens[d];
                }
                dims.reverse();
                let call = each("dropout").n(1, &[local.ranges.len() as i64]);
                let call = call.n(2, &self.key(key)).n(6, &[chunk, ranks]);
                let call = call.n(8, &dims.concat()).f(&[*p, 1.0 / (1.0 - *p)]);
                // A draw is four numbers, for elements whose names follow each other.
                let follow = match (local.ranges.last(), local.lens.last()) {
                    (Some(r), Some(len)) => r.start % 4 == 0 && len % 4 == 0,
                    _ => false,
                };
                match follow && (chunk == 0 || local.ranges.len() > 2) {
                    true => call.by_eights(x.width(), n),
                    false => call,
                }
            }
            OpKind::Rotary {
                theta,
                scaling,
                inverse,
                part,
                order,
            } => {
                let turned = part.map_or(x.width(), |n| n as usize);
                let (dims, half) = (x.dims(), turned / 2);
                if dims.len() < 3 || x.width() % 2 != 0 || turned % 2 != 0 || half > TABLE {
                    return Err(self.error(format!(
                        "rotary of {turned} elements of heads of {dims:?}: both are even and at most {}",
                        2 * TABLE
                    )));
                }
                let [chunk, ranks] = chunks(*order, x.local.lens[1]);
                let heads: usize = dims[2..dims.len() - 1].iter().product();
                let (sequence, start) = (dims[1], x.local.ranges[1].start as usize);
                let scaling = rope_scaling(*scaling);
                let freq = rotary::inv_freq(*theta, turned, scaling);
                let pairs = sequence * half;
                let angles = Span {
                    at: self.scratch,
                    bytes: (8 * pairs) as u64,
                };
                let numbers = [pairs, half, start].map(|n| n as i64);
                let mut table = Call::each(ROTARY, "rotary_angles", pairs)
                    .y(0, (angles, "f32"))
                    .n(0, &numbers)
                    .n(3, &[chunk, ranks, i64::from(*inverse)])
                    .f(&[f64::from(scaling.magnitude())]);
                table.args.table[..half].copy_from_slice(&freq);
                let call = Call::each(ROTARY, "rotary", n / 2);
                let call = call.x(0, x.typed()).x(1, (angles, "f32")).y(0, y.typed());
                let call = call.n(0, &[n, sequence, heads, x.width(), half].map(|n| n as i64));
                let can = half % 8 == 0 && call.can_take_eights(x.width());
                let call = match can {
                    // Eight pairs, or elements that stay, of some heads of a row each.
                    true => {
                        let places = half / 8 + (x.width() - turned) / 8;
                        let rows = n / (heads * x.width()).max(1);
                        let items = rows * heads.div_ceil(HEADS) * places;
                        call.over(items).with_eights()
                    }
                    false => call,
                };
                // One compilation for both.
                table.types = call.types;
                return Ok(vec![Step::Call(table), Step::Call(call)]);
            }
            _ => each("unary").n(1, &[SAME]).by_eights(n, n),
        };
        Ok(vec![Step::Call(call)])
    }
}
