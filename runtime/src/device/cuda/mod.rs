//! An NVIDIA GPU as a device, through CUDA's driver and its runtime compiler, both opened when they
//! are first used: one binary runs everywhere.
//!
//! A rank has an arena in the GPU's memory and one of pinned memory of the host. The program's
//! streams are streams, its events are events. Kernels are CUDA C++ ([`args`] lists the files),
//! compiled for the GPU that is found and the element types that are used; [`ops`] turns work into
//! calls of them, plain data that this file launches.
//!
//! Nothing waits for the GPU but what the host reads and writes, and nothing is allocated but
//! memory for operands that overlap results, which a stream keeps.

#![allow(unsafe_code)] // calls the driver with addresses of memory that is owned here

mod args;
mod beside;
#[cfg(any(test, feature = "testing"))]
mod cases;
mod chained;
mod compiled;
mod joined;
mod launches;
mod lend;
mod library;
mod ops;
pub(crate) mod places;
mod products;

pub use beside::beside_arena;
#[cfg(any(test, feature = "testing"))]
pub use cases::{Compared, Timed, compare, time};
pub use launches::launches;
pub(crate) use lend::{Region, is_over};
pub use library::{Facts, count, facts, free_memory, name};
pub use products::{Matmuls, Multiplier, has_library, multiplier};

use super::{Chain, Device, Place, Space, Tensor, Work};
use crate::arena::{Bytes, View};
use crate::clock::Elapsed;
use crate::error::RuntimeError;
use args::{Args, Call, Calls, Product, Span, Step, Types};
use cudarc::driver::{
    CudaContext, CudaEvent, CudaFunction, CudaStream, DeviceRepr, LaunchConfig, PushKernelArg,
    result, sys,
};
use ir::program::{InstrKind, Program, RoleProgram};
use ir::{OpKind, StreamId};
use joined::Joined;
use library::{Gpu, failed};
use ops::{Op, Part};
use products::{Products, WORKSPACE};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

// SAFETY: plain numbers, laid out as the kernels' `Args`.
unsafe impl DeviceRepr for Args {}
// SAFETY: plain numbers, laid out as the kernels' `Calls`.
unsafe impl DeviceRepr for Calls {}

/// Arenas and streams of a rank on a GPU.
pub struct Cuda {
    gpu: Arc<Gpu>,
    device: Block,
    host: Pinned,
    lanes: BTreeMap<StreamId, Lane>,
    /// For reads of streams that nothing was given.
    own: Arc<CudaStream>,
    functions: HashMap<(&'static str, Types), CudaFunction>,
    /// cuBLASLt, where it is there and wanted.
    products: Option<Products>,
    /// Bytes of the GPU's memory that tables of joined works take.
    kept_bytes: u64,
    /// Whether memory that steps take is only being laid in.
    rehearses: bool,
}

/// A stream, and its memory for what lies between kernels.
struct Lane {
    stream: Arc<CudaStream>,
    scratch: Block,
    /// Scratch that became too small. It is kept, as freeing memory waits for the GPU, where
    /// another rank's work may wait for this one's. All together is smaller than what followed it.
    outgrown: Vec<Block>,
    /// Bytes that the host has written and the stream copies, until the event.
    written: Vec<(Pinned, CudaEvent)>,
    /// The last ones of these, which were written since all streams were done.
    n_new: usize,
    /// The memory that the library works in, where the stream multiplied matrices.
    workspace: Option<Block>,
    /// Works that came together.
    joined: Vec<Arc<Joined>>,
}

/// Memory of the GPU.
struct Block {
    context: Arc<CudaContext>,
    at: sys::CUdeviceptr,
    len: usize,
}

impl Block {
    fn new(context: &Arc<CudaContext>, len: usize) -> Result<Self, RuntimeError> {
        context.bind_to_thread().map_err(|e| failed("the GPU", e))?;
        // SAFETY: the context is current; the block is freed once, by `drop`.
        let at = unsafe { result::malloc_sync(len.max(1)) };
        let at = at.map_err(|e| failed(&format!("allocating {len} bytes of the GPU"), e))?;
        Ok(Block {
            context: Arc::clone(context),
            at,
            len,
        })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.context.record_err(self.context.bind_to_thread());
        // SAFETY: allocated by `new`; the driver lets all work end first.
        self.context
            .record_err(unsafe { result::free_sync(self.at) });
    }
}

/// Memory of the host that the GPU copies from and to.
struct Pinned {
    context: Arc<CudaContext>,
    at: *mut u8,
    len: usize,
}

// SAFETY: the memory is this value's alone.
unsafe impl Send for Pinned {}

impl Pinned {
    fn new(context: &Arc<CudaContext>, len: usize) -> Result<Self, RuntimeError> {
        context.bind_to_thread().map_err(|e| failed("the GPU", e))?;
        // SAFETY: the context is current; the block is freed once, by `drop`.
        let at = unsafe { result::malloc_host(len.max(1), 0) };
        let at = at.map_err(|e| failed(&format!("pinning {len} bytes of the host"), e))?;
        // SAFETY: fresh memory of this length.
        unsafe { std::ptr::write_bytes(at.cast::<u8>(), 0, len) };
        Ok(Pinned {
            context: Arc::clone(context),
            at: at.cast(),
            len,
        })
    }
    /// # Safety
    /// No stream works on the bytes, which lie in the block.
    unsafe fn bytes(&self, at: Place) -> &[u8] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(self.at.add(at.start), at.len) }
    }
    /// # Safety
    /// As [`Pinned::bytes`].
    unsafe fn bytes_mut(&mut self, at: Place) -> &mut [u8] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(at.start), at.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.context.record_err(self.context.bind_to_thread());
        self.context.record_err(self.context.synchronize());
        // SAFETY: allocated by `new`, and no copy is left.
        self.context
            .record_err(unsafe { result::free_host(self.at.cast()) });
    }
}

