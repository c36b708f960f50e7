//! Ends what fsfreeze(8) has begun: a frozen file system stays in the kernel without its mount, its device
//! with it, and whoever writes to it cannot be killed.
//!
//! Owns nothing.

use std::{fs::File, path::Path};

use rustix::{
    fs::{FileType, Mode, OFlags, fstat, open},
    ioctl::{NoArg, ioctl, opcode},
    mount::{MountFlags, UnmountFlags, mount, unmount},
};

use super::{
    look::PROC,
    processes::Process,
    seen::{Seen, is_fuse, mounts},
};

/// `FITHAW` of linux/fs.h.
const FITHAW: u32 = opcode::read_write::<libc::c_int>(b'X', 120);

/// Thaws one that was mounted on `dir`, a directory or file; says whether it was frozen.
fn thaw(dir: std::io::Result<File>) -> bool {
    // SAFETY: the call uses no argument.
    dir.is_ok_and(|dir| unsafe { ioctl(&dir, NoArg::<FITHAW>::new()) }.is_ok())
}

/// Thaws a mount of this namespace. Do not call it for FUSE, whose server may be stopped.
pub(super) fn mounted_on(dir: &Path) {
    let path = OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let node = open(dir, path, Mode::empty());
    let is_file = node.and_then(|node| fstat(&node)).is_ok_and(|stat| {
        matches!(FileType::from_raw_mode(stat.st_mode), FileType::Directory | FileType::RegularFile)
    });
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOFOLLOW;
    if is_file && thaw(open(dir, flags, Mode::empty()).map(File::from).map_err(Into::into)) {
        say!("left behind: frozen file system on {}", dir.display());
    }
}

/// Thaws what the program has mounted, also in the namespaces of its `processes`.
pub(super) fn all(seen: &Seen, processes: &[Process]) {
    for mount in mounts().iter().filter(|it| !seen.is_foreign(it) && !is_fuse(it)) {
        mounted_on(&mount.mountpoint);
    }
    for folder in seen.namespaces(processes) {
        let table = PROC.read(format!("{folder}/mountinfo")).unwrap_or_default();
        let table = fjord_block::mountinfo::parse(&table);
        for mount in table.iter().filter(|it| !seen.is_foreign(it) && !is_fuse(it)) {
            let root = Path::new(&folder).join("root");
            let dir = mount.mountpoint.strip_prefix("/").unwrap_or(&mount.mountpoint);
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NONBLOCK;
            if thaw(PROC.open(root.join(dir), flags)) {
                say!("left behind: frozen file system on {}", mount.mountpoint.display());
            }
        }
    }
}

/// Thaws the file system on a block device that is mounted nowhere any more: it can be mounted again. The
/// flag must be the one that it had. Says whether it was frozen.
pub(super) fn device(name: &str) -> bool {
    let Ok(dir) = tempfile::tempdir() else { return false };
    let node = Path::new("/dev").join(name);
    let types = PROC.text("filesystems").unwrap_or_default();
    // Those that need no device have a word before the name.
    for fs_type in types.lines().filter_map(|line| line.strip_prefix('\t')) {
        for flag in [MountFlags::RDONLY, MountFlags::empty()] {
            if fs_type.starts_with("fuse") || mount(&node, dir.path(), fs_type, flag, None).is_err()
            {
                continue;
            }
            let was_frozen = thaw(File::open(dir.path()));
            if was_frozen {
                say!("left behind: frozen file system on {name}, not mounted");
            }
            let _ = unmount(dir.path(), UnmountFlags::DETACH);
            return was_frozen;
        }
    }
    false
}
