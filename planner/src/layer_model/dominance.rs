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

use super::{Assumed, Link, LinkCell, PricedLink, QUANTUM_S};
use crate::groups::{Choice, Group, Phases};
use crate::pins::ZeroLevels;
use ir::ShardingSpec;
use rustc_hash::FxHashMap;

/// The assumption that what may hide does: under this, too, a choice has to be of no use.
const HIDING: Assumed = Assumed {
    level: None,
    hides: true,
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

/// Whether `b` holds as little as `a`, and keeps to its levels; one that is pinned all keep to.
fn holds_no_more(b: &Choice, a: &Choice, is_level_pinned: bool) -> bool {
    b.static_bytes <= a.static_bytes
        && b.saved_bytes <= a.saved_bytes
        && b.recomputed_bytes <= a.recomputed_bytes
        && (is_level_pinned || covers(b.levels, a.levels))
}

/// Drops the choices of group `index` that show the other groups the same specs as one that
/// makes them useless.
pub(super) fn drop_among_equal_faces(
    group: &mut Group,
    index: usize,
    links: &[Link],
    is_level_pinned: bool,
) {
    let own: Vec<&Link> = links
        .iter()
        .filter(|l| l.a != l.b && (l.a == index || l.b == index))
        .collect();
    let choices = &group.choices;
    let mut classes: FxHashMap<Vec<&ShardingSpec>, Vec<usize>> = FxHashMap::default();
    for (i, choice) in choices.iter().enumerate() {
        let face = own.iter().flat_map(|l| l.face(index, choice)).collect();
        classes.entry(face).or_default().push(i);
    }
    let beats = |b: usize, a: usize| {
        let (i, j) = (times(choices[b].time), times(choices[a].time));
        let no_longer = i[0] <= j[0] && i[1] <= j[1];
        let first = b < a || i[1] + 2.0 * QUANTUM_S < j[1];
        b != a && no_longer && first && holds_no_more(&choices[b], &choices[a], is_level_pinned)
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
        let choices = &group.choices;
        let beats = |b: usize, a: usize| {
            let (i, j) = (times(choices[b].time), times(choices[a].time));
            // In full, and where what may hide is assumed to.
            let mut longer = [[i[0] - j[0], i[1] - j[1]]; 2];
            if a == b || !holds_no_more(&choices[b], &choices[a], is_level_pinned) {
                return false;
            }
            for link in &links {
                let Some(more) = link.by_faces[link.faces[a] * link.n_faces + link.faces[b]] else {
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
    /// `[from face][to face]`: at most, over the faces that the other group may show; `None` where
    /// that loses a way, or a level. In full, and with what may hide assumed to.
    by_faces: Vec<Option<[Times; 2]>>,
}

impl Longer {
    fn of(link: &PricedLink, index: usize, is_level_pinned: bool) -> Longer {
        let (faces, mut others) = match link.a == index {
            true => (link.faces.0.clone(), link.faces.1.clone()),
            false => (link.faces.1.clone(), link.faces.0.clone()),
        };
        others.sort_unstable();
        others.dedup();
        let cell = |face: usize, other: usize| match link.a == index {
            true => &link.cells[face * link.n_faces_b + other],
            false => &link.cells[other * link.n_faces_b + face],
        };
        let more = |a: usize, b: usize| {
            let mut most = [[f64::NEG_INFINITY; 2]; 2];
            for &other in &others {
                let Some(from) = cell(a, other) else { continue };
                let to = cell(b, other).as_ref();
                let to = to.filter(|to| is_level_pinned || covers(to.levels, from.levels))?;
                for (most, assumed) in most.iter_mut().zip([Assumed::default(), HIDING]) {
                    let seen = |cell: &LinkCell| times(assumed.seen(cell.time, cell.hideable));
                    let (i, j) = (seen(to), seen(from));
                    *most = [most[0].max(i[0] - j[0]), most[1].max(i[1] - j[1])];
                }
            }
            // A face from which there is no way is no loss.
            let or_none = |longer: f64| if longer.is_finite() { longer } else { 0.0 };
            Some(most.map(|most| most.map(or_none)))
        };
        let n_faces = faces.iter().max().map_or(0, |most| most + 1);
        let pairs = (0..n_faces).flat_map(|a| (0..n_faces).map(move |b| (a, b)));
        Longer {
            by_faces: pairs.map(|(a, b)| more(a, b)).collect(),
            faces,
            n_faces,
        }
    }
}
