//! The duties of every device, whatever it is made of: a test of a device calls [`passes`] with a
//! way to open one. Each case panics with what was expected.

use super::{Device, Place, Space, Tensor, Work};
use crate::error::RuntimeError;
use crate::execute::{Context, Local, Operand, Output, kernel, narrow, widen};
use ir::op::{Binary, Unary};
use ir::reshard::Pieces;
use ir::{DType, LocalRange, OpKind, StreamId};

/// Opens a device whose arenas have so many bytes, of the device and of the host.
pub type Open<'a, D> = &'a dyn Fn(usize, usize) -> D;

const FIRST: StreamId = StreamId(0);
const SECOND: StreamId = StreamId(1);
const SPACES: [Space; 2] = [Space::Device, Space::Host];
const KIB: usize = 1 << 10;

/// Runs all cases.
pub fn passes<D: Device>(open: Open<'_, D>) {
    arenas_begin_as_zeros_and_keep_what_is_written(open);
    places_beyond_an_arena_are_told(open);
    copies_go_between_spaces_and_may_overlap(open);
    fills_leave_padding_zero(open);
    pieces_are_cut_and_put_together(open);
    ops_give_what_the_kernels_give(open);
    works_at_once_give_what_each_gives(open);
    updates_find_the_old_value(open);
    a_stream_is_in_order(open);
    streams_wait_for_events(open);
    what_the_host_writes_is_in_order(open);
    time_goes_on(open);
}

fn place(start: usize, len: usize) -> Place {
    Place {
        space: Space::Device,
        start,
        len,
    }
}

fn set<D: Device>(device: &mut D, at: Place, bytes: &[u8]) {
    let copy = &mut |to: &mut [u8]| {
        to.copy_from_slice(bytes);
        Ok(())
    };
    device.update(FIRST, at, copy).expect("it is written");
}

fn get<D: Device>(device: &D, at: Place) -> Vec<u8> {
    device.read(FIRST, at).expect("it is read").to_vec()
}

/// A matrix of which `valid` of `padded` rows are there.
fn matrix(dtype: DType, [valid, padded]: [u64; 2], columns: u64) -> Local {
    let range = |valid, padded| LocalRange {
        start: 0,
        valid,
        padded,
    };
    Local {
        dtype,
        lens: vec![valid, columns],
        ranges: vec![range(valid, padded), range(columns, columns)],
    }
}

/// Words that storage of numbers is cut from, since it is aligned.
fn stored(dtype: DType, values: &[f32]) -> Vec<u8> {
    let n_bytes = values.len() * dtype.bytes() as usize;
    let mut words = vec![0u64; n_bytes.div_ceil(8)];
    let bytes = &mut bytemuck::cast_slice_mut(&mut words)[..n_bytes];
    narrow(dtype, values, bytes);
    bytes.to_vec()
}

fn loaded(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut words = vec![0u64; bytes.len().div_ceil(8)];
    let aligned = &mut bytemuck::cast_slice_mut(&mut words)[..bytes.len()];
    aligned.copy_from_slice(bytes);
    widen(dtype, aligned).into_owned()
}

fn numbers(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i * 37 % 101) as f32 / 16.0 - 3.0).collect()
}

fn context() -> Context {
    Context {
        seed: 1,
        step: 0,
        updates: 0,
        lr: 0.1,
        first_sample: 0,
        training: true,
        threads: 1,
    }
}

fn arenas_begin_as_zeros_and_keep_what_is_written<D: Device>(open: Open<'_, D>) {
    let mut device = open(KIB, 512);
    for (space, bytes) in [(Space::Device, 1024), (Space::Host, 512)] {
        assert!(
            device.arena_bytes(space) >= bytes,
            "{space:?} is smaller than asked for"
        );
        let all = Place {
            space,
            start: 0,
            len: bytes as usize,
        };
        assert!(
            get(&device, all).iter().all(|b| *b == 0),
            "{space:?} is not zero"
        );
        let odd = Place {
            start: 8,
            len: 13,
            ..all
        };
        let content: Vec<u8> = (1..=13).collect();
        set(&mut device, odd, &content);
        assert_eq!(get(&device, odd), content);
        let rest = get(&device, all);
        assert!(rest[..8].iter().chain(&rest[21..]).all(|b| *b == 0));
    }
    // What the host does in vain is said.
    let refuse = &mut |_: &mut [u8]| Err(RuntimeError::Program("it will not".into()));
    let error = device.update(FIRST, place(0, 8), refuse);
    assert!(
        error
            .expect_err("it failed")
            .to_string()
            .contains("it will not")
    );
    // No bytes are a place as well.
    assert!(get(&open(0, 0), place(0, 0)).is_empty());
}

