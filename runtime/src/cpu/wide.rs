//! Loops for the widest vectors that the processor has.
//!
//! The binary is built for every x86-64 processor, whose common vectors hold two `f64`. A loop
//! under [`widest`] is compiled for AVX2 and AVX-512 too, and the processor chooses. The bits of
//! results stay the same: no compiler may fuse or reorder operations of floating point by itself.

/// Runs a function compiled for the widest vectors that the processor has. What it calls is so only
/// where it is inlined, so the function and the loops below it are marked `#[inline(always)]`.
#[inline(always)]
pub fn widest<R>(f: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(f)
}
