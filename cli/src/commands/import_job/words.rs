//! The report on an imported job: the verdict first, then what it is, where its time goes, what to
//! change, and what was made of the file.

use super::{BEST, Better, Imported, Priced};
use crate::args::ImportJobArgs;
use crate::failure::Failure;
use crate::report::software::{knob_table, knobs};
use crate::report::{self, count, out, percent, table};
use crate::software::whose_plan;
use ir::plan::Plan;
use ir::program::Space;
use ir::{Seconds, counted};
use jobs::{Note, NoteKind, Offload};
use serde_json::{Value, json};

/// The most notes of a kind that are printed without --verbose.
const LISTED: usize = 12;

/// Prints all in words.
pub fn print(args: &ImportJobArgs, imported: &Imported) -> Result<(), Failure> {
    out(&verdict(imported))?;
    for (words, _) in recalibration(imported) {
        out(&words)?;
    }
    let plan = &imported.job.loaded.plan;
    report::out("\nThe job, in its software's words")?;
    out(&what(imported))?;
    let training = &imported.job.loaded.training;
    let own = export::summary(plan, training).ok();
    if let Some(knobs) = own.and_then(|summary| knobs(plan, &summary)) {
        report::out(&knob_table(&knobs))?;
    }
    report::out("\nWhere the step's time goes, as predicted")?;
    report::out(&imported.accounted.step())?;
    report::out("\nWhat the fullest process holds")?;
    report::out(&memory(imported))?;
    if let Some(found) = &imported.found {
        match (&found.by_flags, imported.change()) {
            (Ok(_), Some(better)) => {
                report::out("\nWhat to change, by flags alone")?;
                changed(better)?;
                if let Some(saves) = found.overlap_saves {
                    out(&format!(
                        "With the job's degrees, running communication beside computing (its overlap flags) would save {} alone.",
                        percent(saves)
                    ))?;
                }
            }
            (Err(e), _) => out(&format!("\nThe search found no plan that fits: {e}."))?,
            _ => {}
        }
        if let Some((better, what)) = &found.with_code {
            report::out("\nWhat would need other code")?;
            out(&format!(
                "Beside flags, {what}: the step would take {}, {} less than the job's.",
                Seconds(better.plan.step_s() * imported.factor()),
                percent(better.saves)
            ))?;
            changed(better)?;
        }
    }
    if let (None, Some(worth)) = (&imported.found, imported.worth(0.0)) {
        let cost = worth.thousand_steps;
        out(&format!("A thousand steps of the job cost {cost:.2}."))?;
    }
    notes(args, imported)?;
    for (path, whose) in [
        (&args.output, "The job's plan"),
        (&args.best, "The plan that was found"),
    ] {
        if let Some(path) = path {
            out(&format!(
                "{whose} is written to {}, with the prediction {}.",
                path.display(),
                match imported.measured {
                    Some(_) => "before it was recalibrated",
                    None => "that is shown here",
                }
            ))?;
        }
    }
    Ok(())
}

/// Bytes that the fullest process holds, part by part.
fn memory(imported: &Imported) -> String {
    let names = [
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "buffers",
        "allocator",
        "driver",
    ];
    let job = &imported.job;
    let share = |bytes: ir::Bytes| percent(bytes.0 as f64 / job.device.0.max(1) as f64);
    let place = |space: Space, bytes| match space {
        Space::Device => share(bytes),
        Space::Host => "on the host".to_string(),
        Space::File => "on disks".to_string(),
    };
    let parts = names
        .into_iter()
        .zip(job.memory.parts().into_iter().zip(job.spaces()));
    let rows =
        parts.map(|(name, (b, space))| vec![name.to_string(), b.to_string(), place(space, b)]);
    let mut rows: Vec<Vec<String>> = rows.collect();
    let on_device = job.on_device();
    let all = match job.offload == Offload::default() {
        true => "all",
        false => "all on the device",
    };
    rows.push(vec![all.into(), on_device.to_string(), share(on_device)]);
    table(&["", "bytes", "of the device"], rows, 1)
}

/// The verdict in a few sentences, with what of the file it does not count.
fn verdict(imported: &Imported) -> String {
    let of = |kind: NoteKind| {
        let own = imported
            .reading
            .notes
            .iter()
            .filter(move |n| n.kind == kind);
        own.count() as u64
    };
    let (open, unknown) = (of(NoteKind::NotModelled), of(NoteKind::Unknown));
    let hides = |n: &&Note| n.kind == NoteKind::NotModelled && n.name.ends_with("overlap_comm");
    let upper = match imported.reading.notes.iter().find(hides) {
        Some(_) if imported.change().is_some() => {
            " The figures are of runs that wait for communication, which this job hides in part: \
             its step is shorter, and the gain at most so large."
        }
        _ => "",
    };
    let uncounted = match (open, unknown) {
        (0, 0) => String::new(),
        (n, 0) => format!(" Not counted: {}, named below.", counted(n, "setting")),
        (0, _) => format!(" Not known, and left out: {}.", unknown_names(imported)),
        (n, _) => format!(
            " Not counted: {}, named below. Not known, and left out: {}.",
            counted(n, "setting"),
            unknown_names(imported)
        ),
    };
    figures_and_change(imported) + upper + &uncounted
}

