//! Playing a step as the streams allow: every stream a queue of its own.
//!
//! One thread plays all streams of its rank. Again and again it takes, in a random order that
//! favours one stream for a while and then another, the first instruction of a stream whose
//! waits are over, and carries it out. In half of these whiles one stream is held back until no
//! other can go on: what should have waited for it and does not comes first then. What meets
//! other ranks is begun and left; its stream goes on when the call is over. So of two
//! instructions that nothing orders, either may come first, and a step that gives the same under
//! many orders has the waits it needs. What the program lets overlap does overlap here, and
//! nothing else.

use super::{Events, Play, RankState};
use crate::device::Device;
use crate::error::RuntimeError;
use crate::execute::script::{Script, Step};
use crate::fabric::Fabric;
use ir::Rank;
use ir::program::RoleProgram;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest rest of a rank between two looks at its meetings.
const REST: Duration = Duration::from_millis(2);
/// Powers of two among which the number of turns is drawn for which streams keep their order of
/// preference: some get ahead of others by whole slots, some alternate.
const SPELLS: u64 = 12;
/// One turn in so many of a stream is skipped, as if it were delayed.
const DELAYED: u64 = 16;
/// How long a stream is held back while another one's meeting may still come about.
const HELD: Duration = Duration::from_millis(4);

/// A source of orders: a seeded generator (SplitMix64, Steele, Lea & Flood 2014).
#[derive(Debug, Default)]
pub(super) struct Orders {
    state: u64,
}

impl Orders {
    pub(super) fn new(seed: u64, rank: Rank) -> Self {
        Orders {
            state: seed ^ u64::from(rank.0).wrapping_mul(0x9e37_79b9_7f4a_7c15),
        }
    }
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }
    fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u64 + 1) as usize);
        }
    }
}

/// The streams of a role and how far they are.
struct Queues {
    script: Arc<Script>,
    /// By stream, how many are done.
    n_done: Vec<usize>,
}

impl Queues {
    fn head(&self, stream: usize) -> Option<&Step> {
        let (slot, at) = *self.script.streams[stream].get(self.n_done[stream])?;
        Some(&self.script.slots[slot][at])
    }
    /// Whether all that an instruction waits for is done.
    fn is_ready(&self, step: &Step) -> bool {
        let mut waits = step.waits.iter();
        waits.all(|&(stream, n)| n <= self.n_done[stream.index()])
    }
}

impl<D: Device, F: Fabric<D>> RankState<D, F> {
    /// Plays a training step with every stream a queue of its own.
    pub(super) fn play_queues(
        &mut self,
        play: &Play,
        orders: &mut Orders,
    ) -> Result<(), RuntimeError> {
        let (program, script) = (Arc::clone(&self.program), self.scripts.of(play.training));
        let role = &program.roles[self.role];
        // By stream, the call that its first instruction waits for.
        let mut open: Vec<Option<F::Ticket>> = script.streams.iter().map(|_| None).collect();
        let mut events: Events<D> = script.streams.iter().map(|_| Vec::new()).collect();
        let mut queues = Queues {
            n_done: vec![0; open.len()],
            script,
        };
        let mut preferred: Vec<usize> = (0..open.len()).collect();
        let (mut spell, mut progress) = (0, Instant::now());
        let mut held = None;
        loop {
            if spell == 0 {
                orders.shuffle(&mut preferred);
                spell = 1u64 << orders.below(SPELLS);
                held = preferred.last().copied().filter(|_| orders.below(2) == 0);
            }
            spell -= 1;
            let mut turn = None;
            for &stream in &preferred {
                let Some(step) = queues.head(stream) else {
                    continue;
                };
                let others_meet = (0..open.len()).any(|s| s != stream && open[s].is_some());
                if held == Some(stream) && others_meet && progress.elapsed() < HELD {
                    continue;
                }
                let may = open[stream].is_some() || queues.is_ready(step);
                if !may || orders.below(DELAYED) == 0 {
                    continue;
                }
                let moved = self
                    .take_turn((role, step), &mut open[stream], &mut events, play)
                    .map_err(|source| self.failed(step, source))?;
                if let Some(done) = moved {
                    turn = Some((stream, done));
                    break;
                }
            }
            match turn {
                Some((stream, done)) => {
                    queues.n_done[stream] += usize::from(done);
                    progress = Instant::now();
                }
                None if (0..open.len()).all(|s| queues.head(s).is_none()) => return Ok(()),
                None if progress.elapsed() > self.fabric.timeout() => {
                    return Err(self.overdue(&queues, &open));
                }
                None if open.iter().any(Option::is_some) => self.fabric.rest(REST),
                None => {}
            }
        }
    }

    /// Begins the instruction or looks whether its call is over: nothing if that changed
    /// nothing, else whether the instruction is done.
    fn take_turn(
        &mut self,
        (role, step): (&RoleProgram, &Step),
        open: &mut Option<F::Ticket>,
        events: &mut Events<D>,
        play: &Play,
    ) -> Result<Option<bool>, RuntimeError> {
        match open {
            Some(ticket) => {
                let Some(bytes) = self.fabric.poll(&mut self.device, ticket)? else {
                    return Ok(None);
                };
                self.called(role, step, bytes)?;
                *open = None;
            }
            None => {
                // A device may do later what it was given.
                self.await_events(step, events)?;
                self.standing.before(step);
                *open = self.begin(role, step, play)?;
            }
        }
        if open.is_none() {
            self.standing.after(step, play.step);
            self.record_event(step, events)?;
        }
        Ok(Some(open.is_none()))
    }

    /// The words of the watchdog: of the first call that is not over, or of a wait that cannot end.
    fn overdue(&self, queues: &Queues, open: &[Option<F::Ticket>]) -> RuntimeError {
        if let Some(ticket) = open.iter().flatten().next() {
            return self.fabric.overdue(ticket);
        }
        let heads = (0..open.len()).filter_map(|s| queues.head(s));
        let stuck = heads.map(|step| {
            let Step {
                instruction,
                template,
                microbatch,
                ..
            } = step;
            let of = microbatch.map_or(String::new(), |m| format!(" of microbatch {m}"));
            format!("instruction {instruction} of template {}{of}", template.0)
        });
        RuntimeError::Program(format!(
            "every stream waits for another one: {}",
            stuck.collect::<Vec<_>>().join(", ")
        ))
    }
}
