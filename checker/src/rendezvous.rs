//! Sends meet receives, and nobody waits for ever.
//!
//! All ranks of a role execute one list, so roles are played instead of ranks, exactly. What
//! can wait for others is a role's list of events: exchanges and world sums, in trace order.
//! A role stands at its next event; an exchange is complete when each partner has come to
//! the matching one, a world sum when all roles have come to theirs. Whatever still stands
//! when nothing moves is stuck, and those of them that wait for each other in a circle are named.

use crate::facts::Facts;
use crate::report::{Report, role_place, slot_place};
use ir::TransferId;
use ir::program::{InstrKind, Program};
use petgraph::algo::tarjan_scc;
use petgraph::graph::{DiGraph, NodeIndex};
use std::collections::{BTreeMap, VecDeque};

/// A tensor on its way between roles: the transfer, and the microbatch that it is of.
type Message = (TransferId, Option<u32>);

enum Kind {
    Exchange {
        sends: Vec<Message>,
        recvs: Vec<Message>,
    },
    /// The role's n-th world sum.
    WorldSum(usize),
}

struct Event {
    /// Slot of the trace.
    slot: usize,
    kind: Kind,
}

/// For each role, its events in trace order.
type Events = Vec<Vec<Event>>;

pub(crate) fn check(facts: &Facts<'_>, program: &Program, report: &mut Report) {
    let events: Events = (0..program.roles.len())
        .map(|i| events(program, i))
        .collect();
    let needed = partners(facts, program, &events, report);
    play(program, &events, &needed, report);
}

fn events(program: &Program, i: usize) -> Vec<Event> {
    let role = &program.roles[i];
    let mut found = Vec::new();
    let mut n_sums = 0;
    for (slot, s) in role.trace.iter().enumerate() {
        let template = role.template(s.template);
        if template.kind.pass().is_some() {
            // World sums in passes are reported by the walk; nothing else can wait there.
            continue;
        }
        for instr in &template.instructions {
            let of = |xs: &[(TransferId, ir::BufferId)]| {
                xs.iter().map(|x| (x.0, s.microbatch)).collect()
            };
            let kind = match &instr.kind {
                InstrKind::Exchange { sends, recvs } => Kind::Exchange {
                    sends: of(sends),
                    recvs: of(recvs),
                },
                InstrKind::WorldSum { .. } => {
                    n_sums += 1;
                    Kind::WorldSum(n_sums - 1)
                }
                _ => continue,
            };
            found.push(Event { slot, kind });
        }
    }
    found
}

/// For each event, the events of other roles that must have begun before it can complete.
type Needed = Vec<Vec<Vec<(usize, usize)>>>;

fn partners(facts: &Facts<'_>, program: &Program, events: &Events, report: &mut Report) -> Needed {
    let mut sends: BTreeMap<Message, Vec<(usize, usize)>> = BTreeMap::new();
    let mut recvs: BTreeMap<Message, Vec<(usize, usize)>> = BTreeMap::new();
    let mut sums: BTreeMap<usize, Vec<(usize, usize)>> = BTreeMap::new();
    for (i, role) in events.iter().enumerate() {
        for (k, event) in role.iter().enumerate() {
            match &event.kind {
                Kind::Exchange { sends: s, recvs: r } => {
                    s.iter()
                        .for_each(|&m| sends.entry(m).or_default().push((i, k)));
                    r.iter()
                        .for_each(|&m| recvs.entry(m).or_default().push((i, k)));
                }
                Kind::WorldSum(n) => sums.entry(*n).or_default().push((i, k)),
            }
        }
    }
    let mut needed: Needed = events
        .iter()
        .map(|role| role.iter().map(|_| Vec::new()).collect())
        .collect();
    for (mine, theirs, what) in [(&sends, &recvs, "receive"), (&recvs, &sends, "send")] {
        for (message, at) in mine {
            let others = theirs.get(message).map_or(&[][..], Vec::as_slice);
            for &(i, k) in at {
                match (at.len(), others) {
                    (1, [other]) => needed[i][k].push(*other),
                    _ => {
                        let place = slot_place(program, i, events[i][k].slot);
                        let expected =
                            format!("one {what} of {}, and one of it", name(program, *message));
                        report.add(
                            place,
                            "rendezvous",
                            expected,
                            format!("{} for {}", others.len(), at.len()),
                        );
                    }
                }
            }
        }
    }
    for at in sums.values() {
        if at.len() != events.len() && facts.norm.is_some() {
            let at: Vec<usize> = at.iter().map(|x| x.0).collect();
            report.add(
                "world sum",
                "rendezvous",
                format!("all {} stages", events.len()),
                format!("stages {at:?}"),
            );
        }
        for &(i, k) in at {
            needed[i][k].extend(at.iter().filter(|x| x.0 != i));
        }
    }
    needed
}

