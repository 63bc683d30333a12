//! Runs the binary in a folder of its own, with small inputs at hand.

#![allow(dead_code, clippy::unwrap_used)] // Each test binary uses a part of it; a test may stop where it likes.

use std::io::Read;
use std::ops::{Deref, DerefMut};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A GPT-2 of two layers and a few thousand parameters, one token per byte.
pub const CONFIG: &str = r#"{
  "model_type": "gpt2",
  "vocab_size": 256,
  "n_positions": 16,
  "n_embd": 16,
  "n_layer": 2,
  "n_head": 2,
  "activation_function": "gelu_new",
  "layer_norm_epsilon": 1e-05,
  "initializer_range": 0.02
}
"#;

/// The result of a command.
pub struct Done {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Done {
    /// Fails the test unless the command ended with `code`.
    pub fn expect(self, code: i32) -> Self {
        assert_eq!(
            self.code, code,
            "stdout:\n{}\nstderr:\n{}",
            self.out, self.err
        );
        assert_no_panic(&self);
        self
    }
    /// Fails the test unless the error says all of `words`, wherever its lines are broken.
    pub fn says(self, words: &[&str]) -> Self {
        let said = flat(&self.err);
        for w in words {
            let is_there = self.err.contains(w) || said.contains(&flat(w));
            assert!(is_there, "`{w}` is not in:\n{}", self.err);
        }
        assert_fits(&self.err);
        self
    }
    /// Standard output as JSON.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.out).unwrap_or_else(|e| panic!("{e}:\n{}", self.out))
    }
}

/// A message in one line, without the frame of errors.
pub fn flat(text: &str) -> String {
    let words = text.split_whitespace().filter(|word| *word != "│");
    words.collect::<Vec<_>>().join(" ")
}

/// The words of a process on standard error, [`flat`].
pub fn said(output: &Output) -> String {
    flat(&String::from_utf8_lossy(&output.stderr))
}

/// Lines for people have 100 columns at most, but for words that are longer, as paths are, which stay
/// whole on a line of their own behind the mark of an error.
pub fn assert_fits(text: &str) {
    for line in text.lines() {
        let longest = line.split(' ').map(|w| w.chars().count()).max();
        let n = line.chars().count();
        let most = 100.max(longest.unwrap_or(0) + 10);
        assert!(n <= most, "{n} columns: {line}");
    }
}

/// Whatever was given, our own checks caught it.
pub fn assert_no_panic(done: &Done) {
    // Every help text names the exit code of such an error.
    for word in ["internal error (exit code", "panicked", "RUST_BACKTRACE"] {
        assert!(
            !done.err.contains(word) && !done.out.contains(word),
            "{}",
            done.err
        );
    }
}

/// A folder with a model, text and, once compiled, a plan.
pub struct Place {
    folder: TempDir,
}

impl Place {
    pub fn new() -> Self {
        let place = Place {
            folder: tempfile::tempdir().unwrap(),
        };
        place.write("config.json", CONFIG.as_bytes());
        let text: Vec<u8> = (0..4000u32)
            .map(|i| b"the quick brown fox jumps over the lazy dog. "[(i % 45) as usize])
            .collect();
        place.write("text.txt", &text);
        place
    }
    /// One with `plan.json`, for four ranks in two stages.
    pub fn with_plan() -> Self {
        let place = Place::new();
        place
            .run(&[
                "compile",
                "config.json",
                "--cluster",
                "cpu-default",
                "--global-batch",
                "4",
                "--pin",
                "pipeline=2",
                "--pin",
                "data=2",
            ])
            .expect(0);
        place
    }
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        std::fs::write(self.path(name), bytes).unwrap();
    }
    pub fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap()
    }
    pub fn exists(&self, name: &str) -> bool {
        self.path(name).exists()
    }
    /// Names in the folder, sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(self.folder.path())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
    /// Names in a folder of it, sorted.
    pub fn names_in(&self, folder: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(folder)).unwrap();
        let mut names: Vec<String> = entries
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
    /// Runs `meshwright` here.
    pub fn run(&self, args: &[&str]) -> Done {
        self.run_with(args, &[])
    }
    /// The same with variables of the environment.
    pub fn run_with(&self, args: &[&str], variables: &[(&str, &str)]) -> Done {
        let output = Command::new(env!("CARGO_BIN_EXE_meshwright"))
            .args(args)
            .envs(variables.iter().copied())
            .current_dir(self.folder.path())
            .output()
            .unwrap();
        Done {
            code: output.status.code().unwrap_or(-1),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
    /// Runs and asserts that a bad input is refused with the file's name and leaves no trace.
    pub fn refuses(&self, args: &[&str], codes: &[i32]) -> Done {
        let before = self.names();
        let done = self.run(args);
        assert!(
            codes.contains(&done.code),
            "{args:?}: exit code {}, expected {codes:?}\n{}\n{}",
            done.code,
            done.out,
            done.err
        );
        assert_no_panic(&done);
        assert!(done.err.trim().len() > 10, "{args:?}: no message");
        assert_eq!(self.names(), before, "{args:?}: something was written");
        done
    }
}

/// The folder of the emulated GPU's libraries; none, which is said, where they are not built.
pub fn emulator() -> Option<PathBuf> {
    let folder = emulator::harness::libraries();
    if folder.is_none() {
        let what = "the emulator is not built: cargo build --release --examples -p emulator";
        assert!(std::env::var_os("CI").is_none(), "{what}");
        eprintln!("skipped: {what}");
    }
    folder
}

/// The root of the repository.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .to_path_buf()
}

/// Builds the library that makes files go wrong (`faults.c`), in a place.
pub fn faults(place: &Place) -> PathBuf {
    built(place, "faults.c", "faults.so", &["-shared", "-fPIC"])
}

