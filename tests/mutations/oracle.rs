//! An independent judge of whether two programs compute the same: plays a program on
//! fingerprints.
//!
//! Memory is a map from bytes to fingerprints; a write destroys whatever it overlaps. A
//! tensor's fingerprint is made of the op and its operands' fingerprints and specs, so equal
//! results mean equal dataflow. Roles play serially under rendezvous. What the streams may
//! reorder must not conflict; that is checked pair by pair.

use ir::collective::CollectiveKind;
use ir::op::OpKind;
use ir::program::{
    ARENA_ALIGN, BufferClass, Event, InstrKind, Instruction, Program, RoleProgram, Slot, Template,
    TemplateKind, Which,
};
use ir::reshard::LayoutStep;
use ir::{BufferId, DimSharding, InstrId, ShardingSpec, StreamId, TransferId};
use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};

/// Fingerprint of everything a step leaves behind, or why the program is none.
pub fn fingerprint(program: &Program) -> Result<u64, String> {
    for role in &program.roles {
        memory(role)?;
        races(role)?;
    }
    let mut play = Play {
        program,
        roles: Vec::new(),
        sent: BTreeMap::new(),
        awaited: BTreeSet::new(),
        done: BTreeMap::new(),
    };
    for role in &program.roles {
        let mut r = Role {
            role,
            memory: BTreeMap::new(),
            slot: 0,
            instr: 0,
            arrived: false,
        };
        for s in &role.states {
            let spec = role.buffer(s.buffer).spec.clone();
            r.write(s.buffer, None, hash(&("state", &s.path, s.buffer.0)), spec)?;
        }
        play.roles.push(r);
    }
    play.run()?;
    play.result()
}

fn hash(x: &impl Hash) -> u64 {
    let mut h = DefaultHasher::new();
    x.hash(&mut h);
    h.finish()
}

/// Everything inside the arena; exchanged buffers alone on their bytes.
fn memory(role: &RoleProgram) -> Result<(), String> {
    let end = |b: BufferId| {
        role.buffer(b).offset
            + role.buffer(b).stride() * u64::from(role.buffer(b).slots() - 1)
            + role.buffer(b).bytes
    };
    let ids: Vec<BufferId> = (0..role.buffers.len()).map(BufferId::new).collect();
    for &b in &ids {
        let x = role.buffer(b);
        let part = x.spec.local_shape(&x.lens, &role.mesh);
        let shape = x.pieces.map_or(part.clone(), |p| p.shape(&part));
        let bytes = shape.iter().product::<u64>() * x.dtype.bytes();
        if !x.offset.is_multiple_of(ARENA_ALIGN) || end(b) > role.arena_bytes || x.bytes != bytes {
            return Err(format!("buffer {b} is misplaced"));
        }
    }
    let exchanged: BTreeSet<BufferId> = role
        .templates
        .iter()
        .filter(|t| t.kind == TemplateKind::Exchange)
        .flat_map(|t| &t.instructions)
        .flat_map(|i| i.reads().into_iter().chain(i.writes()))
        .collect();
    // Exchanges run beside other templates; step buffers live through all of them.
    let alone = |b: BufferId| {
        exchanged.contains(&b)
            || matches!(
                role.buffer(b).class,
                BufferClass::Step | BufferClass::Persistent
            )
    };
    for &a in ids.iter().filter(|&&a| alone(a)) {
        if let Some(b) = ids
            .iter()
            .find(|&&b| a != b && role.buffer(a).offset < end(b) && role.buffer(b).offset < end(a))
        {
            return Err(format!("buffers {a} and {b} overlap"));
        }
    }
    Ok(())
}

