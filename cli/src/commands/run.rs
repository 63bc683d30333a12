//! `run`: training or inference by a plan on ranks that are CPU threads or have GPUs, in this
//! process or in several.

mod among;
mod children;
mod elastic;
mod fabric;
mod folder;
mod journal;
mod keeper;
mod last_resort;
mod launcher;
mod leaps;
mod left;
mod lock;
mod orphan;
mod other_devices;
mod records;
mod rendezvous;
mod said;
mod told;
mod warnings;
mod watch;

use crate::args::{BackendArg, CheckpointMode, DecayArg, MatmulsArg, RunArgs};
use crate::commands::doctor::names;
use crate::failure::{CHECKPOINTS_ARE, Exit, Failure};
use crate::interrupt::{BEFORE_IT_WENT_ON, Early, Interrupts};
use crate::plan_file::{self, Loaded};
use crate::{cluster, document, files, interrupt, model, outputs, report};
use among::{Company, Setting};
use elastic::SoFar;
use fabric::Chosen;
use folder::Unasked;
use import::{ModelConfig, Weights};
use indicatif::{ProgressBar, ProgressStyle};
use ir::measurement::Measurement;
use ir::op::InputKind;
use ir::training::{StateRole, TrainingGraph};
use ir::{Bytes, OpKind, Rank, Task};
use journal::{Journal, Standing};
use leaps::Leaps;
use lock::Keeping;
use orphan::Launcher;
use runtime::RuntimeError;
use runtime::checkpoint::{Checkpoint, Found, Guard, Leaving, Saving};
use runtime::data::{DataOptions, Dataset, Seen};
use runtime::device::cuda::{Matmuls, Multiplier};
use runtime::device::{Backend, cuda};
use runtime::execute::{Session, SessionOptions, StateRequest};
use runtime::processes::{Processes, Reason};
use runtime::schedule::{Decay, LrSchedule};
use runtime::train::{Periodic, Progress, TrainOptions, Trained, batches, train};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use said::{Rates, of_finding, print_json, print_words};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use warnings::{warn_of_further, warn_of_no_rate, warn_of_repeats};
use watch::{Described, Figures, Watch};

pub fn run(args: &RunArgs) -> Result<(), Failure> {
    // It may end at any time from now on.
    let parent = std::os::unix::process::parent_id();
    if args.as_process.is_some() {
        orphan::go_on_without_parent();
    }
    interrupt::outlive_limits_of_files()?;
    open_many_files();
    let args = &elastic::continued(args)?;
    let schedule = schedule(args)?;
    check_backend(args)?;
    let setting = among::setting(args)?;
    let ended = run_as(args, (&setting, parent), &schedule);
    let ended = ended.map_err(|failure| match setting.index() {
        0 => failure,
        index => failure.of_process(index),
    });
    // The end of MPI's library waits for mpirun, which may be about to kill this process.
    match setting.end_with_one() {
        true => ended.map_err(Failure::tell),
        false => ended,
    }
}

