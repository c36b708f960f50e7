//! Who uses an image: fjord or Linux, mounted where.

use std::{
    fs::{self, File},
    ops::Range,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::Duration,
};

use fjord::ImageName;
use fjord_fuse::mount::{self, MountEntry};

use crate::{
    failure::{Context, Failure, Result},
    output,
};

/// The mount that holds `image`, if any: of the device itself, of a loop device over the file, or a
/// fjord mount that names it as its source.
pub(crate) fn mount_of(image: &Path) -> Option<MountEntry> {
    if ImageName::parse(image).is_remote() {
        return remote_mount_of(image);
    }
    let wanted = Bytes::of(image);
    let meta = fs::metadata(&wanted.file).ok()?;
    let rdev = meta.file_type().is_block_device().then(|| meta.rdev());
    let loops: Vec<_> = mount::loop_backings()
        .into_iter()
        .filter(|b| wanted.overlap(&b.file, &b.range))
        .map(|b| b.device)
        .collect();
    mount::mounts().ok()?.into_iter().rev().find(|m| {
        let by_device = rdev.is_some_and(|rdev| rdev == libc::makedev(m.dev_major, m.dev_minor));
        by_device
            || loops.contains(&m.source)
            || m.is_fjord() && m.source.is_absolute() && {
                let source = Bytes::of(&m.source);
                wanted.overlap(&source.file, &source.range)
            }
    })
}

/// The fjord mount of an image on a cluster, which names it as its source, or whose loop device stands in for it.
fn remote_mount_of(image: &Path) -> Option<MountEntry> {
    let loops = mount::loop_backings();
    let stand_ins: Vec<_> = loops
        .into_iter()
        .filter(|backing| mount::is_stand_in_for(&backing.file, image))
        .map(|backing| backing.device)
        .collect();
    let is_its =
        |m: &MountEntry| m.is_fjord() && (m.source == image || stand_ins.contains(&m.source));
    mount::mounts().ok()?.into_iter().rev().find(is_its)
}

/// The bytes of a file that an image is.
pub(crate) struct Bytes {
    pub(crate) file: PathBuf,
    /// Unbounded for all of the file, or where the name is that of no partition.
    pub(crate) range: Range<u64>,
}

impl Bytes {
    pub(crate) fn of(image: &Path) -> Bytes {
        let name = ImageName::parse(image);
        let range = name.range().ok().flatten().unwrap_or(0..u64::MAX);
        Bytes { file: name.path().to_owned(), range }
    }

    fn overlap(&self, file: &Path, range: &Range<u64>) -> bool {
        let is_common = self.range.start < range.end && range.start < self.range.end;
        is_common && mount::same_file(&self.file, file)
    }
}

/// The loop device of `image` with autoclear and without a mount in this namespace: that of a
/// detached mount.
pub(crate) fn detached_loop(image: &Path) -> Option<PathBuf> {
    let mounts = mount::mounts().ok()?;
    let wanted = Bytes::of(image);
    mount::loop_backings()
        .into_iter()
        .filter(|b| b.is_stand_in && wanted.overlap(&b.file, &b.range))
        .map(|b| b.device)
        .find(|device| mounts.iter().all(|m| m.source != *device))
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
    let _waiting = Waiting::begin(source);
    let name = ImageName::parse(source);
    let found = match name.is_remote() {
        true => None,
        false => Some(fs::metadata(name.path()).context(source.display())?),
    };
    if let Some(found) = found.filter(fs::Metadata::is_dir) {
        if is_other_mount(&found) {
            let message = "not on a fjord mount; give a directory on one, or an image";
            return Err(Failure::new(message).context(source.display()));
        }
        let dir = File::open(source).context(source.display())?;
        wait_for_server(source);
        return Ok(Found::Mount(dir));
    }
    match mount_of(source).filter(MountEntry::is_fjord) {
        Some(mount) => match File::open(&mount.mountpoint) {
            Ok(dir) => {
                wait_for_server(&mount.mountpoint);
                Ok(Found::Mount(dir))
            }
            Err(error) => {
                // Fails with advice if the server has died.
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

/// Returns when the process that serves the mount on `dir` has answered, or has ended.
fn wait_for_server(dir: &Path) {
    let _is_dead = mount::is_dead(dir);
}

/// Whether a file is known to lie on a mount that fjord does not serve.
fn is_other_mount(file: &fs::Metadata) -> bool {
    let mounts = mount::mounts().unwrap_or_default();
    let mut mounts = mounts.iter().rev();
    let mount = mounts.find(|m| file.dev() == libc::makedev(m.dev_major, m.dev_minor));
    mount.is_some_and(|mount| !mount.is_fjord())
}

/// How the process that serves a mount does.
enum Server {
    Lives,
    Dead,
    /// It has not answered for [`ANSWER_PATIENCE`].
    Silent,
}

/// How long a mount may take to answer.
const ANSWER_PATIENCE: Duration = Duration::from_secs(5);

fn server(dir: &Path) -> Server {
    let (tell, told) = mpsc::channel();
    let dir = dir.to_owned();
    // It waits for as long as the server is stopped; the end of this process ends it.
    let asks = thread::Builder::new().spawn(move || tell.send(mount::is_dead(&dir)));
    if asks.is_err() {
        // Nobody can be asked where no thread may be started.
        return Server::Lives;
    }
    match told.recv_timeout(ANSWER_PATIENCE) {
        Ok(true) => Server::Dead,
        Ok(false) => Server::Lives,
        Err(_) => Server::Silent,
    }
}

/// Says why a command waits, if the process that serves a mount does not answer. The command goes on: the machine may
/// only be busy, and a signal ends it.
pub(crate) struct Waiting {
    /// Dropped when the answer is there.
    _answered: mpsc::Sender<()>,
}

impl Waiting {
    /// The command may have to wait for the mount of `source`, an image or a directory, from now on until this is dropped.
    pub(crate) fn begin(source: &Path) -> Waiting {
        let (answered, has_answered) = mpsc::channel::<()>();
        let source = source.to_owned();
        // Where no thread may be started the command waits without a word.
        let _ = thread::Builder::new().spawn(move || {
            if has_answered.recv_timeout(ANSWER_PATIENCE) == Err(mpsc::RecvTimeoutError::Timeout) {
                output::complain(format!(
                    "{}: waiting for the process that serves the mount, which does not answer (it may be stopped)",
                    source.display()
                ));
            }
        });
        Waiting { _answered: answered }
    }
}

/// Fails with a message that says where, if the image is mounted.
pub(crate) fn check(image: &Path, read_only: bool) -> Result<()> {
    let Some(m) = mount_of(image) else { return Ok(()) };
    let (image, dir) = (image.display(), m.mountpoint.display());
    if m.is_fjord() {
        return Err(Failure::in_use(match server(&m.mountpoint) {
            Server::Dead => format!(
                "{image} is held by the mount on {dir}, whose fjord process has died; run `fjord \
                 umount {dir}` first"
            ),
            Server::Lives => format!(
                "{image} is mounted by fjord on {dir}; use it there, or run `fjord umount {dir}` \
                 first"
            ),
            Server::Silent => format!(
                "{image} is mounted by fjord on {dir}, whose process does not answer (it may be \
                 stopped); let it go on, or kill it and run `fjord umount {dir}`"
            ),
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
