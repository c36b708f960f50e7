//! What a program may leave in the kernel besides processes: mounts, loop devices, FUSE connections.
//!
//! Owns the mount namespace of the supervisor. Invariant: only what the supervised program made is taken
//! down: mounts of the supervisor's namespace, loop devices of images in its scratch folder, connections
//! of FUSE mounts that its namespace has had.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{Read, Seek},
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};

/// Where the kernel lists FUSE connections.
const CONNECTIONS: &str = "/sys/fs/fuse/connections";

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

/// A line of mountinfo (proc(5)).
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mount {
    id: u64,
    major: u64,
    minor: u64,
    dir: PathBuf,
    kind: String,
}

fn parse(mountinfo: &str) -> Vec<Mount> {
    let of_line = |line: &str| {
        let (front, back) = line.split_once(" - ")?;
        let mut front = front.split(' ');
        let id = front.next()?.parse().ok()?;
        let (major, minor) = front.nth(1)?.split_once(':')?;
        let dir = PathBuf::from(unescape(front.nth(1)?));
        let kind = back.split(' ').next()?.to_owned();
        Some(Mount { id, major: major.parse().ok()?, minor: minor.parse().ok()?, dir, kind })
    };
    mountinfo.lines().filter_map(of_line).collect()
}

/// Blanks, tabs, newlines and backslashes of names are octal in mountinfo.
fn unescape(name: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(name.to_owned(), |name, (code, character)| name.replace(code, character))
}

fn mounts() -> Vec<Mount> {
    parse(&fs::read_to_string("/proc/self/mountinfo").unwrap_or_default())
}

/// Becomes readable, with priority, when a mount of this namespace comes or goes.
pub(super) struct MountChanges(File);

impl MountChanges {
    pub(super) fn open() -> Result<MountChanges> {
        Ok(MountChanges(File::open("/proc/self/mountinfo")?))
    }
}

impl AsFd for MountChanges {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The FUSE connections of mounts that this namespace has had, by their names in [`CONNECTIONS`].
#[derive(Debug, Default)]
pub(super) struct Connections(BTreeSet<String>);

impl Connections {
    /// Adds those of today's mounts.
    pub(super) fn note(&mut self) {
        let fuse = mounts().into_iter().filter(|mount| mount.kind.starts_with("fuse"));
        self.0.extend(fuse.map(|mount| connection(mount.major, mount.minor)));
    }

    /// Ends those that are still there: whoever waits for one gets an error. Also those of `fuseblk`
    /// mounts of loop devices of images below `scratch`: a mount that umount(2) has detached is in no
    /// list.
    pub(super) fn abort(&self, scratch: &Path) {
        let loops = loops_below(scratch).into_keys().filter_map(|name| {
            let device = fs::read_to_string(format!("/sys/block/{name}/dev")).ok()?;
            let (major, minor) = device.trim_end().split_once(':')?;
            Some(connection(major.parse().ok()?, minor.parse().ok()?))
        });
        let names: BTreeSet<String> = self.0.iter().cloned().chain(loops).collect();
        for name in names {
            let file = Path::new(CONNECTIONS).join(&name).join("abort");
            if file.exists() {
                match fs::write(&file, "1") {
                    Ok(()) => say!("aborted FUSE connection {name}"),
                    Err(error) => say!("cannot abort FUSE connection {name}: {error}"),
                }
            }
        }
    }
}

/// Name of the connection of a mount: its device number, as one number of 12 + 20 bits.
fn connection(major: u64, minor: u64) -> String {
    ((major << 20) | minor).to_string()
}

/// Mounts and loop devices at one moment.
#[derive(Debug)]
pub(super) struct Resources {
    mounts: BTreeSet<u64>,
    pub(super) scratch: PathBuf,
    loops: BTreeMap<String, PathBuf>,
}

impl Resources {
    /// Those of now; images below `scratch` are the program's own.
    pub(super) fn now(scratch: &Path) -> Result<Resources> {
        let scratch = scratch.canonicalize()?;
        let loops = loops_below(&scratch);
        Ok(Resources { mounts: mounts().iter().map(|mount| mount.id).collect(), scratch, loops })
    }

    /// Takes down what has come since, names it, and says whether there was something.
    pub(super) fn take_down_new(&self) -> bool {
        let mut left = false;
        let new = mounts().into_iter().filter(|mount| !self.mounts.contains(&mount.id));
        // Later ones may lie on earlier ones.
        for mount in new.collect::<Vec<_>>().into_iter().rev() {
            left = true;
            say!("left behind: mount of {} on {}", mount.kind, mount.dir.display());
            if let Err(error) = rustix::mount::unmount(&mount.dir, UnmountFlags::DETACH) {
                say!("cannot unmount {}: {error}", mount.dir.display());
            }
        }
        for (device, image) in loops_below(&self.scratch) {
            if self.loops.get(&device) == Some(&image) {
                continue;
            }
            left = true;
            say!("left behind: loop device {device} of {}", image.display());
            let detached = Command::new("losetup").arg("-d").arg(format!("/dev/{device}")).status();
            if !detached.is_ok_and(|status| status.success()) {
                say!("cannot detach {device}");
            }
        }
        left
    }
}

/// Loop devices with their images, if below `dir`.
fn loops_below(dir: &Path) -> BTreeMap<String, PathBuf> {
    let devices = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let of_device = |entry: fs::DirEntry| {
        let mut image = String::new();
        let mut file = File::open(entry.path().join("loop/backing_file")).ok()?;
        file.rewind().ok()?;
        file.read_to_string(&mut image).ok()?;
        // The kernel adds this to the name of a file that is removed.
        let image = image.trim_end_matches('\n').trim_end_matches(" (deleted)");
        let name = entry.file_name().into_string().ok()?;
        Path::new(image).starts_with(dir).then(|| (name, PathBuf::from(image)))
    };
    devices.filter_map(of_device).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_mountinfo_are_read() {
        let mountinfo = "\
            22 27 0:21 / /proc rw,relatime - proc proc rw\n\
            42 27 7:3 / /tmp/a\\040b rw shared:1 - fuseblk.fjord /dev/loop3 rw\n\
            nonsense\n";
        let mounts = parse(mountinfo);
        assert_eq!(mounts.len(), 2);
        assert_eq!(mounts[1].dir, Path::new("/tmp/a b"));
        assert_eq!((mounts[1].id, mounts[1].major, mounts[1].minor), (42, 7, 3));
        assert_eq!(mounts[1].kind, "fuseblk.fjord");
    }
}
