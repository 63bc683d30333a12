//! Memory spaces: a program that keeps activations in its hosts' memory from the forward to the
//! backward pass is read by all readers, and gives what it gives without.

use cost_model::{SimulateOptions, StepWork, simulate};
use ir::plan::Plan;
use ir::program::{
    ARENA_ALIGN, Buffer, BufferClass, InstrKind, Instruction, Program, RoleProgram, Space, Stream,
    Template, TemplateKind,
};
use ir::training::{TrainingGraph, training_graph};
use ir::{BufferId, Bytes, Pass, StreamId};
use tests::{Case, assert_checked, cluster, planned};

/// Keeps every activation of a role, which is saved for its backward pass and not exchanged, in
/// host memory: copied there and overwritten behind the forward pass, copied back before the
/// backward pass. Returns how many there are.
fn keep_in_hosts(role: &mut RoleProgram) -> usize {
    let touches = |t: &Template, b: BufferId| {
        let mut all = t.instructions.iter();
        all.any(|i| i.reads().contains(&b) || i.writes().contains(&b))
    };
    let (mut kept, mut end) = (Vec::new(), 0);
    for i in 0..role.buffers.len() {
        let b = BufferId::new(i);
        let own = role.buffer(b);
        let is_saved =
            matches!(own.class, BufferClass::PerMicrobatch { .. }) && own.spec.partial.is_empty();
        let by: Vec<TemplateKind> = role
            .templates
            .iter()
            .filter(|t| touches(t, b))
            .map(|t| t.kind)
            .collect();
        if is_saved && by == [TemplateKind::Forward, TemplateKind::Backward] {
            let there = Buffer {
                name: format!("{}.host", own.name),
                space: Space::Host,
                offset: end,
                ..own.clone()
            };
            end += there.stride() * u64::from(there.slots());
            kept.push((b, BufferId::new(role.buffers.len())));
            role.buffers.push(there);
        }
    }
    role.other_arenas.insert(Space::Host, end);
    let mut stream = |from, to| {
        role.streams.push(Stream::Copies { from, to });
        StreamId::new(role.streams.len() - 1)
    };
    let (out, back) = (
        stream(Space::Device, Space::Host),
        stream(Space::Host, Space::Device),
    );
    let instruction = |kind, stream, pass| Instruction {
        kind,
        stream,
        deps: Vec::new(),
        events: Vec::new(),
        pass,
        layer: None,
        call: ir::program::Call::Own,
    };
    for template in &mut role.templates {
        match template.kind {
            TemplateKind::Forward => {
                for &(input, output) in &kept {
                    let copy = InstrKind::Copy { input, output };
                    let spoil = InstrKind::Fill {
                        value: 7.0,
                        output: input,
                    };
                    let spoil = instruction(spoil, StreamId(0), Pass::F);
                    template.instructions.push(instruction(copy, out, Pass::F));
                    template.instructions.push(spoil);
                }
            }
            TemplateKind::Backward => {
                let copies = kept.iter().map(|&(output, input)| {
                    let copy = InstrKind::Copy { input, output };
                    instruction(copy, back, Pass::BI)
                });
                template.instructions.splice(0..0, copies);
            }
            _ => {}
        }
    }
    lowering::set_waits(role);
    kept.len()
}

/// A plan of four ranks, with its program and one that keeps activations in hosts.
fn made(pins: &[&str]) -> (Case, Plan, Program, Program) {
    let case = Case::load("llama_tied");
    let mut hosts = cluster(4);
    if let Some(storage) = &mut hosts.storage {
        storage.host_memory_bytes = Some(Bytes(4 << 20));
    }
    let made = planned(&case.forward, &case.train, &hosts, pins).expect("there is a plan");
    let mut kept = made.program.clone();
    let n: usize = kept.roles.iter_mut().map(keep_in_hosts).sum();
    assert!(n > 10, "{n} activations are kept");
    (case, made.plan, made.program, kept)
}

fn training(case: &Case) -> TrainingGraph {
    training_graph(&case.forward, &case.train).expect("the training graph builds")
}

#[test]
fn activations_in_hosts_give_the_same_bits() {
    for pins in [
        &["data=2", "tensor=2", "pipeline=1", "microbatch=2"][..],
        &["data=1", "tensor=2", "pipeline=2", "microbatch=1"],
    ] {
        let (case, plan, program, kept) = made(pins);
        assert_checked(&plan, &training(&case), &kept);
        let mut expected = case.session(&program);
        let mut sessions = vec![case.session(&kept)];
        sessions.extend((0..6).map(|seed| case.session_in_orders(&kept, seed)));
        for batch in &case.batches {
            let step = expected.step(batch, case.lr, false).expect("a step runs");
            for session in &mut sessions {
                let again = session.step(batch, case.lr, false).expect("a step runs");
                assert_eq!((again.loss, again.grad_norm), (step.loss, step.grad_norm));
            }
        }
        let params = expected.params().expect("parameters are gathered");
        for session in &mut sessions {
            assert_eq!(session.params().expect("parameters are gathered"), params);
        }
    }
}

