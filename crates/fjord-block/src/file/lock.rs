//! Locks against other users of an image, by any of its names.
//!
//! - a file: flock, exclusive for writers, and no loop device over it may be in use;
//! - a range of a file, such as a partition: a shared flock, and an OFD lock on the range, exclusive for
//!   writers. Readers of the whole file have a shared OFD lock on all of it, so that several partitions are
//!   in use at a time, but no writer beside a reader of the same bytes;
//! - a block device: for writers O_EXCL, which excludes mounts and all other programs that claim it
//!   ([`Claim`]), and for all users an open file description lock (OFD), which excludes other
//!   instances of fjord, also while the claim is passed to a mount. Not flock, because udev takes
//!   it for its probes and does not probe a device that another process has locked so;
//! - a loop device: the same, and the flock on the file behind it.
//!
//! Invariant: a lock is on a descriptor that the [`super::raw::RawFile`] owns, and is released with
//! it.

use std::fs;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use crate::error::OpenError;
use crate::lock::{Mutex, Rank};

/// How long a busy block device is retried: a child of this process between fork and exec still
/// holds released locks, and so do an ending process and probes of udev.
const BUSY_PATIENCE: Duration = Duration::from_millis(250);

fn in_use(path: &Path, by: String) -> OpenError {
    OpenError::InUse { path: path.to_owned(), by }
}

/// Locks a file against other users: writers exclude all, readers share.
pub(super) fn lock_file(
    path: &Path,
    fd: &OwnedFd,
    metadata: &fs::Metadata,
    read_only: bool,
    range: Option<&Range<u64>>,
) -> Result<(), OpenError> {
    lock_shared(path, fd, metadata, read_only, range)?;
    match range {
        _ if read_only => Ok(()),
        Some(range) => refuse_if_served(path, metadata, range, None),
        None => refuse_if_served(path, metadata, &(0..u64::MAX), None),
    }
}

/// The locks against other instances of fjord.
fn lock_shared(
    path: &Path,
    fd: &OwnedFd,
    metadata: &fs::Metadata,
    read_only: bool,
    range: Option<&Range<u64>>,
) -> Result<(), OpenError> {
    take_lock(path, fd, metadata, read_only || range.is_some())?;
    if read_only || range.is_some() {
        match patiently(|| lock_range(fd, range, read_only)) {
            Ok(()) => {}
            Err(Errno::AGAIN | Errno::ACCESS) => {
                return Err(in_use(path, "another process that has these bytes of it open".into()));
            }
            // As for flock.
            Err(errno) => {
                tracing::warn!("no lock on a range of {}: {errno}", path.display());
            }
        }
    }
    Ok(())
}

/// The claim of a block device (O_EXCL). Readers have none.
#[derive(Debug)]
pub(super) struct Claim {
    /// The path as given, for messages.
    path: PathBuf,
    read_only: bool,
    /// A descriptor for the claim alone.
    held: Mutex<Option<OwnedFd>>,
}

