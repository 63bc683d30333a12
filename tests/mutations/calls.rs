//! Calls that are none, in a program that is right in everything else.

use checker::check_program;
use ir::op::Binary;
use ir::program::{BufferClass, Call, Event, InstrKind, Instruction, Program, RoleProgram, Stream};
use ir::{BufferId, InstrId, OpKind, Precision, StreamId, TrainSpec};
use planner::Planned;
use tests::{Case, cluster, gpt2, planned};

fn made() -> Planned {
    let train = TrainSpec {
        global_batch: 8,
        sequence: 16,
        precision: Precision::Bf16,
        ..TrainSpec::default()
    };
    let pins = &["data=1", "microbatch=4"];
    planned(&gpt2(2, 128, 16, 128), &train, &cluster(1), pins).unwrap()
}

/// Whether a change of the only role is refused for its calls.
fn is_refused(made: &Planned, change: impl Fn(&mut RoleProgram)) -> bool {
    let mut program = made.program.clone();
    change(&mut program.roles[0]);
    let found = check_program(&made.plan, &made.training, &program);
    found.iter().any(|v| v.rule == "call")
}

/// Templates and places of the instructions that are so.
fn all(program: &Program, is_so: impl Fn(&Instruction) -> bool) -> Vec<(usize, usize)> {
    let templates = program.roles[0].templates.iter().enumerate();
    let places = templates.flat_map(|(t, template)| {
        let instructions = template.instructions.iter().enumerate();
        instructions.map(move |(i, of)| (t, i, of))
    });
    let wanted = places.filter(|(.., of)| is_so(of));
    wanted.map(|(t, i, _)| (t, i)).collect()
}

fn computes(i: &Instruction, is_so: impl Fn(&OpKind) -> bool) -> bool {
    matches!(&i.kind, InstrKind::Compute { kind, .. } if is_so(kind))
}

/// Operands and results.
fn parts(i: &mut Instruction) -> (&mut Vec<BufferId>, &mut Vec<BufferId>) {
    match &mut i.kind {
        InstrKind::Compute {
            inputs, outputs, ..
        } => (inputs, outputs),
        other => panic!("{other:?} computes nothing"),
    }
}

#[test]
fn calls_that_are_none_are_refused() {
    let made = made();
    let right = check_program(&made.plan, &made.training, &made.program);
    assert!(right.is_empty(), "{right:#?}");
    let one_by_one = lowering::without_calls(made.program.clone());
    assert_eq!(check_program(&made.plan, &made.training, &one_by_one), []);

    let chained = all(&made.program, |i| matches!(i.call, Call::Chained { .. }));
    let joined = all(&made.program, |i| i.call == Call::Joined);
    let is_sum = |i: &Instruction| computes(i, |k| matches!(k, OpKind::Accumulate { .. }));
    let is_add = |i: &Instruction| computes(i, |k| *k == OpKind::Binary { f: Binary::Add });
    let of = |&(t, i): &(usize, usize)| &made.program.roles[0].templates[t].instructions[i];
    assert!(chained.iter().any(|at| is_sum(of(at))), "{chained:?}");
    assert!(chained.iter().any(|at| is_add(of(at))), "{chained:?}");
    assert!(joined.len() > 20, "{joined:?}");

    for &(t, i) in chained.iter().chain(&joined) {
        let spoiled = |change: &dyn Fn(&mut Instruction)| {
            is_refused(&made, |role| change(&mut role.templates[t].instructions[i]))
        };
        assert!(spoiled(
            &|of| of.events = vec![Event::Drained(StreamId::new(0))]
        ));
        assert!(spoiled(&|of| of.deps = vec![InstrId::new(i - 1)]));
        // What is kept is not what was kept, and a chain is not what is joined.
        assert!(spoiled(&|of| of.call = match of.call {
            Call::Chained { is_kept } => Call::Chained { is_kept: !is_kept },
            _ => Call::Chained { is_kept: false },
        }));
        if !joined.contains(&(t, i)) {
            assert!(spoiled(&|of| of.call = Call::Joined));
        }
        // The call has another beginning, or none.
        let without_first = |role: &mut RoleProgram| {
            role.templates[t].instructions[i - 1].call = Call::Chained { is_kept: true };
        };
        assert!(is_refused(&made, without_first));
    }
}

