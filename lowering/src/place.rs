//! Lifetimes and places of buffers.
//!
//! ```text
//! 0 ┌────────────┬──────┬────────────────┬───────────────────────┐ arena_bytes
//!   │ persistent │ step │ per microbatch │ transient             │
//!   └────────────┴──────┴────────────────┴───────────────────────┘
//! ```
//! The first three have fixed places. Buffers per microbatch have as many copies as are in use at
//! once, and those of stages that share a mesh have them by turns ([`turns`](crate::turns)).
//! Transient buffers of all templates share one region; within a template they share bytes when
//! their lifetimes (first to last instruction that touches them) are disjoint. First fit, largest
//! first.
//!
//! What a collective reads it may still be reading when kernels go on. A kernel whose result took
//! those bytes would wait for it, and hide nothing:
//!
//! ```text
//! kernels      make g ──┐ make h   make k   add up ──
//! collectives           └ reduce-scatter g ──┘
//! bytes of g   [──────────────────────────]             h and k lie elsewhere
//! bytes of g   [────────] h                              h waits for the reduce-scatter
//! ```
//! So it keeps its bytes until kernels wait for the collective anyway. In the same way a gather of
//! parameters has the bytes of its results as soon as the results of the one before are used, though
//! its own stand in the list where they are, and gathers stand [ahead](crate::ahead) of reductions.
//! All three in every template that then fits the memory; where it does not, without early results,
//! then with them but in the order of the list, then without both, and at last as close as buffers
//! can lie.

use crate::ahead::gathers_ahead;
use crate::draft::{Lifetime, RoleDraft, buffers_mut};
use crate::error::LowerError;
use crate::turns::share_copies;
use crate::waits::{Meetings, meetings, set_waits};
use ir::collective::CollectiveKind;
use ir::program::{
    ARENA_ALIGN, Buffer, BufferClass, CollectiveItem, InstrKind, Instruction, RoleProgram, Slot,
    Space, Stream, TemplateKind,
};
use ir::reshard::LayoutStep;
use ir::{BufferId, StageId, TemplateId};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

/// Bytes beyond which an arena is an error; leaves room for sums.
const MAX_BYTES: u64 = 1 << 62;

/// The room for collectives to have nothing wait for them that does not need their results.
#[derive(Clone, Copy)]
pub(crate) struct Room {
    /// The bytes of a device that buffers may take.
    pub bytes: u64,
    /// Whether gathers may go [ahead](crate::ahead) of reductions.
    pub gathers_ahead: bool,
}

impl Room {
    /// Nothing: buffers lie as close as they can.
    pub const NONE: Room = Room {
        bytes: 0,
        gathers_ahead: false,
    };
}

/// Gives the buffers of a role their classes and places, and its instructions their waits.
pub(crate) fn place(role: RoleDraft, room: Room) -> Result<RoleProgram, LowerError> {
    let mut program = classify(role)?;
    share_copies(&mut program);
    place_again(&mut program, room)?;
    Ok(program)
}

/// Gives the buffers of a role their places, and its instructions their waits. Which copies are
/// shared stays as it is.
pub(crate) fn place_again(program: &mut RoleProgram, room: Room) -> Result<(), LowerError> {
    let base = place_fixed(program)?;
    program.arena_bytes = place_transient(program, base, room)?;
    set_waits(program);
    Ok(())
}

/// Bytes of the arena that a role would have if streams waited for each other's results alone. As
/// many as it has, where they do.
pub fn arena_with_room(role: &RoleProgram) -> u64 {
    let mut roomy = role.clone();
    let base = place_fixed(&mut roomy);
    let room = Room {
        bytes: u64::MAX,
        gathers_ahead: true,
    };
    let placed = base.and_then(|base| place_transient(&mut roomy, base, room));
    placed.unwrap_or(MAX_BYTES)
}

