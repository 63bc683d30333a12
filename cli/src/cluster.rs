//! The CLUSTER argument: a preset, or a file with its hosts or ranks changed.

use crate::document;
use crate::failure::{Exit, Failure};
use crate::files;
use crate::gaps;
use crate::places;
use cost_model::presets;
use ir::cluster::{Cluster, Device, Level, MAX_DEVICES};
use std::path::Path;

/// The most ranks, each a thread, that one process runs.
pub const MAX_RANKS: u32 = 1024;

/// The file that `calibrate` writes, and that the cluster `cpu` stands for.
const CALIBRATED: &str = "cluster.toml";

/// The cluster called `name`, with other numbers of hosts or ranks where asked for.
///
/// A name with a path separator or a dot is a file; `cpu` is the file that `calibrate`
/// writes; anything else is a preset.
pub fn load(name: &str, hosts: Option<u32>, ranks: Option<u32>) -> Result<Cluster, Failure> {
    let mut cluster = read(name)?;
    let usage = |flag: &str, n: u32, problem: String| {
        Failure::new(
            Exit::Usage,
            format!("--{flag} {n}: cluster `{name}`: {problem}"),
        )
    };
    if let Some(n) = hosts {
        let of_one = match is_of_cpu_ranks(&cluster) {
            true => "use --ranks to change the number of ranks of one machine".to_string(),
            false if !cluster.is_equal() => {
                "write the hosts of each group behind its name, as in dgx-h100:2,dgx-a100-40gb:3, or into the file".to_string()
            }
            false if !presets::joins_hosts(&cluster) => {
                "give it a link between hosts, as in DEVICE*COUNT+LINK+LINK, or leave --hosts out"
                    .to_string()
            }
            false => format!(
                "leave --hosts out for the cluster's own {}, or give a number of hosts that together have {MAX_DEVICES} devices or fewer",
                cluster.n_hosts
            ),
        };
        cluster = presets::with_hosts(cluster, n).map_err(|p| usage("hosts", n, p).help(of_one))?;
    }
    if let Some(n) = ranks {
        if cluster.pool.is_none() {
            return Err(
                usage("ranks", n, "its devices do not share processors".into())
                    .help("use --hosts to change the size of a cluster of GPUs"),
            );
        }
        if n > MAX_RANKS {
            let what =
                format!("{MAX_RANKS} at most: a rank is a thread, and one process runs no more");
            return Err(usage("ranks", n, what).help(format!("give --ranks 1 to {MAX_RANKS}")));
        }
        cluster = presets::with_ranks(cluster, n).map_err(|p| {
            usage("ranks", n, p).help("leave --ranks out for the number that the cluster has")
        })?;
    }
    Ok(cluster)
}

/// Says whether a cluster is one of CPU ranks, as `run` executes them: devices that share the
/// processors and the memory of their machine. Predictions for other clusters do not apply to runs
/// here.
pub fn is_of_cpu_ranks(cluster: &Cluster) -> bool {
    cluster.pool.is_some()
}

/// The advice for users who want predictions that apply to runs on this machine.
pub const PLAN_FOR_THIS_MACHINE: &str = "for figures that can be compared, measure this machine with `meshwright calibrate -o cluster.toml`, compile the model with `--cluster cluster.toml`, and run that plan";

/// Warns of figures that no machine has; most are in another unit than their key says.
pub fn other_units(cluster: &Cluster) -> Option<String> {
    let own = (String::new(), &cluster.device, &cluster.levels);
    let groups = cluster.groups.iter().enumerate();
    let groups = groups.map(|(i, g)| (format!("groups[{i}]."), &g.device, &g.levels));
    let figures = std::iter::once(own).chain(groups);
    let odd = figures.flat_map(|(of, device, levels)| odd_figures(&of, device, levels));
    let odd: Vec<String> = odd.collect();
    (!odd.is_empty()).then(|| {
        format!(
            "the cluster has {}: no machine has such figures; a key ends in its unit, which is seconds, bytes, bytes per second or FLOP/s, not us or GB/s",
            odd.join(", ")
        )
    })
}

