//! Ways to spoil a program. Each takes a random place and says whether it found one.

use super::plans::Random;
use ir::collective::{CollectiveKind, Order};
use ir::op::{InputKind, OpKind, Unary};
use ir::program::{BufferClass, Event, InstrKind, Instruction, Program, RoleProgram, Which};
use ir::reshard::{LayoutStep, Pieces};
use ir::{
    AxisId, BufferId, DType, InstrId, ReduceKind, Reduction, StageId, StreamId, TemplateId,
    TransferId,
};

pub type Mutation = fn(&mut Program, &mut Random) -> bool;

/// Name and mutation of every class.
pub const CLASSES: &[(&str, Mutation)] = &[
    ("swap operands", swap_operands),
    ("wrong operand buffer", wrong_input),
    ("wrong result buffer", wrong_output),
    ("drop instruction", drop_instruction),
    ("duplicate instruction", duplicate_instruction),
    ("swap instructions", swap_instructions),
    ("wrong op path", op_path),
    ("wrong op attribute", op_attribute),
    ("wrong collective kind", collective_kind),
    ("wrong collective axes", collective_axes),
    ("wrong reduction", reduction),
    ("wrong step dim", step_dim),
    ("wrong step axis", step_axis),
    ("wrong collective item", collective_item),
    ("drop collective item", drop_item),
    ("drop dep", drop_dep),
    ("drop event", drop_event),
    ("wrong event", wrong_event),
    ("wrong stream", stream),
    ("shift offset", shift_offset),
    ("shrink slots", shrink_slots),
    ("wrong buffer class", buffer_class),
    ("wrong buffer spec", buffer_spec),
    ("wrong pieces", buffer_pieces),
    ("wrong buffer dtype", buffer_dtype),
    ("wrong buffer bytes", buffer_bytes),
    ("small arena", arena),
    ("wrong transfer spec", transfer_spec),
    ("wrong transfer stage", transfer_stage),
    ("wrong transfer value", transfer_value),
    ("wrong transfer in exchange", exchange_transfer),
    ("drop exchange part", exchange_drop),
    ("wrong fill", fill),
    ("wrong load", load),
    ("wrong world sum entry", world_entry),
    ("drop world sum entry", world_drop),
    ("drop slot", drop_slot),
    ("duplicate slot", duplicate_slot),
    ("swap slots", swap_slots),
    ("wrong microbatch", slot_microbatch),
    ("wrong template", slot_template),
    ("wrong chunk", template_chunk),
    ("wrong state buffer", state_buffer),
    ("drop state", drop_state),
    ("wrong loss buffer", loss_buffer),
    ("wrong norm buffer", norm_buffer),
    ("wrong contract", contract),
];

fn role<'a>(p: &'a mut Program, r: &mut Random) -> &'a mut RoleProgram {
    let i = r.below(p.roles.len());
    &mut p.roles[i]
}

/// A random template whose instructions satisfy `f`, and one of those.
fn find(
    role: &RoleProgram,
    r: &mut Random,
    f: &dyn Fn(&Instruction) -> bool,
) -> Option<(usize, usize)> {
    let all: Vec<(usize, usize)> = role
        .templates
        .iter()
        .enumerate()
        .flat_map(|(t, x)| {
            x.instructions
                .iter()
                .enumerate()
                .map(move |(i, instr)| (t, i, instr))
        })
        .filter(|(_, _, instr)| f(instr))
        .map(|(t, i, _)| (t, i))
        .collect();
    r.pick(&all).copied()
}

/// Changes a random instruction that `f` can change.
fn change(
    p: &mut Program,
    r: &mut Random,
    which: &dyn Fn(&InstrKind) -> bool,
    f: &mut dyn FnMut(&mut InstrKind, &mut Random) -> bool,
) -> bool {
    let all: Vec<usize> = (0..p.roles.len())
        .filter(|&i| {
            p.roles[i]
                .templates
                .iter()
                .flat_map(|t| &t.instructions)
                .any(|x| which(&x.kind))
        })
        .collect();
    let Some(&i) = r.pick(&all) else { return false };
    let Some((t, j)) = find(&p.roles[i], r, &|x| which(&x.kind)) else {
        return false;
    };
    f(&mut p.roles[i].templates[t].instructions[j].kind, r)
}

