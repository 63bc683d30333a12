//! The parts of a rank's device that a fabric on the GPU needs: addresses, streams, memory of a
//! stream, and a few moves of elements.

use super::args::{Span, Step};
use super::library::failed;
use super::{Cuda, ops};
use crate::device::{Place, Space};
use crate::error::RuntimeError;
use cudarc::driver::{CudaEvent, result, sys};
use ir::{DType, StreamId};
use std::ffi::c_void;

/// A box of a tensor: where it begins, and how long it is along each dim.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Region {
    pub dtype: DType,
    /// Lengths of the tensor.
    pub dims: Vec<usize>,
    pub start: Vec<usize>,
    pub len: Vec<usize>,
}

impl Region {
    /// Bytes of the box.
    pub fn bytes(&self) -> usize {
        self.len.iter().product::<usize>() * self.dtype.bytes() as usize
    }
    /// Bytes of the tensor.
    fn whole(&self) -> usize {
        self.dims.iter().product::<usize>() * self.dtype.bytes() as usize
    }
    /// The first byte of the box in the tensor, if the box is one piece of it.
    pub fn offset(&self) -> Option<usize> {
        let mut stride = self.dtype.bytes() as usize;
        let (mut offset, mut is_cut) = (0, false);
        for d in (0..self.dims.len()).rev() {
            // Outside of a dim that is cut there may be one index only.
            if is_cut && self.len[d] != 1 {
                return None;
            }
            is_cut |= self.len[d] != self.dims[d];
            offset += self.start[d] * stride;
            stride *= self.dims[d];
        }
        Some(offset)
    }
}

/// Whether an event is over.
pub(crate) fn is_over(event: &CudaEvent) -> Result<bool, RuntimeError> {
    // SAFETY: the event lives.
    match unsafe { result::event::query(event.cu_event()) } {
        Ok(()) => Ok(true),
        Err(e) if e.0 == sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        Err(e) => Err(failed("the GPU", e)),
    }
}

impl Cuda {
    /// Has this thread work on the rank's GPU.
    pub(crate) fn enter(&self) -> Result<(), RuntimeError> {
        self.bind()
    }
    /// The address of a place of the GPU's memory.
    pub(crate) fn address(&self, at: Place) -> Result<u64, RuntimeError> {
        self.within(at)?;
        match at.space {
            Space::Device => Ok(self.device.at + at.start as u64),
            space => Err(RuntimeError::Program(format!(
                "GPUs meet in their own memory, not in that of {space:?}"
            ))),
        }
    }
    /// The driver's name of a stream.
    pub(crate) fn handle(&mut self, stream: StreamId) -> Result<*mut c_void, RuntimeError> {
        Ok(self.lane(stream)?.stream.cu_stream().cast())
    }
    /// Memory that what follows on the stream may use, until the next call of this function.
    pub(crate) fn staging(&mut self, stream: StreamId, bytes: usize) -> Result<u64, RuntimeError> {
        self.reserve(stream, bytes)
    }
    /// Copies bytes to others that they do not overlap.
    pub(crate) fn copy_bytes(
        &mut self,
        stream: StreamId,
        (from, to): (u64, u64),
        bytes: usize,
    ) -> Result<(), RuntimeError> {
        match bytes {
            0 => Ok(()),
            _ => self.run(stream, &[Step::Copy { from, to, bytes }]),
        }
    }
    /// Makes bytes zero.
    pub(crate) fn clear(
        &mut self,
        stream: StreamId,
        at: u64,
        bytes: usize,
    ) -> Result<(), RuntimeError> {
        let on = self.lane(stream)?.stream.cu_stream();
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's place, which is in this rank's arena.
        let done = unsafe { result::memset_d8_async(at, 0, bytes, on) };
        done.map_err(|e| failed("zeros", e))
    }
    /// Copies a box to bytes that follow each other.
    pub(crate) fn lift(
        &mut self,
        stream: StreamId,
        of: &Region,
        (from, to): (u64, u64),
    ) -> Result<(), RuntimeError> {
        let (from, to) = (span(from, of.whole()), span(to, of.bytes()));
        let step = ops::lift(of.dtype.bytes(), (&of.dims, &of.start, &of.len), from, to);
        self.run(stream, &[step])
    }
    /// And back to its place.
    pub(crate) fn lay(
        &mut self,
        stream: StreamId,
        of: &Region,
        (from, to): (u64, u64),
    ) -> Result<(), RuntimeError> {
        let (from, to) = (span(from, of.bytes()), span(to, of.whole()));
        let step = ops::lay(of.dtype.bytes(), (&of.dims, &of.start, &of.len), from, to);
        self.run(stream, &[step])
    }
}

fn span(at: u64, bytes: usize) -> Span {
    Span {
        at,
        bytes: bytes as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_of_one_piece_are_known() {
        let region = |start: [usize; 3], len: [usize; 3]| Region {
            dtype: DType::F32,
            dims: vec![2, 3, 4],
            start: start.to_vec(),
            len: len.to_vec(),
        };
        assert_eq!(region([0, 0, 0], [2, 3, 4]).offset(), Some(0));
        assert_eq!(region([1, 0, 0], [1, 3, 4]).offset(), Some(48));
        assert_eq!(region([1, 1, 0], [1, 2, 4]).offset(), Some(64));
        assert_eq!(region([1, 2, 1], [1, 1, 3]).offset(), Some(84));
        // Of two rows a part each.
        assert_eq!(region([0, 1, 0], [2, 1, 4]).offset(), None);
        assert_eq!(region([0, 0, 1], [1, 2, 3]).offset(), None);
    }
}
