//! Is the program well-formed? Every index names something, every size is possible. What
//! comes after relies on it; so nothing else is checked when this fails.

use crate::facts::Facts;
use crate::plan::mesh_problem;
use crate::ranges::{MAX_LEN, local_elements, padded};
use crate::report::{Report, buffer_place, instr_place, role_place, slot_place};
use ir::plan::Plan;
use ir::program::{
    BufferClass, Event, InstrKind, MAX_STREAMS, Program, RoleProgram, Space, Stream, TemplateKind,
};
use ir::reshard::{LayoutStep, Pieces};
use ir::schedule::Schedule;
use ir::{AxisId, InstrId, LogicalMesh, OpKind, ReduceKind, Region, ShardingSpec, TemplateId};
use std::collections::{BTreeMap, BTreeSet};

/// The most copies of a role's buffers that are tracked.
const MAX_COPIES: u64 = 1 << 26;

pub(crate) fn check(plan: &Plan, facts: &Facts<'_>, program: &Program, report: &mut Report) {
    whole(plan, facts, program, report);
    if !report.is_empty() {
        return;
    }
    let stages = stages_of_layers(plan, facts.graph.layers.len());
    let schedule = plan.schedule.schedule();
    for (i, role) in program.roles.iter().enumerate() {
        buffers(program, i, role, report);
        streams(i, role, report);
        named_buffers(facts, i, role, report);
        passes(&stages, facts, program, i, &*schedule, report);
        for (t, template) in role.templates.iter().enumerate() {
            for j in 0..template.instructions.len() {
                instruction(program, i, TemplateId::new(t), InstrId::new(j), report);
            }
        }
        trace(program, i, role, report);
    }
    transfers(program, report);
}

fn whole(plan: &Plan, facts: &Facts<'_>, program: &Program, report: &mut Report) {
    let mut same = |what: &str, expected: String, actual: String| {
        if expected != actual {
            report.add(
                "program",
                "plan",
                format!("{what} {expected}, as in the plan"),
                actual,
            );
        }
    };
    same(
        "meshes",
        plan.n_meshes().to_string(),
        program.roles.len().to_string(),
    );
    same(
        "route",
        plan.schedule.route().name().into(),
        program.route.name().into(),
    );
    same(
        "microbatches",
        plan.n_microbatches.to_string(),
        program.n_microbatches.to_string(),
    );
    same(
        "microbatch",
        plan.microbatch.to_string(),
        program.microbatch.to_string(),
    );
    let samples = program
        .microbatch
        .checked_mul(u64::from(program.n_microbatches));
    if samples != Some(plan.train.global_batch) || samples == Some(0) {
        let actual = format!("{} x {}", program.n_microbatches, program.microbatch);
        report.add(
            "program",
            "batch",
            format!("{} samples a step", plan.train.global_batch),
            actual,
        );
    }
    for v in facts.graph.values() {
        if facts.lens(&v.ty).iter().any(|&n| n == 0 || n > MAX_LEN) {
            report.add(
                "training graph",
                "size",
                format!("dims from 1 to {MAX_LEN}"),
                format!("{}", v.ty),
            );
        }
    }
    for (i, (role, stage)) in program.roles.iter().zip(&plan.stages).enumerate() {
        if role.stage.index() != i || role.mesh != stage.mesh {
            report.add(
                role_place(i),
                "plan",
                format!("the role of stage {i} on its mesh"),
                format!("{} on {:?}", role.stage, role.mesh),
            );
        } else if let Some((expected, actual)) = mesh_problem(&role.mesh, plan.cluster.n_devices())
        {
            report.add(role_place(i), "mesh", expected, actual);
        }
        if (role.trace.len() as u64) < u64::from(program.n_microbatches) {
            report.add(
                role_place(i),
                "coverage",
                format!("at least {} slots", program.n_microbatches),
                role.trace.len().to_string(),
            );
        }
    }
}

/// Returns the stage of every layer, as far as the plan lists layers in order.
fn stages_of_layers(plan: &Plan, n_layers: usize) -> Vec<usize> {
    let stages = plan.stages.iter().enumerate();
    let runs = stages.flat_map(|(i, s)| s.runs.iter().map(move |r| (i, r.count as usize)));
    let all = runs.flat_map(|(i, count)| std::iter::repeat_n(i, count));
    all.take(n_layers).collect()
}

