//! One case: the free plan, and the best of the presets' points.

use crate::cases::Case;
use cost_model::presets;
use import::{BuildOptions, ModelConfig, model_graph};
use ir::cluster::Cluster;
use ir::{DType, Graph, Precision, TrainSpec};
use planner::recipes::{Outcome, plan_points, points};
use planner::{Pins, PlanError, PlanOptions, Planned, Recipe};
use serde_json::Value;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Bounds on the presets' part of a case.
pub struct Budget {
    /// No point is begun later.
    pub time: Option<Duration>,
    /// No more points are planned.
    pub points: Option<usize>,
}

/// The results of one case.
pub struct Measured {
    pub name: String,
    pub n_devices: u32,
    pub free: Result<Free, String>,
    /// Seconds of the free search.
    pub free_search_s: f64,
    /// The points that have plans, the fastest first, and their steps' seconds.
    pub ranked: Vec<(Point, f64)>,
    /// Why there is none, where there is none.
    pub why_none: Option<String>,
    /// All points.
    pub n_points: usize,
    /// Points whose planning began.
    pub n_begun: usize,
    /// Points left out because of the budget.
    pub n_stopped: usize,
    /// Seconds of planning the points.
    pub presets_s: f64,
}

/// The free plan.
pub struct Free {
    pub step_s: f64,
    pub gap: f64,
    /// Gap of the least objective that was found, where simulation prefers another plan; else the
    /// same.
    pub least_gap: f64,
    /// Its stages, meshes and microbatch.
    pub words: String,
}

/// A point, and the first recipe that has it.
#[derive(Clone)]
pub struct Point {
    pub recipe: String,
    pub pins: Pins,
}

/// A case's inputs.
struct Inputs {
    forward: Graph,
    train: TrainSpec,
    cluster: Cluster,
}

/// Plans a case freely, and the points of the recipes or those that are given.
pub fn measure(
    case: &Case,
    models: &Path,
    recipes: &[Recipe],
    given: Option<Vec<Point>>,
    budget: &Budget,
) -> Result<Measured, String> {
    let inputs = inputs(case, models).map_err(|e| format!("{}: {e}", case.name()))?;
    let Inputs {
        forward,
        train,
        cluster,
    } = &inputs;
    let started = Instant::now();
    let free = planner::plan(forward, train, cluster, &PlanOptions::default());
    let free_search_s = started.elapsed().as_secs_f64();
    let all = match given {
        Some(given) => given,
        None => points_of(&inputs, recipes)?,
    };
    let pins: Vec<Pins> = all.iter().map(|p| p.pins.clone()).collect();
    let started = Instant::now();
    let begun = AtomicUsize::new(0);
    let stop = || {
        let is_late = budget.time.is_some_and(|t| started.elapsed() >= t);
        is_late || begun.fetch_add(1, Ordering::Relaxed) >= budget.points.unwrap_or(usize::MAX)
    };
    let tried = plan_points(
        forward,
        train,
        cluster,
        &pins,
        &PlanOptions::default(),
        &stop,
    )
    .map_err(|e| format!("{}: {e}", case.name()))?;
    let presets_s = started.elapsed().as_secs_f64();
    let mut ranked: Vec<(Point, f64)> = Vec::new();
    let (mut n_stopped, mut n_begun, mut nearest) = (0, 0, None::<(u64, String)>);
    for (point, outcome) in all.iter().zip(&tried.outcomes) {
        match outcome {
            Outcome::Planned(step) => {
                n_begun += 1;
                ranked.push((point.clone(), step.0));
            }
            Outcome::Failed(e) => {
                n_begun += 1;
                if let PlanError::Lower(_) | PlanError::Defect(_) = e {
                    eprintln!("{}: {}: {e}", case.name(), point.pins.describe().join(" "));
                }
                let lacks = lacking(e);
                if nearest.as_ref().is_none_or(|(least, _)| lacks < *least) {
                    nearest = Some((lacks, e.to_string()));
                }
            }
            Outcome::Stopped => n_stopped += 1,
            Outcome::TooLarge | Outcome::TooSlow => {}
        }
    }
    ranked.sort_by(|a, b| a.1.total_cmp(&b.1));
    let why_none = ranked.is_empty().then(|| match nearest {
        _ if all.is_empty() => "no point was to be planned".into(),
        Some((_, e)) => e,
        None => "states exceed memory at every point".into(),
    });
    Ok(Measured {
        name: case.name(),
        n_devices: cluster.n_devices(),
        free: free.map(|p| described(&p)).map_err(|e| e.to_string()),
        free_search_s,
        why_none,
        n_points: all.len(),
        n_begun,
        n_stopped,
        presets_s,
        ranked,
    })
}

