//! Cooperative commits: a large commit's pieces ([`crate::commit_pieces`]) are built and submitted by the thread that
//! dispatches it and by those that wait for it.
//!
//! Owns no state. The last piece, which may be a part of one, and the revoke blocks are the dispatching thread's:
//! so it ends the epoch, and a commit of one piece is written as if there were none.

use std::collections::BTreeSet;
use std::sync::Arc;

use fjord_block::plant::{Bug, planted};
use fjord_block::{Class, Request, Ticket};
use fjord_format::jbd2::ChecksumVersion;

use super::build::{LogBlocks, LogShape};
use super::protocol::Protocol;
use crate::commit_pieces::{CommitPieces, Piece};
use crate::error::Result;
use crate::journal::Journal;
use crate::log::home_requests;
use crate::options::JournalIo;
use crate::pipeline::Commit;
use crate::transaction::{Batch, Version};

/// Blocks of a piece without a log.
const HOME_PIECE_BLOCKS: usize = 256;

impl Journal {
    /// Takes from `batch` what other threads can write too, and wakes threads that wait for the commit. `None` for a
    /// commit that one thread writes.
    pub(super) fn share_pieces(
        &self,
        protocol: Protocol<'_>,
        batch: &mut Batch,
        commit: &Commit,
        class: Class,
    ) -> Option<Arc<CommitPieces>> {
        let piece_versions = match protocol {
            // The checksum of a whole transaction goes through its blocks in their order.
            Protocol::Epochs(log) | Protocol::Waits(log)
                if log.format.checksum != ChecksumVersion::V1 =>
            {
                log.versions_per_descriptor
            }
            Protocol::NoLog => HOME_PIECE_BLOCKS,
            Protocol::Epochs(_) | Protocol::Waits(_) | Protocol::EndStream(..) => return None,
        };
        if self.inner.io != JournalIo::Cooperative || batch.versions.len() <= piece_versions {
            return None;
        }
        let start = protocol.log().map(|log| {
            let shape = LogShape::new(log, 0, batch.revoked.len());
            let is_before = !planted(Bug::PiecesOverRevokes);
            log.after(commit.log_start, if is_before { shape.revoke_blocks as u32 } else { 0 })
        });
        let count = (batch.versions.len() - 1) / piece_versions;
        let rest = batch.versions.split_off(count * piece_versions);
        let versions = std::mem::replace(&mut batch.versions, rest);
        let pieces = CommitPieces::new(commit.sequence, versions, piece_versions, start, class);
        let pieces = Arc::new(pieces);
        let state = self.inner.state.lock();
        commit.share(pieces.clone());
        for _ in 0..count.min(self.inner.helpers_max) {
            if !commit.waiters.iter().any(|waiters| waiters.wake_one()) {
                break;
            }
        }
        drop(state);
        Some(pieces)
    }

    /// Writes pieces until all have been claimed. Returns the writes of this thread.
    pub(super) fn write_pieces(&self, pieces: &CommitPieces) -> Vec<Ticket> {
        let mut own = Vec::new();
        while let Some(piece) = pieces.claim() {
            let requests = self.check_running().and_then(|()| self.requests_of(pieces, &piece));
            let sent = requests.map(|requests| self.inner.device.submit(requests));
            own.extend(sent.iter().flatten().cloned());
            piece.end(sent);
        }
        own
    }

    /// The writes of a piece.
    fn requests_of(&self, pieces: &CommitPieces, piece: &Piece<'_>) -> Result<Vec<Request>> {
        let (Some(log), Some(start)) = (&self.inner.log, pieces.start) else {
            return Ok(self.requests_home(piece.versions(), pieces.class));
        };
        let at = log.after(start, (piece.index * pieces.piece_blocks()) as u32);
        let none = BTreeSet::new();
        let blocks = LogBlocks::build(log, pieces.sequence.0, piece.versions(), &none)?;
        log.write_requests(at, blocks.bufs, pieces.class)
    }

    /// The writes of versions to their home locations.
    pub(super) fn requests_home(&self, versions: &[Version], class: Class) -> Vec<Request> {
        let blocks = versions.iter();
        let blocks = blocks.map(|(buffer, version)| (buffer.block(), version.clone())).collect();
        home_requests(self.inner.block_size, blocks, class)
    }

    /// Writes pieces of a commit that this thread waits for, and waits for these writes.
    pub(super) fn help(&self, pieces: &CommitPieces) {
        let own = self.write_pieces(pieces);
        if pieces.class == Class::Sync {
            // The commit has the same tickets, and looks for a failure.
            let _ = Ticket::wait_all(&own);
        } else {
            // A flush of this thread's may end them sooner.
            own.iter().for_each(Ticket::start);
        }
    }
}
