//! libFuzzer on `tests::fuzz::program`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    tests::fuzz::program(data);
});
