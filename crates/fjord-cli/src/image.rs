//! Opening an image for a command that works on it while it is not mounted.

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use fjord::{Error, Fs, MountOptions};
use fjord_block::OpenError;
use fjord_journal::recovery::Plan;

use crate::{
    failure::{self, Context, Failure, Result},
    in_use,
};

/// How long an image that is locked, but not mounted, is waited for.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);

/// Opens an image to look at it. Writes nothing.
pub(crate) fn open_to_read(image: &Path) -> Result<Fs> {
    open(image, &MountOptions { read_only: true, ..Default::default() })
}

/// Opens an image to change it; replays its journal first.
pub(crate) fn open_to_write(image: &Path) -> Result<Fs> {
    open(image, &MountOptions::default())
}

/// Opens an image, with the user of an image that is in use named.
pub(crate) fn open(image: &Path, options: &MountOptions) -> Result<Fs> {
    in_use::check(image, options.read_only)?;
    patiently(|| Fs::open(image, options)).map_err(|e| failure::open_failed(image, e))
}

/// The log of an image, for a look; see [`fjord::inspect::log`].
pub(crate) fn log(image: &Path) -> Result<Option<Plan>> {
    in_use::check(image, true)?;
    patiently(|| fjord::inspect::log(image)).map_err(|e| failure::open_failed(image, e))
}

/// Gives up what was fsynced since the last commit; see [`fjord::inspect::drop_fsyncs`].
pub(crate) fn drop_fsyncs(image: &Path) -> Result<bool> {
    patiently(|| fjord::inspect::drop_fsyncs(image)).map_err(|e| failure::open_failed(image, e))
}

/// Tries again for a moment while the image is in use: a daemon whose mount has just gone still
/// holds the lock until its process has ended.
pub(crate) fn patiently<T>(open: impl Fn() -> Result<T, Error>) -> Result<T, Error> {
    let deadline = Instant::now() + LOCK_PATIENCE;
    loop {
        match open() {
            Err(Error::Open(e))
                if matches!(*e, OpenError::InUse { .. }) && Instant::now() < deadline =>
            {
                thread::sleep(Duration::from_millis(10));
            }
            done => return done,
        }
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
        (Err(e), Err(closing)) => Err(Failure { message: format!("{e}; moreover {closing}"), ..e }),
    }
}
