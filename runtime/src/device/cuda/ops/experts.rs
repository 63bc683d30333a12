//! Mixtures of experts: choices of tokens, rows to the slots of their experts and back.
//!
//! Which choice a slot has, if any, is found first, in scratch memory: then a result of a dispatch is
//! written once, and nothing is added up by several threads.

use super::super::args::{Call, ELEMENTWISE, EXPERTS, Span, Step, THREADS};
use super::rows::{MOST, WARP, extents, threads_of_row};
use super::{Op, Part, Steps};
use crate::cpu::experts::Slots;
use crate::error::RuntimeError;
use crate::execute::expert_lengths;
use ir::op::Scores;
use ir::{DType, OpKind};

/// Warps of a block that numbers the choices of an expert: the kernel's.
const WARPS: usize = 8;
/// Entries of a list that a warp takes at a time.
const AT_ONCE: usize = 4 * WARP;
/// Bytes of shared memory that every block may have.
const MOST_SHARED: usize = 48 << 10;
/// Rows of an expert that a thread adds a bias to at least.
const ROWS_OF_THREAD: usize = 8;

/// The lists of the experts that are chosen: entries and length of one sample's, and its place.
struct Lists {
    entries: usize,
    len: usize,
    samples: usize,
}

impl Op<'_> {
    pub(super) fn experts_scratch(&self) -> usize {
        match self.kind {
            OpKind::Route { .. } => {
                let lists = self.lists();
                4 * lists.len * lists.samples
            }
            OpKind::Dispatch { .. } => {
                let s = self.slots();
                4 * s.samples * s.experts * s.capacity
            }
            _ => 0,
        }
    }

    pub(super) fn experts(&self) -> Steps {
        match self.kind {
            OpKind::Route { .. } => self.route(),
            OpKind::RouteGrad {
                capacity,
                normalize,
                scores,
            } => self.route_grad(*capacity, *normalize, *scores),
            OpKind::Dispatch { .. } => self.dispatch(),
            OpKind::Combine => self.combine(),
            OpKind::GateGrad => self.gate_grad(),
            OpKind::ExpertBias => self.expert_bias(),
            OpKind::ClampedSwiglu { alpha, limit } => {
                self.clamped("clamped_swiglu", &[*alpha, *limit])
            }
            OpKind::ClampedSwigluGrad { alpha, limit } => {
                self.clamped("clamped_swiglu_grad", &[*alpha, *limit])
            }
            _ => Err(self.error("is no op of experts")),
        }
    }

    /// Fails where these parts are not of one type of floats, which is the kernels' `T0`.
    fn of_one_type(&self, parts: &[&Part<'_>]) -> Result<(), RuntimeError> {
        let types: Vec<DType> = parts.iter().map(|p| p.local.dtype).collect();
        let first = types.first().copied().unwrap_or(DType::F32);
        match first != DType::I32 && types.iter().all(|t| *t == first) {
            true => Ok(()),
            false => Err(self.error(format!("{types:?} where floats of one type are expected"))),
        }
    }

    /// Fails where a part's numbers are not those of gates.
    fn gates(&self, part: &Part<'_>) -> Result<(), RuntimeError> {
        match part.local.dtype {
            DType::F32 => Ok(()),
            other => Err(self.error(format!("gates are {}, expected f32", other.name()))),
        }
    }

    /// Fails where numbers have more bits than the kernels count with.
    fn counted(&self, what: &str, n: usize) -> Result<(), RuntimeError> {
        match i32::try_from(n) {
            Ok(_) => Ok(()),
            Err(_) => Err(self.error(format!("{n} {what}; there may be as many as 31 bits count"))),
        }
    }

    /// A call with operand 0 and result 0 of the kernels' type. Other operands have types of their
    /// own, which the kernels know.
    fn experts_call(&self, kernel: &'static str) -> Call {
        let mut call = Call::blocks(EXPERTS, kernel, 1, THREADS);
        for (i, x) in self.x.iter().enumerate() {
            call = call.x(i, (x.span, "f32"));
        }
        for (i, y) in self.y.iter().enumerate() {
            call = call.y(i, (y.span, "f32"));
        }
        call.types.x[0] = self.x[0].typed().1;
        call
    }

    fn lists(&self) -> Lists {
        let gates = self.y[0].dims();
        let entries = gates[1] * gates[2];
        Lists {
            entries,
            len: entries.next_multiple_of(4),
            samples: gates[0],
        }
    }

    /// Lengths of rows of slots, rows of tokens, and slots, in the places that the op has them.
    fn slots(&self) -> Slots {
        let (experts, tokens, slots) = match self.kind {
            OpKind::Combine => (&self.x[0], &self.y[0], &self.x[1]),
            OpKind::GateGrad => (&self.x[0], &self.x[1], &self.x[2]),
            _ => (&self.y[0], &self.x[0], &self.x[1]),
        };
        expert_lengths(experts.local, tokens.local, slots.local)
    }

    /// Blocks of rows of logits, each with some lanes of a warp, and so many words of shared memory.
    fn by_lanes(&self, mut call: Call, words: usize) -> Result<Call, RuntimeError> {
        let logits = self.x[0].dims();
        let (rows, experts) = (logits[0] * logits[1], logits[2]);
        let lanes = experts.next_power_of_two().clamp(4, WARP);
        let of_warp = WARP / lanes * words * 8;
        let warps = (MOST_SHARED / of_warp.max(1)).clamp(1, WARPS);
        if warps * of_warp > MOST_SHARED {
            let most = MOST_SHARED / 8;
            return Err(self.error(format!(
                "{experts} experts are too many: {words} of {most} words"
            )));
        }
        call.threads = (warps * WARP) as u32;
        call.shared = (warps * of_warp) as u32;
        call.grid = extents([rows.div_ceil(warps * WARP / lanes), 1, 1]);
        Ok(call
            .n(0, &[rows as i64, experts as i64])
            .n(3, &[lanes as i64]))
    }

    /// The choices of all tokens, then their places.
    fn route(&self) -> Steps {
        let OpKind::Route {
            top_k,
            capacity,
            normalize,
            scores,
            groups,
        } = self.kind
        else {
            return Err(self.error("is no route"));
        };
        let has_bias = self.x.len() == 2;
        let logits = self.x[0].dims();
        let (tokens, experts) = (logits[1], logits[2]);
        self.floats(&(0..self.x.len()).collect::<Vec<_>>())?;
        self.gates(&self.y[0])?;
        let (lists, top_k) = (self.lists(), *top_k as usize);
        if top_k > experts || self.y[0].dims()[2] != top_k || self.y[1].local.dtype != DType::I32 {
            return Err(self.error(format!("{top_k} choices of {experts} experts")));
        }
        self.counted("choices of a sample", lists.entries)?;
        self.counted("slots", experts * *capacity as usize)?;
        let list = Span {
            at: self.scratch,
            bytes: (4 * lists.len * lists.samples) as u64,
        };
        let by_logits =
            *scores == Scores::Softmax && !has_bias && groups.is_none_or(|g| g.best == 1);
        let [count, kept, best] = groups.map_or([0; 3], |g| [g.count, g.kept, g.best]);
        let words = experts + count as usize + top_k.div_ceil(2);
        let mut call = self.by_lanes(self.experts_call("route"), words)?;
        if has_bias {
            call.types.x[1] = self.x[1].typed().1;
        }
        let flags = [*scores == Scores::Sigmoid, *normalize, by_logits, has_bias];
        let call = call
            .y(1, (list, "f32"))
            .n(2, &[top_k as i64])
            .n(4, &[tokens as i64, lists.len as i64])
            .n(6, &flags.map(i64::from))
            .n(10, &[count, kept, best].map(|n| n as i64))
            .n(13, &[words as i64]);
        let mut places = Call::blocks(EXPERTS, "route_places", experts, (WARPS * WARP) as u32)
            .x(0, (list, "f32"))
            .y(0, (self.y[1].span, "f32"));
        places.grid[1] = lists.samples.min(MOST) as u32;
        // One compilation for both.
        places.types = call.types;
        let of_warp = lists.entries.div_ceil(WARPS).next_multiple_of(AT_ONCE);
        let numbers = [lists.entries, lists.len, of_warp, tokens, top_k];
        let places = places.n(0, &numbers.map(|n| n as i64));
        let places = places.n(5, &[*capacity as i64, lists.samples as i64]);
        Ok(vec![Step::Call(call), Step::Call(places)])
    }

    fn route_grad(&self, capacity: u64, normalize: bool, scores: Scores) -> Steps {
        self.integers(1)?;
        self.of_one_type(&[&self.x[0], &self.y[0]])?;
        self.gates(&self.x[2])?;
        let call = self.by_lanes(self.experts_call("route_grad"), 0)?;
        let top_k = self.x[1].dims()[2] as i64;
        let flags = [scores == Scores::Sigmoid, normalize].map(i64::from);
        let call = call.n(2, &[top_k]).n(4, &[capacity as i64]).n(5, &flags);
        Ok(vec![Step::Call(call)])
    }

    /// Threads of a row, with the call for rows by eights where they can be taken so.
    fn by_rows(call: Call, width: usize) -> (Call, usize) {
        match call.can_take_eights(width) {
            true => (call.with_eights(), threads_of_row(width / 8)),
            false => (call, threads_of_row(width)),
        }
    }

    /// The owner of each slot, then the rows.
    fn dispatch(&self) -> Steps {
        self.integers(1)?;
        self.of_one_type(&[&self.x[0], &self.y[0]])?;
        let has_gates = self.x.len() == 3;
        if has_gates {
            self.gates(&self.x[2])?;
        }
        let s = self.slots();
        let of_sample = s.experts * s.capacity;
        self.counted("choices", s.samples * s.tokens * s.choices)?;
        self.counted("slots", (s.first + s.experts) * s.capacity)?;
        let owners = Span {
            at: self.scratch,
            bytes: (4 * s.samples * of_sample) as u64,
        };
        let n = s.valid_samples * of_sample;
        let zeros = Call::each(ELEMENTWISE, "fill", n).y(0, (owners, "f32"));
        let zeros = zeros.n(0, &[n as i64]).by_eights(n, n);
        let mut own = Call::blocks(EXPERTS, "slot_owners", 1, THREADS)
            .x(0, (self.x[1].span, "f32"))
            .y(0, (owners, "f32"));
        let choices = s.valid_tokens * s.choices;
        own.grid = extents([choices.div_ceil(THREADS as usize), s.valid_samples, 1]);
        let of_samples = [choices, s.tokens * s.choices, s.valid_samples];
        let own = own.n(0, &of_samples.map(|n| n as i64));
        let mut own = own.n(3, &[s.first * s.capacity, of_sample].map(|n| n as i64));
        let call = self.experts_call("dispatch").x(1, (owners, "f32"));
        let (mut call, of_row) = Self::by_rows(call, s.width);
        own.types = call.types;
        let blocks = s.capacity.div_ceil(THREADS as usize / of_row);
        call.grid = extents([blocks, s.valid_samples, s.experts]);
        let lengths = [s.capacity, s.samples, s.valid_samples, s.experts];
        let call = call.n(0, &lengths.map(|n| n as i64));
        let rest = [s.width, s.choices, of_row, usize::from(has_gates)];
        let call = call.n(4, &rest.map(|n| n as i64));
        Ok([zeros, own, call].map(Step::Call).into())
    }

    /// The numbers that `combine` and `gate_grad` have.
    fn slot_numbers(&self, call: Call, s: &Slots) -> Result<Call, RuntimeError> {
        self.counted("choices of a sample", s.tokens * s.choices)?;
        self.counted("slots", (s.first + s.experts) * s.capacity)?;
        let lengths = [s.valid_tokens, s.tokens, s.valid_samples, s.samples];
        let slots = [s.capacity, s.first * s.capacity, s.experts * s.capacity];
        let call = call.n(0, &lengths.map(|n| n as i64));
        let call = call.n(4, &slots.map(|n| n as i64));
        Ok(call.n(7, &[s.width, s.choices].map(|n| n as i64)))
    }

    fn combine(&self) -> Steps {
        self.integers(1)?;
        self.of_one_type(&[&self.x[0], &self.y[0]])?;
        let has_gates = self.x.len() == 3;
        if has_gates {
            self.gates(&self.x[2])?;
        }
        let s = self.slots();
        let call = self.slot_numbers(self.experts_call("combine"), &s)?;
        let (mut call, of_row) = Self::by_rows(call, s.width);
        let blocks = s.valid_tokens.div_ceil(THREADS as usize / of_row);
        call.grid = extents([blocks, s.valid_samples, 1]);
        let call = call.n(9, &[of_row as i64, i64::from(has_gates)]);
        Ok(vec![Step::Call(call)])
    }

    fn gate_grad(&self) -> Steps {
        self.integers(2)?;
        self.of_one_type(&[&self.x[0], &self.x[1]])?;
        self.gates(&self.y[0])?;
        let s = self.slots();
        let call = self.slot_numbers(self.experts_call("gate_grad"), &s)?;
        let (mut call, _) = Self::by_rows(call, s.width);
        let blocks = (s.valid_tokens * s.choices).div_ceil(WARPS);
        call.grid = extents([blocks, s.valid_samples, 1]);
        Ok(vec![Step::Call(call)])
    }

    fn expert_bias(&self) -> Steps {
        self.of_one_type(&[&self.x[0], &self.x[1], &self.y[0]])?;
        let width = self.x[0].width();
        let experts = self.x[1].elements() / width.max(1);
        let rows = self.x[0].elements() / (width * experts).max(1);
        if rows * experts * width != self.y[0].elements() {
            return Err(self.error("rows do not repeat the experts' biases"));
        }
        let call = self.experts_call("expert_bias");
        let (mut call, of_row) = Self::by_rows(call, width);
        let pieces = if call.can_take_eights(width) {
            width / 8
        } else {
            width
        };
        call.threads = of_row as u32;
        let blocks = [
            pieces.div_ceil(of_row),
            rows.div_ceil(ROWS_OF_THREAD),
            experts,
        ];
        call.grid = extents(blocks);
        let call = call.n(0, &[rows, width, experts].map(|n| n as i64));
        Ok(vec![Step::Call(call)])
    }

    fn clamped(&self, kernel: &'static str, figures: &[f64]) -> Steps {
        let parts: Vec<&Part<'_>> = self.x.iter().chain(self.y).collect();
        self.of_one_type(&parts)?;
        let n = self.y[0].elements();
        if parts.iter().any(|p| p.elements() != n) {
            return Err(self.error("operands and results have different numbers of elements"));
        }
        let call = self.experts_call(kernel).over(n);
        let call = call.n(0, &[n as i64]).f(figures).by_eights(n, n);
        Ok(vec![Step::Call(call)])
    }
}
