//! Mounting: type, source, options; unmounting.
//!
//! As root fjord mounts `fuseblk`, whose source must be a block device without another claim. A
//! block device is its own source: the engine passes its claim to the mount ([`Fs::hand_over`]).
//! For an image file the source is a loop device over it, for an image on a cluster one over a file in memory that
//! nobody reads. Only with `fuseblk` do sync(2) and
//! syncfs(2) reach the server and does umount(2) wait for it. If it is not supported, fjord mounts
//! plain `fuse`, and [`Mounted::lost`] describes the difference. Users without privileges mount
//! with `fusermount3`.

use std::{
    fs, io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::FileTypeExt,
    },
    path::{Path, PathBuf},
    sync::Arc,
};

use fjord::{Error, Fs, ImageName};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::mount::MountFlags;
use thiserror::Error;

use crate::child;
use crate::transport::DevFuse;

mod fusermount;
mod loopdev;
mod options;
mod stack;
mod unmount;

pub use fjord_block::mountinfo::{MountEntry, mount_at, mounts};
use loopdev::same_device;
pub use loopdev::{
    LoopBacking, LoopDevice, is_stand_in_for, loop_backings, same_file, stood_in_for,
};
pub use options::{FuseOptions, MountKind, OptionError, Unclaimed};
pub use stack::lies_on;
pub use unmount::{MountHandle, unmount_dir};

/// Limitations of plain `fuse`.
const LOST_WITHOUT_FUSEBLK: &str = "sync(2) and syncfs(2) do not reach fjord (fsync does), and \
     umount(8) returns before the image is clean: use `fjord umount`, which waits";

/// Errors of mount and unmount; the messages say what to do.
#[derive(Debug, Error)]
pub enum MountError {
    /// No /dev/fuse.
    #[error(
        "/dev/fuse is missing: load the module (modprobe fuse), or, in a container, pass the device in (--device /dev/fuse)"
    )]
    NoDevFuse,
    /// /dev/fuse cannot be opened, or mounting is not allowed.
    #[error("no permission to mount: {what}")]
    Permission {
        /// What was refused, and what to do.
        what: String,
    },
    /// The mount point does not exist.
    #[error("mount point {0} does not exist: create it with mkdir")]
    NoMountpoint(PathBuf),
    /// The mount point is a file.
    #[error("mount point {0} is not a directory")]
    NotADirectory(PathBuf),
    /// Something is mounted there.
    #[error(
        "mount point {dir} is busy: {what} is mounted there; unmount it first (fjord umount {dir}) \
         or use another directory"
    )]
    AlreadyMounted {
        /// The directory.
        dir: PathBuf,
        /// What is mounted on it.
        what: String,
    },
    /// A daemon died and left its mount behind.
    #[error(
        "mount point {0} has the mount of a process that has died; unmount it first (fjord umount \
         {0})"
    )]
    Dead(PathBuf),
    /// Nothing is mounted there.
    #[error("nothing is mounted on {0}")]
    NotMounted(PathBuf),
    /// Programs use the mount.
    #[error(
        "{0} is in use: close the files and leave the directories on it (fuser -vm {0} lists the \
         processes), then try again"
    )]
    Busy(PathBuf),
    /// No process can be started that waits for the unmount.
    #[error(
        "{0} is still mounted: no process can be started for the unmount (a limit of processes, \
         such as TasksMax=, or no memory); try again, or run `fjord umount {0}` elsewhere"
    )]
    NoProcess(PathBuf),
    /// The file system failed while its device was passed to the mount, or another process claimed
    /// the device meanwhile. It writes nothing more.
    #[error(transparent)]
    Engine(Error),
    /// fusermount3 is not installed.
    #[error("mounting without root needs fusermount3: install the package fuse3, or mount as root")]
    NoFusermount,
    /// fusermount3 refused.
    #[error("fusermount3 refused: {0}")]
    Fusermount(String),
    /// Any other failure.
    #[error("cannot {doing}: {source}")]
    Io {
        /// What was being done.
        doing: String,
        /// What the kernel said.
        source: io::Error,
    },
}

impl MountError {
    fn io(doing: impl Into<String>, source: impl Into<io::Error>) -> MountError {
        MountError::Io { doing: doing.into(), source: source.into() }
    }
}

