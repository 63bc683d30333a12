//! Buckets of a microbatch: gradients are reduced, and parameters gathered, several at a time.
//!
//! ```text
//! kernels       dW9  dX9  dW8  dX8  dW7  dX7  dW6  += 9, 8  dX6  dW5 ...
//! collectives                  └─ reduce 9, 8 ─┘    └─ reduce 7, 6
//! ```
//!
//! **Late.** A reduction may wait if all that follows from it ends in accumulators or, where
//! microbatches update them, in states: nothing else in the template needs it. Its bucket is sent as soon as it is full, and what follows from it
//! stands where the next bucket is full, so that kernels need not wait while it travels. At most
//! two buckets of gradients exist at once.
//!
//! **Early.** A gather may go ahead if nothing in microbatches writes what it gathers, or nothing in
//! its template if that is a state: parameters. A bucket of them is gathered when the one before it is used first, so it travels
//! behind its kernels. Tensors that fill a bucket alone stay where they are used, as two of them at
//! once may not fit; where they do, their bytes are theirs early ([`place`](crate::place)).
//!
//! Both change the order of a template only where no dependency forbids it, and no reduction's
//! order of ranks: results keep every bit.

use super::{Buffers, Sort, append, can_merge, list_schedule, successors};
use crate::draft::{Lifetime, RoleDraft};
use ir::BufferId;
use ir::collective::CollectiveKind;
use ir::op::OpKind;
use ir::program::{InstrKind, Instruction, TemplateKind};
use std::collections::{BTreeMap, BTreeSet};

/// Which buffers of a role microbatches write, and which outlive one of their templates.
pub(super) struct Places {
    written: Vec<bool>,
    outlives: Vec<bool>,
    persists: Vec<bool>,
}

impl Places {
    pub(super) fn new(role: &RoleDraft) -> Self {
        let mut first: Vec<Option<usize>> = vec![None; role.buffers.len()];
        let mut outlives: Vec<bool> = role
            .buffers
            .iter()
            .map(|b| b.lifetime != Lifetime::ByUse)
            .collect();
        let mut written = vec![false; role.buffers.len()];
        for (t, template) in role.templates.iter().enumerate() {
            let once = matches!(
                template.kind,
                TemplateKind::StepBegin | TemplateKind::StepEnd
            );
            for i in &template.instructions {
                let writes = i.writes();
                for b in i.reads().iter().chain(&writes) {
                    outlives[b.index()] |= *first[b.index()].get_or_insert(t) != t;
                }
                if !once {
                    writes.iter().for_each(|b| written[b.index()] = true);
                }
            }
        }
        let lasting = role.buffers.iter();
        let persists = lasting
            .map(|b| b.lifetime == Lifetime::Persistent)
            .collect();
        Places {
            written,
            outlives,
            persists,
        }
    }

    /// Whether an instruction may follow from a reduction that waits: it adds to an accumulator,
    /// updates a state, or changes what stays in its template.
    fn may_follow(&self, i: &Instruction) -> bool {
        let changes = match &i.kind {
            InstrKind::Compute { kind, .. } => match kind {
                OpKind::Accumulate { .. } | OpKind::AdamW { .. } | OpKind::Sgd { .. } => {
                    return true;
                }
                OpKind::Cast { .. } | OpKind::Unary { .. } | OpKind::Binary { .. } => true,
                _ => false,
            },
            InstrKind::Collective { .. } | InstrKind::Slice { .. } => true,
            _ => false,
        };
        let stays = |b: &BufferId| !self.outlives[b.index()] || self.persists[b.index()];
        changes && i.writes().iter().all(stays)
    }

    /// Whether an instruction gathers what no microbatch writes or, of states, what the template at
    /// hand, which writes `here`, does not.
    fn gathers_parameter(&self, i: &Instruction, here: &BTreeSet<BufferId>) -> bool {
        let InstrKind::Collective { kind, .. } = &i.kind else {
            return false;
        };
        let is_old = |b: &BufferId| match self.persists[b.index()] {
            true => !here.contains(b),
            false => !self.written[b.index()],
        };
        *kind == CollectiveKind::AllGather && i.reads().iter().all(is_old)
    }
}

/// The instructions of a forward or backward with their collectives in buckets.
pub(super) fn fill(
    instructions: Vec<Instruction>,
    buffers: Buffers<'_>,
    places: &Places,
) -> Vec<Instruction> {
    let late = late(&instructions, places);
    let gathers = gathers(&instructions, buffers, places);
    let first = |(k, g): (usize, &Gathers)| (g.members[0], k);
    let first: BTreeMap<usize, usize> = gathers.iter().enumerate().map(first).collect();
    let early: BTreeSet<usize> = gathers.iter().flat_map(|g| &g.members).copied().collect();
    let mut pending: Vec<Option<Instruction>> = instructions.into_iter().map(Some).collect();
    let mut out = Emitted::default();
    let mut reductions = Reductions::default();
    let mut n_gathered = 0;
    for i in 0..pending.len() {
        if let Some(&k) = first.get(&i) {
            // The bucket itself, unless it went ahead, and the next one if that may.
            let next = gathers.get(k + 1).is_some_and(|g| g.goes_ahead);
            let until = k + 1 + usize::from(next);
            for g in gathers.iter().take(until).skip(n_gathered) {
                let members = g.members.iter().filter_map(|&m| pending[m].take());
                out.bucket(members.collect());
            }
            n_gathered = n_gathered.max(until);
        }
        if early.contains(&i) {
            continue;
        }
        let Some(instruction) = pending[i].take() else {
            continue;
        };
        if !late[i] {
            out.push(instruction, buffers);
        } else if reductions.add(instruction, buffers) {
            reductions.send(&mut out, buffers);
        }
    }
    reductions.send(&mut out, buffers);
    out.extend(reductions.following);
    out.instructions
}

