//! The table of live buffers: those with a version that is not checkpointed.
//!
//! Invariant: a block has at most one live buffer. A clean one may be replaced, and is removed.

use std::collections::HashMap;
use std::sync::Arc;

use fjord_block::lock::{Mutex, Rank};
use fjord_format::types::{BlockNo, Tid};

use crate::buffer::{Buffer, Joined, WriteGuard};
use crate::error::{JournalError, Result};

/// The live buffers of a journal.
pub(crate) struct LiveBuffers {
    by_block: Mutex<HashMap<BlockNo, Arc<Buffer>>>,
}

impl Default for LiveBuffers {
    fn default() -> LiveBuffers {
        LiveBuffers { by_block: Mutex::new(Rank::LiveBuffers, HashMap::new()) }
    }
}

impl LiveBuffers {
    /// The live buffer of a block.
    pub(crate) fn get(&self, block: BlockNo) -> Option<Arc<Buffer>> {
        self.by_block.lock().get(&block).cloned()
    }

    /// Number of live buffers.
    pub(crate) fn len(&self) -> usize {
        self.by_block.lock().len()
    }

    /// Registers the buffer as live and part of transaction `tid`. Errs when another buffer of its
    /// block is live.
    pub(crate) fn join(
        &self,
        buffer: &Arc<Buffer>,
        tid: Tid,
        contents: &WriteGuard<'_>,
    ) -> Result<Joined> {
        // Under the lock of the table, so that no thread removes a clean buffer meanwhile.
        let mut live = self.by_block.lock();
        let known = live.entry(buffer.block()).or_insert_with(|| buffer.clone());
        if !Arc::ptr_eq(known, buffer) {
            if known.is_dirty() {
                return Err(JournalError::TwoBuffers(buffer.block()));
            }
            *known = buffer.clone();
        }
        Ok(buffer.join(tid, contents))
    }

    /// The live buffers of blocks that `wanted` selects.
    pub(crate) fn select(&self, wanted: impl Fn(BlockNo) -> bool) -> Vec<Arc<Buffer>> {
        let live = self.by_block.lock();
        live.iter().filter(|(block, _)| wanted(**block)).map(|(_, buffer)| buffer.clone()).collect()
    }

    /// Removes those of `buffers` that have become clean.
    pub(crate) fn remove_clean<'a>(&self, buffers: impl Iterator<Item = &'a Arc<Buffer>>) {
        let mut live = self.by_block.lock();
        for buffer in buffers {
            let known = live.get(&buffer.block());
            if known.is_some_and(|known| Arc::ptr_eq(known, buffer)) && !buffer.is_dirty() {
                live.remove(&buffer.block());
            }
        }
    }
}
