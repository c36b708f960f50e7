//! The blocks of a large commit in pieces, which the threads that wait for it write together ("cooperative
//! journal I/O" of parallel journaling, FAST '18).
//!
//! Owns which pieces have been claimed and sent. In a log a piece is a descriptor with its blocks, so it needs
//! nothing of the others: a thread claims it by an atomic cursor, and takes no lock until it is sent. Without a log
//! it is some blocks that go to their home locations.
//!
//! Invariants: each piece is claimed once; who claims one tells its end, also by a panic; the thread that
//! dispatches the commit goes on when all have been sent.

use std::sync::atomic::{AtomicUsize, Ordering};

use fjord_block::lock::{Condvar, Mutex, Rank, point};
use fjord_block::plant::{Bug, planted};
use fjord_block::{Class, Ticket};

use crate::error::{JournalError, Result};
use crate::transaction::{Sequence, Version};

/// See the [module](self).
pub(crate) struct CommitPieces {
    /// The commit's sequence in the log.
    pub(crate) sequence: Sequence,
    /// What the pieces write, in the order of the log.
    versions: Vec<Version>,
    /// Versions of each piece; they divide `versions` without a rest.
    piece_versions: usize,
    /// Journal block of the first descriptor; `None` without a log.
    pub(crate) start: Option<u32>,
    /// Class of the writes.
    pub(crate) class: Class,
    /// The first piece that nobody has claimed, or more than there are.
    next: AtomicUsize,
    sent: Mutex<SentPieces>,
    /// Signalled, with `sent`, when a piece has been sent.
    moved: Condvar,
}

/// Guarded by `CommitPieces::sent`.
#[derive(Default)]
struct SentPieces {
    /// Pieces that are sent, or that failed.
    count: usize,
    tickets: Vec<Ticket>,
    error: Option<JournalError>,
}

/// A claimed piece. Dropped without an end, it has failed.
pub(crate) struct Piece<'a> {
    pieces: &'a CommitPieces,
    /// Which it is, from 0 on.
    pub(crate) index: usize,
    has_ended: bool,
}

impl CommitPieces {
    /// Pieces of so many versions each.
    pub(crate) fn new(
        sequence: Sequence,
        versions: Vec<Version>,
        piece_versions: usize,
        start: Option<u32>,
        class: Class,
    ) -> CommitPieces {
        let sent = Mutex::new(Rank::CommitPieces, SentPieces::default());
        let (next, moved) = (AtomicUsize::new(0), Condvar::new());
        CommitPieces { sequence, versions, piece_versions, start, class, next, sent, moved }
    }

    /// Number of pieces.
    pub(crate) fn count(&self) -> usize {
        self.versions.len() / self.piece_versions
    }

    /// Log blocks of each piece.
    pub(crate) fn piece_blocks(&self) -> usize {
        1 + self.piece_versions
    }

    /// Whether a thread may still claim a piece.
    pub(crate) fn has_unclaimed(&self) -> bool {
        self.next.load(Ordering::Relaxed) < self.count()
    }

    /// Claims the next piece.
    pub(crate) fn claim(&self) -> Option<Piece<'_>> {
        point();
        let index = match planted(Bug::PieceClaimedTwice) {
            true => {
                let next = self.next.load(Ordering::Relaxed);
                point();
                self.next.fetch_add(1, Ordering::Relaxed);
                next
            }
            // What the piece reads has been published with the pieces.
            false => self.next.fetch_add(1, Ordering::Relaxed),
        };
        // Not `then_some`: a piece that is made and dropped would count as one that failed.
        (index < self.count()).then(|| Piece { pieces: self, index, has_ended: false })
    }

    /// Waits until all pieces have been sent. Returns their writes.
    ///
    /// # Errors
    /// That of a piece; others may have been sent.
    pub(crate) fn wait(&self) -> Result<Vec<Ticket>> {
        let mut sent = self.sent.lock();
        while sent.count < self.count() && !planted(Bug::CommitBeforeLastPiece) {
            self.moved.wait(&mut sent);
        }
        match sent.error.take() {
            Some(error) => Err(error),
            None => Ok(std::mem::take(&mut sent.tickets)),
        }
    }

    /// The commit fails: nobody claims more, and what has been claimed is sent, or not at all, from here on.
    pub(crate) fn give_up(&self) {
        let claimed_count = self.next.swap(self.count(), Ordering::Relaxed).min(self.count());
        let mut sent = self.sent.lock();
        while sent.count < claimed_count {
            self.moved.wait(&mut sent);
        }
    }

    fn end(&self, sent_piece: Result<Vec<Ticket>>) {
        let mut sent = self.sent.lock();
        sent.count += 1;
        match sent_piece {
            Ok(mut tickets) => sent.tickets.append(&mut tickets),
            Err(error) => drop(sent.error.get_or_insert(error)),
        }
        drop(sent);
        if !planted(Bug::PieceEndWakesNobody) {
            self.moved.notify_all();
        }
    }
}

impl Piece<'_> {
    /// What it writes.
    pub(crate) fn versions(&self) -> &[Version] {
        let first = self.index * self.pieces.piece_versions;
        &self.pieces.versions[first..first + self.pieces.piece_versions]
    }

    /// It is sent, or has failed.
    pub(crate) fn end(mut self, sent: Result<Vec<Ticket>>) {
        self.has_ended = true;
        self.pieces.end(sent);
    }
}

impl Drop for Piece<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            let lost = "a thread that was to write a part of the log has panicked";
            self.pieces.end(Err(JournalError::Usage(lost.into())));
        }
    }
}
