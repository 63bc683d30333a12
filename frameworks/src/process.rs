//! The memory of a rank's process on its device, by cause.
//!
//! Meshwright's own runtime holds the arena of the program and what the device reserves. Other
//! software keeps other things for the same program ([`ProcessMemory`]): gradients in another
//! type, masks, scores, microbatches that its schedule begins early, and an allocator that does
//! not give back what a phase has freed. What the program says stays: which tensors a rank
//! holds, how they are split, and how long they live.

use crate::{InFlight, ProcessMemory, Reuse};
use cost_model::memory::{memory_of, peak_bytes};
use ir::cluster::Cluster;
use ir::program::{
    Buffer, BufferClass, InstrKind, Instruction, Program, RoleProgram, TemplateKind,
};
use ir::training::StateRole;
use ir::{BufferId, Bytes, OpKind, Pass};
use std::collections::{BTreeMap, BTreeSet};

/// Bytes on every rank of a role at its peak.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Parameters: the copies that kernels read, where there are none the parameters themselves.
    pub parameters: Bytes,
    /// Gradients, summed over microbatches.
    pub gradients: Bytes,
    /// Optimizer states, and the parameters that they update where kernels read copies.
    pub optimizer: Bytes,
    /// Activations that microbatches keep for their backward passes.
    pub activations: Bytes,
    /// Temporaries: what a pass makes and frees, logits, buckets of collectives.
    pub buffers: Bytes,
    /// Memory that the allocator holds beside them.
    pub slack: Bytes,
    /// Context of the driver and buffers of communicators, or what the device reserves.
    pub context: Bytes,
}

impl MemoryUse {
    /// The parts, in the order of the fields.
    pub fn parts(&self) -> [Bytes; 7] {
        [
            self.parameters,
            self.gradients,
            self.optimizer,
            self.activations,
            self.buffers,
            self.slack,
            self.context,
        ]
    }

    /// All bytes.
    pub fn total(&self) -> Bytes {
        self.parts().into_iter().sum()
    }
}

/// The memory of a rank of `role`. Without [`ProcessMemory`] the sum is what Meshwright's own runtime
/// holds.
pub fn memory_use(
    program: &Program,
    role: &RoleProgram,
    cluster: &Cluster,
    memory: Option<&ProcessMemory>,
) -> MemoryUse {
    if let Some(memory) = memory {
        return Process::new(program, role, memory).memory_use();
    }
    let cluster = &*cluster.seen_by(role.mesh.devices);
    let held = Held::of(role);
    let classes = memory_of(role);
    let named = classes.persistent + classes.activation + held.copies + held.gradients;
    let all = peak_bytes(role, cluster).0;
    let context = cluster.device.memory_reserved_bytes;
    MemoryUse {
        parameters: held.at_rest() + held.copies,
        gradients: held.gradients,
        optimizer: Bytes(classes.persistent.0.saturating_sub(held.at_rest().0)),
        activations: classes.activation,
        buffers: Bytes(all.saturating_sub(named.0).saturating_sub(context.0)),
        slack: Bytes(0),
        context,
    }
}

/// Bytes of parameters and gradients by what they are.
#[derive(Default)]
struct Held {
    /// Parameters at rest.
    masters: Bytes,
    /// Their elements.
    master_elements: u64,
    /// Copies that live for a step.
    copies: Bytes,
    /// One copy of each parameter.
    distinct_copies: Bytes,
    /// The part of those that is gathered again at its uses.
    sharded_copies: Bytes,
    /// Accumulators.
    gradients: Bytes,
    /// Elements of the accumulators.
    gradient_elements: u64,
    /// Elements of the largest accumulator.
    largest_gradient: u64,
    /// Elements of the parameters as kernels read them, a tied one once.
    parameter_elements: u64,
}