/// Bytes that a point lacks; most for points that fail for another reason.
fn lacking(e: &PlanError) -> u64 {
    match e {
        PlanError::Memory {
            needed, capacity, ..
        } => needed.saturating_sub(*capacity),
        PlanError::Overrun { bytes } => *bytes,
        _ => u64::MAX,
    }
}

/// The points of all recipes, each once.
fn points_of(inputs: &Inputs, recipes: &[Recipe]) -> Result<Vec<Point>, String> {
    let mut all: Vec<Point> = Vec::new();
    for recipe in recipes {
        let found = points(
            &inputs.forward,
            &inputs.train,
            &inputs.cluster,
            *recipe,
            &PlanOptions::default(),
        );
        let found = found.map_err(|e| e.to_string())?;
        for pins in found {
            if !all.iter().any(|known| known.pins == pins) {
                let recipe = recipe.name().into();
                all.push(Point { recipe, pins });
            }
        }
    }
    Ok(all)
}

/// The model is trained in bf16, or in f16 where the devices have no rate for that.
fn inputs(case: &Case, models: &Path) -> Result<Inputs, String> {
    let cluster = presets::find(&case.cluster).map_err(|e| e.to_string())?;
    let cluster = cluster.ok_or_else(|| format!("there is no cluster `{}`", case.cluster))?;
    let cluster = presets::with_hosts(cluster, case.hosts)?;
    let precision = match cluster.device.peak_flops_per_s.contains_key(&DType::Bf16) {
        true => Precision::Bf16,
        false => Precision::F16,
    };
    let build = BuildOptions {
        sequence: case.sequence,
        dropout: 0.0,
    };
    let config = config(case, models)?;
    Ok(Inputs {
        forward: model_graph(&config, &build).map_err(|e| e.to_string())?,
        train: TrainSpec {
            global_batch: case.global_batch,
            sequence: case.sequence,
            precision,
            ..TrainSpec::default()
        },
        cluster,
    })
}

/// The model's configuration with at least as many positions as the sequence has tokens.
fn config(case: &Case, models: &Path) -> Result<ModelConfig, String> {
    let path = models.join(&*case.model).join("config.json");
    let shown = path.display().to_string();
    let err = |e: &dyn std::fmt::Display| format!("{shown}: {e}");
    let text = std::fs::read(&path).map_err(|e| err(&e))?;
    let mut fields: Value = serde_json::from_slice(&text).map_err(|e| err(&e))?;
    for key in ["n_positions", "n_ctx", "max_position_embeddings"] {
        let field = fields.get_mut(key);
        if let Some(positions) = field.filter(|p| p.as_u64() < Some(case.sequence)) {
            *positions = case.sequence.into();
        }
    }
    let text = serde_json::to_vec(&fields).map_err(|e| err(&e))?;
    ModelConfig::parse(&shown, &text).map_err(|e| err(&e))
}

