//! Sharding rules. A rule names the op's *factors* as an einsum does (Shardy's
//! `OpShardingRule`): every dim of every operand and result belongs to one factor.
//!
//! A strategy says for each mesh axis what it does:
//! * `Factor(f)`: the axis shards factor `f`. An operand without `f` is replicated over the
//!   axis; a result without `f` is partial over it, with the factor's reduction.
//! * `Partial(i)`: the operands of the `i`-th linear set arrive partial (sums), the others
//!   replicated, and every result is partial. Sound because the op is linear in that set.
//! * `Replicate`: every operand and result is replicated.

use super::{Binary, OpKind, Unary};
use crate::sharding::{Axes, DimSharding, Dims, ReduceKind, ShardingSpec};
use crate::{AxisId, Dim, FactorId, TensorType};
use serde::{Deserialize, Serialize};

/// Where a factor lies in activations; pins speak of roles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FactorRole {
    /// The samples of the microbatch.
    Batch,
    /// The dim after the batch.
    Sequence,
    /// The dim before the batch: experts, each with weights of its own.
    Expert,
    /// Any other dim: hidden, heads, vocabulary, ...
    Feature,
}

/// One factor of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Factor {
    /// Its length.
    pub size: Dim,
    /// Whether an axis may shard it.
    pub shardable: bool,
    /// Batch, sequence, expert or feature.
    pub role: FactorRole,
    /// How results without the factor combine when it is sharded.
    pub reduce: ReduceKind,
}

/// The factor of one dim of an operand or result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DimFactor {
    /// The factor.
    pub factor: FactorId,
    /// Elements of the dim per element of the factor (above 1 where a reshape merged dims).
    pub unit: u64,
}

/// An op's sharding rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardingRule {
    /// The factors.
    pub factors: Vec<Factor>,
    /// Per operand, the factor of each dim.
    pub operands: Vec<Vec<DimFactor>>,
    /// Per result, the factor of each dim.
    pub results: Vec<Vec<DimFactor>>,
    /// Sets of operands in which the op is jointly linear.
    pub linear: Vec<Vec<usize>>,
}

/// What one mesh axis does in an op.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum AxisUse {
    /// All ranks along the axis compute the same.
    Replicate,
    /// The axis shards a factor.
    Factor(FactorId),
    /// The operands of this linear set, and so the results, are partial sums over the axis.
    Partial(u32),
}

/// How an op is parallelised: one use per mesh axis.
#[derive(
    Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema,
)]
pub struct OpStrategy {
    /// Per axis, major first.
    pub uses: Vec<AxisUse>,
    /// Axes that share a factor are ordered major first as in the mesh, or, when true, the
    /// other way round (so that ZeRO can gather an outer axis that shards inside an inner one).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reverse: bool,
}

impl OpStrategy {
    /// Everything replicated over `n_axes` axes.
    pub fn replicate(n_axes: usize) -> Self {
        OpStrategy {
            uses: vec![AxisUse::Replicate; n_axes],
            reverse: false,
        }
    }
}

/// The specs that a strategy implies.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Assignment {
    /// Spec that each operand must have.
    pub operands: Vec<ShardingSpec>,
    /// Spec that each result then has.
    pub results: Vec<ShardingSpec>,
}

/// A strategy that an op's rule does not allow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StrategyError {
    /// The factor does not exist.
    #[error("factor {factor} does not exist; the op has {n_factors}")]
    NoSuchFactor {
        /// The factor named.
        factor: FactorId,
        /// How many there are.
        n_factors: usize,
    },
    /// The factor may not be sharded.
    #[error("factor {factor} may not be sharded")]
    NotShardable {
        /// The factor named.
        factor: FactorId,
    },
    /// The linear set does not exist.
    #[error("linear set {set} does not exist; the op has {n_sets}")]
    NoSuchLinearSet {
        /// The set named.
        set: u32,
        /// How many there are.
        n_sets: usize,
    },
    /// Results would be partial in two different ways that cannot be combined in any order.
    #[error("partial {first:?} and partial {second:?} do not mix")]
    MixedPartials {
        /// One reduction.
        first: ReduceKind,
        /// The other.
        second: ReduceKind,
    },
}

