//! How ranks of one process meet: every message is a rendezvous.
//!
//! A [`World`] is one table of meetings under one lock. A **gathering** is a meeting of an
//! ordered group: every member brings a contribution, and when all have come, each takes away
//! everybody's, in group order; collectives are functions of that list (`execute::collective`),
//! so all members compute from the same bits. A **delivery** goes from one rank to another on
//! a numbered channel; sending completes when the receiver has taken it, as with NCCL, so that
//! a program that would deadlock there does here too.
//!
//! Only those are woken who can go on: the members of a gathering when the last one has come,
//! the receiver of a delivery when it is there, its sender when it has been taken. Waking a
//! thread to find that it must wait on costs as much as a small message.
//!
//! Meetings of one group, or on one channel, are matched by how many came before. When a rank
//! fails it aborts the world, and every waiting rank returns an error; a rank that waits longer
//! than the watchdog allows says for whom.

use crate::arena::Bytes;
use crate::error::RuntimeError;
use ir::Rank;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What a member brings to a gathering: one block, of all buffers of a coalesced collective.
pub type Contribution = Arc<Bytes>;

/// A way from a sender to a receiver for one kind of message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Channel {
    /// What is sent: the index of the transfer.
    pub transfer: u32,
    /// Sender.
    pub from: Rank,
    /// Receiver.
    pub to: Rank,
}

/// The ranks of one process.
#[derive(Debug)]
pub struct World {
    n_ranks: u32,
    timeout: Duration,
    table: Mutex<Table>,
    /// By rank, at least one: what it waits for may be there.
    changed: Vec<Condvar>,
}

#[derive(Debug, Default)]
struct Table {
    gatherings: BTreeMap<(Vec<Rank>, u64), Gathering>,
    deliveries: BTreeMap<(Channel, u64), Bytes>,
    failed: Option<(Rank, String)>,
}

#[derive(Debug)]
struct Gathering {
    contributions: Vec<Option<Contribution>>,
    n_left: usize,
}

