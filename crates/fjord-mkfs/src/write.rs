//! Puts a planned image on the device.
//!
//! Invariant: the primary superblock is gone before anything else is written and comes back
//! last, after a flush, so that an interrupted run leaves no file system that looks valid.

use fjord_block::{Buf, Class, Device, DeviceExt, Order, Request};
use fjord_format::bitmap;
use fjord_format::geometry::Geometry;
use fjord_format::group::{GroupDesc, GroupFlags};
use fjord_format::superblock::{RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSET_BYTES};
use fjord_format::types::{BlockNo, GroupNo};

use crate::error::Result;
use crate::files::Files;
use crate::space::{BlockRun, Space};

/// Requests under way at once.
const BATCH_REQUESTS: usize = 128;
/// Bytes of one write of descriptors or reserved blocks.
const CHUNK_BYTES: usize = 1 << 20;
/// What is cleared at the front of a device that cannot be emptied: labels of other systems.
const FRONT_BYTES: u64 = 64 * 1024;

/// Collects writes and submits them in batches.
pub(crate) struct ImageWriter<'a> {
    device: &'a dyn Device,
    geometry: &'a Geometry,
    batch: Vec<Request>,
    /// Bytes handed to the device so far.
    pub(crate) bytes_written: u64,
}

impl<'a> ImageWriter<'a> {
    pub(crate) fn new(device: &'a dyn Device, geometry: &'a Geometry) -> ImageWriter<'a> {
        ImageWriter { device, geometry, batch: Vec::new(), bytes_written: 0 }
    }

    fn push(&mut self, request: Request) -> Result<()> {
        self.batch.push(request);
        if self.batch.len() >= BATCH_REQUESTS { self.drain() } else { Ok(()) }
    }

    /// Submits what was collected and waits for all of it.
    fn drain(&mut self) -> Result<()> {
        let tickets = self.device.submit(std::mem::take(&mut self.batch));
        for ticket in tickets {
            ticket.wait()?;
        }
        Ok(())
    }

    fn write_at(&mut self, offset: u64, buf: Buf) -> Result<()> {
        self.bytes_written += buf.len() as u64;
        self.push(Request::Write {
            offset,
            bufs: vec![buf],
            order: Order::Orderless,
            fua: false,
            class: Class::Async,
        })
    }

    fn write_block(&mut self, block: BlockNo, buf: Buf) -> Result<()> {
        self.write_at(block.0 << self.geometry.block_size_bits, buf)
    }

    fn zero(&mut self, run: BlockRun) -> Result<()> {
        let bits = self.geometry.block_size_bits;
        self.push(Request::WriteZeroes { offset: run.start.0 << bits, len: run.len << bits })
    }

    /// Makes the device ready. `is_empty` says that all of it reads as zeroes already.
    pub(crate) fn begin(&mut self, is_empty: bool) -> Result<()> {
        if !is_empty {
            let len = FRONT_BYTES.min(self.device.size_bytes());
            self.push(Request::WriteZeroes { offset: 0, len })?;
            self.drain()?;
            self.device.flush()?;
        }
        Ok(())
    }

    /// Clears what must read as zeroes on a device that holds old data: special files and the
    /// inode tables that no flag calls uninitialised.
    pub(crate) fn clear(&mut self, files: &Files<'_>, space: &Space<'_>) -> Result<()> {
        for run in &files.zeroes {
            self.zero(*run)?;
        }
        let lazy = self.geometry.features.has_group_csum();
        let groups = if lazy { 1 } else { self.geometry.group_count };
        for number in 0..groups {
            let start = space.group(GroupNo(number)).inode_table;
            self.zero(BlockRun { start, len: u64::from(self.geometry.inode_table_blocks()) })?;
        }
        // Zeroes and contents of one block must not be under way together.
        self.drain()
    }

    /// Writes the contents of files and the front of the first inode table.
    pub(crate) fn files(&mut self, files: &Files<'_>, space: &Space<'_>) -> Result<()> {
        let table = space.group(GroupNo(0)).inode_table;
        self.write_block(table, Buf::from_slice(&files.table))?;
        // Neighbouring blocks go out together: the reserved descriptor blocks are many.
        let mut chunk: Vec<u8> = Vec::new();
        let mut chunk_start = BlockNo(0);
        let block_size = self.geometry.block_size as usize;
        for (block, bytes) in &files.blocks {
            let next = chunk_start.0 + (chunk.len() / block_size) as u64;
            if !chunk.is_empty() && (next != block.0 || chunk.len() >= CHUNK_BYTES) {
                self.write_block(chunk_start, Buf::from_slice(&chunk))?;
                chunk.clear();
            }
            if chunk.is_empty() {
                chunk_start = *block;
            }
            chunk.extend_from_slice(bytes);
        }
        if !chunk.is_empty() {
            self.write_block(chunk_start, Buf::from_slice(&chunk))?;
        }
        Ok(())
    }

    /// Writes the bitmaps that are not left to flags, and returns all descriptor blocks.
    pub(crate) fn groups(
        &mut self,
        files: &Files<'_>,
        space: &Space<'_>,
        tables_are_zero: bool,
    ) -> Result<Vec<u8>> {
        let geometry = self.geometry;
        let desc_size = usize::from(geometry.desc_size);
        let mut descs = vec![0; geometry.desc_block_count as usize * geometry.block_size as usize];
        let mut bits = vec![0; geometry.block_size as usize];
        for number in 0..geometry.group_count {
            let group = GroupNo(number);
            let mut desc = self.group(group, files, space, tables_are_zero, &mut bits)?;
            if !geometry.features.has_group_csum() {
                desc.flags = GroupFlags::empty();
                desc.itable_unused = 0;
            }
            let (block, offset) = (
                number / geometry.descs_per_block * geometry.block_size,
                number % geometry.descs_per_block * u32::from(geometry.desc_size),
            );
            let at = (block + offset) as usize;
            desc.encode(&mut descs[at..at + desc_size], geometry, group)?;
        }
        Ok(descs)
    }

    fn group(
        &mut self,
        group: GroupNo,
        files: &Files<'_>,
        space: &Space<'_>,
        tables_are_zero: bool,
        bits: &mut [u8],
    ) -> Result<GroupDesc> {
        let geometry = self.geometry;
        let place = space.group(group);
        let inodes_used = if group.0 == 0 { files.inodes_used } else { 0 };
        let free_inodes = geometry.inodes_per_group - inodes_used;
        let mut desc = GroupDesc {
            block_bitmap: place.block_bitmap,
            inode_bitmap: place.inode_bitmap,
            inode_table: place.inode_table,
            free_clusters: space.free_blocks(group),
            free_inodes,
            used_dirs: if group.0 == 0 { 2 } else { 0 },
            itable_unused: free_inodes,
            ..GroupDesc::default()
        };
        if tables_are_zero || group.0 == 0 {
            desc.flags |= GroupFlags::INODE_ZEROED;
        }
        if place.lazy {
            desc.flags |= GroupFlags::BLOCK_UNINIT;
        } else {
            space.fill_bitmap(group, bits);
            desc.update_block_bitmap_csum(bits, geometry)?;
            self.write_block(place.block_bitmap, Buf::from_slice(bits))?;
        }
        if geometry.features.has_group_csum() && inodes_used == 0 {
            desc.flags |= GroupFlags::INODE_UNINIT;
        } else {
            bitmap::init_inode_bitmap(bits, geometry);
            bitmap::set_range(bits, 0, inodes_used);
            desc.update_inode_bitmap_csum(bits, geometry)?;
            self.write_block(place.inode_bitmap, Buf::from_slice(bits))?;
        }
        Ok(desc)
    }

    /// Writes all copies of the descriptors.
    pub(crate) fn descriptors(&mut self, descs: &[u8]) -> Result<()> {
        let geometry = self.geometry;
        let old_bytes = geometry.old_desc_blocks() as usize * geometry.block_size as usize;
        let (old, meta) = descs.split_at(old_bytes);
        let chunks: Vec<Buf> = old.chunks(CHUNK_BYTES).map(Buf::from_slice).collect();
        let backups = geometry.super_backup_groups().map(|group| geometry.group_first_block(group));
        for start in std::iter::once(geometry.superblock_location()).chain(backups) {
            let mut offset = (start.0 + 1) << geometry.block_size_bits;
            for chunk in &chunks {
                self.write_at(offset, chunk.clone())?;
                offset += chunk.len() as u64;
            }
        }
        for (index, bytes) in meta.chunks(geometry.block_size as usize).enumerate() {
            let index = geometry.old_desc_blocks() + index as u32;
            let buf = Buf::from_slice(bytes);
            let mut places = geometry.desc_block_backups(index);
            places.extend(geometry.desc_block_location(index));
            for place in places {
                self.write_block(place, buf.clone())?;
            }
        }
        Ok(())
    }

    /// Writes the superblock backups, then, when all else is durable, the superblock.
    pub(crate) fn finish(&mut self, sb: &mut RawSuperblock) -> Result<()> {
        let geometry = self.geometry;
        for group in geometry.super_backup_groups() {
            let mut copy = *sb;
            // The field has 16 bits; Linux cuts the number in the same way.
            copy.s_block_group_nr.set(group.0 as u16);
            copy.update_checksum();
            let offset = geometry.group_first_block(group).0 << geometry.block_size_bits;
            self.write_at(offset, Buf::from_slice(copy.as_bytes()))?;
        }
        self.drain()?;
        self.device.flush()?;
        let total = self.bytes_written + SUPERBLOCK_BYTES as u64;
        sb.s_kbytes_written.set(total / 1024);
        sb.update_checksum();
        self.write_at(SUPERBLOCK_OFFSET_BYTES, Buf::from_slice(sb.as_bytes()))?;
        self.drain()?;
        self.device.flush()?;
        Ok(())
    }
}
