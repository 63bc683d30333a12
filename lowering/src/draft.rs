//! Role programs while they are made: instructions without dependencies, buffers without
//! classes and places.

use crate::order::{Event, Flow};
use ir::program::{
    InstrKind, Instruction, Slot, Space, StateBuffer, Stream, Template, TemplateKind, Transfer,
};
use ir::reshard::{LayoutStep, Pieces};
use ir::schedule::ChunkPass;
use ir::{
    BufferId, DType, LayerId, LogicalMesh, Pass, ShardingSpec, StageId, StreamId, TemplateId,
    ValueId,
};
use std::collections::BTreeMap;

/// A program while it is made.
pub(crate) struct Draft {
    pub roles: Vec<RoleDraft>,
    pub transfers: Vec<Transfer>,
    /// Exchanges of the microbatches.
    pub flows: Vec<Flow>,
}

/// The lifetime of a buffer before its uses are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lifetime {
    /// Follows from the templates that touch it.
    ByUse,
    /// A step: cleared in `StepBegin`, added to in microbatches, read in `StepEnd`.
    Accumulator,
    /// A step, because it is read after it.
    Kept,
    /// The whole run.
    Persistent,
}

pub(crate) struct DraftBuffer {
    pub name: String,
    pub dtype: DType,
    pub lens: Vec<u64>,
    pub spec: ShardingSpec,
    pub pieces: Option<Pieces>,
    pub lifetime: Lifetime,
    /// The value that it holds; `None` for what stands beside the graph's values.
    pub value: Option<ValueId>,
    /// The memory that it rests in.
    pub space: Space,
}

/// The op that an instruction serves.
#[derive(Clone, Copy)]
pub(crate) struct Serves {
    pub pass: Pass,
    pub layer: Option<LayerId>,
}

pub(crate) struct RoleDraft {
    pub stage: StageId,
    pub mesh: LogicalMesh,
    pub streams: Vec<Stream>,
    pub buffers: Vec<DraftBuffer>,
    pub templates: Vec<Template>,
    pub trace: Vec<Slot>,
    pub states: Vec<StateBuffer>,
    pub loss: Option<BufferId>,
    pub grad_norm: Option<BufferId>,
    /// Instructions of the template that is being made.
    current: Vec<Instruction>,
    /// Changed tensors of the present phase, by operand and step.
    pub changed: BTreeMap<(BufferId, LayoutStep), BufferId>,
    begin: Vec<Slot>,
    end: Vec<Slot>,
    /// The microbatch templates.
    pub passes: BTreeMap<ChunkPass, TemplateId>,
    /// Exchange templates of the flows that the role takes part in.
    pub flows: BTreeMap<usize, TemplateId>,
}

impl RoleDraft {
    pub fn new(stage: StageId, mesh: LogicalMesh) -> Self {
        RoleDraft {
            stage,
            mesh,
            streams: vec![Stream::Kernels],
            buffers: Vec::new(),
            templates: Vec::new(),
            trace: Vec::new(),
            states: Vec::new(),
            loss: None,
            grad_norm: None,
            current: Vec::new(),
            changed: BTreeMap::new(),
            begin: Vec::new(),
            end: Vec::new(),
            passes: BTreeMap::new(),
            flows: BTreeMap::new(),
        }
    }

    pub fn add_buffer(&mut self, buffer: DraftBuffer) -> BufferId {
        self.buffers.push(buffer);
        BufferId::new(self.buffers.len() - 1)
    }

    /// Appends an instruction to the template that is being made.
    pub fn push(&mut self, kind: InstrKind, serves: Serves) {
        let instruction = self.instruction(kind, serves);
        self.current.push(instruction);
    }

