//! Who uses an image: fjord or Linux, mounted where.

use std::{
    fs::{self, File},
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

use fjord_fuse::mount::{self, MountEntry};

use crate::failure::{Context, Failure, Result};

/// The mount that holds `image`, if any: of the device itself, of a loop device over the file, or a
/// fjord mount that names it as its source.
pub(crate) fn mount_of(image: &Path) -> Option<MountEntry> {
    let meta = fs::metadata(image).ok()?;
    let rdev = meta.file_type().is_block_device().then(|| meta.rdev());
    let loops: Vec<_> = mount::loop_backings()
        .into_iter()
        .filter(|b| mount::same_file(&b.file, image))
        .map(|b| b.device)
        .collect();
    mount::mounts().ok()?.into_iter().rev().find(|m| {
        let by_device = rdev.is_some_and(|rdev| rdev == libc::makedev(m.dev_major, m.dev_minor));
        by_device
            || loops.contains(&m.source)
            || m.is_fjord() && m.source.is_absolute() && mount::same_file(&m.source, image)
    })
}

/// The loop device of `image` with autoclear and without a mount in this namespace: that of a
/// detached mount.
pub(crate) fn detached_loop(image: &Path) -> Option<PathBuf> {
    let mounts = mount::mounts().ok()?;
    mount::loop_backings()
        .into_iter()
        .filter(|b| b.is_stand_in && mount::same_file(&b.file, image))
        .map(|b| b.device)
        .find(|device| mounts.iter().all(|m| m.source != *device))
}

/// Whether the process that serves a mount has died. Uses statfs(2), which always reaches the
/// server; the kernel may answer opendir without it.
pub(crate) fn is_dead(mountpoint: &Path) -> bool {
    matches!(rustix::fs::statfs(mountpoint), Err(rustix::io::Errno::NOTCONN))
}

/// What a command works on.
pub(crate) enum Found {
    /// A mount, by any directory of it.
    Mount(File),
    /// An image that is not mounted.
    Image,
}

/// The mount that a directory lies on, or on which an image is mounted; else the image.
pub(crate) fn find(source: &Path) -> Result<Found> {
    let found = fs::metadata(source).context(source.display())?;
    if found.is_dir() {
        return Ok(Found::Mount(File::open(source).context(source.display())?));
    }
    match mount_of(source).filter(MountEntry::is_fjord) {
        Some(mount) => match File::open(&mount.mountpoint) {
            Ok(dir) => Ok(Found::Mount(dir)),
            Err(error) => {
                // Says what to do about a dead one.
                check(source, true)?;
                Err(Failure::from(error).context(mount.mountpoint.display()))
            }
        },
        None => {
            check(source, true)?;
            Ok(Found::Image)
        }
    }
}

/// Fails with a message that says where, if the image is mounted.
pub(crate) fn check(image: &Path, read_only: bool) -> Result<()> {
    let Some(m) = mount_of(image) else { return Ok(()) };
    let (image, dir) = (image.display(), m.mountpoint.display());
    if m.is_fjord() {
        return Err(Failure::in_use(if is_dead(&m.mountpoint) {
            format!(
                "{image} is held by the mount on {dir}, whose fjord process has died; run `fjord \
                 umount {dir}` first"
            )
        } else {
            format!(
                "{image} is mounted by fjord on {dir}; use it there, or run `fjord umount {dir}` \
                 first"
            )
        }));
    }
    // The kernel changes a mounted image at any time; even reads would be inconsistent.
    let what = if read_only { "read it there" } else { "use it there" };
    Err(Failure::in_use(format!(
        "{image} is mounted by Linux on {dir} ({}, from {}); {what}, or run `umount {dir}` first",
        m.fs_type,
        m.source.display()
    )))
}
