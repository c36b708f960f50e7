//! A mount namespace of its own for each run, so that nothing it mounts outlives it.
//!
//! Invariant: a run has no copy of other processes' mounts of loop devices, RAM devices and FUSE: a
//! copy keeps the device busy after their unmount.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};
use fjord_block::mountinfo::{self, MountEntry};
use rustix::mount::{UnmountFlags, unmount};

/// Set in the environment of everything that runs inside, to the number of its first process.
const MARK: &str = "FJORD_XTASK_NAMESPACE";

/// Starts this program again in a private mount namespace (root only, once).
pub(crate) fn enter() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    // unshare runs this program in its own place, so that the number stays.
    let own = std::process::id().to_string();
    if let Ok(first) = std::env::var(MARK) {
        return if first == own { drop_copies() } else { Ok(()) };
    }
    let error = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "--"])
        .arg(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .env(MARK, own)
        .exec();
    Err(error).context("cannot start unshare (package util-linux)")
}

fn drop_copies() -> Result<()> {
    let needed = [std::env::current_dir()?, std::env::current_exe()?, std::env::temp_dir()];
    // Later ones may lie on earlier ones.
    for dir in copies(mountinfo::mounts()?).into_iter().rev() {
        if !needed.iter().any(|path| path.starts_with(&dir)) {
            // It may have gone with what it lay on.
            let _ = unmount(&dir, UnmountFlags::DETACH);
        }
    }
    Ok(())
}

/// Where loop devices, RAM devices and FUSE are mounted.
fn copies(mounts: Vec<MountEntry>) -> Vec<PathBuf> {
    let is_copy = |mount: &MountEntry| {
        let is_device = |prefix: &str| mount.source.to_string_lossy().starts_with(prefix);
        let is_fuse = mount.fs_type.starts_with("fuse") && mount.fs_type != "fusectl";
        is_fuse || is_device("/dev/loop") || is_device("/dev/zram")
    };
    mounts.into_iter().filter(is_copy).map(|mount| mount.mountpoint).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_devices_that_come_and_go_are_dropped() {
        let mountinfo = b"\
            22 27 0:21 / /proc rw,relatime - proc proc rw\n\
            27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
            30 27 0:30 / /sys/fs/fuse/connections rw - fusectl fusectl rw\n\
            40 27 7:0 / /tmp/a\\040b rw - ext4 /dev/loop0 rw\n\
            41 27 253:1 / /tmp/z rw - ext2 /dev/zram1 rw\n\
            42 27 253:1 / /tmp/f rw - fuseblk.fjord /dev/sdb1 rw\n";
        let dirs = copies(mountinfo::parse(mountinfo));
        assert_eq!(dirs, ["/tmp/a b", "/tmp/z", "/tmp/f"].map(PathBuf::from));
    }
}
