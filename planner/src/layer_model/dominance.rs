//! Choices of a group that another one makes useless: whatever the groups around them choose, and
//! however many microbatches there are, it takes no longer, layout changes included, holds no
//! more bytes of any kind, and keeps to every ZeRO level that they keep to.
//!
//! They are dropped twice: before anything between groups is priced, those that show the other
//! groups the same specs as a better one ([`drop_among_equal_faces`]), which is most of what
//! several axes multiply, and afterwards those whose layout changes are no cheaper either
//! ([`drop_by_links`]). Groups of boundaries keep their layouts: both sides count them.
//!
//! A step of m microbatches costs m * (forward + backward) + once a step, so a choice takes no
//! longer for any m if it does not in the first sum and not at m = 1.
//!
//! Invariant: what is cheapest under any weights and prices on memory, the first of equals, stays.
//! So of two that cost the same only the later one is dropped, and where costs are of several
//! rounded terms the difference has to be more than rounding.

use super::{Assumed, Link, LinkCell, MOST_HIDDEN, PricedLink, QUANTUM_S, SpecNumbers};
use crate::groups::{Choice, Group, Phases};
use crate::pins::ZeroLevels;
use crate::prices::Prices;
use rustc_hash::FxHashMap;
use std::cell::OnceCell;

/// The assumption that what may hide does: under this, too, a choice has to be of no use.
const HIDING: Assumed = Assumed {
    level: None,
    hidden: MOST_HIDDEN,
    gradients: false,
    fill: 0,
};

/// Seconds of a microbatch, and of a step of a single one.
type Times = [f64; 2];

fn times(t: Phases) -> Times {
    let microbatch = t.forward + t.backward;
    [microbatch, microbatch + t.step]
}

fn covers(b: ZeroLevels, a: ZeroLevels) -> bool {
    b.and(a) == a
}

/// A choice as it is compared with the others of its group.
#[derive(Clone, Copy)]
struct Own {
    /// That live for the step, saved for the backward pass, and recomputed for it.
    bytes: [u64; 3],
    times: Times,
    levels: ZeroLevels,
}

impl Own {
    fn of(choice: &Choice) -> Own {
        Own {
            bytes: [
                choice.static_bytes,
                choice.saved_bytes,
                choice.recomputed_bytes,
            ],
            times: times(choice.time),
            levels: choice.levels,
        }
    }

    /// Whether it holds as little as `a`, and keeps to its levels; one that is pinned all keep to.
    fn holds_no_more(&self, a: &Own, is_level_pinned: bool) -> bool {
        let mut bytes = self.bytes.iter().zip(a.bytes);
        bytes.all(|(b, a)| *b <= a) && (is_level_pinned || covers(self.levels, a.levels))
    }
}

/// Drops the choices of group `index` that show the other groups the same specs as one that
/// makes them useless.
pub(super) fn drop_among_equal_faces(
    group: &mut Group,
    index: usize,
    links: &[Link],
    is_level_pinned: bool,
    prices: &mut Prices<'_>,
) {
    let own: Vec<&Link> = links
        .iter()
        .filter(|l| l.a != l.b && (l.a == index || l.b == index))
        .collect();
    let choices: Vec<Own> = group.choices.iter().map(Own::of).collect();
    let mut numbers = SpecNumbers::new(prices);
    let mut classes: FxHashMap<Vec<usize>, Vec<usize>> = FxHashMap::default();
    for (i, choice) in group.choices.iter().enumerate() {
        let face = own.iter().flat_map(|l| l.face(index, choice));
        let face = face.map(|spec| numbers.of(spec)).collect();
        classes.entry(face).or_default().push(i);
    }
    let beats = |b: usize, a: usize| {
        let (i, j) = (choices[b].times, choices[a].times);
        let no_longer = i[0] <= j[0] && i[1] <= j[1];
        let first = b < a || i[1] + 2.0 * QUANTUM_S < j[1];
        b != a && no_longer && first && choices[b].holds_no_more(&choices[a], is_level_pinned)
    };
    let mut useless = vec![false; choices.len()];
    for class in classes.values() {
        for &a in class {
            useless[a] = class.iter().any(|&b| beats(b, a));
        }
    }
    let mut useless = useless.into_iter();
    group.choices.retain(|_| useless.next() == Some(false));
}

