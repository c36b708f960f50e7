//! Images that a URL names, such as `rbd:pool/image`: what each kind of them implements.
//!
//! Owns no state. Invariant: a name belongs to the first kind whose prefix it begins with.

use std::fmt;
use std::sync::Arc;

use crate::device::Device;
use crate::error::OpenError;

/// How to open an image that a URL names.
#[derive(Clone, Copy)]
pub struct RemoteOptions<'a> {
    /// Refuse writes; takes no lock.
    pub read_only: bool,
    /// Take the image from another host that has it, which then can write nothing any more.
    pub steal: bool,
    /// Is told, once a second, what an open waits for.
    pub tell: &'a dyn Fn(&str),
}

impl fmt::Debug for RemoteOptions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RemoteOptions { read_only, steal, tell: _ } = self;
        write!(f, "RemoteOptions {{ read_only: {read_only}, steal: {steal} }}")
    }
}

/// A kind of images that a URL names.
pub trait Remote: Send + Sync + fmt::Debug {
    /// What its names begin with, such as `rbd:`.
    fn prefix(&self) -> &'static str;

    /// Opens an image; for writing, alone.
    ///
    /// # Errors
    /// [`OpenError::InUse`] names the host that has it; [`OpenError::Remote`] for what else fails.
    fn open(&self, name: &str, options: &RemoteOptions<'_>) -> Result<Arc<dyn Device>, OpenError>;

    /// Makes an image of zeroes.
    ///
    /// # Errors
    /// [`OpenError::Remote`], `EEXIST` if there is one.
    fn create(&self, name: &str, size_bytes: u64) -> Result<(), OpenError>;

    /// Whether a host has the image open for writing.
    ///
    /// # Errors
    /// [`OpenError::Remote`].
    fn is_in_use(&self, name: &str) -> Result<bool, OpenError>;

    /// Removes an image.
    ///
    /// # Errors
    /// [`OpenError::Remote`].
    fn remove(&self, name: &str) -> Result<(), OpenError>;
}
