//! Small roles whose bytes are sums that can be written down.

use super::*;
use crate::testing::{buffer, cluster, instr, pipeline, role};
use ir::program::{StateBuffer, Template};
use ir::{DType, LayerId, TemplateId};

const NOTHING: ProcessMemory = ProcessMemory {
    context_bytes: Bytes(0),
    communicator_bytes: Bytes(0),
    gradient_bytes: 0.0,
    pass_gradient_bytes: 0.0,
    sharded_copies: true,
    largest_gradient_bytes: 0.0,
    update_bytes: 0.0,
    bucket_bytes: Bytes(0),
    logit_bytes: 0.0,
    score_bytes: 0.0,
    mask_bytes: 0.0,
    in_flight: InFlight::Schedule,
    keeps_transfers: false,
    reuse: Reuse::Blocks,
    slack: 0.0,
};

fn used(program: &Program, stage: usize, memory: ProcessMemory) -> MemoryUse {
    memory_use(program, &program.roles[stage], &cluster(1), Some(&memory))
}

#[test]
fn microbatches_in_flight_follow_the_software() {
    // Three stages; the first has slots for three microbatches and one, of four tensors of
    // 256 B; the last for one and one.
    let program = pipeline(&[10; 3], &[10; 3], 16, 64, 2);
    let kept = |stage, in_flight| {
        let m = used(
            &program,
            stage,
            ProcessMemory {
                in_flight,
                ..NOTHING
            },
        );
        assert_eq!(m.total(), m.activations + m.buffers);
        m.activations.0
    };
    assert_eq!(kept(0, InFlight::Schedule), 4 * 4 * 256);
    assert_eq!(kept(0, InFlight::More { microbatches: 1 }), 5 * 4 * 256);
    assert_eq!(kept(0, InFlight::More { microbatches: 99 }), 16 * 4 * 256);
    assert_eq!(kept(1, InFlight::Buffered { per_stage: 2 }), 7 * 4 * 256);
    assert_eq!(kept(2, InFlight::Buffered { per_stage: 2 }), 2 * 4 * 256);
}

#[test]
fn transfers_may_have_buffers_for_every_microbatch() {
    let program = pipeline(&[10; 3], &[10; 3], 16, 64, 2);
    let more = |stage| {
        let of = |keeps_transfers| {
            let memory = ProcessMemory {
                keeps_transfers,
                ..NOTHING
            };
            used(&program, stage, memory).activations.0
        };
        of(true) - of(false)
    };
    // The first stage has places for four microbatches: it receives gradients, and keeps what it
    // gives as long as its places say. The second, with three, receives both.
    assert_eq!(more(0), (16 - 4) * 256);
    assert_eq!(more(1), 2 * (16 - 3) * 256);
    // The last receives activations alone.
    assert_eq!(more(2), (16 - 2) * 256);
}

#[test]
fn contexts_communicators_and_slack_add_up() {
    let program = pipeline(&[10; 3], &[10; 3], 16, 64, 2);
    let memory = ProcessMemory {
        context_bytes: Bytes(1000),
        communicator_bytes: Bytes(10),
        slack: 0.25,
        ..NOTHING
    };
    let m = used(&program, 0, memory);
    // The axis of two ranks, the neighbours, all ranks.
    assert_eq!(m.context, 1000 + 3 * 10);
    // Each pass works on two tensors of 12 and 28 B, 256 B in the arena.
    assert_eq!(m.buffers, 2 * 256);
    assert_eq!(m.slack, (4 * 4 * 256 + 2 * 256) / 4);
}

