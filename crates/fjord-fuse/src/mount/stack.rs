//! Which file systems lie on which. Owns no state.

use std::os::unix::fs::MetadataExt;

use super::{loop_backings, mounts};

/// Most file systems that lie on each other.
const DEPTH_MAX: usize = 16;

/// Whether the file system with device number `upper` is the one with number `lower`, or lies on it: its
/// image is there, by a loop device or as the source of a FUSE mount, or is on one that lies there. Device
/// numbers are those of stat(2). Not seen are mounts of other namespaces, overlays, and servers elsewhere.
///
/// A server that writes to a file system which lies on its own mount waits for itself, and no signal ends
/// that wait.
pub fn lies_on(upper: u64, lower: u64) -> bool {
    let mounts = mounts().unwrap_or_default();
    let loops = loop_backings();
    let mut device = upper;
    for _ in 0..DEPTH_MAX {
        if device == lower {
            return true;
        }
        let is_it =
            |mount: &&super::MountEntry| libc::makedev(mount.dev_major, mount.dev_minor) == device;
        let Some(mount) = mounts.iter().find(is_it) else { return false };
        let by_loop = loops.iter().find(|backing| backing.device == mount.source);
        let image = match by_loop {
            Some(backing) => &backing.file,
            None if mount.fs_type.starts_with("fuse") => &mount.source,
            None => return false,
        };
        // Of an image that its own mount hides, and of what is no path, there is nothing to tell.
        let Some(found) = std::fs::metadata(image).ok().filter(|found| found.is_file()) else {
            return false;
        };
        device = found.dev();
    }
    true
}