#[test]
fn copies_to_hosts_take_their_links_time() {
    let (case, plan, program, kept) = made(&["data=2", "tensor=2", "pipeline=1", "microbatch=2"]);
    let options = SimulateOptions::new(StepWork::of(&training(&case), &case.train));
    let play = |program: &Program, rate: f64| {
        let mut cluster = plan.cluster.clone();
        if let Some(storage) = &mut cluster.storage {
            storage.device_to_host_bytes_per_s = rate;
        }
        let played = simulate(program, &cluster, &options);
        played.expect("it plays").step_time.0
    };
    let (fast, slow) = (1e12, 1e8);
    // Copies wait for what they copy, and the backward pass for them: bytes of one microbatch.
    let role = &kept.roles[0];
    let bytes = role.buffers.iter().filter(|b| b.space == Space::Host);
    let bytes: u64 = bytes.map(|b| b.bytes).sum();
    let more = play(&kept, slow) - play(&kept, fast);
    let n = f64::from(kept.n_microbatches);
    let least = 0.999 * n * bytes as f64 * (1.0 / slow - 1.0 / fast);
    assert!(more > least && more < 2.0 * least, "{more} s, of {least}");
    assert_eq!(play(&program, slow), play(&program, fast));
    // A cluster that does not say how fast it is cannot be predicted.
    let mut silent = plan.cluster.clone();
    silent.storage = None;
    let error = simulate(&kept, &silent, &options);
    let error = error.expect_err("the way is not known").to_string();
    assert!(error.contains("`storage`"), "{error}");
}

#[test]
fn what_is_wrong_with_spaces_is_refused() {
    let (case, plan, _, kept) = made(&["data=2", "tensor=2", "pipeline=1", "microbatch=2"]);
    let training = training(&case);
    let refused = |rule: &str, plan: &Plan, program: &Program| {
        let found = checker::check_program(plan, &training, program);
        let words: Vec<String> = found.iter().map(ToString::to_string).collect();
        let is_named = words.iter().any(|w| w.contains(rule));
        assert!(is_named, "`{rule}` is not in:\n{}", words.join("\n"));
    };
    // Less memory than is used, and none that is known.
    for bytes in [Some(Bytes(4096)), None] {
        let mut small = plan.clone();
        if let Some(storage) = &mut small.cluster.storage {
            storage.host_memory_bytes = bytes;
        }
        refused("of host memory", &small, &kept);
    }
    let changed = |change: &dyn Fn(&mut RoleProgram)| {
        let mut program = kept.clone();
        change(&mut program.roles[0]);
        program
    };
    let in_host = |role: &RoleProgram| -> Vec<usize> {
        let all = role.buffers.iter().enumerate();
        all.filter(|(_, b)| b.space == Space::Host)
            .map(|(i, _)| i)
            .collect()
    };
    refused(
        "arena",
        &plan,
        &changed(&|role| {
            role.other_arenas.clear();
        }),
    );
    // Two buffers at one place of a host, where one of a device and one of a host may be.
    refused(
        "overlap",
        &plan,
        &changed(&|role| {
            let ids = in_host(role);
            role.buffers[ids[1]].offset = role.buffers[ids[0]].offset;
        }),
    );
    // A kernel that works in the host's memory.
    refused(
        "device memory, but for copies",
        &plan,
        &changed(&|role| {
            let saved = role.templates.iter().flat_map(|t| &t.instructions);
            let copied = saved.filter_map(|i| match i.kind {
                InstrKind::Copy { input, output } => Some((input, output)),
                _ => None,
            });
            let crossing =
                |&(a, b): &(BufferId, BufferId)| role.buffer(a).space != role.buffer(b).space;
            let (input, _) = copied.clone().find(crossing).expect("a copy to a host");
            let end = role.arena(Space::Host).next_multiple_of(ARENA_ALIGN);
            let buffer = &mut role.buffers[input.index()];
            (buffer.space, buffer.offset) = (Space::Host, end);
            let all = buffer.stride() * u64::from(buffer.slots());
            role.other_arenas.insert(Space::Host, end + all);
        }),
    );
    // Without the copy back the backward pass reads what was spoiled.
    refused(
        "",
        &plan,
        &changed(&|role| {
            for template in &mut role.templates {
                if template.kind == TemplateKind::Backward {
                    let is_copy = |i: &Instruction| matches!(i.kind, InstrKind::Copy { .. });
                    let first = template.instructions.iter().position(is_copy);
                    template.instructions.remove(first.expect("a copy back"));
                }
            }
            lowering::set_waits(role);
        }),
    );
    // And so does one that does not wait for the copy.
    refused(
        "",
        &plan,
        &changed(&|role| {
            let copies = role.streams.iter().position(|s| {
                matches!(
                    s,
                    Stream::Copies {
                        from: Space::Host,
                        ..
                    }
                )
            });
            let stream = StreamId::new(copies.expect("a stream of copies"));
            for template in &mut role.templates {
                let on: Vec<bool> = template
                    .instructions
                    .iter()
                    .map(|i| i.stream == stream)
                    .collect();
                for i in &mut template.instructions {
                    i.deps.retain(|d| !on[d.index()]);
                }
            }
        }),
    );
}
