//! An owned list of attributes, for planning and writing updates.
//!
//! Invariants: a set decoded from an area that Linux wrote encodes to the same bytes, because it
//! keeps the order of entries and of values; a set that changes as Linux changes an area
//! encodes to what Linux would have written.

use super::view::HASH_OFFSET;
use super::{
    END_MARK_BYTES, ENTRY_BYTES, HEADER_BYTES, IBODY_HEADER_BYTES, NameIndex, ValueRef, WHAT,
    XATTR_MAGIC, XATTR_NAME_LEN_MAX, XATTR_SIZE_MAX, XattrRef, XattrView, entry_bytes, hash,
    padded,
};
use crate::error::{FormatError, Result};
use crate::le;
use crate::types::InodeNo;

/// A value, or where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum XattrValue {
    /// Stored beside the name.
    Bytes(Vec<u8>),
    /// Stored in an inode of its own.
    EaInode {
        /// That inode.
        inode: InodeNo,
        /// Length of the value, not 0.
        size_bytes: u32,
    },
}

impl XattrValue {
    /// Bytes that the value takes in the area.
    fn stored_bytes(&self) -> usize {
        match self {
            XattrValue::Bytes(bytes) => padded(bytes.len()),
            XattrValue::EaInode { .. } => 0,
        }
    }
}

/// One attribute of a [`XattrSet`].
#[derive(Clone, Debug)]
pub struct Xattr {
    index: NameIndex,
    name: Vec<u8>,
    value: XattrValue,
    /// `e_hash` as read, or as computed for a value in an inode; 0 when not known.
    e_hash: u32,
    /// Values are laid out from the end of the area in rising order of this.
    rank: u32,
}

impl Xattr {
    /// Which prefix.
    pub fn index(&self) -> NameIndex {
        self.index
    }

    /// The name after the prefix.
    pub fn name(&self) -> &[u8] {
        &self.name
    }

    /// The value or its place.
    pub fn value(&self) -> &XattrValue {
        &self.value
    }

    /// `e_hash` as stored: for a value in an inode, [`super::entry_hash`] over its
    /// [`super::value_hash`], by which a reader checks that it has the right inode.
    pub fn e_hash(&self) -> u32 {
        self.e_hash
    }

    /// `e_hash` as a block needs it.
    fn block_e_hash(&self) -> u32 {
        match &self.value {
            XattrValue::EaInode { .. } => self.e_hash,
            // A hash from before the signedness was settled stays, so that re-encoding is exact.
            XattrValue::Bytes(value) if self.e_hash != 0 => {
                if self.e_hash == hash::entry_hash_signed(&self.name, value) {
                    self.e_hash
                } else {
                    hash::entry_hash(&self.name, value)
                }
            }
            XattrValue::Bytes(value) => hash::entry_hash(&self.name, value),
        }
    }

    fn sort_key(&self) -> (NameIndex, usize, &[u8]) {
        (self.index, self.name.len(), &self.name)
    }
}

/// The attributes of one area, or of a whole inode while an update is planned.
#[derive(Clone, Debug, Default)]
pub struct XattrSet {
    xattrs: Vec<Xattr>,
}

impl XattrSet {
    /// A set without attributes.
    pub fn new() -> XattrSet {
        XattrSet::default()
    }

    /// Copies the attributes of an area.
    ///
    /// # Errors
    /// [`FormatError::Corrupt`] when values overlap.
    pub fn from_view(view: &XattrView<'_>) -> Result<XattrSet> {
        let entries: Vec<XattrRef<'_>> = view.iter().collect();
        let mut spans: Vec<(u16, usize)> = entries.iter().filter_map(value_span).collect();
        spans.sort_unstable();
        // Without this check, many names could share one long value and a small area could
        // decode to a huge set.
        for pair in spans.windows(2) {
            let [(low, low_bytes), (high, _)] = pair else { continue };
            if usize::from(*low).saturating_add(*low_bytes) > usize::from(*high) {
                return Err(FormatError::corrupt(WHAT, "two values overlap"));
            }
        }
        let xattrs = entries.iter().map(|entry| Xattr {
            index: entry.index,
            name: entry.name.to_vec(),
            value: match entry.value {
                ValueRef::Bytes(bytes) => XattrValue::Bytes(bytes.to_vec()),
                ValueRef::EaInode { inode, size_bytes } => {
                    XattrValue::EaInode { inode, size_bytes }
                }
            },
            e_hash: entry.e_hash,
            rank: u32::from(u16::MAX.saturating_sub(entry.e_value_offs)),
        });
        Ok(XattrSet { xattrs: xattrs.collect() })
    }

