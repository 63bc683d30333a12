//! Quantities of other software that are fitted to measured steps (`data/parameters.toml`), and how
//! many there may be. Nothing finer exists: there is no way to state a figure for a source, a
//! model or a row.

/// A generation's bytes that elementwise operations move, over one kernel for each.
pub const ELEMENTWISE_TRAFFIC: &str = "elementwise_traffic";
/// A generation's seconds that the host needs to issue a kernel.
pub const HOST_PER_KERNEL: &str = "host_per_kernel";
/// A generation's rate of the matmuls of several experts over one matmul's.
pub const GROUPED_SHARE: &str = "grouped_share";
/// A fused attention kernel's rate over the device's best.
pub const ATTENTION_RATE: &str = "attention_rate";
/// An unfused attention kernel's passes over the scores, over those that its file states.
pub const ATTENTION_PASSES: &str = "attention_passes";
/// The rate of a device's 8-bit matmuls (`gpu` in `devices.toml`) with a scale for each 32
/// elements over the rate with one for all.
pub const BLOCK_SCALED_SHARE: &str = "block_scaled_share";

/// All of them.
pub const ALL: [&str; 6] = [
    ELEMENTWISE_TRAFFIC,
    HOST_PER_KERNEL,
    GROUPED_SHARE,
    ATTENTION_RATE,
    ATTENTION_PASSES,
    BLOCK_SCALED_SHARE,
];

/// Most parameters that may be fitted, those of devices and links among them.
pub const MOST: usize = 40;
/// Most parameters of one generation.
pub const MOST_OF_A_GENERATION: usize = 2;
