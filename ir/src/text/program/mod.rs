//! Text form of a program, printed and parsed without loss, and as one rank sees it.
//!
//! ```text
//! program {
//!   microbatches 4 of 2 samples
//!   mesh stage0 rank0: data 2, tensor 2
//!   mesh stage1 rank4: data 2, tensor 2
//!   transfer x0 h.1.out f32[2,8,16] stage0 [data, _, _] to stage1 [data, _, _]
//!   role stage0 {
//!     arena 6144 bytes
//!     streams kernels, collectives over tensor, transfers
//!     buffers {
//!       buf0 h.0.up f32[6,16] [_, tensor] persistent @0 192 bytes
//!       buf1 h.0.fc f32[2,8,16] [data, _, tensor] microbatch*2 @256 256 bytes
//!     }
//!     template F1 {
//!       i4 dot_general {einsum: "bsh,hf->bsf"} buf7, buf0 -> buf1 @ h.0.fc [kernels F layer1 after i3]
//!       i5 all_reduce sum in f32 fixed over tensor: buf2 -> buf2 [collectives over tensor F layer1 after i4]
//!     }
//!     template x3 {
//!       i0 exchange send x0 buf1 [transfers F after i4 of F1:m]
//!     }
//!     trace {
//!       begin0
//!       repeat 4 {
//!         F1:{0+1} x3:{0+1}
//!       }
//!     }
//!     state h.0.up parameter of h.0.up in buf0
//!   }
//! }
//! ```
//!
//! *Names* are those that the checker's messages have: `buf3`, `i7` (instruction 7 of its
//! template), `x0` (transfer), `layer2`, `stage1`, `rank5`; templates are `begin`, `F`, `R`
//! (recomputation), `I` and `W` (gradients of inputs and of weights), `B` (both), `x` or `end`
//! and their number. Numbers count from 0 in the order of the text.
//!
//! *The route* of stages over meshes, `route v`, stands behind the microbatches where it is not
//! the ring.
//!
//! *A buffer* has its name, type and global lengths, spec in the names of its mesh's axes, class
//! (`microbatch*2`: two copies), offset in the arena (`host @256` in that of another memory space
//! than the device's), and the bytes of one copy; behind them, if it is in pieces, their number,
//! length and dim: `in 4 pieces of 2 along dim 1`. A buffer that has its copies by turns with those
//! of other stages names their row, and the line of `turns` that says which copy each microbatch
//! takes: `microbatch*5 row 2 by turn1`.
//!
//! *An instruction* has an operation, operands, `->`, results, for ops the path in the training
//! graph behind `@`, and in brackets its stream, pass, layer, and what it waits for. Ops have
//! attributes as in the text of graphs. A collective that adds states behind `in` the type of the
//! sum and whether its order is `fixed` or the `library`'s; one whose contract states another type
//! of operands than its first buffer has (no correct program's) states that behind `of`. An item of
//! a collective says in parentheses what of its layout step the collective does not say:
//! `(members)` is a gather of partial values, which the op behind it combines. `local_slice` is the
//! step without communication.
//!
//! *Waits* stand behind `after`: `i3` is an instruction of the same slot; `all kernels` is what
//! earlier slots have put on a stream; `i4 of F1` is an instruction of the latest slot that plays
//! template `F1`, `i4 of F1:m` of the one for the same microbatch, and `i4 of F1:m-2` of the one
//! for the microbatch two before.
//!
//! *The trace* has a pass and the exchanges behind it in each line; `F1:0` plays template `F1` for
//! microbatch 0.
//!
//! Rows of lines that differ in numbers, as those of equal layers, are written once
//! ([`repeat`](super::repeat)). Invariants, for programs whose specs are well-formed, whose
//! axes' names are words, whose numbers are finite, whose ids exist, whose streams are each there
//! once, and whose collectives have the kind and axes of their items:
//! * `parse(&print(p)) == p`, and `print(&parse(t)) == t` for every `t` that `print` made;
//! * `parse` does not panic, and takes time and memory in proportion to the text, repeats
//!   expanded, which are bounded.

mod instruction;
mod parse;
mod print;

pub use parse::parse;
pub use print::{print, print_rank};

use crate::collective::Reduction;
use crate::op::InputKind;
use crate::program::{Space, TemplateKind};
use crate::sharding::{ReduceKind, reduce_name};
use crate::training::StateRole;
use std::fmt::Display;

const TEMPLATES: [(TemplateKind, &str); 8] = [
    (TemplateKind::StepBegin, "begin"),
    (TemplateKind::Forward, "F"),
    (TemplateKind::Recompute, "R"),
    (TemplateKind::InputGradient, "I"),
    (TemplateKind::WeightGradient, "W"),
    (TemplateKind::Backward, "B"),
    (TemplateKind::Exchange, "x"),
    (TemplateKind::StepEnd, "end"),
];

/// The spaces that are named; the device's goes without saying.
const OTHER_SPACES: [(Space, &str); 2] = [(Space::Host, "host"), (Space::File, "file")];
const STATES: [(StateRole, &str); 4] = [
    (StateRole::Parameter, "parameter"),
    (StateRole::Moment1, "moment1"),
    (StateRole::Moment2, "moment2"),
    (StateRole::Scalar, "scalar"),
];

/// How an input is called, and how far on it is where that is to be said.
fn input_name(kind: InputKind) -> (&'static str, Option<u32>) {
    match kind {
        InputKind::Tokens => ("tokens", None),
        InputKind::Labels => ("labels", None),
        InputKind::Images => ("images", None),
        InputKind::FurtherTokens { by } => ("further_tokens", Some(by)),
        InputKind::FurtherLabels { by } => ("further_labels", Some(by)),
    }
}

/// The inputs by name; a number follows the name of one that is further on.
const INPUTS: [(InputKind, &str); 5] = [
    (InputKind::Tokens, "tokens"),
    (InputKind::Labels, "labels"),
    (InputKind::Images, "images"),
    (InputKind::FurtherTokens { by: 1 }, "further_tokens"),
    (InputKind::FurtherLabels { by: 1 }, "further_labels"),
];

/// How partial values combine, which may be as no collective does.
fn partials() -> [(ReduceKind, &'static str); 4] {
    use ReduceKind::{LogSumExp, Max, Min, Sum};
    [Sum, Max, Min, LogSumExp].map(|kind| (kind, reduce_name(kind)))
}

fn reductions() -> [(Reduction, &'static str); 3] {
    use Reduction::{Max, Min, Sum};
    [Sum, Max, Min].map(|kind| (kind, kind.name()))
}

/// Items with commas between them.
fn list<T: Display>(items: impl IntoIterator<Item = T>) -> String {
    let items: Vec<String> = items.into_iter().map(|i| i.to_string()).collect();
    items.join(", ")
}