/// The first settings that are not known, which may be slips.
fn unknown_names(imported: &Imported) -> String {
    let notes = imported.reading.notes.iter();
    let own = notes.filter(|n| n.kind == NoteKind::Unknown);
    let name = |n: &Note| match n.meant() {
        Some(meant) => format!("`{}` (did you mean {meant}?)", n.name),
        None => format!("`{}`", n.name),
    };
    let names: Vec<String> = own.map(name).collect();
    match names.len() {
        0..=3 => names.join(", "),
        n => format!("{} and {} more", names[..3].join(", "), n - 3),
    }
}

/// The prediction, the measurement, and what the search changes.
fn figures_and_change(imported: &Imported) -> String {
    let job = &imported.job;
    let plan = &job.loaded.plan;
    let p = &plan.predicted;
    let whose = whose_plan(plan);
    let fits = fits(job);
    let mut w = format!(
        "{whose}the job should take {} a step on {} ({} tokens/s, MFU {}), and {fits}.",
        p.step_time_s,
        counted(plan.cluster.n_devices(), "device"),
        count(p.tokens_per_s),
        percent(p.mfu)
    );
    if let Some(m) = &imported.measured {
        w += &format!(
            " Measured was {} a step, {} (MFU {}).",
            Seconds(m.step_s),
            off(m.factor),
            percent(p.mfu / m.factor)
        );
        if !job.fits() {
            w += " It did run, so it holds less than predicted.";
        }
    }
    let Some(found) = &imported.found else {
        return w;
    };
    w += " ";
    w += &match (&found.by_flags, imported.change()) {
        (Err(_), _) if job.offload != Offload::default() => {
            "The search, which offloads nothing, finds no plan of this software that fits."
                .to_string()
        }
        (Err(_), _) => "The search finds no plan of this software that fits.".to_string(),
        (Ok(better), Some(_)) => {
            let step = Seconds(better.plan.step_s() * imported.factor());
            let n = better.changes.flags.len();
            let by = format!("by changing {} alone", counted(n as u64, "flag"));
            let gain = match better.saves {
                s if s >= 0.0 => format!("{} less", percent(s)),
                s => format!("{} more, but it fits", percent(-s)),
            };
            let money = imported.worth(better.saves).map_or(String::new(), |worth| {
                format!(
                    " That saves {:.2} of {:.2} for every thousand steps.",
                    worth.saved, worth.thousand_steps
                )
            });
            let again = match imported.measured {
                Some(_) => ", both measured by the same factor",
                None => "",
            };
            format!("The search finds a plan that takes {step}, {gain}, {by}{again}.{money}")
        }
        (Ok(better), None) => format!(
            "The job is within 1% of the best that the search finds for this software, which takes {}: there is nothing to change.",
            Seconds(better.plan.step_s() * imported.factor())
        ),
    };
    w
}

/// Whether a job fits, with the bytes: where its tensors rest elsewhere, on the host too.
fn fits(job: &Priced) -> String {
    let (held, device) = (job.on_device(), job.device);
    if job.offload == Offload::default() {
        return match job.fits() {
            true => format!("it fits, with {held} of {device} on the fullest device"),
            false => format!("it does not fit: the fullest process would hold {held} of {device}"),
        };
    }
    let (processes, has) = job.host;
    let elsewhere = [Space::Host, Space::File].map(|space| job.held_in(space));
    let on_host = match (elsewhere[0].0, has) {
        (0, _) => String::new(),
        (_, Some(has)) => format!(" and {} of {has} in the memory of a host", job.on_host()),
        (_, None) => format!(
            " and {} in the memory of a host ({} of each of {}), which the cluster does not state (storage.host_memory_bytes)",
            job.on_host(),
            elsewhere[0],
            counted(processes, "process")
        ),
    };
    let on_disks = match elsewhere[1].0 {
        0 => String::new(),
        _ => format!(" and {} of a process on disks", elsewhere[1]),
    };
    let held = format!("{held} of {device} on the fullest device{on_host}{on_disks}");
    match (job.fits_device(), job.fits_host()) {
        (true, true) => format!("with what it offloads it fits, with {held}"),
        (false, _) => {
            format!("it does not fit, although it offloads: the fullest process would hold {held}")
        }
        (true, false) => {
            format!("it does not fit, for it offloads more than a host has: it would hold {held}")
        }
    }
}

