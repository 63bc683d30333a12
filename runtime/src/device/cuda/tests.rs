//! The device suite, and every kernel against the CPU's.

use super::args::Source;
use super::cases::chains;
use super::cases::{Case, SMALL, cases, context, multipliers, results, results_of, results_over};
use super::*;
use crate::device::Cpu;
use crate::execute::{Local, narrow};
use emulator::harness::is_emulated;
use ir::DType;
use ir::op::Scores;

#[test]
fn gpus_conform() {
    if is_emulated("device::cuda::tests::gpus_conform") {
        crate::device::conformance::passes(&|device, host| {
            Cuda::new(0, device, host).expect("the emulated GPU opens")
        });
    }
}

#[test]
fn kernels_give_what_the_cpu_s_give() {
    if !is_emulated("device::cuda::tests::kernels_give_what_the_cpu_s_give") {
        return;
    }
    let context = context();
    let mut wrong = Vec::new();
    for (dtype, rounding) in [(DType::F32, 2e-5), (DType::Bf16, 2e-2), (DType::F16, 3e-3)] {
        for case in cases(dtype) {
            let name = format!("{:?} of {dtype:?}", case.0);
            let expected = results(&mut Cpu::new(SMALL, 0, 1), &case, &context);
            let expected = expected.unwrap_or_else(|e| panic!("{name}: {e}"));
            for &by in multipliers(&case) {
                let matmuls = Matmuls { by, tf32: false };
                let mut gpu = Cuda::with(0, SMALL, 0, matmuls).expect("the emulated GPU opens");
                let got = results(&mut gpu, &case, &context);
                let got = got.unwrap_or_else(|e| panic!("{name}: {e}"));
                // One form of a product, also for an op of several products.
                let n_kept = gpu.products.as_ref().map_or(0, Products::kept);
                assert_eq!(n_kept, usize::from(by != Multiplier::Plain), "{name}");
                for (o, (got, expected)) in got.iter().zip(&expected).enumerate() {
                    let largest = expected.iter().filter(|x| x.is_finite());
                    let largest = largest.fold(1.0f32, |m, x| m.max(x.abs()));
                    let rounding = match case.2[o].dtype {
                        DType::I32 => 0.0,
                        _ => rounding,
                    };
                    let same = |a: f32, b: f32| {
                        a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= rounding * largest
                    };
                    let off = got.iter().zip(expected).position(|(a, b)| !same(*a, *b));
                    if let Some(at) = off {
                        wrong.push(format!(
                            "{name} by {by:?}: result {o}, element {at}: {}, not {}",
                            got[at], expected[at]
                        ));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Chains by the library, which takes all of each, and without it.
#[test]
fn chains_give_what_their_ops_give() {
    if !is_emulated("device::cuda::tests::chains_give_what_their_ops_give") {
        return;
    }
    let check = |case: &chains::ChainCase, by: Multiplier, rounding: f32, n: usize| {
        let name = format!("{} by {by:?}", case.name);
        let expected = case.expected().unwrap_or_else(|e| panic!("{name}: {e}"));
        let (got, fused) = case.on_gpu(by).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(fused, n, "{name}: other ops in one call");
        assert_eq!(got.len(), expected.len());
        for (got, expected) in got.iter().zip(&expected) {
            let largest = expected.iter().fold(1.0f32, |m, x| m.max(x.abs()));
            let same = |(a, b): (&f32, &f32)| (a - b).abs() <= rounding * largest;
            let off = got.iter().zip(expected).position(|both| !same(both));
            assert_eq!(off, None, "{name}: {got:?}, not {expected:?}");
        }
    };
    for (dtype, rounding) in [(DType::F32, 2e-5), (DType::Bf16, 2e-2), (DType::F16, 3e-3)] {
        for case in chains::cases(dtype) {
            check(&case, Multiplier::Plain, rounding, 0);
            check(&case, Multiplier::Library, rounding, case.n_ops());
            check(&case, Multiplier::Tuned, rounding, case.n_ops());
        }
        check(&chains::partly(dtype), Multiplier::Library, rounding, 2);
        for case in chains::of_elements(dtype) {
            check(&case, Multiplier::Plain, rounding, case.n_ops());
            // In f32 to the bit as one by one.
            if dtype == DType::F32 {
                let bits = |all: Vec<Vec<f32>>| -> Vec<Vec<u32>> {
                    let of = |v: Vec<f32>| v.into_iter().map(f32::to_bits).collect();
                    all.into_iter().map(of).collect()
                };
                let (one, _) = case.on_gpu(Multiplier::Plain).expect("a kernel");
                let several = case.one_by_one().expect("kernels");
                assert_eq!(bits(one), bits(several), "{}", case.name);
            }
        }
        for case in chains::of_no_kernel(dtype) {
            check(&case, Multiplier::Plain, rounding, 0);
        }
    }
}

/// A result is the same, to the bit, where it takes the bytes of an operand that it may overwrite.
#[test]
fn results_may_lie_over_operands() {
    if !is_emulated("device::cuda::tests::results_may_lie_over_operands") {
        return;
    }
    let context = context();
    let mut seen = std::collections::BTreeSet::new();
    for dtype in [DType::F32, DType::Bf16] {
        for case in cases(dtype) {
            let may = |&i: &usize| case.0.may_overwrite(i) && case.1[i] == case.2[0];
            for i in (0..case.1.len()).filter(may) {
                let name = format!("{:?} of {dtype:?} over {i}", case.0);
                let bits = |found: Result<Vec<Vec<f32>>, RuntimeError>| -> Vec<u32> {
                    let found = found.unwrap_or_else(|e| panic!("{name}: {e}"));
                    found.concat().into_iter().map(f32::to_bits).collect()
                };
                let cpu = || Cpu::new(SMALL, 0, 1);
                let apart = bits(results(&mut cpu(), &case, &context));
                let over = bits(results_over(&mut cpu(), &case, i, &context));
                assert!(apart == over, "{name} on the CPU");
                let gpu = || Cuda::new(0, SMALL, 0).expect("the emulated GPU opens");
                let apart = bits(results(&mut gpu(), &case, &context));
                let over = bits(results_over(&mut gpu(), &case, i, &context));
                assert!(apart == over, "{name} on the GPU");
                seen.insert(case.0.kernel_name());
            }
        }
    }
    for name in [
        "add",
        "clamped_swiglu",
        "clamped_swiglu_grad",
        "cross_entropy_grad",
        "dropout",
        "expert_bias",
        "gelu_tanh",
        "gelu_tanh_grad",
        "scale_rows",
    ] {
        assert!(seen.contains(name), "{name} has no case");
    }
}

/// A case with operands of these numbers on both devices: f32 as they are, ids in `I32`.
fn agree(case: &Case, numbers: &[Vec<f32>], bytes: usize) {
    let operands = case.1.iter().zip(numbers);
    let contents: Vec<Vec<u8>> = operands
        .map(|(local, numbers)| {
            let mut bytes = vec![0; local.bytes()];
            match local.dtype {
                DType::I32 => {
                    let ids: Vec<i32> = numbers.iter().map(|n| *n as i32).collect();
                    bytes.copy_from_slice(bytemuck::cast_slice(&ids));
                }
                dtype => narrow(dtype, numbers, &mut bytes),
            }
            bytes
        })
        .collect();
    let context = context();
    let expected = results_of(&mut Cpu::new(bytes, 0, 1), case, &contents, &context);
    let mut gpu = Cuda::new(0, bytes, 0).expect("the emulated GPU opens");
    let got = results_of(&mut gpu, case, &contents, &context).expect("the op runs");
    let again = results_of(&mut gpu, case, &contents, &context).expect("it runs again");
    let bits = |results: &[Vec<f32>]| -> Vec<u32> {
        let all = results.iter().flatten();
        all.map(|x| x.to_bits()).collect()
    };
    assert_eq!(bits(&got), bits(&again), "{:?}: other bits", case.0);
    for (got, expected) in got.iter().zip(expected.expect("CPU ranks have it")) {
        for (i, (a, b)) in got.iter().zip(expected).enumerate() {
            let same =
                *a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= 1e-5 * b.abs().max(1.0);
            assert!(same, "{:?}: element {i} is {a}, not {b}", case.0);
        }
    }
}

/// Ids that are all equal, all distinct, as in a text, and outside the range, over several tiles of
/// the sort, digits and levels of partial sums; widths by eights and others.
#[test]
fn gradients_of_tables_add_up_whatever_the_ids() {
    if !is_emulated("device::cuda::tests::gradients_of_tables_add_up_whatever_the_ids") {
        return;
    }
    let spread = |i: usize| i.wrapping_mul(2654435761) % 4294967296;
    type Id = fn(usize, usize) -> i64;
    let distributions: [Id; 5] = [
        |_, _| 700,
        |i, _| i as i64,
        |i, spread| if i % 3 == 0 { 5 } else { (spread % 700) as i64 },
        |i, spread| [-1, 1 << 30, 3, (spread % 1500) as i64 - 200][i % 4],
        // Runs that end where pieces do.
        |i, _| i as i64 / 64,
    ];
    for (n, width, rows) in [(2500, 8, 1200), (1025, 3, 600), (70, 16, 900), (1, 8, 3)] {
        for id in distributions {
            let ids: Vec<f32> = (0..n).map(|i| id(i, spread(i)) as f32).collect();
            let dy: Vec<f32> = (0..n * width)
                .map(|i| (spread(i) % 101) as f32 / 50.0 - 1.0)
                .collect();
            let mut table = Local::whole(DType::F32, &[2 * rows, width as u64]);
            (table.ranges[0].start, table.ranges[0].padded) = (2, rows);
            table.ranges[0].valid = rows - 1;
            let case = Case(
                OpKind::EmbeddingGrad { vocab: 2 * rows },
                vec![
                    Local::whole(DType::I32, &[n as u64]),
                    Local::whole(DType::F32, &[n as u64, width as u64]),
                ],
                vec![table],
            );
            agree(&case, &[ids, dy], SMALL);
        }
    }
}

/// Infinities and NaN among logits, with columns by eights and others, and padding.
#[test]
fn losses_keep_what_is_no_number() {
    if !is_emulated("device::cuda::tests::losses_keep_what_is_no_number") {
        return;
    }
    let infinite = f32::INFINITY;
    let special = [1.0, -infinite, infinite, f32::NAN, 300.0, -300.0];
    for (valid, padded) in [(21, 24), (23, 23)] {
        let rows = special.len() + 1;
        let mut logits = Local::whole(DType::F32, &[rows as u64, 2 * padded]);
        (logits.ranges[1].padded, logits.ranges[1].valid) = (padded, valid);
        let number = |i: usize| {
            let (row, c) = (i / padded as usize, i % padded as usize);
            match special.get(row) {
                _ if c >= valid as usize => 0.0,
                // A row of nothing else.
                None => -infinite,
                Some(x) if c == 7 => *x,
                Some(_) => (i * 37 % 101) as f32 / 50.0 - 1.0,
            }
        };
        let numbers: Vec<f32> = (0..rows * padded as usize).map(number).collect();
        let n = Local::whole(DType::F32, &[rows as u64]);
        let case = Case(OpKind::LogSumExp, vec![logits], vec![n]);
        agree(&case, &[numbers], SMALL);
    }
}

/// Infinities and NaN among a router's logits: its choices are the CPU's, and are of experts that
/// there are. And an activation within bounds does not hide them.
#[test]
fn experts_keep_what_is_no_number() {
    if !is_emulated("device::cuda::tests::experts_keep_what_is_no_number") {
        return;
    }
    let infinite = f32::INFINITY;
    let special = [1.0, -infinite, infinite, f32::NAN, 800.0, -800.0];
    let (rows, experts, top_k) = (special.len() as u64 + 1, 10, 4);
    let number = |i: usize| match special.get(i / experts) {
        // A row of nothing else.
        None => f32::NAN,
        Some(x) if i % experts == 7 => *x,
        Some(_) => (i * 37 % 101) as f32 / 50.0 - 1.0,
    };
    let logits: Vec<f32> = (0..rows as usize * experts).map(number).collect();
    let lens = [1, rows, experts as u64];
    for scores in [Scores::Softmax, Scores::Sigmoid] {
        for normalize in [true, false] {
            let route = OpKind::Route {
                top_k,
                capacity: 3,
                normalize,
                scores,
                groups: None,
            };
            let of = |dtype| Local::whole(dtype, &[1, rows, top_k]);
            let (x, y) = (
                vec![Local::whole(DType::F32, &lens)],
                vec![of(DType::F32), of(DType::I32)],
            );
            agree(&Case(route, x, y), std::slice::from_ref(&logits), SMALL);
        }
    }
    let (gate, up) = ([f32::NAN, 1.0, 900.0, -900.0], [2.0, f32::NAN, -9.0, 9.0]);
    let (alpha, limit) = (1.702, 7.0);
    let x = Local::whole(DType::F32, &[4]);
    let gradient = OpKind::ClampedSwigluGrad { alpha, limit };
    let forward = OpKind::ClampedSwiglu { alpha, limit };
    let numbers = [gate, up, [1.0; 4]].map(|x| x.to_vec());
    let case = Case(forward, vec![x.clone(); 2], vec![x.clone()]);
    agree(&case, &numbers[..2], SMALL);
    let case = Case(gradient, vec![x.clone(); 3], vec![x; 2]);
    agree(&case, &numbers, SMALL);
}

/// A work of a test, with its operands' and results' places.
enum Many {
    Op(OpKind, [Vec<(Local, Place)>; 2]),
    Fill(f32, Local, Place),
    Copy(Place, Place),
}

/// Works of one kind on tensors of several lengths, one with padding: of a few elements, of eights
/// and others, of several blocks.
fn many(kind: &str, t: DType) -> Vec<Many> {
    let mut free = 0;
    let mut place = |local: &Local| {
        let start = free;
        free = (free + local.bytes()).next_multiple_of(256);
        let (space, len) = (Space::Device, local.bytes());
        Place { space, start, len }
    };
    let scalar = Local::whole(DType::F32, &[]);
    let coefficient = (scalar.clone(), place(&scalar));
    let mut one = |lens: &[u64], decay: f64| {
        let mut made = |dtype: DType| {
            let mut local = Local::whole(dtype, lens);
            if let [rows, 3] = lens {
                local.ranges[0].valid = rows - 2;
            }
            (local.clone(), place(&local))
        };
        match kind {
            "fill" => {
                let (local, at) = made(t);
                Many::Fill(decay as f32, local, at)
            }
            "copy" => Many::Copy(made(DType::F32).1, made(DType::F32).1),
            "cast" => Many::Op(
                OpKind::Cast { dtype: t },
                [vec![made(DType::F32)], vec![made(t)]],
            ),
            "accumulate" => Many::Op(
                OpKind::Accumulate { dtype: DType::F32 },
                [vec![made(t)], vec![made(DType::F32)]],
            ),
            "squares" => {
                let x = made(t);
                Many::Op(
                    OpKind::SumSquares,
                    [vec![x], vec![(scalar.clone(), place(&scalar))]],
                )
            }
            "sgd" => {
                let [p, g, b] = [DType::F32, t, DType::F32].map(&mut made);
                let (momentum, weight_decay) = (0.9, decay);
                Many::Op(
                    OpKind::Sgd {
                        momentum,
                        weight_decay,
                    },
                    [
                        vec![p.clone(), g, b.clone(), coefficient.clone()],
                        vec![p, b],
                    ],
                )
            }
            _ => {
                let [p, g, m, v] = [DType::F32, t, DType::F32, DType::F32].map(&mut made);
                let adam = OpKind::AdamW {
                    beta1: 0.9,
                    beta2: 0.95,
                    eps: 1e-8,
                    weight_decay: decay,
                };
                let state = [p.clone(), m.clone(), v.clone()];
                Many::Op(
                    adam,
                    [vec![p, g, m, v, coefficient.clone()], state.to_vec()],
                )
            }
        }
    };
    [
        (&[7][..], 0.0),
        (&[8], 0.1),
        (&[5000], 0.1),
        (&[10, 3], 0.0),
        (&[64, 96], 0.1),
        (&[2056], 0.2),
        (&[1], 0.0),
    ]
    .map(|(lens, decay)| one(lens, decay))
    .into()
}

/// The bytes that works leave on a GPU in two steps, put on a stream at once or one by one, and how
/// many launches they are at once.
fn played(all: &[Many], at_once: bool) -> (Vec<u8>, Vec<usize>) {
    let bytes = 1 << 18;
    let whole = Place {
        space: Space::Device,
        start: 0,
        len: bytes,
    };
    let stream = StreamId(1);
    let mut gpu = Cuda::new(0, bytes, 0).expect("the emulated GPU opens");
    gpu.update(stream, whole, &mut |to| {
        // Sound numbers of both types, none negative: AdamW takes a root.
        for (i, word) in to.chunks_exact_mut(4).enumerate() {
            let x = half::bf16::from_f32((i % 97 + 1) as f32 / 64.0).to_le_bytes();
            word[..2].copy_from_slice(&x);
            word[2..].copy_from_slice(&x);
        }
        Ok(())
    })
    .expect("it is written");
    let tensors: Vec<[Vec<Tensor<'_>>; 2]> = all
        .iter()
        .map(|work| match work {
            Many::Op(_, lists) => lists.each_ref().map(|list| {
                let all = list.iter();
                all.map(|(local, at)| Tensor { local, at: *at }).collect()
            }),
            _ => [Vec::new(), Vec::new()],
        })
        .collect();
    for step in 0..2 {
        let context = crate::execute::Context {
            lr: 0.5 / (step + 1) as f64,
            updates: 3 + step,
            ..context()
        };
        let works: Vec<Work<'_>> = all
            .iter()
            .zip(&tensors)
            .map(|(work, [inputs, outputs])| match work {
                Many::Op(op, _) => Work::Compute {
                    path: "a.test",
                    op,
                    inputs,
                    outputs,
                    context: &context,
                },
                Many::Fill(value, local, at) => Work::Fill {
                    value: *value,
                    output: Tensor { local, at: *at },
                },
                Many::Copy(from, to) => Work::Copy {
                    from: *from,
                    to: *to,
                },
            })
            .collect();
        match at_once {
            true => drop(gpu.launch_all(stream, &works).expect("they run")),
            false => works.iter().for_each(|w| {
                gpu.launch(stream, w).expect("it runs");
            }),
        }
    }
    let joined = gpu.lanes.values().flat_map(|lane| &lane.joined);
    let launches = joined.map(|j| j.n_launches()).collect();
    (
        gpu.read(stream, whole).expect("it is read").to_vec(),
        launches,
    )
}

#[test]
fn works_that_are_joined_give_the_bits_of_each_alone() {
    if !is_emulated("device::cuda::tests::works_that_are_joined_give_the_bits_of_each_alone") {
        return;
    }
    // The tensor with padding is padded by itself.
    for (kind, launches) in [
        ("fill", 2),
        ("copy", 1),
        ("cast", 2),
        ("accumulate", 2),
        ("squares", 2),
        ("sgd", 3),
        ("adam_w", 4),
    ] {
        for t in [DType::F32, DType::Bf16] {
            let all = many(kind, t);
            let (single, none) = played(&all, false);
            let (joined, made) = played(&all, true);
            assert_eq!(none, [0; 0]);
            // One table, which the second step found again.
            assert_eq!(made, [launches], "{kind} of {t:?}");
            let off = single.iter().zip(&joined).position(|(a, b)| a != b);
            assert_eq!(off, None, "{kind} of {t:?}: a byte differs");
            assert_ne!(single, played(&[], false).0, "{kind} did nothing");
        }
    }
    // Too few, and what overlaps its result, are put there one by one.
    let few = many("fill", DType::F32);
    assert!(played(&few[..3], true).1.is_empty());
    let mut shifted = many("cast", DType::F32);
    if let Some(Many::Op(_, [x, y])) = shifted.first_mut() {
        let start = x[0].1.start + 4;
        y[0].1 = Place { start, ..x[0].1 };
    }
    let (single, _) = played(&shifted, false);
    let (joined, made) = played(&shifted, true);
    assert_eq!((single == joined, made.is_empty()), (true, true));
}

/// So many elements that threads have several under way, in an order that no words follow.
#[test]
fn many_elements_are_moved() {
    if !is_emulated("device::cuda::tests::many_elements_are_moved") {
        return;
    }
    let (rows, columns) = (1031u64, 1021u64);
    let numbers: Vec<f32> = (0..rows * columns).map(|i| (i % 8191) as f32).collect();
    let case = Case(
        OpKind::Transpose { perm: vec![1, 0] },
        vec![Local::whole(DType::F32, &[rows, columns])],
        vec![Local::whole(DType::F32, &[columns, rows])],
    );
    agree(&case, &[numbers], 16 << 20);
}

/// Two warps bring a row each thread to shared memory, and read each other's as a matrix.
/// n = whether they wait for their copies, whether they meet before they read, and how many bytes
/// beside the right ones they read.
const EXCHANGE: Source = Source {
    name: "exchange.cu",
    text: concat!(
        include_str!("kernels/mma.cuh"),
        "KERNEL(exchange) {
            In<T0> x(a.x[0]);
            Out<f32> y(a.y[0]);
            const u32 i = threadIdx.x;
            copy_16(shared_begin() + 16 * i, x.p + 8 * i, true, x);
            end_group();
            if (a.n[0]) wait_for_groups<0>();
            if (a.n[1]) __syncthreads();
            u32 r[4];
            load_matrices(r, shared_begin() + 16 * (i ^ 32) + (u32)a.n[2]);
            T0 first;
            from_word(r[0], first);
            y.set(i, widen(first));
            wait_for_groups<0>();
        }"
    ),
};

fn exchange(waits: bool, meets: bool, beside: i64) -> Result<Vec<f32>, RuntimeError> {
    let stream = StreamId(1);
    let place = |start, len| Place {
        space: Space::Device,
        start,
        len,
    };
    let (x, y) = (place(0, 64 * 16), place(1024, 64 * 4));
    let mut gpu = Cuda::new(0, SMALL, 0)?;
    gpu.update(stream, x, &mut |to| {
        let numbers: Vec<f32> = (0..64 * 8).map(|i| i as f32 / 4.0).collect();
        crate::execute::narrow(DType::F16, &numbers, to);
        Ok(())
    })?;
    let call = Call::blocks(EXCHANGE, "exchange", 1, 64)
        .x(0, (gpu.span(x)?, "f16"))
        .y(0, (gpu.span(y)?, "f32"))
        .n(0, &[i64::from(waits), i64::from(meets), beside]);
    let shared = 60 << 10;
    gpu.call(stream, &Call { shared, ..call })?;
    let bytes = gpu.read(stream, y)?;
    let words = bytes.chunks_exact(4);
    Ok(words
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect())
}

/// The emulator's purpose, in kernels that copy beside their work.
#[test]
fn missing_waits_and_barriers_show() {
    if !is_emulated("device::cuda::tests::missing_waits_and_barriers_show") {
        return;
    }
    // Lane 4 g + t has element 2 t of row g of the other warp.
    let expected = (0..64).map(|i| {
        let (other, lane) = ((i / 32 + 1) % 2 * 32, i % 32);
        ((other + lane / 4) * 8 + lane % 4 * 2) as f32 / 4.0
    });
    let right = exchange(true, true, 0).expect("the kernel runs");
    assert_eq!(right, expected.collect::<Vec<f32>>());
    for (waits, meets) in [(false, true), (true, false)] {
        let wrong = exchange(waits, meets, 0).expect("the kernel runs");
        assert!(
            wrong.iter().any(|y| y.is_nan()),
            "{waits}, {meets}: {wrong:?}"
        );
    }
    // The context is gone after that.
    let error = exchange(true, true, 60 << 10).expect_err("beyond the shared memory");
    assert!(
        error.to_string().contains("leaves shared memory"),
        "{error}"
    );
}
