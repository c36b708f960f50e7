//! The superblock: 1024 bytes, at byte 1024 of the device and in backup groups.
//!
//! Invariant: a [`RawSuperblock`] holds exactly the bytes on disk; nothing but its magic
//! number is known to be right. [`Geometry`](crate::geometry::Geometry) is what has been
//! validated.

use std::mem::offset_of;

use bitflags::bitflags;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::checksum::{self, SEED_START};
use crate::error::{FormatError, Result};
use crate::features::{Compat, Features, Incompat, RoCompat};
use crate::geometry::GOOD_OLD_INODE_BYTES;
use crate::types::InodeNo;

/// Where the primary superblock starts, in bytes from the start of the device.
pub const SUPERBLOCK_OFFSET_BYTES: u64 = 1024;
/// Size of the superblock in bytes.
pub const SUPERBLOCK_BYTES: usize = 1024;
/// The value of `s_magic`.
pub const MAGIC: u16 = 0xef53;
/// Value of `s_checksum_type` for CRC-32C, the only one there is.
pub const CHECKSUM_TYPE_CRC32C: u8 = 1;
/// Value of `s_rev_level` of the first ext2: fixed sizes, no features.
const REVISION_WITHOUT_FEATURES: u32 = 0;
/// Value of `s_rev_level` of all others.
const REVISION_WITH_FEATURES: u32 = 1;
/// Value of `s_creator_os` for Linux.
pub const OS_LINUX: u32 = 0;
/// Value of `s_creator_os` for the Hurd, whose inodes are laid out otherwise.
pub const OS_HURD: u32 = 1;

const STRUCTURE: &str = "superblock";

bitflags! {
    /// Bits of `s_state`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct FsState: u16 {
        /// Cleanly unmounted (with a journal: no error known).
        const VALID = 0x0001;
        /// An error was found; a check is due.
        const ERROR = 0x0002;
        /// Orphans are being processed.
        const ORPHAN = 0x0004;
        /// A fast-commit replay is under way.
        const FC_REPLAY = 0x0020;
        const _ = !0;
    }
}

bitflags! {
    /// Bits of `s_flags`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct FsFlags: u32 {
        /// Directory hashes take characters as signed.
        const SIGNED_HASH = 0x0001;
        /// Directory hashes take characters as unsigned.
        const UNSIGNED_HASH = 0x0002;
        /// Written by test code.
        const TEST_FILESYS = 0x0004;
        const _ = !0;
    }
}

bitflags! {
    /// Bits of `s_default_mount_opts`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct DefaultMountOptions: u32 {
        /// Print debugging messages.
        const DEBUG = 0x0001;
        /// New files take the group of their directory.
        const BSDGROUPS = 0x0002;
        /// User extended attributes.
        const XATTR_USER = 0x0004;
        /// POSIX ACLs.
        const ACL = 0x0008;
        /// 16-bit user and group IDs.
        const UID16 = 0x0010;
        /// First bit of the data mode; both bits together are `data=writeback`.
        const DATA_JOURNAL = 0x0020;
        /// Second bit of the data mode: `data=ordered`.
        const DATA_ORDERED = 0x0040;
        /// No write barriers.
        const NOBARRIER = 0x0100;
        /// Check blocks against the fixed metadata.
        const BLOCK_VALIDITY = 0x0200;
        /// Discard freed blocks.
        const DISCARD = 0x0400;
        /// No delayed allocation.
        const NODELALLOC = 0x0800;
        const _ = !0;
    }
}

