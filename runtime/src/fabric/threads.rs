//! Ranks of one process, and of several: every message is a rendezvous.
//!
//! A [`World`] is one table of meetings under one lock. A **gathering** is a meeting of an
//! ordered group: every member brings a contribution, and when all have come, each takes away
//! everybody's, in group order; collectives are functions of that list (`execute::collective`),
//! so all members compute from the same bits. A **delivery** goes from one rank to another on
//! a numbered channel; sending completes when the receiver has taken it, as with NCCL, so that
//! a program that would deadlock there does here too.
//!
//! Contributions are copies of operands, which other ranks read; results are computed where they
//! belong. A large all-reduce is two gatherings: every member reduces one part, then the parts
//! are shared. The bits are the same; the work is divided.
//!
//! Only those are woken who can go on: the members of a gathering when the last one has come,
//! the receiver of a delivery when it is there, its sender when it has been taken. Waking a
//! thread to find that it must wait on costs as much as a small message.
//!
//! Meetings of one communicator (a group and a number), or on one channel, are matched by how
//! many came before; members who bring different calls are told. When a rank fails it aborts the
//! world, and every waiting rank returns an error; so does one that waits for a rank that has
//! left. A rank that waits longer than the watchdog allows says for whom.
//!
//! Where ranks are in other processes too, each process has a world with the same meetings, and a
//! [`Carrier`] takes there what they need: of a contribution the bytes that members over there
//! read (`parts`), deliveries, and word that one has been taken, that a rank failed or left.
//! Everybody computes as before, so where ranks are changes no bit.

use super::parts::{chunks, in_two_phases, lie, needed, united};
use super::{Call, CallKind, Collective, Exchange, Fabric, Moved, Order, Places};
use crate::arena::{Bytes, Spare};
use crate::clock::Patience;
use crate::device::Device;
use crate::error::RuntimeError;
use crate::execute::{Local, collective};
use crate::processes::{Head, Letter, Parts};
use ir::collective::CollectiveKind;
use ir::reshard::Tile;
use ir::{Rank, Reduction, StreamId};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A member's contribution to a gathering: one block, of all buffers of a coalesced collective.
pub(super) type Contribution = Arc<Bytes>;

/// A way from a sender to a receiver for one kind of message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct Channel {
    transfer: u32,
    from: Rank,
    to: Rank,
}

/// An ordered group, and a number that tells it from others of the same ranks.
type Communicator = (Vec<Rank>, u32);

/// A meeting that a rank has come to.
#[derive(Debug)]
pub(super) enum Meeting {
    /// A group of one.
    Alone(Contribution),
    Gather((Communicator, u64)),
    Exchange {
        sent: Vec<(Channel, u64)>,
        received: Vec<((Channel, u64), Option<Bytes>)>,
    },
}

/// The outcome of a meeting: every member's contribution, in group order, or what arrived, in the
/// order of the receives.
#[derive(Debug)]
pub(super) enum Arrived {
    Gathered(Vec<Contribution>),
    Exchanged(Vec<Bytes>),
}

/// A call that a rank has begun.
#[derive(Debug)]
pub struct Ticket {
    call: Arc<Call>,
    stream: StreamId,
    places: Places,
    meeting: Meeting,
    /// Whether this is the second phase of an all-reduce.
    shares_parts: bool,
    sent_bytes: usize,
}

/// The carrier of messages to other processes, each one's in the order in which they were sent.
pub(crate) trait Carrier: Send + Sync + std::fmt::Debug {
    /// Puts a message on its way and waits for nobody. One to a process that is gone is lost.
    fn send(&self, to: usize, letter: Letter);
}

/// The ranks of other processes.
#[derive(Debug)]
struct Elsewhere {
    /// The process of each of them.
    of: BTreeMap<Rank, usize>,
    carrier: Arc<dyn Carrier>,
}

/// The ranks of one process, and what it hears of those of others.
#[derive(Debug)]
pub struct World {
    n_ranks: u32,
    pub(super) timeout: Duration,
    elsewhere: Option<Elsewhere>,
    table: Mutex<Table>,
    /// By rank, at least one: what it waits for may be there.
    changed: Vec<Condvar>,
    /// By rank, how often that was.
    news: Vec<AtomicU64>,
}

