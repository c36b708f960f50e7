//! The table of live buffers: those with a version that is not checkpointed.
//!
//! Invariant: a block has at most one live buffer. A clean one may be replaced, and is removed. A block's
//! number names the shard of the table that it is in; no thread holds two.

use std::collections::HashMap;
use std::sync::Arc;

use fjord_block::lock::{Mutex, Rank};
use fjord_block::plant::{Bug, planted};
use fjord_format::types::{BlockNo, Tid};
use foldhash::fast::RandomState;

use crate::buffer::{Buffer, Joined, WriteGuard};
use crate::error::{JournalError, Result};

/// More than threads that change metadata at a time; fewer where a model check tries each order of locks.
const SHARD_COUNT: usize = if cfg!(feature = "model") { 2 } else { 64 };

type Shard = Mutex<HashMap<BlockNo, Arc<Buffer>, RandomState>>;

/// The live buffers of a journal.
pub(crate) struct LiveBuffers {
    /// By block.
    shards: [Shard; SHARD_COUNT],
}

impl Default for LiveBuffers {
    fn default() -> LiveBuffers {
        let shard = |_| Mutex::new(Rank::LiveBuffers, HashMap::default());
        LiveBuffers { shards: std::array::from_fn(shard) }
    }
}

impl LiveBuffers {
    /// Blocks that are changed together lie beside each other or a group apart: multiplied, they spread.
    fn shard(&self, block: BlockNo) -> &Shard {
        let spread = block.0.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        &self.shards[(spread >> 32) as usize % SHARD_COUNT]
    }

    /// The live buffer of a block.
    pub(crate) fn get(&self, block: BlockNo) -> Option<Arc<Buffer>> {
        self.shard(block).lock().get(&block).cloned()
    }

    /// Number of live buffers; those that join or leave meanwhile are counted or not.
    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().len()).sum()
    }

    /// Registers the buffer as live and part of transaction `tid`. Errs when another buffer of its
    /// block is live.
    pub(crate) fn join(
        &self,
        buffer: &Arc<Buffer>,
        tid: Tid,
        contents: &WriteGuard<'_>,
    ) -> Result<Joined> {
        // Under the lock of the shard, so that no thread removes a clean buffer meanwhile.
        let mut live = self.shard(buffer.block()).lock();
        let known = live.entry(buffer.block()).or_insert_with(|| buffer.clone());
        if !Arc::ptr_eq(known, buffer) {
            if known.is_dirty() {
                return Err(JournalError::TwoBuffers(buffer.block()));
            }
            *known = buffer.clone();
        }
        Ok(buffer.join(tid, contents))
    }

    /// The live buffers of blocks that `wanted` selects; those that join or leave meanwhile may be missing.
    pub(crate) fn select(&self, wanted: impl Fn(BlockNo) -> bool) -> Vec<Arc<Buffer>> {
        let mut selected = Vec::new();
        for shard in &self.shards {
            let live = shard.lock();
            let buffers = live.iter().filter(|(block, _)| wanted(**block));
            selected.extend(buffers.map(|(_, buffer)| buffer.clone()));
        }
        selected
    }

    /// Removes those of `buffers` that have become clean.
    pub(crate) fn remove_clean<'a>(&self, buffers: impl Iterator<Item = &'a Arc<Buffer>>) {
        for buffer in buffers {
            let was_clean = planted(Bug::BufferLostWhileFetched) && !buffer.is_dirty();
            let mut live = self.shard(buffer.block()).lock();
            let known = live.get(&buffer.block());
            let is_known = known.is_some_and(|known| Arc::ptr_eq(known, buffer));
            if is_known && (was_clean || !buffer.is_dirty()) {
                live.remove(&buffer.block());
            }
        }
    }
}
