//! The table of groups: state in memory, filled from the descriptors at mount.
//!
//! Owns [`Groups`] and the small cell per group. Invariants: `Cell::free` is the count of blocks
//! that can be picked (bit clear, not busy), exact under the group's lock; a group with a damaged
//! descriptor or bitmap is marked and never allocated from; a cell is small, because 16 TiB have
//! 131,072 of them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use fjord_block::{AlignedBuf, Class, Device, ReadTicket};
use fjord_format::geometry::Geometry;
use fjord_format::group::GroupDesc;
use fjord_format::superblock::RawSuperblock;
use fjord_format::types::{BlockNo, GroupNo};
use parking_lot::Mutex;

use super::account::Account;
use super::bits::SparseBits;
use super::cells::Cells;
use super::freed::FreedTable;
use super::parts::ForeignRun;
use super::zones::{self, Zones};
use crate::error::{Error, Result};

/// Bytes of descriptors read by one request at mount.
const READ_BYTES_MAX: u64 = 1 << 20;
/// Bytes of such requests in flight.
const READS_IN_FLIGHT_BYTES_MAX: u64 = 8 << 20;
/// Such requests in flight; with meta_bg the blocks lie apart, and each is a request.
const READS_IN_FLIGHT_MAX: usize = 64;

/// `Cell::flags`: descriptor or bitmap is wrong.
const DAMAGED: u8 = 1;
/// `Cell::flags`: the block bitmap was compared with the descriptor.
const BLOCKS_CHECKED: u8 = 2;
/// `Cell::flags`: the inode bitmap was compared with the descriptor.
const INODES_CHECKED: u8 = 4;
/// `Cell::flags`: every free run was discarded and nothing freed since.
const TRIMMED: u8 = 8;

/// State under the lock of a group, besides its bitmaps and descriptor.
#[derive(Debug, Default)]
pub(super) struct Overlay {
    /// Blocks whose bit is clear but that are busy: picked, or freed and not committed.
    pub(super) busy: SparseBits,
    /// Blocks in windows of growing files: other files avoid them while there is space elsewhere.
    /// May include bits that are set.
    pub(super) windows: SparseBits,
    /// Inodes freed and not committed.
    pub(super) busy_inodes: SparseBits,
}

/// A group in memory.
#[derive(Debug, Default)]
pub(super) struct Cell {
    /// Guards the overlay and every change of the group's bitmaps and descriptor. `None`
    /// until the overlay is first needed.
    pub(super) lock: Mutex<Option<Box<Overlay>>>,
    /// Blocks that can be picked. Changed under `lock`, read without as a hint.
    pub(super) free: AtomicU32,
    /// No run of pickable blocks is longer than this. Changed under `lock`.
    pub(super) longest: AtomicU32,
    /// No run of pickable blocks outside windows is longer. Changed under `lock`.
    pub(super) longest_open: AtomicU32,
    /// Inodes that can be allocated. Changed under `lock`, read without as a hint.
    pub(super) free_inodes: AtomicU32,
    /// Directories. Changed under `lock`, read without as a hint.
    pub(super) used_dirs: AtomicU32,
    /// See the constants; bits are set and cleared atomically.
    flags: AtomicU8,
}

impl Cell {
    fn has(&self, flag: u8) -> bool {
        self.flags.load(Ordering::Acquire) & flag != 0
    }

    /// Whether the group must not be used.
    pub(super) fn is_damaged(&self) -> bool {
        self.has(DAMAGED)
    }

    /// Whether the block bitmap was compared with the descriptor.
    pub(super) fn blocks_checked(&self) -> bool {
        self.has(BLOCKS_CHECKED)
    }

    /// Notes that it was.
    pub(super) fn set_blocks_checked(&self) {
        self.flags.fetch_or(BLOCKS_CHECKED, Ordering::AcqRel);
    }