/// Every two instructions of the trace that touch the same bytes, one writing, are ordered.
/// The order is found the long way: for every instruction of every slot, all that come before.
fn races(role: &RoleProgram) -> Result<(), String> {
    let mut nodes: Vec<(usize, InstrId)> = Vec::new();
    // By instruction of the trace, a bit for each that comes before it.
    let mut before: Vec<Vec<u64>> = Vec::new();
    let mut at: BTreeMap<(usize, InstrId), usize> = BTreeMap::new();
    let mut last: BTreeMap<StreamId, usize> = BTreeMap::new();
    for (k, slot) in role.trace.iter().enumerate() {
        let drained = last.clone();
        for (i, instr) in role.template(slot.template).instructions.iter().enumerate() {
            let mut direct: Vec<usize> = Vec::new();
            for d in &instr.deps {
                direct.push(*at.get(&(k, *d)).ok_or("a dep on a later instruction")?);
            }
            for event in &instr.events {
                match event {
                    Event::Drained(stream) => direct.extend(drained.get(stream)),
                    Event::Done {
                        template,
                        instruction,
                        which,
                    } => {
                        let plays = |s: &Slot| match which {
                            _ if s.template != *template => false,
                            Which::Latest => true,
                            Which::Back(n) => match (slot.microbatch, s.microbatch) {
                                (Some(m), Some(e)) => m.checked_sub(*n) == Some(e),
                                _ => false,
                            },
                        };
                        let slot = role.trace[..k].iter().rposition(plays);
                        direct.extend(slot.and_then(|s| at.get(&(s, *instruction))));
                    }
                }
            }
            let node = nodes.len();
            direct.extend(last.insert(instr.stream, node));
            let mut all = vec![0u64; node / 64 + 1];
            for d in direct {
                all.iter_mut()
                    .zip(&before[d])
                    .for_each(|(all, of)| *all |= of);
                all[d / 64] |= 1 << (d % 64);
            }
            nodes.push((k, InstrId::new(i)));
            at.insert((k, InstrId::new(i)), node);
            before.push(all);
        }
    }
    let of = |n: usize| {
        let (k, i) = nodes[n];
        let slot = role.trace[k];
        (
            &role.template(slot.template).instructions[i.index()],
            slot.microbatch,
        )
    };
    for (second, known) in before.iter().enumerate() {
        for first in (0..second).filter(|n| known[n / 64] >> (n % 64) & 1 == 0) {
            if conflict(role, of(first), of(second)) {
                let (a, b) = (nodes[first], nodes[second]);
                return Err(format!(
                    "{} of slot {} and {} of slot {} race",
                    a.1, a.0, b.1, b.0
                ));
            }
        }
    }
    Ok(())
}

fn conflict(
    role: &RoleProgram,
    a: (&Instruction, Option<u32>),
    b: (&Instruction, Option<u32>),
) -> bool {
    let span = |b: BufferId, m: Option<u32>| {
        let from = role.buffer(b).offset_for(m);
        (from, from + role.buffer(b).bytes)
    };
    let meet = |x: BufferId, y: BufferId| {
        let (x, y) = (span(x, a.1), span(y, b.1));
        x.0 < y.1 && y.0 < x.1
    };
    let any = |xs: &[BufferId], ys: &[BufferId]| xs.iter().any(|&x| ys.iter().any(|&y| meet(x, y)));
    let (a, b) = (a.0, b.0);
    any(&a.writes(), &b.reads()) || any(&a.reads(), &b.writes()) || any(&a.writes(), &b.writes())
}

#[derive(Clone, Debug)]
struct Held {
    end: u64,
    print: u64,
    spec: ShardingSpec,
    /// The element type and lengths it was written with.
    ty: u64,
    /// The buffer it was written through.
    owner: BufferId,
}

struct Role<'a> {
    role: &'a RoleProgram,
    memory: BTreeMap<u64, Held>,
    slot: usize,
    instr: usize,
    /// Has come to the present rendezvous.
    arrived: bool,
}

type Key = (TransferId, Option<u32>, usize);

struct Play<'a> {
    program: &'a Program,
    roles: Vec<Role<'a>>,
    sent: BTreeMap<Key, (u64, ShardingSpec)>,
    awaited: BTreeSet<Key>,
    /// How often a role has sent (true) or received a message.
    done: BTreeMap<(usize, bool, TransferId, Option<u32>), usize>,
}

impl Role<'_> {
    fn ty(&self, b: BufferId) -> u64 {
        hash(&(self.role.buffer(b).dtype, &self.role.buffer(b).lens))
    }
    fn read(&self, b: BufferId, m: Option<u32>) -> Result<(u64, ShardingSpec), String> {
        let x = self.role.buffer(b);
        let held = self
            .memory
            .get(&x.offset_for(m))
            .ok_or_else(|| format!("`{}` holds nothing", x.name))?;
        if held.end != x.offset_for(m) + x.bytes
            || held.ty != self.ty(b)
            || held.spec.dims != x.spec.dims
        {
            return Err(format!("`{}` holds something else", x.name));
        }
        Ok((held.print, held.spec.clone()))
    }
    fn write(
        &mut self,
        b: BufferId,
        m: Option<u32>,
        print: u64,
        spec: ShardingSpec,
    ) -> Result<(), String> {
        let x = self.role.buffer(b);
        if spec.dims != x.spec.dims {
            return Err(format!("`{}` gets another spec", x.name));
        }
        let (start, end) = (x.offset_for(m), x.offset_for(m) + x.bytes);
        self.memory.retain(|&s, held| held.end <= start || end <= s);
        let ty = self.ty(b);
        self.memory.insert(
            start,
            Held {
                end,
                print,
                spec,
                ty,
                owner: b,
            },
        );
        Ok(())
    }
    fn end_template(&mut self, t: &Template) {
        for b in t
            .instructions
            .iter()
            .flat_map(|i| i.reads().into_iter().chain(i.writes()))
        {
            if self.role.buffer(b).class == BufferClass::Transient {
                self.memory.retain(|_, held| held.owner != b);
            }
        }
    }
}