/// Gives every buffer its class and drops those that nothing touches.
fn classify(mut role: RoleDraft) -> Result<RoleProgram, LowerError> {
    // Ascending, as templates are gone through in order; one to four but for shared parameters.
    let mut touched_by: Vec<SmallVec<[TemplateId; 4]>> = vec![SmallVec::new(); role.buffers.len()];
    for (t, template) in role.templates.iter().enumerate() {
        for b in template
            .instructions
            .iter()
            .flat_map(|i| i.reads().into_iter().chain(i.writes()))
        {
            let (by, t) = (&mut touched_by[b.index()], TemplateId::new(t));
            if by.last() != Some(&t) {
                by.push(t);
            }
        }
    }
    let in_microbatches: BTreeSet<TemplateId> = role
        .passes
        .values()
        .chain(role.flows.values())
        .copied()
        .collect();
    let drafted = std::mem::take(&mut role.buffers);
    let mut slots = SlotCounts::new(&role.trace);
    let mut renumbered = vec![None; drafted.len()];
    let mut buffers = Vec::with_capacity(drafted.len());
    for (i, (b, by)) in drafted.into_iter().zip(&touched_by).enumerate() {
        let class = match b.lifetime {
            Lifetime::Persistent => BufferClass::Persistent,
            Lifetime::Accumulator | Lifetime::Kept => BufferClass::Step,
            Lifetime::ByUse if by.is_empty() => continue,
            Lifetime::ByUse if by.len() == 1 => BufferClass::Transient,
            Lifetime::ByUse if by.iter().all(|t| in_microbatches.contains(t)) => {
                BufferClass::PerMicrobatch {
                    slots: slots.count(by),
                }
            }
            Lifetime::ByUse => BufferClass::Step,
        };
        let elements = match b.pieces {
            None => b.spec.local_elements(&b.lens, &role.mesh),
            Some(pieces) => {
                let shape = pieces.shape(&b.spec.local_shape(&b.lens, &role.mesh));
                shape.into_iter().fold(1, u64::saturating_mul)
            }
        };
        let bytes = elements.saturating_mul(b.dtype.bytes());
        if bytes > MAX_BYTES {
            return Err(LowerError::TooLarge {
                name: b.name,
                stage: role.stage,
            });
        }
        renumbered[i] = Some(BufferId::new(buffers.len()));
        buffers.push(Buffer {
            name: b.name,
            dtype: b.dtype,
            lens: b.lens,
            spec: b.spec,
            pieces: b.pieces,
            class,
            turns: None,
            space: b.space,
            offset: 0,
            bytes,
        });
    }
    let new = |b: BufferId| renumbered[b.index()].expect("a named buffer is touched or persistent");
    let RoleDraft {
        stage,
        mesh,
        streams,
        mut templates,
        trace,
        mut states,
        loss,
        grad_norm,
        ..
    } = role;
    for instruction in templates.iter_mut().flat_map(|t| &mut t.instructions) {
        buffers_mut(&mut instruction.kind, &mut |b| *b = new(*b));
    }
    states.iter_mut().for_each(|s| s.buffer = new(s.buffer));
    Ok(RoleProgram {
        stage,
        mesh,
        streams,
        buffers,
        templates,
        trace,
        arena_bytes: 0,
        other_arenas: BTreeMap::new(),
        states,
        loss: loss.map(new),
        grad_norm: grad_norm.map(new),
    })
}

/// Numbers of copies, by the templates that touch a buffer.
pub(crate) struct SlotCounts<'a> {
    trace: &'a [Slot],
    by_templates: BTreeMap<Vec<TemplateId>, u32>,
}

impl<'a> SlotCounts<'a> {
    pub(crate) fn new(trace: &'a [Slot]) -> Self {
        SlotCounts {
            trace,
            by_templates: BTreeMap::new(),
        }
    }

    pub(crate) fn count(&mut self, templates: &[TemplateId]) -> u32 {
        if let Some(&n) = self.by_templates.get(templates) {
            return n;
        }
        let alive: Vec<_> = lifetimes(self.trace, templates).into_values().collect();
        let n = copies(&alive);
        self.by_templates.insert(templates.to_vec(), n);
        n
    }
}