/// Runs the process of a run that this one is.
fn run_as(
    args: &RunArgs,
    (setting, parent): (&Setting, u32),
    schedule: &LrSchedule,
) -> Result<(), Failure> {
    let args = &folder::by_default(args.clone(), setting.index() == 0);
    let early = Some(Early {
        words: match args.continued.is_some() || args.after_loss > 0 {
            true => BEFORE_IT_WENT_ON,
            false => "interrupted before the run had begun; nothing was written",
        },
        is_kept: args.kept.is_some(),
    });
    if setting.index() > 0 {
        // Those that process 0 has started leave it to that to speak.
        let interrupts =
            Interrupts::watch(early.filter(|_| !matches!(setting, Setting::Started(_))))?;
        let launcher = Launcher::watch(parent, setting, args);
        return match told::told(args, setting)? {
            Some(args) => serve(
                &args,
                (setting, &interrupts, &launcher),
                &plan_file::load(&args.plan)?,
            ),
            None => Ok(()),
        };
    }
    keeper::keep(args, setting)?;
    let interrupts = Interrupts::watch(early)?;
    let launcher = Launcher::watch(parent, setting, args);
    let _clearing = interrupts.clear_at_end();
    let folder = args.checkpoint.as_deref();
    let tells = folder.filter(|_| args.elastic && matches!(setting, Setting::Launched(_)));
    let alive = tells.map(lock::Alive::begin);
    let is_held = lock::held(args, (setting, &interrupts), false)?;
    if is_held {
        told::forget(args);
    }
    let loaded = plan_file::load(&args.plan)?;
    check_task(args, loaded.plan.train.task)?;
    elastic::check(args, &loaded)?;
    if let Standing::Done = journal::go_on(args, setting, &loaded)? {
        // The process that did what was left may have been killed before it took them away, and
        // others may have left their states as they lost it.
        folder::forget(args);
        elastic::forget(args);
        args.checkpoint
            .iter()
            .for_each(|folder| runtime::checkpoint::forget(folder));
        return Ok(());
    }
    if let Some(path) = &args.weights {
        check_weights(path)?;
    }
    let data = match args.resume {
        Some(_) => Some(Arc::new(dataset(args, &loaded.training)?)),
        None => None,
    };
    let resume = args.resume.as_deref().zip(data.as_deref());
    let resume = resume.map(|(path, data)| checkpoint(path, &loaded, data));
    let resume = resume.transpose()?;
    let config = config(args)?;
    if let Some((config, path)) = &config {
        same_model(config, path, &loaded)?;
    }
    let weights = match (&args.weights, &config) {
        (Some(path), Some((config, _))) => Some(Weights::open(path, config)?),
        _ => None,
    };
    let dataset = match data {
        Some(data) => data,
        None => Arc::new(dataset(args, &loaded.training)?),
    };
    check_outputs(args, resume.as_deref(), &interrupts)?;
    warn_of_repeats(&dataset, &loaded.plan.train);
    if let Some(words) = other_devices::look(args, &loaded.plan.cluster)? {
        crate::say(format_args!("warning: {words}"));
    }
    match args.backend {
        BackendArg::Cpu => fits_machine(&loaded, setting)?,
        BackendArg::Cuda => has_gpus(args, &loaded, setting)?,
    }
    plan_file::check_program(&loaded)?;
    let chosen = fabric::chosen(args, &loaded, setting)?;
    folder::take_asked(args, &interrupts)?;
    let first = resume.as_ref().map_or(0, |c| c.step());
    if !is_held {
        lock::held(args, (setting, &interrupts), true)?;
        // Another one may have begun the run meanwhile.
        if let Standing::Done = journal::go_on(args, setting, &loaded)? {
            return Ok(());
        }
    }
    let begun = Journal::begin(args, (setting, &interrupts), (&loaded, first))?;
    warn_of_further(args, first);
    warn_of_no_rate(args, schedule, first);
    let mut args = RunArgs {
        run: begun.or_else(|| args.run.clone()),
        ..args.clone()
    };
    let unasked = Unasked::begin(&mut args, &interrupts);
    let args = &args;
    if let Setting::Launched(_) = setting {
        // What the others are told goes when this function ends, however it does.
        interrupts.begin_to_look();
    }
    let told = told::tell(args, setting)?;
    let gathered = among::gather((setting, &interrupts), args, (&loaded, &chosen));
    drop(told);
    drop(alive);
    // From now on an interrupt is seen before the first step, and what was made goes there.
    interrupts.begin_to_look();
    let begins = interrupts.keep_files();
    let mut company = match gathered {
        // Who has failed for another reason may be started again, with fewer processes.
        Err(failure) if interrupts.is_asked() || failure.exit() == Exit::Interrupted => {
            interrupts.take_back(begins);
            return Err(failure);
        }
        gathered => gathered.inspect_err(|_| {
            if let Setting::Launched(_) = setting {
                launcher::put_down_stopped(args.time_out);
            }
        })?,
    };
    let processes = company.as_ref().map(|c| Arc::clone(&c.processes));
    processes
        .iter()
        .for_each(|p| launcher.knows(p, &interrupts));
    let mut so_far = SoFar::begin(args, first);
    so_far.resumed = resume.as_ref().map(|c| c.path().to_path_buf());
    let folder = args.checkpoint.as_deref();
    let keeping = folder.map(|f| Keeping::begin(f, &interrupts, so_far.journal.clone()));
    let look = || keeping.as_ref().map_or(Ok(()), Keeping::keep);
    let trained = train_all(
        args,
        &loaded,
        (&dataset, schedule),
        (weights.as_ref(), resume),
        (processes, &chosen),
        (&mut so_far, &interrupts, keeping.as_ref()),
    );
    let trained = match trained {
        Ok(trained) => trained,
        // No step was made that records could say anything of.
        Err(failure) => {
            unasked.into_iter().for_each(Unasked::end);
            return Err(failure);
        }
    };
    let explain = |e: RuntimeError, company: Option<&Company>| {
        let words = records::explained(args, &loaded, (&e, company));
        if let RuntimeError::Gone {
            process,
            pid,
            is_silent: true,
            ..
        } = e
            && let Some(company) = company
        {
            match &company.children {
                Some(children) => children.put_down(process),
                // Its launcher would ask it to end first, which it does not hear.
                None if company.processes.is_here(process) => {
                    children::put_down_of_others(pid);
                }
                None => {}
            }
        }
        if let Some(company) = company.filter(|c| c.children.is_none() && e.is_loss()) {
            children::put_down_stopped(&company.processes);
        }
        (e, words)
    };
    // A run that was to end and lost somebody on the way was interrupted all the same.
    let failure_of = |e: RuntimeError, words: String, so_far: &SoFar| {
        let is_loss = e.is_loss();
        let failure = records::failure(args, (e, words), Some(so_far));
        match is_loss && interrupts.is_asked() && !setting.end_with_one() {
            true => {
                let what = format!("interrupted, and the run did not end in order: {failure}");
                failure.saying(what).exiting(Exit::Interrupted)
            }
            false => failure,
        }
    };
    // Whoever asks one of the processes to end asks the run, and one that has just begun ends at once.
    let were_interrupted = |company: Option<&Company>| {
        let children = company.and_then(|c| c.children.as_ref());
        children.is_some_and(|c| c.were_only_interrupted())
    };
    let begins_here = |so_far: &SoFar| {
        let is_rescued = matches!(so_far.rescued, Some(Ok(_)));
        so_far.done == first && args.continued.is_none() && !is_rescued
    };
    let Trained {
        measurement,
        mut session,
    } = match (trained.map_err(|e| explain(e, company.as_ref())), company) {
        (Ok(trained), there) => {
            company = there;
            trained
        }
        (Err((RuntimeError::Gone { .. }, _)), company)
            if begins_here(&so_far) && were_interrupted(company.as_ref()) =>
        {
            unasked.into_iter().for_each(Unasked::end);
            interrupts.take_back(begins);
            return Err(Failure::new(Exit::Interrupted, BEFORE_A_STEP));
        }
        (Err((RuntimeError::Gone { .. }, words)), Some(company)) if goes_on(args, setting) => {
            return Err(elastic::go_on(args, &loaded, company, (words, so_far)));
        }
        (Err((e @ RuntimeError::Gone { .. }, words)), _) if args.elastic => {
            return Err(failure_of(e, words, &so_far));
        }
        (Err((e, words)), _) => {
            if so_far.done == first && !e.is_of_work() {
                unasked.into_iter().for_each(Unasked::end);
            }
            return Err(failure_of(e, words, &so_far));
        }
    };
    if (measurement.steps.len() as u64) < args.steps {
        session.is_interrupted();
    }
    // All steps were made before: what is left is what the run was to write at its end.
    let is_end = args.continued.is_some() && args.steps == 0;
    if measurement.steps.is_empty() && !is_end {
        let what = match args.continued {
            Some(_) => BEFORE_IT_WENT_ON,
            None => BEFORE_A_STEP,
        };
        // One that goes on after a loss may have to tell of that still.
        if let Some(unasked) = unasked.filter(|_| args.continued.is_none()) {
            unasked.end();
        }
        if args.continued.is_none() {
            interrupts.take_back(begins);
        }
        return Err(Failure::new(Exit::Interrupted, what));
    }
    // When one output cannot be written, the others still are.
    let (mut written, mut failed) = (Vec::new(), Vec::new());
    let mut has_state = true;
    let mut attempt = |what: String, done: Result<(), Failure>| match done {
        Ok(()) => written.push(what),
        Err(failure) => failed.push(failure),
    };
    let text = document::to_json(&measurement);
    let write_measurement = || match &text {
        Ok(text) => outputs::write_atomic(&args.output, text.as_bytes()),
        Err(failure) => Err(Failure::new(failure.exit(), failure)),
    };
    // Whoever finds all steps made has not measured them.
    let has_all = !is_end && measurement.steps.len() as u64 == args.steps;
    if let Ok(text) = &text
        && has_all
        && look().is_ok()
    {
        elastic::keep_measurement(args, text);
    }
    if let Some(folder) = args.checkpoint.as_ref().filter(|_| !is_end) {
        let graph = &loaded.plan.graph;
        let of = Saving {
            folder,
            kept: usize::from(args.checkpoints_kept),
            plan: &loaded.hash,
            model: graph,
            compares: args.check_replicas.is_some(),
            guard: Some(Guard(&look)),
        };
        // One that was due after the last step is the same.
        let step = session.step_number();
        let is_there = |path: &Path| {
            look().is_ok() && keeping.as_ref().is_some_and(|keeping| keeping.has(path))
        };
        let there = so_far
            .written
            .last()
            .filter(|(path, of)| *of == step && is_there(path));
        let saved = match there {
            Some((path, _)) => Ok(path.clone()),
            None => of.save(&mut session),
        };
        let saved = match (saved.map_err(|e| explain(e, company.as_ref())), company) {
            // What is left to do has still to be done.
            (Err((RuntimeError::Gone { .. }, lost)), Some(there)) if goes_on(args, setting) => {
                so_far.rescued = Some(of.rescue(&mut session));
                drop(session);
                if let Err(failure) = write_measurement() {
                    crate::say(format_args!("warning: {failure}"));
                }
                return Err(elastic::go_on(args, &loaded, there, (lost, so_far)));
            }
            (saved, there) => {
                company = there;
                saved
            }
        };
        if let Err((e @ RuntimeError::Replicas { .. }, words)) = saved {
            // Nothing that they have is to be had.
            session.fail(&e.to_string());
            return Err(failure_of(e, words, &so_far));
        }
        let path = saved.as_deref().unwrap_or(folder);
        let what = format!("{} has the training state", path.display());
        let saved = saved.map_err(|(e, words)| {
            let failure = failure_of(e, words, &so_far);
            let what = format!("{failure}; {}", so_far.without_last(folder));
            failure.saying(what)
        });
        has_state = saved.is_ok();
        attempt(what, saved.map(|_| ()));
    }
    if let (Some(path), Some((config, _))) = (&args.save, &config) {
        let what = format!("{} has the weights", path.display());
        attempt(what, export(path, config, &mut session));
    }
    let what = format!("{} measures the steps", args.output.display());
    match is_end {
        false => attempt(what, write_measurement()),
        true => match elastic::kept_measurement(args) {
            Some(kept) => attempt(what, outputs::write_atomic(&args.output, &kept)),
            None if args.output.exists() => {}
            None => crate::say(format_args!(
                "warning: {} is not written: who made the last steps has left no measurement of them",
                args.output.display()
            )),
        },
    }
    if !failed.is_empty() {
        return Err(not_all(args, failed, &written, has_state));
    }
    if measurement.steps.len() as u64 == args.steps {
        journal::end(args);
        if args.elastic {
            elastic::forget(args);
            args.checkpoint
                .iter()
                .for_each(|folder| runtime::checkpoint::forget(folder));
        }
    }
    drop(session);
    if let Some(company) = company {
        for problem in company.end() {
            crate::say(format_args!("warning: {problem} after the run was done"));
        }
    }
    // One that is not done has to tell of earlier losses still.
    let is_whole = measurement.steps.len() as u64 == args.steps;
    if let Some(unasked) = unasked.filter(|_| is_whole || args.losses == 0) {
        unasked.end();
    }
    if is_end {
        crate::say(format_args!(
            "all steps of the run were made before; {}",
            match written.is_empty() {
                true => "nothing was left to write".to_string(),
                false => format!("now written: {}", written.join(", ")),
            }
        ));
    } else if args.json {
        print_json(args, &loaded, &measurement, &chosen)?;
    } else {
        print_words(args, &loaded, &measurement, &chosen)?;
        report::out(&format!("Written: {}.", written.join(", ")))?;
    }
    let has_validated = |(step, _): &(u64, f64)| *step == first.saturating_add(args.steps);
    let validates = args.validate_every.is_some() && is_whole && !is_end;
    if validates && !measurement.validation.last().is_some_and(has_validated) {
        crate::say(format_args!(
            "warning: the run was interrupted after its last step, so it was not validated after that"
        ));
    }
    whole(args, loaded.plan.train.task, &measurement, &written)
}