impl<'a> Play<'a> {
    fn run(&mut self) -> Result<(), String> {
        loop {
            let mut moved = false;
            for i in 0..self.roles.len() {
                while self.advance(i)? {
                    moved = true;
                }
            }
            moved |= self.world_sum()?;
            if !moved {
                break;
            }
        }
        match self.roles.iter().position(|r| r.slot < r.role.trace.len()) {
            Some(i) => Err(format!("stage {i} hangs in slot {}", self.roles[i].slot)),
            None => Ok(()),
        }
    }

    fn next(&mut self, i: usize) -> Option<(&'a Instruction, TemplateKind, Option<u32>)> {
        let r = &mut self.roles[i];
        loop {
            let slot = *r.role.trace.get(r.slot)?;
            let template: &'a Template = &r.role.templates[slot.template.index()];
            if let Some(instr) = template.instructions.get(r.instr) {
                return Some((instr, template.kind, slot.microbatch));
            }
            r.end_template(template);
            r.slot += 1;
            r.instr = 0;
        }
    }

    fn advance(&mut self, i: usize) -> Result<bool, String> {
        let Some((instr, _, m)) = self.next(i) else {
            return Ok(false);
        };
        match &instr.kind {
            InstrKind::Exchange { sends, recvs } => {
                if !self.exchange(i, sends, recvs, m)? {
                    return Ok(false);
                }
            }
            InstrKind::WorldSum { .. } => return Ok(false),
            kind => local(&mut self.roles[i], kind, m)?,
        }
        self.roles[i].instr += 1;
        self.roles[i].arrived = false;
        Ok(true)
    }

    fn exchange(
        &mut self,
        i: usize,
        sends: &[(TransferId, BufferId)],
        recvs: &[(TransferId, BufferId)],
        m: Option<u32>,
    ) -> Result<bool, String> {
        let count =
            |done: &BTreeMap<_, usize>, send, x| done.get(&(i, send, x, m)).copied().unwrap_or(0);
        if !self.roles[i].arrived {
            self.roles[i].arrived = true;
            for &(x, b) in sends {
                let t = &self.program.transfers[x.index()];
                let (print, spec) = self.roles[i].read(b, m)?;
                let buffer = self.roles[i].role.buffer(b);
                if t.from.index() != i
                    || spec != t.from_spec
                    || buffer.lens != t.lens
                    || buffer.dtype != t.dtype
                {
                    return Err(format!("stage {i} sends `{}` wrongly", t.value));
                }
                self.sent.insert(
                    (x, m, count(&self.done, true, x)),
                    (print, t.to_spec.clone()),
                );
            }
            for &(x, b) in recvs {
                let (t, buffer) = (
                    &self.program.transfers[x.index()],
                    self.roles[i].role.buffer(b),
                );
                if t.to.index() != i || buffer.lens != t.lens || buffer.dtype != t.dtype {
                    return Err(format!("stage {i} receives `{}` wrongly", t.value));
                }
                self.awaited.insert((x, m, count(&self.done, false, x)));
            }
        }
        let met = sends.iter().all(|s| {
            self.awaited
                .contains(&(s.0, m, count(&self.done, true, s.0)))
        }) && recvs.iter().all(|r| {
            self.sent
                .contains_key(&(r.0, m, count(&self.done, false, r.0)))
        });
        if !met {
            return Ok(false);
        }
        for &(x, b) in recvs {
            let (print, spec) = self.sent[&(x, m, count(&self.done, false, x))].clone();
            self.roles[i].write(b, m, print, spec)?;
        }
        for (send, parts) in [(true, sends), (false, recvs)] {
            parts
                .iter()
                .for_each(|p| *self.done.entry((i, send, p.0, m)).or_insert(0) += 1);
        }
        Ok(true)
    }