/// The superblock as it lies on disk, with the kernel's field names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RawSuperblock {
    /// Inodes of all groups together.
    pub s_inodes_count: U32,
    /// Blocks of the file system, low half.
    pub s_blocks_count_lo: U32,
    /// Blocks kept for the superuser, low half.
    pub s_r_blocks_count_lo: U32,
    /// Free blocks (with bigalloc: free clusters times the cluster ratio), low half.
    pub s_free_blocks_count_lo: U32,
    /// Free inodes.
    pub s_free_inodes_count: U32,
    /// Block that group 0 starts at: 1 with 1 KiB blocks (unless bigalloc), else 0.
    pub s_first_data_block: U32,
    /// Block size is 1024 << this.
    pub s_log_block_size: U32,
    /// Cluster size is 1024 << this; equals the block size without bigalloc.
    pub s_log_cluster_size: U32,
    /// Blocks per group.
    pub s_blocks_per_group: U32,
    /// Clusters per group.
    pub s_clusters_per_group: U32,
    /// Inodes per group.
    pub s_inodes_per_group: U32,
    /// Last mount (seconds since 1970, low 32 bits).
    pub s_mtime: U32,
    /// Last write of the superblock (seconds, low 32 bits).
    pub s_wtime: U32,
    /// Mounts since the last check.
    pub s_mnt_count: U16,
    /// Mounts after which a check is due; as i16, -1 for never.
    pub s_max_mnt_count: U16,
    /// Always [`MAGIC`].
    pub s_magic: U16,
    /// [`FsState`] bits.
    pub s_state: U16,
    /// What to do on an error: 1 continue, 2 read-only, 3 panic.
    pub s_errors: U16,
    /// Minor revision, 0.
    pub s_minor_rev_level: U16,
    /// Last check (seconds, low 32 bits).
    pub s_lastcheck: U32,
    /// Seconds between checks, 0 for never.
    pub s_checkinterval: U32,
    /// 0 for Linux.
    pub s_creator_os: U32,
    /// 0 without the fields from `s_first_ino` on, 1 with them.
    pub s_rev_level: U32,
    /// User who may use the reserved blocks.
    pub s_def_resuid: U16,
    /// Group that may use the reserved blocks.
    pub s_def_resgid: U16,
    /// First inode for files of users.
    pub s_first_ino: U32,
    /// Inode size in bytes.
    pub s_inode_size: U16,
    /// Group that this copy of the superblock lies in.
    pub s_block_group_nr: U16,
    /// [`Compat`] bits.
    pub s_feature_compat: U32,
    /// [`Incompat`] bits.
    pub s_feature_incompat: U32,
    /// [`RoCompat`] bits.
    pub s_feature_ro_compat: U32,
    /// UUID of the file system.
    pub s_uuid: [u8; 16],
    /// Label, padded with zero bytes.
    pub s_volume_name: [u8; 16],
    /// Path of the last mount point, padded with zero bytes.
    pub s_last_mounted: [u8; 64],
    /// Compression algorithms, unused.
    pub s_algorithm_usage_bitmap: U32,
    /// Preallocation hint for files, unused by Linux.
    pub s_prealloc_blocks: u8,
    /// Preallocation hint for directories, unused by Linux.
    pub s_prealloc_dir_blocks: u8,
    /// Blocks after each copy of the descriptors kept for growth.
    pub s_reserved_gdt_blocks: U16,
    /// UUID of the external journal.
    pub s_journal_uuid: [u8; 16],
    /// Inode of the journal, 0 for none or an external one.
    pub s_journal_inum: U32,
    /// Device number of the external journal.
    pub s_journal_dev: U32,
    /// Head of the list of inodes to be deleted or truncated.
    pub s_last_orphan: U32,
    /// Seed of the directory hash.
    pub s_hash_seed: [U32; 4],
    /// Hash of new indexed directories.
    pub s_def_hash_version: u8,
    /// 1 when `s_jnl_blocks` is valid.
    pub s_jnl_backup_type: u8,
    /// Group-descriptor size in bytes, with the feature `64bit`.
    pub s_desc_size: U16,
    /// Default mount options, bits.
    pub s_default_mount_opts: U32,
    /// First meta block group, in units of descriptor blocks.
    pub s_first_meta_bg: U32,
    /// When the file system was made (seconds, low 32 bits).
    pub s_mkfs_time: U32,
    /// Copy of the journal inode's `i_block` (15), `i_size_high` and `i_size_lo`.
    pub s_jnl_blocks: [U32; 17],
    /// High half of the block count, with the feature `64bit`.
    pub s_blocks_count_hi: U32,
    /// High half of the reserved count.
    pub s_r_blocks_count_hi: U32,
    /// High half of the free count.
    pub s_free_blocks_count_hi: U32,
    /// Every inode has at least this many extra bytes.
    pub s_min_extra_isize: U16,
    /// New inodes get this many extra bytes.
    pub s_want_extra_isize: U16,
    /// [`FsFlags`] bits.
    pub s_flags: U32,
    /// RAID stride in blocks.
    pub s_raid_stride: U16,
    /// Seconds between updates of the MMP block.
    pub s_mmp_update_interval: U16,
    /// Block of multi-mount protection.
    pub s_mmp_block: U64,
    /// RAID stripe width in blocks.
    pub s_raid_stripe_width: U32,
    /// Groups per flex group are 1 << this.
    pub s_log_groups_per_flex: u8,
    /// 1 for CRC-32C.
    pub s_checksum_type: u8,
    /// Version of encryption.
    pub s_encryption_level: u8,
    /// Padding.
    pub s_reserved_pad: u8,
    /// KiB written over the life of the file system.
    pub s_kbytes_written: U64,
    /// Snapshots, unused by Linux.
    pub s_snapshot_inum: U32,
    /// Snapshots, unused by Linux.
    pub s_snapshot_id: U32,
    /// Snapshots, unused by Linux.
    pub s_snapshot_r_blocks_count: U64,
    /// Snapshots, unused by Linux.
    pub s_snapshot_list: U32,
    /// Errors seen since the last check.
    pub s_error_count: U32,
    /// Time of the first error (seconds, low 32 bits).
    pub s_first_error_time: U32,
    /// Inode of the first error.
    pub s_first_error_ino: U32,
    /// Block of the first error.
    pub s_first_error_block: U64,
    /// Function that found the first error.
    pub s_first_error_func: [u8; 32],
    /// Source line of the first error.
    pub s_first_error_line: U32,
    /// Time of the latest error (seconds, low 32 bits).
    pub s_last_error_time: U32,
    /// Inode of the latest error.
    pub s_last_error_ino: U32,
    /// Source line of the latest error.
    pub s_last_error_line: U32,
    /// Block of the latest error.
    pub s_last_error_block: U64,
    /// Function that found the latest error.
    pub s_last_error_func: [u8; 32],
    /// Mount options as text, padded with zero bytes.
    pub s_mount_opts: [u8; 64],
    /// Inode of the user quota.
    pub s_usr_quota_inum: U32,
    /// Inode of the group quota.
    pub s_grp_quota_inum: U32,
    /// Clusters of fixed metadata, 0 when not computed.
    pub s_overhead_clusters: U32,
    /// Groups with backups, with the feature `sparse_super2`; 0 for none.
    pub s_backup_bgs: [U32; 2],
    /// Encryption algorithms in use.
    pub s_encrypt_algos: [u8; 4],
    /// Salt of the key derivation.
    pub s_encrypt_pw_salt: [u8; 16],
    /// Inode of lost+found, unused by Linux.
    pub s_lpf_ino: U32,
    /// Inode of the project quota.
    pub s_prj_quota_inum: U32,
    /// Checksum seed, with the feature `metadata_csum_seed`.
    pub s_checksum_seed: U32,
    /// Bits 32 to 39 of `s_wtime`.
    pub s_wtime_hi: u8,
    /// Bits 32 to 39 of `s_mtime`.
    pub s_mtime_hi: u8,
    /// Bits 32 to 39 of `s_mkfs_time`.
    pub s_mkfs_time_hi: u8,
    /// Bits 32 to 39 of `s_lastcheck`.
    pub s_lastcheck_hi: u8,
    /// Bits 32 to 39 of `s_first_error_time`.
    pub s_first_error_time_hi: u8,
    /// Bits 32 to 39 of `s_last_error_time`.
    pub s_last_error_time_hi: u8,
    /// Kind of the first error.
    pub s_first_error_errcode: u8,
    /// Kind of the latest error.
    pub s_last_error_errcode: u8,
    /// Character set of names, with the feature `casefold`.
    pub s_encoding: U16,
    /// Flags of the character set.
    pub s_encoding_flags: U16,
    /// Inode of the orphan file, with the feature `orphan_file`.
    pub s_orphan_file_inum: U32,
    /// Zero.
    pub s_reserved: [U32; 94],
    /// Raw CRC-32C from ~0 over all bytes before it.
    pub s_checksum: U32,
}

