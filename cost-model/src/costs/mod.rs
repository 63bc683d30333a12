//! Duration of every instruction of a program on a cluster, once per template.
//!
//! Instructions that are one call ([`Call`]) are priced as such on devices that make one of them
//! ([`compute::makes_calls`]): the first has the launch, and a later one of a chain takes what it adds.
//!
//! The same layer recurs many times in a template and the same template in many roles, so
//! collectives and transfers are remembered by what they depend on. A role's ranks share its
//! durations; where their groups differ, the slowest count ([`crate::classes`]). Durations are
//! those of an undisturbed rank; sharing of processors is the simulator's business.

mod wire;

pub use wire::{Wire, wires};

use crate::classes::kinds_of_group;
use crate::collectives::{Group, collective_time};
use crate::{SimError, compute};
use ir::Reduction;
use ir::cluster::Cluster;
use ir::collective::CollectiveKind;
use ir::mesh::{Axis, DeviceMesh};
use ir::op::OpKind;
use ir::program::{
    Call, CollectiveItem, Event, InstrKind, Instruction, MAX_STREAMS, Program, RoleProgram, Space,
    TemplateKind,
};
use ir::{AxisId, BufferId, DType, LogicalMesh, Rank, TransferId};
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
}

/// Costs of a whole program.
#[derive(Clone, Debug)]
pub struct Costs {
    /// By role, template, instruction.
    pub instructions: Vec<Vec<Vec<InstrCost>>>,
    /// By transfer.
    pub wires: Vec<Wire>,
}

/// Durations of all instructions of `program`.
///
/// Fails when the cluster has problems or too few devices, or the program names what does not
/// exist.
pub fn costs(program: &Program, cluster: &Cluster) -> Result<Costs, SimError> {
    costs_in(program, cluster, compute::makes_calls(cluster))
}

/// Durations of all instructions of `program`, each played by itself, as where a step is profiled.
///
/// Fails as [`costs`] does.
pub fn costs_one_by_one(program: &Program, cluster: &Cluster) -> Result<Costs, SimError> {
    costs_in(program, cluster, false)
}

