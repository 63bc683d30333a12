//! libFuzzer on `tests::fuzz::train_spec`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    tests::fuzz::train_spec(data);
});
