//! Which ranks are promised the same bits of what they keep.
//!
//! Where sums have a fixed order, all that keep the same part of a state are: they compute the same
//! from the same. A library promises less ([`Order::Library`]): a sum has the same bits for the
//! members of its group alone. Other groups that add up the same operands may round otherwise, and
//! so may all that is made of their sums, until a collective brings the groups' values together.
//!
//! So every value *varies* along some axes of its mesh: ranks at the same place along these that
//! hold the same part of it are promised the same bits. A library's sum over some axes varies along
//! all others; moves and sums of a fixed order over some axes vary along those others along which
//! their operands do; results of kernels vary as all their operands together. Along axes that shard
//! a value its parts are other ones, so nothing is said of them. States begin alike, and vary as
//! they do after the steps: what varies is carried from step to step until nothing is added.
//!
//! With a mesh of `data` and `tensor`, a gain that all ranks keep varies along `tensor`, as its
//! gradient is summed over `data` by each of the groups that differ along `tensor`. A rank is
//! compared with those of its own group.

use ir::collective::{CollectiveKind, Order};
use ir::program::{InstrKind, Program, RoleProgram};
use ir::{AxisId, BufferId, Rank};

/// Axes of a mesh, a bit each.
type Axes = u64;

/// The places that ranks have to share to be promised the same bits of a state: none where all are.
pub(super) struct Promised<'a> {
    program: &'a Program,
    /// By role and buffer, of copy 0; none where all sums have a fixed order.
    varies: Option<Vec<Vec<Axes>>>,
}

impl<'a> Promised<'a> {
    pub fn by(program: &'a Program) -> Self {
        let varies = by_library(program).then(|| {
            let all = varying(program).into_iter();
            all.map(|role| role.into_iter().map(|copies| copies[0]).collect())
                .collect()
        });
        Promised { program, varies }
    }
    /// The place of a rank, as role and coordinates: of two that keep the same part of a state in
    /// these buffers, those at equal places have the same bits.
    pub fn place(&self, rank: Rank, role: usize, state: BufferId) -> Option<(usize, Vec<u32>)> {
        // Roles sum in groups of their own, so nothing is promised between them.
        let varies = self.varies.as_ref()?[role][state.index()];
        let coords = self.program.roles[role].mesh.coords(rank)?;
        let axes = (0..).map(AxisId::new).zip(coords);
        let along = axes.filter(|(axis, _)| varies & bit(*axis) != 0);
        Some((role, along.map(|(_, at)| at).collect()))
    }
}

/// Says whether any sum has its order from a library.
pub(super) fn by_library(program: &Program) -> bool {
    let templates = program.roles.iter().flat_map(|r| &r.templates);
    templates.flat_map(|t| &t.instructions).any(|i| {
        matches!(&i.kind, InstrKind::Collective { contract, .. }
            if contract.sum.is_some_and(|s| s.order == Order::Library))
    })
}

fn bit(axis: AxisId) -> Axes {
    1 << axis.index()
}

/// The axes along which values vary: by role, buffer and copy.
fn varying(program: &Program) -> Vec<Vec<Vec<Axes>>> {
    let buffers = |role: &RoleProgram| {
        let copies = |b: &ir::program::Buffer| vec![0; b.slots().max(1) as usize];
        role.buffers.iter().map(copies).collect()
    };
    let mut all: Vec<Vec<Vec<Axes>>> = program.roles.iter().map(buffers).collect();
    let mut sent = vec![false; program.transfers.len()];
    loop {
        let before = (all.clone(), sent.clone());
        for (role, held) in program.roles.iter().zip(&mut all) {
            Step {
                role,
                held,
                sent: &mut sent,
            }
            .play();
        }
        // What varied at an earlier step goes on to do so.
        for (now, before) in all.iter_mut().flatten().zip(before.0.iter().flatten()) {
            now.iter_mut().zip(before).for_each(|(now, b)| *now |= b);
        }
        if (&all, &sent) == (&before.0, &before.1) {
            return all;
        }
    }
}