/// The end of a process whose driver does not come back: process 0 of a run that is kept is to be
/// lost, and not to end the run by its exit code.
fn last_resort(args: &RunArgs) -> fn(&str) {
    match args.kept.is_some() && args.as_process.is_none() {
        true => last_resort::end_kept,
        false => last_resort::end,
    }
}

/// The words of an interrupt that comes as the processes have met.
const BEFORE_A_STEP: &str = "interrupted before the first step was done; nothing was written";

/// Whether this process itself goes on after a loss: else whoever started it does, with the same
/// command.
fn goes_on(args: &RunArgs, setting: &Setting) -> bool {
    args.elastic && matches!(setting, Setting::Starts(_))
}

/// A process that has ranks and does not coordinate: it does what process 0 asks.
fn serve(
    args: &RunArgs,
    (setting, interrupts, launcher): (&Setting, &Interrupts, &Launcher),
    loaded: &Loaded,
) -> Result<(), Failure> {
    let dataset = Arc::new(dataset(args, &loaded.training)?);
    plan_file::check_program(loaded)?;
    // Process 0 has warned for all.
    other_devices::look(args, &loaded.plan.cluster)?;
    if let Some(folder) = args.record.as_ref().filter(|_| !args.records_by_default) {
        // Process 0 has seen that it can be written to, unless this is another host's.
        let made = std::fs::create_dir_all(folder);
        made.map_err(|e| {
            let what = format!("--record {}: {e}", folder.display());
            Failure::new(Exit::BadInput, what)
        })?;
    }
    let chosen = fabric::chosen(args, loaded, setting)?;
    let unasked = Unasked::begin_elsewhere(args, interrupts);
    let gathered = among::gather((setting, interrupts), args, (loaded, &chosen));
    let gathered = gathered.inspect_err(|_| {
        // A signal may have stopped process 0, which is the parent of those that it starts, or others of
        // a launcher.
        match setting {
            Setting::Started(_) => {
                let first = std::os::unix::process::parent_id();
                if children::put_down_of_others(first) {
                    crate::say(format_args!(
                        "note: a signal has stopped process 0 of the run (pid {first}) before all had met: it is killed, as it cannot end by itself"
                    ));
                }
            }
            Setting::Launched(_) => launcher::put_down_stopped(args.time_out),
            _ => {}
        }
    })?;
    let Some(company) = gathered else {
        let what = "a process with a number above 0 is not alone";
        return Err(Failure::new(Exit::Internal, what));
    };
    let processes = Arc::clone(&company.processes);
    let args = &RunArgs {
        record: folder::of_first(args, &processes),
        ..args.clone()
    };
    launcher.knows(&processes, interrupts);
    // Process 0 ends the run, and with it this process.
    let ending = launcher.ending();
    interrupts.leave_to_others(move || {
        if let Some(ending) = ending.get() {
            ending.ask(Reason::Interrupted);
        }
    });
    let spec = &loaded.plan.train;
    let options = SessionOptions {
        watchdog: Duration::from_secs(args.time_out),
        data: Some(Arc::new(batches(
            &dataset,
            spec,
            args.validate_every.is_some(),
        )?)),
        record: records::of_ranks(args, loaded),
        backend: backend(args),
        matmuls: matmuls(args),
        meets: chosen.meets,
        leaves: args
            .checkpoint
            .clone()
            .filter(|_| args.elastic)
            .map(|folder| Leaving {
                folder,
                plan_hash: loaded.hash.clone(),
                model: loaded.plan.graph.clone(),
                kept: usize::from(args.checkpoints_kept),
                without: warn_of_unleft,
            }),
        processes: Some(Arc::clone(&processes)),
        last_resort: Some(last_resort(args)),
        ..SessionOptions::default()
    };
    let so_far = SoFar::begin_elsewhere(args);
    let served = runtime::processes::serve(&loaded.program, spec, options);
    match &served {
        Ok(_) => unasked.into_iter().for_each(Unasked::end),
        Err(e) => {
            let place = (args.record.as_deref(), &*loaded.hash);
            records::without_first(place, (e, &company));
        }
    }
    // Without process 0 nobody else says where it was.
    let served = served.map_err(|e| match &e {
        RuntimeError::Gone {
            process: 0,
            pid,
            is_silent,
            ..
        } => {
            let words = records::told(args, loaded, (&e, Some(&company)));
            // One that a signal has stopped would keep whoever waits for it waiting for good.
            if *is_silent && processes.is_here(0) {
                children::put_down_of_others(*pid);
            }
            (e, words)
        }
        _ => {
            let words = e.to_string();
            (e, words)
        }
    });
    // Some launchers end all when the first has ended: process 0 has its words before that.
    let is_of_others = |e: &RuntimeError| !matches!(e, RuntimeError::Gone { process: 0, .. });
    if let (Setting::Launched(_), Err((e, _))) = (setting, &served)
        && is_of_others(e)
    {
        processes.await_end(0, TO_SPEAK);
        std::thread::sleep(TO_SPEAK / 10);
    }
    // Process 0 names them first, and sees to those itself that it has started.
    let is_of_first = |e: &RuntimeError| !is_of_others(e);
    if let Err((e, _)) = &served
        && (is_of_first(e) || matches!(setting, Setting::Launched(_)))
    {
        children::put_down_stopped(&processes);
    }
    // Process 0 has heard of the interrupt as well, and says what becomes of the run.
    if let (Setting::Started(_), Err((e, _))) = (setting, &served)
        && interrupts.is_asked()
        && is_of_others(e)
    {
        std::process::exit(Exit::Interrupted as i32)
    }
    match served {
        // Process 0 says what becomes of the run.
        Err((_, words)) if args.elastic => {
            crate::say(format_args!(
                "note: process {} ends: {words}",
                setting.index()
            ));
            std::process::exit(Exit::RunFailed as i32)
        }
        Err((e, words)) => Err(records::failure(args, (e, words), so_far.as_ref())),
        // Process 0 says so. Whoever starts processes again has to see it in each of them, but some
        // launchers end all when one ends like that: process 0 has its words first.
        Ok(true) if !setting.end_with_one() => {
            if let Setting::Launched(_) = setting {
                std::thread::sleep(TO_SPEAK);
            }
            std::process::exit(Exit::Interrupted as i32)
        }
        Ok(_) => Ok(()),
    }
}