fn places_beyond_an_arena_are_told<D: Device>(open: Open<'_, D>) {
    let mut device = open(KIB, KIB);
    let bytes = device.arena_bytes(Space::Device) as usize;
    let local = Local::whole(DType::F32, &[4]);
    for at in [
        place(bytes - 8, 16),
        place(bytes + 8, 0),
        place(8, usize::MAX),
    ] {
        assert!(device.read(FIRST, at).is_err(), "{at:?} is read");
        let nothing = &mut |_: &mut [u8]| Ok(());
        assert!(
            device.update(FIRST, at, nothing).is_err(),
            "{at:?} is written"
        );
        assert!(device.copy(FIRST, at, at).is_err(), "{at:?} is copied");
    }
    let fill = |at| Work::Fill {
        value: 1.0,
        output: Tensor { local: &local, at },
    };
    let beyond = device.launch(FIRST, &fill(place(bytes - 8, 16)));
    assert!(beyond.and_then(|_| device.finish()).is_err());
    let mut device = open(KIB, KIB);
    let input = Tensor {
        local: &local,
        at: Place {
            space: Space::Host,
            ..place(0, 16)
        },
    };
    let work = Work::Slice {
        dim: 0,
        index: 0,
        input,
        output: Tensor {
            local: &local,
            at: place(0, 16),
        },
    };
    let of_host = device.launch(FIRST, &work);
    assert!(
        of_host.and_then(|_| device.finish()).is_err(),
        "a kernel used the host's memory"
    );
}

fn copies_go_between_spaces_and_may_overlap<D: Device>(open: Open<'_, D>) {
    let content: Vec<u8> = (0..64).collect();
    for from in SPACES {
        for to in SPACES {
            let mut device = open(KIB, KIB);
            let at = |space, start| Place {
                space,
                start,
                len: 64,
            };
            set(&mut device, at(from, 0), &content);
            device
                .copy(FIRST, at(from, 0), at(to, 128))
                .expect("it is copied");
            assert_eq!(get(&device, at(to, 128)), content, "{from:?} to {to:?}");
            let short = Place {
                len: 32,
                ..at(to, 128)
            };
            assert!(
                device.copy(FIRST, at(from, 0), short).is_err(),
                "lengths differ"
            );
        }
        for shift in [8, 40] {
            let mut device = open(KIB, KIB);
            let at = |start| Place {
                space: from,
                start,
                len: 64,
            };
            set(&mut device, at(shift), &content);
            device.copy(FIRST, at(shift), at(0)).expect("it is copied");
            assert_eq!(get(&device, at(0)), content, "{shift} down in {from:?}");
            device.copy(FIRST, at(0), at(shift)).expect("it is copied");
            assert_eq!(get(&device, at(shift)), content, "{shift} up in {from:?}");
        }
    }
}

fn fills_leave_padding_zero<D: Device>(open: Open<'_, D>) {
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        for (value, rows) in [(1.5, [3, 4]), (-2.0, [4, 4]), (0.0, [3, 4]), (1.0, [0, 2])] {
            let mut device = open(KIB, 0);
            let local = matrix(dtype, rows, 3);
            let at = place(16, local.bytes());
            set(&mut device, at, &vec![0xa5; local.bytes()]);
            let tensor = Tensor { local: &local, at };
            let fill = Work::Fill {
                value,
                output: tensor,
            };
            device.launch(FIRST, &fill).expect("it is filled");
            let n_valid = 3 * rows[0] as usize;
            let mut expected = vec![value; n_valid];
            expected.resize(local.elements(), 0.0);
            assert_eq!(
                loaded(dtype, &get(&device, at)),
                expected,
                "{dtype:?}, {rows:?}"
            );
            set(
                &mut device,
                at,
                &stored(dtype, &vec![7.0; local.elements()]),
            );
            device
                .launch(FIRST, &Work::Pad(tensor))
                .expect("it is padded");
            let padded = loaded(dtype, &get(&device, at));
            let is_kept = padded[..n_valid].iter().all(|x| *x == 7.0);
            assert!(is_kept && padded[n_valid..].iter().all(|x| *x == 0.0));
        }
    }
}