/// Builds a program or library of a file of C that stands here, in a place, by this name.
pub fn built(place: &Place, source: &str, name: &str, flags: &[&str]) -> PathBuf {
    let made = place.path(name);
    let built = Command::new(std::env::var("CC").unwrap_or("cc".into()))
        .args(flags)
        .args(["-O1", "-o"])
        .arg(&made)
        .arg(repository().join("cli/tests/support").join(source))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "{said}");
    made
}

/// A command that goes on meanwhile, in a group of processes of its own: where its test fails, or
/// does not wait for it, all of the group are killed.
pub struct Running(Option<Child>, u32);

/// Begins commands that end with their tests.
pub trait Begin {
    /// Starts it.
    fn begin(&mut self) -> std::io::Result<Running>;
}

impl Begin for Command {
    fn begin(&mut self) -> std::io::Result<Running> {
        let child = self.process_group(0).spawn()?;
        let group = child.id();
        Ok(Running(Some(child), group))
    }
}

impl Running {
    /// Waits for its end and for that of its words, which may be those of processes that it
    /// started.
    pub fn wait_with_output(mut self) -> std::io::Result<Output> {
        self.0.take().unwrap().wait_with_output()
    }
    /// The same; after this time it is killed, with all that it started.
    pub fn wait_within(self, longest: Duration) -> std::io::Result<Output> {
        let group = self.1;
        let (is_over, over) = channel::<()>();
        std::thread::spawn(move || {
            if over.recv_timeout(longest) == Err(RecvTimeoutError::Timeout) {
                kill_group(group);
            }
        });
        let output = self.wait_with_output();
        drop(is_over);
        output
    }
}

impl Deref for Running {
    type Target = Child;
    fn deref(&self) -> &Child {
        self.0.as_ref().unwrap()
    }
}

impl DerefMut for Running {
    fn deref_mut(&mut self) -> &mut Child {
        self.0.as_mut().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Once it has been waited for in order, its number may be another group's.
        let is_there = self
            .0
            .as_mut()
            .is_some_and(|c| !matches!(c.try_wait(), Ok(Some(_))));
        if is_there || std::thread::panicking() {
            kill_group(self.1);
        }
        let _ = self.0.as_mut().map(Child::wait);
    }
}

/// Kills a process and all that it started.
fn kill_group(of: u32) {
    let group = rustix::process::Pid::from_raw(of.cast_signed()).unwrap();
    let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
}

/// A run of two processes that another one sends signals to.
pub struct Two {
    /// Process 0, which started the other one.
    pub first: Running,
    /// The system's number of process 1.
    pub second: u32,
}

impl Two {
    /// Starts `plan.json` of a place, in two processes, for very many steps; returns when some are done.
    /// Its outputs are `two.json` and `two.csv`.
    pub fn start(place: &Place, more: &[&str]) -> Self {
        let run = ["run", "plan.json", "--data", "text.txt", "--processes=2"];
        let long = ["--steps", "100000000", "-o", "two.json"];
        let metrics = ["--metrics", "two.csv"];
        let first = Command::new("sh")
            // Those that a signal ends with an image of their memory leave none.
            .args(["-c", "ulimit -c 0; exec \"$0\" \"$@\""])
            .arg(env!("CARGO_BIN_EXE_meshwright"))
            .args([&run[..], &long, &metrics, more].concat())
            .current_dir(place.path("."))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .begin()
            .unwrap();
        let began = Instant::now();
        let steps =
            || std::fs::read_to_string(place.path("two.csv")).map_or(0, |t| t.lines().count());
        // A header and some rows.
        while steps() < 8 {
            assert!(began.elapsed() < Duration::from_secs(60), "no step is done");
            std::thread::sleep(Duration::from_millis(10));
        }
        let mut all = processes_of(place, "two.json").into_iter();
        let second = all.find(|id| *id != first.id()).unwrap();
        Two { first, second }
    }
    /// Sends a signal to both processes, or to one.
    pub fn signal(&self, name: &str, to: &[u32]) {
        let ids = to.iter().map(u32::to_string);
        let sent = Command::new("kill").arg(name).args(ids).status();
        assert!(sent.unwrap().success());
    }
    /// Its output, once it has ended by itself and nobody is left of it.
    pub fn ended(mut self, place: &Place) -> Output {
        let mut words = self.first.stdout.take().unwrap();
        let reader = std::thread::spawn(move || {
            let mut all = Vec::new();
            words.read_to_end(&mut all).map(|_| all)
        });
        let mut stderr = Vec::new();
        let mut said_there = self.first.stderr.take().unwrap();
        said_there.read_to_end(&mut stderr).unwrap();
        let output = Output {
            stdout: reader.join().unwrap().unwrap(),
            stderr,
            status: self.first.wait().unwrap(),
        };
        let began = Instant::now();
        while !processes_of(place, "two.json").is_empty() {
            let is_long = began.elapsed() > Duration::from_secs(30);
            assert!(!is_long, "processes are left: {}", said(&output));
            std::thread::sleep(Duration::from_millis(20));
        }
        output
    }
}

/// Processes in a place of the run with this output name, those that have ended apart.
pub fn processes_of(place: &Place, output: &str) -> Vec<u32> {
    let own = place.path(".").canonicalize().unwrap();
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let ids = all.filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    let is_one = |id: &u32| {
        let line = std::fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        let here = std::fs::read_link(format!("/proc/{id}/cwd")).is_ok_and(|cwd| cwd == own);
        here && line.contains("meshwright") && line.split('\0').any(|word| word == output)
    };
    ids.filter(is_one).collect()
}
