//! Results that are written over an operand that nothing reads afterwards: the memory that this
//! saves, and every near miss, which the checker refuses.

use checker::{Violation, check_program};
use ir::op::Binary;
use ir::program::{Call, InstrKind, Instruction, Program, Stream, Template, TemplateKind};
use ir::{BufferId, InstrId, OpKind, StreamId};
use planner::Planned;
use tests::{assert_checked, cluster, gpt2, planned};

/// A model whose logits are most of what a microbatch holds, on one device or several.
fn made(ranks: u32, pins: &[&str]) -> Planned {
    let train = ir::TrainSpec {
        global_batch: 8,
        sequence: 16,
        ..ir::TrainSpec::default()
    };
    planned(&gpt2(2, 128, 16, 4096), &train, &cluster(ranks), pins).expect("a plan")
}

/// The operands and results of an op.
fn compute(i: &Instruction) -> Option<(&OpKind, &[BufferId], &[BufferId])> {
    match &i.kind {
        InstrKind::Compute {
            kind,
            inputs,
            outputs,
            ..
        } => Some((kind, inputs, outputs)),
        _ => None,
    }
}

fn compute_mut(i: &mut Instruction) -> (&mut Vec<BufferId>, &mut Vec<BufferId>) {
    match &mut i.kind {
        InstrKind::Compute {
            inputs, outputs, ..
        } => (inputs, outputs),
        other => panic!("{other:?} computes nothing"),
    }
}

/// The operand that an instruction's result is written over, unless it is an update.
fn overwritten(i: &Instruction) -> Option<BufferId> {
    let (kind, inputs, outputs) = compute(i)?;
    let over = outputs.iter().find(|b| inputs.contains(b));
    over.copied().filter(|_| kind.in_place().is_empty())
}

fn n_overwritten(program: &Program) -> usize {
    let templates = program.roles.iter().flat_map(|r| &r.templates);
    let all = templates.flat_map(|t| &t.instructions);
    all.filter_map(overwritten).count()
}

/// Template and place of the first instruction of a kind.
fn find(program: &Program, wanted: impl Fn(&OpKind) -> bool) -> (usize, usize) {
    let templates = program.roles[0].templates.iter().enumerate();
    let mut all = templates.flat_map(|(t, template)| {
        let places = template.instructions.iter().enumerate();
        places.map(move |(i, instruction)| ((t, i), instruction))
    });
    let is_it = |i: &Instruction| compute(i).is_some_and(|(kind, ..)| wanted(kind));
    all.find(|(_, i)| is_it(i)).expect("the program has one").0
}

fn is_gelu_grad(kind: &OpKind) -> bool {
    let f = Binary::GeluTanhGrad;
    matches!(kind, OpKind::Binary { f: found } if *found == f)
}

/// Gives a buffer's place in all instructions to another one.
fn rename(program: &mut Program, from: BufferId, to: BufferId) {
    let templates = program.roles[0].templates.iter_mut();
    let all = templates.flat_map(|t| &mut t.instructions);
    for i in all.filter(|i| compute(i).is_some()) {
        let (inputs, outputs) = compute_mut(i);
        let named = inputs.iter_mut().chain(outputs);
        named.filter(|b| **b == from).for_each(|b| *b = to);
    }
}

fn found(made: &Planned, program: &Program) -> Vec<Violation> {
    check_program(&made.plan, &made.training, program)
}

fn refused(rule: &str, made: &Planned, program: &Program) {
    let found = found(made, program);
    assert!(found.iter().any(|v| v.rule == rule), "{rule}: {found:#?}");
}

#[test]
fn logits_and_their_gradient_are_in_memory_once() {
    for (ranks, pins) in [
        (1, &["microbatch=8"][..]),
        (2, &["tensor=2", "data=1", "pipeline=1", "microbatch=8"]),
    ] {
        let made = made(ranks, pins);
        let (program, role) = (&made.program, &made.program.roles[0]);
        let (t, i) = find(program, |kind| *kind == OpKind::CrossEntropyGrad);
        let logits = overwritten(&role.templates[t].instructions[i]);
        let logits = logits.expect("the gradient is written over the logits");
        let apart = lowering::without_pieces(program).expect("it fits");
        assert_eq!(n_overwritten(&apart), 0);
        // Over ranks it lacks the copies around collectives that a program has.
        if ranks == 1 {
            assert_checked(&made.plan, &made.training, &apart);
        }
        // All of them but what other buffers of the pass leave no gap for.
        let saved = apart.roles[0].arena_bytes - role.arena_bytes;
        let bytes = role.buffer(logits).bytes;
        assert!(saved > bytes / 10 * 9, "{pins:?}: {saved} of {bytes}");
    }
}

