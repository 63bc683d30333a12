//! Gathers of parameters go ahead of reductions.
//!
//! A stream of collectives is a queue. In a backward pass the gather for one product stands behind
//! the reduction of the gradient before it, and waits with it for the kernel that makes that
//! gradient:
//!
//! ```text
//! kernels      make g | use w            make g | use w
//! collectives  .......| reduce g, gather w      | reduce g       list order: w is waited for
//! collectives  gather w | reduce g                               w goes ahead: it is there in time
//! ```
//! So such a gather stands before that reduction in the list. It goes ahead of one reduction, no
//! more: its results take memory from there on.

use ir::BufferId;
use ir::collective::CollectiveKind;
use ir::program::{BufferClass, InstrKind, Instruction, RoleProgram};

/// The instructions of a template with gathers of parameters ahead of the reductions before them;
/// none where all stand so already. Done twice it changes nothing.
pub(crate) fn gathers_ahead(program: &RoleProgram, template: usize) -> Option<Vec<Instruction>> {
    let all = &program.templates[template].instructions;
    let mut touches = Touches::new(program.buffers.len());
    // By stream, its last reduction of what the template makes.
    let mut reduction: Vec<Option<usize>> = vec![None; program.streams.len()];
    // Where gathers go, in the order of the list, each from behind.
    let mut moves: Vec<(usize, usize)> = Vec::new();
    for (i, instruction) in all.iter().enumerate() {
        if let InstrKind::Collective { kind, .. } = &instruction.kind {
            let stream = instruction.stream.index();
            let is_made_here = instruction.reads().iter().any(|&b| touches.is_written(b));
            match kind {
                CollectiveKind::AllReduce(_) | CollectiveKind::ReduceScatter(_) if is_made_here => {
                    reduction[stream] = Some(i);
                }
                // What the forward pass kept is gathered when it is needed: whoever waits for its
                // reduction may wait for a gradient that everything else waits for.
                CollectiveKind::AllGather if !is_made_here && rests(program, instruction) => {
                    let results = instruction.writes();
                    let is_free = |to: &usize| results.iter().all(|&b| !touches.since(b, *to));
                    // A reduction before its first use is one that it is ahead of.
                    let behind = all.iter().enumerate().skip(i + 1);
                    let is_used =
                        |other: &Instruction| other.reads().iter().any(|b| results.contains(b));
                    let is_ahead = |other: &Instruction| {
                        other.stream == instruction.stream && is_reduction(&other.kind)
                    };
                    let mut behind = behind.map(|(_, other)| other);
                    let next = behind.find(|other| is_used(other) || is_ahead(other));
                    let waits = next.is_some_and(is_used);
                    let to = reduction[stream].filter(is_free).filter(|_| waits);
                    moves.extend(to.map(|to| (i, to)));
                }
                _ => {}
            }
        }
        touches.add(i, instruction);
    }
    (!moves.is_empty()).then(|| moved(all, &moves))
}

/// Whether an instruction reads what is there for the whole step, as parameters are and activations
/// are not.
fn rests(program: &RoleProgram, instruction: &Instruction) -> bool {
    let class = |b: &BufferId| program.buffer(*b).class;
    let is_the_steps = |b| matches!(class(b), BufferClass::Persistent | BufferClass::Step);
    instruction.reads().iter().all(is_the_steps)
}

fn is_reduction(kind: &InstrKind) -> bool {
    let InstrKind::Collective { kind, .. } = kind else {
        return false;
    };
    matches!(
        kind,
        CollectiveKind::AllReduce(_) | CollectiveKind::ReduceScatter(_)
    )
}

/// Which instructions of a template touched a buffer.
struct Touches {
    last: Vec<Option<usize>>,
    is_written: Vec<bool>,
}

impl Touches {
    fn new(n_buffers: usize) -> Touches {
        Touches {
            last: vec![None; n_buffers],
            is_written: vec![false; n_buffers],
        }
    }

    fn is_written(&self, b: BufferId) -> bool {
        self.is_written[b.index()]
    }

    /// Whether anything touched a buffer from instruction `from` on.
    fn since(&self, b: BufferId, from: usize) -> bool {
        self.last[b.index()].is_some_and(|last| last >= from)
    }

