//! The superblock of a mounted file system.
//!
//! Owns the raw superblock in memory and its two ways to disk: through the journal, and
//! directly at mount and unmount and for error records, when no transaction is open.
//!
//! Invariants: `RECOVER` is on disk before the log is used, and until the log is empty. A change
//! affects the first sector only; the checksum in the second stays valid
//! ([`RawSuperblock::fit_checksum`]), so that a power cut never tears the superblock. Linux's may
//! be torn; mount then looks for a copy in the log.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use fjord_block::lock::{Mutex, Rank};
use fjord_block::plant::{Bug, planted};
use fjord_block::{AlignedBuf, Buf, Class, Device, DeviceExt, Order, Request};
use fjord_format::features::{Compat, Features, Incompat, RoCompat};
use fjord_format::superblock::{FsState, RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSET_BYTES};
use fjord_format::{BlockNo, InodeNo};
use fjord_journal::{Buffer, Handle};

use crate::error::{Error, Result};
use crate::fs::FsInner;
use crate::inode::Inode;

/// What a device writes whole.
const SECTOR_BYTES: usize = 512;

/// The superblock in memory.
pub(crate) struct SuperState {
    /// Taken after a handle is open and before the superblock's buffer.
    raw: Mutex<RawSuperblock>,
    /// The inode of the orphan file; fixed.
    orphan_file: Option<InodeNo>,
    /// The sizes that the device has, while a growth has not committed: what is written past the journal
    /// must not tell of it. Taken under `raw`.
    uncommitted: Mutex<Option<Sizes>>,
    /// What `s_overhead_clusters` is to be after a growth; 0 for what it is.
    overhead_clusters: AtomicU32,
}

/// What growth changes in the superblock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) blocks: u64,
    pub(crate) root_blocks: u64,
    pub(crate) free_blocks: u64,
    pub(crate) inodes: u32,
    pub(crate) free_inodes: u32,
    pub(crate) reserved_gdt_blocks: u16,
}

impl Sizes {
    fn of(raw: &RawSuperblock) -> Sizes {
        Sizes {
            blocks: raw.blocks_count(),
            root_blocks: raw.r_blocks_count(),
            free_blocks: raw.free_blocks_count(),
            inodes: raw.s_inodes_count.get(),
            free_inodes: raw.s_free_inodes_count.get(),
            reserved_gdt_blocks: raw.s_reserved_gdt_blocks.get(),
        }
    }

    /// All of it is in the first sector.
    fn apply(&self, raw: &mut RawSuperblock) {
        raw.set_blocks_count(self.blocks);
        raw.set_r_blocks_count(self.root_blocks);
        raw.set_free_blocks_count(self.free_blocks);
        raw.s_inodes_count.set(self.inodes);
        raw.s_free_inodes_count.set(self.free_inodes);
        raw.s_reserved_gdt_blocks.set(self.reserved_gdt_blocks);
    }
}

impl SuperState {
    pub(crate) fn new(raw: RawSuperblock) -> Self {
        let ino = raw.s_orphan_file_inum.get();
        let has_file = raw.features().compat.contains(Compat::ORPHAN_FILE) && ino != 0;
        Self {
            orphan_file: has_file.then_some(InodeNo(ino)),
            raw: Mutex::new(Rank::Superblock, raw),
            uncommitted: Mutex::new(Rank::UncommittedSizes, None),
            overhead_clusters: AtomicU32::new(0),
        }
    }

    /// A copy of it as it is now.
    pub(crate) fn snapshot(&self) -> RawSuperblock {
        *self.raw.lock()
    }

    /// The transaction that [`FsInner::change_sizes`] was called in has committed.
    pub(crate) fn sizes_committed(&self) {
        *self.uncommitted.lock() = None;
    }

    /// Fixed metadata takes so many blocks by now. It is written at the unmount, since the field is in
    /// the second sector; Linux and fjord count for themselves.
    pub(crate) fn note_overhead(&self, blocks: u64) {
        self.overhead_clusters.store(u32::try_from(blocks).unwrap_or(0), Ordering::Relaxed);
    }

