//! Files that are written: each appears under its name when it is complete, none replaces what the
//! command reads, and what is wrong with a name is said before any work.

use crate::failure::{Exit, Failure};
use runtime::files::{Unfinished, parent, sweep};
use std::io::Write;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// The files that are read in the folder of a model or a checkpoint, by the ends of their names.
const READ_IN_FOLDERS: [&str; 5] = [
    "manifest.json",
    ".safetensors",
    ".safetensors.index.json",
    "config.json",
    "tokenizer.json",
];

/// Fails where a file cannot be written, is one of `inputs` (or a file that is read in one of them,
/// if that is a folder), or is named for two outputs. Must be called before any work is done.
pub fn check(outputs: &[&Path], inputs: &[&Path]) -> Result<(), Failure> {
    for (i, output) in outputs.iter().enumerate() {
        check_writable(output)?;
        let place = target(output);
        let shown = output.display();
        let usage =
            |what: String| Err(Failure::new(Exit::Usage, what).help("name another file to write"));
        if is_special(output) {
            continue;
        }
        if inputs.iter().any(|input| reads(input, &place)) {
            return usage(format!(
                "{shown}: is an input of this command, and would be replaced"
            ));
        }
        if outputs[..i].iter().any(|o| target(o) == place) {
            return usage(format!("{shown}: is named for two outputs"));
        }
    }
    Ok(())
}

/// The failure of a verb that would replace weights unasked.
pub fn kept(file: &Path) -> Failure {
    let what = format!(
        "{}: is there already, and would be replaced",
        file.display()
    );
    Failure::new(Exit::Usage, what).help(
        "name another place, or replace it with --force; verbs replace other things that they wrote before, but weights may be all that is left of a training",
    )
}

/// Checks as [`check`] does, for files that are put together piece by piece and then renamed, which
/// devices and pipes cannot be.
pub fn check_regular(outputs: &[&Path], inputs: &[&Path]) -> Result<(), Failure> {
    check(outputs, inputs)?;
    match outputs.iter().find(|o| is_special(o)) {
        None => Ok(()),
        Some(o) => Err(Failure::new(
            Exit::Usage,
            format!(
                "{}: is a device or a pipe, expected the name of a file to write",
                o.display()
            ),
        )
        .help("name another file to write")),
    }
}

/// Makes a folder where there is none, and fails when nothing can be written into it. Removes what
/// dead writers left in it.
pub fn check_folder(folder: &Path) -> Result<(), Failure> {
    let error = |what: &str, e: std::io::Error| {
        let what = format!("{}: cannot {what}: {e}", folder.display());
        Failure::new(Exit::BadInput, what)
    };
    if folder.exists() && !folder.is_dir() {
        let what = format!("{}: is a file, expected a folder", folder.display());
        return Err(Failure::new(Exit::BadInput, what).help("name a folder, or one to make"));
    }
    std::fs::create_dir_all(folder).map_err(|e| error("make the folder", e))?;
    sweep(folder);
    match Unfinished::folder(folder) {
        Ok(_) => Ok(()),
        Err(e) => Err(error("write into the folder", e)),
    }
}

/// Writes a file whole or not at all: into another file beside its place, which is then renamed. A
/// link stays, and the file that it leads to is replaced; devices and pipes are written to
/// directly.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    write_with(path, |out| {
        out.write_all(bytes)
            .map_err(|e| cannot_write(path, parent(&target(path)), &e))
    })
}

/// Writes as [`write_atomic`] does, by calling `write`.
pub fn write_with(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> Result<(), Failure>,
) -> Result<(), Failure> {
    check_name(path)?;
    let target = target(path);
    let folder = parent(&target);
    let error = |e: std::io::Error| cannot_write(path, folder, &e);
    if is_special(path) {
        let opened = std::fs::OpenOptions::new().write(true).open(path);
        let mut file = opened.map_err(error)?;
        write(&mut file)?;
        return file.flush().map_err(error);
    }
    let mut file = Unfinished::file(folder).map_err(error)?;
    write(&mut file)?;
    file.finish(&target).map_err(error)
}

