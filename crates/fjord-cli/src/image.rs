//! Opening an image for a command that works on it while it is not mounted.

use std::{
    env,
    fs::File,
    io,
    ops::Range,
    os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt},
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use fjord::{Error, Fs, FsyncPolicyKind, ImageName, MountOptions, Timespec};
use fjord_block::{Device, DeviceExt, FileDevice, FileOptions, OpenError};
use fjord_journal::recovery::Plan;
use rustix::mount::MountFlags;

use crate::{
    failure::{self, Context, Failure, Result},
    in_use,
    mount_options::{self, Options},
};

/// Timeout for the loop device of a detached mount.
const DETACHED_PATIENCE: Duration = Duration::from_secs(5);

/// Opens an image for reading. Writes nothing.
pub(crate) fn open_to_read(image: &Path) -> Result<Fs> {
    let fs = open(image, &MountOptions { read_only: true, ..Default::default() })?;
    with_root(fs).map_err(|e| failure::open_failed(image, e))
}

/// The latest permitted time in an image, in seconds since 1970.
const EPOCH_VARIABLE: &str = "SOURCE_DATE_EPOCH";

/// The time that reproducible images have in place of the clock's, if one is given.
///
/// # Errors
/// The variable is not a time.
pub(crate) fn latest_time() -> Result<Option<Timespec>> {
    let Some(value) = env::var_os(EPOCH_VARIABLE).filter(|value| !value.is_empty()) else {
        return Ok(None);
    };
    let seconds = value.to_str().and_then(|text| text.parse::<i64>().ok());
    let sec = seconds.filter(|sec| *sec >= 0).ok_or_else(|| {
        Failure::usage(format!("{EPOCH_VARIABLE} is {value:?}; seconds since 1970 are expected"))
    })?;
    Ok(Some(Timespec { sec, nsec: 0 }))
}

/// Opens an image for writing; replays its journal first. With SOURCE_DATE_EPOCH equal changes of equal
/// images give equal bytes: no clock, nothing random, and no thread that commits when it likes.
pub(crate) fn open_to_write(image: &Path) -> Result<Fs> {
    let usual = MountOptions::default();
    let options = match latest_time()? {
        Some(time) => MountOptions {
            fixed_time: Some(time),
            background_threads: false,
            fsync: FsyncPolicyKind::Compound,
            ..usual
        },
        None => usual,
    };
    open(image, &options)
}

/// Opens an image for a mount. A write-protected image is mounted read-only with a warning, as by
/// mount(8); `options` is updated.
pub(crate) fn open_for_mount(image: &Path, options: &mut Options) -> Result<Fs> {
    in_use::check(image, options.engine.read_only)?;
    let error = match patiently(image, || Fs::open(image, &options.engine)) {
        Ok(fs) => return with_root(fs).map_err(|e| failure::open_failed(image, e)),
        Err(error) => error,
    };
    let why = match &error {
        Error::Open(refused) => match &**refused {
            OpenError::WriteProtected { source, .. } => Some(source.to_string()),
            _ => None,
        },
        _ => None,
    };
    let Some(why) = why else { return Err(failure::open_failed(image, error)) };
    options.fuse.flags.insert(MountFlags::RDONLY);
    mount_options::settle(options);
    in_use::check(image, true)?;
    let reopen = || Fs::open(image, &options.engine);
    let fs = patiently(image, reopen).and_then(with_root);
    let fs = fs.map_err(|e| failure::open_failed(image, e))?;
    let image = image.display();
    tracing::warn!("{image} is write-protected ({why}): mounted read-only");
    Ok(fs)
}

/// Without its root directory there is nothing to do in an image.
fn with_root(fs: Fs) -> fjord::Result<Fs> {
    match fs.root() {
        Ok(_) => Ok(fs),
        Err(error) => {
            // The first error is the one to tell.
            let _ = fs.unmount();
            Err(error)
        }
    }
}

/// Opens an image; the error for an image in use names its user.
fn open(image: &Path, options: &MountOptions) -> Result<Fs> {
    in_use::check(image, options.read_only)?;
    // A command reports what its calls return.
    let options = MountOptions { log_damage: false, ..options.clone() };
    patiently(image, || Fs::open(image, &options)).map_err(|e| failure::open_failed(image, e))
}

/// An image in any state, to read bytes of it.
pub(crate) enum RawImage {
    /// A file or block device, or a part of one.
    File(RawFile),
    /// An image on a cluster.
    Remote(Arc<dyn Device>),
}

/// An image that lies in a file.
pub(crate) struct RawFile {
    /// The file that it lies in.
    pub(crate) file: File,
    /// The bytes of the file that it is, if it is a part.
    pub(crate) range: Option<Range<u64>>,
}