    /// Whether the inode bitmap was compared with the descriptor.
    pub(super) fn inodes_checked(&self) -> bool {
        self.has(INODES_CHECKED)
    }

    /// Notes that it was.
    pub(super) fn set_inodes_checked(&self) {
        self.flags.fetch_or(INODES_CHECKED, Ordering::AcqRel);
    }

    /// Whether all free runs were discarded and nothing was freed since.
    pub(super) fn is_trimmed(&self) -> bool {
        self.has(TRIMMED)
    }

    /// Notes whether they are.
    pub(super) fn set_trimmed(&self, trimmed: bool) {
        if trimmed {
            self.flags.fetch_or(TRIMMED, Ordering::AcqRel);
        } else {
            self.flags.fetch_and(!TRIMMED, Ordering::AcqRel);
        }
    }

    /// Counts blocks out that can no longer be picked. The caller holds the lock.
    pub(super) fn take_free(&self, count: u32) {
        let less = |free: u32| Some(free.saturating_sub(count));
        let _ = self.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// Blocks have come free.
    pub(super) fn forget_longest(&self) {
        self.longest.store(u32::MAX, Ordering::Relaxed);
        self.note_open();
    }

    /// A window is gone, or part of it.
    pub(super) fn note_open(&self) {
        self.longest_open.store(u32::MAX, Ordering::Relaxed);
    }

    /// Whether a run of `need` blocks may be outside windows; a hint without the lock.
    pub(super) fn may_hold_open(&self, need: u32) -> bool {
        self.longest_open.load(Ordering::Relaxed) >= need
    }

    /// Lets blocks be picked again: those of `first..first + len` that are busy. The caller
    /// holds the lock. Returns their count.
    pub(super) fn unpin(&self, overlay: &mut Overlay, first: u32, len: u32) -> u32 {
        let count = overlay.busy.remove(first..first.saturating_add(len));
        self.free.fetch_add(count, Ordering::Relaxed);
        self.forget_longest();
        count
    }
}

/// The groups of a mounted file system.
#[derive(Debug)]
pub(crate) struct Groups {
    /// One per group. Shared with what waits for commits.
    pub(super) cells: Arc<Cells>,
    /// Counts of the whole file system.
    pub(super) account: Arc<Account>,
    /// Freed by transactions that have not committed.
    pub(super) freed: Arc<FreedTable>,
    /// Blocks that no file may own.
    pub(super) zones: Zones,
    /// Blocks that are no data blocks (`f_blocks` leaves them out), without the journal.
    pub(super) fixed_blocks: AtomicU64,
    /// Held by a trim while it keeps free blocks busy; an allocation that finds none waits for it.
    /// Taken before a group's lock.
    pub(super) trim_lock: Mutex<()>,
    /// Where the search for a group for a directory in the root begins: each after the one before.
    pub(super) spread_turn: AtomicU32,
    /// Bitmaps and inode tables outside their group, as found at mount.
    pub(super) foreign: Vec<ForeignRun>,
    /// The first thing found wrong at mount.
    damage: Option<Error>,
}

impl Groups {
    /// Lets every claim of blocks go to the last one.
    pub(crate) fn keep_nothing(&self) {
        self.account.keep_nothing();
    }

