//! libFuzzer on `tests::fuzz::data_text`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    tests::fuzz::data_text(data);
});
