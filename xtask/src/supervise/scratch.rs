//! The end of the scratch folder.
//!
//! Invariant: nothing is removed but what lies in the folder: no link is followed and no mount entered.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::Path,
};

use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};

use super::seen::mounts;

/// Names that are printed of what was in the way.
const NAMED_MAX: usize = 5;

/// Removes the folder; names what was in the way, and says whether there was something. Files that must not
/// be changed (chattr(1)) are in the way, and removed.
pub(super) fn remove(dir: &Path) -> bool {
    if fs::symlink_metadata(dir).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
        return false;
    }
    let within = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    let mut mounted = mounts();
    mounted.retain(|mount| mount.mountpoint.starts_with(&within));
    for mount in &mounted {
        say!("cannot remove {}: {} is mounted", dir.display(), mount.mountpoint.display());
    }
    if !mounted.is_empty() {
        return true;
    }
    match fs::remove_dir_all(dir) {
        Ok(()) => return false,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => say!("cannot remove {} at once: {error}", dir.display()),
    }
    let mut removal = Removal::default();
    if let Ok(found) = fs::symlink_metadata(dir) {
        removal.remove(dir, found.dev());
    }
    if removal.in_the_way > NAMED_MAX {
        say!("left behind: {} more such files", removal.in_the_way - NAMED_MAX);
    }
    removal.in_the_way > 0 || fs::symlink_metadata(dir).is_ok()
}

#[derive(Default)]
struct Removal {
    in_the_way: usize,
}

impl Removal {
    /// Removes `path` and all below it that lies on the same device.
    fn remove(&mut self, path: &Path, device: u64) {
        let Ok(found) = fs::symlink_metadata(path) else { return };
        let before = self.in_the_way;
        let is_dir = found.is_dir();
        if (is_dir || found.is_file()) && make_changeable(path) {
            self.name(path, "chattr(1) has made it unchangeable");
        }
        if is_dir && found.dev() == device {
            for entry in fs::read_dir(path).into_iter().flatten().flatten() {
                self.remove(&entry.path(), device);
            }
        }
        let removed = if is_dir { fs::remove_dir(path) } else { fs::remove_file(path) };
        // A folder stays with what is in it, which has been named.
        if let Err(error) = removed
            && (!is_dir || self.in_the_way == before)
        {
            self.name(path, &error.to_string());
        }
    }

    fn name(&mut self, path: &Path, why: &str) {
        self.in_the_way += 1;
        if self.in_the_way <= NAMED_MAX {
            say!("left behind: {}: {why}", path.display());
        }
    }
}

/// Takes the flags off a file that forbid to remove it; says whether there were some.
fn make_changeable(path: &Path) -> bool {
    let mut options = File::options();
    let file = options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path);
    let Ok(file) = file else { return false };
    let Ok(flags) = ioctl_getflags(&file) else { return false };
    let fixed = IFlags::IMMUTABLE | IFlags::APPEND;
    flags.intersects(fixed) && ioctl_setflags(&file, flags - fixed).is_ok()
}
