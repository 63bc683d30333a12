//! Role programs: what the ranks of a mesh do, read by simulator, checker and runtime alike.
//!
//! A **role** is the ranks of one mesh: all execute the same instructions; what differs (shard
//! ranges, peers) is a function of the rank's mesh coordinates. A role has one stage, or
//! several whose passes are interleaved: its **chunks**, each with templates of its own. It is
//! named by its first stage; so are the ends of transfers.
//!
//! A role's program is a **trace** of slots, each playing a **template** (a straight list of
//! instructions) for a microbatch. Semantics that bind every reader:
//!
//! 1. *Serial order.* Playing the trace slot by slot, each template in list order, is valid.
//! 2. *Streams and events.* Instructions of one stream run one after the other in that order.
//!    Beyond that an instruction waits for its `deps`, which are in its own slot, and its
//!    `events`, which are in earlier slots, and for nothing else: slots overlap wherever
//!    neither says otherwise. A step begins when the step before is complete on all streams.
//! 3. *Rendezvous.* A collective completes when all members of its group have started it; an
//!    exchange's send completes when the receiver has started the matching receive. The sends
//!    and receives of one exchange proceed together.
//! 4. *Buffers.* A buffer of class `PerMicrobatch` has `slots` copies; microbatch `i` uses
//!    copy `i mod slots`, or the one that its [`Turns`] say, where buffers of several stages of
//!    the mesh have the same copies by turns. A `Transient` buffer lives inside one template; its
//!    bytes may be shared with other transient buffers, and `deps` order such reuse. `Step`
//!    buffers live from `StepBegin` to `StepEnd`, `Persistent` ones for the whole run.
//! 5. *Spaces.* A buffer lies in the arena of one memory. What is not in the device's is read and
//!    written by copies alone, and stands there as it does in the device's.
//! 6. *Pieces.* A collective moves a few rows of contiguous pieces, in each row one for every
//!    member in group order. An operand that it cuts, or a result that it puts together, in
//!    another way is a buffer in [`Pieces`]; copies stand before and behind.
//! 7. *Padding.* Elements of a buffer past its valid local range are zero after every
//!    instruction.
//! 8. *Contracts.* A collective adds up as its [`Contract`] says, or keeps more than that.
//! 9. *Calls.* Neighbours of a list may be one [`Call`], which a device makes of them if it can. What
//!    they compute is the same but for the rounding of values that are then not written.

use crate::collective::{CollectiveKind, Contract, Order};
use crate::op::InputKind;
use crate::op::OpKind;
use crate::reshard::{LayoutStep, Pieces};
use crate::schedule::{PassKind, Route};
use crate::training::StateRole;
use crate::{
    AxisId, BufferId, DType, InstrId, LayerId, LogicalMesh, Pass, ShardingSpec, StageId, StreamId,
    TemplateId, TransferId,
};
use serde::{Deserialize, Serialize};
use smallvec::{SmallVec, smallvec};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The whole program of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// One role per mesh, in the order of their first stages: role `i` is that of stage `i`,
    /// and its other chunks are the stages that the route says.
    pub roles: Vec<RoleProgram>,
    /// Stage-to-stage transfers; exchanges refer to them.
    pub transfers: Vec<Transfer>,
    /// Microbatches per step.
    pub n_microbatches: u32,
    /// Samples per microbatch, over the whole stage mesh.
    pub microbatch: u64,
    /// The meshes that stages follow each other on.
    pub route: Route,
}

impl Program {
    /// Has its collectives state sums of this order: that of the fabric which is to execute it,
    /// where lowering stated that of the devices that the plan is for.
    pub fn restate(&mut self, order: Order) {
        let templates = self.roles.iter_mut().flat_map(|r| &mut r.templates);
        for instruction in templates.flat_map(|t| &mut t.instructions) {
            if let InstrKind::Collective { kind, contract, .. } = &mut instruction.kind {
                *contract = Contract::new(*kind, contract.operand, order);
            }
        }
    }
    /// Returns how many tokens a sample has behind its last label ([`InputKind::further`]).
    pub fn further(&self) -> u64 {
        let templates = self.roles.iter().flat_map(|r| &r.templates);
        let all = templates.flat_map(|t| &t.instructions);
        InputKind::further(all.filter_map(|i| match i.kind {
            InstrKind::Load { kind, .. } => Some(kind),
            _ => None,
        }))
    }
    /// The stage that is chunk `chunk` of role `role`, an index.
    pub fn stage_of(&self, role: usize, chunk: u32) -> StageId {
        let stage = self.route.stage_of(role, chunk as usize, self.roles.len());
        StageId::new(stage)
    }
}