/// Opens an image to read its bytes.
pub(crate) fn open_raw(image: &Path) -> Result<RawImage> {
    let name = ImageName::parse(image);
    if !name.is_remote() {
        return open_raw_file(image, &name).map(RawImage::File);
    }
    let options = FileOptions { read_only: true, ..FileOptions::default() };
    let device = name.open(&options, false).map_err(|e| failure::open_failed(image, e))?;
    Ok(RawImage::Remote(device))
}

fn open_raw_file(image: &Path, name: &ImageName) -> Result<RawFile> {
    let failed = |e| failure::open_failed(image, Error::Open(Arc::new(e)));
    FileDevice::check_kind(name.path()).map_err(failed)?;
    // The path may have become a pipe.
    let opened = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(name.path());
    let file = opened.map_err(|source| failed(OpenError::Os { path: image.to_owned(), source }))?;
    let range = name.range().map_err(|e| failure::open_failed(image, e))?;
    Ok(RawFile { file, range })
}

impl RawImage {
    /// Reads all of `bytes` from `offset` on.
    pub(crate) fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        let RawFile { file, range } = match self {
            RawImage::File(file) => file,
            RawImage::Remote(device) => return Ok(device.read_exact_at(offset, bytes)?),
        };
        let Range { start, end } = range.clone().unwrap_or(0..u64::MAX);
        let place = start.saturating_add(offset);
        if place.saturating_add(bytes.len() as u64) > end {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        file.read_exact_at(bytes, place)
    }

    /// Its size, and whether the size is fixed: that of a block device or a part of a file.
    pub(crate) fn size(&self) -> io::Result<(u64, bool)> {
        use std::io::Seek as _;
        let RawFile { file, range } = match self {
            RawImage::File(file) => file,
            RawImage::Remote(device) => return Ok((device.size_bytes(), false)),
        };
        let is_device = file.metadata()?.file_type().is_block_device();
        Ok(match range {
            Some(range) => (range.end.saturating_sub(range.start), true),
            None => ({ file }.seek(io::SeekFrom::End(0))?, is_device),
        })
    }
}

/// The log of an image, read-only; see [`fjord::inspect::log`].
pub(crate) fn log(image: &Path) -> Result<Option<Plan>> {
    in_use::check(image, true)?;
    patiently(image, || fjord::inspect::log(image)).map_err(|e| failure::open_failed(image, e))
}

/// Whether the ijournal mark is set; see [`fjord::inspect::is_marked`].
pub(crate) fn is_marked(image: &Path) -> Result<bool, Error> {
    patiently(image, || fjord::inspect::is_marked(image))
}

/// Discards the i-transactions, the fsynced changes since the last commit; see
/// [`fjord::inspect::drop_fsyncs`].
pub(crate) fn drop_fsyncs(image: &Path) -> Result<bool> {
    patiently(image, || fjord::inspect::drop_fsyncs(image))
        .map_err(|e| failure::open_failed(image, e))
}

/// Retries for a while if the image is in use by a detached mount (`umount -l`), which keeps its
/// loop device until the last program has left it. For other users the library waits, for a shorter
/// time ([`MountOptions::lock_timeout`]).
pub(crate) fn patiently<T>(image: &Path, open: impl Fn() -> Result<T, Error>) -> Result<T, Error> {
    let started = Instant::now();
    loop {
        let refused = match open() {
            Err(Error::Open(e)) if matches!(*e, OpenError::InUse { .. }) => e,
            done => return done,
        };
        let Some(device) = in_use::detached_loop(image) else { return Err(Error::Open(refused)) };
        if started.elapsed() < DETACHED_PATIENCE {
            thread::sleep(Duration::from_millis(10));
            continue;
        }
        let by = format!(
            "{}, the loop device of a detached mount (umount -l), which programs still use: they \
             have open files or their working directory there",
            device.display()
        );
        return Err(Error::Open(Arc::new(OpenError::InUse { path: image.to_owned(), by })));
    }
}

/// Runs `work` on an image opened for writing and closes it, so that everything is durable when
/// this returns, including changes before a failure.
pub(crate) fn change<T>(image: &Path, work: impl FnOnce(&Fs) -> Result<T>) -> Result<T> {
    let fs = with_root(open_to_write(image)?).map_err(|e| failure::open_failed(image, e))?;
    let worked = work(&fs);
    let closed = fs.unmount().context("closing the image failed");
    match (worked, closed) {
        (Ok(value), Ok(())) => Ok(value),
        (Err(e), Ok(())) => Err(e),
        (Ok(_), Err(e)) => Err(e),
        (Err(e), Err(closing)) => Err(Failure { message: format!("{e}; also, {closing}"), ..e }),
    }
}
