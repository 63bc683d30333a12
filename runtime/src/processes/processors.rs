//! The processors that processes of this host may use: a launcher may bind each to some of its own.

use std::collections::BTreeSet;
use std::fs::read_to_string;

/// The numbers of the processors that a process may use; none where the system does not say.
fn of(pid: u32) -> Option<BTreeSet<u32>> {
    let status = read_to_string(format!("/proc/{pid}/status")).ok()?;
    let mut lines = status.lines();
    listed(lines.find_map(|l| l.strip_prefix("Cpus_allowed_list:"))?)
}

/// The number of processors that these processes and this one may use together. A process that has
/// a quota of time counts its own alone.
pub(super) fn of_all(pids: impl Iterator<Item = u32>) -> usize {
    let own = std::thread::available_parallelism().map_or(1, |n| n.get());
    match of(std::process::id()) {
        Some(mut all) if all.len() == own => {
            all.extend(pids.filter_map(of).flatten());
            all.len()
        }
        _ => own,
    }
}

/// Reads a list of numbers and ranges of numbers, as in `0-3,8`; none where it is no such list.
fn listed(text: &str) -> Option<BTreeSet<u32>> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    let ranges: Option<Vec<_>> = text.trim().split(',').map(range).collect();
    Some(ranges?.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_counted_by_their_numbers() {
        let of = |text| listed(text).map(|all| all.into_iter().collect::<Vec<_>>());
        assert_eq!(of("\t0-2,8\n"), Some(vec![0, 1, 2, 8]));
        assert_eq!(of("5"), Some(vec![5]));
        assert_eq!((of(""), of("0-"), of("x")), (None, None, None));
    }
}
