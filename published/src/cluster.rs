//! The machine of a row: hosts of the catalogue's device, joined by the row's links, and the
//! software of its framework's generation.

use crate::facts::{DeviceFact, Facts, Interconnect};
use crate::row::Row;
use crate::{Unmodelled, assume, cells, network, precision, software};
use cost_model::presets::{Catalogue, System};
use frameworks::{Scaling, Software};
use ir::cluster::{Cluster, Device};
use ir::{Bytes, DType};

/// A run that was measured fitted its devices, so their capacity must not shape its plan.
const UNBOUNDED_MEMORY: Bytes = Bytes(1 << 60);

/// The machine that a row ran on.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// The hardware, with as much memory as asked for.
    pub cluster: Cluster,
    /// The software that drove it.
    pub software: Software,
}

/// The machine that a row ran on.
///
/// Fails where the device or the links are not in the data files, the GPUs do not make whole
/// hosts, or the device lacks the row's precision.
pub fn machine(row: &Row, facts: &Facts) -> Result<Machine, Unmodelled> {
    let (row, _) = assume::completed(row, facts)?;
    let row = &row;
    let total = count(row, "gpus_total")?;
    let per_host = count(row, "gpus_per_node")?.min(total);
    if !total.is_multiple_of(per_host) {
        return Err(Unmodelled::Feature(format!(
            "{total} GPUs in hosts of {per_host}"
        )));
    }
    let (device, links) = (facts.device(row)?, facts.interconnect(row)?);
    let catalogue = facts.catalogue();
    possible(row, catalogue, device, links)?;
    let hosts = hosts_of(catalogue, device);
    if count(row, "gpus_per_node")? > hosts.largest {
        return Err(Unmodelled::Cluster(format!(
            "`gpus_per_node` is {}, and a host of {} holds {} at most",
            count(row, "gpus_per_node")?,
            device.gpu,
            hosts.largest
        )));
    }
    let cards = network::cards(row, links, hosts.usual, per_host)?;
    // A row may call all of a domain, or another part of it, a host.
    let domain = links.domain_devices.map_or(per_host, |usual| {
        let is_whole =
            |n: &u32| n.is_multiple_of(per_host) && (total < *n || total.is_multiple_of(*n));
        let found = [usual, hosts.largest].into_iter().find(is_whole);
        found.unwrap_or(if usual.is_multiple_of(per_host) {
            usual
        } else {
            per_host
        })
    });
    let domain = domain.min(total);
    let system = System {
        preset: String::new(),
        name: format!("{} x {}", total / per_host, device.gpu),
        n_hosts: total / per_host,
        device: device.device.clone(),
        devices_per_host: per_host,
        inside: links.inside.clone(),
        domain_devices: Some(domain),
        between: Some(links.between.clone()),
        cards,
        source: links.source.clone(),
    };
    let mut cluster = catalogue.cluster(&system).map_err(Unmodelled::Cluster)?;
    if domain == total {
        cluster.levels.truncate(1);
    }
    network::set_stated_rate(
        row.required("interconnect")?,
        cards,
        hosts.usual,
        &mut cluster,
    );
    cluster.device.memory_bytes = UNBOUNDED_MEMORY;
    let made_for = software::of_row(row, facts)?;
    let types = precision::types(row)?;
    let (_, generation) = facts.generation(row)?;
    if generation.tf32 && types.activations.compute() == DType::F32 {
        multiply_in_tf32(&mut cluster.device);
    }
    let profile = facts.profile(&made_for, Some(device), types.activations);
    let software = profile.map_err(Unmodelled::Cluster)?.software;
    let has_rate = |dtype: &DType| cluster.device.peak_flops_per_s.contains_key(dtype);
    if let Some(dtype) = software.narrow_types().find(|d| !has_rate(d)) {
        return Err(Unmodelled::Feature(format!(
            "{} on {}",
            dtype.name(),
            device.gpu
        )));
    }
    match cluster.problems().first() {
        None => Ok(Machine { cluster, software }),
        Some(problem) => Err(Unmodelled::Cluster(problem.clone())),
    }
}

