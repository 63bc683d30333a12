//! The members of a communicator, and where they meet: a collective when all have come to it with
//! the same call, a message when sender and receiver have.
//!
//! Members are of one process or of several, and keep what they tell each other ([`super::room`])
//! in memory that all of them have ([`super::shared`]). A call is noted there when it is made; its
//! work is a [`Task`]. Who waits for a member that is gone waits until its own communicator is
//! aborted.

use super::room::{Call, Gpu, Meeting, Room, State};
use super::shared::{Shared, make};
use super::task::{Part, Task};
use super::types::Type;
use std::collections::BTreeMap;
use std::fs::File;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The members of a communicator, as one of them has them.
#[derive(Clone, Debug)]
pub struct Clique {
    pub n: usize,
    pub room: Arc<Shared<Room>>,
    /// Its number in the room.
    pub number: usize,
}

pub fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes the room of a communicator, which others find by this process and the file's descriptor,
/// and know by its name.
pub fn open_room(name: u64) -> Result<File, String> {
    let (cliques, places) = (Vec::new(), Vec::new());
    make(&Room {
        name,
        cliques,
        places,
    })
}

impl Clique {
    /// A member joins the communicator of all with its GPU.
    pub fn join(
        (process, descriptor, name): (u32, i32, u64),
        (rank, n): (usize, usize),
        device: Gpu,
    ) -> Result<Arc<Self>, String> {
        let room = Shared::<Room>::open(process, descriptor)?;
        if room.look()?.name != name {
            return Err("the process that made the communicator's identifier is gone".into());
        }
        room.mark(rank)?;
        room.change(|room| {
            if room.cliques.is_empty() {
                room.cliques.push(State::new((0..n).collect()));
            }
            let all = &mut room.cliques[0];
            let others = all.joined.len();
            if others != n {
                return Err(format!(
                    "a communicator of {n} ranks, to others of {others}"
                ));
            }
            if all.joined[rank].is_some() {
                return Err(format!("rank {rank} has joined twice"));
            }
            all.join(rank, device);
            Ok(())
        })??;
        let (room, number) = (Arc::new(room), 0);
        Ok(Arc::new(Clique { n, room, number }))
    }

    /// Reads the newest state; none where nobody can.
    pub fn look<R>(&self, of: impl FnOnce(&State) -> R) -> Result<R, String> {
        self.room.look().map(|room| of(&room.cliques[self.number]))
    }
    pub fn change<R>(&self, change: impl FnOnce(&mut State) -> R) -> Result<R, String> {
        self.room
            .change(|room| change(&mut room.cliques[self.number]))
    }

    pub fn is_complete(&self) -> Result<bool, String> {
        self.look(|state| state.joined.iter().all(Option::is_some))
    }
    pub fn wrong(&self) -> Result<Option<String>, String> {
        self.look(|state| state.wrong.clone())
    }
    pub fn leave(&self, rank: usize, how: &str) {
        // Whoever cannot say it is seen to be gone.
        let _ = self.change(|state| {
            state.gone.entry(rank).or_insert_with(|| how.into());
        });
    }

    /// Member `rank` comes to its call of this number.
    pub fn come(
        &self,
        (rank, number): (usize, u64),
        call: Call,
        addresses: [u64; 2],
    ) -> Result<Part, String> {
        let n = self.n;
        self.room.change(|room| {
            let place = room.place(call.sizes(n)[0]);
            let state = &mut room.cliques[self.number];
            let meeting = state.meetings.entry(number).or_insert_with(|| Meeting {
                call,
                places: vec![None; n],
                there: vec![false; n],
                done: vec![false; n],
            });
            if meeting.call == call {
                meeting.places[rank] = Some(place);
                return Ok(Part::Collective(number, call, addresses));
            }
            let others = (0..n).filter(|i| meeting.places[*i].is_some());
            let others: Vec<String> = others.map(|i| i.to_string()).collect();
            let what = format!(
                "rank {rank} of {n} comes to call {number} with {}, others ({}) with {}",
                call.describe(),
                others.join(", "),
                meeting.call.describe()
            );
            Err(state.is_wrong(what))
        })?
    }

