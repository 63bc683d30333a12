//! Step times and memory that logs and profiler traces state: of Megatron-LM, torchtitan and
//! DeepSpeed, and of PyTorch's profiler (Kineto).

use crate::arguments::Argument;
use crate::megatron::logged;
use serde::Serialize;
use serde_json::Value;

/// A measurement.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Measured {
    /// Seconds of a step: the median of those that count.
    pub step_s: Option<f64>,
    /// Tokens that a device trains on in a second, where that is stated in place of the step.
    pub tokens_per_s: Option<f64>,
    /// Samples that all devices train on in a second, where that is stated in place of the step.
    pub samples_per_s: Option<f64>,
    /// Samples of a step, where they are stated.
    pub global_batch: Option<u64>,
    /// Steps that count.
    pub steps: u64,
    /// The most bytes that a rank held, as the allocator counts them.
    pub peak_bytes: Option<u64>,
    /// Whether these are bytes that the allocator reserves, not those that it gives out.
    pub is_reserved: bool,
    /// Where this is from, in words.
    pub from: String,
}

/// Marks of the block of arguments in a log of Megatron-LM.
const ARGUMENTS: &str = "end of arguments";

/// Whether a text is a log of Megatron-LM, with its arguments.
pub(crate) fn is_megatron_log(text: &str) -> bool {
    let mut lines = text.lines();
    lines.any(|l| {
        l.contains(ARGUMENTS) || argument(l).is_some_and(|(n, _)| n == "tensor_model_parallel_size")
    })
}

/// The arguments that a log of Megatron-LM begins with, by their names with dashes.
pub(crate) fn megatron_arguments(text: &str) -> Vec<(String, Argument)> {
    let mut all = Vec::new();
    for (i, line) in text.lines().enumerate() {
        if line.contains(ARGUMENTS) && !all.is_empty() {
            break;
        }
        if let Some((name, value)) = argument(line) {
            all.push(logged(name, value, i + 1));
        }
    }
    all
}

/// `  num_layers ...................................... 32`, behind whatever a launcher puts first.
fn argument(line: &str) -> Option<(&str, &str)> {
    let at = line.find(" ...")?;
    let name = line[..at].trim_end().rsplit([' ', '\t', ':', ']']).next()?;
    let value = line[at + 1..].trim_start_matches('.').trim();
    let is_name = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    (is_name && !value.is_empty()).then_some((name, value))
}

/// The figures that a log states of its steps; none where it states nothing.
///
/// The first step, in which kernels are compiled and memory is found, does not count where there are
/// others; nor do steps of another batch than the last one's.
pub fn of_log(text: &str) -> Option<Measured> {
    let mut found = Found::default();
    for line in text.lines() {
        found.megatron(line);
        found.torchtitan(line);
        found.deepspeed(line);
    }
    found.measured()
}

/// The best that was found so far.
#[derive(Default)]
struct Found {
    /// Seconds and batches of iterations of Megatron-LM.
    steps: Vec<(f64, Option<u64>)>,
    /// Tokens a second and device, of torchtitan.
    tokens: Vec<f64>,
    /// Samples a second, of DeepSpeed.
    samples: Vec<f64>,
    peak_bytes: Option<u64>,
    is_reserved: bool,
}

impl Found {
    fn megatron(&mut self, line: &str) {
        if let Some(ms) = after(line, "elapsed time per iteration (ms):") {
            let batch = after(line, "global batch size:").map(|n| n as u64);
            if ms > 0.0 {
                self.steps.push((ms / 1e3, batch));
            }
        }
        if line.contains("memory (MB)") {
            let peak = after(line, "max allocated:");
            self.peak(peak.map(|mb| mb * 1024.0 * 1024.0));
        }
    }

    fn torchtitan(&mut self, line: &str) {
        if !line.contains("step:") {
            return;
        }
        if let Some(tokens) = after(line, "tps:").filter(|t| *t > 0.0) {
            self.tokens.push(tokens);
            let peak = after(line, "memory:");
            self.is_reserved = true;
            self.peak(peak.map(|gib| gib * 1024.0 * 1024.0 * 1024.0));
        }
    }

    fn deepspeed(&mut self, line: &str) {
        if let Some(samples) = after(line, "CurrSamplesPerSec=").filter(|s| *s > 0.0) {
            self.samples.push(samples);
            let peak = after(line, "MaxMemAllocated=");
            self.peak(peak.map(|gb| gb * 1024.0 * 1024.0 * 1024.0));
        }
    }

