//! Where the time of a simulated step goes: an account for the ranks of each mesh, whose lines add
//! up to the step.
//!
//! At every moment a rank is said to do one thing. A running kernel counts; while none runs, the
//! collective that runs and has run longest; else the transfer; else the rank waits, for other
//! meshes or in the bubble of the pipeline. So the seconds of communication fall apart into those
//! that are *exposed*, in which the step makes no other progress, and those *hidden* behind
//! kernels. Exposed seconds and waiting are the account; hidden seconds stand beside it.
//!
//! A kernel is bound by arithmetic, by the memory's bandwidth or by its launch, whichever takes
//! longest. That is found by asking what it would take on a device whose memory, or whose
//! arithmetic, is faster than any.
//!
//! On ranks that share processors a kernel's seconds are those of the clock, not of a processor.

use crate::classes::kinds_of_group;
use crate::collectives::{ascending_group, crossings};
use crate::costs::{Costs, costs};
use crate::simulate::{SimulateOptions, Span, TimelineDetail, play};
use crate::{SimError, StepWork};
use ir::cluster::{Cluster, Device, MAX_FIGURE};
use ir::program::{InstrKind, Instruction, Program, RoleProgram, TemplateKind};
use ir::{AxisId, Pass};
use serde::Serialize;
use std::collections::BTreeMap;

/// Where a step's time goes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Account {
    /// Seconds of the step.
    pub step_s: f64,
    /// By mesh, in the order of their first stages.
    pub meshes: Vec<MeshAccount>,
}

/// The account of the ranks of one mesh.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MeshAccount {
    /// Ranks of the mesh.
    pub n_ranks: u32,
    /// The parts that take time; exposed seconds add up to the step.
    pub lines: Vec<Line>,
}

/// The seconds of a step that go into one thing.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Line {
    /// Kind of the layers that it is done for; none for waiting and what serves no layer.
    pub kind: Option<usize>,
    /// The work that is done.
    #[serde(flatten)]
    pub term: Term,
    /// Seconds in which this holds up the step.
    pub exposed_s: f64,
    /// Seconds behind kernels, or behind other communication.
    pub hidden_s: f64,
    /// Times that it is done in a step, by each rank.
    pub count: u64,
    /// Bytes of a rank's collectives and transfers in a step, as `ir::collective` counts them.
    pub bytes: u64,
}

/// Something that takes time.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(tag = "term", rename_all = "snake_case")]
pub enum Term {
    /// Kernels and copies inside the device.
    Kernels {
        /// The limit of their speed.
        bound: Bound,
        /// Whether they make again what was not kept.
        recomputed: bool,
    },
    /// Collectives.
    Collective {
        /// `all_reduce`, ..., or `world_sum`.
        what: &'static str,
        /// Name of the slowest level of links that they cross.
        link: String,
        /// The part of the step that they are in.
        part: Part,
    },
    /// Messages between meshes, and copies between memories.
    Transfer {
        /// Name of the level of links.
        link: String,
    },
    /// Waiting for other meshes, or in the bubble of the pipeline.
    Waiting,
}

/// The limit of a kernel's speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// FLOP/s.
    Arithmetic,
    /// Bytes per second of the device's memory.
    Memory,
    /// The fixed time of a kernel.
    Launch,
}

/// A part of the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// In the forward pass of microbatches.
    Forward,
    /// In their backward pass.
    Backward,
    /// Once, before the first microbatch: parameters.
    Begin,
    /// Once, behind the last microbatch: gradients, clipping, the update.
    End,
}

impl Account {
    /// The average rank's lines: their exposed seconds add up to the step too.
    pub fn average(&self) -> Vec<Line> {
        let all: f64 = self.meshes.iter().map(|m| f64::from(m.n_ranks)).sum();
        let mut sums: BTreeMap<(Option<usize>, Term), Line> = BTreeMap::new();
        for mesh in &self.meshes {
            let share = f64::from(mesh.n_ranks) / all.max(1.0);
            for line in &mesh.lines {
                let sum = sums.entry((line.kind, line.term.clone()));
                let sum = sum.or_insert_with(|| line.scaled(0.0));
                let part = line.scaled(share);
                sum.exposed_s += part.exposed_s;
                sum.hidden_s += part.hidden_s;
                sum.count += part.count;
                sum.bytes += part.bytes;
            }
        }
        sums.into_values().collect()
    }

    /// The mesh that waits least, the first of equals: all others wait for it.
    pub fn pace(&self) -> Option<usize> {
        let waits = |m: &MeshAccount| {
            let waiting = m.lines.iter().filter(|l| l.term == Term::Waiting);
            waiting.map(|l| l.exposed_s).sum::<f64>()
        };
        let meshes = self.meshes.iter().enumerate();
        let least = meshes.min_by(|(_, a), (_, b)| waits(a).total_cmp(&waits(b)));
        least.map(|(i, _)| i)
    }
}

