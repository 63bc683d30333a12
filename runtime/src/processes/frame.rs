//! The form of a message between processes: the length of the head, the head as MessagePack, and
//! bytes of a block, whose places in it the head says. Behind each of the three is the CRC-32C of
//! all that was before, so that nothing waits for bytes because a length has another bit. TCP's own
//! checksum has 16 bits, and is made anew by network cards and whatever else passes packets on: a
//! bit that one of them turns would be a gradient.
//!
//! Only processes that know the run's token get this far. A length is still believed no further
//! than bytes arrive: a head is read as it comes, and a block's pages are touched where bytes are
//! written.

use crate::arena::Bytes;
use crate::execute::message::{Answer, Reply, Request};
use crate::fabric::Collective;
use crate::fabric::threads::Channel;
use crc32c::crc32c_append;
use ir::Rank;
use serde::{Deserialize, Serialize};
use std::io::{self, ErrorKind, Read, Write};
use std::ops::Range;
use std::sync::Arc;

/// Longest head: a request with the places of all parts of a checkpoint.
const LONGEST_HEAD: u64 = 1 << 31;
/// Longest block: a rank's part of a tensor, here one of four thousand million elements.
const LONGEST_BLOCK: usize = 1 << 34;
/// Bodies up to this length go into one packet with their head.
const SHORT: usize = 1 << 16;

/// The kind of a message.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Head {
    /// A contribution to a gathering. The body has parts of it.
    Contribution {
        /// The collective's name in errors.
        what: String,
        /// The collective.
        of: Collective,
        /// How many its communicator had before.
        meeting: u64,
        /// The contributor's place in the group.
        place: usize,
        /// Where the body's bytes are in the contribution.
        parts: Parts,
    },
    /// A block for a rank. It is the body.
    Delivery {
        /// The way.
        channel: Channel,
        /// How many were before on it.
        n: u64,
        /// The whole block.
        parts: Parts,
    },
    /// A block has been taken.
    Taken {
        /// The way.
        channel: Channel,
        /// How many were before on it.
        n: u64,
    },
    /// A rank ended the run.
    Failed {
        /// The rank.
        by: Rank,
        /// Its reason.
        reason: String,
    },
    /// A rank meets nobody any more.
    Left {
        /// The rank.
        rank: Rank,
    },
    /// The coordinator asks a rank.
    Request {
        /// The rank.
        rank: Rank,
        /// For what. The part of a state that it writes is the body: MessagePack counts the bytes
        /// of a value with 32 bits.
        request: Request,
        /// The whole body.
        parts: Parts,
    },
    /// A rank answers the coordinator.
    Answer {
        /// The rank.
        rank: Rank,
        /// The answer. The part of a state that it has is the body.
        answer: Answer,
        /// The whole body.
        parts: Parts,
    },
    /// The coordinator has no more requests: the run is over.
    Over {
        /// Its error, where it failed.
        failed: Option<String>,
        /// Whether it was interrupted.
        is_interrupted: bool,
    },
    /// The coordinator goes on, though it may ask for nothing yet.
    Alive,
    /// The coordinator is to end the run in order.
    ToEnd(Reason),
    /// The process ends by itself, and is not lost.
    Farewell,
}

/// The reason for which a process asks the coordinator to end the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reason {
    /// Its launcher has ended: nobody else would end it.
    Orphaned,
    /// It was interrupted, as where its host is to be emptied.
    Interrupted,
}

/// Which bytes of a block a message carries.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Parts {
    /// Length of the block.
    pub len: usize,
    /// The bytes, ascending and apart.
    pub ranges: Vec<Range<usize>>,
}

impl Parts {
    /// All bytes of a block.
    pub fn whole(len: usize) -> Self {
        Parts {
            len,
            ranges: Vec::from_iter((len > 0).then_some(0..len)),
        }
    }
    /// Bytes that are carried.
    pub fn bytes(&self) -> usize {
        self.ranges.iter().map(Range::len).sum()
    }
    fn check(&self) -> io::Result<()> {
        let mut end = 0;
        let ascend = self.ranges.iter().all(|r| {
            let fits = end <= r.start && r.start <= r.end;
            end = r.end;
            fits
        });
        match ascend && end <= self.len && self.len <= LONGEST_BLOCK {
            true => Ok(()),
            false => Err(bad("a message has parts that are not in its block")),
        }
    }
}

/// The block whose parts go with a head that has some.
pub(crate) type Body = Option<Arc<Bytes>>;

/// A message to send.
#[derive(Debug)]
pub(crate) struct Letter {
    pub head: Head,
    pub body: Body,
}

