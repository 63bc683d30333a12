//! From calls of the runtime to groups of NCCL's, as plain data: what is moved before, the group,
//! and what is moved after.
//!
//! NCCL's buffers are one piece, so pieces that stand in rows and blocks of exchanges that are none
//! go through the stream's staging memory. So do operands that a result overlaps where NCCL does not
//! work in place.

use super::library::Entry;
use crate::device::cuda::Region;
use crate::error::RuntimeError;
use crate::execute::collective::Rows;
use crate::fabric::threads::{extent, within};
use crate::fabric::{Call, CallKind, Collective, Exchange, Item};
use ir::collective::CollectiveKind;
use ir::reshard::Tile;
use ir::{DType, Rank, Reduction};
use std::ffi::c_int;
use std::ops::Range;

/// Alignment of blocks of the staging memory.
const ALIGNED: usize = 256;

/// An address: of the arena, or in the staging memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Spot {
    At(u64),
    Staged(usize),
}

/// A move of elements on the rank's GPU.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Move {
    Copy {
        from: Spot,
        to: Spot,
        bytes: usize,
    },
    /// Zeros.
    Clear {
        at: Spot,
        bytes: usize,
    },
    /// A box to one piece.
    Lift {
        of: Region,
        from: Spot,
        to: Spot,
    },
    /// One piece to a box.
    Lay {
        of: Region,
        from: Spot,
        to: Spot,
    },
}

/// One call of a group, at spots.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Do {
    Reduce(c_int),
    ReduceScatter(c_int),
    Gather,
    Send(usize),
    Receive(usize),
}

/// The parts of a call of the runtime.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Plan {
    pub before: Vec<Move>,
    /// What, from where, to where, elements and their type; a send or receive has one spot.
    pub group: Vec<(Do, [Spot; 2], usize, c_int)>,
    pub after: Vec<Move>,
    /// Bytes of staging memory.
    pub staged: usize,
}

/// NCCL's number of an element type. Those that it need not know are bytes.
fn number(dtype: DType) -> c_int {
    match dtype {
        DType::F32 => 7,
        DType::Bf16 => 9,
        DType::F16 => 6,
        DType::I32 => 2,
        DType::F8e4m3 | DType::F8e5m2 | DType::F4e2m1 => 1,
    }
}

/// NCCL's number of a reduction.
fn reduction(kind: Reduction) -> c_int {
    match kind {
        Reduction::Sum => 0,
        Reduction::Max => 2,
        Reduction::Min => 3,
    }
}

impl Entry {
    /// The call at addresses.
    pub fn new((what, [from, to], count, dtype): (Do, [u64; 2], usize, c_int)) -> Self {
        match what {
            Do::Reduce(by) => Entry::AllReduce {
                from,
                to,
                count,
                dtype,
                by,
            },
            Do::ReduceScatter(by) => Entry::ReduceScatter {
                from,
                to,
                count,
                dtype,
                by,
            },
            Do::Gather => Entry::AllGather {
                from,
                to,
                count,
                dtype,
            },
            Do::Send(peer) => Entry::Send {
                from,
                count,
                dtype,
                peer,
            },
            Do::Receive(peer) => Entry::Receive {
                to,
                count,
                dtype,
                peer,
            },
        }
    }
}

impl Plan {
    fn stage(&mut self, bytes: usize) -> Spot {
        let at = self.staged.next_multiple_of(ALIGNED);
        self.staged = at + bytes;
        Spot::Staged(at)
    }
    fn copied(&mut self, from: Spot, bytes: usize) -> Spot {
        let to = self.stage(bytes);
        self.before.push(Move::Copy { from, to, bytes });
        to
    }

    /// A collective of group member `me`, given the bytes of operands and results by item.
    ///
    /// Fails where NCCL has no such reduction of the type.
    pub fn collective(
        of: &Collective,
        me: usize,
        (inputs, outputs): (&[Range<u64>], &[Range<u64>]),
    ) -> Result<Self, RuntimeError> {
        let mut plan = Plan::default();
        for ((item, input), output) in of.items.iter().zip(inputs).zip(outputs) {
            if !input.is_empty() {
                plan.item(of.kind, item, (me, of.group.len()), (input, output))?;
            }
        }
        Ok(plan)
    }

