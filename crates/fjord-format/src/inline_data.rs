//! Small files and directories kept in the inode itself (feature `inline_data`).
//!
//! Invariants: the first 60 bytes of a file are in `i_block`, the rest is the value of the
//! attribute `system.data` in the inode, which is there (if empty) whenever data is inline and
//! never lives in an inode of its own. A directory has neither `.` nor `..`: its first four
//! bytes name the parent, the rest of `i_block` is one area of entries and the attribute's value
//! another one.
//!
//! Format: Linux `Documentation/filesystems/ext4/inlinedata.rst`.

use crate::dirent::{self, DirFormat};
use crate::error::{FormatError, Result};
use crate::inode::I_BLOCK_BYTES;
use crate::le;
use crate::types::InodeNo;
use crate::xattr::{NameIndex, ValueRef, XattrView};

const WHAT: &str = "inline data";

/// Bytes at the start of an inline directory that name the parent.
pub const DOTDOT_BYTES: usize = 4;
/// Name of the attribute with the data that `i_block` cannot hold; its index is
/// [`NameIndex::SYSTEM`].
pub const DATA_NAME: &[u8] = b"data";

/// Entry of the attribute in the list of names: 16 bytes and the name.
const DATA_ENTRY_BYTES: usize = 20;
/// Magic of the attributes in an inode, and the mark that ends their names.
const EMPTY_IBODY_BYTES: usize = 8;

/// The two parts of inline data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InlineData<'a> {
    /// The first 60 bytes.
    pub head: &'a [u8; I_BLOCK_BYTES],
    /// The bytes after them, as many as there is room for now.
    pub tail: &'a [u8],
}

impl<'a> InlineData<'a> {
    /// The inline data of an inode: its `i_block` and its attributes.
    ///
    /// # Errors
    /// [`FormatError::Corrupt`] when the attribute is missing or its value is elsewhere.
    pub fn parse(
        i_block: &'a [u8; I_BLOCK_BYTES],
        xattrs: Option<&XattrView<'a>>,
    ) -> Result<InlineData<'a>> {
        let entry = xattrs.and_then(|view| view.find(NameIndex::SYSTEM, DATA_NAME));
        match entry.map(|entry| entry.value) {
            Some(ValueRef::Bytes(tail)) => Ok(InlineData { head: i_block, tail }),
            Some(ValueRef::EaInode { .. }) => {
                Err(FormatError::corrupt(WHAT, "system.data is not in the inode"))
            }
            None => Err(FormatError::corrupt(WHAT, "attribute system.data is missing")),
        }
    }

    /// Bytes that can be stored without changing the attribute's size.
    pub fn room_bytes(&self) -> usize {
        I_BLOCK_BYTES.saturating_add(self.tail.len())
    }

    /// The first `size_bytes` bytes of the file.
    ///
    /// # Errors
    /// [`FormatError::Corrupt`] when there are not that many.
    pub fn contents(&self, size_bytes: u64) -> Result<Vec<u8>> {
        let mut data = [&self.head[..], self.tail].concat();
        match usize::try_from(size_bytes) {
            Ok(size) if size <= data.len() => {
                data.truncate(size);
                Ok(data)
            }
            _ => {
                let room = data.len();
                let detail = format!("file of {size_bytes} bytes, but there are {room}");
                Err(FormatError::corrupt(WHAT, detail))
            }
        }
    }
}

/// Splits a file's bytes into `i_block` and the value for `system.data` (empty when the file
/// fits in `i_block`; the attribute must be set all the same).
pub fn split(data: &[u8]) -> ([u8; I_BLOCK_BYTES], &[u8]) {
    let mut head = [0; I_BLOCK_BYTES];
    for (to, from) in head.iter_mut().zip(data) {
        *to = *from;
    }
    (head, data.get(I_BLOCK_BYTES..).unwrap_or_default())
}

/// Most bytes of inline data that the inode can hold beside its other attributes; 0 when data
/// cannot be inline at all. `area_bytes` is the length of the inode's attribute area.
pub fn capacity_bytes(area_bytes: usize, xattrs: Option<&XattrView<'_>>) -> usize {
    let (free, present) = match xattrs {
        Some(view) => {
            let present = view.find(NameIndex::SYSTEM, DATA_NAME).map(|entry| entry.value);
            (view.free_bytes(), present)
        }
        None => (area_bytes.saturating_sub(EMPTY_IBODY_BYTES), None),
    };
    let value_bytes = match present {
        Some(ValueRef::Bytes(value)) => free.saturating_add(value.len().next_multiple_of(4)),
        Some(ValueRef::EaInode { .. }) => 0,
        None => free.saturating_sub(DATA_ENTRY_BYTES) & !3,
    };
    if value_bytes == 0 && present.is_none() {
        return 0;
    }
    value_bytes.saturating_add(I_BLOCK_BYTES)
}

