//! The inter-op dynamic program against brute force, and against sums written out.

#![allow(clippy::unwrap_used)] // A test may stop at what it does not expect.

use ir::plan::ScheduleKind;
use planner::inter_op::{
    Hop, InterOpOptions, NoPlan, StageEntry, StageTable, brute_force, cost_of, least_work, plan,
};

/// SplitMix64 (Steele, Lea & Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

fn entry(forward_s: f64, backward_s: f64) -> StageEntry {
    StageEntry {
        forward_s,
        backward_s,
        step_s: 0.0,
        static_bytes: 0,
        saved_bytes_per_microbatch: 0,
        transient_bytes: 0,
        capacity_bytes: 100,
        boundary_in: 0,
        boundary_out: 0,
        tag: 0,
    }
}

fn random_table(random: &mut Random) -> StageTable {
    let n_layers = 1 + random.below(4) as usize;
    let n_devices = [1, 2, 3, 4, 6][random.below(5) as usize];
    let submeshes =
        [vec![1], vec![1, 2], vec![1, 2, 4], vec![2, 3]][random.below(4) as usize].clone();
    let n_submeshes = submeshes.len();
    let mut table = StageTable::new(n_layers, n_devices, submeshes);
    let spread = [3, 20][random.below(2) as usize];
    let memory = [1, 12, 30][random.below(3) as usize];
    for start in 0..n_layers {
        for end in start + 1..=n_layers {
            for submesh in 0..n_submeshes {
                for tag in 0..random.below(3) {
                    // Integer times: sums are exact whatever their order.
                    let made = StageEntry {
                        forward_s: (1 + random.below(spread)) as f64,
                        backward_s: random.below(spread) as f64,
                        step_s: random.below(10) as f64,
                        static_bytes: random.below(50),
                        saved_bytes_per_microbatch: random.below(memory),
                        transient_bytes: random.below(20),
                        capacity_bytes: 80,
                        boundary_in: random.below(2) as u16,
                        boundary_out: random.below(2) as u16,
                        tag,
                    };
                    table.push(start..end, submesh, made);
                }
            }
        }
    }
    table
}

/// The least devices times seconds over all ways to tile layers and devices from `start` on.
fn least_work_by_enumeration(table: &StageTable, start: usize, devices: usize) -> f64 {
    if start == table.n_layers() {
        return if devices == 0 { 0.0 } else { f64::INFINITY };
    }
    let mut least = f64::INFINITY;
    for end in start + 1..=table.n_layers() {
        for (submesh, &n) in table.submeshes().iter().enumerate() {
            for e in table.get(start..end, submesh) {
                if n <= devices {
                    let rest = least_work_by_enumeration(table, end, devices - n);
                    least = least.min(n as f64 * (e.forward_s + e.backward_s) + rest);
                }
            }
        }
    }
    least
}

#[test]
fn the_least_work_equals_brute_force_on_random_tables() {
    let mut random = Random(11);
    let mut n_tiled = 0;
    for case in 0..1500 {
        let table = random_table(&mut random);
        let expected = least_work_by_enumeration(&table, 0, table.n_devices());
        let found = least_work(&table);
        assert_eq!(found.unwrap_or(f64::INFINITY), expected, "case {case}");
        n_tiled += usize::from(found.is_some());
    }
    assert!((200..1400).contains(&n_tiled), "{n_tiled}");
}

#[test]
fn equals_brute_force_on_random_tables() {
    let mut random = Random(7);
    let (mut n_solved, mut n_infeasible) = (0, 0);
    for case in 0..1500 {
        let table = random_table(&mut random);
        let times: Vec<Option<f64>> = (0..256)
            .map(|_| (random.below(8) > 0).then(|| random.below(6) as f64))
            .collect();
        let transfer = |h: Hop| {
            let (out, into) = (h.boundary_out as usize, h.boundary_in as usize);
            times[((h.from * 2 + out) * 6 + h.to * 2 + into + 37 * h.behind) % times.len()]
        };
        let named = ScheduleKind::PLAIN;
        let schedule = named[random.below(named.len() as u64) as usize];
        let mut options = InterOpOptions::new(1 + random.below(9), schedule);
        options.allow_unused = random.below(3) == 0;
        options.n_stages = (random.below(4) == 0).then(|| 1 + random.below(3) as usize);
        if let Some(n) = options.n_stages.filter(|_| random.below(2) == 0) {
            let n_meshes = if random.below(2) == 0 { 1 } else { n };
            options.microbatches = n_meshes as u64 * (1 + random.below(4));
            options.schedule = ScheduleKind::Interleaved {
                virtual_stages: (n / n_meshes) as u32,
            };
        }
        let expected = brute_force(&table, &transfer, &options);
        let found = plan(&table, &transfer, &options);
        match (found, expected) {
            (Ok(found), Some(expected)) => {
                n_solved += 1;
                assert_eq!(found.cost.total_s, expected.total_s, "case {case}");
                assert_eq!(found.lower_bound_s, expected.total_s, "case {case}");
                let stages: Vec<_> = found
                    .stages
                    .iter()
                    .map(|s| (s.layers.clone(), s.submesh, s.entry))
                    .collect();
                let again = cost_of(&table, &transfer, &options, &stages);
                assert_eq!(
                    again,
                    Some(found.cost),
                    "case {case}: the stages cost what is said"
                );
            }
            (Err(_), None) => n_infeasible += 1,
            (found, expected) => panic!("case {case}: {found:?} but brute force says {expected:?}"),
        }
    }
    assert!(
        n_solved > 500 && n_infeasible > 100,
        "{n_solved} solved, {n_infeasible} infeasible"
    );
}

