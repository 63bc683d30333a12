//! Integer-linear blocks.
//!
//! Every block knows how much it can enlarge a value's elements; a block that would leave
//! the exact range is left out. The range: the loss, a sum of products of parameters and
//! integer coefficients, has a total magnitude of at most 2^20 for parameters of magnitude 1.
//! Every parameter is used once and blocks are linear, so no term has a value or parameter
//! twice: a gradient is a sum over a part of the same terms.
//!
//! Bounds count from the start of the graph, or of the layer where layers shall be equal:
//! then every layer may enlarge values by the same factor, and makes the same choices.

use super::{Builder, MAX_SAMPLES, random_weight};
use crate::op::{Binary, Unary};
use crate::sharding::ReduceKind;
use crate::{Dim, OpKind, ValueId};

/// Largest total magnitude of the loss.
const MAX_LOSS: u64 = 1 << 20;

impl Builder {
    /// Elements of `x` stay within this magnitude for parameters in {-1, 0, 1}.
    fn bound(&self, x: ValueId) -> u64 {
        self.bounds
            .get(x.index())
            .copied()
            .filter(|&b| b > 0)
            .unwrap_or(1)
    }
    fn set_bound(&mut self, x: ValueId, bound: u64) -> ValueId {
        if self.bounds.len() <= x.index() {
            self.bounds.resize(x.index() + 1, 0);
        }
        self.bounds[x.index()] = bound;
        x
    }
    /// True when activations of this magnitude still give a loss in range.
    fn fits(&self, bound: u64) -> bool {
        let n_periods = if self.options.equal_layers {
            self.options.n_layers.max(1)
        } else {
            1
        };
        let limit = MAX_LOSS / (MAX_SAMPLES * self.sequence * self.hidden);
        (0..n_periods)
            .try_fold(1u64, |all, _| {
                all.checked_mul(bound).filter(|&b| b <= limit)
            })
            .is_some()
    }
    /// Starts to count anew from `x` where layers shall be equal.
    pub(super) fn start_period(&mut self, x: ValueId) {
        if self.options.equal_layers {
            self.set_bound(x, 1);
        }
    }

    /// `[B,S,H] -> [B,S,H]`.
    pub(super) fn linear_block(&mut self, x: ValueId) -> ValueId {
        let bound = self.bound(x);
        let (h, s) = (self.hidden, self.sequence);
        match self.rng.below(9) {
            0 | 1 => self.linear_dots(x),
            2 if self.fits(bound + 1) => {
                let shape = if self.rng.one_in(2) {
                    vec![h]
                } else {
                    vec![s, h]
                };
                let p = self.param(&shape);
                let f = self.rng.pick(&[Binary::Add, Binary::Sub]);
                let y = self.binary(f, x, p);
                self.set_bound(y, bound + 1)
            }
            3 if self.fits(3 * bound) => {
                let by = self.rng.pick(&[-3.0, -1.0, 2.0, 3.0]);
                let y = self.unary(Unary::Scale { by }, x);
                self.set_bound(y, 3 * bound)
            }
            4 => {
                let y = self.unary(Unary::Neg, x);
                self.set_bound(y, bound)
            }
            5 => self.linear_transposes(x, bound),
            6 if self.fits(2 * bound) => self.linear_halves(x, bound),
            7 if self.fits(2 * bound) => self.linear_stack(x, bound),
            _ => {
                let y = self.op(OpKind::Layout, &[x]);
                self.set_bound(y, bound)
            }
        }
    }

    /// Two dot-generals with random labels, `bsh` to something to `bsh`, and a residual add.
    fn linear_dots(&mut self, x: ValueId) -> ValueId {
        let (sequence, hidden, fresh) = (self.sequence, self.hidden, self.rng.between(2, 3));
        let len = |l: &u8| match l {
            b's' => sequence,
            b'h' => hidden,
            _ => fresh,
        };
        let contracted: &[u8] = self.rng.pick(&[&b"h"[..], &b"s"[..], &b"sh"[..]]);
        let kept: Vec<u8> = b"sh"
            .iter()
            .copied()
            .filter(|l| !contracted.contains(l))
            .collect();
        let growth: u64 = contracted.iter().map(len).product::<u64>() * fresh;
        let bound = self.bound(x);
        if !self.fits(bound * growth + bound) {
            let y = self.op(OpKind::Layout, &[x]);
            return self.set_bound(y, bound);
        }
        let (weight, middle) = random_weight(&mut self.rng, &kept, contracted, b"f");
        let y = self.dot_with_param(x, b"bsh", &weight, &middle, &len);
        // The way back: `f` disappears, what was contracted comes in.
        let (weight, _) = random_weight(&mut self.rng, &kept, b"f", contracted);
        let z = self.dot_with_param(y, &middle, &weight, b"bsh", &len);
        self.set_bound(z, bound * growth);
        let f = self.rng.pick(&[Binary::Add, Binary::Sub]);
        let sum = self.binary(f, x, z);
        self.set_bound(sum, bound * growth + bound)
    }

