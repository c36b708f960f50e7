//! Extended attributes: in the inode's free space, in an external block, in inodes of their own.
//!
//! Two ways in: [`XattrView`] checks an area once and then finds values without copying;
//! [`XattrSet`] is the owned list that an update is planned on and encoded from. Where an
//! attribute goes (inode, block, own inode) is the engine's decision; [`XattrSet::ibody_bytes`]
//! and [`XattrSet::block_bytes`] give the sizes it needs.
//!
//! Invariants: names lie at the start of an area, values at its end, and they never overlap;
//! an encoded set decodes to the same attributes; blocks are sorted by (index, name length, name), the
//! in-inode area keeps the order in which attributes were added. Offsets of values count from
//! the block's start, but in an inode from the first entry.
//!
//! Format: Linux `Documentation/filesystems/ext4/attributes.rst`.

mod hash;
mod set;
mod view;

pub use hash::{entry_hash, names_value, value_hash};
pub use set::{Xattr, XattrSet, XattrValue};
pub use view::{
    Entries, ValueRef, XattrHeader, XattrRef, XattrRules, XattrView, parse_block, parse_ibody,
    set_block_checksum, set_block_refcount, verify_block_checksum,
};

const WHAT: &str = "extended attributes";

/// `h_magic` of an attribute block and of the area in an inode.
pub const XATTR_MAGIC: u32 = 0xea02_0000;
/// Most inodes that may share one attribute block.
pub const XATTR_REFCOUNT_MAX: u32 = 1024;
/// Longest value that a reader accepts.
pub const XATTR_SIZE_MAX: u32 = 1 << 24;
/// Longest name after the prefix, in bytes.
pub const XATTR_NAME_LEN_MAX: usize = 255;

/// `struct ext4_xattr_entry` without the name.
const ENTRY_BYTES: usize = 16;
/// `struct ext4_xattr_header`.
const HEADER_BYTES: usize = 32;
/// `struct ext4_xattr_ibody_header`.
const IBODY_HEADER_BYTES: usize = 4;
/// Four zero bytes end the list of names.
const END_MARK_BYTES: usize = 4;

/// Bytes that an entry takes in the list of names.
fn entry_bytes(name_len: usize) -> usize {
    name_len.saturating_add(ENTRY_BYTES + 3) & !3
}

/// Bytes that a value takes at the end of the area.
fn padded(value_bytes: usize) -> usize {
    value_bytes.saturating_add(3) & !3
}

/// Shortest value that may get an inode of its own when its block has no room
/// (`EXT4_XATTR_MIN_LARGE_EA_SIZE`).
pub fn ea_inode_value_bytes_min(block_bytes: usize) -> usize {
    block_bytes.saturating_sub(entry_bytes(3) + HEADER_BYTES + END_MARK_BYTES)
}

/// Bytes that an in-inode value shall leave free in a block for further names, when a value can
/// go to an inode instead (feature `ea_inode`).
pub fn block_reserve_bytes(block_bytes: usize) -> usize {
    (block_bytes / 8).min(1024)
}

/// `e_name_index`: which prefix a name has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NameIndex(pub u8);

impl NameIndex {
    /// `user.`
    pub const USER: NameIndex = NameIndex(1);
    /// `system.posix_acl_access`, the whole name.
    pub const POSIX_ACL_ACCESS: NameIndex = NameIndex(2);
    /// `system.posix_acl_default`, the whole name.
    pub const POSIX_ACL_DEFAULT: NameIndex = NameIndex(3);
    /// `trusted.`
    pub const TRUSTED: NameIndex = NameIndex(4);
    /// `security.`
    pub const SECURITY: NameIndex = NameIndex(6);
    /// `system.`; only inline data (`system.data`) has it, users do not see it.
    pub const SYSTEM: NameIndex = NameIndex(7);
    /// `system.richacl`, the whole name.
    pub const RICHACL: NameIndex = NameIndex(8);
    /// Encryption context; users do not see it.
    pub const ENCRYPTION: NameIndex = NameIndex(9);
    /// `gnu.`
    pub const HURD: NameIndex = NameIndex(10);
}

/// Prefixes that users name attributes by.
const PREFIXES: [(NameIndex, &[u8]); 4] = [
    (NameIndex::USER, b"user."),
    (NameIndex::TRUSTED, b"trusted."),
    (NameIndex::SECURITY, b"security."),
    (NameIndex::HURD, b"gnu."),
];

/// Names that an index alone stands for.
const WHOLE_NAMES: [(NameIndex, &[u8]); 3] = [
    (NameIndex::POSIX_ACL_ACCESS, b"system.posix_acl_access"),
    (NameIndex::POSIX_ACL_DEFAULT, b"system.posix_acl_default"),
    (NameIndex::RICHACL, b"system.richacl"),
];

/// Splits a name as users write it into index and stored name; `None` when ext4 has no index for
/// it or the part after the prefix is empty, too long or has a zero byte.
pub fn split_name(full: &[u8]) -> Option<(NameIndex, &[u8])> {
    if let Some((index, _)) = WHOLE_NAMES.iter().find(|(_, name)| *name == full) {
        return Some((*index, &[]));
    }
    let (index, name) =
        PREFIXES.iter().find_map(|(index, prefix)| Some((*index, full.strip_prefix(*prefix)?)))?;
    let good = !name.is_empty() && name.len() <= XATTR_NAME_LEN_MAX && !name.contains(&0);
    good.then_some((index, name))
}

/// The name as users see it; `None` for attributes that users do not see.
pub fn full_name(index: NameIndex, name: &[u8]) -> Option<Vec<u8>> {
    if let Some((_, whole)) = WHOLE_NAMES.iter().find(|(known, _)| *known == index) {
        return name.is_empty().then(|| whole.to_vec());
    }
    let (_, prefix) = PREFIXES.iter().find(|(known, _)| *known == index)?;
    Some([prefix, name].concat())
}
