//! Whether ranks that keep the same part of a state have the same bits of it.
//!
//! They do where their collectives [promise](super::promised) it, unless a bit was turned in a
//! memory or a processor. Each rank hashes its parts, and the coordinator compares the hashes.

use super::promised::Promised;
use super::{Local, Member, Reply, Request, Session};
use crate::error::RuntimeError;
use ir::Rank;
use std::collections::BTreeMap;

/// A part of a state: path, first indices, lengths.
type Part = (String, Vec<usize>, Vec<usize>);

impl Session {
    /// Compares the states of all ranks that are promised the same bits, by hashes of their parts:
    /// of all ranks where sums have a fixed order, of those that had the same sums where a library
    /// orders them. Parts that overlap without being the same, as of a tied table on two meshes,
    /// are not compared; [`Session::replicas_agree`], which gathers whole states, compares them
    /// too.
    ///
    /// Fails with the first state that differs and the ranks that are fewest to have their bits of it,
    /// and when the ranks cannot go on. The ranks can go on after a difference.
    pub fn check_replicas(&mut self) -> Result<(), RuntimeError> {
        let all = self.ranks.clone();
        let replies = self.ask(&all, |_| Request::Hash)?;
        let hashes = all.into_iter().zip(replies);
        let hashes = hashes.filter_map(|(member, reply)| match reply {
            Reply::Hashes(hashes) => Some((member, hashes)),
            _ => None,
        });
        self.compare(self.step, hashes)
    }

    /// Compares the hashes of states after so many steps, in the order of each rank's states.
    pub(super) fn compare(
        &self,
        step: u64,
        hashes: impl Iterator<Item = (Member, Vec<String>)>,
    ) -> Result<(), RuntimeError> {
        let promised = Promised::by(&self.program);
        let mut seen: BTreeMap<_, BTreeMap<String, Vec<Rank>>> = BTreeMap::new();
        for (Member { rank, role, .. }, hashes) in hashes {
            let this = &self.program.roles[role];
            for (state, hash) in this.states.iter().zip(hashes) {
                let b = this.buffer(state.buffer);
                let local = Local::of_rank(b.dtype, &b.lens, &b.spec, &this.mesh, rank);
                if let Some(l) = local.filter(|l| !l.valid().contains(&0)) {
                    let part: Part = (state.path.clone(), l.start(), l.valid());
                    seen.entry((part, promised.place(rank, role, state.buffer)))
                        .or_default()
                        .entry(hash)
                        .or_default()
                        .push(rank);
                }
            }
        }
        let differs = seen.into_iter().find(|(_, hashes)| hashes.len() > 1);
        let Some((((path, ..), _), hashes)) = differs else {
            return Ok(());
        };
        let mut groups: Vec<Vec<Rank>> = hashes.into_values().collect();
        groups.sort_by_key(|ranks| (ranks.len(), ranks[0]));
        let most = groups.pop().unwrap_or_default();
        // Two that differ do not tell which of them is wrong.
        let is_known = groups.iter().all(|g| g.len() < most.len());
        Err(RuntimeError::Replicas {
            step,
            path,
            odd: groups.concat(),
            others: most,
            is_known,
        })
    }
}

#[cfg(test)]
impl Session {
    /// Has sums promised as a library's are, or as others.
    pub fn promise(&mut self, order: ir::Order) {
        std::sync::Arc::make_mut(&mut self.program).restate(order);
    }
    /// Turns a bit of a rank's part of a state.
    pub fn turn_bit(
        &mut self,
        rank: Rank,
        state: &ir::program::StateBuffer,
        bit: usize,
    ) -> Result<(), RuntimeError> {
        self.change(rank, state, |part| part[bit / 8] ^= 1 << (bit % 8))
    }
    /// Makes a rank's part of a state of f32 NaN.
    pub fn spoil(
        &mut self,
        rank: Rank,
        state: &ir::program::StateBuffer,
    ) -> Result<(), RuntimeError> {
        let nan = f32::NAN.to_le_bytes();
        self.change(rank, state, |part| {
            let elements = part.chunks_exact_mut(nan.len());
            elements.for_each(|element| element.copy_from_slice(&nan));
        })
    }
    fn change(
        &mut self,
        rank: Rank,
        state: &ir::program::StateBuffer,
        change: impl FnOnce(&mut [u8]),
    ) -> Result<(), RuntimeError> {
        let of: Vec<Member> = self
            .ranks
            .iter()
            .filter(|m| m.rank == rank)
            .copied()
            .collect();
        let replies = self.ask(&of, |_| Request::Read(state.buffer))?;
        if let Some(Reply::Part(mut part)) = replies.into_iter().next() {
            change(&mut part);
            self.ask(&of, |_| Request::Write(state.buffer, part.clone()))?;
        }
        Ok(())
    }
}