fn pieces_are_cut_and_put_together<D: Device>(open: Open<'_, D>) {
    let (rows, columns) = (5, 6);
    for dtype in [DType::F32, DType::Bf16, DType::I32] {
        let size = dtype.bytes() as usize;
        let whole = Local::whole(dtype, &[rows, columns]);
        let full: Vec<u8> = (0..whole.bytes()).map(|i| i as u8).collect();
        let element = |row: usize, column: usize| {
            let at = (row * columns as usize + column) * size;
            full.get(at..at + size).unwrap_or(&[0; 4][..size]).to_vec()
        };
        // Three pieces of two rows, the last one short, and two pieces of three columns.
        for (dim, n, len) in [(0, 3, 2), (1, 2, 3)] {
            let mut device = open(8 * KIB, 0);
            let pieces = Pieces { dim, n, len };
            let bytes = |shape: &[u64]| shape.iter().product::<u64>() as usize * size;
            let packed = place(2048, bytes(&pieces.shape(&[rows, columns])));
            let (input, back) = (place(0, whole.bytes()), place(4096, whole.bytes()));
            set(&mut device, input, &full);
            let tensor = |at| Tensor { local: &whole, at };
            let pack = Work::Pack {
                pieces,
                input: tensor(input),
                output: packed,
            };
            device.launch(FIRST, &pack).expect("it is cut");
            let mut expected = Vec::new();
            for piece in 0..n as usize {
                let [n_rows, n_columns] = match dim {
                    0 => [len as usize, columns as usize],
                    _ => [rows as usize, len as usize],
                };
                for row in 0..n_rows {
                    for column in 0..n_columns {
                        expected.extend(match dim {
                            0 => element(piece * n_rows + row, column),
                            _ => element(row, piece * n_columns + column),
                        });
                    }
                }
            }
            assert_eq!(get(&device, packed), expected, "{pieces:?} of {dtype:?}");
            let unpack = Work::Unpack {
                pieces,
                input: packed,
                output: tensor(back),
            };
            device.launch(FIRST, &unpack).expect("it is put together");
            assert_eq!(get(&device, back), full, "{pieces:?} of {dtype:?} and back");
            // A slice is one of the pieces.
            let shape = match dim {
                0 => [len, columns],
                _ => [rows, len],
            };
            let part = Local::whole(dtype, &shape);
            let at = place(6144, part.bytes());
            let slice = Work::Slice {
                dim,
                index: 1,
                input: tensor(input),
                output: Tensor { local: &part, at },
            };
            device.launch(FIRST, &slice).expect("it is sliced");
            assert_eq!(get(&device, at), expected[part.bytes()..2 * part.bytes()]);
        }
    }
}

fn ops_give_what_the_kernels_give<D: Device>(open: Open<'_, D>) {
    let ops = [
        OpKind::Binary { f: Binary::Add },
        OpKind::Binary { f: Binary::Mul },
        OpKind::Unary {
            f: Unary::Scale { by: 0.5 },
        },
        OpKind::Unary { f: Unary::GeluTanh },
    ];
    for dtype in [DType::F32, DType::Bf16, DType::F16] {
        let local = matrix(dtype, [3, 4], 5);
        let mut values = numbers(local.elements());
        values[15..].fill(0.0);
        let bytes = stored(dtype, &values);
        let n_inputs = |op: &OpKind| match op {
            OpKind::Binary { .. } => 2,
            _ => 1,
        };
        // The result lies beside the operands, or over one of them.
        let over = |op: &OpKind| {
            (0..n_inputs(op))
                .map(Some)
                .chain([None])
                .collect::<Vec<_>>()
        };
        for (op, over) in ops
            .iter()
            .flat_map(|op| over(op).into_iter().map(move |o| (op, o)))
        {
            let n_inputs = n_inputs(op);
            let mut device = open(4 * KIB, 0);
            let places: Vec<Place> = (0..n_inputs).map(|i| place(512 * i, bytes.len())).collect();
            places.iter().for_each(|&at| set(&mut device, at, &bytes));
            let output = over.map_or(place(2048, bytes.len()), |i: usize| places[i]);
            let tensor = |&at: &Place| Tensor { local: &local, at };
            let work = Work::Compute {
                path: "a.test",
                op,
                inputs: &places.iter().map(tensor).collect::<Vec<_>>(),
                outputs: &[tensor(&output)],
                context: &context(),
            };
            device.launch(FIRST, &work).expect("it runs");
            let mut words = vec![0u64; bytes.len().div_ceil(8)];
            let data: &mut [u8] = &mut bytemuck::cast_slice_mut(&mut words)[..bytes.len()];
            let mut aligned = vec![0u64; bytes.len().div_ceil(8)];
            let operand = &mut bytemuck::cast_slice_mut(&mut aligned)[..bytes.len()];
            operand.copy_from_slice(&bytes);
            let operand = Operand {
                local: &local,
                data: operand,
                is_in_result: false,
            };
            let mut result = [Output {
                local: &local,
                data,
            }];
            kernel(
                op,
                "a.test",
                &vec![operand; n_inputs],
                &mut result,
                &context(),
            )
            .expect("the kernel runs");
            let (got, expected) = (get(&device, output), &*result[0].data);
            let rounding = match dtype {
                DType::F32 => 1e-5,
                DType::F16 => 2e-3,
                _ => 1e-2,
            };
            let both = loaded(dtype, &got).into_iter().zip(loaded(dtype, expected));
            for (i, (a, b)) in both.enumerate() {
                let most = rounding * (1.0 + b.abs());
                assert!(
                    (a - b).abs() <= most,
                    "{op:?} of {dtype:?} over {over:?}: element {i}: {a}, not {b}"
                );
            }
            assert!(
                got[15 * dtype.bytes() as usize..].iter().all(|b| *b == 0),
                "padding"
            );
        }
    }
    // An op that cannot run on its operands says so.
    let mut device = open(KIB, 0);
    let local = Local::whole(DType::F32, &[4]);
    let tensor = Tensor {
        local: &local,
        at: place(0, 16),
    };
    let work = Work::Compute {
        path: "a.test",
        op: &ops[0],
        inputs: &[tensor],
        outputs: &[tensor],
        context: &context(),
    };
    let done = device.launch(FIRST, &work).and_then(|_| device.finish());
    assert!(done.is_err(), "an addition of one operand");
}

