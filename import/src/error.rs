//! The errors of model files, with the evidence.

use std::path::PathBuf;

/// The reasons why a model cannot be imported or exported.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        #[source]
        source: std::io::Error,
    },
    /// A file is not the JSON document it should be.
    #[error("{file}:{line}:{column}: {problem}")]
    Json {
        /// The file.
        file: String,
        /// Line of the problem, from 1.
        line: usize,
        /// Column of the problem, from 1.
        column: usize,
        /// The problem.
        problem: String,
    },
    /// A field has a wrong type, a value out of range, or one that is not supported.
    #[error("{file}:{line}:{column}: field `{field}` {problem}")]
    Field {
        /// The file.
        file: String,
        /// Line of the field's key, from 1.
        line: usize,
        /// Column of the field's key, from 1.
        column: usize,
        /// The field; `outer.inner` when nested.
        field: String,
        /// The field's value, and the accepted ones.
        problem: String,
    },
    /// A field that is not known, so may change the mathematics.
    #[error(
        "{file}:{line}:{column}: unknown field `{field}`, which may change the model; accepted: {accepted}"
    )]
    UnknownField {
        /// The file.
        file: String,
        /// Line of the field's key, from 1.
        line: usize,
        /// Column of the field's key, from 1.
        column: usize,
        /// The field; `outer.inner` when nested.
        field: String,
        /// The fields that are understood here.
        accepted: String,
    },
    /// A field that must be there is not.
    #[error("{file}: field `{field}` is missing; expected {expected}")]
    MissingField {
        /// The file.
        file: String,
        /// The field.
        field: String,
        /// The expected value.
        expected: String,
    },
    /// Two fields contradict each other.
    #[error("{file}: fields `{first}` and `{second}` contradict each other: {problem}")]
    Contradiction {
        /// The file.
        file: String,
        /// One field.
        first: String,
        /// The other.
        second: String,
        /// How they disagree.
        problem: String,
    },
    /// The model cannot be built for these options.
    #[error("{option} {value}: {problem}")]
    Option {
        /// The option's name.
        option: &'static str,
        /// Its value.
        value: String,
        /// The problem, and the accepted values.
        problem: String,
    },
    /// The graph breaks a rule of the IR.
    #[error(transparent)]
    Graph(#[from] ir::GraphError),
    /// A weight file or its index breaks its format.
    #[error("{}: {problem}", file.display())]
    Format {
        /// The file.
        file: PathBuf,
        /// The problem, with the tensor's name where one is at fault.
        problem: String,
    },
    /// Tensors that the model needs are not in the files.
    #[error("{}: the model's tensors are missing: {}", file.display(), names(.tensors))]
    MissingTensors {
        /// The weight file, index or folder.
        file: PathBuf,
        /// Names of the tensors.
        tensors: Vec<String>,
    },
    /// The files have all but the modules for further tokens.
    #[error("{}: the configuration has modules for further tokens, and the file has none: no {}", file.display(), names(.tensors))]
    MissingModules {
        /// The weight file, index or folder.
        file: PathBuf,
        /// Names of their tensors.
        tensors: Vec<String>,
    },
    /// Tensors are in the files that the model does not have.
    #[error("{}: the model has no such tensors: {}", file.display(), names(.tensors))]
    UnexpectedTensors {
        /// The weight file, index or folder.
        file: PathBuf,
        /// Names of the tensors.
        tensors: Vec<String>,
    },
    /// A tensor has another shape than the model's.
    #[error("{}: tensor `{tensor}` is {found:?}, the model's is {expected:?}", file.display())]
    TensorShape {
        /// The weight file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Shape in the file.
        found: Vec<u64>,
        /// Shape by the config.
        expected: Vec<u64>,
    },
    /// A tensor's element type is not read.
    #[error("{}: tensor `{tensor}` has dtype {dtype}; accepted: F32, F16, BF16", file.display())]
    TensorDtype {
        /// The weight file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its dtype as the format spells it.
        dtype: String,
    },
    /// A weight is NaN or infinite.
    #[error("{}: tensor `{tensor}` is {value} at {index:?}", file.display())]
    NotFinite {
        /// The weight file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Position of the first such element, in the stored shape.
        index: Vec<u64>,
        /// Its value.
        value: f32,
    },
    /// The model has no parameter of this path.
    #[error("the model has no parameter `{path}`")]
    NoSuchParam {
        /// The path.
        path: String,
    },
    /// A parameter's values are not as many as its shape says.
    #[error("parameter `{path}` has {found} values, its shape {shape:?} needs {expected}")]
    ParamLength {
        /// The parameter.
        path: String,
        /// Its shape in our layout.
        shape: Vec<u64>,
        /// Number of values given.
        found: usize,
        /// Number of values needed.
        expected: u64,
    },
    /// The caller could not supply a parameter to export.
    #[error("parameter `{path}`: {source}")]
    Supply {
        /// The parameter.
        path: String,
        /// The caller's error.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// Lists the first few names, and how many more there are.
fn names(all: &[String]) -> String {
    let shown = all
        .iter()
        .take(8)
        .map(|n| format!("`{n}`"))
        .collect::<Vec<_>>()
        .join(", ");
    match all.len() {
        0..=8 => shown,
        n => format!("{shown} and {} more", n - 8),
    }
}
