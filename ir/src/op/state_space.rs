//! State spaces (Mamba-2; Dao & Gu 2024): a scan over the sequence, and the short causal convolution
//! before it.
//!
//! A head keeps a state of `N x P` numbers. A token lets it decay and adds to it, and reads it:
//!
//! ```text
//!   t     = max(softplus(dt + dt_bias), dt_min)          the token's time step
//!   state = exp(-exp(a_log) t) state + t b x^T           b, c: N numbers, x, y: P numbers
//!   y     = state^T c + d x
//! ```
//!
//! It is computed **chunk by chunk** of `chunk` tokens (their algorithm SSD): within a chunk as masked
//! attention whose scores `c b^T` decay with the distance, from chunk to chunk by the states at their
//! ends. The FLOPs are those of these products as they are run, so they grow with the chunk:
//! of a token and head `2 Q P` for the scores' product with `x`, `2 N P` each to make a state and to
//! read one, and of a token and group `2 Q N` for the scores, with `Q` tokens in a chunk. The gradient
//! has twice as many, and makes scores and states again, which counts as time and not in MFU.
//!
//! Heads come in groups that share `b` and `c`, as query heads share keys and values. Samples and groups
//! can be split, and the heads within a group: then gradients of `b` and `c` are partial. The sequence
//! is whole: a state comes from all tokens before.

use super::family::*;

pub(super) static FAMILY: Family = Family {
    infer,
    rule,
    work,
    gradient,
    groups: |op| match op.kind {
        OpKind::StateSpace { .. } => together(op),
        _ => singly(op),
    },
};

/// Bytes of a number of a state: chunks hand on f32 whatever the type of activations.
const STATE_BYTES: u64 = 4;

fn infer(cx: &Operands<'_>) -> Result<Vec<TensorType>, OpError> {
    let x = cx.x;
    match *cx.kind {
        OpKind::CausalConv => {
            cx.sequence(0)?;
            cx.taps(1, 0)?;
            one(x[0].clone())
        }
        OpKind::CausalConvGradInput => {
            cx.sequence(1)?;
            cx.taps(0, 1)?;
            one(x[1].clone())
        }
        OpKind::CausalConvGradWeight { kernel } => {
            cx.sequence(0)?;
            cx.same(0, 1)?;
            cx.ensure(kernel > 0, || "a convolution of no tokens".into())?;
            let dims = [&x[0].shape.0[2..], &[Dim::Fixed(kernel)]].concat();
            one(TensorType::new(x[0].dtype, Shape(dims)))
        }
        OpKind::StateSpace { chunk, dt_min } => {
            cx.scan(chunk, dt_min)?;
            one(x[0].clone())
        }
        OpKind::StateSpaceGrad { chunk, dt_min } => {
            cx.scan(chunk, dt_min)?;
            cx.same(0, 7)?;
            Ok(x[..7].to_vec())
        }
        _ => cx.stranger(),
    }
}

