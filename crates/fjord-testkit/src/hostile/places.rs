//! Where the structures of a sound image lie.
//!
//! Owns a walk over the metadata of an image that is known to be sound; it must not be used on
//! anything else. Invariant: a [`Place`] lies inside the image.

use std::collections::HashSet;

use anyhow::{Context, Result};
use fjord_block::MemImage;
use fjord_format::extent::{ExtentNode, NodeKind};
use fjord_format::geometry::Geometry;
use fjord_format::group::GroupDesc;
use fjord_format::htree::DxKind;
use fjord_format::inode::{DiskInode, InodeFlags};
use fjord_format::superblock::{RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSET_BYTES};
use fjord_format::{BlockNo, GroupNo, InodeNo, checksum};

/// What lies at a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// The primary superblock.
    Superblock,
    /// One group descriptor.
    Descriptor,
    /// A block bitmap.
    BlockBitmap,
    /// An inode bitmap.
    InodeBitmap,
    /// An inode in use.
    Inode,
    /// A block of an extent tree.
    Extents,
    /// A block of an indirect map.
    Indirect,
    /// A leaf block of a directory.
    Dirents,
    /// An index block of a directory.
    Htree,
    /// An attribute block.
    Xattrs,
    /// A block of a value kept in an inode.
    Value,
    /// A block of the orphan file.
    OrphanFile,
    /// The journal's superblock.
    JournalSuper,
    /// A block of the log.
    Log,
}

/// How the checksum of a place is set anew.
#[derive(Debug, Clone, Copy)]
pub enum Seal {
    /// There is none.
    None,
    /// Superblock.
    Superblock,
    /// Descriptor of a group.
    Descriptor(GroupNo),
    /// Bitmap, whose checksum is in the group's descriptor.
    BlockBitmap(GroupNo),
    /// The same of inodes.
    InodeBitmap(GroupNo),
    /// Inode.
    Inode(InodeNo),
    /// Extent block of the inode with this seed.
    Extents(u32),
    /// Directory leaf of the inode with this seed.
    Dirents(u32),
    /// Directory index.
    Htree(u32, DxKind),
    /// Attribute block.
    Xattrs(BlockNo),
    /// Orphan file block.
    OrphanFile(u32, BlockNo),
    /// Journal superblock.
    JournalSuper,
    /// Log block of the journal with this seed; the block's own header says which kind.
    Log(u32),
}

/// One structure.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// What it is.
    pub kind: Kind,
    /// First byte on the device.
    pub at: u64,
    /// Length in bytes.
    pub len: usize,
    /// Its checksum.
    pub seal: Seal,
}

struct Walk<'a> {
    image: &'a MemImage,
    geo: Geometry,
    raw: RawSuperblock,
    places: Vec<Place>,
    seen: HashSet<u64>,
}

/// The superblock and layout of an image, if it still has both.
pub(super) fn layout(image: &MemImage) -> Option<(RawSuperblock, Geometry)> {
    let mut bytes = [0; SUPERBLOCK_BYTES];
    image.read_at(SUPERBLOCK_OFFSET_BYTES, &mut bytes).ok()?;
    let raw = RawSuperblock::decode(&bytes).ok()?;
    let geo = Geometry::from_superblock(&raw).ok()?;
    Some((raw, geo))
}

/// Byte offset and length of the descriptor of `group`.
pub(super) fn descriptor_place(geo: &Geometry, group: GroupNo) -> Option<(u64, usize)> {
    let (block, offset) = geo.desc_location(group)?;
    let block = geo.desc_block_location(block)?;
    Some((block.0 * u64::from(geo.block_size) + u64::from(offset), usize::from(geo.desc_size)))
}

/// All structures of a sound image.
///
/// # Errors
/// The image is not sound.
pub fn find(image: &MemImage) -> Result<Vec<Place>> {
    let (raw, geo) = layout(image).context("no superblock")?;
    let mut walk = Walk { image, geo, raw, places: Vec::new(), seen: HashSet::new() };
    walk.add(Kind::Superblock, SUPERBLOCK_OFFSET_BYTES, SUPERBLOCK_BYTES, Seal::Superblock);
    for group in 0..walk.geo.group_count {
        walk.group(GroupNo(group))?;
    }
    for number in 1..=walk.geo.inode_count {
        walk.inode(InodeNo(number))?;
    }
    Ok(walk.places)
}