const _: () = {
    assert!(size_of::<RawSuperblock>() == SUPERBLOCK_BYTES);
    assert!(offset_of!(RawSuperblock, s_magic) == 0x38);
    assert!(offset_of!(RawSuperblock, s_first_ino) == 0x54);
    assert!(offset_of!(RawSuperblock, s_feature_compat) == 0x5c);
    assert!(offset_of!(RawSuperblock, s_uuid) == 0x68);
    assert!(offset_of!(RawSuperblock, s_algorithm_usage_bitmap) == 0xc8);
    assert!(offset_of!(RawSuperblock, s_journal_uuid) == 0xd0);
    assert!(offset_of!(RawSuperblock, s_desc_size) == 0xfe);
    assert!(offset_of!(RawSuperblock, s_default_mount_opts) == 0x100);
    assert!(offset_of!(RawSuperblock, s_jnl_blocks) == 0x10c);
    assert!(offset_of!(RawSuperblock, s_blocks_count_hi) == 0x150);
    assert!(offset_of!(RawSuperblock, s_flags) == 0x160);
    assert!(offset_of!(RawSuperblock, s_mmp_block) == 0x168);
    assert!(offset_of!(RawSuperblock, s_kbytes_written) == 0x178);
    assert!(offset_of!(RawSuperblock, s_error_count) == 0x194);
    assert!(offset_of!(RawSuperblock, s_mount_opts) == 0x200);
    assert!(offset_of!(RawSuperblock, s_usr_quota_inum) == 0x240);
    assert!(offset_of!(RawSuperblock, s_checksum_seed) == 0x270);
    assert!(offset_of!(RawSuperblock, s_orphan_file_inum) == 0x280);
    assert!(offset_of!(RawSuperblock, s_checksum) == 0x3fc);
};