/// First and last slot of the trace that touch each microbatch's copy, by microbatch; the
/// templates that do are ascending.
pub(crate) fn lifetimes(trace: &[Slot], templates: &[TemplateId]) -> BTreeMap<u32, (usize, usize)> {
    let mut alive: BTreeMap<u32, (usize, usize)> = BTreeMap::new();
    for (at, slot) in trace
        .iter()
        .enumerate()
        .filter(|(_, s)| templates.binary_search(&s.template).is_ok())
    {
        if let Some(m) = slot.microbatch {
            alive.entry(m).or_insert((at, at)).1 = at;
        }
    }
    alive
}

/// The smallest `n` such that copy `m mod n` is free again when microbatch `m` needs it.
fn copies(alive: &[(usize, usize)]) -> u32 {
    let free = |n: usize| {
        alive
            .iter()
            .zip(alive.iter().skip(n))
            .all(|(early, late)| early.1 < late.0)
    };
    let n = (1..=alive.len()).find(|&n| free(n)).unwrap_or(1);
    u32::try_from(n).expect("there are fewer than 2^32 microbatches")
}

/// Places what outlives a template, each in the arena of its memory; returns the end of the
/// device's.
fn place_fixed(program: &mut RoleProgram) -> Result<u64, LowerError> {
    let rank = |class: BufferClass| match class {
        BufferClass::Persistent => 0,
        BufferClass::Step => 1,
        BufferClass::PerMicrobatch { .. } => 2,
        BufferClass::Transient => 3,
    };
    program.other_arenas.clear();
    let mut of_device = 0u64;
    // The offsets of rows of shared copies; the first buffer of a row places it.
    let mut rows: BTreeMap<u32, u64> = BTreeMap::new();
    for group in 0..3 {
        for b in program
            .buffers
            .iter_mut()
            .filter(|b| rank(b.class) == group)
        {
            let at = match b.space {
                Space::Device => &mut of_device,
                other => program.other_arenas.entry(other).or_default(),
            };
            let placed = b.turns.as_ref().map(|t| (t.row, rows.get(&t.row).copied()));
            if let Some((row, known)) = placed {
                b.offset = known.unwrap_or(*at);
                if known.is_some() {
                    continue;
                }
                rows.insert(row, *at);
            }
            b.offset = *at;
            let bytes = b.stride().saturating_mul(u64::from(b.slots()));
            *at = end(*at, bytes, b, program.stage)?;
        }
    }
    Ok(of_device)
}

fn end(offset: u64, bytes: u64, b: &Buffer, stage: StageId) -> Result<u64, LowerError> {
    let end = offset.saturating_add(bytes);
    if end > MAX_BYTES {
        Err(LowerError::TooLarge {
            name: b.name.clone(),
            stage,
        })
    } else {
        Ok(end)
    }
}

/// A transient buffer of one template.
#[derive(Clone, Copy)]
struct Interval {
    buffer: BufferId,
    bytes: u64,
    first: usize,
    last: usize,
    offset: u64,
}

/// Places the transient buffers of each template from `base` on; returns the end of all. Where
/// there is room they have bytes for longer, so that streams wait for each other's results alone.
fn place_transient(program: &mut RoleProgram, base: u64, room: Room) -> Result<u64, LowerError> {
    debug_assert_eq!(base % ARENA_ALIGN, 0);
    let mut arena = base;
    let mut fits = Fits::default();
    for t in 0..program.templates.len() {
        if program.templates[t].kind == TemplateKind::Exchange {
            continue;
        }
        let mut placed = None;
        if base < room.bytes && has_collectives(program, t) {
            if room.gathers_ahead {
                placed = with_gathers_ahead(program, t, base, room.bytes, &mut fits);
            }
            placed = placed.or_else(|| with_room(program, t, base, room.bytes, &mut fits));
        }
        let placed = placed.unwrap_or_else(|| fits.first_fit(intervals(program, t), base));
        for interval in placed {
            let b = &mut program.buffers[interval.buffer.index()];
            b.offset = interval.offset;
            arena = arena.max(end(interval.offset, interval.bytes, b, program.stage)?);
        }
    }
    Ok(arena)
}

