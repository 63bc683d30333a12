//! `libcuda.so`: the emulator under the name of the CUDA driver.

pub use emulator::driver::*;