/// One step of a role.
struct Step<'a> {
    role: &'a RoleProgram,
    held: &'a mut Vec<Vec<Axes>>,
    /// Whether the value of a transfer varies on the mesh that sends it.
    sent: &'a mut Vec<bool>,
}

impl Step<'_> {
    fn play(&mut self) {
        let role = self.role;
        for slot in &role.trace {
            for instruction in &role.template(slot.template).instructions {
                let m = slot.microbatch;
                match &instruction.kind {
                    InstrKind::Collective {
                        kind,
                        axes,
                        contract,
                        items,
                    } => {
                        let over = axes.iter().fold(0, |all, a| all | bit(*a));
                        let is_library = contract.sum.is_some_and(|s| s.order == Order::Library);
                        let results: Vec<Axes> = items
                            .iter()
                            .map(|i| match kind {
                                _ if is_library => !over,
                                CollectiveKind::Shift => self.of(i.input, m),
                                _ => self.of(i.input, m) & !over,
                            })
                            .collect();
                        for (item, varies) in items.iter().zip(results) {
                            self.set(item.output, m, varies);
                        }
                    }
                    InstrKind::Exchange { sends, recvs } => {
                        for (x, b) in sends {
                            self.sent[x.index()] |= self.of(*b, m) != 0;
                        }
                        for (x, b) in recvs {
                            // Receivers may have it from any of the senders.
                            let varies = if self.sent[x.index()] { !0 } else { 0 };
                            self.set(*b, m, varies);
                        }
                    }
                    // Each of its entries comes from one rank, so all have the same.
                    InstrKind::WorldSum { output, .. } => self.set(*output, m, 0),
                    _ => {
                        let reads = instruction.reads();
                        let varies = reads.iter().fold(0, |all, b| all | self.of(*b, m));
                        for b in instruction.writes() {
                            self.set(b, m, varies);
                        }
                    }
                }
            }
        }
    }
    fn of(&self, b: BufferId, microbatch: Option<u32>) -> Axes {
        let copy = self.role.buffer(b).copy_for(microbatch);
        self.held[b.index()][copy as usize]
    }
    /// Along axes that shard a value, or that it is partial over, ranks hold other parts of it.
    fn set(&mut self, b: BufferId, microbatch: Option<u32>, varies: Axes) {
        let buffer = self.role.buffer(b);
        let axes = self.role.mesh.axis_ids();
        let whole = axes.filter(|a| buffer.spec.replicates(*a));
        let whole = whole.fold(0, |all, a| all | bit(a));
        let copy = buffer.copy_for(microbatch) as usize;
        self.held[b.index()][copy] = varies & whole;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::text::program::parse;

    /// Two stages of three by two ranks. The first has a gain that all of its ranks keep, a weight
    /// that is split along `tensor`, and what it sends; the second has what it makes of that.
    fn program(reductions: &[&str], order: Order) -> Program {
        let reductions = reductions.iter().enumerate();
        let reductions = reductions.map(|(i, of)| format!("i{i} {of} [kernels Update]\n"));
        let reductions: String = reductions.collect();
        let text = format!(
            "program {{
  microbatches 2 of 3 samples
  mesh stage0 rank0: data 3, tensor 2
  mesh stage1 rank6: data 3, tensor 2
  transfer x0 out f32[6] stage0 [_] to stage1 [_]
  role stage0 {{
    arena 4096 bytes
    streams kernels
    buffers {{
      buf0 gain f32[6] [_] persistent @0 24 bytes
      buf1 weight f32[6] [tensor] persistent @256 12 bytes
      buf2 grad.gain f32[6] [_] partial(data: sum) step @512 24 bytes
      buf3 grad.gain.whole f32[6] [_] step @768 24 bytes
      buf4 grad.weight f32[6] [tensor] partial(data: sum) step @1024 12 bytes
      buf5 grad.gain.part f32[6] [data] step @1280 8 bytes
      buf6 out f32[6] [_] microbatch*1 @1536 24 bytes
    }}
    template F0 {{
      i0 copy buf0 -> buf6 [kernels F]
      i1 accumulate {{dtype: f32}} buf6 -> buf2 @ a [kernels BW]
      i2 accumulate {{dtype: f32}} buf1 -> buf4 @ b [kernels BW]
      i3 exchange send x0 buf6 [kernels F]
    }}
    template end1 {{
      {reductions}
    }}
    trace {{
      F0:0 F0:1
      end1
    }}
    state gain parameter of gain in buf0
    state weight parameter of weight in buf1
  }}
  role stage1 {{
    arena 256 bytes
    streams kernels
    buffers {{
      buf0 made f32[6] [_] persistent @0 24 bytes
    }}
    template F0 {{
      i0 exchange receive x0 buf0 [kernels F]
    }}
    trace {{
      F0:0 F0:1
    }}
    state made parameter of made in buf0
  }}
}}
"
        );
        let mut program = parse(&text).expect("a program");
        program.restate(order);
        program
    }

    /// The coordinates that rank 5, `data` 2 and `tensor` 1 of the first stage, shares with those
    /// of whom the same is promised: of the gain, the weight, and what the second stage has.
    fn shared(reductions: &[&str]) -> [Vec<u32>; 3] {
        let program = program(reductions, Order::Library);
        let promised = Promised::by(&program);
        [(5, 0, 0), (5, 0, 1), (11, 1, 0)].map(|(rank, role, state)| {
            let place = promised.place(Rank(rank), role, BufferId(state));
            let (of, coords) = place.expect("a library sums");
            assert_eq!(of, role);
            coords
        })
    }

    const UPDATE: &str = "binary {f: add} buf0, buf3 -> buf0 @ update";

    #[test]
    fn groups_that_sum_apart_are_not_promised_the_same() {
        let sum = "all_reduce sum in f32 fixed over data: buf2 -> buf3";
        // What is made of the gain is sent, and the receivers may have it from any sender.
        assert_eq!(shared(&[sum, UPDATE]), [vec![1], Vec::new(), vec![2, 1]]);
    }

    #[test]
    fn one_group_of_all_is_promised_the_same() {
        let sum = "all_reduce sum in f32 fixed over data+tensor: buf2 -> buf3";
        assert_eq!(shared(&[sum, UPDATE]), [const { Vec::<u32>::new() }; 3]);
    }

    #[test]
    fn sums_of_parts_are_the_same_again_once_they_are_gathered() {
        let [scatter, sum, gather] = [
            "reduce_scatter sum in f32 fixed over data: buf2 -> buf5 (dim 0)",
            "all_reduce sum in f32 fixed over tensor: buf5 -> buf5",
            "all_gather over data: buf5 -> buf3 (dim 0)",
        ];
        let in_turn = shared(&[scatter, sum, gather, UPDATE]);
        assert_eq!(in_turn, [const { Vec::<u32>::new() }; 3]);
        let without = shared(&[scatter, gather, UPDATE]);
        assert_eq!(without[0], [1]);
        // Each of three groups sums the whole over `tensor`.
        let whole = "all_reduce sum in f32 fixed over data: buf2 -> buf3";
        let again = "all_reduce sum in f32 fixed over tensor: buf3 -> buf3";
        assert_eq!(shared(&[whole, again, UPDATE])[0], [2]);
    }

    #[test]
    fn a_maximum_is_the_same_in_every_group() {
        let max = "all_reduce max over data: buf2 -> buf3";
        let sum = "all_reduce sum in f32 fixed over data+tensor: buf4 -> buf1";
        assert_eq!(shared(&[max, UPDATE, sum])[0], [0; 0]);
    }

    /// The gain varies from the second step on, by what the weight's gradient has from it.
    #[test]
    fn what_varies_is_carried_from_step_to_step() {
        let sum = "all_reduce sum in f32 fixed over data: buf2 -> buf3";
        let late = ["copy buf3 -> buf0", sum];
        assert_eq!(shared(&late)[0], [1]);
    }

    #[test]
    fn a_fixed_order_promises_all_the_same() {
        let sum = "all_reduce sum in f32 library over data: buf2 -> buf3";
        let program = program(&[sum, UPDATE], Order::Fixed);
        assert!(!by_library(&program));
        let promised = Promised::by(&program);
        for rank in 0..6 {
            assert_eq!(promised.place(Rank(rank), 0, BufferId(0)), None);
        }
    }
}
