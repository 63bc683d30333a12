//! libFuzzer on `tests::fuzz::iopddl`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    tests::fuzz::iopddl(data);
});
