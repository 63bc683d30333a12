//! Which rank holds up the others, and whether it is its processor or the link.
//!
//! A rank's step is work and waiting for others. One that is slow works longer than the ranks that do
//! the same, and they wait for it. Where a link is slow all ranks wait longer than they used to and
//! none works longer. So it is where something else keeps the processors busy, in pieces too short to
//! show in the work of most steps: then ranks stand in line for a processor longer, which the system
//! tells apart. And so it is where all processes are stopped alike for short times: what each of them
//! works and waits grows by the time that it is stopped, and what it waits also by that of the others,
//! so that the time in which processes stand still is no time of a link either. Medians over a window of steps are compared, so that a hiccup is none, a window lasts
//! for a while where steps are short, and a verdict needs two windows in a row. Steps that are shorter
//! than a tenth of a second are averaged over about that long first: a processor that is taken away
//! for a part of every such period holds up only some of them, and is slow all the same. That all are
//! slow alike is nobody's fault and says nothing.

use ir::Rank;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Steps that are looked at together: as many, and for as long.
const WINDOW: usize = 20;
const WINDOW_S: f64 = 1.0;
/// The most that are, however short they are.
const LONGEST_WINDOW: usize = 10_000;
/// Seconds over which short steps are averaged before medians are taken: the period in which the
/// system gives control groups their share of a processor (`cpu.max`).
const PERIOD_S: f64 = 0.1;
/// Windows at the beginning that say nothing: caches are cold, and memory is touched for the first
/// time.
const WARM_UP: usize = 1;
/// How many times as long a rank works that is slow.
const SLOW: f64 = 1.5;
/// How many times as long all wait, and by which share of the step longer, when a link is slow.
const LONG_WAIT: (f64, f64) = (1.5, 0.2);
/// The part of what all wait longer that ranks stand in line for processors where the host is busy.
const IN_LINE: f64 = 0.5;
/// The part of what all wait longer that processes stand still where that is why.
const STILL: f64 = 0.5;

/// Seconds of a step of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Spent {
    /// At work.
    pub work_s: f64,
    /// In calls that wait for others.
    pub wait_s: f64,
    /// In both, when it could go on and had no processor; zero where the system does not say.
    pub in_line_s: f64,
    /// In both, when its process stood still: a signal had stopped it, or its control group had used
    /// up its share of a processor.
    pub still_s: f64,
}

/// A reason that holds up a run, or the end of one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Finding {
    /// A rank works longer than those that do the same, or than it used to.
    SlowRank {
        /// The rank.
        rank: Rank,
        /// How many times as long.
        times: f64,
        /// Most of that is standing in line for processors that are busy with something else.
        is_host_busy: bool,
    },
    /// It does so no more.
    Recovered(Rank),
    /// All ranks wait longer than at first, and none works longer.
    SlowLink {
        /// How many times as long.
        times: f64,
    },
    /// All ranks wait longer than at first, and stand in line for processors that are busy with
    /// something else.
    BusyHost {
        /// How many times as long they wait.
        times: f64,
        /// How much longer the rank that does so longest in a step stands in line, in seconds.
        in_line_s: f64,
    },
    /// They do so no more.
    LinkRecovered,
}

/// Watches the steps of a run.
#[derive(Clone, Debug)]
pub struct Stragglers {
    /// Rank and role, in the order in which times come.
    ranks: Vec<(Rank, usize)>,
    steps: Vec<Vec<Spent>>,
    /// Seconds of these, each as long as the rank that took longest.
    seconds: f64,
    windows: usize,
    /// The medians of the first window that counts.
    first: Option<Vec<Spent>>,
    /// How long ranks were held up in it.
    first_held_up: HeldUp,
    /// Suspects of the last window.
    suspects: BTreeSet<Rank>,
    slow: BTreeSet<Rank>,
    is_link_suspect: bool,
    /// The reason that was last given why all wait, while they do.
    reason: Option<Reason>,
}