/// A parameter of 1000 elements with its copy, accumulator and both moments; a backward pass
/// that recomputes attention over 2 samples, 8 tokens and 3 heads of 4.
fn training_role() -> Program {
    let mut r = role(0, 0, 1);
    let step = |name: &str, n: u64| buffer(name, BufferClass::Step, &[n]);
    let state = |name: &str| buffer(name, BufferClass::Persistent, &[1000]);
    let mut copy = step("cast.w", 1000);
    (copy.dtype, copy.bytes) = (DType::F16, 2000);
    let qkv = |name: &str| buffer(name, BufferClass::Transient, &[2, 8, 3, 4]);
    r.buffers = vec![
        state("w"),
        state("moment1.w"),
        state("moment2.w"),
        copy,
        step("accumulate.w", 1000),
        buffer("grad.w", BufferClass::Transient, &[1000]),
        qkv("q"),
        qkv("o"),
    ];
    let roles = [StateRole::Parameter, StateRole::Moment1, StateRole::Moment2];
    r.states = (0..3)
        .map(|i| StateBuffer {
            path: r.buffers[i].name.clone(),
            param: "w".into(),
            role: roles[i],
            buffer: BufferId::new(i),
        })
        .collect();
    let compute = |path: &str, kind, inputs: &[u32], output: u32| {
        let kind = InstrKind::Compute {
            path: path.into(),
            kind,
            inputs: inputs.iter().map(|&i| BufferId(i)).collect(),
            outputs: vec![BufferId(output)],
        };
        instr(kind, crate::testing::KERNELS, &[])
    };
    let attention = OpKind::Attention {
        scale: 1.0,
        dropout: 0.0,
        key: "attend".into(),
        order: Default::default(),
        keys: Default::default(),
        bounds: Default::default(),
    };
    let gradient = OpKind::AttentionGrad {
        scale: 1.0,
        dropout: 0.0,
        key: "attend".into(),
        order: Default::default(),
        keys: Default::default(),
        bounds: Default::default(),
    };
    let accumulate = OpKind::Accumulate { dtype: DType::F32 };
    let mut again = compute("recompute.attend", attention, &[6, 6, 3], 7);
    again.pass = Pass::Recompute;
    let mut instructions = vec![
        again,
        compute("grad.attend", gradient, &[6, 6, 7], 5),
        compute("accumulate.w", accumulate, &[5], 4),
    ];
    for i in &mut instructions {
        i.layer = Some(LayerId(0));
    }
    r.templates = vec![Template {
        kind: TemplateKind::Backward,
        chunk: 0,
        instructions,
    }];
    r.trace = vec![ir::program::Slot {
        template: TemplateId(0),
        microbatch: Some(0),
    }];
    Program {
        roles: vec![r],
        transfers: Vec::new(),
        n_microbatches: 1,
        microbatch: 2,
        route: ir::schedule::Route::Ring,
    }
}

#[test]
fn parameters_gradients_and_states_follow_the_precision_policy() {
    let program = training_role();
    let memory = ProcessMemory {
        gradient_bytes: 2.0,
        ..NOTHING
    };
    let m = used(&program, 0, memory.clone());
    // 1000 elements: 2 B a copy and a gradient; the master and two moments of 4 B, which the
    // arena aligns to 256 B.
    assert_eq!((m.parameters, m.gradients), (Bytes(2048), Bytes(2000)));
    assert_eq!(m.optimizer, 3 * 4096);
    // Four bytes summed and two of every pass.
    let both = ProcessMemory {
        gradient_bytes: 4.0,
        pass_gradient_bytes: 2.0,
        slack: 0.5,
        ..NOTHING
    };
    let m = used(&program, 0, both);
    assert_eq!(m.gradients, 6000);
    assert_eq!(m.slack.0, (m.activations.0 + m.buffers.0 + 2000) / 2);
}

#[test]
fn recomputed_scores_live_from_recomputation_to_gradient() {
    let program = training_role();
    let buffers = |memory| used(&program, 0, memory).buffers.0;
    // q and o of 768 B.
    assert_eq!(buffers(NOTHING), 2 * 768);
    let scores = ProcessMemory {
        score_bytes: 9.0,
        ..NOTHING
    };
    assert_eq!(buffers(scores), 2 * 768 + 9 * 2 * 3 * 8 * 8);
    // The update takes more than the pass: 6 B of 1000 elements; blocks serve both.
    let update = ProcessMemory {
        update_bytes: 6.0,
        ..NOTHING
    };
    assert_eq!(buffers(update.clone()), 6000);
    // Lifetimes: of one microbatch the larger of both; of several, both.
    let reuse = Reuse::Lifetimes;
    assert_eq!(
        buffers(ProcessMemory {
            reuse,
            ..update.clone()
        }),
        6000
    );
    let mut several = training_role();
    several.n_microbatches = 2;
    let m = used(&several, 0, ProcessMemory { reuse, ..update });
    assert_eq!(m.buffers, 2 * 768 + 6000);
}

