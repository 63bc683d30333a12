//! Every layout change that `ir::reshard` offers, carried out on all ranks of small meshes,
//! gives exactly the shards of the full tensor. This tests `ir::reshard` as much as
//! [`collective`](super::collective).

use super::collective::{self, Rows};
use super::local::Local;
use ir::reshard::{LayoutStep, Pieces, Placement, paths, tiles_from, tiles_to};
use ir::{
    Axis, AxisId, DType, DeviceMesh, DimSharding, LogicalMesh, Rank, ReduceKind, ShardingSpec,
};

/// SplitMix64; a case is a function of its seed.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// A number in `from..=to`.
    fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.next() % (to - from + 1)
    }
    fn mesh(&mut self, first_rank: u32) -> LogicalMesh {
        let mut sizes: Vec<u32> = (0..self.between(1, 3))
            .map(|_| self.between(1, 4) as u32)
            .collect();
        while sizes.iter().product::<u32>() > 16 {
            sizes.pop();
        }
        let devices = DeviceMesh {
            first_rank: Rank(first_rank),
            n_devices: sizes.iter().product(),
        };
        let axes = sizes
            .iter()
            .enumerate()
            .map(|(i, &size)| Axis {
                name: format!("a{i}"),
                size,
            })
            .collect();
        LogicalMesh::new(devices, axes).unwrap()
    }
    fn lens(&mut self) -> Vec<u64> {
        (0..self.between(1, 3))
            .map(|_| self.between(1, 11))
            .collect()
    }
    /// A spec that uses some of `axes` for dims in a random order.
    fn spec(&mut self, n_dims: usize, units: &[u64], axes: &[AxisId]) -> ShardingSpec {
        let mut axes = axes.to_vec();
        for i in (1..axes.len()).rev() {
            axes.swap(i, self.between(0, i as u64) as usize);
        }
        let mut dims = vec![Vec::new(); n_dims];
        for axis in axes {
            if self.between(0, 3) > 0 {
                dims[self.between(0, n_dims as u64 - 1) as usize].push(axis);
            }
        }
        let mut spec = ShardingSpec::replicated(n_dims);
        for (d, axes) in dims.into_iter().enumerate() {
            spec.dims[d] = DimSharding::by(axes, units[d]);
        }
        spec
    }
}

fn full(dice: &mut Dice, lens: &[u64]) -> Vec<f32> {
    (0..lens.iter().product::<u64>())
        .map(|_| dice.between(1, 1000) as f32)
        .collect()
}

/// The shard of `full` on each rank; over partial axes, values that reduce to it.
fn shards(
    full: &[f32],
    lens: &[u64],
    spec: &ShardingSpec,
    mesh: &LogicalMesh,
) -> Vec<(Local, Vec<f32>)> {
    let n_parts: u64 = spec.partial.keys().map(|&a| mesh.size(a)).product();
    let kind = spec.partial.values().next().copied();
    let shard = |rank: Rank| {
        let coords = mesh.coords(rank).unwrap();
        let part = spec
            .partial
            .keys()
            .fold(0, |i, &a| i * mesh.size(a) + u64::from(coords[a.index()]));
        let values: Vec<f32> = full
            .iter()
            .enumerate()
            .map(|(i, &v)| {
                let noise = |part: u64| ((i as u64 * 7 + part * 13) % 31) as f32;
                let holds = i as u64 % n_parts == part;
                match kind {
                    None => v,
                    Some(ReduceKind::Sum) if holds => {
                        v - (0..n_parts).filter(|&p| p != part).map(noise).sum::<f32>()
                    }
                    Some(ReduceKind::Sum) => noise(part),
                    Some(ReduceKind::Max) if !holds => v - 1.0 - noise(part),
                    Some(ReduceKind::Min) if !holds => v + 1.0 + noise(part),
                    Some(_) => v,
                }
            })
            .collect();
        let local = Local::shard(DType::F32, lens, spec, mesh, &coords);
        let mut out = vec![0.0; local.elements()];
        local.cut(&values, &mut out);
        (local, out)
    };
    mesh.ranks().map(shard).collect()
}