    /// An instruction on its stream, which the role declares if it has not yet.
    pub fn instruction(&mut self, kind: InstrKind, serves: Serves) -> Instruction {
        let stream = self.stream_of(&kind);
        let known = self.streams.iter().position(|s| *s == stream);
        let at = known.unwrap_or_else(|| {
            self.streams.push(stream);
            self.streams.len() - 1
        });
        Instruction {
            kind,
            stream: StreamId::new(at),
            deps: Vec::new(),
            events: Vec::new(),
            pass: serves.pass,
            layer: serves.layer,
            call: ir::program::Call::Own,
        }
    }

    /// The stream of an instruction; copies between memories have one for each way.
    fn stream_of(&self, kind: &InstrKind) -> Stream {
        if let InstrKind::Copy { input, output } = kind {
            let [from, to] = [input, output].map(|b| self.buffers[b.index()].space);
            if from != to {
                return Stream::Copies { from, to };
            }
        }
        Stream::of(kind)
    }

    /// Ends a template of a step phase; an empty one vanishes.
    pub fn close_step(&mut self, kind: TemplateKind) {
        if !self.current.is_empty() {
            let template = self.close(kind, 0);
            self.step_slots(kind).push(Slot {
                template,
                microbatch: None,
            });
        }
    }

    /// Ends a microbatch template, empty or not.
    pub fn close_pass(&mut self, of: ChunkPass) {
        let template = self.close(of.pass.into(), of.chunk);
        self.passes.insert(of, template);
    }

    fn close(&mut self, kind: TemplateKind, chunk: u32) -> TemplateId {
        let instructions = std::mem::take(&mut self.current);
        self.templates.push(Template {
            kind,
            chunk,
            instructions,
        });
        TemplateId::new(self.templates.len() - 1)
    }

    /// Adds a template of one exchange.
    pub fn add_exchange(&mut self, kind: InstrKind, serves: Serves) -> TemplateId {
        let instruction = self.instruction(kind, serves);
        self.templates.push(Template {
            kind: TemplateKind::Exchange,
            chunk: 0,
            instructions: vec![instruction],
        });
        TemplateId::new(self.templates.len() - 1)
    }

    /// The slots of a step phase so far.
    pub fn step_slots(&mut self, phase: TemplateKind) -> &mut Vec<Slot> {
        if phase == TemplateKind::StepBegin {
            &mut self.begin
        } else {
            &mut self.end
        }
    }

    /// The trace: the step's begin, the role's part of the microbatch events, the step's end.
    pub fn assemble_trace(&mut self, events: &[Event]) {
        let slot = |e: &Event| match *e {
            Event::Compute(stage, slot) if stage == self.stage => {
                Some((self.passes[&slot.of], slot.microbatch))
            }
            Event::Compute(..) => None,
            Event::Exchange(flow, m) => self.flows.get(&flow).map(|&t| (t, m)),
        };
        let middle = events.iter().filter_map(slot).map(|(template, m)| Slot {
            template,
            microbatch: Some(m),
        });
        self.trace = self
            .begin
            .iter()
            .copied()
            .chain(middle)
            .chain(self.end.iter().copied())
            .collect();
    }
}

/// Calls `f` on every buffer that an instruction names.
pub(crate) fn buffers_mut(kind: &mut InstrKind, f: &mut dyn FnMut(&mut BufferId)) {
    match kind {
        InstrKind::Compute {
            inputs, outputs, ..
        } => inputs.iter_mut().chain(outputs).for_each(f),
        InstrKind::Collective { items, .. } => items.iter_mut().for_each(|i| {
            f(&mut i.input);
            f(&mut i.output);
        }),
        InstrKind::Slice { input, output, .. } | InstrKind::Copy { input, output } => {
            f(input);
            f(output);
        }
        InstrKind::Exchange { sends, recvs } => {
            sends.iter_mut().chain(recvs).for_each(|(_, b)| f(b))
        }
        InstrKind::WorldSum { inputs, output } => {
            inputs.iter_mut().for_each(|(_, b)| f(b));
            f(output);
        }
        InstrKind::Load { output, .. } | InstrKind::Fill { output, .. } => f(output),
    }
}
