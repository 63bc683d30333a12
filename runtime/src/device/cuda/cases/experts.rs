//! Mixtures of experts: small cases for every kernel, and ones of real sizes.

use super::{Case, part, whole};
use crate::execute::Local;
use ir::op::{ExpertGroups, Scores};
use ir::{DType, OpKind, ReduceKind};

/// Numbers of a router.
#[derive(Clone, Copy)]
struct Router {
    experts: u64,
    top_k: u64,
    capacity: u64,
    normalize: bool,
    scores: Scores,
    groups: Option<ExpertGroups>,
}

impl Router {
    /// The op and its gradient, for these samples and tokens; with a bias of this type.
    fn both(self, t: DType, [b, s]: [(u64, u64, u64); 2], bias: Option<DType>) -> [Case; 2] {
        let Router {
            experts,
            top_k,
            capacity,
            normalize,
            scores,
            groups,
        } = self;
        let of = |dtype, last: u64| part(dtype, &[b, s, (0, last, last)]);
        let (mut logits, gates) = (of(t, experts), of(DType::F32, top_k));
        logits.lens[2] = experts;
        let slots = of(DType::I32, top_k);
        let mut x = vec![logits.clone()];
        x.extend(bias.map(|dtype| whole(dtype, &[experts])));
        let route = OpKind::Route {
            top_k,
            capacity,
            normalize,
            scores,
            groups,
        };
        let gradient = OpKind::RouteGrad {
            capacity,
            normalize,
            scores,
        };
        [
            Case(route, x, vec![gates.clone(), slots.clone()]),
            Case(gradient, vec![logits.clone(), slots, gates], vec![logits]),
        ]
    }
}

/// Lengths of what lies between tokens and slots: experts of all ranks, and of dims that are split
/// first element, valid and padded length.
#[derive(Clone, Copy)]
struct Moved {
    all_experts: u64,
    experts: (u64, u64, u64),
    samples: (u64, u64, u64),
    tokens: (u64, u64, u64),
    choices: u64,
    capacity: u64,
    width: u64,
}

impl Moved {
    /// Tokens to slots and back, each with gates and without, and the gates' gradient.
    fn all(self, t: DType) -> Vec<Case> {
        let own = |n| (0, n, n);
        let dims = [self.experts, self.samples, own(self.capacity)];
        let mut slots_rows = part(t, &[&dims[..], &[own(self.width)]].concat());
        slots_rows.lens[0] = self.all_experts;
        let of_tokens = |dtype, n| part(dtype, &[self.samples, self.tokens, own(n)]);
        let tokens = of_tokens(t, self.width);
        let slots = of_tokens(DType::I32, self.choices);
        let gates = of_tokens(DType::F32, self.choices);
        let dispatch = OpKind::Dispatch {
            experts: self.all_experts,
            capacity: self.capacity,
        };
        let mut all = Vec::new();
        for (kind, x, y) in [
            (dispatch, &tokens, &slots_rows),
            (OpKind::Combine, &slots_rows, &tokens),
        ] {
            for n in [2, 3] {
                let x = [x, &slots, &gates].map(Local::clone);
                all.push(Case(kind.clone(), x[..n].to_vec(), vec![y.clone()]));
            }
        }
        let x = vec![slots_rows, tokens, slots];
        all.push(Case(OpKind::GateGrad, x, vec![gates]));
        all
    }
}

