//! Random small forward graphs for the property tests of all crates.
//!
//! A graph is a function of seed and options. Its layers are `embed`, `h.0`, `h.1`, .., `head`;
//! activations between blocks are `f32[B, S, H]`; parameters are `State` ops beside their
//! use; `outputs[0]` is the loss, an f32 scalar. Every op is live and `verify` finds nothing.
//!
//! Two families:
//! * **general** ends in `LogSumExp`, `CrossEntropy` and a sum, and uses every op kind that
//!   has a place in a forward graph;
//! * **integer-linear** uses only ops that map integers to integers and are linear in each
//!   operand. With parameters in {-1, 0, 1} and at most [`MAX_SAMPLES`] samples, every value
//!   and every gradient is an integer of magnitude at most 2^24, so f32 arithmetic is exact
//!   in any order and sharded execution can be compared for equality.

mod blocks;
mod linear;

use crate::op::Init;
use crate::{
    DType, Dim, Graph, LayerId, OpKind, Pass, Place, Region, Shape, TensorType, ValueId, op,
};

/// Samples per step up to which integer-linear graphs stay exact.
pub const MAX_SAMPLES: u64 = 8;

/// The size and content of a [`random_graph`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphOptions {
    /// Integer-linear instead of general.
    pub integer_linear: bool,
    /// Dropout may occur (general graphs only).
    pub dropout: bool,
    /// `Reduce` by max may occur (general graphs only).
    pub reduce_max: bool,
    /// Mixtures of experts may occur (general graphs only). A choice of experts is a jump, so
    /// that graphs with them are not compared where values round differently.
    pub experts: bool,
    /// Convolutions, pooling and group norms may occur (general graphs only).
    pub images: bool,
    /// State spaces behind causal convolutions may occur (general graphs only).
    pub state_spaces: bool,
    /// Number of layers between `embed` and `head`.
    pub n_layers: usize,
    /// These layers are equal.
    pub equal_layers: bool,
    /// Blocks (attention, MLP, ...) per layer.
    pub blocks_per_layer: usize,
}

impl Default for GraphOptions {
    fn default() -> Self {
        GraphOptions {
            integer_linear: false,
            dropout: false,
            reduce_max: false,
            experts: false,
            images: false,
            state_spaces: false,
            n_layers: 2,
            equal_layers: false,
            blocks_per_layer: 2,
        }
    }
}

/// The graph of this seed.
pub fn random_graph(seed: u64, options: &GraphOptions) -> Graph {
    let mut b = Builder::new(seed, options);
    let embed = b.start_layer("embed");
    debug_assert_eq!(embed.index(), 0);
    let mut x = b.embed();
    let seed_of_layers = b.rng.next();
    for i in 0..options.n_layers {
        b.start_layer(&format!("h.{i}"));
        let salt = if options.equal_layers { 0 } else { i as u64 };
        b.rng = Rng::new(seed_of_layers.wrapping_add(salt));
        b.start_period(x);
        for _ in 0..options.blocks_per_layer {
            x = if options.integer_linear {
                b.linear_block(x)
            } else {
                b.block(x)
            };
        }
    }
    b.rng = Rng::new(seed_of_layers.wrapping_mul(31));
    b.start_layer("head");
    let loss = if options.integer_linear {
        b.linear_head(x)
    } else {
        b.head(x)
    };
    b.graph.outputs = vec![loss];
    b.graph
}

/// Length of the sequences that a graph is made for, which a `TrainSpec` has to repeat.
pub fn sequence_of(graph: &Graph) -> Option<u64> {
    let input = graph
        .ops()
        .iter()
        .find(|op| matches!(op.kind, OpKind::Input { .. }))?;
    match graph.ty(input.outputs[0]).shape.0[..] {
        [_, Dim::Fixed(n)] => Some(n),
        _ => None,
    }
}

/// SplitMix64 (Steele, Lea & Flood 2014): small, and the same on every machine.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The generator of this seed.
    pub fn new(seed: u64) -> Self {
        Rng(seed)
    }
    /// The next 64 bits.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// A number below `n`, which is positive.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
    /// A number of the range, ends included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }
    /// True once in `n` times.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
    /// One of the items.
    pub fn pick<T: Clone>(&mut self, items: &[T]) -> T {
        items[self.below(items.len() as u64) as usize].clone()
    }
    /// Puts the items into a random order (Fisher-Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u64 + 1) as usize);
        }
    }
}

/// The graph under construction.
struct Builder {
    graph: Graph,
    rng: Rng,
    options: GraphOptions,
    layer: LayerId,
    scope: String,
    /// Ops so far in the layer, for their paths.
    n_ops: usize,
    /// Sequence length, hidden size, vocabulary.
    sequence: u64,
    hidden: u64,
    vocab: u64,
    /// Token ids and the embedding table.
    tokens: Option<ValueId>,
    table: Option<ValueId>,
    /// Integer-linear only: largest magnitude of each value's elements for parameters in
    /// {-1, 0, 1}, by value index; 0 where it is not known.
    bounds: Vec<u64>,
}