/// The figures of a device and its links that no machine has, with their keys behind `of`.
fn odd_figures(of: &str, d: &Device, levels: &[Level]) -> Vec<String> {
    let peaks = d.peak_flops_per_s.iter();
    // Ranges are wider than machines of today by factors of ten and more on both sides (the
    // fastest peak of a preset is 1.5e16, its fastest memory 8e12), and narrower than a slip
    // between units: giga for one is 1e9, seconds for microseconds 1e6.
    let mut figures: Vec<(String, f64, [f64; 2])> = peaks
        .map(|(t, x)| {
            (
                format!("{of}device.peak_flops_per_s.{}", t.name()),
                *x,
                [1e8, 1e18],
            )
        })
        .collect();
    let bandwidth = d.memory_bandwidth_bytes_per_s;
    let key = |name: &str| format!("{of}device.{name}");
    figures.push((key("memory_bandwidth_bytes_per_s"), bandwidth, [1e8, 1e15]));
    figures.push((key("memory_bytes"), d.memory_bytes.0 as f64, [1e6, 1e15]));
    figures.push((key("launch_s"), d.launch_s, [0.0, 0.1]));
    for (i, level) in levels.iter().enumerate() {
        let key = |name: &str| format!("{of}levels[{i}].{name}");
        figures.push((key("latency_s"), level.latency_s, [0.0, 1.0]));
        let bandwidth = level.bandwidth_bytes_per_s;
        figures.push((key("bandwidth_bytes_per_s"), bandwidth, [1e5, 1e15]));
    }
    let odd = figures
        .into_iter()
        .filter(|(_, x, [least, most])| x < least || x > most);
    odd.map(|(key, x, _)| format!("{key} = {x}")).collect()
}

/// Returns the file from which the cluster called `name` is read; `None` where it is built in.
pub fn file(name: &str) -> Option<&Path> {
    let is_built_in = built_in(name).is_ok_and(|found| found.is_some());
    (!is_built_in).then(|| Path::new(if name == "cpu" { CALIBRATED } else { name }))
}

fn read(name: &str) -> Result<Cluster, Failure> {
    if let Some(cluster) = built_in(name)? {
        return Ok(cluster);
    }
    let path = file(name).unwrap_or(Path::new(name));
    if path.exists() || (name.contains(['/', '.']) && !name.contains('*')) {
        let file = path.display().to_string();
        let text = files::read_text(path, "cluster", files::SMALL)?;
        let is_json =
            path.extension().is_some_and(|e| e == "json") || text.trim_start().starts_with('{');
        return checked(&file, &text, parsed(&file, &text, is_json)?);
    }
    if name == "cpu" {
        return Err(Failure::new(
            Exit::BadInput,
            "there is no cluster.toml here, which the cluster `cpu` means",
        )
        .help("measure this machine first: meshwright calibrate"));
    }
    let what = format!("there is no cluster `{name}`");
    Err(Failure::new(Exit::BadInput, what).help(meant(name)))
}

/// Advises on a name that is no cluster's: it names the preset that was meant, presets with a
/// device of that name, or all presets.
fn meant(name: &str) -> String {
    let known = presets::names();
    let all = "`meshwright presets` lists all";
    if name.contains('*') {
        return "a composition is DEVICE*COUNT+LINK, or DEVICE*COUNT+LINK+LINK for several hosts, as h100-sxm*8+nvlink4+infiniband-ndr; `meshwright presets` lists devices and links".into();
    }
    let same = |n: &&str| n.eq_ignore_ascii_case(name);
    if let Some(preset) = known.iter().copied().find(same) {
        return format!("did you mean `{preset}`? {all}");
    }
    if let Ok(catalogue) = presets::catalogue() {
        if let Some(device) = catalogue.devices().find(same) {
            let systems = catalogue.systems().iter();
            let of_device = systems.filter(|s| s.device == device);
            let presets: Vec<&str> = of_device.map(|s| s.preset.as_str()).collect();
            return format!(
                "`{device}` is a device; presets with it are {}, and a cluster of it is composed as DEVICE*COUNT+LINK; {all}, and links",
                presets.join(", ")
            );
        }
        if let Some(link) = catalogue.links().find(same) {
            return format!(
                "`{link}` is a link; a cluster with it is composed as DEVICE*COUNT+LINK, or DEVICE*COUNT+LINK+LINK for several hosts; {all}, and devices"
            );
        }
    }
    // The name is a part of several presets' names: `h100`.
    let lower = name.to_lowercase();
    let has_part = |n: &&&str| n.split('-').any(|part| part == lower);
    let with_part: Vec<&str> = known.iter().filter(has_part).copied().collect();
    if !with_part.is_empty() {
        return format!("did you mean one of {}? {all}", with_part.join(", "));
    }
    match files::closest(name, known.iter().copied()) {
        Some(near) => format!("did you mean `{near}`? {all}"),
        None => format!(
            "presets are {}; a file is named with its ending, such as cluster.toml",
            known.join(", ")
        ),
    }
}

