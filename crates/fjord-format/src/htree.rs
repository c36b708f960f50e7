//! Index blocks of hashed directories: the root in block 0 and the nodes below it.
//!
//! Invariants: an index block holds `count` entries of `limit`, `1 <= count <= limit`, and
//! `limit` is what block size and checksums allow, no other value. Entry 0 has no hash and
//! stands for all names below entry 1; entries are sorted by hash; bit 0 of a hash says that
//! names with that hash also end the block before. Depth is at most 2 index levels, 3 with
//! `large_dir`. Functions are pure: reading blocks and loop checks between blocks are the
//! caller's, [`Depth`] bounds the way down.
//!
//! Format: Linux `Documentation/filesystems/ext4/directory.rst`, "Hash Tree Directories".

use crate::checksum;
use crate::dirent::{self, DirFormat};
use crate::error::{FormatError, Result};
use crate::features::Incompat;
use crate::geometry::Geometry;
use crate::hash::HashVersion;
use crate::le;
use crate::types::{InodeNo, LogicalBlock};

const WHAT: &str = "directory index";

const ENTRY_BYTES: usize = 8;
/// `.` and `..` at the start of the root.
const DOTS_BYTES: usize = 24;
const DOT_BYTES: usize = 12;
/// `struct dx_root_info`, the only length there has ever been.
const INFO_BYTES: usize = 8;
const ROOT_COUNTLIMIT_OFFSET: usize = DOTS_BYTES + INFO_BYTES;
const NODE_COUNTLIMIT_OFFSET: usize = 8;
/// `struct dx_tail`.
const TAIL_BYTES: usize = 8;
/// High four bits of a block number are kept for flags that no kernel sets.
const BLOCK_MASK: u32 = 0x0fff_ffff;

/// Most links that a directory may count; with `dir_nlink` an indexed directory beyond it
/// counts 1 for good (`EXT4_LINK_MAX`).
pub const LINK_COUNT_MAX: u32 = 65_000;

/// Which of the two index layouts a block has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DxKind {
    /// Block 0 of the directory.
    Root,
    /// Any other index block.
    Node,
}

/// Number of index levels that a directory may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Depth {
    /// Index levels possible, the root among them: 2, or 3 with feature `large_dir`.
    pub levels_max: u8,
}

impl Depth {
    /// The limit of a file system with or without `large_dir`.
    pub fn new(large_dir: bool) -> Depth {
        Depth { levels_max: if large_dir { 3 } else { 2 } }
    }

    /// The limit of a file system.
    pub fn of(geometry: &Geometry) -> Depth {
        Depth::new(geometry.features.incompat.contains(Incompat::LARGEDIR))
    }
}

/// `struct dx_root_info`, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DxRootInfo {
    /// `hash_version`: see [`HashVersion::from_disk`].
    pub hash_version: u8,
    /// Index levels below the root.
    pub indirect_levels: u8,
}

/// Most entries of an index block.
pub fn limit(kind: DxKind, format: &DirFormat) -> usize {
    let taken = countlimit_offset(kind).saturating_add(tail_bytes(format));
    format.block_bytes.saturating_sub(taken) / ENTRY_BYTES
}

fn countlimit_offset(kind: DxKind) -> usize {
    match kind {
        DxKind::Root => ROOT_COUNTLIMIT_OFFSET,
        DxKind::Node => NODE_COUNTLIMIT_OFFSET,
    }
}

fn tail_bytes(format: &DirFormat) -> usize {
    if format.metadata_csum { TAIL_BYTES } else { 0 }
}

/// The entries of an index block, count and limit checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DxEntries<'a> {
    /// `count` entries; the first holds count and limit in place of a hash.
    entries: &'a [[u8; ENTRY_BYTES]],
    limit: usize,
}