    fn item(
        &mut self,
        kind: CollectiveKind,
        item: &Item,
        (me, n): (usize, usize),
        (input, output): (&Range<u64>, &Range<u64>),
    ) -> Result<(), RuntimeError> {
        let (size, dtype) = (item.dtype.bytes() as usize, number(item.dtype));
        let (all, piece) = (item.elements, item.elements / n);
        let bytes = (input.end - input.start) as usize;
        let (mut from, to) = (Spot::At(input.start), Spot::At(output.start));
        if n == 1 {
            if from != to {
                self.before.push(Move::Copy { from, to, bytes });
            }
            return Ok(());
        }
        let reduce = match kind {
            CollectiveKind::AllReduce(by) | CollectiveKind::ReduceScatter(by) => Some(by),
            _ => None,
        };
        if let Some(by) = reduce
            && !(item.dtype.is_float() && size > 1)
        {
            return Err(RuntimeError::Program(format!(
                "NCCL reduces no {} by {by:?}",
                item.dtype.name()
            )));
        }
        let cuts = matches!(
            kind,
            CollectiveKind::ReduceScatter(_) | CollectiveKind::AllToAll
        );
        let overlaps = input.start < output.end && output.start < input.end;
        let in_place = match kind {
            CollectiveKind::AllReduce(_) => input.start == output.start,
            CollectiveKind::ReduceScatter(_) => {
                output.start == input.start + (me * piece * size) as u64
            }
            CollectiveKind::AllGather => input.start == output.start + (me * all * size) as u64,
            CollectiveKind::AllToAll | CollectiveKind::Shift => false,
        };
        if cuts && item.operand.rows > 1 {
            let packed = self.stage(bytes);
            for (j, of) in pieces(item.dtype, item.operand, all).enumerate() {
                let to = packed.plus(j * piece * size);
                self.before.push(Move::Lift { of, from, to });
            }
            from = packed;
        } else if overlaps && !in_place {
            from = self.copied(from, bytes);
        }
        // Where results stand in rows they arrive as pieces.
        let joins = matches!(kind, CollectiveKind::AllGather | CollectiveKind::AllToAll);
        let n_out = (output.end - output.start) as usize;
        let lands = match joins && item.result.rows > 1 {
            true => self.stage(n_out),
            false => to,
        };
        match kind {
            CollectiveKind::AllReduce(by) => {
                let what = Do::Reduce(reduction(by));
                self.group.push((what, [from, to], all, dtype));
            }
            CollectiveKind::ReduceScatter(by) => {
                let what = Do::ReduceScatter(reduction(by));
                self.group.push((what, [from, to], piece, dtype));
            }
            CollectiveKind::AllGather => {
                self.group.push((Do::Gather, [from, lands], all, dtype));
            }
            CollectiveKind::AllToAll => {
                for j in 0..n {
                    let [from, to] = [from, lands].map(|s| s.plus(j * piece * size));
                    self.group.push((Do::Send(j), [from; 2], piece, dtype));
                    self.group.push((Do::Receive(j), [to; 2], piece, dtype));
                }
            }
            CollectiveKind::Shift => {
                let [next, before] = [(me + 1) % n, (me + n - 1) % n];
                self.group.push((Do::Send(next), [from; 2], all, dtype));
                self.group.push((Do::Receive(before), [to; 2], all, dtype));
            }
        }
        if lands != to {
            let elements = n_out / size;
            for (j, of) in pieces(item.dtype, item.result, elements).enumerate() {
                let from = lands.plus(j * n_out / n);
                self.after.push(Move::Lay { of, from, to });
            }
        }
        Ok(())
    }

    /// An exchange, given the bytes of what is sent and received, and the ranks' numbers. Blocks of
    /// two ranks go in the order of transfers and places, on both sides.
    pub fn exchange(
        of: &Exchange,
        number_of: impl Fn(Rank) -> Result<usize, RuntimeError>,
        (inputs, outputs): (&[Range<u64>], &[Range<u64>]),
    ) -> Result<Self, RuntimeError> {
        let mut plan = Plan::default();
        let touches = |input: &Range<u64>| {
            outputs
                .iter()
                .any(|o| o.start < input.end && input.start < o.end)
        };
        for (moved, output) in of.receives.iter().zip(outputs) {
            let n_arrive: u64 = moved
                .tiles
                .iter()
                .map(|t| t.len.iter().product::<u64>())
                .sum();
            let bytes = (output.end - output.start) as usize;
            if (n_arrive as usize) < moved.local.elements() {
                let at = Spot::At(output.start);
                plan.after.push(Move::Clear { at, bytes });
            }
        }
        // What is not covered is cleared before anything arrives, and after operands were copied.
        let clears = std::mem::take(&mut plan.after);
        for (i, tile) in blocks(&of.sends) {
            let moved = &of.sends[i];
            let (region, at) = (region(&moved.local, tile), Spot::At(inputs[i].start));
            let from = match region.offset() {
                Some(offset) if !touches(&inputs[i]) => at.plus(offset),
                _ => {
                    let to = plan.stage(region.bytes());
                    let of = region.clone();
                    plan.before.push(Move::Lift { of, from: at, to });
                    to
                }
            };
            let what = Do::Send(number_of(tile.to)?);
            plan.message(what, from, &region);
        }
        plan.before.extend(clears);
        for (i, tile) in blocks(&of.receives) {
            let moved = &of.receives[i];
            let (region, at) = (region(&moved.local, tile), Spot::At(outputs[i].start));
            let to = match region.offset() {
                Some(offset) => at.plus(offset),
                None => {
                    let from = plan.stage(region.bytes());
                    let of = region.clone();
                    plan.after.push(Move::Lay { of, from, to: at });
                    from
                }
            };
            let what = Do::Receive(number_of(tile.from)?);
            plan.message(what, to, &region);
        }
        Ok(plan)
    }