/// The same where gathers stand [ahead](crate::ahead) of reductions, in which order the template
/// stays if that fits; nothing where none does.
fn with_gathers_ahead(
    program: &mut RoleProgram,
    template: usize,
    base: u64,
    budget: u64,
    known: &mut Fits,
) -> Option<Vec<Interval>> {
    let ahead = gathers_ahead(program, template)?;
    let before = std::mem::replace(&mut program.templates[template].instructions, ahead);
    let placed = with_room(program, template, base, budget, known);
    if placed.is_none() {
        program.templates[template].instructions = before;
    }
    placed
}

/// The transient buffers of a template where what collectives read stays until kernels wait for
/// them, and the results of gathers are there early, or the first alone; if that fits.
fn with_room(
    program: &mut RoleProgram,
    template: usize,
    base: u64,
    budget: u64,
    known: &mut Fits,
) -> Option<Vec<Interval>> {
    let meetings = meetings(program, template);
    let close = intervals(program, template);
    let kept = kept_until_awaited(program, template, &meetings, close);
    let early = early_results(program, template, &meetings, kept.clone());
    // What is more than the budget at some moment needs no places to be known too large.
    let may_fit = |all: &Vec<Interval>| base.saturating_add(most_at_once(all)) <= budget;
    let mut fits = |intervals: Vec<Interval>| {
        let placed = may_fit(&intervals).then(|| known.first_fit(intervals, base))?;
        Some(placed).filter(|p| end_of(p) <= budget)
    };
    fits(early).or_else(|| fits(kept))
}

/// The most bytes that live at one moment: no placement needs fewer.
fn most_at_once(intervals: &[Interval]) -> u64 {
    let last = intervals.iter().map(|i| i.last).max().unwrap_or(0);
    let (mut begin, mut end) = (vec![0u64; last + 1], vec![0u64; last + 1]);
    for i in intervals {
        begin[i.first] = begin[i.first].saturating_add(i.bytes);
        end[i.last] = end[i.last].saturating_add(i.bytes);
    }
    let (mut alive, mut most) = (0u64, 0);
    for (come, go) in begin.into_iter().zip(end) {
        alive = alive.saturating_add(come);
        most = alive.max(most);
        alive = alive.saturating_sub(go);
    }
    most
}

/// The end of what is placed.
fn end_of(placed: &[Interval]) -> u64 {
    let end = |i: &Interval| i.offset.saturating_add(i.bytes);
    placed.iter().map(end).max().unwrap_or(0)
}

/// Whether a template has collectives.
fn has_collectives(program: &RoleProgram, template: usize) -> bool {
    let mut instructions = program.templates[template].instructions.iter();
    instructions.any(|i| is_collective(program, i))
}

/// Whether an instruction is a collective. Copies from and to other memories are none: what is
/// staged for them is to take as few bytes as it can.
fn is_collective(program: &RoleProgram, i: &Instruction) -> bool {
    let stream = &program.streams[i.stream.index()];
    matches!(stream, Stream::Communicator { .. } | Stream::World)
}

/// By buffer, its place among the lifetimes of a template.
fn places_of(program: &RoleProgram, intervals: &[Interval]) -> Vec<Option<usize>> {
    let mut at = vec![None; program.buffers.len()];
    for (place, interval) in intervals.iter().enumerate() {
        at[interval.buffer.index()] = Some(place);
    }
    at
}

/// Lifetimes where what collectives read lasts until kernels wait for them.
fn kept_until_awaited(
    program: &RoleProgram,
    template: usize,
    meetings: &Meetings,
    mut intervals: Vec<Interval>,
) -> Vec<Interval> {
    let at = places_of(program, &intervals);
    let instructions = program.templates[template].instructions.iter();
    for (instruction, awaited) in instructions.zip(&meetings.awaited) {
        if is_collective(program, instruction) {
            for place in instruction.reads().iter().filter_map(|b| at[b.index()]) {
                let last = &mut intervals[place].last;
                // Whoever waits may take the bytes.
                *last = awaited.saturating_sub(1).max(*last);
            }
        }
    }
    intervals
}