/// A mount that is not served yet.
#[derive(Debug)]
pub struct Mounted {
    transport: Arc<DevFuse>,
    handle: MountHandle,
    lost: Option<String>,
    is_fuseblk: bool,
}

impl Mounted {
    /// The connection to serve.
    pub fn transport(&self) -> Arc<DevFuse> {
        Arc::clone(&self.transport)
    }

    /// A handle to take the mount down with, from any thread.
    pub fn handle(&self) -> MountHandle {
        self.handle.clone()
    }

    /// Whether it is a `fuseblk` mount.
    pub fn is_fuseblk(&self) -> bool {
        self.is_fuseblk
    }

    /// Limitations of this mount compared with `fuseblk`, and why; `None` without any.
    pub fn lost(&self) -> Option<&str> {
        self.lost.as_deref()
    }

    /// Raises the kernel's readahead to `len` bytes, where permissions allow. Call after INIT.
    pub fn set_readahead(&self, len: u32) {
        let Ok(Some(entry)) = mount_at(&self.handle.mountpoint) else { return };
        let suffix = if self.is_fuseblk { "-fuseblk" } else { "" };
        let bdi = format!("/sys/class/bdi/{}:{}{suffix}", entry.dev_major, entry.dev_minor);
        // Affects only speed; permitted to root only.
        let _ = fs::write(format!("{bdi}/read_ahead_kb"), (len / 1024).to_string());
    }
}

/// Mounts `image` on `mountpoint`. `holder` is the file system that was opened from it, if one was.
/// The caller must serve [`Mounted::transport`] at once: any access to the mount point waits for
/// it.
///
/// # Errors
/// See [`MountError`]; nothing stays mounted.
pub fn mount(
    image: &Path,
    mountpoint: &Path,
    options: &FuseOptions,
    block_size: u32,
    holder: Option<&Fs>,
) -> Result<Mounted, MountError> {
    let mountpoint = check_mountpoint(mountpoint)?;
    check_dev_fuse()?;
    if !rustix::process::geteuid().is_root() {
        if options.kind == MountKind::Fuseblk {
            return Err(MountError::Permission { what: "a fuseblk mount needs root".into() });
        }
        let transport = mount_unprivileged("fjord", &fsname(image, options), &mountpoint, options)?;
        let lost = format!("no fuseblk mount (it needs root): {LOST_WITHOUT_FUSEBLK}");
        return finish(transport, mountpoint, Some(lost), false);
    }
    let mut why_not = String::from("requested by the option nofuseblk");
    if options.kind != MountKind::Fuse {
        match mount_fuseblk(image, &mountpoint, options, block_size, holder) {
            Ok(transport) => return finish(transport, mountpoint, None, true),
            Err(e @ MountError::Engine(_)) => return Err(e),
            Err(e) if options.kind == MountKind::Fuseblk => return Err(e),
            Err(e) => why_not = e.to_string(),
        }
    }
    let fsname = fsname(image, options);
    let transport = mount_directly("fuse.fjord", &fsname, &mountpoint, options, String::new())?;
    finish(
        transport,
        mountpoint,
        Some(format!("no fuseblk mount ({why_not}): {LOST_WITHOUT_FUSEBLK}")),
        false,
    )
}

/// Mounts something other than an image, as type `fuse.SUBTYPE` with `source` as its source. Served
/// as [`mount`] is.
///
/// # Errors
/// See [`MountError`]; nothing stays mounted.
pub fn mount_plain(
    subtype: &str,
    source: &str,
    mountpoint: &Path,
    options: &FuseOptions,
) -> Result<Mounted, MountError> {
    let mountpoint = check_mountpoint(mountpoint)?;
    check_dev_fuse()?;
    let transport = if rustix::process::geteuid().is_root() {
        let fs_type = format!("fuse.{subtype}");
        mount_directly(&fs_type, source, &mountpoint, options, String::new())?
    } else {
        mount_unprivileged(subtype, source, &mountpoint, options)?
    };
    finish(transport, mountpoint, None, false)
}

