//! A fuzzing campaign without coverage feedback: spoiled inputs from a seed, as many as the
//! time allows. Inputs that get deep into a target join the corpus, so that faults add up.

use super::Target;
use super::mutate::mutate;
use ir::testing::Rng;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The findings of a campaign.
#[derive(Clone, Debug, Default)]
pub struct Campaign {
    /// Inputs tried.
    pub execs: u64,
    /// Inputs by the depth they got to.
    pub depths: Vec<u64>,
    /// Longest time that one input took.
    pub slowest: Duration,
    /// The input that took it.
    pub slowest_input: Vec<u8>,
    /// Panics: message and input, one for each place in the code.
    pub panics: Vec<(String, Vec<u8>)>,
}

thread_local! {
    static LAST_PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Most inputs that the corpus grows to.
const MAX_CORPUS: usize = 200;

/// Keeps panics from printing while they are expected; remembers the last one's message.
fn quiet_panics() {
    std::panic::set_hook(Box::new(|info| {
        LAST_PANIC.with(|m| *m.borrow_mut() = info.to_string().replace('\n', " "))
    }));
}

/// Tries inputs for `budget`. The same seed tries the same inputs in the same order.
///
/// Panics when an input of the corpus does not get through the target: then nothing is tested.
pub fn fuzz(target: &Target, seed: u64, budget: Duration) -> Campaign {
    let mut corpus = (target.corpus)();
    for (i, good) in corpus.iter().enumerate() {
        assert_eq!(
            (target.run)(good),
            target.full,
            "{}: input {i} of the corpus is not good",
            target.name
        );
    }
    let n_good = corpus.len();
    let mut found = Campaign {
        depths: vec![0; target.full + 1],
        ..Campaign::default()
    };
    let mut rng = Rng::new(seed ^ 0x66757a7a);
    quiet_panics();
    let start = Instant::now();
    while start.elapsed() < budget {
        let input = mutate(&corpus, target.shape, &mut rng);
        let began = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| (target.run)(&input)));
        let took = began.elapsed();
        found.execs += 1;
        if took > found.slowest {
            (found.slowest, found.slowest_input) = (took, input.clone());
        }
        match result {
            Ok(depth) => {
                found.depths[depth] += 1;
                // Faults that are survived are kept, in a rotating part of the corpus.
                if depth == target.full && rng.one_in(4) {
                    match corpus.len() < n_good + MAX_CORPUS {
                        true => corpus.push(input),
                        false => {
                            let i = n_good + rng.below(MAX_CORPUS as u64) as usize;
                            corpus[i] = input;
                        }
                    }
                }
            }
            Err(_) => {
                let message = LAST_PANIC.with(|m| m.borrow().clone());
                let place = |m: &str| m.split(": ").next().unwrap_or_default().to_string();
                if !found
                    .panics
                    .iter()
                    .any(|(known, _)| place(known) == place(&message))
                {
                    found.panics.push((message, input));
                }
            }
        }
    }
    let _ = std::panic::take_hook();
    found
}

/// Writes an input to a file, to be looked at and to be tried again with `FUZZ_INPUT`.
pub fn save(name: &str, input: &[u8]) -> PathBuf {
    let hash = input.iter().fold(0xcbf2_9ce4_8422_2325u64, |h, b| {
        (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3)
    });
    let folder = std::env::temp_dir().join("meshwright-fuzz");
    let path = folder.join(format!("{name}-{hash:016x}"));
    let written = std::fs::create_dir_all(&folder).and_then(|()| std::fs::write(&path, input));
    written.unwrap_or_else(|e| eprintln!("{}: {e}", path.display()));
    path
}
