//! The abstract interpretation; the lattice and transfer functions are in the crate's header.
//!
//! `trace` walks a role's trace and keeps what every copy holds; `template` interprets one
//! template on what its buffers hold on entry; `held` is the lattice. Here: the roles, and
//! what only all roles together show.

mod held;
mod template;
mod trace;

use crate::facts::Facts;
use crate::report::{Report, role_place};
use crate::side_by_side::each;
use ir::collective::CollectiveKind;
use ir::program::{InstrKind, Program, RoleProgram};
use ir::{AxisId, BufferId, ShardingSpec};
use std::collections::BTreeMap;

/// For each world sum of a role, in order, the entries that the role gives to it.
type WorldSums = Vec<Vec<u32>>;

pub(crate) fn check(facts: &Facts<'_>, program: &Program, report: &mut Report) {
    let sums: Vec<WorldSums> = each(program.roles.len(), report, |i, report| {
        trace::walk(facts, program, i, report)
    });
    world_sums(facts, &sums, report);
    owners(facts, program, report);
    let has =
        |of: fn(&RoleProgram) -> Option<BufferId>| program.roles.iter().any(|r| of(r).is_some());
    let training = facts.training;
    for (name, is_made, found) in [
        ("loss", true, has(|r| r.loss)),
        (
            "grad_norm",
            training.grad_norm.is_some(),
            has(|r| r.grad_norm),
        ),
    ] {
        if is_made && !found {
            report.add(
                "program",
                "result",
                format!("a role that has the {name}"),
                "none",
            );
        }
    }
}

/// Checks that every operand of the global norm is contributed once to every world sum.
fn world_sums(facts: &Facts<'_>, sums: &[WorldSums], report: &mut Report) {
    let Some(norm) = facts.norm else { return };
    let n = facts.graph.op(norm).inputs.len();
    let rounds = sums.iter().map(Vec::len).max().unwrap_or(0);
    for k in 0..rounds {
        let mut times = vec![0u32; n];
        for (i, role) in sums.iter().enumerate() {
            match role.get(k) {
                None => report.add(
                    role_place(i),
                    "world_sum",
                    format!("{rounds} world sums, as elsewhere"),
                    role.len().to_string(),
                ),
                Some(entries) => {
                    for &e in entries {
                        times.get_mut(e as usize).into_iter().for_each(|t| *t += 1);
                    }
                }
            }
        }
        for (e, &t) in times.iter().enumerate().filter(|(_, t)| **t != 1) {
            let name = facts.name(facts.graph.op(norm).inputs[e]);
            report.add(
                format!("world sum {k} entry {e} ({name})"),
                "world_sum",
                "one contribution",
                t.to_string(),
            );
        }
    }
}

/// Checks that a layer's state has one owner, and a world state stands on every stage that uses it.
fn owners(facts: &Facts<'_>, program: &Program, report: &mut Report) {
    let mut owners: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (i, role) in program.roles.iter().enumerate() {
        role.states
            .iter()
            .for_each(|s| owners.entry(&s.path).or_default().push(i));
    }
    for s in &facts.training.states {
        let at = owners.get(s.path.as_str()).map_or(&[][..], Vec::as_slice);
        let world = facts.producer(s.read).layer.is_none();
        let twice = at.windows(2).any(|w| w[0] == w[1]);
        if at.is_empty() || twice || (at.len() > 1 && !world) {
            report.add(
                format!("state {}", s.path),
                "state",
                "one owner",
                format!("stages {at:?}"),
            );
        }
    }
}

/// The specs that a buffer's contents may have: its own, in which they are made, and what
/// all-reduces in place leave of it, with fewer partial axes.
type Variants = BTreeMap<BufferId, Vec<ShardingSpec>>;

/// The most specs of one buffer; no sequence of all-reduces over a mesh needs as many.
const MAX_VARIANTS: usize = 64;

fn variants(role: &RoleProgram) -> Variants {
    let mut in_place: BTreeMap<BufferId, Vec<Vec<AxisId>>> = BTreeMap::new();
    for instr in role.templates.iter().flat_map(|t| &t.instructions) {
        if let InstrKind::Collective {
            kind: CollectiveKind::AllReduce(_),
            axes,
            items,
            ..
        } = &instr.kind
        {
            for item in items.iter().filter(|i| i.input == i.output) {
                in_place.entry(item.input).or_default().push(axes.clone());
            }
        }
    }
    in_place
        .into_iter()
        .map(|(b, groups)| (b, closure(&role.buffer(b).spec, &groups)))
        .collect()
}

fn closure(own: &ShardingSpec, groups: &[Vec<AxisId>]) -> Vec<ShardingSpec> {
    let mut specs = vec![own.clone()];
    let mut next = 0;
    while next < specs.len() && specs.len() < MAX_VARIANTS {
        for axes in groups {
            let mut reduced = specs[next].clone();
            reduced.partial.retain(|a, _| !axes.contains(a));
            if !specs.contains(&reduced) {
                specs.push(reduced);
            }
        }
        next += 1;
    }
    specs
}
