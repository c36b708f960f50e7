//! Writes of file data, which come behind barriers.
//!
//! Owns the way of data to its place on the device. Data that overwrites older data would survive a power cut by
//! itself, also where it was written after a barrier that does not: so a write waits until the barriers before
//! it are durable. Where no barrier is outstanding that costs two loads.
//!
//! Invariant: the content of a write is final before barriers are looked at. What a file got after a barrier is
//! in no write that does not wait for that barrier.
//!
//! "Order by prefix" of `fjord_journal::Journal::make_barriers_durable`; blocks in the log need nothing of
//! this, since a commit has all that the barriers before it have.

use std::sync::{Arc, OnceLock};

use fjord_block::plant::{Bug, planted};
use fjord_block::{
    AlignedBuf, Capabilities, Class, Device, IoError, IoErrorKind, ReadTicket, Request, Ticket,
};
use fjord_journal::{Journal, JournalError};

/// The device as writers of data see it.
#[derive(Debug)]
pub(crate) struct DataDevice {
    device: Arc<dyn Device>,
    /// Set once, at the end of mount.
    journal: OnceLock<Journal>,
}

impl DataDevice {
    pub(crate) fn new(device: Arc<dyn Device>) -> DataDevice {
        DataDevice { device, journal: OnceLock::new() }
    }

    /// Sets the journal whose barriers count; only mount does, once.
    pub(crate) fn set_journal(&self, journal: Journal) {
        // A second call would be a bug of mount itself; the first journal stays.
        let _ = self.journal.set(journal);
    }

    fn wait_for_barriers(&self) -> Result<(), JournalError> {
        match self.journal.get() {
            Some(journal) if !planted(Bug::DataOvertakesBarriers) => {
                journal.make_barriers_durable().map(drop)
            }
            _ => Ok(()),
        }
    }
}

impl Device for DataDevice {
    fn capabilities(&self) -> &Capabilities {
        self.device.capabilities()
    }

    fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    /// Waits for outstanding barriers first.
    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
        let Err(error) = self.wait_for_barriers() else { return self.device.submit(batch) };
        let kind = error.io_error().map_or(IoErrorKind::Abandoned, |error| error.kind);
        let failed = |request: Request| {
            let (op, offset, len) = request.extent();
            Ticket::ready(Err(IoError::new(kind, op, offset, len)))
        };
        batch.into_iter().map(failed).collect()
    }

    fn submit_read(&self, offset: u64, bufs: Vec<AlignedBuf>, class: Class) -> ReadTicket {
        self.device.submit_read(offset, bufs, class)
    }
}