/// One step on all ranks.
fn carry_out(
    step: &LayoutStep,
    before: &ShardingSpec,
    after: &ShardingSpec,
    lens: &[u64],
    mesh: &LogicalMesh,
    shards: &[(Local, Vec<f32>)],
) -> Vec<(Local, Vec<f32>)> {
    let index = |r: Rank| (r.0 - mesh.devices.first_rank.0) as usize;
    let on_rank = |rank: Rank| {
        let coords = mesh.coords(rank).unwrap();
        let local = Local::shard(DType::F32, lens, after, mesh, &coords);
        let mut out = vec![f32::NAN; local.elements()];
        let bytes = bytemuck::cast_slice_mut(&mut out);
        let (input, operand) = &shards[index(rank)];
        match (step, step.collective(before)) {
            (LayoutStep::Slice { axis, dim, .. }, None) => {
                collective::slice(
                    *dim,
                    coords[axis.index()] as usize,
                    input,
                    bytemuck::cast_slice(operand),
                    &local,
                    bytes,
                );
            }
            (_, Some(kind)) => {
                let group = mesh.group(rank, &step.axes()).unwrap();
                let me = group.iter().position(|&r| r == rank).unwrap();
                let part = |l: &Local| l.ranges.iter().map(|r| r.padded).collect::<Vec<u64>>();
                let n = u32::try_from(group.len()).unwrap();
                let [cut, joined] = step.pieces(n, &part(input), &part(&local));
                let all = |pieces: Pieces, part: &[u64]| {
                    vec![0u8; pieces.shape(part).iter().product::<u64>() as usize * 4]
                };
                let operand = |&r: &Rank| {
                    let (held, values) = &shards[index(r)];
                    let data: &[u8] = bytemuck::cast_slice(values);
                    let Some(pieces) = cut else {
                        return data.to_vec();
                    };
                    let mut packed = all(pieces, &part(held));
                    collective::pack(held, data, pieces, &mut packed);
                    packed
                };
                let operands: Vec<Vec<u8>> = group.iter().map(operand).collect();
                let members: Vec<&[u8]> = operands.iter().map(Vec::as_slice).collect();
                let dims = step.cuts();
                let rows = |dim: Option<usize>, pieces: Option<Pieces>, of: &Local| match dim {
                    None => Rows::ONE,
                    Some(dim) => Rows {
                        rows: match pieces {
                            None => of.dims()[..dim].iter().product(),
                            Some(_) => 1,
                        },
                        n: group.len(),
                    },
                };
                let (from, to) = (rows(dims[0], cut, input), rows(dims[1], joined, &local));
                let run = |out: &mut [u8]| {
                    let kind = (kind, DType::F32);
                    collective::result(kind, me, (&members, from), (out, to)).unwrap();
                };
                match joined {
                    None => run(bytes),
                    Some(pieces) => {
                        let mut received = all(pieces, &part(&local));
                        run(&mut received);
                        collective::unpack(&received, pieces, &local, bytes);
                    }
                }
                local.zero_padding(bytes);
            }
            other => panic!("{other:?}"),
        }
        (local, out)
    };
    mesh.ranks().map(on_rank).collect()
}

