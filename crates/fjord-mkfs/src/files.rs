//! The files of a new image: root, `lost+found`, resize inode, journal, orphan file.
//!
//! Invariant: every block that an inode points to was taken from the [`Space`], and every
//! block that is not to read as zeroes is in `blocks`.

use std::collections::BTreeMap;

use fjord_format::checksum;
use fjord_format::dirent::{self, DirFormat, FileType};
use fjord_format::extent::{self, Extent, ExtentIndex, ExtentNodeMut, NodeKind};
use fjord_format::features::{Compat, Incompat};
use fjord_format::geometry::Geometry;
use fjord_format::ijournal::{AREA_BLOCKS_MIN, AREA_COUNT_MAX, AreaTable};
use fjord_format::inode::{self, DiskInode, InodeFlags, S_IFDIR, S_IFREG};
use fjord_format::jbd2;
use fjord_format::mmp::{self, MmpBlock};
use fjord_format::orphan_file;
use fjord_format::superblock::RawSuperblock;
use fjord_format::time::Timestamp;
use fjord_format::types::{BlockNo, GroupNo, InodeNo, LogicalBlock};

use crate::blockmap::map_blocks;
use crate::error::{MkfsError, Result, too_small, usage};
use crate::options::{IjournalAreas, JournalSize, MkfsOptions};
use crate::space::{BlockRun, Space};

const LOST_FOUND: InodeNo = InodeNo::GOOD_OLD_FIRST;
const ORPHAN_FILE: InodeNo = InodeNo(LOST_FOUND.0 + 1);
const LOST_FOUND_BYTES: u64 = 16 * 1024;
/// Linux refuses longer ones in some versions.
const ORPHAN_FILE_BYTES_MAX: u64 = 8 << 20;
const FAST_COMMIT_SHARE: u32 = 64;
/// Most areas that a new image gets by default.
const AUTO_AREAS_MAX: u32 = 16;
/// All areas together take one part in this many of the journal's length,
const AUTO_JOURNAL_SHARE: u64 = 2;
/// each at most so much: a commit must end before the fsyncs meanwhile have filled half of it,
const AUTO_AREA_BYTES_MAX: u64 = 16 << 20;
/// and together at most one part in this many of the image, or there are none.
const AUTO_IMAGE_SHARE: u64 = 32;

/// What the special files put on the image.
pub(crate) struct Files<'a> {
    geometry: &'a Geometry,
    now: Timestamp,
    /// Front of the inode table of group 0: whole blocks.
    pub(crate) table: Vec<u8>,
    /// Contents of blocks, by number.
    pub(crate) blocks: BTreeMap<BlockNo, Vec<u8>>,
    /// Runs that must read as zeroes except where `blocks` says otherwise.
    pub(crate) zeroes: Vec<BlockRun>,
    /// Inodes in use, reserved ones included: the first ones of group 0.
    pub(crate) inodes_used: u32,
    /// Blocks of the journal, 0 without one; areas not counted.
    pub(crate) journal_blocks: u32,
    /// Areas after the journal's log.
    pub(crate) areas: Option<AreaTable>,
}