fn other<T: PartialEq + Clone>(r: &mut Random, from: &[T], not: &T) -> Option<T> {
    let rest: Vec<T> = from.iter().filter(|x| *x != not).cloned().collect();
    r.pick(&rest).cloned()
}

/// Another buffer, of the same type where there is one.
fn other_buffer(role: &RoleProgram, r: &mut Random, b: BufferId) -> Option<BufferId> {
    let x = role.buffer(b);
    let ids: Vec<BufferId> = (0..role.buffers.len())
        .map(BufferId::new)
        .filter(|&o| o != b)
        .collect();
    let same: Vec<BufferId> = ids
        .iter()
        .copied()
        .filter(|&o| role.buffer(o).lens == x.lens && role.buffer(o).dtype == x.dtype)
        .collect();
    let closer: Vec<BufferId> = same
        .iter()
        .copied()
        .filter(|&o| role.buffer(o).spec == x.spec)
        .collect();
    let pools = [&closer, &same, &ids];
    pools[r.below(3)]
        .iter()
        .copied()
        .nth(r.below(pools[0].len().max(1)))
        .or_else(|| r.pick(&ids).copied())
}

fn swap_operands(p: &mut Program, r: &mut Random) -> bool {
    change(
        p,
        r,
        &|k| matches!(k, InstrKind::Compute { inputs, .. } if inputs.len() > 1),
        &mut |k, r| {
            let InstrKind::Compute { inputs, .. } = k else {
                return false;
            };
            let (a, b) = (r.below(inputs.len()), r.below(inputs.len()));
            let differ = inputs[a] != inputs[b];
            inputs.swap(a, b);
            differ
        },
    )
}

fn read_slots(kind: &mut InstrKind) -> Vec<&mut BufferId> {
    match kind {
        InstrKind::Compute { inputs, .. } => inputs.iter_mut().collect(),
        InstrKind::Collective { items, .. } => items.iter_mut().map(|i| &mut i.input).collect(),
        InstrKind::Slice { input, .. } | InstrKind::Copy { input, .. } => vec![input],
        InstrKind::Exchange { sends, .. } => sends.iter_mut().map(|s| &mut s.1).collect(),
        InstrKind::WorldSum { inputs, .. } => inputs.iter_mut().map(|s| &mut s.1).collect(),
        InstrKind::Load { .. } | InstrKind::Fill { .. } => vec![],
    }
}

fn write_slots(kind: &mut InstrKind) -> Vec<&mut BufferId> {
    match kind {
        InstrKind::Compute { outputs, .. } => outputs.iter_mut().collect(),
        InstrKind::Collective { items, .. } => items.iter_mut().map(|i| &mut i.output).collect(),
        InstrKind::Exchange { recvs, .. } => recvs.iter_mut().map(|s| &mut s.1).collect(),
        InstrKind::Slice { output, .. }
        | InstrKind::Copy { output, .. }
        | InstrKind::WorldSum { output, .. }
        | InstrKind::Load { output, .. }
        | InstrKind::Fill { output, .. } => vec![output],
    }
}

fn wrong_buffer(
    p: &mut Program,
    r: &mut Random,
    slots: fn(&mut InstrKind) -> Vec<&mut BufferId>,
) -> bool {
    let role = role(p, r);
    let Some((t, j)) = find(role, r, &|i| !slots(&mut i.kind.clone()).is_empty()) else {
        return false;
    };
    let mut kind = role.templates[t].instructions[j].kind.clone();
    let mut all = slots(&mut kind);
    let at = r.below(all.len());
    let Some(new) = other_buffer(role, r, *all[at]) else {
        return false;
    };
    *all[at] = new;
    role.templates[t].instructions[j].kind = kind;
    true
}

fn wrong_input(p: &mut Program, r: &mut Random) -> bool {
    wrong_buffer(p, r, read_slots)
}

fn wrong_output(p: &mut Program, r: &mut Random) -> bool {
    wrong_buffer(p, r, write_slots)
}