impl ShardingRule {
    /// The specs that `strategy` implies, or why it is not allowed.
    pub fn assign(&self, strategy: &OpStrategy) -> Result<Assignment, StrategyError> {
        for u in &strategy.uses {
            match *u {
                AxisUse::Replicate => {}
                AxisUse::Factor(f) => match self.factors.get(f.index()) {
                    None => {
                        return Err(StrategyError::NoSuchFactor {
                            factor: f,
                            n_factors: self.factors.len(),
                        });
                    }
                    Some(x) if !x.shardable => {
                        return Err(StrategyError::NotShardable { factor: f });
                    }
                    Some(_) => {}
                },
                AxisUse::Partial(i) if i as usize >= self.linear.len() => {
                    return Err(StrategyError::NoSuchLinearSet {
                        set: i,
                        n_sets: self.linear.len(),
                    });
                }
                AxisUse::Partial(_) => {}
            }
        }
        let operands = self
            .operands
            .iter()
            .enumerate()
            .map(|(i, dims)| self.operand_spec(i, dims, strategy))
            .collect();
        let results: Vec<ShardingSpec> = self
            .results
            .iter()
            .map(|dims| self.result_spec(dims, strategy))
            .collect();
        for spec in &results {
            let mut kinds = spec.partial.values();
            if let Some(&first) = kinds.next()
                && let Some(&second) = kinds.find(|&&k| k != first)
            {
                return Err(StrategyError::MixedPartials { first, second });
            }
        }
        Ok(Assignment { operands, results })
    }

    /// All shardable factors.
    pub fn shardable(&self) -> impl Iterator<Item = FactorId> + '_ {
        (0..self.factors.len())
            .filter(|&i| self.factors[i].shardable)
            .map(FactorId::new)
    }

    fn dim_specs(&self, dims: &[DimFactor], strategy: &OpStrategy) -> Dims {
        let axes_of = |f: FactorId| {
            let mut axes: Axes = (0..strategy.uses.len())
                .filter(|&a| strategy.uses[a] == AxisUse::Factor(f))
                .map(AxisId::new)
                .collect();
            if strategy.reverse {
                axes.reverse();
            }
            axes
        };
        dims.iter()
            .map(|d| DimSharding::by(axes_of(d.factor), d.unit))
            .collect()
    }
    fn operand_spec(&self, i: usize, dims: &[DimFactor], strategy: &OpStrategy) -> ShardingSpec {
        let partial = strategy
            .uses
            .iter()
            .enumerate()
            .filter_map(|(a, u)| match u {
                AxisUse::Partial(set) if self.linear[*set as usize].contains(&i) => {
                    Some((AxisId::new(a), ReduceKind::Sum))
                }
                _ => None,
            });
        ShardingSpec {
            dims: self.dim_specs(dims, strategy),
            partial: partial.collect(),
        }
    }
    fn result_spec(&self, dims: &[DimFactor], strategy: &OpStrategy) -> ShardingSpec {
        let partial = strategy
            .uses
            .iter()
            .enumerate()
            .filter_map(|(a, u)| match u {
                AxisUse::Factor(f) if !dims.iter().any(|d| d.factor == *f) => {
                    Some((AxisId::new(a), self.factors[f.index()].reduce))
                }
                AxisUse::Partial(_) => Some((AxisId::new(a), ReduceKind::Sum)),
                _ => None,
            });
        ShardingSpec {
            dims: self.dim_specs(dims, strategy),
            partial: partial.collect(),
        }
    }
}

/// Collects factors while operands and results are described.
struct Builder {
    rule: ShardingRule,
}