impl Line {
    fn scaled(&self, by: f64) -> Line {
        Line {
            exposed_s: self.exposed_s * by,
            hidden_s: self.hidden_s * by,
            count: (self.count as f64 * by).round() as u64,
            bytes: (self.bytes as f64 * by).round() as u64,
            ..self.clone()
        }
    }
}

/// Plays a step of `program` and accounts for its time. `kinds` has for each layer of the model
/// its kind, by which lines are kept apart.
///
/// Fails as [`simulate`] does.
pub fn account(
    program: &Program,
    cluster: &Cluster,
    work: StepWork,
    kinds: &[usize],
) -> Result<Account, SimError> {
    account_priced(program, cluster, work, kinds, &|cluster| {
        costs(program, cluster)
    })
}

/// The same where `price` says what the program's instructions cost on a cluster: its own, and such
/// with faster devices.
pub fn account_priced(
    program: &Program,
    cluster: &Cluster,
    work: StepWork,
    kinds: &[usize],
    price: &dyn Fn(&Cluster) -> Result<Costs, SimError>,
) -> Result<Account, SimError> {
    let options = SimulateOptions {
        timeline: TimelineDetail::Spans,
        ..SimulateOptions::new(work)
    };
    let played = play(program, cluster, price(cluster)?, &options)?;
    let fast_memory = price(&with_devices(cluster, fast_memory))?;
    let fast_arithmetic = price(&with_devices(cluster, fast_arithmetic))?;
    let cx = Cx {
        program,
        cluster,
        kinds,
        costs: &played.costs,
        fast_memory: &fast_memory,
        fast_arithmetic: &fast_arithmetic,
        step_s: played.step_time.0,
    };
    let mut of_roles: Vec<Vec<Span>> = vec![Vec::new(); program.roles.len()];
    for span in played.spans {
        of_roles[span.role as usize].push(span);
    }
    let meshes = of_roles.into_iter().enumerate();
    Ok(Account {
        step_s: cx.step_s,
        meshes: meshes.map(|(r, spans)| cx.mesh(r, spans)).collect(),
    })
}

fn with_devices(cluster: &Cluster, change: fn(&mut Device)) -> Cluster {
    let mut changed = cluster.clone();
    change(&mut changed.device);
    changed
        .groups
        .iter_mut()
        .for_each(|g| change(&mut g.device));
    changed
}

fn fast_memory(device: &mut Device) {
    device.memory_bandwidth_bytes_per_s = MAX_FIGURE;
}

fn fast_arithmetic(device: &mut Device) {
    device.vector_flops_per_s = MAX_FIGURE;
    device
        .peak_flops_per_s
        .values_mut()
        .for_each(|x| *x = MAX_FIGURE);
}

struct Cx<'a> {
    program: &'a Program,
    cluster: &'a Cluster,
    kinds: &'a [usize],
    costs: &'a Costs,
    fast_memory: &'a Costs,
    fast_arithmetic: &'a Costs,
    step_s: f64,
}

/// The activity that counts while several run: the first of these.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Precedence {
    Kernel,
    Collective,
    Transfer,
}