/// Renumbers what waits for instructions of a template; those that `f` maps to nothing go.
fn renumber(role: &mut RoleProgram, t: usize, f: &dyn Fn(usize) -> Option<usize>) {
    let new = |i: InstrId| f(i.index()).map(InstrId::new);
    for i in &mut role.templates[t].instructions {
        i.deps = i.deps.iter().filter_map(|d| new(*d)).collect();
    }
    for i in role.templates.iter_mut().flat_map(|t| &mut t.instructions) {
        i.events.retain_mut(|event| match event {
            Event::Done {
                template,
                instruction,
                ..
            } if template.index() == t => match new(*instruction) {
                Some(now) => {
                    *instruction = now;
                    true
                }
                None => false,
            },
            _ => true,
        });
    }
}

fn drop_instruction(p: &mut Program, r: &mut Random) -> bool {
    let role = role(p, r);
    let Some((t, j)) = find(role, r, &|_| true) else {
        return false;
    };
    let template = &mut role.templates[t];
    // Whoever waited for it waits for what it waited for, as does the next one on its stream.
    let gone = template.instructions.remove(j);
    let on_stream = |i: &Instruction| i.stream == gone.stream;
    let next = template.instructions[j..].iter().position(on_stream);
    for (k, i) in template.instructions.iter_mut().enumerate() {
        if i.deps.contains(&InstrId::new(j)) || next == k.checked_sub(j) && k >= j {
            i.deps.extend(&gone.deps);
            i.events.extend(&gone.events);
        }
    }
    renumber(role, t, &|d| {
        (d != j).then_some(if d > j { d - 1 } else { d })
    });
    true
}

fn duplicate_instruction(p: &mut Program, r: &mut Random) -> bool {
    let role = role(p, r);
    let Some((t, j)) = find(role, r, &|_| true) else {
        return false;
    };
    renumber(role, t, &|d| Some(if d > j { d + 1 } else { d }));
    let template = &mut role.templates[t];
    let mut copy = template.instructions[j].clone();
    copy.deps.push(InstrId::new(j));
    template.instructions.insert(j + 1, copy);
    for i in &mut template.instructions[j + 2..] {
        if i.deps.contains(&InstrId::new(j)) {
            i.deps.push(InstrId::new(j + 1));
        }
    }
    true
}

fn swap_instructions(p: &mut Program, r: &mut Random) -> bool {
    let role = role(p, r);
    let Some((t, j)) = find(role, r, &|_| true) else {
        return false;
    };
    let template = &mut role.templates[t];
    if j + 1 >= template.instructions.len() {
        return false;
    }
    template.instructions.swap(j, j + 1);
    renumber(role, t, &|d| {
        Some(if d == j {
            j + 1
        } else if d == j + 1 {
            j
        } else {
            d
        })
    });
    true
}

fn op_path(p: &mut Program, r: &mut Random) -> bool {
    let paths: Vec<String> = p
        .roles
        .iter()
        .flat_map(|x| &x.templates)
        .flat_map(|t| &t.instructions)
        .filter_map(|i| {
            if let InstrKind::Compute { path, .. } = &i.kind {
                Some(path.clone())
            } else {
                None
            }
        })
        .collect();
    change(
        p,
        r,
        &|k| matches!(k, InstrKind::Compute { .. }),
        &mut |k, r| {
            let InstrKind::Compute { path, .. } = k else {
                return false;
            };
            let Some(new) = other(r, &paths, path) else {
                return false;
            };
            *path = new;
            true
        },
    )
}

fn op_attribute(p: &mut Program, r: &mut Random) -> bool {
    let attributed = |k: &OpKind| {
        matches!(
            k,
            OpKind::Unary { .. }
                | OpKind::Binary { .. }
                | OpKind::Cast { .. }
                | OpKind::RmsNorm { .. }
                | OpKind::AdamW { .. }
                | OpKind::DotGeneral { .. }
                | OpKind::ClipCoefficient { .. }
                | OpKind::Accumulate { .. }
                | OpKind::Broadcast { .. }
                | OpKind::EmbeddingGrad { .. }
                | OpKind::Dispatch { .. }
                | OpKind::UpdateLossScale { .. }
        )
    };
    change(
        p,
        r,
        &|k| matches!(k, InstrKind::Compute { kind, .. } if attributed(kind)),
        &mut |k, _| {
            let InstrKind::Compute { kind, .. } = k else {
                return false;
            };
            match kind {
                OpKind::Unary {
                    f: Unary::Scale { by },
                } => *by *= 1.0 + f64::EPSILON,
                OpKind::Unary { f } => *f = Unary::Silu,
                OpKind::Binary { f } => {
                    *f = if *f == ir::op::Binary::Sub {
                        ir::op::Binary::Add
                    } else {
                        ir::op::Binary::Sub
                    }
                }
                OpKind::Cast { dtype } | OpKind::Accumulate { dtype } => *dtype = DType::F8e4m3,
                OpKind::RmsNorm { eps } => *eps *= 2.0,
                OpKind::AdamW { beta1, .. } => *beta1 = 0.5,
                OpKind::DotGeneral { einsum } => std::mem::swap(&mut einsum.lhs, &mut einsum.rhs),
                OpKind::ClipCoefficient { max_norm } => *max_norm = None,
                OpKind::Broadcast { leading } => leading.push(ir::Dim::Fixed(1)),
                OpKind::EmbeddingGrad { vocab } => *vocab += 1,
                OpKind::Dispatch { capacity, .. } => *capacity += 1,
                OpKind::UpdateLossScale { growth_interval } => *growth_interval += 1,
                _ => return false,
            }
            true
        },
    )
}

