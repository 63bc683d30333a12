//! Which rank writes which part of the states.
//!
//! Every part is written once. Of the ranks that hold a part, the one that has least to write so
//! far does it, the first of several; of the stages that hold a state (tied embeddings), the
//! first. So the ranks of a mesh share the work, as predictions have it, and one program always
//! gives the same files.
//!
//! When ranks are lost, those that are left may still have every part: replicas do, and stages that
//! share a state.

use crate::execute::Local;
use ir::Rank;
use ir::program::{Program, RoleProgram, StateBuffer};
use std::collections::{BTreeMap, BTreeSet};

/// The states of which each rank writes its part.
pub(crate) type Shares = BTreeMap<Rank, Vec<StateBuffer>>;

/// A part of a state that no rank is left to write.
#[derive(Debug, PartialEq)]
pub(crate) struct Lost {
    /// The state.
    pub path: String,
    /// The ranks that had the part.
    pub had: Vec<Rank>,
}

/// The shares of all ranks.
pub(crate) fn shares(program: &Program) -> Shares {
    // Where all are left, each part has somebody.
    shares_of(program, |_| true).unwrap_or_default()
}

/// The shares of the ranks that are left. Fails with the first part that none of them has.
pub(crate) fn shares_of(program: &Program, is_left: impl Fn(Rank) -> bool) -> Result<Shares, Lost> {
    let mut shares: BTreeMap<Rank, (usize, Vec<StateBuffer>)> = BTreeMap::new();
    let mut seen = BTreeSet::new();
    for role in &program.roles {
        for state in role.states.iter().filter(|s| seen.insert(&s.path)) {
            // The first stage that has all of it; where none has, the first one's loss is told.
            let (state, parts) = whole(program, (role, state), &is_left)?;
            for ((_, part), ranks) in parts {
                let so_far = |r: &Rank| shares.get(r).map_or(0, |(n, _)| *n);
                let left = ranks.into_iter().filter(|r| is_left(*r));
                if let Some(owner) = left.min_by_key(|r| (so_far(r), *r)) {
                    let (elements, states) = shares.entry(owner).or_default();
                    *elements += part.iter().product::<usize>();
                    states.push(state.clone());
                }
            }
        }
    }
    let states = shares.into_iter().map(|(rank, (_, states))| (rank, states));
    Ok(states.collect())
}

/// Ranks by what they hold of a state: first indices and lengths.
type Holders = BTreeMap<(Vec<usize>, Vec<usize>), Vec<Rank>>;

fn whole<'a>(
    program: &'a Program,
    (first, state): (&'a RoleProgram, &'a StateBuffer),
    is_left: &dyn Fn(Rank) -> bool,
) -> Result<(&'a StateBuffer, Holders), Lost> {
    let of = |role: &RoleProgram, state: &StateBuffer| {
        let holders = holders(role, state);
        let mut parts = holders.values();
        match parts.find(|ranks| !ranks.iter().any(|r| is_left(*r))) {
            None => Ok(holders),
            Some(had) => Err(Lost {
                path: state.path.clone(),
                had: had.clone(),
            }),
        }
    };
    let lost = match of(first, state) {
        Ok(holders) => return Ok((state, holders)),
        Err(lost) => lost,
    };
    let others = program
        .roles
        .iter()
        .flat_map(|r| r.states.iter().map(move |s| (r, s)));
    let same = others.filter(|(_, s)| s.path == state.path);
    let mut found = same.filter_map(|(role, s)| Some((s, of(role, s).ok()?)));
    found.next().ok_or(lost)
}

fn holders(role: &RoleProgram, state: &StateBuffer) -> Holders {
    let b = role.buffer(state.buffer);
    let mut holders = Holders::new();
    for rank in role.mesh.ranks() {
        let local = Local::of_rank(b.dtype, &b.lens, &b.spec, &role.mesh, rank);
        // An axis may be longer than a dim: its last ranks have nothing.
        if let Some(l) = local.filter(|l| !l.valid().contains(&0)) {
            holders
                .entry((l.start(), l.valid()))
                .or_default()
                .push(rank);
        }
    }
    holders
}
