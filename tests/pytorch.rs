//! Parity with PyTorch: the values under `reference/` were made by `transformers` and `torch`.

#![allow(clippy::unwrap_used)] // A test may stop at what it does not expect.

use ir::training::training_graph;
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use tests::{CASES, Case, distance, relative};

fn tensor(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let bytes = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
    bytes
        .data()
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect()
}

/// Loss within 1e-5 relative and gradient norm within 2e-5 at each of 20 AdamW steps;
/// gradients of the first step within 1e-5 by norm of the difference over the global norm.
fn check(name: &str) {
    let case = Case::load(name);
    let training = training_graph(&case.forward, &case.train).expect("the training graph builds");
    assert_eq!(ir::training::problems(&training), Vec::<String>::new());
    let mut single = case.single(&training, case.train.global_batch);
    let losses = case.reference["losses"].as_array().expect("losses");
    let norms = case.reference["grad_norms"].as_array().expect("grad_norms");
    assert_eq!(losses.len(), 20);
    for (step, batch) in case.batches.iter().enumerate() {
        let got = single.step(batch, case.lr).expect("the step runs");
        let (loss, norm) = (
            losses[step].as_f64().unwrap(),
            norms[step].as_f64().unwrap(),
        );
        assert!(
            relative(got.loss, loss) < 1e-5,
            "{name} step {step}: loss {} against {loss}",
            got.loss
        );
        assert!(
            relative(got.grad_norm, norm) < 2e-5,
            "{name} step {step}: norm {} against {norm}",
            got.grad_norm
        );
        if step == 0 {
            let bytes = std::fs::read(case.folder.join("grads.safetensors")).unwrap();
            let file = SafeTensors::deserialize(&bytes).unwrap();
            let all = stored(&case, single.gradients());
            let difference: f64 = (all.iter())
                .map(|(hf, ours)| distance(ours, &tensor(&file, hf)).0)
                .sum();
            assert_eq!(all.len(), file.len(), "every gradient was compared");
            assert!(
                difference.sqrt() / norm < 1e-5,
                "{name}: gradients differ by {} of the norm",
                difference.sqrt() / norm
            );
        }
    }
    let bytes = std::fs::read(case.folder.join("final.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let zero = case.reference["zero_gradient"]
        .as_object()
        .expect("zero_gradient");
    for (hf, mut ours) in stored(&case, single.states()) {
        let mut theirs = tensor(&file, &hf);
        // Where the gradient is zero in exact arithmetic, AdamW turns rounding into updates.
        if let Some(range) = zero.get(&hf) {
            let ends: Vec<usize> = range
                .as_array()
                .unwrap()
                .iter()
                .map(|n| n.as_u64().unwrap() as usize)
                .collect();
            // From the last on, so that those before stay where they are.
            for part in ends.rchunks(2) {
                ours.drain(part[0]..part[1]);
                theirs.drain(part[0]..part[1]);
            }
        }
        let (d, norm) = distance(&ours, &theirs);
        assert!(
            d.sqrt() <= 1e-4 * norm.sqrt(),
            "{name}: `{hf}` differs by {} after 20 steps",
            (d / norm).sqrt()
        );
    }
}

/// The tensors of a file by name. Several parameters may have rows of one, each with zeros in the
/// others'.
fn stored<'a>(
    case: &Case,
    values: impl IntoIterator<Item = (&'a String, &'a Vec<f32>)>,
) -> BTreeMap<String, Vec<f32>> {
    let mut all: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    for (path, values) in values {
        // Moments are of no file.
        for (name, _, part) in import::to_hf(&case.config, path, values).unwrap_or_default() {
            let sum = all.entry(name).or_insert_with(|| vec![0.0; part.len()]);
            sum.iter_mut().zip(part).for_each(|(s, x)| *s += x);
        }
    }
    all
}

#[test]
fn gpt2_tied() {
    check(CASES[0]);
}
#[test]
fn gpt2_untied_with_erf() {
    check(CASES[1]);
}
#[test]
fn llama_tied_with_grouped_heads() {
    check(CASES[2]);
}
#[test]
fn llama_untied_with_llama3_rope() {
    check(CASES[3]);
}
#[test]
fn llama_with_linear_rope() {
    check(CASES[4]);
}
#[test]
fn mixtral_with_experts_in_all_layers() {
    check(CASES[5]);
}
#[test]
fn qwen3_with_experts_in_some_layers() {
    check(CASES[6]);
}
#[test]
fn mistral_within_its_window() {
    check(CASES[7]);
}
#[test]
fn qwen2_with_biases_of_queries_keys_and_values() {
    check(CASES[8]);
}
#[test]
fn qwen3_with_norms_of_queries_and_keys() {
    check(CASES[9]);
}
#[test]
fn qwen2_with_a_shared_expert() {
    check(CASES[10]);
}
#[test]
fn opt_with_learned_positions() {
    check(CASES[11]);
}
#[test]
fn gpt_neox_with_attention_and_mlp_beside_each_other() {
    check(CASES[12]);
}
#[test]
fn gpt_neox_with_one_after_the_other() {
    check(CASES[13]);
}
#[test]
fn nemotron_with_squared_relu() {
    check(CASES[14]);
}
#[test]
fn mamba2_with_groups_of_heads() {
    check(CASES[25]);
}
#[test]
fn nemotron_h_with_a_block_of_each_kind() {
    check(CASES[26]);
}
#[test]
fn nemotron_h_with_experts_in_a_latent_space() {
    check(CASES[27]);
}
#[test]
fn deepseek_v3_with_two_modules_for_further_tokens() {
    check(CASES[28]);
}
#[test]
fn nemotron_h_with_a_repeated_module_for_further_tokens() {
    check(CASES[29]);
}
#[test]
fn gemma_with_a_scaled_embedding() {
    check(CASES[15]);
}
#[test]
fn deepseek_v2_with_latent_attention() {
    check(CASES[16]);
}
#[test]
fn deepseek_v2_with_compressed_queries_groups_of_experts_and_yarn() {
    check(CASES[17]);
}
#[test]
fn deepseek_v3_with_sigmoid_routers_and_a_bias_of_the_choice() {
    check(CASES[18]);
}
#[test]
fn phi3_with_fused_matrices_and_a_window() {
    check(CASES[19]);
}
#[test]
fn gemma2_with_windows_and_bounds_of_scores_and_logits() {
    check(CASES[20]);
}
#[test]
fn gemma3_with_two_bases_of_the_rotation() {
    check(CASES[21]);
}
#[test]
fn mistral_beyond_its_window() {
    check(CASES[22]);
}
#[test]
fn bloom_with_scores_that_fall_with_the_distance() {
    check(CASES[23]);
}
#[test]
fn gpt_oss_with_sinks_windows_and_clamped_experts() {
    check(CASES[24]);
}