impl Letter {
    /// A request of the coordinator.
    pub fn request(rank: Rank, mut request: Request) -> Self {
        let block = match &mut request {
            Request::Write(_, part) => std::mem::take(part),
            _ => Bytes::default(),
        };
        let parts = Parts::whole(block.len());
        let head = Head::Request {
            rank,
            request,
            parts,
        };
        let body = Some(Arc::new(block));
        Letter { head, body }
    }
    /// A rank's answer to one.
    pub fn answer(rank: Rank, mut answer: Answer) -> Self {
        let block = match &mut answer {
            Ok(Reply::Part(part)) => std::mem::take(part),
            _ => Bytes::default(),
        };
        let parts = Parts::whole(block.len());
        let head = Head::Answer {
            rank,
            answer,
            parts,
        };
        let body = Some(Arc::new(block));
        Letter { head, body }
    }
}

impl Head {
    pub fn parts(&self) -> Option<&Parts> {
        match self {
            Head::Contribution { parts, .. }
            | Head::Delivery { parts, .. }
            | Head::Request { parts, .. }
            | Head::Answer { parts, .. } => Some(parts),
            _ => None,
        }
    }
    /// Puts the body of a request or an answer where it belongs; that of others is given back.
    pub fn take_back(mut self, block: Bytes) -> (Self, Bytes) {
        match &mut self {
            Head::Request {
                request: Request::Write(_, part),
                ..
            } => *part = block,
            Head::Answer {
                answer: Ok(Reply::Part(part)),
                ..
            } => *part = block,
            _ => return (self, block),
        }
        (self, Bytes::default())
    }
}

fn bad(what: impl std::fmt::Display) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what.to_string())
}

/// Writes a message.
pub(crate) fn write(to: &mut impl Write, letter: &Letter) -> io::Result<()> {
    let mut packet = vec![0; 12];
    rmp_serde::encode::write_named(&mut packet, &letter.head).map_err(bad)?;
    let len = (packet.len() as u64 - 12).to_le_bytes();
    let mut sum = crc32c_append(0, &len);
    packet[..8].copy_from_slice(&len);
    packet[8..12].copy_from_slice(&sum.to_le_bytes());
    sum = crc32c_append(sum, &packet[12..]);
    packet.extend_from_slice(&sum.to_le_bytes());
    let body = letter.head.parts().zip(letter.body.as_deref());
    let pieces = body.into_iter().flat_map(|(parts, block)| {
        let ranges = parts.ranges.iter();
        ranges.map(|r| &block[r.clone()])
    });
    if body.is_none_or(|(parts, _)| parts.bytes() <= SHORT) {
        for piece in pieces {
            sum = crc32c_append(sum, piece);
            packet.extend_from_slice(piece);
        }
        packet.extend_from_slice(&sum.to_le_bytes());
        return to.write_all(&packet);
    }
    to.write_all(&packet)?;
    for piece in pieces {
        sum = crc32c_append(sum, piece);
        to.write_all(piece)?;
    }
    to.write_all(&sum.to_le_bytes())
}

/// Reads a message, with its block where it has one; nothing where the other end has closed.
///
/// Fails at the first part that cannot be one of a message or is not as it was sent, before it is
/// believed: a bit that was turned never has it wait for bytes that nobody sends.
pub(crate) fn read(from: &mut impl Read) -> io::Result<Option<(Head, Bytes)>> {
    let mut len = [0; 8];
    if !begins(from, &mut len)? {
        return Ok(None);
    }
    let mut sum = crc32c_append(0, &len);
    is_as_sent(from, sum)?;
    let len = u64::from_le_bytes(len);
    if len > LONGEST_HEAD {
        return Err(bad(format_args!(
            "a message begins with a head of {len} bytes"
        )));
    }
    let mut head = Vec::new();
    if from.take(len).read_to_end(&mut head)? as u64 != len {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    sum = crc32c_append(sum, &head);
    is_as_sent(from, sum)?;
    let head: Head = rmp_serde::from_slice(&head).map_err(bad)?;
    let mut block = Bytes::default();
    if let Some(parts) = head.parts() {
        parts.check()?;
        block = Bytes::zeroed(parts.len);
        for range in &parts.ranges {
            from.read_exact(&mut block[range.clone()])?;
            sum = crc32c_append(sum, &block[range.clone()]);
        }
    }
    is_as_sent(from, sum)?;
    Ok(Some(head.take_back(block)))
}

/// Reads the checksum of what was read before, and fails where it is another one.
fn is_as_sent(from: &mut impl Read, sum: u32) -> io::Result<()> {
    let mut sent = [0; 4];
    from.read_exact(&mut sent)?;
    match u32::from_le_bytes(sent) == sum {
        true => Ok(()),
        false => Err(bad("a message has other bits than were sent")),
    }
}

/// Fills a buffer, or finds that nothing comes any more.
fn begins(from: &mut impl Read, buffer: &mut [u8]) -> io::Result<bool> {
    let mut done = 0;
    while done < buffer.len() {
        match from.read(&mut buffer[done..]) {
            Ok(0) if done == 0 => return Ok(false),
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => done += n,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(true)
}
