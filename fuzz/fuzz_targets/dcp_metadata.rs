//! libFuzzer on `tests::fuzz::dcp_metadata`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    tests::fuzz::dcp_metadata(data);
});
