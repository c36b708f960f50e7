//! Recognises existing contents of a file or device by their signatures, so that they are not
//! overwritten by mistake.
//!
//! Owns a table of signatures with their offsets. Invariant: it only reads: a bounded part of a
//! device, a file up to its first nonzero byte.
//!
//! Sources: the superblock probes of util-linux (libblkid), the magic database of file(1), and the
//! on-disk formats' own documentation.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

/// Contents found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// Nothing that is recognised on a device; a file of zeroes.
    Nothing,
    /// Contents with a signature, described: `"an XFS file system"`.
    Known(&'static str),
    /// A file with nonzero bytes that are not recognised. A device with such bytes counts as
    /// [`Held::Nothing`], as for mke2fs: devices that were wiped or used raw are full of them.
    Data,
}

/// Bytes at a place.
struct Signature {
    name: &'static str,
    /// In bytes; from the end of the device if negative.
    offset: i64,
    magic: &'static [u8],
}

const fn signature(name: &'static str, offset: i64, magic: &'static [u8]) -> Signature {
    Signature { name, offset, magic }
}

/// How [`known`] describes a file system of the ext family.
pub const EXT4: &str = "an ext2, ext3 or ext4 file system";
/// How [`known`] describes partition tables.
const GPT: &str = "a partition table (GPT)";
const MBR: &str = "a partition table or boot sector (MBR)";

/// Formats whose files contain an image in parts, compressed or behind a header, and the command that makes
/// an image of them, by the description of [`known`].
const UNPACKED_BY: [(&str, &str); 12] = [
    ("a qcow2 disk image", QEMU_IMG),
    ("a VMDK disk image", QEMU_IMG),
    ("a VDI disk image", QEMU_IMG),
    ("a VHDX disk image", QEMU_IMG),
    ("a VHD disk image", QEMU_IMG),
    (ANDROID_SPARSE, "simg2img FILE IMAGE"),
    (SIF, "apptainer sif list FILE; apptainer sif dump ID FILE >IMAGE"),
    ("a gzip file", "gzip -dc FILE >IMAGE"),
    ("an xz file", "xz -dc FILE >IMAGE"),
    ("a zstd file", "zstd -dc FILE >IMAGE"),
    ("a bzip2 file", "bzip2 -dc FILE >IMAGE"),
    ("a tar archive", "fjord mkfs --from-tar FILE IMAGE"),
];
const QEMU_IMG: &str = "qemu-img convert -O raw FILE IMAGE";
const ANDROID_SPARSE: &str = "an Android sparse image";
const SIF: &str = "a container image of Apptainer (SIF)";

/// The command that makes an image of a file that [`known`] describes so, if there is one.
pub fn unpacked_by(what: &str) -> Option<&'static str> {
    UNPACKED_BY.iter().find(|(name, _)| *name == what).map(|(_, command)| *command)
}

/// Whether [`known`] describes a partition table so, or what looks like one.
pub fn is_partition_table(what: &str) -> bool {
    [GPT, MBR].contains(&what)
}

