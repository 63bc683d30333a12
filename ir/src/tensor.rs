//! Tensor types: element types and shapes whose batch dim is symbolic until a plan binds it.

use serde::{Deserialize, Serialize};

/// Element type of a tensor.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// bfloat16: 8 exponent bits, 7 mantissa bits.
    Bf16,
    /// IEEE 754 binary16.
    F16,
    /// 8-bit float, 4 exponent bits (OCP E4M3); planning only.
    F8e4m3,
    /// 8-bit float, 5 exponent bits (OCP E5M2); planning only.
    F8e5m2,
    /// 4-bit float, 2 exponent bits (OCP E2M1); planning only. Packed two to a byte as an operand
    /// inside a matmul; a tensor of it takes a byte for each element.
    F4e2m1,
    /// 32-bit signed integer (token ids).
    I32,
}

impl DType {
    /// Size of one element in bytes.
    pub fn bytes(self) -> u64 {
        match self {
            DType::F32 | DType::I32 => 4,
            DType::Bf16 | DType::F16 => 2,
            DType::F8e4m3 | DType::F8e5m2 | DType::F4e2m1 => 1,
        }
    }
    /// Bits of one element's value; fewer than [`DType::bytes`] holds for 4-bit floats.
    pub fn bits(self) -> u64 {
        match self {
            DType::F4e2m1 => 4,
            other => 8 * other.bytes(),
        }
    }
    /// True for every type but the integers.
    pub fn is_float(self) -> bool {
        self != DType::I32
    }
    /// The name used in text and JSON forms.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::F8e4m3 => "f8e4m3",
            DType::F8e5m2 => "f8e5m2",
            DType::F4e2m1 => "f4e2m1",
            DType::I32 => "i32",
        }
    }
    /// All element types, for parsers and tables.
    pub const ALL: [DType; 7] = [
        DType::F32,
        DType::Bf16,
        DType::F16,
        DType::F8e4m3,
        DType::F8e5m2,
        DType::F4e2m1,
        DType::I32,
    ];
}

/// One dim of a shape. `Batch` is the number of samples of one microbatch over the whole
/// stage mesh; the plan binds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dim {
    /// The samples of a microbatch.
    Batch,
    /// A fixed length.
    Fixed(u64),
}

impl Dim {
    /// The length once `batch` samples make a microbatch.
    pub fn bind(self, batch: u64) -> u64 {
        match self {
            Dim::Batch => batch,
            Dim::Fixed(n) => n,
        }
    }
}

impl std::fmt::Display for Dim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Dim::Batch => f.write_str("B"),
            Dim::Fixed(n) => write!(f, "{n}"),
        }
    }
}

/// A shape: dims outermost first; rank 0 is a scalar.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shape(pub Vec<Dim>);

impl Shape {
    /// A shape of fixed lengths.
    pub fn fixed(lens: &[u64]) -> Self {
        Shape(lens.iter().map(|&n| Dim::Fixed(n)).collect())
    }
    /// A shape whose first dim is the batch.
    pub fn batched(rest: &[u64]) -> Self {
        Shape(
            std::iter::once(Dim::Batch)
                .chain(rest.iter().map(|&n| Dim::Fixed(n)))
                .collect(),
        )
    }
    /// Number of dims.
    pub fn rank(&self) -> usize {
        self.0.len()
    }
    /// Lengths once the batch is bound.
    pub fn bind(&self, batch: u64) -> Vec<u64> {
        self.0.iter().map(|d| d.bind(batch)).collect()
    }
    /// True when some dim is the batch.
    pub fn has_batch(&self) -> bool {
        self.0.contains(&Dim::Batch)
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("[")?;
        for (i, d) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str(",")?;
            }
            write!(f, "{d}")?;
        }
        f.write_str("]")
    }
}

/// Element type and shape of a value.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorType {
    /// Element type.
    pub dtype: DType,
    /// Dims, outermost first.
    pub shape: Shape,
}

impl TensorType {
    /// Pairs a dtype with a shape.
    pub fn new(dtype: DType, shape: Shape) -> Self {
        TensorType { dtype, shape }
    }
    /// Bytes of the whole tensor with `batch` samples; saturates instead of overflowing.
    pub fn bytes(&self, batch: u64) -> u64 {
        self.shape
            .0
            .iter()
            .fold(self.dtype.bytes(), |b, d| b.saturating_mul(d.bind(batch)))
    }
}

impl std::fmt::Display for TensorType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", self.dtype.name(), self.shape)
    }
}