/// A tensor that moves from one role to another; the blocks are `reshard::tiles_to`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Name of the value.
    pub value: String,
    /// First stage of the sending role.
    pub from: StageId,
    /// First stage of the receiving role, which is another one.
    pub to: StageId,
    /// Global lengths.
    pub lens: Vec<u64>,
    /// Element type.
    pub dtype: DType,
    /// Spec in the sending mesh, nothing partial.
    pub from_spec: ShardingSpec,
    /// Spec in the receiving mesh, nothing partial.
    pub to_spec: ShardingSpec,
}

/// How long a buffer lives.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum BufferClass {
    /// Across steps: parameters and optimizer states.
    Persistent,
    /// From `StepBegin` to `StepEnd`: prepared parameters, accumulators.
    Step,
    /// For one microbatch, across templates: saved activations, boundary tensors.
    PerMicrobatch {
        /// Number of copies.
        slots: u32,
    },
    /// Inside one template.
    Transient,
}

/// Copies that a buffer has by turns with buffers of other stages of its mesh: while one stage
/// holds few microbatches, another one holds many, and the mesh never as many as both at most.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turns {
    /// The buffers with this number are one row of copies: they are in the same space, at the same
    /// offset, as far from copy to copy and of as many copies.
    pub row: u32,
    /// The copy that each microbatch takes.
    pub copies: Arc<[u32]>,
}

/// A memory that buffers lie in.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Space {
    /// The device's, where kernels and collectives read and write.
    #[default]
    Device,
    /// The memory of the device's host. Only copies reach it.
    Host,
    /// A file of the host. Only copies reach it.
    File,
}

impl Space {
    /// All of them.
    pub const ALL: [Space; 3] = [Space::Device, Space::Host, Space::File];

    /// Name in text forms and reports.
    pub fn name(self) -> &'static str {
        match self {
            Space::Device => "device",
            Space::Host => "host",
            Space::File => "file",
        }
    }
}

/// A buffer of a role: the same size at the same place on every rank of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Buffer {
    /// Name of the value it holds, with a suffix for resharded copies.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Global lengths of the tensor (batch bound).
    pub lens: Vec<u64>,
    /// How the tensor lies over the role's mesh.
    pub spec: ShardingSpec,
    /// How its bytes stand: as the row-major local shape, or piece after piece.
    pub pieces: Option<Pieces>,
    /// Lifetime.
    pub class: BufferClass,
    /// The turns of a buffer per microbatch whose copies others use too.
    pub turns: Option<Turns>,
    /// The memory that it lies in.
    pub space: Space,
    /// Offset of copy 0 in that memory's arena, a multiple of [`ARENA_ALIGN`].
    pub offset: u64,
    /// Bytes of one copy on every rank: the padded local shape, or all pieces of it. Copies
    /// follow each other at the next multiple of [`ARENA_ALIGN`].
    pub bytes: u64,
}

/// Alignment of buffers in the arena, bytes.
pub const ARENA_ALIGN: u64 = 256;

impl Buffer {
    /// Number of copies.
    pub fn slots(&self) -> u32 {
        if let BufferClass::PerMicrobatch { slots } = self.class {
            slots
        } else {
            1
        }
    }
    /// Distance between copies in bytes.
    pub fn stride(&self) -> u64 {
        self.bytes.next_multiple_of(ARENA_ALIGN)
    }
    /// The copy that `microbatch` uses.
    pub fn copy_for(&self, microbatch: Option<u32>) -> u32 {
        let by_turns = |m: u32| self.turns.as_ref()?.copies.get(m as usize).copied();
        microbatch.map_or(0, |m| by_turns(m).unwrap_or(m % self.slots().max(1)))
    }
    /// Offset of the copy that `microbatch` uses.
    pub fn offset_for(&self, microbatch: Option<u32>) -> u64 {
        self.offset + u64::from(self.copy_for(microbatch)) * self.stride()
    }
}

/// Most streams of a role: a communicator for every set of axes of a large mesh, and more.
pub const MAX_STREAMS: usize = 128;

/// A queue of every rank of a role: its instructions run one after the other. A role has one
/// of each kind at most, and as many communicators as groups.
#[derive(
    Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Stream {
    /// Kernels and local copies.
    Kernels,
    /// Collectives of one communicator: the groups over these axes.
    Communicator {
        /// The axes, as the collectives name them.
        axes: Vec<AxisId>,
    },
    /// Sums over all ranks of the plan.
    World,
    /// Stage-to-stage exchanges.
    Transfers,
    /// Copies from one memory space to another.
    Copies {
        /// Where they read.
        from: Space,
        /// Where they write.
        to: Space,
    },
}

