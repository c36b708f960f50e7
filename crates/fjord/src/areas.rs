//! Adds and removes areas for i-transactions: grows and shrinks the journal inode.
//!
//! The areas are after the blocks that the journal's superblock counts, so the log and other tools
//! are not affected. For an image that only this process uses.
//!
//! Invariants: the inode's size never covers an unmapped block, which would make the journal
//! invalid; the table is durable before the size covers it.

use std::sync::Arc;

use fjord_block::{Buf, Class, DeviceExt, Order, Request};
use fjord_format::ijournal::{AREA_BLOCKS_MIN, AREA_COUNT_MAX, AreaTable};
use fjord_format::{BlockNo, InodeNo};
use fjord_journal::Handle;
use rustix::io::Errno;

use crate::alloc::Goal;
use crate::error::{Error, Result};
use crate::fs::FsInner;
use crate::inode::{Inode, InodeState, disk, table};
use crate::map::{self, MapKind, Progress};
use crate::vfs::Fs;

/// The superblock's copy of the journal inode: a block of its own in the transaction.
const BACKUP_CREDITS: u32 = 1;
/// Runs of blocks that one handle adds.
const RUNS_PER_HANDLE: u32 = 4;
/// Journal inodes in the superblock's copy: 15 words of `i_block`, two of the size.
const BACKUP_MAP: u8 = 1;

/// Number and size of the areas of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AreaLayout {
    /// How many areas there are.
    pub count: u32,
    /// Bytes of each, whole blocks.
    pub area_bytes: u64,
}

impl Fs {
    /// The areas of the i-journal; `None` if the image has none, or is open read-only.
    pub fn ijournal_areas(&self) -> Option<AreaLayout> {
        if !self.0.has_log() {
            return None;
        }
        let stats = self.0.journal().area_stats()?;
        Some(AreaLayout {
            count: stats.area_count,
            area_bytes: u64::from(stats.area_blocks) * u64::from(self.0.geo.block_size),
        })
    }

    /// Replaces the areas of the image by these, or removes them. They are used from the next open
    /// on; unmount this `Fs` afterwards.
    ///
    /// # Errors
    /// `Usage` for an invalid layout or an image without a journal; `ENOSPC` (the image then has no
    /// areas); I/O and journal errors.
    pub fn set_ijournal_areas(&self, layout: Option<AreaLayout>) -> Result<()> {
        let fs = &self.0;
        fs.check_writable()?;
        let Some(superblock) = fs.journal().superblock().filter(|_| fs.has_log()) else {
            return Err(Error::Usage("the image has no journal, so it can have no areas".into()));
        };
        let areas = match layout {
            Some(layout) => Some(table_of(fs, superblock.s_uuid, layout)?),
            None => None,
        };
        fs.groups.open_journal();
        let inode = table::get(fs, journal_inode(fs)?)?;
        let mut state = inode.state.write();
        shrink(fs, &inode, &mut state, superblock.s_maxlen)?;
        if let Some(areas) = areas {
            let grown = grow(fs, &inode, &mut state, superblock.s_maxlen, &areas);
            if let Err(error) = grown {
                shrink(fs, &inode, &mut state, superblock.s_maxlen)?;
                return Err(error);
            }
        }
        fs.commit()
    }
}

fn journal_inode(fs: &FsInner) -> Result<InodeNo> {
    let ino = fs.sb.snapshot().journal_inode();
    ino.ok_or_else(|| Error::Usage("the image has no internal journal".into()))
}

fn table_of(fs: &FsInner, uuid: [u8; 16], layout: AreaLayout) -> Result<AreaTable> {
    let area_blocks = layout.area_bytes / u64::from(fs.geo.block_size);
    let fits = (1..=AREA_COUNT_MAX).contains(&layout.count)
        && area_blocks >= u64::from(AREA_BLOCKS_MIN)
        && area_blocks.saturating_mul(u64::from(layout.count)) < fs.geo.block_count;
    if !fits {
        let min = u64::from(AREA_BLOCKS_MIN) * u64::from(fs.geo.block_size);
        return Err(Error::Usage(format!(
            "{} areas of {} bytes are not possible; give 1 to {AREA_COUNT_MAX} areas of at least \
             {min} bytes that fit in the image",
            layout.count, layout.area_bytes
        )));
    }
    // Fewer than the blocks of the image divided by the count.
    let area_blocks = u32::try_from(area_blocks)
        .map_err(|_| Error::Usage("an area of more than 2^32 blocks".into()))?;
    Ok(AreaTable { uuid, area_count: layout.count, area_blocks })
}