/// Whether a row's job has so many hosts that it hangs on its links without synchronous launches.
pub(crate) fn has_synchronous_launches(row: &Row, facts: &Facts) -> Result<bool, Unmodelled> {
    let links = facts.interconnect(row)?;
    let total = count(row, "gpus_total")?;
    let hosts = total / count(row, "gpus_per_node")?.min(total).max(1);
    Ok(links.synchronous_from_hosts.is_some_and(|n| hosts >= n))
}

/// Lets matmuls of f32 run on tensor cores: TF32 has half of bf16's rate on all parts from Ampere on
/// (NVIDIA's data sheets, dense), and is taken to reach bf16's share of it.
fn multiply_in_tf32(device: &mut Device) {
    let peak = device.peak_flops_per_s.get(&DType::Bf16).copied();
    let share = device.matmul_efficiency.get(&DType::Bf16).copied();
    if let (Some(peak), Some(share)) = (peak, share) {
        device.peak_flops_per_s.insert(DType::F32, peak / 2.0);
        device.matmul_efficiency.insert(DType::F32, share);
    }
}

/// The scaling that a device has matmuls for: blocks of 32 are Blackwell's; tables whose columns
/// say `fp8-mx/blockwise` mean blocks of 128 on Hopper.
pub(crate) fn scaling_of(
    row: &Row,
    device: &DeviceFact,
    scaling: Scaling,
) -> Result<Scaling, Unmodelled> {
    if scaling != Scaling::Block32 || device.any_layout {
        return Ok(scaling);
    }
    let text = row.required("precision")?;
    match text.to_lowercase().contains("blockwise") {
        true => Ok(Scaling::Block128),
        false => Err(Unmodelled::Feature(format!(
            "{text} on {}, which has no matmuls with a scale for 32 elements; `fp8-sc` has one for 128",
            device.gpu
        ))),
    }
}

/// Devices of hosts.
struct Hosts {
    /// In those that the catalogue's systems are made of.
    usual: u32,
    /// The most that anybody calls a host: a domain is one, too.
    largest: u32,
}

/// The hosts that a device comes in; of a device in no system nothing is known, and any will do.
fn hosts_of(catalogue: &Catalogue, device: &DeviceFact) -> Hosts {
    let own = |s: &&System| s.device == device.device;
    let systems = || catalogue.systems().iter().filter(own);
    let domain = |s: &System| s.domain_devices.unwrap_or(0).max(s.devices_per_host);
    let known = systems().map(domain).max().unwrap_or(u32::MAX);
    Hosts {
        usual: systems().map(|s| s.devices_per_host).min().unwrap_or(1),
        largest: known.max(device.largest_host.unwrap_or(0)),
    }
}

/// Assumptions on a row's machine, beside or against its cells: a network that they do not
/// state or state otherwise, words that nothing reads, the rate of a type that the device lacks.
pub fn assumed(row: &Row, facts: &Facts, cluster: &Cluster) -> Result<Vec<String>, Unmodelled> {
    let catalogue = facts.catalogue();
    let entries = (facts.device(row)?, facts.interconnect(row)?);
    let mut assumed = cells::assumed(row, entries, catalogue, cluster)?;
    let peaks = &cluster.device.peak_flops_per_s;
    let compute = precision::types(row)?.activations.compute();
    let slowest = peaks.iter().min_by(|a, b| a.1.total_cmp(b.1));
    if let Some((slowest, _)) = slowest.filter(|_| !peaks.contains_key(&compute)) {
        assumed.push(format!("{}_rate={}", compute.name(), slowest.name()));
    }
    Ok(assumed)
}

/// Refuses an interconnect that the row's GPU is not made with: NVLink of another generation, or a
/// domain beyond the host where no system of the device has one.
fn possible(
    row: &Row,
    catalogue: &Catalogue,
    device: &DeviceFact,
    links: &Interconnect,
) -> Result<(), Unmodelled> {
    let cells = format!(
        "`gpu` {} and `interconnect` {}",
        row.required("gpu")?,
        row.required("interconnect")?
    );
    if let Some(own) = catalogue.foreign_nvlink(&device.device, &links.inside) {
        return Err(Unmodelled::Cluster(format!(
            "{cells} do not go together: inside a host the device has {own}, not {}",
            links.inside
        )));
    }
    if links.domain_devices.is_some() && !catalogue.has_domain(&device.device) {
        return Err(Unmodelled::Cluster(format!(
            "{cells} do not go together: no system of the device has NVLink beyond a host"
        )));
    }
    Ok(())
}