impl Stream {
    /// The stream that an instruction belongs on.
    pub fn of(kind: &InstrKind) -> Stream {
        match kind {
            InstrKind::Collective { axes, .. } => Stream::Communicator { axes: axes.clone() },
            InstrKind::WorldSum { .. } => Stream::World,
            InstrKind::Exchange { .. } => Stream::Transfers,
            InstrKind::Compute { .. }
            | InstrKind::Slice { .. }
            | InstrKind::Load { .. }
            | InstrKind::Fill { .. }
            | InstrKind::Copy { .. } => Stream::Kernels,
        }
    }
    /// Name in reports and timelines; `kernels`, `collectives over x+y`.
    pub fn name(&self, mesh: &LogicalMesh) -> String {
        match self {
            Stream::Kernels => "kernels".into(),
            Stream::Communicator { axes } => {
                let name = |a: &AxisId| mesh.axes.get(a.index()).map_or("?", |a| a.name.as_str());
                let names: Vec<&str> = axes.iter().map(name).collect();
                format!("collectives over {}", names.join("+"))
            }
            Stream::World => "world".into(),
            Stream::Transfers => "transfers".into(),
            Stream::Copies { from, to } => format!("copies {} to {}", from.name(), to.name()),
        }
    }
}

/// Something in earlier slots of the trace that an instruction waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Event {
    /// All that earlier slots have put on a stream.
    Drained(StreamId),
    /// One instruction of an earlier slot; nothing where there is no such slot.
    Done {
        /// The template that the slot plays.
        template: TemplateId,
        /// The instruction.
        instruction: InstrId,
        /// Which of the slots that play it.
        which: Which,
    },
}

/// One of the earlier slots that play a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Which {
    /// The latest.
    Latest,
    /// That of the microbatch so many before this slot's; 0 is the same microbatch.
    Back(u32),
}

/// One buffer's part in a collective.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CollectiveItem {
    /// The layout change; its kind and axes are the instruction's.
    pub step: LayoutStep,
    /// Operand.
    pub input: BufferId,
    /// Result; the same buffer as the operand for an in-place all-reduce.
    pub output: BufferId,
}

/// The operation of an instruction.
#[derive(Clone, Debug, PartialEq)]
pub enum InstrKind {
    /// One op on local shards. Updates write their operands' buffers in place; `Accumulate`
    /// adds its operand to its result's buffer; `GlobalNorm` reads one f32 vector.
    Compute {
        /// Path of the op in the training graph.
        path: String,
        /// The op.
        kind: OpKind,
        /// Operands.
        inputs: Vec<BufferId>,
        /// Results.
        outputs: Vec<BufferId>,
    },
    /// A collective over mesh axes on one or more buffers (coalesced).
    Collective {
        /// Its operation.
        kind: CollectiveKind,
        /// Axes of the group.
        axes: Vec<AxisId>,
        /// The promises that its members may rely on.
        contract: Contract,
        /// The buffers.
        items: Vec<CollectiveItem>,
    },
    /// A slice: a layout change without communication.
    Slice {
        /// The step (`LayoutStep::Slice`).
        step: LayoutStep,
        /// Operand.
        input: BufferId,
        /// Result.
        output: BufferId,
    },
    /// Sends and receives that proceed together.
    Exchange {
        /// Outgoing transfers and what they send.
        sends: Vec<(TransferId, BufferId)>,
        /// Incoming transfers and where they land.
        recvs: Vec<(TransferId, BufferId)>,
    },
    /// Sum over all ranks of the plan of an f32 vector in which entry `i` is contributed by
    /// the first rank of the stage that lists it; the other addends are zero, so the sum is
    /// exact and independent of order.
    WorldSum {
        /// Entries that this role contributes.
        inputs: Vec<(u32, BufferId)>,
        /// The f32 vector, replicated.
        output: BufferId,
    },
    /// Data of the microbatch, the rank's shard of it.
    Load {
        /// Which data.
        kind: InputKind,
        /// An i32 `[batch, sequence]` buffer.
        output: BufferId,
    },
    /// Fills a buffer with a number (zero for accumulators).
    Fill {
        /// The number.
        value: f64,
        /// The buffer.
        output: BufferId,
    },
    /// Copies a buffer to another of the same type and spec. Where one of them is in pieces, it
    /// cuts the other's tensor into them, or puts it together from them.
    Copy {
        /// Operand.
        input: BufferId,
        /// Result.
        output: BufferId,
    },
}

