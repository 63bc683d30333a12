//! NVRTC's functions, as `libnvrtc.so` exports them: a program becomes a shared object of the host,
//! made by `c++` (or `$CXX`) with the emulator's header before the source.
//!
//! A compiled kernel is kept in `$MESHWRIGHT_EMULATOR_CACHE`, or in a folder of the system's for
//! temporary files, under a hash of source, options and header.

#![allow(unsafe_code)] // pointers of the caller's, who promises what the documentation asks for
#![allow(missing_docs, non_snake_case, clippy::missing_safety_doc)] // NVRTC's own

use crate::driver::IMAGE;
use std::collections::hash_map::DefaultHasher;
use std::ffi::{CStr, c_char, c_int};
use std::fs::DirBuilder;
use std::hash::{Hash, Hasher};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

/// How a call went, an `nvrtcResult`.
pub type Status = c_int;

const SUCCESS: Status = 0;
const INVALID_INPUT: Status = 3;
const INVALID_PROGRAM: Status = 4;
const INVALID_OPTION: Status = 5;
const COMPILATION: Status = 6;

const HEADER: &str = include_str!("../include/emulated.h");

/// A program: `nvrtcProgram`.
pub struct Program {
    source: String,
    image: Vec<u8>,
    log: Vec<u8>,
}