    fn message(&mut self, what: Do, at: Spot, of: &Region) {
        let elements = of.len.iter().product();
        self.group.push((what, [at; 2], elements, number(of.dtype)));
    }
}

/// Bytes of staging memory that a rank's call takes, given the bytes of operands and results; 0 of one
/// that NCCL would refuse.
pub(crate) fn staged(call: &Call, rank: Rank, at: (&[Range<u64>], &[Range<u64>])) -> usize {
    let plan = match &call.kind {
        CallKind::Collective(of) => {
            let me = of.group.iter().position(|r| *r == rank);
            Plan::collective(of, me.unwrap_or(0), at)
        }
        CallKind::Exchange(of) => Plan::exchange(of, |r| Ok(r.0 as usize), at),
    };
    plan.map_or(0, |plan| plan.staged)
}

impl Spot {
    fn plus(self, bytes: usize) -> Self {
        match self {
            Spot::At(at) => Spot::At(at + bytes as u64),
            Spot::Staged(at) => Spot::Staged(at + bytes),
        }
    }
    /// The address, where the staging memory is there.
    pub fn address(self, staging: u64) -> u64 {
        match self {
            Spot::At(at) => at,
            Spot::Staged(at) => staging + at as u64,
        }
    }
}

/// The pieces of a buffer of so many elements, which stand in rows.
fn pieces(dtype: DType, rows: Rows, elements: usize) -> impl Iterator<Item = Region> {
    let part = elements / (rows.rows * rows.n).max(1);
    (0..rows.n).map(move |j| Region {
        dtype,
        dims: vec![rows.rows, rows.n * part],
        start: vec![0, j * part],
        len: vec![rows.rows, part],
    })
}

/// The blocks of buffers that are sent or received, by buffer, in the order in which they go.
pub(super) fn blocks(of: &[crate::fabric::Moved]) -> Vec<(usize, &Tile)> {
    let all = of.iter().enumerate();
    let mut all: Vec<(usize, &Tile)> = all
        .flat_map(|(i, m)| m.tiles.iter().map(move |t| (i, t)))
        .collect();
    all.sort_by_key(|(i, tile)| (of[*i].transfer, tile.start.clone()));
    all
}

/// Where a block lies in a rank's part.
fn region(local: &crate::execute::Local, tile: &Tile) -> Region {
    Region {
        dtype: local.dtype,
        dims: local.dims(),
        start: within(tile, local),
        len: extent(tile, local).0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::{Contract, Order};

    fn planned(kind: CollectiveKind, operand: Rows, result: Rows, at: [Range<u64>; 2]) -> Plan {
        let elements = (at[0].end - at[0].start) as usize / 4;
        let of = Collective {
            kind,
            group: vec![Rank(4), Rank(2)],
            number: 0,
            contract: Contract::new(kind, DType::F32, Order::Library),
            items: vec![Item {
                dtype: DType::F32,
                elements,
                operand,
                result,
            }],
        };
        let [input, output] = at;
        Plan::collective(&of, 1, (&[input], &[output])).expect("it is one of NCCL's")
    }

    #[test]
    fn what_nccl_can_do_in_place_is_not_copied() {
        let one = Rows::ONE;
        let sum = CollectiveKind::AllReduce(Reduction::Sum);
        let plan = planned(sum, one, one, [0..80, 0..80]);
        assert_eq!((plan.before.len(), plan.staged), (0, 0));
        let at = Spot::At(0);
        assert_eq!(plan.group, [(Do::Reduce(0), [at, at], 20, 7)]);
        // A result that begins within the operand is none of these.
        let plan = planned(sum, one, one, [0..80, 40..120]);
        assert_eq!((plan.before.len(), plan.staged), (1, 80));
        let gather = CollectiveKind::AllGather;
        let two = Rows { rows: 1, n: 2 };
        assert_eq!(planned(gather, one, two, [80..160, 0..160]).staged, 0);
        assert_eq!(planned(gather, one, two, [0..80, 0..160]).staged, 80);
    }

    #[test]
    fn pieces_in_rows_are_packed() {
        let rows = |rows| Rows { rows, n: 2 };
        let kind = CollectiveKind::AllToAll;
        let plan = planned(kind, rows(2), rows(5), [0..80, 100..180]);
        let moves = [&plan.before, &plan.after].map(Vec::len);
        assert_eq!((moves, plan.group.len()), ([2, 2], 4));
        let second = Region {
            dtype: DType::F32,
            dims: vec![2, 10],
            start: vec![0, 5],
            len: vec![2, 5],
        };
        let (from, to) = (Spot::At(0), Spot::Staged(40));
        assert_eq!(
            plan.before[1],
            Move::Lift {
                of: second,
                from,
                to
            }
        );
        let arrives = (Do::Receive(1), [Spot::Staged(256 + 40); 2], 10, 7);
        assert_eq!(plan.group[3], arrives);
    }
}
