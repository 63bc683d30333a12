//! Notes of ranks at the table about the calls that they have come to: who checks that they agree,
//! and knows who is missing.

use super::Nccl;
use super::comms::Key;
use super::entries::blocks;
use crate::arena::Bytes;
use crate::error::RuntimeError;
use crate::fabric::threads::{Arrived, Endpoint, Meeting, channel};
use crate::fabric::{Call, Collective, Exchange};
use ir::Rank;
use std::sync::Arc;

/// A meeting at the table, and what is expected of the notes that come with it: from whom, how many
/// bytes, and the number of the message between the two ranks.
pub(super) struct Notes {
    pub meeting: Option<Meeting>,
    pub expected: Vec<(Rank, u64, u64)>,
    /// The words of the first member.
    pub first: Option<Arc<Bytes>>,
}

impl Notes {
    /// Whether all have come; their notes are then compared.
    pub fn look(&mut self, table: &Endpoint, what: &str) -> Result<bool, RuntimeError> {
        let Some(meeting) = &mut self.meeting else {
            return Ok(true);
        };
        let Some(arrived) = table.arrived(meeting, None)? else {
            return Ok(false);
        };
        self.meeting = None;
        match arrived {
            Arrived::Gathered(all) => self.first = all.into_iter().next(),
            Arrived::Exchanged(notes) => {
                for (note, &(from, bytes, nth)) in notes.iter().zip(&self.expected) {
                    let [their_bytes, their_nth] = read_note(note);
                    let differs = |theirs, own, brings: String, brought: String| {
                        (theirs != own).then_some(RuntimeError::Mismatch {
                            rank: table.rank,
                            brings: format!("{brings} ({what})"),
                            other: from,
                            brought,
                        })
                    };
                    let wrong = differs(
                        their_nth,
                        nth,
                        format!("the receipt of message {nth} from it"),
                        format!("message {their_nth}"),
                    )
                    .or(differs(
                        their_bytes,
                        bytes,
                        format!("room for {bytes} bytes"),
                        format!("{their_bytes} bytes"),
                    ));
                    if let Some(wrong) = wrong {
                        return Err(wrong);
                    }
                }
            }
        }
        Ok(true)
    }
}

fn note(bytes: u64, nth: u64) -> Bytes {
    let mut note = Bytes::zeroed(16);
    note[..8].copy_from_slice(&bytes.to_le_bytes());
    note[8..].copy_from_slice(&nth.to_le_bytes());
    note
}

fn read_note(note: &[u8]) -> [u64; 2] {
    let number = |at| {
        let bytes = note.get(at..at + 8).and_then(|b| b.try_into().ok());
        bytes.map_or(u64::MAX, u64::from_le_bytes)
    };
    [number(0), number(8)]
}

impl Nccl {
    /// Begins a collective's meeting, with an identifier where its communicator is not made.
    pub(super) fn begin_collective(
        &mut self,
        call: &Arc<Call>,
        of: &Collective,
    ) -> Result<(Notes, Option<Key>), RuntimeError> {
        let me = self.table.place_in(&of.group)?;
        let key = (of.group.clone(), of.number);
        let moves = of.group.len() > 1 && of.items.iter().any(|i| i.elements > 0);
        let is_made = self.comms.has(&key) || self.awaited.contains(&key);
        let mut note = Bytes::default();
        if moves && !is_made {
            if me == 0 {
                note = Bytes::copy_of(&self.comms.id()?);
            }
            self.awaited.insert(key.clone());
        }
        // The table's own reductions are of nothing.
        let meeting = self.table.come((call, of), Arc::new(note), true)?;
        let notes = Notes {
            meeting: Some(meeting),
            expected: Vec::new(),
            first: None,
        };
        Ok((notes, moves.then_some(key)))
    }

    /// Begins an exchange's meeting: each block is announced with its bytes and its number between
    /// the two ranks.
    pub(super) fn begin_exchange(&mut self, of: &Exchange) -> (Notes, Option<Key>) {
        let mut numbers = |rank: Rank, receives: bool| {
            let next = &mut self.messages.entry(rank).or_default()[usize::from(receives)];
            *next += 1;
            *next - 1
        };
        let bytes = |local: &crate::execute::Local, tile: &ir::reshard::Tile| {
            tile.len.iter().product::<u64>() * local.dtype.bytes()
        };
        let mut sends = Vec::new();
        for (i, tile) in blocks(&of.sends) {
            let moved = &of.sends[i];
            let nth = numbers(tile.to, false);
            let note = note(bytes(&moved.local, tile), nth);
            sends.push((channel(moved, tile), note));
        }
        let (mut receives, mut expected) = (Vec::new(), Vec::new());
        for (i, tile) in blocks(&of.receives) {
            let moved = &of.receives[i];
            let nth = numbers(tile.from, true);
            expected.push((tile.from, bytes(&moved.local, tile), nth));
            receives.push(channel(moved, tile));
        }
        let moves = !sends.is_empty() || !receives.is_empty();
        let notes = Notes {
            meeting: Some(self.table.send(sends, receives.into_iter())),
            expected,
            first: None,
        };
        (notes, moves.then(|| self.root.clone()))
    }
}
