//! How many bytes a search reserves for placing buffers, which take more than the model of a plan's
//! memory says.

/// Bytes between two reserves that are not worth another search.
const CLOSE: u64 = 256 << 20;

/// Bytes of each device that are left free for placing buffers: what was tried, and what is next.
#[derive(Debug, Default)]
pub(super) struct Reserves {
    pub next: u64,
    /// The most with which buffers overran the budget.
    overran: u64,
    /// The least that left too little for any plan.
    too_many: Option<u64>,
}

impl Reserves {
    /// Buffers overran the budget by so many bytes; whether to try again. At least twice as much is
    /// reserved as before, as other choices fill other buckets.
    pub fn overran(&mut self, by: u64) -> bool {
        self.overran = self.next;
        let more = by.saturating_add(by / 16).max(self.next);
        self.next = self.next.saturating_add(more);
        self.is_between()
    }

    /// There was no plan with what was left; whether to try again.
    pub fn leave_nothing(&mut self) -> bool {
        self.too_many = Some(self.next);
        self.is_between()
    }

    /// The most that was tried.
    pub fn most(&self) -> u64 {
        self.too_many.unwrap_or(self.overran)
    }

    /// Keeps below what leaves too little; false where that is close to what was not enough.
    fn is_between(&mut self) -> bool {
        let Some(too_many) = self.too_many else {
            return true;
        };
        if self.next >= too_many {
            self.next = self.overran + too_many.saturating_sub(self.overran) / 2;
        }
        too_many.saturating_sub(self.overran) > CLOSE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The reserves of a search whose buffers fit from `enough` bytes on, and which has no plan from
    /// `too_many` on.
    fn tried(enough: u64, too_many: u64) -> (Vec<u64>, bool) {
        let (mut reserves, mut tried) = (Reserves::default(), Vec::new());
        for _ in 0..7 {
            let next = reserves.next;
            tried.push(next);
            let goes_on = match next {
                next if next >= too_many => reserves.leave_nothing(),
                next if next >= enough => return (tried, true),
                next => reserves.overran((enough - next).max(1 << 30)),
            };
            if !goes_on {
                break;
            }
        }
        (tried, false)
    }

    #[test]
    fn reserves_double_until_buffers_fit_and_are_halved_where_nothing_is_left() {
        const GIB: u64 = 1 << 30;
        let (all, fits) = tried(4 * GIB, 100 * GIB);
        assert!(
            fits && all.len() == 2 && all[1] == 4 * GIB + GIB / 4,
            "{all:?}"
        );
        // What is lacking is said to be less than it is.
        let mut reserves = Reserves::default();
        assert!(reserves.overran(2 * GIB) && reserves.overran(2 * GIB));
        assert_eq!(reserves.next, 4 * GIB + GIB / 4);
        // A step goes too far.
        let mut reserves = Reserves::default();
        assert!(reserves.overran(4 * GIB) && reserves.leave_nothing());
        assert_eq!(reserves.next, 2 * GIB + GIB / 8);
        assert!(reserves.overran(GIB));
        assert!((2 * GIB + GIB / 8..4 * GIB).contains(&reserves.next));
        let (all, fits) = tried(8 * GIB, 4 * GIB);
        assert!(!fits && all.len() <= 7, "{all:?}");
        assert!(all[3..].iter().all(|r| *r < 4 * GIB), "{all:?}");
    }
}