/// On unequal devices every submesh lies at some places only.
#[test]
fn equals_brute_force_where_submeshes_have_places() {
    let mut random = Random(12);
    let (mut n_solved, mut n_other) = (0, 0);
    for case in 0..1500 {
        let table = random_table(&mut random);
        let n = table.n_devices();
        let mut starts =
            |_: &usize| -> Vec<usize> { (0..n).filter(|_| random.below(4) > 0).collect() };
        let starts: Vec<Vec<usize>> = table.submeshes().iter().map(&mut starts).collect();
        let transfer = |_: Hop| Some(1.0);
        let options = InterOpOptions::new(1 + random.below(9), ScheduleKind::OneFOneB);
        let anywhere = plan(&table, &transfer, &options).ok();
        let table = table.at(starts.clone());
        let expected = brute_force(&table, &transfer, &options);
        let found = plan(&table, &transfer, &options);
        assert_eq!(
            found.as_ref().ok().map(|f| f.cost.total_s),
            expected.map(|c| c.total_s),
            "case {case}"
        );
        let Ok(found) = found else { continue };
        n_solved += 1;
        let mut first = 0;
        for stage in &found.stages {
            let places = &starts[stage.submesh];
            assert!(places.is_empty() || places.contains(&first), "case {case}");
            first += table.submeshes()[stage.submesh];
        }
        n_other += usize::from(anywhere.is_some_and(|a| a.cost.total_s < found.cost.total_s));
    }
    assert!(
        n_solved > 200 && n_other > 20,
        "{n_solved} solved, {n_other} of them otherwise"
    );
}

/// With one stage a mesh the largest time counts as often as in plain 1F1B, with more the
/// pipeline of equal stages takes `m v + p - 1` of them.
#[test]
fn interleaved_stages_count_the_largest_as_often_as_a_mesh_starts_one() {
    for m in [4u64, 8, 12] {
        let plain = InterOpOptions::new(m, ScheduleKind::OneFOneB).repeats();
        let repeats = |virtual_stages| {
            let schedule = ScheduleKind::Interleaved { virtual_stages };
            let options = InterOpOptions {
                n_stages: Some(4 * virtual_stages as usize),
                ..InterOpOptions::new(m, schedule)
            };
            options.repeats()
        };
        assert_eq!(repeats(1), plain);
        for v in [2, 3] {
            let stages = 4.0 * f64::from(v);
            assert_eq!(stages + repeats(v), m as f64 * f64::from(v) + 3.0);
        }
    }
}

#[test]
fn a_gap_is_kept_and_bounded() {
    let mut random = Random(11);
    for case in 0..300 {
        let table = random_table(&mut random);
        let transfer = |_: Hop| Some(1.0);
        let mut options = InterOpOptions::new(8, ScheduleKind::OneFOneB);
        options.relative_gap = 0.2;
        let Some(best) = brute_force(&table, &transfer, &options) else {
            continue;
        };
        let found = plan(&table, &transfer, &options).unwrap();
        assert!(
            found.lower_bound_s <= best.total_s,
            "case {case}: the bound is a bound"
        );
        assert!(found.cost.total_s >= best.total_s, "case {case}");
        assert!(
            found.lower_bound_s >= 0.8 * found.cost.total_s - 1e-9,
            "case {case}"
        );
    }
}

