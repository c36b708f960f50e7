//! Inodes: the 128 bytes of ext2 and the extra fields after them.
//!
//! Invariant: [`DiskInode::encode`] changes only the bytes of the fields that the inode has
//! room for (`i_extra_isize`); extended attributes and unknown fields after them stay as they
//! are, and encoding what was decoded gives the same bytes. Checksums are set apart, last.

use std::mem::offset_of;

use bitflags::bitflags;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use crate::checksum;
use crate::error::{FormatError, Result};
use crate::features::{Incompat, RoCompat};
use crate::geometry::{GOOD_OLD_INODE_BYTES, Geometry};
use crate::time::Timestamp;
use crate::types::{BlockNo, InodeNo};

const STRUCTURE: &str = "inode";
const BASE_BYTES: usize = GOOD_OLD_INODE_BYTES as usize;

/// Bytes of the extra fields that this module knows: the `i_extra_isize` of new inodes.
pub const EXTRA_ISIZE_KNOWN: u16 = 32;
/// Bytes of `i_block`.
pub const I_BLOCK_BYTES: usize = 60;

/// Mask of the file type in `i_mode`.
pub const S_IFMT: u16 = 0o170000;
/// File type: named pipe.
pub const S_IFIFO: u16 = 0o010000;
/// File type: character device.
pub const S_IFCHR: u16 = 0o020000;
/// File type: directory.
pub const S_IFDIR: u16 = 0o040000;
/// File type: block device.
pub const S_IFBLK: u16 = 0o060000;
/// File type: regular file.
pub const S_IFREG: u16 = 0o100000;
/// File type: symbolic link.
pub const S_IFLNK: u16 = 0o120000;
/// File type: socket.
pub const S_IFSOCK: u16 = 0o140000;

bitflags! {
    /// Bits of `i_flags`; the low ones are those of `FS_IOC_GETFLAGS`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct InodeFlags: u32 {
        /// Secure deletion.
        const SECRM = 0x0000_0001;
        /// Undelete.
        const UNRM = 0x0000_0002;
        /// Compressed file.
        const COMPR = 0x0000_0004;
        /// Synchronous updates.
        const SYNC = 0x0000_0008;
        /// The file must not change.
        const IMMUTABLE = 0x0000_0010;
        /// Writes only append.
        const APPEND = 0x0000_0020;
        /// Left out by dump(8).
        const NODUMP = 0x0000_0040;
        /// Access time is not updated.
        const NOATIME = 0x0000_0080;
        /// Compression state.
        const DIRTY = 0x0000_0100;
        /// Compression state.
        const COMPRBLK = 0x0000_0200;
        /// Not to be compressed.
        const NOCOMPR = 0x0000_0400;
        /// Encrypted.
        const ENCRYPT = 0x0000_0800;
        /// Hashed directory.
        const INDEX = 0x0000_1000;
        /// AFS directory.
        const IMAGIC = 0x0000_2000;
        /// File data goes through the journal.
        const JOURNAL_DATA = 0x0000_4000;
        /// The tail must not be merged.
        const NOTAIL = 0x0000_8000;
        /// Synchronous directory updates.
        const DIRSYNC = 0x0001_0000;
        /// Top of a directory hierarchy, for the allocator.
        const TOPDIR = 0x0002_0000;
        /// `i_blocks` counts file-system blocks.
        const HUGE_FILE = 0x0004_0000;
        /// `i_block` is the root of an extent tree.
        const EXTENTS = 0x0008_0000;
        /// Protected by fs-verity.
        const VERITY = 0x0010_0000;
        /// Holds (or, on other files, uses) the value of a large extended attribute.
        const EA_INODE = 0x0020_0000;
        /// Blocks allocated past the end of the file (old kernels).
        const EOFBLOCKS = 0x0040_0000;
        /// Snapshot file.
        const SNAPFILE = 0x0100_0000;
        /// Direct access.
        const DAX = 0x0200_0000;
        /// The file's data lies in the inode.
        const INLINE_DATA = 0x1000_0000;
        /// New entries take the directory's project ID.
        const PROJINHERIT = 0x2000_0000;
        /// Case-insensitive directory.
        const CASEFOLD = 0x4000_0000;
        const _ = !0;
    }
}