/// Drops the choices of every group that one with layout changes at least as cheap makes useless.
pub(super) fn drop_by_links(
    groups: &mut [Group],
    priced: &mut [PricedLink],
    is_level_pinned: bool,
) {
    for (index, group) in groups.iter_mut().enumerate().filter(|(_, g)| !g.boundary) {
        let own = || priced.iter().filter(|l| l.a == index || l.b == index);
        let links: Vec<Longer> = own()
            .map(|l| Longer::of(l, index, is_level_pinned))
            .collect();
        let margin = (links.len() + 2) as f64 * QUANTUM_S;
        let choices: Vec<Own> = group.choices.iter().map(Own::of).collect();
        let beats = |b: usize, a: usize| {
            if a == b || !choices[b].holds_no_more(&choices[a], is_level_pinned) {
                return false;
            }
            let (i, j) = (choices[b].times, choices[a].times);
            // In full, and where what may hide is assumed to.
            let mut longer = [[i[0] - j[0], i[1] - j[1]]; 2];
            for link in &links {
                let Some(more) = link.more(link.faces[a], link.faces[b]) else {
                    return false;
                };
                for (longer, more) in longer.iter_mut().zip(more) {
                    *longer = [longer[0] + more[0], longer[1] + more[1]];
                }
            }
            longer.iter().all(|l| l[0] <= 0.0 && l[1] < -margin)
        };
        let n = choices.len();
        let useless: Vec<bool> = (0..n).map(|a| (0..n).any(|b| beats(b, a))).collect();
        let mut of_group = useless.iter();
        group.choices.retain(|_| of_group.next() == Some(&false));
        for link in priced.iter_mut().filter(|l| l.a == index || l.b == index) {
            let faces = match link.a == index {
                true => &mut link.faces.0,
                false => &mut link.faces.1,
            };
            let mut of_face = useless.iter();
            faces.retain(|_| of_face.next() == Some(&false));
        }
    }
}

/// How much longer the layout changes of a link take when a group changes its face.
struct Longer {
    /// Per choice, its face.
    faces: Vec<usize>,
    n_faces: usize,
    /// By face, then by the faces that the other group may show.
    seen: Vec<Option<Seen>>,
    n_others: usize,
    is_level_pinned: bool,
    /// `[from face][to face]`: what was found so far.
    by_faces: Vec<OnceCell<Option<[Times; 2]>>>,
}

/// The layout changes of a cell as both assumptions see them, and its levels.
#[derive(Clone, Copy)]
struct Seen {
    /// In full, and with what may hide assumed to: seconds of a microbatch, then of a step.
    seconds: [f64; 4],
    levels: ZeroLevels,
}

impl Seen {
    fn of(cell: &LinkCell) -> Seen {
        let [full, hidden] =
            [Assumed::default(), HIDING].map(|a| times(a.seen(cell.time, cell.hideable)));
        Seen {
            seconds: [full[0], full[1], hidden[0], hidden[1]],
            levels: cell.levels,
        }
    }
}

impl Longer {
    fn of(link: &PricedLink, index: usize, is_level_pinned: bool) -> Longer {
        let (faces, mut others) = match link.a == index {
            true => (link.faces.0.clone(), link.faces.1.clone()),
            false => (link.faces.1.clone(), link.faces.0.clone()),
        };
        others.sort_unstable();
        others.dedup();
        let n_faces = faces.iter().max().map_or(0, |most| most + 1);
        // Each cell is looked at for all pairs of faces: seen once, by face and then by other.
        let cell = |face: usize, other: usize| match link.a == index {
            true => &link.cells[face * link.n_faces_b + other],
            false => &link.cells[other * link.n_faces_b + face],
        };
        let of_face = |face| others.iter().map(move |&other| (face, other));
        let seen: Vec<Option<Seen>> = (0..n_faces)
            .flat_map(of_face)
            .map(|(face, other)| cell(face, other).as_ref().map(Seen::of))
            .collect();
        Longer {
            by_faces: vec![OnceCell::new(); n_faces * n_faces],
            n_others: others.len(),
            faces,
            n_faces,
            seen,
            is_level_pinned,
        }
    }

    /// At most, over the faces that the other group may show; `None` where that loses a way, or a
    /// level. In full, and with what may hide assumed to.
    fn more(&self, a: usize, b: usize) -> Option<[Times; 2]> {
        let known = &self.by_faces[a * self.n_faces + b];
        *known.get_or_init(|| self.most(a, b))
    }

    fn most(&self, a: usize, b: usize) -> Option<[Times; 2]> {
        let row = |face: usize| &self.seen[face * self.n_others..][..self.n_others];
        let mut most = [f64::NEG_INFINITY; 4];
        for (from, to) in row(a).iter().zip(row(b)) {
            let Some(from) = from else { continue };
            let covers = |to: &&Seen| self.is_level_pinned || covers(to.levels, from.levels);
            let to = to.as_ref().filter(covers)?;
            for ((most, i), j) in most.iter_mut().zip(to.seconds).zip(from.seconds) {
                *most = most.max(i - j);
            }
        }
        // A face from which there is no way is no loss.
        let or_none = |longer: f64| if longer.is_finite() { longer } else { 0.0 };
        let most = most.map(or_none);
        Some([[most[0], most[1]], [most[2], most[3]]])
    }
}
