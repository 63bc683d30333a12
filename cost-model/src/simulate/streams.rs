//! Playing on devices whose streams run side by side.
//!
//! Every start is a maximum over ends (there is no preemption and no choice), so times follow
//! from the program by going through every trace in order. A role goes on as far as it can:
//! it publishes when its exchanges start, and stops where it needs the end of an exchange whose
//! partner has not published yet, or a world sum that not all roles have reached. When no role
//! can go on, the program deadlocks.

use super::fold::{Folded, Input, Pico, StreamSet, awaited, latest, pico, seconds};
use super::{Played, RolePlay, SimulateOptions, Timeline};
use crate::SimError;
use crate::costs::{Costs, together};
use ir::program::{Event, InstrKind, Program, RoleProgram, Stream, TemplateKind, Which};
use ir::{InstrId, TemplateId, TransferId};
use std::collections::BTreeMap;
use std::rc::Rc;

pub(super) fn play(
    program: &Program,
    costs: &Costs,
    options: &SimulateOptions,
) -> Result<Played, SimError> {
    let mut shared = Shared {
        starts: vec![[Vec::new(), Vec::new()]; program.transfers.len()],
        world: Vec::new(),
        n_roles: program.roles.len(),
        timeline: Timeline::new(program, options),
    };
    let unfold = !options.fold || options.timeline.is_of_instructions();
    let mut roles: Vec<Player<'_>> = (0..program.roles.len())
        .map(|r| Player::new(program, costs, r, unfold))
        .collect();
    loop {
        let mut progress = false;
        let mut finished = true;
        for role in &mut roles {
            progress |= role.advance(&mut shared);
            finished &= role.finished(&shared);
        }
        if finished {
            break;
        }
        if !progress {
            return Err(SimError::Deadlock {
                waiting: roles
                    .iter()
                    .filter(|r| !r.finished(&shared))
                    .map(|r| r.waiting(&shared))
                    .collect(),
            });
        }
    }
    let mut end = 0;
    for role in &mut roles {
        end = end.max(role.close(&mut shared));
    }
    let plays = roles.into_iter().map(|r| r.play).collect();
    Ok(Played {
        end_s: seconds(end),
        roles: plays,
        events: shared.timeline.events,
        spans: shared.timeline.spans,
    })
}

/// The state that roles share.
struct Shared<'a> {
    /// By transfer: starts of its sends and of its receives, in order.
    starts: Vec<[Vec<Pico>; 2]>,
    /// By world sum: starts so far, and the latest.
    world: Vec<(usize, Pico)>,
    n_roles: usize,
    timeline: Timeline<'a>,
}

const SEND: usize = 0;
const RECV: usize = 1;

/// The transfers of an exchange that go to, or come from, one partner.
struct Part {
    side: usize,
    transfers: Vec<TransferId>,
    duration: Pico,
}

/// One execution of an exchange instruction.
struct Instance {
    start: Pico,
    template: usize,
    instruction: usize,
    slot: usize,
    /// Where the numbers of its transfers begin in `Player::numbers`.
    first_number: usize,
}

/// A template that is being played instruction by instruction.
struct Partial {
    ends: Vec<Pico>,
    stream_ends: Vec<Pico>,
    /// The world sum that has been reached and not passed.
    reached: Option<(usize, Pico)>,
}

/// The end of something that others wait for: known, or that of an exchange.
#[derive(Clone, Copy)]
enum End {
    At(Pico),
    Of(usize),
}

/// The ends of an instruction that later slots wait for.
#[derive(Default)]
struct Ends {
    latest: Option<End>,
    by_microbatch: Vec<Option<End>>,
}

impl Ends {
    fn note(&mut self, microbatch: Option<u32>, end: End) {
        self.latest = Some(end);
        if let Some(m) = microbatch {
            let m = m as usize;
            if self.by_microbatch.len() <= m {
                self.by_microbatch.resize(m + 1, None);
            }
            self.by_microbatch[m] = Some(end);
        }
    }
}

