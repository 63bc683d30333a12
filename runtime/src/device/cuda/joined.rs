//! Many calls of a kernel as one launch.
//!
//! The kernels in [`all_of`] have a second form whose parameter is a table in the GPU's memory: the
//! parameters of all calls, and how many blocks they have. A block finds its call there and does what
//! it would do in a launch of that call alone, so the bits are the same. Tables are made when works
//! come together for the first time, in the first step, and kept: later steps only launch. What
//! changes from step to step is not in a table but in the launch's own parameter.

#![allow(unsafe_code)] // sees a table as bytes

use super::args::{Args, Call, Calls, Now, Span, Step};
use super::ops::{self, Op};
use super::{Block, Cuda};
use crate::device::{Place, Tensor, Work};
use crate::error::RuntimeError;
use crate::execute::{Local, calls, validation};
use ir::program::{FEWEST_JOINED, InstrKind, Instruction, RoleProgram, Space, Template};
use ir::{OpKind, StreamId, TemplateId};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The form of a kernel that makes many calls; none of kernels that have none.
fn all_of(kernel: &str) -> Option<&'static str> {
    Some(match kernel {
        "accumulate" => "accumulate_all",
        "adam_w" => "adam_w_all",
        "fill" => "fill_all",
        "sgd" => "sgd_all",
        "squares" => "squares_all",
        "sum_parts" => "sum_parts_all",
        "unary" => "unary_all",
        "words" => "words_all",
        _ => return None,
    })
}

/// A part of what works come to.
#[derive(Debug)]
pub(super) enum Part {
    /// Calls of one kernel for the same types.
    All(&'static str, Vec<Call>),
    /// A step that is done by itself.
    One(Box<Step>),
}

/// The launches of works that nothing orders, each with its steps in order: the first steps of all,
/// then the second ones, and so on.
pub(super) fn parts(works: Vec<Vec<Step>>) -> Vec<Part> {
    let mut parts = Vec::new();
    let mut works: Vec<_> = works.into_iter().map(Vec::into_iter).collect();
    loop {
        let steps: Vec<Step> = works.iter_mut().filter_map(Iterator::next).collect();
        if steps.is_empty() {
            return parts;
        }
        let begin = parts.len();
        for step in steps {
            let call = match step {
                Step::Call(call) if call.is_empty() => continue,
                Step::Call(call) => call,
                other => {
                    parts.push(Part::One(Box::new(other)));
                    continue;
                }
            };
            let Some(kernel) = all_of(call.kernel) else {
                parts.push(Part::One(Box::new(Step::Call(call))));
                continue;
            };
            let alike = |part: &&mut Part| match part {
                Part::All(k, calls) => calls.first().is_some_and(|first| {
                    (*k, first.types, first.threads) == (kernel, call.types, call.threads)
                }),
                Part::One(_) => false,
            };
            match parts[begin..].iter_mut().find(alike) {
                Some(Part::All(_, calls)) => calls.push(call),
                _ => parts.push(Part::All(kernel, vec![call])),
            }
        }
    }
}

/// Bytes of scratch memory that an op takes whose neighbours run at the same time.
fn scratch_bytes(kind: &OpKind) -> usize {
    match kind {
        OpKind::SumSquares => ops::SCRATCH,
        _ => 0,
    }
}

/// Most bytes of the GPU's memory that a rank keeps for what it joins.
///
/// Fails where the loss cannot be had without training.
pub(super) fn kept_bytes(role: &RoleProgram) -> Result<u64, RuntimeError> {
    let whole = |of: &Template| (0..of.instructions.len()).collect();
    let mut played: BTreeSet<(TemplateId, Vec<usize>)> = role
        .templates
        .iter()
        .enumerate()
        .map(|(t, of)| (TemplateId::new(t), whole(of)))
        .collect();
    let parts = validation(role)?.into_iter();
    played.extend(parts.map(|slot| (slot.template, slot.instructions)));
    let kept = played.iter().map(|(t, played)| {
        let all = &role.template(*t).instructions;
        let joined = calls::Calls::of(all, played).n_joined.into_iter();
        let groups = joined.enumerate().map(|(k, n)| &played[k..k + n]);
        let kept = groups.map(|of| kept_of(role, &of.iter().map(|i| &all[*i]).collect::<Vec<_>>()));
        kept.sum::<u64>()
    });
    Ok(kept.sum())
}

/// The same of instructions that are joined, or of one alone.
fn kept_of(role: &RoleProgram, of: &[&Instruction]) -> u64 {
    // Two calls at most of each, and what a part of the table is rounded up to.
    let table = |n: usize| 2 * n * (size_of::<Args>() + size_of::<u32>() + 256);
    let once = match (of.first().map(|i| &i.kind), of.len()) {
        (Some(InstrKind::Compute { kind, .. }), n) if n > 1 => table(n) + n * scratch_bytes(kind),
        (Some(InstrKind::WorldSum { inputs, .. }), _) => table(inputs.len()),
        (_, n) if n > 1 => table(n),
        _ => return 0,
    };
    // Each copy of buffers that microbatches have by turns lies somewhere else.
    let last = role.trace.iter().filter_map(|s| s.microbatch).max();
    let copies = (0..=last.unwrap_or(0)).map(|m| {
        let touched = of.iter().flat_map(|i| [i.reads(), i.writes()]).flatten();
        let copies = touched.map(|b| role.buffer(b).copy_for(Some(m)));
        copies.collect::<Vec<u32>>()
    });
    once as u64 * copies.collect::<BTreeSet<_>>().len() as u64
}

/// A part of a tensor, and where it lies.
type Held = (Local, Place);

/// One of the works that a table was made for.
enum Known {
    Compute(OpKind, [Vec<Held>; 2]),
    Fill(f32, Held),
    Copy(Place, Place),
}

impl Known {
    fn new(work: &Work<'_>) -> Option<Self> {
        let held = |t: &Tensor<'_>| (t.local.clone(), t.at);
        Some(match *work {
            Work::Compute {
                op,
                inputs,
                outputs,
                ..
            } => Known::Compute(
                op.clone(),
                [inputs, outputs].map(|list| list.iter().map(held).collect()),
            ),
            Work::Fill { value, output } => Known::Fill(value, held(&output)),
            Work::Copy { from, to } => Known::Copy(from, to),
            _ => return None,
        })
    }