impl Builder {
    fn new(seed: u64, options: &GraphOptions) -> Self {
        let mut rng = Rng::new(seed);
        Builder {
            graph: Graph::new(format!("random-{seed}")),
            options: *options,
            layer: LayerId::new(0),
            scope: String::new(),
            n_ops: 0,
            sequence: rng.between(2, 8),
            hidden: rng.pick(&[3, 4, 5, 6, 8]),
            vocab: rng.between(5, 13),
            rng,
            tokens: None,
            table: None,
            bounds: Vec::new(),
        }
    }
    fn start_layer(&mut self, name: &str) -> LayerId {
        self.layer = self.graph.add_layer(name);
        self.scope = name.to_string();
        self.n_ops = 0;
        self.layer
    }
    fn path(&mut self, what: &str) -> String {
        self.n_ops += 1;
        format!("{}.{what}_{}", self.scope, self.n_ops)
    }

    /// A forward op; all its results.
    fn ops(&mut self, kind: OpKind, inputs: &[ValueId]) -> Vec<ValueId> {
        let path = self.path(kind.name());
        let place = Place::forward(path, self.layer);
        self.graph
            .add(kind, inputs, place)
            .expect("the generator keeps the shape rules")
    }
    /// A forward op; its first result.
    fn op(&mut self, kind: OpKind, inputs: &[ValueId]) -> ValueId {
        self.ops(kind, inputs)[0]
    }
    fn input(&mut self, kind: op::InputKind) -> ValueId {
        let path = self.path(if kind == op::InputKind::Tokens {
            "tokens"
        } else {
            "labels"
        });
        let place = Place::forward(path, self.layer);
        let ty = TensorType::new(DType::I32, Shape::batched(&[self.sequence]));
        self.graph
            .add_source(OpKind::Input { kind }, ty, place)
            .expect("an input of two dims")
    }
    /// A parameter, normal unless `init` says otherwise.
    fn param_init(&mut self, shape: &[u64], init: Init) -> ValueId {
        let kind = OpKind::State {
            init,
            decay: shape.len() >= 2,
        };
        let place = Place {
            path: self.path("param"),
            pass: Pass::Update,
            region: Region::StepBegin,
            layer: Some(self.layer),
        };
        let ty = TensorType::new(DType::F32, Shape::fixed(shape));
        self.graph
            .add_source(kind, ty, place)
            .expect("a state of floats")
    }
    fn param(&mut self, shape: &[u64]) -> ValueId {
        let init = if self.options.integer_linear {
            Init::Ones
        } else {
            Init::Normal { std: 0.3 }
        };
        self.param_init(shape, init)
    }
    fn dims(&self, v: ValueId) -> Vec<Dim> {
        self.graph.ty(v).shape.0.clone()
    }
    fn unary(&mut self, f: op::Unary, x: ValueId) -> ValueId {
        self.op(OpKind::Unary { f }, &[x])
    }
    fn binary(&mut self, f: op::Binary, a: ValueId, b: ValueId) -> ValueId {
        self.op(OpKind::Binary { f }, &[a, b])
    }
    fn reshape(&mut self, x: ValueId, rest: &[u64]) -> ValueId {
        self.op(
            OpKind::Reshape {
                shape: Shape::batched(rest).0,
            },
            &[x],
        )
    }
    fn transpose(&mut self, x: ValueId, perm: &[usize]) -> ValueId {
        self.op(
            OpKind::Transpose {
                perm: perm.to_vec(),
            },
            &[x],
        )
    }
    fn einsum(&mut self, text: &str, a: ValueId, b: ValueId) -> ValueId {
        let einsum = op::Einsum::parse(text).expect("the generator writes well-formed einsums");
        self.op(OpKind::DotGeneral { einsum }, &[a, b])
    }

    /// Tokens and their rows of the table.
    fn embed(&mut self) -> ValueId {
        let tokens = self.input(op::InputKind::Tokens);
        let table = self.param(&[self.vocab, self.hidden]);
        (self.tokens, self.table) = (Some(tokens), Some(table));
        self.op(OpKind::Embedding, &[table, tokens])
    }
}

/// A random einsum of `x` with a parameter that keeps the first label `b` first: labels and
/// dims of the parameter, and labels of the result. `contracted` of `labels` disappear,
/// `fresh` labels come in; some of the kept ones become batch dims of both operands.
fn random_weight(
    rng: &mut Rng,
    kept: &[u8],
    contracted: &[u8],
    fresh: &[u8],
) -> (Vec<u8>, Vec<u8>) {
    let shared = kept.iter().copied().filter(|_| rng.one_in(4));
    let mut weight: Vec<u8> = shared
        .chain(contracted.iter().chain(fresh).copied())
        .collect();
    rng.shuffle(&mut weight);
    let mut rest: Vec<u8> = kept.iter().chain(fresh).copied().collect();
    rng.shuffle(&mut rest);
    let out = std::iter::once(b'b').chain(rest).collect();
    (weight, out)
}