impl Cx<'_> {
    fn mesh(&self, r: usize, spans: Vec<Span>) -> MeshAccount {
        let role = &self.program.roles[r];
        let mut lines: BTreeMap<(Option<usize>, Term), Line> = BTreeMap::new();
        let mut keys: BTreeMap<(u32, u32), (Option<usize>, Term)> = BTreeMap::new();
        let mut busy: Vec<(Span, Precedence)> = Vec::with_capacity(spans.len());
        for mut span in spans {
            let (t, i) = (span.template as usize, span.instruction as usize);
            let instruction = &role.templates[t].instructions[i];
            let rank = match &instruction.kind {
                InstrKind::Exchange { .. } => Precedence::Transfer,
                InstrKind::Collective { .. } | InstrKind::WorldSum { .. } => Precedence::Collective,
                kind if role.crossing(kind).is_some() => Precedence::Transfer,
                _ => Precedence::Kernel,
            };
            // An exchange that has started waits for its partner before bytes move.
            if rank == Precedence::Transfer && self.cluster.pool.is_none() {
                let moving = self.costs.instructions[r][t][i].seconds;
                span.start_s = span.start_s.max(span.end_s - moving);
            }
            let key = keys.entry((span.template, span.instruction));
            let key = key.or_insert_with(|| {
                let layer = instruction.layer.and_then(|l| self.kinds.get(l.index()));
                (layer.copied(), self.term(r, t, i))
            });
            let line = line_of(&mut lines, key.clone());
            line.count += 1;
            line.bytes = line.bytes.saturating_add(bytes(role, &instruction.kind));
            line.hidden_s += span.end_s - span.start_s;
            if span.end_s > span.start_s {
                busy.push((span, rank));
            }
        }
        let waiting_s = self.step_s
            - exposed(&busy, |span, seconds| {
                let line = line_of(&mut lines, keys[&(span.template, span.instruction)].clone());
                line.exposed_s += seconds;
                line.hidden_s -= seconds;
            });
        line_of(&mut lines, (None, Term::Waiting)).exposed_s = waiting_s.max(0.0);
        // What is hidden is a difference of sums.
        let rounding = 1e-9 * self.step_s;
        for line in lines.values_mut().filter(|l| l.hidden_s < rounding) {
            line.hidden_s = 0.0;
        }
        MeshAccount {
            n_ranks: role.mesh.n_devices(),
            lines: lines.into_values().collect(),
        }
    }

    fn term(&self, r: usize, t: usize, i: usize) -> Term {
        let role = &self.program.roles[r];
        let template = &role.templates[t];
        let instruction = &template.instructions[i];
        match &instruction.kind {
            InstrKind::Collective { kind, axes, .. } => Term::Collective {
                what: kind.name(),
                link: self.link(role, axes),
                part: part(template.kind, instruction),
            },
            InstrKind::WorldSum { .. } => Term::Collective {
                what: "world_sum",
                link: self
                    .cluster
                    .levels
                    .last()
                    .map_or("none", |l| &l.name)
                    .into(),
                part: part(template.kind, instruction),
            },
            InstrKind::Exchange { sends, recvs } => Term::Transfer {
                link: self.link_of_transfers(sends.iter().chain(recvs).map(|x| x.0)),
            },
            kind if role.crossing(kind).is_some() => Term::Transfer {
                link: "host memory".into(),
            },
            _ => Term::Kernels {
                bound: self.bound(r, t, i),
                recomputed: instruction.pass == Pass::Recompute,
            },
        }
    }

    fn bound(&self, r: usize, t: usize, i: usize) -> Bound {
        let of = |costs: &Costs| costs.instructions[r][t][i].seconds;
        let first = self.program.roles[r].mesh.devices.first_rank;
        let launch_s = self.cluster.device_of(first).launch_s;
        let (arithmetic, memory) = (of(self.fast_memory), of(self.fast_arithmetic));
        let work = of(self.costs) - launch_s;
        match arithmetic >= memory {
            _ if launch_s > work => Bound::Launch,
            true => Bound::Arithmetic,
            false => Bound::Memory,
        }
    }

    /// The outermost level of links that a group over these axes crosses, for any rank.
    fn link(&self, role: &RoleProgram, axes: &[AxisId]) -> String {
        let seen = self.cluster.seen_by(role.mesh.devices);
        let ranks = kinds_of_group(&seen, &role.mesh, axes);
        let outermost = |rank| {
            let members = crossings(&seen, &ascending_group(&role.mesh, axes, rank));
            let inside = std::iter::once(1).chain(members.iter().copied());
            let grows = inside.zip(&members).enumerate();
            grows
                .filter(|(_, (inside, n))| **n > *inside)
                .map(|(i, _)| i)
                .last()
        };
        let level = ranks.into_iter().filter_map(outermost).max();
        let level = level.and_then(|i| seen.levels.get(i));
        level.map_or("none", |l| l.name.as_str()).to_string()
    }

    fn link_of_transfers(&self, transfers: impl Iterator<Item = ir::TransferId>) -> String {
        let levels = transfers.filter_map(|x| {
            let transfer = &self.program.transfers[x.index()];
            let first = |stage: ir::StageId| {
                let role = self.program.roles.get(stage.index())?;
                Some(role.mesh.devices.first_rank.0)
            };
            let (a, b) = (first(transfer.from)?, first(transfer.to)?);
            (0..self.cluster.levels.len()).find(|&i| self.cluster.joins(i, a, b))
        });
        let level = levels.max().and_then(|i| self.cluster.levels.get(i));
        level.map_or("none", |l| l.name.as_str()).to_string()
    }
}

fn line_of(
    lines: &mut BTreeMap<(Option<usize>, Term), Line>,
    key: (Option<usize>, Term),
) -> &mut Line {
    let empty = Line {
        kind: key.0,
        term: key.1.clone(),
        exposed_s: 0.0,
        hidden_s: 0.0,
        count: 0,
        bytes: 0,
    };
    lines.entry(key).or_insert(empty)
}

fn part(template: TemplateKind, instruction: &Instruction) -> Part {
    match template {
        TemplateKind::StepBegin => Part::Begin,
        TemplateKind::StepEnd => Part::End,
        TemplateKind::Forward => Part::Forward,
        _ if instruction.pass == Pass::F => Part::Forward,
        _ => Part::Backward,
    }
}

