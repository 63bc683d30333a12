//! The plan that the search finds where a row's plan was: the same model, batch, cluster and
//! software, with the device's own memory and no pin but what is recomputed, of which the best
//! choice counts (the search does not choose it by itself).

use crate::facts::Facts;
use crate::predict::{Question, fullest, lowered, planned, question};
use crate::row::Row;
use crate::{Unmodelled, cluster};
use frameworks::Software;
use ir::Bytes;
use planner::Planned;
use std::collections::BTreeMap;

/// A choice of recomputation: a name and the pin.
type Recomputed = (&'static str, &'static str);

/// Searches until a plan fits with all that its processes hold.
const ATTEMPTS: usize = 4;
/// The share of the memory that a search should get by proportion: part of what processes hold,
/// states, does not shrink with it, and three attempts at 80 GiB came no nearer than 80.2.
const MARGIN: f64 = 0.98;
/// The share of the memory that a plan should at least use: below, a search that may use more is
/// tried too.
const USED: f64 = 0.8;

/// The fastest plan of a search without a row's pins.
#[derive(Clone, Debug, PartialEq)]
pub struct Free {
    /// Seconds of a step.
    pub step_time_s: f64,
    /// Bytes on the fullest device, context and communicator included.
    pub peak_memory_bytes: u64,
    /// The plan: stages, submeshes, microbatch, schedule, and what it recomputes.
    pub plan: String,
}

/// The free plan of every row, in their order; rows of one model, batch and cluster, whose own
/// plans hold about as much beside their arenas, share it. A search takes as long as `compile`
/// does, and there is one for each of three choices of what is recomputed, up to four where a
/// plan does not fit with what its process holds or leaves much.
///
/// Fails where the row cannot be modelled, or no plan fits the devices' memory.
pub fn free(rows: &[Row], facts: &Facts) -> Vec<Result<Free, Unmodelled>> {
    let mut known: BTreeMap<String, Result<Free, Unmodelled>> = BTreeMap::new();
    rows.iter()
        .map(|row| {
            let own = question(row, facts)?;
            let mut q = own.clone();
            q.cluster.device.memory_bytes = cluster::memory(row, facts)?;
            on_free_axes(&mut q.software);
            let share = arena_share(&own);
            let machine = (&q.cluster, &q.software);
            let key = format!("{:?}{:?}{machine:?}{share}", q.config, q.train);
            known.entry(key).or_insert_with(|| best(&q, share)).clone()
        })
        .collect()
}

/// Applies what software does with collectives of data and tensor ranks to the axes of free plans
/// too: x, the outer one, which splits samples first, and y, inside hosts.
fn on_free_axes(software: &mut Software) {
    let lists = [
        &mut software.blocking_axes,
        &mut software.copied_axes,
        &mut software.piecewise_axes,
        &mut software.paired_axes,
    ];
    for names in lists {
        for (pinned, free) in [("data", "x"), ("tensor", "y")] {
            let has = |name: &str| names.iter().any(|n| n == name);
            if has(pinned) && !has(free) {
                names.push(free.into());
            }
        }
    }
}

