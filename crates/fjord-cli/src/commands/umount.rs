//! `fjord umount`: unmount, and wait until the image is clean.

use std::{
    fs::{self, File},
    io,
    ops::Range,
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use fjord::ImageName;
use fjord_block::FileDevice;
use fjord_format::{
    features::Incompat,
    superblock::{RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSET_BYTES},
};
use fjord_fuse::{
    mount::{self, LoopBacking, MountEntry, MountError},
    stats::MountStats,
};
use rustix::fs::OFlags;

use super::sim;
use crate::{
    failure::{Context, EXIT_DAMAGED, Failure, Result},
    image,
    in_use::{self, Bytes},
    size,
};

/// Timeout for the daemon of a `fuse` mount to write everything.
const PATIENCE: Duration = Duration::from_secs(600);

#[derive(Debug, clap::Args)]
#[command(
    after_help = "Returns when the image is clean on disk. It may then be copied, moved or mounted \
by Linux.\n\nExamples:\n  fjord umount /mnt && e2fsck -fn disk.img\n  fjord umount disk.img"
)]
pub(crate) struct Args {
    /// Mount point of fjord, or the mounted image or device
    pub(crate) dir: PathBuf,
    /// Detach it even if it is in use; fjord serves it until the last user is gone
    #[arg(short, long)]
    lazy: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let dir = resolve(&args.dir)?;
    let found = mount::mount_at(&dir).context("/proc/self/mountinfo")?;
    let Some(entry) = found else {
        return Err(MountError::NotMounted(dir).into());
    };
    if entry.is_sim() {
        return switch_off(&dir, image_of(&entry).filter(|_| !args.lazy), args.lazy);
    }
    if !entry.is_fjord() {
        return Err(Failure::new(format!(
            "{} is a mount of type {}, not of fjord; use umount",
            dir.display(),
            entry.fs_type
        )));
    }
    let image = image_of(&entry);
    let before = Before::look(&dir);
    mount::unmount_dir(&dir, args.lazy)?;
    let Some(image) = image else { return Ok(()) };
    if args.lazy {
        return Ok(());
    }
    if before.died {
        return Err(Failure::new(format!(
            "the fjord process that served {} had died; everything fsynced is safe, but the image \
             is not clean: run `fjord recover {}`, or mount it again",
            dir.display(),
            image.display()
        )));
    }
    wait_for_daemon(&image)?;
    // A mount that was read-only by choice leaves the image as it found it.
    if !before.was_left_alone {
        check_clean(&image)?;
    }
    match before.without_room_bytes {
        0 => Ok(()),
        bytes => Err(Failure::new(format!(
            "{} is unmounted and clean, but {} of file data that no fsync had made durable found \
             no space and are lost: the file system that holds the image is full; free space there \
             before the next mount",
            image.display(),
            size::show(bytes)
        ))),
    }
}

/// State that the mount reports before it is unmounted.
#[derive(Default)]
struct Before {
    /// Its server has ended.
    died: bool,
    /// It was mounted read-only, so the image is unchanged.
    was_left_alone: bool,
    /// File data that waits for space in the file system that holds the image.
    without_room_bytes: u64,
}

impl Before {
    /// Syncs the mount, then reads its state.
    fn look(dir: &Path) -> Before {
        if mount::is_dead(dir) {
            return Before { died: true, ..Before::default() };
        }
        let Ok(open) = File::open(dir) else {
            return Before { died: mount::is_dead(dir), ..Before::default() };
        };
        // The counters include its error.
        let _ = rustix::fs::syncfs(&open);
        drop(open);
        // A mount that does not answer is still unmounted.
        let Ok(stats) = MountStats::read(dir) else {
            return Before { died: mount::is_dead(dir), ..Before::default() };
        };
        let is_full = stats.cache.full_below_since.is_some();
        Before {
            died: false,
            was_left_alone: stats.health.read_only && stats.health.failure.is_none(),
            without_room_bytes: if is_full { stats.cache.dirty_bytes } else { 0 },
        }
    }
}

/// Unmounts a modelled device; with `image`, waits until its contents are written there.
fn switch_off(dir: &Path, image: Option<PathBuf>, lazy: bool) -> Result<()> {
    // With the power cut, or a server that has died, there is nothing to write back.
    let powered = sim::is_powered(dir).unwrap_or(false);
    let inode = |path: &Path| fs::metadata(path).map(|metadata| metadata.ino());
    let before = image.as_deref().map(inode).transpose().context("the image")?;
    mount::unmount_dir(dir, lazy)?;
    let Some(image) = image else { return Ok(()) };
    wait_for_daemon(&image)?;
    // The new file replaces the old one when it is complete.
    if powered && inode(&image).ok() == before {
        return Err(Failure::new(format!(
            "the contents of the device could not be written to {}, which is unchanged; free space \
             there, or give another path to --image",
            image.display()
        )));
    }
    Ok(())
}

/// The directory as the mount table names it. The last component is not resolved: that would fail
/// if the server has died.
fn resolve(dir: &Path) -> Result<PathBuf> {
    if ImageName::parse(dir).is_remote() {
        return match in_use::mount_of(dir) {
            Some(entry) => Ok(entry.mountpoint),
            None => Err(Failure::new(format!("{} is not mounted here", dir.display()))),
        };
    }
    let absolute = std::path::absolute(dir)?;
    let (Some(parent), Some(name)) = (absolute.parent(), absolute.file_name()) else {
        return Ok(absolute);
    };
    let parent = fs::canonicalize(parent).context(parent.display())?;
    let joined = parent.join(name);
    if mount::mount_at(&joined).context("/proc/self/mountinfo")?.is_some() {
        return Ok(joined);
    }
    if ImageName::parse(&joined).is_part() {
        let mount = in_use::mount_of(&joined).filter(MountEntry::is_fjord);
        return Ok(mount.map_or(joined, |entry| entry.mountpoint));
    }
    let found = fs::canonicalize(&joined).context(joined.display())?;
    match in_use::mount_of(&found).filter(MountEntry::is_fjord) {
        Some(entry) if !found.is_dir() => Ok(entry.mountpoint),
        _ => Ok(found),
    }
}