struct Player<'a> {
    role: &'a RoleProgram,
    index: usize,
    durations: Vec<Vec<Pico>>,
    folded: Rc<Vec<Folded>>,
    parts: BTreeMap<(usize, usize), Vec<Part>>,
    unfold: bool,
    next: usize,
    /// Next instruction of the exchange template at `next`.
    next_exchange: usize,
    partial: Option<Partial>,
    /// End of the last template.
    now: Pico,
    /// End of every stream in the slots before, but for that of transfers.
    stream_ends: Vec<Pico>,
    /// The stream of transfers.
    transfers: StreamSet,
    /// Ends of what later slots wait for.
    awaited: BTreeMap<(TemplateId, InstrId), Ends>,
    instances: Vec<Instance>,
    ends: Vec<Option<Pico>>,
    numbers: Vec<u32>,
    counts: Vec<[u32; 2]>,
    n_world_sums: usize,
    inputs: Vec<Pico>,
    play: RolePlay,
}

impl<'a> Player<'a> {
    fn new(program: &'a Program, costs: &Costs, index: usize, unfold: bool) -> Self {
        let role = &program.roles[index];
        let durations: Vec<Vec<Pico>> = costs.instructions[index]
            .iter()
            .map(|t| t.iter().map(|c| pico(c.seconds)).collect())
            .collect();
        let awaited = awaited(role);
        let folded = (role.templates.iter().zip(&durations))
            .zip(&awaited)
            .map(|((t, d), a)| Folded::new(t, d, role.streams.len(), a));
        let transfers = role.streams.iter().enumerate();
        let transfers = transfers.filter(|(_, s)| **s == Stream::Transfers);
        let folded = Rc::new(folded.collect());
        let n = role.templates.len();
        Player {
            role,
            index,
            durations,
            folded,
            parts: parts(program, costs, role),
            unfold,
            next: 0,
            next_exchange: 0,
            partial: None,
            now: 0,
            stream_ends: vec![0; role.streams.len()],
            transfers: transfers.fold(0, |all, (s, _)| all | 1 << s),
            awaited: (awaited.iter().enumerate())
                .flat_map(|(t, of)| {
                    of.iter()
                        .map(move |&i| ((TemplateId::new(t), i), Ends::default()))
                })
                .collect(),
            instances: Vec::new(),
            ends: Vec::new(),
            numbers: Vec::new(),
            counts: vec![[0; 2]; program.transfers.len()],
            n_world_sums: 0,
            inputs: Vec::new(),
            play: RolePlay {
                count: vec![0; n],
                elapsed_s: vec![0.0; n],
                work_s: vec![0.0; n],
                busy_s: 0.0,
            },
        }
    }

    /// Goes on as far as possible; true if that was anywhere.
    fn advance(&mut self, shared: &mut Shared<'_>) -> bool {
        let before = (
            self.next,
            self.next_exchange,
            self.partial
                .as_ref()
                .map(|p| (p.ends.len(), p.reached.is_some())),
        );
        while self.next < self.role.trace.len() && self.play_slot(shared).is_some() {
            self.next += 1;
        }
        before
            != (
                self.next,
                self.next_exchange,
                self.partial
                    .as_ref()
                    .map(|p| (p.ends.len(), p.reached.is_some())),
            )
    }

    fn finished(&self, shared: &Shared<'_>) -> bool {
        // The last exchanges end last: queues are FIFO, so their start needed the others' ends.
        let ended = |e: usize| self.ends[e].is_some() || self.end_of(e, shared).is_some();
        self.next == self.role.trace.len() && self.latest().is_none_or(ended)
    }

    /// The last exchange, which stands behind all others.
    fn latest(&self) -> Option<usize> {
        self.instances.len().checked_sub(1)
    }

