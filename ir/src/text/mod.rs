//! Text form of a graph, printed and parsed without loss; [`program`] has that of programs.
//!
//! ```text
//! graph "tiny" {
//!   layers "embed", "h.{i}" from 0 to 11, "head"
//!   %0 = input {kind: tokens} : i32[B,8] @ tokens F microbatch layer 0
//!   %1 = state {decay: true, init: {normal: {std: 0.02}}} : f32[50,4] @ embed.weight Update step_begin layer 0
//!   %2 = embedding %1, %0 : f32[B,8,4] @ embed.out F microbatch layer 0
//!   repeat 12 as "h.{i}" from 0 (%prev0 = %2 then %4) {
//!     %3 = state {decay: true, init: ones} : f32[4,4] @ h.{i}.weight Update step_begin
//!     %4 = dot_general {einsum: "bsh,hf->bsf"} %prev0, %3 : f32[B,8,4] @ h.{i}.out F microbatch
//!   }
//!   %27 = reduce {dims: [0, 1, 2], kind: sum} %26 : f32[] @ head.loss F microbatch layer 13
//!   return %27
//! }
//! ```
//!
//! One op per line: results, op, attributes, operands, result types, path, pass, region, and
//! the layer (`world` for none). `//` starts a comment. Attributes are what serde makes of
//! the `OpKind`, so that a new op needs nothing here; `<B,8,4>` is a list of dims. Values
//! are numbered in the order of definition; a hand-written text may name them (`%x`).
//! Behind the region of an op that is not the model's stands its [`Origin`]: `boundary`,
//! `twin of %3`, `gradient 1 of %3`; `%3` is the first result of the op that it was made for.
//!
//! **A text without `layers`** may leave `layer n` out: its ops, those of `repeat` bodies too,
//! then belong to one layer called `all`. The planner cuts such a graph into layers.
//!
//! **Equal layers are written once.** `repeat n as "h.{i}" from a [down]` stands for `n`
//! copies of its body, `{i}` being `a`, `a + 1`, ... (`down`: `a - 1`, ...) in paths and
//! attribute strings; the ops belong to the layers of those names. The body is written as
//! its first copy. In copy `k` a value of the body means copy `k`'s own, a value from before
//! the body itself; `%v[+s]` means value `v + k*s`, and `(%x = %a then %b)` declares `%x`,
//! which is `%a` in the first copy and the previous copy's `%b` in the others. Numbers after
//! the body count all copies; a name given in the body then means its last copy's value.
//!
//! Invariants:
//! * `parse(&print(g)) == g` for every graph within the limits below whose attributes are
//!   finite numbers and whose layers and outputs exist (`verify` reports the others);
//! * `print(&parse(t)) == t` for every `t` that `print` made;
//! * `parse` builds with [`Graph::add`], so that what it returns is well-typed, and the types
//!   in the text are those inferred;
//! * `parse` neither panics nor recurses deeply, and its time and memory are bounded by the
//!   limits.

mod attributes;
mod fold;
mod parse;
mod print;
pub mod program;
mod repeat;
mod scan;

pub use parse::parse;
pub use print::print;

use crate::{Graph, OpId, Origin, Pass, Region};

/// Most ops of a parsed graph, repeats expanded.
pub const MAX_OPS: usize = 1 << 20;
/// Most layers of a parsed graph.
pub const MAX_LAYERS: usize = 1 << 16;
/// Most dims of a tensor in a parsed graph.
pub const MAX_RANK: usize = 255;
/// Most bytes of text that a parsed graph stands for, repeats expanded.
pub const MAX_EXPANDED_BYTES: u64 = 1 << 28;

/// Why a text is not a graph, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{line}:{column}: {message}")]
pub struct ParseError {
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// First byte of the offending text.
    pub start: usize,
    /// Bytes of the offending text; 0 at the end of the text.
    pub len: usize,
    /// The problem.
    pub message: String,
    /// A text to write instead, where one is known.
    pub help: Option<String>,
}

impl std::fmt::Display for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&print(self))
    }
}

impl std::str::FromStr for Graph {
    type Err = ParseError;
    fn from_str(text: &str) -> Result<Self, ParseError> {
        parse(text)
    }
}

/// The layer of a text that declares none.
const ONLY_LAYER: &str = "all";

const PASSES: [(Pass, &str); 5] = [
    (Pass::F, "F"),
    (Pass::BI, "BI"),
    (Pass::BW, "BW"),
    (Pass::Recompute, "Recompute"),
    (Pass::Update, "Update"),
];

const REGIONS: [(Region, &str); 3] = [
    (Region::StepBegin, "step_begin"),
    (Region::Microbatch, "microbatch"),
    (Region::StepEnd, "step_end"),
];

/// The origins as text names them, each with whether it has a number and an op.
fn origins() -> impl Iterator<Item = (&'static str, bool, bool)> {
    let all = Origin::all(OpId(0), 0).into_iter();
    all.map(|o| (o.name().0, o.name().1.is_some(), o.of().is_some()))
}

/// The place of the number in a name or path inside a `repeat`.
const HOLE: &str = "{i}";

/// The word of a value.
fn word_of<T: PartialEq>(value: T, known: &[(T, &'static str)]) -> &'static str {
    known
        .iter()
        .find(|(v, _)| *v == value)
        .map_or("", |(_, word)| word)
}