#[derive(Debug, Default)]
struct Table {
    gatherings: BTreeMap<(Communicator, u64), Gathering>,
    deliveries: BTreeMap<(Channel, u64), Bytes>,
    /// Messages to other processes that have not been taken there.
    untaken: BTreeSet<(Channel, u64)>,
    failed: Option<(Rank, String)>,
    left: BTreeSet<Rank>,
}

#[derive(Debug)]
struct Gathering {
    /// The first who came, and with what.
    first: (Rank, Arc<Call>),
    contributions: Vec<Option<Contribution>>,
    /// Members of this process that have not taken what there is.
    n_here: usize,
    /// A rank of another process that brought something else, and what.
    wrong: Option<(Rank, String)>,
}

impl World {
    /// A world of `n_ranks` ranks whose watchdog barks after `timeout`.
    pub fn new(n_ranks: u32, timeout: Duration) -> Arc<Self> {
        Self::with(n_ranks, timeout, None)
    }
    /// The part of a world that is in process `me`, given all processes' ranks.
    pub(crate) fn among(
        shares: &[Vec<Rank>],
        me: usize,
        timeout: Duration,
        carrier: Arc<dyn Carrier>,
    ) -> Arc<Self> {
        let others = shares
            .iter()
            .enumerate()
            .filter(|(process, _)| *process != me);
        let of = others.flat_map(|(process, ranks)| ranks.iter().map(move |r| (*r, process)));
        let elsewhere = Elsewhere {
            of: of.collect(),
            carrier,
        };
        let n_ranks = shares.iter().map(Vec::len).sum::<usize>() as u32;
        Self::with(n_ranks, timeout, Some(elsewhere))
    }
    fn with(n_ranks: u32, timeout: Duration, elsewhere: Option<Elsewhere>) -> Arc<Self> {
        Arc::new(World {
            n_ranks,
            timeout,
            elsewhere,
            table: Mutex::default(),
            changed: (0..n_ranks.max(1)).map(|_| Condvar::new()).collect(),
            news: (0..n_ranks.max(1)).map(|_| AtomicU64::new(0)).collect(),
        })
    }
    /// Whether a rank has failed, and with that the run.
    pub(super) fn has_failed(&self) -> bool {
        self.lock().failed.is_some()
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
            seen: AtomicU64::new(0),
            gathered: BTreeMap::new(),
            sent: BTreeMap::new(),
            received: BTreeMap::new(),
            spare: Spare::default(),
        }
    }
    /// Makes every rank that waits, or will wait, return [`RuntimeError::Aborted`]. The first
    /// failure is kept.
    pub(crate) fn abort(&self, by: Rank, reason: &str) {
        self.failed(by, reason.into());
        self.tell_all(|| Head::Failed {
            by,
            reason: reason.into(),
        });
    }
    fn failed(&self, by: Rank, reason: String) {
        self.lock().failed.get_or_insert((by, reason));
        self.wake_all();
    }
    fn leave(&self, rank: Rank) {
        self.left(rank);
        self.tell_all(|| Head::Left { rank });
    }
    fn left(&self, rank: Rank) {
        self.lock().left.insert(rank);
        self.wake_all();
    }
    /// The process of these ranks is gone. Where they had not left before, that ends the run: of
    /// those who wait for one who waits for them, nobody would be told otherwise.
    pub(crate) fn gone(&self, ranks: &[Rank]) {
        let first = {
            let table = self.lock();
            ranks.iter().find(|r| !table.left.contains(r)).copied()
        };
        if let Some(by) = first {
            self.failed(by, "its process is gone".into());
        }
        ranks.iter().for_each(|&rank| self.left(rank));
    }
    /// The process of a rank that is not of this one.
    fn process_of(&self, rank: Rank) -> Option<usize> {
        self.elsewhere.as_ref()?.of.get(&rank).copied()
    }
    fn tell(&self, to: usize, head: Head, body: Option<Arc<Bytes>>) {
        if let Some(elsewhere) = &self.elsewhere {
            elsewhere.carrier.send(to, Letter { head, body });
        }
    }
    fn tell_all(&self, head: impl Fn() -> Head) {
        if let Some(elsewhere) = &self.elsewhere {
            let all: BTreeSet<usize> = elsewhere.of.values().copied().collect();
            all.iter().for_each(|&to| self.tell(to, head(), None));
        }
    }
    /// Takes in what another process tells of its ranks.
    pub(crate) fn receive(&self, head: Head, block: Bytes) {
        match head {
            Head::Contribution {
                what,
                of,
                meeting,
                place,
                ..
            } => self.contribution((what, of), meeting, place, block),
            Head::Delivery { channel, n, .. } => {
                self.lock().deliveries.insert((channel, n), block);
                self.wake(channel.to);
            }
            Head::Taken { channel, n } => {
                self.lock().untaken.remove(&(channel, n));
                self.wake(channel.from);
            }
            Head::Failed { by, reason } => self.failed(by, reason),
            Head::Left { rank } => self.left(rank),
            // Of coordinator and ranks, which a world knows nothing of.
            Head::Request { .. }
            | Head::Answer { .. }
            | Head::Over { .. }
            | Head::Alive
            | Head::ToEnd(_)
            | Head::Farewell => {}
        }
    }
    fn contribution(
        &self,
        (what, of): (String, Collective),
        meeting: u64,
        place: usize,
        block: Bytes,
    ) {
        let group = of.group.clone();
        let Some(&rank) = group.get(place) else {
            return;
        };
        let call = || {
            let kind = CallKind::Collective(of.clone());
            let what = what.clone();
            (rank, Arc::new(Call { what, kind }))
        };
        let is_over = {
            let mut table = self.lock();
            let gathering =
                self.gathering(&mut table, &((group.clone(), of.number), meeting), call);
            let (_, theirs) = &gathering.first;
            match &theirs.kind {
                CallKind::Collective(other) if !of.agrees(other) => {
                    let brought = format!("{} ({what})", of.describe());
                    gathering.wrong.get_or_insert((rank, brought));
                    true
                }
                _ => {
                    gathering.contributions[place] = Some(Arc::new(block));
                    gathering.contributions.iter().all(Option::is_some)
                }
            }
        };
        if is_over {
            group.iter().for_each(|&r| self.wake(r));
        }
    }
    /// A gathering, which begins where it is the first that is heard of it.
    fn gathering<'a>(
        &self,
        table: &'a mut Table,
        key: &(Communicator, u64),
        first: impl FnOnce() -> (Rank, Arc<Call>),
    ) -> &'a mut Gathering {
        table.gatherings.entry(key.clone()).or_insert_with(|| {
            let group = &key.0.0;
            let here = |r: &&Rank| self.process_of(**r).is_none();
            Gathering {
                first: first(),
                contributions: vec![None; group.len()],
                n_here: group.iter().filter(here).count(),
                wrong: None,
            }
        })
    }
    fn changed(&self, rank: Rank) -> &Condvar {
        &self.changed[rank.index() % self.changed.len()]
    }
    fn news(&self, rank: Rank) -> &AtomicU64 {
        &self.news[rank.index() % self.news.len()]
    }
    fn wake(&self, rank: Rank) {
        self.news(rank).fetch_add(1, Ordering::Release);
        self.changed(rank).notify_all();
    }
    fn wake_all(&self) {
        for (news, changed) in self.news.iter().zip(&self.changed) {
            news.fetch_add(1, Ordering::Release);
            changed.notify_all();
        }
    }
    fn lock(&self) -> MutexGuard<'_, Table> {
        // No code that holds the lock leaves the table half-changed, so a poisoned one is whole.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// Returns the outcome of a meeting, once it is over. Wakes those who can go on because of it.
    fn take(&self, table: &mut Table, meeting: &mut Meeting) -> Option<Arrived> {
        match meeting {
            Meeting::Alone(contribution) => {
                Some(Arrived::Gathered(vec![std::mem::take(contribution)]))
            }
            Meeting::Gather(key) => {
                let gathering = table.gatherings.get_mut(key)?;
                let all: Option<Vec<Contribution>> =
                    gathering.contributions.iter().cloned().collect();
                let all = all?;
                gathering.n_here = gathering.n_here.saturating_sub(1);
                if gathering.n_here == 0 {
                    table.gatherings.remove(key);
                }
                Some(Arrived::Gathered(all))
            }
            Meeting::Exchange { sent, received } => {
                for (key, block) in received.iter_mut().filter(|r| r.1.is_none()) {
                    *block = table.deliveries.remove(key);
                    if block.is_some() {
                        let &mut (channel, n) = key;
                        match self.process_of(channel.from) {
                            Some(process) => self.tell(process, Head::Taken { channel, n }, None),
                            None => self.wake(channel.from),
                        }
                    }
                }
                let over = received.iter().all(|r| r.1.is_some())
                    && !sent.iter().any(|key| is_untaken(table, key));
                over.then(|| {
                    let blocks = received.iter_mut().filter_map(|r| r.1.take());
                    Arrived::Exchanged(blocks.collect())
                })
            }
        }
    }

    /// Fails when a rank has failed, or one that the meeting waits for has left.
    fn check(&self, table: &Table, rank: Rank, meeting: &Meeting) -> Result<(), RuntimeError> {
        let aborted = |by, reason| Err(RuntimeError::Aborted { rank, by, reason });
        if let Meeting::Gather(key) = meeting
            && let Some(Gathering {
                first,
                wrong: Some((other, brought)),
                ..
            }) = table.gatherings.get(key)
            && let CallKind::Collective(of) = &first.1.kind
        {
            return Err(RuntimeError::Mismatch {
                rank,
                brings: format!("{} ({})", of.describe(), first.1.what),
                other: *other,
                brought: brought.clone(),
            });
        }
        if let Some((by, reason)) = &table.failed {
            return aborted(*by, reason.clone());
        }
        let mut missing = match table.left.is_empty() {
            true => Vec::new().into_iter(),
            false => missing(table, meeting).into_iter(),
        };
        match missing.find(|r| table.left.contains(r)) {
            Some(gone) => aborted(gone, "it has left".into()),
            None => Ok(()),
        }
    }
}