    /// When the exchanges so far are over; 0 for none.
    fn end_of_exchanges(&mut self, shared: &Shared<'_>) -> Option<Pico> {
        self.latest().map_or(Some(0), |e| self.resolve(e, shared))
    }

    /// Plays the next slot; `None` when it must wait.
    fn play_slot(&mut self, shared: &mut Shared<'_>) -> Option<()> {
        let slot = self.role.trace[self.next];
        let t = slot.template.index();
        if self.role.templates[t].kind == TemplateKind::Exchange {
            self.start_exchanges(t, slot.microbatch, shared)?;
        } else {
            let start = self.now;
            if self.unfold || self.folded[t].has_world_sum {
                self.play_instructions(t, slot.microbatch, shared)?;
            } else {
                self.play_folded(t, slot.microbatch, shared)?;
            }
            self.count(t);
            // A slot that waits for an exchange mostly does so in its first instruction.
            let shown = start.max(self.now.saturating_sub(self.folded[t].undisturbed()));
            shared.timeline.add(
                self.index,
                self.next,
                None,
                seconds(shown),
                seconds(self.now),
            );
        }
        Some(())
    }

    fn count(&mut self, t: usize) {
        let duration = seconds(self.folded[t].undisturbed());
        self.play.count[t] += 1;
        self.play.elapsed_s[t] += duration;
        self.play.work_s[t] += duration;
        self.play.busy_s += duration;
    }

    fn play_folded(
        &mut self,
        t: usize,
        microbatch: Option<u32>,
        shared: &Shared<'_>,
    ) -> Option<()> {
        let templates = Rc::clone(&self.folded);
        let folded = &templates[t];
        let mut inputs = std::mem::take(&mut self.inputs);
        inputs.clear();
        let ready = folded.inputs.iter().all(|input| {
            let time = match *input {
                Input::Streams(set) => self.drained(set, shared),
                Input::Event(event) => self.event(event, microbatch, shared),
            };
            time.map(|time| inputs.push(time)).is_some()
        });
        if ready {
            for (stream, paths) in &folded.streams {
                let end = latest(&inputs, paths).unwrap_or(0);
                self.stream_ends[*stream] = self.stream_ends[*stream].max(end);
                self.now = self.now.max(end);
            }
            for (i, paths) in &folded.awaited {
                let end = latest(&inputs, paths).unwrap_or(0);
                self.note_end(t, *i, microbatch, End::At(end));
            }
        }
        self.inputs = inputs;
        ready.then_some(())
    }

    /// When some streams are over.
    fn drained(&mut self, set: StreamSet, shared: &Shared<'_>) -> Option<Pico> {
        let transfers = match set & self.transfers {
            0 => 0,
            _ => self.end_of_exchanges(shared)?,
        };
        let of_set = |(q, end): (usize, &Pico)| (set >> q & 1 == 1).then_some(*end);
        let ends = self.stream_ends.iter().enumerate().filter_map(of_set);
        Some(ends.fold(transfers, Pico::max))
    }

    fn note_end(&mut self, t: usize, i: InstrId, microbatch: Option<u32>, end: End) {
        if let Some(ends) = self.awaited.get_mut(&(TemplateId::new(t), i)) {
            ends.note(microbatch, end);
        }
    }

    /// When an event of a slot for `microbatch` is over; 0 where there is no slot to wait for.
    fn event(
        &mut self,
        event: Event,
        microbatch: Option<u32>,
        shared: &Shared<'_>,
    ) -> Option<Pico> {
        let Event::Done {
            template,
            instruction,
            which,
        } = event
        else {
            return Some(0);
        };
        let ends = self.awaited.get(&(template, instruction));
        let end = ends.and_then(|ends| match which {
            Which::Latest => ends.latest,
            Which::Back(n) => {
                let m = microbatch?.checked_sub(n)? as usize;
                *ends.by_microbatch.get(m)?
            }
        });
        match end {
            None => Some(0),
            Some(End::At(time)) => Some(time),
            Some(End::Of(exchange)) => self.resolve(exchange, shared),
        }
    }

