//! Inode numbers going into use and out of it.
//!
//! Owns where new inodes lie: directories in the root are spread over the device,
//! everything else stays near its parent. Invariants: a number whose freeing has not
//! committed is not given out; a block of the inode table that holds no inode in use is
//! started from zeros instead of being read, so that what an earlier file system left
//! there is never taken for an inode.

use std::ops::Range;
use std::sync::atomic::Ordering;

use fjord_block::DeviceExt;
use fjord_format::bitmap;
use fjord_format::group::{GroupDesc, GroupFlags};
use fjord_format::types::{BlockNo, GroupNo, InodeNo};
use fjord_journal::Handle;
use rustix::io::Errno;

use super::group::Bitmap;
use super::table::{Cell, Overlay};
use crate::error::{Error, Result};
use crate::fs::FsInner;

/// Flex groups compared for a new directory in the root.
const SPREAD_CANDIDATES: u32 = 256;

/// Counts of a flex group, read without locks.
#[derive(Debug, Clone, Copy, Default)]
struct FlexCounts {
    free_inodes: u64,
    free_blocks: u64,
    used_dirs: u64,
}

impl FsInner {
    /// First block of a group's inode table. In an image opened read-only the descriptor may have a wrong
    /// checksum, as for Linux, if the table lies where it may.
    ///
    /// # Errors
    /// `Corrupt` if the descriptor is damaged, I/O errors.
    pub(crate) fn inode_table(&self, group: GroupNo) -> Result<BlockNo> {
        match self.read_desc(group) {
            Ok(desc) => Ok(desc.inode_table),
            Err(error) if error.is_corrupt() && self.options.read_only => {
                self.unverified_inode_table(group)?.ok_or(error)
            }
            Err(error) => Err(error),
        }
    }

    /// Takes a free inode number for a file or directory to be made in the directory
    /// `parent`. Takes [`INODE_CREDITS`](super::INODE_CREDITS).
    ///
    /// # Errors
    /// `ENOSPC` when all are in use, corruption, I/O and journal errors.
    pub(crate) fn alloc_inode(&self, h: &Handle, parent: InodeNo, is_dir: bool) -> Result<InodeNo> {
        let home = self.geo.group_of_inode(parent).unwrap_or_default();
        let first = if !is_dir {
            home
        } else if parent == InodeNo::ROOT {
            self.spread_group()
        } else {
            self.group_near(home)
        };
        // First its flex group, then all after it: groups in use stay together.
        let flex = self.geo.flex_first_group(first).0;
        let flex_end = flex.saturating_add(self.geo.groups_per_flex).min(self.groups.count());
        let in_flex = (first.0..flex_end).chain(flex..first.0.min(flex_end));
        let elsewhere = (flex_end..self.groups.count()).chain(0..flex);
        for group in in_flex.chain(elsewhere) {
            if let Some(ino) = self.alloc_inode_in(h, GroupNo(group), is_dir)? {
                return Ok(ino);
            }
        }
        Err(Errno::NOSPC.into())
    }

    /// A group for a directory that starts a hierarchy of its own: of the flex groups with
    /// at least average room, the one with the fewest directories.
    fn spread_group(&self) -> GroupNo {
        let flex_count = self.geo.group_count.div_ceil(self.geo.groups_per_flex).max(1);
        let account = &self.groups.account;
        let mean_inodes = account.free_inodes() / u64::from(flex_count);
        let mean_blocks = account.free_blocks() / u64::from(flex_count);
        let start = self.groups.spread_turn.fetch_add(1, Ordering::Relaxed) % flex_count;
        let mut best: Option<(u64, u32)> = None;
        for step in 0..flex_count.min(SPREAD_CANDIDATES) {
            let flex = (start.wrapping_add(step)) % flex_count;
            let counts = self.flex_counts(flex);
            let roomy = counts.free_inodes > 0
                && counts.free_inodes >= mean_inodes
                && counts.free_blocks >= mean_blocks;
            if roomy && best.is_none_or(|(dirs, _)| counts.used_dirs < dirs) {
                best = Some((counts.used_dirs, flex));
            }
        }
        let flex = best.map_or(start, |(_, flex)| flex);
        GroupNo(flex.saturating_mul(self.geo.groups_per_flex))
    }

    /// A group for a directory below another: the parent's, unless its flex group is
    /// filling up, then the first after it that is not.
    fn group_near(&self, home: GroupNo) -> GroupNo {
        let flex_count = self.geo.group_count.div_ceil(self.geo.groups_per_flex).max(1);
        let account = &self.groups.account;
        let mean_inodes = account.free_inodes() / u64::from(flex_count);
        let mean_blocks = account.free_blocks() / u64::from(flex_count);
        let start = home.0 / self.geo.groups_per_flex;
        for step in 0..flex_count.min(SPREAD_CANDIDATES) {
            let flex = start.wrapping_add(step) % flex_count;
            let counts = self.flex_counts(flex);
            // A quarter below the mean is near enough to stay.
            if counts.free_inodes > mean_inodes / 4 * 3 && counts.free_blocks > mean_blocks / 4 * 3
            {
                return if step == 0 {
                    home
                } else {
                    GroupNo(flex.saturating_mul(self.geo.groups_per_flex))
                };
            }
        }
        home
    }

