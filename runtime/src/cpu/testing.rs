//! Helpers of the kernels' tests: random numbers, tolerances and the reference values.

use std::path::Path;

use serde_json::Value;

/// `n` numbers in [-1, 1), a function of `seed` (SplitMix64).
pub(crate) fn random(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678_9abc_def0;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let scale = 1.0 / (1u64 << 23) as f32;
    (0..n)
        .map(|_| (next() >> 40) as f32 * scale - 1.0)
        .collect()
}

/// The numbers as bit patterns, to compare exactly.
pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Asserts that `actual` is within `tolerance * max(1, |expected|)` everywhere.
#[track_caller]
pub(crate) fn assert_close(actual: &[f32], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}: number of elements");
    for (i, (&a, &e)) in actual.iter().zip(expected).enumerate() {
        let off = (f64::from(a) - e).abs();
        let fits = off <= tolerance * e.abs().max(1.0);
        assert!(fits, "{what}: element {i} is {a}, expected {e}");
    }
}

/// The entries of `tests/reference/ops.json` for `op`; never none.
pub(crate) fn reference(op: &str) -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/reference/ops.json");
    let text = std::fs::read_to_string(path).unwrap();
    let all: Value = serde_json::from_str(&text).unwrap();
    let entries = all["entries"].as_array().unwrap();
    let found: Vec<Value> = entries.iter().filter(|e| e["op"] == op).cloned().collect();
    assert!(!found.is_empty(), "no reference values for {op}");
    found
}

/// A reference tensor `{shape, data}`.
pub(crate) fn tensor(value: &Value) -> (Vec<usize>, Vec<f64>) {
    let list = |key: &str| value[key].as_array().unwrap().clone();
    let shape = list("shape")
        .iter()
        .map(|v| v.as_u64().unwrap() as usize)
        .collect();
    let data = list("data").iter().map(|v| v.as_f64().unwrap()).collect();
    (shape, data)
}

/// A reference tensor's elements rounded to `f32`.
pub(crate) fn elements(value: &Value) -> Vec<f32> {
    tensor(value).1.into_iter().map(|v| v as f32).collect()
}