impl InodeFlags {
    /// Flags that `FS_IOC_GETFLAGS` shows.
    pub const USER_VISIBLE: InodeFlags = InodeFlags::USER_MODIFIABLE
        .union(InodeFlags::DIRTY)
        .union(InodeFlags::COMPRBLK)
        .union(InodeFlags::NOCOMPR)
        .union(InodeFlags::ENCRYPT)
        .union(InodeFlags::INDEX)
        .union(InodeFlags::VERITY)
        .union(InodeFlags::INLINE_DATA);
    /// Flags that `FS_IOC_SETFLAGS` may ask for.
    pub const USER_MODIFIABLE: InodeFlags = InodeFlags::SECRM
        .union(InodeFlags::UNRM)
        .union(InodeFlags::COMPR)
        .union(InodeFlags::SYNC)
        .union(InodeFlags::IMMUTABLE)
        .union(InodeFlags::APPEND)
        .union(InodeFlags::NODUMP)
        .union(InodeFlags::NOATIME)
        .union(InodeFlags::JOURNAL_DATA)
        .union(InodeFlags::NOTAIL)
        .union(InodeFlags::DIRSYNC)
        .union(InodeFlags::TOPDIR)
        .union(InodeFlags::EXTENTS)
        .union(InodeFlags::EOFBLOCKS)
        .union(InodeFlags::DAX)
        .union(InodeFlags::PROJINHERIT)
        .union(InodeFlags::CASEFOLD);
    /// Flags that a new inode takes from its directory (regular files and others lose some).
    pub const INHERITED: InodeFlags = InodeFlags::SECRM
        .union(InodeFlags::UNRM)
        .union(InodeFlags::COMPR)
        .union(InodeFlags::SYNC)
        .union(InodeFlags::NODUMP)
        .union(InodeFlags::NOATIME)
        .union(InodeFlags::NOCOMPR)
        .union(InodeFlags::JOURNAL_DATA)
        .union(InodeFlags::DIRSYNC)
        .union(InodeFlags::PROJINHERIT)
        .union(InodeFlags::CASEFOLD)
        .union(InodeFlags::DAX);
}

/// The inode as it lies on disk up to the last extra field known here.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawInode {
    i_mode: U16,
    i_uid: U16,
    i_size_lo: U32,
    i_atime: U32,
    i_ctime: U32,
    i_mtime: U32,
    i_dtime: U32,
    i_gid: U16,
    i_links_count: U16,
    i_blocks_lo: U32,
    i_flags: U32,
    l_i_version: U32,
    i_block: [u8; I_BLOCK_BYTES],
    i_generation: U32,
    i_file_acl_lo: U32,
    i_size_high: U32,
    i_obso_faddr: U32,
    l_i_blocks_high: U16,
    l_i_file_acl_high: U16,
    l_i_uid_high: U16,
    l_i_gid_high: U16,
    l_i_checksum_lo: U16,
    l_i_reserved: U16,
    i_extra_isize: U16,
    i_checksum_hi: U16,
    i_ctime_extra: U32,
    i_mtime_extra: U32,
    i_atime_extra: U32,
    i_crtime: U32,
    i_crtime_extra: U32,
    i_version_hi: U32,
    i_projid: U32,
}

const RAW_BYTES: usize = size_of::<RawInode>();
const CHECKSUM_LO: usize = offset_of!(RawInode, l_i_checksum_lo);
const CHECKSUM_HI: usize = offset_of!(RawInode, i_checksum_hi);

/// Where `i_block` starts inside the inode, in bytes.
pub const I_BLOCK_OFFSET: usize = offset_of!(RawInode, i_block);

const _: () = {
    assert!(RAW_BYTES == BASE_BYTES + EXTRA_ISIZE_KNOWN as usize);
    assert!(I_BLOCK_OFFSET == 0x28);
    assert!(offset_of!(RawInode, i_generation) == 0x64);
    assert!(offset_of!(RawInode, l_i_blocks_high) == 0x74);
    assert!(CHECKSUM_LO == 0x7c);
    assert!(offset_of!(RawInode, i_extra_isize) == BASE_BYTES);
    assert!(CHECKSUM_HI == 0x82);
    assert!(offset_of!(RawInode, i_projid) == 0x9c);
};