impl Held {
    fn of(role: &RoleProgram) -> Held {
        let mut held = Held::default();
        for state in role
            .states
            .iter()
            .filter(|s| s.role == StateRole::Parameter)
        {
            let b = role.buffer(state.buffer);
            held.masters += Bytes(b.stride());
            held.master_elements += elements_of(b);
        }
        let gathered: BTreeSet<BufferId> = in_passes(role)
            .filter_map(|i| match &i.kind {
                InstrKind::Collective { items, .. } => Some(items.iter().map(|i| i.input)),
                _ => None,
            })
            .flatten()
            .collect();
        let accumulators: BTreeSet<BufferId> = in_passes(role)
            .filter_map(|i| match &i.kind {
                InstrKind::Compute { kind, outputs, .. } if is_accumulate(kind) => outputs.first(),
                _ => None,
            })
            .copied()
            .collect();
        let read: BTreeSet<BufferId> = in_passes(role).flat_map(Instruction::reads).collect();
        // The largest copy of every parameter: a tied table is read in two layouts.
        let mut largest: BTreeMap<&str, (u64, u64, bool)> = BTreeMap::new();
        for (i, b) in role.buffers.iter().enumerate() {
            let id = BufferId::new(i);
            if b.class != BufferClass::Step {
                continue;
            }
            let bytes = Bytes(b.stride());
            let elements = elements_of(b);
            if accumulators.contains(&id) {
                held.gradients += bytes;
                held.gradient_elements += elements;
                held.largest_gradient = held.largest_gradient.max(elements);
            } else if read.contains(&id) {
                held.copies += bytes;
                let most = largest.entry(parameter_of(&b.name)).or_default();
                *most = (*most).max((elements, bytes.0, gathered.contains(&id)));
            }
        }
        held.parameter_elements = match held.copies.0 {
            0 => held.master_elements,
            _ => largest.values().map(|c| c.0).sum(),
        };
        held.distinct_copies = Bytes(largest.values().map(|c| c.1).sum());
        let sharded = largest.values().filter(|c| c.2);
        held.sharded_copies = Bytes(sharded.map(|c| c.1).sum());
        held
    }
    /// Bytes at rest that count as parameters: none where kernels read copies.
    fn at_rest(&self) -> Bytes {
        if self.copies.0 == 0 {
            self.masters
        } else {
            Bytes(0)
        }
    }
}

/// The parameter that a copy is of: its name without what made it and its layout.
fn parameter_of(name: &str) -> &str {
    let name = name.split('@').next().unwrap_or(name);
    let made = ["cast.", "prepare."].iter();
    made.filter_map(|p| name.strip_prefix(p))
        .next()
        .unwrap_or(name)
}

fn elements_of(b: &Buffer) -> u64 {
    b.bytes / b.dtype.bytes().max(1)
}

fn is_accumulate(kind: &OpKind) -> bool {
    matches!(kind, OpKind::Accumulate { .. })
}

/// Instructions of forward and backward passes.
fn in_passes(role: &RoleProgram) -> impl Iterator<Item = &Instruction> {
    role.templates
        .iter()
        .filter(|t| t.kind.pass().is_some())
        .flat_map(|t| &t.instructions)
}

/// A role as other software executes it.
struct Process<'a> {
    program: &'a Program,
    role: &'a RoleProgram,
    memory: &'a ProcessMemory,
    /// Buffers that are counted apart: logits, and the gradients of parameters.
    apart: BTreeSet<BufferId>,
}

impl<'a> Process<'a> {
    fn new(program: &'a Program, role: &'a RoleProgram, memory: &'a ProcessMemory) -> Self {
        let mut apart = BTreeSet::new();
        for i in in_passes(role) {
            let InstrKind::Compute {
                kind,
                inputs,
                outputs,
                ..
            } = &i.kind
            else {
                continue;
            };
            if matches!(
                kind,
                OpKind::LogSumExp | OpKind::CrossEntropy | OpKind::CrossEntropyGrad
            ) {
                apart.extend(inputs.first());
            }
            if matches!(kind, OpKind::CrossEntropyGrad) {
                apart.extend(outputs);
            }
            if is_accumulate(kind) {
                apart.extend(inputs);
            }
        }
        Process {
            program,
            role,
            memory,
            apart,
        }
    }

    fn memory_use(&self) -> MemoryUse {
        let held = Held::of(self.role);
        let persistent = memory_of(self.role).persistent;
        let copies = match self.memory.sharded_copies {
            true => held.distinct_copies,
            false => Bytes(held.distinct_copies.0 - held.sharded_copies.0),
        };
        let optimizer = Bytes(persistent.0.saturating_sub(held.at_rest().0));
        let elements = held.gradient_elements.min(held.parameter_elements);
        let gradients = scaled(elements, self.memory.gradient_bytes);
        let of_a_pass = scaled(elements, self.memory.pass_gradient_bytes);
        let kept = self.kept() + self.transfers();
        let buffers = self.buffers(&held, kept, gradients);
        MemoryUse {
            parameters: held.at_rest() + copies,
            gradients: gradients + of_a_pass,
            optimizer,
            activations: kept,
            buffers,
            slack: scaled((kept + buffers + of_a_pass).0, self.memory.slack),
            context: self.memory.context_bytes
                + self.memory.communicator_bytes * self.communicators(),
        }
    }