    /// `x` times a parameter, which stands on either side.
    pub(super) fn dot_with_param(
        &mut self,
        x: ValueId,
        labels: &[u8],
        weight: &[u8],
        out: &[u8],
        len: &impl Fn(&u8) -> u64,
    ) -> ValueId {
        let shape: Vec<u64> = weight.iter().map(len).collect();
        let p = self.param(&shape);
        let text = |l: &[u8]| String::from_utf8_lossy(l).into_owned();
        match self.rng.one_in(3) {
            true => self.einsum(
                &format!("{},{}->{}", text(weight), text(labels), text(out)),
                p,
                x,
            ),
            false => self.einsum(
                &format!("{},{}->{}", text(labels), text(weight), text(out)),
                x,
                p,
            ),
        }
    }

    /// `[B,S,H] -> [B,H,S] -> [B,H*S] -> ... -> [B,S,H]`.
    fn linear_transposes(&mut self, x: ValueId, bound: u64) -> ValueId {
        let (s, h) = (self.sequence, self.hidden);
        let t = self.transpose(x, &[0, 2, 1]);
        let flat = self.reshape(t, &[h * s]);
        let back = self.reshape(flat, &[h, s]);
        let y = self.transpose(back, &[0, 2, 1]);
        self.set_bound(y, bound)
    }

    /// Adds a slice of `x`, put back by `Pad`.
    fn linear_halves(&mut self, x: ValueId, bound: u64) -> ValueId {
        let dim = self.rng.pick(&[1, 2]);
        let Dim::Fixed(n) = self.dims(x)[dim] else {
            return x;
        };
        let len = self.rng.between(1, n - 1);
        let start = self.rng.between(0, n - len);
        let part = self.op(OpKind::Slice { dim, start, len }, &[x]);
        let to = self.rng.between(0, n - len);
        let padded = self.op(
            OpKind::Pad {
                dim,
                start: to,
                len: n,
            },
            &[part],
        );
        let y = self.binary(Binary::Add, x, padded);
        self.set_bound(y, 2 * bound)
    }

    /// Stacks `x` with `-x` or itself and adds them up again with signs.
    fn linear_stack(&mut self, x: ValueId, bound: u64) -> ValueId {
        let n = self.unary(Unary::Scale { by: 1.0 }, x);
        let dim = self.rng.between(1, 3) as usize;
        let both = self.op(OpKind::Stack { dim }, &[x, n]);
        let y = if self.rng.one_in(2) {
            self.op(
                OpKind::Reduce {
                    kind: ReduceKind::Sum,
                    dims: vec![dim],
                },
                &[both],
            )
        } else {
            let parts = self.ops(OpKind::Unstack { dim }, &[both]);
            self.binary(Binary::Add, parts[0], parts[1])
        };
        self.set_bound(y, 2 * bound)
    }

    /// Loss: the sum of a product with a parameter.
    pub(super) fn linear_head(&mut self, x: ValueId) -> ValueId {
        let (s, h) = (self.sequence, self.hidden);
        let shape = if self.rng.one_in(2) {
            vec![h]
        } else {
            vec![s, h]
        };
        let p = self.param(&shape);
        let product = self.binary(Binary::Mul, x, p);
        let kind = ReduceKind::Sum;
        if self.rng.one_in(2) {
            return self.op(
                OpKind::Reduce {
                    kind,
                    dims: vec![0, 1, 2],
                },
                &[product],
            );
        }
        let rows = self.op(
            OpKind::Reduce {
                kind,
                dims: vec![2],
            },
            &[product],
        );
        self.op(
            OpKind::Reduce {
                kind,
                dims: vec![0, 1],
            },
            &[rows],
        )
    }
}