fn is_collective(k: &InstrKind) -> bool {
    matches!(k, InstrKind::Collective { .. })
}

fn collective_kind(p: &mut Program, r: &mut Random) -> bool {
    let all = [
        CollectiveKind::AllReduce(Reduction::Sum),
        CollectiveKind::ReduceScatter(Reduction::Sum),
        CollectiveKind::AllGather,
        CollectiveKind::AllToAll,
    ];
    change(p, r, &is_collective, &mut |k, r| {
        let InstrKind::Collective { kind, .. } = k else {
            return false;
        };
        let Some(new) = other(r, &all, kind) else {
            return false;
        };
        *kind = new;
        true
    })
}

fn collective_axes(p: &mut Program, r: &mut Random) -> bool {
    let n = p.roles[0].mesh.axes.len();
    change(p, r, &is_collective, &mut |k, r| {
        let InstrKind::Collective { axes, .. } = k else {
            return false;
        };
        let new = AxisId::new(r.below(n + 1));
        match r.below(3) {
            0 => axes.push(new),
            1 => drop(axes.pop()),
            _ if axes.contains(&new) => return false,
            _ => axes[0] = new,
        }
        true
    })
}

fn reduction(p: &mut Program, r: &mut Random) -> bool {
    change(
        p,
        r,
        &|k| {
            matches!(
                k,
                InstrKind::Collective {
                    kind: CollectiveKind::AllReduce(_) | CollectiveKind::ReduceScatter(_),
                    ..
                }
            )
        },
        &mut |k, r| {
            let InstrKind::Collective {
                kind: CollectiveKind::AllReduce(reduce) | CollectiveKind::ReduceScatter(reduce),
                ..
            } = k
            else {
                return false;
            };
            let Some(new) = other(r, &[Reduction::Sum, Reduction::Max, Reduction::Min], reduce)
            else {
                return false;
            };
            *reduce = new;
            true
        },
    )
}

/// Changes the type, the type of the sum, or the order that a collective states.
fn contract(p: &mut Program, r: &mut Random) -> bool {
    change(p, r, &is_collective, &mut |k, r| {
        let InstrKind::Collective { contract, .. } = k else {
            return false;
        };
        let types = [DType::F32, DType::Bf16, DType::F16];
        match (&mut contract.sum, r.below(3)) {
            (Some(sum), 0) => {
                sum.order = match sum.order {
                    Order::Fixed => Order::Library,
                    Order::Library => Order::Fixed,
                }
            }
            (sum @ Some(_), 1) if r.below(2) == 0 => *sum = None,
            (Some(sum), 1) => match other(r, &types, &sum.dtype) {
                Some(dtype) => sum.dtype = dtype,
                None => return false,
            },
            (sum @ None, 0) => *sum = Some(Order::Fixed.sum(contract.operand)),
            _ => match other(r, &types, &contract.operand) {
                Some(dtype) => contract.operand = dtype,
                None => return false,
            },
        }
        true
    })
}