fn finish(
    transport: DevFuse,
    mountpoint: PathBuf,
    lost: Option<String>,
    is_fuseblk: bool,
) -> Result<Mounted, MountError> {
    let entry = mount_at(&mountpoint)
        .map_err(|e| MountError::io("read /proc/self/mountinfo", e))?
        .ok_or_else(|| MountError::NotMounted(mountpoint.clone()))?;
    transport.set_connection(libc::makedev(entry.dev_major, entry.dev_minor));
    let transport = Arc::new(transport);
    let handle = MountHandle { mountpoint, transport: Arc::clone(&transport), entry };
    Ok(Mounted { transport, handle, lost, is_fuseblk })
}

/// The mount point as the kernel will name it, if something can be mounted there.
///
/// # Errors
/// Missing, not a directory, a mount already, or left by a dead server.
pub fn check_mountpoint(dir: &Path) -> Result<PathBuf, MountError> {
    let failed = |e: io::Error| match e.raw_os_error() {
        Some(libc::ENOENT) => MountError::NoMountpoint(dir.to_owned()),
        Some(libc::ENOTDIR) => MountError::NotADirectory(dir.to_owned()),
        Some(libc::ENOTCONN | libc::ECONNABORTED) => MountError::Dead(dir.to_owned()),
        Some(libc::EACCES) => {
            MountError::Permission { what: format!("{} cannot be reached", dir.display()) }
        }
        _ => MountError::io(format!("look at {}", dir.display()), e),
    };
    let dir = fs::canonicalize(dir).map_err(failed)?;
    let found = mount_at(&dir).map_err(|e| MountError::io("read /proc/self/mountinfo", e))?;
    if let Err(e) = fs::read_dir(&dir)
        && e.raw_os_error() != Some(libc::EACCES)
    {
        return Err(failed(e));
    }
    match found {
        // The kernel may have answered from its cache.
        Some(m) if m.is_fjord() && is_dead(&dir) => Err(MountError::Dead(dir)),
        Some(m) if dir != Path::new("/") => Err(MountError::AlreadyMounted {
            what: format!("{} ({})", m.source.display(), m.fs_type),
            dir,
        }),
        _ => Ok(dir),
    }
}

fn check_dev_fuse() -> Result<(), MountError> {
    match fs::metadata(crate::transport::DEV_FUSE) {
        Ok(_) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(MountError::NoDevFuse),
        Err(e) => Err(MountError::io("look at /dev/fuse", e)),
    }
}

fn open_dev_fuse() -> Result<DevFuse, MountError> {
    DevFuse::open().map_err(|e| match e.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => MountError::NoDevFuse,
        Some(libc::EACCES | libc::EPERM) => MountError::Permission {
            what: "/dev/fuse cannot be opened; join its group, or mount as root".into(),
        },
        _ => MountError::io("open /dev/fuse", e),
    })
}

fn fsname(image: &Path, options: &FuseOptions) -> String {
    options.fsname.clone().unwrap_or_else(|| image.display().to_string())
}

fn mount_fuseblk(
    image: &Path,
    mountpoint: &Path,
    options: &FuseOptions,
    block_size: u32,
    holder: Option<&Fs>,
) -> Result<DevFuse, MountError> {
    let mount_from = |source: &Path| {
        warn_of_fsname(source, options);
        // Smaller ones than the device's own are refused.
        let least = sector_size(source).unwrap_or(512);
        let blksize = options.blksize.unwrap_or(block_size).clamp(512, 4096).max(least);
        let extra = format!(",blksize={blksize}");
        let source = source.display().to_string();
        let transport = mount_directly("fuseblk.fjord", &source, mountpoint, options, extra)?;
        check_connected(&transport, mountpoint)?;
        Ok(transport)
    };
    let name = ImageName::parse(image);
    if name.is_remote() {
        // Held until the mount holds the loop device itself.
        let device = LoopDevice::attach_stand_in(image, options.read_only())
            .map_err(|e| MountError::io("attach a loop device", e))?;
        return mount_from(device.path());
    }
    let range = name.range().map_err(MountError::Engine)?;
    if range.is_none() && fs::metadata(image).is_ok_and(|m| m.file_type().is_block_device()) {
        let device = device_name(image);
        return match holder {
            Some(fs) => {
                fs.hand_over(|| mount_from(&device)).unwrap_or_else(|e| Err(MountError::Engine(e)))
            }
            None => mount_from(&device),
        };
    }
    // Held until the mount holds the loop device itself.
    let device = LoopDevice::attach(name.path(), range.as_ref(), options.read_only())
        .map_err(|e| MountError::io("attach a loop device", e))?;
    mount_from(device.path())
}