/// Passes are the schedule's; they say of which of the role's stages they are, and play ops of
/// its layers in that pass.
fn passes(
    stages: &[usize],
    facts: &Facts<'_>,
    program: &Program,
    i: usize,
    schedule: &dyn Schedule,
    report: &mut Report,
) {
    for (t, template) in program.roles[i].templates.iter().enumerate() {
        let pass = template.kind.pass();
        let most = pass.map_or(1, |_| schedule.virtual_stages());
        if template.chunk >= most {
            report.add(
                format!("{} template {t}", role_place(i)),
                "chunk",
                format!("one of {most} stages of the mesh"),
                template.chunk.to_string(),
            );
            continue;
        }
        let Some(pass) = pass else { continue };
        let own = schedule
            .route()
            .stage_of(i, template.chunk as usize, program.roles.len());
        for (j, instr) in template.instructions.iter().enumerate() {
            let InstrKind::Compute { path, kind, .. } = &instr.kind else {
                continue;
            };
            // What combines members' values is a part of a layout change, which stands at any use.
            if combines_members(kind) {
                continue;
            }
            let Some(op) = facts.graph.find(path).map(|id| facts.graph.op(id)) else {
                continue;
            };
            let mut bad = |rule, expected: String, actual: String| {
                let place = instr_place(program, i, TemplateId::new(t), InstrId::new(j));
                report.add(place, rule, expected, actual);
            };
            let stage = op.layer.and_then(|l| stages.get(l.index()));
            if let Some(&stage) = stage.filter(|s| **s != own) {
                let actual = format!("`{path}` of stage {stage}");
                bad("chunk", format!("ops of stage {own}"), actual);
            }
            let slot = schedule.slot_of(op.pass);
            if slot != pass && op.region == Region::Microbatch {
                let expected = format!("in {}", TemplateKind::from(slot).name());
                bad("pass", expected, format!("in {}", template.kind.name()));
            }
        }
    }
}

/// Says whether an op combines the values of a group's members; no graph has an op of this kind.
fn combines_members(kind: &OpKind) -> bool {
    matches!(kind, OpKind::Reduce { kind, .. } if *kind == ReduceKind::LogSumExp)
}

/// Says what is wrong with a spec for a tensor of these lengths.
fn spec_problem(spec: &ShardingSpec, lens: &[u64], mesh: &LogicalMesh) -> Option<String> {
    if spec.dims.len() != lens.len() {
        return Some(format!("a spec of {} dims", spec.dims.len()));
    }
    if let Some(p) = spec.problems(mesh).into_iter().next() {
        return Some(p);
    }
    if lens.iter().any(|&n| n == 0 || n > MAX_LEN) || spec.dims.iter().any(|d| d.unit > MAX_LEN) {
        return Some(format!(
            "lengths {lens:?}, units {:?}",
            spec.dims.iter().map(|d| d.unit).collect::<Vec<_>>()
        ));
    }
    None
}

