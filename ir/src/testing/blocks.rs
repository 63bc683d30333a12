//! General blocks: `[B,S,H] -> [B,S,H]`, and the head.

use super::{Builder, random_weight};
use crate::op::{
    Binary, Blocks, Bounds, ExpertGroups, Init, InputKind, RopeScaling, Scores, SequenceOrder,
    Unary,
};
use crate::sharding::ReduceKind;
use crate::{DType, Dim, OpKind, ValueId};

impl Builder {
    /// One random block.
    pub(super) fn block(&mut self, x: ValueId) -> ValueId {
        if self.options.images && self.rng.one_in(2) {
            return self.image(x);
        }
        if self.options.state_spaces && self.rng.one_in(2) {
            return self.state_space(x);
        }
        match self.rng.below(if self.options.experts { 14 } else { 12 }) {
            0 | 1 => self.attention(x),
            2 => self.mlp(x),
            3 => self.gated_mlp(x),
            4 => self.norm(x),
            5 => self.dots(x),
            6 => self.scores(x),
            7 => self.elementwise(x),
            8 => self.shapes(x),
            9 => self.pieces(x),
            10 => self.pooled(x),
            11 => self.positions(x),
            _ => self.experts(x),
        }
    }

    fn residual(&mut self, x: ValueId, y: ValueId) -> ValueId {
        let y = self.maybe_dropout(y);
        self.binary(Binary::Add, x, y)
    }
    fn maybe_dropout(&mut self, x: ValueId) -> ValueId {
        if !self.options.dropout || self.rng.one_in(2) {
            return x;
        }
        let path = self.path("dropout");
        let kind = OpKind::Dropout {
            p: 0.25,
            key: path.clone(),
            order: Default::default(),
        };
        let place = crate::Place::forward(path, self.layer);
        self.graph
            .add1(kind, &[x], place)
            .expect("dropout of floats")
    }
    fn maybe_bias(&mut self, x: ValueId) -> ValueId {
        let dims = self.dims(x);
        let Some(&Dim::Fixed(n)) = dims.last().filter(|_| self.rng.one_in(2)) else {
            return x;
        };
        let bias = self.param_init(&[n], Init::Zeros);
        self.binary(Binary::Add, x, bias)
    }
    fn activation(&mut self, x: ValueId) -> ValueId {
        let f = self.rng.pick(&[
            Unary::GeluErf,
            Unary::GeluTanh,
            Unary::Silu,
            Unary::Relu,
            Unary::Tanh,
        ]);
        self.unary(f, x)
    }

    fn norm(&mut self, x: ValueId) -> ValueId {
        let eps = self.rng.pick(&[1e-5, 1e-6]);
        let gamma = self.param_init(&[self.hidden], Init::Ones);
        if self.rng.one_in(2) {
            return self.op(OpKind::RmsNorm { eps }, &[x, gamma]);
        }
        let beta = self.param_init(&[self.hidden], Init::Zeros);
        self.op(OpKind::LayerNorm { eps }, &[x, gamma, beta])
    }

    fn mlp(&mut self, x: ValueId) -> ValueId {
        let (h, f) = (self.hidden, self.rng.between(3, 9));
        let n = self.norm(x);
        let w = self.param(&[h, f]);
        let up = self.einsum("bsh,hf->bsf", n, w);
        let up = self.maybe_bias(up);
        let a = self.activation(up);
        // As in `torch.nn.Linear`: the weight is stored the other way round.
        let w = self.param(&[h, f]);
        let down = self.einsum("bsf,hf->bsh", a, w);
        let down = self.maybe_bias(down);
        self.residual(x, down)
    }
    fn gated_mlp(&mut self, x: ValueId) -> ValueId {
        let (h, f) = (self.hidden, self.rng.between(3, 9));
        let n = self.norm(x);
        let (w1, w2, w3) = (
            self.param(&[h, f]),
            self.param(&[h, f]),
            self.param(&[f, h]),
        );
        let gate = self.einsum("bsh,hf->bsf", n, w1);
        let gate = self.unary(Unary::Silu, gate);
        let up = self.einsum("bsh,hf->bsf", n, w2);
        let both = self.binary(Binary::Mul, gate, up);
        let down = self.einsum("bsf,fh->bsh", both, w3);
        self.residual(x, down)
    }

