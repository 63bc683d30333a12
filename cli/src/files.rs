//! Files that are read: whole texts with a limit on their size, and names like those that are
//! missing.

use crate::failure::{Exit, Failure};
use runtime::files::open_input;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

/// The largest config, cluster or training file, in bytes.
pub const SMALL: u64 = 16 << 20;
/// The largest plan, run or graph file, in bytes.
pub const LARGE: u64 = 1 << 30;
/// Limit for files that are read to look for one among them: plans of hundreds of layers on
/// thousands of ranks have some MiB.
const MIDDLING: u64 = 64 << 20;

/// Reads the text of the file at `path`; `what` names its kind in messages ("plan", "cluster").
///
/// Fails with the reason and a way out when it is missing, a folder, larger than `limit`
/// bytes, empty, or not UTF-8.
pub fn read_text(path: &Path, what: &str, limit: u64) -> Result<String, Failure> {
    let shown = path.display();
    let bad = |problem: String| Failure::new(Exit::BadInput, format!("{shown}: {problem}"));
    let io = |e: std::io::Error| {
        let failure = bad(format!("cannot read the {what}: {e}"));
        if e.kind() == ErrorKind::NotFound {
            failure.help(missing_help(path))
        } else {
            failure
        }
    };
    let meta = std::fs::metadata(path).map_err(io)?;
    let bad = |problem: String| bad(problem).help(made_by(what));
    if meta.is_dir() {
        return Err(bad(format!("is a folder, expected a {what} file")));
    }
    let mut bytes = Vec::new();
    // Pipes have no length, so the limit applies to what is read.
    open_input(path)
        .map_err(|e| match e.kind() {
            ErrorKind::InvalidInput => bad(format!("{e}, expected a {what} file")),
            _ => io(e),
        })?
        .take(limit + 1)
        .read_to_end(&mut bytes)
        .map_err(io)?;
    if bytes.len() as u64 > limit {
        return Err(bad(format!(
            "is larger than {}, the limit of a {what} file",
            ir::Bytes(limit)
        )));
    }
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Err(bad(format!("is empty, expected a {what}")));
    }
    String::from_utf8(bytes).map_err(|e| {
        bad(format!(
            "is not text: not UTF-8 at byte {}",
            e.utf8_error().valid_up_to()
        ))
    })
}

/// Says where files of a kind come from.
fn made_by(what: &str) -> String {
    let words = match what {
        "plan" => "plans are written by `meshwright compile`",
        "run" => "runs are written by `meshwright run`, as run.json",
        "cluster" => {
            "clusters are written by `meshwright calibrate`; `meshwright presets` lists those that are built in"
        }
        "training file" => "docs/cli.md shows a training file",
        "table of runs" => {
            "expected comma-separated values with a header; docs/published.md lists the columns"
        }
        "job" => jobs::JOBS_ARE,
        "journal" | "continuation" => {
            "elastic runs write it, whole or not at all: remove it to begin anew"
        }
        _ => return crate::model::models_are(),
    };
    words.into()
}

/// Advises on a missing file: a similar name, or the place where we looked.
pub fn missing_help(path: &Path) -> String {
    let folder = path
        .parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    let wanted = path.file_name().unwrap_or_default().to_string_lossy();
    let Ok(entries) = std::fs::read_dir(folder) else {
        return format!("the folder {} does not exist", folder.display());
    };
    let names: Vec<String> = entries
        .flatten()
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect();
    // Names that share only their ending are not alike.
    let stem = |name: &str| {
        name.rsplit_once('.')
            .map_or(name, |(stem, _)| stem)
            .to_string()
    };
    let like = |name: &&str| strsim::jaro_winkler(&stem(&wanted), &stem(name)) > LIKE;
    match closest(&wanted, names.iter().map(String::as_str).filter(like)) {
        Some(name) => format!("did you mean `{}`?", path.with_file_name(name).display()),
        None => "check the path".into(),
    }
}

/// The similarity from which on a name may have been meant (by Jaro and Winkler's measure).
const LIKE: f64 = 0.8;

/// Finds the name most like `wanted`, capitals ignored, if any is like it at all; ties go to the
/// first in order.
pub fn closest<'a>(wanted: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let wanted = wanted.to_lowercase();
    let mut all: Vec<(f64, &str)> = names
        .map(|n| (strsim::jaro_winkler(&wanted, &n.to_lowercase()), n))
        .filter(|(s, _)| *s > LIKE)
        .collect();
    all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
    all.first().map(|(_, n)| *n)
}

/// Computes a fingerprint of a document's bytes: FNV-1a, 64 bits. It tells documents apart and does
/// not protect against forgery.
pub fn fingerprint(bytes: &[u8]) -> String {
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325u64, |h, b| {
        (h ^ u64::from(*b)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("fnv1a64:{hash:016x}")
}

/// The most files of a folder that are looked at for the one with a fingerprint, the files that are
/// passed over not counted.
const LOOKED_AT: usize = 256;

/// The most bytes of them that are read.
const READ: u64 = 1 << 30;

/// The document (`.json`) in `folder` that has this fingerprint; none where it is not seen.
pub fn with_fingerprint(folder: &Path, wanted: &str) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?.flatten();
    let is_document = |path: &PathBuf| {
        let small = |m: std::fs::Metadata| m.is_file() && m.len() <= MIDDLING;
        path.extension().is_some_and(|e| e == "json") && path.metadata().is_ok_and(small)
    };
    let mut paths: Vec<PathBuf> = entries.map(|e| e.path()).filter(is_document).collect();
    paths.sort();
    paths.truncate(LOOKED_AT);
    let mut read = 0;
    let small = paths.into_iter().take_while(|path| {
        read += path.metadata().map_or(0, |m| m.len());
        read <= READ
    });
    let has = |path: &PathBuf| std::fs::read(path).is_ok_and(|b| fingerprint(&b) == wanted);
    small.into_iter().find(has)
}

/// Who else than this user and the administrator can write to a folder, in words; none where nobody
/// can, or it cannot be seen. A group is taken to be of one mind. With `only_replace` it is no
/// matter that others can add to it where they can replace nothing, as in /tmp.
pub fn others_who_write(folder: &Path, only_replace: bool) -> Option<String> {
    use std::os::unix::fs::MetadataExt;
    const OTHERS_WRITE: u32 = 0o002;
    const STICKY: u32 = 0o1000;
    let there = std::fs::metadata(folder).ok()?;
    let keeps = only_replace && there.mode() & STICKY != 0;
    if there.mode() & OTHERS_WRITE != 0 && !keeps {
        return Some("anyone on this machine can write to it".into());
    }
    let own = rustix::process::geteuid().as_raw();
    let owner = there.uid();
    (![own, 0].contains(&owner)).then(|| format!("user {owner}, who owns it, can write to it"))
}
