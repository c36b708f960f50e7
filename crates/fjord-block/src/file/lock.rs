//! Locks against other users of an image, whatever name they have for it.
//!
//! - a file: flock, exclusive for writers, and no loop device over it may be held;
//! - a block device: O_EXCL, taken where it is opened, which excludes mounts;
//! - a loop device: both, on the device and on the file behind it.
//!
//! Invariant: a lock lives on a descriptor that the [`super::raw::RawFile`] owns and goes with it.

use std::fs;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use crate::error::OpenError;

fn in_use(path: &Path, by: String) -> OpenError {
    OpenError::InUse { path: path.to_owned(), by }
}

/// Locks a file against other users: writers exclude all, readers share.
pub(super) fn lock_file(
    path: &Path,
    fd: &OwnedFd,
    metadata: &fs::Metadata,
    read_only: bool,
) -> Result<(), OpenError> {
    take_lock(path, fd, metadata, read_only)?;
    if read_only { Ok(()) } else { refuse_if_served(path, metadata, &(0..u64::MAX), None) }
}

/// The error for a block device that somebody holds.
pub(super) fn held_device(path: &Path, metadata: &fs::Metadata) -> OpenError {
    in_use(path, mount_of(path, metadata))
}

/// Where `path` is a loop device, locks the file behind it as [`lock_file`] would, so that one
/// image is not opened by two names. A loop device over a part of a file takes no lock: other
/// parts may be in use by others.
pub(super) fn lock_backing_file(
    path: &Path,
    metadata: &fs::Metadata,
    read_only: bool,
) -> Result<Option<OwnedFd>, OpenError> {
    let rdev = metadata.rdev();
    let node = format!("/sys/dev/block/{}:{}", libc::major(rdev), libc::minor(rdev));
    let Some(LoopPart { file, range }) = loop_part(Path::new(&node)) else { return Ok(None) };
    let Ok(backing) = fs::metadata(&file) else {
        // Deleted, or of another mount name space: nobody else can name it.
        return Ok(None);
    };
    if !read_only {
        refuse_if_served(path, &backing, &range, Some(rdev))?;
    }
    if range != (0..u64::MAX) || !backing.is_file() {
        return Ok(None);
    }
    let os = |errno: Errno| OpenError::Os { path: file.clone(), source: errno.into() };
    let fd =
        rustix::fs::open(&file, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(os)?;
    take_lock(path, &fd, &backing, read_only)?;
    Ok(Some(fd))
}

/// An error if a loop device over an overlapping part of the file is held, as a mount does, by
/// somebody else than `own`.
fn refuse_if_served(
    path: &Path,
    file: &fs::Metadata,
    range: &Range<u64>,
    own: Option<u64>,
) -> Result<(), OpenError> {
    match busy_loop_device(file, range, own) {
        Some(name) => Err(in_use(path, format!("the kernel, as {name}"))),
        None => Ok(()),
    }
}

/// What a loop device shows.
struct LoopPart {
    file: PathBuf,
    /// In bytes of the file; to the end of everything when there is no limit.
    range: Range<u64>,
}

/// What the loop device at `node` in /sys shows; `None` for other devices and free loop devices.
fn loop_part(node: &Path) -> Option<LoopPart> {
    let value = |name: &str| fs::read_to_string(node.join("loop").join(name)).ok();
    let number = |name| value(name).and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(0);
    let file = PathBuf::from(value("backing_file")?.trim_end_matches('\n'));
    let (start, len) = (number("offset"), number("sizelimit"));
    let end = if len == 0 { u64::MAX } else { start.saturating_add(len) };
    Some(LoopPart { file, range: start..end })
}

/// The flock itself.
fn take_lock(
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
    Ok(())
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

/// A loop device over a part of this file that touches `range`, and that is itself held
/// (mounted): the kernel takes no flock for it. `own` is one not to look at.
fn busy_loop_device(
    metadata: &fs::Metadata,
    range: &Range<u64>,
    own: Option<u64>,
) -> Option<String> {
    for entry in fs::read_dir("/sys/block").ok()?.flatten() {
        let Some(part) = loop_part(&entry.path()) else { continue };
        let Ok(other) = fs::metadata(&part.file) else { continue };
        let overlaps = part.range.start < range.end && range.start < part.range.end;
        if !overlaps || (other.dev(), other.ino()) != (metadata.dev(), metadata.ino()) {
            continue;
        }
        let name = Path::new("/dev").join(entry.file_name());
        if own.is_some() && fs::metadata(&name).is_ok_and(|node| Some(node.rdev()) == own) {
            continue;
        }
        let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
        if let Err(Errno::BUSY) = rustix::fs::open(&name, flags, Mode::empty()) {
            return Some(name.display().to_string());
        }
    }
    None
}
