//! The metadata of new groups on the device.
//!
//! Invariant: all of it lies behind the end of the file system, and is durable when the call
//! returns.

use fjord_block::{Buf, Class, DeviceExt, Order, Request, Ticket};
use fjord_format::BlockNo;
use fjord_format::geometry::Geometry;
use fjord_format::growth::NewGroup;

use super::no_room;
use crate::error::Result;
use crate::fs::FsInner;

/// Requests in flight.
const BATCH_REQUESTS: usize = 64;

impl FsInner {
    /// Writes the bitmaps of new groups, and zeroes into their inode tables where no flag says that
    /// these are not initialised.
    ///
    /// # Errors
    /// [`crate::Error::NoRoom`]; I/O errors. Nothing of the file system has changed.
    pub(super) fn write_groups(&self, next: &Geometry, added: &[NewGroup]) -> Result<()> {
        let size = u64::from(next.block_size);
        let mut batch = Batch::new(self);
        for NewGroup { desc, block_bitmap, inode_bitmap, .. } in added {
            let blocks = [(desc.block_bitmap, block_bitmap), (desc.inode_bitmap, inode_bitmap)];
            for (place, bits) in blocks {
                if let Some(bits) = bits {
                    self.ensure_room(place, 1).map_err(no_room)?;
                    batch.write(place, Buf::from_slice(bits))?;
                }
            }
            if !next.features.has_group_csum() {
                let len = u64::from(next.inode_table_blocks()).saturating_mul(size);
                batch.push(Request::WriteZeroes {
                    offset: self.byte_offset(desc.inode_table),
                    len,
                })?;
            }
        }
        let new_blocks = self.geo.desc_block_count..next.desc_block_count;
        for place in new_blocks.filter_map(|index| next.desc_block_location(index)) {
            self.ensure_room(place, 1).map_err(no_room)?;
        }
        batch.finish()?;
        // Also where barriers are off: it is done once, and the size of the file is among it.
        Ok(self.device.flush()?)
    }
}

/// Writes of this file and its neighbours, some at a time.
pub(super) struct Batch<'a> {
    fs: &'a FsInner,
    requests: Vec<Request>,
}

impl<'a> Batch<'a> {
    pub(super) fn new(fs: &'a FsInner) -> Batch<'a> {
        Batch { fs, requests: Vec::new() }
    }

    pub(super) fn write(&mut self, block: BlockNo, content: Buf) -> Result<()> {
        self.write_at(self.fs.byte_offset(block), content)
    }

    pub(super) fn write_at(&mut self, offset: u64, content: Buf) -> Result<()> {
        self.push(Request::Write {
            offset,
            bufs: vec![content],
            order: Order::Orderless,
            fua: false,
            class: Class::Async,
        })
    }

    fn push(&mut self, request: Request) -> Result<()> {
        self.requests.push(request);
        if self.requests.len() < BATCH_REQUESTS { Ok(()) } else { self.finish() }
    }

    /// Waits for all.
    pub(super) fn finish(&mut self) -> Result<()> {
        let tickets = self.fs.device.submit(std::mem::take(&mut self.requests));
        tickets.into_iter().try_for_each(|ticket: Ticket| Ok(ticket.wait()?))
    }
}