    /// Each attribute, in the order in which the in-inode area has them.
    pub fn iter(&self) -> impl Iterator<Item = &Xattr> {
        self.xattrs.iter()
    }

    /// Number of attributes.
    pub fn len(&self) -> usize {
        self.xattrs.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.xattrs.is_empty()
    }

    /// The attribute with this name.
    pub fn get(&self, index: NameIndex, name: &[u8]) -> Option<&Xattr> {
        self.xattrs.iter().find(|xattr| xattr.index == index && xattr.name == name)
    }

    /// Adds an attribute or replaces its value; gives back the value before.
    ///
    /// # Errors
    /// [`FormatError::Usage`] when the name is longer than 255 bytes or has a zero byte, or the
    /// value is longer than [`XATTR_SIZE_MAX`].
    pub fn set(
        &mut self,
        index: NameIndex,
        name: &[u8],
        value: &[u8],
    ) -> Result<Option<XattrValue>> {
        if u32::try_from(value.len()).map_or(true, |size| size > XATTR_SIZE_MAX) {
            return Err(FormatError::Usage("an attribute's value is longer than 16 MiB".into()));
        }
        self.put(index, name, XattrValue::Bytes(value.to_vec()), 0)
    }

    /// Adds or replaces an attribute whose value lives in `inode`; `value_hash` is
    /// [`super::value_hash`] of the value. Gives back the value before.
    ///
    /// # Errors
    /// [`FormatError::Usage`] as [`XattrSet::set`], and for an empty value.
    pub fn set_ea_inode(
        &mut self,
        index: NameIndex,
        name: &[u8],
        inode: InodeNo,
        size_bytes: u32,
        value_hash: u32,
    ) -> Result<Option<XattrValue>> {
        if inode.0 == 0 || size_bytes == 0 || size_bytes > XATTR_SIZE_MAX {
            return Err(FormatError::Usage(format!(
                "an attribute of {size_bytes} bytes cannot live in inode {inode}"
            )));
        }
        let e_hash = hash::entry_hash(name, &value_hash.to_le_bytes());
        self.put(index, name, XattrValue::EaInode { inode, size_bytes }, e_hash)
    }

    fn put(
        &mut self,
        index: NameIndex,
        name: &[u8],
        value: XattrValue,
        e_hash: u32,
    ) -> Result<Option<XattrValue>> {
        if name.len() > XATTR_NAME_LEN_MAX || name.contains(&0) || (index.0 == 0 && name.is_empty())
        {
            return Err(FormatError::Usage("not a name for an extended attribute".into()));
        }
        let top = self.xattrs.iter().map(|xattr| xattr.rank).max().unwrap_or(0);
        let rank = top.saturating_add(1);
        let found = self.xattrs.iter_mut().find(|old| old.index == index && old.name == name);
        let Some(old) = found else {
            self.xattrs.push(Xattr { index, name: name.to_vec(), value, e_hash, rank });
            return Ok(None);
        };
        // A value of the same padded size stays where it is; any other goes below the rest.
        if value.stored_bytes() != old.value.stored_bytes() || value.stored_bytes() == 0 {
            old.rank = rank;
        }
        old.e_hash = e_hash;
        Ok(Some(std::mem::replace(&mut old.value, value)))
    }

    /// Removes an attribute; gives back its value.
    pub fn remove(&mut self, index: NameIndex, name: &[u8]) -> Option<XattrValue> {
        let at = self.xattrs.iter().position(|x| x.index == index && x.name == name)?;
        Some(self.xattrs.remove(at).value)
    }

    /// Bytes of names and values, end mark included.
    fn content_bytes(&self) -> usize {
        let each = self.xattrs.iter().map(|x| entry_bytes(x.name.len()) + x.value.stored_bytes());
        each.fold(END_MARK_BYTES, usize::saturating_add)
    }

    /// Bytes that the set needs after an inode's `i_extra_isize`.
    pub fn ibody_bytes(&self) -> usize {
        if self.is_empty() { 0 } else { self.content_bytes().saturating_add(IBODY_HEADER_BYTES) }
    }

    /// Bytes that the set needs in a block.
    pub fn block_bytes(&self) -> usize {
        self.content_bytes().saturating_add(HEADER_BYTES)
    }

