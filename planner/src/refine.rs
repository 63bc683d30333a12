//! A stage under memory pressure as one integer program.
//!
//! Elimination with a price on memory gives a choice that fits and a bound; between two
//! prices there may be something better that mixes them, layer by layer. So the layers of the
//! stage become one intra-op problem: a node per decision group, memory rows over live
//! intervals (parameters, gradients and states for the whole step; the saved tensors of layer
//! i of L from its forward at time i to its backward at time 2L+1-i, times the microbatches
//! in flight), the stage's budget, and the solver of `intra_op`. Where memory does not bind
//! the eliminated choice is optimal already and is kept.
//!
//! Elimination at prices also bounds what fits from below ([`lagrangian`]), so that a stage
//! that is too large for the solver, or that it does not finish, has a proof as well.

use crate::PlanError;
use crate::layer_model::{LayerModel, QUANTUM_S, WeightedLayer, Weights};
use crate::search::MEMORY_PRICES;
use crate::stage::{LayerChoice, PricedMesh};
use intra_op::problem::{Edge, IntraOpProblem, Node, evaluate};
use intra_op::{SolveOptions, solve};
use ir::Seconds;
use ir::plan::StageProof;

/// Stages with more nodes keep the eliminated choice: presolve alone would take seconds.
const MAX_NODES: usize = 1_500;
/// Columns up to which an integer program is built, and its limit of nodes; no clock is used,
/// so the same stage always gets the same choice.
const MAX_COLUMNS: usize = 20_000;
const WORK_LIMIT: u64 = 50;
/// A choice that is proved to be so close to the best, relatively, is good enough.
const GAP: f64 = 1e-4;
/// A choice that is known to be so close is not worth an integer program.
const NEAR: f64 = 0.01;
/// Prices are looked at as logarithms to base 2 of multiples of [`MEMORY_PRICES`]' least: where the
/// search for the best begins where no price is known, how far it steps, and between which.
const START: f64 = 6.0;
const STRIDE: f64 = 2.0;
const LEAST: f64 = -10.0;
const MOST: f64 = 17.0;
/// Times that the bracket around the best price is narrowed.
const NARROWINGS: usize = 5;

/// A stage's choices and what is proved about them.
#[derive(Clone)]
pub(crate) struct Refined {
    /// Per layer, what was chosen.
    pub choices: Vec<LayerChoice>,
    pub proof: StageProof,
    /// Its bound in quanta.
    pub bound: u128,
    /// The problem, when it was solved.
    pub problem: Option<IntraOpProblem>,
}

/// A stage to be improved.
pub(crate) struct Stage<'s, 'm> {
    pub name: &'s str,
    /// Per layer, the model of its kind under what was chosen to be recomputed.
    pub layers: &'s [&'m LayerModel],
    /// Per layer, its kind.
    pub kinds: &'s [usize],
    /// The models of the kinds under all choices of what is recomputed, without a price.
    pub weighted: &'s [Vec<Option<&'m WeightedLayer<'m>>>],
    /// Weights of time.
    pub weights: Weights,
    /// Microbatches in flight.
    pub in_flight: u64,
    /// Bytes per device for what is not transient.
    pub budget: u64,
    /// Whether the choices were made under a price on memory.
    pub is_pressed: bool,
    /// Whether equal layers may be decided differently.
    pub may_mix: bool,
    /// That price, seconds per byte; of several the highest.
    pub price: f64,
    /// Whether they fit.
    pub fits: bool,
    /// A cost in quanta that no choices that fit can beat, as far as is known.
    pub bound: u128,
    /// Whether a proof about them is of use. A bound takes as long as all else.
    pub proves: bool,
}

