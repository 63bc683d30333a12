//! How ranks meet: the collectives and exchanges of a program.
//!
//! A [`Call`] is what an instruction asks of a fabric, made once per instruction; places in the
//! arenas are given with each use. A rank begins a call, which never waits for others, and then
//! waits for it or asks now and then whether it is over. Over means that what the device's stream
//! is given from then on finds the results.
//!
//! [`threads`] is the first fabric: ranks of one process or several, for any device, through the
//! host's memory. [`nccl`] is that of GPUs, whose streams wait for each other by themselves. Another
//! one is a file beside them that passes [`conformance`].

#[cfg(any(test, feature = "testing"))]
pub mod conformance;
pub mod nccl;
mod parts;
pub mod threads;

use crate::device::{Device, Place};
use crate::error::RuntimeError;
use crate::execute::Local;
use crate::execute::collective::Rows;
use ir::collective::CollectiveKind;
pub use ir::collective::{Contract, Order};
use ir::reshard::Tile;
use ir::{DType, Rank, Reduction, StreamId};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// The number of the communicator for sums over all ranks, which is no stream's of any role.
const WORLD: u32 = u32::MAX;
/// And that for barriers.
const BARRIER: u32 = u32::MAX - 1;

/// A call that ranks make together.
#[derive(Clone, Debug)]
pub struct Call {
    /// Its name in the errors of those who wait.
    pub what: String,
    /// The operation.
    pub kind: CallKind,
}

/// The kinds of calls.
#[derive(Clone, Debug)]
pub enum CallKind {
    /// A collective of a whole group.
    Collective(Collective),
    /// Between pairs of ranks.
    Exchange(Exchange),
}

/// A collective on one or more buffers. All members come to the calls of a communicator in the
/// same order, each with the same kind, types and lengths.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Collective {
    /// The operation.
    pub kind: CollectiveKind,
    /// The members; sums of a fixed order have this one.
    pub group: Vec<Rank>,
    /// Tells communicators of one group from each other.
    pub number: u32,
    /// The promises that the members may rely on, the same for all of them.
    pub contract: Contract,
    /// The buffers.
    pub items: Vec<Item>,
}

/// A buffer of a collective: pieces for and from members, each in as many parts as there are rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Item {
    /// Type of the elements.
    pub dtype: DType,
    /// Elements of every member's operand.
    pub elements: usize,
    /// How an operand is cut into pieces, where the collective cuts it.
    pub operand: Rows,
    /// How a result is put together from pieces.
    pub result: Rows,
}

/// Sends and receives that proceed together; a send is over when its receiver has begun to
/// receive.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// The blocks that this rank sends.
    pub sends: Vec<Moved>,
    /// The blocks that it receives; elements that no block covers become zero.
    pub receives: Vec<Moved>,
}

/// A buffer of an exchange.
#[derive(Clone, Debug)]
pub struct Moved {
    /// The index of the transfer; blocks are matched by it, sender and receiver.
    pub transfer: u32,
    /// This rank's part of the tensor.
    pub local: Local,
    /// The blocks of it that leave or arrive.
    pub tiles: Vec<Tile>,
}

/// Where the operands and results of a call lie: of a collective one of each per item, in place
/// or apart; of an exchange the sends and the receives.
#[derive(Clone, Debug, Default)]
pub struct Places {
    /// Operands.
    pub inputs: Vec<Place>,
    /// Results.
    pub outputs: Vec<Place>,
}

impl Call {
    /// The sum over all ranks of a vector of `n` f32.
    pub fn world_sum(world: Vec<Rank>, n: u64) -> Self {
        Self::all_reduce("a sum over the world", world, WORLD, &[n])
    }
    /// Nothing but that all members come.
    pub fn barrier(group: Vec<Rank>) -> Self {
        Self::all_reduce("a barrier", group, BARRIER, &[])
    }
    fn all_reduce(what: &str, group: Vec<Rank>, number: u32, lens: &[u64]) -> Self {
        let item = |n: &u64| Item {
            dtype: DType::F32,
            elements: *n as usize,
            operand: Rows::ONE,
            result: Rows::ONE,
        };
        let kind = CollectiveKind::AllReduce(Reduction::Sum);
        Call {
            what: what.into(),
            kind: CallKind::Collective(Collective {
                kind,
                // Any order will do: all addends of an entry but one are zero.
                contract: Contract::new(kind, DType::F32, Order::Library),
                group,
                number,
                items: lens.iter().map(item).collect(),
            }),
        }
    }
}

