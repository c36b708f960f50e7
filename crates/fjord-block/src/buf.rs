//! Buffers for direct I/O. Owns [`AlignedBuf`] (unique) and [`Buf`] (shared, copy-on-write).
//!
//! Invariants:
//! - memory of a buffer is aligned to its size class, at most to 4096 bytes: 512-byte buffers to
//!   512, buffers of 4096 bytes and more to 4096;
//! - every byte of a buffer is initialised (pool memory comes from anonymous mappings), but the
//!   contents of a new [`AlignedBuf`] are unspecified unless zeroed;
//! - a [`Buf`] that is shared never changes: [`Buf::make_mut`] copies first. Freezing a block for
//!   a commit, or a page for writeback, is a `clone()`.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::pool::{self, SizeClass};

/// Uniquely owned, aligned memory from the pool. Dropping it gives the memory back.
pub struct AlignedBuf {
    ptr: NonNull<u8>,
    len: usize,
    class: SizeClass,
}

// SAFETY: an AlignedBuf is the only owner of its memory, like Box<[u8]>.
unsafe impl Send for AlignedBuf {}
// SAFETY: a shared reference gives only shared access to plain bytes, like &Box<[u8]>.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// A buffer of `len` bytes with unspecified (old) contents, for reads that fill it completely.
    pub fn uninit(len: usize) -> Self {
        let class = SizeClass::for_len(len);
        AlignedBuf { ptr: pool::alloc(class), len, class }
    }

    /// A buffer of `len` zero bytes.
    pub fn zeroed(len: usize) -> Self {
        let mut buf = Self::uninit(len);
        buf.fill(0);
        buf
    }

    /// A copy of `data`.
    pub fn from_slice(data: &[u8]) -> Self {
        let mut buf = Self::uninit(data.len());
        buf.copy_from_slice(data);
        buf
    }

    /// Shortens the buffer to `len` bytes; longer values change nothing.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// The bytes of pool memory of this buffer (its size class).
    pub fn capacity(&self) -> usize {
        self.class.bytes()
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        // SAFETY: `ptr` came from `pool::alloc(self.class)` and nobody else owns it.
        unsafe { pool::free(self.ptr, self.class) }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `ptr` is valid for `class.bytes() >= len` initialised bytes while we own it.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes the access unique.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AlignedBuf({} bytes at {:p})", self.len, self.ptr)
    }
}

/// A shared buffer: cheap to clone, copied when written while shared.
#[derive(Clone)]
pub struct Buf(Arc<AlignedBuf>);

impl Buf {
    /// A buffer of `len` zero bytes.
    pub fn zeroed(len: usize) -> Self {
        AlignedBuf::zeroed(len).into()
    }

    /// A copy of `data`.
    pub fn from_slice(data: &[u8]) -> Self {
        AlignedBuf::from_slice(data).into()
    }

    /// Write access. A shared buffer is copied first, so that the other clones keep their contents.
    pub fn make_mut(&mut self) -> &mut [u8] {
        if Arc::get_mut(&mut self.0).is_none() {
            self.0 = Arc::new(AlignedBuf::from_slice(&self.0));
        }
        match Arc::get_mut(&mut self.0) {
            Some(buf) => buf,
            // A fresh Arc has one owner, and no weak references are ever made.
            None => unreachable!("a freshly made buffer is not shared"),
        }
    }

    /// Write access without a copy, or None when the buffer is shared.
    pub fn get_mut(&mut self) -> Option<&mut [u8]> {
        Arc::get_mut(&mut self.0).map(|buf| &mut **buf)
    }

    /// Puts `bytes` at byte `at`. Of a shared buffer what stays is copied, so that the other clones keep their contents.
    ///
    /// # Panics
    /// If the buffer ends before them.
    pub fn overwrite(&mut self, at: usize, bytes: &[u8]) {
        let end = at + bytes.len();
        if let Some(own) = Arc::get_mut(&mut self.0) {
            own[at..end].copy_from_slice(bytes);
            return;
        }
        let old = &self.0;
        let mut new = AlignedBuf::uninit(old.len());
        new[..at].copy_from_slice(&old[..at]);
        new[at..end].copy_from_slice(bytes);
        new[end..].copy_from_slice(&old[end..]);
        self.0 = Arc::new(new);
    }

    /// Whether another clone exists at this moment (for example in a write in flight).
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Whether both are clones of one buffer.
    pub fn ptr_eq(&self, other: &Buf) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The unique buffer inside, or `self` back when it is shared.
    pub fn try_into_unique(self) -> Result<AlignedBuf, Buf> {
        Arc::try_unwrap(self.0).map_err(Buf)
    }

    /// The bytes of pool memory of this buffer (its size class).
    pub fn capacity(&self) -> usize {
        self.0.capacity()
    }
}

impl From<AlignedBuf> for Buf {
    // Through memory it would wait for the copy that has just filled the buffer.
    #[inline]
    fn from(buf: AlignedBuf) -> Self {
        Buf(Arc::new(buf))
    }
}

impl Deref for Buf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl AsRef<[u8]> for Buf {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buf({} bytes, {} owners)", self.len(), Arc::strong_count(&self.0))
    }
}