/// A decoded inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskInode {
    /// `i_mode`: file type and permissions.
    pub mode: u16,
    /// Owner, both halves.
    pub uid: u32,
    /// Group, both halves.
    pub gid: u32,
    /// Size in bytes.
    pub size: u64,
    /// Last access.
    pub atime: Timestamp,
    /// Last change of the inode.
    pub ctime: Timestamp,
    /// Last change of the content.
    pub mtime: Timestamp,
    /// Creation; zero where the inode has no room for it.
    pub crtime: Timestamp,
    /// Deletion time in seconds, or the next inode of the orphan list.
    pub dtime: u32,
    /// Hard links.
    pub links_count: u16,
    /// Space used, in units of 512 bytes whatever unit is stored.
    pub blocks_512: u64,
    /// `i_flags`; [`InodeFlags::HUGE_FILE`] is kept right by [`DiskInode::encode`].
    pub flags: InodeFlags,
    /// Change counter, 64 bits where the inode has room for them.
    pub version: u64,
    /// Block map, extent root, inline data, short link target or device number.
    pub i_block: [u8; I_BLOCK_BYTES],
    /// Generation, for NFS and for checksums.
    pub generation: u32,
    /// Block of the extended attributes, 0 for none.
    pub file_acl: BlockNo,
    /// Project; 0 where the inode has no room for it.
    pub projid: u32,
    /// Bytes of extra fields this inode has.
    pub extra_isize: u16,
}

impl DiskInode {
    /// A new inode of this mode, everything else zero, with room for the extra fields that the
    /// file system wants.
    pub fn new(mode: u16, geometry: &Geometry) -> DiskInode {
        DiskInode {
            mode,
            uid: 0,
            gid: 0,
            size: 0,
            atime: Timestamp::default(),
            ctime: Timestamp::default(),
            mtime: Timestamp::default(),
            crtime: Timestamp::default(),
            dtime: 0,
            links_count: 0,
            blocks_512: 0,
            flags: InodeFlags::empty(),
            version: 0,
            i_block: [0; I_BLOCK_BYTES],
            generation: 0,
            file_acl: BlockNo(0),
            projid: 0,
            extra_isize: geometry.want_extra_isize,
        }
    }

    /// Decodes an inode from its `inode_size` bytes. The checksum is not looked at (see
    /// [`verify_checksum`]), nor what `i_block` holds.
    ///
    /// # Errors
    /// [`FormatError::Truncated`], or [`FormatError::Corrupt`] for fields that contradict the
    /// format.
    pub fn decode(bytes: &[u8], geometry: &Geometry) -> Result<DiskInode> {
        let raw = read_raw(bytes, geometry)?;
        let extra_isize = extra_isize(&raw, geometry)?;
        let has = |offset: usize| fits(offset, extra_isize);
        let mode = raw.i_mode.get();
        let flags = InodeFlags::from_bits_retain(raw.i_flags.get());
        let uid_high = u32::from(raw.l_i_uid_high.get()) << 16;
        let gid_high = u32::from(raw.l_i_gid_high.get()) << 16;
        let version_lo = if geometry.is_hurd { 0 } else { raw.l_i_version.get() };
        let size_high = if size_is_wide(mode, geometry) { raw.i_size_high.get() } else { 0 };
        let version_hi =
            if has(offset_of!(RawInode, i_version_hi)) { raw.i_version_hi.get() } else { 0 };
        let acl_high = if geometry.features.incompat.contains(Incompat::BIT64) {
            u64::from(raw.l_i_file_acl_high.get()) << 32
        } else {
            0
        };
        let extra = |offset: usize, value: U32| has(offset).then(|| value.get());
        let has_crtime = has(offset_of!(RawInode, i_crtime));
        let inode = DiskInode {
            mode,
            uid: uid_high | u32::from(raw.i_uid.get()),
            gid: gid_high | u32::from(raw.i_gid.get()),
            size: u64::from(size_high) << 32 | u64::from(raw.i_size_lo.get()),
            atime: Timestamp::from_disk(
                raw.i_atime.get(),
                extra(offset_of!(RawInode, i_atime_extra), raw.i_atime_extra),
            ),
            ctime: Timestamp::from_disk(
                raw.i_ctime.get(),
                extra(offset_of!(RawInode, i_ctime_extra), raw.i_ctime_extra),
            ),
            mtime: Timestamp::from_disk(
                raw.i_mtime.get(),
                extra(offset_of!(RawInode, i_mtime_extra), raw.i_mtime_extra),
            ),
            crtime: Timestamp::from_disk(
                if has_crtime { raw.i_crtime.get() } else { 0 },
                extra(offset_of!(RawInode, i_crtime_extra), raw.i_crtime_extra),
            ),
            dtime: raw.i_dtime.get(),
            links_count: raw.i_links_count.get(),
            blocks_512: decode_blocks(&raw, flags, geometry)?,
            flags,
            version: u64::from(version_hi) << 32 | u64::from(version_lo),
            i_block: raw.i_block,
            generation: raw.i_generation.get(),
            file_acl: BlockNo(acl_high | u64::from(raw.i_file_acl_lo.get())),
            projid: if has(offset_of!(RawInode, i_projid)) { raw.i_projid.get() } else { 0 },
            extra_isize,
        };
        inode.validate(geometry)?;
        Ok(inode)
    }