/// Lifetimes where the results of a gather of what outlives the template begin when those of the
/// gathers before it on its stream are used, as many of these as have its bytes together: it then
/// travels behind the kernels that use them.
fn early_results(
    program: &RoleProgram,
    template: usize,
    meetings: &Meetings,
    mut intervals: Vec<Interval>,
) -> Vec<Interval> {
    let at = places_of(program, &intervals);
    // By stream, its gathers: when the results are used, and their bytes with those of all before.
    let mut gathers: Vec<Vec<(usize, u64)>> = vec![Vec::new(); program.streams.len()];
    let instructions = program.templates[template].instructions.iter();
    for (i, instruction) in instructions.enumerate() {
        let InstrKind::Collective { kind, .. } = &instruction.kind else {
            continue;
        };
        let is_made_here = |b: &BufferId| at[b.index()].is_some();
        if *kind != CollectiveKind::AllGather || instruction.reads().iter().any(is_made_here) {
            continue;
        }
        let results = instruction.writes();
        let bytes = results
            .iter()
            .map(|b| program.buffer(*b).bytes)
            .sum::<u64>();
        let before = &mut gathers[instruction.stream.index()];
        let sent = before.last().map_or(0, |g| g.1);
        let enough = before.partition_point(|g| g.1 <= sent.saturating_sub(bytes));
        let from = before.get(enough).map(|g| g.0);
        before.push((meetings.awaited[i], sent.saturating_add(bytes)));
        let Some(from) = from else { continue };
        let from = from.max(meetings.ready[i]);
        for place in results.iter().filter_map(|b| at[b.index()]) {
            let first = &mut intervals[place].first;
            // Only where the gather is the first that touches them.
            if *first == i {
                *first = from.min(i);
            }
        }
    }
    intervals
}

fn intervals(program: &RoleProgram, template: usize) -> Vec<Interval> {
    let mut found: Vec<Interval> = Vec::new();
    // By buffer, its place in `found`.
    let mut at: Vec<Option<u32>> = vec![None; program.buffers.len()];
    // What shifts read lasts until the part that they travel beside is done: else that part would
    // wait for them to write to its bytes.
    let mut travelling: Vec<usize> = Vec::new();
    for (i, instruction) in program.templates[template].instructions.iter().enumerate() {
        for buffer in instruction.reads().into_iter().chain(instruction.writes()) {
            let b = program.buffer(buffer);
            if b.class != BufferClass::Transient {
                continue;
            }
            match at[buffer.index()] {
                Some(known) => found[known as usize].last = i,
                None => {
                    at[buffer.index()] = Some(found.len() as u32);
                    found.push(Interval {
                        buffer,
                        bytes: b.stride(),
                        first: i,
                        last: i,
                        offset: 0,
                    });
                }
            }
        }
        match &instruction.kind {
            InstrKind::Collective { items, .. } if items.iter().any(travels) => {
                let reads = instruction.reads();
                let known = reads.iter().filter_map(|b| at[b.index()]);
                travelling.extend(known.map(|known| known as usize));
            }
            InstrKind::Compute { kind, .. } if !kind.keys().are_all() => {
                travelling.drain(..).for_each(|known| found[known].last = i);
            }
            _ => {}
        }
    }
    found
}

/// Whether a buffer is handed on for another part; what goes home is not.
fn travels(item: &CollectiveItem) -> bool {
    matches!(item.step, LayoutStep::Shift { turns: 1.., .. })
}

/// Places that were found for the templates of a role. Those of equal layers ask for the same, and
/// where the base lies changes nothing.
#[derive(Default)]
struct Fits {
    /// By bytes, first and last instruction of the intervals in their order: the offsets from the
    /// base.
    known: FxHashMap<Vec<(u64, usize, usize)>, Vec<u64>>,
}