    /// Reads all descriptors. Call it after recovery and before any change. The counts of the file
    /// system are computed from the descriptors, because a crash leaves those in the superblock
    /// stale.
    ///
    /// A damaged descriptor does not fail the call: see [`Groups::damage`].
    ///
    /// # Errors
    /// I/O errors.
    pub(crate) fn open(
        device: &Arc<dyn Device>,
        geo: &Geometry,
        sb: &RawSuperblock,
    ) -> Result<Self> {
        // Everything is counted in clusters, of which only bigalloc has another size.
        let ratio = u64::from(geo.cluster_ratio);
        let account =
            Account::new(geo.block_count / ratio, sb.r_blocks_count() / ratio, &geo.features);
        let cells = Cells::new(geo.group_count as usize);
        let mut scan = Scan {
            geo,
            account: &account,
            cells: &cells,
            zones: Default::default(),
            foreign: Default::default(),
            damage: None,
        };
        read_descriptors(device.as_ref(), geo, |index, bytes| scan.desc_block(index, bytes))?;
        let Scan { zones, foreign, damage, .. } = scan;
        let zones = Zones::new(zones.concat());
        let fixed_blocks = zones.fixed_blocks().saturating_add(geo.first_data_block.0);
        Ok(Self {
            cells: Arc::new(cells),
            account: Arc::new(account),
            freed: Arc::default(),
            zones,
            fixed_blocks: AtomicU64::new(fixed_blocks),
            spread_turn: AtomicU32::new(0),
            trim_lock: Mutex::new(()),
            foreign: foreign.concat(),
            damage,
        })
    }

    /// Empty groups without free blocks, to read an image whose journal has not been replayed.
    pub(crate) fn unread(geo: &Geometry) -> Self {
        Self {
            cells: Arc::default(),
            account: Arc::new(Account::new(0, 0, &geo.features)),
            freed: Arc::default(),
            zones: Zones::default(),
            fixed_blocks: AtomicU64::new(0),
            spread_turn: AtomicU32::new(0),
            trim_lock: Mutex::new(()),
            foreign: Vec::new(),
            damage: None,
        }
    }

    /// The first damaged descriptor found at mount. Its group is not used; the caller
    /// decides whether the file system may be written at all.
    pub(crate) fn damage(&self) -> Option<&Error> {
        self.damage.as_ref()
    }

    /// Protects the journal's blocks (start and count of each run); mount calls it once.
    ///
    /// # Errors
    /// `Corrupt` if the journal lies over other structures.
    pub(crate) fn protect_journal(&self, runs: Vec<(BlockNo, u64)>) -> Result<()> {
        for &(start, count) in &runs {
            if self.zones.overlaps_fixed(start.0, start.0.saturating_add(count)) {
                let detail = format!("{count} blocks at {start} belong to other structures");
                return Err(Error::corrupt("journal inode", detail));
            }
        }
        let zones = runs.into_iter().map(|(start, count)| (start.0, start.0.saturating_add(count)));
        self.zones.set_journal(zones.collect());
        Ok(())
    }

    /// Lets the journal inode's blocks change, for the rest of the mount.
    pub(crate) fn open_journal(&self) {
        self.zones.open_journal();
    }

    /// The cell of a group.
    ///
    /// # Errors
    /// `Corrupt` if there is no such group.
    pub(super) fn cell(&self, group: GroupNo) -> Result<&Cell> {
        self.cells
            .get(group.0 as usize)
            .ok_or_else(|| Error::corrupt("block group", format!("there is no group {group}")))
    }

    /// Marks a group as damaged: its free blocks are not used. The caller holds the group's lock.
    pub(super) fn set_damaged(&self, cell: &Cell) {
        if cell.flags.fetch_or(DAMAGED, Ordering::AcqRel) & DAMAGED == 0 {
            self.account.lost(cell.free.swap(0, Ordering::Relaxed));
            cell.free_inodes.store(0, Ordering::Relaxed);
        }
    }

    /// Count of groups.
    pub(super) fn count(&self) -> u32 {
        // As many as `geo.group_count`, or more for a moment.
        self.cells.len() as u32
    }
}

/// Takes the descriptors in at mount.
struct Scan<'a> {
    geo: &'a Geometry,
    account: &'a Account,
    cells: &'a Cells,
    /// By kind, because the zones of one kind are mostly in order: base blocks, block
    /// bitmaps, inode bitmaps, inode tables.
    zones: [Vec<(u64, u64)>; 4],
    /// Of each kind apart: block bitmaps, inode bitmaps, inode tables.
    foreign: [Vec<ForeignRun>; 3],
    damage: Option<Error>,
}

