//! Attention and its gradient: small cases for every kernel, and ones of real sizes.

use super::{Case, whole};
use crate::execute::Local;
use ir::op::{Blocks, Bounds, Keys, SequenceOrder};
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
    /// Width of values.
    value: u64,
    /// Heads of keys on other ranks, of which as many are before these.
    others: u64,
}

/// How the op is.
#[derive(Clone, Copy)]
struct Form {
    order: SequenceOrder,
    keys: Keys,
    dropout: f64,
    scale: f64,
    bounds: Bounds,
    /// Whether the log-sum-exp has a gradient.
    lse_gradient: bool,
}

const UNBOUNDED: Bounds = Bounds {
    window: None,
    blocks: None,
    cap: None,
    alibi: false,
};

const PLAIN: Form = Form {
    order: SequenceOrder::Natural,
    keys: Keys::All,
    dropout: 0.0,
    scale: 0.05,
    bounds: UNBOUNDED,
    lse_gradient: false,
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
        value,
        others,
        len,
        ..
    } = sizes;
    let of = |dtype, seq: LocalRange, rest: &[u64]| {
        let mut local = whole(dtype, &[&[samples, len], rest].concat());
        local.ranges[1] = seq;
        local.lens[2] = kv + others;
        local.ranges[2].start = others / 2;
        local
    };
    let Form {
        order,
        keys,
        dropout,
        scale,
        bounds,
        lse_gradient,
    } = form;
    let q = of(t, sizes.queries, &[kv, groups, dim]);
    let k = of(t, sizes.keys, &[kv, dim]);
    let v = of(t, sizes.keys, &[kv, value]);
    let d_o = of(t, sizes.queries, &[kv, groups, value]);
    let lse = of(DType::F32, sizes.queries, &[kv, groups]);
    let sum = if keys == Keys::All { t } else { DType::F32 };
    let typed = |local: &Local| Local {
        dtype: sum,
        ..local.clone()
    };
    let (o, dq, dk, dv) = (typed(&d_o), typed(&q), typed(&k), typed(&v));
    let key = String::from("x.attn");
    let mut x = vec![q.clone(), k.clone(), v.clone()];
    let mut of_grad = vec![q, k, v, d_o.clone(), lse.clone(), d_o];
    if lse_gradient {
        of_grad.push(lse.clone());
    }
    if keys.continues() {
        x.extend([o.clone(), lse.clone()]);
        of_grad.push(dq.clone());
    }
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
        Case(gradient, of_grad, vec![dq, dk, dv]),
    ]
}

/// All keys by position and in zigzag order, with dropout, and parts of a ring: by warps. Heads of
/// 64 elements and of 72 and 128 are for tensor cores in half precision, the latter by the larger
/// of two kernels: short sequences, then ones with several tiles of queries and of keys of which
/// some are seen whole, some by a part of the queries and some by none, with sequences that do not
/// begin at a tile's first row and end within one.
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
        value: dim,
        others: 0,
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
                value: dim,
                others: 0,
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
    cases.extend(bounded(t));
    let both = |(sizes, form)| both(t, sizes, form);
    cases.into_iter().flat_map(both).collect()
}

/// Windows, blocks, caps, slopes, values of another width, and gradients of the log-sum-exp. Of
/// these each type has a few together, as every set of them is compiled by itself.
fn bounded(t: DType) -> Vec<(Sizes, Form)> {
    let short = |(dim, value), others| Sizes {
        samples: 2,
        queries: range(40, 38, 40),
        keys: range(0, 78, 80),
        len: 80,
        kv: 2,
        groups: 3,
        dim,
        value,
        others,
    };
    // Several tiles of both sides: seen whole, in part, not yet, and no more.
    let long = |(dim, value), others| Sizes {
        samples: 1,
        queries: range(30, 325, 330),
        keys: range(0, 355, 360),
        len: 400,
        kv: 1,
        groups: 2,
        dim,
        value,
        others,
    };
    let form = |window, cap, alibi, lse_gradient| Form {
        bounds: Bounds {
            window,
            cap,
            alibi,
            ..UNBOUNDED
        },
        lse_gradient,
        ..PLAIN
    };
    let is_latent = |of: Form| Form { scale: 0.2, ..of };
    let in_blocks = |size, local, aligned, of: Form| {
        let blocks = Blocks {
            size,
            local,
            aligned,
            first: 1,
            last: u64::from(aligned),
        };
        let bounds = Bounds {
            blocks: Some(blocks),
            ..of.bounds
        };
        Form { bounds, ..of }
    };
    match t {
        // By warps: also where sequences lie in another order, and of parts of a ring.
        DType::F32 => {
            // In other orders than by position sequences have no padding.
            let full = |of: Sizes| Sizes {
                queries: range(40, 40, 40),
                keys: range(0, 80, 80),
                ..of
            };
            let shard = |of: Sizes| Sizes {
                keys: range(0, 40, 40),
                ..full(of)
            };
            let zigzag = |of: Form| Form {
                order: SequenceOrder::Zigzag { ranks: 2 },
                ..of
            };
            let ring = |step, of: Form| Form {
                keys: Keys::Ring { step, ranks: 2 },
                ..of
            };
            let capped = form(Some(7), Some(0.4), false, false);
            let falling = form(None, None, true, false);
            let sunk = is_latent(form(None, None, false, true));
            let (wide, latent) = ((36, 36), (14, 10));
            vec![
                (short(wide, 0), capped),
                (long(wide, 0), capped),
                (full(short(wide, 0)), zigzag(capped)),
                (shard(short(wide, 0)), ring(1, zigzag(capped))),
                (short(wide, 5), falling),
                (full(short(wide, 4)), zigzag(falling)),
                (short(latent, 0), sunk),
                (short((10, 14), 0), sunk),
                (short(wide, 0), in_blocks(8, 3, false, PLAIN)),
                (long(wide, 0), in_blocks(64, 2, false, PLAIN)),
                (long(wide, 0), in_blocks(16, 5, true, capped)),
                (full(short(wide, 0)), zigzag(in_blocks(6, 2, true, PLAIN))),
                (
                    shard(short(wide, 0)),
                    ring(1, zigzag(in_blocks(3, 4, false, PLAIN))),
                ),
                (shard(short(latent, 0)), ring(0, sunk)),
                (shard(short(latent, 0)), ring(1, zigzag(sunk))),
            ]
        }
        DType::Bf16 => {
            let windows = [1, 30, 100].map(|w| form(Some(w), None, false, false));
            let gemma = form(Some(70), Some(0.4), true, false);
            let sunk = form(None, None, false, true);
            vec![
                (long((64, 64), 0), windows[0]),
                (long((64, 64), 0), windows[1]),
                (long((128, 128), 0), windows[1]),
                (short((72, 72), 0), windows[2]),
                (long((64, 64), 5), gemma),
                (long((128, 128), 2), gemma),
                (short((64, 32), 0), sunk),
                (short((72, 96), 0), sunk),
                (long((192, 128), 0), sunk),
                // By warps.
                (short((14, 10), 0), is_latent(sunk)),
                (long((64, 64), 0), in_blocks(32, 3, true, PLAIN)),
            ]
        }
        _ => {
            let all = form(Some(50), Some(0.6), true, true);
            vec![
                (long((64, 48), 2), all),
                (short((192, 128), 5), all),
                (short((14, 10), 4), all),
            ]
        }
    }
}

