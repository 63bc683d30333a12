//! Experts that files keep stacked, as ours are: gpt-oss has one tensor for all of a layer, with the
//! inputs first, in which the columns of gate and up take turns, and a bias for each expert.
//!
//! ```text
//! gate_up_proj [E, H, 2 F]   g0 u0 g1 u1 g2 u2 ..     gate [E, H, F]   g0 g1 g2 ..
//! ```

use super::{Rows, Table};
use crate::config::ExpertsConfig;
use ir::op::Init;

/// Adds the router and the experts of layer `i`, of a model as wide as `h`.
pub(super) fn experts(t: &mut Table, (h, normal): (u64, Init), e: &ExpertsConfig, i: u64) {
    let (count, inner) = (e.count, e.intermediate);
    let ours = |name: &str| format!("h.{i}.moe.{name}");
    let theirs = |name: &str| format!("layers.{i}.mlp.{name}");
    t.linear(
        (ours("router"), theirs("router")),
        &[h],
        &[count],
        true,
        normal,
    );
    if let Some(bias) = t.params.last_mut() {
        bias.init = normal;
    }
    for (name, parity) in [("gate", 0), ("up", 1)] {
        for (leaf, file, shape, init) in [
            ("weight", "gate_up_proj", &[count, h, inner][..], normal),
            (
                "bias",
                "gate_up_proj_bias",
                &[count, inner][..],
                Init::Zeros,
            ),
        ] {
            let (path, stored) = (
                format!("{}.{leaf}", ours(name)),
                theirs(&format!("experts.{file}")),
            );
            let mut hf_shape = shape.to_vec();
            let n = hf_shape.iter().product();
            if let Some(last) = hf_shape.last_mut() {
                *last *= 2;
            }
            t.add(&path, shape, &stored, &hf_shape, init);
            if let Some(param) = t.params.last_mut() {
                // Pairs of elements, of which one is ours.
                param.rows = Some(Rows::run(n, 2, (parity, 1)));
            }
        }
    }
    let (weight, bias) = ([count, inner, h], [count, h]);
    let stored = theirs("experts.down_proj");
    t.add(&ours("down.weight"), &weight, &stored, &weight, normal);
    let stored = theirs("experts.down_proj_bias");
    t.add(&ours("down.bias"), &bias, &stored, &bias, Init::Zeros);
}
