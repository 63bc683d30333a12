//! How large collectives about parameters and their gradients grow by sharing a launch.
//!
//! One collective for each of a model's hundreds of parameters is mostly fixed time, as PyTorch
//! observed (Li et al. 2020, "PyTorch Distributed", section 3.2.3). All frameworks let tensors
//! travel together: DistributedDataParallel in buckets of 25 MiB (`bucket_cap_mb`),
//! Megatron-Core in buckets of at least a million elements for each rank of the group
//! (`ddp_bucket_size`). Larger ones would begin later and hold more memory.

use ir::Region;

/// Sizes of buckets, in bytes on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketSizes {
    /// In microbatches, where what a bucket does is to be hidden behind kernels: the larger of
    /// operands and results.
    pub microbatch: u64,
    /// In microbatches for each rank of the group, where that is more: so the pieces of a ring
    /// over many ranks are not mostly latency. A step of it takes microseconds, a mebibyte tens
    /// of them.
    pub microbatch_per_rank: u64,
    /// In the step phases, the larger of operands and results too: large enough that the fixed time
    /// does not matter on any link, small enough that the buffers need not all exist at once.
    pub step: u64,
    /// In the step phases for each rank of the group, where that is more: beside them nothing is to
    /// be hidden, so pieces may be larger than in microbatches.
    pub step_per_rank: u64,
}

impl Default for BucketSizes {
    fn default() -> Self {
        BucketSizes {
            microbatch: 25 << 20,
            microbatch_per_rank: 1 << 20,
            step: 256 << 20,
            step_per_rank: 4 << 20,
        }
    }
}

impl BucketSizes {
    /// Bytes at which a bucket of a group of `n_ranks` is full.
    pub fn full(&self, region: Region, n_ranks: u64) -> u64 {
        let (least, per_rank) = match region {
            Region::Microbatch => (self.microbatch, self.microbatch_per_rank),
            Region::StepBegin | Region::StepEnd => (self.step, self.step_per_rank),
        };
        least.max(n_ranks.saturating_mul(per_rank))
    }
}
