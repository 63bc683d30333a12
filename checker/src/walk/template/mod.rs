//! The transfer functions: one template on what its lasting buffers hold on entry.
//!
//! Here: the walk over the instructions, reading operands and writing results. `compute`:
//! ops. `ring`: their parts. `steps`: layout changes. `messages`: exchanges and world sums.

mod compute;
mod messages;
mod ring;
mod steps;

use super::Variants;
use super::held::Held;
use super::trace::Shape;
use crate::calls;
use crate::facts::Facts;
use crate::report::{Report, instr_place};
use ir::program::{InstrKind, Program, RoleProgram};
use ir::reshard::LayoutStep;
use ir::{BufferId, InstrId, OpKind, ShardingSpec, TemplateId, ValueId};

/// Where a template is interpreted.
pub(super) struct Site<'a> {
    pub(super) facts: &'a Facts<'a>,
    pub(super) program: &'a Program,
    pub(super) i: usize,
    pub(super) role: &'a RoleProgram,
    pub(super) variants: &'a Variants,
    pub(super) shape: &'a Shape,
    pub(super) template: TemplateId,
    pub(super) in_microbatch: bool,
}

/// The effect of a template on lasting buffers.
pub(super) struct Outcome {
    /// The contents of the shape's `externals` after the template.
    pub(super) held: Vec<Held>,
    /// The accumulators to which the microbatch was added, in order; true for the first addition
    /// after zeros.
    pub(super) accumulated: Vec<(BufferId, bool)>,
    /// For each world sum, the entries that the template gives to it.
    pub(super) world_sums: Vec<Vec<u32>>,
}

pub(super) fn interpret(site: &Site<'_>, entry: &[Held], report: &mut Report) -> Outcome {
    let mut held = vec![Held::Undefined; site.role.buffers.len()];
    for (b, &h) in site.shape.externals.iter().zip(entry) {
        held[b.index()] = h;
    }
    let mut run = Run {
        site,
        held,
        accumulated: Vec::new(),
        world_sums: Vec::new(),
        instr: InstrId(0),
        report,
    };
    let template = site.role.template(site.template);
    let mut hidden = calls::hidden(template).into_iter().peekable();
    for (j, instr) in template.instructions.iter().enumerate() {
        run.instr = InstrId::new(j);
        run.instruction(&instr.kind);
        // What a call does not write may hold anything.
        while let Some((_, b)) = hidden.next_if(|h| h.0 == j) {
            run.held[b.index()] = Held::Undefined;
        }
    }
    let held = site
        .shape
        .externals
        .iter()
        .map(|b| run.held[b.index()])
        .collect();
    Outcome {
        held,
        accumulated: run.accumulated,
        world_sums: run.world_sums,
    }
}

/// An operand that was found good: the variant of its spec. `None` when it is poisoned or
/// what is wrong has been reported.
type Found = Option<u8>;

struct Run<'a, 'r> {
    site: &'a Site<'a>,
    held: Vec<Held>,
    accumulated: Vec<(BufferId, bool)>,
    world_sums: Vec<Vec<u32>>,
    instr: InstrId,
    report: &'r mut Report,
}

impl Run<'_, '_> {
    fn instruction(&mut self, kind: &InstrKind) {
        match kind {
            InstrKind::Compute {
                path,
                kind,
                inputs,
                outputs,
            } => match self.is_of_ring(path, kind) {
                true => self.ring(path, kind, inputs, outputs),
                false if self.combines(inputs) => self.combined(path, kind, (inputs, outputs)),
                false => self.compute(path, kind, inputs, outputs),
            },
            InstrKind::Collective {
                kind, axes, items, ..
            } => self.collective(*kind, axes, items),
            InstrKind::Slice {
                step,
                input,
                output,
            } => {
                let held = match (step, input == output) {
                    (LayoutStep::Slice { .. }, false) => self.stepped(step, *input, *output),
                    _ => self.wrong(
                        "slice",
                        "a slice step to another buffer",
                        format!("{step:?}"),
                    ),
                };
                self.write(&[(*output, held)]);
            }
            InstrKind::Exchange { sends, recvs } => self.exchange(sends, recvs),
            InstrKind::WorldSum { inputs, output } => self.world_sum(inputs, *output),
            InstrKind::Load { kind, output } => {
                let held = match self.site.facts.input(*kind) {
                    Some(v) if self.site.in_microbatch => self.produced(*output, v),
                    _ => self.wrong(
                        "load",
                        "an input of the graph, in a microbatch",
                        format!("{kind:?}"),
                    ),
                };
                self.write(&[(*output, held)]);
            }
            InstrKind::Fill { value, output } => {
                self.write(&[(*output, Held::Filled(value.to_bits()))])
            }
            InstrKind::Copy { input, output } => {
                let held = self.copied(*input, *output);
                self.write(&[(*output, held)]);
            }
        }
    }