/// Seconds of a step in which ranks could go on and did not run.
#[derive(Clone, Debug, Default)]
struct HeldUp {
    /// That each stands in line for a processor.
    each_in_line_s: Vec<f64>,
    /// That the one does that stands in line longest in its step.
    in_line_s: f64,
    /// That the process stands still that does so longest in its step.
    still_s: f64,
}

impl HeldUp {
    /// Means over steps of these ranks.
    fn of(steps: &[Vec<Spent>], n_ranks: usize) -> Self {
        let mean = |of: &dyn Fn(&Vec<Spent>) -> f64| {
            steps.iter().map(of).sum::<f64>() / steps.len() as f64
        };
        // Ranks that are held up in one step are so at the same time, those of different steps one
        // after the other.
        let longest =
            |figure: fn(&Spent) -> f64| mean(&|step| step.iter().map(figure).fold(0.0, f64::max));
        HeldUp {
            each_in_line_s: (0..n_ranks).map(|r| mean(&|s| s[r].in_line_s)).collect(),
            in_line_s: longest(|s| s.in_line_s),
            still_s: longest(|s| s.still_s),
        }
    }
    /// How much longer than at first.
    fn since(&self, first: &HeldUp) -> Self {
        let each = self.each_in_line_s.iter().zip(&first.each_in_line_s);
        HeldUp {
            each_in_line_s: each.map(|(now, first)| now - first).collect(),
            in_line_s: self.in_line_s - first.in_line_s,
            still_s: self.still_s - first.still_s,
        }
    }
}

/// A reason why all ranks wait longer.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Reason {
    Link,
    Host,
}

impl Stragglers {
    /// For these ranks and the roles that they have.
    pub fn new(ranks: impl IntoIterator<Item = (Rank, usize)>) -> Self {
        Stragglers {
            ranks: ranks.into_iter().collect(),
            steps: Vec::new(),
            seconds: 0.0,
            windows: 0,
            first: None,
            first_held_up: HeldUp::default(),
            suspects: BTreeSet::new(),
            slow: BTreeSet::new(),
            is_link_suspect: false,
            reason: None,
        }
    }

    /// Takes a step, of every rank. Says what has changed, at the end of a window.
    pub fn step(&mut self, spent: &[Spent]) -> Vec<Finding> {
        if spent.len() != self.ranks.len() {
            return Vec::new();
        }
        self.steps.push(spent.to_vec());
        self.seconds += spent
            .iter()
            .map(|s| s.work_s + s.wait_s)
            .fold(0.0, f64::max);
        let n = self.steps.len();
        if n < WINDOW || self.seconds < WINDOW_S && n < LONGEST_WINDOW {
            return Vec::new();
        }
        let seconds = std::mem::take(&mut self.seconds);
        let steps = std::mem::take(&mut self.steps);
        self.windows += 1;
        if self.windows <= WARM_UP {
            return Vec::new();
        }
        // Parts of as many steps each, so that a burst of other work does not become many of them.
        let part = (n as f64 * PERIOD_S / seconds).ceil().clamp(1.0, n as f64) as usize;
        let of = |rank: usize, figure: fn(&Spent) -> f64| {
            let mean = |part: &[Vec<Spent>]| {
                part.iter().map(|s| figure(&s[rank])).sum::<f64>() / part.len() as f64
            };
            median(steps.chunks_exact(part).map(mean).collect())
        };
        let now: Vec<Spent> = (0..self.ranks.len())
            .map(|r| Spent {
                work_s: of(r, |s| s.work_s),
                wait_s: of(r, |s| s.wait_s),
                ..Spent::default()
            })
            .collect();
        // Rare and long, so the median knows nothing of it.
        let held_up = HeldUp::of(&steps, self.ranks.len());
        if self.first.is_none() {
            self.first_held_up = held_up.clone();
        }
        let first = self.first.get_or_insert_with(|| now.clone()).clone();
        let longer = held_up.since(&self.first_held_up);
        let mut findings = self.ranks_of(&now, &first, &longer.each_in_line_s);
        findings.extend(self.link_of(&now, &first, &longer));
        findings
    }

