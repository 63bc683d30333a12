//! Streams as queues: what a program's waits allow is what it gives, and a program that lacks a
//! wait is caught, by the referee and by being played.

use ir::program::{Event, Program, Stream};
use ir::training::training_graph;
use tests::{Case, cluster, planned};

/// Orders in which a program without a wait is played before it counts as not caught.
const ORDERS: u64 = 60;

/// A wait that a program can do without only by chance.
#[derive(Clone, Copy, Debug)]
struct Wait {
    role: usize,
    template: usize,
    instruction: usize,
    /// Place among the `deps`, or among the `events`.
    dep: Result<usize, usize>,
}

fn without(program: &Program, wait: Wait) -> Program {
    let mut program = program.clone();
    let template = &mut program.roles[wait.role].templates[wait.template];
    let instruction = &mut template.instructions[wait.instruction];
    match wait.dep {
        Ok(at) => drop(instruction.deps.remove(at)),
        Err(at) => drop(instruction.events.remove(at)),
    }
    program
}

/// All waits, by what waits for what.
fn waits(program: &Program) -> Vec<(String, Wait)> {
    let mut found = Vec::new();
    for (r, role) in program.roles.iter().enumerate() {
        let kind = |s: &Stream| match s {
            Stream::Kernels => "kernel",
            Stream::Communicator { .. } => "collective",
            Stream::World => "world sum",
            Stream::Transfers => "exchange",
            Stream::Copies { .. } => "copy",
        };
        for (t, template) in role.templates.iter().enumerate() {
            for (i, instruction) in template.instructions.iter().enumerate() {
                let own = kind(role.stream(instruction.stream));
                let wait = |dep| Wait {
                    role: r,
                    template: t,
                    instruction: i,
                    dep,
                };
                for (at, d) in instruction.deps.iter().enumerate() {
                    let on = kind(role.stream(template.instructions[d.index()].stream));
                    found.push((format!("{own} behind {on} of its slot"), wait(Ok(at))));
                }
                for (at, event) in instruction.events.iter().enumerate() {
                    let what = match event {
                        Event::Drained(stream) => format!("all {}s", kind(role.stream(*stream))),
                        Event::Done {
                            template,
                            instruction,
                            ..
                        } => {
                            let other = &role.template(*template).instructions[instruction.index()];
                            kind(role.stream(other.stream)).to_string()
                        }
                    };
                    found.push((
                        format!("{own} behind {what} of earlier slots"),
                        wait(Err(at)),
                    ));
                }
            }
        }
    }
    found
}

/// Whether playing a program in some order gives anything but `expected`, by its first step's
/// loss and gradient norm and the parameters after it.
fn is_caught(
    case: &Case,
    program: &Program,
    expected: &(f64, f64, runtime::execute::States),
) -> bool {
    (0..ORDERS).any(|seed| {
        let mut session = case.session_in_orders(program, seed);
        match session.step(&case.batches[0], case.lr, false) {
            Err(_) => true,
            Ok(step) => {
                (step.loss.to_bits(), step.grad_norm.to_bits())
                    != (expected.0.to_bits(), expected.1.to_bits())
                    || session.params().is_ok_and(|params| params != expected.2)
            }
        }
    })
}

/// Some waits of every sort are left out, one at a time: the referee refuses the program, and
/// in some order it gives something else.
#[test]
fn a_wait_that_is_left_out_is_caught_twice() {
    let case = Case::load("llama_tied");
    let training = training_graph(&case.forward, &case.train).expect("the training graph builds");
    let mut caught = std::collections::BTreeMap::<String, (usize, usize)>::new();
    for pins in [
        &["data=2", "tensor=2", "pipeline=1", "zero=3", "microbatch=2"][..],
        &["data=1", "tensor=2", "pipeline=2", "microbatch=1"],
        &[
            "data=2",
            "tensor=1",
            "pipeline=2",
            "microbatch=2",
            "schedule=zb_h1",
        ],
        &[
            "data=2",
            "tensor=1",
            "pipeline=2",
            "microbatch=2",
            "schedule=zb_v",
        ],
    ] {
        let made = planned(&case.forward, &case.train, &cluster(4), pins)
            .unwrap_or_else(|e| panic!("{pins:?}: {e}"));
        let mut session = case.session(&made.program);
        let step = session
            .step(&case.batches[0], case.lr, false)
            .expect("a step runs");
        let params = session.params().expect("the parameters are gathered");
        let expected = (step.loss, step.grad_norm, params);
        for seed in 0..5 {
            let mut ordered = case.session_in_orders(&made.program, seed);
            let again = ordered
                .step(&case.batches[0], case.lr, false)
                .expect("a step runs");
            assert_eq!(
                (again.loss, again.grad_norm),
                (expected.0, expected.1),
                "{pins:?}"
            );
        }
        let mut of_sort = std::collections::BTreeMap::<String, usize>::new();
        for (sort, wait) in waits(&made.program) {
            let spoiled = without(&made.program, wait);
            let n = of_sort.entry(sort.clone()).or_default();
            // Some waits follow from others in this trace; the referee says which do not.
            if *n >= 3 || checker::check_program(&made.plan, &training, &spoiled).is_empty() {
                continue;
            }
            *n += 1;
            let tally = caught.entry(sort).or_default();
            tally.0 += usize::from(is_caught(&case, &spoiled, &expected));
            tally.1 += 1;
        }
    }
    let all: usize = caught.values().map(|c| c.1).sum();
    let found: usize = caught.values().map(|c| c.0).sum();
    assert!(caught.len() >= 6 && all >= 15, "{caught:?}");
    assert!(10 * found >= 9 * all, "{found} of {all}: {caught:?}");
    assert!(caught.values().all(|c| c.0 > 0), "{caught:?}");
}
