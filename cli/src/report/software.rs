//! The software that a prediction is of, in one line: what a cluster's `software` says that
//! changes plans most.

use ir::software::{AttentionKernel, Software};

/// The line: name and notable behaviours.
pub fn words(software: &Software) -> String {
    format!(
        "Software: predicted as executed by {}: {}",
        software.name,
        behaviours(software).join(", ")
    )
}

/// Its behaviours, always in the same order.
fn behaviours(s: &Software) -> Vec<String> {
    let mut said = vec![
        match s.attention {
            AttentionKernel::Fused { .. } => "fused attention".to_string(),
            AttentionKernel::Unfused { .. } => "unfused attention".to_string(),
        },
        match s.overlapped_gradients {
            true => "gradients reduced beside the backward pass".to_string(),
            false => "gradients reduced after the backward pass".to_string(),
        },
    ];
    let over = |axes: &[String]| axes.join(" and ");
    if s.prefetched_parameters {
        said.push("parameters gathered ahead".into());
    }
    if !s.blocking_axes.is_empty() {
        said.push(format!(
            "kernels wait for collectives over {}",
            over(&s.blocking_axes)
        ));
    }
    if s.host_s_per_part > 0.0 && !s.copied_axes.is_empty() {
        let axes = over(&s.copied_axes);
        said.push(format!("the host copies the part of each rank over {axes}"));
    }
    if s.gathers_again {
        said.push("parameters gathered again after recomputation".into());
    }
    if !s.piecewise_axes.is_empty() {
        let axes = over(&s.piecewise_axes);
        said.push(format!("collectives over {axes} in pieces beside matmuls"));
    }
    if s.blocking_transfers {
        said.push("ranks wait for transfers".into());
    }
    match s.captured.as_slice() {
        [] => {}
        _ if s.captures_all() => said.push("CUDA graphs launch all".into()),
        names => said.push(format!("CUDA graphs launch {}", over(names))),
    }
    if s.synchronous_launches {
        said.push("the host waits for every kernel".into());
    }
    if s.fused_experts {
        said.push("what is between the matmuls of experts is part of them".into());
    }
    if let Some(dtype) = s.matmul_dtype {
        said.push(format!("matmuls in {}", dtype.name()));
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_says_what_the_software_does() {
        let mut s = Software::plain("a framework");
        assert_eq!(
            words(&s),
            "Software: predicted as executed by a framework: fused attention, gradients reduced after the backward pass"
        );
        s.overlapped_gradients = true;
        s.blocking_axes = vec!["data".into(), "tensor".into()];
        s.captured = vec!["attn".into(), "mlp".into()];
        assert_eq!(
            words(&s),
            "Software: predicted as executed by a framework: fused attention, gradients reduced beside the backward pass, kernels wait for collectives over data and tensor, CUDA graphs launch attn and mlp"
        );
        s.captured.push("*".into());
        assert!(words(&s).ends_with("CUDA graphs launch all"));
        s.fused_experts = true;
        assert!(words(&s).ends_with(", what is between the matmuls of experts is part of them"));
    }
}