impl Builder {
    fn new() -> Self {
        Builder {
            rule: ShardingRule {
                factors: vec![],
                operands: vec![],
                results: vec![],
                linear: vec![],
            },
        }
    }
    fn factor(&mut self, size: Dim, shardable: bool) -> FactorId {
        let role = if size == Dim::Batch {
            FactorRole::Batch
        } else {
            FactorRole::Feature
        };
        self.rule.factors.push(Factor {
            size,
            shardable,
            role,
            reduce: ReduceKind::Sum,
        });
        FactorId::new(self.rule.factors.len() - 1)
    }
    fn free(&mut self, dims: &[Dim]) -> Vec<FactorId> {
        dims.iter().map(|&d| self.factor(d, true)).collect()
    }
    fn expert_factors(&mut self, experts: &TensorType, slots: &TensorType) -> ExpertFactors {
        let (d, t) = (&experts.shape.0, &slots.shape.0);
        let (b, s, h) = (
            self.factor(d[1], true),
            self.factor(t[1], true),
            self.factor(d[3], true),
        );
        let (e, c, k) = (self.factor(d[0], true), self.whole(d[2]), self.whole(t[2]));
        ExpertFactors {
            tokens: [b, s, h],
            experts: [e, b, c, h],
            slots: [b, s, k],
        }
    }
    fn whole(&mut self, d: Dim) -> FactorId {
        self.factor(d, false)
    }
    fn operand(&mut self, factors: &[FactorId]) -> &mut Self {
        self.rule.operands.push(units_of_one(factors));
        self
    }
    fn result(&mut self, factors: &[FactorId]) -> &mut Self {
        self.rule.results.push(units_of_one(factors));
        self
    }
    fn linear(&mut self, sets: &[&[usize]]) -> &mut Self {
        self.rule.linear = sets.iter().map(|s| s.to_vec()).collect();
        self
    }
    /// Marks the factor of the dim after the batch as the sequence and that of the dim before
    /// it as the experts, wherever there is one.
    fn finish(mut self) -> ShardingRule {
        let rule = &mut self.rule;
        for dims in rule.operands.iter().chain(&rule.results) {
            let is_batch = |d: &DimFactor| rule.factors[d.factor.index()].size == Dim::Batch;
            let Some(batch) = dims.iter().position(is_batch).filter(|&i| i <= 1) else {
                continue;
            };
            if let Some(after) = dims.get(batch + 1) {
                rule.factors[after.factor.index()].role = FactorRole::Sequence;
            }
            if batch == 1 {
                rule.factors[dims[0].factor.index()].role = FactorRole::Expert;
            }
        }
        self.rule
    }
}

/// Factors of the tensors that `Dispatch` and `Combine` stand between.
struct ExpertFactors {
    /// `[B, S, H]`.
    tokens: [FactorId; 3],
    /// `[E, B, C, H]`.
    experts: [FactorId; 4],
    /// `[B, S, k]`.
    slots: [FactorId; 3],
}

/// Factors of `[B, S, E]` and of `[B, S, k]`: samples are all that can be split.
fn routed(b: &mut Builder, logits: &TensorType, choices: &TensorType) -> [[FactorId; 3]; 2] {
    let d = &logits.shape.0;
    let (batch, s, e) = (b.factor(d[0], true), b.whole(d[1]), b.whole(d[2]));
    let k = b.whole(choices.shape.0[2]);
    [[batch, s, e], [batch, s, k]]
}

fn units_of_one(factors: &[FactorId]) -> Vec<DimFactor> {
    factors
        .iter()
        .map(|&factor| DimFactor { factor, unit: 1 })
        .collect()
}

