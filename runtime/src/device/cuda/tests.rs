//! The device suite, and every kernel against the CPU's.

use super::args::Source;
use super::cases::{Case, SMALL, cases, context, multipliers, results, results_of};
use super::*;
use crate::device::Cpu;
use crate::execute::{Local, narrow};
use emulator::harness::is_emulated;
use ir::DType;

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
