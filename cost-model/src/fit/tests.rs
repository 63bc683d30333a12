use super::matmul::flops;
use super::*;
use ir::cluster::HalfSize;

const LAUNCH: f64 = 2e-6;
const RATE: f64 = 8e10;
const HALF: HalfSize = HalfSize {
    m: 5.0,
    n: 12.0,
    k: 33.0,
};
const VECTOR: f64 = 2e9;
const CONVERSION: f64 = 0.7e-9;

fn point(what: &str, size: &[u64], seconds: f64) -> MeasuredPoint {
    MeasuredPoint {
        what: what.into(),
        size: size.to_vec(),
        median_s: seconds,
        spread_s: 0.0,
        n: 7,
    }
}

pub(super) fn machine(n_ranks: u32) -> Machine {
    Machine {
        cores: 2,
        memory_bytes: Bytes(8 << 30),
        n_ranks,
        attention_block_rows: 64,
    }
}

fn matmul_s(m: u64, n: u64, k: u64, rate: f64) -> f64 {
    let share = |x: u64, h: f64| x as f64 / (x as f64 + h);
    2.0 * (m * n * k) as f64 / (rate * share(m, HALF.m) * share(n, HALF.n) * share(k, HALF.k))
}

/// Points of a machine with the parameters above: 10 GB/s copies; collectives of 3 GB/s copied,
/// 5 GB/s reduced and 20 us.
pub(super) fn points(n_ranks: u32) -> Vec<MeasuredPoint> {
    let mut all = vec![
        point("launch", &[], LAUNCH),
        point("launch", &[], 0.9 * LAUNCH),
        point("launch", &[], 1.5 * LAUNCH),
    ];
    for m in [16, 64, 512, 100_000] {
        for n in [16, 64, 512, 100_000] {
            for k in [16, 64, 512, 100_000] {
                all.push(point(
                    "matmul f32",
                    &[m, n, k],
                    LAUNCH + matmul_s(m, n, k, RATE),
                ));
            }
        }
    }
    all.push(point(
        "matmul bf16",
        &[64, 64, 64],
        LAUNCH + matmul_s(64, 64, 64, RATE / 2.0) + 3.0 * 64.0 * 64.0 * CONVERSION,
    ));
    // 6e6 bytes at 10 GB/s, and 3e6 elements converted; then work that takes longer than bytes.
    all.push(point(
        "convert bf16",
        &[1_000_000, 6_000_000, 3_000_000],
        LAUNCH + 6e6 / 1e10 + 3e6 * CONVERSION,
    ));
    all.push(point(
        "convert bf16",
        &[10_000_000, 4_000_000, 2_000_000],
        LAUNCH + 1e7 / VECTOR + 2e6 * CONVERSION,
    ));
    for bytes in [1 << 20, 1 << 24] {
        all.push(point("copy", &[bytes], LAUNCH + 2.0 * bytes as f64 / 1e10));
    }
    all.push(point(
        "vector add",
        &[1000, 12_000_000],
        LAUNCH + 12e6 / 1e10,
    ));
    all.push(point(
        "vector gelu",
        &[10_000_000, 8_000_000],
        LAUNCH + 1e7 / VECTOR,
    ));
    // Products at a quarter of the rate of matmuls of their shape, and twice the vector work;
    // of the gradient at a third, and five times.
    for (what, products, vector) in [
        ("attention f32", 4.0, 2.0),
        ("attention_grad f32", 3.0, 5.0),
    ] {
        for (rows, d) in [(64u64, 32u64), (128, 64), (512, 64)] {
            let blocks = 0.5 * (1.0 + 64.0 / rows as f64);
            let size = [4 * rows * rows * d, 4 * rows * rows, 1000, rows, rows, d];
            let seconds = products * 2.0 * blocks * matmul_s(rows, rows, d, RATE)
                + vector * size[1] as f64 / VECTOR;
            all.push(point(what, &size, LAUNCH + seconds));
        }
    }
    // Kernels that take half as much again as the mean, and half of it.
    for (what, factor) in [("vector slow", 1.5), ("vector fast", 0.5)] {
        let size = [1_000_000, 800_000];
        all.push(point(what, &size, LAUNCH + factor * 1e6 / VECTOR));
    }
    for bytes in [1u64 << 8, 1 << 14, 1 << 20, 1 << 24] {
        for n in [2u64, 4].into_iter().filter(|&n| n <= u64::from(n_ranks)) {
            let (copy, reduce) = (bytes as f64 / 3e9, bytes as f64 / 5e9);
            let at_once = 20e-6 + copy + n as f64 * reduce;
            let all_reduce = at_once.min(40e-6 + 2.0 * copy + reduce);
            let size = [bytes, n, u64::from(n_ranks)];
            all.push(point("all_reduce", &size, all_reduce));
            all.push(point(
                "all_gather",
                &size,
                all_reduce.min(20e-6 + (1.0 + 1.0 / n as f64) * copy),
            ));
            all.push(point(
                "reduce_scatter",
                &size,
                all_reduce.min(20e-6 + copy + reduce),
            ));
        }
    }
    for bytes in [1u64 << 10, 1 << 20] {
        all.push(point("send", &[bytes], 30e-6 + bytes as f64 / 4e9));
    }
    all.push(point("to host", &[1 << 20], 1e-4));
    all.push(point("to host", &[1 << 24], 2e-3));
    all.push(point("write", &[1 << 24], 4e-2));
    all
}

