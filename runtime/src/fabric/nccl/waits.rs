//! How the host waits, where it does: by looking at the table, the communicators, the streams and the
//! clock in turn, so that it says who is to blame.

use super::notes::Notes;
use super::{Flying, Nccl, PATIENCE, REASONS, REST, SOUND, Ticket};
use crate::device::cuda::is_over;
use crate::device::{Cuda, Device};
use crate::error::RuntimeError;
use crate::fabric::Fabric;
use std::time::Instant;

impl Nccl {
    /// Notes what a stream was given, which is looked at later.
    pub(super) fn flies(&mut self, device: &mut Cuda, ticket: Ticket) -> Result<(), RuntimeError> {
        if ticket.on.is_some() || ticket.notes.meeting.is_some() {
            let event = Device::record(device, ticket.stream)?;
            let Ticket { notes, call, .. } = ticket;
            self.flying.push_back(Flying { event, notes, call });
        }
        self.sweep().map(|_| ())
    }

    /// Forgets what is done; whether anything was.
    pub(super) fn sweep(&mut self) -> Result<bool, RuntimeError> {
        let before = self.flying.len();
        while let Some(first) = self.flying.front_mut() {
            if !first.notes.look(&self.table, &first.call.what)? || !is_over(&first.event)? {
                break;
            }
            self.flying.pop_front();
        }
        Ok(self.flying.len() < before)
    }

    /// The reason that other ranks give for an error of the library's or the GPU's, if they do.
    /// Then nothing of this rank's waits on a stream any more.
    pub(super) fn explained(&mut self, error: RuntimeError) -> RuntimeError {
        let mut error = error;
        if matches!(error, RuntimeError::Device { .. }) {
            let began = Instant::now();
            while began.elapsed() < REASONS {
                let mut notes = self.flying.iter_mut().map(|f| &mut f.notes);
                let said = notes.find_map(|n| n.look(&self.table, "a call").err());
                if let Some(reason) = self.table.sound().err().or(said) {
                    error = reason;
                    break;
                }
                self.table.rests(PATIENCE);
            }
        }
        self.comms.abort();
        // The host is back, and does no more.
        self.pulse.rests();
        error
    }

    /// Waits until the host may go on with a call: until it is on its stream, or, where `comes`,
    /// until all have come to it too.
    pub(super) fn wait_for(
        &mut self,
        device: &mut Cuda,
        ticket: &mut Ticket,
        comes: bool,
    ) -> Result<(), RuntimeError> {
        let (began, mut looked) = (Instant::now(), Instant::now());
        loop {
            self.pulse.beats();
            if self.advance(device, ticket)? && !(comes && ticket.notes.meeting.is_some()) {
                return Ok(());
            }
            self.table.sound()?;
            if looked.elapsed() > SOUND {
                self.comms.sound()?;
                looked = Instant::now();
            }
            if began.elapsed() > self.table.world.timeout {
                return Err(Fabric::<Cuda>::overdue(self, ticket));
            }
            let waits_for_ranks = ticket.notes.meeting.is_some();
            self.table
                .rests(if waits_for_ranks { PATIENCE } else { REST });
        }
    }

    pub(super) fn settles(&mut self) -> Result<(), RuntimeError> {
        let (mut moved, mut looked) = (Instant::now(), Instant::now());
        while !self.flying.is_empty() {
            self.pulse.beats();
            if self.sweep()? {
                moved = Instant::now();
                continue;
            }
            self.table.sound()?;
            // A later one may say who failed.
            for flying in &mut self.flying {
                flying.notes.look(&self.table, &flying.call.what)?;
            }
            if looked.elapsed() > SOUND {
                self.comms.sound()?;
                looked = Instant::now();
            }
            if moved.elapsed() > self.table.world.timeout {
                return Err(self.stuck());
            }
            self.table.rests(REST);
        }
        Ok(())
    }

    /// The error of a stream that does not go on.
    pub(super) fn stuck(&self) -> RuntimeError {
        let open = |f: &&Flying| f.notes.meeting.is_some();
        let first = self.flying.iter().find(open).or(self.flying.front());
        let seconds = self.table.world.timeout.as_secs();
        match first {
            Some(Flying {
                notes:
                    Notes {
                        meeting: Some(meeting),
                        ..
                    },
                call,
                ..
            }) => RuntimeError::Watchdog {
                rank: self.table.rank,
                what: call.what.clone(),
                waiting_for: self.table.missing(meeting),
                seconds,
            },
            first => RuntimeError::Device {
                problem: format!(
                    "all ranks have come to {}, and NCCL is not done with it after {seconds} s",
                    first.map_or("their last call", |f| &f.call.what)
                ),
            },
        }
    }
}
