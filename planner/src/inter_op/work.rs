//! Work in place of time: what all devices of a pipeline do together, for devices that share
//! processors.

use super::StageTable;

/// Device-seconds that no pipeline over all devices of `table` takes less than for a microbatch:
/// the least sum over the stages of devices times forward and backward time. Sending and memory
/// are left out. `None` where no stages cover layers and devices.
pub fn least_work(table: &StageTable) -> Option<f64> {
    let (n_layers, n_devices) = (table.n_layers, table.n_devices);
    // By layers and devices that the stages so far take.
    let mut least = vec![vec![f64::INFINITY; n_devices + 1]; n_layers + 1];
    least[0][0] = 0.0;
    for start in 0..n_layers {
        let (before, after) = least.split_at_mut(start + 1);
        for (end, sums) in (start + 1..).zip(after) {
            for (submesh, &n) in table.submeshes.iter().enumerate() {
                let entries = table.get(start..end, submesh).iter();
                let work = n as f64 * entries.map(|e| e.time_s()).fold(f64::INFINITY, f64::min);
                if work < f64::INFINITY {
                    for used in n..=n_devices {
                        sums[used] = sums[used].min(before[start][used - n] + work);
                    }
                }
            }
        }
    }
    Some(least[n_layers][n_devices]).filter(|work| work.is_finite())
}