impl Operands<'_> {
    /// Operand `i` is `f[B, S, channels..]`.
    fn sequence(&self, i: usize) -> Result<(), OpError> {
        self.float(i)?;
        let d = &self.x[i].shape.0;
        let fixed = d.iter().skip(1).all(|d| matches!(d, Dim::Fixed(_)));
        self.ensure(d.len() > 2 && d[0] == Dim::Batch && fixed, || {
            format!("operand {i} is {}, expected [B, S, channels..]", self.x[i])
        })
    }
    /// Operand `i` has some weights for each channel of operand `of`.
    fn taps(&self, i: usize, of: usize) -> Result<(), OpError> {
        let (w, x) = (&self.x[i], &self.x[of]);
        let d = &w.shape.0;
        let fits = d.len() + 1 == x.shape.rank()
            && d[..d.len() - 1] == x.shape.0[2..]
            && matches!(d[d.len() - 1], Dim::Fixed(1..))
            && w.dtype == x.dtype;
        self.ensure(fits, || {
            format!("operand {i} is {w}, expected [channels.., taps] for {x}")
        })
    }
    /// The first seven operands are those of a scan.
    fn scan(&self, chunk: u64, dt_min: f64) -> Result<(), OpError> {
        self.ensure(chunk > 0, || "a chunk of no tokens".into())?;
        self.ensure(dt_min.is_finite() && dt_min >= 0.0, || {
            format!("least time step {dt_min} is not a number from 0 on")
        })?;
        self.sequence(0)?;
        self.rank(0, 5)?;
        let x = &self.x[0];
        let d = &x.shape.0;
        self.rank(2, 4)?;
        let n = self.fixed(2, 3)?;
        let shared = [&d[..3], &[Dim::Fixed(n)]].concat();
        let heads = &d[2..4];
        for (i, dims) in [
            (1, &d[..4]),
            (2, &shared),
            (3, &shared),
            (4, heads),
            (5, heads),
            (6, heads),
        ] {
            let expected = TensorType::new(x.dtype, Shape(dims.to_vec()));
            self.ensure(self.x[i] == expected, || {
                format!("operand {i} is {}, expected {expected}", self.x[i])
            })?;
        }
        Ok(())
    }
}

fn rule(b: &mut Builder, kind: &OpKind, x: &[TensorType], y: &[TensorType]) {
    match kind {
        OpKind::CausalConv => {
            let f = b.conv_factors_of(&x[0], &x[1]);
            b.operand(&f.x).operand(&f.w).result(&f.x);
            b.linear(&[&[0], &[1]]);
        }
        OpKind::CausalConvGradInput => {
            let f = b.conv_factors_of(&x[1], &x[0]);
            b.operand(&f.w).operand(&f.x).result(&f.x);
            b.linear(&[&[0], &[1]]);
        }
        OpKind::CausalConvGradWeight { .. } => {
            let f = b.conv_factors_of(&x[0], &y[0]);
            b.operand(&f.x).operand(&f.x).result(&f.w);
            b.linear(&[&[0], &[1]]);
        }
        OpKind::StateSpace { .. } | OpKind::StateSpaceGrad { .. } => {
            let d = &x[0].shape.0;
            let (samples, s) = (b.factor(d[0], true), b.whole(d[1]));
            let (g, r) = (b.factor(d[2], true), b.factor(d[3], true));
            let (p, n) = (b.whole(d[4]), b.whole(x[2].shape.0[3]));
            let (xs, dt) = ([samples, s, g, r, p], [samples, s, g, r]);
            let (shared, heads) = ([samples, s, g, n], [g, r]);
            b.operand(&xs)
                .operand(&dt)
                .operand(&shared)
                .operand(&shared);
            b.operand(&heads).operand(&heads).operand(&heads);
            if matches!(kind, OpKind::StateSpace { .. }) {
                b.result(&xs);
                return;
            }
            b.operand(&xs);
            b.result(&xs).result(&dt).result(&shared).result(&shared);
            b.result(&heads).result(&heads).result(&heads);
            b.linear(&[&[7]]);
        }
        _ => {}
    }
}

/// Factors of `[B, S, channels..]` and of `[channels.., taps]`.
struct ChannelFactors {
    x: Vec<FactorId>,
    w: Vec<FactorId>,
}

impl Builder {
    /// Channels in several dims are split in all but the last one: a head's elements stay together.
    fn conv_factors_of(&mut self, x: &TensorType, w: &TensorType) -> ChannelFactors {
        let d = &x.shape.0;
        let (samples, s) = (self.factor(d[0], true), self.whole(d[1]));
        let n = d.len() - 2;
        let split = |i: usize| n == 1 || i + 1 < n;
        let channels: Vec<FactorId> = (0..n).map(|i| self.factor(d[2 + i], split(i))).collect();
        let taps = self.whole(w.shape.0[n]);
        ChannelFactors {
            x: [&[samples, s][..], &channels].concat(),
            w: [&channels[..], &[taps]].concat(),
        }
    }
}

