//! cuBLASLt's functions, as `libcublasLt.so` exports them: products of matrices in f32, bf16 and
//! f16 with sums in f32, in batches with strides, and the epilogues of biases and of GELU by tanh.
//!
//! The library is another one than the driver's, which has the device: work goes there by its
//! functions `emulated_put` and `emulated_address`. What a caller may get wrong is told: a matrix
//! that is not allocated, an address that is less aligned than the algorithm was asked for, a
//! workspace that is too small, an epilogue without what it reads. The workspace is spoiled, and the algorithms add in other orders.

#![allow(unsafe_code)] // pointers of the caller's, who promises what the documentation asks for
#![allow(missing_docs, non_snake_case, clippy::missing_safety_doc)] // cuBLASLt's own
#![allow(clippy::too_many_arguments)]

use crate::link::driver;
use half::{bf16, f16};
use std::ffi::{CStr, CString, c_char, c_int, c_void};

/// How a call went, a `cublasStatus_t`.
pub type Status = c_int;

const SUCCESS: Status = 0;
const NOT_INITIALIZED: Status = 1;
const INVALID_VALUE: Status = 7;
const EXECUTION_FAILED: Status = 13;
const NOT_SUPPORTED: Status = 15;

/// Algorithms that there are for every product.
const ALGORITHMS: u64 = 3;
/// Bytes of workspace that the last of them needs.
const WORKSPACE: usize = 4096;

fn unknown(what: &str, number: c_int) -> Status {
    eprintln!("emulated GPU: cuBLASLt's {what} {number} is not known to the emulator");
    NOT_SUPPORTED
}

/// A matrix: `cublasLtMatrixLayout_t`.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    dtype: c_int,
    rows: u64,
    cols: u64,
    ld: i64,
    batch: i32,
    stride: i64,
}

/// A product: `cublasLtMatmulDesc_t`.
#[derive(Clone, Copy, Debug)]
pub struct Desc {
    transposed: [bool; 2],
    epilogue: Epilogue,
}

/// The end of a product: the bits of a `cublasLtEpilogue_t` and its operands.
#[derive(Clone, Copy, Debug)]
struct Epilogue {
    kind: u32,
    bias: u64,
    aux: u64,
    aux_ld: i64,
}

/// The bits of the epilogues that there are: `CUBLASLT_EPILOGUE_BIAS`, `GELU` and `DGELU` with the
/// bit of an auxiliary matrix.
const BIAS: u32 = 4;
const GELU: u32 = 32;
const DGELU: u32 = 64;
const AUX: u32 = 128;
/// `CUBLASLT_EPILOGUE_DEFAULT`.
const PLAIN: u32 = 1;

impl Epilogue {
    fn has(&self, bit: u32) -> bool {
        self.kind & bit != 0
    }

    /// The fault that it has for a result of this layout.
    fn fault(&self, d: &Layout) -> Option<&'static str> {
        if self.kind != PLAIN && d.batch != 1 {
            return Some("an epilogue in a batch, which is not played");
        }
        if self.has(BIAS) && self.bias == 0 {
            return Some("a bias without an address");
        }
        if self.has(AUX) && self.aux == 0 {
            return Some("an auxiliary matrix without an address");
        }
        if self.has(AUX) && (self.aux_ld < d.rows as i64 || self.aux_ld % 8 != 0) {
            return Some("an auxiliary matrix with a leading dimension that is no multiple of 8");
        }
        None
    }
    /// The alignments that its addresses have.
    fn aligned(&self) -> [u64; 2] {
        [self.bias, self.aux].map(|at| 1 << (at | 256).trailing_zeros())
    }
}

/// The limits that an algorithm is to keep to: `cublasLtMatmulPreference_t`.
#[derive(Clone, Copy, Debug)]
pub struct Preference {
    workspace: usize,
    /// The alignments of A, B, C and D.
    aligned: [u32; 4],
}

