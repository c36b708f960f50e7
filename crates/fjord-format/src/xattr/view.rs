//! Attributes as they lie in an inode or a block, checked once and read in place.
//!
//! Invariant: a [`XattrView`] is only made from an area whose every entry and value is in bounds.

use super::{
    END_MARK_BYTES, ENTRY_BYTES, HEADER_BYTES, IBODY_HEADER_BYTES, NameIndex, WHAT, XATTR_MAGIC,
    XATTR_SIZE_MAX, entry_bytes, padded,
};
use crate::checksum;
use crate::error::{FormatError, Result};
use crate::features::Incompat;
use crate::geometry::Geometry;
use crate::le;
use crate::types::{BlockNo, InodeNo};

const REFCOUNT_OFFSET: usize = 4;
const BLOCKS_OFFSET: usize = 8;
pub(super) const HASH_OFFSET: usize = 12;
const CHECKSUM_OFFSET: usize = 16;

/// What the superblock says about attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XattrRules {
    /// Feature `ea_inode`: values may live in inodes of their own.
    pub ea_inode: bool,
    /// `s_inodes_count`.
    pub inodes_count: u32,
}

impl XattrRules {
    /// The rules of a file system.
    pub fn new(geometry: &Geometry) -> XattrRules {
        XattrRules {
            ea_inode: geometry.features.incompat.contains(Incompat::EA_INODE),
            inodes_count: geometry.inode_count,
        }
    }
}

/// `struct ext4_xattr_header`, the fields that vary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XattrHeader {
    /// `h_refcount`: number of inodes that share the block.
    pub h_refcount: u32,
    /// `h_hash`: hash of all entries; 0 means that the block is not to be shared.
    pub h_hash: u32,
}

/// Where a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueRef<'a> {
    /// Beside its name.
    Bytes(&'a [u8]),
    /// In an inode of its own.
    EaInode {
        /// That inode.
        inode: InodeNo,
        /// Length of the value.
        size_bytes: u32,
    },
}

/// One attribute in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XattrRef<'a> {
    /// Which prefix.
    pub index: NameIndex,
    /// The name after the prefix.
    pub name: &'a [u8],
    /// The value or its place.
    pub value: ValueRef<'a>,
    /// `e_hash`; 0 for values in the inode that Linux wrote.
    pub e_hash: u32,
    /// `e_value_offs`; 0 when the value is empty or elsewhere.
    pub(super) e_value_offs: u16,
}

/// The attributes of an inode's area or of a block.
#[derive(Clone, Copy, Debug)]
pub struct XattrView<'a> {
    /// What value offsets count from: the block, or the inode's area after its magic.
    base: &'a [u8],
    /// Where the first entry starts in `base`.
    first: usize,
}

/// Reads the attributes in an inode. `area` are the inode's bytes after `i_extra_isize` up to
/// the inode's size. `None` when there are none (no magic, or no room for any).
///
/// # Errors
/// [`FormatError::Corrupt`] when a rule of the format is broken.
pub fn parse_ibody<'a>(area: &'a [u8], rules: &XattrRules) -> Result<Option<XattrView<'a>>> {
    if area.len() < IBODY_HEADER_BYTES + END_MARK_BYTES {
        return Ok(None);
    }
    if le::get_u32(WHAT, area, 0)? != XATTR_MAGIC {
        return Ok(None);
    }
    let base = area.get(IBODY_HEADER_BYTES..).unwrap_or_default();
    let view = XattrView { base, first: 0 };
    view.check(rules)?;
    Ok(Some(view))
}