/// Fails when `path` cannot be written. Removes what dead writers left beside it.
fn check_writable(path: &Path) -> Result<(), Failure> {
    check_name(path)?;
    if is_special(path) {
        return Ok(());
    }
    let target = target(path);
    let folder = parent(&target);
    sweep(folder);
    Unfinished::file(folder)
        .map(|_| ())
        .map_err(|e| cannot_write(path, folder, &e))
}

/// The names of standard output.
const STANDARD_OUTPUT: [&str; 4] = ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"];

/// Refuses names of standard output and of folders, and links that lead nowhere.
fn check_name(path: &Path) -> Result<(), Failure> {
    if let Some(name) = STANDARD_OUTPUT.iter().find(|n| path == Path::new(n)) {
        let what = format!(
            "`{name}` is no file to write: a document appears under its name when it is complete, and standard output is for the report or --json"
        );
        return Err(Failure::new(Exit::Usage, what).help("name a file; for one called `-`, ./-"));
    }
    let ends_as_folder = path.as_os_str().as_encoded_bytes().ends_with(b"/");
    if path.is_dir() || ends_as_folder {
        let what = format!(
            "{}: is a folder, expected the name of a file to write",
            path.display()
        );
        return Err(Failure::new(Exit::BadInput, what));
    }
    if target(path).is_symlink() {
        let what = format!("{}: is a link that leads nowhere", path.display());
        return Err(Failure::new(Exit::BadInput, what).help("name another file to write"));
    }
    Ok(())
}

/// Refuses a pipe as the place of a document that is written at the end of long work: whoever reads
/// it may be gone by then, and the document with it, or may never come.
pub fn check_no_pipe(output: &Path) -> Result<(), Failure> {
    if std::fs::metadata(output).is_ok_and(|m| m.file_type().is_fifo()) {
        let what = format!(
            "{}: is a pipe, expected the name of a file to write",
            output.display()
        );
        return Err(Failure::new(Exit::Usage, what).help("name another file to write"));
    }
    Ok(())
}

/// Says whether a path leads to something that is written to and cannot be replaced: a device, a
/// pipe, a socket.
fn is_special(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|m| !m.is_file() && !m.is_dir())
}

/// The most links that are followed to a file that is not there yet.
const MOST_LINKS: usize = 40;

/// Returns where a path leads, with links followed, also to a file that is not there yet. A name
/// that cannot be followed is returned as it is.
pub fn target(path: &Path) -> PathBuf {
    let mut at = path.to_path_buf();
    for _ in 0..MOST_LINKS {
        if let Ok(there) = at.canonicalize() {
            return there;
        }
        match std::fs::read_link(&at) {
            Ok(next) => at = parent(&at).join(next),
            Err(_) => break,
        }
    }
    let in_folder = |at: &Path| Some(parent(at).canonicalize().ok()?.join(at.file_name()?));
    in_folder(&at).unwrap_or(path.to_path_buf())
}

/// Says whether the command reads the file at `place` because of `input`: of a folder it reads all
/// files of a model or a training state, which may be links.
fn reads(input: &Path, place: &Path) -> bool {
    let is_read = |file: &Path| {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        READ_IN_FOLDERS.iter().any(|end| name.ends_with(end))
    };
    let entries = std::fs::read_dir(input).into_iter().flatten().flatten();
    let mut files = entries.map(|e| e.path()).filter(|file| is_read(file));
    target(input) == place || files.any(|file| target(&file) == place)
}

/// Says why a file cannot be written, and what to do.
fn cannot_write(path: &Path, folder: &Path, e: &std::io::Error) -> Failure {
    let help = match folder.exists() {
        true => "check the folder's permissions and the free space, or name another file".into(),
        false => format!("make the folder {} first", folder.display()),
    };
    let what = format!("{}: cannot write: {e}", path.display());
    Failure::new(Exit::BadInput, what).help(help)
}
