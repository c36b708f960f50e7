//! What a program may leave in the kernel besides processes: mounts, loop devices, FUSE connections.
//!
//! Owns the mount namespace of the supervisor. Invariant: only what the supervised program made is taken
//! down: mounts of the supervisor's namespace, and what [`Seen`] and [`loops`] tell to be its own.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use fjord_block::mountinfo::MountEntry;
use rustix::{
    fs::OFlags,
    mount::{MountFlags, MountPropagationFlags, UnmountFlags},
};

use super::{
    look::{self, PROC},
    loops::{self, Attached},
    processes::descendants,
    seen::{Seen, is_fuse, mounts},
    thaw,
};

/// Where the kernel lists FUSE connections.
const CONNECTIONS: &str = "/sys/fs/fuse/connections";
/// Where programs keep files in memory.
const SHM: &str = "/dev/shm";
/// Passes over the mount table that take down at least one mount.
const PASSES_MAX: usize = 1000;

/// Makes a mount namespace for this process. Without privileges there is none, and no mount either
/// that a test could leave but with fusermount3.
pub(super) fn enter_namespace() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    // SAFETY: this process has one thread, and the flag shares no more memory or descriptors.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }
        .context("cannot make a mount namespace")?;
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private).context("cannot make mounts private")?;
    if fs::read_dir(CONNECTIONS).is_ok_and(|mut dir| dir.next().is_none()) {
        // Already mounted and empty, or a kernel without it: either is fine.
        let _ = rustix::mount::mount("none", CONNECTIONS, "fusectl", MountFlags::empty(), None);
    }
    Ok(())
}

/// Mounts an empty /dev/shm for the program, as large as what is free in the one of all, so that a file there
/// is known to be its own. Not if the run needs something there, or a variable names it. Says whether it did.
fn own_shm(needed: &[PathBuf]) -> Result<bool> {
    let mut named = std::env::vars_os().map(|(_, value)| PathBuf::from(value));
    if !rustix::process::geteuid().is_root()
        || !Path::new(SHM).is_dir()
        || needed.iter().any(|path| path.starts_with(SHM))
        || named.any(|path| path.starts_with(SHM))
    {
        return Ok(false);
    }
    let room = rustix::fs::statvfs(SHM)?;
    // 0 would stand for no bound.
    let room_bytes = room.f_bavail.saturating_mul(room.f_frsize).max(room.f_frsize);
    let options = format!("mode=1777,size={room_bytes}");
    let options = std::ffi::CString::new(options)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    rustix::mount::mount("tmpfs", SHM, "tmpfs", flags, Some(options.as_c_str()))
        .context("cannot mount a /dev/shm for the program")?;
    Ok(true)
}

/// Becomes readable, with priority, when a mount of this namespace comes or goes.
pub(super) struct MountChanges(File);

impl MountChanges {
    pub(super) fn open() -> Result<MountChanges> {
        Ok(MountChanges(PROC.open("self/mountinfo", OFlags::RDONLY)?))
    }
}

impl AsFd for MountChanges {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// What was there before the program, and what it has had since.
#[derive(Debug)]
pub(super) struct Resources {
    mounts: BTreeSet<u64>,
    pub(super) scratch: PathBuf,
    loops: BTreeMap<String, Attached>,
    pub(super) seen: Seen,
}

impl Resources {
    /// Those of now; images below `scratch` will be the program's own. `program` is what will be run.
    pub(super) fn now(scratch: &Path, program: &Path) -> Result<Resources> {
        let scratch = scratch.canonicalize()?;
        let needed = [scratch.clone(), std::env::current_dir()?, program.to_owned()];
        let has_shm = own_shm(&needed)?;
        look::open()?;
        let mut seen = Seen::nothing();
        if has_shm {
            seen.add_own(Path::new(SHM));
        }
        Ok(Resources {
            mounts: mounts().iter().map(|mount| mount.mount_id).collect(),
            scratch,
            loops: loops::all(),
            seen,
        })
    }

    /// Frees processes that no signal ends: those that wait for a FUSE server among them, and those that
    /// write to a frozen file system.
    pub(super) fn free_processes(&mut self) {
        let known = loops::known(&self.loops, &self.scratch, &self.seen);
        self.seen.abort(known.into_keys());
        // Afterwards: an image may lie on a FUSE mount.
        thaw::all(&self.seen, &descendants());
    }

    /// Takes down what has come since, names it, and says whether there was something.
    pub(super) fn take_down_new(&mut self) -> bool {
        self.seen.note();
        let mut left = self.take_down_mounts();
        let own = || loops::own(&self.loops, &self.scratch, &self.seen);
        let (stay, was_frozen) = loops::await_detached(own);
        left |= was_frozen;
        for (name, attached) in &stay {
            left = true;
            say!("left behind: loop device {name} of {}", attached.image.display());
            loops::detach(name);
        }
        let own_that_stay = || {
            let mut list = own();
            list.retain(|name, _| stay.contains_key(name));
            list
        };
        if !stay.is_empty() {
            for name in loops::await_detached(own_that_stay).0.keys() {
                say!("cannot detach {name}: something uses it");
            }
        }
        left
    }

    /// Later mounts may lie on earlier ones, or hide them.
    fn take_down_mounts(&self) -> bool {
        let mut named = BTreeSet::new();
        for _ in 0..PASSES_MAX {
            let mut new = mounts();
            new.retain(|mount| !self.mounts.contains(&mount.mount_id));
            let mut errors = Vec::new();
            for mount in new.iter().rev() {
                if named.insert(mount.mount_id) {
                    let MountEntry { fs_type, mountpoint, .. } = mount;
                    say!("left behind: mount of {fs_type} on {}", mountpoint.display());
                }
                if !is_fuse(mount) && !self.seen.is_foreign(mount) {
                    thaw::mounted_on(&mount.mountpoint);
                }
                let flags = UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
                if let Err(error) = rustix::mount::unmount(&mount.mountpoint, flags) {
                    errors.push((mount, error));
                }
            }
            // With a mount go those below it.
            if errors.len() == new.len() {
                for (mount, error) in errors {
                    say!("cannot unmount {}: {error}", mount.mountpoint.display());
                }
                break;
            }
        }
        !named.is_empty()
    }
}
