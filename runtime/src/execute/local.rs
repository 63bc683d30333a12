//! A rank's part of a tensor: which part it is, and the bytes that hold it.

use crate::cpu::{halves, layout};
use ir::{DType, LocalRange, LogicalMesh, Rank, ShardingSpec};
use std::borrow::Cow;

/// Which part of a tensor a rank holds, and how.
///
/// The buffer is row-major and has the padded length along every dim; elements past the valid
/// length are zero.
#[derive(Clone, Debug, PartialEq)]
pub struct Local {
    /// Element type in storage.
    pub dtype: DType,
    /// Global lengths.
    pub lens: Vec<u64>,
    /// The part, one range per dim.
    pub ranges: Vec<LocalRange>,
}

impl Local {
    /// The whole tensor.
    pub fn whole(dtype: DType, lens: &[u64]) -> Self {
        let ranges = lens
            .iter()
            .map(|&len| LocalRange {
                start: 0,
                valid: len,
                padded: len,
            })
            .collect();
        Local {
            dtype,
            lens: lens.to_vec(),
            ranges,
        }
    }
    /// The shard of a tensor with `spec` that the rank at `coords` of `mesh` holds.
    pub fn shard(
        dtype: DType,
        lens: &[u64],
        spec: &ShardingSpec,
        mesh: &LogicalMesh,
        coords: &[u32],
    ) -> Self {
        Local {
            dtype,
            lens: lens.to_vec(),
            ranges: spec.local_ranges(lens, mesh, coords),
        }
    }
    /// As [`Local::shard`], by rank; `None` when the rank is not in the mesh.
    pub fn of_rank(
        dtype: DType,
        lens: &[u64],
        spec: &ShardingSpec,
        mesh: &LogicalMesh,
        rank: Rank,
    ) -> Option<Self> {
        mesh.coords(rank)
            .map(|coords| Self::shard(dtype, lens, spec, mesh, &coords))
    }
    /// Padded length along each dim: the shape of the buffer.
    pub fn dims(&self) -> Vec<usize> {
        self.ranges.iter().map(|r| r.padded as usize).collect()
    }
    /// Valid length along each dim.
    pub fn valid(&self) -> Vec<usize> {
        self.ranges.iter().map(|r| r.valid as usize).collect()
    }
    /// First global index along each dim.
    pub fn start(&self) -> Vec<usize> {
        self.ranges.iter().map(|r| r.start as usize).collect()
    }
    /// Elements of the buffer.
    pub fn elements(&self) -> usize {
        self.dims().iter().product()
    }
    /// Bytes of the buffer.
    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.bytes() as usize
    }
    /// True when some of the buffer is padding.
    pub fn is_short(&self) -> bool {
        self.ranges.iter().any(|r| r.valid < r.padded)
    }
    /// Sets the padding of `data` to zero.
    pub fn zero_padding(&self, data: &mut [u8]) {
        if !self.is_short() {
            return;
        }
        let (dims, valid) = (self.dims(), self.valid());
        match self.dtype.bytes() {
            4 => layout::zero_outside::<u32>(bytemuck::cast_slice_mut(data), &dims, &valid),
            2 => layout::zero_outside::<u16>(bytemuck::cast_slice_mut(data), &dims, &valid),
            _ => layout::zero_outside::<u8>(data, &dims, &valid),
        }
    }
    /// Copies this part out of the full tensor's elements.
    ///
    /// # Panics
    /// If the slices do not have the tensor's and the part's elements.
    pub fn cut<T: Copy + Default>(&self, full: &[T], part: &mut [T]) {
        part.fill(T::default());
        let lens: Vec<usize> = self.lens.iter().map(|&n| n as usize).collect();
        let valid = self.valid();
        if !valid.contains(&0) {
            layout::copy_region(
                full,
                &lens,
                &self.start(),
                part,
                &self.dims(),
                &vec![0; valid.len()],
                &valid,
            );
        }
    }
    /// Copies this part to its place in the full tensor; inverse of [`Local::cut`].
    ///
    /// # Panics
    /// As [`Local::cut`].
    pub fn paste<T: Copy>(&self, part: &[T], full: &mut [T]) {
        let lens: Vec<usize> = self.lens.iter().map(|&n| n as usize).collect();
        let valid = self.valid();
        if !valid.contains(&0) {
            layout::copy_region(
                part,
                &self.dims(),
                &vec![0; valid.len()],
                full,
                &lens,
                &self.start(),
                &valid,
            );
        }
    }
}

/// Elements as f32, converted where they are stored otherwise. The element type must be one
/// that the runtime computes with ([`is_computed`]).
pub fn widen(dtype: DType, bytes: &[u8]) -> Cow<'_, [f32]> {
    let converted = |n: usize, f: &dyn Fn(&mut [f32])| {
        let mut out = vec![0.0; n];
        f(&mut out);
        Cow::Owned(out)
    };
    match dtype {
        DType::Bf16 => {
            let x: &[half::bf16] = bytemuck::cast_slice(bytes);
            converted(x.len(), &|out| halves::from_bf16(x, out))
        }
        DType::F16 => {
            let x: &[half::f16] = bytemuck::cast_slice(bytes);
            converted(x.len(), &|out| halves::from_f16(x, out))
        }
        _ => Cow::Borrowed(bytemuck::cast_slice(bytes)),
    }
}

/// Rounds `values` once to their storage.
///
/// # Panics
/// If the numbers of elements differ.
pub fn narrow(dtype: DType, values: &[f32], bytes: &mut [u8]) {
    match dtype {
        DType::Bf16 => halves::to_bf16(values, bytemuck::cast_slice_mut(bytes)),
        DType::F16 => halves::to_f16(values, bytemuck::cast_slice_mut(bytes)),
        _ => bytemuck::cast_slice_mut(bytes).copy_from_slice(values),
    }
}

/// Whether tensors of this type can be stored and computed with; 8-bit floats are for
/// planning only.
pub fn is_computed(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::Bf16 | DType::F16 | DType::I32)
}
