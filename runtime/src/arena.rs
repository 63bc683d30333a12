//! Bytes that tensors live in, and borrowing several of them at once.
//!
//! Storage is made of `u64`s, so every offset that is a multiple of 8 is aligned for every
//! element type. [`Arena::borrow`] hands out any number of ranges of one allocation, shared
//! ones and exclusive ones, by splitting it at their ends: no range is handed out twice
//! exclusively, and no `unsafe` is needed.

use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

/// A block of bytes, aligned to 8. It may have more storage than it uses.
#[derive(Clone, Debug, Default)]
pub struct Bytes {
    words: Vec<u64>,
    len: usize,
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(self)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Whole;
        impl Visitor<'_> for Whole {
            type Value = Bytes;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("bytes")
            }
            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Bytes, E> {
                Ok(Bytes::copy_of(bytes))
            }
        }
        from.deserialize_bytes(Whole)
    }
}

impl PartialEq for Bytes {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Bytes {}

impl Bytes {
    /// `len` zero bytes.
    pub fn zeroed(len: usize) -> Self {
        Bytes {
            words: vec![0; len.div_ceil(8)],
            len,
        }
    }
    /// A copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> Self {
        if let Ok(words) = bytemuck::try_cast_slice(bytes) {
            return Bytes {
                words: words.to_vec(),
                len: bytes.len(),
            };
        }
        let mut b = Self::zeroed(bytes.len());
        b.copy_from_slice(bytes);
        b
    }
    /// Changes the length; what the bytes are then is not defined.
    pub fn set_len(&mut self, len: usize) {
        if self.capacity() < len {
            // Nothing is worth copying to the larger block.
            self.words = vec![0; len.div_ceil(8)];
        }
        self.len = len;
    }
    /// Bytes of storage.
    pub fn capacity(&self) -> usize {
        8 * self.words.len()
    }
    /// The bytes of `values`.
    pub fn of_f32(values: &[f32]) -> Self {
        Self::copy_of(bytemuck::cast_slice(values))
    }
    /// The bytes as numbers. The length must be a multiple of 4.
    pub fn f32s(&self) -> &[f32] {
        bytemuck::cast_slice(self)
    }
}

impl Deref for Bytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }
}

impl DerefMut for Bytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.len]
    }
}

/// Bytes of an arena, read: where they lie, or a copy where the host cannot reach them.
#[derive(Debug)]
pub enum View<'a> {
    /// In the arena.
    There(&'a [u8]),
    /// Copied.
    Copied(Bytes),
}

impl Deref for View<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            View::There(bytes) => bytes,
            View::Copied(bytes) => bytes,
        }
    }
}

/// Blocks for messages, used again.
///
/// A block from the system is mapped anew, and every page of it faults when it is first
/// touched: for messages of megabytes that takes as long as copying them. So a rank keeps its
/// blocks, altogether at most twice its largest message: one may be on its way while the next
/// one is filled. A block that others still read is waited for in `lent`.
#[derive(Debug, Default)]
pub struct Spare {
    free: Vec<Bytes>,
    lent: Vec<Arc<Bytes>>,
    largest: usize,
}

impl Spare {
    /// A block of `len` bytes, whatever they are.
    pub fn take(&mut self, len: usize) -> Bytes {
        self.largest = self.largest.max(len.next_multiple_of(8));
        for block in std::mem::take(&mut self.lent) {
            match Arc::try_unwrap(block) {
                Ok(block) => self.give(block),
                Err(block) => self.lent.push(block),
            }
        }
        // The smallest that is large enough, or else the largest, which then grows.
        let fits = |b: &Bytes| b.capacity() >= len;
        let best = |(_, b): &(usize, &Bytes)| {
            (
                !fits(b),
                if fits(b) {
                    b.capacity()
                } else {
                    usize::MAX - b.capacity()
                },
            )
        };
        let found = self
            .free
            .iter()
            .enumerate()
            .min_by_key(best)
            .map(|(i, _)| i);
        let mut block = found.map_or_else(Bytes::default, |i| self.free.swap_remove(i));
        block.set_len(len);
        block
    }
    /// Takes a block back.
    pub fn give(&mut self, block: Bytes) {
        if self.bytes() + block.capacity() <= 2 * self.largest {
            self.free.push(block);
        }
    }
    /// A block that others may read; it comes back when they are done.
    pub fn lend(&mut self, block: Bytes) -> Arc<Bytes> {
        let block = Arc::new(block);
        self.lent.push(Arc::clone(&block));
        block
    }
    /// Bytes of all blocks, lent ones included.
    pub fn bytes(&self) -> usize {
        let free = self.free.iter().map(Bytes::capacity).sum::<usize>();
        free + self.lent.iter().map(|b| b.capacity()).sum::<usize>()
    }
}

