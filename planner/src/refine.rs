//! A stage under memory pressure as one integer program.
//!
//! Elimination with a price on memory gives a choice that fits and a bound; between two
//! prices there may be something better that mixes them, layer by layer. So the layers of the
//! stage become one intra-op problem: a node per decision group, memory rows over live
//! intervals (parameters, gradients and states for the whole step; the saved tensors of layer
//! i of L from its forward at time i to its backward at time 2L+1-i, times the microbatches
//! in flight), the stage's budget, and the solver of `intra_op`. Where memory does not bind
//! the eliminated choice is optimal already and is kept.

use crate::PlanError;
use crate::intra_op::problem::{Edge, IntraOpProblem, Node, evaluate};
use crate::intra_op::{SolveOptions, SolveStatus, solve};
use crate::layer_model::{LayerModel, QUANTUM_S, Weights};
use ir::Seconds;
use ir::plan::StageProof;

/// Stages with more nodes keep the eliminated choice: presolve alone would take seconds.
const MAX_NODES: usize = 1_500;
/// Columns up to which an integer program is built, and its limit of nodes; no clock is used,
/// so the same stage always gets the same choice.
const MAX_COLUMNS: usize = 20_000;
const WORK_LIMIT: u64 = 50;

/// A stage's choices and what is proved about them.
pub(crate) struct Refined {
    /// Per layer, the choice of each of its model's groups.
    pub choices: Vec<Vec<u32>>,
    pub proof: StageProof,
    /// The problem, when it was solved.
    pub problem: Option<IntraOpProblem>,
}

/// Improves the choices of a stage whose layers have these kinds; `pressed` says whether they
/// were made under a price on memory.
#[allow(clippy::too_many_arguments)] // One call site; a struct would only rename it.
pub(crate) fn refine(
    name: &str,
    models: &[LayerModel],
    kinds: &[usize],
    choices: Vec<Vec<u32>>,
    weights: Weights,
    in_flight: u64,
    budget: u64,
    pressed: bool,
) -> Result<Refined, PlanError> {
    let (problem, places) = stage_problem(name, models, kinds, weights, in_flight, budget);
    let mut flat = vec![0u32; problem.nodes.len()];
    for (layer, choice) in choices.iter().enumerate() {
        for (group, &c) in choice.iter().enumerate() {
            flat[places[layer][group]] = c;
        }
    }
    let old = evaluate(&problem, &flat).ok();
    let seconds = |quanta: u128| Seconds(quanta as f64 * QUANTUM_S);
    // A choice that elimination made has a cost; one without is our own mistake, not a price.
    let Some(known) = old.as_ref().and_then(|e| e.objective) else {
        return Err(PlanError::Strategies(format!(
            "the choice of {name} is forbidden or malformed"
        )));
    };
    let fits = old.is_some_and(|e| e.feasible);
    let keep = |method: &str, bound: u128, choices, problem| Refined {
        choices,
        proof: StageProof {
            method: method.into(),
            objective_s: seconds(known),
            lower_bound_s: seconds(bound.min(known)),
            gap: if known > 0 {
                (known - bound.min(known)) as f64 / known as f64
            } else {
                0.0
            },
        },
        problem,
    };
    if !pressed {
        return Ok(keep("elimination", known, choices, None));
    }
    if problem.nodes.len() > MAX_NODES {
        return Ok(keep("priced elimination", 0, choices, None));
    }
    let options = SolveOptions {
        work_limit: Some(WORK_LIMIT),
        max_ilp_columns: MAX_COLUMNS,
        gap: 1e-4,
        time_limit: None,
        ..SolveOptions::default()
    };
    let Ok(result) = solve(&problem, &options) else {
        return Ok(keep("priced elimination", 0, choices, None));
    };
    let better = result.objective.filter(|&o| !fits || o < known);
    let (Some(objective), Some(choice)) = (better, &result.choice) else {
        return Ok(keep(
            "integer program",
            result.lower_bound,
            choices,
            Some(problem),
        ));
    };
    let choices = places
        .iter()
        .map(|layer| layer.iter().map(|&n| choice[n]).collect())
        .collect();
    let bound = if result.status == SolveStatus::Optimal {
        objective
    } else {
        result.lower_bound.min(objective)
    };
    Ok(Refined {
        choices,
        proof: StageProof {
            method: "integer program".into(),
            objective_s: seconds(objective),
            lower_bound_s: seconds(bound),
            gap: if objective > 0 {
                (objective - bound) as f64 / objective as f64
            } else {
                0.0
            },
        },
        problem: Some(problem),
    })
}

/// The problem of a stage, and for each layer the node of each group. The boundary of a layer
/// is one node with the exit of the layer before.
pub(crate) fn stage_problem(
    name: &str,
    models: &[LayerModel],
    kinds: &[usize],
    weights: Weights,
    in_flight: u64,
    budget: u64,
) -> (IntraOpProblem, Vec<Vec<usize>>) {
    let n = kinds.len() as u64;
    let mut problem = IntraOpProblem {
        name: name.into(),
        usage_limit: Some(budget),
        ..IntraOpProblem::default()
    };
    let mut places: Vec<Vec<usize>> = Vec::with_capacity(kinds.len());
    for (i, &kind) in kinds.iter().enumerate() {
        let model = &models[kind];
        let time = i as u64 + 1;
        let previous_exit = i
            .checked_sub(1)
            .and_then(|p| models[kinds[p]].exit.map(|g| places[p][g]));
        let mut place = Vec::with_capacity(model.groups.len());
        for (g, group) in model.groups.iter().enumerate() {
            let shared = previous_exit.filter(|&node| {
                model.entry == Some(g) && problem.nodes[node].costs.len() == group.choices.len()
            });
            let is_static = group.choices.iter().any(|c| c.static_bytes > 0);
            let usages = group.choices.iter().map(|c| {
                c.static_bytes
                    .saturating_add(c.saved_bytes.saturating_mul(in_flight))
            });
            let node = Node {
                costs: group.choices.iter().map(|c| weights.cost(c)).collect(),
                usages: usages.collect(),
                interval: if is_static {
                    [0, 2 * n + 2]
                } else {
                    [time, 2 * n + 2 - time]
                },
            };
            match shared {
                // The exit was made without cost or bytes; as an entry it has both.
                Some(at) => {
                    problem.nodes[at] = node;
                    place.push(at);
                }
                None => {
                    problem.nodes.push(node);
                    place.push(problem.nodes.len() - 1);
                }
            }
        }
        for edge in model.edges(weights) {
            problem.edges.push(Edge {
                a: place[edge.a as usize] as u32,
                b: place[edge.b as usize] as u32,
                table: edge.table,
            });
        }
        places.push(place);
    }
    (problem, places)
}