impl Fits {
    /// The intervals with their places, largest first: each at the lowest offset that is free.
    fn first_fit(&mut self, intervals: Vec<Interval>, base: u64) -> Vec<Interval> {
        let mut intervals = largest_first(intervals);
        let question = intervals.iter().map(|i| (i.bytes, i.first, i.last));
        match self.known.entry(question.collect()) {
            Entry::Occupied(known) => {
                let offsets = intervals.iter_mut().zip(known.get());
                offsets.for_each(|(i, offset)| i.offset = base.saturating_add(*offset));
                intervals
            }
            Entry::Vacant(new) => {
                let placed = first_fit(intervals, base);
                new.insert(placed.iter().map(|i| i.offset - base).collect());
                placed
            }
        }
    }
}

/// Intervals by size; of equal ones the earlier first.
fn largest_first(intervals: Vec<Interval>) -> Vec<Interval> {
    // One number each, which sorts faster than three.
    let order = intervals.iter().enumerate().map(|(at, i)| {
        let place = (i.first as u64) << 32 | u64::from(i.buffer.0);
        (u128::from(!i.bytes) << 64 | u128::from(place), at)
    });
    let mut order: Vec<(u128, usize)> = order.collect();
    order.sort_unstable();
    order.into_iter().map(|(_, at)| intervals[at]).collect()
}

/// The same, of intervals in their order.
fn first_fit(intervals: Vec<Interval>, base: u64) -> Vec<Interval> {
    let mut placed = Placed::until(intervals.iter().map(|i| i.last).max().unwrap_or(0));
    for mut new in intervals {
        new.offset = placed.lowest(&new, base);
        placed.add(new);
    }
    placed.all
}

/// Instructions that are looked at together: most buffers live no longer.
const BLOCK: usize = 16;
/// Blocks up to which a buffer's neighbours are looked for in each.
const FEW_BLOCKS: usize = 8;

/// The buffers that have a place, found by when they live. Templates have thousands, of which most
/// live for a few instructions, beside few others.
struct Placed {
    /// In the order in which they were placed.
    all: Vec<Interval>,
    /// By block of instructions, those that live in it, by offset.
    by_block: Vec<Vec<Taken>>,
    /// Those of any block, by offset.
    by_offset: Vec<Taken>,
}

/// The bytes of a buffer that has its place, and when they are taken.
#[derive(Clone, Copy)]
struct Taken {
    offset: u64,
    end: u64,
    first: usize,
    last: usize,
}

impl Taken {
    fn is_beside(&self, new: &Interval) -> bool {
        self.first <= new.last && new.first <= self.last
    }
}

impl Placed {
    /// None so far, of a template with so many instructions before its last.
    fn until(last: usize) -> Placed {
        Placed {
            all: Vec::new(),
            by_block: vec![Vec::new(); last / BLOCK + 1],
            by_offset: Vec::new(),
        }
    }

    /// The lowest offset from `base` on at which nothing that lives at the same time lies.
    fn lowest(&self, new: &Interval, base: u64) -> u64 {
        let blocks = new.first / BLOCK..new.last / BLOCK + 1;
        if blocks.len() > FEW_BLOCKS {
            return gap(base, new, &mut [self.by_offset.iter()]);
        }
        let mut near: SmallVec<[_; FEW_BLOCKS]> =
            self.by_block[blocks].iter().map(|all| all.iter()).collect();
        gap(base, new, &mut near)
    }

    fn add(&mut self, new: Interval) {
        let taken = Taken {
            offset: new.offset,
            end: new.offset.saturating_add(new.bytes),
            first: new.first,
            last: new.last,
        };
        let blocks = &mut self.by_block[new.first / BLOCK..new.last / BLOCK + 1];
        for all in blocks.iter_mut().chain([&mut self.by_offset]) {
            let at = all.partition_point(|other| other.offset <= taken.offset);
            all.insert(at, taken);
        }
        self.all.push(new);
    }
}

