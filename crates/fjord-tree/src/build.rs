//! The mount that fills a new image.
//!
//! Makes filling fast and reproducible: no log, no flush before the end, no threads. A new image
//! that a crash leaves incomplete is useless, so it needs no crash safety before it is complete.
//!
//! Invariant: while it is filled, the superblock has no journal and the state "not clean"; the
//! final superblock is written when everything else is durable.

use std::sync::Arc;

use fjord::{AtimeMode, Fs, FsyncPolicyKind, MountOptions, Scheduler, Timespec, awake::LowLatency};
use fjord_block::{
    AlignedBuf, Capabilities, Class, Device, DeviceExt, DeviceStats, IoError, OpenError,
    ReadTicket, Request, Ticket,
};
use fjord_format::features::{Compat, Incompat, RoCompat};
use fjord_format::superblock::{RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSET_BYTES};

/// Memory for file pages and metadata, in bytes.
const CACHE_BYTES: u64 = 16 << 20;

/// A new image, mounted to be filled.
pub(crate) struct Build {
    pub(crate) fs: Fs,
    device: Arc<dyn Device>,
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
        let fs = Fs::open_device(Arc::new(Unflushed(device.clone())), &options)?;
        Ok(Build { fs, device, made })
    }

    /// Writes everything, makes it durable and marks the image clean.
    pub(crate) fn finish(self) -> fjord::Result<()> {
        let Build { fs, device, made } = self;
        fs.unmount()?;
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

/// A device that defers all flushes to the end, and does not allocate host space in advance: if
/// there is none, the whole image fails.
#[derive(Debug)]
struct Unflushed(Arc<dyn Device>);

impl Device for Unflushed {
    fn capabilities(&self) -> &Capabilities {
        self.0.capabilities()
    }

    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }

    fn check(&self) -> Result<(), IoError> {
        self.0.check()
    }

    fn submit(&self, batch: Vec<Request>) -> Vec<Ticket> {
        let mut flushes = Vec::new();
        let mut others = Vec::with_capacity(batch.len());
        for (place, mut request) in batch.into_iter().enumerate() {
            match &mut request {
                Request::Flush { .. } => {
                    flushes.push(place);
                    continue;
                }
                Request::Write { fua, .. } => *fua = false,
                Request::Discard { .. } | Request::WriteZeroes { .. } => {}
            }
            others.push(request);
        }
        let mut tickets = match others.is_empty() {
            true => Vec::new(),
            false => self.0.submit(others),
        };
        for place in flushes {
            tickets.insert(place, Ticket::ready(Ok(())));
        }
        tickets
    }

    fn submit_read(&self, offset: u64, bufs: Vec<AlignedBuf>, class: Class) -> ReadTicket {
        self.0.submit_read(offset, bufs, class)
    }

    fn stats(&self) -> DeviceStats {
        self.0.stats()
    }

    fn claim(&self, alone: bool) -> Result<(), OpenError> {
        self.0.claim(alone)
    }
}
