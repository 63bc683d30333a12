//! Multi-token prediction (DeepSeek-V3, DeepSeek 2024, section 2.2).
//!
//! Module `k` predicts from position `i` the token `k` behind the next one, from what the module
//! before it gave, for the first one what the head reads, and from the embedding of the token that
//! this one predicted:
//!
//! ```text
//! what the head reads, or the module before ─ hidden_norm ─ hidden_proj ─┐
//! token i + k ─ embedding ─ embed_norm ─ embed_proj ─────────────────── add ─ block ─ norm ─ head
//! ```
//!
//! Files have the two projections side by side in one matrix (`eh_proj`). Embedding and head are
//! the model's. The loss is that of the next tokens plus `loss_scale` times the mean of the further
//! ones'. A sample has as many tokens more as are predicted further on, so that every position
//! counts (Megatron-Core leaves a sample's last ones out).
//!
//! Each further token has a layer, `h.mtp.0`, .., so that patterns which mean all layers (`h.*`) mean
//! these too. Where one module predicts all, the layers behind the first use its parameters.

use super::Builder;
use crate::ImportError;
use crate::config::FurtherConfig;
use ir::ValueId;
use ir::op::{InputKind, OpKind, Unary};

/// The parts of a model that its modules are made of.
pub(super) trait Parts {
    /// Adds the norm at `path`.
    fn norm(&self, b: &mut Builder, path: &str, x: ValueId) -> Result<ValueId, ImportError>;
    /// Adds the layers of module `k`, whose paths begin with `scope`.
    fn block(
        &self,
        b: &mut Builder,
        scope: &str,
        k: u64,
        x: ValueId,
    ) -> Result<ValueId, ImportError>;
}

/// Adds what stands behind the last layer, whose result is `x`: modules where there are any, and
/// the head. `table` is the embedding's, and `is_tied` says that the head uses it too.
pub(super) fn finish(
    b: &mut Builder,
    parts: &impl Parts,
    further: Option<FurtherConfig>,
    (table, is_tied): (ValueId, bool),
    x: ValueId,
) -> Result<(), ImportError> {
    let tied = is_tied.then_some(table);
    let Some(further) = further else {
        b.start_layer("head");
        let x = parts.norm(b, "head.norm", x)?;
        return b.loss(x, tied);
    };
    let mut main = x;
    let mut before = x;
    let mut given = Vec::new();
    for k in 0..further.depth {
        let scope = format!("h.mtp.{k}");
        b.start_layer(scope.as_str());
        if k == 0 {
            main = parts.norm(b, "head.norm", x)?;
            before = main;
        }
        let module = k.min(further.modules - 1);
        b.parameters_of = (module < k).then(|| (scope.clone(), format!("h.mtp.{module}")));
        before = step(b, parts, &scope, k, (table, before))?;
        b.parameters_of = None;
        given.push(before);
    }
    b.start_layer("head");
    let labels = b.input("labels", InputKind::Labels)?;
    let logits = b.logits("head", main, tied)?;
    let next = b.nll_of("head", logits, labels, "nll_sum")?;
    let mut sums = Vec::new();
    for (x, k) in given.into_iter().zip(0u32..) {
        let scope = format!("head.mtp.{k}");
        let kind = InputKind::FurtherLabels { by: k + 1 };
        let labels = b.input(&format!("{scope}.labels"), kind)?;
        let logits = b.logits(&scope, x, tied)?;
        sums.push(b.nll_of(&scope, logits, labels, &format!("{scope}.nll_sum"))?);
    }
    let mut sum = sums[0];
    for (k, &more) in sums.iter().enumerate().skip(1) {
        sum = b.add(format!("head.mtp.{k}.add"), sum, more)?;
    }
    let by = further.loss_scale / further.depth as f64;
    let scale = OpKind::Unary {
        f: Unary::Scale { by },
    };
    let sum = b.op("head.mtp.scale", scale, &[sum])?;
    let total = b.add("head.mtp.total", next, sum)?;
    b.graph.outputs = vec![total];
    Ok(())
}

/// Further token `k`, in the layer `m`: of the embedding's table and what the layer before gave.
fn step(
    b: &mut Builder,
    parts: &impl Parts,
    m: &str,
    k: u64,
    (table, before): (ValueId, ValueId),
) -> Result<ValueId, ImportError> {
    let by = u32::try_from(k + 1).expect("a config has at most 64 further tokens");
    let tokens = b.input(&format!("{m}.tokens"), InputKind::FurtherTokens { by })?;
    let embedded = b.op(format!("{m}.embed"), OpKind::Embedding, &[table, tokens])?;
    let embedded = parts.norm(b, &format!("{m}.embed_norm"), embedded)?;
    let hidden = parts.norm(b, &format!("{m}.hidden_norm"), before)?;
    let embedded = b.linear(&format!("{m}.embed_proj"), "bsh,hk->bsk", embedded)?;
    let hidden = b.linear(&format!("{m}.hidden_proj"), "bsh,hk->bsk", hidden)?;
    let x = b.add(format!("{m}.join"), embedded, hidden)?;
    let x = parts.block(b, m, k, x)?;
    parts.norm(b, &format!("{m}.norm"), x)
}