impl Claim {
    /// Claims the device that `device` is a descriptor of.
    pub(super) fn take(&self, device: &OwnedFd) -> Result<(), OpenError> {
        let mut held = self.held.lock();
        if self.read_only || held.is_some() {
            return Ok(());
        }
        // Not by its path, which may name another device by now.
        let node = format!("/proc/self/fd/{}", device.as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
        let os = |source| OpenError::Os { path: self.path.clone(), source };
        match patiently(|| rustix::fs::open(&node, flags, Mode::empty())) {
            Ok(fd) => *held = Some(fd),
            Err(Errno::BUSY) => {
                let metadata = fs::metadata(&node).map_err(os)?;
                return Err(held_device(&self.path, &metadata, "another process or the kernel"));
            }
            Err(errno) => return Err(os(errno.into())),
        }
        Ok(())
    }

    /// Releases the claim.
    pub(super) fn give_up(&self) {
        self.held.lock().take();
    }
}

/// Locks a block device against other instances of fjord, and claims it for a writer.
pub(super) fn lock_device(
    path: &Path,
    fd: &OwnedFd,
    metadata: &fs::Metadata,
    read_only: bool,
) -> Result<Claim, OpenError> {
    let claim = Claim { path: path.to_owned(), read_only, held: Mutex::new(Rank::ImageLock, None) };
    // First, so that the claim does not block another instance that passes its own to a mount.
    match patiently(|| lock_description(fd, read_only)) {
        Ok(()) => {}
        Err(Errno::AGAIN | Errno::ACCESS) => {
            return Err(held_device(path, metadata, "another process that has it open with fjord"));
        }
        Err(errno) => {
            return Err(OpenError::Os { path: path.to_owned(), source: errno.into() });
        }
    }
    claim.take(fd)?;
    Ok(claim)
}

/// The error for a block device that is held by a mount, or else by `else_by`.
fn held_device(path: &Path, metadata: &fs::Metadata, else_by: &str) -> OpenError {
    in_use(path, mount_of(path, metadata).unwrap_or_else(|| else_by.to_owned()))
}

/// Locks the open file description: writers exclude all, readers share.
fn lock_description(fd: &OwnedFd, read_only: bool) -> Result<(), Errno> {
    let kind = if read_only { libc::F_RDLCK } else { libc::F_WRLCK };
    set_ofd_lock(fd, kind, &(0..u64::MAX))
}

/// The first byte that locks of ranges cover: QEMU has locks with a meaning of their own on bytes before.
const FIRST_LOCKED: u64 = 512;

/// Locks a range of a file, or all of it, for this open file description: writers exclude all, readers share.
///
/// # Errors
/// `AGAIN` or `ACCESS` if another has it; others where the file system has no such locks.
pub(super) fn lock_range(
    file: impl AsFd,
    range: Option<&Range<u64>>,
    read_only: bool,
) -> Result<(), Errno> {
    let kind = if read_only { libc::F_RDLCK } else { libc::F_WRLCK };
    let range = range.cloned().unwrap_or(0..u64::MAX);
    set_ofd_lock(file, kind, &(range.start.max(FIRST_LOCKED)..range.end))
}

/// Releases the locks of [`lock_range`].
pub(super) fn unlock_range(file: impl AsFd) {
    // Fails if locks are not supported.
    let _ = set_ofd_lock(file, libc::F_UNLCK, &(0..u64::MAX));
}

fn set_ofd_lock(file: impl AsFd, kind: libc::c_int, range: &Range<u64>) -> Result<(), Errno> {
    let offset = |value: u64| libc::off_t::try_from(value).map_err(|_| Errno::OVERFLOW);
    let lock = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: offset(range.start)?,
        // 0: to the end, wherever that is.
        l_len: if range.end == u64::MAX {
            0
        } else {
            offset(range.end.saturating_sub(range.start))?
        },
        l_pid: 0,
    };
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: the call reads one `flock` through a pointer that is valid for its time.
    let rc = unsafe { libc::fcntl(fd, libc::F_OFD_SETLK, &raw const lock) };
    let error = || std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    if rc == 0 { Ok(()) } else { Err(Errno::from_raw_os_error(error())) }
}

/// Whether another has an image file locked, or a range of it, against a reader.
pub(super) fn is_locked(file: &fs::File, range: Option<&Range<u64>>) -> bool {
    // Locks of this description: gone when the caller closes the file.
    rustix::fs::flock(file, FlockOperation::NonBlockingLockShared) == Err(Errno::WOULDBLOCK)
        || matches!(lock_range(file, range, true), Err(Errno::AGAIN | Errno::ACCESS))
}

/// Locks a file, or a range of it, as [`super::FileDevice`] does. `false` if another has it.
pub(super) fn lock_as_user(file: &fs::File, range: Option<&Range<u64>>, read_only: bool) -> bool {
    let operation = match read_only || range.is_some() {
        true => FlockOperation::NonBlockingLockShared,
        false => FlockOperation::NonBlockingLockExclusive,
    };
    // Some network file systems have no locks; fjord then works without.
    if rustix::fs::flock(file, operation) == Err(Errno::WOULDBLOCK) {
        return false;
    }
    let wants_range = read_only || range.is_some();
    !(wants_range
        && matches!(lock_range(file, range, read_only), Err(Errno::AGAIN | Errno::ACCESS)))
}