    fn peak(&mut self, bytes: Option<f64>) {
        let bytes = bytes.filter(|b| *b > 0.0 && *b < 1e15).map(|b| b as u64);
        self.peak_bytes = self.peak_bytes.max(bytes);
    }

    fn measured(self) -> Option<Measured> {
        let base = Measured {
            peak_bytes: self.peak_bytes,
            is_reserved: self.is_reserved,
            ..Measured::default()
        };
        if let Some((_, batch)) = self.steps.last() {
            let own = self.steps.iter().filter(|(_, b)| b == batch);
            let seconds: Vec<f64> = own.map(|(s, _)| *s).collect();
            let (step_s, steps) = typical(seconds)?;
            return Some(Measured {
                step_s: Some(step_s),
                global_batch: *batch,
                steps,
                from: format!(
                    "the median of {} in the log",
                    ir::counted(steps, "iteration")
                ),
                ..base
            });
        }
        if !self.tokens.is_empty() {
            let (tokens, steps) = typical(self.tokens)?;
            return Some(Measured {
                tokens_per_s: Some(tokens),
                steps,
                from: format!(
                    "the median tokens per second of {} in the log",
                    ir::counted(steps, "line")
                ),
                ..base
            });
        }
        let (samples, steps) = typical(self.samples)?;
        Some(Measured {
            samples_per_s: Some(samples),
            steps,
            from: format!(
                "the median samples per second of {} in the log",
                ir::counted(steps, "line")
            ),
            ..base
        })
    }
}

impl Measured {
    /// Seconds of a step of so many samples of so many tokens on so many devices.
    pub fn seconds(&self, samples: u64, tokens: u64, devices: u64) -> Option<f64> {
        let of_tokens = |rate: f64| samples as f64 * tokens as f64 / (rate * devices as f64);
        let of_samples = |rate: f64| samples as f64 / rate;
        self.step_s
            .or(self.tokens_per_s.map(of_tokens))
            .or(self.samples_per_s.map(of_samples))
    }
}

/// The number behind a mark; thousands may have commas.
fn after(line: &str, mark: &str) -> Option<f64> {
    let rest = line[line.find(mark)? + mark.len()..].trim_start();
    let is_number = |c: char| c.is_ascii_digit() || matches!(c, '.' | ',' | 'E' | 'e' | '+' | '-');
    let text: String = rest
        .chars()
        .take_while(|c| is_number(*c))
        .filter(|c| *c != ',')
        .collect();
    let text = text.trim_end_matches(['E', 'e', '+', '-']);
    text.parse::<f64>().ok().filter(|x| x.is_finite())
}

/// The median without the first, and how many count.
fn typical(mut all: Vec<f64>) -> Option<(f64, u64)> {
    if all.len() > 1 {
        all.remove(0);
    }
    all.sort_by(f64::total_cmp);
    let middle = *all.get(all.len() / 2)?;
    let other = *all.get((all.len() - 1) / 2)?;
    Some(((middle + other) / 2.0, all.len() as u64))
}

/// The name under which PyTorch's profiler marks a step.
const STEP: &str = "ProfilerStep#";

