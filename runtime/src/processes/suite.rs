//! Processes before the suite of fabrics ([`conformance`](crate::fabric::conformance)): their ranks
//! without a program. Processes that an MPI library connects run it together, each with one rank or
//! none.

use super::{Inbox, Processes};
use crate::device::Cpu;
use crate::error::RuntimeError;
use crate::fabric::threads::{Endpoint, Ticket, World};
use crate::fabric::{Call, Fabric, Order, Places};
use ir::{Rank, StreamId};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

/// A rank's end of the world, which leaves before its process does.
pub(crate) struct Rankful {
    pub endpoint: Endpoint,
    /// Held until the endpoint has left.
    #[cfg_attr(not(test), expect(dead_code))]
    process: Arc<Processes>,
}

impl Rankful {
    /// Those that a process has, where these are the ranks of all.
    pub fn of(process: &Arc<Processes>, shares: &[Vec<Rank>], timeout: Duration) -> Vec<Self> {
        let me = process.place().index;
        let world = World::among(shares, me, timeout, process.carrier());
        let (asked, _) = channel();
        process.attach(&world, shares.to_vec(), Inbox::Requests(asked));
        let end = |&rank: &Rank| Rankful {
            endpoint: world.endpoint(rank),
            process: Arc::clone(process),
        };
        shares[me].iter().map(end).collect()
    }
}

#[cfg(test)]
impl Rankful {
    /// Closes the connections of its process at once, as its death does.
    pub fn break_off(&self) {
        self.process.break_off();
    }
}

impl Fabric<Cpu> for Rankful {
    type Ticket = Ticket;

    fn rank(&self) -> Rank {
        Fabric::<Cpu>::rank(&self.endpoint)
    }
    fn order(&self) -> Order {
        Fabric::<Cpu>::order(&self.endpoint)
    }
    fn begin(
        &mut self,
        device: &mut Cpu,
        stream: StreamId,
        call: &Arc<Call>,
        places: Places,
    ) -> Result<Ticket, RuntimeError> {
        self.endpoint.begin(device, stream, call, places)
    }
    fn poll(&mut self, device: &mut Cpu, ticket: &mut Ticket) -> Result<Option<u64>, RuntimeError> {
        self.endpoint.poll(device, ticket)
    }
    fn wait(&mut self, device: &mut Cpu, ticket: Ticket) -> Result<u64, RuntimeError> {
        self.endpoint.wait(device, ticket)
    }
    fn rest(&self, patience: Duration) {
        Fabric::<Cpu>::rest(&self.endpoint, patience);
    }
    fn overdue(&self, ticket: &Ticket) -> RuntimeError {
        Fabric::<Cpu>::overdue(&self.endpoint, ticket)
    }
    fn timeout(&self) -> Duration {
        Fabric::<Cpu>::timeout(&self.endpoint)
    }
    fn abort(&self, reason: &str) {
        Fabric::<Cpu>::abort(&self.endpoint, reason);
    }
    fn held_bytes(&self) -> u64 {
        Fabric::<Cpu>::held_bytes(&self.endpoint)
    }
}

/// Has the processes of an MPI library, of which there are five or more, pass the suite together:
/// rank r is in process r. Returns the number of worlds that there were.
///
/// Fails where they do not come together, and panics where they do not pass.
#[cfg(feature = "mpi")]
pub fn passes_by_mpi(mpi: &super::Mpi) -> Result<usize, super::JoinError> {
    use std::cell::{Cell, RefCell};
    let (place, patience) = (mpi.place(), Duration::from_secs(60));
    let (worlds, failed) = (Cell::new(0), RefCell::new(None));
    // A process without a rank stays until the next world.
    let idle: RefCell<Option<Arc<Processes>>> = RefCell::new(None);
    let fingerprint = super::Fingerprint([].into());
    let open = |n: u32, bytes: usize, timeout: Duration| {
        idle.replace(None);
        worlds.set(worlds.get() + 1);
        let joined = mpi.join(&fingerprint, patience, None);
        let process = match joined {
            Ok(process) => Arc::new(process),
            Err(e) => {
                failed.replace(Some(e));
                return Vec::new();
            }
        };
        let shares: Vec<Vec<Rank>> = (0..place.of)
            .map(|p| (0..n).filter(|r| *r as usize == p).map(Rank).collect())
            .collect();
        let ends = Rankful::of(&process, &shares, timeout);
        if ends.is_empty() {
            idle.replace(Some(process));
        }
        ends.into_iter()
            .map(|end| (Cpu::new(bytes, 0, 1), end))
            .collect()
    };
    let gather = |among: &[Rank], me: Rank, word: String| mpi.gather(among, me, word);
    crate::fabric::conformance::passes_apart(&open, &gather);
    match failed.into_inner() {
        Some(e) => Err(e),
        None => Ok(worlds.get()),
    }
}
