//! Memory in use over time against the budgets: a segment tree with range add and the
//! largest of all.
//!
//! Invariant: `max` of a node is the largest level minus limit below it, pending adds of its
//! ancestors not included.

/// The levels less the limits over time, in bytes.
#[derive(Clone, Debug)]
pub(super) struct Profile {
    n_leaves: usize,
    n_times: usize,
    max: Vec<i64>,
    add: Vec<i64>,
}

impl Profile {
    /// Starts with nothing in use.
    pub fn new(limits: &[u64]) -> Profile {
        let n_leaves = limits.len().next_power_of_two().max(1);
        let mut max = vec![i64::MIN / 4; 2 * n_leaves];
        for (t, &limit) in limits.iter().enumerate() {
            max[n_leaves + t] = -i64::try_from(limit).unwrap_or(i64::MAX / 4);
        }
        for i in (1..n_leaves).rev() {
            max[i] = max[2 * i].max(max[2 * i + 1]);
        }
        Profile {
            n_leaves,
            n_times: limits.len(),
            max,
            add: vec![0; 2 * n_leaves],
        }
    }

    /// Uses `bytes` more (less, if negative) at the times `from..to`.
    pub fn change(&mut self, from: u32, to: u32, bytes: i64) {
        if bytes != 0 && from < to {
            let (mut l, mut r) = (self.n_leaves + from as usize, self.n_leaves + to as usize);
            let (l0, r0) = (l, r - 1);
            while l < r {
                if l & 1 == 1 {
                    self.apply(l, bytes);
                    l += 1;
                }
                if r & 1 == 1 {
                    r -= 1;
                    self.apply(r, bytes);
                }
                l >>= 1;
                r >>= 1;
            }
            self.rebuild(l0);
            self.rebuild(r0);
        }
    }

    fn apply(&mut self, i: usize, bytes: i64) {
        self.max[i] += bytes;
        self.add[i] += bytes;
    }

    fn rebuild(&mut self, leaf: usize) {
        let mut i = leaf >> 1;
        while i >= 1 {
            self.max[i] = self.max[2 * i].max(self.max[2 * i + 1]) + self.add[i];
            i >>= 1;
        }
    }

    /// Returns by how much the limit is exceeded at the worst time; negative if there is room.
    pub fn worst(&self) -> i64 {
        if self.n_times == 0 {
            i64::MIN / 4
        } else {
            self.max[1]
        }
    }

    /// Returns a time at which `worst` is attained.
    pub fn worst_time(&self) -> u32 {
        let mut i = 1;
        while i < self.n_leaves {
            i *= 2;
            if self.max[i + 1] > self.max[i] {
                i += 1;
            }
        }
        (i - self.n_leaves) as u32
    }

    /// Says whether every budget is kept.
    pub fn fits(&self) -> bool {
        self.worst() <= 0
    }
}

#[cfg(test)]
mod tests {
    use super::Profile;

    #[test]
    fn equals_a_plain_array() {
        let limits: Vec<u64> = (0..13).map(|t| 10 + t * 7 % 5).collect();
        let mut profile = Profile::new(&limits);
        let mut plain: Vec<i64> = limits.iter().map(|&l| -(l as i64)).collect();
        let mut seed = 1u32;
        let mut random = |n: u32| {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 16) % n
        };
        for _ in 0..2000 {
            let from = random(13);
            let to = from + 1 + random(13 - from);
            let bytes = i64::from(random(21)) - 10;
            profile.change(from, to, bytes);
            plain[from as usize..to as usize]
                .iter_mut()
                .for_each(|x| *x += bytes);
            assert_eq!(Some(profile.worst()), plain.iter().copied().max());
            assert_eq!(plain[profile.worst_time() as usize], profile.worst());
            assert_eq!(profile.fits(), plain.iter().all(|x| *x <= 0));
        }
    }
}
