//! Opening: type of the path, support and alignment of O_DIRECT.
//!
//! Invariant: a [`RawFile`] exists only while its locks are held; see `lock`.

use std::fs;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64};

use rustix::fs::{AtFlags, Mode, OFlags, SeekFrom, StatxFlags};
use rustix::io::Errno;

use super::raw::RawFile;
use super::room::Room;
use super::{FileOptions, lock};
use crate::buf::AlignedBuf;
use crate::device::Capabilities;
use crate::error::OpenError;

/// STATX_DIOALIGN of linux/stat.h (6.1).
const STATX_DIOALIGN: u32 = 0x2000;
/// Alignments to try if statx does not report them, in bytes.
const ALIGN_CANDIDATES: [usize; 2] = [512, 4096];
/// `f_type` of file systems on local disks and in memory, whose writes with RWF_DSYNC are known to
/// be durable when they return: ext2 to ext4, XFS, Btrfs, F2FS, bcachefs, tmpfs, ramfs.
const DSYNC_TRUSTED: [u64; 7] =
    [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010, 0xca45_1a4e, 0x0102_1994, 0x8584_58f6];
/// `f_type` of FUSE.
const FUSE_SUPER_MAGIC: u64 = 0x6573_5546;

/// Opens and locks `path`, and determines its capabilities.
pub(super) fn open(
    path: &Path,
    options: &FileOptions,
) -> Result<(RawFile, Capabilities), OpenError> {
    let os = |source: io::Error| OpenError::Os { path: path.to_owned(), source };
    let metadata = fs::metadata(path).map_err(os)?;
    let is_block_device = device_kind(path, &metadata)?;
    let access = if options.read_only { OFlags::RDONLY } else { OFlags::RDWR } | OFlags::CLOEXEC;
    let opened = rustix::io::retry_on_intr(|| rustix::fs::open(path, access, Mode::empty()));
    let buffered = match opened {
        Ok(fd) => fd,
        Err(errno) if !options.read_only => return Err(not_opened_to_write(path, errno)),
        Err(errno) => return Err(os(errno.into())),
    };
    if is_block_device && !options.read_only && is_set_read_only(metadata.rdev()) {
        let source = io::Error::from_raw_os_error(libc::EROFS);
        return Err(OpenError::WriteProtected { path: path.to_owned(), source });
    }
    let mut claim = None;
    let backing_lock = if is_block_device {
        claim = Some(lock::lock_device(path, &buffered, &metadata, options.read_only)?);
        lock::lock_backing_file(path, &metadata, options.read_only)?
    } else {
        lock::lock_file(path, &buffered, &metadata, options.read_only, options.range.as_ref())?;
        refuse_if_replaced(path, &buffered)?;
        None
    };
    // For a block device, too, the end is its size.
    let file_bytes = rustix::fs::seek(&buffered, SeekFrom::End(0)).map_err(|e| os(e.into()))?;
    let range = options.range.clone().unwrap_or(0..file_bytes);
    if range.start > range.end || range.end > file_bytes {
        return Err(OpenError::OutOfRange { path: path.to_owned(), range, file_bytes });
    }
    let size_bytes = range.end - range.start;
    let direct = if options.direct { open_direct(path, access, &buffered) } else { None };
    let (direct, direct_align, memory_align) = match direct {
        Some((fd, offset_align, memory_align)) => (Some(fd), offset_align, memory_align),
        None => (None, 512, 1),
    };
    let trusts_dsync = is_block_device || trusts_dsync(&buffered, &metadata);
    let rdev = if is_block_device { metadata.rdev() } else { metadata.dev() };
    let capabilities = Capabilities {
        // The metadata of an image file needs a flush with any disk, and so does the kernel's page
        // cache.
        volatile_cache: !is_block_device
            || direct.is_none()
            || queue_value(rdev, "write_cache").is_none_or(|value| value != "write through"),
        fua: trusts_dsync && queue_value(rdev, "fua").is_some_and(|value| value == "1"),
        native_barrier: false,
        discard: !is_block_device
            || queue_value(rdev, "discard_max_bytes").is_some_and(|value| value != "0"),
        queue_depth: 128,
        logical_block_size: u32::try_from(direct_align).unwrap_or(4096),
        read_only: options.read_only,
    };
    let file = RawFile {
        direct,
        buffered,
        claim,
        backing_lock,
        direct_align,
        memory_align,
        is_block_device,
        trusts_dsync,
        start: range.start,
        is_range: options.range.is_some(),
        size_bytes: AtomicU64::new(size_bytes),
        size_changes: Default::default(),
        room: (options.takes_room && !is_block_device && !options.read_only)
            .then(|| Room::new(size_bytes)),
        path: path.to_owned(),
        told_truncated: AtomicBool::new(false),
    };
    Ok((file, capabilities))
}

/// Fails if the path names another file than the opened one: the former holder of the lock has
/// replaced the image by a new one.
fn refuse_if_replaced(path: &Path, file: &OwnedFd) -> Result<(), OpenError> {
    let (Ok(now), Ok(opened)) = (fs::metadata(path), rustix::fs::fstat(file)) else {
        return Ok(());
    };
    // Their types differ between machines.
    #[allow(clippy::useless_conversion)]
    let is_same = now.dev() == u64::from(opened.st_dev) && now.ino() == u64::from(opened.st_ino);
    if is_same {
        return Ok(());
    }
    let by = "a program that has just replaced it".to_owned();
    Err(OpenError::InUse { path: path.to_owned(), by })
}

