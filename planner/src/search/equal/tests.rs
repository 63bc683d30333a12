//! The cuts against the exhaustive search: every submesh priced, and every pipeline over it
//! enumerated, on small models and clusters of random figures.

use super::super::bounds::RingOf;
use super::super::variants::{Variant, variants};
use super::super::{Submesh, boundary, sequences, submeshes};
use super::*;
use crate::inter_op::{Hop, InterOpOptions, brute_force};
use crate::pins::Pins;
use crate::{Effort, Watcher};
use ir::cluster::Cluster;
use ir::testing::Rng;
use ir::training::training_graph;
use ir::{Bytes, Graph, Precision, TrainSpec};
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

/// Costs that are the same but for the order in which they are summed.
const SAME: f64 = 1e-9;

/// The values that a [`Search`] borrows, with the microbatch size that is looked at.
struct Case {
    variants: Vec<Variant>,
    train: TrainSpec,
    cluster: Cluster,
    pins: Pins,
    submeshes: Vec<Submesh>,
    batch: u64,
    schedule: ScheduleKind,
    effort: Effort,
    watcher: Watcher,
}

impl Case {
    fn random(seed: u64) -> Case {
        let mut rng = Rng::new(seed);
        let blocks = rng.between(1, 3);
        let schedule = rng.pick(&[ScheduleKind::OneFOneB, ScheduleKind::GPipe]);
        let (batch, m) = (rng.pick(&[1, 2, 4, 8]), rng.pick(&[1, 2, 7, 64]));
        Case::of(&mut rng, blocks, batch, m, schedule)
    }

    /// Deep enough for interleaved stages, with microbatches enough to want them.
    fn deep(seed: u64) -> Case {
        let mut rng = Rng::new(seed);
        let blocks = rng.between(2, 6);
        let (batch, m) = (rng.pick(&[1, 2, 4]), rng.pick(&[4, 8]));
        Case::of(&mut rng, blocks, batch, m, ScheduleKind::OneFOneB)
    }

    fn of(rng: &mut Rng, blocks: u64, batch: u64, m: u64, schedule: ScheduleKind) -> Case {
        let sequence = rng.pick(&[64, 256]);
        let forward = gpt2(blocks, 128 * rng.between(1, 6), sequence);
        let train = TrainSpec {
            global_batch: batch * m,
            sequence,
            precision: Precision::Bf16,
            ..TrainSpec::default()
        };
        let cluster = cluster(rng);
        let kept = training_graph(&forward, &train).unwrap();
        Case {
            variants: variants(kept, &Pins::default()).unwrap(),
            submeshes: submeshes(&cluster, &Pins::default()),
            cluster,
            pins: Pins::default(),
            batch,
            schedule,
            train,
            effort: Effort::default(),
            watcher: Watcher::default(),
        }
    }

    fn set_memory(&mut self, bytes: u64) {
        let seen = self.submeshes.iter_mut().map(|s| &mut s.seen);
        for cluster in seen.chain([&mut self.cluster]) {
            cluster.device.memory_bytes = Bytes(bytes);
        }
    }

    fn m(&self) -> u32 {
        (self.train.global_batch / self.batch) as u32
    }

    fn search(&self) -> Search<'_> {
        Search {
            variants: &self.variants,
            train: &self.train,
            cluster: &self.cluster,
            pins: &self.pins,
            asked: &self.pins,
            to_beat: f64::INFINITY,
            headroom: None,
            without_hiding: false,
            one_by_one: false,
            sequences: sequences(&self.variants[0].layers, &self.pins).unwrap(),
            submeshes: &self.submeshes,
            boundary: boundary(&self.variants[0].training.graph),
            known: Mutex::new(Vec::new()),
            kept: Mutex::default(),
            choices: Default::default(),
            effort: self.effort,
            watcher: &self.watcher,
            name: "",
            has_found: AtomicBool::new(false),
        }
    }

    /// With one stage on each mesh: what is enumerated has no others.
    fn solve(&self, search: &Search<'_>, to_beat: f64) -> Solved {
        let to_beat = ToBeat {
            plain: to_beat,
            interleaved: 0.0,
        };
        let (m, none) = (self.m(), Larger::default());
        search.solve_equal(self.batch, m, self.schedule, 0, to_beat, &none)
    }
}

fn gpt2(n_layers: u64, hidden: u64, sequence: u64) -> Graph {
    let config = serde_json::json!({
        "model_type": "gpt2", "n_layer": n_layers, "n_head": hidden / 64, "n_embd": hidden,
        "n_positions": sequence, "vocab_size": 512, "tie_word_embeddings": false,
    });
    let config = import::ModelConfig::parse("config.json", config.to_string().as_bytes()).unwrap();
    let options = import::BuildOptions {
        sequence,
        dropout: 0.0,
    };
    import::model_graph(&config, &options).unwrap()
}

