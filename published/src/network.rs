//! The network between hosts by the words of an `interconnect` cell, beside the entry of the
//! data file that the cell is found by: its kinds, network cards and rate.

use crate::Unmodelled;
use crate::cells::outside;
use crate::facts::Interconnect;
use crate::row::{Row, RowError};
use ir::cluster::{Cluster, Level};

/// The network of an `interconnect` cell, read word by word.
#[derive(Debug, Default, PartialEq)]
struct Said {
    /// Network cards of a host: the `8` of `8x NDR`.
    cards: Option<u32>,
    /// Whether a count is none: `-8x` or `4.5x`.
    miscounted: bool,
    /// Kinds of links between hosts, and generations of them.
    kinds: Vec<String>,
    /// A rate in bits per second and what it is of.
    rate: Option<(f64, Per)>,
    /// That it is not stated.
    not_stated: bool,
    /// Whether NVLink is named, and whether PCIe is.
    nvlink: bool,
    pcie: bool,
    /// All other words.
    unread: Vec<String>,
}

/// A thing that a rate is of.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Per {
    Unsaid,
    Host,
    Device,
    Card,
}

/// Kinds of networks and how the names of such links begin or what they contain.
const KINDS: [(&str, &[&str]); 19] = [
    ("ib", &["infiniband"]),
    ("infiniband", &["infiniband"]),
    ("fdr", &["fdr"]),
    ("edr", &["edr"]),
    ("hdr", &["hdr"]),
    ("ndr", &["ndr"]),
    ("xdr", &["xdr"]),
    ("rdma", &["infiniband", "roce"]),
    ("roce", &["roce"]),
    ("rocev2", &["roce"]),
    ("ethernet", &["ethernet", "roce"]),
    ("tcp", &["ethernet"]),
    ("tcpx", &["ethernet"]),
    ("efa", &["efa"]),
    ("slingshot", &["slingshot"]),
    ("omni", &["omni"]),
    ("omnipath", &["omni"]),
    ("opa", &["omni"]),
    ("sharp", &["sharp"]),
];

/// Names of network cards.
const CARDS: [&str; 8] = [
    "card", "cards", "nic", "nics", "port", "ports", "rail", "rails",
];

/// Words of an `interconnect` cell that change nothing.
const LINK_WORDS: [&str; 19] = [
    "nvswitch",
    "nvl72",
    "domain",
    "inter",
    "node",
    "nodes",
    "host",
    "hosts",
    "gpu",
    "path",
    "hybrid",
    "cube",
    "mesh",
    "network",
    "fabric",
    "gpudirect",
    "a",
    "and",
    "with",
];

/// Units as they are written, and what they are read as. A slash belongs to a unit; bits are
/// told from bytes by their small letter.
const UNITS: [(&str, &str); 9] = [
    ("GBytes/s", "gbytes"),
    ("GB/s", "gbytes"),
    ("GBps", "gbytes"),
    ("Gb/s", "gbps"),
    ("gb/s", "gbps"),
    ("Gbit/s", "gbps"),
    ("Gbps", "gbps"),
    ("GbE", "gbps ethernet"),
    ("Gb", "gbps"),
];

fn read(cell: &str) -> Said {
    let text = without_commas(&outside(cell));
    let mut said = Said {
        miscounted: is_miscounted(&text),
        ..Said::default()
    };
    let mut behind_nvlink = false;
    for part in text.split([';', ',']) {
        // `NVLink4; 900 GB/s; 8x NDR`.
        if !(behind_nvlink && is_rate_in_bytes(part)) {
            read_part(part, &mut said);
        }
        behind_nvlink = part.to_lowercase().contains("nvlink");
    }
    said
}

/// A text without the commas that part thousands.
fn without_commas(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let is_digit = |i: Option<usize>| {
        let c = i.and_then(|i| chars.get(i));
        c.is_some_and(char::is_ascii_digit)
    };
    let parts_thousands = |i: usize| {
        let three = (1..=3).all(|n| is_digit(Some(i + n)));
        is_digit(i.checked_sub(1)) && three && !is_digit(Some(i + 4))
    };
    let kept = chars.iter().enumerate();
    let kept = kept.filter(|(i, c)| **c != ',' || !parts_thousands(*i));
    kept.map(|(_, c)| *c).collect()
}

