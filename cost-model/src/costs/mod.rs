//! Duration of every instruction of a program on a cluster, once per template.
//!
//! The same layer recurs many times in a template and the same template in many roles, so
//! collectives and transfers are remembered by what they depend on. A role's ranks share its
//! durations; where their groups differ, the slowest count ([`crate::classes`]). Durations are
//! those of an undisturbed rank; sharing of processors is the simulator's business.

mod accumulated;
mod casts;
mod contention;
mod experts;
mod fused;
mod graphs;
mod host;
mod paired;
mod repeat;
mod sums;
mod wire;

pub use casts::COPIES;
pub use wire::{Wire, wires};

use casts::Casts;
use fused::Fused;

use crate::classes::kinds_of_group;
use crate::collectives::{Group, collective_time};
use crate::{SimError, compute};
use ir::cluster::Cluster;
use ir::collective::CollectiveKind;
use ir::mesh::{Axis, DeviceMesh};
use ir::op::OpKind;
use ir::program::{
    BufferClass, CollectiveItem, Event, InstrKind, Instruction, MAX_STREAMS, Program, RoleProgram,
    Template, TemplateKind,
};
use ir::sharding::ReduceKind;
use ir::software::Software;
use ir::{AxisId, BufferId, DType, InstrId, LogicalMesh, Pass, Rank, TransferId};
use std::collections::HashMap;

/// The class of an instruction's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CostClass {
    /// Kernels and local copies.
    Compute,
    /// Collectives and the world's sum.
    Collective,
    /// Stage-to-stage exchanges.
    Transfer,
}

/// Duration of one instruction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InstrCost {
    /// Seconds, undisturbed; of an exchange, from the moment both sides have started.
    pub seconds: f64,
    /// Its class.
    pub class: CostClass,
    /// The queue that it stands in: its stream's, unless the software has others.
    pub queue: usize,
    /// The waits in its own slot that do not count, by their places: all for the gather of a
    /// parameter that the software prefetches, and those for the bytes that another collective
    /// had where the software has an allocator of its own. They are for memory alone.
    pub unheeded: u64,
}

impl InstrCost {
    /// The instructions of its own slot that one waits for.
    pub(crate) fn waits(self, instruction: &Instruction) -> impl Iterator<Item = InstrId> {
        let counts = move |at: usize| self.unheeded.checked_shr(at as u32).unwrap_or(0) & 1 == 0;
        let deps = instruction.deps.iter().enumerate();
        deps.filter(move |(at, _)| counts(*at)).map(|(_, d)| *d)
    }
}

/// The queue of kernels. Where software says what stands in which, the others are collectives,
/// transfers, collectives over the second axis, and prefetched parameters.
const KERNELS: usize = 0;
/// The queue of collectives that nothing else is said of: reductions of gradients among them.
pub(crate) const REDUCTIONS: usize = 1;
/// The queue of transfers.
pub(crate) const TRANSFERS: usize = 2;
/// The queue of collectives over any axis but the first.
const OTHER_AXES: usize = 3;
/// The queue of prefetched parameters.
const PREFETCHES: usize = 4;

/// Costs of a whole program.
#[derive(Clone, Debug)]
pub struct Costs {
    /// By role, template, instruction.
    pub instructions: Vec<Vec<Vec<InstrCost>>>,
    /// By transfer.
    pub wires: Vec<Wire>,
    /// Waits beyond those of the program.
    pub waits: Waits,
}

/// Waits that the software adds to the program's own, or leaves out; by default none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// A rank waits for its transfers before its next template.
    pub for_transfers: bool,
    /// Transfers between two passes start together.
    pub batched_transfers: bool,
    /// Collectives of the end of the step that need nothing of it but what the last backward
    /// wrote start as soon as that is written.
    pub early_gradients: bool,
}

impl Waits {
    fn of(cluster: &Cluster) -> Self {
        cluster
            .software
            .as_ref()
            .map_or(Waits::default(), |s| Waits {
                for_transfers: s.blocking_transfers,
                batched_transfers: s.batched_transfers,
                early_gradients: s.overlapped_gradients,
            })
    }
}

