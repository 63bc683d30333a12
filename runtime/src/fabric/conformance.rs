//! The duties of every fabric, whatever carries its messages: a test of a fabric calls [`passes`]
//! with a way to open worlds of it, or [`passes_apart`] in each of several processes that have the
//! ranks. Each case panics with what was expected.
//!
//! Results are worked out here element by element, from the definition of the collective. Each call
//! states the contract of the fabric that it is given to, and its result is held to that: where it
//! states a library's order ([`Order::Library`]) sums may differ by rounding, but never between the
//! members of a group. All else has the same bits.

use super::{
    Call, CallKind, Collective, Contract, Exchange, Fabric, Item, Moved, Order, Places, Rows,
    RuntimeError,
};
use crate::device::{Device, Place, Space};
use crate::execute::{Local, narrow, widen};
use ir::collective::CollectiveKind::{self, AllGather, AllReduce, AllToAll, ReduceScatter, Shift};
use ir::reshard::Tile;
use ir::{DType, LocalRange, Rank, Reduction, StreamId};
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Opens a world: for each of so many ranks, or those of them that this process has, a device whose
/// arena has so many bytes, and its fabric with this timeout.
pub type Open<'a, D, F> = &'a dyn Fn(u32, usize, Duration) -> Vec<(D, F)>;
/// Brings words of these ranks together beside the fabric, where several processes have them: takes
/// one's own, and gives all in this order once all have come.
pub type Gather<'a> = &'a (dyn Fn(&[Rank], Rank, String) -> Vec<String> + Sync);

/// Longest that a rank waits where all goes well.
const PATIENCE: Duration = Duration::from_secs(60);
/// The same where somebody is missing.
const IMPATIENCE: Duration = Duration::from_millis(100);
const STREAM: StreamId = StreamId(0);
const MIB: usize = 1 << 20;

/// Runs all cases, on worlds whose ranks are all in this process.
pub fn passes<D: Device, F: Fabric<D>>(open: Open<'_, D, F>) {
    passes_all(open, None);
}

/// Runs all cases in each of the processes that have the ranks.
pub fn passes_apart<D: Device, F: Fabric<D>>(open: Open<'_, D, F>, gather: Gather<'_>) {
    passes_all(open, Some(gather));
}

fn passes_all<D: Device, F: Fabric<D>>(open: Open<'_, D, F>, apart: Option<Gather<'_>>) {
    every_collective_of_every_type_and_size(open);
    buffers_go_together_and_in_place(open, apart);
    groups_meet_at_the_same_time(open);
    communicators_of_one_group_meet_in_any_order(open);
    exchanges_bring_blocks_to_their_places(open);
    messages_keep_their_order(open);
    a_send_is_over_when_its_receiver_has_begun(open, apart);
    barriers_hold_all_back(open, apart);
    other_calls_are_told(open, apart);
    a_rank_outside_of_the_group_is_told(open);
    the_watchdog_names_who_is_missing(open, apart);
    a_failure_ends_all_waiting(open, apart);
    a_rank_that_dies_is_named(open, apart);
}

/// Words between some ranks of a world, beside the fabric.
enum Words<'a> {
    /// All are threads of this process.
    Here {
        among: Vec<Rank>,
        said: Mutex<Vec<String>>,
        all: Barrier,
    },
    Apart {
        among: Vec<Rank>,
        gather: Gather<'a>,
    },
}

impl<'a> Words<'a> {
    fn among(ids: &[u32], apart: Option<Gather<'a>>) -> Self {
        let among = ranks(ids);
        match apart {
            Some(gather) => Words::Apart { among, gather },
            None => Words::Here {
                said: Mutex::new(vec![String::new(); ids.len()]),
                all: Barrier::new(ids.len()),
                among,
            },
        }
    }
    /// The words of all, once all have come.
    fn gather(&self, of: Rank, word: String) -> Vec<String> {
        match self {
            Words::Apart { among, gather } => gather(among, of, word),
            Words::Here { among, said, all } => {
                let lock = || said.lock().unwrap_or_else(PoisonError::into_inner);
                let place = among.iter().position(|r| *r == of);
                lock()[place.expect("it is one of them")] = word;
                all.wait();
                let said = lock().clone();
                // Nobody says something new before all have heard.
                all.wait();
                said
            }
        }
    }
    fn wait(&self, of: Rank) {
        self.gather(of, String::new());
    }
}

