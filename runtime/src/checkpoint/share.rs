//! Which rank writes which part of the states.
//!
//! Every part is written once. Of the ranks that hold a part, the one that has least to write so
//! far does it, the first of several; of the stages that hold a state (tied embeddings), the
//! first. So the ranks of a mesh share the work, as predictions have it, and one program always
//! gives the same files.

use crate::execute::Local;
use ir::Rank;
use ir::program::{Program, StateBuffer};
use std::collections::{BTreeMap, BTreeSet};

/// The states of which each rank writes its part.
pub(crate) fn shares(program: &Program) -> BTreeMap<Rank, Vec<StateBuffer>> {
    let mut shares: BTreeMap<Rank, (usize, Vec<StateBuffer>)> = BTreeMap::new();
    let mut seen = BTreeSet::new();
    for role in &program.roles {
        for state in role.states.iter().filter(|s| seen.insert(&s.path)) {
            let b = role.buffer(state.buffer);
            let mut holders: BTreeMap<_, Vec<Rank>> = BTreeMap::new();
            for rank in role.mesh.ranks() {
                let local = Local::of_rank(b.dtype, &b.lens, &b.spec, &role.mesh, rank);
                // An axis may be longer than a dim: its last ranks have nothing.
                if let Some(l) = local.filter(|l| !l.valid().contains(&0)) {
                    let part = (l.start(), l.valid());
                    holders.entry(part).or_default().push(rank);
                }
            }
            for ((_, part), ranks) in holders {
                let so_far = |r: &Rank| shares.get(r).map_or(0, |(n, _)| *n);
                if let Some(owner) = ranks.into_iter().min_by_key(|r| (so_far(r), *r)) {
                    let (elements, states) = shares.entry(owner).or_default();
                    *elements += part.iter().product::<usize>();
                    states.push(state.clone());
                }
            }
        }
    }
    let states = shares.into_iter().map(|(rank, (_, states))| (rank, states));
    states.collect()
}