    fn validate(&self, geometry: &Geometry) -> Result<()> {
        let corrupt = |detail: String| Err(FormatError::corrupt(STRUCTURE, detail));
        if self.size > i64::MAX as u64 {
            return corrupt(format!("the size is {} bytes", self.size));
        }
        if self.flags.contains(InodeFlags::INLINE_DATA | InodeFlags::EXTENTS) {
            return corrupt("it has both inline data and extents".to_owned());
        }
        if self.file_acl.0 != 0 && !geometry.contains(self.file_acl) {
            return corrupt(format!("its attributes cannot lie at block {}", self.file_acl));
        }
        Ok(())
    }

    /// Writes the inode into its `inode_size` bytes in place. For an inode that is new, the
    /// bytes must be zero before. Call [`update_checksum`] afterwards.
    ///
    /// Times are clamped to what the inode can hold; `blocks_512` too large for the stored
    /// field is an error.
    ///
    /// # Errors
    /// [`FormatError::Truncated`]; [`FormatError::Usage`] for a block count or an
    /// `extra_isize` that does not fit.
    pub fn encode(&self, bytes: &mut [u8], geometry: &Geometry) -> Result<()> {
        let mut raw = read_raw(bytes, geometry)?;
        let room = geometry.inode_size - GOOD_OLD_INODE_BYTES;
        if self.extra_isize > room {
            return Err(FormatError::Usage(format!(
                "{} extra bytes do not fit an inode of {} bytes",
                self.extra_isize, geometry.inode_size
            )));
        }
        self.encode_base(&mut raw, geometry)?;
        self.encode_extra(&mut raw, room);
        let size = usize::from(geometry.inode_size).min(RAW_BYTES);
        bytes[..size].copy_from_slice(&raw.as_bytes()[..size]);
        Ok(())
    }