/// Up to eight devices. In one of three everything but matmuls is free, so that the bounds are
/// close to what pipelines cost; in some the memory decides.
fn cluster(rng: &mut Rng) -> Cluster {
    let mut cluster = cost_model::presets::load("dgx-a100-80gb", 1).unwrap();
    (cluster.n_hosts, cluster.devices_per_host) =
        rng.pick(&[(1, 2), (1, 4), (2, 2), (2, 4), (4, 2)]);
    cluster.levels[0].devices = cluster.devices_per_host;
    cluster.levels[1].devices = cluster.n_devices();
    let device = &mut cluster.device;
    if rng.one_in(3) {
        let half = &mut device.matmul_half_size;
        (half.m, half.n, half.k) = (0.0, 0.0, 0.0);
        (device.launch_s, device.multiprocessors) = (0.0, 0);
        device.attention_efficiency = 1.0;
        (
            device.memory_bandwidth_bytes_per_s,
            device.vector_flops_per_s,
        ) = (1e17, 1e20);
        for level in &mut cluster.levels {
            (level.latency_s, level.bandwidth_bytes_per_s) = (0.0, 1e17);
            level.protocols.clear();
            level.in_switch = None;
        }
    }
    cluster.device.memory_reserved_bytes = Bytes(0);
    cluster.device.memory_bytes = Bytes(rng.pick(&[1 << 20, 1 << 24, 1 << 26, 1 << 36, 1 << 36]));
    cluster
}

/// All shapes of a submesh, of which nothing is known.
fn ways_of(shapes: &[Shape], submesh: usize) -> Vec<Way<'_>> {
    let own = shapes
        .iter()
        .enumerate()
        .filter(|(_, s)| s.submesh == submesh);
    own.map(|(number, shape)| Way {
        number,
        shape,
        least: Least::NONE,
    })
    .collect()
}

/// All shapes of a submesh priced.
fn priced(
    case: &Case,
    search: &Search<'_>,
    shapes: &[Shape],
    submesh: usize,
) -> Vec<(usize, Result<Candidate, ModelError>)> {
    let ways = ways_of(shapes, submesh);
    let priced = search.candidates(&ways.iter().collect::<Vec<_>>(), case.batch, case.m(), 0);
    let priced = priced.into_iter();
    priced.filter_map(|(i, c)| Some((i, c?))).collect()
}

/// A bound on pipelines over a submesh by nothing but the time of all layers.
fn least_of_matmuls(case: &Case, search: &Search<'_>, submesh: usize, sum_s: f64) -> Least {
    let least = LeastTimes {
        sum_s,
        ..LeastTimes::default()
    };
    search.least_s(&least, submesh, (case.batch, case.m()), case.schedule)
}

/// The cost of the best pipeline over each submesh, each pipeline in turn. Wide shapes are tried
/// elsewhere.
fn exhaustive(case: &Case, search: &Search<'_>) -> Vec<Option<f64>> {
    let shapes = search.narrow_shapes(case.batch);
    let devices = search.cluster.n_devices();
    let options = InterOpOptions::new(case.m().into(), case.schedule);
    let best = |(i, submesh): (usize, &Submesh)| {
        let priced = priced(case, search, &shapes, i);
        let usable: Vec<Candidate> = priced.into_iter().filter_map(|(_, c)| c.ok()).collect();
        for candidate in &usable {
            search.stages(candidate);
        }
        let (all, n_stages) = (
            usable.iter().collect::<Vec<_>>(),
            (devices / submesh.n_devices) as usize,
        );
        let table = search.table(&all, &[i], n_stages, vec![1], 0, true);
        let bytes = search.boundary_bytes(case.batch);
        let transfer = |hop: Hop| {
            let next = devices - hop.behind as u32 * submesh.n_devices;
            let first = next - submesh.n_devices;
            Some(search.transfer_s(bytes, (i, first), (i, next)))
        };
        brute_force(&table, &transfer, &options).map(|c| c.total_s)
    };
    search.submeshes.iter().enumerate().map(best).collect()
}

