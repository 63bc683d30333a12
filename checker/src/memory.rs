//! Memory: everything lies inside its arena, the arenas fit their memories, and buffers that
//! outlive a template share bytes with nothing that could destroy them.
//!
//! * Persistent and step buffers share bytes with no buffer at all; microbatch buffers not
//!   with each other, unless they are one row of copies that they have by turns: the walk then
//!   takes a copy's contents for lost when another buffer has its turn. A transient may lie where
//!   a microbatch buffer was: the walk then takes that buffer's contents for lost.
//! * A buffer that an exchange sends or fills shares bytes with no buffer at all, because
//!   exchanges run beside other templates and wait by buffer, not by byte.
//! * Transients may share bytes among themselves; that a live one is never overwritten
//!   follows from `walk` in list order and from `hazards` in every other.

use crate::report::{Report, buffer_place, instr_place, role_place};
use ir::plan::Plan;
use ir::program::{ARENA_ALIGN, Buffer, BufferClass, InstrKind, Program, RoleProgram, Space};
use ir::{BufferId, Bytes, InstrId, TemplateId};
use std::collections::{BTreeMap, BTreeSet};

/// Returns the first byte and the end of all copies of a buffer; `None` when they overflow.
pub(crate) fn extent(b: &Buffer) -> Option<(u64, u64)> {
    let stride = b.bytes.checked_next_multiple_of(ARENA_ALIGN)?;
    let last = stride.checked_mul(u64::from(b.slots().max(1) - 1))?;
    let end = b.offset.checked_add(last)?.checked_add(b.bytes)?;
    Some((b.offset, end))
}

/// Lists all pairs of the given buffers that share bytes, in order of offsets.
pub(crate) fn overlapping(
    role: &RoleProgram,
    among: impl Iterator<Item = BufferId>,
) -> Vec<(BufferId, BufferId)> {
    let spans = spans(role, among);
    let mut pairs = Vec::new();
    for (i, a) in spans.iter().enumerate() {
        for b in spans[i + 1..].iter().take_while(|b| b.0 < a.1) {
            pairs.push((a.2, b.2));
        }
    }
    pairs
}

pub(crate) fn check(plan: &Plan, program: &Program, report: &mut Report) {
    for (i, role) in program.roles.iter().enumerate() {
        for space in Space::ALL {
            let usable = match (space, plan.headroom) {
                (Space::Device, Some(_)) => {
                    let seen = plan.cluster.seen_by(role.mesh.devices);
                    seen.planned_bytes(plan.headroom)
                }
                _ => plan.cluster.usable_bytes_of(role.mesh.devices, space),
            };
            let bytes = role.arena(space);
            if bytes > usable {
                let memory = match space {
                    Space::Device => String::new(),
                    other => format!(" of {} memory", other.name()),
                };
                report.add(
                    role_place(i),
                    "memory",
                    format!("at most {} ({usable} bytes){memory}", Bytes(usable)),
                    format!("{} ({bytes} bytes)", Bytes(bytes)),
                );
            }
        }
        let mut inside = true;
        for (j, b) in role.buffers.iter().enumerate() {
            if !b.offset.is_multiple_of(ARENA_ALIGN) {
                report.add(
                    buffer_place(program, i, j),
                    "alignment",
                    format!("a multiple of {ARENA_ALIGN}"),
                    b.offset.to_string(),
                );
            }
            let arena = role.arena(b.space);
            if extent(b).is_none_or(|(_, end)| end > arena) {
                let actual = extent(b).map_or("an offset that overflows".into(), |(s, e)| {
                    format!("{s}..{e}")
                });
                report.add(
                    buffer_place(program, i, j),
                    "arena",
                    format!("inside {arena} bytes"),
                    actual,
                );
                inside = false;
            }
        }
        if inside {
            overlaps(program, i, report);
        }
        own_copies(program, i, report);
    }
}