/// Changes a step of a collective or slice.
fn change_step(
    p: &mut Program,
    r: &mut Random,
    f: &mut dyn FnMut(&mut LayoutStep, &mut Random) -> bool,
) -> bool {
    change(
        p,
        r,
        &|k| matches!(k, InstrKind::Collective { .. } | InstrKind::Slice { .. }),
        &mut |k, r| match k {
            InstrKind::Collective { items, .. } => {
                let at = r.below(items.len());
                f(&mut items[at].step, r)
            }
            InstrKind::Slice { step, .. } => f(step, r),
            _ => false,
        },
    )
}

fn step_dim(p: &mut Program, r: &mut Random) -> bool {
    change_step(p, r, &mut |step, r| {
        let up = r.below(2) == 0;
        match step {
            LayoutStep::AllReduce { .. } => return false,
            LayoutStep::ReduceScatter { dim, unit, .. } | LayoutStep::Slice { dim, unit, .. } => {
                if up {
                    *dim += 1;
                } else {
                    *unit += 1;
                }
            }
            LayoutStep::AllGather { dim, .. } => {
                *dim = if up {
                    *dim + 1
                } else {
                    dim.saturating_sub(1) + usize::from(*dim == 0)
                }
            }
            LayoutStep::AllToAll { from, to, .. } => std::mem::swap(from, to),
            LayoutStep::Shift { turns, .. } => *turns += 1,
        }
        true
    })
}

fn step_axis(p: &mut Program, r: &mut Random) -> bool {
    let n = p.roles[0].mesh.axes.len();
    change_step(p, r, &mut |step, r| {
        let new = AxisId::new(r.below(n));
        match step {
            LayoutStep::AllReduce { axes } => {
                let changed = axes.first() != Some(&new);
                axes[0] = new;
                changed
            }
            LayoutStep::ReduceScatter { axis, .. }
            | LayoutStep::AllGather { axis, .. }
            | LayoutStep::AllToAll { axis, .. }
            | LayoutStep::Shift { axis, .. }
            | LayoutStep::Slice { axis, .. } => {
                let changed = *axis != new;
                *axis = new;
                changed
            }
        }
    })
}

fn collective_item(p: &mut Program, r: &mut Random) -> bool {
    change(
        p,
        r,
        &|k| matches!(k, InstrKind::Collective { items, .. } if items.len() > 1),
        &mut |k, r| {
            let InstrKind::Collective { items, .. } = k else {
                return false;
            };
            let (a, b) = (r.below(items.len()), r.below(items.len()));
            let (x, y) = (items[a].output, items[b].output);
            (items[a].output, items[b].output) = (y, x);
            x != y
        },
    )
}

fn drop_item(p: &mut Program, r: &mut Random) -> bool {
    change(p, r, &is_collective, &mut |k, r| {
        let InstrKind::Collective { items, .. } = k else {
            return false;
        };
        let at = r.below(items.len());
        items.remove(at);
        true
    })
}

fn drop_dep(p: &mut Program, r: &mut Random) -> bool {
    let role = role(p, r);
    let Some((t, j)) = find(role, r, &|i| !i.deps.is_empty()) else {
        return false;
    };
    let deps = &mut role.templates[t].instructions[j].deps;
    let at = r.below(deps.len());
    deps.remove(at);
    true
}

fn stream(p: &mut Program, r: &mut Random) -> bool {
    let role = role(p, r);
    let Some((t, j)) = find(role, r, &|_| true) else {
        return false;
    };
    let all: Vec<StreamId> = (0..role.streams.len()).map(StreamId::new).collect();
    let instr = &mut role.templates[t].instructions[j];
    let Some(new) = other(r, &all, &instr.stream) else {
        return false;
    };
    instr.stream = new;
    true
}

fn drop_event(p: &mut Program, r: &mut Random) -> bool {
    let role = role(p, r);
    let Some((t, j)) = find(role, r, &|i| !i.events.is_empty()) else {
        return false;
    };
    let events = &mut role.templates[t].instructions[j].events;
    let at = r.below(events.len());
    events.remove(at);
    true
}

fn wrong_event(p: &mut Program, r: &mut Random) -> bool {
    let role = role(p, r);
    let is_done = |e: &Event| matches!(e, Event::Done { .. });
    let Some((t, j)) = find(role, r, &|i| i.events.iter().any(is_done)) else {
        return false;
    };
    let events = &mut role.templates[t].instructions[j].events;
    for event in events.iter_mut().filter(|e| is_done(e)) {
        if let Event::Done { which, .. } = event {
            *which = match *which {
                Which::Latest => Which::Back(0),
                Which::Back(n) => Which::Back(n + 1),
            };
        }
    }
    true
}