impl<'a> DxEntries<'a> {
    fn parse(block: &'a [u8], kind: DxKind, format: &DirFormat) -> Result<DxEntries<'a>> {
        FormatError::check_len(WHAT, block, format.block_bytes)?;
        let start = countlimit_offset(kind);
        let expected = limit(kind, format);
        let stored = usize::from(le::get_u16(WHAT, block, start)?);
        let count = usize::from(le::get_u16(WHAT, block, start.saturating_add(2))?);
        if stored != expected {
            let detail = format!("limit is {stored} in place of {expected}");
            return Err(FormatError::corrupt(WHAT, detail));
        }
        if count == 0 || count > expected {
            return Err(FormatError::corrupt(WHAT, format!("{count} entries of {expected}")));
        }
        let bytes = le::slice(WHAT, block, start, count.saturating_mul(ENTRY_BYTES))?;
        Ok(DxEntries { entries: bytes.as_chunks().0, limit: expected })
    }

    /// Number of entries, at least 1.
    pub fn count(&self) -> usize {
        self.entries.len()
    }

    /// Whether no further entry fits.
    pub fn is_full(&self) -> bool {
        self.entries.len() >= self.limit
    }

    /// Hash of entry `index` with its continuation bit; 0 for entry 0.
    ///
    /// # Errors
    /// [`FormatError::Usage`] when there is no such entry; so for the other accessors.
    pub fn hash(&self, index: usize) -> Result<u32> {
        let [h0, h1, h2, h3, ..] = *self.entry(index)?;
        Ok(if index == 0 { 0 } else { u32::from_le_bytes([h0, h1, h2, h3]) })
    }

    /// The directory block that entry `index` points to.
    ///
    /// # Errors
    /// [`FormatError::Usage`] when there is no such entry.
    pub fn block(&self, index: usize) -> Result<LogicalBlock> {
        let [.., b0, b1, b2, b3] = *self.entry(index)?;
        Ok(LogicalBlock(u32::from_le_bytes([b0, b1, b2, b3]) & BLOCK_MASK))
    }

    fn entry(&self, index: usize) -> Result<&'a [u8; ENTRY_BYTES]> {
        self.entries.get(index).ok_or_else(|| {
            let count = self.entries.len();
            FormatError::Usage(format!("directory index entry {index} of {count}"))
        })
    }

    /// Index of the entry whose block holds names with this hash: the last one with a hash not
    /// greater. When entries are out of order the answer is some valid index.
    pub fn search(&self, hash: u32) -> usize {
        let above = self.entries.get(1..).unwrap_or_default();
        above.partition_point(|[h0, h1, h2, h3, ..]| {
            u32::from_le_bytes([*h0, *h1, *h2, *h3]) <= hash
        })
    }

    /// Whether the block after entry `index - 1` may hold more names with `hash` that go on in
    /// entry `index`: lookups must then look there too.
    ///
    /// # Errors
    /// [`FormatError::Usage`] when there is no such entry.
    pub fn continues(&self, index: usize, hash: u32) -> Result<bool> {
        // Names have bit 0 clear, so an equal hash without the mark means that all are there.
        Ok(self.hash(index)? & !1 == hash & !1)
    }

    /// Whether hashes rise from entry to entry.
    pub fn is_sorted(&self) -> bool {
        let hashes = self.entries.iter().skip(1);
        hashes.map(|[h0, h1, h2, h3, ..]| u32::from_le_bytes([*h0, *h1, *h2, *h3])).is_sorted()
    }
}

/// Decodes and checks the root of an indexed directory.
///
/// # Errors
/// [`FormatError::Corrupt`] when a rule of the format is broken or the depth exceeds `depth`,
/// [`FormatError::Incompatible`] for a depth that only `large_dir` allows.
pub fn parse_root<'a>(
    block: &'a [u8],
    format: &DirFormat,
    depth: Depth,
) -> Result<(DxRootInfo, DxEntries<'a>)> {
    let corrupt = |detail: &str| FormatError::corrupt(WHAT, detail);
    FormatError::check_len(WHAT, block, format.block_bytes)?;
    let info = read_info(block, format)?;
    if info.indirect_levels >= depth.levels_max {
        if info.indirect_levels < Depth::new(true).levels_max {
            return Err(FormatError::Incompatible {
                feature: "a directory of three index levels without feature large_dir".into(),
            });
        }
        return Err(corrupt("the root claims more levels than a tree can have"));
    }
    Ok((info, DxEntries::parse(block, DxKind::Root, format)?))
}

/// The parent's inode number in an index root.
///
/// # Errors
/// [`FormatError::Corrupt`] when the block does not begin with `.` and `..`.
pub fn root_parent(block: &[u8], format: &DirFormat) -> Result<InodeNo> {
    let dotdot = root_dotdot(block, format)?;
    dotdot.inode.ok_or_else(|| FormatError::corrupt(WHAT, "'..' names no inode"))
}

/// `..` in a root: its record spans the rest of the *block*, checksum tail and all.
fn root_dotdot<'a>(block: &'a [u8], format: &DirFormat) -> Result<dirent::DirEntry<'a>> {
    let dotdot = dirent::dotdot(le::slice(WHAT, block, 0, format.block_bytes)?, format)?;
    if dotdot.offset != DOT_BYTES
        || dotdot.offset.saturating_add(dotdot.rec_len) != format.block_bytes
    {
        return Err(FormatError::corrupt(WHAT, "the root does not begin with '.' and '..'"));
    }
    Ok(dotdot)
}