/// How far a measured step is from the predicted one.
fn off(factor: f64) -> String {
    match factor - 1.0 {
        f if f.abs() < 5e-4 => "as predicted".to_string(),
        f if f > 0.0 => format!("{} longer than predicted", percent(f)),
        f => format!("{} shorter than predicted", percent(-f)),
    }
}

/// Says how the prediction was recalibrated, and what can be said of why.
fn recalibration(imported: &Imported) -> Vec<(String, f64)> {
    let Some(m) = &imported.measured else {
        return Vec::new();
    };
    let mut words = format!(
        "Recalibrated: the prediction is multiplied by {:.3}, the measured step over the predicted one ({}), and so are the steps of plans that are found.",
        m.factor, m.from
    );
    words += " One step time gives one factor: it does not say which part of the step is at fault, so the factor applies to all of it.";
    let changes = imported.change().is_some();
    for cause in &m.causes {
        words += &format!(
            " If {} alone were at fault, they would be {} as the cluster says",
            cause.what,
            match cause.slower {
                f if f >= 1.0 => format!("{f:.2} times as slow"),
                f => format!("{:.2} times as fast", 1.0 / f),
            }
        );
        words += &match cause.saves.filter(|_| changes) {
            Some(saves) if saves < 0.0 => {
                format!(", and the new plan would take {} longer.", percent(-saves))
            }
            Some(saves) => format!(", and the new plan would save {}.", percent(saves)),
            None => ".".to_string(),
        };
    }
    for what in ["kernels", "links"] {
        let far = (m.factor - 1.0).abs() > BEST;
        if far && !m.causes.iter().any(|c| c.what == what) {
            words += &format!(" The {what} alone cannot be at fault.");
        }
    }
    let mut all = vec![(words, m.factor)];
    if let Some([measured, predicted]) = m.memory {
        let factor = measured.0 as f64 / (predicted.0 as f64).max(1.0);
        all.push((
            format!(
                "Memory: measured were {measured} on the fullest rank that said so, and {predicted} are predicted of the same kind ({}), {}.",
                m.memory_words,
                match factor - 1.0 {
                    f if f >= 0.0 => format!("{} less", percent(1.0 - 1.0 / factor.max(1e-9))),
                    f => format!("{} more", percent(-f / factor.max(1e-9))),
                }
            ),
            factor,
        ));
        if factor > 1.1 {
            let words = "The search goes by predicted memory: a plan that nearly fills a device may not fit.";
            all.push((words.into(), factor));
        }
    }
    all
}

/// A description of the job.
fn what(imported: &Imported) -> String {
    let r = &imported.reading;
    let plan = &imported.job.loaded.plan;
    let from = r.files.join(", ");
    let version = plan
        .made_for
        .as_ref()
        .and_then(published::software::version);
    let rests = version.map_or(String::new(), |v| {
        format!(" Figures rest on {}.", v.rests_on)
    });
    let summary = export::summary(plan, &imported.job.loaded.training).ok();
    let shape = summary.and_then(|s| s.model).map_or(String::new(), |m| {
        let blocks = counted(m.layers, "block");
        format!(
            " of {blocks}, {} wide, a vocabulary of {}",
            m.hidden, m.vocab
        )
    });
    format!(
        "It is {} ({from}): {}{shape}, on {} of {}, sequences of {} tokens, {}.{rests}",
        r.form,
        plan.name,
        counted(plan.cluster.n_devices(), "device"),
        plan.cluster.name,
        plan.train.sequence,
        plan.train.precision.compute().name(),
    )
}

/// Prints what changes.
fn changed(better: &Better) -> Result<(), Failure> {
    let cell = |value: &Option<String>, none: &str| value.clone().unwrap_or_else(|| none.into());
    let rows = better.changes.flags.iter().map(|c| {
        vec![
            c.name.clone(),
            cell(&c.old, "(absent)"),
            cell(&c.new, "(take it out)"),
        ]
    });
    let rows: Vec<Vec<String>> = rows.collect();
    match rows.is_empty() {
        true => report::out("No flag differs: the plans differ in what flags do not say.")?,
        false => report::out(&table(&["flag", "now", "new"], rows, 3))?,
    }
    let held = better.plan.memory.total();
    out(&format!(
        "The new plan holds {held} of {} on its fullest device.",
        better.plan.device
    ))?;
    for words in &better.changes.not_in_flags {
        out(&format!("Flags do not say: {words}."))?;
    }
    Ok(())
}