fn shift_offset(p: &mut Program, r: &mut Random) -> bool {
    let role = role(p, r);
    let at = r.below(role.buffers.len());
    let by = [128, 256, 512, 1024][r.below(4)];
    let up = r.below(2) == 0;
    let offset = &mut role.buffers[at].offset;
    match (up, offset.checked_sub(by)) {
        (false, Some(less)) => *offset = less,
        _ => *offset += by,
    }
    true
}

fn shrink_slots(p: &mut Program, r: &mut Random) -> bool {
    let role = role(p, r);
    let many: Vec<usize> = (0..role.buffers.len())
        .filter(|&b| role.buffers[b].slots() > 1)
        .collect();
    let Some(&at) = r.pick(&many) else {
        return false;
    };
    let slots = role.buffers[at].slots() - 1;
    role.buffers[at].class = BufferClass::PerMicrobatch { slots };
    true
}

fn buffer_class(p: &mut Program, r: &mut Random) -> bool {
    let role = role(p, r);
    let at = r.below(role.buffers.len());
    let class = role.buffers[at].class;
    let all = [
        BufferClass::Persistent,
        BufferClass::Step,
        BufferClass::PerMicrobatch { slots: 1 },
        BufferClass::Transient,
    ];
    let Some(new) = other(r, &all, &class) else {
        return false;
    };
    role.buffers[at].class = new;
    true
}

fn buffer_spec(p: &mut Program, r: &mut Random) -> bool {
    let n = p.roles[0].mesh.axes.len();
    let role = role(p, r);
    let at = r.below(role.buffers.len());
    let b = &mut role.buffers[at];
    let axis = AxisId::new(r.below(n));
    let old = b.spec.clone();
    if b.spec.replicates(axis) {
        match r.below(b.lens.len() + 1) {
            0 => drop(b.spec.partial.insert(axis, ReduceKind::Sum)),
            d => {
                b.spec.dims[d - 1].axes.push(axis);
            }
        }
    } else {
        b.spec.partial.remove(&axis);
        for d in &mut b.spec.dims {
            d.axes.retain(|a| *a != axis);
            if d.axes.is_empty() {
                d.unit = 1;
            }
        }
    }
    // The bytes fit, so that only what is in the buffer is wrong.
    b.bytes = b.spec.local_elements(&b.lens, &role.mesh) * b.dtype.bytes();
    old != b.spec
}

fn buffer_pieces(p: &mut Program, r: &mut Random) -> bool {
    let role = role(p, r);
    let at = r.below(role.buffers.len());
    let (b, whole) = (&role.buffers[at], role.buffers[at].pieces.is_none());
    let pieces = match (b.pieces, r.below(4)) {
        (None, _) | (Some(_), 0) if b.lens.is_empty() => return false,
        (Some(_), 0) => None,
        (Some(p), 1) => Some(Pieces { n: p.n + 1, ..p }),
        (Some(p), 2) => Some(Pieces {
            len: p.len + 1,
            ..p
        }),
        (Some(p), _) => Some(Pieces {
            dim: p.dim + 1,
            ..p
        }),
        // Of the same bytes, where the dim is even.
        (None, _) => {
            let dim = r.below(b.lens.len());
            let len = b.spec.local_shape(&b.lens, &role.mesh)[dim].div_ceil(2);
            Some(Pieces { dim, n: 2, len })
        }
    };
    // Nobody sees the form of what no instruction touches.
    let mut used = role.templates.iter().flat_map(|t| &t.instructions);
    let touches = |i: &Instruction| {
        [i.reads(), i.writes()]
            .concat()
            .contains(&BufferId::new(at))
    };
    let copied = |i: &Instruction| matches!(i.kind, InstrKind::Copy { .. });
    let seen = used.any(|i| touches(i) && !copied(i));
    role.buffers[at].pieces = pieces;
    seen || !whole
}

fn buffer_dtype(p: &mut Program, r: &mut Random) -> bool {
    let role = role(p, r);
    let at = r.below(role.buffers.len());
    let b = &mut role.buffers[at];
    let Some(new) = other(r, &[DType::F32, DType::I32, DType::Bf16], &b.dtype) else {
        return false;
    };
    b.bytes = b.bytes / b.dtype.bytes() * new.bytes();
    b.dtype = new;
    true
}

