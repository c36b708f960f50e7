//! Server side of snapshot requests. Owns the thread that takes one.
//!
//! Invariants: one at a time; the thread ends soon after the client or the mount has gone.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use fjord::snapshot::{Reflink, SnapshotError, SnapshotOptions};
use fjord::{Error, Fs};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, FileType, OFlags, StatxFlags};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use super::{Order, Outcome};
use crate::ask::Asked;
use crate::call::{Call, GREETING_TIME_MAX, MESSAGE_BYTES_MAX, tell, wait_readable};
use crate::reply::Errno;

/// Takes snapshots, one at a time.
#[derive(Debug, Default)]
pub(crate) struct SnapshotServer {
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
    is_busy: AtomicBool,
    /// The mount is ending. Never cleared.
    is_closed: AtomicBool,
}

/// The turn of one snapshot.
struct Turn(Arc<State>);

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.is_busy.store(false, Ordering::Release);
    }
}

impl SnapshotServer {
    /// Begins a snapshot of `fs` for an authorised caller.
    pub(crate) fn begin(&self, fs: &Fs, call: &Call) -> Result<(), Errno> {
        if self.state.is_closed.load(Ordering::Acquire) {
            return Err(Errno(libc::ENOTCONN));
        }
        if self.state.is_busy.swap(true, Ordering::AcqRel) {
            return Err(Errno(libc::EBUSY));
        }
        let (fs, turn) = (fs.clone(), Turn(self.state.clone()));
        call.serve(Asked::Snapshot, move |socket| serve(&fs, socket, &turn.0))
    }

    /// The mount is ending: cancels the snapshot in progress.
    pub(crate) fn close(&self) {
        self.state.is_closed.store(true, Ordering::Release);
    }
}

fn serve(fs: &Fs, socket: &OwnedFd, state: &State) -> io::Result<()> {
    let (order, out) = received(socket)?;
    let outcome = match checked(&order, &out) {
        Ok(reflink) => {
            let is_cancelled = || state.is_closed.load(Ordering::Acquire) || has_hung_up(socket);
            let options = SnapshotOptions { reflink, is_cancelled: Some(&is_cancelled) };
            match fs.snapshot_to(&out, &options) {
                Ok(report) => Outcome::from(&report),
                // Whatever ended it first.
                Err(_) if state.is_closed.load(Ordering::Acquire) => {
                    failed(&SnapshotError::Closed.into())
                }
                Err(error) => failed(&error),
            }
        }
        Err(message) => Outcome::Failed { errno: libc::EINVAL, message },
    };
    match &outcome {
        Outcome::Done { size_bytes, reflinked, pause_us, .. } => {
            tracing::info!(size_bytes, reflinked, pause_us, "took a snapshot");
        }
        Outcome::Failed { message, .. } => tracing::info!(message, "the snapshot failed"),
    }
    tell(socket, &outcome)
}

fn failed(error: &Error) -> Outcome {
    Outcome::Failed { errno: error.errno(), message: error.to_string() }
}

/// The order, and the file for the copy.
fn received(socket: &OwnedFd) -> io::Result<(Order, File)> {
    wait_readable(socket, Instant::now() + GREETING_TIME_MAX)?;
    let mut text = [0; MESSAGE_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [io::IoSliceMut::new(&mut text)];
    let len = recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
    let fd = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    let fd = fd.ok_or(io::ErrorKind::UnexpectedEof)?;
    Ok((serde_json::from_slice(&text[..len])?, fd.into()))
}

/// Refuses an invalid order, and any file that is not empty and writable.
fn checked(order: &Order, out: &File) -> Result<Reflink, String> {
    let told = |error: rustix::io::Errno| format!("the file for the copy: {error}");
    // As the kernel knows it: to ask a FUSE server may be to wait for oneself.
    let no_sync = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = rustix::fs::statx(out, c"", no_sync, StatxFlags::BASIC_STATS).map_err(told)?;
    let flags = rustix::fs::fcntl_getfl(out).map_err(told)?;
    let may_write = matches!(flags & OFlags::ACCMODE, OFlags::WRONLY | OFlags::RDWR);
    let is_file = FileType::from_raw_mode(stat.stx_mode.into()) == FileType::RegularFile;
    if !is_file || stat.stx_size != 0 || !may_write || flags.contains(OFlags::APPEND) {
        return Err("the file for the copy is not an empty regular file open for writing".into());
    }
    Reflink::from_name(&order.reflink)
        .ok_or_else(|| format!("{:?} is not a known value of --reflink", order.reflink))
}

/// Whether the client has hung up. It sends nothing more.
fn has_hung_up(socket: &OwnedFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut polled = [PollFd::new(socket, PollFlags::RDHUP)];
    matches!(poll(&mut polled, Some(&now)), Ok(count) if count > 0)
}