    fn encode_base(&self, raw: &mut RawInode, geometry: &Geometry) -> Result<()> {
        let has_extra = |offset: usize| fits(offset, self.extra_isize);
        let seconds = |time: Timestamp, extra: usize| time.to_disk(has_extra(extra)).0;
        raw.i_mode.set(self.mode);
        raw.i_uid.set(self.uid as u16);
        raw.i_gid.set(self.gid as u16);
        raw.l_i_uid_high.set((self.uid >> 16) as u16);
        raw.l_i_gid_high.set((self.gid >> 16) as u16);
        raw.i_size_lo.set(self.size as u32);
        if size_is_wide(self.mode, geometry) {
            raw.i_size_high.set((self.size >> 32) as u32);
        }
        raw.i_atime.set(seconds(self.atime, offset_of!(RawInode, i_atime_extra)));
        raw.i_ctime.set(seconds(self.ctime, offset_of!(RawInode, i_ctime_extra)));
        raw.i_mtime.set(seconds(self.mtime, offset_of!(RawInode, i_mtime_extra)));
        raw.i_dtime.set(self.dtime);
        raw.i_links_count.set(self.links_count);
        let mut flags = self.flags;
        encode_blocks(self.blocks_512, raw, &mut flags, geometry)?;
        raw.i_flags.set(flags.bits());
        if !geometry.is_hurd {
            raw.l_i_version.set(self.version as u32);
        }
        raw.i_block = self.i_block;
        raw.i_generation.set(self.generation);
        raw.i_file_acl_lo.set(self.file_acl.0 as u32);
        if geometry.features.incompat.contains(Incompat::BIT64) {
            raw.l_i_file_acl_high.set((self.file_acl.0 >> 32) as u16);
        }
        Ok(())
    }

    fn encode_extra(&self, raw: &mut RawInode, room: u16) {
        if room == 0 {
            return;
        }
        raw.i_extra_isize.set(self.extra_isize);
        let has = |offset: usize| fits(offset, self.extra_isize);
        if has(offset_of!(RawInode, i_ctime_extra)) {
            raw.i_ctime_extra.set(self.ctime.to_disk(true).1);
        }
        if has(offset_of!(RawInode, i_mtime_extra)) {
            raw.i_mtime_extra.set(self.mtime.to_disk(true).1);
        }
        if has(offset_of!(RawInode, i_atime_extra)) {
            raw.i_atime_extra.set(self.atime.to_disk(true).1);
        }
        let crtime_extra = has(offset_of!(RawInode, i_crtime_extra));
        if has(offset_of!(RawInode, i_crtime)) {
            raw.i_crtime.set(self.crtime.to_disk(crtime_extra).0);
        }
        if crtime_extra {
            raw.i_crtime_extra.set(self.crtime.to_disk(true).1);
        }
        if has(offset_of!(RawInode, i_version_hi)) {
            raw.i_version_hi.set((self.version >> 32) as u32);
        }
        if has(offset_of!(RawInode, i_projid)) {
            raw.i_projid.set(self.projid);
        }
    }

    /// The file type bits of the mode.
    pub fn file_type(&self) -> u16 {
        self.mode & S_IFMT
    }

    /// Whether this is a directory.
    pub fn is_dir(&self) -> bool {
        self.file_type() == S_IFDIR
    }

    /// Whether this is a regular file.
    pub fn is_file(&self) -> bool {
        self.file_type() == S_IFREG
    }

    /// Whether this is a symbolic link.
    pub fn is_symlink(&self) -> bool {
        self.file_type() == S_IFLNK
    }

    /// Whether this is a character or block device.
    pub fn is_device(&self) -> bool {
        matches!(self.file_type(), S_IFCHR | S_IFBLK)
    }

    /// The target of a symbolic link that is kept in `i_block`, or `None` for any other inode
    /// and for links whose target has blocks or is inline data.
    pub fn fast_symlink(&self, geometry: &Geometry) -> Option<&[u8]> {
        if !self.is_symlink() || self.flags.contains(InodeFlags::INLINE_DATA) {
            return None;
        }
        let size = usize::try_from(self.size).ok().filter(|&size| size < I_BLOCK_BYTES)?;
        let cluster_512 = u64::from(geometry.block_size / 512) * u64::from(geometry.cluster_ratio);
        let acl_512 = if self.file_acl.0 != 0 { cluster_512 } else { 0 };
        // Attribute inodes count in the blocks of their owner, so the count tells nothing then.
        let is_fast = self.flags.contains(InodeFlags::EA_INODE) || self.blocks_512 == acl_512;
        (is_fast && size > 0).then(|| &self.i_block[..size])
    }

    /// The device number in `i_block`, or `None` when this is no device.
    pub fn device(&self) -> Option<DeviceNumber> {
        self.is_device().then(|| DeviceNumber::from_i_block(&self.i_block))
    }
}

