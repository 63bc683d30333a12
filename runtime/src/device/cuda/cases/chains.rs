//! Chains to try a device with: a product of matrices and what is done to its result; and ops that go
//! through the same elements ([`elements`]).

mod elements;

use super::{
    Compared, STREAM, Timed, content, context, einsum, error_by_norm, numbers, part, whole,
};
use crate::device::cuda::{Cuda, Matmuls, Multiplier};
use crate::device::{Chain, Cpu, Device, Place, Tensor, Work};
use crate::error::RuntimeError;
use crate::execute::{Context, Local};
use ir::op::{Binary, Unary};
use ir::program::Space;
use ir::{DType, OpKind};

/// An op with its operands and results, which are numbers of tensors.
type OpOf = (OpKind, Vec<usize>, Vec<usize>);

/// Ops with operands and results each.
#[derive(Clone)]
pub(in super::super) struct ChainCase {
    pub name: String,
    tensors: Vec<Local>,
    ops: Vec<OpOf>,
    kept: Vec<bool>,
    /// Whether the last op, a sum in an accumulator, adds to zeros.
    is_cleared: bool,
    flops: f64,
}

impl ChainCase {
    pub fn n_ops(&self) -> usize {
        self.ops.len()
    }

    /// Lays the tensors one after the other.
    fn places(&self) -> (Vec<Place>, usize) {
        let mut start = 0;
        let mut place = |local: &Local| {
            let (space, len) = (Space::Device, local.bytes());
            let at = Place { space, start, len };
            start = (start + len).next_multiple_of(256);
            at
        };
        let places = self.tensors.iter().map(&mut place).collect();
        (places, start)
    }