/// The logical block size of a device, in bytes.
fn sector_size(device: &Path) -> Option<u32> {
    rustix::fs::ioctl_blksszget(fs::File::open(device).ok()?).ok()
}

/// The name that findmnt(8), umount(8) and fstab know a block device by: no symbolic link, except
/// that of the device mapper, whose own names change.
fn device_name(device: &Path) -> PathBuf {
    let Ok(node) = fs::canonicalize(device) else { return device.to_owned() };
    let Some(dm) = node.file_name().filter(|name| name.as_encoded_bytes().starts_with(b"dm-"))
    else {
        return node;
    };
    let name = fs::read_to_string(Path::new("/sys/class/block").join(dm).join("dm/name"));
    let mapped = name.map(|name| Path::new("/dev/mapper").join(name.trim_end()));
    mapped.ok().filter(|mapped| same_device(mapped, &node)).unwrap_or(node)
}

/// The kernel has no other name for a `fuseblk` mount than its device.
fn warn_of_fsname(source: &Path, options: &FuseOptions) {
    if let Some(name) = options.fsname.as_deref().filter(|name| Path::new(name) != source) {
        tracing::warn!(
            "fsname={name} is not shown: the source of a fuseblk mount is its block device, {}; \
             -o nofuseblk shows the name, but {LOST_WITHOUT_FUSEBLK}",
            source.display()
        );
    }
}

/// For a device that is mounted already with `fuseblk` (by way of another device node, or while
/// it is open read-only) the kernel shows that mount once more, and leaves our connection unused.
fn check_connected(transport: &DevFuse, mountpoint: &Path) -> Result<(), MountError> {
    let fd = transport.fd().map_err(|e| MountError::io("open /dev/fuse", e))?;
    let mut polled = [PollFd::new(&*fd, PollFlags::IN)];
    let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polled, Some(&now)).map_err(|e| MountError::io("look at /dev/fuse", e))?;
    if !polled[0].revents().contains(PollFlags::ERR) {
        return Ok(());
    }
    unmount_dir(mountpoint, true)?;
    Err(MountError::io("mount the device: fjord serves it already", Errno::BUSY))
}

fn mount_directly(
    fs_type: &str,
    source: &str,
    mountpoint: &Path,
    options: &FuseOptions,
    extra: String,
) -> Result<DevFuse, MountError> {
    let transport = open_dev_fuse()?;
    let fd = transport.fd().map_err(|e| MountError::io("open /dev/fuse", e))?;
    let mut data = format!(
        "fd={},rootmode=40000,user_id={},group_id={},default_permissions{extra}",
        fd.as_raw_fd(),
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw(),
    );
    if options.allow_other.unwrap_or(true) {
        data.push_str(",allow_other");
    }
    if let Some(max_read) = options.max_read {
        data.push_str(&format!(",max_read={max_read}"));
    }
    let data = std::ffi::CString::new(data).map_err(|e| MountError::io("mount", e))?;
    rustix::mount::mount(source, mountpoint, fs_type, options.flags, data.as_c_str()).map_err(
        |e| match e {
            Errno::PERM | Errno::ACCESS => MountError::Permission {
                what: format!(
                    "mount(2) of type {fs_type} was refused ({e}); this needs CAP_SYS_ADMIN"
                ),
            },
            Errno::NODEV => MountError::NoDevFuse,
            e => MountError::io(format!("mount type {fs_type} on {}", mountpoint.display()), e),
        },
    )?;
    Ok(transport)
}

