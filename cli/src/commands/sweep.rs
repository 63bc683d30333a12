//! `sweep`: the best plan of a model on clusters of several kinds and sizes, what it reaches, and
//! what training to a number of tokens takes and costs.

mod draw;

use super::point::{Point, Wanted};
use super::spinner;
use super::watching::Watching;
use crate::args::SweepArgs;
use crate::failure::{Exit, Failure};
use crate::quantity::{Amount, Unit};
use crate::report::degrees::Degrees;
use crate::report::{self, count, percent, table, wrapped};
use crate::{cluster, files, model, outputs};
use ir::cluster::Cluster;
use ir::{Seconds, counted};
use planner::Watcher;
use serde::Serialize;
use serde_json::json;
use std::path::Path;
use std::sync::Arc;

/// One point of the sweep.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Row {
    /// The cluster, as named.
    cluster: String,
    /// Its hosts.
    hosts: u32,
    /// Its devices.
    devices: u32,
    /// The plan; none where there is none.
    point: Option<Point>,
    /// Why there is no plan.
    reason: Option<String>,
    /// Days to the number of tokens that was asked for.
    days: Option<f64>,
    /// The cost of these, in the unit of the price.
    cost: Option<f64>,
}

/// Seconds of an hour.
const HOUR_S: f64 = 3600.0;
/// Seconds of a day.
const DAY_S: f64 = 24.0 * HOUR_S;

pub fn run(args: &SweepArgs) -> Result<(), Failure> {
    let files: Vec<&Path> = [&args.csv, &args.svg]
        .into_iter()
        .flatten()
        .map(|p| p.as_path())
        .collect();
    let model_file = model::file(&args.model)?;
    let mut inputs = Vec::from_iter(model_file.as_deref());
    inputs.extend(args.clusters.iter().filter_map(|c| cluster::file(c)));
    inputs.extend(args.train.file.as_deref());
    outputs::check(&files, &inputs)?;
    let prices = prices(&args.price, &args.clusters)?;
    let tokens = tokens(args.tokens.as_deref())?;
    let mut wanted = Wanted::of(
        &args.model,
        args.expert_capacity,
        &args.train,
        &args.pins,
        &args.search,
        args.made_for.as_deref(),
    )?;
    let clusters = clusters(args)?;
    let mut rows = Vec::new();
    let bar = spinner("searching for plans");
    let watching = Arc::new(Watching::new(
        &bar,
        None,
        "ending with the points that are there, the last one with its best plan so far",
    )?);
    wanted.options.watcher = Watcher::new(watching.clone());
    for (i, (name, cluster)) in clusters.iter().enumerate() {
        if watching.is_over() {
            break;
        }
        watching.begin(format!(
            "point {} of {}, {name} with {}",
            i + 1,
            clusters.len(),
            counted(cluster.n_devices(), "device")
        ));
        let price = prices.iter().find(|(n, _)| n == name).map(|(_, p)| *p);
        rows.push(row(&wanted, name, cluster, tokens, price)?);
    }
    bar.finish_and_clear();
    let early = watching
        .is_over()
        .then(|| early(rows.len(), clusters.len()));
    if let Some(path) = &args.csv {
        outputs::write_atomic(path, csv(&rows).as_bytes())?;
    }
    if let Some(path) = &args.svg {
        outputs::write_atomic(
            path,
            draw::svg(&series(&rows), report::plan::unit_of(&wanted.forward)).as_bytes(),
        )?;
    }
    if rows.iter().all(|r| r.point.is_none()) {
        return Err(no_point(&rows));
    }
    if args.json {
        return report::print_json(&json!({
            "tokens": tokens,
            "rows": rows,
            "ended_early": early,
        }));
    }
    let unit = report::plan::unit_of(&wanted.forward);
    let verdict = format!("{}{}", wanted.whose(), verdict(&rows, tokens, unit));
    report::out(&verdict)?;
    if let Some(words) = &early {
        report::out(words)?;
    }
    report::out("")?;
    report::out(&words(&rows, tokens, unit))?;
    for path in files {
        report::out(&format!("Written to {}.", path.display()))?;
    }
    Ok(())
}