fn buffers(program: &Program, i: usize, role: &RoleProgram, report: &mut Report) {
    let mut copies = 0u64;
    let mut counted: BTreeSet<u32> = BTreeSet::new();
    let mut of_row: BTreeMap<u32, u32> = BTreeMap::new();
    for turns in role.buffers.iter().filter_map(|b| b.turns.as_ref()) {
        *of_row.entry(turns.row).or_default() += 1;
    }
    for (j, b) in role.buffers.iter().enumerate() {
        let place = || buffer_place(program, i, j);
        if let Some(p) = spec_problem(&b.spec, &b.lens, &role.mesh) {
            report.add(
                place(),
                "spec",
                format!(
                    "a spec of {} dims, lengths from 1 to {MAX_LEN}",
                    b.lens.len()
                ),
                p,
            );
            continue;
        }
        let possible = |p: &Pieces| p.dim < b.lens.len() && (1..=MAX_LEN).contains(&p.len);
        if let Some(p) = b.pieces.filter(|p| !possible(p)) {
            let expected = format!(
                "pieces of 1 to {MAX_LEN} along one of {} dims",
                b.lens.len()
            );
            report.add(place(), "pieces", expected, format!("{p:?}"));
            continue;
        }
        let elements = local_elements(&b.lens, &b.spec, &role.mesh);
        let elements = match b.pieces {
            None => elements,
            Some(p) => elements.and_then(|n| {
                let one = n / padded(b.lens[p.dim], &b.spec.dims[p.dim], &role.mesh).max(1);
                one.checked_mul(p.len)?.checked_mul(u64::from(p.n))
            }),
        };
        let bytes = elements.and_then(|n| n.checked_mul(b.dtype.bytes()));
        if bytes != Some(b.bytes) || b.bytes > MAX_LEN {
            let expected =
                bytes.map_or(format!("at most {MAX_LEN} bytes"), |n| format!("{n} bytes"));
            report.add(place(), "bytes", expected, b.bytes.to_string());
        }
        // Those of a row are there once.
        if b.turns.as_ref().is_none_or(|t| counted.insert(t.row)) {
            copies = copies.saturating_add(u64::from(b.slots()));
        }
        // Copies by turns are as many as the microbatches of all buffers of the row, at most.
        let members = b.turns.as_ref().and_then(|t| of_row.get(&t.row));
        let most = program
            .n_microbatches
            .saturating_mul(members.copied().unwrap_or(1));
        if let BufferClass::PerMicrobatch { slots } = b.class
            && (slots == 0 || slots > most)
        {
            report.add(
                place(),
                "slots",
                format!("1 to {most} copies"),
                slots.to_string(),
            );
        }
        if let Some(turns) = &b.turns {
            let is_each = turns.copies.len() == program.n_microbatches as usize;
            let most = turns.copies.iter().max().copied();
            if !is_each || most.is_some_and(|copy| copy >= b.slots()) {
                report.add(
                    place(),
                    "turns",
                    format!(
                        "for {} microbatches one of {} copies each",
                        program.n_microbatches,
                        b.slots()
                    ),
                    format!("{} numbers up to {most:?}", turns.copies.len()),
                );
            }
            if !matches!(b.class, BufferClass::PerMicrobatch { .. }) {
                let expected = "copies by turns for a buffer per microbatch alone";
                report.add(place(), "turns", expected, format!("{:?}", b.class));
            }
        }
    }
    if copies > MAX_COPIES {
        report.add(
            role_place(i),
            "slots",
            format!("at most {MAX_COPIES} copies"),
            copies.to_string(),
        );
    }
}

fn streams(i: usize, role: &RoleProgram, report: &mut Report) {
    let distinct: BTreeSet<&Stream> = role.streams.iter().collect();
    if distinct.len() != role.streams.len() || role.streams.len() > MAX_STREAMS {
        report.add(
            role_place(i),
            "streams",
            format!("at most {MAX_STREAMS} streams, each once"),
            format!("{} of {} differ", distinct.len(), role.streams.len()),
        );
    }
}

fn named_buffers(facts: &Facts<'_>, i: usize, role: &RoleProgram, report: &mut Report) {
    let states = role.states.iter().map(|s| (s.path.as_str(), s.buffer));
    let results = [("loss", role.loss), ("grad_norm", role.grad_norm)]
        .into_iter()
        .filter_map(|(n, b)| Some((n, b?)));
    for (name, b) in states.chain(results) {
        if b.index() >= role.buffers.len() {
            report.add(
                format!("{} {name}", role_place(i)),
                "index",
                format!("one of {} buffers", role.buffers.len()),
                b.to_string(),
            );
        }
    }
    for s in &role.states {
        let known = facts.training.states.iter().find(|k| k.path == s.path);
        if known.is_none_or(|k| k.role != s.role || k.param != s.param) {
            let expected = known.map_or("a state of the training graph".into(), |k| {
                format!("{:?} of `{}`", k.role, k.param)
            });
            report.add(
                format!("{} {}", role_place(i), s.path),
                "state",
                expected,
                format!("{:?} of `{}`", s.role, s.param),
            );
        }
    }
}