/// The op and its gradient in bf16, of so many samples, tokens, heads of keys, groups of each, and
/// elements of a head and of a value, each with its name and its floating-point operations: of the
/// pairs that see each other two products, and five of the gradient.
fn real(
    [samples, tokens, kv, groups, dim, value]: [u64; 6],
    bounds: Bounds,
) -> Vec<(String, Case, f64)> {
    let sizes = Sizes {
        samples,
        queries: range(0, tokens, tokens),
        keys: range(0, tokens, tokens),
        len: tokens,
        kv,
        groups,
        dim,
        value,
        others: 0,
    };
    let form = Form {
        scale: 1.0 / (dim as f64).sqrt(),
        bounds,
        ..PLAIN
    };
    let window = bounds.window.map_or(tokens, |w| w.min(tokens)) as f64;
    let pairs = window * (tokens as f64 - window / 2.0);
    let of_width = 2.0 * (samples * kv * groups) as f64 * pairs;
    let flops = of_width * (dim + value) as f64;
    let of_gradient = of_width * (3 * dim + 2 * value) as f64;
    let mut of = format!(
        "{samples} x {tokens}, {} heads of {dim}, {kv} of keys",
        kv * groups
    );
    if value != dim {
        of += &format!(", values of {value}");
    }
    if let Some(window) = bounds.window {
        of += &format!(", a window of {window}");
    }
    if bounds.cap.is_some() {
        of += ", capped scores";
    }
    if bounds.alibi {
        of += ", scores that fall";
    }
    let [forward, gradient] = both(DType::Bf16, sizes, form);
    vec![
        (format!("attention, {of}"), forward, flops),
        (format!("attention's gradient, {of}"), gradient, of_gradient),
    ]
}

/// Cases that are timed, of a step of so many samples of so many tokens. Where it has 8 samples of
/// 1024 tokens, these are attentions of the steps that are measured: GPT-2 124M's, and those of
/// Llama-like models with as many heads of keys as of queries and with half of them. Then ones with
/// bounds: a window and capped scores, slopes, and values narrower than keys.
pub(super) fn timed(samples: u64, tokens: u64) -> Vec<(String, Case, f64)> {
    let (half, long) = (samples.div_ceil(2), 4 * tokens);
    let window = Some(tokens);
    let bounds = |window, cap, alibi| Bounds {
        window,
        cap,
        alibi,
        ..UNBOUNDED
    };
    [
        ([samples, tokens, 12, 1, 64, 64], UNBOUNDED),
        ([8 * samples, tokens, 12, 1, 64, 64], UNBOUNDED),
        ([half, long, 16, 1, 128, 128], UNBOUNDED),
        ([half, long, 8, 2, 128, 128], UNBOUNDED),
        ([half, long, 8, 2, 128, 128], bounds(window, None, false)),
        (
            [half, long, 8, 2, 128, 128],
            bounds(window, Some(50.0), false),
        ),
        ([half, long, 16, 1, 128, 128], bounds(None, None, true)),
        ([half, long, 16, 1, 192, 128], UNBOUNDED),
    ]
    .into_iter()
    .flat_map(|(sizes, bounds)| real(sizes, bounds))
    .collect()
}
