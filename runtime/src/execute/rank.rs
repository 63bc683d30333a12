//! One rank: its arena, and the instructions of its role carried out in list order.

mod communicate;
mod queues;

use super::kernel::{Context, Operand, Output, kernel};
use super::load::load_tokens;
use super::local::Local;
use super::script::{ScriptSlot, Scripts};
use crate::arena::{Arena, Bytes, Spare};
use crate::clock::Moment;
use crate::communicator::Endpoint;
use crate::error::RuntimeError;
use communicate::{Tiles, Waiting};
use ir::op::InputKind;
use ir::program::{InstrKind, Instruction, Program, RoleProgram, StateBuffer};
use ir::reshard::Pieces;
use ir::training::{LOSS_SCALE, LOSS_SCALE_UNIT, StateRole};
use ir::{BufferId, Rank, TemplateId};
use queues::Orders;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// The step to play.
#[derive(Clone, Debug)]
pub(crate) struct Play {
    /// The samples of the global batch, `sequence + 1` tokens each.
    pub batch: Arc<Vec<Vec<u32>>>,
    /// Seed of the run.
    pub seed: u64,
    /// Training step.
    pub step: u64,
    /// Learning rate.
    pub lr: f64,
    /// False: only what the loss needs.
    pub training: bool,
    /// Whether to time instructions.
    pub profile: bool,
}

/// Seconds of something that was executed a number of times.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timing {
    /// On the clock, waiting included.
    pub wall_s: f64,
    /// On a processor; as on the clock where kernels use several threads.
    pub busy_s: f64,
    /// Executions.
    pub n: u32,
}

/// Times of one rank in one profiled step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankTimings {
    /// The rank.
    pub rank: u32,
    /// Per template and instruction.
    pub instructions: Vec<Vec<Timing>>,
    /// Per template.
    pub templates: Vec<Timing>,
}

/// The results of a step on a rank.
#[derive(Debug)]
pub(crate) struct Played {
    pub start: Instant,
    pub end: Instant,
    pub loss: Option<f32>,
    pub grad_norm: Option<f64>,
    pub loss_scale: Option<f64>,
    pub timings: Option<RankTimings>,
    pub peak_bytes: u64,
}

/// A rank.
pub(crate) struct RankState {
    rank: Rank,
    role: usize,
    program: Arc<Program>,
    scripts: Scripts,
    arena: Arena,
    spare: Spare,
    endpoint: Endpoint,
    /// The rank's part of each buffer.
    locals: Vec<Local>,
    coords: Vec<u32>,
    world: Vec<Rank>,
    outgoing: Tiles,
    incoming: Tiles,
    threads: usize,
    peak_scratch: u64,
    /// Where streams are queues: in which order they go on.
    orders: Option<Orders>,
}

