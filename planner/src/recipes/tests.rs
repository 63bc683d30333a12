#![allow(clippy::unwrap_used)] // A test may stop at what it does not expect.

use super::bounds::Sizes;
use super::*;
use crate::{PlanError, PlanOptions};
use ir::cluster::Cluster;
use ir::training::training_graph;
use ir::{Graph, Precision, TrainSpec};
use std::collections::BTreeSet;
use std::path::Path;

fn facts() -> Facts {
    Facts {
        n_devices: 64,
        neighbours: 8,
        n_layers: 34,
        heads: 32,
        n_experts: None,
        global_batch: 128,
        sequence: 4096,
    }
}

fn words(pins: &[Pins]) -> Vec<String> {
    pins.iter().map(|p| p.describe().join(" ")).collect()
}

/// The values of a pin in a grid.
fn values<T: Ord>(grid: &[Pins], of: impl Fn(&Pins) -> T) -> Vec<T> {
    let all: BTreeSet<T> = grid.iter().map(of).collect();
    all.into_iter().collect()
}

struct Case {
    forward: Graph,
    train: TrainSpec,
    cluster: Cluster,
}

fn case(model: &str, cluster: &str, global_batch: u64, sequence: u64) -> Case {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models");
    let config = import::ModelConfig::load(&models.join(model)).unwrap();
    let build = import::BuildOptions {
        sequence,
        dropout: 0.0,
    };
    Case {
        forward: import::model_graph(&config, &build).unwrap(),
        train: TrainSpec {
            global_batch,
            sequence,
            precision: Precision::Bf16,
            ..TrainSpec::default()
        },
        cluster: cost_model::presets::find(cluster).unwrap().unwrap(),
    }
}

fn chosen(case: &Case, recipe: Recipe, pins: &[&str]) -> Result<Chosen, PlanError> {
    let options = PlanOptions {
        pins: Pins::parse(pins).unwrap(),
        ..PlanOptions::default()
    };
    plan_recipe(&case.forward, &case.train, &case.cluster, recipe, &options)
}

#[test]
fn every_name_is_of_a_recipe_and_every_recipe_has_its_own() {
    for name in Recipe::NAMES {
        let recipe = Recipe::named(name).unwrap();
        assert!(recipe.name() == name || name == "fsdp", "{name}");
    }
    for recipe in Recipe::ALL {
        assert_eq!(Recipe::named(recipe.name()), Some(recipe));
        assert!(Recipe::NAMES.contains(&recipe.name()));
    }
}

#[test]
fn data_parallel_recipes_split_samples_alone() {
    let grid = Recipe::Ddp.grid(&facts(), None);
    assert_eq!(
        words(&grid),
        [
            "data=64 tensor=1 pipeline=1 zero=0 recompute=none",
            "data=64 tensor=1 pipeline=1 zero=0 recompute=selective",
            "data=64 tensor=1 pipeline=1 zero=0 recompute=full",
        ]
    );
    for (level, recipe) in [(1, "zero-1"), (2, "zero-2"), (3, "zero-3"), (3, "fsdp")] {
        let grid = Recipe::named(recipe).unwrap().grid(&facts(), None);
        assert_eq!(values(&grid, |p| p.zero), [Some(level)]);
        assert_eq!(values(&grid, |p| p.data), [Some(64)]);
    }
}

#[test]
fn hybrid_recipes_leave_states_in_whole_hosts() {
    let grid = Recipe::Hsdp.grid(&facts(), None);
    assert_eq!(values(&grid, |p| p.data), [Some(64)]);
    assert_eq!(values(&grid, |p| p.zero), [Some(2), Some(3)]);
    assert_eq!(
        values(&grid, |p| p.replicas),
        [Some(2), Some(4), Some(8)],
        "64 devices on hosts of 8"
    );
    // On one host it is FSDP.
    let host = Facts {
        n_devices: 8,
        ..facts()
    };
    let grid = Recipe::Hsdp.grid(&host, None);
    assert_eq!(values(&grid, |p| p.replicas), [Some(1)]);
}

#[test]
fn no_grid_has_a_point_twice_and_degrees_make_the_devices() {
    let with_experts = Facts {
        n_experts: Some(8),
        ..facts()
    };
    let long = Facts {
        sequence: 128 * 1024,
        ..facts()
    };
    let single = Facts {
        n_devices: 1,
        neighbours: 1,
        ..facts()
    };
    for facts in [facts(), with_experts, long, single] {
        for recipe in Recipe::ALL {
            let grid = recipe.grid(&facts, None);
            assert!(!grid.is_empty(), "{recipe:?}");
            let all: BTreeSet<String> = words(&grid).into_iter().collect();
            assert_eq!(all.len(), grid.len(), "{recipe:?}");
            for p in grid.iter().filter(|p| p.fixes_mesh()) {
                let degrees = [p.data, p.tensor, p.pipeline, p.context];
                let made: u32 = degrees.iter().map(|d| d.unwrap_or(1)).product();
                assert_eq!(made, facts.n_devices, "{p:?}");
                let data = p.data.unwrap();
                let parts = p.expert.unwrap_or(1) * p.replicas.unwrap_or(1);
                assert!(data.is_multiple_of(parts), "{p:?}");
                let stages = p.pipeline.unwrap() * p.virtual_stages.unwrap_or(1);
                assert!(stages as usize <= facts.n_layers, "{p:?}");
            }
        }
    }
}