    // Reporting and writing.

    fn wrong(
        &mut self,
        rule: &'static str,
        expected: impl Into<String>,
        actual: impl Into<String>,
    ) -> Held {
        let place = instr_place(
            self.site.program,
            self.site.i,
            self.site.template,
            self.instr,
        );
        self.report.add(place, rule, expected, actual);
        Held::Poison
    }

    fn held(&self, b: BufferId) -> Held {
        self.held[b.index()]
    }

    /// Writes all results at once, after everything else on their bytes is lost.
    fn write(&mut self, results: &[(BufferId, Held)]) {
        for (b, _) in results {
            for other in self.site.shape.neighbours.of(*b) {
                self.held[other.index()] = Held::Undefined;
            }
        }
        for (k, &(b, held)) in results.iter().enumerate() {
            if results[..k].iter().any(|r| r.0 == b) {
                self.wrong("results", "a buffer for each result", format!("{b} twice"));
            }
            self.held[b.index()] = held;
        }
    }

    fn poison(&mut self, outputs: &[BufferId]) {
        let results: Vec<(BufferId, Held)> = outputs.iter().map(|&b| (b, Held::Poison)).collect();
        self.write(&results);
    }

    fn name(&self, b: BufferId) -> String {
        format!("buffer {} ({})", b.0, self.site.role.buffer(b).name)
    }

    // Specs.

    fn spec(&self, b: BufferId, variant: u8) -> &ShardingSpec {
        let own = &self.site.role.buffer(b).spec;
        self.site
            .variants
            .get(&b)
            .and_then(|v| v.get(usize::from(variant)))
            .unwrap_or(own)
    }

    fn n_variants(&self, b: BufferId) -> u8 {
        let n = self.site.variants.get(&b).map_or(1, Vec::len);
        u8::try_from(n).unwrap_or(u8::MAX)
    }

    /// Finds the variant of a buffer's spec that equals `spec`.
    fn variant(&self, b: BufferId, spec: &ShardingSpec) -> Option<u8> {
        (0..self.n_variants(b)).find(|&v| self.spec(b, v) == spec)
    }

    fn show(&self, spec: &ShardingSpec) -> String {
        spec.display(&self.site.role.mesh)
    }

    // Operands and results.

    /// Checks that the buffer holds `v`, or a number that is this constant.
    fn operand(&mut self, b: BufferId, v: ValueId) -> Found {
        let facts = self.site.facts;
        let root = facts.root(v);
        let held = self.held(b);
        match held {
            Held::Poison => return None,
            Held::Value { root: r, variant } if r == root => return Some(variant),
            Held::Filled(bits) => {
                let constant = matches!(facts.producer(root).kind, OpKind::Constant { value } if value.to_bits() == bits);
                let buffer = self.site.role.buffer(b);
                if constant
                    && buffer.spec.is_replicated()
                    && facts.type_problem(buffer, v).is_none()
                {
                    return Some(0);
                }
            }
            _ => {}
        }
        let found = format!("{} in {}", held.describe(facts), self.name(b));
        self.wrong("operand", format!("`{}`", facts.name(root)), found);
        None
    }

    /// Checks that the buffer takes `v` whole, with nothing partial; returns the new content.
    fn produced(&mut self, b: BufferId, v: ValueId) -> Held {
        let buffer = self.site.role.buffer(b);
        if let Some((expected, actual)) = self.site.facts.type_problem(buffer, v) {
            return self.wrong("type", expected, format!("{actual} in {}", self.name(b)));
        }
        if !buffer.spec.partial.is_empty() {
            let found = self.show(&buffer.spec);
            return self.wrong(
                "spec",
                "nothing partial",
                format!("{found} in {}", self.name(b)),
            );
        }
        Held::Value {
            root: self.site.facts.root(v),
            variant: 0,
        }
    }
}