fn described(planned: &Planned) -> Free {
    let (plan, proof) = (&planned.plan, &planned.plan.proof);
    let least_s = proof.least_objective_s.unwrap_or(proof.objective_s).0;
    let mesh = plan.stages.first().map(|s| {
        let axes = s.mesh.axes.iter().filter(|a| a.size > 1);
        let axes: Vec<String> = axes.map(|a| format!("{}={}", a.name, a.size)).collect();
        axes.join(" ")
    });
    Free {
        step_s: planned.simulation.step_time.0,
        gap: proof.gap,
        least_gap: match least_s > 0.0 {
            true => (1.0 - proof.lower_bound_s.0 / least_s).max(0.0),
            false => 0.0,
        },
        words: format!(
            "{} on {} ({}), microbatch {}, {}",
            ir::counted(plan.stages.len() as u64, "stage"),
            ir::counted(planned.program.roles.len() as u64, "mesh"),
            mesh.filter(|m| !m.is_empty()).unwrap_or("1 device".into()),
            plan.microbatch,
            plan.schedule.name()
        ),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test may stop at what it does not expect.

    use super::*;
    use crate::cases::CASES;
    use crate::report;
    use planner::recipes::Facts;
    use std::collections::BTreeSet;

    fn models() -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../models")
    }

    #[test]
    fn every_case_has_a_model_a_cluster_and_points() {
        let names: BTreeSet<String> = CASES.iter().map(Case::name).collect();
        for case in CASES {
            assert_eq!(Case::named(&case.name()).as_ref(), Ok(case));
        }
        assert!(Case::named("llama-2-7b dgx-a100-40gb b128 s4096").is_err());
        assert!(names.len() == CASES.len() && CASES.len() >= 40);
        for case in CASES {
            let inputs = inputs(case, &models()).unwrap();
            let facts = Facts::of(&inputs.forward, &inputs.train, &inputs.cluster);
            assert_eq!(inputs.cluster.problems(), [""; 0], "{}", case.name());
            // Some recipe gives every rank that splits samples one.
            let grid = Recipe::Megatron.grid(&facts, None);
            let fits = |p: &Pins| u64::from(p.data.unwrap_or(1)) <= case.global_batch;
            assert!(grid.iter().any(fits), "{}", case.name());
            // Long sequences are planned with and without context ranks.
            let long = grid.iter().any(|p| p.context.is_some());
            assert_eq!(long, case.sequence >= 32_768 && facts.n_devices > 1);
        }
    }

    #[test]
    fn a_case_is_measured_and_known_again() {
        let case = Case {
            model: "tiny-gpt2".into(),
            cluster: "h100-sxm*2+nvlink4+infiniband-ndr*2".into(),
            hosts: 1,
            global_batch: 8,
            sequence: 128,
        };
        let recipes = [Recipe::Ddp, Recipe::Megatron];
        let unbounded = Budget {
            time: None,
            points: None,
        };
        let measured = measure(&case, &models(), &recipes, None, &unbounded).unwrap();
        assert!(measured.free.is_ok() && measured.n_stopped == 0);
        let (best, step_s) = measured.ranked.first().unwrap();
        assert!(measured.ranked.iter().all(|(_, s)| s >= step_s));
        let ratio = report::ratio(&measured).unwrap();
        let columns = |row: &str| row.matches(" | ").count();
        let header = report::HEADER.lines().next().unwrap();
        assert_eq!(columns(&report::row(&measured)), columns(header));
        assert!(report::row(&measured).contains(&format!("| {ratio:.3} |")));
        let known = report::json(std::slice::from_ref(&measured));
        let points = report::best_points(&known, &case.name()).unwrap();
        assert_eq!(points.first().map(|p| &p.pins), Some(&best.pins));
        assert!(report::best_points(&known, "another").unwrap().is_empty());
        // The best point alone is planned again, and is as fast.
        let again = measure(&case, &models(), &recipes, Some(points), &unbounded).unwrap();
        assert_eq!(again.ranked.first().map(|(_, s)| s), Some(step_s));
        // A budget of one point leaves the others out, and the table says so.
        let one = Budget {
            time: None,
            points: Some(1),
        };
        let cut = measure(&case, &models(), &recipes, None, &one).unwrap();
        assert_eq!(cut.ranked.len(), 1);
        assert!(cut.n_stopped > 0 && cut.n_begun + cut.n_stopped <= cut.n_points);
    }
}