    /// When all that an instruction waits for in earlier slots is over.
    fn events(
        &mut self,
        (t, i): (usize, usize),
        microbatch: Option<u32>,
        shared: &Shared<'_>,
    ) -> Option<Pico> {
        let mut time = self.drained(self.folded[t].drained[i], shared)?;
        let role = self.role;
        for event in &role.templates[t].instructions[i].events {
            time = time.max(self.event(*event, microbatch, shared)?);
        }
        Some(time)
    }

    fn play_instructions(
        &mut self,
        t: usize,
        microbatch: Option<u32>,
        shared: &mut Shared<'_>,
    ) -> Option<()> {
        let mut partial = self.partial.take().unwrap_or_else(|| Partial {
            ends: Vec::new(),
            stream_ends: self.stream_ends.clone(),
            reached: None,
        });
        let role = self.role;
        let instructions = &role.templates[t].instructions;
        while let Some(instruction) = instructions.get(partial.ends.len()) {
            let i = partial.ends.len();
            let stream = instruction.stream.index();
            let Some(outside) = self.events((t, i), microbatch, shared) else {
                self.partial = Some(partial);
                return None;
            };
            let deps = (instruction.deps.iter())
                .map(|d| partial.ends[d.index()])
                .max()
                .unwrap_or(0);
            let own = outside.max(deps).max(partial.stream_ends[stream]);
            let start = if matches!(instruction.kind, InstrKind::WorldSum { .. }) {
                let number = *partial
                    .reached
                    .get_or_insert_with(|| self.reach(own, shared));
                let (arrived, latest) = shared.world[number.0];
                if arrived < shared.n_roles {
                    self.partial = Some(partial);
                    return None;
                }
                partial.reached = None;
                latest
            } else {
                own
            };
            let end = start.saturating_add(self.durations[t][i]);
            shared
                .timeline
                .add(self.index, self.next, Some(i), seconds(start), seconds(end));
            partial.stream_ends[stream] = partial.stream_ends[stream].max(end);
            partial.ends.push(end);
            self.note_end(t, InstrId::new(i), microbatch, End::At(end));
        }
        self.now = partial.ends.iter().copied().fold(self.now, Pico::max);
        self.stream_ends = partial.stream_ends;
        Some(())
    }

    /// Announces the role's next world sum, which it could start at `time`.
    fn reach(&mut self, time: Pico, shared: &mut Shared<'_>) -> (usize, Pico) {
        let number = self.n_world_sums;
        self.n_world_sums += 1;
        if shared.world.len() == number {
            shared.world.push((0, 0));
        }
        let sum = &mut shared.world[number];
        *sum = (sum.0 + 1, sum.1.max(time));
        (number, time)
    }

    /// End of an exchange, remembered.
    fn resolve(&mut self, exchange: usize, shared: &Shared<'_>) -> Option<Pico> {
        if self.ends[exchange].is_none() {
            self.ends[exchange] = self.end_of(exchange, shared);
        }
        self.ends[exchange]
    }

    /// End of an exchange: of every part, when both sides have started and the bytes are over.
    fn end_of(&self, exchange: usize, shared: &Shared<'_>) -> Option<Pico> {
        let instance = &self.instances[exchange];
        let mut number = instance.first_number;
        let mut end = instance.start;
        for part in &self.parts[&(instance.template, instance.instruction)] {
            let mut start = instance.start;
            for transfer in &part.transfers {
                let partner = &shared.starts[transfer.index()][1 - part.side];
                start = start.max(*partner.get(self.numbers[number] as usize)?);
                number += 1;
            }
            end = end.max(start.saturating_add(part.duration));
        }
        Some(end)
    }

