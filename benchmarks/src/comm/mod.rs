//! The communication model against published measurements: rows, predictions, and the fit of
//! the catalogue's fitted figures to them.
//!
//! Invariants: a row's cluster is named here and nowhere else, by what its source says of it
//! (assumptions are marked); the fit changes nothing but [`Fitted`].

mod fit;
mod report;
mod rows;
#[cfg(test)]
mod tests;

pub use fit::{Parameter, fit, loss, parameters};
pub use report::{report, section};
pub use rows::{Row, rows};

use cost_model::collectives::{Algorithm, Group, send_time};
use cost_model::presets::{Catalogue, Fitted, Parameters, with_hosts};
use ir::cluster::Cluster;
use ir::collective::CollectiveKind;
use ir::mesh::{Axis, DeviceMesh};
use ir::{AxisId, LogicalMesh, Rank, Reduction};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// The largest message of a benchmark whose source only says "peak".
pub const LARGE_BYTES: u64 = 16 << 30;

/// The measured quantity of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A collective.
    Collective(CollectiveKind),
    /// A message from one device to another.
    Send,
}

/// A measurement that the model can predict.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// The row it stands for.
    pub row: Row,
    /// The table that published it: rows of one machine and one campaign.
    pub table: String,
    /// A preset or composition, and its number of hosts.
    pub system: (&'static str, u32),
    /// The measurement.
    pub what: What,
    /// The ranks of the group.
    pub ranks: u32,
    /// The algorithm that the source says it forced.
    pub forced: Option<Algorithm>,
    /// The bytes, as `ir::collective` defines them.
    pub bytes: u64,
    /// Measured seconds.
    pub seconds: f64,
}

/// Splits rows into cases that the model can predict, and rows that it cannot with the reason.
pub fn cases(rows: &[Row]) -> (Vec<Case>, Vec<(Row, &'static str)>) {
    let (mut cases, mut left) = (Vec::new(), Vec::new());
    for row in rows {
        match case(row) {
            Ok(case) => cases.push(case),
            Err(why) => left.push((row.clone(), why)),
        }
    }
    (cases, left)
}

fn case(row: &Row) -> Result<Case, &'static str> {
    const SUM: Reduction = Reduction::Sum;
    let what = match row.collective.as_str() {
        "all_reduce" => What::Collective(CollectiveKind::AllReduce(SUM)),
        "reduce_scatter" => What::Collective(CollectiveKind::ReduceScatter(SUM)),
        "all_gather" => What::Collective(CollectiveKind::AllGather),
        "all_to_all" => What::Collective(CollectiveKind::AllToAll),
        "p2p copy unidirectional" => What::Send,
        "p2p copy duplex" => return Err("both directions together"),
        _ => return Err("between host and device, which the model does not have"),
    };
    let (table, system) = system(row).ok_or("its hardware is not in the catalogue")?;
    let ranks = row.gpus.unwrap_or(system.1 * 8);
    let n = f64::from(ranks);
    let bytes = row.bytes.unwrap_or(LARGE_BYTES);
    let share = match what {
        What::Collective(CollectiveKind::AllReduce(_)) => 2.0 * (n - 1.0) / n,
        What::Collective(_) => (n - 1.0) / n,
        What::Send => 1.0,
    };
    let size = bytes as f64;
    let seconds = match (row.time_us, row.algbw_gb_per_s, row.busbw_gb_per_s) {
        (Some(us), _, _) => us * 1e-6,
        (_, Some(rate), _) => size / (rate * 1e9),
        (_, _, Some(rate)) => share * size / (rate * 1e9),
        _ => return Err("neither time nor rate"),
    };
    Ok(Case {
        table,
        system,
        what,
        ranks,
        forced: forced(row),
        bytes,
        seconds,
        row: row.clone(),
    })
}

fn forced(row: &Row) -> Option<Algorithm> {
    match row.algo.as_str() {
        "NVLS" | "NVLSTree" => Some(Algorithm::InSwitch),
        a if a.starts_with("Ring") => Some(Algorithm::Ring),
        // The slide lists the same machine with and without reduction in the switch.
        _ if row.gpu == "H100 NVLink4" && row.collective == "all_reduce" => Some(Algorithm::Ring),
        _ => None,
    }
}

