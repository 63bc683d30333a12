//! How ranks of one process meet: every message is a rendezvous.
//!
//! A [`World`] is one table of meetings under one lock. A **gathering** is a meeting of an
//! ordered group: every member brings a contribution, and when all have come, each takes away
//! everybody's, in group order; collectives are functions of that list (`execute::collective`),
//! so all members compute from the same bits. A **delivery** goes from one rank to another on
//! a numbered channel; sending completes when the receiver has taken it, as with NCCL, so that
//! a program that would deadlock there does here too.
//!
//! A rank comes to a meeting without waiting ([`Endpoint::come`], [`Endpoint::send`]) and then
//! waits for it, or asks whether it is over while it does something else.
//!
//! Only those are woken who can go on: the members of a gathering when the last one has come,
//! the receiver of a delivery when it is there, its sender when it has been taken. Waking a
//! thread to find that it must wait on costs as much as a small message.
//!
//! Meetings of one communicator (a group and a number), or on one channel, are matched by how
//! many came before. When a rank
//! fails it aborts the world, and every waiting rank returns an error; a rank that waits longer
//! than the watchdog allows says for whom.

use crate::arena::Bytes;
use crate::error::RuntimeError;
use ir::Rank;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The contribution of a member to a gathering: one block, of all buffers of a coalesced
/// collective.
pub type Contribution = Arc<Bytes>;

/// A way from a sender to a receiver for one kind of message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Channel {
    /// Index of the transfer that is sent.
    pub transfer: u32,
    /// Sender.
    pub from: Rank,
    /// Receiver.
    pub to: Rank,
}

/// An ordered group, and a number that tells it from others of the same ranks.
type Communicator = (Vec<Rank>, u32);

/// A meeting that a rank has come to.
#[derive(Debug)]
pub struct Meeting(Kind);

#[derive(Debug)]
enum Kind {
    /// A group of one.
    Alone(Contribution),
    Gather((Communicator, u64)),
    Exchange {
        sent: Vec<(Channel, u64)>,
        received: Vec<((Channel, u64), Option<Bytes>)>,
    },
}

/// The result of a meeting: every member's contribution, in group order, or what arrived, in the
/// order of the receives.
#[derive(Debug)]
pub enum Arrived {
    /// The contributions to a gathering.
    Gathered(Vec<Contribution>),
    /// The blocks of an exchange.
    Exchanged(Vec<Bytes>),
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
    gatherings: BTreeMap<(Communicator, u64), Gathering>,
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
    /// Takes the result of a meeting, once it is over. Wakes those who can go on because of it.
    fn take(&self, table: &mut Table, meeting: &mut Kind) -> Option<Arrived> {
        match meeting {
            Kind::Alone(contribution) => {
                Some(Arrived::Gathered(vec![std::mem::take(contribution)]))
            }
            Kind::Gather(key) => {
                let gathering = table.gatherings.get_mut(key)?;
                let all: Option<Vec<Contribution>> =
                    gathering.contributions.iter().cloned().collect();
                let all = all?;
                gathering.n_left += 1;
                if gathering.n_left == all.len() {
                    table.gatherings.remove(key);
                }
                Some(Arrived::Gathered(all))
            }
            Kind::Exchange { sent, received } => {
                for (key, block) in received.iter_mut().filter(|r| r.1.is_none()) {
                    *block = table.deliveries.remove(key);
                    if block.is_some() {
                        self.wake(key.0.from);
                    }
                }
                let over = received.iter().all(|r| r.1.is_some())
                    && !sent.iter().any(|key| table.deliveries.contains_key(key));
                over.then(|| {
                    let blocks = received.iter_mut().filter_map(|r| r.1.take());
                    Arrived::Exchanged(blocks.collect())
                })
            }
        }
    }

    /// Fails when a rank has failed.
    fn check(&self, table: &Table, rank: Rank) -> Result<(), RuntimeError> {
        match &table.failed {
            None => Ok(()),
            Some((by, reason)) => Err(RuntimeError::Aborted {
                rank,
                by: *by,
                reason: reason.clone(),
            }),
        }
    }
}