fn costs_in(program: &Program, cluster: &Cluster, has_calls: bool) -> Result<Costs, SimError> {
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
                cluster: &cluster.seen_by(role.mesh.devices),
                whole: cluster,
                role,
                world: &world,
                wires: &wires,
                shapes: shapes(role),
                rank: None,
                has_calls,
                groups: HashMap::new(),
            }
            .templates()
        })
        .collect::<Result<_, _>>()?;
    Ok(Costs {
        instructions,
        wires,
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
        cluster: &cluster.seen_by(role.mesh.devices),
        whole: cluster,
        role,
        world: &world_mesh(program),
        wires: &wires(program, cluster)?,
        shapes: shapes(role),
        rank: Some(rank),
        has_calls: compute::makes_calls(cluster),
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
    /// As the role's ranks see it.
    cluster: &'a Cluster,
    /// All of it.
    whole: &'a Cluster,
    role: &'a RoleProgram,
    world: &'a LogicalMesh,
    wires: &'a [Wire],
    shapes: Vec<Local>,
    /// The rank to price; the slowest one of every collective if it is not said.
    rank: Option<Rank>,
    /// Whether instructions that are one call are priced so.
    has_calls: bool,
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
            for (i, instruction) in template.instructions.iter().enumerate() {
                self.check(template.kind, i, instruction)
                    .map_err(|problem| malformed(role, t, i, &problem))?;
                let cost = self.cost(instruction);
                costs.push(match self.has_calls {
                    true => self.in_call(&template.instructions[..=i], cost),
                    false => cost,
                });
            }
            all.push(costs);
        }
        Ok(all)
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
            InstrKind::Copy { .. } => match self.role.crossing(&instruction.kind) {
                Some([a, b]) if self.copy_bytes_per_s(a, b).is_none() => Err(format!(
                    "copies {} to {}, and the cluster's `storage` says nothing of the way",
                    a.name(),
                    b.name()
                )),
                _ => Ok(()),
            },
            InstrKind::Collective { axes, .. } => {
                let missing = axes.iter().find(|a| a.index() >= self.role.mesh.axes.len());
                missing.map_or(Ok(()), |a| Err(format!("{a} does not exist")))
            }
            _ => Ok(()),
        }
    }

    fn cost(&mut self, instruction: &Instruction) -> InstrCost {
        let (seconds, class) = match &instruction.kind {
            InstrKind::Compute {
                kind,
                inputs,
                outputs,
                ..
            } => (self.op(kind, inputs, outputs), CostClass::Compute),
            InstrKind::Slice { output, .. } | InstrKind::Copy { output, .. } => {
                let bytes = self.bytes(*output);
                match self.role.crossing(&instruction.kind) {
                    None => (
                        compute::copy_time(self.cluster, bytes).0,
                        CostClass::Compute,
                    ),
                    Some([from, to]) => {
                        let rate = self.copy_bytes_per_s(from, to);
                        let moving_s = bytes as f64 / rate.unwrap_or(f64::INFINITY);
                        let class = CostClass::Transfer;
                        (self.cluster.device.launch_s + moving_s, class)
                    }
                }
            }
            InstrKind::Load { output, .. } | InstrKind::Fill { output, .. } => (
                compute::write_time(self.cluster, self.bytes(*output)).0,
                CostClass::Compute,
            ),
            InstrKind::Collective {
                kind, axes, items, ..
            } => {
                let seconds = self.collective(*kind, axes, items);
                (seconds, CostClass::Collective)
            }
            InstrKind::WorldSum { output, .. } => {
                let kind = CollectiveKind::AllReduce(Reduction::Sum);
                let seconds = collective_time(
                    &self.whole.seen_by(self.world.devices),
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
        InstrCost { seconds, class }
    }

    /// The cost of the last of some instructions in its call, of which `alone` is that by itself.
    fn in_call(&self, all: &[Instruction], alone: InstrCost) -> InstrCost {
        let Some((of, before)) = all.split_last() else {
            return alone;
        };
        let seconds = match (of.call, &of.kind) {
            (Call::Own, _) => alone.seconds,
            (
                Call::Chained { .. },
                InstrKind::Compute {
                    kind,
                    inputs,
                    outputs,
                    ..
                },
            ) => {
                let first = before.iter().rposition(|i| i.call == Call::Own);
                let spared = ir::chain::spared(&all[first.unwrap_or(0)..]);
                let (x, y) = (self.local(inputs), self.local(outputs));
                let within = compute::chained_time(self.cluster, kind, &x, &y, spared).0;
                within.min(alone.seconds)
            }
            (Call::Chained { .. } | Call::Joined, _) => {
                (alone.seconds - self.cluster.device.launch_s).max(0.0)
            }
        };
        InstrCost { seconds, ..alone }
    }

    fn copy_bytes_per_s(&self, from: Space, to: Space) -> Option<f64> {
        let mesh = self.role.mesh.devices;
        self.whole.copy_bytes_per_s(mesh, from, to)
    }

    fn bytes(&self, buffer: BufferId) -> u64 {
        self.role.buffer(buffer).bytes
    }

    fn op(&self, kind: &OpKind, inputs: &[BufferId], outputs: &[BufferId]) -> f64 {
        let (x, y) = (self.local(inputs), self.local(outputs));
        compute::op_time(self.cluster, kind, &x, &y).0
    }

    fn local(&self, ids: &[BufferId]) -> Vec<Local> {
        ids.iter().map(|b| self.shapes[b.index()].clone()).collect()
    }

    /// `bytes` as `ir::collective` defines them; those of coalesced buffers add up.
    fn collective(
        &mut self,
        kind: CollectiveKind,
        axes: &[AxisId],
        items: &[CollectiveItem],
    ) -> f64 {
        let (cluster, mesh, role) = (self.cluster, &self.role.mesh, self.role);
        let moved = |i: &CollectiveItem| self.bytes(i.input).max(self.bytes(i.output));
        let bytes = items.iter().map(moved).fold(0u64, u64::saturating_add);
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
            group.time(kind, bytes).0 + converted
        };
        groups.iter().map(seconds).fold(0.0, f64::max)
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