/// Bytes of shared memory that every launch may ask for; for more the function has to be told.
const USUAL_SHARED: u32 = 48 << 10;

/// Lets launches of a function ask for as much shared memory as this call does, and prefers shared
/// memory to a cache of what the kernel keeps there itself. Fails where the GPU has less.
fn allow_shared(function: &CudaFunction, call: &Call) -> Result<(), RuntimeError> {
    use sys::CUfunction_attribute::{
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
        CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
    };
    let set = |attribute, value| {
        function.set_attribute(attribute, value).map_err(|e| {
            let what = format!("{} bytes of shared memory for {}", call.shared, call.kernel);
            failed(&what, e)
        })
    };
    if call.shared > USUAL_SHARED {
        let bytes = call.shared as i32;
        set(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes)?;
    }
    if call.shared > 0 {
        let percent = 100;
        set(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, percent)?;
    }
    Ok(())
}

/// Fails where there are no kernels for an op as a program has it, by its name: before a run rather
/// than in it.
pub fn check(program: &Program) -> Result<(), RuntimeError> {
    for role in &program.roles {
        for instruction in role.templates.iter().flat_map(|t| &t.instructions) {
            if let InstrKind::Compute {
                path,
                kind,
                inputs,
                outputs,
            } = &instruction.kind
                && let Some(Err(e)) = launches::computed(role, (path, kind), inputs, outputs)
            {
                return Err(e);
            }
        }
    }
    Ok(())
}

/// Bytes of scratch memory that a copied operand takes.
fn aligned(bytes: u64) -> usize {
    (bytes as usize).next_multiple_of(256)
}

impl Cuda {
    /// Arenas of so many bytes on GPU `ordinal` and in the host's memory.
    ///
    /// Fails where [`count`] does, where there is no such GPU, or not enough memory.
    pub fn new(ordinal: usize, device: usize, host: usize) -> Result<Self, RuntimeError> {
        Self::with(ordinal, device, host, Matmuls::default())
    }

    /// The same, and matrices are multiplied so.
    pub fn with(
        ordinal: usize,
        device: usize,
        host: usize,
        matmuls: Matmuls,
    ) -> Result<Self, RuntimeError> {
        count()?;
        let gpu = Gpu::open(ordinal)?;
        let own = gpu
            .context
            .new_stream()
            .map_err(|e| failed("a stream", e))?;
        let device = Block::new(&gpu.context, device)?;
        let products = Products::open(matmuls);
        let host = Pinned::new(&gpu.context, host)?;
        let cuda = Cuda {
            gpu,
            device,
            host,
            lanes: BTreeMap::new(),
            own,
            functions: HashMap::new(),
            products,
            kept_bytes: 0,
            rehearses: false,
        };
        cuda.clear_arena()?;
        Ok(cuda)
    }