    /// Temporaries beside what microbatches keep and the gradients that they add up.
    fn buffers(&self, held: &Held, kept: Bytes, gradients: Bytes) -> Bytes {
        let (pass, logits) = (self.temporaries().0, self.logit_bytes().0);
        let largest = self.largest_gradient(held).0;
        let update = self.update(held).0;
        Bytes(match self.memory.reuse {
            Reuse::Blocks => pass.max(logits).max(largest).max(update),
            Reuse::Lifetimes if self.program.n_microbatches > 1 => pass + logits + update,
            Reuse::Lifetimes => {
                // Activations give way to gradients while the pass goes on.
                let beside = kept.0 + gradients.0;
                let most = (kept.0 + pass.max(logits)).max(gradients.0 + pass.max(update));
                most.saturating_sub(beside)
            }
        })
    }

    /// Memory of transfers between stages beyond the program's places: a buffer
    /// for whatever each microbatch of a step receives, and what a stage gave the next one, for
    /// the microbatches in flight. With several stages on a mesh, what goes on from the last mesh
    /// to the first counts as going back.
    fn transfers(&self) -> Bytes {
        if !self.memory.keeps_transfers {
            return Bytes(0);
        }
        let places = |b: BufferId| match self.role.buffer(b).class {
            BufferClass::PerMicrobatch { slots } => u64::from(slots),
            _ => 0,
        };
        let all = (0..self.role.buffers.len()).map(BufferId::new);
        let in_flight = all.map(places).max().unwrap_or(0);
        let microbatches = u64::from(self.program.n_microbatches);
        let mut copies: BTreeMap<BufferId, u64> = BTreeMap::new();
        for i in self.templates(TemplateKind::Exchange).flatten() {
            let InstrKind::Exchange { sends, recvs } = &i.kind else {
                continue;
            };
            let is_onwards =
                |x: ir::TransferId| self.program.transfers[x.index()].to > self.role.stage;
            let received = recvs.iter().map(|r| (r.1, microbatches));
            let given = sends.iter().filter(|s| is_onwards(s.0));
            for (b, n) in received.chain(given.map(|s| (s.1, in_flight))) {
                let most = copies.entry(b).or_default();
                *most = n.max(*most);
            }
        }
        let more = |(b, n): (BufferId, u64)| {
            let beyond = n.saturating_sub(places(b));
            self.role.buffer(b).stride().saturating_mul(beyond)
        };
        Bytes(
            copies
                .into_iter()
                .map(more)
                .fold(0, |a: u64, b| a.saturating_add(b)),
        )
    }

    /// Activations that microbatches in flight keep.
    ///
    /// The program has places for the most microbatches of each stage, and stages that share a
    /// mesh do not have their most at the same time: an allocator holds the most of their sum
    /// (Korthikanti et al. 2022, section 4.2.3: `1 + (p - 1) / (p v)` of one stage's share).
    fn kept(&self) -> Bytes {
        let kept = self.kept_by_stage();
        if kept.len() <= 1 {
            let all = kept.values().flatten();
            let held = all.map(|&(bytes, slots)| bytes * u64::from(self.in_flight(slots)));
            return Bytes(held.sum());
        }
        let of_a_microbatch: BTreeMap<u32, u64> = kept
            .into_iter()
            .map(|(chunk, tensors)| (chunk, tensors.into_iter().map(|(bytes, _)| bytes).sum()))
            .collect();
        let (mut now, mut most) = (0u64, 0u64);
        for slot in &self.role.trace {
            let Some(t) = self.role.templates.get(slot.template.index()) else {
                continue;
            };
            let bytes = of_a_microbatch.get(&t.chunk).copied().unwrap_or(0);
            match t.kind {
                TemplateKind::Forward => now += bytes,
                TemplateKind::Backward | TemplateKind::WeightGradient => {
                    now = now.saturating_sub(bytes)
                }
                _ => {}
            }
            most = most.max(now);
        }
        Bytes(most)
    }