impl<'a> Files<'a> {
    /// Makes all files that the features call for, and says in the superblock where they are.
    pub(crate) fn make(
        options: &MkfsOptions,
        sb: &mut RawSuperblock,
        geometry: &'a Geometry,
        space: &mut Space<'_>,
    ) -> Result<Files<'a>> {
        let has_orphan_file = geometry.features.compat.contains(Compat::ORPHAN_FILE);
        let inodes_used = if has_orphan_file { ORPHAN_FILE.0 } else { LOST_FOUND.0 };
        if geometry.inodes_per_group < inodes_used {
            return Err(usage("too few inodes per group; increase the number of inodes"));
        }
        let table_blocks = inodes_used.div_ceil(geometry.inodes_per_block());
        let mut files = Files {
            geometry,
            now: Timestamp { sec: sb.mkfs_time_seconds() as i64, nsec: 0 },
            table: vec![0; (table_blocks * geometry.block_size) as usize],
            blocks: BTreeMap::new(),
            zeroes: Vec::new(),
            inodes_used,
            journal_blocks: 0,
            areas: None,
        };
        files.make_directories(options, space)?;
        if geometry.features.compat.contains(Compat::RESIZE_INODE) {
            files.make_resize_inode(space)?;
        }
        if geometry.features.incompat.contains(Incompat::MMP) {
            files.make_mmp(sb, space)?;
        }
        files.make_journal(options, sb, space)?;
        if has_orphan_file {
            files.make_orphan_file(sb, space)?;
        }
        Ok(files)
    }

    fn block_size(&self) -> usize {
        self.geometry.block_size as usize
    }

    fn blocks_512(&self, blocks: u64) -> u64 {
        blocks * u64::from(self.geometry.block_size / 512)
    }

    fn inode_seed(&self, ino: InodeNo) -> u32 {
        checksum::inode_seed(self.geometry.csum_seed, ino, 0)
    }

    fn new_inode(&self, mode: u16, size: u64) -> DiskInode {
        let mut inode = DiskInode::new(mode, self.geometry);
        (inode.atime, inode.ctime, inode.mtime) = (self.now, self.now, self.now);
        inode.crtime = self.now;
        inode.links_count = 1;
        inode.size = size;
        inode
    }

    fn put_inode(&mut self, ino: InodeNo, inode: &DiskInode) -> Result<()> {
        let size = usize::from(self.geometry.inode_size);
        let at = (ino.0 as usize - 1) * size;
        let bytes = &mut self.table[at..at + size];
        inode.encode(bytes, self.geometry)?;
        inode::update_checksum(bytes, self.geometry, ino)?;
        Ok(())
    }

    /// Maps the runs, in order, as the file's blocks from 0 on, and counts them.
    fn map(
        &mut self,
        ino: InodeNo,
        inode: &mut DiskInode,
        runs: &[BlockRun],
        space: &mut Space<'_>,
    ) -> Result<()> {
        let data: u64 = runs.iter().map(|run| run.len).sum();
        let meta = if self.geometry.features.incompat.contains(Incompat::EXTENTS) {
            inode.flags |= InodeFlags::EXTENTS;
            self.map_extents(ino, inode, runs, space)?
        } else {
            let (count, blocks) = map_blocks(&mut inode.i_block, runs, self.geometry, space)?;
            self.blocks.extend(blocks);
            count
        };
        inode.blocks_512 = self.blocks_512(data + meta);
        Ok(())
    }

    /// A root that holds the extents or, when they are too many, one level of leaves. Returns
    /// the number of leaf blocks.
    fn map_extents(
        &mut self,
        ino: InodeNo,
        inode: &mut DiskInode,
        runs: &[BlockRun],
        space: &mut Space<'_>,
    ) -> Result<u64> {
        let geometry = self.geometry;
        let mut logical = 0;
        let extents: Vec<Extent> = runs
            .iter()
            .map(|run| {
                // Runs are at most as long as an extent, and files here far below 2^32 blocks.
                let len = run.len as u32;
                let extent = Extent {
                    logical: LogicalBlock(logical),
                    len,
                    start: run.start,
                    unwritten: false,
                };
                logical += len;
                extent
            })
            .collect();
        let root_max = usize::from(extent::capacity(NodeKind::Root, geometry));
        let leaf_max = usize::from(extent::capacity(NodeKind::Block, geometry));
        if extents.len() <= root_max {
            let mut root = ExtentNodeMut::init(&mut inode.i_block, NodeKind::Root, 0, geometry)?;
            fill_leaf(&mut root, &extents)?;
            return Ok(0);
        }
        if extents.len() > root_max * leaf_max {
            return Err(usage("the journal is too long for blocks of this size"));
        }
        let leaf_count = extents.len().div_ceil(leaf_max);
        let places = space.allocate(runs[0].start, leaf_count as u64)?;
        let places = places.iter().flat_map(|run| (0..run.len).map(|i| run.start.0 + i));
        let mut root = ExtentNodeMut::init(&mut inode.i_block, NodeKind::Root, 1, geometry)?;
        for (index, (part, place)) in extents.chunks(leaf_max).zip(places).enumerate() {
            let mut block = vec![0; geometry.block_size as usize];
            let mut leaf = ExtentNodeMut::init(&mut block, NodeKind::Block, 0, geometry)?;
            fill_leaf(&mut leaf, part)?;
            extent::update_checksum(&mut block, self.inode_seed(ino), geometry)?;
            let leaf = BlockNo(place);
            root.insert_index(index, ExtentIndex { logical: part[0].logical, leaf })?;
            self.blocks.insert(leaf, block);
        }
        Ok(leaf_count as u64)
    }

    fn make_directories(&mut self, options: &MkfsOptions, space: &mut Space<'_>) -> Result<()> {
        let format = DirFormat::new(self.geometry);
        let (root, lost) = (InodeNo::ROOT, LOST_FOUND);
        let mut inode = self.new_inode(S_IFDIR | 0o755, u64::from(self.geometry.block_size));
        (inode.uid, inode.gid) = options.root_owner;
        inode.links_count = 3;
        let runs = space.allocate(self.geometry.first_data_block, 1)?;
        self.map(root, &mut inode, &runs, space)?;
        self.put_inode(root, &inode)?;
        let mut block = vec![0; self.block_size()];
        dirent::init_first_block(&mut block, &format, root, root)?;
        let area = format.entries_area_mut(&mut block)?;
        dirent::insert(area, &format, b"lost+found", lost, FileType::Directory)?;
        dirent::set_checksum(&mut block, &format, self.inode_seed(root))?;
        self.blocks.insert(runs[0].start, block);

        // e2fsck wants room to link files in without allocating.
        let block_size = u64::from(self.geometry.block_size);
        let count = (LOST_FOUND_BYTES / block_size).clamp(2, 12);
        let mut inode = self.new_inode(S_IFDIR | 0o700, count * block_size);
        inode.links_count = 2;
        let runs = space.allocate(self.geometry.first_data_block, count)?;
        self.map(lost, &mut inode, &runs, space)?;
        self.put_inode(lost, &inode)?;
        for (index, place) in each_block(&runs).enumerate() {
            let mut block = vec![0; self.block_size()];
            if index == 0 {
                dirent::init_first_block(&mut block, &format, lost, root)?;
            } else {
                dirent::init_block(&mut block, &format)?;
            }
            dirent::set_checksum(&mut block, &format, self.inode_seed(lost))?;
            self.blocks.insert(place, block);
        }
        Ok(())
    }

    /// The file that owns the blocks reserved for descriptors: its double indirect block points
    /// to the reserved blocks of group 0, and each of them to its copies in the backups.
    fn make_resize_inode(&mut self, space: &mut Space<'_>) -> Result<()> {
        let geometry = self.geometry;
        let pointers = fjord_format::blockmap::pointers_per_block(geometry);
        let groups: Vec<GroupNo> = geometry.super_backup_groups().collect();
        let first = geometry.superblock_location().0 + 1 + u64::from(geometry.desc_block_count);
        let origin = geometry.group_first_block(GroupNo(0)).0;
        let dind_place = space.allocate(geometry.first_data_block, 1)?[0].start;
        let mut dind = vec![0; self.block_size()];
        for index in 0..geometry.reserved_gdt_blocks {
            let reserved = first + u64::from(index);
            let slot = (geometry.desc_block_count + index) % pointers;
            fjord_format::blockmap::write_pointer(&mut dind, slot, Some(BlockNo(reserved)))?;
            let mut copies = vec![0; self.block_size()];
            for (slot, group) in groups.iter().enumerate() {
                let copy = BlockNo(reserved - origin + geometry.group_first_block(*group).0);
                fjord_format::blockmap::write_pointer(&mut copies, slot as u32, Some(copy))?;
            }
            self.blocks.insert(BlockNo(reserved), copies);
        }
        self.blocks.insert(dind_place, dind);
        let reach = 12 + u64::from(pointers) + u64::from(pointers) * u64::from(pointers);
        let mut inode = self.new_inode(S_IFREG | 0o600, reach * u64::from(geometry.block_size));
        let slot = fjord_format::blockmap::DOUBLE_INDIRECT;
        fjord_format::blockmap::write_pointer(&mut inode.i_block, slot, Some(dind_place))?;
        let reserved = u64::from(geometry.reserved_gdt_blocks);
        inode.blocks_512 = self.blocks_512(1 + reserved + reserved * groups.len() as u64);
        self.put_inode(InodeNo::RESIZE, &inode)
    }

    fn make_mmp(&mut self, sb: &mut RawSuperblock, space: &mut Space<'_>) -> Result<()> {
        let place = space.allocate(self.geometry.first_data_block, 1)?[0].start;
        sb.s_mmp_block.set(place.0);
        sb.s_mmp_update_interval.set(mmp::UPDATE_INTERVAL_DEFAULT_SECONDS);
        let mut block = vec![0; self.block_size()];
        let mmp = MmpBlock {
            seq: mmp::SEQ_CLEAN,
            time_seconds: self.now.sec as u64,
            nodename: [0; 64],
            bdevname: [0; 32],
            check_interval_seconds: mmp::CHECK_INTERVAL_MIN_SECONDS,
        };
        mmp.encode(&mut block, self.geometry)?;
        self.blocks.insert(place, block);
        Ok(())
    }

    fn make_journal(
        &mut self,
        options: &MkfsOptions,
        sb: &mut RawSuperblock,
        space: &mut Space<'_>,
    ) -> Result<()> {
        let Some((log, fast_commit)) = journal_blocks(options, self.geometry)? else {
            return Ok(());
        };
        let count = log + fast_commit;
        let areas = area_table(options, self.geometry, count, sb.s_uuid)?;
        let with_areas = u64::from(count) + areas.map_or(0, |areas| areas.total_blocks());
        let size = with_areas * u64::from(self.geometry.block_size);
        let mut inode = self.new_inode(S_IFREG | 0o600, size);
        let runs = space.allocate(space.journal_goal(), with_areas)?;
        self.map(InodeNo::JOURNAL, &mut inode, &runs, space)?;
        self.put_inode(InodeNo::JOURNAL, &inode)?;
        let mut head = jbd2::Superblock::new(self.geometry.block_size, count, sb.s_uuid);
        head.s_num_fc_blks = fast_commit;
        let mut block = vec![0; self.block_size()];
        let bytes = head.encode();
        block[..bytes.len()].copy_from_slice(&bytes);
        self.blocks.insert(runs[0].start, block);
        if let Some(areas) = &areas {
            let place = each_block(&runs).nth(count as usize);
            let place = place.ok_or_else(|| usage("the journal has too few blocks"))?;
            let mut block = vec![0; self.block_size()];
            areas.encode(&mut block)?;
            self.blocks.insert(place, block);
        }
        self.zeroes.extend(runs);
        self.journal_blocks = count;
        self.areas = areas;

        sb.s_journal_inum.set(InodeNo::JOURNAL.0);
        // e2fsck finds the journal by this copy when the inode is lost.
        sb.s_jnl_backup_type = 1;
        for (word, bytes) in sb.s_jnl_blocks.iter_mut().zip(inode.i_block.as_chunks::<4>().0) {
            word.set(u32::from_le_bytes(*bytes));
        }
        sb.s_jnl_blocks[15].set((size >> 32) as u32);
        sb.s_jnl_blocks[16].set(size as u32);
        Ok(())
    }

    fn make_orphan_file(&mut self, sb: &mut RawSuperblock, space: &mut Space<'_>) -> Result<()> {
        let count = match self.geometry.block_count {
            0..0x2_0000 => 32,
            blocks @ 0x2_0000..0x20_0000 => blocks / 4096,
            _ => 512,
        };
        let count = count.min(ORPHAN_FILE_BYTES_MAX / u64::from(self.geometry.block_size));
        let size = count * u64::from(self.geometry.block_size);
        let mut inode = self.new_inode(S_IFREG | 0o600, size);
        let runs = space.allocate(self.geometry.first_data_block, count)?;
        self.map(ORPHAN_FILE, &mut inode, &runs, space)?;
        self.put_inode(ORPHAN_FILE, &inode)?;
        let has_csum = self.geometry.features.has_metadata_csum();
        let seed = has_csum.then(|| self.inode_seed(ORPHAN_FILE));
        for place in each_block(&runs) {
            let mut block = vec![0; self.block_size()];
            orphan_file::seal(&mut block, seed, place)?;
            self.blocks.insert(place, block);
        }
        sb.s_orphan_file_inum.set(ORPHAN_FILE.0);
        Ok(())
    }
}