    /// Fills the area after an inode's `i_extra_isize`. An empty set clears it.
    ///
    /// # Errors
    /// [`FormatError::NoRoom`]; the area is then as it was.
    pub fn encode_ibody(&self, area: &mut [u8]) -> Result<()> {
        self.check_room(self.ibody_bytes(), area.len())?;
        area.fill(0);
        if self.is_empty() {
            return Ok(());
        }
        le::put_u32(WHAT, area, 0, XATTR_MAGIC)?;
        let base = area.get_mut(IBODY_HEADER_BYTES..).unwrap_or_default();
        let order: Vec<&Xattr> = self.xattrs.iter().collect();
        encode(&order, base, 0, Xattr::e_hash)
    }

    /// Fills a block, hashes included; the checksum is set with [`super::set_block_checksum`].
    ///
    /// # Errors
    /// [`FormatError::NoRoom`]; the block is then as it was.
    pub fn encode_block(&self, block: &mut [u8], h_refcount: u32) -> Result<()> {
        self.check_room(self.block_bytes(), block.len())?;
        block.fill(0);
        let mut order: Vec<&Xattr> = self.xattrs.iter().collect();
        order.sort_by_key(|xattr| xattr.sort_key());
        let h_hash = hash::block_hash(order.iter().map(|xattr| xattr.block_e_hash()));
        le::put_u32(WHAT, block, 0, XATTR_MAGIC)?;
        super::set_block_refcount(block, h_refcount)?;
        le::put_u32(WHAT, block, 8, 1)?;
        le::put_u32(WHAT, block, HASH_OFFSET, h_hash)?;
        encode(&order, block, HEADER_BYTES, Xattr::block_e_hash)
    }

    fn check_room(&self, need: usize, capacity: usize) -> Result<()> {
        // Offsets of values have 16 bits.
        if need <= capacity && capacity <= 1 << 16 {
            return Ok(());
        }
        Err(FormatError::NoRoom { structure: WHAT, need: need as u64, capacity: capacity as u64 })
    }
}

/// Where a value lies, when it is beside its name.
fn value_span(entry: &XattrRef<'_>) -> Option<(u16, usize)> {
    match entry.value {
        ValueRef::Bytes(bytes) if !bytes.is_empty() => {
            Some((entry.e_value_offs, padded(bytes.len())))
        }
        _ => None,
    }
}

/// Writes entries in the order given from `first` on, and values by rank from the end of `base`.
fn encode(
    order: &[&Xattr],
    base: &mut [u8],
    first: usize,
    e_hash: fn(&Xattr) -> u32,
) -> Result<()> {
    let mut by_rank: Vec<usize> = (0..order.len()).collect();
    by_rank.sort_by_key(|&at| order.get(at).map(|xattr| xattr.rank));
    let mut offsets = vec![0u16; order.len()];
    let mut end = base.len();
    for at in by_rank {
        let (Some(xattr), Some(offset)) = (order.get(at), offsets.get_mut(at)) else { continue };
        let XattrValue::Bytes(value) = &xattr.value else { continue };
        if value.is_empty() {
            continue;
        }
        end = end.saturating_sub(padded(value.len()));
        le::put(WHAT, base, end, value)?;
        *offset = u16::try_from(end)
            .map_err(|_| FormatError::Usage("an attribute area of more than 64 KiB".into()))?;
    }
    let mut at = first;
    for (xattr, offset) in order.iter().zip(offsets) {
        let entry = le::slice_mut(WHAT, base, at, entry_bytes(xattr.name.len()))?;
        write_entry(entry, xattr, offset, e_hash(xattr))?;
        at = at.saturating_add(entry.len());
    }
    Ok(())
}

fn write_entry(entry: &mut [u8], xattr: &Xattr, e_value_offs: u16, e_hash: u32) -> Result<()> {
    let too_long = |_| FormatError::Usage("an attribute's name or value is too long".into());
    let (inum, size) = match &xattr.value {
        XattrValue::Bytes(bytes) => (0, u32::try_from(bytes.len()).map_err(too_long)?),
        XattrValue::EaInode { inode, size_bytes } => (inode.0, *size_bytes),
    };
    let name_len = u8::try_from(xattr.name.len()).map_err(too_long)?;
    le::put(WHAT, entry, 0, &[name_len, xattr.index.0])?;
    le::put_u16(WHAT, entry, 2, e_value_offs)?;
    le::put_u32(WHAT, entry, 4, inum)?;
    le::put_u32(WHAT, entry, 8, size)?;
    le::put_u32(WHAT, entry, 12, e_hash)?;
    le::put(WHAT, entry, ENTRY_BYTES, &xattr.name)
}