/// Reads prices, `CLUSTER=NUMBER` of one device for an hour.
fn prices(texts: &[String], clusters: &[String]) -> Result<Vec<(String, f64)>, Failure> {
    let read = |text: &String| {
        let usage = |what: String| {
            let help = "give --price dgx-h100=2.10/device-hour for each cluster of --cluster that has one, in whatever currency";
            Failure::new(Exit::Usage, what).help(help)
        };
        let (name, price) = text
            .rsplit_once('=')
            .ok_or_else(|| usage(format!("--price {text}: expected CLUSTER=PRICE")))?;
        if !clusters.iter().any(|c| c == name) {
            let near = files::closest(name, clusters.iter().map(String::as_str));
            let near = near.map_or(String::new(), |n| format!("; did you mean `{n}`?"));
            return Err(usage(format!(
                "--price {text}: `{name}` is none of the clusters{near}"
            )));
        }
        let number = price.strip_suffix("/device-hour").unwrap_or(price).trim();
        let price = number
            .parse::<f64>()
            .ok()
            .filter(|p| p.is_finite() && *p >= 0.0);
        let price =
            price.ok_or_else(|| usage(format!("--price {text}: `{number}` is no price")))?;
        Ok((name.to_string(), price))
    };
    texts.iter().map(read).collect()
}

fn tokens(text: Option<&str>) -> Result<Option<f64>, Failure> {
    let Some(text) = text else {
        return Ok(None);
    };
    match Unit::Count.parse("--tokens", text)? {
        Amount::To(tokens) => Ok(Some(tokens)),
        Amount::Times(_) => {
            let what = format!("--tokens {text}: there is no number that this could multiply");
            Err(Failure::new(Exit::Usage, what).help("give a number, as 300B or 1T"))
        }
    }
}

/// The clusters of the sweep, each in every size, in the order in which they were named.
fn clusters(args: &SweepArgs) -> Result<Vec<(String, Cluster)>, Failure> {
    let mut all = Vec::new();
    for name in &args.clusters {
        let sizes: Vec<(Option<u32>, Option<u32>)> = match (&args.hosts[..], &args.ranks[..]) {
            ([], []) => vec![(None, None)],
            (hosts, []) => hosts.iter().map(|n| (Some(*n), None)).collect(),
            (_, ranks) => ranks.iter().map(|n| (None, Some(*n))).collect(),
        };
        for (hosts, ranks) in sizes {
            all.push((name.clone(), cluster::load(name, hosts, ranks)?));
        }
    }
    Ok(all)
}

fn row(
    wanted: &Wanted,
    name: &str,
    cluster: &Cluster,
    tokens: Option<f64>,
    price: Option<f64>,
) -> Result<Row, Failure> {
    let (point, reason) = match wanted.on(cluster)? {
        Ok(point) => (Some(point), None),
        Err(e) => (None, Some(e.to_string())),
    };
    let devices = cluster.n_devices();
    let seconds = point.as_ref().zip(tokens).map(|(p, n)| n / p.tokens_per_s);
    let hours = seconds.map(|s| s / HOUR_S * f64::from(devices));
    let hosts = cluster.groups.iter().map(|g| g.n_hosts);
    Ok(Row {
        cluster: name.to_string(),
        hosts: cluster.n_hosts + hosts.sum::<u32>(),
        devices,
        point,
        reason,
        days: seconds.map(|s| s / DAY_S),
        cost: hours.zip(price).map(|(hours, price)| hours * price),
    })
}

/// Says what an interrupted sweep has.
fn early(done: usize, of: usize) -> String {
    format!(
        "Ended early: {done} of {of} points were searched, and of the last one the plan is the best that was found by then."
    )
}

/// The failure of a sweep of which no point has a plan.
fn no_point(rows: &[Row]) -> Failure {
    let reasons = rows.iter().map(|r| {
        let why = r.reason.as_deref().unwrap_or_default();
        format!(
            "\n  {} on {}: {why}",
            r.cluster,
            counted(r.devices, "device")
        )
    });
    let what = format!("no point has a plan:{}", reasons.collect::<String>());
    Failure::new(Exit::Infeasible, what).help(
        "give more --hosts; `meshwright fits` finds the smallest number of devices on which a model has a plan",
    )
}

/// Names the point that is fastest, and the cheapest one where prices are known.
fn verdict(rows: &[Row], tokens: Option<f64>, unit: &str) -> String {
    let with = || rows.iter().filter_map(|r| Some((r, r.point.as_ref()?)));
    let place = |r: &Row| format!("{} with {}", r.cluster, counted(r.devices, "device"));
    let fastest = with().max_by(|a, b| a.1.tokens_per_s.total_cmp(&b.1.tokens_per_s));
    let mut w = fastest.map_or(String::new(), |(r, p)| {
        let to = tokens.zip(r.days).map_or(String::new(), |(n, days)| {
            format!(", {} to {} {unit}", days_of(days), count(n).trim_end())
        });
        format!(
            "The fastest is {}: {} {unit}/s{to}.",
            place(r),
            count(p.tokens_per_s).trim_end()
        )
    });
    let costs = with().filter_map(|(r, _)| Some((r, r.cost?)));
    if let Some((r, cost)) = costs.min_by(|a, b| a.1.total_cmp(&b.1)) {
        w += &format!(" The cheapest is {}: {}", place(r), price(cost));
        w += &r
            .days
            .map_or(".".into(), |days| format!(" and {}.", days_of(days)));
    }
    let none = rows.iter().filter(|r| r.point.is_none()).count();
    if none > 0 {
        w += &format!(" {} of {} points have no plan.", none, rows.len());
    }
    w
}