/// Does the same on all ranks of a world that are here, each a thread.
fn on_ranks<D: Device, F: Fabric<D>>(world: Vec<(D, F)>, act: impl Fn(Member<D, F>) + Sync) {
    let act = &act;
    std::thread::scope(|scope| {
        let ranks = world
            .into_iter()
            .map(|(device, fabric)| scope.spawn(move || act(Member { device, fabric })));
        let ranks: Vec<_> = ranks.collect();
        for rank in ranks {
            rank.join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    })
}

/// The fabric goes before the device does: others may wait for it, and streams for them.
struct Member<D: Device, F: Fabric<D>> {
    fabric: F,
    device: D,
}

impl<D: Device, F: Fabric<D>> Member<D, F> {
    fn rank(&self) -> Rank {
        self.fabric.rank()
    }
    fn set(&mut self, at: Place, bytes: &[u8]) {
        let copy = &mut |to: &mut [u8]| {
            to.copy_from_slice(bytes);
            Ok(())
        };
        self.device.update(STREAM, at, copy).expect("it is written");
    }
    fn get(&self, at: Place) -> Vec<u8> {
        self.device.read(STREAM, at).expect("it is read").to_vec()
    }
    fn begin(&mut self, call: Call, places: Places) -> Result<F::Ticket, RuntimeError> {
        self.fabric
            .begin(&mut self.device, STREAM, &Arc::new(call), places)
    }
    fn call(&mut self, call: Call, places: Places) -> Result<(), RuntimeError> {
        let ticket = self.begin(call, places)?;
        self.fabric.wait(&mut self.device, ticket).map(|_| ())
    }
    /// One buffer through a collective: its result, of `n_out` bytes.
    fn collect(
        &mut self,
        of: Collective,
        operand: &[u8],
        n_out: usize,
    ) -> Result<Vec<u8>, RuntimeError> {
        let input = place(0, operand.len());
        let output = place(operand.len().next_multiple_of(8), n_out);
        self.set(input, operand);
        // What is there before is no matter.
        self.set(output, &vec![0xa5; n_out]);
        let places = Places {
            inputs: vec![input],
            outputs: vec![output],
        };
        self.call(named(CallKind::Collective(of)), places)?;
        Ok(self.get(output))
    }
}

fn place(start: usize, len: usize) -> Place {
    Place {
        space: Space::Device,
        start,
        len,
    }
}

fn named(kind: CallKind) -> Call {
    Call {
        what: "a test".into(),
        kind,
    }
}

/// A call that states the contract of a fabric whose sums have this order.
fn collective(order: Order, kind: CollectiveKind, group: &[Rank], items: Vec<Item>) -> Collective {
    let dtype = items.first().map(|i| i.dtype);
    Collective {
        kind,
        group: group.to_vec(),
        number: 0,
        contract: Contract::new(kind, dtype.unwrap_or(DType::F32), order),
        items,
    }
}

fn whole(dtype: DType, elements: usize) -> Item {
    Item {
        dtype,
        elements,
        operand: Rows::ONE,
        result: Rows::ONE,
    }
}

fn ranks(ids: &[u32]) -> Vec<Rank> {
    ids.iter().map(|&r| Rank(r)).collect()
}

/// Numbers that a rank brings, each exact in its type.
fn numbers(dtype: DType, rank: Rank, elements: usize) -> Vec<u8> {
    let number = |i: usize| {
        let mixed = (i as u64 + 1).wrapping_mul(0x9e37_79b9 + 77 * u64::from(rank.0));
        (mixed >> 7) % 509
    };
    if dtype == DType::I32 {
        let values = (0..elements).map(|i| number(i) as i32 - 100);
        return values.flat_map(i32::to_le_bytes).collect();
    }
    let values: Vec<f32> = (0..elements)
        .map(|i| number(i) as f32 / 64.0 - 3.0)
        .collect();
    stored(dtype, &values)
}

fn stored(dtype: DType, values: &[f32]) -> Vec<u8> {
    // Storage of numbers is aligned.
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

fn reduced(kind: Reduction, terms: impl Iterator<Item = f32>) -> f32 {
    let all = match kind {
        Reduction::Sum => terms.reduce(|a, b| a + b),
        Reduction::Max => terms.reduce(f32::max),
        Reduction::Min => terms.reduce(f32::min),
    };
    all.unwrap_or(0.0)
}

/// A case: the layout of operand and result as rows of pieces, `part` elements of a piece in each.
#[derive(Clone, Copy, Debug)]
struct Shape {
    rows: usize,
    part: usize,
}

/// Where element `i` of piece `j` of `n` stands.
fn stands(of: Shape, n: usize, j: usize, i: usize) -> usize {
    let row = i / of.part.max(1);
    (row * n + j) * of.part + i % of.part.max(1)
}

/// Member `me`'s result, in elements of the members' operands: for each element of the result
/// which elements of which members are reduced.
fn sources(
    kind: CollectiveKind,
    (n, me): (usize, usize),
    [operand, result]: [Shape; 2],
) -> Vec<Vec<(usize, usize)>> {
    let piece = operand.rows * operand.part;
    match kind {
        AllReduce(_) => (0..piece)
            .map(|i| (0..n).map(|j| (j, i)).collect())
            .collect(),
        ReduceScatter(_) => (0..piece)
            .map(|i| (0..n).map(|j| (j, stands(operand, n, me, i))).collect())
            .collect(),
        Shift => (0..piece).map(|i| vec![((me + n - 1) % n, i)]).collect(),
        AllGather | AllToAll => {
            let mut out = vec![Vec::new(); n * piece];
            for j in 0..n {
                for i in 0..piece {
                    let from = match kind {
                        AllGather => i,
                        _ => stands(operand, n, me, i),
                    };
                    out[stands(result, n, j, i)] = vec![(j, from)];
                }
            }
            out
        }
    }
}

fn every_collective_of_every_type_and_size<D: Device, F: Fabric<D>>(open: Open<'_, D, F>) {
    let groups = [
        vec![0],
        vec![0, 1],
        vec![3, 1],
        vec![2, 0, 1],
        vec![0, 1, 2, 3, 4],
    ];
    let reductions = [Reduction::Sum, Reduction::Max, Reduction::Min];
    let mut kinds = vec![AllGather, AllToAll, Shift];
    kinds.extend(reductions.map(AllReduce));
    kinds.extend(reductions.map(ReduceScatter));
    let shape = |rows, part| Shape { rows, part };
    let shapes = [
        [shape(1, 0), shape(1, 0)],
        [shape(1, 1), shape(1, 1)],
        [shape(3, 5), shape(5, 3)],
        [shape(2, 4), shape(1, 8)],
        // More than fabrics send in one go.
        [shape(1, 30_001), shape(1, 30_001)],
    ];
    let world = open(5, 4 * MIB, PATIENCE);
    on_ranks(world, |mut member| {
        for group in &groups {
            let group = ranks(group);
            let Some(me) = group.iter().position(|&r| r == member.rank()) else {
                continue;
            };
            for &kind in &kinds {
                for dtype in [DType::F32, DType::Bf16, DType::F16, DType::I32] {
                    let reduce = match kind {
                        AllReduce(reduce) | ReduceScatter(reduce) => Some(reduce),
                        _ => None,
                    };
                    if dtype == DType::I32 && reduce.is_some() {
                        continue;
                    }
                    for shapes in shapes {
                        one_collective(&mut member, &group, me, (kind, reduce), dtype, shapes);
                    }
                }
            }
        }
    });
}

/// One collective, on a member of the group.
fn one_collective<D: Device, F: Fabric<D>>(
    member: &mut Member<D, F>,
    group: &[Rank],
    me: usize,
    (kind, reduce): (CollectiveKind, Option<Reduction>),
    dtype: DType,
    shapes: [Shape; 2],
) {
    let (n, size) = (group.len(), dtype.bytes() as usize);
    let piece = shapes[0].rows * shapes[0].part;
    let rows = |of: Shape| Rows { rows: of.rows, n };
    let (elements, operand, result) = match kind {
        AllReduce(_) | Shift => (piece, Rows::ONE, Rows::ONE),
        ReduceScatter(_) => (n * piece, rows(shapes[0]), Rows::ONE),
        AllGather => (piece, Rows::ONE, rows(shapes[1])),
        AllToAll => (n * piece, rows(shapes[0]), rows(shapes[1])),
    };
    let item = Item {
        dtype,
        elements,
        operand,
        result,
    };
    let operands: Vec<Vec<u8>> = group.iter().map(|&r| numbers(dtype, r, elements)).collect();
    let sources = sources(kind, (n, me), shapes);
    let what = format!("{} over {group:?}, {shapes:?}", kind.name());
    let of = collective(member.fabric.order(), kind, group, vec![item]);
    let contract = of.contract;
    let got = member
        .collect(of, &operands[me], sources.len() * size)
        .unwrap_or_else(|e| panic!("{what}: {e}"));
    let Some(reduce) = reduce else {
        for (i, from) in sources.iter().enumerate() {
            let (j, at) = from[0];
            let expected = &operands[j][at * size..(at + 1) * size];
            assert_eq!(
                &got[i * size..(i + 1) * size],
                expected,
                "{what}: element {i}"
            );
        }
        return;
    };
    let values: Vec<Vec<f32>> = operands.iter().map(|o| loaded(dtype, o)).collect();
    let expected: Vec<f32> = sources
        .iter()
        .map(|from| {
            let terms = from.iter().map(|&(j, at)| values[j][at]);
            reduced(reduce, terms)
        })
        .collect();
    match contract.sum.map(|s| s.order) {
        Some(Order::Fixed) | None => assert_eq!(got, stored(dtype, &expected), "{what}"),
        Some(Order::Library) => {
            let rounding = match dtype {
                DType::F32 => 1e-6,
                _ => 1e-2,
            };
            for (i, (a, b)) in loaded(dtype, &got).iter().zip(&expected).enumerate() {
                let most = rounding * n as f32 * (8.0 + b.abs());
                let is_near = a == b || b.is_finite() && (a - b).abs() <= most;
                assert!(is_near, "{what}: element {i}: {a}, not {b}");
            }
        }
    }
}

fn buffers_go_together_and_in_place<D: Device, F: Fabric<D>>(
    open: Open<'_, D, F>,
    apart: Option<Gather<'_>>,
) {
    let (f32, bf16) = (DType::F32, DType::Bf16);
    let open = (open, apart);
    together(open, &[(f32, 5), (bf16, 3), (f32, 0), (f32, 20_000)]);
    // Around 64 KiB, with gaps between buffers and without: there a fabric may change its way.
    for n in 16_379..16_386 {
        together(open, &[(f32, 1), (f32, n)]);
    }
    together(open, &[(bf16, 1), (f32, 1), (bf16, 3), (f32, 16_380)]);
}

/// Buffers through one sum, in place.
fn together<D: Device, F: Fabric<D>>(
    (open, apart): (Open<'_, D, F>, Option<Gather<'_>>),
    sizes: &[(DType, usize)],
) {
    let group = ranks(&[1, 0, 2]);
    let words = Words::among(&[0, 1, 2], apart);
    on_ranks(open(3, MIB, PATIENCE), |mut member| {
        let mut at = 0;
        let mut places = Vec::new();
        for &(dtype, n) in sizes {
            let bytes = numbers(dtype, member.rank(), n);
            places.push(place(at, bytes.len()));
            member.set(place(at, bytes.len()), &bytes);
            at = (at + bytes.len()).next_multiple_of(8);
        }
        let items = sizes.iter().map(|&(dtype, n)| whole(dtype, n)).collect();
        let order = member.fabric.order();
        let of = collective(order, AllReduce(Reduction::Sum), &group, items);
        let both = Places {
            inputs: places.clone(),
            outputs: places.clone(),
        };
        member
            .call(named(CallKind::Collective(of)), both)
            .expect("it sums");
        let sums: Vec<Vec<u8>> = places.iter().map(|&at| member.get(at)).collect();
        let hash = blake3::hash(&sums.concat()).to_hex().to_string();
        let hashes = words.gather(member.rank(), hash);
        assert!(
            hashes.iter().all(|h| *h == hashes[0]),
            "members have other sums of {sizes:?}"
        );
        for (&(dtype, n), result) in sizes.iter().zip(&sums) {
            are_sums_of(&group, (dtype, n), order, result);
        }
    });
}

/// Whether these are the sums of what the members of a group bring.
fn are_sums_of(group: &[Rank], (dtype, n): (DType, usize), order: Order, result: &[u8]) {
    let term = |&r: &Rank| loaded(dtype, &numbers(dtype, r, n));
    let terms: Vec<Vec<f32>> = group.iter().map(term).collect();
    if order == Order::Fixed {
        let sum = |i| reduced(Reduction::Sum, terms.iter().map(|t| t[i]));
        let sums: Vec<f32> = (0..n).map(sum).collect();
        return assert_eq!(result, stored(dtype, &sums), "{n} {dtype:?}");
    }
    let tolerance = if dtype == DType::F32 { 1e-4 } else { 1e-2 };
    for (i, &sum) in loaded(dtype, result).iter().enumerate() {
        let expected: f32 = terms.iter().map(|t| t[i]).sum();
        assert!(
            (sum - expected).abs() <= tolerance * expected.abs().max(1.0),
            "{sum} is not {expected}, element {i} of {n} {dtype:?}"
        );
    }
}

fn groups_meet_at_the_same_time<D: Device, F: Fabric<D>>(open: Open<'_, D, F>) {
    on_ranks(open(4, MIB, PATIENCE), |mut member| {
        let me = member.rank();
        let group = ranks(if me.0 % 2 == 0 { &[2, 0] } else { &[1, 3] });
        for round in 0..50u8 {
            // The groups do different things, and a different number of them.
            for _ in 0..=me.0 % 2 {
                let mut item = whole(DType::I32, 1);
                item.result = Rows { rows: 1, n: 2 };
                let mine = [me.0 as u8, round, 0, 0];
                let of = collective(member.fabric.order(), AllGather, &group, vec![item]);
                let all = member.collect(of, &mine, 8).expect("it gathers");
                let expected: Vec<u8> = group
                    .iter()
                    .flat_map(|r| [r.0 as u8, round, 0, 0])
                    .collect();
                assert_eq!(all, expected, "round {round} of {me}");
            }
        }
        let all = ranks(&[0, 1, 2, 3]);
        let (order, kind) = (member.fabric.order(), AllReduce(Reduction::Max));
        let of = collective(order, kind, &all, vec![whole(DType::F32, 1)]);
        let most = member.collect(of, &(me.0 as f32).to_le_bytes(), 4);
        assert_eq!(most.expect("all meet"), 3f32.to_le_bytes());
    });
}

fn communicators_of_one_group_meet_in_any_order<D: Device, F: Fabric<D>>(open: Open<'_, D, F>) {
    let group = ranks(&[0, 1]);
    on_ranks(open(2, MIB, PATIENCE), |mut member| {
        let me = member.rank().0;
        // Rank 1 comes to the second communicator first, and waits for neither.
        let numbers = if me == 0 { [7, 8] } else { [8, 7] };
        let mut open = Vec::new();
        for number in numbers {
            let at = place(8 * number as usize, 4);
            member.set(at, &(number as f32).to_le_bytes());
            let mut of = collective(
                member.fabric.order(),
                AllReduce(Reduction::Sum),
                &group,
                vec![whole(DType::F32, 1)],
            );
            of.number = number;
            let places = Places {
                inputs: vec![at],
                outputs: vec![at],
            };
            // A stream is in order, so each has its own.
            let call = Arc::new(named(CallKind::Collective(of)));
            let (device, stream) = (&mut member.device, StreamId(number));
            let ticket = member.fabric.begin(device, stream, &call, places);
            open.push(ticket.expect("it begins"));
        }
        let began = Instant::now();
        while !open.is_empty() {
            assert!(began.elapsed() < PATIENCE, "two communicators do not meet");
            open.retain_mut(|ticket| {
                let over = member.fabric.poll(&mut member.device, ticket);
                over.expect("it goes on").is_none()
            });
            member.fabric.rest(Duration::from_millis(1));
        }
        // To read before both have begun everywhere would be to wait for what nobody can begin.
        for number in numbers {
            let at = place(8 * number as usize, 4);
            let got = member.device.read(StreamId(number), at);
            let sum = 2.0 * number as f32;
            assert_eq!(got.expect("it is read")[..], sum.to_le_bytes());
        }
    });
}

/// A matrix of `rows` by 5, of which a rank has all columns and rows from `start`.
fn matrix(dtype: DType, rows: u64, start: u64, valid: u64, padded: u64) -> Local {
    let range = |start, valid, padded| LocalRange {
        start,
        valid,
        padded,
    };
    Local {
        dtype,
        lens: vec![rows, 5],
        ranges: vec![range(start, valid, padded), range(0, 5, 5)],
    }
}

fn tile(from: u32, to: u32, row: u64, rows: u64) -> Tile {
    Tile {
        from: Rank(from),
        to: Rank(to),
        start: vec![row, 0],
        len: vec![rows, 5],
    }
}

fn exchanges_bring_blocks_to_their_places<D: Device, F: Fabric<D>>(open: Open<'_, D, F>) {
    // Rank 0 has seven rows. Rank 1 wants rows 0 to 2, rank 2 rows 3 to 6, each of four; both
    // send a row back in the same exchange.
    for dtype in [DType::F32, DType::Bf16, DType::I32] {
        let size = 5 * dtype.bytes() as usize;
        let full = numbers(dtype, Rank(9), 7 * 5);
        let back = |to: u32| numbers(dtype, Rank(to), 5);
        on_ranks(open(3, MIB, PATIENCE), |mut member| {
            let me = member.rank().0;
            let moved = |transfer, local, tiles| Moved {
                transfer,
                local,
                tiles,
            };
            let (exchange, places) = if me == 0 {
                member.set(place(0, 7 * size), &full);
                let there = vec![tile(0, 1, 0, 3), tile(0, 2, 3, 4)];
                let receive =
                    |from: u32| moved(from, matrix(dtype, 1, 0, 1, 1), vec![tile(from, 0, 0, 1)]);
                let at = |from: usize| place(512 * from, size);
                let exchange = Exchange {
                    sends: vec![moved(0, matrix(dtype, 7, 0, 7, 7), there)],
                    receives: vec![receive(1), receive(2)],
                };
                (exchange, [vec![place(0, 7 * size)], vec![at(1), at(2)]])
            } else {
                let rows = [(0, 3), (3, 4)][me as usize - 1];
                member.set(place(0, 4 * size), &vec![0xa5; 4 * size]);
                member.set(place(512, size), &back(me));
                let arrives = matrix(dtype, 7, rows.0, rows.1, 4);
                let exchange = Exchange {
                    sends: vec![moved(
                        me,
                        matrix(dtype, 1, 0, 1, 1),
                        vec![tile(me, 0, 0, 1)],
                    )],
                    receives: vec![moved(0, arrives, vec![tile(0, me, rows.0, rows.1)])],
                };
                (exchange, [vec![place(512, size)], vec![place(0, 4 * size)]])
            };
            let [inputs, outputs] = places;
            let places = Places { inputs, outputs };
            member
                .call(named(CallKind::Exchange(exchange)), places)
                .expect("it exchanges");
            match me {
                0 => {
                    for from in [1, 2] {
                        let got = member.get(place(512 * from as usize, size));
                        assert_eq!(got, back(from), "what rank {from} sent back");
                    }
                }
                1 => {
                    let got = member.get(place(0, 4 * size));
                    assert_eq!(got[..3 * size], full[..3 * size]);
                    assert!(
                        got[3 * size..].iter().all(|b| *b == 0),
                        "no block, no zeros"
                    );
                }
                _ => assert_eq!(member.get(place(0, 4 * size)), full[3 * size..]),
            }
            let nothing = Exchange {
                sends: Vec::new(),
                receives: Vec::new(),
            };
            let done = member.call(named(CallKind::Exchange(nothing)), Places::default());
            done.expect("nothing is exchanged");
        });
    }
}

/// An exchange of one row from rank 0 to rank 1.
fn one_row() -> Exchange {
    let moved = Moved {
        transfer: 4,
        local: matrix(DType::F32, 1, 0, 1, 1),
        tiles: vec![tile(0, 1, 0, 1)],
    };
    Exchange {
        sends: vec![moved.clone()],
        receives: vec![moved],
    }
}

/// One rank's side of it.
fn side(rank: Rank) -> (Call, Places) {
    let (mut exchange, mut places) = (one_row(), Places::default());
    if rank == Rank(0) {
        exchange.receives.clear();
        places.inputs.push(place(0, 20));
    } else {
        exchange.sends.clear();
        places.outputs.push(place(0, 20));
    }
    (named(CallKind::Exchange(exchange)), places)
}

fn messages_keep_their_order<D: Device, F: Fabric<D>>(open: Open<'_, D, F>) {
    on_ranks(open(2, MIB, PATIENCE), |mut member| {
        let me = member.rank();
        for round in 0..40 {
            if me == Rank(0) {
                member.set(place(0, 20), &numbers(DType::F32, Rank(round), 5));
            }
            let (call, places) = side(me);
            member.call(call, places).expect("a row goes over");
            let got = member.get(place(0, 20));
            assert_eq!(got, numbers(DType::F32, Rank(round), 5), "round {round}");
        }
    });
}

fn a_send_is_over_when_its_receiver_has_begun<D: Device, F: Fabric<D>>(
    open: Open<'_, D, F>,
    apart: Option<Gather<'_>>,
) {
    let polled = Words::among(&[0, 1], apart);
    on_ranks(open(2, MIB, PATIENCE), |mut member| {
        let (call, places) = side(member.rank());
        if member.rank() == Rank(1) {
            polled.wait(Rank(1));
            member.call(call, places).expect("a row comes");
            return;
        }
        let mut ticket = member.begin(call, places).expect("a row goes");
        for _ in 0..20 {
            let over = member.fabric.poll(&mut member.device, &mut ticket);
            assert_eq!(over.expect("it waits"), None, "nobody has received");
            member.fabric.rest(Duration::from_millis(1));
        }
        polled.wait(Rank(0));
        let over = member.fabric.wait(&mut member.device, ticket);
        over.expect("the row was received");
    });
}

fn barriers_hold_all_back<D: Device, F: Fabric<D>>(
    open: Open<'_, D, F>,
    apart: Option<Gather<'_>>,
) {
    let words = Words::among(&[0, 1, 2, 3], apart);
    on_ranks(open(4, MIB, PATIENCE), |mut member| {
        let group = ranks(&[0, 1, 2, 3]);
        // When it came to each barrier, and when it went on.
        let mut times = Vec::new();
        for _ in 0..10 {
            let came = SystemTime::now();
            let done = member.fabric.barrier(&mut member.device, &group);
            done.expect("all come");
            times.push([came, SystemTime::now()].map(since_1970));
        }
        let said = times.iter().map(|[came, went]| format!("{came} {went}"));
        let said = said.collect::<Vec<_>>().join("\n");
        let all = words.gather(member.rank(), said);
        for (round, [_, went]) in times.iter().enumerate() {
            let came = |of: &String| -> u128 {
                let round = of.lines().nth(round).and_then(|l| l.split(' ').next());
                round.expect("a time").parse().expect("a number")
            };
            let last = all.iter().map(came).max();
            assert!(last <= Some(*went), "not all had come to barrier {round}");
        }
        let sum = Call::world_sum(group, 3);
        let at = place(0, 12);
        member.set(at, &stored(DType::F32, &[1.0, 2.0, member.rank().0 as f32]));
        let places = Places {
            inputs: vec![at],
            outputs: vec![at],
        };
        member.call(sum, places).expect("the world sums");
        assert_eq!(member.get(at), stored(DType::F32, &[4.0, 8.0, 6.0]));
    });
}

/// Nanoseconds, on the clock that processes of a host share.
fn since_1970(at: SystemTime) -> u128 {
    let since = at.duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |t| t.as_nanos())
}

fn other_calls_are_told<D: Device, F: Fabric<D>>(open: Open<'_, D, F>, apart: Option<Gather<'_>>) {
    let sum = AllReduce(Reduction::Sum);
    let one = || vec![whole(DType::F32, 4)];
    let cases = [
        (Order::Library, AllReduce(Reduction::Max), one()),
        (Order::Library, AllGather, one()),
        (Order::Library, sum, vec![whole(DType::F32, 3)]),
        (Order::Library, sum, vec![whole(DType::Bf16, 4)]),
        (Order::Library, sum, vec![whole(DType::F32, 4); 2]),
        // The same but for the contract.
        (Order::Fixed, sum, one()),
    ];
    for (order, kind, items) in cases {
        let words = Words::among(&[0, 1], apart);
        on_ranks(open(2, MIB, PATIENCE), |mut member| {
            let (order, kind, items) = match member.rank() {
                Rank(0) => (Order::Library, sum, one()),
                _ => (order, kind, items.clone()),
            };
            let at = |(i, item): (usize, &Item)| {
                place(64 * i, item.elements * item.dtype.bytes() as usize)
            };
            let places: Vec<Place> = items.iter().enumerate().map(at).collect();
            let of = collective(order, kind, &ranks(&[0, 1]), items);
            let places = Places {
                inputs: places.clone(),
                outputs: places,
            };
            let error = member.call(named(CallKind::Collective(of)), places);
            let error = error.expect_err("the calls do not fit").to_string();
            // As a rank does, so that the other one goes on.
            member.fabric.abort(&error);
            let errors = words.gather(member.rank(), error);
            let told = errors.iter().find(|e| e.contains("brought"));
            let told = told.unwrap_or_else(|| panic!("nobody says what does not fit: {errors:?}"));
            assert!(
                told.contains("all_reduce of 4 f32 in f32 library"),
                "{told}"
            );
        });
    }
}

fn a_rank_outside_of_the_group_is_told<D: Device, F: Fabric<D>>(open: Open<'_, D, F>) {
    on_ranks(open(3, MIB, PATIENCE), |mut member| {
        if member.rank() == Rank(2) {
            let done = member.fabric.barrier(&mut member.device, &ranks(&[0, 1]));
            let error = done.expect_err("it is not in the group");
            assert!(error.to_string().contains("not in the group"), "{error}");
        }
    });
}

fn the_watchdog_names_who_is_missing<D: Device, F: Fabric<D>>(
    open: Open<'_, D, F>,
    apart: Option<Gather<'_>>,
) {
    let over = Words::among(&[0, 1, 2], apart);
    on_ranks(open(3, MIB, IMPATIENCE), |mut member| {
        assert_eq!(member.fabric.timeout(), IMPATIENCE);
        if member.rank() != Rank(1) {
            let all = ranks(&[0, 1, 2]);
            let done = member.fabric.barrier(&mut member.device, &all);
            let error = done.expect_err("rank 1 does not come");
            assert!(
                matches!(&error, RuntimeError::Watchdog { waiting_for, .. } if *waiting_for == [Rank(1)]),
                "{error}"
            );
            assert!(error.to_string().contains("barrier"), "{error}");
        }
        over.wait(member.rank());
    });
    let over = Words::among(&[0, 1], apart);
    on_ranks(open(2, MIB, IMPATIENCE), |mut member| {
        // Rank 0 sends to a rank that does not receive.
        if member.rank() == Rank(0) {
            let (call, places) = side(Rank(0));
            let error = member.call(call, places).expect_err("nobody receives");
            assert!(
                matches!(&error, RuntimeError::Watchdog { waiting_for, .. } if *waiting_for == [Rank(1)]),
                "{error}"
            );
        }
        over.wait(member.rank());
    });
}

fn a_failure_ends_all_waiting<D: Device, F: Fabric<D>>(
    open: Open<'_, D, F>,
    apart: Option<Gather<'_>>,
) {
    let began = Instant::now();
    let over = Words::among(&[0, 1, 2], apart);
    on_ranks(open(3, MIB, PATIENCE), |mut member| {
        let all = ranks(&[0, 1, 2]);
        if member.rank() == Rank(2) {
            member.fabric.abort("out of luck");
            member.fabric.abort("and once more");
        } else {
            // What begins later fails as well.
            for _ in 0..2 {
                let done = member.fabric.barrier(&mut member.device, &all);
                let error = done.expect_err("the world has ended");
                assert!(
                    matches!(&error, RuntimeError::Aborted { by: Rank(2), reason, .. } if reason == "out of luck"),
                    "{error}"
                );
                assert!(error.is_consequence());
            }
        }
        over.wait(member.rank());
    });
    assert!(began.elapsed() < PATIENCE, "the watchdog ended it");
}

fn a_rank_that_dies_is_named<D: Device, F: Fabric<D>>(
    open: Open<'_, D, F>,
    apart: Option<Gather<'_>>,
) {
    let began = Instant::now();
    let over = Words::among(&[0, 2], apart);
    on_ranks(open(3, MIB, PATIENCE), |mut member| {
        if member.rank() == Rank(1) {
            return;
        }
        let done = member
            .fabric
            .barrier(&mut member.device, &ranks(&[0, 1, 2]));
        let error = done.expect_err("rank 1 is gone");
        assert!(
            matches!(error, RuntimeError::Aborted { by: Rank(1), .. }),
            "{error}"
        );
        over.wait(member.rank());
    });
    assert!(began.elapsed() < PATIENCE, "the watchdog ended it");
}
