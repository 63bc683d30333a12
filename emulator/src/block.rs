//! Blocks of threads: each thread is a fiber with a stack of its own. A fiber runs until its
//! kernel ends or waits at a barrier, of the block or of its warp; a thread that never waits costs
//! one switch. A warp goes on until it can do nothing more without the others of its block.

#![allow(unsafe_code)] // switches stacks and calls compiled kernels

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_void};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

/// Bytes of a fiber's stack.
const STACK: usize = 64 << 10;
/// Threads of a warp.
const WARP: usize = 32;
/// Most threads of a block, as on real devices.
pub const MOST_THREADS: usize = 1024;
/// Most bytes of shared memory that a launch may ask for; more than [`USUAL_SHARED`] only where the
/// function was told. Those of compute capability 9.0.
pub const MOST_SHARED: usize = 227 << 10;
/// The same of a function that was told nothing.
pub const USUAL_SHARED: usize = 48 << 10;
/// The alignment of shared memory that a launch asked for.
const SHARED_ALIGNMENT: usize = 1024;

/// Extents or indices along x, y and z.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dim {
    /// Along x.
    pub x: u32,
    /// Along y.
    pub y: u32,
    /// Along z.
    pub z: u32,
}

impl Dim {
    fn count(self) -> usize {
        self.x as usize * self.y as usize * self.z as usize
    }
    fn at(self, i: usize) -> Dim {
        let (x, y) = (self.x as usize, self.y as usize);
        Dim {
            x: (i % x) as u32,
            y: (i / x % y) as u32,
            z: (i / x / y) as u32,
        }
    }
}

/// The view that compiled kernels have of their block: `EmulatedBlock` of the header.
#[repr(C)]
pub struct Block {
    thread: Dim,
    block: Dim,
    block_dim: Dim,
    grid_dim: Dim,
    slots: *mut u64,
    sync: extern "C" fn(),
    sync_warp: extern "C" fn(),
    fail: extern "C" fn(*const c_char, u64, u64),
    span: extern "C" fn(u64, u64) -> u64,
    shared: *mut u8,
    shared_bytes: u64,
}

/// Tells a module which block its thread runs.
pub type Attach = extern "C" fn(*mut Block);
/// A kernel, called with its parameter.
pub type Entry = extern "C" fn(*const c_void);

/// A kernel of a loaded module.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Its name.
    pub name: String,
    /// Its code.
    pub entry: Entry,
    /// Its module's.
    pub attach: Attach,
    /// Bytes of its parameter.
    pub parameter_bytes: usize,
    /// Most bytes of shared memory that a launch may ask for, as the function was told.
    pub most_shared: Arc<AtomicUsize>,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    New,
    Ready,
    AtBarrier,
    AtWarp,
    Done,
}

struct Fiber {
    stack: Option<Vec<u128>>,
    pointer: *mut u8,
    state: State,
}

/// The block that a host thread runs.
struct Runner {
    shared: Block,
    /// The memory that `shared` points to.
    _slots: Vec<u64>,
    _shared: Vec<u8>,
    fibers: Vec<Fiber>,
    scheduler: *mut u8,
    current: usize,
    entry: Option<Entry>,
    parameter: *const c_void,
    failed: Option<String>,
    resolve: *const dyn Fn(u64, u64) -> bool,
}

thread_local! {
    /// Stacks for fibers to come: fresh ones would be mapped, and touched, for every launch.
    static FREE: RefCell<Vec<Vec<u128>>> = const { RefCell::new(Vec::new()) };
    static RUNNER: RefCell<*mut Runner> = const { RefCell::new(std::ptr::null_mut()) };
}

/// Blocks of a launch, threads of a block, and bytes of shared memory that a block has.
pub type Extent = (Dim, Dim, usize);

