//! The memory of a framework's process on a device beside the program's tensors, and what the
//! figures that it published count. The figures stand in `data/memory.toml`, each with its
//! source; those without one are fitted, few, and bounded.

use crate::row::Row;
use frameworks::{InFlight, MemoryUse, ProcessMemory, Reuse};
use ir::Bytes;
use serde::Deserialize;
use std::collections::BTreeMap;

/// The data file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryFacts {
    /// Contexts by the beginning of the `gpu` cell, the first that fits.
    context: Vec<Context>,
    /// Allocators by name.
    allocator: BTreeMap<String, Allocator>,
    /// Figures that no source states.
    fitted: Fitted,
    /// Processes of generations, the first that fits.
    process: Vec<Process>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Context {
    gpu: String,
    bytes: Figure,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Allocator {
    reuse: Reuse,
    slack: Figure,
    source: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fitted {
    communicator_bytes: Figure,
}

/// A figure that is fitted or assumed.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Figure {
    value: f64,
    unit: String,
    min: f64,
    max: f64,
    source: String,
}

impl Figure {
    fn is_sound(&self) -> bool {
        (self.min..=self.max).contains(&self.value)
            && !self.source.is_empty()
            && !self.unit.is_empty()
    }
}

/// The memory that a published figure counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Reported {
    /// All that the driver has given out, as `nvidia-smi` shows it.
    Device,
    /// The memory that the allocator has got from the driver.
    Reserved,
    /// The memory that tensors occupy.
    Allocated,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Process {
    generation: String,
    #[serde(default)]
    precision: Option<String>,
    #[serde(default)]
    from: Option<String>,
    allocator: String,
    gradient_bytes: f64,
    #[serde(default)]
    pass_gradient_bytes: f64,
    sharded_copies: bool,
    largest_gradient_bytes: f64,
    update_bytes: f64,
    bucket_bytes: u64,
    logit_bytes: f64,
    score_bytes: f64,
    mask_bytes: f64,
    in_flight: InFlight,
    #[serde(default)]
    keeps_transfers: bool,
    reports: Reported,
    unit_bytes: f64,
    source: String,
}

impl Process {
    fn is_of(&self, generation: &str, precision: Option<&str>, date: Option<&str>) -> bool {
        let begins = |prefix: &String| precision.is_some_and(|p| p.starts_with(prefix));
        let since = |from: &String| date.is_some_and(|d| d >= from.as_str());
        self.generation == generation
            && self.precision.as_ref().is_none_or(begins)
            && self.from.as_ref().is_none_or(since)
    }
}

impl MemoryFacts {
    /// The file that comes with Meshwright.
    pub fn built_in() -> MemoryFacts {
        Self::parse(include_str!("../data/memory.toml"))
            .expect("the built-in data files are tested")
    }

    /// Reads the file; the error is the parser's, or names the figure that is out of its bounds
    /// or what is referred to and missing.
    pub fn parse(text: &str) -> Result<MemoryFacts, String> {
        let facts: MemoryFacts = toml::from_str(text).map_err(|e| e.to_string())?;
        let slacks = facts
            .allocator
            .iter()
            .map(|(name, a)| (name.as_str(), &a.slack));
        let contexts = facts.context.iter().map(|c| (c.gpu.as_str(), &c.bytes));
        let figures = slacks
            .chain(contexts)
            .chain([("communicator_bytes", &facts.fitted.communicator_bytes)]);
        for (name, figure) in figures {
            if !figure.is_sound() {
                return Err(format!(
                    "`{name}` is {}, expected {} to {} with a unit and a source",
                    figure.value, figure.min, figure.max
                ));
            }
        }
        if let Some((name, _)) = facts.allocator.iter().find(|(_, a)| a.source.is_empty()) {
            return Err(format!("`{name}`: no source"));
        }
        for process in &facts.process {
            if process.source.is_empty() {
                return Err(format!("`{}`: no source", process.generation));
            }
            if !facts.allocator.contains_key(&process.allocator) {
                return Err(format!(
                    "`{}`: no allocator `{}`",
                    process.generation, process.allocator
                ));
            }
        }
        Ok(facts)
    }

    /// Figures that no source states: those of the file whose bounds are wide.
    pub fn figures(&self) -> Vec<crate::figures::Figure> {
        let slacks = self.allocator.iter().map(|(name, a)| {
            let name = format!("slack of the allocator {name}");
            (name, vec!["activations".into()], &a.slack)
        });
        let contexts = self.context.iter().map(|c| {
            let of = vec![c.gpu.clone()];
            (format!("context on {}", c.gpu), of, &c.bytes)
        });
        let communicators = &self.fitted.communicator_bytes;
        let own = (
            "communicators".to_string(),
            vec!["NCCL".into()],
            communicators,
        );
        slacks
            .chain(contexts)
            .chain([own])
            // A context that was measured is known to a tenth; nothing needs no figure.
            .filter(|(_, _, f)| f.max > 1.2 * f.min && f.value > 0.0)
            .map(|(name, of, f)| crate::figures::Figure {
                name,
                of,
                unit: f.unit.clone(),
                values: vec![f.value],
                bounds: Some((f.min, f.max)),
                found: crate::figures::Found::Memory,
                support: f.source.clone(),
            })
            .collect()
    }

    /// The memory of a generation's process on a device, by the name of its `gpu` cells, with
    /// activations of a type and software of a date; `None` where the generation's is not stated.
    pub fn process_of(
        &self,
        generation: &str,
        activations: &str,
        date: Option<&str>,
        gpu: Option<&str>,
    ) -> Option<ProcessMemory> {
        let mut known = self.process.iter();
        let process = known.find(|p| p.is_of(generation, Some(activations), date))?;
        let mut contexts = self.context.iter();
        let context = contexts.find(|c| gpu.is_some_and(|gpu| gpu.starts_with(&c.gpu)));
        let allocator = &self.allocator[&process.allocator];
        Some(ProcessMemory {
            context_bytes: Bytes(context.map_or(0, |c| c.bytes.value as u64)),
            communicator_bytes: Bytes(self.fitted.communicator_bytes.value as u64),
            gradient_bytes: process.gradient_bytes,
            pass_gradient_bytes: process.pass_gradient_bytes,
            sharded_copies: process.sharded_copies,
            largest_gradient_bytes: process.largest_gradient_bytes,
            update_bytes: process.update_bytes,
            bucket_bytes: Bytes(process.bucket_bytes),
            logit_bytes: process.logit_bytes,
            score_bytes: process.score_bytes,
            mask_bytes: process.mask_bytes,
            in_flight: process.in_flight,
            keeps_transfers: process.keeps_transfers,
            reuse: allocator.reuse,
            slack: allocator.slack.value,
        })
    }

    /// A prediction in the unit, and with the parts, that the row's framework reports.
    pub fn reported(&self, generation: &str, row: &Row, memory: &MemoryUse) -> f64 {
        let all = memory.total().0;
        match self.of(generation, row) {
            None => all as f64 / 1e9,
            Some(process) => {
                let aside = match process.reports {
                    Reported::Device => 0,
                    Reported::Reserved => memory.context.0,
                    Reported::Allocated => memory.context.0 + memory.slack.0,
                };
                (all - aside) as f64 / process.unit_bytes
            }
        }
    }

    fn of(&self, generation: &str, row: &Row) -> Option<&Process> {
        let (precision, date) = (row.text("precision"), row.text("date"));
        (self.process.iter()).find(|p| p.is_of(generation, precision, date))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(cells: &str) -> Row {
        let header = "gpu,date,precision";
        let table = crate::csv::parse(&format!("{header}\n{cells}\n")).unwrap();
        crate::row::rows(&table).remove(0)
    }

    #[test]
    fn the_built_in_file_is_whole() {
        let facts = MemoryFacts::built_in();
        let generations = crate::Facts::built_in();
        for process in &facts.process {
            assert!(
                generations.has_generation(&process.generation),
                "{}",
                process.generation
            );
            let memory =
                facts.process_of(&process.generation, "bf16", Some("2026-01"), Some("A100"));
            let memory = memory.unwrap();
            let of_elements = [
                memory.gradient_bytes,
                memory.pass_gradient_bytes,
                memory.largest_gradient_bytes,
                memory.update_bytes,
            ];
            assert!(of_elements.iter().all(|b| (0.0..=16.0).contains(b)));
            assert!((0.0..=64.0).contains(&memory.logit_bytes));
            assert!((0.0..=64.0).contains(&memory.score_bytes));
            assert!((0.0..=1.0).contains(&memory.slack) && memory.mask_bytes <= 4.0);
        }
    }

    #[test]
    fn precision_and_date_choose_the_process() {
        let facts = MemoryFacts::built_in();
        let process = |generation: &str, activations: &str, date: &str| {
            let found = facts.process_of(generation, activations, Some(date), Some("A100"));
            found.unwrap()
        };
        let f16 = process("megatron-deepspeed-2022", "f16", "2022-02");
        let bf16 = process("megatron-deepspeed-2022", "bf16", "2022-02");
        assert_eq!((f16.gradient_bytes, f16.pass_gradient_bytes), (2.0, 0.0));
        assert_eq!((bf16.gradient_bytes, bf16.pass_gradient_bytes), (4.0, 2.0));
        let old = process("fsdp2-2024", "bf16", "2024-12");
        let new = process("fsdp2-2024", "bf16", "2025-06");
        assert!(old.logit_bytes > new.logit_bytes);
        assert_eq!(facts.process_of("unheard-of", "bf16", None, None), None);
    }

    #[test]
    fn what_is_reported_is_what_the_framework_counts() {
        let facts = MemoryFacts::built_in();
        let memory = MemoryUse {
            activations: Bytes(7_000_000_000),
            context: Bytes(2_000_000_000),
            ..MemoryUse::default()
        };
        let of = |generation: &str| facts.reported(generation, &row("A100,2022,fp16"), &memory);
        // nvidia-smi in GB of 1000 MiB, PyTorch's reserve in GB, and where nothing is known.
        assert!((of("megatron-deepspeed-2022") - 9e9 / 1_048_576_000.0).abs() < 1e-9);
        assert!((of("fsdp2-2024") - 7.0).abs() < 1e-9);
        assert!((of("unheard-of") - 9.0).abs() < 1e-9);
    }

    #[test]
    fn figures_outside_of_their_bounds_are_refused() {
        let text = include_str!("../data/memory.toml");
        let wrong = text.replace("value = 2.5e8", "value = 2.5e10");
        let error = MemoryFacts::parse(&wrong).unwrap_err();
        assert!(
            error.starts_with("`communicator_bytes` is 25000000000"),
            "{error}"
        );
        let wrong = text.replacen("allocator = \"static\"", "allocator = \"none\"", 1);
        let error = MemoryFacts::parse(&wrong).unwrap_err();
        assert_eq!(error, "`oneflow-2021`: no allocator `none`");
    }
}
