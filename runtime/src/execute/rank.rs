//! One rank: it plays its role's program on a device, and meets others through a fabric.
//!
//! Instructions are put on the device's streams in list order, each after events of what it waits
//! for on other streams; what meets other ranks is left to its stream, where the fabric can do that,
//! or else waited for before the next one. What a device
//! and a fabric are the rank does not know.

pub(crate) mod calls;
mod queues;
pub(super) mod spoiled;

use super::kernel::Context;
use super::load::{given, load};
use super::local::Local;
use super::message::{Play, Played, Samples};
use super::script::{Script, Scripts, Step};
use crate::arena::View;
use crate::clock::{InLine, Standstill};
use crate::data::Batches;
use crate::device::{Chain, Device, Place, Space, Tensor, Work};
use crate::error::RuntimeError;
use crate::fabric::{Fabric, Places};
use crate::record::{Record, Recording};
use crate::stragglers::Spent;
use calls::Calls;
use ir::program::{InstrKind, Instruction, Program, RoleProgram, StateBuffer};
use ir::reshard::{LayoutStep, Pieces};
use ir::training::{LOSS_SCALE, LOSS_SCALE_UNIT, StateRole};
use ir::{BufferId, Rank, StreamId, TemplateId};
use queues::Orders;
use serde::{Deserialize, Serialize};
use spoiled::Found;
use std::sync::Arc;
use std::time::Instant;

/// The stream that templates are timed on, and the host's reads and writes go with.
const FIRST: StreamId = StreamId(0);

/// Seconds of something that was executed a number of times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// On the clock, waiting included.
    pub wall_s: f64,
    /// On a processor; as on the clock where kernels use several threads.
    pub busy_s: f64,
    /// Executions.
    pub n: u32,
}

/// Times of one rank in one profiled step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankTimings {
    /// The rank.
    pub rank: u32,
    /// Per template and instruction.
    pub instructions: Vec<Vec<Timing>>,
    /// Per template.
    pub templates: Vec<Timing>,
}

/// The facts that a rank needs besides its program.
#[derive(Clone, Debug)]
pub(crate) struct RankOptions {
    /// Seed of the run.
    pub seed: u64,
    /// Threads for large kernels.
    pub threads: usize,
    /// Where streams are queues: the seed of the orders in which they go on.
    pub orders: Option<u64>,
    /// The run's data.
    pub data: Option<Arc<Batches>>,
    /// Where it writes what it is doing.
    pub record: Option<Recording>,
    /// When the clock of its process was at zero.
    pub epoch: Instant,
    /// How long its process stood still, where that is asked: where ranks are processors' work.
    pub standstill: Option<Standstill>,
}

impl RankOptions {
    /// Seconds that its process has stood still so far.
    fn still_s(&self) -> f64 {
        self.standstill.as_ref().map_or(0.0, Standstill::seconds)
    }
}

/// A rank.
pub(crate) struct RankState<D: Device, F: Fabric<D>> {
    role: usize,
    program: Arc<Program>,
    scripts: Scripts,
    options: RankOptions,
    /// It goes before the device does: others may wait for it, and streams for them.
    fabric: F,
    device: D,
    /// The rank's part of each buffer.
    locals: Vec<Local>,
    coords: Vec<u32>,
    calls: Calls,
    peak_scratch: u64,
    /// Seconds of the present step in which it waited for others.
    waited_s: f64,
    /// How long the thread that plays it stood in line for a processor, known from its first step
    /// on.
    in_line: Option<InLine>,
    orders: Option<Orders>,
    record: Option<Record>,
    /// Why there is none, where nobody asked for it.
    unrecorded: Option<RuntimeError>,
    /// Where the norm of the gradient is computed, if a step can be given up there.
    norm: Option<(TemplateId, usize)>,
    /// Whether the device works later, and an update by a norm that is no number changes no state.
    keeps_states: bool,
    standing: Standing,
    /// Whether it plays alone, and what it computes comes to nothing.
    rehearses: bool,
}