impl RawSuperblock {
    /// A superblock of zero bytes with the magic number set: what a formatter starts from.
    pub fn empty() -> RawSuperblock {
        let mut sb: RawSuperblock = zerocopy::FromZeros::new_zeroed();
        sb.s_magic = U16::new(MAGIC);
        sb
    }

    /// Reads the superblock from the front of `bytes` and checks its magic number.
    ///
    /// # Errors
    /// [`FormatError::Truncated`], or [`FormatError::BadMagic`] when this is not ext2/3/4.
    pub fn decode(bytes: &[u8]) -> Result<RawSuperblock> {
        FormatError::check_len(STRUCTURE, bytes, SUPERBLOCK_BYTES)?;
        let (sb, _) = RawSuperblock::read_from_prefix(bytes).map_err(|_| {
            FormatError::corrupt(STRUCTURE, "the buffer does not hold a superblock")
        })?;
        if sb.s_magic.get() != MAGIC {
            return Err(FormatError::BadMagic {
                structure: STRUCTURE,
                found: u32::from(sb.s_magic.get()),
            });
        }
        Ok(sb)
    }

    /// The bytes as they go to disk.
    pub fn as_bytes(&self) -> &[u8] {
        IntoBytes::as_bytes(self)
    }

    /// All feature bits, known or not.
    pub fn features(&self) -> Features {
        Features {
            compat: Compat::from_bits_retain(self.s_feature_compat.get()),
            incompat: Incompat::from_bits_retain(self.s_feature_incompat.get()),
            ro_compat: RoCompat::from_bits_retain(self.s_feature_ro_compat.get()),
        }
    }

    /// Sets all feature bits.
    pub fn set_features(&mut self, features: &Features) {
        self.s_feature_compat.set(features.compat.bits());
        self.s_feature_incompat.set(features.incompat.bits());
        self.s_feature_ro_compat.set(features.ro_compat.bits());
    }

    /// Whether the revision has features. Those of revision 0 count all the same, as they do for Linux.
    pub fn has_features(&self) -> bool {
        self.s_rev_level.get() != REVISION_WITHOUT_FEATURES
    }

    /// Adds features, as their first use on a mounted file system does: a revision without them is
    /// raised to one that has them.
    pub fn add_features(&mut self, more: &Features) {
        if !self.has_features() {
            self.s_rev_level.set(REVISION_WITH_FEATURES);
            self.s_first_ino.set(InodeNo::GOOD_OLD_FIRST.0);
            self.s_inode_size.set(GOOD_OLD_INODE_BYTES);
        }
        self.set_features(&self.features().with(more));
    }

    /// The checksum that these bytes call for.
    pub fn compute_checksum(&self) -> u32 {
        checksum::crc32c(SEED_START, &self.as_bytes()[..offset_of!(RawSuperblock, s_checksum)])
    }

    /// Checks the checksum when the file system has `metadata_csum`.
    ///
    /// # Errors
    /// [`FormatError::Checksum`]; [`FormatError::Incompatible`] for another checksum type.
    pub fn verify_checksum(&self) -> Result<()> {
        if !self.features().has_metadata_csum() {
            return Ok(());
        }
        if self.s_checksum_type != CHECKSUM_TYPE_CRC32C {
            return Err(FormatError::Incompatible {
                feature: format!("checksum type {}", self.s_checksum_type),
            });
        }
        FormatError::check_checksum(STRUCTURE, self.s_checksum.get(), self.compute_checksum())
    }