    /// Makes the arena of the GPU's memory zeros. No stream works on it.
    fn clear_arena(&self) -> Result<(), RuntimeError> {
        self.bind()?;
        let (at, len, own) = (self.device.at, self.device.len, &self.own);
        // SAFETY: the block has the bytes.
        let zeros = unsafe { result::memset_d8_async(at, 0, len, own.cu_stream()) };
        let done = zeros.and_then(|()| own.synchronize());
        done.map_err(|e| failed("the arena", e))
    }

    /// Compiles the kernels that a role's program calls, many at once, so that its first step does
    /// not wait for one after the other.
    pub fn prepare(&self, role: &RoleProgram) {
        self.gpu.prepare(&launches::files(role));
    }

    fn bind(&self) -> Result<(), RuntimeError> {
        let bound = self.gpu.context.bind_to_thread();
        bound.map_err(|e| failed("the GPU", e))
    }

    /// Fails where a place reaches beyond its arena.
    fn within(&self, at: Place) -> Result<(), RuntimeError> {
        let bytes = match at.space {
            Space::Device => self.device.len,
            Space::Host => self.host.len,
            Space::File => 0,
        };
        match at.start.checked_add(at.len).filter(|end| *end <= bytes) {
            Some(_) => Ok(()),
            None => Err(RuntimeError::Program(format!(
                "{} bytes at {} reach beyond the arena of {bytes}",
                at.len, at.start
            ))),
        }
    }

    /// Where a place of the GPU's arena lies.
    fn span(&self, at: Place) -> Result<Span, RuntimeError> {
        self.within(at)?;
        match at.space {
            Space::Device => Ok(Span {
                at: self.device.at + at.start as u64,
                bytes: at.len as u64,
            }),
            space => Err(RuntimeError::Program(format!(
                "a kernel cannot use memory of {space:?}"
            ))),
        }
    }