/// The ranks that a meeting still waits for.
fn missing(table: &Table, meeting: &Meeting) -> Vec<Rank> {
    match meeting {
        Meeting::Alone(_) => Vec::new(),
        Meeting::Gather(key) => {
            let gathering = table.gatherings.get(key);
            let came = |i: usize| gathering.is_some_and(|g| g.contributions[i].is_some());
            let members = key.0.0.iter().enumerate();
            members
                .filter(|(i, _)| !came(*i))
                .map(|(_, r)| *r)
                .collect()
        }
        Meeting::Exchange { sent, received } => {
            let outstanding = received.iter().filter(|r| r.1.is_none());
            let first = outstanding.map(|r| r.0.0.from).next();
            let untaken = sent.iter().filter(|k| is_untaken(table, k));
            match first {
                Some(from) => vec![from],
                None => untaken.map(|k| k.0.to).collect(),
            }
        }
    }
}

/// Says whether something was sent and has not been taken.
fn is_untaken(table: &Table, key: &(Channel, u64)) -> bool {
    table.deliveries.contains_key(key) || table.untaken.contains(key)
}

/// One rank's place in a [`World`].
#[derive(Debug)]
pub struct Endpoint {
    pub(super) world: Arc<World>,
    pub(super) rank: Rank,
    /// The news of the rank's that were there when it last rested.
    seen: AtomicU64,
    gathered: BTreeMap<Communicator, u64>,
    sent: BTreeMap<Channel, u64>,
    received: BTreeMap<Channel, u64>,
    spare: Spare,
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.world.leave(self.rank);
    }
}