fn buffer_bytes(p: &mut Program, r: &mut Random) -> bool {
    let role = role(p, r);
    let at = r.below(role.buffers.len());
    role.buffers[at].bytes /= 2;
    true
}

fn arena(p: &mut Program, r: &mut Random) -> bool {
    let role = role(p, r);
    role.arena_bytes -= 257;
    true
}

fn transfer_spec(p: &mut Program, r: &mut Random) -> bool {
    let n = p.roles[0].mesh.axes.len();
    let Some(x) = pick_transfer(p, r) else {
        return false;
    };
    let t = &mut p.transfers[x];
    let spec = if r.below(2) == 0 {
        &mut t.from_spec
    } else {
        &mut t.to_spec
    };
    let axis = AxisId::new(r.below(n));
    if spec.dims.is_empty() {
        return false;
    }
    let at = r.below(spec.dims.len());
    if spec.replicates(axis) {
        spec.dims[at].axes.push(axis);
    } else {
        for d in &mut spec.dims {
            d.axes.retain(|a| *a != axis);
            if d.axes.is_empty() {
                d.unit = 1;
            }
        }
    }
    true
}

fn pick_transfer(p: &Program, r: &mut Random) -> Option<usize> {
    (!p.transfers.is_empty()).then(|| r.below(p.transfers.len()))
}

fn transfer_stage(p: &mut Program, r: &mut Random) -> bool {
    let Some(x) = pick_transfer(p, r) else {
        return false;
    };
    let stages: Vec<StageId> = (0..=p.roles.len()).map(StageId::new).collect();
    let t = &mut p.transfers[x];
    let stage = if r.below(2) == 0 {
        &mut t.from
    } else {
        &mut t.to
    };
    let Some(new) = other(r, &stages, stage) else {
        return false;
    };
    *stage = new;
    true
}

fn transfer_value(p: &mut Program, r: &mut Random) -> bool {
    let Some(x) = pick_transfer(p, r) else {
        return false;
    };
    let names: Vec<String> = p
        .roles
        .iter()
        .flat_map(|x| &x.buffers)
        .map(|b| b.name.clone())
        .collect();
    let Some(new) = other(r, &names, &p.transfers[x].value) else {
        return false;
    };
    p.transfers[x].value = new;
    true
}

fn is_exchange(k: &InstrKind) -> bool {
    matches!(k, InstrKind::Exchange { .. })
}

fn exchange_transfer(p: &mut Program, r: &mut Random) -> bool {
    let all: Vec<TransferId> = (0..p.transfers.len()).map(TransferId::new).collect();
    change(p, r, &is_exchange, &mut |k, r| {
        let InstrKind::Exchange { sends, recvs } = k else {
            return false;
        };
        let n = sends.len() + recvs.len();
        let at = r.below(n);
        let Some(part) = sends.iter_mut().chain(recvs).nth(at) else {
            return false;
        };
        let Some(new) = other(r, &all, &part.0) else {
            return false;
        };
        part.0 = new;
        true
    })
}

fn exchange_drop(p: &mut Program, r: &mut Random) -> bool {
    change(p, r, &is_exchange, &mut |k, r| {
        let InstrKind::Exchange { sends, recvs } = k else {
            return false;
        };
        let parts = if r.below(2) == 0 && !sends.is_empty() || recvs.is_empty() {
            sends
        } else {
            recvs
        };
        if parts.is_empty() {
            return false;
        }
        let at = r.below(parts.len());
        parts.remove(at);
        true
    })
}

fn fill(p: &mut Program, r: &mut Random) -> bool {
    change(
        p,
        r,
        &|k| matches!(k, InstrKind::Fill { .. }),
        &mut |k, _| {
            let InstrKind::Fill { value, .. } = k else {
                return false;
            };
            *value += 0.5;
            true
        },
    )
}

fn load(p: &mut Program, r: &mut Random) -> bool {
    change(
        p,
        r,
        &|k| matches!(k, InstrKind::Load { .. }),
        &mut |k, _| {
            let InstrKind::Load { kind, .. } = k else {
                return false;
            };
            *kind = if *kind == InputKind::Tokens {
                InputKind::Labels
            } else {
                InputKind::Tokens
            };
            true
        },
    )
}