fn instruction(program: &Program, i: usize, t: TemplateId, j: InstrId, report: &mut Report) {
    let role = &program.roles[i];
    let template = role.template(t);
    let instr = &template.instructions[j.index()];
    let mut bad = |rule, expected: String, actual: String| {
        report.add(instr_place(program, i, t, j), rule, expected, actual)
    };
    for b in instr.reads().into_iter().chain(instr.writes()) {
        if b.index() >= role.buffers.len() {
            bad(
                "index",
                format!("one of {} buffers", role.buffers.len()),
                b.to_string(),
            );
        }
    }
    for d in instr.deps.iter().filter(|d| **d >= j) {
        bad("deps", format!("instructions before {j}"), d.to_string());
    }
    for event in &instr.events {
        let known = match event {
            Event::Drained(stream) => stream.index() < role.streams.len(),
            Event::Done {
                template,
                instruction,
                ..
            } => (role.templates.get(template.index()))
                .is_some_and(|t| instruction.index() < t.instructions.len()),
        };
        if !known {
            bad(
                "events",
                "a stream or an instruction of the role".into(),
                format!("{event:?}"),
            );
        }
    }
    let n_axes = role.mesh.axes.len();
    let mut axes: Vec<AxisId> = Vec::new();
    match &instr.kind {
        InstrKind::Collective {
            axes: group, items, ..
        } => {
            axes.extend(group);
            axes.extend(items.iter().flat_map(|item| item.step.axes()));
            if items.is_empty() || group.is_empty() {
                bad(
                    "collective",
                    "a group and buffers".into(),
                    format!("{} axes, {} buffers", group.len(), items.len()),
                );
            }
        }
        InstrKind::Slice { step, .. } => axes.extend(LayoutStep::axes(step)),
        InstrKind::Exchange { sends, recvs } => {
            for (x, _) in sends.iter().chain(recvs) {
                if x.index() >= program.transfers.len() {
                    bad(
                        "index",
                        format!("one of {} transfers", program.transfers.len()),
                        x.to_string(),
                    );
                }
            }
        }
        _ => {}
    }
    for a in axes.iter().filter(|a| a.index() >= n_axes) {
        bad("index", format!("one of {n_axes} axes"), a.to_string());
    }
    let exchanges = matches!(instr.kind, InstrKind::Exchange { .. });
    if exchanges != (template.kind == TemplateKind::Exchange) {
        bad(
            "template",
            "exchanges in exchange templates, and nothing else there".into(),
            format!("in a template of kind {}", template.kind.name()),
        );
    }
    if !matches!(instr.kind, InstrKind::Copy { .. }) {
        let buffers = instr.reads().into_iter().chain(instr.writes());
        let elsewhere = buffers
            .filter_map(|b| role.buffers.get(b.index()))
            .find(|b| b.space != Space::Device);
        if let Some(b) = elsewhere {
            bad(
                "space",
                "device memory, but for copies".into(),
                format!("{} in {} memory", b.name, b.space.name()),
            );
        }
    }
    // Kernels may run on any stream but that of transfers; what meets others keeps its order.
    let stream = role.streams.get(instr.stream.index());
    let own = Stream::of(&instr.kind);
    let fits = match own {
        Stream::Kernels => stream.is_some_and(|s| *s != Stream::Transfers),
        _ => stream == Some(&own),
    };
    if !fits {
        let name = |s: &Stream| s.name(&role.mesh);
        bad(
            "stream",
            format!("the stream of {}", name(&own)),
            stream.map_or("none".into(), name),
        );
    }
}

fn trace(program: &Program, i: usize, role: &RoleProgram, report: &mut Report) {
    for (k, slot) in role.trace.iter().enumerate() {
        let Some(template) = role.templates.get(slot.template.index()) else {
            report.add(
                slot_place(program, i, k),
                "index",
                format!("one of {} templates", role.templates.len()),
                slot.template.to_string(),
            );
            continue;
        };
        let fits = match template.kind {
            TemplateKind::StepBegin | TemplateKind::StepEnd => slot.microbatch.is_none(),
            TemplateKind::Exchange => true,
            _ => slot.microbatch.is_some(),
        };
        if !fits || slot.microbatch.is_some_and(|m| m >= program.n_microbatches) {
            let expected = format!(
                "a microbatch below {} in passes alone",
                program.n_microbatches
            );
            report.add(
                slot_place(program, i, k),
                "microbatch",
                expected,
                format!("{:?}", slot.microbatch),
            );
        }
    }
}

fn transfers(program: &Program, report: &mut Report) {
    let n = program.roles.len();
    for (k, x) in program.transfers.iter().enumerate() {
        let place = format!("transfer {k} ({})", x.value);
        if x.from.index() >= n || x.to.index() >= n || x.from == x.to {
            report.add(
                place,
                "index",
                format!("two of {n} stages"),
                format!("{} to {}", x.from, x.to),
            );
            continue;
        }
        for (stage, spec) in [(x.from, &x.from_spec), (x.to, &x.to_spec)] {
            let problem = spec_problem(spec, &x.lens, &program.roles[stage.index()].mesh);
            let problem =
                problem.or_else(|| (!spec.partial.is_empty()).then(|| "partial axes".to_string()));
            if let Some(p) = problem {
                report.add(
                    place.clone(),
                    "spec",
                    format!("a spec on the mesh of {stage}, nothing partial"),
                    p,
                );
            }
        }
    }
}