/// Warns that ranks of this process cannot leave their states for the next process 0.
fn warn_of_unleft(ranks: &[Rank], why: &RuntimeError) {
    let whose = names(ranks.iter().copied());
    crate::say(format_args!(
        "warning: the states of {whose} are not left for the next process 0: {why}"
    ));
}

/// How long the last words of process 0 take.
const TO_SPEAK: Duration = Duration::from_secs(1);

fn backend(args: &RunArgs) -> Backend {
    match args.backend {
        BackendArg::Cpu => Backend::Cpu,
        BackendArg::Cuda => Backend::Cuda,
    }
}

fn matmuls(args: &RunArgs) -> Matmuls {
    Matmuls {
        by: match args.matmuls.unwrap_or_default() {
            MatmulsArg::Plain => Multiplier::Plain,
            MatmulsArg::Library => Multiplier::Library,
            MatmulsArg::Tuned => Multiplier::Tuned,
        },
        tf32: args.tf32,
    }
}

/// Lets this process, and those that it starts, have as many files open as the system allows: a
/// connection to each other process is one, and shells give few as a habit.
fn open_many_files() {
    let limit = getrlimit(Resource::Nofile);
    let all = Rlimit {
        current: limit.maximum,
        ..limit
    };
    // With fewer it may do as well.
    let _ = setrlimit(Resource::Nofile, all);
}

/// Refuses flags of GPUs for a run without.
fn check_backend(args: &RunArgs) -> Result<(), Failure> {
    let given = [
        ("matmuls", "multiply matrices", args.matmuls.is_some()),
        ("tf32", "multiply matrices", args.tf32),
        ("fabric", "meet", args.fabric.is_some()),
        ("on-other-gpus", "may differ", args.on_other_gpus),
    ];
    let given = given.into_iter().find(|(.., is_given)| *is_given);
    match (args.backend, given) {
        (BackendArg::Cpu, Some((flag, does, _))) => {
            let what = format!("--{flag} says how GPUs {does}, and this run has none");
            Err(Failure::new(Exit::Usage, what).help("add --backend cuda, or leave it out"))
        }
        _ => Ok(()),
    }
}

/// The learning rate where none is given.
const DEFAULT_LR: f64 = 3e-4;

/// Refuses flags of training for a plan that trains nothing.
fn check_task(args: &RunArgs, task: Task) -> Result<(), Failure> {
    let given = [
        ("lr", args.lr.is_some()),
        ("warmup", args.warmup > 0),
        ("schedule", args.schedule != DecayArg::Constant),
        ("min-lr", args.min_lr != 0.0),
        ("total-steps", args.total_steps.is_some()),
        ("validate-every", args.validate_every.is_some()),
        ("save", args.save.is_some()),
        ("checkpoint", args.checkpoint.is_some()),
        ("checkpoint-every", args.checkpoint_every.is_some()),
    ];
    match given.into_iter().find(|(_, is_given)| *is_given) {
        Some((flag, _)) if !task.is_training() => {
            let what = format!(
                "--{flag} is of training, and {} is a plan for inference",
                args.plan.display()
            );
            let help = "leave it out: a run gives the loss of each of --steps batches, with the parameters of --weights or --resume";
            Err(Failure::new(Exit::Usage, what).help(help))
        }
        _ => Ok(()),
    }
}

/// Reports all that could not be written, and what could. An elastic run goes on by the same command
/// where its last checkpoint is missing: with that, all its steps are made, and nothing measures
/// them again.
fn not_all(args: &RunArgs, failed: Vec<Failure>, written: &[String], has_state: bool) -> Failure {
    let mut words: Vec<String> = failed.iter().map(Failure::to_string).collect();
    if !written.is_empty() {
        words.push(format!("these were written: {}", written.join(", ")));
    }
    let first = failed.into_iter().next();
    let internal = || Failure::new(Exit::Internal, "nothing failed");
    let failure = first.unwrap_or_else(internal).saying(words.join("\n"));
    // Nothing that was given was bad.
    match failure.exit() {
        Exit::BadInput => {
            let mut help = match args.elastic && !has_state {
                true => elastic::ROOM,
                false => "see that files can be written there, or have the next run write to another place",
            }
            .to_string();
            let mut folders = args.checkpoint.iter();
            if folders.any(|folder| !runtime::checkpoint::numbered(folder).is_empty()) {
                help += "; earlier checkpoints are as they were";
            }
            failure.called("not all was written").help(help)
        }
        _ => failure,
    }
}