#[test]
fn the_objective_is_the_sum_written_out() {
    let mut table = StageTable::new(2, 2, vec![1, 2]);
    table.push(
        0..1,
        0,
        StageEntry {
            step_s: 4.0,
            ..entry(1.0, 2.0)
        },
    );
    table.push(
        1..2,
        0,
        StageEntry {
            step_s: 5.0,
            ..entry(2.0, 4.0)
        },
    );
    table.push(0..2, 1, entry(6.0, 6.0));
    let transfer = |_: Hop| Some(0.5);
    let options = InterOpOptions::new(4, ScheduleKind::OneFOneB);
    let found = plan(&table, &transfer, &options).unwrap();
    // Two stages: sum, three more of the slower one, the longer step. One stage: 4 * 12 = 48.
    assert_eq!(
        found.cost.total_s,
        ((1.0 + 2.0 + 0.5) + (2.0 + 4.0)) + 3.0 * (2.0 + 4.0) + 5.0
    );
    assert_eq!(found.stages.len(), 2);
    // With one microbatch the pipeline does not pay: 12 against 9.5 + 5.
    let options = InterOpOptions::new(1, ScheduleKind::OneFOneB);
    assert_eq!(
        plan(&table, &transfer, &options).unwrap().cost.total_s,
        6.0 + 6.0
    );
}

#[test]
fn memory_counts_the_microbatches_in_flight() {
    let mut table = StageTable::new(2, 2, vec![1]);
    let heavy = StageEntry {
        static_bytes: 60,
        saved_bytes_per_microbatch: 20,
        ..entry(1.0, 1.0)
    };
    table.push(0..1, 0, heavy);
    table.push(1..2, 0, heavy);
    let transfer = |_: Hop| Some(0.0);
    // 1F1B: the first of two stages holds 2: 60 + 2 * 20 = 100 fits.
    let options = InterOpOptions::new(8, ScheduleKind::OneFOneB);
    let found = plan(&table, &transfer, &options).unwrap();
    assert_eq!(
        [found.stages[0].in_flight, found.stages[1].in_flight],
        [2, 1]
    );
    // GPipe holds all 8: 60 + 8 * 20 = 220 of 100.
    let options = InterOpOptions::new(8, ScheduleKind::GPipe);
    let why = plan(&table, &transfer, &options).unwrap_err();
    let NoPlan::Memory {
        n_stages: 2,
        in_flight: 8,
        needed_bytes: 220,
        capacity_bytes: 100,
        ..
    } = why
    else {
        panic!("{why:?}");
    };
}

#[test]
fn devices_that_cannot_be_used_exactly_are_no_tiling() {
    let mut table = StageTable::new(1, 3, vec![2]);
    table.push(0..1, 0, entry(1.0, 1.0));
    let transfer = |_: Hop| Some(0.0);
    let mut options = InterOpOptions::new(2, ScheduleKind::OneFOneB);
    assert_eq!(plan(&table, &transfer, &options), Err(NoPlan::NoTiling));
    options.allow_unused = true;
    assert_eq!(
        plan(&table, &transfer, &options).unwrap().cost.total_s,
        2.0 + 2.0
    );
}

#[test]
fn large_tables_take_seconds() {
    let (n_layers, n_devices) = (98, 1024);
    let submeshes: Vec<usize> = (0..11).map(|k| 1 << k).collect();
    let mut table = StageTable::new(n_layers, n_devices, submeshes);
    let mut random = Random(3);
    let weight: Vec<f64> = (0..n_layers)
        .map(|_| 1.0 + random.below(100) as f64 / 1000.0)
        .collect();
    for start in 0..n_layers {
        for end in start + 1..=n_layers {
            for submesh in 0..11 {
                let devices = (1 << submesh) as f64;
                let work: f64 = weight[start..end].iter().sum();
                let bytes = ((end - start) as f64 * 2000.0 / devices) as u64;
                for (slower, saved) in [(1.0, 8), (1.3, 1)] {
                    let time = slower * work * (1.0 / devices + 0.001 * f64::from(submesh as u32));
                    let made = StageEntry {
                        step_s: 0.001 * devices.log2(),
                        static_bytes: bytes,
                        saved_bytes_per_microbatch: bytes * saved / 100,
                        capacity_bytes: 1000,
                        boundary_in: 0,
                        boundary_out: u16::from(submesh > 3),
                        tag: saved,
                        ..entry(time / 3.0, 2.0 * time / 3.0)
                    };
                    table.push(start..end, submesh, made);
                }
            }
        }
    }
    let transfer = |h: Hop| {
        let base = 0.001 * (1.0 + f64::from(h.boundary_out));
        Some(base / (1 << h.from.min(h.to)) as f64)
    };
    for microbatches in [4, 64, 1536] {
        let started = std::time::Instant::now();
        let options = InterOpOptions::new(microbatches, ScheduleKind::OneFOneB);
        let found = plan(&table, &transfer, &options).unwrap();
        let used: usize = found
            .stages
            .iter()
            .map(|s| table.submeshes()[s.submesh])
            .sum();
        assert_eq!(used, n_devices);
        assert_eq!(found.lower_bound_s, found.cost.total_s);
        let seconds = started.elapsed().as_secs_f64();
        eprintln!(
            "m {microbatches}: {} stages, {} s, {} thresholds, {seconds:.2} s to plan",
            found.stages.len(),
            found.cost.total_s,
            found.n_thresholds
        );
    }
}
