//! Opening an image for a command that works on it while it is not mounted.

use std::{
    fs::File,
    os::unix::fs::OpenOptionsExt,
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use fjord::{Error, Fs, MountOptions};
use fjord_block::{FileDevice, OpenError};
use fjord_journal::recovery::Plan;
use rustix::mount::MountFlags;

use crate::{
    failure::{self, Context, Failure, Result},
    in_use,
    mount_options::{self, Options},
};

/// How long the loop device of a mount that was detached is waited for.
const DETACHED_PATIENCE: Duration = Duration::from_secs(5);

/// Opens an image to look at it. Writes nothing.
pub(crate) fn open_to_read(image: &Path) -> Result<Fs> {
    open(image, &MountOptions { read_only: true, ..Default::default() })
}

/// Opens an image to change it; replays its journal first.
pub(crate) fn open_to_write(image: &Path) -> Result<Fs> {
    open(image, &MountOptions::default())
}

/// Opens an image for a mount. One that cannot be written is mounted read-only, with a warning, as
/// mount(8) does it; `options` say so then.
pub(crate) fn open_for_mount(image: &Path, options: &mut Options) -> Result<Fs> {
    in_use::check(image, options.engine.read_only)?;
    let error = match patiently(image, || Fs::open(image, &options.engine)) {
        Ok(fs) => return Ok(fs),
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
    let fs = open(image, &options.engine)?;
    let image = image.display();
    tracing::warn!("{image} is write-protected ({why}): mounted read-only");
    Ok(fs)
}

/// Opens an image, with the user of an image that is in use named.
fn open(image: &Path, options: &MountOptions) -> Result<Fs> {
    in_use::check(image, options.read_only)?;
    patiently(image, || Fs::open(image, options)).map_err(|e| failure::open_failed(image, e))
}

/// Opens an image as a file, to read bytes of it whatever state it is in.
pub(crate) fn open_raw(image: &Path) -> Result<File> {
    let failed = |e| failure::open_failed(image, Error::Open(Arc::new(e)));
    FileDevice::check_kind(image).map_err(failed)?;
    // What was a file may be a pipe by now.
    let opened = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(image);
    opened.map_err(|source| failed(OpenError::Os { path: image.to_owned(), source }))
}

/// The log of an image, for a look; see [`fjord::inspect::log`].
pub(crate) fn log(image: &Path) -> Result<Option<Plan>> {
    in_use::check(image, true)?;
    patiently(image, || fjord::inspect::log(image)).map_err(|e| failure::open_failed(image, e))
}

/// Whether the journal bears the mark of i-transactions; see [`fjord::inspect::is_marked`].
pub(crate) fn is_marked(image: &Path) -> Result<bool, Error> {
    patiently(image, || fjord::inspect::is_marked(image))
}

/// Gives up what was fsynced since the last commit; see [`fjord::inspect::drop_fsyncs`].
pub(crate) fn drop_fsyncs(image: &Path) -> Result<bool> {
    patiently(image, || fjord::inspect::drop_fsyncs(image))
        .map_err(|e| failure::open_failed(image, e))
}

/// Tries again for a while when the image is in use by a mount that was detached (`umount -l`),
/// which keeps its loop device until the last program has left it. Any other user is waited for by
/// the library, for a shorter time ([`MountOptions::lock_timeout`]).
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
            "{}, the loop device of a detached mount (umount -l), which programs still use: they have \
             open files or their working directory there",
            device.display()
        );
        return Err(Error::Open(Arc::new(OpenError::InUse { path: image.to_owned(), by })));
    }
}

/// Runs `work` on an image opened for writing and closes it, so that everything is durable when
/// this returns, also what was done before a failure.
pub(crate) fn change<T>(image: &Path, work: impl FnOnce(&Fs) -> Result<T>) -> Result<T> {
    let fs = open_to_write(image)?;
    let worked = work(&fs);
    let closed = fs.unmount().context("closing the image failed");
    match (worked, closed) {
        (Ok(value), Ok(())) => Ok(value),
        (Err(e), Ok(())) => Err(e),
        (Ok(_), Err(e)) => Err(e),
        (Err(e), Err(closing)) => Err(Failure { message: format!("{e}; also, {closing}"), ..e }),
    }
}
