//! Nodes of extent trees: the root in `i_block` and whole blocks below it.
//!
//! A node is a 12-byte header and 12-byte entries, in a block followed by a checksum.
//! Invariant: an [`ExtentNode`] or [`ExtentNodeMut`] was checked when it was made, and every
//! change through the latter keeps it so: header in range, entries sorted, extents not
//! overlapping and inside the 32-bit space, every pointer inside the file system.

use crate::checksum;
use crate::error::{FormatError, Result};
use crate::geometry::Geometry;
use crate::inode::I_BLOCK_BYTES;
use crate::types::{BlockNo, LogicalBlock};

const STRUCTURE: &str = "extent node";
const MAGIC: u16 = 0xf30a;
const HEADER_BYTES: usize = 12;
const ENTRY_BYTES: usize = 12;
const TAIL_BYTES: usize = 4;
/// Deepest tree that Linux builds or takes.
pub const EXTENT_DEPTH_MAX: u16 = 5;
/// Most blocks of one written extent.
pub const EXTENT_LEN_MAX: u32 = 32768;
/// Most blocks of one unwritten extent.
pub const EXTENT_UNWRITTEN_LEN_MAX: u32 = 32767;
/// Largest block number that an extent can hold: 48 bits.
pub const EXTENT_BLOCK_MAX: u64 = (1 << 48) - 1;

/// Which kind of bytes a node lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeKind {
    /// The 60 bytes of `i_block`; no checksum of its own.
    Root,
    /// A block of its own, with a checksum where the file system has them.
    Block,
}

/// One extent: a run of file blocks at a run of physical blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First block in the file.
    pub logical: LogicalBlock,
    /// Blocks in the run: 1 to [`EXTENT_LEN_MAX`], for unwritten ones one less.
    pub len: u32,
    /// First physical block.
    pub start: BlockNo,
    /// Allocated but never written: reads as zeroes.
    pub unwritten: bool,
}

impl Extent {
    /// The block after the last one (units: file blocks), which may be 2^32.
    pub fn logical_end(&self) -> u64 {
        u64::from(self.logical.0) + u64::from(self.len)
    }

    /// The physical block of a file block inside this extent, or `None` outside it.
    pub fn physical(&self, logical: LogicalBlock) -> Option<BlockNo> {
        let offset = logical.0.checked_sub(self.logical.0)?;
        (offset < self.len).then(|| BlockNo(self.start.0 + u64::from(offset)))
    }

    /// Most blocks that an extent in this state can have.
    pub fn len_max(unwritten: bool) -> u32 {
        if unwritten { EXTENT_UNWRITTEN_LEN_MAX } else { EXTENT_LEN_MAX }
    }

    /// Whether `next` goes on where this one ends, in the file and on disk and in the same
    /// state, and both fit one extent.
    pub fn can_merge(&self, next: &Extent) -> bool {
        self.unwritten == next.unwritten
            && self.logical_end() == u64::from(next.logical.0)
            && self.start.0 + u64::from(self.len) == next.start.0
            && self.len.saturating_add(next.len) <= Extent::len_max(self.unwritten)
    }
}

/// One index entry: the child that covers file blocks from `logical` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtentIndex {
    /// First block in the file that the child covers.
    pub logical: LogicalBlock,
    /// Block of the child.
    pub leaf: BlockNo,
}

/// Entries that fit a node of this kind.
pub fn capacity(kind: NodeKind, geometry: &Geometry) -> u16 {
    let bytes = match kind {
        NodeKind::Root => I_BLOCK_BYTES,
        NodeKind::Block => geometry.block_size as usize,
    };
    // At most 5460 with blocks of 64 KiB; the checksum fits in what the division leaves.
    ((bytes - HEADER_BYTES) / ENTRY_BYTES) as u16
}

fn corrupt(detail: impl Into<String>) -> FormatError {
    FormatError::corrupt(STRUCTURE, detail)
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn entry_at(index: usize) -> usize {
    HEADER_BYTES + index * ENTRY_BYTES
}

/// A node that has been checked, to be read.
#[derive(Clone, Copy, Debug)]
pub struct ExtentNode<'a> {
    bytes: &'a [u8],
}

