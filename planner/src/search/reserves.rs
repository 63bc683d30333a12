//! How many bytes a search reserves for placing buffers, which take more than the model of a plan's
//! memory says.

/// Two reserves that differ by less than this part of the memory are not worth two searches.
const CLOSE: u64 = 256;

/// Bytes of each device that are left free for placing buffers: what was tried, and what is next.
#[derive(Debug, Default)]
pub(super) struct Reserves {
    pub next: u64,
    /// The most with which buffers overran the budget.
    pub too_few: u64,
    /// The least that left too little for any plan.
    too_many: Option<u64>,
    /// Bytes of a device that plans may use.
    usable: u64,
}

impl Reserves {
    /// Nothing is reserved yet, of so many bytes.
    pub fn of(usable: u64) -> Self {
        Reserves {
            usable,
            ..Reserves::default()
        }
    }

    /// Buffers overran the budget by so many bytes; whether to try again. At least twice as much is
    /// reserved as before, as other choices fill other buckets.
    pub fn overran(&mut self, by: u64) -> bool {
        self.too_few = self.next;
        let more = by.saturating_add(by / 16).max(self.next);
        self.next = self.next.saturating_add(more);
        self.is_between()
    }

    /// There was no plan with what was left; whether to try again.
    pub fn left_nothing(&mut self) -> bool {
        self.too_many = Some(self.next);
        self.is_between()
    }

    /// Keeps below what leaves too little; false where that is close to what was not enough.
    fn is_between(&mut self) -> bool {
        let Some(too_many) = self.too_many else {
            return true;
        };
        if self.next >= too_many {
            self.next = self.too_few + too_many.saturating_sub(self.too_few) / 2;
        }
        too_many.saturating_sub(self.too_few) > self.usable / CLOSE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The reserves of a search whose buffers fit from `enough` bytes on, and which has no plan from
    /// `too_many` on.
    fn tried(enough: u64, too_many: u64) -> (Vec<u64>, bool) {
        let (mut reserves, mut tried) = (Reserves::of(64 << 30), Vec::new());
        for _ in 0..7 {
            let next = reserves.next;
            tried.push(next);
            let goes_on = match next {
                next if next >= too_many => reserves.left_nothing(),
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
        // Buffers may lack more than the overrun says.
        let mut reserves = Reserves::of(64 << 30);
        assert!(reserves.overran(2 * GIB) && reserves.overran(2 * GIB));
        assert_eq!(reserves.next, 4 * GIB + GIB / 4);
        // A step goes too far.
        let mut reserves = Reserves::of(64 << 30);
        assert!(reserves.overran(4 * GIB) && reserves.left_nothing());
        assert_eq!(reserves.next, 2 * GIB + GIB / 8);
        assert!(reserves.overran(GIB));
        assert!((2 * GIB + GIB / 8..4 * GIB).contains(&reserves.next));
        let (all, fits) = tried(8 * GIB, 4 * GIB);
        assert!(!fits && all.len() <= 7, "{all:?}");
        assert!(all[3..].iter().all(|r| *r < 4 * GIB), "{all:?}");
    }
}