/// Runs all blocks of a launch, one after the other. `is_memory` says whether bytes at a device
/// address are allocated. The error says what a thread did.
pub fn launch(
    kernel: &Kernel,
    (grid, block, shared_bytes): Extent,
    parameter: &[u64],
    is_memory: &dyn Fn(u64, u64) -> bool,
) -> Result<(), String> {
    let n = block.count();
    let dims = [grid.x, grid.y, grid.z];
    if n == 0 || n > MOST_THREADS || dims.contains(&0) {
        return Err(format!("{}: {grid:?} blocks of {block:?}", kernel.name));
    }
    let mut slots = vec![0; n.next_multiple_of(WARP)];
    let mut shared = vec![0u8; shared_bytes + SHARED_ALIGNMENT];
    let offset = shared.as_ptr().align_offset(SHARED_ALIGNMENT);
    let fiber = || Fiber {
        stack: None,
        pointer: std::ptr::null_mut(),
        state: State::New,
    };
    // SAFETY: only the lifetime changes; the runner does not outlive this call.
    let resolve: *const (dyn Fn(u64, u64) -> bool + 'static) =
        unsafe { std::mem::transmute(is_memory as *const dyn Fn(u64, u64) -> bool) };
    let mut runner = Runner {
        shared: Block {
            thread: Dim::default(),
            block: Dim::default(),
            block_dim: block,
            grid_dim: grid,
            slots: slots.as_mut_ptr(),
            sync,
            sync_warp,
            fail,
            span,
            // Full of NaN when a block begins, as fresh memory of the device.
            shared: shared[offset..].as_mut_ptr(),
            shared_bytes: shared_bytes as u64,
        },
        _shared: shared,
        _slots: slots,
        fibers: (0..n).map(|_| fiber()).collect(),
        scheduler: std::ptr::null_mut(),
        current: 0,
        entry: Some(kernel.entry),
        parameter: parameter.as_ptr().cast(),
        failed: None,
        resolve,
    };
    let this: *mut Runner = &mut runner;
    RUNNER.with(|r| r.replace(this));
    // SAFETY: the module was loaded with this function, and `runner` lives until the end.
    (kernel.attach)(unsafe { &mut (*this).shared });
    let mut done = Ok(());
    for index in 0..grid.count() {
        // SAFETY: as above; fibers that use `this` run only inside of the call.
        done = unsafe { run_block(this, grid.at(index)) };
        if done.is_err() {
            break;
        }
    }
    RUNNER.with(|r| r.replace(std::ptr::null_mut()));
    done.map_err(|what| format!("kernel {}: {what}", kernel.name))
}

/// # Safety
/// `this` is the runner of this host thread, and nothing else uses it meanwhile but fibers.
unsafe fn run_block(this: *mut Runner, at: Dim) -> Result<(), String> {
    // SAFETY: the caller's promise. Borrows end before a fiber is resumed, as fibers make theirs.
    unsafe {
        (*this).shared.block = at;
        let Block {
            shared,
            shared_bytes,
            ..
        } = (*this).shared;
        shared.write_bytes(0xff, shared_bytes as usize);
        for fiber in &mut (*this).fibers {
            fiber.state = State::New;
        }
        let n_warps = (*this).fibers.len().div_ceil(WARP);
        for round in 0.. {
            // A warp runs as far as it can alone, so that it meets what others have not done yet;
            // the first one and the last one by turns are ahead.
            for i in 0..n_warps {
                let warp = if round % 2 == 0 { i } else { n_warps - 1 - i };
                run_warp(this, warp, at)?;
            }
            let fibers = &mut (*this).fibers;
            if fibers.iter().all(|f| f.state == State::Done) {
                return Ok(());
            }
            for fiber in fibers.iter_mut().filter(|f| f.state == State::AtBarrier) {
                fiber.state = State::Ready;
            }
        }
    }
    Ok(())
}

/// Lets the threads of a warp run until they wait for others of the block, or end.
///
/// # Safety
/// As [`run_block`].
unsafe fn run_warp(this: *mut Runner, warp: usize, at: Dim) -> Result<(), String> {
    // SAFETY: the caller's promise, as in `run_block`.
    unsafe {
        let n = (*this).fibers.len();
        let threads = warp * WARP..n.min((warp + 1) * WARP);
        loop {
            for i in threads.clone() {
                if matches!((&(*this).fibers)[i].state, State::New | State::Ready) {
                    resume(this, i);
                    if let Some(what) = (*this).failed.take() {
                        return Err(what);
                    }
                }
            }
            let fibers = &mut (&mut (*this).fibers)[threads.clone()];
            if !fibers.iter().any(|f| f.state == State::AtWarp) {
                return Ok(());
            }
            let waits = |f: &Fiber| matches!(f.state, State::AtWarp | State::Done);
            if !fibers.iter().all(waits) {
                return Err(format!(
                    "threads of a warp of block {at:?} wait for each other at different places"
                ));
            }
            for fiber in fibers.iter_mut().filter(|f| f.state == State::AtWarp) {
                fiber.state = State::Ready;
            }
        }
    }
}

/// Lets a fiber run until it waits or ends.
///
/// # Safety
/// As [`run_block`].
unsafe fn resume(this: *mut Runner, i: usize) {
    // SAFETY: the caller's promise; the stack is the fiber's alone.
    unsafe {
        (*this).current = i;
        (*this).shared.thread = (*this).shared.block_dim.at(i);
        if (&(*this).fibers)[i].state == State::New {
            let stack = FREE.with(|free| free.borrow_mut().pop());
            let mut stack = stack.unwrap_or_else(|| vec![0; STACK / 16]);
            // Six registers, and where to return to; a function begins 8 bytes off alignment.
            let top = stack.as_mut_ptr().add(stack.len()).cast::<u64>();
            let pointer = top.sub(8);
            pointer.write_bytes(0, 8);
            pointer.add(6).write(begin as *const () as u64);
            let fiber = &mut (&mut (*this).fibers)[i];
            fiber.stack = Some(stack);
            fiber.pointer = pointer.cast();
        }
        let to = (&(*this).fibers)[i].pointer;
        switch(&raw mut (*this).scheduler, to);
        let fiber = &mut (&mut (*this).fibers)[i];
        if fiber.state == State::Done
            && let Some(stack) = fiber.stack.take()
        {
            FREE.with(|free| free.borrow_mut().push(stack));
        }
    }
}

fn current() -> *mut Runner {
    RUNNER.with(|r| *r.borrow())
}

/// The first function of a fiber; it never returns.
extern "C" fn begin() {
    let this = current();
    // SAFETY: only fibers of a running block come here.
    unsafe {
        if let Some(entry) = (*this).entry {
            entry((*this).parameter);
        }
    }
    pause(State::Done);
}

/// Gives way to the scheduler of the block.
fn pause(state: State) {
    let this = current();
    // SAFETY: as in `begin`; the scheduler's stack pointer was kept when it resumed this fiber.
    unsafe {
        let i = (*this).current;
        let fiber = &mut (&mut (*this).fibers)[i];
        fiber.state = state;
        let from = &raw mut fiber.pointer;
        switch(from, (*this).scheduler);
    }
}

extern "C" fn sync() {
    pause(State::AtBarrier);
}

extern "C" fn sync_warp() {
    pause(State::AtWarp);
}

/// Ends the launch: the fiber is never resumed.
extern "C" fn fail(what: *const c_char, a: u64, b: u64) {
    let this = current();
    // SAFETY: `what` is a literal of the header or a kernel.
    let what = unsafe { CStr::from_ptr(what) }.to_string_lossy();
    // SAFETY: as in `begin`.
    unsafe {
        let Block { thread, block, .. } = &(*this).shared;
        let (t, b_at) = ([thread.x, thread.y, thread.z], [block.x, block.y, block.z]);
        (*this).failed = Some(format!(
            "{what} ({a}, {b}), in thread {t:?} of block {b_at:?}"
        ));
    }
    pause(State::Done);
}

/// The host address of bytes of the device; it fails where they are not allocated.
extern "C" fn span(at: u64, bytes: u64) -> u64 {
    let this = current();
    // SAFETY: as in `begin`; the function outlives the launch. All threads have the same operands,
    // so one of them is enough.
    let is_wrong = unsafe {
        let Block { thread, block, .. } = &(*this).shared;
        let is_first = *thread == Dim::default() && *block == Dim::default();
        is_first && bytes > 0 && !(*(*this).resolve)(at, bytes)
    };
    if is_wrong {
        fail(
            c"uses memory that is not allocated: address, bytes".as_ptr(),
            at,
            bytes,
        );
    }
    at & !(1 << 62)
}

/// Keeps the registers that a call keeps on this stack, and goes on where `to` stopped.
///
/// # Safety
/// `to` is a stack pointer that this function kept, or one made by [`resume`].
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn switch(from: *mut *mut u8, to: *mut u8) {
    std::arch::naked_asm!(
        "push rbp",
        "push rbx",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "mov [rdi], rsp",
        "mov rsp, rsi",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbx",
        "pop rbp",
        "ret",
    )
}

/// Fibers are for x86-64 alone; elsewhere the driver says that it has no device.
///
/// # Safety
/// Never called.
#[cfg(not(target_arch = "x86_64"))]
unsafe extern "C" fn switch(_: *mut *mut u8, _: *mut u8) {}
