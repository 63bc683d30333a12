//! Benchmarks of Meshwright.

pub mod comm;
pub mod facts;
pub mod held_out;
pub mod score;

/// Reads the peak resident memory of this process from the kernel's accounting.
pub fn peak_memory() -> Option<ir::Bytes> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|l| l.starts_with("VmHWM:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(ir::Bytes(kib * 1024))
}
