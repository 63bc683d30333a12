//! Values of other meshes: sent once per receiving mesh, changed on the way as recorded.
//!
//! Steps before a transfer run on the sender: right after the producer in microbatches, right
//! before the exchange in the step phases. Steps after it run at the first use in
//! microbatches, right after the exchange in the step phases.

use super::{Emitter, Located};
use crate::draft::{Lifetime, Serves};
use crate::error::LowerError;
use crate::order::Flow;
use crate::resolve::Resolved;
use crate::uses::{CrossEdge, check_cross};
use ir::program::{InstrKind, Slot, TemplateKind, Transfer};
use ir::reshard::CrossPath;
use ir::schedule::ChunkPass;
use ir::{BufferId, Region, StageId, TransferId, ValueId};
use std::collections::{BTreeMap, BTreeSet};

/// A value on its way to another mesh.
pub(super) struct Crossing {
    edge: CrossEdge,
    path: CrossPath,
    sent: Option<Sent>,
    /// The receiver's passes that use it; empty in the step phases.
    used_by: BTreeSet<ChunkPass>,
}

/// One side of an exchange.
type Parts = Vec<(TransferId, BufferId)>;

#[derive(Clone, Copy)]
struct Sent {
    transfer: TransferId,
    send: BufferId,
    recv: BufferId,
    serves: Serves,
}

impl Crossing {
    pub fn new(r: &Resolved, edge: &CrossEdge) -> Result<Self, LowerError> {
        let Some(path) = r.plan.transfers.get(&edge.key) else {
            return Err(LowerError::MissingTransfer {
                key: edge.key.clone(),
            });
        };
        check_cross(r, edge, path)?;
        Ok(Crossing {
            edge: edge.clone(),
            path: path.clone(),
            sent: None,
            used_by: BTreeSet::new(),
        })
    }
    fn goes(&self, v: ValueId, to: StageId) -> bool {
        self.edge.value == v && self.edge.to == to
    }
}

impl Emitter<'_, '_> {
    /// Where a value stands on a mesh, brought there if it is another's.
    pub(super) fn at_hand(&mut self, v: ValueId, stage: StageId) -> Result<Located, LowerError> {
        if let Some(located) = self.places.get(&(v, stage)) {
            // In microbatches a received value has its place before its first use in every pass.
            let located = located.clone();
            self.note_use(v, stage);
            return Ok(located);
        }
        let Some(at) = self.crossings.iter().position(|c| c.goes(v, stage)) else {
            return Err(self.unavailable(v, stage));
        };
        let (from, region) = (self.crossings[at].edge.from, self.crossings[at].edge.region);
        match (self.phase.kind, region) {
            (TemplateKind::StepBegin | TemplateKind::StepEnd, _) => {
                self.exchange_step(from, stage)?
            }
            (_, Region::Microbatch) => self.arrive(at),
            _ => {}
        }
        self.note_use(v, stage);
        self.places
            .get(&(v, stage))
            .cloned()
            .ok_or_else(|| self.unavailable(v, stage))
    }

    /// A value that no earlier phase makes.
    fn unavailable(&self, v: ValueId, stage: StageId) -> LowerError {
        let from = self.r.home(v).unwrap_or(stage);
        let value = self.r.graph().value_name(v);
        LowerError::Stuck {
            played: 0,
            waiting: format!("{stage} needs `{value}`, which {from} makes only later"),
        }
    }

    fn note_use(&mut self, v: ValueId, stage: StageId) {
        let Some(pass) = self.phase.pass() else {
            return;
        };
        if self.r.home(v).is_none_or(|home| home == stage) {
            return;
        }
        if let Some(c) = self.crossings.iter_mut().find(|c| c.goes(v, stage)) {
            c.used_by.insert(pass);
        }
    }

    /// Prepares a microbatch value for every mesh that it goes to.
    pub(super) fn send_from(&mut self, v: ValueId, stage: StageId) {
        for at in 0..self.crossings.len() {
            let c = &self.crossings[at];
            if c.edge.value == v && c.edge.from == stage && c.edge.region == Region::Microbatch {
                self.prepare(at);
            }
        }
    }

    /// The steps on the sender, and the buffers at both ends.
    fn prepare(&mut self, at: usize) {
        let (edge, path) = (
            self.crossings[at].edge.clone(),
            self.crossings[at].path.clone(),
        );
        let op = self.r.producer(edge.value);
        let serves = Serves {
            pass: op.pass,
            layer: op.layer,
        };
        let made = self.places[&(edge.value, edge.from)].clone();
        let send = self
            .change(edge.from, edge.value, made, &path.before, serves)
            .buffer;
        let recv = self.buffer(edge.to, edge.value, &path.target_spec, Lifetime::ByUse);
        let transfer = TransferId::new(self.transfers.len());
        self.transfers.push(Transfer {
            value: self.r.graph().value_name(edge.value),
            from: edge.from,
            to: edge.to,
            lens: edge.lens,
            dtype: edge.dtype,
            from_spec: path.source_spec,
            to_spec: path.target_spec,
        });
        self.crossings[at].sent = Some(Sent {
            transfer,
            send,
            recv,
            serves,
        });
    }