fn name(program: &Program, (x, m): Message) -> String {
    let value = program
        .transfers
        .get(x.index())
        .map_or("?", |t| t.value.as_str());
    match m {
        Some(m) => format!("transfer {} ({value}) of microbatch {m}", x.0),
        None => format!("transfer {} ({value})", x.0),
    }
}

/// Plays the roles serially: a role passes an event once everyone it needs has come to theirs.
fn play(program: &Program, events: &Events, needed: &Needed, report: &mut Report) {
    let mut at = vec![0usize; events.len()];
    let mut awake: Vec<usize> = (0..events.len()).collect();
    let mut sleepers: BTreeMap<(usize, usize), Vec<usize>> = BTreeMap::new();
    while let Some(i) = awake.pop() {
        // A role that comes to an event releases those that wait for it there.
        while at[i] < events[i].len() {
            awake.extend(sleepers.remove(&(i, at[i])).unwrap_or_default());
            let missing = needed[i][at[i]].iter().find(|&&(r, k)| at[r] < k);
            match missing {
                Some(&event) => {
                    sleepers.entry(event).or_default().push(i);
                    break;
                }
                None => at[i] += 1,
            }
        }
    }
    let stuck = |&(i, k): &(usize, usize)| k < events[i].len();
    let stuck: Vec<(usize, usize)> = at.iter().copied().enumerate().filter(stuck).collect();
    let awaited = |(i, k): (usize, usize)| needed[i][k].iter().filter(|&&(r, other)| at[r] < other);
    let pair = |&s: &(usize, usize)| awaited(s).map(move |x| (s.0 as u32, x.0 as u32));
    let waits: Waits = DiGraph::from_edges(stuck.iter().flat_map(pair));
    let circles = tarjan_scc(&waits);
    let circles: Vec<Vec<usize>> = circles
        .iter()
        .filter_map(|all| circle(&waits, all))
        .collect();
    let stands = |i: usize| slot_place(program, i, events[i][at[i].min(events[i].len() - 1)].slot);
    for &(i, k) in &stuck {
        let waits = awaited((i, k)).map(|&(r, other)| {
            let what = slot_place(program, r, events[r][other].slot);
            format!("{what}, which stands at {}", stands(r))
        });
        let mut found = waits.collect::<Vec<_>>().join("; ");
        if let Some(circle) = circles.iter().find(|c| c.contains(&i)) {
            let mut others: Vec<String> = circle.iter().map(|&r| stands(r)).collect();
            others.push(role_place(circle[0]));
            found += &format!("; a circle: {}", others.join(" waits for "));
        }
        report.add(stands(i), "deadlock", "partners that come", found);
    }
}

/// The roles that wait, each for others.
type Waits = DiGraph<(), ()>;

/// A shortest circle through the first of some roles that all wait for each other, that one first;
/// none of a role that waits for others alone.
fn circle(waits: &Waits, among: &[NodeIndex]) -> Option<Vec<usize>> {
    let first = *among.iter().min()?;
    // By role, the one that waits for it.
    let mut from: BTreeMap<NodeIndex, NodeIndex> = BTreeMap::new();
    let mut queue = VecDeque::from([first]);
    while let Some(i) = queue.pop_front() {
        for r in waits.neighbors(i) {
            if r == first {
                let back = std::iter::successors(Some(i), |r| from.get(r).copied());
                let mut circle: Vec<usize> = back.map(NodeIndex::index).collect();
                circle.reverse();
                return Some(circle);
            }
            if among.contains(&r) && !from.contains_key(&r) {
                from.insert(r, i);
                queue.push_back(r);
            }
        }
    }
    None
}
