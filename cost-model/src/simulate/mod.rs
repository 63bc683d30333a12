//! The simulator: plays role programs under the semantics of `ir::program`.
//!
//! One rank stands for all of its role ([`crate::classes`] says when that is exact). Two ways of
//! executing: [`Execution::Streams`] overlaps the streams of a device (see [`streams`]);
//! [`Execution::Serial`] carries out every instruction in list order on one thread, as CPU ranks
//! do, and lets ranks that share processors slow each other down (see [`serial`]).
//!
//! Both are exact for the durations they are given ([`crate::costs`]): nothing is sampled, and
//! playing whole templates at once gives the result of playing every instruction.

mod fold;
mod serial;
mod streams;

use crate::checkpoint::checkpoint;
use crate::costs::{CostClass, Costs, InstrCost, costs};
use crate::memory::{memory_of, peak_bytes};
use crate::utilisation::peak_flops_per_s;
use crate::{SimError, StepWork};
use ir::cluster::Cluster;
use ir::plan::{Prediction, StagePrediction};
use ir::program::{InstrKind, Program, RoleProgram, Stream, Template, TemplateKind};
use ir::{Seconds, StageId};

/// How ranks carry out instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Execution {
    /// Streams of a device run side by side.
    Streams,
    /// One thread per rank, instructions in list order.
    Serial,
}

/// The content of the timeline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TimelineDetail {
    /// No timeline.
    #[default]
    None,
    /// One event per slot of the trace.
    Templates,
    /// One event per instruction.
    Instructions,
    /// All instructions as [`Span`]s, and no events.
    Spans,
}

impl TimelineDetail {
    /// Whether instructions are told one by one, so that templates cannot be played as one unit.
    fn is_of_instructions(self) -> bool {
        matches!(self, TimelineDetail::Instructions | TimelineDetail::Spans)
    }
}

/// How to simulate.
#[derive(Clone, Debug)]
pub struct SimulateOptions {
    /// The work of the step, for tokens per second, MFU and HFU.
    pub work: StepWork,
    /// How ranks execute; by default `Serial` where devices share processors, else `Streams`.
    pub execution: Option<Execution>,
    /// The content of the timeline.
    pub timeline: TimelineDetail,
    /// Events after which the timeline ends; the simulation goes on.
    pub max_events: usize,
    /// Whether templates are played as one unit where possible. The result is the same without,
    /// only later.
    pub fold: bool,
}

impl SimulateOptions {
    /// No timeline, execution by cluster.
    pub fn new(work: StepWork) -> Self {
        SimulateOptions {
            work,
            execution: None,
            timeline: TimelineDetail::None,
            max_events: 200_000,
            fold: true,
        }
    }
}

/// Something that happened in the simulated step.
#[derive(Clone, Debug, PartialEq)]
pub struct TimelineEvent {
    /// Stage.
    pub stage: StageId,
    /// Name of its stream; templates stand on that of kernels, exchanges on that of transfers.
    pub stream: String,
    /// Template index in the role.
    pub template: u32,
    /// Instruction index; `None` for a whole template.
    pub instruction: Option<u32>,
    /// Microbatch.
    pub microbatch: Option<u32>,
    /// Op path, or what the template is for.
    pub name: String,
    /// Seconds from the start of the step.
    pub start_s: f64,
    /// Seconds.
    pub duration_s: f64,
}

/// When an instruction was played: an event without words, of which there may be millions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// Index of the role.
    pub role: u32,
    /// Template index in the role.
    pub template: u32,
    /// Instruction index in the template.
    pub instruction: u32,
    /// Seconds from the start of the step.
    pub start_s: f64,
    /// The same for its end.
    pub end_s: f64,
}

