//! The device that a rank computes with: arenas in memory spaces, and streams of work on them.
//!
//! A rank plays its program through [`Device`] and [`Fabric`](crate::fabric::Fabric) alone.
//! [`Cpu`] is the first device and [`Cuda`] the second; another one is a file beside them that passes
//! [`conformance`].
//!
//! Streams are queues: what is put on one is done in the order it came, and of two streams
//! neither waits for the other but for an event. A device may do work at once, as the CPU does,
//! or later; what it did wrong it may say at any later call.

#[cfg(any(test, feature = "testing"))]
pub mod conformance;
mod cpu;
pub mod cuda;

pub use cpu::Cpu;
pub use cuda::Cuda;

use crate::arena::View;
use crate::clock::Elapsed;
use crate::error::RuntimeError;
use crate::execute::{Context, Local};
pub use ir::program::Space;
use ir::reshard::Pieces;
use ir::{OpKind, StreamId};

/// The kinds of devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backend {
    /// [`Cpu`]: ranks are threads of this machine.
    #[default]
    Cpu,
    /// [`Cuda`]: ranks go round the GPUs of this machine.
    Cuda,
}

/// Bytes of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The arena's space.
    pub space: Space,
    /// First byte, a multiple of 8; of a copy, of 4.
    pub start: usize,
    /// Number of bytes.
    pub len: usize,
}

/// An operand or result: a rank's part of a tensor, and where it lies.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    /// The part.
    pub local: &'a Local,
    /// Its bytes.
    pub at: Place,
}

/// Work that can be put on a stream. All of it is in [`Space::Device`].
#[derive(Debug)]
pub enum Work<'a> {
    /// One op. Updates write in place, and operands may overlap results.
    Compute {
        /// Path of the op, for errors.
        path: &'a str,
        /// The op.
        op: &'a OpKind,
        /// Operands.
        inputs: &'a [Tensor<'a>],
        /// Results.
        outputs: &'a [Tensor<'a>],
        /// The facts of the run that it needs.
        context: &'a Context,
    },
    /// A piece of a tensor along one dim.
    Slice {
        /// The dim.
        dim: usize,
        /// Which piece.
        index: usize,
        /// Operand.
        input: Tensor<'a>,
        /// Result.
        output: Tensor<'a>,
    },
    /// A part of a tensor to pieces, one after the other.
    Pack {
        /// How it is cut.
        pieces: Pieces,
        /// Operand.
        input: Tensor<'a>,
        /// Result.
        output: Place,
    },
    /// Pieces to a part of a tensor.
    Unpack {
        /// How it was cut.
        pieces: Pieces,
        /// Operand.
        input: Place,
        /// Result.
        output: Tensor<'a>,
    },
    /// Zeros where the part that a tensor's buffer has is shorter than the buffer.
    Pad(Tensor<'a>),
    /// One number everywhere but in the padding, which is zero.
    Fill {
        /// The number.
        value: f32,
        /// Result.
        output: Tensor<'a>,
    },
    /// Bytes to as many others that they do not overlap.
    Copy {
        /// Operand.
        from: Place,
        /// Result.
        to: Place,
    },
}

/// Works that are a chain. One that begins with a product of matrices has later ones of which each takes
/// what the one before makes. What is made in the middle nobody else takes, unless it is kept, and what
/// is written lies apart from what is read, but for sums, which may lie where they read an operand: so
/// the first few, or all, may be one call. In other chains functions of elements may take any earlier
/// value, may all lie where they read an operand, and all are one call or none.
#[derive(Clone, Copy, Debug)]
pub struct Chain<'a> {
    /// Ops with one result each, but for a norm at the end.
    pub works: &'a [Work<'a>],
    /// Whether the result of each is to be written though the next one takes it.
    pub kept: &'a [bool],
    /// Whether the last one, a sum in an accumulator, adds to zeros, whatever lies there.
    pub is_cleared: bool,
}