#[test]
fn nothing_better_is_cut() {
    let slow = std::env::var("RUN_SLOW_TESTS").is_ok_and(|v| v == "1");
    let (mut n_cut, mut n_found, mut closest) = (0, 0, f64::INFINITY);
    for seed in 0..if slow { 80 } else { 24 } {
        let case = Case::random(seed);
        let search = case.search();
        let costs = exhaustive(&case, &search);
        let best = costs
            .iter()
            .flatten()
            .copied()
            .fold(f64::INFINITY, f64::min);

        // A bound is one, for each submesh by itself.
        let matmul_s = search.least_matmul_s(case.batch);
        for (i, cost) in costs.iter().enumerate() {
            let of_matmuls = matmul_s / f64::from(search.submeshes[i].n_devices);
            let least = least_of_matmuls(&case, &search, i, of_matmuls).plain;
            let cost = cost.unwrap_or(f64::INFINITY);
            assert!(
                least <= cost,
                "seed {seed}: submesh {i} costs {cost}, at least {least}"
            );
            closest = f64::min(closest, cost / least - 1.0);
        }

        let solved = case.solve(&search, f64::INFINITY);
        assert!(solved.lower <= best * (1.0 + SAME), "seed {seed}");
        if best.is_infinite() {
            assert!(
                solved.found.is_empty() && solved.error.is_some(),
                "seed {seed}"
            );
            continue;
        }
        n_found += 1;
        let [choice] = &solved.found[..] else {
            panic!("seed {seed}: {} pipelines", solved.found.len());
        };
        let found = choice.cost.total_s;
        assert!(
            (found / best - 1.0).abs() < SAME,
            "seed {seed}: {found} s, not {best}"
        );
        let n_all: usize = search.narrow_shapes(case.batch).len();
        n_cut += u64::from(solved.candidates < n_all as u64);

        // A pipeline as dear as the one to beat, but for the order of sums, is found; one that
        // costs more is not.
        let equal = case.solve(&search, found * (1.0 + SAME));
        assert_eq!(equal.found, solved.found, "seed {seed}");
        let less = case.solve(&search, found * (1.0 - 1e-6));
        assert_eq!(less.found, [], "seed {seed}");
        assert!(less.lower <= best * (1.0 + SAME), "seed {seed}");
    }
    // Cuts happen, also where a bound is nearly what the pipeline costs.
    assert!(n_found > 10 && n_cut > 5, "{n_found} found, {n_cut} cut");
    assert!(closest < 0.15, "the closest bound is {closest} below");
}

/// The least that interleaved stages cost on each submesh, every ring of every shape solved.
fn exhaustive_rings(case: &Case, search: &Search<'_>) -> Vec<f64> {
    let shapes = search.narrow_shapes(case.batch);
    let best = |i: usize| {
        let priced = priced(case, search, &shapes, i);
        let usable: Vec<Candidate> = priced.into_iter().filter_map(|(_, c)| c.ok()).collect();
        let costs = usable.iter().flat_map(|c| {
            let rings = search.rings(i, case.m()).into_iter();
            rings.filter_map(|r| search.solve_ring(r, c, case.batch, case.m(), 0).ok())
        });
        costs.map(|c| c.cost.total_s).fold(f64::INFINITY, f64::min)
    };
    (0..search.submeshes.len()).map(best).collect()
}

/// Submeshes are left out, and rings not solved, by what interleaved stages cost at least; the
/// best of them is found all the same.
#[test]
fn no_better_ring_is_cut() {
    let slow = std::env::var("RUN_SLOW_TESTS").is_ok_and(|v| v == "1");
    let (mut n_cut, mut n_found, mut closest) = (0, 0, f64::INFINITY);
    for seed in 0..if slow { 80 } else { 24 } {
        let case = Case::deep(seed);
        let search = case.search();
        let rings = exhaustive_rings(&case, &search);
        let matmul_s = search.least_matmul_s(case.batch);
        for (i, &cost) in rings.iter().enumerate() {
            let of_matmuls = matmul_s / f64::from(search.submeshes[i].n_devices);
            let least = least_of_matmuls(&case, &search, i, of_matmuls);
            assert!(
                least.interleaved <= cost,
                "seed {seed}: submesh {i} costs {cost}, at least {}",
                least.interleaved
            );
            closest = f64::min(closest, cost / least.interleaved - 1.0);
        }
        let ring = rings.iter().copied().fold(f64::INFINITY, f64::min);

        // Rings alone: nothing else holds them back, and they hold each other back.
        let solve = |interleaved: f64| {
            let to_beat = ToBeat {
                plain: 0.0,
                interleaved,
            };
            let none = Larger::default();
            search.solve_equal(case.batch, case.m(), case.schedule, 0, to_beat, &none)
        };
        let cost = |s: &Solved| s.interleaved.first().map(|(_, c)| c.cost.total_s);
        let all = solve(f64::INFINITY);
        assert_eq!(
            cost(&all),
            Some(ring).filter(|r| r.is_finite()),
            "seed {seed}"
        );
        assert!(all.lower <= ring, "seed {seed}");
        if ring.is_infinite() {
            continue;
        }
        n_found += 1;
        // A pipeline cheaper than the one to beat is found, an equal one is not.
        let more = solve(ring.next_up());
        assert_eq!(cost(&more), Some(ring), "seed {seed}");
        let none = solve(ring);
        assert_eq!(none.interleaved, [], "seed {seed}");
        assert!(none.lower <= ring, "seed {seed}");
        let half = solve(0.5 * ring);
        assert!(half.lower <= ring, "seed {seed}");
        n_cut += u64::from(half.candidates < all.candidates);
    }
    assert!(n_found > 6 && n_cut > 2, "{n_found} found, {n_cut} cut");
    assert!(closest < 0.2, "the closest bound is {closest} below");
}

