//! Opening: what the path is, how it is locked, whether O_DIRECT works and with what alignment.
//!
//! Invariant: a [`RawFile`] exists only while its lock is held; the lock lives on the buffered
//! descriptor and goes with it.

use std::fs;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, SeekFrom, StatxFlags};
use rustix::io::Errno;

use super::FileOptions;
use super::raw::RawFile;
use crate::buf::AlignedBuf;
use crate::device::Capabilities;
use crate::error::OpenError;

/// STATX_DIOALIGN of linux/stat.h (6.1).
const STATX_DIOALIGN: u32 = 0x2000;
/// Alignments tried where statx does not tell, in bytes.
const ALIGN_CANDIDATES: [usize; 2] = [512, 4096];
/// How long a busy block device is tried again.
const BUSY_PATIENCE: Duration = Duration::from_millis(250);

/// Opens `path`, locks it and finds out how it can be used.
pub(super) fn open(
    path: &Path,
    options: &FileOptions,
) -> Result<(RawFile, Capabilities), OpenError> {
    let os = |source: io::Error| OpenError::Os { path: path.to_owned(), source };
    let metadata = fs::metadata(path).map_err(os)?;
    let is_block_device = device_kind(path, &metadata)?;
    let access = if options.read_only { OFlags::RDONLY } else { OFlags::RDWR } | OFlags::CLOEXEC;
    let exclusive =
        if is_block_device && !options.read_only { OFlags::EXCL } else { OFlags::empty() };
    let buffered = match open_patiently(path, access | exclusive) {
        Ok(fd) => fd,
        Err(Errno::BUSY) if is_block_device => return Err(in_use(path, mount_of(path, &metadata))),
        Err(errno) => return Err(os(errno.into())),
    };
    if !is_block_device {
        lock_file(path, &buffered, &metadata, options.read_only)?;
    }
    // The end of a block device is its size as well.
    let size_bytes = rustix::fs::seek(&buffered, SeekFrom::End(0)).map_err(|e| os(e.into()))?;
    let direct = if options.direct { open_direct(path, access, &buffered) } else { None };
    let (direct, direct_align, memory_align) = match direct {
        Some((fd, offset_align, memory_align)) => (Some(fd), offset_align, memory_align),
        None => (None, 512, 1),
    };
    let rdev = if is_block_device { metadata.rdev() } else { metadata.dev() };
    let capabilities = Capabilities {
        volatile_cache: queue_value(rdev, "write_cache")
            .is_none_or(|value| value != "write through"),
        fua: queue_value(rdev, "fua").is_some_and(|value| value == "1"),
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
        direct_align,
        memory_align,
        is_block_device,
        size_bytes: AtomicU64::new(size_bytes),
    };
    Ok((file, capabilities))
}

/// Opens, and tries again for a moment when a block device is busy: a child of this process
/// between fork and exec keeps a claim that was given up already, and so do probes of udev.
fn open_patiently(path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    let deadline = Instant::now() + BUSY_PATIENCE;
    loop {
        match rustix::fs::open(path, flags, Mode::empty()) {
            Err(Errno::BUSY) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(10))
            }
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
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

fn in_use(path: &Path, by: String) -> OpenError {
    OpenError::InUse { path: path.to_owned(), by }
}

/// Locks a file against other users: writers exclude all, readers share.
fn lock_file(
    path: &Path,
    fd: &OwnedFd,
    metadata: &fs::Metadata,
    read_only: bool,
) -> Result<(), OpenError> {
    let operation = if read_only {
        FlockOperation::NonBlockingLockShared
    } else {
        FlockOperation::NonBlockingLockExclusive
    };
    match rustix::fs::flock(fd, operation) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Err(in_use(path, lock_holder(metadata))),
        // Some network file systems have no locks; the image's own mount protection is left.
        Err(Errno::NOLCK | Errno::NOSYS | Errno::OPNOTSUPP) => {
            tracing::warn!("no lock can be had on {}", path.display());
        }
        Err(errno) => return Err(OpenError::Os { path: path.to_owned(), source: errno.into() }),
    }
    match busy_loop_device(metadata) {
        Some(name) if !read_only => Err(in_use(path, format!("the kernel, as {name}"))),
        _ => Ok(()),
    }
}

/// The process that holds a flock on the file, from /proc/locks, in words.
fn lock_holder(metadata: &fs::Metadata) -> String {
    let dev = metadata.dev();
    let wanted = format!("{:02x}:{:02x}:{}", libc::major(dev), libc::minor(dev), metadata.ino());
    let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
    let pid = locks.lines().filter(|line| line.contains(" FLOCK ")).find_map(|line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        (fields.get(5) == Some(&wanted.as_str()))
            .then(|| fields.get(4).map(|pid| (*pid).to_owned()))?
    });
    match pid {
        Some(pid) if pid == std::process::id().to_string() => "this process itself".to_owned(),
        Some(pid) => {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            format!("process {pid} ({})", name.trim_end())
        }
        None => "another process".to_owned(),
    }
}

/// The mount that holds a block device, in words.
fn mount_of(path: &Path, metadata: &fs::Metadata) -> String {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let rdev = metadata.rdev();
    let wanted = format!("{}:{}", libc::major(rdev), libc::minor(rdev));
    let source = path.to_string_lossy();
    let mount = mounts.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let by_source = line.split(" - ").nth(1)?.split_ascii_whitespace().nth(1) == Some(&*source);
        (fields.get(2) == Some(&wanted.as_str()) || by_source)
            .then(|| fields.get(4).map(|dir| (*dir).to_owned()))?
    });
    mount.map_or_else(
        || "another process or the kernel".to_owned(),
        |dir| format!("the mount at {dir}"),
    )
}

/// A loop device over this file that is itself held (mounted): the kernel takes no flock for it.
fn busy_loop_device(metadata: &fs::Metadata) -> Option<String> {
    for entry in fs::read_dir("/sys/block").ok()?.flatten() {
        let backing = entry.path().join("loop/backing_file");
        let Ok(backing) = fs::read_to_string(backing) else { continue };
        let Ok(other) = fs::metadata(backing.trim_end_matches('\n')) else { continue };
        if (other.dev(), other.ino()) != (metadata.dev(), metadata.ino()) {
            continue;
        }
        let name = Path::new("/dev").join(entry.file_name());
        let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
        if let Err(Errno::BUSY) = rustix::fs::open(&name, flags, Mode::empty()) {
            return Some(name.display().to_string());
        }
    }
    None
}

/// Opens the path again with O_DIRECT; gives the alignment in bytes of offsets and of memory.
/// None where direct I/O does not work, or demands more than our buffers give.
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

/// What statx says about direct I/O. None when it does not say; zeroes mean "not possible".
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
        // An empty file reads 0 bytes, which is as good a sign.
        rustix::io::preadv(fd, &mut [IoSliceMut::new(&mut buf)], 0).ok()?;
        Some((align, 512))
    })
}

/// A value of the request queue of the disk behind a device number, trimmed.
fn queue_value(dev: u64, name: &str) -> Option<String> {
    let base = format!("/sys/dev/block/{}:{}", libc::major(dev), libc::minor(dev));
    // A partition has its queue one level up.
    let value = fs::read_to_string(format!("{base}/queue/{name}"))
        .or_else(|_| fs::read_to_string(format!("{base}/../queue/{name}")))
        .ok()?;
    Some(value.trim().to_owned())
}
