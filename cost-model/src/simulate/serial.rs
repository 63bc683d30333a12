//! Playing on ranks that are threads: one instruction after the other, processors shared.
//!
//! A role is always either working or waiting. Work is collectives and exchanges as much as
//! kernels: on threads they are copies made by the ranks themselves. While the working ranks
//! of a pool outnumber its compute devices, all of them slow down in proportion (processor
//! sharing); a role on several pools goes at the pace of its slowest rank. Time advances from
//! one end of work to the next.
//!
//! An exchange starts its work when every partner has reached the matching exchange, a world
//! sum when every role has.

use super::{Played, RolePlay, SimulateOptions, Timeline};
use crate::SimError;
use crate::costs::Costs;
use ir::cluster::Cluster;
use ir::program::{InstrKind, Program, RoleProgram};
use ir::{LogicalMesh, TransferId};

pub(super) fn play(
    program: &Program,
    costs: &Costs,
    cluster: &Cluster,
    options: &SimulateOptions,
) -> Result<Played, SimError> {
    let unfold = !options.fold || options.timeline.is_of_instructions();
    let mut timeline = Timeline::new(program, options);
    let mut players: Vec<Player<'_>> = program
        .roles
        .iter()
        .zip(&costs.instructions)
        .map(|(r, c)| Player::new(r, segments(r, c, unfold), program, cluster))
        .collect();
    let mut meetings = Meetings {
        arrived: vec![[0; 2]; program.transfers.len()],
        world: vec![0; players.len()],
    };
    let mut now = 0.0;
    loop {
        settle(&mut players, &mut meetings, now, &mut timeline);
        let speeds = speeds(&players, cluster);
        let next = players
            .iter()
            .zip(&speeds)
            .filter_map(|(p, s)| Some(p.left()? / s))
            .fold(f64::INFINITY, f64::min);
        if players.iter().all(|p| p.state == State::Over) {
            break;
        }
        if next == f64::INFINITY {
            return Err(SimError::Deadlock {
                waiting: players
                    .iter()
                    .filter(|p| p.state != State::Over)
                    .map(Player::waiting)
                    .collect(),
            });
        }
        now += next;
        for (player, speed) in players.iter_mut().zip(&speeds) {
            player.work(next, *speed);
        }
    }
    let roles = players.into_iter().map(|p| p.play).collect();
    Ok(Played {
        end_s: now,
        roles,
        events: timeline.events,
        spans: timeline.spans,
    })
}

