//! Growth of a mounted file system.
//!
//! Owns the order of a step, which is one descriptor block at most:
//!
//! 1. the metadata of new groups is written, behind the end of the file system, and flushed;
//! 2. one transaction has the rest: superblock, descriptors, the last group's bitmap, the resize inode;
//! 3. it is committed and checkpointed, the superblock last;
//! 4. the new groups come into use in memory.
//!
//! Invariants: a crash leaves the file system before or after a step; nothing refers to a new block
//! before step 3 is over, so that every fsync policy keeps its promises; the backups of superblock and
//! descriptors are written last, outside of the journal, as Linux does: a crash leaves older ones there,
//! of a smaller file system, which no check compares with the originals.

mod backups;
mod groups;
mod inode;

use std::sync::Arc;

use fjord_format::geometry::Geometry;
use fjord_format::growth::{self, GrowthLimit, NewGroup};
use fjord_format::types::Tid;
use fjord_journal::{Handle, JournalError};
use rustix::io::Errno;

use crate::alloc::RUN_CREDITS;
use crate::error::{Error, Result};
use crate::fs::FsInner;
use crate::fs::superblock::Sizes;
use crate::resize::{NewSize, ResizeError, ResizeReport};
use inode::ResizeInode;

/// Blocks that every step changes: superblock, two blocks of descriptors, and the last group's bitmap
/// and descriptor.
const STEP_CREDITS: u32 = 3 + RUN_CREDITS;

impl FsInner {
    /// See [`crate::Fs::resize`].
    pub(crate) fn resize(self: &Arc<Self>, size: NewSize) -> Result<ResizeReport> {
        let _resizing = self.resize_lock.try_lock().ok_or(ResizeError::Busy)?;
        self.check_alive()?;
        if self.is_read_only() {
            return Err(ResizeError::ReadOnly.into());
        }
        let old: &Geometry = &self.geo;
        let before = self.sb.snapshot();
        // What was in the device already may hold anything.
        let zero_from_bytes = self.device.ensure_size(0)?;
        let target = self.target(old, size, zero_from_bytes)?;
        if target.block_count > old.block_count {
            let root_blocks = |blocks: u64| {
                let share = u128::from(before.r_blocks_count()) * u128::from(blocks);
                // Not more than the blocks themselves.
                (share / u128::from(old.block_count).max(1)) as u64
            };
            loop {
                let next = growth::next_step(&self.geo, &target);
                let is_last = next.block_count == target.block_count;
                self.step(next, zero_from_bytes, &root_blocks)?;
                if is_last {
                    break;
                }
            }
            if before.s_overhead_clusters.get() != 0 {
                self.sb.note_overhead(self.overhead_without_areas());
            }
        }
        if let Err(error) = self.write_backups() {
            self.warn(format_args!(
                "the backups of superblock and descriptors are of the old size: {error}"
            ));
        }
        Ok(ResizeReport {
            old_bytes: bytes(old),
            new_bytes: bytes(&self.geo),
            old_inodes: old.inode_count,
            new_inodes: self.geo.inode_count,
        })
    }

    /// The layout to reach, for which the device is large enough then.
    fn target(&self, old: &Geometry, size: NewSize, device_bytes: u64) -> Result<Geometry> {
        let wanted_bytes = match size {
            NewSize::Bytes(bytes) => bytes,
            NewSize::Plus(more) => bytes(old).saturating_add(more),
            NewSize::Device => device_bytes,
        };
        let wanted = wanted_bytes >> old.block_size_bits;
        if wanted < old.block_count {
            let old_bytes = bytes(old);
            return Err(ResizeError::Shrink { old_bytes, new_bytes: wanted_bytes }.into());
        }
        let (max, limit) = growth::block_count_max(old);
        if wanted > max && wanted > old.block_count {
            return Err(limit_error(old, max, limit));
        }
        let target = growth::grown(old, wanted)?;
        if target.block_count == old.block_count {
            return Ok(target);
        }
        let device_bytes = self.device.ensure_size(wanted_bytes)?;
        if device_bytes < wanted_bytes {
            return Err(ResizeError::DeviceTooSmall { device_bytes, wanted_bytes }.into());
        }
        Ok(target)
    }