/// Reports that a run ended before its last step, what was written, and how it can go on.
fn whole(args: &RunArgs, task: Task, m: &Measurement, written: &[String]) -> Result<(), Failure> {
    let done = m.steps.len() as u64;
    if done == args.steps {
        return Ok(());
    }
    let mut written = written.to_vec();
    let help = args.checkpoint.as_ref().map(|folder| match args.elastic {
        true => "to go on, give the same command again".into(),
        false => format!(
            "to go on, give the same command with --resume {} --steps {}{}",
            folder.display(),
            args.steps - done,
            records::total_steps(args, m.steps.first().map_or(0, |s| s.step))
        ),
    });
    if m.instructions.is_empty() && args.profile > 0 {
        written.push("no instructions were timed, as only the last steps have theirs timed".into());
    }
    let failure = Failure::new(
        Exit::Interrupted,
        format!(
            "interrupted after {done} of {}; {}",
            ir::counted(args.steps, "step"),
            written.join(", ")
        ),
    );
    Err(match help {
        Some(help) => failure.help(help),
        None if task.is_training() => {
            failure.help("with --checkpoint DIR an interrupted run can go on from where it ended")
        }
        None => failure,
    })
}

/// Refuses `--backend cuda` where there is no GPU, the plan has an op without a kernel for it, or
/// its ranks need more memory than is free.
fn has_gpus(args: &RunArgs, loaded: &Loaded, setting: &Setting) -> Result<(), Failure> {
    let n_gpus = cuda::count()?;
    cuda::check(&loaded.program).map_err(|e| {
        Failure::new(Exit::RunFailed, e)
            .help("run the plan with --backend cpu, or another model on the GPU")
    })?;
    if args.matmuls != Some(MatmulsArg::Plain) && !cuda::has_library() {
        crate::say(format_args!(
            "warning: libcublasLt.so is not found, so matrices are multiplied by plain kernels, which are many times slower. It comes with CUDA 13 and in the Python package nvidia-cublas; LD_LIBRARY_PATH can name its folder."
        ));
    }
    let mut ranks = Vec::new();
    for role in &loaded.program.roles {
        let beside = cuda::beside_arena(&loaded.program, role)?;
        let bytes = role.arena_bytes.saturating_add(beside);
        ranks.extend(role.mesh.ranks().map(|rank| (rank, bytes)));
    }
    let counts = setting.counts(ranks.len());
    for (gpu, (ranks, needed)) in of_gpus(ranks, counts, n_gpus).into_iter().enumerate() {
        if ranks == 0 {
            continue;
        }
        let free = cuda::free_memory(gpu)?;
        if needed > free {
            let what = format!(
                "{} of the plan on GPU {gpu} need {}, and it has {} free",
                ir::counted(ranks, "rank"),
                Bytes(needed),
                Bytes(free)
            );
            return Err(Failure::new(Exit::RunFailed, what).help(LESS_MEMORY));
        }
    }
    Ok(())
}

/// How many ranks each GPU of the host of process 0 has, and the bytes that they need: the ranks of
/// a host go round its GPUs by their places on that host. Their processes, `here` of all `of`, are
/// taken for the first ones; a launcher that deals processes out to hosts one by one does not say
/// which there are before they have met.
fn of_gpus(
    mut ranks: Vec<(Rank, u64)>,
    (of, here): (usize, usize),
    n_gpus: usize,
) -> Vec<(u32, u64)> {
    ranks.sort_unstable();
    // As processes share the ranks.
    ranks.truncate(here.min(of) * ranks.len() / of.max(1));
    let mut all = vec![(0u32, 0u64); n_gpus];
    for (place, (_, bytes)) in ranks.into_iter().enumerate() {
        let (n_ranks, needed) = &mut all[place % n_gpus.max(1)];
        *n_ranks += 1;
        *needed = needed.saturating_add(bytes);
    }
    all
}

/// Refuses a `--weights` path that cannot be weights, before their configuration is looked for.
fn check_weights(path: &Path) -> Result<(), Failure> {
    Weights::locate(path).map(|_| ()).map_err(|e| {
        let near = match path.exists() {
            true => String::new(),
            false => format!("{}; ", files::missing_help(path)),
        };
        Failure::new(Exit::BadInput, format!("--weights {e}"))
            .help(format!("{near}{}", crate::failure::WEIGHTS_ARE))
    })
}

/// Finds the newest undamaged checkpoint where `--resume` says, and checks that it is of the plan's
/// model. Warns where the run will differ from one that never stopped; of other data, which people
/// mean more often than not, in the first line.
fn checkpoint(path: &Path, loaded: &Loaded, data: &Dataset) -> Result<Arc<Checkpoint>, Failure> {
    if !path.exists() {
        let what = format!(
            "--resume {}: there is no such folder or file",
            path.display()
        );
        let help = format!("{}; {CHECKPOINTS_ARE}", files::missing_help(path));
        return Err(Failure::new(Exit::BadInput, what).help(help));
    }
    if runtime::checkpoint::dcp::Source::is_at(path) {
        let shown = path.display();
        let what = format!(
            "--resume {shown}: it is a checkpoint of PyTorch, and no training state of Meshwright"
        );
        let help = format!(
            "make one of it with `meshwright checkpoint convert {shown} --plan PLAN -o NEW`, and give --resume NEW"
        );
        return Err(Failure::new(Exit::BadInput, what).help(help));
    }
    let Found {
        checkpoint,
        passed_over,
    } = runtime::checkpoint::find(path)?;
    let shown = checkpoint.path().display();
    let is_training = loaded.plan.train.task.is_training();
    let origin = checkpoint.origin().filter(|_| is_training);
    let trained_on = origin.and_then(|o| Some((o, o.data.as_ref()?)));
    if let (Some((origin, before)), Some(now)) = (trained_on, data.seen())
        && let Some(difference) = before.difference(now)
    {
        let of = |seen: &Seen| {
            let (file, bytes) = (&seen.file, Bytes(seen.bytes));
            // Where it is the share of validation that differs, the file is the same.
            let is_same = before.blake3 == now.blake3 && before.tokenizer == now.tokenizer;
            match is_same {
                false => format!("{file} ({bytes})"),
                true => format!(
                    "{file} ({bytes}), {} tokens of it for training,",
                    seen.train_tokens
                ),
            }
        };
        crate::say(format_args!(
            "warning: {shown} was trained {difference}: {} then, {} now. The run goes on at sample {} of the new order, as if these had been its data from the start.",
            of(before),
            of(now),
            origin.next_sample
        ));
    }
    // The folder that others are added to beside it, whichever of the two was named.
    let own = checkpoint.path();
    let parent = own.parent().filter(|p| !p.as_os_str().is_empty());
    let above = parent.unwrap_or(Path::new("."));
    let is_named = |folder: &Path| {
        let [folder, named] = [folder, path].map(|p| p.canonicalize().ok());
        folder.is_some() && folder == named
    };
    for (folder, only_replace) in [(above, !is_named(above)), (own, false)] {
        if let Some(who) = files::others_who_write(folder, only_replace) {
            crate::say(format_args!(
                "warning: {}: {who}, and so decide what this run goes on from",
                folder.display()
            ));
        }
    }
    for damaged in passed_over {
        crate::say(format_args!("warning: passed over {damaged}"));
    }
    let done = ir::counted(checkpoint.step(), "step");
    crate::say(format_args!("going on from {shown}, after {done}"));
    let task = loaded.plan.train.task;
    checkpoint
        .check_model(&loaded.plan.graph, task)
        .map_err(|e| {
            let field = match &e {
                RuntimeError::OtherModel { difference, .. } => {
                    import::config_field(&loaded.training.graph.name, difference)
                }
                _ => None,
            };
            let failure = Failure::from(e);
            match field {
                Some(field) => {
                    let words = format!("{failure} ({field} of a config.json)");
                    failure.saying(words)
                }
                None => failure,
            }
        })?;
    let train = &loaded.plan.train;
    match checkpoint.origin() {
        None => crate::say(format_args!(
            "warning: {shown} is of an earlier build: without hashes, so that damage is not noticed, and without the model's name. Checkpoints that are written now have both."
        )),
        // Inference goes on with nothing.
        Some(_) if !train.task.is_training() => {}
        Some(o)
            if (o.seed, o.global_batch, o.sequence)
                != (train.seed, train.global_batch, train.sequence) =>
        {
            crate::say(format_args!(
                "warning: {shown} was trained with seed {}, global batch {} and sequence {}, the plan has {}, {} and {}: the data go on in another order.",
                o.seed, o.global_batch, o.sequence, train.seed, train.global_batch, train.sequence
            ))
        }
        Some(_) => {}
    }
    Ok(Arc::new(checkpoint))
}

