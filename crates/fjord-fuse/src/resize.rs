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
use rustix::net::{RecvFlags, recv};
use serde::{Deserialize, Serialize};

use crate::ask::{AskError, Asked};
use crate::call::{self, Call, GREETING_TIME_MAX, MESSAGE_BYTES_MAX};
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

/// Has the server of the mount make its file system larger. `dir` is any file or directory of the
/// mount. See [`Fs::resize`].
///
/// # Errors
/// See [`AskError`].
pub fn ask(dir: &File, size: NewSize) -> Result<ResizeReport, AskError> {
    let socket = call::reach(dir, Asked::Resize)?;
    call::tell(&socket, &Order::from(size)).map_err(AskError::io("cannot reach the server"))?;
    match call::answer(&socket, Asked::Resize)? {
        Outcome::Done { old_bytes, new_bytes, old_inodes, new_inodes } => {
            Ok(ResizeReport { old_bytes, new_bytes, old_inodes, new_inodes })
        }
        Outcome::Failed { errno, message } => {
            Err(AskError::Failed { asked: Asked::Resize, errno, message })
        }
    }
}

/// Begins to resize `fs` for an authorised caller.
pub(crate) fn begin(fs: &Fs, call: &Call) -> Result<(), Errno> {
    let fs = fs.clone();
    call.serve(Asked::Resize, move |socket| serve(&fs, socket))
}

fn serve(fs: &Fs, socket: &OwnedFd) -> io::Result<()> {
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
