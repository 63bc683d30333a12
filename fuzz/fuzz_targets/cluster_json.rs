//! libFuzzer on `tests::fuzz::cluster_json`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    tests::fuzz::cluster_json(data);
});
