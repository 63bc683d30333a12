//! libFuzzer on `tests::fuzz::job`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    tests::fuzz::job(data);
});