#[test]
fn every_path_gives_the_shards_of_the_full_tensor() {
    let mut n_paths = 0;
    let mut seen = std::collections::BTreeSet::new();
    for seed in 0..3000 {
        let mut dice = Dice(seed);
        let (mesh, lens) = (dice.mesh(5), dice.lens());
        let units: Vec<u64> = lens
            .iter()
            .map(|_| {
                if dice.between(0, 2) == 0 {
                    dice.between(2, 3)
                } else {
                    1
                }
            })
            .collect();
        let axes: Vec<AxisId> = mesh.axis_ids().collect();
        let (partial, others): (Vec<AxisId>, Vec<AxisId>) =
            axes.iter().partition(|_| dice.between(0, 3) == 0);
        let mut from = dice.spec(lens.len(), &units, &others);
        let kind = [ReduceKind::Sum, ReduceKind::Max, ReduceKind::Min][dice.between(0, 2) as usize];
        from.partial = partial.iter().map(|&a| (a, kind)).collect();
        let to = dice.spec(lens.len(), &units, &axes);
        let full = full(&mut dice, &lens);
        let expected = shards(&full, &lens, &to, &mesh);
        let all = paths(&from, &to);
        assert!(
            !all.is_empty(),
            "seed {seed}: no path from {} to {}",
            from.display(&mesh),
            to.display(&mesh)
        );
        for path in all {
            let (mut spec, mut state) = (from.clone(), shards(&full, &lens, &from, &mesh));
            for step in &path {
                let after = step.apply(&spec).unwrap();
                state = carry_out(step, &spec, &after, &lens, &mesh, &state);
                spec = after;
                seen.insert(step.collective(&from).map(|k| k.name()));
            }
            assert_eq!(
                state,
                expected,
                "seed {seed}, lengths {lens:?}: {} to {} by {path:?}",
                from.display(&mesh),
                to.display(&mesh)
            );
            n_paths += 1;
        }
    }
    assert!(n_paths > 3000, "{n_paths} paths");
    assert_eq!(
        seen.len(),
        5,
        "every collective and the slice occur: {seen:?}"
    );
}

#[test]
fn tiles_between_meshes_give_the_shards_of_the_full_tensor() {
    for seed in 0..2000 {
        let mut dice = Dice(seed);
        let (source, lens) = (dice.mesh(0), dice.lens());
        let target = dice.mesh(source.n_devices() + 3);
        let mut spec_on = |mesh: &LogicalMesh| {
            let units: Vec<u64> = lens.iter().map(|_| dice.between(1, 3)).collect();
            dice.spec(lens.len(), &units, &mesh.axis_ids().collect::<Vec<_>>())
        };
        let (from_spec, to_spec) = (spec_on(&source), spec_on(&target));
        let full = full(&mut dice, &lens);
        let sent = shards(&full, &lens, &from_spec, &source);
        let (from, to) = (
            Placement {
                mesh: &source,
                spec: &from_spec,
            },
            Placement {
                mesh: &target,
                spec: &to_spec,
            },
        );
        let mut received = Vec::new();
        for rank in target.ranks() {
            let coords = target.coords(rank).unwrap();
            let local = Local::shard(DType::F32, &lens, &to_spec, &target, &coords);
            let mut out = vec![0.0f32; local.elements()];
            for tile in tiles_to(&lens, from, to, &coords) {
                let (have, data) = &sent[tile.from.index()];
                let len: Vec<usize> = tile.len.iter().map(|&n| n as usize).collect();
                let at = |l: &Local| {
                    tile.start
                        .iter()
                        .zip(&l.ranges)
                        .map(|(s, r)| (s - r.start) as usize)
                        .collect::<Vec<_>>()
                };
                collective::copy_block(
                    DType::F32,
                    (bytemuck::cast_slice(data), &have.dims(), &at(have)),
                    (
                        bytemuck::cast_slice_mut(&mut out),
                        &local.dims(),
                        &at(&local),
                    ),
                    &len,
                );
                assert!(
                    tiles_from(&lens, from, to, tile.from).contains(&tile),
                    "seed {seed}: the sender knows of {tile:?}"
                );
            }
            received.push((local, out));
        }
        let expected = shards(&full, &lens, &to_spec, &target);
        assert_eq!(
            received,
            expected,
            "seed {seed}, lengths {lens:?}: {} to {}",
            from_spec.display(&source),
            to_spec.display(&target)
        );
    }
}
