//! Layout changes and copies: the value stays, the spec changes.

use super::Run;
use crate::walk::held::Held;
use ir::collective::CollectiveKind;
use ir::program::{CollectiveItem, TemplateKind};
use ir::reshard::LayoutStep;
use ir::{AxisId, BufferId, DimSharding, OpKind, ShardingSpec, ValueId};

impl Run<'_, '_> {
    pub(super) fn collective(
        &mut self,
        kind: CollectiveKind,
        axes: &[AxisId],
        items: &[CollectiveItem],
    ) {
        let ascending = axes.windows(2).all(|w| w[0] < w[1]);
        let mut results = Vec::with_capacity(items.len());
        for (k, item) in items.iter().enumerate() {
            let held = if item.step.axes() != axes || !ascending {
                self.wrong(
                    "collective",
                    format!("the step's group {:?}, ascending", item.step.axes()),
                    format!("{axes:?}"),
                )
            } else if item.input == item.output && !matches!(kind, CollectiveKind::AllReduce(_)) {
                self.wrong(
                    "in_place",
                    "another buffer for the result",
                    self.name(item.output),
                )
            } else if items
                .iter()
                .enumerate()
                .any(|(j, other)| j != k && other.input == item.output)
            {
                self.wrong(
                    "in_place",
                    "a result that is no other item's operand",
                    self.name(item.output),
                )
            } else {
                self.reduced(kind, item)
            };
            results.push((item.output, held));
        }
        self.write(&results);
    }

    fn reduced(&mut self, kind: CollectiveKind, item: &CollectiveItem) -> Held {
        let variant = match self.held(item.input) {
            Held::Value { variant, .. } => Some(variant),
            Held::Part { .. } => Some(0),
            _ => None,
        };
        if let Some(variant) = variant {
            let before = self.spec(item.input, variant).clone();
            let expected = item.step.collective(&before);
            if expected != Some(kind) {
                return self.wrong("collective", format!("{expected:?}"), format!("{kind:?}"));
            }
            if let (LayoutStep::AllReduce { axes }, CollectiveKind::AllGather) = (&item.step, kind)
            {
                return self.gathered(axes, &before, item);
            }
        }
        self.stepped(&item.step, item.input, item.output)
    }

    /// Checks that the partial values of a group's members come to stand one after the other, along
    /// a dim before those of the value.
    fn gathered(&mut self, axes: &[AxisId], before: &ShardingSpec, item: &CollectiveItem) -> Held {
        let role = self.site.role;
        let (from, to) = (role.buffer(item.input), role.buffer(item.output));
        let kind = axes.first().and_then(|a| before.partial.get(a)).copied();
        let held = self.held(item.input);
        let (Some(kind), Held::Value { root, .. }) = (kind, held) else {
            let found = format!(
                "{} in {}",
                held.describe(self.site.facts),
                self.name(item.input)
            );
            return self.wrong("operand", "a partial value", found);
        };
        let Some(whole) = self.after(&item.step, before) else {
            return Held::Poison;
        };
        let n: u64 = axes.iter().map(|a| role.mesh.size(*a)).product();
        let mut spec = whole;
        spec.dims.insert(0, DimSharding::whole());
        let lens = [&[n], &from.lens[..]].concat();
        if from.dtype != to.dtype || lens != to.lens || spec != to.spec {
            let shown = |lens: &[u64], spec| format!("{lens:?} {}", self.show(spec));
            let expected = format!("{}{}", from.dtype.name(), shown(&lens, &spec));
            let found = format!("{}{}", to.dtype.name(), shown(&to.lens, &to.spec));
            let found = format!("{found} in {}", self.name(item.output));
            return self.wrong("type", expected, found);
        }
        Held::Members { root, kind }
    }

    /// Whether an op combines what members have gathered.
    pub(super) fn combines(&self, inputs: &[BufferId]) -> bool {
        matches!(inputs, [b] if matches!(self.held(*b), Held::Members { .. }))
    }

    /// The content of the result of an op that combines the members' values.
    pub(super) fn combined(
        &mut self,
        path: &str,
        op: &OpKind,
        (inputs, outputs): (&[BufferId], &[BufferId]),
    ) {
        let held = self.combination(path, op, inputs, outputs);
        match outputs {
            [output] => self.write(&[(*output, held)]),
            _ => self.poison(outputs),
        }
    }

