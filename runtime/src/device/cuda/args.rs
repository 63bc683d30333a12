//! A call of a kernel, as plain data: which one, for which element types, on what.

use ir::DType;

/// Operands of a kernel.
pub(super) const OPERANDS: usize = 8;
/// Results.
pub(super) const RESULTS: usize = 4;
/// Numbers.
pub(super) const NUMBERS: usize = 64;
/// Entries of the table.
pub(super) const TABLE: usize = 128;
/// Threads of a block, unless a kernel has its own number.
pub(super) const THREADS: u32 = 256;
/// Most blocks of kernels whose threads go on to further elements.
const MOST_BLOCKS: u64 = 4096;

/// Bytes of the device's memory: `Span` of the kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Span {
    pub at: u64,
    pub bytes: u64,
}

/// The facts of a step: `Now` of the kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Now {
    /// Learning rate.
    pub lr: f64,
    /// Updates that were made before.
    pub updates: i64,
}

/// The parameter of a launch that makes many calls: `Calls` of the kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Calls {
    /// Their parameters.
    pub args: Span,
    /// Blocks of all calls up to each.
    pub ends: Span,
    /// Number of calls.
    pub n: i64,
    pub now: Now,
}

/// The parameter of every other kernel: `Args` of the kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Args {
    pub x: [Span; OPERANDS],
    pub y: [Span; RESULTS],
    pub n: [i64; NUMBERS],
    pub f: [f64; 8],
    pub table: [f32; TABLE],
    pub now: Now,
}

/// A file of kernels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source {
    pub name: &'static str,
    pub text: &'static str,
}

impl Source {
    const fn new(name: &'static str, text: &'static str) -> Self {
        Source { name, text }
    }
}

/// The text before every file.
pub(super) const PRELUDE: &str = include_str!("kernels/prelude.cuh");
pub(super) const ATTENTION: Source = Source::new(
    "attention.cu",
    concat!(
        include_str!("kernels/scores.cuh"),
        include_str!("kernels/attention.cu")
    ),
);
pub(super) const ATTENTION_TILES: Source = Source::new(
    "attention_tiles.cu",
    concat!(
        include_str!("kernels/mma.cuh"),
        include_str!("kernels/scores.cuh"),
        include_str!("kernels/tiles.cuh"),
        include_str!("kernels/attention_tiles.cu")
    ),
);
pub(super) const ATTENTION_TILES_GRAD: Source = Source::new(
    "attention_tiles_grad.cu",
    concat!(
        include_str!("kernels/mma.cuh"),
        include_str!("kernels/scores.cuh"),
        include_str!("kernels/tiles.cuh"),
        include_str!("kernels/attention_tiles_grad.cu")
    ),
);
pub(super) const CHAIN: Source = Source::new(
    "chain.cu",
    concat!(
        include_str!("kernels/functions.cuh"),
        include_str!("kernels/chain.cu")
    ),
);
pub(super) const ELEMENTWISE: Source = Source::new(
    "elementwise.cu",
    concat!(
        include_str!("kernels/functions.cuh"),
        include_str!("kernels/elementwise.cu")
    ),
);
pub(super) const EMBEDDING: Source =
    Source::new("embedding.cu", include_str!("kernels/embedding.cu"));
pub(super) const EXPERTS: Source = Source::new("experts.cu", include_str!("kernels/experts.cu"));
pub(super) const IMAGES: Source = Source::new("images.cu", include_str!("kernels/images.cu"));
pub(super) const LOSS: Source = Source::new("loss.cu", include_str!("kernels/loss.cu"));
pub(super) const MATMUL: Source = Source::new("matmul.cu", include_str!("kernels/matmul.cu"));
pub(super) const MOVEMENT: Source = Source::new("movement.cu", include_str!("kernels/movement.cu"));
pub(super) const NORM: Source = Source::new("norm.cu", include_str!("kernels/norm.cu"));
pub(super) const REDUCE: Source = Source::new("reduce.cu", include_str!("kernels/reduce.cu"));
pub(super) const ROTARY: Source = Source::new("rotary.cu", include_str!("kernels/rotary.cu"));
pub(super) const UPDATE: Source = Source::new("update.cu", include_str!("kernels/update.cu"));

/// All files.
#[cfg(test)]
pub(super) const SOURCES: [Source; 15] = [
    ATTENTION,
    ATTENTION_TILES,
    ATTENTION_TILES_GRAD,
    CHAIN,
    ELEMENTWISE,
    EMBEDDING,
    EXPERTS,
    IMAGES,
    LOSS,
    MATMUL,
    MOVEMENT,
    NORM,
    REDUCE,
    ROTARY,
    UPDATE,
];