/// Whether the host file system makes a write with RWF_DSYNC durable before it returns. FUSE does
/// not for files with direct I/O (no FSYNC follows), a network file system may leave it to its
/// server, and an overlay may be on either: these get a separate fdatasync.
fn trusts_dsync(file: &OwnedFd, metadata: &fs::Metadata) -> bool {
    match rustix::fs::fstatfs(file).map(|found| found.f_type as u64) {
        Ok(FUSE_SUPER_MAGIC) => is_model(metadata.dev()),
        Ok(kind) => DSYNC_TRUSTED.contains(&kind),
        Err(_) => false,
    }
}

/// Whether the device number is that of a mount of `fjord sim`, which honours O_DSYNC.
fn is_model(dev: u64) -> bool {
    let number = (libc::major(dev), libc::minor(dev));
    let mounts = crate::mountinfo::mounts().unwrap_or_default();
    mounts.iter().any(|mount| (mount.dev_major, mount.dev_minor) == number && mount.is_sim())
}

/// Why a path could not be opened for writing: distinguishes write-protected from unreadable ones.
fn not_opened_to_write(path: &Path, errno: Errno) -> OpenError {
    let (path, source) = (path.to_owned(), errno.into());
    let may_be_protected = matches!(errno, Errno::ROFS | Errno::ACCESS | Errno::PERM);
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    if may_be_protected && rustix::fs::open(&path, flags, Mode::empty()).is_ok() {
        return OpenError::WriteProtected { path, source };
    }
    OpenError::Os { path, source }
}

/// Whether a block device is read-only; most such devices can still be opened for writing.
fn is_set_read_only(rdev: u64) -> bool {
    let node = format!("/sys/dev/block/{}:{}/ro", libc::major(rdev), libc::minor(rdev));
    fs::read_to_string(node).is_ok_and(|value| value.trim() == "1")
}

/// Fails unless the path is a regular file or a block device. Opens nothing: an open of a pipe
/// would block.
pub(super) fn check_kind(path: &Path) -> Result<(), OpenError> {
    let os = |source| OpenError::Os { path: path.to_owned(), source };
    device_kind(path, &fs::metadata(path).map_err(os)?).map(drop)
}

/// Whether the path is a block device (true) or a regular file (false).
fn device_kind(path: &Path, metadata: &fs::Metadata) -> Result<bool, OpenError> {
    let kind = metadata.file_type();
    let what = if kind.is_file() {
        return Ok(false);
    } else if kind.is_block_device() {
        return Ok(true);
    } else if kind.is_dir() {
        "directory"
    } else if kind.is_char_device() {
        "character device"
    } else {
        "pipe or socket"
    };
    Err(OpenError::NotADevice { path: path.to_owned(), what })
}

/// Opens the path again with O_DIRECT; returns the alignment in bytes of offsets and of memory.
/// None if direct I/O is not supported, or needs a larger alignment than that of our buffers.
fn open_direct(path: &Path, access: OFlags, buffered: &OwnedFd) -> Option<(OwnedFd, usize, usize)> {
    let direct = rustix::fs::open(path, access | OFlags::DIRECT, Mode::empty()).ok()?;
    let (a, b) = (rustix::fs::fstat(&direct).ok()?, rustix::fs::fstat(buffered).ok()?);
    if (a.st_dev, a.st_ino, a.st_rdev) != (b.st_dev, b.st_ino, b.st_rdev) {
        // The path was replaced between the two calls.
        return None;
    }
    let (offset_align, memory_align) =
        told_alignment(&direct).or_else(|| tried_alignment(&direct))?;
    (offset_align <= 4096 && memory_align <= 512).then_some((direct, offset_align, memory_align))
}

/// The direct I/O alignment that statx reports; None if it reports none; zeroes mean "not
/// supported".
fn told_alignment(fd: &OwnedFd) -> Option<(usize, usize)> {
    let flags = StatxFlags::from_bits_retain(STATX_DIOALIGN);
    let statx = rustix::fs::statx(fd.as_fd(), c"", AtFlags::EMPTY_PATH, flags).ok()?;
    if statx.stx_mask & STATX_DIOALIGN == 0 {
        return None;
    }
    let offset_align = statx.stx_dio_offset_align as usize;
    let memory_align = statx.stx_dio_mem_align as usize;
    (offset_align > 0 && memory_align > 0).then_some((offset_align.max(512), memory_align))
}

/// Finds the alignment by reading from the start.
fn tried_alignment(fd: &OwnedFd) -> Option<(usize, usize)> {
    ALIGN_CANDIDATES.into_iter().find_map(|align| {
        let mut buf = AlignedBuf::uninit(align);
        // An empty file reads 0 bytes, which also shows support.
        rustix::io::preadv(fd, &mut [IoSliceMut::new(&mut buf)], 0).ok()?;
        Some((align, 512))
    })
}

/// A value of the request queue of a disk, by device number, trimmed.
fn queue_value(dev: u64, name: &str) -> Option<String> {
    let base = format!("/sys/dev/block/{}:{}", libc::major(dev), libc::minor(dev));
    // The queue of a partition is one level up.
    let value = fs::read_to_string(format!("{base}/queue/{name}"))
        .or_else(|_| fs::read_to_string(format!("{base}/../queue/{name}")))
        .ok()?;
    Some(value.trim().to_owned())
}
