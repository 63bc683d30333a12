//! A simulator of every single rank, for checking the one that plays a rank per role.
//!
//! Written from the semantics of `ir::program` alone: each rank goes through its own trace,
//! instruction by instruction, and stops where it must know what another rank has not yet said.
//! Collectives meet the members of the rank's own group and take what that group takes;
//! exchanges meet the very ranks that blocks come from or go to, and take what the blocks'
//! transfers take; a rank without blocks has nothing to wait for. Nothing is folded, and no
//! rank stands for another.

use cost_model::costs::{Wire, costs_of_rank, together, wires};
use ir::cluster::Cluster;
use ir::program::{Event, InstrKind, Instruction, Program, RoleProgram, Slot, TemplateKind, Which};
use ir::reshard::{Placement, tiles_to};
use ir::{InstrId, LogicalMesh, Rank, StreamId, TransferId};
use std::collections::{BTreeMap, BTreeSet};

/// The result of playing all ranks.
pub struct AllRanks {
    /// End of the last rank, seconds.
    pub step_s: f64,
    /// By rank: the highest byte of the arena that it touches.
    pub touched_bytes: BTreeMap<Rank, u64>,
}

/// Picoseconds, as in the simulator, so that sums are exact.
type Pico = u64;

const SEND: usize = 0;
const RECV: usize = 1;

/// Plays one step of `program` on devices whose streams run side by side.
///
/// # Panics
/// When the program deadlocks, or the cluster is of ranks that share processors.
pub fn play(program: &Program, cluster: &Cluster) -> AllRanks {
    assert!(cluster.pool.is_none());
    let peers = Peers::of(program);
    let wires = wires(program, cluster).expect("the program is priced");
    let mut board = Board::default();
    let mut ranks: Vec<Player<'_>> = program
        .roles
        .iter()
        .flat_map(|role| role.mesh.ranks().map(move |rank| (role, rank)))
        .map(|(role, rank)| Player::new(program, cluster, role, rank, &peers, &wires))
        .collect();
    board.n_ranks = ranks.len();
    let mut n_done = 0;
    while n_done < ranks.len() {
        let before: usize = ranks.iter().map(|r| r.n_steps).sum();
        n_done = ranks.iter_mut().filter_map(|r| r.go_on(&mut board)).count();
        let after: usize = ranks.iter().map(|r| r.n_steps).sum();
        assert!(after > before || n_done == ranks.len(), "a deadlock");
    }
    AllRanks {
        step_s: ranks.iter().map(|r| r.latest).max().unwrap_or(0) as f64 * 1e-12,
        touched_bytes: ranks.iter().map(|r| (r.rank, r.touched)).collect(),
    }
}

/// Who sends to whom, or receives from whom.
type Partners = BTreeMap<Rank, BTreeSet<Rank>>;

/// By transfer and side, a rank's partners.
struct Peers(Vec<[Partners; 2]>);

impl Peers {
    fn of(program: &Program) -> Peers {
        let mesh = |stage: ir::StageId| -> &LogicalMesh { &program.roles[stage.index()].mesh };
        let of_transfer = |t: &ir::program::Transfer| {
            let (from, to) = (mesh(t.from), mesh(t.to));
            let mut sides = [Partners::new(), Partners::new()];
            for rank in to.ranks() {
                let coords = to.coords(rank).expect("a rank of the mesh");
                let (source, target) = (
                    Placement {
                        mesh: from,
                        spec: &t.from_spec,
                    },
                    Placement {
                        mesh: to,
                        spec: &t.to_spec,
                    },
                );
                for tile in tiles_to(&t.lens, source, target, &coords) {
                    let mut meet = |side: usize, one: Rank, other: Rank| {
                        sides[side].entry(one).or_default().insert(other);
                    };
                    meet(SEND, tile.from, tile.to);
                    meet(RECV, tile.to, tile.from);
                }
            }
            sides
        };
        Peers(program.transfers.iter().map(of_transfer).collect())
    }
}

/// The messages of ranks to each other.
#[derive(Default)]
struct Board {
    n_ranks: usize,
    /// By instruction of the trace and the group's first rank: members so far, and the latest
    /// time at which one was ready.
    collectives: BTreeMap<(usize, usize, Rank), (usize, Pico)>,
    /// By number: ranks so far, and the latest.
    world_sums: BTreeMap<usize, (usize, Pico)>,
    /// By transfer, side, rank and number: when the exchange started.
    starts: BTreeMap<(TransferId, usize, Rank, u32), Pico>,
}

/// An exchange that has started.
struct Exchange {
    start: Pico,
    parts: Vec<Part>,
}

/// The part of an exchange that goes to, or comes from, one stage: transfers with their numbers.
struct Part {
    side: usize,
    transfers: Vec<(TransferId, u32)>,
    duration: Pico,
}