/// Signatures of file systems, volumes and partition tables; the more specific ones first. (The
/// boot sector of a FAT file system looks like one with a partition table.)
const SYSTEMS: &[Signature] = &[
    signature(EXT4, 1080, b"\x53\xef"),
    signature("an XFS file system", 0, b"XFSB"),
    signature("a Btrfs file system", 0x1_0040, b"_BHRfS_M"),
    signature("a bcachefs file system", 4120, b"\xc6\x85\x73\xf6\x66\xce\x90\xa9"),
    signature("a bcache device", 4120, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca"),
    signature("an F2FS file system", 1024, b"\x10\x20\xf5\xf2"),
    signature("an encrypted volume (LUKS)", 0, b"LUKS\xba\xbe"),
    signature("an encrypted volume (LUKS)", 0x4000, b"SKUL\xba\xbe"),
    signature("an encrypted volume (BitLocker)", 3, b"-FVE-FS-"),
    signature("an LVM physical volume", 24, b"LVM2 001"),
    signature("an LVM physical volume", 536, b"LVM2 001"),
    signature("an LVM physical volume", 1048, b"LVM2 001"),
    signature("an LVM physical volume", 1560, b"LVM2 001"),
    signature("a part of a RAID (mdraid)", 0, b"\xfc\x4e\x2b\xa9"),
    signature("a part of a RAID (mdraid)", 4096, b"\xfc\x4e\x2b\xa9"),
    signature("swap space", 4086, b"SWAPSPACE2"),
    signature("swap space", 4086, b"SWAP-SPACE"),
    signature("swap space", 8182, b"SWAPSPACE2"),
    signature("swap space", 16374, b"SWAPSPACE2"),
    signature("swap space", 32758, b"SWAPSPACE2"),
    signature("swap space", 65526, b"SWAPSPACE2"),
    signature("a suspended system", 4086, b"S1SUSPEND"),
    signature("an exFAT file system", 3, b"EXFAT   "),
    signature("an NTFS file system", 3, b"NTFS    "),
    signature("a FAT file system", 54, b"FAT12   "),
    signature("a FAT file system", 54, b"FAT16   "),
    signature("a FAT file system", 82, b"FAT32   "),
    signature("an ISO 9660 file system", 32769, b"CD001"),
    signature("a UDF file system", 32769, b"BEA01"),
    signature("a squashfs file system", 0, b"hsqs"),
    signature("a squashfs file system", 0, b"sqsh"),
    signature("an EROFS file system", 1024, b"\xe2\xe1\xf5\xe0"),
    signature("a cramfs file system", 0, b"\x45\x3d\xcd\x28"),
    signature("a romfs file system", 0, b"-rom1fs-"),
    signature("a UBI volume", 0, b"UBI#"),
    signature("a UBIFS file system", 0, b"\x31\x18\x10\x06"),
    signature("a JFS file system", 32768, b"JFS1"),
    signature("a ReiserFS file system", 0x1_0034, b"ReIsEr"),
    signature("a Reiser4 file system", 0x1_0000, b"ReIsEr4"),
    signature("an OCFS2 file system", 4096, b"OCFSV2"),
    signature("an OCFS2 file system", 1024, b"OCFSV2"),
    signature("a GFS2 file system", 0x1_0000, b"\x01\x16\x19\x70"),
    signature("an APFS container", 32, b"NXSB"),
    signature("an HFS+ file system", 1024, b"H+\x00\x04"),
    signature("an HFS+ file system", 1024, b"HX\x00\x05"),
    signature("a UFS file system", 9564, b"\x54\x19\x01\x00"),
    signature("a UFS file system", 66908, b"\x19\x01\x54\x19"),
    signature(GPT, 512, b"EFI PART"),
    signature(GPT, 4096, b"EFI PART"),
    signature(GPT, -512, b"EFI PART"),
    signature(MBR, 510, b"\x55\xaa"),
];

/// Signatures of files that are not disk images.
const FILES: &[Signature] = &[
    signature("a tar archive", 257, b"ustar"),
    signature("a gzip file", 0, b"\x1f\x8b"),
    signature("an xz file", 0, b"\xfd7zXZ\x00"),
    signature("a zstd file", 0, b"\x28\xb5\x2f\xfd"),
    signature("a bzip2 file", 0, b"BZh"),
    signature("an lz4 file", 0, b"\x04\x22\x4d\x18"),
    signature("a zip archive", 0, b"PK\x03\x04"),
    signature("a zip archive", 0, b"PK\x05\x06"),
    signature("a 7z archive", 0, b"7z\xbc\xaf\x27\x1c"),
    signature("a rar archive", 0, b"Rar!\x1a\x07"),
    signature("a cpio archive", 0, b"07070"),
    signature("an ar archive or Debian package", 0, b"!<arch>\n"),
    signature("an RPM package", 0, b"\xed\xab\xee\xdb"),
    signature("an ELF program or library", 0, b"\x7fELF"),
    signature("a Windows program", 0, b"MZ"),
    signature("a PDF document", 0, b"%PDF-"),
    signature("a PNG picture", 0, b"\x89PNG\r\n"),
    signature("a JPEG picture", 0, b"\xff\xd8\xff"),
    signature("a GIF picture", 0, b"GIF8"),
    signature("a film or sound (MP4)", 4, b"ftyp"),
    signature("a film or sound (RIFF)", 0, b"RIFF"),
    signature("a film or sound (Matroska)", 0, b"\x1a\x45\xdf\xa3"),
    signature("a sound (Ogg)", 0, b"OggS"),
    signature("an SQLite database", 0, b"SQLite format 3\x00"),
    signature("a qcow2 disk image", 0, b"QFI\xfb"),
    signature("a VMDK disk image", 0, b"KDMV"),
    signature("a VDI disk image", 64, b"\x7f\x10\xda\xbe"),
    signature("a VHDX disk image", 0, b"vhdxfile"),
    signature("a VHD disk image", 0, b"conectix"),
    signature("a VHD disk image", -512, b"conectix"),
    signature("a VMDK disk image", 0, b"# Disk DescriptorFile"),
    signature(ANDROID_SPARSE, 0, b"\x3a\xff\x26\xed"),
    signature(SIF, 32, b"SIF_MAGIC"),
];

/// As much of the front as any signature needs.
const FRONT_BYTES: usize = 0x1_1000;
/// Magic of an mdraid superblock.
const MD_MAGIC: [u8; 4] = *b"\xfc\x4e\x2b\xa9";
/// Uberblocks of a ZFS label: where they begin and end, and how far apart they are.
const ZFS_UBERBLOCKS: std::ops::Range<u64> = 0x2_0000..0x4_0000;
const ZFS_STEP_BYTES: usize = 1024;
const ZFS_MAGIC: u64 = 0x00ba_b10c;
/// As much of a file as is looked at to call it a text.
const TEXT_BYTES: usize = 4096;

/// Looks at a regular file or (`is_device`) a block device of `size_bytes`.
///
/// # Errors
/// It cannot be read.
pub fn held(file: &File, size_bytes: u64, is_device: bool) -> io::Result<Held> {
    if let Some(what) = known(size_bytes, &mut |offset, bytes| file.read_exact_at(bytes, offset))? {
        return Ok(Held::Known(what));
    }
    let is_blank = is_device || is_zero(file, size_bytes)?;
    Ok(if is_blank { Held::Nothing } else { Held::Data })
}

/// A function that fills a buffer from an offset in bytes.
type Read<'a, E> = &'a mut dyn FnMut(u64, &mut [u8]) -> Result<(), E>;

/// Describes the contents of a file or device of `size_bytes` by their signatures, with an article:
/// `"an XFS file system"`. Asks `read` only for bytes that are there.
///
/// # Errors
/// Those of `read`.
pub fn known<E>(size_bytes: u64, read: Read<'_, E>) -> Result<Option<&'static str>, E> {
    let mut front = vec![0; FRONT_BYTES.min(usize::try_from(size_bytes).unwrap_or(FRONT_BYTES))];
    read(0, &mut front)?;
    if let Some(name) = find(SYSTEMS, read, &front, size_bytes)? {
        return Ok(Some(name));
    }
    if let Some(name) = raid_or_zfs(read, size_bytes)? {
        return Ok(Some(name));
    }
    let name = find(FILES, read, &front, size_bytes)?;
    Ok(name.or_else(|| is_text(&front).then_some("text")))
}

fn find<E>(
    table: &[Signature],
    read: Read<'_, E>,
    front: &[u8],
    size_bytes: u64,
) -> Result<Option<&'static str>, E> {
    for Signature { name, offset, magic } in table {
        let is_there = match usize::try_from(*offset) {
            Ok(offset) => front.get(offset..offset + magic.len()) == Some(*magic),
            Err(_) => {
                let mut bytes = vec![0; magic.len()];
                if let Some(start) = size_bytes.checked_sub(offset.unsigned_abs()) {
                    read(start, &mut bytes)?;
                }
                bytes == *magic
            }
        };
        if is_there {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// Signatures whose place depends on the size, or that lie in one of many places.
fn raid_or_zfs<E>(read: Read<'_, E>, size_bytes: u64) -> Result<Option<&'static str>, E> {
    // Version 0.90 at the last whole 64 KiB but one; version 1.0 in the last 8 KiB.
    let v0 = (size_bytes & !0xffff).checked_sub(0x1_0000);
    let v1 = (size_bytes & !0xfff).checked_sub(0x2000);
    for offset in [v0, v1].into_iter().flatten() {
        let mut magic = [0; 4];
        read(offset, &mut magic)?;
        if magic == MD_MAGIC {
            return Ok(Some("a part of a RAID (mdraid)"));
        }
    }
    if size_bytes >= ZFS_UBERBLOCKS.end {
        let mut label = vec![0; (ZFS_UBERBLOCKS.end - ZFS_UBERBLOCKS.start) as usize];
        read(ZFS_UBERBLOCKS.start, &mut label)?;
        let magics = label.chunks_exact(ZFS_STEP_BYTES).filter_map(<[u8]>::first_chunk::<8>);
        if magics.into_iter().any(|magic| {
            u64::from_le_bytes(*magic) == ZFS_MAGIC || u64::from_be_bytes(*magic) == ZFS_MAGIC
        }) {
            return Ok(Some("a ZFS pool"));
        }
    }
    Ok(None)
}

/// Whether a file begins as texts do: words in UTF-8. Zeroes may follow the end of a text on a
/// device.
fn is_text(front: &[u8]) -> bool {
    let part = &front[..front.len().min(TEXT_BYTES)];
    let end = part.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    let (front, part) = if end < part.len() { (&part[..end], &part[..end]) } else { (front, part) };
    let text = match std::str::from_utf8(part) {
        Ok(text) => text,
        // The part may end in the middle of a character.
        Err(error) if error.error_len().is_none() && part.len() < front.len() => {
            std::str::from_utf8(&part[..error.valid_up_to()]).unwrap_or_default()
        }
        Err(_) => return false,
    };
    let is_fit = |c: char| !c.is_control() || matches!(c, '\n' | '\r' | '\t' | '\x0c' | '\x1b');
    !text.is_empty() && text.chars().all(is_fit)
}

/// Whether all of a file is zeroes. Holes are not read.
fn is_zero(file: &File, size_bytes: u64) -> io::Result<bool> {
    let mut bytes = vec![0; 1 << 20];
    let mut at = 0;
    while at < size_bytes {
        at = match next_data(file, at) {
            Some(start) if start >= size_bytes => break,
            Some(start) => start,
            None => at,
        };
        let len = (size_bytes.saturating_sub(at)).min(bytes.len() as u64) as usize;
        file.read_exact_at(&mut bytes[..len], at)?;
        if bytes[..len].iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
        at += len as u64;
    }
    Ok(true)
}

/// Start of the next data; `None` if unknown.
fn next_data(file: &File, at: u64) -> Option<u64> {
    match rustix::fs::seek(file.as_fd(), rustix::fs::SeekFrom::Data(at)) {
        Ok(start) => Some(start),
        Err(rustix::io::Errno::NXIO) => Some(u64::MAX),
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE_BYTES: u64 = 1 << 20;

    fn file_with(offset: u64, bytes: &[u8]) -> File {
        let file = tempfile::tempfile().expect("a temporary file");
        file.set_len(SIZE_BYTES).expect("its length");
        file.write_all_at(bytes, offset).expect("written");
        file
    }

    fn place(offset: i64) -> u64 {
        u64::try_from(offset).unwrap_or(SIZE_BYTES - offset.unsigned_abs())
    }

    #[test]
    fn every_signature_is_found() {
        for (table, is_device) in [(SYSTEMS, false), (SYSTEMS, true), (FILES, false), (FILES, true)]
        {
            for Signature { name, offset, magic } in table {
                let file = file_with(place(*offset), magic);
                let found = held(&file, SIZE_BYTES, is_device).expect("readable");
                assert_eq!(found, Held::Known(name), "at {offset}");
            }
        }
        for (offset, name) in [
            (SIZE_BYTES - 0x1_0000, "a part of a RAID (mdraid)"),
            (SIZE_BYTES - 0x2000, "a part of a RAID (mdraid)"),
        ] {
            let found = held(&file_with(offset, &MD_MAGIC), SIZE_BYTES, true).expect("readable");
            assert_eq!(found, Held::Known(name));
        }
        let zfs = file_with(0x2_0000 + 7 * 1024, &ZFS_MAGIC.to_le_bytes());
        assert_eq!(held(&zfs, SIZE_BYTES, true).expect("readable"), Held::Known("a ZFS pool"));
    }

    #[test]
    fn data_is_told_from_nothing() {
        let look = |file: &File, size| held(file, size, false).expect("readable");
        let file = file_with(0, b"");
        assert_eq!(look(&file, SIZE_BYTES), Held::Nothing);
        assert_eq!(look(&file, 0), Held::Nothing);
        assert_eq!(look(&file_with(SIZE_BYTES - 1, b"\x01"), SIZE_BYTES), Held::Data);
        assert_eq!(held(&file_with(5000, b"\x01"), SIZE_BYTES, true).ok(), Some(Held::Nothing));
        let text = "a few words, naïve\n".repeat(1000);
        let file = file_with(0, text.as_bytes());
        assert_eq!(look(&file, text.len() as u64), Held::Known("text"));
        let noise: Vec<u8> = (0..=255).collect();
        assert_eq!(look(&file_with(0, &noise), 256), Held::Data);
        // Shorter than any signature's place.
        assert_eq!(look(&file_with(0, b"PK"), 2), Held::Known("text"));
    }
}
