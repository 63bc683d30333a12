//! Ranks of several processes: how these find each other, and what they tell each other.
//!
//! ```text
//!   process 0: Session ── requests, answers ──┐         process 1: serve
//!              ranks ── World ── Lines ═══════╪═ TCP ═══ Lines ── World ── ranks
//! ```
//!
//! * [`frame`] is the form of a message: a head that says what it is, and bytes as they lie.
//! * [`handshake`] proves to both ends of a connection that they know the run's [`Token`].
//! * [`rendezvous`] brings the processes of a run together and connects each with each.
//! * [`lines`] carries frames: a thread that writes and one that reads for every other process,
//!   so that neither end ever waits for the other to listen.
//! * `mpi` carries them through an MPI library instead (feature `mpi`), and `neighbours` sees there
//!   that a process of this host has ended.
//! * [`member`] is a process without the coordinator: it does what that one asks of its ranks.
//! * [`pulse`] lets these hear that the coordinator goes on.
//! * [`processors`] counts those that the processes of a host may use.
//!
//! The ranks meet in [`fabric::threads`](crate::fabric::threads), as those of one process do: what
//! a rank brings to a meeting is sent to the processes whose ranks need it, and only the bytes that
//! they need. So results are the same to the bit wherever ranks are.
//!
//! The token authenticates who joins. What is sent afterwards is neither encrypted nor signed: the
//! network between the hosts of a run must be trusted, as for NCCL and MPI.

mod frame;
mod handshake;
mod lines;
mod member;
#[cfg(feature = "mpi")]
mod mpi;
mod neighbours;
mod processors;
mod pulse;
mod rendezvous;
#[doc(hidden)]
pub mod spoken;
#[cfg(any(test, all(feature = "testing", feature = "mpi")))]
mod suite;
#[cfg(test)]
pub(crate) mod tests;

pub use frame::Reason;
pub use handshake::{Token, TokenError};
pub use lines::{Ending, Processes};
pub use member::serve;
#[cfg(feature = "mpi")]
pub use mpi::{Departed, LastWords, Mpi};
pub use rendezvous::{Fingerprint, Host, JoinError, Place, Way, join};
#[cfg(all(feature = "testing", feature = "mpi"))]
pub use suite::passes_by_mpi;

pub(crate) use frame::{Head, Letter, Parts};
pub(crate) use lines::Inbox;
pub(crate) use pulse::{ALONE, Doing, Pulse};
