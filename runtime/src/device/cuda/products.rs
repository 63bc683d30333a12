//! Products of matrices by cuBLASLt, opened when it is there.
//!
//! Descriptors and the choice of an algorithm are made once for each form of a product and kept:
//! descriptors by the rank, choices by the GPU, so that ranks on it compute the same bits. The
//! library proposes algorithms, best first; the first one is taken, or, where that is asked for,
//! the fastest by a measurement at the first use, which the first step of a run bears. Sums are in
//! f32. Each stream has a workspace of its own, as the library wants it.
//!
//! A product may add a matrix and end with an epilogue, which are a part of its form; where the
//! library has none of the kind, there is no algorithm, and that is no error.

#![allow(unsafe_code)] // calls the library with addresses of memory that is owned here

use super::args::{Epilogue, Matrix, Product, Shape};
use super::library::failed;
use super::places;
use crate::error::RuntimeError;
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use cudarc::driver::{CudaStream, sys as driver};
use std::collections::HashMap;
use std::ffi::c_void;
use std::panic::catch_unwind;
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of a stream's workspace: what NVIDIA recommends for Hopper.
pub(super) const WORKSPACE: usize = 32 << 20;
/// Algorithms that are measured.
const MOST: usize = 6;
/// Repetitions of a measured algorithm, after one that warms up.
const REPETITIONS: usize = 3;
/// Best alignment of an address that an algorithm may ask for.
const MOST_ALIGNED: u64 = 256;

/// Who multiplies matrices on a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Multiplier {
    /// Kernels of our own, which are slow and need no library.
    Plain,
    /// cuBLASLt with its first proposal; kernels of our own where it is not there.
    #[default]
    Library,
    /// cuBLASLt with the fastest of its proposals, measured at the first use. The choice, and so
    /// last bits, can differ from run to run.
    Tuned,
}

/// How matrices are multiplied on GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Matmuls {
    /// By whom.
    pub by: Multiplier,
    /// Whether factors in f32 may be rounded to TF32: 10 bits of mantissa.
    pub tf32: bool,
}

/// A form of a product, and how its matrices are aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    shape: Shape,
    /// Alignments of A, B, D, C, the bias and the matrix beside D.
    aligned: [u32; 6],
    /// Whether the sum lies where its addend does, and so cannot be made again.
    is_over_addend: bool,
}

impl Matmuls {
    /// The library where it is there, and no TF32.
    pub const USUAL: Matmuls = Matmuls {
        by: Multiplier::Library,
        tf32: false,
    };
}

impl Key {
    fn of(product: &Product) -> Self {
        let Shape { a, b, d, batch, .. } = product.shape;
        let c = product.c.unwrap_or(product.d);
        let around = [(c, d), (product.bias, d), (product.beside, d)];
        let [c, bias, beside] = around;
        let all = [
            (product.a, a),
            (product.b, b),
            (product.d, d),
            c,
            bias,
            beside,
        ];
        // The other matrices of a batch begin at multiples of its stride.
        let aligned = all.map(|(at, matrix)| {
            let element = if matrix.type_name == "f32" { 4 } else { 2 };
            let apart = if batch > 1 {
                matrix.stride as u64 * element
            } else {
                0
            };
            let zeros = (at | apart | MOST_ALIGNED).trailing_zeros();
            1u32 << zeros
        });
        Key {
            shape: product.shape,
            aligned,
            is_over_addend: product.c == Some(product.d),
        }
    }
}

/// Algorithms that were chosen on a GPU.
pub(super) type Chosen = Mutex<Vec<(Choice, sys::cublasLtMatmulHeuristicResult_t)>>;

/// The form of a product that an algorithm was chosen for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Choice(Key, Matmuls);

/// The library, opened by a rank.
pub(super) struct Products {
    handle: sys::cublasLtHandle_t,
    options: Matmuls,
    /// Nothing where the library has nothing for the form.
    ready: HashMap<Key, Option<Ready>>,
}

// SAFETY: the library's handle and descriptors may be used by any thread, and are here by one.
unsafe impl Send for Products {}

/// Descriptors of a product's form, and the algorithm for it.
struct Ready {
    form: Form,
    algorithm: sys::cublasLtMatmulHeuristicResult_t,
}

struct Form {
    product: sys::cublasLtMatmulDesc_t,
    matrices: [sys::cublasLtMatrixLayout_t; 3],
}

impl Drop for Form {
    fn drop(&mut self) {
        // SAFETY: made by `Form::new`, and no call uses them any more: the library copies what it
        // needs when it is called.
        unsafe {
            let _ = result::destroy_matmul_desc(self.product);
            for matrix in self.matrices {
                let _ = result::destroy_matrix_layout(matrix);
            }
        }
    }
}