    fn world_sum(&mut self) -> Result<bool, String> {
        let mut all = Vec::new();
        for i in 0..self.roles.len() {
            match self.next(i) {
                Some((
                    Instruction {
                        kind: InstrKind::WorldSum { inputs, output },
                        ..
                    },
                    _,
                    m,
                )) => all.push((inputs, *output, m)),
                _ => return Ok(false),
            }
        }
        let mut terms: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
        for (i, (inputs, _, m)) in all.iter().enumerate() {
            for &(e, b) in *inputs {
                let (print, spec) = self.roles[i].read(b, *m)?;
                if !spec.is_replicated() {
                    return Err("a term of the world sum is not whole".into());
                }
                terms.entry(e).or_default().push(print);
            }
        }
        for (i, (_, output, m)) in all.into_iter().enumerate() {
            let spec = self.roles[i].role.buffer(output).spec.clone();
            self.roles[i].write(output, m, hash(&("world", &terms)), spec)?;
            self.roles[i].instr += 1;
        }
        Ok(true)
    }

    fn result(&self) -> Result<u64, String> {
        let mut all = Vec::new();
        for r in &self.roles {
            for s in &r.role.states {
                let held = r.read(s.buffer, None)?;
                if held.1 != r.role.buffer(s.buffer).spec {
                    return Err(format!("`{}` is kept in another spec", s.path));
                }
                all.push((s.path.clone(), s.buffer.0, held));
            }
            for (name, b) in [("loss", r.role.loss), ("norm", r.role.grad_norm)] {
                if let Some(b) = b {
                    all.push((name.into(), 0, r.read(b, None)?));
                }
            }
        }
        Ok(hash(&all))
    }
}

fn local(r: &mut Role, kind: &InstrKind, m: Option<u32>) -> Result<(), String> {
    match kind {
        InstrKind::Compute {
            kind,
            inputs,
            outputs,
            ..
        } => compute(r, kind, inputs, outputs, m),
        InstrKind::Collective {
            kind, axes, items, ..
        } => {
            let mut results = Vec::new();
            for item in items {
                let (print, before) = r.read(item.input, m)?;
                if item.step.axes() != *axes || item.step.collective(&before) != Some(*kind) {
                    return Err("a collective is not its step".into());
                }
                if item.input == item.output && !matches!(kind, CollectiveKind::AllReduce(_)) {
                    return Err("a collective destroys its operand".into());
                }
                let mut spec = item.step.apply(&before).ok_or("a step does not apply")?;
                let mut print = print;
                if matches!(
                    (&item.step, kind),
                    (LayoutStep::AllReduce { .. }, CollectiveKind::AllGather)
                ) {
                    spec.dims.insert(0, DimSharding::whole());
                    print = hash(&("members", print, axes));
                }
                results.push((item.output, print, spec));
            }
            results
                .into_iter()
                .try_for_each(|(b, print, spec)| r.write(b, m, print, spec))
        }
        InstrKind::Slice {
            step,
            input,
            output,
        } => {
            let (print, before) = r.read(*input, m)?;
            if !matches!(step, LayoutStep::Slice { .. }) {
                return Err("a slice is no slice".into());
            }
            let after = step.apply(&before).ok_or("a step does not apply")?;
            r.write(*output, m, print, after)
        }
        InstrKind::Load { kind, output } => {
            let spec = r.role.buffer(*output).spec.clone();
            r.write(*output, m, hash(&("load", kind, m)), spec)
        }
        InstrKind::Fill { value, output } => {
            let spec = r.role.buffer(*output).spec.clone();
            r.write(*output, m, hash(&("fill", value.to_bits())), spec)
        }
        InstrKind::Copy { input, output } => {
            let (print, spec) = r.read(*input, m)?;
            r.write(*output, m, print, spec)
        }
        InstrKind::Exchange { .. } | InstrKind::WorldSum { .. } => unreachable!("played together"),
    }
}

fn compute(
    r: &mut Role,
    kind: &OpKind,
    inputs: &[BufferId],
    outputs: &[BufferId],
    m: Option<u32>,
) -> Result<(), String> {
    let mut operands = Vec::new();
    for &b in inputs {
        let (print, spec) = r.read(b, m)?;
        operands.push((print, spec, r.ty(b)));
    }
    let specs: Vec<(ShardingSpec, u64)> = outputs
        .iter()
        .map(|&b| (r.role.buffer(b).spec.clone(), r.ty(b)))
        .collect();
    let print = hash(&(format!("{kind:?}"), &operands, &specs));
    if let OpKind::Accumulate { .. } = kind {
        let (old, spec) = r.read(outputs[0], m)?;
        // Commutative: the order of microbatches is free.
        return r.write(outputs[0], m, old.wrapping_add(print | 1), spec);
    }
    for (k, (&b, (spec, _))) in outputs.iter().zip(specs).enumerate() {
        r.write(b, m, hash(&(print, k)), spec)?;
    }
    Ok(())
}
