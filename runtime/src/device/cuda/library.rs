//! The driver, a GPU, and the kernels that were compiled for it.

#![allow(unsafe_code)] // asks whether the libraries are there

use super::args::{Call, PRELUDE, Source, Types};
use super::products::Chosen;
use super::{compiled, places};
use crate::error::RuntimeError;
use cudarc::driver::sys::CUdevice_attribute;
use cudarc::driver::{CudaContext, CudaModule, DriverError};
use cudarc::nvrtc::Ptx;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;

/// How to go on without a GPU.
const WITHOUT: &str = "without a GPU, an emulated one runs the same program slowly: \
    `cargo build --release --examples -p emulator`, and LD_LIBRARY_PATH=target/release/examples \
    before the command";

/// A module, or room for it: whoever needs it first makes it while others that need it wait.
type Room = Arc<Mutex<Option<Arc<CudaModule>>>>;
/// Modules by file and types.
type Modules = BTreeMap<(&'static str, Types), Room>;

/// A GPU of this process, which the ranks on it share.
pub(super) struct Gpu {
    pub context: Arc<CudaContext>,
    pub name: String,
    /// Most bytes of shared memory that a launch may ask for.
    pub shared: u32,
    architecture: String,
    modules: Mutex<Modules>,
    pub chosen: Chosen,
}

/// An error of the driver's.
pub(super) fn failed(what: &str, error: DriverError) -> RuntimeError {
    let words = error
        .error_string()
        .ok()
        .map(|s| s.to_string_lossy().into_owned());
    RuntimeError::Device {
        problem: format!(
            "{what}: {}",
            words.unwrap_or_else(|| format!("{:?}", error.0))
        ),
    }
}

fn absent(problem: &str) -> RuntimeError {
    RuntimeError::NoDevice {
        problem: problem.into(),
        way_out: WITHOUT.into(),
    }
}

/// Number of GPUs that the driver sees. Fails where there is no driver, no compiler for kernels or
/// no GPU.
pub fn count() -> Result<usize, RuntimeError> {
    // SAFETY: opening a library of the system's runs no code but its own.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        return Err(absent(
            "no NVIDIA driver is there: libcuda.so.1 is not found",
        ));
    }
    // SAFETY: as above.
    if !places::open("nvrtc", || unsafe {
        cudarc::nvrtc::sys::is_culib_present()
    }) {
        return Err(absent(
            "there is a driver, but no libnvrtc.so.13, which compiles the kernels: it comes with \
             CUDA 13 and in the Python package nvidia-cuda-nvrtc; it is looked for beside CUDA and \
             in Python's packages, and where LD_LIBRARY_PATH says",
        ));
    }
    // A function that a library lacks is a panic there.
    let found = catch_unwind(CudaContext::device_count).map_err(|_| {
        absent("the NVIDIA driver lacks functions of CUDA 13: it is too old, install 580 or later")
    })?;
    match found {
        Ok(n) if n > 0 => Ok(n as usize),
        Ok(_) => Err(absent("the NVIDIA driver sees no GPU")),
        Err(error) => Err(absent(
            &failed("the NVIDIA driver does not start", error).to_string(),
        )),
    }
}

/// Name of the first GPU. Fails as [`count`] does.
pub fn name() -> Result<String, RuntimeError> {
    count()?;
    Ok(Gpu::open(0)?.name.clone())
}

/// The facts by which one kind of GPU is told from another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// As the driver calls it.
    pub name: String,
    /// Its memory, in bytes.
    pub memory_bytes: u64,
    /// Its multiprocessors.
    pub multiprocessors: u32,
}

/// Asks the driver for the facts of a GPU. Fails as [`count`] does, and where there is no such GPU.
pub fn facts(ordinal: usize) -> Result<Facts, RuntimeError> {
    count()?;
    let gpu = Gpu::open(ordinal)?;
    let asked = |e| failed("the properties of the GPU", e);
    let (_, total) = gpu.context.mem_get_info().map_err(asked)?;
    let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    let processors = gpu.context.attribute(attribute).map_err(asked)?;
    Ok(Facts {
        name: gpu.name.clone(),
        memory_bytes: total as u64,
        multiprocessors: u32::try_from(processors).unwrap_or(0),
    })
}

/// Bytes of a GPU that nobody has taken. Fails as [`count`] does, and where there is no such GPU.
pub fn free_memory(ordinal: usize) -> Result<u64, RuntimeError> {
    count()?;
    let gpu = Gpu::open(ordinal)?;
    let (free, _) = gpu
        .context
        .mem_get_info()
        .map_err(|e| failed("the memory of the GPU", e))?;
    Ok(free as u64)
}

