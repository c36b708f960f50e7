//! Snapshots of a mount, requested by another process. Owns the protocol; this file has the client
//! side, `server` that of the mount.
//!
//!
//! Once connected (`crate::call`), the client sends an order, and the file for the copy as a
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

use crate::ask::{AskError, Asked};
use crate::call;

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
            Outcome::Failed { errno, message } => {
                Err(AskError::Failed { asked: Asked::Snapshot, errno, message })
            }
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
    let socket = call::reach(dir, Asked::Snapshot)?;
    let order = Order { reflink: reflink.name().into() };
    send_order(&socket, &order, out).map_err(AskError::io("cannot reach the server"))?;
    call::answer::<Outcome>(&socket, Asked::Snapshot)?.into_result()
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
