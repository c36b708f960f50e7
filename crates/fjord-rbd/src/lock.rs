//! The exclusive lock: one host at a time writes to an image.
//!
//! Owns how the lock is taken. The lock is Ceph's own (the image's feature `exclusive-lock`): a client that does not
//! have it cannot write, and one that it was taken from is blocklisted, so that not even what it has on the way
//! lands. That stands in for multi-mount protection, which only warns.
//!
//! Invariant: the lock is taken before anything of the image is read for writing, so before the journal's replay.

use std::thread;
use std::time::{Duration, Instant};

use fjord_block::{OpenError, RemoteOptions};

use crate::image::Image;
use crate::name::Step;

/// Whoever has died is off Ceph's record after this time: `osd_client_watch_timeout` is 30 s.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often whoever waits is told.
const TELL_INTERVAL: Duration = Duration::from_secs(1);

/// Takes the lock: at once if nobody has it; from a client that has died, when the cluster knows of that; with
/// `options.steal` from whoever has it.
///
/// # Errors
/// `InUse` names the client that has it; `Remote` for what else fails.
pub(crate) fn take(image: &Image, options: &RemoteOptions<'_>) -> Result<(), OpenError> {
    let name = &image.name;
    if !image.has_exclusive_lock()? {
        let advice = "the image has no exclusive lock, which keeps a second host from writing to it: \
                      `rbd feature enable IMAGE exclusive-lock`";
        return Err(name.failed(libc::EOPNOTSUPP, advice));
    }
    let began = Instant::now();
    while began.elapsed() < PATIENCE {
        let owner = image.lock_owner()?;
        if let Some(owner) = owner.as_deref().filter(|_| options.steal) {
            let code = image.lock_break(owner);
            // It may have gone meanwhile.
            if code < 0 && code != -libc::ENOENT {
                return Err(name.refused(Step::Lock, code));
            }
            tracing::warn!(
                "{}: the exclusive lock was taken from {}, which can write nothing any more",
                name.path().display(),
                owner.to_string_lossy()
            );
        }
        match acquire(image, options) {
            0.. if image.is_locked_by_us() => return Ok(()),
            code if -code == libc::EBUSY || -code == libc::EROFS || code >= 0 => {
                if let Some(owner) = image.lock_owner()?.filter(|_| !options.steal) {
                    return Err(OpenError::InUse {
                        path: name.path().to_owned(),
                        by: format!("the client {} of the cluster", owner.to_string_lossy()),
                    });
                }
            }
            code => return Err(name.refused(Step::Lock, code)),
        }
    }
    Err(name.refused(Step::Lock, -libc::ETIMEDOUT))
}

/// Asks for the lock, and tells how long that takes.
fn acquire(image: &Image, options: &RemoteOptions<'_>) -> i32 {
    let began = Instant::now();
    thread::scope(|scope| {
        let asking = scope.spawn(|| image.lock_acquire());
        let mut told = began;
        while !asking.is_finished() {
            thread::park_timeout(Duration::from_millis(5));
            if told.elapsed() >= TELL_INTERVAL {
                told = Instant::now();
                (options.tell)(&format!(
                    "{}: its holder does not answer; waiting until the cluster gives it up ({} s)",
                    image.name.path().display(),
                    began.elapsed().as_secs()
                ));
            }
        }
        asking.join().unwrap_or(-libc::EIO)
    })
}