impl<'a> ExtentNode<'a> {
    /// Checks a node and takes it. `depth` is what the parent says (its own less one), `None`
    /// for a root. The checksum of a block is checked apart, by [`verify_checksum`], before.
    ///
    /// # Errors
    /// [`FormatError::BadMagic`], [`FormatError::Corrupt`], [`FormatError::Truncated`].
    pub fn parse(
        bytes: &'a [u8],
        kind: NodeKind,
        depth: Option<u16>,
        geometry: &Geometry,
    ) -> Result<ExtentNode<'a>> {
        let node = ExtentNode::parse_header(bytes, kind, depth, geometry)?;
        if node.is_leaf() {
            node.check_extents(geometry)?;
        } else {
            node.check_indices(geometry)?;
        }
        Ok(node)
    }

    /// As [`ExtentNode::parse`] without a look at the entries, for a block in memory that
    /// was parsed when it was read. The caller checks the entries that it follows.
    ///
    /// # Errors
    /// As [`ExtentNode::parse`], of the header alone.
    pub fn parse_header(
        bytes: &'a [u8],
        kind: NodeKind,
        depth: Option<u16>,
        geometry: &Geometry,
    ) -> Result<ExtentNode<'a>> {
        check_header(bytes, kind, geometry)?;
        let node = ExtentNode { bytes };
        if node.depth() > EXTENT_DEPTH_MAX {
            return Err(corrupt(format!("the depth is {}", node.depth())));
        }
        if depth.is_some_and(|depth| depth != node.depth()) {
            return Err(corrupt(format!("the depth is {}, the parent has another", node.depth())));
        }
        Ok(node)
    }

    fn check_extents(&self, geometry: &Geometry) -> Result<()> {
        let mut free_from = 0;
        for extent in self.extents() {
            if extent.len == 0 || u64::from(extent.logical.0) < free_from {
                return Err(corrupt(format!("extents overlap at block {}", extent.logical)));
            }
            free_from = extent.logical_end();
            if free_from > 1 << 32 {
                return Err(corrupt("an extent reaches past the last block of a file"));
            }
            if !geometry.contains_range(extent.start, u64::from(extent.len)) {
                let (start, len) = (extent.start, extent.len);
                return Err(corrupt(format!("{len} blocks at {start} lie outside the image")));
            }
        }
        Ok(())
    }

    fn check_indices(&self, geometry: &Geometry) -> Result<()> {
        if self.is_empty() {
            return Err(corrupt("an index node has no entries"));
        }
        let mut last = None;
        for index in self.indices() {
            if last >= Some(index.logical) {
                return Err(corrupt(format!("indices are out of order at {}", index.logical)));
            }
            last = Some(index.logical);
            if !geometry.contains(index.leaf) {
                return Err(corrupt(format!("a child cannot lie at block {}", index.leaf)));
            }
        }
        Ok(())
    }

    /// Levels below this node; 0 for a leaf.
    pub fn depth(&self) -> u16 {
        u16_at(self.bytes, 6)
    }

    /// Whether the entries are extents.
    pub fn is_leaf(&self) -> bool {
        self.depth() == 0
    }

    /// Entries in use.
    pub fn len(&self) -> usize {
        usize::from(u16_at(self.bytes, 2))
    }

    /// Whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Entries that fit.
    pub fn max(&self) -> usize {
        usize::from(u16_at(self.bytes, 4))
    }

    /// Whether no further entry fits.
    pub fn is_full(&self) -> bool {
        self.len() >= self.max()
    }

    /// `eh_generation`, unused by Linux.
    pub fn generation(&self) -> u32 {
        u32_at(self.bytes, 8)
    }

    /// The extent at this place of a leaf; `None` past the last one or in an index node.
    pub fn extent(&self, at: usize) -> Option<Extent> {
        (self.is_leaf() && at < self.len()).then(|| read_extent(self.bytes, at))
    }

    /// The entry at this place of an index node; `None` past the last one or in a leaf.
    pub fn index(&self, at: usize) -> Option<ExtentIndex> {
        (!self.is_leaf() && at < self.len()).then(|| read_index(self.bytes, at))
    }

    /// All extents of a leaf; nothing for an index node.
    pub fn extents(&self) -> impl Iterator<Item = Extent> + use<'a> {
        let node = *self;
        (0..self.len()).map_while(move |at| node.extent(at))
    }

    /// All entries of an index node; nothing for a leaf.
    pub fn indices(&self) -> impl Iterator<Item = ExtentIndex> + use<'a> {
        let node = *self;
        (0..self.len()).map_while(move |at| node.index(at))
    }

    /// Place of the last entry that starts at or before `logical`, or `None` when even the
    /// first one starts after it.
    pub fn search(&self, logical: LogicalBlock) -> Option<usize> {
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = low + (high - low) / 2;
            // Extent and index entry both begin with their first file block.
            if u32_at(self.bytes, entry_at(middle)) <= logical.0 {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low.checked_sub(1)
    }
}

