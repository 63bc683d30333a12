//! Warnings before the first step of a run: what it is asked for may not be what is meant.

use crate::args::RunArgs;
use ir::TrainSpec;
use runtime::data::{Dataset, Split};
use runtime::schedule::LrSchedule;

/// Warns where the run is to write checkpoints beside those of a run that came further, and goes on
/// from none: where it does, it has been said from which and why.
pub fn warn_of_further(args: &RunArgs, first: u64) {
    let goes_on = args.resume.is_some() || args.continued.is_some();
    let Some(folder) = args.checkpoint.as_ref().filter(|_| !goes_on) else {
        return;
    };
    let all = runtime::checkpoint::numbered(folder).into_iter();
    let steps = all.filter_map(|(_, path)| Some((runtime::checkpoint::step_of(&path)?, path)));
    if let Some((step, path)) = steps.max().filter(|(step, _)| *step > first) {
        crate::say(format_args!(
            "warning: {} has a checkpoint of step {step}, and this run begins at step {first}. Checkpoints of later steps stay until this run has come as far, or the disk is full. To go on from that one give --resume {}.",
            folder.display(),
            path.display()
        ));
    }
}

/// Warns of steps at whose learning rate nothing is learnt.
pub fn warn_of_no_rate(args: &RunArgs, schedule: &LrSchedule, first: u64) {
    let end = first.saturating_add(args.steps);
    let idle = schedule.zero_from().map(|rests| rests.max(first)..end);
    let Some(idle) = idle.filter(|idle| !idle.is_empty()) else {
        return;
    };
    let (at, change) = match end - idle.start {
        1 => (format!("at step {}", idle.start), "that step changes"),
        _ => (
            format!("from step {} to step {}", idle.start, end - 1),
            "these steps change",
        ),
    };
    crate::say(format_args!(
        "warning: the learning rate has decayed to 0 {at}, so {change} nothing. Give --total-steps {end}, or a --min-lr above 0."
    ));
}

/// Warns that each step has samples more than once, where the data has fewer than a step takes.
/// What else is wrong with the data is said where it is read.
pub fn warn_of_repeats(dataset: &Dataset, train: &TrainSpec) {
    let (batch, sequence) = (train.global_batch, train.sequence);
    let windows = dataset.n_windows(Split::Train, sequence as usize);
    if let Ok(windows) = windows
        && windows < batch
    {
        crate::say(format_args!(
            "warning: every step repeats the data {:.1} times: it takes {batch} samples of {}, and the part of {} for training has {} of them. Use more data, or compile with a smaller --global-batch.",
            batch as f64 / windows as f64,
            ir::counted(sequence, "token"),
            dataset.path().display(),
            windows
        ));
    }
}