/// The lowest offset from `base` on where a buffer has its bytes to itself, beside those of these
/// lists, each by offset; one may be in several. What begins before its end and ends behind its
/// offset moves it on, in whatever order that is seen: no place before the one that is found is
/// free.
fn gap(base: u64, new: &Interval, lists: &mut [std::slice::Iter<'_, Taken>]) -> u64 {
    let mut offset = base;
    loop {
        let before = offset;
        for list in &mut *lists {
            while let Some(taken) = list.as_slice().first() {
                if taken.offset >= offset.saturating_add(new.bytes) {
                    break;
                }
                if taken.is_beside(new) {
                    offset = offset.max(taken.end);
                }
                list.next();
            }
        }
        if offset == before || lists.len() == 1 {
            return offset;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_follow_from_lifetimes() {
        // Disjoint: one copy. Each overlaps the next: two. All alive at once: all.
        assert_eq!(copies(&[(0, 1), (2, 3), (4, 5)]), 1);
        assert_eq!(copies(&[(0, 3), (2, 5), (4, 7)]), 2);
        assert_eq!(copies(&[(0, 3), (1, 4), (2, 5)]), 3);
        // Never two alive at once but the first two, and yet copy 0 serves every other one.
        assert_eq!(copies(&[(0, 2), (1, 3), (4, 5), (6, 7)]), 2);
    }

    /// Many buffers, short-lived and long-lived, get the places that a look at all others finds.
    #[test]
    fn neighbours_are_found_by_when_they_live() {
        let mut random = 1u64;
        let mut below = |n: u64| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1);
            (random >> 33) % n
        };
        for longest in [4, 40, 400] {
            let mut all = Vec::new();
            for buffer in 0..300 {
                let first = below(400) as usize;
                all.push(Interval {
                    buffer: BufferId(buffer),
                    bytes: 256 * (1 + below(20)),
                    first,
                    last: first + below(longest) as usize,
                    offset: 0,
                });
            }
            let most = most_at_once(&all);
            let alive_at = |at: usize| {
                let alive = all.iter().filter(|i| i.first <= at && at <= i.last);
                alive.map(|i| i.bytes).sum::<u64>()
            };
            assert_eq!((0..800).map(alive_at).max(), Some(most));
            let placed = Fits::default().first_fit(all, 512);
            assert!(end_of(&placed) >= 512 + most);
            for (i, new) in placed.iter().enumerate() {
                let alive = |old: &&Interval| old.first <= new.last && new.first <= old.last;
                let beside: Vec<_> = placed[..i].iter().filter(alive).collect();
                let is_free = |at: &u64| {
                    let apart =
                        |o: &&Interval| at + new.bytes <= o.offset || o.offset + o.bytes <= *at;
                    beside.iter().all(apart)
                };
                // The lowest place is the base or the end of something.
                let ends = beside.iter().map(|o| o.offset + o.bytes);
                let lowest = ends.chain([512]).filter(is_free).min();
                assert_eq!(Some(new.offset), lowest);
            }
        }
    }

    #[test]
    fn disjoint_lifetimes_share_bytes() {
        let i = |buffer, bytes, first, last| Interval {
            buffer: BufferId(buffer),
            bytes,
            first,
            last,
            offset: 0,
        };
        let mut fits = Fits::default();
        let placed = fits.first_fit(
            vec![
                i(0, 256, 0, 1),
                i(1, 512, 1, 2),
                i(2, 256, 2, 3),
                i(3, 768, 3, 4),
            ],
            1024,
        );
        let offsets: BTreeMap<u32, u64> = placed.iter().map(|p| (p.buffer.0, p.offset)).collect();
        // Largest first: 3 at the base, 1 at the base, 2 behind 3 and 1, 0 behind 1.
        assert_eq!(
            offsets,
            BTreeMap::from([(3, 1024), (1, 1024), (2, 1024 + 768), (0, 1024 + 512)])
        );
        // The same question from another base, of other buffers.
        let others = placed
            .iter()
            .map(|p| i(p.buffer.0 + 10, p.bytes, p.first, p.last));
        let again = fits.first_fit(others.collect(), 256);
        assert_eq!(fits.known.len(), 1);
        for (a, b) in placed.iter().zip(&again) {
            assert_eq!(
                (a.buffer.0 + 10, a.offset - 1024),
                (b.buffer.0, b.offset - 256)
            );
        }
    }
}
