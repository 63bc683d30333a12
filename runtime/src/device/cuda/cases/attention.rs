//! Attention and its gradient: small cases for every kernel, and ones of real sizes.

use super::{Case, whole};
use crate::execute::Local;
use ir::op::{Keys, SequenceOrder};
use ir::{DType, LocalRange, OpKind};

/// The subject of a case.
#[derive(Clone, Copy)]
struct Sizes {
    samples: u64,
    queries: LocalRange,
    keys: LocalRange,
    /// Elements of the whole sequences.
    len: u64,
    kv: u64,
    groups: u64,
    dim: u64,
}

/// How the op is.
#[derive(Clone, Copy)]
struct Form {
    order: SequenceOrder,
    keys: Keys,
    dropout: f64,
    scale: f64,
}

const PLAIN: Form = Form {
    order: SequenceOrder::Natural,
    keys: Keys::All,
    dropout: 0.0,
    scale: 0.05,
};

fn range(start: u64, valid: u64, padded: u64) -> LocalRange {
    LocalRange {
        start,
        valid,
        padded,
    }
}

/// The op and its gradient, of type `t`; with parts of a ring sums are f32.
fn both(t: DType, sizes: Sizes, form: Form) -> [Case; 2] {
    let Sizes {
        samples,
        kv,
        groups,
        dim,
        len,
        ..
    } = sizes;
    let of = |dtype, seq: LocalRange, rest: &[u64]| {
        let mut local = whole(dtype, &[&[samples, len], rest].concat());
        local.ranges[1] = seq;
        local
    };
    let Form {
        order,
        keys,
        dropout,
        scale,
    } = form;
    let q = of(t, sizes.queries, &[kv, groups, dim]);
    let k = of(t, sizes.keys, &[kv, dim]);
    let lse = of(DType::F32, sizes.queries, &[kv, groups]);
    let sum = if keys == Keys::All { t } else { DType::F32 };
    let typed = |local: &Local| Local {
        dtype: sum,
        ..local.clone()
    };
    let (o, dq, dk) = (typed(&q), typed(&q), typed(&k));
    let key = String::from("x.attn");
    let mut x = vec![q.clone(), k.clone(), k.clone()];
    let mut of_grad = vec![q.clone(), k.clone(), k, q.clone(), lse.clone(), q];
    if keys.continues() {
        x.extend([o.clone(), lse.clone()]);
        of_grad.push(dq.clone());
    }
    let bounds = Default::default();
    let forward = OpKind::Attention {
        scale,
        dropout,
        key: key.clone(),
        order,
        keys,
        bounds,
    };
    let gradient = OpKind::AttentionGrad {
        scale,
        dropout,
        key,
        order,
        keys,
        bounds,
    };
    [
        Case(forward, x, vec![o, lse]),
        Case(gradient, of_grad, vec![dq, dk.clone(), dk]),
    ]
}

/// All keys by position and in zigzag order, with dropout, and parts of a ring: by warps. Heads of
/// 64 elements and of 72 and 128 are for tensor cores in half precision, the latter by the larger of
/// two kernels: short sequences, then ones with several tiles of queries and of keys of which some
/// are seen whole, some by a part of the queries and some by none, with sequences that do not begin
/// at a tile's first row and end within one.
pub(super) fn small(t: DType) -> Vec<Case> {
    let zigzag = SequenceOrder::Zigzag { ranks: 2 };
    let step = |step| Keys::Ring { step, ranks: 2 };
    let plain = |dim| Sizes {
        samples: 2,
        queries: range(40, 40, 40),
        keys: range(0, 80, 80),
        len: 80,
        kv: 2,
        groups: 3,
        dim,
    };
    // Log-sum-exps of the gradients' operands are made up, so scores have to be small for
    // probabilities that f16 holds.
    let by_warps = Form {
        scale: 0.4,
        ..PLAIN
    };
    let mut cases = vec![
        (plain(36), by_warps),
        (plain(64), PLAIN),
        (plain(72), PLAIN),
    ];
    for order in [SequenceOrder::Natural, zigzag] {
        let dropout = 0.3;
        cases.push((
            plain(36),
            Form {
                dropout,
                order,
                ..by_warps
            },
        ));
    }
    for (order, keys, first) in [(SequenceOrder::Natural, step(0), 0), (zigzag, step(1), 0)] {
        let sizes = Sizes {
            keys: range(first, 40, 40),
            ..plain(36)
        };
        cases.push((
            sizes,
            Form {
                order,
                keys,
                ..by_warps
            },
        ));
    }
    // The first query sees 63 keys. In f32 this would try nothing new.
    if t != DType::F32 {
        for (dim, kv, groups) in [(64, 1, 2), (128, 2, 1)] {
            let sizes = Sizes {
                samples: 1,
                queries: range(62, 135, 140),
                keys: range(0, 197, 200),
                len: 202,
                kv,
                groups,
                dim,
            };
            cases.push((sizes, PLAIN));
            // Keys that nobody sees.
            let sizes = Sizes {
                queries: range(0, 70, 70),
                keys: range(0, 150, 150),
                ..sizes
            };
            cases.push((sizes, PLAIN));
        }
    }
    let both = |(sizes, form)| both(t, sizes, form);
    cases.into_iter().flat_map(both).collect()
}

/// The op and its gradient in bf16, of so many samples, tokens, heads of keys, groups of each, and
/// elements of a head, each with its name and its floating-point operations: of the half of the
/// pairs that see each other two products, and five of the gradient.
pub(super) fn real([samples, tokens, kv, groups, dim]: [u64; 5]) -> Vec<(String, Case, f64)> {
    let sizes = Sizes {
        samples,
        queries: range(0, tokens, tokens),
        keys: range(0, tokens, tokens),
        len: tokens,
        kv,
        groups,
        dim,
    };
    let form = Form {
        scale: 1.0 / (dim as f64).sqrt(),
        ..PLAIN
    };
    let flops = 2.0 * (samples * kv * groups * tokens * tokens * dim) as f64;
    let of = format!(
        "{samples} x {tokens}, {} heads of {dim}, {kv} of keys",
        kv * groups
    );
    let [forward, gradient] = both(DType::Bf16, sizes, form);
    vec![
        (format!("attention, {of}"), forward, flops),
        (format!("attention's gradient, {of}"), gradient, 2.5 * flops),
    ]
}