#[test]
fn chains_whose_values_others_see_are_refused() {
    let made = made();
    let is_hidden = |i: &Instruction| i.call == Call::Chained { is_kept: false };
    let mut n_seen = 0;
    for &(t, i) in &all(&made.program, is_hidden) {
        let role = &made.program.roles[0];
        let taken = &role.templates[t].instructions[i];
        let value = role.templates[t].instructions[i - 1].writes()[0];
        if taken.writes()[0] == value {
            continue;
        }
        let first = (0..i)
            .rev()
            .find(|&k| role.templates[t].instructions[k].call == Call::Own)
            .unwrap();
        let begins = &role.templates[t].instructions[first];
        // Who else reads what others do not write finds nothing there: `elements_that_are_none`.
        if !computes(begins, |k| matches!(k, OpKind::DotGeneral { .. })) {
            continue;
        }
        n_seen += 1;
        // It lives on.
        let lasting = |role: &mut RoleProgram| {
            role.buffers[value.index()].class = BufferClass::PerMicrobatch { slots: 1 };
        };
        assert!(is_refused(&made, lasting));
        // Another instruction takes it, in this template or elsewhere.
        let others = all(&made.program, |i| {
            computes(i, |k| {
                matches!(k, OpKind::SumSquares | OpKind::Unary { .. })
            })
        });
        let is_other = |(u, j): &&(usize, usize)| *u != t || *j > i || j + 1 < i;
        let &(u, j) = others.iter().find(is_other).unwrap();
        assert!(is_refused(&made, |role| {
            parts(&mut role.templates[u].instructions[j]).0[0] = value;
        }));
        // It is twice an operand, or none.
        if computes(taken, |k| *k == OpKind::Binary { f: Binary::Add }) {
            assert!(is_refused(&made, |role| {
                parts(&mut role.templates[t].instructions[i]).0.fill(value);
            }));
        }
        // The result lies on a factor of the product.
        let factor = role.templates[t].instructions[first].reads()[0];
        let result = taken.writes()[0];
        assert!(is_refused(&made, |role| {
            let at = role.buffers[factor.index()].offset;
            role.buffers[result.index()].offset = at;
        }));
    }
    assert!(n_seen > 5, "{n_seen}");
}

#[test]
fn what_is_ordered_is_not_joined() {
    let made = made();
    let is_one = |i: &Instruction| i.call == Call::Joined;
    let all_joined = all(&made.program, is_one);
    for &(t, i) in &all_joined {
        let role = &made.program.roles[0];
        let before = role.templates[t].instructions[i - 1].writes()[0];
        let own = role.templates[t].instructions[i].writes()[0];
        assert!(is_refused(&made, |role| {
            let at = role.buffers[before.index()].offset;
            role.buffers[own.index()].offset = at;
        }));
        // Another stream, and something else.
        let mut program = made.program.clone();
        let spoiled = &mut program.roles[0];
        let another = StreamId::new(spoiled.streams.len());
        spoiled.templates[t].instructions[i].stream = another;
        spoiled.streams.push(Stream::Transfers);
        assert!(!check_program(&made.plan, &made.training, &program).is_empty());
        let other = all(&made.program, |i| {
            computes(i, |k| matches!(k, OpKind::DotGeneral { .. }))
        });
        let (u, j) = other[0];
        let kind = role.templates[u].instructions[j].kind.clone();
        assert!(is_refused(&made, |role| {
            role.templates[t].instructions[i].kind = kind.clone();
        }));
    }
    assert!(all_joined.len() > 20, "{all_joined:?}");
}

