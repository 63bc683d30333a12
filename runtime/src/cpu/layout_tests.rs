//! Every kernel against its definition, index by index, over random shapes.

use super::super::testing::random;
use super::*;
use proptest::prelude::*;

/// Index of the element at row-major place `at`.
fn index_of(mut at: usize, dims: &[usize]) -> Vec<usize> {
    let mut index = vec![0; dims.len()];
    for d in (0..dims.len()).rev() {
        index[d] = at % dims[d];
        at /= dims[d];
    }
    index
}

/// Row-major place of the element at an index.
fn place_of(index: &[usize], dims: &[usize]) -> usize {
    index.iter().zip(dims).fold(0, |at, (i, n)| at * n + i)
}

fn indices(dims: &[usize]) -> impl Iterator<Item = Vec<usize>> + Clone + use<'_> {
    (0..dims.iter().product()).map(|at| index_of(at, dims))
}

/// Distinct elements: each is its own place, counted from 1.
fn iota(dims: &[usize]) -> Vec<i32> {
    (1..).take(dims.iter().product()).collect()
}

/// Up to four dims, some of them empty or of length one.
fn shape() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(0..7usize, 0..5)
}

/// A shape with a permutation of its dims.
fn shape_and_order() -> impl Strategy<Value = (Vec<usize>, Vec<usize>)> {
    shape().prop_flat_map(|dims| {
        let order: Vec<usize> = (0..dims.len()).collect();
        (Just(dims), Just(order).prop_shuffle())
    })
}

/// A shape with at least one dim, one of its dims, and a range along it.
fn shape_and_range() -> impl Strategy<Value = (Vec<usize>, usize, usize, usize)> {
    (
        prop::collection::vec(0..7usize, 1..5),
        any::<[prop::sample::Index; 3]>(),
    )
        .prop_map(|(dims, [dim, start, len])| {
            let dim = dim.index(dims.len());
            let start = start.index(dims[dim] + 1);
            let len = len.index(dims[dim] - start + 1);
            (dims, dim, start, len)
        })
}

proptest! {
    #[test]
    fn reductions_equal_the_definition((dims, order) in shape_and_order(), n in 0..5usize) {
        let mut reduced = order[..n.min(order.len())].to_vec();
        reduced.sort_unstable();
        let kept: Vec<usize> = (0..dims.len()).filter(|d| !reduced.contains(d)).collect();
        let pick = |of: &[usize]| kept.iter().map(|&d| of[d]).collect::<Vec<_>>();
        let out_dims = pick(&dims);
        let n_out = out_dims.iter().product();
        // Small integers: sums are exact in any order.
        let x: Vec<f32> =
            iota(&dims).iter().map(|&i| (i * 37 % 101 - 50) as f32).collect();
        let mut expected = vec![(0.0f32, f32::NEG_INFINITY); n_out];
        for (x, index) in x.iter().zip(indices(&dims)) {
            let (sum, max) = &mut expected[place_of(&pick(&index), &out_dims)];
            (*sum, *max) = (*sum + x, max.max(*x));
        }
        let (mut sums, mut maxima) = (vec![f32::NAN; n_out], vec![f32::NAN; n_out]);
        reduce_sum(&x, &dims, &reduced, &mut sums);
        reduce_max(&x, &dims, &reduced, &mut maxima);
        let actual: Vec<_> = sums.into_iter().zip(maxima).collect();
        prop_assert_eq!(actual, expected);
    }

    #[test]
    fn transpose_equals_the_definition((dims, perm) in shape_and_order()) {
        let x = iota(&dims);
        let out_dims: Vec<usize> = perm.iter().map(|&d| dims[d]).collect();
        let mut expected = vec![0; x.len()];
        for (x, index) in x.iter().zip(indices(&dims)) {
            let to: Vec<usize> = perm.iter().map(|&d| index[d]).collect();
            expected[place_of(&to, &out_dims)] = *x;
        }
        let mut out = vec![0; x.len()];
        transpose(&x, &dims, &perm, &mut out);
        prop_assert_eq!(out, expected);
    }

    #[test]
    fn slice_and_pad_equal_the_definition((dims, dim, start, len) in shape_and_range()) {
        let x = iota(&dims);
        let mut cut = dims.clone();
        cut[dim] = len;
        let inside = |index: &[usize]| (start..start + len).contains(&index[dim]);
        let kept = x.iter().zip(indices(&dims));
        let expected: Vec<i32> =
            kept.clone().filter(|(_, i)| inside(i)).map(|(x, _)| *x).collect();
        let mut sliced = vec![0; cut.iter().product()];
        slice(&x, &dims, dim, start, len, &mut sliced);
        prop_assert_eq!(&sliced, &expected);
        let mut padded = vec![-1; x.len()];
        pad(&sliced, &cut, dim, start, dims[dim], &mut padded);
        let expected: Vec<i32> = kept.map(|(x, i)| if inside(&i) { *x } else { 0 }).collect();
        prop_assert_eq!(padded, expected);
    }

    #[test]
    fn unstack_equals_slices_and_stack_undoes_it((dims, dim, _, _) in shape_and_range()) {
        let x = iota(&dims);
        let item_dims = [&dims[..dim], &dims[dim + 1..]].concat();
        let n_item: usize = item_dims.iter().product();
        let mut items = vec![vec![0; n_item]; dims[dim]];
        let mut outs: Vec<&mut [i32]> = items.iter_mut().map(Vec::as_mut_slice).collect();
        unstack(&x, &dims, dim, &mut outs);
        for (x, mut index) in x.iter().zip(indices(&dims)) {
            let item = index.remove(dim);
            prop_assert_eq!(items[item][place_of(&index, &item_dims)], *x);
        }
        let mut out = vec![0; x.len()];
        let items: Vec<&[i32]> = items.iter().map(Vec::as_slice).collect();
        stack(&items, &item_dims, dim, &mut out);
        prop_assert_eq!(out, x);
    }

    #[test]
    fn regions_equal_the_definition(
        axes in prop::collection::vec((0..5usize, [0..3usize, 0..3, 0..3, 0..3]), 0..5),
    ) {
        let pick = |f: fn(&(usize, [usize; 4])) -> usize| axes.iter().map(f).collect::<Vec<_>>();
        let extent = pick(|a| a.0);
        let (src_start, dst_start) = (pick(|a| a.1[0]), pick(|a| a.1[2]));
        let src_dims = pick(|a| a.1[0] + a.0 + a.1[1]);
        let dst_dims = pick(|a| a.1[2] + a.0 + a.1[3]);
        let src = iota(&src_dims);
        let before: Vec<i32> = iota(&dst_dims).iter().map(|i| -i).collect();
        let mut expected = before.clone();
        for index in indices(&extent) {
            let at = |start: &[usize]| -> Vec<usize> {
                index.iter().zip(start).map(|(i, s)| i + s).collect()
            };
            let from = place_of(&at(&src_start), &src_dims);
            expected[place_of(&at(&dst_start), &dst_dims)] = src[from];
        }
        let mut dst = before;
        copy_region(&src, &src_dims, &src_start, &mut dst, &dst_dims, &dst_start, &extent);
        prop_assert_eq!(dst, expected);
    }

    #[test]
    fn zeroing_equals_the_definition(
        axes in prop::collection::vec((0..5usize, 0..4usize), 0..5),
    ) {
        let valid: Vec<usize> = axes.iter().map(|a| a.0).collect();
        let dims: Vec<usize> = axes.iter().map(|a| a.0 + a.1).collect();
        let mut x = iota(&dims);
        let inside = |index: &[usize]| index.iter().zip(&valid).all(|(i, v)| i < v);
        let expected: Vec<i32> = x
            .iter()
            .zip(indices(&dims))
            .map(|(x, index)| if inside(&index) { *x } else { 0 })
            .collect();
        zero_outside(&mut x, &dims, &valid);
        prop_assert_eq!(x, expected);
    }
}

