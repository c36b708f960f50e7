//! Blocks and inode numbers that recovery marks as used.
//!
//! Fast commits and i-transactions name blocks and inodes whose bitmap changes a crash lost.
//! Invariants: only free blocks and inodes are adopted, never those of the file system's own
//! structures; one that the same transaction freed counts as free, and the free is cancelled.

use fjord_format::types::{BlockNo, InodeNo};
use fjord_journal::Handle;

use super::Run;
use crate::error::{Error, Result};
use crate::fs::FsInner;

impl FsInner {
    /// Marks exactly these blocks as used. Takes [`RUN_CREDITS`](super::RUN_CREDITS) for each
    /// group.
    ///
    /// # Errors
    /// `Corrupt` if one of them is in use, belongs to the file system's own structures or does
    /// not exist; I/O and journal errors.
    pub(crate) fn adopt_blocks(&self, h: &Handle, start: BlockNo, count: u64) -> Result<()> {
        if !self.geo.contains_range(start, count) || self.is_system_block(start, count) {
            return Err(Error::corrupt(
                "log",
                format!("{count} blocks at {start} cannot belong to a file"),
            ));
        }
        let (mut at, mut left) = (start, count);
        while left > 0 {
            let in_group = self.blocks_to_group_end(at).min(left);
            // Less than the blocks of a group.
            self.adopt_in_group(h, Run { start: at, len: in_group as u32 })?;
            at = BlockNo(at.0 + in_group);
            left -= in_group;
        }
        Ok(())
    }

    fn adopt_in_group(&self, h: &Handle, run: Run) -> Result<()> {
        let (group, bits) = self.place_of_run(run)?;
        let cell = self.groups.cell(group)?;
        let mut guard = cell.lock.lock();
        self.change_block_bits(h, group, cell, bits.clone(), true)?;
        let overlay = guard.get_or_insert_default();
        let was_freed = overlay.busy.remove(bits);
        cell.take_free(run.len - was_freed);
        drop(guard);
        self.groups.account.used(run.len - was_freed, 0);
        self.groups.account.unfreed(was_freed);
        Ok(())
    }

    /// Marks exactly this inode number as used. Takes [`INODE_CREDITS`](super::INODE_CREDITS).
    ///
    /// # Errors
    /// `Corrupt` if it is in use, reserved or does not exist; I/O and journal errors.
    pub(crate) fn adopt_inode(&self, h: &Handle, ino: InodeNo, is_dir: bool) -> Result<()> {
        let bad = |detail| Error::corrupt("log", format!("inode {ino} {detail}"));
        let location = self
            .geo
            .inode_location(ino)
            .filter(|_| ino >= self.geo.first_inode)
            .ok_or_else(|| bad("cannot be a file's"))?;
        if !self.take_inode_number(h, location.group, location.index, is_dir)? {
            return Err(bad("is created again although it is in use"));
        }
        Ok(())
    }
}
