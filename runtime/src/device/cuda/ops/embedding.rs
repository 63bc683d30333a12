//! Rows of a table by id, and the gradient for the table: the places are sorted by row, and pieces of
//! the sorted list added up.
//!
//! The order of all sums depends on the ids alone, and no block has more to add up than others,
//! however often an id comes.

use super::super::args::{Call, EMBEDDING, Span, Step};
use super::rows::{MOST_THREADS, SUM_THREADS, WARP};
use super::{Op, Steps};
use crate::error::RuntimeError;

/// Bits of a digit by which places are sorted, and places of a block: the kernels'.
const DIGIT_BITS: u32 = 9;
const TILE: usize = 1024;
/// Entries of a piece of the sorted list, of which each block adds up one: the kernels'.
const PIECE: usize = 64;
/// Most threads of such a block, each with one or eight columns.
const PIECE_THREADS: usize = 256;

impl Op<'_> {
    pub(super) fn embedding(&self) -> Result<Call, RuntimeError> {
        self.integers(1)?;
        let (vocab, n) = (self.x[0].local.ranges[0], self.y[0].elements());
        let width = self.x[0].width();
        let numbers = [
            n as i64,
            width as i64,
            vocab.start as i64,
            vocab.valid as i64,
        ];
        let call = Call::each(EMBEDDING, "embedding", n);
        let mut call = self.operands(call).n(0, &numbers);
        // Ids are integers whatever is compiled.
        call.types.x[1] = "f32";
        Ok(call.by_eights(width, n))
    }

    /// Zeros, then the places sorted by row, then the sums of pieces of the sorted list, and of the
    /// partial sums of rows that pieces share, until one piece is left.
    pub(super) fn embedding_grad(&self) -> Steps {
        self.integers(0)?;
        let vocab = self.y[0].local.ranges[0];
        let (width, places) = (self.x[1].width(), self.x[0].elements());
        let (first, rows) = (vocab.start as i64, vocab.valid as i64);
        if i32::try_from(places).is_err() || i32::try_from(vocab.valid).is_err() {
            return Err(self.error(format!(
                "{places} ids and {rows} rows; there may be as many as 31 bits count"
            )));
        }
        let mut steps = vec![super::fill(0.0, self.y[0])];
        if places == 0 {
            return Ok(steps);
        }
        let sorting = self.sorting();
        let [ranks, counts] = [sorting.ranks(), sorting.counts()];
        let own = |span: Span| (span, "f32");
        // One compilation for all of these kernels and for the rows of the table.
        let [x_type, y_type] = [self.x[1].typed().1, self.y[0].typed().1];
        let typed = |mut call: Call| {
            (call.types.x[0], call.types.y[0]) = (x_type, y_type);
            Step::Call(call)
        };
        // Keys are rows, and one more for ids that are not here.
        let bits = u64::BITS - vocab.valid.leading_zeros();
        let passes = bits.div_ceil(DIGIT_BITS).max(1);
        for pass in 0..passes {
            let before = sorting.keys(pass as usize % 2);
            let after = sorting.keys((pass as usize + 1) % 2);
            let keys = if pass == 0 { self.x[0].span } else { before[0] };
            let numbers = [places as i64, sorting.tiles as i64, first, rows];
            let call = |kernel, blocks, threads| {
                let call = Call::blocks(EMBEDDING, kernel, blocks, threads).x(0, own(keys));
                call.n(0, &numbers).n(4, &[i64::from(pass * DIGIT_BITS)])
            };
            let rank = call("embedding_ranks", sorting.tiles, SUM_THREADS);
            let begins = Call::blocks(EMBEDDING, "embedding_begins", 1, MOST_THREADS as u32);
            let n = sorting.tiles << DIGIT_BITS;
            let blocks = places.div_ceil(SUM_THREADS as usize);
            let sort = call("embedding_sort", blocks, SUM_THREADS);
            let sort = sort.x(1, own(before[1])).x(2, own(ranks)).x(3, own(counts));
            steps.extend([
                typed(rank.y(0, own(ranks)).y(1, own(counts))),
                typed(begins.y(0, own(counts)).n(0, &[n as i64])),
                typed(sort.y(0, own(after[0])).y(1, own(after[1]))),
            ]);
        }
        let mut list = sorting.keys(passes as usize % 2);
        let mut x = self.x[1].span;
        let mut entries = places;
        for level in 0.. {
            let pieces = entries.div_ceil(PIECE);
            let kernel = match level {
                0 => "embedding_sum",
                _ => "embedding_sum_parts",
            };
            let call = Call::blocks(EMBEDDING, kernel, pieces, SUM_THREADS)
                .x(0, own(list[0]))
                .x(1, own(list[1]))
                .x(2, own(x))
                .y(0, self.y[0].typed())
                .n(0, &[entries as i64, width as i64, rows]);
            let next = sorting.partial(level, pieces);
            let [parts, keys, at] =
                next.map(|span| if pieces > 1 { span } else { Span::default() });
            let mut call = call.y(1, own(parts)).y(2, own(keys)).y(3, own(at));
            let mut columns = width;
            if call.can_take_eights(width) {
                columns /= 8;
                call = call.with_eights();
            }
            let blocks = columns.div_ceil(PIECE_THREADS);
            let threads = columns.div_ceil(blocks.max(1)).next_multiple_of(WARP);
            call.threads = threads as u32;
            call.grid[1] = blocks as u32;
            steps.push(typed(call));
            if pieces <= 1 {
                break;
            }
            (entries, list, x) = (2 * pieces, [keys, at], parts);
        }
        Ok(steps)
    }

    /// The scratch memory of the table's gradient.
    pub(super) fn sorting(&self) -> Sorting {
        let places = self.x[0].elements();
        Sorting {
            at: self.scratch,
            places,
            width: self.x[1].width(),
            tiles: places.div_ceil(TILE),
        }
    }
}