fn each_block(runs: &[BlockRun]) -> impl Iterator<Item = BlockNo> + '_ {
    runs.iter().flat_map(|run| (0..run.len).map(|offset| BlockNo(run.start.0 + offset)))
}

fn fill_leaf(leaf: &mut ExtentNodeMut<'_>, extents: &[Extent]) -> Result<()> {
    for (at, extent) in extents.iter().enumerate() {
        leaf.insert_extent(at, *extent)?;
    }
    Ok(())
}

/// Blocks of the log and of the fast-commit area, or `None` without a journal.
pub(crate) fn journal_blocks(
    options: &MkfsOptions,
    geometry: &Geometry,
) -> Result<Option<(u32, u32)>> {
    if !geometry.features.compat.contains(Compat::HAS_JOURNAL) {
        return Ok(None);
    }
    let log = match options.journal {
        JournalSize::Auto => usual_journal_blocks(geometry.block_count),
        JournalSize::None => return Ok(None),
        JournalSize::Bytes(bytes) => {
            let blocks = bytes / u64::from(geometry.block_size);
            let min = u64::from(jbd2::MIN_JOURNAL_BLOCKS);
            let error: fn(String) -> MkfsError = if blocks < min { usage } else { too_small };
            if blocks < min || blocks > geometry.block_count / 2 {
                return Err(error(format!(
                    "a journal has at least {min} blocks and at most half of the image; \
                     {bytes} bytes are {blocks} blocks"
                )));
            }
            u32::try_from(blocks).map_err(|_| usage("the journal is too long"))?
        }
    };
    let has_fast_commit = geometry.features.compat.contains(Compat::FAST_COMMIT);
    Ok(Some((log, if has_fast_commit { log / FAST_COMMIT_SHARE } else { 0 })))
}

