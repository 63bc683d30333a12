//! The finding of a run that failed about itself, as far as it is of the plan.

use super::{few, names};
use crate::failure::Failure;
use ir::Rank;
use ir::program::Program;
use runtime::RuntimeError;
use runtime::record::{Fate, Verdict};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The finding in the folder of a run's records.
pub(super) enum Finding {
    /// The run has written none.
    None,
    /// It is whole, and names ranks of the plan alone.
    Whole(Verdict),
    /// Nothing is taken from it, for this reason.
    Unusable(String),
}

impl Finding {
    pub fn of(folder: &Path, (program, plan): (&Program, &str)) -> Self {
        let verdict = match Verdict::find(folder) {
            Ok(None) => return Finding::None,
            Ok(Some(verdict)) => verdict,
            Err(e) => {
                return Finding::Unusable(format!(
                    "The file that would have the run's own finding has no whole one, so nothing is \
                     taken from it: {e}."
                ));
            }
        };
        if verdict.plan.as_ref().is_some_and(|of| of != plan) {
            return Finding::Unusable(format!(
                "The finding in {} is of a run of another plan, so nothing is taken from it.",
                folder.display()
            ));
        }
        let ranks = program.roles.iter().flat_map(|r| r.mesh.ranks());
        let ranks: BTreeSet<Rank> = ranks.collect();
        let strangers: Vec<Rank> = verdict.ranks().difference(&ranks).copied().collect();
        match strangers.is_empty() {
            true => Finding::Whole(verdict),
            false => Finding::Unusable(format!(
                "The finding in {} does not belong to this plan, so nothing is taken from it: it \
                 names {}, and the plan's ranks are {} to {}.",
                folder.display(),
                few(&strangers),
                ranks.first().copied().unwrap_or(Rank(0)),
                ranks.last().copied().unwrap_or(Rank(0)),
            )),
        }
    }
    pub fn verdict(&self) -> Option<&Verdict> {
        match self {
            Finding::Whole(verdict) => Some(verdict),
            Finding::None | Finding::Unusable(_) => None,
        }
    }
    /// Why nothing is taken from it, in a sentence.
    pub fn problem(&self) -> Option<&str> {
        match self {
            Finding::Unusable(why) => Some(why),
            Finding::None | Finding::Whole(_) => None,
        }
    }
    pub fn words(&self) -> Option<String> {
        match self {
            Finding::None => None,
            Finding::Whole(verdict) => Some(told(verdict)),
            Finding::Unusable(why) => Some(why.clone()),
        }
    }
    /// The failure where there are no records either.
    pub fn beside(&self, error: RuntimeError) -> Failure {
        let failure = Failure::from(error);
        match self.problem() {
            None => failure,
            Some(why) => {
                let what = format!("{failure}. {why}");
                failure.saying(what)
            }
        }
    }
}

/// The finding of a run, in a sentence.
fn told(of: &Verdict) -> String {
    let mut by_fate: BTreeMap<&Fate, Vec<Rank>> = BTreeMap::new();
    for (rank, fate) in &of.found {
        by_fate.entry(fate).or_default().push(*rank);
    }
    let fates = by_fate.into_iter().map(|(fate, ranks)| {
        let (are, each) = match ranks.len() {
            1 => ("is", ""),
            _ => ("are", "each: "),
        };
        let ranks = names(ranks);
        match fate {
            Fate::Lost(how) => format!("{ranks} {are} lost ({each}{how})"),
            Fate::Missed { by, seconds } => {
                format!("{by} waited for {ranks} for {seconds} s, in vain")
            }
            Fate::Failed => format!("{ranks} failed"),
        }
    });
    match of.found.is_empty() {
        true => format!("The run itself ended with this error: {}", of.error),
        false => format!(
            "The run itself found: {}.",
            fates.collect::<Vec<_>>().join("; ")
        ),
    }
}