    /// The findings about ranks, each of which stands in line so much longer than at first.
    fn ranks_of(&mut self, now: &[Spent], first: &[Spent], in_line_s: &[f64]) -> Vec<Finding> {
        let mut findings = Vec::new();
        let mut suspects = BTreeSet::new();
        // How many times as long each works as at first: where that is so of all, of none.
        let ratios = now.iter().zip(first);
        let ratios: Vec<f64> = ratios.map(|(n, f)| over(n.work_s, f.work_s)).collect();
        for (i, &(rank, role)) in self.ranks.iter().enumerate() {
            let others = |of: &dyn Fn(usize) -> bool, values: &dyn Fn(usize) -> f64| {
                let others = (0..now.len()).filter(|&k| k != i && of(k));
                let others: Vec<f64> = others.map(values).collect();
                (!others.is_empty()).then(|| median(others))
            };
            let is_peer = |k: usize| self.ranks[k].1 == role;
            let times = match others(&is_peer, &|k| now[k].work_s) {
                Some(peers) => over(now[i].work_s, peers),
                None => match others(&|_| true, &|k| ratios[k]) {
                    Some(ratio) => over(ratios[i], ratio),
                    None => 1.0,
                },
            };
            if times >= SLOW {
                suspects.insert(rank);
                if self.suspects.contains(&rank) && self.slow.insert(rank) {
                    let longer = now[i].work_s * (1.0 - 1.0 / times);
                    findings.push(Finding::SlowRank {
                        rank,
                        times,
                        is_host_busy: in_line_s[i] >= IN_LINE * longer,
                    });
                }
            } else if self.slow.remove(&rank) {
                findings.push(Finding::Recovered(rank));
            }
        }
        self.suspects = suspects;
        findings
    }

    /// The finding about why all wait, whose ranks are held up so much longer than at first.
    fn link_of(&mut self, now: &[Spent], first: &[Spent], held_up: &HeldUp) -> Option<Finding> {
        let in_line_s = held_up.in_line_s;
        // One that is slow waits least, so that all wait longer for a link alone.
        let least = |of: &[Spent]| of.iter().map(|s| s.wait_s).fold(f64::INFINITY, f64::min);
        let (waits, waited) = (least(now), least(first));
        // Where all work longer, so many times as long or more, waits take as much longer, too.
        let works = now.iter().zip(first).map(|(n, f)| over(n.work_s, f.work_s));
        let slower = works.fold(f64::INFINITY, f64::min).max(1.0);
        let step = slower
            * first
                .iter()
                .map(|s| s.work_s + s.wait_s)
                .fold(0.0, f64::max);
        let times = over(waits, waited);
        let longer = waits - slower * waited;
        let is_long = times >= LONG_WAIT.0 * slower && longer >= LONG_WAIT.1 * step;
        let reason = match in_line_s >= IN_LINE * longer {
            true => Some(Reason::Host),
            // Nobody's fault, as whatever slows all alike.
            false if held_up.still_s >= STILL * longer => None,
            false => Some(Reason::Link),
        };
        let is_suspect = is_long && reason.is_some() && self.suspects.is_empty();
        let was_suspect = std::mem::replace(&mut self.is_link_suspect, is_suspect);
        match (reason.filter(|_| is_suspect && was_suspect), self.reason) {
            // A link may be slow after all once the host is not busy; that it gets busy says nothing
            // of a slow link.
            (Some(reason), known)
                if known.is_none() || (known, reason) == (Some(Reason::Host), Reason::Link) =>
            {
                self.reason = Some(reason);
                Some(match reason {
                    Reason::Host => Finding::BusyHost { times, in_line_s },
                    Reason::Link => Finding::SlowLink { times },
                })
            }
            // Processes that stand still now hide whether it is over.
            (None, Some(_)) if !is_long => {
                self.reason = None;
                Some(Finding::LinkRecovered)
            }
            _ => None,
        }
    }
}