/// Durations of all instructions of `program`.
///
/// Fails when the cluster has problems or too few devices, or the program names what does not
/// exist.
pub fn costs(program: &Program, cluster: &Cluster) -> Result<Costs, SimError> {
    let problems = cluster.problems();
    if !problems.is_empty() {
        return Err(SimError::Cluster {
            name: cluster.name.clone(),
            problems,
        });
    }
    let last = program
        .roles
        .iter()
        .map(|r| {
            r.mesh
                .devices
                .first_rank
                .0
                .saturating_add(r.mesh.n_devices())
        })
        .max()
        .unwrap_or(0);
    if last > cluster.n_devices() {
        return Err(SimError::Ranks {
            rank: last.saturating_sub(1),
            devices: cluster.n_devices(),
        });
    }
    let wires = wires(program, cluster)?;
    let world = world_mesh(program);
    let instructions = program
        .roles
        .iter()
        .map(|role| {
            RoleCosts {
                cluster,
                role,
                world: &world,
                wires: &wires,
                shapes: shapes(role),
                copies: experts::copies(role),
                rank: None,
                groups: HashMap::new(),
            }
            .templates()
        })
        .collect::<Result<_, _>>()?;
    Ok(Costs {
        instructions,
        wires,
        waits: Waits::of(cluster),
    })
}

/// Durations of the instructions of role `role` on one of its ranks, by template: those of
/// [`costs`], but collectives in the groups that `rank` is in. For simulating every rank.
///
/// Fails as [`costs`] does.
pub fn costs_of_rank(
    program: &Program,
    cluster: &Cluster,
    role: &RoleProgram,
    rank: Rank,
) -> Result<Vec<Vec<InstrCost>>, SimError> {
    RoleCosts {
        cluster,
        role,
        world: &world_mesh(program),
        wires: &wires(program, cluster)?,
        shapes: shapes(role),
        copies: experts::copies(role),
        rank: Some(rank),
        groups: HashMap::new(),
    }
    .templates()
}

/// Seconds of the sends to one partner, or the receives from it, that proceed together: their
/// bytes share the link, their latencies overlap.
pub fn together(wires: &[Wire], transfers: impl Iterator<Item = TransferId>) -> f64 {
    let (fixed, moving) = transfers
        .map(|t| wires[t.index()])
        .fold((0.0f64, 0.0), |(f, m), w| {
            (f.max(w.fixed_s), m + w.moving_s)
        });
    fixed + moving
}

type Local = (DType, Vec<u64>);

fn shapes(role: &RoleProgram) -> Vec<Local> {
    role.buffers
        .iter()
        .map(|b| (b.dtype, b.spec.local_shape(&b.lens, &role.mesh)))
        .collect()
}

/// One axis over all ranks of the program.
fn world_mesh(program: &Program) -> LogicalMesh {
    let devices = |r: &RoleProgram| r.mesh.devices;
    let first = program
        .roles
        .iter()
        .map(|r| devices(r).first_rank.0)
        .min()
        .unwrap_or(0);
    let n = program.roles.iter().map(|r| devices(r).n_devices).sum();
    LogicalMesh {
        devices: DeviceMesh {
            first_rank: Rank(first),
            n_devices: n,
        },
        axes: vec![Axis {
            name: "world".into(),
            size: n,
        }],
    }
}

struct RoleCosts<'a> {
    cluster: &'a Cluster,
    role: &'a RoleProgram,
    world: &'a LogicalMesh,
    wires: &'a [Wire],
    shapes: Vec<Local>,
    /// Experts of a token, where there are any.
    copies: Option<u64>,
    /// The rank to price; the slowest one of every collective if it is not said.
    rank: Option<Rank>,
    /// By axes: one group of each kind.
    groups: HashMap<Vec<AxisId>, Vec<Group<'a>>>,
}