/// Reads an attribute block. Check [`verify_block_checksum`] first.
///
/// # Errors
/// [`FormatError::BadMagic`], or [`FormatError::Corrupt`] when a rule of the format is broken.
pub fn parse_block<'a>(
    block: &'a [u8],
    rules: &XattrRules,
) -> Result<(XattrHeader, XattrView<'a>)> {
    FormatError::check_len(WHAT, block, HEADER_BYTES + END_MARK_BYTES)?;
    let found = le::get_u32(WHAT, block, 0)?;
    if found != XATTR_MAGIC {
        return Err(FormatError::BadMagic { structure: WHAT, found });
    }
    if le::get_u32(WHAT, block, BLOCKS_OFFSET)? != 1 {
        return Err(FormatError::corrupt(WHAT, "the header's block count is not 1"));
    }
    let header = XattrHeader {
        h_refcount: le::get_u32(WHAT, block, REFCOUNT_OFFSET)?,
        h_hash: le::get_u32(WHAT, block, HASH_OFFSET)?,
    };
    if header.h_refcount == 0 {
        return Err(FormatError::corrupt(WHAT, "the block's reference count is 0"));
    }
    let view = XattrView { base: block, first: HEADER_BYTES };
    view.check(rules)?;
    Ok((header, view))
}

/// Sets the reference count of a block; the checksum must be set again.
///
/// # Errors
/// [`FormatError::Truncated`] when the block is too short for a header.
pub fn set_block_refcount(block: &mut [u8], h_refcount: u32) -> Result<()> {
    le::put_u32(WHAT, block, REFCOUNT_OFFSET, h_refcount)
}

fn compute_checksum(block: &[u8], fs_seed: u32, block_no: BlockNo) -> Result<u32> {
    let seed = checksum::crc32c(fs_seed, &block_no.0.to_le_bytes());
    checksum::crc32c_with_hole(seed, block, CHECKSUM_OFFSET, 4).ok_or(FormatError::Truncated {
        structure: WHAT,
        need_bytes: HEADER_BYTES,
        got_bytes: block.len(),
    })
}

/// Checks `h_checksum` of a block at `block_no` (only to be called with `metadata_csum`).
/// `fs_seed` is the checksum seed of the file system, not of an inode: blocks are shared.
///
/// # Errors
/// [`FormatError::Checksum`].
pub fn verify_block_checksum(block: &[u8], fs_seed: u32, block_no: BlockNo) -> Result<()> {
    let computed = compute_checksum(block, fs_seed, block_no)?;
    FormatError::check_checksum(WHAT, le::get_u32(WHAT, block, CHECKSUM_OFFSET)?, computed)
}

/// Sets `h_checksum` (only to be called with `metadata_csum`).
///
/// # Errors
/// [`FormatError::Truncated`] when the block is too short for a header.
pub fn set_block_checksum(block: &mut [u8], fs_seed: u32, block_no: BlockNo) -> Result<()> {
    let computed = compute_checksum(block, fs_seed, block_no)?;
    le::put_u32(WHAT, block, CHECKSUM_OFFSET, computed)
}