    fn is(&self, work: &Work<'_>) -> bool {
        let same = |(local, at): &Held, t: &Tensor<'_>| *at == t.at && local == t.local;
        match (self, work) {
            (
                Known::Compute(kind, held),
                Work::Compute {
                    op,
                    inputs,
                    outputs,
                    ..
                },
            ) => {
                let both = held.iter().zip([inputs, outputs]);
                let all = |(held, list): (&Vec<Held>, &&[Tensor<'_>])| {
                    held.len() == list.len() && held.iter().zip(*list).all(|(h, t)| same(h, t))
                };
                kind == *op && both.into_iter().all(|(h, l)| all((h, l)))
            }
            (Known::Fill(known, held), Work::Fill { value, output }) => {
                known.to_bits() == value.to_bits() && same(held, output)
            }
            (Known::Copy(a, b), Work::Copy { from, to }) => (a, b) == (from, to),
            _ => false,
        }
    }
}

/// Works of a stream that came together, and their launches.
pub(super) struct Joined {
    of: Vec<Known>,
    launches: Vec<Launch>,
    /// The memory of tables and scratch.
    _kept: Vec<Block>,
}

/// One launch.
enum Launch {
    /// A kernel for many calls, of which this is one, in so many blocks.
    All(&'static str, Box<Call>, u32, Calls),
    One(Box<Step>),
}

impl Joined {
    fn is_of(&self, works: &[Work<'_>]) -> bool {
        self.of.len() == works.len() && self.of.iter().zip(works).all(|(k, w)| k.is(w))
    }
    #[cfg(test)]
    pub fn n_launches(&self) -> usize {
        self.launches.len()
    }
}

/// The facts of the step that works are part of.
fn now_of(works: &[Work<'_>]) -> Now {
    let context = works.iter().find_map(|w| match w {
        Work::Compute { context, .. } => Some(ops::now(context)),
        _ => None,
    });
    context.unwrap_or_default()
}

impl Cuda {
    /// Puts works on a stream as few launches. False where they are none that can be joined.
    pub(super) fn launch_joined(
        &mut self,
        stream: StreamId,
        works: &[Work<'_>],
    ) -> Result<bool, RuntimeError> {
        if works.len() < FEWEST_JOINED {
            return Ok(false);
        }
        let mut known = self.lane(stream)?.joined.iter();
        let known = known.position(|j| j.is_of(works));
        let at = match known {
            Some(at) => at,
            None => {
                let Some(made) = self.join(stream, works)? else {
                    return Ok(false);
                };
                let lane = self.lane(stream)?;
                lane.joined.push(Arc::new(made));
                lane.joined.len() - 1
            }
        };
        let joined = Arc::clone(&self.lane(stream)?.joined[at]);
        let now = now_of(works);
        for launch in &joined.launches {
            match launch {
                Launch::All(kernel, call, blocks, calls) => {
                    let calls = Calls { now, ..*calls };
                    self.start(stream, (call, kernel), [*blocks, 1, 1], &calls)?;
                }
                Launch::One(step) => match &**step {
                    Step::Call(call) => self.call(stream, &call.clone().now(now))?,
                    other => self.run(stream, std::slice::from_ref(other))?,
                },
            }
        }
        Ok(true)
    }

    /// The steps of a work with scratch memory of its own; none where it is not to be joined.
    fn steps(&self, work: &Work<'_>, scratch: u64) -> Result<Option<Vec<Step>>, RuntimeError> {
        let (mut steps, outputs) = match *work {
            Work::Compute {
                path,
                op,
                inputs,
                outputs,
                context,
            } => {
                let (x, y) = (self.parts(inputs)?, self.parts(outputs)?);
                let op = Op {
                    kind: op,
                    path,
                    x: &x,
                    y: &y,
                    context,
                    scratch,
                    has_library: false,
                    shared: self.gpu.shared,
                };
                op.check()?;
                if !op.copied().is_empty() {
                    return Ok(None);
                }
                (op.steps()?, y)
            }
            Work::Fill { value, output } => {
                let output = self.part(&output)?;
                (vec![ops::fill(value, output)], vec![output])
            }
            Work::Copy { from, to } => {
                let is_joined = from.space == Space::Device
                    && to.space == Space::Device
                    && from.len == to.len
                    && from.start.abs_diff(to.start) >= from.len;
                if !is_joined {
                    return Ok(None);
                }
                let step = ops::words(self.span(from)?, self.span(to)?);
                return Ok(step.map(|s| vec![s]));
            }
            _ => return Ok(None),
        };
        steps.extend(outputs.iter().filter_map(|y| ops::pad(*y)));
        Ok(Some(steps))
    }

    /// Makes the tables of works.
    fn join(
        &mut self,
        stream: StreamId,
        works: &[Work<'_>],
    ) -> Result<Option<Joined>, RuntimeError> {
        // Before anything is allocated: to give memory back is to wait for the GPU.
        for work in works {
            if self.steps(work, 0)?.is_none() {
                return Ok(None);
            }
        }
        let context = Arc::clone(&self.gpu.context);
        let scratch = |work: &Work<'_>| match work {
            Work::Compute { op, .. } => scratch_bytes(op),
            _ => 0,
        };
        let scratch_all = works.iter().map(scratch).sum();
        let mut kept = Vec::new();
        let mut free = 0;
        if scratch_all > 0 {
            let block = Block::new(&context, scratch_all)?;
            free = block.at;
            kept.push(block);
        }
        let mut steps = Vec::with_capacity(works.len());
        for work in works {
            match self.steps(work, free)? {
                Some(of_work) => steps.push(of_work),
                None => return Ok(None),
            }
            free += scratch(work) as u64;
        }
        let Some(of) = works.iter().map(Known::new).collect() else {
            return Ok(None);
        };
        let parts = parts(steps);
        let (mut bytes, mut places) = (Vec::new(), Vec::new());
        for part in &parts {
            let Part::All(_, calls) = part else { continue };
            let begin = bytes.len();
            for call in calls {
                bytes.extend_from_slice(as_bytes(&call.clone().now(Now::default()).args));
            }
            let middle = bytes.len();
            let mut end = 0u32;
            for call in calls {
                end = end.saturating_add(call.grid[0]);
                bytes.extend_from_slice(&end.to_le_bytes());
            }
            places.push((begin, middle, bytes.len(), end));
            bytes.resize(bytes.len().next_multiple_of(256), 0);
        }
        let table = Block::new(&context, bytes.len())?;
        let at = table.at;
        self.send(stream, at, bytes.len(), &mut |to| {
            to.copy_from_slice(&bytes);
            Ok(())
        })?;
        kept.push(table);
        self.kept_bytes += kept.iter().map(|b| b.len as u64).sum::<u64>();
        let mut places = places.into_iter();
        let mut launches = Vec::with_capacity(parts.len());
        for part in parts {
            let (kernel, mut calls) = match part {
                Part::One(step) => {
                    launches.push(Launch::One(step));
                    continue;
                }
                Part::All(kernel, calls) => (kernel, calls),
            };
            let Some((begin, middle, end, blocks)) = places.next() else {
                return Ok(None);
            };
            let span = |from: usize, to: usize| Span {
                at: at + from as u64,
                bytes: (to - from) as u64,
            };
            let all = Calls {
                args: span(begin, middle),
                ends: span(middle, end),
                n: calls.len() as i64,
                now: Now::default(),
            };
            let one = Box::new(calls.swap_remove(0));
            launches.push(Launch::All(kernel, one, blocks, all));
        }
        Ok(Some(Joined {
            of,
            launches,
            _kept: kept,
        }))
    }
}

fn as_bytes(args: &Args) -> &[u8] {
    let at = std::ptr::from_ref(args).cast::<u8>();
    // SAFETY: numbers of eight bytes, and of four in pairs, leave nothing between them that is not
    // initialised.
    unsafe { std::slice::from_raw_parts(at, size_of::<Args>()) }
}

#[cfg(test)]
mod tests {
    use super::super::args::{ELEMENTWISE, REDUCE};
    use super::*;

    #[test]
    fn first_steps_of_all_come_before_second_ones() {
        let call = |source, kernel| Step::Call(Call::blocks(source, kernel, 2, 32));
        let squares = || vec![call(REDUCE, "squares"), call(REDUCE, "sum_parts")];
        let bf16 = Call::blocks(REDUCE, "squares", 2, 32);
        let bf16 = bf16.x(0, (Span::default(), "bf16"));
        let padded = vec![call(ELEMENTWISE, "fill"), call(ELEMENTWISE, "pad")];
        let empty = Step::Call(Call::blocks(ELEMENTWISE, "fill", 0, 32));
        let works = vec![
            squares(),
            vec![Step::Call(bf16), call(REDUCE, "sum_parts")],
            padded,
            squares(),
            vec![empty],
        ];
        let seen: Vec<(&str, usize)> = parts(works)
            .iter()
            .map(|part| match part {
                Part::All(kernel, calls) => (*kernel, calls.len()),
                Part::One(step) => match &**step {
                    Step::Call(call) => (call.kernel, 1),
                    other => panic!("{other:?} is no call"),
                },
            })
            .collect();
        assert_eq!(
            seen,
            [
                ("squares_all", 2),
                ("squares_all", 1),
                ("fill_all", 1),
                ("sum_parts_all", 3),
                ("pad", 1)
            ]
        );
    }
}
