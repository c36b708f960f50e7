//! Snapshots of a mount, requested by another process. Owns the protocol; this file has the client
//! side, `server` that of the mount.
//!
//!
//! Once connected ([`crate::call`]), the client sends an order, and the file for the copy as a
//! descriptor. The server sends the outcome and hangs up. If the client hangs up before, the
//! snapshot is cancelled. The file is a descriptor opened by the client, so that the server, which
//! may be root, cannot write a file that the client may not write.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use fjord::snapshot::{Reflink, SnapshotReport};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::call::{self, Kind, ReachError};

mod server;

pub(crate) use server::SnapshotServer;

/// The order.
#[derive(Serialize, Deserialize)]
struct Order {
    /// See [`Reflink::name`].
    reflink: String,
}

/// The outcome.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    Done {
        size_bytes: u64,
        copied_bytes: u64,
        reflinked: bool,
        pause_us: u64,
        held_count: u64,
        mode: u32,
        image_dev: u64,
        image_ino: u64,
    },
    Failed {
        errno: i32,
        message: String,
    },
}

impl From<&SnapshotReport> for Outcome {
    fn from(report: &SnapshotReport) -> Outcome {
        Outcome::Done {
            size_bytes: report.size_bytes,
            copied_bytes: report.copied_bytes,
            reflinked: report.reflinked,
            pause_us: u64::try_from(report.pause.as_micros()).unwrap_or(u64::MAX),
            held_count: report.held_count,
            mode: report.mode,
            image_dev: report.image.0,
            image_ino: report.image.1,
        }
    }
}

impl Outcome {
    fn into_result(self) -> Result<SnapshotReport, AskError> {
        match self {
            Outcome::Done {
                size_bytes,
                copied_bytes,
                reflinked,
                pause_us,
                held_count,
                mode,
                image_dev,
                image_ino,
            } => Ok(SnapshotReport {
                size_bytes,
                copied_bytes,
                reflinked,
                pause: Duration::from_micros(pause_us),
                held_count,
                mode,
                image: (image_dev, image_ino),
            }),
            Outcome::Failed { errno, message } => Err(AskError::Failed { errno, message }),
        }
    }
}

/// Errors of a snapshot of a mount.
#[derive(Debug, Error)]
pub enum AskError {
    /// Not a mount of fjord, or served by an older fjord.
    #[error(
        "not on a fjord mount that supports snapshots; give the directory named to fjord mount"
    )]
    NotServed,
    /// Another user's mount.
    #[error("only root and the user who mounted it may take a snapshot of it")]
    NotAllowed,
    /// Another snapshot is in progress.
    #[error("another snapshot of it is in progress; try again when it has ended")]
    Busy,
    /// The server cannot reach the socket of this process.
    #[error(
        "the process that serves the mount is in another network namespace; run this command in \
         the namespace of fjord mount"
    )]
    OutOfReach,
    /// The server ended, or was killed.
    #[error("the mount ended during the snapshot; run fjord snapshot on the image")]
    Ended,
    /// An error of the server.
    #[error("{message}")]
    Failed {
        /// Its errno.
        errno: i32,
        /// What went wrong and what to do.
        message: String,
    },
    /// Any other failure of this side.
    #[error("{doing}: {source}")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

fn io_error<E: Into<io::Error>>(doing: &'static str) -> impl FnOnce(E) -> AskError {
    move |source| AskError::Io { doing, source: source.into() }
}

impl From<ReachError> for AskError {
    fn from(error: ReachError) -> AskError {
        match error {
            ReachError::NotServed => AskError::NotServed,
            ReachError::NotAllowed => AskError::NotAllowed,
            ReachError::Busy => AskError::Busy,
            ReachError::OutOfReach => AskError::OutOfReach,
            ReachError::Ended => AskError::Ended,
            ReachError::Io { doing, source } => AskError::Io { doing, source },
        }
    }
}

/// Has the server of the mount copy its image to `out`, an empty regular file open for writing.
/// `dir` is any file or directory of the mount; while it is open, the mount is busy for umount(2).
/// The copy is neither recovered nor durable; see [`fjord::Fs::snapshot_to`].
///
/// # Errors
/// See [`AskError`]; `out` holds anything then.
pub fn ask(dir: &File, out: &File, reflink: Reflink) -> Result<SnapshotReport, AskError> {
    let socket = call::reach(dir, Kind::Snapshot)?;
    let order = Order { reflink: reflink.name().into() };
    send_order(&socket, &order, out).map_err(io_error("cannot reach the server"))?;
    call::answer::<Outcome>(&socket)?.into_result()
}

fn send_order(socket: &OwnedFd, order: &Order, out: &File) -> io::Result<()> {
    let text = serde_json::to_vec(order)?;
    let fds = [out.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    sendmsg(socket, &[io::IoSlice::new(&text)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}
