//! Compositions: `DEVICE*COUNT+INSIDE+BETWEEN*CARDS` as a system of the catalogue's parts.
//!
//! A composition says what a machine is made of, so parts that no machine joins are refused: a
//! network inside a host, a host's link between hosts, NVLink on a card that has none.

use super::catalogue::{Catalogue, System};

const FORM: &str = "expected DEVICE*COUNT+LINK or DEVICE*COUNT+LINK+LINK*CARDS, such as h100-sxm*8+nvlink4+roce-400*4";

/// The system that `text` means: counts may be left out, and are eight devices in a host and a card
/// for each, or one in all for Ethernet over sockets; without a link between hosts there is one
/// host. Says what is wrong: the form, a count, a part that the catalogue does not have or one in
/// the wrong place.
pub(super) fn system(catalogue: &Catalogue, text: &str) -> Result<System, String> {
    let parts: Vec<&str> = text.split('+').collect();
    let (device, inside, between) = match parts[..] {
        [device, inside] => (device, inside, None),
        [device, inside, between] => (device, inside, Some(between)),
        _ => return Err(format!("{} parts: {FORM}", parts.len())),
    };
    if parts.contains(&"") {
        return Err(format!("a part is empty: {FORM}"));
    }
    let (device, devices_per_host) = counted(device, 8)?;
    known("device", device, catalogue.devices())?;
    if inside.contains('*') {
        return Err(format!(
            "`{inside}`: the link inside a host takes no count, the devices and the cards do"
        ));
    }
    known("link", inside, catalogue.links())?;
    if catalogue.is_network(inside) {
        return Err(format!(
            "`{inside}` joins hosts; links inside a host are {}",
            links(catalogue, |link| !catalogue.is_network(link))
        ));
    }
    if let Some(others) = foreign_nvlink(catalogue, device, inside) {
        return Err(format!(
            "`{device}` has no `{inside}`: inside a host it has {others} or PCIe"
        ));
    }
    let (between, cards) = match between {
        None => (None, 0),
        Some(part) => {
            let name = part.split('*').next().unwrap_or(part);
            let cards = match catalogue.is_over_sockets(name) {
                true => 1,
                false => devices_per_host,
            };
            let (between, cards) = counted(part, cards)?;
            known("link", between, catalogue.links())?;
            if !catalogue.is_network(between) {
                return Err(format!(
                    "`{between}` does not reach beyond a host; links between hosts are {}",
                    links(catalogue, |link| catalogue.is_network(link))
                ));
            }
            (Some(between.to_string()), cards)
        }
    };
    Ok(System {
        preset: text.into(),
        name: text.into(),
        n_hosts: 1,
        device: device.into(),
        devices_per_host,
        inside: inside.into(),
        domain_devices: None,
        between,
        cards,
        source: "composed as asked for".into(),
    })
}

/// `NAME*COUNT`, or a name alone with the default.
fn counted(part: &str, default: u32) -> Result<(&str, u32), String> {
    match part.split_once('*') {
        None => Ok((part, default)),
        Some((name, count)) => match count.parse() {
            Ok(n) if n > 0 => Ok((name, n)),
            _ => Err(format!("`{part}`: `{count}` is not a count of 1 or more")),
        },
    }
}

fn known<'a>(what: &str, name: &str, names: impl Iterator<Item = &'a str>) -> Result<(), String> {
    let all: Vec<&str> = names.collect();
    match all.contains(&name) {
        true => Ok(()),
        false => Err(format!(
            "there is no {what} `{name}`; {what}s are {}",
            all.join(", ")
        )),
    }
}

fn links(catalogue: &Catalogue, wanted: impl Fn(&str) -> bool) -> String {
    let names: Vec<&str> = catalogue.links().filter(|link| wanted(link)).collect();
    names.join(", ")
}

/// The NVLinks that the catalogue's systems give the device, where the link asked for is an
/// NVLink of another generation; nothing where the link is possible.
pub(super) fn foreign_nvlink(catalogue: &Catalogue, device: &str, link: &str) -> Option<String> {
    let generation = |link: &str| {
        link.strip_prefix("nvlink")
            .map(|g| g.split('-').next().unwrap_or(g).to_string())
    };
    let asked = generation(link)?;
    let of_device = catalogue.systems().iter().filter(|s| s.device == device);
    let mut has: Vec<&str> = of_device
        .map(|s| s.inside.as_str())
        .filter(|inside| generation(inside).is_some())
        .collect();
    has.sort_unstable();
    has.dedup();
    if has.iter().any(|l| generation(l).as_ref() == Some(&asked)) {
        return None;
    }
    Some(match has.is_empty() {
        true => "no NVLink".into(),
        false => has.join(", "),
    })
}