/// Instructions in their new order.
#[derive(Default)]
struct Emitted {
    instructions: Vec<Instruction>,
    /// Whether nothing more merges with the last one.
    closed: bool,
}

impl Emitted {
    /// An instruction that stays where it was; it merges with a collective before it.
    fn push(&mut self, next: Instruction, buffers: Buffers<'_>) {
        match self.instructions.last_mut() {
            Some(last) if !self.closed && can_merge(last, &next, buffers) => append(last, next),
            _ => self.instructions.push(next),
        }
        self.closed = false;
    }

    /// Members of one collective.
    fn bucket(&mut self, members: Vec<Instruction>) {
        let merged = members.into_iter().reduce(|mut all, next| {
            append(&mut all, next);
            all
        });
        self.extend(merged);
    }

    fn extend(&mut self, instructions: impl IntoIterator<Item = Instruction>) {
        self.instructions.extend(instructions);
        self.closed = true;
    }
}

/// Gradients that wait to be reduced.
#[derive(Default)]
struct Reductions {
    /// Reductions and what follows from them, in order. What follows from the last one of a
    /// bucket comes here after the bucket was sent.
    waiting: Vec<Instruction>,
    /// Bytes that wait, by sort.
    bytes: Vec<(Sort, u64)>,
    /// Instructions that follow from the bucket that was sent last.
    following: Vec<Instruction>,
}

impl Reductions {
    /// Lets an instruction wait; true when a bucket is full.
    fn add(&mut self, instruction: Instruction, buffers: Buffers<'_>) -> bool {
        let mut full = false;
        if let (Some(sort), InstrKind::Collective { axes, .. }) =
            (buffers.sort(&instruction), &instruction.kind)
        {
            let limit = buffers.full(axes);
            let at = self.bytes.iter().position(|(s, _)| *s == sort);
            let at = at.unwrap_or_else(|| {
                self.bytes.push((sort, 0));
                self.bytes.len() - 1
            });
            let bytes = &mut self.bytes[at].1;
            *bytes = bytes.saturating_add(buffers.message(&instruction));
            full = *bytes >= limit;
        }
        self.waiting.push(instruction);
        full
    }

    /// Sends what waits, behind what follows from the bucket before.
    fn send(&mut self, out: &mut Emitted, buffers: Buffers<'_>) {
        let is_collective = |i: &Instruction| matches!(i.kind, InstrKind::Collective { .. });
        let mut ready = list_schedule(std::mem::take(&mut self.waiting), buffers, None);
        let n_ready = ready.iter().take_while(|i| !is_collective(i)).count();
        let mut sent = ready.split_off(n_ready);
        let n_sent = sent.iter().take_while(|i| is_collective(i)).count();
        let following = sent.split_off(n_sent);
        out.extend(std::mem::replace(&mut self.following, following));
        out.extend(ready);
        out.extend(sent);
        self.bytes.clear();
    }
}

/// By instruction, whether it is a reduction that may wait, or follows from one. What depends on
/// a late instruction is late.
fn late(instructions: &[Instruction], places: &Places) -> Vec<bool> {
    let after = successors(instructions);
    let mut may_wait = vec![false; instructions.len()];
    for (i, instruction) in instructions.iter().enumerate().rev() {
        may_wait[i] = places.may_follow(instruction) && after[i].iter().all(|&s| may_wait[s]);
    }
    let mut late = vec![false; instructions.len()];
    for (i, instruction) in instructions.iter().enumerate() {
        let reduces = matches!(
            instruction.kind,
            InstrKind::Collective {
                kind: CollectiveKind::AllReduce(_) | CollectiveKind::ReduceScatter(_),
                ..
            }
        );
        late[i] |= reduces && may_wait[i];
        if late[i] {
            after[i].iter().for_each(|&s| late[s] = true);
        }
    }
    late
}

/// Gathers of parameters that become one.
struct Gathers {
    members: Vec<usize>,
    /// Whether it is small enough to stand beside the bucket before.
    goes_ahead: bool,
}

/// The gathers of parameters, in the order in which they are needed.
fn gathers(instructions: &[Instruction], buffers: Buffers<'_>, places: &Places) -> Vec<Gathers> {
    let here: BTreeSet<BufferId> = instructions.iter().flat_map(|i| i.writes()).collect();
    let mut all: Vec<Gathers> = Vec::new();
    // By sort, the bucket that is open and its bytes.
    let mut open: Vec<(Sort, usize, u64)> = Vec::new();
    for (i, instruction) in instructions.iter().enumerate() {
        let (Some(sort), InstrKind::Collective { axes, .. }, true) = (
            buffers.sort(instruction),
            &instruction.kind,
            places.gathers_parameter(instruction, &here),
        ) else {
            continue;
        };
        let limit = buffers.full(axes);
        let bytes = buffers.message(instruction);
        let goes_ahead = bytes < limit;
        let fits = |(s, _, sum): &&mut (Sort, usize, u64)| {
            goes_ahead && *s == sort && sum.saturating_add(bytes) <= limit
        };
        if let Some((_, at, sum)) = open.iter_mut().find(fits) {
            all[*at].members.push(i);
            *sum += bytes;
            continue;
        }
        if goes_ahead {
            open.retain(|(s, ..)| *s != sort);
            open.push((sort, all.len(), bytes));
        }
        all.push(Gathers {
            members: vec![i],
            goes_ahead,
        });
    }
    all
}

#[cfg(test)]
mod tests;