/// How an attention is more than the plain one, each a switch of its kernels (`scores.cuh`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Scores {
    /// Queries look back over a window.
    pub window: bool,
    /// Queries see some blocks of keys.
    pub blocks: bool,
    /// Scores have a cap.
    pub cap: bool,
    /// Scores fall with the distance.
    pub slopes: bool,
    /// Values are not as wide as keys.
    pub values: bool,
    /// The log-sum-exp has a gradient.
    pub lse_gradient: bool,
}

impl Scores {
    /// The switches that are on, by their names.
    fn switches(self) -> impl Iterator<Item = &'static str> {
        let all = [
            ("HAS_WINDOW", self.window),
            ("HAS_BLOCKS", self.blocks),
            ("HAS_CAP", self.cap),
            ("HAS_SLOPES", self.slopes),
            ("HAS_VALUES", self.values),
            ("HAS_LSE_GRADIENT", self.lse_gradient),
        ];
        all.into_iter().filter(|s| s.1).map(|s| s.0)
    }
}

/// Most functions of elements of one kernel (`chain.cu`).
pub(super) const LINKS: usize = 4;

/// A function of elements of a kernel of several. Its arguments are numbers of values: the kernel's
/// operands, and behind all of them ([`OPERANDS`]) what the functions before it make.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Link {
    /// The kernels' number of the function, and whether it has two arguments.
    pub function: i64,
    pub has_two: bool,
    pub arguments: [usize; 2],
    /// The result that it is written as, if it is.
    pub result: Option<usize>,
}

impl Link {
    /// The number of the value that function `k` makes.
    pub fn value(k: usize) -> usize {
        OPERANDS + k
    }
}

/// For what a file is compiled: the names of the element types of operands and results, `T0`.. and
/// `O0`.. of the kernels, the switches of attentions, and the functions of a chain. What a call does
/// not name is `f32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Types {
    pub x: [&'static str; OPERANDS],
    pub y: [&'static str; RESULTS],
    pub scores: Scores,
    pub links: [Option<Link>; LINKS],
}

impl Default for Types {
    fn default() -> Self {
        Types {
            x: ["f32"; OPERANDS],
            y: ["f32"; RESULTS],
            scores: Scores::default(),
            links: [None; LINKS],
        }
    }
}

impl Types {
    /// Their definitions as options of the compiler.
    pub fn options(&self) -> Vec<String> {
        let x = self.x.iter().enumerate();
        let y = self.y.iter().enumerate();
        x.map(|(i, t)| format!("-DT{i}={t}"))
            .chain(y.map(|(i, t)| format!("-DO{i}={t}")))
            .chain(self.scores.switches().map(|s| format!("-D{s}=1")))
            .chain(self.link_options())
            .collect()
    }
}

impl Types {
    /// How many operands the functions of a chain have, and each function: `LINK_0`.. are its words.
    fn link_options(&self) -> Vec<String> {
        let links: Vec<Link> = self.links.iter().copied().flatten().collect();
        if links.is_empty() {
            return Vec::new();
        }
        let arguments = links
            .iter()
            .flat_map(|l| &l.arguments[..1 + usize::from(l.has_two)]);
        let operands = arguments.filter(|a| **a < OPERANDS).max();
        let mut options = vec![format!(
            "-DCHAIN_OPERANDS={}",
            operands.map_or(0, |a| a + 1)
        )];
        for (k, link) in links.iter().enumerate() {
            let [a, b] = link.arguments;
            let two = i64::from(link.has_two);
            let function = link.function;
            options.push(format!("-DLINK_{k}={function},{two},{a},{b}"));
            if let Some(y) = link.result {
                options.push(format!("-DWRITTEN_{k}={y}"));
            }
        }
        options
    }
}

/// The kernels' name of an element type.
pub(super) fn type_name(dtype: DType) -> &'static str {
    match dtype {
        DType::Bf16 => "bf16",
        DType::F16 => "f16",
        DType::I32 => "i32",
        _ => "f32",
    }
}

/// One launch.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub source: Source,
    pub kernel: &'static str,
    pub types: Types,
    pub args: Box<Args>,
    pub grid: [u32; 3],
    pub threads: u32,
    /// Bytes of shared memory that the launch gives each block, beside the kernel's own.
    pub shared: u32,
}

