//! A role's trace: what every copy of every buffer holds between templates.

use super::held::{Cell, Held, Microbatches};
use super::template::{self, Outcome};
use super::{Variants, WorldSums, variants};
use crate::facts::Facts;
use crate::hazards::Neighbours;
use crate::memory::{first_of_row, lost_to_transients};
use crate::report::{Report, buffer_place, slot_place};
use ir::program::{BufferClass, Program, RoleProgram, Slot};
use ir::{BufferId, TemplateId, ValueId};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

/// The facts about a template that do not depend on what buffers hold.
pub(super) struct Shape {
    /// The lasting buffers that it touches, ascending.
    pub(super) externals: Vec<BufferId>,
    /// For each buffer that it touches, the others that share bytes with it.
    pub(super) neighbours: Neighbours,
    /// The microbatch buffers whose bytes its transients use.
    lost: Vec<BufferId>,
}

struct Trace<'a> {
    facts: &'a Facts<'a>,
    program: &'a Program,
    i: usize,
    role: &'a RoleProgram,
    variants: Variants,
    shapes: Vec<Rc<Shape>>,
    /// For each buffer, the one whose cells are its own too, as both have their copies by turns.
    first_of_row: Vec<BufferId>,
    /// The content of each copy of each buffer; grown as copies are used.
    cells: Vec<Vec<Cell>>,
    sums: BTreeMap<BufferId, Microbatches>,
    /// By buffer of a state that microbatches update, how many have.
    updates: BTreeMap<BufferId, u32>,
    /// Outcomes of templates played for a microbatch, by what their lasting buffers held.
    known: HashMap<(TemplateId, Vec<Held>), Rc<Outcome>>,
    world_sums: WorldSums,
}

pub(super) fn walk(
    facts: &Facts<'_>,
    program: &Program,
    i: usize,
    report: &mut Report,
) -> WorldSums {
    let role = &program.roles[i];
    let mut trace = Trace {
        facts,
        program,
        i,
        role,
        variants: variants(role),
        shapes: role
            .templates
            .iter()
            .map(|t| Rc::new(shape(role, t)))
            .collect(),
        first_of_row: first_of_row(role),
        cells: vec![Vec::new(); role.buffers.len()],
        sums: BTreeMap::new(),
        updates: BTreeMap::new(),
        known: HashMap::new(),
        world_sums: Vec::new(),
    };
    trace.begin(report);
    for (k, slot) in role.trace.iter().enumerate() {
        trace.slot(k, *slot, report);
    }
    trace.end(report);
    trace.world_sums
}

fn shape(role: &RoleProgram, template: &ir::program::Template) -> Shape {
    let neighbours = Neighbours::new(role, template);
    let (transients, externals): (Vec<BufferId>, Vec<BufferId>) = neighbours
        .touched()
        .iter()
        .partition(|&&b| role.buffer(b).class == BufferClass::Transient);
    Shape {
        lost: lost_to_transients(role, &transients),
        externals,
        neighbours,
    }
}

