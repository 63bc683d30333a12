//! Copies that the stages of a mesh use by turns.
//!
//! Interleaved stages have most microbatches in flight at different times. On the first of four
//! meshes with five stages each, the stages hold 8, 8, 7, 4 and 4 microbatches at most, 31
//! together, but never more than 23 at once. So buffers of several stages that are of one size,
//! and live from one pass to another, are a **row**: a microbatch takes a free copy of the row in
//! the first slot that uses its buffer, the one with the lowest number, and gives it back behind
//! the last.
//!
//! Two stages of the first of two meshes, four microbatches: stage 0 holds all four at once, and
//! stage 1 two, but both together never more than five.
//!
//! ```text
//! 0F0 0F1 1F0 1F1 0F2 1B0 0F3 1B1 1F2 0B0 1F3 0B1 1B2 1B3 0B2 0B3
//!
//! copy 0    0F0 to 0B0, 1F3 to 1B3        copy 3    1F1 to 1B1, 1F2 to 1B2
//! copy 1    0F1 to 0B1                    copy 4    0F2 to 0B2
//! copy 2    1F0 to 1B0, 0F3 to 0B3
//! ```
//!
//! A buffer that an exchange sends or fills has copies of its own: exchanges run beside other slots
//! and wait for the microbatch that had the copy before, which by turns would be another one each
//! time. All other slots of a role follow each other, so nothing has to wait for a turn.
//!
//! A row has one buffer of each stage: the first of a size with the others' first, and so on. That
//! is the least where all stages keep as many buffers of a size. Where they do not, because their
//! layers recompute unlike amounts or one has a layer more, the peaks of unlike rows fall on unlike
//! moments; then all buffers of a size are one row, if that needs fewer copies. It never needs more
//! than are in use at once, since copies of one size are always interchangeable.

use crate::place::{SlotCounts, lifetimes};
use ir::program::{BufferClass, RoleProgram, Space, Turns};
use ir::schedule::PassKind;
use ir::{BufferId, TemplateId};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::sync::Arc;

/// The templates that touch each buffer, ascending.
pub(crate) fn touched_by(role: &RoleProgram) -> Vec<Vec<TemplateId>> {
    let mut by: Vec<Vec<TemplateId>> = vec![Vec::new(); role.buffers.len()];
    for (t, template) in role.templates.iter().enumerate() {
        let t = TemplateId::new(t);
        let all = template.instructions.iter();
        for b in all.flat_map(|i| i.reads().into_iter().chain(i.writes())) {
            if by[b.index()].last() != Some(&t) {
                by[b.index()].push(t);
            }
        }
    }
    by
}

/// The common facts of buffers that may share copies: the memory, and the bytes from copy to copy.
type Size = (Space, u64);

/// The passes that use a buffer first and last.
type Passes = (PassKind, PassKind);

/// A buffer of one stage alone, which may have its copies by turns.
struct Member {
    buffer: BufferId,
    chunk: u32,
    passes: Passes,
}

/// Puts the buffers of a role's stages in rows; of a role with one stage there are none.
pub(crate) fn share_copies(role: &mut RoleProgram) {
    if role.n_chunks() < 2 {
        return;
    }
    let touched = touched_by(role);
    let mut by_size: BTreeMap<Size, Vec<Member>> = BTreeMap::new();
    for (i, b) in role.buffers.iter().enumerate() {
        if let (BufferClass::PerMicrobatch { .. }, Some((chunk, first, last))) =
            (b.class, span(role, &touched[i]))
        {
            let member = Member {
                buffer: BufferId::new(i),
                chunk,
                passes: (first, last),
            };
            by_size
                .entry((b.space, b.stride()))
                .or_default()
                .push(member);
        }
    }
    let mut known: BTreeMap<Vec<Vec<TemplateId>>, Row> = BTreeMap::new();
    let mut row = 0;
    for members in by_size.values() {
        for buffers in rows_of(role, members, &touched, &mut known) {
            let of = &known[&used(&buffers, &touched)];
            for (b, copies) in buffers.iter().zip(&of.turns) {
                let b = &mut role.buffers[b.index()];
                b.class = BufferClass::PerMicrobatch { slots: of.slots };
                b.turns = Some(Turns {
                    row,
                    copies: Arc::clone(copies),
                });
            }
            row += 1;
        }
    }
}

/// The templates that use each of some buffers.
fn used(buffers: &[BufferId], touched: &[Vec<TemplateId>]) -> Vec<Vec<TemplateId>> {
    let templates = |b: &BufferId| touched[b.index()].clone();
    buffers.iter().map(templates).collect()
}