/// The step of a trace of PyTorch's profiler.
///
/// A step is the time from the beginning of one `ProfilerStep#N` to that of the next; where there is
/// one alone, its length. The error says what is missing.
pub fn of_trace(text: &str) -> Result<Measured, String> {
    let root: Value = serde_json::from_str(text)
        .map_err(|e| format!("it is no JSON (line {}, column {})", e.line(), e.column()))?;
    let events = root.get("traceEvents").unwrap_or(&root);
    let events = events
        .as_array()
        .ok_or("it has no `traceEvents`, so it is no trace of PyTorch's profiler")?;
    // The host's marks: those of the device have the category `gpu_user_annotation`.
    let is_step = |e: &&Value| {
        let name = e.get("name").and_then(Value::as_str).unwrap_or_default();
        let category = e.get("cat").and_then(Value::as_str).unwrap_or_default();
        name.starts_with(STEP) && !category.starts_with("gpu")
    };
    let mut steps: Vec<(f64, f64)> = Vec::new();
    for event in events.iter().filter(is_step) {
        let of = |key: &str| {
            event
                .get(key)
                .and_then(Value::as_f64)
                .filter(|x| x.is_finite())
        };
        if let (Some(start), Some(length)) = (of("ts"), of("dur")) {
            steps.push((start, length));
        }
    }
    steps.sort_by(|a, b| a.0.total_cmp(&b.0));
    let Some(first) = steps.first().copied() else {
        return Err(format!(
            "it marks no step (`{STEP}N`): profile with a schedule, and call profiler.step() after every optimizer step"
        ));
    };
    let between: Vec<f64> = steps.windows(2).map(|w| w[1].0 - w[0].0).collect();
    let seconds = |us: f64| us / 1e6;
    let (us, n) = match between.is_empty() {
        true => (first.1, 1),
        false => {
            let mut all = between;
            all.sort_by(f64::total_cmp);
            (all[all.len() / 2], all.len() as u64)
        }
    };
    if us <= 0.0 {
        return Err("its steps have no length".into());
    }
    Ok(Measured {
        step_s: Some(seconds(us)),
        steps: n,
        from: format!(
            "{} of the profiler's trace; the profiler itself makes steps longer",
            ir::counted(n, "marked step")
        ),
        ..Measured::default()
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test may stop at what it does not expect.

    use super::*;

    #[test]
    fn iterations_of_megatron_are_read() {
        let line = |i: u32, ms: f64, batch: u32| {
            format!(
                " [2025-05-01 10:00:00] iteration {i:8}/ 1000 | consumed samples: 512 | elapsed time per iteration (ms): {ms} | throughput per GPU (TFLOP/s/GPU): 401.2 | learning rate: 1.0E-05 | global batch size: {batch:5} | lm loss: 1.1E+01 |\n"
            )
        };
        let text = line(1, 90_000.0, 512)
            + &line(2, 7_000.0, 512)
            + &line(3, 7_200.0, 512)
            + &line(4, 7_400.0, 512)
            + "0: [Rank 0] (after 2 iterations) memory (MB) | allocated: 100.5 | max allocated: 2048.0 | reserved: 1 | max reserved: 2\n";
        let m = of_log(&text).unwrap();
        assert_eq!(
            (m.step_s, m.steps, m.global_batch),
            (Some(7.2), 3, Some(512))
        );
        assert_eq!(m.peak_bytes, Some(2 << 30));
        let ramped = line(1, 1_000.0, 64) + &line(2, 9_000.0, 512);
        assert_eq!(of_log(&ramped).unwrap().step_s, Some(9.0));
        assert_eq!(of_log("nothing here"), None);
    }

    #[test]
    fn steps_of_torchtitan_are_tokens_per_second() {
        let text = "[titan] step:  1  loss:  12.0  memory: 40.10GiB(50.7%)  tps: 900  mfu: 5%\n[titan] step: 10  loss:  8.0  memory: 44.00GiB(55.7%)  tps: 5,762  tflops: 330  mfu: 33%\n";
        let m = of_log(text).unwrap();
        assert_eq!((m.tokens_per_s, m.steps), (Some(5762.0), 1));
        assert_eq!(m.peak_bytes, Some(44 << 30));
    }

    #[test]
    fn arguments_of_a_log_stand_behind_dots() {
        let text = "0:   num_layers ...................................... 32\n  swiglu .......... True\n  add_bias_linear .... False\n-- end of arguments --\n  late ..... 1\n";
        let found = megatron_arguments(text);
        let names: Vec<&str> = found.iter().map(|(n, _)| n.as_str()).collect();
        assert_eq!(names, ["num-layers", "swiglu", "disable-bias-linear"]);
        assert_eq!(found[2].1.values, ["True"]);
        assert!(is_megatron_log(text));
    }

    #[test]
    fn a_trace_without_steps_says_what_is_missing() {
        let event = |n: u32, ts: f64| {
            format!(
                "{{\"ph\":\"X\",\"cat\":\"user_annotation\",\"name\":\"ProfilerStep#{n}\",\"ts\":{ts},\"dur\":900000}}"
            )
        };
        let text = format!(
            "{{\"traceEvents\":[{},{},{}]}}",
            event(3, 5.0),
            event(4, 1_000_005.0),
            event(5, 2_100_005.0)
        );
        let m = of_trace(&text).unwrap();
        assert_eq!((m.step_s, m.steps), (Some(1.1), 2));
        let one = format!("[{}]", event(3, 5.0));
        assert_eq!(of_trace(&one).unwrap().step_s, Some(0.9));
        for (text, said) in [
            ("{}", "no `traceEvents`"),
            ("[]", "marks no step"),
            ("[", "no JSON"),
        ] {
            assert!(of_trace(text).unwrap_err().contains(said), "{text}");
        }
    }
}