/// Refuses a configuration, read from `path`, of another model than the plan's.
fn same_model(config: &ModelConfig, path: &Path, loaded: &Loaded) -> Result<(), Failure> {
    let graph = plan_file::forward(&loaded.plan)?;
    let Some(d) = config.difference(&graph, loaded.plan.train.sequence, loaded.plan.train.task)?
    else {
        return Ok(());
    };
    let what = match import::config_field(config.model_type(), &d) {
        Some(field) if field == d.attribute => format!("`{field}`"),
        Some(field) => format!("`{field}` ({d})"),
        None => d.to_string(),
    };
    Err(Failure::new(
        Exit::BadInput,
        format!(
            "{}: {what} is {} here, {} in the plan",
            path.display(),
            d.first,
            d.second
        ),
    )
    .help("weights are read and saved as those of the plan's model: name its config.json with --config, or compile the plan from this one"))
}

/// Lists the files that a run reads, apart from the training state from which it goes on.
fn inputs(args: &RunArgs) -> Vec<PathBuf> {
    let beside = |w: &PathBuf| match w.is_dir() {
        true => vec![w.clone()],
        // An index names the files of its folder.
        false if w.extension().is_some_and(|e| e == "json") => {
            let folder = w.parent().filter(|p| !p.as_os_str().is_empty());
            vec![folder.unwrap_or(Path::new(".")).to_path_buf()]
        }
        false => vec![w.clone(), w.with_file_name("config.json")],
    };
    let named = [Some(&args.plan), Some(&args.data)];
    let named = named
        .into_iter()
        .chain([args.config.as_ref(), args.tokenizer.as_ref()]);
    let mut all: Vec<PathBuf> = named.flatten().cloned().collect();
    all.extend(args.weights.as_ref().map(beside).into_iter().flatten());
    all
}

/// Checks that all outputs can be written, and replace no input and no part of a checkpoint.
fn check_outputs(
    args: &RunArgs,
    resume: Option<&Checkpoint>,
    interrupts: &Interrupts,
) -> Result<(), Failure> {
    let mut read = inputs(args);
    let folders = args.resume.iter().chain(&args.checkpoint);
    let kept = folders.flat_map(|folder| runtime::checkpoint::numbered(folder));
    read.extend(kept.map(|(_, path)| path));
    read.extend(resume.map(|c| c.path().to_path_buf()));
    let read: Vec<&Path> = read.iter().map(PathBuf::as_path).collect();
    let mut written: Vec<&Path> = args.save.as_deref().into_iter().collect();
    outputs::check_regular(&written, &read)?;
    // A run that goes on may have written them: when it began they were not there.
    let may_replace = args.force || args.continued.is_some();
    if let Some(file) = written.iter().find(|file| file.exists() && !may_replace) {
        return Err(outputs::kept(file));
    }
    written.push(&args.output);
    watch::check(args, &read, &written)?;
    outputs::check_no_pipe(&args.output)?;
    for (flag, folder) in [("checkpoint", &args.checkpoint), ("record", &args.record)] {
        let file = |file: &&&Path| {
            folder
                .as_ref()
                .is_some_and(|f| outputs::target(f) == outputs::target(file))
        };
        let is_file = |path: &&Path| path.extension().is_some_and(|e| e == "csv" || e == "jsonl");
        let metrics = args.metrics.iter().map(PathBuf::as_path).filter(is_file);
        let files: Vec<&Path> = written.iter().copied().chain(metrics).collect();
        if let Some(file) = files.iter().find(file) {
            let what = format!(
                "{}: is the folder of --{flag} and a file that the run writes",
                file.display()
            );
            return Err(Failure::new(Exit::Usage, what).help("give each output a name of its own"));
        }
    }
    // The records that nobody asked for end no run.
    let record = args.record.as_ref().filter(|_| !args.records_by_default);
    let folders = args.checkpoint.iter().chain(record);
    folders.into_iter().try_for_each(|folder| {
        match interrupts.makes(folder, || outputs::check_folder(folder)) {
            // After a loss a run goes on as long as it can: there may be room later.
            Err(failure) if args.lost_at_ms.is_some() && folder.is_dir() => {
                crate::say(format_args!("warning: {failure}"));
                Ok(())
            }
            checked => checked,
        }
    })
}

fn schedule(args: &RunArgs) -> Result<LrSchedule, Failure> {
    let decay = match args.schedule {
        DecayArg::Cosine => Decay::Cosine,
        DecayArg::Linear => Decay::Linear,
        DecayArg::Constant => Decay::Constant,
    };
    let total = match (args.total_steps, &args.resume) {
        (Some(total), _) => total,
        (None, Some(_)) if decay != Decay::Constant => {
            return Err(Failure::new(
                Exit::Usage,
                "a resumed run with a decaying learning rate needs --total-steps, the step at which the decay ends",
            ));
        }
        (None, Some(_)) => args.steps.max(args.warmup),
        (None, None) => args.steps,
    };
    let lr = args.lr.unwrap_or(DEFAULT_LR);
    LrSchedule::new(lr, args.min_lr, args.warmup, total, decay).map_err(|e| {
        Failure::new(Exit::Usage, e).help("see --lr, --min-lr, --warmup, --steps and --total-steps")
    })
}