/// The rows of the buffers of one size, each with its copies in `known`.
fn rows_of(
    role: &RoleProgram,
    members: &[Member],
    touched: &[Vec<TemplateId>],
    known: &mut BTreeMap<Vec<Vec<TemplateId>>, Row>,
) -> Vec<Vec<BufferId>> {
    let mut kinds: BTreeMap<Passes, BTreeMap<u32, Vec<BufferId>>> = BTreeMap::new();
    for m in members {
        let of_chunk = kinds.entry(m.passes).or_default();
        of_chunk.entry(m.chunk).or_default().push(m.buffer);
    }
    let mut slots = |buffers: &[BufferId]| {
        let of = known.entry(used(buffers, touched));
        of.or_insert_with_key(|key| take_turns(role, key)).slots
    };
    let (mut rows, mut n_copies) = (Vec::new(), 0u64);
    for chunks in kinds.values() {
        let most = chunks.values().map(Vec::len).max().unwrap_or(0);
        for j in 0..most {
            let own: Vec<BufferId> = chunks.values().filter_map(|c| c.get(j).copied()).collect();
            if own.len() > 1 {
                n_copies += u64::from(slots(&own));
                rows.push(own);
            } else {
                let alone = own.iter().map(|b| role.buffer(*b).slots());
                n_copies += alone.map(u64::from).sum::<u64>();
            }
        }
    }
    // As many everywhere: the rows reach their peaks at one moment, and nothing is to be gained.
    let mut counts = kinds
        .values()
        .flat_map(|chunks| chunks.values().map(Vec::len));
    let first = counts.next();
    let is_even = counts.all(|n| Some(n) == first) && kinds.len() == 1;
    if is_even || members.len() < 2 {
        return rows;
    }
    let all: Vec<BufferId> = members.iter().map(|m| m.buffer).collect();
    match u64::from(slots(&all)) < n_copies {
        true => vec![all],
        false => rows,
    }
}

/// The stage whose passes alone use a buffer, and the first and the last of them.
fn span(role: &RoleProgram, templates: &[TemplateId]) -> Option<(u32, PassKind, PassKind)> {
    let mut chunks = BTreeSet::new();
    let mut passes = BTreeSet::new();
    for &t in templates {
        let template = role.template(t);
        chunks.insert(template.chunk);
        passes.insert(template.kind.pass()?);
    }
    match chunks.len() {
        1 => Some((*chunks.first()?, *passes.first()?, *passes.last()?)),
        _ => None,
    }
}

/// The copies of a row.
struct Row {
    slots: u32,
    /// By member, the copy that each microbatch takes.
    turns: Vec<Arc<[u32]>>,
}

/// Gives the microbatches of a row's members, each used by some templates, their copies.
fn take_turns(role: &RoleProgram, members: &[Vec<TemplateId>]) -> Row {
    let numbers = role.trace.iter().filter_map(|s| s.microbatch);
    let n_microbatches = numbers.max().map_or(0, |m| m as usize + 1);
    let mut turns = vec![vec![0u32; n_microbatches]; members.len()];
    // First slot, last slot, member, microbatch.
    let mut lives: Vec<(usize, usize, usize, u32)> = Vec::new();
    for (member, templates) in members.iter().enumerate() {
        let alive = lifetimes(&role.trace, templates).into_iter();
        lives.extend(alive.map(|(m, (first, last))| (first, last, member, m)));
    }
    lives.sort_unstable();
    let mut slots = 0;
    let mut free: BinaryHeap<Reverse<u32>> = BinaryHeap::new();
    // By last slot, the copies in use.
    let mut used: BTreeSet<(usize, u32)> = BTreeSet::new();
    for (first, last, member, m) in lives {
        while let Some(&(end, copy)) = used.first().filter(|u| u.0 < first) {
            used.remove(&(end, copy));
            free.push(Reverse(copy));
        }
        let copy = free.pop().map_or(slots, |Reverse(copy)| copy);
        slots = slots.max(copy + 1);
        used.insert((last, copy));
        turns[member][m as usize] = copy;
    }
    Row {
        slots: slots.max(1),
        turns: turns.into_iter().map(Arc::from).collect(),
    }
}

/// Gives every buffer copies of its own again.
pub(crate) fn separate_copies(role: &mut RoleProgram) {
    if role.buffers.iter().all(|b| b.turns.is_none()) {
        return;
    }
    let touched = touched_by(role);
    let mut counts = SlotCounts::new(&role.trace);
    for (b, templates) in role.buffers.iter_mut().zip(&touched) {
        if b.turns.take().is_some() {
            let slots = counts.count(templates);
            b.class = BufferClass::PerMicrobatch { slots };
        }
    }
}