impl Scan<'_> {
    fn desc_block(&mut self, index: u32, bytes: &[u8]) {
        let first = u64::from(index) * u64::from(self.geo.descs_per_block);
        let size = usize::from(self.geo.desc_size);
        for (number, desc) in (first..).zip(bytes.chunks_exact(size)) {
            let Some(cell) = self.cells.get(number as usize) else { return };
            self.group(GroupNo(number as u32), cell, desc);
        }
    }

    fn group(&mut self, group: GroupNo, cell: &Cell, bytes: &[u8]) {
        let start = self.geo.group_first_block(group).0;
        let base = u64::from(self.geo.base_metadata_blocks(group));
        zones::append(&mut self.zones[0], start, base);
        let desc = match GroupDesc::decode(bytes, self.geo, group) {
            Ok(desc) => desc,
            Err(error) => {
                let error = Error::corrupt("group descriptor", format!("group {group}: {error}"));
                cell.flags.fetch_or(DAMAGED, Ordering::AcqRel);
                self.damage.get_or_insert(error);
                return;
            }
        };
        let table = u64::from(self.geo.inode_table_blocks());
        zones::append(&mut self.zones[1], desc.block_bitmap.0, 1);
        zones::append(&mut self.zones[2], desc.inode_bitmap.0, 1);
        zones::append(&mut self.zones[3], desc.inode_table.0, table);
        let places = [
            (desc.block_bitmap, 1),
            (desc.inode_bitmap, 1),
            (desc.inode_table, self.geo.inode_table_blocks()),
        ];
        for (runs, (start, blocks)) in self.foreign.iter_mut().zip(places) {
            if self.geo.group_of_block(start) != Some(group) {
                ForeignRun::append(runs, start.0, blocks, group);
            }
        }
        cell.free.store(desc.free_clusters, Ordering::Relaxed);
        cell.forget_longest();
        cell.free_inodes.store(desc.free_inodes, Ordering::Relaxed);
        cell.used_dirs.store(desc.used_dirs, Ordering::Relaxed);
        self.account.add_group(desc.free_clusters, desc.free_inodes);
    }
}

/// Reads all descriptor blocks in large pieces and hands each to `take` with its index.
fn read_descriptors(
    device: &dyn Device,
    geo: &Geometry,
    mut take: impl FnMut(u32, &[u8]),
) -> Result<()> {
    let block_size = u64::from(geo.block_size);
    let per_read = (READ_BYTES_MAX / block_size).max(1);
    let mut in_flight: VecDeque<(u32, ReadTicket)> = VecDeque::new();
    let mut finish = |(first, ticket): (u32, ReadTicket)| -> Result<()> {
        for buf in ticket.wait()? {
            for (index, bytes) in (first..).zip(buf.chunks_exact(geo.block_size as usize)) {
                take(index, bytes);
            }
        }
        Ok(())
    };
    let mut index = 0;
    while let Some(start) = geo.desc_block_location(index) {
        let mut count: u32 = 1;
        while u64::from(count) < per_read
            && geo.desc_block_location(index + count) == start.checked_add(u64::from(count))
        {
            count += 1;
        }
        // At most READ_BYTES_MAX or one block, so it fits.
        let buf = AlignedBuf::uninit((u64::from(count) * block_size) as usize);
        let offset = start.0.saturating_mul(block_size);
        in_flight.push_back((index, device.submit_read(offset, vec![buf], Class::Sync)));
        index += count;
        let blocks = in_flight.front().map_or(0, |(oldest, _)| index - oldest);
        let is_full = u64::from(blocks) * block_size >= READS_IN_FLIGHT_BYTES_MAX;
        if (is_full || in_flight.len() >= READS_IN_FLIGHT_MAX)
            && let Some(oldest) = in_flight.pop_front()
        {
            finish(oldest)?;
        }
    }
    in_flight.into_iter().try_for_each(finish)
}