/// Finds a preset, or a composition of the catalogue's devices and links.
fn built_in(name: &str) -> Result<Option<Cluster>, Failure> {
    if name.contains(['/', '.']) {
        return Ok(None);
    }
    let failure = |message: String| {
        let all = "`meshwright presets` lists the presets, devices and links";
        Failure::new(Exit::BadInput, message).help(match near_part(name) {
            Some(near) if near.ends_with('?') => format!("{near} {all}"),
            Some(near) => format!("{near}; {all}"),
            None => all.into(),
        })
    };
    let found = presets::find(name).map_err(|e| failure(e.to_string()))?;
    let problems = found.as_ref().map(Cluster::problems).unwrap_or_default();
    if problems.is_empty() {
        Ok(found)
    } else {
        Err(failure(format!(
            "cluster `{name}`: {}",
            problems.join("; ")
        )))
    }
}

/// Advises on the first part of a composition that is neither device nor link: the one that is most
/// like it, or all that differ from it in their numbers alone, as none of these can be meant.
fn near_part(name: &str) -> Option<String> {
    let catalogue = presets::catalogue().ok()?;
    let known = || catalogue.devices().chain(catalogue.links());
    let parts = name.split(['+', '*']).map(str::trim);
    let is_name = |part: &&str| part.parse::<u32>().is_err();
    let wrong = parts
        .filter(is_name)
        .find(|part| known().all(|k| k != *part))?;
    let stem = |name: &'_ str| {
        let number = name.trim_end_matches(|c: char| c.is_ascii_digit());
        name[number.len()..].parse::<u32>().ok()?;
        Some(number.to_string())
    };
    let own = stem(wrong);
    let alike: Vec<String> = known()
        .filter(|k| own.is_some() && stem(k) == own)
        .map(|k| format!("`{k}`"))
        .collect();
    match alike.is_empty() {
        false => Some(format!("there are {}", alike.join(", "))),
        true => {
            let near = files::closest(wrong, known())?;
            Some(format!("did you mean `{near}`?"))
        }
    }
}

/// Parses a cluster's document. Of fields that are missing it names all; those that nobody knows
/// without measuring are guessed, which is said.
fn parsed(file: &str, text: &str, is_json: bool) -> Result<Cluster, Failure> {
    let cluster = match is_json {
        true => document::json(file, text, "cluster"),
        false => document::toml(file, text, "cluster"),
    };
    let failure = match cluster {
        Err(failure) if failure.to_string().contains("missing field") => failure,
        cluster => return cluster,
    };
    let value = match is_json {
        true => serde_json::from_str(text).ok(),
        false => toml::from_str(text).ok(),
    };
    let Some(mut value): Option<serde_json::Value> = value else {
        return Err(failure);
    };
    let gaps = gaps::fill(&mut value);
    let n_missing: usize = gaps.missing.iter().map(|(_, fields)| fields.len()).sum();
    match n_missing {
        0 => {}
        // With its place.
        1 if gaps.guessed.is_empty() => return Err(failure),
        n => {
            let n = ir::counted(n as u64, "field");
            let are = if n_missing == 1 { "is" } else { "are" };
            let what = format!("{file}: {n} {are} missing:\n  {}", gaps.words());
            return Err(Failure::new(Exit::BadInput, what).help(
                "`meshwright schema cluster` says what each key means, docs/cost_model.md has a short file that is whole, and `meshwright presets NAME` prints one to change",
            ));
        }
    }
    let cluster = serde_path_to_error::deserialize(value);
    let cluster: Cluster = cluster.map_err(|e| {
        let what = format!("{file}: `{}`: {}", e.path(), e.inner());
        Failure::new(Exit::BadInput, what)
            .help("`meshwright schema cluster` says what each key means")
    })?;
    crate::say(format_args!(
        "warning: {file} does not say {}: {} guessed, and the predictions with them.",
        gaps.guessed.join(", "),
        match gaps.guessed.len() {
            1 => "it is",
            _ => "they are",
        }
    ));
    Ok(cluster)
}

/// Returns the cluster if its figures make sense; else lists those that do not, the first in place.
fn checked(file: &str, text: &str, cluster: Cluster) -> Result<Cluster, Failure> {
    let problems = cluster.problems();
    let Some(first) = problems.first() else {
        return Ok(cluster);
    };
    let message = match problems.len() {
        1 => format!("{file}: {first}"),
        n => format!(
            "{file}: {n} figures make no sense:\n  {}",
            problems.join("\n  ")
        ),
    };
    let failure = Failure::new(Exit::BadInput, &message).help(
        "`meshwright schema cluster` says what each key means, docs/cost_model.md shows files, and `meshwright presets NAME` prints one",
    );
    let key = first.split(' ').next().unwrap_or_default();
    let Some((at, len)) = places::find(text, key).or_else(|| document::find_key(text, key)) else {
        return Err(failure);
    };
    let (line, column) = document::line_column(text, at);
    // Only the first of several has its place shown; its line stands before all of them.
    let message = format!("{file}:{line}:{column}{}", &message[file.len()..]);
    Err(failure.saying(message).place(file, text, at, len, "here"))
}