    /// The activation as an image of one channel: convolutions with a group norm and pooling
    /// between them, there and back.
    fn image(&mut self, x: ValueId) -> ValueId {
        let (s, h) = (self.sequence, self.hidden);
        let (groups, width) = (self.rng.between(1, 3), self.rng.between(1, 3));
        let (kernel, stride) = (self.rng.pick(&[1, 3]), self.rng.between(1, 2));
        let image = self.reshape(x, &[s, h, 1]);
        let w = self.param(&[kernel, kernel, 1, groups, width]);
        let padding = kernel / 2;
        let y = self.op(OpKind::Conv2d { stride, padding }, &[image, w]);
        let gamma = self.param_init(&[groups, width], Init::Ones);
        let beta = self.param_init(&[groups, width], Init::Zeros);
        let y = self.op(OpKind::GroupNorm { eps: 1e-2 }, &[y, gamma, beta]);
        let mut y = self.activation(y);
        if self.rng.one_in(2) {
            let pool = OpKind::MaxPool2d {
                kernel: 3,
                stride: 1,
                padding: 1,
            };
            y = self.op(pool, &[y]);
        }
        let y = match stride {
            1 => {
                let w = self.param(&[3, 3, groups, width, 1]);
                let (stride, padding) = (1, 1);
                let y = self.op(OpKind::Conv2d { stride, padding }, &[y, w]);
                self.reshape(y, &[s, h])
            }
            _ => {
                let (kind, dims) = (ReduceKind::Sum, vec![1, 2]);
                let pooled = self.op(OpKind::Reduce { kind, dims }, &[y]);
                let w = self.param(&[groups, width, s, h]);
                self.einsum("bgc,gcsh->bsh", pooled, w)
            }
        };
        self.residual(x, y)
    }

    /// A state space whose inputs come out of a causal convolution, with a norm of each group.
    fn state_space(&mut self, x: ValueId) -> ValueId {
        let (h, s) = (self.hidden, self.sequence);
        let (groups, heads, width, n) = (
            self.rng.between(1, 3),
            self.rng.between(1, 3),
            self.rng.between(1, 3),
            self.rng.between(1, 3),
        );
        let normed = self.norm(x);
        let w = self.param(&[h, groups, heads, width]);
        let input = self.einsum("bsh,hgrp->bsgrp", normed, w);
        let taps = self.rng.between(1, 4);
        let w = self.param(&[groups, heads, width, taps]);
        let input = self.op(OpKind::CausalConv, &[input, w]);
        let w = self.param(&[h, groups, heads]);
        let dt = self.einsum("bsh,hgr->bsgr", normed, w);
        let [b, c] = [0, 1].map(|_| {
            let w = self.param(&[h, groups, n]);
            self.einsum("bsh,hgn->bsgn", normed, w)
        });
        let a_log = self.param_init(&[groups, heads], Init::LogCount);
        let d = self.param_init(&[groups, heads], Init::Ones);
        let steps = Init::TimeStep {
            low: 0.1,
            high: 1.0,
        };
        let bias = self.param_init(&[groups, heads], steps);
        let scan = OpKind::StateSpace {
            chunk: self.rng.between(1, s),
            dt_min: 0.0,
        };
        let y = self.op(scan, &[input, dt, b, c, a_log, d, bias]);
        let y = self.reshape(y, &[s, groups, heads * width]);
        let gamma = self.param_init(&[heads * width], Init::Ones);
        let y = self.op(OpKind::RmsNorm { eps: 1e-2 }, &[y, gamma]);
        let w = self.param(&[groups, heads * width, h]);
        let y = self.einsum("bsgk,gkh->bsh", y, w);
        self.residual(x, y)
    }