#[test]
fn megatrons_grid_has_what_its_users_try() {
    let grid = Recipe::Megatron.grid(&facts(), None);
    let all = |of: fn(&Pins) -> Option<u32>| {
        let all = values(&grid, of).into_iter();
        all.map(|d| d.unwrap_or(0)).collect::<Vec<_>>()
    };
    assert_eq!(all(|p| p.tensor), [1, 2, 4, 8]);
    assert_eq!(all(|p| p.pipeline), [1, 2, 4, 8, 16, 32]);
    assert_eq!(all(|p| p.virtual_stages), [0, 1, 2, 4, 8, 16, 17]);
    assert_eq!(all(|p| p.context), [0]);
    assert_eq!(values(&grid, |p| p.zero), [Some(0), Some(1)]);
    assert_eq!(values(&grid, |p| p.recompute.unwrap().name()).len(), 3);
    // Every rank that splits samples has one: 64 devices, and 16 samples.
    let few = Facts {
        global_batch: 16,
        ..facts()
    };
    let grid = Recipe::Megatron.grid(&few, None);
    assert_eq!(grid.iter().filter_map(|p| p.data).max(), Some(16));
    // A number of heads that tensor ranks do not divide.
    let odd = Facts {
        heads: 12,
        ..facts()
    };
    let grid = Recipe::Megatron.grid(&odd, None);
    assert_eq!(values(&grid, |p| p.tensor), [Some(1), Some(2), Some(4)]);
    // Long sequences are split, in zigzag order; short ones where that is pinned.
    let long = Facts {
        sequence: 32 * 1024,
        ..facts()
    };
    let grid = Recipe::Megatron.grid(&long, None);
    let contexts = values(&grid, |p| (p.context, p.zigzag));
    let split = [2, 4, 8].map(|c| (Some(c), true));
    assert_eq!(contexts, [&[(None, false)], &split[..]].concat());
    let grid = Recipe::Megatron.grid(&facts(), Some(2));
    assert_eq!(values(&grid, |p| p.context), [Some(2)]);
    // Experts by a part of the ranks that split samples.
    let experts = Facts {
        n_experts: Some(4),
        ..facts()
    };
    let grid = Recipe::Megatron.grid(&experts, None);
    assert_eq!(values(&grid, |p| p.expert), [Some(1), Some(2), Some(4)]);
}

#[test]
fn deepspeed_has_no_higher_level_than_one_in_a_pipeline() {
    let grid = Recipe::DeepSpeed3d.grid(&facts(), None);
    let levels = values(&grid, |p| (p.pipeline > Some(1), p.zero));
    let expected = [(false, 1), (false, 2), (false, 3), (true, 1)];
    assert_eq!(levels, expected.map(|(p, z)| (p, Some(z))));
    assert!(grid.iter().all(|p| p.virtual_stages.is_none_or(|v| v == 1)));
    // Alpa's meshes are left to the search.
    let grid = Recipe::Alpa.grid(&facts(), None);
    assert!(grid.iter().all(|p| !p.fixes_mesh() && p.pipeline.is_none()));
    assert_eq!(values(&grid, |p| p.zero), [Some(0), Some(1), Some(2)]);
}

#[test]
fn facts_are_read_from_the_model() {
    let of = |c: &Case| Facts::of(&c.forward, &c.train, &c.cluster);
    let llama = of(&case("llama-3.1-8b", "dgx-h100", 64, 8192));
    assert_eq!((llama.heads, llama.n_experts), (32, None));
    assert_eq!((llama.n_layers, llama.neighbours), (34, 8));
    let mixtral = of(&case("mixtral-8x7b", "gb200-nvl72", 64, 1024));
    assert_eq!((mixtral.heads, mixtral.n_experts), (32, Some(8)));
    assert_eq!((mixtral.n_devices, mixtral.neighbours), (72, 72));
}

#[test]
fn every_recipe_plans_a_small_model_under_its_pins() {
    let case = case("gpt2", "h100-sxm*2+nvlink4+infiniband-ndr*2:2", 16, 256);
    for recipe in Recipe::ALL {
        let found = chosen(&case, recipe, &[]).unwrap();
        let plan = &found.planned.plan;
        assert_eq!(plan.pins, found.pins.describe(), "{recipe:?}");
        // The pins are a point of the grid, and the plan keeps to them.
        let facts = Facts::of(&case.forward, &case.train, &case.cluster);
        assert!(recipe.grid(&facts, None).contains(&found.pins));
        let Some(data) = found.pins.data else {
            continue;
        };
        for stage in &plan.stages {
            let size = |name: &str| {
                let axis = stage.mesh.axes.iter().find(|a| a.name == name);
                axis.map(|a| a.size)
            };
            let copies = size("replica").unwrap_or(1);
            assert_eq!(size("data"), Some(data / copies), "{recipe:?}");
            assert_eq!(found.pins.replicas.unwrap_or(1), copies, "{recipe:?}");
            assert_eq!(size("tensor"), found.pins.tensor, "{recipe:?}");
        }
        let stages = found.pins.pipeline.unwrap() * found.pins.virtual_stages.unwrap_or(1);
        assert_eq!(plan.stages.len(), stages as usize, "{recipe:?}");
    }
}