fn near(a: f64, b: f64, tolerance: f64) {
    assert!(
        (a / b - 1.0).abs() < tolerance,
        "{a} is not within {tolerance} of {b}"
    );
}

#[test]
fn known_parameters_are_recovered() {
    let cluster = fit(&points(4), &machine(4)).unwrap();
    let d = &cluster.device;
    near(d.launch_s, LAUNCH, 1e-12);
    let best = points(4)
        .iter()
        .filter(|p| p.what == "matmul f32")
        .map(|p| flops(p) / (p.median_s - LAUNCH))
        .fold(0.0, f64::max);
    near(d.peak_flops_per_s[&DType::F32], best, 1e-9);
    // The asymptote is just above the best rate measured, which bounds the fit.
    near(
        d.peak_flops_per_s[&DType::F32] * d.matmul_efficiency[&DType::F32],
        RATE,
        2e-3,
    );
    near(d.matmul_half_size.m, HALF.m, 0.02);
    near(d.matmul_half_size.n, HALF.n, 0.02);
    near(d.matmul_half_size.k, HALF.k, 0.02);
    near(d.matmul_efficiency[&DType::Bf16], 0.5, 5e-3);
    near(d.conversion_s_per_element[&DType::Bf16], CONVERSION, 1e-9);
    assert!(!d.peak_flops_per_s.contains_key(&DType::F16));
    assert!(!d.conversion_s_per_element.contains_key(&DType::F16));
    near(
        d.memory_bandwidth_bytes_per_s * d.memory_efficiency,
        1e10,
        1e-9,
    );
    near(d.vector_flops_per_s, VECTOR, 1e-9);
    let storage = cluster.storage.unwrap();
    near(storage.device_to_host_bytes_per_s, 16777216.0 / 2e-3, 1e-9);
    near(storage.host_write_bytes_per_s, 16777216.0 / 4e-2, 1e-9);
    near(d.attention_efficiency, 0.25, 5e-3);
    let kernels = d.kernels.as_ref().unwrap();
    near(kernels.factor("attention products"), 1.0, 1e-9);
    near(kernels.factor("attention"), 2.0, 2e-2);
    near(kernels.factor("attention_grad products"), 0.75, 1e-2);
    near(kernels.factor("attention_grad"), 5.0, 2e-2);
    near(kernels.factor("slow"), 1.5, 1e-6);
    near(kernels.factor("fast"), 0.5, 1e-6);
    near(kernels.factor("add"), 1.0, 1e-6);
    near(kernels.factor("gelu"), 1.0, 1e-6);
    assert_eq!(cluster.pool.unwrap().compute_devices, 2.0);
    near(cluster.levels[0].latency_s, 30e-6, 1e-3);
    near(cluster.levels[0].bandwidth_bytes_per_s, 4e9, 1e-3);
    let shared = cluster.levels[0].shared_memory.unwrap();
    near(shared.meeting_s, 20e-6, 1e-3);
    near(shared.copy_bytes_per_s, 3e9, 1e-3);
    near(shared.reduce_bytes_per_s, 5e9, 1e-3);
    assert_eq!(cluster.measured, points(4));
    assert_eq!(cluster.usable_bytes(), 2 << 30);
    assert!(
        cluster.sources["device.launch_s"].contains("3 points")
            && cluster.sources["device.launch_s"].contains("median of 7")
    );
    // 64 shapes of f32; the peak of bf16 says whose it is.
    let source = |key: &str| cluster.sources[&format!("device.{key}")].as_str();
    assert!(source("peak_flops_per_s").contains("64 points of `matmul f32`"));
    assert!(source("peak_flops_per_s.bf16").contains("compute bf16 in f32"));
    assert!(source("matmul_efficiency.bf16").contains("1 points of `matmul bf16`"));
    assert!(source("conversion_s_per_element.bf16").contains("2 points of `convert bf16`"));
    assert!(
        !cluster
            .sources
            .keys()
            .any(|k| k.ends_with("f16") && !k.ends_with("bf16"))
    );
}