/// Whether a text has counts that are none: below zero, broken, ranges, or of each other (`-8x`,
/// `4.5x`, `4-8x`, `2x8x`).
fn is_miscounted(text: &str) -> bool {
    let chars: Vec<char> = text.to_lowercase().chars().collect();
    let is_number = |c: &char| c.is_ascii_digit() || *c == '.';
    let end_of = |from: usize| (from..chars.len()).find(|&i| !is_number(&chars[i]));
    (0..chars.len()).any(|i| {
        let is_first = i == 0 || !(chars[i - 1].is_alphanumeric() || chars[i - 1] == '.');
        let begins = chars[i].is_ascii_digit() && is_first;
        let Some(end) = end_of(i).filter(|&end| begins && chars[end] == 'x') else {
            return false;
        };
        let is_dash = |c: &char| ['-', '\u{2212}', '\u{2013}'].contains(c);
        let before = |n: usize| i.checked_sub(n).and_then(|at| chars.get(at));
        let is_signed =
            before(1).is_some_and(is_dash) && before(2).is_none_or(|c| !c.is_alphabetic());
        let is_product = chars.get(end + 1).is_some_and(char::is_ascii_digit)
            && end_of(end + 1).is_some_and(|next| chars[next] == 'x');
        is_signed || is_product || chars[i..end].contains(&'.')
    })
}

/// Whether a part is nothing but a rate in bytes, which is said of NVLink.
fn is_rate_in_bytes(part: &str) -> bool {
    match words_of(part).as_slice() {
        [word] => matches!(numbered(word), (Some(_), "gbytes")),
        [number, unit] => matches!(numbered(number), (Some(_), "")) && unit == "gbytes",
        _ => false,
    }
}

/// The words of a part of a cell: counts stand alone (`8x`), as does what they count.
fn words_of(part: &str) -> Vec<String> {
    let known = |text: String, (written, read): (&str, &str)| text.replace(written, read);
    let text = UNITS.into_iter().fold(part.to_string(), known);
    // A point belongs to a number.
    let split = text.split(|c: char| !c.is_alphanumeric() && c != '.');
    split
        .map(|w| w.trim_matches('.').to_lowercase())
        .filter(|w| !w.is_empty())
        .flat_map(|word| match numbered(&word) {
            (Some(_), rest) if rest.len() > 1 && rest.starts_with('x') => {
                let (count, what) = word.split_at(word.len() - rest.len() + 1);
                vec![count.to_string(), what.to_string()]
            }
            _ => vec![word],
        })
        .collect()
}

fn read_part(part: &str, said: &mut Said) {
    let words = words_of(part);
    let mut i = 0;
    // Whether a number before any network is of a link inside the host.
    let mut is_inside = false;
    // Whether the last rate is the one that counts, the first.
    let mut is_taken = false;
    while let Some(word) = words.get(i) {
        let next = words.get(i + 1).map_or("", String::as_str);
        i += 1;
        let (number, unit) = numbered(word);
        match (number, unit) {
            // Of links inside the host there are as many as the device has.
            (Some(_), "x") if next.starts_with("nvlink") => {}
            (Some(n), "x") => {
                said.cards.get_or_insert(n as u32);
                is_inside = false;
            }
            (Some(_), "" | "gbps" | "gbytes") => {
                let Some((rate, is_apart)) = rate(number, unit, next) else {
                    continue;
                };
                i += usize::from(is_apart);
                is_taken = false;
                match &said.rate {
                    _ if is_inside => {}
                    None => {
                        said.rate = Some((rate, Per::Unsaid));
                        is_taken = true;
                    }
                    Some((first, _)) if *first == rate => {}
                    Some(_) => said.unread.push(format!("{}gbps", rate / 1e9)),
                }
            }
            _ if word == "per" => {
                let per = match next {
                    "gpu" | "device" => Per::Device,
                    "card" | "port" | "nic" => Per::Card,
                    _ => Per::Host,
                };
                if is_taken {
                    said.rate = said.rate.map(|(rate, _)| (rate, per));
                }
                i += usize::from(!next.is_empty());
            }
            _ if word == "not" && next == "stated" => {
                said.not_stated = true;
                i += 1;
            }
            _ if word.starts_with("nvlink") => {
                said.nvlink = true;
                is_inside = true;
            }
            _ if word.starts_with("pcie") => {
                said.pcie = true;
                is_inside = true;
            }
            _ if KINDS.iter().any(|(k, _)| k == word) => {
                said.kinds.push(word.clone());
                is_inside = false;
            }
            // The cards that are cards of what.
            _ if CARDS.contains(&word.as_str()) || LINK_WORDS.contains(&word.as_str()) => {}
            _ => said.unread.push(word.clone()),
        }
    }
}

/// The number that a word begins with, and the rest.
fn numbered(word: &str) -> (Option<f64>, &str) {
    let end = word.find(|c: char| !c.is_ascii_digit() && c != '.');
    let (number, rest) = word.split_at(end.unwrap_or(word.len()));
    (number.parse().ok(), rest)
}