fn works_at_once_give_what_each_gives<D: Device>(open: Open<'_, D>) {
    let mut device = open(64 * KIB, 0);
    let lengths = [1u64, 7, 8, 300, 2056];
    let mut locals: Vec<Local> = lengths
        .iter()
        .map(|&n| Local::whole(DType::F32, &[n]))
        .collect();
    // Of three rows the last one is padding.
    locals.push(matrix(DType::F32, [2, 3], 4));
    let mut start = 0;
    let mut places = || {
        let place = |local: &Local| {
            let at = place(start, local.bytes());
            start = (start + local.bytes()).next_multiple_of(256);
            at
        };
        locals.iter().map(place).collect::<Vec<Place>>()
    };
    let (filled, copied) = (places(), places());
    for round in 0..2 {
        let value = |i: usize| (i + 10 * round) as f32 + 0.5;
        let fill = |(i, &at): (usize, &Place)| Work::Fill {
            value: value(i),
            output: Tensor {
                local: &locals[i],
                at,
            },
        };
        let fills: Vec<Work<'_>> = filled.iter().enumerate().map(fill).collect();
        device.launch_all(FIRST, &fills).expect("fills");
        let both = filled.iter().zip(&copied);
        let copies: Vec<Work<'_>> = both.map(|(&from, &to)| Work::Copy { from, to }).collect();
        device.launch_all(FIRST, &copies).expect("copies");
        for (i, (local, &at)) in locals.iter().zip(&copied).enumerate() {
            let mut expected = vec![0u64; local.bytes().div_ceil(8)];
            let expected = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut expected)[..local.bytes()];
            narrow(DType::F32, &vec![value(i); local.elements()], expected);
            local.zero_padding(expected);
            assert_eq!(get(&device, at), expected, "round {round}, {i}");
        }
    }
}

fn updates_find_the_old_value<D: Device>(open: Open<'_, D>) {
    // A sum over microbatches: twice the same is added to what is there.
    let mut device = open(KIB, 0);
    let local = Local::whole(DType::F32, &[7]);
    let values = numbers(7);
    let bytes = stored(DType::F32, &values);
    let (input, total) = (place(0, 28), place(64, 28));
    set(&mut device, input, &bytes);
    set(&mut device, total, &bytes);
    let tensor = |at| Tensor { local: &local, at };
    let op = OpKind::Accumulate { dtype: DType::F32 };
    for _ in 0..2 {
        let work = Work::Compute {
            path: "a.sum",
            op: &op,
            inputs: &[tensor(input)],
            outputs: &[tensor(total)],
            context: &context(),
        };
        device.launch(FIRST, &work).expect("it adds");
    }
    let expected: Vec<f32> = values.iter().map(|x| x + x + x).collect();
    assert_eq!(loaded(DType::F32, &get(&device, total)), expected);
}