#[test]
fn large_transposes_are_tiled_rightly() {
    for (dims, perm) in [
        (vec![37, 53], vec![1, 0]),
        (vec![3, 33, 2, 17], vec![0, 2, 1, 3]),
        (vec![3, 33, 2, 17], vec![3, 0, 2, 1]),
        (vec![5, 20, 19, 4], vec![2, 3, 1, 0]),
    ] {
        let x = iota(&dims);
        let out_dims: Vec<usize> = perm.iter().map(|&d: &usize| dims[d]).collect();
        let (mut out, mut back) = (vec![0; x.len()], vec![0; x.len()]);
        transpose(&x, &dims, &perm, &mut out);
        for (x, index) in x.iter().zip(indices(&dims)) {
            let to: Vec<usize> = perm.iter().map(|&d| index[d]).collect();
            assert_eq!(out[place_of(&to, &out_dims)], *x);
        }
        let mut inverse = vec![0; perm.len()];
        perm.iter().enumerate().for_each(|(i, &d)| inverse[d] = i);
        transpose(&out, &out_dims, &inverse, &mut back);
        assert_eq!(back, x);
    }
}

#[test]
fn broadcast_copies() {
    let mut out = [0; 6];
    broadcast_leading(&[7, 8], 3, &mut out);
    assert_eq!(out, [7, 8, 7, 8, 7, 8]);
    broadcast_leading(&[], 3, &mut [0; 0]);
    broadcast_leading(&[1], 0, &mut []);
}

#[test]
fn maximum_keeps_nan() {
    let mut out = [0.0; 3];
    let x = [
        1.0,
        f32::NAN,
        2.0,
        f32::NAN,
        1.0,
        2.0,
        -3.0,
        -2.0,
        f32::NEG_INFINITY,
    ];
    reduce_max(&x, &[3, 3], &[1], &mut out);
    assert!(out[0].is_nan() && out[1].is_nan() && out[2] == -2.0);
    reduce_max(&x, &[3, 3], &[0], &mut out);
    assert!(out[0].is_nan() && out[1].is_nan() && out[2] == 2.0);
}

#[test]
fn a_sum_does_not_depend_on_other_rows() {
    let x = random(1, 5 * 131);
    let mut together = [0.0; 5];
    reduce_sum(&x, &[5, 131], &[1], &mut together);
    for (row, sum) in x.chunks_exact(131).zip(together) {
        let mut alone = [0.0];
        reduce_sum(row, &[1, 131], &[1], &mut alone);
        assert_eq!(alone[0].to_bits(), sum.to_bits());
    }
}