/// The ranks that a meeting still waits for.
fn missing(table: &Table, meeting: &Kind) -> Vec<Rank> {
    match meeting {
        Kind::Alone(_) => Vec::new(),
        Kind::Gather(key) => {
            let gathering = table.gatherings.get(key);
            let came = |i: usize| gathering.is_some_and(|g| g.contributions[i].is_some());
            let members = key.0.0.iter().enumerate();
            members
                .filter(|(i, _)| !came(*i))
                .map(|(_, r)| *r)
                .collect()
        }
        Kind::Exchange { sent, received } => {
            let outstanding = received.iter().filter(|r| r.1.is_none());
            let first = outstanding.map(|r| r.0.0.from).next();
            let untaken = sent.iter().filter(|k| table.deliveries.contains_key(k));
            match first {
                Some(from) => vec![from],
                None => untaken.map(|k| k.0.to).collect(),
            }
        }
    }
}

/// One rank's place in a [`World`].
#[derive(Debug)]
pub struct Endpoint {
    world: Arc<World>,
    rank: Rank,
    gathered: BTreeMap<Communicator, u64>,
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
    /// Brings `contribution` to the next meeting of `group`'s communicator `number`, which gives
    /// every member's, in group order.
    ///
    /// Fails when the rank is not in the group.
    pub fn come(
        &mut self,
        group: &[Rank],
        number: u32,
        contribution: Contribution,
    ) -> Result<Meeting, RuntimeError> {
        let Some(place) = group.iter().position(|&r| r == self.rank) else {
            return Err(RuntimeError::Program(format!(
                "{} is not in the group {group:?}",
                self.rank
            )));
        };
        if group.len() == 1 {
            return Ok(Meeting(Kind::Alone(contribution)));
        }
        let communicator = (group.to_vec(), number);
        let counter = self.gathered.entry(communicator.clone()).or_insert(0);
        let key = (communicator, *counter);
        *counter += 1;
        let complete = {
            let mut table = self.world.lock();
            let gathering = table
                .gatherings
                .entry(key.clone())
                .or_insert_with(|| Gathering {
                    contributions: vec![None; group.len()],
                    n_left: 0,
                });
            gathering.contributions[place] = Some(contribution);
            gathering.contributions.iter().all(Option::is_some)
        };
        if complete {
            let others = group.iter().filter(|&&r| r != self.rank);
            others.for_each(|&r| self.world.wake(r));
        }
        Ok(Meeting(Kind::Gather(key)))
    }

    /// Sends, and expects to receive; it is over when everything expected has arrived and
    /// everything sent has been taken.
    pub fn send(&mut self, sends: Vec<(Channel, Bytes)>, receives: &[Channel]) -> Meeting {
        let mut sent = Vec::with_capacity(sends.len());
        {
            let mut table = self.world.lock();
            for (channel, bytes) in sends {
                let key = (channel, next(&mut self.sent, channel));
                table.deliveries.insert(key, bytes);
                sent.push(key);
            }
        }
        sent.iter().for_each(|k| self.world.wake(k.0.to));
        let mut expect = |&channel: &Channel| ((channel, next(&mut self.received, channel)), None);
        let received = receives.iter().map(&mut expect).collect();
        Meeting(Kind::Exchange { sent, received })
    }

    /// The result of a meeting, if it is over; nothing if asked again after that.
    ///
    /// Fails when the world is aborted.
    pub fn poll(&self, meeting: &mut Meeting) -> Result<Option<Arrived>, RuntimeError> {
        let mut table = self.world.lock();
        match self.world.take(&mut table, &mut meeting.0) {
            Some(arrived) => Ok(Some(arrived)),
            None => self.world.check(&table, self.rank).map(|()| None),
        }
    }

    /// Waits until one of these meetings may be over, at most for `patience`.
    pub fn rest(&self, patience: Duration) {
        let table = self.world.lock();
        // Whatever woke the rank, it looks again.
        drop(self.world.changed(self.rank).wait_timeout(table, patience));
    }

