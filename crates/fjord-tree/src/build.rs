//! The mount that fills a new image.
//!
//! Makes filling fast and reproducible: no log, no flush before the end, no threads. A new image
//! that a crash leaves incomplete is useless, so it needs no crash safety before it is complete.
//!
//! Invariant: while it is filled, the superblock has no journal and the state "not clean"; the
//! final superblock is written when everything else is durable.

use std::sync::Arc;

use fjord::{AtimeMode, Fs, FsyncPolicyKind, MountOptions, Scheduler, Timespec, awake::LowLatency};
use fjord_block::{Device, DeviceExt};
use fjord_format::features::{Compat, Incompat, RoCompat};
use fjord_format::superblock::{RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSET_BYTES};

use crate::gather::Gather;

/// Memory for file pages and metadata, in bytes.
const CACHE_BYTES: u64 = 16 << 20;

/// A new image, mounted to be filled.
pub(crate) struct Build {
    pub(crate) fs: Fs,
    device: Arc<dyn Device>,
    gather: Arc<Gather>,
    /// The superblock as it was made.
    made: RawSuperblock,
}

impl Build {
    /// Mounts the new image on the device. With `fixed_time` all times that nobody sets are that one.
    pub(crate) fn start(
        device: Arc<dyn Device>,
        fixed_time: Option<Timespec>,
    ) -> fjord::Result<Build> {
        let made = read_superblock(&*device)?;
        let mut bare = made;
        let mut features = bare.features();
        features.compat.remove(Compat::HAS_JOURNAL | Compat::FAST_COMMIT);
        features.incompat.remove(Incompat::MMP);
        bare.set_features(&features);
        bare.update_checksum();
        device.write_all_at(SUPERBLOCK_OFFSET_BYTES, bare.as_bytes())?;
        let options = MountOptions {
            fsync: FsyncPolicyKind::Compound,
            scheduler: Scheduler::Direct,
            atime: AtimeMode::Never,
            low_latency: LowLatency::Never,
            cache_size_bytes: CACHE_BYTES,
            background_threads: false,
            barrier: false,
            fill_all: true,
            fixed_time,
            ..MountOptions::default()
        };
        let gather = Arc::new(Gather::new(device.clone()));
        let fs = Fs::open_device(gather.clone(), &options)?;
        Ok(Build { fs, device, gather, made })
    }

    /// Writes everything, makes it durable and marks the image clean.
    pub(crate) fn finish(self) -> fjord::Result<()> {
        let Build { fs, device, gather, made } = self;
        fs.unmount()?;
        gather.settle()?;
        // Before the superblock that vouches for it.
        device.flush()?;
        let filled = read_superblock(&*device)?;
        let mut done = made;
        let mut features = done.features();
        // Set when the first file calls for it.
        features.ro_compat |=
            filled.features().ro_compat & (RoCompat::LARGE_FILE | RoCompat::DIR_NLINK);
        done.set_features(&features);
        done.set_free_blocks_count(filled.free_blocks_count());
        done.s_free_inodes_count = filled.s_free_inodes_count;
        done.set_wtime_seconds(filled.wtime_seconds());
        done.set_state(filled.state());
        done.update_checksum();
        device.write_all_at(SUPERBLOCK_OFFSET_BYTES, done.as_bytes())?;
        device.flush()?;
        Ok(())
    }
}

fn read_superblock(device: &dyn Device) -> fjord::Result<RawSuperblock> {
    let mut bytes = [0; SUPERBLOCK_BYTES];
    device.read_exact_at(SUPERBLOCK_OFFSET_BYTES, &mut bytes)?;
    Ok(RawSuperblock::decode(&bytes)?)
}
