//! Coverage: every op that a result depends on runs as often as its region says, over all
//! roles: once for every microbatch, or once a step. World ops run once on each stage that
//! wants them. Sources are loaded and filled, layout changes are steps; neither is counted.

use crate::facts::Facts;
use crate::report::{Report, role_place};
use ir::program::{InstrKind, Program};
use ir::{OpId, OpKind, Region};
use std::collections::BTreeMap;

pub(crate) fn check(facts: &Facts<'_>, program: &Program, report: &mut Report) {
    let plays = plays(program);
    let mut sites: BTreeMap<OpId, Vec<(usize, usize)>> = BTreeMap::new();
    for (i, role) in program.roles.iter().enumerate() {
        for (t, template) in role.templates.iter().enumerate() {
            for instr in &template.instructions {
                if let InstrKind::Compute { path, kind, .. } = &instr.kind
                    && let Some(op) = facts.graph.find(path)
                    && begins(&facts.graph.op(op).kind, kind)
                {
                    sites.entry(op).or_default().push((i, t));
                }
            }
        }
    }
    for (id, op) in facts.graph.iter() {
        if op.kind.is_source() || matches!(op.kind, OpKind::Layout) {
            continue;
        }
        let at = sites.get(&id).map_or(&[][..], Vec::as_slice);
        let groups: Vec<Vec<(usize, usize)>> = match op.layer {
            Some(_) => vec![at.to_vec()],
            None => {
                let mut by_role: BTreeMap<usize, Vec<(usize, usize)>> = BTreeMap::new();
                at.iter()
                    .for_each(|&site| by_role.entry(site.0).or_default().push(site));
                if by_role.is_empty() {
                    vec![vec![]]
                } else {
                    by_role.into_values().collect()
                }
            }
        };
        for group in groups {
            let place = match (op.layer, group.first()) {
                (None, Some(&(role, _))) => format!("{} {}", role_place(role), op.path),
                _ => op.path.clone(),
            };
            if let Some((expected, actual)) = miscount(
                op.region,
                facts.needed(id),
                &group,
                &plays,
                program.n_microbatches,
            ) {
                report.add(place, "coverage", expected, actual);
            }
        }
    }
}

/// Whether an instruction is all of its op or, of a ring's chain, the first part: the others follow
/// from it, as the last one leaves the result.
fn begins(op: &OpKind, instruction: &OpKind) -> bool {
    op.name() == instruction.name() && !instruction.keys().continues()
}

/// Counts how often each template is played for each microbatch, and how often for none.
struct Plays {
    once_each: bool,
    none: u32,
    by_microbatch: BTreeMap<u32, u32>,
}

fn plays(program: &Program) -> Vec<Vec<Plays>> {
    program
        .roles
        .iter()
        .map(|role| {
            let mut plays: Vec<Plays> = role
                .templates
                .iter()
                .map(|_| Plays {
                    once_each: false,
                    none: 0,
                    by_microbatch: BTreeMap::new(),
                })
                .collect();
            for slot in &role.trace {
                let Some(p) = plays.get_mut(slot.template.index()) else {
                    continue;
                };
                match slot.microbatch {
                    None => p.none += 1,
                    Some(m) => *p.by_microbatch.entry(m).or_insert(0) += 1,
                }
            }
            for p in &mut plays {
                p.once_each = p.none == 0
                    && p.by_microbatch.len() == program.n_microbatches as usize
                    && p.by_microbatch.values().all(|&n| n == 1);
            }
            plays
        })
        .collect()
}

fn miscount(
    region: Region,
    needed: bool,
    sites: &[(usize, usize)],
    plays: &[Vec<Plays>],
    n: u32,
) -> Option<(String, String)> {
    if sites.is_empty() {
        return needed.then(|| ("an instruction".into(), "none".into()));
    }
    let played = |&(r, t): &(usize, usize)| &plays[r][t];
    if region != Region::Microbatch {
        let times: u32 = sites
            .iter()
            .map(|s| played(s).none)
            .fold(0, u32::saturating_add);
        let wrong = times > 1 || (needed && times == 0);
        return wrong.then(|| ("once a step".into(), format!("{times} times")));
    }
    if let [site] = sites
        && played(site).once_each
    {
        return None;
    }
    let mut times: BTreeMap<u32, u32> = BTreeMap::new();
    for site in sites {
        for (&m, &k) in &played(site).by_microbatch {
            *times.entry(m).or_insert(0) += k;
        }
    }
    let expected = "once for every microbatch".to_string();
    if let Some((m, k)) = times.iter().find(|(_, k)| **k != 1) {
        return Some((expected, format!("{k} times for microbatch {m}")));
    }
    (times.len() != n as usize && needed).then(|| (expected, format!("for {} of {n}", times.len())))
}