/// Softmax and sigmoid routers with few experts and many, in groups and without, with biases of the
/// choice, tokens that are dropped, and lists that several warps share; experts of one rank of
/// several, rows by eights and not, of one round of a row's threads and of several, more choices than
/// are on their way at a time; sums of an expert's rows.
pub(super) fn small(t: DType) -> Vec<Case> {
    let own = |n| (0, n, n);
    let mut all = Vec::new();
    let few = Router {
        experts: 5,
        top_k: 2,
        capacity: 3,
        normalize: true,
        scores: Scores::Softmax,
        groups: None,
    };
    let sigmoid = Router {
        experts: 16,
        top_k: 3,
        capacity: 40,
        scores: Scores::Sigmoid,
        ..few
    };
    let groups = |count, kept, best| Some(ExpertGroups { count, kept, best });
    let small = [(0, 2, 3), own(9)];
    let long = [own(2), own(700)];
    for (router, lens, bias) in [
        (few, small, None),
        (
            Router {
                normalize: false,
                ..few
            },
            small,
            None,
        ),
        (
            Router {
                experts: 8,
                groups: groups(4, 2, 1),
                ..few
            },
            small,
            None,
        ),
        (
            Router {
                experts: 12,
                groups: groups(3, 2, 2),
                normalize: false,
                ..few
            },
            small,
            Some(t),
        ),
        (sigmoid, small, None),
        (
            Router {
                normalize: false,
                ..sigmoid
            },
            small,
            Some(DType::F32),
        ),
        (
            Router {
                experts: 64,
                top_k: 8,
                groups: groups(8, 3, 2),
                ..sigmoid
            },
            small,
            Some(DType::F32),
        ),
        (
            Router {
                experts: 40,
                top_k: 6,
                capacity: 60,
                ..few
            },
            long,
            None,
        ),
    ] {
        all.extend(router.both(t, lens, bias));
    }
    let moved = Moved {
        all_experts: 8,
        experts: (2, 3, 4),
        samples: (0, 2, 3),
        tokens: (0, 7, 9),
        choices: 2,
        capacity: 3,
        width: 16,
    };
    for moved in [
        moved,
        Moved { width: 6, ..moved },
        Moved {
            choices: 5,
            width: 552,
            ..moved
        },
        Moved {
            experts: own(8),
            choices: 5,
            capacity: 9,
            width: 70,
            ..moved
        },
    ] {
        all.extend(moved.all(t));
    }
    for (rows, width) in [(7, 24), (40, 6)] {
        let rows = part(t, &[(2, 2, 3), (0, 2, 2), own(rows), own(width)]);
        let bias = part(t, &[(2, 2, 3), own(width)]);
        let x = vec![rows.clone(), bias];
        all.push(Case(OpKind::ExpertBias, x, vec![rows]));
    }
    // Their gradients: columns by eights and not, and too few for blocks of their own.
    for (rows, width) in [(33, 264), (150, 37), (40, 6)] {
        let x = part(t, &[(2, 2, 3), (0, 2, 2), own(rows), own(width)]);
        let y = part(t, &[(2, 2, 3), own(width)]);
        let (kind, dims) = (ReduceKind::Sum, vec![1, 2]);
        all.push(Case(OpKind::Reduce { kind, dims }, vec![x], vec![y]));
    }
    for n in [300, 320] {
        let x = whole(t, &[n]);
        let (alpha, limit) = (1.702, 0.5);
        let forward = OpKind::ClampedSwiglu { alpha, limit };
        let gradient = OpKind::ClampedSwigluGrad { alpha, limit };
        all.push(Case(forward, vec![x.clone(); 2], vec![x.clone()]));
        all.push(Case(gradient, vec![x.clone(); 3], vec![x; 2]));
    }
    all
}

/// The slots of an op's operand as a router would give them: tokens have other experts each, and an
/// expert takes as many as it has places.
pub(super) fn slots(Case(op, x, _): &Case, local: &Local) -> Option<Vec<i32>> {
    let (experts, capacity) = match op {
        OpKind::RouteGrad { capacity, .. } => (x[0].lens[2], *capacity),
        OpKind::Dispatch { experts, capacity } => (*experts, *capacity),
        OpKind::Combine | OpKind::GateGrad => (x[0].lens[0], x[0].ranges[2].padded),
        _ => return None,
    };
    let dims = local.dims();
    let [samples, tokens, choices] = dims[..] else {
        return None;
    };
    let mut slots = vec![0; local.elements()];
    for sample in 0..samples {
        let mut taken = vec![0u64; experts as usize];
        for choice in 0..choices {
            for token in 0..tokens {
                let row = sample * tokens + token;
                let first = (row as u64).wrapping_mul(2654435761) >> 7;
                let expert = (first + choice as u64) % experts;
                let place = &mut taken[expert as usize];
                slots[row * choices + choice] = match *place < capacity {
                    true => (expert * capacity + *place) as i32,
                    false => -(expert as i32 + 1),
                };
                *place += 1;
            }
        }
    }
    Some(slots)
}