    /// Head of the orphan list, 0 if it is empty.
    pub(crate) fn last_orphan(&self) -> u32 {
        self.raw.lock().s_last_orphan.get()
    }

    /// Whether the orphan file may hold something.
    pub(crate) fn may_have_filed_orphans(&self) -> bool {
        self.raw.lock().features().ro_compat.contains(RoCompat::ORPHAN_PRESENT)
    }

    /// The inode of the orphan file, where the features name one.
    pub(crate) fn orphan_file_inode(&self) -> Option<InodeNo> {
        self.orphan_file
    }
}

impl FsInner {
    /// Whether an inode is no file of a user although its number is that of one.
    pub(crate) fn is_internal(&self, inode: &Inode) -> bool {
        inode.holds_value || self.sb.orphan_file_inode() == Some(inode.ino)
    }

    pub(crate) fn superblock_place(&self) -> (BlockNo, usize) {
        let block = SUPERBLOCK_OFFSET_BYTES / u64::from(self.geo.block_size);
        let offset = SUPERBLOCK_OFFSET_BYTES % u64::from(self.geo.block_size);
        (BlockNo(block), offset as usize)
    }

    fn superblock_buffer(&self) -> Result<Arc<Buffer>> {
        self.meta.read(self.superblock_place().0, |_| Ok(()))
    }

    /// Changes the superblock in the transaction of `h`.
    pub(crate) fn change_superblock(
        &self,
        h: &Handle,
        change: impl FnOnce(&mut RawSuperblock),
    ) -> Result<()> {
        let (_, offset) = self.superblock_place();
        let buffer = self.superblock_buffer()?;
        self.hazards.read_ahead_changed(h.tid());
        let mut raw = self.sb.raw.lock();
        change_whole(&mut raw, change);
        let mut bytes = h.get_write(&buffer)?;
        bytes[offset..offset + SUPERBLOCK_BYTES].copy_from_slice(raw.as_bytes());
        Ok(())
    }

    /// Gives the superblock the sizes of a growth. They count when [`SuperState::sizes_committed`]
    /// says so.
    pub(crate) fn change_sizes(&self, h: &Handle, sizes: &Sizes) -> Result<()> {
        self.change_superblock(h, |raw| {
            *self.sb.uncommitted.lock() = Some(Sizes::of(raw));
            sizes.apply(raw);
        })
    }

    /// Sets the head of the orphan list.
    pub(crate) fn set_last_orphan(&self, h: &Handle, ino: u32) -> Result<()> {
        self.change_superblock(h, |raw| raw.s_last_orphan.set(ino))
    }

    /// Says that the orphan file may hold something, as recovery must know.
    pub(crate) fn mark_orphan_present(&self, h: &Handle) -> Result<()> {
        self.mark(h, Features { ro_compat: RoCompat::ORPHAN_PRESENT, ..Features::default() })
    }

    /// Says that there are files of 2 GiB and more, as e2fsck wants to be told.
    pub(crate) fn mark_large_file(&self, h: &Handle) -> Result<()> {
        self.mark(h, Features { ro_compat: RoCompat::LARGE_FILE, ..Features::default() })
    }

    /// Says that there are extended attributes: without it e2fsck deletes them.
    pub(crate) fn mark_ext_attr(&self, h: &Handle) -> Result<()> {
        self.mark(h, Features { compat: Compat::EXT_ATTR, ..Features::default() })
    }

    /// Sets features on their first use, in a revision that has features.
    fn mark(&self, h: &Handle, more: Features) -> Result<()> {
        let is_set = {
            let raw = self.sb.raw.lock();
            raw.has_features() && raw.features().contains(&more)
        };
        if is_set { Ok(()) } else { self.change_superblock(h, |raw| raw.add_features(&more)) }
    }