impl Collective {
    /// Whether two members of a communicator can meet with these: they state one contract too.
    pub fn agrees(&self, other: &Collective) -> bool {
        self.kind == other.kind && self.contract == other.contract && self.items == other.items
    }
    /// Kind, types and elements, and the sum: `all_gather of 12 f32`, `all_reduce of 4 bf16 in f32
    /// fixed`.
    pub fn describe(&self) -> String {
        let item = |i: &Item| format!("{} {}", i.elements, i.dtype.name());
        let items: Vec<String> = self.items.iter().map(item).collect();
        let (name, items) = (self.kind.name(), items.join(", "));
        format!("{name} of {items}{}", self.contract.describe_sum())
    }
}

/// The fabrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Meets {
    /// [`threads`]: through the host's memory.
    #[default]
    Host,
    /// [`nccl`]: GPUs by NVIDIA's library.
    Nccl,
}

impl Meets {
    /// The order of its fabric's sums, which programs for it state.
    pub fn order(self) -> Order {
        match self {
            Meets::Host => Order::Fixed,
            Meets::Nccl => Order::Library,
        }
    }
}

/// One rank's way to the others. Dropped, the rank has left: who waits for it fails with its
/// name.
pub trait Fabric<D: Device>: Send {
    /// A call that has begun.
    type Ticket;

    /// The rank.
    fn rank(&self) -> Rank;
    /// The order of its sums: a rank refuses a program that states more.
    fn order(&self) -> Order;
    /// Begins a call after all that the stream has been given. Operands may be read until it is
    /// over.
    ///
    /// Fails when the rank is not in the group, or others came with another call.
    fn begin(
        &mut self,
        device: &mut D,
        stream: StreamId,
        call: &Arc<Call>,
        places: Places,
    ) -> Result<Self::Ticket, RuntimeError>;
    /// Whether the call is over; if so, the bytes that it took beside the arenas. Not asked again
    /// after that.
    ///
    /// Fails when a rank failed or left, or came with another call.
    fn poll(
        &mut self,
        device: &mut D,
        ticket: &mut Self::Ticket,
    ) -> Result<Option<u64>, RuntimeError>;
    /// Waits until the call is over, no longer than the timeout. Returns and fails as
    /// [`Fabric::poll`].
    fn wait(&mut self, device: &mut D, ticket: Self::Ticket) -> Result<u64, RuntimeError>;
    /// Leaves a call to its stream: what the stream is given from then on finds the results, and the
    /// host may go on before others have come. What goes wrong then is said by a later call or by
    /// [`Fabric::settle`]. A fabric that works on the host waits here. Returns and fails as
    /// [`Fabric::poll`].
    fn pass(&mut self, device: &mut D, ticket: Self::Ticket) -> Result<u64, RuntimeError> {
        self.wait(device, ticket)
    }
    /// Whether calls that were left to streams keep a device busy that other ranks have too. It may
    /// wait for them when it is asked for memory, or for a kernel that it has not loaded. If another
    /// rank asks, which has still to come to the call, both wait for ever.
    fn holds_up_others(&self) -> bool {
        false
    }
    /// Does the part of a call that is this rank's device's alone, in a rehearsal: see
    /// [`Device::rehearse`].
    fn rehearse(
        &mut self,
        _: &mut D,
        _: StreamId,
        _: &Call,
        _: &Places,
    ) -> Result<(), RuntimeError> {
        Ok(())
    }
    /// Makes ready what takes long, before the first step: all ranks come to it.
    fn prepare(&mut self, _: &mut D) -> Result<(), RuntimeError> {
        Ok(())
    }
    /// Waits until all that was left to streams is done, so that the host may wait for these: no
    /// longer than the timeout for the next call. Fails as [`Fabric::poll`].
    fn settle(&mut self, _: &mut D) -> Result<(), RuntimeError> {
        Ok(())
    }
    /// The rank's host begins to work with its device, which may not come back. A fabric on which it
    /// would be missed looks at it from then on.
    fn host_works(&self) {}
    /// The host is back, and works with its device no more.
    fn host_rests(&self) {}
    /// Rests until a call that has begun may be over, at most for `patience`.
    fn rest(&self, patience: Duration);
    /// The error of a call that is not over in time; it says for whom the rank waits.
    fn overdue(&self, ticket: &Self::Ticket) -> RuntimeError;
    /// Longest that a rank waits for others.
    fn timeout(&self) -> Duration;
    /// Ends the run: all that ranks wait for, now or later, fails with this rank's name and the
    /// reason. The first one counts.
    fn abort(&self, reason: &str);
    /// Bytes that it holds beside the arenas.
    fn held_bytes(&self) -> u64;

    /// Waits until all of the group have come.
    fn barrier(&mut self, device: &mut D, group: &[Rank]) -> Result<(), RuntimeError> {
        let call = Arc::new(Call::barrier(group.to_vec()));
        let ticket = self.begin(device, StreamId(0), &call, Places::default())?;
        self.wait(device, ticket).map(|_| ())
    }
}