/// Memory of the row's device, as the catalogue has it.
pub fn memory(row: &Row, facts: &Facts) -> Result<Bytes, Unmodelled> {
    let device = facts.catalogue().device(&facts.device(row)?.device);
    device.map(|d| d.memory_bytes).map_err(Unmodelled::Cluster)
}

fn count(row: &Row, column: &str) -> Result<u32, Unmodelled> {
    let n = row.required_count(column)?;
    u32::try_from(n).map_err(|_| Unmodelled::Cluster(format!("`{column}` is {n}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster(row: &Row, facts: &Facts) -> Result<Cluster, Unmodelled> {
        machine(row, facts).map(|m| m.cluster)
    }

    #[test]
    fn a_device_has_the_links_that_it_is_made_with() {
        let of = |cells: &str| {
            let header = "gpu,gpus_total,gpus_per_node,interconnect,framework,precision";
            let text = format!("{header}\n{cells},Megatron-LM,fp16\n");
            let row = crate::row::rows(&crate::csv::parse(&text).unwrap()).remove(0);
            let made = cluster(&row, &Facts::built_in());
            made.map_or_else(|e| e.to_string(), |c| format!("{}", c.n_devices()))
        };
        assert_eq!(
            of("V100-16GB,8,8,NVLink5+NVSwitch; NDR"),
            "cluster: `gpu` V100-16GB and `interconnect` NVLink5+NVSwitch; NDR do not go together: \
             inside a host the device has nvlink2-mesh, not nvlink5"
        );
        let said = of("B200,64,8,NVLink5 NVL72");
        assert!(said.ends_with("has NVLink beyond a host"), "{said}");
        // A domain of 72 has hosts of four, and nothing is wrong with rows that call it nine of
        // eight.
        assert_eq!(of("GB200,64,8,NVLink5 NVL72"), "64");
        assert_eq!(of("V100-16GB,8,8,NVLink2+NVSwitch"), "8");
    }

    fn row(cells: &str) -> Row {
        let header = "gpu,gpus_total,gpus_per_node,interconnect,framework,precision";
        let text = format!("{header}\n{cells}\n");
        crate::row::rows(&crate::csv::parse(&text).unwrap()).remove(0)
    }

    #[test]
    fn hosts_hold_what_hosts_of_the_device_hold() {
        let of = |cells: &str| {
            let row = row(&format!("{cells},Megatron-LM,bf16"));
            let made = cluster(&row, &Facts::built_in());
            made.map_or_else(|e| e.to_string(), |c| format!("{}", c.devices_per_host))
        };
        for n in [32, 64] {
            assert_eq!(
                of(&format!("A100,64,{n},NVLink3+NVSwitch")),
                format!("cluster: `gpus_per_node` is {n}, and a host of A100 holds 8 at most")
            );
        }
        // Also where there are fewer GPUs in all.
        assert!(of("H100-80GB,8,64,NVLink4+NVSwitch").ends_with("holds 8 at most"));
        assert_eq!(of("V100,32,16,NVLink2+NVSwitch"), "16");
        assert_eq!(of("V100-32GB (DGX-2),32,16,NVLink2+NVSwitch"), "16");
        assert_eq!(of("A100-40GB,32,16,NVLink3+NVSwitch"), "16");
        for n in [4, 8, 32, 64] {
            assert_eq!(of(&format!("GB200,128,{n},NVLink5 NVL72")), n.to_string());
        }
        assert_eq!(of("GB200,144,72,NVLink5 NVL72"), "72");
    }

    /// Every GPU of a rack has a port, whatever part of it a row calls a host.
    #[test]
    fn a_host_that_is_a_rack_has_the_cards_of_one() {
        let port = |per_node: u32| {
            let cells = format!("GB200,576,{per_node},NVLink5 NVL72,Megatron-LM,bf16");
            let made = cluster(&row(&cells), &Facts::built_in()).unwrap();
            let network = &made.levels[1];
            network.bandwidth_bytes_per_s / f64::from(network.devices_per_port)
        };
        assert_eq!((port(72), port(8)), (port(4), port(4)));
        // Also of a rate that the cell states of a host.
        let port = |per_node: u32| {
            let cells = "NVLink5 NVL72 domain; NDR 800Gb/s per node,Megatron-LM,bf16";
            let row = row(&format!("GB200,576,{per_node},{cells}"));
            let network = &cluster(&row, &Facts::built_in()).unwrap().levels[1];
            network.bandwidth_bytes_per_s / f64::from(network.devices_per_port)
        };
        assert_eq!((port(4), port(8)), (25e9, 25e9));
    }

    #[test]
    fn network_cards_are_those_that_the_cell_counts() {
        let port = |interconnect: &str| {
            let cells = format!("H100-80GB,16,8,{interconnect},Megatron-LM,bf16");
            let made = cluster(&row(&cells), &Facts::built_in())?;
            let network = &made.levels[1];
            let port = network.bandwidth_bytes_per_s / f64::from(network.devices_per_port);
            Ok::<f64, Unmodelled>(port / 1e9)
        };
        assert_eq!(port("NVLink4+NVSwitch; NDR IB"), Ok(50.0));
        assert_eq!(port("NVLink4+NVSwitch; 8x NDR 400Gb/s"), Ok(50.0));
        assert_eq!(port("NVLink4+NVSwitch; 4x NDR"), Ok(25.0));
        assert_eq!(port("NVLink4+NVSwitch; 8x 25Gb/s Ethernet"), Ok(3.125));
        assert_eq!(port("NVLink4 + NVSwitch; 400Gb/s RoCE per GPU"), Ok(50.0));
        assert_eq!(port("NVLink4"), Ok(50.0));
        assert_eq!(port("NVLink4+NVSwitch; 1x NDR (one port)"), Ok(6.25));
        for wrong in ["99x NDR", "-8x NDR", "4.5x NDR"] {
            let said = port(&format!("NVLink4+NVSwitch; {wrong}")).unwrap_err();
            let said = said.to_string();
            assert!(said.contains("expected 1 to 64 network cards"), "{said}");
        }
    }

    /// Cells of published tables, and such as users wrote.
    #[test]
    fn what_a_cell_says_otherwise_is_assumed_aloud() {
        let of = |gpu: &str, interconnect: &str, precision: &str| {
            let cells = format!("{gpu},16,8,{interconnect},Megatron-LM,{precision}");
            let (row, facts) = (row(&cells), Facts::built_in());
            let made = cluster(&row, &facts).unwrap();
            assumed(&row, &facts, &made).unwrap().join(" ")
        };
        let h100 = |text: &str| of("H100-80GB-SXM5 (GCP A3)", text, "bf16");
        for silent in [
            "NVLink4+NVSwitch; 400Gb/s RDMA per GPU",
            "NVLink4+NVSwitch; 400Gb/s RoCE per GPU",
            "NVLink4+NVSwitch; 800Gb/s per node",
            "NVLink4+NVSwitch; 8x NDR 400Gb/s",
            "NVLink4+NVSwitch; 8x NDR IB 400Gb/s (Eos; fabric from memory)",
            "NVLink4+NVSwitch; 8x50 GB/s IB",
            "NVLink4+NVSwitch; EFA 3200Gb/s per node",
            "NVLink4; NDR",
        ] {
            assert_eq!(h100(silent), "", "{silent}");
        }
        assert_eq!(h100("NVLink4+NVSwitch; not stated"), "between=roce-400*8");
        let tcp = "NVLink4+NVSwitch; GPUDirect-TCPX 8x200Gb/s... (A3 High)";
        assert_eq!(h100(tcp), "between=infiniband-ndr*8@200Gb/s");
        assert_eq!(
            h100("NVLink4+NVSwitch; NDR 400Gb/s per node"),
            "between=infiniband-ndr*8@50Gb/s"
        );
        assert_eq!(
            h100("NVLink4+NVSwitch; 56Gb/s per card"),
            "between=infiniband-ndr*8@56Gb/s"
        );
        let slow = "NVLink4+NVSwitch; 8x 25Gb/s Ethernet";
        assert_eq!(h100(slow), "between=infiniband-ndr*8@25Gb/s");
        assert_eq!(
            h100("NVLink4 + NVSwitch; EFA 1600 Gbps"),
            "between=efa-100*32@50Gb/s"
        );
        assert_eq!(h100("NVLink4+NVSwitch; 4x HDR"), "between=infiniband-ndr*4");
        assert_eq!(
            h100("NVLink4+NVSwitch; NDR 200Gb/s per GPU; oversubscribed"),
            "between=infiniband-ndr*8@200Gb/s interconnect_not_read=oversubscribed"
        );
        let a100 = |text: &str| of("A100-80GB (Ampere)", text, "bf16");
        for silent in [
            "NVLink3+NVSwitch; 1600 Gb/s per node RoCE",
            "NVLink3+NVSwitch; 400Gb/s per node",
            "NVLink3+NVSwitch; 4x100Gb RoCE per node",
            "NVLink3+NVSwitch; 800 Gb/s per node inter-node (vTrain config)",
            "NVLink3+NVSwitch; 8x HDR IB 200Gb/s (Selene)",
            "NVLink3+NVSwitch; HDR IB",
            "NVLink; 4x Omni-Path 100Gb/s per node (Jean Zay)",
        ] {
            assert_eq!(a100(silent), "", "{silent}");
        }
        let roce = "NVLink3+NVSwitch; 8x200Gb/s RoCE (from memory)";
        assert_eq!(a100(roce), "between=infiniband-hdr*8");
        let of_gpu = |gpu: &str| of(gpu, "NVLink3+NVSwitch; 8x HDR", "fp16");
        assert_eq!(of_gpu("A100-40GB (DGX-A100)"), "");
        assert_eq!(of_gpu("A100-80GB-SXM4-400W"), "");
        assert_eq!(
            of_gpu("A100-80GB-SXM4 275W underclocked"),
            "gpu_not_read=275W+UNDERCLOCKED"
        );
        let edr = "NVLink2 (hybrid cube mesh); 100Gb/s IB per node";
        assert_eq!(of("V100-16GB-SXM2", edr, "fp16"), "");
        // Volta has no matmuls in bf16.
        assert_eq!(of("V100-16GB-SXM2", edr, "bf16"), "bf16_rate=f32");
    }

    #[test]
    fn hopper_has_no_blocks_of_thirty_two() {
        let of = |gpu: &str, precision: &str| {
            let cells =
                format!("{gpu},8,8,NVLink4+NVSwitch,Megatron-Bridge/Megatron-Core,{precision}");
            machine(&row(&cells), &Facts::built_in()).map(|m| m.software.narrow.map(|n| n.scaling))
        };
        let refused = of("H100-80GB", "mxfp8").unwrap_err().to_string();
        assert!(
            refused.contains("mxfp8 on H100-80GB, which has no"),
            "{refused}"
        );
        assert_eq!(
            of("H100-80GB", "fp8-mx/blockwise"),
            Ok(Some(Scaling::Block128))
        );
        let cells = "B200,8,8,NVLink5+NVSwitch,Megatron-Bridge/Megatron-Core,mxfp8";
        let blackwell = machine(&row(cells), &Facts::built_in()).unwrap();
        assert_eq!(blackwell.software.narrow.unwrap().scaling, Scaling::Block32);
    }

    /// A network that no rank uses is nothing to assume.
    #[test]
    fn one_host_needs_no_network() {
        let cells = "A100,8,8,NVLink3+NVSwitch; not stated,Megatron-LM,fp16";
        let (row, facts) = (row(cells), Facts::built_in());
        let made = cluster(&row, &facts).unwrap();
        assert_eq!(assumed(&row, &facts, &made), Ok(Vec::new()));
    }
}
