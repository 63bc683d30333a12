//! The figures of a cluster file, each with the numbers that it may be: one table, from which come
//! the checks and the words of their messages. The end of a key is its unit.

use super::{Cluster, Device, Level, MAX_FIGURE, Pool, Protocol};
use crate::storage::Storage;
use crate::{DType, Figure};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// The numbers that a figure may be, and their words in messages.
type Numbers = (RangeInclusive<f64>, &'static str);

/// The smallest figure that may not be zero.
const LEAST: f64 = 1.0 / MAX_FIGURE;
const POSITIVE: Numbers = (LEAST..=MAX_FIGURE, "a positive number up to 1e30");
const AMOUNT: Numbers = (0.0..=MAX_FIGURE, "0 to 1e30");
const SHARE: Numbers = (LEAST..=1.0, "more than 0, at most 1");
/// Kernels may hold twice the rate of matmuls.
const UP_TO_2: Numbers = (LEAST..=2.0, "more than 0, at most 2");
const LEFT_FREE: Numbers = (0.0..=1f64.next_down(), "a share from 0 to below 1");
const COUNT: Numbers = (1.0..=MAX_FIGURE, "at least 1");

/// A key, the numbers that it may be, and those that it is: none where it is absent, several with
/// the rest of their keys where it is a table.
type Row = (&'static str, Numbers, Vec<(String, f64)>);

fn row(key: &'static str, numbers: Numbers, x: impl Into<Option<f64>>) -> Row {
    let x = x.into().map(|x| (String::new(), x));
    (key, numbers, x.into_iter().collect())
}

fn rows<K>(
    key: &'static str,
    numbers: Numbers,
    of: &BTreeMap<K, f64>,
    name: fn(&K) -> &str,
) -> Row {
    let each = of.iter().map(|(k, x)| (format!(".{}", name(k)), *x));
    (key, numbers, each.collect())
}

fn device(d: &Device) -> Vec<Row> {
    let by_type = |t: &DType| t.name();
    let (name, none) = (String::as_str, BTreeMap::new());
    let factors = d.kernels.as_ref().map_or(&none, |k| &k.time_factor);
    let half = &d.matmul_half_size;
    vec![
        rows("kernels.time_factor", POSITIVE, factors, name),
        rows("peak_flops_per_s", POSITIVE, &d.peak_flops_per_s, by_type),
        rows("matmul_efficiency", SHARE, &d.matmul_efficiency, by_type),
        row("matmul_half_size.m", AMOUNT, half.m),
        row("matmul_half_size.n", AMOUNT, half.n),
        row("matmul_half_size.k", AMOUNT, half.k),
        row("attention_efficiency", UP_TO_2, d.attention_efficiency),
        row("memory_efficiency", SHARE, d.memory_efficiency),
        row("vector_flops_per_s", POSITIVE, d.vector_flops_per_s),
        row(
            "memory_bandwidth_bytes_per_s",
            POSITIVE,
            d.memory_bandwidth_bytes_per_s,
        ),
        row("launch_s", AMOUNT, d.launch_s),
        rows(
            "conversion_s_per_element",
            AMOUNT,
            &d.conversion_s_per_element,
            by_type,
        ),
        row("power_limit_w", POSITIVE, d.power_limit_w),
        row("boost_clock_hz", POSITIVE, d.boost_clock_hz),
        row("sustained_share", SHARE, d.sustained_share),
        row("unaligned_matmul_share", SHARE, d.unaligned_matmul_share),
        rows("sustained_share_of", SHARE, &d.sustained_share_of, by_type),
        row("memory_headroom", LEFT_FREE, d.memory_headroom),
    ]
}

fn level(l: &Level) -> Vec<Row> {
    let (switch, tree, shared) = (l.in_switch, l.tree_channel, l.shared_memory);
    let (two, more) = (
        "tree_channel.two_hosts_bytes_per_s",
        "tree_channel.more_hosts_bytes_per_s",
    );
    vec![
        row("latency_s", AMOUNT, l.latency_s),
        row("bandwidth_bytes_per_s", POSITIVE, l.bandwidth_bytes_per_s),
        row("efficiency", SHARE, l.efficiency),
        row("half_bytes", AMOUNT, l.half_bytes),
        row("devices_per_port", COUNT, f64::from(l.devices_per_port)),
        row(
            "pair_bandwidth_bytes_per_s",
            POSITIVE,
            l.pair_bandwidth_bytes_per_s,
        ),
        row("all_to_all_efficiency", SHARE, l.all_to_all_efficiency),
        row("message_efficiency", SHARE, l.message_efficiency),
        row("in_switch.latency_s", AMOUNT, switch.map(|s| s.latency_s)),
        row("in_switch.efficiency", SHARE, switch.map(|s| s.efficiency)),
        row(two, POSITIVE, tree.map(|t| t.two_hosts_bytes_per_s)),
        row(more, POSITIVE, tree.map(|t| t.more_hosts_bytes_per_s)),
        row(
            "shared_memory.meeting_s",
            AMOUNT,
            shared.map(|s| s.meeting_s),
        ),
        row(
            "shared_memory.copy_bytes_per_s",
            POSITIVE,
            shared.map(|s| s.copy_bytes_per_s),
        ),
        row(
            "shared_memory.reduce_bytes_per_s",
            POSITIVE,
            shared.map(|s| s.reduce_bytes_per_s),
        ),
    ]
}

fn protocol(p: &Protocol) -> Vec<Row> {
    vec![
        row("start_s", AMOUNT, p.start_s),
        row("ring_step_s", AMOUNT, p.ring_step_s),
        row("tree_step_s", AMOUNT, p.tree_step_s),
        row("ring_share", SHARE, p.ring_share),
        row("tree_share", SHARE, p.tree_share),
        row(
            "max_bandwidth_bytes_per_s",
            POSITIVE,
            p.max_bandwidth_bytes_per_s,
        ),
    ]
}

fn pool(p: &Pool) -> Vec<Row> {
    vec![row("compute_devices", POSITIVE, p.compute_devices)]
}

fn storage(s: &Storage) -> Vec<Row> {
    vec![
        row(
            "device_to_host_bytes_per_s",
            POSITIVE,
            s.device_to_host_bytes_per_s,
        ),
        row("host_write_bytes_per_s", POSITIVE, s.host_write_bytes_per_s),
        row(
            "total_write_bytes_per_s",
            POSITIVE,
            s.total_write_bytes_per_s,
        ),
    ]
}

/// Lists the figures of a cluster's own hosts that are out of their range.
pub(super) fn problems(c: &Cluster) -> Vec<String> {
    let mut all = vec![("device".to_string(), device(&c.device))];
    for (i, l) in c.levels.iter().enumerate() {
        all.push((format!("levels[{i}]"), level(l)));
        let protocols = l.protocols.iter().enumerate();
        all.extend(protocols.map(|(j, p)| (format!("levels[{i}].protocols[{j}]"), protocol(p))));
    }
    all.extend(c.pool.iter().map(|p| ("pool".into(), pool(p))));
    all.extend(c.storage.iter().map(|s| ("storage".into(), storage(s))));
    let degraded = c.degraded.iter().enumerate();
    let share = |x: f64| vec![row("share", SHARE, x)];
    all.extend(degraded.map(|(i, d)| (format!("degraded[{i}]"), share(d.share))));
    let mut problems = Vec::new();
    for (of, rows) in all {
        for (key, (range, words), held) in rows {
            let wrong = held.into_iter().filter(|(_, x)| !range.contains(x));
            problems.extend(
                wrong.map(|(rest, x)| {
                    format!("{of}.{key}{rest} is {}, expected {words}", Figure(x))
                }),
            );
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_say_the_range() {
        for (range, words) in [POSITIVE, AMOUNT, SHARE, UP_TO_2] {
            assert!(words.ends_with(&format!("{:e}", range.end()).replace("e0", "")));
            assert!(!range.contains(&f64::NAN) && !range.contains(&-1.0));
        }
        assert!(LEFT_FREE.0.contains(&0.999) && !LEFT_FREE.0.contains(&1.0));
    }

    #[test]
    fn keys_of_tables_and_absent_figures() {
        let rates = BTreeMap::from([(DType::F32, 0.0), (DType::Bf16, 1.0)]);
        let (_, _, held) = rows("peak", POSITIVE, &rates, |t| t.name());
        assert_eq!(held.len(), 2);
        assert!(held.contains(&(".f32".into(), 0.0)));
        assert_eq!(row("half_bytes", AMOUNT, None).2, []);
    }
}
