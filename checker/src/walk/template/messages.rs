//! The messages between roles: exchanges and the world sum.

use super::Run;
use crate::walk::held::Held;
use ir::{BufferId, DType, StageId, TransferId, ValueId};

impl Run<'_, '_> {
    pub(super) fn exchange(
        &mut self,
        sends: &[(TransferId, BufferId)],
        recvs: &[(TransferId, BufferId)],
    ) {
        for &(x, b) in sends {
            self.send(x, b);
        }
        let mut results = Vec::with_capacity(recvs.len());
        for &(x, b) in recvs {
            let held = match sends.iter().any(|s| s.1 == b) {
                true => self.wrong(
                    "in_place",
                    "a buffer that is not sent at the same time",
                    self.name(b),
                ),
                false => self.receive(x, b),
            };
            results.push((b, held));
        }
        self.write(&results);
    }

    /// Returns the value that a transfer names, if the exchange is played where the value exists.
    fn moved(&mut self, x: TransferId) -> Option<ValueId> {
        let facts = self.site.facts;
        let transfer = &self.site.program.transfers[x.index()];
        let v = facts.find(&transfer.value)?;
        if facts.per_microbatch(facts.root(v)) != self.site.in_microbatch {
            self.wrong(
                "transfer",
                format!("`{}` moved in its region", transfer.value),
                "another region's exchange",
            );
            return None;
        }
        Some(v)
    }

    fn stage(&mut self, x: TransferId, stage: StageId, role: &'static str) -> bool {
        if stage.index() == self.site.i {
            return true;
        }
        self.wrong(
            "transfer",
            format!("{stage} as {role} of transfer {}", x.0),
            format!("stage {}", self.site.i),
        );
        false
    }

    /// Checks that the buffer has the transfer's type, and reports it otherwise.
    fn same_type(&mut self, x: TransferId, b: BufferId) -> bool {
        let (transfer, buffer) = (
            &self.site.program.transfers[x.index()],
            self.site.role.buffer(b),
        );
        if buffer.dtype == transfer.dtype && buffer.lens == transfer.lens {
            return true;
        }
        let expected = format!("{}{:?}", transfer.dtype.name(), transfer.lens);
        let actual = format!(
            "{}{:?} in {}",
            buffer.dtype.name(),
            buffer.lens,
            self.name(b)
        );
        self.wrong("type", expected, actual);
        false
    }

    fn send(&mut self, x: TransferId, b: BufferId) {
        let transfer = &self.site.program.transfers[x.index()];
        if !self.stage(x, transfer.from, "sender") || !self.same_type(x, b) {
            return;
        }
        let Some(v) = self.moved(x) else { return };
        let Some(variant) = self.operand(b, v) else {
            return;
        };
        let spec = self.spec(b, variant).clone();
        if spec != transfer.from_spec {
            let (expected, actual) = (self.show(&transfer.from_spec), self.show(&spec));
            self.wrong("spec", expected, format!("{actual} in {}", self.name(b)));
        }
    }

    fn receive(&mut self, x: TransferId, b: BufferId) -> Held {
        let transfer = &self.site.program.transfers[x.index()];
        if !self.stage(x, transfer.to, "receiver") || !self.same_type(x, b) {
            return Held::Poison;
        }
        let Some(v) = self.moved(x) else {
            return Held::Poison;
        };
        let own = &self.site.role.buffer(b).spec;
        if *own != transfer.to_spec {
            let (expected, actual) = (self.show(&transfer.to_spec), self.show(own));
            return self.wrong("spec", expected, format!("{actual} in {}", self.name(b)));
        }
        Held::Value {
            root: self.site.facts.root(v),
            variant: 0,
        }
    }

    pub(super) fn world_sum(&mut self, inputs: &[(u32, BufferId)], output: BufferId) {
        let Some(norm) = self.site.facts.norm else {
            self.wrong("world_sum", "a global norm in the graph", "none");
            return self.poison(&[output]);
        };
        let operands = &self.site.facts.graph.op(norm).inputs;
        for &(entry, b) in inputs {
            let Some(&v) = operands.get(entry as usize) else {
                self.wrong(
                    "world_sum",
                    format!("one of {} entries", operands.len()),
                    entry.to_string(),
                );
                continue;
            };
            if let Some(variant) = self.operand(b, v)
                && !self.spec(b, variant).is_replicated()
            {
                let found = format!("{} in {}", self.show(self.spec(b, variant)), self.name(b));
                self.wrong("world_sum", "a replicated entry", found);
            }
        }
        self.world_sums.push(inputs.iter().map(|x| x.0).collect());
        let buffer = self.site.role.buffer(output);
        let fits = buffer.dtype == DType::F32
            && buffer.lens == [operands.len() as u64]
            && buffer.spec.is_replicated();
        let held = match fits && !self.site.in_microbatch {
            true => Held::World,
            false => {
                let actual = format!(
                    "{}{:?} {}",
                    buffer.dtype.name(),
                    buffer.lens,
                    self.show(&buffer.spec)
                );
                self.wrong(
                    "world_sum",
                    format!(
                        "f32[{}], replicated, after the microbatches",
                        operands.len()
                    ),
                    actual,
                )
            }
        };
        self.write(&[(output, held)]);
    }
}