/// Reports templates that touch two buffers of one row which have the same copy for some
/// microbatch: each would overwrite the other, and the walk, which keeps one content for a copy, is
/// about one of them.
fn own_copies(program: &Program, i: usize, report: &mut Report) {
    let role = &program.roles[i];
    for (t, template) in role.templates.iter().enumerate() {
        // By row, its buffers with the instruction that touches each first.
        let mut touched: BTreeMap<u32, Vec<(BufferId, usize)>> = BTreeMap::new();
        let mut seen: BTreeSet<BufferId> = BTreeSet::new();
        for (j, x) in template.instructions.iter().enumerate() {
            for b in x.reads().into_iter().chain(x.writes()) {
                if let Some(turns) = role.buffer(b).turns.as_ref().filter(|_| seen.insert(b)) {
                    touched.entry(turns.row).or_default().push((b, j));
                }
            }
        }
        for (row, buffers) in touched.into_iter().filter(|(_, of)| of.len() > 1) {
            let Some((copy, m, first, (second, j))) = taken_twice(role, &buffers) else {
                continue;
            };
            report.add(
                instr_place(program, i, TemplateId::new(t), InstrId::new(j)),
                "turns",
                format!("a copy of its own for each buffer of row {row} in a template"),
                format!(
                    "copy {copy} for microbatch {m} in buffer {} and buffer {}",
                    first.0, second.0
                ),
            );
        }
    }
}

/// Says whether two buffers are of one row and never have the same copy for a microbatch.
pub(crate) fn has_own_copies(a: &Buffer, b: &Buffer) -> bool {
    let (Some(of_a), Some(of_b)) = (&a.turns, &b.turns) else {
        return false;
    };
    let place = |x: &Buffer| (x.space, x.offset, x.stride(), x.slots());
    let mut copies = of_a.copies.iter().zip(of_b.copies.iter());
    of_a.row == of_b.row
        && place(a) == place(b)
        && of_a.copies.len() == of_b.copies.len()
        && copies.all(|(x, y)| x != y)
}

/// Finds a copy that two buffers of a row have for one microbatch: the copy, the microbatch, and
/// both buffers, the latter with the instruction beside it.
fn taken_twice(
    role: &RoleProgram,
    buffers: &[(BufferId, usize)],
) -> Option<(u32, u32, BufferId, (BufferId, usize))> {
    let copies = |b: BufferId| role.buffer(b).turns.iter().flat_map(|t| t.copies.iter());
    let mut taken: BTreeMap<(u32, u32), BufferId> = BTreeMap::new();
    for &(b, j) in buffers {
        for (&copy, m) in copies(b).zip(0..) {
            let first = *taken.entry((m, copy)).or_insert(b);
            if first != b {
                return Some((copy, m, first, (b, j)));
            }
        }
    }
    None
}

fn overlaps(program: &Program, i: usize, report: &mut Report) {
    let role = &program.roles[i];
    let exchanged = exchanged(role);
    let class = |b: BufferId| role.buffer(b).class;
    let transient = |b: BufferId| class(b) == BufferClass::Transient;
    // There are many pairs of transients, and none matters here unless an exchange touches it.
    let lasting = (0..role.buffers.len())
        .map(BufferId::new)
        .filter(|&b| !transient(b) || exchanged.contains(&b));
    let mut bad = overlapping(role, lasting);
    let first = first_of_row(role);
    let is_row = |b: BufferId| role.buffer(b).turns.is_some() && !exchanged.contains(&b);
    bad.retain(|&(a, b)| first[a.index()] != first[b.index()] || !is_row(a) || !is_row(b));
    let fragile = |b: BufferId| {
        matches!(class(b), BufferClass::Persistent | BufferClass::Step) || exchanged.contains(&b)
    };
    let ids = || (0..role.buffers.len()).map(BufferId::new);
    let others = spans(
        role,
        ids().filter(|&b| transient(b) && !exchanged.contains(&b)),
    );
    bad.extend(pairs(&spans(role, ids().filter(|&b| fragile(b))), &others));
    for (a, b) in bad {
        let name = |b: BufferId| format!("{} ({:?})", role.buffer(b).name, class(b));
        let actual = format!("the bytes of buffer {} {} too", b.0, name(b));
        report.add(
            buffer_place(program, i, a.index()),
            "overlap",
            "bytes of its own",
            actual,
        );
    }
}

