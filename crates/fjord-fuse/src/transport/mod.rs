//! Transport of requests and replies.
//!
//! A [`Transport`] is one connection to a kernel (or, with virtiofs, to a guest). Requests queue up in one or
//! more of its [`Queue`]s. Each worker thread takes a [`Channel`] of its own to one of these, and each request
//! takes the [`ReplyPath`] of its reply. The session knows only these traits, so that virtiofs (one queue per
//! channel, requests copied out of guest memory before they are parsed) can replace /dev/fuse.
//!
//! Invariants: the reply to a request leaves through the path that the request came by. On /dev/fuse the
//! kernel keeps a list of pending requests per cloned descriptor, accepts the reply only there, and fails
//! them when the descriptor is closed; over io_uring the reply lies in the memory that the request came in.
//! So a path stays open until its last request is answered, also when its worker has ended. A path may be
//! used by any thread, and by several at a time.

use std::io::{self, IoSlice};
use std::sync::Arc;

mod buffer;
mod clock;
mod dev;
mod duty;
mod entry;
mod fuse_fd;
mod polling;
mod ring;
mod uring;

pub use buffer::RequestBuf;
pub use dev::{DEV_FUSE, DevFuse, DevFuseChannel};
pub use fuse_fd::FuseFd;

/// Where requests wait for a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    /// /dev/fuse: all requests; with rings FORGET and INTERRUPT.
    Device,
    /// FUSE over io_uring: the requests that are made on this processor.
    Ring(u16),
}

/// One connection.
pub trait Transport: Send + Sync {
    /// A new way in for one worker, which carries writes of up to `write_len_max` bytes.
    ///
    /// # Errors
    /// The connection has ended, or descriptors or memory ran out.
    fn channel(&self, queue: Queue, write_len_max: usize) -> io::Result<Box<dyn Channel>>;

    /// How many [`Queue::Ring`]s there have to be, if this machine can have any.
    fn ring_count(&self) -> Option<u16>;

    /// Whether there have been many callers at the device for some time.
    fn is_crowded(&self) -> bool;

    /// Ends the connection: every pending and later request fails with ENOTCONN in the kernel, and
    /// every [`Channel::receive`] returns `false`.
    ///
    /// # Errors
    /// The kernel's control file could not be written.
    fn abort(&self) -> io::Result<()>;
}

/// One worker's end of a connection.
pub trait Channel: Send {
    /// Waits for a request; `false` when the connection has ended. To be called by one thread only.
    ///
    /// # Errors
    /// The device failed permanently.
    fn receive(&mut self) -> io::Result<bool>;

    /// The last request received.
    fn request(&self) -> &[u8];

    /// The way back of the last request received.
    fn reply_path(&self) -> Arc<dyn ReplyPath>;

    /// Whether the channel can take a further request: always, except where the last one holds it until it is
    /// answered.
    fn is_settled(&self) -> bool {
        true
    }

    /// Waits until that is so.
    fn settle(&mut self) {}
}

/// Fills a reply's payload, which has the given room, and returns its length or a positive errno.
pub type Fill<'a> = &'a mut dyn FnMut(&mut [u8]) -> Result<usize, i32>;

/// The way back of requests.
pub trait ReplyPath: Send + Sync {
    /// Sends one reply, header first, in one piece. A request that was interrupted meanwhile is not
    /// an error.
    ///
    /// # Errors
    /// The kernel refused the reply as malformed, or memory ran out.
    fn send(&self, parts: &[IoSlice<'_>]) -> io::Result<()>;

    /// Sends a notification, which is no reply.
    ///
    /// # Errors
    /// The kernel knows nothing that it is about, or refused it.
    fn notify(&self, parts: &[IoSlice<'_>]) -> io::Result<()>;

    /// Lets the request go without a reply.
    fn forgo(&self) {}

    /// Has the payload of a reply of up to `len_max` bytes written where the kernel takes it from, if this path
    /// has such a place; `false` if not. A failure becomes the reply.
    fn fill(&self, unique: u64, len_max: usize, fill: Fill<'_>) -> bool {
        let _ = (unique, len_max, fill);
        false
    }
}