    /// Writes the superblock straight to the device and flushes.
    pub(crate) fn write_superblock_now(
        &self,
        change: impl FnOnce(&mut RawSuperblock),
    ) -> Result<()> {
        let now = self.now().sec;
        self.write_changed_superblock(|raw| {
            change(raw);
            raw.set_wtime_seconds(u64::try_from(now).unwrap_or(0));
        })
    }

    fn write_changed_superblock(&self, change: impl FnOnce(&mut RawSuperblock)) -> Result<()> {
        let mut raw = self.sb.raw.lock();
        change_whole(&mut raw, change);
        let (block, offset) = self.superblock_place();
        // No transaction is open at mount, at unmount and after an error, so the block
        // in memory is what the device should have but for these bytes.
        let mut bytes = match self.meta.peek(block) {
            Some(buffer) => AlignedBuf::from_slice(&buffer.read()),
            None => self.device.read_buf(self.byte_offset(block), self.geo.block_size as usize)?,
        };
        let mut written = *raw;
        if let Some(sizes) = *self.sb.uncommitted.lock() {
            change_whole(&mut written, |raw| sizes.apply(raw));
        }
        bytes[offset..offset + SUPERBLOCK_BYTES].copy_from_slice(written.as_bytes());
        let content = Buf::from(bytes);
        let request = Request::Write {
            offset: self.byte_offset(block),
            bufs: vec![content],
            // It is waited for; and a note of an error must come through when order is broken.
            order: Order::Orderless,
            fua: false,
            class: Class::Sync,
        };
        self.device.submit_one(request).wait()?;
        self.device.flush()?;
        Ok(())
    }

    /// At mount: the image is in use from now on.
    /// `failed`: its last user met an error.
    pub(crate) fn write_mounted_superblock(&self, failed: bool) -> Result<()> {
        let now = u64::try_from(self.now().sec).unwrap_or(0);
        let logged = self.has_log() && !planted(Bug::LogNotAnnounced);
        self.write_superblock_now(|raw| {
            raw.set_mtime_seconds(now);
            let mounts = raw.s_mnt_count.get().saturating_add(1);
            raw.s_mnt_count.set(mounts);
            self.announce(raw, failed);
            if !logged {
                raw.set_state(raw.state() - FsState::VALID);
            }
        })
    }

    /// Before a recovery that no mount for writing follows: the log may be used.
    pub(crate) fn write_recovering_superblock(&self, failed: bool) -> Result<()> {
        self.write_superblock_now(|raw| self.announce(raw, failed))
    }

    fn announce(&self, raw: &mut RawSuperblock, failed: bool) {
        // It differs if an invalid list was discarded.
        raw.s_last_orphan.set(self.orphans.head());
        if failed {
            raw.set_state(raw.state() | FsState::ERROR);
        }
        if self.has_log() && !planted(Bug::LogNotAnnounced) {
            set_incompat(raw, Incompat::RECOVER, true);
        }
    }

    /// After such a recovery: everything is checkpointed, and the state is as it was.
    pub(crate) fn write_recovered_superblock(&self) -> Result<()> {
        self.write_superblock_in_place(|_| {})
    }

    /// At unmount: everything is checkpointed.
    pub(crate) fn write_clean_superblock(&self) -> Result<()> {
        let overhead = self.sb.overhead_clusters.swap(0, Ordering::Relaxed);
        if overhead != 0 {
            // Field and checksum are in the second sector, and nothing else changes.
            self.write_changed_superblock(|raw| raw.s_overhead_clusters.set(overhead))?;
        }
        self.write_superblock_in_place(|raw| {
            if !raw.state().contains(FsState::ERROR) {
                raw.set_state(raw.state() | FsState::VALID);
            }
        })
    }

