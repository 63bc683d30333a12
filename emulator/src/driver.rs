//! The CUDA driver's functions, as `libcuda.so` exports them. Their names, parameters and error
//! numbers are those of the driver's documentation; a null pointer of the caller's is an error.

#![allow(unsafe_code)] // pointers of the caller's, who promises what the documentation asks for
#![allow(missing_docs, non_snake_case, clippy::missing_safety_doc)] // the driver's own

use crate::block::{Attach, Dim, Entry, Kernel, MOST_SHARED, USUAL_SHARED};
use crate::queue::{Event, Gpu, Op, Ready, Run, Side};
use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// How a call went, a `CUresult`.
pub type Status = c_int;

/// All is well.
pub const SUCCESS: Status = 0;
const INVALID_VALUE: Status = 1;
const OUT_OF_MEMORY: Status = 2;
const NO_DEVICE: Status = 100;
const INVALID_DEVICE: Status = 101;
const INVALID_IMAGE: Status = 200;
const INVALID_HANDLE: Status = 400;
const NOT_FOUND: Status = 500;
const NOT_READY: Status = 600;
const ILLEGAL_ADDRESS: Status = 700;
const NOT_SUPPORTED: Status = 801;

/// Memory that the device has: `$MESHWRIGHT_EMULATOR_BYTES`, or what the emulator's own tests and
/// small models fit.
fn total_bytes() -> usize {
    static TOTAL: OnceLock<usize> = OnceLock::new();
    *TOTAL.get_or_init(|| {
        let named = std::env::var("MESHWRIGHT_EMULATOR_BYTES").ok();
        named.and_then(|n| n.parse().ok()).unwrap_or(8 << 30)
    })
}

/// GPUs that the emulator shows: `$MESHWRIGHT_EMULATOR_GPUS`, or one. They have one memory, and
/// streams of their own.
fn n_devices() -> usize {
    static DEVICES: OnceLock<usize> = OnceLock::new();
    *DEVICES.get_or_init(|| {
        let named = std::env::var("MESHWRIGHT_EMULATOR_GPUS").ok();
        named
            .and_then(|n| n.parse().ok())
            .filter(|n| (1..=64).contains(n))
            .unwrap_or(1)
    })
}

/// The first bytes of an image; the path of a shared object follows.
pub const IMAGE: &str = "// emulated image of ";

fn gpu() -> &'static Gpu {
    static GPU: OnceLock<Gpu> = OnceLock::new();
    GPU.get_or_init(|| {
        let seed = std::env::var("MESHWRIGHT_EMULATOR_SEED").ok();
        let connections = std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok();
        Gpu::new(seed.and_then(|s| s.parse().ok()).unwrap_or(0))
            .with_connections(connections.as_deref())
    })
}

fn status(done: Result<(), String>) -> Status {
    match done {
        Ok(()) => SUCCESS,
        Err(_) => ILLEGAL_ADDRESS,
    }
}

/// Calls after an error of a kernel fail as it did.
fn sound() -> Result<(), Status> {
    match gpu().error() {
        Some(_) => Err(ILLEGAL_ADDRESS),
        None => Ok(()),
    }
}

/// A call for which the driver may wait for the whole GPU is an error while another rank's collective
/// waits there: that may wait for this very thread. `$MESHWRIGHT_EMULATOR_LOADS` may say `anytime`.
fn free_to(what: &str) {
    static ANYTIME: OnceLock<bool> = OnceLock::new();
    let says_so = || std::env::var("MESHWRIGHT_EMULATOR_LOADS").is_ok_and(|v| v == "anytime");
    if !ANYTIME.get_or_init(says_so) && gpu().is_held_up(current()) {
        gpu().fail(format!(
            "{what} while a collective of another rank waits on this GPU: the driver may wait for it"
        ));
    }
}

/// Holds back for ever the launch that first finds the file `$MESHWRIGHT_EMULATOR_HANGS`, which it
/// takes away, as a driver does that does not come back. A file that is not empty names the kernel.
fn comes_back(kernel: &str) {
    static FILE: OnceLock<Option<std::ffi::OsString>> = OnceLock::new();
    let file = FILE.get_or_init(|| std::env::var_os("MESHWRIGHT_EMULATOR_HANGS"));
    let is_meant = |named: String| named.is_empty() || named == kernel;
    let takes = |file: &std::ffi::OsString| {
        std::fs::read_to_string(file).is_ok_and(is_meant) && std::fs::remove_file(file).is_ok()
    };
    if file.as_ref().is_some_and(takes) {
        loop {
            std::thread::park();
        }
    }
}