/// A simulated step.
#[derive(Clone, Debug)]
pub struct Simulation {
    /// From the start of the first role to the end of the last.
    pub step_time: Seconds,
    /// The prediction that plans and reports record.
    pub prediction: Prediction,
    /// By role and template: elapsed time over undisturbed time; above 1 where ranks share
    /// processors.
    pub slowdown: Vec<Vec<f64>>,
    /// Duration of every instruction that was played.
    pub costs: Costs,
    /// Events in order of their start, if asked for.
    pub timeline: Option<Vec<TimelineEvent>>,
    /// All instructions of the step in no order, if asked for.
    pub spans: Vec<Span>,
}

/// The times of one role from an engine.
#[derive(Clone, Debug, Default)]
struct RolePlay {
    /// By template: how often it was played.
    count: Vec<u64>,
    /// By template: seconds it took together, without waiting for others.
    elapsed_s: Vec<f64>,
    /// By template: the same without sharing processors.
    work_s: Vec<f64>,
    /// Seconds in which the role did anything but wait.
    busy_s: f64,
}

struct Played {
    end_s: f64,
    roles: Vec<RolePlay>,
    events: Vec<TimelineEvent>,
    spans: Vec<Span>,
}

/// Plays one training step of `program` on `cluster`.
///
/// Fails when the cluster has problems or too few devices, the program is malformed, or it
/// deadlocks.
pub fn simulate(
    program: &Program,
    cluster: &Cluster,
    options: &SimulateOptions,
) -> Result<Simulation, SimError> {
    play(program, cluster, costs(program, cluster)?, options)
}

/// Plays one training step whose instructions take `costs`, those of [`costs::costs`] or others
/// of the same shape.
///
/// Fails when streams are asked for where devices share processors, or the program deadlocks.
///
/// [`costs::costs`]: crate::costs::costs
pub fn play(
    program: &Program,
    cluster: &Cluster,
    costs: Costs,
    options: &SimulateOptions,
) -> Result<Simulation, SimError> {
    let by_cluster = if cluster.pool.is_some() {
        Execution::Serial
    } else {
        Execution::Streams
    };
    let played = match options.execution.unwrap_or(by_cluster) {
        Execution::Streams if cluster.pool.is_some() => return Err(SimError::StreamsOnPool),
        Execution::Streams => streams::play(program, &costs, options)?,
        Execution::Serial => serial::play(program, &costs, cluster, options)?,
    };
    Ok(assemble(program, cluster, options, costs, played))
}

fn assemble(
    program: &Program,
    cluster: &Cluster,
    options: &SimulateOptions,
    costs: Costs,
    mut played: Played,
) -> Simulation {
    let slowdown: Vec<Vec<f64>> = played
        .roles
        .iter()
        .map(|r| {
            r.elapsed_s
                .iter()
                .zip(&r.work_s)
                .map(|(&e, &w)| if w > 0.0 { e / w } else { 1.0 })
                .collect()
        })
        .collect();
    let stages = (0..program.roles.len())
        .map(|r| {
            stage_prediction(
                program,
                cluster,
                r,
                &costs.instructions[r],
                &played.roles[r],
                &slowdown[r],
            )
        })
        .collect();
    let n_roles = program.roles.len().max(1) as f64;
    let per_step = |x: f64| {
        if played.end_s > 0.0 {
            x / played.end_s
        } else {
            0.0
        }
    };
    let n_ranks = program.roles.iter().map(|r| r.mesh.n_devices()).sum();
    let peak = peak_flops_per_s(cluster, options.work.dtype, n_ranks);
    let prediction = Prediction {
        step_time_s: Seconds(played.end_s),
        tokens_per_s: per_step(options.work.tokens as f64),
        mfu: peak.map_or(0.0, |p| per_step(options.work.model_flops.0) / p),
        hfu: peak.map_or(0.0, |p| per_step(options.work.hardware_flops.0) / p),
        bubble: played
            .roles
            .iter()
            .map(|r| (1.0 - per_step(r.busy_s)).max(0.0))
            .sum::<f64>()
            / n_roles,
        stages,
        checkpoint: is_trained(program).then(|| checkpoint(program, cluster)),
    };
    played
        .events
        .sort_by(|a, b| a.start_s.total_cmp(&b.start_s));
    let has_events = !matches!(
        options.timeline,
        TimelineDetail::None | TimelineDetail::Spans
    );
    let timeline = has_events.then_some(played.events);
    Simulation {
        step_time: Seconds(played.end_s),
        prediction,
        slowdown,
        costs,
        timeline,
        spans: played.spans,
    }
}

