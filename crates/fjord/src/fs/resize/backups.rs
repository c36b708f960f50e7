//! The backups of superblock and group descriptors.
//!
//! Invariant: no transaction ever has a block of these, so that a write past the journal cannot be
//! undone by it.

use fjord_block::{Buf, DeviceExt};
use fjord_format::BlockNo;
use fjord_format::features::{Incompat, RoCompat};
use fjord_format::superblock::{FsState, RawSuperblock, SUPERBLOCK_BYTES};

use super::groups::Batch;
use crate::error::Result;
use crate::fs::FsInner;

impl FsInner {
    /// Writes all backups anew.
    ///
    /// # Errors
    /// I/O errors; `ENOSPC` of the file system below.
    pub(super) fn write_backups(&self) -> Result<()> {
        let mut batch = Batch::new(self);
        for index in 0..self.geo.desc_block_count {
            let Some(primary) = self.geo.desc_block_location(index) else { continue };
            let content = self.desc_block(primary)?.snapshot();
            for place in self.geo.desc_block_backups(index) {
                self.ensure_room(place, 1)?;
                batch.write(place, content.clone())?;
            }
        }
        let mut sb = self.sb.snapshot();
        settle(&mut sb);
        for group in self.geo.super_backup_groups() {
            // The field has 16 bits; Linux cuts the number in the same way.
            sb.s_block_group_nr.set(group.0 as u16);
            sb.update_checksum();
            let first = self.geo.group_first_block(group);
            self.write_backup(&mut batch, first, &sb)?;
        }
        batch.finish()?;
        Ok(self.device.flush()?)
    }

    /// Writes a superblock at the front of a block, and zeroes behind it.
    fn write_backup(
        &self,
        batch: &mut Batch<'_>,
        place: BlockNo,
        sb: &RawSuperblock,
    ) -> Result<()> {
        self.ensure_room(place, 1)?;
        let mut content = Buf::zeroed(self.geo.block_size as usize);
        content.make_mut()[..SUPERBLOCK_BYTES].copy_from_slice(sb.as_bytes());
        batch.write(place, content)
    }
}

/// A backup is of a file system that nobody uses: e2fsck looks into the journal in any case.
fn settle(sb: &mut RawSuperblock) {
    let mut features = sb.features();
    features.incompat.remove(Incompat::RECOVER);
    features.ro_compat.remove(RoCompat::ORPHAN_PRESENT);
    sb.set_features(&features);
    sb.set_state(sb.state() | FsState::VALID);
    sb.s_last_orphan.set(0);
}