/// The call that an instruction belongs to. Which of them a device can make is its own business: it
/// may play the instructions of any one by one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Call {
    /// One that begins with it.
    #[default]
    Own,
    /// That of the instruction before it in the list: these are a *chain*. It takes the result of that
    /// one, which need not be in memory; a function of elements may take an earlier value of the chain
    /// instead, or read an operand that the chain reads. It waits for nothing, on the same stream, and
    /// nothing is written where any of the chain reads, but for what is made element by element in
    /// the very buffer of an operand.
    Chained {
        /// Whether the value is written all the same, as others read it.
        is_kept: bool,
    },
    /// That of the instruction before it in the list, which does the same to other tensors: nothing
    /// orders those that are *joined*.
    Joined,
}

/// Fewest instructions that are joined: a joined launch reads from memory what others are given.
pub const FEWEST_JOINED: usize = 4;

/// An instruction of a template.
#[derive(Clone, Debug, PartialEq)]
pub struct Instruction {
    /// Its operation.
    pub kind: InstrKind,
    /// Where it runs: the place of its stream among the role's.
    pub stream: StreamId,
    /// Earlier instructions of the same slot that it waits for.
    pub deps: Vec<InstrId>,
    /// Events of earlier slots that it waits for.
    pub events: Vec<Event>,
    /// Pass of the op it serves; of an exchange, the pass that makes what it moves. All parts
    /// of an exchange in microbatches serve the forward pass, or none does.
    pub pass: Pass,
    /// Layer of the op it serves.
    pub layer: Option<LayerId>,
    /// The call that it belongs to.
    pub call: Call,
}

/// Buffers of an instruction. Few have more than four, and every pass over a program asks for
/// those of every instruction.
pub type BufferIds = SmallVec<[BufferId; 4]>;

impl Instruction {
    /// Buffers read, in operand order.
    pub fn reads(&self) -> BufferIds {
        match &self.kind {
            InstrKind::Compute {
                kind,
                inputs,
                outputs,
                ..
            } => {
                let mut reads = BufferIds::from_slice(inputs);
                if matches!(kind, OpKind::Accumulate { .. }) {
                    reads.extend_from_slice(outputs);
                }
                reads
            }
            InstrKind::Collective { items, .. } => items.iter().map(|i| i.input).collect(),
            InstrKind::Slice { input, .. } | InstrKind::Copy { input, .. } => smallvec![*input],
            InstrKind::Exchange { sends, .. } => sends.iter().map(|s| s.1).collect(),
            InstrKind::WorldSum { inputs, .. } => inputs.iter().map(|i| i.1).collect(),
            InstrKind::Load { .. } | InstrKind::Fill { .. } => BufferIds::new(),
        }
    }
    /// Buffers written, in result order.
    pub fn writes(&self) -> BufferIds {
        match &self.kind {
            InstrKind::Compute { outputs, .. } => BufferIds::from_slice(outputs),
            InstrKind::Collective { items, .. } => items.iter().map(|i| i.output).collect(),
            InstrKind::Slice { output, .. }
            | InstrKind::Copy { output, .. }
            | InstrKind::WorldSum { output, .. }
            | InstrKind::Load { output, .. }
            | InstrKind::Fill { output, .. } => smallvec![*output],
            InstrKind::Exchange { recvs, .. } => recvs.iter().map(|r| r.1).collect(),
        }
    }
}

/// The purpose of a template.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum TemplateKind {
    /// Prepares parameters, clears accumulators.
    StepBegin,
    /// Forward of a microbatch.
    Forward,
    /// Recomputation of activations for a microbatch's gradients.
    Recompute,
    /// Input gradients of a microbatch, and what is recomputed unless that has its own template.
    InputGradient,
    /// Weight gradients of a microbatch.
    WeightGradient,
    /// Input and weight gradients of a microbatch together, and what is recomputed for them.
    Backward,
    /// A stage-to-stage exchange.
    Exchange,
    /// Gradient reduction, clipping, update.
    StepEnd,
}

impl TemplateKind {
    /// The pass that a template of a microbatch computes; `None` for other templates.
    pub fn pass(self) -> Option<PassKind> {
        PassKind::ALL.into_iter().find(|&p| self == p.into())
    }
    /// Whether a microbatch computes gradients, or what they need, in it.
    pub fn is_backward(self) -> bool {
        self.pass().is_some_and(|p| p != PassKind::Forward)
    }
    /// Name in text forms, timelines and reports.
    pub fn name(self) -> &'static str {
        match self {
            TemplateKind::StepBegin => "step_begin",
            TemplateKind::Forward => "forward",
            TemplateKind::Recompute => "recompute",
            TemplateKind::InputGradient => "input_gradient",
            TemplateKind::WeightGradient => "weight_gradient",
            TemplateKind::Backward => "backward",
            TemplateKind::Exchange => "exchange",
            TemplateKind::StepEnd => "step_end",
        }
    }
}