fn wrong(what: &str, error: CublasError) -> RuntimeError {
    RuntimeError::Device {
        problem: format!("{what}: cuBLASLt says {error}"),
    }
}

/// Whether cuBLASLt is found.
pub fn has_library() -> bool {
    // SAFETY: opening a library of the system's runs no code but its own.
    places::open("cublasLt", || unsafe { sys::is_culib_present() })
}

/// Whether TF32 is used for these factors.
fn compute_type(shape: &Shape, options: Matmuls) -> sys::cublasComputeType_t {
    match shape.a.type_name == "f32" && options.tf32 {
        true => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
        false => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
    }
}

fn data_type(name: &str) -> sys::cudaDataType_t {
    match name {
        "bf16" => sys::cudaDataType_t::CUDA_R_16BF,
        "f16" => sys::cudaDataType_t::CUDA_R_16F,
        _ => sys::cudaDataType_t::CUDA_R_32F,
    }
}

/// # Safety
/// The layout lives.
unsafe fn set<T>(
    layout: sys::cublasLtMatrixLayout_t,
    attribute: sys::cublasLtMatrixLayoutAttribute_t,
    value: T,
) -> Result<(), CublasError> {
    let (at, bytes) = ((&raw const value).cast(), size_of::<T>());
    // SAFETY: the attribute is of this type, and the value lives for the call.
    unsafe { result::set_matrix_layout_attribute(layout, attribute, at, bytes) }
}

/// # Safety
/// The descriptor lives.
unsafe fn describe<T>(
    product: sys::cublasLtMatmulDesc_t,
    attribute: sys::cublasLtMatmulDescAttributes_t,
    value: T,
) -> Result<(), CublasError> {
    let (at, bytes) = ((&raw const value).cast(), size_of::<T>());
    // SAFETY: the attribute is of this type, and the value lives for the call.
    unsafe { result::set_matmul_desc_attribute(product, attribute, at, bytes) }
}

fn epilogue(of: Epilogue) -> sys::cublasLtEpilogue_t {
    use sys::cublasLtEpilogue_t::*;
    match of {
        Epilogue::Nothing => CUBLASLT_EPILOGUE_DEFAULT,
        Epilogue::Bias => CUBLASLT_EPILOGUE_BIAS,
        Epilogue::Gelu { has_bias, is_kept } => match (has_bias, is_kept) {
            (false, false) => CUBLASLT_EPILOGUE_GELU,
            (false, true) => CUBLASLT_EPILOGUE_GELU_AUX,
            (true, false) => CUBLASLT_EPILOGUE_GELU_BIAS,
            (true, true) => CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
        },
        Epilogue::GeluGrad => CUBLASLT_EPILOGUE_DGELU,
    }
}

/// The layout of a matrix with so many rows and columns in the product.
fn layout(
    matrix: &Matrix,
    (rows, cols): (u64, u64),
    batch: u64,
) -> Result<sys::cublasLtMatrixLayout_t, CublasError> {
    use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
    let (rows, cols) = match matrix.is_transposed {
        true => (cols, rows),
        false => (rows, cols),
    };
    let layout = result::create_matrix_layout(data_type(matrix.type_name), rows, cols, matrix.ld)?;
    // SAFETY: the layout is fresh.
    unsafe {
        let count = Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT;
        set(layout, count, batch as i32)?;
        let stride = Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
        set(layout, stride, matrix.stride)?;
    }
    Ok(layout)
}