impl Gpu {
    /// GPU `ordinal`, opened once per process.
    pub fn open(ordinal: usize) -> Result<Arc<Self>, RuntimeError> {
        static OPEN: Mutex<BTreeMap<usize, Weak<Gpu>>> = Mutex::new(BTreeMap::new());
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gpu) = open.get(&ordinal).and_then(Weak::upgrade) {
            return Ok(gpu);
        }
        let opened = catch_unwind(AssertUnwindSafe(|| {
            let context = CudaContext::new(ordinal)?;
            // SAFETY: no memory is cudarc's to follow; the program's events order all work.
            unsafe { context.disable_event_tracking() };
            let (major, minor) = context.compute_capability()?;
            let shared = context.attribute(
                CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )?;
            Ok((
                Arc::clone(&context),
                context.name()?,
                shared,
                format!("sm_{major}{minor}"),
            ))
        }));
        let opened = opened.map_err(|_| absent("the NVIDIA driver lacks functions of CUDA 13"))?;
        let (context, name, shared, architecture) =
            opened.map_err(|e| failed("opening the GPU", e))?;
        let gpu = Arc::new(Gpu {
            context,
            name,
            shared: u32::try_from(shared).unwrap_or(0),
            architecture,
            modules: Mutex::default(),
            chosen: Chosen::default(),
        });
        open.insert(ordinal, Arc::downgrade(&gpu));
        Ok(gpu)
    }

    /// The module with the kernel of a call, made when it is first asked for.
    pub fn module(&self, call: &Call) -> Result<Arc<CudaModule>, RuntimeError> {
        self.made(call.source, call.types)
    }

    /// Makes the modules of these files and types, many at once. One that cannot be made is left to
    /// the call that needs it, which says why: some may not be called on this GPU.
    pub fn prepare(&self, wanted: &[(Source, Types)]) {
        let at_once = thread::available_parallelism().map_or(1, usize::from);
        let next = AtomicUsize::new(0);
        let make = || {
            while let Some((source, types)) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) {
                let _ = self.made(*source, *types);
            }
        };
        thread::scope(|scope| {
            for _ in 0..at_once.min(wanted.len()) {
                scope.spawn(make);
            }
        });
    }

    fn made(&self, source: Source, types: Types) -> Result<Arc<CudaModule>, RuntimeError> {
        let room = {
            let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(modules.entry((source.name, types)).or_default())
        };
        let mut room = room.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = &*room {
            return Ok(Arc::clone(module));
        }
        let module = self.load(source, &types)?;
        Ok(Arc::clone(room.insert(module)))
    }

    /// Loads code that was kept, or compiles it.
    fn load(&self, source: Source, types: &Types) -> Result<Arc<CudaModule>, RuntimeError> {
        let (text, options) = (whole(source), options(types, &self.architecture));
        let load = |code: &[u8]| self.context.load_module(Ptx::from_binary(code.to_vec()));
        let file = compiled::folder().map(|f| compiled::file(&f, &self.name, &text, &options));
        let kept = file.as_deref().and_then(compiled::read);
        if let Some(Ok(module)) = kept.map(|code| load(&code)) {
            return Ok(module);
        }
        let code = compile(source, types, &self.architecture)?;
        let module = load(&code).map_err(|e| failed(source.name, e))?;
        if let Some(file) = file {
            compiled::keep(&file, &code);
        }
        Ok(module)
    }
}

/// A file with what stands before it.
fn whole(source: Source) -> String {
    format!("{PRELUDE}\n#line 1 \"{}\"\n{}", source.name, source.text)
}

/// Options of the compiler for these types and this architecture.
fn options(types: &Types, architecture: &str) -> Vec<String> {
    let mut options = types.options();
    options.push(format!("--gpu-architecture={architecture}"));
    // Not every file needs all of the prelude.
    options.extend(["--std=c++17", "--diag-suppress=177"].map(String::from));
    options
}