    fn add(&mut self, i: usize, instruction: &Instruction) {
        for b in instruction.writes() {
            self.is_written[b.index()] = true;
            self.last[b.index()] = Some(i);
        }
        for b in instruction.reads() {
            self.last[b.index()] = Some(i);
        }
    }
}

/// The instructions with each of `moves` (from, to) before the one at `to`, in their order.
fn moved(all: &[Instruction], moves: &[(usize, usize)]) -> Vec<Instruction> {
    let mut before: Vec<Vec<usize>> = vec![Vec::new(); all.len()];
    let mut is_moved = vec![false; all.len()];
    for &(from, to) in moves {
        before[to].push(from);
        is_moved[from] = true;
    }
    let order = before.iter().enumerate().flat_map(|(i, ahead)| {
        let own = (!is_moved[i]).then_some(i);
        ahead.iter().copied().chain(own)
    });
    order.map(|i| all[i].clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A template in which kernels make gradients `g1` and `g2`, which are reduced, and a weight
    /// `w2` is gathered for the second; `more` stands in its middle.
    fn backward(more: &[&str]) -> RoleProgram {
        let before = [
            "fill 1.0 -> buf2 [kernels BW layer0]",
            "reduce_scatter sum in f32 fixed over data: buf2 -> buf3 (dim 0) [collectives over data BW layer0]",
        ];
        let behind = [
            "accumulate {dtype: f32} buf1 -> buf4 @ use [kernels BW layer0]",
            "reduce_scatter sum in f32 fixed over data: buf4 -> buf5 (dim 0) [collectives over data BW layer0]",
        ];
        let lines = before.iter().chain(more).chain(&behind).enumerate();
        let lines: Vec<String> = lines.map(|(i, line)| format!("i{i} {line}")).collect();
        let text = format!(
            "program {{
  microbatches 1 of 2 samples
  mesh stage0 rank0: data 2
  role stage0 {{
    arena 4096 bytes
    streams kernels, collectives over data
    buffers {{
      buf0 w2.shard f32[4] [data] persistent @0 8 bytes
      buf1 w2 f32[4] [_] transient @256 16 bytes
      buf2 g1 f32[4] [_] partial(data: sum) transient @512 16 bytes
      buf3 g1.shard f32[4] [data] transient @768 8 bytes
      buf4 g2 f32[4] [_] partial(data: sum) transient @1024 16 bytes
      buf5 g2.shard f32[4] [data] transient @1280 8 bytes
      buf6 made f32[4] [data] transient @1536 8 bytes
    }}
    template B0 {{
      {}
    }}
    trace {{
      B0:0
    }}
  }}
}}
",
            lines.join("\n      ")
        );
        let program = ir::text::program::parse(&text).unwrap_or_else(|e| panic!("{e}"));
        program.roles.into_iter().next().expect("it has a role")
    }

    fn kinds(all: &[Instruction]) -> Vec<&'static str> {
        let kind = |i: &Instruction| match &i.kind {
            InstrKind::Collective { kind, .. } if *kind == CollectiveKind::AllGather => "gather",
            InstrKind::Collective { .. } => "reduce",
            _ => "kernel",
        };
        all.iter().map(kind).collect()
    }

    /// The gather of `w2`, and what makes what it could read or writes its bytes.
    const GATHER: &str =
        "all_gather over data: buf0 -> buf1 (dim 0) [collectives over data BI layer0]";

    #[test]
    fn a_gather_goes_ahead_of_one_reduction_once() {
        let mut role = backward(&[GATHER]);
        let ahead = gathers_ahead(&role, 0).expect("the gather moves");
        let expected = ["kernel", "gather", "reduce", "kernel", "reduce"];
        assert_eq!(kinds(&ahead), expected);
        role.templates[0].instructions = ahead;
        assert_eq!(gathers_ahead(&role, 0), None);
    }

    #[test]
    fn what_is_made_here_or_whose_bytes_are_used_stays() {
        let of_made =
            "all_gather over data: buf6 -> buf1 (dim 0) [collectives over data BI layer0]";
        let made = ["fill 1.0 -> buf6 [kernels BI layer0]", of_made];
        let used = ["fill 1.0 -> buf1 [kernels BI layer0]", GATHER];
        for more in [made, used] {
            assert_eq!(gathers_ahead(&backward(&more), 0), None, "{more:?}");
        }
    }
}