#[test]
fn what_is_written_over_is_read_by_nobody_else() {
    let made = made(1, &["microbatch=8"]);
    assert!(n_overwritten(&made.program) > 4);
    let apart = lowering::without_pieces(&made.program).expect("it fits");
    assert_eq!(found(&made, &apart), []);

    // Each row of a norm depends on all of its elements.
    let mut norm = apart.clone();
    let (t, i) = find(&norm, |kind| *kind == OpKind::LayerNormGradInput);
    let (inputs, outputs) = compute_mut(&mut norm.roles[0].templates[t].instructions[i]);
    let (from, to) = (outputs[0], inputs[0]);
    rename(&mut norm, from, to);
    refused("in_place", &made, &norm);

    // Products too, whatever the types.
    let mut product = apart.clone();
    let (t, i) = find(&product, |kind| matches!(kind, OpKind::DotGeneral { .. }));
    let (inputs, outputs) = compute_mut(&mut product.roles[0].templates[t].instructions[i]);
    outputs[0] = inputs[0];
    refused("in_place", &made, &product);

    // The gradient reads what GELU would be written over.
    let mut later = apart.clone();
    let is_gelu = |kind: &OpKind| kind.kernel_name() == "gelu_tanh";
    let (t, i) = find(&later, is_gelu);
    let (inputs, outputs) = compute_mut(&mut later.roles[0].templates[t].instructions[i]);
    let (from, to) = (outputs[0], inputs[0]);
    rename(&mut later, from, to);
    refused("operand", &made, &later);

    // Another buffer there, a part of it or all of it.
    let (t, i) = find(&apart, is_gelu_grad);
    let (_, inputs, outputs) =
        compute(&apart.roles[0].templates[t].instructions[i]).expect("it computes");
    let (operand, result) = (inputs[1], outputs[0]);
    for by in [256, 0] {
        let mut shifted = apart.clone();
        let offset = shifted.roles[0].buffer(operand).offset + by;
        shifted.roles[0].buffers[result.index()].offset = offset;
        shifted.roles[0].arena_bytes += by;
        let found = found(&made, &shifted);
        let own = |v: &&Violation| v.rule == "hazard" && v.expected.contains("bytes of its own");
        assert!(found.iter().any(|v| own(&v)), "{by}: {found:#?}");
    }
}

/// An op that is written over an operand, behind a matmul that reads it for a gradient which is added
/// up next.
fn read_before(template: &Template) -> Option<(usize, usize)> {
    let all = &template.instructions;
    let is = |i: usize, wanted: fn(&OpKind) -> bool| {
        compute(&all[i]).is_some_and(|(kind, ..)| wanted(kind))
    };
    (0..all.len()).find_map(|over| {
        let b = overwritten(&all[over])?;
        let reader = (0..over.saturating_sub(1)).rfind(|&i| {
            all[i].reads().contains(&b)
                && is(i, |kind| matches!(kind, OpKind::DotGeneral { .. }))
                && is(i + 1, |kind| matches!(kind, OpKind::Accumulate { .. }))
        })?;
        Some((reader, over))
    })
}

/// A matmul that runs beside the kernels reads what one of them is written over.
#[test]
fn who_writes_over_an_operand_waits_for_its_readers() {
    let made = made(1, &["microbatch=8"]);
    let templates = &made.program.roles[0].templates;
    let is_backward = |t: &Template| t.kind == TemplateKind::Backward;
    let t = templates.iter().position(is_backward).expect("it trains");
    let (reader, over) = read_before(&templates[t]).expect("a gradient is read and written over");
    let beside = |waits: bool| {
        let mut program = made.program.clone();
        let role = &mut program.roles[0];
        let stream = StreamId::new(role.streams.len());
        role.streams.push(Stream::Communicator { axes: vec![] });
        let all = &mut role.templates[t].instructions;
        for i in [reader, reader + 1] {
            all[i].stream = stream;
        }
        all[reader].deps = vec![InstrId::new(reader - 1)];
        if waits {
            all[over].deps.push(InstrId::new(reader));
        }
        let place = format!("template {t} (backward) instruction {over} ");
        let mut found = found(&made, &program);
        found.retain(|v| v.rule == "hazard" && v.place.contains(&place));
        found
    };
    assert_ne!(beside(false), []);
    assert_eq!(beside(true), []);
}

/// The gradient of GELU is made where the product before it is, in the call of that, though a backward
/// pass makes a weight's gradient in between.
#[test]
fn the_gradient_of_gelu_is_one_call_with_the_product_before_it() {
    let train = ir::TrainSpec {
        global_batch: 8,
        sequence: 16,
        precision: ir::Precision::Bf16,
        ..ir::TrainSpec::default()
    };
    let made = planned(&gpt2(2, 128, 16, 256), &train, &cluster(1), &[]).expect("a plan");
    let templates = made.program.roles[0].templates.iter();
    let pairs = templates.flat_map(|t| t.instructions.windows(2));
    let gradients: Vec<&[Instruction]> = pairs
        .filter(|pair| {
            let f = Binary::GeluTanhGrad;
            compute(&pair[1]).is_some_and(|(kind, ..)| *kind == OpKind::Binary { f })
        })
        .collect();
    assert_eq!(gradients.len(), 2);
    for pair in gradients {
        assert_eq!(pair[1].call, Call::Chained { is_kept: false }, "{pair:#?}");
        assert_eq!(
            overwritten(&pair[1]),
            Some(pair[0].writes()[0]),
            "{pair:#?}"
        );
    }
}
