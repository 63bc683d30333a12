//! libFuzzer on `tests::fuzz::spoken`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    tests::fuzz::spoken(data);
});