impl From<PassKind> for TemplateKind {
    fn from(pass: PassKind) -> Self {
        match pass {
            PassKind::Forward => TemplateKind::Forward,
            PassKind::Recompute => TemplateKind::Recompute,
            PassKind::InputGradient => TemplateKind::InputGradient,
            PassKind::WeightGradient => TemplateKind::WeightGradient,
            PassKind::Backward => TemplateKind::Backward,
        }
    }
}

/// A straight list of instructions.
#[derive(Clone, Debug, PartialEq)]
pub struct Template {
    /// Its purpose.
    pub kind: TemplateKind,
    /// Number of the role's stage whose pass it is, from 0; 0 for everything but passes.
    pub chunk: u32,
    /// The instructions.
    pub instructions: Vec<Instruction>,
}

/// One slot of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The template.
    pub template: TemplateId,
    /// For which microbatch; `None` in `StepBegin`, `StepEnd` and their exchanges.
    pub microbatch: Option<u32>,
}

/// A persistent tensor of a role.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateBuffer {
    /// Path of the `State` op.
    pub path: String,
    /// Path of the parameter it belongs to.
    pub param: String,
    /// Its kind.
    pub role: StateRole,
    /// Where it lies.
    pub buffer: BufferId,
}

/// The program of one role.
#[derive(Clone, Debug, PartialEq)]
pub struct RoleProgram {
    /// The stage; the first of several.
    pub stage: StageId,
    /// Its mesh.
    pub mesh: LogicalMesh,
    /// Its streams, each once; instructions name them by place.
    pub streams: Vec<Stream>,
    /// Its buffers.
    pub buffers: Vec<Buffer>,
    /// Its templates.
    pub templates: Vec<Template>,
    /// The slots of one step of training, in serial order.
    pub trace: Vec<Slot>,
    /// Bytes of the device's arena on every rank: the end of the last buffer.
    pub arena_bytes: u64,
    /// Bytes of a rank's arenas in other spaces, where it has any.
    pub other_arenas: BTreeMap<Space, u64>,
    /// Persistent tensors that the role owns.
    pub states: Vec<StateBuffer>,
    /// Where the step's loss stands after the step (replicated), on the role that computes it.
    pub loss: Option<BufferId>,
    /// Where the global gradient norm stands after the step.
    pub grad_norm: Option<BufferId>,
}

impl RoleProgram {
    /// Bytes of a rank's arena in a space.
    pub fn arena(&self, space: Space) -> u64 {
        match space {
            Space::Device => self.arena_bytes,
            other => self.other_arenas.get(&other).copied().unwrap_or(0),
        }
    }
    /// The spaces that a copy goes between, where these are two.
    pub fn crossing(&self, kind: &InstrKind) -> Option<[Space; 2]> {
        let InstrKind::Copy { input, output } = kind else {
            return None;
        };
        let [from, to] = [input, output].map(|b| self.buffer(*b).space);
        (from != to).then_some([from, to])
    }
    /// One buffer.
    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[id.index()]
    }
    /// One stream.
    pub fn stream(&self, id: StreamId) -> &Stream {
        &self.streams[id.index()]
    }
    /// One template.
    pub fn template(&self, id: TemplateId) -> &Template {
        &self.templates[id.index()]
    }
    /// Its buffers, but of each row of shared copies ([`Turns`]) the first one alone: the bytes of
    /// their copies are different bytes.
    pub fn rows(&self) -> impl Iterator<Item = &Buffer> {
        let mut rows = BTreeSet::new();
        let first = move |b: &&Buffer| b.turns.as_ref().is_none_or(|t| rows.insert(t.row));
        self.buffers.iter().filter(first)
    }
    /// Number of stages whose passes the role plays, at least 1.
    pub fn n_chunks(&self) -> u32 {
        self.templates
            .iter()
            .map(|t| t.chunk + 1)
            .max()
            .unwrap_or(1)
    }
    /// Local padded shape of a buffer.
    pub fn local_shape(&self, id: BufferId) -> Vec<u64> {
        let b = self.buffer(id);
        b.spec.local_shape(&b.lens, &self.mesh)
    }
}