    /// Bytes of every tensor that a microbatch keeps, with the program's places for it, by the
    /// stage of the mesh.
    fn kept_by_stage(&self) -> BTreeMap<u32, Vec<(u64, u32)>> {
        let mut stage_of: BTreeMap<BufferId, u32> = BTreeMap::new();
        let is_pass = |t: &&ir::program::Template| t.kind.pass().is_some();
        for t in self.role.templates.iter().filter(is_pass) {
            for b in t.instructions.iter().flat_map(|i| {
                let mut used = i.reads();
                used.extend(i.writes());
                used
            }) {
                stage_of.entry(b).or_insert(t.chunk);
            }
        }
        let mut kept: BTreeMap<u32, Vec<(u64, u32)>> = BTreeMap::new();
        for (i, b) in self.role.buffers.iter().enumerate() {
            let id = BufferId::new(i);
            match b.class {
                BufferClass::PerMicrobatch { slots } if !self.apart.contains(&id) => {
                    let stage = stage_of.get(&id).copied().unwrap_or(0);
                    kept.entry(stage).or_default().push((b.stride(), slots));
                }
                _ => {}
            }
        }
        // Values that others keep and the program makes again from a counter, or never makes.
        let backward = self.role.templates.iter();
        for t in backward.filter(|t| t.kind.is_backward()) {
            let of_stage = kept.entry(t.chunk).or_default();
            let slots = of_stage.iter().map(|k| k.1).max().unwrap_or(1);
            let again = Again::of(&t.instructions);
            let beside = t.instructions.iter().filter(|i| !again.has(i));
            let bytes = beside.map(|i| self.beside(i).0).sum();
            of_stage.push((bytes, slots));
        }
        kept
    }

    /// Copies of what `slots` microbatches of the schedule keep.
    fn in_flight(&self, slots: u32) -> u32 {
        let stages = self.program.roles.len() as u32;
        let most = self.program.n_microbatches.max(1);
        match self.memory.in_flight {
            _ if stages <= 1 => slots,
            InFlight::Schedule => slots,
            InFlight::More { microbatches } => slots.saturating_add(microbatches).min(most),
            InFlight::Buffered { .. } if self.role.stage.index() + 1 == stages as usize => slots,
            InFlight::Buffered { per_stage } => {
                per_stage.saturating_mul(stages).saturating_add(1).min(most)
            }
        }
    }

    /// Scores and masks that a gradient op needs and the program does not hold.
    fn beside(&self, i: &Instruction) -> Bytes {
        let InstrKind::Compute { kind, inputs, .. } = &i.kind else {
            return Bytes(0);
        };
        match kind {
            OpKind::AttentionGrad { .. } => {
                let elements = inputs.first().map_or(0, |&q| self.scores(q, inputs[1]));
                scaled(elements, self.memory.score_bytes)
            }
            OpKind::Dropout { .. } if i.pass != Pass::Recompute => {
                let b = inputs.first().map(|&x| self.role.buffer(x));
                let elements = b.map_or(0, elements_of);
                scaled(elements, self.memory.mask_bytes)
            }
            _ => Bytes(0),
        }
    }

    /// Scores of an attention with these operands on a rank: a square of the sequence for each
    /// sample and head.
    fn scores(&self, q: BufferId, k: BufferId) -> u64 {
        let (q, k) = (self.role.local_shape(q), self.role.local_shape(k));
        let heads: u64 = q[2..q.len().max(3) - 1].iter().product();
        q[0] * heads * q[1] * k[1]
    }