impl<'a> Chain<'a> {
    /// The work that clears the accumulator, if the chain is to.
    pub fn clears(&self) -> Option<Work<'a>> {
        match self.works.last() {
            Some(Work::Compute { outputs, .. }) if self.is_cleared => Some(Work::Fill {
                value: 0.0,
                output: *outputs.first()?,
            }),
            _ => None,
        }
    }
}

/// Memory and streams of one rank. Arenas begin as zeros. A place beyond its arena is an error.
pub trait Device: Send {
    /// A point of a stream that others can wait for.
    type Event;
    /// A moment of a stream.
    type Tick;

    /// Bytes of an arena.
    fn arena_bytes(&self, space: Space) -> u64;
    /// Whether work is done when it has been put on a stream, so that nothing is lost by a look at
    /// its results.
    fn is_synchronous(&self) -> bool {
        false
    }
    /// The bytes at a place, after all that the stream has been given.
    fn read(&self, stream: StreamId, at: Place) -> Result<View<'_>, RuntimeError>;
    /// Has the host change bytes in place, after all that the stream has been given.
    fn update(
        &mut self,
        stream: StreamId,
        at: Place,
        change: &mut dyn FnMut(&mut [u8]) -> Result<(), RuntimeError>,
    ) -> Result<(), RuntimeError>;
    /// Has the host write all bytes of a place anew, after all that the stream has been given. Unlike
    /// with [`Device::update`] the host need not wait for that.
    fn write(
        &mut self,
        stream: StreamId,
        at: Place,
        write: &mut dyn FnMut(&mut [u8]) -> Result<(), RuntimeError>,
    ) -> Result<(), RuntimeError> {
        self.update(stream, at, write)
    }
    /// Puts work on a stream. Returns bytes that it takes beside the arenas.
    fn launch(&mut self, stream: StreamId, work: &Work<'_>) -> Result<u64, RuntimeError>;
    /// Whether [`Device::launch_all`] makes less of many works than one launch for each.
    fn joins(&self) -> bool {
        false
    }
    /// Puts works of one kind on a stream, of which none reads or writes what another one writes.
    /// Returns bytes that they take beside the arenas.
    fn launch_all(&mut self, stream: StreamId, works: &[Work<'_>]) -> Result<u64, RuntimeError> {
        let mut most = 0;
        for work in works {
            most = most.max(self.launch(stream, work)?);
        }
        Ok(most)
    }
    /// Whether [`Device::launch_chain`] makes less of a chain than one launch for each of its works.
    fn chains(&self) -> bool {
        false
    }
    /// Puts a chain on a stream. Returns bytes that it takes beside the arenas.
    fn launch_chain(&mut self, stream: StreamId, chain: &Chain<'_>) -> Result<u64, RuntimeError> {
        let mut most = 0;
        for work in chain.clears().iter().chain(chain.works) {
            most = most.max(self.launch(stream, work)?);
        }
        Ok(most)
    }
    /// Puts a copy on a stream, to as many bytes of any space; they may overlap.
    fn copy(&mut self, stream: StreamId, from: Place, to: Place) -> Result<(), RuntimeError>;
    /// An event that is over when all that the stream has been given is done.
    fn record(&mut self, stream: StreamId) -> Result<Self::Event, RuntimeError>;
    /// Holds back what the stream is given from now on until the event is over.
    fn wait(&mut self, stream: StreamId, event: &Self::Event) -> Result<(), RuntimeError>;
    /// Begins or ends a rehearsal. What is done in one comes to nothing: arenas are zeros when it
    /// ends. But the kernels, and the memory beside the arenas, that the same work takes later are
    /// there then.
    fn rehearse(&mut self, _begins: bool) -> Result<(), RuntimeError> {
        Ok(())
    }
    /// Waits until all streams are done.
    fn finish(&mut self) -> Result<(), RuntimeError>;
    /// The moment at which all that the stream has been given is done.
    fn tick(&mut self, stream: StreamId) -> Result<Self::Tick, RuntimeError>;
    /// The time that passed from one moment to a later one, both over.
    fn elapsed(&self, from: &Self::Tick, to: &Self::Tick) -> Result<Elapsed, RuntimeError>;
}
