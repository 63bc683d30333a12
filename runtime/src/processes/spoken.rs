//! Bytes that a process may be told by another one, for fuzzing: proofs of the token,
//! introductions, messages.

use super::frame::{self, Head, Letter, Parts};
use super::handshake::{self, HandshakeError, Token};
use super::rendezvous;
use crate::arena::Bytes;
use crate::execute::message::Reply;
use crate::fabric::{Call, CallKind};
use crc32c::crc32c_append;
use ir::Rank;
use std::io::{self, Cursor, Read, Write};
use std::sync::Arc;

/// The longest block that is made of an input: what a block's length says is address space alone,
/// but many of them would be counted.
const MOST: usize = 1 << 24;

/// A connection that says some bytes, and hears nothing.
struct Says<'a>(Cursor<&'a [u8]>);

impl Read for Says<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for Says<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether bytes are understood, 0 or 1: as a proof, an introduction or a message, by the first of
/// them. Checksums of messages are put in, as spoiled ones end there.
pub fn understood(bytes: &[u8]) -> usize {
    let Some((kind, bytes)) = bytes.split_first() else {
        return 0;
    };
    match kind {
        0 => {
            let token = Token::parse(&"8f".repeat(32));
            let mut says = Says(Cursor::new(bytes));
            let answered = token.map(|t| handshake::answer(&mut says, &t));
            // Nobody has the right proof of a number that was just drawn: it is heard to its end.
            let is_heard = matches!(answered, Ok(Ok(()) | Err(HandshakeError::Token)));
            usize::from(is_heard)
        }
        1 => usize::from(rendezvous::is_introduction(bytes)),
        _ => {
            let (sent, block) = summed(bytes);
            match block > MOST {
                true => 0,
                false => usize::from(frame::read(&mut &sent[..]).is_ok_and(|m| m.is_some())),
            }
        }
    }
}

/// A message of a head's length, the head and a body, with their checksums, and the length of its
/// block.
fn summed(bytes: &[u8]) -> (Vec<u8>, usize) {
    let (len, rest) = bytes.split_at(bytes.len().min(8));
    let n = len
        .first_chunk()
        .map_or(u64::MAX, |n| u64::from_le_bytes(*n));
    let (head, body) = rest.split_at(rest.len().min(usize::try_from(n).unwrap_or(usize::MAX)));
    let mut sum = 0;
    let mut sent = Vec::new();
    for part in [len, head, body] {
        sum = crc32c_append(sum, part);
        sent.extend_from_slice(part);
        sent.extend_from_slice(&sum.to_le_bytes());
    }
    let head = rmp_serde::from_slice::<Head>(head).ok();
    let block = head.and_then(|h| h.parts().map(|parts| parts.len));
    (sent, block.unwrap_or(0))
}

/// Good ones to begin with.
pub fn examples() -> Vec<Vec<u8>> {
    let mut all = vec![[&[0][..], handshake::MAGIC.as_slice(), &[7; 64]].concat()];
    let words = rendezvous::introductions().into_iter();
    all.extend(words.map(|word| [&[1][..], &word].concat()));
    let mut letters = vec![
        Letter::answer(Rank(2), Ok(Reply::Part(Bytes::copy_of(&[1; 12])))),
        Letter {
            head: Head::Failed {
                by: Rank(1),
                reason: "a reason".into(),
            },
            body: None,
        },
    ];
    let call = Call::world_sum(vec![Rank(0), Rank(1)], 3);
    if let CallKind::Collective(of) = call.kind {
        let parts = Parts {
            len: 12,
            ranges: vec![0..4, 8..12],
        };
        let head = Head::Contribution {
            what: call.what,
            of,
            meeting: 3,
            place: 1,
            parts,
        };
        let body = Some(Arc::new(Bytes::copy_of(&[5; 12])));
        letters.push(Letter { head, body });
    }
    for letter in letters {
        let mut sent = Vec::new();
        if frame::write(&mut sent, &letter).is_ok() {
            let n = sent.first_chunk().map_or(0, |n| u64::from_le_bytes(*n)) as usize;
            // Without the three checksums.
            let body = &sent[16 + n..sent.len() - 4];
            all.push([&[2][..], &sent[..8], &sent[12..12 + n], body].concat());
        }
    }
    all
}