/// Lets `..` of an index root name another parent.
///
/// # Errors
/// As [`root_parent`], and [`FormatError::Usage`] when there is no such inode.
pub fn set_root_parent(block: &mut [u8], format: &DirFormat, parent: InodeNo) -> Result<()> {
    let offset = root_dotdot(block, format)?.offset;
    dirent::set_inode(block, format, offset, parent, dirent::FileType::Directory)
}

fn read_info(block: &[u8], format: &DirFormat) -> Result<DxRootInfo> {
    let corrupt = |detail: &str| FormatError::corrupt(WHAT, detail);
    root_dotdot(block, format)?;
    let info = le::slice(WHAT, block, DOTS_BYTES, INFO_BYTES)?;
    let &[z0, z1, z2, z3, hash_version, info_length, indirect_levels, unused_flags] = info else {
        return Err(corrupt("the root is too short"));
    };
    if [z0, z1, z2, z3] != [0; 4] {
        return Err(corrupt("the root's reserved field is not zero"));
    }
    if usize::from(info_length) != INFO_BYTES {
        return Err(corrupt("the root's info_length is not 8"));
    }
    if unused_flags & 1 != 0 {
        return Err(corrupt("the root has unknown flags"));
    }
    Ok(DxRootInfo { hash_version, indirect_levels })
}

/// Decodes and checks an index block below the root.
///
/// # Errors
/// [`FormatError::Corrupt`] when a rule of the format is broken.
pub fn parse_node<'a>(block: &'a [u8], format: &DirFormat) -> Result<DxEntries<'a>> {
    FormatError::check_len(WHAT, block, format.block_bytes)?;
    let inode = le::get_u32(WHAT, block, 0)?;
    let rec_len = dirent::rec_len_from_disk(le::get_u16(WHAT, block, 4)?, format.block_bytes);
    if inode != 0 || rec_len != format.block_bytes {
        return Err(FormatError::corrupt(WHAT, "a leaf stands where an index block should"));
    }
    DxEntries::parse(block, DxKind::Node, format)
}

/// Whether a block of a directory may be a node of its index: to those who know no index it is one entry
/// without an inode. A block without entries looks the same if it has no checksum.
pub fn looks_like_node(block: &[u8], format: &DirFormat) -> bool {
    let rec_len =
        |low, high| dirent::rec_len_from_disk(u16::from_le_bytes([low, high]), format.block_bytes);
    matches!(*block, [0, 0, 0, 0, low, high, ..] if rec_len(low, high) == format.block_bytes)
}

/// The entries of an index block of either kind.
///
/// # Errors
/// [`FormatError::Corrupt`] when a rule of the format is broken.
pub fn parse<'a>(block: &'a [u8], kind: DxKind, format: &DirFormat) -> Result<DxEntries<'a>> {
    match kind {
        DxKind::Root => parse_root(block, format, Depth::new(true)).map(|(_, entries)| entries),
        DxKind::Node => parse_node(block, format),
    }
}

/// Adds an entry after entry `after`, in the order that the caller's search gave.
///
/// # Errors
/// [`FormatError::NoRoom`] when the block is full, [`FormatError::Usage`] when there is no entry
/// `after` or the block number has more than 28 bits.
pub fn insert(
    block: &mut [u8],
    kind: DxKind,
    format: &DirFormat,
    after: usize,
    hash: u32,
    target: LogicalBlock,
) -> Result<()> {
    let entries = parse(block, kind, format)?;
    let count = entries.count();
    entries.entry(after)?;
    if entries.is_full() {
        return Err(FormatError::NoRoom {
            structure: WHAT,
            need: count as u64 + 1,
            capacity: entries.limit as u64,
        });
    }
    check_target(target)?;
    let start = countlimit_offset(kind);
    let at = after.saturating_add(1).saturating_mul(ENTRY_BYTES);
    let used = count.saturating_mul(ENTRY_BYTES);
    let area = le::slice_mut(WHAT, block, start, used.saturating_add(ENTRY_BYTES))?;
    area.copy_within(at..used, at.saturating_add(ENTRY_BYTES));
    le::put_u32(WHAT, area, at, hash)?;
    le::put_u32(WHAT, area, at.saturating_add(4), target.0)?;
    put_count(area, count.saturating_add(1))
}