impl Endpoint {
    /// Fails when a rank has failed.
    pub(super) fn sound(&self) -> Result<(), RuntimeError> {
        match &self.world.lock().failed {
            None => Ok(()),
            Some((by, reason)) => Err(RuntimeError::Aborted {
                rank: self.rank,
                by: *by,
                reason: reason.clone(),
            }),
        }
    }
    /// The ranks that a meeting still waits for.
    pub(super) fn missing(&self, meeting: &Meeting) -> Vec<Rank> {
        missing(&self.world.lock(), meeting)
    }
    /// Rests until something has changed for the rank since it last rested, at most for `patience`;
    /// what comes in the moment in which it begins to rest may take as long to be seen.
    pub(super) fn rests(&self, patience: Duration) {
        let table = self.world.lock();
        let news = self.world.news(self.rank);
        let now = news.load(Ordering::Acquire);
        // What came since then may have come after the rank looked for it.
        if self.seen.swap(now, Ordering::Relaxed) == now {
            // Whatever woke the rank, it looks again.
            drop(self.world.changed(self.rank).wait_timeout(table, patience));
            self.seen
                .store(news.load(Ordering::Acquire), Ordering::Relaxed);
        }
    }

    /// Brings `contribution` to the next meeting of a communicator: operands, or, where it shares
    /// parts, this member's part of a result.
    pub(super) fn come(
        &mut self,
        (call, of): (&Arc<Call>, &Collective),
        contribution: Contribution,
        shares_parts: bool,
    ) -> Result<Meeting, RuntimeError> {
        let Collective { group, number, .. } = of;
        let place = self.place_in(group)?;
        if group.len() == 1 {
            return Ok(Meeting::Alone(contribution));
        }
        let communicator = (group.clone(), *number);
        let counter = self.gathered.entry(communicator.clone()).or_insert(0);
        let key = (communicator, *counter);
        *counter += 1;
        self.send_contribution((&call.what, of), key.1, place, &contribution, shares_parts);
        let complete = {
            let mut table = self.world.lock();
            let first = || (self.rank, Arc::clone(call));
            let gathering = self.world.gathering(&mut table, &key, first);
            let (first, theirs) = &gathering.first;
            if let CallKind::Collective(other) = &theirs.kind
                && !of.agrees(other)
            {
                return Err(RuntimeError::Mismatch {
                    rank: self.rank,
                    brings: format!("{} ({})", of.describe(), call.what),
                    other: *first,
                    brought: format!("{} ({})", other.describe(), theirs.what),
                });
            }
            gathering.contributions[place] = Some(contribution);
            gathering.contributions.iter().all(Option::is_some)
        };
        if complete {
            let others = group.iter().filter(|&&r| r != self.rank);
            others.for_each(|&r| self.world.wake(r));
        }
        Ok(Meeting::Gather(key))
    }