fn check_header(bytes: &[u8], kind: NodeKind, geometry: &Geometry) -> Result<()> {
    let need = match kind {
        NodeKind::Root => I_BLOCK_BYTES,
        NodeKind::Block => geometry.block_size as usize,
    };
    FormatError::check_len(STRUCTURE, bytes, need)?;
    if u16_at(bytes, 0) != MAGIC {
        let found = u32::from(u16_at(bytes, 0));
        return Err(FormatError::BadMagic { structure: STRUCTURE, found });
    }
    let (entries, max) = (u16_at(bytes, 2), u16_at(bytes, 4));
    if max == 0 || max > capacity(kind, geometry) || entries > max {
        return Err(corrupt(format!("{entries} entries of at most {max}")));
    }
    Ok(())
}

fn read_extent(bytes: &[u8], at: usize) -> Extent {
    let at = entry_at(at);
    let raw_len = u32::from(u16_at(bytes, at + 4));
    // Lengths above the largest written one are unwritten extents.
    let unwritten = raw_len > EXTENT_LEN_MAX;
    Extent {
        logical: LogicalBlock(u32_at(bytes, at)),
        len: if unwritten { raw_len - EXTENT_LEN_MAX } else { raw_len },
        start: BlockNo(u64::from(u16_at(bytes, at + 6)) << 32 | u64::from(u32_at(bytes, at + 8))),
        unwritten,
    }
}

fn read_index(bytes: &[u8], at: usize) -> ExtentIndex {
    let at = entry_at(at);
    ExtentIndex {
        logical: LogicalBlock(u32_at(bytes, at)),
        leaf: BlockNo(u64::from(u16_at(bytes, at + 8)) << 32 | u64::from(u32_at(bytes, at + 4))),
    }
}

/// A node that has been checked, to be changed. The caller sets the checksum of a block with
/// [`update_checksum`] when it is done.
#[derive(Debug)]
pub struct ExtentNodeMut<'a> {
    bytes: &'a mut [u8],
    block_count: u64,
}