#[test]
fn the_fastest_point_is_chosen_and_the_bounds_hold() {
    let case = case("gpt2", "h100-sxm*4+nvlink4+infiniband-ndr*4", 16, 512);
    let options = PlanOptions::default();
    let (forward, train, cluster) = (&case.forward, &case.train, &case.cluster);
    let all = |recipe| points(forward, train, cluster, recipe, &options).unwrap();
    let grid = [all(Recipe::Megatron), all(Recipe::DeepSpeed3d)].concat();
    let training = training_graph(forward, train).unwrap();
    let sizes = Sizes::of(&training, train, cluster);
    let mut steps = Vec::new();
    for pins in &grid {
        let options = PlanOptions {
            pins: pins.clone(),
            ..PlanOptions::default()
        };
        let Ok(planned) = crate::plan(forward, train, cluster, &options) else {
            steps.push(f64::INFINITY);
            continue;
        };
        let step_s = planned.simulation.step_time.0;
        let arena = planned.program.roles.iter().map(|r| r.arena_bytes).max();
        let arena = arena.unwrap() as f64;
        let shown = pins.describe();
        assert!(sizes.state_bytes(pins) <= arena, "{shown:?}: {arena} bytes");
        assert!(sizes.state_bytes(pins) > 0.1 * arena, "{shown:?}: no bound");
        assert!(sizes.step_s(pins) <= step_s, "{shown:?}: {step_s} s");
        assert!(sizes.step_s(pins) > 0.0);
        steps.push(step_s);
    }
    let fastest = steps.iter().copied().fold(f64::INFINITY, f64::min);
    let first = steps.iter().position(|s| *s == fastest).unwrap();
    let tried = plan_points(forward, train, cluster, &grid, &options, &|| false).unwrap();
    let (best, planned) = tried.best.unwrap();
    assert_eq!((best, planned.simulation.step_time.0), (first, fastest));
    // What was planned here was planned there, with the same step.
    for (outcome, step_s) in tried.outcomes.iter().zip(&steps) {
        match outcome {
            Outcome::Planned(step) => assert_eq!(step.0, *step_s),
            Outcome::TooSlow => assert!(*step_s > fastest),
            Outcome::TooLarge | Outcome::Stopped => panic!("{outcome:?}"),
            Outcome::Failed(_) => assert!(step_s.is_infinite()),
        }
    }
    // A caller that stops at once gets nothing.
    let none = plan_points(forward, train, cluster, &grid, &options, &|| true).unwrap();
    assert!(none.best.is_none());
    let is_stopped = |o: &Outcome| matches!(o, Outcome::Stopped | Outcome::Failed(_));
    assert!(none.outcomes.iter().all(is_stopped));
}

#[test]
fn pins_choose_among_the_points() {
    let case = case("gpt2", "h100-sxm*4+nvlink4+infiniband-ndr*4", 16, 256);
    let found = chosen(
        &case,
        Recipe::Megatron,
        &["tensor=2 microbatch=8 recompute=none"],
    );
    let found = found.unwrap();
    assert_eq!(
        (found.pins.tensor, found.pins.microbatch),
        (Some(2), Some(8))
    );
    assert_eq!(found.planned.plan.microbatch, 8);
    let refused = |recipe, pins: &[&str]| chosen(&case, recipe, pins).unwrap_err().to_string();
    assert_eq!(
        refused(Recipe::Ddp, &["tensor=2", "zero=0"]),
        "no point of preset ddp agrees with all pins; those that contradict points of it: tensor"
    );
    let context = refused(Recipe::Ddp, &["context=2"]);
    assert!(context.ends_with("points of it: context"), "{context}");
    assert!(chosen(&case, Recipe::Megatron, &["context=2"]).is_ok());
}

#[test]
fn a_recipe_without_a_plan_says_why() {
    // 18 bytes for each of 70 billion parameters are too many for a device.
    let large = case("llama-3.1-70b", "dgx-h100", 8, 1024);
    let e = chosen(&large, Recipe::Ddp, &[]).unwrap_err();
    assert!(matches!(e, PlanError::Memory { .. }), "{e}");
    // Eight ranks, and samples for four.
    let few = case("gpt2", "dgx-h100", 4, 256);
    let e = chosen(&few, Recipe::Zero(ZeroLevel::One), &[]).unwrap_err();
    assert!(e.to_string().contains("pin data=4 or less"), "{e}");
}