/// Reads the model's configuration, and names its file, where weights are read or written.
fn config(args: &RunArgs) -> Result<Option<(ModelConfig, PathBuf)>, Failure> {
    let beside = |w: &PathBuf| {
        if w.is_dir() {
            w.join("config.json")
        } else {
            w.with_file_name("config.json")
        }
    };
    let path = args
        .config
        .clone()
        .or_else(|| args.weights.as_ref().map(beside));
    match path {
        Some(path) => {
            let config = model::load_config(&path).map_err(|f| match args.config {
                None => f.help("the weights are there, but how they are stored is in the model's config.json, which is looked for beside them: name it with --config"),
                Some(_) => f,
            })?;
            Ok(Some((config, path)))
        }
        None if args.save.is_some() => Err(Failure::new(
            Exit::Usage,
            "--save writes Hugging Face's form, which needs --config, the model's config.json",
        )),
        None => Ok(None),
    }
}

fn dataset(args: &RunArgs, training: &TrainingGraph) -> Result<Dataset, Failure> {
    let options = DataOptions {
        format: None,
        tokenizer: args.tokenizer.clone(),
        vocab: vocabulary(training),
        validation_fraction: args.validation_fraction,
        further: training.further(),
    };
    Ok(Dataset::open(&args.data, &options)?)
}

/// Returns the rows of the smallest table that tokens index, or the fewest classes that labels,
/// which are tokens too, are of; without either any token will do.
fn vocabulary(training: &TrainingGraph) -> u32 {
    let graph = &training.graph;
    let is_tokens = |v: &ir::ValueId| {
        matches!(
            graph.op(graph.value(*v).producer).kind,
            OpKind::Input {
                kind: InputKind::Tokens
            }
        )
    };
    let lookups = graph
        .ops()
        .iter()
        .filter(|op| matches!(op.kind, OpKind::Embedding) && op.inputs.iter().any(is_tokens));
    let tables = lookups.filter_map(|op| op.inputs.iter().find(|v| !is_tokens(v)));
    let rows = tables.filter_map(|v| graph.ty(*v).shape.0.first().map(|d| d.bind(1)));
    let losses = graph.ops().iter();
    let losses = losses.filter(|op| matches!(op.kind, OpKind::CrossEntropy));
    let logits = losses.filter_map(|op| op.inputs.first());
    let classes = logits.filter_map(|v| graph.ty(*v).shape.0.last().map(|d| d.bind(1)));
    let rows = rows.chain(classes);
    u32::try_from(rows.min().unwrap_or(u64::from(u32::MAX))).unwrap_or(u32::MAX)
}

/// Refuses plans whose ranks need more memory than is free, before the system kills the process.
fn fits_machine(loaded: &Loaded, setting: &Setting) -> Result<(), Failure> {
    let ranks: u32 = loaded
        .program
        .roles
        .iter()
        .map(|r| r.mesh.n_devices())
        .sum();
    let (processes, here) = setting.counts(ranks as usize);
    let most = cluster::MAX_RANKS;
    if ranks as usize > most as usize * processes {
        return Err(Failure::new(
            Exit::RunFailed,
            format!("the plan has {ranks} ranks; {most} threads are the limit of one process"),
        )
        .help("compile for fewer devices, as with --cluster cluster.toml --ranks 4, or give --processes"));
    }
    let needed = loaded
        .program
        .roles
        .iter()
        .map(|r| r.arena_bytes.saturating_mul(u64::from(r.mesh.n_devices())))
        .fold(0u64, u64::saturating_add);
    // Other hosts have their share of it.
    let needed = needed / processes.max(1) as u64 * here as u64;
    let Some(free) = super::free_memory().filter(|free| needed > *free) else {
        return Ok(());
    };
    let needs = format!(
        "the plan's {ranks} ranks need {} together{}, this machine has {} free",
        Bytes(needed),
        if here < processes {
            " on this host"
        } else {
            ""
        },
        Bytes(free)
    );
    if cluster::is_of_cpu_ranks(&loaded.plan.cluster) {
        return Err(Failure::new(Exit::RunFailed, needs).help(LESS_MEMORY));
    }
    // That it is for other devices is more than what they would need here.
    let what = format!("{}; {needs}", of_other_devices(loaded));
    Err(Failure::new(Exit::RunFailed, what).help(format!(
        "run the plan where those devices are; or, {}. To execute this very plan on CPU ranks, {LESS_MEMORY}",
        cluster::PLAN_FOR_THIS_MACHINE
    )))
}

/// Says that the plan is for devices that are not here, or are not those that execute it.
fn of_other_devices(loaded: &Loaded) -> String {
    let here = match cuda::count() {
        Ok(n) if n > 0 => "without --backend cuda its ranks are threads of the CPU",
        _ => "this machine has no GPU",
    };
    format!(
        "the plan is for {} x {}, and {here}",
        report::plan::used_devices(&loaded.plan),
        loaded.plan.cluster.device.name
    )
}

/// The advice for ranks that need more memory than there is.
const LESS_MEMORY: &str =
    "compile with a smaller --global-batch, --sequence or model, or pin more sharding";

/// Whether steps wait for periodic checkpoints: where that was asked for, or there is no room for
/// copies of the states.
fn waits(args: &RunArgs, loaded: &Loaded) -> bool {
    if args.checkpoint_mode == CheckpointMode::Wait {
        return true;
    }
    let roles = loaded.program.roles.iter();
    let states = roles.flat_map(|r| r.states.iter().map(|s| (&s.path, r.buffer(s.buffer))));
    // A state that several stages have is written once.
    let states: BTreeMap<&String, u64> = states
        .map(|(path, b)| (path, b.lens.iter().product::<u64>() * b.dtype.bytes()))
        .collect();
    // A GPU's arena is in memory of its own.
    let is_host = args.backend == BackendArg::Cpu;
    let arenas = loaded.program.roles.iter().filter(|_| is_host);
    let arenas = arenas.map(|r| r.arena_bytes.saturating_mul(u64::from(r.mesh.n_devices())));
    let copies: u64 = states.values().sum();
    let needed = arenas.fold(copies, u64::saturating_add);
    match super::free_memory() {
        Some(free) if needed > free => {
            crate::say(format_args!(
                "note: steps wait for checkpoints, as there is no memory for copies of the states ({})",
                Bytes(copies)
            ));
            true
        }
        _ => false,
    }
}