/// Whether a program makes gradients: then it has a training state to keep.
fn is_trained(program: &Program) -> bool {
    let mut templates = program.roles.iter().flat_map(|r| &r.templates);
    templates.any(|t| t.kind.is_backward())
}

fn stage_prediction(
    program: &Program,
    cluster: &Cluster,
    role: usize,
    costs: &[Vec<InstrCost>],
    play: &RolePlay,
    slowdown: &[f64],
) -> StagePrediction {
    let this = &program.roles[role];
    let elapsed = |of: fn(TemplateKind) -> bool| -> f64 {
        this.templates
            .iter()
            .zip(&play.elapsed_s)
            .filter(|(t, _)| of(t.kind))
            .map(|(_, e)| e)
            .sum()
    };
    let expected: Vec<Vec<f64>> = costs
        .iter()
        .zip(slowdown)
        .map(|(c, &s)| expected_seconds(c, s))
        .collect();
    let spent = |class: CostClass| -> Seconds {
        let of = |t: usize| {
            costs[t]
                .iter()
                .zip(&expected[t])
                .filter(|(c, _)| c.class == class)
                .map(|(_, s)| s)
                .sum::<f64>()
                * play.count[t] as f64
        };
        Seconds((0..costs.len()).map(of).sum())
    };
    let m = f64::from(program.n_microbatches.max(1));
    let memory = memory_of(this);
    StagePrediction {
        forward_s: Seconds(elapsed(|k| k == TemplateKind::Forward) / m),
        backward_s: Seconds(elapsed(TemplateKind::is_backward) / m),
        step_s: Seconds(elapsed(|k| {
            matches!(k, TemplateKind::StepBegin | TemplateKind::StepEnd)
        })),
        compute_s: spent(CostClass::Compute),
        collective_s: spent(CostClass::Collective),
        transfer_s: spent(CostClass::Transfer),
        persistent_bytes: memory.persistent,
        step_bytes: memory.step,
        activation_bytes: memory.activation,
        transient_bytes: memory.transient,
        peak_bytes: peak_bytes(this, cluster),
    }
}

/// Seconds of every instruction of a template that takes `slowdown` times its undisturbed time.
///
/// Ranks that share processors are stopped where they meet: while some compute, the others
/// wait in a collective. So the lost time is that of the template's collectives, in equal
/// parts; in a template without collectives all instructions take longer.
pub fn expected_seconds(costs: &[InstrCost], slowdown: f64) -> Vec<f64> {
    let n_collectives = costs
        .iter()
        .filter(|c| c.class == CostClass::Collective)
        .count();
    if n_collectives == 0 {
        return costs.iter().map(|c| c.seconds * slowdown).collect();
    }
    let lost =
        (slowdown - 1.0) * costs.iter().map(|c| c.seconds).sum::<f64>() / n_collectives as f64;
    costs
        .iter()
        .map(|c| {
            if c.class == CostClass::Collective {
                c.seconds + lost
            } else {
                c.seconds
            }
        })
        .collect()
}