/// `cublasLtMatmulAlgo_t`: which one, what it needs of workspace, alignments.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Algorithm {
    data: [u64; 8],
}

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Proposal {
    algorithm: Algorithm,
    workspace: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

/// # Safety
/// `to` is null or can be written.
unsafe fn give<T>(to: *mut T, value: T) -> Status {
    if to.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller's promise.
    unsafe { to.write(value) };
    SUCCESS
}

/// # Safety
/// `from` is null or has `bytes` bytes that are a `T` if they are as many.
unsafe fn take<T: Copy>(from: *const c_void, bytes: usize) -> Option<T> {
    if from.is_null() || bytes != size_of::<T>() {
        return None;
    }
    // SAFETY: the caller's promise.
    Some(unsafe { from.cast::<T>().read_unaligned() })
}

/// # Safety
/// `of` is null or was made by a function here and is not destroyed.
unsafe fn free<T>(of: *mut T) -> Status {
    if of.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller's promise.
    drop(unsafe { Box::from_raw(of) });
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtCreate(to: *mut usize) -> Status {
    match driver() {
        // SAFETY: the caller's pointer.
        Some(_) => unsafe { give(to, 0xb1a5) },
        None => NOT_INITIALIZED,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtDestroy(_: usize) -> Status {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatrixLayoutCreate(
    to: *mut *mut Layout,
    dtype: c_int,
    rows: u64,
    cols: u64,
    ld: i64,
) -> Status {
    if bytes_of(dtype).is_none() {
        return unknown("element type", dtype);
    }
    if ld < rows as i64 || rows == 0 || cols == 0 {
        eprintln!("emulated GPU: a matrix of {rows} x {cols} elements, {ld} from column to column");
        return INVALID_VALUE;
    }
    let (batch, stride) = (1, 0);
    let layout = Layout {
        dtype,
        rows,
        cols,
        ld,
        batch,
        stride,
    };
    // SAFETY: the caller's pointer.
    unsafe { give(to, Box::into_raw(Box::new(layout))) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatrixLayoutDestroy(layout: *mut Layout) -> Status {
    // SAFETY: the caller's layout.
    unsafe { free(layout) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatrixLayoutSetAttribute(
    layout: *mut Layout,
    attribute: c_int,
    from: *const c_void,
    bytes: usize,
) -> Status {
    // SAFETY: the caller's layout and value.
    unsafe {
        let Some(layout) = layout.as_mut() else {
            return INVALID_VALUE;
        };
        match (
            attribute,
            take::<i32>(from, bytes),
            take::<i64>(from, bytes),
        ) {
            (5, Some(batch), _) if batch > 0 => layout.batch = batch,
            (6, _, Some(stride)) if stride >= 0 => layout.stride = stride,
            (5 | 6, ..) => return INVALID_VALUE,
            _ => return unknown("attribute of matrices", attribute),
        }
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulDescCreate(
    to: *mut *mut Desc,
    compute: c_int,
    scale: c_int,
) -> Status {
    // CUBLAS_COMPUTE_32F and CUBLAS_COMPUTE_32F_FAST_TF32, whose rounding is not played; f32.
    if !matches!(compute, 68 | 77) || scale != 0 {
        return unknown("type of sums", compute);
    }
    let desc = Desc {
        transposed: [false; 2],
        epilogue: Epilogue {
            kind: PLAIN,
            bias: 0,
            aux: 0,
            aux_ld: 0,
        },
    };
    // SAFETY: the caller's pointer.
    unsafe { give(to, Box::into_raw(Box::new(desc))) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulDescDestroy(desc: *mut Desc) -> Status {
    // SAFETY: the caller's product.
    unsafe { free(desc) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulDescSetAttribute(
    desc: *mut Desc,
    attribute: c_int,
    from: *const c_void,
    bytes: usize,
) -> Status {
    // SAFETY: the caller's product and value.
    unsafe {
        let Some(desc) = desc.as_mut() else {
            return INVALID_VALUE;
        };
        let (word, long) = (take::<i32>(from, bytes), take::<i64>(from, bytes));
        match (attribute, word, long) {
            (3 | 4, Some(op @ (0 | 1)), _) => desc.transposed[attribute as usize - 3] = op == 1,
            (7, Some(kind), _) => match kind as u32 {
                PLAIN | BIAS | 32 | 36 | 160 | 164 | 192 => desc.epilogue.kind = kind as u32,
                _ => return unknown("epilogue", kind),
            },
            (8, _, Some(at)) => desc.epilogue.bias = at as u64,
            (11, _, Some(at)) => desc.epilogue.aux = at as u64,
            (12, _, Some(ld)) => desc.epilogue.aux_ld = ld,
            (3 | 4 | 7 | 8 | 11 | 12, ..) => return INVALID_VALUE,
            _ => return unknown("attribute of products", attribute),
        }
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulPreferenceCreate(to: *mut *mut Preference) -> Status {
    // What the documentation says for a fresh one.
    let preference = Preference {
        workspace: 0,
        aligned: [256; 4],
    };
    // SAFETY: the caller's pointer.
    unsafe { give(to, Box::into_raw(Box::new(preference))) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulPreferenceDestroy(preference: *mut Preference) -> Status {
    // SAFETY: the caller's preference.
    unsafe { free(preference) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulPreferenceSetAttribute(
    preference: *mut Preference,
    attribute: c_int,
    from: *const c_void,
    bytes: usize,
) -> Status {
    // SAFETY: the caller's preference and value.
    unsafe {
        let Some(preference) = preference.as_mut() else {
            return INVALID_VALUE;
        };
        match (
            attribute,
            take::<u32>(from, bytes),
            take::<usize>(from, bytes),
        ) {
            (1, _, Some(workspace)) => preference.workspace = workspace,
            (5..=8, Some(aligned), _) if aligned.is_power_of_two() => {
                preference.aligned[attribute as usize - 5] = aligned;
            }
            (1 | 5..=8, ..) => return INVALID_VALUE,
            _ => return unknown("attribute of preferences", attribute),
        }
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    _: usize,
    desc: *const Desc,
    a: *const Layout,
    b: *const Layout,
    c: *const Layout,
    d: *const Layout,
    preference: *const Preference,
    most: c_int,
    to: *mut Proposal,
    n: *mut c_int,
) -> Status {
    // SAFETY: the caller's descriptors and room for the results.
    unsafe {
        let (Some(desc), Some(preference)) = (desc.as_ref(), preference.as_ref()) else {
            return INVALID_VALUE;
        };
        let layouts = [a, b, c, d].map(|l| l.as_ref().copied());
        let [Some(a), Some(b), Some(c), Some(d)] = layouts else {
            return INVALID_VALUE;
        };
        if let Err(status) = extents(desc, &a, &b, &c, &d) {
            return status;
        }
        let mut found = 0;
        for id in 0..ALGORITHMS {
            let workspace = if id + 1 == ALGORITHMS { WORKSPACE } else { 0 };
            if found >= most || workspace > preference.workspace {
                break;
            }
            let [of_a, of_b, of_c, of_d] = preference.aligned.map(u64::from);
            let [of_bias, of_aux] = desc.epilogue.aligned();
            let proposal = Proposal {
                algorithm: Algorithm {
                    data: [
                        id,
                        workspace as u64,
                        of_a,
                        of_b,
                        of_c,
                        of_d,
                        of_bias,
                        of_aux,
                    ],
                },
                workspace,
                state: SUCCESS,
                waves: 1.0,
                reserved: [0; 4],
            };
            to.add(found as usize).write(proposal);
            found += 1;
        }
        give(n, found)
    }
}

/// Rows, columns and terms of a product, or what is wrong with its matrices.
fn extents(
    desc: &Desc,
    a: &Layout,
    b: &Layout,
    c: &Layout,
    d: &Layout,
) -> Result<[u64; 3], Status> {
    let op = |l: &Layout, is_transposed| match is_transposed {
        true => (l.cols, l.rows),
        false => (l.rows, l.cols),
    };
    let (a_op, b_op) = (op(a, desc.transposed[0]), op(b, desc.transposed[1]));
    let batches = [a, b, c, d].map(|l| l.batch);
    let matches = a_op.1 == b_op.0
        && (a_op.0, b_op.1) == (d.rows, d.cols)
        && (c.rows, c.cols, c.dtype) == (d.rows, d.cols, d.dtype)
        && batches.iter().all(|n| *n == batches[0]);
    // Factors of one type, results of the same or of f32.
    let has_types = a.dtype == b.dtype && (d.dtype == a.dtype || d.dtype == 0);
    if let Some(fault) = desc.epilogue.fault(d) {
        eprintln!("emulated GPU: {fault}: {:?}", desc.epilogue);
        return Err(INVALID_VALUE);
    }
    match matches && has_types {
        true => Ok([d.rows, d.cols, a_op.1]),
        false => {
            eprintln!("emulated GPU: no product {a:?} {b:?} to {d:?}");
            Err(INVALID_VALUE)
        }
    }
}

/// Bytes of an element, of the types that there are.
fn bytes_of(dtype: c_int) -> Option<usize> {
    match dtype {
        0 => Some(4),
        2 | 14 => Some(2),
        _ => None,
    }
}

/// A product that waits in a stream.
struct Work {
    extents: [u64; 3],
    transposed: [bool; 2],
    epilogue: Epilogue,
    layouts: [Layout; 4],
    at: [u64; 4],
    factors: [f32; 2],
    algorithm: u64,
    workspace: (u64, usize),
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmul(
    _: usize,
    desc: *const Desc,
    alpha: *const f32,
    a: u64,
    of_a: *const Layout,
    b: u64,
    of_b: *const Layout,
    beta: *const f32,
    c: u64,
    of_c: *const Layout,
    d: u64,
    of_d: *const Layout,
    algorithm: *const Algorithm,
    workspace: u64,
    workspace_bytes: usize,
    stream: *mut c_void,
) -> Status {
    // SAFETY: the caller's descriptors and numbers.
    let work = unsafe {
        let (Some(desc), Some(algorithm)) = (desc.as_ref(), algorithm.as_ref()) else {
            eprintln!("emulated GPU: a product without an algorithm");
            return INVALID_VALUE;
        };
        let layouts = [of_a, of_b, of_c, of_d].map(|l| l.as_ref().copied());
        let ([Some(of_a), Some(of_b), Some(of_c), Some(of_d)], false, false) =
            (layouts, alpha.is_null(), beta.is_null())
        else {
            return INVALID_VALUE;
        };
        let extents = match extents(desc, &of_a, &of_b, &of_c, &of_d) {
            Ok(extents) => extents,
            Err(status) => return status,
        };
        let [id, needed, aligned @ ..] = algorithm.data;
        let Epilogue { bias, aux, .. } = desc.epilogue;
        for (at, aligned) in [a, b, c, d, bias, aux].into_iter().zip(aligned) {
            if aligned == 0 || !at.is_multiple_of(aligned) {
                eprintln!(
                    "emulated GPU: a matrix at {at:#x} for an algorithm that wants {aligned}"
                );
                return INVALID_VALUE;
            }
        }
        if needed as usize > workspace_bytes {
            eprintln!("emulated GPU: {workspace_bytes} bytes of workspace, needed are {needed}");
            return INVALID_VALUE;
        }
        Work {
            extents,
            transposed: desc.transposed,
            epilogue: desc.epilogue,
            layouts: [of_a, of_b, of_c, of_d],
            at: [a, b, c, d],
            factors: [*alpha, *beta],
            algorithm: id,
            workspace: (workspace, needed as usize),
        }
    };
    let Some(driver) = driver() else {
        return NOT_INITIALIZED;
    };
    match (driver.put)(stream, run, Box::into_raw(Box::new(work)).cast()) {
        0 => SUCCESS,
        _ => EXECUTION_FAILED,
    }
}

extern "C" fn run(work: *mut c_void) -> *const c_char {
    // SAFETY: what `cublasLtMatmul` put there, once.
    let work = unsafe { Box::from_raw(work.cast::<Work>()) };
    match multiply(&work) {
        Ok(()) => std::ptr::null(),
        // The device ends with it; so it is never freed.
        Err(what) => CString::new(what).unwrap_or_default().into_raw(),
    }
}

fn multiply(work: &Work) -> Result<(), String> {
    let driver = driver().ok_or("the driver is gone")?;
    let resolve = |at: u64, bytes: usize, what: &str| {
        let found = (driver.address)(at, bytes);
        match found.is_null() {
            true => Err(format!(
                "cublasLtMatmul: {what}: {bytes} bytes at {at:#x} are not all allocated"
            )),
            false => Ok(found),
        }
    };
    let [rows, cols, inner] = work.extents.map(|n| n as usize);
    let [of_a, of_b, of_c, of_d] = work.layouts;
    let span = |l: &Layout| {
        let last = (l.batch as i64 - 1) * l.stride + (l.cols as i64 - 1) * l.ld + l.rows as i64;
        last as usize * bytes_of(l.dtype).unwrap_or(4)
    };
    let a = resolve(work.at[0], span(&of_a), "A")?;
    let b = resolve(work.at[1], span(&of_b), "B")?;
    let d = resolve(work.at[3], span(&of_d), "D")?;
    let c = match work.factors[1] == 0.0 {
        true => std::ptr::null_mut(),
        false => resolve(work.at[2], span(&of_c), "C")?,
    };
    let end = work.epilogue;
    let element = bytes_of(of_d.dtype).unwrap_or(4);
    let bias = match end.has(BIAS) {
        true => resolve(end.bias, rows * element, "the bias")?,
        false => std::ptr::null_mut(),
    };
    let aux = match end.has(AUX) {
        true => {
            let elements = (cols as i64 - 1) * end.aux_ld + rows as i64;
            resolve(end.aux, elements as usize * element, "the auxiliary matrix")?
        }
        false => std::ptr::null_mut(),
    };
    let (workspace, needed) = work.workspace;
    if needed > 0 {
        let at = resolve(workspace, needed, "the workspace")?;
        // SAFETY: resolved for so many bytes.
        unsafe { std::ptr::write_bytes(at, 0xff, needed) };
    }
    for matrix in 0..of_d.batch as i64 {
        // Factors with their terms next to each other.
        let gather = |base: *mut u8, l: &Layout, n: usize, across: i64, along: i64| {
            let mut values = vec![0.0f32; n * inner];
            for i in 0..n {
                for k in 0..inner {
                    let at = matrix * l.stride + i as i64 * across + k as i64 * along;
                    values[i * inner + k] = read(base, l.dtype, at);
                }
            }
            values
        };
        let (across, along) = match work.transposed[0] {
            true => (of_a.ld, 1),
            false => (1, of_a.ld),
        };
        let left = gather(a, &of_a, rows, across, along);
        let (across, along) = match work.transposed[1] {
            true => (1, of_b.ld),
            false => (of_b.ld, 1),
        };
        let right = gather(b, &of_b, cols, across, along);
        for j in 0..cols {
            for i in 0..rows {
                let terms = left[i * inner..][..inner]
                    .iter()
                    .zip(&right[j * inner..][..inner]);
                let products = terms.map(|(x, y)| x * y);
                let sum: f32 = match work.algorithm {
                    0 => products.sum(),
                    _ => products.rev().sum(),
                };
                let at = matrix * of_d.stride + j as i64 * of_d.ld + i as i64;
                let mut value = work.factors[0] * sum;
                if !c.is_null() {
                    let at = matrix * of_c.stride + j as i64 * of_c.ld + i as i64;
                    value += work.factors[1] * read(c, of_c.dtype, at);
                }
                if !bias.is_null() {
                    value += read(bias, of_d.dtype, i as i64);
                }
                let in_aux = j as i64 * end.aux_ld + i as i64;
                if end.has(GELU) {
                    if !aux.is_null() {
                        write(aux, of_d.dtype, in_aux, value);
                    }
                    value = gelu(value)[0];
                }
                if end.has(DGELU) {
                    value *= gelu(read(aux, of_d.dtype, in_aux))[1];
                }
                write(d, of_d.dtype, at, value);
            }
        }
    }
    Ok(())
}

/// GELU by tanh, and its slope.
fn gelu(x: f32) -> [f32; 2] {
    let x = f64::from(x);
    let (c, cubic) = (std::f64::consts::FRAC_2_PI.sqrt(), 0.044715);
    let t = (c * (x + cubic * x.powi(3))).tanh();
    let slope = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * c * (1.0 + 3.0 * cubic * x * x);
    [0.5 * x * (1.0 + t), slope].map(|v| v as f32)
}

fn read(base: *mut u8, dtype: c_int, at: i64) -> f32 {
    // SAFETY: within the span that was resolved; elements of device memory are aligned as the
    // caller's address is, or read byte by byte.
    unsafe {
        match dtype {
            0 => base.cast::<f32>().offset(at as isize).read_unaligned(),
            2 => {
                let bits = base.cast::<u16>().offset(at as isize).read_unaligned();
                f16::from_bits(bits).to_f32()
            }
            _ => {
                let bits = base.cast::<u16>().offset(at as isize).read_unaligned();
                bf16::from_bits(bits).to_f32()
            }
        }
    }
}

fn write(base: *mut u8, dtype: c_int, at: i64, value: f32) {
    // SAFETY: as `read`.
    unsafe {
        match dtype {
            0 => base
                .cast::<f32>()
                .offset(at as isize)
                .write_unaligned(value),
            2 => {
                let bits = f16::from_f32(value).to_bits();
                base.cast::<u16>().offset(at as isize).write_unaligned(bits);
            }
            _ => {
                let bits = bf16::from_f32(value).to_bits();
                base.cast::<u16>().offset(at as isize).write_unaligned(bits);
            }
        }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetStatusString(status: Status) -> *const c_char {
    let words: &CStr = match status {
        SUCCESS => c"success",
        NOT_INITIALIZED => c"not initialized",
        INVALID_VALUE => c"invalid value",
        EXECUTION_FAILED => c"execution failed",
        NOT_SUPPORTED => c"not supported",
        _ => c"error",
    };
    words.as_ptr()
}