/// The step that a rank's states are of.
#[derive(Clone, Copy, Debug, Default)]
struct Standing {
    /// Steps done; none while states are being written, and where that has ended early.
    steps: Option<u64>,
    /// Instructions of the present step that will still write to them.
    n_writers: usize,
}

impl Standing {
    /// A step begins that has so many instructions that write to states.
    fn begin(&mut self, step: u64, n_writers: usize) {
        *self = Standing {
            steps: Some(step),
            n_writers,
        };
    }
    /// An instruction is about to be carried out.
    fn before(&mut self, step: &Step) {
        if step.writes_states {
            self.steps = None;
        }
    }
    /// It has been.
    fn after(&mut self, step: &Step, of: u64) {
        if step.writes_states {
            self.n_writers = self.n_writers.saturating_sub(1);
            self.steps = (self.n_writers == 0).then_some(of + 1);
        }
    }
}

/// Things that are looked for while a script is played.
#[derive(Default)]
struct Watch {
    /// Whether a norm that is no number ends it.
    gives_up: bool,
    /// Whether that has happened.
    has_given_up: bool,
    /// Whether everything that is written is looked at.
    looks: bool,
    /// The first value that is no number.
    found: Option<Found>,
    /// Instructions so far.
    played: usize,
}

/// By stream, the events of its instructions that others wait for.
type Events<D> = Vec<Vec<Option<<D as Device>::Event>>>;
/// The begin and the end of a template or one of its instructions.
type Span<D> = (TemplateId, Option<usize>, [<D as Device>::Tick; 2]);

impl<D: Device, F: Fabric<D>> RankState<D, F> {
    /// Fails when the program is not consistent: a buffer of another size than its part, or
    /// beyond the arena. Also when its record was asked for and cannot be begun.
    pub fn new(
        program: Arc<Program>,
        role: usize,
        scripts: Scripts,
        (device, fabric): (D, F),
        options: RankOptions,
    ) -> Result<Self, RuntimeError> {
        let (rank, this) = (fabric.rank(), &program.roles[role]);
        let coords = this.mesh.coords(rank).ok_or_else(|| {
            RuntimeError::Program(format!("{rank} is not in the mesh of {}", this.stage))
        })?;
        let part =
            |b: &ir::program::Buffer| Local::shard(b.dtype, &b.lens, &b.spec, &this.mesh, &coords);
        let locals: Vec<Local> = this.buffers.iter().map(part).collect();
        for (buffer, local) in this.buffers.iter().zip(&locals) {
            let end = buffer.offset + u64::from(buffer.slots()) * buffer.stride();
            let shape: Vec<u64> = local.ranges.iter().map(|r| r.padded).collect();
            let in_pieces = |p: Pieces| p.shape(&shape).iter().product::<u64>();
            let n_elements = buffer.pieces.map_or(local.elements() as u64, in_pieces);
            let n_bytes = n_elements * local.dtype.bytes();
            let arena_bytes = device.arena_bytes(buffer.space);
            if n_bytes != buffer.bytes || end > arena_bytes || buffer.offset % 8 != 0 {
                let message = format!(
                    "buffer `{}` of {}: {} bytes at {}, its part has {}, the arena {}",
                    buffer.name, this.stage, buffer.bytes, buffer.offset, n_bytes, arena_bytes
                );
                return Err(RuntimeError::Program(message));
            }
        }
        let calls = calls::calls(&program, this, rank, &locals)?;
        calls::kept(&calls, fabric.order())?;
        let record = options.record.as_ref().map(|of| {
            let begun = Record::create(&of.folder, &of.plan, rank);
            match begun {
                // One that nobody asked for is no reason to end a run: such a rank leaves none.
                Err(e) if !of.is_asked_for => Ok((None, Some(e))),
                begun => begun.map(|record| (Some(record), None)),
            }
        });
        let (record, unrecorded) = record.transpose()?.unwrap_or_default();
        // Of a device that works later, the host would have to wait for the norm.
        let is_later = !device.is_synchronous();
        let norm = spoiled::norm(&program, role).filter(|_| !is_later);
        Ok(RankState {
            norm,
            keeps_states: is_later && spoiled::keeps_states(&program),
            standing: Standing::default(),
            rehearses: false,
            role,
            scripts,
            device,
            locals,
            coords,
            calls,
            peak_scratch: 0,
            waited_s: 0.0,
            in_line: None,
            orders: options.orders.map(|seed| Orders::new(seed, rank)),
            record,
            unrecorded,
            options,
            fabric,
            program,
        })
    }

