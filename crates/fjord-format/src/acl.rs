//! POSIX access control lists: the compact form on disk, the form of the system calls, and how
//! lists and mode bits follow each other.
//!
//! Invariant: an [`Acl`] is valid: owner, named users, owning group, named groups, mask (there
//! must be one when anybody is named), others, in that order; permissions are three bits.
//!
//! Format: Linux `fs/ext4/acl.h` (on disk, version 1) and
//! `include/uapi/linux/posix_acl_xattr.h` (system calls, version 2); semantics: acl(5).

use crate::error::{FormatError, Result};
use crate::le;

const WHAT: &str = "access control list";

/// `a_version` on disk.
const DISK_VERSION: u32 = 1;
/// `a_version` in system calls.
const XATTR_VERSION: u32 = 2;
const VERSION_BYTES: usize = 4;
const SHORT_ENTRY_BYTES: usize = 4;
const LONG_ENTRY_BYTES: usize = 8;
/// `e_id` of entries that name nobody, in system calls.
const UNDEFINED_ID: u32 = u32::MAX;
const PERM_MASK: u16 = 7;
/// Read, write and execute for owner, group and others.
const MODE_MASK: u16 = 0o777;

/// Whom an entry is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AclTag {
    /// The file's owner (`ACL_USER_OBJ`).
    UserObj,
    /// The user with this ID (`ACL_USER`).
    User(u32),
    /// The file's group (`ACL_GROUP_OBJ`).
    GroupObj,
    /// The group with this ID (`ACL_GROUP`).
    Group(u32),
    /// Limit of all but owner and others (`ACL_MASK`).
    Mask,
    /// Everybody else (`ACL_OTHER`).
    Other,
}

impl AclTag {
    fn from_raw(e_tag: u16, e_id: u32) -> Option<AclTag> {
        match e_tag {
            0x01 => Some(AclTag::UserObj),
            0x02 => Some(AclTag::User(e_id)),
            0x04 => Some(AclTag::GroupObj),
            0x08 => Some(AclTag::Group(e_id)),
            0x10 => Some(AclTag::Mask),
            0x20 => Some(AclTag::Other),
            _ => None,
        }
    }

    fn raw(self) -> u16 {
        match self {
            AclTag::UserObj => 0x01,
            AclTag::User(_) => 0x02,
            AclTag::GroupObj => 0x04,
            AclTag::Group(_) => 0x08,
            AclTag::Mask => 0x10,
            AclTag::Other => 0x20,
        }
    }

    fn id(self) -> Option<u32> {
        match self {
            AclTag::User(id) | AclTag::Group(id) => Some(id),
            _ => None,
        }
    }

    /// Sorts entries as in a list: by tag, those of users and of groups by ID.
    pub fn sort_key(self) -> (u8, u32) {
        (self.rank(), self.id().unwrap_or(0))
    }

    /// Place of the tag in a valid list.
    fn rank(self) -> u8 {
        match self {
            AclTag::UserObj => 0,
            AclTag::User(_) => 1,
            AclTag::GroupObj => 2,
            AclTag::Group(_) => 3,
            AclTag::Mask => 4,
            AclTag::Other => 5,
        }
    }
}

/// One entry of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AclEntry {
    /// Whom it is about.
    pub tag: AclTag,
    /// Bits: 4 read, 2 write, 1 execute.
    pub perm: u16,
}

/// A valid access control list.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Acl {
    entries: Vec<AclEntry>,
}

/// What a new file gets from its directory's default list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inherited {
    /// `i_mode` of the new file.
    pub mode: u16,
    /// Its access list, unless the mode says all.
    pub access: Option<Acl>,
}

