//! The simulator plays one rank per role. Here every rank of small worlds is played by itself,
//! under random plans of random graphs, and both must give the same step time and memory.
//!
//! They do to the picosecond where the ranks of a role are one class
//! (`cost_model::classes`). Where hosts cut through meshes the simulator lets every collective
//! be as slow as its slowest group is, which bounds the step from above.
#![allow(clippy::unwrap_used)]

use cost_model::classes::classes;
use cost_model::{SimulateOptions, StepWork, simulate};
use ir::TrainSpec;
use ir::plan::ScheduleKind;
use ir::program::Program;
use ir::testing::{GraphOptions, Rng, random_graph, sequence_of};
use ir::training::Recompute;
use tests::all_ranks;
use tests::plans::{Random, Recomputed, Setup, Style, mlp, random_plan};

/// Hosts of four devices, enough for four stages of 5 x 5.
const CLUSTER: &str = "h100-sxm*4+nvlink4+roce-400*4";
const N_HOSTS: u32 = 25;

/// Sizes of stages' meshes: of powers of two, the larger ones first, so that no host is cut;
/// or any.
fn meshes(rng: &mut Rng, n_stages: usize, aligned: bool) -> Vec<Vec<u32>> {
    let sizes: &[u32] = if aligned { &[1, 2, 4] } else { &[1, 2, 3, 5] };
    let mut mesh = || -> Vec<u32> {
        let n_axes = rng.between(1, 2);
        (0..n_axes).map(|_| rng.pick(sizes)).collect()
    };
    let mut meshes: Vec<Vec<u32>> = (0..n_stages).map(|_| mesh()).collect();
    if aligned {
        meshes.sort_by_key(|m| std::cmp::Reverse(m.iter().product::<u32>()));
    }
    meshes
}

fn world(seed: u64, aligned: bool) -> (Program, StepWork) {
    let mut rng = Rng::new(seed ^ 0x776f_726c_6473);
    let options = GraphOptions {
        n_layers: rng.between(1, 4) as usize,
        equal_layers: rng.one_in(2),
        integer_linear: false,
        dropout: false,
        ..GraphOptions::default()
    };
    let forward = match rng.one_in(3) {
        true => mlp(options.n_layers),
        false => random_graph(seed, &options),
    };
    let n_layers = forward.layers.len() as u64;
    // Interleaved, the stages come around to the same meshes again.
    let n_virtual = if rng.one_in(3) && n_layers >= 4 { 2 } else { 1 };
    let n_meshes = match n_virtual {
        1 => rng.between(1, n_layers.min(4)) as usize,
        _ => 2,
    };
    let mut cuts: Vec<u64> = (1..n_layers).collect();
    rng.shuffle(&mut cuts);
    cuts.truncate(n_meshes * n_virtual - 1);
    cuts.extend([0, n_layers]);
    cuts.sort_unstable();
    let meshes = meshes(&mut rng, n_meshes, aligned);
    // Interleaved, as many microbatches as meshes, or a multiple.
    let first = if n_virtual > 1 { 2 } else { 0 };
    let sizes = [(1, 1), (3, 3), (4, 2), (2, 4), (1, 8)];
    let (microbatch, n_microbatches) = rng.pick(&sizes[first..]);
    let setup = Setup {
        stages: cuts
            .windows(2)
            .map(|w| (w[1] - w[0]) as u32)
            .zip(meshes.iter().cycle().cloned())
            .collect(),
        microbatch,
        n_microbatches,
        schedule: match n_virtual {
            1 => rng.pick(ScheduleKind::PLAIN),
            2 if rng.one_in(2) => ScheduleKind::ZbV,
            n => ScheduleKind::Interleaved {
                virtual_stages: n as u32,
            },
        },
        train: TrainSpec {
            global_batch: microbatch * u64::from(n_microbatches),
            sequence: sequence_of(&forward).unwrap(),
            ..TrainSpec::default()
        },
        style: rng.pick(&[Style::Any, Style::Zero, Style::Moves]),
        recompute: Recomputed::Named(Recompute::None),
    };
    let (plan, training) = random_plan(&forward, &setup, &mut Random(seed));
    let work = StepWork::of(&training, &plan.train);
    (lowering::lower(&plan).unwrap(), work)
}

/// Plays the world of `seed` both ways; whether every role is one class, and the step times.
fn played(seed: u64, aligned: bool) -> (bool, f64, f64) {
    let (program, work) = world(seed, aligned);
    let cluster = cost_model::presets::load(CLUSTER, N_HOSTS).unwrap();
    let short = simulate(&program, &cluster, &SimulateOptions::new(work)).unwrap();
    let long = all_ranks::play(&program, &cluster);
    for (role, predicted) in program.roles.iter().zip(&short.prediction.stages) {
        let reserved = cluster.device.memory_reserved_bytes.0;
        for rank in role.mesh.ranks() {
            let touched = long.touched_bytes[&rank].next_multiple_of(ir::program::ARENA_ALIGN);
            let peak = predicted.peak_bytes.0;
            assert_eq!(touched + reserved, peak, "seed {seed}, {rank:?}");
        }
    }
    let one_class = program
        .roles
        .iter()
        .all(|r| classes(r, &cluster).len() == 1);
    (one_class, short.step_time.0, long.step_s)
}

fn cases(aligned: bool) -> Vec<(u64, bool, f64, f64)> {
    let slow = std::env::var("RUN_SLOW_TESTS").is_ok_and(|v| v == "1");
    let n = if slow { 1000 } else { 150 };
    (0..n)
        .map(|seed| {
            let (one_class, short, long) = played(seed, aligned);
            (seed, one_class, short, long)
        })
        .collect()
}

#[test]
fn a_rank_per_role_gives_what_all_ranks_give() {
    let played = cases(true);
    let n_of_many = played.iter().filter(|p| p.3 > 0.0).count();
    assert!(n_of_many == played.len(), "every step takes time");
    let mut different = Vec::new();
    for &(seed, one_class, short, long) in &played {
        assert!(one_class, "seed {seed}: no host is cut");
        if short != long {
            different.push((seed, short, long));
        }
    }
    assert!(
        different.is_empty(),
        "{} of {}: {different:?}",
        different.len(),
        played.len()
    );
}

#[test]
fn a_rank_per_role_bounds_ranks_that_differ() {
    let played = cases(false);
    let (mut n_several, mut n_equal) = (0, 0);
    for &(seed, one_class, short, long) in &played {
        assert!(long <= short, "seed {seed}: {long} s and not {short} s");
        assert!(
            !one_class || long == short,
            "seed {seed}: {long} s and not {short} s"
        );
        n_several += usize::from(!one_class);
        n_equal += usize::from(!one_class && long == short);
    }
    println!("{n_equal} of {n_several} worlds with several classes in a role take the same time");
    assert!(n_several > played.len() / 10);
}