/// Whether the 4-byte (or, for the checksum, 2-byte) extra field at `offset` lies inside the
/// extra space.
fn fits(offset: usize, extra_isize: u16) -> bool {
    let bytes = if offset == CHECKSUM_HI { 2 } else { 4 };
    offset + bytes <= BASE_BYTES + usize::from(extra_isize)
}

fn size_is_wide(mode: u16, geometry: &Geometry) -> bool {
    mode & S_IFMT == S_IFREG || geometry.features.incompat.contains(Incompat::LARGEDIR)
}

fn read_raw(bytes: &[u8], geometry: &Geometry) -> Result<RawInode> {
    let size = usize::from(geometry.inode_size);
    FormatError::check_len(STRUCTURE, bytes, size)?;
    let mut raw = RawInode::new_zeroed();
    let known = size.min(RAW_BYTES);
    raw.as_mut_bytes()[..known].copy_from_slice(&bytes[..known]);
    Ok(raw)
}

fn extra_isize(raw: &RawInode, geometry: &Geometry) -> Result<u16> {
    let room = geometry.inode_size - GOOD_OLD_INODE_BYTES;
    if room == 0 {
        return Ok(0);
    }
    let extra = raw.i_extra_isize.get();
    if extra > room || !extra.is_multiple_of(4) {
        return Err(FormatError::corrupt(
            STRUCTURE,
            format!("i_extra_isize is {extra} in an inode of {} bytes", geometry.inode_size),
        ));
    }
    Ok(extra)
}

fn decode_blocks(raw: &RawInode, flags: InodeFlags, geometry: &Geometry) -> Result<u64> {
    let low = u64::from(raw.i_blocks_lo.get());
    if !geometry.features.ro_compat.contains(RoCompat::HUGE_FILE) {
        return Ok(low);
    }
    let count = u64::from(raw.l_i_blocks_high.get()) << 32 | low;
    if !flags.contains(InodeFlags::HUGE_FILE) {
        return Ok(count);
    }
    // 48 bits shifted by at most 7: no overflow.
    Ok(count << (geometry.block_size_bits - 9))
}

fn encode_blocks(
    blocks_512: u64,
    raw: &mut RawInode,
    flags: &mut InodeFlags,
    geometry: &Geometry,
) -> Result<()> {
    let too_many =
        || FormatError::Usage(format!("an inode cannot count {blocks_512} blocks of 512 bytes"));
    if !geometry.features.ro_compat.contains(RoCompat::HUGE_FILE) {
        raw.i_blocks_lo.set(u32::try_from(blocks_512).map_err(|_| too_many())?);
        return Ok(());
    }
    let shift = geometry.block_size_bits - 9;
    // A file keeps the unit it has where the count can be told in it, as Linux's own writer
    // would read it back the same.
    let in_blocks = blocks_512 >= 1 << 48
        || (flags.contains(InodeFlags::HUGE_FILE) && blocks_512.trailing_zeros() >= shift);
    let stored = if in_blocks { blocks_512 >> shift } else { blocks_512 };
    if stored >= 1 << 48 {
        return Err(too_many());
    }
    flags.set(InodeFlags::HUGE_FILE, in_blocks);
    raw.i_blocks_lo.set(stored as u32);
    raw.l_i_blocks_high.set((stored >> 32) as u16);
    Ok(())
}

/// Checks the checksum of an inode's bytes (no-op without `metadata_csum`). An inode that was
/// never written is all zero and fails, as it does in Linux.
///
/// # Errors
/// [`FormatError::Checksum`], [`FormatError::Truncated`].
pub fn verify_checksum(bytes: &[u8], geometry: &Geometry, ino: InodeNo) -> Result<()> {
    if !geometry.has_checked_inodes {
        return Ok(());
    }
    let raw = read_raw(bytes, geometry)?;
    let has_high = checksum_has_high(&raw, geometry);
    let computed = compute_checksum(bytes, &raw, geometry, ino);
    let low = u32::from(raw.l_i_checksum_lo.get());
    let (stored, computed) = if has_high {
        (u32::from(raw.i_checksum_hi.get()) << 16 | low, computed)
    } else {
        (low, computed & 0xffff)
    };
    FormatError::check_checksum(STRUCTURE, stored, computed)
}