/// Compiles a file of kernels to machine code.
fn compile(source: Source, types: &Types, architecture: &str) -> Result<Vec<u8>, RuntimeError> {
    compiled::compile(&whole(source), &options(types, architecture)).map_err(|problem| {
        RuntimeError::Device {
            problem: format!("{} cannot be compiled: {problem}", source.name),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::super::args::{ATTENTION, CHAIN, Link, Scores};
    use super::super::args::{ATTENTION_TILES, ATTENTION_TILES_GRAD, EXPERTS, MOVEMENT, SOURCES};
    use super::*;
    use cudarc::nvrtc::result;
    use std::ffi::CString;

    /// The assembler's words on a file's kernels for bf16, one a line.
    fn assembled(source: Source, scores: Scores, architecture: &str) -> String {
        let types = Types {
            x: ["bf16"; 8],
            y: ["bf16"; 4],
            scores,
            ..Types::default()
        };
        let mut options = types.options();
        options.push(format!("--gpu-architecture={architecture}"));
        options
            .extend(["--std=c++17", "--diag-suppress=177", "--ptxas-options=-v"].map(String::from));
        let text = CString::new(whole(source)).expect("a source has no zeros");
        let program = result::create_program(&text, None).expect("a program");
        // SAFETY: the program is this function's, and is destroyed once.
        let (done, log) = unsafe {
            let done = result::compile_program(program, &options);
            let log = result::get_program_log(program).expect("a log");
            result::destroy_program(program).expect("a program");
            (done, log)
        };
        let log: String = log.iter().map(|c| char::from(*c as u8)).collect();
        done.unwrap_or_else(|e| panic!("{}: {e:?}: {log}", source.name));
        log
    }

    /// As the next test: with NVIDIA's compiler, skipped without it.
    #[test]
    fn large_kernels_keep_to_registers() {
        // SAFETY: opening a library of the system's runs no code but its own.
        if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
            eprintln!("skipped: there is no libnvrtc.so; see the comment of the next test");
            return;
        }
        for architecture in ["sm_80", "sm_90", "sm_100"] {
            for source in [ATTENTION_TILES, ATTENTION_TILES_GRAD, EXPERTS] {
                spill_little(source, Scores::default(), architecture);
            }
        }
        // With every switch, for which compilers need as long again.
        if std::env::var("RUN_SLOW_TESTS").is_ok_and(|v| v == "1") {
            for source in [ATTENTION_TILES, ATTENTION_TILES_GRAD] {
                spill_little(source, EVERYTHING, "sm_90");
            }
        }
    }

    /// An attention with every switch that all kernels have.
    const EVERYTHING: Scores = Scores {
        window: true,
        blocks: false,
        cap: true,
        slopes: true,
        values: true,
        lse_gradient: true,
    };

    fn spill_little(source: Source, scores: Scores, architecture: &str) {
        let log = assembled(source, scores, architecture);
        let spills: Vec<u32> = log
            .split(" bytes spill stores")
            .filter_map(|before| before.rsplit([' ', ',']).next()?.parse().ok())
            .collect();
        assert!(spills.len() > 1, "{}: {log}", source.name);
        // A few words of what is used once a tile.
        assert!(
            spills.iter().all(|bytes| *bytes <= 64),
            "{} for {architecture}, {scores:?}: {spills:?}",
            source.name
        );
    }

    /// With NVIDIA's compiler, which a Python package has (`nvidia-cuda-nvrtc==13.0.*`, its `lib`
    /// in `LD_LIBRARY_PATH`); skipped without it.
    #[test]
    fn all_kernels_compile_for_all_generations() {
        // SAFETY: opening a library of the system's runs no code but its own.
        if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
            eprintln!("skipped: there is no libnvrtc.so; see the comment of this test");
            return;
        }
        for architecture in ["sm_80", "sm_90", "sm_100"] {
            for source in SOURCES {
                for name in ["f32", "bf16", "f16"] {
                    // Tensor cores take halves.
                    let tiled = [ATTENTION_TILES.name, ATTENTION_TILES_GRAD.name];
                    if tiled.contains(&source.name) && name == "f32" {
                        continue;
                    }
                    let mut types = Types {
                        x: [name; 8],
                        y: [name; 4],
                        ..Types::default()
                    };
                    let words: &[&str] = match source.name == MOVEMENT.name {
                        true if name == "f32" => &["u32", "u64", "Quad"],
                        true => &["u16"],
                        false => &[name],
                    };
                    for word in words {
                        types.x[0] = word;
                        compile(source, &types, architecture)
                            .unwrap_or_else(|e| panic!("for {architecture}, {name}: {e}"));
                    }
                }
            }
        }
        let types = Types {
            x: ["bf16"; 8],
            y: ["bf16"; 4],
            scores: EVERYTHING,
            ..Types::default()
        };
        for source in [ATTENTION, ATTENTION_TILES, ATTENTION_TILES_GRAD] {
            compile(source, &types, "sm_90").unwrap_or_else(|e| panic!("every switch: {e}"));
        }
        let types = Types {
            scores: Scores {
                blocks: true,
                ..EVERYTHING
            },
            ..types
        };
        compile(ATTENTION, &types, "sm_90").unwrap_or_else(|e| panic!("with blocks: {e}"));
        // As many functions as a chain has, some of which are written.
        let link = |function, has_two, arguments, result| {
            Some(Link {
                function,
                has_two,
                arguments,
                result,
            })
        };
        let links = [
            link(2, true, [0, 1], None),
            link(2, true, [0, 2], Some(0)),
            link(5, true, [3, Link::value(0)], Some(1)),
            link(0, true, [4, Link::value(2)], Some(2)),
        ];
        for name in ["f32", "bf16", "f16"] {
            let types = Types {
                x: [name; 8],
                y: [name; 4],
                links,
                ..Types::default()
            };
            compile(CHAIN, &types, "sm_90").unwrap_or_else(|e| panic!("four functions: {e}"));
        }
    }
}