/// The table of the areas that the options call for, after a journal of `journal` blocks.
fn area_table(
    options: &MkfsOptions,
    geometry: &Geometry,
    journal: u32,
    uuid: [u8; 16],
) -> Result<Option<AreaTable>> {
    let block_size = u64::from(geometry.block_size);
    let min = u64::from(AREA_BLOCKS_MIN);
    let (area_count, area_blocks) = match options.ijournal {
        IjournalAreas::None => return Ok(None),
        IjournalAreas::Areas { count, area_bytes } => (count, area_bytes / block_size),
        IjournalAreas::Auto => {
            let here =
                || std::thread::available_parallelism().map_or(1, |count| count.get() as u32);
            let cores = options.cores.unwrap_or_else(here).clamp(1, AUTO_AREAS_MAX);
            let count = u64::from(cores);
            let of_journal = u64::from(journal) / AUTO_JOURNAL_SHARE / count;
            let of_image = geometry.block_count / AUTO_IMAGE_SHARE / count;
            let most = of_image.min(AUTO_AREA_BYTES_MAX / block_size);
            let blocks = of_journal.min(most).max(min);
            if (count * blocks).saturating_mul(AUTO_IMAGE_SHARE) > geometry.block_count {
                return Ok(None);
            }
            (count as u32, blocks)
        }
    };
    let makes_sense = (1..=AREA_COUNT_MAX).contains(&area_count) && area_blocks >= min;
    let fits = area_blocks.saturating_mul(u64::from(area_count)) <= geometry.block_count / 2;
    let error: fn(String) -> MkfsError = if makes_sense { too_small } else { usage };
    if !makes_sense || !fits {
        return Err(error(format!(
            "{area_count} areas of {} bytes are not possible; give 1 to {AREA_COUNT_MAX} areas of \
             at least {} bytes, together at most half of the image",
            area_blocks * block_size,
            min * block_size
        )));
    }
    // At most half of the image's blocks, which have 32 bits here.
    let area_blocks = u32::try_from(area_blocks).map_err(|_| usage("the areas are too long"))?;
    Ok(Some(AreaTable { uuid, area_count, area_blocks }))
}

/// As mke2fs picks it, by the number of blocks.
fn usual_journal_blocks(block_count: u64) -> u32 {
    match block_count >> 10 {
        0..32 => 1024,
        32..256 => 4096,
        256..512 => 8192,
        512..4096 => 16384,
        4096..8192 => 32768,
        8192..16384 => 65536,
        16384..32768 => 131_072,
        _ => 262_144,
    }
}