fn days_of(days: f64) -> String {
    match days {
        d if d >= 1.0 => format!("{d:.1} days"),
        d if d * 24.0 >= 1.0 => format!("{:.1} hours", d * 24.0),
        d => Seconds(d * DAY_S).to_string(),
    }
}

/// Shows money, whose unit is that of the prices.
fn price(cost: f64) -> String {
    match cost {
        c if c >= 1e4 => count(c).trim_end().to_string(),
        c => format!("{c:.2}"),
    }
}

fn words(rows: &[Row], tokens: Option<f64>, unit: &str) -> String {
    let rate = format!("{unit}/s");
    let mut header = vec![
        "cluster", "hosts", "devices", "step", &rate, "MFU", "memory",
    ];
    let has_cost = rows.iter().any(|r| r.cost.is_some());
    if tokens.is_some() {
        header.push("time");
    }
    if has_cost {
        header.push("cost");
    }
    let cells = |r: &Row| {
        let of = |show: &dyn Fn(&Point) -> String| r.point.as_ref().map_or("-".into(), show);
        let mut cells = vec![
            r.cluster.clone(),
            r.hosts.to_string(),
            r.devices.to_string(),
            of(&|p| Seconds(p.step_time_s).to_string()),
            of(&|p| count(p.tokens_per_s)),
            of(&|p| percent(p.mfu)),
            of(&|p| p.peak_bytes.to_string()),
        ];
        if tokens.is_some() {
            cells.push(r.days.map_or("-".into(), days_of));
        }
        if has_cost {
            cells.push(r.cost.map_or("-".into(), price));
        }
        cells
    };
    let mut w = table(&header, rows.iter().map(cells).collect(), 1);
    w += "\n\nTheir plans\n";
    let with = rows.iter().filter_map(|r| Some((r, r.point.as_ref()?)));
    let plan = |(r, p): (&Row, &Point)| {
        let mut cells = vec![r.cluster.clone(), r.devices.to_string()];
        cells.extend(p.degrees.cells());
        cells
    };
    let mut header = vec!["cluster", "devices"];
    header.extend(Degrees::HEADER);
    w += &table(&header, with.map(plan).collect(), 1);
    for r in rows {
        if let Some(reason) = &r.reason {
            let line = format!(
                "{} on {}: {reason}.",
                r.cluster,
                counted(r.devices, "device")
            );
            w += "\n";
            w += &wrapped(&line);
        }
    }
    w
}

/// The rows as comma-separated values, with the units in the header.
fn csv(rows: &[Row]) -> String {
    let mut w = String::from(
        "cluster,hosts,devices,step_time_s,tokens_per_s,mfu,peak_bytes,days,cost,plan,reason\n",
    );
    for r in rows {
        let number = |x: Option<f64>| x.map_or(String::new(), |x| x.to_string());
        let p = r.point.as_ref();
        let cells = [
            r.cluster.clone(),
            r.hosts.to_string(),
            r.devices.to_string(),
            number(p.map(|p| p.step_time_s)),
            number(p.map(|p| p.tokens_per_s)),
            number(p.map(|p| p.mfu)),
            p.map_or(String::new(), |p| p.peak_bytes.0.to_string()),
            number(r.days),
            number(r.cost),
            p.map_or(String::new(), |p| p.degrees.to_string()),
            r.reason.clone().unwrap_or_default(),
        ];
        w += &published::csv::line(&cells);
    }
    w
}

/// The curves of a sweep, one for each cluster.
fn series(rows: &[Row]) -> Vec<draw::Series> {
    let mut all: Vec<draw::Series> = Vec::new();
    for r in rows {
        let i = all
            .iter()
            .position(|s| s.name == r.cluster)
            .unwrap_or_else(|| {
                all.push(draw::Series {
                    name: r.cluster.clone(),
                    speeds: Vec::new(),
                    costs: Vec::new(),
                });
                all.len() - 1
            });
        let devices = f64::from(r.devices);
        let speed = r.point.as_ref().map(|p| (devices, p.tokens_per_s));
        all[i].speeds.extend(speed);
        all[i].costs.extend(r.cost.map(|c| (devices, c)));
    }
    all
}