impl Walk<'_> {
    fn add(&mut self, kind: Kind, at: u64, len: usize, seal: Seal) {
        if self.seen.insert(at) {
            self.places.push(Place { kind, at, len, seal });
        }
    }

    fn add_block(&mut self, kind: Kind, block: BlockNo, seal: Seal) {
        let len = self.geo.block_size as usize;
        self.add(kind, block.0 * len as u64, len, seal);
    }

    fn block(&self, block: BlockNo) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.geo.block_size as usize];
        self.image.read_at(block.0 * bytes.len() as u64, &mut bytes)?;
        Ok(bytes)
    }

    fn descriptor(&self, group: GroupNo) -> Result<GroupDesc> {
        let (at, len) = descriptor_place(&self.geo, group).context("no descriptor")?;
        let mut bytes = vec![0; len];
        self.image.read_at(at, &mut bytes)?;
        Ok(GroupDesc::parse(&bytes, &self.geo)?)
    }

    fn group(&mut self, group: GroupNo) -> Result<()> {
        let (at, len) = descriptor_place(&self.geo, group).context("no descriptor")?;
        let desc = self.descriptor(group)?;
        self.add(Kind::Descriptor, at, len, Seal::Descriptor(group));
        self.add_block(Kind::BlockBitmap, desc.block_bitmap, Seal::BlockBitmap(group));
        self.add_block(Kind::InodeBitmap, desc.inode_bitmap, Seal::InodeBitmap(group));
        Ok(())
    }

    fn inode(&mut self, ino: InodeNo) -> Result<()> {
        let place = self.geo.inode_location(ino).context("inode out of range")?;
        let table = self.descriptor(place.group)?.inode_table;
        let block = table.0 + u64::from(place.table_block);
        let at = block * u64::from(self.geo.block_size) + u64::from(place.offset_bytes);
        let mut bytes = vec![0; usize::from(self.geo.inode_size)];
        self.image.read_at(at, &mut bytes)?;
        if bytes.iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        let inode = DiskInode::decode(&bytes, &self.geo)?;
        if inode.mode == 0 {
            return Ok(());
        }
        self.add(Kind::Inode, at, bytes.len(), Seal::Inode(ino));
        if inode.file_acl.0 != 0 {
            self.add_block(Kind::Xattrs, inode.file_acl, Seal::Xattrs(inode.file_acl));
        }
        let seed = checksum::inode_seed(self.geo.csum_seed, ino, inode.generation);
        let has_map = inode.is_dir()
            || inode.is_file()
            || inode.is_symlink() && inode.fast_symlink(&self.geo).is_none();
        if !has_map || inode.flags.contains(InodeFlags::INLINE_DATA) {
            return Ok(());
        }
        let mut data = Vec::new();
        if inode.flags.contains(InodeFlags::EXTENTS) {
            self.extents(&inode.i_block, NodeKind::Root, seed, &mut data)?;
        } else {
            self.pointers(&inode.i_block, &mut data)?;
        }
        self.content(ino, &inode, seed, &data)
    }

    fn extents(
        &mut self,
        bytes: &[u8],
        kind: NodeKind,
        seed: u32,
        data: &mut Vec<BlockNo>,
    ) -> Result<()> {
        let node = ExtentNode::parse(bytes, kind, None, &self.geo)?;
        for extent in node.extents() {
            data.extend((0..u64::from(extent.len)).map(|i| BlockNo(extent.start.0 + i)));
        }
        let children: Vec<_> = node.indices().collect();
        for child in children {
            self.add_block(Kind::Extents, child.leaf, Seal::Extents(seed));
            let bytes = self.block(child.leaf)?;
            self.extents(&bytes, NodeKind::Block, seed, data)?;
        }
        Ok(())
    }

    fn pointers(&mut self, i_block: &[u8], data: &mut Vec<BlockNo>) -> Result<()> {
        for (slot, pointer) in words(i_block).enumerate() {
            let levels = slot.saturating_sub(11);
            self.pointer(pointer, levels, data)?;
        }
        Ok(())
    }

    fn pointer(&mut self, pointer: u32, levels: usize, data: &mut Vec<BlockNo>) -> Result<()> {
        let block = BlockNo(u64::from(pointer));
        if pointer == 0 {
            return Ok(());
        }
        if levels == 0 {
            data.push(block);
            return Ok(());
        }
        self.add_block(Kind::Indirect, block, Seal::None);
        for below in words(&self.block(block)?) {
            self.pointer(below, levels - 1, data)?;
        }
        Ok(())
    }

    /// Content that is metadata: directories, the journal, the orphan file, attribute values.
    fn content(
        &mut self,
        ino: InodeNo,
        inode: &DiskInode,
        seed: u32,
        data: &[BlockNo],
    ) -> Result<()> {
        let indexed = inode.flags.contains(InodeFlags::INDEX);
        let is_journal = Some(ino) == self.raw.journal_inode();
        let is_orphan_file = ino.0 == self.raw.s_orphan_file_inum.get();
        let log_seed = if is_journal {
            const UUID: std::ops::Range<usize> = 0x30..0x40;
            let first = data.first().context("a journal without blocks")?;
            checksum::crc32c(checksum::SEED_START, &self.block(*first)?[UUID])
        } else {
            0
        };
        for (number, &block) in data.iter().enumerate() {
            match () {
                () if inode.is_dir() => {
                    let (kind, seal) = self.directory_block(number, block, indexed, seed)?;
                    self.add_block(kind, block, seal);
                }
                () if is_journal && number == 0 => {
                    self.add_block(Kind::JournalSuper, block, Seal::JournalSuper);
                }
                // A small log never reaches blocks far from its start.
                () if is_journal && number < 120 => {
                    self.add_block(Kind::Log, block, Seal::Log(log_seed));
                }
                () if is_orphan_file => {
                    self.add_block(Kind::OrphanFile, block, Seal::OrphanFile(seed, block));
                }
                () if inode.flags.contains(InodeFlags::EA_INODE) => {
                    self.add_block(Kind::Value, block, Seal::None);
                }
                () => {}
            }
        }
        Ok(())
    }

    fn directory_block(
        &self,
        number: usize,
        block: BlockNo,
        indexed: bool,
        seed: u32,
    ) -> Result<(Kind, Seal)> {
        if indexed && number == 0 {
            return Ok((Kind::Htree, Seal::Htree(seed, DxKind::Root)));
        }
        let bytes = self.block(block)?;
        // An index block begins with one empty entry that spans it.
        let spans = usize::from(u16::from_le_bytes([bytes[4], bytes[5]])) == bytes.len();
        if indexed && spans && bytes[..4] == [0; 4] {
            return Ok((Kind::Htree, Seal::Htree(seed, DxKind::Node)));
        }
        Ok((Kind::Dirents, Seal::Dirents(seed)))
    }
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u32> + '_ {
    bytes.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
}