fn a_stream_is_in_order<D: Device>(open: Open<'_, D>) {
    let mut device = open(64 * KIB, 64 * KIB);
    let local = Local::whole(DType::F32, &[1024]);
    let at = place(0, local.bytes());
    for i in 0..8 {
        let fill = Work::Fill {
            value: i as f32,
            output: Tensor { local: &local, at },
        };
        device.launch(FIRST, &fill).expect("it is filled");
        let kept = Place {
            space: SPACES[i % 2],
            ..place(4096 * (i + 1), local.bytes())
        };
        device.copy(FIRST, at, kept).expect("it is copied");
    }
    for i in 0..8 {
        let kept = Place {
            space: SPACES[i % 2],
            ..place(4096 * (i + 1), local.bytes())
        };
        let values = loaded(DType::F32, &get(&device, kept));
        assert!(
            values.iter().all(|x| *x == i as f32),
            "copy {i} has {}",
            values[0]
        );
    }
}

fn streams_wait_for_events<D: Device>(open: Open<'_, D>) {
    let mut device = open(1024 * KIB, 0);
    let local = Local::whole(DType::F32, &[4096]);
    let at = place(0, local.bytes());
    // One stream fills, the other one copies what is there; each waits for the other.
    let kept = |i: usize| place(local.bytes() * (i + 1), local.bytes());
    for i in 0..40 {
        let fill = Work::Fill {
            value: i as f32 + 0.5,
            output: Tensor { local: &local, at },
        };
        device.launch(FIRST, &fill).expect("it is filled");
        let filled = device.record(FIRST).expect("it is recorded");
        device.wait(SECOND, &filled).expect("it waits");
        device.copy(SECOND, at, kept(i)).expect("it is copied");
        let copied = device.record(SECOND).expect("it is recorded");
        device.wait(FIRST, &copied).expect("it waits");
        // To wait for what is over is to wait for nothing.
        device.wait(FIRST, &filled).expect("it waits again");
    }
    device.finish().expect("all is done");
    for i in 0..40 {
        let values = loaded(DType::F32, &get(&device, kept(i)));
        let all = values.iter().all(|x| *x == i as f32 + 0.5);
        assert!(all, "copy {i} has {} and {}", values[0], values[4095]);
    }
}

fn what_the_host_writes_is_in_order<D: Device>(open: Open<'_, D>) {
    let mut device = open(2 * 400, 0);
    let stream = StreamId(3);
    for (round, len) in [400usize, 8, 0, 392, 400].into_iter().enumerate() {
        let (first, second) = (place(0, len), place(400, len));
        // What was there before goes to the second place, and the new bytes to the first.
        for byte in [1 + round as u8, 101 + round as u8] {
            let write = &mut |to: &mut [u8]| {
                to.fill(byte);
                Ok(())
            };
            device.copy(stream, first, second).expect("it is copied");
            device.write(stream, first, write).expect("it is written");
        }
        let got = [first, second].map(|at| device.read(stream, at).expect("it is read").to_vec());
        assert!(got[0].iter().all(|b| *b == 101 + round as u8), "{got:?}");
        assert!(got[1].iter().all(|b| *b == 1 + round as u8), "{got:?}");
    }
    let beyond = device.write(stream, place(792, 16), &mut |_| Ok(()));
    assert!(beyond.is_err_and(|e| e.to_string().contains("beyond the arena")));
}

fn time_goes_on<D: Device>(open: Open<'_, D>) {
    let mut device = open(1024 * KIB, 0);
    let local = Local::whole(DType::F32, &[1 << 17]);
    let output = Tensor {
        local: &local,
        at: place(0, local.bytes()),
    };
    let began = device.tick(FIRST).expect("a tick");
    for _ in 0..4 {
        let fill = Work::Fill { value: 1.0, output };
        device.launch(FIRST, &fill).expect("it is filled");
    }
    let between = device.tick(FIRST).expect("a tick");
    let fill = Work::Fill { value: 2.0, output };
    device.launch(FIRST, &fill).expect("it is filled");
    let ended = device.tick(FIRST).expect("a tick");
    device.finish().expect("all is done");
    let s = |from: &D::Tick, to: &D::Tick| {
        let elapsed = device.elapsed(from, to).expect("ticks are over");
        assert!(
            elapsed.wall_s >= 0.0 && elapsed.busy_s >= 0.0,
            "time goes back"
        );
        elapsed.wall_s
    };
    let (all, parts) = (s(&began, &ended), s(&began, &between) + s(&between, &ended));
    assert!(
        all > 0.0,
        "half a megabyte was filled five times in no time"
    );
    assert!(
        (all - parts).abs() <= 1e-5 + 0.01 * all,
        "{all} s are not {parts} s"
    );
}