/// Scratch memory of a table's gradient: ranks of places, two lists of keys and places that are
/// sorted in turn, counts of digits, then partial sums of pieces with their lists, level by level.
pub(super) struct Sorting {
    at: u64,
    places: usize,
    width: usize,
    tiles: usize,
}

impl Sorting {
    /// Four bytes for each place, aligned.
    fn list(&self) -> u64 {
        (4 * self.places as u64).next_multiple_of(ALIGNED)
    }
    fn span(&self, offset: u64, words: usize) -> Span {
        Span {
            at: self.at + offset,
            bytes: 4 * words as u64,
        }
    }
    fn ranks(&self) -> Span {
        self.span(0, self.places)
    }
    /// Keys and places, one list or the other.
    fn keys(&self, which: usize) -> [Span; 2] {
        [1, 2].map(|i| self.span((2 * which as u64 + i) * self.list(), self.places))
    }
    fn counts(&self) -> Span {
        self.span(5 * self.list(), self.tiles << DIGIT_BITS)
    }
    /// Bytes of the partial sums, keys and places of a level with so many pieces.
    fn of_level(&self, pieces: usize) -> [u64; 3] {
        [self.width, 1, 1].map(|words| (4 * (2 * pieces * words) as u64).next_multiple_of(ALIGNED))
    }
    /// Partial sums, keys and places of level `level`, which has so many pieces.
    fn partial(&self, level: usize, pieces: usize) -> [Span; 3] {
        let mut offset = 5 * self.list() + self.counts().bytes;
        let mut of_level = self.places.div_ceil(PIECE);
        for _ in 0..level {
            offset += self.of_level(of_level).iter().sum::<u64>();
            of_level = (2 * of_level).div_ceil(PIECE);
        }
        let [parts, keys, _] = self.of_level(pieces);
        [
            self.span(offset, 2 * pieces * self.width),
            self.span(offset + parts, 2 * pieces),
            self.span(offset + parts + keys, 2 * pieces),
        ]
    }
    pub(super) fn bytes(&self) -> usize {
        let mut bytes = 5 * self.list() + self.counts().bytes;
        let mut pieces = self.places.div_ceil(PIECE);
        while pieces > 1 {
            bytes += self.of_level(pieces).iter().sum::<u64>();
            pieces = (2 * pieces).div_ceil(PIECE);
        }
        bytes as usize
    }
}

/// To what lists in scratch memory are aligned.
const ALIGNED: u64 = 256;