    fn flex_counts(&self, flex: u32) -> FlexCounts {
        let first = flex.saturating_mul(self.geo.groups_per_flex);
        let end = first.saturating_add(self.geo.groups_per_flex).min(self.groups.count());
        let cells = (first..end).filter_map(|group| self.groups.cells.get(group as usize));
        cells.fold(FlexCounts::default(), |sum, cell| FlexCounts {
            free_inodes: sum.free_inodes + u64::from(cell.free_inodes.load(Ordering::Relaxed)),
            free_blocks: sum.free_blocks + u64::from(cell.free.load(Ordering::Relaxed)),
            used_dirs: sum.used_dirs + u64::from(cell.used_dirs.load(Ordering::Relaxed)),
        })
    }

    fn alloc_inode_in(&self, h: &Handle, group: GroupNo, is_dir: bool) -> Result<Option<InodeNo>> {
        let cell = self.groups.cell(group)?;
        if cell.is_damaged() || cell.free_inodes.load(Ordering::Relaxed) == 0 {
            return Ok(None);
        }
        let mut guard = cell.lock.lock();
        let overlay = guard.get_or_insert_default();
        let mut desc = self.read_desc(group)?;
        let found = self.inode_bitmap(group, cell, &desc)?;
        let Some(bit) = self.free_inode_bit(group, &found, overlay) else {
            // The count was of numbers that are not for users.
            cell.free_inodes.store(0, Ordering::Relaxed);
            return Ok(None);
        };
        let Some(ino) = self.geo.inode_at(group, bit) else { return Ok(None) };
        if self.ensure_inode_room(&desc, bit).is_err() {
            return Ok(None);
        }
        self.take_inode_bit(h, (group, cell), overlay, (&mut desc, found), bit, is_dir)?;
        cell.free_inodes.fetch_sub(1, Ordering::Relaxed);
        Ok(Some(ino))
    }

