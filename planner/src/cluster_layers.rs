//! Layer clustering: cuts a forward graph into the layers that pipelines are sliced from.
//!
//! Layers that the importer or the graph's author declared are kept; this pass is for graphs
//! that declare none or one, and for whoever asks for another division. It runs before the
//! training graph is made, and changes nothing but the layer of each op and the order in which
//! layers stand: paths, and with them initial values, random keys and pins, stay as they are,
//! so what is computed is the same to the bit. The plan embeds the graph with its new layers,
//! so no later command has to cut again.
//!
//! * `places`: where exactly one activation crosses; the graph falls into pieces there.
//! * `repeats`: equal pieces in a row. Every copy of a repeated block becomes one layer, so
//!   that layers are equal and solved once.
//! * `divide`: Alpa's dynamic program over pieces, for what does not repeat and for a number
//!   of layers that is asked for.
//! * `names`: names by which equal layers have equal relative paths, where paths allow.
//!
//! The number of layers, when none is asked for: each copy of a repeated block is one, or
//! several copies together where there are more than [`MAX_COPIES`]; each stretch between runs
//! is divided into layers of about the FLOPs of the largest copy, if it can be divided evenly
//! ([`divide`]). Without repetition the whole graph is one such stretch, of [`UNREPEATED`]
//! layers at most.
//!
//! Invariants: layers are contiguous in a topological order, and exactly one activation
//! crosses each cut; a graph that was cut at its repeated blocks by its author is cut the same
//! way again, op for op; the same graph gives the same layers.

mod divide;
mod names;
mod places;
mod repeats;

use divide::{Weight, divide, most_balanced};
use ir::{Graph, GraphError, LayerId, OpId, Place, counted};
use places::{Piece, pieces};
pub(crate) use repeats::without_key;
use repeats::{Run, classes, runs};
use std::ops::Range;

/// Layers of a graph in which nothing repeats.
const UNREPEATED: usize = 16;
/// Layers that copies of repeated blocks become.
const MAX_COPIES: usize = 200;
/// A stretch between repeated blocks has at most as many layers as the whole has shares of
/// this size.
const SHARES: u64 = 128;
/// Pieces that the dynamic program sees; of more, neighbours are joined.
const MAX_PIECES: usize = 2048;

/// Which layers a graph is planned with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layering {
    /// The declared ones; where there is one or none, those that clustering finds.
    #[default]
    IfNeeded,
    /// The declared ones.
    Declared,
    /// Layers that clustering finds, of a number that suits the graph.
    Auto,
    /// Layers that clustering finds, this many.
    Exactly(usize),
}

/// A graph with the layers to plan it with.
#[derive(Clone, Debug, PartialEq)]
pub struct Layered {
    /// The graph; `None` where its own layers are kept.
    pub graph: Option<Graph>,
    /// The cut that was made, as a sentence without its period; `None` where nothing was asked or
    /// needed.
    pub note: Option<String>,
}

/// Why a graph cannot be cut as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClusterError {
    /// More layers than places allow, or none.
    #[error(
        "{} asked for; the graph can be cut into {}, because it has {places} that one activation crosses",
        asked_for(*asked), match most { 0 | 1 => "1".to_string(), most => format!("1 to {most}") }
    )]
    Count {
        /// The number asked for.
        asked: usize,
        /// The largest possible number.
        most: usize,
        /// The number of places, in words.
        places: String,
    },
    /// The graph has not one loss, or has ops without a layer.
    #[error(
        "the graph cannot be cut into layers: it has several outputs or none, or ops of no layer"
    )]
    NotForward,
    /// More layers than the search slices.
    #[error("{} asked for; the search slices at most {most}", asked_for(*asked))]
    TooMany {
        /// The number asked for.
        asked: usize,
        /// The limit.
        most: usize,
    },
    /// The graph with its new layers is no graph: a defect of this pass.
    #[error("the layers that were found do not make a graph: {0}")]
    Rebuild(#[from] GraphError),
}

fn asked_for(layers: usize) -> String {
    let were = if layers == 1 { "was" } else { "were" };
    format!("{} {were}", counted(layers as u64, "layer"))
}

