//! Slots of experts, and how many of them tokens fill.
//!
//! Shapes are static: an expert works on all its slots, filled or not. A model's own work is that of
//! the tokens, so model FLOPs count the share of the slots that balanced routers fill.

use ir::{Dim, Graph, Op, OpKind};

/// Mixtures of experts that are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Routing {
    /// Experts.
    pub experts: u64,
    /// Slots of each for the tokens of a sample.
    pub capacity: u64,
    /// Experts of a token.
    pub top_k: u64,
    /// Tokens of a sample.
    pub tokens: u64,
}

impl Routing {
    /// The mixtures of a graph, each kind once, ascending.
    pub fn all(graph: &Graph) -> Vec<Routing> {
        let routes = graph.ops().iter().filter_map(|op| match op.kind {
            OpKind::Route {
                top_k, capacity, ..
            } => {
                let logits = graph.ty(*op.inputs.first()?);
                match logits.shape.0[..] {
                    [_, Dim::Fixed(tokens), Dim::Fixed(experts)] => Some(Routing {
                        experts,
                        capacity,
                        top_k,
                        tokens,
                    }),
                    _ => None,
                }
            }
            _ => None,
        });
        let mut all: Vec<Routing> = routes.collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Slots over the choices that tokens make: 1.25 where a quarter more are there than needed.
    pub fn factor(&self) -> f64 {
        let chosen = self.top_k as f64 * self.tokens as f64;
        self.experts as f64 * self.capacity as f64 / chosen.max(1.0)
    }

    /// The share of the slots that are filled where every expert is chosen equally often.
    pub fn filled(&self) -> f64 {
        (1.0 / self.factor().max(f64::MIN_POSITIVE)).min(1.0)
    }
}

/// The share of the rows of an op that hold tokens: that of the slots which are filled for an op on
/// slots `[E,B,C,_]`, and all elsewhere.
pub(crate) fn filled(graph: &Graph, op: &Op, routings: &[Routing]) -> f64 {
    let of_slots = |v: &ir::ValueId| match graph.ty(*v).shape.0[..] {
        [Dim::Fixed(experts), Dim::Batch, Dim::Fixed(capacity), _] => routings
            .iter()
            .find(|r| (r.experts, r.capacity) == (experts, capacity)),
        _ => None,
    };
    let is_product = matches!(op.kind, OpKind::DotGeneral { .. });
    let routing = op.inputs.iter().find_map(of_slots).filter(|_| is_product);
    routing.map_or(1.0, Routing::filled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_beyond_the_choices_are_empty() {
        let routing = |capacity| Routing {
            experts: 8,
            capacity,
            top_k: 2,
            tokens: 1024,
        };
        assert_eq!(routing(320).factor(), 1.25);
        assert_eq!(routing(320).filled(), 0.8);
        assert_eq!(routing(256).filled(), 1.0);
        // Fewer slots than choices are all filled.
        assert_eq!(routing(128).filled(), 1.0);
    }
}