/// An inline directory: parent and the two areas of entries, to be walked with
/// [`dirent::entries`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InlineDir<'a> {
    /// What `..` would name.
    pub parent: InodeNo,
    /// The 56 bytes after it in `i_block`.
    pub head: &'a [u8],
    /// The value of `system.data`; empty when it is not used yet.
    pub tail: &'a [u8],
}

impl<'a> InlineDir<'a> {
    /// Reads a directory's inline data. Entries are checked when they are walked.
    ///
    /// # Errors
    /// [`FormatError::Corrupt`] when the parent does not exist.
    pub fn parse(data: InlineData<'a>, format: &DirFormat) -> Result<InlineDir<'a>> {
        let parent = le::get_u32(WHAT, data.head, 0)?;
        if parent == 0 || parent > format.inodes_count {
            let detail = format!("the directory's parent {parent} does not exist");
            return Err(FormatError::corrupt(WHAT, detail));
        }
        let head = data.head.get(DOTDOT_BYTES..).unwrap_or_default();
        Ok(InlineDir { parent: InodeNo(parent), head, tail: data.tail })
    }

    /// Writes the directory as a first block with `.`, `..`, all entries and the checksum tail
    /// (checksum not yet set). `inode` is the directory itself.
    ///
    /// # Errors
    /// [`FormatError::Corrupt`] when an entry breaks a rule, [`FormatError::NoRoom`] when the
    /// block is too small.
    pub fn to_block(&self, block: &mut [u8], format: &DirFormat, inode: InodeNo) -> Result<()> {
        let mut last = None;
        let mut start = 0usize;
        for part in [self.head, self.tail] {
            for entry in dirent::records(part, format) {
                let entry = entry?;
                last = Some(start.saturating_add(entry.offset));
            }
            start = start.saturating_add(part.len());
        }
        let dots_bytes = dirent::rec_len_for(1).saturating_add(dirent::rec_len_for(2));
        let need = dots_bytes.saturating_add(start);
        let capacity = format.area_bytes();
        if need > capacity {
            return Err(FormatError::NoRoom {
                structure: "directory block",
                need: need as u64,
                capacity: capacity as u64,
            });
        }
        dirent::init_first_block(block, format, inode, self.parent)?;
        let Some(last) = last else { return Ok(()) };
        let area = format.entries_area_mut(block)?;
        le::put(WHAT, area, dots_bytes, self.head)?;
        le::put(WHAT, area, dots_bytes.saturating_add(self.head.len()), self.tail)?;
        // '..' spanned the block; now the last entry does.
        let dotdot_raw = dirent::rec_len_to_disk(dirent::rec_len_for(2), format.block_bytes)?;
        le::put_u16(WHAT, area, dirent::rec_len_for(1).saturating_add(4), dotdot_raw)?;
        let last_at = dots_bytes.saturating_add(last);
        let last_raw =
            dirent::rec_len_to_disk(area.len().saturating_sub(last_at), format.block_bytes)?;
        le::put_u16(WHAT, area, last_at.saturating_add(4), last_raw)
    }
}

/// Makes `i_block` an empty inline directory.
///
/// # Errors
/// [`FormatError::Usage`] when the parent does not exist.
pub fn init_dir(
    i_block: &mut [u8; I_BLOCK_BYTES],
    format: &DirFormat,
    parent: InodeNo,
) -> Result<()> {
    set_dir_parent(i_block, format, parent)?;
    dirent::init_area(dir_head_mut(i_block), format)
}

/// Lets an inline directory name another parent.
///
/// # Errors
/// [`FormatError::Usage`] when the parent does not exist.
pub fn set_dir_parent(
    i_block: &mut [u8; I_BLOCK_BYTES],
    format: &DirFormat,
    parent: InodeNo,
) -> Result<()> {
    if parent.0 == 0 || parent.0 > format.inodes_count {
        return Err(FormatError::Usage(format!("inode number {parent} does not exist")));
    }
    le::put_u32(WHAT, i_block, 0, parent.0)
}

/// The area of entries in `i_block`, to be edited with the functions of [`dirent`].
pub fn dir_head_mut(i_block: &mut [u8; I_BLOCK_BYTES]) -> &mut [u8] {
    i_block.get_mut(DOTDOT_BYTES..).unwrap_or_default()
}