/// The image of a mount, if it is known.
fn image_of(entry: &MountEntry) -> Option<PathBuf> {
    if entry.fs_type == "fuse.fjord" || entry.is_sim() {
        let exists = |name: &PathBuf| {
            let parsed = ImageName::parse(name);
            parsed.is_remote() || name.is_absolute() && parsed.path().exists()
        };
        return Some(entry.source.clone()).filter(exists);
    }
    let is_source = |b: &LoopBacking| b.is_stand_in && b.device == entry.source;
    let Some(backing) = mount::loop_backings().into_iter().find(is_source) else {
        return Some(entry.source.clone()).filter(|device| device.exists());
    };
    if let Some(image) = mount::stood_in_for(&backing.file) {
        return Some(image).filter(|image| ImageName::parse(image).is_remote());
    }
    let LoopBacking { file, range: Range { start, end }, .. } = backing;
    let is_whole = (start, end) == (0, u64::MAX);
    let size = Some(end.saturating_sub(start)).filter(|_| end != u64::MAX);
    Some(file).filter(|file| file.exists()).map(|file| match is_whole {
        true => file,
        false => ImageName::of_bytes(&file, start, size),
    })
}

/// Waits until the daemon has released the image's lock. A `fuseblk` mount ends only after the
/// image is clean, so there the wait is short.
fn wait_for_daemon(image: &Path) -> Result<()> {
    let name = ImageName::parse(image);
    if let Some((remote, url)) = name.remote()? {
        // Where the cluster does not answer, nothing is known.
        return wait_while(image, || remote.is_in_use(url).unwrap_or(false));
    }
    let Bytes { file: path, range } = Bytes::of(image);
    let Ok(file) = File::open(&path) else { return Ok(()) };
    let is_device = file.metadata().is_ok_and(|m| m.file_type().is_block_device());
    let range = Some(range).filter(|range| *range != (0..u64::MAX));
    wait_while(image, || match is_device {
        true => is_claimed(&path) || is_open(&file),
        false => is_locked(&path, range.as_ref()),
    })
}

fn wait_while(image: &Path, is_held: impl Fn() -> bool) -> Result<()> {
    let started = Instant::now();
    while started.elapsed() < PATIENCE {
        if !is_held() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Err(Failure::new(format!(
        "unmounted, but fjord is still writing to {} after {} seconds; wait before you use it",
        image.display(),
        PATIENCE.as_secs()
    )))
}

/// Whether another process holds the lock of an image file.
fn is_locked(image: &Path, range: Option<&Range<u64>>) -> bool {
    // Opened for the look: the locks that it takes end with it.
    File::open(image).is_ok_and(|file| FileDevice::is_locked(&file, range))
}

/// Whether another process has a block device open exclusively, as fjord does.
fn is_claimed(device: &Path) -> bool {
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    let claim = rustix::fs::open(device, flags, rustix::fs::Mode::empty());
    matches!(claim, Err(rustix::io::Errno::BUSY))
}

/// Whether a process of fjord has a block device open: the claim ends with the mount, the lock of
/// the open file a moment later, with the process.
fn is_open(device: &File) -> bool {
    let mut lock = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    // SAFETY: the call reads and writes one `flock` through a pointer that is valid for its time.
    let rc = unsafe { libc::fcntl(device.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    rc == 0 && lock.l_type != libc::F_UNLCK as libc::c_short
}

/// Reads the superblock of an image that was unmounted.
fn read_clean(image: &Path, bytes: &mut [u8; SUPERBLOCK_BYTES]) -> Result<io::Result<()>> {
    if ImageName::parse(image).is_remote() {
        return Ok(image::open_raw(image)?.read_exact_at(bytes, SUPERBLOCK_OFFSET_BYTES));
    }
    let Bytes { file: path, range } = Bytes::of(image);
    let offset = range.start.saturating_add(SUPERBLOCK_OFFSET_BYTES);
    Ok(File::open(path).and_then(|file| file.read_exact_at(bytes, offset)))
}

fn check_clean(image: &Path) -> Result<()> {
    let mut bytes = [0; SUPERBLOCK_BYTES];
    match read_clean(image, &mut bytes)? {
        Ok(()) => {}
        // Not readable for this user; but the daemon has ended.
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => return Ok(()),
        Err(error) => {
            return Err(Failure {
                code: EXIT_DAMAGED,
                message: format!(
                    "{} is unmounted, but cannot be read ({error}), so it may not be clean; check \
                     the device, then run fjord recover",
                    image.display()
                ),
            });
        }
    }
    let clean = RawSuperblock::decode(&bytes)
        .is_ok_and(|sb| !sb.features().incompat.contains(Incompat::RECOVER));
    if clean {
        return Ok(());
    }
    Err(Failure {
        code: EXIT_DAMAGED,
        message: format!(
            "{} is not clean: fjord encountered an error; run `fjord recover {0}`, then e2fsck -f",
            image.display()
        ),
    })
}
