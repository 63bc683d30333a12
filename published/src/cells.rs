//! Devices by the words of `gpu` cells, beside the entry of the data files that they are found by,
//! and what is assumed of a row's machine. A word that contradicts the entry is never dropped: another entry is taken, the
//! row is refused, or what is modelled instead stands in `assumed`, as do words that nothing reads.
//!
//! Remarks in parentheses are read for contradictions, and not listed.

use crate::facts::{DeviceFact, Interconnect};
use crate::row::Row;
use crate::{Unmodelled, network};
use cost_model::presets::Catalogue;
use ir::cluster::{Cluster, Device};

/// Words of a `gpu` cell that change nothing: vendors, architectures, stacks of memory, boards.
const GPU_WORDS: [&str; 12] = [
    "NVIDIA",
    "TESLA",
    "GPU",
    "DGX",
    "HGX",
    "VOLTA",
    "AMPERE",
    "HOPPER",
    "BLACKWELL",
    "HBM2",
    "HBM3",
    "SXM",
];

/// The memory that a board's name states, over what it holds: 80 GB are 85.9 of 10^9 bytes, and
/// 40,960 MiB less than 43. Other boards of a chip differ by more.
const CALLED: std::ops::RangeInclusive<f64> = 0.9..=1.05;

/// Whether a `gpu` cell begins with a device's name, and not with a longer one.
pub fn begins_with(cell: &str, name: &str) -> bool {
    let rest = cell.strip_prefix(name);
    rest.is_some_and(|rest| !rest.starts_with(char::is_alphanumeric))
}

/// Names the words of a `gpu` cell that speak against a device.
pub fn against(cell: &str, name: &str, device: &Device) -> Option<String> {
    let is_pcie = name.contains("pcie");
    let words = words(cell);
    let has = |word: &str| words.iter().any(|w| w == word);
    if !is_pcie && words.iter().any(|w| w.starts_with("PCI")) {
        return Some(format!("PCIe, and {name} is no PCIe card"));
    }
    if is_pcie && words.iter().any(|w| w.starts_with("SXM")) {
        return Some(format!("SXM, and {name} is a PCIe card"));
    }
    if has("NVL") {
        return Some(format!("NVL, a card that {name} is not"));
    }
    if has("MIG") {
        return Some("MIG, and parts of a GPU are not modelled".into());
    }
    let holds = device.memory_bytes.0 as f64 / 1e9;
    let other = memories(&words).find(|gb| !CALLED.contains(&(gb / holds)));
    other.map(|gb| format!("{gb} GB, and {name} holds {holds:.1} of 10^9 bytes"))
}

/// The gigabytes that words name: `80GB`, `80 GB`.
fn memories(words: &[String]) -> impl Iterator<Item = f64> + '_ {
    let next = words.iter().skip(1).map(Some).chain([None]);
    words.iter().zip(next).filter_map(|(word, next)| {
        let unit = |w: &str| ["GB", "GIB", "G"].contains(&w);
        let number = word.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let is_stated = match &word[number.len()..] {
            "" => next.is_some_and(|n| unit(n)),
            rest => unit(rest),
        };
        number.parse().ok().filter(|_| is_stated)
    })
}

/// The words of a `gpu` cell that nothing reads, outside of remarks.
fn unread_of_gpu(cell: &str, fact: &DeviceFact, device: &Device) -> Vec<String> {
    let own = words(&fact.gpu);
    let all = words(&outside(cell));
    let power = device.power_limit_w.map(|w| format!("{w}W"));
    let is_read = |word: &String| {
        let digits = word.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let is_memory =
            digits.parse::<u32>().is_ok() && ["GB", "GIB", "G"].contains(&&word[digits.len()..]);
        own.contains(word)
            || is_memory
            || ["GB", "GIB"].contains(&word.as_str())
            || GPU_WORDS.iter().any(|w| word.starts_with(w))
            || Some(word) == power.as_ref()
    };
    let memory = memories(&all).map(|gb| gb.to_string()).collect::<Vec<_>>();
    all.iter()
        .filter(|w| !is_read(w) && !memory.contains(w))
        .cloned()
        .collect()
}

/// Letters and digits in a row, in capitals.
fn words(cell: &str) -> Vec<String> {
    let words = cell.split(|c: char| !c.is_alphanumeric());
    let words = words.filter(|w| !w.is_empty());
    words.map(str::to_uppercase).collect()
}

/// A cell without its remarks in parentheses.
pub fn outside(cell: &str) -> String {
    let mut depth = 0_u32;
    let is_outside = |c: &char| {
        match c {
            '(' => depth = depth.saturating_add(1),
            ')' => {
                depth = depth.saturating_sub(1);
                return false;
            }
            _ => {}
        }
        depth == 0
    };
    cell.chars().filter(is_outside).collect()
}

/// Assumptions on a row's machine against its cells, or beside them.
pub fn assumed(
    row: &Row,
    (fact, links): (&DeviceFact, &Interconnect),
    catalogue: &Catalogue,
    cluster: &Cluster,
) -> Result<Vec<String>, Unmodelled> {
    let mut assumed = Vec::new();
    let device = catalogue
        .device(&fact.device)
        .map_err(Unmodelled::Cluster)?;
    let (gpu, text) = (row.required("gpu")?, row.required("interconnect")?);
    let list = |what: &str, words: Vec<String>| match words.is_empty() {
        true => None,
        false => Some(format!("{what}_not_read={}", words.join("+"))),
    };
    assumed.extend(list("gpu", unread_of_gpu(gpu, fact, device)));
    let (network, unread) = network::assumed(text, links, cluster);
    assumed.extend(network);
    assumed.extend(list("interconnect", unread));
    Ok(assumed)
}