    fn this(&self) -> &RoleProgram {
        &self.program.roles[self.role]
    }
    fn at(&self, state: BufferId) -> Place {
        place(self.this(), state, None)
    }

    /// The reason why it has no record that it was to have.
    pub fn unrecorded(&self) -> Option<&RuntimeError> {
        self.unrecorded.as_ref()
    }

    /// This rank's part of a state.
    pub fn part(&self, state: BufferId) -> &Local {
        &self.locals[state.index()]
    }
    /// [`RankState::play`], while the fabric looks whether the host comes back.
    pub fn play_watched(&mut self, play: &Play) -> Result<Played, RuntimeError> {
        self.fabric.host_works();
        let played = self.play(play);
        self.fabric.host_rests();
        played
    }
    /// [`RankState::read`] between steps, while the fabric looks whether the host comes back.
    pub fn read_watched(&self, state: BufferId) -> Result<View<'_>, RuntimeError> {
        self.fabric.host_works();
        let bytes = self.read(state);
        self.fabric.host_rests();
        bytes
    }
    /// The bytes of its part.
    pub fn read(&self, state: BufferId) -> Result<View<'_>, RuntimeError> {
        self.device.read(FIRST, self.at(state))
    }
    /// Has them written in place.
    pub fn write(
        &mut self,
        state: BufferId,
        mut write: impl FnMut(&Local, &mut [u8]) -> Result<(), RuntimeError>,
    ) -> Result<(), RuntimeError> {
        let (at, local) = (self.at(state), &self.locals[state.index()]);
        self.device
            .update(FIRST, at, &mut |bytes| write(local, bytes))
    }
    /// The states of its role.
    pub fn states(&self) -> Vec<StateBuffer> {
        self.this().states.clone()
    }
    /// How many steps its states are of; none where a step has ended in the middle of its update, or
    /// none was played.
    pub fn stands(&self) -> Option<u64> {
        self.standing.steps
    }
    /// Whether its device has done what it was given.
    pub fn is_synchronous(&self) -> bool {
        self.device.is_synchronous()
    }
    /// Its place among the ranks.
    pub fn rank(&self) -> Rank {
        self.fabric.rank()
    }
    /// Ends the run of all ranks.
    pub fn abort(&self, reason: &str) {
        self.fabric.abort(reason);
    }

    /// Plays everything once without the others, before there are states: where other ranks have
    /// the device too, it must not have to load or allocate anything while their calls wait.
    pub fn rehearse(&mut self) -> Result<(), RuntimeError> {
        if self.device.is_synchronous() || !self.fabric.holds_up_others() {
            return Ok(());
        }
        let (record, standing) = (self.record.take(), self.standing);
        self.rehearses = true;
        self.device.rehearse(true)?;
        // Profiled steps launch one by one what other steps launch together.
        for (training, profile) in [(true, false), (true, true), (false, false)] {
            let play = Play {
                samples: Samples::Given(Arc::default()),
                step: 0,
                lr: 0.0,
                training,
                profile,
                looks: false,
            };
            let mut spans = profile.then(Vec::new);
            self.play_list(&play, &mut spans, &mut Watch::default())?;
            self.device.finish()?;
        }
        self.device.rehearse(false)?;
        self.rehearses = false;
        (self.record, self.standing) = (record, standing);
        Ok(())
    }

    /// Plays one step, or a validation.
    pub fn play(&mut self, play: &Play) -> Result<Played, RuntimeError> {
        let began_s = self.options.epoch.elapsed().as_secs_f64();
        self.waited_s = 0.0;
        let in_line = self.in_line.get_or_insert_with(InLine::of_this_thread);
        let in_line_before_s = in_line.seconds();
        let still_before_s = self.options.still_s();
        self.fabric.prepare(&mut self.device)?;
        let loss_scale = self.loss_scale()?;
        let mut spans = play.profile.then(Vec::new);
        if let Some(record) = &mut self.record {
            record.play(play.training, play.step);
        }
        let mut watch = Watch {
            gives_up: play.training && loss_scale.is_none(),
            looks: play.looks,
            ..Watch::default()
        };
        if play.looks {
            watch.found = self.look_at_states()?;
        }
        if play.training {
            let n_writers = self.scripts.of(true).n_writers;
            self.standing.begin(play.step, n_writers);
        }
        match self.orders.take().filter(|_| play.training) {
            Some(mut orders) => {
                let played = self.play_queues(play, &mut orders);
                self.orders = Some(orders);
                played?;
            }
            None => self.play_list(play, &mut spans, &mut watch)?,
        }
        self.record.iter_mut().for_each(Record::rests);
        self.fabric.settle(&mut self.device)?;
        self.device.finish()?;
        let timings = spans.map(|s| self.timings(&s)).transpose()?;
        let scalar = |buffer: Option<BufferId>| match buffer {
            None => Ok(None),
            Some(b) => {
                let bytes = self.read(b)?;
                Ok::<_, RuntimeError>(bytes.first_chunk().map(|&b| f32::from_le_bytes(b)))
            }
        };
        let norm = scalar(self.this().grad_norm)?;
        let is_spoiled = norm.is_some_and(|norm| !norm.is_finite());
        let is_kept = watch.gives_up && self.keeps_states && is_spoiled;
        let ended_s = self.options.epoch.elapsed().as_secs_f64();
        let in_line_s = self.in_line.as_ref().map_or(0.0, InLine::seconds);
        Ok(Played {
            began_s,
            spent: Spent {
                work_s: ended_s - began_s - self.waited_s,
                wait_s: self.waited_s,
                in_line_s: (in_line_s - in_line_before_s).max(0.0),
                still_s: self.options.still_s() - still_before_s,
            },
            loss: scalar(self.this().loss)?,
            grad_norm: norm.map(|norm| f64::from(norm) / loss_scale.unwrap_or(1.0)),
            loss_scale,
            timings,
            peak_bytes: self.device.arena_bytes(Space::Device) + self.peak_scratch,
            is_writing: false,
            given_up: watch.has_given_up || is_kept,
            found: watch.found,
            ended_s,
        })
    }

    /// Plays a script in list order.
    fn play_list(
        &mut self,
        play: &Play,
        spans: &mut Option<Vec<Span<D>>>,
        watch: &mut Watch,
    ) -> Result<(), RuntimeError> {
        let (program, script) = (Arc::clone(&self.program), self.scripts.of(play.training));
        let role = &program.roles[self.role];
        let Script { slots, streams, .. } = &*script;
        let mut events: Events<D> = streams
            .iter()
            .map(|s| Vec::with_capacity(s.len()))
            .collect();
        let profile = spans.is_some();
        let tick = |device: &mut D, stream| profile.then(|| device.tick(stream)).transpose();
        for slot in slots {
            let Some(first) = slot.first() else { continue };
            let slot_began = tick(&mut self.device, FIRST)?;
            let mut rest = slot.as_slice();
            while let Some((step, others)) = rest.split_first() {
                self.fabric.host_works();
                // Measured and looked at is each by itself.
                let at_once = !profile && !watch.looks;
                let has_chains = at_once && self.device.chains();
                let is_chain = has_chains && step.n_chained > 1;
                let is_spared = has_chains && step.is_spared;
                let n = match is_chain {
                    true => step.n_chained,
                    false if at_once && self.device.joins() => step.n_joined,
                    false => 1,
                };
                let n = n.saturating_sub(1).min(others.len());
                if n > 0 || is_spared {
                    self.record.iter_mut().for_each(Record::begin);
                    let together = &rest[..=n];
                    together.iter().for_each(|s| self.standing.before(s));
                    self.play_together(role, (together, is_chain), play, &mut events)
                        .map_err(|source| self.failed(step, source))?;
                    together
                        .iter()
                        .for_each(|s| self.standing.after(s, play.step));
                    self.record.iter_mut().for_each(|r| r.with(n));
                    watch.played += 1 + n;
                    rest = &others[n..];
                    continue;
                }
                rest = others;
                let began = tick(&mut self.device, step.stream)?;
                self.record.iter_mut().for_each(Record::begin);
                self.play_step(role, step, play, &mut events)
                    .map_err(|source| self.failed(step, source))?;
                let ended = tick(&mut self.device, step.stream)?;
                if let (Some(all), Some(began), Some(ended)) = (&mut *spans, began, ended) {
                    all.push((step.template, Some(step.instruction), [began, ended]));
                }
                if watch.looks && watch.found.is_none() {
                    watch.found = self.look(role, step, watch.played)?;
                }
                watch.played += 1;
                if watch.gives_up && self.gives_up(role, step)? {
                    watch.has_given_up = true;
                    return Ok(());
                }
            }
            let slot_ended = tick(&mut self.device, FIRST)?;
            if let (Some(all), Some(began), Some(ended)) = (&mut *spans, slot_began, slot_ended) {
                all.push((first.template, None, [began, ended]));
            }
        }
        Ok(())
    }

    fn play_step(
        &mut self,
        role: &RoleProgram,
        step: &Step,
        play: &Play,
        events: &mut Events<D>,
    ) -> Result<(), RuntimeError> {
        self.await_events(step, events)?;
        self.standing.before(step);
        let ticket = self.begin(role, step, play)?;
        if self.rehearses {
            self.called(role, step, 0)?;
        }
        if let Some(ticket) = ticket {
            let since = Instant::now();
            let bytes = self.fabric.pass(&mut self.device, ticket)?;
            self.waited_s += since.elapsed().as_secs_f64();
            self.called(role, step, bytes)?;
        }
        self.standing.after(step, play.step);
        self.record_event(step, events)
    }

    /// Plays steps that are joined, or a chain: what the first one waits for is what all wait for, and
    /// who waits for one of them waits for all.
    fn play_together(
        &mut self,
        role: &RoleProgram,
        (steps, is_chain): (&[Step], bool),
        play: &Play,
        events: &mut Events<D>,
    ) -> Result<(), RuntimeError> {
        let Some(first) = steps.first() else {
            return Ok(());
        };
        self.await_events(first, events)?;
        let m = first.microbatch;
        let context = self.context(play, m);
        let instructions = &role.template(first.template).instructions;
        let tensor = |b: &BufferId| Tensor {
            local: &self.locals[b.index()],
            at: place(role, *b, m),
        };
        // What a chain will write anew need not be cleared.
        let has_chains = self.device.chains();
        let played = steps.iter().filter(|s| !(has_chains && s.is_spared));
        let kinds = played.map(|s| &instructions[s.instruction].kind);
        let tensors: Vec<[Vec<Tensor<'_>>; 2]> = kinds
            .clone()
            .map(|kind| match kind {
                InstrKind::Compute {
                    inputs, outputs, ..
                } => [inputs, outputs].map(|ids| ids.iter().map(tensor).collect()),
                _ => [Vec::new(), Vec::new()],
            })
            .collect();
        let mut works = Vec::with_capacity(steps.len());
        for (kind, [inputs, outputs]) in kinds.zip(&tensors) {
            works.push(match kind {
                InstrKind::Compute { path, kind, .. } => Work::Compute {
                    path,
                    op: kind,
                    inputs,
                    outputs,
                    context: &context,
                },
                InstrKind::Fill { value, output } => Work::Fill {
                    value: *value as f32,
                    output: tensor(output),
                },
                other => {
                    let problem = format!("{other:?} cannot begin with others");
                    return Err(RuntimeError::Program(problem));
                }
            });
        }
        let bytes = match is_chain {
            true => {
                let chain = Chain {
                    works: &works,
                    kept: &steps.iter().map(|s| s.is_kept).collect::<Vec<_>>(),
                    is_cleared: first.is_cleared,
                };
                self.device.launch_chain(first.stream, &chain)?
            }
            false if works.is_empty() => 0,
            false => self.device.launch_all(first.stream, &works)?,
        };
        self.note_scratch(bytes + self.fabric.held_bytes());
        steps.iter().try_for_each(|s| self.record_event(s, events))
    }

    /// Has the stream of an instruction wait for those of other streams that it needs.
    fn await_events(&mut self, step: &Step, events: &Events<D>) -> Result<(), RuntimeError> {
        for &(stream, n) in &step.waits {
            if let Some(Some(event)) = events[stream.index()].get(n - 1) {
                self.device.wait(step.stream, event)?;
            }
        }
        Ok(())
    }

    /// Notes that its stream was given an instruction, for those that wait for it.
    fn record_event(&mut self, step: &Step, events: &mut Events<D>) -> Result<(), RuntimeError> {
        let event = step.is_awaited.then(|| self.device.record(step.stream));
        events[step.stream.index()].push(event.transpose()?);
        Ok(())
    }

    /// The factor by which this step's gradients are too large, with f16.
    fn loss_scale(&self) -> Result<Option<f64>, RuntimeError> {
        let mut states = self.this().states.iter();
        let state = states.find(|s| s.role == StateRole::Scalar && s.path == LOSS_SCALE);
        let Some(state) = state else { return Ok(None) };
        let value = self.read(state.buffer)?;
        let value = bytemuck::cast_slice::<u8, f32>(&value).first();
        Ok(value.map(|v| f64::from(*v) * LOSS_SCALE_UNIT))
    }

    /// The times of what was played.
    fn timings(&self, spans: &[Span<D>]) -> Result<RankTimings, RuntimeError> {
        let templates = &self.this().templates;
        let mut timings = RankTimings {
            rank: self.rank().0,
            instructions: templates
                .iter()
                .map(|t| vec![Timing::default(); t.instructions.len()])
                .collect(),
            templates: vec![Timing::default(); templates.len()],
        };
        for (template, instruction, [began, ended]) in spans {
            let total = match instruction {
                Some(i) => &mut timings.instructions[template.index()][*i],
                None => &mut timings.templates[template.index()],
            };
            let elapsed = self.device.elapsed(began, ended)?;
            total.wall_s += elapsed.wall_s;
            total.busy_s += elapsed.busy_s;
            total.n += 1;
        }
        Ok(timings)
    }

    /// An error with the instruction that it befell. Errors of data name their own place.
    fn failed(&self, step: &Step, source: RuntimeError) -> RuntimeError {
        if matches!(source, RuntimeError::Data(_)) {
            return source;
        }
        let role = self.this();
        let of = role.template(step.template);
        let what = what(role, &of.instructions[step.instruction]);
        RuntimeError::Instruction {
            rank: self.rank(),
            stage: role.stage,
            instruction: format!(
                "{:?} template {}, instruction {}, {what}",
                of.kind, step.template.0, step.instruction
            ),
            source: Box::new(source),
        }
    }

    /// Ends a call that took these bytes beside the arenas: what a collective leaves in the padding
    /// of a part of a tensor becomes zero.
    fn called(&mut self, role: &RoleProgram, step: &Step, bytes: u64) -> Result<(), RuntimeError> {
        self.note_scratch(bytes);
        let instruction = &role.template(step.template).instructions[step.instruction];
        if let InstrKind::Collective { items, .. } = &instruction.kind {
            for b in items.iter().map(|i| i.output) {
                let local = &self.locals[b.index()];
                if role.buffer(b).pieces.is_none() && local.is_short() {
                    let at = place(role, b, step.microbatch);
                    let work = Work::Pad(Tensor { local, at });
                    self.device.launch(step.stream, &work)?;
                }
            }
        }
        Ok(())
    }

    /// Updates of the parameters before those of a slot: where microbatches play them, there are as
    /// many in every step.
    fn updates_before(&self, step: u64, microbatch: Option<u32>) -> u64 {
        microbatch.map_or(step, |m| {
            let per_step = u64::from(self.program.n_microbatches);
            step.saturating_mul(per_step).saturating_add(m.into())
        })
    }

    /// The facts of the run that ops of a slot need.
    fn context(&self, play: &Play, microbatch: Option<u32>) -> Context {
        Context {
            seed: self.options.seed,
            step: play.step,
            updates: self.updates_before(play.step, microbatch),
            lr: play.lr,
            first_sample: u64::from(microbatch.unwrap_or(0)) * self.program.microbatch,
            training: play.training,
            threads: self.options.threads,
        }
    }

    fn note_scratch(&mut self, bytes: u64) {
        self.peak_scratch = self.peak_scratch.max(bytes);
    }

    /// Puts an instruction on its stream, or begins it if it meets others.
    fn begin(
        &mut self,
        role: &RoleProgram,
        step: &Step,
        play: &Play,
    ) -> Result<Option<F::Ticket>, RuntimeError> {
        let (stream, m) = (step.stream, step.microbatch);
        let instruction = &role.template(step.template).instructions[step.instruction];
        let at = |b: &BufferId| place(role, *b, m);
        let tensor = |b: &BufferId| Tensor {
            local: &self.locals[b.index()],
            at: at(b),
        };
        let context = self.context(play, m);
        let device = &mut self.device;
        let work = match &instruction.kind {
            InstrKind::Compute {
                path,
                kind,
                inputs,
                outputs,
            } => {
                let work = Work::Compute {
                    path,
                    op: kind,
                    inputs: &inputs.iter().map(tensor).collect::<Vec<_>>(),
                    outputs: &outputs.iter().map(tensor).collect::<Vec<_>>(),
                    context: &context,
                };
                device.launch(stream, &work)?
            }
            InstrKind::Slice {
                step,
                input,
                output,
            } => {
                let LayoutStep::Slice { axis, dim, .. } = step else {
                    return Err(RuntimeError::Program(format!("{step:?} is not a slice")));
                };
                let work = Work::Slice {
                    dim: *dim,
                    index: self.coords[axis.index()] as usize,
                    input: tensor(input),
                    output: tensor(output),
                };
                device.launch(stream, &work)?
            }
            InstrKind::Fill { value, output } => {
                let work = Work::Fill {
                    value: *value as f32,
                    output: tensor(output),
                };
                device.launch(stream, &work)?
            }
            InstrKind::Copy { input, output } => {
                let pieces = [input, output].map(|b| role.buffer(*b).pieces);
                match pieces {
                    [None, Some(pieces)] => {
                        let (input, output) = (tensor(input), at(output));
                        let work = Work::Pack {
                            pieces,
                            input,
                            output,
                        };
                        device.launch(stream, &work)?
                    }
                    [Some(pieces), None] => {
                        let (input, output) = (at(input), tensor(output));
                        let work = Work::Unpack {
                            pieces,
                            input,
                            output,
                        };
                        device.launch(stream, &work)?
                    }
                    [from, to] if from == to => {
                        device.copy(stream, at(input), at(output)).map(|()| 0)?
                    }
                    _ => {
                        let problem = "a copy from pieces to other pieces";
                        return Err(RuntimeError::Program(problem.into()));
                    }
                }
            }
            InstrKind::Load { kind, output } => {
                let first = u64::from(m.unwrap_or(0)) * self.program.microbatch;
                let local = &self.locals[output.index()];
                let data = self.options.data.as_deref();
                let mut of_run = |sample, from, out: &mut [u32]| match (&play.samples, data) {
                    (Samples::Of(batch), Some(data)) => Ok(data.read(*batch, sample, from, out)?),
                    _ => Err(RuntimeError::Batch("the run has no data".into())),
                };
                device.write(stream, at(output), &mut |out| match &play.samples {
                    _ if self.rehearses => Ok(()),
                    Samples::Given(all) => load(*kind, local, first, &mut given(all), out),
                    Samples::Of(_) => load(*kind, local, first, &mut of_run, out),
                })?;
                0
            }
            InstrKind::Collective { items, .. } => {
                let places = Places {
                    inputs: items.iter().map(|i| at(&i.input)).collect(),
                    outputs: items.iter().map(|i| at(&i.output)).collect(),
                };
                return self.call(step, places);
            }
            InstrKind::Exchange { sends, recvs } => {
                let places = Places {
                    inputs: sends.iter().map(|s| at(&s.1)).collect(),
                    outputs: recvs.iter().map(|r| at(&r.1)).collect(),
                };
                return self.call(step, places);
            }
            InstrKind::WorldSum { inputs, output } => {
                let whole = at(output);
                let zeros = Work::Fill {
                    value: 0.0,
                    output: tensor(output),
                };
                device.launch(stream, &zeros)?;
                let first = self.coords.iter().all(|&c| c == 0);
                let mut copies = Vec::with_capacity(inputs.len());
                for (entry, buffer) in inputs.iter().filter(|_| first) {
                    let start = 4 * *entry as usize;
                    if start + 4 > whole.len {
                        return Err(RuntimeError::Program(format!(
                            "entry {entry} of a world sum of {}",
                            whole.len / 4
                        )));
                    }
                    let entry = Place {
                        start: whole.start + start,
                        len: 4,
                        ..whole
                    };
                    let value = Place {
                        len: 4,
                        ..at(buffer)
                    };
                    copies.push(Work::Copy {
                        from: value,
                        to: entry,
                    });
                }
                let bytes = device.launch_all(stream, &copies)?;
                self.note_scratch(bytes);
                let places = Places {
                    inputs: vec![at(output)],
                    outputs: vec![at(output)],
                };
                return self.call(step, places);
            }
        };
        let held = self.fabric.held_bytes();
        self.note_scratch(work + held);
        Ok(None)
    }

    /// Begins the call of an instruction, unless it plays alone.
    fn call(&mut self, step: &Step, places: Places) -> Result<Option<F::Ticket>, RuntimeError> {
        let call = self.calls[step.template.index()][step.instruction].as_ref();
        let call = call.ok_or_else(|| RuntimeError::Program("it calls nobody".into()))?;
        if self.rehearses {
            let device = &mut self.device;
            self.fabric.rehearse(device, step.stream, call, &places)?;
            return Ok(None);
        }
        self.fabric
            .begin(&mut self.device, step.stream, call, places)
            .map(Some)
    }
}