/// Prints what was made of the file.
fn notes(args: &ImportJobArgs, imported: &Imported) -> Result<(), Failure> {
    let of = |kind: NoteKind| {
        let own = imported
            .reading
            .notes
            .iter()
            .filter(move |n| n.kind == kind);
        own.collect::<Vec<&Note>>()
    };
    let kinds = [
        (
            NoteKind::Assumed,
            "Assumed, because the files do not say it",
        ),
        (
            NoteKind::NotModelled,
            "Not modelled, though it changes time or memory",
        ),
        (
            NoteKind::Unknown,
            "Not known here, so nothing is said of what they do",
        ),
    ];
    for (kind, title) in kinds {
        let mut lines: Vec<String> = of(kind).iter().map(|n| line(n)).collect();
        if kind == NoteKind::Assumed {
            lines.extend(imported.request.remarks.iter().map(|r| format!(" {r}.")));
        }
        if lines.is_empty() {
            continue;
        }
        report::out(&format!("\n{title}"))?;
        let shown = if args.verbose { lines.len() } else { LISTED };
        for words in lines.iter().take(shown) {
            out(words)?;
        }
        if let Some(more) = lines.len().checked_sub(shown).filter(|n| *n > 0) {
            let names: Vec<&str> = of(kind)
                .iter()
                .skip(shown)
                .map(|n| n.name.as_str())
                .collect();
            out(&format!(" And {more} more: {}.", names.join(", ")))?;
        }
    }
    let none = of(NoteKind::NoEffect);
    if !none.is_empty() {
        let names: Vec<&str> = none.iter().map(|n| n.name.as_str()).collect();
        let names = match args.verbose {
            true => format!(": {}", names.join(", ")),
            false => " (--verbose names them)".into(),
        };
        out(&format!(
            "\nOf no effect on time or memory of a step: {}{names}.",
            counted(none.len() as u64, "argument")
        ))?;
    }
    Ok(())
}

/// A note in a line.
fn line(note: &Note) -> String {
    let value = note
        .value
        .as_ref()
        .map_or(String::new(), |v| format!(" {v}"));
    let place = note.line.map_or(String::new(), |l| format!(" (line {l})"));
    match note.kind {
        // The heading says it of those that have a name; some may have been meant for others.
        NoteKind::Unknown if note.line.is_some() => {
            let meant = note
                .meant()
                .map_or(String::new(), |meant| format!(": did you mean {meant}?"));
            format!(" {}{value}{place}{meant}", note.name)
        }
        _ => {
            let stop = if note.words.ends_with('?') { "" } else { "." };
            format!(" {}{value}{place}: {}{stop}", note.name, note.words)
        }
    }
}

/// A plan's figures in JSON.
fn figures(plan: &Plan) -> Value {
    json!({
        "step_time_s": plan.predicted.step_time_s,
        "tokens_per_s": plan.predicted.tokens_per_s,
        "mfu": plan.predicted.mfu,
    })
}

/// The result of the search, in JSON.
fn better_json(imported: &Imported, better: &Better) -> Value {
    let summary = export::summary(&better.plan.loaded.plan, &better.plan.loaded.training).ok();
    json!({
        "predicted": figures(&better.plan.loaded.plan),
        "recalibrated_step_time_s": better.plan.step_s() * imported.factor(),
        "degrees": summary.and_then(|s| s.degrees),
        "peak_bytes": better.plan.memory.total(),
        "saves": better.saves,
        "flags": better.changes.flags,
        "not_in_flags": better.changes.not_in_flags,
        "worth": imported.worth(better.saves),
    })
}

/// Prints all as JSON.
pub fn json(args: &ImportJobArgs, imported: &Imported) -> Result<(), Failure> {
    let job = &imported.job;
    let plan = &job.loaded.plan;
    let summary = export::summary(plan, &job.loaded.training).ok();
    let found = imported.found.as_ref().map(|found| {
        json!({
            "by_flags": found.by_flags.as_ref().ok().map(|b| better_json(imported, b)),
            "overlap_saves": found.overlap_saves,
            "none_fits": found.by_flags.as_ref().err(),
            "with_code": found.with_code.as_ref().map(|(b, what)| json!({
                "needs": what,
                "plan": better_json(imported, b),
            })),
            "is_best": found.by_flags.is_ok() && imported.change().is_none(),
        })
    });
    report::print_json(&json!({
        "verdict": verdict(imported),
        "form": imported.reading.form,
        "files": imported.reading.files,
        "for": plan.made_for,
        "name": plan.name,
        "devices": plan.cluster.n_devices(),
        "job": imported.reading.job,
        "degrees": summary.and_then(|s| s.degrees),
        "predicted": figures(plan),
        "memory": {
            "peak_bytes": job.on_device(),
            "device_bytes": job.device,
            "host_bytes": job.on_host(),
            "file_bytes": job.held_in(Space::File),
            "host_memory_bytes": job.host.1,
            "fits": job.fits(),
        },
        "account": imported.accounted,
        "measured": imported.measured,
        "search": found,
        "settings": imported.reading.settings,
        "notes": imported.reading.notes,
        "remarks": imported.request.remarks,
        "plan": args.output,
        "best": args.best,
    }))
}