/// Improves the choices of a stage; what its layers recompute stays as it is.
pub(crate) fn refine(
    stage: &Stage<'_, '_>,
    choices: Vec<LayerChoice>,
) -> Result<Refined, PlanError> {
    let &Stage {
        name,
        layers,
        weights,
        in_flight,
        budget,
        ..
    } = stage;
    // A choice that elimination made has a cost; one without is our own mistake, not a price.
    let Some(known) = cost(layers, &choices, weights) else {
        return Err(PlanError::Defect(format!(
            "the choice of {name} is forbidden or malformed"
        )));
    };
    let keep = |method: &str, bound: u128, choices, problem| Refined {
        choices,
        proof: proof(method, known, bound),
        bound: bound.min(known),
        problem,
    };
    if !stage.is_pressed {
        return Ok(keep("elimination", known, choices, None));
    }
    let n_nodes: usize = layers.iter().map(|model| model.groups.len()).sum();
    let is_large = !stage.may_mix || n_nodes > MAX_NODES;
    if !stage.proves && is_large {
        return Ok(keep("priced elimination", 0, choices, None));
    }
    let is_near = |bound: u128| known.saturating_sub(bound) as f64 <= NEAR * known as f64;
    let (weighted, kinds) = (stage.weighted, stage.kinds);
    let at = |price| bound_at(weighted, kinds, weights, in_flight, budget, price);
    if stage.fits && is_near(stage.bound) {
        return Ok(keep("priced elimination", stage.bound, choices, None));
    }
    let known_bound = at(stage.price);
    let bound = (known_bound.max(0.0) as u128).max(stage.bound);
    if stage.fits && is_near(bound) {
        return Ok(keep("priced elimination", bound, choices, None));
    }
    let room = (in_flight, budget);
    let from = (stage.price, known_bound);
    let enough = |bound| stage.fits && is_near(bound);
    let bound = lagrangian(weighted, kinds, weights, room, from, &enough).max(bound);
    if is_large || stage.fits && is_near(bound) {
        return Ok(keep("priced elimination", bound, choices, None));
    }
    let (problem, places) = stage_problem(name, layers, weights, in_flight, budget);
    let mut flat = vec![0u32; problem.nodes.len()];
    for (layer, choice) in choices.iter().enumerate() {
        for (group, &c) in choice.groups.iter().enumerate() {
            flat[places[layer][group]] = c;
        }
    }
    let fits = evaluate(&problem, &flat).is_ok_and(|e| e.feasible);
    // A bound of the problem is one for what its layers recompute alone.
    let recomputes = stage.weighted.len() > 1;
    let options = SolveOptions {
        work_limit: Some(WORK_LIMIT),
        max_ilp_columns: MAX_COLUMNS,
        gap: GAP,
        time_limit: None,
        ..SolveOptions::default()
    };
    let Ok(result) = solve(&problem, &options) else {
        return Ok(keep("priced elimination", bound, choices, None));
    };
    let bound = match recomputes {
        true => bound,
        false => result.lower_bound.max(bound),
    };
    let better = result.objective.filter(|&o| !fits || o < known);
    let (Some(objective), Some(choice)) = (better, &result.choice) else {
        return Ok(keep("integer program", bound, choices, Some(problem)));
    };
    let new = places.iter().zip(&choices);
    let choices = new
        .map(|(layer, old)| LayerChoice {
            variant: old.variant,
            groups: layer.iter().map(|&n| choice[n]).collect(),
        })
        .collect();
    let bound = bound.min(objective);
    Ok(Refined {
        choices,
        proof: proof("integer program", objective, bound),
        bound,
        problem: Some(problem),
    })
}

/// The proof about choices that were made under an assumption, of which the stage's weights
/// know nothing: their objective under these weights, and a bound on all choices.
pub(crate) fn proved(
    stage: &Stage<'_, '_>,
    choices: &[LayerChoice],
) -> Result<StageProof, PlanError> {
    let Some(known) = cost(stage.layers, choices, stage.weights) else {
        return Err(PlanError::Defect(format!(
            "the choice of {} is forbidden or malformed",
            stage.name
        )));
    };
    let (weighted, kinds, weights) = (stage.weighted, stage.kinds, stage.weights);
    let room = (stage.in_flight, stage.budget);
    let price = match stage.is_pressed {
        true => stage.price,
        false => 0.0,
    };
    let at_price = bound_at(weighted, kinds, weights, room.0, room.1, price);
    let is_near = |bound: u128| known.saturating_sub(bound) as f64 <= NEAR * known as f64;
    let bound = match stage.is_pressed {
        true => lagrangian(weighted, kinds, weights, room, (price, at_price), &is_near),
        false => at_price.max(0.0) as u128,
    };
    Ok(proof("assumed costs", known, bound))
}

/// A proof of an objective and a bound in quanta, of which the bound is no higher.
fn proof(method: &str, objective: u128, bound: u128) -> StageProof {
    let seconds = |quanta: u128| Seconds(quanta as f64 * QUANTUM_S);
    let bound = bound.min(objective);
    StageProof {
        method: method.into(),
        objective_s: seconds(objective),
        lower_bound_s: seconds(bound),
        gap: match objective {
            0 => 0.0,
            _ => (objective - bound) as f64 / objective as f64,
        },
    }
}

/// The objective of a stage's choices in quanta; `None` where one is forbidden. The boundary
/// between two layers is one decision and counts once, as the second one's.
fn cost(layers: &[&LayerModel], choices: &[LayerChoice], weights: Weights) -> Option<u128> {
    let n_layouts = |model: &LayerModel, g: usize| model.groups[g].choices.len();
    let costs = layers.iter().zip(choices).enumerate();
    let costs = costs.map(|(i, (model, choice))| {
        let entered = layers.get(i + 1).and_then(|n| Some(n_layouts(n, n.entry?)));
        let left = model.exit.map(|g| n_layouts(model, g));
        let exit_is_free = entered.is_some() && entered == left;
        model.cost(weights, &choice.groups, exit_is_free)
    });
    costs.sum()
}

