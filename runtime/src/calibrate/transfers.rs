//! The program that measures transfers: one rank sends to another, message after message.

use super::probes::{Place, Probe};
use ir::mesh::{Axis, DeviceMesh};
use ir::program::{
    ARENA_ALIGN, Buffer, BufferClass, Event, InstrKind, Instruction, Program, RoleProgram, Slot,
    Stream, Template, TemplateKind, Transfer, Which,
};
use ir::{
    BufferId, DType, InstrId, LogicalMesh, Pass, Rank, ShardingSpec, StageId, StreamId, TemplateId,
    TransferId,
};

/// Ranks 0 and 1 as stages, and what to measure in their program. Both sides of a transfer
/// count: the mean of what sender and receiver take.
pub(super) fn transfers(quick: bool) -> (Program, Vec<Probe>) {
    let sizes: &[u64] = match quick {
        true => &[1 << 12, 1 << 20],
        false => &[1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22],
    };
    let transfers = sizes.iter().map(|bytes| Transfer {
        value: "probe".into(),
        from: StageId(0),
        to: StageId(1),
        lens: vec![bytes / 4],
        dtype: DType::F32,
        from_spec: ShardingSpec::replicated(1),
        to_spec: ShardingSpec::replicated(1),
    });
    let program = Program {
        roles: vec![role(0, sizes), role(1, sizes)],
        transfers: transfers.collect(),
        n_microbatches: 1,
        microbatch: 1,
        route: ir::schedule::Route::Ring,
    };
    let probes = sizes.iter().enumerate().map(|(i, &bytes)| Probe {
        what: "send".into(),
        size: vec![bytes],
        // The first template fills.
        place: Place {
            template: 2 * i + 2,
            instruction: 0,
        },
    });
    (program, probes.collect())
}

fn role(stage: u32, sizes: &[u64]) -> RoleProgram {
    let mut offset = 0;
    let mut buffers: Vec<Buffer> = Vec::new();
    let mut buffer = |lens: Vec<u64>| {
        let bytes = 4 * lens.iter().product::<u64>();
        buffers.push(Buffer {
            name: "probe".into(),
            dtype: DType::F32,
            spec: ShardingSpec::replicated(lens.len()),
            lens,
            pieces: None,
            space: Default::default(),
            class: BufferClass::Transient,
            turns: None,
            offset,
            bytes,
        });
        offset += bytes.next_multiple_of(ARENA_ALIGN);
        BufferId::new(buffers.len() - 1)
    };
    let streams = vec![Stream::Kernels, Stream::Transfers];
    let instruction = |kind, events| Instruction {
        stream: StreamId::new(
            streams
                .iter()
                .position(|s| *s == Stream::of(&kind))
                .unwrap_or(0),
        ),
        kind,
        deps: vec![],
        events,
        pass: Pass::F,
        layer: None,
        call: ir::program::Call::Own,
    };
    let template = |kind, instruction| Template {
        kind,
        chunk: 0,
        instructions: vec![instruction],
    };
    let loss = buffer(vec![]);
    let fill = |output| instruction(InstrKind::Fill { value: 0.5, output }, vec![]);
    let mut templates = vec![template(TemplateKind::Forward, fill(loss))];
    for (i, bytes) in sizes.iter().enumerate() {
        let b = buffer(vec![bytes / 4]);
        let (sent, received) = match stage {
            0 => (vec![(TransferId::new(i), b)], vec![]),
            _ => (vec![], vec![(TransferId::new(i), b)]),
        };
        let exchange = InstrKind::Exchange {
            sends: sent,
            recvs: received,
        };
        templates.push(template(TemplateKind::Forward, fill(b)));
        let filled = Event::Done {
            template: TemplateId::new(templates.len() - 1),
            instruction: InstrId(0),
            which: Which::Latest,
        };
        let exchange = instruction(exchange, vec![filled]);
        templates.push(template(TemplateKind::Exchange, exchange));
    }
    let trace = (0..templates.len()).map(|t| Slot {
        template: TemplateId::new(t),
        microbatch: Some(0),
    });
    RoleProgram {
        stage: StageId(stage),
        mesh: LogicalMesh {
            devices: DeviceMesh {
                first_rank: Rank(stage),
                n_devices: 1,
            },
            axes: vec![Axis {
                name: "members".into(),
                size: 1,
            }],
        },
        trace: trace.collect(),
        streams,
        buffers,
        templates,
        arena_bytes: offset,
        other_arenas: Default::default(),
        states: vec![],
        loss: Some(loss),
        grad_norm: None,
    }
}