    fn part<'a>(&self, tensor: &Tensor<'a>) -> Result<Part<'a>, RuntimeError> {
        Ok(Part {
            local: tensor.local,
            span: self.span(tensor.at)?,
        })
    }

    fn parts<'a>(&self, tensors: &[Tensor<'a>]) -> Result<Vec<Part<'a>>, RuntimeError> {
        tensors.iter().map(|t| self.part(t)).collect()
    }

    /// The stream, or one that has nothing to do.
    fn stream(&self, stream: StreamId) -> &Arc<CudaStream> {
        self.lanes.get(&stream).map_or(&self.own, |l| &l.stream)
    }

    fn lane(&mut self, stream: StreamId) -> Result<&mut Lane, RuntimeError> {
        if !self.lanes.contains_key(&stream) {
            let context = &self.gpu.context;
            let lane = Lane {
                stream: context.new_stream().map_err(|e| failed("a stream", e))?,
                scratch: Block::new(context, ops::SCRATCH)?,
                outgrown: Vec::new(),
                written: Vec::new(),
                n_new: 0,
                workspace: None,
                joined: Vec::new(),
            };
            self.lanes.insert(stream, lane);
        }
        let lane = self.lanes.get_mut(&stream);
        lane.ok_or_else(|| RuntimeError::Program("a stream is gone".into()))
    }

    /// Has a stream's scratch memory hold so many bytes.
    fn reserve(&mut self, stream: StreamId, bytes: usize) -> Result<u64, RuntimeError> {
        let context = Arc::clone(&self.gpu.context);
        let lane = self.lane(stream)?;
        if lane.scratch.len < bytes {
            let larger = Block::new(&context, bytes.next_power_of_two())?;
            lane.outgrown
                .push(std::mem::replace(&mut lane.scratch, larger));
        }
        Ok(lane.scratch.at)
    }

    fn wait_for(&self, stream: StreamId) -> Result<(), RuntimeError> {
        let done = self.stream(stream).synchronize();
        done.map_err(|e| failed("the GPU", e))
    }

    fn run(&mut self, stream: StreamId, steps: &[Step]) -> Result<(), RuntimeError> {
        for step in steps {
            match step {
                Step::Call(call) if call.is_empty() => {}
                Step::Call(call) => self.call(stream, call)?,
                Step::Product(product) => self.multiply(stream, product)?,
                Step::Copy { from, to, bytes } => {
                    let to_stream = self.lane(stream)?.stream.cu_stream();
                    // SAFETY: both are in blocks of this device, and do not overlap.
                    let done = unsafe { result::memcpy_dtod_async(*to, *from, *bytes, to_stream) };
                    done.map_err(|e| failed("a copy", e))?;
                }
            }
        }
        Ok(())
    }

    /// The stream and its workspace, which it gets when it first multiplies.
    fn workspace(&mut self, stream: StreamId) -> Result<(Arc<CudaStream>, u64), RuntimeError> {
        let context = Arc::clone(&self.gpu.context);
        let lane = self.lane(stream)?;
        let at = match &lane.workspace {
            Some(block) => block.at,
            None => lane.workspace.insert(Block::new(&context, WORKSPACE)?).at,
        };
        Ok((Arc::clone(&lane.stream), at))
    }

    /// Whether the library has algorithms for all products of these steps.
    fn can_multiply(&mut self, stream: StreamId, steps: &[Step]) -> Result<bool, RuntimeError> {
        let mut can = true;
        for step in steps {
            let Step::Product(product) = step else {
                continue;
            };
            let (on, workspace) = self.workspace(stream)?;
            let products = self.products.as_mut();
            let ready = products.map(|p| p.ready(product, &on, workspace, &self.gpu.chosen));
            can = can && ready.transpose()? == Some(true);
        }
        Ok(can)
    }

    fn multiply(&mut self, stream: StreamId, product: &Product) -> Result<(), RuntimeError> {
        let (on, workspace) = self.workspace(stream)?;
        match &self.products {
            Some(products) => products.multiply(product, &on, workspace),
            None => Err(RuntimeError::Program("a product without cuBLASLt".into())),
        }
    }

    /// Has the host write so many bytes, which the stream copies to the GPU.
    fn send(
        &mut self,
        stream: StreamId,
        to: u64,
        len: usize,
        write: &mut dyn FnMut(&mut [u8]) -> Result<(), RuntimeError>,
    ) -> Result<(), RuntimeError> {
        let (context, rehearses) = (Arc::clone(&self.gpu.context), self.rehearses);
        let lane = self.lane(stream)?;
        // The smallest block whose copy is done, else one more: as many as copies that are on their
        // way. In a rehearsal that is each since its streams were last done, as in a step all of them
        // may be.
        let n_old = lane
            .written
            .len()
            .saturating_sub(if rehearses { lane.n_new } else { 0 });
        let mut block: Option<usize> = None;
        for (i, (pinned, copied)) in lane.written[..n_old].iter().enumerate() {
            let is_smaller = block.is_none_or(|b| pinned.len < lane.written[b].0.len);
            if pinned.len >= len && is_smaller && is_over(copied)? {
                block = Some(i);
            }
        }
        let mut pinned = match block {
            Some(i) => lane.written.remove(i).0,
            None => Pinned::new(&context, len.next_power_of_two())?,
        };
        let place = Place {
            space: Space::Host,
            start: 0,
            len,
        };
        // SAFETY: the block has the bytes, and no copy of it is left.
        let bytes = unsafe { pinned.bytes_mut(place) };
        bytes.fill(0);
        write(bytes)?;
        // SAFETY: the block stays where it is until the event is over, and the target has the bytes.
        let copied = unsafe { result::memcpy_htod_async(to, bytes, lane.stream.cu_stream()) };
        let event = copied.and_then(|()| lane.stream.record_event(None));
        let event = event.map_err(|e| failed("writing the GPU's memory", e))?;
        lane.written.push((pinned, event));
        lane.n_new += 1;
        Ok(())
    }

    fn call(&mut self, stream: StreamId, call: &Call) -> Result<(), RuntimeError> {
        self.start(stream, (call, call.kernel), call.grid, &*call.args)
    }

    /// Launches a kernel of a call's file, for its types and with its threads.
    fn start<T: DeviceRepr>(
        &mut self,
        stream: StreamId,
        (call, kernel): (&Call, &'static str),
        [x, y, z]: [u32; 3],
        parameter: &T,
    ) -> Result<(), RuntimeError> {
        let on = Arc::clone(&self.lane(stream)?.stream);
        let key = (kernel, call.types);
        let function = match self.functions.get(&key) {
            Some(function) => function,
            None => {
                let module = self.gpu.module(call)?;
                let found = module.load_function(kernel);
                let found = found.map_err(|e| failed(kernel, e))?;
                allow_shared(&found, call)?;
                self.functions.entry(key).or_insert(found)
            }
        };
        let config = LaunchConfig {
            grid_dim: (x, y, z),
            block_dim: (call.threads, 1, 1),
            shared_mem_bytes: call.shared,
        };
        let mut launch = on.launch_builder(function);
        launch.arg(parameter);
        // SAFETY: every kernel has this one parameter, and keeps to its operands, which are in
        // memory of this device.
        let launched = unsafe { launch.launch(config) };
        launched.map(|_| ()).map_err(|e| failed(kernel, e))
    }

    fn compute(
        &mut self,
        stream: StreamId,
        (path, kind): (&str, &OpKind),
        (inputs, outputs): (&[Tensor<'_>], &[Tensor<'_>]),
        context: &crate::execute::Context,
    ) -> Result<u64, RuntimeError> {
        let mut x = self.parts(inputs)?;
        let y = self.parts(outputs)?;
        let named = Op {
            kind,
            path,
            x: &x.clone(),
            y: &y,
            context,
            scratch: 0,
            has_library: self.products.is_some(),
            shared: self.gpu.shared,
        };
        named.check()?;
        let mut copies = Vec::new();
        let mut scratch = named.scratch_bytes();
        for (i, is_in_place) in named.copied() {
            copies.push((i, (!is_in_place).then_some(scratch)));
            if !is_in_place {
                scratch += aligned(x[i].span.bytes);
            }
        }
        let base = self.reserve(stream, scratch)?;
        let mut before = Vec::new();
        for (i, offset) in copies {
            let to = match (offset, kind.in_place().iter().find(|p| p.0 == i)) {
                (Some(offset), _) => base + offset as u64,
                (None, Some(&(_, o))) => y[o].span.at,
                (None, None) => continue,
            };
            let Span { at, bytes } = x[i].span;
            let bytes = bytes as usize;
            if at.abs_diff(to) < bytes as u64 {
                return Err(named.error("an old value overlaps the new one by a part"));
            }
            before.push(Step::Copy {
                from: at,
                to,
                bytes,
            });
            x[i].span.at = to;
        }
        let op = Op {
            x: &x,
            scratch: base,
            ..named
        };
        self.run(stream, &before)?;
        let mut steps = op.steps()?;
        if !self.can_multiply(stream, &steps)? {
            let has_library = false;
            steps = Op { has_library, ..op }.steps()?;
        }
        steps.extend(y.iter().filter_map(|y| ops::pad(*y)));
        self.run(stream, &steps)?;
        let multiplies = steps.iter().any(|s| matches!(s, Step::Product(_)));
        let workspace = if multiplies { WORKSPACE } else { 0 };
        Ok((scratch - ops::SCRATCH + workspace) as u64 + self.kept_bytes)
    }
}