/// No choice of a stage's layers that fits into memory takes less than the bounds say, with any
/// number of microbatches in flight; and where memory is short they say more than time alone.
#[test]
fn no_stage_beats_its_bound() {
    let slow = std::env::var("RUN_SLOW_TESTS").is_ok_and(|v| v == "1");
    let (mut n_compared, mut n_of_memory) = (0, 0);
    for seed in 0..if slow { 100 } else { 12 } {
        let mut case = Case::random(seed);
        case.effort = Effort::new(1 + (seed % 3) as u8).unwrap();
        let search = case.search();
        let shapes = search.narrow_shapes(case.batch);
        for submesh in 0..search.submeshes.len() {
            let priced = priced(&case, &search, &shapes, submesh);
            for candidate in priced.into_iter().filter_map(|(_, c)| c.ok()) {
                let m = f64::from(case.m());
                for (sequence, choices) in search.stages(&candidate).iter().enumerate() {
                    for n in [1, 2, 3, u64::from(case.m())] {
                        let (known, capacity) = (candidate.known(), candidate.capacity);
                        let bound = candidate.bounds.least_s(known, sequence, n, capacity);
                        let bound = bound.unwrap_or(0.0);
                        for (_, cost) in choices {
                            let seconds =
                                m * (cost.time.forward + cost.time.backward) + cost.time.step;
                            let bytes =
                                cost.static_bytes + cost.transient_bytes + n * cost.saved_bytes;
                            if bytes as f64 > candidate.capacity {
                                n_of_memory += u32::from(seconds < bound * 0.999);
                                continue;
                            }
                            n_compared += 1;
                            assert!(
                                bound <= seconds * (1.0 + SAME),
                                "seed {seed}, submesh {submesh}, sequence {sequence}, {n} in \
                                 flight: {seconds} s, at least {bound} s"
                            );
                        }
                    }
                }
            }
        }
    }
    assert!(
        n_compared > 1000 && n_of_memory > 20,
        "{n_compared} compared, {n_of_memory} too large ones faster than the bound"
    );
}

/// No cut of the layers over a ring costs less than the bounds of the ring say, whatever memory
/// there is; and where it is short, prices say more than time alone.
#[test]
fn no_cut_of_a_ring_beats_its_bound() {
    let slow = std::env::var("RUN_SLOW_TESTS").is_ok_and(|v| v == "1");
    let (mut n_compared, mut n_of_memory, mut closest) = (0, 0, f64::INFINITY);
    for seed in 0..if slow { 80 } else { 60 } {
        let mut case = Case::deep(seed);
        case.effort = Effort::new(1 + (seed % 3) as u8).unwrap();
        let mut rng = Rng::new(seed + 77);
        let m = case.m();
        for submesh in 0..case.submeshes.len() {
            // Parts of what the fastest stages need on every mesh of the submesh.
            case.set_memory(1 << 40);
            let free = fastest_bytes(&case, submesh);
            let n_meshes = case.cluster.n_devices() / case.submeshes[submesh].n_devices;
            let part = 0.05 * rng.between(5, 20) as f64;
            let bytes = part * free / f64::from(n_meshes);
            case.set_memory(bytes as u64);
            let search = case.search();
            let n_layers = search.layers().kind.len();
            let shapes = search.narrow_shapes(case.batch);
            let priced = priced(&case, &search, &shapes, submesh);
            for candidate in priced.into_iter().filter_map(|(_, c)| c.ok()) {
                for ring in search.rings(submesh, m) {
                    let (table, capacity) = search.ring_table(ring, &candidate, 0);
                    let sent_s = search.sent_s(ring, case.batch).iter().sum();
                    let of = RingOf {
                        ring,
                        candidate: &candidate,
                        m,
                        sent_s,
                    };
                    let sums = search.least_sums(&candidate).unwrap();
                    let of_time = search.ring_least_s(of, &sums);
                    let bound = search.priced_ring_least_s(of, f64::INFINITY);
                    let enough = 0.9 * bound;
                    assert!(search.priced_ring_least_s(of, enough) >= enough);
                    let mut best = f64::INFINITY;
                    for _ in 0..40 {
                        let cuts = random_cuts(&mut rng, n_layers, ring.n_stages());
                        let batch = (case.batch, m);
                        let made = search.ring_of_cuts(ring, cuts, &table, batch, capacity);
                        best = made.map_or(best, |c| best.min(c.cost.total_s));
                    }
                    assert!(
                        bound.max(of_time) <= best * (1.0 + SAME),
                        "seed {seed}, submesh {submesh}, {}: {best} s, at least {bound} s",
                        ring.n_stages()
                    );
                    n_compared += u32::from(best.is_finite());
                    if best.is_finite() && bound > 1.02 * of_time {
                        n_of_memory += 1;
                        closest = closest.min(best / bound - 1.0);
                    }
                }
            }
        }
    }
    assert!(
        n_compared > 40 && n_of_memory > 10 && closest < 0.1,
        "{n_compared} compared, memory says more of {n_of_memory}, the closest is {closest} below"
    );
}