/// Tries again for a moment while the device is busy.
fn patiently<T>(attempt: impl Fn() -> Result<T, Errno>) -> Result<T, Errno> {
    let deadline = Instant::now() + BUSY_PATIENCE;
    loop {
        match attempt() {
            Err(Errno::BUSY | Errno::AGAIN | Errno::ACCESS) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}

/// If `path` is a loop device, locks its backing file, or the range of it, as [`lock_file`] would, so that
/// one image is not opened by two names.
pub(super) fn lock_backing_file(
    path: &Path,
    metadata: &fs::Metadata,
    read_only: bool,
) -> Result<Option<OwnedFd>, OpenError> {
    let rdev = metadata.rdev();
    let node = format!("/sys/dev/block/{}:{}", libc::major(rdev), libc::minor(rdev));
    let Some(LoopPart { file, range }) = loop_part(Path::new(&node)) else { return Ok(None) };
    let Ok(backing) = fs::metadata(&file) else {
        // Deleted, or in another mount namespace: no path leads to it.
        return Ok(None);
    };
    if !read_only {
        refuse_if_served(path, &backing, &range, Some(rdev))?;
    }
    if !backing.is_file() {
        return Ok(None);
    }
    let os = |errno: Errno| OpenError::Os { path: file.clone(), source: errno.into() };
    let range = Some(range).filter(|range| *range != (0..u64::MAX));
    // An exclusive lock of a range needs a descriptor for writing.
    let access = if read_only || range.is_none() { OFlags::RDONLY } else { OFlags::RDWR };
    let fd = rustix::fs::open(&file, access | OFlags::CLOEXEC, Mode::empty()).map_err(os)?;
    lock_shared(path, &fd, &backing, read_only, range.as_ref())?;
    Ok(Some(fd))
}

/// An error if a loop device other than `own` over an overlapping part of the file is held, for
/// example by a mount.
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

/// The backing range of a loop device.
struct LoopPart {
    file: PathBuf,
    /// In bytes of the file; unbounded without a size limit.
    range: Range<u64>,
}

/// The backing range of the loop device at `node` in /sys; `None` for other devices and free loop
/// devices.
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
        // Some network file systems have no locks; only the image's multiple mount protection
        // remains.
        Err(Errno::NOLCK | Errno::NOSYS | Errno::OPNOTSUPP) => {
            tracing::warn!("locks are not supported on the file system of {}", path.display());
        }
        Err(errno) => return Err(OpenError::Os { path: path.to_owned(), source: errno.into() }),
    }
    Ok(())
}

/// How often a lock is looked for in /proc/locks.
const LOCK_TABLE_LOOKS: usize = 8;

/// Description of the process that holds a flock on the file, from /proc/locks.
fn lock_holder(metadata: &fs::Metadata) -> String {
    let dev = metadata.dev();
    let wanted = format!("{:02x}:{:02x}:{}", libc::major(dev), libc::minor(dev), metadata.ino());
    let pid = || {
        let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
        locks.lines().filter(|line| line.contains(" FLOCK ")).find_map(|line| {
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            (fields.get(5) == Some(&wanted.as_str()))
                .then(|| fields.get(4).map(|pid| (*pid).to_owned()))?
        })
    };
    // The kernel tells them page by page, and passes one over if another is released in between.
    match (0..LOCK_TABLE_LOOKS).find_map(|_| pid()) {
        Some(pid) if pid == std::process::id().to_string() => "this process itself".to_owned(),
        Some(pid) => {
            match fs::read_to_string(format!("/proc/{pid}/comm")) {
                Ok(name) => format!("process {pid} ({})", name.trim_end()),
                // Its children have the lock with its descriptor.
                Err(_) => format!("a process that has it from process {pid}, which has ended"),
            }
        }
        None => "another process".to_owned(),
    }
}

/// Description of the mount that holds a block device.
fn mount_of(path: &Path, metadata: &fs::Metadata) -> Option<String> {
    let rdev = metadata.rdev();
    let number = (libc::major(rdev), libc::minor(rdev));
    let mounts = crate::mountinfo::mounts().unwrap_or_default();
    let mount = mounts
        .into_iter()
        .find(|mount| (mount.dev_major, mount.dev_minor) == number || mount.source == path)?;
    Some(format!("the mount at {}", mount.mountpoint.display()))
}

/// A loop device over a part of this file that overlaps `range` and is in use (mounted): the kernel
/// takes no flock for it. `own` is ignored.
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