impl Device for Cuda {
    type Event = CudaEvent;
    type Tick = CudaEvent;

    fn arena_bytes(&self, space: Space) -> u64 {
        match space {
            Space::Device => self.device.len as u64,
            Space::Host => self.host.len as u64,
            Space::File => 0,
        }
    }

    fn read(&self, stream: StreamId, at: Place) -> Result<View<'_>, RuntimeError> {
        self.within(at)?;
        self.bind()?;
        let mut bytes = Bytes::zeroed(at.len);
        match at.space {
            Space::Device if at.len > 0 => {
                let (from, on) = (self.device.at + at.start as u64, self.stream(stream));
                // SAFETY: the arena has the bytes, and the host's live until the copy is done.
                let done = unsafe { result::memcpy_dtoh_async(&mut bytes, from, on.cu_stream()) };
                let done = done.and_then(|()| on.synchronize());
                done.map_err(|e| failed("reading the GPU's memory", e))?;
            }
            _ => {
                self.wait_for(stream)?;
                if at.space == Space::Host {
                    // SAFETY: in the arena, and the stream has nothing left to do there.
                    bytes.copy_from_slice(unsafe { self.host.bytes(at) });
                }
            }
        }
        Ok(View::Copied(bytes))
    }

    fn update(
        &mut self,
        stream: StreamId,
        at: Place,
        change: &mut dyn FnMut(&mut [u8]) -> Result<(), RuntimeError>,
    ) -> Result<(), RuntimeError> {
        let View::Copied(mut bytes) = self.read(stream, at)? else {
            return Err(RuntimeError::Program("the GPU's memory is no slice".into()));
        };
        change(&mut bytes)?;
        match at.space {
            Space::Device if at.len > 0 => {
                let (to, on) = (self.device.at + at.start as u64, self.stream(stream));
                // SAFETY: as in `read`.
                let done = unsafe { result::memcpy_htod_async(to, &bytes, on.cu_stream()) };
                let done = done.and_then(|()| on.synchronize());
                done.map_err(|e| failed("writing the GPU's memory", e))
            }
            Space::Host => {
                // SAFETY: as in `read`, which waited for the stream.
                unsafe { self.host.bytes_mut(at) }.copy_from_slice(&bytes);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn write(
        &mut self,
        stream: StreamId,
        at: Place,
        write: &mut dyn FnMut(&mut [u8]) -> Result<(), RuntimeError>,
    ) -> Result<(), RuntimeError> {
        self.within(at)?;
        self.bind()?;
        if at.space != Space::Device || at.len == 0 {
            return self.update(stream, at, write);
        }
        self.send(stream, self.device.at + at.start as u64, at.len, write)
    }

    fn launch(&mut self, stream: StreamId, work: &Work<'_>) -> Result<u64, RuntimeError> {
        self.bind()?;
        let (mut steps, output) = match *work {
            Work::Compute {
                path,
                op,
                inputs,
                outputs,
                context,
            } => return self.compute(stream, (path, op), (inputs, outputs), context),
            Work::Slice {
                dim,
                index,
                input,
                output,
            } => {
                let (input, output) = (self.part(&input)?, self.part(&output)?);
                (vec![ops::slice(dim, index, input, output)], Some(output))
            }
            Work::Pack {
                pieces,
                input,
                output,
            } => (
                ops::pack(pieces, self.part(&input)?, self.span(output)?),
                None,
            ),
            Work::Unpack {
                pieces,
                input,
                output,
            } => {
                let output = self.part(&output)?;
                (ops::unpack(pieces, self.span(input)?, output), Some(output))
            }
            Work::Pad(output) => (Vec::new(), Some(self.part(&output)?)),
            Work::Fill { value, output } => {
                let output = self.part(&output)?;
                (vec![ops::fill(value, output)], Some(output))
            }
            Work::Copy { from, to } => return self.copy(stream, from, to).map(|()| 0),
        };
        steps.extend(output.and_then(ops::pad));
        self.run(stream, &steps)?;
        Ok(0)
    }

    fn joins(&self) -> bool {
        true
    }

    fn launch_all(&mut self, stream: StreamId, works: &[Work<'_>]) -> Result<u64, RuntimeError> {
        self.bind()?;
        if self.launch_joined(stream, works)? {
            return Ok(self.kept_bytes);
        }
        let mut most = 0;
        for work in works {
            most = most.max(self.launch(stream, work)?);
        }
        Ok(most)
    }

    fn chains(&self) -> bool {
        true
    }

    fn launch_chain(&mut self, stream: StreamId, chain: &Chain<'_>) -> Result<u64, RuntimeError> {
        self.bind()?;
        let n = self.launch_fused(stream, chain)?;
        let multiplies = matches!(chain.works.first(), Some(Work::Compute { op, .. })
            if matches!(op, OpKind::DotGeneral { .. }));
        let mut most = match n {
            0 => 0,
            _ if multiplies => WORKSPACE as u64 + self.kept_bytes,
            _ => self.kept_bytes,
        };
        let rest = chain.works.get(n..).unwrap_or_default();
        let clears = chain.clears().filter(|_| !rest.is_empty());
        for work in clears.iter().chain(rest) {
            most = most.max(self.launch(stream, work)?);
        }
        Ok(most)
    }

    fn copy(&mut self, stream: StreamId, from: Place, to: Place) -> Result<(), RuntimeError> {
        if from.len != to.len {
            return Err(RuntimeError::Program(format!(
                "a copy of {} bytes to {}",
                from.len, to.len
            )));
        }
        self.within(from)?;
        self.within(to)?;
        self.bind()?;
        if from.len == 0 || from == to {
            return Ok(());
        }
        let on = Arc::clone(&self.lane(stream)?.stream);
        let device = |at: Place| self.device.at + at.start as u64;
        let done = match (from.space, to.space) {
            (Space::Device, Space::Device) => {
                let (source, target) = (device(from), device(to));
                let mut steps = vec![(source, target)];
                if from.start.abs_diff(to.start) < from.len {
                    let by = self.reserve(stream, from.len)?;
                    steps = vec![(source, by), (by, target)];
                }
                let step = |(from, to), bytes| Step::Copy { from, to, bytes };
                let steps: Vec<Step> = steps.into_iter().map(|s| step(s, to.len)).collect();
                return self.run(stream, &steps);
            }
            (Space::Device, _) => {
                let from = device(from);
                // SAFETY: both arenas have the bytes and outlive the streams' work; other work on
                // them waits for this by the program's events.
                unsafe { result::memcpy_dtoh_async(self.host.bytes_mut(to), from, on.cu_stream()) }
            }
            (_, Space::Device) => {
                let to = device(to);
                // SAFETY: as above.
                unsafe { result::memcpy_htod_async(to, self.host.bytes(from), on.cu_stream()) }
            }
            _ => {
                self.wait_for(stream)?;
                // SAFETY: both places are in the arena, and the stream has nothing left to do.
                unsafe {
                    let at = self.host.at;
                    std::ptr::copy(at.add(from.start), at.add(to.start), from.len);
                }
                Ok(())
            }
        };
        done.map_err(|e| failed("a copy", e))
    }

    fn record(&mut self, stream: StreamId) -> Result<CudaEvent, RuntimeError> {
        let on = &self.lane(stream)?.stream;
        on.record_event(None).map_err(|e| failed("an event", e))
    }

    fn wait(&mut self, stream: StreamId, event: &CudaEvent) -> Result<(), RuntimeError> {
        let on = &self.lane(stream)?.stream;
        on.wait(event).map_err(|e| failed("an event", e))
    }

    fn rehearse(&mut self, begins: bool) -> Result<(), RuntimeError> {
        self.rehearses = begins;
        match begins {
            true => Ok(()),
            false => {
                self.finish()?;
                self.clear_arena()?;
                let whole = Place {
                    space: Space::Host,
                    start: 0,
                    len: self.host.len,
                };
                // SAFETY: no stream works on the block.
                unsafe { self.host.bytes_mut(whole) }.fill(0);
                Ok(())
            }
        }
    }

    fn finish(&mut self) -> Result<(), RuntimeError> {
        for lane in self.lanes.values_mut() {
            let done = lane.stream.synchronize();
            done.map_err(|e| failed("the GPU", e))?;
            lane.n_new = 0;
        }
        Ok(())
    }

    fn tick(&mut self, stream: StreamId) -> Result<CudaEvent, RuntimeError> {
        let on = &self.lane(stream)?.stream;
        let with_time = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        on.record_event(with_time)
            .map_err(|e| failed("an event", e))
    }

    fn elapsed(&self, from: &CudaEvent, to: &CudaEvent) -> Result<Elapsed, RuntimeError> {
        let ms = from
            .elapsed_ms(to)
            .map_err(|e| failed("the time of an event", e))?;
        let wall_s = f64::from(ms) / 1e3;
        Ok(Elapsed {
            wall_s,
            busy_s: wall_s,
        })
    }
}

#[cfg(test)]
mod tests;
