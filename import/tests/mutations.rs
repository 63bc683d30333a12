//! Random mutations of good files never panic: they import, or they are errors.

#![allow(clippy::unwrap_used)]

use import::{BuildOptions, ModelConfig, Weights, model_graph};
use std::path::{Path, PathBuf};

/// xorshift64* (Vigna 2016).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() >> 33) as usize % n
    }
    /// Replaces, inserts, removes or copies a few bytes of `bytes[..end]`.
    fn mutate(&mut self, bytes: &mut Vec<u8>, end: usize) {
        const TOKENS: [&str; 14] = [
            "0",
            "9",
            "-",
            ".",
            "e",
            "null",
            "true",
            "[",
            "{",
            "\"",
            ",",
            ":",
            "18446744073709551615",
            "1e308",
        ];
        for _ in 0..=self.below(3) {
            let at = self.below(end.min(bytes.len()));
            match self.below(5) {
                0 => bytes[at] = self.next() as u8,
                1 => bytes[at] ^= 1 << self.below(8),
                2 => drop(bytes.splice(at..at, TOKENS[self.below(TOKENS.len())].bytes())),
                3 => drop(bytes.drain(at..(at + 1 + self.below(4)).min(bytes.len()))),
                _ => {
                    let copy = bytes[at..(at + self.below(20)).min(bytes.len())].to_vec();
                    let to = self.below(end.min(bytes.len()));
                    bytes.splice(to..to, copy);
                }
            }
            if bytes.is_empty() {
                return;
            }
        }
    }
}

fn reference(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/reference")
        .join(case)
}

#[test]
fn mutated_configs_never_panic() {
    let mut random = Random(0x6d65_7368);
    let (mut good, mut bad) = (0, 0);
    for file in [
        "gpt2_untied_gelu/config.json",
        "llama_untied_rope/config.json",
        "llama_linear_rope/config.v4.json",
        "qwen3_moe/config.json",
        "qwen2_moe/config.json",
        "mistral/config.json",
        "gemma/config.json",
        "opt/config.json",
        "gpt_neox/config.json",
        "nemotron/config.json",
        "bloom/config.json",
        "gpt_oss/config.json",
        "mamba2/config.json",
        "nemotron_h/config.json",
        "deepseek_v2_groups/config.json",
        "deepseek_v3/config.json",
        "phi3/config.json",
        "gemma2/config.json",
        "gemma3/config.json",
        "../../models/tiny-wide-resnet/config.json",
    ] {
        let original = std::fs::read(reference(file)).unwrap();
        for _ in 0..10_000 {
            let mut bytes = original.clone();
            random.mutate(&mut bytes, original.len());
            match ModelConfig::parse("config.json", &bytes) {
                Ok(config) => {
                    good += 1;
                    assert!(config.n_parameters() > 0);
                    // A valid config builds. Depth only costs time.
                    if config.n_layers() < 100 {
                        model_graph(
                            &config,
                            &BuildOptions {
                                sequence: config.max_sequence(),
                                dropout: 0.0,
                            },
                        )
                        .unwrap();
                    }
                }
                Err(e) => {
                    bad += 1;
                    assert!(e.to_string().starts_with("config.json:"), "{e}");
                }
            }
        }
    }
    assert!(good > 300 && bad > 1000, "{good} accepted, {bad} rejected");
}

#[test]
fn the_largest_valid_sizes_do_not_overflow() {
    let gpt2 = r#"{"model_type": "gpt2", "n_layer": 10000, "n_head": 65536, "n_embd": 1048576, "n_inner": 1048576,
        "n_positions": 134217728, "vocab_size": 16777216, "tie_word_embeddings": false}"#;
    let llama = r#"{"model_type": "llama", "num_hidden_layers": 10000, "num_attention_heads": 65536, "head_dim": 16,
        "hidden_size": 1048576, "intermediate_size": 1048576, "max_position_embeddings": 134217728,
        "vocab_size": 16777216, "attention_bias": true, "mlp_bias": true}"#;
    for text in [gpt2, llama] {
        let config = ModelConfig::parse("config.json", text.as_bytes()).unwrap();
        assert!(config.n_parameters() < 1 << 58);
        model_graph(
            &config,
            &BuildOptions {
                sequence: config.max_sequence(),
                dropout: 0.5,
            },
        )
        .unwrap();
    }
}

#[test]
fn mutated_weights_never_panic() {
    let config = ModelConfig::load(&reference("llama_linear_rope")).unwrap();
    let original = std::fs::read(reference("llama_linear_rope").join("model.safetensors")).unwrap();
    let header = 8 + u64::from_le_bytes(original[..8].try_into().unwrap()) as usize;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let mut random = Random(0x7772_6967);
    let (mut good, mut bad) = (0, 0);
    for round in 0..3000 {
        let mut bytes = original.clone();
        // Mostly the header, whose length field is then wrong unless set again; at times the
        // data, by whole bytes in place, so that files stay valid.
        if round % 10 == 0 {
            let at = header + random.below(bytes.len() - header);
            bytes[at] = random.next() as u8;
        } else {
            random.mutate(&mut bytes, header);
            if round % 2 == 0 && bytes.len() > 8 {
                let length = (header + bytes.len()).saturating_sub(original.len() + 8) as u64;
                bytes[..8].copy_from_slice(&length.to_le_bytes());
            }
        }
        std::fs::write(&path, &bytes).unwrap();
        match Weights::open(&path, &config) {
            Ok(weights) => {
                good += 1;
                for p in config.params() {
                    if let Ok(values) = weights.param(&p.path) {
                        assert_eq!(values.len() as u64, p.elements());
                        assert!(values.iter().all(|v| v.is_finite()));
                    }
                }
            }
            Err(e) => {
                bad += 1;
                assert!(e.to_string().contains("model.safetensors"), "{e}");
            }
        }
    }
    assert!(good > 100 && bad > 1000, "{good} accepted, {bad} rejected");
}

#[test]
fn mutated_indices_never_panic() {
    let folder = tempfile::tempdir().unwrap();
    let sharded = reference("llama_tied").join("sharded");
    for entry in std::fs::read_dir(&sharded).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    let config = ModelConfig::load(folder.path()).unwrap();
    let index = folder.path().join("model.safetensors.index.json");
    let original = std::fs::read(&index).unwrap();
    let mut random = Random(0x696e_6465);
    let mut bad = 0;
    for _ in 0..1000 {
        let mut bytes = original.clone();
        random.mutate(&mut bytes, original.len());
        std::fs::write(&index, &bytes).unwrap();
        bad += usize::from(Weights::open(folder.path(), &config).is_err());
    }
    assert!(bad > 500, "{bad} rejected");
}