/// Lets every role begin what it can and end what it has done, until all work or wait.
fn settle(
    players: &mut [Player<'_>],
    meetings: &mut Meetings,
    now: f64,
    timeline: &mut Timeline<'_>,
) {
    loop {
        let mut changed = false;
        for (i, player) in players.iter_mut().enumerate() {
            changed |= player.settle(i, meetings, now, timeline);
        }
        if !changed {
            return;
        }
    }
}

/// Speed of every role: 1 when each of its working ranks has a compute device of its own.
fn speeds(players: &[Player<'_>], cluster: &Cluster) -> Vec<f64> {
    let Some(pool) = cluster.pool else {
        return vec![1.0; players.len()];
    };
    let n_pools = (cluster.n_devices() / pool.devices.max(1)) as usize + 1;
    let mut working = vec![0.0; n_pools];
    for &(p, n) in players
        .iter()
        .filter(|p| p.left().is_some())
        .flat_map(|p| &p.pools)
    {
        working[p] += f64::from(n);
    }
    let share = |load: f64| {
        if load > pool.compute_devices {
            pool.compute_devices / load
        } else {
            1.0
        }
    };
    players
        .iter()
        .map(|p| {
            p.pools
                .iter()
                .map(|&(p, _)| share(working[p]))
                .fold(1.0, f64::min)
        })
        .collect()
}

/// How often exchanges and world sums have been reached.
struct Meetings {
    /// By transfer: sends and receives reached.
    arrived: Vec<[u64; 2]>,
    /// By role: world sums reached.
    world: Vec<u64>,
}

/// A piece of a template that is played at once.
#[derive(Clone, Debug)]
struct Segment {
    /// The instruction, where it is only one.
    instruction: Option<usize>,
    seconds: f64,
    meets: Meets,
}

#[derive(Clone, Debug)]
enum Meets {
    Nobody,
    Partners {
        sends: Vec<TransferId>,
        recvs: Vec<TransferId>,
    },
    World,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    /// The next segment has not been reached.
    Between,
    /// It has, and waits for others.
    Waiting,
    /// It is being worked on; seconds left of it, undisturbed, and when it began.
    Working { left: f64, since: f64 },
    /// The trace is over.
    Over,
}

struct Player<'a> {
    role: &'a RoleProgram,
    segments: Vec<Vec<Segment>>,
    /// Pools that the role's ranks lie in, with their number.
    pools: Vec<(usize, u32)>,
    slot: usize,
    segment: usize,
    state: State,
    /// Meetings of this role so far: by transfer (sends, receives), and world sums.
    met: Vec<[u64; 2]>,
    n_world_sums: u64,
    slot_began: f64,
    play: RolePlay,
}

/// Less work than this counts as none: a thousandth of a picosecond, far below any instruction.
const NOTHING_S: f64 = 1e-15;

impl<'a> Player<'a> {
    fn new(
        role: &'a RoleProgram,
        segments: Vec<Vec<Segment>>,
        program: &Program,
        cluster: &Cluster,
    ) -> Self {
        let n = role.templates.len();
        Player {
            role,
            segments,
            pools: pools(&role.mesh, cluster),
            slot: 0,
            segment: 0,
            state: State::Between,
            met: vec![[0; 2]; program.transfers.len()],
            n_world_sums: 0,
            slot_began: 0.0,
            play: RolePlay {
                count: vec![0; n],
                elapsed_s: vec![0.0; n],
                work_s: vec![0.0; n],
                busy_s: 0.0,
            },
        }
    }

    fn left(&self) -> Option<f64> {
        match self.state {
            State::Working { left, .. } => Some(left),
            _ => None,
        }
    }

    fn work(&mut self, seconds: f64, speed: f64) {
        if let State::Working { left, .. } = &mut self.state {
            *left -= seconds * speed;
            let t = self.role.trace[self.slot].template.index();
            self.play.elapsed_s[t] += seconds;
            self.play.work_s[t] += seconds * speed;
            self.play.busy_s += seconds;
        }
    }

    /// Moves on where nothing need be waited for; true if anything changed.
    fn settle(
        &mut self,
        index: usize,
        meetings: &mut Meetings,
        now: f64,
        timeline: &mut Timeline<'_>,
    ) -> bool {
        let mut changed = false;
        loop {
            let next = match self.state {
                State::Over => break,
                State::Working { left, .. } if left > NOTHING_S => break,
                State::Working { since, .. } => self.end_segment(index, since, now, timeline),
                State::Between => self.reach(index, meetings, now, timeline),
                State::Waiting if self.may_start(meetings) => State::Working {
                    left: self.current().seconds,
                    since: now,
                },
                State::Waiting => break,
            };
            self.state = next;
            changed = true;
        }
        changed
    }

    fn current(&self) -> &Segment {
        &self.segments[self.role.trace[self.slot].template.index()][self.segment]
    }

    fn reach(
        &mut self,
        index: usize,
        meetings: &mut Meetings,
        now: f64,
        timeline: &mut Timeline<'_>,
    ) -> State {
        let Some(slot) = self.role.trace.get(self.slot) else {
            return State::Over;
        };
        let t = slot.template.index();
        if self.segment == 0 {
            self.slot_began = now;
        }
        if self.segment == self.segments[t].len() {
            self.play.count[t] += 1;
            timeline.add(index, self.slot, None, self.slot_began, now);
            (self.slot, self.segment) = (self.slot + 1, 0);
            return State::Between;
        }
        match &self.segments[t][self.segment].meets {
            Meets::Nobody => {
                return State::Working {
                    left: self.current().seconds,
                    since: now,
                };
            }
            Meets::Partners { sends, recvs } => {
                for (side, x) in sends
                    .iter()
                    .map(|x| (0, x))
                    .chain(recvs.iter().map(|x| (1, x)))
                {
                    self.met[x.index()][side] += 1;
                    meetings.arrived[x.index()][side] = self.met[x.index()][side];
                }
            }
            Meets::World => {
                self.n_world_sums += 1;
                meetings.world[index] = self.n_world_sums;
            }
        }
        State::Waiting
    }

    fn may_start(&self, meetings: &Meetings) -> bool {
        match &self.current().meets {
            Meets::Nobody => true,
            Meets::Partners { sends, recvs } => {
                let met = |x: &TransferId, side: usize| {
                    meetings.arrived[x.index()][1 - side] >= self.met[x.index()][side]
                };
                sends.iter().all(|x| met(x, 0)) && recvs.iter().all(|x| met(x, 1))
            }
            Meets::World => meetings.world.iter().all(|&n| n >= self.n_world_sums),
        }
    }

    fn end_segment(
        &mut self,
        index: usize,
        since: f64,
        now: f64,
        timeline: &mut Timeline<'_>,
    ) -> State {
        if let Some(i) = self.current().instruction {
            timeline.add(index, self.slot, Some(i), since, now);
        }
        self.segment += 1;
        State::Between
    }

    fn waiting(&self) -> (ir::StageId, usize, String) {
        let what = match self.current().meets {
            Meets::World => format!("world sum {}", self.n_world_sums),
            _ => {
                let template = self.role.template(self.role.trace[self.slot].template);
                let kind = self
                    .current()
                    .instruction
                    .map(|i| &template.instructions[i].kind);
                kind.map_or("nothing".into(), |k| super::instruction_name(self.role, k))
            }
        };
        (self.role.stage, self.slot, what)
    }
}

/// The segments of every template that are played at once: runs of instructions that meet nobody,
/// or single instructions.
fn segments(
    role: &RoleProgram,
    costs: &[Vec<crate::costs::InstrCost>],
    unfold: bool,
) -> Vec<Vec<Segment>> {
    let of = |(template, costs): (&ir::program::Template, &Vec<crate::costs::InstrCost>)| {
        let mut all: Vec<Segment> = Vec::new();
        for (i, (instruction, cost)) in template.instructions.iter().zip(costs).enumerate() {
            let meets = match &instruction.kind {
                InstrKind::Exchange { sends, recvs } => Meets::Partners {
                    sends: sends.iter().map(|s| s.0).collect(),
                    recvs: recvs.iter().map(|r| r.0).collect(),
                },
                InstrKind::WorldSum { .. } => Meets::World,
                _ => Meets::Nobody,
            };
            match (all.last_mut(), &meets) {
                (
                    Some(Segment {
                        meets: Meets::Nobody,
                        seconds,
                        instruction,
                    }),
                    Meets::Nobody,
                ) if !unfold => {
                    *seconds += cost.seconds;
                    *instruction = None;
                }
                _ => all.push(Segment {
                    instruction: Some(i),
                    seconds: cost.seconds,
                    meets,
                }),
            }
        }
        all
    };
    role.templates.iter().zip(costs).map(of).collect()
}

fn pools(mesh: &LogicalMesh, cluster: &Cluster) -> Vec<(usize, u32)> {
    let Some(pool) = cluster.pool else {
        return Vec::new();
    };
    let mut pools: Vec<(usize, u32)> = Vec::new();
    for rank in mesh.ranks() {
        let p = (rank.0 / pool.devices.max(1)) as usize;
        match pools.last_mut().filter(|l| l.0 == p) {
            Some(last) => last.1 += 1,
            None => pools.push((p, 1)),
        }
    }
    pools
}
