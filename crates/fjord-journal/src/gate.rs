//! The gate of a transaction: handles start and stop with one atomic operation each while it runs.
//!
//! Owns the count of open handles, the log blocks that they have reserved, and whether handles may start
//! (JBD2: `t_updates`, `t_outstanding_credits`, and `t_state` under `j_state_lock`).
//!
//! Invariants:
//! - the gate is closed and opened, and its limit and generation are set, under the journal's state lock;
//! - no handle starts while it is closed, but the one that makes a transaction complete;
//! - never more blocks are reserved than the log had room for when the limit was set. Nothing takes log
//!   blocks from a running transaction but its own partial commits, which set the limit anew; what
//!   becomes free is found by who is refused.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use fjord_block::lock::point;
use fjord_block::plant::{Bug, planted};

/// Reserved blocks, in the low bits.
const BLOCKS: u64 = u32::MAX as u64;
/// One open handle.
const HANDLE: u64 = 1 << 32;
/// Bits of the count of handles.
const HANDLES: u64 = (1 << 24) - 1;
/// No handle may start.
const CLOSED: u64 = 1 << 63;

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Gate {
    /// [`CLOSED`], open handles, and reserved blocks.
    word: AtomicU64,
    /// Most blocks that may be reserved.
    limit_blocks: AtomicU32,
    /// Number of partial commits frozen. Changes while the gate is closed.
    generation: AtomicU32,
}

/// Why a handle may not start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    Closed,
    /// More blocks than the limit allows.
    Full,
}

impl Gate {
    /// An open gate.
    pub(crate) fn new(limit_blocks: u32) -> Gate {
        Gate {
            word: AtomicU64::new(0),
            limit_blocks: AtomicU32::new(limit_blocks),
            generation: AtomicU32::new(0),
        }
    }

    /// Counts a handle in that may add `credits` blocks.
    pub(crate) fn enter(&self, credits: u32) -> Result<(), Refused> {
        point();
        let ignores = planted(Bug::HandleDuringFreeze);
        let limit = self.limit_blocks.load(Ordering::Acquire);
        let mut refused = Refused::Closed;
        let counted = |word: u64| {
            if word & CLOSED != 0 && !ignores {
                refused = Refused::Closed;
                return None;
            }
            refused = Refused::Full;
            add(word, credits, limit).and_then(|word| word.checked_add(HANDLE))
        };
        self.word
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, counted)
            .map_err(|_| refused)?;
        Ok(())
    }

    /// As [`Gate::enter`], whatever the gate says: the caller, under the state lock, knows that it may.
    pub(crate) fn enter_as_exception(&self, credits: u32) {
        self.word.fetch_add(HANDLE + u64::from(credits), Ordering::AcqRel);
    }

    /// Counts a handle out, which gives back `credits` blocks. `true` for the last one if a commit may be
    /// waiting for it.
    pub(crate) fn leave(&self, credits: u32) -> bool {
        point();
        let word = self.word.fetch_sub(HANDLE + u64::from(credits), Ordering::AcqRel);
        handles(word) == 1 && word & CLOSED != 0
    }

    /// Reserves `credits` more blocks for an open handle. `false` if the limit forbids it.
    pub(crate) fn reserve(&self, credits: u32) -> bool {
        let limit = self.limit_blocks.load(Ordering::Acquire);
        let more = |word| add(word, credits, limit);
        self.word.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok()
    }

    /// A partial commit has taken `blocks` of the reserved ones.
    pub(crate) fn take_blocks(&self, blocks: u32) {
        let fewer = |word: u64| Some(word - u64::from(blocks).min(word & BLOCKS));
        // It always has a value.
        let _ = self.word.fetch_update(Ordering::AcqRel, Ordering::Acquire, fewer);
    }

    /// No handle starts from now on.
    pub(crate) fn close(&self) {
        self.word.fetch_or(CLOSED, Ordering::AcqRel);
    }

    /// Handles start again.
    pub(crate) fn open(&self) {
        self.word.fetch_and(!CLOSED, Ordering::AcqRel);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.word.load(Ordering::Acquire) & CLOSED != 0
    }

    /// Number of open handles.
    pub(crate) fn handle_count(&self) -> u64 {
        handles(self.word.load(Ordering::Acquire))
    }

    /// Log blocks granted to open handles or used by buffers and revokes; without descriptors and commit block.
    pub(crate) fn reserved_blocks(&self) -> u32 {
        (self.word.load(Ordering::Acquire) & BLOCKS) as u32
    }

    pub(crate) fn set_limit(&self, limit_blocks: u32) {
        self.limit_blocks.store(limit_blocks, Ordering::Release);
    }

    pub(crate) fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    /// A partial commit begins; the gate is closed, and no handle is open.
    pub(crate) fn next_generation(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
    }
}

fn handles(word: u64) -> u64 {
    word >> 32 & HANDLES
}

/// The word with `credits` more blocks, if the limit allows that.
fn add(word: u64, credits: u32, limit: u32) -> Option<u64> {
    let blocks = (word & BLOCKS) + u64::from(credits);
    (blocks <= u64::from(limit)).then(|| word + u64::from(credits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_counted_and_blocks_are_limited() {
        let gate = Gate::new(10);
        assert_eq!(gate.enter(6), Ok(()));
        assert_eq!(gate.enter(5), Err(Refused::Full));
        assert_eq!(gate.enter(4), Ok(()));
        assert!(!gate.reserve(1));
        gate.set_limit(u32::MAX);
        assert!(gate.reserve(u32::MAX - 10));
        assert!(!gate.reserve(1));
        gate.take_blocks(u32::MAX - 10);
        gate.close();
        assert_eq!(gate.enter(0), Err(Refused::Closed));
        assert!(!gate.leave(4));
        assert_eq!((gate.handle_count(), gate.reserved_blocks()), (1, 6));
        assert!(gate.leave(0));
        gate.open();
        assert_eq!(gate.enter(0), Ok(()));
        assert!(!gate.leave(0), "nobody waits");
        gate.take_blocks(7);
        assert_eq!(gate.reserved_blocks(), 0);
    }
}