/// A text in small letters, without the spaces around `+` and `;`.
pub fn normal(text: &str) -> String {
    let joined = |text: String, sign: &str| {
        let parts: Vec<&str> = text.split(sign).map(str::trim).collect();
        parts.join(sign)
    };
    ["+", ";"].into_iter().fold(text.to_lowercase(), joined)
}

/// A rate in bits per second, and whether its unit is the next word.
fn rate(number: Option<f64>, unit: &str, next: &str) -> Option<(f64, bool)> {
    let is_apart = unit.is_empty();
    let bits = match if is_apart { next } else { unit } {
        "gbps" => 1e9,
        "gbytes" => 8e9,
        // `4-GPU node` is no rate.
        _ => return None,
    };
    number.map(|n| (n * bits, is_apart))
}

/// Most network cards of a host that are read.
const MOST_CARDS: u32 = 64;

/// Network cards of a host of `per_host` devices: as the cell says, or the entry's.
///
/// Hosts of a domain may be called any part of it: there an entry's cards are those of the hosts
/// that it is made of, and `per_host` may be several of these.
pub fn cards(row: &Row, links: &Interconnect, host: u32, per_host: u32) -> Result<u32, Unmodelled> {
    let text = row.required("interconnect")?;
    let said = read(text);
    let is_none = said.miscounted || said.cards.is_some_and(|n| !(1..=MOST_CARDS).contains(&n));
    if is_none {
        return Err(RowError::Malformed {
            column: "interconnect".into(),
            value: text.into(),
            expected: "1 to 64 network cards in a host",
        }
        .into());
    }
    Ok(match links.domain_devices.is_some() && per_host > host {
        true => links.cards.saturating_mul(per_host) / host.max(1),
        false => said.cards.unwrap_or(links.cards),
    })
}

/// Refuses hosts joined by what the entry, which has NVLink, is not.
pub fn inside(text: &str, links: &Interconnect) -> Result<(), Unmodelled> {
    let said = read(text);
    match said.pcie && !said.nvlink {
        true => Err(Unmodelled::Feature(format!(
            "the interconnect `{text}`: PCIe inside a host, where `{}` means {}; `meshwright compile` plans for such hosts",
            links.text, links.inside
        ))),
        false => Ok(()),
    }
}
/// Names what stands in for the network that a cell names or does not, and the words that nothing
/// reads.
pub fn assumed(
    text: &str,
    links: &Interconnect,
    cluster: &Cluster,
) -> (Option<String>, Vec<String>) {
    let said = read(text);
    let Some(network) = cluster.levels.get(1) else {
        return (None, said.unread);
    };
    let per_host = f64::from(cluster.devices_per_host);
    let cards = per_host / f64::from(network.devices_per_port.max(1));
    let cards = cards.max(f64::from(said.cards.unwrap_or(links.cards)));
    let source = cluster.sources.get(&rate_key(network));
    let name = format!("between={}*{cards}", links.between);
    let stands_in = match source.is_some_and(|s| s == CELLS_RATE) {
        true => {
            let card = (host_bits(cluster) / cards / 1e6).round() / 1e3;
            Some(format!("{name}@{card}Gb/s"))
        }
        false => (said.not_stated || !is_of_kinds(&said, links)).then_some(name),
    };
    (stands_in, said.unread)
}

/// Whether the network that is modelled is of the kinds that were said, as far as any were.
fn is_of_kinds(said: &Said, links: &Interconnect) -> bool {
    said.kinds.iter().all(|kind| {
        let known = KINDS.iter().find(|(k, _)| k == kind);
        known.is_none_or(|(_, names)| names.iter().any(|n| links.between.contains(n)))
    })
}

/// Bits per second of all network cards of a host.
fn host_bits(cluster: &Cluster) -> f64 {
    let per_host = f64::from(cluster.devices_per_host);
    let of = |l: &Level| 8.0 * l.bandwidth_bytes_per_s / f64::from(l.devices_per_port.max(1));
    cluster.levels.get(1).map_or(0.0, of) * per_host
}

/// Where the rate of a network comes from that an entry does not have.
const CELLS_RATE: &str = "the `interconnect` cell's rate";

/// The key of a network's rate among a cluster's sources.
fn rate_key(network: &Level) -> String {
    format!("levels.{}.bandwidth_bytes_per_s", network.name)
}