/// Compiles a source to a shared object, and returns its path. The error is the compiler's log.
pub fn compile(source: &str, options: &[String]) -> Result<PathBuf, String> {
    let folder = cache();
    own_folder(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let mut hasher = DefaultHasher::new();
    (HEADER, source, options).hash(&mut hasher);
    let name = format!("{:016x}", hasher.finish());
    let done = folder.join(format!("{name}.so"));
    if done.exists() {
        return Ok(done);
    }
    // Other threads and processes may compile the same; the file appears whole.
    let thread = format!("{:?}", std::thread::current().id());
    let own: String = thread.chars().filter(char::is_ascii_digit).collect();
    let stem = format!("{name}-{}-{own}", std::process::id());
    let (file, made) = (
        folder.join(format!("{stem}.cc")),
        folder.join(format!("{stem}.so")),
    );
    let text = format!("{HEADER}\n#line 1 \"kernel.cu\"\n{source}");
    std::fs::write(&file, text).map_err(|e| format!("{}: {e}", file.display()))?;
    let compiled = run_compiler(&file, &made, options);
    // Without this file nothing is lost.
    let _ = std::fs::remove_file(&file);
    compiled?;
    std::fs::rename(&made, &done).map_err(|e| format!("{}: {e}", done.display()))?;
    Ok(done)
}

/// Makes a folder that nobody else can write to. Fails where there is one that others own or can
/// write to: what lies in it is loaded as code.
fn own_folder(folder: &Path) -> std::io::Result<()> {
    let mut made = DirBuilder::new();
    made.recursive(true).mode(0o700).create(folder)?;
    let found = std::fs::symlink_metadata(folder)?;
    // SAFETY: it asks for a number.
    let user = unsafe { libc::geteuid() };
    let problem = match found.mode() & 0o022 {
        _ if !found.is_dir() => "it is no folder, or a link to one",
        _ if found.uid() != user => "another user owns it",
        0 => return Ok(()),
        _ => "others can write to it (chmod go-w)",
    };
    let what = "what lies there is loaded as code";
    let help = "remove it, or name another folder in MESHWRIGHT_EMULATOR_CACHE";
    Err(std::io::Error::other(format!(
        "{problem}, and {what}: {help}"
    )))
}

fn run_compiler(file: &Path, made: &Path, options: &[String]) -> Result<(), String> {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let mut command = Command::new(&compiler);
    // Kernels read elements by words, as is usual on devices.
    command.args([
        "-std=c++17",
        "-O2",
        "-fno-strict-aliasing",
        "-fPIC",
        "-shared",
        "-w",
        "-o",
    ]);
    command.arg(made).args(options).arg(file);
    let output = command
        .output()
        .map_err(|e| format!("the emulator needs a C++ compiler; {compiler}: {e}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

fn cache() -> PathBuf {
    let named = std::env::var_os("MESHWRIGHT_EMULATOR_CACHE").map(PathBuf::from);
    named.unwrap_or_else(|| {
        // SAFETY: it asks for a number.
        let user = unsafe { libc::geteuid() };
        std::env::temp_dir().join(format!("meshwright-emulator-{user}"))
    })
}

/// An option of NVRTC as the host compiler's; none where that needs none. The error names one
/// that the emulator does not know.
fn option(option: &str) -> Result<Option<String>, String> {
    let named = |name: &str| option.strip_prefix(name);
    if named("-D").is_some() {
        return Ok(Some(option.into()));
    }
    let is_of_device = [
        "--gpu-architecture=",
        "--fmad=",
        "--std=",
        "--diag-suppress=",
    ];
    match is_of_device.iter().any(|name| named(name).is_some()) {
        true => Ok(None),
        false => Err(format!("the emulator's compiler has no option {option}")),
    }
}

/// # Safety
/// `to` is null or can be written.
unsafe fn give<T>(to: *mut T, value: T) -> Status {
    if to.is_null() {
        return INVALID_INPUT;
    }
    // SAFETY: the caller's promise.
    unsafe { to.write(value) };
    SUCCESS
}

/// # Safety
/// `to` has room for the bytes.
unsafe fn copy(bytes: &[u8], to: *mut c_char) -> Status {
    if to.is_null() {
        return INVALID_INPUT;
    }
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.cast(), bytes.len()) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> Status {
    // SAFETY: the caller's pointers.
    unsafe {
        give(major, 13);
        give(minor, 0)
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcCreateProgram(
    to: *mut *mut Program,
    source: *const c_char,
    _name: *const c_char,
    n_headers: c_int,
    _headers: *const *const c_char,
    _names: *const *const c_char,
) -> Status {
    if source.is_null() || n_headers != 0 {
        return INVALID_INPUT;
    }
    let program = Program {
        // SAFETY: the caller's source ends with a zero.
        source: unsafe { CStr::from_ptr(source) }
            .to_string_lossy()
            .into_owned(),
        image: vec![0],
        log: vec![0],
    };
    // SAFETY: the caller's pointer.
    unsafe { give(to, Box::into_raw(Box::new(program))) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcCompileProgram(
    program: *mut Program,
    n: c_int,
    options: *const *const c_char,
) -> Status {
    // SAFETY: the caller's program and options.
    let (program, options) = unsafe {
        let Some(program) = program.as_mut() else {
            return INVALID_PROGRAM;
        };
        let text = |i| {
            CStr::from_ptr(*options.add(i))
                .to_string_lossy()
                .into_owned()
        };
        (program, (0..n as usize).map(text).collect::<Vec<_>>())
    };
    let known: Result<Vec<_>, _> = options.iter().map(|o| option(o)).collect();
    let (status, log) = match known {
        Err(log) => (INVALID_OPTION, log),
        Ok(known) => {
            let known: Vec<String> = known.into_iter().flatten().collect();
            match compile(&program.source, &known) {
                Ok(path) => {
                    program.image = format!("{IMAGE}{}\0", path.display()).into_bytes();
                    (SUCCESS, String::new())
                }
                Err(log) => (COMPILATION, log),
            }
        }
    };
    program.log = log.replace('\0', " ").into_bytes();
    program.log.push(0);
    status
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcDestroyProgram(program: *mut *mut Program) -> Status {
    if program.is_null() {
        return INVALID_PROGRAM;
    }
    // SAFETY: the caller's program, made by `nvrtcCreateProgram`.
    drop(unsafe { Box::from_raw(*program) });
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetCUBINSize(program: *const Program, bytes: *mut usize) -> Status {
    // SAFETY: the caller's program and pointer.
    match unsafe { program.as_ref() } {
        // SAFETY: as above.
        Some(program) => unsafe { give(bytes, program.image.len()) },
        None => INVALID_PROGRAM,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetCUBIN(program: *const Program, to: *mut c_char) -> Status {
    // SAFETY: the caller's program and buffer.
    match unsafe { program.as_ref() } {
        // SAFETY: as above.
        Some(program) => unsafe { copy(&program.image, to) },
        None => INVALID_PROGRAM,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetProgramLogSize(
    program: *const Program,
    bytes: *mut usize,
) -> Status {
    // SAFETY: the caller's program and pointer.
    match unsafe { program.as_ref() } {
        // SAFETY: as above.
        Some(program) => unsafe { give(bytes, program.log.len()) },
        None => INVALID_PROGRAM,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetProgramLog(program: *const Program, to: *mut c_char) -> Status {
    // SAFETY: the caller's program and buffer.
    match unsafe { program.as_ref() } {
        // SAFETY: as above.
        Some(program) => unsafe { copy(&program.log, to) },
        None => INVALID_PROGRAM,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvrtcGetErrorString(status: Status) -> *const c_char {
    let words = match status {
        SUCCESS => c"NVRTC_SUCCESS",
        INVALID_INPUT => c"NVRTC_ERROR_INVALID_INPUT",
        INVALID_PROGRAM => c"NVRTC_ERROR_INVALID_PROGRAM",
        INVALID_OPTION => c"NVRTC_ERROR_INVALID_OPTION",
        COMPILATION => c"NVRTC_ERROR_COMPILATION",
        _ => c"NVRTC_ERROR",
    };
    words.as_ptr()
}