/// A template in the middle.
struct Partial {
    ends: Vec<Pico>,
    /// Whether the instruction at the end of `ends` has said that it is ready.
    said: bool,
}

struct Player<'a> {
    program: &'a Program,
    role: &'a RoleProgram,
    rank: Rank,
    peers: &'a Peers,
    wires: &'a [Wire],
    /// By template and instruction.
    durations: Vec<Vec<Pico>>,
    slot: usize,
    partial: Option<Partial>,
    n_world_sums: usize,
    /// By stream but that of transfers, the end of its last instruction; those of earlier slots
    /// in `before`.
    stream_ends: BTreeMap<StreamId, Pico>,
    before: BTreeMap<StreamId, Pico>,
    latest: Pico,
    touched: u64,
    exchanges: Vec<Exchange>,
    /// Next instruction of the exchange template at `slot`.
    next_exchange: usize,
    numbers: BTreeMap<(TransferId, usize), u32>,
    /// By slot and instruction: its end, or the exchange that it was.
    done: BTreeMap<(usize, InstrId), Result<Pico, usize>>,
    /// Things done; grows as long as the rank gets on.
    n_steps: usize,
}

impl<'a> Player<'a> {
    fn new(
        program: &'a Program,
        cluster: &Cluster,
        role: &'a RoleProgram,
        rank: Rank,
        peers: &'a Peers,
        wires: &'a [Wire],
    ) -> Self {
        let costs = costs_of_rank(program, cluster, role, rank).expect("the program is priced");
        let pico = |seconds: f64| (seconds * 1e12).round() as Pico;
        Player {
            program,
            role,
            rank,
            peers,
            wires,
            durations: costs
                .iter()
                .map(|t| t.iter().map(|c| pico(c.seconds)).collect())
                .collect(),
            slot: 0,
            partial: None,
            n_world_sums: 0,
            stream_ends: BTreeMap::new(),
            before: BTreeMap::new(),
            latest: 0,
            touched: 0,
            exchanges: Vec::new(),
            next_exchange: 0,
            numbers: BTreeMap::new(),
            done: BTreeMap::new(),
            n_steps: 0,
        }
    }

    /// As far as it goes; something once all is over, exchanges included.
    fn go_on(&mut self, board: &mut Board) -> Option<()> {
        while let Some(slot) = self.role.trace.get(self.slot) {
            let template = self.role.template(slot.template);
            let microbatch = slot.microbatch;
            if template.kind == TemplateKind::Exchange {
                while let Some(i) = template.instructions.get(self.next_exchange) {
                    self.start_exchange(i, microbatch, board)?;
                    self.next_exchange += 1;
                    self.n_steps += 1;
                }
                self.next_exchange = 0;
            } else {
                self.play_template(slot.template.index(), microbatch, board)?;
            }
            self.before.clone_from(&self.stream_ends);
            self.slot += 1;
            self.n_steps += 1;
        }
        for e in 0..self.exchanges.len() {
            self.latest = self.latest.max(self.end_of(e, board)?);
        }
        let ends = self.stream_ends.values().copied();
        self.latest = ends.fold(self.latest, Pico::max);
        Some(())
    }

    fn play_template(
        &mut self,
        t: usize,
        microbatch: Option<u32>,
        board: &mut Board,
    ) -> Option<()> {
        let role = self.role;
        let instructions = &role.templates[t].instructions;
        let mut partial = self.partial.take().unwrap_or(Partial {
            ends: Vec::new(),
            said: false,
        });
        while let Some(instruction) = instructions.get(partial.ends.len()) {
            let Some(end) = self.instruction(t, instruction, microbatch, &mut partial, board)
            else {
                self.partial = Some(partial);
                return None;
            };
            self.stream_ends.insert(instruction.stream, end);
            let id = InstrId::new(partial.ends.len());
            self.done.insert((self.slot, id), Ok(end));
            partial.ends.push(end);
            partial.said = false;
            self.n_steps += 1;
        }
        Some(())
    }

    /// End of an instruction, or nothing if it must wait.
    fn instruction(
        &mut self,
        t: usize,
        instruction: &Instruction,
        microbatch: Option<u32>,
        partial: &mut Partial,
        board: &mut Board,
    ) -> Option<Pico> {
        let i = partial.ends.len();
        let duration = self.durations[t][i];
        let free = self.stream_ends.get(&instruction.stream).copied();
        let deps = instruction.deps.iter().map(|d| partial.ends[d.index()]);
        let mut start = deps.fold(free.unwrap_or(0), Pico::max);
        start = start.max(self.earlier(instruction, microbatch, board)?);
        self.touch(instruction, microbatch);
        start = match &instruction.kind {
            InstrKind::Collective { axes, .. } => {
                let group = self.role.mesh.group(self.rank, axes)?;
                let first = *group.iter().min()?;
                let met = board.collectives.entry((self.slot, i, first)).or_default();
                meet(met, start, group.len(), &mut partial.said)?
            }
            InstrKind::WorldSum { .. } => {
                let n_ranks = board.n_ranks;
                let met = board.world_sums.entry(self.n_world_sums).or_default();
                let start = meet(met, start, n_ranks, &mut partial.said)?;
                self.n_world_sums += 1;
                start
            }
            _ => start,
        };
        Some(start + duration)
    }

