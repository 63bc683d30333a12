//! The CPU as a device: both arenas are host memory, and every call does its work at once, so
//! that streams are in order and events over by nature.

use super::{Device, Place, Space, Tensor, Work};
use crate::arena::{Arena, Bytes, View};
use crate::clock::{Elapsed, Moment};
use crate::error::RuntimeError;
use crate::execute::{Context, Operand, Output, collective, finds_in_result, kernel, narrow};
use ir::{OpKind, StreamId};
use std::collections::BTreeMap;
use std::ops::Range;

/// Memory and processors of a rank that is a thread.
#[derive(Debug)]
pub struct Cpu {
    device: Arena,
    host: Arena,
    /// Without bytes: threads keep nothing in files.
    file: Arena,
    /// Whether kernels use more threads than the rank's.
    is_wide: bool,
}

impl Cpu {
    /// Arenas of so many bytes; `threads` is how many kernels use.
    pub fn new(device_bytes: usize, host_bytes: usize, threads: usize) -> Self {
        Cpu {
            device: Arena::new(device_bytes),
            host: Arena::new(host_bytes),
            file: Arena::new(0),
            is_wide: threads > 1,
        }
    }

    fn arena(&self, space: Space) -> &Arena {
        match space {
            Space::Device => &self.device,
            Space::Host => &self.host,
            Space::File => &self.file,
        }
    }

    fn arena_mut(&mut self, space: Space) -> &mut Arena {
        match space {
            Space::Device => &mut self.device,
            Space::Host => &mut self.host,
            Space::File => &mut self.file,
        }
    }

    /// Fails where the place reaches beyond its arena.
    fn range(&self, at: Place) -> Result<Range<usize>, RuntimeError> {
        let bytes = self.arena(at.space).len();
        match at.start.checked_add(at.len).filter(|end| *end <= bytes) {
            Some(end) => Ok(at.start..end),
            None => Err(RuntimeError::Program(format!(
                "{} bytes at {} reach beyond the arena of {bytes}",
                at.len, at.start
            ))),
        }
    }

    fn bytes_mut(&mut self, at: Place) -> Result<&mut [u8], RuntimeError> {
        let range = self.range(at)?;
        Ok(self.arena_mut(at.space).write(range))
    }

    /// Reads one place and writes another one, which do not overlap.
    fn both(
        &mut self,
        from: Place,
        to: Place,
        work: impl FnOnce(&[u8], &mut [u8]),
    ) -> Result<u64, RuntimeError> {
        let (from, to) = (self.in_device(from)?, self.in_device(to)?);
        let mut borrowed = self
            .device
            .borrow(&[from], &[to])
            .map_err(RuntimeError::Program)?;
        if let (Some(operand), Some(out)) = (borrowed.reads.pop(), borrowed.writes.pop()) {
            work(operand, out);
        }
        Ok(0)
    }

    fn in_device(&self, at: Place) -> Result<Range<usize>, RuntimeError> {
        match at.space {
            Space::Device => self.range(at),
            space => Err(RuntimeError::Program(format!(
                "a kernel cannot use memory of {space:?}"
            ))),
        }
    }

