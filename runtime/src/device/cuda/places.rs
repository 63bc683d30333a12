//! Where libraries of CUDA lie when the system's loader does not know: CUDA's own folders, and the
//! ones in which Python packages bring them (`nvidia/*/lib`).
//!
//! A library that is opened by its path is found by its name afterwards, as the loader compares the
//! names that libraries give themselves.

#![allow(unsafe_code)] // opens libraries

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Steps of a chain of links from `python3` to the interpreter.
const MOST_LINKS: usize = 8;

/// Whether a library can be opened by its name, if need be after a search.
pub(super) fn open(name: &str, is_present: impl Fn() -> bool) -> bool {
    static SOUGHT: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if is_present() {
        return true;
    }
    let mut sought = SOUGHT.lock().unwrap_or_else(|e| e.into_inner());
    if sought.insert(name.into()) {
        for file in folders().iter().flat_map(|f| files(f, name)) {
            // What NVRTC opens by itself lies beside it.
            let beside = file.parent().map(|f| files(f, "nvrtc-builtins"));
            let also = if name == "nvrtc" { beside } else { None };
            let mut opened = false;
            for path in also.iter().flatten().chain([&file]) {
                // SAFETY: opening a library of the system's runs no code but its own.
                if let Ok(library) = unsafe { libloading::Library::new(path) } {
                    // It stays open as long as the process.
                    std::mem::forget(library);
                    opened = true;
                }
            }
            if opened && is_present() {
                return true;
            }
        }
    }
    is_present()
}

/// Files of a library in all folders that may have it, in the order in which they are tried.
pub(crate) fn files_of(name: &str) -> Vec<PathBuf> {
    folders().iter().flat_map(|f| files(f, name)).collect()
}

/// Files of a library in the folders that `LD_LIBRARY_PATH` names. The loader looks for one name in
/// all places before it looks for another, so that a file there under a longer name would come after
/// one of the system's under a shorter name.
pub(crate) fn named_files_of(name: &str) -> Vec<PathBuf> {
    files_in(std::env::var_os("LD_LIBRARY_PATH").as_deref(), name)
}

/// The same of folders as the variable lists them.
fn files_in(named: Option<&OsStr>, name: &str) -> Vec<PathBuf> {
    let folders = named.iter().flat_map(std::env::split_paths);
    let absolute = folders.filter(|folder| folder.is_absolute());
    absolute.flat_map(|f| files(&f, name)).collect()
}

/// Files of a library in a folder, by name and version, newest first.
fn files(folder: &Path, name: &str) -> Vec<PathBuf> {
    let Ok(entries) = folder.read_dir() else {
        return Vec::new();
    };
    let stem = format!("lib{name}.so");
    let is_of = |path: &PathBuf| {
        let file = path.file_name().and_then(|n| n.to_str());
        file.and_then(|n| n.strip_prefix(&stem))
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    let paths = entries.filter_map(|e| Some(e.ok()?.path()));
    let mut found: Vec<PathBuf> = paths.filter(is_of).collect();
    let version = |path: &PathBuf| {
        let file = path.file_name().and_then(|n| n.to_str()).unwrap_or("");
        let numbers = file.strip_prefix(&stem).unwrap_or("").split('.');
        numbers
            .filter_map(|n| n.parse::<u64>().ok())
            .collect::<Vec<_>>()
    };
    // Versions are numbers: 13 comes after 9.
    found.sort_by(|a, b| version(b).cmp(&version(a)).then_with(|| a.cmp(b)));
    found
}

/// Folders that may have libraries of CUDA, those that somebody named first.
fn folders() -> Vec<PathBuf> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from);
    let named = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable);
    let toolkits = named.chain([PathBuf::from("/usr/local/cuda")]);
    let mut found: Vec<PathBuf> = toolkits
        .flat_map(|t| [t.join("lib64"), t.join("targets/x86_64-linux/lib")])
        .collect();
    let prefixes = ["VIRTUAL_ENV", "CONDA_PREFIX"];
    let mut prefixes: Vec<PathBuf> = prefixes.into_iter().filter_map(variable).collect();
    for folder in std::env::var_os("PATH")
        .iter()
        .flat_map(std::env::split_paths)
        // A folder that depends on where one stands is none to load libraries from.
        .filter(|folder| folder.is_absolute())
    {
        prefixes.extend(prefixes_of(folder.join("python3")));
    }
    if let Some(home) = variable("HOME") {
        prefixes.push(home.join(".local"));
    }
    prefixes.push("/usr/local".into());
    prefixes.push("/usr".into());
    let mut seen = BTreeSet::new();
    for prefix in prefixes.into_iter().filter(|p| seen.insert(p.clone())) {
        found.extend(wheels(&prefix));
    }
    found
}