impl RoleCosts<'_> {
    fn templates(mut self) -> Result<Vec<Vec<InstrCost>>, SimError> {
        let role = self.role;
        if let Some(slot) = role
            .trace
            .iter()
            .find(|s| s.template.index() >= role.templates.len())
        {
            return Err(malformed(
                role,
                slot.template.index(),
                0,
                "the trace plays a template that does not exist",
            ));
        }
        let mut all = Vec::with_capacity(role.templates.len());
        for (t, template) in role.templates.iter().enumerate() {
            let mut costs = Vec::with_capacity(template.instructions.len());
            let narrow_gathers = self.software().is_some_and(|s| s.narrow_gathers);
            let keeps_casts = self.software().is_some_and(|s| s.kept_casts);
            let mut casts = Casts::new(role, template.kind, narrow_gathers);
            let fused = self.fused(template);
            let of_other_kernels = fused::made(template, &fused);
            for (i, instruction) in template.instructions.iter().enumerate() {
                self.check(template.kind, i, instruction)
                    .map_err(|problem| malformed(role, t, i, &problem))?;
                let mut cast = match keeps_casts {
                    true => casts.of(instruction),
                    false => Vec::new(),
                };
                cast.retain(|b| !of_other_kernels.contains(b));
                costs.push(self.cost(template, instruction, fused[i], &cast));
            }
            self.move_in_pieces(template, &mut costs);
            if self.software().is_some_and(|s| s.overlapped_dispatch) {
                let plays = role.trace.iter().filter(|s| s.template.index() == t);
                experts::overlap(role, template, plays.count(), &mut costs);
            }
            if self.software().is_some_and(|s| s.gathers_again) {
                repeat::gather_again(role, template, &mut costs);
            }
            if self.software().is_some_and(|s| s.overlapped_gradients) {
                sums::beside(template, &mut costs);
            }
            all.push(costs);
        }
        let Some(software) = &self.cluster.software else {
            return Ok(all);
        };
        let share = contention::share(software, self.cluster.device.multiprocessors);
        paired::hide(role, software, share, &mut all);
        for (template, costs) in role.templates.iter().zip(&mut all) {
            contention::slow_down(template, share, costs);
        }
        let mut host_s: Vec<Vec<f64>> = role.templates.iter().map(|t| self.host(t)).collect();
        let launch_s = self.cluster.device.launch_s;
        for ((template, costs), host_s) in role.templates.iter().zip(&mut all).zip(&mut host_s) {
            graphs::launch(template, software, launch_s, costs, host_s);
        }
        if software.recomputes_to_the_end {
            repeat::add(role, &mut all, &mut host_s);
        }
        for (costs, host_s) in all.iter_mut().zip(&host_s) {
            host::wait(costs, host_s, software.synchronous_launches);
        }
        Ok(all)
    }

    /// Takes from collectives that move piece by piece beside a matmul what the matmul hides.
    ///
    /// Of `n` pieces the first has to arrive before the matmul begins, or the last one to leave
    /// after it has ended; the others move while it computes. So of a collective of `c` and its
    /// matmuls of `m` seconds, `min(c, m) (1 - 1/n)` is hidden. Pieces that are scattered arrive
    /// side by side, and a kernel adds them up (PyTorch's `_fused_matmul_reduce_scatter`, the ring
    /// exchange of Transformer Engine).
    fn move_in_pieces(&self, template: &Template, costs: &mut [InstrCost]) {
        let Some(software) = &self.cluster.software else {
            return;
        };
        if software.piecewise_axes.is_empty() || template.kind.pass().is_none() {
            return;
        }
        let mut reads: HashMap<BufferId, f64> = HashMap::new();
        let mut writes: HashMap<BufferId, f64> = HashMap::new();
        for (instruction, cost) in template.instructions.iter().zip(costs.iter()) {
            // Attention on a part of the keys hides it as a matmul does (Liu et al. 2023).
            let InstrKind::Compute {
                kind:
                    OpKind::DotGeneral { .. } | OpKind::Attention { .. } | OpKind::AttentionGrad { .. },
                ..
            } = &instruction.kind
            else {
                continue;
            };
            for (buffers, of) in [
                (instruction.reads(), &mut reads),
                (instruction.writes(), &mut writes),
            ] {
                for b in buffers {
                    *of.entry(b).or_default() += cost.seconds;
                }
            }
        }
        for (instruction, cost) in template.instructions.iter().zip(costs.iter_mut()) {
            let InstrKind::Collective { kind, axes, items } = &instruction.kind else {
                continue;
            };
            let is_piecewise = |axis: &AxisId| {
                let name = self.role.mesh.name(*axis);
                software.piecewise_axes.iter().any(|a| a == name)
            };
            let matmuls: f64 = match kind {
                _ if !axes.iter().all(is_piecewise) => continue,
                CollectiveKind::AllGather => {
                    items.iter().filter_map(|i| reads.get(&i.output)).sum()
                }
                CollectiveKind::ReduceScatter(_) => {
                    items.iter().filter_map(|i| writes.get(&i.input)).sum()
                }
                _ => continue,
            };
            let n: u64 = axes.iter().map(|a| self.role.mesh.size(*a)).product();
            let hidden = cost.seconds.min(matmuls) * (1.0 - 1.0 / n.max(1) as f64);
            cost.seconds -= hidden;
            if matches!(kind, CollectiveKind::ReduceScatter(_)) && matmuls > 0.0 {
                let moved = |i: &CollectiveItem| self.bytes(i.input) + self.bytes(i.output);
                let bytes: u64 = items.iter().map(moved).sum();
                // A copy moves its bytes twice.
                cost.seconds += compute::copy_time(self.cluster, bytes / 2).0;
            }
        }
    }

    /// The part of each instruction of a template that another one's kernel does.
    fn fused(&self, template: &Template) -> Vec<Fused> {
        let elements = |b: BufferId| {
            let lens = &self.shapes[b.index()].1;
            lens.iter().fold(1u64, |a, &n| a.saturating_mul(n))
        };
        let bytes = |b: BufferId| elements(b).saturating_mul(self.shapes[b.index()].0.bytes());
        let software = self.software();
        let mut fused = match software.is_some_and(|s| s.fused_elementwise) {
            true => fused::fused(template, bytes),
            false => vec![Fused::default(); template.instructions.len()],
        };
        if let Some(s) = software.filter(|s| s.fused_gradient_sums) {
            let sum_bytes = |b: BufferId| match s.sum_dtype {
                Some(dtype) => elements(b).saturating_mul(dtype.bytes()),
                None => bytes(b),
            };
            accumulated::into_matmuls(template, &mut fused, bytes, sum_bytes);
        }
        if software.is_some_and(|s| s.fused_experts) {
            experts::fuse(template, &mut fused);
        }
        fused
    }

    /// Seconds in which the host issues each instruction of a template; a collective is one
    /// kernel.
    fn host(&self, template: &Template) -> Vec<f64> {
        let software = self.cluster.software.as_ref();
        let one = software.map_or(0.0, |s| s.host_s_per_kernel);
        let of = |(instruction, fused): (&Instruction, Fused)| match &instruction.kind {
            InstrKind::Compute { .. } if fused.into_next || fused.into_previous => 0.0,
            InstrKind::Compute { kind, .. } => compute::host_time(self.cluster, kind).0,
            InstrKind::Collective { .. } => one,
            _ => 0.0,
        };
        let fused = self.fused(template);
        template.instructions.iter().zip(fused).map(of).collect()
    }

    fn check(
        &self,
        kind: TemplateKind,
        index: usize,
        instruction: &Instruction,
    ) -> Result<(), String> {
        let exists = |b: &BufferId| b.index() < self.role.buffers.len();
        if let Some(b) = instruction
            .reads()
            .iter()
            .chain(&instruction.writes())
            .find(|b| !exists(b))
        {
            return Err(format!("{b} does not exist"));
        }
        if let Some(d) = instruction.deps.iter().find(|d| d.index() >= index) {
            return Err(format!("waits for {d}, which does not come before it"));
        }
        let n_streams = self.role.streams.len();
        if n_streams > MAX_STREAMS || instruction.stream.index() >= n_streams {
            return Err(format!(
                "stands on {} of {n_streams} streams, of which there may be {MAX_STREAMS}",
                instruction.stream
            ));
        }
        for event in &instruction.events {
            let exists = match event {
                Event::Drained(stream) => stream.index() < n_streams,
                Event::Done {
                    template,
                    instruction,
                    ..
                } => (self.role.templates.get(template.index()))
                    .is_some_and(|t| instruction.index() < t.instructions.len()),
            };
            if !exists {
                return Err(format!("waits for {event:?}, which does not exist"));
            }
        }
        if matches!(instruction.kind, InstrKind::Exchange { .. })
            != (kind == TemplateKind::Exchange)
        {
            return Err("exchanges stand alone in exchange templates".into());
        }
        match &instruction.kind {
            InstrKind::Exchange { sends, recvs } => {
                let missing = sends
                    .iter()
                    .chain(recvs)
                    .find(|s| s.0.index() >= self.wires.len());
                missing.map_or(Ok(()), |s| Err(format!("transfer {} does not exist", s.0)))
            }
            InstrKind::Collective { axes, .. } => {
                let missing = axes.iter().find(|a| a.index() >= self.role.mesh.axes.len());
                missing.map_or(Ok(()), |a| Err(format!("{a} does not exist")))
            }
            _ => Ok(()),
        }
    }

    fn software(&self) -> Option<&Software> {
        self.cluster.software.as_ref()
    }

    /// `cast` are the buffers that the instruction casts where the software keeps such copies.
    fn cost(
        &mut self,
        template: &Template,
        instruction: &Instruction,
        fused: Fused,
        cast: &[BufferId],
    ) -> InstrCost {
        let (seconds, class) = match &instruction.kind {
            InstrKind::Compute {
                kind,
                inputs,
                outputs,
                ..
            } => (
                self.op(kind, inputs, outputs, fused, cast),
                CostClass::Compute,
            ),
            InstrKind::Slice { output, .. } | InstrKind::Copy { output, .. } => (
                compute::copy_time(self.cluster, self.bytes(*output)).0,
                CostClass::Compute,
            ),
            InstrKind::Load { output, .. } | InstrKind::Fill { output, .. } => (
                compute::write_time(self.cluster, self.bytes(*output)).0,
                CostClass::Compute,
            ),
            InstrKind::Collective { kind, axes, items } => {
                let seconds = self.collective(template.kind, *kind, axes, items);
                (seconds, CostClass::Collective)
            }
            InstrKind::WorldSum { output, .. } => {
                let kind = CollectiveKind::AllReduce(ReduceKind::Sum);
                let seconds = collective_time(
                    self.cluster,
                    self.world,
                    &[AxisId(0)],
                    kind,
                    self.bytes(*output),
                )
                .0;
                (seconds, CostClass::Collective)
            }
            InstrKind::Exchange { sends, recvs } => {
                let out = together(self.wires, sends.iter().map(|s| s.0));
                let into = together(self.wires, recvs.iter().map(|s| s.0));
                (out.max(into), CostClass::Transfer)
            }
        };
        let ahead = self.is_prefetched(template, instruction);
        InstrCost {
            seconds,
            class,
            queue: if ahead {
                PREFETCHES
            } else {
                self.queue(instruction)
            },
            unheeded: match ahead {
                true => u64::MAX,
                false => self.for_memory(template, instruction),
            },
        }
    }

    /// The waits of a collective for others whose results it does not read, where the software
    /// places values as it runs.
    fn for_memory(&self, template: &Template, instruction: &Instruction) -> u64 {
        let collective = |i: &Instruction| matches!(i.kind, InstrKind::Collective { .. });
        if self.cluster.software.is_none() || !collective(instruction) {
            return 0;
        }
        let reads = instruction.reads();
        let apart = |d: &InstrId| {
            let other = &template.instructions[d.index()];
            collective(other) && !other.writes().iter().any(|b| reads.contains(b))
        };
        let deps = instruction.deps.iter().take(64).enumerate();
        deps.fold(0, |all, (at, d)| all | u64::from(apart(d)) << at)
    }

    /// Whether an instruction gathers a parameter that nothing in its template makes.
    fn is_prefetched(&self, template: &Template, instruction: &Instruction) -> bool {
        let InstrKind::Collective {
            kind: CollectiveKind::AllGather,
            axes,
            items,
        } = &instruction.kind
        else {
            return false;
        };
        let software = self.cluster.software.as_ref();
        let lasts = |i: &CollectiveItem| {
            let class = self.role.buffer(i.input).class;
            matches!(class, BufferClass::Persistent | BufferClass::Step)
        };
        let every_microbatch = template.kind.pass().is_some();
        let made = || {
            let reads = instruction.reads();
            let before = instruction.deps.iter();
            before
                .flat_map(|d| template.instructions[d.index()].writes())
                .any(|b| reads.contains(&b))
        };
        every_microbatch
            && software.is_some_and(|s| s.prefetched_parameters)
            && !axes.iter().any(|a| self.blocks(*a))
            && items.iter().all(lasts)
            && !made()
    }

    /// Whether kernels wait for collectives over an axis.
    fn blocks(&self, axis: AxisId) -> bool {
        let name = self.role.mesh.name(axis);
        let software = self.cluster.software.as_ref();
        software.is_some_and(|s| s.blocking_axes.iter().any(|b| b == name))
    }

    /// The queue of an instruction: its stream's, unless the software says otherwise. Collectives
    /// that kernels wait for stand in the kernels' queue, gradients of a backward among them
    /// where they are not reduced beside it; frameworks have a communicator and a queue for
    /// every axis.
    fn queue(&self, instruction: &Instruction) -> usize {
        let Some(software) = &self.cluster.software else {
            return instruction.stream.index();
        };
        let (kind, axes) = match &instruction.kind {
            InstrKind::Collective { kind, axes, .. } => (kind, axes),
            InstrKind::WorldSum { .. } => return REDUCTIONS,
            InstrKind::Exchange { .. } => return TRANSFERS,
            _ => return KERNELS,
        };
        let reduces = !matches!(kind, CollectiveKind::AllGather | CollectiveKind::AllToAll);
        let waited_for = reduces && instruction.pass == Pass::BW && !software.overlapped_gradients;
        if waited_for || axes.iter().any(|a| self.blocks(*a)) {
            KERNELS
        } else if axes.first().is_some_and(|a| a.index() > 0) {
            OTHER_AXES
        } else {
            REDUCTIONS
        }
    }

    /// Bytes of a collective's item; sums in f32 travel in the software's type for gradients,
    /// operands of matmuls perhaps in the matmuls' type.
    fn wire_bytes(&self, kind: CollectiveKind, item: &CollectiveItem) -> u64 {
        let bytes = self.bytes(item.input).max(self.bytes(item.output));
        let reduces = matches!(
            kind,
            CollectiveKind::AllReduce(_) | CollectiveKind::ReduceScatter(_)
        );
        let software = self.cluster.software.as_ref();
        let dtype = self.role.buffer(item.input).dtype;
        let narrow = software
            .filter(|s| s.narrow_gathers)
            .and_then(|s| s.matmul_dtype);
        if let Some(narrow) = narrow
            && kind == CollectiveKind::AllGather
            && matches!(dtype, DType::Bf16 | DType::F16)
        {
            return bytes / dtype.bytes() * narrow.bits() / 8;
        }
        match software.and_then(|s| s.gradient_dtype) {
            Some(dtype) if reduces && self.role.buffer(item.input).dtype == DType::F32 => {
                bytes / DType::F32.bytes() * dtype.bytes()
            }
            _ => bytes,
        }
    }

    fn bytes(&self, buffer: BufferId) -> u64 {
        self.role.buffer(buffer).bytes
    }

    fn op(
        &self,
        kind: &OpKind,
        inputs: &[BufferId],
        outputs: &[BufferId],
        fused: Fused,
        cast: &[BufferId],
    ) -> f64 {
        if fused.into_previous {
            return 0.0;
        }
        let local = |ids: &[BufferId]| -> Vec<Local> {
            ids.iter().map(|b| self.shapes[b.index()].clone()).collect()
        };
        let (operands, results) = (local(inputs), local(outputs));
        let cast = local(cast);
        let around = compute::Around {
            unmoved_bytes: fused.unmoved_bytes,
            more_bytes: fused.more_bytes,
            casts: match self.software() {
                Some(s) if s.kept_casts => compute::Casts::Kept(&cast),
                _ => compute::Casts::EveryOperand,
            },
        };
        let seconds = compute::device_time(self.cluster, kind, &operands, &results, around).0;
        match fused.into_next {
            true => (seconds - self.cluster.device.launch_s).max(0.0),
            false => seconds,
        }
    }

    /// `bytes` as `ir::collective` defines them; those of coalesced buffers add up.
    fn collective(
        &mut self,
        template: TemplateKind,
        kind: CollectiveKind,
        axes: &[AxisId],
        items: &[CollectiveItem],
    ) -> f64 {
        let copied = self.copied(kind, axes, items);
        let broadcasts = self.broadcasts(template, kind);
        let bytes = items
            .iter()
            .map(|i| self.wire_bytes(kind, i))
            .fold(0u64, u64::saturating_add);
        let (cluster, mesh, role) = (self.cluster, &self.role.mesh, self.role);
        let once = self.software().is_some_and(|s| s.dispatch_once_per_host);
        let once_per_host = self.copies.filter(|_| once);
        let rank = self.rank;
        let groups = self.groups.entry(axes.to_vec()).or_insert_with(|| {
            let kinds = match rank {
                Some(rank) => vec![rank],
                None => kinds_of_group(cluster, mesh, axes),
            };
            let of_rank = |rank: &Rank| Group::of_rank(cluster, mesh, axes, *rank);
            kinds.iter().map(of_rank).collect()
        });
        let seconds = |group: &Group<'_>| {
            let converted: f64 = items
                .iter()
                .map(|i| {
                    let (input, output) = (role.buffer(i.input), role.buffer(i.output));
                    let larger = input.bytes.max(output.bytes);
                    group.conversions(cluster, kind, input.dtype, larger).0
                })
                .sum();
            let moved = match once_per_host {
                _ if broadcasts => {
                    let n = group.n_members();
                    n as f64 * group.broadcast_time(bytes / n.max(1)).0
                }
                Some(copies) if kind == CollectiveKind::AllToAll => {
                    group.dispatch_time(bytes, copies).0
                }
                _ => group.time(kind, bytes).0,
            };
            moved + converted + copied
        };
        groups.iter().map(seconds).fold(0.0, f64::max)
    }

    /// Whether a collective is done as a broadcast from each member: where updated parameters
    /// are gathered at an end of the step.
    fn broadcasts(&self, template: TemplateKind, kind: CollectiveKind) -> bool {
        let software = self.cluster.software.as_ref();
        let once = matches!(template, TemplateKind::StepBegin | TemplateKind::StepEnd);
        once && kind == CollectiveKind::AllGather && software.is_some_and(|s| s.broadcast_updates)
    }

    /// Seconds of copying what is gathered or scattered into its place, by the device and, where
    /// the host does so rank by rank, by the host before it.
    fn copied(&self, kind: CollectiveKind, axes: &[AxisId], items: &[CollectiveItem]) -> f64 {
        let Some(software) = &self.cluster.software else {
            return 0.0;
        };
        let is_copied = |axis: &AxisId| {
            let name = self.role.mesh.name(*axis);
            software.copied_axes.iter().any(|a| a == name)
        };
        if matches!(kind, CollectiveKind::AllReduce(_)) || !axes.iter().any(is_copied) {
            return 0.0;
        }
        let whole = |i: &CollectiveItem| self.bytes(i.input).max(self.bytes(i.output));
        let is_listed = matches!(
            kind,
            CollectiveKind::AllGather | CollectiveKind::ReduceScatter(_)
        );
        let ranks: u64 = match is_listed {
            true => axes.iter().map(|a| self.role.mesh.size(*a)).product(),
            false => 0,
        };
        let copies = items
            .iter()
            .map(|i| compute::copy_time(self.cluster, whole(i)).0);
        copies.sum::<f64>() + ranks as f64 * software.host_s_per_part
    }
}

fn malformed(role: &RoleProgram, template: usize, instruction: usize, problem: &str) -> SimError {
    SimError::Malformed {
        stage: role.stage,
        template,
        instruction,
        problem: problem.to_string(),
    }
}
