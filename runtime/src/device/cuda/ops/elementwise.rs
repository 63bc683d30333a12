//! Functions of elements and of where they stand.

use super::super::args::{Call, ELEMENTWISE, ROTARY, Step, TABLE};
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

impl Op<'_> {
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
                call.n(1, &[width as i64])
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
                call.n(8, &dims.concat()).f(&[*p, 1.0 / (1.0 - *p)])
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
                let start = x.local.ranges[1].start;
                let numbers = [n, dims[1], heads, x.width(), start as usize].map(|n| n as i64);
                let scaling = rope_scaling(*scaling);
                let freq = rotary::inv_freq(*theta, turned, scaling);
                let call = Call::each(ROTARY, "rotary", n / 2);
                let call = call.x(0, x.typed()).y(0, y.typed()).n(0, &numbers);
                let last = [chunk, ranks, i64::from(*inverse), half as i64];
                let mut call = call.n(5, &last).f(&[f64::from(scaling.magnitude())]);
                call.args.table[..half].copy_from_slice(&freq);
                call
            }
            _ => each("unary").n(1, &[SAME]).by_eights(n, n),
        };
        Ok(vec![Step::Call(call)])
    }
}