impl<'a> ExtentNodeMut<'a> {
    /// Checks a node and takes it; see [`ExtentNode::parse`].
    ///
    /// # Errors
    /// As [`ExtentNode::parse`].
    pub fn parse(
        bytes: &'a mut [u8],
        kind: NodeKind,
        depth: Option<u16>,
        geometry: &Geometry,
    ) -> Result<ExtentNodeMut<'a>> {
        ExtentNode::parse(bytes, kind, depth, geometry)?;
        Ok(ExtentNodeMut { bytes, block_count: geometry.block_count })
    }

    /// Makes an empty node of this depth out of any bytes; all of them are cleared.
    ///
    /// # Errors
    /// [`FormatError::Truncated`]; [`FormatError::Usage`] for a depth that is too great.
    pub fn init(
        bytes: &'a mut [u8],
        kind: NodeKind,
        depth: u16,
        geometry: &Geometry,
    ) -> Result<ExtentNodeMut<'a>> {
        if depth > EXTENT_DEPTH_MAX {
            return Err(FormatError::Usage(format!("no extent tree has depth {depth}")));
        }
        let need = match kind {
            NodeKind::Root => I_BLOCK_BYTES,
            NodeKind::Block => geometry.block_size as usize,
        };
        FormatError::check_len(STRUCTURE, bytes, need)?;
        bytes.fill(0);
        bytes[..2].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..6].copy_from_slice(&capacity(kind, geometry).to_le_bytes());
        bytes[6..8].copy_from_slice(&depth.to_le_bytes());
        Ok(ExtentNodeMut { bytes, block_count: geometry.block_count })
    }

    /// The node, to be read.
    pub fn as_node(&self) -> ExtentNode<'_> {
        ExtentNode { bytes: self.bytes }
    }

    /// Puts an extent in at this place of a leaf, moving the later ones up.
    ///
    /// # Errors
    /// [`FormatError::NoRoom`] when full; [`FormatError::Usage`] when it would break the order
    /// or cannot be stored.
    pub fn insert_extent(&mut self, at: usize, extent: Extent) -> Result<()> {
        let (before, after) = self.extent_neighbours(at, at)?;
        self.check_extent(&extent, before, after)?;
        self.open_gap(at)?;
        self.write_extent(at, &extent);
        Ok(())
    }

    /// Puts another extent in the place of one.
    ///
    /// # Errors
    /// [`FormatError::Usage`] when there is none at this place, when the new one would break
    /// the order or cannot be stored.
    pub fn set_extent(&mut self, at: usize, extent: Extent) -> Result<()> {
        self.check_place(at)?;
        let (before, after) = self.extent_neighbours(at, at + 1)?;
        self.check_extent(&extent, before, after)?;
        self.write_extent(at, &extent);
        Ok(())
    }

    /// Puts an entry in at this place of an index node, moving the later ones up.
    ///
    /// # Errors
    /// As [`ExtentNodeMut::insert_extent`].
    pub fn insert_index(&mut self, at: usize, index: ExtentIndex) -> Result<()> {
        self.check_index(&index, at, at)?;
        self.open_gap(at)?;
        self.write_index(at, &index);
        Ok(())
    }

    /// Puts another entry in the place of one.
    ///
    /// # Errors
    /// As [`ExtentNodeMut::set_extent`].
    pub fn set_index(&mut self, at: usize, index: ExtentIndex) -> Result<()> {
        self.check_place(at)?;
        self.check_index(&index, at, at + 1)?;
        self.write_index(at, &index);
        Ok(())
    }

    /// Takes `count` entries out from this place on, moving the later ones down.
    ///
    /// # Errors
    /// [`FormatError::Usage`] when there are fewer.
    pub fn remove(&mut self, at: usize, count: usize) -> Result<()> {
        let len = self.as_node().len();
        let end = at.checked_add(count).filter(|&end| end <= len);
        let end = end.ok_or_else(|| FormatError::Usage(format!("no {count} entries at {at}")))?;
        self.bytes.copy_within(entry_at(end)..entry_at(len), entry_at(at));
        let new_len = len - count;
        self.bytes[entry_at(new_len)..entry_at(len)].fill(0);
        self.set_len(new_len);
        Ok(())
    }

    /// Takes all entries from this place on out and appends them to `to`, which must have the
    /// same depth and room for them.
    ///
    /// # Errors
    /// [`FormatError::Usage`] for another depth, [`FormatError::NoRoom`] for too little room.
    pub fn move_tail_to(&mut self, at: usize, to: &mut ExtentNodeMut<'_>) -> Result<()> {
        let (source, target) = (self.as_node(), to.as_node());
        if source.depth() != target.depth() {
            return Err(FormatError::Usage("entries move between nodes of one depth".into()));
        }
        let count = source.len().saturating_sub(at);
        let (filled, max) = (target.len(), target.max());
        if filled + count > max {
            return Err(FormatError::NoRoom {
                structure: STRUCTURE,
                need: (filled + count) as u64,
                capacity: max as u64,
            });
        }
        let last = filled.checked_sub(1);
        let first_block = |bytes: &[u8], at: usize| u32_at(bytes, entry_at(at));
        if count > 0
            && last.is_some_and(|last| first_block(to.bytes, last) >= first_block(self.bytes, at))
        {
            return Err(FormatError::Usage("entries would be out of order".into()));
        }
        let moved = &self.bytes[entry_at(at)..entry_at(at + count)];
        to.bytes[entry_at(filled)..entry_at(filled + count)].copy_from_slice(moved);
        to.set_len(filled + count);
        self.remove(at, count)
    }

    fn set_len(&mut self, len: usize) {
        // Never above `eh_max`, which has 16 bits.
        self.bytes[2..4].copy_from_slice(&(len as u16).to_le_bytes());
    }

    fn check_place(&self, at: usize) -> Result<()> {
        if at < self.as_node().len() {
            return Ok(());
        }
        Err(FormatError::Usage(format!("the extent node has no entry {at}")))
    }

    fn open_gap(&mut self, at: usize) -> Result<()> {
        let node = self.as_node();
        let (len, max) = (node.len(), node.max());
        if len >= max {
            return Err(FormatError::NoRoom {
                structure: STRUCTURE,
                need: len as u64 + 1,
                capacity: max as u64,
            });
        }
        self.bytes.copy_within(entry_at(at)..entry_at(len), entry_at(at + 1));
        self.set_len(len + 1);
        Ok(())
    }

    /// The extents before place `before_end` and at place `after_start`.
    fn extent_neighbours(
        &self,
        before_end: usize,
        after_start: usize,
    ) -> Result<(Option<Extent>, Option<Extent>)> {
        let node = self.as_node();
        if !node.is_leaf() || before_end > node.len() {
            return Err(FormatError::Usage(format!("no extent can stand at place {before_end}")));
        }
        let before = before_end.checked_sub(1).and_then(|at| node.extent(at));
        Ok((before, node.extent(after_start)))
    }

    fn check_extent(
        &self,
        extent: &Extent,
        before: Option<Extent>,
        after: Option<Extent>,
    ) -> Result<()> {
        let fits = extent.len > 0
            && extent.len <= Extent::len_max(extent.unwritten)
            && extent.logical_end() <= 1 << 32
            && extent.start.0 <= EXTENT_BLOCK_MAX
            && extent.start.0.saturating_add(u64::from(extent.len)) <= self.block_count;
        let ordered = before.is_none_or(|b| b.logical_end() <= u64::from(extent.logical.0))
            && after.is_none_or(|a| extent.logical_end() <= u64::from(a.logical.0));
        if fits && ordered {
            return Ok(());
        }
        Err(FormatError::Usage(format!("{extent:?} cannot stand here")))
    }

    fn check_index(&self, index: &ExtentIndex, before_end: usize, after: usize) -> Result<()> {
        let node = self.as_node();
        let before = before_end.checked_sub(1).and_then(|at| node.index(at));
        let ordered = !node.is_leaf()
            && before_end <= node.len()
            && before.is_none_or(|b| b.logical < index.logical)
            && node.index(after).is_none_or(|a| index.logical < a.logical);
        if ordered && index.leaf.0 < self.block_count && index.leaf.0 <= EXTENT_BLOCK_MAX {
            return Ok(());
        }
        Err(FormatError::Usage(format!("{index:?} cannot stand at place {before_end}")))
    }

    fn write_extent(&mut self, at: usize, extent: &Extent) {
        let raw_len = if extent.unwritten { extent.len + EXTENT_LEN_MAX } else { extent.len };
        let entry = &mut self.bytes[entry_at(at)..entry_at(at + 1)];
        entry[..4].copy_from_slice(&extent.logical.0.to_le_bytes());
        entry[4..6].copy_from_slice(&(raw_len as u16).to_le_bytes());
        entry[6..8].copy_from_slice(&((extent.start.0 >> 32) as u16).to_le_bytes());
        entry[8..].copy_from_slice(&(extent.start.0 as u32).to_le_bytes());
    }

    fn write_index(&mut self, at: usize, index: &ExtentIndex) {
        let entry = &mut self.bytes[entry_at(at)..entry_at(at + 1)];
        entry[..4].copy_from_slice(&index.logical.0.to_le_bytes());
        entry[4..8].copy_from_slice(&(index.leaf.0 as u32).to_le_bytes());
        entry[8..10].copy_from_slice(&((index.leaf.0 >> 32) as u16).to_le_bytes());
        entry[10..].fill(0);
    }
}