/// Bytes that an instruction moves between ranks.
fn bytes(role: &RoleProgram, kind: &InstrKind) -> u64 {
    let of = |b: &ir::BufferId| role.buffer(*b).bytes;
    let sum = |bytes: &mut dyn Iterator<Item = u64>| bytes.fold(0, u64::saturating_add);
    match kind {
        InstrKind::Collective { items, .. } => {
            sum(&mut items.iter().map(|i| of(&i.input).max(of(&i.output))))
        }
        InstrKind::Exchange { sends, recvs } => {
            sum(&mut sends.iter().chain(recvs).map(|(_, b)| of(b)))
        }
        InstrKind::WorldSum { output, .. } => of(output),
        _ => 0,
    }
}

/// Gives each moment in which anything runs to one span, by the order in the header; the sum.
fn exposed(busy: &[(Span, Precedence)], mut give: impl FnMut(&Span, f64)) -> f64 {
    // Ends before starts of the same moment.
    let mut edges: Vec<(f64, bool, usize)> = Vec::with_capacity(2 * busy.len());
    for (k, (span, _)) in busy.iter().enumerate() {
        edges.push((span.start_s, true, k));
        edges.push((span.end_s, false, k));
    }
    edges.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2)));
    let mut running: Vec<usize> = Vec::new();
    let (mut at, mut total) = (0.0, 0.0);
    for (time, starts, k) in edges {
        // The earliest of the first rank: spans join in the order of their starts.
        let counts = running.iter().min_by_key(|&&k| busy[k].1);
        if let Some(&first) = counts.filter(|_| time > at) {
            give(&busy[first].0, time - at);
            total += time - at;
        }
        at = time;
        match starts {
            true => running.push(k),
            false => running.retain(|x| *x != k),
        }
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{cluster, pipeline};
    use ir::{DType, Flops};

    fn work() -> StepWork {
        StepWork {
            model_flops: Flops(0.0),
            hardware_flops: Flops(0.0),
            hardware_attention_flops: Flops(0.0),
            tokens: 0,
            dtype: DType::F32,
        }
    }

    fn of(mesh: &MeshAccount, is: fn(&Term) -> bool) -> f64 {
        let lines = mesh.lines.iter().filter(|l| is(&l.term));
        lines.map(|l| l.exposed_s).sum()
    }

    #[test]
    fn every_mesh_accounts_for_the_whole_step() {
        for n in [1, 2] {
            let program = pipeline(&[3000, 5000], &[6000, 7000], 4, 1000, n);
            let account = account(&program, &cluster(2 * n), work(), &[]).unwrap();
            for mesh in account.meshes.iter() {
                let sum: f64 = mesh.lines.iter().map(|l| l.exposed_s).sum();
                assert!((sum - account.step_s).abs() < 1e-12, "{mesh:?}");
            }
            let average: f64 = account.average().iter().map(|l| l.exposed_s).sum();
            assert!((average - account.step_s).abs() < 1e-12);
            // The second stage has more work, so the first one waits more.
            assert_eq!(account.pace(), Some(1));
            let kernels = |t: &Term| matches!(t, Term::Kernels { .. });
            // Four microbatches of 5 and 7 us at least, all of it arithmetic.
            assert!(of(&account.meshes[1], kernels) >= 48e-6);
            let arithmetic = |t: &Term| {
                matches!(
                    t,
                    Term::Kernels {
                        bound: Bound::Arithmetic,
                        recomputed: false
                    }
                )
            };
            let [a, k] = [arithmetic, kernels].map(|is| of(&account.meshes[1], is));
            assert!((a - k).abs() < 1e-3 * k, "{a} of {k}");
        }
    }

    #[test]
    fn a_moment_belongs_to_one_span() {
        let span = |instruction, start_s, end_s| Span {
            role: 0,
            template: 0,
            instruction,
            start_s,
            end_s,
        };
        // A kernel from 0 to 2, a collective from 1 to 5 and a later one from 3 to 4, a transfer
        // from 4 to 7, a kernel from 6 to 8; nothing from 8 on.
        let busy = [
            (span(0, 0.0, 2.0), Precedence::Kernel),
            (span(1, 1.0, 5.0), Precedence::Collective),
            (span(2, 3.0, 4.0), Precedence::Collective),
            (span(3, 4.0, 7.0), Precedence::Transfer),
            (span(4, 6.0, 8.0), Precedence::Kernel),
        ];
        let mut got = [0.0; 5];
        let total = exposed(&busy, |s, seconds| got[s.instruction as usize] += seconds);
        assert_eq!(got, [2.0, 3.0, 0.0, 1.0, 2.0]);
        assert_eq!(total, 8.0);
    }
}
