//! The rows of a stored matrix that hold a parameter of ours.
//!
//! A file has queries, keys and values in one matrix, or a part of each head in another order than
//! ours. Its rows are groups of equal size, such as heads, and of every group ours are the same ones:
//!
//! ```text
//! stored   n0 n1 r0 r1 r2 r3 | n0 n1 r0 r1 r2 r3      two groups of six
//! ours     r0 r2 r1 r3 n0 n1 | r0 r2 r1 r3 n0 n1      stretches 2, 4 by twos; 3, 5 by twos; 0, 1
//! ```

/// Rows `start, start + step, ..`, `count` of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// The first.
    pub start: u64,
    /// How many.
    pub count: u64,
    /// From one to the next.
    pub step: u64,
}

/// Some rows of a stored matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Groups of the stored rows.
    pub groups: u64,
    /// Rows of a group.
    pub each: u64,
    /// Ours of every group, in our order.
    pub ours: Vec<Stretch>,
}

impl Rows {
    /// `count` rows that follow each other, from `start` on, of `each` in every one of `groups`.
    pub(crate) fn run(groups: u64, each: u64, (start, count): (u64, u64)) -> Self {
        let ours = vec![Stretch {
            start,
            count,
            step: 1,
        }];
        Rows { groups, each, ours }
    }
    /// How many rows the stored matrix has.
    pub fn stored(&self) -> u64 {
        self.groups * self.each
    }
    /// The stored row of each of ours, in our order.
    pub fn indices(&self) -> impl Iterator<Item = usize> + '_ {
        let groups = (0..self.groups).map(|g| g * self.each);
        groups
            .flat_map(|first| {
                let stretches = self.ours.iter();
                stretches.flat_map(move |s| (0..s.count).map(move |i| first + s.start + i * s.step))
            })
            .map(|row| row as usize)
    }
    /// Our rows out of the stored ones, of `width` elements.
    pub(crate) fn take(&self, stored: &[f32], width: usize) -> Vec<f32> {
        let rows = self.indices();
        rows.flat_map(|row| stored[row * width..][..width].iter().copied())
            .collect()
    }
    /// Writes our rows to their places in the stored ones.
    pub(crate) fn put(&self, ours: &[f32], width: usize, stored: &mut [f32]) {
        for (row, own) in self.indices().zip(ours.chunks_exact(width.max(1))) {
            stored[row * width..][..width].copy_from_slice(own);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_go_out_and_back() {
        let by_twos = |start| Stretch {
            start,
            count: 2,
            step: 2,
        };
        let still = Stretch {
            start: 0,
            count: 2,
            step: 1,
        };
        let rows = Rows {
            groups: 2,
            each: 6,
            ours: vec![by_twos(2), by_twos(3), still],
        };
        let expected = [2, 4, 3, 5, 0, 1, 8, 10, 9, 11, 6, 7];
        assert_eq!(rows.indices().collect::<Vec<_>>(), expected);
        let stored: Vec<f32> = (0..36).map(|i| i as f32).collect();
        let ours = rows.take(&stored, 3);
        assert_eq!(ours[..6], [6.0, 7.0, 8.0, 12.0, 13.0, 14.0]);
        let mut back = vec![0.0; 36];
        rows.put(&ours, 3, &mut back);
        assert_eq!(back, stored);
        let some = Rows::run(1, 12, (4, 3));
        assert_eq!((some.stored(), some.indices().count()), (12, 3));
        assert_eq!(some.take(&stored, 3), &stored[12..21]);
    }
}