    fn with<R>(&self, at: &[Place], context: &Context, run: impl FnOnce(&Chain<'_>) -> R) -> R {
        let tensor = |&i: &usize| Tensor {
            local: &self.tensors[i],
            at: at[i],
        };
        let operands: Vec<[Vec<Tensor<'_>>; 2]> = self
            .ops
            .iter()
            .map(|(_, x, y)| [x, y].map(|ids| ids.iter().map(tensor).collect()))
            .collect();
        let works: Vec<Work<'_>> = self
            .ops
            .iter()
            .zip(&operands)
            .map(|((op, ..), [inputs, outputs])| Work::Compute {
                path: "a.test",
                op,
                inputs,
                outputs,
                context,
            })
            .collect();
        run(&Chain {
            works: &works,
            kept: &self.kept,
            is_cleared: self.is_cleared,
        })
    }

    fn write<D: Device>(&self, device: &mut D, at: &[Place]) -> Result<(), RuntimeError> {
        for (i, (local, at)) in self.tensors.iter().zip(at).enumerate() {
            let bytes = content(local, i + 1);
            device.update(STREAM, *at, &mut |to: &mut [u8]| {
                to.copy_from_slice(&bytes);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// The values that the chain writes, from a device that is given it.
    fn results<D: Device>(
        &self,
        device: &mut D,
        run: impl FnOnce(&mut D, &Chain<'_>) -> Result<(), RuntimeError>,
    ) -> Result<Vec<Vec<f32>>, RuntimeError> {
        let (at, _) = self.places();
        self.write(device, &at)?;
        self.with(&at, &context(), |chain| run(device, chain))?;
        let last = self.ops.len() - 1;
        let written = self.ops.iter().zip(&self.kept).enumerate();
        written
            .filter(|(i, (_, kept))| *i == last || **kept)
            .flat_map(|(_, ((_, _, y), _))| y)
            .map(|&y| Ok(numbers(&self.tensors[y], &device.read(STREAM, at[y])?)))
            .collect()
    }

    /// By the CPU, one op after the other.
    pub fn expected(&self) -> Result<Vec<Vec<f32>>, RuntimeError> {
        let mut cpu = Cpu::new(self.places().1, 0, 1);
        self.results(&mut cpu, |cpu, chain| {
            cpu.launch_chain(STREAM, chain).map(|_| ())
        })
    }

    /// By a GPU, one op after the other.
    #[cfg(test)]
    pub fn one_by_one(&self) -> Result<Vec<Vec<f32>>, RuntimeError> {
        let mut gpu = Cuda::new(0, self.places().1, 0)?;
        self.results(&mut gpu, |gpu, chain| {
            (chain.works.iter()).try_for_each(|work| gpu.launch(STREAM, work).map(|_| ()))
        })
    }

    /// By a GPU, and how many ops were one call.
    pub fn on_gpu(&self, by: Multiplier) -> Result<(Vec<Vec<f32>>, usize), RuntimeError> {
        let mut gpu = Cuda::with(0, self.places().1, 0, Matmuls { by, tf32: false })?;
        let mut fused = 0;
        let got = self.results(&mut gpu, |gpu, chain| {
            gpu.bind()?;
            fused = gpu.launch_fused(STREAM, chain)?;
            Ok(())
        })?;
        if fused == self.n_ops() {
            return Ok((got, fused));
        }
        // From the beginning, by the way that a run has it.
        let got = self.results(&mut gpu, |gpu, chain| {
            gpu.launch_chain(STREAM, chain).map(|_| ())
        })?;
        Ok((got, fused))
    }
}

/// A product of `[rows, inner]` and `[inner, cols...]`.
struct Factors {
    x: Local,
    w: Local,
    y: Local,
    text: &'static str,
}

/// The chains of these factors: names, and what they are made of.
fn forms(factors: &Factors, bias: &Local, flops: f64) -> Vec<ChainCase> {
    let Factors { x, w, y, text } = factors;
    let binary = |f| OpKind::Binary { f };
    let (add, gelu) = (binary(Binary::Add), OpKind::Unary { f: Unary::GeluTanh });
    let product = (einsum(text), vec![0, 1], vec![2]);
    // Factors, product, then what each has.
    let made = |name: &str, more: &[&Local], ops: Vec<OpOf>, kept: &[bool]| {
        let mut tensors = vec![x.clone(), w.clone(), y.clone()];
        tensors.extend(more.iter().map(|l| (*l).clone()));
        let mut all = vec![product.clone()];
        all.extend(ops);
        ChainCase {
            name: format!("product, {name}"),
            tensors,
            ops: all,
            kept: kept.to_vec(),
            is_cleared: false,
            flops,
        }
    };
    let (no, yes) = (false, true);
    let biased = (add.clone(), vec![2, 3], vec![4]);
    vec![
        made("bias", &[bias, y], vec![biased.clone()], &[no, no]),
        made(
            "bias, gelu with its argument",
            &[bias, y, y],
            vec![biased.clone(), (gelu.clone(), vec![4], vec![5])],
            &[no, yes, no],
        ),
        made(
            "bias, gelu",
            &[bias, y, y],
            vec![biased.clone(), (gelu.clone(), vec![4], vec![5])],
            &[no, no, no],
        ),
        made(
            "bias, residual",
            &[bias, y, y, y],
            vec![biased.clone(), (add.clone(), vec![5, 4], vec![6])],
            &[no, no, no],
        ),
        made(
            "residual in its place",
            &[y],
            vec![(add.clone(), vec![2, 3], vec![3])],
            &[no, no],
        ),
        made(
            "gelu with its argument",
            &[y],
            vec![(gelu, vec![2], vec![3])],
            &[yes, no],
        ),
        made(
            "gelu's gradient",
            &[y, y],
            vec![(binary(Binary::GeluTanhGrad), vec![3, 2], vec![4])],
            &[no, no],
        ),
    ]
}

/// A weight's gradient, added to an accumulator: to what is there, and to zeros.
fn accumulated([x, dy, w]: [Local; 3], text: &str, flops: f64) -> [ChainCase; 2] {
    [false, true].map(|is_cleared| {
        let factors = [x.clone(), dy.clone(), w.clone()];
        one_accumulated(factors, text, is_cleared, flops)
    })
}

fn one_accumulated([x, dy, w]: [Local; 3], text: &str, is_cleared: bool, flops: f64) -> ChainCase {
    let sum = Local {
        dtype: DType::F32,
        ..w.clone()
    };
    let accumulate = OpKind::Accumulate { dtype: DType::F32 };
    ChainCase {
        name: match is_cleared {
            false => "product, accumulate".into(),
            true => "product, accumulate to zeros".into(),
        },
        tensors: vec![x, dy, w, sum],
        ops: vec![
            (einsum(text), vec![0, 1], vec![2]),
            (accumulate, vec![2], vec![3]),
        ],
        kept: vec![false; 2],
        is_cleared,
        flops,
    }
}

/// Small chains of a float type, all of which are one call.
pub(in super::super) fn cases(t: DType) -> Vec<ChainCase> {
    let s = |lens: &[u64]| whole(t, lens);
    let plain = Factors {
        x: s(&[2, 5, 12]),
        w: s(&[12, 3, 2, 4]),
        y: s(&[2, 5, 3, 2, 4]),
        text: "bsh,hcnd->bscnd",
    };
    // Padding of samples and of the columns of a shard.
    let (rows, cols) = ((0, 3, 4), (0, 13, 16));
    let padded = Factors {
        x: part(t, &[rows, (0, 6, 6)]),
        w: part(t, &[(0, 6, 6), cols]),
        y: part(t, &[rows, cols]),
        text: "rh,hf->rf",
    };
    let mut all = forms(&plain, &s(&[3, 2, 4]), 0.0);
    all.extend(forms(&padded, &part(t, &[cols]), 0.0));
    let factors = [s(&[2, 5, 12]), s(&[2, 5, 24]), s(&[12, 24])];
    all.extend(accumulated(factors, "bsh,bsf->hf", 0.0));
    // One product for each matrix of a batch.
    let factors = [s(&[3, 5, 6]), s(&[3, 5, 7]), s(&[3, 6, 7])];
    all.extend(accumulated(factors, "eci,eco->eio", 0.0));
    all
}

/// Small chains of a float type that go through the same elements, all of which are one kernel.
#[cfg(test)]
pub(in super::super) fn of_elements(t: DType) -> Vec<ChainCase> {
    elements::cases(t)
}

/// Chains of which there is no one kernel.
#[cfg(test)]
pub(in super::super) fn of_no_kernel(t: DType) -> Vec<ChainCase> {
    elements::apart(t)
}

/// A chain of which the library takes the bias alone: rows of another length than GELU's argument may
/// have where it is kept.
#[cfg(test)]
pub(in super::super) fn partly(t: DType) -> ChainCase {
    let factors = Factors {
        x: whole(t, &[5, 6]),
        w: whole(t, &[6, 12]),
        y: whole(t, &[5, 12]),
        text: "rh,hf->rf",
    };
    forms(&factors, &whole(t, &[12]), 0.0).swap_remove(1)
}

/// Chains on GPU 0 against the CPU's ops.
pub(super) fn compare(
    (dtype, limit): (DType, f64),
    on: &mut impl FnMut(Compared),
) -> Result<(), RuntimeError> {
    let products = cases(dtype).into_iter();
    let both = [Multiplier::Library, Multiplier::Tuned];
    let products = products.flat_map(|case| both.map(|by| (case.clone(), by)));
    let elements = elements::cases(dtype).into_iter();
    let all = products.chain(elements.map(|case| (case, Multiplier::Plain)));
    for (case, by) in all {
        let expected = case.expected()?;
        {
            let got = case.on_gpu(by);
            let fused = got.as_ref().map_or(0, |g| g.1);
            let error = got.map(|(got, _)| {
                let both = got.iter().zip(&expected);
                both.map(|(a, b)| error_by_norm(a, b)).fold(0.0, f64::max)
            });
            on(Compared {
                op: format!("{}: {fused} of {} ops in one call", case.name, case.n_ops()),
                dtype,
                by,
                error: error.map_err(|e| e.to_string()),
                limit,
            });
        }
    }
    Ok(())
}

/// The chains of a training step of GPT-2 124M with so many samples of so many tokens, in bf16.
fn real(samples: u64, tokens: u64) -> Vec<ChainCase> {
    let width = 768;
    let b = |lens: &[u64]| whole(DType::Bf16, lens);
    let mut all = Vec::new();
    for (what, inner, out) in [
        ("qkv", width, 3 * width),
        ("mlp's first", width, 4 * width),
        ("mlp's second", 4 * width, width),
    ] {
        let (x, w, y) = (
            [samples, tokens, inner],
            [inner, out],
            [samples, tokens, out],
        );
        let factors = Factors {
            x: b(&x),
            w: b(&w),
            y: b(&y),
            text: "bsh,hf->bsf",
        };
        let rows = samples * tokens;
        let flops = 2.0 * (rows * inner * out) as f64;
        let mut these = forms(&factors, &b(&[out]), flops);
        these.extend(accumulated([b(&x), b(&y), b(&w)], "bsh,bsf->hf", flops));
        for case in &mut these {
            case.name = format!("{what} {}, {rows} x {inner} x {out}", case.name);
        }
        all.extend(these);
    }
    all
}

/// Times the chains of a step of GPT-2 124M, as one call and one by one, until `is_over`.
pub(super) fn time(
    (samples, tokens, repetitions): (u64, u64, usize),
    is_over: &impl Fn() -> bool,
    on: &mut impl FnMut(Timed),
) -> Result<(), RuntimeError> {
    let products = real(samples, tokens).into_iter();
    let elements = elements::real(samples, tokens).into_iter();
    let all = products.map(|case| (case, &[Multiplier::Library, Multiplier::Tuned][..]));
    // The newest ones first: a visit may end before all are timed.
    for (case, multipliers) in elements
        .map(|case| (case, &[Multiplier::Plain][..]))
        .chain(all)
    {
        for &by in multipliers {
            if is_over() {
                return Ok(());
            }
            let (at, bytes) = case.places();
            let mut gpu = Cuda::with(0, bytes, 0, Matmuls { by, tf32: false })?;
            let mut moved = 0;
            for (i, local) in case.tensors.iter().enumerate() {
                // One that is read and written counts for each.
                let is_result = case
                    .ops
                    .iter()
                    .zip(&case.kept)
                    .enumerate()
                    .any(|(k, (op, kept))| (*kept || k + 1 == case.ops.len()) && op.2.contains(&i));
                let made = case.ops.iter().position(|op| op.2.contains(&i));
                let read = case.ops.iter().position(|op| op.1.contains(&i));
                let is_operand = read.is_some_and(|r| made.is_none_or(|m| r <= m));
                moved += local.bytes() * (usize::from(is_operand) + usize::from(is_result));
            }
            for is_one in [true, false] {
                let timed = case.write(&mut gpu, &at).and_then(|()| {
                    case.with(&at, &context(), |chain| {
                        repeat(&mut gpu, (chain, is_one), repetitions)
                    })
                });
                let how = match &timed {
                    Ok((n, _)) if is_one => format!("{n} of {} ops in one call", case.n_ops()),
                    _ => "one by one".into(),
                };
                let (times_s, error) = match timed {
                    Ok((_, times_s)) => (times_s, None),
                    Err(e) => (Vec::new(), Some(e.to_string())),
                };
                on(Timed {
                    op: format!("{}: {how}", case.name),
                    by,
                    times_s,
                    flops: case.flops,
                    bytes: moved as f64,
                    error,
                });
            }
        }
    }
    Ok(())
}

/// The ops that were one call, and the seconds of each repetition.
fn repeat(
    gpu: &mut Cuda,
    (chain, is_one): (&Chain<'_>, bool),
    repetitions: usize,
) -> Result<(usize, Vec<f64>), RuntimeError> {
    let play = |gpu: &mut Cuda| {
        gpu.bind()?;
        let n = if is_one {
            gpu.launch_fused(STREAM, chain)?
        } else {
            0
        };
        for work in &chain.works[n..] {
            gpu.launch(STREAM, work)?;
        }
        Ok::<usize, RuntimeError>(n)
    };
    let n = play(gpu)?;
    let mut ticks = Vec::new();
    for _ in 0..repetitions {
        let began = gpu.tick(STREAM)?;
        play(gpu)?;
        ticks.push((began, gpu.tick(STREAM)?));
    }
    gpu.finish()?;
    let seconds = ticks.iter().map(|(a, b)| Ok(gpu.elapsed(a, b)?.wall_s));
    Ok((n, seconds.collect::<Result<_, RuntimeError>>()?))
}
