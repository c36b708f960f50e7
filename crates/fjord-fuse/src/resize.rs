//! Growth of a mount, asked for from outside. Owns the order and its outcome; how the two sides find
//! each other is in `crate::call`.
//!
//! Invariant: what has begun is completed, also when who asked has gone; an unmount waits for it.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

use fjord::Fs;
use fjord::resize::{NewSize, ResizeReport};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::call::{self, Call, GREETING_TIME_MAX, Kind, MESSAGE_BYTES_MAX, ReachError};
use crate::reply::Errno;

/// What is wanted: [`NewSize`].
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Order {
    Bytes(u64),
    Plus(u64),
    Device,
}

impl From<NewSize> for Order {
    fn from(size: NewSize) -> Order {
        match size {
            NewSize::Bytes(bytes) => Order::Bytes(bytes),
            NewSize::Plus(bytes) => Order::Plus(bytes),
            NewSize::Device => Order::Device,
        }
    }
}

impl From<Order> for NewSize {
    fn from(order: Order) -> NewSize {
        match order {
            Order::Bytes(bytes) => NewSize::Bytes(bytes),
            Order::Plus(bytes) => NewSize::Plus(bytes),
            Order::Device => NewSize::Device,
        }
    }
}

/// How it went.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    Done { old_bytes: u64, new_bytes: u64, old_inodes: u32, new_inodes: u32 },
    Failed { errno: i32, message: String },
}

/// Why a mount did not grow.
#[derive(Debug, Error)]
pub enum AskError {
    /// Not a mount of fjord, or served by an older fjord.
    #[error(
        "not on a fjord mount that can be resized; name the directory given to fjord mount, or \
         unmount the image and name that"
    )]
    NotServed,
    /// Another user's mount.
    #[error("only root and the user who mounted it may resize it; run this as one of them")]
    NotAllowed,
    /// The server cannot reach the socket of this process.
    #[error(
        "the process that serves the mount is in another network namespace, out of reach; run this \
         where fjord mount was run"
    )]
    OutOfReach,
    /// The server ended, or was killed.
    #[error("the mount ended meanwhile; mount the image again, and run this again")]
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

impl From<ReachError> for AskError {
    fn from(error: ReachError) -> AskError {
        match error {
            ReachError::NotServed => AskError::NotServed,
            ReachError::NotAllowed => AskError::NotAllowed,
            ReachError::OutOfReach => AskError::OutOfReach,
            ReachError::Ended => AskError::Ended,
            ReachError::Busy => AskError::Failed {
                errno: libc::EBUSY,
                message: fjord::resize::ResizeError::Busy.to_string(),
            },
            ReachError::Io { doing, source } => AskError::Io { doing, source },
        }
    }
}

/// Has the server of the mount make its file system larger. `dir` is any file or directory of the
/// mount. See [`Fs::resize`].
///
/// # Errors
/// See [`AskError`].
pub fn ask(dir: &File, size: NewSize) -> Result<ResizeReport, AskError> {
    let socket = call::reach(dir, Kind::Resize)?;
    call::tell(&socket, &Order::from(size))
        .map_err(|source| AskError::Io { doing: "cannot reach the server", source })?;
    match call::answer(&socket)? {
        Outcome::Done { old_bytes, new_bytes, old_inodes, new_inodes } => {
            Ok(ResizeReport { old_bytes, new_bytes, old_inodes, new_inodes })
        }
        Outcome::Failed { errno, message } => Err(AskError::Failed { errno, message }),
    }
}

/// Begins to resize `fs` for an authorised caller.
pub(crate) fn begin(fs: &Fs, call: &Call) -> Result<(), Errno> {
    if !call.is_known() {
        return Err(Errno(libc::EINVAL));
    }
    let failed = |error: io::Error| Errno(error.raw_os_error().unwrap_or(libc::EIO));
    let socket = call.connect().map_err(failed)?;
    let (fs, secret) = (fs.clone(), *call.secret());
    let serve = move || {
        if let Err(error) = serve(&fs, &socket, &secret) {
            tracing::warn!(%error, "cannot answer the client of a resize");
        }
    };
    std::thread::Builder::new().name("fjord-resize".into()).spawn(serve).map_err(failed)?;
    Ok(())
}

fn serve(fs: &Fs, socket: &OwnedFd, secret: &[u8; 16]) -> io::Result<()> {
    send(socket, secret, SendFlags::NOSIGNAL)?;
    call::wait_readable(socket, Instant::now() + GREETING_TIME_MAX)?;
    let mut text = [0; MESSAGE_BYTES_MAX];
    let (len, _) = recv(socket, &mut text, RecvFlags::empty())?;
    let order: Order = serde_json::from_slice(&text[..len])?;
    let outcome = match fs.resize(order.into()) {
        Ok(ResizeReport { old_bytes, new_bytes, old_inodes, new_inodes }) => {
            tracing::info!(old_bytes, new_bytes, "resized");
            Outcome::Done { old_bytes, new_bytes, old_inodes, new_inodes }
        }
        Err(error) => {
            tracing::info!(%error, "not resized");
            Outcome::Failed { errno: error.errno(), message: error.to_string() }
        }
    };
    call::tell(socket, &outcome)
}
