//! Playing a step as the streams allow: every stream a queue of its own.
//!
//! One thread plays all streams of its rank. Again and again it takes, in a random order that
//! favours one stream for a while and then another, the first instruction of a stream whose
//! waits are over, and carries it out. In half of these whiles one stream is held back until no
//! other can go on: what should have waited for it and does not comes first then. What meets other
//! ranks is begun and left; its stream goes on when the meeting is over. So of two instructions
//! that nothing orders, either may come first, and a step that gives the same under many orders has
//! the waits it needs. What the program lets overlap does overlap here, and nothing else.

use super::communicate::Waiting;
use super::{Play, RankState};
use crate::error::RuntimeError;
use ir::program::{Event, InstrKind, RoleProgram, Which};
use ir::{InstrId, Rank, StreamId};
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

/// An instruction of the trace: slot and place in its template.
type At = (usize, usize);

/// The streams of a role and how far they are.
struct Queues<'a> {
    role: &'a RoleProgram,
    /// By stream, its instructions in the order of the trace.
    of_stream: Vec<Vec<At>>,
    /// By stream, how many are done.
    n_done: Vec<usize>,
    /// By slot and instruction, its place in its stream.
    places: Vec<Vec<usize>>,
    /// By slot and stream, how many instructions of earlier slots stand on it.
    before: Vec<Vec<usize>>,
}

impl<'a> Queues<'a> {
    fn new(role: &'a RoleProgram) -> Self {
        let mut of_stream: Vec<Vec<At>> = vec![Vec::new(); role.streams.len()];
        let (mut places, mut before) = (Vec::new(), Vec::new());
        for (k, slot) in role.trace.iter().enumerate() {
            before.push(of_stream.iter().map(Vec::len).collect());
            let place = |(i, stream): (usize, StreamId)| {
                let queue = &mut of_stream[stream.index()];
                queue.push((k, i));
                queue.len() - 1
            };
            let instructions = &role.template(slot.template).instructions;
            let streams = instructions.iter().map(|i| i.stream);
            places.push(streams.enumerate().map(place).collect());
        }
        Queues {
            role,
            n_done: vec![0; of_stream.len()],
            of_stream,
            places,
            before,
        }
    }

    fn head(&self, stream: usize) -> Option<At> {
        self.of_stream[stream].get(self.n_done[stream]).copied()
    }

    fn is_done(&self, slot: usize, i: InstrId) -> bool {
        let instructions = &self
            .role
            .template(self.role.trace[slot].template)
            .instructions;
        let stream = instructions[i.index()].stream.index();
        self.places[slot][i.index()] < self.n_done[stream]
    }

    /// Whether all that an instruction waits for is done.
    fn is_ready(&self, (slot, i): At) -> bool {
        let this = self.role.trace[slot];
        let instruction = &self.role.template(this.template).instructions[i];
        let over = |event: &Event| match *event {
            Event::Drained(stream) => {
                self.before[slot][stream.index()] <= self.n_done[stream.index()]
            }
            Event::Done {
                template,
                instruction,
                which,
            } => {
                let wanted = match (which, this.microbatch) {
                    (Which::Latest, _) => None,
                    (Which::Back(n), m) => match m.and_then(|m| m.checked_sub(n)) {
                        Some(m) => Some(m),
                        None => return true,
                    },
                };
                let earlier = self.role.trace[..slot].iter();
                let found = earlier.rev().position(|s| {
                    s.template == template && (wanted.is_none() || s.microbatch == wanted)
                });
                found.is_none_or(|back| self.is_done(slot - 1 - back, instruction))
            }
        };
        let deps = &instruction.deps;
        deps.iter().all(|&d| self.is_done(slot, d)) && instruction.events.iter().all(over)
    }
}

impl RankState {
    /// Plays a training step with every stream a queue of its own.
    pub(super) fn play_queues(
        &mut self,
        play: &Play,
        orders: &mut Orders,
    ) -> Result<(), RuntimeError> {
        let program = Arc::clone(&self.program);
        let role = &program.roles[self.role];
        let mut queues = Queues::new(role);
        // By stream, the meeting that its first instruction waits for.
        let mut open: Vec<Option<Waiting>> = role.streams.iter().map(|_| None).collect();
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
                let Some((slot, i)) = queues.head(stream) else {
                    continue;
                };
                let others_meet = (0..open.len()).any(|s| s != stream && open[s].is_some());
                if held == Some(stream) && others_meet && progress.elapsed() < HELD {
                    continue;
                }
                let may = open[stream].is_some() || queues.is_ready((slot, i));
                if !may || orders.below(DELAYED) == 0 {
                    continue;
                }
                let template = role.trace[slot].template;
                let moved = self
                    .take_turn(role, (slot, i), &mut open[stream], play)
                    .map_err(|source| self.failed(template, i, source))?;
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
                None if progress.elapsed() > self.endpoint.timeout() => {
                    return Err(self.overdue(&queues, &open));
                }
                None if open.iter().any(Option::is_some) => self.endpoint.rest(REST),
                None => {}
            }
        }
    }

    /// Begins the instruction or looks whether its meeting is over: nothing if that changed
    /// nothing, else whether the instruction is done.
    fn take_turn(
        &mut self,
        role: &RoleProgram,
        (slot, i): At,
        open: &mut Option<Waiting>,
        play: &Play,
    ) -> Result<Option<bool>, RuntimeError> {
        let microbatch = role.trace[slot].microbatch;
        let instruction = &role.template(role.trace[slot].template).instructions[i];
        match open.take() {
            Some(mut waiting) => {
                let Some(arrived) = self.endpoint.poll(&mut waiting.meeting)? else {
                    *open = Some(waiting);
                    return Ok(None);
                };
                *open = self.after_meeting(instruction, microbatch, waiting.then, arrived)?;
            }
            None => {
                *open = self.begin_meeting(instruction, microbatch)?;
                let meets = matches!(
                    instruction.kind,
                    InstrKind::Collective { .. }
                        | InstrKind::Exchange { .. }
                        | InstrKind::WorldSum { .. }
                );
                if !meets {
                    self.execute(instruction, microbatch, play)?;
                }
            }
        }
        Ok(Some(open.is_none()))
    }

    /// The watchdog's error: of the first meeting that has not come about, or of a wait that
    /// cannot end.
    fn overdue(&self, queues: &Queues<'_>, open: &[Option<Waiting>]) -> RuntimeError {
        let heads = (0..open.len()).filter_map(|s| Some((s, queues.head(s)?)));
        for (stream, (slot, i)) in heads.clone() {
            let instructions = &queues
                .role
                .template(queues.role.trace[slot].template)
                .instructions;
            if let Some(waiting) = &open[stream] {
                return self
                    .endpoint
                    .late(&waiting.meeting, self.label(&instructions[i]));
            }
        }
        let stuck = heads.map(|(_, (slot, i))| format!("instruction {i} of slot {slot}"));
        RuntimeError::Program(format!(
            "every stream waits for another one: {}",
            stuck.collect::<Vec<_>>().join(", ")
        ))
    }
}