fn is_world(k: &InstrKind) -> bool {
    matches!(k, InstrKind::WorldSum { inputs, .. } if !inputs.is_empty())
}

fn world_entry(p: &mut Program, r: &mut Random) -> bool {
    change(p, r, &is_world, &mut |k, r| {
        let InstrKind::WorldSum { inputs, .. } = k else {
            return false;
        };
        let at = r.below(inputs.len());
        inputs[at].0 = if r.below(2) == 0 {
            inputs[at].0 + 1
        } else {
            inputs[(at + 1) % inputs.len()].0 ^ 1
        };
        true
    })
}

fn world_drop(p: &mut Program, r: &mut Random) -> bool {
    change(p, r, &is_world, &mut |k, r| {
        let InstrKind::WorldSum { inputs, .. } = k else {
            return false;
        };
        let at = r.below(inputs.len());
        inputs.remove(at);
        true
    })
}

fn drop_slot(p: &mut Program, r: &mut Random) -> bool {
    let role = role(p, r);
    let at = r.below(role.trace.len());
    // A stage without weights has nothing to do in the slots of their gradients.
    let empty = role
        .template(role.trace[at].template)
        .instructions
        .is_empty();
    role.trace.remove(at);
    !empty
}

fn duplicate_slot(p: &mut Program, r: &mut Random) -> bool {
    let role = role(p, r);
    let at = r.below(role.trace.len());
    let slot = role.trace[at];
    role.trace.insert(at, slot);
    true
}

fn swap_slots(p: &mut Program, r: &mut Random) -> bool {
    let role = role(p, r);
    let (a, b) = (r.below(role.trace.len()), r.below(role.trace.len()));
    let differ = role.trace[a] != role.trace[b];
    role.trace.swap(a, b);
    differ
}

fn slot_microbatch(p: &mut Program, r: &mut Random) -> bool {
    let m = p.n_microbatches;
    let role = role(p, r);
    let at = r.below(role.trace.len());
    let all: Vec<Option<u32>> = std::iter::once(None).chain((0..=m).map(Some)).collect();
    let Some(new) = other(r, &all, &role.trace[at].microbatch) else {
        return false;
    };
    role.trace[at].microbatch = new;
    true
}

fn slot_template(p: &mut Program, r: &mut Random) -> bool {
    let role = role(p, r);
    let at = r.below(role.trace.len());
    let all: Vec<TemplateId> = (0..role.templates.len()).map(TemplateId::new).collect();
    let Some(new) = other(r, &all, &role.trace[at].template) else {
        return false;
    };
    role.trace[at].template = new;
    true
}

fn template_chunk(p: &mut Program, r: &mut Random) -> bool {
    let role = role(p, r);
    let all: Vec<u32> = (0..=role.n_chunks()).collect();
    let at = r.below(role.templates.len());
    let Some(new) = other(r, &all, &role.templates[at].chunk) else {
        return false;
    };
    role.templates[at].chunk = new;
    true
}

fn state_buffer(p: &mut Program, r: &mut Random) -> bool {
    let role = role(p, r);
    let n = role.states.len();
    if n < 2 {
        return false;
    }
    let (a, b) = (r.below(n), r.below(n));
    let (x, y) = (role.states[a].buffer, role.states[b].buffer);
    (role.states[a].buffer, role.states[b].buffer) = (y, x);
    x != y
}

fn drop_state(p: &mut Program, r: &mut Random) -> bool {
    let role = role(p, r);
    let at = r.below(role.states.len());
    !role.states.is_empty() && {
        role.states.remove(at);
        true
    }
}

fn result_buffer(
    p: &mut Program,
    r: &mut Random,
    of: fn(&mut RoleProgram) -> &mut Option<BufferId>,
) -> bool {
    let role = role(p, r);
    let Some(b) = *of(role) else { return false };
    let Some(new) = other_buffer(role, r, b) else {
        return false;
    };
    *of(role) = Some(new);
    true
}

fn loss_buffer(p: &mut Program, r: &mut Random) -> bool {
    result_buffer(p, r, |role| &mut role.loss)
}

fn norm_buffer(p: &mut Program, r: &mut Random) -> bool {
    result_buffer(p, r, |role| &mut role.grad_norm)
}