pub(super) fn rule(kind: &OpKind, x: &[TensorType], y: &[TensorType]) -> ShardingRule {
    let mut b = Builder::new();
    let dims = |t: &TensorType| t.shape.0.clone();
    match kind {
        OpKind::Input { .. } | OpKind::State { .. } | OpKind::Constant { .. } => {
            let f = b.free(&dims(&y[0]));
            b.result(&f);
        }
        OpKind::Layout | OpKind::Accumulate { .. } | OpKind::Dropout { .. } => {
            let f = b.free(&dims(&x[0]));
            b.operand(&f).result(&f).linear(&[&[0]]);
        }
        OpKind::Cast { .. } => {
            let f = b.free(&dims(&x[0]));
            b.operand(&f).result(&f);
        }
        OpKind::Unary { f: fun } => {
            let f = b.free(&dims(&x[0]));
            b.operand(&f).result(&f);
            if matches!(fun, Unary::Neg | Unary::Scale { .. }) {
                b.linear(&[&[0]]);
            }
        }
        OpKind::Binary { f: fun } => {
            let f = b.free(&dims(&x[0]));
            let tail = &f[f.len() - x[1].shape.rank()..];
            b.operand(&f).operand(tail).result(&f);
            match fun {
                Binary::Add | Binary::Sub => b.linear(&[&[0, 1]]),
                Binary::Mul => b.linear(&[&[0], &[1]]),
                _ => b.linear(&[&[1]]),
            };
        }
        OpKind::Broadcast { leading } => {
            let lead = b.free(leading);
            let f = b.free(&dims(&x[0]));
            b.operand(&f).result(&[lead, f].concat()).linear(&[&[0]]);
        }
        OpKind::Reduce { kind, dims: gone } => {
            let f = b.free(&dims(&x[0]));
            let kept: Vec<FactorId> = (0..f.len())
                .filter(|i| !gone.contains(i))
                .map(|i| f[i])
                .collect();
            for &i in gone {
                b.rule.factors[f[i].index()].reduce = *kind;
            }
            b.operand(&f).result(&kept);
            if *kind == ReduceKind::Sum {
                b.linear(&[&[0]]);
            }
        }
        OpKind::Reshape { .. } => reshape_rule(&mut b, &dims(&x[0]), &dims(&y[0])),
        OpKind::Transpose { perm } => {
            let f = b.free(&dims(&x[0]));
            let out: Vec<FactorId> = perm.iter().map(|&i| f[i]).collect();
            b.operand(&f).result(&out).linear(&[&[0]]);
        }
        OpKind::Slice { dim, .. } | OpKind::Pad { dim, .. } => {
            let f: Vec<FactorId> = dims(&x[0])
                .iter()
                .enumerate()
                .map(|(i, &d)| b.factor(d, i != *dim))
                .collect();
            b.operand(&f).result(&f).linear(&[&[0]]);
        }
        OpKind::Unstack { dim } => {
            let f: Vec<FactorId> = dims(&x[0])
                .iter()
                .enumerate()
                .map(|(i, &d)| b.factor(d, i != *dim))
                .collect();
            let mut out = f.clone();
            out.remove(*dim);
            b.operand(&f).linear(&[&[0]]);
            for _ in y {
                b.result(&out);
            }
        }
        OpKind::Stack { dim } => {
            let f = b.free(&dims(&x[0]));
            let new = b.whole(y[0].shape.0[*dim]);
            for _ in x {
                b.operand(&f);
            }
            let mut out = f;
            out.insert(*dim, new);
            let all: Vec<usize> = (0..x.len()).collect();
            b.result(&out).linear(&[&all]);
        }
        OpKind::DotGeneral { einsum } => {
            let mut labels: Vec<(u8, FactorId)> = Vec::new();
            for (t, ls) in x.iter().zip([&einsum.lhs, &einsum.rhs]) {
                for (&d, &l) in t.shape.0.iter().zip(ls) {
                    if !labels.iter().any(|(k, _)| *k == l) {
                        labels.push((l, b.factor(d, true)));
                    }
                }
            }
            let find = |ls: &[u8]| -> Vec<FactorId> {
                ls.iter()
                    .filter_map(|l| labels.iter().find(|(k, _)| k == l).map(|(_, f)| *f))
                    .collect()
            };
            b.operand(&find(&einsum.lhs))
                .operand(&find(&einsum.rhs))
                .result(&find(&einsum.out))
                .linear(&[&[0], &[1]]);
        }
        OpKind::Embedding => {
            let table = b.free(&dims(&x[0]));
            let ids = b.free(&dims(&x[1]));
            let out = [ids.clone(), vec![table[1]]].concat();
            b.operand(&table).operand(&ids).result(&out).linear(&[&[0]]);
        }
        OpKind::EmbeddingGrad { .. } => {
            let dy = b.free(&dims(&x[1]));
            let v = b.factor(y[0].shape.0[0], true);
            let (ids, h) = dy.split_at(dy.len() - 1);
            b.operand(ids)
                .operand(&dy)
                .result(&[v, h[0]])
                .linear(&[&[1]]);
        }
        OpKind::LayerNorm { .. } | OpKind::RmsNorm { .. } => {
            let (all, rows, h) = rows_and_last(&mut b, &x[0], false);
            b.operand(&all);
            for _ in 1..x.len() {
                b.operand(&[h]);
            }
            b.result(&all);
            for _ in 1..y.len() {
                b.result(&rows);
            }
        }
        OpKind::LayerNormGradInput | OpKind::RmsNormGradInput => {
            let (all, rows, h) = rows_and_last(&mut b, &x[0], false);
            b.operand(&all).operand(&all).operand(&[h]);
            for _ in 3..x.len() {
                b.operand(&rows);
            }
            b.result(&all).linear(&[&[0]]);
        }
        OpKind::LayerNormGradWeight | OpKind::RmsNormGradWeight => {
            let (all, rows, h) = rows_and_last(&mut b, &x[0], true);
            b.operand(&all).operand(&all);
            for _ in 2..x.len() {
                b.operand(&rows);
            }
            for _ in y {
                b.result(&[h]);
            }
            b.linear(&[&[0]]);
        }
        OpKind::Rotary { .. } => {
            let (all, _, _) = rows_and_last(&mut b, &x[0], false);
            b.operand(&all).result(&all).linear(&[&[0]]);
        }
        OpKind::Attention { .. } | OpKind::AttentionGrad { .. } => {
            // q: B S K (G) D; k, v: B T K D. A split S leaves every key in place; a split S
            // or G makes the gradients of k and v partial.
            let q = dims(&x[0]);
            let bsz = b.factor(q[0], true);
            let s = b.factor(q[1], true);
            let heads = b.free(&q[2..q.len() - 1]);
            let d = b.whole(q[q.len() - 1]);
            let t = b.whole(x[1].shape.0[1]);
            let qf = [vec![bsz, s], heads.clone(), vec![d]].concat();
            let kf = [bsz, t, heads[0], d];
            let lse = &qf[..qf.len() - 1];
            b.operand(&qf).operand(&kf).operand(&kf);
            if matches!(kind, OpKind::Attention { .. }) {
                b.result(&qf).result(lse);
            } else {
                b.operand(&qf).operand(lse).operand(&qf);
                b.result(&qf).result(&kf).result(&kf).linear(&[&[5]]);
            }
        }
        OpKind::LogSumExp => {
            let (all, rows, v) = rows_and_last(&mut b, &x[0], true);
            b.rule.factors[v.index()].reduce = ReduceKind::LogSumExp;
            b.operand(&all).result(&rows);
        }
        OpKind::CrossEntropy => {
            let (all, rows, _) = rows_and_last(&mut b, &x[0], true);
            b.operand(&all).operand(&rows).operand(&rows).result(&rows);
        }
        OpKind::CrossEntropyGrad => {
            let (all, rows, _) = rows_and_last(&mut b, &x[0], true);
            b.operand(&all)
                .operand(&rows)
                .operand(&rows)
                .operand(&rows)
                .result(&all)
                .linear(&[&[3]]);
        }
        // Which places are left depends on all tokens of the sample.
        OpKind::Route { .. } => {
            let [f, k] = routed(&mut b, &x[0], &y[0]);
            b.operand(&f).result(&[f[0], f[1], k[2]]).result(&k);
        }
        OpKind::RouteGrad { .. } => {
            let [f, k] = routed(&mut b, &x[0], &x[1]);
            b.operand(&f).operand(&k).operand(&k).result(&f);
            b.linear(&[&[2]]);
        }
        // Of split tokens each part fills its own slots, so the parts of the result add up;
        // split experts pick their tokens.
        OpKind::Dispatch { .. } => {
            let e = b.expert_factors(&y[0], &x[1]);
            b.operand(&e.tokens).operand(&e.slots);
            if x.len() == 3 {
                b.operand(&e.slots);
            }
            b.result(&e.experts);
            let sets: &[&[usize]] = &[&[0], &[2]];
            b.linear(&sets[..x.len() - 1]);
        }
        OpKind::Combine => {
            let e = b.expert_factors(&x[0], &x[1]);
            b.operand(&e.experts).operand(&e.slots);
            if x.len() == 3 {
                b.operand(&e.slots);
            }
            b.result(&e.tokens);
            let sets: &[&[usize]] = &[&[0], &[2]];
            b.linear(&sets[..x.len() - 1]);
        }
        OpKind::GateGrad => {
            let e = b.expert_factors(&x[0], &x[2]);
            b.operand(&e.experts).operand(&e.tokens).operand(&e.slots);
            b.result(&e.slots).linear(&[&[0], &[1]]);
        }
        OpKind::SumSquares => {
            let f = b.free(&dims(&x[0]));
            b.operand(&f).result(&[]);
        }
        OpKind::GlobalNorm | OpKind::ClipCoefficient { .. } | OpKind::UpdateLossScale { .. } => {
            for _ in x {
                b.operand(&[]);
            }
            for _ in y {
                b.result(&[]);
            }
        }
        OpKind::AdamW { .. } | OpKind::Sgd { .. } => {
            let f = b.free(&dims(&x[0]));
            // Parameter, gradient and moments; then scalars.
            for i in 0..x.len() {
                b.operand(if i <= y.len() { &f } else { &[] });
            }
            for _ in y {
                b.result(&f);
            }
        }
    }
    b.finish()
}