fn train_all(
    args: &RunArgs,
    loaded: &Loaded,
    (dataset, schedule): (&Arc<Dataset>, &LrSchedule),
    (weights, resume): (Option<&Weights>, Option<Arc<Checkpoint>>),
    (processes, chosen): (Option<Arc<Processes>>, &Chosen),
    (so_far, interrupts, keeping): (&mut SoFar, &Interrupts, Option<&Keeping<'_>>),
) -> Result<Result<Trained, RuntimeError>, Failure> {
    let plan = &loaded.plan;
    let stop = interrupts.end_with("ending after this step and writing what there is");
    so_far.is_asked_to_end = Arc::clone(&stop);
    let folder = args.checkpoint.as_deref();
    let look = || keeping.map_or(Ok(()), Keeping::keep);
    let periodic = folder
        .zip(args.checkpoint_every)
        .map(|(folder, every)| Periodic {
            guard: Some(Guard(&look)),
            folder,
            every,
            kept: usize::from(args.checkpoints_kept),
            model: &plan.graph,
            waits: waits(args, loaded),
            rescues: args.elastic,
        });
    let options = TrainOptions {
        program: &loaded.program,
        spec: &plan.train,
        name: &plan.name,
        plan_hash: &loaded.hash,
        dataset,
        schedule,
        steps: args.steps,
        validate_every: args.validate_every,
        validation_batches: args.validation_batches,
        profile_steps: args.profile,
        resume,
        checkpoints: periodic.filter(|_| plan.train.task.is_training()),
        check_replicas: args.check_replicas,
        stop: Some(&stop),
        session: SessionOptions {
            watchdog: Duration::from_secs(args.time_out),
            record: records::of_ranks(args, loaded),
            processes,
            backend: backend(args),
            matmuls: matmuls(args),
            meets: chosen.meets,
            last_resort: Some(last_resort(args)),
            run: args.run.clone(),
            ..SessionOptions::default()
        },
    };
    let drawn = runtime::init::from_graph(&loaded.training, plan.train.seed);
    let initial = |request: StateRequest<'_>| match weights {
        Some(weights) if request.role == StateRole::Parameter => weights
            .param(request.path)
            .map_err(|e| RuntimeError::State {
                path: request.path.into(),
                problem: e.to_string(),
            }),
        _ => drawn(request),
    };
    let rates = Rates::of(args, loaded);
    let described = Described {
        name: &plan.name,
        plan: &loaded.hash,
        step: options.resume.as_ref().map_or(0, |c| c.step()),
        resumes: options.resume.is_some() || args.continued.is_some(),
        validates: args.validate_every.is_some(),
    };
    let unit = report::plan::unit(plan);
    let mut watch = Watch::open(args, &described, unit)?;
    let mut leaps = Leaps::default();
    let mut is_first = true;
    let bar = ProgressBar::new(args.steps);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} ({eta} left)") {
        bar.set_style(style);
    }
    let result = train(&options, initial, |progress| {
        match progress {
        Progress::Step {
            measured,
            peak_bytes,
            skipped,
        } => {
            let seconds = measured.seconds;
            let tokens_per_s = rates.tokens / seconds;
            so_far.done = measured.step + 1;
            if let (true, Some(words)) = (is_first, elastic::held_up(args, measured.step)) {
                bar.suspend(|| crate::say(format_args!("{words}")));
            }
            is_first = false;
            bar.inc(1);
            bar.set_message(format!(
                "loss {:.4}, {} {unit}/s, MFU {}",
                measured.loss,
                report::count(tokens_per_s).trim_end(),
                rates.mfu_words(seconds)
            ));
            watch.step(Figures {
                measured,
                tokens_per_s,
                mfu: rates.mfu(seconds),
                peak_bytes,
                skipped,
            });
            let trains = plan.train.task.is_training();
            if let Some([least, most]) = leaps.see(measured.loss).filter(|_| trains) {
                bar.suspend(|| crate::say(format_args!(
                    "note: the loss leaps to {:.4} at step {}; the steps before had {least:.4} to {most:.4}",
                    measured.loss, measured.step
                )));
            }
        }
        Progress::Validation { step, loss } => {
            let words = format!("step {step}: validation loss {loss:.4}");
            watch.validation(step, loss);
            watch.line(format_args!("{words}"));
            bar.println(words);
        }
        Progress::Checkpoint { step, path } => {
            keeping.iter().for_each(|keeping| keeping.knows(&path));
            let words = format!("step {step}: {} has the training state", path.display());
            watch.line(format_args!("{words}"));
            bar.println(words);
            so_far.written.push((path, step));
        }
        Progress::Rescued(found) => so_far.rescued = Some(found),
        Progress::Straggler { step, finding } => bar.suspend(|| {
            let after = ir::counted(step, "step");
            crate::say(format_args!("note: after {after}, {}", of_finding(finding)))
        }),
        Progress::Held { step, seconds } => bar.suspend(|| {
            crate::say(format_args!(
                "note: the checkpoint after {} waited {seconds:.1} s for the one before it: the disk is slower than --checkpoint-every",
                ir::counted(step, "step")
            ))
        }),
        Progress::NoCheckpoint { step, problem } => bar.suspend(|| {
            crate::say(format_args!(
                "warning: no checkpoint after {}, the run goes on: {problem}",
                ir::counted(step, "step")
            ))
        }),
    }
    });
    bar.finish_and_clear();
    Ok(result)
}

/// Writes the parameters as Hugging Face weights.
fn export(path: &Path, config: &ModelConfig, session: &mut Session) -> Result<(), Failure> {
    let mut states = session.in_order(import::export_order(config));
    let supply = |name: &str| match states.state(name)? {
        Some(tensor) => match tensor.values.iter().find(|v| !v.is_finite()) {
            None => Ok(tensor.values),
            Some(&value) => Err(RuntimeError::NotFinite {
                path: name.into(),
                value,
            }),
        },
        None => Err(RuntimeError::State {
            path: name.into(),
            problem: "the plan has none".into(),
        }),
    };
    outputs::write_with(path, |out| Ok(import::export(path, out, config, supply)?))
}

#[cfg(test)]
mod tests {
    use super::of_gpus;
    use ir::Rank;

    /// Ranks of other hosts counted, each for the GPU of its number among all.
    #[test]
    fn ranks_count_on_the_gpus_of_their_host() {
        // Three stages of two ranks each, the first one the largest, in any order.
        let all = [(4, 1), (5, 1), (0, 100), (1, 100), (2, 10), (3, 10)];
        let of = |counts, n_gpus| of_gpus(all.map(|(r, b)| (Rank(r), b)).into(), counts, n_gpus);
        // On one host.
        assert_eq!(of((1, 1), 2), [(3, 111), (3, 111)]);
        assert_eq!(of((6, 6), 4), [(2, 101), (2, 101), (1, 10), (1, 10)]);
        // Three hosts of two processes; of four GPUs each two have nothing to do.
        assert_eq!(of((6, 2), 4), [(1, 100), (1, 100), (0, 0), (0, 0)]);
        // Two hosts of one process with three ranks.
        assert_eq!(of((2, 1), 2), [(2, 110), (1, 100)]);
        assert_eq!(of((2, 1), 1), [(3, 210)]);
        // Four processes, the first of which has one rank.
        assert_eq!(of((4, 1), 1), [(1, 100)]);
        // A launcher that says more than there is.
        assert_eq!(of((2, 4), 1), [(6, 222)]);
    }
}