/// The bytes that all layers need where they are fastest, on the first shape of a submesh.
fn fastest_bytes(case: &Case, submesh: usize) -> f64 {
    let search = case.search();
    let shapes = search.narrow_shapes(case.batch);
    let mut priced = priced(case, &search, &shapes, submesh).into_iter();
    let first = priced.find_map(|(_, c)| c.ok());
    let cost = first.map(|c| search.stages(&c)[search.sequences.longest()][0].1);
    cost.map_or(0.0, |c| {
        (c.static_bytes + c.saved_bytes * u64::from(case.m()) / 2) as f64
    })
}

/// As many parts of the layers in a row, each with a layer at least.
fn random_cuts(rng: &mut Rng, n_layers: usize, n_stages: usize) -> Vec<std::ops::Range<usize>> {
    let mut ends: Vec<usize> = (1..n_layers).collect();
    while ends.len() >= n_stages {
        ends.remove(rng.below(ends.len() as u64) as usize);
    }
    ends.push(n_layers);
    let starts = [0].into_iter().chain(ends.clone());
    starts.zip(ends).map(|(start, end)| start..end).collect()
}

/// The assumption behind [`super::super::larger`]: a microbatch of c times as many samples takes at
/// most c times as long. How far it is broken, over random models and clusters.
#[test]
fn samples_take_no_longer_in_larger_microbatches() {
    let slow = std::env::var("RUN_SLOW_TESTS").is_ok_and(|v| v == "1");
    let (mut worst, mut n_gain) = (0.0f64, 0);
    for seed in 0..if slow { 100 } else { 12 } {
        let mut case = Case::random(seed);
        let mut rng = Rng::new(seed + 1000);
        case.batch = rng.pick(&[1, 2, 3, 5]);
        let larger = case.batch * rng.pick(&[2, 3, 4, 8]);
        case.train.global_batch = larger;
        let search = case.search();
        for submesh in 0..search.submeshes.len() {
            // By shape, of all layers and of each layer, per sample.
            let least = |batch: u64| {
                let shapes = search.shapes(batch);
                let ways: Vec<Way<'_>> = ways_of(&shapes, submesh);
                let ways: Vec<&Way<'_>> = ways.iter().collect();
                let priced = search.candidates(&ways, batch, (larger / batch) as u32, 0);
                let usable = priced.into_iter().filter_map(|(i, c)| Some((i, c?.ok()?)));
                let times = usable.filter_map(|(i, c)| {
                    let times = search.least_times(&c)?;
                    let all = times.layers_s.iter().chain([&times.sum_s]);
                    Some((i, all.map(|s| s / batch as f64).collect::<Vec<_>>()))
                });
                times.collect::<BTreeMap<usize, Vec<f64>>>()
            };
            let (small, large) = (least(case.batch), least(larger));
            for (i, large) in large {
                for (small, large) in small.get(&i).into_iter().flatten().zip(large) {
                    worst = worst.max(1.0 - small / large);
                    n_gain += u32::from(large < 0.99 * small);
                }
            }
        }
    }
    assert!(worst <= super::super::larger::SLACK, "{worst}");
    assert!(n_gain > 5, "{n_gain} of them gain");
    println!("at most {:.2}% less", 100.0 * worst);
}
