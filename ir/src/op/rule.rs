//! Sharding rules. A rule names the op's *factors* as an einsum does (Shardy's
//! `OpShardingRule`): every dim of every operand and result belongs to one factor.
//!
//! A strategy says for each mesh axis what it does:
//! * `Factor(f)`: the axis shards factor `f`. An operand without `f` is replicated over the
//!   axis; a result without `f` is partial over it, with the factor's reduction.
//! * `Partial(i)`: the operands of the `i`-th linear set arrive partial (sums), the others
//!   replicated, and every result is partial. Sound because the op is linear in that set.
//! * `Replicate`: every operand and result is replicated.

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
    /// A shardable factor and another of the same length whose shards may go around a ring, so that
    /// each rank meets all of them: queries, and the keys that they look at.
    pub ring: Option<(FactorId, FactorId)>,
}

/// The role of one mesh axis in an op.
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
#[serde(deny_unknown_fields)]
pub struct OpStrategy {
    /// Per axis, major first.
    pub uses: Vec<AxisUse>,
    /// Axes that share a factor are ordered major first as in the mesh, or, when true, the
    /// other way round (so that ZeRO can gather an outer axis that shards inside an inner one).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reverse: bool,
    /// Axes that shard the first factor of the rule's ring shard the second one too, and goes
    /// around (Liu et al. 2023): every operand and result with that factor is as long as a shard.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ring: bool,
}

impl OpStrategy {
    /// Everything replicated over `n_axes` axes.
    pub fn replicate(n_axes: usize) -> Self {
        OpStrategy {
            uses: vec![AxisUse::Replicate; n_axes],
            reverse: false,
            ring: false,
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
    /// Nothing of the op goes around a ring, or not over exactly one axis.
    #[error("the op has {n_axes} axes for a ring; it takes one, in an op that has a ring")]
    NoRing {
        /// Axes that shard the ring's factor.
        n_axes: usize,
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
        if strategy.ring {
            let is_ring = |u: &&AxisUse| self.ring.is_some_and(|(f, _)| **u == AxisUse::Factor(f));
            let n_axes = strategy.uses.iter().filter(is_ring).count();
            if n_axes != 1 {
                return Err(StrategyError::NoRing { n_axes });
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
            .map(|d| DimSharding::by(axes_of(self.sharded_as(d.factor, strategy)), d.unit))
            .collect()
    }
    /// The factor whose axes shard this one.
    fn sharded_as(&self, f: FactorId, strategy: &OpStrategy) -> FactorId {
        match self.ring.filter(|_| strategy.ring) {
            Some((queries, keys)) if f == keys => queries,
            _ => f,
        }
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
                AxisUse::Factor(f)
                    if !(dims.iter()).any(|d| self.sharded_as(d.factor, strategy) == *f) =>
                {
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
pub(super) struct Builder {
    pub rule: ShardingRule,
}

impl Builder {
    pub fn new() -> Self {
        Builder {
            rule: ShardingRule {
                factors: vec![],
                operands: vec![],
                results: vec![],
                linear: vec![],
                ring: None,
            },
        }
    }
    pub fn factor(&mut self, size: Dim, shardable: bool) -> FactorId {
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
    pub fn free(&mut self, dims: &[Dim]) -> Vec<FactorId> {
        dims.iter().map(|&d| self.factor(d, true)).collect()
    }
    pub fn whole(&mut self, d: Dim) -> FactorId {
        self.factor(d, false)
    }
    pub fn operand(&mut self, factors: &[FactorId]) -> &mut Self {
        self.rule.operands.push(units_of_one(factors));
        self
    }
    pub fn result(&mut self, factors: &[FactorId]) -> &mut Self {
        self.rule.results.push(units_of_one(factors));
        self
    }
    pub fn linear(&mut self, sets: &[&[usize]]) -> &mut Self {
        self.rule.linear = sets.iter().map(|s| s.to_vec()).collect();
        self
    }
    /// Marks the factor of the dim after the batch as the sequence and that of the dim before
    /// it as the experts, wherever there is one.
    pub fn finish(mut self) -> ShardingRule {
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

fn units_of_one(factors: &[FactorId]) -> Vec<DimFactor> {
    factors
        .iter()
        .map(|&factor| DimFactor { factor, unit: 1 })
        .collect()
}

/// Factors of a row-wise op: all dims, all but the last, the last.
pub(super) fn rows_and_last(
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