    /// Waits for a meeting. `what` names it in a watchdog's message.
    ///
    /// Fails when the world is aborted, or the watchdog barks.
    pub fn wait(
        &self,
        mut meeting: Meeting,
        what: &dyn Fn() -> String,
    ) -> Result<Arrived, RuntimeError> {
        let world = &self.world;
        let deadline = Instant::now() + world.timeout;
        let mut table = world.lock();
        loop {
            // A message that has arrived is taken even after a failure elsewhere; only waiting
            // ends.
            if let Some(arrived) = world.take(&mut table, &mut meeting.0) {
                return Ok(arrived);
            }
            world.check(&table, self.rank)?;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let waiting_for = missing(&table, &meeting.0);
                return Err(self.overdue(what(), waiting_for));
            }
            table = world
                .changed(self.rank)
                .wait_timeout(table, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// The watchdog's error for a meeting that has not come about in time.
    pub fn late(&self, meeting: &Meeting, what: String) -> RuntimeError {
        let waiting_for = missing(&self.world.lock(), &meeting.0);
        self.overdue(what, waiting_for)
    }

    fn overdue(&self, what: String, waiting_for: Vec<Rank>) -> RuntimeError {
        RuntimeError::Watchdog {
            rank: self.rank,
            what,
            waiting_for,
            seconds: self.world.timeout.as_secs(),
        }
    }

    /// Longest that a rank waits for another one.
    pub fn timeout(&self) -> Duration {
        self.world.timeout
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

    fn gather(
        e: &mut Endpoint,
        group: &[Rank],
        mine: Contribution,
    ) -> Result<Vec<Contribution>, RuntimeError> {
        let meeting = e.come(group, 0, mine)?;
        match e.wait(meeting, &what)? {
            Arrived::Gathered(all) => Ok(all),
            Arrived::Exchanged(_) => panic!("a gathering gives contributions"),
        }
    }

    fn exchange(
        mut e: Endpoint,
        sends: Vec<(Channel, Bytes)>,
        receives: &[Channel],
    ) -> Result<Vec<Bytes>, RuntimeError> {
        let meeting = e.send(sends, receives);
        match e.wait(meeting, &what)? {
            Arrived::Exchanged(blocks) => Ok(blocks),
            Arrived::Gathered(_) => panic!("an exchange gives blocks"),
        }
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
                let mine = Arc::new(Bytes::copy_of(&[me as u8, round]));
                let all = gather(&mut e, &group, mine).unwrap();
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
        let got = on_ranks(&world, |e| {
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
            exchange(e, vec![(out, Bytes::copy_of(&[me.0 as u8]))], &[back]).unwrap()[0].to_vec()
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
        let sends = vec![(channel, Bytes::zeroed(1))];
        let error = exchange(world.endpoint(Rank(0)), sends, &[]).unwrap_err();
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
            (e.rank().0 != 1).then(|| gather(&mut e, &group, Arc::default()).unwrap_err())
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
            _ => Some(gather(&mut e, &group, Arc::default()).unwrap_err()),
        });
        assert!(started.elapsed() < PATIENCE);
        for error in errors.into_iter().flatten() {
            assert!(
                error.is_consequence() && error.to_string().contains("out of luck"),
                "{error}"
            );
        }
    }

    #[test]
    fn communicators_of_one_group_meet_in_any_order() {
        let world = World::new(2, PATIENCE);
        let group = [Rank(0), Rank(1)];
        let seen = on_ranks(&world, |mut e| {
            let me = e.rank().0;
            let mut come = |number: u32| {
                let mine = Arc::new(Bytes::copy_of(&[number as u8]));
                e.come(&group, number, mine).unwrap()
            };
            // Rank 1 comes to the second communicator first, and waits for neither.
            let numbers = if me == 0 { [7, 8] } else { [8, 7] };
            let mut meetings = numbers.map(|n| (n as u8, Some(come(n))));
            let mut seen = [0u8; 2];
            while meetings.iter().any(|m| m.1.is_some()) {
                for (number, meeting) in &mut meetings {
                    let Some(open) = meeting else { continue };
                    if let Some(Arrived::Gathered(all)) = e.poll(open).unwrap() {
                        assert!(all.iter().all(|c| c[..] == [*number]));
                        seen[usize::from(*number) - 7] += 1;
                        *meeting = None;
                    }
                }
                e.rest(Duration::from_millis(1));
            }
            seen
        });
        assert_eq!(seen, [[1, 1]; 2]);
        assert!(world.lock().gatherings.is_empty());
    }
}