/// A cost, in quanta, that no choice of a stage within `budget` bytes can beat; looked for until
/// one is `enough`, from the bound under a `known` price on.
///
/// Whatever fits has `bytes <= budget`, so for every price `p >= 0` per byte its time is at
/// least `min over all choices (time + p * bytes) - p * budget` (Lagrangian relaxation, Everett
/// 1963; `bytes` are the static ones and those saved by the microbatches in flight). The
/// minimum is exact, by elimination. In `p` the bound is concave: from the known price steps go
/// up its slope until it falls, then the bracket is narrowed.
pub(crate) fn lagrangian(
    weighted: &[Vec<Option<&WeightedLayer<'_>>>],
    kinds: &[usize],
    weights: Weights,
    (in_flight, budget): (u64, u64),
    (price, bound): (f64, f64),
    enough: &dyn Fn(u128) -> bool,
) -> u128 {
    let at = |log: f64| {
        let price = MEMORY_PRICES[1] * log.exp2();
        bound_at(weighted, kinds, weights, in_flight, budget, price)
    };
    let mut most = bound;
    let is_enough = |most: f64| enough(most.max(0.0) as u128);
    // Where memory has no price yet, the bound of the time alone is that of the known price.
    let start = match price > 0.0 {
        true => (price / MEMORY_PRICES[1]).log2(),
        false => START,
    };
    let mut middle = match price > 0.0 {
        true => bound,
        false => at(start),
    };
    most = most.max(middle);
    let (mut low, mut centre, mut high) = (start - STRIDE, start, start + STRIDE);
    // Up the slope: at most one of the two sides rises.
    for side in [STRIDE, -STRIDE] {
        loop {
            if is_enough(most) {
                return most.max(0.0) as u128;
            }
            let next = centre + side;
            if !(LEAST..=MOST).contains(&next) {
                break;
            }
            let value = at(next);
            if value <= middle {
                break;
            }
            (middle, centre) = (value, next);
            (low, high) = (centre - STRIDE, centre + STRIDE);
            most = most.max(value);
        }
        if centre != start {
            break;
        }
    }
    for _ in 0..NARROWINGS {
        if is_enough(most) {
            break;
        }
        // The wider of the two parts is halved.
        let next = match centre - low > high - centre {
            true => (low + centre) / 2.0,
            false => (centre + high) / 2.0,
        };
        let value = at(next);
        most = most.max(value);
        match (value > middle, next < centre) {
            (true, true) => (high, centre, middle) = (centre, next, value),
            (true, false) => (low, centre, middle) = (centre, next, value),
            (false, true) => low = next,
            (false, false) => high = next,
        }
    }
    most.max(0.0) as u128
}

/// The bound under one price, seconds per byte, in quanta.
pub(crate) fn bound_at(
    weighted: &[Vec<Option<&WeightedLayer<'_>>>],
    kinds: &[usize],
    weights: Weights,
    in_flight: u64,
    budget: u64,
    price: f64,
) -> f64 {
    let priced = Weights {
        static_price: price,
        saved_price: price * in_flight as f64,
        ..weights
    };
    let least = PricedMesh::of_variants(weighted, priced).objective(kinds);
    // Each summed cost is rounded to within half a quantum, here and in the objective.
    let n_terms = |k: usize| {
        let ways = weighted.iter().filter_map(|kinds| kinds[k]);
        ways.map(|w| w.model.n_terms()).max().unwrap_or(0)
    };
    let rounding: usize = kinds.iter().map(|&k| n_terms(k)).sum();
    let rounding = rounding as f64;
    least.map_or(0.0, |least| {
        least as f64 - rounding - price * budget as f64 / QUANTUM_S
    })
}

/// The problem of a stage, and for each layer the node of each group. The boundary of a layer
/// is one node with the exit of the layer before.
pub(crate) fn stage_problem(
    name: &str,
    layers: &[&LayerModel],
    weights: Weights,
    in_flight: u64,
    budget: u64,
) -> (IntraOpProblem, Vec<Vec<usize>>) {
    let n = layers.len() as u64;
    let mut problem = IntraOpProblem {
        name: name.into(),
        usage_limit: Some(budget),
        ..IntraOpProblem::default()
    };
    let mut places: Vec<Vec<usize>> = Vec::with_capacity(layers.len());
    for (i, model) in layers.iter().enumerate() {
        let time = i as u64 + 1;
        let previous_exit = i
            .checked_sub(1)
            .and_then(|p| layers[p].exit.map(|g| places[p][g]));
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
