//! `libnccl.so`: the emulator under the name of NCCL.

pub use emulator::nccl::*;
