//! The models of the folder `models/`, built in under the names of their folders.

macro_rules! embedded {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_str!(concat!("../../models/", $name, "/config.json")))),*]
    };
}

/// Names and configurations, in the order of names.
const MODELS: [(&str, &str); 55] = embedded![
    "bloom-176b",
    "bloom-560m",
    "bloom-7b1",
    "deepseek-v2",
    "deepseek-v2-lite",
    "deepseek-v3",
    "gemma-2-27b",
    "gemma-2-2b",
    "gemma-2-9b",
    "gemma-2b",
    "gemma-3-1b",
    "gemma-3-27b",
    "gemma-7b",
    "gpt-neox-20b",
    "gpt-oss-120b",
    "gpt-oss-20b",
    "gpt2",
    "gpt2-large",
    "gpt2-medium",
    "gpt2-xl",
    "gpt3-175b",
    "gpt3-6.7b",
    "llama-2-7b",
    "llama-3.1-405b",
    "llama-3.1-70b",
    "llama-3.1-8b",
    "llama-3.2-1b",
    "mamba2-2.7b",
    "megatron-18b",
    "megatron-1t",
    "megatron-530b",
    "mistral-7b",
    "mixtral-8x22b",
    "mixtral-8x7b",
    "moe-1t",
    "nemotron-3-nano-30b-a3b",
    "nemotron-3-super-120b-a12b",
    "nemotron-3-ultra-550b-a55b",
    "nemotron-4-340b",
    "nemotron-h-8b",
    "opt-6.7b",
    "opt-66b",
    "phi-3-medium",
    "phi-3-mini",
    "pythia-6.9b",
    "qwen1.5-moe-a2.7b",
    "qwen2.5-7b",
    "qwen3-235b-a22b",
    "qwen3-30b-a3b",
    "qwen3-8b",
    "tiny-gpt2",
    "tiny-llama",
    "tiny-wide-resnet",
    "wide-resnet-13b",
    "wide-resnet-250m",
];

/// The models that are built in, sorted by name, each with the text of its `config.json`.
pub fn models() -> impl Iterator<Item = (&'static str, &'static str)> {
    MODELS.into_iter()
}

/// Their names.
pub fn names() -> impl Iterator<Item = &'static str> {
    MODELS.iter().map(|(name, _)| *name)
}

/// The model of a name, in letters of either case: its name, and the text of its `config.json`.
pub fn find(name: &str) -> Option<(&'static str, &'static str)> {
    models().find(|(own, _)| own.eq_ignore_ascii_case(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ModelConfig;
    use std::path::Path;

    /// All folders of models are there, as they are, and can be read.
    #[test]
    fn the_models_are_those_of_the_folder() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models");
        let entries = std::fs::read_dir(folder)
            .unwrap()
            .map(|e| e.unwrap().path());
        let mut folders: Vec<String> = entries
            .filter(|p| p.is_dir())
            .map(|p| p.file_name().unwrap().to_string_lossy().into_owned())
            .collect();
        folders.sort();
        assert_eq!(names().collect::<Vec<_>>(), folders);
        for name in names() {
            let (_, text) = find(name).unwrap();
            ModelConfig::parse(name, text.as_bytes()).unwrap();
        }
        assert_eq!(find("Llama-3.1-8B"), find("llama-3.1-8b"));
        assert_eq!(find("llama"), None);
    }
}
