//! `libnvrtc.so`: the emulator under the name of NVIDIA's runtime compiler.

pub use emulator::compiler::*;