impl Form {
    fn new(shape: &Shape, options: Matmuls) -> Result<Self, CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let scale = sys::cudaDataType_t::CUDA_R_32F;
        let product = result::create_matmul_desc(compute_type(shape, options), scale)?;
        let transposed = [
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSA, shape.a),
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSB, shape.b),
        ];
        for (attribute, matrix) in transposed {
            // CUBLAS_OP_N and CUBLAS_OP_T.
            // SAFETY: the descriptor is fresh.
            unsafe { describe(product, attribute, i32::from(matrix.is_transposed))? };
        }
        if shape.epilogue != Epilogue::Nothing {
            let value = epilogue(shape.epilogue) as u32;
            // SAFETY: the descriptor is fresh.
            unsafe { describe(product, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, value)? };
        }
        if shape.epilogue.has_beside() {
            let ld = Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD;
            // SAFETY: the descriptor is fresh.
            unsafe { describe(product, ld, shape.d.ld)? };
        }
        let Shape {
            rows, cols, inner, ..
        } = *shape;
        let matrices = [
            layout(&shape.a, (rows, inner), shape.batch)?,
            layout(&shape.b, (inner, cols), shape.batch)?,
            layout(&shape.d, (rows, cols), shape.batch)?,
        ];
        Ok(Form { product, matrices })
    }

    /// Tells where the bias and the matrix beside D are.
    fn point(&self, product: &Product) -> Result<(), CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let epilogue = product.shape.epilogue;
        if epilogue.has_bias() {
            let bias = Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
            // SAFETY: the descriptor lives.
            unsafe { describe(self.product, bias, product.bias)? };
        }
        if epilogue.has_beside() {
            let beside = Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER;
            // SAFETY: the descriptor lives.
            unsafe { describe(self.product, beside, product.beside)? };
        }
        Ok(())
    }

    /// The library's proposals, best first.
    fn proposals(
        &self,
        handle: sys::cublasLtHandle_t,
        aligned: [u32; 6],
        most: usize,
    ) -> Result<Vec<sys::cublasLtMatmulHeuristicResult_t>, CublasError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let wish = result::create_matmul_pref()?;
        let [a, b, d, c, ..] = aligned;
        let set = |attribute, at: *const c_void, bytes| {
            // SAFETY: the preference lives and the value too.
            unsafe { result::set_matmul_pref_attribute(wish, attribute, at, bytes) }
        };
        let space = Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let most_bytes = WORKSPACE;
        let mut done = set(space, (&raw const most_bytes).cast(), size_of::<usize>());
        for (attribute, value) in [
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, a),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, b),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, d),
        ] {
            done = done.and_then(|()| set(attribute, (&raw const value).cast(), 4));
        }
        let empty = sys::cublasLtMatmulHeuristicResult_t {
            algo: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
            workspaceSize: 0,
            state: sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
            wavesCount: 0.0,
            reserved: [0; 4],
        };
        let mut found = vec![empty; most];
        let mut n = 0;
        let [of_a, of_b, of_d] = self.matrices;
        done = done.and_then(|()| {
            // SAFETY: the descriptors live, and there is room for so many results.
            let status = unsafe {
                sys::cublasLtMatmulAlgoGetHeuristic(
                    handle,
                    self.product,
                    of_a,
                    of_b,
                    of_d,
                    of_d,
                    wish,
                    most as i32,
                    found.as_mut_ptr(),
                    &mut n,
                )
            };
            // Without an algorithm the product is no mistake: our own kernel takes it.
            match status {
                sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED => Ok(()),
                other => other.result(),
            }
        });
        // SAFETY: made above.
        let _ = unsafe { result::destroy_matmul_pref(wish) };
        done?;
        found.truncate(usize::try_from(n).unwrap_or(0));
        found.retain(|f| f.state.result().is_ok() && f.workspaceSize <= WORKSPACE);
        Ok(found)
    }
}

impl Products {
    /// Opens the library for the context that is current; none where it is not there or not wanted.
    pub fn open(options: Matmuls) -> Option<Self> {
        if options.by == Multiplier::Plain || !has_library() {
            return None;
        }
        // A function that the library lacks is a panic there.
        let handle = catch_unwind(result::create_handle).ok()?.ok()?;
        Some(Products {
            handle,
            options,
            ready: HashMap::new(),
        })
    }

    /// Makes what a product of this form needs, with the stream on which algorithms are measured.
    /// False where the library has no algorithm for it.
    pub fn ready(
        &mut self,
        product: &Product,
        on: &Arc<CudaStream>,
        workspace: u64,
        chosen: &Chosen,
    ) -> Result<bool, RuntimeError> {
        let key = Key::of(product);
        if !self.ready.contains_key(&key) {
            let ready = self.prepare(&key, product, on, workspace, chosen)?;
            self.ready.insert(key, ready);
        }
        Ok(self.ready.get(&key).is_some_and(Option::is_some))
    }

    /// Puts a product on a stream that has so large a workspace, after [`Products::ready`].
    pub fn multiply(
        &self,
        product: &Product,
        on: &Arc<CudaStream>,
        workspace: u64,
    ) -> Result<(), RuntimeError> {
        let Some(Some(ready)) = self.ready.get(&Key::of(product)) else {
            let what = format!("no algorithm is ready for {:?}", product.shape);
            return Err(RuntimeError::Program(what));
        };
        self.call(&ready.form, &ready.algorithm, product, on, workspace)
    }

    /// Forms of products that are ready.
    #[cfg(test)]
    pub fn kept(&self) -> usize {
        self.ready.len()
    }