/// A rank's memory.
#[derive(Debug)]
pub struct Arena {
    bytes: Bytes,
}

/// Ranges borrowed from an arena, in the order they were asked for.
pub struct Borrowed<'a> {
    /// Shared ranges.
    pub reads: Vec<&'a [u8]>,
    /// Exclusive ranges.
    pub writes: Vec<&'a mut [u8]>,
}

impl Arena {
    /// An arena of `len` zero bytes.
    pub fn new(len: usize) -> Self {
        Arena {
            bytes: Bytes::zeroed(len),
        }
    }
    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }
    /// True when the arena has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
    /// One range.
    ///
    /// # Panics
    /// If the range reaches beyond the arena.
    pub fn read(&self, range: Range<usize>) -> &[u8] {
        &self.bytes[range]
    }
    /// One range, to write.
    ///
    /// # Panics
    /// If the range reaches beyond the arena.
    pub fn write(&mut self, range: Range<usize>) -> &mut [u8] {
        &mut self.bytes[range]
    }
    /// Copies a range to `to`; they may overlap.
    ///
    /// # Panics
    /// If either reaches beyond the arena.
    pub fn copy(&mut self, from: Range<usize>, to: usize) {
        self.bytes.copy_within(from, to);
    }
    /// Several ranges at once; reads may overlap each other. The error says which ranges
    /// clash: a write with another range, or a range with the end of the arena.
    pub fn borrow(
        &mut self,
        reads: &[Range<usize>],
        writes: &[Range<usize>],
    ) -> Result<Borrowed<'_>, String> {
        let mut segments = merged(reads);
        segments.extend(writes.iter().filter(|w| !w.is_empty()).map(|w| Segment {
            range: w.clone(),
            write: true,
        }));
        segments.sort_by_key(|s| s.range.start);
        for pair in segments.windows(2) {
            if pair[1].range.start < pair[0].range.end {
                return Err(format!(
                    "bytes {:?} and {:?} overlap and one is written",
                    pair[0].range, pair[1].range
                ));
            }
        }
        if let Some(last) = segments.last()
            && last.range.end > self.len()
        {
            return Err(format!(
                "bytes {:?} exceed the arena of {}",
                last.range,
                self.len()
            ));
        }
        let (mut shared, mut exclusive) = (Vec::new(), Vec::new());
        let (mut rest, mut at) = (&mut self.bytes[..], 0);
        for s in segments {
            let (piece, after) = rest
                .split_at_mut(s.range.end - at)
                .into_piece(s.range.start - at);
            (rest, at) = (after, s.range.end);
            match s.write {
                true => exclusive.push((s.range.start, Some(piece))),
                false => shared.push((s.range, &*piece)),
            }
        }
        let find = |r: &Range<usize>| -> &[u8] {
            let holder = shared
                .iter()
                .find(|(range, _)| range.start <= r.start && r.end <= range.end);
            // Empty ranges are aligned too.
            holder.map_or(bytemuck::cast_slice::<u64, u8>(&[]), |(range, piece)| {
                &piece[r.start - range.start..r.end - range.start]
            })
        };
        let reads = reads.iter().map(find).collect();
        let mut take = |w: &Range<usize>| -> &mut [u8] {
            let holder = exclusive
                .iter_mut()
                .find(|(start, piece)| *start == w.start && piece.is_some() && !w.is_empty());
            holder
                .and_then(|(_, piece)| piece.take())
                .unwrap_or(bytemuck::cast_slice_mut::<u64, u8>(&mut []))
        };
        let writes = writes.iter().map(&mut take).collect();
        Ok(Borrowed { reads, writes })
    }
}