fn over(a: f64, b: f64) -> f64 {
    a / b.max(f64::MIN_POSITIVE)
}

/// The lower median.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len().saturating_sub(1) / 2;
    values.get(middle).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The findings over windows of a run of two stages of two ranks, whose steps are made by
    /// `spent` of rank and window, with a little noise.
    fn found(windows: usize, spent: impl Fn(usize, usize) -> (f64, f64)) -> Vec<(usize, Finding)> {
        let mut of = Stragglers::new((0..4).map(|r| (Rank(r), r as usize / 2)));
        let mut all = Vec::new();
        for step in 0..windows * WINDOW {
            let noise = 1.0 + 0.1 * ((step * 7919 % 13) as f64 / 13.0);
            let one = |r: usize| {
                let (work_s, wait_s) = spent(r, step / WINDOW);
                // A hiccup now and then.
                let hiccup = if step % 9 == r { 5.0 } else { 1.0 };
                Spent {
                    work_s: work_s * noise * hiccup,
                    wait_s,
                    ..Spent::default()
                }
            };
            let spent: Vec<Spent> = (0..4).map(one).collect();
            all.extend(of.step(&spent).into_iter().map(|f| (step / WINDOW, f)));
        }
        all
    }

    #[test]
    fn a_slow_processor_is_told_from_a_slow_link() {
        // Rank 3 works twice as long from window 4 to 7, and its peer and the others wait for it.
        let slow = |r: usize, w: usize| match (r, (4..8).contains(&w)) {
            (3, true) => (2.0, 0.1),
            (_, true) => (1.0, 1.1),
            _ => (1.0, 0.1),
        };
        let seen = found(12, slow);
        let [
            (
                5,
                Finding::SlowRank {
                    rank,
                    times,
                    is_host_busy: false,
                },
            ),
            (8, Finding::Recovered(Rank(3))),
        ] = seen[..]
        else {
            panic!("{seen:?}")
        };
        assert!(rank == Rank(3) && (1.8..2.2).contains(&times), "{times}");
        // All wait longer from window 4 on.
        let seen = found(9, |_, w| (1.0, if w < 4 { 0.2 } else { 0.8 }));
        let [(5, Finding::SlowLink { times })] = seen[..] else {
            panic!("{seen:?}")
        };
        assert!((3.9..4.1).contains(&times), "{times}");
    }

    /// Every rank is kept from its processor in one step of five, for a second: the work of most steps
    /// is as it was, and the others wait in most.
    #[test]
    fn a_busy_host_is_told_from_a_slow_link() {
        let mut of = Stragglers::new((0..4).map(|r| (Rank(r), 0)));
        let mut seen = Vec::new();
        for step in 0..9 * WINDOW {
            let is_busy = step >= 4 * WINDOW;
            let spent: Vec<Spent> = (0..4)
                .map(|r| {
                    let is_off = |k: usize| is_busy && step % 5 == k;
                    let waits = (0..4).any(|k| k != r && is_off(k));
                    Spent {
                        work_s: if is_off(r) { 2.0 } else { 1.0 },
                        wait_s: if waits { 1.2 } else { 0.2 },
                        in_line_s: if is_off(r) { 1.0 } else { 0.0 },
                        still_s: 0.0,
                    }
                })
                .collect();
            seen.extend(of.step(&spent));
        }
        let [Finding::BusyHost { times, in_line_s }] = seen[..] else {
            panic!("{seen:?}")
        };
        assert!(times > 5.0 && (0.79..0.81).contains(&in_line_s), "{seen:?}");
    }

    /// Many ranks that are held up at once, each for a little, make nobody wait for long: the link is
    /// slow beside that. And where it stays slow once the host is not busy, that is said.
    #[test]
    fn a_slow_link_is_seen_beside_a_busy_host_and_after_it() {
        let findings = |in_line_s: fn(usize) -> f64| {
            let mut of = Stragglers::new((0..16).map(|r| (Rank(r), 0)));
            let steps = (0..12 * WINDOW).map(|step| Spent {
                work_s: 1.0,
                wait_s: if step >= 4 * WINDOW { 1.2 } else { 0.2 },
                in_line_s: if step >= 4 * WINDOW {
                    in_line_s(step)
                } else {
                    0.0
                },
                still_s: 0.0,
            });
            let seen: Vec<Finding> = steps.flat_map(|s| of.step(&[s; 16])).collect();
            seen
        };
        let beside = findings(|_| 0.05);
        assert!(
            matches!(beside[..], [Finding::SlowLink { .. }]),
            "{beside:?}"
        );
        let after = findings(|step| if step < 8 * WINDOW { 0.9 } else { 0.0 });
        assert!(
            matches!(
                after[..],
                [Finding::BusyHost { .. }, Finding::SlowLink { .. }]
            ),
            "{after:?}"
        );
    }

    #[test]
    fn what_slows_all_alike_is_no_fault() {
        let steady = found(50, |_, _| (1.0, 0.2));
        assert_eq!(steady, []);
        // The whole machine is slow for a while; stages differ in work from the beginning.
        let machine = found(50, |r, w| {
            let factor = if w % 20 > 10 { 3.0 } else { 1.0 };
            (factor * (1.0 + r as f64 / 2.0 * 0.3), 0.2 * factor)
        });
        assert_eq!(machine, []);
        // One window alone is no verdict.
        assert_eq!(
            found(9, |r, w| (if (r, w) == (1, 4) { 3.0 } else { 1.0 }, 0.2)),
            []
        );
    }

    /// Two processes are stopped alike, now while they work and now while they wait, and each waits
    /// for the other one as well: waits grow more than work does, and no link is slow. Where one is
    /// slow besides, that is said.
    #[test]
    fn processes_that_are_stopped_alike_have_no_slow_link() {
        let findings = |link_s: f64| {
            let mut of = Stragglers::new((0..2).map(|r| (Rank(r), 0)));
            let steps = (0..12_000).map(|step| {
                let is_stopped = (4_000..8_000).contains(&step);
                let more = if is_stopped { 1.0 } else { 0.0 };
                let spent = Spent {
                    work_s: 0.004 + 0.005 * more,
                    wait_s: 0.002 + (0.006 + link_s) * more,
                    in_line_s: 0.0,
                    still_s: 0.006 * more,
                };
                [spent; 2]
            });
            steps.flat_map(|s| of.step(&s)).collect::<Vec<Finding>>()
        };
        assert_eq!(findings(0.0), []);
        let slow = findings(0.02);
        assert!(
            matches!(slow[..], [Finding::SlowLink { .. }, Finding::LinkRecovered]),
            "{slow:?}"
        );
    }

    /// A link that is slow is so while processes are stopped, too, and that it is over is said when it
    /// is.
    #[test]
    fn a_slow_link_does_not_recover_because_processes_are_stopped() {
        let mut of = Stragglers::new((0..2).map(|r| (Rank(r), 0)));
        let steps = (0..24_000).map(|step| {
            let when = |from: usize, to: usize, seconds: f64| match (from..to).contains(&step) {
                true => seconds,
                false => 0.0,
            };
            let (slow, stopped) = (when(4_000, 16_000, 0.01), when(8_000, 12_000, 0.02));
            let spent = Spent {
                work_s: 0.004,
                wait_s: 0.002 + slow + stopped,
                in_line_s: 0.0,
                still_s: stopped,
            };
            (step, [spent; 2])
        });
        let found = |(step, spent): (usize, [Spent; 2])| {
            let findings = of.step(&spent).into_iter();
            findings.map(move |f| (step, f)).collect::<Vec<_>>()
        };
        let seen: Vec<(usize, Finding)> = steps.flat_map(found).collect();
        let told = matches!(
            seen[..],
            [
                (4_000..8_000, Finding::SlowLink { .. }),
                (16_000.., Finding::LinkRecovered)
            ]
        );
        assert!(told, "{seen:?}");
    }

    /// A stage of one rank is compared with what it was, and with how the others have changed.
    #[test]
    fn ranks_without_peers_are_compared_with_their_past() {
        let mut of = Stragglers::new([(Rank(0), 0), (Rank(1), 1)]);
        let mut seen = Vec::new();
        for step in 0..8 * WINDOW {
            let slow = if step >= 4 * WINDOW { 2.0 } else { 1.0 };
            let spent = [1.0, 3.0 * slow].map(|work_s| Spent {
                work_s,
                wait_s: 0.5,
                ..Spent::default()
            });
            seen.extend(of.step(&spent));
        }
        let rank = Rank(1);
        let slow = Finding::SlowRank {
            rank,
            times: 2.0,
            is_host_busy: false,
        };
        assert_eq!(seen, [slow]);
    }

    /// Rank 1 gets its processor late in every step: it is slow, and not by itself.
    #[test]
    fn a_rank_whose_host_is_busy_is_told_from_a_slow_processor() {
        let mut of = Stragglers::new((0..4).map(|r| (Rank(r), 0)));
        let steps = (0..8 * WINDOW).map(|step| {
            let late = if step >= 4 * WINDOW { 0.9 } else { 0.0 };
            [0, 1, 2, 3].map(|r| Spent {
                work_s: if r == 1 { 1.0 + late } else { 1.0 },
                wait_s: if r == 1 { 0.1 } else { 0.1 + late },
                in_line_s: if r == 1 { late } else { 0.0 },
                still_s: 0.0,
            })
        });
        let seen: Vec<Finding> = steps.flat_map(|s| of.step(&s)).collect();
        let busy = matches!(
            seen[..],
            [Finding::SlowRank {
                rank: Rank(1),
                is_host_busy: true,
                ..
            }]
        );
        assert!(busy, "{seen:?}");
    }

    /// A processor that is there for three milliseconds of seven, or for half of each period of its
    /// control group, is slow also where most steps are shorter than what it is there for.
    #[test]
    fn a_processor_that_is_taken_away_between_short_steps_is_slow() {
        for (on_s, off_s) in [(0.003, 0.004), (0.05, 0.05)] {
            let mut of = Stragglers::new((0..2).map(|r| (Rank(r), 0)));
            let (work_s, wait_s) = (0.001, 0.0002);
            let (mut now, mut seen) = (0.0_f64, Vec::new());
            for step in 0..20_000 {
                let late = match (5_000..15_000).contains(&step) {
                    // Whether it is taken away before the work is done.
                    true if now % (on_s + off_s) + work_s > on_s => off_s,
                    _ => 0.0,
                };
                now += work_s + late + wait_s;
                let spent = [0, 1].map(|r| Spent {
                    work_s: if r == 1 { work_s + late } else { work_s },
                    wait_s: if r == 1 { wait_s } else { wait_s + late },
                    ..Spent::default()
                });
                seen.extend(of.step(&spent));
            }
            let is_told = matches!(
                seen[..],
                [
                    Finding::SlowRank {
                        rank: Rank(1),
                        is_host_busy: false,
                        ..
                    },
                    Finding::Recovered(Rank(1))
                ]
            );
            assert!(is_told, "{on_s} s of {}: {seen:?}", on_s + off_s);
        }
    }

    /// A burst of other work is over in less than a window of short steps.
    #[test]
    fn short_steps_are_looked_at_for_a_while() {
        let mut of = Stragglers::new((0..2).map(|r| (Rank(r), 0)));
        let steps = (0..10_000).map(|step| {
            let is_burst = (4_000..4_060).contains(&step);
            [0, 1].map(|r| Spent {
                work_s: if is_burst && r == 1 { 0.02 } else { 0.002 },
                wait_s: if is_burst && r == 0 { 0.02 } else { 0.001 },
                ..Spent::default()
            })
        });
        let seen: Vec<Finding> = steps.flat_map(|s| of.step(&s)).collect();
        assert_eq!(seen, []);
    }
}