    /// A mixture of experts, with more or fewer slots than tokens.
    fn experts(&mut self, x: ValueId) -> ValueId {
        let (h, f, experts) = (self.hidden, self.rng.between(3, 6), self.rng.between(2, 5));
        // Some choose by groups, some by sigmoids and a bias.
        let groups = (experts == 4 && f > 4).then_some(ExpertGroups {
            count: 2,
            kept: 1,
            best: 2,
        });
        let scores = match f % 2 {
            0 => Scores::Softmax,
            _ => Scores::Sigmoid,
        };
        let n = self.norm(x);
        let router = self.param(&[h, experts]);
        let logits = self.einsum("bsh,he->bse", n, router);
        let route = OpKind::Route {
            top_k: self.rng.between(1, groups.map_or(experts.min(3), |_| 2)),
            capacity: self.rng.between(1, self.sequence),
            normalize: self.rng.one_in(2),
            scores,
            groups,
        };
        let OpKind::Route { capacity, .. } = route else {
            return x;
        };
        let routed = match scores {
            Scores::Softmax => self.ops(route, &[logits]),
            Scores::Sigmoid => {
                let bias = self.param_init(&[experts], Init::Normal { std: 0.5 });
                self.ops(route, &[logits, bias])
            }
        };
        let (gates, slots) = (routed[0], routed[1]);
        // Gates weigh the experts' results, or what they are given, or both.
        let before = self.rng.one_in(3);
        let dispatch = OpKind::Dispatch { experts, capacity };
        let mut y = match before {
            true => self.op(dispatch, &[n, slots, gates]),
            false => self.op(dispatch, &[n, slots]),
        };
        let (w1, w2) = (self.param(&[experts, h, f]), self.param(&[experts, f, h]));
        let up = self.einsum("ebch,ehf->ebcf", y, w1);
        // Three experts have biases, and gates within bounds.
        y = match experts == 3 {
            true => {
                let w3 = self.param(&[experts, h, f]);
                let gate = self.einsum("ebch,ehf->ebcf", y, w3);
                let bias = self.param_init(&[experts, f], Init::Normal { std: 0.5 });
                let up = self.op(OpKind::ExpertBias, &[up, bias]);
                let (alpha, limit) = (1.7, 0.4);
                self.op(OpKind::ClampedSwiglu { alpha, limit }, &[gate, up])
            }
            false => self.activation(up),
        };
        y = self.einsum("ebcf,efh->ebch", y, w2);
        let y = match before && self.rng.one_in(2) {
            true => self.op(OpKind::Combine, &[y, slots]),
            false => self.op(OpKind::Combine, &[y, slots, gates]),
        };
        let y = match before {
            true => self.shared_expert(n, y),
            false => y,
        };
        self.residual(x, y)
    }

    /// Adds an expert that every token goes to, times a gate of its own.
    fn shared_expert(&mut self, n: ValueId, routed: ValueId) -> ValueId {
        let (w1, w2) = (self.param(&[self.hidden, 3]), self.param(&[3, self.hidden]));
        let y = self.einsum("bsh,hf->bsf", n, w1);
        let y = self.unary(Unary::Silu, y);
        let y = self.einsum("bsf,fh->bsh", y, w2);
        let gate = self.param(&[self.hidden]);
        let gate = self.einsum("bsh,h->bs", n, gate);
        let gate = self.unary(Unary::Sigmoid, gate);
        let y = self.op(OpKind::ScaleRows, &[y, gate]);
        self.binary(Binary::Add, routed, y)
    }