impl Acl {
    /// A list of these entries; `None` when it breaks a rule of valid lists.
    pub fn new(entries: Vec<AclEntry>) -> Option<Acl> {
        let count = |rank: u8| entries.iter().filter(|entry| entry.tag.rank() == rank).count();
        let in_order = entries.iter().map(|entry| entry.tag.rank()).is_sorted();
        let named = count(AclTag::User(0).rank()) + count(AclTag::Group(0).rank());
        let masks = count(AclTag::Mask.rank());
        let valid = in_order
            && count(AclTag::UserObj.rank()) == 1
            && count(AclTag::GroupObj.rank()) == 1
            && count(AclTag::Other.rank()) == 1
            && masks <= 1
            && (named == 0 || masks == 1)
            && entries.iter().all(|entry| entry.perm & !PERM_MASK == 0)
            && entries.iter().all(|entry| entry.tag.id() != Some(UNDEFINED_ID));
        valid.then_some(Acl { entries })
    }

    /// The list that says what `i_mode` says.
    pub fn from_mode(i_mode: u16) -> Acl {
        let entry = |tag, shift: u32| AclEntry { tag, perm: (i_mode >> shift) & PERM_MASK };
        Acl {
            entries: vec![
                entry(AclTag::UserObj, 6),
                entry(AclTag::GroupObj, 3),
                entry(AclTag::Other, 0),
            ],
        }
    }

    /// The entries, in order.
    pub fn entries(&self) -> &[AclEntry] {
        &self.entries
    }

    /// Decodes the value of an ACL attribute on disk; `None` for a list without entries.
    ///
    /// # Errors
    /// [`FormatError::Corrupt`] when it is malformed or no valid list,
    /// [`FormatError::Incompatible`] for another version.
    pub fn from_disk(value: &[u8]) -> Result<Option<Acl>> {
        check_version(value, DISK_VERSION)?;
        let corrupt = |detail: &str| FormatError::corrupt(WHAT, detail);
        let mut offset = VERSION_BYTES;
        let mut entries = Vec::new();
        while offset < value.len() {
            let e_tag = le::get_u16(WHAT, value, offset)?;
            let perm = le::get_u16(WHAT, value, offset.saturating_add(2))?;
            let mut tag = AclTag::from_raw(e_tag, 0).ok_or_else(|| corrupt("unknown tag"))?;
            offset = offset.saturating_add(SHORT_ENTRY_BYTES);
            if tag.id().is_some() {
                let e_id = le::get_u32(WHAT, value, offset)?;
                tag = AclTag::from_raw(e_tag, e_id).ok_or_else(|| corrupt("unknown tag"))?;
                offset = offset.saturating_add(LONG_ENTRY_BYTES - SHORT_ENTRY_BYTES);
            }
            entries.push(AclEntry { tag, perm });
        }
        if entries.is_empty() {
            return Ok(None);
        }
        Acl::new(entries).map(Some).ok_or_else(|| corrupt("not a valid list"))
    }

    /// The value of an ACL attribute on disk.
    pub fn to_disk(&self) -> Vec<u8> {
        let mut value = DISK_VERSION.to_le_bytes().to_vec();
        for entry in &self.entries {
            value.extend_from_slice(&entry.tag.raw().to_le_bytes());
            value.extend_from_slice(&entry.perm.to_le_bytes());
            if let Some(id) = entry.tag.id() {
                value.extend_from_slice(&id.to_le_bytes());
            }
        }
        value
    }