/// Sets the checksum of an inode's bytes (no-op without `metadata_csum`); the last thing to do
/// after any change to them, in-inode attributes included.
///
/// # Errors
/// [`FormatError::Truncated`].
pub fn update_checksum(bytes: &mut [u8], geometry: &Geometry, ino: InodeNo) -> Result<()> {
    if !geometry.features.has_metadata_csum() {
        return Ok(());
    }
    let raw = read_raw(bytes, geometry)?;
    let computed = compute_checksum(bytes, &raw, geometry, ino);
    bytes[CHECKSUM_LO..CHECKSUM_LO + 2].copy_from_slice(&(computed as u16).to_le_bytes());
    if checksum_has_high(&raw, geometry) {
        let high = (computed >> 16) as u16;
        bytes[CHECKSUM_HI..CHECKSUM_HI + 2].copy_from_slice(&high.to_le_bytes());
    }
    Ok(())
}

fn checksum_has_high(raw: &RawInode, geometry: &Geometry) -> bool {
    geometry.inode_size > GOOD_OLD_INODE_BYTES && fits(CHECKSUM_HI, raw.i_extra_isize.get())
}

/// `bytes` holds at least `inode_size` bytes: `raw` was read from them.
fn compute_checksum(bytes: &[u8], raw: &RawInode, geometry: &Geometry, ino: InodeNo) -> u32 {
    let size = usize::from(geometry.inode_size);
    let seed = checksum::inode_seed(geometry.csum_seed, ino, raw.i_generation.get());
    let crc = checksum::crc32c(seed, &bytes[..CHECKSUM_LO]);
    let crc = checksum::crc32c(crc, &[0; 2]);
    let crc = checksum::crc32c(crc, &bytes[CHECKSUM_LO + 2..BASE_BYTES]);
    if size == BASE_BYTES {
        return crc;
    }
    let crc = checksum::crc32c(crc, &bytes[BASE_BYTES..CHECKSUM_HI]);
    if checksum_has_high(raw, geometry) {
        let crc = checksum::crc32c(crc, &[0; 2]);
        return checksum::crc32c(crc, &bytes[CHECKSUM_HI + 2..size]);
    }
    checksum::crc32c(crc, &bytes[CHECKSUM_HI..size])
}

/// Number of a character or block device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceNumber {
    /// Major number; 12 bits can be stored.
    pub major: u32,
    /// Minor number; 20 bits can be stored.
    pub minor: u32,
}

impl DeviceNumber {
    /// From the 32-bit form that Linux uses in inodes and in FUSE.
    pub fn from_u32(device: u32) -> DeviceNumber {
        DeviceNumber { major: device >> 8 & 0xfff, minor: device & 0xff | device >> 12 & 0xf_ff00 }
    }

    /// The 32-bit form that Linux uses in inodes and in FUSE; bits that do not fit are lost.
    pub fn to_u32(self) -> u32 {
        self.minor & 0xff | (self.major & 0xfff) << 8 | (self.minor & 0xf_ff00) << 12
    }

    /// Reads the number from `i_block`: the old 16-bit form in its first word or the new one
    /// in its second.
    pub fn from_i_block(i_block: &[u8; I_BLOCK_BYTES]) -> DeviceNumber {
        let word = |at: usize| {
            u32::from_le_bytes([i_block[at], i_block[at + 1], i_block[at + 2], i_block[at + 3]])
        };
        match word(0) {
            0 => DeviceNumber::from_u32(word(4)),
            old => DeviceNumber { major: old >> 8 & 0xff, minor: old & 0xff },
        }
    }

    /// The number as `i_block` holds it: the old form where it can be told so.
    pub fn to_i_block(self) -> [u8; I_BLOCK_BYTES] {
        let mut i_block = [0; I_BLOCK_BYTES];
        if self.major < 256 && self.minor < 256 {
            let old = self.major << 8 | self.minor;
            i_block[..4].copy_from_slice(&old.to_le_bytes());
        } else {
            i_block[4..8].copy_from_slice(&self.to_u32().to_le_bytes());
        }
        i_block
    }
}