/// Gives `forward` the layers that `layering` asks for, at most `max_layers`.
///
/// # Errors
/// When a number is asked for that the graph or the limit does not allow.
pub fn cluster_layers(
    forward: &Graph,
    layering: Layering,
    max_layers: usize,
) -> Result<Layered, ClusterError> {
    let kept = Layered {
        graph: None,
        note: None,
    };
    let asked = match layering {
        Layering::Declared => return Ok(kept),
        Layering::IfNeeded if forward.layers.len() > 1 => return Ok(kept),
        Layering::IfNeeded | Layering::Auto => None,
        Layering::Exactly(n) if n > max_layers => {
            return Err(ClusterError::TooMany {
                asked: n,
                most: max_layers,
            });
        }
        Layering::Exactly(n) => Some(n),
    };
    let Some(pieces) = pieces(forward) else {
        return match asked {
            None => Ok(kept),
            Some(_) => Err(ClusterError::NotForward),
        };
    };
    let places = counted(pieces.len() as u64 - 1, "place");
    if asked.is_some_and(|n| n == 0 || n > pieces.len()) {
        return Err(ClusterError::Count {
            asked: asked.unwrap_or_default(),
            most: pieces.len(),
            places,
        });
    }
    let cutter = Cutter::new(forward, &pieces, max_layers);
    let ends = match asked {
        Some(n) => cutter.exactly(n),
        None => cutter.own_number(),
    };
    let found = format!(
        "the graph declares {} and has {places} that one activation crosses",
        counted(forward.layers.len() as u64, "layer")
    );
    if asked.is_none() && ends.len() == 1 {
        return Ok(Layered {
            note: Some(format!("layers: {found}, so it is not cut")),
            ..kept
        });
    }
    Ok(Layered {
        graph: Some(with_layers(forward, &pieces, &ends)?),
        note: Some(format!(
            "layers: {found}; it was cut into {}",
            counted(ends.len() as u64, "layer")
        )),
    })
}

/// Chooses among the places.
struct Cutter {
    weights: Vec<Weight>,
    runs: Vec<Run>,
    max_layers: usize,
}

impl Cutter {
    fn new(graph: &Graph, pieces: &[Piece], max_layers: usize) -> Self {
        let weights: Vec<Weight> = pieces
            .iter()
            .map(|p| Weight {
                flops: p.flops,
                bytes: p.bytes,
            })
            .collect();
        let flops: Vec<u64> = pieces.iter().map(|p| p.flops).collect();
        Cutter {
            weights,
            runs: runs(&classes(graph, pieces), &flops),
            max_layers,
        }
    }

    /// Ends of the layers, counted in pieces, of a number that suits the graph.
    fn own_number(&self) -> Vec<usize> {
        let copies: usize = self.runs.iter().map(|r| r.copies).sum();
        let ends = self.units(copies.div_ceil(MAX_COPIES).max(1));
        if ends.len() <= self.max_layers {
            return ends;
        }
        best_of(&self.weights, &ends, self.max_layers)
    }

    /// Ends of exactly `n` layers. As long as whole copies of repeated blocks make that many,
    /// layers consist of whole copies.
    fn exactly(&self, n: usize) -> Vec<usize> {
        let units = self.units(1);
        if n <= units.len() && !self.runs.is_empty() {
            return best_of(&self.weights, &units, n);
        }
        let all: Vec<usize> = (1..=self.weights.len()).collect();
        best_of(&self.weights, &all, n)
    }

    /// Copies of repeated blocks, `together` at a time, and the stretches between them in
    /// parts of about the FLOPs of the largest of those.
    fn units(&self, together: usize) -> Vec<usize> {
        let whole = sum(&self.weights);
        let largest = self.runs.iter().map(|run| {
            let one = sum(&self.weights[run.start..run.start + run.period]);
            one.saturating_mul(together as u64)
        });
        let share = largest.max().unwrap_or(whole / UNREPEATED as u64);
        let share = share.max(whole / SHARES).max(1);
        let mut ends = Vec::new();
        let mut at = 0;
        for run in &self.runs {
            self.stretch(at..run.start, share, &mut ends);
            for first in (0..run.copies).step_by(together) {
                let copies = (first + together).min(run.copies);
                ends.push(run.start + copies * run.period);
            }
            at = run.end();
        }
        self.stretch(at..self.weights.len(), share, &mut ends);
        ends
    }