    /// Decodes the value that a program passes to setxattr; `None` asks to remove the list.
    ///
    /// # Errors
    /// [`FormatError::Usage`] when it is malformed or no valid list (`EINVAL`),
    /// [`FormatError::Incompatible`] for another version (`EOPNOTSUPP`).
    pub fn from_xattr(value: &[u8]) -> Result<Option<Acl>> {
        let invalid = || FormatError::Usage("not a valid POSIX access control list".into());
        if value.is_empty() {
            return Ok(None);
        }
        if value.len() < VERSION_BYTES {
            return Err(invalid());
        }
        check_version(value, XATTR_VERSION)?;
        let (chunks, rest) =
            value.get(VERSION_BYTES..).unwrap_or_default().as_chunks::<LONG_ENTRY_BYTES>();
        if !rest.is_empty() {
            return Err(invalid());
        }
        let entry = |&[t0, t1, p0, p1, i0, i1, i2, i3]: &[u8; LONG_ENTRY_BYTES]| {
            let e_id = u32::from_le_bytes([i0, i1, i2, i3]);
            let tag = AclTag::from_raw(u16::from_le_bytes([t0, t1]), e_id)?;
            Some(AclEntry { tag, perm: u16::from_le_bytes([p0, p1]) })
        };
        if chunks.is_empty() {
            return Ok(None);
        }
        let entries: Option<Vec<AclEntry>> = chunks.iter().map(entry).collect();
        entries.and_then(Acl::new).map(Some).ok_or_else(invalid)
    }

    /// The value that getxattr gives to programs.
    pub fn to_xattr(&self) -> Vec<u8> {
        let mut value = XATTR_VERSION.to_le_bytes().to_vec();
        for entry in &self.entries {
            value.extend_from_slice(&entry.tag.raw().to_le_bytes());
            value.extend_from_slice(&entry.perm.to_le_bytes());
            value.extend_from_slice(&entry.tag.id().unwrap_or(UNDEFINED_ID).to_le_bytes());
        }
        value
    }

    fn perm_of(&self, tag: AclTag) -> Option<u16> {
        self.entries.iter().find(|entry| entry.tag == tag).map(|entry| entry.perm)
    }

    fn perm_mut(&mut self, tag: AclTag) -> Option<&mut u16> {
        self.entries.iter_mut().find(|entry| entry.tag == tag).map(|entry| &mut entry.perm)
    }

    /// The entry that the mode's group bits stand for.
    fn group_class(&self) -> AclTag {
        if self.perm_of(AclTag::Mask).is_some() { AclTag::Mask } else { AclTag::GroupObj }
    }

    /// `i_mode` with its permission bits as an access list of this content sets them.
    pub fn apply_to_mode(&self, i_mode: u16) -> u16 {
        let bits = |tag, shift: u32| self.perm_of(tag).unwrap_or(0) << shift;
        let permissions =
            bits(AclTag::UserObj, 6) | bits(self.group_class(), 3) | bits(AclTag::Other, 0);
        (i_mode & !MODE_MASK) | permissions
    }

    /// Whether mode bits alone say the same, so that the list need not be stored.
    pub fn is_mode_only(&self) -> bool {
        self.entries.len() == 3
    }

    /// The access list after chmod to `i_mode`.
    pub fn chmod(&mut self, i_mode: u16) {
        let group_class = self.group_class();
        for (tag, shift) in [(AclTag::UserObj, 6), (group_class, 3), (AclTag::Other, 0)] {
            if let Some(perm) = self.perm_mut(tag) {
                *perm = (i_mode >> shift) & PERM_MASK;
            }
        }
    }

    /// Mode and access list of a file created with mode `i_mode` in a directory whose default
    /// list this is (the umask does not count then). A new directory also gets this default list.
    pub fn inherit(&self, i_mode: u16) -> Inherited {
        let mut access = self.clone();
        let group_class = access.group_class();
        for (tag, shift) in [(AclTag::UserObj, 6), (group_class, 3), (AclTag::Other, 0)] {
            if let Some(perm) = access.perm_mut(tag) {
                *perm &= i_mode >> shift;
            }
        }
        let mode = access.apply_to_mode(i_mode);
        Inherited { mode, access: (!access.is_mode_only()).then_some(access) }
    }
}

fn check_version(value: &[u8], expected: u32) -> Result<()> {
    let version = le::get_u32(WHAT, value, 0)?;
    if version == expected {
        return Ok(());
    }
    Err(FormatError::Incompatible { feature: format!("access control lists of version {version}") })
}