fn mount_unprivileged(
    subtype: &str,
    source: &str,
    mountpoint: &Path,
    options: &FuseOptions,
) -> Result<DevFuse, MountError> {
    let list = unprivileged_list(subtype, source, options);
    let mounted = match fusermount::mount(mountpoint, &list) {
        // Older ones do not know it. fjord keeps those access times itself.
        Err(e) if e.to_string().contains("nodiratime") => {
            tracing::warn!(
                "/proc/mounts will not show nodiratime, which this fusermount3 does not support; \
                 it is in effect all the same"
            );
            let flags = options.flags - MountFlags::NODIRATIME;
            let options = FuseOptions { flags, ..options.clone() };
            fusermount::mount(mountpoint, &unprivileged_list(subtype, source, &options))
        }
        mounted => mounted,
    };
    let fd: OwnedFd = mounted.map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => MountError::NoFusermount,
        _ => MountError::Fusermount(e.to_string()),
    })?;
    DevFuse::new(fd).map_err(|e| MountError::io("take over /dev/fuse", e))
}

/// The `-o` list for fusermount3.
fn unprivileged_list(subtype: &str, source: &str, options: &FuseOptions) -> String {
    let mut list =
        format!("default_permissions,subtype={subtype},fsname={}", options::quote(source));
    for (flag, name) in [
        (MountFlags::RDONLY, "ro"),
        (MountFlags::NOEXEC, "noexec"),
        (MountFlags::SYNCHRONOUS, "sync"),
        (MountFlags::DIRSYNC, "dirsync"),
        (MountFlags::NOATIME, "noatime"),
        (MountFlags::NODIRATIME, "nodiratime"),
        (MountFlags::NOSYMFOLLOW, "nosymfollow"),
    ] {
        if options.flags.contains(flag) {
            list.push(',');
            list.push_str(name);
        }
    }
    if options.allow_other == Some(true) {
        list.push_str(",allow_other");
    }
    if let Some(max_read) = options.max_read {
        list.push_str(&format!(",max_read={max_read}"));
    }
    list
}

/// Changes the mount(2) flags of a mount (remount): ro, nosuid, nodev, noexec. The server is not
/// informed; the kernel first writes everything back. With BIND only the mount changes, not the file system.
///
/// # Errors
/// Busy (files are open for writing), not mounted, no permission.
pub fn remount(dir: &Path, flags: MountFlags) -> Result<(), MountError> {
    child::remount(dir, flags).map_err(|e| match e {
        Errno::BUSY | Errno::AGAIN => MountError::Busy(dir.to_owned()),
        Errno::INVAL => MountError::NotMounted(dir.to_owned()),
        Errno::PERM => MountError::Permission {
            what: format!("{} can be remounted only by root", dir.display()),
        },
        e => MountError::io(format!("remount {}", dir.display()), e),
    })
}

/// Whether the process that serves the mount on `dir` has died. Asks by statfs(2), which always reaches the
/// server; the kernel may answer other calls without it. A server that dies meanwhile gives ECONNABORTED.
pub fn is_dead(dir: &Path) -> bool {
    matches!(child::stat_fs(dir), Err(Errno::NOTCONN | Errno::CONNABORTED))
}

/// `ST_NOSYMFOLLOW` of linux/statfs.h, which has no name in rustix.
const ST_NOSYMFOLLOW: u64 = 0x2000;

/// The flags of the mount on `dir`, of those that statvfs(3) tells.
///
/// # Errors
/// `dir` cannot be reached.
pub fn flags_of(dir: &Path) -> Result<MountFlags, MountError> {
    use rustix::fs::StatVfsMountFlags as Told;
    let told = child::stat_fs(dir)
        .map_err(|e| MountError::io(format!("look at {}", dir.display()), e))?
        .f_flag;
    let pairs = [
        (Told::RDONLY, MountFlags::RDONLY),
        (Told::NOSUID, MountFlags::NOSUID),
        (Told::NODEV, MountFlags::NODEV),
        (Told::NOEXEC, MountFlags::NOEXEC),
        (Told::SYNCHRONOUS, MountFlags::SYNCHRONOUS),
        (Told::NOATIME, MountFlags::NOATIME),
        (Told::NODIRATIME, MountFlags::NODIRATIME),
        (Told::RELATIME, MountFlags::RELATIME),
        (Told::from_bits_retain(ST_NOSYMFOLLOW), MountFlags::NOSYMFOLLOW),
    ];
    let flags = pairs.into_iter().filter(|(told_as, _)| told.contains(*told_as));
    Ok(flags.map(|(_, flag)| flag).collect())
}
