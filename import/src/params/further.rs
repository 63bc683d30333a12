//! The parameters of modules that predict further tokens.
//!
//! Files have in one matrix what the embedding and what the module before gives are multiplied by,
//! the embedding first. Copies of the model's embedding and head, which some files have with each
//! module, are not read.

use super::Table;
use ir::op::Init;

/// Adds the norms and projections at the start of module `k`; its first tensors are in `stored`.
pub(super) fn begin(t: &mut Table, (h, normal): (u64, Init), k: u64, stored: &str) {
    let at = |ours: &str, theirs: &str| (format!("h.mtp.{k}.{ours}"), format!("{stored}.{theirs}"));
    t.gain(at("embed_norm", "enorm"), h);
    t.gain(at("hidden_norm", "hnorm"), h);
    for (ours, part) in [("embed_proj", 0), ("hidden_proj", 1)] {
        t.linear_beside(at(ours, "eh_proj"), h, (part, 2), normal);
    }
}