    /// Brings the checksum up to date when the file system has `metadata_csum`. The last thing
    /// to do before the bytes are written.
    pub fn update_checksum(&mut self) {
        if self.features().has_metadata_csum() {
            self.s_checksum.set(self.compute_checksum());
        }
    }

    /// As [`Self::update_checksum`], but the stored checksum stays what it is: it is made to fit by
    /// `s_algorithm_usage_bitmap`, which nothing has used since e2compr. So a change of the first sector
    /// alone changes no other, and a power cut leaves the old superblock or the new one.
    pub fn fit_checksum(&mut self) {
        if !self.features().has_metadata_csum() {
            return;
        }
        const AT: usize = offset_of!(RawSuperblock, s_algorithm_usage_bitmap);
        const END: usize = offset_of!(RawSuperblock, s_checksum);
        let bytes = self.as_bytes();
        let (before, after) = (&bytes[..AT], &bytes[AT + 4..END]);
        let wanted = self.s_checksum.get();
        let filler = checksum::crc32c_filler(SEED_START, before, after, wanted);
        self.s_algorithm_usage_bitmap.set(u32::from_le_bytes(filler));
    }

    /// Seed of all metadata checksums: stored, or derived from the UUID.
    pub fn checksum_seed(&self) -> u32 {
        if self.features().incompat.contains(Incompat::CSUM_SEED) {
            self.s_checksum_seed.get()
        } else {
            checksum::uuid_seed(&self.s_uuid)
        }
    }

    fn has_64bit(&self) -> bool {
        self.features().incompat.contains(Incompat::BIT64)
    }

    fn combine(&self, lo: U32, hi: U32) -> u64 {
        let high = if self.has_64bit() { u64::from(hi.get()) << 32 } else { 0 };
        high | u64::from(lo.get())
    }

    /// Blocks of the file system.
    pub fn blocks_count(&self) -> u64 {
        self.combine(self.s_blocks_count_lo, self.s_blocks_count_hi)
    }

    /// Sets the number of blocks; the high half is dropped without the feature `64bit`.
    pub fn set_blocks_count(&mut self, blocks: u64) {
        let (lo, hi) = self.split(blocks);
        self.s_blocks_count_lo = lo;
        self.s_blocks_count_hi = hi;
    }

    /// Blocks kept for the superuser.
    pub fn r_blocks_count(&self) -> u64 {
        self.combine(self.s_r_blocks_count_lo, self.s_r_blocks_count_hi)
    }

    /// Sets the number of reserved blocks.
    pub fn set_r_blocks_count(&mut self, blocks: u64) {
        let (lo, hi) = self.split(blocks);
        self.s_r_blocks_count_lo = lo;
        self.s_r_blocks_count_hi = hi;
    }

    /// Free blocks (units: blocks, with bigalloc too).
    pub fn free_blocks_count(&self) -> u64 {
        self.combine(self.s_free_blocks_count_lo, self.s_free_blocks_count_hi)
    }

    /// Sets the number of free blocks (units: blocks, with bigalloc too).
    pub fn set_free_blocks_count(&mut self, blocks: u64) {
        let (lo, hi) = self.split(blocks);
        self.s_free_blocks_count_lo = lo;
        self.s_free_blocks_count_hi = hi;
    }

    fn split(&self, value: u64) -> (U32, U32) {
        let high = if self.has_64bit() { (value >> 32) as u32 } else { 0 };
        (U32::new(value as u32), U32::new(high))
    }

    /// Time of the last mount, in seconds since 1970.
    pub fn mtime_seconds(&self) -> u64 {
        u64::from(self.s_mtime_hi) << 32 | u64::from(self.s_mtime.get())
    }

    /// Sets the time of the last mount (40 bits are kept).
    pub fn set_mtime_seconds(&mut self, seconds: u64) {
        self.s_mtime.set(seconds as u32);
        self.s_mtime_hi = (seconds >> 32) as u8;
    }

    /// Time of the last superblock write, in seconds since 1970.
    pub fn wtime_seconds(&self) -> u64 {
        u64::from(self.s_wtime_hi) << 32 | u64::from(self.s_wtime.get())
    }