/// Where a buffer lies.
fn place(role: &RoleProgram, buffer: BufferId, microbatch: Option<u32>) -> Place {
    let b = role.buffer(buffer);
    Place {
        space: b.space,
        start: b.offset_for(microbatch) as usize,
        len: b.bytes as usize,
    }
}

/// Names an instruction in a few words: the op's path, or the kind and its first buffer, with the
/// number of the others.
pub(crate) fn what(role: &RoleProgram, instruction: &Instruction) -> String {
    let name = |b: &BufferId| role.buffer(*b).name.clone();
    let names = |list: Vec<&BufferId>| match list.split_first() {
        None => String::new(),
        Some((first, [])) => name(first),
        Some((first, others)) => format!("{} and {} more", name(first), others.len()),
    };
    match &instruction.kind {
        InstrKind::Compute { path, .. } => path.clone(),
        InstrKind::Collective { kind, items, .. } => format!(
            "{} {}",
            kind.name(),
            names(items.iter().map(|i| &i.input).collect())
        ),
        InstrKind::Slice { input, .. } => format!("slice {}", name(input)),
        InstrKind::Exchange { sends, recvs } => {
            format!(
                "send {} recv {}",
                names(sends.iter().map(|s| &s.1).collect()),
                names(recvs.iter().map(|r| &r.1).collect())
            )
        }
        InstrKind::WorldSum { output, .. } => format!("world_sum {}", name(output)),
        InstrKind::Load { output, .. } => format!("load {}", name(output)),
        InstrKind::Fill { output, .. } => format!("fill {}", name(output)),
        InstrKind::Copy { input, .. } => format!("copy {}", name(input)),
    }
}
