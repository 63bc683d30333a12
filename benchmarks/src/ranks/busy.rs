//! The processor time of other programs, as Linux counts it.

/// Processor ticks up to now; zero where the system does not report them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Busy {
    /// The ticks of all programs.
    all: u64,
    /// The ticks of this program.
    own: u64,
    /// All ticks, the idle ones included.
    total: u64,
}

impl Busy {
    /// Reads the counters.
    pub fn now() -> Self {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        Self::parse(&read("/proc/stat"), &read("/proc/self/stat"))
    }

    fn parse(machine: &str, process: &str) -> Self {
        let line = machine.lines().next().unwrap_or_default();
        // user nice system idle iowait irq softirq steal; guests are part of user.
        let ticks: Vec<u64> = line
            .split_whitespace()
            .skip(1)
            .take(8)
            .filter_map(|x| x.parse().ok())
            .collect();
        let total = ticks.iter().sum();
        let idle: u64 = ticks.iter().skip(3).take(2).sum();
        // The name stands in brackets and may have spaces. Behind it are fields 3 and on; user and
        // system time are fields 14 and 15.
        let fields = process.rsplit(')').next().unwrap_or_default();
        let own = fields
            .split_whitespace()
            .skip(11)
            .take(2)
            .filter_map(|x| x.parse::<u64>().ok())
            .sum();
        Busy {
            all: total - idle,
            own,
            total,
        }
    }

    /// Returns the share of the processors that other programs took since `before`.
    pub fn foreign_since(&self, before: &Busy) -> f64 {
        let since = |x: u64, y: u64| x.saturating_sub(y) as f64;
        let foreign = since(self.all, before.all) - since(self.own, before.own);
        foreign.max(0.0) / since(self.total, before.total).max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_are_all_but_oneself_and_idle() {
        let at = |user: u64, own: u64| {
            Busy::parse(
                &format!("cpu  {user} 10 20 1000 5 0 1 0 7 0\ncpu0 1 1\n"),
                &format!("12 (a (b) c) S 1 1 1 0 -1 0 0 0 0 0 {own} 3 0 0 20 0"),
            )
        };
        let (before, after) = (at(100, 50), at(200, 110));
        // 100 ticks passed, all busy; 60 of them own.
        assert!((after.foreign_since(&before) - 0.4).abs() < 1e-12);
        assert_eq!(Busy::parse("", "").foreign_since(&Busy::default()), 0.0);
    }
}