    fn combination(
        &mut self,
        path: &str,
        op: &OpKind,
        inputs: &[BufferId],
        outputs: &[BufferId],
    ) -> Held {
        let (&[input], &[output]) = (inputs, outputs) else {
            return self.wrong("arity", "one result", format!("{}", outputs.len()));
        };
        let Held::Members { root, kind } = self.held(input) else {
            return Held::Poison;
        };
        let expected = OpKind::Reduce {
            kind,
            dims: vec![0],
        };
        let facts = self.site.facts;
        let of = facts.graph.find(path).map(|id| facts.graph.op(id));
        let is_its = of.is_some_and(|op| op.outputs.iter().any(|&v| facts.root(v) == root));
        if *op != expected || !is_its {
            let expected = format!("{expected:?} of `{}`", facts.name(root));
            return self.wrong("op", expected, format!("{op:?} of `{path}`"));
        }
        let (from, to) = (self.site.role.buffer(input), self.site.role.buffer(output));
        let mut spec = from.spec.clone();
        spec.dims.remove(0);
        if from.dtype != to.dtype || from.lens[1..] != to.lens[..] || spec != to.spec {
            let shown = |lens: &[u64], spec| format!("{lens:?} {}", self.show(spec));
            let expected = format!("{}{}", from.dtype.name(), shown(&from.lens[1..], &spec));
            let found = format!("{}{}", to.dtype.name(), shown(&to.lens, &to.spec));
            let found = format!("{found} in {}", self.name(output));
            return self.wrong("type", expected, found);
        }
        Held::Value { root, variant: 0 }
    }

    /// The spec after a step; `None`, with the reason reported, where it does not apply.
    fn after(&mut self, step: &LayoutStep, before: &ShardingSpec) -> Option<ShardingSpec> {
        let after = step.apply(before);
        if after.is_none() {
            let shown = self.show(before);
            self.wrong(
                "step",
                format!("a step that applies to {shown}"),
                format!("{step:?}"),
            );
        }
        after
    }

    /// Returns the content that a layout step leaves in its output.
    pub(super) fn stepped(&mut self, step: &LayoutStep, input: BufferId, output: BufferId) -> Held {
        let (root, variant) = match self.held(input) {
            Held::Value { root, variant } => (root, variant),
            Held::Part { root, .. } if matches!(step, LayoutStep::Shift { .. }) => (root, 0),
            Held::Poison => return Held::Poison,
            held => {
                let found = format!("{} in {}", held.describe(self.site.facts), self.name(input));
                return self.wrong("operand", "a value", found);
            }
        };
        if let LayoutStep::Shift { axis, dim, turns } = *step {
            let dims = &self.spec(input, variant).dims;
            let next = dims.get(dim).map_or(1, |d| d.turns.saturating_add(1));
            let ranks = self.site.role.mesh.axes[axis.index()].size;
            if turns != next % ranks.max(1) {
                let expected = format!("{} places of a ring of {ranks}", next % ranks.max(1));
                return self.wrong("step", expected, format!("{step:?}"));
            }
        }
        let before = self.spec(input, variant).clone();
        let Some(after) = self.after(step, &before) else {
            return Held::Poison;
        };
        match (self.lands(root, &after, input, output), self.held(input)) {
            (Held::Value { .. }, part @ Held::Part { .. }) => part,
            (held, _) => held,
        }
    }

    /// Checks that a value of `input`'s type now lies as `spec` in `output`.
    fn lands(
        &mut self,
        root: ValueId,
        spec: &ShardingSpec,
        input: BufferId,
        output: BufferId,
    ) -> Held {
        let (from, to) = (self.site.role.buffer(input), self.site.role.buffer(output));
        if from.dtype != to.dtype || from.lens != to.lens {
            let expected = format!("{}{:?}", from.dtype.name(), from.lens);
            return self.wrong(
                "type",
                expected,
                format!("{}{:?} in {}", to.dtype.name(), to.lens, self.name(output)),
            );
        }
        let variant = if input == output {
            self.variant(output, spec)
        } else {
            (to.spec == *spec).then_some(0)
        };
        let root = match self.makes_version(output) {
            true => self.site.facts.moved_forward(root),
            false => root,
        };
        match variant {
            Some(variant) => Held::Value { root, variant },
            None => {
                let (expected, found) = (self.show(spec), self.show(&to.spec));
                self.wrong(
                    "spec",
                    expected,
                    format!("{found} in {}", self.name(output)),
                )
            }
        }
    }

    /// Says whether a state that is moved to a buffer becomes the version of the microbatch at hand.
    /// A backward pass moves states for their updates alone.
    fn makes_version(&self, output: BufferId) -> bool {
        let kind = self.site.role.template(self.site.template).kind;
        let is_own = self.site.role.states.iter().any(|s| s.buffer == output);
        kind == TemplateKind::Forward && !is_own
    }

    pub(super) fn copied(&mut self, input: BufferId, output: BufferId) -> Held {
        if input == output {
            return self.wrong("in_place", "another buffer for the copy", self.name(output));
        }
        match self.held(input) {
            Held::Value { root, variant } => {
                let spec = self.spec(input, variant).clone();
                self.lands(root, &spec, input, output)
            }
            Held::Filled(bits) => {
                let (from, to) = (self.site.role.buffer(input), self.site.role.buffer(output));
                match from.dtype == to.dtype && from.lens == to.lens && from.spec == to.spec {
                    true => Held::Filled(bits),
                    false => self.wrong(
                        "type",
                        "a buffer of the same type and spec",
                        self.name(output),
                    ),
                }
            }
            Held::Poison => Held::Poison,
            held => {
                let found = format!("{} in {}", held.describe(self.site.facts), self.name(input));
                self.wrong("operand", "a value", found)
            }
        }
    }
}