/// SwiGLU and its gradient, and norms with the sums around them.
#[test]
fn elements_that_are_none_are_refused() {
    let case = Case::load("llama_tied");
    let train = TrainSpec {
        precision: Precision::Bf16,
        ..case.train.clone()
    };
    // With tensor parallelism sums stand behind collectives, and norms behind sums.
    let pins: [&[&str]; 2] = [&["data=1"], &["data=1", "tensor=2", "pipeline=1"]];
    let mut all = [0; 3];
    for (pins, n) in pins.into_iter().zip([1, 2]) {
        let made = planned(&case.forward, &train, &cluster(n), pins).unwrap();
        let counts = spoil_elements(&made);
        all.iter_mut().zip(counts).for_each(|(all, n)| *all += n);
    }
    let [n_tried, n_refused, n_hidden] = all;
    assert!(n_hidden > 0);
    assert!(n_refused * 100 >= n_tried * 90, "{n_refused} of {n_tried}");
    println!("{n_refused} of {n_tried} are refused");
}

/// Spoils the chains of elements of a program: how many changes there were, how many of them are
/// refused, and how many values are not written.
fn spoil_elements(made: &Planned) -> [u32; 3] {
    let is_chained = |i: &Instruction| matches!(i.call, Call::Chained { .. });
    let role = &made.program.roles[0];
    let first_of = |t: usize, i: usize| {
        let is_own = |k: &usize| role.templates[t].instructions[*k].call == Call::Own;
        (0..i).rev().find(is_own).unwrap()
    };
    let of_elements: Vec<(usize, usize)> = all(&made.program, is_chained)
        .into_iter()
        .filter(|&(t, i)| {
            let first = &role.templates[t].instructions[first_of(t, i)];
            !computes(first, |k| matches!(k, OpKind::DotGeneral { .. }))
        })
        .collect();
    let of = |&(t, i): &(usize, usize)| &role.templates[t].instructions[i];
    let functions = [Binary::Mul, Binary::SiluGrad].map(|f| OpKind::Binary { f });
    for function in &functions {
        let has = |at: &(usize, usize)| computes(of(at), |k| k == function);
        assert!(of_elements.iter().any(has), "{function:?}");
    }

    // By any rule: what nobody writes is missing where it is read.
    let refused = |change: &dyn Fn(&mut RoleProgram)| {
        let mut program = made.program.clone();
        change(&mut program.roles[0]);
        !check_program(&made.plan, &made.training, &program).is_empty()
    };
    let (mut n_tried, mut n_refused, mut n_hidden) = (0, 0, 0);
    for &(t, i) in &of_elements {
        let first = first_of(t, i);
        let before = &role.templates[t].instructions[i - 1];
        let value = before.writes()[0];
        let mut spoil = |change: &dyn Fn(&mut RoleProgram)| {
            let is_refused = refused(change);
            n_tried += 1;
            n_refused += u32::from(is_refused);
            is_refused
        };
        let instruction = |role: &mut RoleProgram, change: &dyn Fn(&mut Instruction)| {
            change(&mut role.templates[t].instructions[i]);
        };
        assert!(spoil(
            &|role| instruction(role, &|of| of.deps = vec![InstrId::new(i - 1)])
        ));
        assert!(spoil(
            &|role| instruction(role, &|of| of.call = Call::Joined)
        ));
        // A value that others read is not written.
        match of(&(t, i)).call {
            Call::Chained { is_kept: true } => assert!(spoil(&|role| {
                instruction(role, &|of| of.call = Call::Chained { is_kept: false });
            })),
            _ => {
                n_hidden += 1;
                // It is written where it is lost, or where there is no room for it.
                spoil(&|role| {
                    instruction(role, &|of| of.call = Call::Chained { is_kept: true });
                });
            }
        }
        // It ends the chain of something else, or begins it.
        assert!(spoil(&|role| {
            role.templates[t].instructions[first].call = Call::Chained { is_kept: true };
        }));
        // Its result lies on what the call reads, by another name.
        let result = of(&(t, i)).writes()[0];
        let read = role.templates[t].instructions[first].reads();
        if let Some(&other) = read.iter().find(|b| **b != result && **b != value) {
            assert!(spoil(&|role| {
                role.buffers[result.index()].offset = role.buffers[other.index()].offset;
            }));
        }
    }
    [n_tried, n_refused, n_hidden]
}
