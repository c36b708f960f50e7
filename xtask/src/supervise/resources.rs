//! What a program may leave in the kernel besides processes: mounts, loop devices, FUSE connections.
//!
//! Owns the mount namespace of the supervisor. Invariant: only what the supervised program made is taken
//! down: mounts of the supervisor's namespace, loop devices of images in its scratch folder, connections
//! of FUSE mounts that its namespace has had.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    os::fd::{AsFd, BorrowedFd},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use fjord_block::mountinfo::{self, MountEntry};
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

fn mounts() -> Vec<MountEntry> {
    // Without /proc no process is seen either.
    mountinfo::mounts().unwrap_or_default()
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
        let fuse = mounts().into_iter().filter(|mount| mount.fs_type.starts_with("fuse"));
        self.0.extend(fuse.map(|mount| connection(mount.dev_major, mount.dev_minor)));
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
fn connection(major: u32, minor: u32) -> String {
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
        Ok(Resources {
            mounts: mounts().iter().map(|mount| mount.mount_id).collect(),
            scratch,
            loops,
        })
    }

    /// Takes down what has come since, names it, and says whether there was something.
    pub(super) fn take_down_new(&self) -> bool {
        let mut left = false;
        let new = mounts().into_iter().filter(|mount| !self.mounts.contains(&mount.mount_id));
        // Later ones may lie on earlier ones.
        for mount in new.collect::<Vec<_>>().into_iter().rev() {
            left = true;
            say!("left behind: mount of {} on {}", mount.fs_type, mount.mountpoint.display());
            if let Err(error) = rustix::mount::unmount(&mount.mountpoint, UnmountFlags::DETACH) {
                say!("cannot unmount {}: {error}", mount.mountpoint.display());
            }
        }
        for (device, image) in self.loops_that_stay() {
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

impl Resources {
    /// New loop devices. One that detaches itself goes with its last user, which may be a program that
    /// looks at all block devices for a moment; none of this program runs any more.
    fn loops_that_stay(&self) -> BTreeMap<String, PathBuf> {
        let deadline = Instant::now() + LOOPS_PATIENCE;
        loop {
            let mut left = loops_below(&self.scratch);
            left.retain(|device, image| self.loops.get(device) != Some(image));
            let mut going = left.keys().map(|device| {
                let autoclear = format!("/sys/block/{device}/loop/autoclear");
                fs::read_to_string(autoclear).is_ok_and(|value| value.trim_end() == "1")
            });
            if !going.any(|is_going| is_going) || Instant::now() >= deadline {
                return left;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// How long a loop device that detaches itself may take.
const LOOPS_PATIENCE: Duration = Duration::from_secs(10);

/// Loop devices with their images, if below `dir`.
fn loops_below(dir: &Path) -> BTreeMap<String, PathBuf> {
    let devices = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let of_device = |entry: fs::DirEntry| {
        let image = fs::read_to_string(entry.path().join("loop/backing_file")).ok()?;
        // The kernel adds this to the name of a file that is removed.
        let image = image.trim_end_matches('\n').trim_end_matches(" (deleted)");
        let name = entry.file_name().into_string().ok()?;
        Path::new(image).starts_with(dir).then(|| (name, PathBuf::from(image)))
    };
    devices.filter_map(of_device).collect()
}
