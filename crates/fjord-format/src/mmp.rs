//! The block of multi-mount protection: the user of the file system, and its heartbeat.
//!
//! Invariant: [`MmpBlock::encode`] of what was decoded gives the same bytes; padding is kept.

use std::mem::offset_of;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use crate::checksum;
use crate::error::{FormatError, Result};
use crate::geometry::Geometry;

const STRUCTURE: &str = "MMP block";
const MAGIC: u32 = 0x004d_4d50;
/// Size of the structure in bytes, at the start of its block.
pub const MMP_BYTES: usize = 1024;
/// `mmp_seq` of a file system that nobody uses.
pub const SEQ_CLEAN: u32 = 0xff4d_4d50;
/// `mmp_seq` while e2fsck is at work.
pub const SEQ_FSCK: u32 = 0xe24d_4d50;
/// Largest `mmp_seq` of a file system in use.
pub const SEQ_MAX: u32 = 0xe24d_4d4f;
/// Shortest time between two updates, in seconds.
pub const UPDATE_INTERVAL_DEFAULT_SECONDS: u16 = 5;
/// Shortest time to watch for another user, in seconds.
pub const CHECK_INTERVAL_MIN_SECONDS: u16 = 5;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawMmp {
    mmp_magic: U32,
    mmp_seq: U32,
    mmp_time: U64,
    mmp_nodename: [u8; 64],
    mmp_bdevname: [u8; 32],
    mmp_check_interval: U16,
    mmp_pad1: U16,
    mmp_pad2: [U32; 226],
    mmp_checksum: U32,
}

const CHECKSUM_OFFSET: usize = offset_of!(RawMmp, mmp_checksum);

const _: () = {
    assert!(size_of::<RawMmp>() == MMP_BYTES);
    assert!(offset_of!(RawMmp, mmp_check_interval) == 0x70);
    assert!(CHECKSUM_OFFSET == 0x3fc);
};

/// A decoded MMP block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MmpBlock {
    /// `mmp_seq`: changes at every update; see the `SEQ_` constants.
    pub seq: u32,
    /// `mmp_time`: last update in seconds since 1970, for people only.
    pub time_seconds: u64,
    /// `mmp_nodename`: host that updated last, padded with zero bytes.
    pub nodename: [u8; 64],
    /// `mmp_bdevname`: device that it used, padded with zero bytes.
    pub bdevname: [u8; 32],
    /// `mmp_check_interval` in seconds: how long to watch before taking over.
    pub check_interval_seconds: u16,
}

impl MmpBlock {
    /// Decodes the block and checks magic number and checksum.
    ///
    /// # Errors
    /// [`FormatError::BadMagic`], [`FormatError::Checksum`], [`FormatError::Truncated`].
    pub fn decode(bytes: &[u8], geometry: &Geometry) -> Result<MmpBlock> {
        let raw = read_raw(bytes)?;
        if raw.mmp_magic.get() != MAGIC {
            return Err(FormatError::BadMagic { structure: STRUCTURE, found: raw.mmp_magic.get() });
        }
        if geometry.features.has_metadata_csum() {
            let computed = checksum::crc32c(geometry.csum_seed, &bytes[..CHECKSUM_OFFSET]);
            FormatError::check_checksum(STRUCTURE, raw.mmp_checksum.get(), computed)?;
        }
        Ok(MmpBlock {
            seq: raw.mmp_seq.get(),
            time_seconds: raw.mmp_time.get(),
            nodename: raw.mmp_nodename,
            bdevname: raw.mmp_bdevname,
            check_interval_seconds: raw.mmp_check_interval.get(),
        })
    }

    /// Writes the block in place, magic number and checksum included.
    ///
    /// # Errors
    /// [`FormatError::Truncated`].
    pub fn encode(&self, bytes: &mut [u8], geometry: &Geometry) -> Result<()> {
        let mut raw = read_raw(bytes)?;
        raw.mmp_magic.set(MAGIC);
        raw.mmp_seq.set(self.seq);
        raw.mmp_time.set(self.time_seconds);
        raw.mmp_nodename = self.nodename;
        raw.mmp_bdevname = self.bdevname;
        raw.mmp_check_interval.set(self.check_interval_seconds);
        if geometry.features.has_metadata_csum() {
            let covered = &raw.as_bytes()[..CHECKSUM_OFFSET];
            raw.mmp_checksum.set(checksum::crc32c(geometry.csum_seed, covered));
        }
        bytes[..MMP_BYTES].copy_from_slice(raw.as_bytes());
        Ok(())
    }
}

fn read_raw(bytes: &[u8]) -> Result<RawMmp> {
    FormatError::check_len(STRUCTURE, bytes, MMP_BYTES)?;
    let mut raw = RawMmp::new_zeroed();
    raw.as_mut_bytes().copy_from_slice(&bytes[..MMP_BYTES]);
    Ok(raw)
}
