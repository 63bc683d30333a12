//! How a test runs on the emulator: in a process of its own that finds the libraries.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Set in the process that has the emulator.
const INSIDE: &str = "MESHWRIGHT_EMULATED";

/// The folder of the libraries, if they were built: that of the examples of this build.
pub fn libraries() -> Option<PathBuf> {
    let exe = std::env::current_exe().ok()?;
    let folders = exe.ancestors().skip(1).map(|f| f.join("examples"));
    let has_all = |f: &Path| {
        ["cuda", "nvrtc", "cublasLt", "nccl"]
            .map(|l| format!("lib{l}.so"))
            .iter()
            .all(|l| f.join(l).exists())
    };
    folders.take(2).find(|f| has_all(f))
}

/// Runs a test, named with its modules, again with the emulator, and fails if it does. True in that
/// process; false outside, where nothing is left to do.
///
/// Where the libraries were not built it says so and does nothing, but for CI, where it fails.
///
/// # Panics
/// When the test fails.
pub fn is_emulated(test: &str) -> bool {
    is_emulated_with(test, &[])
}

/// The same with variables of the environment: [`is_emulated`] of an emulator that is set up so.
///
/// # Panics
/// When the test fails.
pub fn is_emulated_with(test: &str, variables: &[(&str, &str)]) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let Some(folder) = libraries() else {
        let what = "the emulator is not built: cargo build --release --examples -p emulator";
        assert!(std::env::var_os("CI").is_none(), "{what}");
        eprintln!("skipped {test}: {what}");
        return false;
    };
    let before = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let exe = std::env::current_exe().expect("a test has a file");
    let output = Command::new(exe)
        .args([test, "--exact", "--nocapture", "--include-ignored"])
        .env("LD_LIBRARY_PATH", format!("{}:{before}", folder.display()))
        .env(INSIDE, "1")
        .envs(variables.iter().copied())
        .output()
        .expect("the test runs again");
    let said = String::from_utf8_lossy(&output.stdout);
    let (more, ran) = (
        String::from_utf8_lossy(&output.stderr),
        said.contains("1 passed"),
    );
    assert!(
        output.status.success() && ran,
        "on the emulator:\n{said}\n{more}"
    );
    false
}