fn check_target(target: LogicalBlock) -> Result<()> {
    if target.0 > BLOCK_MASK {
        return Err(FormatError::Usage(format!("directory block {target} exceeds 28 bits")));
    }
    Ok(())
}

fn as_u16(value: usize) -> Result<u16> {
    u16::try_from(value).map_err(|_| FormatError::Usage(format!("{value} index entries")))
}

/// Writes the count into an area that begins with the count and limit.
fn put_count(area: &mut [u8], count: usize) -> Result<()> {
    le::put_u16(WHAT, area, 2, as_u16(count)?)
}

/// Makes `block` an index block with the entries `moved` (entry 0 first, as on disk).
fn init_node(block: &mut [u8], format: &DirFormat, moved: &[u8]) -> Result<()> {
    let block = le::slice_mut(WHAT, block, 0, format.block_bytes)?;
    block.fill(0);
    let rec_len = dirent::rec_len_to_disk(format.block_bytes, format.block_bytes)?;
    le::put_u16(WHAT, block, 4, rec_len)?;
    le::put(WHAT, block, NODE_COUNTLIMIT_OFFSET, moved)?;
    let area = block.get_mut(NODE_COUNTLIMIT_OFFSET..).unwrap_or_default();
    le::put_u16(WHAT, area, 0, as_u16(limit(DxKind::Node, format))?)?;
    put_count(area, moved.len() / ENTRY_BYTES)
}

/// What [`split_node`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeSplit {
    /// Hash to insert in the parent for the new node.
    pub hash: u32,
    /// Number of entries that stayed; entry `i` of before is entry `i - stayed` of the new node.
    pub stayed: usize,
}

/// Moves the upper half of a node's entries to `new_block`. The caller inserts
/// [`NodeSplit::hash`] with the new block into the parent. Checksums are not yet set.
///
/// # Errors
/// [`FormatError::Corrupt`] when `block` is no valid node, [`FormatError::Usage`] when it has
/// fewer than two entries.
pub fn split_node(block: &mut [u8], new_block: &mut [u8], format: &DirFormat) -> Result<NodeSplit> {
    FormatError::check_len(WHAT, new_block, format.block_bytes)?;
    let entries = parse_node(block, format)?;
    let stayed = entries.count() / 2;
    if stayed == 0 {
        return Err(FormatError::Usage("an index node of one entry cannot be split".into()));
    }
    let hash = entries.hash(stayed)?;
    let moved = entries.entries.get(stayed..).unwrap_or_default().as_flattened();
    init_node(new_block, format, moved)?;
    let area = block.get_mut(NODE_COUNTLIMIT_OFFSET..).unwrap_or_default();
    put_count(area, stayed)?;
    Ok(NodeSplit { hash, stayed })
}

/// Moves all entries of a full root to `new_block`, which becomes the root's only child: the
/// tree is one level deeper. Checksums are not yet set.
///
/// # Errors
/// [`FormatError::Corrupt`] when `block` is no valid root, [`FormatError::NoRoom`] when the tree
/// is as deep as `depth` allows.
pub fn grow_root(
    block: &mut [u8],
    new_block: &mut [u8],
    format: &DirFormat,
    depth: Depth,
    new_at: LogicalBlock,
) -> Result<()> {
    FormatError::check_len(WHAT, new_block, format.block_bytes)?;
    check_target(new_at)?;
    let (info, entries) = parse_root(block, format, depth)?;
    let levels = info.indirect_levels.saturating_add(1);
    if levels >= depth.levels_max {
        return Err(FormatError::NoRoom {
            structure: WHAT,
            need: u64::from(levels) + 1,
            capacity: u64::from(depth.levels_max),
        });
    }
    init_node(new_block, format, entries.entries.as_flattened())?;
    le::put(WHAT, block, DOTS_BYTES + 6, &[levels])?;
    let area = le::slice_mut(WHAT, block, ROOT_COUNTLIMIT_OFFSET, ENTRY_BYTES)?;
    put_count(area, 1)?;
    le::put_u32(WHAT, area, 4, new_at.0)
}