/// Finds the table and the cluster of a row.
fn system(row: &Row) -> Option<(String, (&'static str, u32))> {
    let nodes = row.nodes;
    let slide = row.source.contains("S62129 slide 12") || row.source.contains("S72583");
    let (table, name, hosts) = match (row.gpu.as_str(), nodes) {
        ("A100", Some(1)) => ("A100, 1 node", "dgx-a100-80gb", 1),
        ("H200", Some(1)) if row.algo.starts_with("NVLS (") => ("H200, 1 node", "dgx-h200", 1),
        ("H200", Some(1)) => ("H200, rings and NVLS by ranks", "dgx-h200", 1),
        ("H200", Some(4)) => ("H200, 4 nodes", "aws-p5en", 4),
        ("B200", Some(1)) if row.algo.is_empty() => ("B200, 1 node", "aws-p6-b200", 1),
        ("B200", Some(1)) => ("B200, rings and NVLS by ranks", "aws-p6-b200", 1),
        ("B200", Some(4)) => ("B200, 4 nodes", "aws-p6-b200", 4),
        // Assumption: its plateau of 92 GB/s says that a node has 100 GB/s.
        (g, Some(4)) if g.starts_with("unknown") => (
            "unknown, 4 nodes (100 GB/s for each assumed)",
            "a100-sxm-80gb+nvlink3+infiniband-edr",
            4,
        ),
        (g, Some(2)) if g.starts_with("H100 (p5") => ("H100, 2 nodes of p5", "aws-p5", 2),
        ("H100 NDR", Some(n)) if row.algo == "NVLSTree" => {
            ("H100, plot of NVLSTree", "dgx-h100", n)
        }
        ("H100 NDR", Some(n)) => ("H100, plot of 4 to 512 nodes", "dgx-h100", n),
        ("PCIe4", _) => ("slide", "a100-pcie-80gb", 1),
        ("PCIe5", _) => ("slide", "h100-pcie", 1),
        ("V100 NVLink2", _) => ("slide", "dgx-2", 1),
        ("A100 NVLink3", _) => ("slide", "dgx-a100-80gb", 1),
        ("H100 NVLink4" | "H100 NVLink4 SHARP", _) => ("slide", "dgx-h100", 1),
        ("B200 NVLink5", _) => ("slide", "dgx-b200", 1),
        // Assumption for the multi-node rows of slides: four nodes of eight.
        ("100GbE TCP", _) => ("slide", "a100-sxm-80gb+nvlink3+ethernet-100*1", 4),
        ("200Gb RDMA single NIC", _) => ("slide", "a100-sxm-80gb+nvlink3+infiniband-hdr*1", 4),
        ("400Gb RDMA single NIC", _) => ("slide", "h100-sxm+nvlink4+infiniband-ndr*1", 4),
        ("2x 200Gb RDMA", _) => ("slide", "a100-sxm-80gb+nvlink3+infiniband-hdr*2", 4),
        ("2x 400Gb RDMA", _) => ("slide", "h100-sxm+nvlink4+infiniband-ndr*2", 4),
        ("DGX A100 NVL3+8x200Gb", _) => ("slide", "dgx-a100-80gb", 4),
        ("DGX H100 NVL4+8x400Gb", _) => ("slide", "dgx-h100", 4),
        ("DGX H100 SHARP 8x400Gb", _) => ("slide", "dgx-h100-sharp", 4),
        ("GB200 NVL72", _) => ("slide", "gb200-nvl72", 8),
        _ => return None,
    };
    let table = match (slide, row.collective.as_str()) {
        (true, "all_to_all") => "slide, all-to-all".to_string(),
        (true, _) => "slide, all-reduce".to_string(),
        (false, _) => table.to_string(),
    };
    Some((table, (name, hosts)))
}

/// Predicts the seconds of every case with the given fitted figures. Fails when the catalogue lacks
/// a system that a case names.
pub fn predict(
    catalogue: &Catalogue,
    fitted: &Fitted,
    cases: &[&Case],
) -> Result<Vec<f64>, String> {
    // These collectives had the links to themselves, which those of a training do not.
    let mut catalogue = catalogue.clone().with_training(&Parameters::default())?;
    catalogue.fitted = fitted.clone();
    let mut clusters: BTreeMap<(&str, u32), Cluster> = BTreeMap::new();
    let mut all = Vec::with_capacity(cases.len());
    for case in cases {
        let (name, hosts) = case.system;
        let cluster = match clusters.entry(case.system) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(empty) => {
                let known = catalogue.systems().iter().find(|s| s.preset == name);
                let system = match known {
                    Some(system) => system.clone(),
                    None => catalogue.system(name)?,
                };
                empty.insert(with_hosts(catalogue.cluster(&system)?, hosts)?)
            }
        };
        all.push(seconds(cluster, case));
    }
    Ok(all)
}

fn seconds(cluster: &Cluster, case: &Case) -> f64 {
    let What::Collective(kind) = case.what else {
        return send_time(cluster, 0, 1, case.bytes).0;
    };
    let mesh = LogicalMesh {
        devices: DeviceMesh {
            first_rank: Rank(0),
            n_devices: case.ranks,
        },
        axes: vec![Axis {
            name: "all".into(),
            size: case.ranks,
        }],
    };
    let group = Group::new(cluster, &mesh, &[AxisId(0)]);
    let forced = group
        .candidates(kind)
        .iter()
        .filter(|c| Some(c.algorithm) == case.forced)
        .map(|c| c.seconds(case.bytes as f64))
        .reduce(f64::min);
    forced.unwrap_or_else(|| group.time(kind, case.bytes).0)
}