/// First byte, end and buffer; places of different spaces are ordered by space.
type Span = (Place, Place, BufferId);
type Place = (Space, u64);

/// Lists the byte ranges of buffers in order of offsets.
fn spans(role: &RoleProgram, ids: impl Iterator<Item = BufferId>) -> Vec<Span> {
    let mut spans: Vec<Span> = ids
        .filter_map(|b| {
            let buffer = role.buffer(b);
            extent(buffer).map(|(s, e)| ((buffer.space, s), (buffer.space, e), b))
        })
        .collect();
    spans.sort_unstable();
    spans
}

/// Finds pairs that share bytes, one buffer of each list. The buffers of the first list are
/// disjoint or one row, or else that is reported already; so their ends ascend as their offsets do,
/// and a search by offset finds all pairs.
fn pairs(lasting: &[Span], transients: &[Span]) -> Vec<(BufferId, BufferId)> {
    let mut found = Vec::new();
    for t in transients {
        let from = lasting.partition_point(|l| l.1 <= t.0);
        found.extend(
            lasting[from..]
                .iter()
                .take_while(|l| l.0 < t.1)
                .map(|l| (l.2, t.2)),
        );
    }
    found
}

fn exchanged(role: &RoleProgram) -> BTreeSet<BufferId> {
    let mut found = BTreeSet::new();
    for instr in role.templates.iter().flat_map(|t| &t.instructions) {
        if let InstrKind::Exchange { .. } = instr.kind {
            found.extend(instr.reads());
            found.extend(instr.writes());
        }
    }
    found
}

/// Returns, for each buffer, the first one of its row of shared copies: itself where it is in none,
/// or not at the place, of the size or of the number of copies of that one.
pub(crate) fn first_of_row(role: &RoleProgram) -> Vec<BufferId> {
    let mut rows: BTreeMap<u32, BufferId> = BTreeMap::new();
    let of = |(i, b): (usize, &Buffer)| {
        let own = BufferId::new(i);
        let Some(turns) = &b.turns else { return own };
        let first = *rows.entry(turns.row).or_insert(own);
        let same = |x: &Buffer| (x.space, x.offset, x.stride(), x.slots());
        match same(role.buffer(first)) == same(b) {
            true => first,
            false => own,
        }
    };
    role.buffers.iter().enumerate().map(of).collect()
}

/// Finds buffers whose bytes others use too: transients, and microbatch buffers on such bytes.
pub(crate) fn shared_bytes(role: &RoleProgram) -> BTreeSet<BufferId> {
    let transients: Vec<BufferId> = (0..role.buffers.len())
        .map(BufferId::new)
        .filter(|&b| role.buffer(b).class == BufferClass::Transient)
        .collect();
    let lost = lost_to_transients(role, &transients);
    transients.into_iter().chain(lost).collect()
}

/// Finds the microbatch buffers that share bytes with any of these transients.
pub(crate) fn lost_to_transients(role: &RoleProgram, transients: &[BufferId]) -> Vec<BufferId> {
    let lasting = spans(
        role,
        (0..role.buffers.len())
            .map(BufferId::new)
            .filter(|&b| matches!(role.buffer(b).class, BufferClass::PerMicrobatch { .. })),
    );
    let mut lost: Vec<BufferId> = pairs(&lasting, &spans(role, transients.iter().copied()))
        .into_iter()
        .map(|p| p.0)
        .collect();
    lost.sort_unstable();
    lost.dedup();
    lost
}
