//! `libcublasLt.so`: the emulator under the name of cuBLASLt.

#![allow(non_snake_case)] // the name that programs look for

pub use emulator::products::*;