/// The fastest of what searches find whose arenas get a share of the memory first: one search for
/// each choice, at the same time.
fn best(q: &Question, share: f64) -> Result<Free, Unmodelled> {
    let search = |(recompute, pin): Recomputed| -> Result<Free, Unmodelled> {
        let asked = Question {
            pins: vec![pin.to_string()],
            ..q.clone()
        };
        let mut free = fitting(asked, share)?;
        free.plan += &format!(", recompute {recompute}");
        Ok(free)
    };
    let found: Vec<_> = std::thread::scope(|scope| {
        let searches = recomputed(q).map(|choice| scope.spawn(move || search(choice)));
        searches
            .map(|s| {
                s.join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
            .into()
    });
    let (plans, errors): (Vec<_>, Vec<_>) = found.into_iter().partition(Result::is_ok);
    let plans = plans.into_iter().flatten();
    let fastest = plans.reduce(|best, p| match p.step_time_s < best.step_time_s {
        true => p,
        false => best,
    });
    let error = errors.into_iter().filter_map(Result::err).next_back();
    fastest.ok_or_else(|| error.unwrap_or(Unmodelled::Plan("no plan was tried".into())))
}

/// The choices. Selective is what the row's software saves most memory by: the scores of attention
/// where it keeps them, which the program does not hold; norms and activations elsewhere.
fn recomputed(q: &Question) -> [Recomputed; 3] {
    let memory = q.software.memory.as_ref();
    let selective = match memory.is_some_and(|m| m.score_bytes > 0.0) {
        true => "recompute:h.*.attn.attend=yes",
        false => "recompute=selective",
    };
    [
        ("none", "recompute=none"),
        ("selective", selective),
        ("full", "recompute=full"),
    ]
}

/// The part of what a process holds that the program's arena is, in the row's own plan: what of
/// the device's memory a first search should get, in tenths, so that plans which need about the
/// same share a search. All of it where that plan cannot be made.
fn arena_share(own: &Question) -> f64 {
    let share = planned(own).map(|p| {
        let stages = p.simulation.prediction.stages.iter();
        let arena = stages.map(|s| s.peak_bytes.0).max().unwrap_or(0) as f64;
        arena / fullest(&p.program, own).total().0.max(1) as f64
    });
    share.map_or(1.0, |share| (10.0 * share).round().clamp(1.0, 10.0) / 10.0)
}

/// The fastest plan found whose processes fit the device. A search fits the program's arena alone,
/// and gets a share of the memory for it. Where the processes then hold more than there is, or
/// leave much of it, the next search gets as much less or more in proportion: what they hold
/// beside the arena grows with what is in it.
fn fitting(mut asked: Question, share: f64) -> Result<Free, Unmodelled> {
    let all = asked.memory.0 as f64;
    let reserved = asked.cluster.device.memory_reserved_bytes;
    let mut limit = (all * share).max(reserved.0 as f64 + 1.0);
    let (mut found, mut needed): (Option<Free>, Option<Bytes>) = (None, None);
    for _ in 0..ATTEMPTS {
        asked.cluster.device.memory_bytes = Bytes(limit as u64);
        if asked.cluster.device.memory_bytes <= reserved {
            break;
        }
        let p = match (planned(&asked), &found) {
            (Ok(p), _) => p,
            // No plan fits the first share: an arena of all the memory is the most that there is.
            (Err(_), None) if needed.is_none() && limit < all => {
                limit = all;
                continue;
            }
            (Err(e), None) if needed.is_none() => return Err(e),
            (Err(_), _) => break,
        };
        let holds = fullest(&p.program, &asked).total();
        let used = holds.0 as f64 / all;
        if used <= 1.0 {
            let step_time_s = lowered(&asked, &p).step_time_s(&asked.machine())?;
            if found
                .as_ref()
                .is_none_or(|best| step_time_s < best.step_time_s)
            {
                found = Some(Free {
                    step_time_s,
                    peak_memory_bytes: holds.0,
                    plan: shape(&p),
                });
            }
            if used >= USED || limit >= all {
                break;
            }
        } else if found.is_some() {
            break;
        }
        needed = Some(holds);
        limit = (limit / used * MARGIN).min(all);
    }
    found.ok_or_else(|| {
        let needed = needed.map_or("more".into(), |bytes| bytes.to_string());
        Unmodelled::Plan(format!(
            "out of memory: the processes of the nearest plan hold {needed}, the devices {}",
            asked.memory
        ))
    })
}

/// Stages, their mesh (the first one's, where they differ), microbatch and schedule in words.
fn shape(planned: &Planned) -> String {
    let plan = &planned.plan;
    let mesh = plan.stages.first().map(|s| {
        let axes = s.mesh.axes.iter();
        let axes: Vec<String> = axes.map(|a| format!("{}={}", a.name, a.size)).collect();
        axes.join(" ")
    });
    format!(
        "{} stages of {}, microbatch {}, {:?}",
        plan.stages.len(),
        mesh.unwrap_or_default(),
        plan.microbatch,
        plan.schedule
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn software_treats_free_axes_as_pinned_ones() {
        let names = |all: &[&str]| all.iter().map(|n| n.to_string()).collect::<Vec<_>>();
        let mut software = Software {
            blocking_axes: names(&["data"]),
            piecewise_axes: names(&["tensor", "y"]),
            ..Software::plain("some")
        };
        on_free_axes(&mut software);
        assert_eq!(software.blocking_axes, ["data", "x"]);
        assert_eq!(software.piecewise_axes, ["tensor", "y"]);
        assert!(software.paired_axes.is_empty());
    }
}