/// A layer of Mixtral 8x7B, with slots for 1.25 times the tokens, the router of DeepSeek-V3, and the
/// experts' own ops of gpt-oss-20b, each with its name.
pub(super) fn real([samples, tokens]: [u64; 2]) -> Vec<(String, Case, f64)> {
    let own = |n| (0, n, n);
    let t = DType::Bf16;
    let capacity = |top_k: u64, experts: u64| (5 * top_k * tokens).div_ceil(4 * experts);
    let mixtral = Router {
        experts: 8,
        top_k: 2,
        capacity: capacity(2, 8),
        normalize: true,
        scores: Scores::Softmax,
        groups: None,
    };
    let (count, kept, best) = (8, 4, 2);
    let deepseek = Router {
        experts: 256,
        top_k: 8,
        capacity: capacity(8, 256),
        scores: Scores::Sigmoid,
        groups: Some(ExpertGroups { count, kept, best }),
        ..mixtral
    };
    let mut all = Vec::new();
    let mut add = |names: &[&str], cases: Vec<Case>| {
        let named = names.iter().zip(cases);
        all.extend(named.map(|(name, case)| (String::from(*name), case, 0.0)));
    };
    let lens = [own(samples), own(tokens)];
    add(
        &["route, 2 of 8 experts", "route's gradient, 2 of 8 experts"],
        mixtral.both(t, lens, None).into(),
    );
    add(
        &[
            "route, 8 of 256 experts in 8 groups",
            "route's gradient, 8 of 256 experts",
        ],
        deepseek.both(DType::F32, lens, Some(DType::F32)).into(),
    );
    let moved = Moved {
        all_experts: 8,
        experts: own(8),
        samples: own(samples),
        tokens: own(tokens),
        choices: 2,
        capacity: mixtral.capacity,
        width: 4096,
    };
    add(
        &[
            "dispatch, 2 of 8 experts, 4096 wide",
            "dispatch with gates, 2 of 8 experts, 4096 wide",
            "combine, 2 of 8 experts, 4096 wide",
            "combine with gates, 2 of 8 experts, 4096 wide",
            "gates' gradient, 2 of 8 experts, 4096 wide",
        ],
        moved.all(t),
    );
    let rows = whole(t, &[32, samples, capacity(4, 32), 2880]);
    let bias = whole(t, &[32, 2880]);
    let (alpha, limit) = (1.702, 7.0);
    let forward = OpKind::ClampedSwiglu { alpha, limit };
    let gradient = OpKind::ClampedSwigluGrad { alpha, limit };
    let (kind, dims) = (ReduceKind::Sum, vec![1, 2]);
    let sum = OpKind::Reduce { kind, dims };
    let own_rows = |n| vec![rows.clone(); n];
    add(
        &[
            "expert bias, 32 experts, 2880 wide",
            "expert bias's gradient, 32 experts, 2880 wide",
            "clamped SwiGLU",
            "clamped SwiGLU's gradient",
        ],
        vec![
            Case(
                OpKind::ExpertBias,
                vec![rows.clone(), bias.clone()],
                own_rows(1),
            ),
            Case(sum, own_rows(1), vec![bias]),
            Case(forward, own_rows(2), own_rows(1)),
            Case(gradient, own_rows(3), own_rows(2)),
        ],
    );
    all
}