    fn start_exchanges(
        &mut self,
        t: usize,
        microbatch: Option<u32>,
        shared: &mut Shared<'_>,
    ) -> Option<()> {
        while self.next_exchange < self.role.templates[t].instructions.len() {
            let i = self.next_exchange;
            let before = self.end_of_exchanges(shared)?;
            let outside = self.events((t, i), microbatch, shared)?;
            let start = before.max(outside);
            let id = self.instances.len();
            let first_number = self.numbers.len();
            for (side, transfer) in self.parts[&(t, i)]
                .iter()
                .flat_map(|p| p.transfers.iter().map(|x| (p.side, x.index())))
            {
                self.numbers.push(self.counts[transfer][side]);
                self.counts[transfer][side] += 1;
                shared.starts[transfer][side].push(start);
            }
            self.instances.push(Instance {
                start,
                template: t,
                instruction: i,
                slot: self.next,
                first_number,
            });
            self.ends.push(None);
            self.note_end(t, InstrId::new(i), microbatch, End::Of(id));
            self.next_exchange += 1;
        }
        self.next_exchange = 0;
        self.play.count[t] += 1;
        let duration: f64 = seconds(
            self.durations[t]
                .iter()
                .fold(0, |sum, d| sum.saturating_add(*d)),
        );
        self.play.elapsed_s[t] += duration;
        self.play.work_s[t] += duration;
        Some(())
    }

    /// Records the exchanges; the end of the role.
    fn close(&mut self, shared: &mut Shared<'_>) -> Pico {
        let mut end = self.now;
        for e in 0..self.instances.len() {
            let over = self
                .resolve(e, shared)
                .expect("a finished role's exchanges are over");
            let Instance {
                start,
                slot,
                instruction,
                ..
            } = self.instances[e];
            shared
                .timeline
                .add(self.index, slot, None, seconds(start), seconds(over));
            shared.timeline.add(
                self.index,
                slot,
                Some(instruction),
                seconds(start),
                seconds(over),
            );
            end = end.max(over);
        }
        end
    }

    fn waiting(&self, shared: &Shared<'_>) -> (ir::StageId, usize, String) {
        let reached = self.partial.as_ref().and_then(|p| p.reached);
        let what = match (reached, self.instances.last()) {
            (Some((number, _)), _) => format!(
                "world sum {number}, which {} of {} stages have reached",
                shared.world[number].0, shared.n_roles
            ),
            (None, Some(last)) => super::instruction_name(
                self.role,
                &self.role.templates[last.template].instructions[last.instruction].kind,
            ),
            (None, None) => "an exchange".into(),
        };
        (self.role.stage, self.next, what)
    }
}

/// The parts of every exchange instruction of a role, by template and instruction.
fn parts(
    program: &Program,
    costs: &Costs,
    role: &RoleProgram,
) -> BTreeMap<(usize, usize), Vec<Part>> {
    let mut all = BTreeMap::new();
    for (t, template) in role.templates.iter().enumerate() {
        for (i, instruction) in template.instructions.iter().enumerate() {
            if let InstrKind::Exchange { sends, recvs } = &instruction.kind {
                all.insert((t, i), exchange_parts(program, costs, sends, recvs));
            }
        }
    }
    all
}

fn exchange_parts(
    program: &Program,
    costs: &Costs,
    sends: &[(TransferId, ir::BufferId)],
    recvs: &[(TransferId, ir::BufferId)],
) -> Vec<Part> {
    let mut by_partner: BTreeMap<(usize, ir::StageId), Vec<TransferId>> = BTreeMap::new();
    for (x, _) in sends {
        by_partner
            .entry((SEND, program.transfers[x.index()].to))
            .or_default()
            .push(*x);
    }
    for (x, _) in recvs {
        by_partner
            .entry((RECV, program.transfers[x.index()].from))
            .or_default()
            .push(*x);
    }
    let part = |((side, _), transfers): ((usize, ir::StageId), Vec<TransferId>)| Part {
        side,
        duration: pico(together(&costs.wires, transfers.iter().copied())),
        transfers,
    };
    by_partner.into_iter().map(part).collect()
}
