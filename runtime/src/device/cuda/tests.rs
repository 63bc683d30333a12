//! The device suite, and every kernel against the CPU's.

use super::cases::{SMALL, cases, context, multipliers, results};
use super::*;
use crate::device::Cpu;
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