impl RankState {
    /// Fails when the program is not consistent: see [`Scripts::new`]; a buffer of another
    /// size than its part, or beyond the arena.
    pub fn new(
        program: Arc<Program>,
        role: usize,
        endpoint: Endpoint,
        threads: usize,
        orders: Option<u64>,
    ) -> Result<Self, RuntimeError> {
        let scripts = Scripts::new(&program, role)?;
        let (rank, this) = (endpoint.rank(), &program.roles[role]);
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
            if n_bytes != buffer.bytes
                || end > this.arena_bytes.next_multiple_of(ir::program::ARENA_ALIGN)
                || buffer.offset % 8 != 0
            {
                let message = format!(
                    "buffer `{}` of {}: {} bytes at {}, its part has {}, the arena {}",
                    buffer.name, this.stage, buffer.bytes, buffer.offset, n_bytes, this.arena_bytes
                );
                return Err(RuntimeError::Program(message));
            }
        }
        let arena =
            Arena::new(this.arena_bytes.next_multiple_of(ir::program::ARENA_ALIGN) as usize);
        let (outgoing, incoming) = communicate::tiles(&program, role, rank, &coords)?;
        let world = program.roles.iter().flat_map(|r| r.mesh.ranks()).collect();
        Ok(RankState {
            rank,
            role,
            scripts,
            arena,
            spare: Spare::default(),
            endpoint,
            locals,
            coords,
            world,
            outgoing,
            incoming,
            threads,
            peak_scratch: 0,
            orders: orders.map(|seed| Orders::new(seed, rank)),
            program,
        })
    }

    fn this(&self) -> &RoleProgram {
        &self.program.roles[self.role]
    }
    fn range(&self, buffer: BufferId, microbatch: Option<u32>) -> Range<usize> {
        let b = self.this().buffer(buffer);
        let start = b.offset_for(microbatch) as usize;
        start..start + b.bytes as usize
    }
    fn local(&self, buffer: BufferId) -> &Local {
        &self.locals[buffer.index()]
    }

    /// This rank's part of a state, and its buffer.
    pub fn shard(&self, state: BufferId) -> (&Local, &[u8]) {
        (self.local(state), self.arena.read(self.range(state, None)))
    }
    /// As [`RankState::shard`], to be written.
    pub fn shard_mut(&mut self, state: BufferId) -> (&Local, &mut [u8]) {
        let range = self.range(state, None);
        (&self.locals[state.index()], self.arena.write(range))
    }
    /// The states of its role.
    pub fn states(&self) -> Vec<StateBuffer> {
        self.this().states.clone()
    }
    /// Its place among the ranks.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Plays one step, or a validation.
    pub fn play(&mut self, play: &Play) -> Result<Played, RuntimeError> {
        let start = Instant::now();
        let scale = self.loss_scale();
        let script = if play.training {
            self.scripts.training()
        } else {
            self.scripts.validation()
        };
        let mut timings = play.profile.then(|| self.no_timings());
        if let (Some(orders), true) = (&mut self.orders, play.training) {
            let mut orders = std::mem::take(orders);
            let played = self.play_queues(play, &mut orders);
            self.orders = Some(orders);
            played?;
            return Ok(self.played(start, scale, timings));
        }
        for slot in script.iter() {
            let began = timings.is_some().then(Moment::now);
            self.play_slot(slot, play, timings.as_mut())?;
            if let (Some(t), Some(began)) = (&mut timings, began) {
                self.add(&mut t.templates[slot.template.index()], began);
            }
        }
        Ok(self.played(start, scale, timings))
    }

    /// Collects the results of a step that is over.
    fn played(&self, start: Instant, scale: Option<f64>, timings: Option<RankTimings>) -> Played {
        let scalar = |b: BufferId| {
            self.arena
                .read(self.range(b, None))
                .first_chunk()
                .map(|&bytes| f32::from_le_bytes(bytes))
        };
        let loss = self.this().loss.and_then(scalar);
        let grad_norm = self
            .this()
            .grad_norm
            .and_then(scalar)
            .map(|norm| f64::from(norm) / scale.unwrap_or(1.0));
        let peak_bytes = self.arena.len() as u64 + self.peak_scratch;
        Played {
            start,
            end: Instant::now(),
            loss,
            grad_norm,
            loss_scale: scale,
            timings,
            peak_bytes,
        }
    }

    /// The factor by which this step's gradients are too large, with f16.
    fn loss_scale(&self) -> Option<f64> {
        let state = self
            .this()
            .states
            .iter()
            .find(|s| s.role == StateRole::Scalar && s.path == LOSS_SCALE);
        state.map(|s| {
            let (_, value) = self.shard(s.buffer);
            f64::from(bytemuck::cast_slice::<u8, f32>(value)[0]) * LOSS_SCALE_UNIT
        })
    }

    fn no_timings(&self) -> RankTimings {
        let templates = &self.this().templates;
        RankTimings {
            rank: self.rank.0,
            instructions: templates
                .iter()
                .map(|t| vec![Timing::default(); t.instructions.len()])
                .collect(),
            templates: vec![Timing::default(); templates.len()],
        }
    }

    fn play_slot(
        &mut self,
        slot: &ScriptSlot,
        play: &Play,
        mut timings: Option<&mut RankTimings>,
    ) -> Result<(), RuntimeError> {
        let program = Arc::clone(&self.program);
        let role = &program.roles[self.role];
        for &i in &slot.instructions {
            let instruction = &role.template(slot.template).instructions[i];
            let began = timings.is_some().then(Moment::now);
            self.execute(instruction, slot.microbatch, play)
                .map_err(|source| self.failed(slot.template, i, source))?;
            if let (Some(t), Some(began)) = (timings.as_deref_mut(), began) {
                self.add(&mut t.instructions[slot.template.index()][i], began);
            }
        }
        Ok(())
    }

    /// An error with the instruction that it befell.
    fn failed(&self, template: TemplateId, i: usize, source: RuntimeError) -> RuntimeError {
        let role = self.this();
        let of = role.template(template);
        let what = what(role, &of.instructions[i]);
        RuntimeError::Instruction {
            rank: self.rank,
            stage: role.stage,
            instruction: format!(
                "{:?} template {}, instruction {i}, {what}",
                of.kind, template.0
            ),
            source: Box::new(source),
        }
    }

    fn execute(
        &mut self,
        instruction: &Instruction,
        microbatch: Option<u32>,
        play: &Play,
    ) -> Result<(), RuntimeError> {
        match &instruction.kind {
            InstrKind::Compute {
                path,
                kind,
                inputs,
                outputs,
            } => {
                let first_sample = u64::from(microbatch.unwrap_or(0)) * self.program.microbatch;
                let cx = Context {
                    seed: play.seed,
                    step: play.step,
                    lr: play.lr,
                    first_sample,
                    training: play.training,
                    threads: self.threads,
                };
                self.compute(path, kind, inputs, outputs, microbatch, &cx)
            }
            InstrKind::Collective { .. }
            | InstrKind::Exchange { .. }
            | InstrKind::WorldSum { .. } => {
                let mut waiting = self.begin_meeting(instruction, microbatch)?;
                while let Some(Waiting { meeting, then }) = waiting {
                    let arrived = self.endpoint.wait(meeting, &|| self.label(instruction))?;
                    waiting = self.after_meeting(instruction, microbatch, then, arrived)?;
                }
                Ok(())
            }
            InstrKind::Slice {
                step,
                input,
                output,
            } => self.slice(step, *input, *output, microbatch),
            InstrKind::Load { kind, output } => self.load(*kind, *output, microbatch, &play.batch),
            InstrKind::Fill { value, output } => {
                self.fill(*value as f32, *output, microbatch);
                Ok(())
            }
            InstrKind::Copy { input, output } => self.copy(*input, *output, microbatch),
        }
    }

    fn compute(
        &mut self,
        path: &str,
        op: &ir::OpKind,
        inputs: &[BufferId],
        outputs: &[BufferId],
        microbatch: Option<u32>,
        cx: &Context,
    ) -> Result<(), RuntimeError> {
        let writes: Vec<Range<usize>> =
            outputs.iter().map(|&b| self.range(b, microbatch)).collect();
        let mut copies: BTreeMap<usize, Bytes> = BTreeMap::new();
        let mut reads = Vec::with_capacity(inputs.len());
        for (i, &b) in inputs.iter().enumerate() {
            let range = self.range(b, microbatch);
            if let Some(&(_, o)) = op.in_place().iter().find(|p| p.0 == i) {
                // The old value goes where the new one will be; often it is there already.
                if let Some(to) = writes
                    .get(o)
                    .filter(|to| **to != range && to.len() == range.len())
                {
                    self.arena.copy(range, to.start);
                }
                reads.push(0..0);
            } else if writes
                .iter()
                .any(|w| w.start < range.end && range.start < w.end)
            {
                if matches!(op, ir::OpKind::Layout) && writes[0] == range {
                    return Ok(());
                }
                copies.insert(i, Bytes::copy_of(self.arena.read(range)));
                reads.push(0..0);
            } else {
                reads.push(range);
            }
        }
        let borrowed = self
            .arena
            .borrow(&reads, &writes)
            .map_err(RuntimeError::Program)?;
        let operands: Vec<Operand<'_>> = inputs
            .iter()
            .zip(borrowed.reads)
            .enumerate()
            .map(|(i, (b, data))| Operand {
                local: &self.locals[b.index()],
                data: copies.get(&i).map_or(data, |copy| copy),
            })
            .collect();
        let mut results: Vec<Output<'_>> = outputs
            .iter()
            .zip(borrowed.writes)
            .map(|(b, data)| Output {
                local: &self.locals[b.index()],
                data,
            })
            .collect();
        let scratch = kernel(op, path, &operands, &mut results, cx)?
            + copies.values().map(|c| c.len() as u64).sum::<u64>();
        let scratch = scratch + self.spare.bytes() as u64;
        self.peak_scratch = self.peak_scratch.max(scratch);
        Ok(())
    }

    fn load(
        &mut self,
        kind: InputKind,
        output: BufferId,
        microbatch: Option<u32>,
        batch: &[Vec<u32>],
    ) -> Result<(), RuntimeError> {
        let first = u64::from(microbatch.unwrap_or(0)) * self.program.microbatch;
        let range = self.range(output, microbatch);
        let local = &self.locals[output.index()];
        load_tokens(
            kind,
            local,
            first,
            batch,
            bytemuck::cast_slice_mut(self.arena.write(range)),
        )
    }

    fn add(&self, total: &mut Timing, began: Moment) {
        let elapsed = began.elapsed();
        total.wall_s += elapsed.wall_s;
        // The processor time of a kernel's other threads is not this thread's.
        total.busy_s += match self.threads {
            0 | 1 => elapsed.busy_s,
            _ => elapsed.wall_s,
        };
        total.n += 1;
    }

    fn fill(&mut self, value: f32, output: BufferId, microbatch: Option<u32>) {
        let range = self.range(output, microbatch);
        let local = &self.locals[output.index()];
        let out = self.arena.write(range);
        if value == 0.0 {
            return out.fill(0);
        }
        super::local::narrow(local.dtype, &vec![value; local.elements()], out);
        local.zero_padding(out);
    }
}

/// The name of an instruction, in a word: the op's path, or the kind and its buffers.
pub(crate) fn what(role: &RoleProgram, instruction: &Instruction) -> String {
    let name = |b: &BufferId| role.buffer(*b).name.clone();
    let names = |list: Vec<&BufferId>| list.into_iter().map(name).collect::<Vec<_>>().join("+");
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