    /// Sends a contribution to the other processes that have members of the group.
    fn send_contribution(
        &self,
        (what, of): (&str, &Collective),
        meeting: u64,
        place: usize,
        contribution: &Contribution,
        shares_parts: bool,
    ) {
        let mut by_process: BTreeMap<usize, Vec<Range<usize>>> = BTreeMap::new();
        for (member, &rank) in of.group.iter().enumerate() {
            if let Some(process) = self.world.process_of(rank) {
                let len = contribution.len();
                let needed = needed(of, (place, member), shares_parts, len);
                by_process.entry(process).or_default().extend(needed);
            }
        }
        for (process, ranges) in by_process {
            let head = Head::Contribution {
                what: what.into(),
                of: of.clone(),
                meeting,
                place,
                parts: Parts {
                    len: contribution.len(),
                    ranges: united(ranges),
                },
            };
            self.world
                .tell(process, head, Some(Arc::clone(contribution)));
        }
    }

    pub(super) fn place_in(&self, group: &[Rank]) -> Result<usize, RuntimeError> {
        let place = group.iter().position(|&r| r == self.rank);
        place.ok_or_else(|| {
            RuntimeError::Program(format!("{} is not in the group {group:?}", self.rank))
        })
    }

    /// Sends, and expects to receive; it is over when everything expected has arrived and
    /// everything sent has been taken.
    pub(super) fn send(
        &mut self,
        sends: Vec<(Channel, Bytes)>,
        receives: impl Iterator<Item = Channel>,
    ) -> Meeting {
        let mut sent = Vec::with_capacity(sends.len());
        for (channel, bytes) in sends {
            let n = next(&mut self.sent, channel);
            let key = (channel, n);
            match self.world.process_of(channel.to) {
                Some(process) => {
                    self.world.lock().untaken.insert(key);
                    let parts = Parts::whole(bytes.len());
                    let body = self.spare.lend(bytes);
                    let head = Head::Delivery { channel, n, parts };
                    self.world.tell(process, head, Some(body));
                }
                None => {
                    self.world.lock().deliveries.insert(key, bytes);
                    self.world.wake(channel.to);
                }
            }
            sent.push(key);
        }
        let expect = |channel: Channel| ((channel, next(&mut self.received, channel)), None);
        let received = receives.map(expect).collect();
        Meeting::Exchange { sent, received }
    }