impl Call {
    /// A call with a thread per element, up to a number of blocks.
    pub fn each(source: Source, kernel: &'static str, elements: usize) -> Self {
        let blocks = (elements as u64).div_ceil(THREADS.into()).min(MOST_BLOCKS);
        Self::blocks(source, kernel, blocks as usize, THREADS)
    }
    /// The same call with a thread for each of so many elements.
    pub fn over(mut self, elements: usize) -> Self {
        let blocks = (elements as u64).div_ceil(THREADS.into()).min(MOST_BLOCKS);
        (self.grid, self.threads) = ([blocks as u32, 1, 1], THREADS);
        self
    }
    /// A call with so many blocks of so many threads. Without blocks nothing is launched.
    pub fn blocks(source: Source, kernel: &'static str, blocks: usize, threads: u32) -> Self {
        Call {
            source,
            kernel,
            types: Types::default(),
            args: Box::new(Args {
                x: [Span::default(); OPERANDS],
                y: [Span::default(); RESULTS],
                n: [0; NUMBERS],
                f: [0.0; 8],
                table: [0.0; TABLE],
                now: Now::default(),
            }),
            grid: [u32::try_from(blocks).unwrap_or(u32::MAX), 1, 1],
            threads,
            shared: 0,
        }
    }
    /// With operand `i`.
    pub fn x(mut self, i: usize, (span, type_name): (Span, &'static str)) -> Self {
        (self.args.x[i], self.types.x[i]) = (span, type_name);
        self
    }
    /// With result `i`.
    pub fn y(mut self, i: usize, (span, type_name): (Span, &'static str)) -> Self {
        (self.args.y[i], self.types.y[i]) = (span, type_name);
        self
    }
    /// With numbers from `first` on.
    pub fn n(mut self, first: usize, numbers: &[i64]) -> Self {
        self.args.n[first..first + numbers.len()].copy_from_slice(numbers);
        self
    }
    /// With numbers that are no integers.
    pub fn f(mut self, numbers: &[f64]) -> Self {
        self.args.f[..numbers.len()].copy_from_slice(numbers);
        self
    }
    /// With the facts of a step.
    pub fn now(mut self, now: Now) -> Self {
        self.args.now = now;
        self
    }
    /// Takes elements by eights where everything is aligned for it: those of a row of `width`, or of
    /// all rows. The first number is that of elements, or of rows.
    pub fn by_eights(mut self, width: usize, elements: usize) -> Self {
        if self.can_take_eights(width) {
            self = self.with_eights();
            let blocks = (elements as u64 / 8)
                .div_ceil(THREADS.into())
                .min(MOST_BLOCKS);
            self.grid[0] = self.grid[0].min(u32::try_from(blocks).unwrap_or(u32::MAX).max(1));
        }
        self
    }
    /// Whether everything is aligned for elements by eights, those of a row of `width`.
    pub fn can_take_eights(&self, width: usize) -> bool {
        let mut spans = self.args.x.iter().chain(&self.args.y);
        spans.all(|s| s.at.is_multiple_of(16)) && width.is_multiple_of(8)
    }
    /// Takes elements by eights; whoever calls this has asked whether it can.
    pub fn with_eights(mut self) -> Self {
        self.args.n[NUMBERS - 1] = 1;
        self
    }
    /// Whether it takes elements by eights.
    pub fn takes_eights(&self) -> bool {
        self.args.n[NUMBERS - 1] != 0
    }
    pub fn is_empty(&self) -> bool {
        self.grid.contains(&0)
    }
}

/// A matrix of a product, as cuBLASLt sees it: in columns' order, `ld` elements from column to
/// column, `stride` from one matrix of a batch to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Matrix {
    pub type_name: &'static str,
    /// Whether the matrix that is stored is the transposed one.
    pub is_transposed: bool,
    pub ld: i64,
    pub stride: i64,
}

/// The last thing that is done to the elements of a product. A bias has one element for each row of D;
/// what is kept, or was, lies as D does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) enum Epilogue {
    #[default]
    Nothing,
    Bias,
    /// GELU by tanh, after the bias if there is one, whose argument is kept or not.
    Gelu {
        has_bias: bool,
        is_kept: bool,
    },
    /// The product is the gradient of GELU's value: times GELU's slope at what was kept.
    GeluGrad,
}

impl Epilogue {
    pub fn has_bias(self) -> bool {
        matches!(self, Epilogue::Bias | Epilogue::Gelu { has_bias: true, .. })
    }
    /// Whether it reads or writes a matrix beside D.
    pub fn has_beside(self) -> bool {
        matches!(
            self,
            Epilogue::GeluGrad | Epilogue::Gelu { is_kept: true, .. }
        )
    }
}

/// The form of a product D = f(A B + C): D has `rows` x `cols` elements, each a sum of `inner`
/// terms. C is as D is, or absent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    pub rows: u64,
    pub cols: u64,
    pub inner: u64,
    pub batch: u64,
    pub a: Matrix,
    pub b: Matrix,
    pub d: Matrix,
    pub epilogue: Epilogue,
}

/// A product, and where its matrices begin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Product {
    pub shape: Shape,
    pub a: u64,
    pub b: u64,
    pub d: u64,
    /// The matrix that is added, which may be where D will be.
    pub c: Option<u64>,
    /// Where the epilogue has them: the bias, and the matrix beside D.
    pub bias: u64,
    pub beside: u64,
}

/// A thing that is put on a stream. Few of them live at a time.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Debug)]
pub(super) enum Step {
    Call(Call),
    /// A product by the library.
    Product(Product),
    /// A copy of bytes that do not overlap.
    Copy {
        from: u64,
        to: u64,
        bytes: usize,
    },
}