    /// Sets the time of the last superblock write (40 bits are kept).
    pub fn set_wtime_seconds(&mut self, seconds: u64) {
        self.s_wtime.set(seconds as u32);
        self.s_wtime_hi = (seconds >> 32) as u8;
    }

    /// Time when the file system was made, in seconds since 1970.
    pub fn mkfs_time_seconds(&self) -> u64 {
        u64::from(self.s_mkfs_time_hi) << 32 | u64::from(self.s_mkfs_time.get())
    }

    /// Sets the time when the file system was made (40 bits are kept).
    pub fn set_mkfs_time_seconds(&mut self, seconds: u64) {
        self.s_mkfs_time.set(seconds as u32);
        self.s_mkfs_time_hi = (seconds >> 32) as u8;
    }

    /// Time of the last check, in seconds since 1970.
    pub fn lastcheck_seconds(&self) -> u64 {
        u64::from(self.s_lastcheck_hi) << 32 | u64::from(self.s_lastcheck.get())
    }

    /// Sets the time of the last check (40 bits are kept).
    pub fn set_lastcheck_seconds(&mut self, seconds: u64) {
        self.s_lastcheck.set(seconds as u32);
        self.s_lastcheck_hi = (seconds >> 32) as u8;
    }

    /// State bits.
    pub fn state(&self) -> FsState {
        FsState::from_bits_retain(self.s_state.get())
    }

    /// Sets the state bits.
    pub fn set_state(&mut self, state: FsState) {
        self.s_state.set(state.bits());
    }

    /// Flag bits.
    pub fn flags(&self) -> FsFlags {
        FsFlags::from_bits_retain(self.s_flags.get())
    }

    /// Default mount options.
    pub fn default_mount_options(&self) -> DefaultMountOptions {
        DefaultMountOptions::from_bits_retain(self.s_default_mount_opts.get())
    }

    /// The label without its padding; any bytes but zero.
    pub fn volume_name(&self) -> &[u8] {
        until_zero(&self.s_volume_name)
    }

    /// The last mount point without its padding; any bytes but zero.
    pub fn last_mounted(&self) -> &[u8] {
        until_zero(&self.s_last_mounted)
    }

    /// The journal's inode, or `None` when there is no journal or it lies elsewhere.
    pub fn journal_inode(&self) -> Option<InodeNo> {
        let inum = self.s_journal_inum.get();
        let has = self.features().compat.contains(Compat::HAS_JOURNAL);
        (has && inum != 0).then_some(InodeNo(inum))
    }

    /// The four words of the directory hash seed.
    pub fn hash_seed(&self) -> [u32; 4] {
        self.s_hash_seed.map(U32::get)
    }
}

fn until_zero(bytes: &[u8]) -> &[u8] {
    let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
    &bytes[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_what_is_no_superblock() {
        assert!(matches!(
            RawSuperblock::decode(&[0; 1024]),
            Err(FormatError::BadMagic { found: 0, .. })
        ));
        assert!(matches!(RawSuperblock::decode(&[0; 1023]), Err(FormatError::Truncated { .. })));
    }

    #[test]
    fn wide_counts_and_times_come_back() {
        let mut sb = RawSuperblock::empty();
        sb.set_features(&Features { incompat: Incompat::BIT64, ..Features::default() });
        sb.set_blocks_count(0x1_2345_6789);
        sb.set_r_blocks_count(0x2_0000_0001);
        sb.set_free_blocks_count(7);
        sb.set_wtime_seconds(0x12_3456_789a);
        let back = RawSuperblock::decode(sb.as_bytes()).expect("decodes");
        assert_eq!(back, sb);
        assert_eq!(back.blocks_count(), 0x1_2345_6789);
        assert_eq!(back.r_blocks_count(), 0x2_0000_0001);
        assert_eq!(back.free_blocks_count(), 7);
        assert_eq!(back.wtime_seconds(), 0x12_3456_789a);
    }

    #[test]
    fn checksum_covers_every_byte_before_it() {
        let mut sb = RawSuperblock::empty();
        sb.s_checksum_type = CHECKSUM_TYPE_CRC32C;
        sb.set_features(&Features { ro_compat: RoCompat::METADATA_CSUM, ..Features::default() });
        sb.update_checksum();
        sb.verify_checksum().expect("just set");
        sb.s_reserved[93].set(1);
        assert!(matches!(sb.verify_checksum(), Err(FormatError::Checksum { .. })));
    }
}