    /// Takes the inode number at `bit` of a group; `false` if it is in use. One that was freed
    /// before its transaction committed can be taken.
    pub(super) fn take_inode_number(
        &self,
        h: &Handle,
        group: GroupNo,
        bit: u32,
        is_dir: bool,
    ) -> Result<bool> {
        let cell = self.groups.cell(group)?;
        let mut guard = cell.lock.lock();
        let overlay = guard.get_or_insert_default();
        let mut desc = self.read_desc(group)?;
        let found = self.inode_bitmap(group, cell, &desc)?;
        if bitmap::test(&found.contents(), bit) {
            return Ok(false);
        }
        self.ensure_inode_room(&desc, bit)?;
        self.take_inode_bit(h, (group, cell), overlay, (&mut desc, found), bit, is_dir)?;
        if overlay.busy_inodes.remove(bit..bit.saturating_add(1)) == 0 {
            let less = |free: u32| Some(free.saturating_sub(1));
            let _ = cell.free_inodes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
        Ok(true)
    }

    /// Allocates host space for the blocks that a new inode changes: bitmaps, inode table.
    fn ensure_inode_room(&self, desc: &GroupDesc, bit: u32) -> Result<()> {
        let index = u64::from(bit / self.geo.inodes_per_block());
        let blocks = [Some(desc.inode_bitmap), Some(desc.block_bitmap)];
        let table_block = desc.inode_table.checked_add(index);
        blocks.into_iter().chain([table_block]).flatten().try_for_each(|b| self.ensure_room(b, 1))
    }

    /// Sets the bit of a free inode number and updates everything except the count of numbers that
    /// can be allocated. The group's lock is held.
    fn take_inode_bit(
        &self,
        h: &Handle,
        (group, cell): (GroupNo, &Cell),
        overlay: &Overlay,
        (desc, found): (&mut GroupDesc, Bitmap),
        bit: u32,
        is_dir: bool,
    ) -> Result<()> {
        let fresh_block = self.unused_table_block(desc, &found, overlay, bit);
        let Some(free_inodes) = desc.free_inodes.checked_sub(1) else {
            return Err(Error::corrupt(
                "group descriptor",
                format!("group {group} counts no free inodes, but its inode {bit} is free"),
            ));
        };
        self.change_inode_bit(h, found, desc, bit, true)?;
        self.init_block_bitmap(h, group, cell, desc)?;
        let used = desc.itable_used(&self.geo);
        if self.geo.features.has_group_csum() && bit >= used {
            desc.itable_unused = self.geo.inodes_per_group.saturating_sub(bit.saturating_add(1));
        }
        self.init_flag(h, desc, GroupFlags::INODE_UNINIT);
        desc.free_inodes = free_inodes;
        if is_dir {
            desc.used_dirs = desc.used_dirs.saturating_add(1);
            self.directory_count_changes(h);
        }
        self.write_desc(h, group, desc)?;
        if let Some(block) = fresh_block {
            self.note_stale_tails(block)?;
            let buffer = self.meta.create(block);
            // It is zeroed.
            drop(h.get_create(&buffer)?);
        }
        cell.used_dirs.fetch_add(u32::from(is_dir), Ordering::Relaxed);
        self.groups.account.change_inodes(-1);
        Ok(())
    }

    /// Checks the old contents on disk of an inode-table block that is zeroed in memory, where replay
    /// would keep the bytes after the fields of an inode.
    fn note_stale_tails(&self, block: BlockNo) -> Result<()> {
        if !self.fsync_policy.replays_fields_only() {
            return Ok(());
        }
        let bytes = self.device.read_buf(self.byte_offset(block), self.geo.block_size as usize)?;
        self.hazards.table_block_zeroed(block, &bytes, self.geo.inode_size);
        Ok(())
    }

    fn free_inode_bit(&self, group: GroupNo, found: &Bitmap, overlay: &Overlay) -> Option<u32> {
        let contents = found.contents();
        let end = self.geo.inodes_per_group;
        let first = if group.0 == 0 { self.geo.first_inode.0.saturating_sub(1) } else { 0 };
        let mut at = first;
        loop {
            let bit = bitmap::next_clear(&contents, at, end)?;
            at = overlay.busy_inodes.next_missing(bit);
            if at == bit {
                return Some(bit);
            }
        }
    }

    /// The inode-table block of `bit`, if no other inode in it is or recently was in use and it is
    /// not in memory.
    fn unused_table_block(
        &self,
        desc: &GroupDesc,
        found: &Bitmap,
        overlay: &Overlay,
        bit: u32,
    ) -> Option<BlockNo> {
        let per_block = self.geo.inodes_per_block();
        let index = bit / per_block;
        let inodes: Range<u32> = index * per_block..(index + 1) * per_block;
        let block = desc.inode_table.checked_add(u64::from(index))?;
        let end = inodes.end.min(self.geo.inodes_per_group);
        let contents = found.contents();
        let unused = bitmap::is_range_clear(&contents, inodes.start, end - inodes.start)
            && !overlay.busy_inodes.intersects(inodes);
        (unused && self.meta.peek(block).is_none()).then_some(block)
    }

    /// Frees an inode number. It can be given out again when the handle's transaction has
    /// committed. Takes two credits.
    ///
    /// # Errors
    /// `Corrupt` if it is already free or reserved, I/O and journal errors.
    pub(crate) fn free_inode(&self, h: &Handle, ino: InodeNo, is_dir: bool) -> Result<()> {
        let bad = |detail| Error::corrupt("inode bitmap", format!("inode {ino} {detail}"));
        let location = self
            .geo
            .inode_location(ino)
            .filter(|_| ino >= self.geo.first_inode)
            .ok_or_else(|| bad("is reserved and cannot be freed"))?;
        let (group, bit) = (location.group, location.index);
        let cell = self.groups.cell(group)?;
        {
            let mut guard = cell.lock.lock();
            let mut desc = self.read_desc(group)?;
            let found = self.inode_bitmap(group, cell, &desc)?;
            if !bitmap::test(&found.contents(), bit) {
                return Err(bad("is already free"));
            }
            self.change_inode_bit(h, found, &mut desc, bit, false)?;
            desc.free_inodes = desc.free_inodes.saturating_add(1).min(self.geo.inodes_per_group);
            if is_dir {
                desc.used_dirs = desc.used_dirs.saturating_sub(1);
                self.directory_count_changes(h);
            }
            self.write_desc(h, group, &desc)?;
            let overlay = guard.get_or_insert_default();
            overlay.busy_inodes.insert(bit..bit + 1, self.geo.inodes_per_group);
            sub_dirs(cell, is_dir);
        }
        self.groups.account.change_inodes(1);
        self.list_freed_inode(h, group, bit);
        Ok(())
    }

    /// Whether the inode's bit is set.
    ///
    /// # Errors
    /// `Corrupt` if there is no such inode or the bitmap is damaged, I/O errors.
    pub(crate) fn inode_in_use(&self, ino: InodeNo) -> Result<bool> {
        let location = self
            .geo
            .inode_location(ino)
            .ok_or_else(|| Error::corrupt("inode number", format!("there is no inode {ino}")))?;
        let cell = self.groups.cell(location.group)?;
        let _guard = cell.lock.lock();
        let desc = self.read_desc(location.group)?;
        let found = self.inode_bitmap(location.group, cell, &desc)?;
        Ok(bitmap::test(&found.contents(), location.index))
    }
}

fn sub_dirs(cell: &Cell, is_dir: bool) {
    // A hint; a wrong count on disk must not make it wrap.
    let less = |dirs: u32| Some(dirs.saturating_sub(u32::from(is_dir)));
    let _ = cell.used_dirs.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
}
