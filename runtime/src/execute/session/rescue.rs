//! The states that are left when ranks are lost.
//!
//! A rank knows whether its states are those of a step, or an update of them has ended early. Steps are
//! updated at their end, after all ranks have met, so that ranks are mostly at the same one; some may be a
//! step ahead, where the loss befell others in between. Of the steps that ranks are at, the last one is
//! taken of which they have every part together.

use super::{ATTENTION, LAST_WORDS, Member, Session};
use crate::checkpoint::{Lost, Shard, Unrescued, shares_of};
use crate::execute::message::{Reply, Request};
use crate::processes::ALONE;
use ir::Rank;
use ir::program::StateBuffer;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

/// The states that ranks have together.
pub(crate) struct Left {
    /// Optimizer steps done.
    pub step: u64,
    /// The states that each of them writes.
    shares: BTreeMap<Rank, Vec<StateBuffer>>,
    /// All ranks at that step, those included that have nothing to write.
    ranks: BTreeSet<Rank>,
}

impl Session {
    /// The last step of which the ranks that are left have all states. Fails with the reason why there
    /// is none.
    pub(crate) fn left(&mut self) -> Result<Left, String> {
        let there = |m: &&Member| !self.lost.contains(&m.rank);
        let there: Vec<Member> = self.ranks.iter().filter(there).copied().collect();
        let replies = self.ask_left(&there, LAST_WORDS, |_| Request::Stands);
        let mut at: BTreeMap<u64, BTreeSet<Rank>> = BTreeMap::new();
        let mut has_answered = false;
        for (m, reply) in there.iter().zip(replies) {
            has_answered |= matches!(reply, Some(Reply::Stands(_)));
            if let Some(Reply::Stands(Some(step))) = reply {
                at.entry(step).or_default().insert(m.rank);
            }
        }
        let mut reason = match has_answered {
            true => "those that are left were between two steps' states".to_string(),
            false => "none of those that are left said in time at which step it is".to_string(),
        };
        for (step, ranks) in at.into_iter().rev() {
            match shares_of(&self.program, |r| ranks.contains(&r)) {
                Ok(shares) => {
                    return Ok(Left {
                        step,
                        shares,
                        ranks,
                    });
                }
                Err(Lost { path, had }) => {
                    let had: Vec<String> = had.iter().map(ToString::to_string).collect();
                    reason = format!(
                        "of `{path}` there was a part with {} and nowhere else",
                        had.join(" and ")
                    );
                }
            }
        }
        Err(reason)
    }

    /// Compares their states, as [`Session::check_replicas`] does with those of all ranks. Fails with
    /// the first that differs, or with the reason why they cannot be compared.
    pub(crate) fn compare_left(&mut self, left: &Left) -> Result<(), Unrescued> {
        let is_left = |m: &&Member| left.ranks.contains(&m.rank);
        let there: Vec<Member> = self.ranks.iter().filter(is_left).copied().collect();
        let patience = self.watchdog.saturating_mul(ALONE);
        let replies = self.ask_left(&there, patience, |_| Request::Hash);
        let hashes = there.iter().zip(replies).map(|(m, reply)| match reply {
            Some(Reply::Hashes(hashes)) => Ok((*m, hashes)),
            _ => Err(Unrescued::Missing(format!("{} is lost, too", m.rank))),
        });
        let hashes: Vec<_> = hashes.collect::<Result<_, _>>()?;
        let same = self.compare(left.step, hashes.into_iter());
        same.map_err(Unrescued::Differing)
    }

    /// Has them write their shares to files in `folder`. Fails with the reason why one could not.
    pub(crate) fn write_left(
        &mut self,
        left: &Left,
        folder: &Path,
    ) -> Result<Vec<Shard>, Unrescued> {
        let shares = &left.shares;
        let writes = |m: &&Member| shares.contains_key(&m.rank);
        let writers: Vec<Member> = self.ranks.iter().filter(writes).copied().collect();
        let patience = self.watchdog.saturating_mul(ALONE);
        let of = |m: &Member| shares.get(&m.rank).cloned().unwrap_or_default();
        let replies = self.ask_left(&writers, patience, |m| {
            Request::Save(folder.to_path_buf(), of(m))
        });
        let written = writers.iter().zip(replies).map(|(m, reply)| match reply {
            Some(Reply::Shard(Ok(shard))) => Ok(shard),
            Some(Reply::Shard(Err(e))) => Err(Unrescued::Unwritten(e)),
            _ => Err(Unrescued::Missing(format!("{} is lost, too", m.rank))),
        });
        written.collect()
    }

    /// Asks ranks of a run that has failed, each of which is waited for no longer than so.
    fn ask_left(
        &mut self,
        ranks: &[Member],
        patience: Duration,
        request: impl Fn(&Member) -> Request,
    ) -> Vec<Option<Reply>> {
        for m in ranks {
            self.workers[m.worker].tell(m.rank, request(m));
        }
        let asked = Instant::now();
        let answer = |m: &Member| loop {
            self.pulse.iter().for_each(|pulse| pulse.goes_on());
            match self.workers[m.worker].hear(m.rank, ATTENTION) {
                Some(answer) => break answer.ok(),
                None if asked.elapsed() > patience => break None,
                None => {}
            }
        };
        ranks.iter().map(answer).collect()
    }
}
