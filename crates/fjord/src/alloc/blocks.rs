//! Allocating and freeing blocks.
//!
//! Owns the steps between memory and the bitmaps. Invariants: a block's bit changes in the
//! transaction that also changes the pointer to it; freed blocks are busy before their bit is
//! clear, so that they cannot be picked in between.

use fjord_block::plant::{Bug, planted};
use fjord_format::types::{BlockNo, InodeNo};
use fjord_journal::Handle;

use super::{Claim, Goal, Run};
use crate::error::{Error, Result};
use crate::fs::FsInner;

impl FsInner {
    /// Reserves `count` blocks for delayed allocation; `may_use_reserve` for writers who
    /// may use the blocks reserved for root. Leaves room for the metadata that all
    /// reserved blocks may need.
    ///
    /// # Errors
    /// `ENOSPC`. Writing back and committing may help: see the module `alloc`.
    pub(crate) fn reserve_blocks(&self, count: u64, may_use_reserve: bool) -> Result<()> {
        let claim = if may_use_reserve { Claim::Root } else { Claim::User };
        self.retry_after_discards(|| self.groups.account.reserve(count, claim))
    }

    /// Retries a claim if there are free blocks that only wait for their discard.
    fn retry_after_discards<T>(&self, claim: impl Fn() -> Result<T>) -> Result<T> {
        claim().or_else(|error| {
            let groups = &self.groups;
            if !groups.freed.is_discarding() {
                return Err(error);
            }
            groups.freed.reap(&groups.cells, &groups.account, true);
            claim()
        })
    }

    /// Releases reservations that were not passed to [`FsInner::use_picked`].
    pub(crate) fn release_blocks(&self, count: u64) {
        self.groups.account.release(count);
    }

    /// Blocks that are free on disk but were freed by a transaction that has not committed:
    /// after an `ENOSPC`, a commit makes this many more available.
    pub(crate) fn pending_free_blocks(&self) -> u64 {
        self.groups.account.pending_blocks()
    }

    /// Allocates picked blocks: sets their bits in the handle's transaction. `reserved` of the
    /// blocks were covered by a reservation, which is consumed (do not release it as well). Takes
    /// [`RUN_CREDITS`](super::RUN_CREDITS).
    ///
    /// # Errors
    /// `Corrupt` if a block is in use already, I/O and journal errors; the run is still
    /// picked then, and the reservation stands.
    pub(crate) fn use_picked(&self, h: &Handle, run: Run, reserved: u32) -> Result<()> {
        let (group, bits) = self.place_of_run(run)?;
        let cell = self.groups.cell(group)?;
        let mut guard = cell.lock.lock();
        self.change_block_bits(h, group, cell, bits.clone(), true)?;
        let overlay = guard.get_or_insert_default();
        let picked = overlay.busy.remove(bits);
        drop(guard);
        debug_assert_eq!(picked, run.len, "used blocks that were not picked");
        self.groups.account.used(run.len, reserved.min(run.len));
        Ok(())
    }

    /// Picks up to `want` unreserved blocks (at least one) and allocates them, with space on the
    /// host. Takes [`RUN_CREDITS`](super::RUN_CREDITS).
    ///
    /// # Errors
    /// `ENOSPC`, corruption, I/O and journal errors.
    pub(crate) fn alloc_blocks(&self, h: &Handle, goal: Goal, want: u32) -> Result<Run> {
        self.alloc(h, goal, want, |run| self.ensure_room(run.start, u64::from(run.len)))
    }

    /// As [`FsInner::alloc_blocks`], without space on the host: that must be allocated before the
    /// blocks are written.
    ///
    /// # Errors
    /// As for [`FsInner::alloc_blocks`].
    pub(crate) fn alloc_unwritten(&self, h: &Handle, goal: Goal, want: u32) -> Result<Run> {
        self.alloc(h, goal, want, |_| Ok(()))
    }