    /// With the log empty: the counts, no mark of the log in use, and what `change` does.
    fn write_superblock_in_place(&self, change: impl FnOnce(&mut RawSuperblock)) -> Result<()> {
        let free_blocks = self.groups.free_blocks_total();
        let free_inodes = self.groups.free_inodes_total();
        let no_orphans = self.orphans.is_empty();
        self.write_superblock_now(|raw| {
            raw.set_free_blocks_count(free_blocks);
            raw.s_free_inodes_count.set(free_inodes);
            set_incompat(raw, Incompat::RECOVER, false);
            if no_orphans {
                set_ro_compat(raw, RoCompat::ORPHAN_PRESENT, false);
            }
            change(raw);
        })
    }

    /// Records an error for e2fsck; best effort, because the device may be gone.
    pub(crate) fn record_error_in_superblock(&self, error: &Error) {
        if self.options.read_only || self.mmp.is_lost() {
            return;
        }
        let now = self.now().sec as u32;
        let written = self.write_superblock_now(|raw| {
            raw.set_state(raw.state() | FsState::ERROR);
            if raw.s_error_count.get() == 0 {
                raw.s_first_error_time.set(now);
            }
            raw.s_last_error_time.set(now);
            raw.s_error_count.set(raw.s_error_count.get().saturating_add(1));
        });
        if let Err(second) = written {
            self.warn(format_args!(
                "the error ({error}) cannot be recorded in the superblock: {second}"
            ));
        }
    }
}

/// A superblock that replay is about to write, and that another made, with another checksum than the one
/// in its home location: is made to fit that, where nothing else in the second sector differs, so that no
/// cut tears it.
pub(crate) fn fit_replayed(device: &dyn Device, block: BlockNo, content: &mut [u8]) {
    let (len, start) = (content.len() as u64, SUPERBLOCK_OFFSET_BYTES);
    if block.0 != start / len {
        return;
    }
    let range = (start % len) as usize..(start % len) as usize + SUPERBLOCK_BYTES;
    let mut home = [0; SUPERBLOCK_BYTES];
    let (Some(bytes), Ok(())) = (content.get_mut(range), device.read_exact_at(start, &mut home))
    else {
        return;
    };
    let (Ok(mut raw), Ok(home)) = (RawSuperblock::decode(bytes), RawSuperblock::decode(&home))
    else {
        return;
    };
    if raw.verify_checksum().is_err() {
        return;
    }
    raw.s_checksum = home.s_checksum;
    if is_first_sector(&raw, &home) {
        raw.fit_checksum();
        bytes.copy_from_slice(raw.as_bytes());
    }
}

/// Says in a superblock that the log has been replayed; `failed`: its last user met an error.
pub(crate) fn set_replayed(raw: &mut RawSuperblock, failed: bool) {
    change_whole(raw, |raw| {
        set_incompat(raw, Incompat::RECOVER, false);
        if failed {
            raw.set_state(raw.state() | FsState::ERROR);
        }
    });
}

/// Whether two superblocks differ in their first sector alone.
fn is_first_sector(one: &RawSuperblock, other: &RawSuperblock) -> bool {
    one.as_bytes()[SECTOR_BYTES..] == other.as_bytes()[SECTOR_BYTES..]
}

/// Changes the superblock, and its second sector only where `change` does.
fn change_whole(raw: &mut RawSuperblock, change: impl FnOnce(&mut RawSuperblock)) {
    let before = *raw;
    change(raw);
    if is_first_sector(raw, &before)
        && before.verify_checksum().is_ok()
        && !planted(Bug::SuperblockInTwoSectors)
    {
        raw.fit_checksum();
    } else {
        raw.update_checksum();
    }
}

fn set_incompat(raw: &mut RawSuperblock, flag: Incompat, on: bool) {
    let mut features = raw.features();
    features.incompat.set(flag, on);
    raw.set_features(&features);
}

fn set_ro_compat(raw: &mut RawSuperblock, flag: RoCompat, on: bool) {
    let mut features = raw.features();
    features.ro_compat.set(flag, on);
    raw.set_features(&features);
}