/// Truncates the journal inode to the log.
fn shrink(fs: &Arc<FsInner>, inode: &Inode, state: &mut InodeState, log_blocks: u32) -> Result<()> {
    let credits = map::credits_remove(fs) + disk::STORE_CREDITS + BACKUP_CREDITS;
    loop {
        let handle = fs.start(credits)?;
        set_size(fs, state, u64::from(log_blocks));
        let progress =
            map::remove(fs, &handle, inode, state, u64::from(log_blocks), u64::from(u32::MAX))?;
        store(fs, &handle, inode, state)?;
        handle.stop();
        if progress == Progress::Done {
            return Ok(());
        }
    }
}

/// Adds the blocks of the table and the areas, writes the table, then increases the size.
fn grow(
    fs: &Arc<FsInner>,
    inode: &Inode,
    state: &mut InodeState,
    log_blocks: u32,
    areas: &AreaTable,
) -> Result<()> {
    let end = u64::from(log_blocks) + areas.total_blocks();
    let end = u32::try_from(end).map_err(|_| Error::from(Errno::FBIG))?;
    let mut at = log_blocks;
    while at < end {
        let credits = map::credits_insert(fs, RUNS_PER_HANDLE) + disk::STORE_CREDITS;
        let handle = fs.start(credits + BACKUP_CREDITS)?;
        for _ in 0..RUNS_PER_HANDLE {
            if at == end {
                break;
            }
            let goal = Goal::for_file(fs, inode, state, at)?;
            let run = fs.alloc_blocks(&handle, goal, end - at)?;
            map::insert(fs, &handle, inode, state, at, run.start, run.len, true).or_else(
                |error| {
                    fs.free_blocks(&handle, run.start, u64::from(run.len))?;
                    Err(error)
                },
            )?;
            at += run.len;
        }
        store(fs, &handle, inode, state)?;
        handle.stop();
    }
    write_table(fs, inode, state, log_blocks, areas)?;
    let handle = fs.start(disk::STORE_CREDITS + BACKUP_CREDITS)?;
    set_size(fs, state, u64::from(end));
    store(fs, &handle, inode, state)?;
    handle.stop();
    Ok(())
}

fn set_size(fs: &FsInner, state: &mut InodeState, blocks: u64) {
    let bytes = blocks.saturating_mul(u64::from(fs.geo.block_size));
    (state.size, state.disk.size) = (bytes, bytes);
}

fn write_table(
    fs: &FsInner,
    inode: &Inode,
    state: &InodeState,
    at: u32,
    areas: &AreaTable,
) -> Result<()> {
    let MapKind::Written(place) = map::lookup(fs, inode, state, at, 1)?.kind else {
        return Err(Error::corrupt("journal inode", format!("block {at} is not mapped")));
    };
    let mut block = Buf::zeroed(fs.geo.block_size as usize);
    areas.encode(block.make_mut())?;
    write_now(fs, place, block)
}

fn write_now(fs: &FsInner, place: BlockNo, block: Buf) -> Result<()> {
    let request = Request::Write {
        offset: fs.byte_offset(place),
        bufs: vec![block],
        order: Order::Barrier,
        fua: true,
        class: Class::Sync,
    };
    Ok(fs.device.submit_one(request).wait()?)
}

/// Stores the inode and the superblock's copy of its map and size.
fn store(fs: &FsInner, handle: &Handle, inode: &Inode, state: &mut InodeState) -> Result<()> {
    disk::store(fs, handle, inode, state)?;
    let (map, size) = (state.disk.i_block, state.disk.size);
    fs.change_superblock(handle, |raw| {
        if raw.s_jnl_backup_type != BACKUP_MAP {
            return;
        }
        for (word, bytes) in raw.s_jnl_blocks.iter_mut().zip(map.as_chunks::<4>().0) {
            word.set(u32::from_le_bytes(*bytes));
        }
        raw.s_jnl_blocks[15].set((size >> 32) as u32);
        raw.s_jnl_blocks[16].set(size as u32);
    })
}