    /// One side of message `number` from one member to another: address, elements, type.
    pub fn post(
        &self,
        at: (usize, usize, u64),
        receives: bool,
        side: (u64, usize, Type),
    ) -> Result<Part, String> {
        let (_, count, of) = side;
        self.room.change(|room| {
            let place = match receives {
                true => None,
                false => Some(room.place(count * of.bytes())),
            };
            let state = &mut room.cliques[self.number];
            let message = state.messages.entry(at).or_default();
            message.sides[usize::from(receives)] = Some((count, of));
            message.place = place.unwrap_or(message.place);
            if let [Some(sent), Some(received)] = message.sides
                && sent != received
            {
                let (from, to, number) = at;
                let what = format!(
                    "message {number}: rank {from} sends {} {}, rank {to} receives {} {}",
                    sent.0,
                    sent.1.name(),
                    received.0,
                    received.1.name()
                );
                return Err(state.is_wrong(what));
            }
            Ok(Part::Message(at, receives, side))
        })?
    }

    /// Member `rank` asks for split `number`, by color, key and its GPU. Whoever is last makes the
    /// parts.
    pub fn split(
        &self,
        (rank, number): (usize, u64),
        asked: (i32, i32, Gpu),
    ) -> Result<(), String> {
        let n = self.n;
        self.room.change(|room| {
            let next = room.cliques.len();
            let state = &mut room.cliques[self.number];
            let split = state.splits.entry(number).or_default();
            split.asked.resize(n, None);
            split.asked[rank] = Some(asked);
            let all: Option<Vec<_>> = split.asked.iter().copied().collect();
            let mut parts: BTreeMap<i32, Vec<(i32, usize, Gpu)>> = BTreeMap::new();
            for (rank, (color, key, device)) in all.into_iter().flatten().enumerate() {
                let part = parts.entry(color).or_default();
                part.push((key, rank, device));
            }
            let colors = parts.keys().enumerate();
            split.made = colors.map(|(i, color)| (*color, next + i)).collect();
            let roots = state.roots.clone();
            for mut members in parts.into_values() {
                members.sort_unstable();
                let mut made = State::new(members.iter().map(|m| roots[m.1]).collect());
                let devices = members.iter().map(|m| m.2).enumerate();
                devices.for_each(|(place, device)| made.join(place, device));
                room.cliques.push(made);
            }
        })
    }
    pub fn is_split(&self, number: u64) -> Result<bool, String> {
        self.look(|state| {
            state
                .splits
                .get(&number)
                .is_some_and(|s| !s.made.is_empty())
        })
    }
    /// The communicator that member `rank` has by a split, and its number there; none before all
    /// have asked.
    pub fn part(&self, rank: usize, number: u64) -> Result<Option<(Arc<Self>, usize)>, String> {
        let room = self.room.look()?;
        let state = &room.cliques[self.number];
        let found = || {
            let split = state.splits.get(&number)?;
            let number = *split.made.get(&split.asked[rank]?.0)?;
            let members = &room.cliques[number].roots;
            let place = members.iter().position(|r| *r == state.roots[rank])?;
            let (n, room) = (members.len(), Arc::clone(&self.room));
            Some((Arc::new(Clique { n, room, number }), place))
        };
        Ok(found())
    }

    /// The member that has gone among those that a task waits for, and how.
    pub fn missing(&self, task: &Task) -> Result<Option<(usize, String)>, String> {
        if task.is_over.load(Ordering::SeqCst) {
            return Ok(None);
        }
        let room = self.room.look()?;
        let state = &room.cliques[self.number];
        let others = (0..self.n).filter(|rank| *rank != task.rank);
        let missing = others.filter_map(|rank| {
            let how = match state.gone.get(&rank) {
                Some(how) => state.waits(&task.parts, rank, false).then(|| how.clone()),
                None => (state.waits(&task.parts, rank, true)
                    && !self.room.is_marked(state.roots[rank]))
                .then(|| "is gone with its process".into()),
            };
            how.map(|how| (rank, how))
        });
        let missing = missing.min_by_key(|m| m.0);
        Ok(missing)
    }
}

#[cfg(test)]
mod tests {
    use super::super::room::{Call, Kind};
    use super::super::types::Reduction;
    use super::*;
    use crate::link::Driver;
    use std::os::fd::AsRawFd;
    use std::sync::OnceLock;
    use std::sync::atomic::AtomicBool;

    /// A device whose addresses are the host's.
    fn driver() -> Driver {
        extern "C" fn put(
            _: *mut std::ffi::c_void,
            _: crate::queue::Run,
            _: *mut std::ffi::c_void,
        ) -> i32 {
            0
        }
        extern "C" fn meet(
            _: *mut std::ffi::c_void,
            _: crate::queue::Ready,
            _: crate::queue::Run,
            _: *mut std::ffi::c_void,
        ) -> i32 {
            0
        }
        extern "C" fn wake() {}
        extern "C" fn device() -> i32 {
            0
        }
        extern "C" fn address(at: u64, _: usize) -> *mut u8 {
            at as *mut u8
        }
        Driver {
            put,
            meet,
            wake,
            device,
            address,
        }
    }