/// Factors of a row-wise op: all dims, all but the last, the last.
fn rows_and_last(
    b: &mut Builder,
    t: &TensorType,
    last_shardable: bool,
) -> (Vec<FactorId>, Vec<FactorId>, FactorId) {
    let dims = &t.shape.0;
    let mut all = b.free(&dims[..dims.len() - 1]);
    let rows = all.clone();
    let last = b.factor(dims[dims.len() - 1], last_shardable);
    all.push(last);
    (all, rows, last)
}

/// Dims are grouped where both sides have equal products; of each group the major part that
/// both sides share is one shardable factor, everything else is whole.
fn reshape_rule(b: &mut Builder, from: &[Dim], to: &[Dim]) {
    let (mut operand, mut result) = (Vec::new(), Vec::new());
    let (mut i, mut j) = (0, 0);
    if from.first() == Some(&Dim::Batch) {
        let f = b.factor(Dim::Batch, true);
        operand.push(DimFactor { factor: f, unit: 1 });
        result.push(DimFactor { factor: f, unit: 1 });
        (i, j) = (1, 1);
    }
    let len = |d: Dim| d.bind(1);
    while i < from.len() || j < to.len() {
        let (i0, j0) = (i, j);
        let (mut p, mut q) = (1u64, 1u64);
        // The first dim of each side, then whichever side lags, until the products agree.
        loop {
            if p <= q && i < from.len() && (i == i0 || p != q) {
                p *= len(from[i]);
                i += 1;
            } else if j < to.len() && (j == j0 || p != q) {
                q *= len(to[j]);
                j += 1;
            } else {
                break;
            }
        }
        let major = |dims: &[Dim]| dims.first().map_or(1, |d| len(*d));
        let (a, c) = (major(&from[i0..i]), major(&to[j0..j]));
        let shared = a.min(c);
        let ok = shared > 0 && a % shared == 0 && c % shared == 0;
        let f = b.factor(Dim::Fixed(shared), ok);
        for (dims, out) in [(&from[i0..i], &mut operand), (&to[j0..j], &mut result)] {
            for (k, &d) in dims.iter().enumerate() {
                match k == 0 && ok {
                    true => out.push(DimFactor {
                        factor: f,
                        unit: len(d) / shared,
                    }),
                    false => {
                        let whole = b.whole(d);
                        out.push(DimFactor {
                            factor: whole,
                            unit: 1,
                        });
                    }
                }
            }
        }
    }
    b.rule.operands.push(operand);
    b.rule.results.push(result);
    b.linear(&[&[0]]);
}
