//! Sets checksums anew after a mutation, so that the code behind the check is reached.
//!
//! Invariant: what can no longer be sealed (its own layout is broken) stays as it is.

use fjord_block::MemImage;
use fjord_format::checksum::{self, SEED_START};
use fjord_format::dirent::{self, DirFormat};
use fjord_format::geometry::Geometry;
use fjord_format::group::GroupDesc;
use fjord_format::superblock::RawSuperblock;
use fjord_format::{GroupNo, extent, htree, inode, orphan_file, xattr};

use super::places::{self, Place, Seal};

/// Seals `place` of `image`; `sound` is the layout before any mutation.
pub(super) fn seal(image: &mut MemImage, sound: &Geometry, place: &Place) {
    let mut bytes = vec![0; place.len];
    if image.read_at(place.at, &mut bytes).is_err() {
        return;
    }
    if sealed(image, sound, place, &mut bytes).is_some() {
        // The place was just read, so it is inside the image.
        let _ = image.write_at(place.at, &bytes);
    }
}

fn sealed(image: &mut MemImage, geo: &Geometry, place: &Place, bytes: &mut [u8]) -> Option<()> {
    let sums = geo.features.has_metadata_csum();
    match place.seal {
        Seal::Superblock => {
            let mut raw = RawSuperblock::decode(bytes).ok()?;
            raw.update_checksum();
            bytes.copy_from_slice(raw.as_bytes());
            Some(())
        }
        Seal::Descriptor(group) => {
            let desc = GroupDesc::parse(bytes, geo).ok()?;
            desc.encode(bytes, geo, group).ok()
        }
        Seal::BlockBitmap(group) => {
            bitmap(image, geo, group, |desc| desc.update_block_bitmap_csum(bytes, geo).ok())
        }
        Seal::InodeBitmap(group) => {
            bitmap(image, geo, group, |desc| desc.update_inode_bitmap_csum(bytes, geo).ok())
        }
        Seal::Inode(ino) => inode::update_checksum(bytes, geo, ino).ok(),
        Seal::Extents(seed) => extent::update_checksum(bytes, seed, geo).ok(),
        Seal::Dirents(seed) => dirent::set_checksum(bytes, &DirFormat::new(geo), seed).ok(),
        Seal::Htree(seed, kind) => {
            htree::set_checksum(bytes, kind, &DirFormat::new(geo), seed).ok()
        }
        Seal::Xattrs(block) if sums => xattr::set_block_checksum(bytes, geo.csum_seed, block).ok(),
        Seal::OrphanFile(seed, block) => orphan_file::seal(bytes, sums.then_some(seed), block).ok(),
        Seal::JournalSuper if sums => put_be(bytes, SEED_START, JOURNAL_SUPER_CHECKSUM, 1024),
        Seal::Log(seed) if sums => log_block(seed, bytes),
        Seal::None | Seal::Xattrs(_) | Seal::JournalSuper | Seal::Log(_) => None,
    }
}

/// Offset of `s_checksum` of JBD2's superblock.
const JOURNAL_SUPER_CHECKSUM: usize = 0xfc;
/// Offset of `h_chksum[0]` in a commit block.
const COMMIT_CHECKSUM: usize = 16;

/// Stores in `bytes` at `at`, big-endian, the checksum of the first `len` bytes without it.
fn put_be(bytes: &mut [u8], seed: u32, at: usize, len: usize) -> Option<()> {
    bytes.get_mut(at..at + 4)?.fill(0);
    let sum = checksum::crc32c(seed, bytes.get(..len)?);
    bytes.get_mut(at..at + 4)?.copy_from_slice(&sum.to_be_bytes());
    Some(())
}

/// Descriptor and revoke blocks end with a checksum, commit blocks hold it near their start.
fn log_block(seed: u32, bytes: &mut [u8]) -> Option<()> {
    const MAGIC: [u8; 4] = [0xc0, 0x3b, 0x39, 0x98];
    if bytes.get(..4)? != MAGIC {
        return None;
    }
    let len = bytes.len();
    match bytes.get(7)? {
        2 => put_be(bytes, seed, COMMIT_CHECKSUM, len),
        1 | 5 => put_be(bytes, seed, len - 4, len),
        _ => None,
    }
}

/// Changes the checksum of a bitmap in its descriptor.
fn bitmap(
    image: &mut MemImage,
    geo: &Geometry,
    group: GroupNo,
    change: impl FnOnce(&mut GroupDesc) -> Option<()>,
) -> Option<()> {
    let (at, len) = places::descriptor_place(geo, group)?;
    let mut bytes = vec![0; len];
    image.read_at(at, &mut bytes).ok()?;
    let mut desc = GroupDesc::parse(&bytes, geo).ok()?;
    change(&mut desc)?;
    desc.encode(&mut bytes, geo, group).ok()?;
    image.write_at(at, &bytes).ok()
}