impl World {
    /// A world of `n_ranks` ranks whose watchdog barks after `timeout`.
    pub fn new(n_ranks: u32, timeout: Duration) -> Arc<Self> {
        Arc::new(World {
            n_ranks,
            timeout,
            table: Mutex::default(),
            changed: (0..n_ranks.max(1)).map(|_| Condvar::new()).collect(),
        })
    }
    /// Number of ranks.
    pub fn n_ranks(&self) -> u32 {
        self.n_ranks
    }
    /// The place of `rank` in the world. Take it once per rank: it counts the rank's meetings.
    pub fn endpoint(self: &Arc<Self>, rank: Rank) -> Endpoint {
        Endpoint {
            world: Arc::clone(self),
            rank,
            gathered: BTreeMap::new(),
            sent: BTreeMap::new(),
            received: BTreeMap::new(),
        }
    }
    /// Makes every rank that waits, or will wait, return [`RuntimeError::Aborted`]. The first
    /// failure is kept.
    pub fn abort(&self, by: Rank, reason: &str) {
        self.lock()
            .failed
            .get_or_insert_with(|| (by, reason.to_string()));
        self.changed.iter().for_each(Condvar::notify_all);
    }
    fn changed(&self, rank: Rank) -> &Condvar {
        &self.changed[rank.index() % self.changed.len()]
    }
    fn wake(&self, rank: Rank) {
        self.changed(rank).notify_all();
    }
    fn lock(&self) -> MutexGuard<'_, Table> {
        // No code that holds the lock leaves the table half-changed, so a poisoned one is whole.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// Waits until `ready` gives something. `missing` names the ranks waited for.
    fn wait<T>(
        &self,
        rank: Rank,
        what: &dyn Fn() -> String,
        mut ready: impl FnMut(&mut Table) -> Option<T>,
        missing: impl Fn(&Table) -> Vec<Rank>,
    ) -> Result<T, RuntimeError> {
        let deadline = Instant::now() + self.timeout;
        let mut table = self.lock();
        loop {
            // What has arrived is taken even after a failure elsewhere; only waiting ends.
            if let Some(done) = ready(&mut table) {
                return Ok(done);
            }
            if let Some((by, reason)) = &table.failed {
                return Err(RuntimeError::Aborted {
                    rank,
                    by: *by,
                    reason: reason.clone(),
                });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let waiting_for = missing(&table);
                return Err(RuntimeError::Watchdog {
                    rank,
                    what: what(),
                    waiting_for,
                    seconds: self.timeout.as_secs(),
                });
            }
            table = self
                .changed(rank)
                .wait_timeout(table, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

/// One rank's place in a [`World`].
#[derive(Debug)]
pub struct Endpoint {
    world: Arc<World>,
    rank: Rank,
    gathered: BTreeMap<Vec<Rank>, u64>,
    sent: BTreeMap<Channel, u64>,
    received: BTreeMap<Channel, u64>,
}

impl Endpoint {
    /// The rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }
    /// The world.
    pub fn world(&self) -> &Arc<World> {
        &self.world
    }
    /// Brings `contribution` to the next meeting of `group` and takes away every member's, in
    /// group order. `what` names the meeting in a watchdog's message.
    ///
    /// Fails when the rank is not in the group, the world is aborted, or the watchdog barks.
    pub fn gather(
        &mut self,
        group: &[Rank],
        contribution: Contribution,
        what: &dyn Fn() -> String,
    ) -> Result<Vec<Contribution>, RuntimeError> {
        let Some(place) = group.iter().position(|&r| r == self.rank) else {
            return Err(RuntimeError::Program(format!(
                "{} is not in the group {group:?} of {}",
                self.rank,
                what()
            )));
        };
        if group.len() == 1 {
            return Ok(vec![contribution]);
        }
        let counter = self.gathered.entry(group.to_vec()).or_insert(0);
        let key = (group.to_vec(), *counter);
        *counter += 1;
        let complete = {
            let mut table = self.world.lock();
            let meeting = table
                .gatherings
                .entry(key.clone())
                .or_insert_with(|| Gathering {
                    contributions: vec![None; group.len()],
                    n_left: 0,
                });
            meeting.contributions[place] = Some(contribution);
            meeting.contributions.iter().all(Option::is_some)
        };
        if complete {
            let others = group.iter().filter(|&&r| r != self.rank);
            others.for_each(|&r| self.world.wake(r));
        }
        let ready = |table: &mut Table| {
            let meeting = table.gatherings.get_mut(&key)?;
            let all: Vec<Contribution> = meeting
                .contributions
                .iter()
                .cloned()
                .collect::<Option<_>>()?;
            meeting.n_left += 1;
            if meeting.n_left == all.len() {
                table.gatherings.remove(&key);
            }
            Some(all)
        };
        let missing = |table: &Table| {
            let meeting = table.gatherings.get(&key);
            let came = |i: usize| meeting.is_some_and(|m| m.contributions[i].is_some());
            group
                .iter()
                .enumerate()
                .filter(|(i, _)| !came(*i))
                .map(|(_, r)| *r)
                .collect()
        };
        self.world.wait(self.rank, what, ready, missing)
    }
    /// Sends and receives together: returns what arrived, in the order of `receives`, when
    /// everything has arrived and everything sent has been taken.
    ///
    /// Fails when the world is aborted or the watchdog barks.
    pub fn exchange(
        &mut self,
        sends: Vec<(Channel, Bytes)>,
        receives: &[Channel],
        what: &dyn Fn() -> String,
    ) -> Result<Vec<Bytes>, RuntimeError> {
        let mut keys = Vec::with_capacity(sends.len());
        {
            let mut table = self.world.lock();
            for (channel, bytes) in sends {
                let key = (channel, next(&mut self.sent, channel));
                table.deliveries.insert(key, bytes);
                keys.push(key);
            }
        }
        keys.iter().for_each(|k| self.world.wake(k.0.to));
        let mut arrived = Vec::with_capacity(receives.len());
        for &channel in receives {
            let key = (channel, next(&mut self.received, channel));
            arrived.push(self.world.wait(
                self.rank,
                what,
                |t| t.deliveries.remove(&key),
                |_| vec![channel.from],
            )?);
            self.world.wake(channel.from);
        }
        let untaken = |table: &Table| -> Vec<Rank> {
            keys.iter()
                .filter(|k| table.deliveries.contains_key(k))
                .map(|k| k.0.to)
                .collect()
        };
        self.world.wait(
            self.rank,
            what,
            |t| untaken(t).is_empty().then_some(()),
            untaken,
        )?;
        Ok(arrived)
    }
}

fn next(counters: &mut BTreeMap<Channel, u64>, channel: Channel) -> u64 {
    let counter = counters.entry(channel).or_insert(0);
    let n = *counter;
    *counter += 1;
    n
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    fn on_ranks<T: Send>(world: &Arc<World>, f: impl Fn(Endpoint) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let f = &f;
            let threads: Vec<_> = (0..world.n_ranks())
                .map(|r| world.endpoint(Rank(r)))
                .map(|e| scope.spawn(move || f(e)))
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    fn what() -> String {
        "a test".into()
    }

    #[test]
    fn gatherings_keep_group_order_and_sequence() {
        let world = World::new(4, PATIENCE);
        let seen = on_ranks(&world, |mut e| {
            let me = e.rank().0;
            let group = if me % 2 == 0 {
                [Rank(2), Rank(0)]
            } else {
                [Rank(1), Rank(3)]
            };
            let mut seen = Vec::new();
            for round in 0..50u8 {
                let all = e
                    .gather(&group, Arc::new(Bytes::copy_of(&[me as u8, round])), &what)
                    .unwrap();
                seen.push(all.iter().map(|c| c.to_vec()).collect::<Vec<_>>());
            }
            seen
        });
        for (rank, seen) in seen.iter().enumerate() {
            let group = if rank % 2 == 0 { [2, 0] } else { [1, 3] };
            for (round, members) in seen.iter().enumerate() {
                assert_eq!(*members, group.map(|m| vec![m, round as u8]));
            }
        }
        assert!(world.lock().gatherings.is_empty());
    }

    #[test]
    fn opposite_sends_of_one_exchange_meet() {
        let world = World::new(2, PATIENCE);
        let got = on_ranks(&world, |mut e| {
            let (me, other) = (e.rank(), Rank(1 - e.rank().0));
            let out = Channel {
                transfer: me.0,
                from: me,
                to: other,
            };
            let back = Channel {
                transfer: other.0,
                from: other,
                to: me,
            };
            e.exchange(vec![(out, Bytes::copy_of(&[me.0 as u8]))], &[back], &what)
                .unwrap()[0]
                .to_vec()
        });
        assert_eq!(got, [vec![1], vec![0]]);
    }

    #[test]
    fn a_send_waits_for_its_receiver() {
        let world = World::new(2, Duration::from_millis(50));
        let channel = Channel {
            transfer: 0,
            from: Rank(0),
            to: Rank(1),
        };
        let error = world
            .endpoint(Rank(0))
            .exchange(vec![(channel, Bytes::zeroed(1))], &[], &what)
            .unwrap_err();
        assert!(
            matches!(&error, RuntimeError::Watchdog { rank: Rank(0), waiting_for, .. } if *waiting_for == [Rank(1)]),
            "{error}"
        );
    }

    #[test]
    fn the_watchdog_names_who_is_missing() {
        let world = World::new(3, Duration::from_millis(50));
        let group = [Rank(0), Rank(1), Rank(2)];
        let errors = on_ranks(&world, |mut e| {
            (e.rank().0 != 1).then(|| e.gather(&group, Arc::default(), &what).unwrap_err())
        });
        let error = errors[0].as_ref().unwrap();
        assert!(
            matches!(error, RuntimeError::Watchdog { waiting_for, .. } if *waiting_for == [Rank(1)]),
            "{error}"
        );
        assert!(error.to_string().contains("a test"));
    }

    #[test]
    fn a_failure_ends_everybody_s_waiting() {
        let world = World::new(3, PATIENCE);
        let group = [Rank(0), Rank(1), Rank(2)];
        let started = Instant::now();
        let errors = on_ranks(&world, |mut e| match e.rank() {
            Rank(2) => {
                e.world().abort(Rank(2), "out of luck");
                None
            }
            _ => Some(e.gather(&group, Arc::default(), &what).unwrap_err()),
        });
        assert!(started.elapsed() < PATIENCE);
        for error in errors.into_iter().flatten() {
            assert!(
                error.is_consequence() && error.to_string().contains("out of luck"),
                "{error}"
            );
        }
    }
}