    /// When what an instruction waits for in earlier slots is over.
    fn earlier(
        &self,
        instruction: &Instruction,
        microbatch: Option<u32>,
        board: &Board,
    ) -> Option<Pico> {
        let mut time = 0;
        for event in &instruction.events {
            let end = match event {
                Event::Drained(stream) => self.before.get(stream).copied().unwrap_or(0),
                Event::Done {
                    template,
                    instruction,
                    which,
                } => {
                    let before = &self.role.trace[..self.slot];
                    let wanted = |s: &&Slot| match which {
                        Which::Latest => true,
                        Which::Back(n) => {
                            let m = microbatch.and_then(|m| m.checked_sub(*n));
                            m.is_some() && s.microbatch == m
                        }
                    };
                    let plays = before.iter().enumerate();
                    let slot = plays
                        .filter(|(_, s)| s.template == *template && wanted(s))
                        .map(|(i, _)| i)
                        .next_back();
                    match slot.map(|slot| self.done[&(slot, *instruction)]) {
                        None => 0,
                        Some(Ok(end)) => end,
                        Some(Err(exchange)) => self.end_of(exchange, board)?,
                    }
                }
            };
            time = time.max(end);
        }
        Some(time)
    }

    fn start_exchange(
        &mut self,
        instruction: &Instruction,
        microbatch: Option<u32>,
        board: &mut Board,
    ) -> Option<()> {
        let InstrKind::Exchange { sends, recvs } = &instruction.kind else {
            panic!("exchange templates hold exchanges");
        };
        // The stream is first in, first out.
        let mut start = match self.exchanges.len() {
            0 => 0,
            n => self.end_of(n - 1, board)?,
        };
        start = start.max(self.earlier(instruction, microbatch, board)?);
        self.touch(instruction, microbatch);
        let id = InstrId::new(self.next_exchange);
        self.done.insert((self.slot, id), Err(self.exchanges.len()));
        let mut parts: BTreeMap<_, Vec<(TransferId, u32)>> = BTreeMap::new();
        for (side, (transfer, _)) in sends
            .iter()
            .map(|s| (SEND, s))
            .chain(recvs.iter().map(|r| (RECV, r)))
        {
            let number = self.numbers.entry((*transfer, side)).or_default();
            board
                .starts
                .insert((*transfer, side, self.rank, *number), start);
            let moved = &self.program.transfers[transfer.index()];
            let partner = if side == SEND { moved.to } else { moved.from };
            if self.peers.0[transfer.index()][side].contains_key(&self.rank) {
                let part = parts.entry((side, partner)).or_default();
                part.push((*transfer, *number));
            }
            *number += 1;
        }
        let timed = |((side, _), transfers): ((usize, _), Vec<(TransferId, u32)>)| {
            let seconds = together(self.wires, transfers.iter().map(|(t, _)| *t));
            Part {
                side,
                transfers,
                duration: (seconds * 1e12).round() as Pico,
            }
        };
        let parts = parts.into_iter().map(timed).collect();
        self.exchanges.push(Exchange { start, parts });
        Some(())
    }

    /// End of an exchange once all partners have started their side of it.
    fn end_of(&self, e: usize, board: &Board) -> Option<Pico> {
        let exchange = &self.exchanges[e];
        let mut end = exchange.start;
        for part in &exchange.parts {
            let mut start = exchange.start;
            for (transfer, number) in &part.transfers {
                for peer in &self.peers.0[transfer.index()][part.side][&self.rank] {
                    let other = (*transfer, 1 - part.side, *peer, *number);
                    let other = board.starts.get(&other)?;
                    start = start.max(*other);
                }
            }
            end = end.max(start + part.duration);
        }
        Some(end)
    }

    /// Notes that the rank touches the bytes of an instruction's buffers.
    fn touch(&mut self, instruction: &Instruction, microbatch: Option<u32>) {
        for buffer in instruction.reads().into_iter().chain(instruction.writes()) {
            let lies = self.role.buffer(buffer);
            let last = lies.offset_for(microbatch).max(lies.offset) + lies.bytes;
            self.touched = self.touched.max(last);
        }
    }
}

/// Says that one more is ready at `time`, once; when all are, the latest of their times.
fn meet(met: &mut (usize, Pico), time: Pico, of: usize, said: &mut bool) -> Option<Pico> {
    if !*said {
        *met = (met.0 + 1, met.1.max(time));
        *said = true;
    }
    (met.0 == of).then_some(met.1)
}