/// Turns the only block of a linear directory into an index root: its entries but `.` and `..`
/// go to `leaf`, which becomes block `leaf_at`. Checksums are not yet set.
///
/// # Errors
/// [`FormatError::Corrupt`] when the block does not begin with `.` and `..` or an entry breaks a
/// rule; both blocks are then as they were.
pub fn make_indexed(
    block: &mut [u8],
    leaf: &mut [u8],
    format: &DirFormat,
    version: HashVersion,
    leaf_at: LogicalBlock,
) -> Result<()> {
    FormatError::check_len(WHAT, leaf, format.block_bytes)?;
    check_target(leaf_at)?;
    let area = format.entries_area(block)?;
    let parent = dirent::dotdot(area, format)?;
    let directory = format.entry_at(area, 0)?.inode;
    let (Some(directory), Some(parent_inode)) = (directory, parent.inode) else {
        return Err(FormatError::corrupt(WHAT, "'.' or '..' names no inode"));
    };
    let mut moved = Vec::new();
    let mut last = None;
    for entry in dirent::records(area, format) {
        let entry = entry?;
        if entry.offset > parent.offset {
            last = Some((entry.offset, entry.rec_len));
        }
    }
    let start = parent.offset.saturating_add(parent.rec_len);
    moved.extend_from_slice(area.get(start..).unwrap_or_default());
    dirent::init_block(leaf, format)?;
    if let Some((offset, rec_len)) = last {
        let leaf_area = format.entries_area_mut(leaf)?;
        le::put(WHAT, leaf_area, 0, &moved)?;
        // The last record grows by the bytes that '.' and '..' took.
        let raw = dirent::rec_len_to_disk(rec_len.saturating_add(start), format.block_bytes)?;
        le::put_u16(WHAT, leaf_area, offset.saturating_sub(start).saturating_add(4), raw)?;
    }
    init_root(block, format, directory, parent_inode, version, leaf_at)
}

/// Makes `block` the root of an index with one leaf.
///
/// # Errors
/// [`FormatError::Truncated`] unless the block has the file system's block size,
/// [`FormatError::Usage`] for inode or block numbers that cannot be.
pub fn init_root(
    block: &mut [u8],
    format: &DirFormat,
    directory: InodeNo,
    parent: InodeNo,
    version: HashVersion,
    leaf_at: LogicalBlock,
) -> Result<()> {
    check_target(leaf_at)?;
    // '..' spans the block to its end, where the index has its own tail.
    let whole = DirFormat { metadata_csum: false, ..*format };
    dirent::init_first_block(block, &whole, directory, parent)?;
    let info = [0, 0, 0, 0, version.to_disk(), INFO_BYTES as u8, 0, 0];
    le::put(WHAT, block, DOTS_BYTES, &info)?;
    let root_limit = as_u16(limit(DxKind::Root, format))?;
    let area = le::slice_mut(WHAT, block, ROOT_COUNTLIMIT_OFFSET, ENTRY_BYTES)?;
    le::put_u16(WHAT, area, 0, root_limit)?;
    put_count(area, 1)?;
    le::put_u32(WHAT, area, 4, leaf_at.0)
}

/// Checksum of an index block, and where it is stored.
fn compute(
    block: &[u8],
    kind: DxKind,
    format: &DirFormat,
    inode_seed: u32,
) -> Result<(u32, usize)> {
    let count = parse(block, kind, format)?.count();
    let start = countlimit_offset(kind);
    let used = start.saturating_add(count.saturating_mul(ENTRY_BYTES));
    let tail = start.saturating_add(limit(kind, format).saturating_mul(ENTRY_BYTES));
    // Free entries are left out; the tail counts with its checksum as zero.
    let crc = checksum::crc32c(inode_seed, le::slice(WHAT, block, 0, used)?);
    let crc = checksum::crc32c(crc, le::slice(WHAT, block, tail, 4)?);
    Ok((checksum::crc32c(crc, &[0; 4]), tail.saturating_add(4)))
}

/// Checks the checksum of an index block; passes without `metadata_csum`.
/// `inode_seed` is [`checksum::inode_seed`] of the directory.
///
/// # Errors
/// [`FormatError::Corrupt`] for a malformed block, [`FormatError::Checksum`].
pub fn verify_checksum(
    block: &[u8],
    kind: DxKind,
    format: &DirFormat,
    inode_seed: u32,
) -> Result<()> {
    if !format.metadata_csum {
        return Ok(());
    }
    let (computed, offset) = compute(block, kind, format, inode_seed)?;
    FormatError::check_checksum(WHAT, le::get_u32(WHAT, block, offset)?, computed)
}

/// Sets the checksum of an index block; does nothing without `metadata_csum`.
///
/// # Errors
/// [`FormatError::Corrupt`] for a malformed block.
pub fn set_checksum(
    block: &mut [u8],
    kind: DxKind,
    format: &DirFormat,
    inode_seed: u32,
) -> Result<()> {
    if !format.metadata_csum {
        return Ok(());
    }
    let (computed, offset) = compute(block, kind, format, inode_seed)?;
    le::put_u32(WHAT, block, offset, computed)
}