/// Name of an instruction in timelines and reports: the op's path, or what is done to which
/// buffer.
pub fn instruction_name(role: &RoleProgram, kind: &InstrKind) -> String {
    let name = |b: &ir::BufferId| role.buffers.get(b.index()).map_or("?", |b| b.name.as_str());
    match kind {
        InstrKind::Compute { path, .. } => path.clone(),
        InstrKind::Collective { kind, items, .. } => {
            let first = items.first().map_or("", |i| name(&i.input));
            let more = if items.len() > 1 {
                format!(" and {} more", items.len() - 1)
            } else {
                String::new()
            };
            format!("{} {first}{more}", kind.name())
        }
        InstrKind::Slice { output, .. } => format!("slice {}", name(output)),
        InstrKind::Exchange { sends, recvs } => {
            let list = |what: &str, bs: &[(ir::TransferId, ir::BufferId)]| {
                bs.iter()
                    .map(|b| format!("{what} {}", name(&b.1)))
                    .collect::<Vec<_>>()
            };
            [list("send", sends), list("recv", recvs)]
                .concat()
                .join(", ")
        }
        InstrKind::WorldSum { output, .. } => format!("world_sum {}", name(output)),
        InstrKind::Load { output, .. } => format!("load {}", name(output)),
        InstrKind::Fill { output, .. } => format!("fill {}", name(output)),
        InstrKind::Copy { output, .. } => format!("copy {}", name(output)),
    }
}

/// The kind of an instruction: the op's name, or one word.
pub fn instruction_kind(kind: &InstrKind) -> &'static str {
    match kind {
        InstrKind::Compute { kind, .. } => kind.name(),
        InstrKind::Collective { kind, .. } => kind.name(),
        InstrKind::Slice { .. } => "slice of a shard",
        InstrKind::Exchange { .. } => "exchange",
        InstrKind::WorldSum { .. } => "world_sum",
        InstrKind::Load { .. } => "load",
        InstrKind::Fill { .. } => "fill",
        InstrKind::Copy { .. } => "copy",
    }
}

/// Name of a template that is no exchange; of several stages' passes also which stage's.
fn pass_name(program: &Program, role: &RoleProgram, template: &Template) -> String {
    let name = template.kind.name();
    if template.kind.pass().is_none() || role.n_chunks() == 1 {
        return name.into();
    }
    let stage = program.stage_of(role.stage.index(), template.chunk);
    format!("{name} of stage {}", stage.index())
}

/// Collects events up to a limit.
struct Timeline<'a> {
    program: &'a Program,
    detail: TimelineDetail,
    left: usize,
    events: Vec<TimelineEvent>,
    spans: Vec<Span>,
}

impl<'a> Timeline<'a> {
    fn new(program: &'a Program, options: &SimulateOptions) -> Self {
        Timeline {
            program,
            detail: options.timeline,
            left: options.max_events,
            events: Vec::new(),
            spans: Vec::new(),
        }
    }
    /// Records slot `slot` of `role`, or one instruction of it, from `start_s` to `end_s`.
    fn add(
        &mut self,
        role: usize,
        slot: usize,
        instruction: Option<usize>,
        start_s: f64,
        end_s: f64,
    ) {
        let wanted = match self.detail {
            TimelineDetail::None => false,
            TimelineDetail::Templates => instruction.is_none(),
            TimelineDetail::Instructions => instruction.is_some(),
            TimelineDetail::Spans => {
                let template = self.program.roles[role].trace[slot].template.0;
                self.spans.extend(instruction.map(|i| Span {
                    role: role as u32,
                    template,
                    instruction: i as u32,
                    start_s,
                    end_s,
                }));
                false
            }
        };
        if !wanted || self.left == 0 {
            return;
        }
        self.left -= 1;
        let this = &self.program.roles[role];
        let slot = this.trace[slot];
        let template = this.template(slot.template);
        let (name, stream) = match instruction.map(|i| &template.instructions[i]) {
            Some(i) => (instruction_name(this, &i.kind), this.stream(i.stream)),
            None if template.kind == TemplateKind::Exchange => {
                (template.kind.name().into(), &Stream::Transfers)
            }
            None => (pass_name(self.program, this, template), &Stream::Kernels),
        };
        self.events.push(TimelineEvent {
            stage: this.stage,
            stream: stream.name(&this.mesh),
            template: slot.template.0,
            instruction: instruction.map(|i| i as u32),
            microbatch: slot.microbatch,
            name,
            start_s,
            duration_s: end_s - start_s,
        });
    }
}

#[cfg(test)]
mod tests;