#[test]
fn own_memory_adds_up_to_the_arena_and_the_reserve() {
    let mut program = training_role();
    program.roles[0].arena_bytes = 30_000;
    let m = memory_use(&program, &program.roles[0], &cluster(1), None);
    assert_eq!(m.total(), 30_000 + 1000);
    assert_eq!((m.parameters, m.gradients), (Bytes(2048), Bytes(4096)));
    assert_eq!((m.optimizer, m.context), (Bytes(3 * 4096), Bytes(1000)));
}

/// A mesh of two stages of a layer each, with the ops that the backward pass of each computes
/// again. A microbatch keeps 64 elements for each stage, and drops some of them. Its schedule
/// begins up to three microbatches of the first stage and two of the second, never more than
/// four together.
fn stages_of_a_mesh(again: [&[OpKind]; 2]) -> Program {
    let mut program = training_role();
    let r = &mut program.roles[0];
    r.templates.clear();
    for (chunk, again) in again.into_iter().enumerate() {
        let id = |n: usize| BufferId::new(n);
        let first = r.buffers.len();
        let slots = 3 - chunk as u32;
        let kept = BufferClass::PerMicrobatch { slots };
        r.buffers.push(buffer("kept", kept, &[64]));
        r.buffers.push(buffer("out", BufferClass::Transient, &[64]));
        let compute = |kind: OpKind, pass| {
            let kind = InstrKind::Compute {
                path: "op".into(),
                kind,
                inputs: vec![id(first)],
                outputs: vec![id(first + 1)],
            };
            let mut i = instr(kind, crate::testing::KERNELS, &[]);
            (i.pass, i.layer) = (pass, Some(LayerId::new(chunk)));
            i
        };
        let key = "drop".to_string();
        let drops = OpKind::Dropout {
            p: 0.1,
            key,
            order: Default::default(),
        };
        let mut backward: Vec<Instruction> = again
            .iter()
            .map(|kind| compute(kind.clone(), Pass::Recompute))
            .collect();
        backward.push(compute(drops, Pass::BI));
        for (kind, instructions) in [
            (TemplateKind::Forward, Vec::new()),
            (TemplateKind::Backward, backward),
        ] {
            r.templates.push(Template {
                kind,
                chunk: chunk as u32,
                instructions,
            });
        }
    }
    // Forward and backward of the first stage, then of the second.
    let passes = [0, 0, 0, 2, 3, 1, 2, 2, 3, 1, 3, 1];
    r.trace = passes
        .map(|t| ir::program::Slot {
            template: TemplateId::new(t),
            microbatch: Some(0),
        })
        .to_vec();
    program
}

#[test]
fn stages_of_a_mesh_keep_what_their_schedule_has_begun_at_one_time() {
    let memory = ProcessMemory {
        mask_bytes: 1.0,
        ..NOTHING
    };
    let kept = |again| used(&stages_of_a_mesh(again), 0, NOTHING).activations.0;
    // Three and one, two and two: not three and two. A tensor of 64 f32.
    assert_eq!(kept([&[], &[]]), 4 * 256);
    let masks = |again| {
        let with = used(&stages_of_a_mesh(again), 0, memory.clone());
        with.activations.0 - kept(again)
    };
    assert_eq!(masks([&[], &[]]), 4 * 64);
    // Norms that are computed again keep the masks beside them; a whole layer draws its own
    // again.
    let norm = [OpKind::RmsNorm { eps: 1e-5 }];
    assert_eq!(masks([&norm, &[]]), 4 * 64);
    let einsum = ir::op::Einsum::parse("ab,bc->ac").expect("a product");
    let product = [OpKind::DotGeneral { einsum }];
    assert_eq!(masks([&product, &[]]), 2 * 64);
}