fn work(op: &Lengths<'_>) -> Work {
    let (x, y) = (op.x, op.y);
    let taps = |w: &(DType, Vec<u64>)| w.1.last().map_or(0.0, |&k| k as f64);
    match *op.kind {
        OpKind::CausalConv => op.vector(2.0 * taps(&x[1]), &x[0]),
        OpKind::CausalConvGradInput => op.vector(2.0 * taps(&x[0]), &x[1]),
        OpKind::CausalConvGradWeight { .. } => op.vector(2.0 * taps(&y[0]), &x[0]),
        OpKind::StateSpace { chunk, .. } => scan_work(op, chunk, false),
        OpKind::StateSpaceGrad { chunk, .. } => scan_work(op, chunk, true),
        _ => Work::default(),
    }
}

/// Work of the chunked algorithm.
///
/// The products of a chunk and head count as one with a row for each token and a column for each
/// element of the head, as long inside as makes its FLOPs theirs. States at the ends of chunks are
/// written, read and written as they are handed on, and read, in f32.
fn scan_work(op: &Lengths<'_>, chunk: u64, is_gradient: bool) -> Work {
    let (d, n) = (&op.x[0].1, op.x[2].1[3]);
    let (samples, tokens, groups, heads, width) = (d[0], d[1], d[2], d[3], d[4]);
    let q = chunk.min(tokens);
    let chunks = tokens.div_ceil(q.max(1));
    let all = |counts: &[u64]| counts.iter().map(|&c| c as f64).product::<f64>();
    // Products of: the scores of a group, scores and inputs, and each way of a state.
    let scores = 2.0 * all(&[samples, tokens, groups, q, n]);
    let mixed = 2.0 * all(&[samples, tokens, groups, heads, q, width]);
    let state = 2.0 * all(&[samples, tokens, groups, heads, n, width]);
    let once = scores + mixed + 2.0 * state;
    let (times, recomputed_flops) = match is_gradient {
        false => (1.0, 0.0),
        true => (2.0, scores + state),
    };
    let heads_of = [samples, chunks, groups, heads];
    let rows = all(&[samples, tokens, groups, heads, width]);
    let inner = match rows > 0.0 {
        true => (once / (2.0 * rows)).round() as u64,
        false => 0,
    };
    let product = |counts: &[u64]| counts.iter().fold(1, |a: u64, &b| a.saturating_mul(b));
    let states = product(&[&heads_of[..], &[n, width, STATE_BYTES]].concat());
    let passes = if is_gradient { 8 } else { 4 };
    Work {
        matmul_flops: times * once,
        recomputed_flops,
        // A decay, a mask and two products for each score of a head, as attention counts them.
        vector_flops: times * 4.0 * all(&[samples, tokens, groups, heads, q]),
        bytes: sum_of(&[(1, op.all_bytes()), (passes, states)]),
        matmul: Some(MatmulShape {
            batch: product(&heads_of),
            m: q,
            n: width,
            k: inner,
        }),
        ..Work::default()
    }
}

fn gradient(arm: &mut Arm<'_>, i: usize) -> Result<Gradients, GraphError> {
    let dy = arm.only_gradient()?;
    let gradient = match arm.op.kind {
        OpKind::CausalConv if i == 0 => {
            arm.emit("x", OpKind::CausalConvGradInput, &[arm.x(1), dy])?
        }
        OpKind::CausalConv => {
            let taps = arm.shape(arm.x(1)).rank() - 1;
            let kernel = arm.len(arm.x(1), taps);
            let kind = OpKind::CausalConvGradWeight { kernel };
            arm.emit("weight", kind, &[arm.x(0), dy])?
        }
        // States are made again from what the forward op read.
        OpKind::StateSpace { chunk, dt_min } => {
            let operands = [&arm.op.inputs[..], &[dy]].concat();
            let all = arm.emit_all("all", OpKind::StateSpaceGrad { chunk, dt_min }, &operands)?;
            return Ok(all.into_iter().enumerate().collect());
        }
        _ => return not_forward(arm),
    };
    Ok(vec![(i, gradient)])
}
