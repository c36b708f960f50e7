//! Transport of requests and replies.
//!
//! A [`Transport`] is one connection to a kernel (or, with virtiofs, to a guest). Each worker
//! thread takes a [`Channel`] of its own from it, and each request takes the [`ReplyPath`] of its
//! reply. The session knows only these three traits, so that FUSE over io_uring (one ring entry per
//! path) and virtiofs (one queue per channel, requests copied out of guest memory before they are
//! parsed) can replace /dev/fuse.
//!
//! Invariants: the reply to a request leaves through the path that the request came by. The kernel
//! keeps a list of pending requests per cloned descriptor, accepts the reply only there, and fails
//! them when the descriptor is closed; so a path stays open until its last request is answered, also
//! when its worker has ended. A path may be used by any thread, and by several at a time.

use std::io::{self, IoSlice};
use std::sync::Arc;

mod buffer;
mod clock;
mod dev;
mod duty;
mod fuse_fd;
mod polling;

pub use buffer::RequestBuf;
pub use dev::{DEV_FUSE, DevFuse, DevFuseChannel};
pub use fuse_fd::FuseFd;

/// One connection.
pub trait Transport: Send + Sync {
    /// A new way in for one worker.
    ///
    /// # Errors
    /// The connection has ended, or descriptors or memory ran out.
    fn channel(&self) -> io::Result<Box<dyn Channel>>;

    /// Ends the connection: every pending and later request fails with ENOTCONN in the kernel, and
    /// every [`Channel::receive`] returns `None`.
    ///
    /// # Errors
    /// The kernel's control file could not be written.
    fn abort(&self) -> io::Result<()>;
}

/// One worker's end of a connection.
pub trait Channel: Send {
    /// Waits for a request and puts it into `buf`; `None` when the connection has ended.
    ///
    /// # Errors
    /// The device failed permanently.
    fn receive<'b>(&mut self, buf: &'b mut RequestBuf) -> io::Result<Option<&'b [u8]>>;

    /// The way back of the last request received.
    fn reply_path(&self) -> Arc<dyn ReplyPath>;
}

/// The way back of requests.
pub trait ReplyPath: Send + Sync {
    /// Sends one reply, header first, in one piece. A request that was interrupted meanwhile is not
    /// an error.
    ///
    /// # Errors
    /// The kernel refused the reply as malformed, or memory ran out.
    fn send(&self, parts: &[IoSlice<'_>]) -> io::Result<()>;
}