/// Where the checksum of a node block lies: right after the last possible entry.
fn tail_offset(block: &[u8], geometry: &Geometry) -> Result<usize> {
    check_header(block, NodeKind::Block, geometry)?;
    let offset = entry_at(usize::from(u16_at(block, 4)));
    FormatError::check_len(STRUCTURE, block, offset + TAIL_BYTES)?;
    Ok(offset)
}

/// Checks the checksum of a node block (no-op without `metadata_csum`). `inode_seed` is
/// [`checksum::inode_seed`] of the inode that the tree belongs to.
///
/// # Errors
/// [`FormatError::Checksum`], or what is wrong with the header that says where it lies.
pub fn verify_checksum(block: &[u8], inode_seed: u32, geometry: &Geometry) -> Result<()> {
    if !geometry.features.has_metadata_csum() {
        return Ok(());
    }
    let offset = tail_offset(block, geometry)?;
    let computed = checksum::crc32c(inode_seed, &block[..offset]);
    FormatError::check_checksum(STRUCTURE, u32_at(block, offset), computed)
}

/// Sets the checksum of a node block (no-op without `metadata_csum`).
///
/// # Errors
/// What is wrong with the header that says where the checksum lies.
pub fn update_checksum(block: &mut [u8], inode_seed: u32, geometry: &Geometry) -> Result<()> {
    if !geometry.features.has_metadata_csum() {
        return Ok(());
    }
    let offset = tail_offset(block, geometry)?;
    let computed = checksum::crc32c(inode_seed, &block[..offset]);
    block[offset..offset + TAIL_BYTES].copy_from_slice(&computed.to_le_bytes());
    Ok(())
}