    /// Returns the outcome of a meeting, once it is over; without patience, nothing if it is not.
    pub(super) fn arrived(
        &self,
        meeting: &mut Meeting,
        mut patience: Option<&mut Patience>,
    ) -> Result<Option<Arrived>, RuntimeError> {
        let world = &self.world;
        let mut table = world.lock();
        loop {
            // What has arrived is taken even after a failure elsewhere; only waiting ends.
            if let Some(arrived) = world.take(&mut table, meeting) {
                return Ok(Some(arrived));
            }
            world.check(&table, self.rank, meeting)?;
            let left = patience.as_mut().map(|p| p.left());
            let Some(left) = left.filter(|left| !left.is_zero()) else {
                return Ok(None);
            };
            table = world
                .changed(self.rank)
                .wait_timeout(table, left.min(Patience::LOOK))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Copies the operands of a collective for its group.
    fn gather<D: Device>(
        &mut self,
        device: &D,
        stream: StreamId,
        places: &Places,
    ) -> Result<Contribution, RuntimeError> {
        // Members' parts of a tensor are equally large, so one layout holds for all.
        let lie = lie(places.inputs.iter().map(|p| p.len));
        let mut mine = self.spare.take(lie.last().map_or(0, |p| p.end));
        for (&source, at) in places.inputs.iter().zip(lie) {
            mine[at].copy_from_slice(&device.read(stream, source)?);
        }
        Ok(self.spare.lend(mine))
    }

    /// Copies the blocks of an exchange, and says what it expects.
    fn begin_exchange<D: Device>(
        &mut self,
        device: &D,
        stream: StreamId,
        of: &Exchange,
        places: &Places,
    ) -> Result<(Meeting, usize), RuntimeError> {
        let mut outgoing = Vec::new();
        for (moved, &at) in of.sends.iter().zip(&places.inputs) {
            let local = &moved.local;
            let data = device.read(stream, at)?;
            for tile in &moved.tiles {
                let (len, n_bytes) = extent(tile, local);
                let mut block = self.spare.take(n_bytes);
                collective::copy_block(
                    local.dtype,
                    (&data, &local.dims(), &within(tile, local)),
                    (&mut block, &len, &vec![0; len.len()]),
                    &len,
                );
                outgoing.push((channel(moved, tile), block));
            }
        }
        let sent_bytes = outgoing.iter().map(|o| o.1.len()).sum();
        let receives = of.receives.iter();
        let receives = receives.flat_map(|m| m.tiles.iter().map(move |t| channel(m, t)));
        Ok((self.send(outgoing, receives), sent_bytes))
    }

    /// Goes on with a call whose meeting is over: writes its results, unless it meets once more.
    fn advance<D: Device>(
        &mut self,
        device: &mut D,
        ticket: &mut Ticket,
        arrived: Arrived,
    ) -> Result<Option<u64>, RuntimeError> {
        let call = Arc::clone(&ticket.call);
        match (&call.kind, arrived) {
            (CallKind::Exchange(of), Arrived::Exchanged(blocks)) => {
                self.receive(device, ticket, of, blocks).map(Some)
            }
            (CallKind::Collective(of), Arrived::Gathered(members)) => {
                let lie = lie(ticket.places.inputs.iter().map(|p| p.len));
                let n_bytes: usize = lie.iter().map(Range::len).sum();
                let me = self.place_in(&of.group)?;
                match of.kind {
                    CollectiveKind::AllReduce(_) if ticket.shares_parts => {
                        paste_parts(device, ticket, of, &members)?;
                    }
                    CollectiveKind::AllReduce(reduce) if in_two_phases(of) => {
                        let mine = self.reduce_part(reduce, of, (&members, &lie), me);
                        drop(members);
                        let mine = self.spare.lend(mine);
                        ticket.meeting = self.come((&call, of), mine, true)?;
                        ticket.shares_parts = true;
                        return Ok(None);
                    }
                    kind => {
                        let items = of.items.iter().zip(&ticket.places.outputs);
                        for ((item, &at), place) in items.zip(&lie) {
                            let operands: Vec<&[u8]> =
                                members.iter().map(|m| &m[place.clone()]).collect();
                            let operands = (&operands[..], item.operand);
                            device.update(ticket.stream, at, &mut |out| {
                                let kind = (kind, item.dtype);
                                collective::result(kind, me, operands, (out, item.result))
                            })?;
                        }
                    }
                }
                Ok(Some(self.spare.bytes().max(2 * n_bytes) as u64))
            }
            _ => Ok(Some(0)),
        }
    }

    /// This member's part of a two-phase all-reduce: its chunk of every item.
    fn reduce_part(
        &mut self,
        reduce: Reduction,
        of: &Collective,
        (members, inputs): (&[Contribution], &[Range<usize>]),
        me: usize,
    ) -> Bytes {
        let chunks = chunks(of, me);
        let outputs = lie(chunks.iter().map(Range::len));
        let mut mine = self.spare.take(outputs.last().map_or(0, |p| p.end));
        for (i, item) in of.items.iter().enumerate() {
            let from = inputs[i].start + chunks[i].start..inputs[i].start + chunks[i].end;
            let parts: Vec<&[u8]> = members.iter().map(|m| &m[from.clone()]).collect();
            let out = &mut mine[outputs[i].clone()];
            collective::combine(reduce, item.dtype, &parts, out);
        }
        mine
    }

    /// Puts what an exchange received in its place.
    fn receive<D: Device>(
        &mut self,
        device: &mut D,
        ticket: &Ticket,
        of: &Exchange,
        arrived: Vec<Bytes>,
    ) -> Result<u64, RuntimeError> {
        let mut blocks = arrived.iter();
        for (moved, &at) in of.receives.iter().zip(&ticket.places.outputs) {
            let local = &moved.local;
            device.update(ticket.stream, at, &mut |out| {
                out.fill(0);
                for (tile, block) in moved.tiles.iter().zip(&mut blocks) {
                    let (len, n_bytes) = extent(tile, local);
                    if block.len() != n_bytes {
                        return Err(RuntimeError::Mismatch {
                            rank: self.rank,
                            brings: format!("room for {n_bytes} bytes ({})", ticket.call.what),
                            other: tile.from,
                            brought: format!("{} bytes", block.len()),
                        });
                    }
                    collective::copy_block(
                        local.dtype,
                        (block, &len, &vec![0; len.len()]),
                        (out, &local.dims(), &within(tile, local)),
                        &len,
                    );
                }
                Ok(())
            })?;
        }
        let n_arrived: usize = arrived.iter().map(|b| b.len()).sum();
        arrived.into_iter().for_each(|block| self.spare.give(block));
        Ok(self.spare.bytes().max(ticket.sent_bytes + n_arrived) as u64)
    }
}

impl<D: Device> Fabric<D> for Endpoint {
    type Ticket = Ticket;

    fn rank(&self) -> Rank {
        self.rank
    }

    fn order(&self) -> Order {
        Order::Fixed
    }

    fn begin(
        &mut self,
        device: &mut D,
        stream: StreamId,
        call: &Arc<Call>,
        places: Places,
    ) -> Result<Ticket, RuntimeError> {
        let (meeting, sent_bytes) = match &call.kind {
            CallKind::Collective(of) => {
                let mine = self.gather(device, stream, &places)?;
                (self.come((call, of), mine, false)?, 0)
            }
            CallKind::Exchange(of) => self.begin_exchange(device, stream, of, &places)?,
        };
        Ok(Ticket {
            call: Arc::clone(call),
            stream,
            places,
            meeting,
            shares_parts: false,
            sent_bytes,
        })
    }

    fn poll(&mut self, device: &mut D, ticket: &mut Ticket) -> Result<Option<u64>, RuntimeError> {
        while let Some(arrived) = self.arrived(&mut ticket.meeting, None)? {
            if let Some(bytes) = self.advance(device, ticket, arrived)? {
                return Ok(Some(bytes));
            }
        }
        Ok(None)
    }

    fn wait(&mut self, device: &mut D, mut ticket: Ticket) -> Result<u64, RuntimeError> {
        let mut patience = Patience::of(self.world.timeout);
        while let Some(arrived) = self.arrived(&mut ticket.meeting, Some(&mut patience))? {
            if let Some(bytes) = self.advance(device, &mut ticket, arrived)? {
                return Ok(bytes);
            }
        }
        Err(Fabric::<D>::overdue(self, &ticket))
    }

    fn rest(&self, patience: Duration) {
        self.rests(patience);
    }

    fn overdue(&self, ticket: &Ticket) -> RuntimeError {
        RuntimeError::Watchdog {
            rank: self.rank,
            what: ticket.call.what.clone(),
            waiting_for: missing(&self.world.lock(), &ticket.meeting),
            seconds: self.world.timeout.as_secs(),
        }
    }

    fn timeout(&self) -> Duration {
        self.world.timeout
    }

    fn abort(&self, reason: &str) {
        self.world.abort(self.rank, reason);
    }

    fn held_bytes(&self) -> u64 {
        self.spare.bytes() as u64
    }
}

/// Puts the members' parts of a two-phase all-reduce where they belong.
fn paste_parts<D: Device>(
    device: &mut D,
    ticket: &Ticket,
    of: &Collective,
    parts: &[Contribution],
) -> Result<(), RuntimeError> {
    let chunks: Vec<_> = (0..parts.len()).map(|member| chunks(of, member)).collect();
    let lie: Vec<_> = chunks
        .iter()
        .map(|c| lie(c.iter().map(Range::len)))
        .collect();
    for (i, &at) in ticket.places.outputs.iter().enumerate() {
        device.update(ticket.stream, at, &mut |out| {
            for (member, part) in parts.iter().enumerate() {
                out[chunks[member][i].clone()].copy_from_slice(&part[lie[member][i].clone()]);
            }
            Ok(())
        })?;
    }
    Ok(())
}

pub(super) fn channel(moved: &Moved, tile: &Tile) -> Channel {
    Channel {
        transfer: moved.transfer,
        from: tile.from,
        to: tile.to,
    }
}

/// Lengths and bytes of a block.
pub(super) fn extent(tile: &Tile, local: &Local) -> (Vec<usize>, usize) {
    let len: Vec<usize> = tile.len.iter().map(|&n| n as usize).collect();
    let n_bytes = len.iter().product::<usize>() * local.dtype.bytes() as usize;
    (len, n_bytes)
}

/// Where a block starts in a rank's buffer.
pub(super) fn within(tile: &Tile, local: &Local) -> Vec<usize> {
    tile.start
        .iter()
        .zip(&local.ranges)
        .map(|(&start, r)| (start - r.start) as usize)
        .collect()
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
    use crate::device::Cpu;

    #[test]
    fn threads_conform() {
        crate::fabric::conformance::passes(&|n, bytes, timeout| {
            let world = World::new(n, timeout);
            let open = |rank| (Cpu::new(bytes, 0, 1), world.endpoint(Rank(rank)));
            (0..n).map(open).collect()
        });
    }

    #[test]
    fn nothing_is_left_of_meetings_that_are_over() {
        let world = World::new(2, Duration::from_secs(60));
        std::thread::scope(|scope| {
            for rank in [Rank(0), Rank(1)] {
                let mut endpoint = world.endpoint(rank);
                scope.spawn(move || {
                    let mut device = Cpu::new(8, 0, 1);
                    for _ in 0..10 {
                        endpoint.barrier(&mut device, &[Rank(0), Rank(1)]).unwrap();
                    }
                });
            }
        });
        let table = world.lock();
        assert!(table.gatherings.is_empty() && table.deliveries.is_empty());
    }
}