    fn stretch(&self, range: Range<usize>, share: u64, ends: &mut Vec<usize>) {
        if range.is_empty() {
            return;
        }
        let first = range.start;
        let weights = &self.weights[range];
        let parts = thinned(weights);
        let joined = join(weights, &parts);
        let shares = (sum(weights) as f64 / share as f64).round() as usize;
        let n = most_balanced(&joined, shares.clamp(1, joined.len()));
        ends.extend(divide(&joined, n).iter().map(|&e| first + parts[e - 1]));
    }
}

fn sum(weights: &[Weight]) -> u64 {
    weights.iter().fold(0, |sum, w| sum.saturating_add(w.flops))
}

/// The parts that end at `ends`, each as one.
fn join(weights: &[Weight], ends: &[usize]) -> Vec<Weight> {
    let mut start = 0;
    ends.iter()
        .map(|&end| {
            let part = &weights[std::mem::replace(&mut start, end)..end];
            Weight {
                flops: sum(part),
                bytes: part.last().map_or(0, |w| w.bytes),
            }
        })
        .collect()
}

/// The best division into `n` layers at some of `ends`.
fn best_of(weights: &[Weight], ends: &[usize], n: usize) -> Vec<usize> {
    let parts = join(weights, ends);
    let kept = thinned(&parts);
    let parts = join(&parts, &kept);
    divide(&parts, n)
        .iter()
        .map(|&e| ends[kept[e - 1] - 1])
        .collect()
}

/// The ends of at most [`MAX_PIECES`] groups of neighbours: of equal weight, where half of a
/// piece's weight is its share of all FLOPs and half is the same for every piece. All of them
/// where there are no more.
fn thinned(weights: &[Weight]) -> Vec<usize> {
    let n = weights.len();
    if n <= MAX_PIECES {
        return (1..=n).collect();
    }
    let same = u128::from(sum(weights)) / n as u128 + 1;
    let weight = |w: &Weight| u128::from(w.flops) + same;
    let all: u128 = weights.iter().map(weight).sum();
    let mut before = 0u128;
    let group = weights.iter().map(|w| {
        let group = before * MAX_PIECES as u128 / all;
        before += weight(w);
        group
    });
    let group: Vec<u128> = group.collect();
    (1..=n)
        .filter(|&end| end == n || group[end - 1] != group[end])
        .collect()
}

/// The graph with the layers that end at these pieces: the ops in order of their layers, those
/// of a layer in the order that they had.
fn with_layers(forward: &Graph, pieces: &[Piece], ends: &[usize]) -> Result<Graph, GraphError> {
    let mut layers: Vec<Vec<OpId>> = Vec::with_capacity(ends.len());
    let mut start = 0;
    for &end in ends {
        let range = std::mem::replace(&mut start, end)..end;
        let mut ops: Vec<OpId> = pieces[range].iter().flat_map(|p| p.ops.clone()).collect();
        ops.sort_unstable();
        layers.push(ops);
    }
    let mut out = Graph::new(forward.name.clone());
    out.layers = names::names(forward, &layers);
    let mut moved = vec![None; forward.values().len()];
    for (layer, ops) in layers.iter().enumerate() {
        for &id in ops {
            let op = forward.op(id);
            let place = Place {
                path: op.path.clone(),
                pass: op.pass,
                region: op.region,
                layer: Some(LayerId::new(layer)),
            };
            let results = if op.kind.is_source() {
                let ty = forward.ty(op.outputs[0]).clone();
                vec![out.add_source(op.kind.clone(), ty, place)?]
            } else {
                let inputs: Option<Vec<_>> = op.inputs.iter().map(|v| moved[v.index()]).collect();
                let inputs = inputs.expect("the operands of an op are in its layer or before");
                out.add(op.kind.clone(), &inputs, place)?
            };
            for (v, result) in op.outputs.iter().zip(results) {
                moved[v.index()] = Some(result);
            }
        }
    }
    let outputs: Option<Vec<_>> = forward.outputs.iter().map(|v| moved[v.index()]).collect();
    out.outputs = outputs.expect("every value of the graph was moved");
    Ok(out)
}

#[cfg(test)]
mod tests;