    /// Members as processes have them, each with the memory opened for itself.
    fn members(n: usize) -> Vec<Arc<Clique>> {
        let file = open_room(7).expect("there is memory");
        let found = (std::process::id(), file.as_raw_fd(), 7);
        let join = |rank| Clique::join(found, (rank, n), Gpu::new(rank)).expect("it joins");
        let all: Vec<_> = (0..n).map(join).collect();
        assert!(Clique::join((found.0, found.1, 8), (0, n), Gpu::new(0)).is_err());
        assert!(Clique::join(found, (0, n), Gpu::new(0)).is_err_and(|e| e.contains("twice")));
        all
    }

    fn sum(count: usize) -> Call {
        Call {
            kind: Kind::AllReduce(Reduction::Sum),
            count,
            of: Type::I32,
        }
    }

    fn task(clique: &Arc<Clique>, rank: usize, part: Part) -> Task {
        Task {
            parts: vec![part],
            clique: Arc::clone(clique),
            rank,
            is_aborted: Arc::default(),
            is_over: AtomicBool::new(false),
            due: OnceLock::new(),
        }
    }

    #[test]
    fn members_of_several_processes_add_up_and_leave_nothing() {
        let all = members(3);
        let mut values = [[1i32, 10], [2, 20], [3, 30]];
        let at = values.each_mut().map(|v| v.as_mut_ptr() as u64);
        for call in 0..5 {
            let begun = all.iter().enumerate().map(|(rank, clique)| {
                let part = clique.come((rank, call), sum(2), [at[rank]; 2]);
                task(clique, rank, part.expect("all agree"))
            });
            let tasks: Vec<Task> = begun.collect();
            for task in &tasks[..2] {
                task.arrive(driver()).expect("operands are there");
                assert!(!task.is_ready(), "one is not there");
            }
            tasks[2].arrive(driver()).expect("operands are there");
            for task in &tasks {
                assert!(task.is_ready());
                task.run(driver()).expect("results are there");
            }
        }
        std::hint::black_box(&at);
        assert_eq!(values, [[6 * 81, 60 * 81]; 3]);
        let room = all[0].room.look().expect("the memory is there");
        assert!(room.places.is_empty() && room.cliques[0].meetings.is_empty());
    }

    #[test]
    fn a_split_has_the_members_of_a_color_in_the_order_of_keys() {
        let all = members(3);
        for (rank, color, key) in [(0, 5, 1), (1, 6, 0), (2, 5, 0)] {
            assert!(!all[0].is_split(0).expect("it is seen"));
            let asked = (color, key, Gpu::new(rank));
            all[rank].split((rank, 0), asked).expect("it asks");
        }
        let part = |rank: usize| all[rank].part(rank, 0).expect("it is seen");
        let parts = [0, 1, 2].map(|rank| part(rank).expect("all have asked"));
        assert_eq!(
            parts.each_ref().map(|p| (p.0.n, p.1)),
            [(2, 1), (1, 0), (2, 0)]
        );
        assert_eq!(parts[0].0.number, parts[2].0.number);
    }

    /// As when its process was killed: nobody says that it is gone.
    #[test]
    fn a_member_whose_process_is_gone_is_noticed() {
        let mut all = members(2);
        let last = all.pop().expect("there are two");
        let part = all[0].come((0, 0), sum(0), [0; 2]).expect("it comes");
        let waits = task(&all[0], 0, part);
        waits.arrive(driver()).expect("it is there");
        // It has come, and its work is on its stream.
        last.come((1, 0), sum(0), [0; 2]).expect("it comes");
        assert_eq!(all[0].missing(&waits), Ok(None));
        drop(last);
        let missing = all[0].missing(&waits).expect("it is seen");
        assert_eq!(missing, Some((1, "is gone with its process".into())));
        // Its place in the memory goes with the last who has it open.
        assert!(!waits.is_ready());
    }

    #[test]
    fn who_brings_another_call_is_told_to_all() {
        let all = members(2);
        all[1]
            .come((1, 0), sum(3), [0; 2])
            .expect("it is the first");
        let told = all[0].come((0, 0), sum(4), [0; 2]).expect_err("it differs");
        assert_eq!(all[1].wrong(), Ok(Some(told.clone())));
        let words = "rank 0 of 2 comes to call 0 with ncclAllReduce of 4 int32 by sum, others (1)";
        assert!(told.starts_with(words), "{told}");
    }
}