    /// Grows to `next`; see the module.
    fn step(
        self: &Arc<Self>,
        next: Geometry,
        zero_from_bytes: u64,
        root_blocks: &impl Fn(u64) -> u64,
    ) -> Result<()> {
        let root_blocks = root_blocks(next.block_count);
        let is_zero = |start: fjord_format::BlockNo, _| self.byte_offset(start) >= zero_from_bytes;
        let added = growth::new_groups(&self.geo, &next, is_zero)?;
        let resize_inode = ResizeInode::load(self, &next)?;
        let credits = STEP_CREDITS + resize_inode.as_ref().map_or(0, ResizeInode::credits);
        if credits > self.journal().credits_max() {
            let why = format!("the journal is too short for a change of {credits} blocks");
            return Err(ResizeError::Offline(why).into());
        }
        self.check_last_group()?;
        self.write_groups(&next, &added)?;
        self.journal().checkpoint_last(Some(self.superblock_place().0));
        let logged = self.log_step(next, &added, resize_inode, credits, root_blocks);
        self.journal().checkpoint_last(None);
        logged?;
        self.end_growth(&added, root_blocks);
        Ok(())
    }

    /// The transaction of a step, committed and checkpointed.
    fn log_step(
        self: &Arc<Self>,
        next: Geometry,
        added: &[NewGroup],
        resize_inode: Option<ResizeInode>,
        credits: u32,
        root_blocks: u64,
    ) -> Result<()> {
        let handle = self.start(credits)?;
        let changed = self.change(&handle, next, added, resize_inode, root_blocks);
        if let Err(error) = changed {
            // Half of it is in the transaction, which must not commit.
            drop(handle);
            return Err(self.give_up(error));
        }
        let fs = Arc::downgrade(self);
        handle.on_commit(move |result| {
            if let (Some(fs), Ok(())) = (fs.upgrade(), result) {
                fs.sb.sizes_committed();
            }
        });
        let tid = handle.stop();
        self.commit_step(tid).map_err(|error| self.give_up(error.into()))
    }

    /// Makes a step durable, and checkpoints it: Linux and e2fsck look at the superblock and the
    /// descriptors before they replay a log, and must not find a size without its descriptors.
    fn commit_step(&self, tid: Tid) -> Result<(), JournalError> {
        self.journal().commit(tid)?;
        self.journal().checkpoint_all()
    }

    fn change(
        &self,
        h: &Handle,
        next: Geometry,
        added: &[NewGroup],
        resize_inode: Option<ResizeInode>,
        root_blocks: u64,
    ) -> Result<()> {
        let first_new_block = self.geo.desc_block_count;
        self.begin_growth(h, next, added)?;
        if let Some(resize_inode) = resize_inode {
            resize_inode.change(self, h)?;
        }
        for index in first_new_block..self.geo.desc_block_count {
            let Some(block) = self.geo.desc_block_location(index) else { continue };
            let buffer = self.desc_block(block)?;
            // Comes back as zeros.
            drop(h.get_create(&buffer)?);
        }
        for NewGroup { group, desc, .. } in added {
            self.write_desc(h, *group, desc)?;
        }
        let more_blocks: u64 = added.iter().map(|new| u64::from(new.desc.free_clusters)).sum();
        let more_inodes: u32 = added.iter().map(|new| new.desc.free_inodes).sum();
        let free_blocks = self.groups.free_blocks_total().saturating_add(more_blocks);
        let free_inodes = self.groups.free_inodes_total().saturating_add(more_inodes);
        let sizes = Sizes {
            blocks: self.geo.block_count,
            root_blocks,
            free_blocks,
            inodes: self.geo.inode_count,
            free_inodes,
            // At most a quarter of the block size.
            reserved_gdt_blocks: self.geo.reserved_gdt_blocks as u16,
        };
        self.change_sizes(h, &sizes)
    }

    /// Fixed metadata and the journal, as Linux counts it: without what lies behind the log.
    fn overhead_without_areas(&self) -> u64 {
        let journal = self.journal().superblock().map_or(0, |superblock| superblock.s_maxlen);
        self.groups.fixed_blocks().saturating_add(u64::from(journal))
    }

    /// Stops the journal: what memory has and what the device has differ.
    fn give_up(&self, error: Error) -> Error {
        self.note_write_error(&error);
        error
    }
}

fn bytes(geo: &Geometry) -> u64 {
    geo.block_count.saturating_mul(u64::from(geo.block_size))
}

fn limit_error(geo: &Geometry, max: u64, limit: GrowthLimit) -> Error {
    let max_bytes = max.max(geo.block_count).saturating_mul(u64::from(geo.block_size));
    ResizeError::Limit { limit, max_bytes }.into()
}

/// A lack of room below, before anything was changed.
fn no_room(error: Error) -> Error {
    if !error.is(Errno::NOSPC) {
        return error;
    }
    Error::NoRoom(
        "the file system that holds the image has no room for the metadata of more block groups; make \
         room there and try again"
            .into(),
    )
}