/// The prefixes of a Python: that of its link, and of what it leads to.
fn prefixes_of(mut python: PathBuf) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for _ in 0..MOST_LINKS {
        let Some(folder) = python.parent().filter(|_| python.exists()) else {
            break;
        };
        found.extend(folder.parent().map(Path::to_path_buf));
        match python.read_link() {
            Ok(next) => python = folder.join(next),
            Err(_) => break,
        }
    }
    found
}

/// `nvidia/*/lib` of the packages of a Python.
fn wheels(prefix: &Path) -> Vec<PathBuf> {
    let children = |folder: PathBuf| -> Vec<PathBuf> {
        let entries = folder.read_dir().into_iter().flatten();
        let mut paths: Vec<PathBuf> = entries.filter_map(|e| Some(e.ok()?.path())).collect();
        paths.sort();
        paths
    };
    let is_python = |p: &PathBuf| {
        let name = p.file_name().and_then(|n| n.to_str());
        name.is_some_and(|n| n.starts_with("python3"))
    };
    let pythons = children(prefix.join("lib")).into_iter().filter(is_python);
    pythons
        .flat_map(|p| [p.join("site-packages"), p.join("dist-packages")])
        .flat_map(|packages| children(packages.join("nvidia")))
        .map(|package| package.join("lib"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_that_are_named_come_in_order_and_versions_newest_first() {
        let place = tempfile::tempdir().expect("a folder");
        let file = |name: &str| place.path().join(name);
        for folder in ["a", "b"] {
            std::fs::create_dir(file(folder)).expect("it is made");
        }
        for name in [
            "a/libnccl.so.2",
            "b/libnccl.so",
            "b/libnccl.so.2.31",
            "b/libnccl-net.so",
        ] {
            std::fs::write(file(name), "").expect("it is written");
        }
        let named = std::env::join_paths([file("a"), "relative".into(), file("none"), file("b")]);
        let found = files_in(Some(&named.expect("no colons")), "nccl");
        let expected = ["a/libnccl.so.2", "b/libnccl.so.2.31", "b/libnccl.so"].map(file);
        assert_eq!(found, expected);
        assert!(files_in(None, "nccl").is_empty());
    }

    #[test]
    fn libraries_of_python_packages_are_found() {
        let place = tempfile::tempdir().expect("a folder");
        let prefix = place.path().join("env");
        let lib = prefix.join("lib/python3.12/site-packages/nvidia/cu13/lib");
        std::fs::create_dir_all(&lib).expect("it is made");
        std::fs::create_dir_all(prefix.join("bin")).expect("it is made");
        for file in [
            "libnvrtc.so.13",
            "libnvrtc-builtins.so.13.0",
            "libnvrtc.alt",
        ] {
            std::fs::write(lib.join(file), "").expect("it is written");
        }
        std::fs::write(prefix.join("bin/python3"), "").expect("it is written");
        // A link to it from elsewhere, as in a folder of the PATH.
        let link = place.path().join("python3");
        std::os::unix::fs::symlink(prefix.join("bin/python3"), &link).expect("it is linked");
        let prefixes = prefixes_of(link);
        assert!(prefixes.contains(&prefix), "{prefixes:?}");
        let folders: Vec<PathBuf> = prefixes.iter().flat_map(|p| wheels(p)).collect();
        assert!(folders.contains(&lib), "{folders:?}");
        assert_eq!(files(&lib, "nvrtc"), [lib.join("libnvrtc.so.13")]);
        let beside = files(&lib, "nvrtc-builtins");
        assert_eq!(beside, [lib.join("libnvrtc-builtins.so.13.0")]);
    }
}