    fn alloc(
        &self,
        h: &Handle,
        goal: Goal,
        want: u32,
        prepare: impl FnOnce(Run) -> Result<()>,
    ) -> Result<Run> {
        let account = &self.groups.account;
        let want = u64::from(want.max(1));
        let claimed = self.retry_after_discards(|| account.claim(want, goal.claim))?;
        // No more than `want` was claimed.
        let picked = self.pick_blocks(goal, claimed as u32);
        let run = match picked {
            Ok(run) => run,
            Err(error) => {
                account.release(claimed);
                return Err(error);
            }
        };
        account.release(claimed.saturating_sub(u64::from(run.len)));
        prepare(run).and_then(|()| self.use_picked(h, run, run.len)).inspect_err(|_| {
            self.unpick(run);
            account.release(u64::from(run.len));
        })?;
        Ok(run)
    }

    /// Frees blocks, which may lie in several groups. They can be picked again when the
    /// handle's transaction has committed. Takes [`RUN_CREDITS`](super::RUN_CREDITS) for
    /// each group.
    ///
    /// # Errors
    /// `Corrupt` if a block is free already, belongs to the file system's own structures or
    /// does not exist; I/O and journal errors.
    pub(crate) fn free_blocks(&self, h: &Handle, start: BlockNo, count: u64) -> Result<()> {
        if !self.geo.contains_range(start, count) || self.is_system_block(start, count) {
            return Err(Error::corrupt(
                "block number",
                format!("{count} blocks at {start} do not belong to a file"),
            ));
        }
        let (mut at, mut left) = (start, count);
        while left > 0 {
            let in_group = self.blocks_to_group_end(at).min(left);
            // Less than the blocks of a group.
            self.free_in_group(h, Run { start: at, len: in_group as u32 })?;
            at = BlockNo(at.0 + in_group);
            left -= in_group;
        }
        Ok(())
    }

    /// Blocks from `block` (which exists) to the end of its group.
    pub(crate) fn blocks_to_group_end(&self, block: BlockNo) -> u64 {
        let per_group = u64::from(self.geo.blocks_per_group);
        per_group - block.0.saturating_sub(self.geo.first_data_block.0) % per_group
    }

    fn free_in_group(&self, h: &Handle, run: Run) -> Result<()> {
        let (group, bits) = self.place_of_run(run)?;
        let cell = self.groups.cell(group)?;
        {
            let mut guard = cell.lock.lock();
            self.change_block_bits(h, group, cell, bits.clone(), false)?;
            if planted(Bug::FreedTwice) {
                self.change_block_bits(h, group, cell, bits.clone(), false)?;
            }
            let overlay = guard.get_or_insert_default();
            if !planted(Bug::BlockReuse) {
                overlay.busy.insert(bits.clone(), self.geo.clusters_per_group);
            }
        }
        self.groups.account.freed(run.len);
        self.list_freed_blocks(h, group, bits.start, run.len);
        Ok(())
    }

    /// Frees one block of metadata (of a tree, a directory, attributes): it leaves the transaction,
    /// and replay will not restore its old contents.
    ///
    /// # Errors
    /// As [`FsInner::free_blocks`].
    pub(crate) fn forget_metadata(&self, h: &Handle, block: BlockNo) -> Result<()> {
        self.free_blocks(h, block, 1)?;
        let cached = self.meta.peek(block);
        h.forget(block, cached.as_ref())?;
        Ok(())
    }

    /// Whether one of the blocks belongs to the file system's own structures.
    pub(crate) fn is_system_block(&self, start: BlockNo, count: u64) -> bool {
        let end = start.0.saturating_add(count);
        self.groups.zones.overlaps_fixed(start.0, end)
            || self.groups.zones.overlaps_journal(start.0, end)
    }

    /// Checks that an inode may own blocks that it claims to own.
    ///
    /// # Errors
    /// `Corrupt` if they lie outside the file system or belong to its own structures (the
    /// journal inode owns the journal).
    pub(crate) fn check_owned(&self, ino: InodeNo, start: BlockNo, count: u64) -> Result<()> {
        let end = start.0.saturating_add(count);
        let zones = &self.groups.zones;
        let is_system = zones.overlaps_fixed(start.0, end)
            || (zones.overlaps_journal(start.0, end) && !self.owns_journal(ino));
        if self.geo.contains_range(start, count) && !is_system {
            return Ok(());
        }
        Err(Error::corrupt(
            "block map",
            format!("inode {ino} points to {count} blocks at {start}, which cannot belong to it"),
        ))
    }

    fn owns_journal(&self, ino: InodeNo) -> bool {
        // Other numbers for the journal have never been in use.
        ino == InodeNo::JOURNAL
    }
}
