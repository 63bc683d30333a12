//! libFuzzer on `tests::fuzz::graph`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    tests::fuzz::graph(data);
});