impl Trace<'_> {
    /// Gives the states their old values.
    fn begin(&mut self, report: &mut Report) {
        let mut taken = BTreeSet::new();
        for s in &self.role.states {
            let Some(state) = self.facts.training.states.iter().find(|k| k.path == s.path) else {
                continue;
            };
            let b = self.role.buffer(s.buffer);
            let place = || buffer_place(self.program, self.i, s.buffer.index());
            if let Some((expected, actual)) = self.facts.type_problem(b, state.read) {
                report.add(place(), "type", expected, actual);
            }
            if b.class != BufferClass::Persistent
                || !b.spec.partial.is_empty()
                || !taken.insert(s.buffer)
            {
                let actual = format!("{:?} {}", b.class, b.spec.display(&self.role.mesh));
                report.add(
                    place(),
                    "state",
                    format!("`{}` alone, persistent, nothing partial", s.path),
                    actual,
                );
            }
            let held = Held::Value {
                root: self.facts.root(state.read),
                variant: 0,
            };
            self.store(
                s.buffer,
                0,
                Cell {
                    held,
                    microbatch: None,
                    buffer: Some(s.buffer),
                },
            );
        }
    }

    /// Checks that states hold their new values, and that loss and norm are what the graph says.
    fn end(&self, report: &mut Report) {
        for s in &self.role.states {
            if let Some(state) = self.facts.training.states.iter().find(|k| k.path == s.path) {
                match self.facts.goes_on(state.read) {
                    true => self.must_be_updated(s.buffer, state.read, report),
                    false => self.must_hold(s.buffer, state.write, "state", false, report),
                }
            }
        }
        let training = self.facts.training;
        let loss = self.role.loss.map(|b| (b, Some(training.loss)));
        let norm = self.role.grad_norm.map(|b| (b, training.grad_norm));
        for (b, v) in [loss, norm].into_iter().flatten() {
            match v {
                Some(v) => self.must_hold(b, v, "result", true, report),
                None => report.add(
                    buffer_place(self.program, self.i, b.index()),
                    "result",
                    "no gradient norm, as there are no gradients",
                    "one",
                ),
            }
        }
    }

    /// Checks that every microbatch has updated a state, and that nothing else stands in its place.
    fn must_be_updated(&self, b: BufferId, read: ValueId, report: &mut Report) {
        let found = self.updates.get(&b).copied().unwrap_or(0);
        if found != self.program.n_microbatches {
            report.add(
                buffer_place(self.program, self.i, b.index()),
                "update",
                format!(
                    "an update by each of {} microbatches",
                    self.program.n_microbatches
                ),
                format!("{found} updates"),
            );
        }
        self.must_hold(b, read, "state", false, report);
    }

    fn must_hold(
        &self,
        b: BufferId,
        v: ValueId,
        rule: &'static str,
        replicated: bool,
        report: &mut Report,
    ) {
        let held = self.entry(b, None);
        let root = self.facts.root(v);
        let found = match held {
            Held::Poison => return,
            Held::Value { root: r, variant } if r == root => match self.spec(b, variant) {
                spec if replicated && spec.is_replicated() => return,
                spec if !replicated && *spec == self.role.buffer(b).spec => return,
                spec => format!("it as {}", spec.display(&self.role.mesh)),
            },
            held => self.describe(b, held),
        };
        let how = if replicated { " replicated" } else { "" };
        report.add(
            buffer_place(self.program, self.i, b.index()),
            rule,
            format!("`{}`{how} at the end of the step", self.facts.name(root)),
            found,
        );
    }

    fn describe(&self, b: BufferId, held: Held) -> String {
        match (held, self.sums.get(&b)) {
            (Held::Sum { root }, Some(set)) => {
                format!(
                    "`{}` over {} of {} microbatches",
                    self.facts.name(root),
                    set.len(),
                    self.program.n_microbatches
                )
            }
            _ => held.describe(self.facts),
        }
    }

    fn spec(&self, b: BufferId, variant: u8) -> &ir::ShardingSpec {
        let own = &self.role.buffer(b).spec;
        self.variants
            .get(&b)
            .and_then(|v| v.get(usize::from(variant)))
            .unwrap_or(own)
    }

    fn copy(&self, b: BufferId, microbatch: Option<u32>) -> usize {
        self.role.buffer(b).copy_for(microbatch) as usize
    }

    fn store(&mut self, b: BufferId, copy: usize, cell: Cell) {
        let cells = &mut self.cells[self.first_of_row[b.index()].index()];
        if cells.len() <= copy {
            cells.resize(copy + 1, Cell::default());
        }
        cells[copy] = cell;
    }

    /// Returns the content of the copy for `microbatch`, seen from it.
    fn entry(&self, b: BufferId, microbatch: Option<u32>) -> Held {
        let cell = self.cells[self.first_of_row[b.index()].index()]
            .get(self.copy(b, microbatch))
            .copied()
            .unwrap_or_default();
        match cell.held {
            // Another stage's buffer had the copy last.
            Held::Poison => Held::Poison,
            _ if cell.buffer != Some(b) => Held::Undefined,
            Held::Value { root, .. }
                if self.facts.per_microbatch(root) && cell.microbatch != microbatch =>
            {
                Held::Stale
            }
            // What parts of an op give is of use to the others of its template alone.
            Held::Part { .. } | Held::Members { .. } => Held::Undefined,
            // After the microbatches a complete sum is the value that `StepEnd` reads.
            Held::Sum { root } if microbatch.is_none() && self.complete(b) => {
                Held::Value { root, variant: 0 }
            }
            held => held,
        }
    }

    fn complete(&self, b: BufferId) -> bool {
        self.sums
            .get(&b)
            .is_some_and(|set| set.len() == self.program.n_microbatches)
    }

    fn slot(&mut self, k: usize, slot: Slot, report: &mut Report) {
        let shape = &self.shapes[slot.template.index()];
        let entry: Vec<Held> = shape
            .externals
            .iter()
            .map(|&b| self.entry(b, slot.microbatch))
            .collect();
        let key = (slot.template, entry);
        let outcome = match self.known.get(&key) {
            Some(outcome) if slot.microbatch.is_some() => Rc::clone(outcome),
            _ => {
                let outcome = Rc::new(self.interpret(slot, &key.1, report));
                if slot.microbatch.is_some() {
                    self.known.insert(key.clone(), Rc::clone(&outcome));
                }
                outcome
            }
        };
        self.world_sums.extend(outcome.world_sums.iter().cloned());
        self.commit(k, slot, &key.1, &outcome, report);
    }

    fn interpret(&self, slot: Slot, entry: &[Held], report: &mut Report) -> Outcome {
        let shape = &self.shapes[slot.template.index()];
        let site = template::Site {
            facts: self.facts,
            program: self.program,
            i: self.i,
            role: self.role,
            variants: &self.variants,
            shape,
            template: slot.template,
            in_microbatch: slot.microbatch.is_some(),
        };
        template::interpret(&site, entry, report)
    }

    fn commit(
        &mut self,
        k: usize,
        slot: Slot,
        entry: &[Held],
        outcome: &Outcome,
        report: &mut Report,
    ) {
        for &(b, from_zero) in &outcome.accumulated {
            let set = self.sums.entry(b).or_default();
            if from_zero {
                *set = Microbatches::default();
            }
            if let Some(m) = slot.microbatch
                && !set.insert(m)
            {
                let actual = format!(
                    "microbatch {m} again in buffer {} ({})",
                    b.0,
                    self.role.buffer(b).name
                );
                report.add(
                    slot_place(self.program, self.i, k),
                    "accumulate",
                    "every microbatch once",
                    actual,
                );
            }
        }
        let shape = Rc::clone(&self.shapes[slot.template.index()]);
        for b in &shape.lost {
            self.cells[self.first_of_row[b.index()].index()].fill(Cell::default());
        }
        for ((&b, &before), &after) in shape.externals.iter().zip(entry).zip(&outcome.held) {
            if after != before || shape.lost.contains(&b) {
                let held = self.left(k, slot, b, after, report);
                self.store(
                    b,
                    self.copy(b, slot.microbatch),
                    Cell {
                        held,
                        microbatch: slot.microbatch,
                        buffer: Some(b),
                    },
                );
            }
        }
    }

    /// Returns what the content of a buffer at the end of a slot is to later ones. Where microbatches
    /// update states, a state's next value is what the next microbatch finds; and what another buffer
    /// holds of a state is of use in its slot alone, as the state goes on.
    fn left(
        &mut self,
        k: usize,
        slot: Slot,
        b: BufferId,
        after: Held,
        report: &mut Report,
    ) -> Held {
        let Held::Value { root, variant } = after else {
            return match after {
                Held::Stale => Held::Undefined,
                held => held,
            };
        };
        let own = self.role.states.iter().find(|s| s.buffer == b);
        let state = own.and_then(|s| self.facts.training.states.iter().find(|k| k.path == s.path));
        match state {
            Some(s) if self.facts.goes_on(s.read) && root == self.facts.root(s.write) => {
                let n = self.updates.entry(b).or_default();
                if slot.microbatch != Some(*n) {
                    report.add(
                        slot_place(self.program, self.i, k),
                        "update",
                        format!("the update of `{}` by microbatch {n}", s.path),
                        format!("by {:?}", slot.microbatch),
                    );
                }
                *n += 1;
                let root = self.facts.root(s.read);
                Held::Value { root, variant }
            }
            None if self.facts.goes_on(root) => Held::Undefined,
            _ => after,
        }
    }
}