    /// The steps on the receiver; afterwards the value has its place there.
    fn arrive(&mut self, at: usize) {
        let Some(sent) = self.crossings[at].sent else {
            return;
        };
        let (edge, path) = (
            self.crossings[at].edge.clone(),
            self.crossings[at].path.clone(),
        );
        let landed = Located {
            buffer: sent.recv,
            spec: path.target_spec,
        };
        let arrived = self.change(edge.to, edge.value, landed, &path.after, sent.serves);
        self.places.insert((edge.value, edge.to), arrived);
    }

    /// An exchange in a step phase: everything that two meshes have for each other by now.
    fn exchange_step(&mut self, a: StageId, b: StageId) -> Result<(), LowerError> {
        let phase = self.phase.kind;
        let region = if phase == TemplateKind::StepBegin {
            Region::StepBegin
        } else {
            Region::StepEnd
        };
        let due: Vec<usize> = (0..self.crossings.len())
            .filter(|&i| {
                let c = &self.crossings[i];
                let between =
                    (c.edge.from, c.edge.to) == (a, b) || (c.edge.from, c.edge.to) == (b, a);
                between
                    && c.sent.is_none()
                    && c.edge.region == region
                    && self.places.contains_key(&(c.edge.value, c.edge.from))
            })
            .collect();
        if due.is_empty() {
            return Ok(());
        }
        due.iter().for_each(|&at| self.prepare(at));
        for stage in [a, b] {
            let (sends, recvs) = self.parts(&due, stage);
            let serves = Serves {
                pass: ir::Pass::Update,
                layer: None,
            };
            let role = self.role(stage);
            role.close_step(phase);
            let template = role.add_exchange(InstrKind::Exchange { sends, recvs }, serves);
            role.step_slots(phase).push(Slot {
                template,
                microbatch: None,
            });
        }
        due.iter().for_each(|&at| self.arrive(at));
        Ok(())
    }

    /// The parts of some crossings that a mesh sends and receives.
    fn parts(&self, crossings: &[usize], stage: StageId) -> (Parts, Parts) {
        let (mut sends, mut recvs) = (Vec::new(), Vec::new());
        for c in crossings.iter().map(|&at| &self.crossings[at]) {
            if let Some(sent) = c.sent {
                if c.edge.from == stage {
                    sends.push((sent.transfer, sent.send));
                } else {
                    recvs.push((sent.transfer, sent.recv));
                }
            }
        }
        (sends, recvs)
    }

    /// Ends `StepBegin`: what microbatches of other meshes will need goes there.
    pub(super) fn flush_step_begin(&mut self) -> Result<(), LowerError> {
        let n = self.roles.len();
        for a in 0..n {
            for b in a + 1..n {
                self.exchange_step(StageId::new(a), StageId::new(b))?;
            }
        }
        self.roles
            .iter_mut()
            .for_each(|role| role.close_step(TemplateKind::StepBegin));
        Ok(())
    }

    /// One exchange template per sender, receiver and pass, on both sides.
    pub(super) fn flow_exchanges(&mut self) -> Vec<Flow> {
        let mut by_flow: BTreeMap<(StageId, StageId, ChunkPass), Vec<usize>> = BTreeMap::new();
        for (at, c) in self
            .crossings
            .iter()
            .enumerate()
            .filter(|(_, c)| c.edge.region == Region::Microbatch)
        {
            let Some(pass) = self.r.phase(self.r.producer(c.edge.value)).pass() else {
                continue;
            };
            by_flow
                .entry((c.edge.from, c.edge.to, pass))
                .or_default()
                .push(at);
        }
        let mut flows = Vec::with_capacity(by_flow.len());
        for ((from, to, made_by), crossings) in by_flow {
            let used_by = crossings
                .iter()
                .flat_map(|&at| self.crossings[at].used_by.clone())
                .collect();
            let Some(serves) = crossings
                .iter()
                .find_map(|&at| self.crossings[at].sent.map(|s| s.serves))
            else {
                continue;
            };
            for stage in [from, to] {
                let (sends, recvs) = self.parts(&crossings, stage);
                let template = self
                    .role(stage)
                    .add_exchange(InstrKind::Exchange { sends, recvs }, serves);
                self.role(stage).flows.insert(flows.len(), template);
            }
            flows.push(Flow {
                from,
                to,
                made_by,
                used_by,
            });
        }
        flows
    }
}