    fn prepare(
        &self,
        key: &Key,
        product: &Product,
        on: &Arc<CudaStream>,
        workspace: u64,
        chosen: &Chosen,
    ) -> Result<Option<Ready>, RuntimeError> {
        // An epilogue that the library does not know is none, and no error.
        let has_epilogue = key.shape.epilogue != Epilogue::Nothing;
        let form = Form::new(&key.shape, self.options);
        let form = match form.and_then(|form| form.point(product).map(|()| form)) {
            Ok(form) => form,
            Err(_) if has_epilogue => return Ok(None),
            Err(e) => return Err(wrong("a product's form", e)),
        };
        let wanted = Choice(*key, self.options);
        // Where it cannot be measured, what was measured for the product alone is as good.
        let apart = Key {
            is_over_addend: false,
            ..*key
        };
        let measured = Choice(apart, self.options);
        // Others wait: what one rank measures the others take.
        let mut chosen = chosen.lock().unwrap_or_else(PoisonError::into_inner);
        let known = |of: &Choice| chosen.iter().find(|c| c.0 == *of).map(|c| c.1);
        if let Some(algorithm) = known(&wanted) {
            return Ok(Some(Ready { form, algorithm }));
        }
        if let Some(algorithm) = known(&measured) {
            chosen.push((wanted, algorithm));
            return Ok(Some(Ready { form, algorithm }));
        }
        let is_tuned = self.options.by == Multiplier::Tuned && !key.is_over_addend;
        let most = if is_tuned { MOST } else { 1 };
        let proposals = match form.proposals(self.handle, key.aligned, most) {
            Ok(proposals) => proposals,
            Err(_) if has_epilogue => return Ok(None),
            Err(e) => return Err(wrong("an algorithm", e)),
        };
        let mut best = proposals.first().copied();
        if is_tuned && proposals.len() > 1 {
            let mut least = f32::INFINITY;
            for proposal in &proposals {
                let ms = self.measure(&form, proposal, product, on, workspace)?;
                if ms < least {
                    (least, best) = (ms, Some(*proposal));
                }
            }
            // What comes after the product is then a call of its own.
            if has_epilogue && least.is_infinite() {
                return Ok(None);
            }
        }
        if let Some(best) = best {
            chosen.push((wanted, best));
        }
        Ok(best.map(|algorithm| Ready { form, algorithm }))
    }

    /// Milliseconds of an algorithm on this product, whose result is computed again and again.
    fn measure(
        &self,
        form: &Form,
        proposal: &sys::cublasLtMatmulHeuristicResult_t,
        product: &Product,
        on: &Arc<CudaStream>,
        workspace: u64,
    ) -> Result<f32, RuntimeError> {
        let timed = Some(driver::CUevent_flags::CU_EVENT_DEFAULT);
        let tick = || on.record_event(timed).map_err(|e| failed("an event", e));
        // An algorithm that fails is none, and no error.
        if self.call(form, proposal, product, on, workspace).is_err() {
            return Ok(f32::INFINITY);
        }
        let mut least = f32::INFINITY;
        for _ in 0..REPETITIONS {
            let began = tick()?;
            self.call(form, proposal, product, on, workspace)?;
            let ended = tick()?;
            let ms = began.elapsed_ms(&ended);
            least = least.min(ms.map_err(|e| failed("the time of a product", e))?);
        }
        Ok(least)
    }

    fn call(
        &self,
        form: &Form,
        algorithm: &sys::cublasLtMatmulHeuristicResult_t,
        product: &Product,
        on: &Arc<CudaStream>,
        workspace: u64,
    ) -> Result<(), RuntimeError> {
        form.point(product).map_err(|e| wrong("an epilogue", e))?;
        let beta = if product.c.is_some() { 1.0f32 } else { 0.0 };
        let alpha = 1.0f32;
        let [of_a, of_b, of_d] = form.matrices;
        let pointer = |at: u64| at as *const c_void;
        // SAFETY: the matrices are in memory of this device and apart from each other but for C,
        // which may be D, the stream is one of its context, and nothing else works with its
        // workspace.
        let done = unsafe {
            result::matmul(
                self.handle,
                form.product,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                pointer(product.a),
                of_a,
                pointer(product.b),
                of_b,
                pointer(product.c.unwrap_or(product.d)),
                of_d,
                product.d as *mut c_void,
                of_d,
                &algorithm.algo,
                workspace as *mut c_void,
                WORKSPACE,
                on.cu_stream().cast(),
            )
        };
        done.map_err(|e| wrong("a product", e))
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        self.ready.clear();
        // SAFETY: made by `open`; the library waits for nothing of it.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// Who multiplies in a run with these options, in words.
pub fn multiplier(options: Matmuls) -> &'static str {
    match (options.by, has_library()) {
        (Multiplier::Plain, _) | (_, false) => "plain kernels",
        (Multiplier::Library, true) => "cuBLASLt",
        (Multiplier::Tuned, true) => "cuBLASLt, tuned",
    }
}
