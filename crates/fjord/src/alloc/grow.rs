//! Groups and blocks that growth adds to a mounted file system.
//!
//! Owns their way into use. Invariants: nothing of them can be picked before the transaction that
//! makes them part of the file system has committed, or an fsync that commits by itself could refer
//! to what a crash takes away; the layout is published before anything that needs it, and under the
//! lock of the last group, whose count of blocks it changes.

use std::sync::atomic::Ordering;

use fjord_format::bitmap;
use fjord_format::geometry::Geometry;
use fjord_format::group::GroupFlags;
use fjord_format::growth::NewGroup;
use fjord_format::types::GroupNo;
use fjord_journal::Handle;

use super::parts::ForeignRun;
use super::zones;
use crate::error::Result;
use crate::fs::FsInner;

impl FsInner {
    /// Reads what [`FsInner::begin_growth`] changes in the last group, so that nothing fails there
    /// that can fail before.
    ///
    /// # Errors
    /// Corruption and I/O errors.
    pub(crate) fn check_last_group(&self) -> Result<()> {
        let group = GroupNo(self.geo.group_count.saturating_sub(1));
        let cell = self.groups.cell(group)?;
        let _guard = cell.lock.lock();
        let desc = self.read_desc(group)?;
        self.block_bitmap(group, cell, &desc)?;
        self.ensure_room(desc.block_bitmap, 1)
    }

    /// Makes `next` the layout of the file system: the last group gets its new blocks, which are free
    /// once the transaction of `h` has committed, and groups without anything free are added. Takes
    /// [`RUN_CREDITS`](super::RUN_CREDITS).
    ///
    /// # Errors
    /// Corruption, I/O and journal errors. The layout is published all the same.
    pub(crate) fn begin_growth(
        &self,
        h: &Handle,
        next: Geometry,
        added: &[NewGroup],
    ) -> Result<()> {
        self.groups.cells.grow_to(next.group_count as usize);
        self.protect_groups(&next, added);
        let group = GroupNo(self.geo.group_count.saturating_sub(1));
        let cell = self.groups.cell(group)?;
        let mut guard = cell.lock.lock();
        let mut desc = self.read_desc(group)?;
        let found = self.block_bitmap(group, cell, &desc)?;
        let (first, end) = (self.geo.clusters_in_group(group), next.clusters_in_group(group));
        self.geo.publish(next);
        if let Some(parts) = self.parts.get() {
            parts.grow(foreign_runs(&self.geo, added));
        }
        let count = end.saturating_sub(first);
        if count == 0 {
            return Ok(());
        }
        let buffer = self.stored_bitmap(h, found, desc.block_bitmap)?;
        {
            let mut bits = h.get_write(&buffer)?;
            bitmap::clear_range(&mut bits, first, count);
            desc.update_block_bitmap_csum(&bits, &self.geo)?;
        }
        desc.free_clusters = desc.free_clusters.saturating_add(count);
        self.init_flag(h, &mut desc, GroupFlags::BLOCK_UNINIT);
        self.write_desc(h, group, &desc)?;
        guard.get_or_insert_default().busy.insert(first..end, self.geo.clusters_per_group);
        drop(guard);
        self.groups.account.freed(count);
        self.list_freed_blocks(h, group, first, count);
        Ok(())
    }

    /// Keeps files off the metadata of groups that are being added.
    fn protect_groups(&self, next: &Geometry, added: &[NewGroup]) {
        let mut found = Vec::new();
        for NewGroup { group, desc, .. } in added {
            let base = u64::from(next.base_metadata_blocks(*group));
            zones::append(&mut found, next.group_first_block(*group).0, base);
            zones::append(&mut found, desc.block_bitmap.0, 1);
            zones::append(&mut found, desc.inode_bitmap.0, 1);
            zones::append(&mut found, desc.inode_table.0, next.inode_table_blocks().into());
        }
        let count = self.groups.zones.add(found);
        self.groups.fixed_blocks.fetch_add(count, Ordering::Relaxed);
    }

    /// Puts groups into use whose transaction has committed; `root_blocks` of all blocks are for root
    /// only from now on.
    pub(crate) fn end_growth(&self, added: &[NewGroup], root_blocks: u64) {
        let account = &self.groups.account;
        account.grow(self.geo.block_count, root_blocks);
        for NewGroup { group, desc, .. } in added {
            // Made by `begin_growth`.
            let Ok(cell) = self.groups.cell(*group) else { continue };
            let _guard = cell.lock.lock();
            cell.free.store(desc.free_clusters, Ordering::Relaxed);
            cell.forget_longest();
            cell.free_inodes.store(desc.free_inodes, Ordering::Relaxed);
            account.add_group(desc.free_clusters, desc.free_inodes);
        }
    }
}

/// Bitmaps and inode tables of the groups that lie in other groups.
fn foreign_runs(geo: &Geometry, added: &[NewGroup]) -> Vec<ForeignRun> {
    let table_blocks = geo.inode_table_blocks();
    let mut runs: [Vec<ForeignRun>; 3] = Default::default();
    for NewGroup { group, desc, .. } in added {
        let places =
            [(desc.block_bitmap, 1), (desc.inode_bitmap, 1), (desc.inode_table, table_blocks)];
        for (runs, (start, blocks)) in runs.iter_mut().zip(places) {
            if geo.group_of_block(start) != Some(*group) {
                ForeignRun::append(runs, start.0, blocks, *group);
            }
        }
    }
    runs.concat()
}