fn put(stream: *mut c_void, op: Op) -> Status {
    match sound() {
        Err(status) => status,
        Ok(()) if gpu().put(stream as u64, op) => SUCCESS,
        Ok(()) => INVALID_HANDLE,
    }
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
/// `event` is null or one that [`cuEventCreate`] gave and nobody has destroyed.
unsafe fn event<'a>(event: *mut c_void) -> Option<&'a Arc<Event>> {
    // SAFETY: the caller's promise.
    unsafe { event.cast::<Arc<Event>>().as_ref() }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_: c_uint) -> Status {
    match cfg!(target_arch = "x86_64") {
        true => SUCCESS,
        false => NO_DEVICE,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> Status {
    // SAFETY: the caller's pointer.
    unsafe { give(version, 13000) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> Status {
    // SAFETY: the caller's pointer.
    unsafe { give(count, n_devices() as c_int) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> Status {
    match usize::try_from(ordinal).is_ok_and(|n| n < n_devices()) {
        // SAFETY: the caller's pointer.
        true => unsafe { give(device, ordinal) },
        false => INVALID_DEVICE,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, _: c_int) -> Status {
    let text = c"Emulated GPU".to_bytes_with_nul();
    if name.is_null() || (len as usize) < text.len() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller's buffer has `len` bytes.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), name.cast(), text.len()) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, _: c_int) -> Status {
    // SAFETY: the caller's pointer.
    unsafe { give(bytes, total_bytes()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Status {
    let used = gpu().memory(|m| m.used());
    // SAFETY: the caller's pointers.
    unsafe {
        give(total, total_bytes());
        give(free, total_bytes().saturating_sub(used))
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(
    value: *mut c_int,
    attribute: c_int,
    _: c_int,
) -> Status {
    let found = match attribute {
        // Threads of a block, of a warp; multiprocessors.
        1 => 1024,
        10 => 32,
        16 => 4,
        // Compute capability 9.0.
        75 => 9,
        76 => 0,
        // Shared memory that a block can be given.
        97 => MOST_SHARED as c_int,
        // Memory pools: none.
        115 => 0,
        other => {
            eprintln!("emulated GPU: attribute {other} is not known to the emulator");
            return NOT_SUPPORTED;
        }
    };
    // SAFETY: the caller's pointer.
    unsafe { give(value, found) }
}

/// The context of the first GPU, which is no pointer to anything; those of the others follow.
const CONTEXT: usize = 0xc0;

thread_local! {
    /// The context of this thread; zero is none.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// The GPU that this thread works on.
fn current() -> usize {
    CURRENT.get().saturating_sub(CONTEXT)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) -> Status {
    match usize::try_from(device) {
        // SAFETY: the caller's pointer.
        Ok(n) if n < n_devices() => unsafe { give(context, CONTEXT + n) },
        _ => INVALID_DEVICE,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(_: c_int) -> Status {
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut usize) -> Status {
    // SAFETY: the caller's pointer.
    unsafe { give(context, CURRENT.get()) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: *mut c_void) -> Status {
    CURRENT.set(context as usize);
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> Status {
    status(gpu().finish_device(current()))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut u64, _: c_uint) -> Status {
    // SAFETY: the caller's pointer.
    unsafe { give(stream, gpu().open(current())) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(stream: *mut c_void) -> Status {
    match gpu().close(stream as u64) {
        true => SUCCESS,
        false => INVALID_HANDLE,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: *mut c_void) -> Status {
    status(gpu().finish(stream as u64))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamWaitEvent(
    stream: *mut c_void,
    of: *mut c_void,
    _: c_uint,
) -> Status {
    // SAFETY: the caller's event.
    match unsafe { event(of) } {
        Some(event) if gpu().wait(stream as u64, event) => SUCCESS,
        _ => INVALID_HANDLE,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(to: *mut *mut c_void, _: c_uint) -> Status {
    let event: Box<Arc<Event>> = Box::default();
    // SAFETY: the caller's pointer.
    unsafe { give(to, Box::into_raw(event).cast()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventDestroy_v2(of: *mut c_void) -> Status {
    if of.is_null() {
        return INVALID_HANDLE;
    }
    // SAFETY: the caller's event, made by `cuEventCreate`. Streams that wait for it hold it.
    drop(unsafe { Box::from_raw(of.cast::<Arc<Event>>()) });
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventRecord(of: *mut c_void, stream: *mut c_void) -> Status {
    // SAFETY: the caller's event.
    match unsafe { event(of) } {
        Some(event) if gpu().record(stream as u64, event) => SUCCESS,
        _ => INVALID_HANDLE,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventQuery(of: *mut c_void) -> Status {
    // SAFETY: the caller's event.
    let Some(event) = (unsafe { event(of) }) else {
        return INVALID_HANDLE;
    };
    // Who asks again and again finds it over some time.
    match gpu().look() {
        Err(_) => ILLEGAL_ADDRESS,
        Ok(()) if event.is_over() => SUCCESS,
        Ok(()) => NOT_READY,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventSynchronize(of: *mut c_void) -> Status {
    // SAFETY: the caller's event.
    match unsafe { event(of) } {
        Some(event) => status(gpu().finish_event(event)),
        None => INVALID_HANDLE,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime_v2(
    ms: *mut f32,
    from: *mut c_void,
    to: *mut c_void,
) -> Status {
    // SAFETY: the caller's events.
    let (Some(from), Some(to)) = (unsafe { event(from) }, unsafe { event(to) }) else {
        return INVALID_HANDLE;
    };
    if !from.is_over() || !to.is_over() {
        return NOT_READY;
    }
    let passed = to.at_ns() as f64 - from.at_ns() as f64;
    // SAFETY: the caller's pointer.
    unsafe { give(ms, (passed / 1e6) as f32) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventElapsedTime(
    ms: *mut f32,
    from: *mut c_void,
    to: *mut c_void,
) -> Status {
    // SAFETY: as the caller promises.
    unsafe { cuEventElapsedTime_v2(ms, from, to) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(at: *mut u64, bytes: usize) -> Status {
    free_to("memory is allocated");
    if bytes == 0 {
        return INVALID_VALUE;
    }
    let fits = |m: &crate::memory::Memory| m.used().saturating_add(bytes) <= total_bytes();
    match gpu().memory(|m| fits(m).then(|| m.allocate(bytes)).flatten()) {
        // SAFETY: the caller's pointer.
        Some(address) => unsafe { give(at, address) },
        None => OUT_OF_MEMORY,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(at: u64) -> Status {
    free_to("memory is freed");
    // As the driver does: after all work.
    let _ = gpu().finish_device(current());
    match gpu().memory(|m| m.free(at)) {
        true => SUCCESS,
        false => INVALID_VALUE,
    }
}

/// Bytes before a block of pinned memory, which keep its size.
const HEAD: usize = 64;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(at: *mut *mut c_void, bytes: usize, _: c_uint) -> Status {
    free_to("memory of the host is pinned");
    // SAFETY: a plain allocation; the head is aligned and ours.
    unsafe {
        let block = libc::malloc(bytes.saturating_add(HEAD)).cast::<u8>();
        if block.is_null() {
            return OUT_OF_MEMORY;
        }
        std::ptr::write_bytes(block, 0xff, bytes + HEAD);
        give(at, block.add(HEAD).cast())
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFreeHost(at: *mut c_void) -> Status {
    free_to("pinned memory of the host is freed");
    let _ = gpu().finish_device(current());
    if at.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller's block, made by `cuMemHostAlloc`.
    unsafe { libc::free(at.cast::<u8>().sub(HEAD).cast()) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const c_void,
    bytes: usize,
    stream: *mut c_void,
) -> Status {
    let from = Side::Host(from as usize);
    put(stream, Op::Copy(Side::Device(to), from, bytes))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: u64,
    bytes: usize,
    stream: *mut c_void,
) -> Status {
    let to = Side::Host(to as usize);
    put(stream, Op::Copy(to, Side::Device(from), bytes))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoDAsync_v2(
    to: u64,
    from: u64,
    bytes: usize,
    stream: *mut c_void,
) -> Status {
    put(
        stream,
        Op::Copy(Side::Device(to), Side::Device(from), bytes),
    )
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8Async(at: u64, value: u8, bytes: usize, stream: *mut c_void) -> Status {
    put(stream, Op::Fill(at, value, bytes))
}

/// Puts work of another library of the emulator's on a stream.
#[unsafe(no_mangle)]
pub extern "C" fn emulated_put(stream: *mut c_void, run: Run, given: *mut c_void) -> Status {
    put(stream, Op::Work(run, given as usize))
}

/// Puts work on a stream that holds it up until it can be done, as others have come to it too.
#[unsafe(no_mangle)]
pub extern "C" fn emulated_meet(
    stream: *mut c_void,
    ready: Ready,
    run: Run,
    given: *mut c_void,
) -> Status {
    put(stream, Op::Meet(ready, run, given as usize))
}

/// Something that such work waits for has changed.
#[unsafe(no_mangle)]
pub extern "C" fn emulated_wake() {
    gpu().wake();
}

/// The GPU that this thread works on.
#[unsafe(no_mangle)]
pub extern "C" fn emulated_device() -> c_int {
    current() as c_int
}

/// The host address of bytes of the device, for that work; null where they are not allocated.
#[unsafe(no_mangle)]
pub extern "C" fn emulated_address(at: u64, bytes: usize) -> *mut u8 {
    let found = gpu().memory(|m| m.resolve(at, bytes as u64));
    found.unwrap_or(std::ptr::null_mut())
}

/// A shared object that is open, and its kernels.
struct Module {
    handle: *mut c_void,
    attach: Attach,
    /// Host threads may ask for functions of one module at the same time.
    #[allow(clippy::vec_box)] // callers have the addresses
    kernels: Mutex<Vec<Box<Kernel>>>,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(to: *mut *mut c_void, image: *const c_void) -> Status {
    free_to("a module is loaded");
    if image.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller's image ends with a zero, as PTX does.
    let text = unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy();
    let Some(path) = text
        .strip_prefix(IMAGE)
        .and_then(|p| CString::new(p.trim()).ok())
    else {
        eprintln!("emulated GPU: a module that the emulator's NVRTC has not made");
        return INVALID_IMAGE;
    };
    // SAFETY: a module that the emulator's compiler made; opening it runs no code.
    unsafe {
        let handle = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
        let attach = match handle.is_null() {
            true => std::ptr::null_mut(),
            false => libc::dlsym(handle, c"emulated_attach".as_ptr()),
        };
        if attach.is_null() {
            eprintln!("emulated GPU: {} cannot be opened", path.to_string_lossy());
            return INVALID_IMAGE;
        }
        let module = Box::new(Module {
            handle,
            attach: std::mem::transmute::<*mut c_void, Attach>(attach),
            kernels: Mutex::default(),
        });
        give(to, Box::into_raw(module).cast())
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleUnload(module: *mut c_void) -> Status {
    free_to("a module is unloaded");
    let _ = gpu().finish_device(current());
    if module.is_null() {
        return INVALID_HANDLE;
    }
    // SAFETY: the caller's module, made by `cuModuleLoadData`, and no launch of it is left.
    unsafe {
        let module = Box::from_raw(module.cast::<Module>());
        libc::dlclose(module.handle);
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(
    to: *mut *mut c_void,
    module: *mut c_void,
    name: *const c_char,
) -> Status {
    free_to("a kernel is loaded");
    // SAFETY: the caller's module and name.
    unsafe {
        let Some(module) = module.cast::<Module>().as_ref() else {
            return INVALID_HANDLE;
        };
        let name = CStr::from_ptr(name);
        let size = [name.to_bytes(), b"_bytes"].concat();
        let Ok(size) = CString::new(size) else {
            return INVALID_VALUE;
        };
        let entry = libc::dlsym(module.handle, name.as_ptr());
        let size = libc::dlsym(module.handle, size.as_ptr()).cast::<u64>();
        if entry.is_null() || size.is_null() {
            return NOT_FOUND;
        }
        let mut kernel = Box::new(Kernel {
            name: name.to_string_lossy().into_owned(),
            entry: std::mem::transmute::<*mut c_void, Entry>(entry),
            attach: module.attach,
            parameter_bytes: *size as usize,
            most_shared: Arc::new(AtomicUsize::new(USUAL_SHARED)),
        });
        let at: *mut Kernel = &mut *kernel;
        let mut kernels = module
            .kernels
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        kernels.push(kernel);
        give(to, at.cast())
    }
}

/// Attributes that can be set here: most bytes of shared memory that launches ask for, and how much
/// of it is preferred to a cache, of which nothing comes here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncSetAttribute(
    function: *mut c_void,
    attribute: c_int,
    value: c_int,
) -> Status {
    // SAFETY: the caller's function.
    let Some(kernel) = (unsafe { function.cast::<Kernel>().as_ref() }) else {
        return INVALID_HANDLE;
    };
    match (attribute, usize::try_from(value)) {
        (8, Ok(bytes)) if bytes <= MOST_SHARED => {
            kernel.most_shared.store(bytes, Ordering::Relaxed);
            SUCCESS
        }
        (9, Ok(percent)) if percent <= 100 => SUCCESS,
        (8 | 9, _) => INVALID_VALUE,
        _ => {
            eprintln!(
                "emulated GPU: attribute {attribute} of functions is not known to the emulator"
            );
            NOT_SUPPORTED
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernel(
    function: *mut c_void,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: *mut c_void,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Status {
    if parameters.is_null() || !extra.is_null() {
        eprintln!("emulated GPU: a launch without a parameter");
        return NOT_SUPPORTED;
    }
    // SAFETY: the caller's function and its one parameter, of the size that the kernel has.
    let (kernel, parameter) = unsafe {
        let Some(kernel) = function.cast::<Kernel>().as_ref() else {
            return INVALID_HANDLE;
        };
        let mut words = vec![0u64; kernel.parameter_bytes.div_ceil(8)];
        let to = words.as_mut_ptr().cast::<u8>();
        std::ptr::copy_nonoverlapping((*parameters).cast(), to, kernel.parameter_bytes);
        (kernel.clone(), words)
    };
    comes_back(&kernel.name);
    let dim = |x, y, z| Dim { x, y, z };
    let (grid, block) = (dim(grid_x, grid_y, grid_z), dim(block_x, block_y, block_z));
    let shared_bytes = shared_bytes as usize;
    if shared_bytes > kernel.most_shared.load(Ordering::Relaxed) {
        eprintln!(
            "emulated GPU: {} is launched with {shared_bytes} bytes of shared memory, more than \
             it was told",
            kernel.name
        );
        return INVALID_VALUE;
    }
    let extent = (grid, block, shared_bytes);
    put(stream, Op::Launch(kernel, extent, parameter))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(error: Status, to: *mut *const c_char) -> Status {
    let name = match error {
        SUCCESS => c"CUDA_SUCCESS",
        INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
        OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
        NO_DEVICE => c"CUDA_ERROR_NO_DEVICE",
        INVALID_DEVICE => c"CUDA_ERROR_INVALID_DEVICE",
        INVALID_IMAGE => c"CUDA_ERROR_INVALID_IMAGE",
        INVALID_HANDLE => c"CUDA_ERROR_INVALID_HANDLE",
        NOT_FOUND => c"CUDA_ERROR_NOT_FOUND",
        NOT_READY => c"CUDA_ERROR_NOT_READY",
        ILLEGAL_ADDRESS => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        NOT_SUPPORTED => c"CUDA_ERROR_NOT_SUPPORTED",
        _ => return INVALID_VALUE,
    };
    // SAFETY: the caller's pointer.
    unsafe { give(to, name.as_ptr()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(error: Status, to: *mut *const c_char) -> Status {
    if error == ILLEGAL_ADDRESS
        && let Some(what) = gpu().error()
        && let Ok(what) = CString::new(what)
    {
        // Callers keep the pointer; the device has ended, so there are few of them.
        // SAFETY: the caller's pointer.
        return unsafe { give(to, CString::into_raw(what).cast_const()) };
    }
    // SAFETY: the caller's pointer.
    unsafe { cuGetErrorName(error, to) }
}
