//! libFuzzer on `tests::fuzz::weights_index`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    tests::fuzz::weights_index(data);
});