    fn templates(&self, kind: TemplateKind) -> impl Iterator<Item = &'a Vec<Instruction>> {
        let of_kind = move |t: &&ir::program::Template| t.kind == kind;
        self.role
            .templates
            .iter()
            .filter(of_kind)
            .map(|t| &t.instructions)
    }

    /// The most bytes that a pass holds between its beginning and its end, logits aside.
    fn temporaries(&self) -> Bytes {
        let passes = self.role.templates.iter();
        let passes = passes.filter(|t| t.kind.pass().is_some());
        let live = passes.map(|t| self.live(&t.instructions));
        Bytes(live.max().unwrap_or(0))
    }

    fn live(&self, instructions: &[Instruction]) -> u64 {
        let mut intervals: BTreeMap<BufferId, (usize, usize)> = BTreeMap::new();
        let mut change = vec![0i128; instructions.len() + 1];
        let again = Again::of(instructions);
        let mut begun: BTreeMap<&str, usize> = BTreeMap::new();
        for (at, i) in instructions.iter().enumerate() {
            for b in i.reads().into_iter().chain(i.writes()) {
                let transient = self.role.buffer(b).class == BufferClass::Transient;
                if transient && !self.apart.contains(&b) {
                    intervals.entry(b).or_insert((at, at)).1 = at;
                }
            }
            let InstrKind::Compute { kind, .. } = &i.kind else {
                continue;
            };
            // The key that a gradient and the twin that it needs have in common.
            let key = match kind {
                OpKind::Attention { key, .. }
                | OpKind::AttentionGrad { key, .. }
                | OpKind::Dropout { key, .. } => key.as_str(),
                _ => continue,
            };
            if i.pass == Pass::Recompute {
                begun.insert(key, at);
            } else if again.has(i) {
                let from = begun.get(key).copied();
                // Its kernels: its parameters may be gathered before.
                let computes = |j: &Instruction| matches!(j.kind, InstrKind::Compute { .. });
                let of_layer = |j: &Instruction| j.layer == i.layer && computes(j);
                let layer = || instructions.iter().position(of_layer);
                let from = from.or_else(layer).unwrap_or(at);
                let bytes = i128::from(self.beside(i).0);
                change[from.min(at)] += bytes;
                change[at + 1] -= bytes;
            }
        }
        for (b, (first, last)) in intervals {
            let bytes = i128::from(self.role.buffer(b).stride());
            change[first] += bytes;
            change[last + 1] -= bytes;
        }
        let (mut now, mut most) = (0i128, 0i128);
        for c in change {
            now += c;
            most = most.max(now);
        }
        u64::try_from(most).unwrap_or(u64::MAX)
    }

    /// Logits with what the loss makes of them.
    fn logit_bytes(&self) -> Bytes {
        let of = |i: &Instruction| match &i.kind {
            InstrKind::Compute {
                kind: OpKind::CrossEntropyGrad,
                inputs,
                ..
            } => {
                let logits = inputs.first().map(|&b| self.role.buffer(b));
                logits.map_or(0, elements_of)
            }
            _ => 0,
        };
        let elements = in_passes(self.role).map(of).max().unwrap_or(0);
        scaled(elements, self.memory.logit_bytes)
    }

    fn largest_gradient(&self, held: &Held) -> Bytes {
        scaled(held.largest_gradient, self.memory.largest_gradient_bytes)
    }

    /// Memory that only the end of the step needs.
    fn update(&self, held: &Held) -> Bytes {
        let mesh = &self.role.mesh;
        let splits_samples = |name: &str| name == "data" || name == "replica";
        let reduced = (mesh.axes.iter()).any(|a| splits_samples(&a.name) && a.size > 1);
        let buckets = match reduced {
            true => self.memory.bucket_bytes.0.min(held.distinct_copies.0),
            false => 0,
        };
        scaled(held.master_elements, self.memory.update_bytes) + Bytes(buckets)
    }

    /// Communicators of a rank.
    fn communicators(&self) -> u64 {
        let mesh = &self.role.mesh;
        let axes = mesh.axes.iter().filter(|a| a.size > 1).count() as u64;
        let roles = self.program.roles.iter();
        let ranks: u64 = roles.map(|r| u64::from(r.mesh.n_devices())).sum();
        axes + u64::from(self.program.roles.len() > 1) + u64::from(ranks > 1)
    }
}

/// Recomputation of a backward pass, by layer.
struct Again {
    /// Layers whose products are: all that they keep is their input.
    whole: BTreeSet<Option<ir::LayerId>>,
    /// Layers whose attention is, alone or with cheap ops.
    attention: BTreeSet<Option<ir::LayerId>>,
}

impl Again {
    fn of(instructions: &[Instruction]) -> Again {
        let layers = |of: fn(&OpKind) -> bool| {
            let again = instructions.iter().filter(|i| {
                let kind = match &i.kind {
                    InstrKind::Compute { kind, .. } => Some(kind),
                    _ => None,
                };
                i.pass == Pass::Recompute && kind.is_some_and(of)
            });
            again.map(|i| i.layer).collect()
        };
        Again {
            whole: layers(|k| matches!(k, OpKind::DotGeneral { .. })),
            attention: layers(|k| matches!(k, OpKind::Attention { .. })),
        }
    }

    /// Whether scores or a mask that this instruction reads are made in the backward pass. A
    /// mask outside of attention is kept unless its whole layer is computed again.
    fn has(&self, i: &Instruction) -> bool {
        let attends = matches!(
            &i.kind,
            InstrKind::Compute {
                kind: OpKind::AttentionGrad { .. },
                ..
            }
        );
        self.whole.contains(&i.layer) || (attends && self.attention.contains(&i.layer))
    }
}

fn scaled(n: u64, by: f64) -> Bytes {
    Bytes((n as f64 * by).round() as u64)
}

#[cfg(test)]
mod tests;