    fn ranges(&self, tensors: &[Tensor<'_>]) -> Result<Vec<Range<usize>>, RuntimeError> {
        tensors.iter().map(|t| self.in_device(t.at)).collect()
    }

    fn compute(
        &mut self,
        (path, op): (&str, &OpKind),
        inputs: &[Tensor<'_>],
        outputs: &[Tensor<'_>],
        context: &Context,
    ) -> Result<u64, RuntimeError> {
        let writes = self.ranges(outputs)?;
        let mut reads = self.ranges(inputs)?;
        let mut copies: BTreeMap<usize, Bytes> = BTreeMap::new();
        let mut in_result = vec![false; inputs.len()];
        for (i, range) in reads.iter_mut().enumerate() {
            if let Some(&(_, o)) = op.in_place().iter().find(|p| p.0 == i) {
                // The old value goes where the new one will be; often it is there already.
                if let Some(to) = writes
                    .get(o)
                    .filter(|to| **to != *range && to.len() == range.len())
                {
                    self.device.copy(range.clone(), to.start);
                }
                *range = 0..0;
            } else if writes
                .iter()
                .any(|w| w.start < range.end && range.start < w.end)
            {
                if matches!(op, OpKind::Layout) && writes[0] == *range {
                    return Ok(0);
                }
                let over = writes.len() == 1 && writes[0] == *range;
                in_result[i] = over && finds_in_result(op, i, inputs[i].local.dtype);
                if !in_result[i] {
                    copies.insert(i, Bytes::copy_of(self.device.read(range.clone())));
                }
                *range = 0..0;
            }
        }
        let borrowed = self
            .device
            .borrow(&reads, &writes)
            .map_err(RuntimeError::Program)?;
        let operands: Vec<Operand<'_>> = inputs
            .iter()
            .zip(borrowed.reads)
            .enumerate()
            .map(|(i, (t, data))| Operand {
                local: t.local,
                data: copies.get(&i).map_or(data, |copy| copy),
                is_in_result: in_result[i],
            })
            .collect();
        let mut results: Vec<Output<'_>> = outputs
            .iter()
            .zip(borrowed.writes)
            .map(|(t, data)| Output {
                local: t.local,
                data,
            })
            .collect();
        let copied: usize = copies.values().map(|c| c.len()).sum();
        Ok(kernel(op, path, &operands, &mut results, context)? + copied as u64)
    }
}

impl Device for Cpu {
    type Event = ();
    type Tick = Moment;

    fn arena_bytes(&self, space: Space) -> u64 {
        self.arena(space).len() as u64
    }

    fn is_synchronous(&self) -> bool {
        true
    }

    fn read(&self, _: StreamId, at: Place) -> Result<View<'_>, RuntimeError> {
        let range = self.range(at)?;
        Ok(View::There(self.arena(at.space).read(range)))
    }

    fn update(
        &mut self,
        _: StreamId,
        at: Place,
        change: &mut dyn FnMut(&mut [u8]) -> Result<(), RuntimeError>,
    ) -> Result<(), RuntimeError> {
        change(self.bytes_mut(at)?)
    }

    fn launch(&mut self, stream: StreamId, work: &Work<'_>) -> Result<u64, RuntimeError> {
        match *work {
            Work::Compute {
                path,
                op,
                inputs,
                outputs,
                context,
            } => self.compute((path, op), inputs, outputs, context),
            Work::Slice {
                dim,
                index,
                input,
                output,
            } => self.both(input.at, output.at, |operand, out| {
                collective::slice(dim, index, input.local, operand, output.local, out);
            }),
            Work::Pack {
                pieces,
                input,
                output,
            } => self.both(input.at, output, |operand, out| {
                collective::pack(input.local, operand, pieces, out);
            }),
            Work::Unpack {
                pieces,
                input,
                output,
            } => self.both(input, output.at, |operand, out| {
                collective::unpack(operand, pieces, output.local, out);
            }),
            Work::Pad(output) => {
                output.local.zero_padding(self.bytes_mut(output.at)?);
                Ok(0)
            }
            Work::Fill { value, output } => {
                let out = self.bytes_mut(output.at)?;
                if value == 0.0 {
                    out.fill(0);
                    return Ok(0);
                }
                let values = vec![value; output.local.elements()];
                narrow(output.local.dtype, &values, out);
                output.local.zero_padding(out);
                Ok(0)
            }
            Work::Copy { from, to } => self.copy(stream, from, to).map(|()| 0),
        }
    }

    fn copy(&mut self, _: StreamId, from: Place, to: Place) -> Result<(), RuntimeError> {
        if from.len != to.len {
            return Err(RuntimeError::Program(format!(
                "a copy of {} bytes to {}",
                from.len, to.len
            )));
        }
        let (source, target) = (self.range(from)?, self.range(to)?);
        if from.space == to.space {
            self.arena_mut(from.space).copy(source, target.start);
            return Ok(());
        }
        // Two arenas at once: one of them leaves for a moment.
        let mut into = std::mem::replace(self.arena_mut(to.space), Arena::new(0));
        into.write(target)
            .copy_from_slice(self.arena(from.space).read(source));
        *self.arena_mut(to.space) = into;
        Ok(())
    }

    fn record(&mut self, _: StreamId) -> Result<(), RuntimeError> {
        Ok(())
    }

    fn wait(&mut self, _: StreamId, (): &()) -> Result<(), RuntimeError> {
        Ok(())
    }

    fn finish(&mut self) -> Result<(), RuntimeError> {
        Ok(())
    }

    fn tick(&mut self, _: StreamId) -> Result<Moment, RuntimeError> {
        Ok(Moment::now())
    }

    fn elapsed(&self, from: &Moment, to: &Moment) -> Result<Elapsed, RuntimeError> {
        let elapsed = from.until(to);
        Ok(match self.is_wide {
            // The processor time of a kernel's other threads is not this thread's.
            true => Elapsed {
                busy_s: elapsed.wall_s,
                ..elapsed
            },
            false => elapsed,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_conform() {
        for threads in [1, 2] {
            crate::device::conformance::passes(&|device, host| Cpu::new(device, host, threads));
        }
    }
}
