//! Machine code of kernels, made by NVRTC once for a GPU and kept in a folder of the user's.
//!
//! A file's name is a hash of all that the code depends on: the source, the options, the compiler's
//! version, and the GPU. Before the code stands its own hash. Files only spare time: one that is
//! missing or damaged, or that the driver refuses, is made again, and a folder that cannot be written
//! is no error.

#![allow(unsafe_code)] // calls the compiler, whose program is made and destroyed here

use cudarc::nvrtc::{result, sys};
use std::ffi::CString;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

/// Names another folder for compiled kernels; empty for none.
const FOLDER: &str = "MESHWRIGHT_KERNEL_CACHE";
/// The first bytes of machine code. The emulated compiler's results are not kept here.
const ELF: &[u8] = b"\x7fELF";

/// The folder: `$MESHWRIGHT_KERNEL_CACHE`, else `meshwright/kernels` in the user's cache.
pub(super) fn folder() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os(FOLDER) {
        return (!named.is_empty()).then(|| named.into());
    }
    let absolute = |name| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|p| p.is_absolute())
    };
    let caches = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
    Some(caches?.join("meshwright").join("kernels"))
}

/// The file of a source that is compiled with these options for this GPU.
pub(super) fn file(folder: &Path, gpu: &str, source: &str, options: &[String]) -> PathBuf {
    let mut version = (0, 0);
    // SAFETY: the compiler is there, and both numbers live. Without one they stay zero.
    unsafe { sys::nvrtcVersion(&raw mut version.0, &raw mut version.1) };
    let mut hasher = blake3::Hasher::new();
    let words = [gpu, source, &format!("{}.{}", version.0, version.1)];
    for word in words.into_iter().chain(options.iter().map(String::as_str)) {
        // Lengths keep neighbours apart.
        hasher.update(&(word.len() as u64).to_le_bytes());
        hasher.update(word.as_bytes());
    }
    folder.join(format!("{}.cubin", hasher.finalize().to_hex()))
}

/// The code in a file; none where it is not there, is damaged or is no machine code.
pub(super) fn read(file: &Path) -> Option<Vec<u8>> {
    let bytes = std::fs::read(file).ok()?;
    let (hash, code) = bytes.split_first_chunk::<{ blake3::OUT_LEN }>()?;
    let is_whole = blake3::hash(code) == *hash && code.starts_with(ELF);
    is_whole.then(|| code.to_vec())
}

/// Keeps code for later runs, if it can. The file appears whole.
pub(super) fn keep(file: &Path, code: &[u8]) {
    let Some(folder) = file.parent().filter(|_| code.starts_with(ELF)) else {
        return;
    };
    // Processes that share the folder may have the same number, so the hasher's keys name the part.
    let part = file.with_extension(format!("{:016x}.part", RandomState::new().hash_one(file)));
    let written = || {
        std::fs::create_dir_all(folder)?;
        let mut to = File::create_new(&part)?;
        to.write_all(blake3::hash(code).as_bytes())?;
        to.write_all(code)?;
        std::fs::rename(&part, file)
    };
    if written().is_err() {
        let _ = std::fs::remove_file(&part);
    }
}

/// Compiles a source to machine code. The error is the compiler's log, or its word for the failure.
pub(super) fn compile(source: &str, options: &[String]) -> Result<Vec<u8>, String> {
    let text = CString::new(source).map_err(|e| e.to_string())?;
    let program = result::create_program(&text, None).map_err(|e| format!("{e:?}"))?;
    // A function that the compiler lacks is a panic there.
    let code = catch_unwind(|| {
        // SAFETY: the program was made above.
        let done = unsafe { result::compile_program(program, options) };
        match done {
            Ok(()) => code_of(program).map_err(|e| format!("{e:?}")),
            Err(e) => Err(log_of(program).unwrap_or_else(|| format!("{e:?}"))),
        }
    });
    // SAFETY: made above and used by nobody any more.
    let _ = unsafe { result::destroy_program(program) };
    code.unwrap_or_else(|_| Err("libnvrtc lacks functions of CUDA 13".into()))
}

fn log_of(program: sys::nvrtcProgram) -> Option<String> {
    // SAFETY: the program lives.
    let log = unsafe { result::get_program_log(program) }.ok()?;
    let bytes: Vec<u8> = log
        .iter()
        .map(|c| *c as u8)
        .take_while(|c| *c != 0)
        .collect();
    Some(String::from_utf8_lossy(&bytes).trim().to_string())
}

fn code_of(program: sys::nvrtcProgram) -> Result<Vec<u8>, result::NvrtcError> {
    let mut bytes = 0;
    // SAFETY: the program lives, and so does the number.
    unsafe { sys::nvrtcGetCUBINSize(program, &raw mut bytes).result() }?;
    let mut code = vec![0u8; bytes];
    // SAFETY: there is room for so many bytes.
    unsafe { sys::nvrtcGetCUBIN(program, code.as_mut_ptr().cast()).result() }?;
    Ok(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_found_again_and_nothing_else_is() {
        let folder = tempfile::tempdir().expect("a folder");
        let name = |gpu, text| folder.path().join(format!("{gpu}-{text}.cubin"));
        let (kept, text) = (name("a", "code"), name("a", "text"));
        keep(&kept, b"\x7fELF and more");
        assert_eq!(read(&kept).as_deref(), Some(&b"\x7fELF and more"[..]));
        keep(&text, b"the emulated compiler's");
        assert!(!text.exists());
        // A bit that has turned, anywhere, and a file that was cut.
        let whole = std::fs::read(&kept).expect("the file");
        for at in [0, whole.len() - 1] {
            let mut spoiled = whole.clone();
            spoiled[at] ^= 1;
            std::fs::write(&text, &spoiled).expect("a file");
            assert_eq!(read(&text), None);
        }
        std::fs::write(&text, &whole[..whole.len() - 1]).expect("a file");
        assert_eq!(read(&text), None);
        std::fs::write(&text, b"short").expect("a file");
        assert_eq!(read(&text), None);
        assert_eq!(read(&name("b", "code")), None);
        // A folder that is a file cannot be written, which is no error.
        keep(&kept.join("below.cubin"), b"\x7fELF");
        let left: Vec<_> = std::fs::read_dir(folder.path())
            .expect("a folder")
            .collect();
        assert_eq!(left.len(), 2, "{left:?}");
    }
}