impl<'a> XattrView<'a> {
    /// Each attribute, in the order of the area.
    pub fn iter(&self) -> Entries<'a> {
        Entries { base: self.base, offset: self.first }
    }

    /// The attribute with this name.
    pub fn find(&self, index: NameIndex, name: &[u8]) -> Option<XattrRef<'a>> {
        self.iter().find(|entry| entry.index == index && entry.name == name)
    }

    /// Bytes between the list of names, end mark included, and the values: what further
    /// attributes may take.
    pub fn free_bytes(&self) -> usize {
        let names = self.names_end().unwrap_or(self.base.len());
        let values = self.iter().filter(|e| matches!(e.value, ValueRef::Bytes(v) if !v.is_empty()));
        let lowest = values.map(|e| usize::from(e.e_value_offs)).min().unwrap_or(self.base.len());
        lowest.saturating_sub(names)
    }

    /// Where the list of names ends, end mark included.
    fn names_end(&self) -> Result<usize> {
        let corrupt = |detail: &str| FormatError::corrupt(WHAT, detail);
        let mut offset = self.first;
        while le::get_u32(WHAT, self.base, offset).map_err(|_| corrupt("no end of names"))? != 0 {
            let name_len = le::slice(WHAT, self.base, offset, 1).map(|b| b.first().copied())?;
            offset = offset.saturating_add(entry_bytes(usize::from(name_len.unwrap_or(0))));
        }
        Ok(offset.saturating_add(END_MARK_BYTES))
    }

    fn check(&self, rules: &XattrRules) -> Result<()> {
        let names_end = self.names_end()?;
        let mut offset = self.first;
        while offset.saturating_add(END_MARK_BYTES) < names_end {
            let raw = RawEntry::read(self.base, offset)?;
            self.check_entry(&raw, names_end, rules).map_err(|detail| {
                FormatError::corrupt(WHAT, format!("entry at byte {offset}: {detail}"))
            })?;
            offset = offset.saturating_add(entry_bytes(raw.name.len()));
        }
        Ok(())
    }

    fn check_entry(
        &self,
        raw: &RawEntry<'_>,
        names_end: usize,
        rules: &XattrRules,
    ) -> Result<(), &'static str> {
        if raw.index == 0 && raw.name.is_empty() {
            return Err("it has neither prefix nor name");
        }
        if raw.name.contains(&0) {
            return Err("the name has a zero byte");
        }
        if raw.size > XATTR_SIZE_MAX {
            return Err("the value is too long");
        }
        if raw.inum != 0 {
            if !rules.ea_inode {
                return Err("the value is in an inode, but feature ea_inode is off");
            }
            if raw.inum == InodeNo::ROOT.0 || raw.inum > rules.inodes_count {
                return Err("the value's inode is impossible");
            }
            return if raw.size == 0 { Err("an empty value has an inode") } else { Ok(()) };
        }
        let start = usize::from(raw.offs);
        let end =
            usize::try_from(raw.size).map_or(usize::MAX, |size| start.saturating_add(padded(size)));
        if raw.size != 0 && (start < names_end || end > self.base.len()) {
            return Err("the value lies outside of the values' part");
        }
        Ok(())
    }
}

/// Fields of an entry that was read, but not checked.
struct RawEntry<'a> {
    index: u8,
    offs: u16,
    inum: u32,
    size: u32,
    hash: u32,
    name: &'a [u8],
}

impl<'a> RawEntry<'a> {
    fn read(base: &'a [u8], offset: usize) -> Result<RawEntry<'a>> {
        let fixed = le::slice(WHAT, base, offset, ENTRY_BYTES)?;
        let &[name_len, index, ..] = fixed else {
            return Err(FormatError::corrupt(WHAT, "entry is too short"));
        };
        let name_offset = offset.saturating_add(ENTRY_BYTES);
        Ok(RawEntry {
            index,
            offs: le::get_u16(WHAT, fixed, 2)?,
            inum: le::get_u32(WHAT, fixed, 4)?,
            size: le::get_u32(WHAT, fixed, 8)?,
            hash: le::get_u32(WHAT, fixed, 12)?,
            name: le::slice(WHAT, base, name_offset, usize::from(name_len))?,
        })
    }
}

/// Iterator over the attributes of a [`XattrView`].
#[derive(Clone, Debug)]
pub struct Entries<'a> {
    base: &'a [u8],
    offset: usize,
}

impl<'a> Iterator for Entries<'a> {
    type Item = XattrRef<'a>;

    // The view was checked, so errors here mean the end of the list.
    fn next(&mut self) -> Option<XattrRef<'a>> {
        if le::get_u32(WHAT, self.base, self.offset).unwrap_or(0) == 0 {
            return None;
        }
        let raw = RawEntry::read(self.base, self.offset).ok()?;
        self.offset = self.offset.saturating_add(entry_bytes(raw.name.len()));
        let value = if raw.inum != 0 {
            ValueRef::EaInode { inode: InodeNo(raw.inum), size_bytes: raw.size }
        } else if raw.size == 0 {
            ValueRef::Bytes(&[])
        } else {
            let size = usize::try_from(raw.size).ok()?;
            ValueRef::Bytes(le::slice(WHAT, self.base, usize::from(raw.offs), size).ok()?)
        };
        Some(XattrRef {
            index: NameIndex(raw.index),
            name: raw.name,
            value,
            e_hash: raw.hash,
            e_value_offs: raw.offs,
        })
    }
}