/// Gives the network between hosts the rate that the cell states, where the entry has another one.
/// A rate that is of nothing is taken for a card's (of the `cards` of a host) or a host's, whichever
/// is nearer to the entry. `usual` devices make a host where a row calls several of them one.
pub fn set_stated_rate(text: &str, cards: u32, usual: u32, cluster: &mut Cluster) {
    let said = read(text);
    let own = host_bits(cluster);
    let per_host = f64::from(cluster.devices_per_host);
    let hosts = (per_host / f64::from(usual.max(1))).max(1.0);
    let (Some((rate, per)), Some(network)) = (said.rate, cluster.levels.get_mut(1)) else {
        return;
    };
    let counted = said.cards.map_or(1.0, f64::from);
    let stated = match per {
        Per::Device => [rate * per_host; 2],
        Per::Card => [rate * f64::from(cards); 2],
        // `4x100Gb per node` is four hundred.
        Per::Host => [rate * counted * hosts, rate * hosts],
        Per::Unsaid => [rate * f64::from(cards), rate * hosts],
    };
    let off = |s: &f64| (s / own).ln().abs();
    let nearest = match off(&stated[0]) <= off(&stated[1]) {
        true => stated[0],
        false => stated[1],
    };
    let share = nearest / own;
    if share.is_finite() && share > 0.0 && (share - 1.0).abs() >= SAME_RATE {
        network.bandwidth_bytes_per_s *= share;
        let key = rate_key(network);
        cluster.sources.insert(key, CELLS_RATE.into());
    }
}

/// Rates that differ by less are one: names of links are rounded.
const SAME_RATE: f64 = 0.05;
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_rates_are_of_what_they_stand_beside() {
        let said = |cell: &str| {
            let s = read(cell);
            let rate = s.rate.map(|(rate, _)| rate / 1e9);
            (s.cards, rate, s.kinds.join("+"), s.unread.join("+"))
        };
        let is = |cards, rate, kinds: &str, unread: &str| {
            (cards, rate, kinds.to_string(), unread.to_string())
        };
        assert_eq!(
            said("NVLink3+NVSwitch; 8x HDR IB 200Gb/s"),
            is(Some(8), Some(200.0), "hdr+ib", "")
        );
        // Links of a device are no cards, and their rate is not the network's.
        for cell in ["18x NVLink4+NVSwitch; NDR", "18xNVLink4 900GB/s; NDR"] {
            assert_eq!(said(cell), is(None, None, "ndr", ""));
            assert!(read(cell).nvlink);
        }
        assert_eq!(said("NVLink4; 8x NDR; 2x HDR storage").0, Some(8));
        // Nothing is lost of a word with its count, bits are no bytes.
        assert_eq!(said("4xHDR"), is(Some(4), None, "hdr", ""));
        assert_eq!(said("8x100GbE"), is(Some(8), Some(100.0), "ethernet", ""));
        assert_eq!(said("8x50 GBps"), is(Some(8), Some(400.0), "", ""));
        assert_eq!(said("8x400gb/s"), is(Some(8), Some(400.0), "", ""));
        assert_eq!(said("8x50GB").3, "50gb");
        // Thousands, the first of two rates, and rates that are of links inside the host.
        assert_eq!(said("EFA 3,200 Gbps").1, Some(3200.0));
        assert_eq!(
            said("8x NDR 400Gb/s; 25Gb/s Ethernet management"),
            is(Some(8), Some(400.0), "ndr+ethernet", "25gbps+management")
        );
        for cell in [
            "NVLink4+NVSwitch; 900 GB/s; 8x NDR",
            "PCIe Gen5 64GB/s; 8x NDR",
        ] {
            assert_eq!(said(cell).1, None, "{cell}");
        }
        let per = read("NDR 400Gb/s per GPU; 800Gb/s per node").rate;
        assert_eq!(per, Some((400e9, Per::Device)));
        let wrong = [
            "-8x NDR",
            "inter-node -8x NDR",
            "\u{2212}8x",
            "4-8x",
            "2x8x",
            "4.5x NDR",
        ];
        for wrong in wrong {
            let cell = format!("NVLink4+NVSwitch; {wrong}");
            assert!(read(&cell).miscounted, "{wrong}");
        }
        let right = [
            "-",
            "- not stated",
            "inter-8x NDR",
            "NDR (-8x)",
            "PCIe4.0x16; 8x200Gb/s",
        ];
        for right in right {
            assert!(!read(right).miscounted, "{right}");
        }
        assert_eq!(normal("NVLink4 + NVSwitch ; NDR"), "nvlink4+nvswitch;ndr");
        assert_eq!(said("NVLink4 + 8x wires"), is(Some(8), None, "", "wires"));
    }
}