struct Segment {
    range: Range<usize>,
    write: bool,
}

/// The union of the read ranges as segments that do not overlap.
fn merged(reads: &[Range<usize>]) -> Vec<Segment> {
    let mut sorted: Vec<Range<usize>> = reads.iter().filter(|r| !r.is_empty()).cloned().collect();
    sorted.sort_by_key(|r| (r.start, r.end));
    let mut out: Vec<Segment> = Vec::new();
    for r in sorted {
        match out.last_mut() {
            Some(last) if r.start < last.range.end => last.range.end = last.range.end.max(r.end),
            _ => out.push(Segment {
                range: r,
                write: false,
            }),
        }
    }
    out
}

/// `(before + piece, after)` to `(piece, after)`.
trait IntoPiece<'a> {
    fn into_piece(self, skip: usize) -> (&'a mut [u8], &'a mut [u8]);
}

impl<'a> IntoPiece<'a> for (&'a mut [u8], &'a mut [u8]) {
    fn into_piece(self, skip: usize) -> (&'a mut [u8], &'a mut [u8]) {
        (&mut self.0[skip..], self.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spare_blocks_are_used_again() {
        let mut spare = Spare::default();
        let block = spare.take(100);
        assert_eq!((block.len(), block.capacity()), (100, 104));
        let reader = spare.lend(block);
        // Others read it: the next one is another.
        let second = spare.take(100);
        let at = second.as_ptr();
        spare.give(second);
        assert_eq!(spare.take(64).as_ptr(), at);
        drop(reader);
        let third = spare.take(8);
        assert_eq!((third.len(), third.capacity()), (8, 104));
        // At most twice the largest is kept.
        (0..3).for_each(|_| spare.give(Bytes::zeroed(100)));
        assert_eq!(spare.bytes(), 2 * 104);
        (0..3).for_each(|_| spare.give(Bytes::zeroed(10)));
        assert_eq!(spare.bytes(), 2 * 104);
    }

    #[test]
    fn ranges_come_back_in_the_order_asked_for() {
        let mut arena = Arena::new(64);
        arena
            .write(0..64)
            .iter_mut()
            .enumerate()
            .for_each(|(i, b)| *b = i as u8);
        let b = arena
            .borrow(
                &[32..40, 8..16, 32..36, 12..20, 5..5],
                &[40..48, 0..8, 9..9],
            )
            .unwrap();
        assert_eq!(b.reads[0], (32..40).collect::<Vec<u8>>());
        assert_eq!(b.reads[1], (8..16).collect::<Vec<u8>>());
        assert_eq!(b.reads[2], (32..36).collect::<Vec<u8>>());
        assert_eq!(b.reads[3], (12..20).collect::<Vec<u8>>());
        assert!(b.reads[4].is_empty() && b.writes[2].is_empty());
        assert_eq!((b.writes[0][0], b.writes[1][0]), (40, 0));
        for w in b.writes {
            w.fill(255);
        }
        assert_eq!(arena.read(38..42), [38, 39, 255, 255]);
        assert_eq!(arena.read(6..10), [255, 255, 8, 9]);
    }

    #[test]
    fn clashes_are_refused() {
        let mut arena = Arena::new(64);
        let mut clash = |reads: [Range<usize>; 2], write: Range<usize>| {
            arena.borrow(&reads, std::slice::from_ref(&write)).is_err()
        };
        assert!(clash([0..8, 16..24], 4..12));
        assert!(clash([60..65, 0..0], 0..8));
        assert!(clash([0..0, 0..0], 60..65));
        assert!(!clash([0..8, 4..12], 12..16));
        assert!(arena.borrow(&[], &[0..8, 0..8]).is_err());
    }
}
