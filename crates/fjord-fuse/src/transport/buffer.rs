//! Receive buffer of a request.

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::{io, ptr::NonNull};

use crate::abi::{FUSE_MIN_READ_BUFFER, InHeader, WriteIn};

pub(super) const PAGE_SIZE: usize = 4096;
/// Header and arguments of a WRITE: what lies before its data.
const WRITE_DATA_OFFSET: usize = size_of::<InHeader>() + size_of::<WriteIn>();

/// Room for one request.
///
/// Invariants: the request starts at an address that is a multiple of 8 (so that its structures
/// can be used in place), and the data of a WRITE at one that is a multiple of 4096. Pages that no
/// request reached hold no memory.
#[derive(Debug)]
pub struct RequestBuf {
    map: NonNull<u8>,
    map_len: usize,
}

// SAFETY: the mapping is private to this value and freed only when it is dropped.
unsafe impl Send for RequestBuf {}

impl RequestBuf {
    /// Room for writes of up to `write_len_max` bytes.
    ///
    /// # Errors
    /// No memory.
    pub fn new(write_len_max: usize) -> io::Result<RequestBuf> {
        let data_len = write_len_max.next_multiple_of(PAGE_SIZE).max(FUSE_MIN_READ_BUFFER);
        let map_len = PAGE_SIZE + data_len;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice aliases nothing.
        let map = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                map_len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        let map = NonNull::new(map.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(RequestBuf { map, map_len })
    }

    /// The page before [`RequestBuf::data`]. Valid as long as `self` is.
    pub(super) fn head(&self) -> NonNull<u8> {
        self.map
    }

    /// Where the data of a WRITE lies: a page-aligned place.
    pub(super) fn data(&self) -> NonNull<[u8]> {
        // SAFETY: the mapping is longer than a page.
        let start = unsafe { self.map.add(PAGE_SIZE) };
        NonNull::slice_from_raw_parts(start, self.map_len - PAGE_SIZE)
    }

    const START: usize = PAGE_SIZE - WRITE_DATA_OFFSET;

    /// The whole room, header first.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        let len = self.map_len - Self::START;
        // SAFETY: the mapping is `map_len` bytes long, zero-filled by the kernel, owned by self.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_ptr().add(Self::START), len) }
    }

    /// The same, to read.
    pub fn as_slice(&self) -> &[u8] {
        let len = self.map_len - Self::START;
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(Self::START), len) }
    }
}

impl Drop for RequestBuf {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and no reference into it outlives self. A failure can only
        // mean that it is gone already.
        let _ = unsafe { munmap(self.map.as_ptr().cast(), self.map_len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_of_a_write_is_page_aligned() {
        let mut buf = RequestBuf::new(1 << 20).unwrap();
        let room = buf.as_mut_slice();
        assert!(room.len() >= (1 << 20) + WRITE_DATA_OFFSET);
        assert_eq!(room.as_ptr() as usize % 8, 0);
        assert_eq!(room[WRITE_DATA_OFFSET..].as_ptr() as usize % PAGE_SIZE, 0);
        room.fill(1);
    }
}
