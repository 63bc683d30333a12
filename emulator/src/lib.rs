//! A GPU made of software, for tests and for trying the CUDA backend without one: shared libraries
//! with the names and the ABI of the CUDA driver, NVRTC, cuBLASLt and NCCL, as far as the runtime
//! calls them.
//!
//! ```text
//!   runtime ────────────> libnccl.so    collectives of ranks                [nccl]
//!      └────── cudarc ──> libcuda.so    memory, streams, events, launches   [driver], [queue]
//!                 ├─────> libcublasLt.so   products of matrices             [products]
//!                 └─────> libnvrtc.so   c++ -shared, with a header          [compiler]
//!                             └── blocks run one after the other; their threads are fibers [block]
//! ```
//!
//! It is an adversary rather than a simulator. What a real GPU may do it does:
//!
//! * memory stands behind addresses that the host cannot touch, fresh memory is full of NaN, freed
//!   memory is gone, and a kernel that leaves an operand is named and ends the context;
//! * nothing that is put on a stream is done before somebody waits for it, and then streams go on
//!   in an order drawn from a seed (`MESHWRIGHT_EMULATOR_SEED`) that keeps nothing but what events
//!   ask for: a missing wait is a wrong result;
//! * processes with a GPU each meet by NCCL as those of hosts do, and what a killed one left is gone;
//! * a warp runs as far ahead of the others of its block as barriers let it.
//!
//! A function that is not here is a missing symbol, which its caller reports by name. How long
//! anything takes says nothing about a GPU.

pub mod block;
pub mod compiler;
pub mod driver;
pub mod harness;
pub mod link;
pub mod memory;
pub mod nccl;
pub mod products;
pub mod queue;