#[test]
fn fits_are_deterministic_and_survive_a_file() {
    let cluster = fit(&points(4), &machine(4)).unwrap();
    assert_eq!(fit(&points(4), &machine(4)).unwrap(), cluster);
    assert_eq!(
        crate::presets::parse(&crate::presets::print(&cluster).unwrap()).unwrap(),
        cluster
    );
}

#[test]
fn noise_moves_parameters_a_little() {
    let mut noisy = points(4);
    for (i, p) in noisy
        .iter_mut()
        .enumerate()
        .filter(|(_, p)| p.what != "launch")
    {
        p.median_s *= 1.0 + 0.05 * if i % 2 == 0 { 1.0 } else { -1.0 };
    }
    let cluster = fit(&noisy, &machine(4)).unwrap();
    near(
        cluster.device.peak_flops_per_s[&DType::F32]
            * cluster.device.matmul_efficiency[&DType::F32],
        RATE,
        0.1,
    );
    let shared = cluster.levels[0].shared_memory.unwrap();
    near(shared.copy_bytes_per_s, 3e9, 0.15);
    near(shared.meeting_s, 20e-6, 0.15);
}

#[test]
fn a_single_rank_needs_no_links() {
    let alone: Vec<MeasuredPoint> = points(2)
        .into_iter()
        .filter(|p| !p.what.starts_with("all_") && p.what != "reduce_scatter")
        .collect();
    let cluster = fit(&alone, &machine(1)).unwrap();
    assert!(cluster.levels.is_empty() && cluster.pool.unwrap().compute_devices == 1.0);
    assert_eq!(
        fit(&alone, &machine(4)),
        Err(FitError::Missing {
            what: "all_reduce".into()
        })
    );
}

#[test]
fn useless_points_are_named() {
    let without = |what: &str| {
        points(4)
            .into_iter()
            .filter(|p| !p.what.starts_with(what))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        fit(&without("matmul"), &machine(4)).unwrap_err(),
        FitError::Missing {
            what: "matmul f32".into()
        }
    );
    assert_eq!(
        fit(&without("vector "), &machine(4)).unwrap_err(),
        FitError::Missing {
            what: "vector ...".into()
        }
    );
    let mut bad = points(4);
    bad[5].size.pop();
    assert!(matches!(
        fit(&bad, &machine(4)),
        Err(FitError::Point { index: 5, .. })
    ));
    bad[5].size.push(3);
    bad[5].median_s = f64::NAN;
    assert!(matches!(
        fit(&bad, &machine(4)),
        Err(FitError::Point { index: 5, .. })
    ));
}