    fn attention(&mut self, x: ValueId) -> ValueId {
        let (h, kv, groups, d) = (
            self.hidden,
            self.rng.between(1, 3),
            self.rng.between(1, 3),
            self.rng.between(2, 4),
        );
        let n = self.norm(x);
        let grouped = groups > 1;
        let (mut q, mut k, v) = if grouped && d == 3 {
            self.latent_qkv(n, kv, groups)
        } else if grouped {
            let (wq, wk, wv) = (
                self.param(&[h, kv, groups, d]),
                self.param(&[h, kv, d]),
                self.param(&[h, kv, d]),
            );
            let q = self.einsum("bsh,hkgd->bskgd", n, wq);
            (
                q,
                self.einsum("bsh,hkd->bskd", n, wk),
                self.einsum("bsh,hkd->bskd", n, wv),
            )
        } else {
            self.fused_qkv(n, kv, d)
        };
        if d % 2 == 0 && self.rng.one_in(2) {
            (q, k) = (self.rotary(q), self.rotary(k));
        }
        let dropout = if self.options.dropout {
            self.rng.pick(&[0.0, 0.25])
        } else {
            0.0
        };
        let scale = 1.0 / (d as f64).sqrt();
        let order = match self.sequence.is_multiple_of(2) && self.rng.one_in(4) {
            true => SequenceOrder::Zigzag {
                ranks: self.sequence / 2,
            },
            false => SequenceOrder::Natural,
        };
        // Some queries look back over three tokens, some see a few blocks, some do both; some scores
        // are bounded, some fall with the distance.
        let blocks = Blocks {
            size: if kv == 2 { 2 } else { 1 },
            local: 2,
            aligned: grouped,
            first: u64::from(kv == 1),
            last: u64::from(kv == 3),
        };
        let bounds = Bounds {
            window: (d == 2).then_some(3),
            blocks: (d == 4 || d == 2 && kv == 3).then_some(blocks),
            cap: (d == 2 && grouped).then_some(2.0),
            alibi: kv == 3,
        };
        let attended = self.ops(
            OpKind::Attention {
                scale,
                dropout,
                key: String::new(),
                order,
                keys: Default::default(),
                bounds,
            },
            &[q, k, v],
        );
        let mut o = attended[0];
        // Two heads have sinks.
        if kv == 2 {
            let heads: &[u64] = if grouped { &[kv, groups] } else { &[kv] };
            let sinks = self.param_init(heads, Init::Normal { std: 0.5 });
            let gap = self.binary(Binary::Sub, attended[1], sinks);
            let share = self.unary(Unary::Sigmoid, gap);
            o = self.op(OpKind::ScaleRows, &[o, share]);
        }
        let d = match self.dims(o).last() {
            Some(Dim::Fixed(n)) => *n,
            _ => d,
        };
        let width = kv * groups * d;
        let y = if self.rng.one_in(2) {
            let flat = self.reshape(o, &[self.sequence, width]);
            let w = self.param(&[width, h]);
            self.einsum("bsf,fh->bsh", flat, w)
        } else if grouped {
            let w = self.param(&[kv, groups, d, h]);
            self.einsum("bskgd,kgdh->bsh", o, w)
        } else {
            let w = self.param(&[kv, d, h]);
            self.einsum("bskd,kdh->bsh", o, w)
        };
        let y = self.maybe_bias(y);
        self.residual(x, y)
    }
    /// Keys of which all heads share an element, and values narrower than keys.
    fn latent_qkv(&mut self, n: ValueId, kv: u64, groups: u64) -> (ValueId, ValueId, ValueId) {
        let h = self.hidden;
        let (wq, wk, wv) = (
            self.param(&[h, kv, groups, 3]),
            self.param(&[h, kv, 2]),
            self.param(&[h, kv, 2]),
        );
        let shared = self.param(&[h, 1]);
        let q = self.einsum("bsh,hkgd->bskgd", n, wq);
        let k = self.einsum("bsh,hkd->bskd", n, wk);
        let v = self.einsum("bsh,hkd->bskd", n, wv);
        let shared = self.einsum("bsh,hd->bsd", n, shared);
        (q, self.op(OpKind::Join, &[shared, k]), v)
    }
    /// One matmul for queries, keys and values, then taken apart.
    fn fused_qkv(&mut self, n: ValueId, heads: u64, d: u64) -> (ValueId, ValueId, ValueId) {
        let (s, h) = (self.sequence, self.hidden);
        let stacked = if self.rng.one_in(2) {
            let w = self.param(&[h, 3, heads, d]);
            let y = self.einsum("bsh,hckd->bsckd", n, w);
            if self.rng.one_in(2) {
                let bias = self.param_init(&[3, heads, d], Init::Zeros);
                self.binary(Binary::Add, y, bias)
            } else {
                y
            }
        } else {
            let w = self.param(&[h, 3 * heads * d]);
            let y = self.einsum("bsh,hf->bsf", n, w);
            let y = self.maybe_bias(y);
            self.reshape(y, &[s, 3, heads, d])
        };
        let parts = self.ops(OpKind::Unstack { dim: 2 }, &[stacked]);
        (parts[0], parts[1], parts[2])
    }
    fn rotary(&mut self, x: ValueId) -> ValueId {
        let llama3 = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position: 4,
        };
        let scaling = self.rng.pick(&[
            RopeScaling::None,
            RopeScaling::Linear { factor: 2.0 },
            llama3,
        ]);
        let theta = self.rng.pick(&[10_000.0, 500_000.0]);
        // Half of a head at times, where it has an even half.
        let head_dim = match self.dims(x).last() {
            Some(Dim::Fixed(n)) => *n,
            _ => 0,
        };
        let part = (theta > 1e5 && head_dim.is_multiple_of(4)).then_some(head_dim / 2);
        self.op(
            OpKind::Rotary {
                theta,
                scaling,
                inverse: false,
                part,
                order: Default::default(),
            },
            &[x],
        )
    }

    /// Two dot-generals with random labels, there and back.
    fn dots(&mut self, x: ValueId) -> ValueId {
        let (sequence, hidden) = (self.sequence, self.hidden);
        let (f, g) = (self.rng.between(2, 5), self.rng.between(2, 3));
        let len = |l: &u8| match l {
            b's' => sequence,
            b'h' => hidden,
            b'f' => f,
            _ => g,
        };
        let contracted: &[u8] = self.rng.pick(&[&b"h"[..], &b"s"[..], &b"sh"[..]]);
        let fresh: &[u8] = self.rng.pick(&[&b"f"[..], &b"fg"[..]]);
        let kept: Vec<u8> = b"sh"
            .iter()
            .copied()
            .filter(|l| !contracted.contains(l))
            .collect();
        let (weight, middle) = random_weight(&mut self.rng, &kept, contracted, fresh);
        let y = self.dot_with_param(x, b"bsh", &weight, &middle, &len);
        let y = self.activation(y);
        let (weight, _) = random_weight(&mut self.rng, &kept, fresh, contracted);
        let z = self.dot_with_param(y, &middle, &weight, b"bsh", &len);
        self.residual(x, z)
    }
    /// Two dot-generals of activations with each other.
    fn scores(&mut self, x: ValueId) -> ValueId {
        let n = self.norm(x);
        let scores = self.einsum("bsh,bth->bst", n, n);
        let scores = self.unary(Unary::Scale { by: 0.125 }, scores);
        let y = self.einsum("bst,bth->bsh", scores, n);
        self.residual(x, y)
    }

    fn elementwise(&mut self, x: ValueId) -> ValueId {
        let mut y = self.unary(Unary::Tanh, x);
        let f = self.rng.pick(&[
            Unary::Exp,
            Unary::Square,
            Unary::Neg,
            Unary::Scale { by: -0.1 },
        ]);
        y = self.unary(f, y);
        if self.rng.one_in(2) {
            y = self.op(OpKind::Cast { dtype: DType::F32 }, &[y]);
        }
        let constant = self.op(OpKind::Constant { value: 0.3 }, &[]);
        y = self.binary(Binary::Mul, y, constant);
        let vector = self.param(&[self.hidden]);
        let f = self.rng.pick(&[Binary::Sub, Binary::Mul]);
        y = self.binary(f, y, vector);
        self.residual(x, y)
    }

    /// Transposes and reshapes around a matmul over the sequence.
    fn shapes(&mut self, x: ValueId) -> ValueId {
        let (s, h) = (self.sequence, self.hidden);
        let t = self.transpose(x, &[0, 2, 1]);
        let w = self.param(&[s, s]);
        let mixed = self.einsum("bhs,st->bht", t, w);
        let flat = self.reshape(mixed, &[h * s]);
        let again = self.reshape(flat, &[h, s]);
        let mut y = self.transpose(again, &[0, 2, 1]);
        if h.is_multiple_of(2) {
            let split = self.reshape(y, &[s, 2, h / 2]);
            let swapped = self.transpose(split, &[0, 1, 3, 2]);
            y = self.reshape(swapped, &[s, h]);
        }
        let y = self.op(OpKind::Layout, &[y]);
        self.residual(x, y)
    }
    /// Slices, pads, stacks and unstacks.
    fn pieces(&mut self, x: ValueId) -> ValueId {
        let dim = self.rng.pick(&[1, 2]);
        let n = if dim == 1 { self.sequence } else { self.hidden };
        let len = self.rng.between(1, n - 1);
        let start = self.rng.between(0, n - len);
        let part = self.op(OpKind::Slice { dim, start, len }, &[x]);
        let part = self.activation(part);
        let padded = self.op(
            OpKind::Pad {
                dim,
                start: n - len,
                len: n,
            },
            &[part],
        );
        let at = self.rng.between(1, 3) as usize;
        let both = self.op(OpKind::Stack { dim: at }, &[x, padded]);
        if self.rng.one_in(2) {
            let kind = if self.options.reduce_max {
                ReduceKind::Max
            } else {
                ReduceKind::Sum
            };
            return self.op(
                OpKind::Reduce {
                    kind,
                    dims: vec![at],
                },
                &[both],
            );
        }
        let parts = self.ops(OpKind::Unstack { dim: at }, &[both]);
        self.binary(Binary::Sub, parts[0], parts[1])
    }
    /// A reduction over the sequence, spread out again by an outer product.
    fn pooled(&mut self, x: ValueId) -> ValueId {
        let sum = self.op(
            OpKind::Reduce {
                kind: ReduceKind::Sum,
                dims: vec![1],
            },
            &[x],
        );
        let sum = self.activation(sum);
        let w = self.param(&[self.sequence]);
        let y = self.einsum("bh,s->bsh", sum, w);
        self.residual(x, y)
    }
    /// A table of positions, broadcast over the batch.
    fn positions(&mut self, x: ValueId) -> ValueId {
        let table = self.param(&[self.sequence, self.hidden]);
        if self.rng.one_in(2) {
            return self.binary(Binary::Add, x, table);
        }
        let wide = self.op(
            OpKind::Broadcast {
                leading: vec![Dim::Batch],
            },
            &[table],
        );
        self.residual(x, wide)
    }

    /// Logits by a matrix of its own or the embedding table, and the loss.
    pub(super) fn head(&mut self, x: ValueId) -> ValueId {
        let n = self.norm(x);
        let table = self.table.filter(|_| self.rng.one_in(2));
        let table = match table {
            Some(t) => t,
            None => self.param(&[self.vocab, self.hidden]),
        };
        let logits = self.einsum("bsh,vh->bsv", n, table);
        let labels = self.input(InputKind::Labels);
        let lse = self.op(OpKind::LogSumExp, &[logits]);
        let losses = self.op(OpKind::CrossEntropy, &[logits, lse, labels]);
        self.op(
            OpKind::Reduce {
                kind: ReduceKind::Sum,
                dims: vec![0, 1],
            },
            &[losses],
        )
    }
}
