//! Masks of dropout are functions of the global index: of sample, position and the rest, however
//! a tensor lies and wherever its sequence stands.

use super::{Context, Local, Operand, Output, kernel};
use crate::arena::Bytes;
use ir::op::SequenceOrder;
use ir::testing::Rng;
use ir::{Axis, AxisId, DType, DeviceMesh, DimSharding, LogicalMesh, OpKind, Rank, ShardingSpec};

/// The mask of a part of a tensor of ones.
fn mask(local: &Local, order: SequenceOrder, first_sample: u64) -> Vec<f32> {
    let kind = OpKind::Dropout {
        p: 0.3,
        key: "h.0.drop".into(),
        order,
    };
    let cx = Context {
        seed: 5,
        step: 2,
        updates: 2,
        lr: 0.0,
        first_sample,
        training: true,
        threads: 1,
    };
    let ones = Bytes::of_f32(&vec![1.0; local.elements()]);
    let mut out = Bytes::zeroed(local.bytes());
    let inputs = [Operand {
        local,
        data: &ones,
        is_in_result: false,
    }];
    let mut outputs = [Output {
        local,
        data: &mut out,
    }];
    kernel(&kind, "h.0.drop", &inputs, &mut outputs, &cx).unwrap();
    out.f32s()[..local.elements()].to_vec()
}

/// Puts the parts that the ranks of a random layout have together.
fn from_parts(lens: &[u64], order: SequenceOrder, rng: &mut Rng) -> Vec<f32> {
    let sizes = [2, 3, 2];
    let axis = |(i, &size): (usize, &u32)| Axis {
        name: format!("a{i}"),
        size,
    };
    let devices = DeviceMesh {
        first_rank: Rank(0),
        n_devices: 12,
    };
    let mesh = LogicalMesh::new(devices, sizes.iter().enumerate().map(axis).collect()).unwrap();
    let mut dims = vec![vec![]; lens.len()];
    for axis in 0..sizes.len() {
        if !rng.one_in(4) {
            dims[rng.below(lens.len() as u64) as usize].push(AxisId::new(axis));
        }
    }
    let dims = dims.into_iter().map(|axes| DimSharding::by(axes, 1));
    let spec = ShardingSpec {
        dims: dims.collect(),
        partial: Default::default(),
    };
    let mut whole = vec![f32::NAN; lens.iter().product::<u64>() as usize];
    for rank in mesh.ranks() {
        let local = Local::of_rank(DType::F32, lens, &spec, &mesh, rank).unwrap();
        local.paste(&mask(&local, order, 0), &mut whole);
    }
    whole
}

#[test]
fn masks_do_not_depend_on_the_layout() {
    let mut rng = Rng::new(3);
    // A sequence of eight, as dim 1, as dim 2 and as the last one.
    for lens in [&[4u64, 8][..], &[4, 8, 3], &[4, 3, 8], &[2, 3, 5, 8]] {
        let whole = mask(&Local::whole(DType::F32, lens), SequenceOrder::Natural, 0);
        let kept = whole.iter().filter(|x| **x != 0.0).count();
        assert!(
            kept > whole.len() / 3 && kept < whole.len(),
            "{kept} of {}",
            whole.len()
        );
        for _ in 0..20 {
            assert_eq!(from_parts(lens, SequenceOrder::Natural, &mut rng), whole);
        }
        // Microbatches of one sample.
        let one = [&[1], &lens[1..]].concat();
        let each = |m| mask(&Local::whole(DType::F32, &one), SequenceOrder::Natural, m);
        assert_eq!((0..lens[0]).flat_map(each).collect::<Vec<_>>(), whole);
    }
}

#[test]
fn masks_do_not_depend_on_the_order_of_the_sequence() {
    let mut rng = Rng::new(4);
    for (lens, ranks) in [([4u64, 8, 3], 2), ([2, 12, 5], 3), ([3, 8, 1], 1)] {
        let order = SequenceOrder::Zigzag { ranks };
        let natural = mask(&Local::whole(DType::F32, &lens), SequenceOrder::Natural, 0);
        let (len, width) = (lens[1] as usize, lens[2] as usize);
        let mut stored = vec![f32::NAN; natural.len()];
        for run in order.runs(0, lens[1], lens[1]) {
            for i in 0..run.count as usize {
                for sample in 0..lens[0] as usize {
                    let at = |row: u64| (sample * len + row as usize + i) * width;
                    let (from, to) = (at(run.position), at(run.stored));
                    stored[to..to + width].copy_from_slice(&natural[from..from + width]);
                }
            }
        }
        assert!(ranks == 1 || stored != natural);
        for _ in 0..20 {
            assert_eq!(from_parts(&lens, order, &mut rng), stored);
        }
    }
}
